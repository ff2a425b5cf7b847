//! Frames that pass interfaces of a network namespace, as its kernel sees them.
//!
//! Captures miss frames that XDP programs redirect or drop, and frames sent past traffic control.
//!
//! Source: packet(7); the kernel's Documentation/networking/filter.rst,
//! for its extensions of classic BPF.

use std::io;
use std::mem::{size_of, zeroed};
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, setsockopt, socket, sockopt};
use pdp_wire::bpf::{BpfProgram, Instruction};
use pdp_wire::vlan::TAG_BYTES;

use crate::error::{NetContext, Result};
use crate::packet::{bind, set};

/// Receive buffer, bytes, with the kernel's own overhead: enough for a thousand short frames.
const WAITING_BYTES: usize = 1 << 20;

/// Longest frame that is captured whole, bytes, without its tag. With
/// the tag, it reaches the limit in pcap's header.
const FRAME_BYTES_MAX: usize = 0xffff - TAG_BYTES;

/// Bytes before a VLAN tag: MAC addresses.
const ADDRESSES_BYTES: usize = 12;

/// Frames to capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureScope {
    /// All frames of the interface of this index.
    Of(u32),
    /// Frames that the interface of this index receives.
    Received(u32),
    /// Frames that all interfaces send.
    Sent,
}

/// Capture of frames since it was opened. Frames wait in the receive buffer
/// until they are read; excess frames are missed.
#[derive(Debug)]
pub struct Capture {
    socket: OwnedFd,
    program: Option<BpfProgram>,
}

/// Metadata of a captured frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameInfo {
    /// Time of capture, nanoseconds since 1970.
    pub at_ns: u64,
    /// Index of the interface.
    pub interface: u32,
    /// Whole length of the frame, bytes.
    pub length: u32,
    /// Direction and recipient.
    pub to: FrameDirection,
}

/// Direction of a frame, and its recipient by destination address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameDirection {
    /// Received: for the interface itself, or for a group that it belongs to.
    Here,
    /// Received: for another station.
    Another,
    /// Sent.
    Out,
}

/// Buffer for one frame, and the frame in it.
#[derive(Debug)]
pub struct CaptureBuffer {
    /// Space for a VLAN tag, then the frame.
    bytes: Box<[u8]>,
    from: usize,
    to: usize,
}

impl Default for CaptureBuffer {
    fn default() -> Self {
        Self { bytes: vec![0; TAG_BYTES + FRAME_BYTES_MAX].into(), from: 0, to: 0 }
    }
}

impl Deref for CaptureBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.from..self.to]
    }
}

impl CaptureBuffer {
    /// Takes over a frame of `count` bytes that was read, and restores its tag.
    fn set(&mut self, count: usize, tag: Option<[u8; TAG_BYTES]>) {
        (self.from, self.to) = (TAG_BYTES, TAG_BYTES + count.min(FRAME_BYTES_MAX));
        if let Some(tag) = tag.filter(|_| count >= ADDRESSES_BYTES) {
            self.from = 0;
            self.bytes.copy_within(TAG_BYTES..TAG_BYTES + ADDRESSES_BYTES, 0);
            self.bytes[ADDRESSES_BYTES..ADDRESSES_BYTES + TAG_BYTES].copy_from_slice(&tag);
        }
    }
}

