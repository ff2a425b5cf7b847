//! Round trips at idle, through PdP and through the kernel's forwarding, in one run.
//!
//! A datagram goes from machine A through the forwarder to machine B, whose program sends it back
//! the same path. The times include both machines' IP stacks and wake-ups, the same for all.

use std::fs::File;
use std::iter;
use std::net::UdpSocket;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pdp_net::netns::within;

use super::{BenchExperiment, Subject};
use crate::peers::kernel;
use crate::peers::pdp::{Design, Pdp, site_interfaces};
use crate::run::{ExperimentRun, Reading};
use crate::site::Site;
use crate::statistics::quantile;

pub(super) const EXPERIMENT: BenchExperiment = BenchExperiment {
    name: "rtt",
    about: "round-trip time of a UDP echo at idle, through a guest and by the mux alone, against the kernel's \
            forwarding",
    seconds: 40,
    subject: Subject::Pdp,
    run,
};

/// Round trips of a sample, and the pause between them.
pub(super) const TRIPS: usize = 1000;
const PAUSE: Duration = Duration::from_millis(1);

/// Round trips before the measured ones.
const WARM_UP: usize = 50;

/// Longest wait for an answer.
pub(super) const ANSWER_MAX: Duration = Duration::from_secs(1);

/// Port where machine B answers (RFC 862).
pub(super) const ECHO_PORT: u16 = 7;

/// A series and the function that starts its forwarder at a site.
type EchoSetup<'a> = (&'static str, &'a dyn Fn(&mut Site) -> Result<()>);

fn run(run: &mut ExperimentRun) -> Result<()> {
    trips(run, ["median", "p99"])
}

/// The PdP paper's table 3.
pub(super) fn table(run: &mut ExperimentRun) -> Result<()> {
    trips(run, ["table 3: round trip, median", "table 3: round trip, p99"])
}

fn trips(run: &mut ExperimentRun, figures: [&'static str; 2]) -> Result<()> {
    let [mux, guest] = run.cores();
    let mut sites = Vec::new();
    let makers: [EchoSetup<'_>; 5] = [
        ("kernel", &|site| {
            kernel::start(site);
            Ok(())
        }),
        ("pdp, two cores", &|site| pdp(site, &Design::plain(mux, guest), "af-xdp")),
        ("pdp, busy polling", &|site| pdp(site, &Design::plain(mux, guest), "af-xdp-busy-poll")),
        ("pdp, one core", &|site| pdp(site, &Design::plain(mux, mux), "af-xdp")),
        ("pdp, fast path", &|site| pdp(site, &Design::fastpath(mux, 1), "af-xdp")),
    ];
    for (series, make) in makers {
        if !run.wants_series(series) {
            continue;
        }
        sites.extend(run.attempt(series, |_| {
            let mut site = Site::make("rtt");
            site.add_hosts();
            make(&mut site)?;
            Ok((series, EchoSocket::start(&site)?, site))
        }));
    }
    let trips = if run.quick() { TRIPS / 4 } else { TRIPS };
    run.rounds(|run| {
        for (series, echo, _) in &sites {
            run.take(series, 64.0, "bytes", || {
                let times = echo.trips(trips)?;
                let note = format!("{} round trips, {PAUSE:?} apart", times.len());
                let at = |figure, share| {
                    Reading::new(figure, quantile(&times, share), "µs").notes(&*note)
                };
                Ok(vec![at(figures[0], 0.5), at(figures[1], 0.99)])
            });
        }
        Ok(())
    })
}

pub(super) fn pdp(site: &mut Site, design: &Design, attach: &str) -> Result<()> {
    site.node.start_pdpd();
    Pdp::start(&site.node, design, &site_interfaces(attach)).map(|_| ())
}

/// Socket in machine A whose datagrams machine B sends back.
pub(super) struct EchoSocket {
    socket: UdpSocket,
    /// Number of the next datagram.
    number: AtomicU64,
}

impl EchoSocket {
    /// From the site's machine A to B.
    pub(super) fn start(site: &Site) -> Result<Self> {
        let socket = |netns: &str, address, port| {
            let path = format!("/run/netns/{netns}");
            let file = File::open(&path).context(path)?;
            socket(file.as_fd(), address, port)
        };
        let server = socket(&site.b.netns, "10.0.2.2", ECHO_PORT)?;
        Self::between(socket(&site.a.netns, "10.0.1.2", 0)?, server)
    }

    /// A thread answers at the server, on this thread's CPUs.
    pub(super) fn between(socket: UdpSocket, server: UdpSocket) -> Result<Self> {
        socket.connect(server.local_addr()?)?;
        socket.set_read_timeout(Some(ANSWER_MAX))?;
        thread::spawn(move || {
            let mut bytes = [0; 2048];
            // Fails once the machine is gone.
            while let Ok((count, from)) = server.recv_from(&mut bytes) {
                let _ = server.send_to(&bytes[..count], from);
            }
        });
        Ok(Self { socket, number: AtomicU64::new(0) })
    }

    /// Times of `count` round trips, microseconds, sorted.
    pub(super) fn trips(&self, count: usize) -> Result<Vec<f64>> {
        for _ in 0..WARM_UP {
            self.trip()?;
        }
        sorted((0..count).map(|_| self.trip()))
    }

    /// Times of as many round trips as fit in `time`, microseconds, sorted.
    pub(super) fn trips_for(&self, time: Duration) -> Result<Vec<f64>> {
        let start = Instant::now();
        sorted(iter::from_fn(|| (start.elapsed() < time).then(|| self.trip())))
    }

    /// One round trip, microseconds, and the pause after
    /// it. A missing answer counts as [`ANSWER_MAX`].
    fn trip(&self) -> Result<f64> {
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        // 22 bytes of data make a frame of 64.
        let (mut datagram, mut answer) = ([0; 22], [0; 64]);
        datagram[..8].copy_from_slice(&number.to_le_bytes());
        let start = Instant::now();
        self.socket.send(&datagram)?;
        // Skips late answers to earlier datagrams.
        while self.socket.recv(&mut answer).is_ok() && answer[..8] != datagram[..8] {}
        let took = start.elapsed().min(ANSWER_MAX);
        thread::sleep(PAUSE);
        Ok(took.as_secs_f64() * 1e6)
    }
}

/// Sorts the times. Fails if most were not answered.
fn sorted(times: impl Iterator<Item = Result<f64>>) -> Result<Vec<f64>> {
    let mut times: Vec<f64> = times.collect::<Result<_>>()?;
    times.sort_by(f64::total_cmp);
    ensure!(quantile(&times, 0.5) < ANSWER_MAX.as_secs_f64() * 1e6, "no answers");
    Ok(times)
}

/// Makes a socket in a network namespace.
pub(super) fn socket(netns: BorrowedFd<'_>, address: &str, port: u16) -> Result<UdpSocket> {
    Ok(within(netns, || Ok(UdpSocket::bind((address, port))))??)
}
