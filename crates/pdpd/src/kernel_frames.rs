//! Frames of ports that stay in the kernel, as captures and traces show them.
//!
//! A packet socket in the router's network namespace sees what passes the port's interface there; what goes the short
//! way does not, so that nothing does meanwhile ([`Observer`]). The kernel hands on what a filter wants alone, and who
//! reads it has [`CPU_PART`] of a CPU: a capture of more loses frames, and nobody else does.

use std::collections::VecDeque;
use std::io::{self, BufWriter, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};
use std::{iter, thread};

use nix::net::if_::if_indextoname;
use pdp_api::{Problem, ProblemKind, Stage};
use pdp_net::capture::{Capture, Frame, Seen, To, Which};
use pdp_net::netns;
use pdp_net::route::{self, Verdict};
use pdp_proto::mux::{Match, Program};
use pdp_proto::trace;
use pdp_wire::{ether, ipv4, ipv6, pcap, udp};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};
use tracing::info;

use crate::host::words;
use crate::ports::Observer;
use crate::view::mac;

/// A reader's part of a CPU: one in so many.
const CPU_PART: u32 = 10;

/// Frames that are looked at between two looks at everything else.
const BATCH: u32 = 64;

/// Between two looks at whether guest, port and reader are still there.
const LOOK: Duration = Duration::from_millis(100);

/// How long a frame that arrived may take to leave.
const LEAVES_WITHIN: Duration = Duration::from_secs(1);

/// Between the first and the last copy of it that leaves.
const COPIES_WITHIN: Duration = Duration::from_millis(20);

/// Copies that are told.
const COPIES_MAX: usize = 16;

/// Frames that left before it is known which one arrived.
const LEFT_MAX: usize = 256;

/// As much as is kept of each of these, bytes.
const KEPT_BYTES: usize = 256;

/// Writes frames of a port into a pipe, until its reader is gone, or the port, or its guest.
///
/// # Errors
/// The port can't be listened at.
pub fn capture(
    observer: Observer,
    snap_bytes: u32,
    program: Option<Program>,
    to: OwnedFd,
) -> Result<(), Problem> {
    let frames = listen(&observer, Which::Of(observer.index), program)?;
    rustix::io::ioctl_fionbio(&to, true).map_err(Problem::internal)?;
    let snap_bytes = if snap_bytes == 0 { usize::MAX } else { snap_bytes as usize };
    let write = move || {
        if let Err(error) = write(&observer, &frames, snap_bytes, to) {
            info!("a capture ends: {error}");
        }
    };
    thread::Builder::new().name("capture".into()).spawn(write).map(drop).map_err(Problem::internal)
}

fn listen(observer: &Observer, which: Which, program: Option<Program>) -> Result<Capture, Problem> {
    netns::within(observer.netns.as_fd(), || Capture::open(which, program))
        .map_err(|error| Problem::new(ProblemKind::Unavailable, words(&error)))
}

fn write(observer: &Observer, frames: &Capture, snap_bytes: usize, to: OwnedFd) -> io::Result<()> {
    let mut to = BufWriter::new(Pipe { to, observer, frames });
    to.write_all(&pcap::HEADER)?;
    to.flush()?;
    let (mut frame, mut pace) = (Frame::default(), Pace::new()?);
    while to.get_ref().is_wanted()? {
        wait([frames], LOOK)?;
        let mut left = BATCH;
        while let Some(seen) = frames.next(&mut frame, &mut left)? {
            let kept = &frame[..frame.len().min(snap_bytes)];
            let Seen { at_ns, length, .. } = seen;
            let record = pcap::Record { at_ns, kept: kept.len() as u32, length };
            to.write_all(&record.emit())?;
            to.write_all(kept)?;
        }
        to.flush()?;
        pace.rest()?;
    }
    Ok(())
}

/// Where a capture goes. Who writes there waits for its reader as long as there are port and guest.
struct Pipe<'a> {
    to: OwnedFd,
    observer: &'a Observer,
    frames: &'a Capture,
}

impl Pipe<'_> {
    /// Whether there are reader, port and guest. Counts what was missed, however long the reader takes.
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
                    poll(&mut fds, Some(&timespec(LOOK)))?;
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

/// Holds the calling thread to its part of a CPU.
struct Pace {
    since: Instant,
    /// What the thread had used then.
    used: Duration,
}

