//! Whatever happens, in whatever order, every frame is accounted for and no
//! packet is lost. The test has a wire, a segment and a transit. The outside is
//! a program behind a memif interface. Tunnels with next hops are in links.rs.

mod common;

use std::path::Path;

use common::*;
use pdp_model::PortStats;
use pdp_proto::mux::*;
use pdp_wire::tag::{GuestDrop, PuntClass, Tag, TagVerdict};
use pdp_wire::vlan;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    /// A host sends frames.
    Send { host: usize, count: u8, length: usize },
    /// A guest answers some of its frames.
    Serve { guest: usize, seed: u8 },
    /// A guest makes frames.
    Make { guest: usize, vport: u8 },
    /// Frames arrive from outside: by the segment's VLAN,
    /// by an end of the transit, or by the segment's wire.
    Arrive { by: usize, count: u8 },
    /// The control guest sends a frame.
    Tap { vport: u8 },
    /// A guest dies, or a new one connects.
    Toggle { guest: usize },
    /// The router's TAP helper dies, or a new one connects.
    ToggleTap,
    /// pdpd requests a change.
    Change {
        policy: GuestDistribution,
        rate: Option<u64>,
        up: bool,
        queue: u32,
        pps: u64,
        impairments: Impairments,
        queues: Vec<QueueConfig>,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let policy = prop::sample::select(POLICIES);
    let rate = prop_oneof![Just(None), (100_000u64..100_000_000).prop_map(Some)];
    prop_oneof![
        6 => (0usize..2, 1u8..60, 10usize..1600)
            .prop_map(|(host, count, length)| Step::Send { host, count, length }),
        6 => (0usize..3, any::<u8>()).prop_map(|(guest, seed)| Step::Serve { guest, seed }),
        1 => (0usize..3, 0u8..2).prop_map(|(guest, vport)| Step::Make { guest, vport }),
        3 => (0usize..4, 1u8..60).prop_map(|(by, count)| Step::Arrive { by, count }),
        1 => (0u8..2).prop_map(|vport| Step::Tap { vport }),
        2 => (0usize..3).prop_map(|guest| Step::Toggle { guest }),
        1 => Just(Step::ToggleTap),
        2 => (policy, rate, prop::bool::weighted(0.8), 0u32..200, 0u64..2000, impairments(), queues())
            .prop_map(|(policy, rate, up, queue, pps, impairments, queues)| {
                Step::Change { policy, rate, up, queue, pps, impairments, queues }
            }),
    ]
}

fn impairments() -> impl Strategy<Value = Impairments> {
    let share = || prop_oneof![Just(0), 0..FrameFraction::ALL.0 / 4].prop_map(FrameFraction);
    let delay = prop_oneof![Just(0), 0u64..20_000_000];
    let shares = (share(), share(), share(), share());
    (delay, 0u64..=100, shares, any::<u64>()).prop_map(|(delay_ns, jitter, shares, seed)| {
        let (loss, reorder, corrupt, duplicate) = shares;
        let jitter_ns = delay_ns * jitter / 100;
        Impairments { delay_ns, jitter_ns, loss, reorder, corrupt, duplicate, seed }
    })
}

/// Returns no queues, or a few. One of them gets all frames.
fn queues() -> impl Strategy<Value = Vec<QueueConfig>> {
    let queue = (0u32..30, 0u64..20_000, 1u32..1000);
    prop::collection::btree_map(0u8..4, queue, 0..4).prop_map(|all| {
        let queue = |(name, (frames, bytes, weight)): (u8, _)| QueueConfig {
            name: name.to_string(),
            weight,
            frames,
            bytes,
            buffers: weight % 10,
            dscp: if name == 3 { vec![0] } else { vec![] },
        };
        all.into_iter().map(queue).collect()
    })
}

const POLICIES: &[GuestDistribution] = &[
    GuestDistribution::RoundRobin,
    GuestDistribution::Weighted,
    GuestDistribution::Flow,
    GuestDistribution::Flowlet,
    GuestDistribution::Ordered,
];

const KINDS: [AttachMode; 3] = [AttachMode::Runtime, AttachMode::Runtime, AttachMode::Tap];

/// VLANs of the outside: the segment's, and the transit's.
const VLANS: [u16; 3] = [5, 6, 7];

/// Returns a vnet with a wire between h1 and the router, a segment, and a transit.
/// The router, h2, a VLAN and the rest of the outside are on the segment.
fn vnet(root: &Path, guests: &[(u32, AttachMode)]) -> VnetConfig {
    let mut vnet = two_hosts(root, "red", guests);
    let vlan = |id| outside(&format!("v{id}"), "M", Encapsulation::Vlan(vlan::VlanTunnel { id }));
    let [on_segment, one, other] = VLANS.map(vlan);
    let rest = outside("rest", "M", Encapsulation::Interface);
    let ends = vnet.vlinks[1].ends.drain(..).chain([on_segment, rest]).collect();
    vnet.vlinks[1] = vlink_of("right", ends);
    vnet.vlinks.push(vlink("through", one, other));
    vnet
}

/// Returns a frame as the program sends it.
fn arriving(by: usize) -> Vec<u8> {
    let mut bytes = frame(60, 0);
    if let Some(id) = VLANS.get(by) {
        let [high, low] = id.to_be_bytes();
        bytes.splice(12..12, [0x81, 0, high, low]);
    }
    bytes
}

