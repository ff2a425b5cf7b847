//! Guests with the real runc, FRR, cgroups and kernel. Needs root.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use pdp_container::{
    Bind, Command, Error, File, GuestSpec, HelperSpec, Limits, Owned, Paths, Profile, Restart,
    Root, Runtime, State, UserRange,
};

const GRACE: Duration = Duration::from_secs(10);
const EVENTUALLY: Duration = Duration::from_secs(60);
const BASE: u32 = 700_000;

static COUNT: AtomicU32 = AtomicU32::new(0);

/// A runtime of its own, which leaves nothing, also when a test fails.
struct Fixture {
    runtime: Runtime,
    cgroup: String,
    dir: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o711)).unwrap();
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let cgroup = format!("pdp-container-{}-{count}", std::process::id());
        let runtime = Runtime::new(paths(dir.path(), &cgroup)).unwrap();
        Self { runtime, cgroup, dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn spec(&self, profile: Profile, commands: &[&[&str]]) -> GuestSpec {
        let id = format!("{}-{}", self.cgroup, COUNT.fetch_add(1, Ordering::Relaxed));
        GuestSpec {
            dir: self.path(&id),
            id,
            cgroup: "red/r1".into(),
            root: Root::Host,
            profile,
            users: UserRange { base: BASE, length: 65_536 },
            uid: if matches!(profile, Profile::Forwarding { .. }) { 1000 } else { 0 },
            hostname: "r1".into(),
            files: vec![],
            binds: vec![],
            commands: commands.iter().map(|argv| command(argv, Restart::Never)).collect(),
            env: BTreeMap::new(),
            sysctls: BTreeMap::new(),
            limits: Limits::default(),
            log_bytes_max: 1 << 20,
        }
    }

    fn run(&self, spec: &GuestSpec) -> pdp_container::Process {
        let process = self.runtime.create(spec, &[]).unwrap();
        self.runtime.start(&spec.dir).unwrap();
        process
    }

    fn exec(&self, spec: &GuestSpec, script: &str) -> (bool, String) {
        let argv = ["sh", "-c", script].map(OsString::from);
        let command = self.runtime.exec_command(&spec.dir, &argv, false, &BTreeMap::new());
        let output = command.unwrap().output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.success(), text + &String::from_utf8_lossy(&output.stderr))
    }

    /// Runs a script in a forwarding guest until it ends, and returns what it wrote.
    fn forwarding(&self, tap: bool, script: &str) -> (Option<i32>, String) {
        let spec = self.spec(Profile::Forwarding { tap }, &[&["bash", "-c", script]]);
        self.run(&spec);
        let code = self.exit(&spec.dir);
        let log = log(&spec.dir);
        self.runtime.delete(&spec.dir).unwrap();
        (code, log)
    }

    fn exit(&self, dir: &Path) -> Option<i32> {
        let mut state = State::Absent;
        eventually("it ends", || {
            state = self.runtime.state(dir).unwrap();
            matches!(state, State::Exited(_))
        });
        match state {
            State::Exited(Some(exit)) => exit.code,
            _ => panic!("{state:?}"),
        }
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        for found in self.runtime.list(self.dir.path()).unwrap() {
            if let Err(error) = self.runtime.delete(found.dir()) {
                eprintln!("{error}");
            }
        }
        let _ = self.runtime.cgroups().remove("", GRACE);
    }
}

fn paths(dir: &Path, cgroup: &str) -> Paths {
    Paths {
        runc: "/usr/sbin/runc".into(),
        shim: env!("CARGO_BIN_EXE_pdp-shim").into(),
        init: env!("CARGO_BIN_EXE_pdp-init").into(),
        runc_root: dir.join("runc"),
        images: dir.join("images"),
        cgroup: cgroup.into(),
    }
}

fn command(argv: &[&str], restart: Restart) -> Command {
    Command { argv: argv.iter().map(|word| word.to_string()).collect(), restart }
}

fn file(path: &str, content: &str, writable: bool) -> File {
    let (path, content) = (path.into(), content.into());
    File { path, content, mode: 0o640, owner: Owned::ROOT, writable }
}

