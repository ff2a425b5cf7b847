//! Link addresses of neighbours, each in a place of its own that groups of next hops refer to.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::time::Duration;

use pdp_proto::limits::{ANSWERED_MAX, ASKED_MAX};

/// Gateways that are wanted at the same time; of more the mirror is told later.
const WANTED_MAX: usize = 64;

/// Time within which a station that is there answers: the kernel asks three times, a second apart
/// (ip-sysctl.rst, `mcast_solicit`), and can't let go of the entry meanwhile.
pub(crate) const ASKED_TIME: Duration = Duration::from_secs(3);

type Addresses = HashSet<(u16, IpAddr), foldhash::fast::RandomState>;

/// Neighbours that are looked at for one report of who is used.
const USED_LOOK: usize = 4096;

/// Where a neighbour is in [`Neighbours`].
pub(crate) type Index = u32;

#[derive(Clone, Debug)]
struct Neighbour {
    vport: u16,
    address: IpAddr,
    mac: Option<[u8; 6]>,
    /// A frame was sent to it since [`Neighbours::take_used`] was here.
    used: bool,
    /// It is in [`Neighbours::wanted`].
    wanted: bool,
    /// Hops of groups that refer to it.
    references: u32,
    /// Of the snapshot that named it last.
    generation: u32,
}

/// All neighbours: those that the kernel knows, and those that groups refer to.
#[derive(Debug, Default)]
pub(crate) struct Neighbours {
    /// Free places hold what was there, without a link address.
    places: Vec<Neighbour>,
    free: Vec<Index>,
    index: HashMap<(u16, IpAddr), Index, foldhash::fast::RandomState>,
    /// Where [`Neighbours::take_used`] goes on.
    used_from: usize,
    /// Gateways without a link address that frames were to be sent to.
    wanted: Vec<Index>,
    /// Stations that frames were handed to the kernel for, of this [`ASKED_TIME`] and of the one before.
    asked: [Addresses; 2],
    /// Of these, those that answered in this time.
    answered: usize,
}

impl Neighbours {
    /// The link address of the neighbour at a place, which counts as used.
    #[inline]
    pub(crate) fn mac_at(&mut self, index: Index) -> Option<[u8; 6]> {
        let neighbour = &mut self.places[index as usize];
        if neighbour.mac.is_some() && !neighbour.used {
            neighbour.used = true;
        }
        neighbour.mac
    }

    /// The same of a gateway, which is wanted if its link address is not known.
    #[inline]
    pub(crate) fn mac_of_gateway(&mut self, index: Index) -> Option<[u8; 6]> {
        let mac = self.mac_at(index);
        if mac.is_none() {
            self.want(index);
        }
        mac
    }

    #[cold]
    fn want(&mut self, index: Index) {
        let neighbour = &mut self.places[index as usize];
        if !neighbour.wanted && self.wanted.len() < WANTED_MAX {
            neighbour.wanted = true;
            self.wanted.push(index);
        }
    }

    pub(crate) fn is_wanting(&self) -> bool {
        !self.wanted.is_empty()
    }

    /// The gateways that were wanted since the last time.
    pub(crate) fn take_wanted(&mut self) -> Vec<(u16, IpAddr)> {
        let take = |index: Index| {
            let neighbour = &mut self.places[index as usize];
            // It may be gone, or known by now.
            let wanted = std::mem::take(&mut neighbour.wanted) && neighbour.mac.is_none();
            wanted.then_some((neighbour.vport, neighbour.address))
        };
        self.wanted.drain(..).filter_map(take).collect()
    }

    /// The same, found by its address.
    #[inline]
    pub(crate) fn mac_of(&mut self, vport: u16, address: IpAddr) -> Option<[u8; 6]> {
        let index = *self.index.get(&(vport, address))?;
        self.mac_at(index)
    }

    /// Whether the kernel may be given a frame for a station whose link address is not known: for one that
    /// it asks for already, or for one more.
    #[cold]
    pub(crate) fn may_ask(&mut self, vport: u16, address: IpAddr) -> bool {
        let [now, before] = &mut self.asked;
        let station = (vport, address);
        now.contains(&station)
            || before.contains(&station)
            || now.len() < ASKED_MAX && self.answered < ANSWERED_MAX && now.insert(station)
    }

    /// Another [`ASKED_TIME`] begins.
    pub(crate) fn turn_asked(&mut self) {
        self.asked.swap(0, 1);
        self.asked[0].clear();
        self.answered = 0;
    }

