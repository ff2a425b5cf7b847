//! Routers on a card, and the same ones in pdp-ip.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use pdp_card::setup::{add_ve, enable_ve};
use pdp_card::table::VmacEntry;
use pdp_card::{CardModel, CardSizes, CardVerdict, HeaderModel, TableWrite, VeDriver, VmacTable};
use pdp_ip::{Decision, FRAMES_MAX, Fib, FrameList, IpForwarder, RouteTables};
use pdp_proto::routes::{GroupHop, ResolvedRoute, ToGuest, Vport};

use super::Random;
use super::traffic::{IPV4, NAMED, VPORTS, attachment, change, frame, one_in, snapshot};

/// A model whose tables can be written. Writes are in force when the function returns.
pub trait Tables {
    /// Writes by the super page.
    fn super_write(&mut self, ve: u8, writes: Vec<TableWrite>);
    /// Writes by the VE's page.
    fn ve_write(&mut self, ve: u8, writes: Vec<TableWrite>);
    /// Number of refused writes.
    fn refused(&self) -> u64;
}

impl Tables for HeaderModel {
    fn super_write(&mut self, ve: u8, writes: Vec<TableWrite>) {
        self.write_all(writes.iter().map(|write| write.word(ve)));
    }

    fn ve_write(&mut self, ve: u8, writes: Vec<TableWrite>) {
        self.super_write(ve, writes);
    }

    fn refused(&self) -> u64 {
        self.refused_count()
    }
}

impl Tables for CardModel {
    fn super_write(&mut self, ve: u8, writes: Vec<TableWrite>) {
        self.super_write_all(ve, writes);
    }

    fn ve_write(&mut self, ve: u8, writes: Vec<TableWrite>) {
        self.ve_write_all(ve, writes);
    }

    fn refused(&self) -> u64 {
        self.refused_count()
    }
}

/// Frame that enters, and the verdict that it must have.
pub struct Case {
    pub frame: Vec<u8>,
    pub port: u8,
    pub segment: u16,
    /// VE and vport that the card must find.
    pub owner: Option<(u8, u8)>,
    pub expected: Expected,
}

pub enum Expected {
    /// The card's own rule.
    Card(CardVerdict),
    /// pdp-ip's: VE, decision, and frame after it. `None` before pdp-ip has decided.
    Ip(u8, Option<Decision>, Vec<u8>),
    /// A frame to a group that the VE's vport does not take as others do.
    AnyPunt,
}

pub struct Ve {
    pub number: u8,
    pub driver: VeDriver,
    pub fib: Fib,
    pub forwarder: IpForwarder,
    pub vports: BTreeMap<u8, Vport>,
    pub routes: Vec<IpNet>,
    pub changes: Vec<ToGuest>,
}

/// The routers of a card.
pub struct World {
    pub sizes: CardSizes,
    pub random: Random,
    /// VEs with a mirror. The one behind them is disabled.
    pub routers: u8,
    /// Many stations on the links, so that pdp-ip limits how many the kernel resolves.
    pub scattered: bool,
    pub vmacs: VmacTable,
    pub ves: Vec<Ve>,
}

impl World {
    /// Makes a world with tables in force.
    pub fn new(sizes: CardSizes, seed: u64, scattered: bool, tables: &mut impl Tables) -> Self {
        let mut random = Random(seed);
        let vmacs = VmacTable::new(sizes.vmac_sets(), random.draw() >> 4);
        tables.super_write(0, vmacs.clear_writes());
        // All MAC addresses must fit.
        let routers = (sizes.ves - 1).min(110) as u8;
        let mut world = Self { sizes, random, routers, scattered, vmacs, ves: Vec::new() };
        for ve in 0..=routers {
            world.add_ve(ve, tables);
        }
        world
    }

    fn add_ve(&mut self, number: u8, tables: &mut impl Tables) {
        let (hops, lpm) = self.sizes.equal_parts(number);
        let driver = VeDriver::new(&hops, &lpm);
        let places = (0..16).filter_map(|vport| Some((vport, attachment(number, vport)?)));
        let places: Vec<_> = places.collect();
        let writes = add_ve(number, (hops, lpm), &places, &mut self.vmacs).unwrap();
        tables.super_write(number, writes);
        tables.ve_write(number, driver.clear_writes());
        let mut ve = Ve {
            number,
            driver,
            fib: Fib::default(),
            forwarder: IpForwarder::default(),
            vports: BTreeMap::new(),
            routes: Vec::new(),
            changes: Vec::new(),
        };
        if number < self.routers {
            let messages = snapshot(&mut self.random, number, self.scattered);
            messages.into_iter().for_each(|message| self.apply(&mut ve, message, tables));
            tables.super_write(number, vec![enable_ve()]);
        }
        self.ves.push(ve);
    }

