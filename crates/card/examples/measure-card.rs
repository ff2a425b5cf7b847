//! Simulated cycles and frames of the card per second of CPU time:
//! `cargo run --release -p pdp-card --example measure-card`.

use std::time::Duration;

use pdp_card::setup::{add_ve, enable_ve, equal_queues};
use pdp_card::table::{AttachmentEntry, MacAddress};
use pdp_card::{CardModel, CardSizes, CardVerdict, VeDriver, VmacTable};
use pdp_proto::routes::{GroupHop, RouteDecision, ToGuest, Vport};

/// CPU time of the process.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

const ROUTER: MacAddress = [2, 0, 0, 0, 0, 1];

fn set_up(model: &mut CardModel, sizes: CardSizes) {
    equal_queues(&sizes, 2).unwrap().into_iter().for_each(|write| model.write(write));
    let mut vmacs = VmacTable::new(sizes.vmac_sets(), 7);
    model.super_write_all(0, vmacs.clear_writes());
    for ve in 0..sizes.ves as u8 {
        let parts = sizes.equal_parts(ve);
        let place = |vport: u8| {
            let segment = u16::from(ve) * 16 + u16::from(vport);
            (vport, AttachmentEntry { port: vport % 4, segment, mac: ROUTER })
        };
        let writes = add_ve(ve, parts, &[place(0), place(1)], &mut vmacs).unwrap();
        model.super_write_all(ve, writes);
        let mut driver = VeDriver::new(&parts.0, &parts.1);
        model.ve_write_all(ve, driver.clear_writes());
        let vport = |index| {
            ToGuest::Vport(Vport {
                index,
                mac: ROUTER,
                mtu: 1700,
                up: true,
                hooked: Default::default(),
                macs: Vec::new(),
                forwards_v4: true,
            })
        };
        let gateway = Some([10, 0, 1, 2].into());
        let messages = [
            vport(0),
            vport(1),
            ToGuest::Forwarding { v4: true, v6: true },
            ToGuest::Group { id: 1, hops: vec![GroupHop { vport: 1, gateway, weight: 1 }], mtu: 0 },
            ToGuest::Route {
                prefix: "10.2.0.0/16".parse().unwrap(),
                target: RouteDecision::Group(1),
            },
            ToGuest::Neighbour {
                vport: 1,
                address: [10, 0, 1, 2].into(),
                mac: Some([2, 0, 0, 0, 0, 9]),
            },
        ];
        messages.iter().for_each(|message| driver.apply(message).unwrap());
        let writes = driver.take_writes();
        model.ve_write_all(ve, writes);
        model.super_write_all(ve, [enable_ve()]);
    }
}

fn frame(bytes: usize) -> Vec<u8> {
    let mut frame = vec![0; bytes];
    frame[..6].copy_from_slice(&ROUTER);
    frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 8]);
    frame[12] = 8;
    let header = &mut frame[14..34];
    header[0] = 0x45;
    header[2..4].copy_from_slice(&((bytes - 14) as u16).to_be_bytes());
    (header[8], header[9]) = (64, 17);
    header[12..16].copy_from_slice(&[10, 1, 0, 1]);
    header[16..20].copy_from_slice(&[10, 2, 0, 1]);
    let sum: u32 = header.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    frame
}

fn main() {
    for (name, sizes) in [("8 VEs", CardSizes::CARD_8), ("32 VEs", CardSizes::CARD_32)] {
        let Some(mut model) = CardModel::new(sizes, 0) else { continue };
        set_up(&mut model, sizes);
        let start = cpu_time();
        (0..100_000).for_each(|_| model.step(u8::MAX));
        let idle = 100_000.0 / (cpu_time() - start).as_secs_f64();
        println!("{name}: idle {idle:.0} cycles/s");
        for bytes in [60, 1514] {
            let frame = frame(bytes);
            let (start, cycles, mut sent, mut out) = (cpu_time(), model.cycles(), 0u32, 0u32);
            let count = if bytes == 60 { 200_000 } else { 20_000 };
            while out < count {
                while sent < count && sent - out < 96 {
                    let ve = sent % sizes.ves;
                    model.send(0, &frame, (ve * 16) as u16);
                    sent += 1;
                }
                (0..64).for_each(|_| model.step(u8::MAX));
                let outputs = model.take_outputs();
                model.take_inputs();
                model.take_decisions();
                assert!(outputs.iter().all(|output| output.meta.verdict == CardVerdict::Out));
                out += outputs.len() as u32;
            }
            let seconds = (cpu_time() - start).as_secs_f64();
            let cycles = model.cycles() - cycles;
            println!(
                "{name}, {bytes} bytes: {:.0} frames/s, {:.0} cycles/s",
                f64::from(count) / seconds,
                cycles as f64 / seconds
            );
        }
    }
}
