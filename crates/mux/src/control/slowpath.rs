//! Reads the requests of control guests' programs to engines, and answers them.
//!
//! It runs in its own thread, as for routes, because reading a socket may take as long
//! as its other end wants. Requests are checked here, and all memory for them is
//! allocated here. The thread takes [`PACKETS_AT_ONCE`] packets of one program, then of
//! the next. It stops reading from a program that has too many outstanding jobs or does
//! not read its answers. The time that it spends for a program is charged to its vnet.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use pdp_proto::limits::{QUEUE_FRAMES_MAX, WEIGHT_MAX};
use pdp_proto::mux::{self, Rate};
use pdp_proto::slowpath::{
    COUNTERS_AT_ONCE, FILTERS_AT_ONCE, FRAME_BYTES_MAX, Filter, FilterCounter, FilterPattern,
    FilterVerdict, NO_COUNTER, NO_FILTER, PACKET_BYTES_MAX, QUEUES_AT_ONCE, QUEUES_SET_MAX,
    QueueSetting, SlowPathReply, SlowPathRequest, VERSION, Welcome,
};
use pdp_wire::ether;
use quanta::Clock;
use rustix::event::{Timespec, epoll};
use rustix::net::{RecvFlags, SendFlags, Shutdown, SocketFlags};

use crate::actions::{Actions, ChangeSet, FilterChange, changes_max, with_capacity};
use crate::engine::VrouterEngine;
use crate::police::TokenBucket;
use crate::slowpath::{AddressedJob, Commit, JOBS_MAX, SlowPathHandle, SlowPathJob};
use crate::wake::Wake;

/// Programs of a vrouter at a time.
pub const PROGRAMS_MAX: usize = 4;

/// Programs that may connect to a vrouter each second, and at once.
const CONNECTS_A_SECOND: u64 = 10;
const CONNECTS_AT_ONCE: u64 = 16;

/// Packets of one program that are read in a row.
const PACKETS_AT_ONCE: usize = 4;

/// Outstanding jobs below which another packet is read. Each
/// packet may ask for many jobs, which are queued here.
const JOBS_BUSY: usize = JOBS_MAX / 2;

/// Most bytes of answers that a program has not read. Above it, the mux reads no more requests.
const BACKLOG_BYTES: usize = 256 << 10;

/// Bytes of answers that are combined in one packet. The last answer may be longer, up to 33 KB.
const TOGETHER_BYTES: usize = 16 << 10;

/// Longest time for which a program may leave its
/// answers unread, and within which it has to say hello.
const PATIENCE: Duration = Duration::from_secs(5);

/// Most packets in a socket, approximately: the smallest
/// ones, in the memory that the kernel permits.
const UNREAD_MAX: usize = 1024;

/// Events handled at a time.
const EVENTS_MAX: usize = 64;

/// Number of the thread's own doorbell.
const WAKE: u64 = 0;

/// Handle of the thread, which ends with it.
pub struct SlowPaths(Arc<SlowPathRegistry>);

struct SlowPathRegistry {
    wake: Arc<Wake>,
    new: Mutex<Vec<SlowPathEndpoint>>,
    /// Listening sockets by path, while an engine has them.
    listeners: Mutex<HashMap<PathBuf, Weak<OwnedFd>>>,
    ended: AtomicBool,
}

impl Drop for SlowPaths {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::Relaxed);
        self.0.wake.ring();
    }
}

impl SlowPaths {
    /// Starts the thread.
    pub fn start() -> io::Result<Self> {
        let shared = Arc::new(SlowPathRegistry {
            wake: Arc::new(Wake::new()?),
            new: Mutex::default(),
            listeners: Mutex::default(),
            ended: AtomicBool::new(false),
        });
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &*shared.wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        let thread =
            SlowPathThread { epoll, shared: shared.clone(), all: HashMap::new(), last: WAKE };
        std::thread::Builder::new().name("slowpaths".into()).spawn(move || thread.run())?;
        Ok(Self(shared))
    }

    /// True if `socket` has a listener.
    pub fn listens(&self, socket: &PathBuf) -> bool {
        self.listeners().get(socket).is_some_and(|it| it.strong_count() > 0)
    }

