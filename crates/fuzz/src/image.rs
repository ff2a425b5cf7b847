//! OCI image layouts, downloads from a registry, and archives of `docker save`.
//! Nothing is written outside an image's directory, refused images leave nothing
//! behind, and a stored image never has more bytes than counted.
//!
//! Images are unpacked in a mount namespace of a dedicated thread, whose root is a small file
//! system in memory. Even a way out of the directory would not lead to this machine. Needs root.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{chdir, chroot};
use pdp_container::image::{self, ImageLimits, ImageStore, ImageStoreIndex, MANIFEST};
use pdp_container::work::Workplace;
use sha2::{Digest, Sha256};

use crate::input::FuzzInput;

/// User IDs that an image may have.
const USERS: std::ops::Range<u32> = 0..65_536;

/// Bytes of the file system in memory.
const DISK: &str = "size=16m,nr_inodes=4096,mode=0755";

/// File that must not change.
const CANARY: &str = "/canary";

/// Limits of an image in the store.
const ROOM: ImageLimits = ImageLimits { bytes: 1 << 20, files: 1 << 20 };

/// Path of the archive.
const ARCHIVE: &str = "/archive";

/// Files below a directory.
type ImageFiles = Vec<(String, Vec<u8>)>;

/// Job on an image.
enum ImageJob {
    /// Unpack a layout.
    Unpack(ImageFiles),
    /// Store an uploaded image, and unpack it.
    Keep(ImageFiles),
    /// Read an archive, store it and unpack it.
    Convert(Vec<u8>),
}

impl ImageJob {
    fn run(&self) -> Result<(), String> {
        match self {
            Self::Unpack(files) => unpack(files),
            Self::Keep(files) => keep(|inbox| {
                files.iter().for_each(|(name, bytes)| write(&inbox.join(name), bytes));
                true
            }),
            Self::Convert(bytes) => {
                write(Path::new(ARCHIVE), bytes);
                let result = keep(|inbox| {
                    image::convert(Path::new(ARCHIVE), None, inbox, ROOM.bytes).is_ok()
                });
                let same = fs::read(ARCHIVE).is_ok_and(|now| now == *bytes);
                let _ = fs::remove_file(ARCHIVE);
                if same { result } else { Err("the archive was changed".into()) }
            }
        }
    }
}

/// Thread that only sees its own small root.
struct Cell {
    jobs: Sender<ImageJob>,
    done: Receiver<Result<(), String>>,
}

impl Cell {
    fn new() -> Self {
        let (jobs, todo) = channel::<ImageJob>();
        let (sender, done) = channel();
        std::thread::spawn(move || {
            enter().expect("root, and a kernel with mount namespaces");
            for job in todo {
                let result = std::panic::catch_unwind(|| job.run());
                let result = result.unwrap_or_else(|_| Err("panicked".into()));
                if sender.send(result).is_err() {
                    return;
                }
            }
        });
        Self { jobs, done }
    }
}

fn enter() -> nix::Result<()> {
    unshare(CloneFlags::CLONE_NEWNS)?;
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    mount(Some("tmpfs"), "/mnt", Some("tmpfs"), MsFlags::empty(), Some(DISK))?;
    chroot("/mnt")?;
    chdir("/")
}

fn feed(job: ImageJob) {
    thread_local! {
        static CELL: Cell = Cell::new();
    }
    let result = CELL.with(|cell| {
        cell.jobs.send(job).expect("the thread lives");
        cell.done.recv().expect("the thread lives")
    });
    result.unwrap_or_else(|broken| panic!("{broken}"));
}

fn write(path: &Path, bytes: &[u8]) {
    fs::create_dir_all(path.parent().expect("below the root")).expect("a directory");
    fs::write(path, bytes).expect("room");
}

/// Unpacks twice, and checks the result.
fn unpack(files: &ImageFiles) -> Result<(), String> {
    let layout = Path::new("/layout");
    for (name, bytes) in files {
        write(&layout.join(name), bytes);
    }
    write(Path::new(CANARY), b"sings");
    let unpacked = image::unpack(layout, None, Path::new("/images"));
    let again = image::unpack(layout, None, Path::new("/images"));
    let result = verify(files, unpacked.is_ok(), again.is_ok());
    for directory in ["/layout", "/images"] {
        let _ = fs::remove_dir_all(directory);
    }
    result
}

