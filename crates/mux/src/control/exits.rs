//! Exits of external interfaces: made of what pdpd gives, and on which worker they are.

use std::io::{Read, Seek};
use std::mem::discriminant;
use std::os::fd::OwnedFd;

use pdp_afxdp::{PacketSocket, Socket};
use pdp_proto::mux;
use rtrb::RingBuffer;

use crate::classify::Classifier;
use crate::control::base::Control;
use crate::control::keeper::Refusal;
use crate::control::plan::{KnownExternal, Owner, State};
use crate::core::Core;
use crate::exit::Exit;
use crate::exit::path::{PATH_FRAMES, Path};
use crate::exit::program::Program;
use crate::exit::socket::Xdp;
use crate::generator::{FRAMES_BYTES_MAX, Frames, Generator};
use crate::packets::Batch;
use crate::ringers::RungFor;
use crate::scheduler::Scheduler;

/// Packets that a worker takes back between two rounds.
const RETURNED_MAX: usize = 1024;

/// What is new about an external interface.
pub enum New {
    /// At most its addresses and sizes.
    Nothing,
    /// All of its exits.
    Exits(Vec<Box<dyn Exit>>),
    /// What a generator makes.
    Frames(Option<Frames>),
}

/// What an external interface had.
pub struct Taken {
    /// All of its exits.
    pub exits: Vec<Box<dyn Exit>>,
    /// Its scheduler, with what waits there.
    pub scheduler: Option<Box<Scheduler>>,
}

impl Control {
    /// What is new about an external interface that was as `known` says, with these descriptors.
    pub fn exits(
        &self,
        known: Option<&mux::External>,
        spec: &mux::External,
        fds: Vec<OwnedFd>,
    ) -> Result<New, String> {
        let of_no_use = |error: &dyn std::error::Error| {
            format!("a descriptor of external {} is of no use: {}", spec.name, chain(error))
        };
        match &spec.outlet {
            mux::Outlet::Xdp(_) | mux::Outlet::Packet(_)
                if fds.is_empty()
                    && known.is_none_or(|known| {
                        discriminant(&known.outlet) == discriminant(&spec.outlet)
                    }) =>
            {
                Ok(New::Nothing)
            }
            mux::Outlet::Xdp(device) => exits(fds, |fd| {
                let socket = Socket::new(fd, &self.pool).map_err(|error| of_no_use(&error))?;
                Ok(Xdp { socket, is_virtual: device.is_virtual })
            }),
            mux::Outlet::Packet(_) => {
                exits(fds, |fd| PacketSocket::new(fd).map_err(|error| of_no_use(&error)))
            }
            mux::Outlet::Memif { .. } => {
                let same = known.is_some_and(|known| known.outlet == spec.outlet);
                Ok(if same { New::Nothing } else { New::Exits(vec![Box::<Program>::default()]) })
            }
            mux::Outlet::Generator(generator) => {
                let mut frames = None;
                if let Some(fd) = fds.into_iter().next() {
                    let mut file = std::fs::File::from(fd);
                    let mut bytes = Vec::new();
                    let limit = FRAMES_BYTES_MAX as u64 + 1;
                    let read =
                        file.rewind().and_then(|()| file.take(limit).read_to_end(&mut bytes));
                    read.map_err(|error| of_no_use(&error))?;
                    let parsed = Frames::parse(&bytes);
                    frames = Some(parsed.map_err(|it| format!("external {}: {it}", spec.name))?);
                }
                Ok(match known.map(|known| &known.outlet) {
                    Some(mux::Outlet::Generator(_)) => New::Frames(frames),
                    _ => {
                        let frames = frames.unwrap_or_default();
                        let generator = Generator::new(generator.clone(), frames);
                        New::Exits(vec![Box::new(generator)])
                    }
                })
            }
        }
    }

    /// Takes all exits of the external interface in `slot` away, and before them the ways of other workers there. What
    /// these had sent there goes out first, as far as there is room.
    pub fn take_exits(&self, slot: usize) -> Result<Taken, String> {
        for worker in self.workers.iter() {
            worker.call(move |it| it.core.external(slot).map(|it| it.exits.close_paths()))?;
        }
        let mut taken = Taken { exits: vec![], scheduler: None };
        for worker in self.workers.iter() {
            let of_worker = worker.call(move |worker| {
                if let Some((exits, mut tools)) = worker.core.exits(slot) {
                    tools.alarm.owner = RungFor::External(slot);
                    exits.flush(&mut tools);
                }
                let Core { externals, packets, connections, .. } = &mut worker.core;
                let exits = &mut externals.get_mut(slot)?.as_mut()?.exits;
                if let Some(program) = exits.find::<Program>() {
                    program.end(connections, "the external interface was removed", false);
                }
                Some((exits.take(packets), exits.scheduler.take()))
            })?;
            let Some((exits, scheduler)) = of_worker else { continue };
            taken.exits.extend(exits);
            taken.scheduler = taken.scheduler.or(scheduler);
        }
        Ok(taken)
    }

