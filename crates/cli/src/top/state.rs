//! What `pdp top` knows, and its rows. Pure: what comes and what is typed goes in.

use std::cmp::Ordering;
use std::collections::{BTreeMap, VecDeque};

use pdp_api::{
    NodeSample, Phase, PortStats, Sample, Usage, VnetSample, VnetSummary, WatchLine, What,
};
use serde::Serialize;

use crate::events::event_words;
use crate::stats::since;

/// Events that are shown at most.
const EVENTS_MAX: usize = 100;

/// A vnet, or a part of one, between the last two looks at it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Row {
    /// Its name; of a part its name in the vnet.
    pub name: String,
    /// How it is.
    pub state: String,
    /// Forwarding guests that are connected; absent of a part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guests_connected: Option<u32>,
    /// Forwarding guests; absent of a part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guests: Option<u32>,
    /// Bits a second that came in.
    pub received_bps: f64,
    /// Bits a second that left.
    pub sent_bps: f64,
    /// Frames a second dropped.
    pub dropped_pps: f64,
    /// Frames that wait at links.
    pub waiting: u64,
    /// CPU in use, cores.
    pub cpu_cores: f64,
    /// Time for which guests waited because of their CPU limit, seconds a second.
    pub throttled: f64,
    /// Memory held, bytes.
    pub memory_bytes: u64,
}

/// What something used between the last two times that the daemon looked, which need not be in each sample.
#[derive(Clone, Copy, Debug, Default)]
struct Used {
    last: Usage,
    cpu_cores: f64,
    throttled: f64,
}

impl Used {
    fn take(&mut self, now: &Usage) {
        if now.usage_at_ns == self.last.usage_at_ns {
            return;
        }
        let then = std::mem::replace(&mut self.last, *now);
        let known = then.usage_at_ns > 0;
        let seconds = now.usage_at_ns.saturating_sub(then.usage_at_ns) as f64 / 1e9;
        let share = |then, now| if known { rate(then, now, seconds) / 1e9 } else { 0.0 };
        self.cpu_cores = share(then.cpu_ns, now.cpu_ns);
        self.throttled = share(then.throttled_ns, now.throttled_ns);
    }
}

/// By what rows are in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    Name,
    State,
    In,
    Out,
    Drops,
    Waiting,
    Cpu,
    Throttled,
    Memory,
}

impl Column {
    pub const ALL: [Self; 9] = [
        Self::Name,
        Self::State,
        Self::In,
        Self::Out,
        Self::Drops,
        Self::Waiting,
        Self::Cpu,
        Self::Throttled,
        Self::Memory,
    ];

    /// In order of this; numbers the highest first.
    fn order(self, a: &Row, b: &Row) -> Ordering {
        match self {
            Self::Name => Ordering::Equal,
            Self::State => a.state.cmp(&b.state),
            Self::In => b.received_bps.total_cmp(&a.received_bps),
            Self::Out => b.sent_bps.total_cmp(&a.sent_bps),
            Self::Drops => b.dropped_pps.total_cmp(&a.dropped_pps),
            Self::Waiting => b.waiting.cmp(&a.waiting),
            Self::Cpu => b.cpu_cores.total_cmp(&a.cpu_cores),
            Self::Throttled => b.throttled.total_cmp(&a.throttled),
            Self::Memory => b.memory_bytes.cmp(&a.memory_bytes),
        }
    }
}

/// What is asked of who runs it, after a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    Nothing,
    /// To end.
    Quit,
    /// To watch this vnet with its parts, or all.
    Watch(Option<String>),
}

/// A key, as far as it means something here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    Char(char),
    Enter,
    Escape,
    Backspace,
    Up,
    Down,
    Interrupt,
}

#[derive(Debug)]
pub struct State {
    vnets: BTreeMap<String, VnetSummary>,
    samples: [Option<Box<Sample>>; 2],
    /// By the name of their row.
    used: BTreeMap<String, Used>,
    pub events: VecDeque<String>,
    pub sort: Column,
    pub reverse: bool,
    pub filter: String,
    /// What is typed is the filter.
    pub typing: bool,
    pub help: bool,
    pub selected: usize,
    /// The vnet whose parts are shown.
    pub vnet: Option<String>,
    /// Why nothing new comes.
    pub gone: Option<String>,
    /// What is shown while nothing new is to be.
    held: Option<Vec<Row>>,
}

impl State {
    pub fn new(vnet: Option<String>) -> Self {
        Self {
            vnets: BTreeMap::new(),
            samples: [None, None],
            used: BTreeMap::new(),
            events: VecDeque::new(),
            sort: Column::Name,
            reverse: false,
            filter: String::new(),
            typing: false,
            help: false,
            selected: 0,
            vnet,
            gone: None,
            held: None,
        }
    }

