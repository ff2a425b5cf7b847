//! Routers whose network namespaces forward, between a generator and sinks in the kernel: plain ones, those with
//! Linux's VXLAN devices, and those behind PdP's ports (`pdp_net::ports` in this program, without a daemon).
//!
//! Each has two interfaces, `eth0`, where frames come in, and `eth1`, where they go out.
//!
//! - *Near*, frames come to `eth0` as the program of another port has them come, and what leaves by `eth1` goes to a
//!   third port, whose program is the sink.
//! - *Far*, they come in a VXLAN tunnel by an external interface with PdP's program, and leave in one by another; the
//!   sink is at its other end.
//! - Plain routers, and those with VXLAN devices, have veths to generator and sink.
//!
//! What making a frame costs, and dropping it, is measured by a pair of devices without a router between, just before
//! each sample, and taken off. What remains is the receiving ends' softirqs. Where these are in threads, it is handing
//! frames to them, for each frame made, also those that find a full ring; and the threads' own time, for each that came.
//!
//! The kernel makes frames by 64 at a time: where they go to as many routers in turn, or more, each gets one of them, and
//! its NAPI is begun and ended for that one.
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
use pdp_e2e::meter::{self, Clock};
use pdp_net::interface::Interface;
use pdp_net::napi::{set_threaded, threads};
use pdp_net::netns::within;
use pdp_net::ports::{self, Hop, LEASE_MAX, NO_MTU, Outside, PortSpec, Ports, Power};
use pdp_net::xdp::{Mode, Xdp};
use pdp_wire::tunnel::Encapsulation;
use pdp_wire::{checksum, ether, ipv4, udp, vxlan};

use crate::live::{Aim, DEVICES_MAX, Generator, Load, Sinks};

/// Routers of a kind: each takes four of PdP's ports' numbers.
pub const ROUTERS_MAX: usize = DEVICES_MAX;

/// Bytes of a frame in a router, without check sequence.
pub const FRAME_BYTES: usize = 64;

/// Bytes that a VXLAN tunnel over IPv4 adds.
const TUNNEL_BYTES: usize = 50;

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
const MAC_WORDS: &str = "02:00:00:00:00:02";
const FROM_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

/// Sinks look for it, also as the port of tunnels (RFC 863).
const DISCARD_PORT: u16 = 9;

const DEVICES: [&str; 2] = ["eth0", "eth1"];

/// Outer addresses on the side of frames that come, and of those that go: the router's, and the other end's.
const OUTER: [[[u8; 4]; 2]; 2] = [[[10, 3, 0, 1], [10, 3, 0, 2]], [[10, 4, 0, 1], [10, 4, 0, 2]]];

/// External interfaces of PdP, and their other ends.
const EXTERNAL: [[&str; 2]; 2] = [["extA", "farA"], ["extB", "farB"]];

/// Index of a port's root end, less its number (`INDEX_FIRST` of `bpf/pdp_ports.h`).
const ROOT_FIRST: u32 = 4096;

const PORTS_EACH: u32 = 4;

/// CPU time that a router's threads may use: all there is, so that it is accounted for and limits nothing.
const POWER: Power = Power { millicores: 1_000_000 };

/// Until the accounts of threads that went to sleep are written.
const SETTLE: Duration = Duration::from_millis(20);

/// Before what counts.
const WARM_UP: Duration = Duration::from_millis(10);

/// Kernel threads end within this time.
const END_MAX: Duration = Duration::from_secs(20);

/// Where frames come from and go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ends {
    /// Ports of the same machine.
    Near,
    /// Tunnels.
    Far,
}

/// Who forwards, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// The kernel, from veth to veth.
    Plain,
    /// The kernel, from VXLAN device to VXLAN device.
    Vxlan,
    /// A namespace's whole stack behind PdP's ports.
    Stack(Ends),
    /// PdP's program at the port, by the kernel's tables.
    Short(Ends),
}

