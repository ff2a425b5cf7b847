//! The mux: PdP's data plane.
//!
//! The modules, in the order in which they handle a packet:
//!
//! - [`worker`]: the round, with all stages in one place.
//! - [`external`] and [`netdev`]: external interfaces and their netdevs
//!   (AF_XDP, memif, [`generator`]). [`scheduler`], [`wfq`] and
//!   [`traffic_class`] choose the next frame on an interface with a capacity.
//! - [`demux`] ([`classify`]): finds the vnet and port of a frame from outside.
//! - [`vnet_scheduler`]: divides the worker's time among vnets.
//! - [`ingress`] ([`police`]): ingress checks.
//! - [`relay`] ([`segment`]): vlinks that are more than a wire.
//! - [`forward`] ([`engine`]): vrouters that the mux itself forwards for.
//! - [`deliver`] ([`distribute`], [`group`]): distributes frames to forwarding guests.
//! - [`channel`] ([`memif`], [`peer`], [`sleep`]): channels to peers, and when to wake these.
//! - [`order`]: restores the order of frames that several guests forwarded.
//! - [`dispatch`]: frames that guests and TAP helpers send.
//! - [`egress`] ([`shape`], [`queues`], [`line`], [`encapsulate`]): egress.
//!
//! Beside the packet path: [`control`] (requests of pdpd, and memif
//! connections), [`capture`], [`trace`], and [`meter`] (cycles).
//!
//! Promises:
//!
//! - Every frame that was received or made is sent, handed to a TAP,
//!   consumed by a guest, or counted under one reason at one port.
//! - The mux trusts nothing that a peer writes. It copies the data first and checks the copy.
//! - No stage allocates, locks or makes a system call for a single packet.

#![forbid(unsafe_code)]

pub mod actions;
pub mod capture;
pub mod channel;
pub mod classify;
pub mod connections;
pub mod control;
pub mod core;
pub mod counters;
pub mod delay_line;
pub mod deliver;
pub mod demux;
pub mod dispatch;
pub mod distribute;
pub mod egress;
pub mod encapsulate;
pub mod engine;
pub mod external;
pub mod fields;
pub mod forward;
pub mod generator;
pub mod group;
pub mod ingress;
pub mod memif;
pub mod meter;
pub mod netdev;
pub mod order;
pub mod packets;
pub mod peer;
pub mod police;
pub mod queues;
pub mod relay;
pub mod ringers;
pub mod scheduler;
pub mod segment;
pub mod shape;
pub mod sleep;
pub mod slowpath;
pub mod timers;
pub mod trace;
pub mod traffic_class;
pub mod vnet;
pub mod vnet_scheduler;
pub mod wake;
pub mod wfq;
pub mod worker;
