//! Reads what route mirrors say, for engines.
//!
//! A thread of its own: to read a socket may take as long as who has the other end wants, and what is read is checked
//! here. It takes [`TURN`] messages of one mirror, then of the next; what an engine has no room for stays in the socket,
//! and a mirror that has to wait for long disconnects and says all of it again. A mirror that is gone, or that makes no
//! sense, is tried again after [`PAUSE`].

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pdp_ip::{Channel, Connection, Heard};
use pdp_proto::mux;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use tracing::warn;

use crate::connections::Watch;
use crate::engine::{Engine, FromEngine, Source, ToEngine};
use crate::wake::Wake;

/// Messages of one mirror in a row.
const TURN: usize = 256;

/// Until a mirror is tried again.
const PAUSE: Duration = Duration::from_millis(200);

/// Until the mirror of an engine that could not follow what the one before said is tried: twice as long each time, up to
/// this. What leads to that is a tenant's to make, and the thread's time is everybody's.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Until it is looked again at who has to wait for an engine, or for a mirror to read.
const LOOK: Duration = Duration::from_millis(1);

/// Sockets that are told of at a time.
const EVENTS_MAX: usize = 64;

/// The mux's number among the guests of a mirror.
const GUEST: u32 = 0;

/// The number of the thread's own doorbell.
const WAKE: u64 = 0;

/// The thread, as others have it. It ends with this.
pub struct Routes(Arc<Shared>);

struct Shared {
    wake: Arc<Wake>,
    new: Mutex<Vec<Followed>>,
    ended: AtomicBool,
}

impl Drop for Routes {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::Relaxed);
        self.0.wake.ring();
    }
}

impl Routes {
    /// Starts the thread.
    pub fn start() -> io::Result<Self> {
        let wake = Arc::new(Wake::new()?);
        let ended = AtomicBool::new(false);
        let shared = Arc::new(Shared { wake, new: Mutex::default(), ended });
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &*shared.wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        let reader = Reader { epoll, shared: shared.clone(), all: HashMap::new(), last: WAKE };
        std::thread::Builder::new().name("routes".into()).spawn(move || reader.run())?;
        Ok(Self(shared))
    }

    /// An engine for the vnet in `slot` of the worker whose `watch` it is, and what rouses that vnet.
    pub fn engine(
        &self,
        spec: &mux::Engine,
        watch: &Watch,
        slot: u16,
    ) -> io::Result<(Engine, Arc<OwnedFd>)> {
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        watch.add_bell(Some(slot), &bell)?;
        let (engine, source) = Engine::new(spec.clone(), self.0.wake.clone());
        let mux::Code::Ip { routes } = &spec.code else { return Ok((engine, bell)) };
        let path = routes.clone();
        let followed = Followed {
            path,
            source,
            bell: bell.clone(),
            wanted: false,
            connection: None,
            mirror: 0,
            begun: false,
            may_have_more: false,
            connect_at: None,
            pause: PAUSE,
        };
        self.0.new.lock().unwrap_or_else(PoisonError::into_inner).push(followed);
        self.0.wake.ring();
        Ok((engine, bell))
    }
}

/// A mirror, and the engine that follows it.
struct Followed {
    path: PathBuf,
    source: Source,
    /// Rouses the engine's vnet.
    bell: Arc<OwnedFd>,
    /// The engine is in use.
    wanted: bool,
    connection: Option<Connection>,
    /// The connection's number among this engine's.
    mirror: u32,
    /// The engine knows of the connection.
    begun: bool,
    /// There may be more to read.
    may_have_more: bool,
    connect_at: Option<Instant>,
    /// Before the next mirror, once this one can't be followed.
    pause: Duration,
}

impl Followed {
    /// Does what the engine asked for, as long as its mirror reads.
    fn obey(&mut self) {
        while self.connection.as_ref().is_none_or(Connection::has_room)
            && let Ok(asked) = self.source.from.pop()
        {
            match asked {
                FromEngine::Wants => {
                    if self.wanted {
                        self.end("what it says can't be followed");
                        self.connect_at = Some(Instant::now() + self.pause);
                        self.pause = (self.pause * 2).min(PAUSE_MAX);
                    }
                    self.wanted = true;
                }
                FromEngine::Message(mirror, message) if mirror == self.mirror => {
                    let Some(connection) = &mut self.connection else { continue };
                    if let Err(error) = connection.say(message) {
                        self.end(&error.to_string());
                    }
                }
                FromEngine::Message(..) => {}
                FromEngine::Gone(fib) => drop(fib),
            }
        }
    }

    fn end(&mut self, why: &str) {
        if self.connection.take().is_some() {
            warn!("route mirror {}: {why}", self.path.display());
        }
        self.connect_at = Some(Instant::now() + PAUSE);
    }

