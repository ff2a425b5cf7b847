//! Links: what they join, and how frames leave by each of their ends.

use std::collections::BTreeMap;

use pdp_proto::mux;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::limits::{
    ADDRESSES_LEARNED_MAX, DSCP_MAX, DSCPS, ENDS_MAX, FLOOD_PPS_MAX, NAME_CHARS_MAX,
    OVERHEAD_BYTES_MAX, QUEUE_FRAMES_MAX, QUEUE_MEMORY_BYTES, QUEUES_MAX, SCHEDULE_STEPS_MAX,
    WEIGHT_MAX,
};
use crate::units::{BitRate, Bytes, Endpoint, Length, Percent, Queue, Span};

/// Frames that may wait where nothing is said, as at a network device of Linux. With 256, one TCP flow at the default
/// rate of 1 Gbit/s lost 1 to 6 % of its frames.
pub const QUEUE_FRAMES_DEFAULT: u32 = 1000;

/// The default of earlier versions, which stored specs have.
pub const QUEUE_FRAMES_DEFAULT_BEFORE: u32 = 256;

/// A type with, behind the fields that are given, all that says how frames leave by an end of a link.
macro_rules! with_leaving {
    ($(#[$meta:meta])* pub struct $name:ident { $($(#[$field_meta:meta])* pub $field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[serde(rename_all = "camelCase", deny_unknown_fields)]
        pub struct $name {
            $($(#[$field_meta])* pub $field: $type,)*
            /// Rate of what leaves by each end: into the link from an interface of a node, to the outside at an
            /// external. Not given: 1 Gbps between nodes and on links with a delay; unlimited on other links.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub rate: Option<BitRate>,
            /// Bytes that may go at once after a rest. Not given: what goes at the rate in 2 ms, and at least two full
            /// frames.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub burst: Option<Bytes>,
            /// Bytes that each frame counts beyond its own, as headers of a lower layer would. Not given: 0.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            #[schemars(range(max = OVERHEAD_BYTES_MAX))]
            pub overhead: Option<u32>,
            /// What may wait at each end for the rate, and as much for the interface's capacity: frames, or the time
            /// that they take at the rate, at most 4,096 frames in any case. Not given: 1,000 frames.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub queue: Option<Queue>,
            /// What it gets of an external interface's `capacity` whatever others send, counted as that is. Not given:
            /// nothing.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub guarantee: Option<BitRate>,
            /// Its part of what is unused of that `capacity`, beside others that want it. Not given: 1.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            #[schemars(range(min = 1, max = WEIGHT_MAX))]
            pub weight: Option<u32>,
            /// How long each frame takes. Not given: nothing.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub delay: Option<Span>,
            /// How much longer or shorter than `delay` a frame may take, evenly spread; frames keep their order. At
            /// most the delay.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub jitter: Option<Span>,
            /// Frames that are lost.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub loss: Option<Percent>,
            /// Frames that take no delay and overtake those that do.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub reorder: Option<Percent>,
            /// Frames of which one bit is turned.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub corrupt: Option<Percent>,
            /// Frames that come twice.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub duplicate: Option<Percent>,
            /// What all chances follow from, so that a run can be repeated; each end draws its own. Not given: 0.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub seed: Option<u64>,
        }

        impl $name {
            /// What of it says how frames leave, and for the rest, and of queues, what `other` says.
            fn leaving_or(&self, other: &Leaving) -> Leaving {
                Leaving {
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

with_leaving! {
    /// A link between two endpoints, or an Ethernet segment with more. What says how frames leave holds for each end
    /// by itself; `at` has what is otherwise at one of them.
    #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
    pub struct Link {
        /// Name, unique in the virtual network. Not given: `link1`, `link2`, … by place in the list.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schemars(length(min = 1, max = NAME_CHARS_MAX))]
        pub name: Option<String>,
        /// Its ends, each `NODE:INTERFACE` or `external:NAME`. Two externals make it a transit: what comes by one
        /// leaves by the other. More than two ends make it an Ethernet segment.
        #[schemars(length(min = 2, max = ENDS_MAX))]
        pub endpoints: Vec<Endpoint>,
        /// Bounds of a link of more than two ends.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub segment: Option<Segment>,
        /// How frames leave by one of its ends, where it is otherwise than by the others.
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
        #[schemars(with = "BTreeMap<String, Leaving>")]
        pub at: BTreeMap<Endpoint, Leaving>,
        /// The queues that frames wait in at each end, instead of one for all.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schemars(length(min = 1, max = QUEUES_MAX))]
        pub queues: Option<Vec<LinkQueue>>,
        /// What it is to be later, from when a schedule like this was first applied. What a step does not say stays
        /// as it was.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        #[schemars(length(max = SCHEDULE_STEPS_MAX))]
        pub schedule: Vec<Step>,
    }
}

with_leaving! {
    /// A step of a schedule: what a link is from some time on.
    #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
    pub struct Step {
        /// When, from the schedule's beginning.
        pub at: Span,
        /// Whether it carries frames, and its ends have a carrier.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub up: Option<bool>,
    }
}

with_leaving! {
    /// How frames leave by an end of a link: those that a node sends there, and those that go outside there.
    /// What is not given is as for the link.
    #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
    pub struct Leaving {
        /// The queues that frames wait in here, instead of one for all.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schemars(length(min = 1, max = QUEUES_MAX))]
        pub queues: Option<Vec<LinkQueue>>,
    }
}

/// One of the queues that frames wait in at an end of a link, for its rate and for the interface's capacity. Of what
/// goes there each has its part by weight; what one does not want the others have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LinkQueue {
    /// Name, unique at its end. What waits in it stays with it when other queues come and go.
    #[schemars(length(min = 1, max = NAME_CHARS_MAX))]
    pub name: String,
    /// Its part beside other queues that have frames. Not given: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = WEIGHT_MAX))]
    pub weight: Option<u32>,
    /// What may wait in it; more is dropped. Not given: as the link's `queue` says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub length: Option<Length>,
    /// Packets of the mux that are set aside for it, so that as many frames may wait in it whatever others have waiting.
    /// No more than its length; all queues of a node together have half of the packets of one of the mux's workers. Not
    /// given: none, and it shares what there is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = QUEUE_FRAMES_MAX))]
    pub buffers: Option<u32>,
    /// DSCPs of IP packets that are for it, each of one queue at most. The first queue of an end has all frames that are
    /// for none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = DSCPS), inner(range(max = DSCP_MAX)))]
    pub dscp: Vec<u8>,
}

impl LinkQueue {
    /// As the mux is told.
    fn told(&self) -> mux::Queue {
        let (frames, bytes) = match self.length {
            None => (0, 0),
            Some(Length::Frames(frames)) => (frames, 0),
            Some(Length::Bytes(bytes)) => (QUEUE_FRAMES_MAX, bytes.0),
        };
        let (name, dscp) = (self.name.clone(), self.dscp.clone());
        let (weight, buffers) = (self.weight.unwrap_or(1), self.buffers.unwrap_or(0));
        mux::Queue { name, weight, frames, bytes, buffers, dscp }
    }
}

impl Link {
    /// How frames leave by those of its ends that `at` has nothing of.
    pub fn leaving_of_all(&self) -> Leaving {
        let none = Leaving::default();
        Leaving { queues: self.queues.clone(), ..self.leaving_or(&none) }
    }

    /// How frames leave by one of its ends.
    pub fn leaving(&self, end: &Endpoint) -> Leaving {
        let all = self.leaving_of_all();
        let Some(at) = self.at.get(end) else { return all };
        let leaving = at.leaving_or(&all);
        Leaving { queues: at.queues.clone().or(all.queues), ..leaving }
    }

    /// The queues at one of its ends, as the mux is told; none where frames do not leave.
    pub fn queues(&self, end: &Endpoint) -> Vec<mux::Queue> {
        let at = self.at.get(end).and_then(|at| at.queues.as_ref()).or(self.queues.as_ref());
        let all = at.filter(|_| self.has_leaving(end)).into_iter().flatten();
        all.map(LinkQueue::told).collect()
    }

    /// Those of all ends, each end's by themselves.
    fn all_queues(&self) -> impl Iterator<Item = &Vec<LinkQueue>> {
        let at = |end| self.at.get(end).and_then(|at| at.queues.as_ref()).or(self.queues.as_ref());
        self.endpoints.iter().filter(|end| self.has_leaving(end)).filter_map(at)
    }

    /// How many there are at all ends.
    pub fn queues_count(&self) -> usize {
        self.all_queues().map(Vec::len).sum()
    }

    /// Packets of the mux that they have set aside.
    pub fn buffers(&self) -> u64 {
        let each = self.all_queues().flatten().filter_map(|queue| queue.buffers);
        each.map(u64::from).sum()
    }

    /// Whether frames leave by this end, so that it matters how: not by an external that a node's interface is joined
    /// to by itself, where they leave by the interface.
    pub fn has_leaving(&self, end: &Endpoint) -> bool {
        let is_port = |end: &Endpoint| matches!(end, Endpoint::Port { .. });
        is_port(end) || self.endpoints.len() != 2 || !self.endpoints.iter().any(is_port)
    }

    /// The ends by which frames leave, and how.
    pub fn all_leaving(&self) -> impl Iterator<Item = (&Endpoint, Leaving)> {
        let ends = self.endpoints.iter().filter(|end| self.has_leaving(end));
        ends.map(|end| (end, self.leaving(end)))
    }

    /// The highest rate of its ends, bits a second; `None` if one of them has none.
    pub fn rate_bps_max(&self) -> Option<u64> {
        let later = self.schedule.iter().filter_map(|step| step.rate).map(|rate| rate.0).max();
        let rates = self.all_leaving().map(|(_, leaving)| Some(leaving.rate?.0));
        let now = rates.reduce(|one, two| Some(one?.max(two?))).flatten()?;
        Some(now.max(later.unwrap_or(0)))
    }

    /// What of `leaving` is given, and nothing else, holds for all ends that `at` has nothing of.
    fn set_leaving(&mut self, leaving: Leaving) {
        let Leaving {
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
        } = leaving;
        (self.rate, self.burst, self.overhead, self.queue) = (rate, burst, overhead, queue);
        (self.guarantee, self.weight) = (guarantee, weight);
        (self.delay, self.jitter, self.loss, self.reorder) = (delay, jitter, loss, reorder);
        (self.corrupt, self.duplicate, self.seed) = (corrupt, duplicate, seed);
        self.queues = queues;
    }

    /// Sets keys that say how frames leave, each as it is written in a spec; `None`: as where it is not given. At one
    /// end, or at all, where what `at` has otherwise stays. The error says what can't be.
    pub fn set(
        &mut self,
        at: Option<&str>,
        keys: &BTreeMap<String, Option<String>>,
    ) -> Result<(), String> {
        let end = at.map(str::parse::<Endpoint>).transpose().map_err(|bad| bad.to_string())?;
        let has = |end: &Endpoint| self.endpoints.contains(end) && self.has_leaving(end);
        if let Some(end) = end.as_ref().filter(|end| !has(end)) {
            return Err(format!("no frames leave by {end}"));
        }
        let leaving = match &end {
            None => self.leaving_of_all(),
            Some(end) => self.at.get(end).cloned().unwrap_or_default(),
        };
        // Plain data with string keys: it is always JSON.
        let mut object = serde_json::to_value(leaving).unwrap_or_default();
        for (key, value) in keys {
            match value {
                None => object.as_object_mut().map(|object| object.remove(key)),
                Some(text) => {
                    // What is a number in a spec is one here, and what is a list is written in JSON.
                    let is_plain = !text.starts_with('[') && text.parse::<u64>().is_err();
                    let value = match is_plain {
                        true => text.clone().into(),
                        false => serde_json::from_str(text).map_err(|error| error.to_string())?,
                    };
                    object.as_object_mut().map(|object| object.insert(key.clone(), value))
                }
            };
        }
        let leaving: Leaving = serde_json::from_value(object).map_err(|error| error.to_string())?;
        match end {
            None => self.set_leaving(leaving),
            Some(end) if leaving == Leaving::default() => _ = self.at.remove(&end),
            Some(end) => _ = self.at.insert(end, leaving),
        }
        Ok(())
    }

    /// What it is to be later, each step whole: how frames leave by each end, and whether it carries frames.
    pub fn steps(&self) -> Vec<(Span, bool, Vec<Leaving>)> {
        // Queues are always the same: they are told once.
        let told = |end| Leaving { queues: None, ..self.leaving(end) };
        let mut leaving: Vec<_> = self.endpoints.iter().map(told).collect();
        let mut up = true;
        let steps = self.schedule.iter().map(|step| {
            leaving.iter_mut().for_each(|at| *at = step.leaving_or(at));
            up = step.up.unwrap_or(up);
            (step.at, up, leaving.clone())
        });
        steps.collect()
    }

    /// Bytes of the mux that it can take: for frames that wait for its delays, and for its queues.
    pub fn mux_bytes(&self) -> u64 {
        let queues = self.queues_count() as u64 * QUEUE_MEMORY_BYTES;
        self.line_bytes().saturating_add(queues)
    }

    /// Bytes of the mux that frames can take which wait for its delays, at whatever time.
    pub fn line_bytes(&self) -> u64 {
        let told = |leaving: &[Leaving]| {
            let ends = self.endpoints.iter().zip(leaving).filter(|(end, _)| self.has_leaving(end));
            let each = ends.map(|(_, leaving)| leaving.told().line_bytes());
            each.fold(0, u64::saturating_add)
        };
        let now: Vec<_> = self.endpoints.iter().map(|end| self.leaving(end)).collect();
        self.steps().iter().map(|(_, _, leaving)| told(leaving)).fold(told(&now), u64::max)
    }
}

impl Leaving {
    /// As the mux is told.
    pub fn told(&self) -> mux::Leaving {
        let share = |percent: Option<Percent>| mux::Share(percent.unwrap_or_default().0);
        let span = |span: Option<Span>| span.unwrap_or_default().0;
        let rate_bps = self.rate.map(|rate| rate.0);
        let (queue_frames, queue_bytes) = match self.queue {
            None => (QUEUE_FRAMES_DEFAULT, 0),
            Some(Queue::Frames(frames)) => (frames, 0),
            Some(Queue::Time(time)) => {
                let bits = u128::from(rate_bps.unwrap_or(0)) * u128::from(time.0) / 1_000_000_000;
                (QUEUE_FRAMES_MAX, u64::try_from(bits / 8).unwrap_or(u64::MAX).max(1))
            }
        };
        mux::Leaving {
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

/// Bounds of an Ethernet segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Segment {
    /// Link addresses that it learns, for 300 s each. Frames for others go to all ends. All segments of a virtual
    /// network have at most 262,144.
    #[serde(default = "segment_addresses")]
    #[schemars(range(min = 1, max = ADDRESSES_LEARNED_MAX))]
    pub addresses: u32,
    /// Frames a second that each end may send to all others: broadcasts, multicasts, and those for addresses that are
    /// not known. A quarter of a second of them, and at least 32, may come at once.
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