    fn listeners(&self) -> std::sync::MutexGuard<'_, HashMap<PathBuf, Weak<OwnedFd>>> {
        self.0.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a slow path: programs that connect to `spec`'s socket control
    /// `engine`. `bell` wakes its vnet. `listener` listens there, unless the
    /// socket already has a listener. False if there is no listener at all.
    pub fn add(
        &self,
        engine: &mut VrouterEngine,
        code: &mux::EngineCode,
        spec: &mux::SlowPathConfig,
        bell: Arc<OwnedFd>,
        listener: Option<OwnedFd>,
    ) -> bool {
        let mut listeners = self.listeners();
        listeners.retain(|_, it| it.strong_count() > 0);
        let known = listeners.get(&spec.socket).and_then(Weak::upgrade);
        let Some(listener) = known.or_else(|| listener.map(Arc::new)) else { return false };
        listeners.insert(spec.socket.clone(), Arc::downgrade(&listener));
        let desk = engine.add_slowpath(self.0.wake.clone());
        let connects = Rate { bps: 0, pps: CONNECTS_A_SECOND };
        let place = SlowPathEndpoint {
            spec: spec.clone(),
            fields: match code {
                mux::EngineCode::Ip { .. } => None,
                mux::EngineCode::Fields(fields) => Some(fields.is_long()),
            },
            listener,
            handle: desk,
            bell,
            listens: false,
            may_accept: true,
            accept_ns: 0,
            connects: TokenBucket::new(connects, 0, CONNECTS_AT_ONCE),
            programs: vec![],
            jobs: VecDeque::new(),
            under_way: 0,
            changing: 0,
            tables: 0,
            short: false,
            long: false,
        };
        self.0.new.lock().unwrap_or_else(PoisonError::into_inner).push(place);
        self.0.wake.ring();
        true
    }
}

/// A vrouter with an engine that programs can control.
struct SlowPathEndpoint {
    spec: mux::SlowPathConfig,
    /// True for long keys, if the engine forwards by `fields`.
    fields: Option<bool>,
    listener: Arc<OwnedFd>,
    handle: SlowPathHandle,
    /// Wakes the engine's vnet.
    bell: Arc<OwnedFd>,
    listens: bool,
    may_accept: bool,
    /// No program is accepted before this time, nanoseconds.
    accept_ns: u64,
    connects: TokenBucket,
    programs: Vec<SlowPathClient>,
    /// Jobs that the ring has no space for.
    jobs: VecDeque<AddressedJob>,
    /// Number of outstanding jobs.
    under_way: usize,
    /// Number of changes and commits in all jobs.
    changing: usize,
    /// Identifies the engine's tables; 0: it has none.
    tables: u64,
    /// True if the engine has a set for filters of this length.
    short: bool,
    long: bool,
}

/// A connected program.
struct SlowPathClient {
    number: u64,
    socket: OwnedFd,
    since: Instant,
    /// True once it has sent its protocol version.
    hello: bool,
    /// Changes that it has not committed yet, and the first invalid one.
    changes: ChangeSet,
    wrong: Option<(u32, String)>,
    may_have_more: bool,
    /// The packet that it sent last, and how many of its bytes were handled.
    packet: Vec<u8>,
    heard: usize,
    /// True while it gets counters, filters or queues. That may be
    /// much data, so no more requests are handled before its end.
    asking: bool,
    /// Answers that wait to be sent.
    backlog: VecDeque<Vec<u8>>,
    backlog_bytes: usize,
    /// Counters to send behind these. Each of their packets
    /// is built when the earlier ones have been sent.
    counts: Option<CounterSnapshot>,
    /// Time since when no answer could be sent.
    stuck: Option<Instant>,
    ended: bool,
}

/// Values of counters at one moment.
struct CounterSnapshot {
    /// Number of the request.
    number: u64,
    first: u32,
    counters: Vec<FilterCounter>,
    /// Counters that were sent already.
    sent: usize,
}

impl SlowPathClient {
    /// Queues a reply for the next [`Self::flush`]. Short replies are combined in one packet.
    fn say(&mut self, reply: &SlowPathReply) {
        if self.backlog.back().is_none_or(|packet| packet.len() >= TOGETHER_BYTES) {
            self.backlog.push_back(vec![]);
        }
        let Some(packet) = self.backlog.back_mut() else { return };
        let before = packet.len();
        reply.encode(packet);
        self.backlog_bytes += packet.len() - before;
    }

