//! Measures the cost of watching many vnets.
//!
//! It reports the CPU time of the daemon's threads while one reader watches
//! all vnets, how often the reader gets a sample, and how long a pass over
//! all cgroups takes. Vnets are planned and have their cgroups. A stand-in
//! for the mux answers with counters of each vnet. Nothing runs in the vnets.
//!
//! `cargo run --release -p pdpd --example measure-watch [VNETS [SECONDS]]`, as root (cgroups).

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pdp_api::{Detail, WatchLine, WatchQuery};
use pdp_container::{Limits, Runtime, RuntimePaths};
use pdp_model::{GuestStats, NodeStats, PortStats, Stats, VnetStats};
use pdp_proto::channel::Channel;
use pdp_proto::mux;
use pdp_spec::{Descriptors, SourceFile};
use pdpd::access::AccessScope;
use pdpd::engine::DaemonCore;
use pdpd::host::bounds::GuestLimits;
use pdpd::host::control::MuxClient;
use pdpd::host::settings::KernelSettings;
use pdpd::intent::model::Model;
use pdpd::intent::state::StateFile;
use pdpd::kernel::ports::KernelPorts;
use pdpd::machine::Host;
use pdpd::plan::DaemonPaths;

/// Two routers with two guests and four ports each, and two hosts.
fn vnet(number: usize) -> String {
    let mut text = format!(
        "---\napiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {{name: v{number}}}\nspec:\n  nodes:\n"
    );
    for router in ["r1", "r2"] {
        text += &format!("    {router}:\n      kind: router\n      interfaces:\n");
        for port in 0..4 {
            text += &format!("        eth{port}: {{}}\n");
        }
        text += "      dataPlane: {power: 2m, guests: 2}\n";
    }
    for host in ["h1", "h2"] {
        text += &format!("    {host}: {{kind: host, interfaces: {{eth0: {{}}}}}}\n");
    }
    text + "  links: [{endpoints: [\"r1:eth0\", \"h1:eth0\"]}, {endpoints: [\"r2:eth0\", \"h2:eth0\"]}, \
            {endpoints: [\"r1:eth1\", \"r2:eth1\"]}]\n"
}

const SUBSTRATE: &str = "apiVersion: pdp/v1\nkind: Substrate\nmetadata: {name: node}\nspec:\n  \
    mux: {cpus: \"0\", power: 0.5}\n  forwardingEngines: {fe1: {cpus: \"1-63\", capacity: 63}}\n";

fn counters(of: &mux::VnetConfig) -> VnetStats {
    let mut nodes = BTreeMap::new();
    for node in &of.nodes {
        let port = PortStats {
            received: 1 << 40,
            received_bytes: 1 << 50,
            sent: 1 << 40,
            sent_bytes: 1 << 50,
            dropped: [("queue-full", 7), ("guest-no-route", 1 << 20)]
                .map(|(reason, count)| (reason.to_owned(), count))
                .into(),
            ..PortStats::default()
        };
        let ports = node.ports.iter().map(|it| (it.name.clone(), port.clone())).collect();
        let guest = GuestStats { connected: true, to_guest: 1 << 40, ..Default::default() };
        let guests = if node.name.starts_with('r') { 2 } else { 0 };
        let guests = (0..guests).map(|number| (number, guest.clone())).collect();
        nodes.insert(node.name.clone(), NodeStats { ports, guests, ..Default::default() });
    }
    VnetStats { nodes }
}