    /// Gives the external interface in `slot` its scheduler, if it has or had a capacity, and exits, each where it
    /// belongs.
    pub fn add_exits(
        &self,
        slot: usize,
        known: &KnownExternal,
        scheduler: Option<Box<Scheduler>>,
        exits: Vec<Box<dyn Exit>>,
    ) -> Result<(), String> {
        self.workers[known.worker].call(move |worker| {
            if let Some(external) = worker.core.external(slot) {
                external.exits.scheduler = scheduler;
            }
        })?;
        for (index, exit) in exits.into_iter().enumerate() {
            self.add_exit(slot, known.owner(index, self.workers.len()), exit)?;
        }
        Ok(())
    }

    /// Has exits where they belong now, if they are many.
    pub fn spread_exits(&self, slot: usize, known: &KnownExternal) -> Result<(), String> {
        if known.outlets < 2 || self.workers.len() < 2 {
            return Ok(());
        }
        let Taken { exits, scheduler } = self.take_exits(slot)?;
        self.add_exits(slot, known, scheduler, exits)
    }

    /// Has the scheduler of an external interface go by the capacity that it has now.
    pub fn set_capacity(&self, slot: usize, known: &KnownExternal) -> Result<(), String> {
        let Some(capacity) = &known.capacity else { return Ok(()) };
        let bps = known.spec.capacity_bps;
        capacity.set(bps);
        self.workers[known.worker].call(move |worker| {
            if let Some(external) = worker.core.external(slot) {
                external.exits.scheduler.get_or_insert_default().set_capacity(bps);
            }
        })
    }

    /// Closes exits with no worker waiting for it, and gives the packets that they held back.
    pub fn close(&self, exits: Vec<Box<dyn Exit>>) -> Result<(), String> {
        self.give_back(exits.into_iter().flat_map(|exit| exit.close()).collect())
    }

    /// Gives packets back.
    pub fn give_back(&self, mut packets: Batch) -> Result<(), String> {
        while !packets.is_empty() {
            let mut some = packets.split_off(packets.len().saturating_sub(RETURNED_MAX));
            self.workers[0].call(move |worker| {
                worker.core.packets.give_all(&mut some);
                some
            })?;
        }
        Ok(())
    }

    /// Gives an exit to `owner`, and the other workers ways to it.
    pub fn add_exit(&self, slot: usize, owner: usize, exit: Box<dyn Exit>) -> Result<(), String> {
        let mut inboxes = Vec::new();
        for other in self.workers.iter().filter(|other| other.number != owner) {
            let (producer, consumer) = RingBuffer::new(PATH_FRAMES);
            inboxes.push(consumer);
            let wake = self.workers[owner].wake.clone();
            other.call(move |worker| {
                if let Some(external) = worker.core.external(slot) {
                    external.exits.add_path(Path::new(producer, wake));
                }
            })?;
        }
        self.workers[owner].call(move |worker| {
            if let Some(external) = worker.core.external(slot) {
                external.exits.add(exit, inboxes);
            }
        })
    }

    /// Has external interfaces where the vnets are that get all of their frames. A program there is
    /// disconnected, and comes again.
    pub fn bring_home(&self, state: &mut State, classifier: &Classifier) -> Result<(), Refusal> {
        for (slot, worker) in state.astray(classifier) {
            let Some(known) = &mut state.externals[slot] else { continue };
            known.worker = worker;
            let owner = Owner::External(known.spec.name.clone());
            self.keeper.commit(self.keeper.prepare(owner, known.expected(slot), &[])?);
            let Taken { exits, scheduler } = self.take_exits(slot)?;
            self.add_exits(slot, known, scheduler, exits)?;
        }
        Ok(())
    }
}

/// Exits of these descriptors.
fn exits<E: Exit>(
    fds: Vec<OwnedFd>,
    make: impl FnMut(OwnedFd) -> Result<E, String>,
) -> Result<New, String> {
    let exits: Result<Vec<_>, _> = fds.into_iter().map(make).collect();
    Ok(New::Exits(exits?.into_iter().map(|exit| Box::new(exit) as Box<dyn Exit>).collect()))
}

/// An error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        None => error.to_string(),
        Some(source) => format!("{error}: {}", chain(source)),
    }
}