    /// Queues the next packet of counters.
    fn send_counters(&mut self) {
        let Some(CounterSnapshot { number, first, counters, sent }) = &mut self.counts else {
            return;
        };
        let left = &counters[*sent..];
        let some = &left[..left.len().min(COUNTERS_AT_ONCE)];
        let (more, mut packet) = (some.len() < left.len(), vec![]);
        SlowPathReply::put_counters(*number, *first + *sent as u32, some, more, &mut packet);
        *sent += some.len();
        if !more {
            self.counts = None;
            self.asking = false;
        }
        self.backlog_bytes += packet.len();
        self.backlog.push_back(packet);
    }

    /// Sends queued answers, as many as the socket takes.
    fn flush(&mut self) {
        loop {
            if self.backlog.is_empty() {
                self.send_counters();
            }
            let Some(packet) = self.backlog.front() else { return };
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(&self.socket, packet, flags) {
                Ok(_) => {
                    self.backlog_bytes -= packet.len();
                    self.backlog.pop_front();
                    self.stuck = None;
                }
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::NOBUFS) => {
                    self.stuck.get_or_insert_with(Instant::now);
                    return;
                }
                Err(_) => {
                    self.ended = true;
                    return;
                }
            }
        }
    }

    /// Reads the next packet that the program sent, if there is one.
    fn read(&mut self, bytes: &mut [u8]) -> Result<(), String> {
        let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC;
        let length = match rustix::net::recv(&self.socket, &mut *bytes, flags) {
            Ok((_, 0)) => {
                self.ended = true;
                return Ok(());
            }
            Ok((_, length)) => length,
            Err(rustix::io::Errno::AGAIN) => {
                self.may_have_more = false;
                return Ok(());
            }
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Err(_) => {
                self.ended = true;
                return Ok(());
            }
        };
        let packet = bytes
            .get(..length)
            .ok_or_else(|| format!("packet of {length} bytes, {PACKET_BYTES_MAX} at most"))?;
        self.packet.clear();
        self.packet.extend_from_slice(packet);
        self.heard = 0;
        Ok(())
    }

    fn end(&mut self, why: &str) -> Option<String> {
        self.counts = None;
        self.say(&SlowPathReply::Bye(why.into()));
        self.flush();
        self.ended = true;
        // Unread packets would reset the connection before the program reads this.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Read);
        let read = || rustix::net::recv(&self.socket, &mut [0; 1], RecvFlags::DONTWAIT);
        let mut left = UNREAD_MAX;
        while left > 0 && read().is_ok_and(|(_, length)| length > 0) {
            left -= 1;
        }
        Some(why.into())
    }

    /// True if the program's requests shall be handled.
    fn is_heard(&self) -> bool {
        let has_said = self.may_have_more || self.heard < self.packet.len();
        has_said && !self.ended && !self.asking && self.backlog_bytes < BACKLOG_BYTES
    }

    /// Returns the time when the program counts as dead.
    fn patience_ends(&self) -> Option<Instant> {
        let hello = (!self.hello).then_some(self.since);
        self.stuck.into_iter().chain(hello).min().map(|since| since + PATIENCE)
    }
}

impl SlowPathEndpoint {
    /// True if it needs no work.
    fn is_quiet(&self) -> bool {
        let accepts = if self.listens {
            self.may_accept
        } else {
            self.handle.shared.used.load(Ordering::Relaxed)
        };
        !accepts && self.programs.is_empty() && self.under_way == 0 && self.jobs.is_empty()
    }

    /// True if more jobs and changes may be queued.
    fn has_room(&self) -> bool {
        self.under_way + self.jobs.len() < JOBS_BUSY
            && self.changing < changes_max(self.spec.filters)
    }

