//! NAPI kernel threads and the accounting of their work, in the real kernel. Needs root.

mod live;

use std::time::{Duration, Instant};

use live::{Live, Netns, To, eventually, isolated, run};
use pdp_container::Limits;
use pdp_container::cgroup::Cgroups;
use pdp_net::Error;
use pdp_net::ethtool;
use pdp_net::interface::InterfaceInfo;
use pdp_net::napi::{is_threaded, queues, set_threaded, threads};
use pdp_net::netns::within;

/// Makes a router with ends `eth0` and `eth1` in a namespace, and their far ends `in0` and `out0`
/// here. Frames for 10.2.0.2 that enter one leave through the other.
fn router(live: &mut Live) -> Netns {
    let guest = Netns::new();
    run(&format!(
        "ip link add in0 type veth peer name eth0 netns {0}
         ip link add out0 type veth peer name eth1 netns {0}
         ip link set in0 up; ip link set out0 up",
        guest.pid()
    ));
    guest.run(
        "ip link set eth0 address 02:00:00:00:00:02; ip link set eth0 up; ip link set eth1 up
         ip addr add 10.1.0.1/16 dev eth0; ip addr add 10.2.0.1/16 dev eth1
         ip neigh add 10.2.0.2 lladdr 02:00:00:00:00:03 dev eth1
         echo 1 > /proc/sys/net/ipv4/ip_forward
         ethtool -K eth0 gro on",
    );
    live.attach("sink", InterfaceInfo::by_name("out0").unwrap().index);
    let index = InterfaceInfo::by_name("in0").unwrap().index;
    let (source, destination) = ([10, 1, 0, 2], [10, 2, 0, 2]);
    live.send_to(&[To { index, mac: [2, 0, 0, 0, 0, 2], source, destination, port: None }], 0);
    guest
}

/// Attempts, since a flood may be too weak on a busy machine.
const TRIES: usize = 10;

/// Cgroups that are removed with the test.
struct Guard(Cgroups);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.remove("", Duration::from_secs(10));
        self.0.remove_if_empty("");
    }
}

#[test]
fn napi_work_is_charged_and_limited_by_cgroup() {
    let guard = Guard(Cgroups::new(&format!("pdp-napi-{}", std::process::id())).unwrap());
    isolated(|| {
        let cgroups = &guard.0;
        let mut live = Live::new(64);
        let guest = router(&mut live);
        // Some ten microseconds a frame.
        let rules = "for at in $(seq 1000); do \
                     echo add rule ip slow forward ip saddr 192.0.2.1 udp dport $at counter drop; done";
        guest.run(&format!(
            "( echo add table ip slow
               echo 'add chain ip slow forward {{ type filter hook forward priority 0; }}'
               {rules} ) > /tmp/pdp-napi-{0}; nft -f /tmp/pdp-napi-{0}; rm /tmp/pdp-napi-{0}",
            std::process::id()
        ));
        let limits = Limits { cpu_cores: Some(0.2), ..Limits::default() };
        cgroups.ensure("red/r1", &limits).unwrap();
        // Floods beyond the limit, with and without threads.
        let flood = |mode: &str| -> (f64, f64) {
            let before = (cgroups.usage("red/r1").unwrap().cpu_ns, live.counters()[1]);
            let made = live.counters()[0];
            let start = Instant::now();
            live.set_rate(60_000);
            live.generate(Duration::from_millis(1500));
            let seconds = start.elapsed().as_secs_f64();
            let (used, received) =
                (cgroups.usage("red/r1").unwrap().cpu_ns, live.counters()[1] - before.1);
            let cores = (used - before.0) as f64 / 1e9 / seconds;
            let made = (live.counters()[0] - made) as f64 / seconds;
            let rate = received as f64 / seconds;
            println!("{mode}: {cores:.3} cores in the cgroup, {rate:.0} of {made:.0} frames/s");
            (cores, received as f64)
        };
        let (cores, received) = flood("softirq");
        assert!(
            cores < 0.005 && received > 1000.0,
            "{cores} cores are charged, {received} frames came"
        );

        set_threaded(guest.fd(), "eth0", true).unwrap();
        let found = threads(guest.fd(), guest.index("eth0")).unwrap();
        assert!(!found.is_empty());
        for thread in &found {
            cgroups.charge("red/r1/napi", thread.pid).unwrap();
            assert!(thread.is_alive());
        }
        let (cores, received) = flood("threads");
        assert!(
            cores > 0.005 && received > 100.0,
            "{cores} cores are charged, {received} frames came"
        );
        if kernel() < (6, 18) {
            // The upper bound matters. How far the use stays below it depends on other load here.
            assert!(cores < 0.3, "{cores} cores used of 0.2");
        }
        set_threaded(guest.fd(), "eth0", false).unwrap();
        let (cores, _) = flood("softirq again");
        assert!(cores < 0.005, "{cores} cores are charged without threads");
    });
}

/// Version of the kernel.
fn kernel() -> (u32, u32) {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap(), numbers.next().unwrap())
}

/// Pins the calling thread to this CPU.
fn pin(cpu: usize) {
    let mut cpus = nix::sched::CpuSet::new();
    cpus.set(cpu).unwrap();
    nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &cpus).unwrap();
}

