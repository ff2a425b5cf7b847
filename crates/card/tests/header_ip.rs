//! The header pipeline's verdicts and rewritten frames against pdp-ip's.
//!
//! Frames are random ones, scapy's, and those of the fuzz corpora, mutated. Each world is a card
//! with four VEs on the same segments. Three VEs have a driver and a pdp-ip that get the same
//! messages of a mirror, which include second snapshots; the fourth is disabled. Between batches of
//! frames the mirrors send random changes. `CARD_FRAMES` sets the number of frames, `CARD_SEED` the
//! first world.
//!
//! Differences that are intended, and no others:
//!
//! | frame | pdp-ip | card |
//! |---|---|---|
//! | IPv4 header above 48 bytes | its usual verdict | punt exception |
//! | unknown station on a link, if many are being resolved | drop unresolved | punt |
//! | by a hop without gateway among several | out | punt neighbour |
//! | to a group address, if the vport is hooked or not named | punt hook, local | as any vport |
//! | to a MAC address of no VE | drop not-for-us | drop no-ve |

mod common;

use std::collections::{BTreeMap, BTreeSet};

use common::traffic::{IPV4, attachment};
use common::world::{Case, Expected, World};
use pdp_card::header::{FRAME_BYTES_MAX, HEADER_BYTES, HOST_PORT};
use pdp_card::setup::{add_ve, clear_ve};
use pdp_card::{CardSizes, CardVerdict, HeaderIn, HeaderModel, HeaderOut, VmacTable};
use pdp_ip::Decision;
use pdp_wire::ipv4::Ipv4Packet;
use pdp_wire::tag::{GuestDrop, PuntClass};

/// Frames between two changes of the tables, and such batches of a world.
const BATCH: usize = 512;
const BATCHES: usize = 16;

/// Frames without `CARD_FRAMES`.
const FRAMES: u64 = 600_000;

#[derive(Default)]
struct Counts {
    verdicts: BTreeMap<CardVerdict, u64>,
    long_headers: u64,
    unresolved: u64,
    gatewayless: u64,
    groups: u64,
    groups_skipped: u64,
    lengths: BTreeSet<usize>,
}

struct Bench {
    seed: u64,
    model: HeaderModel,
    world: World,
}

impl Bench {
    fn new(seed: u64) -> Option<Self> {
        let mut model = HeaderModel::new(seed as u32)?;
        let scattered = seed.is_multiple_of(16);
        let world = World::new(CardSizes::HEADER, seed, scattered, &mut model);
        Some(Self { seed, model, world })
    }

    /// Passes a batch through both, and compares.
    fn batch(&mut self, counts: &mut Counts) {
        let mut cases: Vec<Case> = (0..BATCH).map(|_| self.world.case()).collect();
        self.world.decide(&mut cases);
        let record = |(token, case): (u16, &Case)| {
            HeaderIn::new(&case.frame, case.port, case.segment, token)
        };
        let records: Vec<HeaderIn> = (0..).zip(&cases).map(record).collect();
        let results = self.model.process(&records);
        for ((token, case), result) in (0..).zip(&cases).zip(&results) {
            assert_eq!(result.token, token);
            *counts.verdicts.entry(result.verdict).or_default() += 1;
            counts.lengths.insert(case.frame.len());
            if let Err(want) = self.compare(case, result, counts) {
                let Case { frame, owner, port, segment, .. } = case;
                let changes = owner.map(|(ve, _)| &self.world.ves[usize::from(ve)].changes);
                panic!(
                    "world {}, frame {frame:02x?}, port {port}, segment {segment}, owner \
                     {owner:?}:\ncard {result:02x?}\nbut want {want}\nmessages {changes:?}",
                    self.seed
                );
            }
        }
    }

    /// Returns the expectation if the card differs from it.
    fn compare(&self, case: &Case, result: &HeaderOut, counts: &mut Counts) -> Result<(), String> {
        if result.fault || result.excess {
            return Err("neither fault nor excess".into());
        }
        let is_group = case.frame.len() >= 14 && case.frame[0] & 1 != 0;
        counts.groups += u64::from(is_group);
        if result.group != is_group {
            return Err(format!("group {is_group}"));
        }
        let owner = result.owned.then_some(result.ve);
        if owner != case.owner.map(|(ve, _)| ve) {
            return Err(format!("owner {:?}", case.owner));
        }
        let (ve, decision, after) = match &case.expected {
            Expected::Card(verdict) => {
                let same = result.verdict == *verdict && unchanged(case, result);
                return same.then_some(()).ok_or(format!("{verdict:?}, unchanged"));
            }
            Expected::AnyPunt => {
                counts.groups_skipped += 1;
                let same = result.verdict.is_punt() && unchanged(case, result);
                return same.then_some(()).ok_or("a punt, unchanged".into());
            }
            Expected::Ip(ve, decision, after) => (ve, decision.unwrap(), after),
        };
        let kind = case.frame.get(12..14).map(|kind| u16::from_be_bytes([kind[0], kind[1]]));
        let packet = case.frame.get(14..).unwrap_or_default();
        // The card sees the first 64 bytes only: it can't check the checksum of a longer header.
        let header = Ipv4Packet::read(packet).filter(|_| kind == Some(IPV4) && !is_group);
        if header.is_some_and(|header| header.header_bytes > 48)
            && result.verdict == CardVerdict::PuntException
        {
            counts.long_headers += u64::from(decision != Decision::Punt(PuntClass::Exception));
            return unchanged(case, result).then_some(()).ok_or("unchanged".into());
        }
        // The host's software limits how many stations the kernel resolves, not the card.
        if decision == Decision::Drop(GuestDrop::Unresolved) {
            counts.unresolved += 1;
            let same = result.verdict.is_punt() && unchanged(case, result);
            return same.then_some(()).ok_or("a punt, unchanged".into());
        }
        // The card has no host routes for a hop without gateway among several: software forwards.
        if let Decision::Out(vport) = decision
            && result.verdict == CardVerdict::PuntNeighbour
            && self.world.is_gatewayless_choice(*ve, vport, kind, packet)
        {
            counts.gatewayless += 1;
            return unchanged(case, result).then_some(()).ok_or("unchanged".into());
        }
        let want = || format!("{decision:?} of VE {ve}, {after:02x?}");
        if CardVerdict::of(decision) != Some(result.verdict) {
            return Err(want());
        }
        let known = after.len().min(HEADER_BYTES);
        if usize::from(result.length) != after.len() || result.bytes[..known] != after[..known] {
            return Err(want());
        }
        let ingress = case.owner.map_or(0, |(_, vport)| vport);
        let (vport, port, segment) = match decision {
            Decision::Out(vport) => {
                let place = attachment(*ve, vport as u8).unwrap();
                (vport as u8, place.port, place.segment)
            }
            _ => (ingress, HOST_PORT, case.segment),
        };
        if (result.vport, result.port, result.segment) != (vport, port, segment) {
            return Err(format!("{}; vport {vport}, port {port}, segment {segment}", want()));
        }
        Ok(())
    }
}

