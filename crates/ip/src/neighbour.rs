//! MAC addresses of neighbours, each at an index that next hop groups refer to.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::time::Duration;

use pdp_proto::limits::{ANSWERED_MAX, ASKED_MAX};

/// Maximum number of gateways wanted at the same time; more are reported later.
const WANTED_MAX: usize = 64;

/// Time within which an existing station answers. The kernel asks three times, a
/// second apart (ip-sysctl.rst, `mcast_solicit`), and keeps the entry meanwhile.
pub(crate) const ASKED_TIME: Duration = Duration::from_secs(3);

type Addresses = HashSet<(u16, IpAddr), foldhash::fast::RandomState>;

/// Neighbours checked for one report of used ones.
const USED_LOOK: usize = 4096;

/// Index of a neighbour in [`NeighbourTable`].
pub(crate) type NeighbourIndex = u32;

#[derive(Clone, Debug)]
struct NeighbourEntry {
    vport: u16,
    address: IpAddr,
    mac: Option<[u8; 6]>,
    /// True if a frame was sent to it since the last [`NeighbourTable::take_used`].
    used: bool,
    /// True if it is in [`NeighbourTable::wanted`].
    wanted: bool,
    /// Number of hops of groups that refer to it.
    references: u32,
    /// Generation of the last snapshot that named it.
    generation: u32,
}

/// All neighbours: those that the kernel knows, and those that groups refer to.
#[derive(Debug, Default)]
pub(crate) struct NeighbourTable {
    /// Free places keep their old content, without a MAC address.
    slots: Vec<NeighbourEntry>,
    free: Vec<NeighbourIndex>,
    index: HashMap<(u16, IpAddr), NeighbourIndex, foldhash::fast::RandomState>,
    /// Position of [`NeighbourTable::take_used`].
    used_from: usize,
    /// Gateways with unknown MAC address that frames were destined to.
    wanted: Vec<NeighbourIndex>,
    /// Stations for which frames were punted, in this [`ASKED_TIME`] and in the previous one.
    asked: [Addresses; 2],
    /// Number of these stations that answered in this time.
    answered: usize,
}

impl NeighbourTable {
    /// Returns the MAC address of the neighbour at an index, and marks it as used.
    #[inline]
    pub(crate) fn mac_at(&mut self, index: NeighbourIndex) -> Option<[u8; 6]> {
        let neighbour = &mut self.slots[index as usize];
        if neighbour.mac.is_some() && !neighbour.used {
            neighbour.used = true;
        }
        neighbour.mac
    }

    /// Returns the MAC address of a gateway, and marks
    /// it as used; as wanted if the address is unknown.
    #[inline]
    pub(crate) fn mac_of_gateway(&mut self, index: NeighbourIndex) -> Option<[u8; 6]> {
        let mac = self.mac_at(index);
        if mac.is_none() {
            self.want(index);
        }
        mac
    }

    #[cold]
    fn want(&mut self, index: NeighbourIndex) {
        let neighbour = &mut self.slots[index as usize];
        if !neighbour.wanted && self.wanted.len() < WANTED_MAX {
            neighbour.wanted = true;
            self.wanted.push(index);
        }
    }

    pub(crate) fn has_wanted(&self) -> bool {
        !self.wanted.is_empty()
    }

    /// Returns the gateways wanted since the last call.
    pub(crate) fn take_wanted(&mut self) -> Vec<(u16, IpAddr)> {
        let take = |index: NeighbourIndex| {
            let neighbour = &mut self.slots[index as usize];
            // It may be gone, or known by now.
            let wanted = std::mem::take(&mut neighbour.wanted) && neighbour.mac.is_none();
            wanted.then_some((neighbour.vport, neighbour.address))
        };
        self.wanted.drain(..).filter_map(take).collect()
    }

    /// Returns the MAC address of a neighbour by its IP address, and marks it as used.
    #[inline]
    pub(crate) fn mac_of(&mut self, vport: u16, address: IpAddr) -> Option<[u8; 6]> {
        let index = *self.index.get(&(vport, address))?;
        self.mac_at(index)
    }

