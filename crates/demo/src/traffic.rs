//! A generator and a sink of numbered UDP datagrams, and the evaluation of arrivals.
//!
//! Both run as separate processes inside an external machine's network namespace: this program with
//! the hidden verbs `generate` and `sink`. Datagram number `seq` goes to target `seq % targets`, so
//! each target receives ascending numbers.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use ipnet::IpNet;

use crate::outside::ExternalMachine;
use crate::paths;
use crate::table::{PEERS, Peers};

/// UDP port of all datagrams.
pub const PORT: u16 = 9000;

/// Bytes of a datagram: run, number, time, and padding.
const DATAGRAM_BYTES: usize = 64;

/// First bytes of a datagram.
const MAGIC: u32 = 0x5064_5031;

/// Interval at which the generator catches up with its rate.
const TICK: Duration = Duration::from_millis(1);

/// Time that a sink keeps reading after its end was requested. Datagrams in flight arrive within
/// it, even on a busy machine.
const DRAIN: Duration = Duration::from_secs(2);

/// Longest wait of a sink for a datagram before it checks for its end.
const READ_WAIT: Duration = Duration::from_millis(100);

/// Bytes of a sink's receive buffer.
const SINK_BUFFER_BYTES: usize = 32 << 20;

/// Datagram received by a sink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Number.
    pub seq: u64,
    /// Time from sending to receiving, nanoseconds.
    pub delay_ns: u64,
}

const ARRIVAL_BYTES: usize = 16;

/// Sends `rounds` datagrams to each address of the file `targets`, `pps` per second in total. With
/// 0 rounds, until standard input ends. Returns the number that the kernel accepted.
pub fn generate(targets: &Path, run: u32, rounds: u64, pps: u64) -> Result<u64> {
    let file = File::open(targets).with_context(|| format!("{}", targets.display()))?;
    let mut addresses = Vec::new();
    for line in BufReader::new(file).lines() {
        addresses.push(SocketAddr::new(line?.parse::<IpAddr>()?, PORT));
    }
    let v4 = UdpSocket::bind(("0.0.0.0", 0))?;
    let v6 = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0))?;
    let ended = input_ended();
    let total = if rounds == 0 { u64::MAX } else { rounds * addresses.len() as u64 };
    let start = Instant::now();
    let (mut seq, mut sent) = (0, 0);
    let mut datagram = [0; DATAGRAM_BYTES];
    datagram[..4].copy_from_slice(&MAGIC.to_be_bytes());
    datagram[4..8].copy_from_slice(&run.to_be_bytes());
    while seq < total && !(rounds == 0 && ended.load(Ordering::Relaxed)) {
        let due = (start.elapsed().as_secs_f64() * pps as f64) as u64;
        while seq < total.min(due) {
            let address = addresses[(seq % addresses.len() as u64) as usize];
            datagram[8..16].copy_from_slice(&seq.to_be_bytes());
            datagram[16..24].copy_from_slice(&now_ns().to_be_bytes());
            let socket = if address.is_ipv4() { &v4 } else { &v6 };
            // Not sent: the machine's own queue is full (ENOBUFS), or an ICMP error is pending.
            sent += u64::from(socket.send_to(&datagram, address).is_ok());
            seq += 1;
        }
        std::thread::sleep(TICK);
    }
    Ok(sent)
}

/// Receives datagrams of a run until standard input ends and
/// no more arrive. Then writes the arrivals to a file.
pub fn sink(out: &Path, run: u32) -> Result<()> {
    let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, PORT))?;
    rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, SINK_BUFFER_BYTES)?;
    socket.set_read_timeout(Some(READ_WAIT))?;
    let ended = input_ended();
    println!("ready");
    std::io::stdout().flush()?;
    let mut arrivals = Vec::new();
    let mut buffer = [0; 2048];
    let mut quiet_since = Instant::now();
    loop {
        match socket.recv(&mut buffer) {
            Ok(length) => {
                if let Some(arrival) = arrival(&buffer[..length], run) {
                    arrivals.push(arrival);
                    quiet_since = Instant::now();
                }
            }
            Err(_) if ended.load(Ordering::Relaxed) && quiet_since.elapsed() > DRAIN => break,
            Err(_) => {}
        }
    }
    let mut file = BufWriter::new(File::create(out)?);
    for arrival in arrivals {
        file.write_all(&arrival.seq.to_be_bytes())?;
        file.write_all(&arrival.delay_ns.to_be_bytes())?;
    }
    file.flush()?;
    Ok(())
}

