//! The mux alone: a generator, the mux, guests that send
//! every frame back by the other vport, and a sink.
//!
//! ```text
//! cargo run --release -p pdp-mux --example bounce-mux -- \
//!     [SECONDS [GUESTS [POLICY [MUX_CPU [GUEST_CPU [WAY]]]]]]
//! ```
//! Prints frames a second, the mux's cycles per frame by stage, and the lost and late frames.
//! Frames have 64 bytes. With WAY `tunnel` instead of `plain` they use VXLAN over IPv4. POLICY
//! is `round-robin`, `weighted`, `flow`, `flowlet` or `ordered`. All guests run on GUEST_CPU.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use pdp_guest::{Batch, ForwardingProgram, ProgramRuntime};
use pdp_memif::Listener;
use pdp_model::Stats;
use pdp_mux::control::{MuxServer, MuxSettings};
use pdp_proto::mux::*;
use pdp_wire::{outer, vxlan};

const FRAME_BYTES: usize = 64;
const FLOWS: u32 = 4096;
const NUMBER_AT: u16 = 42;
const LOCAL: [u8; 4] = [192, 0, 2, 1];
const REMOTE: [u8; 4] = [192, 0, 2, 2];
const VNI: u32 = 7;
const WARM_UP: Duration = Duration::from_millis(500);

/// Sends every frame out of the other of two vports.
struct Cross;

