//! Unpacks an image from an OCI image layout on disk into a directory of root's, with the owners
//! that its layers give. Guests see it read-only, through their own user ids
//! ([`crate::RootFilesystem::OciLayout`]).
//!
//! Digests are checked; those of layers also after unpacking (`rootfs.diff_ids`). No file is
//! written outside the directory, whatever a layer has. Device nodes are left out, and nothing is
//! set-user-ID. An unpacked image is named by its manifest's digest and shared by all guests that
//! run on it. Without such guests it is removed ([`collect`]). A directory without [`PART`] in its
//! name is complete on disk: it gets its name after all its content is written.
//!
//! Limits: [`JSON_BYTES_MAX`] for index and manifest, [`LAYERS_MAX`], [`UNPACKED_BYTES_MAX`],
//! [`UNPACKED_FILES_MAX`]. Source: OCI image specification 1.0.2 (image-layout, manifest, layer:
//! whiteouts).

mod archive;
mod config;
mod layer;
mod packed;
mod platform;
mod store;
mod unpacked;

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Seek};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use oci_spec::image::{Descriptor, ImageIndex, ImageManifest, MediaType};
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

use self::packed::Tar;
use self::platform::Platform;
use crate::bounded::Bounded;
use crate::error::{Error, ErrorContext, Result};
use crate::safe_removal;

pub use archive::{ARCHIVE_ENTRIES_MAX, convert};
pub(crate) use config::{ImageDefaults, has_directory};
pub use store::{
    ImageLimits, ImageStaging, ImageStore, ImageStoreIndex, KEPT_MAX, STORE, StoredImage,
    StoredName,
};
pub(crate) use store::{layout, make_layout};
pub use unpacked::{UNPACKING_MAX, unpack};
pub(crate) use unpacked::{begin, collect, unpack_for};

/// Largest index or manifest, bytes.
pub const JSON_BYTES_MAX: u64 = 4 << 20;

/// Largest message about a refused image, bytes. It may have texts of the image.
const TEXT_BYTES_MAX: usize = 1024;

/// Largest number of layers of an image.
pub const LAYERS_MAX: usize = 128;

/// Largest unpacked image, all layers added up, bytes.
pub const UNPACKED_BYTES_MAX: u64 = 16 << 30;

/// Largest number of entries of an unpacked image, all layers added up.
pub const UNPACKED_FILES_MAX: u64 = 1_000_000;

/// Size of a disk's block, bytes.
const BLOCK_BYTES: u64 = 4096;

/// Bytes and inodes of the disk that stay free while an image is unpacked. pdpd's journal and logs
/// need them.
const KEPT_FREE_BYTES: u64 = 256 << 20;
const KEPT_FREE_INODES_PERCENT: u64 = 5;

/// Number of user ids of an image. Files of other users get root as owner.
const IDS: u64 = 1 << 16;

/// Name of a received image's manifest ([`ImageStaging::inbox`]).
pub const MANIFEST: &str = "manifest.json";

/// Suffix of the name of an incomplete image: not complete yet, or being removed.
pub const PART: &str = ".part";

/// In a bundle: a link to the unpacked image of the guest's root. The link keeps the image from
/// being removed.
pub(crate) const LINK: &str = "image";

/// Directories that a guest needs as mount points. The image is already read-only when the guest
/// mounts.
const PLACES: [&str; 9] = ["dev", "etc", "proc", "root", "run", "sys", "tmp", "var/log", "var/tmp"];

/// Largest depth of nested indexes.
const INDEX_DEPTH_MAX: usize = 4;

const REFERENCE: &str = "org.opencontainers.image.ref.name";

/// Prefix of the name of a file that marks another file as removed.
const WHITEOUT: &[u8] = b".wh.";

/// File that marks everything that lower layers have in its directory as removed.
const OPAQUE: &[u8] = b".wh..wh..opq";

/// Checks an image's index, manifest and configuration, and that its layers exist. Does not read
/// the layers.
pub fn check(layout: &Path, reference: Option<&str>) -> Result<()> {
    let (_, manifest) = manifest(layout, reference)?;
    diff_ids(layout, &manifest).map_err(|error| failed(layout, error.to_string()))?;
    for layer in layers(layout, &manifest)? {
        let metadata = blob_path(layout, layer).and_then(|(path, _)| fs::metadata(path));
        metadata.map_err(|error| failed(layout, format!("layer {}: {error}", layer.digest())))?;
    }
    Ok(())
}

/// Returns the digest of the image for this kind of machine if `bytes` are an index of images.
/// Returns `None` if they are an image's manifest.
///
/// # Errors
/// `bytes` are neither, or no image is for linux/amd64 and this CPU.
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
    let either: Either = parse(bytes).map_err(|error| format!("its manifest: {error}"))?;
    let entries = match (either.manifests, either.config) {
        (Some(entries), _) => entries,
        (None, Some(_)) => return Ok(None),
        (None, None) => return Err("its manifest has an unknown format (use docker or OCI)".into()),
    };
    let platforms = || entries.iter().map(|entry| entry.platform.clone());
    match platform::best(platforms().zip(&entries)).first() {
        Some(best) => Ok(Some(best.digest.clone())),
        None => Err(format!("it is {}", platform::other(platforms()))),
    }
}

