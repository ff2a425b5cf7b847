//! The client: keeps a program's filters and queue settings across muxes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pdp_proto::slowpath::{Filter, FilterCounter, QueueSetting, QueueState, Welcome};

use crate::connection::{Error, FrameDestination, SlowPathChange, SlowPathConnection};

/// Longest time that a call takes, including the wait for an absent mux.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// Longest time for the greeting of a mux that listens, even if the call's time is over. Calls with
/// a shorter timeout use that.
const GREETING: Duration = Duration::from_secs(5);

/// Pauses between two attempts to connect.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// A slow path's side of the channel, with its wanted filters and queue settings.
///
/// After the first batch the mux has exactly these filters, and all other queues
/// are as their specs say. On each new connection the client sends them again, in
/// one batch that sweeps all others. Every call does that by itself. A program that
/// has nothing to do calls [`keep`](Self::keep) instead of sleeping.
///
/// A call takes at most [`TIMEOUT`], or the time given to
/// [`connect_within`](Self::connect_within), plus five seconds. During that time it
/// waits for an absent mux. If the mux disconnects this program, the call that
/// notices returns the reason ([`Error::Bye`]), and the next call reconnects.
#[derive(Debug)]
pub struct SlowPathSession {
    path: PathBuf,
    timeout: Duration,
    connection: Option<SlowPathConnection>,
    /// True if the wanted state was sent on this connection.
    is_told: bool,
    /// True after the first commit. Before, there is nothing to restore and nothing to sweep.
    wants: bool,
    wanted: BTreeMap<u32, Filter>,
    /// By vport and queue.
    queues: BTreeMap<(u8, u16), QueueSetting>,
    /// Pause before the next attempt to connect.
    pause: Duration,
    welcome: Welcome,
}

impl SlowPathSession {
    /// Connects to the mux, which listens at [`SOCKET`](crate::SOCKET) in a control guest.
    ///
    /// Earlier filters stay in force until the first batch.
    pub fn connect(path: impl AsRef<Path>) -> Result<Self, Error> {
        Self::connect_within(path, TIMEOUT)
    }

    /// Like [`connect`](Self::connect), with another time limit for each call.
    pub fn connect_within(path: impl AsRef<Path>, timeout: Duration) -> Result<Self, Error> {
        let mut this = Self {
            path: path.as_ref().into(),
            timeout,
            connection: None,
            is_told: false,
            wants: false,
            wanted: BTreeMap::new(),
            queues: BTreeMap::new(),
            pause: Duration::ZERO,
            welcome: Welcome::default(),
        };
        this.connected(Instant::now() + timeout)?;
        Ok(this)
    }

    /// Greeting of the last connection: vports, and limits of filters and counters.
    pub fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    /// The wanted filters, by their numbers.
    pub fn wanted(&self) -> &BTreeMap<u32, Filter> {
        &self.wanted
    }

