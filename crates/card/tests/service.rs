//! The process of a card, with its muxes and route mirrors played by the tests.

#[path = "../../guest/tests/common/mod.rs"]
mod trunk;

use std::net::IpAddr;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pdp_card::CardSizes;
use pdp_card::service::{CardService, ServiceError};
use pdp_proto::card::{CardReply, CardRequest, CardRouter, CardStatus};
use pdp_proto::channel::{Channel, FrameReader};
use pdp_proto::listener::ControlListener;
use pdp_proto::routes::{
    FromGuest, GroupHop, ResolvedRoute, RouteDecision, ToGuest, Vport, decode, encode,
};
use pdp_wire::tag::{GuestDrop, PuntClass, Tag, TagVerdict};
use tempfile::TempDir;
use trunk::{Mux, PATIENCE, until};

/// MAC addresses of vports 0 and 1, of the neighbour behind vport 1, and of a stranger.
const VPORT_MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];
const NEIGHBOUR: [u8; 6] = [2, 0, 0, 0, 9, 9];
const STRANGER: [u8; 6] = [2, 0, 0, 0, 7, 7];

fn router(directory: &Path, ve: u8, name: &str) -> CardRouter {
    let path = |kind: &str| directory.join(format!("{name}.{kind}"));
    CardRouter {
        ve,
        name: name.into(),
        trunk: path("memif"),
        routes: path("routes"),
        guest: 0,
        weight: 1,
        limit: None,
        enabled: true,
    }
}

/// A card that runs in a thread.
struct Card {
    directory: TempDir,
    control: Channel,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<(), ServiceError>>>,
}

impl Card {
    /// Returns `None` without the card's models.
    fn start() -> Option<Self> {
        if matches!(CardService::new(CardSizes::CARD_8, 1), Err(ServiceError::NoModel)) {
            println!("skipped: built without the card's models");
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let stop = stop.clone();
            move || {
                let mut control = ControlListener::new(listener).unwrap();
                CardService::new(CardSizes::CARD_8, 7)?.run(&mut control, &stop)
            }
        });
        let control = Channel::connect(&path).unwrap();
        Some(Self { directory, control, stop, thread: Some(thread) })
    }

    fn ask(&mut self, request: &CardRequest) -> CardReply {
        self.control.send(request, &[]).unwrap();
        self.control.receive().unwrap().expect("an answer").0
    }

    fn serve(&mut self, routers: Vec<CardRouter>) {
        assert_eq!(self.ask(&CardRequest::Serve { routers }), CardReply::Done);
    }

    fn status(&mut self) -> CardStatus {
        match self.ask(&CardRequest::Status) {
            CardReply::Status(status) => status,
            other => panic!("{other:?}"),
        }
    }

    fn router(&self, ve: u8, name: &str) -> CardRouter {
        router(self.directory.path(), ve, name)
    }
}

impl Drop for Card {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let result = thread.join();
            if !std::thread::panicking() {
                result.unwrap().unwrap();
            }
        }
    }
}

/// A route mirror with one client.
struct Mirror {
    listener: UnixListener,
    stream: Option<UnixStream>,
    frames: FrameReader,
    barrier: u64,
}

impl Mirror {
    fn new(path: &Path) -> Self {
        let listener = UnixListener::bind(path).unwrap();
        Self { listener, stream: None, frames: FrameReader::default(), barrier: 0 }
    }

    /// Sends messages, and waits until they are in force.
    fn say(&mut self, messages: &[ToGuest]) {
        if self.stream.is_none() {
            let (stream, _) = self.listener.accept().unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            self.stream = Some(stream);
            assert!(matches!(self.hear()[..], [FromGuest::Hello { .. }]));
        }
        self.barrier += 1;
        let mut batch = messages.to_vec();
        batch.push(ToGuest::Barrier(self.barrier));
        self.send(&batch);
        while !self.hear().contains(&FromGuest::Applied(self.barrier)) {}
    }

    fn send(&mut self, batch: &[ToGuest]) {
        use std::io::Write;
        self.stream.as_mut().unwrap().write_all(&encode(batch).unwrap()).unwrap();
    }

