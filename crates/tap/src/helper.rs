//! The loop: trunk, TAPs, control.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use pdp_memif::{Buf, ConnectionState, MemifClient, MemifSettings};
use pdp_proto::listener::ControlListener;
use pdp_wire::tag::{Tag, TagVerdict};
use rustix::event::{Timespec, epoll};

use crate::control;
use crate::ports::TapPorts;

/// Time between attempts to reach a mux, milliseconds.
pub const RETRY_MS: u64 = 20;

/// Time between two checks of a full trunk, milliseconds. memif has no doorbell for room.
const FULL_MS: u64 = 1;

/// Longest sleep without a doorbell, milliseconds.
const SLEEP_MS: u64 = 1000;

/// Frames taken from the trunk, and from each TAP, before the next one is served.
const BATCH_FRAMES: usize = 32;

/// Longest frame that a TAP delivers, bytes.
const FRAME_BYTES_MAX: usize = 1 << 16;

/// Trunk of 512 slots each way; most frames take one buffer.
const TRUNK: MemifSettings =
    MemifSettings { ring_log2: 9, buffer_bytes: 2048, headroom_bytes: 64, buffers: 1536 };

/// Sources of events.
const BELL: u64 = 0;
const TRUNK_CONTROL: u64 = 1;
const TAPS: u64 = 2;
const LISTENER: u64 = 3;
const CONNECTION: u64 = 4;

/// The helper.
#[derive(Debug)]
pub struct TapService {
    trunk: MemifClient,
    tried: Instant,
    control: Option<ControlListener>,
    ports: TapPorts,
    epoll: OwnedFd,
    /// True if the TAPs are watched. They are not while the trunk has no room.
    reads_taps: bool,
    /// Part of a TAP's frame that exceeds one buffer.
    overflow: Vec<u8>,
    bufs: Vec<Buf>,
    ready: Vec<u16>,
}

