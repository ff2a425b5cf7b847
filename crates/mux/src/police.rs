//! Token buckets for rate limits.
//!
//! A bucket stores the time when it will be full again (the generic cell rate
//! algorithm, ITU-T I.371 annex A). The time is in nanoseconds with 32 bits of
//! fraction, so that it suits every rate and rounding errors do not add up.

use pdp_proto::mux::Rate;

/// Burst of a limit, as time at its rate.
pub const LIMIT_BURST_NS: u64 = 10_000_000;

/// Least burst of a limit: full frames of 1,500 bytes, or packets.
pub const LIMIT_BURST_FRAMES_MIN: u64 = 32;

const FRAME_BYTES: u64 = 1514;
const FRACTION_BITS: u32 = 32;
const SECOND: u128 = 1_000_000_000 << FRACTION_BITS;

/// One rate, of bytes or of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RateBucket {
    /// Time for one unit.
    step: u128,
    /// Most time that the bucket may run ahead of now.
    burst: u128,
    /// Time when it is full again.
    full_at: u128,
}

impl RateBucket {
    /// Returns `None` for a rate of 0: no limit.
    fn new(units_per_second: u64, burst_ns: u64, burst_units_min: u64) -> Option<Self> {
        let step = SECOND.checked_div(u128::from(units_per_second))?;
        let burst = (u128::from(burst_ns) << FRACTION_BITS).max(step * u128::from(burst_units_min));
        Some(Self { step, burst, full_at: 0 })
    }

    /// Returns when `units` may pass, if not now.
    fn wait(&self, now: u128, units: u64) -> Option<u128> {
        let after = self.full_at.max(now) + self.step * u128::from(units);
        (after > now + self.burst).then(|| after - self.burst)
    }

    fn take(&mut self, now: u128, units: u64) {
        self.full_at = self.full_at.max(now) + self.step * u128::from(units);
    }
}

/// A limit on bits and packets a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenBucket {
    bytes: Option<RateBucket>,
    packets: Option<RateBucket>,
}

impl TokenBucket {
    /// Returns a limit with the default burst: [`LIMIT_BURST_NS`], [`LIMIT_BURST_FRAMES_MIN`].
    pub fn limit(rate: Rate) -> Self {
        Self::new(rate, LIMIT_BURST_NS, LIMIT_BURST_FRAMES_MIN)
    }

    /// Returns a full bucket. Its burst is `burst_ns` at
    /// the rate, but at least `frames_min` full frames.
    pub fn new(rate: Rate, burst_ns: u64, frames_min: u64) -> Self {
        // A rate below one byte a second is treated as one byte a second.
        let bytes = if rate.bps == 0 { 0 } else { (rate.bps / 8).max(1) };
        Self {
            bytes: RateBucket::new(bytes, burst_ns, frames_min * FRAME_BYTES),
            packets: RateBucket::new(rate.pps, burst_ns, frames_min),
        }
    }

    /// Returns a full bucket for `burst_bytes` at `bps`, bits a second above 0.
    pub fn with_burst(bps: u64, burst_bytes: u64) -> Self {
        Self { bytes: RateBucket::new((bps / 8).max(1), 0, burst_bytes), packets: None }
    }

    /// True if it has no limit.
    #[inline]
    pub fn is_unlimited(&self) -> bool {
        self.bytes.is_none() && self.packets.is_none()
    }

    /// Charges a frame of `bytes` that may pass at `now_ns`.
    /// Otherwise returns when it may, nanoseconds.
    pub fn take(&mut self, now_ns: u64, bytes: usize) -> Result<(), u64> {
        let now = u128::from(now_ns) << FRACTION_BITS;
        let bytes = bytes as u64;
        let waits = [
            self.bytes.as_ref().and_then(|bucket| bucket.wait(now, bytes)),
            self.packets.as_ref().and_then(|bucket| bucket.wait(now, 1)),
        ];
        if let Some(at) = waits.into_iter().flatten().max() {
            return Err(u64::try_from((at >> FRACTION_BITS) + 1).unwrap_or(u64::MAX));
        }
        if let Some(bucket) = &mut self.bytes {
            bucket.take(now, bytes);
        }
        if let Some(bucket) = &mut self.packets {
            bucket.take(now, 1);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn token_bucket_without_rate_is_unlimited() {
        let mut bucket = TokenBucket::limit(Rate { bps: 0, pps: 0 });
        for _ in 0..1_000_000 {
            assert_eq!(bucket.take(0, 9000), Ok(()));
        }
    }

    #[test]
    fn refused_frame_passes_exactly_at_the_returned_time() {
        let mut bucket = TokenBucket::new(Rate { bps: 8_000_000, pps: 0 }, 0, 1);
        assert_eq!(bucket.take(0, 1514), Ok(()));
        let at = bucket.take(0, 1000).unwrap_err();
        assert!(bucket.take(at - 2, 1000).is_err());
        assert_eq!(bucket.take(at, 1000), Ok(()));
        assert!((999_000..=1_001_000).contains(&at), "{at}");
    }

    proptest! {
        /// Compares with the definition: over every span, no more than rate * span
        /// + burst passes. A taker that always asks gets no less than the rate.
        #[test]
        fn token_bucket_keeps_rate_and_burst(
            bps in (0u32..25, 8_000u64..16_000).prop_map(|(log2, rate)| rate << log2),
            pps in (0u32..25, 1u64..4).prop_map(|(log2, rate)| rate << log2),
            sizes in prop::collection::vec(60usize..1514, 1..200), pause_ns in 0u64..100_000,
        ) {
            let rate = Rate { bps, pps };
            let mut bucket = TokenBucket::limit(rate);
            let (mut now, mut bytes, mut packets) = (1_000u64, 0f64, 0f64);
            let start = now;
            for size in sizes.iter().cycle().take(1000) {
                now += pause_ns;
                if let Err(at) = bucket.take(now, *size) {
                    prop_assert!(at > now);
                    now = at;
                    prop_assert_eq!(bucket.take(now, *size), Ok(()));
                }
                bytes += *size as f64;
                packets += 1.0;
                let seconds = (now - start) as f64 / 1e9;
                let byte_rate = (bps / 8) as f64;
                let burst_bytes = (byte_rate * 0.01).max(32.0 * 1514.0);
                let burst_packets = (pps as f64 * 0.01).max(32.0);
                prop_assert!(bytes <= byte_rate * (seconds + 1e-8) * 1.000001 + burst_bytes + 1.0);
                prop_assert!(packets <= pps as f64 * (seconds + 1e-8) * 1.000001 + burst_packets + 1.0);
            }
            let seconds = (now - start) as f64 / 1e9 - pause_ns as f64 * 1000.0 / 1e9;
            let at_rate = (bytes / (bps / 8) as f64).max(packets / pps as f64);
            prop_assert!(seconds <= at_rate + 1e-5, "{seconds} s for {at_rate} s of traffic");
        }
    }
}
