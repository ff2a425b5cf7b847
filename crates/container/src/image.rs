//! Unpacks an image from an OCI image layout on disk into a directory of root's, with the owners that
//! its layers say: guests see it read-only, through their own user ids ([`crate::Root::OciLayout`]).
//!
//! Digests are checked; no file is written outside the directory, whatever a layer says; device
//! nodes are left out, and nothing is set-user-ID. An unpacked image is kept by its manifest's digest,
//! for all guests that run on it, and removed when there is none ([`collect`]). A name without
//! [`PART`] is on disk as a whole: it is given when all that it has is.
//!
//! Limits: [`JSON_BYTES_MAX`] for index and manifest, [`LAYERS_MAX`], [`UNPACKED_BYTES_MAX`],
//! [`UNPACKED_FILES_MAX`].
//! Source: OCI image specification 1.0.2 (image-layout, manifest, layer: whiteouts).

mod archive;
mod config;
mod store;
mod unpacked;

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, BufReader, Read, Seek};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, lchown};
use std::path::{Component, Path, PathBuf};

use oci_spec::image::{Descriptor, ImageIndex, ImageManifest, MediaType};
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use tar::{Archive, EntryType};

use crate::bounded::Bounded;
use crate::error::{Context, Error, Result};
use crate::tree;

pub use archive::{ARCHIVE_ENTRIES_MAX, convert};
pub(crate) use config::{Own, has_directory};
pub use store::{Index, KEPT_MAX, Kept, Named, Room, STORE, Store, Work};
pub(crate) use store::{layout, take};
pub use unpacked::{UNPACKING_MAX, unpack};
pub(crate) use unpacked::{begin, collect, unpack_for};

/// Bytes of an index or a manifest.
pub const JSON_BYTES_MAX: u64 = 4 << 20;

/// Bytes of what is said of an image that is refused: its own words may be among them.
const TEXT_BYTES_MAX: usize = 1024;

/// Layers of an image.
pub const LAYERS_MAX: usize = 128;

/// Bytes of an unpacked image, layers added up.
pub const UNPACKED_BYTES_MAX: u64 = 16 << 30;

/// Entries of an unpacked image, layers added up.
pub const UNPACKED_FILES_MAX: u64 = 1_000_000;

/// Bytes of a block of a disk.
const BLOCK_BYTES: u64 = 4096;

/// Bytes and inodes of the disk that stay free while an image is unpacked: pdpd's journal and logs are there too.
const KEPT_FREE_BYTES: u64 = 256 << 20;
const KEPT_FREE_INODES_PERCENT: u64 = 5;

/// User ids of an image; files of others are root's.
const IDS: u64 = 1 << 16;

/// The manifest of an image that came ([`Work::inbox`]).
pub const MANIFEST: &str = "manifest.json";

/// Ends the name of what is no whole image: not yet, or no more.
pub const PART: &str = ".part";

/// Directories that a guest needs to mount on; an image is read-only when it does.
const PLACES: [&str; 9] = ["dev", "etc", "proc", "root", "run", "sys", "tmp", "var/log", "var/tmp"];

/// Depth of indexes in indexes.
const INDEX_DEPTH_MAX: usize = 4;

const REFERENCE: &str = "org.opencontainers.image.ref.name";

/// Begins the name of a file that says that another is gone.
const WHITEOUT: &[u8] = b".wh.";

/// Says that all that lower layers have in this directory is gone.
const OPAQUE: &[u8] = b".wh..wh..opq";

/// Whether an image is there and can be unpacked, as far as its index, its manifest and the presence of its
/// layers say.
pub fn look(layout: &Path, reference: Option<&str>) -> Result<()> {
    let (_, manifest) = manifest(layout, reference)?;
    for layer in layers(layout, &manifest)? {
        let there = blob_path(layout, layer).and_then(|(path, _)| fs::metadata(path));
        there.map_err(|error| failed(layout, format!("layer {}: {error}", layer.digest())))?;
    }
    Ok(())
}