impl Way {
    /// As a series.
    pub fn series(self) -> &'static str {
        match self {
            Self::Plain => "kernel, plain",
            Self::Vxlan => "kernel, VXLAN devices",
            Self::Stack(Ends::Near) => "pdp, stack",
            Self::Stack(Ends::Far) => "pdp, stack, far",
            Self::Short(Ends::Near) => "pdp, short way",
            Self::Short(Ends::Far) => "pdp, short way, far",
        }
    }

    fn kind(self) -> Kind {
        match self {
            Self::Plain => Kind::Plain,
            Self::Vxlan => Kind::Vxlan,
            Self::Stack(_) | Self::Short(_) => Kind::Pdp,
        }
    }

    /// Whether frames come in tunnels.
    fn is_tunnelled(self) -> bool {
        matches!(self, Self::Vxlan | Self::Stack(Ends::Far) | Self::Short(Ends::Far))
    }
}

/// What a router is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Plain,
    Vxlan,
    Pdp,
}

/// What came of a load.
#[derive(Clone, Copy, Debug)]
pub struct Passed {
    /// Frames that came out, a second.
    pub rate_pps: f64,
    /// CPU time for each of them, without making and dropping it, nanoseconds.
    pub cpu_ns: f64,
    /// Of this: of the routers' threads.
    pub threads_ns: f64,
    /// Theirs at half the rate, when they sleep between frames.
    pub threads_half_ns: f64,
}

/// A network namespace that is there as long as this, and what the kernel forwards there.
#[derive(Debug)]
struct Router {
    netns: OwnedFd,
    number: u32,
    /// Where its frames go: near, or plain; and far.
    aims: [Option<Aim>; 2],
    /// With PdP's ports.
    specs: Vec<PortSpec>,
    threads: Vec<u32>,
}

/// Where PdP's ports are kept.
#[derive(Debug)]
struct Place(tempfile::TempDir);

impl Place {
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

impl Drop for Place {
    fn drop(&mut self) {
        let _ = ports::destroy(&self.netns(), &self.pins());
        let _ = umount2(&self.bpf(), MntFlags::MNT_DETACH);
    }
}

/// All of it. To be made inside [`isolated`].
#[derive(Debug)]
pub struct Field {
    plain: Vec<Router>,
    vxlan: Vec<Router>,
    pdp: Vec<Router>,
    /// In this thread's namespace, and in that of root ends.
    generators: [Generator; 2],
    sinks: Sinks,
    /// A pair of devices without a router between.
    bare: u32,
    externals: Vec<Interface>,
    cgroups: Cgroups,
    /// Memory of the kernel that PdP's routers took, bytes.
    pub bytes: u64,
    ports: Ports,
    place: Place,
}

impl Field {
    /// With so many plain routers, ones with VXLAN devices, and ones of PdP; `cpu` is the generator's.
    pub fn new([plain, vxlan, pdp]: [usize; 3], cpu: usize) -> Result<Self> {
        let most = plain.max(vxlan).max(pdp);
        ensure!(most <= ROUTERS_MAX, "{most} routers, {ROUTERS_MAX} at most");
        let place = Place::new()?;
        let ports = Ports::open(&place.netns(), &place.pins())?;
        let here: OwnedFd = File::open(OWN_NETNS)?.into();
        let there = ports.netns().try_clone_to_owned()?;
        let generators =
            [Generator::start_for_many(here, cpu)?, Generator::start_for_many(there, cpu)?];
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
            sinks.attach(Interface::by_name(device)?.index)?;
        }
        let mut externals = Vec::new();
        for (side, [external, _]) in EXTERNAL.iter().enumerate() {
            let mut xdp = Xdp::attach_for(external, &place.bpf().join(external), &ports)?;
            ensure!(xdp.mode() == Mode::Native, "{external}: no XDP in the driver");
            let take = tunnel(side, 0).takes().context("a tunnel's end")?;
            xdp.set_takes(&[take])?;
            externals.push(Interface::by_name(external)?);
        }
        let mut this = Self {
            plain: Vec::new(),
            vxlan: Vec::new(),
            pdp: Vec::new(),
            generators,
            sinks,
            bare: Interface::by_name("bare")?.index,
            externals,
            cgroups: Cgroups::new(&format!("pdp-bench-{}", std::process::id()))?,
            bytes: 0,
            ports,
            place,
        };
        this.plain = this.veths(plain, Kind::Plain)?;
        this.vxlan = this.veths(vxlan, Kind::Vxlan)?;
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
    fn veths(&mut self, count: usize, kind: Kind) -> Result<Vec<Router>> {
        let namespaces: Vec<OwnedFd> = (0..count).map(|_| netns()).collect::<Result<_>>()?;
        let letter = if kind == Kind::Plain { "p" } else { "v" };
        let mut lines = Vec::new();
        for (number, netns) in namespaces.iter().enumerate() {
            let netns = path(netns);
            for (way, device) in ["i", "o"].iter().zip(DEVICES) {
                let name = format!("{way}{letter}{number}");
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
                Kind::Vxlan => vxlan_devices(&netns)?,
                _ => addresses(&netns, DEVICES)?,
            }
            let index = |way| -> Result<u32> {
                Ok(Interface::by_name(&format!("{way}{letter}{number}"))?.index)
            };
            self.sinks.attach(index("o")?)?;
            let device = index("i")?;
            let headers = if kind == Kind::Vxlan { tunnelled(MAC, VNI) } else { plain() };
            let aims = [Some(Aim { device, port: None, headers }), None];
            let (specs, threads) = (Vec::new(), Vec::new());
            routers.push(Router { netns, number, aims, specs, threads });
        }
        Ok(routers)
    }