/// Stores the image that `bring` delivers, unpacks it, and checks all promises before and after.
fn keep(fill_inbox: impl Fn(&Path) -> bool) -> Result<(), String> {
    let (images, works) = (Path::new("/images"), Path::new("/works"));
    write(Path::new(CANARY), b"sings");
    let store = ImageStore::open(images, works, Workplace::in_this_process())
        .map_err(|error| error.to_string())?;
    let result = keep_in(&store, images, fill_inbox).and_then(|()| {
        let mut left = names(Path::new("/"))?;
        left.retain(|name| !ARCHIVE.ends_with(name));
        match left == ["canary", "images", "works"] && names(works)?.is_empty() {
            true => Ok(()),
            false => Err(format!("left: {left:?}, {:?}", names(works)?)),
        }
    });
    for directory in [images, works] {
        let _ = fs::remove_dir_all(directory);
    }
    match fs::read(CANARY).ok().as_deref() == Some(b"sings") {
        true => result,
        false => Err("a file outside was changed".into()),
    }
}

fn keep_in(
    store: &ImageStore,
    images: &Path,
    fill_inbox: impl Fn(&Path) -> bool,
) -> Result<(), String> {
    let work = store.begin(0).map_err(|error| error.to_string())?;
    let kept = match fill_inbox(&work.inbox()) {
        true => store.store_image("acme", ("a:1", None), &work, None, ROOM).ok(),
        false => None,
    };
    drop(work);
    let index = store.index("acme").map_err(|error| error.to_string())?;
    let Some(digest) = kept else {
        let place = images.join(image::STORE).join("acme");
        return match index == ImageStoreIndex::default() && !place.exists() {
            true => Ok(()),
            false => Err(format!("refused, and there is {index:?}")),
        };
    };
    let counted = index.images.get(&digest).ok_or("kept, and not in the index")?;
    let layout = images.join(image::STORE).join("acme").join(&digest["sha256:".len()..]);
    // A stored image may still have files in impossible places.
    if let Ok(root) = image::unpack(&layout, None, images) {
        whole(&root)?;
        let bytes_used = bytes(&root, &mut BTreeSet::new())?;
        if bytes_used > counted.unpacked_bytes {
            return Err(format!("{bytes_used} bytes, counted for {}", counted.unpacked_bytes));
        }
    }
    if counted.bytes() > ROOM.bytes {
        return Err(format!("{counted:?} is more than there is room for"));
    }
    let gone = store.remove("acme", &digest).map_err(|error| error.to_string())?;
    match gone.is_some() && names(&images.join(image::STORE))?.is_empty() {
        true => Ok(()),
        false => Err("it was not removed".into()),
    }
}

/// Bytes of all files below a directory, each counted once.
fn bytes(directory: &Path, seen: &mut BTreeSet<u64>) -> Result<u64, String> {
    use std::os::unix::fs::MetadataExt;
    let mut sum = 0;
    for name in names(directory)? {
        let path = directory.join(name);
        let meta = path.symlink_metadata().map_err(|error| format!("{path:?}: {error}"))?;
        if meta.is_dir() {
            sum += bytes(&path, seen)?;
        } else if meta.is_file() && seen.insert(meta.ino()) {
            sum += meta.len();
        }
    }
    Ok(sum)
}

fn verify(files: &ImageFiles, unpacked: bool, again: bool) -> Result<(), String> {
    if unpacked != again {
        return Err(format!("once {unpacked}, then {again}"));
    }
    let mut names = names(Path::new("/"))?;
    names.retain(|name| name != "images");
    if names != ["canary", "layout"] {
        return Err(format!("outside the image there are {names:?}"));
    }
    if fs::read(CANARY).ok().as_deref() != Some(b"sings") {
        return Err("a file outside was changed".into());
    }
    for (name, bytes) in files {
        if fs::read(Path::new("/layout").join(name)).ok().as_ref() != Some(bytes) {
            return Err(format!("{name} of the layout was changed"));
        }
    }
    let images =
        if Path::new("/images").exists() { self::names(Path::new("/images"))? } else { vec![] };
    if images.len() != usize::from(unpacked)
        || images.iter().any(|name| name.ends_with(image::PART))
    {
        return Err(format!("unpacked: {unpacked}, and there are {images:?}"));
    }
    for name in images {
        whole(&Path::new("/images").join(name))?;
    }
    Ok(())
}