/// The digest of the image for this kind of machine where `bytes` are an index of images; `None` where they are an
/// image's own manifest.
///
/// # Errors
/// Neither, or none of them is for linux/amd64.
pub fn of_index(bytes: &[u8]) -> std::result::Result<Option<String>, String> {
    #[derive(serde::Deserialize)]
    struct Either {
        manifests: Option<Vec<Entry>>,
        config: Option<serde::de::IgnoredAny>,
    }
    #[derive(serde::Deserialize)]
    struct Entry {
        digest: String,
        platform: Option<Platform>,
    }
    #[derive(serde::Deserialize)]
    struct Platform {
        os: String,
        architecture: String,
    }
    let either: Either = parse(bytes).map_err(|error| format!("its manifest: {error}"))?;
    let entries = match (either.manifests, either.config) {
        (Some(entries), _) => entries,
        (None, Some(_)) => return Ok(None),
        (None, None) => return Err("its manifest is in none of the forms of docker and OCI".into()),
    };
    let for_us = |entry: &Entry| {
        let platform = entry.platform.as_ref();
        platform.is_none_or(|is| is.os == "linux" && is.architecture == "amd64")
    };
    let found = entries.into_iter().find(for_us);
    found.map(|entry| Some(entry.digest)).ok_or_else(|| "it is not for linux/amd64".into())
}

/// The layers of an image, lowest first.
fn layers<'a>(layout: &Path, manifest: &'a ImageManifest) -> Result<&'a [Descriptor]> {
    let layers = manifest.layers();
    if layers.len() > LAYERS_MAX {
        return Err(failed(layout, format!("{} layers, {LAYERS_MAX} at most", layers.len())));
    }
    Ok(layers)
}

fn failed(layout: &Path, text: String) -> Error {
    Error::Image { path: layout.to_owned(), text }
}

/// Unpacks the image of this reference into `part`, if it has this digest, and renames that to `root`. Nobody else uses
/// `part` meanwhile; somebody else may make `root`.
pub(crate) fn unpack_alone(
    layout: &Path,
    (reference, wanted): (Option<&str>, &str),
    (part, root): (&Path, &Path),
) -> Result<()> {
    let (digest, manifest) = manifest(layout, reference)?;
    if digest != wanted {
        return Err(failed(layout, format!("it is {digest} now, and was {wanted} before")));
    }
    let layers = layers(layout, &manifest)?;
    let images = root.parent().unwrap_or(root);
    // From a process that was killed.
    tree::remove(part)?;
    let result = make_directories(images, part).and_then(|()| {
        let mut left = Left::on(part, UNPACKED_BYTES_MAX, UNPACKED_FILES_MAX);
        for layer in layers {
            let digest = layer.digest().to_string();
            apply(layout, layer, part, &mut left)
                .map_err(|error| failed(layout, format!("layer {digest}: {error}")))?;
        }
        for place in PLACES {
            // What is a link stays one.
            safe_dir(part, Path::new(place), &mut left)
                .map_err(|error| failed(layout, format!("{place}: {error}")))?;
        }
        // All that it has, before its name says so; and its name, before a guest is told.
        let unpacked = File::open(part).at("open", part)?;
        rustix::fs::syncfs(&unpacked).at("write to disk", part)?;
        match fs::rename(part, root) {
            // Another owner's came first.
            Err(_) if root.is_dir() => return tree::remove(part),
            renamed => renamed.at("rename", part)?,
        }
        File::open(images).and_then(|images| images.sync_all()).at("write to disk", images)
    });
    if result.is_err() {
        // What failed first is what the caller has to know.
        let _ = tree::remove(part);
    }
    result
}

/// What may still be unpacked.
struct Left {
    bytes: u64,
    files: u64,
    /// A directory on the disk whose room counts as well.
    on: Option<PathBuf>,
}

impl Left {
    /// So much, of a disk that keeps some room free.
    fn on(directory: &Path, bytes: u64, files: u64) -> Self {
        Self { bytes, files, on: Some(directory.to_owned()) }
    }

    /// Takes an entry of so many bytes off.
    fn take(&mut self, size: u64) -> io::Result<()> {
        let bytes = disk_bytes(size);
        self.bytes = self
            .bytes
            .checked_sub(bytes)
            .ok_or_else(|| invalid(format!("more than {UNPACKED_BYTES_MAX} bytes unpacked")))?;
        self.files = self
            .files
            .checked_sub(1)
            .ok_or_else(|| invalid(format!("more than {UNPACKED_FILES_MAX} files unpacked")))?;
        self.on.as_deref().map_or(Ok(()), |directory| keeps_free(directory, bytes))
    }
}

/// Bytes of a disk that a file or directory of this size takes: whole blocks, and one for its inode and its name.
fn disk_bytes(size: u64) -> u64 {
    size.div_ceil(BLOCK_BYTES).saturating_add(1).saturating_mul(BLOCK_BYTES)
}