    /// A router with ports of this number and the next one.
    fn behind_ports(&mut self, number: u32) -> Result<Router> {
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
        self.ports.join(number, ports::Way::Outside(self.outside(0, number)))?;
        let far = Interface::by_name(EXTERNAL[0][1])?.index;
        let headers = tunnelled(self.externals[0].mac, number + 1);
        let near = Aim { device: ROOT_FIRST + number, port: Some(number), headers: plain() };
        let aims = [Some(near), Some(Aim { device: far, port: None, headers })];
        Ok(Router { netns, number, aims, specs, threads: Vec::new() })
    }

    fn outside(&self, side: usize, number: u32) -> Outside {
        let Interface { index, mac, .. } = self.externals[side];
        Outside { interface: index, mac, by: tunnel(side, number + 1), limit: None }
    }

    fn routers(&mut self, way: Way) -> &mut Vec<Router> {
        match way.kind() {
            Kind::Plain => &mut self.plain,
            Kind::Vxlan => &mut self.vxlan,
            Kind::Pdp => &mut self.pdp,
        }
    }

    /// Has the first `count` routers of a way's kind served by threads, charged as pdpd has them, or all by nobody's.
    /// Returns how many threads there are.
    pub fn set_threads(&mut self, way: Way, count: usize, cpu: usize) -> Result<usize> {
        let mut routers = std::mem::take(self.routers(way));
        let mut found = 0;
        let done = routers.iter_mut().enumerate().try_for_each(|(at, router)| {
            self.set_threads_of(router, way.series(), at < count, cpu)?;
            found += router.threads.len();
            Ok(())
        });
        *self.routers(way) = routers;
        done.map(|()| found)
    }

