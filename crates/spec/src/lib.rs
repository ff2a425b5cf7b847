//! Specs: what users write, as types; what is wrong with it, with file, line, value, bound and
//! what to do; the JSON Schema made from the same types.
//!
//! A spec is YAML in the shape of Kubernetes objects, several documents a file. [`parse`] makes
//! objects of files, [`check()`] makes one [`Intent`] of objects and what there is already, with
//! all defaults filled in and all power allocated. Both return everything that is wrong, and
//! change nothing. No I/O, no clock. Never panics, whatever the text.
//!
//! Limits: [`limits`].

#![forbid(unsafe_code)]

mod bind;
mod check;
mod command;
mod count;
mod diagnostic;
mod expand;
pub mod frames;
pub mod limits;
mod link;
mod management;
mod object;
mod only;
mod parse;
pub mod reference;
pub mod registry;
pub mod remains;
mod route;
pub mod schema;
mod shape;
pub mod shared;
pub mod sysctl;
mod tree;
mod tunnel;
pub mod units;
mod usage;
mod volume;

pub use bind::{Bind, BindParts};
pub use check::{
    Descriptors, Existing, Intent, InterfaceFacts, Placed, Shares, Vnets, check, check_images,
    remarks, tenant_of,
};
pub use command::{
    ExecCommand, ExecTask, Names, NodeCommand, Ready, RestartPolicy, Run, Task, bad_workdir,
};
pub use count::count;
pub use diagnostic::{Diagnostic, render};
pub use link::{
    Leaving, Link, LinkQueue, QUEUE_FRAMES_DEFAULT, QUEUE_FRAMES_DEFAULT_BEFORE, Segment, Step,
};
pub use management::{Management, ManagementGrant};
pub use object::*;
pub use parse::{Document, SourceFile, parse};
pub use route::{Hop, NextHop, RouteKind, RouteScope, StaticRoute, Via, WeightedHop};
pub use tunnel::{External, Geneve, Grant, Gre, Udp, Vlan, Vxlan};
pub use usage::{RUN_BYTES, Usage};
pub use volume::{Volume, VolumeParts};
