//! A mux's side of the channel, with a table instead
//! of an engine, as peer for a slow path's client.

#![allow(dead_code)] // each test uses its part

use std::collections::{BTreeMap, BTreeSet};
use std::io::IoSliceMut;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pdp_proto::slowpath::{
    COUNTERS_AT_ONCE, FILTERS_AT_ONCE, Filter, FilterCounter, FilterVerdict, NO_COUNTER, NO_FILTER,
    PACKET_BYTES_MAX, QUEUES_AT_ONCE, QueueSetting, QueueState, SlowPathReply, SlowPathRequest,
    VERSION, Welcome,
};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with,
    bind, listen, recv, recvmsg, send, socket_with, socketpair,
};

/// Longest wait for an expected event.
pub const EVENTUALLY: Duration = Duration::from_secs(60);

/// Waits until `holds` returns true.
#[track_caller]
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + EVENTUALLY;
    while !holds() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// State of the engine.
#[derive(Debug, Default)]
pub struct Table {
    pub welcome: Welcome,
    pub filters: BTreeMap<u32, Filter>,
    pub counters: Vec<FilterCounter>,
    pub frames: Vec<SlowPathRequest>,
    /// Queues of the second vport, and the settings made by programs.
    pub queues: Vec<QueueState>,
    pub set: BTreeMap<(u8, u16), QueueSetting>,
    /// Commits that came into force; true for those that swept.
    pub commits: Vec<bool>,
    /// Programs that have greeted, and those connected.
    pub greeted: usize,
    pub connected: usize,
    /// Filters with this number are refused.
    pub refuses: Option<u32>,
    /// Executes the next commit, then closes without an answer.
    pub dies_at_commit: bool,
    /// Reason for disconnecting the next program that sends something.
    pub farewell: Option<String>,
}

/// Mux that listens until it is dropped or killed.
pub struct Fake {
    path: PathBuf,
    pub table: Arc<Mutex<Table>>,
    running: Option<(OwnedFd, JoinHandle<()>)>,
}

impl Fake {
    pub fn start(path: &Path) -> Self {
        let welcome = Welcome {
            version: VERSION,
            code: 0,
            vports: 4,
            tables: 1,
            filters_max: 70_000,
            counters: 5_000,
        };
        let counters = vec![FilterCounter::default(); welcome.counters as usize];
        let table = Table { welcome, counters, ..Table::default() };
        let mut fake =
            Self { path: path.into(), table: Arc::new(Mutex::new(table)), running: None };
        fake.start_again();
        fake
    }

    pub fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap()
    }

    /// Stops and closes all connections. The path stays, as after a kill.
    pub fn kill(&mut self) {
        if let Some((stop, thread)) = self.running.take() {
            drop(stop);
            thread.join().unwrap();
        }
    }

    /// Disconnects all programs with a reason.
    pub fn disconnect(&self, why: &str) {
        self.table().farewell = Some(why.into());
        let (stop, _) = self.running.as_ref().expect("it runs");
        send(stop, b"x", SendFlags::empty()).unwrap();
    }

    /// Starts a mux with the previous state.
    pub fn start_again(&mut self) {
        self.kill();
        let _ = std::fs::remove_file(&self.path);
        let listener = listen_at(&self.path);
        let flags = SocketFlags::CLOEXEC;
        let (stop, stopped) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let table = self.table.clone();
        let thread = std::thread::spawn(move || serve(&listener, &stopped, &table));
        self.running = Some((stop, thread));
    }

    /// Starts a new mux without state.
    pub fn start_anew(&mut self) {
        self.kill();
        let mut table = self.table.lock().unwrap();
        table.filters.clear();
        table.set.clear();
        table.counters.fill(FilterCounter::default());
        table.welcome.tables += 1;
        drop(table);
        self.start_again();
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Makes a listening socket.
pub fn listen_at(path: &Path) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
    listen(&listener, 8).unwrap();
    listener
}

