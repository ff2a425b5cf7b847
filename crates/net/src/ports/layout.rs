//! Layout of the maps in `bpf/pdp_ports.h`, `bpf/pdp_short.h`,
//! `bpf/pdp_tunnels.h` and `bpf/pdp_ports.bpf.c`: each port's link, rate,
//! counters and tunnel, and the shared state of a vrouter's ports.

use std::net::IpAddr;
use std::time::Duration;

use pdp_wire::outer::HeaderTemplate;
use pdp_wire::tunnel::Encapsulation;
use zerocopy::{FromBytes, Immutable, IntoBytes};

#[cfg(doc)]
use super::PortSpec;
use super::{KernelPortCounters, PortRate, Reason, Traffic, UnderlayHop};

/// From `bpf/pdp_ports.h`.
const FRACTION_BITS: u32 = 20;
const SECOND: u128 = 1_000_000_000 << FRACTION_BITS;

/// Longest burst, in a bucket's time units: about an hour.
const BURST_MAX: u128 = 1 << 62;

/// Default burst: time at the rate, but at least this many full
/// frames; as for limits (crates/mux/src/police.rs).
const BURST_NS: u128 = 10_000_000;
const BURST_FRAMES_MIN: u128 = 32;
const FRAME_BYTES: u128 = 1514;

/// Shortest explicit burst, bytes; with less, the longest frame would never pass.
const BURST_BYTES_MIN: u128 = 2048;

/// CPU budget of a vrouter's kernel threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Power {
    /// Thousandths of a CPU, at least 1.
    pub millicores: u32,
}

/// Frames delivered to a vrouter at a port, by their
/// further path. All but `short` passed to its stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BypassCounters {
    /// Bypassed: sent out of another port, or dropped there. The counters of
    /// that port include them as sent by the vrouter.
    pub bypassed: u64,
    /// There was no lease.
    pub silent: u64,
    /// A hook applies to them.
    pub hooked: u64,
    /// More than plain routing: options, fragments, an expiring TTL,
    /// groups, errors, not IP, not for this port, ….
    pub special: u64,
    /// No plain unicast route to another port, or that port is down.
    pub route: u64,
    /// The neighbour is not known yet.
    pub neighbour: u64,
    /// Larger than an MTU on its path.
    pub too_big: u64,
    /// The stack must validate the source: an address of the router, or one without a route.
    pub source: u64,
}

/// Neighbour that received bypassed frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UsedNeighbour {
    /// Vrouter of the neighbour: [`PortSpec::vrouter`].
    pub vrouter: u32,
    /// Address of the neighbour.
    pub address: IpAddr,
    /// Interface of the neighbour, by its index in the vrouter's namespace.
    pub index: u32,
    /// Time of the last use, by the machine's monotonic clock
    /// ([`super::now`]); exact to a quarter of a second.
    pub at: Duration,
}

/// `struct bucket`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct PortBucket {
    step: u64,
    burst: u64,
    ahead: u64,
}

impl PortBucket {
    /// Full bucket for a rate in units per second (0: no limit) and a burst in units (0: default).
    fn new(rate: u64, burst: u128, unit: u128) -> Self {
        let Some(step) = SECOND.checked_div(u128::from(rate)) else { return Self::default() };
        let burst = match burst {
            0 => (BURST_NS << FRACTION_BITS).max(step * BURST_FRAMES_MIN * unit),
            units => step * units.max(BURST_BYTES_MIN),
        };
        // If the rate is so high that its step is less than one time unit, there is no limit.
        Self { step: step as u64, burst: burst.min(BURST_MAX) as u64, ahead: 0 }
    }
}

/// `struct port`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct PortEntry {
    lock: u32,
    /// Number of the port at the link's other end, plus 1; 0: none; or [`OUTSIDE`].
    pub to: u32,
    /// Longest frame that is delivered here, bytes; 0: none is.
    pub frame_bytes_max: u32,
    /// Slot of its vrouter.
    pub vrouter: u32,
    /// Index of its inner end; 0: there is none.
    pub inner: u32,
    /// Only thread that may serve the inner end; 0: any may.
    pub thread: u32,
    /// 1 while its link is down.
    pub closed: u8,
    policed: u8,
    pub aside: u8,
    reserved: u8,
    ran: u32,
    ran_ns: u64,
    overhead_bytes: u32,
    pub mac: [u8; 6],
    reserved_too: u16,
    /// Number of its inner end's network namespace.
    pub netns: u32,
    bytes: PortBucket,
    frames: PortBucket,
    taken_ns: u64,
    /// Frames given to this port's root end that are known to be lost,
    /// without those that the current pair reports.
    pub settled: u64,
    unused: u64,
}

