//! What guests and TAP helpers send: the tag is read from a private copy, verified, and obeyed.
//!
//! A peer that breaks the contract is disconnected, with the reason in its counters.

use pdp_proto::mux::Attach;
use pdp_wire::tag::{Tag, Verdict};

use crate::core::Core;
use crate::counters::Reason;
use crate::meter::Stage;
use crate::peer::{PULL_FRAMES, Pulled};
use crate::vnet::Vnet;

/// Frames that one vnet's peers may send in one round, so that no vnet keeps a worker busy.
const ROUND_FRAMES: usize = 256;

/// A guest for which others wait and which completes nothing for this long is taken for dead.
pub const AWAITED_NS_MAX: u64 = 2_000_000_000;

impl Vnet {
    /// Takes what the vnet's peers have sent, in turn. Returns how many frames.
    pub fn from_peers(&mut self, core: &mut Core) -> usize {
        let mut pulled = std::mem::take(&mut core.scratch.pulled);
        let mut left = ROUND_FRAMES;
        let count = self.nodes.len();
        self.turn = self.turn.wrapping_add(1);
        for step in 0..count {
            let node = (self.turn + step) % count;
            left -= self.take_from_tap(node, left, core, &mut pulled);
            left -= self.take_from_guests(node, left, core, &mut pulled);
        }
        core.scratch.pulled = pulled;
        ROUND_FRAMES - left
    }

    /// From the guests of a node in turn; where others wait for one, from that one as long as it
    /// is awaited.
    fn take_from_guests(
        &mut self,
        node: usize,
        mut left: usize,
        core: &mut Core,
        pulled: &mut Vec<Pulled>,
    ) -> usize {
        let before = left;
        let guests = self.nodes[node].router.as_ref().map_or(0, |router| router.guests.len());
        for step in 0..guests {
            let guest = (self.turn + step) % guests;
            left -= self.take_from_guest(node, guest, left, core, pulled);
        }
        while left > 0
            && let Some(guest) = self.awaited(node)
        {
            let taken = self.take_from_guest(node, guest, left, core, pulled);
            if taken == 0 {
                self.check_awaited(node, guest, core);
                break;
            }
            left -= taken;
        }
        before - left
    }

    /// The guest whose completions are the next to be sent on, if that is one's turn.
    fn awaited(&self, node: usize) -> Option<usize> {
        let router = self.nodes[node].router.as_ref()?;
        let number = router.order.awaited()?;
        router.guests.iter().position(|guest| guest.spec.number == number)
    }

    /// Gives up a guest that others have waited for too long.
    fn check_awaited(&mut self, node: usize, guest: usize, core: &mut Core) {
        let now_ns = core.now_ns;
        let Some(awaited) = self.guest(node, guest) else { return };
        let completed = awaited.stats.completed;
        match awaited.awaited {
            Some((then, since_ns)) if then == completed => {
                if now_ns.saturating_sub(since_ns) > AWAITED_NS_MAX {
                    let seconds = AWAITED_NS_MAX / 1_000_000_000;
                    let fault = format!("completed nothing for {seconds} s while others waited");
                    self.lose_guest(node, guest, 0, core, Some(fault));
                }
            }
            _ => awaited.awaited = Some((completed, now_ns)),
        }
    }

    /// Lets all peers see what was pushed to them.
    pub fn flush(&mut self, core: &mut Core) {
        for node in 0..self.nodes.len() {
            let tap = self.nodes[node].tap.as_mut();
            if let Some(Err(fault)) = tap.map(|link| link.flush()) {
                self.lose_tap(node, core, Some(fault.to_string()));
            }
            let guests = self.nodes[node].router.as_ref().map_or(0, |router| router.guests.len());
            for guest in 0..guests {
                let links = self.guest(node, guest).map_or(0, |guest| guest.links.len());
                for at in 0..links {
                    let link = self.guest(node, guest).and_then(|guest| guest.links[at].as_mut());
                    if let Some(Err(fault)) = link.map(|link| link.flush()) {
                        self.lose_guest(node, guest, at, core, Some(fault.to_string()));
                    }
                }
            }
        }
    }

    /// What a node's own stack sends leaves by the port it names, never back into distribution.
    fn take_from_tap(
        &mut self,
        node: usize,
        left: usize,
        core: &mut Core,
        pulled: &mut Vec<Pulled>,
    ) -> usize {
        let Some(tap) = &mut self.nodes[node].tap else { return 0 };
        let max = left.min(PULL_FRAMES);
        // A TAP helper completes nothing, but for one that breaks the contract.
        let mut result = tap.pull_tagged(&mut core.packets, max, 1, pulled);
        let count = pulled.len();
        let mut leaving = std::mem::take(&mut core.scratch.leaving);
        for Pulled { tag, packet } in pulled.drain(..) {
            let at = match (&result, tag.verdict, self.port_at(node, tag.vport)) {
                (Ok(()), Verdict::Out, Some(at)) if !tag.last => at,
                (Ok(()), ..) => {
                    result = Err(format!("a TAP helper sent {tag:?}"));
                    packet.into_iter().for_each(|packet| core.packets.give(packet));
                    continue;
                }
                (Err(_), ..) => {
                    packet.into_iter().for_each(|packet| core.packets.give(packet));
                    continue;
                }
            };
            self.ports[at].counters.made += 1;
            match packet {
                Some(packet) => {
                    leaving.push(packet);
                    self.leave(core, at, &mut leaving);
                }
                None => self.ports[at].counters.drop(Reason::TooBig),
            }
        }
        core.scratch.leaving = leaving;
        if let Err(fault) = result {
            self.lose_tap(node, core, Some(fault));
        }
        count
    }

