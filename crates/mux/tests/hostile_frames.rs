//! Real captures, cut at every length and modified, are sent into every
//! kind of port. The frames that arrived equal those that left or were
//! dropped, by reason. The mux survives, and no packet is lost. Needs root.
//!
//! The frames are those of data/hostile-frames.pcap: see data/README.md.

mod common;

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::place::{Place, Raw, wire_vnet, wires};
use common::*;
use pdp_model::{ExternalStats, PortStats};
use pdp_mux::control::MuxServer;
use pdp_proto::mux::*;
use pdp_wire::tag::{Tag, TagVerdict};
use pdp_wire::{geneve, gre, outer, udp, vlan, vxlan};

/// One in this many frames is cut at every length.
const CUT_EVERY: usize = 32;

/// Number of modified frames.
const CHANGED: usize = 2000;

/// Modified bytes of a frame, at most.
const CHANGES_MAX: u64 = 4;

/// Frames under way before the test waits for the mux.
const AHEAD: usize = 64;

/// Bytes of a frame that fits into a peer's buffers but not into a packet.
const TOO_LONG: usize = 1850;

/// Packets of a worker's pool.
const PACKETS: u64 = 8192;

fn captures() -> Vec<Vec<u8>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/hostile-frames.pcap");
    let file = std::fs::File::open(path).unwrap();
    let mut reader = pcap_file::pcap::PcapReader::new(file).unwrap();
    let next = || Some(reader.next_raw_packet()?.unwrap().data.into_owned());
    std::iter::from_fn(next).collect()
}

/// Random numbers (SplitMix64): the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % end
    }
}

/// Returns the original frames, some of them cut at every length, and many of them
/// modified. `wrap` adds headers that are cut and modified together with each frame.
fn hostile(wrap: impl Fn(usize, &[u8]) -> Vec<u8>) -> Vec<Vec<u8>> {
    let whole: Vec<_> = captures().iter().enumerate().map(|(at, frame)| wrap(at, frame)).collect();
    let mut frames = whole.clone();
    for frame in whole.iter().step_by(CUT_EVERY) {
        frames.extend((0..frame.len()).map(|length| frame[..length].to_vec()));
    }
    let mut random = Random(1);
    for _ in 0..CHANGED {
        let mut frame = whole[random.below(whole.len() as u64) as usize].clone();
        for _ in 0..=random.below(CHANGES_MAX) {
            // Modifies headers more often than their payload.
            let end = if random.below(4) > 0 { frame.len().min(64) } else { frame.len() };
            let at = random.below(end as u64) as usize;
            frame[at] = random.below(256) as u8;
        }
        frames.push(frame);
    }
    // The last frame is one that every port accepts.
    frames.push(frame(100, 7));
    frames
}

fn as_they_are(_: usize, frame: &[u8]) -> Vec<u8> {
    frame.to_vec()
}

/// Returns false for a frame that ends within a VLAN tag or the type behind
/// it. The kernel drops it before packet sockets see it (`skb_vlan_untag`).
fn passes_the_kernel(frame: &[u8]) -> bool {
    let tagged = matches!(frame.get(12..14), Some([0x81, 0x00] | [0x88, 0xa8]));
    !tagged || frame.len() >= 20
}

fn external(mux: &MuxServer, name: &str) -> ExternalStats {
    stats(mux).externals[name].clone()
}

/// Returns the frames that arrived at an external interface and were dropped there.
fn refused_in(stats: &ExternalStats) -> u64 {
    let refused = |(reason, _): &(&String, &u64)| *reason != "refused" && *reason != "gone";
    stats.dropped.iter().filter(refused).map(|(_, count)| count).sum()
}

/// Sends all frames, a few at a time. Returns how many were taken.
fn flood(
    frames: &[Vec<u8>],
    mut send: impl FnMut(&[u8]) -> bool,
    mut arrived: impl FnMut(u64) -> bool,
) -> u64 {
    let mut sent = 0;
    for lot in frames.chunks(AHEAD) {
        for frame in lot {
            sent += u64::from(send(frame));
        }
        eventually("what was sent came", || arrived(sent));
    }
    assert!(sent > frames.len() as u64 / 2, "{sent} of {}", frames.len());
    sent
}

