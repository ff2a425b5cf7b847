//! What a frame costs in a vrouter whose namespace forwards, in CPU time, and the most that goes a second: by
//! plain kernel forwarding from veth to veth, by the whole stack behind PdP's ports, by the short way; in softirq and
//! in NAPI's kernel threads, each in a cgroup of its own; with frames to so many namespaces in turn.
//!
//! ```text
//! cargo run -p pdp-net --example measure-kernel [-- COUNTS [ROUNDS [BURST [WAYS]]]]
//! ```
//!
//! `COUNTS` are numbers of namespaces, powers of two (`1,16,64,256`), `BURST` as many frames as go to one before
//! the next (1; a power of two), `WAYS` some of `plain`, `stack`, `short` and `tunnel` (the short way, and out of one
//! interface by a VXLAN tunnel of each namespace), and the same with `-threads`. A round measures each once; what is printed is the median of the rounds, with the least and the most. Frames have
//! 64 bytes and are made by XDP on one CPU; the threads are on another. They come to a port as from another one's
//! program, by its root end, and go to the far port of another, whose program is one that drops them. So measured is
//! all that is done for a vrouter, but not what is done to send to it.
//!
//! First as many frames as go; then, for threads, half as many, one after the other: they sleep between frames then.
//! What making a frame costs, and dropping it, is measured by a pair of devices without a namespace between, and taken
//! off; what remains of the maker's time is softirqs, or handing frames to threads, also those that find a full ring.
//! Needs root and 256 MB per 100 namespaces.

#[path = "../tests/live/mod.rs"]
mod live;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use live::{Live, Netns, Place, To, cpu_ns, isolated, ksoftirqd, run, thread_id};
use nix::sched::{CloneFlags, CpuSet, sched_setaffinity, setns};
use nix::unistd::Pid;
use pdp_container::cgroup::Cgroups;
use pdp_net::interface::Interface;
use pdp_net::napi::{set_threaded, threads};
use pdp_net::ports::{Hop, LEASE_MAX, NO_MTU, Outside, PortSpec, Ports, Way};
use pdp_wire::tunnel::Encapsulation;
use pdp_wire::vxlan;

const TIME: Duration = Duration::from_millis(400);

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];

/// RFC 863.
const DISCARD_PORT: u16 = 9;

const DEVICES: [&str; 2] = ["eth0", "eth1"];

/// Where the root ends of ports are, by their numbers.
const ROOT_FIRST: u32 = 4096;

/// A router, and the device that frames for it go into.
struct Vrouter {
    netns: Netns,
    to: To,
    /// With PdP's ports.
    specs: Vec<PortSpec>,
    threads: Vec<u32>,
}

const SETTINGS: &str =
    "for it in all default; do echo 1 > /proc/sys/net/ipv6/conf/$it/disable_ipv6; done
    echo 1 > /proc/sys/net/ipv4/ip_forward";

const ADDRESSES: &str = "ip addr add 10.1.0.1/16 dev eth0; ip addr add 10.2.0.1/16 dev eth1
    ip neigh add 10.2.0.2 lladdr 02:00:00:00:00:03 dev eth1 nud permanent";

impl Vrouter {
    fn plain(live: &mut Live, number: usize) -> Self {
        let netns = Netns::new();
        let name = format!("p{number}");
        netns.run(SETTINGS);
        run(&format!(
            "ip link add i{name} type veth peer name eth0 address 02:00:00:00:00:02 netns {0}
             ip link add o{name} type veth peer name eth1 netns {0}
             for it in i{name} o{name}; do ip link set $it arp off up; done",
            netns.pid()
        ));
        netns.run(&format!(
            "ip link set eth0 up; ip link set eth1 up; {ADDRESSES}
             ethtool -K eth0 gro on; ethtool -K eth1 gro on"
        ));
        live.attach("sink", Interface::by_name(&format!("o{name}")).unwrap().index);
        let index = Interface::by_name(&format!("i{name}")).unwrap().index;
        Self { netns, to: to(index, None), specs: Vec::new(), threads: Vec::new() }
    }

