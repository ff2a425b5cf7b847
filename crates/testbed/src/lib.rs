//! Test bed: PdP nodes and other machines in network namespaces of one computer, for end-to-end
//! tests, measurements, and the demo. Needs root.
//!
//! - [`PdpNode`] is any node of this machine: its places, the `pdp` command that reaches it, and
//!   what it holds (processes, mounts, cgroups). [`TemporaryNode`] makes and removes one.
//! - [`TestMachine`] is a network namespace with commands in it.
//! - [`run`], [`output_of`], and [`Background`] run commands. Functions that begin with `try_`
//!   return errors; the others panic.
//! - [`eventually`] and [`retry`] wait, with a deadline and a reason.

#![forbid(unsafe_code)]

mod command;
mod iperf;
mod machine;
pub mod meter;
mod node;
pub mod ovs;
pub mod specs;
mod temporary;
mod wait;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

pub use command::{
    Background, COMMAND_MAX, CommandError, enter, finish, ip_batch, kill, output_of, run, sh,
    try_sh,
};
pub use iperf::TcpResult;
pub use machine::{TestMachine, remove_machines};
pub use node::{MonitoredProcess, PdpNode};
pub use temporary::TemporaryNode;
pub use wait::{EVENTUALLY_MAX, POLL_PAUSE, end_on_signals, eventually, interrupted, retry};

/// Directory of all binaries, if not beside this program.
static BINARIES: OnceLock<PathBuf> = OnceLock::new();

/// Takes all binaries from this directory from now on, to
/// measure another build. Only the first call counts.
pub fn use_binaries_from(directory: &Path) {
    BINARIES.get_or_init(|| directory.to_owned());
}

/// Path of a binary of this workspace: beside this program,
/// or beside its directory (tests and examples).
pub fn bin(name: &str) -> PathBuf {
    if let Some(directory) = BINARIES.get() {
        return directory.join(name);
    }
    let program = std::env::current_exe().expect("path of the running program");
    let mut paths = program.ancestors().skip(1).take(2).map(|directory| directory.join(name));
    let path = paths.find(|path| path.exists());
    path.unwrap_or_else(|| panic!("{name} is missing; run `cargo build --bins` first"))
}
