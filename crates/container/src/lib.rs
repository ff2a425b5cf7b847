//! Guests as OCI containers, and the small processes around them.
//!
//! A guest is a container run by `runc`; a helper is a plain process beside it in its cgroup. Both
//! run under a `pdp-shim`, so that they outlive the process that made them. A new daemon adopts
//! them by the contents of their directory ([`Runtime::state`], [`Runtime::list`]). Before each
//! side effect the intent is recorded there, so that [`Runtime::delete`] also removes incomplete
//! guests.
//!
//! Directories are named by ids and lie in one tree ([`RuntimePaths::records`]) that only root can
//! write. Guests and helpers can write nothing in it, and no program's path is read from it.
//!
//! | file in a guest's or helper's directory | what |
//! |---|---|
//! | `record.json` | what it is, with a version; written first, removed last |
//! | `shim`, `pid` | process id and start time of the shim, and of the guest's or helper's process |
//! | `exit` | how it ended |
//! | `commands` | how a guest's commands are ([`Runtime::commands`]) |
//! | `bundle/` | the OCI bundle (guests) |
//!
//! Volumes outlast a guest and lie elsewhere ([`volumes`]).
//!
//! Output with times is in two files of bounded size, which lie elsewhere too ([`Runtime::logs`]).
//!
//! All directories above must be searchable by everybody (mode 0711). A guest's user ids have no
//! other right on the host.

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
pub mod safe_removal;
mod seccomp;
mod shim;
mod spec;
mod status;
mod store;
mod view;
pub mod volumes;
pub mod work;

pub use bundle::TERMINALS_MAX;
pub use cgroup::LimitHits;
pub use disk::free_bytes;
pub use error::{Error, Result, error_chain};
pub use log::LogFile;
pub use process::{Process, ProcessOutcome};
pub use runtime::{ProcessState, Runtime, RuntimePaths};
pub use shim::main as shim_main;
pub use spec::{
    BindMount, CommandProbe, CommandRestart, FileOwner, GuestCommand, GuestFile, GuestSpec,
    HelperSpec, ID_BYTES_MAX, LOG_BYTES_MAX, Limits, Probe, Profile, RootFilesystem, RunAs,
    UserRange, VolumeMount,
};
pub use status::{GuestCommandStatus, WORDS_BYTES_MAX};
pub use store::RECORD_VERSION;
pub use view::INOTIFY_INSTANCES_MAX;
