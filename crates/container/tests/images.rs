//! OCI image layouts: unpacked completely, within their limits, and run. Needs root.

#[path = "images/layers.rs"]
mod layers;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use pdp_container::cgroup::Cgroups;
use pdp_container::image::{ImageLimits, ImageStaging, ImageStore, MANIFEST};
use pdp_container::work::{self, Workplace};
use pdp_container::{
    CommandRestart, Error, FileOwner, GuestCommand, GuestFile, GuestSpec, Limits, ProcessState,
    Profile, RootFilesystem, RunAs, Runtime, RuntimePaths, UserRange, image,
};
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};

const USERS: UserRange = UserRange { base: 900_000, length: 65_536 };

/// An entry of a layer.
enum Entry<'a> {
    Dir(&'a str),
    File(&'a str, Vec<u8>, u32),
    Symlink(&'a str, &'a str),
    Hardlink(&'a str, &'a str),
    Device(&'a str),
    /// A directory with an owner.
    Owned(&'a str, u32),
    Setuid(&'a str),
}

fn text<'a>(path: &'a str, content: &str) -> Entry<'a> {
    Entry::File(path, content.into(), 0)
}

fn layer(entries: &[Entry<'_>]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    for entry in entries {
        let mut header = Header::new_gnu();
        let (path, link, content, kind, uid): (_, _, &[u8], _, _) = match entry {
            Entry::Owned(path, uid) => (*path, "", &[], EntryType::Directory, *uid),
            Entry::Dir(path) => (*path, "", &[], EntryType::Directory, 0),
            Entry::File(path, content, uid) => (*path, "", content, EntryType::Regular, *uid),
            Entry::Symlink(path, to) => (*path, *to, &[], EntryType::Symlink, 0),
            Entry::Hardlink(path, to) => (*path, *to, &[], EntryType::Link, 0),
            Entry::Device(path) => (*path, "", &[], EntryType::Char, 0),
            Entry::Setuid(path) => (*path, "", &[], EntryType::Regular, 0),
        };
        header.set_entry_type(kind);
        header.set_size(content.len() as u64);
        header.set_mode(if matches!(entry, Entry::Setuid(_)) { 0o6755 } else { 0o755 });
        header.set_uid(uid.into());
        header.set_gid(uid.into());
        // Written by hand: the library refuses the names of hostile archives.
        header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_cksum();
        builder.append(&header, content).unwrap();
    }
    builder.into_inner().unwrap()
}

/// Writes a blob and returns its descriptor.
fn blob(layout: &Path, kind: &str, bytes: &[u8]) -> serde_json::Value {
    let hex: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    let blobs = layout.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    fs::write(blobs.join(&hex), bytes).unwrap();
    let media_type = format!("application/vnd.oci.image.{kind}");
    serde_json::json!({
        "mediaType": media_type, "digest": format!("sha256:{hex}"), "size": bytes.len(),
    })
}

/// Makes an image layout. The first layer is uncompressed, the second has gzip, others zstd.
fn make_layout(layout: &Path, layers: &[Vec<u8>]) {
    let pack = |(number, bytes): (usize, &Vec<u8>)| match number {
        0 => blob(layout, "layer.v1.tar", bytes),
        1 => {
            let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            gz.write_all(bytes).unwrap();
            blob(layout, "layer.v1.tar+gzip", &gz.finish().unwrap())
        }
        _ => {
            let level = ruzstd::encoding::CompressionLevel::Fastest;
            let zstd = ruzstd::encoding::compress_to_vec(&bytes[..], level);
            blob(layout, "layer.v1.tar+zstd", &zstd)
        }
    };
    let layers: Vec<_> = layers.iter().enumerate().map(pack).collect();
    let manifest = serde_json::json!({
        "schemaVersion": 2, "config": blob(layout, "config.v1+json", b"{}"), "layers": layers,
    });
    let mut manifest = blob(layout, "manifest.v1+json", manifest.to_string().as_bytes());
    manifest["annotations"] = serde_json::json!({ "org.opencontainers.image.ref.name": "v1" });
    let index = serde_json::json!({ "schemaVersion": 2, "manifests": [manifest] });
    fs::write(layout.join("index.json"), index.to_string()).unwrap();
    fs::write(layout.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
}

struct Dir(tempfile::TempDir);

impl Dir {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o711)).unwrap();
        Self(dir)
    }

    fn unpack(&self, layers: &[Vec<u8>]) -> Result<PathBuf, Error> {
        let layout = self.0.path().join("layout");
        let _ = fs::remove_dir_all(&layout);
        make_layout(&layout, layers);
        image::unpack(&layout, Some("v1"), &self.images())
    }

    fn images(&self) -> PathBuf {
        self.0.path().join("images")
    }
}

/// Removes everything, even if a test fails.
struct Fixture {
    runtime: Runtime,
    dir: PathBuf,
}

impl Drop for Fixture {
    fn drop(&mut self) {
        let _ = self.runtime.delete(&self.dir);
        let _ = self.runtime.cgroups().remove("", Duration::from_secs(10));
        self.runtime.cgroups().remove_if_empty("");
    }
}

fn fixture(dir: &Dir, cgroup: &str) -> Fixture {
    Fixture {
        dir: dir.0.path().join("records").join(cgroup),
        runtime: Runtime::new(RuntimePaths {
            runc: "/usr/sbin/runc".into(),
            shim: env!("CARGO_BIN_EXE_pdp-shim").into(),
            init: env!("CARGO_BIN_EXE_pdp-init").into(),
            work: env!("CARGO_BIN_EXE_pdp-work").into(),
            records: dir.0.path().join("records"),
            runc_root: dir.0.path().join("runc"),
            logs: dir.0.path().join("logs"),
            images: dir.images(),
            volumes: dir.0.path().join("volumes"),
            cgroup: cgroup.to_owned(),
        })
        .unwrap(),
    }
}

