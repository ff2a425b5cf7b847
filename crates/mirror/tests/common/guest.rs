//! Simple guest that applies every message.

use std::collections::{BTreeMap, HashMap};
use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use ipnet::IpNet;
use pdp_proto::channel::FrameReader;
use pdp_proto::routes::{
    FromGuest, GroupHop, GroupId, ResolvedRoute, RouteDecision, ToGuest, VERSION, Vport, decode,
    encode,
};

/// State of a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    pub vports: BTreeMap<u16, Vport>,
    /// Local addresses; true for the router's own.
    pub locals: BTreeMap<IpAddr, bool>,
    pub groups: HashMap<GroupId, (Vec<GroupHop>, u32)>,
    pub routes: HashMap<IpNet, RouteDecision>,
    pub neighbours: BTreeMap<(u16, IpAddr), [u8; 6]>,
    pub forwarding: (bool, bool),
    pub choosing: (bool, bool),
}

impl State {
    pub fn apply(&mut self, message: ToGuest) {
        match message {
            ToGuest::Vport(vport) => {
                self.vports.insert(vport.index, vport);
            }
            ToGuest::Local { address, own } => {
                assert_ne!(self.locals.insert(address, own), Some(own), "{address} twice");
            }
            ToGuest::LocalGone(address) => {
                assert!(self.locals.remove(&address).is_some(), "{address}");
            }
            ToGuest::Group { id, hops, mtu } => {
                assert!(!hops.is_empty() && hops.is_sorted(), "{hops:?}");
                self.groups.insert(id, (hops, mtu));
            }
            ToGuest::GroupGone(id) => {
                assert!(self.groups.remove(&id).is_some(), "no group {id}");
            }
            ToGuest::Route { prefix, target } => {
                if let RouteDecision::Group(id) = target {
                    assert!(self.groups.contains_key(&id), "no group {id} yet");
                }
                self.routes.insert(prefix, target);
            }
            ToGuest::RouteGone(prefix) => {
                assert!(self.routes.remove(&prefix).is_some(), "{prefix}")
            }
            ToGuest::Neighbour { vport, address, mac: Some(mac) } => {
                self.neighbours.insert((vport, address), mac);
            }
            ToGuest::Neighbour { vport, address, mac: None } => {
                self.neighbours.remove(&(vport, address));
            }
            ToGuest::Forwarding { v4, v6 } => self.forwarding = (v4, v6),
            ToGuest::Choosing { v4, v6 } => self.choosing = (v4, v6),
            ToGuest::Begin | ToGuest::End | ToGuest::Barrier(_) | ToGuest::Dump(_) => {}
        }
    }

    pub fn resolve(&self, target: RouteDecision) -> ResolvedRoute {
        match target {
            RouteDecision::Group(id) => ResolvedRoute::Hops(self.groups[&id].0.clone()),
            RouteDecision::Punt => ResolvedRoute::Punt,
            RouteDecision::Drop => ResolvedRoute::Drop,
        }
    }

    /// Routes with their hops written out.
    pub fn resolved(&self) -> BTreeMap<IpNet, ResolvedRoute> {
        self.routes.iter().map(|(prefix, target)| (*prefix, self.resolve(*target))).collect()
    }
}

#[derive(Default)]
pub struct Shared {
    /// State that it forwards by.
    pub state: State,
    /// State of an unfinished snapshot so far.
    fresh: Option<State>,
    pub snapshots: u32,
    pub routes_gone: u64,
    pub messages: u64,
    /// Last barrier, and true if nothing arrived since then.
    pub barrier: u64,
    pub at_barrier: bool,
    /// Keeps its answers to barriers back.
    pub silent: bool,
    /// Times that its table was requested.
    pub dumps: u64,
    pub snapshot_begun: Option<Instant>,
    pub snapshot_ended: Option<Instant>,
    pub closed: bool,
    /// Prefix that it reports wrongly when its table is requested.
    pub lie: Option<IpNet>,
}

