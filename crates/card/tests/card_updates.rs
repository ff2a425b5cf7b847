//! Route changes of all VEs through the registers while frames pass.
//!
//! Two cards get the same frames in the same cycles; one of them also gets route changes. A change
//! moves packets among neighbours of one port, so that no frame's way through the queues depends on
//! it. All frames leave both cards in the same cycles. Only destination addresses of frames of the
//! changing prefixes may differ, and each is that of the routes before or after a change.

mod common;

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use common::Random;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use pdp_card::CardInput;
use pdp_card::bus::ve_writes;
use pdp_card::card::HOST_LINE;
use pdp_card::setup::{add_ve, enable_ve, equal_queues};
use pdp_card::table::AttachmentEntry;
use pdp_card::{
    BusScheduler, CardModel, CardOutput, CardSizes, CardVerdict, TableWrite, VeDriver, VmacTable,
    registers,
};
use pdp_proto::routes::{GroupHop, RouteDecision, ToGuest, Vport, VportHooks};

const VES: u8 = CardSizes::CARD_8.ves as u8;
const VPORTS: u8 = 4;

/// Neighbours on a vport.
const NEIGHBOURS: u8 = 4;

/// Clock of the card, cycles per second: that of the paper's.
const CLOCK_HZ: u64 = 125_000_000;

/// Cycles between two changes of a VE: together 100,000 changes a second.
const INTERVAL: u64 = CLOCK_HZ / 100_000 * VES as u64;

/// Cycles after the last answer to a write until no frame can have read what was there before.
const LEAVE: u64 = CardModel::LATENCY;

fn mac(ve: u8, vport: u8) -> [u8; 6] {
    [2, 0, 0, ve, 0, vport]
}

fn neighbour_mac(ve: u8, vport: u8, neighbour: u8) -> [u8; 6] {
    [2, 1, neighbour, ve, 1, vport]
}

/// Neighbours' addresses are outside of the prefixes that change.
fn neighbour(vport: u8, neighbour: u8) -> IpAddr {
    Ipv4Addr::new(192, 168, vport, 1 + neighbour).into()
}

fn group_id(vport: u8, neighbour: u8) -> u32 {
    u32::from(vport * NEIGHBOURS + neighbour)
}

/// Vport by which the packets of a VE leave, if their routes change.
fn changing_vport(ve: u8) -> u8 {
    ve % VPORTS
}

/// Routes and neighbours of a VE, before all changes.
fn snapshot(ve: u8) -> Vec<ToGuest> {
    let mut messages = vec![ToGuest::Begin, ToGuest::Forwarding { v4: true, v6: true }];
    for index in 0..VPORTS {
        messages.push(ToGuest::Vport(Vport {
            index: index.into(),
            mac: mac(ve, index),
            mtu: 1700,
            up: true,
            hooked: VportHooks::default(),
            macs: Vec::new(),
            forwards_v4: true,
        }));
        for at in 0..NEIGHBOURS {
            let (vport, address) = (index.into(), neighbour(index, at));
            let mac = Some(neighbour_mac(ve, index, at));
            messages.push(ToGuest::Neighbour { vport, address, mac });
            let hops = vec![GroupHop { vport, gateway: Some(address), weight: 1 }];
            messages.push(ToGuest::Group { id: group_id(index, at), hops, mtu: 0 });
        }
    }
    let other = (changing_vport(ve) + 1) % VPORTS;
    for (prefix, vport) in [
        ("20.0.0.0/8", other),
        ("2002::/16", other),
        ("10.0.0.0/8", changing_vport(ve)),
        ("2001:db8::/32", changing_vport(ve)),
    ] {
        let target = RouteDecision::Group(group_id(vport, 0));
        messages.push(ToGuest::Route { prefix: prefix.parse().unwrap(), target });
    }
    messages.push(ToGuest::End);
    messages
}

/// The changing routes of a VE, with the neighbour of each.
#[derive(Clone)]
struct Routes(BTreeMap<IpNet, u8>);

impl Default for Routes {
    fn default() -> Self {
        let first = ["10.0.0.0/8", "2001:db8::/32"];
        Self(first.iter().map(|net| (net.parse().unwrap(), 0)).collect())
    }
}

