//! Specs to plans: the same input gives the same plan, a change affects
//! only what it concerns, and vnets have nothing in common.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use pdp_api::ChangeAction;
use pdp_container::{Limits, Profile};
use pdp_proto::mux;
use pdp_spec::limits::{FILE_DIRECTORIES, FILE_DIRECTORIES_IMAGE};
use pdp_spec::units::Base64;
use pdp_spec::{DeviceAttach, RUN_BYTES, SourceFile};
use pdp_wire::tunnel::Take;
use pdpd::intent::model::Model;
use pdpd::plan::key::ObjectKey;
use pdpd::plan::{
    DaemonPaths, KernelLinkTarget, KernelTunnel, LinkPath, MemifPlan, OutletPlan, Plan, VnetPlan,
};
use proptest::prelude::*;

const SUBSTRATE: &str = r#"
apiVersion: pdp/v1
kind: Substrate
metadata: {name: node}
spec:
  mux: {cpus: "0", power: 0.5}
  interfaces:
    A: {device: extA}
  forwardingEngines:
    fe1: {cpus: "1", capacity: 1}
    fe2: {cpus: "2", capacity: 1}
    fe3: {cpus: "3", capacity: 1}
"#;

/// A tenant without limits that matter here.
const TENANT: &str = r#"
apiVersion: pdp/v1
kind: Tenant
metadata: {name: acme}
spec: {quota: {memory: 1Ti, power: 64, routes: 64000000, logs: 1Ti, descriptors: 100000, regions: 4096}}
"#;

fn places() -> DaemonPaths {
    DaemonPaths {
        run: "/run/pdp".into(),
        lib: "/usr/lib/pdp".into(),
        pins: "/sys/fs/bpf/pdp".into(),
    }
}

fn cpus() -> BTreeSet<u32> {
    (0..4).collect()
}

/// One of two similar vnets.
#[derive(Clone, Debug)]
struct Wish {
    name: &'static str,
    file: String,
    power_millicores: u32,
    rate_mbps: u32,
    vni: u32,
    policy: &'static str,
}

impl Wish {
    fn of(name: &'static str, vni: u32) -> Self {
        let file = "hello".to_string();
        Self { name, file, power_millicores: 200, rate_mbps: 100, vni, policy: "flow" }
    }

    fn yaml(&self) -> String {
        let Self { name, file, power_millicores, rate_mbps, vni, policy } = self;
        format!(
            r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: {name}}}
spec:
  nodes:
    r1:
      kind: router
      interfaces:
        eth0: {{addresses: [10.0.1.1/24]}}
        eth1: {{addresses: [10.0.2.1/24]}}
      files: {{/etc/motd: {{content: "{file}"}}}}
      commands: [sleep 1]
      dataPlane: {{power: {power_millicores}m, distribution: {{policy: {policy}}}}}
    r2:
      kind: router
      interfaces: {{eth0: {{addresses: [10.0.2.2/24]}}, eth1: {{}}}}
      dataPlane: {{power: 100m}}
    h1:
      kind: host
      interfaces: {{eth0: {{addresses: [10.0.1.2/24], gateways: [10.0.1.1]}}}}
  externals:
    out: {{interface: A, vxlan: {{vni: {vni}, local: 192.0.2.1, remote: 192.0.2.2}}}}
  links:
    - {{endpoints: ["r1:eth0", "h1:eth0"], rate: {rate_mbps}Mbps}}
    - {{endpoints: ["r1:eth1", "r2:eth0"]}}
    - {{endpoints: ["r2:eth1", "external:out"]}}
"#
        )
    }
}

fn apply(before: &Model, text: String) -> Model {
    apply_beside(before, text, &[])
}

/// Applies files while parts of the vnets in `remaining` still exist.
fn apply_beside(before: &Model, text: String, remaining: &[&str]) -> Model {
    let file = SourceFile { name: "test.yaml".into(), text, ..SourceFile::default() };
    let documents = pdp_spec::parse(&[file]).unwrap_or_else(|faults| panic!("{faults:#?}"));
    let substrate =
        documents.iter().any(|document| matches!(document.object, pdp_spec::Object::Substrate(_)));
    let existing = before.existing(&cpus(), substrate);
    let intent =
        pdp_spec::check(&documents, &existing).unwrap_or_else(|faults| panic!("{faults:#?}"));
    before.with(intent, &places(), &cpus(), |vnet| remaining.contains(&vnet)).unwrap()
}

fn both(red: &Wish, blue: &Wish) -> Model {
    apply(&Model::default(), format!("{SUBSTRATE}---{}---{}", red.yaml(), blue.yaml()))
}

fn hashes(plan: &Plan) -> BTreeMap<String, String> {
    let mut hashes = BTreeMap::new();
    for (vnet, plan) in &*plan.vnets {
        for (node, plan) in &plan.nodes {
            hashes.insert(format!("{vnet}/{node}"), plan.hash.clone());
            for (number, guest) in &plan.guests {
                hashes.insert(format!("{vnet}/{node}/g{number}"), guest.hash.clone());
            }
        }
    }
    hashes
}

fn differing(a: &Model, b: &Model) -> Vec<String> {
    let (a, b) = (hashes(&a.plan), hashes(&b.plan));
    let keys: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    keys.into_iter().filter(|key| a.get(*key) != b.get(*key)).cloned().collect()
}

#[test]
fn file_change_restarts_only_its_node() {
    let (red, blue) = (Wish::of("red", 1), Wish::of("blue", 2));
    let before = both(&red, &blue);
    let after = apply(&before, Wish { file: "other".into(), ..red }.yaml());
    assert_eq!(differing(&before, &after), ["red/r1"]);
    assert_eq!(before.plan.vnets["red"].mux, after.plan.vnets["red"].mux);
    let blue = |model: &Model| model.plan.vnets["blue"].clone();
    assert!(Arc::ptr_eq(&blue(&before), &blue(&after)), "what is as before is the same one");
    let changes = after.changes_from(&before, &BTreeSet::new(), false);
    let actions: Vec<_> = changes.iter().map(|c| (c.object.as_str(), c.action)).collect();
    assert_eq!(
        actions,
        [("vnet/red", ChangeAction::Change), ("vnet/red/node/r1", ChangeAction::Restart)]
    );
}

/// Returns the content of `/etc/hosts` without its head.
fn hosts(model: &Model) -> Vec<&str> {
    let lines = model.plan.vnets["lab"].hosts.lines();
    lines.skip_while(|line| !line.starts_with("::1")).skip(1).collect()
}

