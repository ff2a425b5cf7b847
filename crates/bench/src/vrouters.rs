//! Routers that forward in their network namespaces, between a generator and sinks in the kernel:
//! plain ones, those with Linux's VXLAN devices, and those behind PdP's ports (`pdp_net::ports` in
//! this program, without a daemon).
//!
//! Each has two interfaces. Frames enter by `eth0` and leave by `eth1`.
//!
//! - *Near*: frames come to `eth0` as another port's program would deliver them. Frames that leave
//!   by `eth1` go to a third port, whose program is the sink.
//! - *Far*: they come in a VXLAN tunnel by an external interface with PdP's program, and leave in
//!   one by another. The sink is at its other end.
//! - Plain routers, and those with VXLAN devices, have veths to generator and sink.
//!
//! Just before each sample, a pair of devices without a router between them gives the cost of
//! making and dropping a frame, which is subtracted. The remainder is the receiving ends' softirqs.
//! With threads, it is handing over each made frame to them (also frames that find a full ring),
//! plus the threads' own time for each received frame.
//!
//! The kernel makes 64 frames at a time. If they go to 64 or more routers in turn, each router gets
//! one of them, and its NAPI runs for that one alone.
//!
//! Limits: [`ROUTERS_MAX`]. The generator works on the first CPU, threads on the last.

use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, CpuSet, sched_setaffinity, unshare};
use nix::unistd::Pid;
use pdp_container::cgroup::Cgroups;
use pdp_net::interface::InterfaceInfo;
use pdp_net::napi::{set_threaded, threads};
use pdp_net::netns::within;
use pdp_net::ports::{self, ExternalEnd, LEASE_MAX, NO_MTU, PortSpec, Ports, Power, UnderlayHop};
use pdp_net::xdp::{Xdp, XdpMode};
use pdp_testbed::meter::{self, Clock};
use pdp_testbed::{enter, finish, ip_batch};
use pdp_wire::tunnel::Encapsulation;
use pdp_wire::{checksum, ether, ipv4, udp, vxlan};

use crate::live::{Aim, DEVICES_MAX, Load, LoadGenerator, Sinks};

/// Most routers of a kind: each takes four of PdP's port numbers.
pub const ROUTERS_MAX: usize = DEVICES_MAX;

/// Bytes of a frame in a router, without FCS.
pub const FRAME_BYTES: usize = 64;

/// Bytes that a VXLAN tunnel over IPv4 adds.
const TUNNEL_BYTES: usize = 50;

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
const MAC_WORDS: &str = "02:00:00:00:00:02";
const FROM_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

/// Destination port that sinks check for; also the port of tunnels (RFC 863).
const DISCARD_PORT: u16 = 9;

const DEVICES: [&str; 2] = ["eth0", "eth1"];

/// Outer addresses of the ingress and the egress side: the router's, and the remote's.
const OUTER: [[[u8; 4]; 2]; 2] = [[[10, 3, 0, 1], [10, 3, 0, 2]], [[10, 4, 0, 1], [10, 4, 0, 2]]];

/// External interfaces of PdP, and their peers.
const EXTERNAL: [[&str; 2]; 2] = [["extA", "farA"], ["extB", "farB"]];

/// Index of a port's root end, less its number (`INDEX_FIRST` of `bpf/pdp_ports.h`).
const ROOT_FIRST: u32 = 4096;

const PORTS_EACH: u32 = 4;

/// CPU time of a router's threads: unlimited, but accounted.
const POWER: Power = Power { millicores: 1_000_000 };

/// Time until the accounts of sleeping threads are written.
const SETTLE: Duration = Duration::from_millis(20);

/// Time before the measurement.
const WARM_UP: Duration = Duration::from_millis(10);

/// Longest time for kernel threads to end.
const END_MAX: Duration = Duration::from_secs(20);

/// Location of the frames' sources and destinations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TrafficEnds {
    /// Ports of the same machine.
    Near,
    /// Tunnels.
    Tunnels,
}

/// Forwarder and its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RouterPath {
    /// The kernel, from veth to veth.
    Plain,
    /// The kernel, from VXLAN device to VXLAN device.
    Vxlan,
    /// The whole stack of a namespace behind PdP's ports.
    Stack(TrafficEnds),
    /// PdP's program at the port, with the kernel's tables.
    Bypass(TrafficEnds),
}