    fn set_threads_of(
        &mut self,
        router: &mut Router,
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
                false => self.ports.unserve(netns, spec)?,
            }
        }
        if let Some(first) = router.specs.first() {
            self.ports.power(first.vrouter, on.then_some(POWER))?;
        }
        for device in DEVICES.iter().filter(|_| router.specs.is_empty()) {
            set_threaded(netns, device, on)?;
            if on {
                let index = within(netns, || Interface::by_name(device))?.index;
                found.extend(threads(netns, index)?);
            }
        }
        let kind = kind.replace([' ', ','], "");
        for thread in found {
            // Those of before are in their cgroups until they have ended.
            self.cgroups.charge(&format!("{kind}{}/napi", router.number), thread.pid)?;
            let mut cpus = CpuSet::new();
            cpus.set(cpu)?;
            sched_setaffinity(Pid::from_raw(i32::try_from(thread.pid)?), &cpus)?;
            router.threads.push(thread.pid);
        }
        Ok(())
    }

    /// Has frames go this way through the first `count` routers, `1 << shift` to each in turn.
    fn prepare(&mut self, way: Way, count: usize, shift: u32) -> Result<()> {
        let at = usize::from(matches!(way, Way::Stack(Ends::Far) | Way::Short(Ends::Far)));
        let routers = self.routers(way).get(..count).context("routers")?;
        let aims: Vec<Aim> = routers.iter().filter_map(|it| it.aims[at].clone()).collect();
        let numbers: Vec<u32> = routers.iter().map(|router| router.number).collect();
        self.generator(way).aim(aims, shift, bytes(way))?;
        let (Way::Stack(ends) | Way::Short(ends)) = way else { return Ok(()) };
        let lease = if way == Way::Short(ends) { LEASE_MAX } else { Duration::ZERO };
        for number in numbers {
            self.ports.lend(number, lease, [NO_MTU; 2])?;
            let leave = match ends {
                Ends::Near => ports::Way::Port(number + 2),
                Ends::Far => ports::Way::Outside(self.outside(1, number)),
            };
            self.ports.join(number + 1, leave)?;
            self.ports.set_hop(number + 1, Some(Hop { mac: FROM_MAC, mtu: 1600 }))?;
        }
        Ok(())
    }

    fn generator(&self, way: Way) -> &Generator {
        let is_there = matches!(way, Way::Stack(Ends::Near) | Way::Short(Ends::Near));
        &self.generators[usize::from(is_there)]
    }

    /// Offers as many frames as go to the first `count` routers for some time.
    ///
    /// # Errors
    /// None came, or frames of PdP's routers went another way.
    pub fn offer(&mut self, way: Way, count: usize, shift: u32, time: Duration) -> Result<Passed> {
        let headers = if way.is_tunnelled() { tunnelled(MAC, VNI) } else { plain() };
        let bare = Aim { device: self.bare, port: None, headers };
        self.generators[0].aim(vec![bare], 0, bytes(way))?;
        let most = Load::Most;
        let [made, _, working, _] = self.measure(&self.generators[0], &[], most, time / 4)?;
        let bare_ns = working / made;
        self.prepare(way, count, shift)?;
        let threads: Vec<u32> =
            self.routers(way)[..count].iter().flat_map(|it| it.threads.clone()).collect();
        let clock = Clock::CpuTime { hz: 0.0 };
        self.generator(way).send(Load::Most, WARM_UP, &clock)?;
        let before = self.ways(way)?;
        let generator = self.generator(way);
        let [made, came, working, in_threads] = self.measure(generator, &threads, most, time)?;
        ensure!(came > 0.0, "of {made} frames none came");
        let after = self.ways(way)?;
        let [short, other] = [0, 1].map(|at| after[at].saturating_sub(before[at]));
        let is_so = match way {
            Way::Stack(_) => short == 0 && other > 0,
            Way::Short(_) => short > 0 && other <= short / 100,
            Way::Plain | Way::Vxlan => true,
        };
        ensure!(is_so, "{short} frames went the short way, {other} another");
        let rate_pps = came / time.as_secs_f64();
        if threads.is_empty() {
            let cpu_ns = (working - bare_ns * made) / came;
            return Ok(Passed { rate_pps, cpu_ns, threads_ns: 0.0, threads_half_ns: 0.0 });
        }
        let half = Load::Even(rate_pps / 2.0);
        let [_, fewer, _, meanwhile] = self.measure(self.generator(way), &threads, half, time)?;
        let threads_ns = in_threads / came;
        Ok(Passed {
            rate_pps,
            cpu_ns: working / made - bare_ns + threads_ns,
            threads_ns,
            threads_half_ns: meanwhile / fewer.max(1.0),
        })
    }

    /// Frames that went the short way, and others, at the first router's port.
    fn ways(&mut self, way: Way) -> Result<[u64; 2]> {
        if way.kind() != Kind::Pdp {
            return Ok([0; 2]);
        }
        let counters = self.ports.counters(self.pdp[0].number)?;
        // Frames may still be under way while they are read.
        let others = counters.to_vrouter.frames.saturating_sub(counters.ways.short);
        Ok([counters.ways.short, others])
    }

    /// Frames made and come, and CPU time of the generator with softirqs and of threads, nanoseconds. As if it took
    /// exactly this time.
    fn measure(
        &self,
        generator: &Generator,
        threads: &[u32],
        load: Load,
        time: Duration,
    ) -> Result<[f64; 4]> {
        let mut makers = meter::processes("comm", "ksoftirqd/");
        makers.push(generator.thread());
        let used = |pids: &[u32]| pids.iter().map(|pid| cpu_ns(*pid)).sum::<u64>();
        let clock = Clock::CpuTime { hz: 0.0 };
        thread::sleep(SETTLE);
        let (came, working, in_threads) = (self.sinks.came()?, used(&makers), used(threads));
        let sent = generator.send(load, time, &clock)?;
        let working = used(&makers).saturating_sub(working);
        thread::sleep(SETTLE);
        let came = self.sinks.came()?.saturating_sub(came);
        let in_threads = used(threads).saturating_sub(in_threads);
        let scale = time.as_secs_f64() / sent.seconds;
        Ok([sent.frames, came, working, in_threads].map(|count| count as f64 * scale))
    }
}

