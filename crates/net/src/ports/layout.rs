//! What stands in the maps of `bpf/pdp_ports.h`: each port's link, rate and counts.

use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{Counters, Rate, Reason, Traffic};

/// Of `bpf/pdp_ports.h`.
const FRACTION_BITS: u32 = 20;
const SECOND: u128 = 1_000_000_000 << FRACTION_BITS;

/// Longest burst, in the parts of time of a bucket: about an hour.
const BURST_MAX: u128 = 1 << 62;

/// Burst where none is told: time at the rate, and full frames, at least; as of limits (crates/mux/src/police.rs).
const BURST_NS: u128 = 10_000_000;
const BURST_FRAMES_MIN: u128 = 32;
const FRAME_BYTES: u128 = 1514;

/// Shortest burst that is told, bytes: else the longest frame would never pass.
const BURST_BYTES_MIN: u128 = 2048;

/// `struct bucket`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct Bucket {
    step: u64,
    burst: u64,
    ahead: u64,
}

impl Bucket {
    /// Full, of a rate in units a second; 0: no limit. A burst of so many units; 0: as none is told.
    fn new(rate: u64, burst: u128, unit: u128) -> Self {
        let Some(step) = SECOND.checked_div(u128::from(rate)) else { return Self::default() };
        let burst = match burst {
            0 => (BURST_NS << FRACTION_BITS).max(step * BURST_FRAMES_MIN * unit),
            units => step * units.max(BURST_BYTES_MIN),
        };
        // A rate so high that its step is less than one part of time is no limit.
        Self { step: step as u64, burst: burst.min(BURST_MAX) as u64, ahead: 0 }
    }
}

/// `struct port`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct Port {
    lock: u32,
    /// Number of the port at the link's other end and 1; 0: none.
    pub to: u32,
    /// Of what is delivered here; 0: nothing is.
    pub frame_bytes_max: u32,
    overhead_bytes: u32,
    /// 1 where its link is down.
    pub closed: u32,
    reserved: u32,
    bytes: Bucket,
    frames: Bucket,
    taken_ns: u64,
    /// Frames that were given to this port's root end and are known to be lost beyond what the present pair says.
    pub settled: u64,
}

impl Port {
    /// At a rate from now on; where it is the same, nothing changes.
    pub(super) fn police(&mut self, rate: Option<Rate>) {
        let rate = rate.unwrap_or_default();
        // Below one byte a second is not distinguished from that.
        let bytes = if rate.bps == 0 { 0 } else { (rate.bps / 8).max(1) };
        let bytes = Bucket::new(bytes, u128::from(rate.burst_bytes), FRAME_BYTES);
        let frames = Bucket::new(rate.pps, 0, 1);
        let same = |a: Bucket, b: Bucket| (a.step, a.burst) == (b.step, b.burst);
        self.overhead_bytes = rate.overhead_bytes;
        if !same(bytes, self.bytes) || !same(frames, self.frames) {
            (self.bytes, self.frames) = (bytes, frames);
        }
    }
}

/// `struct port_counts`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct Counts {
    traffic: [[u64; 2]; 4],
    drops: [u64; DROPS],
}

/// Reasons that the programs count; the last is not theirs.
const DROPS: usize = Reason::ALL.len() - 1;

impl Counts {
    /// All processors' together.
    pub(super) fn sum(of: impl IntoIterator<Item = Vec<u8>>) -> Counters {
        let mut all = Self::default();
        for bytes in of {
            let Ok((one, _)) = Self::read_from_prefix(&bytes) else { continue };
            let more = one.traffic.as_flattened().iter().chain(&one.drops);
            let sums = all.traffic.as_flattened_mut().iter_mut().chain(&mut all.drops);
            sums.zip(more).for_each(|(sum, more)| *sum = sum.wrapping_add(*more));
        }
        let [from_vrouter, to_link, from_link, to_vrouter] =
            all.traffic.map(|[frames, bytes]| Traffic { frames, bytes });
        let mut dropped = [0; Reason::ALL.len()];
        dropped[..DROPS].copy_from_slice(&all.drops);
        Counters { from_vrouter, to_link, from_link, to_vrouter, dropped, unsent: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the programs have them: `struct port` has 8 words of 4 bytes less two, two buckets and two numbers.
    #[test]
    fn layouts_are_those_of_the_programs() {
        assert_eq!(size_of::<Port>(), 6 * 4 + 2 * 24 + 2 * 8);
        assert_eq!(size_of::<Counts>(), (4 * 2 + 5) * 8);
    }

    #[test]
    fn a_bucket_has_its_rate_and_burst() {
        let mut port = Port::default();
        let rate = Rate { bps: 8_000_000, ..Rate::default() };
        port.police(Some(rate));
        // A microsecond a byte; 10 ms are less than 32 full frames.
        assert_eq!(port.bytes, Bucket { step: 1000 << 20, burst: (1000 << 20) * 48_448, ahead: 0 });
        assert_eq!(port.frames, Bucket::default());
        port.bytes.ahead = 7;
        port.police(Some(rate));
        assert_eq!(port.bytes.ahead, 7, "the same rate goes on");
        port.police(Some(Rate { burst_bytes: 5000, pps: 10, ..rate }));
        assert_eq!(port.bytes, Bucket { step: 1000 << 20, burst: (1000 << 20) * 5000, ahead: 0 });
        assert_eq!(port.frames.burst, port.frames.step * 32);
        port.police(None);
        assert_eq!((port.bytes, port.frames), Default::default());
    }

    /// The highest and lowest rates: no overflow in what the program adds up.
    #[test]
    fn no_rate_is_too_high_or_too_low() {
        for bps in [1, 8, 1 << 40, u64::MAX] {
            let mut port = Port::default();
            port.police(Some(Rate { bps, burst_bytes: u64::MAX, ..Rate::default() }));
            let most = u128::from(port.bytes.step) * 8192 + u128::from(port.bytes.burst);
            assert!(most <= u128::from(u64::MAX), "{bps}");
            assert!(port.bytes.step == 0 || port.bytes.burst >= port.bytes.step * 2048);
        }
    }
}
