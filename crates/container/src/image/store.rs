//! Images of registries and archives that the daemon keeps for their owners. Each is a whole OCI
//! layout of one image, checked on arrival.
//!
//! The process that brings an image may lie, and may be lied to. It puts files into a directory of
//! its own ([`ImageStaging`]). Of these, only the files that the manifest names are moved, hashed
//! and counted. Only then does the image get a name. Every image in the index is complete on disk.
//! Owners share no images, so that no owner gets what another pulled.
//!
//! ```text
//! store/OWNER/index.json     the images and their names
//! store/OWNER/HEX/           the layout of the image with this digest
//! ```
//!
//! If an owner's index can't be read, only that owner is affected. The owner's files stay untouched
//! until somebody removes them ([`ImageStore::forget`]). All others keep their images.
//!
//! Limits: [`KEPT_MAX`] images of one owner, [`NAMES_MAX`] names of [`NAME_BYTES_MAX`]. An index
//! has the same size limit for writing and reading. The caller limits the bytes of images
//! ([`ImageLimits`]).

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, Permissions};
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use oci_spec::image::{Descriptor, ImageManifest};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest, Sha256};
use tar::{Archive, PaxExtensions};

use super::{
    ImageDefaults, JSON_BYTES_MAX, MANIFEST, TEXT_BYTES_MAX, UNPACKED_BYTES_MAX,
    UNPACKED_FILES_MAX, blob, disk_bytes, failed, hex, invalid, layer_tar, layers, parse,
    read_bounded, sha256_hex,
};
use crate::bounded::Bounded;
use crate::error::{Error, ErrorContext, Result};
use crate::safe_removal;
use crate::status::sanitize;
use crate::work::{WorkOrder, WorkResult, Workplace};

/// Name of the store in the directory of unpacked images.
pub const STORE: &str = "store";

/// Largest number of images of one owner.
pub const KEPT_MAX: usize = 256;

/// Largest number of names of images of one owner.
const NAMES_MAX: usize = 1024;

/// Longest name, bytes.
const NAME_BYTES_MAX: usize = 1536;

/// Size limit of an index.
const INDEX_FILE: Bounded = Bounded { bytes_max: JSON_BYTES_MAX };

/// Largest long name or extended attributes of a file, bytes.
const EXTENSION_BYTES_MAX: u64 = 64 << 10;

/// Largest part of a layer outside of files, bytes: headers, and padding of blocks.
const HEADERS_BYTES_MAX: u64 = 2 << 30;

const INDEX: &str = "index.json";

/// Images of an owner.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageStoreIndex {
    /// Images by the digests of their manifests.
    pub images: BTreeMap<String, StoredImage>,
    /// Digests by name.
    pub names: BTreeMap<String, StoredName>,
}

/// An image in the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredImage {
    /// Size on arrival, packed, bytes.
    pub packed_bytes: u64,
    /// Space that its files take on a disk, bytes.
    pub unpacked_bytes: u64,
    /// Number of files and directories; 0 if an earlier version stored the image.
    #[serde(default)]
    pub files: u64,
    /// Time of arrival, milliseconds since 1970.
    pub at_ms: u64,
}

impl StoredImage {
    /// Returns the bytes that count for a quota.
    pub fn bytes(&self) -> u64 {
        self.packed_bytes + self.unpacked_bytes
    }
}

/// Image of a name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredName {
    /// Digest of the image.
    pub digest: String,
    /// Stamp of the file that the image was read from, if it was a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stamp: Option<String>,
}

impl ImageStoreIndex {
    /// Returns the bytes of all images that count for a quota.
    pub fn bytes(&self) -> u64 {
        self.images.values().map(StoredImage::bytes).sum()
    }

    /// Returns the number of files and directories of all images, unpacked.
    pub fn files(&self) -> u64 {
        self.images.values().map(|kept| kept.files).sum()
    }
}