impl Routes {
    fn neighbour(&self, address: IpAddr) -> Option<u8> {
        let covering = self.0.iter().filter(|(net, _)| net.contains(&address));
        covering.max_by_key(|(net, _)| net.prefix_len()).map(|(_, neighbour)| *neighbour)
    }

    fn apply(&mut self, (net, neighbour): Change) {
        match neighbour {
            Some(neighbour) => self.0.insert(net, neighbour),
            None => self.0.remove(&net),
        };
    }
}

/// A route with its new neighbour, or one that goes.
type Change = (IpNet, Option<u8>);

/// A destination; few, so that routes are close to each other.
fn address(random: &mut Random, changes: bool) -> IpAddr {
    let few = random.below(1 << 12) as u32;
    if random.below(2) == 0 {
        let first = if changes { 10 } else { 20 };
        Ipv4Addr::from(first << 24 | (few >> 6) << 17 | (few & 63) << 2).into()
    } else {
        let first: u128 = if changes { 0x2001_0db8 } else { 0x2002_0000 };
        Ipv6Addr::from(first << 96 | u128::from(few >> 6) << 80 | u128::from(few & 63) << 58).into()
    }
}

fn change(random: &mut Random, routes: &Routes) -> Change {
    let gone = routes.0.keys().filter(|net| net.prefix_len() != 8 && net.prefix_len() != 32);
    let gone: Vec<_> = gone.collect();
    if gone.len() > 12 || (!gone.is_empty() && random.below(3) == 0) {
        return (*gone[random.below(gone.len() as u64) as usize], None);
    }
    let net = match address(random, true) {
        IpAddr::V4(address) => {
            Ipv4Net::new(address, 9 + random.below(23) as u8).unwrap().trunc().into()
        }
        IpAddr::V6(address) => {
            Ipv6Net::new(address, 33 + random.below(60) as u8).unwrap().trunc().into()
        }
    };
    (net, Some(random.below(NEIGHBOURS.into()) as u8))
}

/// Returns the message of a change.
fn message(ve: u8, (prefix, neighbour): Change) -> ToGuest {
    match neighbour {
        Some(neighbour) => {
            let target = RouteDecision::Group(group_id(changing_vport(ve), neighbour));
            ToGuest::Route { prefix, target }
        }
        None => ToGuest::RouteGone(prefix),
    }
}

/// Returns a UDP frame for a VE.
fn frame(random: &mut Random, ve: u8, vport: u8, destination: IpAddr) -> Vec<u8> {
    let payload = match random.below(8) {
        0 => random.below(1400) as usize,
        _ => random.below(24) as usize,
    };
    let mut frame = mac(ve, vport).to_vec();
    frame.extend([2, 7, 7, 7, 7, 7]);
    match destination {
        IpAddr::V4(destination) => {
            frame.extend([8, 0]);
            let length = 28 + payload as u16;
            let mut header = vec![0x45, 0];
            header.extend(length.to_be_bytes());
            header.extend([0, 0, 0, 0, 64, 17, 0, 0, 172, 16, 0, 1]);
            header.extend(destination.octets());
            let words = header.as_chunks::<2>().0.iter().map(|word| u16::from_be_bytes(*word));
            let sum: u32 = words.map(u32::from).sum();
            let checksum = !((sum & 0xffff) + (sum >> 16)) as u16;
            header[10..12].copy_from_slice(&checksum.to_be_bytes());
            frame.extend(header);
        }
        IpAddr::V6(destination) => {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend((8 + payload as u16).to_be_bytes());
            frame.extend([17, 64]);
            frame.extend(Ipv6Addr::new(0x2003, 0, 0, 0, 0, 0, 0, 1).octets());
            frame.extend(destination.octets());
        }
    }
    frame.extend((0..8 + payload).map(|_| random.draw() as u8));
    frame
}

/// A frame that a port receives.
struct Arrival {
    cycle: u64,
    line: u8,
    bytes: Vec<u8>,
    ve: u8,
    /// Destination, if its routes change.
    changing: Option<IpAddr>,
}

fn segment(vport: u8) -> u16 {
    0x100 + u16::from(vport)
}