impl PortEntry {
    /// Applies a rate from now on. An unchanged rate keeps its bucket's state.
    pub(super) fn police(&mut self, rate: Option<PortRate>) {
        self.overhead_bytes = rate.map_or(0, |rate| rate.overhead_bytes);
        police(&mut self.bytes, &mut self.frames, rate);
        self.policed = u8::from(self.bytes.step != 0 || self.frames.step != 0);
    }
}

fn police(bytes: &mut PortBucket, frames: &mut PortBucket, rate: Option<PortRate>) {
    let rate = rate.unwrap_or_default();
    // Rates below one byte per second count as one byte per second.
    let units = if rate.bps == 0 { 0 } else { (rate.bps / 8).max(1) };
    let bucket = PortBucket::new(units, u128::from(rate.burst_bytes), FRAME_BYTES);
    let frame_bucket = PortBucket::new(rate.pps, 0, 1);
    let same = |a: PortBucket, b: PortBucket| (a.step, a.burst) == (b.step, b.burst);
    if !same(bucket, *bytes) || !same(frame_bucket, *frames) {
        (*bytes, *frames) = (bucket, frame_bucket);
    }
}

/// `struct vrouter`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct Vrouter {
    lock: u32,
    pub bytes_max: [u32; 2],
    reserved: u32,
    pub until_ns: u64,
    scale: u64,
    paid_ns: u64,
    unused: [u64; 3],
}

impl Vrouter {
    /// Applies a CPU budget from now on. An unchanged budget keeps its state.
    pub(super) fn set_power(&mut self, power: Option<Power>) {
        let scale = power.map_or(0, |power| power.scale());
        if scale != self.scale {
            (self.scale, self.paid_ns) = (scale, 0);
        }
    }
}

impl Power {
    /// Returns the weight of a nanosecond of CPU time.
    fn scale(self) -> u64 {
        (1000 << FRACTION_BITS) / u64::from(self.millicores).max(1)
    }
}

/// `struct inner`: a port by its inner end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct InnerKey {
    pub netns: u32,
    pub index: u32,
}

/// `struct used`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct UsedEntry {
    pub vrouter: u32,
    index: u32,
    family: u32,
    reserved: u32,
    address: [u8; 16],
    ns: u64,
}

impl UsedEntry {
    /// Returns the neighbour of this entry; `None` if the entry is empty.
    pub(super) fn neighbour(&self) -> Option<UsedNeighbour> {
        let [a, b, c, d, ..] = self.address;
        let address = match i32::try_from(self.family) {
            Ok(libc::AF_INET) => IpAddr::from([a, b, c, d]),
            Ok(libc::AF_INET6) => IpAddr::from(self.address),
            _ => return None,
        };
        let (vrouter, index, at) = (self.vrouter, self.index, Duration::from_nanos(self.ns));
        Some(UsedNeighbour { vrouter, address, index, at })
    }
}

/// `to` of a port whose link is a tunnel.
pub(super) const OUTSIDE: u32 = u32::MAX;

/// `struct limit`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct LimitEntry {
    lock: u32,
    reserved: u32,
    bytes: PortBucket,
    frames: PortBucket,
    taken_ns: u64,
}

impl LimitEntry {
    /// Like [`PortEntry::police`], without the overhead of frames, which is not known here.
    pub(super) fn police(&mut self, rate: Option<PortRate>) {
        police(&mut self.bytes, &mut self.frames, rate);
    }
}

/// From `bpf/pdp_tunnels.h`.
const PLAIN: u32 = 0x100;

/// `struct tunnel`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct TunnelMapKey {
    interface: u32,
    kind: u32,
    local: [u8; 16],
    remote: [u8; 16],
    vni: [u8; 4],
    local_port: [u8; 2],
    remote_port: [u8; 2],
}

