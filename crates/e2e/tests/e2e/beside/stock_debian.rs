//! A stock Debian 12 (its own kernel, systemd, cgroup v2 only) hosts two FRR vrouters that forward
//! with their CPU limits in force, and restores them after a reboot.
//!
//! The machine is emulated (QEMU, TCG: no virtualisation needed). mmdebstrap makes its disk from
//! Debian packages once, below `target/vm`. Each run adds the files of `make install`. vm/inside.sh
//! runs in it and prints its findings on the console. Another machine with the same disk has the
//! remote ends of [`tunnels`].

mod tunnels;

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use pdp_e2e::beside;

const PACKAGES: &str = "systemd-sysv,udev,dbus,frr,runc,iproute2,iputils-ping,procps,jq,kmod,\
                        libelf1,zlib1g,libseccomp2,linux-image-cloud-amd64";
/// Unused files: a third of all.
const UNREAD: [&str; 4] =
    ["/usr/share/doc", "/usr/share/info", "/usr/share/locale", "/usr/share/man"];
const DISK_BYTES: u64 = 3 << 30;
const BOOT_S_MAX: u64 = 1_200;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("crates/e2e").to_path_buf()
}

fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(status.success(), "{command:?}: {status}");
}

/// Directory of all of this, with a disk for each machine.
static WORK: LazyLock<PathBuf> = LazyLock::new(make_disks);

/// The disks, with equal contents.
const DISK: &str = "disk.img";
const PEER_DISK: &str = "peer.img";
const LIMITS_DISK: &str = "limits.img";

/// Debian with PdP installed, below `target/vm/root`, and on the disks.
fn make_disks() -> PathBuf {
    let work = repository().join("target/vm");
    fs::create_dir_all(&work).expect("mkdir");
    let base = work.join("debian.tar");
    if !base.exists() {
        let partial = work.join("partial.tar");
        run(Command::new("mmdebstrap")
            .args(["--quiet", "--variant=minbase"])
            .args(UNREAD.map(|path| format!("--dpkgopt=path-exclude={path}/*")))
            .arg(format!("--include={PACKAGES}"))
            .arg("bookworm")
            .arg(&partial));
        fs::rename(&partial, &base).expect("rename");
    }
    let root = work.join("root");
    if root.exists() {
        fs::remove_dir_all(&root).expect("remove the last run's root");
    }
    fs::create_dir_all(&root).expect("mkdir");
    run(Command::new("tar").arg("-C").arg(&root).arg("-xf").arg(&base));
    run(Command::new("make")
        .current_dir(repository())
        .arg("install-files")
        .arg(format!("DESTDIR={}", root.display()))
        .arg(format!("BUILD={}", binaries().display())));
    let vm = repository().join("crates/e2e/vm");
    for script in ["inside.sh", "peer.sh", "external.yaml", "limits.sh", "limits.yaml"] {
        fs::copy(vm.join(script), root.join("root").join(script)).expect("copy");
    }
    // At a path visible to guests.
    fs::copy(vm.join("requests.pl"), root.join("usr/local/share/requests.pl")).expect("copy");
    let example = |name| {
        let text = fs::read_to_string(repository().join("examples").join(name));
        // An emulated machine is too slow for watchfrr's start limit of 20 s.
        text.expect("an example").replace("watchfrr ", "watchfrr --restart-timeout 120 ")
    };
    let limited = example("ospf.yaml")
        .replace("kind: router\n", "kind: router\n      dataPlane: {power: 0.2}\n");
    fs::write(root.join("root/ospf.yaml"), limited).expect("a spec");
    // Its routers have the kernel's IPsec.
    let privileged = example("kernel.yaml")
        .replace("router: {dataPlane", "router: {privileged: true, dataPlane");
    fs::write(root.join("root/kernel.yaml"), privileged).expect("a spec");
    let units = root.join("etc/systemd/system");
    fs::copy(vm.join("vm-test.service"), units.join("vm-test.service")).expect("copy");
    let wants = units.join("multi-user.target.wants");
    for unit in ["vm-test.service", "pdpd.service"] {
        symlink(format!("/etc/systemd/system/{unit}"), wants.join(unit)).expect("enable");
    }
    fs::remove_file(wants.join("frr.service")).expect("Debian enables FRR of the host");
    let disk = work.join(DISK);
    File::create(&disk).and_then(|file| file.set_len(DISK_BYTES)).expect("disk");
    run(Command::new("mke2fs").args(["-q", "-F", "-t", "ext4", "-d"]).arg(&root).arg(&disk));
    for other in [PEER_DISK, LIMITS_DISK] {
        run(Command::new("cp").arg("--sparse=always").arg(&disk).arg(work.join(other)));
    }
    work
}

/// Directory of this build's binaries: beside the test's own.
fn binaries() -> PathBuf {
    let test = std::env::current_exe().expect("current_exe");
    test.ancestors().nth(2).expect("target directory").to_path_buf()
}

fn only_match(directory: &Path, prefix: &str) -> PathBuf {
    fs::read_dir(directory)
        .expect("boot directory")
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix))
        })
        .unwrap_or_else(|| panic!("no {prefix} in {}", directory.display()))
}

