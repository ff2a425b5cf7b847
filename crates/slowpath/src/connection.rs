//! One connection to the mux. Nothing waits beyond its deadline, whatever the other end does.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pdp_proto::limits::QUEUES_MAX;
use pdp_proto::slowpath::{
    Counter, FILTERS_MAX, FRAME_BYTES_MAX, Filter, NO_FILTER, PACKET_BYTES_MAX, QueueSetting,
    QueueState, Reply, Request, VERSION, Welcome, Wrong,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with,
};

/// Pause before who listens is asked again, where its queue of connections is full.
const FULL_PAUSE: Duration = Duration::from_millis(5);

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody listens, or who did went away, or gave no answer in time.
    #[error("no mux at {}", path.display())]
    Gone {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The mux refused: of a batch nothing is in force.
    #[error("{}{reason}", about(*id))]
    Refused {
        /// Which filter it is about; [`NO_FILTER`](crate::NO_FILTER): none.
        id: u32,
        /// Its words.
        reason: String,
    },
    /// The mux disconnected this program, and says why.
    #[error("disconnected by the mux: {0}")]
    Bye(String),
    /// An answer that is none: another version.
    #[error("an answer of the mux does not fit: {0}")]
    Unexpected(String),
    /// There are not so many counters.
    #[error("{count} counters from {first} on; there are {there}, from 0 on")]
    Counters {
        /// The first that was asked for.
        first: u32,
        /// How many were.
        count: u32,
        /// How many there are.
        there: u32,
    },
    /// There is no such vport.
    #[error("vport {vport}: there are {there}, from 0 on")]
    Vport {
        /// The one that was asked for.
        vport: u8,
        /// How many there are.
        there: u16,
    },
    /// A frame is too long, or has no header.
    #[error("a frame of {0} bytes; 14 to {FRAME_BYTES_MAX} can be sent")]
    Frame(usize),
}

impl Error {
    /// Whether there is nobody to talk with any more: a new connection may help.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone { .. })
    }
}

impl From<Wrong> for Error {
    fn from(wrong: Wrong) -> Self {
        Self::Unexpected(wrong.to_string())
    }
}

/// A filter, if it is one.
fn about(id: u32) -> String {
    if id == NO_FILTER { String::new() } else { format!("filter {id}: ") }
}

/// A change of filters and queues.
#[derive(Clone, Copy, Debug)]
pub enum Change {
    /// This filter, new or in the place of the one with its number.
    Set(Filter),
    /// No filter with this number.
    Remove(u32),
    /// A queue is to be so.
    Queue(QueueSetting),
}

/// Where a frame goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// As if it came by this vport: it is looked up again.
    In(u8),
    /// Out of this vport, by this queue, counted from 1; 0: the port chooses.
    Out(u8, u16),
}

/// A connection after its greeting.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    path: PathBuf,
    deadline: Instant,
    welcome: Welcome,
    number: u64,
    replies: VecDeque<Reply>,
}