impl TunnelMapKey {
    /// Returns the key that identifies a tunnel's frames;
    /// `None` for kinds that the programs don't know.
    fn of(interface: u32, by: &Encapsulation) -> Option<Self> {
        let (local, remote) = by.ends()?;
        let bytes = |address| match address {
            IpAddr::V4(address) => {
                let mut bytes = [0; 16];
                bytes[..4].copy_from_slice(&address.octets());
                bytes
            }
            IpAddr::V6(address) => address.octets(),
        };
        let (plain, vni, local_port, remote_port) = match by {
            Encapsulation::Vxlan(tunnel) => (0, tunnel.vni << 8, tunnel.port, 0),
            Encapsulation::Udp(tunnel) => (PLAIN, 0, tunnel.local_port, tunnel.remote_port),
            _ => return None,
        };
        Some(Self {
            interface,
            kind: plain | if local.is_ipv4() { 4 } else { 6 },
            local: bytes(local),
            remote: bytes(remote),
            vni: vni.to_be_bytes(),
            local_port: local_port.to_be_bytes(),
            remote_port: remote_port.to_be_bytes(),
        })
    }
}

/// `struct taker`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct Taker {
    pub port: u32,
    pub limit: u32,
    pub mac: [u8; 6],
    pub reserved: u16,
}

/// Bytes of the outer headers of VXLAN over IPv6, the longest that the programs write.
const HEADERS_BYTES: usize = 70;

/// `struct outside`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct EgressEntry {
    headers: [u8; HEADERS_BYTES],
    mtu: u16,
    headers_bytes: u32,
    sum: u32,
    spread: u32,
    pub tunnel: TunnelMapKey,
}

impl EgressEntry {
    /// Entry without a next hop. `None` for kinds that the programs don't know.
    pub(super) fn new(interface: u32, by: &Encapsulation, mac: [u8; 6]) -> Option<Self> {
        let tunnel = TunnelMapKey::of(interface, by)?;
        // For an empty frame, the template writes just the headers.
        let template = HeaderTemplate::new(by)?;
        let mut headers = [0; HEADERS_BYTES];
        template.write(headers.get_mut(..template.len())?, [0; 6], mac)?;
        let sum = if by.ends()?.0.is_ipv4() {
            // Type of service, total length and checksum differ for each frame.
            let ip = &mut headers[14..34];
            (ip[1], ip[2], ip[3], ip[10], ip[11]) = (0, 0, 0, 0, 0);
            let words = ip.as_chunks::<2>().0.iter();
            words.map(|word| u32::from(u16::from_be_bytes(*word))).sum()
        } else {
            // So does the UDP checksum.
            headers[60..62].fill(0);
            0
        };
        let headers_bytes = template.len() as u32;
        let spread = u32::from(matches!(by, Encapsulation::Vxlan(_)));
        Some(Self { headers, mtu: 0, headers_bytes, sum, spread, tunnel })
    }

    /// Sets the next hop; `None`: unknown.
    pub(super) fn set_hop(&mut self, hop: Option<UnderlayHop>) {
        self.headers[..6].copy_from_slice(&hop.map_or([0; 6], |hop| hop.mac));
        self.mtu = hop.map_or(0, |hop| hop.mtu);
    }

    /// True if both entries are equal, apart from the next hop.
    pub(super) fn is_like(mut self, mut other: Self) -> bool {
        self.set_hop(None);
        other.set_hop(None);
        self == other
    }
}

/// Count of reasons that the programs count; the last reason is not among them.
const REASONS: usize = Reason::ALL.len() - 1;

/// `struct port_counts`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct PortCountsEntry {
    traffic: [[u64; 2]; 4],
    paths: [u64; 8],
    dropped: [u64; REASONS],
    refused: [u64; REASONS],
}

