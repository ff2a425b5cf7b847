//! A vnet whose guests and TAP helper are channels made for the test. Whatever the
//! order of their steps and the vnet's, no frame waits for a peer that stays asleep.

mod common;

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, mpsc};

use common::*;
use pdp_afxdp::PacketBuffer;
use pdp_model::GuestStats;
use pdp_mux::channel::{PeerChannel, PeerConnection, PeerFault, Pulled};
use pdp_mux::core::Core;
use pdp_mux::packets::Packets;
use pdp_mux::ringers::Ringers;
use pdp_mux::sleep::{Alarm, WAKE_NS, WakeablePeer as Sleeper};
use pdp_mux::vnet::{IDLE_NS, MuxVnet as Live, NodePeer};
use pdp_mux::wake::Wake;
use pdp_proto::mux::*;
use pdp_wire::tag::{PuntClass, Tag, TagVerdict};
use proptest::prelude::*;

const PACKETS: usize = 256;
const GUESTS: u32 = 2;
/// Slots of each ring.
const RING: usize = 4;

/// Both rings, and the sleep state of each side.
#[derive(Debug, Default)]
struct Line {
    pushed: Vec<Tag>,
    shown: VecDeque<Tag>,
    unheard: usize,
    sent: VecDeque<Tag>,
    full: bool,
    worker_armed: bool,
    worker_rung: bool,
    peer_armed: bool,
    peer_rung: bool,
    peer_sleeps: bool,
    is_tap: bool,
    taken: usize,
}

#[derive(Clone, Debug, Default)]
struct Fake(Arc<Mutex<Line>>);

impl Fake {
    fn line(&self) -> MutexGuard<'_, Line> {
        self.0.lock().unwrap()
    }

    /// Does the guest's next step. False if it sleeps and was not rung.
    fn step(&self) -> bool {
        let mut line = self.line();
        if line.peer_sleeps {
            line.peer_sleeps = !std::mem::take(&mut line.peer_rung);
            line.peer_armed &= line.peer_sleeps;
            return !line.peer_sleeps;
        }
        if (line.sent.len() < RING || line.is_tap)
            && let Some(tag) = line.shown.pop_front()
        {
            line.taken += 1;
            if !line.is_tap {
                let punts = line.taken.is_multiple_of(3);
                let verdict =
                    if punts { TagVerdict::Punt(PuntClass::Local) } else { TagVerdict::Out };
                line.sent.push_back(Tag { verdict, ..out(1 - tag.vport, 0) });
                line.worker_rung |= line.worker_armed;
            }
        } else if line.peer_armed {
            line.peer_sleeps = true;
        } else {
            line.peer_armed = true;
        }
        true
    }

    /// Makes a frame of the guest's own, for which it wakes by itself.
    fn make(&self) {
        let mut line = self.line();
        (line.peer_sleeps, line.peer_armed) = (false, false);
        if line.sent.len() < RING {
            line.sent.push_back(Tag { last: false, ..out(0, 0) });
            line.worker_rung |= line.worker_armed;
        }
    }
}

impl Sleeper for Fake {
    type Fault = PeerFault;

    fn show(&mut self) -> Result<bool, PeerFault> {
        let mut line = self.line();
        let pushed = std::mem::take(&mut line.pushed);
        line.unheard += pushed.len();
        line.shown.extend(&pushed);
        Ok(!pushed.is_empty())
    }

    fn is_worth(&self) -> bool {
        self.line().unheard > RING / 2
    }

    fn awaits_room(&mut self) -> bool {
        let mut line = self.line();
        let room = line.full && line.sent.len() <= RING / 2;
        line.full &= !room;
        room
    }

    fn ring(&mut self, _: &mut Alarm) -> Result<(), PeerFault> {
        let mut line = self.line();
        line.unheard = 0;
        line.peer_rung |= std::mem::take(&mut line.peer_armed);
        Ok(())
    }

    fn arm(&mut self) -> bool {
        let mut line = self.line();
        line.worker_armed = line.sent.is_empty();
        line.worker_armed
    }

    fn disarm(&mut self) {
        self.line().worker_armed = false;
    }
}

impl PeerChannel for Fake {
    fn attach(&mut self, attach: AttachMode, _: u8) {
        self.line().is_tap = attach == AttachMode::Tap;
    }

    fn room(&mut self) -> usize {
        let line = self.line();
        RING - line.pushed.len() - line.shown.len()
    }

    fn push(&mut self, first: u16, frames: &[PacketBuffer]) -> Result<usize, PeerFault> {
        let room = self.room().min(frames.len());
        let tags = frames[..room].iter().map(|it| Tag::deliver((it.port - first) as u8, 0));
        self.line().pushed.extend(tags);
        Ok(room)
    }

    fn pull(
        &mut self,
        ports: Range<u16>,
        max: usize,
        completions: usize,
        packets: &mut Packets,
        pulled: &mut Pulled,
    ) -> Result<(), PeerFault> {
        let mut line = self.line();
        line.full |= line.sent.len() == RING;
        while pulled.frames < max
            && pulled.completed < completions
            && let Some(tag) = line.sent.pop_front()
        {
            let mut packet = packets.take().unwrap();
            packet.set_len(60).unwrap();
            pulled.add(ports.start, tag, Some(packet));
        }
        Ok(())
    }

    fn has_sent(&mut self) -> bool {
        !self.line().sent.is_empty()
    }

