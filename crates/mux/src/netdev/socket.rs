//! Sockets on an interface: AF_XDP on the packet pool, and packet sockets.

use pdp_model::ExternalStats;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd};

use pdp_afxdp::{PacketSocket, Unread, XdpSocket};
use pdp_wire::offload;

use crate::counters::{OuterReason, Reason};
use crate::netdev::{KEEP_FREE, NetdevContext, NetdevDriver, RECEIVE_FRAMES};
use crate::packets::{PacketBatch, Packets};

/// Longest sleep while frames are being transmitted,
/// nanoseconds, so that their packets return soon.
const SENDING_SLEEP_NS: u64 = 1_000_000;

/// An AF_XDP socket. It counts a frame as sent when the kernel reports the transmission.
#[derive(Debug)]
pub struct XdpNetdev {
    /// The socket.
    pub socket: XdpSocket,
    /// The device has no hardware that completes what senders offload to it.
    pub is_virtual: bool,
}

impl NetdevDriver for XdpNetdev {
    fn receive(
        &mut self,
        _: usize,
        tools: &mut NetdevContext<'_>,
        frames: &mut PacketBatch,
    ) -> Option<u64> {
        let before = frames.len();
        tools.counters.stats.received += self.socket.receive(frames, RECEIVE_FRAMES) as u64;
        // AF_XDP does not report which checksums are incomplete. Packet sockets do.
        for packet in frames[before..].iter_mut().filter(|_| self.is_virtual) {
            offload::complete(packet.bytes_mut());
        }
        None
    }

    fn fill(&mut self, packets: &mut Packets) {
        let (free, keep) = packets.free_mut(KEEP_FREE);
        self.socket.fill(free, keep);
    }

    fn complete(&mut self, tools: &mut NetdevContext<'_>) {
        tools.counters.stats.sent += self.socket.complete(tools.back) as u64;
        tools.packets.give_sent(tools.back);
    }

    fn room(&mut self) -> usize {
        self.socket.room()
    }

    fn send(&mut self, tools: &mut NetdevContext<'_>, frames: &mut PacketBatch) -> Reason {
        tools.back.extend(frames.drain(..).filter_map(|it| self.socket.send(it).err()));
        mem::swap(frames, tools.back);
        Reason::ExternalRingFull
    }

    fn flush(&mut self, _: &mut NetdevContext<'_>) {
        if self.socket.sending() > 0 {
            self.socket.flush();
        }
    }

    fn socket(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn sleep_ns(&self) -> u64 {
        if self.socket.sending() > 0 { SENDING_SLEEP_NS } else { u64::MAX }
    }

    fn count(&self, stats: &mut ExternalStats) {
        stats.kernel_dropped += self.socket.kernel_dropped();
    }

    fn close(self: Box<Self>) -> PacketBatch {
        self.socket.close()
    }
}

impl NetdevDriver for PacketSocket {
    fn receive(
        &mut self,
        _: usize,
        tools: &mut NetdevContext<'_>,
        frames: &mut PacketBatch,
    ) -> Option<u64> {
        let before = frames.len();
        let (free, keep) = tools.packets.free_mut(KEEP_FREE);
        let Unread { too_long, not_cut } =
            PacketSocket::receive(self, free, keep, RECEIVE_FRAMES, frames);
        tools.counters.stats.received += (frames.len() - before + too_long + not_cut) as u64;
        tools.counters.drop_all(OuterReason::TooLong, too_long as u64);
        tools.counters.drop_all(OuterReason::NotCut, not_cut as u64);
        None
    }

    fn room(&mut self) -> usize {
        PacketSocket::room(self)
    }

    fn send(&mut self, tools: &mut NetdevContext<'_>, frames: &mut PacketBatch) -> Reason {
        tools.back.extend(frames.drain(..).filter_map(|it| PacketSocket::send(self, it).err()));
        mem::swap(frames, tools.back);
        Reason::ExternalRingFull
    }

    fn flush(&mut self, tools: &mut NetdevContext<'_>) {
        if self.sending() > 0 {
            let sent = PacketSocket::flush(self, tools.back);
            tools.packets.give_all(tools.back);
            tools.counters.stats.sent += sent.taken as u64;
            tools.counters.drop_all(OuterReason::Refused, sent.refused as u64);
        }
    }

    fn socket(&self) -> Option<BorrowedFd<'_>> {
        Some(self.as_fd())
    }

    fn sleep_ns(&self) -> u64 {
        if self.sending() > 0 { SENDING_SLEEP_NS } else { u64::MAX }
    }

    fn count(&self, stats: &mut ExternalStats) {
        stats.kernel_dropped += self.kernel_dropped();
    }

    fn close(self: Box<Self>) -> PacketBatch {
        PacketSocket::close(*self)
    }
}
