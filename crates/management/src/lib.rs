//! The management helper of one node: a way out of it and ports into it, beside the vnet.
//!
//! One process a node, in the node's cgroup, and for the way out a passt (<https://passt.top>) as its child. It
//! starts as root of the host with one thread: listens on the machine, makes the node's interface, enters the node's
//! network namespace, and becomes an ordinary user without any capability. What it opens from then on is in the
//! node. It holds of the machine what it opened before: listening sockets, sockets for the node's datagrams and echo
//! requests, and one to ask the kernel for routes. passt is that user too, from its first instruction on, and has
//! sockets on the machine for TCP, as any program of an ordinary user has. Where all these lead is judged here, a packet
//! at a time.
//!
//! | file | what |
//! |---|---|
//! | `publish` | ports of the machine that lead into the node |
//! | `outside` | frames between the node's interface, passt and the sockets of flows |
//! | `frames` | which of them go, and as what (pure) |
//! | `sockets` | a connected socket on the machine for each flow |
//! | `udp`, `echo` | flows of datagrams and of echo requests |
//! | `flows` | which flow has which socket, and until when (pure) |
//! | `share` | how many flows a node may have beside other nodes |
//! | `ways` | what the machine's kernel would do with an address |
//! | `privileges` | out of all of them |

#![forbid(unsafe_code)]

pub mod echo;
pub mod flows;
pub mod frames;
#[cfg(test)]
mod namespace;
pub mod outside;
pub mod privileges;
pub mod publish;
pub mod share;
pub mod sockets;
pub mod udp;
pub mod ways;