    fn doorbell(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

struct World {
    core: Core,
    vnet: Live,
    guests: Vec<Fake>,
    idle: bool,
}

impl World {
    fn new(ringers: Ringers, policy: GuestDistribution) -> Self {
        let mut parts = Packets::pool(1, PACKETS).unwrap().1;
        let (dropped, _) = mpsc::channel();
        let wake = Arc::new(Wake::new().unwrap());
        let core = Core::new(parts.remove(0), dropped, wake, ringers).unwrap();
        let guests: Vec<_> = (0..GUESTS).map(|number| (number, AttachMode::Runtime)).collect();
        let mut node = router(std::path::Path::new("/"), "r1", 2, &guests);
        node.router.as_mut().unwrap().policy = policy;
        let spec =
            VnetConfig { name: "red".into(), police: None, nodes: vec![node], vlinks: vec![] };
        let mut vnet = Live::new(&spec, 0, 1, |_, _| None);
        let guests: Vec<_> = guests.iter().map(|_| Fake::default()).collect();
        for (number, guest) in (0..).zip(&guests) {
            let link = PeerConnection::of(guest.clone(), number.into());
            assert!(vnet.attach("r1", NodePeer::Guest(number), 0, link).is_ok());
        }
        let tap = Fake::default();
        assert!(
            vnet.attach("r1", NodePeer::Tap, 0, PeerConnection::of(tap.clone(), GUESTS.into()))
                .is_ok()
        );
        Self { core, vnet, guests: guests.into_iter().chain([tap]).collect(), idle: false }
    }

    /// Visits the vnet as the worker does, with the frames that arrived.
    /// Does nothing if the vnet is idle without a reason to be visited.
    fn visit(&mut self, frames: usize, busy: bool) -> bool {
        let Self { core, vnet, guests, idle } = self;
        let mut rung = false;
        guests.iter().for_each(|it| rung |= std::mem::take(&mut it.line().worker_rung));
        if rung {
            vnet.note_ring(core.now_ns);
        } else if *idle && frames == 0 {
            return false;
        }
        core.alarm.next(core.now_ns, busy);
        let frames = (0..frames).map(|number| {
            let mut packet = core.packets.take().unwrap().at(number % 2);
            packet.set_len(60).unwrap();
            packet.bytes_mut().copy_from_slice(&frame(60, number as u64));
            packet
        });
        let mut batch: Vec<_> = frames.collect();
        let work = vnet.visit(core, &mut batch);
        *idle = vnet.update_idle(work > 0, core.now_ns) && vnet.arm(core);
        true
    }

    fn stats(&self) -> [GuestStats; GUESTS as usize] {
        let stats = self.vnet.stats();
        [0, 1].map(|guest| stats.nodes["r1"].guests[&guest].clone())
    }
}

proptest! {
    /// Arrivals, visits, pauses, and steps of the guests come in any order. Then no
    /// more frames arrive, and only peers that are awake or were rung do steps. In
    /// the end all are idle, every frame is completed, and every packet is free.
    #[test]
    fn every_waiting_frame_has_a_pending_wakeup(
        steps in prop::collection::vec(any::<u8>(), 1..300),
        policy in prop_oneof![Just(GuestDistribution::Flow), Just(GuestDistribution::Flowlet), Just(GuestDistribution::Ordered)],
    ) {
        thread_local!(static RINGERS: Ringers = Ringers::start().unwrap());
        let mut world = World::new(RINGERS.with(Ringers::clone), policy);
        for step in steps {
            let detail = usize::from(step >> 3);
            match step & 7 {
                0 => _ = world.visit(1 + detail % 6, detail & 8 != 0),
                1 => _ = world.visit(0, detail & 8 != 0),
                2 => world.core.now_ns += [WAKE_NS / 2, WAKE_NS, IDLE_NS, 2 * IDLE_NS][detail % 4],
                3 => world.guests[detail % 3].make(),
                _ => _ = world.guests[detail % 3].step(),
            }
        }
        let mut rounds = 0;
        loop {
            world.core.now_ns += WAKE_NS;
            let mut awake = world.visit(0, true);
            world.guests.iter().for_each(|guest| awake |= guest.step());
            if !awake {
                break;
            }
            rounds += 1;
            prop_assert!(rounds < 1000, "never at rest: {:?}", world.guests);
        }
        for guest in &world.guests {
            let line = guest.line();
            prop_assert!(line.shown.is_empty() && line.sent.is_empty(), "{:?}", line);
        }
        for (guest, stats) in world.guests.iter().zip(world.stats()) {
            prop_assert_eq!((stats.in_flight, stats.completed), (0, stats.to_guest), "{:?}", guest);
        }
        prop_assert_eq!(world.core.packets.free(), PACKETS);
    }
}

/// Dropping a connection may take long. So the worker does not drop it, even if it refuses it.
#[test]
fn vnet_returns_unexpected_connections() {
    let mut world = World::new(Ringers::start().unwrap(), GuestDistribution::Flow);
    for (node, peer, interface) in [
        ("r1", NodePeer::Guest(0), 0),
        ("r1", NodePeer::Tap, 0),
        ("r1", NodePeer::Guest(GUESTS), 0),
        ("r1", NodePeer::Guest(0), 9),
        ("r9", NodePeer::Tap, 0),
    ] {
        let fake = Fake::default();
        let refused = world.vnet.attach(node, peer, interface, PeerConnection::of(fake.clone(), 9));
        assert_eq!(Arc::strong_count(&fake.0), 2, "{node} {peer:?} {interface}");
        assert_eq!(refused.map_err(|link| link.epoch), Err(9));
    }
}
