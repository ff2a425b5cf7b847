//! Writes the first entries of every corpus: real frames, valid messages, the kernel's
//! notifications. Run as root; `make fuzz` extends them. Arguments limit it to these targets.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::process::Command;

use pdp_fuzz::{FuzzTarget, TARGETS};
use pdp_mirror::follower::notifications;
use pdp_mirror::kernel::DumpKind;
use pdp_netlink::{Netlink, NetlinkRead};
use pdp_proto::mux::*;
use pdp_proto::routes::{
    self, FromGuest, GroupHop, ResolvedRoute, RouteDecision as RouteTarget, ToGuest, Vport,
    VportHooks,
};
use pdp_proto::{channel, mirror, slowpath, tap};
use pdp_wire::tag::Tag;
use pdp_wire::tunnel::Encapsulation;
use pdp_wire::{ether, geneve, gre, outer, udp, vlan, vxlan};

/// Longest frame that becomes an entry.
const FRAME_BYTES_MAX: usize = 400;

/// Frames of one kind.
const KIND_FRAMES: usize = 3;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

struct Seeds(BTreeMap<&'static str, Vec<Vec<u8>>>);

impl Seeds {
    fn add(&mut self, target: &'static str, entry: impl Into<Vec<u8>>) {
        self.0.entry(target).or_default().push(entry.into());
    }

    /// Writes all entries, each named by its digest.
    fn write(&self, only: &[String]) -> Result<()> {
        let chosen = |name: &str| only.is_empty() || only.iter().any(|selected| selected == name);
        for target in TARGETS.iter().filter(|target| chosen(target.name)) {
            let directory = target.corpus();
            std::fs::create_dir_all(&directory)?;
            let entries = self.0.get(target.name).ok_or(format!("no seed of {}", target.name))?;
            for (number, entry) in entries.iter().enumerate() {
                std::fs::write(directory.join(format!("seed-{number:03}")), entry)?;
                target.feed(entry);
            }
        }
        Ok(())
    }
}

fn counted(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u16).to_le_bytes(), bytes].concat()
}

/// A few frames of each kind, by EtherType and IP protocol.
fn frames() -> Result<Vec<Vec<u8>>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/hostile-frames.pcap");
    let file = std::fs::read(path)?;
    let mut kinds: BTreeMap<_, usize> = BTreeMap::new();
    let kind = |frame: &[u8]| {
        let ethernet = ether::EthernetHeader::parse(frame).map(|header| header.kind);
        let inside = match ethernet {
            Some(ether::kind::IPV4) => frame.get(23),
            Some(ether::kind::IPV6) => frame.get(20),
            _ => None,
        };
        (ethernet, inside.copied())
    };
    let frames = pdp_spec::frames::read(&file)?.into_iter();
    let few = frames.filter(|frame| frame.len() <= FRAME_BYTES_MAX).filter(|frame| {
        let count = kinds.entry(kind(frame)).or_default();
        *count += 1;
        *count <= KIND_FRAMES
    });
    Ok(few.map(<[u8]>::to_vec).collect())
}

/// Encapsulates the frame in a tunnel; `which` selects its kind.
fn tunnelled(frame: &[u8], which: usize) -> Vec<u8> {
    let six = which % 2 == 1;
    let (from, to) = if six { ("fd00::2", "fd00::1") } else { ("10.0.0.2", "10.0.0.1") };
    let (local, remote) = (from.parse().expect("an address"), to.parse().expect("an address"));
    let by = match which / 2 % 5 {
        0 => Encapsulation::Udp(udp::UdpTunnel {
            local,
            remote,
            local_port: 7000,
            remote_port: 7001,
        }),
        1 => Encapsulation::Geneve(geneve::GeneveTunnel { local, remote, port: 6081, vni: 5 }),
        2 => {
            let key = six.then_some(5);
            Encapsulation::Gre(gre::GreTunnel {
                local,
                remote,
                key,
                checksum: six,
                sequence: false,
            })
        }
        3 => Encapsulation::Vlan(vlan::VlanTunnel { id: 5 }),
        _ => Encapsulation::Vxlan(vxlan::VxlanTunnel { local, remote, port: 4789, vni: 5 }),
    };
    let template = outer::HeaderTemplate::new(&by).expect("one family");
    let mut bytes = vec![0; template.len()];
    bytes.extend(frame);
    let _ = template.write(&mut bytes, [2, 0, 0, 0, 0, 1], [9; 6]);
    bytes
}