    /// Connects if it is time to.
    fn connect(&mut self, number: u64, epoll: &OwnedFd) {
        let due = self.connect_at.is_none_or(|at| Instant::now() >= at);
        if !self.wanted || self.connection.is_some() || !due {
            return;
        }
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        let opened = Connection::open(&self.path, GUEST).and_then(|connection| {
            epoll::add(epoll, &connection, epoll::EventData::new_u64(number), flags)?;
            Ok(connection)
        });
        match opened {
            Ok(connection) => {
                self.connection = Some(connection);
                self.mirror = self.mirror.wrapping_add(1);
                (self.begun, self.may_have_more) = (false, true);
            }
            Err(_) => self.connect_at = Some(Instant::now() + PAUSE),
        }
    }

    /// Gives the engine what its mirror says, as far as there is room, and the mirror what it reads.
    fn turn(&mut self) {
        let mut told = false;
        if self.connection.is_some() && !self.begun {
            self.begun = self.source.to.push(ToEngine::Begin(self.mirror)).is_ok();
            told = self.begun;
        }
        let mut left = TURN;
        let result = loop {
            let Some(connection) = self.connection.as_mut().filter(|_| self.begun) else {
                break Ok(());
            };
            if let Err(error) = connection.flush() {
                break Err(error);
            }
            if !self.may_have_more || left == 0 || self.source.to.is_full() {
                break Ok(());
            }
            left -= 1;
            match connection.hear() {
                Ok(Heard::Message(message)) => {
                    // There is room.
                    let _ = self.source.to.push(ToEngine::Message(message));
                    told = true;
                }
                Ok(Heard::Part) => {}
                Ok(Heard::Nothing) => self.may_have_more = false,
                Err(error) => break Err(error),
            }
        };
        if let Err(error) = result {
            self.end(&error.to_string());
        }
        if told {
            // Fails only if it was rung 2^64 times and not answered.
            let _ = rustix::io::write(&*self.bell, &1u64.to_ne_bytes());
        }
    }

    /// In what time it is to be looked at again at the latest.
    fn due(&self) -> Option<Duration> {
        let Some(connection) = &self.connection else {
            let at = self.connect_at.filter(|_| self.wanted)?;
            return Some(at.saturating_duration_since(Instant::now()));
        };
        let waits = !self.begun || self.may_have_more;
        let answers = !self.source.from.is_empty();
        match waits && !self.source.to.is_full() || answers && connection.has_room() {
            true => Some(Duration::ZERO),
            false => (waits || answers || connection.has_backlog()).then_some(LOOK),
        }
    }
}

/// What the thread has.
struct Reader {
    epoll: OwnedFd,
    shared: Arc<Shared>,
    all: HashMap<u64, Followed>,
    last: u64,
}

impl Reader {
    fn run(mut self) {
        let mut came = vec![];
        while !self.shared.ended.load(Ordering::Relaxed) {
            self.shared.wake.sleeping();
            for followed in
                std::mem::take(&mut *self.shared.new.lock().unwrap_or_else(PoisonError::into_inner))
            {
                self.last += 1;
                self.all.insert(self.last, followed);
            }
            // Nobody has the other end any more.
            self.all.retain(|_, it| !it.source.to.is_abandoned());
            for number in came.drain(..) {
                self.all.entry(number).and_modify(|it| it.may_have_more = true);
            }
            for (number, followed) in &mut self.all {
                followed.obey();
                followed.connect(*number, &self.epoll);
                followed.turn();
            }
            let left = self.all.values().filter_map(Followed::due).min();
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let mut events = [MaybeUninit::uninit(); EVENTS_MAX];
            if let Ok((events, _)) = epoll::wait(&self.epoll, &mut events, left.as_ref()) {
                came.extend(events.iter().map(|event| event.data.u64()));
            }
            self.shared.wake.awake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixListener;

    use pdp_proto::routes::{FromGuest, Resolved};

    use super::*;

    /// Whatever part of the answers a look at them takes along.
    #[test]
    fn answers_are_looked_at_until_none_is_left() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("routes.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let (to, _engine) = rtrb::RingBuffer::new(8);
        let (mut answers, from) = rtrb::RingBuffer::new(64);
        let mut followed = Followed {
            connection: Some(Connection::open(&path, GUEST).unwrap()),
            path,
            source: Source { to, from },
            bell: Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap()),
            wanted: true,
            mirror: 1,
            begun: true,
            may_have_more: false,
            connect_at: None,
            pause: PAUSE,
        };
        let (mut mirror, _) = listener.accept().unwrap();
        mirror.set_nonblocking(true).unwrap();
        let route = ("2001:db8::/32".parse().unwrap(), Resolved::Drop);
        let table = FromGuest::Table { dump: 1, routes: vec![route; 256] };
        while answers.push(FromEngine::Message(1, table.clone())).is_ok() {}
        let (mut bytes, mut read) = (vec![0; 1 << 20], 0);
        while followed.due().is_some() {
            followed.obey();
            followed.turn();
            read += mirror.read(&mut bytes).unwrap_or(0);
        }
        assert!(followed.source.from.is_empty(), "{} are left", followed.source.from.slots());
        read += mirror.read(&mut bytes).unwrap_or(0);
        assert!(read > 64 * 256, "{read} bytes");
    }
}