/// Accepts one program, sends it this packet, and closes without reading its messages.
pub fn say_once(listener: &OwnedFd, packet: &[u8]) {
    let program = accept_with(listener, SocketFlags::CLOEXEC).unwrap();
    poll(&mut [PollFd::new(&program, PollFlags::IN)], None).unwrap();
    send(&program, packet, SendFlags::NOSIGNAL).unwrap();
}

struct Program {
    socket: OwnedFd,
    has_greeted: bool,
    changes: Vec<SlowPathRequest>,
}

fn serve(listener: &OwnedFd, stopped: &OwnedFd, table: &Mutex<Table>) {
    let mut programs: Vec<Program> = Vec::new();
    loop {
        let mut fds =
            vec![PollFd::new(stopped, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
        fds.extend(programs.iter().map(|program| PollFd::new(&program.socket, PollFlags::IN)));
        poll(&mut fds, None).unwrap();
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let mut index = 2;
        let mut byte = [0];
        let mut dies = ready[0] && recv(stopped, &mut byte, RecvFlags::empty()).unwrap().0 == 0;
        if ready[0] && !dies {
            let why = table.lock().unwrap().farewell.take().unwrap_or_default();
            for program in std::mem::take(&mut programs) {
                say(&program, SlowPathReply::Bye(why.clone()));
            }
            continue;
        }
        programs.retain_mut(|program| {
            index += 1;
            !ready[index - 1] || attend(program, &mut table.lock().unwrap(), &mut dies)
        });
        table.lock().unwrap().connected = programs.len();
        if dies {
            table.lock().unwrap().connected = 0;
            return;
        }
        if ready[1] {
            let socket = accept_with(listener, SocketFlags::CLOEXEC).unwrap();
            programs.push(Program { socket, has_greeted: false, changes: vec![] });
        }
    }
}

fn say(program: &Program, reply: SlowPathReply) -> bool {
    let mut packet = Vec::new();
    reply.encode(&mut packet);
    send(&program.socket, &packet, SendFlags::NOSIGNAL).is_ok()
}

/// Reads a packet. False to disconnect the program.
fn attend(program: &mut Program, table: &mut Table, dies: &mut bool) -> bool {
    let mut packet = vec![0; PACKET_BYTES_MAX + 1];
    let mut control = Default::default();
    let read = recvmsg(
        &program.socket,
        &mut [IoSliceMut::new(&mut packet)],
        &mut control,
        RecvFlags::empty(),
    );
    let length = match read {
        Ok(read) if read.bytes > 0 => read.bytes,
        _ => return false,
    };
    if length > PACKET_BYTES_MAX {
        say(program, SlowPathReply::Bye("a packet is too long".into()));
        return false;
    }
    let mut rest = &packet[..length];
    loop {
        match SlowPathRequest::decode(&mut rest) {
            Ok(None) => return true,
            Ok(Some(request)) => match answer(program, table, request) {
                Ok(()) => {}
                Err(None) => {
                    *dies = true;
                    return false;
                }
                Err(Some(why)) => {
                    say(program, SlowPathReply::Bye(why));
                    return false;
                }
            },
            Err(wrong) => {
                say(program, SlowPathReply::Bye(wrong.to_string()));
                return false;
            }
        }
    }
}

/// Returns the reason for disconnecting; `None` if the mux closes.
fn answer(
    program: &mut Program,
    table: &mut Table,
    request: SlowPathRequest,
) -> Result<(), Option<String>> {
    if let Some(why) = table.farewell.take() {
        return Err(Some(why));
    }
    let welcome = table.welcome.clone();
    match (request, program.has_greeted) {
        (SlowPathRequest::Hello(VERSION), false) => {
            program.has_greeted = true;
            table.greeted += 1;
            say(program, SlowPathReply::Welcome(welcome));
        }
        (SlowPathRequest::Hello(version), false) => {
            return Err(Some(format!("no version {version}")));
        }
        (_, false) => return Err(Some("say hello first".into())),
        (SlowPathRequest::Hello(_), true) => return Err(Some("two greetings".into())),
        (
            change @ (SlowPathRequest::Set(_)
            | SlowPathRequest::Remove(_)
            | SlowPathRequest::Queue(_)),
            true,
        ) => program.changes.push(change),
        (SlowPathRequest::Queues { number, vport, first }, true) => {
            let of = if vport == 1 { &table.queues[..] } else { &[] };
            let mut parts = of[usize::from(first) - 1..].chunks(QUEUES_AT_ONCE).peekable();
            let mut first = first;
            loop {
                let queues = parts.next().unwrap_or_default().to_vec();
                let (at, more) = (first, parts.peek().is_some());
                first += queues.len() as u16;
                say(program, SlowPathReply::Queues { number, first: at, queues, more });
                if !more {
                    break;
                }
            }
        }
        (SlowPathRequest::Commit { number, sweep }, true) => {
            let changes = std::mem::take(&mut program.changes);
            let refused = changes.iter().find_map(|change| match change {
                SlowPathRequest::Set(filter) => refuses(table, filter).map(|why| (filter.id, why)),
                SlowPathRequest::Queue(it) if usize::from(it.queue) > table.queues.len() => {
                    Some((NO_FILTER, format!("queue {} does not exist", it.queue)))
                }
                _ => None,
            });
            if let Some((id, reason)) = refused {
                say(program, SlowPathReply::Refused { number, id, reason });
                return Ok(());
            }
            let mut set = BTreeSet::new();
            if sweep {
                table.set.clear();
            }
            for change in changes {
                match change {
                    SlowPathRequest::Set(filter) => {
                        set.insert(filter.id);
                        table.filters.insert(filter.id, filter);
                    }
                    SlowPathRequest::Remove(id) => drop(table.filters.remove(&id).is_some()),
                    SlowPathRequest::Queue(it) => drop(table.set.insert((it.vport, it.queue), it)),
                    _ => {}
                }
            }
            if sweep {
                table.filters.retain(|id, _| set.contains(id));
            }
            table.commits.push(sweep);
            if std::mem::take(&mut table.dies_at_commit) {
                return Err(None);
            }
            let filters = table.filters.len() as u32;
            say(program, SlowPathReply::Done { number, filters });
        }
        (SlowPathRequest::Counters { number, first, count }, true) => {
            let (start, end) = (first as usize, first as usize + count as usize);
            let Some(asked) = table.counters.get(start..end) else {
                return Err(Some(format!("the router has {} counters", welcome.counters)));
            };
            let mut first = first;
            let mut parts = asked.chunks(COUNTERS_AT_ONCE).peekable();
            loop {
                let counters = parts.next().unwrap_or_default().to_vec();
                let (at, more) = (first, parts.peek().is_some());
                first += counters.len() as u32;
                say(program, SlowPathReply::Counters { number, first: at, counters, more });
                if !more {
                    break;
                }
            }
        }
        (SlowPathRequest::List { number, first }, true) => {
            let all: Vec<Filter> = table.filters.range(first..).map(|(_, it)| *it).collect();
            let mut parts = all.chunks(FILTERS_AT_ONCE).peekable();
            loop {
                let filters = parts.next().unwrap_or_default().to_vec();
                let more = parts.peek().is_some();
                if !say(program, SlowPathReply::Filters { number, filters, more }) || !more {
                    break;
                }
            }
        }
        (frame @ SlowPathRequest::Frame { .. }, true) => table.frames.push(frame),
    }
    Ok(())
}

fn refuses(table: &Table, filter: &Filter) -> Option<String> {
    let welcome = &table.welcome;
    let vports = filter.action.copies().iter().chain(match filter.action.verdict {
        FilterVerdict::Send => std::slice::from_ref(&filter.action.vport),
        _ => &[],
    });
    if table.refuses == Some(filter.id) {
        Some("look-ups would take too long".into())
    } else if filter.id >= welcome.filters_max {
        Some(format!("its number is not below {}", welcome.filters_max))
    } else if vports.into_iter().any(|vport| u16::from(*vport) >= welcome.vports) {
        Some("there is no such vport".into())
    } else if filter.action.counter != NO_COUNTER && filter.action.counter >= welcome.counters {
        Some("there is no such counter".into())
    } else {
        None
    }
}