fn add_frames(seeds: &mut Seeds) -> Result<()> {
    let frames = frames()?;
    for frame in &frames {
        for target in ["ethernet", "flow", "outer", "encapsulate"] {
            seeds.add(target, frame.clone());
        }
        let packet = frame.get(ether::HEADER_BYTES..).unwrap_or_default();
        match ether::EthernetHeader::parse(frame).map(|header| header.kind) {
            Some(ether::kind::IPV4) => seeds.add("ipv4", packet),
            Some(ether::kind::IPV6) => seeds.add("ipv6", packet),
            _ => {}
        }
        if frame.get(12..14) == Some(&[8, 0]) && frame.get(23) == Some(&17) {
            seeds.add("udp", &frame[34..]);
        }
        seeds.add("checksum", frame.clone());
    }
    for (at, frame) in frames.iter().enumerate() {
        let frame = tunnelled(frame, at);
        seeds.add("classify", [&[0], &frame[..]].concat());
        if at % 8 == 0 {
            seeds.add("outer", frame);
        }
    }
    for (number, chunk) in frames.chunks(8).enumerate() {
        let mut router = Vec::new();
        for (vport, frame) in (0..).zip(chunk) {
            router.push(vport);
            router.extend(counted(frame));
        }
        seeds.add("card-frames", router.clone());
        seeds.add("router", router);
        // A frame of the virtual router, a word of data, and its entry in a table.
        let mut registers = vec![26];
        registers.extend(counted(&chunk[0]));
        registers.extend([number as u8 % 6, 1, 0, 0, 0, 6 + number as u8 % 20, 1, 0, 0, 0]);
        seeds.add("card-registers", registers);
        let mut file = vec![0, 0];
        file.extend(chunk.iter().flat_map(|frame| counted(frame)));
        seeds.add("capture", file);
        let mut runtime = vec![(chunk.len() % 2) as u8];
        for (vport, frame) in (0..).zip(chunk) {
            runtime.push(vport % 3);
            // A frame of the label switch's own protocol.
            let label = [&frame[..12], &[0x88, 0xb5, 0, vport, 0, 1, vport % 3], frame].concat();
            runtime.extend(counted(if vport % 2 == 0 { &label } else { frame }));
        }
        seeds.add("guest-runtime", runtime);
        let mut worker = vec![];
        for (at, frame) in chunk.iter().enumerate() {
            // From outside, from outside in a tunnel, from the host's TAP, and from the guest.
            let tunnel = (number * 2 + at / 4) as u8 % 16;
            worker.push([0, 1 | tunnel << 3, 2, 3][at % 4]);
            if at % 4 >= 2 {
                worker.push(0);
            }
            worker.extend(counted(frame));
            worker.extend([7, 5, 6]);
        }
        seeds.add("worker", worker);
    }
    let mut pcap = Vec::new();
    for word in [0xa1b2_c3d4u32, 0x0004_0002, 0, 0, 0xffff, 1] {
        pcap.extend(word.to_le_bytes());
    }
    for frame in frames.iter().take(4) {
        let length = frame.len() as u32;
        [0, 0, length, length].iter().for_each(|word| pcap.extend(word.to_le_bytes()));
        pcap.extend(frame);
    }
    seeds.add("pcap", pcap);
    seeds.add("vxlan", vxlan::emit(0x12_3456));
    seeds.add("tag", Tag::deliver(7, 3).emit().to_le_bytes());
    Ok(())
}