impl Connection {
    /// Connects and greets; whatever follows is done at `deadline`, or fails then.
    ///
    /// # Errors
    /// [`Error::Gone`] where nobody listens; [`Error::Bye`] where no more programs are taken; another version.
    pub fn open(path: &Path, deadline: Instant) -> Result<Self, Error> {
        let gone = |source: io::Error| Error::Gone { path: path.into(), source };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let socket = socket.map_err(|error| gone(error.into()))?;
        let address = SocketAddrUnix::new(path).map_err(|error| gone(error.into()))?;
        loop {
            match connect(&socket, &address) {
                Ok(()) => break,
                // Its queue is full.
                Err(Errno::AGAIN) if Instant::now() + FULL_PAUSE < deadline => {
                    std::thread::sleep(FULL_PAUSE);
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(gone(error.into())),
            }
        }
        let mut this = Self {
            socket,
            path: path.into(),
            deadline,
            welcome: Welcome::default(),
            number: 0,
            replies: VecDeque::new(),
        };
        this.say([Request::Hello(VERSION)])?;
        match this.reply()? {
            Reply::Welcome(welcome) if welcome.version == VERSION => this.welcome = welcome,
            Reply::Welcome(Welcome { version, .. }) => {
                let words = format!("it speaks version {version}, this program {VERSION}");
                return Err(Error::Unexpected(words));
            }
            other => return Err(unexpected(&other)),
        }
        Ok(this)
    }

    /// What there is.
    pub fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    /// Sets another deadline for what comes next.
    pub fn set_deadline(&mut self, deadline: Instant) {
        self.deadline = deadline;
    }

    /// Has changes in force, all at once; with `sweep` all filters go that were not set since the commit before on
    /// this connection, and queues that were not are as their spec says. Returns how many filters there are then.
    ///
    /// # Errors
    /// [`Error::Refused`]: nothing was changed.
    pub fn commit(
        &mut self,
        changes: impl IntoIterator<Item = Change>,
        sweep: bool,
    ) -> Result<u32, Error> {
        let number = self.next_number();
        let changes = changes.into_iter().map(|change| match change {
            Change::Set(filter) => Request::Set(filter),
            Change::Remove(id) => Request::Remove(id),
            Change::Queue(setting) => Request::Queue(setting),
        });
        self.say(changes.chain([Request::Commit { number, sweep }]))?;
        match self.reply()? {
            Reply::Done { number: of, filters } if of == number => Ok(filters),
            other => Err(self.other(number, other)),
        }
    }

    /// What counters have, all at one moment.
    ///
    /// # Errors
    /// [`Error::Counters`]: there are not so many.
    pub fn counters(&mut self, first: u32, count: u32) -> Result<Vec<Counter>, Error> {
        let there = self.welcome.counters;
        if first.checked_add(count).is_none_or(|end| end > there) {
            return Err(Error::Counters { first, count, there });
        }
        let number = self.next_number();
        self.say([Request::Counters { number, first, count }])?;
        let mut all = Vec::new();
        loop {
            match self.reply()? {
                Reply::Counters { number: of, counters, more, .. } if of == number => {
                    all.extend(counters);
                    if all.len() > count as usize {
                        return Err(Error::Unexpected("more counters than asked for".into()));
                    }
                    if !more {
                        return Ok(all);
                    }
                }
                other => return Err(self.other(number, other)),
            }
        }
    }

    /// How the queues of a vport are, in their order; none, where frames have one for all.
    ///
    /// # Errors
    /// [`Error::Vport`]: there is no such vport.
    pub fn queues(&mut self, vport: u8) -> Result<Vec<QueueState>, Error> {
        let there = self.welcome.vports;
        if u16::from(vport) >= there {
            return Err(Error::Vport { vport, there });
        }
        let number = self.next_number();
        self.say([Request::Queues { number, vport, first: 1 }])?;
        let mut all = Vec::new();
        loop {
            match self.reply()? {
                Reply::Queues { number: of, queues, more, .. } if of == number => {
                    all.extend(queues);
                    if all.len() > QUEUES_MAX {
                        return Err(Error::Unexpected("more queues than there are".into()));
                    }
                    if !more {
                        return Ok(all);
                    }
                }
                other => return Err(self.other(number, other)),
            }
        }
    }

    /// The filters that there are, by their numbers.
    pub fn list(&mut self) -> Result<Vec<Filter>, Error> {
        Ok(self.filters(0, FILTERS_MAX as usize)?.0)
    }

    /// The same from a number on, `count` at most, and whether there are more; the connection is given up, so that
    /// nobody has to say the rest.
    pub fn into_list(mut self, first: u32, count: usize) -> Result<(Vec<Filter>, bool), Error> {
        self.filters(first, count)
    }

    fn filters(&mut self, first: u32, count: usize) -> Result<(Vec<Filter>, bool), Error> {
        let number = self.next_number();
        self.say([Request::List { number, first }])?;
        let mut all = Vec::new();
        loop {
            match self.reply()? {
                Reply::Filters { number: of, filters, more, .. } if of == number => {
                    all.extend(filters);
                    if all.len() > count || (more && all.len() == count) {
                        all.truncate(count);
                        return Ok((all, true));
                    }
                    if !more {
                        return Ok((all, false));
                    }
                }
                other => return Err(self.other(number, other)),
            }
        }
    }

    /// Sends a frame, from Ethernet's header on. What there is no room for is dropped and counted by the mux.
    pub fn frame(&mut self, way: Way, bytes: &[u8]) -> Result<(), Error> {
        if !(14..=FRAME_BYTES_MAX).contains(&bytes.len()) {
            return Err(Error::Frame(bytes.len()));
        }
        let (out, vport, queue) = match way {
            Way::In(vport) => (false, vport, 0),
            Way::Out(vport, queue) => (true, vport, queue),
        };
        self.say([Request::Frame { out, vport, queue, bytes: bytes.into() }])
    }

    /// Waits until the deadline, or until the mux says or does something that nobody asked for, which is the error.
    pub fn wait(&mut self) -> Result<(), Error> {
        match self.reply() {
            Err(Error::Gone { source, .. }) if source.kind() == io::ErrorKind::TimedOut => Ok(()),
            Err(error) => Err(error),
            Ok(reply) => Err(unexpected(&reply)),
        }
    }

    fn next_number(&mut self) -> u64 {
        self.number += 1;
        self.number
    }

    /// What another answer than the one that was hoped for means.
    fn other(&self, number: u64, reply: Reply) -> Error {
        match reply {
            Reply::Refused { number: of, id, reason } if of == number => {
                Error::Refused { id, reason }
            }
            reply => unexpected(&reply),
        }
    }

    fn gone(&self, source: io::Error) -> Error {
        Error::Gone { path: self.path.clone(), source }
    }

    /// Says all of them, in as few packets as there is room in.
    fn say(&mut self, requests: impl IntoIterator<Item = Request>) -> Result<(), Error> {
        let mut packet = Vec::new();
        for request in requests {
            let end = packet.len();
            request.put(&mut packet);
            if packet.len() > PACKET_BYTES_MAX {
                let next = packet.split_off(end);
                self.send(&packet)?;
                packet = next;
            }
        }
        self.send(&packet)
    }

    fn send(&mut self, packet: &[u8]) -> Result<(), Error> {
        loop {
            match send(&self.socket, packet, SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(()),
                Err(Errno::AGAIN) => self.ready(PollFlags::OUT)?,
                Err(Errno::INTR) => {}
                // It may have said why before it went.
                Err(error @ (Errno::PIPE | Errno::CONNRESET)) => loop {
                    match self.reply() {
                        Ok(_) => {}
                        Err(Error::Gone { .. }) => return Err(self.gone(error.into())),
                        Err(why) => return Err(why),
                    }
                },
                Err(error) => return Err(self.gone(error.into())),
            }
        }
    }

    /// The next answer; a [`Reply::Bye`] is an error.
    fn reply(&mut self) -> Result<Reply, Error> {
        loop {
            match self.replies.pop_front() {
                Some(Reply::Bye(why)) => return Err(Error::Bye(why)),
                Some(reply) => return Ok(reply),
                None => self.receive()?,
            }
        }
    }

    fn receive(&mut self) -> Result<(), Error> {
        let mut packet = vec![0; PACKET_BYTES_MAX];
        let mut was_reset = false;
        let length = loop {
            match recv(&self.socket, &mut packet[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(self.gone(io::ErrorKind::UnexpectedEof.into())),
                Ok((length, _)) => break length,
                Err(Errno::AGAIN) => self.ready(PollFlags::IN)?,
                Err(Errno::INTR) => {}
                // It went without having read all; what it said before is still to be had.
                Err(Errno::CONNRESET) if !was_reset => was_reset = true,
                Err(error) => return Err(self.gone(error.into())),
            }
        };
        let mut rest = &packet[..length];
        while let Some(reply) = Reply::take(&mut rest)? {
            self.replies.push_back(reply);
        }
        Ok(())
    }

    /// Waits until something can be read or written.
    fn ready(&self, what: PollFlags) -> Result<(), Error> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(self.gone(io::ErrorKind::TimedOut.into()));
        }
        let left = Timespec::try_from(left).map_err(|_| self.gone(Errno::INVAL.into()))?;
        match poll(&mut [PollFd::new(&self.socket, what)], Some(&left)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(self.gone(error.into())),
        }
    }
}

/// What no question is answered with.
fn unexpected(reply: &Reply) -> Error {
    let kind = match reply {
        Reply::Welcome(_) => "a welcome",
        Reply::Done { .. } => "a commit's result",
        Reply::Refused { .. } => "a refusal",
        Reply::Counters { .. } => "counters",
        Reply::Filters { .. } => "filters",
        Reply::Queues { .. } => "queues",
        Reply::Bye(_) => "a farewell",
    };
    Error::Unexpected(format!("{kind} that nobody asked for"))
}
