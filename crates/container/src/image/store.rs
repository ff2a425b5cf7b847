//! Images that the daemon keeps, of registries and archives, by whose they are: each a whole OCI layout of one
//! image, checked when it comes.
//!
//! What brings an image may be lied to, and lie: it leaves files in a directory of its own ([`Work`]), and what the
//! manifest names of these, and no more, is moved, hashed and counted, before the image has a name. What the index names is on disk
//! as a whole. Owners share nothing, so that nobody is given what another pulled.
//!
//! ```text
//! store/OWNER/index.json     what there is, and by which names
//! store/OWNER/HEX/           the layout of the image with this digest
//! ```
//!
//! An owner's index that can't be read is that owner's fault: nothing of the owner's is touched before somebody
//! removes it ([`Store::forget`]), and all others have theirs.
//!
//! Limits: [`KEPT_MAX`] images of one owner, [`NAMES_MAX`] names of [`NAME_BYTES_MAX`]; an index is written with the
//! bound with which it is read. Bytes of images are the caller's to bound ([`Room`]).

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
    JSON_BYTES_MAX, MANIFEST, Own, TEXT_BYTES_MAX, UNPACKED_BYTES_MAX, UNPACKED_FILES_MAX, blob,
    disk_bytes, failed, hex, invalid, layer_tar, layers, parse, read_bounded, sha256_hex,
};
use crate::bounded::Bounded;
use crate::error::{Context, Error, Result};
use crate::status::tame;
use crate::tree;
use crate::work::{Done, Order, Workplace};

/// In the directory of unpacked images: those that are kept.
pub const STORE: &str = "store";

/// Images of one owner.
pub const KEPT_MAX: usize = 256;

/// Names of images of one owner.
const NAMES_MAX: usize = 1024;

/// Bytes of one name.
const NAME_BYTES_MAX: usize = 1536;

/// An index.
const INDEX_FILE: Bounded = Bounded { bytes_max: JSON_BYTES_MAX };

/// Bytes of a file's long name or its extended attributes.
const EXTENSION_BYTES_MAX: u64 = 64 << 10;

/// Bytes of a layer that are no file's: headers, and what fills up blocks.
const HEADERS_BYTES_MAX: u64 = 2 << 30;

const INDEX: &str = "index.json";

/// What an owner has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Index {
    /// Images by their manifests' digests.
    pub images: BTreeMap<String, Kept>,
    /// Digests by names.
    pub names: BTreeMap<String, Named>,
}

/// An image that is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// Its bytes as it came.
    pub packed_bytes: u64,
    /// Bytes of a disk that its files take.
    pub unpacked_bytes: u64,
    /// Number of files and directories; 0 if an earlier version stored the image.
    #[serde(default)]
    pub files: u64,
    /// When it came, milliseconds since 1970.
    pub at_ms: u64,
}

impl Kept {
    /// What it counts for in a quota.
    pub fn bytes(&self) -> u64 {
        self.packed_bytes + self.unpacked_bytes
    }
}

/// What a name stands for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Named {
    /// The image's digest.
    pub digest: String,
    /// How the file was that it was read from, if it was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stamp: Option<String>,
}

impl Index {
    /// What all of it counts for in a quota.
    pub fn bytes(&self) -> u64 {
        self.images.values().map(Kept::bytes).sum()
    }

    /// Files and directories of all of it, unpacked.
    pub fn files(&self) -> u64 {
        self.images.values().map(|kept| kept.files).sum()
    }
}

/// What an image may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Room {
    /// Bytes as it comes and unpacked, added up.
    pub bytes: u64,
    /// Files and directories, unpacked.
    pub files: u64,
}

/// The images that are kept.
#[derive(Debug)]
pub struct Store {
    store: PathBuf,
    works: PathBuf,
    /// Place where arriving images are hashed and counted.
    workplace: Workplace,
    next: AtomicU64,
    /// Held while an index is changed.
    changing: Mutex<()>,
}