#[test]
fn hosts_file_names_nodes_without_restarts() {
    let lab = |h1: &str, more: &str| {
        format!(
            r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: lab}}
spec:
  nodes:
    R1:
      kind: router
      loopback: [192.0.2.1/32]
      interfaces:
        eth0: {{addresses: [169.254.0.1/16, "fe80::1/64", 10.0.1.1/24, "2001:db8::1/64"]}}
        eth1: {{addresses: [10.0.2.1/24]}}
        "z#b": {{addresses: [10.0.3.1/24]}}
      dataPlane: {{power: 100m}}
    h1: {{kind: host, interfaces: {{eth0: {{addresses: [{h1}]}}}}}}
    localhost: {{kind: host, interfaces: {{eth0: {{addresses: [10.0.9.9/24]}}}}}}
    own: {{kind: host, files: {{/etc//hosts: {{content: ""}}}}, interfaces: {{eth0: {{}}}}}}{more}
"#
        )
    };
    let before = apply(&Model::default(), [SUBSTRATE, &lab("10.0.1.2/24", "")].join("---"));
    let expected = [
        "192.0.2.1\tR1 lo.R1",
        "2001:db8::1\tR1 eth0.R1",
        "10.0.1.2\th1 eth0.h1",
        "10.0.1.1\teth0.R1",
        "10.0.2.1\teth1.R1",
    ];
    assert_eq!(hosts(&before), expected);
    let bound = |node: &str| {
        let binds = &before.plan.vnets["lab"].nodes[node].control.binds;
        binds.iter().map(|bind| (bind.target.to_str().unwrap(), bind.writable)).collect::<Vec<_>>()
    };
    assert_eq!(bound("R1"), [("/etc/hosts", false), ("/run/pdp/slowpath", false)]);
    assert_eq!(bound("h1"), [("/etc/hosts", false)]);
    assert_eq!(bound("own"), [], "its own file is not hidden");
    // Another address and another node appear in the file, and nothing else is restarted.
    let after = apply(&before, lab("10.0.1.3/24", "\n    h2: {kind: host}"));
    assert_eq!(hosts(&after)[2], "10.0.1.3\th1 eth0.h1");
    assert_eq!(differing(&before, &after), ["lab/h1", "lab/h2"]);
    assert!(after.plan.changed_from(&before.plan).contains(&ObjectKey::vnet("lab")));
}

#[test]
fn hosts_file_size_is_bounded() {
    let address = |n: u32| format!("10.{}.{}.{}/32", n >> 16, n >> 8 & 255, n & 255);
    let interface = |at: u32| (at * 32..at * 32 + 32).map(address).collect::<Vec<_>>().join(", ");
    let nodes = (0..3u32).map(|node| {
        let ports = (0..250u32)
            .map(|port| format!("eth{port}: {{addresses: [{}]}}", interface(node * 250 + port)));
        format!(
            "\n    h{node}: {{kind: host, interfaces: {{{}}}}}",
            ports.collect::<Vec<_>>().join(", ")
        )
    });
    let lab = format!(
        "apiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {{name: lab}}\nspec:\n  nodes:{}\n",
        nodes.collect::<String>()
    );
    let model = apply(&Model::default(), [SUBSTRATE, &lab].join("---\n"));
    let lines = hosts(&model);
    assert_eq!(lines.len(), 16_384);
    // Names of nodes come first.
    assert!(lines[2].contains("\th2 eth0.h2"), "{}", lines[2]);
}

/// A schedule starts when it first appears, whatever else changes. Another schedule starts anew.
#[test]
fn schedule_starts_once_despite_other_changes() {
    let (red, blue) = (Wish::of("red", 1), Wish::of("blue", 2));
    let with = |wish: &Wish, schedule: &str| {
        wish.yaml().replace(", rate: ", &format!(", schedule: [{schedule}], rate: "))
    };
    let before = both(&red, &blue);
    let schedule = |model: &Model| model.plan.vnets["red"].mux.vlinks[0].schedule.clone();
    assert_eq!(schedule(&before), None);
    let one = apply(&before, with(&red, "{at: 10s, up: false}"));
    let began = schedule(&one).unwrap();
    assert_eq!((began.steps.len(), began.steps[0].at_ns), (1, 10_000_000_000));
    std::thread::sleep(std::time::Duration::from_millis(2));
    let other = Wish { power_millicores: 300, ..red.clone() };
    let same = apply(&one, with(&other, "{at: 10s, up: false}"));
    assert_eq!(schedule(&same).unwrap(), began);
    let another = schedule(&apply(&same, with(&red, "{at: 11s, up: false}"))).unwrap();
    assert!(another.began_ns > began.began_ns);
    assert_eq!(schedule(&apply(&one, red.yaml())), None);
}

#[test]
fn power_change_restarts_no_node() {
    let (red, blue) = (Wish::of("red", 1), Wish::of("blue", 2));
    let before = both(&red, &blue);
    let after = apply(&before, Wish { power_millicores: 300, ..red.clone() }.yaml());
    assert_eq!(differing(&before, &after), [""; 0]);
    let guest = |model: &Model| model.plan.vnets["red"].nodes["r1"].guests[&0].clone();
    assert_eq!(guest(&after).container.limits.cpu_cores, Some(0.3));
    assert_eq!(guest(&before).placement.engine, guest(&after).placement.engine);

    // More power than one engine has: another guest is added, and the first one stays.
    let more = apply(&before, Wish { power_millicores: 1300, ..red }.yaml());
    let added = differing(&before, &more);
    assert!(!added.contains(&"red/r1".to_string()) && added.len() == 1, "{added:?}");
    assert_eq!(more.plan.vnets["red"].nodes["r1"].guests.len(), 2);
}

#[test]
fn fixed_guest_count_keeps_guest_numbers() {
    let wish = Wish::of("red", 1);
    let with = |guests: u32, power: &str| {
        let plane = format!("guests: {guests}, power: {power}, ");
        wish.yaml().replace("power: 200m, ", &plane)
    };
    let one = apply(&Model::default(), format!("{SUBSTRATE}---{}", wish.yaml()));
    let guests = |model: &Model| {
        let guests = &model.plan.vnets["red"].nodes["r1"].guests;
        let share = |(number, guest): (&u32, &pdpd::plan::GuestPlan)| {
            (*number, guest.placement.power_millicores, guest.placement.engine.clone())
        };
        guests.iter().map(share).collect::<Vec<_>>()
    };
    assert_eq!(guests(&one), [(0, 200, "fe1".into())]);
    let three = apply(&one, with(3, "601m"));
    let on = |number, power, engine: &str| (number, power, engine.to_string());
    assert_eq!(
        guests(&three),
        [on(0, 201, "fe1"), on(1, 200, "fe2"), on(2, 200, "fe3")],
        "each on an engine of its own"
    );
    // The existing one is not changed.
    assert_eq!(differing(&one, &three), ["red/r1/g1", "red/r1/g2"]);
    let two = apply(&three, with(2, "400m"));
    assert_eq!(guests(&two), [on(0, 200, "fe1"), on(1, 200, "fe2")]);
    assert_eq!(differing(&three, &two), ["red/r1/g2"]);
    // More guests than engines.
    let five = apply(&two, with(5, "1"));
    assert_eq!(guests(&five).len(), 5);
    assert_eq!(differing(&two, &five).len(), 3);
    let changes = two.changes_from(&three, &BTreeSet::new(), false);
    assert_eq!(changes[1].action, ChangeAction::Change, "{changes:?}");
}

#[test]
fn rate_and_policy_changes_affect_only_the_mux() {
    let (red, blue) = (Wish::of("red", 1), Wish::of("blue", 2));
    let before = both(&red, &blue);
    let after = apply(&before, Wish { rate_mbps: 5, policy: "weighted", ..red }.yaml());
    assert_eq!(differing(&before, &after), [""; 0]);
    assert_ne!(before.plan.vnets["red"].mux, after.plan.vnets["red"].mux);
    assert_eq!(after.plan.vnets["red"].mux.vlinks[0].leaving[0].rate_bps, Some(5_000_000));
}

#[test]
fn vnets_with_equal_names_and_addresses_share_nothing() {
    let model = both(&Wish::of("red", 1), &Wish::of("blue", 2));
    let (red, blue) = (&model.plan.vnets["red"], &model.plan.vnets["blue"]);
    for (name, a) in &red.nodes {
        let b = &blue.nodes[name];
        assert_ne!(a.directory, b.directory);
        assert_ne!(a.control.cgroup, b.control.cgroup);
        assert_ne!(a.control.id, b.control.id);
        let end = |users: pdp_container::UserRange| users.base + users.length;
        let (a_users, b_users) = (a.control.users, b.control.users);
        assert!(end(a_users) <= b_users.base || end(b_users) <= a_users.base);
        for (a, b) in a.taps.iter().zip(&b.taps) {
            assert_ne!(a.mac, b.mac);
        }
        for guest in a.guests.values() {
            for bind in &guest.container.binds {
                let shared = Path::new("/usr/lib/pdp/pdp-router");
                assert!(bind.source.starts_with(&a.directory) || bind.source == shared);
            }
        }
    }
}

#[test]
fn xdp_program_selects_only_tunnel_frames() {
    let model = both(&Wish::of("red", 1), &Wish::of("blue", 2));
    let OutletPlan::Device(external) = &model.plan.externals["A"].outlet else {
        panic!("a device")
    };
    let takes: Vec<_> = external.selection.tunnels.iter().copied().collect();
    assert_eq!(takes, [Take::Udp { local: "192.0.2.1".parse().unwrap(), port: 4789 }]);
    assert!(!external.selection.all);
}

#[test]
fn memifs_and_generators_are_planned_without_devices() {
    let outlets = "M: {memif: {mtu: 1400, group: staff}}
    G: {generator: {pps: 5, count: 7, numberAt: 56, pcap: PCAP}}
    S: {generator: {}, capacity: 5Mbps}
    P: {device: extP, attach: packet}
    A:";
    // One frame of 68 bytes.
    let mut pcap = vec![0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0];
    pcap.extend([1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 68, 0, 0, 0, 68, 0, 0, 0]);
    pcap.extend([7; 68]);
    let pcap = Base64(pcap.into());
    let outlets = outlets.replace("PCAP", &pcap.to_string());
    let substrate = SUBSTRATE.replace("A:", &outlets);
    let model = apply(&Model::default(), format!("{substrate}---{}", Wish::of("red", 1).yaml()));
    let external = |name: &str| model.plan.externals[name].outlet.clone();
    let memif = MemifPlan {
        socket: "/run/pdp/externals/M/memif.sock".into(),
        mtu: 1400,
        group: Some("staff".into()),
    };
    assert_eq!(external("M"), OutletPlan::Memif(memif));
    let OutletPlan::Generator(generator) = external("G") else { panic!("a generator") };
    let config = mux::GeneratorConfig { pps: 5, frames: 7, number_at: Some(56) };
    assert_eq!((generator.config, generator.pcap), (config, Some(pcap)));
    let OutletPlan::Generator(sink) = external("S") else { panic!("a generator") };
    assert_eq!(sink.config, mux::GeneratorConfig { pps: 0, frames: 0, number_at: None });
    assert_ne!(sink.hash, generator.hash);
    let capacity_bps = |name: &str| model.plan.externals[name].capacity_bps;
    assert_eq!((capacity_bps("S"), capacity_bps("G")), (Some(5_000_000), None));
    let OutletPlan::Device(device) = external("P") else { panic!("a device") };
    assert_eq!(device.attach, DeviceAttach::Packet);
    // The same from the stored documents.
    let documents = model.change_from(&Model::default()).put;
    assert_eq!(
        Model::load(&places(), &cpus(), &documents, model.allocations.clone()).unwrap().plan,
        model.plan
    );
}

#[test]
fn runtime_guests_get_their_queue_size() {
    let red = Wish::of("red", 1).yaml().replace("power: 100m", "power: 100m, queue: 256");
    let model = apply(&Model::default(), format!("{SUBSTRATE}---{red}"));
    let queue = |node: &str| {
        model.plan.vnets["red"].nodes[node].guests[&0].container.env["PDP_QUEUE"].clone()
    };
    assert_eq!((queue("r1"), queue("r2")), ("1024".to_string(), "256".to_string()));
}

#[test]
fn open_files_limit_grows_with_vports() {
    let red = Wish::of("red", 1).yaml().replace("r2:eth0", "r1:eth2").replace(
        "eth1: {addresses: [10.0.2.1/24]}",
        "eth1: {addresses: [10.0.2.1/24]}\n        eth2: {}",
    );
    let model = apply(&Model::default(), format!("{SUBSTRATE}---{red}"));
    let guest = |node: &str| &model.plan.vnets["red"].nodes[node].guests[&0].container;
    assert_eq!(guest("r1").open_files_max, 64 + 3 * 8);
    assert_eq!(guest("r2").open_files_max, 64 + 2 * 8);
    assert!(!guest("r1").privileged);
}

#[test]
fn tenants_get_no_packet_rings() {
    let tenant = "apiVersion: pdp/v1\nkind: Tenant\nmetadata: {name: acme}\n\
                  spec: {interfaces: {A: {vxlan: \"2\"}}}\n";
    let wishes = [Wish::of("red", 1).yaml(), Wish::of("acme.red", 2).yaml()];
    let model = apply(
        &Model::default(),
        format!("{SUBSTRATE}---\n{tenant}---{}---{}", wishes[0], wishes[1]),
    );
    for (vnet, rings) in [("red", true), ("acme.red", false)] {
        let node = &model.plan.vnets[vnet].nodes["r1"];
        assert_eq!(node.control.packet_rings, rings, "{vnet}");
        assert!(!node.guests[&0].container.packet_rings);
    }
}

#[test]
fn label_change_is_reported_and_restarts_no_node() {
    let (red, blue) = (Wish::of("red", 1), Wish::of("blue", 2));
    let before = both(&red, &blue);
    let labelled = red.yaml().replacen(
        "      kind: router\n",
        "      kind: router\n      labels: {role: edge}\n",
        1,
    );
    assert_ne!(labelled, red.yaml());
    let after = apply(&before, labelled);
    assert!(Arc::ptr_eq(&before.plan.vnets["red"], &after.plan.vnets["red"]));
    let changes = after.changes_from(&before, &BTreeSet::from(["red".to_string()]), false);
    let details: Vec<_> = changes.iter().map(|c| (c.object.as_str(), c.detail.as_str())).collect();
    assert_eq!(details, [("vnet/red", ""), ("vnet/red/node/r1", "labels")]);
    assert_eq!(after.change_from(&before).put.len(), 1);
}

/// Every stored change is reported, even if nothing that runs depends on it.
#[test]
fn stored_change_is_reported_without_running_effect() {
    let (red, blue) = (Wish::of("red", 1), Wish::of("blue", 2));
    let before = both(&red, &blue);
    let named = BTreeSet::from(["red".to_string()]);
    let changes_of = |text: String| {
        let after = apply(&before, text);
        assert!(Arc::ptr_eq(&before.plan.vnets["red"], &after.plan.vnets["red"]));
        assert_eq!(after.change_from(&before).put.len(), 1);
        let changes = after.changes_from(&before, &named, false);
        changes.into_iter().map(|c| (c.object, c.action, c.detail)).collect::<Vec<_>>()
    };
    let one = |detail: &str| vec![("vnet/red".to_owned(), ChangeAction::Change, detail.to_owned())];
    let labels = red.yaml().replacen("{name: red", "{name: red, labels: {owner: two}", 1);
    assert_eq!(changes_of(labels), one("labels"));
    let anycast = red.yaml().replacen("eth0: {", "eth0: {anycast: true, ", 1);
    assert_ne!(anycast, red.yaml());
    assert_eq!(changes_of(anycast), one("stored spec"));
    let again = apply(&before, red.yaml()).changes_from(&before, &named, false);
    assert_eq!(again.len(), 1);
    assert_eq!(again[0].action, ChangeAction::Unchanged);
}

/// The changes of `down` and `up`: nothing is deleted, and nothing is new.
#[test]
fn down_and_up_report_stops_and_starts() {
    let up = both(&Wish::of("red", 1), &Wish::of("blue", 2));
    let mut down = up.clone();
    down.allocations.stopped = true;
    let changes_of = |before: &Model, after: &Model| {
        let changes = after.changes_from(before, &BTreeSet::new(), false);
        changes.into_iter().map(|change| (change.object, change.action)).collect::<Vec<_>>()
    };
    let both = |action| ["vnet/blue", "vnet/red"].map(|vnet| (vnet.to_owned(), action));
    assert_eq!(changes_of(&up, &down), both(ChangeAction::Stop));
    assert_eq!(changes_of(&down, &up), both(ChangeAction::Start));
    assert_eq!(changes_of(&Model::default(), &up)[1..], both(ChangeAction::Create));
    let gone = up.without("red", &places(), &cpus()).unwrap();
    assert_eq!(changes_of(&up, &gone), [("vnet/red".to_owned(), ChangeAction::Delete)]);
}

#[test]
fn applying_the_same_spec_twice_changes_nothing() {
    let (red, blue) = (Wish::of("red", 1), Wish::of("blue", 2));
    let once = both(&red, &blue);
    let twice = apply(&once, red.yaml());
    assert_eq!(once, twice);
    let named = BTreeSet::from(["red".to_string()]);
    let changes = twice.changes_from(&once, &named, false);
    assert_eq!(changes.len(), 1);
    assert_eq!(changes[0].action, ChangeAction::Unchanged);
    assert!(twice.change_from(&once).put.is_empty());
}

#[test]
fn deleted_vnet_frees_its_number_once_removed() {
    let (red, blue) = (Wish::of("red", 1), Wish::of("blue", 2));
    let model = both(&red, &blue);
    let without = model.without("red", &places(), &cpus()).unwrap();
    assert_eq!(without.plan.vnets.keys().collect::<Vec<_>>(), ["blue"]);
    assert_eq!(without.plan.vnets["blue"], model.plan.vnets["blue"]);
    assert!(without.allocations.vnets["red"].guests.is_empty());
    let change = without.change_from(&model);
    assert_eq!(change.delete, [("VirtualNetwork".to_string(), "red".to_string())]);
    // While parts of it exist, its number is its own.
    let green = Wish::of("green", 3);
    let beside = apply_beside(&without, green.yaml(), &["red"]);
    let number = |model: &Model, vnet: &str| model.allocations.number_of(vnet);
    let all = ["blue", "red"].map(|vnet| number(&model, vnet));
    assert!(!all.contains(&number(&beside, "green")));
    assert_eq!(number(&beside, "red"), number(&model, "red"));
    let again = apply_beside(&without, red.yaml(), &["red"]);
    assert_eq!(again.plan, model.plan);
    // Afterwards the number is free.
    let after = apply(&without, green.yaml());
    assert_eq!(number(&after, "red"), None);
    assert_eq!(number(&after, "green"), number(&model, "red"));
}

#[test]
fn stored_documents_load_to_the_same_plan() {
    let model = both(&Wish::of("red", 1), &Wish::of("blue", 2));
    let documents = model.change_from(&Model::default()).put;
    let loaded = Model::load(&places(), &cpus(), &documents, model.allocations.clone()).unwrap();
    assert_eq!(loaded, model);
}

#[test]
fn down_link_removes_carrier_at_both_ends() {
    let mut model = both(&Wish::of("red", 1), &Wish::of("blue", 2));
    let carrier = |vnet: &VnetPlan, node: &str, port| {
        vnet.link_of(node, port).is_some_and(|link| vnet.has_carrier(link, 0))
    };
    assert!(carrier(&model.plan.vnets["red"], "r1", 0));
    let before = model.clone();
    model.allocations.set_link("red", "link1", false, false);
    model.replan(&before, ["red"], &places(), &cpus()).unwrap();
    let red = &model.plan.vnets["red"];
    assert!(!carrier(red, "r1", 0) && !carrier(red, "h1", 0) && carrier(red, "r1", 1));
    assert!(!red.mux.vlinks[0].up && red.mux.vlinks[1].up);
    assert!(carrier(&model.plan.vnets["blue"], "r1", 0));

    // Silently: the link is down as well.
    let before = model.clone();
    model.allocations.set_link("red", "link1", false, true);
    model.replan(&before, ["red"], &places(), &cpus()).unwrap();
    let red = &model.plan.vnets["red"];
    assert!(carrier(red, "r1", 0) && carrier(red, "h1", 0) && !red.mux.vlinks[0].up);
    let changed = model.plan.changed_from(&before.plan);
    assert!(
        changed.contains(&ObjectKey::node("red", "r1"))
            && changed.contains(&ObjectKey::node("red", "h1"))
    );
    let before = model.clone();
    model.allocations.set_link("red", "link1", false, false);
    model.replan(&before, ["red"], &places(), &cpus()).unwrap();

    // It stays down through other changes, whatever its position in the
    // file, until its ends or its vnet are removed.
    let wish = Wish::of("red", 1);
    let first = "    - {endpoints: [\"r1:eth0\", \"h1:eth0\"], rate: 100Mbps}\n";
    let without = wish.yaml().replace(first, "");
    let moved = apply(&model, without.clone() + first);
    let red = &moved.plan.vnets["red"];
    let up: Vec<_> = red.mux.vlinks.iter().map(|link| (&*link.name, link.up)).collect();
    assert_eq!(up, [("link1", true), ("link2", true), ("link3", false)]);
    assert!(!carrier(&apply(&moved, wish.yaml()).plan.vnets["red"], "h1", 0));
    assert!(apply(&model, without).allocations.vnets["red"].links_down.is_empty());
    let wish = Wish { power_millicores: 300, ..Wish::of("red", 1) };
    let changed = apply(&model, wish.yaml());
    assert!(!carrier(&changed.plan.vnets["red"], "h1", 0));
    let again = apply(&changed.without("red", &places(), &cpus()).unwrap(), wish.yaml());
    assert!(carrier(&again.plan.vnets["red"], "h1", 0));
}

#[test]
fn cpu_weights_follow_power_and_allow_borrowing() {
    let blue = Wish { power_millicores: 50, ..Wish::of("blue", 2) };
    let model = both(&Wish::of("red", 1), &blue);
    // Two routers each: 200 and 100, 50 and 100.
    let weight = |vnet: &str| model.plan.vnets[vnet].weight;
    assert_eq!((model.plan.weight, weight("blue"), weight("red")), (450, 150, 300));
    // Relative to the mux, all vnets together have the engines' capacity.
    assert_eq!(model.plan.weight_together(), 3000);
    let without_red = model.without("red", &places(), &cpus()).unwrap();
    assert_eq!(without_red.plan.weight, 150);
    assert_eq!(Plan::default().weight, 0);
    assert_eq!(model.plan.mux.as_ref().unwrap().limits.cpu_weight, Some(500));
    let limits =
        |model: &Model| model.plan.vnets["red"].nodes["r1"].guests[&0].container.limits.clone();
    let had = limits(&model);
    assert_eq!((had.cpu_cores, had.cpu_weight), (Some(0.2), Some(200)));

    let lends = Wish::of("red", 1).yaml().replace("{power: 200m", "{borrow: true, power: 200m");
    let lent = apply(&model, lends);
    assert_eq!(limits(&lent), Limits { cpu_cores: None, ..had });
    assert_eq!(hashes(&lent.plan), hashes(&model.plan), "nothing starts anew");
}

#[test]
fn guest_without_power_borrows_with_minimal_weight() {
    let (red, blue) = (Wish::of("red", 1), Wish::of("blue", 2));
    let model = both(&red, &blue);
    let bare = |wish: &Wish| {
        let named = wish.yaml().replace("power: 200m, ", "");
        named.replace("      dataPlane: {power: 100m}\n", "")
    };
    let lent = apply(&model, bare(&red));
    assert_eq!(hashes(&lent.plan), hashes(&model.plan), "nothing starts anew");
    for node in ["r1", "r2"] {
        let guest = &lent.plan.vnets["red"].nodes[node].guests[&0];
        assert_eq!(guest.placement.power_millicores, 0);
        let limits = &guest.container.limits;
        // Within its own network it competes with the control guests as with the default power.
        assert_eq!((limits.cpu_cores, limits.cpu_weight), (None, Some(100)));
    }
    let weight = |model: &Model, vnet: &str| model.plan.vnets[vnet].weight;
    assert_eq!((weight(&lent, "red"), weight(&lent, "blue"), lent.plan.weight), (2, 300, 302));
    // The same for a vnet with hosts only, whatever these may use.
    let hosts = "
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: hosts}
spec: {nodes: {h1: {kind: host}, h2: {kind: host, resources: {cpu: 4}}}}
";
    assert_eq!(weight(&apply(&lent, hosts.into()), "hosts"), 2);
    // A vnet that requests a guarantee again gets it, at the same place.
    let again = apply(&lent, red.yaml());
    assert_eq!((&again.plan, again.allocations), (&model.plan, model.allocations));
}

/// A fast path's power becomes a share of its worker in the mux. Changing it
/// restarts nothing, and it does not count relative to the engines' guests.
#[test]
fn fast_path_power_is_a_worker_share() {
    let plane = |plane: &str| {
        format!(
            "
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: fast}}
spec: {{nodes: {{r1: {{kind: router, dataPlane: {plane}}}}}}}
"
        )
    };
    let part = |model: &Model| {
        let nodes = &model.plan.vnets["fast"].mux.nodes;
        nodes[0].router.as_ref().unwrap().engine.as_ref().unwrap().power
    };
    let before = apply(
        &Model::default(),
        format!("{SUBSTRATE}---{}", plane("{kind: fastpath, power: 0.1}")),
    );
    // The mux has half a core.
    assert_eq!((part(&before), before.plan.vnets["fast"].weight), (200_000, 2));
    let change = |before: &Model, text: String| {
        let after = apply(before, text);
        assert_eq!(hashes(&after.plan), hashes(&before.plan), "nothing starts anew");
        let changes = after.changes_from(before, &BTreeSet::new(), false);
        let node_change = changes.iter().find(|it| it.object == "vnet/fast/node/r1").unwrap();
        (part(&after), node_change.detail.clone(), after)
    };
    let (more, detail, after) = change(&before, plane("{kind: fastpath, power: 0.15}"));
    assert_eq!((more, &*detail), (300_000, "the mux's part: 100 millicores to 150 millicores"));
    let (none, detail, _) = change(&after, plane("{kind: fastpath}"));
    assert_eq!((none, &*detail), (0, "the mux's part: 150 millicores to borrowed power"));
    // Each of two workers has a quarter of a core.
    let workers = SUBSTRATE.replace("cpus: \"0\", power", "cpus: \"0\", workers: 2, power");
    let (half, detail, _) = change(&before, workers);
    assert_eq!((half, &*detail), (400_000, "the mux's part: 100 millicores to 100 millicores"));
}