impl Capture {
    /// Opens a capture in the calling thread's network namespace, where it stays. `program` selects
    /// the frames; it sees them with their VLAN tags.
    ///
    /// # Errors
    /// There is no such interface, or the caller lacks the privilege.
    pub fn open(which: CaptureScope, program: Option<BpfProgram>) -> Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        // Without a protocol, the socket receives nothing until it is bound.
        let socket = socket(AddressFamily::Packet, SockType::Raw, flags, None)
            .on("open", "a packet socket")?;
        let on: libc::c_int = 1;
        let index = match which {
            CaptureScope::Of(index) => index,
            CaptureScope::Received(index) => {
                set(&socket, libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, &on)
                    .on("ignore frames sent on interface", index)?;
                index
            }
            CaptureScope::Sent => 0,
        };
        let mut filter = filter(which, program.as_ref());
        if !filter.is_empty() {
            // At most 3 + 3 + INSTRUCTIONS_MAX instructions.
            let len = filter.len() as u16;
            let attached = libc::sock_fprog { len, filter: filter.as_mut_ptr() };
            let set = set(&socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &attached);
            // The kernel rejects programs that read memory before writing it. Such
            // a program runs only here, in user space.
            if program.is_none() {
                set.on("attach the filter to interface", index)?;
            }
        }
        set(&socket, libc::SOL_PACKET, libc::PACKET_AUXDATA, &on)
            .on("ask for tags of interface", index)?;
        set(&socket, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, &on)
            .on("ask for times of interface", index)?;
        // Without the privilege, the buffer is smaller and more frames are missed.
        let _ = setsockopt(&socket, sockopt::RcvBufForce, &WAITING_BYTES);
        bind(&socket, index).on("bind to interface", index)?;
        Ok(Self { socket, program })
    }

    /// Reads the next waiting frame that the program matches into `frame`; returns `None` if there
    /// is none. Examines at most `left` frames, and subtracts them from it.
    pub fn next(&self, frame: &mut CaptureBuffer, left: &mut u32) -> io::Result<Option<FrameInfo>> {
        while *left > 0 {
            *left -= 1;
            let Some(seen) = self.receive(frame)? else { return Ok(None) };
            // The kernel's filter has not seen tags.
            if self.program.as_ref().is_none_or(|program| program.matches(frame)) {
                return Ok(Some(seen));
            }
        }
        Ok(None)
    }

    fn receive(&self, frame: &mut CaptureBuffer) -> io::Result<Option<FrameInfo>> {
        let room = &mut frame.bytes[TAG_BYTES..];
        let mut control = [0u64; 32];
        // SAFETY: all of these are plain integers and pointers, for which zero is a value.
        let (mut from, mut message): (libc::sockaddr_ll, libc::msghdr) =
            unsafe { (zeroed(), zeroed()) };
        let mut bytes = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
        message.msg_name = (&raw mut from).cast();
        message.msg_namelen = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        message.msg_iov = &raw mut bytes;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control);
        // SAFETY: name, bytes and control are writable for the lengths given, which are their own,
        // during the call.
        let count = unsafe { libc::recvmsg(self.socket.as_raw_fd(), &raw mut message, 0) };
        let Ok(count) = usize::try_from(count) else {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock => Ok(None),
                // The interface is down; the capture continues once it is up.
                _ if error.raw_os_error() == Some(libc::ENETDOWN) => Ok(None),
                _ => Err(error),
            };
        };
        let (mut at_ns, mut length, mut tag) = (0, 0, None);
        // SAFETY: the message is as the kernel left it, with `control` still there.
        let mut header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
        while !header.is_null() {
            // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR give null or a whole header inside of
            // `control`, where the kernel wrote as much data as its kind has.
            let (level, kind, data) =
                unsafe { ((*header).cmsg_level, (*header).cmsg_type, libc::CMSG_DATA(header)) };
            match (level, kind) {
                (libc::SOL_SOCKET, libc::SO_TIMESTAMPNS) => {
                    // SAFETY: as above; read whatever its alignment.
                    let at: libc::timespec =
                        unsafe { data.cast::<libc::timespec>().read_unaligned() };
                    at_ns = at.tv_sec as u64 * 1_000_000_000 + at.tv_nsec as u64;
                }
                (libc::SOL_PACKET, libc::PACKET_AUXDATA) => {
                    // SAFETY: as above; read whatever its alignment.
                    let more = unsafe { data.cast::<libc::tpacket_auxdata>().read_unaligned() };
                    let ([a, b], [c, d]) =
                        (more.tp_vlan_tpid.to_be_bytes(), more.tp_vlan_tci.to_be_bytes());
                    let has_tag = more.tp_status & libc::TP_STATUS_VLAN_VALID != 0;
                    tag = has_tag.then_some([a, b, c, d]);
                    length = more.tp_len + tag.map_or(0, |tag| tag.len() as u32);
                }
                _ => {}
            }
            // SAFETY: as above.
            header = unsafe { libc::CMSG_NXTHDR(&raw const message, header) };
        }
        frame.set(count, tag);
        let to = match from.sll_pkttype {
            libc::PACKET_OUTGOING => FrameDirection::Out,
            libc::PACKET_OTHERHOST => FrameDirection::Another,
            _ => FrameDirection::Here,
        };
        Ok(Some(FrameInfo { at_ns, interface: from.sll_ifindex as u32, length, to }))
    }

    /// True if the captured interface still exists.
    pub fn is_bound(&self) -> bool {
        // SAFETY: integers, for which zero is a value.
        let mut bound: libc::sockaddr_ll = unsafe { zeroed() };
        let mut bytes = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: `bound` is writable for the length given, which is its own, during the call
        // alone.
        let result = unsafe {
            libc::getsockname(self.socket.as_raw_fd(), (&raw mut bound).cast(), &mut bytes)
        };
        result == 0 && bound.sll_ifindex >= 0
    }

    /// Returns the count of frames missed since the last call.
    pub fn missed(&self) -> io::Result<u32> {
        // SAFETY: integers, for which zero is a value.
        let mut counted: libc::tpacket_stats = unsafe { zeroed() };
        let mut bytes = size_of::<libc::tpacket_stats>() as libc::socklen_t;
        // SAFETY: `counted` is writable for the length given, which is its own, during the call
        // alone.
        let result = unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_STATISTICS,
                (&raw mut counted).cast(),
                &mut bytes,
            )
        };
        if result == 0 { Ok(counted.tp_drops) } else { Err(io::Error::last_os_error()) }
    }
}

