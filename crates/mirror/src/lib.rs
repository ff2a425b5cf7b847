//! Route mirror: follows the kernel of one control guest, and updates its forwarding guests.
//!
//! There is one process per vrouter, with one thread, in the control guest's cgroup. So the control
//! guest pays for the route changes that it makes. Path of a route:
//!
//! | file | what |
//! |---|---|
//! | `kernel` | messages of the kernel (`crates/netlink`) to [`kernel::KernelEvent`]s |
//! | `follower` | notifications, and dumps where they do not suffice |
//! | `table` | the copy, and the updates for guests (pure) |
//! | `aliases` | the routes of one prefix, in the kernel's order (pure) |
//! | `prefixes` | a map by prefix (pure) |
//! | `paths` | hops, nexthop objects, interfaces (pure) |
//! | `hooks` | kernel features that handle packets differently than guests do |
//! | `listing` | a kernel's routes, read anew |
//! | `guests` | frames to forwarding guests, and the routes that they applied |
//! | `control`, `tables` | pdpd's requests |
//! | `process` | namespaces and privileges |

#![forbid(unsafe_code)]

pub mod aliases;
pub mod control;
pub mod follower;
pub mod guests;
pub mod hooks;
pub mod kernel;
pub mod listing;
pub mod paths;
pub mod prefixes;
pub mod process;
pub mod table;
pub mod tables;
