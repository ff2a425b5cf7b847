//! Links: their endpoints, and how frames egress at each end.

use std::collections::BTreeMap;

use pdp_proto::mux;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::limits::{
    ADDRESSES_LEARNED_MAX, DSCP_MAX, DSCPS, ENDS_MAX, FLOOD_PPS_MAX, NAME_CHARS_MAX,
    OVERHEAD_BYTES_MAX, QUEUE_FRAMES_MAX, QUEUE_MEMORY_BYTES, QUEUES_MAX, SCHEDULE_STEPS_MAX,
    WEIGHT_MAX,
};
use crate::units::{BitRate, Bytes, Endpoint, Percent, QueueDepth, QueueLength, Span};

/// Default queue length in frames, as at a network device of Linux. With 256,
/// one TCP flow at the default rate of 1 Gbit/s lost 1 to 6 % of its frames.
pub const QUEUE_FRAMES_DEFAULT: u32 = 1000;

/// Default of earlier versions; stored specs contain it.
pub const QUEUE_FRAMES_DEFAULT_BEFORE: u32 = 256;

/// Declares a type with the given fields, followed by all egress settings of a link's end.
macro_rules! with_egress {
    ($(#[$meta:meta])* pub struct $name:ident { $($(#[$field_meta:meta])* pub $field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[serde(rename_all = "camelCase", deny_unknown_fields)]
        pub struct $name {
            $($(#[$field_meta])* pub $field: $type,)*
            /// Egress rate, at least 8 kbps; excess frames wait. Default: 1 Gbps between nodes and
            /// with a delay, else unlimited.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub rate: Option<BitRate>,
            /// Bytes sent at once after idle time, 2 KiB to 64 MiB. Default: 2 ms at the rate, at
            /// least two full frames.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub burst: Option<Bytes>,
            /// Bytes that each frame counts beyond its length. Default: 0.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            #[schemars(range(max = OVERHEAD_BYTES_MAX))]
            pub overhead: Option<u32>,
            /// Queue length for `rate`, and for `capacity`; at most 4,096 frames. Full queues drop
            /// new frames. Default: 1,000 frames.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub queue: Option<QueueDepth>,
            /// Rate that the link always gets of the external interface's `capacity`.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub guarantee: Option<BitRate>,
            /// Weight among links that want unused `capacity`. Default: 1.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            #[schemars(range(min = 1, max = WEIGHT_MAX))]
            pub weight: Option<u32>,
            /// One-way delay, at most 10 s. Default: 0.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub delay: Option<Span>,
            /// Maximum deviation from `delay`, uniformly distributed; at most `delay`.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub jitter: Option<Span>,
            /// Frames to drop.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub loss: Option<Percent>,
            /// Frames that skip `delay` and overtake others.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub reorder: Option<Percent>,
            /// Frames with one flipped bit.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub corrupt: Option<Percent>,
            /// Frames sent twice.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub duplicate: Option<Percent>,
            /// Seed of random choices. Default: 0.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub seed: Option<u64>,
        }

        impl $name {
            /// Returns its egress settings. Those not given, and the queues, are those of `other`.
            fn egress_or(&self, other: &LinkEgress) -> LinkEgress {
                LinkEgress {
                    rate: self.rate.or(other.rate),
                    burst: self.burst.or(other.burst),
                    overhead: self.overhead.or(other.overhead),
                    queue: self.queue.or(other.queue),
                    guarantee: self.guarantee.or(other.guarantee),
                    weight: self.weight.or(other.weight),
                    delay: self.delay.or(other.delay),
                    jitter: self.jitter.or(other.jitter),
                    loss: self.loss.or(other.loss),
                    reorder: self.reorder.or(other.reorder),
                    corrupt: self.corrupt.or(other.corrupt),
                    duplicate: self.duplicate.or(other.duplicate),
                    seed: self.seed.or(other.seed),
                    queues: other.queues.clone(),
                }
            }
        }
    };
}

with_egress! {
    /// A link between two endpoints, or an Ethernet segment between more.
    /// Egress settings apply to each end separately: into the link at a
    /// node's interface, to the outside at an external. `at` overrides them.
    #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
    pub struct Link {
        /// Name, unique in the network. Default: `link1`, `link2`, …, in list order.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schemars(length(min = 1, max = NAME_CHARS_MAX))]
        pub name: Option<String>,
        /// Ends: interfaces and externals (docs/links.md).
        #[schemars(length(min = 2, max = ENDS_MAX))]
        pub endpoints: Vec<Endpoint>,
        /// Limits of a segment, with three or more ends.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub segment: Option<Segment>,
        /// Egress keys of single ends.
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
        #[schemars(with = "BTreeMap<String, LinkEgress>")]
        pub at: BTreeMap<Endpoint, LinkEgress>,
        /// Weighted queues. Default: one queue.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schemars(length(min = 1, max = QUEUES_MAX))]
        pub queues: Option<Vec<LinkQueue>>,
        /// Later changes of egress keys, in order of time.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        #[schemars(length(max = SCHEDULE_STEPS_MAX))]
        pub schedule: Vec<LinkScheduleStep>,
    }
}

with_egress! {
    /// New settings of a link from some time on.
    ///
    /// Each step also takes egress keys, except `queues`. Missing keys keep their values.
    #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
    pub struct LinkScheduleStep {
        /// Time since you applied the schedule, or since boot.
        pub at: Span,
        /// `false` drops all frames and takes the ends' carrier.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub up: Option<bool>,
    }
}

with_egress! {
    /// Egress settings of one end: frames that the node sends
    /// there, or frames to the outside. Default: as for the link.
    #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
    pub struct LinkEgress {
        /// Weighted queues. Default: one queue.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schemars(length(min = 1, max = QUEUES_MAX))]
        pub queues: Option<Vec<LinkQueue>>,
    }
}

/// One of several egress queues, for the link's rate and the interface's capacity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LinkQueue {
    /// Name, unique per end.
    #[schemars(length(min = 1, max = NAME_CHARS_MAX))]
    pub name: String,
    /// Weight among busy queues. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = WEIGHT_MAX))]
    pub weight: Option<u32>,
    /// Maximum length. Default: `queue`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub length: Option<QueueLength>,
    /// Reserved packet buffers, at most `length`. All queues together may reserve half of one mux
    /// worker's packets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = QUEUE_FRAMES_MAX))]
    pub buffers: Option<u32>,
    /// DSCPs of its packets. The first queue takes all other frames.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = DSCPS), inner(range(max = DSCP_MAX)))]
    pub dscp: Vec<u8>,
}

impl LinkQueue {
    /// Converts to the mux's form.
    fn to_mux(&self) -> mux::QueueConfig {
        let (frames, bytes) = match self.length {
            None => (0, 0),
            Some(QueueLength::Frames(frames)) => (frames, 0),
            Some(QueueLength::Bytes(bytes)) => (QUEUE_FRAMES_MAX, bytes.0),
        };
        let (name, dscp) = (self.name.clone(), self.dscp.clone());
        let (weight, buffers) = (self.weight.unwrap_or(1), self.buffers.unwrap_or(0));
        mux::QueueConfig { name, weight, frames, bytes, buffers, dscp }
    }
}

impl Link {
    /// Egress settings of ends without an entry in `at`.
    pub fn default_egress(&self) -> LinkEgress {
        let none = LinkEgress::default();
        LinkEgress { queues: self.queues.clone(), ..self.egress_or(&none) }
    }

    /// Egress settings of one end.
    pub fn egress(&self, end: &Endpoint) -> LinkEgress {
        let all = self.default_egress();
        let Some(at) = self.at.get(end) else { return all };
        let egress = at.egress_or(&all);
        LinkEgress { queues: at.queues.clone().or(all.queues), ..egress }
    }

    /// Queues at one end, in the mux's form. Empty if the end has no egress.
    pub fn queues(&self, end: &Endpoint) -> Vec<mux::QueueConfig> {
        let at = self.at.get(end).and_then(|at| at.queues.as_ref()).or(self.queues.as_ref());
        let all = at.filter(|_| self.has_egress(end)).into_iter().flatten();
        all.map(LinkQueue::to_mux).collect()
    }

    /// Queues of all ends, a list per end.
    fn all_queues(&self) -> impl Iterator<Item = &Vec<LinkQueue>> {
        let at = |end| self.at.get(end).and_then(|at| at.queues.as_ref()).or(self.queues.as_ref());
        self.endpoints.iter().filter(|end| self.has_egress(end)).filter_map(at)
    }

    /// Number of queues at all ends.
    pub fn queues_count(&self) -> usize {
        self.all_queues().map(Vec::len).sum()
    }

    /// Packets of the mux that its queues reserve.
    pub fn buffers(&self) -> u64 {
        let each = self.all_queues().flatten().filter_map(|queue| queue.buffers);
        each.map(u64::from).sum()
    }

    /// True if frames egress at this end, so that its settings apply. False for an external
    /// joined to a single interface of a node: there, frames egress at the interface.
    pub fn has_egress(&self, end: &Endpoint) -> bool {
        let is_port = |end: &Endpoint| matches!(end, Endpoint::Port { .. });
        is_port(end) || self.endpoints.len() != 2 || !self.endpoints.iter().any(is_port)
    }

    /// The ends with egress, and their settings.
    pub fn egress_ends(&self) -> impl Iterator<Item = (&Endpoint, LinkEgress)> {
        let ends = self.endpoints.iter().filter(|end| self.has_egress(end));
        ends.map(|end| (end, self.egress(end)))
    }

    /// Highest rate of its ends, bits per second; `None` if one of them has no rate.
    pub fn rate_bps_max(&self) -> Option<u64> {
        let later = self.schedule.iter().filter_map(|step| step.rate).map(|rate| rate.0).max();
        let rates = self.egress_ends().map(|(_, egress)| Some(egress.rate?.0));
        let now = rates.reduce(|one, two| Some(one?.max(two?))).flatten()?;
        Some(now.max(later.unwrap_or(0)))
    }

    /// Sets exactly the given egress settings for all ends without an entry in `at`.
    fn set_egress(&mut self, egress: LinkEgress) {
        let LinkEgress {
            rate,
            burst,
            overhead,
            queue,
            guarantee,
            weight,
            delay,
            jitter,
            loss,
            reorder,
            corrupt,
            duplicate,
            seed,
            queues,
        } = egress;
        (self.rate, self.burst, self.overhead, self.queue) = (rate, burst, overhead, queue);
        (self.guarantee, self.weight) = (guarantee, weight);
        (self.delay, self.jitter, self.loss, self.reorder) = (delay, jitter, loss, reorder);
        (self.corrupt, self.duplicate, self.seed) = (corrupt, duplicate, seed);
        self.queues = queues;
    }

    /// Sets egress keys to values as written in a spec; `None` removes a key. With `at`, sets
    /// them at one end, else at all; entries in `at` stay. The error names the bad value.
    pub fn set(
        &mut self,
        at: Option<&str>,
        keys: &BTreeMap<String, Option<String>>,
    ) -> Result<(), String> {
        let end = at.map(str::parse::<Endpoint>).transpose().map_err(|bad| bad.to_string())?;
        let has = |end: &Endpoint| self.endpoints.contains(end) && self.has_egress(end);
        if let Some(end) = end.as_ref().filter(|end| !has(end)) {
            return Err(format!("the link has no egress at {end}"));
        }
        let egress = match &end {
            None => self.default_egress(),
            Some(end) => self.at.get(end).cloned().unwrap_or_default(),
        };
        // Plain data with string keys: it is always JSON.
        let mut object = serde_json::to_value(egress).unwrap_or_default();
        for (key, value) in keys {
            match value {
                None => object.as_object_mut().map(|object| object.remove(key)),
                Some(text) => {
                    // Numbers of a spec are JSON numbers, and lists are written in JSON.
                    let is_plain = !text.starts_with('[') && text.parse::<u64>().is_err();
                    let value = match is_plain {
                        true => text.clone().into(),
                        false => serde_json::from_str(text).map_err(|error| error.to_string())?,
                    };
                    object.as_object_mut().map(|object| object.insert(key.clone(), value))
                }
            };
        }
        let egress: LinkEgress =
            serde_json::from_value(object).map_err(|error| error.to_string())?;
        match end {
            None => self.set_egress(egress),
            Some(end) if egress == LinkEgress::default() => _ = self.at.remove(&end),
            Some(end) => _ = self.at.insert(end, egress),
        }
        Ok(())
    }

    /// Returns the schedule's steps, each complete: time,
    /// whether the link is up, and egress settings by end.
    pub fn steps(&self) -> Vec<(Span, bool, Vec<LinkEgress>)> {
        // Queues never change in a schedule, so steps leave them out.
        let without_queues = |end| LinkEgress { queues: None, ..self.egress(end) };
        let mut ends: Vec<_> = self.endpoints.iter().map(without_queues).collect();
        let mut up = true;
        let steps = self.schedule.iter().map(|step| {
            ends.iter_mut().for_each(|at| *at = step.egress_or(at));
            up = step.up.unwrap_or(up);
            (step.at, up, ends.clone())
        });
        steps.collect()
    }

    /// Memory that the link can use in the mux, bytes: for delayed frames, and for its queues.
    pub fn mux_bytes(&self) -> u64 {
        let queues = self.queues_count() as u64 * QUEUE_MEMORY_BYTES;
        self.delay_line_bytes().saturating_add(queues)
    }

    /// Maximum memory for delayed frames in the mux, bytes, at any time of the schedule.
    pub fn delay_line_bytes(&self) -> u64 {
        let line_bytes = |egress: &[LinkEgress]| {
            let ends = self.endpoints.iter().zip(egress).filter(|(end, _)| self.has_egress(end));
            let each = ends.map(|(_, egress)| egress.to_mux().line_bytes());
            each.fold(0, u64::saturating_add)
        };
        let now: Vec<_> = self.endpoints.iter().map(|end| self.egress(end)).collect();
        self.steps()
            .iter()
            .map(|(_, _, egress)| line_bytes(egress))
            .fold(line_bytes(&now), u64::max)
    }
}

impl LinkEgress {
    /// Converts to the mux's form.
    pub fn to_mux(&self) -> mux::EgressConfig {
        let share = |percent: Option<Percent>| mux::FrameFraction(percent.unwrap_or_default().0);
        let span = |span: Option<Span>| span.unwrap_or_default().0;
        let rate_bps = self.rate.map(|rate| rate.0);
        let (queue_frames, queue_bytes) = match self.queue {
            None => (QUEUE_FRAMES_DEFAULT, 0),
            Some(QueueDepth::Frames(frames)) => (frames, 0),
            Some(QueueDepth::Time(time)) => {
                let bits = u128::from(rate_bps.unwrap_or(0)) * u128::from(time.0) / 1_000_000_000;
                (QUEUE_FRAMES_MAX, u64::try_from(bits / 8).unwrap_or(u64::MAX).max(1))
            }
        };
        mux::EgressConfig {
            rate_bps,
            burst_bytes: self.burst.unwrap_or_default().0,
            overhead_bytes: self.overhead.unwrap_or(0),
            queue_frames,
            queue_bytes,
            guarantee_bps: self.guarantee.unwrap_or_default().0,
            weight: self.weight.unwrap_or(1),
            impairments: mux::Impairments {
                delay_ns: span(self.delay),
                jitter_ns: span(self.jitter),
                loss: share(self.loss),
                reorder: share(self.reorder),
                corrupt: share(self.corrupt),
                duplicate: share(self.duplicate),
                seed: self.seed.unwrap_or(0),
            },
        }
    }
}

/// Limits of an Ethernet segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Segment {
    /// MAC addresses to learn, for 300 s each; frames to others are flooded. All segments of a
    /// network: at most 262,144.
    #[serde(default = "segment_addresses")]
    #[schemars(range(min = 1, max = ADDRESSES_LEARNED_MAX))]
    pub addresses: u32,
    /// Flooded frames per second from each end. Burst: 0.25 s, at least 32 frames.
    #[serde(default = "flood_pps")]
    #[schemars(range(min = 1, max = FLOOD_PPS_MAX))]
    pub flood_pps: u64,
}

impl Default for Segment {
    fn default() -> Self {
        Self { addresses: segment_addresses(), flood_pps: flood_pps() }
    }
}

fn segment_addresses() -> u32 {
    16_384
}

fn flood_pps() -> u64 {
    100_000
}