    fn hear(&mut self) -> Vec<FromGuest> {
        loop {
            if let Some(frame) = self.frames.next_frame().unwrap() {
                return decode(frame).unwrap();
            }
            assert!(self.frames.read_from(self.stream.as_mut().unwrap()).unwrap() > 0, "hung up");
        }
    }
}

/// A router on a card, with the mux and the mirror around it.
struct Router {
    mux: Mux,
    mirror: Mirror,
    trunk: PathBuf,
}

impl Router {
    fn new(config: &CardRouter) -> Self {
        let mux = Mux::new(&config.trunk);
        Self { mux, mirror: Mirror::new(&config.routes), trunk: config.trunk.clone() }
    }

    /// Makes routers of a card, whose mux is connected.
    fn start<const N: usize>(card: &mut Card, configs: [CardRouter; N]) -> [Self; N] {
        let mut routers = configs.each_ref().map(Self::new);
        card.serve(configs.to_vec());
        routers.iter_mut().for_each(Self::connect);
        routers
    }

    fn connect(&mut self) {
        self.mux.connect(|| std::thread::sleep(Duration::from_micros(100)));
    }

    /// Passes frames, and returns their completions.
    fn pass(&mut self, frames: &[(u16, Vec<u8>)]) -> Vec<(Tag, Vec<u8>)> {
        for (at, (vport, frame)) in frames.iter().enumerate() {
            until("room", || self.mux.give(*vport, at as u8, frame));
        }
        let mut got = Vec::new();
        until("completions", || {
            got.extend(self.mux.take());
            got.len() >= frames.len()
        });
        got
    }
}

/// Messages of a mirror for a router that sends 10.2.0.0/16 out of vport 1.
fn snapshot() -> Vec<ToGuest> {
    let vport = |index: usize| {
        ToGuest::Vport(Vport {
            index: index as u16,
            mac: VPORT_MACS[index],
            mtu: 1500,
            up: true,
            hooked: Default::default(),
            macs: Vec::new(),
            forwards_v4: true,
        })
    };
    let gateway: IpAddr = [10, 0, 1, 2].into();
    let hop = GroupHop { vport: 1, gateway: Some(gateway), weight: 1 };
    vec![
        ToGuest::Begin,
        vport(0),
        vport(1),
        ToGuest::Forwarding { v4: true, v6: true },
        ToGuest::Group { id: 1, hops: vec![hop], mtu: 0 },
        ToGuest::Route { prefix: "10.2.0.0/16".parse().unwrap(), target: RouteDecision::Group(1) },
        ToGuest::Neighbour { vport: 1, address: gateway, mac: Some(NEIGHBOUR) },
        ToGuest::End,
    ]
}

/// A frame with an IPv4 packet to 10.`net`.0.1.
fn frame(destination: [u8; 6], net: u8, bytes: usize) -> Vec<u8> {
    let mut frame = vec![0x5a; bytes];
    frame[..6].copy_from_slice(&destination);
    frame[6..12].copy_from_slice(&STRANGER);
    frame[12..14].copy_from_slice(&[8, 0]);
    let header = &mut frame[14..34];
    header.fill(0);
    header[0] = 0x45;
    header[2..4].copy_from_slice(&((bytes - 14) as u16).to_be_bytes());
    (header[8], header[9]) = (64, 17);
    header[12..16].copy_from_slice(&[10, 1, 0, 1]);
    header[16..20].copy_from_slice(&[10, net, 0, 1]);
    let sum = header.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let folded = |sum: u32| (sum & 0xffff) + (sum >> 16);
    header[10..12].copy_from_slice(&(!folded(folded(sum)) as u16).to_be_bytes());
    frame
}

/// The same frame as the card sends it out of vport 1.
fn forwarded(mut frame: Vec<u8>) -> Vec<u8> {
    frame[..6].copy_from_slice(&NEIGHBOUR);
    frame[6..12].copy_from_slice(&VPORT_MACS[1]);
    frame[22] -= 1;
    let sum = u16::from_be_bytes([frame[24], frame[25]]) + 0x100; // TTL, RFC 1624
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
    frame
}

