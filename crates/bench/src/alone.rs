//! A mux inside this program: transits and segments between its own sources and sinks, or memif.
//!
//! This measures links without guests, TAPs and daemon. The worker has its own CPU, and sleeps
//! while there is no traffic.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pdp_memif::{ConnectionState, Listener, MemifClient, MemifSettings};
use pdp_model::{PortStats, Stats};
use pdp_mux::control::{MuxServer, MuxSettings};
use pdp_proto::mux::*;
use pdp_testbed::retry;
use pdp_wire::vlan;

/// Packets of the mux, of 2,048 bytes.
const POOL_PACKETS: usize = 32_768;

/// Largest IP packet of an external interface, bytes.
const MTU: u32 = 1600;

/// Longest time to connect a program.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// Name of the virtual network.
const VNET: &str = "v";

/// A running mux with one worker.
pub struct SingleWorkerMux {
    mux: MuxServer,
    /// For sockets.
    directory: tempfile::TempDir,
}

/// Counters of external ends at one moment.
#[derive(Clone, Debug)]
pub struct TimedStats {
    /// Time of the request.
    pub at: Instant,
    /// All counters.
    pub stats: Stats,
}

impl SingleWorkerMux {
    /// Starts it with its worker on this CPU.
    pub fn start(cpu: usize) -> Result<Self> {
        let settings = MuxSettings { workers: 1, cpus: vec![cpu], pool_packets: POOL_PACKETS };
        Ok(Self { mux: MuxServer::start(&settings)?, directory: tempfile::tempdir()? })
    }

    /// Adds an external interface that sends these frames in turn, `pps` per
    /// second (0: as many as possible), `count` in total (0: unlimited), and
    /// drops received frames. Without frames it is a sink.
    pub fn generator(&self, name: &str, frames: &[Vec<u8>], pps: u64, count: u64) -> Result<()> {
        self.put_generator(
            name,
            frames,
            GeneratorConfig { pps, frames: count, number_at: None },
            None,
        )
    }

    /// Adds an external interface that drops received frames and takes at most its capacity.
    pub fn sink(&self, name: &str, capacity_bps: Option<u64>) -> Result<()> {
        self.put_generator(
            name,
            &[],
            GeneratorConfig { pps: 0, frames: 0, number_at: None },
            capacity_bps,
        )
    }

    fn put_generator(
        &self,
        name: &str,
        frames: &[Vec<u8>],
        generator: GeneratorConfig,
        capacity_bps: Option<u64>,
    ) -> Result<()> {
        let mut file = tempfile::tempfile()?;
        let mut bytes = Vec::new();
        for frame in frames {
            bytes.extend(u16::try_from(frame.len())?.to_le_bytes());
            bytes.extend(frame);
        }
        file.write_all(&bytes)?;
        let outlet = OutletConfig::Generator(generator);
        let external = ExternalConfig { capacity_bps, ..ExternalConfig::new(name, MTU, outlet) };
        self.done(MuxRequest::PutExternal(external), vec![file.into()])
    }

    /// Adds an external memif interface, connected to this program.
    pub fn memif(&self, name: &str) -> Result<MemifClient> {
        let socket = self.directory.path().join(format!("{name}.sock"));
        let listener = Listener::bind(&socket)?;
        self.done(MuxRequest::Listen { sockets: vec![socket.clone()] }, vec![listener.into()])?;
        let outlet = OutletConfig::Memif { socket: socket.clone() };
        self.done(MuxRequest::PutExternal(ExternalConfig::new(name, MTU, outlet)), vec![])?;
        let mut client = MemifClient::new(&socket, 0, "bench", MemifSettings::default())?;
        retry(CONNECT_MAX, Duration::from_millis(1), name, || {
            ensure!(client.poll() == ConnectionState::Up, "it is not connected");
            Ok(())
        })?;
        Ok(client)
    }

    /// Replaces all vlinks by these. They start with counters of 0.
    pub fn replace_vlinks(&self, vlinks: Vec<Vlink>) -> Result<()> {
        self.clear()?;
        let vnet = VnetConfig { name: VNET.into(), police: None, nodes: vec![], vlinks };
        self.done(MuxRequest::PutVnet(Box::new(vnet)), vec![])
    }