    /// True if the kernel may get a frame for a station with unknown
    /// MAC address: one that it resolves already, or one more.
    #[cold]
    pub(crate) fn may_ask(&mut self, vport: u16, address: IpAddr) -> bool {
        let [now, before] = &mut self.asked;
        let station = (vport, address);
        now.contains(&station)
            || before.contains(&station)
            || now.len() < ASKED_MAX && self.answered < ANSWERED_MAX && now.insert(station)
    }

    /// Begins another [`ASKED_TIME`].
    pub(crate) fn turn_asked(&mut self) {
        self.asked.swap(0, 1);
        self.asked[0].clear();
        self.answered = 0;
    }

    /// Sets the kernel's current state of a neighbour.
    pub(crate) fn set(
        &mut self,
        vport: u16,
        address: IpAddr,
        mac: Option<[u8; 6]>,
        generation: u32,
    ) {
        if mac.is_some() {
            let was_asked = |asked: &mut Addresses| asked.remove(&(vport, address));
            self.answered += usize::from(self.asked.iter_mut().any(was_asked));
        }
        if mac.is_none() && !self.index.contains_key(&(vport, address)) {
            return;
        }
        let index = self.slot(vport, address);
        let neighbour = &mut self.slots[index as usize];
        neighbour.mac = mac;
        neighbour.generation = generation;
        self.free_if_unused(index);
    }

    /// Returns an index for a hop to refer to, until [`NeighbourTable::release`].
    pub(crate) fn refer(&mut self, vport: u16, address: IpAddr) -> NeighbourIndex {
        let index = self.slot(vport, address);
        self.slots[index as usize].references += 1;
        index
    }

    pub(crate) fn release(&mut self, index: NeighbourIndex) {
        self.slots[index as usize].references -= 1;
        self.free_if_unused(index);
    }

    /// Removes MAC addresses that a snapshot did not name.
    pub(crate) fn sweep(&mut self, keep: u32) {
        for index in 0..self.slots.len() {
            let neighbour = &mut self.slots[index];
            if neighbour.mac.is_some() && neighbour.generation != keep {
                neighbour.mac = None;
                self.free_if_unused(index as NeighbourIndex);
            }
        }
    }

    /// Returns up to `count_max` neighbours used since
    /// the last call, and whether there may be more.
    pub(crate) fn take_used(&mut self, count_max: usize) -> (Vec<(u16, IpAddr)>, bool) {
        let mut used = Vec::new();
        let end = self.used_from + USED_LOOK;
        while let Some(neighbour) = self.slots.get_mut(self.used_from) {
            if used.len() == count_max || self.used_from == end {
                return (used, true);
            }
            if std::mem::take(&mut neighbour.used) {
                used.push((neighbour.vport, neighbour.address));
            }
            self.used_from += 1;
        }
        self.used_from = 0;
        (used, false)
    }