fn completion(verdict: TagVerdict, vport: u8, trace: u8) -> Tag {
    Tag { verdict, vport, last: true, trace }
}

#[test]
fn routers_with_equal_addresses_forward_by_their_own_routes() {
    let Some(mut card) = Card::start() else { return };
    let configs = [card.router(0, "red"), card.router(5, "blue")];
    let [mut red, mut blue] = Router::start(&mut card, configs);
    red.mirror.say(&snapshot());
    let mut without_route = snapshot();
    without_route.retain(|message| !matches!(message, ToGuest::Route { .. }));
    blue.mirror.say(&without_route);

    let own = |net, bytes| (0, frame(VPORT_MACS[0], net, bytes));
    let mut arp = vec![0xff; 60];
    arp[12..14].copy_from_slice(&[8, 6]);
    let frames = [
        own(2, 60),
        own(3, 1514),
        (0, frame(STRANGER, 2, 60)),
        (0, arp.clone()),
        own(2, 1514),
        (0, vec![]),
        (200, frame(VPORT_MACS[0], 2, 60)),
        own(2, 100),
    ];
    let got = red.pass(&frames);
    let punt = |class| TagVerdict::Punt(class);
    let want = [
        (completion(TagVerdict::Out, 1, 0), forwarded(frames[0].1.clone())),
        (completion(punt(PuntClass::Exception), 0, 1), frames[1].1.clone()),
        (completion(TagVerdict::Drop(GuestDrop::NotForUs), 0, 2), vec![]),
        (completion(punt(PuntClass::Neighbour), 0, 3), arp),
        (completion(TagVerdict::Out, 1, 4), forwarded(frames[4].1.clone())),
        (completion(TagVerdict::Drop(GuestDrop::Malformed), 0, 5), vec![]),
        (completion(punt(PuntClass::Exception), 200, 6), frames[6].1.clone()),
        (completion(TagVerdict::Out, 1, 7), forwarded(frames[7].1.clone())),
    ];
    assert_eq!(got, want);
    let got = blue.pass(&[own(2, 60)]);
    assert_eq!(got[0].0, completion(punt(PuntClass::Exception), 0, 0));

    until("all routes", || card.status().routers.iter().all(|router| router.synced));
    let status = card.status();
    assert_eq!((status.ves, status.refused_writes, status.routers.len()), (8, 0, 2));
    let first = &status.routers[0];
    assert_eq!((first.received, first.forwarded, first.punted, first.dropped), (8, 3, 3, 2));
    assert!(first.connected && first.synced && first.problems.is_empty(), "{first:?}");
}

#[test]
fn changes_are_in_force_when_the_mirror_hears_so() {
    let Some(mut card) = Card::start() else { return };
    let config = card.router(3, "red");
    let [mut red] = Router::start(&mut card, [config]);
    red.mirror.say(&snapshot());
    let packet = frame(VPORT_MACS[0], 4, 60);
    for round in 0..50 {
        let prefix = "10.4.0.0/16".parse().unwrap();
        let (change, verdict) = match round % 3 {
            0 => {
                let target = RouteDecision::Group(1);
                (ToGuest::Route { prefix, target }, TagVerdict::Out)
            }
            1 => {
                let target = RouteDecision::Drop;
                let verdict = TagVerdict::Drop(GuestDrop::Blackhole);
                (ToGuest::Route { prefix, target }, verdict)
            }
            _ => (ToGuest::RouteGone(prefix), TagVerdict::Punt(PuntClass::Exception)),
        };
        red.mirror.say(&[change]);
        let got = red.pass(&[(0, packet.clone())]);
        assert_eq!(got[0].0.verdict, verdict, "round {round}");
    }
    // The mirror gets the whole table when it asks for it.
    red.mirror.send(&[ToGuest::Dump(9)]);
    let mut table = Vec::new();
    loop {
        let heard = red.mirror.hear();
        if heard.contains(&FromGuest::TableEnd(9)) {
            break;
        }
        for message in heard {
            if let FromGuest::Table { dump: 9, routes } = message {
                table.extend(routes);
            }
        }
    }
    let hop = GroupHop { vport: 1, gateway: Some([10, 0, 1, 2].into()), weight: 1 };
    let mut want = vec![("10.2.0.0/16".parse().unwrap(), ResolvedRoute::Hops(vec![hop]))];
    // Round 49 is of the second kind.
    want.push(("10.4.0.0/16".parse().unwrap(), ResolvedRoute::Drop));
    assert_eq!(table, want);
}

