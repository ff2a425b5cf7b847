//! The whole card against pdp-ip: frames of all VEs in by the ports and the host, out by them.
//!
//! Frames enter at all lines at once, while the outputs pause at random. Each queue's frames leave
//! in the order in which they entered, with pdp-ip's verdict and bytes. The counters say the same.
//! header_ip.rs covers the frames for which pdp-ip and the card differ; here they are left out.

mod common;

use std::collections::{BTreeMap, VecDeque};

use common::traffic::{IPV4, NAMED, attachment, frame, noise, one_in};
use common::world::{Case, Expected, World};
use pdp_card::card::HOST_LINE;
use pdp_card::header::{FRAME_BYTES_MAX, HOST_PORT};
use pdp_card::setup::equal_queues;
use pdp_card::table::AttachmentEntry;
use pdp_card::{
    CardModel, CardOutput, CardSizes, CardVerdict, FrameMeta, RegisterWrite, registers,
};
use pdp_ip::Decision;
use pdp_wire::ipv4::Ipv4Packet;
use pdp_wire::tag::GuestDrop;

/// Frames of a batch: so few that no queue overflows.
const BATCH: usize = 160;

/// Cells that each queue has for itself.
const GUARANTEE: u16 = 2;

/// Verdict on a frame, and the frame that leaves.
struct Outcome {
    /// VE that counts the frame, or the number of VEs.
    slot: u16,
    verdict: CardVerdict,
    output: Option<CardOutput>,
}

/// A frame that enters at a line.
struct Arrival {
    bytes: Vec<u8>,
    user: u16,
    outcome: Outcome,
}

/// Frames and bytes.
type Count = (u64, u64);

#[derive(Default)]
struct Books {
    received: BTreeMap<u8, Count>,
    oversize: BTreeMap<u8, u64>,
    /// By slot, ingress line, and verdict.
    verdicts: BTreeMap<(u16, u8, CardVerdict), Count>,
    /// By egress line and slot.
    sent: BTreeMap<(u8, u16), Count>,
}

fn add(count: &mut Count, bytes: usize) {
    *count = (count.0 + 1, count.1 + bytes as u64);
}

struct Bench {
    model: CardModel,
    world: World,
    books: Books,
}

/// Number of a line in registers.
fn port_of(line: u8) -> u8 {
    if line == HOST_LINE { HOST_PORT } else { line }
}

impl Bench {
    fn new(sizes: CardSizes, seed: u64) -> Option<Self> {
        let mut model = CardModel::new(sizes, seed as u32)?;
        equal_queues(&sizes, GUARANTEE).unwrap().into_iter().for_each(|write| model.write(write));
        model.finish_writes();
        let world = World::new(sizes, seed, false, &mut model);
        Some(Self { model, world, books: Books::default() })
    }

    fn slot(&self, owner: Option<(u8, u8)>) -> u16 {
        owner.map_or(self.world.sizes.ves as u16, |(ve, _)| ve.into())
    }

    /// Returns what becomes of a frame from a port; `None` if the card and pdp-ip differ.
    fn outcome(&self, case: &Case) -> Option<Outcome> {
        let slot = self.slot(case.owner);
        let group = case.frame.len() >= 14 && case.frame[0] & 1 != 0;
        let (ve, decision, after) = match &case.expected {
            Expected::Card(verdict) => {
                return Some(Outcome { slot, verdict: *verdict, output: None });
            }
            Expected::AnyPunt => return None,
            Expected::Ip(ve, decision, after) => (*ve, decision.unwrap(), after),
        };
        let kind = case.frame.get(12..14).map(|kind| u16::from_be_bytes([kind[0], kind[1]]));
        let packet = case.frame.get(14..).unwrap_or_default();
        let header = Ipv4Packet::read(packet).filter(|_| kind == Some(IPV4));
        if header.is_some_and(|header| header.header_bytes > 48)
            || decision == Decision::Drop(GuestDrop::Unresolved)
        {
            return None;
        }
        if let Decision::Out(vport) = decision
            && self.world.is_gatewayless_choice(ve, vport, kind, packet)
        {
            return None;
        }
        let verdict = CardVerdict::of(decision)?;
        let (line, vport, segment) = match decision {
            Decision::Out(vport) => {
                let place = attachment(ve, vport as u8).unwrap();
                (place.port, vport as u8, place.segment)
            }
            Decision::Punt(_) => (HOST_LINE, case.owner.map_or(0, |owner| owner.1), case.segment),
            Decision::Drop(_) => return Some(Outcome { slot, verdict, output: None }),
        };
        let owned = case.owner.is_some();
        let ve = case.owner.map_or(0, |owner| owner.0);
        let meta = FrameMeta { verdict, group, owned, ve, vport, segment };
        let output = CardOutput { cycle: 0, line, bytes: after.clone(), meta };
        Some(Outcome { slot, verdict, output: Some(output) })
    }