/// Returns a host without commands.
fn guest(dir: &Dir, cgroup: &str) -> GuestSpec {
    GuestSpec {
        id: cgroup.to_owned(),
        dir: dir.0.path().join("records").join(cgroup),
        cgroup: "red/r1".into(),
        owner: "acme".into(),
        root: RootFilesystem::Host,
        profile: Profile::Host,
        privileged: false,
        packet_rings: false,
        users: USERS,
        uid: 0,
        hostname: "image".into(),
        files: vec![],
        binds: vec![],
        volumes: vec![],
        commands: vec![],
        env: BTreeMap::new(),
        sysctls: BTreeMap::new(),
        limits: Limits::default(),
        open_files_max: 1024,
        log_bytes_max: 1 << 20,
    }
}

#[test]
fn upper_layers_override_lower_layers() {
    let dir = Dir::new();
    let root = dir
        .unpack(&[
            layer(&[
                Entry::Dir("etc"),
                text("etc/one", "lower"),
                text("etc/two", "lower"),
                Entry::Dir("opaque"),
                text("opaque/old", "lower"),
                Entry::Device("dev-null"),
            ]),
            layer(&[
                Entry::File("etc/one", b"upper".to_vec(), 42),
                text("etc/.wh.two", ""),
                text("opaque/.wh..wh..opq", ""),
                text("opaque/new", "upper"),
                Entry::Symlink("link", "/etc/shadow"),
                Entry::Hardlink("hard", "etc/one"),
            ]),
            layer(&[text("missing/dirs/are/made", "top")]),
        ])
        .unwrap();
    let read = |path: &str| fs::read_to_string(root.join(path)).ok();
    assert_eq!(read("etc/one").as_deref(), Some("upper"));
    assert_eq!(read("hard").as_deref(), Some("upper"));
    assert_eq!(read("etc/two"), None);
    assert_eq!(read("opaque/old"), None);
    assert_eq!(read("opaque/new").as_deref(), Some("upper"));
    assert_eq!(read("missing/dirs/are/made").as_deref(), Some("top"));
    assert!(!root.join("dev-null").exists());
    let owner = |path: &str| root.join(path).symlink_metadata().unwrap().uid();
    assert_eq!(owner("etc/one"), 42);
    for path in ["", "etc", "link", "missing/dirs", "missing/dirs/are/made"] {
        assert_eq!(owner(path), 0, "{path}");
    }
    assert_eq!(fs::read_link(root.join("link")).unwrap(), Path::new("/etc/shadow"));
}

#[test]
fn layers_cannot_write_outside_the_image() {
    let outside = |name: &str| {
        let dir = Dir::new();
        let victim = dir.0.path().join("victim");
        fs::create_dir(&victim).unwrap();
        fs::write(victim.join("kept"), "before").unwrap();
        let victim = victim.to_str().unwrap().to_owned();
        let layers = match name {
            "dots" => layer(&[text("../victim/kept", "after"), text("a/../../victim/new", "x")]),
            "link" => layer(&[Entry::Symlink("l", &victim), text("l/kept", "after")]),
            "link to dots" => layer(&[Entry::Symlink("l", "../../victim"), text("l/new", "x")]),
            "whiteout" => layer(&[Entry::Symlink("l", &victim), text("l/.wh.kept", "")]),
            "opaque" => layer(&[Entry::Symlink("l", &victim), text("l/.wh..wh..opq", "")]),
            "dotted whiteout" => layer(&[Entry::Dir("d"), text("d/.wh...", "")]),
            "link up" => layer(&[
                Entry::Symlink("l", &format!("../../../../..{victim}")),
                text("l/new", "x"),
            ]),
            "link to link" => layer(&[
                Entry::Symlink("one", &victim),
                Entry::Symlink("two", "one"),
                text("two/new", "x"),
            ]),
            "link over a directory" => layer(&[
                text("d/kept", "own"),
                Entry::Symlink("d", &victim),
                text("d/kept", "after"),
                text("d/.wh.kept", ""),
            ]),
            "link that changes" => layer(&[
                Entry::Dir("d"),
                Entry::Symlink("l", "d"),
                text("l/new", "x"),
                Entry::Symlink("l", &victim),
                text("l/new", "x"),
            ]),
            "magic link" => layer(&[Entry::Symlink("l", "/proc/self/cwd"), text("l/new", "x")]),
            "hard link through a link" => {
                layer(&[Entry::Symlink("l", &victim), Entry::Hardlink("h", "l/kept")])
            }
            "hard link to a link" => layer(&[
                Entry::Symlink("l", &format!("{victim}/kept")),
                Entry::Hardlink("h", "l"),
                text("h", "after"),
            ]),
            "hard link" => {
                let kept = format!("{victim}/kept");
                layer(&[Entry::Hardlink("h", &kept), text("h", "after")])
            }
            _ => layer(&[Entry::Hardlink("h", "../../victim/kept")]),
        };
        let _ = dir.unpack(&[layers]);
        let names: Vec<_> = fs::read_dir(&victim).unwrap().flatten().collect();
        assert_eq!(names.len(), 1, "{name}");
        assert_eq!(fs::read_to_string(names[0].path()).unwrap(), "before", "{name}");
        assert_eq!(names[0].metadata().unwrap().nlink(), 1, "{name}");
        assert_eq!(names[0].metadata().unwrap().uid(), 0, "{name}");
    };
    for name in [
        "dots",
        "link",
        "link to dots",
        "whiteout",
        "opaque",
        "dotted whiteout",
        "link up",
        "link to link",
        "link over a directory",
        "link that changes",
        "magic link",
        "hard link",
        "hard link through a link",
        "hard link to a link",
        "hard link to dots",
    ] {
        outside(name);
    }
}