    /// Sends answers, accepts programs, and reads requests. `number`
    /// is this vrouter's number, and `last` the last number used.
    fn poll(&mut self, number: u64, epoll: &OwnedFd, last: &mut u64, now_ns: u64) {
        while let Ok(asked) = self.handle.from.pop() {
            self.under_way -= 1;
            self.answer(asked);
        }
        self.accept(number, epoll, last, now_ns);
        let mut fault = None;
        let mut bytes = vec![];
        for at in 0..self.programs.len() {
            let program = &mut self.programs[at];
            program.flush();
            if program.patience_ends().is_some_and(|end| Instant::now() >= end) {
                let why = match program.hello {
                    true => "it does not read its replies",
                    false => "it sends no hello",
                };
                fault = program.end(why);
            }
            for _ in 0..PACKETS_AT_ONCE {
                if !self.programs[at].is_heard() || !self.has_room() {
                    break;
                }
                bytes.resize(PACKET_BYTES_MAX, 0);
                match self.handle_packet(at, &mut bytes) {
                    Ok(()) => {}
                    Err(why) => fault = self.programs[at].end(&why),
                }
            }
            self.programs[at].flush();
        }
        for gone in self.programs.extract_if(.., |it| it.ended) {
            let _ = epoll::delete(epoll, &gone.socket);
        }
        if let Some(fault) = fault {
            *self.handle.shared.fault.lock().unwrap_or_else(PoisonError::into_inner) = Some(fault);
        }
        let programs = self.programs.len() as u64;
        self.handle.shared.programs.store(programs, Ordering::Relaxed);
        self.hand_over();
    }

    fn accept(&mut self, number: u64, epoll: &OwnedFd, last: &mut u64, now_ns: u64) {
        if !self.listens {
            if !self.handle.shared.used.load(Ordering::Acquire) {
                return;
            }
            let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
            let data = epoll::EventData::new_u64(number);
            let added = match epoll::add(epoll, &*self.listener, data, flags) {
                // Registered for the previous engine, which is about to end.
                Err(rustix::io::Errno::EXIST) => epoll::modify(epoll, &*self.listener, data, flags),
                result => result,
            };
            (self.listens, self.may_accept) = (added.is_ok(), true);
        }
        while self.listens && self.may_accept && self.accept_ns <= now_ns {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let socket = match rustix::net::accept_with(&*self.listener, flags) {
                Ok(socket) => socket,
                Err(rustix::io::Errno::CONNABORTED) => continue,
                Err(_) => {
                    self.may_accept = false;
                    return;
                }
            };
            if let Err(at_ns) = self.connects.take(now_ns, 0) {
                self.accept_ns = at_ns;
            }
            *last += 1;
            let mut program = SlowPathClient {
                number: *last,
                socket,
                since: Instant::now(),
                hello: false,
                changes: ChangeSet::default(),
                wrong: None,
                may_have_more: true,
                packet: vec![],
                heard: 0,
                asking: false,
                backlog: VecDeque::new(),
                backlog_bytes: 0,
                counts: None,
                stuck: None,
                ended: false,
            };
            if self.programs.len() >= PROGRAMS_MAX {
                program.end(&format!("more than {PROGRAMS_MAX} programs"));
                continue;
            }
            let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
            let data = epoll::EventData::new_u64(number);
            if epoll::add(epoll, &program.socket, data, flags).is_ok() {
                self.programs.push(program);
            }
        }
    }

    /// Handles requests of a program while there is space.
    /// An error says why the program is disconnected.
    fn handle_packet(&mut self, at: usize, bytes: &mut [u8]) -> Result<(), String> {
        let program = &mut self.programs[at];
        if program.heard == program.packet.len() {
            program.read(bytes)?;
        }
        while self.has_room() && self.programs[at].is_heard() {
            let program = &mut self.programs[at];
            let mut rest = &program.packet[program.heard..];
            let request = SlowPathRequest::decode(&mut rest).map_err(|wrong| wrong.to_string())?;
            program.heard = program.packet.len() - rest.len();
            match request {
                Some(request) => self.handle_request(at, request)?,
                None => break,
            }
        }
        Ok(())
    }