/// A spec that an older version stored has both keys, and keeps their
/// meaning: guaranteed, and a limit.
#[test]
fn specs_of_older_versions_keep_their_power() {
    let wish = Wish::of("red", 1);
    let model = both(&wish, &Wish::of("blue", 2));
    let stored = wish.yaml().replace("{power: 100m}", "{power: 100m, borrow: false}");
    let plane = &apply(&model, stored).plan.vnets["red"].nodes["r2"].guests[&0];
    assert_eq!(plane.container.limits.cpu_cores, Some(0.1));
    assert_eq!(plane.placement.power_millicores, 100);
}

#[test]
fn a_run_directory_too_long_for_sockets_is_refused() {
    let model = both(&Wish::of("red", 1), &Wish::of("blue", 2));
    let mut places = places();
    places.run = format!("/{}", "x".repeat(100)).into();
    let documents = model.change_from(&Model::default()).put;
    let refused = Model::load(&places, &cpus(), &documents, model.allocations).unwrap_err();
    assert!(refused.to_string().contains("107 at most"), "{refused}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn plan_depends_only_on_its_input(
        powers in proptest::collection::vec((10u32..1500, any::<bool>()), 1..6),
    ) {
        let (mut red, mut blue) = (Wish::of("red", 1), Wish::of("blue", 2));
        let mut model = both(&red, &blue);
        for (power, which) in powers {
            let wish = if which { &mut red } else { &mut blue };
            let (other, before) = (if which { "blue" } else { "red" }, model.clone());
            wish.power_millicores = power;
            let file = SourceFile { name: "t".into(), text: wish.yaml(), ..Default::default() };
            let documents = pdp_spec::parse(&[file]).unwrap();
            let Ok(intent) = pdp_spec::check(&documents, &before.existing(&cpus(), false)) else {
                continue;
            };
            model = before.with(intent.clone(), &places(), &cpus(), |_| false).unwrap();
            prop_assert_eq!(&before.with(intent, &places(), &cpus(), |_| false).unwrap(), &model);
            prop_assert_eq!(&before.plan.vnets[other], &model.plan.vnets[other]);
            // A guest that stays on its engine keeps its number.
            let guests = |model: &Model| model.allocations.vnets[wish.name].guests["r1"].clone();
            let now = guests(&model);
            for (number, old) in &guests(&before) {
                let stayed = now.iter().find(|(_, new)| new.engine == old.engine);
                if let Some((now, _)) = stayed {
                    prop_assert_eq!(number, now);
                }
            }
        }
    }
}

