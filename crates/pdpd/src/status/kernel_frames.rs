//! Captures and traces of ports that stay in the kernel.
//!
//! A packet socket in the router's network namespace sees what passes the port's interface
//! there. Packets on the XDP bypass are invisible to it, so the bypass is off meanwhile
//! ([`Observer`]). The kernel passes on only frames that match a filter, and their reader
//! has [`CPU_PART`] of a CPU. A capture of more loses frames; nobody else does.

use std::collections::VecDeque;
use std::io::{self, BufWriter, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};
use std::{iter, thread};

use nix::net::if_::if_indextoname;
use pdp_api::{Problem, ProblemKind, TraceStep};
use pdp_net::capture::{Capture, CaptureBuffer, CaptureScope, FrameDirection, FrameInfo};
use pdp_net::netns;
use pdp_net::route::{self, KernelVerdict};
use pdp_proto::mux::{BpfProgram, BytePattern};
use pdp_proto::trace;
use pdp_wire::{ether, ipv4, ipv6, pcap, udp};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};
use tracing::info;

use crate::kernel::ports::Observer;
use crate::util::error_chain;
use crate::util::mac;

/// A reader's share of a CPU is one in this many.
const CPU_PART: u32 = 10;

/// Frames that are read before the other conditions are checked again.
const BATCH: u32 = 64;

/// Interval of checks whether guest, port and reader are still there.
const POLL_PAUSE: Duration = Duration::from_millis(100);

/// Longest time in which an arrived frame may leave.
const LEAVES_WITHIN: Duration = Duration::from_secs(1);

/// Longest time between the first and the last copy of a frame that leaves.
const COPIES_WITHIN: Duration = Duration::from_millis(20);

/// Copies that are reported.
const COPIES_MAX: usize = 16;

/// Left frames that are kept until the arrived frame is known.
const LEFT_MAX: usize = 256;

/// Part of each such frame that is kept, bytes.
const KEPT_BYTES: usize = 256;

/// Writes frames of a port into a pipe until the reader, the port, or its guest is gone.
///
/// # Errors
/// The port can't be observed.
pub fn capture(
    observer: Observer,
    snap_bytes: u32,
    program: Option<BpfProgram>,
    to: OwnedFd,
) -> Result<(), Problem> {
    let frames = listen(&observer, CaptureScope::Of(observer.index), program)?;
    rustix::io::ioctl_fionbio(&to, true).map_err(Problem::internal)?;
    let snap_bytes = if snap_bytes == 0 { usize::MAX } else { snap_bytes as usize };
    let write = move || {
        if let Err(error) = write(&observer, &frames, snap_bytes, to) {
            info!("a capture ends: {error}");
        }
    };
    thread::Builder::new().name("capture".into()).spawn(write).map(drop).map_err(Problem::internal)
}

fn listen(
    observer: &Observer,
    which: CaptureScope,
    program: Option<BpfProgram>,
) -> Result<Capture, Problem> {
    netns::within(observer.netns.as_fd(), || Capture::open(which, program))
        .map_err(|error| Problem::new(ProblemKind::Unavailable, error_chain(&error)))
}

fn write(observer: &Observer, frames: &Capture, snap_bytes: usize, to: OwnedFd) -> io::Result<()> {
    let mut to = BufWriter::new(Pipe { to, observer, frames });
    to.write_all(&pcap::HEADER)?;
    to.flush()?;
    let (mut frame, mut pace) = (CaptureBuffer::default(), Pace::new()?);
    while to.get_ref().is_wanted()? {
        wait([frames], POLL_PAUSE)?;
        let mut left = BATCH;
        while let Some(seen) = frames.next(&mut frame, &mut left)? {
            let kept = &frame[..frame.len().min(snap_bytes)];
            let FrameInfo { at_ns, length, .. } = seen;
            let record = pcap::PcapRecordHeader { at_ns, kept: kept.len() as u32, length };
            to.write_all(&record.emit())?;
            to.write_all(kept)?;
        }
        to.flush()?;
        pace.rest()?;
    }
    Ok(())
}