    fn handle_request(&mut self, at: usize, request: SlowPathRequest) -> Result<(), String> {
        let program = &mut self.programs[at];
        let client = program.number;
        if let SlowPathRequest::Hello(version) = request {
            if version != VERSION {
                return Err(format!("its protocol has version {version}, the mux's {VERSION}"));
            }
            program.hello = true;
            self.ready()?;
            let welcome = Welcome {
                version: VERSION,
                code: u8::from(self.fields.is_some()),
                vports: self.handle.shared.vports.load(Ordering::Relaxed) as u16,
                tables: self.tables,
                filters_max: self.spec.filters,
                counters: self.spec.counters,
            };
            self.programs[at].say(&SlowPathReply::Welcome(welcome));
            return Ok(());
        }
        if !program.hello {
            return Err("its first request is not hello".into());
        }
        let ask = |number, job| AddressedJob { client, number, job };
        match request {
            SlowPathRequest::Hello(_) => {}
            SlowPathRequest::Set(filter) => {
                if let Err(why) = self.check(&filter) {
                    self.programs[at].wrong.get_or_insert((filter.id, why));
                }
                match filter.pattern {
                    FilterPattern::Short { .. } if !self.short => {
                        let set = with_capacity(self.spec.filters, random()?);
                        self.jobs.push_back(ask(0, SlowPathJob::Short(Some(set))));
                        self.short = true;
                    }
                    FilterPattern::Long { .. } if !self.long => {
                        let set = with_capacity(self.spec.filters, random()?);
                        self.jobs.push_back(ask(0, SlowPathJob::Long(Some(set))));
                        self.long = true;
                    }
                    _ => {}
                }
                self.change(at, FilterChange::Set(filter))?;
            }
            SlowPathRequest::Remove(id) => self.change(at, FilterChange::Remove(id))?,
            SlowPathRequest::Queue(setting) => {
                let wrong = self.check_queue(&setting);
                let program = &mut self.programs[at];
                if let Err(why) = wrong {
                    program.wrong.get_or_insert((NO_FILTER, why));
                }
                if program.changes.queues.len() >= QUEUES_SET_MAX {
                    return Err(format!("more than {QUEUES_SET_MAX} queues in one commit"));
                }
                program.changes.queues.push(setting);
            }
            SlowPathRequest::Queues { number, vport, first } => {
                let vports = self.handle.shared.vports.load(Ordering::Relaxed);
                if u64::from(vport) >= vports {
                    return Err(format!(
                        "vport {vport} does not exist: the router has {vports}, numbered from 0"
                    ));
                }
                let first = first
                    .checked_sub(1)
                    .ok_or("queue 0 does not exist: queues are numbered from 1".to_string())?;
                let states = Vec::with_capacity(QUEUES_AT_ONCE);
                self.programs[at].asking = true;
                self.jobs.push_back(ask(number, SlowPathJob::Queues(vport, first, states, false)));
            }
            SlowPathRequest::Commit { number, sweep } => {
                let wrong = program.wrong.take();
                let changes = std::mem::take(&mut program.changes);
                let mut commit = Commit { number, changes, wrong };
                commit.changes.sweep = sweep;
                self.changing += commit.changes.count() + 1;
                match self.jobs.back_mut() {
                    // Added to the earlier commits of the same packet.
                    Some(AddressedJob {
                        client: before, job: SlowPathJob::Commit(all, _), ..
                    }) if *before == client => {
                        all.push(commit);
                    }
                    _ => self.jobs.push_back(ask(0, SlowPathJob::Commit(vec![commit], 0))),
                }
            }
            SlowPathRequest::Counters { number, first, count } => {
                let counters = self.spec.counters;
                let end = first.checked_add(count).filter(|end| *end <= counters);
                let Some(end) = end else {
                    return Err(format!(
                        "{count} counters from {first} do not exist: the router has {counters}, numbered from 0"
                    ));
                };
                program.asking = true;
                let room = Vec::with_capacity(count as usize);
                self.jobs.push_back(ask(number, SlowPathJob::Count(first..end, room)));
            }
            SlowPathRequest::List { number, first } => {
                let filters = Vec::with_capacity(FILTERS_AT_ONCE);
                program.asking = true;
                self.jobs.push_back(ask(number, SlowPathJob::List(first, filters, None)));
            }
            SlowPathRequest::Frame { out, vport, queue, bytes } => {
                if !(ether::HEADER_BYTES..=FRAME_BYTES_MAX).contains(&bytes.len()) {
                    return Err(format!("frame of {} bytes", bytes.len()));
                }
                self.jobs.push_back(ask(0, SlowPathJob::Send { out, vport, queue, bytes }));
            }
        }
        Ok(())
    }

    /// Gives the engine its tables, if it has none yet.
    fn ready(&mut self) -> Result<(), String> {
        if self.tables == 0 {
            let actions = Actions::new(self.spec.filters, self.spec.counters);
            let job = SlowPathJob::Actions(Some(Box::new(actions)));
            self.jobs.push_back(AddressedJob { client: 0, number: 0, job });
            self.tables = random()?.max(1);
        }
        Ok(())
    }