    /// Applies a message of a VE's mirror to both, with no frame on the way.
    fn apply(&mut self, ve: &mut Ve, message: ToGuest, tables: &mut impl Tables) {
        match &message {
            ToGuest::Vport(vport) => {
                let index = vport.index as u8;
                let segment = attachment(ve.number, index).unwrap().segment;
                let mut writes = Vec::new();
                for mac in ve.vports.get(&index).map_or(&[][..], |old| &old.macs) {
                    self.vmacs.remove(ve.number, segment, *mac, &mut writes);
                }
                for &mac in &vport.macs {
                    let entry = VmacEntry { segment, mac, ve: ve.number, vport: index };
                    self.vmacs.insert(entry, &mut writes).unwrap();
                }
                tables.super_write(0, writes);
                ve.vports.insert(index, vport.clone());
            }
            ToGuest::Route { prefix, .. } if !ve.routes.contains(prefix) => {
                ve.routes.push(*prefix);
            }
            ToGuest::RouteGone(prefix) => ve.routes.retain(|route| route != prefix),
            _ => {}
        }
        ve.driver.apply(&message).unwrap();
        loop {
            let writes = ve.driver.take_writes();
            if writes.is_empty() {
                break;
            }
            tables.ve_write(ve.number, writes);
            ve.driver.retire();
        }
        assert_eq!(tables.refused(), 0, "refused: {message:?}");
        ve.fib.apply(message.clone());
        while RouteTables::is_sweeping(&ve.fib) {
            RouteTables::sweep_some(&mut ve.fib);
        }
        ve.changes.push(message);
    }

    /// Sends each router some changes, or a second snapshot.
    pub fn change(&mut self, tables: &mut impl Tables) {
        let mut ves = std::mem::take(&mut self.ves);
        for ve in &mut ves[..usize::from(self.routers)] {
            if one_in(&mut self.random, 24) {
                ve.routes.clear();
                let messages = snapshot(&mut self.random, ve.number, self.scattered);
                messages.into_iter().for_each(|message| self.apply(ve, message, tables));
            }
            for _ in 0..self.random.below(6) {
                // Enough routes to route, few enough to fit.
                let message = change(&mut self.random, ve.number, &ve.routes);
                let is_new = matches!(message, ToGuest::Route { .. });
                if !is_new || ve.routes.len() < 60 {
                    self.apply(ve, message, tables);
                }
            }
        }
        self.ves = ves;
    }

    /// Returns a frame, and its expected verdict as far as pdp-ip does not decide.
    pub fn case(&mut self) -> Case {
        let random = &mut self.random;
        let few = if one_in(random, 30) { VPORTS } else { NAMED };
        let (ve, vport) =
            (random.below(u64::from(self.routers) + 1), random.below(few.into()) as u8);
        // The disabled VE seldom.
        let ve = if ve as u8 == self.routers && !one_in(random, 8) { 0 } else { ve as u8 };
        let frame = frame(random, ve, vport, self.scattered);
        // A vport without a place has no segment: another one's.
        let place = attachment(ve, vport).or(attachment(ve, 0)).unwrap();
        let (mut port, segment) = (place.port, place.segment);
        if one_in(random, 60) {
            port = random.below(4) as u8;
        }
        let group = frame[0] & 1 != 0;
        let mac = frame.first_chunk().filter(|_| !group && frame.len() >= 14);
        let owner = mac.and_then(|mac| self.vmacs.get(segment, *mac));
        let owner = owner.map(|entry| (entry.ve, entry.vport));
        let expected = if frame.len() < 14 {
            Expected::Ip(0, None, frame.clone())
        } else if group {
            // The host hands it to each VE. pdp-ip's verdict is that of a vport like any other.
            let named = self.ves[0].vports.get(&vport).is_some_and(|vport| !vport.hooked.all);
            if named { Expected::Ip(0, None, frame.clone()) } else { Expected::AnyPunt }
        } else {
            match owner {
                None => Expected::Card(CardVerdict::DropNoVe),
                Some((ve, _)) if ve >= self.routers => Expected::Card(CardVerdict::DropNoVe),
                Some((ve, vport)) => {
                    let named = self.ves[usize::from(ve)].vports.contains_key(&vport);
                    let right = attachment(ve, vport).is_some_and(|place| place.port == port);
                    if named && !right {
                        Expected::Card(CardVerdict::DropNotForUs)
                    } else {
                        Expected::Ip(ve, None, frame.clone())
                    }
                }
            }
        };
        // A group frame and a runt have no owner; pdp-ip gets them on a vport of VE 0.
        Case { frame, port, segment, owner, expected }
    }

    /// Has pdp-ip decide on the frames of each VE.
    pub fn decide(&mut self, cases: &mut [Case]) {
        for ve in &mut self.ves {
            let mut mine: Vec<&mut Case> = cases
                .iter_mut()
                .filter(|case| matches!(case.expected, Expected::Ip(of, ..) if of == ve.number))
                .collect();
            for cases in mine.chunks_mut(FRAMES_MAX) {
                let mut list = FrameList::default();
                for case in cases.iter() {
                    let vport = case.owner.map_or(case.segment - 0x0ff, |owner| owner.1.into());
                    list.0.push((vport, case.frame.clone(), None));
                }
                ve.forwarder.process(&mut ve.fib, &mut list);
                for (case, (_, frame, decision)) in cases.iter_mut().zip(list.0) {
                    case.expected = Expected::Ip(ve.number, decision, frame);
                }
            }
        }
    }

    /// True if the destination's route has several hops, one of them by `vport` without gateway.
    pub fn is_gatewayless_choice(
        &self,
        ve: u8,
        vport: u16,
        kind: Option<u16>,
        packet: &[u8],
    ) -> bool {
        let address: IpAddr = match kind {
            Some(IPV4) => <[u8; 4]>::try_from(&packet[16..20]).unwrap().into(),
            _ => <[u8; 16]>::try_from(&packet[24..40]).unwrap().into(),
        };
        match self.ves[usize::from(ve)].fib.resolve(address) {
            Some(ResolvedRoute::Hops(hops)) => {
                let on_link = |hop: &GroupHop| hop.gateway.is_none() && hop.vport == vport;
                hops.len() > 1 && hops.iter().any(on_link)
            }
            _ => false,
        }
    }
}