/// Flag that is set once standard input ends, for any reason. That ends a run.
fn input_ended() -> Arc<AtomicBool> {
    let ended = Arc::new(AtomicBool::new(false));
    let flag = ended.clone();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        flag.store(true, Ordering::Relaxed);
    });
    ended
}

fn arrival(datagram: &[u8], run: u32) -> Option<Arrival> {
    let word = |at: usize| Some(u32::from_be_bytes(datagram.get(at..at + 4)?.try_into().ok()?));
    let long = |at: usize| Some(u64::from_be_bytes(datagram.get(at..at + 8)?.try_into().ok()?));
    if word(0)? != MAGIC || word(4)? != run {
        return None;
    }
    Some(Arrival { seq: long(8)?, delay_ns: now_ns().saturating_sub(long(16)?) })
}

/// Reads a sink's file.
pub fn arrivals(path: &Path) -> Result<Vec<Arrival>> {
    let bytes = std::fs::read(path).with_context(|| format!("{}", path.display()))?;
    ensure!(bytes.len().is_multiple_of(ARRIVAL_BYTES), "{}: cut off", path.display());
    let long = |bytes: &[u8]| bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte));
    let records = bytes.chunks_exact(ARRIVAL_BYTES);
    Ok(records.map(|r| Arrival { seq: long(&r[..8]), delay_ns: long(&r[8..]) }).collect())
}

fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Running traffic: sinks, and a generator.
pub struct RunningTraffic {
    generator: Child,
    sinks: Vec<(Child, PathBuf)>,
}

impl RunningTraffic {
    /// Starts sinks, waits until they listen, and starts the generator; see [`generate`]. `name`
    /// distinguishes simultaneous runs.
    pub fn start(
        (name, run): (&str, u32),
        from: &ExternalMachine,
        sinks: &[&ExternalMachine],
        targets: &[IpAddr],
        (rounds, pps): (u64, u64),
    ) -> Result<Self> {
        let [run, rounds, pps] = [run.into(), rounds, pps].map(|number| number.to_string());
        let me = std::env::current_exe()?.to_string_lossy().into_owned();
        let list = paths::outside().join(format!("{name}.targets"));
        let lines: String = targets.iter().map(|target| format!("{target}\n")).collect();
        std::fs::write(&list, lines)?;
        let start = |machine: &ExternalMachine, words: &[&str]| {
            let mut command = machine.machine().enter(&me);
            command.args(words);
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("pdp-demo")
        };
        let mut running = Vec::new();
        for sink in sinks {
            let out = paths::outside().join(format!("{}.arrivals", sink.name));
            let mut child = start(sink, &["sink", &out.to_string_lossy(), &run])?;
            let mut ready = String::new();
            let output = child.stdout.take().context("sink")?;
            BufReader::new(output).read_line(&mut ready)?;
            ensure!(ready.trim() == "ready", "the sink in {} did not start", sink.name);
            running.push((child, out));
        }
        let words = ["generate", &*list.to_string_lossy(), &*run, &*rounds, &*pps];
        Ok(Self { generator: start(from, &words)?, sinks: running })
    }

    /// Waits for the generator's end, and for datagrams in flight.
    /// Returns the number sent, and the arrivals at each sink.
    pub fn finish(mut self) -> Result<(u64, Vec<Vec<Arrival>>)> {
        drop(self.generator.stdin.take());
        let output = self.generator.wait_with_output()?;
        ensure!(output.status.success(), "generator: {}", output.status);
        let sent = String::from_utf8(output.stdout)?;
        let mut arrived = Vec::new();
        for (mut child, out) in self.sinks {
            drop(child.stdin.take());
            let status = child.wait()?;
            ensure!(status.success(), "sink: {status}");
            arrived.push(arrivals(&out)?);
        }
        Ok((sent.trim().parse().context("generator")?, arrived))
    }
}

/// Datagram that left by an interface that the reference does not allow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misdelivery {
    /// Destination.
    pub target: IpAddr,
    /// Longest prefix that covers the destination, if any.
    pub prefix: Option<IpNet>,
    /// Peer that received it.
    pub peer: usize,
}