fn log(dir: &Path) -> String {
    fs::read_to_string(dir.join("log")).unwrap_or_default()
}

fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + EVENTUALLY;
    while !condition() {
        assert!(Instant::now() < deadline, "not within {EVENTUALLY:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn named(user: &str, group: Option<&str>) -> Owned {
    Owned::Named { user: user.into(), group: group.map(str::to_owned) }
}

#[test]
fn frr_runs_in_a_control_guest() {
    let fixture = Fixture::new();
    let zebra: &[&str] = &["/usr/lib/frr/zebra", "-A", "127.0.0.1"];
    let staticd: &[&str] = &["/usr/lib/frr/staticd", "-A", "127.0.0.1"];
    let ospfd: &[&str] = &["/usr/lib/frr/ospfd", "-A", "127.0.0.1"];
    let mut spec = fixture.spec(Profile::Control, &[]);
    spec.commands = [zebra, staticd, ospfd].map(|argv| command(argv, Restart::Always)).to_vec();
    spec.files = vec![
        File {
            owner: named("frr", None),
            ..file("/etc/frr/staticd.conf", "ip route 10.9.0.0/16 blackhole\n", true)
        },
        File {
            owner: named("root", Some("frr")),
            ..file("/etc/frr/ospfd.conf", "router ospf\n", true)
        },
    ];
    fixture.run(&spec);
    eventually("zebra answers", || {
        let (good, text) = fixture.exec(&spec, "vtysh -c 'show version' -c 'show ip ospf'");
        good && text.contains("FRRouting 8") && text.contains("OSPF Routing Process")
    });
    eventually("the route is in the kernel", || {
        fixture.exec(&spec, "ip route show 10.9.0.0/16").1.contains("blackhole")
    });
    let (good, text) = fixture.exec(
        &spec,
        "cat /proc/sys/net/ipv4/ip_forward /proc/sys/net/ipv4/conf/all/rp_filter \
         /proc/sys/net/ipv6/conf/all/forwarding; hostname; cat /proc/self/uid_map",
    );
    assert!(good && text.starts_with("1\n0\n1\nr1\n"), "{text}");
    assert!(text.contains(&format!("0     {BASE}      65536")), "{text}");
    let (good, text) =
        fixture.exec(&spec, "stat -c %U:%G /etc/frr/staticd.conf /etc/frr/ospfd.conf");
    assert!(good && text == "frr:frr\nroot:frr\n", "{text}");
    // The daemon may write its configuration, and runs as the host's user of that name, mapped.
    let (good, text) = fixture.exec(&spec, "vtysh -c 'write memory'; ls /etc/frr");
    assert!(good && text.contains("frr.conf"), "{text}");
    let begin = Instant::now();
    fixture.runtime.stop(&spec.dir, EVENTUALLY).unwrap();
    assert!(begin.elapsed() < EVENTUALLY, "SIGTERM reached the daemons");
    assert!(log(&spec.dir).contains("zebra (process"), "{}", log(&spec.dir));
}

#[test]
fn what_hangs_on_a_command_is_started_again_with_it() {
    let fixture = Fixture::new();
    let mut spec = fixture.spec(Profile::Control, &[]);
    // Each with a child in its group, which must not stay either.
    let named = |name: &str| format!("sleep 1000 & exec -a {name} sleep 1000");
    let [alone, first, second, third] = ["alone", "first", "second", "third"].map(named);
    spec.commands = [
        command(&["bash", "-c", &alone], Restart::Always),
        command(&["bash", "-c", &first], Restart::Always),
        command(&["bash", "-c", &second], Restart::WithPrevious),
        command(&["bash", "-c", &third], Restart::WithPrevious),
    ]
    .to_vec();
    fixture.run(&spec);
    let pids = || {
        ["alone", "first", "second", "third"].map(|name| {
            let found = fixture.exec(&spec, &format!("pgrep -fx '{name} 1000'"));
            found.1.trim().parse::<u32>().ok()
        })
    };
    let whole = |pids: &[Option<u32>]| pids.iter().all(Option::is_some);
    eventually("all run", || whole(&pids()));
    let at_first = pids();
    let kill = |name: &str| fixture.exec(&spec, &format!("pkill -KILL -fx '{name} 1000'"));

    kill("second");
    let mut now = at_first;
    eventually("the third, too, is another", || {
        now = pids();
        whole(&now) && now[2] != at_first[2] && now[3] != at_first[3]
    });
    assert_eq!(now[..2], at_first[..2], "those before it stay");

    let before = now;
    kill("first");
    eventually("both after it are others", || {
        now = pids();
        whole(&now) && (1..4).all(|index| now[index] != before[index])
    });
    assert_eq!(now[0], before[0]);
    // One child each, and those of the two that were killed by us.
    let sleeps = fixture.exec(&spec, "pgrep -cfx 'sleep 1000'").1;
    assert_eq!(sleeps.trim(), "6", "{sleeps}");
}

#[test]
fn bird_runs_in_a_control_guest() {
    let fixture = Fixture::new();
    let mut spec = fixture.spec(Profile::Control, &[]);
    spec.commands = vec![command(&["bird", "-f", "-c", "/etc/bird/bird.conf"], Restart::Always)];
    spec.files = vec![file(
        "/etc/bird/bird.conf",
        "log stderr all;\nrouter id 1.2.3.4;\nprotocol device {}\nprotocol kernel { ipv4 { export all; }; persist; }\n\
         protocol static { ipv4; route 10.8.0.0/16 blackhole; }\n",
        false,
    )];
    fixture.run(&spec);
    eventually("the route is in the kernel", || {
        fixture.exec(&spec, "ip route show 10.8.0.0/16").1.contains("blackhole")
    });
    assert!(fixture.exec(&spec, "birdc show status").1.contains("BIRD 2"));
    let (good, text) = fixture.exec(&spec, "echo x > /etc/bird/bird.conf");
    assert!(!good, "a read-only file was written: {text}");
}

#[test]
fn a_forwarding_guest_has_no_capability_and_no_interface() {
    let fixture = Fixture::new();
    let (code, text) = fixture.forwarding(
        false,
        "grep -E '^(Cap|NoNewPrivs|Seccomp:|Uid)' /proc/self/status; echo interfaces $(ls /sys/class/net).; \
         cat /sys/class/net/lo/flags; touch /x /usr/x /etc/x; echo end",
    );
    assert_eq!(code, Some(0), "{text}");
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert!(text.contains(&format!("{set}:\t0000000000000000")), "{set} in {text}");
    }
    assert!(text.contains("NoNewPrivs:\t1") && text.contains("Seccomp:\t2"), "{text}");
    assert!(text.contains("Uid:\t1000\t1000\t1000\t1000"), "{text}");
    assert!(text.contains("interfaces lo.\n"), "{text}");
    // IFF_LOOPBACK alone: not IFF_UP.
    assert!(text.contains(" 0x8\n"), "{text}");
    assert_eq!(text.matches("Read-only file system").count(), 3, "{text}");
    assert!(text.contains(" end\n"));
}