impl Drop for Field {
    fn drop(&mut self) {
        for way in [Way::Plain, Way::Vxlan, Way::Stack(Ends::Near)] {
            let _ = self.set_threads(way, 0, 0);
        }
        let _ = self.cgroups.remove("", END_MAX);
        self.cgroups.remove_if_empty("");
    }
}

/// The router of a [`Path`] of PdP.
const ROUTER: u32 = 1;

/// Two hosts with a router between, to run programs on: their interfaces are its neighbours.
#[derive(Debug)]
pub struct Path {
    /// The hosts: 10.1.0.2 and 10.2.0.2.
    pub hosts: [OwnedFd; 2],
    router: OwnedFd,
    /// With PdP's ports: host, router's two, host.
    pdp: Option<(Ports, Vec<PortSpec>, Cgroups)>,
    _place: Option<Place>,
}

impl Path {
    /// By veths.
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

    /// By PdP's ports, links inside the machine.
    pub fn pdp() -> Result<Self> {
        let place = Place::new()?;
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
            ports.join(a, ports::Way::Port(b))?;
            ports.join(b, ports::Way::Port(a))?;
        }
        let cgroups = Cgroups::new(&format!("pdp-bench-path-{}", std::process::id()))?;
        Ok(Self { hosts, router, pdp: Some((ports, specs, cgroups)), _place: Some(place) })
    }

    /// Lets frames go the short way for [`LEASE_MAX`], or not.
    pub fn lend(&self, short: bool) -> Result<()> {
        let Some((ports, ..)) = &self.pdp else { return Ok(()) };
        let lease = if short { LEASE_MAX } else { Duration::ZERO };
        Ok(ports.lend(ROUTER, lease, [NO_MTU; 2])?)
    }

    /// Has the router's ports of PdP served by threads, charged as pdpd has them, or in softirq; hosts' are always in
    /// softirq.
    pub fn set_threads(&mut self, on: bool) -> Result<()> {
        let Some((ports, specs, cgroups)) = &mut self.pdp else { return Ok(()) };
        let netns = self.router.as_fd();
        for spec in specs.iter().filter(|spec| spec.vrouter == ROUTER) {
            if !on {
                ports.unserve(netns, spec)?;
                continue;
            }
            for thread in ports.serve(netns, spec)? {
                cgroups.charge("path/napi", thread.pid)?;
            }
        }
        Ok(ports.power(ROUTER, on.then_some(POWER))?)
    }

    /// Segmentation offload of hosts and router, on veths.
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