/// Evaluation of a run.
#[derive(Clone, Debug, Default)]
pub struct Judgement {
    /// Datagrams that arrived, by peer.
    pub by_peer: [u64; PEERS],
    /// Datagrams at a peer that does not announce their longest prefix.
    pub wrong: Vec<Misdelivery>,
    /// Arrivals after a higher number of the same target at the same peer.
    pub reordered: u64,
    /// Arrivals of a number for the second time.
    pub twice: u64,
    /// Delays, ascending, nanoseconds.
    pub delays_ns: Vec<u64>,
}

impl Judgement {
    /// Number of arrivals.
    pub fn arrived(&self) -> u64 {
        self.by_peer.iter().sum()
    }

    /// A quantile of the delays, microseconds.
    pub fn delay_us(&self, quantile: f64) -> f64 {
        let last = self.delays_ns.len().saturating_sub(1);
        let at = (last as f64 * quantile).round() as usize;
        self.delays_ns.get(at).copied().unwrap_or(0) as f64 / 1000.0
    }
}

/// Evaluates the arrivals at each peer, using a look-up of the allowed peers.
pub fn judge(
    targets: &[IpAddr],
    arrivals: &[Vec<Arrival>],
    allowed: impl Fn(IpAddr) -> Option<(IpNet, Peers)>,
) -> Judgement {
    let mut judgement = Judgement::default();
    let mut seen = std::collections::BTreeSet::new();
    for (peer, arrivals) in arrivals.iter().enumerate() {
        let mut last: BTreeMap<u64, u64> = BTreeMap::new();
        for arrival in arrivals {
            let index = arrival.seq % targets.len().max(1) as u64;
            let Some(&target) = targets.get(index as usize) else { continue };
            let route = allowed(target);
            if !route.is_some_and(|(_, peers)| peers.has(peer)) {
                let prefix = route.map(|(prefix, _)| prefix);
                judgement.wrong.push(Misdelivery { target, prefix, peer });
            }
            judgement.twice += u64::from(!seen.insert(arrival.seq));
            let latest = last.entry(index).or_insert(arrival.seq);
            judgement.reordered += u64::from(arrival.seq < *latest);
            *latest = arrival.seq.max(*latest);
            judgement.by_peer[peer] += 1;
            judgement.delays_ns.push(arrival.delay_ns);
        }
    }
    judgement.delays_ns.sort_unstable();
    judgement
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seq: u64) -> Arrival {
        Arrival { seq, delay_ns: seq * 1000 }
    }

    #[test]
    fn judgement_finds_misrouted_reordered_and_duplicate_datagrams() {
        let targets: Vec<IpAddr> = ["192.0.2.1", "198.51.100.1"].map(|a| a.parse().unwrap()).into();
        let allowed = |target: IpAddr| {
            let net: IpNet = format!("{target}/32").parse().unwrap();
            // The first target by peers 0 and 1, the second by none.
            (target == targets[0]).then_some((net, Peers(0b11)))
        };
        // Even numbers belong to the first target.
        let arrivals =
            [vec![at(2), at(0), at(4), at(10)], vec![at(6), at(6)], vec![at(8)], vec![at(1)]];
        let judgement = judge(&targets, &arrivals, allowed);
        assert_eq!(judgement.by_peer, [4, 2, 1, 1]);
        assert_eq!(judgement.reordered, 1);
        assert_eq!(judgement.twice, 1);
        let wrong: Vec<_> =
            judgement.wrong.iter().map(|wrong| (wrong.target, wrong.peer)).collect();
        assert_eq!(wrong, [(targets[0], 2), (targets[1], 3)]);
        assert_eq!(judgement.delay_us(0.0), 0.0);
        assert_eq!(judgement.delay_us(1.0), 10.0);
    }

    #[test]
    fn foreign_datagrams_are_not_counted() {
        let mut datagram = [0; DATAGRAM_BYTES];
        datagram[..4].copy_from_slice(&MAGIC.to_be_bytes());
        datagram[7] = 5;
        datagram[15] = 9;
        assert_eq!(arrival(&datagram, 5).unwrap().seq, 9);
        assert!(arrival(&datagram, 6).is_none());
        assert!(arrival(&datagram[..20], 5).is_none());
        datagram[0] = 0;
        assert!(arrival(&datagram, 5).is_none());
    }
}