#[test]
fn a_ve_forgets_its_router_before_the_next_one_gets_it() {
    let Some(mut card) = Card::start() else { return };
    let old = card.router(2, "old");
    let [mut before] = Router::start(&mut card, [old]);
    before.mirror.say(&snapshot());
    let packet = frame(VPORT_MACS[0], 2, 60);
    assert_eq!(before.pass(&[(0, packet.clone())])[0].0.verdict, TagVerdict::Out);

    let new = card.router(2, "new");
    let [mut after] = Router::start(&mut card, [new]);
    // Without a mirror it has no vport with a MAC address.
    let got = after.pass(&[(0, packet.clone())]);
    assert_eq!(got[0].0.verdict, TagVerdict::Drop(GuestDrop::NotForUs));
    let mut bare = snapshot();
    bare.retain(|message| {
        !matches!(
            message,
            ToGuest::Route { .. } | ToGuest::Group { .. } | ToGuest::Neighbour { .. }
        )
    });
    after.mirror.say(&bare);
    let got = after.pass(&[(0, packet)]);
    assert_eq!(got[0].0.verdict, TagVerdict::Punt(PuntClass::Exception));
    assert_eq!(card.status().routers[0].received, 2);
}

#[test]
fn suspended_routers_frames_are_dropped_and_tables_stay() {
    let Some(mut card) = Card::start() else { return };
    let config = card.router(1, "red");
    let [mut red] = Router::start(&mut card, [config.clone()]);
    red.mirror.say(&snapshot());
    let packet = (0, frame(VPORT_MACS[0], 2, 60));
    for enabled in [false, true, false, true] {
        card.serve(vec![CardRouter { enabled, ..config.clone() }]);
        let verdict = if enabled { TagVerdict::Out } else { TagVerdict::Drop(GuestDrop::NotForUs) };
        until("the change", || red.pass(std::slice::from_ref(&packet))[0].0.verdict == verdict);
    }
}

/// A new mux gets no completion of a frame that it never sent.
#[test]
fn frames_of_a_dead_mux_complete_nowhere() {
    let Some(mut card) = Card::start() else { return };
    let config = card.router(0, "red");
    let [mut red] = Router::start(&mut card, [config]);
    red.mirror.say(&snapshot());
    for round in 0..5 {
        for _ in 0..200 {
            assert!(red.mux.give(0, 77, &frame(VPORT_MACS[0], 2, 1514)));
        }
        // It dies with frames on the card.
        drop(std::mem::replace(&mut red.mux, {
            std::fs::remove_file(&red.trunk).unwrap();
            Mux::new(&red.trunk)
        }));
        red.connect();
        let got = red.pass(&[(0, frame(VPORT_MACS[0], 2, 60))]);
        assert_eq!(got.len(), 1, "round {round}");
        assert_eq!(got[0].0, completion(TagVerdict::Out, 1, 0));
    }
}

#[test]
fn idle_card_is_not_clocked() {
    let Some(mut card) = Card::start() else { return };
    let config = card.router(0, "red");
    let [mut red] = Router::start(&mut card, [config]);
    red.mirror.say(&snapshot());
    red.pass(&[(0, frame(VPORT_MACS[0], 2, 60))]);
    let mut cycles = 0;
    until("rest", || std::mem::replace(&mut cycles, card.status().cycles) == cycles);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(card.status().cycles, cycles);
    // It wakes up for a frame.
    red.pass(&[(0, frame(VPORT_MACS[0], 2, 60))]);
    assert!(card.status().cycles > cycles);
}