fn add_messages(seeds: &mut Seeds) -> Result<()> {
    let hop = |vport| GroupHop { vport, gateway: Some([10, 0, 0, vport as u8].into()), weight: 1 };
    let route = |prefix: &str, target| -> Result<ToGuest> {
        Ok(ToGuest::Route { prefix: prefix.parse()?, target })
    };
    let all = vec![
        ToGuest::Begin,
        ToGuest::Forwarding { v4: true, v6: true },
        ToGuest::Choosing { v4: true, v6: false },
        ToGuest::Vport(Vport {
            index: 0,
            mac: [0; 6],
            mtu: 1500,
            up: true,
            hooked: VportHooks::default(),
            macs: vec![[2; 6]],
            forwards_v4: true,
        }),
        ToGuest::Local { address: [10, 0, 0, 1].into(), own: true },
        ToGuest::Group { id: 1, hops: vec![hop(0), hop(1)], mtu: 1300 },
        route("10.0.0.0/8", RouteTarget::Group(1))?,
        route("2001:db8::/32", RouteTarget::Drop)?,
        ToGuest::Neighbour { vport: 0, address: [10, 0, 0, 0].into(), mac: Some([1; 6]) },
        ToGuest::End,
        route("0.0.0.0/0", RouteTarget::Punt)?,
        ToGuest::RouteGone("10.0.0.0/8".parse()?),
        ToGuest::GroupGone(1),
        ToGuest::LocalGone([10, 0, 0, 1].into()),
        ToGuest::Barrier(1),
        ToGuest::Dump(2),
    ];
    seeds.add("routes-to-guest", &routes::encode(&all)?[4..]);
    seeds.add("routes-to-guest", &routes::encode(&[&all[..], &all[..]].concat())?[4..]);
    let answers = [
        FromGuest::Hello { version: routes::VERSION, guest: 0 },
        FromGuest::Applied(1),
        FromGuest::Used(vec![(0, [10, 0, 0, 1].into())]),
        FromGuest::Table {
            dump: 2,
            routes: vec![("10.0.0.0/8".parse()?, ResolvedRoute::Hops(vec![hop(0)]))],
        },
        FromGuest::TableEnd(2),
    ];
    seeds.add("routes-from-guest", &routes::encode(&answers)?[4..]);
    let vnet = vnet();
    seeds.add("vnet-check", serde_json::to_vec(&vnet)?);
    let mut twice = vnet.clone();
    twice.nodes.push(NodeConfig { router: None, ..vnet.nodes[0].clone() });
    seeds.add("vnet-check", serde_json::to_vec(&twice)?);
    let messages = [
        serde_json::to_vec(&MuxRequest::Hello)?,
        serde_json::to_vec(&MuxRequest::Stats { vnet: None })?,
        serde_json::to_vec(&MuxRequest::PutVnet(Box::new(vnet)))?,
        serde_json::to_vec(&MuxReply::Failed { error: "no".into() })?,
        serde_json::to_vec(&tap::TapRequest::Serve {
            ports: vec![tap::TapPort { vport: 0, name: "eth0".into() }],
        })?,
        serde_json::to_vec(&tap::TapReply::Stats { ports: vec![tap::TapPortStats::default()] })?,
        serde_json::to_vec(&mirror::MirrorRequest::Routes {
            source: mirror::TableSource::Diff(1),
            within: Some("10.0.0.0/8".parse()?),
        })?,
        serde_json::to_vec(&mirror::MirrorReply::Status(mirror::MirrorStatusReply::default()))?,
    ];
    for message in messages {
        seeds.add("channel", [&[3], &channel::frame(&message)?[..]].concat());
    }
    use pdp_api::exec::{ExecFrame, WindowSize};
    let frames = [
        ExecFrame::Stdin(b"ls".to_vec()),
        ExecFrame::Stdout(b"a".to_vec()),
        ExecFrame::Stderr(vec![]),
        ExecFrame::Resize(WindowSize { rows: 25, columns: 80 }),
        ExecFrame::StdinEnd,
        ExecFrame::Exit(1),
    ];
    seeds.add("exec-frames", frames.iter().flat_map(ExecFrame::emit).collect::<Vec<u8>>());
    Ok(())
}