impl RouterPath {
    /// Name of the series.
    pub fn series(self) -> &'static str {
        match self {
            Self::Plain => "kernel, plain",
            Self::Vxlan => "kernel, VXLAN devices",
            Self::Stack(TrafficEnds::Near) => "pdp, stack",
            Self::Stack(TrafficEnds::Tunnels) => "pdp, stack, far",
            Self::Bypass(TrafficEnds::Near) => "pdp, short way",
            Self::Bypass(TrafficEnds::Tunnels) => "pdp, short way, far",
        }
    }

    fn kind(self) -> ForwarderKind {
        match self {
            Self::Plain => ForwarderKind::Plain,
            Self::Vxlan => ForwarderKind::Vxlan,
            Self::Stack(_) | Self::Bypass(_) => ForwarderKind::Pdp,
        }
    }

    /// True if frames come in tunnels.
    fn is_tunnelled(self) -> bool {
        matches!(
            self,
            Self::Vxlan | Self::Stack(TrafficEnds::Tunnels) | Self::Bypass(TrafficEnds::Tunnels)
        )
    }
}

/// Components of a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ForwarderKind {
    Plain,
    Vxlan,
    Pdp,
}

/// Result of a load.
#[derive(Clone, Copy, Debug)]
pub struct RouterLoadResult {
    /// Frames forwarded per second.
    pub rate_pps: f64,
    /// CPU time per forwarded frame, without making and dropping it, nanoseconds.
    pub cpu_ns: f64,
    /// Part of it in the routers' threads.
    pub threads_ns: f64,
    /// CPU time of these threads at half the rate, when they sleep between frames.
    pub threads_half_ns: f64,
}

/// Network namespace that exists as long as this value, and in which the kernel forwards.
#[derive(Debug)]
struct NamespaceRouter {
    netns: OwnedFd,
    number: u32,
    /// Destinations of the generator's frames: near (or plain), and far.
    aims: [Option<Aim>; 2],
    /// Specs of PdP's ports, if it has them.
    specs: Vec<PortSpec>,
    threads: Vec<u32>,
}

/// Directory for PdP's ports.
#[derive(Debug)]
struct PortDirectory(tempfile::TempDir);

impl PortDirectory {
    fn new() -> Result<Self> {
        let this = Self(tempfile::tempdir()?);
        fs::create_dir(this.bpf())?;
        mount(Some("bpf"), &this.bpf(), Some("bpf"), MsFlags::empty(), None::<&str>)?;
        Ok(this)
    }

    fn bpf(&self) -> PathBuf {
        self.0.path().join("bpf")
    }

    fn pins(&self) -> PathBuf {
        self.bpf().join("ports")
    }

    fn netns(&self) -> PathBuf {
        self.0.path().join("netns")
    }
}

impl Drop for PortDirectory {
    fn drop(&mut self) {
        let _ = ports::destroy(&self.netns(), &self.pins());
        let _ = umount2(&self.bpf(), MntFlags::MNT_DETACH);
    }
}

/// All routers, generators and sinks. Make it inside [`isolated`].
#[derive(Debug)]
pub struct VrouterTestbed {
    plain: Vec<NamespaceRouter>,
    vxlan: Vec<NamespaceRouter>,
    pdp: Vec<NamespaceRouter>,
    /// In this thread's namespace, and in that of root ends.
    generators: [LoadGenerator; 2],
    sinks: Sinks,
    /// Pair of devices without a router between.
    bare: u32,
    externals: Vec<InterfaceInfo>,
    cgroups: Cgroups,
    /// Kernel memory of PdP's routers, bytes.
    pub bytes: u64,
    ports: Ports,
    place: PortDirectory,
}

