//! Bounds of what guests ask their kernel for where all network namespaces share what it takes: time under the lock of
//! all changes of interfaces and addresses (RTNL), interfaces, and entries of tables that no cgroup is charged for.
//!
//! Two programs at hooks of security modules (`bpf/pdp_limits.bpf.c`) see each netlink request and `ioctl` of a guest
//! before it takes the lock. They know a guest by its user id, and refuse what is beyond its owner's part. An owner is
//! a tenant, or a network of the operators'. Nobody's part depends on what others use: all of them together have
//! a quarter of the time, in equal parts.
//!
//! Programs and maps are pinned, so that the bounds hold while there is no process of PdP's. Needs a kernel with
//! CONFIG_BPF_LSM, CONFIG_DEBUG_INFO_BTF and `bpf` among its active security modules, of Linux 5.17 or newer.
//! Source: Linux security/security.c, net/netlink/af_netlink.c (`netlink_sendmsg`), net/core/rtnetlink.c.

use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use libbpf_rs::{MapCore, MapFlags, MapHandle, OpenMapMut};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::error::{Context, Error, Result};
use crate::netns::in_thread;
use crate::pins::{self, remove_dir, remove_file};
use crate::ports::now;
use crate::xdp::{other, program};

/// Interfaces that a namespace may have before its guest makes another one, those that PdP made included.
pub const LINKS_MAX: u32 = 320;

/// Entries of neighbour tables, bridges and connections that guests of an owner may add at once; one more each second.
pub const ENTRIES_BURST: u64 = 32_768;

/// User ids of a network: its first one is a multiple of it.
pub const USERS: u32 = 1 << 16;

/// Owners together have one of so many parts of all time, and one alone has [`OWN_PARTS`] at most.
const ALL_PARTS: u64 = 4;
const OWN_PARTS: u64 = 8;

const OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/pdp_limits.bpf.o"));

/// The maps.
const MAPS: [&str; 3] = ["ranges", "owners", "settings"];

/// The programs, which are what the pins of their links are called.
const PROGRAMS: [&str; 2] = ["pdp_netlink", "pdp_ioctl"];

/// `struct owner`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Owner {
    lock: u32,
    reserved: u32,
    busy_ns: u64,
    entries_ns: u64,
    at_ns: u64,
    refused: u64,
}

/// `struct settings`.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
struct Settings {
    parts: u64,
    links_max: u32,
    reserved: u32,
}

/// The bounds of a daemon. Dropping it leaves them in force; see [`destroy`].
#[derive(Debug)]
pub struct Limits {
    ranges: MapHandle,
    owners: MapHandle,
    settings: MapHandle,
    /// By the first user id.
    known: BTreeMap<u32, u64>,
}

