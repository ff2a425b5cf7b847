//! A kernel vrouter uses the CPU time that it was given, by its
//! cgroup's account, in the real kernel. Needs root.

mod live;

use std::fs::File;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use live::{Live, Netns, Place, To, adds_up, eventually, isolated, run, thread_id};
use pdp_container::Limits;
use pdp_container::cgroup::Cgroups;
use pdp_net::interface::InterfaceInfo;
use pdp_net::ports::{
    KernelPortCounters, LEASE_MAX, LinkTarget, NO_MTU, PortSpec, Ports, Power, Reason,
};

/// Ingress ports; the next one is the egress port.
const IN: u32 = 4;

/// Attempts, since a flood may be too weak on a busy machine.
const TRIES: usize = 10;

/// Offset between the numbers of the router's ports and those of their far ends.
const FAR: u32 = 8;

/// Cgroups that are removed with the test.
struct Guard(Cgroups);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.remove("", Duration::from_secs(10));
        self.0.remove_if_empty("");
    }
}

/// Keeps other load from taking time from the router and, if cgroups have threads (version 1), from
/// the calling thread, which generates frames. The calling thread leaves the cgroup at the end,
/// since removing a cgroup kills its members.
struct Preferred(Option<PathBuf>);

impl Preferred {
    fn new(cgroups: &Cgroups) -> Self {
        let mut this = Self(None);
        for dir in cgroups.own().unwrap() {
            for (name, weight) in [("cpu.shares", "100000"), ("cpu.weight", "10000")] {
                let path = dir.join(name);
                if path.exists() {
                    std::fs::write(path, weight).unwrap();
                }
            }
            if dir.join("cpu.shares").exists() {
                cgroups.ensure_leaf("frames").unwrap();
                std::fs::write(dir.join("frames/tasks"), thread_id().to_string()).unwrap();
                this.0 = Some(dir.with_file_name("tasks"));
            }
        }
        this
    }
}

impl Drop for Preferred {
    fn drop(&mut self) {
        if let Some(tasks) = &self.0 {
            std::fs::write(tasks, thread_id().to_string()).unwrap();
        }
    }
}

fn spec(number: u32, vrouter: u32, name: String) -> PortSpec {
    let mac = [2, 0, 0, 0, 0, number as u8];
    PortSpec { number, vrouter, name, mac, mtu: 1500, addresses: vec![], routes: vec![] }
}

/// Router that forwards traffic from all ports to the last one.
struct Router {
    netns: Netns,
    specs: Vec<PortSpec>,
    to: Vec<To>,
}

impl Router {
    fn new(live: &mut Live, place: &Place, ports: &mut Ports) -> Self {
        let netns = Netns::new();
        run("echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6");
        netns.run("echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6");
        let here = File::open("/proc/thread-self/ns/net").unwrap();
        let (mut specs, mut to) = (Vec::new(), Vec::new());
        for number in 0..=IN {
            let near = PortSpec {
                addresses: vec![format!("10.{number}.0.1/16").parse().unwrap()],
                ..spec(number, 0, format!("eth{number}"))
            };
            let far = spec(number + FAR, number + FAR, format!("far{number}"));
            ports.make(netns.fd(), &near).unwrap();
            ports.make(here.as_fd(), &far).unwrap();
            ports.join(near.number, LinkTarget::Port(far.number)).unwrap();
            ports.join(far.number, LinkTarget::Port(near.number)).unwrap();
            run(&format!("ip link set {} arp off", far.name));
            let index = InterfaceInfo::by_name(&far.name).unwrap().index;
            let (source, destination) = ([10, number as u8, 0, 2], [10, IN as u8, 0, 2]);
            to.push(To { index, mac: near.mac, source, destination, port: None });
            specs.push(near);
        }
        to.pop();
        netns.run(&format!(
            "echo 1 > /proc/sys/net/ipv4/ip_forward
             ip neigh add 10.{IN}.0.2 lladdr 02:00:00:00:00:03 dev eth{IN}"
        ));
        live.replace("sink", &place.pins.dir().join(format!("{}/in", IN + FAR)));
        Self { netns, specs, to }
    }

    /// Some ten microseconds a frame.
    fn slow_down(&self) {
        let rules = "for at in $(seq 1000); do \
                     echo add rule ip slow forward ip saddr 192.0.2.1 udp dport $at counter drop; done";
        self.netns.run(&format!(
            "( echo add table ip slow
               echo 'add chain ip slow forward {{ type filter hook forward priority 0; }}'
               {rules} ) > /tmp/pdp-power-{0}; nft -f /tmp/pdp-power-{0}; rm /tmp/pdp-power-{0}",
            std::process::id()
        ));
    }

    fn counters(&self, ports: &Ports) -> Vec<KernelPortCounters> {
        self.specs.iter().map(|spec| ports.counters(spec.number).unwrap()).collect()
    }
}

