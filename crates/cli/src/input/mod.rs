//! Words and files of the command line.

pub mod files;
pub mod filter;
pub mod name;
pub mod nodes;
pub mod selector;
pub mod times;