/// Output of a capture. A write waits for the reader as long as port and guest exist.
struct Pipe<'a> {
    to: OwnedFd,
    observer: &'a Observer,
    frames: &'a Capture,
}

impl Pipe<'_> {
    /// True if reader, port and guest exist. Counts missed frames, however slow the reader is.
    fn is_wanted(&self) -> io::Result<bool> {
        self.observer.missed(self.frames.missed()?);
        let mut fds = [PollFd::new(&self.to, PollFlags::empty())];
        poll(&mut fds, Some(&Timespec::default()))?;
        let gone = PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL;
        let reads = !fds[0].revents().intersects(gone);
        Ok(reads && self.frames.is_bound() && self.observer.guest.is_alive())
    }
}

impl Write for Pipe<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match rustix::io::write(&self.to, bytes) {
                Err(Errno::AGAIN) if self.is_wanted()? => {
                    let mut fds = [PollFd::new(&self.to, PollFlags::OUT)];
                    poll(&mut fds, Some(&timespec(POLL_PAUSE)))?;
                }
                Err(Errno::AGAIN) => return Err(io::ErrorKind::BrokenPipe.into()),
                written => return Ok(written?),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Limits the calling thread to its share of a CPU.
struct Pace {
    since: Instant,
    /// CPU time of the thread at `since`.
    used: Duration,
}

impl Pace {
    fn new() -> io::Result<Self> {
        Ok(Self { since: Instant::now(), used: used()? })
    }

    /// Sleeps until the CPU time used since the start is within the share.
    fn rest(&mut self) -> io::Result<()> {
        let due = (used()? - self.used) * CPU_PART;
        thread::sleep(due.saturating_sub(self.since.elapsed()));
        // Unused CPU time is not saved up.
        *self = Self::new()?;
        Ok(())
    }
}

/// Returns the CPU time of the calling thread.
fn used() -> io::Result<Duration> {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).map_err(io::Error::other)
}

/// Waits until frames arrive, at most `most`.
fn wait<const COUNT: usize>(frames: [&Capture; COUNT], most: Duration) -> io::Result<()> {
    let mut fds = frames.map(|frames| PollFd::from_borrowed_fd(frames.as_fd(), PollFlags::IN));
    match poll(&mut fds, Some(&timespec(most))) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn timespec(time: Duration) -> Timespec {
    // No such time is longer than a second.
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() }
}

/// Traces the next frame that arrives at a port through its router's kernel, to the interfaces that
/// soon send the same packet, even with other addresses. `link` is the name of the port's link.
///
/// # Errors
/// No such frame arrived in time, or the port can't be observed.
pub fn follow(
    observer: &Observer,
    (link, port): (&str, &str),
    filter: &[BytePattern],
    program: Option<BpfProgram>,
    most: Duration,
) -> Result<Vec<TraceStep>, Problem> {
    // Observe leaving frames first: they can't leave before the frame arrives.
    let frames = listen(observer, CaptureScope::Sent, None)?;
    let mut left = RecentEgress { frames, frame: CaptureBuffer::default(), kept: VecDeque::new() };
    let arriving = listen(observer, CaptureScope::Received(observer.index), program)?;
    let (seen, frame) = arrival(observer, &arriving, &mut left, filter, most)?;
    let stage =
        |at_ns: u64, stage: &str, detail: String| TraceStep { at_ns, stage: stage.into(), detail };
    let mut stages = vec![stage(
        0,
        "receive",
        format!("{} bytes by link {link}, which stays in the kernel", seen.length),
    )];
    let addresses = trace::addresses(&frame).unwrap_or_default();
    stages.push(stage(0, "classify", format!("port {port}{addresses}")));
    stages.push(stage(0, "forward", routing_words(observer, &seen, &frame)));
    let sent = left.like(&seen, &frame).map_err(Problem::internal)?;
    let names = netns::within(observer.netns.as_fd(), || {
        Ok(sent.iter().map(|(out, _)| interface(out.interface)).collect::<Vec<_>>())
    });
    for ((out, to), name) in sent.iter().zip(names.map_err(Problem::internal)?) {
        let at_ns = out.at_ns.saturating_sub(seen.at_ns);
        stages.push(stage(at_ns, "send", format!("by {name} to {to}")));
    }
    if sent.is_empty() {
        let missed = match left.frames.missed() {
            Ok(missed) if missed > 0 => format!(", or it was among {missed} missed frames"),
            _ => String::new(),
        };
        let within = LEAVES_WITHIN.as_millis();
        let text =
            format!("no such frame left within {within} ms: its kernel kept or dropped it{missed}");
        stages.push(stage(LEAVES_WITHIN.as_nanos() as u64, "wait", text));
    }
    Ok(stages)
}