/// Size limits of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageLimits {
    /// Sum of the bytes on arrival and unpacked.
    pub bytes: u64,
    /// Number of files and directories, unpacked.
    pub files: u64,
}

/// The store of images.
#[derive(Debug)]
pub struct ImageStore {
    store: PathBuf,
    works: PathBuf,
    /// Runs the work of hashing and counting received images.
    workplace: Workplace,
    next: AtomicU64,
    /// Locked while an index is changed.
    changing: Mutex<()>,
}

/// Directories for receiving an image before it is stored. Dropping removes them with their
/// content.
#[derive(Debug)]
pub struct ImageStaging {
    dir: PathBuf,
}

impl ImageStaging {
    /// Returns the directory for received files: [`MANIFEST`], and blobs named by their digests in
    /// hexadecimal.
    pub fn inbox(&self) -> PathBuf {
        self.dir.join("in")
    }

    /// Returns a directory for temporary files of the receiving process.
    pub fn scratch(&self) -> PathBuf {
        self.dir.join("scratch")
    }
}

impl Drop for ImageStaging {
    fn drop(&mut self) {
        // Remains are removed at the next start.
        let _ = safe_removal::remove(&self.dir);
    }
}

impl ImageStore {
    /// Opens the store beside unpacked images. `works` is a directory on the same file system for
    /// receiving images. Removes remains of a crash.
    pub fn open(images: &Path, works: &Path, workplace: Workplace) -> Result<Self> {
        let store = images.join(STORE);
        // Remains do no harm: each has a unique name.
        let _ = safe_removal::remove(works);
        // The processes that fetch images may enter `works`. Only root may read either directory.
        for (dir, mode) in [(&store, 0o700), (&works.to_owned(), 0o711)] {
            DirBuilder::new().recursive(true).mode(mode).create(dir).at("make", dir)?;
        }
        let this = Self {
            store,
            works: works.to_owned(),
            workplace,
            next: AtomicU64::default(),
            changing: Mutex::default(),
        };
        for owner in this.owners()? {
            // `index` reports a store that can't be read to its users.
            let _ = this.tidy(&owner);
        }
        Ok(this)
    }

    /// Removes everything that an owner's index does not name.
    fn tidy(&self, owner: &str) -> Result<()> {
        let index = self.index(owner)?;
        let mut first = Ok(());
        for path in entries(&self.store.join(owner))? {
            let digest = path.file_name().map(|name| format!("sha256:{}", name.display()));
            let known = digest.is_some_and(|digest| index.images.contains_key(&digest));
            if !known && !path.ends_with(INDEX) {
                first = first.and(safe_removal::remove(&path));
            }
        }
        first
    }

    /// Lists the owners of images.
    pub fn owners(&self) -> Result<Vec<String>> {
        let names = entries(&self.store)?.into_iter();
        Ok(names.filter_map(|path| Some(path.file_name()?.to_str()?.to_owned())).collect())
    }

    /// Returns the images of an owner.
    pub fn index(&self, owner: &str) -> Result<ImageStoreIndex> {
        let path = self.store.join(owner).join(INDEX);
        Ok(INDEX_FILE.read(&path).at("read", &path)?.unwrap_or_default())
    }

    /// Returns the directory of an owner's images.
    pub fn owner_directory(&self, owner: &str) -> PathBuf {
        self.store.join(owner)
    }