#[test]
fn dotted_vnet_names_cause_no_id_collisions() {
    // `a.b` with a node `mirror` would have the id of the mirror of `a`'s node
    // `b`, and `cpu.max` would be a cgroup with the name of a kernel file.
    let tenant = |name: &str| {
        format!("{{apiVersion: pdp/v1, kind: Tenant, metadata: {{name: {name}}}, spec: {{}}}}\n---")
    };
    let vnet = |name: &str, nodes: &[&str]| {
        let nodes: Vec<String> = nodes
            .iter()
            .map(|node| format!("{node}: {{kind: router, dataPlane: {{power: 10m}}}}"))
            .collect();
        let nodes = nodes.join(", ");
        format!(
            "{{apiVersion: pdp/v1, kind: VirtualNetwork, metadata: {{name: {name}}}, spec: {{nodes: {{{nodes}}}}}}}\n---\n"
        )
    };
    let text = [
        SUBSTRATE.to_owned(),
        "---\n".into(),
        tenant("a") + "\n",
        tenant("cpu") + "\n",
        vnet("a", &["b"]),
        vnet("a.b", &["mirror", "g0", "tap"]),
        vnet("cpu.max", &["r1"]),
    ];
    let file =
        SourceFile::read("f", text.concat().trim_end_matches("---\n"), |_, _| Err("".into()));
    let documents = pdp_spec::parse(&[file]).unwrap();
    let existing = Model::default().existing(&cpus(), true);
    let intent = pdp_spec::check(&documents, &existing).unwrap();
    let plan = Model::default().with(intent, &places(), &cpus(), |_| false).unwrap().plan;
    let mut ids = BTreeSet::new();
    let mut cgroups = BTreeSet::new();
    for node in plan.vnets.values().flat_map(|vnet| vnet.nodes.values()) {
        let helpers = node.tap_helper.iter().map(|helper| &helper.process.id);
        let helpers = helpers.chain(node.mirror.iter().map(|mirror| &mirror.process.id));
        let guests = node.guests.values().map(|guest| &guest.container);
        for container in guests.chain([&node.control]) {
            assert!(ids.insert(container.id.clone()), "{} twice", container.id);
            assert!(cgroups.insert(container.cgroup.clone()), "{} twice", container.cgroup);
        }
        for id in helpers {
            assert!(ids.insert(id.clone()), "{id} twice");
        }
    }
    assert!(
        cgroups.iter().all(|path| path.split('/').nth(1).is_some_and(|vnet| !vnet.contains('.')))
    );
}

