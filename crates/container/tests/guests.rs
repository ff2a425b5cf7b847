//! Guests with the real runc, FRR, cgroups and kernel. Needs root.

#[path = "guests/commands.rs"]
mod commands;
#[path = "guests/machine.rs"]
mod machine;
#[path = "guests/stand.rs"]
mod stand;
#[path = "guests/volumes.rs"]
mod volumes;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use pdp_container::{
    BindMount, CommandRestart, Error, FileOwner, GuestCommand, GuestFile, GuestSpec, HelperSpec,
    INOTIFY_INSTANCES_MAX, Limits, ProcessState, Profile, RootFilesystem, RunAs, Runtime,
    RuntimePaths, TERMINALS_MAX, UserRange,
};

const GRACE: Duration = Duration::from_secs(10);
const EVENTUALLY: Duration = Duration::from_secs(60);
const BASE: u32 = 700_000;

static COUNT: AtomicU32 = AtomicU32::new(0);

/// A runtime of its own. Removes everything, even if a test fails.
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

    /// Returns the directory of a guest or helper.
    fn record(&self, id: &str) -> PathBuf {
        self.path("records").join(id)
    }

    fn spec(&self, profile: Profile, commands: &[&[&str]]) -> GuestSpec {
        let id = format!("{}-{}", self.cgroup, COUNT.fetch_add(1, Ordering::Relaxed));
        GuestSpec {
            dir: self.record(&id),
            id,
            cgroup: "red/r1".into(),
            owner: "acme".into(),
            root: RootFilesystem::Host,
            profile,
            privileged: false,
            packet_rings: false,
            users: UserRange { base: BASE, length: 65_536 },
            uid: if matches!(profile, Profile::Forwarding { .. }) { 1000 } else { 0 },
            hostname: "r1".into(),
            files: vec![],
            binds: vec![],
            volumes: vec![],
            commands: commands.iter().map(|argv| command(argv, CommandRestart::Never)).collect(),
            env: BTreeMap::new(),
            sysctls: BTreeMap::new(),
            limits: Limits::default(),
            open_files_max: 1024,
            log_bytes_max: 1 << 20,
        }
    }

    fn run(&self, spec: &GuestSpec) -> pdp_container::Process {
        let process = self.runtime.create(spec, &[]).unwrap();
        self.runtime.start(&spec.dir).unwrap();
        process
    }

    fn exec(&self, spec: &GuestSpec, script: &str) -> (bool, String) {
        self.exec_as(spec, &RunAs::default(), &["sh", "-c", script])
    }

    fn exec_as(&self, spec: &GuestSpec, run_as: &RunAs, argv: &[&str]) -> (bool, String) {
        let argv: Vec<OsString> = argv.iter().map(OsString::from).collect();
        let command = self.runtime.exec_command(&spec.dir, &argv, run_as, false, &BTreeMap::new());
        let (mut command, _session) = command.unwrap();
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.success(), text + &String::from_utf8_lossy(&output.stderr))
    }

    /// Runs a script in a forwarding guest until it ends. Returns its exit code and output.
    fn forwarding(&self, tap: bool, script: &str) -> (Option<i32>, String) {
        let spec = self.spec(Profile::Forwarding { tap }, &[&["bash", "-c", script]]);
        self.run(&spec);
        let code = self.exit(&spec.dir);
        let log = log(&spec.dir);
        self.runtime.delete(&spec.dir).unwrap();
        (code, log)
    }

    fn exit(&self, dir: &Path) -> Option<i32> {
        let mut state = ProcessState::Absent;
        eventually("it ends", || {
            state = self.runtime.state(dir).unwrap();
            matches!(state, ProcessState::Exited(_))
        });
        match state {
            ProcessState::Exited(Some(exit)) => exit.code,
            _ => panic!("{state:?}"),
        }
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        for dir in self.runtime.list().unwrap() {
            if let Err(error) = self.runtime.delete(&dir) {
                eprintln!("{error}");
            }
        }
        let _ = self.runtime.cgroups().remove("", GRACE);
        self.runtime.cgroups().remove_if_empty("");
    }
}

fn paths(dir: &Path, cgroup: &str) -> RuntimePaths {
    RuntimePaths {
        runc: "/usr/sbin/runc".into(),
        shim: env!("CARGO_BIN_EXE_pdp-shim").into(),
        init: env!("CARGO_BIN_EXE_pdp-init").into(),
        work: env!("CARGO_BIN_EXE_pdp-work").into(),
        records: dir.join("records"),
        runc_root: dir.join("runc"),
        logs: dir.join("logs"),
        images: dir.join("images"),
        volumes: dir.join("volumes"),
        cgroup: cgroup.into(),
    }
}

fn command(argv: &[&str], restart: CommandRestart) -> GuestCommand {
    GuestCommand::new(argv.iter().map(|word| word.to_string()).collect(), restart)
}

fn file(path: &str, content: &str, writable: bool) -> GuestFile {
    let (path, content) = (path.into(), content.into());
    GuestFile { path, content, mode: 0o640, owner: FileOwner::ROOT, writable }
}

fn log(dir: &Path) -> String {
    let logs = dir.ancestors().nth(2).unwrap().join("logs");
    let name = format!("{}.log", dir.file_name().unwrap().to_str().unwrap());
    fs::read_to_string(logs.join(name)).unwrap_or_default()
}

fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + EVENTUALLY;
    while !condition() {
        assert!(Instant::now() < deadline, "not within {EVENTUALLY:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn named(user: &str, group: Option<&str>) -> FileOwner {
    FileOwner::Named { user: user.into(), group: group.map(str::to_owned) }
}

#[test]
fn frr_runs_in_a_control_guest() {
    let fixture = Fixture::new();
    let zebra: &[&str] = &["/usr/lib/frr/zebra", "-A", "127.0.0.1"];
    let staticd: &[&str] = &["/usr/lib/frr/staticd", "-A", "127.0.0.1"];
    let ospfd: &[&str] = &["/usr/lib/frr/ospfd", "-A", "127.0.0.1"];
    let mut spec = fixture.spec(Profile::Control, &[]);
    spec.commands =
        [zebra, staticd, ospfd].map(|argv| command(argv, CommandRestart::Always)).to_vec();
    spec.files = vec![
        GuestFile {
            owner: named("frr", None),
            ..file("/etc/frr/staticd.conf", "ip route 10.9.0.0/16 blackhole\n", true)
        },
        GuestFile {
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
    // The daemon may write its configuration. It runs as the host's user of that name, mapped.
    let (good, text) = fixture.exec(&spec, "vtysh -c 'write memory'; ls /etc/frr");
    assert!(good && text.contains("frr.conf"), "{text}");
    let begin = Instant::now();
    fixture.runtime.stop(&spec.dir, EVENTUALLY).unwrap();
    assert!(begin.elapsed() < EVENTUALLY, "SIGTERM reached the daemons");
    // The log is written after the guest's end was noticed.
    eventually("its log says so", || log(&spec.dir).contains("zebra (process"));
}

#[test]
fn dependent_commands_restart_with_their_command() {
    let fixture = Fixture::new();
    let mut spec = fixture.spec(Profile::Control, &[]);
    // Each has a child in its process group, which must not survive either.
    let named = |name: &str| format!("sleep 1000 & exec -a {name} sleep 1000");
    let [alone, first, second, third] = ["alone", "first", "second", "third"].map(named);
    spec.commands = [
        command(&["bash", "-c", &alone], CommandRestart::Always),
        command(&["bash", "-c", &first], CommandRestart::Always),
        command(&["bash", "-c", &second], CommandRestart::WithPrevious),
        command(&["bash", "-c", &third], CommandRestart::WithPrevious),
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
    // One child of each, and those of the two commands that this test killed.
    let sleeps = fixture.exec(&spec, "pgrep -cfx 'sleep 1000'").1;
    assert_eq!(sleeps.trim(), "6", "{sleeps}");
}

#[test]
fn bird_runs_in_a_control_guest() {
    let fixture = Fixture::new();
    let mut spec = fixture.spec(Profile::Control, &[]);
    spec.commands =
        vec![command(&["bird", "-f", "-c", "/etc/bird/bird.conf"], CommandRestart::Always)];
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
    // Only IFF_LOOPBACK, not IFF_UP.
    assert!(text.contains(" 0x8\n"), "{text}");
    assert_eq!(text.matches("Read-only file system").count(), 3, "{text}");
    assert!(text.contains(" end\n"));
}

/// Makes system calls by number, each in a process of its own, and prints how each ended.
const CALLS: &str = r#"
import ctypes, errno, mmap, os, signal, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def end(act):
    """In a process of its own: what it ended by."""
    if (child := os.fork()) == 0:
        ctypes.set_errno(0)
        os._exit(0 if act() != -1 else ctypes.get_errno())
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    code = os.WEXITSTATUS(status)
    return errno.errorcode.get(code, code) if code else 0
def call(name, *args):
    words = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    print(name, end(lambda: libc.syscall(*words)), flush=True)
NEW_USER, NEW_NET = 0x10000000, 0x40000000
call("unshare", 272, NEW_USER)
call("unshare-net", 272, NEW_NET)
call("setns", 308, os.open("/proc/self/ns/net", os.O_RDONLY), 0)
call("clone-user", 56, NEW_USER | 17, 0, 0, 0, 0)
call("clone3", 435, 0, 0)
call("mount", 165, b"none", b"/tmp", b"tmpfs", 0, 0)
call("remount", 165, 0, b"/", 0, 0x1000 | 0x20, 0)
call("umount2", 166, b"/proc/keys", 2)
call("pivot_root", 155, b"/tmp", b"/tmp")
call("open_tree", 428, -100, b"/", 1)
call("fsopen", 430, b"tmpfs", 0)
call("mount_setattr", 442, -100, b"/", 0, 0, 0)
call("bpf", 321, 0, 0, 0)
call("ptrace", 101, 0, 0, 0, 0)
call("keyctl", 250, 0, -3, 0)
call("io_setup", 206, 128, ctypes.byref(ctypes.c_ulong(0)))
call("io_uring_setup", 425, 1, 0)
call("sync", 162)
call("personality", 135, 0x0400000)
call("perf_event_open", 298, 0, 0, -1, -1, 0)
call("userfaultfd", 323, 1)
call("process_madvise", 440, 0, 0, 0, 21, 0)
for name, family in {"vsock": 40, "alg": 38, "xdp": 44, "netlink": 16}.items():
    call(name, 41, family, 3 if family == 16 else 1, 0)
call("netlink-xfrm", 41, 16, 3, 6)
# Rings of packet sockets; the kernel looks at the lower half of numbers alone.
packet = socket.socket(16 if os.getuid() else 17, socket.SOCK_RAW, 0)
request = (ctypes.c_uint * 4)(1 << 20, 16, 1 << 20, 16)
for name, level, option in [("rx-ring", 263, 5), ("tx-ring", 263, 13), ("ring-high", 1 << 32 | 263, 5), ("ring-high2", 263, 1 << 32 | 5)]:
    call(name, 54, packet.fileno(), level, option, ctypes.byref(request), 16)
call("packet-version", 54, packet.fileno(), 263, 10, ctypes.byref(ctypes.c_int(2)), 4)
# By way of the interfaces of 32-bit programs and of x32: getpid.
call("x32", 0x40000000 + 39)
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("b814000000cd80c3"))
i386 = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
print("i386", end(i386), flush=True)
# Memory as the mux would share it.
memory = os.memfd_create("shared")
os.ftruncate(memory, 1 << 20)
shared = mmap.mmap(memory, 1 << 20)
shared[:] = b"x" * (1 << 20)
at = ctypes.addressof(ctypes.c_char.from_buffer(shared))
# FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
call("fallocate", 285, memory, 3, 0, 1 << 20)
advices = {"dontneed": 4, "remove": 9, "cold": 20, "pageout": 21, "collapse": 25, "remove-high": 1 << 32 | 9}
for name, advice in advices.items():
    call(name, 28, at, 1 << 20, advice)
call("mbind", 237, at, 1 << 20, 0, 0, 0, 0)
print("holes", os.fstat(memory).st_blocks < 2048, flush=True)
print("fork", os.waitpid(os.spawnlp(os.P_NOWAIT, "true", "true"), 0)[1], flush=True)
print("end", flush=True)
"#;

/// Calls of [`CALLS`] that fail in every profile without `privileged`.
const REFUSED: &str = "unshare unshare-net setns clone-user mount remount umount2 pivot_root \
    open_tree fsopen mount_setattr bpf ptrace keyctl io_setup io_uring_setup sync personality \
    perf_event_open userfaultfd process_madvise vsock alg xdp \
    netlink-xfrm rx-ring tx-ring ring-high ring-high2";

/// Calls that also fail in forwarding guests.
const REFUSED_FORWARDING: &str = "fallocate remove cold pageout collapse remove-high mbind";

#[test]
fn system_calls_beyond_the_list_are_refused() {
    let fixture = Fixture::new();
    let forwarding = Profile::Forwarding { tap: false };
    for profile in [Profile::Control, Profile::Host, forwarding] {
        let mut spec = fixture.spec(profile, &[&["python3", "-c", CALLS]]);
        if profile != forwarding {
            spec.commands[0] = command(&["sleep", "1000"], CommandRestart::Never);
        }
        fixture.run(&spec);
        let text = if profile == forwarding {
            fixture.exit(&spec.dir);
            log(&spec.dir)
        } else {
            fixture.exec(&spec, &format!("exec python3 -c '{CALLS}'")).1
        };
        let printed = |want: &str| text.lines().any(|line| line.ends_with(want));
        for name in REFUSED.split_whitespace() {
            // sync(2) returns nothing.
            assert!(printed(&format!("{name} EPERM")), "{profile:?}, {name}: {text}");
        }
        for want in ["clone3 ENOSYS", "x32 SIGSYS", "i386 SIGSYS", "netlink 0", "fork 0"] {
            assert!(printed(want), "{profile:?}, {want}: {text}");
        }
        assert!(printed("dontneed 0"), "{profile:?}: {text}");
        if profile == forwarding {
            for name in REFUSED_FORWARDING.split_whitespace() {
                assert!(printed(&format!("{name} EPERM")), "{name}: {text}");
            }
            assert!(printed("holes False"), "{text}");
        } else {
            assert!(printed("fallocate 0") && printed("remove 0"), "{text}");
            assert!(printed("packet-version 0"), "{profile:?}: {text}");
        }
        fixture.runtime.delete(&spec.dir).unwrap();
    }
}

#[test]
fn guest_cannot_remount_or_gain_capabilities() {
    let fixture = Fixture::new();
    for profile in [Profile::Control, Profile::Host] {
        let spec = fixture.spec(profile, &[&["sleep", "1000"]]);
        fixture.run(&spec);
        for door in [
            "mount -o remount,bind,rw /",
            "umount /proc/keys",
            "mount -t proc proc /mnt",
            "mount -o remount,rw /sys",
            "unshare -Ur true",
            "unshare -n true",
            "nsenter -t 1 -m true",
            "ip netns add x",
        ] {
            let (good, text) = fixture.exec(&spec, door);
            assert!(!good, "{profile:?}, {door}: {text}");
        }
        let (good, text) = fixture.exec(&spec, "touch /x");
        assert!(!good && text.contains("Read-only"), "{text}");
    }
}

#[test]
fn privileged_guest_is_confined_to_its_user_namespace() {
    let fixture = Fixture::new();
    for profile in [Profile::Control, Profile::Host] {
        let mut spec = fixture.spec(profile, &[&["sleep", "1000"]]);
        spec.privileged = true;
        fixture.run(&spec);
        let (good, text) = fixture.exec(
            &spec,
            "set -e; mount -t tmpfs none /mnt; umount /mnt; ip netns add x; \
             nsenter --net=/run/netns/x ip -o link | grep -c lo; unshare -n true; chroot / true; \
             grep CapEff /proc/self/status",
        );
        assert!(good, "{profile:?}: {text}");
        // CAP_SYS_MODULE, CAP_SYS_RAWIO, CAP_SYS_PTRACE, CAP_MKNOD, CAP_SYS_RESOURCE: none.
        let effective = text.split("CapEff:\t").nth(1).and_then(|hex| hex.split('\n').next());
        let effective = u64::from_str_radix(effective.unwrap(), 16).unwrap();
        assert_eq!(effective & (1 << 16 | 1 << 17 | 1 << 19 | 1 << 27 | 1 << 24), 0, "{text}");
        let (_, text) = fixture.exec(&spec, &format!("exec python3 -c '{CALLS}'"));
        for name in ["bpf", "ptrace", "keyctl", "io_setup", "perf_event_open", "vsock", "sync"] {
            assert!(text.lines().any(|line| line == format!("{name} EPERM")), "{name}: {text}");
        }
        assert!(text.contains("x32 SIGSYS") && text.contains("i386 SIGSYS"), "{text}");
        fixture.runtime.delete(&spec.dir).unwrap();
    }
    // Files of the machine are read-only before the guest gets them, and the kernel keeps them so.
    let mut spec = fixture.spec(Profile::Control, &[&["sleep", "1000"]]);
    spec.privileged = true;
    spec.files = vec![file("/etc/own.conf", "own\n", true)];
    fixture.run(&spec);
    for line in [
        "mount -o remount,bind,rw /",
        "mount -o remount,rw /",
        "touch /x",
        "mount -o remount,bind,rw /run/pdp/init.json",
        "mount -o remount,bind,rw /run/pdp/init-files/0",
        "echo x >> /run/pdp/init-files/0",
        "touch /usr/x",
    ] {
        let (good, text) = fixture.exec(&spec, line);
        assert!(!good, "{line}: {text}");
    }
    // Removing the mounts above does not help.
    fixture.exec(&spec, "mount -o remount,bind,rw /usr; umount -l /etc; touch /etc/x /usr/x /x");
    let bundle = spec.dir.join("bundle");
    assert!(!bundle.join("root/etc/x").exists() && !bundle.join("root/x").exists());
    assert!(!Path::new("/usr/x").exists());

    let mut spec = fixture.spec(Profile::Forwarding { tap: false }, &[&["true"]]);
    spec.privileged = true;
    let refused = fixture.runtime.create(&spec, &[]).unwrap_err().to_string();
    assert!(refused.contains("can't be privileged"), "{refused}");
}

#[test]
fn guest_cannot_exceed_its_open_file_limit() {
    let fixture = Fixture::new();
    let script = "
import os, resource
opened = []
try:
    for _ in range(100_000):
        opened.append(os.eventfd(0))
except OSError as error:
    print('opened', len(opened) + 3, error.strerror, flush=True)
opened.clear()
try:
    resource.setrlimit(resource.RLIMIT_NOFILE, (100_000, 100_000))
except (OSError, ValueError) as error:
    print('no more', flush=True)
";
    let mut spec = fixture.spec(Profile::Forwarding { tap: false }, &[&["python3", "-c", script]]);
    spec.open_files_max = 80;
    fixture.run(&spec);
    fixture.exit(&spec.dir);
    let text = log(&spec.dir);
    assert!(text.contains("opened 80 Too many open files") && text.contains("no more"), "{text}");
    let mut spec = fixture.spec(Profile::Host, &[&["sleep", "1000"]]);
    spec.open_files_max = 80;
    fixture.run(&spec);
    let (_, text) = fixture
        .exec(&spec, "ulimit -Sn; ulimit -Hn; ulimit -c; ulimit -n 81 2>/dev/null || echo no more");
    assert!(text.starts_with("80\n80\n0\n") && text.ends_with("no more\n"), "{text}");
}

#[test]
fn per_user_resources_are_not_charged_to_root() {
    let fixture = Fixture::new();
    let script = "
import ctypes, os, signal
libc = ctypes.CDLL(None)
opened = 0
while opened < 100_000 and libc.inotify_init() >= 0:
    opened += 1
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN})
for _ in range(2000):
    os.kill(os.getpid(), signal.SIGRTMIN)
print('has', opened, open('/proc/self/status').read().split('SigQ:')[1].split('/')[0].strip(), flush=True)
signal.pause()
";
    let mut spec = fixture.spec(Profile::Host, &[&["python3", "-c", script]]);
    // Above the limit of instances per user, so that the instances run out first.
    spec.open_files_max = 10_000;
    fixture.run(&spec);
    let report = || log(&spec.dir).split_once(" has ").map(|(_, report)| report.to_owned());
    eventually("it has what it can have", || report().is_some());
    let report = report().unwrap();
    let numbers: Vec<u64> = report.split_whitespace().map_while(|word| word.parse().ok()).collect();
    assert!(numbers[0] < 10_000 - 10 && numbers[1] >= 2000, "{report}");
    let mine = "import ctypes, sys; sys.exit(ctypes.CDLL(None).inotify_init() < 0)";
    let mine = std::process::Command::new("python3").args(["-c", mine]).status().unwrap();
    assert!(mine.success(), "none left for root: the guest has {report}");
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let queued = status.split_once("SigQ:").unwrap().1.split_once('/').unwrap().0.trim();
    assert!(queued.parse::<u64>().unwrap() < 2000, "root has {queued} signals queued");
}

/// A user has at most 200 keys. A network may have more nodes, which are one user for the kernel.
#[test]
fn guests_and_exec_commands_use_no_user_keys() {
    const USER: u32 = 1_234_500;
    let fixture = Fixture::new();
    let mut spec = fixture.spec(Profile::Host, &[&["sleep", "1000"]]);
    spec.users.base = USER;
    fixture.run(&spec);
    let argv = ["sh", "-c", "echo runs; read -r line"].map(OsString::from);
    let (mut command, _session) = fixture
        .runtime
        .exec_command(&spec.dir, &argv, &RunAs::default(), false, &BTreeMap::new())
        .unwrap();
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "runs\n");
    let users = fs::read_to_string("/proc/key-users").unwrap();
    let own: Vec<&str> =
        users.lines().filter(|line| line.trim_start().starts_with(&format!("{USER}:"))).collect();
    drop(child.stdin.take());
    child.wait().unwrap();
    assert_eq!(own, [""; 0]);
}

