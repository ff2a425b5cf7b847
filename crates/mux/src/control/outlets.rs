//! Outlets of external interfaces: made of what pdpd gives, and on which worker they are.

use std::io::{Read, Seek};
use std::mem::discriminant;
use std::os::fd::OwnedFd;

use pdp_afxdp::{PacketSocket, Socket};
use pdp_proto::mux;
use rtrb::RingBuffer;

use crate::classify::Classifier;
use crate::control::base::Control;
use crate::control::keeper::Refusal;
use crate::control::plan::{Owner, State};
use crate::core::Core;
use crate::external::{Outlet, PATH_FRAMES, Path, Queue};
use crate::generator::{FRAMES_BYTES_MAX, Frames, Generator};
use crate::worker::Worker;

/// What is new about an external interface.
pub enum New {
    /// At most its addresses and sizes.
    Nothing,
    /// All of its outlets.
    Outlets(Vec<Outlet>),
    /// What a generator makes.
    Frames(Option<Frames>),
}

impl Control {
    /// What is new about an external interface that was as `known` says, with these descriptors.
    pub fn outlets(
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
            mux::Outlet::Xdp(_) => {
                let sockets = fds.into_iter().map(|fd| Socket::new(fd, &self.pool));
                let sockets: Result<Vec<_>, _> = sockets.collect();
                let sockets = sockets.map_err(|error| of_no_use(&error))?;
                Ok(New::Outlets(sockets.into_iter().map(Box::new).map(Outlet::Xdp).collect()))
            }
            mux::Outlet::Packet(_) => {
                let sockets: Result<Vec<_>, _> = fds.into_iter().map(PacketSocket::new).collect();
                let sockets = sockets.map_err(|error| of_no_use(&error))?;
                Ok(New::Outlets(sockets.into_iter().map(Box::new).map(Outlet::Packet).collect()))
            }
            mux::Outlet::Memif { .. } => {
                let same = known.is_some_and(|known| known.outlet == spec.outlet);
                Ok(if same { New::Nothing } else { New::Outlets(vec![Outlet::Memif(None)]) })
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
                        New::Outlets(vec![Outlet::Generator(Box::new(generator))])
                    }
                })
            }
        }
    }

    /// Has no worker send to the outlets of others any more; after that their owners close them.
    pub fn close_paths(&self, slot: usize) -> Result<(), String> {
        self.workers.iter().try_for_each(|worker| {
            worker.call(move |worker| {
                if let Some(external) = worker.core.external(slot) {
                    external.close_paths();
                }
            })
        })
    }

    /// Gives an outlet to `owner`, and the other workers ways to it.
    pub fn add_outlet(&self, slot: usize, owner: usize, outlet: Outlet) -> Result<(), String> {
        let mut inboxes = Vec::new();
        for other in self.workers.iter().filter(|other| other.number != owner) {
            let (producer, consumer) = RingBuffer::new(PATH_FRAMES);
            inboxes.push(consumer);
            let wake = self.workers[owner].wake.clone();
            other.call(move |worker| {
                if let Some(external) = worker.core.external(slot) {
                    external.add_path(Path::new(producer, wake));
                }
            })?;
        }
        self.workers[owner].call(move |worker| {
            if let Some(external) = worker.core.external(slot) {
                external.add_queue(Queue { outlet, inboxes });
            }
        })
    }

    /// Has external interfaces where the vnets are that get all of their frames. A program there is
    /// disconnected, and comes again.
    pub fn bring_home(&self, state: &mut State, classifier: &Classifier) -> Result<(), Refusal> {
        for (slot, worker) in state.astray(classifier) {
            let Some(known) = &mut state.externals[slot] else { continue };
            let was = std::mem::replace(&mut known.worker, worker);
            let owner = Owner::External(known.spec.name.clone());
            self.keeper.commit(self.keeper.prepare(owner, known.expected(slot))?);
            self.close_paths(slot)?;
            let generator = self.workers[was].call(move |it| close_external(it, slot))?;
            let outlet = generator.map_or(Outlet::Memif(None), Outlet::Generator);
            self.add_outlet(slot, worker, outlet)?;
        }
        Ok(())
    }
}

/// Ends a worker's outlets of an external interface, and its ways to others'. Returns its generator.
pub fn close_external(worker: &mut Worker, slot: usize) -> Option<Box<Generator>> {
    let Core { externals, packets, connections, .. } = &mut worker.core;
    externals.get_mut(slot)?.as_mut()?.close(packets, connections)
}

/// An error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        None => error.to_string(),
        Some(source) => format!("{error}: {}", chain(source)),
    }
}