/// A vnet with one router and one host of these sizes.
fn sized(
    (power, guests): (u32, u32),
    (memory_mib, routes): (u64, u32),
    (attach, count): (&str, usize),
    host_ports: usize,
) -> String {
    let ports = |count: usize| (0..count).map(|n| format!("e{n}: {{}}, ")).collect::<String>();
    let program = match attach {
        "router" => "router".to_owned(),
        attach => format!("{{run: x, attach: {attach}}}"),
    };
    format!(
        r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: acme.red}}
spec:
  nodes:
    r1:
      kind: router
      interfaces: {{{}}}
      resources: {{memory: {memory_mib}Mi, processes: 77, routes: {routes}}}
      dataPlane: {{power: {power}m, guests: {guests}, memory: 64Mi, processes: 5, program: {program}}}
    h1:
      kind: host
      interfaces: {{{}}}
      resources: {{memory: {memory_mib}Mi, routes: {routes}}}
"#,
        ports(count),
        ports(host_ports)
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// For all specs: the limits in the plan, and its allocations, are what a quota counts.
    #[test]
    fn planned_limits_equal_the_counted_quota(
        (power, guests) in (1u32..900, 1u32..12),
        (memory_mib, routes) in (4u64..4096, 1u32..=16_000_000),
        attach in proptest::sample::select(vec!["router", "runtime", "memif", "tap"]),
        (ports, host_ports) in (0usize..6, 0usize..3),
    ) {
        let text = sized((power, guests), (memory_mib, routes), (attach, ports), host_ports);
        let file = SourceFile { text: format!("{SUBSTRATE}---{TENANT}---{text}"), ..Default::default() };
        let documents = pdp_spec::parse(&[file]).unwrap();
        let existing = Model::default().existing(&cpus(), true);
        let intent = pdp_spec::check(&documents, &existing);
        let intent = intent.unwrap_or_else(|faults| panic!("{faults:#?}"));
        let counted = intent.vnets["acme.red"].usage();
        let model = Model::default().with(intent, &places(), &cpus(), |_| false).unwrap();
        let (mut memory, mut processes, mut power_set, mut logs) = (0, 0, 0, 0);
        let (mut descriptors, mut vports) = (0u64, 0u64);
        let mut logged = |bytes: u64| {
            logs += 2 * bytes;
            descriptors += 1;
        };
        for node in model.plan.vnets["acme.red"].nodes.values() {
            memory += node.control.limits.memory_bytes.unwrap();
            processes += node.control.limits.processes.unwrap();
            vports += node.taps.len() as u64;
            logged(node.control.log_bytes_max);
            node.tap_helper.iter().for_each(|helper| logged(helper.process.log_bytes_max));
            if let Some(mirror) = &node.mirror {
                logged(mirror.process.log_bytes_max);
                // The kernel allocates twice as much, and charges it to nobody.
                memory += 2 * mirror.config.receive_bytes;
            }
            for guest in node.guests.values() {
                memory += guest.container.limits.memory_bytes.unwrap();
                processes += guest.container.limits.processes.unwrap();
                power_set += u64::from(guest.placement.power_millicores);
                logged(guest.container.log_bytes_max);
                guest.taps.iter().for_each(|(_, helper)| logged(helper.process.log_bytes_max));
            }
        }
        // Allowance in the run directory for each, and a little text.
        let nodes = model.plan.vnets["acme.red"].nodes.values();
        let made: u64 = nodes.map(|node| 1 + node.guests.len() as u64).sum();
        let run = counted.memory_bytes - memory;
        prop_assert!((made * RUN_BYTES..made * (RUN_BYTES + 8192)).contains(&run), "{run} of {made}");
        prop_assert_eq!(counted.processes, processes);
        prop_assert_eq!(counted.power_millicores, power_set);
        prop_assert!(counted.power_millicores >= u64::from(power.max(guests)));
        prop_assert_eq!(counted.log_bytes, logs);
        prop_assert_eq!(counted.descriptors, descriptors + vports);
    }
}