/// Refuses to take so many bytes of a disk that has too little left then.
fn keeps_free(directory: &Path, bytes: u64) -> io::Result<()> {
    let disk = rustix::fs::statvfs(directory)?;
    if disk.f_bavail.saturating_mul(disk.f_frsize) < KEPT_FREE_BYTES.saturating_add(bytes) {
        let free = KEPT_FREE_BYTES >> 20;
        return Err(invalid(format!("the disk is full: {free} MiB stay free; remove something")));
    }
    // Some file systems have no fixed number of inodes, and say 0.
    if disk.f_favail < disk.f_files / 100 * KEPT_FREE_INODES_PERCENT {
        let free = KEPT_FREE_INODES_PERCENT;
        let text = format!("the disk has no inodes left: {free} % stay free; remove something");
        return Err(invalid(text));
    }
    Ok(())
}

/// The directory of all images, which nobody but root passes: what is in it has owners that on the
/// machine are somebody else. And one for this image's files.
fn make_directories(images: &Path, part: &Path) -> Result<()> {
    fs::create_dir_all(images).at("make", images)?;
    fs::set_permissions(images, Permissions::from_mode(0o700)).at("set mode of", images)?;
    fs::create_dir(part).at("make", part)?;
    fs::set_permissions(part, Permissions::from_mode(0o755)).at("set mode of", part)
}

/// Finds the manifest and its digest.
fn manifest(layout: &Path, reference: Option<&str>) -> Result<(String, ImageManifest)> {
    let fail = |text| failed(layout, text);
    let index = layout.join("index.json");
    let text = read_bounded(&index).at("read", &index)?;
    let mut index: ImageIndex = parse(&text).map_err(|e| fail(format!("index.json: {e}")))?;
    let mut reference = reference;
    for _ in 0..INDEX_DEPTH_MAX {
        let named = |descriptor: &&Descriptor| {
            let annotations = descriptor.annotations().as_ref();
            let name = annotations.and_then(|all| all.get(REFERENCE)).map(String::as_str);
            reference.is_none_or(|wanted| name == Some(wanted))
        };
        let for_us = |descriptor: &&Descriptor| {
            descriptor.platform().as_ref().is_none_or(|platform| {
                platform.os().to_string() == "linux"
                    && platform.architecture().to_string() == "amd64"
            })
        };
        let found: Vec<_> = index.manifests().iter().filter(named).filter(for_us).collect();
        let [descriptor] = found[..] else {
            return Err(fail(format!(
                "{} images for linux/amd64 with reference {}; name one by its {REFERENCE}",
                found.len(),
                reference.unwrap_or("(any)"),
            )));
        };
        let bytes = blob(layout, descriptor).map_err(|e| fail(e.to_string()))?;
        if *descriptor.media_type() != MediaType::ImageIndex {
            let manifest = parse(&bytes).map_err(|e| fail(format!("manifest: {e}")))?;
            return Ok((descriptor.digest().to_string(), manifest));
        }
        index = parse(&bytes).map_err(|e| fail(format!("index: {e}")))?;
        reference = None;
    }
    Err(fail(format!("indexes more than {INDEX_DEPTH_MAX} deep")))
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    serde_json::from_slice(bytes)
}

/// Opens a file, and nothing else: what has no end, or waits for somebody, is no part of an image.
fn open_file(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(invalid(format!("{} is no file", path.display()))),
    }
}

fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    Bounded { bytes_max: JSON_BYTES_MAX }.read_from(open_file(path)?)
}

/// Path of a blob; an error if its digest could lead elsewhere.
fn blob_path(layout: &Path, descriptor: &Descriptor) -> io::Result<(PathBuf, String)> {
    let digest = descriptor.digest().to_string();
    match sha256_hex(&digest) {
        Some(hex) => Ok((layout.join("blobs/sha256").join(hex), hex.to_owned())),
        None => Err(invalid(format!("digest {digest}: only sha256 is known"))),
    }
}

