//! The mux alone: frames from a generator through a link to others, which have the addresses that they are for.
//!
//! ```text
//! cargo run --release -p pdp-mux --example segment -- [SECONDS [ENDS [ADDRESSES [MUX_CPU]]]]
//! ```
//! Prints frames a second, and what was lost. With 2 ENDS the link is a transit, with more a segment. Frames have 64
//! bytes, and are for each of the addresses in an order drawn at random.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use pdp_mux::control::{Mux, Settings};
use pdp_proto::mux::*;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

const FRAME_BYTES: usize = 64;
const WARM_UP: Duration = Duration::from_millis(500);
const BROADCAST: [u8; 6] = [0xff; 6];

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default| arguments.get(at).map_or(Ok(default), |it| it.parse());
    let (seconds, ends) = (number(0, 3)? as u64, number(1, 16)?);
    let (addresses, cpu) = (number(2, 10_000)?, number(3, 0)?);
    if !(2..=64).contains(&ends) {
        bail!("{ends} ends, 2 to 64 are to be");
    }
    let mux = Mux::start(&Settings { workers: 1, cpus: vec![cpu], pool_packets: 32768 })?;
    let mut random = SmallRng::seed_from_u64(1);
    let mut stations: Vec<[u8; 6]> = (0..addresses)
        .map(|_| {
            let mut mac = [0; 6];
            random.fill(&mut mac[1..]);
            mac[0] = 2;
            mac
        })
        .collect();
    for end in 0..ends {
        put_generator(&mux, end, &[], 0)?;
    }
    let end = |end| End::External {
        name: format!("e{end}"),
        interface: format!("e{end}"),
        by: Encapsulation::Interface,
    };
    let segment = Segment { addresses: 16_384, flood_pps: 1000 };
    let vlink = Vlink {
        name: "link".into(),
        ends: (0..ends).map(end).collect(),
        leaving: vec![Leaving { queue_frames: 256, ..Leaving::default() }; ends],
        up: true,
        segment: (ends > 2).then_some(segment),
        schedule: None,
    };
    let (name, vlinks) = ("v".to_string(), vec![vlink]);
    let vnet = Vnet { name, police: None, nodes: vec![], vlinks };
    done(mux.handle(Request::PutVnet(Box::new(vnet)), vec![]))?;
    // Each of the others makes itself heard by a frame from each of its addresses, and is silent then.
    for end in 1..ends {
        let own: Vec<_> = stations.iter().skip(end - 1).step_by(ends - 1).collect();
        let frames: Vec<u8> = own.iter().flat_map(|mac| frame(&BROADCAST, mac)).collect();
        put_generator(&mux, end, &frames, own.len() as u64)?;
    }
    thread::sleep(WARM_UP);
    stations.shuffle(&mut random);
    let frames: Vec<u8> = stations.iter().flat_map(|mac| frame(mac, &[2, 0, 0, 0, 0, 1])).collect();
    put_generator(&mux, 0, &frames, 0)?;
    thread::sleep(WARM_UP);
    let (before, since) = (stats(&mux)?, Instant::now());
    thread::sleep(Duration::from_secs(seconds));
    let (after, time) = (stats(&mux)?, since.elapsed().as_secs_f64());
    let sent = |stats: &Stats| -> u64 {
        stats.externals.iter().filter(|(name, _)| *name != "e0").map(|(_, it)| it.sent).sum()
    };
    println!("{:.2} Mpps", (sent(&after) - sent(&before)) as f64 / time / 1e6);
    let worker = after.workers[0].stages.iter().zip(&before.workers[0].stages);
    for (after_, before_) in worker {
        let frames = (sent(&after) - sent(&before)) as f64;
        let cycles = (after_.cycles - before_.cycles) as f64 / frames;
        println!("  {:10} {cycles:7.1} cycles a frame", after_.stage);
    }
    let source = &after.vnets["v"].nodes[OUTSIDE].ports["e0"];
    println!("received {}, copied {}, {:?}", source.received, source.copied, source.dropped);
    if let Reply::Fdb { heard } =
        mux.handle(Request::Fdb { vnet: "v".into(), vlink: "link".into(), clear: false }, vec![])
    {
        println!("{} addresses known", heard.len());
    }
    Ok(())
}

/// In the generator's format.
fn frame(to: &[u8; 6], from: &[u8; 6]) -> Vec<u8> {
    let mut frame = vec![0; 2 + FRAME_BYTES];
    frame[..2].copy_from_slice(&(FRAME_BYTES as u16).to_le_bytes());
    frame[2..8].copy_from_slice(to);
    frame[8..14].copy_from_slice(from);
    frame[14..16].copy_from_slice(&[0x88, 0xb5]);
    frame
}

/// The external of an end: `count` of these frames, 0 without an end.
fn put_generator(mux: &Mux, end: usize, frames: &[u8], count: u64) -> Result<()> {
    let mut file: File = tempfile::tempfile()?;
    file.write_all(frames)?;
    let outlet = Outlet::Generator(Generator { pps: 0, frames: count, number_at: None });
    let external = External::new(format!("e{end}"), 1500, outlet);
    done(mux.handle(Request::PutExternal(external), vec![OwnedFd::from(file)]))
}

fn done(reply: Reply) -> Result<()> {
    match reply {
        Reply::Done => Ok(()),
        other => bail!("{other:?}"),
    }
}

fn stats(mux: &Mux) -> Result<Stats> {
    match mux.handle(Request::Stats { vnet: None }, vec![]) {
        Reply::Stats(stats) => Ok(*stats),
        other => Err(anyhow::anyhow!("{other:?}")).context("stats"),
    }
}