/// Returns a script that takes as much of a resource as possible, prints the number, and keeps it.
fn takes_all(what: &str) -> String {
    format!(
        "
import ctypes, os, signal
libc, held = ctypes.CDLL(None), 0
while held < 100_000 and {what} >= 0:
    held += 1
print('holds', held, flush=True)
signal.pause()
"
    )
}

/// The machine has one limit of pseudo-terminals. All guests of a network share one limit of
/// inotify instances.
#[test]
fn greedy_guest_leaves_terminals_and_inotify_to_others() {
    let fixture = Fixture::new();
    let terminal = takes_all("libc.open(b'/dev/ptmx', os.O_RDWR | os.O_NOCTTY)");
    let instance = takes_all("libc.inotify_init()");
    let greedy: Vec<GuestSpec> = [&terminal, &instance]
        .map(|script| {
            let mut spec = fixture.spec(Profile::Host, &[&["python3", "-c", script]]);
            spec.open_files_max = 10_000;
            fixture.run(&spec);
            spec
        })
        .into();
    let held = |spec: &GuestSpec| {
        let output = log(&spec.dir).split_once(" holds ")?.1.trim().parse::<u32>();
        Some(output.expect("a number"))
    };
    eventually("they hold all that they get", || greedy.iter().all(|spec| held(spec).is_some()));
    assert_eq!(held(&greedy[0]), Some(TERMINALS_MAX));
    assert!(held(&greedy[1]).is_some_and(|held| held <= INOTIFY_INSTANCES_MAX));
    let other = fixture.spec(Profile::Host, &[&["sleep", "1000"]]);
    fixture.run(&other);
    let one = "import os; os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY); print('has one')";
    let output = fixture.exec_as(&other, &RunAs::default(), &["python3", "-c", one]);
    assert_eq!(output, (true, "has one\n".to_owned()));
    // A guest's root can't raise the limit.
    let raise = "cat /proc/sys/user/max_inotify_instances; echo 1000 > /proc/sys/user/max_inotify_instances";
    let (raised, output) = fixture.exec(&other, raise);
    assert!(!raised && output.starts_with(&format!("{INOTIFY_INSTANCES_MAX}\n")), "{output}");
}

