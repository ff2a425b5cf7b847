//! A program attaches 100,000 waiters to its doorbell,
//! beside a network at 100,000 packets a second.

mod common;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::*;
use pdp_memif::MemifSettings;
use pdp_proto::mux::*;
use pdp_wire::tag::Tag;
use rustix::event::epoll;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Waiters: each epoll instance waits once on each descriptor of the eventfd.
const INSTANCES: usize = 100;
const NUMBERS: usize = 1000;

const PPS: u64 = 100_000;

fn external(name: &str, outlet: OutletConfig) -> MuxRequest {
    MuxRequest::PutExternal(ExternalConfig::new(name, 1500, outlet))
}

fn outside(interface: &str) -> VlinkEnd {
    common::outside(interface, interface, Encapsulation::Interface)
}

fn wait_for(bell: &impl AsFd) -> Vec<OwnedFd> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let numbers: Vec<_> =
        (0..NUMBERS).map(|_| bell.as_fd().try_clone_to_owned().unwrap()).collect();
    let instances = (0..INSTANCES).map(|_| {
        let instance = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        for number in &numbers {
            let data = epoll::EventData::new_u64(0);
            epoll::add(&instance, number, data, epoll::EventFlags::IN).unwrap();
        }
        instance
    });
    instances.collect::<Vec<_>>().into_iter().chain(numbers).collect()
}

#[test]
fn doorbell_with_many_waiters_stalls_only_its_owner() {
    let root = tempfile::tempdir().unwrap();
    let mux = start(1);
    // Red: a generator, a router and a sink. The ring of its
    // guest has space for the frames of a tenth of a second.
    let generator = GeneratorConfig { pps: PPS, frames: 0, number_at: None };
    let made = mux.handle(external("G", OutletConfig::Generator(generator)), vec![one_frame()]);
    assert_eq!(made, MuxReply::Done);
    let mut red = two_hosts(root.path(), "red", &[(0, AttachMode::Runtime)]);
    red.vlinks[0].ends[0] = outside("G");
    put(&mux, &red);
    // Blue: frames of its host go to the program.
    let socket = root.path().join("memif.sock");
    let program = OutletConfig::Memif { socket: socket.clone() };
    let ask = |request, fds| mux.handle(request, fds);
    assert_eq!(put_with_sockets(ask, external("M", program)), MuxReply::Done);
    let mut blue = two_hosts(root.path(), "blue", &[]);
    blue.vlinks[1].ends[0] = outside("M");
    blue.vlinks.remove(0);
    put(&mux, &blue);
    let stop = Arc::new(AtomicBool::new(false));
    let run = |mut work: Box<dyn FnMut() + Send>| {
        let stop = stop.clone();
        std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                work();
            }
        })
    };
    let settings = MemifSettings { ring_log2: 14, buffers: 40_000, ..MemifSettings::default() };
    let path = &red.nodes[0].router.as_ref().unwrap().guests[0].socket;
    let mut guest =
        Peer { client: pdp_memif::MemifClient::new(path, 0, "test", settings).unwrap() };
    eventually("guest", || guest.is_up());
    let forwarding = run(Box::new(move || {
        let mut bufs = vec![];
        if guest.client.receive(&mut bufs, 256) == 0 {
            std::thread::sleep(Duration::from_micros(200));
        }
        for mut buf in bufs {
            let tag = out(1, Tag::parse(buf.metadata()).unwrap().trace);
            buf.set_metadata(tag.emit());
            guest.client.send(buf).unwrap();
        }
        guest.client.flush();
    }));
    // Frames that arrived so far, and frames that were lost.
    let counted = || {
        let r1 = node_stats(&mux, "red", "r1");
        (r1.ports["eth0"].received, r1.ports["eth0"].dropped.values().sum::<u64>())
    };
    let in_a_second = || {
        let (since, (received, lost)) = (Instant::now(), counted());
        std::thread::sleep(Duration::from_secs(1));
        let now = counted();
        assert_eq!(now.1, lost, "lost of {}", now.0 - received);
        (now.0 - received) as f64 / since.elapsed().as_secs_f64()
    };
    eventually("frames go", || node_stats(&mux, "red", "r1").ports["eth1"].sent > 0);
    let alone = in_a_second();
    // The program sleeps before each frame, and wants a ring for each.
    let mut program = Peer::new(&socket, 0);
    let waiters = wait_for(&program.client);
    eventually("the program connects", || program.is_up());
    let ended = Arc::new(AtomicU64::new(0));
    let ends = ended.clone();
    let sleeping = run(Box::new(move || {
        if !program.is_up() {
            ends.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(10));
        }
        program.receive_raw();
        program.client.arm();
    }));
    let mut tap = Peer::connect(&blue.nodes[2].tap_socket, 0);
    let sending = run(Box::new(move || {
        tap.out(0, &frame(60, 1));
        std::thread::sleep(Duration::from_micros(100));
    }));
    eventually("the program is disconnected", || ended.load(Ordering::Relaxed) > 0);
    let beside = in_a_second();
    stop.store(true, Ordering::Relaxed);
    [forwarding, sleeping, sending].into_iter().for_each(|thread| thread.join().unwrap());
    drop(waiters);
    println!(
        "{alone:.0} frames a second alone, {beside:.0} beside {INSTANCES} x {NUMBERS} waiters"
    );
    assert!(
        beside > alone * 0.5,
        "{alone:.0} frames a second alone, {beside:.0} beside the program"
    );
}
