//! Counters, captures and traces.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use pdp_model::{ExternalStats, QueueStats, Stats, VnetStats};
use pdp_proto::mux::{
    self, BpfProgram, BytePattern, MuxReply, OUTSIDE, PortName, QueueConfig, TraceStage, VlinkEnd,
};
use pdp_proto::trace::NO_FRAME;
use tracing::info;

use crate::capture::{self, CAPTURES_MAX};
use crate::control::base::MuxControl;
use crate::control::check;
use crate::control::plan::{KnownVnet, PlanState, layout, nodes, outside_ends, port};
use crate::control::workers::WorkerHandle;
use crate::trace::PendingTrace;
use crate::vnet::MuxPort;
use crate::worker::Worker;

/// Ports, guests and nodes whose counters are copied between
/// two rounds of a worker. The last node may exceed it.
const COUNTED_MAX: usize = 64;

/// Queues of one port that are copied as one of these.
const QUEUES_COUNTED: usize = 16;

/// The longest wait for a frame to trace, milliseconds.
const TRACE_WAIT_MS_MAX: u64 = 60_000;

impl MuxControl {
    /// Returns the counters of all vnets, or of one.
    pub fn stats(&self, only: Option<&str>) -> Result<MuxReply, String> {
        let state = self.state();
        if let Some(only) = only
            && !state.vnets.contains_key(only)
        {
            return Err(format!("vnet {only} does not exist"));
        }
        let mut stats = Stats::default();
        let selected = state.vnets.values();
        let selected = selected.filter(|vnet| only.is_none_or(|only| only == vnet.spec.name));
        for (number, worker) in self.workers.iter().enumerate() {
            let here = selected.clone().filter(|vnet| vnet.worker == number);
            let mut nodes = here
                .flat_map(|vnet| (0..).zip(nodes(&vnet.spec)).map(move |it| (vnet, it)))
                .peekable();
            while nodes.peek().is_some() {
                let mut left = COUNTED_MAX;
                let part: Vec<_> = std::iter::from_fn(|| {
                    let next = nodes.next_if(|_| left > 0)?;
                    let (_, (_, node)) = &next;
                    left = left.saturating_sub(1 + node.ports.len() + node.guests);
                    Some(next)
                })
                .collect();
                let places: Vec<_> =
                    part.iter().map(|(vnet, (at, _))| (usize::from(vnet.slot), *at)).collect();
                let counted = worker.call(move |worker| {
                    let (clock, now_ns) = (worker.core.meter.clock(), worker.core.now_ns);
                    let count = |(slot, node): (usize, _)| {
                        let vnet = worker.vnets[slot].as_ref()?;
                        let mut counted = vnet.count(node, now_ns)?;
                        let used_ns = clock.delta_as_nanos(0, vnet.used_cycles);
                        counted.node.engine.iter_mut().for_each(|engine| engine.used_ns = used_ns);
                        Some(counted)
                    };
                    places.into_iter().map(count).collect::<Vec<_>>()
                })?;
                for ((vnet, (_, node)), counted) in part.into_iter().zip(counted) {
                    let Some(counted) = counted else { continue };
                    let known = stats.vnets.entry(vnet.spec.name.clone()).or_default();
                    known.nodes.insert(node.name.into(), counted.stats(node.ports.into_iter()));
                }
            }
            stats.workers.push(worker.call(|worker| worker.stats())?);
            for (slot, external) in state.externals.iter().enumerate() {
                let Some(external) = external else { continue };
                let sum = stats.externals.entry(external.spec.name.clone()).or_default();
                let counted = move |worker: &mut Worker| Some(worker.core.external(slot)?.stats());
                add_external(sum, worker.call(counted)?.unwrap_or_default());
            }
        }
        for vnet in selected {
            let counted = stats.vnets.entry(vnet.spec.name.clone()).or_default();
            self.add_problems(&state, &vnet.spec, counted);
            // There may be many queues. A client that wants those
            // of all vnets asks for one vnet after the other.
            if only.is_some() {
                self.add_queues(vnet, counted)?;
            }
        }
        Ok(MuxReply::Stats(Box::new(stats)))
    }