    /// What the kernel knows of a neighbour now.
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
        let index = self.place(vport, address);
        let neighbour = &mut self.places[index as usize];
        neighbour.mac = mac;
        neighbour.generation = generation;
        self.free_if_unused(index);
    }

    /// A place for a hop to refer to, until [`Neighbours::release`].
    pub(crate) fn refer(&mut self, vport: u16, address: IpAddr) -> Index {
        let index = self.place(vport, address);
        self.places[index as usize].references += 1;
        index
    }

    pub(crate) fn release(&mut self, index: Index) {
        self.places[index as usize].references -= 1;
        self.free_if_unused(index);
    }

    /// Forgets the link addresses that a snapshot did not name.
    pub(crate) fn sweep(&mut self, keep: u32) {
        for index in 0..self.places.len() {
            let neighbour = &mut self.places[index];
            if neighbour.mac.is_some() && neighbour.generation != keep {
                neighbour.mac = None;
                self.free_if_unused(index as Index);
            }
        }
    }

    /// Up to `count_max` neighbours that were used since the last time, and whether there may be
    /// more.
    pub(crate) fn take_used(&mut self, count_max: usize) -> (Vec<(u16, IpAddr)>, bool) {
        let mut used = Vec::new();
        let end = self.used_from + USED_LOOK;
        while let Some(neighbour) = self.places.get_mut(self.used_from) {
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

    /// Bytes, about.
    pub(crate) fn memory_bytes(&self) -> usize {
        let each = size_of::<((u16, IpAddr), Index)>() + 1;
        self.places.capacity() * size_of::<Neighbour>() + self.index.capacity() * each
    }

    /// Neighbours with a link address.
    pub(crate) fn known(&self) -> usize {
        self.places.iter().filter(|neighbour| neighbour.mac.is_some()).count()
    }

    fn place(&mut self, vport: u16, address: IpAddr) -> Index {
        *self.index.entry((vport, address)).or_insert_with(|| {
            let neighbour = Neighbour {
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
                    self.places[index as usize] = neighbour;
                    index
                }
                None => {
                    self.places.push(neighbour);
                    self.places.len() as Index - 1
                }
            }
        })
    }

    fn free_if_unused(&mut self, index: Index) {
        let neighbour = &mut self.places[index as usize];
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
    fn a_hop_sees_what_the_kernel_learns_later() {
        let mut neighbours = Neighbours::default();
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
    fn places_are_used_again_and_never_while_referred_to() {
        let mut neighbours = Neighbours::default();
        let hop = neighbours.refer(1, address(1));
        for last in 2..200 {
            neighbours.set(1, address(last), Some(MAC), 1);
            neighbours.set(1, address(last), None, 1);
            assert_ne!(neighbours.refer(2, address(last)), hop);
            let index = neighbours.place(2, address(last));
            neighbours.release(index);
        }
        assert_eq!(neighbours.places.len(), 2);
        neighbours.release(hop);
        assert!(neighbours.index.is_empty());
    }

    #[test]
    fn few_stations_are_asked_for_at_a_time_and_those_that_answer_make_room() {
        let mut neighbours = Neighbours::default();
        let station = |number: usize| IpAddr::from((number as u32).to_be_bytes());
        for number in 0..ASKED_MAX {
            assert!(neighbours.may_ask(1, station(number)));
        }
        assert!(!neighbours.may_ask(1, station(ASKED_MAX)) && neighbours.may_ask(1, station(0)));
        neighbours.set(1, station(7), Some(MAC), 1);
        assert!(neighbours.may_ask(1, station(ASKED_MAX)), "one has answered");
        assert!(!neighbours.may_ask(2, station(7)), "not that of another vport");
        // Nor do those that all answer go on without end.
        let asked = |neighbours: &mut Neighbours, number| {
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
    fn used_ones_are_told_once_and_in_pieces() {
        let mut neighbours = Neighbours::default();
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
    fn a_sweep_forgets_what_the_snapshot_did_not_name() {
        let mut neighbours = Neighbours::default();
        neighbours.set(1, address(1), Some(MAC), 1);
        neighbours.set(1, address(2), Some(MAC), 2);
        neighbours.sweep(2);
        assert_eq!(neighbours.mac_of(1, address(1)), None);
        assert_eq!(neighbours.mac_of(1, address(2)), Some(MAC));
        assert_eq!(neighbours.known(), 1);
    }
}
