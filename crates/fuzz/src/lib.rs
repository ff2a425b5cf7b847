//! Hostile bytes for everything that reads untrusted data.
//!
//! A [`FuzzTarget`] feeds bytes to one component and panics if that breaks a promise. Beyond not
//! panicking itself, the component must keep lengths in bounds, write back unchanged what it reads,
//! and agree with a second method. `tests/bounded.rs` runs every target on its corpus and on
//! mutations of it. `make fuzz` runs them for long, guided by coverage.
//!
//! Limits: an input has at most [`FuzzTarget::bytes_max`] bytes; longer ones are cut.

mod card;
mod filters;
mod guest;
mod http;
mod image;
mod input;
mod memif;
mod messages;
mod mirror;
pub mod mutate;
mod mux;
mod records;
mod runtime;
mod slowpath;
mod spec;
mod state;
mod wire;

use std::path::{Path, PathBuf};

/// Fuzz target.
#[derive(Clone, Copy, Debug)]
pub struct FuzzTarget {
    /// Name, and that of its corpus.
    pub name: &'static str,
    /// Longest input.
    pub bytes_max: usize,
    /// Feeds an input. Panics if a promise is broken.
    pub run: fn(&[u8]),
}

/// Longest input of a target that reads one frame.
const FRAME: usize = 2048;

/// Longest input of a target that reads several items in sequence.
const SEQUENCE: usize = 8192;

macro_rules! targets {
    ($($name:literal, $bytes_max:expr, $run:path;)*) => {
        &[$(FuzzTarget { name: $name, bytes_max: $bytes_max, run: $run }),*]
    };
}

/// All targets.
pub const TARGETS: &[FuzzTarget] = targets! {
    "ethernet", FRAME, wire::ethernet;
    "ipv4", FRAME, wire::ipv4;
    "ipv6", FRAME, wire::ipv6;
    "udp", FRAME, wire::udp;
    "vxlan", 64, wire::vxlan;
    "tag", 64, wire::tag;
    "checksum", FRAME, wire::checksum;
    "flow", FRAME, wire::flow;
    "outer", FRAME, wire::outer;
    "encapsulate", FRAME, wire::encapsulate;
    "classify", FRAME, mux::classify;
    "vnet-check", SEQUENCE, mux::vnet_check;
    "worker", SEQUENCE, mux::worker;
    "capture", SEQUENCE, mux::capture;
    "router", SEQUENCE, guest::router;
    "card-frames", SEQUENCE, card::frames;
    "card-registers", SEQUENCE, card::registers;
    "guest-runtime", SEQUENCE, runtime::guests;
    "routes-to-guest", SEQUENCE, guest::routes;
    "routes-from-guest", SEQUENCE, messages::routes_from_guest;
    "channel", SEQUENCE, messages::channel;
    "exec-frames", SEQUENCE, messages::exec_frames;
    "netlink", SEQUENCE, mirror::netlink;
    "memif-server", SEQUENCE, memif::server;
    "memif-client", SEQUENCE, memif::client;
    "memif-rings", SEQUENCE, memif::rings;
    "spec", SEQUENCE, spec::spec;
    "pcap", SEQUENCE, spec::pcap;
    "http", SEQUENCE, http::http;
    "image-layer", 1 << 16, image::layer;
    "image-layout", SEQUENCE, image::layout;
    "image-inbox", 1 << 16, image::inbox;
    "image-archive", 1 << 16, image::archive;
    "state", 1 << 16, state::state;
    "records", SEQUENCE, records::records;
    "filters", SEQUENCE, filters::filters;
    "slowpath", SEQUENCE, slowpath::slowpath;
};

impl FuzzTarget {
    /// Returns the target of this name.
    pub fn named(name: &str) -> Option<Self> {
        TARGETS.iter().find(|target| target.name == name).copied()
    }

    /// Feeds an input, cut to the longest length.
    pub fn feed(&self, bytes: &[u8]) {
        (self.run)(&bytes[..bytes.len().min(self.bytes_max)]);
    }

    /// Directory of its corpus.
    pub fn corpus(&self) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(self.name)
    }
}
