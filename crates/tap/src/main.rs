//! Carries frames between a node's TAPs and the mux.
//!
//! The mux never touches a TAP: what runs on a write to one, the whole receiving stack, is charged
//! to this process, which is in the node's cgroup. One thread; asleep when nothing comes.
//!
//! - From the mux, on the trunk: a frame tagged `Deliver` is written to the TAP of its vport. A
//!   TAP that refuses (no room, interface down) drops it, which is counted, and holds up no other.
//! - From a TAP: a frame goes to the mux tagged `Out`. While there is no mux, or no room on the
//!   trunk, TAPs are left unread: the kernel keeps their queues, bounded (txqueuelen), and counts
//!   what it drops there, so that a mux that is soon back costs few frames, or none.
//! - The trunk is a path: a mux that went is tried again every [`helper::RETRY_MS`]. TAPs are not
//!   touched by that.
//! - pdpd hands over the TAPs on the control socket, and gets them back from there when it is a
//!   new one ([`pdp_proto::tap`]). Without control socket (inside a guest) they are inherited.
//!
//! Limits: [`VPORTS_MAX`] TAPs, frames of 64 KiB, [`control::CONNECTIONS_MAX`] control connections.

mod control;
mod helper;
mod ports;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;

use anyhow::{Context, bail, ensure};
use clap::Parser;
use pdp_wire::tag::VPORTS_MAX;

use crate::control::Control;

/// Carries frames between TAPs and the mux.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Socket where the mux listens for this helper
    #[arg(long, value_name = "PATH")]
    trunk: PathBuf,
    /// Serve pdpd at standard input, a Unix socket that listens
    #[arg(long, required_unless_present = "inherit")]
    control: bool,
    /// TAPs that are open already: vport and descriptor of each
    #[arg(long, value_name = "VPORT=FD", value_delimiter = ',', value_parser = inherit)]
    inherit: Vec<(u16, RawFd)>,
}

fn inherit(text: &str) -> Result<(u16, RawFd), String> {
    let wrong = || format!("{text:?} is not VPORT=FD with VPORT below {VPORTS_MAX} and FD above 2");
    let (vport, fd) = text.split_once('=').ok_or_else(wrong)?;
    match (vport.parse(), fd.parse()) {
        (Ok(vport), Ok(fd)) if usize::from(vport) < VPORTS_MAX && fd > 2 => Ok((vport, fd)),
        _ => Err(wrong()),
    }
}

/// Takes over descriptors that were open when the process started. To be called first.
fn take_inherited(wanted: &[(u16, RawFd)]) -> anyhow::Result<BTreeMap<u16, OwnedFd>> {
    let mut taken = BTreeMap::new();
    for (number, &(vport, fd)) in wanted.iter().enumerate() {
        ensure!(
            wanted[..number].iter().all(|&(v, f)| v != vport && f != fd),
            "--inherit {vport}={fd}: the vport or the descriptor is there twice"
        );
        if let Err(error) = std::fs::symlink_metadata(format!("/proc/self/fd/{fd}")) {
            bail!("--inherit {vport}={fd}: descriptor {fd} is not open: {error}");
        }
        // SAFETY: it is open, was not opened by us (nothing was yet, but for std's 0 to 2), and
        // is taken once.
        taken.insert(vport, unsafe { OwnedFd::from_raw_fd(fd) });
    }
    Ok(taken)
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let inherited = take_inherited(&arguments.inherit)?;
    let control = || -> std::io::Result<_> {
        let listener = std::io::stdin().as_fd().try_clone_to_owned()?;
        Control::new(listener.into())
    };
    let control = arguments.control.then(control).transpose();
    let control = control.context("standard input is to be a Unix socket that listens")?;
    let mut helper = helper::Helper::new(&arguments.trunk, control).context("can't start")?;
    for (vport, tap) in inherited {
        helper.inherit(vport, tap).with_context(|| format!("vport {vport}"))?;
    }
    helper.run().context("can't go on")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inherited_descriptors_are_checked() {
        assert_eq!(inherit("7=3"), Ok((7, 3)));
        for wrong in ["", "7", "7=2", "7=-1", "256=3", "x=3", "7=3=4"] {
            assert!(inherit(wrong).is_err(), "{wrong}");
        }
        assert!(take_inherited(&[(0, 9999)]).is_err());
        assert!(take_inherited(&[(0, 1000), (0, 1001)]).is_err());
    }
}