    /// Checks a filter.
    fn check(&self, filter: &Filter) -> Result<(), String> {
        let (filters, counters) = (self.spec.filters, self.spec.counters);
        let vports = self.handle.shared.vports.load(Ordering::Relaxed);
        let action = &filter.action;
        if filter.id >= filters {
            // The caller adds the filter's number.
            return Err(format!(
                "the router has {filters} filters, numbered from 0 (dataPlane.filters)"
            ));
        }
        if action.counter != NO_COUNTER && action.counter >= counters {
            return Err(format!(
                "counter {} does not exist: the router has {counters}, numbered from 0",
                action.counter
            ));
        }
        let sent = (action.verdict == FilterVerdict::Send).then_some(&action.vport);
        let ports = sent.into_iter().chain(action.copies());
        if let Some(vport) = ports.copied().find(|vport| u64::from(*vport) >= vports) {
            return Err(format!(
                "vport {vport} does not exist: the router has {vports}, numbered from 0"
            ));
        }
        let is_long = matches!(filter.pattern, FilterPattern::Long { .. });
        if self.fields.is_some_and(|long| long != is_long) {
            let bytes = if is_long { 16 } else { 40 };
            return Err(format!("patterns of this vrouter's fields have {bytes} bytes"));
        }
        let is_ip = self.fields.is_none();
        if is_ip && action.verdict == FilterVerdict::Send && action.data[..6] == [0; 6] {
            return Err("it sends frames, but has no destination MAC address".into());
        }
        Ok(())
    }

    /// Checks a queue's parameters against general limits.
    fn check_queue(&self, setting: &QueueSetting) -> Result<(), String> {
        let QueueSetting { vport, queue, weight, frames, .. } = *setting;
        let vports = self.handle.shared.vports.load(Ordering::Relaxed);
        let about = format!("queue {queue} of vport {vport}");
        if u64::from(vport) >= vports {
            return Err(format!(
                "vport {vport} does not exist: the router has {vports}, numbered from 0"
            ));
        }
        if queue == 0 {
            return Err(format!("{about}: queues are numbered from 1"));
        }
        if weight > WEIGHT_MAX {
            return Err(format!("{about}: weight {weight} exceeds {WEIGHT_MAX}"));
        }
        if frames > QUEUE_FRAMES_MAX {
            return Err(format!("{about}: {frames} frames, {QUEUE_FRAMES_MAX} at most"));
        }
        Ok(())
    }

    fn change(&mut self, at: usize, change: FilterChange) -> Result<(), String> {
        let collected: usize = self.programs.iter().map(|it| it.changes.all.len()).sum();
        let most = changes_max(self.spec.filters);
        if collected >= most {
            return Err(format!("more than {most} uncommitted changes of all programs"));
        }
        self.programs[at].changes.all.push(change);
        Ok(())
    }

    /// Passes jobs to the engine while the ring has space.
    fn hand_over(&mut self) {
        let mut pushed = false;
        while self.under_way < JOBS_MAX
            && let Some(job) = self.jobs.pop_front()
        {
            // The ring has space.
            let _ = self.handle.to.push(job);
            self.under_way += 1;
            pushed = true;
        }
        if pushed {
            // Fails only if it was rung 2^64 times and not answered.
            let _ = rustix::io::write(&*self.bell, &1u64.to_ne_bytes());
        }
    }