impl VrouterTestbed {
    /// Makes these numbers of plain routers, ones with VXLAN
    /// devices, and ones of PdP. `cpu` is the generator's.
    pub fn new([plain, vxlan, pdp]: [usize; 3], cpu: usize) -> Result<Self> {
        let most = plain.max(vxlan).max(pdp);
        ensure!(most <= ROUTERS_MAX, "{most} routers, {ROUTERS_MAX} at most");
        let place = PortDirectory::new()?;
        let ports = Ports::open(&place.netns(), &place.pins())?;
        let here: OwnedFd = File::open(OWN_NETNS)?.into();
        let namespace = ports.netns().try_clone_to_owned()?;
        let generators = [
            LoadGenerator::start_for_many(here, cpu)?,
            LoadGenerator::start_for_many(namespace, cpu)?,
        ];
        let mut lines = vec!["link add bare type veth peer name end".to_owned()];
        for [external, far] in EXTERNAL {
            lines.push(format!("link add {external} type veth peer name {far}"));
        }
        for device in ["bare", "end"].iter().chain(EXTERNAL.as_flattened()) {
            lines.push(format!("link set {device} arp off up"));
        }
        no_ipv6()?;
        batch(&lines)?;
        let mut sinks = Sinks::new(false)?;
        for device in ["end", EXTERNAL[1][1]] {
            sinks.attach(InterfaceInfo::by_name(device)?.index)?;
        }
        let mut externals = Vec::new();
        for (side, [external, _]) in EXTERNAL.iter().enumerate() {
            let mut xdp = Xdp::attach_for(external, &place.bpf().join(external), &ports)?;
            ensure!(xdp.mode() == XdpMode::Native, "{external}: no XDP in the driver");
            let take = tunnel(side, 0).takes().context("a tunnel's end")?;
            xdp.set_takes(&[take])?;
            externals.push(InterfaceInfo::by_name(external)?);
        }
        let mut this = Self {
            plain: Vec::new(),
            vxlan: Vec::new(),
            pdp: Vec::new(),
            generators,
            sinks,
            bare: InterfaceInfo::by_name("bare")?.index,
            externals,
            cgroups: Cgroups::new(&format!("pdp-bench-{}", std::process::id()))?,
            bytes: 0,
            ports,
            place,
        };
        this.plain = this.veths(plain, ForwarderKind::Plain)?;
        this.vxlan = this.veths(vxlan, ForwarderKind::Vxlan)?;
        let before = kernel_bytes();
        let routers = (0..pdp as u32).map(|number| this.behind_ports(number * PORTS_EACH));
        this.pdp = routers.collect::<Result<_>>()?;
        this.bytes = kernel_bytes().saturating_sub(before);
        for number in (0..pdp as u32).map(|number| number * PORTS_EACH) {
            let far = spec(number + 2, number + 2, format!("far{number}"));
            this.ports.make(File::open(OWN_NETNS)?.as_fd(), &far)?;
            let pin = this.place.pins().join(format!("{}/in", far.number));
            this.sinks.replace(&pin)?;
        }
        Ok(this)
    }

    /// Routers with veths.
    fn veths(&mut self, count: usize, kind: ForwarderKind) -> Result<Vec<NamespaceRouter>> {
        let namespaces: Vec<OwnedFd> = (0..count).map(|_| netns()).collect::<Result<_>>()?;
        let letter = if kind == ForwarderKind::Plain { "p" } else { "v" };
        let mut lines = Vec::new();
        for (number, netns) in namespaces.iter().enumerate() {
            let netns = path(netns);
            for (prefix, device) in ["i", "o"].iter().zip(DEVICES) {
                let name = format!("{prefix}{letter}{number}");
                lines.push(format!(
                    "link add {name} type veth peer name {device} address {MAC_WORDS} netns {netns}"
                ));
                lines.push(format!("link set {name} arp off up"));
            }
        }
        batch(&lines)?;
        let mut routers = Vec::new();
        for (number, netns) in (0u32..).zip(namespaces) {
            within(netns.as_fd(), || Ok(forwards()))??;
            inside(&netns, UP)?;
            match kind {
                ForwarderKind::Vxlan => vxlan_devices(&netns)?,
                _ => addresses(&netns, DEVICES)?,
            }
            let index = |prefix| -> Result<u32> {
                Ok(InterfaceInfo::by_name(&format!("{prefix}{letter}{number}"))?.index)
            };
            self.sinks.attach(index("o")?)?;
            let device = index("i")?;
            let headers = if kind == ForwarderKind::Vxlan { tunnelled(MAC, VNI) } else { plain() };
            let aims = [Some(Aim { device, port: None, headers }), None];
            let (specs, threads) = (Vec::new(), Vec::new());
            routers.push(NamespaceRouter { netns, number, aims, specs, threads });
        }
        Ok(routers)
    }