/// Returns the first frame that matches.
fn arrival(
    observer: &Observer,
    arriving: &Capture,
    left: &mut RecentEgress,
    filter: &[BytePattern],
    most: Duration,
) -> Result<(FrameInfo, CaptureBuffer), Problem> {
    let over = Instant::now() + most;
    let mut pace = Pace::new().map_err(Problem::internal)?;
    let mut frame = CaptureBuffer::default();
    loop {
        left.take().map_err(Problem::internal)?;
        // Frames missed so far are not among those that arrive from here on.
        left.frames.missed().map_err(Problem::internal)?;
        let mut batch = BATCH;
        while let Some(seen) = arriving.next(&mut frame, &mut batch).map_err(Problem::internal)? {
            if trace::matches(&frame, filter) {
                return Ok((seen, frame));
            }
        }
        if !observer.guest.is_alive() || !arriving.is_bound() {
            let text = "the router or its port was recreated meanwhile";
            return Err(Problem::new(ProblemKind::Unavailable, text).hint("trace again"));
        }
        let rest = over.saturating_duration_since(Instant::now());
        if rest.is_zero() {
            let text = format!("{} within {} ms", trace::NO_FRAME, most.as_millis());
            return Err(Problem::new(ProblemKind::TimedOut, text));
        }
        wait([&left.frames, arriving], rest.min(POLL_PAUSE)).map_err(Problem::internal)?;
        pace.rest().map_err(Problem::internal)?;
    }
}

/// Returns what the kernel's routes say about an arrived frame.
fn routing_words(observer: &Observer, seen: &FrameInfo, frame: &[u8]) -> String {
    let Some((from, to)) = trace::ends(frame) else {
        return match ether::payload(frame).1 {
            ether::HEADER_BYTES => "by its kernel, which routes only IP".into(),
            _ => "by its kernel, as a frame of a VLAN of that interface".into(),
        };
    };
    let verdict = netns::within(observer.netns.as_fd(), || {
        let verdict = route::lookup(seen.interface, from, to)?;
        let by = match &verdict {
            KernelVerdict::Hop { interface: index, .. } => interface(*index),
            _ => String::new(),
        };
        Ok((verdict, by))
    });
    let bypass =
        if observer.xdp_bypass { "; without the XDP bypass, since it is traced" } else { "" };
    let words = match verdict {
        Ok((KernelVerdict::Local, _)) => format!("by its kernel, to which {to} belongs"),
        Ok((KernelVerdict::Hop { via, .. }, by)) => {
            format!("by its kernel's routes to {} by {by}{bypass}", via.unwrap_or(to))
        }
        Ok((KernelVerdict::Other(kind), _)) => format!("by its kernel's {kind} route to {to}"),
        Err(error) => format!("by its kernel, whose routes say: {}", error_chain(&error)),
    };
    let another = if seen.to == FrameDirection::Another {
        "; it is for another station's address"
    } else {
        ""
    };
    words + another
}