impl Limits {
    /// Puts the bounds in force, with the owners that are known by what is pinned in `pins` (below a BPF file system, see
    /// [`crate::xdp::mount_bpf_fs`]).
    ///
    /// # Errors
    /// The kernel can't do it; the error says what it lacks.
    pub fn open(pins: &Path) -> Result<Self> {
        if let Some(text) = lacking()? {
            return Err(Error::Invalid { object: "bounds of what guests ask for".into(), text });
        }
        pins::make_dir(pins)?;
        let place = |map: &mut OpenMapMut<'_>| {
            Ok(MAPS.into_iter().find(|name| map.name() == *name).map(|name| pins.join(name)))
        };
        let empty = || destroy(pins).and_then(|()| pins::make_dir(pins));
        let object = pins::load(OBJECT, "the bounds of guests", place, empty)?;
        for name in PROGRAMS {
            let attach = || -> Result<()> {
                let mut link =
                    program(&object, name)?.attach_lsm().map_err(other).on("attach", name)?;
                // Such a link can't be given another program: for a moment both count.
                // No name there has a dot.
                let (new, pin) = (pins.join(format!("{name}_new")), pins.join(name));
                remove_file(&new)?;
                link.pin(&new).map_err(other).on("pin", new.display())?;
                remove_file(&pin)?;
                fs::rename(&new, &pin).on("pin", pin.display())
            };
            attach()?;
        }
        let this = Self {
            ranges: pins::map(pins, MAPS[0])?,
            owners: pins::map(pins, MAPS[1])?,
            settings: pins::map(pins, MAPS[2])?,
            known: BTreeMap::new(),
        };
        this.set_parts()?;
        Ok(this)
    }

    /// Has processes of the user ids from `first` on, [`USERS`] of them, count for an owner.
    ///
    /// # Errors
    /// `first` is no multiple of [`USERS`].
    pub fn put(&mut self, first: u32, owner: &str) -> Result<()> {
        if !first.is_multiple_of(USERS) {
            let text = format!("no multiple of {USERS}");
            return Err(Error::Invalid { object: format!("user id {first}"), text });
        }
        let mut hasher = DefaultHasher::new();
        owner.hash(&mut hasher);
        let owner = hasher.finish();
        if self.known.get(&first) == Some(&owner) {
            return Ok(());
        }
        self.forget_idle()?;
        match self.owners.update(owner.as_bytes(), Owner::default().as_bytes(), MapFlags::NO_EXIST)
        {
            Err(error) if error.kind() != libbpf_rs::ErrorKind::AlreadyExists => {
                return Err(other(error)).on("bound", "an owner");
            }
            _ => {}
        }
        self.ranges
            .update(range(first).as_bytes(), owner.as_bytes(), MapFlags::ANY)
            .map_err(other)
            .on("bound the users from", first)?;
        self.known.insert(first, owner);
        self.set_parts()
    }

    /// Forgets the user ids from `first` on; what they used still counts for their owner.
    pub fn forget(&mut self, first: u32) -> Result<()> {
        let Some(owner) = self.known.remove(&first) else { return Ok(()) };
        match self.ranges.delete(range(first).as_bytes()) {
            Err(error) if error.kind() != libbpf_rs::ErrorKind::NotFound => {
                return Err(other(error)).on("forget the users from", first);
            }
            _ => {}
        }
        if !self.known.values().any(|known| *known == owner) {
            // What its namespaces had in tables went with them.
            self.change(owner, |owner| owner.entries_ns = 0)?;
        }
        self.set_parts()
    }

    /// Gives each owner its part of all time.
    fn set_parts(&self) -> Result<()> {
        let mut owners: Vec<_> = self.known.values().collect();
        owners.sort_unstable();
        owners.dedup();
        let settings = Settings { parts: parts(owners.len()), links_max: LINKS_MAX, reserved: 0 };
        self.settings
            .update(&0u32.to_ne_bytes(), settings.as_bytes(), MapFlags::ANY)
            .map_err(other)
            .on("set", "what owners may use")
    }

    /// Forgets owners without a network once they have paid for what they used.
    fn forget_idle(&self) -> Result<()> {
        let parts = parts(self.known.len());
        for key in self.owners.keys() {
            let Ok(owner) = u64::read_from_bytes(&key) else { continue };
            let Some(is) = self.owner(owner)? else { continue };
            let passed = (now().as_nanos() as u64).saturating_sub(is.at_ns);
            if is.busy_ns <= passed / parts && !self.known.values().any(|known| *known == owner) {
                let _ = self.owners.delete(&key);
            }
        }
        Ok(())
    }

    fn owner(&self, owner: u64) -> Result<Option<Owner>> {
        let found = self.owners.lookup(owner.as_bytes(), MapFlags::LOCK).map_err(other);
        let found = found.on("read", "what an owner used")?;
        Ok(found.and_then(|bytes| Owner::read_from_bytes(&bytes).ok()))
    }

    fn change(&self, owner: u64, change: impl FnOnce(&mut Owner)) -> Result<()> {
        let Some(mut is) = self.owner(owner)? else { return Ok(()) };
        change(&mut is);
        self.owners
            .update(owner.as_bytes(), is.as_bytes(), MapFlags::LOCK)
            .map_err(other)
            .on("set", "what an owner used")
    }
}

/// Takes the bounds off and removes what is pinned. No change if there is nothing.
pub fn destroy(pins: &Path) -> Result<()> {
    let new = PROGRAMS.map(|name| format!("{name}_new"));
    let new = new.iter().map(String::as_str);
    for name in PROGRAMS.into_iter().chain(new).chain(MAPS) {
        remove_file(&pins.join(name))?;
    }
    remove_dir(pins)
}

/// Returns what this kernel lacks for the bounds, and what to do; `None`: nothing.
pub fn lacking() -> Result<Option<String>> {
    if !Path::new("/sys/kernel/btf/vmlinux").exists() {
        return Ok(Some("this kernel has no BTF; use one with CONFIG_DEBUG_INFO_BTF".into()));
    }
    let modules = in_thread(|| {
        let read = |place: &Path| fs::read_to_string(place.join("lsm"));
        let place = PathBuf::from("/sys/kernel/security");
        read(&place)
            .or_else(|_| {
                // Where nobody mounted it: for this thread alone.
                unshare(CloneFlags::CLONE_NEWNS)?;
                let none: Option<&str> = None;
                mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
                mount(Some("securityfs"), &place, Some("securityfs"), MsFlags::empty(), none)?;
                read(&place)
            })
            .on("read", "/sys/kernel/security/lsm")
    })?;
    let modules = modules.trim();
    Ok((!modules.split(',').any(|module| module == "bpf")).then(|| {
        format!(
            "bpf is not among the active security modules; boot with lsm={modules},bpf, of a kernel with \
             CONFIG_BPF_LSM"
        )
    }))
}

/// The parts of all time of which each of so many owners has one.
fn parts(owners: usize) -> u64 {
    (ALL_PARTS * owners as u64).max(OWN_PARTS)
}

/// The key of user ids in `ranges`.
fn range(first: u32) -> u32 {
    first / USERS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_together_have_a_quarter_of_the_time() {
        for owners in 1..10_000 {
            assert!(owners as f64 / parts(owners) as f64 <= 0.25, "{owners}");
            assert!(parts(owners) >= OWN_PARTS);
        }
    }

    #[test]
    fn layouts_match_the_programs() {
        assert_eq!((size_of::<Owner>(), size_of::<Settings>()), (40, 16));
    }
}