    /// Approximate bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        let each = size_of::<((u16, IpAddr), NeighbourIndex)>() + 1;
        self.slots.capacity() * size_of::<NeighbourEntry>() + self.index.capacity() * each
    }

    /// Number of neighbours with a MAC address.
    pub(crate) fn known(&self) -> usize {
        self.slots.iter().filter(|neighbour| neighbour.mac.is_some()).count()
    }

    fn slot(&mut self, vport: u16, address: IpAddr) -> NeighbourIndex {
        *self.index.entry((vport, address)).or_insert_with(|| {
            let neighbour = NeighbourEntry {
                vport,
                address,
                mac: None,
                used: false,
                wanted: false,
                references: 0,
                generation: 0,
            };
            match self.free.pop() {
                Some(index) => {
                    self.slots[index as usize] = neighbour;
                    index
                }
                None => {
                    self.slots.push(neighbour);
                    self.slots.len() as NeighbourIndex - 1
                }
            }
        })
    }

    fn free_if_unused(&mut self, index: NeighbourIndex) {
        let neighbour = &mut self.slots[index as usize];
        if neighbour.references == 0 && neighbour.mac.is_none() {
            (neighbour.used, neighbour.wanted) = (false, false);
            self.index.remove(&(neighbour.vport, neighbour.address));
            self.free.push(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    #[test]
    fn hop_sees_later_neighbour_updates() {
        let mut neighbours = NeighbourTable::default();
        let hop = neighbours.refer(1, address(1));
        assert_eq!(neighbours.mac_at(hop), None);
        neighbours.set(1, address(1), Some(MAC), 1);
        assert_eq!(neighbours.mac_at(hop), Some(MAC));
        assert_eq!(neighbours.mac_of(1, address(1)), Some(MAC));
        assert_eq!(neighbours.mac_of(2, address(1)), None, "another vport");
        neighbours.set(1, address(1), None, 1);
        assert_eq!(neighbours.mac_at(hop), None);
    }

    #[test]
    fn slots_are_reused_only_when_unreferenced() {
        let mut neighbours = NeighbourTable::default();
        let hop = neighbours.refer(1, address(1));
        for last in 2..200 {
            neighbours.set(1, address(last), Some(MAC), 1);
            neighbours.set(1, address(last), None, 1);
            assert_ne!(neighbours.refer(2, address(last)), hop);
            let index = neighbours.slot(2, address(last));
            neighbours.release(index);
        }
        assert_eq!(neighbours.slots.len(), 2);
        neighbours.release(hop);
        assert!(neighbours.index.is_empty());
    }

    #[test]
    fn pending_neighbour_requests_are_bounded() {
        let mut neighbours = NeighbourTable::default();
        let station = |number: usize| IpAddr::from((number as u32).to_be_bytes());
        for number in 0..ASKED_MAX {
            assert!(neighbours.may_ask(1, station(number)));
        }
        assert!(!neighbours.may_ask(1, station(ASKED_MAX)) && neighbours.may_ask(1, station(0)));
        neighbours.set(1, station(7), Some(MAC), 1);
        assert!(neighbours.may_ask(1, station(ASKED_MAX)), "one has answered");
        assert!(!neighbours.may_ask(2, station(7)), "not that of another vport");
        // Stations that all answer are limited, too.
        let asked = |neighbours: &mut NeighbourTable, number| {
            let asked = neighbours.may_ask(1, station(number));
            neighbours.set(1, station(number), Some(MAC), 1);
            asked
        };
        neighbours.turn_asked();
        let answer = (1000..9000).filter(|&number| asked(&mut neighbours, number)).count();
        assert_eq!(answer, ANSWERED_MAX);
        neighbours.turn_asked();
        assert!(neighbours.may_ask(1, station(ASKED_MAX + 1)) && neighbours.may_ask(1, station(0)));
        neighbours.turn_asked();
        neighbours.turn_asked();
        assert!(neighbours.asked.iter().all(|asked| asked.is_empty()));
    }

    #[test]
    fn used_neighbours_are_reported_once_in_batches() {
        let mut neighbours = NeighbourTable::default();
        for last in 0..5 {
            neighbours.set(1, address(last), Some(MAC), 1);
        }
        for last in [0, 2, 4] {
            neighbours.mac_of(1, address(last));
        }
        assert_eq!(neighbours.take_used(2), (vec![(1, address(0)), (1, address(2))], true));
        assert_eq!(neighbours.take_used(2), (vec![(1, address(4))], false));
        assert_eq!(neighbours.take_used(2), (vec![], false));
    }

    #[test]
    fn sweep_removes_neighbours_missing_in_snapshot() {
        let mut neighbours = NeighbourTable::default();
        neighbours.set(1, address(1), Some(MAC), 1);
        neighbours.set(1, address(2), Some(MAC), 2);
        neighbours.sweep(2);
        assert_eq!(neighbours.mac_of(1, address(1)), None);
        assert_eq!(neighbours.mac_of(1, address(2)), Some(MAC));
        assert_eq!(neighbours.known(), 1);
    }
}
