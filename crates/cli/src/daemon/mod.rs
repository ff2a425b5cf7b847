//! The daemon: connections, names, watches, commands in nodes.

pub mod complete;
pub mod connection;
pub mod follow;
pub mod launch;
pub mod node_command;