impl PortCountsEntry {
    /// Returns the sum over all processors.
    pub(super) fn sum(of: impl IntoIterator<Item = Vec<u8>>) -> KernelPortCounters {
        let mut all = Self::default();
        for bytes in of {
            let Ok((one, _)) = Self::read_from_prefix(&bytes) else { continue };
            let more = one.traffic.as_flattened().iter().chain(&one.dropped);
            let more = more.chain(&one.refused).chain(&one.paths);
            let sums = all.traffic.as_flattened_mut().iter_mut();
            let sums = sums.chain(&mut all.dropped).chain(&mut all.refused);
            let sums = sums.chain(&mut all.paths);
            sums.zip(more).for_each(|(sum, more)| *sum = sum.wrapping_add(*more));
        }
        let [from_vrouter, to_link, from_link, to_vrouter] =
            all.traffic.map(|[frames, bytes]| Traffic { frames, bytes });
        let reasons = |of: [u64; REASONS]| {
            let mut all = [0; Reason::ALL.len()];
            all[..REASONS].copy_from_slice(&of);
            all
        };
        let (dropped, refused) = (reasons(all.dropped), reasons(all.refused));
        let [short, silent, hooked, special, route, neighbour, too_big, source] = all.paths;
        let paths = BypassCounters {
            bypassed: short,
            silent,
            hooked,
            special,
            route,
            neighbour,
            too_big,
            source,
        };
        KernelPortCounters {
            from_vrouter,
            to_link,
            from_link,
            to_vrouter,
            dropped,
            refused,
            bypass: paths,
            unsent: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Layouts match those of the programs.
    #[test]
    fn port_layouts_match_the_programs() {
        assert_eq!(size_of::<PortEntry>(), 128);
        assert_eq!(size_of::<PortCountsEntry>(), (4 * 2 + 2 * 10 + 8) * 8);
        assert_eq!(
            (size_of::<Vrouter>(), size_of::<InnerKey>(), size_of::<UsedEntry>()),
            (64, 8, 40)
        );
        assert_eq!((size_of::<LimitEntry>(), size_of::<TunnelMapKey>()), (2 * 4 + 2 * 24 + 8, 48));
        assert_eq!((size_of::<Taker>(), size_of::<EgressEntry>()), (16, 132));
        use crate::ports::{LIMITS_MAX, OBJECT, PORTS_MAX, USED_MAX};
        let mut builder = libbpf_rs::ObjectBuilder::default();
        let object = builder.open_memory(OBJECT).unwrap();
        for (name, bytes, entries) in [
            ("ports", size_of::<PortEntry>(), PORTS_MAX),
            ("port_counts", size_of::<PortCountsEntry>(), PORTS_MAX),
            ("tunnels", size_of::<Taker>(), 2 * PORTS_MAX),
            ("limits", size_of::<LimitEntry>(), LIMITS_MAX),
            ("vrouters", size_of::<Vrouter>(), PORTS_MAX),
            ("outsides", size_of::<EgressEntry>(), PORTS_MAX),
            ("inners", 4, PORTS_MAX),
            ("used", size_of::<UsedEntry>(), USED_MAX),
        ] {
            let map = object.maps().find(|map| map.name() == name).expect(name);
            assert_eq!((map.value_size() as usize, map.max_entries()), (bytes, entries), "{name}");
        }
    }

    #[test]
    fn a_bucket_has_its_rate_and_burst() {
        let mut port = PortEntry::default();
        let rate = PortRate { bps: 8_000_000, ..PortRate::default() };
        port.police(Some(rate));
        // A byte takes 1 µs; 10 ms are less than 32 full frames.
        assert_eq!(
            port.bytes,
            PortBucket { step: 1000 << 20, burst: (1000 << 20) * 48_448, ahead: 0 }
        );
        assert_eq!(port.frames, PortBucket::default());
        port.bytes.ahead = 7;
        port.police(Some(rate));
        assert_eq!(port.bytes.ahead, 7, "the same rate goes on");
        port.police(Some(PortRate { burst_bytes: 5000, pps: 10, ..rate }));
        assert_eq!(
            port.bytes,
            PortBucket { step: 1000 << 20, burst: (1000 << 20) * 5000, ahead: 0 }
        );
        assert_eq!(port.frames.burst, port.frames.step * 32);
        port.police(None);
        assert_eq!((port.bytes, port.frames), Default::default());
    }

    /// At the highest and lowest rates, the program's sums do not overflow.
    #[test]
    fn extreme_rates_do_not_overflow() {
        for bps in [1, 8, 1 << 40, u64::MAX] {
            let mut port = PortEntry::default();
            port.police(Some(PortRate { bps, burst_bytes: u64::MAX, ..PortRate::default() }));
            let most = u128::from(port.bytes.step) * 8192 + u128::from(port.bytes.burst);
            assert!(most <= u128::from(u64::MAX), "{bps}");
            assert!(port.bytes.step == 0 || port.bytes.burst >= port.bytes.step * 2048);
        }
    }
}