/// Returns the name of an interface in the calling thread's network
/// namespace. Its guest chose it, so it may contain any bytes.
fn interface(index: u32) -> String {
    let name = if_indextoname(index).ok();
    let name = name.map(|name| name.to_string_lossy().escape_debug().to_string());
    name.unwrap_or_else(|| format!("interface {index}"))
}

/// Frames that left a router recently.
struct RecentEgress {
    frames: Capture,
    frame: CaptureBuffer,
    kept: VecDeque<(FrameInfo, Vec<u8>)>,
}

impl RecentEgress {
    /// Reads waiting frames, at most one batch.
    fn take(&mut self) -> io::Result<()> {
        let mut batch = BATCH;
        while let Some(seen) = self.frames.next(&mut self.frame, &mut batch)? {
            self.kept.truncate(LEFT_MAX - 1);
            let kept = self.frame.len().min(KEPT_BYTES);
            self.kept.push_front((seen, self.frame[..kept].to_vec()));
        }
        Ok(())
    }

    /// Returns the copies of the packet in `frame`, in order, each with
    /// the interface that sent it and the destination MAC address.
    fn like(&mut self, arrived: &FrameInfo, frame: &[u8]) -> io::Result<Vec<(FrameInfo, String)>> {
        let mut found = Vec::new();
        let (mut until, mut pace) = (Instant::now() + LEAVES_WITHIN, Pace::new()?);
        loop {
            self.take()?;
            for (seen, sent) in self.kept.drain(..).rev() {
                // Some of the first frames may have the time at which they were read.
                let is_late = seen.at_ns + POLL_PAUSE.as_nanos() as u64 >= arrived.at_ns;
                let is_it = is_late && is_like(frame, &sent);
                let Some(header) = ether::EthernetHeader::parse(&sent).filter(|_| is_it) else {
                    continue;
                };
                if found.is_empty() {
                    until = Instant::now() + COPIES_WITHIN;
                }
                if found.len() < COPIES_MAX {
                    found.push((seen, mac(header.destination), trace::ends(&sent)));
                }
            }
            let rest = until.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                // Other frames with the same payload may leave too, with other addresses.
                let ends = trace::ends(frame);
                let is_same = |(.., sent): &(_, _, _)| *sent == ends;
                if found.iter().any(is_same) {
                    found.retain(is_same);
                }
                return Ok(found.into_iter().map(|(seen, to, _)| (seen, to)).collect());
            }
            wait([&self.frames], rest.min(POLL_PAUSE))?;
            pace.rest()?;
        }
    }
}

const ICMP: u8 = 1;
const TCP: u8 = 6;

/// True if a frame that leaves a router may contain the packet that arrived.
/// Fields that routers and address translation change are not compared. The
/// frame may be the first of several fragments, and truncated.
fn is_like(arrived: &[u8], left: &[u8]) -> bool {
    let ((kind, at), (left_kind, left_at)) = (ether::payload(arrived), ether::payload(left));
    let (Some(arrived), Some(left)) = (arrived.get(at..), left.get(left_at..)) else {
        return false;
    };
    if kind != left_kind {
        return false;
    }
    match kind {
        ether::kind::IPV4 => {
            let (Some(head), Some(left_head)) = (
                arrived.first_chunk::<{ ipv4::HEADER_BYTES }>(),
                left.first_chunk::<{ ipv4::HEADER_BYTES }>(),
            ) else {
                return false;
            };
            // Identification and protocol (RFC 791, section 3.1); the
            // length unless more fragments follow.
            let is_cut = left_head[6] & 0x20 != 0;
            let segment = |head: &[u8; 20]| usize::from(head[0] & 0xf) * 4;
            head[4..6] == left_head[4..6]
                && head[9] == left_head[9]
                && (is_cut || head[2..4] == left_head[2..4])
                && is_like_segment(
                    head[9],
                    arrived.get(segment(head)..).unwrap_or_default(),
                    left.get(segment(left_head)..).unwrap_or_default(),
                )
        }
        ether::kind::IPV6 => {
            let (Some((head, segment)), Some((left_head, left_segment))) = (
                arrived.split_first_chunk::<{ ipv6::HEADER_BYTES }>(),
                left.split_first_chunk::<{ ipv6::HEADER_BYTES }>(),
            ) else {
                return false;
            };
            // Length and next header (RFC 8200, section 3).
            head[4..7] == left_head[4..7] && is_like_segment(head[6], segment, left_segment)
        }
        _ => iter::zip(arrived, left).all(|(one, other)| one == other),
    }
}