    /// Returns a frame of the host, and what becomes of it.
    fn host_frame(&mut self) -> Arrival {
        let routers = self.world.routers;
        let random = &mut self.world.random;
        let (ve, vport) =
            (random.below(u64::from(routers) + 1) as u8, random.below(u64::from(NAMED) + 2) as u8);
        let mut bytes = frame(random, ve, vport, false);
        let place = attachment(ve, vport);
        if bytes.len() >= 12 && !one_in(random, 4) {
            bytes[6..12].copy_from_slice(&place.map_or([2; 6], |place| place.mac));
        }
        let up = self.world.ves[usize::from(ve)].vports.get(&vport).is_some_and(|vport| vport.up);
        let may = |place: &AttachmentEntry| ve < routers && up && bytes[6..12] == place.mac;
        let runt = bytes.len() < 14;
        let output = place.filter(|place| !runt && may(place)).map(|place| {
            let (verdict, segment) = (CardVerdict::Out, place.segment);
            let meta = FrameMeta { verdict, group: false, owned: true, ve, vport, segment };
            CardOutput { cycle: 0, line: place.port, bytes: bytes.clone(), meta }
        });
        let verdict = match output {
            Some(_) => CardVerdict::Out,
            None if runt => CardVerdict::DropMalformed,
            None => CardVerdict::DropSpoof,
        };
        let outcome = Outcome { slot: ve.into(), verdict, output };
        Arrival { bytes, user: u16::from(ve) << 4 | u16::from(vport), outcome }
    }

    /// Returns frames for the lines, and what becomes of each.
    fn arrivals(&mut self, count: usize) -> Vec<(u8, Arrival)> {
        let mut cases: Vec<Case> = (0..count).map(|_| self.world.case()).collect();
        self.world.decide(&mut cases);
        let mut arrivals = Vec::new();
        for case in cases {
            let Some(outcome) = self.outcome(&case) else { continue };
            arrivals.push((case.port, Arrival { bytes: case.frame, user: case.segment, outcome }));
            if one_in(&mut self.world.random, 8) {
                arrivals.push((HOST_LINE, self.host_frame()));
            }
        }
        arrivals
    }