#[test]
fn wrong_digest_or_name_is_refused() {
    let dir = Dir::new();
    let layout = dir.0.path().join("layout");
    make_layout(&layout, &[layer(&[text("a", "content")])]);
    let error = image::unpack(&layout, Some("v2"), &dir.images()).unwrap_err().to_string();
    assert!(error.contains("v2"), "{error}");
    for entry in fs::read_dir(layout.join("blobs/sha256")).unwrap() {
        let path = entry.unwrap().path();
        let mut bytes = fs::read(&path).unwrap();
        if bytes.len() > 1000 {
            bytes[600] ^= 1;
            fs::write(&path, bytes).unwrap();
        }
    }
    let error = image::unpack(&layout, Some("v1"), &dir.images()).unwrap_err().to_string();
    assert!(error.contains("digest"), "{error}");
    assert!(fs::read_dir(dir.images()).is_ok_and(|mut all| all.next().is_none()));
}

#[test]
fn crash_leftovers_are_unused_and_setuid_is_cleared() {
    let dir = Dir::new();
    let layers = [layer(&[Entry::Setuid("bin/su"), text("a", "content")])];
    let root = dir.unpack(&layers).unwrap();
    let mode = |path: &Path| fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(&root.join("bin/su")), 0o755);
    // The owners of its files are other users on the machine.
    assert_eq!(mode(&dir.images()), 0o700);
    // As if the process had been killed while unpacking.
    let mut part = root.clone().into_os_string();
    part.push(format!(".{}", image::PART));
    fs::rename(&root, &part).unwrap();
    fs::write(Path::new(&part).join("a"), "half").unwrap();
    assert_eq!(dir.unpack(&layers).unwrap(), root);
    assert_eq!(fs::read_to_string(root.join("a")).unwrap(), "content");
    assert!(!Path::new(&part).exists());
    for place in ["proc", "dev", "var/log", "tmp"] {
        assert!(root.join(place).is_dir(), "{place}");
    }
}

#[test]
fn guest_runs_on_an_image_with_own_libraries() {
    let dir = Dir::new();
    let layout = dir.0.path().join("layout");
    let host = |path: &str| fs::read(fs::canonicalize(path).unwrap()).unwrap();
    // A shell and the libraries that it needs, in paths that the host's programs do not search.
    let loader = "/lib64/ld-linux-x86-64.so.2";
    make_layout(
        &layout,
        &[layer(&[
            Entry::File("bin/sh", host("/bin/dash"), 0),
            Entry::File("bin/cat", host("/bin/cat"), 0),
            Entry::File(&loader[1..], host(loader), 0),
            Entry::File("lib/libc.so.6", host("/lib/x86_64-linux-gnu/libc.so.6"), 0),
            Entry::Dir("etc"),
            text("etc/image", "image's own\n"),
            Entry::File("etc/others", b"x".to_vec(), 42),
        ])],
    );
    let cgroup = format!("pdp-image-{}", std::process::id());
    let fixture = fixture(&dir, &cgroup);
    let runtime = &fixture.runtime;
    let script = "cat /etc/image /etc/made /etc/shown; echo x >> /etc/made && echo wrote; \
                  echo x >> /etc/shown || echo refused; echo x > /bin/x || echo refused";
    let file = |path: &str, content: &str, writable| GuestFile {
        path: path.into(),
        content: content.into(),
        mode: 0o644,
        owner: FileOwner::ROOT,
        writable,
    };
    let mut spec = GuestSpec {
        root: RootFilesystem::OciLayout { path: layout, reference: None },
        files: vec![file("/etc/made", "made\n", true), file("/etc/shown", "shown\n", false)],
        commands: vec![GuestCommand::new(
            ["/bin/sh", "-c", script].map(str::to_owned).to_vec(),
            CommandRestart::Never,
        )],
        ..guest(&dir, &cgroup)
    };
    let unpacked = || fs::read_dir(dir.images()).unwrap().count();
    for round in 0..2 {
        runtime.create(&spec, &[]).unwrap();
        runtime.start(&spec.dir).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let log = || fs::read_to_string(&runtime.logs(&spec.dir).unwrap()[0]).unwrap_or_default();
        while !log().contains("ended") && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        let log = log();
        for want in [" image's own\n", " made\n", " shown\n", " wrote\n"] {
            assert!(log.contains(want), "{want:?} in {log}");
        }
        assert_eq!(log.matches(" refused\n").count(), 2, "{log}");
        let ProcessState::Running(process) = runtime.state(&spec.dir).unwrap() else { panic!() };
        if round == 0 {
            // There is one copy, owned by root, shown with the guest's ids. Another guest sees the
            // same copy with its own ids.
            let owner = |path: &Path| fs::metadata(path).unwrap().uid();
            let root = PathBuf::from(format!("/proc/{}/root", process.pid));
            assert_eq!(owner(&root.join("bin/sh")), USERS.base);
            assert_eq!(owner(&root.join("etc/others")), USERS.base + 42);
            let mut other = spec.clone();
            other.id = format!("{}-other", spec.id);
            other.dir = spec.dir.with_file_name(&other.id);
            other.users.base += 1 << 17;
            let process = runtime.create(&other, &[]).unwrap();
            let root = PathBuf::from(format!("/proc/{}/root", process.pid));
            assert_eq!(owner(&root.join("bin/sh")), other.users.base);
            assert_eq!(unpacked(), 1);
            let copy = fs::read_dir(dir.images()).unwrap().next().unwrap().unwrap().path();
            assert_eq!(owner(&copy.join("bin/sh")), 0);
            assert!(!copy.join("bin/x").exists());
            runtime.delete(&other.dir).unwrap();
            runtime.collect_images().unwrap();
            assert_eq!(unpacked(), 1, "the first guest runs on it");
        }
        runtime.delete(&spec.dir).unwrap();
        // The unpacked image stays for the next guest. It can also be used as a directory.
        assert_eq!(unpacked(), 1);
        if round == 0 {
            let root = fs::read_dir(dir.images()).unwrap().next().unwrap().unwrap().path();
            spec.root = RootFilesystem::Rootfs(root);
        }
    }
    fs::create_dir(dir.images().join("sha256-0.part")).unwrap();
    runtime.collect_images().unwrap();
    assert_eq!(unpacked(), 0, "nobody runs on it");
}