/// Arguments of the emulator for a machine with this disk, and words for its kernel.
fn machine(disk: &str, words: &str) -> Vec<String> {
    let boot = WORK.join("root/boot");
    let file = |prefix| only_match(&boot, prefix).display().to_string();
    let disk = WORK.join(disk);
    let fixed = ["-accel", "tcg,thread=multi", "-cpu", "max", "-no-reboot"].map(str::to_owned);
    let chosen = [
        ["-kernel".into(), file("vmlinuz-")],
        ["-initrd".into(), file("initrd.img-")],
        ["-append".into(), format!("root=/dev/vda rw console=ttyS0 panic=-1 {words}")],
        ["-drive".into(), format!("file={},format=raw,if=virtio", disk.display())],
    ];
    fixed.into_iter().chain(chosen.into_iter().flatten()).collect()
}

/// One boot until the machine resets; returns its output.
fn boot(number: usize) -> Vec<String> {
    boot_with(&number.to_string(), DISK, "")
}

/// Like [`boot`], for a machine with this disk and words for its kernel.
fn boot_with(name: &str, disk: &str, words: &str) -> Vec<String> {
    let console = WORK.join(format!("console-{name}.log"));
    let log = File::create(&console).expect("console log");
    let mut machine = Command::new("qemu-system-x86_64")
        .args(machine(disk, words))
        .args(["-smp", "2", "-m", "2048", "-nographic", "-nic", "none"])
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("dup"))
        .stderr(log)
        .spawn()
        .expect("qemu-system-x86_64");
    let deadline = Instant::now() + Duration::from_secs(BOOT_S_MAX);
    while machine.try_wait().expect("wait").is_none() {
        if Instant::now() > deadline {
            machine.kill().expect("kill");
            machine.wait().expect("wait");
            panic!("boot {name} did not end in {BOOT_S_MAX} s; see {}", console.display());
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    String::from_utf8_lossy(&fs::read(&console).expect("console"))
        .lines()
        .filter_map(|line| line.split_once("VM: ").map(|(_, text)| text.trim().to_string()))
        .collect()
}

fn value_of<'a>(lines: &'a [String], what: &str) -> &'a str {
    lines
        .iter()
        .find_map(|line| line.strip_prefix(what)?.strip_prefix(' '))
        .unwrap_or_else(|| panic!("the machine said nothing of {what}: {lines:#?}"))
}

fn check(lines: &[String]) {
    let cgroups = value_of(lines, "cgroups");
    assert_eq!(cgroups, "cgroup2fs v1=0", "stock Debian has cgroup v2 only");
    assert_eq!(value_of(lines, "ping"), "5 received", "{lines:#?}");
    assert!(value_of(lines, "ospf").contains("via 10.0.12.2"), "{lines:#?}");
    for guest in ["_r1.g0", "_r2.g0"] {
        // Power 0.2; 10 ms period.
        let limit = format!("cpu.max pdp/vnets/_ospf/{guest}/cpu.max 2000 10000");
        assert!(lines.contains(&limit), "no `{limit}`: {lines:#?}");
    }
    let to_guest: u64 = value_of(lines, "stats").parse().expect("a number");
    assert!(to_guest >= 10, "only {to_guest} frames went through forwarding guests");
}

/// Checks that the kernel enforces the limit.
fn check_limit(lines: &[String]) {
    let spin_us: u64 = value_of(lines, "spin_us").parse().expect("a number");
    // 0.2 cores for 4 s are 800,000 µs; the emulated machine's clock is coarse.
    assert!((400_000..1_200_000).contains(&spin_us), "spun for {spin_us} µs of CPU time");
}

/// Vrouters with the kernel data plane, joined by a kernel link.
fn check_kernel(lines: &[String]) {
    assert!(value_of(lines, "links").starts_with("ok "), "{lines:#?}");
    assert_eq!(value_of(lines, "kernel-ping"), "5 received", "{lines:#?}");
    let counters: Vec<u64> =
        serde_json::from_str(value_of(lines, "kernel-port")).expect("counters");
    assert!(counters[1] >= 5 && counters[0] >= counters[1], "{counters:?}");
    // Packets in each direction, by the kernel's count of the
    // second one. States with lifetimes count several times.
    assert!(value_of(lines, "esp-ping").starts_with("5 received"), "{lines:#?}");
    let passed: Vec<u64> =
        value_of(lines, "esp").split_whitespace().map(|it| it.parse().expect("a number")).collect();
    assert!(passed.iter().filter(|packets| **packets >= 5).count() >= 2, "{lines:#?}");
    assert_eq!(value_of(lines, "kernel-gone"), "0", "{lines:#?}");
}

/// Linux 6.1 maps the rings of an AF_XDP socket only before it is bound.
fn check_external(lines: &[String]) {
    assert!(value_of(lines, "af-xdp").starts_with("ok "), "{lines:#?}");
    assert_eq!(value_of(lines, "external-apply").split(' ').next(), Some("0"), "{lines:#?}");
    for ping in ["external-ping-10.9.0.1", "external-ping-fd09::1"] {
        assert_eq!(value_of(lines, ping), "5 received", "{lines:#?}");
    }
    assert_eq!(value_of(lines, "external-told"), "0", "nothing took its place: {lines:#?}");
    assert_eq!(value_of(lines, "external-gone").split(' ').next(), Some("0"), "{lines:#?}");
}

