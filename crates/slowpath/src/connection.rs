//! One connection to the mux. Every wait ends at the deadline, whatever the other end does.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pdp_proto::limits::QUEUES_MAX;
use pdp_proto::slowpath::{
    FILTERS_MAX, FRAME_BYTES_MAX, Filter, FilterCounter, MessageError, NO_FILTER, PACKET_BYTES_MAX,
    QueueSetting, QueueState, SlowPathReply, SlowPathRequest, VERSION, Welcome,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with,
};

/// Pause before another attempt to connect to a listener whose queue is full.
const FULL_PAUSE: Duration = Duration::from_millis(5);

/// Reason why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody listens, or the mux went away, or it gave no answer in time.
    #[error("no mux listens at {}", path.display())]
    Gone {
        /// The socket.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The mux refused. Nothing of the batch is in force.
    #[error("{}{reason}", about(*id))]
    Refused {
        /// The filter at fault, or [`NO_FILTER`](crate::NO_FILTER).
        id: u32,
        /// The mux's reason.
        reason: String,
    },
    /// The mux disconnected this program, for this reason.
    #[error("disconnected by the mux: {0}")]
    Bye(String),
    /// An invalid answer, as from another version.
    #[error("unexpected answer of the mux: {0}")]
    Unexpected(String),
    /// Counters out of range.
    #[error(
        "{count} counters from {first} do not exist: the router has {available}, numbered from 0"
    )]
    Counters {
        /// First counter requested.
        first: u32,
        /// Number requested.
        count: u32,
        /// Number available.
        available: u32,
    },
    /// There is no such vport.
    #[error("vport {vport} does not exist: the router has {available}, numbered from 0")]
    Vport {
        /// Vport requested.
        vport: u8,
        /// Number of vports.
        available: u16,
    },
    /// A frame is too long, or has no header.
    #[error("frame of {0} bytes (send 14 to {FRAME_BYTES_MAX})")]
    Frame(usize),
}

impl Error {
    /// True if the mux is gone. A new connection may help.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone { .. })
    }
}

impl From<MessageError> for Error {
    fn from(wrong: MessageError) -> Self {
        Self::Unexpected(wrong.to_string())
    }
}

/// Names a filter, if there is one.
fn about(id: u32) -> String {
    if id == NO_FILTER { String::new() } else { format!("filter {id}: ") }
}

/// Change of filters and queues.
#[derive(Clone, Copy, Debug)]
pub enum SlowPathChange {
    /// Adds this filter, or replaces the one with its number.
    Set(Filter),
    /// Removes the filter with this number.
    Remove(u32),
    /// Sets a queue.
    Queue(QueueSetting),
}

/// Destination of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameDestination {
    /// As if received by this vport: the mux looks it up again.
    In(u8),
    /// Out of this vport, by this queue from 1. With 0 the port chooses.
    Out(u8, u16),
}

/// Connection after its greeting.
#[derive(Debug)]
pub struct SlowPathConnection {
    socket: OwnedFd,
    path: PathBuf,
    deadline: Instant,
    welcome: Welcome,
    number: u64,
    replies: VecDeque<SlowPathReply>,
}

