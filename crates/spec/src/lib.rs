//! Specs: their types, their checks and their JSON Schema, which is generated
//! from the types. Errors have file, line, value, bound and advice.
//!
//! A spec is YAML in the form of Kubernetes objects, with several documents per file.
//! [`parse`] turns files into objects. [`check()`] turns objects and the existing state
//! into one [`Intent`], with all defaults filled in and all power allocated. Both return
//! all errors, and change nothing. No I/O, no clock. Never panics, whatever the text.
//!
//! Limits: [`limits`].

#![forbid(unsafe_code)]

mod bind;
mod check;
mod command;
mod count;
mod diagnostic;
mod expand;
mod file;
mod frame_limit;
pub mod frames;
mod image;
pub mod limits;
mod link;
mod management;
mod nearest;
mod node_check;
mod object;
mod only;
mod parse;
mod path;
mod plane;
mod process;
pub mod reference;
pub mod registry;
pub mod remains;
mod route;
pub mod schema;
mod shape;
pub mod shared;
mod source;
pub mod sysctl;
mod tree;
mod tunnel;
pub mod units;
mod usage;
mod volume;

pub use bind::{Bind, BindParts};
pub use check::{
    Descriptors, Existing, Intent, InterfaceFacts, PlacedVnet, PowerShares, Vnets, check,
    check_images, remarks, tenant_of,
};
pub use command::{
    Command, ExecCommand, ExecTask, NameList, NodeCommand, ReadinessCheck, RestartPolicy,
    RestartScope, Task, bad_workdir,
};
pub use count::count;
pub use diagnostic::{Diagnostic, render};
pub use file::File;
pub use frame_limit::FrameLimit;
pub use image::{Image, ImageForm, ImageSource};
pub use link::{
    Link, LinkEgress, LinkQueue, LinkScheduleStep, QUEUE_FRAMES_DEFAULT,
    QUEUE_FRAMES_DEFAULT_BEFORE, Segment,
};
pub use management::{Management, ManagementGrant};
pub use object::*;
pub use parse::{Document, parse};
pub use plane::*;
pub use process::NodeTask;
pub use route::{MultipathHop, NextHop, RouteKind, RouteScope, StaticRoute, Via, WeightedHop};
pub use source::SourceFile;
pub use tunnel::{External, Geneve, Grant, Gre, Udp, Vlan, Vxlan};
pub use usage::{RUN_BYTES, Usage};
pub use volume::{Volume, VolumeParts};
