//! Reads messages of route mirrors, for engines.
//!
//! It runs in its own thread, because reading a socket may take as long as its other end
//! wants. Messages are checked here. The thread takes [`TURN`] messages of one mirror,
//! then of the next. Messages for which an engine has no space stay in the socket. A
//! mirror that has to wait for long disconnects, and later sends all messages again. A
//! mirror that is gone, or that sends invalid messages, is tried again after [`PAUSE`].

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pdp_ip::{MirrorChannel, MirrorInput, MirrorSocket};
use pdp_proto::mux;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use tracing::warn;

use crate::connections::SleepWatch;
use crate::engine::{EngineFeed, FromEngine, ToEngine, VrouterEngine};
use crate::wake::Wake;

/// Messages of one mirror that are read in a row.
const TURN: usize = 256;

/// Time until a mirror is tried again.
const PAUSE: Duration = Duration::from_millis(200);

/// Longest time until the next mirror is tried for an engine that could
/// not follow the last one. The time doubles with each attempt. A
/// tenant can provoke such failures, and the thread serves everybody.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Interval of checks for space at an engine, or at a mirror that does not read.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// Events handled at a time.
const EVENTS_MAX: usize = 64;

/// The mux's number among the guests of a mirror.
const GUEST: u32 = 0;

/// Number of the thread's own doorbell.
const WAKE: u64 = 0;

/// Handle of the thread, which ends with it.
pub struct MirrorThread(Arc<MirrorThreadState>);

struct MirrorThreadState {
    wake: Arc<Wake>,
    new: Mutex<Vec<FollowedMirror>>,
    ended: AtomicBool,
}

impl Drop for MirrorThread {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::Relaxed);
        self.0.wake.ring();
    }
}

impl MirrorThread {
    /// Starts the thread.
    pub fn start() -> io::Result<Self> {
        let wake = Arc::new(Wake::new()?);
        let ended = AtomicBool::new(false);
        let shared = Arc::new(MirrorThreadState { wake, new: Mutex::default(), ended });
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &*shared.wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        let reader =
            MirrorReader { epoll, shared: shared.clone(), all: HashMap::new(), last: WAKE };
        std::thread::Builder::new().name("routes".into()).spawn(move || reader.run())?;
        Ok(Self(shared))
    }

