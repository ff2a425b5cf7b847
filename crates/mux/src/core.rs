//! State that all vnets of a worker share: time, packets, external interfaces, and sleep.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use pdp_ip::IpForwarder;

use crate::channel::Pulled;
use crate::classify::PortRef;
use crate::connections::{Dropped, WorkerConnections};
use crate::counters::OuterReason;
use crate::engine::EngineVerdict;
use crate::external::{WorkerExternal, WorkerNetdevs};
use crate::group::FrameGrouper;
use crate::meter::CycleMeter;
use crate::netdev::NetdevContext;
use crate::packets::{PacketBatch, Packets};
use crate::ringers::Ringers;
use crate::segment::SegmentVerdict;
use crate::sleep::Alarm;
use crate::trace::Tracer;
use crate::wake::Wake;

/// Buffers that a stage takes while it uses them. They are reused, so that no stage allocates.
#[derive(Debug, Default)]
pub struct Scratch {
    /// Empty batches.
    pub spare: Vec<PacketBatch>,
    /// Packets that a netdev gives back.
    pub back: PacketBatch,
    /// Ports of the frames from outside.
    pub ingress_ports: Vec<Result<PortRef, OuterReason>>,
    /// Buffers for grouping frames by destination.
    pub groups: FrameGrouper,
    /// Destinations that a segment chose for frames.
    pub segment_verdicts: Vec<SegmentVerdict>,
    /// Frames and completions from peers.
    pub pulled: Pulled,
    /// Verdicts of engines.
    pub engine_verdicts: Vec<EngineVerdict>,
    /// Ports whose copies found no free packet.
    pub missed: Vec<u16>,
    /// The engines' buffers.
    pub forwarder: IpForwarder,
}

impl Scratch {
    /// Takes an empty batch. The caller pushes it back to `spare`.
    #[inline]
    pub fn batch(&mut self) -> PacketBatch {
        self.spare.pop().unwrap_or_default()
    }
}

/// State that all stages of one worker share.
#[derive(Debug)]
pub struct Core {
    /// Nanoseconds since the worker started, as of the beginning of this round.
    pub now_ns: u64,
    /// Decides when sleeping peers are woken.
    pub alarm: Alarm,
    /// Free packets.
    pub packets: Packets,
    /// External interfaces by slot.
    pub externals: Vec<Option<WorkerExternal>>,
    /// Traces.
    pub tracer: Tracer,
    /// Buffers of the stages.
    pub scratch: Scratch,
    /// Cost of each stage.
    pub meter: CycleMeter,
    /// Descriptors that the worker waits for.
    pub connections: WorkerConnections,
    /// Threads that ring its peers' doorbells.
    pub ringers: Ringers,
    start: Instant,
    start_wall_ns: u64,
}

impl Core {
    /// Creates the state. What the worker sends to `dropped` wakes `listener_wake`.
    pub fn new(
        packets: Packets,
        dropped: Sender<Dropped>,
        listener_wake: Arc<Wake>,
        ringers: Ringers,
    ) -> std::io::Result<Self> {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(Self {
            now_ns: 0,
            alarm: Alarm::default(),
            packets,
            externals: vec![],
            tracer: Tracer::default(),
            scratch: Scratch::default(),
            meter: CycleMeter::default(),
            connections: WorkerConnections::new(dropped, listener_wake)?,
            ringers,
            start: Instant::now(),
            start_wall_ns: wall.as_nanos() as u64,
        })
    }

    /// Updates the time.
    pub fn tick(&mut self) {
        self.now_ns = self.start.elapsed().as_nanos() as u64;
    }

    /// Returns the time of day as of the beginning of this round, nanoseconds since 1970.
    pub fn wall_ns(&self) -> u64 {
        self.start_wall_ns + self.now_ns
    }

    /// Returns the netdevs of the external interface in `slot`, and the context that they work in.
    #[inline]
    pub fn netdevs(&mut self, slot: usize) -> Option<(&mut WorkerNetdevs, NetdevContext<'_>)> {
        let Self { now_ns, externals, packets, connections, alarm, scratch, .. } = self;
        let WorkerExternal { counters, netdevs, .. } = externals.get_mut(slot)?.as_mut()?;
        let (now_ns, back) = (*now_ns, &mut scratch.back);
        Some((netdevs, NetdevContext { now_ns, counters, packets, connections, alarm, back }))
    }

    /// Returns the external interface in `slot`.
    pub fn external(&mut self, slot: usize) -> Option<&mut WorkerExternal> {
        self.externals.get_mut(slot)?.as_mut()
    }
}