fn vnet() -> VnetConfig {
    let port =
        |index| PortConfig { name: format!("eth{index}"), mac: [2, 0, 0, 0, 0, index], mtu: 1500 };
    let none = Rate { bps: 0, pps: 0 };
    let router = RouterConfig {
        guests: vec![GuestConfig {
            number: 0,
            socket: "/run/g".into(),
            attach: AttachMode::Runtime,
            weight: 1000,
            leaving: false,
        }],
        policy: GuestDistribution::Flow,
        flow: FlowKey::Bytes(vec![MaskedField { offset: 14, mask: vec![0xff; 4] }]),
        punt_filters: vec![PuntFilterConfig {
            matches: vec![BytePattern { offset: 12, value: vec![8, 6], mask: vec![0xff; 2] }],
            class: 1,
        }],
        punt_limits: [none; PUNT_CLASSES],
        engine: None,
    };
    VnetConfig {
        name: "red".into(),
        police: Some(none),
        nodes: vec![NodeConfig {
            name: "r1".into(),
            ports: vec![port(0), port(1)],
            tap_socket: "/run/t".into(),
            router: Some(router),
        }],
        vlinks: vec![Vlink {
            name: "l".into(),
            ends: vec![
                VlinkEnd::Port { node: "r1".into(), port: 0 },
                VlinkEnd::Port { node: "r1".into(), port: 1 },
            ],
            leaving: vec![
                EgressConfig {
                    rate_bps: Some(1_000_000),
                    queue_frames: 8,
                    ..EgressConfig::default()
                };
                2
            ],
            up: true,
            segment: None,
            schedule: None,
            queues: vec![],
        }],
    }
}

/// Receive buffer for the kernel's notifications, bytes.
const RECEIVE_BYTES: usize = 1 << 20;

/// Adds the kernel's messages about interfaces, neighbours
/// and routes in a network namespace of our own.
fn add_netlink(seeds: &mut Seeds) -> Result<()> {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)?;
    let mut heard = notifications(RECEIVE_BYTES)?;
    let commands = "ip link add eth0 type veth peer name far0
        ip link set far0 up
        ip link set eth0 up
        ip link add eth1 type veth peer name far
        ip link set eth1 up
        ip addr add 10.0.0.1/24 dev eth0
        ip addr add fd00::1/64 dev eth0 nodad
        ip neigh add 10.0.0.2 lladdr 02:00:00:00:00:02 dev eth0
        ip route add 10.1.0.0/16 via 10.0.0.2
        ip route add 10.2.0.0/16 nexthop via 10.0.0.2 nexthop dev eth1
        ip route add blackhole 10.3.0.0/16
        ip nexthop add id 5 via 10.0.0.2 dev eth0
        ip nexthop add id 6 group 5
        ip route add 10.4.0.0/16 nhid 6
        ip -6 route add 2001:db8::/32 via fd00::2
        ip -6 route append 2001:db8::/32 via fd00::3
        ip route replace 10.1.0.0/16 dev eth0
        ip route add 10.1.0.0/16 dev eth0 tos 4
        ip neigh del 10.0.0.2 dev eth0
        ip route del 10.2.0.0/16
        ip nexthop del id 6
        ip link set eth0 down
        ip link del eth1";
    let mut all = Vec::new();
    for command in commands.lines() {
        let mut words = command.split_whitespace();
        let done = Command::new(words.next().ok_or("a word")?).args(words).status()?;
        if !done.success() {
            return Err(command.into());
        }
        let mut entry = Vec::new();
        while let NetlinkRead::Datagram(datagram) = heard.receive()? {
            entry.push(0);
            entry.extend(counted(datagram));
        }
        entry.push(4);
        all.extend(entry.clone());
        seeds.add("netlink", entry);
    }
    for (number, kind) in (0..).zip(DumpKind::ALL) {
        let mut requests = Netlink::routing()?;
        requests.send(&kind.request())?;
        let mut entry = vec![5 | number << 3];
        loop {
            match requests.receive()? {
                NetlinkRead::Datagram(datagram) => {
                    entry.push(0);
                    entry.extend(counted(datagram));
                }
                NetlinkRead::Empty if entry.len() > 1 => break,
                _ => std::thread::yield_now(),
            }
        }
        entry.extend([6, 4]);
        seeds.add("netlink", entry);
    }
    Ok(())
}