/// CPU time of this process's threads by name, milliseconds.
fn cpu_ms() -> Result<BTreeMap<String, u64>> {
    let mut all = BTreeMap::new();
    for task in std::fs::read_dir("/proc/self/task")? {
        let stat = std::fs::read_to_string(task?.path().join("stat"))?;
        let (head, rest) = stat.rsplit_once(')').context("stat")?;
        let name = head.split_once('(').context("stat")?.1.to_owned();
        let fields: Vec<&str> = rest.split_whitespace().collect();
        // Fields 14 and 15 of proc(5), in ticks of 10 ms.
        let ticks = fields[11].parse::<u64>()? + fields[12].parse::<u64>()?;
        *all.entry(name).or_default() += ticks * 10;
    }
    Ok(all)
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default: usize| arguments.next().map_or(Ok(default), |text| text.parse());
    let (count, seconds) = (number(1000)?, number(60)?);
    let directory = std::env::temp_dir().join(format!("measure-watch-{}", std::process::id()));
    std::fs::create_dir_all(directory.join("run/mux"))?;
    let places =
        DaemonPaths { run: directory.join("run"), lib: "/nowhere".into(), pins: "/nowhere".into() };
    let cpus: BTreeSet<u32> = (0..64).collect();
    let file = |text: String| SourceFile { name: "x.yaml".into(), text, ..SourceFile::default() };
    let mut model = Model::default();
    for text in [SUBSTRATE.to_owned(), (0..count).map(vnet).collect()] {
        let documents =
            pdp_spec::parse(&[file(text)]).map_err(|faults| anyhow::anyhow!("{faults:?}"))?;
        let existing = model.existing(&cpus, model.substrate.is_none());
        let intent = pdp_spec::check(&documents, &existing)
            .map_err(|faults| anyhow::anyhow!("{:?}", faults.first()))?;
        model = model.with(intent, &places, &cpus, |_| false)?;
    }
    let state = Arc::new(StateFile::open(&directory.join("state"))?);
    state.commit(&model.change_from(&Model::default()))?;
    let any = || "/bin/true".into();
    let cgroup = format!("pdp-measure-{}", std::process::id());
    let runtime = Runtime::new(RuntimePaths {
        runc: any(),
        shim: any(),
        init: any(),
        work: any(),
        records: places.records(),
        runc_root: directory.join("runc"),
        logs: directory.join("logs"),
        images: directory.join("images"),
        volumes: directory.join("volumes"),
        cgroup: cgroup.clone(),
    })?;
    let mut cgroups = 0;
    for (name, vnet) in model.plan.vnets.iter() {
        for (node, plan) in &vnet.nodes {
            runtime.cgroups().ensure(&DaemonPaths::node_cgroup(name, node), &Limits::default())?;
            for guest in plan.guests.keys() {
                let guest = DaemonPaths::guest_cgroup(name, node, *guest);
                runtime.cgroups().ensure(&guest, &Limits::default())?;
            }
            cgroups += 1 + plan.guests.len();
        }
    }
    let vnets = model.plan.vnets.iter();
    let vnets = vnets.map(|(name, plan)| (name.clone(), counters(&plan.mux))).collect();
    let stats = Stats { vnets, ..Stats::default() };
    let listener = UnixListener::bind(places.mux_control())?;
    std::thread::Builder::new().name("mux".into()).spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut channel = Channel::new(stream);
            if let Ok(Some(_)) = channel.receive::<mux::MuxRequest>() {
                let _ = channel.send(&mux::MuxReply::Stats(Box::new(stats.clone())), &[]);
            }
        }
    })?;
    let bounds = GuestLimits::new(&places);
    let host = Arc::new(Host {
        mux: MuxClient { path: places.mux_control() },
        ports: KernelPorts::new(&places),
        places,
        runtime,
        state,
        settings: KernelSettings::default(),
        bounds,
    });
    let descriptors = Descriptors { limit: 1 << 20, unchanged_vnets: 0 };
    let engine = DaemonCore::new(host.clone(), host, cpus, false, descriptors, |_| ())?;
    let engine = Arc::new(engine);
    engine.watch_hub().touch_vnets(engine.model().vnets.keys().map(String::as_str));
    pdpd::status::publisher::start(&engine)?;
    // Wait until the one-time discovery is done.
    std::thread::sleep(Duration::from_secs(5));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (before, samples, bytes, looks) = runtime.block_on(async {
        let query = WatchQuery { detail: Detail::Summary, ..WatchQuery::default() };
        let mut reader = pdpd::status::publisher::open(&engine, &AccessScope::Node, query);
        // The statuses that the first look at the mux changes.
        tokio::time::timeout(Duration::from_secs(10), async {
            loop {
                reader.next().await;
            }
        })
        .await
        .unwrap_or(());
        let before = cpu_ms()?;
        let end = Instant::now() + Duration::from_secs(seconds as u64);
        let (mut samples, mut bytes, mut looks) = (0, 0, 0);
        let mut looked = BTreeMap::new();
        while let Ok(lines) = tokio::time::timeout_at(end.into(), reader.next()).await {
            bytes += lines.len();
            for line in lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
                let line: WatchLine = serde_json::from_slice(line)?;
                let WatchLine::Sample(sample) = line else { continue };
                samples += 1;
                for (name, vnet) in sample.vnets {
                    let before = looked.insert(name, vnet.usage.usage_at_ns);
                    looks += usize::from(before.is_some_and(|at| at != vnet.usage.usage_at_ns));
                }
            }
        }
        anyhow::Ok((before, samples, bytes, looks))
    })?;
    println!("{count} vnets, {cgroups} cgroups, {seconds} s: {samples} samples, {bytes} bytes");
    println!(
        "each vnet's cgroups are looked at once in {:.0} s",
        (count * seconds) as f64 / looks as f64
    );
    let percent = |ms: u64| ms as f64 / (seconds as f64 * 10.0);
    let mut daemon = 0;
    for (name, ms) in cpu_ms()? {
        let used = ms.saturating_sub(before.get(&name).copied().unwrap_or(0));
        // The main thread is the reader.
        let what = match name.as_str() {
            "mux" => "stands in for the mux",
            "measure-watch" => "reads",
            _ => {
                daemon += used;
                "daemon"
            }
        };
        println!("{name:20} {:.2} % of a core ({what})", percent(used));
    }
    println!("daemon               {:.2} % of a core", percent(daemon));
    engine.host.runtime.cgroups().remove("", Duration::from_secs(10))?;
    engine.host.runtime.cgroups().remove_if_empty("");
    std::fs::remove_dir_all(directory)?;
    Ok(())
}