/// Removes everything, and checks that every packet is back.
fn assert_whole(mux: &MuxServer, externals: &[&str]) {
    for vnet in stats(mux).vnets.keys() {
        assert_eq!(
            mux.handle(MuxRequest::DeleteVnet { name: vnet.clone() }, vec![]),
            MuxReply::Done
        );
    }
    for name in externals {
        let delete = MuxRequest::DeleteExternal { name: (*name).into() };
        assert_eq!(mux.handle(delete, vec![]), MuxReply::Done);
    }
    let workers = stats(mux).workers.len() as u64;
    eventually("all packets are back", || {
        let free: u64 = stats(mux).workers.iter().map(|worker| worker.free_packets).sum();
        free == workers * PACKETS
    });
}

/// Sends frames from one wire to another, by two whole
/// interfaces and a guest that is a wire itself.
fn from_wire_to_wire(test: &str, add: impl Fn(&mut Place, &mut MuxServer, &str)) {
    let mut place = Place::enter(test);
    place.hush();
    let root = tempfile::tempdir().unwrap();
    let mut mux = start(1);
    add(&mut place, &mut mux, "a");
    add(&mut place, &mut mux, "b");
    let whole = Encapsulation::Interface;
    let vnet = wire_vnet(root.path(), "red", whole.clone(), whole);
    put(&mux, &vnet);
    let stop = Arc::new(AtomicBool::new(false));
    let guests = wires(&[&vnet], stop.clone());
    eventually("the guest", || node_stats(&mux, "red", "r1").guests[&0].connected);
    let (near, far): (Raw, Raw) = (place.raw("out1"), place.raw("out2"));
    let mut frames = hostile(as_they_are);
    frames.retain(|frame| passes_the_kernel(frame));
    let mut heard = Vec::new();
    let sent = flood(
        &frames,
        |frame| near.send(frame),
        |sent| {
            heard.extend(far.receive());
            let now = stats(&mux);
            let (a, r1) = (&now.externals["A"], &now.vnets["red"].nodes["r1"]);
            assert_eq!(a.kernel_dropped, 0);
            // Waits for the guest too. If it does not run for a
            // while, it gets no more than its ring has space for.
            r1.ports["eth0"].received + refused_in(a) == sent && r1.in_flight == 0
        },
    );
    let counted = || {
        let end = stats(&mux);
        let b = &end.externals["B"];
        (
            end.vnets["red"].nodes["r1"].ports["eth1"].sent,
            b.sent + b.dropped.get("refused").unwrap_or(&0),
        )
    };
    eventually("all sent", || counted().0 == counted().1);
    let end = stats(&mux);
    assert_adds_up(&end);
    let (a, r1) = (&end.externals["A"], &end.vnets["red"].nodes["r1"]);
    assert_eq!((a.received, r1.ports["eth0"].received), (sent, sent - refused_in(a)));
    assert_eq!(r1.ports["eth0"].dropped.get("guest-ring-full"), None);
    let b = end.externals["B"].sent;
    eventually("what went out was heard", || {
        heard.extend(far.receive());
        heard.len() as u64 >= b
    });
    assert_eq!(heard.len() as u64, b);
    // No frame arrived that was not sent. The kernel removes VLAN tags.
    let mut known: HashSet<Vec<u8>> = frames.iter().cloned().collect();
    known.extend(
        frames
            .iter()
            .filter(|frame| frame.len() > 16)
            .map(|frame| [&frame[..12], &frame[16..]].concat()),
    );
    // Some captures have checksums that the sender left
    // to its device. Over AF_XDP the mux completes them.
    let complete = |mut frame: Vec<u8>| {
        pdp_wire::offload::complete(&mut frame);
        frame
    };
    known.extend(known.clone().into_iter().map(complete));
    assert!(heard.iter().all(|frame| known.contains(frame)));
    assert_eq!(heard.last(), frames.last(), "it works to the end");
    stop.store(true, Ordering::Relaxed);
    guests.join().unwrap();
    assert_whole(&mux, &["A", "B"]);
}

#[test]
fn frames_into_af_xdp_are_all_accounted_for() {
    from_wire_to_wire("hostile-xdp", |place, mux, device| place.external(mux, device, &[]));
}

