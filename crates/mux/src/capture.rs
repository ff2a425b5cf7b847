//! Frames of a port as pcap, beside the packets' way.
//!
//! The worker puts frames into a ring of bytes; a thread of the capture's own writes them as fast
//! as their reader takes them. A full ring costs the capture a frame and the worker nothing.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::fd::{AsFd, OwnedFd};

use pdp_wire::bpf::Program;
use pdp_wire::pcap::{HEADER, RECORD_BYTES, Record};
use rtrb::{Consumer, Producer, RingBuffer};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Captures at a time: those that pdpd shares out (`shared` of pdp-spec), and some whose writers end.
pub const CAPTURES_MAX: usize = 40;

/// Bytes that a capture's reader may lag behind.
const RING_BYTES: usize = 1 << 20;

/// How often the writer looks for frames, and for whether its reader is still there.
const LOOK_NS: u32 = 5_000_000;

/// The worker's end.
#[derive(Debug)]
pub struct Sink {
    ring: Producer<u8>,
    snap_bytes: usize,
    program: Option<Program>,
}

/// The writer's end.
#[derive(Debug)]
pub struct Source(Consumer<u8>);

/// A capture of `snap_bytes` of each frame, 0 for all, or of each that the program wants.
pub fn channel(snap_bytes: u32, program: Option<Program>) -> (Sink, Source) {
    let (ring, consumer) = RingBuffer::new(RING_BYTES);
    let snap_bytes = if snap_bytes == 0 { usize::MAX } else { snap_bytes as usize };
    (Sink { ring, snap_bytes, program }, Source(consumer))
}

impl Sink {
    /// Whether the writer has ended.
    pub fn is_closed(&self) -> bool {
        self.ring.is_abandoned()
    }

    /// Adds a frame if it is wanted; false if there is no room for it. Never blocks, never allocates.
    pub fn offer(&mut self, wall_ns: u64, frame: &[u8]) -> bool {
        if self.program.as_ref().is_some_and(|program| !program.matches(frame)) {
            return true;
        }
        let kept = &frame[..frame.len().min(self.snap_bytes)];
        let Ok(mut chunk) = self.ring.write_chunk(RECORD_BYTES + kept.len()) else { return false };
        let record = Record { at_ns: wall_ns, kept: kept.len() as u32, length: frame.len() as u32 };
        let record = record.emit();
        let (first, second) = chunk.as_mut_slices();
        let bytes = record.iter().chain(kept);
        first.iter_mut().chain(second).zip(bytes).for_each(|(to, from)| *to = *from);
        chunk.commit_all();
        true
    }
}

/// Writes what comes until the reader at the other end of `to` is gone, or the port.
pub fn write(mut source: Source, to: OwnedFd) -> io::Result<()> {
    let watched = to.try_clone()?;
    let mut file = BufWriter::new(File::from(to));
    file.write_all(&HEADER)?;
    let mut frame = Vec::new();
    loop {
        let mut written = false;
        while let Some(record) = source.next(&mut frame) {
            file.write_all(&record.emit())?;
            file.write_all(&frame)?;
            written = true;
        }
        file.flush()?;
        if written {
            continue;
        }
        if source.0.is_abandoned() {
            return Ok(());
        }
        let mut fds = [PollFd::new(&watched, PollFlags::empty())];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: LOOK_NS.into() }))?;
        if fds[0].revents().intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL) {
            return Ok(());
        }
    }
}

impl Source {
    /// The next frame into `frame`.
    fn next(&mut self, frame: &mut Vec<u8>) -> Option<Record> {
        let mut record = [0; RECORD_BYTES];
        let chunk = self.0.read_chunk(RECORD_BYTES).ok()?;
        chunk.into_iter().zip(&mut record).for_each(|(from, to)| *to = from);
        let record = Record::parse(&record);
        frame.clear();
        frame.extend(self.0.read_chunk(record.kept as usize).ok()?);
        Some(record)
    }
}

/// Whether `fd` can be written to as a capture: open, and not for reading only.
pub fn is_writable(fd: &impl AsFd) -> bool {
    rustix::fs::fcntl_getfl(fd)
        .is_ok_and(|flags| flags & rustix::fs::OFlags::ACCMODE != rustix::fs::OFlags::RDONLY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pcap_file::pcap::PcapReader;
    use std::time::Duration;

    #[test]
    fn frames_come_out_as_they_went_in() {
        let (mut sink, source) = channel(100, None);
        let (reader, writer) = io::pipe().unwrap();
        let thread = std::thread::spawn(move || write(source, writer.into()));
        for count in 0..50u8 {
            assert!(sink.offer(
                1_000_000_000 * u64::from(count) + 7,
                &vec![count; 90 + usize::from(count)]
            ));
        }
        drop(sink);
        let mut pcap = PcapReader::new(reader).unwrap();
        for count in 0..50u8 {
            let packet = pcap.next_packet().unwrap().unwrap();
            assert_eq!(packet.timestamp, Duration::new(count.into(), 7));
            assert_eq!(packet.orig_len, 90 + u32::from(count));
            assert_eq!(*packet.data, vec![count; (90 + usize::from(count)).min(100)]);
        }
        assert!(pcap.next_packet().is_none());
        thread.join().unwrap().unwrap();
    }

    #[test]
    fn only_what_is_wanted_takes_room() {
        // Frames whose first byte is 7.
        let program = "4,48 0 0 0,21 0 1 7,6 0 0 262144,6 0 0 0".parse().unwrap();
        let (mut sink, mut source) = channel(0, Some(program));
        for count in 0..20_000u32 {
            assert!(sink.offer(count.into(), &[(count % 256) as u8; 500]) || count % 256 == 7);
        }
        let mut frame = Vec::new();
        for turn in 0..20_000u64 / 256 {
            let record = Record { at_ns: turn * 256 + 7, kept: 500, length: 500 };
            assert_eq!(source.next(&mut frame), Some(record));
            assert_eq!(frame, [7; 500]);
        }
        assert!(sink.offer(0, &[]) && sink.offer(0, &[8]));
    }

    #[test]
    fn a_slow_reader_costs_frames_and_a_gone_one_ends_it() {
        let (mut sink, source) = channel(0, None);
        let accepted = (0..2000).filter(|_| sink.offer(0, &[0; 1000])).count();
        assert_eq!(accepted, RING_BYTES / 1016);
        let (reader, writer) = io::pipe().unwrap();
        let thread = std::thread::spawn(move || write(source, writer.into()));
        drop(reader);
        let _ = thread.join().unwrap();
        assert!(sink.is_closed());
    }
}