/// Returns the layers of an image, lowest first.
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

/// Unpacks the image with this reference and digest into `part`, and renames that to `root`. No
/// other process uses `part` meanwhile. Another process may make `root`.
pub(crate) fn unpack_alone(
    layout: &Path,
    (reference, expected): (Option<&str>, &str),
    (part, root): (&Path, &Path),
) -> Result<()> {
    let (digest, manifest) = manifest(layout, reference)?;
    if digest != expected {
        return Err(failed(layout, format!("its digest changed from {expected} to {digest}")));
    }
    let layers = layers(layout, &manifest)?;
    let images = root.parent().unwrap_or(root);
    // Left by a process that was killed.
    safe_removal::remove(part)?;
    let result = make_directories(images, part).and_then(|()| {
        let mut left = UnpackBudget::on(part, UNPACKED_BYTES_MAX, UNPACKED_FILES_MAX);
        let diff_ids = diff_ids(layout, &manifest).map_err(|e| failed(layout, e.to_string()))?;
        for (layer, diff_id) in layers.iter().zip(diff_ids) {
            let digest = layer.digest().to_string();
            apply(layout, (layer, diff_id), part, &mut left)
                .map_err(|error| failed(layout, format!("layer {digest}: {error}")))?;
        }
        for place in PLACES {
            // Symbolic links stay links.
            layer::directory(part, Path::new(place), Some(&mut left))
                .map_err(|error| failed(layout, format!("{place}: {error}")))?;
        }
        // First write the content to disk, then rename, then report to the guest.
        let unpacked = File::open(part).at("open", part)?;
        rustix::fs::syncfs(&unpacked).at("write to disk", part)?;
        match fs::rename(part, root) {
            // Another owner's image was complete first.
            Err(_) if root.is_dir() => return safe_removal::remove(part),
            renamed => renamed.at("rename", part)?,
        }
        File::open(images).and_then(|images| images.sync_all()).at("write to disk", images)
    });
    if result.is_err() {
        // Report the first error.
        let _ = safe_removal::remove(part);
    }
    result
}

/// Remaining limits of unpacking.
struct UnpackBudget {
    bytes: u64,
    files: u64,
    /// A directory on the disk whose free space is checked as well.
    on: Option<PathBuf>,
}

impl UnpackBudget {
    /// Returns these limits, for a disk with space to keep free.
    fn on(directory: &Path, bytes: u64, files: u64) -> Self {
        Self { bytes, files, on: Some(directory.to_owned()) }
    }

    /// Subtracts an entry of this size.
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

/// Returns the bytes that a file or directory of this size takes on a disk: whole blocks, and one
/// block for its inode and name.
fn disk_bytes(size: u64) -> u64 {
    size.div_ceil(BLOCK_BYTES).saturating_add(1).saturating_mul(BLOCK_BYTES)
}

/// Returns an error if the disk would have too little free space after taking these bytes.
fn keeps_free(directory: &Path, bytes: u64) -> io::Result<()> {
    let disk = rustix::fs::statvfs(directory)?;
    if disk.f_bavail.saturating_mul(disk.f_frsize) < KEPT_FREE_BYTES.saturating_add(bytes) {
        let free = KEPT_FREE_BYTES >> 20;
        return Err(invalid(format!(
            "the disk is full: {free} MiB must stay free (remove something)"
        )));
    }
    // Some file systems have no fixed number of inodes, and report 0.
    if disk.f_favail < disk.f_files / 100 * KEPT_FREE_INODES_PERCENT {
        let free = KEPT_FREE_INODES_PERCENT;
        let text =
            format!("the disk has no inodes left: {free} % must stay free (remove something)");
        return Err(invalid(text));
    }
    Ok(())
}

/// Makes the directory of all images, and one for this image's files. Only root may enter the first
/// one: owners of the files in it are other users on the machine.
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
    let mut name = "index.json".to_owned();
    for depth in 0..INDEX_DEPTH_MAX {
        let descriptor = choose(&index, reference.filter(|_| depth == 0), depth == 0)
            .map_err(|text| fail(format!("{name}: {text}")))?;
        let bytes = blob(layout, descriptor).map_err(|e| fail(e.to_string()))?;
        if *descriptor.media_type() != MediaType::ImageIndex {
            let manifest = parse(&bytes).map_err(|e| fail(format!("manifest: {e}")))?;
            return Ok((descriptor.digest().to_string(), manifest));
        }
        name = format!("index {}", descriptor.digest());
        index = parse(&bytes).map_err(|e| fail(format!("{name}: {e}")))?;
    }
    Err(fail(format!("indexes more than {INDEX_DEPTH_MAX} deep")))
}

