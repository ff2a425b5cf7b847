//! Files and directories of the machine that somebody wished to have in a guest.
//!
//! What is at such a path may be changed by anybody who may write there, also by guests, and at any moment. So a
//! path is opened once, when it is mounted, without following a link anywhere in it: what is mounted is what is at
//! that very path, and nothing that a link leads to. It is mounted without what is mounted below it, and so that no
//! program gets rights by it (`nosuid`) and no device can be used (`nodev`); read-only is locked, so that nobody in
//! the guest can undo it.
//!
//! Source: openat2(2), RESOLVE_NO_SYMLINKS; "locked" in mount_namespaces(7).

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{
    CWD, FileType, Mode, OFlags, ResolveFlags, StatVfsMountFlags, fstat, fstatvfs, openat2,
};
use serde::{Deserialize, Serialize};

use crate::error::{Context, Error, Result};
use crate::spec::{Bind, GuestSpec};

/// In a bundle: what is to be mounted for wishes.
const WISHES: &str = "wishes.json";

/// In a bundle: where it is mounted, by number.
const PLACES: &str = "wishes";

/// A wish, as the shim finds it in the bundle. Its number is its place in the list.
#[derive(Debug, Serialize, Deserialize)]
struct Wish {
    source: PathBuf,
    writable: bool,
    directory: bool,
}

/// What is opened for a wish.
pub(crate) struct Opened {
    pub file: OwnedFd,
    pub writable: bool,
    /// Where in the bundle it is to be mounted.
    pub place: PathBuf,
}

/// Opens what is at a path, without following links; whether it is a directory.
fn open(source: &Path) -> io::Result<(OwnedFd, bool)> {
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let file = openat2(CWD, source, flags, Mode::empty(), resolve)?;
    match FileType::from_raw_mode(fstat(&file)?.st_mode) {
        FileType::Directory => Ok((file, true)),
        FileType::RegularFile => Ok((file, false)),
        _ => Err(io::Error::other("neither a file nor a directory")),
    }
}

/// Whether what is at a path can be bound: why not, if it can't.
///
/// # Errors
/// What a person can do about it.
pub fn look(source: &Path) -> std::result::Result<(), String> {
    open(source).map(drop).map_err(|error| words(source, &error))
}

fn words(source: &Path, error: &io::Error) -> String {
    let source = source.display();
    match error.raw_os_error() {
        Some(libc::ELOOP) => {
            format!(
                "bind of {source}: there is a symbolic link in it; name the path that it leads to"
            )
        }
        _ => format!("bind of {source}: {error}"),
    }
}

/// Opens a wish of a guest; whether it is a directory.
fn open_for(id: &str, source: &Path) -> Result<(OwnedFd, bool)> {
    open(source).map_err(|error| Error::Spec { id: id.to_owned(), text: words(source, &error) })
}

/// Where in the guest's bundle the wish of this number is mounted.
pub(crate) fn place(bundle: &Path, number: usize) -> PathBuf {
    bundle.join(PLACES).join(number.to_string())
}

/// A guest's wishes.
pub(crate) fn of(spec: &GuestSpec) -> impl Iterator<Item = &Bind> {
    spec.binds.iter().filter(|bind| bind.wished)
}

/// What was found for a wish.
pub(crate) struct Found {
    pub directory: bool,
    /// No program can be run from there.
    pub noexec: bool,
}

/// Makes the places of a guest's wishes in its bundle, and writes down what goes there.
pub(crate) fn prepare(spec: &GuestSpec, bundle: &Path) -> Result<Vec<Found>> {
    let (mut wishes, mut all) = (Vec::new(), Vec::new());
    for bind in of(spec) {
        let (file, directory) = open_for(&spec.id, &bind.source)?;
        let flags = fstatvfs(&file).at("look at", &bind.source)?.f_flag;
        all.push(Found { directory, noexec: flags.contains(StatVfsMountFlags::NOEXEC) });
        wishes.push(Wish { source: bind.source.clone(), writable: bind.writable, directory });
    }
    if wishes.is_empty() {
        return Ok(all);
    }
    let places = bundle.join(PLACES);
    fs::create_dir(&places).at("make", &places)?;
    for (number, wish) in wishes.iter().enumerate() {
        let place = place(bundle, number);
        match wish.directory {
            true => fs::create_dir(&place).at("make", &place)?,
            false => fs::write(&place, "").at("make", &place)?,
        }
    }
    let path = bundle.join(WISHES);
    let text = serde_json::to_vec(&wishes).map_err(io::Error::from).at("write", &path)?;
    fs::write(&path, text).at("write", &path)?;
    Ok(all)
}

/// Opens what is at the paths of a bundle's wishes now.
pub(crate) fn opened(id: &str, bundle: &Path) -> Result<Vec<Opened>> {
    let path = bundle.join(WISHES);
    let wishes: Vec<Wish> = match fs::read(&path) {
        Ok(text) => serde_json::from_slice(&text).map_err(io::Error::from).at("read", &path)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).at("read", &path),
    };
    let mut all = Vec::new();
    for (number, wish) in wishes.into_iter().enumerate() {
        let (file, directory) = open_for(id, &wish.source)?;
        if directory != wish.directory {
            let text = format!("bind of {}: it became another meanwhile", wish.source.display());
            return Err(Error::Spec { id: id.to_owned(), text });
        }
        all.push(Opened { file, writable: wish.writable, place: place(bundle, number) });
    }
    Ok(all)
}
