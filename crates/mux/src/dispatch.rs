//! What guests and TAP helpers send: the tag is read from a private copy, verified, and obeyed.
//!
//! A peer that breaks the contract is disconnected, with the reason in its counters.

use pdp_afxdp::Packet;
use pdp_memif::Fault;
use pdp_proto::mux::Attach;
use pdp_wire::tag::{Tag, Verdict};

use crate::core::Core;
use crate::counters::Reason;
use crate::meter::Stage;
use crate::peer::{Link, PULL_FRAMES, Pulled, Run};
use crate::sleep::Alarm;
use crate::vnet::{REST_NS, Router, Vnet};

/// Frames that one vnet's peers may send in one round, so that no vnet keeps a worker busy.
const ROUND_FRAMES: usize = 256;

/// A guest that has frames and completes nothing for this long is taken for dead. One with a small share
/// of a core has more time: see [`silence_max`].
pub const SILENCE_NS_MAX: u64 = 2_000_000_000;

/// Time between two looks whether guests complete anything, nanoseconds. Looks are counted, not time: a
/// mux or a machine that stood still has not looked.
pub const CHECK_NS: u64 = SILENCE_NS_MAX / 8;

/// Looks at a guest of `weight` thousandths of a core in which it may complete nothing. The kernel may let
/// it run for 10 ms at once, and then not for as long as these are at its share.
fn silence_max(weight: u32) -> u32 {
    const RUN_NS: u64 = 10_000_000;
    let looks = SILENCE_NS_MAX + RUN_NS * 1000 / u64::from(weight.max(1));
    looks.div_ceil(CHECK_NS) as u32
}

/// Whose frames are taken next: one connection after the other has its part, also if that takes several
/// rounds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    node: usize,
    /// Its TAP helper, or a guest.
    guest: Option<usize>,
    link: usize,
    /// Frames left of the connection's part.
    left: usize,
}

impl Default for Source {
    fn default() -> Self {
        Self { node: 0, guest: None, link: 0, left: PULL_FRAMES }
    }
}