fn names(directory: &Path) -> Result<Vec<String>, String> {
    let entries = fs::read_dir(directory).map_err(|error| format!("{directory:?}: {error}"))?;
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names)
}

/// Checks that an image contains no device, and no file of a user of the machine.
fn whole(path: &Path) -> Result<(), String> {
    use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
    let meta = path.symlink_metadata().map_err(|error| format!("{path:?}: {error}"))?;
    let kind = meta.file_type();
    if kind.is_block_device() || kind.is_char_device() {
        return Err(format!("{path:?} is a device"));
    }
    if !USERS.contains(&meta.uid()) || !USERS.contains(&meta.gid()) {
        return Err(format!("{path:?} is of user {}:{}", meta.uid(), meta.gid()));
    }
    if meta.is_file() && meta.permissions().mode() & 0o6000 != 0 {
        return Err(format!("{path:?} is set-user-ID"));
    }
    if meta.is_dir() {
        let entries = fs::read_dir(path).map_err(|error| format!("{path:?}: {error}"))?;
        let paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        paths.iter().try_for_each(|path| whole(path))?;
    }
    Ok(())
}

fn blob(files: &mut ImageFiles, kind: &str, bytes: &[u8]) -> serde_json::Value {
    let hex: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    files.push((format!("blobs/sha256/{hex}"), bytes.to_vec()));
    serde_json::json!({
        "mediaType": format!("application/vnd.oci.image.{kind}"),
        "digest": format!("sha256:{hex}"),
        "size": bytes.len(),
    })
}

/// An index of one manifest.
fn index(files: &mut ImageFiles, manifest: &[u8]) {
    let manifest = blob(files, "manifest.v1+json", manifest);
    let index = serde_json::json!({ "schemaVersion": 2, "manifests": [manifest] });
    files.push(("index.json".into(), index.to_string().into_bytes()));
}

/// Up to four layers, in a valid layout.
pub(crate) fn layer(bytes: &[u8]) {
    let mut input = FuzzInput(bytes);
    let (mut files, mut layers) = (ImageFiles::new(), Vec::new());
    while !input.is_empty() && layers.len() < 4 {
        let layer = input.counted();
        layers.push(blob(&mut files, "layer.v1.tar", layer));
    }
    let config = blob(&mut files, "config.v1+json", b"{}");
    let manifest = serde_json::json!({ "schemaVersion": 2, "config": config, "layers": layers });
    index(&mut files, manifest.to_string().as_bytes());
    feed(ImageJob::Unpack(files));
}

/// A manifest in a valid index, or an index.
pub(crate) fn layout(bytes: &[u8]) {
    let mut input = FuzzInput(bytes);
    let mut files = ImageFiles::new();
    let flags = input.byte();
    blob(&mut files, "layer.v1.tar", b"");
    if flags & 1 == 0 {
        index(&mut files, input.0);
    } else {
        files.push(("index.json".into(), input.0.to_vec()));
    }
    feed(ImageJob::Unpack(files));
}

/// A manifest; or a configuration and up to four layers
/// of a valid manifest. And all bytes as an index.
pub(crate) fn inbox(bytes: &[u8]) {
    let _ = image::of_index(bytes);
    let mut input = FuzzInput(bytes);
    let mut files = ImageFiles::new();
    let manifest = if input.byte() & 1 == 0 {
        blob(&mut files, "layer.v1.tar", b"");
        input.0.to_vec()
    } else {
        let config = blob(&mut files, "config.v1+json", input.counted());
        let mut layers = Vec::new();
        while !input.is_empty() && layers.len() < 4 {
            layers.push(blob(&mut files, "layer.v1.tar", input.counted()));
        }
        let manifest =
            serde_json::json!({ "schemaVersion": 2, "config": config, "layers": layers });
        manifest.to_string().into_bytes()
    };
    for (name, _) in &mut files {
        *name = name.rsplit('/').next().unwrap_or_default().to_owned();
    }
    files.push((MANIFEST.into(), manifest));
    feed(ImageJob::Keep(files));
}

/// An archive of `docker save`.
pub(crate) fn archive(bytes: &[u8]) {
    feed(ImageJob::Convert(bytes.to_vec()));
}