    /// Ports 4 * `number` and the next one, and that at the other end of the link of the latter.
    fn of_ports(live: &mut Live, place: &Place, ports: &mut Ports, number: usize) -> Self {
        let netns = Netns::new();
        netns.run(SETTINGS);
        let vrouter = number as u32 * 4;
        let spec = |number: u32, vrouter: u32, name: String| PortSpec {
            number,
            vrouter,
            name,
            mac: MAC,
            mtu: 1500,
            addresses: vec![],
            routes: vec![],
        };
        let specs: Vec<_> = (vrouter..)
            .zip(DEVICES)
            .map(|(number, device)| spec(number, vrouter, device.to_owned()))
            .collect();
        for spec in &specs {
            ports.make(netns.fd(), spec).unwrap();
        }
        let far = spec(vrouter + 2, vrouter + 2, format!("far{number}"));
        let here = File::open("/proc/thread-self/ns/net").unwrap();
        ports.make(here.as_fd(), &far).unwrap();
        ports.join(vrouter + 1, Way::Port(far.number)).unwrap();
        live.replace("sink", &place.pins.dir().join(format!("{}/in", far.number)));
        netns.run(ADDRESSES);
        let to = to(ROOT_FIRST + vrouter, Some(vrouter));
        Self { netns, to, specs, threads: Vec::new() }
    }

    fn set_threads(&mut self, on: bool, ports: &Ports, cgroups: &Cgroups, path: &str) {
        if self.threads.is_empty() != on {
            return;
        }
        self.threads.clear();
        let mut found = Vec::new();
        for spec in &self.specs {
            match on {
                true => found.extend(ports.serve(self.netns.fd(), spec).unwrap()),
                false => ports.unserve(self.netns.fd(), spec).unwrap(),
            }
        }
        for device in DEVICES.iter().filter(|_| self.specs.is_empty()) {
            set_threaded(self.netns.fd(), device, on).unwrap();
            if on {
                found.extend(threads(self.netns.fd(), self.netns.index(device)).unwrap());
            }
        }
        // Those of before are in their cgroups until they have ended.
        for thread in found {
            cgroups
                .charge(path, thread.pid)
                .unwrap_or_else(|error| panic!("{error}: {:?}", std::error::Error::source(&error)));
            let mut cpus = CpuSet::new();
            cpus.set(1).unwrap();
            sched_setaffinity(Pid::from_raw(thread.pid as i32), &cpus).unwrap();
            self.threads.push(thread.pid);
        }
    }
}

/// A tunnel whose frames are such as are counted.
fn outside(interface: &Interface, vni: u32) -> Outside {
    let (local, remote) = ([10, 3, 0, 1].into(), [10, 3, 0, 2].into());
    let by = Encapsulation::Vxlan(vxlan::Tunnel { local, remote, port: DISCARD_PORT, vni });
    Outside { interface: interface.index, mac: interface.mac, by, limit: None }
}

fn to(index: u32, port: Option<u32>) -> To {
    To { index, port, mac: MAC, source: [10, 1, 0, 2], destination: [10, 2, 0, 2] }
}

/// Of one run.
struct Sample {
    /// Frames that came, a second.
    rate: f64,
    /// CPU time a frame, ns: of who makes frames with softirqs, and of threads.
    maker_ns: f64,
    threads_ns: f64,
}