impl TapService {
    /// Makes a helper without TAPs.
    pub fn new(trunk: &Path, control: Option<ControlListener>) -> anyhow::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let trunk = MemifClient::new(trunk, 0, "pdp-tap", TRUNK)?;
        watch(&epoll, &trunk, BELL)?;
        if let Some(control) = &control {
            watch(&epoll, control.listener(), LISTENER)?;
        }
        let ports = TapPorts::new()?;
        let mut helper = Self {
            trunk,
            tried: Instant::now(),
            control,
            ports,
            epoll,
            reads_taps: false,
            overflow: vec![0; FRAME_BYTES_MAX],
            bufs: Vec::new(),
            ready: Vec::new(),
        };
        helper.poll_trunk()?;
        Ok(helper)
    }

    /// Adds a TAP that was open when the process started.
    pub fn inherit(&mut self, vport: u16, tap: OwnedFd) -> anyhow::Result<()> {
        self.ports.add(vport, format!("vport{vport}"), tap).map_err(anyhow::Error::msg)
    }

    /// Forwards frames. Only returns with a system error.
    pub fn run(&mut self) -> anyhow::Result<()> {
        let mut carried = false;
        loop {
            let sleeps = !carried && self.trunk.arm();
            let events = self.wait(if sleeps { self.sleep_ms() } else { 0 })?;
            if sleeps {
                self.trunk.disarm();
            }
            let mut taps_ready = false;
            for event in events {
                match event {
                    TRUNK_CONTROL => self.poll_trunk()?,
                    TAPS => taps_ready = true,
                    LISTENER => self.accept()?,
                    CONNECTION => self.serve()?,
                    _ => {}
                }
            }
            if self.trunk.link() != ConnectionState::Up
                && self.tried.elapsed() >= Duration::from_millis(RETRY_MS)
            {
                self.poll_trunk()?;
            }
            carried = self.forward_to_taps();
            if taps_ready && self.reads_taps {
                carried |= self.forward_from_taps()?;
            }
            self.trunk.flush();
            self.watch_taps()?;
        }
    }

    fn sleep_ms(&self) -> u64 {
        match self.trunk.link() {
            ConnectionState::Up if self.reads_taps => SLEEP_MS,
            ConnectionState::Up => FULL_MS,
            ConnectionState::Down | ConnectionState::Connecting => RETRY_MS,
        }
    }

    /// Waits for events; returns their sources.
    fn wait(&self, timeout_ms: u64) -> io::Result<impl Iterator<Item = u64> + use<>> {
        const EVENTS: usize = 16;
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; EVENTS];
        let timeout = Timespec {
            tv_sec: (timeout_ms / 1000) as i64,
            tv_nsec: (timeout_ms % 1000 * 1_000_000) as i64,
        };
        let count = match epoll::wait(&self.epoll, &mut events, Some(&timeout)) {
            Ok(count) => count,
            Err(rustix::io::Errno::INTR) => 0,
            Err(error) => return Err(error.into()),
        };
        Ok(events.into_iter().take(count).map(|event| event.data.u64()))
    }

    /// Connects to the mux, or handles its messages.
    fn poll_trunk(&mut self) -> io::Result<()> {
        let before = self.trunk.link();
        self.tried = Instant::now();
        let after = self.trunk.poll();
        if before == ConnectionState::Down
            && let Some(socket) = self.trunk.control()
        {
            watch(&self.epoll, socket, TRUNK_CONTROL)?;
        }
        match (before, after) {
            (ConnectionState::Connecting, ConnectionState::Up) => {
                eprintln!("pdp-tap: connected to the mux")
            }
            (ConnectionState::Up, ConnectionState::Down) => {
                let why = self.trunk.last_error().unwrap_or("no reason given");
                eprintln!("pdp-tap: the mux is gone ({why}), trying again");
            }
            _ => {}
        }
        Ok(())
    }

    fn accept(&mut self) -> io::Result<()> {
        let Some(control) = &mut self.control else { return Ok(()) };
        while let Some(connection) = control.accept()? {
            watch(&self.epoll, connection, CONNECTION)?;
        }
        Ok(())
    }

    /// Answers pdpd. Watches the TAPs anew, since they may have changed.
    fn serve(&mut self) -> io::Result<()> {
        self.stop_watching_taps()?;
        let Self { control, ports, .. } = self;
        if let Some(control) = control {
            control.serve("pdp-tap", |request, fds, channel| {
                control::answer(request, fds, channel, ports)
            });
        }
        self.watch_taps()
    }

    /// Watches the TAPs while the trunk has room.
    fn watch_taps(&mut self) -> io::Result<()> {
        let has_room = self.trunk.room() > 0;
        if has_room && !self.reads_taps {
            watch(&self.epoll, self.ports.epoll(), TAPS)?;
            self.reads_taps = true;
        } else if !has_room {
            self.stop_watching_taps()?;
        }
        Ok(())
    }

    fn stop_watching_taps(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.reads_taps) {
            epoll::delete(&self.epoll, self.ports.epoll())?;
        }
        Ok(())
    }

    /// Writes a batch from the trunk to the TAPs. True if there was one.
    fn forward_to_taps(&mut self) -> bool {
        let Self { trunk, ports, bufs, .. } = self;
        if trunk.receive(bufs, BATCH_FRAMES) == 0 {
            return false;
        }
        let mut rest = &bufs[..];
        while let Some(last) = rest.iter().position(|buf| !buf.continues()) {
            let (frame, behind) = rest.split_at(last + 1);
            rest = behind;
            let (tag, first) = (frame[0].metadata(), trunk.bytes(&frame[0]));
            // Only a fault of the mux sends other tags, and there is no vport to count them for.
            let Ok(Tag { verdict: TagVerdict::Deliver, vport, .. }) = Tag::parse(tag) else {
                continue;
            };
            let vport = u16::from(vport);
            let first = IoSlice::new(first);
            if let [_] = frame {
                ports.write(vport, &[first]);
            } else {
                let others = frame[1..].iter().map(|buf| IoSlice::new(trunk.bytes(buf)));
                ports.write(vport, &std::iter::once(first).chain(others).collect::<Vec<_>>());
            }
        }
        bufs.drain(..).for_each(|buf| trunk.free(buf));
        true
    }

    /// Reads a batch from each readable TAP, while the trunk has room. True if there was one.
    fn forward_from_taps(&mut self) -> io::Result<bool> {
        let mut ready = std::mem::take(&mut self.ready);
        ready.clear();
        self.ports.ready(&mut ready)?;
        let mut carried = false;
        for &vport in &ready {
            for _ in 0..BATCH_FRAMES {
                if !self.forward_from(vport) {
                    break;
                }
                carried = true;
            }
        }
        self.ready = ready;
        Ok(carried)
    }

    /// Forwards one frame of a TAP. False if there is none, or no room for it.
    fn forward_from(&mut self, vport: u16) -> bool {
        let Self { trunk, ports, overflow, .. } = self;
        if trunk.room() == 0 {
            return false;
        }
        let Some(mut buf) = trunk.alloc() else { return false };
        let capacity = buf.capacity();
        buf.set_len(capacity);
        // A vport's number fits one byte.
        let tag = Tag { verdict: TagVerdict::Out, vport: vport as u8, last: false, trace: 0 };
        buf.set_metadata(tag.emit());
        let bytes = trunk.bytes_mut(&mut buf);
        let mut space = [IoSliceMut::new(bytes), IoSliceMut::new(overflow)];
        let Some(count) = ports.read(vport, &mut space) else {
            trunk.free(buf);
            return false;
        };
        let sent = if count <= capacity {
            buf.set_len(count);
            trunk.send(buf).map_err(|buf| trunk.free(buf)).is_ok()
        } else {
            send_long(trunk, buf, &overflow[..count - capacity])
        };
        let stats = ports.stats_of(vport);
        if sent {
            stats.from_tap += 1;
        } else {
            stats.from_tap_dropped += 1;
        }
        true
    }
}

/// Sends a frame that begins in `first` and continues in `rest`.
fn send_long(trunk: &mut MemifClient, first: Buf, rest: &[u8]) -> bool {
    let mut chain = vec![first];
    let capacity = chain[0].len();
    for piece in rest.chunks(capacity) {
        let Some(mut buf) = trunk.alloc() else { break };
        buf.set_len(piece.len());
        trunk.bytes_mut(&mut buf).copy_from_slice(piece);
        chain.push(buf);
    }
    let whole = chain.len() == 1 + rest.len().div_ceil(capacity);
    let sent = whole && trunk.send_chain(&mut chain);
    chain.into_iter().for_each(|buf| trunk.free(buf));
    sent
}

fn watch(epoll: &OwnedFd, fd: impl AsFd, about: u64) -> io::Result<()> {
    Ok(epoll::add(epoll, fd, epoll::EventData::new_u64(about), epoll::EventFlags::IN)?)
}
