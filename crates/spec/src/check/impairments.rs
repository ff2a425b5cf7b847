//! Checks of links' egress settings: rates, queues, guarantees, and impairments.

use std::collections::{BTreeMap, BTreeSet};

use crate::check::{Reporter, bad_inner_name, inner_name_hint};
use crate::limits::{
    BURST_BYTES_MAX, BURST_BYTES_MIN, DELAY_NS_MAX, DSCP_MAX, OVERHEAD_BYTES_MAX, QUEUE_FRAMES_MAX,
    QUEUES_MAX, RATE_BPS_MIN, SCHEDULE_STEPS_MAX, VNET_LINES_BYTES_MAX, VNET_QUEUES_MAX,
    WEIGHT_MAX,
};
use crate::link::{Link, LinkEgress, LinkQueue, QUEUE_FRAMES_DEFAULT};
use crate::object::VirtualNetworkSpec;
use crate::units::{BitRate, Bytes, Endpoint, QueueDepth, QueueLength, Span};

/// Default rate of a link between interfaces or with a delay, bits per second. It is
/// finite, so that queues are bounded, and a loop overloads its own network only.
pub(super) const INNER_RATE_BPS: u64 = 1_000_000_000;

/// Checks the egress settings of the link at `index`, and fills in its rate where it needs one.
pub(super) fn check(vnet: &str, index: usize, link: &mut Link, reporter: &mut Reporter) {
    let at = index.to_string();
    let ports = link.endpoints.iter().filter(|end| matches!(end, Endpoint::Port { .. })).count();
    let is_late = link.delay.is_some()
        || link.at.values().any(|at| at.delay.is_some())
        || link.schedule.iter().any(|step| step.delay.is_some());
    if ports >= 2 || is_late {
        link.rate.get_or_insert(BitRate(INNER_RATE_BPS));
    }
    link.queue.get_or_insert(QueueDepth::Frames(QUEUE_FRAMES_DEFAULT));
    for end in link.at.keys() {
        let path = ["spec", "links", &at, "at", &end.to_string()];
        if !link.endpoints.contains(end) {
            let hint = format!("its ends: {}", words(&link.endpoints));
            reporter.vnet(vnet, &path, format!("{end} is not an end of the link"), hint);
        } else if !link.has_egress(end) {
            let message =
                format!("the link has no egress at {end}: there frames only come from outside");
            let hint = "set it at the other end, or at the tunnel's other side";
            reporter.vnet(vnet, &path, message, hint);
        }
    }
    // Settings of all ends are checked once, then those of single ends.
    let (places, all): (Vec<_>, _) = (link.at.keys().cloned().collect(), link.default_egress());
    one(vnet, &["spec", "links", &at], &all, reporter);
    for end in places {
        let path = ["spec", "links", &at, "at", &end.to_string()];
        one(vnet, &path, &link.egress(&end), reporter);
    }
    queues(vnet, &["spec", "links", &at], &link.queues, link.queue, reporter);
    for (end, here) in &link.at {
        let path = ["spec", "links", &at, "at", &end.to_string()];
        queues(vnet, &path, &here.queues, here.queue.or(link.queue), reporter);
    }
    for (number, (step, two)) in (1..).zip(link.schedule.iter().zip(link.schedule.iter().skip(1))) {
        if two.at <= step.at {
            let path = ["spec", "links", &at, "schedule", &number.to_string(), "at"];
            let message = format!("at {} does not exceed {} of the previous step", two.at, step.at);
            let hint = "order steps by time, with one step per time";
            reporter.vnet(vnet, &path, message, hint);
        }
    }
    for (number, (_, _, ends)) in link.steps().into_iter().enumerate() {
        let path = ["spec", "links", &at, "schedule", &number.to_string()];
        let mut checked: Vec<LinkEgress> = vec![];
        for egress in ends {
            if !checked.contains(&egress) {
                one(vnet, &path, &egress, reporter);
                checked.push(egress);
            }
        }
    }
}

/// Checks the queues of one end, or of all. Queues without a length have that of `queue`.
fn queues(
    vnet: &str,
    path: &[&str],
    all: &Option<Vec<LinkQueue>>,
    queue: Option<QueueDepth>,
    reporter: &mut Reporter,
) {
    let Some(all) = all else { return };
    let frames_of_all = match queue {
        Some(QueueDepth::Frames(frames)) => frames,
        Some(QueueDepth::Time(_)) => QUEUE_FRAMES_MAX,
        None => QUEUE_FRAMES_DEFAULT,
    };
    if !(1..=QUEUES_MAX).contains(&all.len()) {
        let message = format!("{} queues: a link has 1 to {QUEUES_MAX}", all.len());
        let hint = "leave queues out to have one for all frames";
        reporter.vnet(vnet, &[path, &["queues"]].concat(), message, hint);
    }
    let (mut names, mut taken) = (BTreeSet::new(), BTreeMap::new());
    for (at, queue) in all.iter().enumerate() {
        let mut fault = |key: &str, message: String, hint: &str| {
            let at = at.to_string();
            let path = [path, &["queues", &at, key]].concat();
            reporter.vnet(vnet, &path, message, hint);
        };
        if let Some(why) = bad_inner_name(&queue.name) {
            fault("name", format!("name {:?} {why}", queue.name), &inner_name_hint(&queue.name));
        }
        if !names.insert(&queue.name) {
            fault("name", format!("queue {} is defined twice", queue.name), "remove or rename one");
        }
        if let Some(weight) = queue.weight.filter(|it| !(1..=WEIGHT_MAX).contains(it)) {
            let message = format!("weight {weight} is not 1 to {WEIGHT_MAX}");
            fault("weight", message, "weights are relative to each other");
        }
        let frames = match queue.length {
            None => frames_of_all,
            Some(QueueLength::Frames(frames)) => frames,
            Some(QueueLength::Bytes(_)) => QUEUE_FRAMES_MAX,
        };
        if let Some(buffers) = queue.buffers.filter(|buffers| *buffers > frames) {
            let message = format!("buffers {buffers} exceed the queue's length of {frames} frames");
            fault("buffers", message, "lower buffers, or raise the length");
        }
        for dscp in &queue.dscp {
            if *dscp > DSCP_MAX {
                fault("dscp", format!("DSCP {dscp} exceeds {DSCP_MAX}"), "see RFC 2474");
            }
            if let Some(other) = taken.insert(*dscp, &queue.name) {
                let message = format!("DSCP {dscp} is already used by queue {other}");
                fault("dscp", message, "give each DSCP to one queue");
            }
        }
    }
}

