//! Counters, and the names of the reasons for which frames are dropped.
//!
//! Counters are plain numbers of the worker that owns them. On request the worker
//! copies them between two rounds, a few nodes at a time ([`NodeCounters`]). The counters
//! of a node are thus of one moment, and add up. The requesting thread adds the names.

use std::collections::BTreeMap;

use pdp_model::{ExternalStats, LIMITING_S, NodeStats, PortStats};
use pdp_proto::mux;
use pdp_wire::geneve;
use pdp_wire::named;
use pdp_wire::outer::NotATunnel;
use pdp_wire::tag::{GuestDrop, PuntClass};

named! {
    /// Reason why a vnet's frame was dropped, counted at one of its ports.
    Reason {
        /// The worker has a backlog of the vnet's frames, and queues no more of them.
        Behind = "worker-behind",
        /// The same for a vrouter that the mux itself forwards for. Forwarding its frames would
        /// take more of the worker's time than the vnet has, and no work was spent on this frame.
        FastpathPower = "fastpath-power",
        /// Exceeds the vnet's rate for frames from outside.
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
        /// Exceeds the limit of punts of this class.
        PuntLimitLocal = "punt-limit-local",
        /// See `PuntLimitLocal`.
        PuntLimitNeighbour = "punt-limit-neighbour",
        /// See `PuntLimitLocal`.
        PuntLimitException = "punt-limit-exception",
        /// See `PuntLimitLocal`.
        PuntLimitHook = "punt-limit-hook",
        /// See `PuntLimitLocal`.
        PuntLimitControl = "punt-limit-control",
        /// Exceeds the rate at which its end may flood the segment.
        FloodLimit = "flood-limit",
        /// The node's TAP helper is not connected.
        NoTap = "no-tap",
        /// The TAP helper's ring is full.
        TapRingFull = "tap-ring-full",
        /// No free packet for a copy to this port.
        NoPacket = "no-packet",
        /// The segment knows its address at the end that it came from,
        /// or behind another tunnel although it came by a tunnel.
        NoOtherEnd = "no-other-end",
        /// A filter of the vrouter's slow path dropped it.
        Filtered = "filtered",
        /// Matched no filter, in a vrouter that forwards by filters alone.
        Unmatched = "unmatched",
        /// Lost on purpose: the vlink's `loss`.
        Loss = "loss",
        /// More frames wait for the vlink's delay than its rate allows.
        DelayFull = "delay-full",
        /// Sent out of a port without a vlink.
        Unconnected = "unconnected",
        /// No room in the vlink's queue.
        QueueFull = "queue-full",
        /// In the underlay, there is no route, or no neighbour
        /// answered for the next hop's MAC address in time.
        UnderlayUnresolved = "underlay-unresolved",
        /// Longer than the external interface allows with the tunnel's headers.
        UnderlayTooBig = "underlay-too-big",
        /// Longer than the path to the tunnel's other end allows with the tunnel's headers.
        PathTooBig = "underlay-path-too-big",
        /// The external interface's ring is full.
        ExternalRingFull = "external-ring-full",
        /// The external interface has no sockets.
        ExternalGone = "external-gone",
        /// Reported by the forwarder: a guest, or the mux itself.
        GuestMalformed = "guest-malformed",
        /// Reported by the forwarder: a guest, or the mux itself.
        GuestNoRoute = "guest-no-route",
        /// Reported by the forwarder: a guest, or the mux itself.
        GuestBlackhole = "guest-blackhole",
        /// Reported by the forwarder: a guest, or the mux itself.
        GuestPortDown = "guest-port-down",
        /// Reported by the forwarder: a guest, or the mux itself.
        GuestNotForUs = "guest-not-for-us",
        /// Reported by the forwarder: a guest, or the mux itself.
        GuestPolicy = "guest-policy",
        /// Reported by the forwarder: a guest, or the mux itself.
        GuestNoBuffer = "guest-no-buffer",
        /// Reported by the forwarder: a guest, or the mux itself.
        GuestUnresolved = "guest-unresolved",
    }
}

