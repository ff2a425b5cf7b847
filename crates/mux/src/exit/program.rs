//! A program of the user's, by memif.

use crate::connections::{Connections, UNSURE_SLEEP_NS};
use crate::counters::{OuterReason, Reason};
use crate::exit::{Exit, KEEP_FREE, Tools};
use crate::lane::{Fault, Lane, Link, PULL_FRAMES};
use crate::memif::Memif;
use crate::packets::Batch;

/// The program, while one is connected.
#[derive(Debug, Default)]
pub struct Program(Option<Box<Link<Memif>>>);

impl Program {
    /// Takes in the connection of a program, whose doorbell is watched already; gives it back if one is there.
    pub fn attach(&mut self, link: Box<Link<Memif>>) -> Result<(), Box<Link<Memif>>> {
        if self.0.is_some() {
            return Err(link);
        }
        self.0 = Some(link);
        Ok(())
    }

    /// Lets go of the connection with this number.
    pub fn detach(&mut self, epoch: u64, connections: &Connections) {
        if let Some(link) = self.0.take_if(|link| link.epoch == epoch) {
            connections.end(link, "gone", false);
        }
    }

    /// Ends the connection, if there is one.
    pub fn end(&mut self, connections: &Connections, reason: &str, fault: bool) {
        if let Some(link) = self.0.take() {
            connections.end(link, reason, fault);
        }
    }

    /// Does something by the connection, and ends it if it breaks the contract. `None`: there is none now.
    fn work<T>(
        &mut self,
        connections: &Connections,
        work: impl FnOnce(&mut Link<Memif>) -> Result<T, Fault>,
    ) -> Option<T> {
        let worked = work(self.0.as_mut()?);
        if let Err(fault) = &worked {
            self.end(connections, fault, true);
        }
        worked.ok()
    }
}

impl Exit for Program {
    fn receive(&mut self, room: usize, tools: &mut Tools<'_>, frames: &mut Batch) -> Option<u64> {
        let Tools { packets, connections, counters, .. } = tools;
        let room = room.min(PULL_FRAMES).min(packets.at_hand().saturating_sub(KEEP_FREE));
        self.work(connections, |link| {
            link.lane.take(packets, room, |packet| {
                counters.received += 1;
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
            Some(link) => link.lane.room(),
            None => usize::MAX,
        }
    }

    fn send(&mut self, tools: &mut Tools<'_>, frames: &mut Batch) -> Reason {
        let mut taken = 0;
        self.work(tools.connections, |link| {
            for packet in &*frames {
                if !link.lane.push_one(0, packet.bytes())? {
                    break;
                }
                taken += 1;
            }
            Ok(())
        });
        tools.counters.sent += taken as u64;
        frames.drain(..taken).for_each(|packet| tools.packets.give(packet));
        if self.0.is_some() { Reason::ExternalRingFull } else { Reason::ExternalGone }
    }

    fn flush(&mut self, tools: &mut Tools<'_>) {
        let alarm = &mut *tools.alarm;
        self.work(tools.connections, |link| link.flush(alarm, true));
    }

    fn arm(&mut self, tools: &mut Tools<'_>) -> bool {
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
