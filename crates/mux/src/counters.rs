//! What is counted, and the names of the reasons for which frames are dropped.
//!
//! Counters are plain numbers of the worker that owns them. Whoever wants them asks the worker, which
//! copies them between two rounds, a few nodes at a time ([`Counted`]): what it says of a node is of one
//! moment, and adds up. Names are added by who asks.

use std::collections::BTreeMap;

use pdp_proto::mux;
use pdp_wire::geneve;
use pdp_wire::named;
use pdp_wire::outer::NotATunnel;
use pdp_wire::tag::{GuestDrop, PuntClass};

named! {
    /// Why a frame of a vnet was dropped; counted at one of its ports.
    Reason {
        /// The worker is behind with the vnet's frames, and keeps no more of them.
        Behind = "worker-behind",
        /// The same of a vrouter that the mux forwards for: what this would take of the worker's time is more than the
        /// vnet has of it, and no work was spent on the frame.
        FastpathPower = "fastpath-power",
        /// Beyond what may arrive from outside for the vnet.
        Policed = "policed",
        /// The port's vlink is down.
        LinkDown = "link-down",
        /// Shorter than an Ethernet header.
        Runt = "runt",
        /// Longer than the port's MTU allows.
        TooBig = "too-big",
        /// No forwarding guest is connected.
        NoGuest = "no-guest",
        /// The guest's ring is full.
        GuestRingFull = "guest-ring-full",
        /// The guest took frames but completed too few.
        GuestWindowFull = "guest-window-full",
        /// Given to a guest that died or was disconnected before it completed it.
        GuestGone = "guest-gone",
        /// Beyond the limit of punts of this class.
        PuntLimitLocal = "punt-limit-local",
        /// As above.
        PuntLimitNeighbour = "punt-limit-neighbour",
        /// As above.
        PuntLimitException = "punt-limit-exception",
        /// As above.
        PuntLimitHook = "punt-limit-hook",
        /// As above.
        PuntLimitControl = "punt-limit-control",
        /// More frames of its end than may go to all ends of its segment.
        FloodLimit = "flood-limit",
        /// The node's TAP helper is not connected.
        NoTap = "no-tap",
        /// The TAP helper's ring is full.
        TapRingFull = "tap-ring-full",
        /// No packet for its copy, which was to go here.
        NoPacket = "no-packet",
        /// The segment has its address where it came from, or behind another tunnel than that which it came by.
        NoOtherEnd = "no-other-end",
        /// A filter of the vrouter's slow path says so.
        Filtered = "filtered",
        /// Met no filter, where nothing but filters says what becomes of frames.
        Unmatched = "unmatched",
        /// Lost on purpose: the vlink's `loss`.
        Loss = "loss",
        /// More frames wait for the vlink's delay than its rate lets come.
        DelayFull = "delay-full",
        /// Sent out of a port without a vlink.
        Unconnected = "unconnected",
        /// No room in the vlink's queue.
        QueueFull = "queue-full",
        /// No route, or nobody answered for the next hop's link address in time, in the underlay.
        UnderlayUnresolved = "underlay-unresolved",
        /// Longer than the external interface carries with the tunnel's headers.
        UnderlayTooBig = "underlay-too-big",
        /// Longer than the way to the tunnel's other end carries with the tunnel's headers.
        PathTooBig = "underlay-path-too-big",
        /// The external interface doesn't take more.
        ExternalRingFull = "external-ring-full",
        /// The external interface has no sockets.
        ExternalGone = "external-gone",
        /// As what forwards said, a guest or the mux itself.
        GuestMalformed = "guest-malformed",
        /// As what forwards said, a guest or the mux itself.
        GuestNoRoute = "guest-no-route",
        /// As what forwards said, a guest or the mux itself.
        GuestBlackhole = "guest-blackhole",
        /// As what forwards said, a guest or the mux itself.
        GuestPortDown = "guest-port-down",
        /// As what forwards said, a guest or the mux itself.
        GuestNotForUs = "guest-not-for-us",
        /// As what forwards said, a guest or the mux itself.
        GuestPolicy = "guest-policy",
        /// As what forwards said, a guest or the mux itself.
        GuestNoBuffer = "guest-no-buffer",
        /// As what forwards said, a guest or the mux itself.
        GuestUnresolved = "guest-unresolved",
    }
}

impl Reason {
    /// Reasons that are limits of the spec: the classes of punts, and floods.
    const LIMITS: std::ops::RangeInclusive<usize> =
        Self::PuntLimitLocal as usize..=Self::FloodLimit as usize;
}

impl From<GuestDrop> for Reason {
    fn from(reason: GuestDrop) -> Self {
        Self::ALL[Self::GuestMalformed as usize + reason as usize]
    }
}

impl From<PuntClass> for Reason {
    fn from(class: PuntClass) -> Self {
        Self::ALL[Self::PuntLimitLocal as usize + class as usize]
    }
}