/// The hexadecimal digits of a `sha256:` digest.
fn sha256_hex(digest: &str) -> Option<&str> {
    let hex = digest.strip_prefix("sha256:")?;
    (hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(hex)
}

fn blob(layout: &Path, descriptor: &Descriptor) -> io::Result<Vec<u8>> {
    let (path, want) = blob_path(layout, descriptor)?;
    let bytes = read_bounded(&path)?;
    if hex(&Sha256::digest(&bytes)) != want {
        return Err(invalid(format!("{}: its bytes have another digest", path.display())));
    }
    Ok(bytes)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Applies a layer; its digest is checked on a first pass over the file.
fn apply(layout: &Path, layer: &Descriptor, root: &Path, left: &mut Left) -> io::Result<()> {
    apply_tar(layer_tar(layout, layer)?, root, left)
}

/// A layer's files as tar, once its digest has been checked.
fn layer_tar(layout: &Path, layer: &Descriptor) -> io::Result<Box<dyn Read>> {
    let (path, want) = blob_path(layout, layer)?;
    let mut hash = Sha256::new();
    let mut file = open_file(&path)?;
    let mut buffer = vec![0; 1 << 16];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            count => hash.update(&buffer[..count]),
        }
    }
    if hex(&hash.finalize()) != want {
        return Err(invalid("its bytes have another digest".to_owned()));
    }
    // By its first bytes: media types of layers come in several dialects. The same file: its name may be another's.
    let mut magic = [0; 4];
    file.rewind()?;
    let count = file.read(&mut magic)?;
    file.rewind()?;
    let file = BufReader::new(file);
    Ok(match magic[..count] {
        [0x1f, 0x8b, ..] => Box::new(flate2::bufread::MultiGzDecoder::new(file)),
        [0x28, 0xb5, 0x2f, 0xfd] => {
            let decoder = ruzstd::decoding::StreamingDecoder::new(file)
                .map_err(|error| invalid(format!("zstd: {error}")))?;
            Box::new(decoder)
        }
        _ => Box::new(file),
    })
}

fn apply_tar(tar: impl Read, root: &Path, left: &mut Left) -> io::Result<()> {
    let mut archive = Archive::new(tar.take(left.bytes));
    archive.set_preserve_permissions(true);
    archive.set_overwrite(true);
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = entry.path()?.into_owned();
        let Some(path) = relative(&path) else { continue };
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { continue };
        left.take(entry.size())?;
        let Some(parent) = safe_dir(root, parent, left)? else {
            return Err(invalid(format!("{}: a directory on its way is none", path.display())));
        };
        let name = name.as_bytes();
        if name == OPAQUE {
            for old in fs::read_dir(&parent)? {
                remove(&old?.path())?;
            }
            continue;
        }
        if let Some(gone) = name.strip_prefix(WHITEOUT) {
            if !matches!(gone, b"" | b"." | b"..") {
                remove(&parent.join(std::ffi::OsStr::from_bytes(gone)))?;
            }
            continue;
        }
        let kind = entry.header().entry_type();
        if matches!(kind, EntryType::Char | EntryType::Block | EntryType::Fifo) {
            continue;
        }
        let place = root.join(&path);
        let both_dirs = kind.is_dir() && place.symlink_metadata().is_ok_and(|meta| meta.is_dir());
        if !both_dirs {
            remove(&place)?;
        }
        // Checks once more that the parent is inside the root, and hard links' targets too.
        if !entry.unpack_in(root)? {
            return Err(invalid(format!("{}: leads out of the image", path.display())));
        }
        if kind != EntryType::Link {
            let id = |id: u64| if id < IDS { id as u32 } else { 0 };
            let (uid, gid) = (id(entry.header().uid()?), id(entry.header().gid()?));
            lchown(&place, Some(uid), Some(gid))?;
            let meta = place.symlink_metadata()?;
            if meta.is_file() {
                // Set-user-ID is of no use in a guest, and on the machine it would be root's.
                let mode = meta.permissions().mode() & 0o1777;
                fs::set_permissions(&place, Permissions::from_mode(mode))?;
            }
        }
    }
    Ok(())
}

/// The path below the root; `None` for the root itself and for paths with `..`.
fn relative(path: &Path) -> Option<PathBuf> {
    let mut below = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => below.push(name),
            Component::CurDir | Component::RootDir => {}
            Component::ParentDir | Component::Prefix(_) => return None,
        }
    }
    (!below.as_os_str().is_empty()).then_some(below)
}

/// The directory at `path` below the root, made where it is missing; `None` if something on the
/// way is not a directory: a link would lead elsewhere.
fn safe_dir(root: &Path, path: &Path, left: &mut Left) -> io::Result<Option<PathBuf>> {
    let mut dir = root.to_owned();
    for component in path.components() {
        dir.push(component);
        match dir.symlink_metadata() {
            Ok(meta) if meta.is_dir() => {}
            Ok(_) => return Ok(None),
            Err(_) => {
                left.take(0)?;
                fs::create_dir(&dir)?;
                fs::set_permissions(&dir, Permissions::from_mode(0o755))?;
            }
        }
    }
    Ok(Some(dir))
}

fn remove(path: &Path) -> io::Result<()> {
    match path.symlink_metadata() {
        Ok(meta) if meta.is_dir() => tree::remove(path).map_err(io::Error::other),
        Ok(_) => fs::remove_file(path),
        Err(_) => Ok(()),
    }
}

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}