    /// Creates an engine for the vnet in `slot` of the worker that `watch`
    /// belongs to. Also returns the doorbell that wakes that vnet.
    pub fn engine(
        &self,
        spec: &mux::EngineConfig,
        watch: &SleepWatch,
        slot: u16,
    ) -> io::Result<(VrouterEngine, Arc<OwnedFd>)> {
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        watch.add_bell(Some(slot), &bell)?;
        let (engine, source) = VrouterEngine::new(spec.clone(), self.0.wake.clone());
        let mux::EngineCode::Ip { routes } = &spec.code else { return Ok((engine, bell)) };
        let path = routes.clone();
        let followed = FollowedMirror {
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
struct FollowedMirror {
    path: PathBuf,
    source: EngineFeed,
    /// Wakes the engine's vnet.
    bell: Arc<OwnedFd>,
    /// True once the engine is in use.
    wanted: bool,
    connection: Option<MirrorSocket>,
    /// Number of the connection among this engine's.
    mirror: u32,
    /// True once the engine knows of the connection.
    begun: bool,
    /// True if there may be more to read.
    may_have_more: bool,
    connect_at: Option<Instant>,
    /// Pause before the next mirror, if the engine can't follow this one.
    pause: Duration,
}

impl FollowedMirror {
    /// Handles messages of the engine while the mirror reads.
    fn handle_engine_messages(&mut self) {
        while self.connection.as_ref().is_none_or(MirrorSocket::has_space)
            && let Ok(asked) = self.source.from.pop()
        {
            match asked {
                FromEngine::WantsMirror => {
                    if self.wanted {
                        self.end("its messages are invalid");
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
                FromEngine::RetiredFib(fib) => drop(fib),
            }
        }
    }

    fn end(&mut self, why: &str) {
        if self.connection.take().is_some() {
            warn!("route mirror {}: {why}", self.path.display());
        }
        self.connect_at = Some(Instant::now() + PAUSE);
    }

    /// Connects to the mirror when it is time.
    fn connect(&mut self, number: u64, epoll: &OwnedFd) {
        let due = self.connect_at.is_none_or(|at| Instant::now() >= at);
        if !self.wanted || self.connection.is_some() || !due {
            return;
        }
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        let opened = MirrorSocket::open(&self.path, GUEST).and_then(|connection| {
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

    /// Passes messages of the mirror to the engine while
    /// there is space, and queued answers to the mirror.
    fn poll(&mut self) {
        let mut pushed = false;
        if self.connection.is_some() && !self.begun {
            self.begun = self.source.to.push(ToEngine::Begin(self.mirror)).is_ok();
            pushed = self.begun;
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
                Ok(MirrorInput::Message(message)) => {
                    // The ring has space.
                    let _ = self.source.to.push(ToEngine::Message(message));
                    pushed = true;
                }
                Ok(MirrorInput::Part) => {}
                Ok(MirrorInput::Nothing) => self.may_have_more = false,
                Err(error) => break Err(error),
            }
        };
        if let Err(error) = result {
            self.end(&error.to_string());
        }
        if pushed {
            // Fails only if it was rung 2^64 times and not answered.
            let _ = rustix::io::write(&*self.bell, &1u64.to_ne_bytes());
        }
    }

    /// Returns the latest time of the next check.
    fn due(&self) -> Option<Duration> {
        let Some(connection) = &self.connection else {
            let at = self.connect_at.filter(|_| self.wanted)?;
            return Some(at.saturating_duration_since(Instant::now()));
        };
        let waits = !self.begun || self.may_have_more;
        let answers = !self.source.from.is_empty();
        match waits && !self.source.to.is_full() || answers && connection.has_space() {
            true => Some(Duration::ZERO),
            false => (waits || answers || connection.has_backlog()).then_some(CHECK_INTERVAL),
        }
    }
}

/// State of the thread.
struct MirrorReader {
    epoll: OwnedFd,
    shared: Arc<MirrorThreadState>,
    all: HashMap<u64, FollowedMirror>,
    last: u64,
}

impl MirrorReader {
    fn run(mut self) {
        let mut ready = vec![];
        while !self.shared.ended.load(Ordering::Relaxed) {
            self.shared.wake.sleeping();
            for followed in
                std::mem::take(&mut *self.shared.new.lock().unwrap_or_else(PoisonError::into_inner))
            {
                self.last += 1;
                self.all.insert(self.last, followed);
            }
            // The engine has dropped the other end.
            self.all.retain(|_, it| !it.source.to.is_abandoned());
            for number in ready.drain(..) {
                self.all.entry(number).and_modify(|it| it.may_have_more = true);
            }
            for (number, followed) in &mut self.all {
                followed.handle_engine_messages();
                followed.connect(*number, &self.epoll);
                followed.poll();
            }
            let left = self.all.values().filter_map(FollowedMirror::due).min();
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let mut events = [MaybeUninit::uninit(); EVENTS_MAX];
            if let Ok((events, _)) = epoll::wait(&self.epoll, &mut events, left.as_ref()) {
                ready.extend(events.iter().map(|event| event.data.u64()));
            }
            self.shared.wake.awake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixListener;

    use pdp_proto::routes::{FromGuest, ResolvedRoute};

    use super::*;

    /// All answers are handled, however many of them each check takes.
    #[test]
    fn mirror_thread_reads_all_pending_answers() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("routes.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let (to, _engine) = rtrb::RingBuffer::new(8);
        let (mut answers, from) = rtrb::RingBuffer::new(64);
        let mut followed = FollowedMirror {
            connection: Some(MirrorSocket::open(&path, GUEST).unwrap()),
            path,
            source: EngineFeed { to, from },
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
        let route = ("2001:db8::/32".parse().unwrap(), ResolvedRoute::Drop);
        let table = FromGuest::Table { dump: 1, routes: vec![route; 256] };
        while answers.push(FromEngine::Message(1, table.clone())).is_ok() {}
        let (mut bytes, mut read) = (vec![0; 1 << 20], 0);
        while followed.due().is_some() {
            followed.handle_engine_messages();
            followed.poll();
            read += mirror.read(&mut bytes).unwrap_or(0);
        }
        assert!(followed.source.from.is_empty(), "{} are left", followed.source.from.slots());
        read += mirror.read(&mut bytes).unwrap_or(0);
        assert!(read > 64 * 256, "{read} bytes");
    }
}
