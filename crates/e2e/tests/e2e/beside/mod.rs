//! Tests that a neighbour may slow down, and nothing else.

// It takes longest, so it is begun first: libtest goes by names.
#[path = "stock_debian.rs"]
mod _stock_debian;
mod boundaries;
mod changes;
mod crashes;
mod dependencies;
mod examples;
mod exceptions;
mod externals;
mod guarantees;
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
mod syscalls;
mod tenants;
mod tunnels;
mod upgrades;
mod verbs;
