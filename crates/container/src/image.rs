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

use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::io::{self, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, lchown, symlink};
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use oci_spec::image::{Descriptor, ImageIndex, ImageManifest, MediaType};
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use tar::{Archive, EntryType};

use crate::error::{Context, Error, Result};
use crate::spec::bundle;
use crate::tree;
use crate::view;

/// Bytes of an index or a manifest.
pub const JSON_BYTES_MAX: u64 = 4 << 20;

/// Layers of an image.
pub const LAYERS_MAX: usize = 128;

/// Bytes of an unpacked image, layers added up.
pub const UNPACKED_BYTES_MAX: u64 = 16 << 30;

/// Entries of an unpacked image, layers added up.
pub const UNPACKED_FILES_MAX: u64 = 1_000_000;

/// User ids of an image; files of others are root's.
const IDS: u64 = 1 << 16;

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

/// Guests that start at a time may want the same image: it is unpacked once. And none goes between
/// its unpacking and the link that keeps it.
static IMAGES: Mutex<()> = Mutex::new(());

/// Unpacks an image below `images` unless it is there, and returns its root. One process at a time
/// may do so.
pub fn unpack(layout: &Path, reference: Option<&str>, images: &Path) -> Result<PathBuf> {
    let _one = lock();
    unpack_alone(layout, reference, images)
}

/// The same for a guest: `link` is made a link to it, and it is kept as long as that is there.
pub(crate) fn unpack_for(
    link: &Path,
    layout: &Path,
    reference: Option<&str>,
    images: &Path,
) -> Result<PathBuf> {
    let _one = lock();
    let root = unpack_alone(layout, reference, images)?;
    symlink(&root, link).at("link", link)?;
    Ok(root)
}

/// Removes what is in `images` and no whole image that a guest runs on, in the directories that
/// `guests` returns.
pub(crate) fn collect(images: &Path, guests: impl Fn() -> Result<Vec<PathBuf>>) -> Result<()> {
    let _one = lock();
    let there = fs::read_dir(images).at("read", images)?;
    let there: io::Result<Vec<PathBuf>> = there.map(|entry| Ok(entry?.path())).collect();
    let mut there = there.at("read", images)?;
    if there.is_empty() {
        return Ok(());
    }
    let used = |dir: &PathBuf| fs::read_link(bundle(dir).join(view::IMAGE)).ok();
    let used: BTreeSet<PathBuf> = guests()?.iter().filter_map(used).collect();
    there.retain(|path| !used.contains(path));
    there.iter().try_for_each(|path| discard(path))
}

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

fn lock() -> MutexGuard<'static, ()> {
    // A panic leaves nothing under a whole image's name.
    IMAGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes an image, or a part of one; it is no whole one from the first step on.
fn discard(path: &Path) -> Result<()> {
    let mut part = path.as_os_str().to_owned();
    if !path.as_os_str().as_bytes().ends_with(PART.as_bytes()) {
        part.push(PART);
        tree::remove(Path::new(&part))?;
        fs::rename(path, &part).at("rename", path)?;
    }
    tree::remove(Path::new(&part))
}

fn unpack_alone(layout: &Path, reference: Option<&str>, images: &Path) -> Result<PathBuf> {
    let (digest, manifest) = manifest(layout, reference)?;
    let name = digest.replace(':', "-");
    let root = images.join(&name);
    if root.is_dir() {
        return Ok(root);
    }
    let layers = layers(layout, &manifest)?;
    // From a process that was killed.
    let part = images.join(name + PART);
    tree::remove(&part)?;
    let result = make_directories(images, &part).and_then(|()| {
        let mut left = Left { bytes: UNPACKED_BYTES_MAX, files: UNPACKED_FILES_MAX };
        for layer in layers {
            let digest = layer.digest().to_string();
            apply(layout, layer, &part, &mut left)
                .map_err(|error| failed(layout, format!("layer {digest}: {error}")))?;
        }
        for place in PLACES {
            // What is a link stays one.
            safe_dir(&part, Path::new(place))
                .map_err(|error| failed(layout, format!("{place}: {error}")))?;
        }
        // All that it has, before its name says so; and its name, before a guest is told.
        let unpacked = File::open(&part).at("open", &part)?;
        rustix::fs::syncfs(&unpacked).at("write to disk", &part)?;
        fs::rename(&part, &root).at("rename", &part)?;
        File::open(images).and_then(|images| images.sync_all()).at("write to disk", images)
    });
    if result.is_err() {
        // What failed first is what the caller has to know.
        let _ = tree::remove(&part);
    }
    result.map(|()| root)
}

/// What may still be unpacked.
struct Left {
    bytes: u64,
    files: u64,
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

fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(JSON_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > JSON_BYTES_MAX {
        return Err(invalid(format!("more than {JSON_BYTES_MAX} bytes")));
    }
    Ok(bytes)
}

/// Path of a blob; an error if its digest could lead elsewhere.
fn blob_path(layout: &Path, descriptor: &Descriptor) -> io::Result<(PathBuf, String)> {
    let digest = descriptor.digest().to_string();
    match digest.strip_prefix("sha256:") {
        Some(hex) if hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_hexdigit()) => {
            Ok((layout.join("blobs/sha256").join(hex), hex.to_owned()))
        }
        _ => Err(invalid(format!("digest {digest}: only sha256 is known"))),
    }
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
    let (path, want) = blob_path(layout, layer)?;
    let mut hash = Sha256::new();
    let mut file = File::open(&path)?;
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
    let file = BufReader::new(File::open(&path)?);
    // By its first bytes: media types of layers come in several dialects.
    let mut magic = [0; 4];
    let count = File::open(&path)?.read(&mut magic)?;
    match magic[..count] {
        [0x1f, 0x8b, ..] => apply_tar(flate2::bufread::MultiGzDecoder::new(file), root, left),
        [0x28, 0xb5, 0x2f, 0xfd] => {
            let decoder = ruzstd::decoding::StreamingDecoder::new(file)
                .map_err(|error| invalid(format!("zstd: {error}")))?;
            apply_tar(decoder, root, left)
        }
        _ => apply_tar(file, root, left),
    }
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
        left.bytes = left
            .bytes
            .checked_sub(entry.size())
            .ok_or_else(|| invalid(format!("more than {UNPACKED_BYTES_MAX} bytes unpacked")))?;
        left.files = left
            .files
            .checked_sub(1)
            .ok_or_else(|| invalid(format!("more than {UNPACKED_FILES_MAX} files unpacked")))?;
        let Some(parent) = safe_dir(root, parent)? else {
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
fn safe_dir(root: &Path, path: &Path) -> io::Result<Option<PathBuf>> {
    let mut dir = root.to_owned();
    for component in path.components() {
        dir.push(component);
        match dir.symlink_metadata() {
            Ok(meta) if meta.is_dir() => {}
            Ok(_) => return Ok(None),
            Err(_) => {
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