impl AsFd for Capture {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Instructions of classic BPF: load a word, compare the accumulator with a constant, return a
/// constant, return the accumulator.
const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const COMPARE: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
const RETURN_COMPUTED: u16 = (libc::BPF_RET | libc::BPF_A) as u16;

/// Offsets of the kernel's metadata that is not in the frame.
const PACKET_TYPE: u32 = (libc::SKF_AD_OFF + libc::SKF_AD_PKTTYPE) as u32;
const HAS_TAG: u32 = (libc::SKF_AD_OFF + libc::SKF_AD_VLAN_TAG_PRESENT) as u32;

/// Returns the socket's kernel filter. The kernel has already removed a VLAN
/// tag from the frame. So the filter passes tagged frames, and the reader runs
/// the program on them after restoring the tag.
fn filter(which: CaptureScope, program: Option<&BpfProgram>) -> Vec<libc::sock_filter> {
    let instruction = |code, jt, jf, k| Instruction { code, jt, jf, k };
    let mut all = Vec::new();
    if which == CaptureScope::Sent {
        let out = libc::PACKET_OUTGOING.into();
        all.push(instruction(LOAD, 0, 0, PACKET_TYPE));
        all.push(instruction(COMPARE, 1, 0, out));
        all.push(instruction(RETURN, 0, 0, 0));
    }
    // A program that returns a computed length may truncate a frame, which then might no longer
    // match. The kernel does not run such programs.
    let computes = |it: &Instruction| it.code == RETURN_COMPUTED;
    match program.filter(|program| !program.instructions().iter().any(computes)) {
        Some(program) => {
            all.push(instruction(LOAD, 0, 0, HAS_TAG));
            all.push(instruction(COMPARE, 1, 0, 0));
            all.push(instruction(RETURN, 0, 0, u32::MAX));
            // Whole frames, whatever length the program returns.
            let whole = |it: &Instruction| match *it {
                Instruction { code: RETURN, k: 1.., .. } => Instruction { k: u32::MAX, ..*it },
                other => other,
            };
            all.extend(program.instructions().iter().map(whole));
        }
        None if all.is_empty() => {}
        None => all.push(instruction(RETURN, 0, 0, u32::MAX)),
    }
    let as_kernel =
        |it: Instruction| libc::sock_filter { code: it.code, jt: it.jt, jf: it.jf, k: it.k };
    all.into_iter().map(as_kernel).collect()
}