/// Writes an image as a receiving process leaves it: manifest and blobs, named by digest.
fn fill_inbox(inbox: &Path, config: &[u8], layers: &[Vec<u8>]) {
    let describe = |bytes: &[u8]| {
        let hex: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        fs::write(inbox.join(&hex), bytes).unwrap();
        serde_json::json!({
            "mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": format!("sha256:{hex}"),
            "size": bytes.len(),
        })
    };
    let manifest = serde_json::json!({
        "schemaVersion": 2,
        "config": describe(config),
        "layers": layers.iter().map(|layer| describe(layer)).collect::<Vec<_>>(),
    });
    fs::write(inbox.join(MANIFEST), manifest.to_string()).unwrap();
}

const ROOM: ImageLimits = ImageLimits { bytes: 1 << 20, files: 1000 };

struct Kept(Dir, ImageStore, Cgroups, Workplace);

impl Drop for Kept {
    fn drop(&mut self) {
        let _ = self.2.remove("", Duration::from_secs(10));
        self.2.remove_if_empty("");
    }
}

impl Kept {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = Dir::new();
        let cgroups = Cgroups::new(&format!("pdp-kept-{}-{number}", std::process::id())).unwrap();
        let work = Workplace::new(env!("CARGO_BIN_EXE_pdp-work").into(), cgroups.clone());
        let store = ImageStore::open(&dir.images(), &dir.0.path().join("works"), work.clone());
        Self(dir, store.unwrap(), cgroups, work)
    }

    fn keep(&self, work: ImageStaging) -> Result<String, String> {
        let kept = self.1.store_image("acme", ("a:1", None), &work, None, ROOM);
        kept.map_err(|error| error.to_string())
    }

    /// Checks that an image is refused and leaves nothing.
    #[track_caller]
    fn refused(&self, why: &str, work: ImageStaging) {
        let error = self.keep(work).unwrap_err();
        assert!(error.contains(why), "{why:?} in {error:?}");
        assert_eq!(fs::read_dir(self.1.works()).unwrap().count(), 0);
        assert!(self.1.index("acme").unwrap().images.is_empty());
        let store = self.0.images().join(image::STORE);
        assert_eq!(fs::read_dir(store).unwrap().count(), 0);
    }
}

/// Compressed, 100,000 empty directories are small. On disk, each takes a block and an inode,
/// whether it has its own entry or is only part of another entry's path.
#[test]
fn directories_count_for_blocks_and_inodes() {
    let kept = Kept::new();
    let entries = |name: &dyn Fn(u32) -> String, count| -> Vec<u8> {
        let mut tar = tar::Builder::new(Vec::new());
        for number in 0..count {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(tar::EntryType::Directory);
            header.set_size(0);
            header.set_mode(0o755);
            tar.append_data(&mut header, name(number), std::io::empty()).unwrap();
        }
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        std::io::Write::write_all(&mut packed, &tar.into_inner().unwrap()).unwrap();
        packed.finish().unwrap()
    };
    let keep = |layer: &[u8], room| {
        let work = kept.1.begin(0).unwrap();
        fill_inbox(&work.inbox(), b"{}", &[layer.to_vec()]);
        kept.1
            .store_image("acme", ("a:1", None), &work, None, room)
            .map_err(|error| error.to_string())
    };
    let many = entries(&|number| format!("d{number}"), 100_000);
    assert!(many.len() < 2 << 20, "{} bytes packed", many.len());
    let refused = keep(&many, ImageLimits { bytes: 100 << 20, files: 200_000 }).unwrap_err();
    assert!(refused.contains("more than 104857600 bytes"), "{refused}");
    let refused = keep(&many, ImageLimits { bytes: 1 << 30, files: 99_999 }).unwrap_err();
    assert!(refused.contains("more than 99999 files and directories"), "{refused}");
    // Ten directories above each of the last ones, with short and long names.
    let deep = |name: &str| entries(&|number| format!("{number}{}", name.repeat(10)), 20);
    for deep in [deep("/d"), deep("/dddddddddddddddddddddddddddddddd")] {
        let refused = keep(&deep, ImageLimits { bytes: 1 << 30, files: 199 }).unwrap_err();
        assert!(refused.contains("more than 199 files and directories"), "{refused}");
    }
    let digest = keep(&deep("/d"), ImageLimits { bytes: 1 << 30, files: 400 }).unwrap();
    let index = kept.1.index("acme").unwrap();
    assert_eq!(index.files(), 220);
    assert!(index.images[&digest].unpacked_bytes >= 220 * 4096);
}

