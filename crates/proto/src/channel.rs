//! Length-prefixed frames over a Unix stream socket, optionally with file descriptors.
//!
//! A frame is a little-endian `u32` with the count of bytes that follow, then the bytes. Control
//! channels carry JSON ([`Channel::send`], [`Channel::receive`]). The routes channel carries
//! postcard (see [`crate::routes`]) over [`FrameReader`]. Descriptors travel with the first bytes
//! of a frame, [`DESCRIPTORS_AT_ONCE_MAX`] per byte, since the kernel passes no more at once.
//!
//! Limits: [`FRAME_BYTES_MAX`] per frame, [`DESCRIPTORS_MAX`] descriptors per frame. Exceeding them
//! is an error that makes the connection unusable.

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg,
    sendmsg, socket_with,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Bytes of one frame, without its prefix.
pub const FRAME_BYTES_MAX: usize = 64 << 20;

/// Most descriptors sent with one frame: a TAP for each vport of a node.
pub const DESCRIPTORS_MAX: usize = pdp_wire::tag::VPORTS_MAX;

/// Most descriptors that the kernel passes with one call (SCM_MAX_FD of include/net/scm.h).
const DESCRIPTORS_AT_ONCE_MAX: usize = 253;

const PREFIX_BYTES: usize = 4;

/// Blocking control channel for JSON messages with descriptors.
#[derive(Debug)]
pub struct Channel {
    stream: UnixStream,
    frames: FrameReader,
    descriptors: Vec<OwnedFd>,
    deadline: Option<Instant>,
}

impl Channel {
    /// Connects to the listener at `path`.
    pub fn connect(path: &Path) -> io::Result<Self> {
        UnixStream::connect(path).map(Self::new)
    }

    /// Connects, and bounds every call by `deadline`. It also covers a peer that never accepts and
    /// one that sends only a byte now and then. A late call fails with
    /// [`io::ErrorKind::WouldBlock`] or `TimedOut`.
    pub fn connect_until(path: &Path, deadline: Instant) -> io::Result<Self> {
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        let stream = UnixStream::from(socket);
        // For Unix sockets, the send time-out bounds connecting too (unix(7)).
        stream.set_write_timeout(Some(left(deadline)?))?;
        connect(&stream, &SocketAddrUnix::new(path)?)?;
        Ok(Self { deadline: Some(deadline), ..Self::new(stream) })
    }

    /// Sets a new deadline for later calls.
    pub fn set_deadline(&mut self, deadline: Instant) {
        self.deadline = Some(deadline);
    }

    /// Refuses frames of more than `bytes_max` bytes from the peer (default: [`FRAME_BYTES_MAX`]).
    /// Decoded, a frame may take many times its size.
    pub fn limit_frames(&mut self, bytes_max: usize) {
        self.frames.bytes_max = bytes_max.min(FRAME_BYTES_MAX);
    }

    /// Takes over a connected stream. Time-outs set on the stream apply to the channel.
    pub fn new(stream: UnixStream) -> Self {
        Self { stream, frames: FrameReader::default(), descriptors: Vec::new(), deadline: None }
    }

    /// Underlying stream, for time-outs, `poll` and peer credentials.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends one message and up to [`DESCRIPTORS_MAX`] descriptors.
    pub fn send<M: Serialize>(&mut self, message: &M, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        if fds.len() > DESCRIPTORS_MAX {
            return Err(invalid(format!("{} descriptors, {DESCRIPTORS_MAX} at most", fds.len())));
        }
        let frame = frame(&serde_json::to_vec(message).map_err(io::Error::other)?)?;
        // Every chunk of descriptors but the last goes with one byte; a prefix has enough bytes.
        let mut rest = &frame[..];
        let mut lots = fds.chunks(DESCRIPTORS_AT_ONCE_MAX).peekable();
        loop {
            let mut space = space();
            let mut control = SendAncillaryBuffer::new(&mut space);
            if let Some(lot) = lots.next() {
                control.push(SendAncillaryMessage::ScmRights(lot));
            }
            // The rest of the frame goes without descriptors.
            let is_last = lots.peek().is_none();
            if let Some(deadline) = self.deadline {
                self.stream.set_write_timeout(Some(left(deadline)?))?;
            }
            let bytes = [IoSlice::new(if is_last { rest } else { &rest[..1] })];
            let sent = rustix::io::retry_on_intr(|| {
                sendmsg(&self.stream, &bytes, &mut control, SendFlags::NOSIGNAL)
            })?;
            rest = &rest[sent..];
            if is_last && rest.is_empty() {
                return Ok(());
            }
        }
    }