impl Drop for Path {
    fn drop(&mut self) {
        let _ = self.set_threads(false);
        if let Some((_, _, cgroups)) = &self.pdp {
            let _ = cgroups.remove("", END_MAX);
            cgroups.remove_if_empty("");
        }
    }
}

/// Runs something in a network and a mount namespace of its own, which go with it.
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

/// Memory that the kernel uses for itself, bytes: objects, those of each CPU, and stacks.
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
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={}", path(netns))).arg(program);
    command
}

/// Has a router's devices do NAPI, and take frames that are redirected to them: `gro` once they are up.
const UP: &str =
    "ip link set eth0 up; ip link set eth1 up; ethtool -K eth0 gro on; ethtool -K eth1 gro on";

/// VNI of `vx0`, in a namespace of its own; that of `vx1` is the next one.
const VNI: u32 = 7;

const OWN_NETNS: &str = "/proc/thread-self/ns/net";

fn spec(number: u32, vrouter: u32, name: String) -> PortSpec {
    let (addresses, routes) = (Vec::new(), Vec::new());
    PortSpec { number, vrouter, name, mac: MAC, mtu: 1500, addresses, routes }
}

/// The tunnel of the side that frames come from, or of that where they go.
fn tunnel(side: usize, vni: u32) -> Encapsulation {
    let [local, remote] = OUTER[side].map(Into::into);
    Encapsulation::Vxlan(vxlan::Tunnel { local, remote, port: DISCARD_PORT, vni })
}

fn bytes(way: Way) -> usize {
    FRAME_BYTES + if way.is_tunnelled() { TUNNEL_BYTES } else { 0 }
}

/// Headers of a frame to a router.
fn plain() -> Vec<u8> {
    datagram(MAC, [[10, 1, 0, 2], [10, 2, 0, 2]], FRAME_BYTES)
}

/// The same in a tunnel.
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
    let udp = udp::Header { source_port, destination_port, length, checksum: 0 };
    let kind = ether::kind::IPV4;
    let ethernet = ether::Header { destination: to, source: FROM_MAC, kind };
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

/// Of this thread's namespace.
fn forwards() -> Result<()> {
    no_ipv6()?;
    fs::write("/proc/sys/net/ipv4/ip_forward", "1").context("IPv4 forwarding")
}

/// Addresses of a router, and the neighbour that its frames go to.
fn addresses(netns: &OwnedFd, [first, second]: [&str; 2]) -> Result<()> {
    let lines = [
        format!("addr add 10.1.0.1/16 dev {first}"),
        format!("addr add 10.2.0.1/16 dev {second}"),
        format!("neigh add 10.2.0.2 lladdr 02:00:00:00:00:03 dev {second} nud permanent"),
    ];
    batch_with(command(netns, "ip"), &lines)
}

/// A router's VXLAN devices, `vx0` and `vx1`.
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
    batch_with(command(netns, "ip"), &lines)?;
    addresses(netns, ["vx0", "vx1"])
}

/// Runs a shell line in a network namespace.
fn inside(netns: &OwnedFd, line: &str) -> Result<()> {
    let output = command(netns, "sh").args(["-ec", line]).output().context("nsenter")?;
    ensure!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Lines for ip(8), here.
fn batch(lines: &[String]) -> Result<()> {
    batch_with(Command::new("ip"), lines)
}

fn batch_with(mut ip: Command, lines: &[String]) -> Result<()> {
    let output = pdp_e2e::run(ip.args(["-batch", "-"]), &(lines.join("\n") + "\n"));
    ensure!(output.status.success(), "ip: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// CPU time of a task so far, nanoseconds; of one that has ended, none.
fn cpu_ns(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/schedstat")).unwrap_or_default();
    text.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0)
}