    /// Takes a line of the watch.
    pub fn take(&mut self, line: WatchLine) {
        match line {
            WatchLine::Snapshot(snapshot) => {
                let vnets = snapshot.vnets.into_iter();
                self.vnets = vnets.map(|vnet| (vnet.name.clone(), vnet)).collect();
            }
            WatchLine::Event(event) => {
                let name = event.vnet().unwrap_or_default().to_owned();
                if event.object == format!("vnet/{name}") {
                    match (event.what, event.phase) {
                        (What::Created, _) => {
                            let new = VnetSummary { name: name.clone(), ..VnetSummary::default() };
                            self.vnets.entry(name).or_insert(new);
                        }
                        (What::Gone, _) => drop(self.vnets.remove(&name)),
                        (What::Phase, Some(phase)) => {
                            if let Some(vnet) = self.vnets.get_mut(&name) {
                                (vnet.phase, vnet.message) = (phase, event.message.clone());
                            }
                        }
                        _ => {}
                    }
                }
                self.tell(event_words(&event));
            }
            WatchLine::Sample(sample) => {
                self.used = self.usage(&sample);
                let last = self.samples[1].take();
                self.samples = [last, Some(sample)];
            }
            line @ (WatchLine::Gap(_) | WatchLine::End(_)) => {
                self.tell(crate::events::words(&line).trim_end().to_owned());
            }
        }
    }

    /// What each row used, with this sample.
    fn usage(&self, sample: &Sample) -> BTreeMap<String, Used> {
        let mut now = Vec::new();
        match &self.vnet {
            Some(name) => {
                for (node, is) in sample.vnets.get(name).iter().flat_map(|vnet| &vnet.nodes) {
                    now.push((format!("{node}/control"), is.control));
                    let guests = is.guests.iter();
                    now.extend(guests.map(|(number, is)| (format!("{node}/g{number}"), is.usage)));
                    now.extend(is.kernel.map(|usage| (format!("{node}/kernel"), usage)));
                }
            }
            None => now.extend(sample.vnets.iter().map(|(name, is)| (name.clone(), is.usage))),
        }
        let with = |(name, now): (String, Usage)| {
            let mut used = self.used.get(&name).copied().unwrap_or_default();
            used.take(&now);
            (name, used)
        };
        now.into_iter().map(with).collect()
    }

    fn tell(&mut self, text: String) {
        self.events.push_back(text);
        while self.events.len() > EVENTS_MAX {
            self.events.pop_front();
        }
    }

    /// Whether there are two samples, and so rates.
    pub fn has_rates(&self) -> bool {
        self.samples.iter().all(Option::is_some)
    }

    /// How many vnets are in which phase.
    pub fn phases(&self) -> Vec<(Phase, usize)> {
        let all = [Phase::Running, Phase::Starting, Phase::Degraded, Phase::Failed, Phase::Stopped];
        let count = |phase| self.vnets.values().filter(|vnet| vnet.phase == phase).count();
        all.into_iter().map(|phase| (phase, count(phase))).filter(|(_, count)| *count > 0).collect()
    }

    /// Whether nothing new is shown.
    pub fn is_paused(&self) -> bool {
        self.held.is_some()
    }

    /// What is to be shown, in order.
    pub fn rows(&self) -> Vec<Row> {
        let filter = self.filter.to_lowercase();
        let mut rows = self.held.clone().unwrap_or_else(|| self.now());
        rows.retain(|row| row.name.to_lowercase().contains(&filter) || row.state.contains(&filter));
        rows.sort_by(|a, b| {
            let order = self.sort.order(a, b).then_with(|| a.name.cmp(&b.name));
            if self.reverse { order.reverse() } else { order }
        });
        rows
    }

    fn now(&self) -> Vec<Row> {
        let [before, last] = &self.samples;
        let none = Sample::default();
        let last = last.as_deref().unwrap_or(&none);
        let before = before.as_deref().unwrap_or(last);
        let seconds = last.at_ns.saturating_sub(before.at_ns) as f64 / 1e9;
        if let Some(name) = &self.vnet {
            let none = BTreeMap::new();
            let [before, last] =
                [before, last].map(|sample| sample.vnets.get(name).map_or(&none, |it| &it.nodes));
            return self.parts(before, last, seconds);
        }
        let zero = VnetSample::default();
        let row = |vnet: &VnetSummary| {
            let now = last.vnets.get(&vnet.name).unwrap_or(&zero);
            let then = before.vnets.get(&vnet.name).unwrap_or(now);
            let rate = |of: fn(&VnetSample) -> u64| rate(of(then), of(now), seconds);
            let (connected, guests) = match last.vnets.contains_key(&vnet.name) {
                true => (now.guests_connected, now.guests),
                false => (vnet.guests_connected, vnet.guests),
            };
            Row {
                state: vnet.phase.name().into(),
                guests_connected: Some(connected),
                guests: Some(guests),
                received_bps: rate(|it| it.received_bytes) * 8.0,
                sent_bps: rate(|it| it.sent_bytes) * 8.0,
                dropped_pps: rate(|it| it.dropped),
                waiting: now.waiting,
                ..self.used(vnet.name.clone())
            }
        };
        self.vnets.values().map(row).collect()
    }

