//! Frames and completions from guests and TAP helpers. The mux
//! reads each tag from a private copy, verifies it, and acts on it.
//!
//! A peer that breaks the contract is disconnected. Its counters show the reason.

use pdp_proto::mux::AttachMode;
use pdp_wire::tag::TagVerdict;

use crate::channel::{PULL_FRAMES, PeerConnection, PeerFault, Pulled, TagRun};
use crate::core::Core;
use crate::counters::Reason;
use crate::meter::Stage;
use crate::sleep::Alarm;
use crate::vnet::{
    CHECK_NS, IDLE_NS, MuxNode, MuxRouter, MuxVnet, PeerCursor, PeerIndex, SILENCE_NS_MAX,
};

/// Frames that one vnet's peers may send in one round, so that no vnet occupies a worker.
const ROUND_FRAMES: usize = 256;

/// Returns after how many checks without a completion a guest of `weight`
/// thousandths of a core is taken for dead. The kernel may run the guest for 10 ms
/// at once. Then it may suspend the guest for as long as 10 ms take at its weight.
fn silence_max(weight: u32) -> u32 {
    const RUN_NS: u64 = 10_000_000;
    let ns = SILENCE_NS_MAX + RUN_NS * 1000 / u64::from(weight.max(1));
    ns.div_ceil(CHECK_NS) as u32
}

impl MuxVnet {
    /// Takes frames from the vnet's peers, one after the other. Returns the number of frames.
    pub fn from_peers(&mut self, core: &mut Core) -> usize {
        if core.now_ns.saturating_sub(self.checked_ns) >= CHECK_NS {
            self.checked_ns = core.now_ns;
            self.disconnect_silent(core);
        }
        let mut pulled = std::mem::take(&mut core.scratch.pulled);
        let most = ROUND_FRAMES.min(self.frames_max);
        let mut left = most;
        let channels = |node: &MuxNode| node.guests().map(|guest| guest.links.len()).sum::<usize>();
        let places = self.nodes.iter().map(|node| 1 + channels(node));
        for _ in 0..places.sum() {
            let PeerCursor { node, peer, left: part } = self.source;
            let taken = self.take_in_order(node, peer, left.min(part), core, &mut pulled);
            left -= taken;
            self.source.left -= taken;
            if left > 0 || self.source.left == 0 {
                self.next_source();
            }
            if left == 0 {
                break;
            }
        }
        core.scratch.pulled = pulled;
        most - left
    }

    fn next_source(&mut self) {
        let PeerCursor { node, peer, .. } = self.source;
        let guests = self.nodes[node].router.as_ref().map_or(&[][..], |router| &router.guests);
        let next = match peer {
            Some((guest, channel)) if channel + 1 < guests[guest].links.len() => {
                (guest, channel + 1)
            }
            _ => (peer.map_or(0, |(guest, _)| guest + 1), 0),
        };
        let (node, peer) = match next.0 < guests.len() {
            true => (node, Some(next)),
            false => ((node + 1) % self.nodes.len(), None),
        };
        self.source = PeerCursor { node, peer, left: PULL_FRAMES };
    }

    /// Takes frames from one peer. If other guests wait for
    /// a guest's completions, takes from that guest too.
    fn take_in_order(
        &mut self,
        node: usize,
        peer: PeerIndex,
        max: usize,
        core: &mut Core,
        pulled: &mut Pulled,
    ) -> usize {
        let mut taken = self.take_from(node, peer, max, core, pulled);
        while peer.is_some()
            && taken < max
            && let Some(guest) = self.awaited(node)
        {
            let more = self.take_from(node, Some((guest, 0)), max - taken, core, pulled);
            if more == 0 {
                break;
            }
            taken += more;
        }
        taken
    }

    /// Returns the guest whose completions the node forwards next, if there is one.
    fn awaited(&self, node: usize) -> Option<usize> {
        let router = self.nodes[node].router.as_ref()?;
        let number = router.order.awaited()?;
        router.guests.iter().position(|guest| guest.spec.number == number)
    }

    /// Disconnects guests that have frames and have completed none of them for too long.
    fn disconnect_silent(&mut self, core: &mut Core) {
        for node in 0..self.nodes.len() {
            let guests = self.nodes[node].router.as_ref().map_or(0, |router| router.guests.len());
            for guest in 0..guests {
                let Some(silent) = self.guest(node, guest) else { continue };
                let checks_max = silence_max(silent.spec.weight);
                if silent.silence() > checks_max {
                    let seconds = u64::from(checks_max) * CHECK_NS / 1_000_000_000;
                    let fault = format!("no completion for {seconds} s");
                    self.disconnect(node, Some((guest, 0)), core, Some(fault));
                }
            }
        }
    }

