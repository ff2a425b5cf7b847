//! The TAPs by vport, with their counters.

use std::collections::BTreeMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, OwnedFd};

use pdp_model::TapStats;
use pdp_proto::tap::{TapPort, TapPortStats};
use pdp_wire::tag::VPORTS_MAX;
use rustix::event::epoll;

/// One TAP.
#[derive(Debug)]
struct Tap {
    name: String,
    fd: OwnedFd,
}

/// All TAPs.
#[derive(Debug)]
pub struct TapPorts {
    taps: BTreeMap<u16, Tap>,
    /// Vports in the order of the last `Serve`.
    order: Vec<u16>,
    /// Counters of every vport that ever had a TAP or a frame.
    stats: BTreeMap<u16, TapStats>,
    /// Watches only the TAPs, so that one call stops reading all of them.
    epoll: OwnedFd,
}

impl TapPorts {
    /// Makes an empty set of TAPs.
    pub fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Self { taps: BTreeMap::new(), order: Vec::new(), stats: BTreeMap::new(), epoll })
    }

    /// Descriptor that is readable when a TAP is.
    pub fn epoll(&self) -> impl AsFd + '_ {
        self.epoll.as_fd()
    }

    /// Replaces the TAPs by these, or fails and changes nothing.
    pub fn replace(&mut self, ports: Vec<TapPort>, fds: Vec<OwnedFd>) -> Result<(), String> {
        if ports.len() != fds.len() {
            return Err(format!("{} ports and {} descriptors", ports.len(), fds.len()));
        }
        // A new set beside the old one: epoll distinguishes several descriptors of one TAP.
        let mut fresh = Self::new().map_err(|error| error.to_string())?;
        for (port, fd) in ports.into_iter().zip(fds) {
            let TapPort { vport, name } = port;
            fresh.add(vport, name, fd)?;
        }
        std::mem::swap(&mut fresh.stats, &mut self.stats);
        *self = fresh;
        for vport in self.order.clone() {
            self.stats_of(vport);
        }
        Ok(())
    }

    /// Adds a TAP.
    pub fn add(&mut self, vport: u16, name: String, fd: OwnedFd) -> Result<(), String> {
        if usize::from(vport) >= VPORTS_MAX {
            return Err(format!("vport {vport} ({name}): the highest is {}", VPORTS_MAX - 1));
        }
        if self.taps.contains_key(&vport) {
            return Err(format!("vport {vport} ({name}) is used twice"));
        }
        let failed = |error: rustix::io::Errno| format!("vport {vport} ({name}): {error}");
        let flags = rustix::fs::fcntl_getfl(&fd).map_err(failed)?;
        rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK).map_err(failed)?;
        let data = epoll::EventData::new_u64(vport.into());
        epoll::add(&self.epoll, &fd, data, epoll::EventFlags::IN).map_err(failed)?;
        self.taps.insert(vport, Tap { name, fd });
        self.order.push(vport);
        self.stats_of(vport);
        Ok(())
    }

    /// The TAPs and their descriptors, in the order of the last `Serve`.
    pub fn taps_and_descriptors(&self) -> (Vec<TapPort>, Vec<std::os::fd::BorrowedFd<'_>>) {
        self.order
            .iter()
            .filter_map(|vport| Some((*vport, self.taps.get(vport)?)))
            .map(|(vport, tap)| (TapPort { vport, name: tap.name.clone() }, tap.fd.as_fd()))
            .unzip()
    }

    /// Counters by vport.
    pub fn stats(&self) -> Vec<TapPortStats> {
        let stats = self.stats.iter();
        stats.map(|(&vport, stats)| TapPortStats { vport, stats: stats.clone() }).collect()
    }

    /// Counters of a vport.
    pub fn stats_of(&mut self, vport: u16) -> &mut TapStats {
        self.stats.entry(vport).or_default()
    }

    /// Writes a frame, given in pieces, to a TAP, and counts it.
    pub fn write(&mut self, vport: u16, frame: &[IoSlice<'_>]) {
        let written = match self.taps.get(&vport) {
            Some(tap) => rustix::io::retry_on_intr(|| rustix::io::writev(&tap.fd, frame)).is_ok(),
            None => false,
        };
        let stats = self.stats_of(vport);
        if written {
            stats.to_tap += 1;
        } else {
            stats.to_tap_refused += 1;
        }
    }

    /// Reads a frame from a TAP; `None` if there is none.
    pub fn read(&self, vport: u16, space: &mut [IoSliceMut<'_>]) -> Option<usize> {
        let tap = self.taps.get(&vport)?;
        rustix::io::retry_on_intr(|| rustix::io::readv(&tap.fd, space)).ok()
    }

    /// Collects the vports of readable TAPs in `ready`.
    pub fn ready(&self, ready: &mut Vec<u16>) -> io::Result<()> {
        let mut events = Vec::with_capacity(VPORTS_MAX);
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&now)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        for &epoll::Event { flags, data } in &events {
            // `add` set this value, which is below VPORTS_MAX.
            let vport = data.u64() as u16;
            if !flags.intersects(epoll::EventFlags::ERR | epoll::EventFlags::HUP) {
                ready.push(vport);
            } else if let Some(tap) = self.taps.get(&vport) {
                // Its interface is gone; it would wake the helper again and again.
                eprintln!("pdp-tap: vport {vport} ({}) has lost its interface", tap.name);
                epoll::delete(&self.epoll, &tap.fd)?;
            }
        }
        Ok(())
    }
}
