//! Tests that a neighbour may slow down, and nothing else.

mod behaviour;
mod boundaries;
mod changes;
mod crashes;
mod dependencies;
mod examples;
mod exceptions;
mod externals;
mod guarantees;
mod hooks;
mod hostile;
mod images;
mod install;
mod isolation;
mod keeper;
mod limits;
mod memif_interfaces;
mod node;
mod shared;
mod steps;
mod stock_debian;
mod syscalls;
mod tenants;
mod tunnels;
mod upgrades;
mod verbs;