    /// Removes the whole store of an owner, damaged or not. Dropping the result deletes the files.
    pub fn forget(&self, owner: &str) -> Result<ImageStaging> {
        let _lock = self.lock_index();
        let (gone, place) = (self.begin(0)?, self.owner_directory(owner));
        match fs::rename(&place, gone.dir.join("gone")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).at("rename", &place)
            }
            _ => Ok(gone),
        }
    }

    /// Returns the directory for receiving images.
    pub fn works(&self) -> &Path {
        &self.works
    }

    /// Reads an archive into the inbox of an owner's work; see [`super::convert`].
    pub fn convert(
        &self,
        owner: &str,
        archive: &Path,
        tag: Option<&str>,
        work: &ImageStaging,
        bytes_max: u64,
    ) -> Result<()> {
        let (archive, tag) = (archive.to_owned(), tag.map(str::to_owned));
        let order =
            WorkOrder::Convert { archive: archive.clone(), tag, into: work.inbox(), bytes_max };
        self.workplace.run(owner, &order).map_err(|text| failed(&archive, text))?;
        Ok(())
    }

    /// Makes the directories for receiving an image, with `uid` as owner.
    pub fn begin(&self, uid: u32) -> Result<ImageStaging> {
        let make = || loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let dir = self.works.join(number.to_string());
            match DirBuilder::new().mode(0o711).create(&dir) {
                // An earlier daemon left it and could not remove it.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => return made.at("make", &dir).map(|()| ImageStaging { dir }),
            }
        };
        let work = make()?;
        for dir in [work.inbox(), work.scratch()] {
            DirBuilder::new().mode(0o700).create(&dir).at("make", &dir)?;
            chown(&dir, Some(uid), Some(uid)).at("give away", &dir)?;
        }
        Ok(work)
    }

    /// Stores a received image under a name, after checking it against its manifest and `room`. The
    /// receiving process must have ended. Returns the image's digest. `expected`: the only
    /// permitted digest.
    pub fn store_image(
        &self,
        owner: &str,
        (name, stamp): (&str, Option<String>),
        work: &ImageStaging,
        expected: Option<&str>,
        room: ImageLimits,
    ) -> Result<String> {
        let layout = work.dir.join("layout");
        let fail = |text: String| failed(Path::new(name), sanitize(&text, TEXT_BYTES_MAX));
        let expected = expected.map(str::to_owned);
        let order = WorkOrder::Take {
            inbox: work.inbox(),
            layout: layout.clone(),
            wanted: expected.clone(),
            room,
        };
        let (digest, kept) = match self.workplace.run(owner, &order).map_err(fail)? {
            WorkResult::Taken(digest, kept) => (digest, kept),
            WorkResult::Nothing => {
                return Err(fail("pdp-work answered for another order".to_owned()));
            }
        };
        if !may_be_kept(&digest, expected.as_deref()) {
            return Err(fail("pdp-work answered with another image".to_owned()));
        }
        // First write the content to disk, then give it its name.
        let taken = File::open(&layout).at("open", &layout)?;
        rustix::fs::syncfs(&taken).at("write to disk", &layout)?;
        let _lock = self.lock_index();
        let mut index = self.index(owner)?;
        if index.images.len() >= KEPT_MAX && !index.images.contains_key(&digest) {
            return Err(fail(format!("more than {KEPT_MAX} images")));
        }
        let dir = self.store.join(owner);
        DirBuilder::new().recursive(true).mode(0o700).create(&dir).at("make", &dir)?;
        let place = self.layout(owner, &digest);
        let new = index.images.insert(digest.clone(), kept).is_none();
        index.name(name, StoredName { digest: digest.clone(), stamp })?;
        if new {
            safe_removal::remove(&place)?;
            fs::rename(&layout, &place).at("rename", &layout)?;
        }
        if let Err(error) = self.write(owner, &index) {
            // Report the first error.
            let _ = if new { safe_removal::remove(&place) } else { Ok(()) };
            return Err(error);
        }
        Ok(digest)
    }

    /// Gives a stored image a name. The name no longer refers to another image.
    pub fn name(&self, owner: &str, name: &str, digest: &str) -> Result<()> {
        let _lock = self.lock_index();
        let mut index = self.index(owner)?;
        let named = StoredName { digest: digest.to_owned(), stamp: None };
        if index.names.get(name) == Some(&named) {
            return Ok(());
        }
        index.name(name, named)?;
        self.write(owner, &index)
    }

    /// Removes an image with its names, if it exists. Dropping the result deletes the files, which
    /// may take a while.
    pub fn remove(&self, owner: &str, digest: &str) -> Result<Option<ImageStaging>> {
        let _lock = self.lock_index();
        let mut index = self.index(owner)?;
        if index.images.remove(digest).is_none() {
            return Ok(None);
        }
        index.names.retain(|_, named| named.digest != digest);
        let gone = self.begin(0)?;
        self.write(owner, &index)?;
        let layout = self.layout(owner, digest);
        match fs::rename(&layout, gone.dir.join("gone")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).at("rename", &layout);
            }
            _ => {}
        }
        if index.images.is_empty() {
            safe_removal::remove(&self.store.join(owner))?;
        }
        Ok(Some(gone))
    }

    fn layout(&self, owner: &str, digest: &str) -> PathBuf {
        layout_in(&self.store, owner, digest)
    }

    fn write(&self, owner: &str, index: &ImageStoreIndex) -> Result<()> {
        let path = self.store.join(owner).join(INDEX);
        let written = INDEX_FILE.write(&path, index);
        written.and_then(|()| File::open(self.store.join(owner))?.sync_all()).at("write", &path)
    }

    fn lock_index(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ImageStoreIndex {
    fn name(&mut self, name: &str, named: StoredName) -> Result<()> {
        if name.len() > NAME_BYTES_MAX {
            let text = format!("its name has {} bytes, {NAME_BYTES_MAX} at most", name.len());
            return Err(failed(Path::new(""), text));
        }
        if self.names.len() >= NAMES_MAX && !self.names.contains_key(name) {
            self.names.pop_first();
        }
        self.names.insert(name.to_owned(), named);
        Ok(())
    }
}

/// True if pdp-work may answer this digest for an order of the image `expected`, or of any image if
/// `None`. The digest names a directory of the store, and hostile bytes may have taken pdp-work
/// over.
fn may_be_kept(digest: &str, expected: Option<&str>) -> bool {
    sha256_hex(digest).is_some() && expected.is_none_or(|expected| expected == digest)
}

/// Returns the path of an owner's image layout, below the directory of unpacked images.
pub(crate) fn layout(images: &Path, owner: &str, digest: &str) -> PathBuf {
    layout_in(&images.join(STORE), owner, digest)
}

fn layout_in(store: &Path, owner: &str, digest: &str) -> PathBuf {
    store.join(owner).join(digest.trim_start_matches("sha256:"))
}

fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir).at("read", dir)?;
    let paths: io::Result<Vec<PathBuf>> = entries.map(|entry| Ok(entry?.path())).collect();
    paths.at("read", dir)
}