/// A process that brings an image may leave anything.
#[test]
fn pulled_image_must_match_its_manifest() {
    let kept = Kept::new();
    let files = layer(&[text("etc/a", "content")]);
    let come = |change: &dyn Fn(&Path)| {
        let work = kept.1.begin(0).unwrap();
        fill_inbox(&work.inbox(), b"{}", std::slice::from_ref(&files));
        change(&work.inbox());
        work
    };
    let blob = |inbox: &Path| {
        let is_layer = |path: &PathBuf| fs::metadata(path).unwrap().len() > 1000;
        let mut paths = fs::read_dir(inbox).unwrap().map(|entry| entry.unwrap().path());
        paths.find(is_layer).unwrap()
    };
    kept.refused(
        "does not match its digest",
        come(&|inbox| {
            let path = blob(inbox);
            let mut bytes = fs::read(&path).unwrap();
            bytes[600] ^= 1;
            fs::write(path, bytes).unwrap();
        }),
    );
    kept.refused("No such file", come(&|inbox| fs::remove_file(blob(inbox)).unwrap()));
    kept.refused("No such file", come(&|inbox| fs::remove_file(inbox.join(MANIFEST)).unwrap()));
    // A half blob, as from a broken transfer.
    kept.refused(
        "does not match its digest",
        come(&|inbox| {
            let file = fs::File::options().write(true).open(blob(inbox)).unwrap();
            file.set_len(700).unwrap();
        }),
    );
    // Links to foreign files are neither read nor given to anybody.
    let secret = kept.0.0.path().join("secret");
    fs::write(&secret, &files).unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o640)).unwrap();
    kept.refused(
        "not a regular file with one name",
        come(&|inbox| {
            let path = blob(inbox);
            fs::remove_file(&path).unwrap();
            std::os::unix::fs::symlink(&secret, path).unwrap();
        }),
    );
    kept.refused(
        "not a regular file with one name",
        come(&|inbox| {
            let path = blob(inbox);
            fs::remove_file(&path).unwrap();
            fs::hard_link(&secret, path).unwrap();
        }),
    );
    assert_eq!(fs::metadata(&secret).unwrap().permissions().mode() & 0o777, 0o640);
    // Files without an end.
    for path in ["/dev/zero", "/proc/kmsg"] {
        kept.refused(
            "not a regular file with one name",
            come(&|inbox| {
                fs::remove_file(inbox.join(MANIFEST)).unwrap();
                std::os::unix::fs::symlink(path, inbox.join(MANIFEST)).unwrap();
            }),
        );
    }
    kept.refused(
        "not a regular file with one name",
        come(&|inbox| {
            fs::remove_file(inbox.join(MANIFEST)).unwrap();
            let name = std::ffi::CString::new(inbox.join(MANIFEST).to_str().unwrap()).unwrap();
            nix::unistd::mkfifo(&*name, nix::sys::stat::Mode::S_IRWXU).unwrap();
        }),
    );
    kept.refused("manifest", come(&|inbox| fs::write(inbox.join(MANIFEST), "{}").unwrap()));
    kept.refused(
        "more than 4194304 bytes",
        come(&|inbox| {
            fs::write(inbox.join(MANIFEST), vec![b' '; 5 << 20]).unwrap();
        }),
    );
    // Another image than the requested one.
    let work = come(&|_| ());
    let expected = format!("sha256:{}", "0".repeat(64));
    let error =
        kept.1.store_image("acme", ("a:1", None), &work, Some(&expected), ROOM).unwrap_err();
    assert!(error.to_string().contains(&format!("not {expected}")), "{error}");
    drop(work);
    // The unchanged image is stored. It belongs to one owner only.
    let digest = kept.keep(come(&|_| ())).unwrap();
    assert_eq!(kept.1.index("acme").unwrap().names["a:1"].digest, digest);
    assert!(kept.1.index("other").unwrap().images.is_empty());
    assert!(kept.1.remove("other", &digest).unwrap().is_none());
    assert!(kept.1.remove("acme", &digest).unwrap().is_some());
    assert_eq!(fs::read_dir(kept.1.works()).unwrap().count(), 0);
    assert_eq!(fs::read_dir(kept.0.images().join(image::STORE)).unwrap().count(), 0);
}

/// Longest names, of the characters that need most bytes. Every written index can be read, and an
/// index that would be too large is refused.
#[test]
fn index_at_its_limits_survives_a_restart() {
    let kept = Kept::new();
    let work = kept.1.begin(0).unwrap();
    fill_inbox(&work.inbox(), b"{}", &[layer(&[text("a", "1")])]);
    let digest = kept.keep(work).unwrap();
    // In JSON each of these characters takes six bytes: some 450 names fit.
    let name = |number: u32| format!("{number:04}{}", "\u{1}".repeat(1500));
    let mut index = kept.1.index("acme").unwrap();
    for number in 0..440 {
        let named = image::StoredName { digest: digest.clone(), stamp: None };
        index.names.insert(name(number), named);
    }
    let text = serde_json::to_vec(&index).unwrap();
    fs::write(kept.1.owner_directory("acme").join("index.json"), text).unwrap();
    let mut refused = 0;
    for number in 440..480 {
        match kept.1.name("acme", &name(number), &digest) {
            Ok(()) => {}
            Err(error) => {
                refused += 1;
                let error = pdp_container::error_chain(&error);
                assert!(error.contains("more than 4194304 bytes"), "{error}");
            }
        }
        kept.1.index("acme").unwrap();
    }
    assert!(refused < 40);
    assert!(refused > 0);
    let long = kept.1.name("acme", &"x".repeat(4096), &digest).unwrap_err().to_string();
    assert!(long.contains("4096 bytes, 1536 at most"), "{long}");
    let again = ImageStore::open(&kept.0.images(), kept.1.works(), kept.3.clone()).unwrap();
    assert_eq!(again.index("acme").unwrap(), kept.1.index("acme").unwrap());
    assert!(again.index("acme").unwrap().images.contains_key(&digest));
}

