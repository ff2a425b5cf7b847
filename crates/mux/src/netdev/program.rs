//! A user's program that is connected by memif.

use crate::channel::{PULL_FRAMES, PeerChannel, PeerConnection, PeerFault};
use crate::connections::{UNSURE_SLEEP_NS, WorkerConnections};
use crate::counters::{OuterReason, Reason};
use crate::memif::Memif;
use crate::netdev::{KEEP_FREE, NetdevContext, NetdevDriver};
use crate::packets::PacketBatch;

/// The program, while one is connected.
#[derive(Debug, Default)]
pub struct MemifNetdev(Option<Box<PeerConnection<Memif>>>);

impl MemifNetdev {
    /// Attaches a program's connection, whose doorbell is already
    /// watched. Returns the connection if another program is attached.
    pub fn attach(
        &mut self,
        link: Box<PeerConnection<Memif>>,
    ) -> Result<(), Box<PeerConnection<Memif>>> {
        if self.0.is_some() {
            return Err(link);
        }
        self.0 = Some(link);
        Ok(())
    }

    /// Detaches the connection with this number.
    pub fn detach(&mut self, epoch: u64, connections: &WorkerConnections) {
        if let Some(link) = self.0.take_if(|link| link.epoch == epoch) {
            connections.end(link, "gone", false);
        }
    }

    /// Ends the connection, if there is one.
    pub fn end(&mut self, connections: &WorkerConnections, reason: &str, fault: bool) {
        if let Some(link) = self.0.take() {
            connections.end(link, reason, fault);
        }
    }

    /// Calls `work` with the connection, and ends the connection if the peer
    /// broke the contract. `None` if there is no connection, or no longer one.
    fn work<T>(
        &mut self,
        connections: &WorkerConnections,
        work: impl FnOnce(&mut PeerConnection<Memif>) -> Result<T, PeerFault>,
    ) -> Option<T> {
        let worked = work(self.0.as_mut()?);
        if let Err(fault) = &worked {
            self.end(connections, fault, true);
        }
        worked.ok()
    }
}

impl NetdevDriver for MemifNetdev {
    fn receive(
        &mut self,
        room: usize,
        tools: &mut NetdevContext<'_>,
        frames: &mut PacketBatch,
    ) -> Option<u64> {
        let NetdevContext { packets, connections, counters, .. } = tools;
        let room = room.min(PULL_FRAMES).min(packets.at_hand().saturating_sub(KEEP_FREE));
        self.work(connections, |link| {
            link.channel.take(packets, room, |packet| {
                counters.stats.received += 1;
                match packet {
                    Some(packet) => frames.push(packet),
                    None => counters.drop(OuterReason::TooLong),
                }
            })
        });
        None
    }

    fn room(&mut self) -> usize {
        match &mut self.0 {
            Some(link) => link.channel.room(),
            None => usize::MAX,
        }
    }

    fn send(&mut self, tools: &mut NetdevContext<'_>, frames: &mut PacketBatch) -> Reason {
        let mut taken = 0;
        self.work(tools.connections, |link| {
            for packet in &*frames {
                if !link.channel.push_one(0, packet.bytes())? {
                    break;
                }
                taken += 1;
            }
            Ok(())
        });
        tools.counters.stats.sent += taken as u64;
        frames.drain(..taken).for_each(|packet| tools.packets.give(packet));
        if self.0.is_some() { Reason::ExternalRingFull } else { Reason::ExternalGone }
    }

    fn flush(&mut self, tools: &mut NetdevContext<'_>) {
        let alarm = &mut *tools.alarm;
        self.work(tools.connections, |link| link.flush(alarm, true));
    }

    fn arm(&mut self, tools: &mut NetdevContext<'_>) -> bool {
        let alarm = &mut *tools.alarm;
        self.work(tools.connections, |link| link.arm(alarm)).unwrap_or(true)
    }

    fn disarm(&mut self, now_ns: u64) {
        if let Some(link) = &mut self.0 {
            link.disarm(now_ns);
        }
    }

    fn sleep_ns(&self) -> u64 {
        if self.0.is_some() { UNSURE_SLEEP_NS } else { u64::MAX }
    }
}
