//! BPF programs, maps and links that are pinned in a BPF
//! file system, so that they outlive the daemon.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use libbpf_rs::{MapCore, MapHandle, Object, ObjectBuilder, OpenMapMut};

use crate::error::{Error, NetContext, Result};
use crate::xdp::{BPF_FS, is_bpf_fs, other};

/// Makes a directory for pins, unless it exists.
///
/// # Errors
/// It is not in a BPF file system.
pub(crate) fn make_dir(pins: &Path) -> Result<()> {
    libbpf_rs::set_print(None);
    fs::create_dir_all(pins).on("make", pins.display())?;
    if is_bpf_fs(pins) {
        return Ok(());
    }
    let text = format!("not in a BPF file system; mount -t bpf bpf {BPF_FS}");
    Err(Error::Invalid { object: pins.display().to_string(), text })
}

/// Loads the programs of an object; errors name them as `what`. `place`
/// prepares a map and returns the path of its pin, if it has one. The kernel
/// uses the map that is pinned there, or pins the new one.
///
/// If a pinned map has another shape than the object's (another version pinned it), this calls
/// `empty`, which removes such pins, and then makes new maps.
pub(crate) fn load(
    object: &[u8],
    what: &str,
    place: impl Fn(&mut OpenMapMut<'_>) -> libbpf_rs::Result<Option<PathBuf>>,
    empty: impl FnOnce() -> Result<()>,
) -> Result<Object> {
    let object = ObjectBuilder::default().open_memory(object);
    let mut object = object.map_err(other).on("open", what)?;
    let mut fits = true;
    for mut map in object.maps_mut() {
        let pin = place(&mut map).map_err(other).on("prepare the map", map.name().display())?;
        if let Some(pin) = pin {
            map.set_pin_path(&pin).map_err(other).on("pin", pin.display())?;
            fits &= !pin.exists()
                || MapHandle::from_pinned_path(&pin).is_ok_and(|pinned| {
                    (
                        pinned.map_type(),
                        pinned.key_size(),
                        pinned.value_size(),
                        pinned.max_entries(),
                    ) == (map.map_type(), map.key_size(), map.value_size(), map.max_entries())
                });
        }
    }
    if !fits {
        empty()?;
    }
    object.load().map_err(other).on("load", what)
}

/// Opens the map of this name that is pinned in `pins`.
pub(crate) fn map(pins: &Path, name: &str) -> Result<MapHandle> {
    let path = pins.join(name);
    MapHandle::from_pinned_path(&path).map_err(other).on("open the map", path.display())
}

/// Removes a file, if there is one.
pub(crate) fn remove_file(path: &Path) -> Result<()> {
    gone(fs::remove_file(path), path)
}

/// Removes an empty directory, if there is one.
pub(crate) fn remove_dir(path: &Path) -> Result<()> {
    gone(fs::remove_dir(path), path)
}

fn gone(removed: io::Result<()>, path: &Path) -> Result<()> {
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).on("remove", path.display())
        }
        _ => Ok(()),
    }
}