/// The paths at which specs may put files are those that guests may write.
#[test]
fn spec_file_paths_equal_guest_writable_paths() {
    for (image, known) in [(false, &FILE_DIRECTORIES[..]), (true, &FILE_DIRECTORIES_IMAGE[..])] {
        let known: BTreeSet<&str> = known.iter().copied().collect();
        for profile in [Profile::Control, Profile::Host] {
            assert_eq!(profile.writable_directories(image).collect::<BTreeSet<_>>(), known);
        }
    }
}

/// Three vrouters in a row with a host at each end. `link` has the
/// settings of the link between the last two.
fn row_of_kernels(link: &str) -> String {
    format!(
        r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: row}}
spec:
  kinds: {{router: {{dataPlane: {{kind: kernel}}}}}}
  nodes:
    h1: {{kind: host, interfaces: {{eth0: {{}}}}}}
    r1: {{kind: router, interfaces: {{eth0: {{}}, eth1: {{}}}}}}
    r2: {{kind: router, interfaces: {{eth0: {{}}, eth1: {{}}}}}}
    r3: {{kind: router, interfaces: {{eth0: {{}}, eth1: {{}}}}}}
  links:
    - {{endpoints: ["h1:eth0", "r1:eth0"]}}
    - {{endpoints: ["r1:eth1", "r2:eth0"]}}
    - {{endpoints: ["r2:eth1", "r3:eth0"]{link}}}
"#
    )
}

/// Returns the ports that stay in the kernel, with their numbers and the numbers of their targets.
fn kernel_links(model: &Model) -> Vec<(String, u16, u32, u32)> {
    let nodes = model.plan.vnets["row"].nodes.iter();
    let ports = nodes.flat_map(|(name, node)| {
        let ports = node.kernel_links.iter();
        ports.filter_map(|(&vport, port)| match port.to {
            KernelLinkTarget::Port(to) => Some((name.clone(), vport, port.spec.number, to)),
            KernelLinkTarget::Outside(_) => None,
        })
    });
    ports.collect()
}