    /// Makes a router with ports of this number and the next one.
    fn behind_ports(&mut self, number: u32) -> Result<NamespaceRouter> {
        let netns = netns()?;
        within(netns.as_fd(), || Ok(forwards()))??;
        let specs: Vec<PortSpec> = (number..)
            .zip(DEVICES)
            .map(|(port, device)| spec(port, number, device.to_owned()))
            .collect();
        for spec in &specs {
            self.ports.make(netns.as_fd(), spec)?;
        }
        addresses(&netns, DEVICES)?;
        self.ports.join(number, ports::LinkTarget::Outside(self.outside(0, number)))?;
        let far = InterfaceInfo::by_name(EXTERNAL[0][1])?.index;
        let headers = tunnelled(self.externals[0].mac, number + 1);
        let near = Aim { device: ROOT_FIRST + number, port: Some(number), headers: plain() };
        let aims = [Some(near), Some(Aim { device: far, port: None, headers })];
        Ok(NamespaceRouter { netns, number, aims, specs, threads: Vec::new() })
    }

    fn outside(&self, side: usize, number: u32) -> ExternalEnd {
        let InterfaceInfo { index, mac, .. } = self.externals[side];
        ExternalEnd { interface: index, mac, by: tunnel(side, number + 1), limit: None }
    }

    fn routers(&mut self, path: RouterPath) -> &mut Vec<NamespaceRouter> {
        match path.kind() {
            ForwarderKind::Plain => &mut self.plain,
            ForwarderKind::Vxlan => &mut self.vxlan,
            ForwarderKind::Pdp => &mut self.pdp,
        }
    }

    /// Makes threads serve the first `count` routers of a kind, charged as by pdpd, or disables
    /// threads for all. Returns the number of threads.
    pub fn set_threads(&mut self, path: RouterPath, count: usize, cpu: usize) -> Result<usize> {
        let mut routers = std::mem::take(self.routers(path));
        let mut found = 0;
        let done = routers.iter_mut().enumerate().try_for_each(|(at, router)| {
            self.set_threads_of(router, path.series(), at < count, cpu)?;
            found += router.threads.len();
            Ok(())
        });
        *self.routers(path) = routers;
        done.map(|()| found)
    }

    fn set_threads_of(
        &mut self,
        router: &mut NamespaceRouter,
        kind: &str,
        on: bool,
        cpu: usize,
    ) -> Result<()> {
        if router.threads.is_empty() != on {
            return Ok(());
        }
        router.threads.clear();
        let netns = router.netns.as_fd();
        let mut found = Vec::new();
        for spec in &router.specs {
            match on {
                true => found.extend(self.ports.serve(netns, spec)?),
                false => self.ports.serve_by_softirq(netns, spec)?,
            }
        }
        if let Some(first) = router.specs.first() {
            self.ports.power(first.vrouter, on.then_some(POWER))?;
        }
        for device in DEVICES.iter().filter(|_| router.specs.is_empty()) {
            set_threaded(netns, device, on)?;
            if on {
                let index = within(netns, || InterfaceInfo::by_name(device))?.index;
                found.extend(threads(netns, index)?);
            }
        }
        let kind = kind.replace([' ', ','], "");
        for thread in found {
            // Old threads stay in their cgroups until they have ended.
            self.cgroups.charge(&format!("{kind}{}/napi", router.number), thread.pid)?;
            let mut cpus = CpuSet::new();
            cpus.set(cpu)?;
            sched_setaffinity(Pid::from_raw(i32::try_from(thread.pid)?), &cpus)?;
            router.threads.push(thread.pid);
        }
        Ok(())
    }

    /// Directs frames through the first `count` routers on this path, `1 << shift` to each in turn.
    fn prepare(&mut self, path: RouterPath, count: usize, shift: u32) -> Result<()> {
        let at = usize::from(matches!(
            path,
            RouterPath::Stack(TrafficEnds::Tunnels) | RouterPath::Bypass(TrafficEnds::Tunnels)
        ));
        let routers = self.routers(path).get(..count).context("routers")?;
        let aims: Vec<Aim> = routers.iter().filter_map(|it| it.aims[at].clone()).collect();
        let numbers: Vec<u32> = routers.iter().map(|router| router.number).collect();
        self.generator(path).aim(aims, shift, bytes(path))?;
        let (RouterPath::Stack(ends) | RouterPath::Bypass(ends)) = path else { return Ok(()) };
        let lease = if path == RouterPath::Bypass(ends) { LEASE_MAX } else { Duration::ZERO };
        for number in numbers {
            self.ports.activate_bypass(number, lease, [NO_MTU; 2])?;
            let leave = match ends {
                TrafficEnds::Near => ports::LinkTarget::Port(number + 2),
                TrafficEnds::Tunnels => ports::LinkTarget::Outside(self.outside(1, number)),
            };
            self.ports.join(number + 1, leave)?;
            self.ports.set_hop(number + 1, Some(UnderlayHop { mac: FROM_MAC, mtu: 1600 }))?;
        }
        Ok(())
    }

