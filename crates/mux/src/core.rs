//! What all vnets of a worker share: time, packets, external interfaces, and the way to sleep.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use pdp_ip::Forwarder;

use crate::classify::PortRef;
use crate::connections::{Connections, Dropped};
use crate::counters::OuterReason;
use crate::engine::Fate;
use crate::exit::Tools;
use crate::external::{Exits, External};
use crate::group::Groups;
use crate::lane::Pulled;
use crate::meter::Meter;
use crate::packets::{Batch, Packets};
use crate::ringers::Ringers;
use crate::segment::To;
use crate::sleep::Alarm;
use crate::trace::Tracer;
use crate::wake::Wake;

/// Room to collect packets in, taken while it is used; kept so that nothing is allocated.
#[derive(Debug, Default)]
pub struct Scratch {
    /// Empty batches, for whoever needs one for a while.
    pub spare: Vec<Batch>,
    /// For packets that come back.
    pub back: Batch,
    /// For whose frames from outside are.
    pub whose: Vec<Result<PortRef, OuterReason>>,
    /// For frames that are brought together by where they go.
    pub groups: Groups,
    /// Where a segment says that frames go.
    pub fates: Vec<To>,
    /// For what peers sent.
    pub pulled: Pulled,
    /// For what engines decide.
    pub fates_of_engines: Vec<Fate>,
    /// For ports whose copies found no packet.
    pub missed: Vec<u16>,
    /// What they work with.
    pub forwarder: Forwarder,
}

impl Scratch {
    /// An empty batch, which goes back to those that are spare.
    #[inline]
    pub fn batch(&mut self) -> Batch {
        self.spare.pop().unwrap_or_default()
    }
}

/// Shared by all stages of one worker.
#[derive(Debug)]
pub struct Core {
    /// Nanoseconds since the worker started, as of the beginning of this round.
    pub now_ns: u64,
    /// When sleeping peers are woken.
    pub alarm: Alarm,
    /// Packets.
    pub packets: Packets,
    /// External interfaces by slot.
    pub externals: Vec<Option<External>>,
    /// Traces.
    pub tracer: Tracer,
    /// Room to collect packets in.
    pub scratch: Scratch,
    /// What each stage takes.
    pub meter: Meter,
    /// What the worker waits for.
    pub connections: Connections,
    /// Who rings its peers' doorbells.
    pub ringers: Ringers,
    start: Instant,
    start_wall_ns: u64,
}

impl Core {
    /// `keeper` is woken for what is sent to `dropped`.
    pub fn new(
        packets: Packets,
        dropped: Sender<Dropped>,
        keeper: Arc<Wake>,
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
            meter: Meter::default(),
            connections: Connections::new(dropped, keeper)?,
            ringers,
            start: Instant::now(),
            start_wall_ns: wall.as_nanos() as u64,
        })
    }

    /// Sets the time.
    pub fn tick(&mut self) {
        self.now_ns = self.start.elapsed().as_nanos() as u64;
    }

    /// Time of day as of the beginning of this round, nanoseconds since 1970.
    pub fn wall_ns(&self) -> u64 {
        self.start_wall_ns + self.now_ns
    }

    /// The exits of the external interface in `slot`, and what they work with.
    #[inline]
    pub fn exits(&mut self, slot: usize) -> Option<(&mut Exits, Tools<'_>)> {
        let Self { now_ns, externals, packets, connections, alarm, scratch, .. } = self;
        let External { counters, exits, .. } = externals.get_mut(slot)?.as_mut()?;
        let (now_ns, back) = (*now_ns, &mut scratch.back);
        Some((exits, Tools { now_ns, counters, packets, connections, alarm, back }))
    }

    /// The external interface in `slot`.
    pub fn external(&mut self, slot: usize) -> Option<&mut External> {
        self.externals.get_mut(slot)?.as_mut()
    }
}