/// Frames of all VEs at all ports, about two in three cycles, in cycles from 0 on.
fn arrivals(random: &mut Random, cycles: u64, every: u64) -> Vec<Arrival> {
    let mut all = Vec::new();
    for cycle in 0..cycles {
        for line in 0..VPORTS {
            if random.below(every) != 0 {
                continue;
            }
            let (ve, changes) = (random.below(VES.into()) as u8, random.below(4) != 0);
            let destination = address(random, changes);
            let bytes = frame(random, ve, line, destination);
            let changing = changes.then_some(destination);
            all.push(Arrival { cycle, line, bytes, ve, changing });
        }
    }
    all
}

/// Makes a card with all VEs' tables in force, and their drivers.
fn card() -> Option<(CardModel, Vec<VeDriver>)> {
    let sizes = CardSizes::CARD_8;
    let mut model = CardModel::new(sizes, 1)?;
    equal_queues(&sizes, 4).unwrap().into_iter().for_each(|write| model.write(write));
    model.finish_writes();
    let mut vmacs = VmacTable::new(sizes.vmac_sets(), 1);
    model.super_write_all(0, vmacs.clear_writes());
    let mut drivers = Vec::new();
    for ve in 0..VES {
        let (hops, lpm) = sizes.equal_parts(ve);
        let mut driver = VeDriver::new(&hops, &lpm);
        let place = |port| AttachmentEntry { port, segment: segment(port), mac: mac(ve, port) };
        let places: Vec<_> = (0..VPORTS).map(|vport| (vport, place(vport))).collect();
        let writes = add_ve(ve, (hops, lpm), &places, &mut vmacs).unwrap();
        model.super_write_all(ve, writes);
        model.ve_write_all(ve, driver.clear_writes());
        snapshot(ve).iter().for_each(|message| driver.apply(message).unwrap());
        model.ve_write_all(ve, driver.take_writes());
        model.super_write_all(ve, [enable_ve()]);
        driver.retire();
        drivers.push(driver);
    }
    assert_eq!(model.refused_count(), 0);
    Some((model, drivers))
}

/// A change on its way to the tables.
struct Applied {
    change: Change,
    /// Register writes of the VE from this one on, up to the second one.
    writes: (u64, u64),
    /// Cycles in which the change was made, its first write entered, and its last was answered.
    made: u64,
    began: Option<u64>,
    ended: Option<u64>,
}

/// A VE's driver and its changes so far.
struct Changer {
    driver: VeDriver,
    routes: Routes,
    changes: Vec<Applied>,
    /// Register writes so far: given to the bus, taken by the card, answered.
    given: u64,
    taken: u64,
    answered: u64,
    answered_at: u64,
}

impl Changer {
    fn new(driver: VeDriver) -> Self {
        let routes = Routes::default();
        Self {
            driver,
            routes,
            changes: Vec::new(),
            given: 0,
            taken: 0,
            answered: 0,
            answered_at: 0,
        }
    }

    /// Makes a change, if no frame can still read what the last one left.
    fn change(&mut self, ve: u8, random: &mut Random, now: u64, bus: &mut BusScheduler) -> bool {
        if self.answered < self.given || (self.given > 0 && now < self.answered_at + LEAVE) {
            return false;
        }
        self.driver.retire();
        let change = change(random, &self.routes);
        self.routes.apply(change);
        self.driver.apply(&message(ve, change)).unwrap();
        let writes = self.driver.take_writes();
        let count: usize = writes.iter().map(|write| ve_writes(ve, write).count()).sum();
        bus.push(ve, writes);
        let from = self.given;
        self.given += count as u64;
        let writes = (from, self.given);
        self.changes.push(Applied { change, writes, made: now, began: None, ended: None });
        true
    }
}

/// Register writes of all VEs' changes on one bus.
struct Bus {
    scheduler: BusScheduler,
    changers: Vec<Changer>,
    /// VEs of the writes that the card has not answered.
    unanswered: VecDeque<u8>,
}

impl Bus {
    /// Gives the card the next register write, if it has taken the ones before.
    fn feed(&mut self, model: &mut CardModel, now: u64) {
        while self.unanswered.len() < 12 {
            let Some(write) = self.scheduler.take() else { break };
            let ve = (write.address >> 16) as u8 - 1;
            model.write(write);
            self.unanswered.push_back(ve);
            let changer = &mut self.changers[usize::from(ve)];
            let open = changer.changes.iter_mut().filter(|change| change.began.is_none());
            for change in open.filter(|change| change.writes.0 <= changer.taken) {
                change.began = Some(now);
            }
            changer.taken += 1;
        }
    }