#[test]
fn system_calls_beyond_the_list_are_refused() {
    let fixture = Fixture::new();
    let (_, text) = fixture.forwarding(
        false,
        "python3 -c '
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *args):
    ctypes.set_errno(0)
    result = libc.syscall(*args)
    print(name, result, errno.errorcode.get(ctypes.get_errno()), flush=True)
call(\"unshare\", 272, 0x10000000)
call(\"bpf\", 321, 0, 0, 0)
call(\"mount\", 165, 0, 0, 0, 0, 0)
call(\"ptrace\", 101, 0, 0, 0, 0)
call(\"clone\", 56, 0x10000000 | 17, 0, 0, 0, 0)
call(\"setns\", 308, 0, 0)
print(\"fork\", os.waitpid(os.spawnlp(os.P_NOWAIT, \"true\", \"true\"), 0)[1], flush=True)
'",
    );
    for name in ["unshare", "bpf", "mount", "ptrace", "clone", "setns"] {
        assert!(text.contains(&format!("{name} -1 EPERM")), "{name}: {text}");
    }
    assert!(text.contains("fork 0"), "{text}");
}

#[test]
fn a_tap_program_may_open_taps_in_its_own_network_alone() {
    let fixture = Fixture::new();
    let script = "ip tuntap add dev t0 mode tap && ip link show t0; grep CapEff /proc/self/status";
    let (_, text) = fixture.forwarding(true, script);
    assert!(text.contains("t0: <") && text.contains("CapEff:\t0000000000003000"), "{text}");
    let (_, text) = fixture.forwarding(false, script);
    assert!(!text.contains("t0: <"), "{text}");
    assert!(!Path::new("/sys/class/net/t0").exists());
}

#[test]
fn the_hosts_files_and_processes_are_not_seen() {
    let fixture = Fixture::new();
    for profile in [Profile::Control, Profile::Host, Profile::Forwarding { tap: false }] {
        let spec = fixture.spec(profile, &[&["sleep", "1000"]]);
        fixture.run(&spec);
        let (_, text) = fixture.exec(
            &spec,
            "cat /etc/shadow; find /run /root /home /var /opt /mnt /srv /tmp -xdev 2>&1; \
             ls /proc | grep '^[0-9]' | wc -l; ls -ln / | head -4; cat /proc/1/cgroup; ls /dev",
        );
        assert!(text.contains("/etc/shadow: No such file"), "{text}");
        let host = |path: &str| {
            let name = Path::new(path).file_name().unwrap().to_str().unwrap().to_owned();
            let inside = ["lock", "frr", "bird", "pdp"].contains(&name.as_str());
            (!inside).then(|| format!("/run/{name}\n"))
        };
        for entry in fs::read_dir("/run").unwrap() {
            let path = entry.unwrap().path();
            if let Some(line) = host(path.to_str().unwrap()) {
                assert!(!text.contains(&line), "{line} in {text}");
            }
        }
        assert!(!text.contains("/var/lib/dpkg") && !text.contains(".ssh"), "{text}");
        assert!(!text.contains(&fixture.cgroup), "its place among the host's cgroups: {text}");
        assert!(!text.contains("kvm") && !text.contains("vda") && !text.contains("fuse"), "{text}");
        let process = fixture.runtime.state(&spec.dir).unwrap();
        let State::Running(process) = process else { panic!("{process:?}") };
        let status = fs::read_to_string(format!("/proc/{}/status", process.pid)).unwrap();
        let uid = spec.host_id(spec.uid);
        assert!(status.contains(&format!("Uid:\t{uid}\t{uid}")), "{status}");
        fixture.runtime.delete(&spec.dir).unwrap();
    }
}

#[test]
fn hosts_ping_and_keep_their_limits() {
    let fixture = Fixture::new();
    let mut spec = fixture.spec(Profile::Host, &[]);
    spec.limits.memory_bytes = Some(64 << 20);
    spec.limits.processes = Some(20);
    fixture.run(&spec);
    let (good, text) = fixture.exec(&spec, "ip link set lo up; ping -c 1 -W 5 127.0.0.1");
    assert!(good && text.contains("1 received"), "{text}");
    let hog = "python3 -c 'x = bytearray(512 << 20); print(len(x))'";
    let (good, text) = fixture.exec(&spec, hog);
    assert!(!good && !text.contains("536870912"), "{text}");
    assert!(fixture.runtime.cgroups().usage("red/r1").unwrap().memory_kills > 0);
    // A tmpfs fills the guest's memory, not the host's.
    let fill = "for d in /tmp /run /var /etc /root; do head -c 80M /dev/zero > $d/big; done";
    let (good, text) = fixture.exec(&spec, fill);
    assert!(!good && text.matches("No space left").count() == 5, "{text}");
    fixture.exec(&spec, "rm -f /tmp/big /run/big /var/big /etc/big /root/big");
    let (_, text) = fixture.exec(&spec, "for i in $(seq 30); do sleep 1 & done; wait");
    assert!(text.to_lowercase().contains("fork"), "{text}");
    // More may be given while it runs.
    let more = Limits { memory_bytes: Some(1 << 30), ..Limits::default() };
    fixture.runtime.update_limits(&spec.dir, &more).unwrap();
    let (good, text) = fixture.exec(&spec, hog);
    assert!(good && text.contains("536870912"), "{text}");
    let found = fixture.runtime.list(fixture.dir.path()).unwrap();
    assert!(matches!(&found[..], [pdp_container::Found::Guest(spec)] if spec.limits == more));
}

#[test]
fn a_guests_cpu_quota_is_in_force() {
    let fixture = Fixture::new();
    let spin: &[&str] = &["bash", "-c", "while :; do :; done"];
    let mut spec = fixture.spec(Profile::Forwarding { tap: false }, &[spin, spin]);
    spec.limits.cpu_cores = Some(0.3);
    fixture.run(&spec);
    let usage = || fixture.runtime.cgroups().usage("red/r1").unwrap();
    let begin = (Instant::now(), usage().cpu_ns);
    std::thread::sleep(Duration::from_secs(3));
    let cores = (usage().cpu_ns - begin.1) as f64 / begin.0.elapsed().as_nanos() as f64;
    assert!(cores < 0.4, "{cores} cores used of 0.3");
    assert!(cores > 0.02 && usage().throttled_ns > 0, "{cores} cores");
}

#[test]
fn delete_leaves_nothing() {
    let fixture = Fixture::new();
    let mounts = || fs::read_to_string("/proc/self/mountinfo").unwrap();
    let before = mounts();
    let spec = fixture.spec(Profile::Control, &[&["sleep", "1000"]]);
    let process = fixture.run(&spec);
    let shim = fs::read_to_string(spec.dir.join("shim")).unwrap();
    assert!(fixture.runtime.cgroups().exists("red/r1/guest"));
    fixture.runtime.delete(&spec.dir).unwrap();
    assert!(!process.is_alive());
    let shim: pdp_container::Process = serde_json::from_str(&shim).unwrap();
    assert!(!shim.is_alive());
    assert!(!spec.dir.exists());
    assert!(!fixture.runtime.cgroups().exists("red"));
    assert!(fs::read_dir(fixture.path("runc")).unwrap().next().is_none());
    let own = |text: &str| text.contains(fixture.dir.path().to_str().unwrap());
    assert!(!own(&before) && !own(&mounts()));
    assert_eq!(fixture.runtime.state(&spec.dir).unwrap(), State::Absent);
    fixture.runtime.delete(&spec.dir).unwrap();
    // And it can be made again.
    fixture.run(&spec);
}

#[test]
fn a_guest_that_is_only_made_waits_and_can_be_deleted() {
    let fixture = Fixture::new();
    let spec = fixture.spec(Profile::Host, &[&["touch", "/tmp/started"]]);
    let process = fixture.runtime.create(&spec, &[]).unwrap();
    assert_eq!(fixture.runtime.state(&spec.dir).unwrap(), State::Created(process));
    assert!(process.namespace("net").exists());
    assert!(matches!(fixture.runtime.create(&spec, &[]), Err(Error::Spec { .. })));
    fixture.runtime.delete(&spec.dir).unwrap();
    assert_eq!(fixture.runtime.state(&spec.dir).unwrap(), State::Absent);
}

#[test]
fn an_owner_that_the_guest_does_not_have_is_refused() {
    let fixture = Fixture::new();
    let mut spec = fixture.spec(Profile::Host, &[]);
    for (owner, words) in [
        (named("nosuch", None), "no user nosuch in its /etc/passwd"),
        (named("0", Some("nosuch")), "no group nosuch in its /etc/group"),
        // Another guest's user id on the host.
        (named("65536", None), "its ids are 0 to 65535"),
        (Owned::Ids { uid: 0, gid: 65536 }, "its ids are 0 to 65535"),
    ] {
        spec.files = vec![File { owner, ..file("/tmp/file", "text", true) }];
        let refused = fixture.runtime.create(&spec, &[]).unwrap_err().to_string();
        assert!(refused.contains(words), "{refused}");
    }
    spec.files[0].owner = named("7", Some("daemon"));
    fixture.run(&spec);
    eventually("it is there", || fixture.exec(&spec, "stat -c %u:%G /tmp/file").1 == "7:daemon\n");
}

#[test]
fn a_guest_whose_shim_was_killed_is_told_from_one_that_runs() {
    let fixture = Fixture::new();
    let spec = fixture.spec(Profile::Host, &[&["sleep", "1000"]]);
    let process = fixture.run(&spec);
    let watched = fixture.runtime.wait_exit(&spec.dir).unwrap().expect("it runs");
    let readable = |timeout: Duration| {
        let mut fds = [rustix::event::PollFd::new(&watched, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&timeout.try_into().unwrap())).unwrap() > 0
    };
    assert!(!readable(Duration::ZERO));
    let shim = fs::read_to_string(spec.dir.join("shim")).unwrap();
    let shim: pdp_container::Process = serde_json::from_str(&shim).unwrap();
    kill(shim.pid);
    assert!(readable(Duration::from_secs(60)), "who waits for it hears of it");
    eventually("the shim is dead", || !shim.is_alive());
    assert_eq!(fixture.runtime.state(&spec.dir).unwrap(), State::Orphaned(process));
    assert!(fixture.runtime.wait_exit(&spec.dir).unwrap().is_none());
    fixture.runtime.delete(&spec.dir).unwrap();
    assert!(!process.is_alive() && !spec.dir.exists());
    fixture.run(&spec);
}

#[test]
fn what_a_maker_left_half_made_is_deleted() {
    let fixture = Fixture::new();
    let spec = fixture.spec(Profile::Host, &[]);
    let process = fixture.run(&spec);
    // As if the maker and the shim had died before the process was written down.
    let shim = fs::read_to_string(spec.dir.join("shim")).unwrap();
    let shim: pdp_container::Process = serde_json::from_str(&shim).unwrap();
    kill(shim.pid);
    eventually("the shim is dead", || !shim.is_alive());
    for name in ["pid", "runc.pid", "shim"] {
        fs::remove_file(spec.dir.join(name)).unwrap();
    }
    assert_eq!(fixture.runtime.state(&spec.dir).unwrap(), State::Absent);
    assert_eq!(fixture.runtime.list(fixture.dir.path()).unwrap().len(), 1);
    fixture.runtime.delete(&spec.dir).unwrap();
    eventually("the guest is gone", || !process.is_alive());
    assert!(!fixture.runtime.cgroups().exists("red") && !spec.dir.exists());
}

#[test]
fn a_failed_create_says_why_and_leaves_nothing() {
    let fixture = Fixture::new();
    let mut spec = fixture.spec(Profile::Host, &[]);
    spec.sysctls.insert("net.ipv4.no_such_thing".into(), "1".into());
    let error = fixture.runtime.create(&spec, &[]).unwrap_err().to_string();
    assert!(error.contains("no_such_thing"), "{error}");
    assert!(!spec.dir.exists() && !fixture.runtime.cgroups().exists("red"));
}

#[test]
fn guests_outlive_their_maker() {
    // The maker is this test program again, which makes a guest and is killed.
    let fixture = Fixture::new();
    let spec = fixture.spec(Profile::Control, &[&["sleep", "1000"]]);
    let job = fixture.path("job.json");
    fs::write(&job, serde_json::to_string(&spec).unwrap()).unwrap();
    let mut maker = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "maker", "--nocapture"])
        .env("MAKER_JOB", &job)
        .env("MAKER_CGROUP", &fixture.cgroup)
        .spawn()
        .unwrap();
    eventually("it runs", || matches!(fixture.runtime.state(&spec.dir), Ok(State::Running(_))));
    maker.kill().unwrap();
    maker.wait().unwrap();
    let State::Running(process) = fixture.runtime.state(&spec.dir).unwrap() else { panic!() };
    let fd = fixture.runtime.wait_exit(&spec.dir).unwrap().unwrap();
    assert!(fixture.exec(&spec, "true").0);
    // Not in this test's cgroups, nor its session: nothing that ends these ends the guest.
    let shim = fs::read_to_string(spec.dir.join("shim")).unwrap();
    let shim: pdp_container::Process = serde_json::from_str(&shim).unwrap();
    let cgroup = fs::read_to_string(format!("/proc/{}/cgroup", shim.pid)).unwrap();
    assert!(cgroup.lines().all(|line| line.ends_with(&format!("{}/_shims", fixture.cgroup))));
    kill(process.pid);
    let mut fds = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
    let seconds = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut fds, Some(&seconds)).unwrap(), 1);
    let State::Exited(Some(exit)) = fixture.runtime.state(&spec.dir).unwrap() else { panic!() };
    assert_eq!((exit.code, exit.signal), (None, Some(9)));
    assert!(fixture.runtime.wait_exit(&spec.dir).unwrap().is_none());
}

/// Not a test by itself: see [`guests_outlive_their_maker`].
#[test]
fn maker() {
    let (Ok(job), Ok(cgroup)) = (std::env::var("MAKER_JOB"), std::env::var("MAKER_CGROUP")) else {
        return;
    };
    let spec: GuestSpec = serde_json::from_slice(&fs::read(&job).unwrap()).unwrap();
    let runtime = Runtime::new(paths(Path::new(&job).parent().unwrap(), &cgroup)).unwrap();
    runtime.create(&spec, &[]).unwrap();
    runtime.start(&spec.dir).unwrap();
    std::thread::sleep(EVENTUALLY);
}

#[test]
fn commands_are_restarted_and_a_forwarding_guest_ends_with_its_last() {
    let fixture = Fixture::new();
    let mut spec = fixture.spec(Profile::Host, &[]);
    spec.commands = vec![
        command(&["sh", "-c", "echo again; exit 3"], Restart::Always),
        command(&["sh", "-c", "echo once"], Restart::Never),
        command(&["/no/such/program"], Restart::Never),
    ];
    fixture.run(&spec);
    eventually("it was restarted", || log(&spec.dir).matches(" again\n").count() >= 3);
    let text = log(&spec.dir);
    assert_eq!(text.matches(" once\n").count(), 1);
    assert!(text.contains("/no/such/program can't be started"), "{text}");
    assert!(text.contains("exit status: 3"), "{text}");
    assert!(matches!(fixture.runtime.state(&spec.dir).unwrap(), State::Running(_)));
    let (code, _) = fixture.forwarding(false, "exit 7");
    assert_eq!(code, Some(7));
    let (code, _) = fixture.forwarding(false, "kill -9 $$");
    assert_eq!(code, Some(137));
}

#[test]
fn orphans_are_reaped() {
    let fixture = Fixture::new();
    let spec = fixture.spec(Profile::Host, &[]);
    fixture.run(&spec);
    fixture.exec(&spec, "for i in 1 2 3; do setsid sh -c 'sleep 0.1 & exec true' & done");
    eventually("no process is left", || {
        fixture.exec(&spec, "cat /proc/[0-9]*/stat | grep -c -E '\\) Z|sleep'").1.trim() == "0"
    });
}

#[test]
fn descriptors_files_binds_and_environment_arrive() {
    let fixture = Fixture::new();
    let shared = fixture.path("shared");
    fs::create_dir(&shared).unwrap();
    fs::write(shared.join("hello"), "from the host\n").unwrap();
    let script = "cat <&3; cat <&4; cat /run/pdp/shared/hello /etc/pdp/own.conf; echo $COLOUR; \
                  ls -l /proc/self/fd | grep -c /; touch /run/pdp/shared/x";
    let mut spec = fixture.spec(Profile::Forwarding { tap: false }, &[&["bash", "-c", script]]);
    spec.files = vec![File {
        owner: Owned::Ids { uid: 1000, gid: 1000 },
        ..file("/etc/pdp/own.conf", "a file\n", false)
    }];
    spec.binds = vec![Bind { source: shared, target: "/run/pdp/shared".into(), writable: false }];
    spec.env.insert("COLOUR".into(), "red".into());
    let (three, four) = (fixture.path("three"), fixture.path("four"));
    fs::write(&three, "third\n").unwrap();
    fs::write(&four, "fourth\n").unwrap();
    let (three, four) = (fs::File::open(three).unwrap(), fs::File::open(four).unwrap());
    fixture.runtime.create(&spec, &[three.as_fd(), four.as_fd()]).unwrap();
    fixture.runtime.start(&spec.dir).unwrap();
    fixture.exit(&spec.dir);
    let text = log(&spec.dir);
    for word in [" third\n", " fourth\n", " from the host\n", " a file\n", " red\n"] {
        assert!(text.contains(word), "{word:?} in {text}");
    }
    assert!(text.contains("Read-only file system"), "{text}");
}

#[test]
fn the_log_is_bounded() {
    let fixture = Fixture::new();
    let script = "for i in $(seq 20000); do echo line $i of many; done";
    let mut spec = fixture.spec(Profile::Forwarding { tap: false }, &[&["bash", "-c", script]]);
    spec.log_bytes_max = 100_000;
    fixture.run(&spec);
    assert_eq!(fixture.exit(&spec.dir), Some(0));
    for name in ["log", "log.1"] {
        assert!(fs::metadata(spec.dir.join(name)).unwrap().len() <= spec.log_bytes_max);
    }
    assert!(log(&spec.dir).contains("line 20000 of many"));
}

#[test]
fn helpers_run_apart_without_rights() {
    let fixture = Fixture::new();
    let input = fixture.path("input");
    fs::write(&input, "passed\n").unwrap();
    let input = fs::File::open(input).unwrap();
    // Nobody but root passes what is above the program.
    let private = fixture.path("private");
    fs::create_dir_all(private.join("bin")).unwrap();
    fs::set_permissions(&private, fs::Permissions::from_mode(0o700)).unwrap();
    let program = private.join("bin/sh");
    fs::copy("/bin/sh", &program).unwrap();
    let script = "cat <&3; grep -E '^(Uid|Groups|CapEff|CapBnd|NoNewPrivs)' /proc/self/status; \
                  cat /proc/self/cgroup; exec sleep 1000";
    let spec = HelperSpec {
        id: "tap".into(),
        dir: fixture.path("tap"),
        argv: [program.to_str().unwrap(), "-c", script].map(str::to_owned).to_vec(),
        env: BTreeMap::new(),
        cgroup: "red/r1/helpers".into(),
        uid: BASE + 5,
        keep_root: false,
        log_bytes_max: 1 << 20,
    };
    let process = fixture.runtime.spawn_helper(&spec, &[input.as_fd()]).unwrap();
    eventually("it runs", || log(&spec.dir).contains("_") || log(&spec.dir).contains("helpers"));
    eventually("sleep", || {
        fs::read_to_string(format!("/proc/{}/comm", process.pid)).unwrap() == "sleep\n"
    });
    let text = log(&spec.dir);
    let uid = spec.uid;
    for want in [
        " passed\n",
        &format!("Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n"),
        "Groups:\t \n",
        "CapEff:\t0000000000000000",
        "CapBnd:\t0000000000000000",
        "NoNewPrivs:\t1",
        "red/r1/helpers\n",
    ] {
        assert!(text.contains(want), "{want:?} in {text}");
    }
    // The shim holds nothing that it passed on: a TAP would live on by that.
    let shim = fs::read_to_string(spec.dir.join("shim")).unwrap();
    let shim: pdp_container::Process = serde_json::from_str(&shim).unwrap();
    for fd in fs::read_dir(format!("/proc/{}/fd", shim.pid)).unwrap() {
        let target = fs::read_link(fd.unwrap().path()).unwrap();
        assert!(!target.ends_with("input"), "{target:?}");
    }
    assert_eq!(fixture.runtime.state(&spec.dir).unwrap(), State::Running(process));
    fixture.runtime.stop(&spec.dir, GRACE).unwrap();
    let State::Exited(Some(exit)) = fixture.runtime.state(&spec.dir).unwrap() else { panic!() };
    assert_eq!(exit.signal, Some(15));
    fixture.runtime.delete(&spec.dir).unwrap();
    assert!(!spec.dir.exists() && !fixture.runtime.cgroups().exists("red"));
    let root = HelperSpec { uid: 0, ..spec };
    assert!(matches!(fixture.runtime.spawn_helper(&root, &[]), Err(Error::Spec { .. })));
}

fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}
