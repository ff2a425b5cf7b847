//! The PdP daemon: decides and configures, never on a packet's or a route's way.

#![forbid(unsafe_code)]

pub mod http;