#[test]
fn frames_into_a_packet_socket_are_all_accounted_for() {
    from_wire_to_wire("hostile-packet", |place, mux, device| place.packet_external(mux, device));
}

/// Returns a tunnel of each kind, over IPv4 and IPv6, with this key.
fn tunnels(key: u16) -> Vec<Encapsulation> {
    let address = |text: &str| text.parse().unwrap();
    let four = || (address("10.9.1.1"), address("10.9.1.2"));
    let six = || (address("fd00:1::1"), address("fd00:1::2"));
    let vni = u32::from(key);
    let vxlan = |(local, remote)| {
        Encapsulation::Vxlan(vxlan::VxlanTunnel { local, remote, port: 4789, vni })
    };
    let udp = |(local, remote)| {
        let (local_port, remote_port) = (7001 + key, 7000);
        Encapsulation::Udp(udp::UdpTunnel { local, remote, local_port, remote_port })
    };
    let geneve = |(local, remote)| {
        Encapsulation::Geneve(geneve::GeneveTunnel { local, remote, port: 6081, vni })
    };
    let gre = |(local, remote), key, checksum, sequence| {
        Encapsulation::Gre(gre::GreTunnel { local, remote, key, checksum, sequence })
    };
    let mut all = vec![Encapsulation::Vlan(vlan::VlanTunnel { id: key })];
    for ends in [four(), six()] {
        all.extend([
            vxlan(ends),
            udp(ends),
            geneve(ends),
            gre(ends, (key != FIRST).then_some(vni << 8), false, false),
            gre(ends, Some(vni), true, false),
            gre(ends, Some(vni << 16), true, true),
        ]);
    }
    all
}

/// The key of the first of [`tunnels`].
const FIRST: u16 = 5;

/// Returns the frame as the other end of a tunnel
/// sends it, with this number if its frames have one.
fn tunnelled(by: &Encapsulation, number: usize, mac: [u8; 6], inner: &[u8]) -> Vec<u8> {
    let template = outer::HeaderTemplate::new(&by.reversed()).unwrap().from_number(number as u32);
    let mut frame = vec![0; template.len()];
    frame.extend(inner);
    // A frame without addresses can't have a tag behind them.
    let _ = template.write(&mut frame, mac, [9; 6]);
    frame
}

/// Returns a vnet with a wire from each of the first tunnels to a host. Four
/// others are the ends of two transits. The rest are on a segment with two hosts.
fn tunnelled_vnet(root: &Path, tunnels: &[Encapsulation]) -> VnetConfig {
    let ends = tunnels.iter().enumerate();
    let ends: Vec<_> = ends.map(|(at, by)| outside(&format!("t{at}"), "A", by.clone())).collect();
    let (wires, others) = ends.split_at(tunnels.len() / 2);
    let mut nodes: Vec<_> = (0..wires.len()).map(|at| host(root, &format!("h{at}"))).collect();
    let wires =
        nodes.iter().zip(wires).map(|(h, end)| vlink(&h.name, port(&h.name, 0), end.clone()));
    let mut vlinks: Vec<_> = wires.collect();
    let (transits, tunnels) = others.split_at(4);
    for (name, ends) in ["through", "across"].iter().zip(transits.chunks(2)) {
        vlinks.push(vlink(name, ends[0].clone(), ends[1].clone()));
    }
    let hosts = ["s0", "s1"];
    nodes.extend(hosts.map(|name| host(root, name)));
    let ends = hosts.map(|name| port(name, 0)).into_iter().chain(tunnels.to_vec());
    vlinks.push(vlink_of("lan", ends.collect()));
    VnetConfig { name: "red".into(), police: None, nodes, vlinks }
}