    /// Notes the answers of a cycle.
    fn answer(&mut self, model: &CardModel, now: u64) {
        while self.unanswered.len() as u64 > model.unanswered() {
            let Some(ve) = self.unanswered.pop_front() else { break };
            let changer = &mut self.changers[usize::from(ve)];
            (changer.answered, changer.answered_at) = (changer.answered + 1, now);
            let done = changer.answered;
            let last = changer.changes.iter_mut().rev().take_while(|change| change.ended.is_none());
            for change in last.filter(|change| change.writes.1 <= done) {
                change.ended = Some(now);
            }
        }
    }
}

/// Frames of a card, and its changes.
struct Run {
    began: u64,
    inputs: Vec<CardInput>,
    outputs: Vec<CardOutput>,
    changers: Vec<Changer>,
}

/// Passes frames through a card. `changes` makes the changes of a cycle.
fn run(frames: &[Arrival], cycles: u64, mut changes: impl FnMut(u64, &mut Bus)) -> Option<Run> {
    let (mut model, drivers) = card()?;
    let began = model.cycles();
    let scheduler = BusScheduler::new(VES.into());
    let changers = drivers.into_iter().map(Changer::new).collect();
    let mut bus = Bus { scheduler, changers, unanswered: VecDeque::new() };
    let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
    let mut frames = frames.iter().peekable();
    for cycle in 0..cycles + 3000 {
        while let Some(frame) = frames.next_if(|frame| frame.cycle == cycle) {
            model.send(frame.line, &frame.bytes, segment(frame.line));
        }
        if cycle < cycles {
            changes(cycle, &mut bus);
        }
        bus.feed(&mut model, cycle);
        model.step(u8::MAX);
        bus.answer(&model, cycle);
        inputs.extend(model.take_inputs());
        outputs.extend(model.take_outputs());
    }
    assert_eq!((model.refused_count(), model.unanswered()), (0, 0));
    Some(Run { began, inputs, outputs, changers: bus.changers })
}

/// Checks that destination addresses are those of the routes before or after a change. Returns the
/// number of frames that left by other neighbours than at first.
fn check_neighbours(frames: &[Arrival], with: &Run) -> usize {
    let mut lines: BTreeMap<u8, VecDeque<&Arrival>> = BTreeMap::new();
    for frame in frames {
        lines.entry(frame.line).or_default().push_back(frame);
    }
    // Frames of a queue in their order, each with the cycle in which it entered.
    let mut queues: BTreeMap<(u8, u8), VecDeque<(&Arrival, u64)>> = BTreeMap::new();
    for input in &with.inputs {
        let frame = lines.get_mut(&input.line).and_then(VecDeque::pop_front).unwrap();
        let changing = changing_vport(frame.ve);
        let line = if frame.changing.is_some() { changing } else { (changing + 1) % VPORTS };
        queues.entry((line, frame.ve)).or_default().push_back((frame, input.cycle - with.began));
    }
    let mut moved = 0;
    // Routes of each VE that are in force, and the number of its changes in them.
    let mut settled: Vec<(Routes, usize)> = vec![Default::default(); usize::from(VES)];
    for output in &with.outputs {
        let queue = queues.get_mut(&(output.line, output.meta.ve)).unwrap();
        let (frame, entered) = queue.pop_front().unwrap();
        assert_eq!(output.meta.verdict, CardVerdict::Out);
        let ve = usize::from(frame.ve);
        let Some(address) = frame.changing else {
            let other = (changing_vport(frame.ve) + 1) % VPORTS;
            assert_eq!(output.bytes[..6], neighbour_mac(frame.ve, other, 0));
            continue;
        };
        let changes = &with.changers[ve].changes;
        let (routes, count) = &mut settled[ve];
        // Frames of a VE leave one port in order, so that what is in force only grows.
        while changes.get(*count).is_some_and(|c| c.ended.is_some_and(|ended| ended < entered)) {
            routes.apply(changes[*count].change);
            *count += 1;
        }
        let mut allowed = vec![routes.neighbour(address).unwrap()];
        let mut after = routes.clone();
        for change in &changes[*count..] {
            if change.began.is_none_or(|began| began > entered + LEAVE) {
                break;
            }
            after.apply(change.change);
            allowed.push(after.neighbour(address).unwrap());
        }
        let vport = changing_vport(frame.ve);
        let macs: Vec<_> = allowed.iter().map(|at| neighbour_mac(frame.ve, vport, *at)).collect();
        assert!(
            macs.iter().any(|mac| output.bytes[..6] == *mac),
            "VE {ve}, {address}, cycle {entered}: {:x?}, not {macs:x?}",
            &output.bytes[..6]
        );
        moved += usize::from(output.bytes[..6] != neighbour_mac(frame.ve, vport, 0));
    }
    assert!(queues.values().all(VecDeque::is_empty), "frames are lost");
    moved
}