/// An index with any damage, or a file in place of the directory.
#[test]
fn damaged_index_does_not_block_other_owners() {
    let kept = Kept::new();
    for owner in ["acme", "other"] {
        let work = kept.1.begin(0).unwrap();
        fill_inbox(&work.inbox(), b"{}", &[layer(&[text("a", "1")])]);
        kept.1.store_image(owner, ("a:1", None), &work, None, ROOM).unwrap();
    }
    let place = kept.1.owner_directory("acme");
    let (index, other) = (place.join("index.json"), kept.1.index("other").unwrap());
    let whole = fs::read(&index).unwrap();
    let clear = || match fs::symlink_metadata(&index).unwrap().is_dir() {
        true => fs::remove_dir_all(&index).unwrap(),
        false => fs::remove_file(&index).unwrap(),
    };
    let damage: [&dyn Fn(); 6] = [
        &|| fs::write(&index, &whole[..whole.len() / 2]).unwrap(),
        &|| fs::write(&index, [0xff; 100]).unwrap(),
        &|| fs::write(&index, vec![b' '; (image::JSON_BYTES_MAX + 1) as usize]).unwrap(),
        &|| fs::create_dir_all(index.join("a/b")).unwrap(),
        &|| std::os::unix::fs::symlink("/etc/passwd", &index).unwrap(),
        &|| {
            fs::remove_dir_all(&place).unwrap();
            fs::write(&place, "").unwrap();
        },
    ];
    for damage in damage {
        if place.is_dir() && index.exists() {
            clear();
        }
        damage();
        let again = ImageStore::open(&kept.0.images(), kept.1.works(), kept.3.clone()).unwrap();
        assert!(again.index("acme").is_err());
        assert_eq!(again.index("other").unwrap(), other);
        // The owner's files stay untouched.
        assert!(!place.is_dir() || fs::read_dir(&place).unwrap().count() == 2);
    }
    drop(kept.1.forget("acme").unwrap());
    assert!(!place.exists() && kept.1.index("acme").unwrap().images.is_empty());
}

#[test]
fn decompression_bomb_is_refused_before_unpacking() {
    let kept = Kept::new();
    let come = |config: &[u8], layers: &[Vec<u8>]| {
        let work = kept.1.begin(0).unwrap();
        fill_inbox(&work.inbox(), config, layers);
        work
    };
    let gzip = |bytes: &[u8]| {
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        gz.write_all(bytes).unwrap();
        gz.finish().unwrap()
    };
    let zeros = gzip(&layer(&[Entry::File("zeros", vec![0; 64 << 20], 0)]));
    assert!(zeros.len() < 100 << 10);
    kept.refused("more than 1048576 bytes", come(b"{}", &[zeros]));
    // A file whose header gives an impossible size.
    let mut huge = Header::new_gnu();
    huge.set_entry_type(EntryType::Regular);
    huge.set_path("huge").unwrap();
    huge.set_size(1 << 50);
    huge.set_cksum();
    kept.refused("more than 1048576 bytes", come(b"{}", &[huge.as_bytes().to_vec()]));
    // A name that would be read completely into memory.
    let mut name = Header::new_gnu();
    name.set_entry_type(EntryType::GNULongName);
    name.set_size(900 << 10);
    name.set_cksum();
    let mut long = name.as_bytes().to_vec();
    long.resize(long.len() + (900 << 10), b'a');
    kept.refused("a name or attributes of 921600 bytes", come(b"{}", &[long]));
    // Larger than permitted on arrival.
    kept.refused("more than 1048576 bytes", come(b"{}", &[vec![1; 2 << 20]]));
    // The text has no control characters for the terminal.
    kept.refused(
        "image a:1: configuration: it is for no  such,",
        come(b"{\"architecture\": \"no \\u001b such\"}", &[]),
    );
    assert!(kept.keep(come(b"{}", &[layer(&[text("a", "b")])])).is_ok());
}

/// Writes an archive like `docker save`: from format 1.2 on with layers by name, before that with
/// links.
fn docker_archive(path: &Path, config: &str, layers: &[Vec<u8>], images: serde_json::Value) {
    let mut builder = Builder::new(fs::File::create(path).unwrap());
    let mut put = |name: &str, bytes: &[u8]| {
        let mut header = Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, bytes).unwrap();
    };
    put("config.json", config.as_bytes());
    for (number, layer) in layers.iter().enumerate() {
        put(&format!("{number}/layer.tar"), layer);
    }
    put("manifest.json", images.to_string().as_bytes());
    let mut link = Header::new_gnu();
    link.set_entry_type(EntryType::Symlink);
    link.set_size(0);
    builder.append_link(&mut link, "again/layer.tar", "../0/layer.tar").unwrap();
    link.set_entry_type(EntryType::Symlink);
    builder.append_link(&mut link, "out/layer.tar", "../../../../etc/passwd").unwrap();
    builder.finish().unwrap();
}