    fn generator(&self, path: RouterPath) -> &LoadGenerator {
        let is_there = matches!(
            path,
            RouterPath::Stack(TrafficEnds::Near) | RouterPath::Bypass(TrafficEnds::Near)
        );
        &self.generators[usize::from(is_there)]
    }

    /// Offers as many frames as possible to the first `count` routers for `time`.
    ///
    /// # Errors
    /// If no frames arrived, or frames of PdP's routers took another path.
    pub fn offer(
        &mut self,
        path: RouterPath,
        count: usize,
        shift: u32,
        time: Duration,
    ) -> Result<RouterLoadResult> {
        let headers = if path.is_tunnelled() { tunnelled(MAC, VNI) } else { plain() };
        let bare = Aim { device: self.bare, port: None, headers };
        self.generators[0].aim(vec![bare], 0, bytes(path))?;
        let most = Load::Most;
        let [made, _, working, _] = self.measure(&self.generators[0], &[], most, time / 4)?;
        let bare_ns = working / made;
        self.prepare(path, count, shift)?;
        let threads: Vec<u32> =
            self.routers(path)[..count].iter().flat_map(|it| it.threads.clone()).collect();
        let clock = Clock::CpuTime { hz: 0.0 };
        self.generator(path).send(Load::Most, WARM_UP, &clock)?;
        let before = self.bypass_counts(path)?;
        let generator = self.generator(path);
        let [made, passed, working, in_threads] = self.measure(generator, &threads, most, time)?;
        ensure!(passed > 0.0, "none of {made} frames arrived");
        let after = self.bypass_counts(path)?;
        let [short, other] = [0, 1].map(|at| after[at].saturating_sub(before[at]));
        let is_so = match path {
            RouterPath::Stack(_) => short == 0 && other > 0,
            RouterPath::Bypass(_) => short > 0 && other <= short / 100,
            RouterPath::Plain | RouterPath::Vxlan => true,
        };
        ensure!(is_so, "{short} frames took the XDP bypass, {other} the stack");
        let rate_pps = passed / time.as_secs_f64();
        if threads.is_empty() {
            let cpu_ns = (working - bare_ns * made) / passed;
            return Ok(RouterLoadResult {
                rate_pps,
                cpu_ns,
                threads_ns: 0.0,
                threads_half_ns: 0.0,
            });
        }
        let half = Load::Even(rate_pps / 2.0);
        let [_, fewer, _, meanwhile] = self.measure(self.generator(path), &threads, half, time)?;
        let threads_ns = in_threads / passed;
        Ok(RouterLoadResult {
            rate_pps,
            cpu_ns: working / made - bare_ns + threads_ns,
            threads_ns,
            threads_half_ns: meanwhile / fewer.max(1.0),
        })
    }

    /// Frames on the XDP bypass, and other frames, at the first router's port.
    fn bypass_counts(&mut self, path: RouterPath) -> Result<[u64; 2]> {
        if path.kind() != ForwarderKind::Pdp {
            return Ok([0; 2]);
        }
        let counters = self.ports.counters(self.pdp[0].number)?;
        // Frames may still be in flight during reading.
        let others = counters.to_vrouter.frames.saturating_sub(counters.bypass.bypassed);
        Ok([counters.bypass.bypassed, others])
    }