/// Frames leave in the same cycles and with the same bytes, but for the address of the neighbour.
fn check_equal(without: &Run, with: &Run) {
    assert_eq!(without.inputs, with.inputs);
    assert_eq!(without.outputs.len(), with.outputs.len());
    for (one, other) in without.outputs.iter().zip(&with.outputs) {
        let place = (one.cycle, one.line, one.meta);
        assert_eq!(place, (other.cycle, other.line, other.meta));
        assert_eq!(one.bytes[6..], other.bytes[6..], "{place:?}");
    }
}

/// Cycles of a run: by `CARD_FRAMES`, else `default`.
fn cycles_of(default: u64) -> u64 {
    let frames = std::env::var("CARD_FRAMES").ok().map(|frames| frames.parse::<u64>().unwrap());
    frames.map_or(default, |frames| frames / 40)
}

#[test]
fn changes_of_all_ves_delay_no_frame() {
    let cycles = cycles_of(60_000);
    let mut random = Random(7);
    let frames = arrivals(&mut random, cycles, 14);
    let Some(without) = run(&frames, cycles, |_, _| {}) else {
        println!("skipped: built without the card's models");
        return;
    };
    let mut late = 0;
    let with = run(&frames, cycles, |cycle, bus| {
        for ve in 0..VES {
            if cycle % INTERVAL == u64::from(ve) * INTERVAL / u64::from(VES) {
                let changer = &mut bus.changers[usize::from(ve)];
                late += u64::from(!changer.change(ve, &mut random, cycle, &mut bus.scheduler));
            }
        }
    })
    .unwrap();
    check_equal(&without, &with);
    let moved = check_neighbours(&frames, &with);
    let changes: usize = with.changers.iter().map(|changer| changer.changes.len()).sum();
    let second = changes as u64 * CLOCK_HZ / cycles;
    println!("{} frames, {moved} by changed routes, {changes} changes: {second}/s", frames.len());
    assert_eq!(late, 0, "changes that had to wait");
    assert!(second >= 99_000 && moved > frames.len() / 20);
}

#[test]
fn changes_without_pause_lose_no_frame() {
    let cycles = cycles_of(40_000);
    let mut random = Random(8);
    let frames = arrivals(&mut random, cycles, 14);
    let Some(without) = run(&frames, cycles, |_, _| {}) else { return };
    let with = run(&frames, cycles, |cycle, bus| {
        for ve in 0..VES {
            let changer = &mut bus.changers[usize::from(ve)];
            changer.change(ve, &mut random, cycle, &mut bus.scheduler);
        }
    })
    .unwrap();
    check_equal(&without, &with);
    let moved = check_neighbours(&frames, &with);
    let changes: usize = with.changers.iter().map(|changer| changer.changes.len()).sum();
    let second = changes as u64 * CLOCK_HZ / cycles;
    println!("{} frames, {moved} by changed routes, {changes} changes: {second}/s", frames.len());
    assert!(second >= 100_000 && moved > frames.len() / 4);
}

