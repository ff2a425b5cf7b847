//! What guests and TAP helpers send: the tag is read from a private copy, verified, and obeyed.
//!
//! A peer that breaks the contract is disconnected, with the reason in its counters.

use pdp_proto::mux::Attach;
use pdp_wire::tag::{Tag, Verdict};

use crate::core::Core;
use crate::counters::Reason;
use crate::peer::{PULL_FRAMES, Pulled};
use crate::vnet::Vnet;

/// Frames that one vnet's peers may send in one round, so that no vnet keeps a worker busy.
const ROUND_FRAMES: usize = 256;

impl Vnet {
    /// Takes what the vnet's peers have sent, in turn. Returns how many frames.
    pub fn from_peers(&mut self, core: &mut Core, pulled: &mut Vec<Pulled>) -> usize {
        let mut left = ROUND_FRAMES;
        let count = self.nodes.len();
        self.turn = self.turn.wrapping_add(1);
        for step in 0..count {
            let node = (self.turn + step) % count;
            left -= self.take_from_tap(node, left, core, pulled);
            let guests = self.nodes[node].router.as_ref().map_or(0, |router| router.guests.len());
            for step in 0..guests {
                let guest = (self.turn + step) % guests;
                left -= self.take_from_guest(node, guest, left, core, pulled);
            }
        }
        ROUND_FRAMES - left
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
        let mut result = tap.pull(core, left.min(PULL_FRAMES), None, pulled);
        let count = pulled.len();
        for Pulled { tag, packet } in pulled.drain(..) {
            let at = match (&result, tag.verdict, self.port_at(node, tag.vport)) {
                (Ok(_), Verdict::Out, Some(at)) => at,
                (Ok(_), ..) => {
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
                Some(packet) => self.leave(core, at, packet),
                None => self.ports[at].counters.drop(Reason::TooBig),
            }
        }
        if let Err(fault) = result {
            self.lose_tap(node, core, Some(fault));
        }
        count
    }

    fn take_from_guest(
        &mut self,
        node: usize,
        guest: usize,
        left: usize,
        core: &mut Core,
        pulled: &mut Vec<Pulled>,
    ) -> usize {
        let mut taken = 0;
        let Some(from) = self.guest(node, guest) else { return 0 };
        let attach = from.spec.attach;
        for link_at in 0..from.links.len() {
            let port = (attach == Attach::Memif).then_some(link_at as u16);
            let Some(from) = self.guest(node, guest) else { break };
            let Some(link) = &mut from.links[link_at] else { continue };
            let mut result = link.pull(core, (left - taken).min(PULL_FRAMES), port, pulled);
            taken += pulled.len();
            for one in pulled.drain(..) {
                if result.is_ok()
                    && let Err(fault) = self.dispatch(core, node, guest, attach, one)
                {
                    result = Err(fault);
                }
            }
            if let Err(fault) = result {
                self.lose_guest(node, guest, link_at, core, Some(fault));
            }
        }
        taken
    }

    /// One frame or completion of a guest. An error is the guest's fault.
    fn dispatch(
        &mut self,
        core: &mut Core,
        node: usize,
        guest: usize,
        attach: Attach,
        Pulled { tag, packet }: Pulled,
    ) -> Result<(), String> {
        let refuse = |core: &mut Core, packet: Option<_>, fault: String| {
            packet.into_iter().for_each(|packet| core.packets.give(packet));
            Err(fault)
        };
        let Some(at) = self.port_at(node, tag.vport) else {
            return refuse(core, packet, format!("vport {} does not exist", tag.vport));
        };
        let Some(from) = self.guest(node, guest) else { return Ok(()) };
        if tag.last {
            if from.outstanding.pop_front().is_none() {
                let fault = "a completion without a frame that it completes".to_string();
                return refuse(core, packet, fault);
            }
            from.stats.completed += 1;
        }
        if attach != Attach::Runtime && tag.verdict != Verdict::Out {
            return refuse(core, packet, format!("{tag:?} from a guest without completions"));
        }
        let frames = matches!(tag.verdict, Verdict::Out | Verdict::Punt(_));
        from.stats.from_guest += u64::from(frames);
        let number = from.spec.number;
        let mark = core.tracer.mark(self.slot, tag.trace);
        if !tag.last {
            self.ports[at].counters.made += 1;
            core.tracer.copied(mark);
        }
        core.tracer.note(mark, "dispatch", || said(number, tag));
        match (tag.verdict, packet) {
            (Verdict::Out, Some(mut packet)) => {
                packet.mark = mark;
                self.leave(core, at, packet);
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
            (Verdict::Kept, _) => {
                self.ports[at].counters.consumed += 1;
                core.tracer.end(mark, "dispatch", || "kept by the guest".into());
            }
            (Verdict::Deliver, packet) => {
                self.ports[at].counters.drop(Reason::GuestMalformed);
                return refuse(core, packet, "a tag that is the mux's own".to_string());
            }
        }
        Ok(())
    }

    fn guest(&mut self, node: usize, guest: usize) -> Option<&mut crate::peer::Guest> {
        self.nodes[node].router.as_mut()?.guests.get_mut(guest)
    }

    /// The node's port `vport` among all ports of the vnet.
    fn port_at(&self, node: usize, vport: u16) -> Option<usize> {
        let node = &self.nodes[node];
        (usize::from(vport) < node.count).then_some(node.first + usize::from(vport))
    }
}

fn said(guest: u32, tag: Tag) -> String {
    format!("guest {guest} says {:?}, vport {}", tag.verdict, tag.vport)
}