    /// Passes frames through the card, and compares. Outputs pause if `pauses`.
    fn pass(&mut self, arrivals: Vec<(u8, Arrival)>, pauses: bool) {
        let mut waiting: [VecDeque<(usize, Option<Outcome>)>; 5] = Default::default();
        for (line, arrival) in arrivals {
            let waiting = &mut waiting[usize::from(line)];
            self.model.send(line, &arrival.bytes, arrival.user);
            waiting.push_back((arrival.bytes.len(), Some(arrival.outcome)));
            if one_in(&mut self.world.random, 40) {
                // Too long; it leaves no trace but a count.
                let long = noise(&mut self.world.random, FRAME_BYTES_MAX + 1 + arrival.bytes.len());
                self.model.send(line, &long, arrival.user);
                waiting.push_back((long.len(), None));
            }
        }
        // Verdicts on the frames that have entered, by line.
        let mut decisions: [VecDeque<(u16, CardVerdict)>; 5] = Default::default();
        // Frames that the queues hold, in their order.
        let mut queues: BTreeMap<(u8, u16), VecDeque<CardOutput>> = BTreeMap::new();
        let mut idle = 0;
        while idle < 1000 {
            let ready = if pauses { self.world.random.draw() as u8 } else { u8::MAX };
            self.model.step(ready);
            idle += 1;
            for input in self.model.take_inputs() {
                idle = 0;
                let entered = waiting[usize::from(input.line)].pop_front();
                let (length, outcome) = entered.expect("a frame that waits");
                let received = self.books.received.entry(input.line).or_default();
                let Some(outcome) = outcome else {
                    received.0 += 1;
                    *self.books.oversize.entry(input.line).or_default() += 1;
                    continue;
                };
                add(received, length);
                let key = (outcome.slot, input.line, outcome.verdict);
                decisions[usize::from(input.line)].push_back((outcome.slot, outcome.verdict));
                add(self.books.verdicts.entry(key).or_default(), length);
                if let Some(output) = outcome.output {
                    queues.entry((output.line, outcome.slot)).or_default().push_back(output);
                }
            }
            for (line, meta) in self.model.take_decisions() {
                let slot = self.slot(meta.owned.then_some((meta.ve, 0)));
                let want = decisions[usize::from(line)].pop_front();
                assert_eq!(Some((slot, meta.verdict)), want, "line {line}");
            }
            for mut output in self.model.take_outputs() {
                idle = 0;
                let slot = self.slot(output.meta.owned.then_some((output.meta.ve, 0)));
                let queue = queues.entry((output.line, slot)).or_default();
                let want = queue.pop_front().unwrap_or_else(|| panic!("nothing, not {output:x?}"));
                output.cycle = 0;
                if !output.meta.owned {
                    (output.meta.ve, output.meta.vport) = (want.meta.ve, want.meta.vport);
                }
                assert_eq!(output.meta, want.meta, "{:02x?}, {:02x?}", output.bytes, want.bytes);
                assert_eq!(output, want);
                add(self.books.sent.entry((output.line, slot)).or_default(), want.bytes.len());
            }
        }
        assert!(waiting.iter().all(VecDeque::is_empty), "frames that did not enter");
        assert!(decisions.iter().all(VecDeque::is_empty), "frames without a verdict");
        let lost: Vec<_> = queues.values().flatten().collect();
        assert!(lost.is_empty(), "{} frames lost, such as {:x?}", lost.len(), lost[0]);
    }

    /// Reads a counter of frames, and the one of bytes behind it if there is one.
    fn count(&mut self, address: u32) -> u64 {
        self.model.read_counter(address).unwrap()
    }

    /// Compares all counters with the books, those of VEs by the super page and by their own.
    fn check_counters(&mut self) {
        let ves = self.world.sizes.ves as u16;
        for line in 0..=HOST_LINE {
            let at = registers::RECEIVED + 16 * u32::from(port_of(line));
            let received = (self.count(at), self.count(at + 8));
            assert_eq!(received, self.books.received.get(&line).copied().unwrap_or_default());
            let oversize = self.count(registers::OVERSIZE + 16 * u32::from(port_of(line)));
            assert_eq!(oversize, self.books.oversize.get(&line).copied().unwrap_or_default());
        }
        for slot in 0..=ves {
            self.model.write(RegisterWrite { address: registers::TARGET, data: slot.into() });
            self.model.finish_writes();
            let mut pages = vec![registers::super_page(0)];
            if slot < ves {
                pages.push(registers::ve_page(slot as u8, 0));
            }
            for page in pages {
                for line in 0..=HOST_LINE {
                    let at = page | (registers::SENT + 16 * u32::from(port_of(line)));
                    let sent = (self.count(at), self.count(at + 8));
                    let want = self.books.sent.get(&(line, slot)).copied().unwrap_or_default();
                    assert_eq!(sent, want, "sent by slot {slot}, line {line}");
                    for code in 0..16 {
                        let at = page | registers::verdict(port_of(line), code);
                        let counted = (self.count(at), self.count(at + 8));
                        let verdict = CardVerdict::from_code(code);
                        let want = verdict.and_then(|verdict| {
                            self.books.verdicts.get(&(slot, line, verdict)).copied()
                        });
                        let want = want.unwrap_or_default();
                        assert_eq!(counted, want, "slot {slot}, line {line}, {verdict:?}");
                    }
                }
                for counter in [registers::FAULTS, registers::EXCESS, registers::REFUSED] {
                    assert_eq!(self.count(page | counter), 0);
                }
            }
        }
    }
}