    /// Shows all peers the frames that were pushed to them,
    /// and rings those whose time to be woken has come.
    pub fn flush(&mut self, core: &mut Core) {
        self.must_renotify = !self.each_link(core, |link, _, alarm| {
            link.flush(alarm, false).map(|()| !link.is_waiting())
        });
    }

    /// Lets peers ring. False if one of them has sent something. Guests whose completions
    /// have to wait for another guest's need not ring: the other guest rings.
    pub fn arm(&mut self, core: &mut Core) -> bool {
        self.each_link(core, |link, waits, alarm| Ok(waits || link.arm(alarm)?))
    }

    /// Calls `work` for every connection, and ends those that fail. The second argument of
    /// `work` is true if the guest has to wait for another. Returns true if all calls did.
    fn each_link(
        &mut self,
        core: &mut Core,
        mut work: impl FnMut(&mut PeerConnection, bool, &mut Alarm) -> Result<bool, PeerFault>,
    ) -> bool {
        let (mut all, mut faults) = (true, vec![]);
        for (at, node) in self.nodes.iter_mut().enumerate() {
            let mut done = |peer, worked| match worked {
                Ok(yes) => all &= yes,
                Err(fault) => faults.push((at, peer, fault)),
            };
            if let Some(tap) = &mut node.tap {
                done(None, work(tap, false, &mut core.alarm));
            }
            let Some(MuxRouter { guests, order, .. }) = &mut node.router else { continue };
            for (at, guest) in guests.iter_mut().enumerate() {
                let waits = guest.allowance(order) == 0;
                for (channel, link) in guest.links.iter_mut().enumerate() {
                    if let Some(link) = link {
                        done(Some((at, channel)), work(link, waits, &mut core.alarm));
                    }
                }
            }
        }
        // Other guests may no longer wait for the lost one.
        let all = all && faults.is_empty();
        for (node, peer, fault) in faults {
            self.disconnect(node, peer, core, Some(fault));
        }
        all
    }

    /// Takes up to `max` frames from one peer, as far as it may send now.
    /// Returns the number of frames. Frames of a node's own stack leave by
    /// the port that their tag names. They are never distributed again.
    fn take_from(
        &mut self,
        node: usize,
        peer: PeerIndex,
        max: usize,
        core: &mut Core,
        pulled: &mut Pulled,
    ) -> usize {
        let ports = self.nodes[node].ports();
        let MuxNode { tap, router, .. } = &mut self.nodes[node];
        let (mut outstanding, mut counted) = (0, None);
        // A TAP helper completes nothing, unless it breaks the contract.
        let (link, completions) = match peer {
            None => (tap.as_mut(), 1),
            Some((guest, channel)) => {
                let Some(MuxRouter { guests, order, .. }) = router else { return 0 };
                let Some(from) = guests.get_mut(guest) else { return 0 };
                outstanding = from.outstanding.len();
                // Completing more than is outstanding is a fault.
                // It is detected once nothing is outstanding.
                let completions = from.allowance(order).min(outstanding.max(1));
                counted = Some(&mut from.taken);
                (from.links.get_mut(channel).and_then(Option::as_mut), completions)
            }
        };
        let Some(link) = link.filter(|link| completions > 0 && !link.is_armed()) else { return 0 };
        let mut result = link.channel.pull(ports, max, completions, &mut core.packets, pulled);
        let count = pulled.frames;
        // A guest with outstanding frames does not count as quiet.
        let heard = if outstanding > 0 { count.max(1) } else { count };
        result = result.and(link.sent(heard, &mut core.alarm, core.now_ns, IDLE_NS));
        if count > 0 {
            if let Some(taken) = counted {
                *taken += count as u64;
            }
            core.meter.lap(Stage::Dispatch, count);
            let guest = peer.map(|(guest, _)| guest);
            result = self.dispatch(core, node, guest, pulled).and(result);
        }
        if let Err(fault) = result {
            self.disconnect(node, peer, core, Some(fault));
        }
        count
    }