    /// Sends the result of a job to its program, if that is still connected.
    fn answer(&mut self, asked: AddressedJob) {
        let AddressedJob { client, number, job } = asked;
        if let SlowPathJob::Commit(all, _) = &job {
            self.changing -= all.iter().map(|commit| commit.changes.count() + 1).sum::<usize>();
        }
        let Some(program) = self.programs.iter_mut().find(|it| it.number == client) else { return };
        match job {
            SlowPathJob::Actions(_)
            | SlowPathJob::Short(_)
            | SlowPathJob::Long(_)
            | SlowPathJob::Send { .. } => {}
            SlowPathJob::Commit(all, _) => {
                for Commit { number, changes, wrong } in all {
                    program.say(&match (wrong, changes.result) {
                        (Some((id, reason)), _) => SlowPathReply::Refused { number, id, reason },
                        (None, Some(Ok(filters))) => SlowPathReply::Done { number, filters },
                        (None, Some(Err((id, why)))) => {
                            SlowPathReply::Refused { number, id, reason: why.text() }
                        }
                        (None, None) => SlowPathReply::Refused {
                            number,
                            id: 0,
                            reason: "the router has no filter tables yet".into(),
                        },
                    });
                }
            }
            SlowPathJob::Count(numbers, counters) => {
                let first = numbers.start;
                program.counts = Some(CounterSnapshot { number, first, counters, sent: 0 });
            }
            SlowPathJob::Queues(vport, first, queues, more) => {
                let next = first + queues.len() as u16;
                program.say(&SlowPathReply::Queues { number, first: first + 1, queues, more });
                program.asking = more;
                if more {
                    let states = Vec::with_capacity(QUEUES_AT_ONCE);
                    let job = SlowPathJob::Queues(vport, next, states, false);
                    self.jobs.push_back(AddressedJob { client, number, job });
                }
            }
            SlowPathJob::List(_, filters, more) => {
                program.say(&SlowPathReply::Filters { number, filters, more: more.is_some() });
                program.asking = more.is_some();
                if let Some(next) = more {
                    let job = SlowPathJob::List(next, Vec::with_capacity(FILTERS_AT_ONCE), None);
                    self.jobs.push_back(AddressedJob { client, number, job });
                }
            }
        }
    }

    /// Returns the latest time of the next check.
    fn due(&self, now_ns: u64) -> Option<Duration> {
        if self.has_room() && self.programs.iter().any(SlowPathClient::is_heard) {
            return Some(Duration::ZERO);
        }
        let waits = self.listens && self.may_accept;
        let accept = waits.then(|| Duration::from_nanos(self.accept_ns.saturating_sub(now_ns)));
        let ends = self.programs.iter().filter_map(SlowPathClient::patience_ends);
        ends.map(|end| end.saturating_duration_since(Instant::now())).chain(accept).min()
    }
}

fn random() -> Result<u64, String> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| format!("no random number: {error}"))?;
    Ok(u64::from_ne_bytes(bytes))
}

/// State of the thread.
struct SlowPathThread {
    epoll: OwnedFd,
    shared: Arc<SlowPathRegistry>,
    all: HashMap<u64, SlowPathEndpoint>,
    last: u64,
}

impl SlowPathThread {
    fn run(mut self) {
        let (start, clock) = (Instant::now(), Clock::new());
        let mut ready = vec![];
        while !self.shared.ended.load(Ordering::Relaxed) {
            self.shared.wake.sleeping();
            let new = std::mem::take(
                &mut *self.shared.new.lock().unwrap_or_else(PoisonError::into_inner),
            );
            for place in new {
                self.last += 1;
                self.all.insert(self.last, place);
            }
            // The engine has dropped the other end.
            for (_, mut gone) in self.all.extract_if(|_, it| it.handle.to.is_abandoned()) {
                for program in &mut gone.programs {
                    program.end("its router's fast path was removed or replaced");
                    let _ = epoll::delete(&self.epoll, &program.socket);
                }
                if gone.listens && Arc::strong_count(&gone.listener) == 1 {
                    // The process that made the socket may also
                    // hold it, so closing it is not enough.
                    let _ = epoll::delete(&self.epoll, &*gone.listener);
                }
            }
            for number in ready.drain(..) {
                self.all.entry(number).and_modify(|place| {
                    place.may_accept = true;
                    place.programs.iter_mut().for_each(|it| it.may_have_more = true);
                });
            }
            let now_ns = start.elapsed().as_nanos() as u64;
            for (number, place) in self.all.iter_mut().filter(|(_, it)| !it.is_quiet()) {
                let since = clock.raw();
                place.poll(*number, &self.epoll, &mut self.last, now_ns);
                place
                    .handle
                    .shared
                    .outstanding_cycles
                    .fetch_add(clock.raw() - since, Ordering::Relaxed);
            }
            let left = self.all.values().filter_map(|place| place.due(now_ns)).min();
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let mut events = [MaybeUninit::uninit(); EVENTS_MAX];
            if let Ok((events, _)) = epoll::wait(&self.epoll, &mut events, left.as_ref()) {
                ready.extend(events.iter().map(|event| event.data.u64()));
            }
            self.shared.wake.awake();
        }
    }
}