/// Checks the total number of queues.
pub(super) fn all_queues(vnet: &str, spec: &VirtualNetworkSpec, reporter: &mut Reporter) {
    let count = spec.links.iter().map(Link::queues_count).sum();
    reporter.too_many(vnet, &["spec", "links"], "queues of links", count, VNET_QUEUES_MAX);
}

/// Checks the total number of schedule steps.
pub(super) fn schedules(vnet: &str, spec: &VirtualNetworkSpec, reporter: &mut Reporter) {
    let steps = spec.links.iter().map(|link| link.schedule.len()).sum();
    reporter.too_many(vnet, &["spec", "links"], "steps of schedules", steps, SCHEDULE_STEPS_MAX);
}

fn words(ends: &[Endpoint]) -> String {
    ends.iter().map(Endpoint::to_string).collect::<Vec<_>>().join(", ")
}

/// Checks the settings of one end, or of all.
fn one(vnet: &str, path: &[&str], egress: &LinkEgress, reporter: &mut Reporter) {
    let mut fault = |key: &str, message: String, hint: &str| {
        reporter.vnet(vnet, &[path, &[key]].concat(), message, hint);
    };
    let LinkEgress {
        rate, burst, overhead, queue, guarantee, weight, delay, jitter, reorder, ..
    } = egress;
    for (key, rate) in [("rate", rate), ("guarantee", guarantee)] {
        if let Some(rate) = rate.filter(|rate| rate.0 < RATE_BPS_MIN) {
            let hint = "give a higher rate, or set the link down instead";
            fault(key, format!("{key} {rate} is below {}", BitRate(RATE_BPS_MIN)), hint);
        }
    }
    if let (Some(rate), Some(guarantee)) = (rate, guarantee)
        && guarantee > rate
    {
        let message = format!("guarantee {guarantee} exceeds the rate {rate}");
        fault("guarantee", message, "lower it, or raise the rate");
    }
    if let Some(burst) = burst.filter(|it| !(BURST_BYTES_MIN..=BURST_BYTES_MAX).contains(&it.0)) {
        let (least, most) = (Bytes(BURST_BYTES_MIN), Bytes(BURST_BYTES_MAX));
        let hint = "give more than the longest frame, or leave it out";
        fault("burst", format!("burst {burst} is not {least} to {most} bytes"), hint);
    }
    if burst.is_some() && rate.is_none() {
        fault("burst", "burst needs a rate".into(), "give a rate");
    }
    if let Some(overhead) = overhead.filter(|it| *it > OVERHEAD_BYTES_MAX) {
        fault("overhead", format!("overhead {overhead} exceeds {OVERHEAD_BYTES_MAX}"), "lower it");
    }
    if let Some(QueueDepth::Time(_)) = queue
        && rate.is_none()
    {
        let message = "a queue given as a time needs a rate".into();
        fault("queue", message, "give a rate, or a number of frames");
    }
    if let Some(weight) = weight.filter(|it| !(1..=WEIGHT_MAX).contains(it)) {
        fault(
            "weight",
            format!("weight {weight} is not 1 to {WEIGHT_MAX}"),
            "weights are relative to each other",
        );
    }
    if let Some(delay) = delay.filter(|delay| delay.0 > DELAY_NS_MAX) {
        fault("delay", format!("delay {delay} exceeds {}", Span(DELAY_NS_MAX)), "lower it");
    }
    let delay = delay.unwrap_or_default();
    if let Some(jitter) = jitter.filter(|jitter| *jitter > delay) {
        let message = format!("jitter {jitter} exceeds the delay {delay}");
        fault("jitter", message, "raise the delay: a frame's delay can't be negative");
    }
    if reorder.is_some_and(|reorder| reorder.0 > 0) && delay.0 == 0 {
        let message = "reorder needs a delay, which reordered frames skip".into();
        fault("reorder", message, "give a delay");
    }
}

/// Checks that delayed frames fit into the mux's memory.
pub(super) fn lines(vnet: &str, spec: &VirtualNetworkSpec, reporter: &mut Reporter) {
    let bytes = spec.links.iter().map(Link::delay_line_bytes).fold(0, u64::saturating_add);
    if bytes > VNET_LINES_BYTES_MAX {
        let (bytes, most) = (Bytes(bytes), Bytes(VNET_LINES_BYTES_MAX));
        let message = format!("delayed frames take {bytes} bytes, {most} at most");
        let hint = "lower rates or delays: the bytes are their product";
        reporter.vnet(vnet, &["spec", "links"], message, hint);
    }
}