/// Compares what follows an IP header, except ports, checksums, and
/// ICMP identifiers, as far as both frames go.
fn is_like_segment(protocol: u8, arrived: &[u8], left: &[u8]) -> bool {
    let may_change = |at: usize| match protocol {
        TCP => matches!(at, 0..4 | 16..18),
        udp::PROTOCOL => matches!(at, 0..4 | 6..8),
        ICMP | ipv6::ICMPV6 => matches!(at, 2..6),
        _ => false,
    };
    iter::zip(arrived, left).enumerate().all(|(at, (one, other))| may_change(at) || one == other)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A frame with a UDP packet.
    fn frame(id: u16, payload: &[u8]) -> Vec<u8> {
        let length = (28 + payload.len()) as u16;
        let mut frame = [[1; 6], [2; 6]].concat();
        frame.extend([8, 0, 0x45, 0]);
        frame.extend(length.to_be_bytes());
        frame.extend(id.to_be_bytes());
        frame.extend([0, 0, 64, 17, 0xab, 0xcd, 10, 0, 0, 1, 10, 0, 0, 2, 1, 2, 3, 4]);
        frame.extend((length - 20).to_be_bytes());
        frame.extend([0x12, 0x34]);
        frame.extend(payload);
        frame
    }

    #[test]
    fn packet_is_recognized_after_nat() {
        let arrived = frame(7, b"abcdef");
        let mut left = arrived.clone();
        // MAC addresses, TTL, checksums, IP addresses, ports; a tag.
        for at in (0..12).chain([22, 24, 25]).chain(26..38).chain([40, 41]) {
            left[at] ^= 0x55;
        }
        assert!(is_like(&arrived, &left));
        left.splice(12..12, [0x81, 0, 0, 5]);
        assert!(is_like(&arrived, &left));
        assert!(is_like(&arrived, &left[..40]), "cut off");
        assert!(is_like(&arrived, &[&arrived[..], &[0; 12]].concat()), "padded");
        // Its first fragment.
        let mut first = frame(7, b"abc");
        first[20] = 0x20;
        first[38..40].copy_from_slice(&arrived[38..40]);
        assert!(is_like(&arrived, &first));
    }

    #[test]
    fn different_packets_are_not_matched() {
        let arrived = frame(7, b"abcdef");
        let others = [frame(8, b"abcdef"), frame(7, b"abcdeg"), frame(7, b"abcde"), frame(7, b"")];
        assert!(others.iter().all(|other| !is_like(&arrived, other)));
        let changed = |at: usize| {
            let mut other = arrived.clone();
            other[at] ^= 1;
            other
        };
        // Type, protocol, length of UDP.
        assert!([13, 23, 39].iter().all(|at| !is_like(&arrived, &changed(*at))));
        for length in 0..arrived.len() {
            // None panics.
            is_like(&arrived[..length], &arrived);
            assert!(length > 33 || !is_like(&arrived, &arrived[..length]), "{length}");
        }
    }

    #[test]
    fn capture_reader_is_limited_to_its_cpu_share() {
        let (begun, before) = (Instant::now(), used().unwrap());
        let mut pace = Pace::new().unwrap();
        while begun.elapsed() < Duration::from_millis(300) {
            let busy = used().unwrap() + Duration::from_millis(2);
            while used().unwrap() < busy {}
            pace.rest().unwrap();
        }
        let part = (used().unwrap() - before).as_secs_f64() / begun.elapsed().as_secs_f64();
        assert!(part < 1.1 / f64::from(CPU_PART), "{part}");
    }
}