/// The guest's own limit bounds the memory of its TCP and UDP sockets. The machine's limit for all
/// sockets does not.
#[test]
fn guest_sockets_stay_within_the_guests_memory_limit() {
    const MEMORY: u64 = 64 << 20;
    let fixture = Fixture::new();
    let script = "
import signal, socket
kept, tcp, udp = [], 0, 0
l = socket.socket(); l.bind(('127.0.0.1', 0)); l.listen(200)
for _ in range(60):
    c = socket.socket(); c.connect(l.getsockname()); c.setblocking(False); a, _ = l.accept()
    a.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    kept += [c, a]
    try:
        while True: tcp += c.send(bytes(1 << 16))
    except OSError: pass
print('tcp', tcp >> 20, flush=True)
for s in kept: s.close()
kept = []
for _ in range(1400):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('127.0.0.1', 0)); s.connect(s.getsockname())
    kept.append(s)
    for _ in range(64): s.send(bytes(30000))
for s in kept:
    s.setblocking(False)
    try:
        while True: udp += len(s.recv(65536))
    except OSError: pass
print('udp', udp >> 20, flush=True)
signal.pause()
";
    let mut spec = fixture.spec(Profile::Host, &[&["python3", "-c", script]]);
    spec.limits.memory_bytes = Some(MEMORY);
    spec.open_files_max = 4000;
    fixture.run(&spec);
    let reported = |what: &str| {
        let text = log(&spec.dir);
        let reported =
            text.split_once(&format!(" {what} "))?.1.split_whitespace().next()?.parse::<u64>();
        reported.ok()
    };
    eventually("it took what it can have", || reported("udp").is_some());
    let (tcp, udp) = (reported("tcp").unwrap(), reported("udp").unwrap());
    println!("{tcp} MiB by TCP, {udp} by UDP");
    // Each socket may exceed it a little.
    assert!(tcp << 20 < MEMORY && udp << 20 < MEMORY, "{tcp} MiB by TCP, {udp} by UDP");
}

