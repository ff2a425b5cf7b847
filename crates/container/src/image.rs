//! Unpacks an image from an OCI image layout on disk into a directory whose files belong to a
//! vnet's user ids.
//!
//! Digests are checked; no file is written outside the directory, whatever a layer says; device
//! nodes are left out. An unpacked image is kept by its manifest's digest and the user ids, and
//! used again.
//!
//! Limits: [`JSON_BYTES_MAX`] for index and manifest, [`LAYERS_MAX`], [`UNPACKED_BYTES_MAX`].
//! Source: OCI image specification 1.0.2 (image-layout, manifest, layer: whiteouts).

use std::fs::{self, File, Permissions};
use std::io::{self, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, lchown};
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use oci_spec::image::{Descriptor, ImageIndex, ImageManifest, MediaType};
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use tar::{Archive, EntryType};

use crate::error::{Context, Error, Result};
use crate::spec::UserRange;

/// Bytes of an index or a manifest.
pub const JSON_BYTES_MAX: u64 = 4 << 20;

/// Layers of an image.
pub const LAYERS_MAX: usize = 128;

/// Bytes of an unpacked image, layers added up.
pub const UNPACKED_BYTES_MAX: u64 = 16 << 30;

/// Depth of indexes in indexes.
const INDEX_DEPTH_MAX: usize = 4;

const REFERENCE: &str = "org.opencontainers.image.ref.name";

/// Begins the name of a file that says that another is gone.
const WHITEOUT: &[u8] = b".wh.";

/// Says that all that lower layers have in this directory is gone.
const OPAQUE: &[u8] = b".wh..wh..opq";

/// Guests that start at a time may want the same image: it is unpacked once.
static UNPACKING: Mutex<()> = Mutex::new(());

/// Unpacks an image below `images` unless it is there, and returns its root. One process at a time
/// may do so.
pub fn unpack(
    layout: &Path,
    reference: Option<&str>,
    users: UserRange,
    images: &Path,
) -> Result<PathBuf> {
    let fail = |text: String| Error::Image { path: layout.to_owned(), text };
    let (digest, manifest) = manifest(layout, reference)?;
    let name = format!("{}-{}", digest.replace(':', "-"), users.base);
    let root = images.join(&name);
    // A panic leaves nothing half done here.
    let _one = UNPACKING.lock().unwrap_or_else(PoisonError::into_inner);
    if root.is_dir() {
        return Ok(root);
    }
    if manifest.layers().len() > LAYERS_MAX {
        let count = manifest.layers().len();
        return Err(fail(format!("{count} layers, {LAYERS_MAX} at most")));
    }
    // Under another name until it is whole.
    let part = images.join(format!("{name}.part"));
    if part.exists() {
        // From a process that was killed.
        fs::remove_dir_all(&part).at("remove", &part)?;
    }
    let result = make_directories(images, &part).and_then(|()| {
        let owner = Some(users.base);
        lchown(&part, owner, owner).at("give away", &part)?;
        let mut left = UNPACKED_BYTES_MAX;
        for layer in manifest.layers() {
            let digest = layer.digest().to_string();
            apply(layout, layer, &part, users, &mut left)
                .map_err(|error| fail(format!("layer {digest}: {error}")))?;
        }
        fs::rename(&part, &root).at("rename", &part)
    });
    if part.exists() {
        let _ = fs::remove_dir_all(&part);
    }
    result.map(|()| root)
}

/// The directory of all images, passed by guests, and one for this image's files.
fn make_directories(images: &Path, part: &Path) -> Result<()> {
    fs::create_dir_all(part).at("make", part)?;
    fs::set_permissions(images, Permissions::from_mode(0o711)).at("set mode of", images)
}

/// Finds the manifest and its digest.
fn manifest(layout: &Path, reference: Option<&str>) -> Result<(String, ImageManifest)> {
    let fail = |text: String| Error::Image { path: layout.to_owned(), text };
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
fn apply(
    layout: &Path,
    layer: &Descriptor,
    root: &Path,
    users: UserRange,
    left: &mut u64,
) -> io::Result<()> {
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
        [0x1f, 0x8b, ..] => {
            apply_tar(flate2::bufread::MultiGzDecoder::new(file), root, users, left)
        }
        [0x28, 0xb5, 0x2f, 0xfd] => {
            let decoder = ruzstd::decoding::StreamingDecoder::new(file)
                .map_err(|error| invalid(format!("zstd: {error}")))?;
            apply_tar(decoder, root, users, left)
        }
        _ => apply_tar(file, root, users, left),
    }
}

fn apply_tar(tar: impl Read, root: &Path, users: UserRange, left: &mut u64) -> io::Result<()> {
    let mut archive = Archive::new(tar.take(*left));
    archive.set_preserve_permissions(true);
    archive.set_overwrite(true);
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = entry.path()?.into_owned();
        let Some(path) = relative(&path) else { continue };
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { continue };
        *left = left
            .checked_sub(entry.size())
            .ok_or_else(|| invalid(format!("more than {UNPACKED_BYTES_MAX} bytes unpacked")))?;
        let Some(parent) = safe_dir(root, parent, users)? else {
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
            let id = |id: u64| {
                u32::try_from(id).ok().filter(|id| *id < users.length).unwrap_or(0) + users.base
            };
            let (uid, gid) = (id(entry.header().uid()?), id(entry.header().gid()?));
            lchown(&place, Some(uid), Some(gid))?;
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
fn safe_dir(root: &Path, path: &Path, users: UserRange) -> io::Result<Option<PathBuf>> {
    let mut dir = root.to_owned();
    for component in path.components() {
        dir.push(component);
        match dir.symlink_metadata() {
            Ok(meta) if meta.is_dir() => {}
            Ok(_) => return Ok(None),
            Err(_) => {
                fs::create_dir(&dir)?;
                lchown(&dir, Some(users.base), Some(users.base))?;
            }
        }
    }
    Ok(Some(dir))
}

fn remove(path: &Path) -> io::Result<()> {
    match path.symlink_metadata() {
        Ok(meta) if meta.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(_) => Ok(()),
    }
}

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}