#[test]
fn kernel_links_bypass_the_mux_unless_delayed() {
    let before = apply(&apply(&Model::default(), SUBSTRATE.into()), row_of_kernels(""));
    let ports = kernel_links(&before);
    let named = |ports: &[(String, u16, u32, u32)]| -> Vec<(String, u16)> {
        ports.iter().map(|(node, vport, ..)| (node.clone(), *vport)).collect()
    };
    let first = [("r1".to_owned(), 1), ("r2".to_owned(), 0)];
    let last = [("r2".to_owned(), 1), ("r3".to_owned(), 0)];
    assert_eq!(named(&ports), [&first[..], &last[..]].concat());
    // Each leads to the other end of its link, and has its own number.
    for (node, vport, number, to) in &ports {
        let peer = ports.iter().find(|(.., peer, _)| peer == to).expect("the far end");
        assert_eq!((peer.3, peer.0 != *node), (*number, true), "{node} {vport}");
    }
    // Reasons for the others.
    let path = |model: &Model, vnet: &str, link: usize| model.plan.vnets[vnet].paths[link].clone();
    let mux = |why: &str| LinkPath::Mux(Some(why.to_owned()));
    let paths = [0, 1, 2].map(|link| path(&before, "row", link));
    assert_eq!(paths, [mux("h1 is a host"), LinkPath::Kernel, LinkPath::Kernel]);
    for (others, why) in [
        ("dataPlane: {kind: fastpath}", "r2 is a router of kind fastpath"),
        ("dataPlane: {kind: parallel, power: 0.1}", "r2 is a router of kind parallel"),
    ] {
        let r2 = "r2: {kind: router";
        let text = row_of_kernels("").replace(r2, &format!("{r2}, {others}"));
        assert_eq!(path(&apply(&before, text), "row", 1), mux(why));
    }
    let hosts = row_of_kernels("").replace("{kind: router,", "{kind: host,");
    let hosts = apply(&before, hosts);
    assert_eq!(path(&hosts, "row", 1), LinkPath::Mux(None), "no end is the kernel's");
    // The TAP helper has the remaining ports, with the vports' numbers.
    let taps = |node: &str| -> Vec<u16> {
        let helper = before.plan.vnets["row"].nodes[node].tap_helper.as_ref();
        helper.map_or(vec![], |helper| helper.ports.iter().map(|port| port.vport).collect())
    };
    assert_eq!([taps("r1"), taps("r2"), taps("r3")], [vec![0], vec![], vec![1]]);
    // The machine's neighbour tables have room for the needs of the three kernels.
    assert!(
        (3 * 16_384..4 * 16_384).contains(&before.plan.neighbours),
        "{}",
        before.plan.neighbours
    );
    // A tenant gets none if the kernel's work there is charged to nobody.
    let tenants = apply(&before, TENANT.to_owned());
    let tenants = apply(&tenants, row_of_kernels("").replace("name: row", "name: acme.row"));
    let straight_of = |vnet: &str| {
        let nodes = tenants.plan.vnets[vnet].nodes.values();
        nodes.map(|node| node.kernel_links.len()).sum::<usize>()
    };
    let has_ids = pdp_net::napi::has_thread_ids();
    let of_tenant = if has_ids { 4 } else { 0 };
    assert_eq!((straight_of("row"), straight_of("acme.row")), (4, of_tenant));
    let paths = [0, 1].map(|link| path(&tenants, "acme.row", link));
    let second = if has_ids { LinkPath::Kernel } else { mux("the network is a tenant's") };
    assert_eq!(paths, [mux("h1 is a host"), second]);
    // The queue has the default size of this version, or of earlier ones, which stored specs have.
    for more in ["rate: 5Mbps", "burst: 9000", "seed: 5", "queue: 256", "queue: 1000"] {
        let after = apply(&before, row_of_kernels(&format!(", {more}")));
        assert_eq!(kernel_links(&after), ports, "{more}");
    }
    for (more, why) in [
        ("delay: 1ms", "it has a delay"),
        ("queue: 9", "it has a queue"),
        ("loss: 1%", "it has loss"),
        ("queues: [{name: a}]", "it has queues"),
        ("weight: 2", "it has a weight"),
        ("schedule: [{at: 5s, rate: 1Mbps}]", "it has a schedule"),
    ] {
        let after = apply(&before, row_of_kernels(&format!(", rate: 5Mbps, {more}")));
        assert_eq!(kernel_links(&after), ports[..2], "{more}");
        assert_eq!(path(&after, "row", 2), mux(why));
    }
}

/// Power of the kernel is a share of an engine, enforced by a cgroup
/// alone. Changing it restarts nothing.
#[test]
fn kernel_power_is_a_share_of_an_engine() {
    let row = |keys: &str| {
        row_of_kernels("").replace("{kind: kernel}", &format!("{{kind: kernel{keys}}}"))
    };
    let before = apply(&apply(&Model::default(), SUBSTRATE.into()), row(""));
    let of = |model: &Model| model.plan.vnets["row"].nodes["r2"].clone();
    let kernel = |model: &Model| of(model).kernel.expect("a kernel's part");
    let lent = kernel(&before);
    assert!(lent.borrows && lent.placement.power_millicores == 0 && lent.xdp_bypass, "{lent:?}");
    assert_eq!(lent.limits.cpu_cores, None);

    let after = apply(&before, row(", power: 0.02, kernelHooks: strict"));
    let given = kernel(&after);
    assert!(!given.borrows && !given.xdp_bypass, "{given:?}");
    assert_eq!((given.limits.cpu_cores, given.limits.cpu_weight), (Some(0.02), Some(20)));
    assert_eq!(given.cgroup, lent.cgroup);
    assert_eq!(of(&before).hash, of(&after).hash, "nothing is begun anew");
    assert!(
        after.plan.changed_from(&before.plan).contains(&ObjectKey::node("row", "r2")),
        "it is seen to"
    );
    assert_eq!(after.plan.vnets["row"].weight, 60);
    let changes = after.changes_from(&before, &["row".to_owned()].into(), false);
    let words = format!("{changes:?}");
    assert!(words.contains("the kernel's part: borrowed power to 20 millicores"), "{words}");
    let follows = apply(&after, row(", power: 0.02"));
    let changes = follows.changes_from(&after, &["row".to_owned()].into(), false);
    let words = format!("{changes:?}");
    assert!(words.contains("kernelHooks") && !words.contains("the kernel's part"), "{words}");

    // The TAP helper's needs are in the same cgroup. Without a
    // forwarding kernel they are in the node's.
    let helper = |model: &Model, node: &str| {
        model.plan.vnets["row"].nodes[node]
            .tap_helper
            .as_ref()
            .expect("a helper")
            .process
            .cgroup
            .clone()
    };
    let own = after.plan.vnets["row"].nodes["r1"].kernel.as_ref().expect("its part").cgroup.clone();
    assert_eq!(helper(&after, "r1"), format!("{own}/helpers"));
    assert!(!helper(&after, "h1").contains(".kernel"));
    // With another data plane it has none.
    let other = apply(&after, row_of_kernels("").replace("kind: kernel", "kind: fastpath"));
    assert!(of(&other).kernel.is_none());
}