    /// Takes what one guest may send now. Returns how many frames.
    fn take_from_guest(
        &mut self,
        node: usize,
        guest: usize,
        left: usize,
        core: &mut Core,
        pulled: &mut Vec<Pulled>,
    ) -> usize {
        let Some(router) = &mut self.nodes[node].router else { return 0 };
        let Some(from) = router.guests.get_mut(guest) else { return 0 };
        let attach = from.spec.attach;
        let completions = match attach {
            // What a guest that has no frame sends is its own, and waits for nobody.
            Attach::Runtime if from.outstanding.is_empty() => 1,
            Attach::Runtime => router.order.allowance(from.spec.number),
            Attach::Tap | Attach::Memif => 1,
        };
        let mut taken = 0;
        for link_at in 0..from.links.len() {
            let Some(from) = self.guest(node, guest) else { break };
            let Some(link) = &mut from.links[link_at] else { continue };
            let max = (left - taken).min(PULL_FRAMES);
            let mut result = match attach {
                Attach::Runtime | Attach::Tap => {
                    link.pull_tagged(&mut core.packets, max, completions, pulled)
                }
                Attach::Memif => {
                    let tag =
                        Tag { verdict: Verdict::Out, vport: link_at as u8, last: false, trace: 0 };
                    let pull = |packet| pulled.push(Pulled { tag, packet });
                    let result = link.pull(&mut core.packets, max, pull);
                    result.map(|_| ()).map_err(|fault| fault.to_string())
                }
            };
            let count = pulled.len();
            taken += count;
            if count > 0 {
                core.meter.lap(Stage::Dispatch, count);
                result = self.dispatch(core, node, guest, attach, pulled).and(result);
            }
            if let Err(fault) = result {
                self.lose_guest(node, guest, link_at, core, Some(fault));
            }
        }
        taken
    }

    /// Frames and completions of a guest. An error is the guest's fault; what follows it is
    /// discarded. Empties `pulled`.
    fn dispatch(
        &mut self,
        core: &mut Core,
        node: usize,
        guest: usize,
        attach: Attach,
        pulled: &mut Vec<Pulled>,
    ) -> Result<(), String> {
        let mut leaving = std::mem::take(&mut core.scratch.leaving);
        // The port that `leaving` leaves by.
        let mut way = 0;
        let (mut completed, mut from_guest) = (0, 0);
        let mut result = Ok(());
        for Pulled { tag, packet } in pulled.drain(..) {
            if result.is_ok() {
                result = self.verify(node, guest, attach, tag);
            }
            let at = match self.port_at(node, tag.vport) {
                Some(at) if result.is_ok() => at,
                _ => {
                    packet.into_iter().for_each(|packet| core.packets.give(packet));
                    continue;
                }
            };
            completed += usize::from(tag.last);
            from_guest += u64::from(matches!(tag.verdict, Verdict::Out | Verdict::Punt(_)));
            if !tag.last {
                self.ports[at].counters.made += 1;
            }
            let mark = self.follow(core, node, guest, tag);
            match (tag.verdict, packet) {
                (Verdict::Out, Some(mut packet)) => {
                    packet.mark = mark;
                    if way != at {
                        self.leave(core, way, &mut leaving);
                        way = at;
                    }
                    leaving.push(packet);
                }
                (Verdict::Punt(class), Some(mut packet)) => {
                    packet.mark = mark;
                    self.punt(core, at, Some(class), packet);
                }
                (Verdict::Out | Verdict::Punt(_), None) => {
                    self.ports[at].counters.drop(Reason::TooBig);
                    core.tracer.end(mark, "drop", || Reason::TooBig.name().into());
                }
                (Verdict::Drop(reason), _) => {
                    self.ports[at].counters.drop(reason.into());
                    core.tracer.end(mark, "drop", || reason.name().into());
                }
                (Verdict::Kept | Verdict::Deliver, _) => {
                    self.ports[at].counters.consumed += 1;
                    core.tracer.end(mark, "dispatch", || "kept by the guest".into());
                }
            }
        }
        self.leave(core, way, &mut leaving);
        core.scratch.leaving = leaving;
        if let Some(router) = &mut self.nodes[node].router {
            let from = &mut router.guests[guest];
            from.stats.completed += completed as u64;
            from.stats.from_guest += from_guest;
            router.order.completed(from.spec.number, completed);
        }
        result
    }

    /// Whether a guest may say this now.
    #[inline]
    fn verify(
        &mut self,
        node: usize,
        guest: usize,
        attach: Attach,
        tag: Tag,
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
        if tag.last && !self.guest(node, guest).is_some_and(|from| from.outstanding.pop()) {
            return Err("a completion without a frame that it completes".into());
        }
        Ok(())
    }

    /// The mark of a traced frame, 0 of another.
    #[inline]
    fn follow(&mut self, core: &mut Core, node: usize, guest: usize, tag: Tag) -> u32 {
        if tag.trace == 0 {
            return 0;
        }
        let mark = core.tracer.mark(self.slot, tag.trace);
        if !tag.last {
            core.tracer.copied(mark);
        }
        let number = self.guest(node, guest).map_or(0, |guest| guest.spec.number);
        core.tracer.note(mark, "dispatch", || {
            format!("guest {number} says {:?}, vport {}", tag.verdict, tag.vport)
        });
        mark
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