    /// Frames made and received, and CPU time of the generator with softirqs and of threads,
    /// nanoseconds. Scaled to exactly this time.
    fn measure(
        &self,
        generator: &LoadGenerator,
        threads: &[u32],
        load: Load,
        time: Duration,
    ) -> Result<[f64; 4]> {
        let mut makers = meter::processes("comm", "ksoftirqd/");
        makers.push(generator.thread());
        let used = |pids: &[u32]| pids.iter().map(|pid| cpu_ns(*pid)).sum::<u64>();
        let clock = Clock::CpuTime { hz: 0.0 };
        thread::sleep(SETTLE);
        let (passed, working, in_threads) = (self.sinks.received()?, used(&makers), used(threads));
        let sent = generator.send(load, time, &clock)?;
        let working = used(&makers).saturating_sub(working);
        thread::sleep(SETTLE);
        let passed = self.sinks.received()?.saturating_sub(passed);
        let in_threads = used(threads).saturating_sub(in_threads);
        let scale = time.as_secs_f64() / sent.seconds;
        Ok([sent.frames, passed, working, in_threads].map(|count| count as f64 * scale))
    }
}

impl Drop for VrouterTestbed {
    fn drop(&mut self) {
        for path in [RouterPath::Plain, RouterPath::Vxlan, RouterPath::Stack(TrafficEnds::Near)] {
            let _ = self.set_threads(path, 0, 0);
        }
        let _ = self.cgroups.remove("", END_MAX);
        self.cgroups.remove_if_empty("");
    }
}

/// Number of the router of a PdP [`RoutedHosts`].
const ROUTER: u32 = 1;

/// Two hosts with a router between them, to run programs on. Their interfaces are its neighbours.
#[derive(Debug)]
pub struct RoutedHosts {
    /// The hosts: 10.1.0.2 and 10.2.0.2.
    pub hosts: [OwnedFd; 2],
    router: OwnedFd,
    /// PdP's ports: host, router's two, host.
    pdp: Option<(Ports, Vec<PortSpec>, Cgroups)>,
    _place: Option<PortDirectory>,
}

impl RoutedHosts {
    /// Makes it with veths.
    pub fn plain() -> Result<Self> {
        let (hosts, router) = ([netns()?, netns()?], netns()?);
        let mut lines = Vec::new();
        for (host, device) in hosts.iter().zip(DEVICES) {
            lines.push(format!(
                "link add eth0 netns {} type veth peer name {device} netns {}",
                path(host),
                path(&router)
            ));
        }
        batch(&lines)?;
        let this = Self { hosts, router, pdp: None, _place: None };
        within(this.router.as_fd(), || Ok(forwards()))??;
        inside(&this.router, UP)?;
        inside(&this.router, "ip addr add 10.1.0.1/16 dev eth0; ip addr add 10.2.0.1/16 dev eth1")?;
        for (side, host) in (1..).zip(&this.hosts) {
            let address = format!("ip link set eth0 up; ip addr add 10.{side}.0.2/16 dev eth0");
            inside(host, &format!("{address}; ip route add default via 10.{side}.0.1"))?;
        }
        Ok(this)
    }

    /// Makes it with PdP's ports, linked inside the machine.
    pub fn pdp() -> Result<Self> {
        let place = PortDirectory::new()?;
        let ports = Ports::open(&place.netns(), &place.pins())?;
        let (hosts, router) = ([netns()?, netns()?], netns()?);
        within(router.as_fd(), || Ok(forwards()))??;
        let port = |number: u32, vrouter, name: &str, address: &str, gateway: Option<&str>| {
            let routes = gateway.map(|gateway| Ok(("0.0.0.0/0".parse()?, gateway.parse()?)));
            Ok::<_, anyhow::Error>(PortSpec {
                mac: [2, 0, 0, 0, 1, number as u8],
                addresses: vec![address.parse()?],
                routes: routes.into_iter().collect::<Result<_>>()?,
                ..spec(number, vrouter, name.to_owned())
            })
        };
        let specs = vec![
            port(0, 0, "eth0", "10.1.0.2/16", Some("10.1.0.1"))?,
            port(1, ROUTER, "eth0", "10.1.0.1/16", None)?,
            port(2, ROUTER, "eth1", "10.2.0.1/16", None)?,
            port(3, 3, "eth0", "10.2.0.2/16", Some("10.2.0.1"))?,
        ];
        for (spec, netns) in specs.iter().zip([&hosts[0], &router, &router, &hosts[1]]) {
            ports.make(netns.as_fd(), spec)?;
        }
        for (a, b) in [(0, 1), (2, 3)] {
            ports.join(a, ports::LinkTarget::Port(b))?;
            ports.join(b, ports::LinkTarget::Port(a))?;
        }
        let cgroups = Cgroups::new(&format!("pdp-bench-path-{}", std::process::id()))?;
        Ok(Self { hosts, router, pdp: Some((ports, specs, cgroups)), _place: Some(place) })
    }

