//! The card: frames for its header pipeline, and register writes by one of its virtual routers.
//!
//! Without the card's models, the targets do nothing.

use std::cell::RefCell;

use pdp_card::header::{FRAME_BYTES_MAX, HOST_PORT};
use pdp_card::setup::{add_ve, clear_ve, enable_ve, equal_queues};
use pdp_card::table::AttachmentEntry;
use pdp_card::{
    CardModel, CardOutput, CardSizes, CardVerdict, HeaderIn, HeaderModel, RegisterWrite,
    TableWrite, VeDriver, VmacTable, registers,
};
use pdp_ip::{Decision, Fib, IpForwarder};
use pdp_wire::tag::GuestDrop;

use crate::guest::{fib, mirror_messages, router_frames, udp_frame};
use crate::input::FuzzInput;

/// Vports of the routes in [`mirror_messages`].
const VPORTS: u8 = 4;

/// The VE with these routes has the MAC addresses that the routes' vports have.
fn place(ve: u8, vport: u8) -> (u8, AttachmentEntry) {
    let segment = u16::from(ve) << 4 | u16::from(vport);
    (vport, AttachmentEntry { port: vport, segment, mac: [2, 0, 0, 0, 0, vport] })
}

/// Returns the writes of a VE by the super page, and by its own. The VE is not enabled.
fn ve_tables(
    sizes: &CardSizes,
    ve: u8,
    vmacs: &mut VmacTable,
) -> (Vec<TableWrite>, Vec<TableWrite>) {
    let parts = sizes.equal_parts(ve);
    let mut driver = VeDriver::new(&parts.0, &parts.1);
    let places: Vec<_> = (0..VPORTS).map(|vport| place(ve, vport)).collect();
    let by_super = add_ve(ve, parts, &places, vmacs).expect("room for MAC addresses");
    let mut own = driver.clear_writes();
    for message in mirror_messages() {
        driver.apply(&message).expect("a message that the card follows");
    }
    own.extend(driver.take_writes());
    (by_super, own)
}

struct HeaderBench {
    model: HeaderModel,
    fib: Fib,
    forwarder: IpForwarder,
}

impl HeaderBench {
    fn new() -> Option<Self> {
        let mut model = HeaderModel::new(1)?;
        let sizes = CardSizes::HEADER;
        let mut vmacs = VmacTable::new(sizes.vmac_sets(), 1);
        let mut writes = vmacs.clear_writes();
        let (by_super, own) = ve_tables(&sizes, 0, &mut vmacs);
        let (hops, lpm) = sizes.equal_parts(0);
        writes.extend(by_super.into_iter().chain(clear_ve(&hops, &lpm)).chain(own));
        writes.push(enable_ve());
        model.write_all(writes.iter().map(|write| write.word(0)));
        assert_eq!(model.refused_count(), 0);
        Some(Self { model, fib: fib(), forwarder: IpForwarder::default() })
    }
}

/// Frames have pdp-ip's verdict and bytes, but for the differences that crates/card states.
pub(crate) fn frames(bytes: &[u8]) {
    thread_local! {
        static BENCH: RefCell<Option<HeaderBench>> = RefCell::new(HeaderBench::new());
    }
    BENCH.with_borrow_mut(|bench| {
        let Some(HeaderBench { model, fib, forwarder }) = bench else { return };
        let mut list = router_frames(bytes);
        list.0.retain(|(_, frame, _)| (1..=FRAME_BYTES_MAX).contains(&frame.len()));
        list.0.iter_mut().for_each(|(vport, ..)| *vport %= u16::from(VPORTS));
        let before = list.clone();
        let record =
            |(vport, frame, _): &(u16, Vec<u8>, _)| HeaderIn::new(frame, *vport as u8, *vport, 0);
        let records: Vec<HeaderIn> = list.0.iter().map(record).collect();
        let results = model.process(&records);
        forwarder.process(fib, &mut list);
        for (((vport, frame, decision), (_, received, _)), result) in
            list.0.iter().zip(&before.0).zip(results)
        {
            let decision = decision.expect("decided");
            let known = received.len().min(result.bytes.len());
            let same = usize::from(result.length) == received.len()
                && result.bytes[..known] == received[..known];
            let group = received.len() >= 14 && received[0] & 1 != 0;
            let to_vport = received.starts_with(&[2, 0, 0, 0, 0, *vport as u8]);
            if received.len() >= 14 && !group && !to_vport {
                assert!(same && result.verdict == CardVerdict::DropNoVe, "{result:x?}");
                continue;
            }
            assert!(!result.fault && !result.excess, "{result:x?}");
            let is_v4 = received.get(12..14) == Some(&[8, 0]);
            let long = is_v4 && !group && received.get(14).is_some_and(|first| first & 15 > 12);
            let may_punt = long
                || decision == Decision::Drop(GuestDrop::Unresolved)
                // The group of ::/0 has a hop without gateway.
                || (!is_v4 && decision == Decision::Out(1));
            if may_punt && result.verdict.is_punt() {
                assert!(same, "{result:x?}");
                continue;
            }
            assert_eq!(CardVerdict::of(decision), Some(result.verdict), "{received:x?}");
            let known = frame.len().min(result.bytes.len());
            assert_eq!(usize::from(result.length), frame.len(), "{received:x?}");
            assert_eq!(result.bytes[..known], frame[..known], "{received:x?}");
            match decision {
                Decision::Out(egress) => assert_eq!(u16::from(result.port), egress),
                _ => assert_eq!(result.port, HOST_PORT),
            }
        }
    });
}

