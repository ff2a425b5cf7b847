//! Limits on guests' use of resources that all network namespaces share: time under the
//! kernel's lock for changes of interfaces and addresses (RTNL), interfaces, and
//! entries of tables that no cgroup is charged for.
//!
//! Two BPF programs at LSM hooks (`bpf/pdp_limits.bpf.c`) see each netlink request and `ioctl` of a
//! guest before it takes the lock. They identify a guest by its user id. They refuse requests
//! beyond its owner's part (`EAGAIN`), or beyond all that an owner can save up (`EMSGSIZE`). An
//! owner is a tenant, or a network of the operators'. Each owner's part is independent of the
//! others' use: all of them together have a quarter of the time, in equal parts.
//!
//! Programs and maps are pinned, so that the limits hold even without a process of
//! PdP. They need Linux 5.17 or newer with CONFIG_BPF_LSM, CONFIG_DEBUG_INFO_BTF
//! and `bpf` among its active security modules.
//! Source: Linux security/security.c, net/netlink/af_netlink.c
//! (`netlink_sendmsg`), net/core/rtnetlink.c.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use libbpf_rs::{MapCore, MapFlags, MapHandle, OpenMapMut};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::error::{Error, NetContext, Result};
use crate::netns::in_thread;
use crate::pins::{self, other, program, remove_dir, remove_file};
use crate::ports::now;

/// Interfaces that a namespace may have before its guest
/// makes another one, including those that PdP made.
pub const LINKS_MAX: u32 = 320;

/// Entries of neighbour tables, bridges and connections that guests of an owner may add at once.
/// The allowance refills by one entry per second.
pub const ENTRIES_BURST: u64 = 32_768;

/// User ids of a network; the first one is a multiple of this.
pub const USERS: u32 = 1 << 16;

/// All owners together get 1/`ALL_PARTS` of RTNL time, each of them at most 1/[`OWN_PARTS`].
const ALL_PARTS: u64 = 4;
const OWN_PARTS: u64 = 8;

const OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/pdp_limits.bpf.o"));

/// The maps.
const MAPS: [&str; 3] = ["ranges", "owners", "settings"];

/// Names of the programs, and of the pins of their links.
const PROGRAMS: [&str; 2] = ["pdp_netlink", "pdp_ioctl"];

/// `struct owner`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct OwnerUsage {
    lock: u32,
    reserved: u32,
    busy_ns: u64,
    entries_ns: u64,
    at_ns: u64,
}

/// `struct settings`.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
struct LimitSettings {
    parts: u64,
    links_max: u32,
    reserved: u32,
}

/// Owners of user ids, and each owner's count of id ranges.
#[derive(Debug, Default)]
struct KnownOwners {
    /// Owners by the first user id of a range.
    ranges: BTreeMap<u32, u64>,
    owners: BTreeMap<u64, usize>,
}

impl KnownOwners {
    fn insert(&mut self, first: u32, owner: u64) {
        self.remove(first);
        self.ranges.insert(first, owner);
        *self.owners.entry(owner).or_default() += 1;
    }

    /// Removes a range. Returns its owner, if it had one.
    fn remove(&mut self, first: u32) -> Option<u64> {
        let owner = self.ranges.remove(&first)?;
        if let Entry::Occupied(mut ranges) = self.owners.entry(owner) {
            *ranges.get_mut() -= 1;
            if *ranges.get() == 0 {
                ranges.remove();
            }
        }
        Some(owner)
    }

    fn has(&self, owner: u64) -> bool {
        self.owners.contains_key(&owner)
    }
}

/// Limits of a daemon. Dropping it leaves them in force; see [`destroy`].
#[derive(Debug)]
pub struct NetlinkLimits {
    ranges: MapHandle,
    owners: MapHandle,
    settings: MapHandle,
    known: KnownOwners,
}