    /// Waits for the next message. Returns `None` once the peer has closed between two messages.
    ///
    /// If a frame cannot be parsed, its descriptors are closed.
    pub fn receive<M: DeserializeOwned>(&mut self) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
        loop {
            if let Some(frame) = self.frames.next_frame()? {
                let descriptors = std::mem::take(&mut self.descriptors);
                let message = serde_json::from_slice(frame)
                    .map_err(|error| invalid(format!("unreadable message: {error}")))?;
                return Ok(Some((message, descriptors)));
            }
            if self.fill()? == 0 {
                return if self.frames.is_empty() {
                    Ok(None)
                } else {
                    Err(io::ErrorKind::UnexpectedEof.into())
                };
            }
        }
    }

    /// Reads no further than the end of the current frame, so that the received descriptors belong
    /// to this frame and not to the next.
    fn fill(&mut self) -> io::Result<usize> {
        let missing = self.frames.missing()?.min(1 << 16);
        let mut bytes = vec![0; missing];
        let mut space = space();
        let mut control = RecvAncillaryBuffer::new(&mut space);
        if let Some(deadline) = self.deadline {
            self.stream.set_read_timeout(Some(left(deadline)?))?;
        }
        let received = rustix::io::retry_on_intr(|| {
            recvmsg(
                self.stream.as_fd(),
                &mut [IoSliceMut::new(&mut bytes)],
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            )
        })?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.descriptors.extend(fds);
            }
        }
        if self.descriptors.len() > DESCRIPTORS_MAX {
            return Err(invalid(format!("more than {DESCRIPTORS_MAX} descriptors in a frame")));
        }
        self.frames.extend(&bytes[..received.bytes]);
        Ok(received.bytes)
    }
}

/// Returns the time until a deadline, or an error if it has passed.
fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Space for the descriptors of one call.
fn space() -> Vec<MaybeUninit<u8>> {
    vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_AT_ONCE_MAX))]
}

/// Bytes per read.
const READ_BYTES: usize = 1 << 16;

/// Assembles frames from bytes as they arrive. Holds at
/// most one frame's bytes more than it was fed.
#[derive(Debug)]
pub struct FrameReader {
    /// Bytes received but not yet taken, followed by free space.
    bytes: Vec<u8>,
    taken: usize,
    /// Start of the free space.
    end: usize,
    bytes_max: usize,
}

impl Default for FrameReader {
    fn default() -> Self {
        Self::with_max(FRAME_BYTES_MAX)
    }
}

impl FrameReader {
    /// Refuses frames of more than `bytes_max` bytes, for peers that need no larger ones.
    pub fn with_max(bytes_max: usize) -> Self {
        Self { bytes: Vec::new(), taken: 0, end: 0, bytes_max: bytes_max.min(FRAME_BYTES_MAX) }
    }

    /// Adds bytes as they were read.
    pub fn extend(&mut self, bytes: &[u8]) {
        self.room(bytes.len())[..bytes.len()].copy_from_slice(bytes);
        self.end += bytes.len();
    }

    /// Reads once from `stream`. Returns the count of bytes, 0 at the end.
    pub fn read_from(&mut self, stream: &mut impl Read) -> io::Result<usize> {
        let count = stream.read(&mut self.room(READ_BYTES)[..READ_BYTES])?;
        self.end += count;
        Ok(count)
    }

    /// Returns free space of at least `bytes` bytes. The space is kept for later reads: clearing it
    /// anew takes longer than a read that returns nothing.
    fn room(&mut self, bytes: usize) -> &mut [u8] {
        // While a large frame is incomplete, `taken` is 0:
        // otherwise each read would copy all of it.
        if self.taken > 0 {
            self.bytes.copy_within(self.taken..self.end, 0);
            self.end -= std::mem::take(&mut self.taken);
        }
        if self.bytes.len() < self.end + bytes {
            self.bytes.resize(self.end + bytes, 0);
        }
        &mut self.bytes[self.end..]
    }

    /// Returns the next whole frame without its prefix, or an error if it announces too many bytes.
    pub fn next_frame(&mut self) -> io::Result<Option<&[u8]>> {
        let rest = &self.bytes[self.taken..self.end];
        let Some(length) = announced(rest, self.bytes_max)? else { return Ok(None) };
        if rest.len() < PREFIX_BYTES + length {
            return Ok(None);
        }
        let start = self.taken + PREFIX_BYTES;
        self.taken = start + length;
        Ok(Some(&self.bytes[start..start + length]))
    }

    /// True if no byte of a further frame has arrived.
    pub fn is_empty(&self) -> bool {
        self.end == self.taken
    }

    /// Bytes still missing from the current frame, or from its prefix while that is incomplete.
    fn missing(&self) -> io::Result<usize> {
        let rest = &self.bytes[self.taken..self.end];
        Ok(match announced(rest, self.bytes_max)? {
            None => PREFIX_BYTES - rest.len(),
            Some(length) => PREFIX_BYTES + length - rest.len(),
        })
    }
}

fn announced(bytes: &[u8], bytes_max: usize) -> io::Result<Option<usize>> {
    let Some(prefix) = bytes.first_chunk::<PREFIX_BYTES>() else { return Ok(None) };
    let length = u32::from_le_bytes(*prefix) as usize;
    if length > bytes_max {
        return Err(invalid(format!("frame of {length} bytes, {bytes_max} at most")));
    }
    Ok(Some(length))
}