impl Reason {
    /// Reasons that are limits of the spec: punts by class, and floods.
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
    /// Reason why an external interface dropped a frame: on
    /// arrival before its vnet was known, or on its way out.
    OuterReason {
        /// Outer lengths or versions contradict each other.
        Malformed = "malformed",
        /// The outer IPv4 header's checksum is wrong.
        HeaderChecksum = "header-checksum",
        /// An outer fragment.
        Fragment = "fragment",
        /// Not a tunnelled frame, and no vlink takes the whole interface.
        NotATunnel = "not-a-tunnel",
        /// No vlink has this key.
        UnknownTunnel = "unknown-tunnel",
        /// A vlink has this key, but the frame is not from the vlink's other end.
        UnknownPeer = "unknown-peer",
        /// Addressed to a MAC address that is not ours.
        OtherMac = "other-mac",
        /// The outer UDP checksum is wrong, or missing where it must be.
        UdpChecksum = "udp-checksum",
        /// No VXLAN header, or one without a valid identifier.
        VxlanHeader = "vxlan-header",
        /// GRE of another version, or with routing.
        GreHeader = "gre-header",
        /// The GRE checksum is wrong, missing although the
        /// tunnel has one, or present although it has none.
        GreChecksum = "gre-checksum",
        /// Late by its GRE sequence number, or without a number although the tunnel has them.
        GreSequence = "gre-sequence",
        /// No Geneve header for an Ethernet frame, or one longer than the datagram.
        GeneveHeader = "geneve-header",
        /// A Geneve control message for the tunnel's ends. None is supported.
        GeneveControl = "geneve-control",
        /// Geneve with options that the receiver must understand. None is supported.
        GeneveCritical = "geneve-critical",
        /// Marked for congestion in the underlay, but the
        /// inner frame can't be marked (RFC 6040 section 4.2).
        CeOnNotEct = "ce-on-not-ect",
        /// The ring to the worker that owns the vnet is full.
        HandoverFull = "handover-full",
        /// The vnet changed while the frame was on its way to its worker.
        Stale = "stale",
        /// Longer than a packet.
        TooLong = "too-long",
        /// Several segments for the sender's device to cut, with headers that don't allow it.
        NotCut = "not-cut",
        /// The kernel refused to send it by a packet socket: the
        /// device is down or gone, or its MTU has become less.
        Refused = "refused",
        /// Sent by another worker to a memif interface whose program is gone.
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

impl From<geneve::GeneveError> for OuterReason {
    fn from(fault: geneve::GeneveError) -> Self {
        match fault {
            geneve::GeneveError::Header => Self::GeneveHeader,
            geneve::GeneveError::Control => Self::GeneveControl,
            geneve::GeneveError::Critical => Self::GeneveCritical,
        }
    }
}

/// Counters of a port.
#[derive(Clone, Debug, Default)]
pub struct PortCounters {
    /// Counters, except `dropped`, `waiting`, and `queues`.
    pub stats: PortStats,
    dropped: ByReason,
    /// Time of the last drop by each of [`Reason::LIMITS`], nanoseconds of the worker's clock; 0:
    /// never.
    limited_ns: [u64; mux::PUNT_CLASSES + 1],
}

/// One counter for each reason.
#[derive(Clone, Debug)]
struct ByReason([u64; Reason::ALL.len()]);

impl Default for ByReason {
    fn default() -> Self {
        Self([0; Reason::ALL.len()])
    }
}

impl PortCounters {
    /// Counts one dropped frame.
    pub fn drop(&mut self, reason: Reason) {
        self.drop_all(reason, 1);
    }

    /// Counts dropped frames.
    pub fn drop_all(&mut self, reason: Reason, frames: u64) {
        self.dropped.0[reason as usize] += frames;
    }

    /// Records that `reason`, a limit of the spec, drops a frame now.
    pub fn limit(&mut self, reason: Reason, now_ns: u64) {
        self.limited_ns[reason as usize - *Reason::LIMITS.start()] = now_ns;
    }

    /// Returns the counters for the API, without reasons that never occurred.
    pub fn stats(&self, now_ns: u64) -> PortStats {
        let lately_ns = now_ns.saturating_sub(LIMITING_S * 1_000_000_000);
        let limiting = self.limited_ns.into_iter().zip(Reason::LIMITS);
        let limiting = limiting.filter(|(at_ns, _)| *at_ns > lately_ns);
        PortStats {
            dropped: occurred(&Reason::ALL.map(Reason::name), &self.dropped.0),
            limiting: limiting.map(|(_, at)| Reason::ALL[at].name().into()).collect(),
            ..self.stats.clone()
        }
    }
}

/// A worker's copy of a node's counters, without the names of its ports.
#[derive(Debug)]
pub struct NodeCounters {
    /// Time of the copy, nanoseconds of the worker's clock.
    pub(crate) now_ns: u64,
    /// Counters of each port, and the frames that wait at its link.
    pub(crate) ports: Vec<(PortCounters, usize)>,
    /// All other counters.
    pub(crate) node: NodeStats,
}

impl NodeCounters {
    /// Returns the counters for the API, with the ports' names in order.
    pub fn stats<'a>(self, names: impl Iterator<Item = &'a str>) -> NodeStats {
        let Self { now_ns, ports, node } = self;
        let stats = ports.iter().map(|(counters, waiting)| PortStats {
            waiting: *waiting as u64,
            ..counters.stats(now_ns)
        });
        NodeStats { ports: names.map(str::to_string).zip(stats).collect(), ..node }
    }
}

/// A worker's counters of an external interface.
#[derive(Clone, Debug, Default)]
pub struct ExternalCounters {
    /// Counters, except `dropped` and those of netdevs.
    pub stats: ExternalStats,
    dropped: [u64; OuterReason::ALL.len()],
}

impl ExternalCounters {
    /// Counts one dropped frame.
    pub fn drop(&mut self, reason: OuterReason) {
        self.drop_all(reason, 1);
    }

    /// Counts dropped frames.
    pub fn drop_all(&mut self, reason: OuterReason, frames: u64) {
        self.dropped[reason as usize] += frames;
    }

    /// Returns the counters in the form that pdpd gets.
    pub fn stats(&self) -> ExternalStats {
        ExternalStats {
            dropped: occurred(&OuterReason::ALL.map(OuterReason::name), &self.dropped),
            ..self.stats.clone()
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
    fn counters_page_explains_each_drop_reason() {
        let page = include_str!("../../../docs/counters.md");
        let names = Reason::ALL.map(Reason::name).into_iter();
        for name in names.chain(OuterReason::ALL.map(OuterReason::name)) {
            assert!(page.contains(&format!("`{name}`")), "docs/counters.md lacks {name}");
        }
    }

    #[test]
    fn guest_drop_reasons_keep_their_names() {
        for reason in GuestDrop::ALL {
            assert_eq!(Reason::from(reason).name(), reason.name());
        }
        for class in PuntClass::ALL {
            assert_eq!(Reason::from(class).name(), format!("punt-limit-{}", class.name()));
        }
    }

    #[test]
    fn stats_name_limits_that_dropped_recently() {
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
    fn each_drop_reason_has_its_own_counter() {
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