impl Pace {
    fn new() -> io::Result<Self> {
        Ok(Self { since: Instant::now(), used: used()? })
    }

    /// Sleeps until what was used since it was begun is no more than that part.
    fn rest(&mut self) -> io::Result<()> {
        let due = (used()? - self.used) * CPU_PART;
        thread::sleep(due.saturating_sub(self.since.elapsed()));
        // What is not used is not saved up.
        *self = Self::new()?;
        Ok(())
    }
}

/// CPU time of the calling thread.
fn used() -> io::Result<Duration> {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).map_err(io::Error::other)
}

/// Waits until frames come, so long at the most.
fn wait<const COUNT: usize>(frames: [&Capture; COUNT], most: Duration) -> io::Result<()> {
    let mut fds = frames.map(|frames| PollFd::from_borrowed_fd(frames.as_fd(), PollFlags::IN));
    match poll(&mut fds, Some(&timespec(most))) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn timespec(time: Duration) -> Timespec {
    // None of them is longer than a second.
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() }
}

/// Follows the next frame that arrives at a port through its router's kernel, to where it leaves: the interfaces that
/// send the same packet soon after, though its addresses may be others then. `link` is the name of the port's link.
///
/// # Errors
/// No such frame arrived in time; or the port can't be listened at.
pub fn follow(
    observer: &Observer,
    (link, port): (&str, &str),
    filter: &[Match],
    program: Option<Program>,
    most: Duration,
) -> Result<Vec<Stage>, Problem> {
    // First what leaves: it can't arrive before.
    let frames = listen(observer, Which::Sent, None)?;
    let mut left = Left { frames, frame: Frame::default(), kept: VecDeque::new() };
    let arriving = listen(observer, Which::Received(observer.index), program)?;
    let (seen, frame) = arrival(observer, &arriving, &mut left, filter, most)?;
    let stage =
        |at_ns: u64, stage: &str, detail: String| Stage { at_ns, stage: stage.into(), detail };
    let mut stages = vec![stage(
        0,
        "receive",
        format!("{} bytes by link {link}, which stays in the kernel", seen.length),
    )];
    let addresses = trace::addresses(&frame).unwrap_or_default();
    stages.push(stage(0, "classify", format!("port {port}{addresses}")));
    stages.push(stage(0, "forward", says(observer, &seen, &frame)));
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
            Ok(missed) if missed > 0 => format!(", or was among {missed} that were missed"),
            _ => String::new(),
        };
        let within = LEAVES_WITHIN.as_millis();
        let text = format!(
            "none like it left within {within} ms: its kernel has it, or dropped it{missed}"
        );
        stages.push(stage(LEAVES_WITHIN.as_nanos() as u64, "wait", text));
    }
    Ok(stages)
}

/// The frame that is wanted, once it arrives.
fn arrival(
    observer: &Observer,
    arriving: &Capture,
    left: &mut Left,
    filter: &[Match],
    most: Duration,
) -> Result<(Seen, Frame), Problem> {
    let over = Instant::now() + most;
    let mut pace = Pace::new().map_err(Problem::internal)?;
    let mut frame = Frame::default();
    loop {
        left.take().map_err(Problem::internal)?;
        // What was missed so far is none that arrives from here on.
        left.frames.missed().map_err(Problem::internal)?;
        let mut batch = BATCH;
        while let Some(seen) = arriving.next(&mut frame, &mut batch).map_err(Problem::internal)? {
            if trace::matches(&frame, filter) {
                return Ok((seen, frame));
            }
        }
        if !observer.guest.is_alive() || !arriving.is_bound() {
            let text = "the router or its port was made anew meanwhile";
            return Err(Problem::new(ProblemKind::Unavailable, text).hint("trace again"));
        }
        let rest = over.saturating_duration_since(Instant::now());
        if rest.is_zero() {
            let text = format!("{} within {} ms", trace::NO_FRAME, most.as_millis());
            return Err(Problem::new(ProblemKind::TimedOut, text));
        }
        wait([&left.frames, arriving], rest.min(LOOK)).map_err(Problem::internal)?;
        pace.rest().map_err(Problem::internal)?;
    }
}