impl Vnet {
    /// Takes what the vnet's peers have sent, in turn. Returns how many frames.
    pub fn from_peers(&mut self, core: &mut Core) -> usize {
        if core.now_ns.saturating_sub(self.checked_ns) >= CHECK_NS {
            self.checked_ns = core.now_ns;
            self.lose_silent(core);
        }
        let mut pulled = std::mem::take(&mut core.scratch.pulled);
        let mut left = ROUND_FRAMES;
        let places = self.nodes.iter().map(|node| {
            let guests = node.router.iter().flat_map(|router| &router.guests);
            1 + guests.map(|guest| guest.links.len()).sum::<usize>()
        });
        for _ in 0..places.sum() {
            let Source { node, guest, link, left: part } = self.source;
            let max = left.min(part);
            let taken = match guest {
                None => self.take_from_tap(node, max, core, &mut pulled),
                Some(guest) => self.take_in_order(node, guest, link, max, core, &mut pulled),
            };
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
        ROUND_FRAMES - left
    }

    fn next_source(&mut self) {
        let Source { node, guest, link, .. } = self.source;
        let guests = self.nodes[node].router.as_ref().map_or(&[][..], |router| &router.guests);
        let next = guest.map_or(0, |guest| guest + 1);
        let (node, guest, link) = match guest {
            Some(at) if link + 1 < guests[at].links.len() => (node, guest, link + 1),
            _ if next < guests.len() => (node, Some(next), 0),
            _ => ((node + 1) % self.nodes.len(), None, 0),
        };
        self.source = Source { node, guest, link, left: PULL_FRAMES };
    }

    /// From a guest, and, where others wait for one, from that one as long as it is awaited.
    fn take_in_order(
        &mut self,
        node: usize,
        guest: usize,
        link: usize,
        max: usize,
        core: &mut Core,
        pulled: &mut Pulled,
    ) -> usize {
        let mut taken = self.take_from_guest(node, guest, link, max, core, pulled);
        while taken < max
            && let Some(guest) = self.awaited(node)
        {
            let more = self.take_from_guest(node, guest, 0, max - taken, core, pulled);
            if more == 0 {
                break;
            }
            taken += more;
        }
        taken
    }

    /// A guest whose completions are the next to be sent on, if that is one's turn.
    fn awaited(&self, node: usize) -> Option<usize> {
        let router = self.nodes[node].router.as_ref()?;
        let number = router.order.awaited()?;
        router.guests.iter().position(|guest| guest.spec.number == number)
    }

    /// Gives up guests that have frames and completed nothing for too long.
    fn lose_silent(&mut self, core: &mut Core) {
        for node in 0..self.nodes.len() {
            let guests = self.nodes[node].router.as_ref().map_or(0, |router| router.guests.len());
            for guest in 0..guests {
                let Some(silent) = self.guest(node, guest) else { continue };
                if silent.silence() > silence_max(silent.spec.weight) {
                    let seconds = SILENCE_NS_MAX / 1_000_000_000;
                    let fault = format!("completed nothing for {seconds} s");
                    self.lose_guest(node, guest, 0, core, Some(fault));
                }
            }
        }
    }

    /// Lets all peers see what was pushed to them, and has those that sleep rung when it is time.
    pub fn flush(&mut self, core: &mut Core) {
        self.each_link(core, |link, _, alarm| link.flush(alarm, false).map(|()| true));
    }

    /// Lets peers ring; false if something can be taken from one. Guests whose completions wait for another's
    /// need not ring: that one does.
    pub fn arm(&mut self, core: &mut Core) -> bool {
        self.each_link(core, |link, waits, alarm| Ok(waits || link.arm(alarm)?))
    }

    /// Does something with every connection, and ends those that fail. `work` is told whether its guest has
    /// to wait for another. Whether all said yes.
    fn each_link(
        &mut self,
        core: &mut Core,
        mut work: impl FnMut(&mut Link, bool, &mut Alarm) -> Result<bool, Fault>,
    ) -> bool {
        let mut all = true;
        for node in 0..self.nodes.len() {
            match self.nodes[node].tap.as_mut().map(|link| work(link, false, &mut core.alarm)) {
                Some(Err(fault)) => self.lose_tap(node, core, Some(fault.to_string())),
                Some(Ok(yes)) => all &= yes,
                None => {}
            }
            let guests = self.nodes[node].router.as_ref().map_or(0, |router| router.guests.len());
            for guest in 0..guests {
                let links = self.guest(node, guest).map_or(0, |guest| guest.links.len());
                for at in 0..links {
                    let Some(Router { guests, order, .. }) = &mut self.nodes[node].router else {
                        break;
                    };
                    let waits = guests[guest].allowance(order) == 0;
                    let link = guests[guest].links[at].as_mut();
                    match link.map(|link| work(link, waits, &mut core.alarm)) {
                        Some(Err(fault)) => {
                            self.lose_guest(node, guest, at, core, Some(fault.to_string()));
                        }
                        Some(Ok(yes)) => all &= yes,
                        None => {}
                    }
                }
            }
        }
        all
    }

    /// What a node's own stack sends leaves by the port it names, never back into distribution.
    fn take_from_tap(
        &mut self,
        node: usize,
        max: usize,
        core: &mut Core,
        pulled: &mut Pulled,
    ) -> usize {
        let Some(tap) = &mut self.nodes[node].tap else { return 0 };
        if tap.is_armed() {
            return 0;
        }
        // A TAP helper completes nothing, but for one that breaks the contract.
        let mut result = tap.pull_tagged(&mut core.packets, max, 1, pulled);
        let count = pulled.frames();
        if count > 0 {
            tap.sent_ns = core.now_ns;
        } else if result.is_ok() {
            let armed = tap.arm_if_quiet(&mut core.alarm, core.now_ns, REST_NS);
            result = armed.map_err(|fault| fault.to_string());
        }
        let mut leaving = std::mem::take(&mut core.scratch.leaving);
        let mut packets = pulled.packets.drain(..);
        for Run { tag, frames, has_packets } in pulled.runs.drain(..) {
            let mine = packets.by_ref().take(if has_packets { frames } else { 0 });
            let at = match (&result, tag.verdict, self.port_at(node, tag.vport)) {
                (Ok(()), Verdict::Out, Some(at)) if !tag.last => at,
                _ => {
                    mine.for_each(|packet| core.packets.give(packet));
                    result = result.and(Err(format!("a TAP helper sent {tag:?}")));
                    continue;
                }
            };
            let port = &mut self.ports[at];
            port.counters.made += frames as u64;
            if has_packets {
                leaving.extend(mine.map(|packet| packet.at(at)));
            } else {
                port.counters.drop_all(Reason::TooBig, frames as u64);
            }
        }
        drop(packets);
        self.leave(core, &mut leaving);
        core.scratch.leaving = leaving;
        if let Err(fault) = result {
            self.lose_tap(node, core, Some(fault));
        }
        count
    }

    /// Takes up to `max` frames of what one guest may send now by one of its connections. Returns how
    /// many.
    fn take_from_guest(
        &mut self,
        node: usize,
        guest: usize,
        link_at: usize,
        max: usize,
        core: &mut Core,
        pulled: &mut Pulled,
    ) -> usize {
        let Some(router) = &mut self.nodes[node].router else { return 0 };
        let Some(from) = router.guests.get_mut(guest) else { return 0 };
        let completions = from.allowance(&router.order);
        let attach = from.spec.attach;
        let owes = !from.outstanding.is_empty();
        let Some(Some(link)) = from.links.get_mut(link_at) else { return 0 };
        if completions == 0 || link.is_armed() {
            return 0;
        }
        let mut result = match attach {
            Attach::Runtime | Attach::Tap => {
                link.pull_tagged(&mut core.packets, max, completions, pulled)
            }
            Attach::Memif => {
                let tag =
                    Tag { verdict: Verdict::Out, vport: link_at as u8, last: false, trace: 0 };
                let result = link.pull(&mut core.packets, max, |it| pulled.add(tag, it));
                result.map_err(|fault| fault.to_string())
            }
        };
        let count = pulled.frames();
        if count > 0 {
            link.sent_ns = core.now_ns;
            from.taken += count as u64;
            core.meter.lap(Stage::Dispatch, count);
            result = self.dispatch(core, node, guest, attach, pulled).and(result);
        } else if !owes && result.is_ok() {
            let armed = link.arm_if_quiet(&mut core.alarm, core.now_ns, REST_NS);
            result = armed.map_err(|fault| fault.to_string());
        }
        if let Err(fault) = result {
            self.lose_guest(node, guest, link_at, core, Some(fault));
        }
        count
    }

    /// Frames and completions of a guest. An error is the guest's fault; what follows it is
    /// discarded. Empties `pulled`.
    fn dispatch(
        &mut self,
        core: &mut Core,
        node: usize,
        guest: usize,
        attach: Attach,
        pulled: &mut Pulled,
    ) -> Result<(), String> {
        let mut leaving = std::mem::take(&mut core.scratch.leaving);
        let (mut completed, mut from_guest) = (0, 0);
        let mut result = Ok(());
        let mut packets = pulled.packets.drain(..);
        for run @ Run { tag, frames, has_packets } in pulled.runs.drain(..) {
            let mine = packets.by_ref().take(if has_packets { frames } else { 0 });
            if result.is_ok() {
                result = self.verify(node, guest, attach, run);
            }
            let at = match self.port_at(node, tag.vport) {
                Some(at) if result.is_ok() => at,
                _ => {
                    mine.for_each(|packet| core.packets.give(packet));
                    continue;
                }
            };
            let before = leaving.len();
            leaving.extend(mine.map(|packet| packet.at(at)));
            if tag.trace != 0 {
                self.follow(core, guest, at, run, &mut leaving[before..]);
            }
            let counters = &mut self.ports[at].counters;
            if tag.last {
                completed += frames;
            } else {
                counters.made += frames as u64;
            }
            let is_frame = matches!(tag.verdict, Verdict::Out | Verdict::Punt(_));
            from_guest += if is_frame { frames as u64 } else { 0 };
            match tag.verdict {
                Verdict::Out if has_packets => {}
                Verdict::Punt(class) if has_packets => {
                    for packet in leaving.drain(before..) {
                        self.punt(core, Some(class), &packet);
                        core.packets.give(packet);
                    }
                }
                Verdict::Out | Verdict::Punt(_) => {
                    counters.drop_all(Reason::TooBig, frames as u64);
                }
                Verdict::Drop(reason) => counters.drop_all(reason.into(), frames as u64),
                Verdict::Kept | Verdict::Deliver => counters.consumed += frames as u64,
            }
        }
        drop(packets);
        self.leave(core, &mut leaving);
        core.scratch.leaving = leaving;
        if let Some(router) = &mut self.nodes[node].router {
            let from = &mut router.guests[guest];
            from.stats.completed += completed as u64;
            from.stats.from_guest += from_guest;
            router.order.completed(from.spec.number, completed);
        }
        result
    }

    /// Whether a guest may say this now; takes note of what is completed.
    #[inline]
    fn verify(
        &mut self,
        node: usize,
        guest: usize,
        attach: Attach,
        Run { tag, frames, .. }: Run,
    ) -> Result<(), String> {
        if usize::from(tag.vport) >= self.nodes[node].count {
            return Err(format!("vport {} does not exist", tag.vport));
        }
        if tag.verdict == Verdict::Deliver {
            return Err("a tag that is the mux's own".into());
        }
        if attach != Attach::Runtime && (tag.verdict != Verdict::Out || tag.last) {
            return Err(format!("{tag:?} from a guest without completions"));
        }
        if tag.last && !self.guest(node, guest).is_some_and(|from| from.outstanding.pop(frames)) {
            return Err("a completion without a frame that it completes".into());
        }
        Ok(())
    }

    /// Traced frames: marks their packets, or ends their traces where there are none.
    fn follow(
        &mut self,
        core: &mut Core,
        guest: usize,
        at: usize,
        Run { tag, frames, has_packets }: Run,
        packets: &mut [Packet],
    ) {
        let mark = core.tracer.mark(self.slot, tag.trace);
        let number = self.guest(self.ports[at].node, guest).map_or(0, |it| it.spec.number);
        for _ in 0..frames {
            if !tag.last {
                core.tracer.copied(mark);
            }
            core.tracer.note(mark, "dispatch", || {
                format!("guest {number} says {:?}, vport {}", tag.verdict, tag.vport)
            });
            if !has_packets {
                let (stage, detail) = match tag.verdict {
                    Verdict::Drop(reason) => ("drop", reason.name()),
                    Verdict::Kept => ("dispatch", "kept by the guest"),
                    _ => ("drop", Reason::TooBig.name()),
                };
                core.tracer.end(mark, stage, || detail.into());
            }
        }
        packets.iter_mut().for_each(|packet| packet.mark = mark);
    }

    fn guest(&mut self, node: usize, guest: usize) -> Option<&mut crate::peer::Guest> {
        self.nodes[node].router.as_mut()?.guests.get_mut(guest)
    }

    /// The node's port `vport` among all ports of the vnet.
    fn port_at(&self, node: usize, vport: u8) -> Option<usize> {
        let node = &self.nodes[node];
        (usize::from(vport) < node.count).then_some(node.first + usize::from(vport))
    }
}