#[test]
fn cpu_weights_hold_between_napi_and_processes() {
    let guard = Guard(Cgroups::new(&format!("pdp-weights-{}", std::process::id())).unwrap());
    isolated(|| {
        let cgroups = &guard.0;
        let mut live = Live::new(64);
        let guest = router(&mut live);
        let mut hog =
            std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        for (vnet, weight) in [("red", 200), ("blue", 800)] {
            let cpu_weight = Some(weight);
            let limits = Limits { cpu_weight, cpus: Some("1".into()), ..Limits::default() };
            cgroups.ensure(vnet, &limits).unwrap();
        }
        cgroups.enter("blue/hog", hog.id()).unwrap();
        set_threaded(guest.fd(), "eth0", true).unwrap();
        for thread in threads(guest.fd(), guest.index("eth0")).unwrap() {
            cgroups.charge("red/napi", thread.pid).unwrap();
        }
        pin(0);
        let used = || ["red", "blue"].map(|vnet| cgroups.usage(vnet).unwrap().cpu_ns as f64);
        live.set_rate(0);
        let mut frames = Vec::new();
        // Other load takes time first from the frames' thread, which
        // sleeps and wakes, and from the generator.
        let weighted = (0..TRIES).any(|_| {
            let before = used();
            live.generate(Duration::from_secs(2));
            let after = used();
            let [red, blue] = [after[0] - before[0], after[1] - before[1]];
            frames.push(red / (red + blue));
            (0.05..0.3).contains(frames.last().unwrap())
        });
        hog.kill().unwrap();
        hog.wait().unwrap();
        println!("of what both had, frames had {frames:.3?}");
        assert!(weighted && frames.iter().all(|had| *had < 0.3), "{frames:.3?}");
    });
}

#[test]
fn finds_the_napi_threads_of_an_interface() {
    isolated(|| {
        let (a, b) = (Netns::new(), Netns::new());
        for (name, netns) in [("a0", &a), ("b0", &b)] {
            // Two queues each, and names that identify nothing.
            let pid = netns.pid();
            run(&format!(
                "ip link add {name} numtxqueues 2 numrxqueues 2 type veth \
                 peer name eth0 numtxqueues 2 numrxqueues 2 netns {pid}; ip link set {name} up"
            ));
            let early = set_threaded(netns.fd(), "eth0", true).unwrap_err();
            assert!(matches!(early, Error::Io { .. }), "{early}");
            // Read-only, as guests have it.
            netns.run("mount -t sysfs -o ro none /sys");
        }
        let index = [&a, &b].map(|netns| netns.index("eth0"));
        let pids = |netns: &Netns, index| -> Vec<u32> {
            threads(netns.fd(), index).unwrap().iter().map(|thread| thread.pid).collect()
        };
        assert!(pids(&a, index[0]).is_empty(), "none while it is down");
        for netns in [&a, &b] {
            netns.run("ip link set eth0 up; ethtool -K eth0 gro on");
            set_threaded(netns.fd(), "eth0", true).unwrap();
            assert!(is_threaded(netns.fd(), "eth0").unwrap());
        }
        let (of_a, of_b) = (pids(&a, index[0]), pids(&b, index[1]));
        assert_eq!((of_a.len(), of_b.len()), (2, 2));
        assert!(of_a.iter().all(|pid| !of_b.contains(pid)));
        for pid in of_a.iter().chain(&of_b) {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap();
            assert!(name.starts_with("napi/eth0-"), "{name}");
        }

        let start = Instant::now();
        (0..100).for_each(|_| _ = queues(a.fd(), index[0]).unwrap());
        let asked = start.elapsed() / 100;
        let start = Instant::now();
        (0..100).for_each(|_| set_threaded(a.fd(), "eth0", true).unwrap());
        println!("asked in {asked:?}, set in {:?}", start.elapsed() / 100);

        // Another name changes nothing.
        a.run("ip link set eth0 name kworker");
        assert_eq!(pids(&a, index[0]), of_a);
        // Down and up: others.
        let handles = threads(a.fd(), index[0]).unwrap();
        a.run("ip link set kworker down");
        eventually("they have ended", || handles.iter().all(|thread| !thread.is_alive()));
        assert!(pids(&a, index[0]).is_empty());
        a.run("ip link set kworker up");
        assert!(pids(&a, index[0]).iter().all(|pid| !of_a.contains(pid)));
        // Turned off: none, but a queue.
        set_threaded(a.fd(), "kworker", false).unwrap();
        assert!(!is_threaded(a.fd(), "kworker").unwrap());
        let left = queues(a.fd(), index[0]).unwrap();
        println!("turned off: {left:?}");
        assert!(left.len() == 2 && left.iter().all(|queue| queue.thread.is_none()));
        set_threaded(a.fd(), "kworker", true).unwrap();
        assert_eq!(pids(&a, index[0]).len(), 2);
        // Gone.
        a.run("ip link del kworker");
        assert!(queues(a.fd(), index[0]).is_err());
        let none = set_threaded(a.fd(), "kworker", true);
        assert!(matches!(none, Err(Error::NoInterface(_))), "{none:?}");
        assert_eq!(pids(&b, index[1]), of_b);
        within(b.fd(), || ethtool::aggregation_off("eth0")).unwrap();
        assert_eq!(queues(b.fd(), index[1]).unwrap(), []);
    });
}
