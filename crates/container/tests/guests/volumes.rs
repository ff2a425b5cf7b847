//! Volumes keep their content, have a size limit, and leave nothing on the machine.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use pdp_container::{GuestSpec, Profile, VolumeMount, volumes};

use super::{BASE, Fixture, eventually, file};

const MIB: u64 = 1 << 20;

fn volume(name: &str, target: &str, mib: u64) -> VolumeMount {
    VolumeMount { name: name.into(), target: target.into(), bytes: mib * MIB }
}

fn host(fixture: &Fixture, volumes: Vec<VolumeMount>) -> GuestSpec {
    GuestSpec { volumes, ..fixture.spec(Profile::Host, &[&["sleep", "1000"]]) }
}

/// Ends a guest and makes it again.
fn again(fixture: &Fixture, spec: &GuestSpec) {
    fixture.runtime.delete(&spec.dir).unwrap();
    fixture.run(spec);
}

fn run(fixture: &Fixture, spec: &GuestSpec, script: &str) -> String {
    let (well, text) = fixture.exec(spec, script);
    assert!(well, "{script}: {text}");
    text
}

/// Lists the files of a guest's volumes.
fn files(fixture: &Fixture, spec: &GuestSpec) -> Vec<String> {
    let entries = fs::read_dir(fixture.path("volumes").join(&spec.id));
    let name = |entry: fs::DirEntry| entry.file_name().into_string().unwrap();
    let mut names: Vec<String> = entries.into_iter().flatten().flatten().map(name).collect();
    names.sort();
    names
}

/// Lists the loop devices of files below a directory.
fn loops(directory: &Path) -> Vec<String> {
    let backing = |entry: fs::DirEntry| {
        fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default()
    };
    let entries = fs::read_dir("/sys/block").unwrap().flatten();
    let directory = directory.to_str().unwrap();
    entries.map(backing).filter(|path| path.starts_with(directory)).collect()
}

fn nothing_is_left(fixture: &Fixture) {
    eventually("no loop device is left", || loops(fixture.dir.path()).is_empty());
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(fixture.dir.path().to_str().unwrap()), "{mounts}");
}

#[test]
fn volume_content_persists() {
    let fixture = Fixture::new();
    let mut spec = host(&fixture, vec![volume("state", "/srv/state", 16)]);
    spec.volumes.push(volume("mail", "/var/tmp", 16));
    spec.files = vec![file("/srv/state/put", "put\n", true)];
    fixture.run(&spec);
    // Empty except for the spec's file, with owner and mode of the root's directory.
    assert_eq!(
        run(&fixture, &spec, "ls -A /srv/state /var/tmp"),
        "/srv/state:\nput\n\n/var/tmp:\n"
    );
    let owners = run(&fixture, &spec, "stat -c '%U %a' /srv/state /var/tmp");
    assert_eq!(owners, "root 755\nroot 1777\n");
    let options = run(&fixture, &spec, "grep -E ' /(srv/state|var/tmp) ' /proc/self/mounts");
    assert!(options.lines().all(|line| line.contains("nosuid,nodev")), "{options}");
    assert_eq!(options.lines().count(), 2);
    run(
        &fixture,
        &spec,
        "echo kept > /srv/state/x; echo changed > /srv/state/put; chown nobody /srv/state/x",
    );
    run(&fixture, &spec, "ln -s /etc/passwd /var/tmp/link");

    again(&fixture, &spec);
    assert_eq!(run(&fixture, &spec, "cat /srv/state/x /srv/state/put"), "kept\nput\n");
    assert_eq!(run(&fixture, &spec, "stat -c %U /srv/state/x"), "nobody\n");

    // At another path, and for a guest with other user ids.
    spec.volumes[0] = volume("state", "/var/lib/state", 16);
    spec.users.base = BASE + 65_536;
    spec.files.clear();
    again(&fixture, &spec);
    let text = run(
        &fixture,
        &spec,
        "stat -c %U /var/lib/state/x; df --output=size -m /var/lib/state | tail -1",
    );
    let size: u64 = text.lines().nth(1).unwrap().trim().parse().unwrap();
    assert!(text.starts_with("nobody\n") && (10..=16).contains(&size), "{text}");

    // A volume of another size is replaced, and one that is no longer in the spec is removed.
    spec.volumes = vec![volume("state", "/srv/state", 24)];
    again(&fixture, &spec);
    assert_eq!(run(&fixture, &spec, "ls -A /srv/state"), "");
    assert_eq!(files(&fixture, &spec), ["state.ext4"]);
    spec.volumes.clear();
    again(&fixture, &spec);
    assert!(!fixture.path("volumes").join(&spec.id).exists());
    nothing_is_left(&fixture);

    let mut forwarding = fixture.spec(Profile::Forwarding { tap: false }, &[&["true"]]);
    forwarding.volumes = vec![volume("state", "/srv/state", 16)];
    let error = fixture.runtime.create(&forwarding, &[]).unwrap_err().to_string();
    assert!(error.contains("a forwarding guest has none"), "{error}");
    for name in ["../x", "a/b", ".", ""] {
        spec.volumes = vec![volume(name, "/srv/state", 16)];
        fixture.runtime.delete(&spec.dir).unwrap();
        let error = fixture.runtime.create(&spec, &[]).unwrap_err().to_string();
        assert!(error.contains("its name must be"), "{error}");
    }
}