#[test]
fn frr_vrouters_survive_reboot_on_cgroup_v2() {
    let _turn = beside();
    let first = boot(1);
    assert_eq!(value_of(&first, "apply").split(' ').next(), Some("0"), "{first:#?}");
    check(&first);
    check_limit(&first);
    assert_eq!(value_of(&first, "vrf"), "eth0 is in VRF blue, 0 received", "{first:#?}");
    check_kernel(&first);
    check_external(&first);
    let second = boot(2);
    assert_ne!(value_of(&first, "boot"), value_of(&second, "boot"));
    assert!(!second.iter().any(|line| line.starts_with("apply")), "nothing is applied twice");
    check(&second);
}

/// The first two numbers in the output of requests.pl: successful requests, and refused ones.
fn counts(output: &str) -> (u64, u64) {
    let mut words = output.split(' ').map_while(|word| word.parse().ok());
    words.next().zip(words.next()).unwrap_or_else(|| panic!("no counts: {output}"))
}

/// Each owner gets its own part of RTNL time and of the kernel memory that
/// is charged to no cgroup. Its guests' capabilities and attacks of others
/// do not change that. The machine has no IPv6, and nodes work without it.
#[test]
fn no_guest_exhausts_shared_kernel_resources() {
    let _turn = beside();
    let lines = boot_with("limits", LIMITS_DISK, "vm.limits ipv6.disable=1");
    let value_of = |what| value_of(&lines, what);
    assert!(value_of("guest-bounds").starts_with("ok "), "{lines:#?}");
    assert!(value_of("socket-memory").starts_with("ok "), "{lines:#?}");
    assert!(value_of("tracked-connections").starts_with("ok "), "{lines:#?}");

    assert_eq!(value_of("families"), "ipv4", "{lines:#?}");
    assert!(
        ["TAP", "kernel-links"].iter().all(|what| value_of(what).starts_with("ok ")),
        "{lines:#?}"
    );
    assert_eq!(value_of("ping"), "3 received", "{lines:#?}");
    assert!(value_of("refused").contains("ipv6.disable=1"), "{lines:#?}");

    // 64 interfaces, and those that the elapsed time permits: an eighth of it is six per second.
    let (made, refused) = counts(value_of("links"));
    assert!((64..130).contains(&made) && made + refused == 150, "{lines:#?}");
    assert!(value_of("links").ends_with("Resource temporarily unavailable"), "{lines:#?}");
    assert!(counts(value_of("links-same")).1 > 0, "one owner has one part: {lines:#?}");
    assert_eq!(value_of("links-others"), "20 0 none", "{lines:#?}");
    assert_eq!(value_of("links-root"), "264 0 none", "{lines:#?}");
    assert_eq!(value_of("routes"), "5000 0 none", "{lines:#?}");
    assert_eq!(value_of("reading"), "lo", "{lines:#?}");
    assert!(counts(value_of("links-again")).1 > 0, "{lines:#?}");
    assert_eq!(value_of("links-later"), "20 0 none", "{lines:#?}");
    assert_eq!(value_of("links-call"), "0 65 Message too long", "{lines:#?}");

    let most = value_of("links-most");
    assert!(most.ends_with("No space left on device 320"), "{lines:#?}");
    let (made, refused) = counts(value_of("entries"));
    assert!((32_768 - 50..34_000).contains(&made) && made + refused == 40_000, "{lines:#?}");
    assert!(value_of("entries").ends_with("No space left on device"), "{lines:#?}");
    assert_eq!(value_of("entries-others"), "100 0 none", "{lines:#?}");
    let tracked: u64 =
        value_of("tracked").rsplit(' ').next().unwrap_or("").parse().expect("a number");
    assert!(tracked <= 16_384, "{lines:#?}");
    // Without limits a restart beside this attack takes 200
    // times as long; an emulated machine varies by less.
    let [alone, beside, beside_group] = ["restart-alone", "restart-beside", "restart-beside-group"]
        .map(|what| value_of(what).trim_end_matches(" ms").parse::<u64>().expect("milliseconds"));
    println!(
        "a node restarts in {alone} ms alone, in {beside} and {beside_group} ms beside attacks"
    );
    assert!(beside.max(beside_group) <= 4 * alone + 10_000, "{lines:#?}");
    // A request for a group takes 80 ms: 16 at once, and three in two seconds.
    let (passed, refused) = counts(value_of("group"));
    println!("{passed} of 200 requests for {}", value_of("group-on"));
    assert!((8..100).contains(&passed) && passed + refused == 200, "{lines:#?}");
    assert!(value_of("group").ends_with("Resource temporarily unavailable"), "{lines:#?}");
    // The programs' pins are gone.
    assert!(lines.iter().any(|line| line == "left"), "{lines:#?}");
}