    /// Begins a batch of changes that come into force together.
    pub fn batch(&mut self) -> Transaction<'_> {
        Transaction { slow_path: self, changes: BTreeMap::new(), queues: BTreeMap::new() }
    }

    /// Reads `count` counters from `first` on, all at one moment. A new mux counts from 0.
    pub fn counters(&mut self, first: u32, count: u32) -> Result<Vec<FilterCounter>, Error> {
        self.until_done(|this, deadline| this.synced(deadline)?.counters(first, count))
    }

    /// State of a vport's queues, in their order. Empty if the vport has one queue for all frames.
    pub fn queues(&mut self, vport: u8) -> Result<Vec<QueueState>, Error> {
        self.until_done(|this, deadline| this.synced(deadline)?.queues(vport))
    }

    /// The filters in force.
    pub fn list(&mut self) -> Result<Vec<Filter>, Error> {
        self.until_done(|this, deadline| this.synced(deadline)?.list())
    }

    /// Sends a frame, beginning with its Ethernet header, without FCS. There is no answer. The mux
    /// drops it if it has no room, and a frame in flight is lost when a mux goes.
    pub fn send(&mut self, frame: &[u8], destination: FrameDestination) -> Result<(), Error> {
        self.until_done(|this, deadline| this.synced(deadline)?.frame(destination, frame))
    }

    /// Keeps the mux at the wanted state for `time`.
    ///
    /// # Errors
    /// As soon as the mux disconnects this program. At the end, if there is no mux.
    pub fn keep(&mut self, time: Duration) -> Result<(), Error> {
        self.until(Instant::now() + time, |this, end| {
            this.connected(end)?;
            // Restoring the state may take a call's time, however short `time` is.
            this.synced(end.max(Instant::now() + this.timeout))?;
            this.connected(end)?.wait()
        })
    }

    fn until_done<T>(
        &mut self,
        act: impl FnMut(&mut Self, Instant) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.until(Instant::now() + self.timeout, act)
    }

    /// Calls `act`, and again on a new connection if its connection is gone.
    fn until<T>(
        &mut self,
        end: Instant,
        mut act: impl FnMut(&mut Self, Instant) -> Result<T, Error>,
    ) -> Result<T, Error> {
        loop {
            let result = act(self, end);
            match &result {
                Ok(_)
                | Err(
                    Error::Refused { .. }
                    | Error::Counters { .. }
                    | Error::Vport { .. }
                    | Error::Frame(_),
                ) => {
                    self.pause = Duration::ZERO;
                    return result;
                }
                Err(error) => {
                    self.connection = None;
                    self.pause = (self.pause * 2).clamp(PAUSE_MIN, PAUSE_MAX);
                    if !error.is_gone() || Instant::now() + self.pause >= end {
                        return result;
                    }
                }
            }
        }
    }

    /// Returns a connection.
    fn connected(&mut self, end: Instant) -> Result<&mut SlowPathConnection, Error> {
        let connection = match self.connection.take() {
            Some(connection) => connection,
            None => {
                self.is_told = false;
                loop {
                    let left = end.saturating_duration_since(Instant::now());
                    std::thread::sleep(self.pause.min(left));
                    let greeted = Instant::now() + self.timeout.min(GREETING);
                    match SlowPathConnection::open(&self.path, end.max(greeted)) {
                        Ok(connection) => break connection,
                        Err(error) => {
                            self.pause = (self.pause * 2).clamp(PAUSE_MIN, PAUSE_MAX);
                            if !error.is_gone() || Instant::now() + self.pause >= end {
                                return Err(error);
                            }
                        }
                    }
                }
            }
        };
        self.welcome = connection.welcome().clone();
        let connection = self.connection.insert(connection);
        connection.set_deadline(end);
        Ok(connection)
    }

    /// Returns a connection on which the mux has the wanted state.
    fn synced(&mut self, end: Instant) -> Result<&mut SlowPathConnection, Error> {
        self.connected(end)?;
        if self.wants && !self.is_told {
            let filters = self.wanted.values().copied().map(SlowPathChange::Set);
            let queues = self.queues.values().copied().map(SlowPathChange::Queue);
            let all: Vec<SlowPathChange> = filters.chain(queues).collect();
            self.connected(end)?.commit(all, true)?;
            self.is_told = true;
        }
        self.connected(end)
    }

    fn commit(
        &mut self,
        changes: &BTreeMap<u32, Option<Filter>>,
        queues: &BTreeMap<(u8, u16), QueueSetting>,
    ) -> Result<u32, Error> {
        let filters = self.until_done(|this, deadline| {
            this.connected(deadline)?;
            let sweep = !this.is_told;
            let mut all: Vec<SlowPathChange> = Vec::new();
            if sweep {
                let stays = this.wanted.values().filter(|it| !changes.contains_key(&it.id));
                all.extend(stays.copied().map(SlowPathChange::Set));
                let stays = this.queues.iter().filter(|it| !queues.contains_key(it.0));
                all.extend(stays.map(|it| SlowPathChange::Queue(*it.1)));
            }
            all.extend(queues.values().copied().map(SlowPathChange::Queue));
            all.extend(changes.iter().filter_map(|(id, filter)| match filter {
                Some(filter) => Some(SlowPathChange::Set(*filter)),
                None => (!sweep).then_some(SlowPathChange::Remove(*id)),
            }));
            let filters = this.connected(deadline)?.commit(all, sweep)?;
            this.is_told = true;
            Ok(filters)
        })?;
        self.wants = true;
        for (id, filter) in changes {
            match filter {
                Some(filter) => self.wanted.insert(*id, *filter),
                None => self.wanted.remove(id),
            };
        }
        self.queues.extend(queues);
        self.queues.retain(|_, it| (it.weight, it.frames, it.bytes) != (0, 0, 0));
        Ok(filters)
    }
}

/// Changes that come into force together or not at all.
/// Without [`commit`](Self::commit) they are discarded.
#[derive(Debug)]
#[must_use = "nothing is changed without commit()"]
pub struct Transaction<'a> {
    slow_path: &'a mut SlowPathSession,
    /// The last change of a number counts.
    changes: BTreeMap<u32, Option<Filter>>,
    queues: BTreeMap<(u8, u16), QueueSetting>,
}

impl Transaction<'_> {
    /// Adds this filter, or replaces the one with its number.
    pub fn set(mut self, filter: Filter) -> Self {
        self.changes.insert(filter.id, Some(filter));
        self
    }

    /// Removes the filter with this number, if there is one.
    pub fn remove(mut self, id: u32) -> Self {
        self.changes.insert(id, None);
        self
    }

    /// Sets a queue. A setting of zeros restores its spec's.
    pub fn queue(mut self, setting: QueueSetting) -> Self {
        self.queues.insert((setting.vport, setting.queue), setting);
        self
    }

    /// Removes all wanted filters.
    pub fn clear(mut self) -> Self {
        self.changes = self.slow_path.wanted.keys().map(|id| (*id, None)).collect();
        self
    }

    /// Brings the changes into force; returns the number of filters afterwards.
    ///
    /// # Errors
    /// After [`Error::Refused`] nothing has changed. After any other error the wanted state is
    /// unchanged too. The mux may have the changes, and loses them with the next call.
    pub fn commit(self) -> Result<u32, Error> {
        self.slow_path.commit(&self.changes, &self.queues)
    }
}