/// The program gets its TAPs from PdP. The kernel charges the queues of other TAPs to nobody.
#[test]
fn tap_program_manages_links_but_opens_no_tap() {
    let fixture = Fixture::new();
    let script = "ip link add v0 type veth peer v1 && ip link show v0; ip tuntap add dev t0 mode tap; \
                  grep CapEff /proc/self/status";
    let (_, text) = fixture.forwarding(true, script);
    assert!(text.contains("v0@v1: <") && text.contains("CapEff:\t0000000000003000"), "{text}");
    assert!(text.contains("open: No such file"), "{text}");
    let (_, text) = fixture.forwarding(false, script);
    assert!(!text.contains("v0@v1: <"), "{text}");
    assert!(!Path::new("/sys/class/net/v0").exists());
}

#[test]
fn guests_do_not_see_host_files_or_processes() {
    let fixture = Fixture::new();
    for profile in [Profile::Control, Profile::Host, Profile::Forwarding { tap: false }] {
        let spec = fixture.spec(profile, &[&["sleep", "1000"]]);
        fixture.run(&spec);
        let (_, text) = fixture.exec(
            &spec,
            "cat /etc/shadow; find /run /root /home /var /opt /mnt /srv /tmp -xdev 2>&1; \
             ls /proc | grep '^[0-9]' | wc -l; ls -ln / | head -4; cat /proc/1/cgroup; ls /dev",
        );
        // The guest has accounts of its own, without passwords.
        let secret = |line: &&str| line.split(':').nth(1).is_some_and(|field| field != "*");
        let accounts = text.lines().take_while(|line| !line.starts_with('/'));
        assert_eq!(accounts.clone().find(secret), None, "{text}");
        let is_root = !matches!(profile, Profile::Forwarding { .. });
        assert_eq!(accounts.count() > 10, is_root, "{text}");
        let host = |path: &str| {
            let name = Path::new(path).file_name().unwrap().to_str().unwrap().to_owned();
            let inside = ["lock", "frr", "bird", "pdp", "sshd"].contains(&name.as_str());
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
        let ProcessState::Running(process) = process else { panic!("{process:?}") };
        let status = fs::read_to_string(format!("/proc/{}/status", process.pid)).unwrap();
        let uid = spec.host_id(spec.uid);
        assert!(status.contains(&format!("Uid:\t{uid}\t{uid}")), "{status}");
        fixture.runtime.delete(&spec.dir).unwrap();
    }
}

#[test]
fn hosts_can_ping_and_obey_their_limits() {
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
}

#[test]
fn guest_cpu_quota_is_enforced() {
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
    assert_eq!(fixture.runtime.state(&spec.dir).unwrap(), ProcessState::Absent);
    fixture.runtime.delete(&spec.dir).unwrap();
    // It can be made again.
    fixture.run(&spec);
}

#[test]
fn created_guest_waits_and_can_be_deleted() {
    let fixture = Fixture::new();
    let spec = fixture.spec(Profile::Host, &[&["touch", "/tmp/started"]]);
    let process = fixture.runtime.create(&spec, &[]).unwrap();
    assert_eq!(fixture.runtime.state(&spec.dir).unwrap(), ProcessState::Created(process));
    assert!(process.namespace("net").exists());
    assert!(matches!(fixture.runtime.create(&spec, &[]), Err(Error::Spec { .. })));
    fixture.runtime.delete(&spec.dir).unwrap();
    assert_eq!(fixture.runtime.state(&spec.dir).unwrap(), ProcessState::Absent);
}

#[test]
fn unknown_file_owner_is_refused() {
    let fixture = Fixture::new();
    let mut spec = fixture.spec(Profile::Host, &[]);
    for (owner, words) in [
        (named("nosuch", None), "no user nosuch in its /etc/passwd"),
        (named("0", Some("nosuch")), "no group nosuch in its /etc/group"),
        // A user id of another guest on the host.
        (named("65536", None), "its ids are 0 to 65535"),
        (FileOwner::Ids { uid: 0, gid: 65536 }, "its ids are 0 to 65535"),
    ] {
        spec.files = vec![GuestFile { owner, ..file("/tmp/file", "text", true) }];
        let refused = fixture.runtime.create(&spec, &[]).unwrap_err().to_string();
        assert!(refused.contains(words), "{refused}");
    }
    spec.files[0].owner = named("7", Some("daemon"));
    fixture.run(&spec);
    eventually("it is there", || fixture.exec(&spec, "stat -c %u:%G /tmp/file").1 == "7:daemon\n");
}

#[test]
fn guest_with_killed_shim_is_detected() {
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
    assert_eq!(fixture.runtime.state(&spec.dir).unwrap(), ProcessState::Orphaned(process));
    assert!(fixture.runtime.wait_exit(&spec.dir).unwrap().is_none());
    fixture.runtime.delete(&spec.dir).unwrap();
    assert!(!process.is_alive() && !spec.dir.exists());
    fixture.run(&spec);
}

#[test]
fn half_created_guest_can_be_deleted() {
    let fixture = Fixture::new();
    let spec = fixture.spec(Profile::Host, &[]);
    let process = fixture.run(&spec);
    // As if the maker and the shim had died before the process was recorded.
    let shim = fs::read_to_string(spec.dir.join("shim")).unwrap();
    let shim: pdp_container::Process = serde_json::from_str(&shim).unwrap();
    kill(shim.pid);
    eventually("the shim is dead", || !shim.is_alive());
    for name in ["pid", "runc.pid", "shim"] {
        fs::remove_file(spec.dir.join(name)).unwrap();
    }
    assert_eq!(fixture.runtime.state(&spec.dir).unwrap(), ProcessState::Absent);
    assert_eq!(fixture.runtime.list().unwrap(), std::slice::from_ref(&spec.dir));
    fixture.runtime.delete(&spec.dir).unwrap();
    eventually("the guest is gone", || !process.is_alive());
    assert!(!fixture.runtime.cgroups().exists("red") && !spec.dir.exists());
}

/// Root believes a guest's files only if no other user can have written them. Files that it does
/// not understand are removed all the same.
#[test]
fn forged_guest_records_are_refused() {
    use std::os::unix::fs::{chown, symlink};

    let fixture = Fixture::new();
    let elsewhere = fixture.path("elsewhere");
    let forged = |dir: &Path, name: &str, bytes: &[u8]| {
        fs::create_dir_all(dir).unwrap();
        fs::write(dir.join(name), bytes).unwrap();
    };
    let good = br#"{"version":2,"kind":"guest","cgroup":"red/r1"}"#;
    forged(&elsewhere, "record.json", good);
    type Case<'a> = (&'a str, &'a dyn Fn(&Path));
    let cases: [Case<'_>; 7] = [
        ("link", &|dir| symlink(elsewhere.join("record.json"), dir.join("record.json")).unwrap()),
        ("zero", &|dir| symlink("/dev/zero", dir.join("record.json")).unwrap()),
        ("directory", &|dir| fs::create_dir_all(dir.join("record.json/a/b")).unwrap()),
        ("pipe", &|dir| {
            let path = dir.join("record.json");
            let kind = rustix::fs::FileType::Fifo;
            rustix::fs::mknodat(rustix::fs::CWD, path, kind, 0o600.into(), 0).unwrap();
        }),
        ("another", &|dir| {
            forged(dir, "record.json", good);
            chown(dir.join("record.json"), Some(BASE), None).unwrap();
        }),
        ("rubbish", &|dir| forged(dir, "record.json", &vec![b'['; 1 << 20])),
        ("older", &|dir| forged(dir, "record.json", br#"{"what":{"guest":{}},"fds":0}"#)),
    ];
    for (name, make) in &cases {
        fs::create_dir_all(fixture.record(name)).unwrap();
        make(&fixture.record(name));
    }
    assert_eq!(fixture.runtime.list().unwrap().len(), cases.len());
    // Paths elsewhere are refused.
    for path in [elsewhere.clone(), fixture.path("records"), fixture.record("link/../../elsewhere")]
    {
        assert!(matches!(fixture.runtime.delete(&path), Err(Error::Spec { .. })), "{path:?}");
    }
    let spec = fixture.spec(Profile::Host, &[&["sleep", "1000"]]);
    let process = fixture.run(&spec);
    for (name, _) in &cases {
        let dir = fixture.record(name);
        let error = fixture.runtime.state(&dir).expect_err(name).to_string();
        assert!(error.contains("record.json"), "{name}: {error}");
        fixture.runtime.delete(&dir).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(!dir.exists(), "{name}");
    }
    // A guest of another version is ended although its record is not understood.
    let record = fs::read_to_string(spec.dir.join("record.json")).unwrap();
    fs::write(spec.dir.join("record.json"), record.replace("\"version\":2", "\"version\":1"))
        .unwrap();
    assert!(fixture.runtime.state(&spec.dir).is_err());
    fixture.runtime.delete(&spec.dir).unwrap();
    assert!(!process.is_alive() && !spec.dir.exists());
}

#[test]
fn failed_create_reports_cause_and_leaves_nothing() {
    let fixture = Fixture::new();
    let mut spec = fixture.spec(Profile::Host, &[]);
    spec.sysctls.insert("net.ipv4.no_such_thing".into(), "1".into());
    let error = fixture.runtime.create(&spec, &[]).unwrap_err().to_string();
    assert!(error.contains("no_such_thing"), "{error}");
    assert!(!spec.dir.exists() && !fixture.runtime.cgroups().exists("red"));
}

#[test]
fn guests_outlive_their_maker() {
    // The maker is this test program, started again. It makes a guest and is killed.
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
    eventually("it runs", || {
        matches!(fixture.runtime.state(&spec.dir), Ok(ProcessState::Running(_)))
    });
    maker.kill().unwrap();
    maker.wait().unwrap();
    let ProcessState::Running(process) = fixture.runtime.state(&spec.dir).unwrap() else {
        panic!()
    };
    let fd = fixture.runtime.wait_exit(&spec.dir).unwrap().unwrap();
    assert!(fixture.exec(&spec, "true").0);
    // The shim is neither in this test's cgroups nor in its session. Ending these does not end the
    // guest.
    let shim = fs::read_to_string(spec.dir.join("shim")).unwrap();
    let shim: pdp_container::Process = serde_json::from_str(&shim).unwrap();
    let cgroup = fs::read_to_string(format!("/proc/{}/cgroup", shim.pid)).unwrap();
    assert!(cgroup.lines().all(|line| line.ends_with(&format!("{}/_shims", fixture.cgroup))));
    kill(process.pid);
    let mut fds = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
    let seconds = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut fds, Some(&seconds)).unwrap(), 1);
    let ProcessState::Exited(Some(exit)) = fixture.runtime.state(&spec.dir).unwrap() else {
        panic!()
    };
    assert_eq!((exit.code, exit.signal), (None, Some(9)));
    assert!(fixture.runtime.wait_exit(&spec.dir).unwrap().is_none());
}

/// Helper process, not a test by itself: see [`guests_outlive_their_maker`].
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
fn commands_restart_and_forwarding_guest_ends_with_last() {
    let fixture = Fixture::new();
    let mut spec = fixture.spec(Profile::Host, &[]);
    spec.commands = vec![
        command(&["sh", "-c", "echo again; exit 3"], CommandRestart::Always),
        command(&["sh", "-c", "echo once"], CommandRestart::Never),
        command(&["/no/such/program"], CommandRestart::Never),
    ];
    fixture.run(&spec);
    eventually("it was restarted", || log(&spec.dir).matches(" again\n").count() >= 3);
    eventually("all were tried", || log(&spec.dir).contains("can't be started"));
    eventually("all have spoken", || log(&spec.dir).contains(" once\n"));
    let text = log(&spec.dir);
    assert_eq!(text.matches(" once\n").count(), 1);
    assert!(text.contains("/no/such/program can't be started"), "{text}");
    assert!(text.contains("exit status: 3"), "{text}");
    assert!(matches!(fixture.runtime.state(&spec.dir).unwrap(), ProcessState::Running(_)));
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
fn guest_gets_descriptors_files_binds_and_environment() {
    let fixture = Fixture::new();
    let shared = fixture.path("shared");
    fs::create_dir(&shared).unwrap();
    fs::write(shared.join("hello"), "from the host\n").unwrap();
    let script = "cat <&3; cat <&4; cat /run/pdp/shared/hello /run/own.conf; echo $COLOUR; \
                  ls -l /proc/self/fd | grep -c /; touch /run/pdp/shared/x";
    let mut spec = fixture.spec(Profile::Forwarding { tap: false }, &[&["bash", "-c", script]]);
    spec.files = vec![GuestFile {
        owner: FileOwner::Ids { uid: 1000, gid: 1000 },
        ..file("/run/own.conf", "a file\n", false)
    }];
    let target = "/run/pdp/shared".into();
    spec.binds = vec![BindMount { source: shared, target, writable: false, wished: false }];
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
fn guest_log_is_bounded() {
    let fixture = Fixture::new();
    let script = "for i in $(seq 20000); do echo line $i of many; done";
    let mut spec = fixture.spec(Profile::Forwarding { tap: false }, &[&["bash", "-c", script]]);
    spec.log_bytes_max = 100_000;
    fixture.run(&spec);
    assert_eq!(fixture.exit(&spec.dir), Some(0));
    for log in fixture.runtime.logs(&spec.dir).unwrap() {
        assert!(fs::metadata(log).unwrap().len() <= spec.log_bytes_max);
    }
    assert!(log(&spec.dir).contains("line 20000 of many"));
}

#[test]
fn helpers_run_isolated_and_unprivileged() {
    let fixture = Fixture::new();
    let input = fixture.path("input");
    fs::write(&input, "passed\n").unwrap();
    let input = fs::File::open(input).unwrap();
    // Only root may enter the directories above the program.
    let private = fixture.path("private");
    fs::create_dir_all(private.join("bin")).unwrap();
    fs::set_permissions(&private, fs::Permissions::from_mode(0o700)).unwrap();
    let program = private.join("bin/sh");
    fs::copy("/bin/sh", &program).unwrap();
    let script = "cat; grep -E '^(Uid|Groups|CapEff|CapBnd|NoNewPrivs)' /proc/self/status; \
                  cat /proc/self/cgroup; exec sleep 1000";
    let spec = HelperSpec {
        id: "tap".into(),
        dir: fixture.record("tap"),
        argv: [program.to_str().unwrap(), "-c", script].map(str::to_owned).to_vec(),
        env: BTreeMap::new(),
        cgroup: "red/r1/helpers".into(),
        uid: BASE + 5,
        keep_root: false,
        log_bytes_max: 1 << 20,
    };
    let process = fixture.runtime.spawn_helper(&spec, Some(input.as_fd())).unwrap();
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
    // The shim keeps no descriptor that it passed on. Otherwise a TAP would stay.
    let shim = fs::read_to_string(spec.dir.join("shim")).unwrap();
    let shim: pdp_container::Process = serde_json::from_str(&shim).unwrap();
    for fd in fs::read_dir(format!("/proc/{}/fd", shim.pid)).unwrap() {
        let target = fs::read_link(fd.unwrap().path()).unwrap();
        assert!(!target.ends_with("input"), "{target:?}");
    }
    assert_eq!(fixture.runtime.state(&spec.dir).unwrap(), ProcessState::Running(process));
    fixture.runtime.stop(&spec.dir, GRACE).unwrap();
    let ProcessState::Exited(Some(exit)) = fixture.runtime.state(&spec.dir).unwrap() else {
        panic!()
    };
    assert_eq!(exit.signal, Some(15));
    fixture.runtime.delete(&spec.dir).unwrap();
    assert!(!spec.dir.exists() && !fixture.runtime.cgroups().exists("red"));
    let root = HelperSpec { uid: 0, ..spec };
    assert!(matches!(fixture.runtime.spawn_helper(&root, None), Err(Error::Spec { .. })));
}

fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

/// Files of a forwarding guest exist at any path, even if its root lacks it, with their owner and
/// mode. The guest can't change them. No link of its root leads them elsewhere.
#[test]
fn forwarding_guest_files_may_have_any_path() {
    let fixture = Fixture::new();
    let paths = ["/hub.sh", "/opt/lab/deep/x", "/etc/hosts", "/run/x", "/tmp/y/z", "/etc/mtab"];
    let script = "for file in /hub.sh /opt/lab/deep/x /etc/hosts /run/x /tmp/y/z /etc/mtab; do
            echo $file $(cat $file) $(stat -c %u:%g:%a $file)
            (echo no > $file) 2>/dev/null && echo changed
            rm -f $file 2>/dev/null && echo removed
        done";
    let mut spec = fixture.spec(Profile::Forwarding { tap: false }, &[&["sh", "-c", script]]);
    spec.files = paths
        .iter()
        .map(|path| GuestFile {
            path: path.into(),
            content: format!("of{}", path.replace('/', "-")),
            mode: 0o640,
            owner: FileOwner::Ids { uid: 1000, gid: 7 },
            writable: false,
        })
        .collect();
    fixture.run(&spec);
    assert_eq!(fixture.exit(&spec.dir), Some(1));
    let text = log(&spec.dir);
    for path in paths {
        let line = format!("{path} of{} 1000:7:640", path.replace('/', "-"));
        assert!(text.contains(&line), "{line} in {text}");
    }
    assert!(!text.contains("changed") && !text.contains("removed"), "{text}");

    for (path, reason) in
        [("/var/run/x", "file or link"), ("/usr/x", "Read-only"), ("/opt", "directory")]
    {
        let mut spec = fixture.spec(Profile::Forwarding { tap: false }, &[&["true"]]);
        spec.files = vec![GuestFile {
            path: path.into(),
            content: String::new(),
            mode: 0o644,
            owner: FileOwner::ROOT,
            writable: false,
        }];
        match fixture.runtime.create(&spec, &[]) {
            Ok(_) => assert!(path == "/usr/x" && !Path::new(path).exists(), "{path}"),
            Err(error) => assert!(error.to_string().contains(reason), "{error}"),
        }
    }
    assert!(!Path::new("/run/x").exists());
}

fn wish(source: &Path, target: &str, writable: bool) -> BindMount {
    BindMount { source: source.into(), target: target.into(), writable, wished: true }
}

/// Binds of the machine appear live in the guest, even if its root lacks the path. No guest can
/// make a read-only one writable. Directories mounted below are not included.
#[test]
fn binds_show_machine_files_and_directories() {
    let fixture = Fixture::new();
    let shared = fixture.path("shared");
    fs::create_dir_all(shared.join("below")).unwrap();
    fs::write(shared.join("a"), "of the machine\n").unwrap();
    let open = fixture.path("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
    let mut spec = fixture.spec(Profile::Control, &[&["sleep", "1000"]]);
    spec.privileged = true;
    spec.binds = vec![
        wish(&shared.join("a"), "/etc/lab/a", false),
        wish(&shared, "/lab/in", false),
        wish(&shared.join("a"), "/srv/one", false),
        wish(&open, "/var/open", true),
    ];
    fixture.run(&spec);
    let (good, text) =
        fixture.exec(&spec, "cat /etc/lab/a /lab/in/a /srv/one; ls -d /lab/in/below");
    assert!(good && text.matches("of the machine").count() == 3, "{text}");
    fs::write(shared.join("b"), "later\n").unwrap();
    assert_eq!(fixture.exec(&spec, "cat /lab/in/b"), (true, "later\n".into()));
    for line in ["touch /lab/in/c", "mount -o remount,bind,rw /lab/in", "echo x > /srv/one"] {
        let (good, text) = fixture.exec(&spec, line);
        assert!(!good, "{line}: {text}");
    }
    let mounts = fixture.exec(&spec, "grep -E ' /(lab/in|var/open|srv/one) ' /proc/mounts").1;
    assert_eq!(mounts.matches("nosuid,nodev").count(), 3, "{mounts}");
    let (good, text) = fixture.exec(&spec, "umount /lab/in; touch /lab/in/c");
    assert!(!good && !shared.join("c").exists(), "{text}");
    let script = "echo x > /var/open/x && cp /bin/true /var/open/su && chmod 4755 /var/open/su";
    let (good, text) = fixture.exec(&spec, script);
    assert!(good, "{text}");
    let owner = std::os::unix::fs::MetadataExt::uid(&fs::metadata(open.join("su")).unwrap());
    assert_eq!(owner, BASE, "what its root makes is not the machine's root's");
}

/// A link in any part of the path is never followed, neither when the guest is checked nor when it
/// is mounted.
#[test]
fn binds_never_follow_symbolic_links() {
    let fixture = Fixture::new();
    let granted = fixture.path("granted");
    fs::create_dir(&granted).unwrap();
    let secret = fixture.path("secret");
    fs::create_dir(&secret).unwrap();
    fs::write(secret.join("key"), "secret").unwrap();
    std::os::unix::fs::symlink(&secret, granted.join("out")).unwrap();
    std::os::unix::fs::symlink(secret.join("key"), granted.join("key")).unwrap();
    std::os::unix::fs::symlink("../secret", granted.join("up")).unwrap();
    std::os::unix::fs::symlink(&secret, fixture.path("replaced")).unwrap();
    let socket = std::os::unix::net::UnixListener::bind(granted.join("socket")).unwrap();
    let refused = |source: &Path, words: &str| {
        let mut spec = fixture.spec(Profile::Host, &[&["sleep", "1000"]]);
        spec.binds = vec![wish(source, "/srv/x", false)];
        let error = fixture.runtime.create(&spec, &[]).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("bind of /"), "{error}");
        assert!(pdp_container::binds::check(source).unwrap_err().contains(words));
    };
    for name in ["out", "out/key", "key", "up"] {
        refused(&granted.join(name), "symbolic link");
    }
    // A link to the granted directory itself, and things that are neither file nor directory.
    refused(&fixture.path("replaced/key"), "symbolic link");
    refused(&granted.join("socket"), "neither a file nor a directory");
    refused(&granted.join("none"), "No such file");
    refused(Path::new("/proc/self/root"), "symbolic link");
    drop(socket);

    // A link replaces the directory again and again while guests are made. Each guest sees the
    // directory's content, or is not made.
    let (changing, stop) = (granted.join("changing"), AtomicU32::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (own, link) = (granted.join("own"), granted.join("link"));
            fs::create_dir(&own).unwrap();
            fs::write(own.join("key"), "own").unwrap();
            std::os::unix::fs::symlink(&secret, &link).unwrap();
            while stop.load(Ordering::Relaxed) == 0 {
                for from in [&own, &link] {
                    fs::rename(from, &changing).unwrap();
                    std::thread::sleep(Duration::from_millis(3));
                    fs::rename(&changing, from).unwrap();
                }
            }
        });
        let mut made = 0;
        for _ in 0..12 {
            let mut spec = fixture.spec(Profile::Host, &[&["sleep", "1000"]]);
            spec.binds = vec![wish(&changing, "/srv/x", false)];
            let Ok(_) = fixture.runtime.create(&spec, &[]) else { continue };
            fixture.runtime.start(&spec.dir).unwrap();
            let (_, text) = fixture.exec(&spec, "cat /srv/x/key");
            assert_eq!(text, "own");
            made += 1;
            fixture.runtime.delete(&spec.dir).unwrap();
        }
        stop.store(1, Ordering::Relaxed);
        println!("{made} made");
    });
}