/// What the kernel's routes say of a frame that arrived.
fn says(observer: &Observer, seen: &Seen, frame: &[u8]) -> String {
    let Some((from, to)) = trace::ends(frame) else {
        return match ether::payload(frame).1 {
            ether::HEADER_BYTES => "by its kernel, which has no routes for what is not IP".into(),
            _ => "by its kernel, as a frame of a VLAN of that interface".into(),
        };
    };
    let verdict = netns::within(observer.netns.as_fd(), || {
        let verdict = route::ask(seen.interface, from, to)?;
        let by = match &verdict {
            Verdict::Hop { interface: index, .. } => interface(*index),
            _ => String::new(),
        };
        Ok((verdict, by))
    });
    let short_way = if observer.short_way { "; not the short way, since it is traced" } else { "" };
    let words = match verdict {
        Ok((Verdict::Local, _)) => format!("by its kernel, to which {to} belongs"),
        Ok((Verdict::Hop { via, .. }, by)) => {
            format!("by its kernel's routes to {} by {by}{short_way}", via.unwrap_or(to))
        }
        Ok((Verdict::Other(kind), _)) => format!("by its kernel's {kind} route to {to}"),
        Err(error) => format!("by its kernel, whose routes say: {}", words(&error)),
    };
    let another = if seen.to == To::Another { "; it is for another station's address" } else { "" };
    words + another
}

/// What an interface of the calling thread's network namespace is called. Its guest chose that: it may have any bytes.
fn interface(index: u32) -> String {
    let name = if_indextoname(index).ok();
    let name = name.map(|name| name.to_string_lossy().escape_debug().to_string());
    name.unwrap_or_else(|| format!("interface {index}"))
}

/// Frames that left a router lately.
struct Left {
    frames: Capture,
    frame: Frame,
    kept: VecDeque<(Seen, Vec<u8>)>,
}

impl Left {
    /// Takes those that wait, a batch at the most.
    fn take(&mut self) -> io::Result<()> {
        let mut batch = BATCH;
        while let Some(seen) = self.frames.next(&mut self.frame, &mut batch)? {
            self.kept.truncate(LEFT_MAX - 1);
            let kept = self.frame.len().min(KEPT_BYTES);
            self.kept.push_front((seen, self.frame[..kept].to_vec()));
        }
        Ok(())
    }

    /// Those that are the packet of `frame`, in their order: which interface sent it, and to which link address.
    fn like(&mut self, arrived: &Seen, frame: &[u8]) -> io::Result<Vec<(Seen, String)>> {
        let mut found = Vec::new();
        let (mut until, mut pace) = (Instant::now() + LEAVES_WITHIN, Pace::new()?);
        loop {
            self.take()?;
            for (seen, sent) in self.kept.drain(..).rev() {
                // One of the first frames may have the time at which it was read.
                let is_late = seen.at_ns + LOOK.as_nanos() as u64 >= arrived.at_ns;
                let is_it = is_late && is_like(frame, &sent);
                let Some(header) = ether::Header::parse(&sent).filter(|_| is_it) else { continue };
                if found.is_empty() {
                    until = Instant::now() + COPIES_WITHIN;
                }
                if found.len() < COPIES_MAX {
                    found.push((seen, mac(header.destination), trace::ends(&sent)));
                }
            }
            let rest = until.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                // Of others with the same payload some leave, too, who have other addresses.
                let ends = trace::ends(frame);
                let is_same = |(.., sent): &(_, _, _)| *sent == ends;
                if found.iter().any(is_same) {
                    found.retain(is_same);
                }
                return Ok(found.into_iter().map(|(seen, to, _)| (seen, to)).collect());
            }
            wait([&self.frames], rest.min(LOOK))?;
            pace.rest()?;
        }
    }
}

const ICMP: u8 = 1;
const TCP: u8 = 6;

/// Whether a frame that leaves a router may be of the packet that arrived as another one: what routers and translation
/// of addresses change is not looked at. It may be the first of several fragments, and cut off.
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
            // Number and protocol (RFC 791, section 3.1); the length unless more fragments follow.
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

/// The same of what is behind an IP header: all but ports, checksums, and identifiers of ICMP, as far as both go.
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

    /// A frame with a packet of UDP.
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
    fn a_packet_is_known_again_behind_a_router_that_translates() {
        let arrived = frame(7, b"abcdef");
        let mut left = arrived.clone();
        // Link addresses, TTL, checksums, IP addresses, ports; a tag.
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
    fn another_packet_is_not_taken_for_it() {
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
    fn who_reads_has_a_part_of_a_cpu() {
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