/// True if the card left the frame as it was, and sends it to the host or nowhere.
fn unchanged(case: &Case, result: &HeaderOut) -> bool {
    let known = case.frame.len().min(HEADER_BYTES);
    usize::from(result.length) == case.frame.len()
        && result.bytes[..known] == case.frame[..known]
        && (result.port, result.segment) == (HOST_PORT, case.segment)
}

/// The card takes the clearing of a VE's whole part, and no write behind its end.
#[test]
fn whole_part_can_be_cleared() {
    let Some(mut model) = HeaderModel::new(1) else {
        println!("skipped: built without the card's models");
        return;
    };
    let (sizes, ve) = (CardSizes::HEADER, 2);
    let (hops, mut lpm) = sizes.equal_parts(ve);
    let mut vmacs = VmacTable::new(sizes.vmac_sets(), 1);
    let writes = add_ve(ve, (hops, lpm), &[], &mut vmacs).unwrap();
    model.write_all(writes.iter().map(|write| write.word(ve)));
    model.write_all(clear_ve(&hops, &lpm).map(|write| write.word(ve)));
    assert_eq!(model.refused_count(), 0);
    // One node of each level, and one leaf.
    (lpm.node_length, lpm.leaf_length) = (lpm.node_length + 1, lpm.leaf_length + 1);
    model.write_all(clear_ve(&hops, &lpm).map(|write| write.word(ve)));
    assert_eq!(model.refused_count(), 21);
}

#[test]
fn verdicts_and_frames_match_pdp_ip() {
    let number = |name| std::env::var(name).ok().map(|value| value.parse::<u64>().unwrap());
    let frames = number("CARD_FRAMES").unwrap_or(FRAMES);
    let first = number("CARD_SEED").unwrap_or(1);
    let worlds = frames.div_ceil((BATCH * BATCHES) as u64);
    let mut counts = Counts::default();
    for seed in first..first + worlds {
        let Some(mut bench) = Bench::new(seed) else {
            println!("skipped: built without the card's models");
            return;
        };
        for _ in 0..BATCHES {
            bench.batch(&mut counts);
            bench.world.change(&mut bench.model);
        }
    }
    let Counts { verdicts, long_headers, unresolved, gatewayless, .. } = counts;
    let Counts { groups, groups_skipped, lengths, .. } = counts;
    let all: u64 = verdicts.values().sum();
    println!(
        "{all} frames in {worlds} worlds: {verdicts:?}; {groups} to groups, {groups_skipped} of \
         these without comparison; differences: {long_headers} long headers, {unresolved} \
         unresolved stations, {gatewayless} hops without gateway; {} lengths",
        lengths.len()
    );
    // Neither the test's frames nor its exceptions hide anything.
    let from_ip = [
        CardVerdict::PuntLocal,
        CardVerdict::PuntNeighbour,
        CardVerdict::PuntException,
        CardVerdict::PuntHook,
        CardVerdict::PuntControl,
        CardVerdict::DropNotForUs,
        CardVerdict::DropMalformed,
        CardVerdict::DropPolicy,
        CardVerdict::DropBlackhole,
        CardVerdict::DropNoVe,
    ];
    if all > 100_000 {
        for verdict in from_ip {
            let count = verdicts.get(&verdict).copied().unwrap_or(0);
            assert!(count > all / 2000, "{count} of {all} frames: {verdict:?}");
        }
        assert!(verdicts[&CardVerdict::Out] > all / 12, "{verdicts:?}");
        assert!(long_headers + unresolved + gatewayless < all / 20);
        let edges = [1, 13, 14, 33, 34, 53, 54, 63, 64, 65, FRAME_BYTES_MAX];
        assert!(edges.iter().all(|edge| lengths.contains(edge)), "{lengths:?}");
    }
    if all >= 10_000_000 {
        assert_eq!(lengths.len(), FRAME_BYTES_MAX);
    }
}