/// A full volume has no bytes or inodes left for its guest. On the machine's disk it takes the same
/// space before and after.
#[test]
fn full_volume_affects_only_its_guest() {
    let fixture = Fixture::new();
    let volumes = vec![volume("a", "/srv/a", 16), volume("b", "/srv/b", 16)];
    let spec = host(&fixture, volumes);
    fixture.run(&spec);
    let path = fixture.path("volumes").join(&spec.id).join("a.ext4");
    let taken = || fs::metadata(&path).unwrap().blocks() * 512;
    let before = taken();
    assert!(before >= 16 * MIB, "{before}");
    let (well, output) = fixture.exec(&spec, "dd if=/dev/zero of=/srv/a/x bs=64k");
    assert!(!well && output.contains("No space left on device"), "{output}");
    run(&fixture, &spec, "rm /srv/a/x; sync /srv/a");
    let script = "cd /srv/a; n=0; while true 2>/dev/null > f$n; do n=$((n+1)); done; echo $n";
    let made: u64 = run(&fixture, &spec, script).trim().parse().unwrap();
    let (_, output) = fixture.exec(&spec, "touch /srv/a/more");
    assert!(output.contains("No space left on device"), "{output}");
    assert!(made <= 16 * MIB / 8192, "{made} files");
    run(&fixture, &spec, "echo well > /srv/b/x && cat /srv/b/x && sync /srv/a");
    let after = taken();
    assert!(after <= before + MIB, "{before} before, {after} after");
    fixture.runtime.delete(&spec.dir).unwrap();
    nothing_is_left(&fixture);
}

