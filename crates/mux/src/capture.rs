//! Captures of a port's frames as pcap, beside the packet path.
//!
//! The worker copies frames into a ring of bytes. A thread of each capture writes them as fast
//! as the reader takes them. A full ring costs the capture a frame, and the worker nothing.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::fd::{AsFd, OwnedFd};

use pdp_wire::bpf::BpfProgram;
use pdp_wire::pcap::{HEADER, PcapRecordHeader, RECORD_BYTES};
use rtrb::{Consumer, Producer, RingBuffer};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Captures at a time: those that pdpd permits (`shared` of pdp-spec), and some that are ending.
pub const CAPTURES_MAX: usize = 40;

/// Bytes that a capture's reader may lag behind.
const RING_BYTES: usize = 1 << 20;

/// Interval at which the writer checks for frames, and for whether its reader still exists.
const LOOK_NS: u32 = 5_000_000;

/// The worker's end of a capture.
#[derive(Debug)]
pub struct CaptureSink {
    ring: Producer<u8>,
    snap_bytes: usize,
    program: Option<BpfProgram>,
}

/// The writer's end of a capture.
#[derive(Debug)]
pub struct CaptureSource(Consumer<u8>);

/// Creates a capture of `snap_bytes` of each frame (0:
/// all), or only of frames that `program` matches.
pub fn channel(snap_bytes: u32, program: Option<BpfProgram>) -> (CaptureSink, CaptureSource) {
    let (ring, consumer) = RingBuffer::new(RING_BYTES);
    let snap_bytes = if snap_bytes == 0 { usize::MAX } else { snap_bytes as usize };
    (CaptureSink { ring, snap_bytes, program }, CaptureSource(consumer))
}

impl CaptureSink {
    /// True if the writer has ended.
    pub fn is_closed(&self) -> bool {
        self.ring.is_abandoned()
    }

    /// Adds a frame if the program matches it. False if the
    /// ring has no space for it. Never blocks or allocates.
    pub fn offer(&mut self, wall_ns: u64, frame: &[u8]) -> bool {
        if self.program.as_ref().is_some_and(|program| !program.matches(frame)) {
            return true;
        }
        let kept = &frame[..frame.len().min(self.snap_bytes)];
        let Ok(mut chunk) = self.ring.write_chunk(RECORD_BYTES + kept.len()) else { return false };
        let record = PcapRecordHeader {
            at_ns: wall_ns,
            kept: kept.len() as u32,
            length: frame.len() as u32,
        };
        let record = record.emit();
        let (first, second) = chunk.as_mut_slices();
        let bytes = record.iter().chain(kept);
        first.iter_mut().chain(second).zip(bytes).for_each(|(to, from)| *to = *from);
        chunk.commit_all();
        true
    }
}

/// Writes frames to `to` until its reader or the port is gone.
pub fn write(mut source: CaptureSource, to: OwnedFd) -> io::Result<()> {
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

impl CaptureSource {
    /// Reads the next frame into `frame`.
    fn next(&mut self, frame: &mut Vec<u8>) -> Option<PcapRecordHeader> {
        let mut record = [0; RECORD_BYTES];
        let chunk = self.0.read_chunk(RECORD_BYTES).ok()?;
        chunk.into_iter().zip(&mut record).for_each(|(from, to)| *to = from);
        let record = PcapRecordHeader::parse(&record);
        frame.clear();
        frame.extend(self.0.read_chunk(record.kept as usize).ok()?);
        Some(record)
    }
}

/// True if a capture can write to `fd`: it is open, and not read-only.
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
    fn capture_writes_frames_unchanged() {
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
    fn capture_ring_stores_only_matching_frames() {
        // Matches frames whose first byte is 7.
        let program = "4,48 0 0 0,21 0 1 7,6 0 0 262144,6 0 0 0".parse().unwrap();
        let (mut sink, mut source) = channel(0, Some(program));
        for count in 0..20_000u32 {
            assert!(sink.offer(count.into(), &[(count % 256) as u8; 500]) || count % 256 == 7);
        }
        let mut frame = Vec::new();
        for turn in 0..20_000u64 / 256 {
            let record = PcapRecordHeader { at_ns: turn * 256 + 7, kept: 500, length: 500 };
            assert_eq!(source.next(&mut frame), Some(record));
            assert_eq!(frame, [7; 500]);
        }
        assert!(sink.offer(0, &[]) && sink.offer(0, &[8]));
    }

    #[test]
    fn slow_capture_reader_loses_frames_gone_one_ends() {
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
