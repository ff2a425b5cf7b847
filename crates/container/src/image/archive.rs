//! Converts archives of `docker save` and `podman save` into the blobs and the manifest of an
//! image.
//!
//! The manifest is generated; it is the same for the same archive. Only files named by their digest
//! are written. Names in the archive are only looked up in the archive.
//!
//! Limits: [`ARCHIVE_ENTRIES_MAX`], and the caller's limit of bytes. Source:
//! github.com/moby/docker-image-spec, "Combined Image JSON + Filesystem Changeset Format".

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tar::Archive;

use super::packed::{self, Packing};
use super::{
    JSON_BYTES_MAX, MANIFEST, TEXT_BYTES_MAX, UNPACKED_BYTES_MAX, failed, hex, invalid, open_file,
};
use crate::error::Result;
use crate::status::sanitize;

/// Largest number of entries of an archive.
pub const ARCHIVE_ENTRIES_MAX: usize = 4096;

/// File in an archive that lists its images.
const IMAGES: &str = "manifest.json";

/// One image of an archive.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ArchiveImage {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

/// Writes an image's blobs into the directory `into`, each named by its digest in hexadecimal, and
/// its manifest as [`MANIFEST`]; at most `bytes_max` in all. `tag`: selects the image; `None` if
/// the archive has only one.
pub fn convert(archive: &Path, tag: Option<&str>, into: &Path, bytes_max: u64) -> Result<()> {
    convert_image(archive, tag, into, bytes_max)
        .map_err(|error| failed(archive, sanitize(&error.to_string(), TEXT_BYTES_MAX)))
}

fn convert_image(archive: &Path, tag: Option<&str>, into: &Path, bytes_max: u64) -> io::Result<()> {
    let mut links = BTreeMap::new();
    let mut images = None;
    visit(archive, |path, entry| {
        if let Some(target) = entry.link_name()? {
            let beside = path.parent().unwrap_or(Path::new(""));
            // The target of a hard link is relative to the top.
            let from =
                if entry.header().entry_type().is_symlink() { beside } else { Path::new("") };
            links.insert(path.to_owned(), normal(&from.join(target)));
        } else if path == Path::new(IMAGES) {
            let mut text = Vec::new();
            entry.take(JSON_BYTES_MAX + 1).read_to_end(&mut text)?;
            images = Some(text);
        }
        Ok(())
    })?;
    let text = images
        .ok_or_else(|| invalid(format!("it has no {IMAGES}, so `docker save` did not write it")))?;
    if text.len() as u64 > JSON_BYTES_MAX {
        return Err(invalid(format!("{IMAGES} has more than {JSON_BYTES_MAX} bytes")));
    }
    let images: Vec<ArchiveImage> =
        serde_json::from_slice(&text).map_err(|error| invalid(format!("{IMAGES}: {error}")))?;
    let image = choose(&images, tag)?;
    let place = |name: &String| {
        let path = normal(Path::new(name));
        links.get(&path).cloned().unwrap_or(path)
    };
    let config = place(&image.config);
    let layers: Vec<PathBuf> = image.layers.iter().map(place).collect();
    let needed: BTreeSet<&PathBuf> = layers.iter().chain([&config]).collect();
    let mut found: BTreeMap<PathBuf, (String, u64, Packing)> = BTreeMap::new();
    let mut left = bytes_max;
    visit(archive, |path, entry| {
        let plain = entry.header().entry_type().is_file();
        if plain && needed.contains(&path.to_owned()) && !found.contains_key(path) {
            found.insert(path.to_owned(), blob(entry, into, &mut left, bytes_max)?);
        }
        Ok(())
    })?;
    let describe = |path: &PathBuf, kind: &str| -> io::Result<Value> {
        let blob = found.get(path);
        let (digest, size, packed) = blob.ok_or_else(|| {
            invalid(format!("{IMAGES} names {}, which is not in it", path.display()))
        })?;
        let kind = format!("application/vnd.oci.image.{kind}{}", packed.suffix());
        Ok(json!({ "mediaType": kind, "digest": format!("sha256:{digest}"), "size": size }))
    };
    let layers: io::Result<Vec<Value>> =
        layers.iter().map(|layer| describe(layer, "layer.v1.tar")).collect();
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": describe(&config, "config.v1+json")?,
        "layers": layers?,
    });
    fs::write(into.join(MANIFEST), manifest.to_string())
}

/// Visits the files of an archive, which may be compressed as a whole.
fn visit(
    archive: &Path,
    mut with: impl FnMut(&Path, &mut tar::Entry<'_, Box<dyn Read>>) -> io::Result<()>,
) -> io::Result<()> {
    let file = open_file(archive)?;
    let bytes_max = UNPACKED_BYTES_MAX.max(file.metadata()?.len());
    let reader = packed::open(file)?.take(bytes_max);
    let mut tar = Archive::new(Box::new(reader) as Box<dyn Read>);
    // The needed names are short. Raw mode ignores extension headers with long names.
    for (index, entry) in tar.entries()?.raw(true).enumerate() {
        if index >= ARCHIVE_ENTRIES_MAX {
            return Err(invalid(format!("more than {ARCHIVE_ENTRIES_MAX} files in it")));
        }
        let mut entry = entry?;
        let path = normal(&entry.path()?);
        with(&path, &mut entry)?;
    }
    Ok(())
}

/// Returns a path from the top of the archive, without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => normal.push(name),
            Component::ParentDir => {
                normal.pop();
            }
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
    normal
}

/// Finds the image with a tag, completed as in docker, or the only image.
fn choose<'a>(images: &'a [ArchiveImage], tag: Option<&str>) -> io::Result<&'a ArchiveImage> {
    let tags = |image: &'a ArchiveImage| image.repo_tags.iter().flatten();
    let is = |name: &str, selected: &str| {
        name == selected || name.strip_suffix(":latest").is_some_and(|name| name == selected)
    };
    let found: Vec<&ArchiveImage> = images
        .iter()
        .filter(|image| tag.is_none_or(|selected| tags(image).any(|name| is(name, selected))))
        .collect();
    let [image] = found[..] else {
        let names: Vec<&str> = images.iter().flat_map(tags).map(String::as_str).collect();
        return Err(invalid(format!(
            "{} images with reference {}; it has {}",
            found.len(),
            tag.unwrap_or("(any)"),
            if names.is_empty() { "none with a tag".to_owned() } else { names.join(", ") },
        )));
    };
    Ok(image)
}

/// Writes one file of an archive, named by its digest. Returns digest, size and compression.
fn blob(
    entry: &mut impl Read,
    into: &Path,
    left: &mut u64,
    bytes_max: u64,
) -> io::Result<(String, u64, Packing)> {
    let part = into.join("part");
    let mut file = File::create(&part)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    let (mut size, mut packed) = (0, Packing::None);
    loop {
        let count = entry.read(&mut buffer)?;
        if count == 0 {
            break;
        }
        if size == 0 {
            packed = Packing::of(&buffer[..count]);
        }
        let bytes = count as u64;
        *left = left
            .checked_sub(bytes)
            .ok_or_else(|| invalid(format!("more than {bytes_max} bytes in it")))?;
        size += bytes;
        hash.update(&buffer[..count]);
        file.write_all(&buffer[..count])?;
    }
    let digest = hex(&hash.finalize());
    fs::rename(&part, into.join(&digest))?;
    Ok((digest, size, packed))
}