/// If a volume is mounted in another, or a file is put into it, links that the guest left there
/// lead only within the guest.
#[test]
fn links_in_a_volume_stay_within_the_guest() {
    let fixture = Fixture::new();
    let outside = fixture.path("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("key"), "secret").unwrap();
    let volumes = vec![volume("a", "/srv/a", 16), volume("b", "/srv/a/b", 16)];
    let mut spec = host(&fixture, volumes);
    fixture.run(&spec);
    // A link replaces the mount point of the second, below the first. It leads to a path that
    // exists only on the machine, up and out, or to a path in the guest.
    let alone = host(&fixture, vec![spec.volumes[0].clone()]);
    let alone = GuestSpec { id: spec.id.clone(), dir: spec.dir.clone(), ..alone };
    let both = spec.volumes.clone();
    for to in [outside.to_str().unwrap(), "../../../../../../../../..", "/etc", "/proc/1/root"] {
        fixture.runtime.delete(&spec.dir).unwrap();
        // This removes the second, which is new each time.
        fixture.run(&alone);
        let script =
            format!("rm -rf /srv/a/b; ln -sfn {to} /srv/a/b; ln -sfn {to} /srv/a/f; ls -l /srv/a");
        run(&fixture, &alone, &script);
        fixture.runtime.delete(&spec.dir).unwrap();
        spec.volumes.clone_from(&both);
        spec.files = vec![file("/srv/a/f/put", "put", true), file("/srv/a/b/put", "put", true)];
        // The guest's own files decide whether it can be made.
        if fixture.runtime.create(&spec, &[]).is_ok() {
            let _ = fixture.runtime.start(&spec.dir);
            let _ =
                fixture.exec(&spec, "cat /srv/a/b/key; echo x > /srv/a/b/x; echo x > /srv/a/f/x");
        }
        let mut names: Vec<_> =
            fs::read_dir(&outside).unwrap().flatten().map(|it| it.file_name()).collect();
        names.sort();
        assert_eq!(names, ["key"], "{to}");
        for path in ["/put", "/x", "/etc/put", "/etc/x", "/root/put"] {
            assert!(!Path::new(path).exists(), "{path} by {to}");
        }
    }
    fixture.runtime.delete(&spec.dir).unwrap();
    nothing_is_left(&fixture);
}

/// A file system of its own at a path, until dropped.
struct Disk(PathBuf);

impl Disk {
    fn new(at: PathBuf, mib: u64) -> Self {
        fs::create_dir_all(&at).unwrap();
        let size = format!("size={mib}m");
        let mount =
            Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(&at).status();
        assert!(mount.unwrap().success());
        Self(at)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// A volume larger than the disk's free space is refused with a message and leaves nothing. The
/// space reserved for others stays free.
#[test]
fn full_disk_refuses_a_new_volume() {
    let fixture = Fixture::new();
    let free_min = volumes::FREE_BYTES_MIN / MIB;
    let disk = Disk::new(fixture.path("volumes"), free_min + 40);
    let mut spec = host(&fixture, vec![volume("a", "/srv/a", 24)]);
    fixture.run(&spec);
    run(&fixture, &spec, "echo kept > /srv/a/x; sync /srv/a");
    spec.volumes.push(volume("b", "/srv/b", 24));
    fixture.runtime.delete(&spec.dir).unwrap();
    let error = fixture.runtime.create(&spec, &[]).unwrap_err().to_string();
    assert!(
        error.contains("volume b: ") && error.contains("24 MiB exceed its disk's free space"),
        "{error}"
    );
    assert_eq!(files(&fixture, &spec), ["a.ext4"]);
    spec.volumes = vec![volume("a", "/srv/a", 24)];
    fixture.run(&spec);
    assert_eq!(run(&fixture, &spec, "cat /srv/a/x"), "kept\n");
    fixture.runtime.delete(&spec.dir).unwrap();
    drop(disk);
    nothing_is_left(&fixture);
}

/// If a process still uses the volume of a guest that ended, the next guest gets the same file
/// system. A file never has two.
#[test]
fn volume_still_in_use_keeps_one_file_system() {
    let fixture = Fixture::new();
    let spec = host(&fixture, vec![volume("a", "/srv/a", 16)]);
    let first = fixture.run(&spec);
    run(&fixture, &spec, "echo first > /srv/a/x");
    // Kept open beyond the guest's end.
    let open =
        fs::OpenOptions::new().append(true).open(format!("/proc/{}/root/srv/a/x", first.pid));
    let mut open = open.unwrap();
    again(&fixture, &spec);
    assert_eq!(loops(fixture.dir.path()).len(), 1, "one device");
    std::io::Write::write_all(&mut open, b"second\n").unwrap();
    assert_eq!(run(&fixture, &spec, "cat /srv/a/x"), "first\nsecond\n");
    drop(open);
    run(&fixture, &spec, "echo third >> /srv/a/x");
    again(&fixture, &spec);
    assert_eq!(run(&fixture, &spec, "cat /srv/a/x"), "first\nsecond\nthird\n");
    fixture.runtime.delete(&spec.dir).unwrap();
    nothing_is_left(&fixture);
}

/// Remains of an interrupted making of a volume are not used, and are removed.
#[test]
fn half_made_volume_is_recreated() {
    let fixture = Fixture::new();
    let spec = host(&fixture, vec![volume("a", "/srv/a", 16)]);
    let directory = fixture.path("volumes").join(&spec.id);
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join("a.partial"), "half").unwrap();
    fs::write(directory.join("other.ext4"), "another's").unwrap();
    fs::create_dir_all(directory.join("b.ext4/x")).unwrap();
    fixture.run(&spec);
    assert_eq!(files(&fixture, &spec), ["a.ext4"]);
    run(&fixture, &spec, "echo well > /srv/a/x");
    let other = fixture.path("volumes").join("other");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("a.ext4"), "nobody's").unwrap();
    fixture.runtime.remove_volumes_but(&[spec.dir.clone()].into()).unwrap();
    assert!(!other.exists() && directory.exists());
    fixture.runtime.delete(&spec.dir).unwrap();
    fixture.runtime.remove_volumes(&spec.dir, &["a"].into()).unwrap();
    assert_eq!(files(&fixture, &spec), ["a.ext4"]);
    fixture.runtime.remove_volumes(&spec.dir, &[].into()).unwrap();
    assert!(!directory.exists());
    nothing_is_left(&fixture);
}