/// Chooses the image of an index, or the index that contains it. The names in `index.json` (`top`)
/// are given by the layout's owner, and exactly one must match. An index below has builds of one
/// image, and the first of the best builds is chosen.
fn choose<'a>(
    index: &'a ImageIndex,
    reference: Option<&str>,
    top: bool,
) -> std::result::Result<&'a Descriptor, String> {
    let named = |descriptor: &&Descriptor| {
        let annotations = descriptor.annotations().as_ref();
        let name = annotations.and_then(|all| all.get(REFERENCE)).map(String::as_str);
        reference.is_none_or(|wanted| name == Some(wanted))
    };
    let named: Vec<&Descriptor> = index.manifests().iter().filter(named).collect();
    let platforms = || named.iter().map(|it| it.platform().as_ref().map(Platform::of));
    let found = platform::best(platforms().zip(named.iter().copied()));
    match (&*found, top) {
        ([one], _) | ([one, ..], false) => Ok(*one),
        ([], false) => Err(format!("its images are {}", platform::other(platforms()))),
        ([], true) if !named.is_empty() => {
            let name = reference.unwrap_or("(any)");
            Err(format!("the image with reference {name} is {}", platform::other(platforms())))
        }
        _ => Err(format!(
            "{} images for linux/amd64 with reference {}; name one by its {REFERENCE}",
            found.len(),
            reference.unwrap_or("(any)"),
        )),
    }
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    serde_json::from_slice(bytes)
}

/// Opens a regular file. Refuses devices without an end, and pipes that would block.
fn open_file(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(invalid(format!("{} is not a file", path.display()))),
    }
}

fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    Bounded { bytes_max: JSON_BYTES_MAX }.read_from(open_file(path)?)
}

/// Returns the path of a blob. Returns an error if its digest could lead elsewhere.
fn blob_path(layout: &Path, descriptor: &Descriptor) -> io::Result<(PathBuf, String)> {
    let digest = descriptor.digest().to_string();
    match sha256_hex(&digest) {
        Some(hex) => Ok((layout.join("blobs/sha256").join(hex), hex.to_owned())),
        None => Err(invalid(format!("digest {digest}: only sha256 is known"))),
    }
}

/// Returns the hexadecimal digits of a `sha256:` digest.
fn sha256_hex(digest: &str) -> Option<&str> {
    let hex = digest.strip_prefix("sha256:")?;
    (hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(hex)
}

fn blob(layout: &Path, descriptor: &Descriptor) -> io::Result<Vec<u8>> {
    let (path, want) = blob_path(layout, descriptor)?;
    let bytes = read_bounded(&path)?;
    if hex(&Sha256::digest(&bytes)) != want {
        return Err(invalid(format!("{}: its content does not match its digest", path.display())));
    }
    Ok(bytes)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Applies a layer. Checks its digest on a first pass over the file, and the digest of its tar at
/// the end.
fn apply(
    layout: &Path,
    (layer, diff_id): (&Descriptor, Option<String>),
    root: &Path,
    left: &mut UnpackBudget,
) -> io::Result<()> {
    let bytes_max = left.bytes;
    let mut tar = layer_tar(layout, layer, diff_id)?;
    layer::apply((&mut tar).take(bytes_max), root, left)?;
    tar.finish(bytes_max)
}

/// Checks a layer's digest and returns its tar. `diff_id`: the digest of the tar itself, in
/// hexadecimal.
fn layer_tar(layout: &Path, layer: &Descriptor, diff_id: Option<String>) -> io::Result<Tar> {
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
        return Err(invalid("its content does not match its digest".to_owned()));
    }
    // Read the same open file: its name may belong to another file by now.
    file.rewind()?;
    Ok(Tar::new(packed::open(file)?, diff_id))
}

/// Returns the digests of the layers' tars from the image's configuration, in hexadecimal; `None`
/// if it has none.
fn diff_ids(layout: &Path, manifest: &ImageManifest) -> io::Result<Vec<Option<String>>> {
    let of = |error: String| invalid(format!("configuration: {error}"));
    let config = blob(layout, manifest.config()).map_err(|error| of(error.to_string()))?;
    let digests = config::diff_ids(&config).map_err(of)?;
    let layers = manifest.layers().len();
    if digests.is_empty() {
        return Ok(vec![None; layers]);
    }
    if digests.len() != layers {
        return Err(of(format!("it has {} diff_ids for {layers} layers", digests.len())));
    }
    let hexadecimal = |digest: String| match sha256_hex(&digest) {
        Some(hex) => Ok(Some(hex.to_ascii_lowercase())),
        None => Err(of(format!("diff_id {digest}: only sha256 is known"))),
    };
    digests.into_iter().map(hexadecimal).collect()
}

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}