#[test]
fn docker_archive_loads_and_cannot_reach_outside() {
    let kept = Kept::new();
    let path = kept.0.0.path().join("saved.tar");
    let layers = [layer(&[text("etc/a", "lower")]), layer(&[text("etc/b", "upper")])];
    let images = serde_json::json!([
        { "Config": "config.json", "RepoTags": ["frr:10"], "Layers": ["0/layer.tar", "1/layer.tar", "again/layer.tar"] },
        { "Config": "config.json", "RepoTags": ["out:latest"], "Layers": ["out/layer.tar"] },
        { "Config": "config.json", "RepoTags": null, "Layers": ["/etc/passwd"] },
    ]);
    docker_archive(&path, "{}", &layers, images);
    let convert = |tag: Option<&str>, bytes_max: u64| {
        let work = kept.1.begin(0).unwrap();
        let converted = kept.1.convert("acme", &path, tag, &work, bytes_max);
        converted.map_err(|error| error.to_string())?;
        kept.keep(work)
    };
    let digest = convert(Some("frr:10"), 1 << 20).unwrap();
    assert_eq!(convert(Some("frr:10"), 1 << 20).unwrap(), digest, "the same each time");
    let place = kept.0.images().join(image::STORE).join("acme").join(&digest[7..]);
    let root = image::unpack(&place, None, &kept.0.images()).unwrap();
    assert_eq!(fs::read_to_string(root.join("etc/b")).unwrap(), "upper");
    for (tag, why) in [
        (None, "3 images with reference (any); it has frr:10, out:latest"),
        (Some("none"), "0 images with reference none"),
        (Some("out"), "names etc/passwd, which is not in it"),
    ] {
        let error = convert(tag, 1 << 20).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
    let error = convert(Some("frr:10"), 100).unwrap_err();
    assert!(error.contains("more than 100 bytes"), "{error}");
    fs::write(&path, vec![0; 4096]).unwrap();
    let error = convert(None, 1 << 20).unwrap_err();
    assert!(error.contains("manifest.json"), "{error}");
    assert_eq!(fs::read_dir(kept.1.works()).unwrap().count(), 0);
}

/// Unpacking blocks no caller, and owners do not wait for each other.
#[test]
fn owners_unpack_in_parallel_two_images_each() {
    let dir = Dir::new();
    let cgroup = format!("pdp-unpack-{}", std::process::id());
    let fixture = fixture(&dir, &cgroup);
    let layouts = [0, 1, 2].map(|number| {
        let layout = dir.0.path().join(format!("layout{number}"));
        let name = format!("zeros{number}");
        make_layout(&layout, &[layer(&[Entry::File(&name, vec![0; 48 << 20], 0)])]);
        layout
    });
    let unpack = |path: &Path, owner: &str| {
        let root = RootFilesystem::OciLayout { path: path.to_owned(), reference: None };
        let spec = GuestSpec { root, owner: owner.into(), ..guest(&dir, &cgroup) };
        fixture.runtime.unpack(&spec).unwrap()
    };
    let deadline = Instant::now() + Duration::from_secs(120);
    let (mut of_a, mut of_b, mut done) = (0, 0, false);
    while !done {
        assert!(Instant::now() < deadline);
        done = layouts.iter().fold(true, |done, path| unpack(path, "a") & done);
        done &= unpack(&layouts[2], "b");
        let entries = fs::read_dir(dir.images()).into_iter().flatten().flatten();
        let names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        let parts = |owner: &str| names.iter().filter(|name| name.ends_with(owner)).count();
        (of_a, of_b) = (of_a.max(parts(".a.part")), of_b.max(parts(".b.part")));
        // The image that both owners need is there once one has unpacked it. The other one's worker
        // then still removes its part.
        done &= names.iter().all(|name| !name.ends_with(".part"));
    }
    assert_eq!((of_a, of_b), (2, 1));
    // Images stay until their guests run on them.
    fixture.runtime.collect_images().unwrap();
    assert_eq!(fs::read_dir(dir.images()).unwrap().count(), 3);
}

/// CPU time of unpacking is charged to the owner, whose cgroup limits it.
#[test]
fn checking_an_image_is_charged_to_its_owner() {
    let kept = Kept::new();
    let room = ImageLimits { bytes: 1 << 30, files: 1000 };
    let zeros = layer(&[Entry::File("zeros", vec![0; 256 << 20], 0)]);
    let work = kept.1.begin(0).unwrap();
    fill_inbox(&work.inbox(), b"{}", &[zeros]);
    let Kept(_, store, cgroups, workplace) = &kept;
    let own = work::cgroup("acme");
    // Keeping this alive keeps the cgroup, so that the test can read its CPU time.
    let place = workplace.enter_cgroup("acme").unwrap();
    let cpu = || {
        Duration::try_from(rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime))
            .unwrap()
    };
    let before = cpu();
    store.store_image("acme", ("zeros:1", None), &work, None, room).unwrap();
    let (used, mine) = (cgroups.usage(&own).unwrap().cpu_ns, cpu() - before);
    drop(place);
    assert!(used > 100_000_000, "{used} ns in the owner's cgroup");
    assert!(mine < Duration::from_nanos(used) / 2, "{mine:?} in this process");
    assert!(!cgroups.exists(&own), "the cgroup outlives its last work");
}

/// `pdp-work` has four capabilities and no network while it checks an image.
#[test]
fn image_work_has_no_network_and_few_capabilities() {
    const CHOWN_DAC_OVERRIDE_FOWNER_FSETID: u64 = 0b1_1011;
    let dir = Dir::new();
    let (inbox, layout) = (dir.0.path().join("in"), dir.0.path().join("layout"));
    fs::create_dir(&inbox).unwrap();
    fill_inbox(&inbox, b"{}", &[]);
    // Hashing takes a while, so that the test can inspect the process.
    let (hex, size) = ("0".repeat(64), 64u64 << 30);
    fs::File::create(inbox.join(&hex)).unwrap().set_len(size).unwrap();
    let mut manifest: serde_json::Value =
        serde_json::from_slice(&fs::read(inbox.join(MANIFEST)).unwrap()).unwrap();
    manifest["layers"] = serde_json::json!([{
        "mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": format!("sha256:{hex}"),
        "size": size,
    }]);
    fs::write(inbox.join(MANIFEST), manifest.to_string()).unwrap();
    let order = serde_json::json!({ "Take": {
        "inbox": inbox, "layout": layout, "wanted": null, "room": { "bytes": 1u64 << 40, "files": 1000 },
    } });
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_pdp-work"))
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(order.to_string().as_bytes()).unwrap();
    let proc = PathBuf::from(format!("/proc/{}", child.id()));
    let field = |name: &str| {
        let status = fs::read_to_string(proc.join("status")).unwrap();
        let line = status.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
        line.split_whitespace().nth(1).unwrap().to_owned()
    };
    let mask = format!("{CHOWN_DAC_OVERRIDE_FOWNER_FSETID:016x}");
    let deadline = Instant::now() + Duration::from_secs(30);
    while field("CapEff:") != mask && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    for (name, expected) in
        [("CapEff:", &*mask), ("CapPrm:", &mask), ("CapBnd:", &mask), ("NoNewPrivs:", "1")]
    {
        assert_eq!(field(name), expected, "{name}");
    }
    let network = |proc: &Path| fs::read_link(proc.join("ns/net")).unwrap();
    assert_ne!(network(&proc), network(Path::new("/proc/self")));
    let devices = fs::read_to_string(proc.join("net/dev")).unwrap();
    let devices: Vec<&str> =
        devices.lines().skip(2).filter_map(|line| line.split(':').next()).collect();
    assert!(devices.iter().all(|name| name.trim() == "lo"), "{devices:?}");
    child.kill().unwrap();
    child.wait().unwrap();
}