/// A VE whose writes never end changes how long another one's change takes by its share only.
#[test]
fn busy_ve_does_not_slow_others_below_their_share() {
    let cycles = 40 * INTERVAL;
    let mut longest = Vec::new();
    for hogs in [0, 1] {
        let mut random = Random(9);
        let noise = TableWrite::OwnV4(15, None);
        let mut hog_writes = 0;
        let Some(run) = run(&[], cycles, |cycle, bus| {
            // The hog is VE 0; its writes are in nobody's way but on the bus.
            if hogs > 0 && bus.scheduler.waiting(0) < 8 {
                bus.scheduler.push(0, [noise; 64]);
                hog_writes += 64;
            }
            for ve in 1..VES {
                if cycle % INTERVAL == u64::from(ve) * INTERVAL / u64::from(VES) {
                    let changer = &mut bus.changers[usize::from(ve)];
                    assert!(changer.change(ve, &mut random, cycle, &mut bus.scheduler));
                }
            }
        }) else {
            return;
        };
        let changes = run.changers.iter().flat_map(|changer| &changer.changes);
        let changes = changes.filter(|change| change.writes.0 < change.writes.1);
        // Cycles per register write: with another VE on the bus, twice as many at most.
        let times = changes.map(|c| (c.ended.unwrap() - c.made, c.writes.1 - c.writes.0));
        longest.push(times.collect::<Vec<_>>());
        assert!(hogs == 0 || hog_writes > 5000, "{hog_writes} entries of the busy VE");
    }
    for ((alone, writes), (beside, same)) in longest[0].iter().zip(&longest[1]) {
        assert_eq!(writes, same);
        // Rounding of turns, and the writes that the card has already taken.
        assert!(*beside <= 2 * alone + 100, "{writes} writes: {alone} cycles alone, {beside} now");
    }
    let sum = |at: usize| longest[at].iter().map(|time| time.0).sum::<u64>();
    println!("{} changes: {} cycles alone, {} beside", longest[0].len(), sum(0), sum(1));
}

#[test]
fn packets_of_excess_routes_go_to_the_host() {
    let Some((mut model, mut drivers)) = card() else { return };
    let (ve, mut random) = (1, Random(11));
    let driver = &mut drivers[usize::from(ve)];
    // Each needs a node of the third level for itself.
    let nets: Vec<Ipv4Net> =
        (0..400).map(|at| Ipv4Net::new((10 << 24 | at << 12).into(), 24).unwrap()).collect();
    let route = |at: usize, gone: bool| {
        let neighbour = (!gone).then_some(1 + (at % 3) as u8);
        message(ve, (IpNet::V4(nets[at]), neighbour))
    };
    for at in 0..nets.len() {
        driver.apply(&route(at, false)).unwrap();
        model.ve_write_all(ve, driver.take_writes());
        (0..LEAVE).for_each(|_| model.step(u8::MAX));
        driver.retire();
    }
    let excess = driver.excess_count();
    assert!((1..300).contains(&excess), "{excess}");
    // Sends a frame by each route; returns the number of those that went to the host.
    let mut pass = |model: &mut CardModel, routes: std::ops::Range<usize>| {
        let mut to_host = 0;
        for at in routes {
            let bytes = frame(&mut random, ve, 0, IpAddr::V4(nets[at].broadcast()));
            model.send(0, &bytes, segment(0));
            (0..150).for_each(|_| model.step(u8::MAX));
            let [output] = &model.take_outputs()[..] else { panic!("one frame out") };
            if output.line == HOST_LINE {
                to_host += 1;
                assert_eq!(output.meta.verdict, CardVerdict::PuntException);
                assert_eq!((output.meta.ve, output.meta.vport), (ve, 0));
                assert_eq!(output.bytes, bytes);
            } else {
                let neighbour = 1 + (at % 3) as u8;
                assert_eq!(output.bytes[..6], neighbour_mac(ve, changing_vport(ve), neighbour));
            }
        }
        to_host
    };
    let to_host = pass(&mut model, 0..nets.len());
    assert!((excess as u64..nets.len() as u64).contains(&to_host), "{to_host} of {excess}");
    let address = registers::ve_page(ve, registers::EXCESS);
    assert_eq!(model.read_counter(address), Ok(to_host));
    let kept = nets.len() * 3 / 4..nets.len();
    for at in 0..kept.start {
        driver.apply(&route(at, true)).unwrap();
    }
    while driver.excess_count() > 0 {
        model.ve_write_all(ve, driver.take_writes());
        (0..LEAVE).for_each(|_| model.step(u8::MAX));
        driver.retire();
        assert!(model.cycles() < 1_000_000, "{} routes do not enter", driver.excess_count());
    }
    model.ve_write_all(ve, driver.take_writes());
    assert_eq!(pass(&mut model, kept), 0);
    assert_eq!(model.read_counter(address), Ok(to_host));
    assert_eq!(model.refused_count(), 0);
    println!("{excess} of {} routes are excess; {to_host} frames to the host", nets.len());
}