fn add_files(seeds: &mut Seeds) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut specs: Vec<_> = std::fs::read_dir(root.join("examples"))?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "yaml"))
        .collect();
    specs.push(root.join("crates/spec/tests/figure.yaml"));
    specs.sort();
    let bytes_max = FuzzTarget::named("spec").ok_or("a target")?.bytes_max;
    for path in specs {
        let text = std::fs::read(path)?;
        if text.len() <= bytes_max {
            seeds.add("spec", text);
        }
    }
    for (method, path, body) in [
        ("GET", "/v1/version", ""),
        ("GET", "/v1/vnets/red", ""),
        ("GET", "/v1/stats?vnet=red", ""),
        ("GET", "/v1/logs/mux?tail=3&follow=true", ""),
        ("GET", "/v1/openapi.json", ""),
        ("HEAD", "/v1/version", ""),
        ("POST", "/v1/apply", r#"{"files":[{"name":"a","text":"kind: Substrate"}],"dryRun":true}"#),
        ("POST", "/v1/down", r#"{"purge":false}"#),
        ("PUT", "/v1/vnets/red/links/x", r#"{"up":true}"#),
        ("GET", "/v1/vnets/red/nodes/r1/routes?within=10.0.0.0/8", ""),
        ("POST", "/v1/vnets/red/nodes/r1/exec", r#"{"command":["ls"]}"#),
        ("DELETE", "/v1/substrate", ""),
    ] {
        let length = body.len();
        let kind = "Content-Type: application/json\r\nHost: x";
        let head =
            format!("{method} {path} HTTP/1.1\r\n{kind}\r\nContent-Length: {length}\r\n\r\n");
        seeds.add("http", format!("{head}{body}"));
    }
    seeds.add("http", "GET /v1/version HTTP/1.0\r\n\r\nPRI * HTTP/2.0\r\n\r\n");
    let chunked = "POST /v1/up HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n";
    seeds.add("http", chunked);
    let directory = tempfile::tempdir()?;
    drop(pdpd::intent::state::StateFile::open(directory.path())?);
    let connection = directory.path().join("pdpd.sqlite");
    seeds.add("state", std::fs::read(connection)?);
    seeds.add("state", "");
    seeds.add("state", "SQLite format 3\0");
    Ok(())
}

/// An archive with everything that an image may contain, and things that it must not.
fn archive(names: &[(&str, u8, &str, &[u8])]) -> Vec<u8> {
    let mut tar = Vec::new();
    for (name, kind, link, content) in names {
        let mut header = [0u8; 512];
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[100..108].copy_from_slice(b"0000755\0");
        header[108..116].copy_from_slice(b"0000000\0");
        header[116..124].copy_from_slice(b"0000000\0");
        header[124..136].copy_from_slice(format!("{:011o}\0", content.len()).as_bytes());
        header[136..148].copy_from_slice(b"00000000000\0");
        header[148..156].fill(b' ');
        header[156] = *kind;
        header[157..157 + link.len()].copy_from_slice(link.as_bytes());
        header[257..265].copy_from_slice(b"ustar\x0000");
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        tar.extend(header);
        tar.extend(*content);
        tar.resize(tar.len().next_multiple_of(512), 0);
    }
    tar.resize(tar.len() + 1024, 0);
    tar
}

fn add_images(seeds: &mut Seeds) {
    let good = archive(&[
        ("etc/", b'5', "", b""),
        ("etc/motd", b'0', "", b"hello"),
        ("etc/link", b'2', "/canary", b""),
        ("etc/hard", b'1', "etc/motd", b""),
        ("dev/null", b'3', "", b""),
        ("pipe", b'6', "", b""),
    ]);
    let bad = [
        archive(&[("../canary", b'0', "", b"x")]),
        archive(&[("/canary", b'0', "", b"x")]),
        archive(&[("out", b'2', "/", b""), ("out/canary", b'0', "", b"x")]),
        archive(&[("out", b'1', "/canary", b""), ("out", b'0', "", b"x")]),
        archive(&[("a/.wh..", b'0', "", b""), ("a/.wh..wh..opq", b'0', "", b"")]),
        archive(&[("out", b'2', "/layout", b""), (".wh.out", b'0', "", b"")]),
        archive(&[("out", b'2', "/", b""), ("out/.wh.canary", b'0', "", b"")]),
    ];
    seeds.add("image-layer", counted(&good));
    for bad in bad {
        seeds.add("image-layer", [counted(&good), counted(&bad)].concat());
        seeds.add("image-layer", counted(&bad));
    }
    // Without layers, with one existing layer (of no bytes), and an index in an index.
    let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    let layer = format!(
        r#"{{"mediaType":"application/vnd.oci.image.layer.v1.tar","digest":"sha256:{empty}","size":0}}"#
    );
    for layers in [String::new(), layer.clone(), format!("{layer},{layer}")] {
        let manifest = format!(r#"{{"schemaVersion":2,"config":{layer},"layers":[{layers}]}}"#);
        seeds.add("image-layout", [&[0], manifest.as_bytes()].concat());
    }
    let index = format!(r#"{{"schemaVersion":2,"manifests":[{layer}]}}"#);
    seeds.add("image-layout", [&[1], index.as_bytes()].concat());
    let escape = index.replace(empty, "../../canary");
    seeds.add("image-layout", [&[1], escape.as_bytes()].concat());
    // Data from a registry: a manifest, and configurations with layers.
    let manifest = format!(r#"{{"schemaVersion":2,"config":{layer},"layers":[{layer}]}}"#);
    seeds.add("image-inbox", [&[0], manifest.as_bytes()].concat());
    let config =
        br#"{"architecture":"amd64","os":"linux","config":{"Entrypoint":["/x"],"Cmd":["a"],
        "Env":["A=b"],"WorkingDir":"/srv","User":"frr:1"}}"#;
    let sized = archive(&[
        ("./@PaxHeader", b'x', "", b"12 size=999\n"),
        ("etc/motd", b'0', "", b"hello"),
        ("././@LongLink", b'L', "", &[b'a'; 200]),
        ("short", b'0', "", b"long"),
        ("etc/motd", b'S', "", b"sparse"),
        ("etc/motd", b'7', "", b"contiguous"),
    ]);
    let mut zeros = archive(&[("zeros", b'0', "", &[])]);
    // A size in base 256: the largest possible.
    zeros[124..136].fill(0xff);
    for layer in [&good, &sized, &zeros] {
        seeds.add("image-inbox", [&[1], &counted(config)[..], &counted(layer)].concat());
    }
    // Archives of `docker save`: valid, with links, and one that leads elsewhere.
    let images = |layers: &str| {
        format!(r#"[{{"Config":"config.json","RepoTags":["a:1"],"Layers":[{layers}]}}]"#)
    };
    for (layers, link) in [
        (r#""0/layer.tar""#, "../0/layer.tar"),
        (r#""0/layer.tar","1/layer.tar""#, "../0/layer.tar"),
        (r#""1/layer.tar""#, "../../../canary"),
        (r#""../canary","/canary""#, "1/layer.tar"),
    ] {
        let saved = archive(&[
            ("config.json", b'0', "", config),
            ("0/layer.tar", b'0', "", &good),
            ("1/layer.tar", b'2', link, b""),
            ("manifest.json", b'0', "", images(layers).as_bytes()),
        ]);
        seeds.add("image-archive", saved);
    }
}

fn add_memif(seeds: &mut Seeds) {
    for start in 0..6u8 {
        seeds.add("memif-server", [start, 0, 1, 2, 3, 4]);
        seeds.add("memif-client", [start, 0x11, 1, 2, 3, 4, 0x08, 200]);
    }
    // A region of other memory, a ring without a doorbell, its own length.
    seeds.add("memif-server", [1, 0x11, 2, 0x12, 1, 3, 4]);
    seeds.add("memif-server", [0, 0, 0x29, 4, 200, 0x2a, 6, 9, 3, 4]);
    // Descriptors, a head index, a look at the ring.
    let mut rings = Vec::new();
    for slot in 0..4 {
        rings.extend([2, slot & 1, 64, 0, 0, 64, slot]);
        rings.extend([3, 0, 0, 8, 0, 96, slot]);
    }
    rings.extend([0, 3, 1, 4, 6, 4, 8, 1, 0, 0, 1, 2, 6, 0x10, 1]);
    seeds.add("memif-rings", rings);
    seeds.add("memif-rings", [10, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 2, 6]);
    seeds.add("memif-rings", [0xf4, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 6]);
}

fn add_records(seeds: &mut Seeds) {
    let record = br#"{"version":2,"kind":"guest","cgroup":"red/r1"}"#;
    let process = br#"{"pid":1,"start_time":2}"#;
    let outcome = br#"{"code":1,"signal":null,"at_ms":5}"#;
    let older = br#"{"what":{"guest":{"id":"x"}},"runc":"/bin/false","fds":0}"#;
    let file = |kind: u8, bytes: &[u8]| [&[kind], &counted(bytes)[..]].concat();
    let tree = [5, 5, 5, 0, 0, 1, 1, 1, 2, 0, 3, 5, 1, 3, 1, 4, 1, 0];
    for kind in [1, 2, 3, 4] {
        let files = [file(kind, record), file(4, process), file(4, process), file(4, outcome)];
        seeds.add("records", [files.concat(), tree.to_vec()].concat());
    }
    seeds.add("records", file(4, older));
    seeds.add("records", [file(4, record), file(2, b""), file(1, b""), file(3, outcome)].concat());
}

fn add_filters(seeds: &mut Seeds) {
    let set = |first: u16, bytes: [u8; 5], differs: [u8; 5]| {
        [&[1], &first.to_le_bytes()[..], &[0xff], &bytes, &differs, &[0, 0]].concat()
    };
    let (commit, abandon) = ([4, 1, 2], [5, 3, 4]);
    let settle = |most: u8| [6, most, 5, 6];
    let remove = |first: u16, count: u8| [&[3], &first.to_le_bytes()[..], &[count, 7, 8]].concat();
    // Prefixes, single bits, groups, and similar filters; more than the ternary memory holds.
    for differs in [[1, 3, 1, 0, 9], [0, 5, 0, 7, 0], [8, 8, 2, 1, 1], [0, 0, 0, 0, 8]] {
        for mask in [0, 60, 0x40, 0x81, 0xc0] {
            let sets = [0, 255, 400].map(|first| set(first, [9, 1, mask, 250, 3], differs));
            let more = set(100, [0, 0, 3, mask, 200], differs);
            let steps = [
                &[0x40, 1, 7][..],
                &sets.concat(),
                &commit,
                &settle(20),
                &settle(255),
                &remove(50, 200),
                &more,
                &abandon,
                &settle(1),
                &settle(255),
                &remove(100, 255),
                &remove(355, 255),
                &commit,
                &settle(9),
                &settle(255),
                &more,
                &commit,
            ];
            seeds.add("filters", steps.concat());
        }
    }
}

fn add_slowpath(seeds: &mut Seeds) {
    use slowpath::{
        Filter, FilterAction, FilterCounter, FilterPattern, FilterVerdict, QueueSetting,
        QueueState, SlowPathReply, SlowPathRequest, Welcome,
    };
    let packet = |bytes: &[u8]| [&(bytes.len() as u16).to_be_bytes()[..], bytes].concat();
    let encoded = |requests: &[SlowPathRequest]| {
        let mut bytes = Vec::new();
        requests.iter().for_each(|request| request.encode(&mut bytes));
        packet(&bytes)
    };
    let action =
        FilterAction { verdict: FilterVerdict::Send, copies_count: 2, ..FilterAction::default() };
    let set = |id: u32, long: bool| {
        let pattern = match long {
            false => FilterPattern::Short { value: [id as u8; 16], mask: [0xf0; 16] },
            true => FilterPattern::Long { value: [id as u8; 40], mask: [0xf; 40] },
        };
        SlowPathRequest::Set(Filter { id, priority: id % 3, pattern, action })
    };
    let commit = |sweep| SlowPathRequest::Commit { number: 1, sweep };
    let ends = [SlowPathRequest::Remove(3), commit(false), set(5, true), commit(true)];
    for pieces in [0, 1, 7, 255] {
        let first: Vec<_> = (0..20).map(|id| set(id, id % 2 == 0)).collect();
        let packets = [
            encoded(&[SlowPathRequest::Hello(2)]),
            encoded(&first),
            encoded(&ends),
            encoded(&ends[1..]),
        ];
        seeds.add("slowpath", [&[pieces][..], &packets.concat()].concat());
    }
    let queue = |vport, queue, weight, frames, bytes| {
        SlowPathRequest::Queue(QueueSetting { vport, queue, weight, frames, bytes })
    };
    let queues = [
        [queue(0, 1, 7, 3, 0), queue(0, 2, 0, 4096, 9000), commit(false)],
        [set(1, false), queue(0, 2, 1000, 0, 1), commit(true)],
        [set(2, false), queue(0, 1, 0, 21, 0), commit(false)],
        [queue(1, 1, 1, 1, 1), queue(0, 3, 1, 0, 0), commit(true)],
    ];
    let packets: Vec<u8> = queues.iter().flat_map(|some| encoded(some)).collect();
    seeds.add("slowpath", [&[1][..], &packets].concat());
    let asks = [
        SlowPathRequest::Queues { number: 4, vport: 0, first: 1 },
        SlowPathRequest::Counters { number: 2, first: 1, count: 2 },
        SlowPathRequest::List { number: 3, first: 0 },
        SlowPathRequest::Frame { out: true, vport: 1, queue: 2, bytes: vec![1; 60] },
    ];
    seeds.add("slowpath", [&[9][..], &encoded(&asks)].concat());
    let SlowPathRequest::Set(filter) = set(1, true) else { return };
    let counters = vec![FilterCounter { packets: 2, bytes: 120, sent: 1, sent_bytes: 60 }; 3];
    let replies = [
        SlowPathReply::Welcome(Welcome::default()),
        SlowPathReply::Done { number: 1, filters: 2 },
        SlowPathReply::Refused { number: 1, id: 2, reason: "no".into() },
        SlowPathReply::Counters { number: 2, first: 0, counters, more: true },
        SlowPathReply::Filters { number: 3, filters: vec![filter; 2], more: false },
        SlowPathReply::Bye("enough".into()),
        SlowPathReply::Queues {
            number: 4,
            first: 1,
            queues: vec![QueueState { weight: 3, ..QueueState::default() }; 2],
            more: true,
        },
    ];
    for reply in replies {
        let mut bytes = Vec::new();
        reply.encode(&mut bytes);
        seeds.add("slowpath", [&[1][..], &packet(&bytes)].concat());
    }
}

fn main() -> Result<()> {
    let mut seeds = Seeds(BTreeMap::new());
    add_frames(&mut seeds)?;
    add_messages(&mut seeds)?;
    add_files(&mut seeds)?;
    add_images(&mut seeds);
    add_memif(&mut seeds);
    add_netlink(&mut seeds)?;
    add_records(&mut seeds);
    add_filters(&mut seeds);
    add_slowpath(&mut seeds);
    seeds.write(&std::env::args().skip(1).collect::<Vec<_>>())
}