/// Only the changed parts of a share are reported, for guests and kernels alike.
#[test]
fn share_changes_are_reported_individually() {
    let row = |keys: &str| {
        let kernel = format!("{{kind: kernel, power: 0.2{keys}}}");
        let guest = format!("r2: {{kind: router, dataPlane: {{kind: parallel, power: 0.2{keys}}},");
        row_of_kernels("").replace("{kind: kernel}", &kernel).replace("r2: {kind: router,", &guest)
    };
    let first = apply(&apply(&Model::default(), SUBSTRATE.into()), row(""));
    let changes_of = |before: &Model, text: String| {
        let after = apply(before, text);
        let changes = after.changes_from(before, &BTreeSet::new(), false);
        let of = |node: &str| {
            let object = format!("vnet/row/node/{node}");
            changes.iter().find(|it| it.object == object).expect("a change").detail.clone()
        };
        let words = of("r1");
        let words = words.strip_prefix("the kernel's part: ").expect("the kernel's").to_owned();
        assert_eq!(of("r2"), format!("guest 0: {words}"));
        (words, after)
    };
    let (words, lent) = changes_of(&first, row(", borrow: true"));
    assert_eq!(words, "may borrow now");
    assert_eq!(changes_of(&lent, row("")).0, "may not borrow any more");
    assert_eq!(
        changes_of(&first, row("").replace("0.2", "0.3")).0,
        "200 millicores to 300 millicores"
    );
    let (words, none) = changes_of(&lent, row(", borrow: true").replace("power: 0.2, ", ""));
    assert_eq!(words, "200 millicores to borrowed power");
    assert_eq!(changes_of(&none, row("")).0, "borrowed power to 200 millicores");
    let one = |engine: &str, cpus: u32| {
        let (before, _) = SUBSTRATE.split_once("    fe1:").expect("engines");
        format!("{before}    {engine}: {{cpus: \"{cpus}\", capacity: 1}}\n---{}", row(""))
    };
    let first = apply(&Model::default(), one("fe1", 1));
    assert_eq!(changes_of(&first, one("fe1", 2)).0, "CPUs of engine fe1");
    assert_eq!(changes_of(&first, one("fe2", 1)).0, "engine fe1 to fe2");
}

/// A vrouter with a tunnel to the outside, and a link to another
/// vrouter of kind `plane`. `more` has settings of the vnet.
fn kernel_to_outside(by: &str, link: &str, plane: &str, more: &str) -> String {
    format!(
        r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: row}}
spec:
  {more}
  nodes:
    r1: {{kind: router, dataPlane: {{kind: kernel}}, interfaces: {{eth0: {{}}, eth1: {{}}}}}}
    r2: {{kind: router, dataPlane: {{{plane}}}, interfaces: {{eth0: {{}}}}}}
  externals:
    out: {{interface: A, {by}}}
  links:
    - {{endpoints: ["r1:eth0", "r2:eth0"]}}
    - {{endpoints: ["r1:eth1", "external:out"]{link}}}
"#
    )
}

#[test]
fn external_links_bypass_the_mux_unless_delayed() {
    let vxlan = "vxlan: {vni: 7, local: 192.0.2.1, remote: 192.0.2.2}";
    let plain = || kernel_to_outside(vxlan, "", "power: 0.1", "");
    let mut before = apply(&apply(&Model::default(), SUBSTRATE.into()), plain());
    let tunnels = |model: &Model| -> Vec<(u16, KernelTunnel)> {
        let ports = model.plan.vnets["row"].nodes["r1"].kernel_links.iter();
        let outside = ports.filter_map(|(&vport, port)| match &port.to {
            KernelLinkTarget::Outside(tunnel) => Some((vport, tunnel.clone())),
            KernelLinkTarget::Port(_) => None,
        });
        outside.collect()
    };
    // The capabilities of a missing device are unknown.
    assert_eq!(tunnels(&before), []);
    let vnet = &before.plan.vnets["row"];
    assert_eq!((vnet.mux_config(), &vnet.kernel_tunnels), (vnet.mux.clone(), &BTreeSet::new()));
    // If the device was capable before, the link stays.
    let mut allocation =
        pdpd::plan::allocations::VnetAllocation::clone(&before.allocations.vnets["row"]);
    allocation.ports = [("r1".into(), [("eth1".into(), 5)].into())].into();
    before.allocations.set("row", Some(allocation.clone()));
    let with = |by: &str, link: &str, plane: &str, more: &str| {
        // Different from before, so that it is planned again.
        let text =
            kernel_to_outside(by, link, plane, more).replace("r1: {", "r1: {labels: {a: b}, ");
        apply(&before, text)
    };
    let after = with(vxlan, "", "power: 0.1", "");
    let Ok([(1, KernelTunnel { interface, device, by, limit: None })]) =
        <[(u16, KernelTunnel); 1]>::try_from(tunnels(&after))
    else {
        panic!("{:?}", tunnels(&after));
    };
    assert_eq!((&*interface, &*device), ("A", "extA"));
    assert!(matches!(by, pdp_wire::tunnel::Encapsulation::Vxlan(tunnel) if tunnel.vni == 7));
    // The mux takes no part in it, but the program at the device does.
    let vnet = &after.plan.vnets["row"];
    let config = vnet.mux_config();
    assert_eq!((config.vlinks.len(), vnet.mux.vlinks.len()), (1, 2));
    assert_eq!(config.vlinks.iter().flat_map(mux::Vlink::interfaces).count(), 0);
    let takes = &after.plan.externals["A"].device_plan().expect("a device").selection;
    assert!(takes.ports && takes.tunnels.len() == 1);
    let changed = after.plan.changed_from(&before.plan);
    assert!(
        changed.contains(&ObjectKey::external("A"))
            && changed.contains(&ObjectKey::node("row", "r1"))
    );
    let helper = vnet.nodes["r1"].tap_helper.as_ref().expect("it has a TAP, too");
    assert_eq!(helper.ports.iter().map(|port| port.vport).collect::<Vec<_>>(), [0]);

    let udp = "udp: {localPort: 5, remotePort: 6, local: 192.0.2.1, remote: 192.0.2.2}";
    let gre = "gre: {local: 192.0.2.1, remote: 192.0.2.2}";
    let count = |by, link, plane, more| tunnels(&with(by, link, plane, more)).len();
    let power = "power: 0.1";
    for (by, link, stay) in [
        (udp, "", 1),
        (vxlan, ", rate: 5Mbps, burst: 9000", 1),
        (gre, "", 0),
        ("vlan: {id: 5}", "", 0),
        (vxlan, ", rate: 5Mbps, queue: 9", 0),
        (vxlan, ", delay: 1ms", 0),
        (vxlan, ", weight: 2", 0),
    ] {
        assert_eq!(count(by, link, power, ""), stay, "{by}{link}");
    }
    // One place limits the ingress of a whole vnet.
    let police = "police: {rate: 5Mbps, pps: 1000}";
    assert_eq!(count(vxlan, "", power, police), 0, "a link by the mux");
    allocation.ports = [("r1", "eth0", 6), ("r1", "eth1", 5), ("r2", "eth0", 7)].into_iter().fold(
        BTreeMap::new(),
        |mut all: BTreeMap<String, BTreeMap<String, u32>>, (node, interface, number)| {
            all.entry(node.into()).or_default().insert(interface.into(), number);
            all
        },
    );
    before.allocations.set("row", Some(allocation.clone()));
    let text = kernel_to_outside(vxlan, "", "kind: kernel", police);
    let limited = tunnels(&apply(&before, text));
    let rate = pdp_net::ports::PortRate { bps: 5_000_000, pps: 1000, ..Default::default() };
    assert_eq!(limited[0].1.limit, Some((allocation.number, rate)));
    // Not over devices that queue frames, or that do not use XDP.
    for more in ["attach: packet", "capacity: 1Gbps"] {
        let substrate = SUBSTRATE.replace("device: extA", &format!("device: extA, {more}"));
        assert_eq!(tunnels(&apply(&after, substrate)), [], "{more}");
    }
}