    /// Removes all vlinks.
    pub fn clear(&self) -> Result<()> {
        match self.mux.handle(MuxRequest::DeleteVnet { name: VNET.into() }, vec![]) {
            MuxReply::Done | MuxReply::Failed { .. } => Ok(()),
            other => bail!("{other:?}"),
        }
    }

    fn done(&self, request: MuxRequest, descriptors: Vec<OwnedFd>) -> Result<()> {
        match self.mux.handle(request, descriptors) {
            MuxReply::Done => Ok(()),
            other => bail!("{other:?}"),
        }
    }

    /// Reads the current counters. The worker reads those of all ends between two rounds.
    pub fn counted(&self) -> Result<TimedStats> {
        let at = Instant::now();
        match self.mux.handle(MuxRequest::Stats { vnet: Some(VNET.into()) }, vec![]) {
            MuxReply::Stats(stats) => Ok(TimedStats { at, stats: *stats }),
            other => bail!("{other:?}"),
        }
    }

    /// Like [`counted`](Self::counted), but as soon as one
    /// more frame has left by this end, within `most`.
    pub fn counted_at_frame(&self, end: &str, most: Duration) -> Result<TimedStats> {
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

impl TimedStats {
    /// Counters of an external end.
    pub fn end(&self, name: &str) -> Result<&PortStats> {
        let outside = self.stats.vnets.get(VNET).and_then(|vnet| vnet.nodes.get(OUTSIDE));
        outside.and_then(|node| node.ports.get(name)).with_context(|| format!("no end {name}"))
    }

    /// Frames sent by an end since `before`.
    pub fn sent_since(&self, before: &Self, end: &str) -> Result<u64> {
        Ok(self.end(end)?.sent - before.end(end)?.sent)
    }

    /// Frames sent by all ends of this interface since `before`.
    pub fn left_since(&self, before: &Self, interface: &str) -> u64 {
        let sent = |it: &Self| it.stats.externals.get(interface).map_or(0, |it| it.sent);
        sent(self) - sent(before)
    }

    /// Seconds since `before`.
    pub fn since(&self, before: &Self) -> f64 {
        (self.at - before.at).as_secs_f64()
    }

    /// Busy cycles of the worker since `before`.
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

/// End that uses a whole interface, with its name.
pub fn whole(interface: &str) -> VlinkEnd {
    let (name, interface) = (interface.to_owned(), interface.to_owned());
    VlinkEnd::External { name, interface, by: Encapsulation::Interface }
}

/// End that is a VLAN of an interface; its name combines both.
pub fn vlan_of(interface: &str, id: u16) -> VlinkEnd {
    let by = Encapsulation::Vlan(vlan::VlanTunnel { id });
    VlinkEnd::External { name: format!("{interface}.{id}"), interface: interface.into(), by }
}

/// Vlink between these ends, with these egress settings.
pub fn vlink(name: impl Into<String>, ends: Vec<VlinkEnd>, egress: EgressConfig) -> Vlink {
    let segment = (ends.len() > 2).then_some(SegmentConfig { addresses: 16_384, flood_pps: 1000 });
    let egress = vec![egress; ends.len()];
    Vlink {
        name: name.into(),
        ends,
        leaving: egress,
        up: true,
        segment,
        schedule: None,
        queues: vec![],
    }
}

/// Frame of `bytes` bytes without FCS between two MAC addresses.
pub fn frame(to: [u8; 6], from: [u8; 6], bytes: usize) -> Vec<u8> {
    let mut frame = [&to[..], &from, &[0x88, 0xb5]].concat();
    frame.resize(bytes, 0);
    frame
}

/// Adds a VLAN tag to a frame, which makes it longer.
pub fn tagged(mut frame: Vec<u8>, id: u16) -> Vec<u8> {
    let [high, low] = id.to_be_bytes();
    frame.splice(12..12, [0x81, 0, high, low]);
    frame
}