/// Where an image comes to before it is kept; goes with all that is in it when dropped.
#[derive(Debug)]
pub struct Work {
    dir: PathBuf,
}

impl Work {
    /// The directory for what is brought: [`MANIFEST`] and blobs named by their digests in hexadecimal.
    pub fn inbox(&self) -> PathBuf {
        self.dir.join("in")
    }

    /// A directory for what is needed to bring it.
    pub fn scratch(&self) -> PathBuf {
        self.dir.join("scratch")
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // What stays goes at the next start.
        let _ = tree::remove(&self.dir);
    }
}

impl Store {
    /// The store beside unpacked images, and `works`, on the same file system, for what comes; what a crash left there
    /// goes.
    pub fn open(images: &Path, works: &Path, workplace: Workplace) -> Result<Self> {
        let store = images.join(STORE);
        // What stays is in nobody's way: each has a name of its own.
        let _ = tree::remove(works);
        // Passed by who brings images, read by nobody.
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
            // `index` reports a store that can't be read, to whoever asks for it.
            let _ = this.tidy(&owner);
        }
        Ok(this)
    }

    /// Removes what an owner's index does not name.
    fn tidy(&self, owner: &str) -> Result<()> {
        let index = self.index(owner)?;
        let mut first = Ok(());
        for path in entries(&self.store.join(owner))? {
            let digest = path.file_name().map(|name| format!("sha256:{}", name.display()));
            let known = digest.is_some_and(|digest| index.images.contains_key(&digest));
            if !known && !path.ends_with(INDEX) {
                first = first.and(tree::remove(&path));
            }
        }
        first
    }

    /// Who has images.
    pub fn owners(&self) -> Result<Vec<String>> {
        let names = entries(&self.store)?.into_iter();
        Ok(names.filter_map(|path| Some(path.file_name()?.to_str()?.to_owned())).collect())
    }

    /// What an owner has.
    pub fn index(&self, owner: &str) -> Result<Index> {
        let path = self.store.join(owner).join(INDEX);
        Ok(INDEX_FILE.read(&path).at("read", &path)?.unwrap_or_default())
    }

    /// Where an owner's images are.
    pub fn place(&self, owner: &str) -> PathBuf {
        self.store.join(owner)
    }

    /// Removes the whole store of an owner, damaged or not. Dropping the result deletes the files.
    pub fn forget(&self, owner: &str) -> Result<Work> {
        let _turn = self.turn();
        let (gone, place) = (self.begin(0)?, self.place(owner));
        match fs::rename(&place, gone.dir.join("gone")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).at("rename", &place)
            }
            _ => Ok(gone),
        }
    }

    /// Where images come to.
    pub fn works(&self) -> &Path {
        &self.works
    }

    /// Reads an archive into the inbox of an owner's work; see [`super::convert`].
    pub fn convert(
        &self,
        owner: &str,
        archive: &Path,
        tag: Option<&str>,
        work: &Work,
        bytes_max: u64,
    ) -> Result<()> {
        let (archive, tag) = (archive.to_owned(), tag.map(str::to_owned));
        let order = Order::Convert { archive: archive.clone(), tag, into: work.inbox(), bytes_max };
        self.workplace.run(owner, &order).map_err(|text| failed(&archive, text))?;
        Ok(())
    }

    /// Directories for an image to come to, which are `uid`'s.
    pub fn begin(&self, uid: u32) -> Result<Work> {
        let make = || loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let dir = self.works.join(number.to_string());
            match DirBuilder::new().mode(0o711).create(&dir) {
                // Of an earlier daemon, and could not be removed.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => return made.at("make", &dir).map(|()| Work { dir }),
            }
        };
        let work = make()?;
        for dir in [work.inbox(), work.scratch()] {
            DirBuilder::new().mode(0o700).create(&dir).at("make", &dir)?;
            chown(&dir, Some(uid), Some(uid)).at("give away", &dir)?;
        }
        Ok(work)
    }

    /// Keeps what came, by a name, once it was found to be what its manifest says, and within `room`. Whoever
    /// brought it must have ended. Returns its digest. `wanted`: the only digest that it may have.
    pub fn keep(
        &self,
        owner: &str,
        (name, stamp): (&str, Option<String>),
        work: &Work,
        wanted: Option<&str>,
        room: Room,
    ) -> Result<String> {
        let layout = work.dir.join("layout");
        let fail = |text: String| failed(Path::new(name), tame(&text, TEXT_BYTES_MAX));
        let wanted = wanted.map(str::to_owned);
        let order = Order::Take {
            inbox: work.inbox(),
            layout: layout.clone(),
            wanted: wanted.clone(),
            room,
        };
        let (digest, kept) = match self.workplace.run(owner, &order).map_err(fail)? {
            Done::Taken(digest, kept) => (digest, kept),
            Done::Nothing => return Err(fail("pdp-work answered for another order".to_owned())),
        };
        if !may_be_kept(&digest, wanted.as_deref()) {
            return Err(fail("pdp-work answered with another image".to_owned()));
        }
        // All that it has, before its name says so.
        let taken = File::open(&layout).at("open", &layout)?;
        rustix::fs::syncfs(&taken).at("write to disk", &layout)?;
        let _turn = self.turn();
        let mut index = self.index(owner)?;
        if index.images.len() >= KEPT_MAX && !index.images.contains_key(&digest) {
            return Err(fail(format!("{KEPT_MAX} images are kept already")));
        }
        let dir = self.store.join(owner);
        DirBuilder::new().recursive(true).mode(0o700).create(&dir).at("make", &dir)?;
        let place = self.layout(owner, &digest);
        let new = index.images.insert(digest.clone(), kept).is_none();
        index.name(name, Named { digest: digest.clone(), stamp })?;
        if new {
            tree::remove(&place)?;
            fs::rename(&layout, &place).at("rename", &layout)?;
        }
        if let Err(error) = self.write(owner, &index) {
            // What failed first is what the caller has to know.
            let _ = if new { tree::remove(&place) } else { Ok(()) };
            return Err(error);
        }
        Ok(digest)
    }

    /// Gives an image that is kept a name, which is no other's then.
    pub fn name(&self, owner: &str, name: &str, digest: &str) -> Result<()> {
        let _turn = self.turn();
        let mut index = self.index(owner)?;
        let named = Named { digest: digest.to_owned(), stamp: None };
        if index.names.get(name) == Some(&named) {
            return Ok(());
        }
        index.name(name, named)?;
        self.write(owner, &index)
    }

    /// Removes an image with its names, if there is one. Its bytes go when what is returned is dropped, which may take
    /// a while.
    pub fn remove(&self, owner: &str, digest: &str) -> Result<Option<Work>> {
        let _turn = self.turn();
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
            tree::remove(&self.store.join(owner))?;
        }
        Ok(Some(gone))
    }

    fn layout(&self, owner: &str, digest: &str) -> PathBuf {
        layout_in(&self.store, owner, digest)
    }

    fn write(&self, owner: &str, index: &Index) -> Result<()> {
        let path = self.store.join(owner).join(INDEX);
        let written = INDEX_FILE.write(&path, index);
        written.and_then(|()| File::open(self.store.join(owner))?.sync_all()).at("write", &path)
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Index {
    fn name(&mut self, name: &str, named: Named) -> Result<()> {
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

/// True if pdp-work may answer this digest for an order of the image `wanted`, or of any if there is none. The digest
/// names a directory of the store, and hostile bytes may have taken pdp-work over.
fn may_be_kept(digest: &str, wanted: Option<&str>) -> bool {
    sha256_hex(digest).is_some() && wanted.is_none_or(|wanted| wanted == digest)
}

/// Where the layout of an owner's image is, below the directory of unpacked images.
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

/// Makes a layout of what is in an inbox, which nobody writes to any more.
pub(crate) fn take(
    inbox: &Path,
    layout: &Path,
    wanted: Option<&str>,
    room: Room,
) -> io::Result<(String, Kept)> {
    let blobs = layout.join("blobs/sha256");
    DirBuilder::new().recursive(true).mode(0o700).create(&blobs)?;
    let part = blobs.join(MANIFEST);
    move_file(&inbox.join(MANIFEST), &part)?;
    let bytes = read_bounded(&part)?;
    let digest = hex(&Sha256::digest(&bytes));
    fs::rename(&part, blobs.join(&digest))?;
    if let Some(wanted) = wanted.filter(|wanted| *wanted != format!("sha256:{digest}")) {
        return Err(invalid(format!("its manifest has the digest sha256:{digest}, not {wanted}")));
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
    Own::read(layout).map_err(reason)?;
    Ok((format!("sha256:{digest}"), kept))
}

/// What is wrong with an image, without where it is.
fn reason(error: Error) -> io::Error {
    match error {
        Error::Image { text, .. } => invalid(text),
        other => invalid(other.to_string()),
    }
}

/// Moves what is a file and has no other name, and makes it root's.
fn move_file(from: &Path, to: &Path) -> io::Result<()> {
    let meta = fs::symlink_metadata(from)?;
    if !meta.is_file() || meta.nlink() != 1 {
        return Err(invalid(format!("{} is no file of its own", from.display())));
    }
    fs::rename(from, to)?;
    chown(to, Some(0), Some(0))?;
    fs::set_permissions(to, Permissions::from_mode(0o600))
}

/// Checks the digests of an image and adds up what it has.
fn measure(
    layout: &Path,
    manifest: &ImageManifest,
    manifest_bytes: u64,
    room: Room,
) -> io::Result<Kept> {
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
    let mut ways = Ways::default();
    for (layer, diff_id) in layers.iter().zip(diff_ids) {
        let of = |error: io::Error| invalid(format!("layer {}: {error}", layer.digest()));
        let mut tar = layer_tar(layout, layer, diff_id).map_err(of)?;
        // Sizes are looked at before what they are of; beside that there are headers.
        let bytes_max = left + HEADERS_BYTES_MAX;
        let mut archive = Archive::new((&mut tar).take(bytes_max));
        // What headers before an entry call it.
        let mut names = Vec::new();
        for entry in archive.entries().map_err(of)?.raw(true) {
            let mut entry = entry.map_err(of)?;
            let extension = read_extension(&mut entry).map_err(of)?;
            let mut made = 0;
            if let Ok(path) = entry.path() {
                made += path.parent().map_or(0, |parent| ways.new_directories(parent, files_max));
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
                        names.drain(..).map(|name| ways.behind_links(&name, is_link)).sum::<u64>();
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
    Ok(Kept { packed_bytes: packed, unpacked_bytes: unpacked, files, at_ms })
}

/// Paths of an image, as hashes: directories are made where an entry lacks them.
#[derive(Default)]
struct Ways {
    directories: HashSet<u64>,
    /// Links, and what may be one.
    links: HashSet<u64>,
    hashes: RandomState,
}

impl Ways {
    /// Counts directories on the way to this one that were not known, and knows them then; `most` and one at the most.
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

    /// Counts directories on the way to an entry that are behind a link. Where it leads may be another place each time,
    /// so that they may be new each time. `is_link`: the entry is a link itself.
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
    /// Directories that may be in its name.
    directories: u64,
    name: Option<PathBuf>,
}

/// Refuses what would be read otherwise, or whole into memory, when the image is unpacked.
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
    fn answers_that_are_no_digest_or_another_images_are_refused() {
        let [a, b] = ["a", "b"].map(|digit| format!("sha256:{}", digit.repeat(64)));
        assert!(may_be_kept(&a, None) && may_be_kept(&a, Some(&a)));
        assert!(!may_be_kept(&a, Some(&b)));
        let names = ["", "sha256:", "sha256:../../other", "../../other", &a[1..], &a[..70]];
        assert!(names.iter().all(|name| !may_be_kept(name, None)));
    }
}
