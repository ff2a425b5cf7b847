//! The mux alone, inside this program: transits and segments between sources and sinks in it, or memif.
//!
//! What links do is measured without guests, TAPs and daemon. The worker has a CPU of its own, and sleeps whenever
//! nobody sends.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pdp_memif::{Client, Link, Listener, Settings as MemifSettings};
use pdp_mux::control::{Mux, Settings};
use pdp_proto::mux::*;
use pdp_wire::vlan;

/// Packets of the mux, of 2,048 bytes.
const POOL_PACKETS: usize = 32_768;

/// Largest IP packet of an external interface, bytes.
const MTU: u32 = 1600;

/// A program is connected within this time.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// Name of the virtual network.
const VNET: &str = "v";

/// A running mux with one worker.
pub struct Alone {
    mux: Mux,
    /// For sockets.
    directory: tempfile::TempDir,
}

/// What ends outside have counted until a moment.
#[derive(Clone, Debug)]
pub struct Counted {
    /// When they were asked for.
    pub at: Instant,
    /// All of them.
    pub stats: Stats,
}

impl Alone {
    /// With its worker on this CPU.
    pub fn start(cpu: usize) -> Result<Self> {
        let settings = Settings { workers: 1, cpus: vec![cpu], pool_packets: POOL_PACKETS };
        Ok(Self { mux: Mux::start(&settings)?, directory: tempfile::tempdir()? })
    }

    /// An external interface that makes these frames in turn, so many a second (0: as many as are taken) and so many
    /// in all (0: no end), and ends those that come. Without frames, a sink.
    pub fn generator(&self, name: &str, frames: &[Vec<u8>], pps: u64, count: u64) -> Result<()> {
        self.put_generator(name, frames, Generator { pps, frames: count, number_at: None }, None)
    }

    /// One that ends what comes, and takes no more than its capacity.
    pub fn sink(&self, name: &str, capacity_bps: Option<u64>) -> Result<()> {
        self.put_generator(
            name,
            &[],
            Generator { pps: 0, frames: 0, number_at: None },
            capacity_bps,
        )
    }

    fn put_generator(
        &self,
        name: &str,
        frames: &[Vec<u8>],
        generator: Generator,
        capacity_bps: Option<u64>,
    ) -> Result<()> {
        let mut file = tempfile::tempfile()?;
        let mut bytes = Vec::new();
        for frame in frames {
            bytes.extend(u16::try_from(frame.len())?.to_le_bytes());
            bytes.extend(frame);
        }
        file.write_all(&bytes)?;
        let outlet = Outlet::Generator(generator);
        let external = External { capacity_bps, ..External::new(name, MTU, outlet) };
        self.done(Request::PutExternal(external), vec![file.into()])
    }

    /// An external interface of this program's; connected.
    pub fn memif(&self, name: &str) -> Result<Client> {
        let socket = self.directory.path().join(format!("{name}.sock"));
        let listener = Listener::bind(&socket)?;
        self.done(Request::Listen { sockets: vec![socket.clone()] }, vec![listener.into()])?;
        let outlet = Outlet::Memif { socket: socket.clone() };
        self.done(Request::PutExternal(External::new(name, MTU, outlet)), vec![])?;
        let mut client = Client::new(&socket, 0, "bench", MemifSettings::default())?;
        let start = Instant::now();
        while client.poll() != Link::Up {
            ensure!(start.elapsed() < CONNECT_MAX, "{name} is not connected");
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(client)
    }

    /// These vlinks and no others. They begin anew, with counters of 0.
    pub fn put(&self, vlinks: Vec<Vlink>) -> Result<()> {
        self.clear()?;
        let vnet = Vnet { name: VNET.into(), police: None, nodes: vec![], vlinks };
        self.done(Request::PutVnet(Box::new(vnet)), vec![])
    }

    /// No vlinks.
    pub fn clear(&self) -> Result<()> {
        match self.mux.handle(Request::DeleteVnet { name: VNET.into() }, vec![]) {
            Reply::Done | Reply::Failed { .. } => Ok(()),
            other => bail!("{other:?}"),
        }
    }

    fn done(&self, request: Request, descriptors: Vec<OwnedFd>) -> Result<()> {
        match self.mux.handle(request, descriptors) {
            Reply::Done => Ok(()),
            other => bail!("{other:?}"),
        }
    }

    /// Counters of now: the worker takes those of all ends between two rounds.
    pub fn counted(&self) -> Result<Counted> {
        let at = Instant::now();
        match self.mux.handle(Request::Stats { vnet: Some(VNET.into()) }, vec![]) {
            Reply::Stats(stats) => Ok(Counted { at, stats: *stats }),
            other => bail!("{other:?}"),
        }
    }

    /// The same, as soon as one more frame has left by this end, within `most`.
    pub fn counted_at_frame(&self, end: &str, most: Duration) -> Result<Counted> {
        let first = self.counted()?;
        let sent = first.end(end)?.sent;
        loop {
            let next = self.counted()?;
            if next.end(end)?.sent != sent || next.at - first.at > most {
                return Ok(next);
            }
        }
    }
}

impl Counted {
    /// Of an end outside.
    pub fn end(&self, name: &str) -> Result<&PortStats> {
        let outside = self.stats.vnets.get(VNET).and_then(|vnet| vnet.nodes.get(OUTSIDE));
        outside.and_then(|node| node.ports.get(name)).with_context(|| format!("no end {name}"))
    }