    /// Handles frames and completions of a guest, or of a node's TAP helper. An error is the
    /// peer's fault, and discards all that it sent together with the fault. Empties `pulled`.
    fn dispatch(
        &mut self,
        core: &mut Core,
        node: usize,
        guest: Option<usize>,
        pulled: &mut Pulled,
    ) -> Result<(), PeerFault> {
        if let Err(fault) = self.verify(node, guest, pulled) {
            pulled.clear(&mut core.packets);
            return Err(fault);
        }
        let mut keeps_order = false;
        if let (Some(guest), Some(router)) = (guest, &mut self.nodes[node].router) {
            let from = &mut router.guests[guest];
            from.stats.completed += pulled.completed as u64;
            from.stats.from_guest += pulled.sent() as u64;
            router.order.completed(from.spec.number, pulled.completed);
            keeps_order = router.distributor.is_ordered();
        }
        for index in 0..pulled.runs.len() {
            let run @ TagRun { tag, frames, at } = pulled.runs[index];
            let port = self.nodes[node].first + usize::from(tag.vport);
            if tag.trace != 0 {
                self.follow(core, guest, port, run, pulled);
            }
            let counters = &mut self.ports[port].counters;
            if !tag.last {
                counters.stats.made += frames as u64;
            }
            match (tag.verdict, at) {
                (TagVerdict::Out, Some(_)) => {}
                (TagVerdict::Punt(class), Some(at)) => {
                    for packet in &pulled.punted[at..at + frames] {
                        self.punt(core, Some(class), packet);
                    }
                }
                (TagVerdict::Out | TagVerdict::Punt(_), None) => {
                    counters.drop_all(Reason::TooBig, frames as u64);
                }
                (TagVerdict::Drop(reason), _) => counters.drop_all(reason.into(), frames as u64),
                (TagVerdict::Kept | TagVerdict::Deliver, _) => {
                    counters.stats.consumed += frames as u64
                }
            }
        }
        if !keeps_order {
            let first = self.nodes[node].first;
            core.scratch.groups.by_port(first, &mut pulled.packets);
        }
        self.egress(core, &mut pulled.packets);
        pulled.clear(&mut core.packets);
        Ok(())
    }

    /// Checks that the peer may send these tags now, and records its completions.
    #[inline]
    fn verify(
        &mut self,
        node: usize,
        from: Option<usize>,
        pulled: &Pulled,
    ) -> Result<(), PeerFault> {
        let guest = from.and_then(|guest| self.guest(node, guest));
        let completes = guest.filter(|guest| guest.spec.attach == AttachMode::Runtime);
        for TagRun { tag, .. } in &pulled.runs {
            if tag.verdict == TagVerdict::Deliver {
                return Err("a tag reserved for the mux".into());
            }
            if completes.is_none() && tag.verdict != TagVerdict::Out {
                return Err(format!("{tag:?} from a peer without completions"));
            }
        }
        let outstanding = match completes {
            Some(from) => from.outstanding.pop(pulled.completed),
            None => pulled.completed == 0,
        };
        if outstanding { Ok(()) } else { Err("a completion without an outstanding frame".into()) }
    }

    /// Marks the packets of traced frames. Where a frame has no packet, ends its trace.
    fn follow(
        &mut self,
        core: &mut Core,
        guest: Option<usize>,
        port: usize,
        TagRun { tag, frames, at }: TagRun,
        pulled: &mut Pulled,
    ) {
        let mark = core.tracer.mark(self.slot, tag.trace);
        let node = self.ports[port].node;
        let from = guest.and_then(|guest| self.guest(node, guest));
        let number = from.map_or(0, |it| it.spec.number);
        for _ in 0..frames {
            if !tag.last {
                core.tracer.copied(mark);
            }
            core.tracer.note(mark, "dispatch", || {
                format!("guest {number} answers {:?}, vport {}", tag.verdict, tag.vport)
            });
            if at.is_none() {
                let (stage, detail) = match tag.verdict {
                    TagVerdict::Drop(reason) => ("drop", reason.name()),
                    TagVerdict::Kept => ("dispatch", "kept by the guest"),
                    _ => ("drop", Reason::TooBig.name()),
                };
                core.tracer.end(mark, stage, || detail.into());
            }
        }
        let punted = matches!(tag.verdict, TagVerdict::Punt(_));
        let packets = if punted { &mut pulled.punted } else { &mut pulled.packets };
        if let Some(at) = at {
            packets[at..at + frames].iter_mut().for_each(|packet| packet.mark = mark);
        }
    }

    fn guest(&mut self, node: usize, guest: usize) -> Option<&mut crate::peer::MuxGuest> {
        self.nodes[node].router.as_mut()?.guests.get_mut(guest)
    }
}