impl SlowPathConnection {
    /// Connects and greets. All that follows is done at `deadline`, or fails then.
    ///
    /// # Errors
    /// [`Error::Gone`] if nobody listens. [`Error::Bye`] if the mux takes no more programs. An
    /// error also for another version.
    pub fn open(path: &Path, deadline: Instant) -> Result<Self, Error> {
        let gone = |source: io::Error| Error::Gone { path: path.into(), source };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let socket = socket.map_err(|error| gone(error.into()))?;
        let address = SocketAddrUnix::new(path).map_err(|error| gone(error.into()))?;
        loop {
            match connect(&socket, &address) {
                Ok(()) => break,
                // The listener's queue is full.
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
        this.say([SlowPathRequest::Hello(VERSION)])?;
        match this.reply()? {
            SlowPathReply::Welcome(welcome) if welcome.version == VERSION => this.welcome = welcome,
            SlowPathReply::Welcome(Welcome { version, .. }) => {
                let words = format!("its protocol has version {version}, this program's {VERSION}");
                return Err(Error::Unexpected(words));
            }
            other => return Err(unexpected(&other)),
        }
        Ok(this)
    }

    /// The mux's greeting.
    pub fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    /// Sets another deadline for the following calls.
    pub fn set_deadline(&mut self, deadline: Instant) {
        self.deadline = deadline;
    }

    /// Brings changes into force, all at once; returns the number of filters afterwards. With
    /// `sweep` it also removes all filters that were not set since the previous commit on this
    /// connection. Queues that were not set return to their specs.
    ///
    /// # Errors
    /// [`Error::Refused`]: nothing has changed.
    pub fn commit(
        &mut self,
        changes: impl IntoIterator<Item = SlowPathChange>,
        sweep: bool,
    ) -> Result<u32, Error> {
        let number = self.next_number();
        let changes = changes.into_iter().map(|change| match change {
            SlowPathChange::Set(filter) => SlowPathRequest::Set(filter),
            SlowPathChange::Remove(id) => SlowPathRequest::Remove(id),
            SlowPathChange::Queue(setting) => SlowPathRequest::Queue(setting),
        });
        self.say(changes.chain([SlowPathRequest::Commit { number, sweep }]))?;
        match self.reply()? {
            SlowPathReply::Done { number: of, filters } if of == number => Ok(filters),
            other => Err(self.other(number, other)),
        }
    }

    /// Reads counters, all at one moment.
    ///
    /// # Errors
    /// [`Error::Counters`]: out of range.
    pub fn counters(&mut self, first: u32, count: u32) -> Result<Vec<FilterCounter>, Error> {
        let available = self.welcome.counters;
        if first.checked_add(count).is_none_or(|end| end > available) {
            return Err(Error::Counters { first, count, available });
        }
        let number = self.next_number();
        self.say([SlowPathRequest::Counters { number, first, count }])?;
        let mut all = Vec::new();
        loop {
            match self.reply()? {
                SlowPathReply::Counters { number: of, counters, more, .. } if of == number => {
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

    /// State of a vport's queues, in their order. Empty if the vport has one queue for all frames.
    ///
    /// # Errors
    /// [`Error::Vport`]: there is no such vport.
    pub fn queues(&mut self, vport: u8) -> Result<Vec<QueueState>, Error> {
        let available = self.welcome.vports;
        if u16::from(vport) >= available {
            return Err(Error::Vport { vport, available });
        }
        let number = self.next_number();
        self.say([SlowPathRequest::Queues { number, vport, first: 1 }])?;
        let mut all = Vec::new();
        loop {
            match self.reply()? {
                SlowPathReply::Queues { number: of, queues, more, .. } if of == number => {
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

    /// All filters, by their numbers.
    pub fn list(&mut self) -> Result<Vec<Filter>, Error> {
        Ok(self.filters(0, FILTERS_MAX as usize)?.0)
    }

    /// Returns up to `count` filters from number `first` on, and true if there are more. Consumes
    /// the connection, so that the mux need not send the rest.
    pub fn into_list(mut self, first: u32, count: usize) -> Result<(Vec<Filter>, bool), Error> {
        self.filters(first, count)
    }

    fn filters(&mut self, first: u32, count: usize) -> Result<(Vec<Filter>, bool), Error> {
        let number = self.next_number();
        self.say([SlowPathRequest::List { number, first }])?;
        let mut all = Vec::new();
        loop {
            match self.reply()? {
                SlowPathReply::Filters { number: of, filters, more, .. } if of == number => {
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

    /// Sends a frame, beginning with its Ethernet header. The
    /// mux drops and counts frames that it has no room for.
    pub fn frame(&mut self, destination: FrameDestination, bytes: &[u8]) -> Result<(), Error> {
        if !(14..=FRAME_BYTES_MAX).contains(&bytes.len()) {
            return Err(Error::Frame(bytes.len()));
        }
        let (out, vport, queue) = match destination {
            FrameDestination::In(vport) => (false, vport, 0),
            FrameDestination::Out(vport, queue) => (true, vport, queue),
        };
        self.say([SlowPathRequest::Frame { out, vport, queue, bytes: bytes.into() }])
    }

    /// Waits until the deadline. Fails if the mux closes, or sends anything without a request.
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

    /// Converts an unexpected answer to an error.
    fn other(&self, number: u64, reply: SlowPathReply) -> Error {
        match reply {
            SlowPathReply::Refused { number: of, id, reason } if of == number => {
                Error::Refused { id, reason }
            }
            reply => unexpected(&reply),
        }
    }

    fn gone(&self, source: io::Error) -> Error {
        Error::Gone { path: self.path.clone(), source }
    }

    /// Sends all requests in as few packets as possible.
    fn say(&mut self, requests: impl IntoIterator<Item = SlowPathRequest>) -> Result<(), Error> {
        let mut packet = Vec::new();
        for request in requests {
            let end = packet.len();
            request.encode(&mut packet);
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
                // It may have sent a reason before it closed.
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

    /// Returns the next answer. [`SlowPathReply::Bye`] is an error.
    fn reply(&mut self) -> Result<SlowPathReply, Error> {
        loop {
            match self.replies.pop_front() {
                Some(SlowPathReply::Bye(why)) => return Err(Error::Bye(why)),
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
                // It closed without reading everything; its earlier answers can still be read.
                Err(Errno::CONNRESET) if !was_reset => was_reset = true,
                Err(error) => return Err(self.gone(error.into())),
            }
        };
        let mut rest = &packet[..length];
        while let Some(reply) = SlowPathReply::decode(&mut rest)? {
            self.replies.push_back(reply);
        }
        Ok(())
    }

    /// Waits until something can be read or written.
    fn ready(&self, events: PollFlags) -> Result<(), Error> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(self.gone(io::ErrorKind::TimedOut.into()));
        }
        let left = Timespec::try_from(left).map_err(|_| self.gone(Errno::INVAL.into()))?;
        match poll(&mut [PollFd::new(&self.socket, events)], Some(&left)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(self.gone(error.into())),
        }
    }
}

/// Error for an answer that fits no request.
fn unexpected(reply: &SlowPathReply) -> Error {
    let kind = match reply {
        SlowPathReply::Welcome(_) => "a welcome",
        SlowPathReply::Done { .. } => "a commit's result",
        SlowPathReply::Refused { .. } => "a refusal",
        SlowPathReply::Counters { .. } => "counters",
        SlowPathReply::Filters { .. } => "filters",
        SlowPathReply::Queues { .. } => "queues",
        SlowPathReply::Bye(_) => "a farewell",
    };
    Error::Unexpected(format!("unsolicited {kind}"))
}