    /// Frames that left by an end since then.
    pub fn sent_since(&self, before: &Self, end: &str) -> Result<u64> {
        Ok(self.end(end)?.sent - before.end(end)?.sent)
    }

    /// Frames that left by all ends of this interface since then.
    pub fn left_since(&self, before: &Self, interface: &str) -> u64 {
        let sent = |it: &Self| it.stats.externals.get(interface).map_or(0, |it| it.sent);
        sent(self) - sent(before)
    }

    /// Time since then, seconds.
    pub fn since(&self, before: &Self) -> f64 {
        (self.at - before.at).as_secs_f64()
    }

    /// Cycles of the worker since then in which it had something to do.
    pub fn cycles_since(&self, before: &Self) -> u64 {
        let busy = |it: &Self| -> u64 {
            let stages = it.stats.workers.iter().flat_map(|worker| &worker.stages);
            let busy = stages.filter(|stage| stage.stage != "idle" && stage.stage != "sleep");
            busy.map(|stage| stage.cycles).sum()
        };
        busy(self) - busy(before)
    }

    /// Frames dropped at all ends.
    pub fn dropped(&self) -> u64 {
        let nodes = self.stats.vnets.values().flat_map(|vnet| vnet.nodes.values());
        let ports = nodes.flat_map(|node| node.ports.values());
        ports.flat_map(|port| port.dropped.values()).sum()
    }
}

/// An end that has all of an interface, and its name.
pub fn whole(interface: &str) -> End {
    let (name, interface) = (interface.to_owned(), interface.to_owned());
    End::External { name, interface, by: Encapsulation::Interface }
}

/// An end that is a VLAN of an interface; its name is of both.
pub fn vlan_of(interface: &str, id: u16) -> End {
    let by = Encapsulation::Vlan(vlan::Tunnel { id });
    End::External { name: format!("{interface}.{id}"), interface: interface.into(), by }
}

/// A vlink between these ends, from which frames leave so.
pub fn vlink(name: impl Into<String>, ends: Vec<End>, leaving: Leaving) -> Vlink {
    let segment = (ends.len() > 2).then_some(Segment { addresses: 16_384, flood_pps: 1000 });
    let leaving = vec![leaving; ends.len()];
    Vlink { name: name.into(), ends, leaving, up: true, segment, schedule: None, queues: vec![] }
}

/// A frame of so many bytes without check sequence between two link addresses.
pub fn frame(to: [u8; 6], from: [u8; 6], bytes: usize) -> Vec<u8> {
    let mut frame = [&to[..], &from, &[0x88, 0xb5]].concat();
    frame.resize(bytes, 0);
    frame
}

/// The same with the tag of a VLAN, which is not among these bytes.
pub fn tagged(mut frame: Vec<u8>, id: u16) -> Vec<u8> {
    let [high, low] = id.to_be_bytes();
    frame.splice(12..12, [0x81, 0, high, low]);
    frame
}