/// Makes a layout from an inbox that no process writes to any more.
pub(crate) fn make_layout(
    inbox: &Path,
    layout: &Path,
    expected: Option<&str>,
    room: ImageLimits,
) -> io::Result<(String, StoredImage)> {
    let blobs = layout.join("blobs/sha256");
    DirBuilder::new().recursive(true).mode(0o700).create(&blobs)?;
    let part = blobs.join(MANIFEST);
    move_file(&inbox.join(MANIFEST), &part)?;
    let bytes = read_bounded(&part)?;
    let digest = hex(&Sha256::digest(&bytes));
    fs::rename(&part, blobs.join(&digest))?;
    if let Some(expected) = expected.filter(|expected| *expected != format!("sha256:{digest}")) {
        return Err(invalid(format!(
            "its manifest has the digest sha256:{digest}, not {expected}"
        )));
    }
    let manifest: ImageManifest =
        parse(&bytes).map_err(|error| invalid(format!("manifest: {error}")))?;
    let all = manifest.layers().iter().chain([manifest.config()]);
    for descriptor in all {
        let (place, hex) = super::blob_path(layout, descriptor)?;
        if !place.exists() {
            move_file(&inbox.join(&hex), &place)
                .map_err(|error| invalid(format!("blob {}: {error}", descriptor.digest())))?;
        }
    }
    let index = json!({ "schemaVersion": 2, "manifests": [{
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "digest": format!("sha256:{digest}"),
        "size": bytes.len(),
    }] });
    fs::write(layout.join(INDEX), index.to_string())?;
    fs::write(layout.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
    let kept = measure(layout, &manifest, bytes.len() as u64, room)?;
    ImageDefaults::read(layout).map_err(reason)?;
    Ok((format!("sha256:{digest}"), kept))
}

/// Returns what is wrong with an image, without its path.
fn reason(error: Error) -> io::Error {
    match error {
        Error::Image { text, .. } => invalid(text),
        other => invalid(other.to_string()),
    }
}

/// Moves a regular file without other hard links, and makes it root's.
fn move_file(from: &Path, to: &Path) -> io::Result<()> {
    let meta = fs::symlink_metadata(from)?;
    if !meta.is_file() || meta.nlink() != 1 {
        return Err(invalid(format!("{} is not a regular file with one name", from.display())));
    }
    fs::rename(from, to)?;
    chown(to, Some(0), Some(0))?;
    fs::set_permissions(to, Permissions::from_mode(0o600))
}

/// Checks the digests of an image and adds up its sizes.
fn measure(
    layout: &Path,
    manifest: &ImageManifest,
    manifest_bytes: u64,
    room: ImageLimits,
) -> io::Result<StoredImage> {
    let layers = layers(layout, manifest).map_err(reason)?;
    let too_large =
        || invalid(format!("it has more than {} bytes, packed and unpacked", room.bytes));
    let config = blob(layout, manifest.config())?;
    let mut packed = manifest_bytes + config.len() as u64;
    let size = |layer: &Descriptor| -> io::Result<u64> {
        Ok(fs::metadata(super::blob_path(layout, layer)?.0)?.len())
    };
    for layer in layers {
        packed = packed.saturating_add(size(layer)?);
    }
    let mut left = room.bytes.checked_sub(packed).ok_or_else(too_large)?.min(UNPACKED_BYTES_MAX);
    let files_max = room.files.min(UNPACKED_FILES_MAX);
    let diff_ids = super::diff_ids(layout, manifest)?;
    let (mut unpacked, mut files) = (0, 0);
    let mut paths = ImagePaths::default();
    for (layer, diff_id) in layers.iter().zip(diff_ids) {
        let of = |error: io::Error| invalid(format!("layer {}: {error}", layer.digest()));
        let mut tar = layer_tar(layout, layer, diff_id).map_err(of)?;
        // Sizes are checked before the content is read. Headers come in addition.
        let bytes_max = left + HEADERS_BYTES_MAX;
        let mut archive = Archive::new((&mut tar).take(bytes_max));
        // Names of the entry in the headers before it.
        let mut names = Vec::new();
        for entry in archive.entries().map_err(of)?.raw(true) {
            let mut entry = entry.map_err(of)?;
            let extension = read_extension(&mut entry).map_err(of)?;
            let mut made = 0;
            if let Ok(path) = entry.path() {
                made += path.parent().map_or(0, |parent| paths.new_directories(parent, files_max));
                names.push(path.into_owned());
            }
            match extension {
                Some(Extension { directories, name }) => {
                    made += directories;
                    names.extend(name);
                }
                None => {
                    let kind = entry.header().entry_type();
                    let is_link = kind.is_symlink() || kind.is_hard_link();
                    made +=
                        names.drain(..).map(|name| paths.behind_links(&name, is_link)).sum::<u64>();
                }
            }
            let bytes = made.saturating_mul(disk_bytes(0)).saturating_add(disk_bytes(entry.size()));
            left = left.checked_sub(bytes).ok_or_else(too_large)?;
            unpacked += bytes;
            files += 1 + made;
            if files > files_max {
                return Err(invalid(format!("it has more than {files_max} files and directories")));
            }
        }
        tar.finish(bytes_max).map_err(of)?;
    }
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let at_ms = now.map_or(0, |now| now.as_millis() as u64);
    Ok(StoredImage { packed_bytes: packed, unpacked_bytes: unpacked, files, at_ms })
}

/// Paths of an image, as hashes. They tell which directories must be made because no entry has made
/// them.
#[derive(Default)]
struct ImagePaths {
    directories: HashSet<u64>,
    /// Links, and entries that may be links.
    links: HashSet<u64>,
    hashes: RandomState,
}

impl ImagePaths {
    /// Counts and notes the unknown directories in a path, at most `most` and one.
    fn new_directories(&mut self, directory: &Path, most: u64) -> u64 {
        let mut hasher = self.hashes.build_hasher();
        let mut new = 0;
        for component in directory.components() {
            component.hash(&mut hasher);
            new += u64::from(self.directories.insert(hasher.finish()));
            if new > most {
                break;
            }
        }
        new
    }

    /// Counts the directories in an entry's path that are behind a link. The link may lead to
    /// another directory each time, so they may be new each time. `is_link`: the entry itself is a
    /// link.
    fn behind_links(&mut self, name: &Path, is_link: bool) -> u64 {
        let mut hasher = self.hashes.build_hasher();
        let (mut is_behind, mut behind) = (false, 0);
        for component in name.components() {
            let Component::Normal(part) = component else { continue };
            behind += u64::from(is_behind);
            part.hash(&mut hasher);
            is_behind |= self.links.contains(&hasher.finish());
        }
        if is_link {
            self.links.insert(hasher.finish());
        }
        // The last component is the entry.
        behind.saturating_sub(1)
    }
}

/// Facts about an entry from the extension header before it.
struct Extension {
    /// Largest number of directories in its name.
    directories: u64,
    name: Option<PathBuf>,
}

/// Reads an extension header. Refuses headers that would be read otherwise, or completely into
/// memory, when the image is unpacked.
fn read_extension(entry: &mut tar::Entry<'_, impl Read>) -> io::Result<Option<Extension>> {
    let kind = entry.header().entry_type();
    if kind.is_gnu_sparse() {
        return Err(invalid("a file with holes (GNU sparse)".to_owned()));
    }
    let long = kind.is_gnu_longname() || kind.is_gnu_longlink();
    let pax = kind.is_pax_local_extensions() || kind.is_pax_global_extensions();
    if !long && !pax {
        return Ok(None);
    }
    if entry.size() > EXTENSION_BYTES_MAX {
        let bytes = entry.size();
        return Err(invalid(format!("a name or attributes of {bytes} bytes")));
    }
    let mut text = Vec::new();
    entry.read_to_end(&mut text)?;
    let sized = text.windows(6).any(|word| word == b" size=");
    if pax && sized {
        return Err(invalid("a file whose size is an attribute (more than 8 GiB)".to_owned()));
    }
    let path = |name: &[u8]| PathBuf::from(OsStr::from_bytes(name));
    let name = match pax {
        true => PaxExtensions::new(&text)
            .filter_map(|extension| extension.ok())
            .find(|extension| extension.key_bytes() == b"path")
            .map(|extension| path(extension.value_bytes())),
        false => Some(path(text.strip_suffix(b"\0").unwrap_or(&text))),
    };
    let directories = text.iter().filter(|byte| **byte == b'/').count() as u64;
    Ok(Some(Extension { directories, name }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_invalid_and_foreign_digests() {
        let [a, b] = ["a", "b"].map(|digit| format!("sha256:{}", digit.repeat(64)));
        assert!(may_be_kept(&a, None) && may_be_kept(&a, Some(&a)));
        assert!(!may_be_kept(&a, Some(&b)));
        let names = ["", "sha256:", "sha256:../../other", "../../other", &a[1..], &a[..70]];
        assert!(names.iter().all(|name| !may_be_kept(name, None)));
    }
}