fn serve(guest: &mut Peer, completes: bool, seed: u8) {
    for (at, (tag, bytes)) in guest.receive().into_iter().enumerate() {
        let with = |verdict, last| Tag { verdict, vport: 1 - tag.vport, last, trace: 0 };
        if !completes {
            guest.send(with(TagVerdict::Out, false), &bytes);
            continue;
        }
        match (usize::from(seed) + at) % 7 {
            0 => guest.send(with(TagVerdict::Drop(GuestDrop::Policy), true), &[]),
            1 => guest.send(with(TagVerdict::Kept, true), &[]),
            2 => guest.send(with(TagVerdict::Punt(PuntClass::Exception), true), &bytes),
            3 => {
                guest.send(with(TagVerdict::Out, false), &bytes)
                    && guest.send(with(TagVerdict::Punt(PuntClass::Local), false), &bytes)
                    && guest.send(with(TagVerdict::Out, true), &bytes)
            }
            4 => continue, // never completed
            _ => guest.send(with(TagVerdict::Out, true), &bytes),
        };
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn every_frame_is_accounted_for(steps in prop::collection::vec(step(), 1..60), workers in 1usize..3) {
        let root = tempfile::tempdir().unwrap();
        let mux = start(workers);
        let socket = directory(root.path(), "M").join("memif.sock");
        let outlet = OutletConfig::Memif { socket: socket.clone() };
        let external = ExternalConfig::new("M", 1500, outlet);
        let ask = |request, fds| mux.handle(request, fds);
        assert_eq!(put_with_sockets(ask, MuxRequest::PutExternal(external)), MuxReply::Done);
        let kinds: Vec<_> = (0..).zip(KINDS).collect();
        let mut vnet = vnet(root.path(), &kinds);
        put(&mux, &vnet);
        let mut program = Peer::connect(&socket, 0);
        let (mut into_m, mut out_of_m) = (0, 0);
        let mut hosts = [Peer::tap_of(&vnet.nodes[1]), Peer::tap_of(&vnet.nodes[2])];
        let mut guests: [Option<Peer>; 3] = [None, None, None];
        let mut tap = None;
        for step in steps {
            match step {
                Step::Send { host, count, length } => {
                    let bytes = &frame(length, count.into())[..length];
                    for _ in 0..count {
                        hosts[host].out(0, bytes);
                    }
                    hosts[host].receive();
                }
                Step::Serve { guest: at, seed } => {
                    if let Some(guest) = &mut guests[at] {
                        serve(guest, KINDS[at] == AttachMode::Runtime, seed);
                    }
                }
                Step::Make { guest, vport } => {
                    if let Some(guest) = &mut guests[guest] {
                        guest.send(Tag { last: false, ..out(vport, 0) }, &frame(60, 1));
                    }
                }
                Step::Arrive { by, count } => {
                    let bytes = arriving(by);
                    into_m += (0..count).filter(|_| program.send_raw(0, &bytes)).count() as u64;
                }
                Step::Tap { vport } => {
                    if let Some(tap) = &mut tap {
                        Peer::out(tap, vport, &frame(60, 1));
                        tap.receive();
                    }
                }
                Step::Toggle { guest } => match guests[guest].take() {
                    Some(dead) => drop(dead),
                    None => guests[guest] = Some(Peer::guest_of(&vnet.nodes[0], guest)),
                },
                Step::ToggleTap => match tap.take() {
                    Some(dead) => drop(dead),
                    None => tap = Some(Peer::tap_of(&vnet.nodes[0])),
                },
                Step::Change { policy, rate, up, queue, pps, impairments, queues } => {
                    let router = vnet.nodes[0].router.as_mut().unwrap();
                    router.policy = policy;
                    router.punt_limits = [Rate { bps: 0, pps }; PUNT_CLASSES];
                    let more = EgressConfig::default();
                    let egress = EgressConfig { rate_bps: rate, queue_frames: queue, impairments, ..more };
                    vnet.vlinks[0].leaving.fill(egress);
                    vnet.vlinks[0].queues = vec![queues; 2];
                    vnet.vlinks[1].up = up;
                    put(&mux, &vnet);
                }
            }
            out_of_m += program.receive_raw().len() as u64;
            assert_adds_up(&stats(&mux));
        }
        drop(guests);
        vnet.vlinks[0].leaving.iter_mut().for_each(|it| it.rate_bps = None);
        put(&mux, &vnet);
        eventually("nothing on its way", || {
            hosts.iter_mut().for_each(|host| { host.receive(); });
            out_of_m += program.receive_raw().len() as u64;
            let now = stats(&mux);
            let m = &now.externals["M"];
            now.vnets["red"].nodes.values().all(|node| node.in_flight == 0)
                && (m.received, m.sent) == (into_m, out_of_m)
        });
        let end = stats(&mux);
        assert_adds_up(&end);
        let nodes = &end.vnets["red"].nodes;
        // Frames that left a port arrived at the other end of its vlink.
        let [h1, r1] = ["h1", "r1"].map(|node| &nodes[node].ports["eth0"]);
        prop_assert_eq!((h1.sent, r1.sent), (r1.received, h1.received));
        prop_assert_eq!(h1.sent_bytes, r1.received_bytes);
        // Frames that entered the segment and the transit left these, including copies.
        let near = [&nodes["r1"].ports["eth1"], &nodes["h2"].ports["eth0"]];
        let own = |of: fn(&PortStats) -> u64| -> u64 { nodes[OUTSIDE].ports.values().map(of).sum() };
        let went: u64 = near.iter().map(|port| port.sent + port.copied).sum();
        let received: u64 = near.iter().map(|port| port.received).sum();
        prop_assert_eq!(
            went + own(|port| port.consumed + port.copied),
            received + own(|port| port.made)
        );
        // The outside has the frames that left.
        let refused: u64 = end.externals["M"].dropped.values().sum();
        prop_assert_eq!((into_m, out_of_m), (own(|port| port.received) + refused, own(|port| port.sent)));
        let free: u64 = end.workers.iter().map(|worker| worker.free_packets).sum();
        prop_assert_eq!(free, 8192 * workers as u64);
    }
}