/// Sends hostile headers around frames, correct headers around hostile
/// frames, and hostile frames in the other direction. Covers every kind
/// of tunnel over IPv4 and IPv6, at wires, transits and a segment.
#[test]
fn frames_into_tunnels_are_all_accounted_for() {
    let mut place = Place::enter("hostile-tunnels");
    let root = tempfile::tempdir().unwrap();
    let mut mux = start(1);
    let tunnels = [tunnels(FIRST), tunnels(FIRST + 1)].concat();
    let takes: Vec<_> = tunnels.iter().filter_map(Encapsulation::takes).collect();
    place.external(&mut mux, "a", &takes);
    for address in ["10.9.1.2", "fd00:1::2"] {
        let lladdr = "02:00:00:00:00:99";
        place.exec("node", &format!("ip neigh replace {address} lladdr {lladdr} dev a"));
    }
    let vnet = tunnelled_vnet(root.path(), &tunnels);
    put(&mux, &vnet);
    let mut taps: Vec<_> = vnet.nodes.iter().map(Peer::tap_of).collect();
    let near = place.raw("out1");
    let mac = pdp_net::interface::InterfaceInfo::by_name("a").unwrap().mac;
    let tunnel = |at: usize| &tunnels[at % tunnels.len()];
    let mut frames = hostile(|at, frame| tunnelled(tunnel(at), at, mac, frame));
    let inner = hostile(as_they_are).into_iter().enumerate();
    let first = frames.len();
    frames.extend(inner.map(|(at, frame)| tunnelled(tunnel(at), first + at, mac, &frame)));
    let mut taken_by_taps = 0;
    let program = &place.programs[0];
    flood(
        &frames,
        |frame| near.send(frame),
        |sent| {
            taken_by_taps += taps.iter_mut().map(|tap| tap.receive().len() as u64).sum::<u64>();
            near.receive();
            let (seen, a) = (program.counters().unwrap(), external(&mux, "A"));
            assert_eq!((a.kernel_dropped, seen.no_socket), (0, 0));
            // The node's neighbours also send frames of their own.
            seen.taken + seen.passed >= sent && a.received == seen.taken
        },
    );
    // In the other direction: hostile frames by TAP trunks leave by the tunnels.
    for (at, frame) in hostile(as_they_are).iter().enumerate() {
        let tap = at % taps.len();
        eventually("room in the trunk", || taps[tap].out(0, frame) || frame.len() > 1900);
    }
    let of_nodes = |selects: fn(&str) -> bool, of: fn(&PortStats) -> u64| {
        let end = stats(&mux);
        let nodes = end.vnets["red"].nodes.iter().filter(|(name, _)| selects(name));
        nodes.flat_map(|(_, node)| node.ports.values().map(of)).sum::<u64>()
    };
    // Frames that leave, and frames that arrived there: at
    // ends of wires, and at those that are ports of their own.
    let outer = |of| of_nodes(|name| !name.starts_with('s'), of);
    let inner = |of| of_nodes(|name| name != OUTSIDE, of);
    eventually("all is taken", || {
        taken_by_taps += taps.iter_mut().map(|tap| tap.receive().len() as u64).sum::<u64>();
        near.receive();
        let a = external(&mux, "A");
        taken_by_taps == inner(|port| port.punted)
            && outer(|port| port.sent) == a.sent + a.dropped.get("refused").unwrap_or(&0)
            && inner(|port| port.made) >= hostile(as_they_are).len() as u64
    });
    let end = stats(&mux);
    assert_adds_up(&end);
    let a = &end.externals["A"];
    assert_eq!(a.received, refused_in(a) + outer(|port| port.received));
    // Frames that entered the segment and the transits left these.
    let on_segment = |of| of_nodes(|name| name.starts_with('s'), of);
    let own = |of| of_nodes(|name| name == OUTSIDE, of);
    assert_eq!(
        on_segment(|port| port.sent + port.copied) + own(|port| port.consumed + port.copied),
        on_segment(|port| port.received) + own(|port| port.made)
    );
    for (name, node) in &end.vnets["red"].nodes {
        for (port, counted) in &node.ports {
            let enough = counted.received > 100 && counted.sent > 100;
            let taken = counted.punted > 100 || name == OUTSIDE;
            assert!(enough && taken, "{name}:{port} {counted:#?}");
        }
    }
    for reason in [
        "malformed",
        "header-checksum",
        "udp-checksum",
        "unknown-tunnel",
        "unknown-peer",
        "vxlan-header",
        "gre-header",
        "gre-checksum",
        "gre-sequence",
        "geneve-header",
        "geneve-control",
        "geneve-critical",
    ] {
        assert!(a.dropped.contains_key(reason), "no {reason}: {:?}", a.dropped);
    }
    assert_whole(&mux, &["A"]);
}