#[test]
fn vrouter_stays_within_its_cpu_time() {
    let guard = Guard(Cgroups::new(&format!("pdp-power-{}", std::process::id())).unwrap());
    isolated(|| {
        let cgroups = &guard.0;
        let (mut live, place) = (Live::new(64), Place::new());
        let mut ports = place.open();
        let router = Router::new(&mut live, &place, &mut ports);
        router.slow_down();
        let _preferred = Preferred::new(cgroups);
        cgroups.ensure("red/r1", &Limits::default()).unwrap();
        for spec in &router.specs {
            for thread in ports.serve(router.netns.fd(), spec).unwrap() {
                cgroups.charge("red/r1/napi", thread.pid).unwrap();
                assert!(thread.is_alive());
            }
        }
        let refused = |ports: &Ports| -> u64 {
            router.counters(ports).iter().map(|it| it.dropped(Reason::Power)).sum()
        };
        let flood = |ports: &mut Ports, by: usize, millicores: Option<u32>| {
            ports.power(0, millicores.map(|millicores| Power { millicores })).unwrap();
            live.send_to(&router.to[..by], 0);
            live.set_rate(100_000);
            // The burst.
            live.generate(Duration::from_millis(100));
            let before = (cgroups.usage("red/r1").unwrap().cpu_ns, live.counters(), refused(ports));
            let start = Instant::now();
            live.generate(Duration::from_millis(2000));
            let seconds = start.elapsed().as_secs_f64();
            let used = cgroups.usage("red/r1").unwrap().cpu_ns - before.0;
            let now = live.counters();
            let rate = |at: usize| (now[at] - before.1[at]) as f64 / seconds;
            let cores = used as f64 / 1e9 / seconds;
            println!(
                "{millicores:?} by {by} ports: {cores:.3} cores, {:.0} of {:.0} frames/s",
                rate(1),
                rate(0)
            );
            assert!(rate(1) > 1000.0, "nothing comes out");
            (cores, refused(ports) - before.2)
        };
        for (by, millicores) in [(1, 200), (4, 200), (1, 500), (4, 500)] {
            let budget = f64::from(millicores) / 1000.0;
            // Never more than the limit, and as much, unless other load slows the generator down.
            let as_much = (0..TRIES).any(|_| {
                let (cores, refused) = flood(&mut ports, by, Some(millicores));
                assert!(cores < 1.2 * budget, "{cores} cores used of {budget}");
                assert!(refused > 0);
                cores > 0.8 * budget
            });
            assert!(as_much, "less than {budget} cores used");
        }
        // As much as there is.
        let more = (0..TRIES).any(|_| {
            let (cores, refused) = flood(&mut ports, 4, None);
            assert_eq!(refused, 0);
            cores > 0.6
        });
        assert!(more, "no more is used without a limit");
        // Every frame that arrived is accounted for.
        let read = || router.counters(&ports);
        let mut last = read();
        eventually("at rest", || {
            std::thread::sleep(Duration::from_millis(50));
            let before = std::mem::replace(&mut last, read());
            before == last
        });
        last.iter().for_each(adds_up);
        // Frames that no thread serves are charged to nobody.
        for spec in &router.specs {
            ports.serve_by_softirq(router.netns.fd(), spec).unwrap();
        }
        let (cores, refused) = flood(&mut ports, 4, Some(200));
        assert!(cores < 0.005 && refused == 0, "{cores} cores, {refused} refused");
        let none = ports.power(0, Some(Power { millicores: 0 })).unwrap_err();
        assert!(none.to_string().contains("power of vrouter 0"), "{none}");
        assert!(ports.power(u32::MAX, None).is_err());
    });
}

/// The XDP bypass is charged as well.
#[test]
fn xdp_bypass_is_charged_to_the_vrouter() {
    let guard = Guard(Cgroups::new(&format!("pdp-short-{}", std::process::id())).unwrap());
    isolated(|| {
        let cgroups = &guard.0;
        let (mut live, place) = (Live::new(64), Place::new());
        let mut ports = place.open();
        let router = Router::new(&mut live, &place, &mut ports);
        let _preferred = Preferred::new(cgroups);
        for spec in &router.specs {
            for thread in ports.serve(router.netns.fd(), spec).unwrap() {
                cgroups.charge("red/r1/napi", thread.pid).unwrap();
            }
        }
        ports.activate_bypass(0, LEASE_MAX, [NO_MTU; 2]).unwrap();
        ports.power(0, Some(Power { millicores: 100 })).unwrap();
        live.send_to(&router.to[..1], 0);
        live.set_rate(0);
        live.generate(Duration::from_millis(100));
        let flood = || {
            let before = (cgroups.usage("red/r1").unwrap().cpu_ns, live.counters());
            let start = Instant::now();
            live.generate(Duration::from_millis(2000));
            let seconds = start.elapsed().as_secs_f64();
            let used = cgroups.usage("red/r1").unwrap().cpu_ns - before.0;
            let cores = used as f64 / 1e9 / seconds;
            let rate = (live.counters()[1] - before.1[1]) as f64 / seconds;
            println!("{cores:.3} cores of 0.1, {rate:.0} frames/s");
            assert!(cores < 0.12, "{cores} cores used of 0.1");
            cores > 0.08
        };
        assert!((0..TRIES).any(|_| flood()));
        assert!(ports.counters(0).unwrap().bypass.bypassed > 1000);
    });
}