impl NetlinkLimits {
    /// Puts the limits in force. Keeps the owners that are pinned in `pins` (below a BPF file
    /// system, see [`crate::xdp::mount_bpf_fs`]).
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
                // Such a link cannot switch to another program, so both count for
                // a moment. Names there contain no dot.
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
            known: KnownOwners::default(),
        };
        this.set_parts()?;
        Ok(this)
    }

    /// Assigns processes of the user ids from `first` on, [`USERS`] of them, to an owner.
    ///
    /// # Errors
    /// `first` is no multiple of [`USERS`].
    pub fn assign_owner(&mut self, first: u32, owner: &str) -> Result<()> {
        if !first.is_multiple_of(USERS) {
            let text = format!("not a multiple of {USERS}");
            return Err(Error::Invalid { object: format!("user id {first}"), text });
        }
        let mut hasher = DefaultHasher::new();
        owner.hash(&mut hasher);
        let owner = hasher.finish();
        if self.known.ranges.get(&first) == Some(&owner) {
            return Ok(());
        }
        if self.add_owner(owner).is_err() {
            // The map may be full of owners whose networks are gone.
            self.forget_idle()?;
            self.add_owner(owner).map_err(other).on("bound", "an owner")?;
        }
        self.ranges
            .update(range(first).as_bytes(), owner.as_bytes(), MapFlags::ANY)
            .map_err(other)
            .on("bound the users from", first)?;
        self.known.insert(first, owner);
        self.set_parts()
    }

    /// Forgets the user ids from `first` on. Their past use still counts for their owner.
    pub fn forget(&mut self, first: u32) -> Result<()> {
        let Some(owner) = self.known.remove(first) else { return Ok(()) };
        match self.ranges.delete(range(first).as_bytes()) {
            Err(error) if error.kind() != libbpf_rs::ErrorKind::NotFound => {
                return Err(other(error)).on("forget the users from", first);
            }
            _ => {}
        }
        if !self.known.has(owner) {
            // Their namespaces are gone, and their table entries with them.
            self.change(owner, |owner| owner.entries_ns = 0)?;
        }
        self.set_parts()
    }

    /// Gives each owner its part of all time.
    fn set_parts(&self) -> Result<()> {
        let parts = parts(self.known.owners.len());
        let settings = LimitSettings { parts, links_max: LINKS_MAX, reserved: 0 };
        self.settings
            .update(&0u32.to_ne_bytes(), settings.as_bytes(), MapFlags::ANY)
            .map_err(other)
            .on("set", "what owners may use")
    }

    /// Adds an owner without any use, unless the map has it.
    fn add_owner(&self, owner: u64) -> libbpf_rs::Result<()> {
        let new = OwnerUsage::default();
        match self.owners.update(owner.as_bytes(), new.as_bytes(), MapFlags::NO_EXIST) {
            Err(error) if error.kind() != libbpf_rs::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        }
    }

    /// Forgets owners without a network once their past use has been paid off. Reads the whole map.
    fn forget_idle(&self) -> Result<()> {
        let parts = parts(self.known.owners.len());
        for key in self.owners.keys() {
            let Ok(owner) = u64::read_from_bytes(&key) else { continue };
            if self.known.has(owner) {
                continue;
            }
            let Some(is) = self.owner(owner)? else { continue };
            let passed = (now().as_nanos() as u64).saturating_sub(is.at_ns);
            if is.busy_ns <= passed / parts {
                let _ = self.owners.delete(&key);
            }
        }
        Ok(())
    }

    fn owner(&self, owner: u64) -> Result<Option<OwnerUsage>> {
        let found = self.owners.lookup(owner.as_bytes(), MapFlags::LOCK).map_err(other);
        let found = found.on("read", "what an owner used")?;
        Ok(found.and_then(|bytes| OwnerUsage::read_from_bytes(&bytes).ok()))
    }

    fn change(&self, owner: u64, change: impl FnOnce(&mut OwnerUsage)) -> Result<()> {
        let Some(mut is) = self.owner(owner)? else { return Ok(()) };
        change(&mut is);
        self.owners
            .update(owner.as_bytes(), is.as_bytes(), MapFlags::LOCK)
            .map_err(other)
            .on("set", "what an owner used")
    }
}

/// Removes the limits and their pins. Does nothing if there are none.
pub fn destroy(pins: &Path) -> Result<()> {
    let new = PROGRAMS.map(|name| format!("{name}_new"));
    let new = new.iter().map(String::as_str);
    for name in PROGRAMS.into_iter().chain(new).chain(MAPS) {
        remove_file(&pins.join(name))?;
    }
    remove_dir(pins)
}