/// `payload` with its prefix.
pub fn frame(payload: &[u8]) -> io::Result<Vec<u8>> {
    if payload.len() > FRAME_BYTES_MAX {
        return Err(invalid(format!(
            "frame of {} bytes, {FRAME_BYTES_MAX} at most",
            payload.len()
        )));
    }
    let mut bytes = Vec::with_capacity(PREFIX_BYTES + payload.len());
    bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    bytes.extend_from_slice(payload);
    Ok(bytes)
}

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use proptest::prelude::*;

    #[test]
    fn descriptors_come_with_their_own_message() {
        let (a, b) = UnixStream::pair().unwrap();
        let (mut a, mut b) = (Channel::new(a), Channel::new(b));
        let file = tempfile::tempfile().unwrap();
        a.send(&"first", &[]).unwrap();
        a.send(&"second", &[file.as_fd(), file.as_fd()]).unwrap();
        a.send(&"third", &[file.as_fd()]).unwrap();
        drop(a);
        let mut got = Vec::new();
        while let Some((text, fds)) = b.receive::<String>().unwrap() {
            got.push((text, fds.len()));
        }
        let want = [("first", 0), ("second", 2), ("third", 1)];
        assert_eq!(got, want.map(|(text, count)| (text.to_string(), count)));
    }

    #[test]
    fn channel_passes_descriptors_for_every_vport() {
        let (a, b) = UnixStream::pair().unwrap();
        let (mut a, mut b) = (Channel::new(a), Channel::new(b));
        let files: Vec<_> = (0..DESCRIPTORS_MAX).map(|_| tempfile::tempfile().unwrap()).collect();
        let mut fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        a.send(&"all", &fds).unwrap();
        a.send(&"one", &fds[..1]).unwrap();
        let (text, got) = b.receive::<String>().unwrap().unwrap();
        assert_eq!((text.as_str(), got.len()), ("all", DESCRIPTORS_MAX));
        for (sent, got) in files.iter().zip(&got) {
            let inode = |file: BorrowedFd<'_>| rustix::fs::fstat(file).unwrap().st_ino;
            assert_eq!(inode(sent.as_fd()), inode(got.as_fd()), "in order");
        }
        assert_eq!(b.receive::<String>().unwrap().unwrap().1.len(), 1);
        fds.push(files[0].as_fd());
        assert!(a.send(&"too many", &fds).is_err());
    }

    /// A caller's deadline holds against a peer that never
    /// accepts and against one that sends slowly.
    #[test]
    fn channel_deadline_holds_against_slow_peers() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("full.sock");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let wait = Duration::from_millis(300);
        let began = Instant::now();
        let mut connected = Vec::new();
        let error = loop {
            match Channel::connect_until(&path, Instant::now() + wait) {
                Ok(channel) => connected.push(channel),
                Err(error) => break error,
            }
            assert!(connected.len() < 10, "a queue of none");
        };
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
        // One byte each 50 ms, of a frame of a hundred.
        let (mut peer, _) = listener.accept().unwrap();
        let dribbling = std::thread::spawn(move || {
            for byte in [100, 0, 0, 0].into_iter().chain([b' '; 100]) {
                std::thread::sleep(Duration::from_millis(50));
                if peer.write_all(&[byte]).is_err() {
                    break;
                }
            }
        });
        let mut channel = connected.remove(0);
        channel.set_deadline(Instant::now() + wait);
        let error = channel.receive::<String>().unwrap_err();
        let kinds = [io::ErrorKind::WouldBlock, io::ErrorKind::TimedOut];
        assert!(kinds.contains(&error.kind()), "{error}");
        assert!(began.elapsed() < 10 * wait, "{:?}", began.elapsed());
        drop(channel);
        dribbling.join().unwrap();
    }

    #[test]
    fn oversized_frame_prefix_is_refused() {
        let mut reader = FrameReader::default();
        reader.extend(&u32::MAX.to_le_bytes());
        assert!(reader.next_frame().is_err());
    }

    #[test]
    fn a_peer_that_closes_inside_a_frame_is_an_error() {
        let (mut a, b) = UnixStream::pair().unwrap();
        a.write_all(&[5, 0, 0, 0, b'x']).unwrap();
        drop(a);
        assert!(Channel::new(b).receive::<String>().is_err());
    }

    proptest! {
        #[test]
        fn frame_reader_accepts_any_fragmentation(payloads: Vec<Vec<u8>>, cut in 1usize..9) {
            let mut stream = Vec::new();
            for payload in &payloads {
                stream.extend(frame(payload).unwrap());
            }
            let mut reader = FrameReader::default();
            let mut got = Vec::new();
            for piece in stream.chunks(cut) {
                reader.extend(piece);
                while let Some(frame) = reader.next_frame().unwrap() {
                    got.push(frame.to_vec());
                }
            }
            prop_assert_eq!(got, payloads);
            prop_assert!(reader.is_empty());
        }
    }
}