    /// Does what a key says.
    pub fn key(&mut self, key: Key) -> Ask {
        if key == Key::Interrupt {
            return Ask::Quit;
        }
        if self.typing {
            match key {
                Key::Char(letter) => self.filter.push(letter),
                Key::Backspace => drop(self.filter.pop()),
                Key::Enter => self.typing = false,
                Key::Escape => {
                    self.filter.clear();
                    self.typing = false;
                }
                _ => {}
            }
            self.selected = 0;
            return Ask::Nothing;
        }
        if self.help && key != Key::Char('q') {
            self.help = false;
            return Ask::Nothing;
        }
        let last = self.rows().len().saturating_sub(1);
        match key {
            Key::Char('q') => return Ask::Quit,
            Key::Escape | Key::Backspace if self.vnet.is_some() => return self.watch(None),
            Key::Escape => self.filter.clear(),
            Key::Enter if self.vnet.is_none() => {
                let chosen = self.rows().get(self.selected).map(|row| row.name.clone());
                return chosen.map_or(Ask::Nothing, |name| self.watch(Some(name)));
            }
            Key::Char('/') => self.typing = true,
            Key::Char('s') => {
                let at = Column::ALL.iter().position(|column| *column == self.sort);
                self.sort = Column::ALL[(at.unwrap_or(0) + 1) % Column::ALL.len()];
            }
            Key::Char('r') => self.reverse = !self.reverse,
            Key::Char('p' | ' ') => {
                self.held = if self.is_paused() { None } else { Some(self.now()) };
            }
            Key::Char('?' | 'h') => self.help = true,
            Key::Up | Key::Char('k') => self.selected = self.selected.min(last).saturating_sub(1),
            Key::Down | Key::Char('j') => self.selected = (self.selected + 1).min(last),
            _ => {}
        }
        Ask::Nothing
    }

    /// Shows a vnet's parts or all vnets, of which nothing is known yet.
    fn watch(&mut self, vnet: Option<String>) -> Ask {
        let events = std::mem::take(&mut self.events);
        let (sort, reverse) = (self.sort, self.reverse);
        *self = Self { events, sort, reverse, ..Self::new(vnet.clone()) };
        Ask::Watch(vnet)
    }

    /// A row with what it used.
    fn used(&self, name: String) -> Row {
        let used = self.used.get(&name).copied().unwrap_or_default();
        let Used { last: Usage { memory_bytes, .. }, cpu_cores, throttled } = used;
        Row { name, cpu_cores, throttled, memory_bytes, ..Row::default() }
    }

    /// Ports, guests and control sides of a vnet.
    fn parts(
        &self,
        before: &BTreeMap<String, NodeSample>,
        last: &BTreeMap<String, NodeSample>,
        seconds: f64,
    ) -> Vec<Row> {
        let mut rows = Vec::new();
        for (node, now) in last {
            let then = before.get(node).unwrap_or(now);
            for (port, counters) in &now.ports {
                let was = then.ports.get(port).unwrap_or(counters);
                let drops = |port: &PortStats| port.dropped.values().sum::<u64>();
                rows.push(Row {
                    name: format!("{node}:{port}"),
                    state: "port".into(),
                    received_bps: rate(was.received_bytes, counters.received_bytes, seconds) * 8.0,
                    sent_bps: rate(was.sent_bytes, counters.sent_bytes, seconds) * 8.0,
                    dropped_pps: rate(drops(was), drops(counters), seconds),
                    waiting: counters.waiting,
                    ..Row::default()
                });
            }
            if now.control.usage_at_ns > 0 {
                let name = format!("{node}/control");
                rows.push(Row { state: "control".into(), ..self.used(name) });
            }
            if now.kernel.is_some() {
                let name = format!("{node}/kernel");
                rows.push(Row { state: "kernel".into(), ..self.used(name) });
            }
            for (number, guest) in &now.guests {
                let name = format!("{node}/g{number}");
                let state = if guest.counters.connected { "connected" } else { "absent" };
                rows.push(Row {
                    state: state.into(),
                    waiting: guest.counters.in_flight,
                    ..self.used(name)
                });
            }
        }
        rows
    }
}

/// What a counter counts a second.
fn rate(then: u64, now: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { since(then, now) as f64 / seconds } else { 0.0 }
}