/// Returns what this kernel lacks for the limits, and what to do; `None` if it lacks nothing.
pub fn lacking() -> Result<Option<String>> {
    if !Path::new("/sys/kernel/btf/vmlinux").exists() {
        return Ok(Some("this kernel has no BTF; use one with CONFIG_DEBUG_INFO_BTF".into()));
    }
    let modules = in_thread(|| {
        let read = |place: &Path| fs::read_to_string(place.join("lsm"));
        let place = PathBuf::from("/sys/kernel/security");
        read(&place)
            .or_else(|_| {
                // Not mounted: mount it for this thread only.
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

/// Returns the divisor `parts`: each of `owners` owners gets 1/`parts` of RTNL time.
fn parts(owners: usize) -> u64 {
    (ALL_PARTS * owners as u64).max(OWN_PARTS)
}

/// Returns the key of a range of user ids in the map `ranges`.
fn range(first: u32) -> u32 {
    first / USERS
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::mem::offset_of;

    use libbpf_rs::btf::types::{MemberAttr, Struct};
    use libbpf_rs::btf::{Btf, HasSize};
    use libbpf_rs::{ObjectBuilder, OpenMap};

    use super::*;

    #[test]
    fn owners_together_get_a_quarter_of_time() {
        for owners in 1..10_000 {
            assert!(owners as f64 / parts(owners) as f64 <= 0.25, "{owners}");
            assert!(parts(owners) >= OWN_PARTS);
        }
    }

    #[test]
    fn known_counts_the_ranges_of_each_owner() {
        let mut known = KnownOwners::default();
        let mut reference = BTreeMap::new();
        for step in 0..2000u32 {
            // An order that does not repeat soon.
            let first = step.wrapping_mul(2_654_435_761) >> 28;
            if step % 3 == 0 {
                assert_eq!(known.remove(first), reference.remove(&first));
            } else {
                let owner = u64::from(step % 5);
                known.insert(first, owner);
                reference.insert(first, owner);
            }
            let mut owners = BTreeMap::new();
            for owner in reference.values() {
                *owners.entry(*owner).or_default() += 1;
            }
            assert_eq!((&known.ranges, &known.owners), (&reference, &owners));
            assert!((0..5).all(|owner| known.has(owner) == owners.contains_key(&owner)));
        }
    }

    /// Names of a type's fields, and their offsets in bytes.
    macro_rules! fields {
        ($type:ty: $($field:ident),*) => {
            vec![$((stringify!($field).to_owned(), offset_of!($type, $field))),*]
        };
    }

    /// Like [`fields!`], for a struct in the programs' type information; also returns its size.
    fn layout(name: &str) -> (Vec<(String, usize)>, usize) {
        let btf = Btf::from_raw("pdp_limits", OBJECT).expect("an object").expect("its types");
        let of: Struct<'_> = btf.type_by_name(name).expect("a struct");
        let fields = of.iter().map(|field| {
            let MemberAttr::Normal { offset } = field.attr else { panic!("a bit field") };
            let name = field.name.map(OsStr::to_string_lossy).unwrap_or_default();
            (name.into_owned(), offset as usize / 8)
        });
        (fields.collect(), of.size())
    }

    #[test]
    fn layouts_match_the_programs() {
        let owner = fields!(OwnerUsage: lock, reserved, busy_ns, entries_ns, at_ns);
        assert_eq!(layout("owner"), (owner, size_of::<OwnerUsage>()));
        let settings = fields!(LimitSettings: parts, links_max, reserved);
        assert_eq!(layout("settings"), (settings, size_of::<LimitSettings>()));

        let object = ObjectBuilder::default().open_memory(OBJECT).expect("an object");
        let sizes = |map: OpenMap<'_>| {
            let name = map.name().to_string_lossy().into_owned();
            (name, (map.key_size() as usize, map.value_size() as usize))
        };
        let sizes: BTreeMap<_, _> = object.maps().map(sizes).collect();
        let ours = [
            (size_of_val(&range(0)), size_of::<u64>()),
            (size_of::<u64>(), size_of::<OwnerUsage>()),
            (size_of::<u32>(), size_of::<LimitSettings>()),
        ];
        for (name, ours) in MAPS.into_iter().zip(ours) {
            assert_eq!(sizes.get(name), Some(&ours), "{name}");
        }
    }
}