fn sample(live: &Live, threads: &[u32], pps: u64) -> Sample {
    live.set_rate(pps);
    let softirqs = ksoftirqd();
    let all = |pids: &[u32]| pids.iter().map(|pid| cpu_ns(*pid)).sum::<u64>();
    let own = thread_id();
    // The accounts of threads that sleep are written when they do.
    std::thread::sleep(Duration::from_millis(20));
    let (before, start) = (live.counters()[1], Instant::now());
    let (maker, working) = (cpu_ns(own) + all(&softirqs), all(threads));
    live.generate(TIME);
    let seconds = start.elapsed().as_secs_f64();
    let maker = cpu_ns(own) + all(&softirqs) - maker;
    std::thread::sleep(Duration::from_millis(20));
    let frames = (live.counters()[1] - before).max(1) as f64;
    let working = all(threads) - working;
    Sample {
        rate: frames / seconds,
        maker_ns: maker as f64 / frames,
        threads_ns: working as f64 / frames,
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let list = |at: usize, otherwise: &str| -> Vec<String> {
        let text = arguments.get(at).cloned().unwrap_or_else(|| otherwise.to_owned());
        text.split(',').map(str::to_owned).collect()
    };
    let counts: Vec<usize> = list(0, "1,16,64,256").iter().map(|it| it.parse().unwrap()).collect();
    let rounds: usize = list(1, "3")[0].parse().unwrap();
    let burst: u32 = list(2, "1")[0].parse().unwrap();
    let ways = list(
        3,
        "plain,stack,short,tunnel,plain-threads,stack-threads,short-threads,tunnel-threads",
    );
    let most = counts.iter().copied().max().unwrap();
    let cgroups = Cgroups::new(&format!("pdp-measure-{}", std::process::id())).unwrap();
    isolated(|| {
        let mut cpus = CpuSet::new();
        cpus.set(0).unwrap();
        sched_setaffinity(Pid::from_raw(0), &cpus).unwrap();
        let mut live = Live::new(64);
        let place = Place::new();
        let mut ports = place.open();
        run("for it in all default; do echo 1 > /proc/sys/net/ipv6/conf/$it/disable_ipv6; done");
        run("ip link add base type veth peer name end; ip link set base up; ip link set end up");
        live.attach("sink", Interface::by_name("end").unwrap().index);
        let base = Interface::by_name("base").unwrap();
        let count = |of: &[&str]| {
            let needs = ways.iter().any(|way| of.iter().any(|of| way.starts_with(of)));
            if needs { most } else { 0 }
        };
        let mut plain: Vec<_> =
            (0..count(&["plain"])).map(|number| Vrouter::plain(&mut live, number)).collect();
        let mut others: Vec<_> = (0..count(&["stack", "short", "tunnel"]))
            .map(|number| Vrouter::of_ports(&mut live, &place, &mut ports, number))
            .collect();
        let here: OwnedFd = File::open("/proc/thread-self/ns/net").unwrap().into();
        let enter =
            |netns: std::os::fd::BorrowedFd<'_>| setns(netns, CloneFlags::CLONE_NEWNET).unwrap();
        let mut results: BTreeMap<(usize, usize), Vec<[f64; 4]>> = BTreeMap::new();
        for round in 0..rounds {
            for count in &counts {
                for (at, way) in ways.iter().enumerate() {
                    // Making a frame and dropping it.
                    enter(here.as_fd());
                    live.send_to(&[to(base.index, None)], 0);
                    let bare = sample(&live, &[], 0).maker_ns;
                    let is_plain = way.starts_with("plain");
                    let routers = if is_plain { &mut plain } else { &mut others };
                    let routers = &mut routers[..*count];
                    for (number, router) in routers.iter_mut().enumerate() {
                        let path = format!("{}{number}/napi", way.split('-').next().unwrap());
                        router.set_threads(way.ends_with("threads"), &ports, &cgroups, &path);
                        if let [first, last] = &router.specs[..] {
                            let short = !way.starts_with("stack");
                            let lease = if short { LEASE_MAX } else { Duration::ZERO };
                            ports.lend(first.vrouter, lease, [NO_MTU; 2]).unwrap();
                            let by = match way.starts_with("tunnel") {
                                true => Way::Outside(outside(&base, number as u32)),
                                false => Way::Port(last.number + 1),
                            };
                            ports.join(last.number, by).unwrap();
                            let hop = Hop { mac: MAC, mtu: 1500 };
                            ports.set_hop(last.number, Some(hop)).unwrap();
                        }
                    }
                    if !is_plain {
                        enter(ports.netns());
                    }
                    let to: Vec<To> = routers.iter().map(|router| router.to).collect();
                    live.send_to(&to, burst.trailing_zeros());
                    let threads: Vec<u32> =
                        routers.iter().flat_map(|router| router.threads.clone()).collect();
                    // To warm up.
                    live.set_rate(0);
                    live.call(20_000);
                    let full = sample(&live, &threads, 0);
                    let sparse = match threads.is_empty() {
                        true => 0.0,
                        false => sample(&live, &threads, (full.rate / 2.0) as u64).threads_ns,
                    };
                    let maker = full.maker_ns - bare;
                    let values = [full.rate, maker + full.threads_ns, full.threads_ns, sparse];
                    eprintln!(
                        "{round} {count} {way}: {:.0} frames/s, {:.0} ns a frame, of which threads {:.0}; with \
                         half as many threads {sparse:.0}; to make one {bare:.0}",
                        values[0], values[1], values[2]
                    );
                    results.entry((*count, at)).or_default().push(values);
                    for router in routers.iter_mut() {
                        router.set_threads(false, &ports, &cgroups, "none");
                    }
                }
            }
        }
        enter(here.as_fd());
        println!(
            "namespaces  way                        frames/s          ns a frame       of it threads  \
             threads, half as many"
        );
        for ((count, at), samples) in &results {
            let of = |which: usize| {
                let mut values: Vec<f64> = samples.iter().map(|sample| sample[which]).collect();
                values.sort_by(f64::total_cmp);
                let [least, middle, most] =
                    [0, values.len() / 2, values.len() - 1].map(|at| values[at]);
                format!("{middle:.0} ({least:.0} to {most:.0})")
            };
            println!(
                "{count:>10}  {:<14} {:>26} {:>20} {:>18} {:>18}",
                ways[*at],
                of(0),
                of(1),
                of(2),
                of(3)
            );
        }
    });
    let _ = cgroups.remove("", Duration::from_secs(20));
    cgroups.remove_if_empty("");
}
