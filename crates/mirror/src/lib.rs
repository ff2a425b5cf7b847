//! The route mirror: follows the kernel of one control guest, and tells its forwarding guests.
//!
//! One process a vrouter, one thread, in the control guest's cgroup: churn is paid for by who
//! makes it. The way of a route:
//!
//! | file | what |
//! |---|---|
//! | `netlink` | sockets to the kernel |
//! | `kernel` | bytes to [`kernel::Event`]s |
//! | `follower` | notifications, and dumps where they don't do |
//! | `table` | the copy, and what to tell of it (pure) |
//! | `aliases` | the routes of one prefix, in the kernel's order (pure) |
//! | `prefixes` | a map by prefix (pure) |
//! | `paths` | hops, nexthop objects, interfaces (pure) |
//! | `hooks` | what in the kernel treats packets otherwise than guests do |
//! | `listing` | a kernel's routes, read anew |
//! | `guests` | frames to forwarding guests, what they have applied |
//! | `control`, `tables` | pdpd's questions |
//! | `process` | namespaces and privileges |

#![forbid(unsafe_code)]

pub mod aliases;
pub mod control;
pub mod follower;
pub mod guests;
pub mod hooks;
pub mod kernel;
pub mod listing;
pub mod netlink;
pub mod paths;
pub mod prefixes;
pub mod process;
pub mod table;
pub mod tables;
