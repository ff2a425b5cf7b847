//! Forwards frames between a node's TAPs and the mux.
//!
//! The mux never touches a TAP. A write to one runs the whole receiving
//! network stack, which is charged to this process in the node's cgroup.
//! It has one thread, which sleeps while there are no frames.
//!
//! - From the mux, on the trunk: writes a frame tagged `Deliver` to the TAP of its vport. If the
//!   TAP refuses (queue full, interface down), the frame is dropped and counted. This delays no
//!   other TAP.
//! - From a TAP: sends a frame to the mux tagged `Out`. While there is no mux, or no room on the
//!   trunk, it does not read TAPs. The kernel keeps their queues, bounded (txqueuelen), and counts
//!   its drops there. So a mux that soon returns costs few frames, or none.
//! - The trunk is a path. If the mux is gone, the helper retries every [`helper::RETRY_MS`],
//!   without touching the TAPs.
//! - pdpd passes the TAPs on the control socket; a new pdpd gets them back there
//!   ([`pdp_proto::tap`]). Without control socket (inside a guest) they are inherited.
//!
//! Limits: [`VPORTS_MAX`] TAPs, frames of 64 KiB, [`CONNECTIONS_MAX`] control connections.

mod control;
mod helper;
mod ports;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;

use anyhow::{Context, bail, ensure};
use clap::Parser;
#[cfg(doc)]
use pdp_proto::listener::CONNECTIONS_MAX;
use pdp_proto::listener::ControlListener;
use pdp_wire::tag::VPORTS_MAX;

/// Forward frames between TAPs and the mux.
#[derive(Debug, Parser)]
#[command(version)]
struct TapArguments {
    /// Socket where the mux listens for this helper
    #[arg(long, value_name = "PATH")]
    trunk: PathBuf,
    /// Serve pdpd at standard input, a listening Unix socket
    #[arg(long, required_unless_present = "inherit")]
    control: bool,
    /// TAPs that are already open: vport and descriptor of each
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

/// Takes over descriptors that were open when the process started. Call it first.
fn take_inherited(inherited: &[(u16, RawFd)]) -> anyhow::Result<BTreeMap<u16, OwnedFd>> {
    let mut taken = BTreeMap::new();
    for (number, &(vport, fd)) in inherited.iter().enumerate() {
        ensure!(
            inherited[..number].iter().all(|&(v, f)| v != vport && f != fd),
            "--inherit {vport}={fd}: the vport or the descriptor is used twice"
        );
        if let Err(error) = std::fs::symlink_metadata(format!("/proc/self/fd/{fd}")) {
            bail!("--inherit {vport}={fd}: descriptor {fd} is not open: {error}");
        }
        // SAFETY: it is open, and taken once. The process
        // has not opened it (so far only std has, 0 to 2).
        taken.insert(vport, unsafe { OwnedFd::from_raw_fd(fd) });
    }
    Ok(taken)
}

fn main() -> anyhow::Result<()> {
    let arguments = TapArguments::parse();
    let inherited = take_inherited(&arguments.inherit)?;
    let control = || -> std::io::Result<_> {
        let listener = std::io::stdin().as_fd().try_clone_to_owned()?;
        ControlListener::new(listener.into())
    };
    let control = arguments.control.then(control).transpose();
    let control = control.context("standard input must be a listening Unix socket")?;
    let mut helper = helper::TapService::new(&arguments.trunk, control).context("can't start")?;
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
