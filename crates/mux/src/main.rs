//! `pdp-mux`: serves pdpd and moves packets.
//!
//! Its standard input is a listening Unix socket that pdpd
//! connects to. The process has no right to create one itself.

#![forbid(unsafe_code)]

use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;

use anyhow::Context;
use clap::Parser;
use pdp_mux::control::{MuxServer, MuxSettings};
use pdp_proto::limits::POOL_PACKETS;

/// The multiplexer/demultiplexer: PdP's data plane. Started by pdpd; needs no privilege.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Worker threads.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    workers: u16,
    /// CPUs of the workers, in order; workers beyond the list run where the kernel wants.
    #[arg(long, value_delimiter = ',')]
    cpus: Vec<usize>,
    /// Packets of 2,048 bytes in the pool, divided evenly among the workers.
    #[arg(long, default_value_t = POOL_PACKETS, value_parser = clap::value_parser!(u32).range(4096..))]
    pool_packets: u32,
}

fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stderr).init();
    // A dead worker can't be replaced in place. The process aborts and is restarted.
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        print(panic);
        std::process::abort();
    }));
    let Args { workers, cpus, pool_packets } = Args::parse();
    let settings =
        MuxSettings { workers: workers.into(), cpus, pool_packets: pool_packets as usize };
    let mux = MuxServer::start(&settings).context("can't start the mux")?;
    let listener = std::io::stdin().as_fd().try_clone_to_owned().map(UnixListener::from);
    let served = listener.and_then(|listener| mux.serve(&listener));
    served.context("can't serve on standard input, which must be a listening Unix socket")
}
