//! The client: what a program wants, kept across muxes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pdp_proto::slowpath::{Counter, Filter, QueueSetting, QueueState, Welcome};

use crate::connection::{Change, Connection, Error, Way};

/// Longest time that a call takes, with the wait for a mux that is away.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// Time that a mux which listens has for its greeting, though the call's be over; less where calls have less.
const GREETING: Duration = Duration::from_secs(5);

/// Pauses between two attempts to connect.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// A slow path's side of the channel, with the filters that it wants, and how it wants queues to be.
///
/// After its first batch the mux has these filters and no others, and other queues are as their specs say: they are said again, all in one batch that sweeps what is
/// not among them, wherever a connection is new. All calls do that by themselves; a program that has nothing to do calls
/// [`keep`](Self::keep) in place of sleeping.
///
/// A call ends within [`TIMEOUT`], or what [`connect_within`](Self::connect_within) says, and five seconds. A mux that is
/// away is waited for meanwhile. Where the mux disconnects this program, the call that finds out says why
/// ([`Error::Bye`]), and the next one connects again.
#[derive(Debug)]
pub struct SlowPath {
    path: PathBuf,
    timeout: Duration,
    connection: Option<Connection>,
    /// Whether the mux has been told on this connection what is wanted.
    is_told: bool,
    /// Whether anything was wanted yet: else there is nothing to bring back, and nothing to sweep.
    wants: bool,
    wanted: BTreeMap<u32, Filter>,
    /// By vport and queue.
    queues: BTreeMap<(u8, u16), QueueSetting>,
    /// Before the next attempt to connect.
    pause: Duration,
    welcome: Welcome,
}

impl SlowPath {
    /// Connects to the mux, which listens at [`SOCKET`](crate::SOCKET) in a control guest.
    ///
    /// Filters of before are in force until the first batch is.
    pub fn connect(path: impl AsRef<Path>) -> Result<Self, Error> {
        Self::connect_within(path, TIMEOUT)
    }

    /// The same with another bound of time for each call.
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

    /// What there was at the last connection: vports, and how many filters and counters there may be.
    pub fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    /// The filters that are wanted, by their numbers.
    pub fn wanted(&self) -> &BTreeMap<u32, Filter> {
        &self.wanted
    }

    /// Begins changes that come into force together.
    pub fn batch(&mut self) -> Batch<'_> {
        Batch { slow_path: self, changes: BTreeMap::new(), queues: BTreeMap::new() }
    }

    /// What counters have, `count` from `first` on, all at one moment. A new mux counts from 0.
    pub fn counters(&mut self, first: u32, count: u32) -> Result<Vec<Counter>, Error> {
        self.until_done(|this, deadline| this.told(deadline)?.counters(first, count))
    }

    /// How the queues of a vport are, in their order; none, where frames have one for all.
    pub fn queues(&mut self, vport: u8) -> Result<Vec<QueueState>, Error> {
        self.until_done(|this, deadline| this.told(deadline)?.queues(vport))
    }

    /// The filters that are in force.
    pub fn list(&mut self) -> Result<Vec<Filter>, Error> {
        self.until_done(|this, deadline| this.told(deadline)?.list())
    }

    /// Sends a frame, from Ethernet's header on, without checksum. It is not answered: one that there is no room for is
    /// dropped, and one that was under way when a mux went is lost.
    pub fn send(&mut self, frame: &[u8], way: Way) -> Result<(), Error> {
        self.until_done(|this, deadline| this.told(deadline)?.frame(way, frame))
    }

    /// For so long, keeps the mux at what is wanted.
    ///
    /// # Errors
    /// As soon as the mux disconnects this program; at the end, where no mux is there.
    pub fn keep(&mut self, time: Duration) -> Result<(), Error> {
        self.until(Instant::now() + time, |this, end| {
            this.connected(end)?;
            // What is brought back has a call's time, however short this is.
            this.told(end.max(Instant::now() + this.timeout))?;
            this.connected(end)?.wait()
        })
    }

    fn until_done<T>(
        &mut self,
        act: impl FnMut(&mut Self, Instant) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.until(Instant::now() + self.timeout, act)
    }

    /// Acts, again on a new connection where the one that it was on is gone.
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

    /// A connection.
    fn connected(&mut self, end: Instant) -> Result<&mut Connection, Error> {
        let connection = match self.connection.take() {
            Some(connection) => connection,
            None => {
                self.is_told = false;
                loop {
                    let left = end.saturating_duration_since(Instant::now());
                    std::thread::sleep(self.pause.min(left));
                    let greeted = Instant::now() + self.timeout.min(GREETING);
                    match Connection::open(&self.path, end.max(greeted)) {
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

    /// A connection on which the mux was told what is wanted.
    fn told(&mut self, end: Instant) -> Result<&mut Connection, Error> {
        self.connected(end)?;
        if self.wants && !self.is_told {
            let filters = self.wanted.values().copied().map(Change::Set);
            let queues = self.queues.values().copied().map(Change::Queue);
            let all: Vec<Change> = filters.chain(queues).collect();
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
            let mut all: Vec<Change> = Vec::new();
            if sweep {
                let stays = this.wanted.values().filter(|it| !changes.contains_key(&it.id));
                all.extend(stays.copied().map(Change::Set));
                let stays = this.queues.iter().filter(|it| !queues.contains_key(it.0));
                all.extend(stays.map(|it| Change::Queue(*it.1)));
            }
            all.extend(queues.values().copied().map(Change::Queue));
            all.extend(changes.iter().filter_map(|(id, filter)| match filter {
                Some(filter) => Some(Change::Set(*filter)),
                None => (!sweep).then_some(Change::Remove(*id)),
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

/// Changes that come into force together, or not at all. Dropped without [`commit`](Self::commit): not at all.
#[derive(Debug)]
#[must_use = "nothing is changed without commit()"]
pub struct Batch<'a> {
    slow_path: &'a mut SlowPath,
    /// Of one number the last one counts.
    changes: BTreeMap<u32, Option<Filter>>,
    queues: BTreeMap<(u8, u16), QueueSetting>,
}

impl Batch<'_> {
    /// This filter, new or in the place of the one with its number.
    pub fn set(mut self, filter: Filter) -> Self {
        self.changes.insert(filter.id, Some(filter));
        self
    }

    /// No filter with this number.
    pub fn remove(mut self, id: u32) -> Self {
        self.changes.insert(id, None);
        self
    }

    /// This queue is to be so; with nothing but zeros, as its spec says.
    pub fn queue(mut self, setting: QueueSetting) -> Self {
        self.queues.insert((setting.vport, setting.queue), setting);
        self
    }

    /// None of the filters that are wanted now.
    pub fn clear(mut self) -> Self {
        self.changes = self.slow_path.wanted.keys().map(|id| (*id, None)).collect();
        self
    }

    /// Has them in force, and returns once they are: how many filters there are then.
    ///
    /// # Errors
    /// [`Error::Refused`]: nothing was changed, and what is wanted is as it was before. After another error what
    /// is wanted is that too; the mux may have had the changes, and loses them with the next call.
    pub fn commit(self) -> Result<u32, Error> {
        self.slow_path.commit(&self.changes, &self.queues)
    }
}