/// A router whose routes take long to follow delays neither the frames nor the routes of others.
#[test]
fn slow_routes_of_a_router_delay_no_other_router() {
    let Some(mut card) = Card::start() else { return };
    let configs = [card.router(0, "slow"), card.router(1, "quick")];
    let [mut slow, mut quick] = Router::start(&mut card, configs);
    slow.mirror.say(&snapshot());
    quick.mirror.say(&snapshot());
    // Each change of the link's group looks at all stations.
    let station = |at: u16| ToGuest::Neighbour {
        vport: 1,
        address: [10, 7, (at >> 8) as u8, at as u8].into(),
        mac: Some(NEIGHBOUR),
    };
    let stations: Vec<ToGuest> = (0..60_000).map(station).collect();
    stations.chunks(4000).for_each(|some| slow.mirror.say(some));
    let link = |vport| {
        let hops = vec![GroupHop { vport, gateway: None, weight: 1 }];
        ToGuest::Group { id: 7, hops, mtu: 0 }
    };
    let mut flaps: Vec<ToGuest> = (0..4000).map(|at| link(at % 2)).collect();
    flaps.push(ToGuest::Barrier(9000));
    slow.mirror.send(&flaps);
    let start = Instant::now();
    for round in 0..20u8 {
        let target = if round % 2 == 0 { RouteDecision::Drop } else { RouteDecision::Group(1) };
        quick.mirror.say(&[ToGuest::Route { prefix: "10.5.0.0/16".parse().unwrap(), target }]);
        let got = quick.pass(&[(0, frame(VPORT_MACS[0], 2, 60))]);
        assert_eq!(got[0].0.verdict, TagVerdict::Out);
        let got = slow.pass(&[(0, frame(VPORT_MACS[0], 2, 60))]);
        assert_eq!(got[0].0.verdict, TagVerdict::Out);
    }
    // Each step of the slow router takes about a second.
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    let stream = slow.mirror.stream.as_ref().unwrap();
    stream.set_nonblocking(true).unwrap();
    let mut bytes = [0; 4096];
    let heard = std::io::Read::read(&mut &*stream, &mut bytes);
    assert!(heard.is_err(), "it was not slow: the test shows nothing");
}

/// Routers that always have frames get the card's time by their weights, whatever their lengths.
#[test]
fn busy_routers_share_the_card_by_weight() {
    let directory = tempfile::tempdir().unwrap();
    let mut card = match CardService::new(CardSizes::CARD_8, 1) {
        Err(ServiceError::NoModel) => return println!("skipped: built without the card's models"),
        card => card.unwrap(),
    };
    let path = directory.path().join("control.sock");
    let mut listener = ControlListener::new(UnixListener::bind(&path).unwrap()).unwrap();
    let light = router(directory.path(), 0, "light");
    let heavy = CardRouter { weight: 3, ..router(directory.path(), 1, "heavy") };
    let mut muxes = [&light, &heavy].map(|router| Mux::new(&router.trunk));
    let mut control = Channel::connect(&path).unwrap();
    control.send(&CardRequest::Serve { routers: vec![light, heavy] }, &[]).unwrap();
    for mux in &mut muxes {
        mux.connect(|| _ = card.round(&mut listener).unwrap());
    }
    // 1 beat, and 4. The routers have no routes, but the card has to look at each frame.
    let frames = [frame(STRANGER, 2, 60), frame(STRANGER, 2, 250)];
    let mut beats = [0u64; 2];
    while beats.iter().sum::<u64>() < 20_000 {
        for (at, mux) in muxes.iter_mut().enumerate() {
            let tx = &mut mux.connection.as_mut().unwrap().tx;
            // Until its ring is full.
            while tx.push(Tag::deliver(0, 0).emit(), &frames[at]).unwrap() {}
            tx.flush().unwrap();
            loop {
                let count = mux.take().len() as u64;
                beats[at] += count * frames[at].len().div_ceil(64) as u64;
                if count == 0 {
                    break;
                }
            }
        }
        card.round(&mut listener).unwrap();
        if beats[1] == 0 {
            // The card has not noticed the second mux yet.
            beats = [0; 2];
        }
    }
    let share = beats[1] as f64 / beats.iter().sum::<u64>() as f64;
    assert!((0.74..0.76).contains(&share), "{beats:?}");
}