named! {
    /// Why a frame was dropped at an external interface: from outside before it was known whose it
    /// is, or on its way out.
    OuterReason {
        /// Outer lengths or versions contradict each other.
        Malformed = "malformed",
        /// The outer IPv4 header's checksum is wrong.
        HeaderChecksum = "header-checksum",
        /// An outer fragment.
        Fragment = "fragment",
        /// Nothing that carries tunnels, and no vlink takes the whole interface.
        NotATunnel = "not-a-tunnel",
        /// A key that no vlink has.
        UnknownTunnel = "unknown-tunnel",
        /// A vlink's key, from another than its other end.
        UnknownPeer = "unknown-peer",
        /// A link address that is not ours.
        OtherMac = "other-mac",
        /// The outer UDP checksum is wrong, or missing where it must be.
        UdpChecksum = "udp-checksum",
        /// No VXLAN header, or without a valid identifier.
        VxlanHeader = "vxlan-header",
        /// GRE of another version, or with routing.
        GreHeader = "gre-header",
        /// The checksum of GRE is wrong, missing where the tunnel has one, or there where it has none.
        GreChecksum = "gre-checksum",
        /// Late by the sequence of GRE, or without a number where the tunnel has them.
        GreSequence = "gre-sequence",
        /// No Geneve header of an Ethernet frame, or one that is longer than the datagram.
        GeneveHeader = "geneve-header",
        /// Geneve for the tunnel's ends themselves, of which none is known.
        GeneveControl = "geneve-control",
        /// Geneve with options that must be understood, of which none is.
        GeneveCritical = "geneve-critical",
        /// Met congestion in the underlay, and what is inside can't be marked (RFC 6040 section 4.2).
        CeOnNotEct = "ce-on-not-ect",
        /// The worker that owns the vnet is too far behind.
        HandoverFull = "handover-full",
        /// The vnet changed while the frame was on its way to its worker.
        Stale = "stale",
        /// Longer than a packet.
        TooLong = "too-long",
        /// Several segments that the sender left to its device to cut, with headers that they can't be
        /// cut by.
        NotCut = "not-cut",
        /// The kernel would not send it by a packet socket: the device is down or gone, or its MTU
        /// is less than before.
        Refused = "refused",
        /// A port sent it, by another worker, to a memif interface whose program is gone.
        Gone = "gone",
    }
}

impl From<NotATunnel> for OuterReason {
    fn from(reason: NotATunnel) -> Self {
        match reason {
            NotATunnel::Other => Self::NotATunnel,
            NotATunnel::Malformed => Self::Malformed,
            NotATunnel::HeaderChecksum => Self::HeaderChecksum,
            NotATunnel::Fragment => Self::Fragment,
            NotATunnel::GreHeader => Self::GreHeader,
        }
    }
}

impl From<geneve::Fault> for OuterReason {
    fn from(fault: geneve::Fault) -> Self {
        match fault {
            geneve::Fault::Header => Self::GeneveHeader,
            geneve::Fault::Control => Self::GeneveControl,
            geneve::Fault::Critical => Self::GeneveCritical,
        }
    }
}

/// Counters of a port; see [`mux::PortStats`].
#[derive(Clone, Debug, Default)]
pub struct PortCounters {
    /// Frames that arrived by the vlink.
    pub received: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Frames that began here.
    pub made: u64,
    /// Frames that left by the vlink.
    pub sent: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Copies of frames that went to many.
    pub copied: u64,
    /// Frames that went twice on purpose.
    pub duplicated: u64,
    /// Frames in which a bit was turned on purpose.
    pub corrupted: u64,
    /// Frames that overtook others on purpose.
    pub reordered: u64,
    /// Frames handed to the TAP.
    pub punted: u64,
    /// Frames that ended in a guest.
    pub consumed: u64,
    /// Frames that a capture did not get.
    pub capture_missed: u64,
    dropped: ByReason,
    /// Time of the last drop by each of [`Reason::LIMITS`], nanoseconds of the worker's clock; 0: never.
    limited_ns: [u64; mux::PUNT_CLASSES + 1],
}

/// A counter for each reason.
#[derive(Clone, Debug)]
struct ByReason([u64; Reason::ALL.len()]);

impl Default for ByReason {
    fn default() -> Self {
        Self([0; Reason::ALL.len()])
    }
}

impl PortCounters {
    /// Counts a dropped frame.
    pub fn drop(&mut self, reason: Reason) {
        self.drop_all(reason, 1);
    }

    /// Counts dropped frames.
    pub fn drop_all(&mut self, reason: Reason, frames: u64) {
        self.dropped.0[reason as usize] += frames;
    }

    /// Notes that `reason`, a limit of the spec, drops a frame now.
    pub fn limit(&mut self, reason: Reason, now_ns: u64) {
        self.limited_ns[reason as usize - *Reason::LIMITS.start()] = now_ns;
    }