    /// Returns the addresses that a segment has learned, copied in parts between
    /// rounds of its worker. With `clear`, makes it forget all addresses.
    pub fn fdb(&self, vnet: &str, vlink: &str, clear: bool) -> Result<MuxReply, String> {
        let state = self.state();
        let known = state.vnets.get(vnet).ok_or_else(|| format!("vnet {vnet} does not exist"))?;
        let mut segments = known.spec.vlinks.iter().filter(|it| it.segment.is_some());
        let at = segments
            .position(|it| it.name == vlink)
            .ok_or_else(|| format!("vnet {vnet} has no segment {vlink}"))?;
        let (worker, slot) = (&self.workers[known.worker], usize::from(known.slot));
        let (mut heard, mut next) = (vec![], 0);
        loop {
            let part = worker.call(move |worker| {
                let now_ns = worker.core.now_ns;
                let segment = worker.vnets[slot].as_mut().map(|vnet| &mut vnet.segments[at])?;
                if clear {
                    segment.clear();
                    return None;
                }
                Some((segment.heard(&mut next, now_ns), next))
            })?;
            let Some((part, rest)) = part else { return Ok(MuxReply::Done) };
            heard.extend(part);
            if rest == 0 {
                return Ok(MuxReply::Fdb { heard });
            }
            next = rest;
        }
    }

    /// Adds the problems of the paths of a vnet's tunnels.
    fn add_problems(&self, state: &PlanState, vnet: &mux::VnetConfig, stats: &mut VnetStats) {
        for end in outside_ends(vnet) {
            let (node, port) = end.name;
            let counters = stats.nodes.get_mut(node);
            if let Some(((ifindex, local, remote), bytes)) = state.tunnel(vnet, &end)
                && let Some(counters) = counters.and_then(|it| it.ports.get_mut(port))
            {
                counters.underlay = self.underlay.problem(ifindex, local, remote, bytes);
            }
        }
    }

    /// Adds the counters of a vnet's queues, copied in parts between
    /// rounds of its worker. Each part is of a different moment.
    fn add_queues(&self, vnet: &KnownVnet, stats: &mut VnetStats) -> Result<(), String> {
        let numbers: HashMap<_, _> = layout(&vnet.spec).zip(0..).collect();
        let ends = vnet.spec.vlinks.iter().flat_map(|vlink| vlink.ends.iter().zip(&vlink.queues));
        let mut places: Vec<(usize, usize, _, &[QueueConfig])> = vec![];
        for (end, queues) in ends {
            let name = match end {
                VlinkEnd::External { name, .. } => Some((OUTSIDE, name.as_str())),
                end => port(&vnet.spec, end).map(|it| (it.0.name.as_str(), it.1.name.as_str())),
            };
            let Some((name, number)) = name.and_then(|name| Some((name, *numbers.get(&name)?)))
            else {
                continue;
            };
            let parts = (0..).step_by(QUEUES_COUNTED).zip(queues.chunks(QUEUES_COUNTED));
            places.extend(parts.map(|(from, queues)| (number, from, name, queues)));
        }
        let (worker, slot) = (&self.workers[vnet.worker], usize::from(vnet.slot));
        for part in places.chunks(COUNTED_MAX) {
            let keys: Vec<_> = part.iter().map(|it| (it.0, it.1)).collect();
            let counted = worker.call(move |worker| {
                let ports = &worker.vnets.get(slot)?.as_ref()?.ports;
                let count = |(port, from): (usize, usize)| {
                    let queues = ports.get(port).into_iter().flat_map(|it| it.queues(from));
                    queues.take(QUEUES_COUNTED).collect::<Vec<_>>()
                };
                Some(keys.into_iter().map(count).collect::<Vec<_>>())
            })?;
            for ((_, _, (node, port), queues), counted) in
                part.iter().zip(counted.unwrap_or_default())
            {
                let known = stats.nodes.get_mut(*node).and_then(|it| it.ports.get_mut(*port));
                let named = counted.into_iter().zip(*queues);
                let named = named.map(|(it, queue)| QueueStats { name: queue.name.clone(), ..it });
                if let Some(known) = known {
                    known.queues.extend(named);
                }
            }
        }
        Ok(())
    }