    /// Enables the XDP bypass for [`LEASE_MAX`], or disables it.
    pub fn set_bypass(&self, short: bool) -> Result<()> {
        let Some((ports, ..)) = &self.pdp else { return Ok(()) };
        let lease = if short { LEASE_MAX } else { Duration::ZERO };
        Ok(ports.activate_bypass(ROUTER, lease, [NO_MTU; 2])?)
    }

    /// Makes threads serve the router's PdP ports, charged as by
    /// pdpd, or softirqs. Hosts' ports always use softirqs.
    pub fn set_threads(&mut self, on: bool) -> Result<()> {
        let Some((ports, specs, cgroups)) = &mut self.pdp else { return Ok(()) };
        let netns = self.router.as_fd();
        for spec in specs.iter().filter(|spec| spec.vrouter == ROUTER) {
            if !on {
                ports.serve_by_softirq(netns, spec)?;
                continue;
            }
            for thread in ports.serve(netns, spec)? {
                cgroups.charge("path/napi", thread.pid)?;
            }
        }
        Ok(ports.power(ROUTER, on.then_some(POWER))?)
    }

    /// Sets segmentation offload of hosts and router, on veths.
    pub fn set_offload(&self, on: bool) -> Result<()> {
        let word = if on { "on" } else { "off" };
        for (netns, devices) in [
            (&self.hosts[0], &DEVICES[..1]),
            (&self.hosts[1], &DEVICES[..1]),
            (&self.router, &DEVICES),
        ] {
            for device in devices {
                inside(netns, &format!("ethtool -K {device} tso {word} gso {word} gro {word}"))?;
            }
        }
        Ok(())
    }
}

impl Drop for RoutedHosts {
    fn drop(&mut self) {
        let _ = self.set_threads(false);
        if let Some((_, _, cgroups)) = &self.pdp {
            let _ = cgroups.remove("", END_MAX);
            cgroups.remove_if_empty("");
        }
    }
}

/// Runs `work` in a new network and mount namespace, which end with it.
pub fn isolated<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|scope| {
        let work = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS)?;
            let none: Option<&str> = None;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
            work()
        });
        work.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Kernel memory, bytes: objects, per-CPU memory, and stacks.
pub fn kernel_bytes() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    let own =
        lines.filter(|(name, _)| ["Slab", "Percpu", "KernelStack", "PageTables"].contains(name));
    own.filter_map(|(_, rest)| rest.split_whitespace().next()?.parse::<u64>().ok()).sum::<u64>()
        << 10
}

/// A command in a network namespace.
pub fn command(netns: &OwnedFd, program: &str) -> Command {
    enter(&path(netns), program)
}

/// Makes a router's devices do NAPI and accept redirected frames: `gro` once they are up.
const UP: &str =
    "ip link set eth0 up; ip link set eth1 up; ethtool -K eth0 gro on; ethtool -K eth1 gro on";

/// VNI of `vx0`, in its own namespace. `vx1` uses the next one.
const VNI: u32 = 7;

const OWN_NETNS: &str = "/proc/thread-self/ns/net";

fn spec(number: u32, vrouter: u32, name: String) -> PortSpec {
    let (addresses, routes) = (Vec::new(), Vec::new());
    PortSpec { number, vrouter, name, mac: MAC, mtu: 1500, addresses, routes }
}

/// Tunnel of the ingress or the egress side.
fn tunnel(side: usize, vni: u32) -> Encapsulation {
    let [local, remote] = OUTER[side].map(Into::into);
    Encapsulation::Vxlan(vxlan::VxlanTunnel { local, remote, port: DISCARD_PORT, vni })
}

fn bytes(path: RouterPath) -> usize {
    FRAME_BYTES + if path.is_tunnelled() { TUNNEL_BYTES } else { 0 }
}

/// Headers of a frame to a router.
fn plain() -> Vec<u8> {
    datagram(MAC, [[10, 1, 0, 2], [10, 2, 0, 2]], FRAME_BYTES)
}

