//! Guests as OCI containers, and the small processes around them.
//!
//! A guest is a container run by `runc`; a helper is a plain process beside it in its cgroup. Both
//! stand under a `pdp-shim`, so that they outlive the process that made them: whoever comes next
//! adopts them by what their directory says ([`Runtime::state`], [`Runtime::list`]). What is
//! intended is written there before each side effect, so that [`Runtime::delete`] removes what
//! half-exists.
//!
//! Directories are named by ids, beside each other in one tree ([`Paths::records`]) that is root's alone: nothing
//! that a guest or a helper can write is in it, and no program's path is read from it.
//!
//! | file in a guest's or helper's directory | what |
//! |---|---|
//! | `record.json` | what it is, with a version; written first, removed last |
//! | `shim`, `pid` | process id and start time of the shim, and of the guest's or helper's process |
//! | `exit` | how it ended |
//! | `commands` | how a guest's commands are ([`Runtime::commands`]) |
//! | `bundle/` | the OCI bundle (guests) |
//!
//! What of a guest outlasts it is apart from that too ([`volumes`]).
//!
//! What it wrote, with times, is in two bounded files apart from that ([`Runtime::logs`]).
//!
//! Directories above must be searchable by everybody (mode 0711): a guest's user ids have no
//! right on the host but that.

pub mod binds;
mod bounded;
mod bundle;
pub mod cgroup;
mod disk;
mod error;
pub mod image;
pub mod init;
mod log;
mod process;
mod profile;
mod root;
mod runtime;
mod seccomp;
mod shim;
mod spec;
mod status;
mod store;
pub mod tree;
mod view;
pub mod volumes;
pub mod work;

pub use bundle::TERMINALS_MAX;
pub use cgroup::LimitHits;
pub use disk::free_bytes;
pub use error::{Error, Result, words};
pub use log::LogFile;
pub use process::{Exit, Process};
pub use runtime::{Paths, Runtime, State};
pub use shim::main as shim_main;
pub use spec::{
    Bind, Check, Command, File, GuestSpec, HelperSpec, ID_BYTES_MAX, LOG_BYTES_MAX, Limits, Owned,
    Probe, Profile, Restart, Root, RunAs, UserRange, Volume,
};
pub use status::{CommandState, CommandStatus, WORDS_BYTES_MAX};
pub use store::RECORD_VERSION;
pub use view::INOTIFY_INSTANCES_MAX;