impl ForwardingProgram for Cross {
    fn process(&mut self, batch: &mut Batch<'_>) {
        for frame in 0..batch.len() {
            let vport = batch.vport(frame);
            batch.frame_mut(frame)[0] = 2;
            batch.forward(frame, 1 - vport);
        }
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default| arguments.get(at).map_or(Ok(default), |it| it.parse());
    let (seconds, guests) = (number(0, 3)? as u64, number(1, 1)?);
    let (mux_cpu, guest_cpu) = (number(3, 0)?, number(4, 1)?);
    let policy = match arguments.get(2).map_or("flow", String::as_str) {
        "round-robin" => GuestDistribution::RoundRobin,
        "weighted" => GuestDistribution::Weighted,
        "flow" => GuestDistribution::Flow,
        "flowlet" => GuestDistribution::Flowlet,
        "ordered" => GuestDistribution::Ordered,
        other => bail!("unknown policy {other}"),
    };
    let by = match arguments.get(5).map_or("plain", String::as_str) {
        "plain" => Encapsulation::Interface,
        "tunnel" => {
            let (local, remote) = (LOCAL.into(), REMOTE.into());
            Encapsulation::Vxlan(vxlan::VxlanTunnel { local, remote, port: 4789, vni: VNI })
        }
        other => bail!("unknown path {other}"),
    };
    let directory = tempfile::tempdir()?;
    let mux =
        MuxServer::start(&MuxSettings { workers: 1, cpus: vec![mux_cpu], pool_packets: 32768 })?;
    let headers = headers(&by)?;
    let number_at = NUMBER_AT + headers.len() as u16;
    put_generator(&mux, "source", frames(&headers), number_at)?;
    put_generator(&mux, "sink", vec![], number_at)?;
    let put = MuxRequest::PutVnet(Box::new(vnet(directory.path(), guests, policy, &by)));
    if let MuxReply::Lacks { sockets } = mux.handle(put.clone(), vec![]) {
        let listeners = sockets.iter().map(|path| Ok(Listener::bind(path)?.into()));
        let listeners = listeners.collect::<Result<_>>()?;
        done(mux.handle(MuxRequest::Listen { sockets }, listeners))?;
    }
    done(mux.handle(put, vec![]))?;
    let stop = Arc::new(AtomicBool::new(false));
    let mut threads = Vec::new();
    for guest in 0..guests {
        let (stop, path) = (stop.clone(), directory.path().join(format!("g{guest}.sock")));
        threads.push(thread::spawn(move || -> Result<()> {
            core_affinity::set_for_current(core_affinity::CoreId { id: guest_cpu });
            Ok(ProgramRuntime::new(&path, "bounce", Cross)?.run(&stop)?)
        }));
    }
    thread::sleep(WARM_UP);
    let (before, since) = (stats(&mux)?, Instant::now());
    thread::sleep(Duration::from_secs(seconds));
    let (after, time) = (stats(&mux)?, since.elapsed().as_secs_f64());
    stop.store(true, Ordering::Relaxed);
    for thread in threads {
        match thread.join() {
            Ok(result) => result?,
            Err(_) => bail!("a guest panicked"),
        }
    }
    let sent = |stats: &Stats| stats.externals["sink"].sent;
    let frames = (sent(&after) - sent(&before)) as f64;
    println!("{:.2} Mpps", frames / time / 1e6);
    let worker = after.workers[0].stages.iter().zip(&before.workers[0].stages);
    for (after, before) in worker {
        let cycles = (after.cycles - before.cycles) as f64 / frames;
        println!("  {:10} {cycles:7.1} cycles a frame", after.stage);
    }
    let rounds = after.workers[0].busy_rounds - before.workers[0].busy_rounds;
    println!(
        "  {:.1} frames a round, {} sleeps",
        frames / rounds as f64,
        after.workers[0].sleeps - before.workers[0].sleeps
    );
    println!("late: {}", after.externals["sink"].late);
    for (name, port) in &after.vnets["v"].nodes["r1"].ports {
        println!("{name}: received {}, sent {}, {:?}", port.received, port.sent, port.dropped);
    }
    Ok(())
}

/// Returns the headers that the other end of a tunnel puts before a frame.
fn headers(by: &Encapsulation) -> Result<Vec<u8>> {
    if *by == Encapsulation::Interface {
        return Ok(vec![]);
    }
    let template = outer::HeaderTemplate::new(&by.reversed()).context("one family")?;
    let mut frame = vec![0; template.len() + FRAME_BYTES];
    template.write(&mut frame, [2; 6], [4; 6]).context("room")?;
    frame.truncate(template.len());
    Ok(frame)
}

/// Returns frames of many flows behind these headers, in the generator's format.
fn frames(headers: &[u8]) -> Vec<u8> {
    (0..FLOWS)
        .flat_map(|flow| {
            let mut frame = [0; FRAME_BYTES];
            frame[12..16].copy_from_slice(&[8, 0, 0x45, 0]);
            frame[16..18].copy_from_slice(&(FRAME_BYTES as u16 - 14).to_be_bytes());
            frame[22..24].copy_from_slice(&[64, 17]);
            frame[26..30].copy_from_slice(&(0x0a00_0000 | flow).to_be_bytes());
            let bytes = (headers.len() + FRAME_BYTES) as u16;
            [&bytes.to_le_bytes()[..], headers, &frame].concat()
        })
        .collect()
}

fn put_generator(mux: &MuxServer, name: &str, frames: Vec<u8>, number_at: u16) -> Result<()> {
    let mut file: File = tempfile::tempfile()?;
    file.write_all(&frames)?;
    let generator = GeneratorConfig { pps: 0, frames: 0, number_at: Some(number_at) };
    let outlet = OutletConfig::Generator(generator);
    let external = ExternalConfig::new(name, 1500, outlet);
    done(mux.handle(MuxRequest::PutExternal(external), vec![OwnedFd::from(file)]))
}

fn vnet(
    directory: &Path,
    guests: usize,
    policy: GuestDistribution,
    by: &Encapsulation,
) -> VnetConfig {
    let port = |name: &str| PortConfig { name: name.into(), mac: [2; 6], mtu: 1500 };
    let none = Rate { bps: 0, pps: 0 };
    let guest = |number: usize| GuestConfig {
        number: number as u32,
        socket: directory.join(format!("g{number}.sock")),
        attach: AttachMode::Runtime,
        weight: 1000,
        leaving: false,
    };
    let vlink = |number: u16, interface: &str| Vlink {
        name: interface.into(),
        ends: vec![
            VlinkEnd::Port { node: "r1".into(), port: number },
            VlinkEnd::External {
                name: interface.into(),
                interface: interface.into(),
                by: by.clone(),
            },
        ],
        leaving: vec![],
        up: true,
        segment: None,
        schedule: None,
        queues: vec![],
    };
    VnetConfig {
        name: "v".into(),
        police: None,
        nodes: vec![NodeConfig {
            name: "r1".into(),
            ports: vec![port("eth0"), port("eth1")],
            tap_socket: directory.join("tap.sock"),
            router: Some(RouterConfig {
                guests: (0..guests).map(guest).collect(),
                policy,
                flow: FlowKey::Ip,
                punt_filters: vec![],
                punt_limits: [none; PUNT_CLASSES],
                engine: None,
            }),
        }],
        vlinks: vec![vlink(0, "source"), vlink(1, "sink")],
    }
}

fn done(reply: MuxReply) -> Result<()> {
    match reply {
        MuxReply::Done => Ok(()),
        other => bail!("{other:?}"),
    }
}

fn stats(mux: &MuxServer) -> Result<Stats> {
    match mux.handle(MuxRequest::Stats { vnet: None }, vec![]) {
        MuxReply::Stats(stats) => Ok(*stats),
        other => Err(anyhow::anyhow!("{other:?}")).context("stats"),
    }
}