/// The VE that writes anything.
const HOSTILE: u8 = 1;

/// Most register writes of an input.
const WRITES_MAX: usize = 200;

struct CardBench {
    model: CardModel,
    /// Frames of the other VEs: line, bytes, segment.
    probes: Vec<(u8, Vec<u8>, u16)>,
    outputs: Vec<CardOutput>,
}

impl CardBench {
    fn new() -> Option<Self> {
        let sizes = CardSizes::CARD_8;
        let mut model = CardModel::new(sizes, 1)?;
        let queues = equal_queues(&sizes, 8).expect("enough cells");
        queues.into_iter().for_each(|write| model.write(write));
        let mut vmacs = VmacTable::new(sizes.vmac_sets(), 1);
        model.super_write_all(0, vmacs.clear_writes());
        for ve in 0..3 {
            let (by_super, own) = ve_tables(&sizes, ve, &mut vmacs);
            model.super_write_all(ve, by_super);
            model.ve_write_all(ve, own);
            model.super_write_all(ve, [enable_ve()]);
        }
        assert_eq!(model.refused_count(), 0);
        let to = ["0.0.0.1", "10.0.0.9", "10.0.0.1", "172.16.0.1", "192.168.0.1", "198.18.0.1"];
        let mut probes = Vec::new();
        for (at, to) in to.iter().enumerate() {
            for ve in [0, 2] {
                let (line, AttachmentEntry { segment, mac, .. }) = place(ve, at as u8 % 3);
                probes.push((line, udp_frame(mac, to.parse().expect("an address")), segment));
            }
        }
        let mut bench = Self { model, probes, outputs: Vec::new() };
        bench.outputs = bench.probe();
        Some(bench)
    }

    /// Sends the probes; returns what becomes of them.
    fn probe(&mut self) -> Vec<CardOutput> {
        for (line, frame, segment) in &self.probes {
            self.model.send(*line, frame, *segment);
        }
        (0..300).for_each(|_| self.model.step(u8::MAX));
        let mut outputs = self.model.take_outputs();
        outputs.retain(|output| output.meta.owned && output.meta.ve != HOSTILE);
        outputs.iter_mut().for_each(|output| output.cycle = 0);
        // The frames of several lines have no order among them.
        outputs.sort_by(|a, b| (a.line, a.meta.ve, &a.bytes).cmp(&(b.line, b.meta.ve, &b.bytes)));
        outputs
    }

    /// Registers that no VE's page may change.
    fn registers(&mut self) -> Vec<u64> {
        let mut values = Vec::new();
        for address in [registers::TARGET, registers::POOL, registers::CLEARING] {
            values.push(u64::from(self.model.read(address).expect("a register")));
        }
        for ve in [0, 2] {
            for counter in [registers::FAULTS, registers::EXCESS, registers::REFUSED] {
                let address = registers::ve_page(ve, counter);
                values.push(self.model.read_counter(address).expect("a counter"));
            }
        }
        values
    }
}

/// Any writes to the page of a VE, while frames of it pass. Frames and registers of other VEs stay
/// the same. The VE's tables keep the contents that earlier inputs wrote.
pub(crate) fn registers(bytes: &[u8]) {
    thread_local! {
        static BENCH: RefCell<Option<CardBench>> = RefCell::new(CardBench::new());
    }
    BENCH.with_borrow_mut(|bench| {
        let Some(bench) = bench else { return };
        let before = bench.registers();
        let mut input = FuzzInput(bytes);
        for _ in 0..WRITES_MAX {
            if input.is_empty() {
                break;
            }
            // Most go to the words of data and to the tables.
            let offset = match input.byte() {
                word @ ..6 => registers::WRITE_DATA_0 + 4 * u32::from(word),
                table @ 6..26 => registers::commit(u32::from(table) - 6),
                26 => {
                    let (_, AttachmentEntry { segment, .. }) = place(HOSTILE, 0);
                    let frame = input.counted();
                    if !frame.is_empty() {
                        bench.model.send(0, frame, segment);
                    }
                    continue;
                }
                _ => input.word().into(),
            };
            let address = registers::ve_page(HOSTILE, offset);
            bench.model.write(RegisterWrite { address, data: input.long() });
        }
        bench.model.finish_writes();
        let (_, AttachmentEntry { segment, mac, .. }) = place(HOSTILE, 1);
        for to in ["10.0.0.9", "192.168.0.1", "203.0.113.1"] {
            bench.model.send(1, &udp_frame(mac, to.parse().expect("an address")), segment);
        }
        let outputs = bench.probe();
        assert_eq!(outputs, bench.outputs, "frames of other VEs");
        assert_eq!(bench.registers(), before, "registers of other VEs");
    });
}