/// The guest runs as in docker: the image's command, user, directory and environment. It may write
/// anywhere, into memory of its own.
#[test]
fn guest_follows_its_image_configuration() {
    let dir = Dir::new();
    let works = dir.0.path().join("works");
    let store = ImageStore::open(&dir.images(), &works, Workplace::in_this_process()).unwrap();
    let work = store.begin(0).unwrap();
    let host = |path: &str| fs::read(fs::canonicalize(path).unwrap()).unwrap();
    let loader = "/lib64/ld-linux-x86-64.so.2";
    let script = "echo \"$0 $1 is $(id -u):$(id -G) in $PWD, $COLOUR, $HOME\"; echo new > /srv/new && \
                  cat /srv/new; echo over > /etc/own && cat /etc/own; cat /root/kept; \
                  echo by name > /dev/stdout; exec sleep 1000";
    let config = serde_json::json!({
        "architecture": "amd64", "os": "linux",
        "config": {
            "Entrypoint": ["sh", "-c", script], "Cmd": ["its-command", "argument"],
            "Env": ["PATH=/its/bin", "COLOUR=blue"], "WorkingDir": "/srv/work", "User": "frr",
        },
    });
    let files = layer(&[
        Entry::File("its/bin/sh", host("/bin/dash"), 0),
        Entry::File("its/bin/cat", host("/bin/cat"), 0),
        Entry::File("its/bin/id", host("/usr/bin/id"), 0),
        Entry::File("its/bin/sleep", host("/bin/sleep"), 0),
        Entry::File(&loader[1..], host(loader), 0),
        Entry::File("lib/libc.so.6", host("/lib/x86_64-linux-gnu/libc.so.6"), 0),
        Entry::File("lib/libselinux.so.1", host("/lib/x86_64-linux-gnu/libselinux.so.1"), 0),
        Entry::File("lib/libpcre2-8.so.0", host("/usr/lib/x86_64-linux-gnu/libpcre2-8.so.0"), 0),
        text("etc/group", "frr:x:43:\nfrrvty:x:44:frr\n"),
        text("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nfrr:x:42:43:frr:/home/frr:/bin/sh\n"),
        Entry::File("etc/own", b"image's\n".to_vec(), 42),
        text("root/kept", "in root's home\n"),
        Entry::Owned("srv", 42),
    ]);
    fill_inbox(&work.inbox(), config.to_string().as_bytes(), &[files]);
    let room = ImageLimits { bytes: 1 << 30, files: 1 << 20 };
    let digest = store.store_image("_node", ("its:1", None), &work, None, room).unwrap();
    drop(work);
    let cgroup = format!("pdp-own-{}", std::process::id());
    let fixture = fixture(&dir, &cgroup);
    let runtime = &fixture.runtime;
    let spec = GuestSpec {
        root: RootFilesystem::Image { owner: "_node".into(), digest: digest.clone() },
        env: BTreeMap::from([("COLOUR".to_owned(), "red".to_owned())]),
        commands: vec![GuestCommand::of_image()],
        files: vec![],
        limits: Limits { memory_bytes: Some(64 << 20), ..Limits::default() },
        ..guest(&dir, &cgroup)
    };
    for _ in 0..2 {
        runtime.create(&spec, &[]).unwrap();
        runtime.start(&spec.dir).unwrap();
        let log = || fs::read_to_string(&runtime.logs(&spec.dir).unwrap()[0]).unwrap_or_default();
        let expected = [
            " its-command argument is 42:43 44 in /srv/work, red, /home/frr\n",
            " new\n",
            " over\n",
            " in root's home\n",
            " by name\n",
        ];
        let deadline = Instant::now() + Duration::from_secs(60);
        while !expected.iter().all(|words| log().contains(words)) {
            assert!(Instant::now() < deadline, "{}", log());
            std::thread::sleep(Duration::from_millis(20));
        }
        // Its changes are its own and are removed with it.
        let copy = dir.images().join(digest.replace(':', "-"));
        assert!(!copy.join("srv/new").exists());
        assert_eq!(fs::read_to_string(copy.join("etc/own")).unwrap(), "image's\n");
        // Its changes have a size limit.
        let argv =
            ["sh", "-c", "while cat /its/bin/sh; do :; done > /srv/work/full"].map(Into::into);
        let (mut command, _session) = runtime
            .exec_command(&spec.dir, &argv, &RunAs::default(), false, &BTreeMap::new())
            .unwrap();
        let output = command.output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(stderr.contains("No space left"), "{stderr}");
        assert!(matches!(runtime.state(&spec.dir).unwrap(), ProcessState::Running(_)));
        runtime.delete(&spec.dir).unwrap();
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(&cgroup), "{mounts}");
    }
    runtime.collect_images().unwrap();
    assert!(
        !store.index("_node").unwrap().images.is_empty(),
        "what is unpacked goes, what came stays"
    );
    assert_eq!(fs::read_dir(dir.images()).unwrap().count(), 1);
}