/// A program behind a memif interface, the TAP trunks of a host
/// and of a router, and a guest's trunk all send hostile frames.
#[test]
fn frames_into_memif_and_trunks_are_all_accounted_for() {
    for workers in [1, 2] {
        let root = tempfile::tempdir().unwrap();
        let mux = start(workers);
        let socket = directory(root.path(), "M").join("memif.sock");
        let outlet = OutletConfig::Memif { socket: socket.clone() };
        let external_m = ExternalConfig::new("M", 1500, outlet);
        let ask = |request, fds| mux.handle(request, fds);
        assert_eq!(put_with_sockets(ask, MuxRequest::PutExternal(external_m)), MuxReply::Done);
        let mut vnet = two_hosts(root.path(), "red", &[(0, AttachMode::Runtime)]);
        let by = Encapsulation::Interface;
        vnet.vlinks[0].ends[0] = outside("out", "M", by);
        put(&mux, &vnet);
        let (mut program, mut h2) = (Peer::connect(&socket, 0), Peer::tap_of(&vnet.nodes[2]));
        let (mut tap, mut guest) =
            (Peer::tap_of(&vnet.nodes[0]), Peer::guest_of(&vnet.nodes[0], 0));
        let r1 = || node_stats(&mux, "red", "r1");
        eventually("all there", || r1().guests[&0].connected && r1().tap_connected);
        let (mut sent, mut made, mut out_of_m, mut given) = ([0u64; 4], 0u64, 0u64, 0u64);
        let mut frames = hostile(as_they_are);
        frames.resize(frames.len() + 2 * AHEAD, vec![7; TOO_LONG]);
        for (at, frame) in frames.iter().enumerate() {
            let mark =
                Tag { verdict: TagVerdict::Out, vport: (at / 4 % 2) as u8, last: false, trace: 0 };
            sent[at % 4] += 1;
            eventually("room", || match at % 4 {
                0 => program.send_raw(at as u32, frame),
                1 => h2.out(0, frame),
                2 => tap.send(mark, frame),
                _ => guest.send(mark, frame),
            });
            if at % AHEAD == 0 {
                eventually("what was sent came", || {
                    for (tag, bytes) in guest.receive() {
                        assert!(guest.send(out(1 - tag.vport, tag.trace), &bytes));
                        made += 1;
                    }
                    out_of_m += program.receive_raw().len() as u64;
                    given += (h2.receive().len() + tap.receive().len()) as u64;
                    let (m, r1) = (external(&mux, "M"), r1());
                    m.received == sent[0] && r1.in_flight == 0
                });
            }
        }
        let sum = |of: fn(&PortStats) -> u64| {
            let end = stats(&mux);
            let ports = end.vnets["red"].nodes.values().flat_map(|node| node.ports.values());
            ports.map(of).sum::<u64>()
        };
        eventually("all is taken", || {
            for (tag, bytes) in guest.receive() {
                assert!(guest.send(out(1 - tag.vport, tag.trace), &bytes));
                made += 1;
            }
            out_of_m += program.receive_raw().len() as u64;
            given += (h2.receive().len() + tap.receive().len()) as u64;
            r1().in_flight == 0
                && sum(|port| port.made) == sent[1..].iter().sum::<u64>()
                && external(&mux, "M").received == sent[0]
                && given == sum(|port| port.punted)
                && out_of_m == r1().ports["eth0"].sent
        });
        let end = stats(&mux);
        assert_adds_up(&end);
        let (m, r1) = (&end.externals["M"], r1());
        assert_eq!(m.received, refused_in(m) + r1.ports["eth0"].received);
        assert_eq!((m.sent, made), (out_of_m, r1.guests[&0].completed));
        assert!(program.is_up() && h2.is_up() && tap.is_up() && guest.is_up());
        assert!(dropped(&r1, "runt") > 0 && dropped(&r1, "too-big") > 0, "{r1:#?}");
        assert!(m.dropped["too-long"] > 0, "{m:?}");
        drop((program, h2, tap, guest));
        assert_whole(&mux, &["M"]);
    }
}
