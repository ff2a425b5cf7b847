//! Commands, each with its arguments.

pub mod access;
pub mod capture;
pub mod change;
pub mod cp;
pub mod events;
pub mod exec;
pub mod experiment;
pub mod export;
pub mod fastpath;
pub mod fdb;
pub mod get;
pub mod images;
pub mod inspect;
pub mod machine;
pub mod many;
pub mod restart;
pub mod routes;
pub mod stats;
pub mod tenants;
pub mod top;
pub mod validate;
pub mod wait;
pub mod watch;
