//! The management helper of one node: a path out of the node
//! and published ports into it, separate from the vnet.
//!
//! There is one process per node, in the node's cgroup. For the path out it runs a passt
//! (<https://passt.top>) as its child. The helper starts as root of the host with one thread. It
//! listens on the machine, makes the node's interface, enters the node's network namespace, and
//! becomes an ordinary user without any capability. All that it opens afterwards is in the node.
//!
//! From before, it keeps listening sockets, sockets for the node's datagrams and echo requests, and
//! one to query the kernel for routes. passt is the same user from its first instruction on. Like
//! any program of an ordinary user, it has sockets on the machine for TCP. The helper checks the
//! destination of every packet.
//!
//! | file | what |
//! |---|---|
//! | `publish` | ports of the machine that lead into the node |
//! | `outside` | frames between the node's interface, passt and the sockets of flows |
//! | `frames` | decisions on frames, and their translation (pure) |
//! | `sockets` | a connected socket on the machine for each flow |
//! | `udp`, `echo` | flows of datagrams and of echo requests |
//! | `flows` | the socket of each flow, and its expiry (pure) |
//! | `number_share` | limits of a node's flows, given those of other nodes |
//! | `reachability` | the machine kernel's routing decisions |
//! | `privileges` | dropping all privileges |

#![forbid(unsafe_code)]

pub mod echo;
pub mod flows;
pub mod frames;
#[cfg(test)]
mod namespace;
pub mod number_share;
pub mod outside;
pub mod privileges;
pub mod publish;
pub mod reachability;
pub mod sockets;
pub mod udp;