/// Headers of a tunnelled frame to a router.
fn tunnelled(to: [u8; 6], vni: u32) -> Vec<u8> {
    let [router, other] = OUTER[0];
    let outer = datagram(to, [other, router], FRAME_BYTES + TUNNEL_BYTES);
    // RFC 7348 section 5: the flag that there is a VNI, and the VNI.
    [outer, vec![8, 0, 0, 0], (vni << 8).to_be_bytes().to_vec(), plain()].concat()
}

/// Ethernet, IPv4 and UDP to the discard port.
fn datagram(to: [u8; 6], [source, destination]: [[u8; 4]; 2], bytes: usize) -> Vec<u8> {
    let total = (bytes - ether::HEADER_BYTES) as u16;
    let mut ip = vec![0; ipv4::HEADER_BYTES];
    ip[0] = 0x45;
    ip[2..4].copy_from_slice(&total.to_be_bytes());
    ip[8..10].copy_from_slice(&[64, udp::PROTOCOL]);
    ip[12..16].copy_from_slice(&source);
    ip[16..20].copy_from_slice(&destination);
    let sum = checksum::checksum(&ip);
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    let length = total - ipv4::HEADER_BYTES as u16;
    let (source_port, destination_port) = (50_000, DISCARD_PORT);
    let udp = udp::UdpHeader { source_port, destination_port, length, checksum: 0 };
    let kind = ether::kind::IPV4;
    let ethernet = ether::EthernetHeader { destination: to, source: FROM_MAC, kind };
    [&ethernet.emit()[..], &ip, &udp.emit()].concat()
}

/// A new network namespace.
fn netns() -> Result<OwnedFd> {
    thread::scope(|scope| {
        let made = scope.spawn(|| -> Result<OwnedFd> {
            unshare(CloneFlags::CLONE_NEWNET)?;
            Ok(File::open(OWN_NETNS)?.into())
        });
        made.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn path(netns: &OwnedFd) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), netns.as_raw_fd())
}

fn no_ipv6() -> Result<()> {
    for scope in ["all", "default"] {
        let file = format!("/proc/sys/net/ipv6/conf/{scope}/disable_ipv6");
        fs::write(&file, "1").context(file)?;
    }
    Ok(())
}

/// Enables forwarding in this thread's namespace.
fn forwards() -> Result<()> {
    no_ipv6()?;
    fs::write("/proc/sys/net/ipv4/ip_forward", "1").context("IPv4 forwarding")
}

/// Sets the addresses of a router, and the neighbour for its frames.
fn addresses(netns: &OwnedFd, [first, second]: [&str; 2]) -> Result<()> {
    let lines = [
        format!("addr add 10.1.0.1/16 dev {first}"),
        format!("addr add 10.2.0.1/16 dev {second}"),
        format!("neigh add 10.2.0.2 lladdr 02:00:00:00:00:03 dev {second} nud permanent"),
    ];
    Ok(ip_batch(command(netns, "ip"), &lines.join("\n"))?)
}

/// Makes a router's VXLAN devices, `vx0` and `vx1`.
fn vxlan_devices(netns: &OwnedFd) -> Result<()> {
    let mut lines = Vec::new();
    for (side, [local, remote]) in (0u32..).zip(&OUTER) {
        let vni = VNI + side;
        let [local, remote] = [local, remote].map(|address| std::net::Ipv4Addr::from(*address));
        lines.extend([
            format!("addr add {local}/24 dev eth{side}"),
            format!("neigh add {remote} lladdr 02:00:00:00:00:03 dev eth{side} nud permanent"),
            format!(
                "link add vx{side} address {MAC_WORDS} type vxlan id {vni} local {local} remote {remote} \
                 dstport {DISCARD_PORT} dev eth{side}"
            ),
            format!("link set vx{side} up"),
        ]);
    }
    ip_batch(command(netns, "ip"), &lines.join("\n"))?;
    addresses(netns, ["vx0", "vx1"])
}

/// Runs a shell line in a network namespace.
fn inside(netns: &OwnedFd, line: &str) -> Result<()> {
    finish(command(netns, "sh").args(["-ec", line]))?;
    Ok(())
}

/// Runs lines for ip(8) here.
fn batch(lines: &[String]) -> Result<()> {
    Ok(ip_batch(Command::new("ip"), &lines.join("\n"))?)
}

/// CPU time of a task so far, nanoseconds; 0 if it has ended.
fn cpu_ns(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/schedstat")).unwrap_or_default();
    text.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0)
}