/// A connected guest.
pub struct Guest {
    pub shared: Arc<Mutex<Shared>>,
    pub stream: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl Guest {
    pub fn connect(socket: &Path, number: u32) -> Self {
        Self::reconnect(socket, number, Arc::default())
    }

    /// Connects again with the existing table.
    pub fn reconnect(socket: &Path, number: u32, shared: Arc<Mutex<Shared>>) -> Self {
        shared.lock().unwrap().closed = false;
        let mut stream = UnixStream::connect(socket).unwrap();
        let hello = encode(&[FromGuest::Hello { version: VERSION, guest: number }]).unwrap();
        stream.write_all(&hello).unwrap();
        let thread = std::thread::spawn({
            let (stream, shared) = (stream.try_clone().unwrap(), shared.clone());
            move || listen(stream, &shared)
        });
        Self { shared, stream, thread: Some(thread) }
    }

    pub fn say(&self, message: FromGuest) {
        (&self.stream).write_all(&encode(&[message]).unwrap()).unwrap();
    }

    /// Answers barriers, including those that were held back.
    pub fn confirm(&self) {
        let mut shared = self.shared.lock().unwrap();
        shared.silent = false;
        self.say(FromGuest::Applied(shared.barrier));
    }

    pub fn state(&self) -> State {
        self.shared.lock().unwrap().state.clone()
    }

    pub fn snapshots(&self) -> u32 {
        self.shared.lock().unwrap().snapshots
    }

    /// Closes the connection and returns the guest's state.
    pub fn leave(mut self) -> Arc<Mutex<Shared>> {
        let _ = self.stream.shutdown(Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
        self.shared.clone()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn listen(mut stream: UnixStream, shared: &Mutex<Shared>) {
    let mut reader = FrameReader::default();
    let mut bytes = vec![0; 1 << 16];
    loop {
        let count = stream.read(&mut bytes).unwrap_or(0);
        if count == 0 {
            shared.lock().unwrap().closed = true;
            return;
        }
        reader.extend(&bytes[..count]);
        while let Some(frame) = reader.next_frame().unwrap() {
            for message in decode::<ToGuest>(frame).unwrap() {
                take(message, &mut stream, &mut shared.lock().unwrap());
            }
        }
    }
}

fn take(message: ToGuest, stream: &mut UnixStream, shared: &mut Shared) {
    shared.messages += 1;
    shared.at_barrier = matches!(message, ToGuest::Barrier(_));
    match message {
        ToGuest::Begin => {
            shared.fresh = Some(State::default());
            shared.snapshot_begun = Some(Instant::now());
        }
        ToGuest::End => {
            shared.state = shared.fresh.take().expect("an end without a beginning");
            shared.snapshots += 1;
            shared.snapshot_ended = Some(Instant::now());
        }
        ToGuest::Barrier(number) => {
            shared.barrier = number;
            if !shared.silent {
                let _ = stream.write_all(&encode(&[FromGuest::Applied(number)]).unwrap());
            }
        }
        ToGuest::Dump(dump) => {
            shared.dumps += 1;
            let mut routes: Vec<_> = shared.state.resolved().into_iter().collect();
            for (prefix, resolved) in &mut routes {
                if shared.lie == Some(*prefix) {
                    *resolved = ResolvedRoute::Drop;
                }
            }
            for routes in routes.chunks(4096) {
                let table = FromGuest::Table { dump, routes: routes.to_vec() };
                let _ = stream.write_all(&encode(&[table]).unwrap());
            }
            let _ = stream.write_all(&encode(&[FromGuest::TableEnd(dump)]).unwrap());
        }
        message => {
            shared.routes_gone += u64::from(matches!(message, ToGuest::RouteGone(_)));
            match &mut shared.fresh {
                // A part of a snapshot and a change may both contain the same.
                Some(fresh) => match message {
                    ToGuest::Local { address, own } => {
                        fresh.locals.insert(address, own);
                    }
                    ToGuest::LocalGone(address) => {
                        fresh.locals.remove(&address);
                    }
                    ToGuest::RouteGone(prefix) => {
                        fresh.routes.remove(&prefix);
                    }
                    other => fresh.apply(other),
                },
                None => shared.state.apply(message),
            }
        }
    }
}