    /// For the API: reasons that never occurred are left out.
    pub fn stats(&self, now_ns: u64) -> mux::PortStats {
        let lately_ns = now_ns.saturating_sub(mux::LIMITING_S * 1_000_000_000);
        let limiting = self.limited_ns.into_iter().zip(Reason::LIMITS);
        let limiting = limiting.filter(|(at_ns, _)| *at_ns > lately_ns);
        mux::PortStats {
            received: self.received,
            received_bytes: self.received_bytes,
            made: self.made,
            sent: self.sent,
            sent_bytes: self.sent_bytes,
            copied: self.copied,
            duplicated: self.duplicated,
            corrupted: self.corrupted,
            reordered: self.reordered,
            punted: self.punted,
            consumed: self.consumed,
            dropped: occurred(&Reason::ALL.map(Reason::name), &self.dropped.0),
            capture_missed: self.capture_missed,
            waiting: 0,
            queues: vec![],
            underlay: None,
            limiting: limiting.map(|(_, at)| Reason::ALL[at].name().into()).collect(),
        }
    }
}

/// Counters of a node as a worker copies them: without the names of its ports.
#[derive(Debug)]
pub struct Counted {
    /// Time of the copy, nanoseconds of the worker's clock.
    pub(crate) now_ns: u64,
    /// Of each port, and how many frames wait at its link.
    pub(crate) ports: Vec<(PortCounters, usize)>,
    pub(crate) guests: BTreeMap<u32, mux::GuestStats>,
    pub(crate) in_flight: u64,
    pub(crate) tap_connected: bool,
    pub(crate) engine: Option<mux::EngineStats>,
}

impl Counted {
    /// For the API, with the names of the ports in order.
    pub fn stats<'a>(self, names: impl Iterator<Item = &'a str>) -> mux::NodeStats {
        let Self { now_ns, ports, guests, in_flight, tap_connected, engine } = self;
        let stats = ports.iter().map(|(counters, waiting)| mux::PortStats {
            waiting: *waiting as u64,
            ..counters.stats(now_ns)
        });
        let ports = names.map(str::to_string).zip(stats).collect();
        mux::NodeStats { ports, guests, in_flight, tap_connected, engine }
    }
}

/// A worker's counters of an external interface; see [`mux::ExternalStats`].
#[derive(Clone, Debug, Default)]
pub struct ExternalCounters {
    /// Frames received.
    pub received: u64,
    /// Frames sent.
    pub sent: u64,
    dropped: [u64; OuterReason::ALL.len()],
}

impl ExternalCounters {
    /// Counts a dropped frame.
    pub fn drop(&mut self, reason: OuterReason) {
        self.drop_all(reason, 1);
    }

    /// Counts dropped frames.
    pub fn drop_all(&mut self, reason: OuterReason, frames: u64) {
        self.dropped[reason as usize] += frames;
    }

    /// As pdpd gets them.
    pub fn stats(&self) -> mux::ExternalStats {
        mux::ExternalStats {
            received: self.received,
            sent: self.sent,
            dropped: occurred(&OuterReason::ALL.map(OuterReason::name), &self.dropped),
            ..mux::ExternalStats::default()
        }
    }
}

fn occurred(names: &[&str], counts: &[u64]) -> BTreeMap<String, u64> {
    let occurred = names.iter().zip(counts).filter(|(_, count)| **count > 0);
    occurred.map(|(name, count)| (name.to_string(), *count)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_explains_each_reason() {
        let page = include_str!("../../../docs/counters.md");
        let names = Reason::ALL.map(Reason::name).into_iter();
        for name in names.chain(OuterReason::ALL.map(OuterReason::name)) {
            assert!(page.contains(&format!("`{name}`")), "docs/counters.md lacks {name}");
        }
    }

    #[test]
    fn guests_reasons_keep_their_names() {
        for reason in GuestDrop::ALL {
            assert_eq!(Reason::from(reason).name(), reason.name());
        }
        for class in PuntClass::ALL {
            assert_eq!(Reason::from(class).name(), format!("punt-limit-{}", class.name()));
        }
    }

    #[test]
    fn limits_that_dropped_lately_are_named() {
        const SECOND: u64 = 1_000_000_000;
        let mut counters = PortCounters::default();
        assert_eq!(counters.stats(100 * SECOND).limiting, Vec::<String>::new());
        counters.limit(PuntClass::Control.into(), 100 * SECOND);
        counters.limit(Reason::FloodLimit, 105 * SECOND);
        let named = |now_s| counters.stats(now_s * SECOND).limiting;
        assert_eq!(named(109), ["punt-limit-control", "flood-limit"]);
        assert_eq!(named(110), ["flood-limit"]);
        assert_eq!(named(115), Vec::<String>::new());
        assert_eq!(Reason::LIMITS.count(), counters.limited_ns.len());
    }

    #[test]
    fn each_reason_has_its_own_counter() {
        let mut counters = PortCounters::default();
        for (times, reason) in Reason::ALL.iter().enumerate() {
            (0..=times).for_each(|_| counters.drop(*reason));
        }
        let dropped = counters.stats(0).dropped;
        for (times, reason) in Reason::ALL.iter().enumerate() {
            assert_eq!(dropped[reason.name()], times as u64 + 1);
        }
    }
}