    /// Captures the frames of a port, or those that a program matches, into the descriptor.
    pub fn capture(
        &self,
        name: &PortName,
        snap_bytes: u32,
        program: Option<BpfProgram>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<MuxReply, String> {
        let [to] = <[OwnedFd; 1]>::try_from(descriptors)
            .map_err(|got| format!("a capture needs one descriptor, not {}", got.len()))?;
        if !capture::is_writable(&to) {
            return Err("the capture's descriptor can't be written to".into());
        }
        let captures = self.captures.clone();
        if captures.fetch_add(1, Ordering::Relaxed) >= CAPTURES_MAX {
            captures.fetch_sub(1, Ordering::Relaxed);
            return Err(format!("more than {CAPTURES_MAX} captures at a time"));
        }
        let (sink, source) = capture::channel(snap_bytes, program);
        let begun = self.at_port(name, move |port| port.captures.push(sink));
        let thread = begun.and_then(|_| {
            let counted = captures.clone();
            let write = move || {
                if let Err(error) = capture::write(source, to) {
                    info!("capture ends: {error}");
                }
                counted.fetch_sub(1, Ordering::Relaxed);
            };
            let builder = thread::Builder::new().name("capture".into());
            builder
                .spawn(write)
                .map_err(|error| format!("can't start the capture's thread: {error}"))
        });
        if thread.is_err() {
            captures.fetch_sub(1, Ordering::Relaxed);
        }
        thread.map(|_| MuxReply::Done)
    }

    /// Traces the next matching frame that arrives at a port.
    pub fn trace(
        &self,
        name: &PortName,
        filter: Vec<BytePattern>,
        program: Option<BpfProgram>,
        wait_ms: u64,
    ) -> Result<MuxReply, String> {
        check::check_matches("the trace", &filter)?;
        let ticket = self.tickets.fetch_add(1, Ordering::Relaxed);
        let (reply, stages) = mpsc::channel();
        let wish = PendingTrace { ticket, filter, program, reply };
        let (worker, _) = self.at_port(name, move |port| port.wish.replace(wish))?;
        let wait = Duration::from_millis(wait_ms.min(TRACE_WAIT_MS_MAX));
        match stages.recv_timeout(wait) {
            Ok(stages) => Ok(MuxReply::Traced { stages }),
            Err(RecvTimeoutError::Disconnected) => {
                Err("another trace replaced this one, or the port is gone".into())
            }
            Err(RecvTimeoutError::Timeout) => {
                // If the port is gone, so is the request.
                let is_it = move |wish: &mut PendingTrace| wish.ticket == ticket;
                let _ = self.at_port(name, move |port| port.wish.take_if(is_it));
                let stages = worker.call(move |worker| worker.core.tracer.cancel(ticket))?;
                let Some(mut stages) = stages else {
                    return Err(format!("{NO_FRAME} within {} ms", wait.as_millis()));
                };
                let detail = format!("not ended within {} ms", wait.as_millis());
                let at_ns = wait.as_nanos() as u64;
                stages.push(TraceStage { at_ns, stage: "wait".into(), detail });
                Ok(MuxReply::Traced { stages })
            }
        }
    }

    /// Calls `work` with a port, at its worker. Returns that worker and the result.
    fn at_port<T: Send + 'static>(
        &self,
        name: &PortName,
        work: impl FnOnce(&mut MuxPort) -> T + Send + 'static,
    ) -> Result<(&WorkerHandle, T), String> {
        let unknown = || format!("port {}/{}:{} does not exist", name.vnet, name.node, name.port);
        let state = self.state();
        let (vnet, port) = state.port(name).ok_or_else(unknown)?;
        let (worker, slot) = (&self.workers[vnet.worker], usize::from(vnet.slot));
        let port_of = move |worker: &mut Worker| {
            worker.vnets.get_mut(slot)?.as_mut()?.ports.get_mut(port).map(work)
        };
        Ok((worker, worker.call(port_of)?.ok_or_else(unknown)?))
    }
}

/// Adds the counters of one worker.
fn add_external(sum: &mut ExternalStats, counted: ExternalStats) {
    sum.received += counted.received;
    sum.sent += counted.sent;
    sum.kernel_dropped += counted.kernel_dropped;
    sum.numbered += counted.numbered;
    sum.late += counted.late;
    for (reason, frames) in counted.dropped {
        *sum.dropped.entry(reason).or_default() += frames;
    }
}