fn frames_match(sizes: CardSizes, seed: u64, batches: usize) {
    let Some(mut bench) = Bench::new(sizes, seed) else {
        println!("skipped: built without the card's models");
        return;
    };
    for batch in 0..batches {
        let arrivals = bench.arrivals(BATCH);
        bench.pass(arrivals, batch % 4 != 0);
        bench.world.change(&mut bench.model);
    }
    bench.check_counters();
    let mut verdicts: BTreeMap<CardVerdict, u64> = BTreeMap::new();
    for ((_, _, verdict), count) in &bench.books.verdicts {
        *verdicts.entry(*verdict).or_default() += count.0;
    }
    println!("{} VEs, {} bit: {verdicts:?}", sizes.ves, sizes.data_bits);
    // No verdict hides behind another one.
    assert!(verdicts.len() >= 12, "{verdicts:?}");
    assert!(verdicts[&CardVerdict::Out] > (batches * BATCH / 12) as u64);
}

/// Number of batches: by `CARD_FRAMES`, else `default`.
fn batches(default: usize) -> usize {
    let frames = std::env::var("CARD_FRAMES").ok().map(|frames| frames.parse::<usize>().unwrap());
    frames.map_or(default, |frames| frames / 200 / BATCH)
}

#[test]
fn frames_through_8_ves_match_pdp_ip() {
    frames_match(CardSizes::CARD_8, 1, batches(60));
}

#[test]
#[cfg_attr(not(card_more), ignore = "make hw-test builds this card: PDP_CARD_MORE=1")]
fn frames_through_the_narrow_card_match_pdp_ip() {
    frames_match(CardSizes::CARD_8_NARROW, 2, batches(20));
}

#[test]
#[cfg_attr(not(card_more), ignore = "make hw-test builds this card: PDP_CARD_MORE=1")]
fn frames_through_32_ves_match_pdp_ip() {
    frames_match(CardSizes::CARD_32, 3, batches(40));
}

#[test]
#[cfg_attr(not(card_more), ignore = "make hw-test builds this card: PDP_CARD_MORE=1")]
fn frames_through_256_ves_match_pdp_ip() {
    frames_match(CardSizes::CARD_256, 4, batches(12).min(60));
}

/// Frames that leave by a port, of at most so many bytes.
fn forwarded(bench: &mut Bench, count: usize, bytes_max: usize) -> Vec<(u8, Arrival)> {
    let mut frames = Vec::new();
    while frames.len() < count {
        let mut more = bench.arrivals(BATCH);
        more.retain(|(_, arrival)| {
            arrival.bytes.len() <= bytes_max && arrival.outcome.verdict == CardVerdict::Out
        });
        frames.extend(more);
    }
    frames.truncate(count);
    frames
}

#[test]
fn idle_card_forwards_within_64_cycles() {
    for sizes in [CardSizes::CARD_8, CardSizes::CARD_8_NARROW, CardSizes::CARD_32] {
        let Some(mut bench) = Bench::new(sizes, 5) else { continue };
        let mut longest = 0;
        for (line, arrival) in forwarded(&mut bench, 60, FRAME_BYTES_MAX) {
            bench.model.send(line, &arrival.bytes, arrival.user);
            (0..600).for_each(|_| bench.model.step(u8::MAX));
            let [input] = bench.model.take_inputs()[..] else { panic!("one frame in") };
            let outputs = bench.model.take_outputs();
            let [output] = &outputs[..] else { panic!("one frame out") };
            longest = longest.max(output.cycle - input.cycle);
        }
        println!("{} VEs, {} bit: at most {longest} cycles", sizes.ves, sizes.data_bits);
        assert!(longest <= CardModel::LATENCY, "{longest} cycles");
    }
}

#[test]
fn card_forwards_a_frame_of_64_bytes_each_cycle() {
    let Some(mut bench) = Bench::new(CardSizes::CARD_8, 6) else { return };
    let count = 1200;
    let frames = forwarded(&mut bench, count, 64);
    for (line, arrival) in &frames {
        bench.model.send(*line, &arrival.bytes, arrival.user);
    }
    let began = bench.model.cycles();
    let (mut left, mut entered) = (0, 0);
    while left < count && bench.model.cycles() < began + 20 * count as u64 {
        bench.model.step(u8::MAX);
        for input in bench.model.take_inputs() {
            entered = entered.max(input.cycle - began);
        }
        left += bench.model.take_outputs().len();
    }
    println!("{count} frames entered in {entered} cycles, {left} left");
    // The outputs may take longer: they are used unevenly.
    assert_eq!(left, count);
    assert!(entered <= count as u64 * 101 / 100, "{entered} cycles");
}
