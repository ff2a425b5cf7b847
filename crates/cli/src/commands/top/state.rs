//! State of `pdp top`, and its rows. Without I/O: the inputs are lines of the watch and keys.

use std::cmp::Ordering;
use std::collections::{BTreeMap, VecDeque};

use pdp_api::{
    EventKind, NodeSample, Phase, PortStats, ResourceUsage, VnetSample, VnetSummary, WatchLine,
    WatchSample,
};
use serde::Serialize;

use crate::commands::events::event_words;
use crate::output::samples::since;

/// Largest number of events kept.
const EVENTS_MAX: usize = 100;

/// A vnet, or a part of one, between the last two samples.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TopEntry {
    /// Name of the vnet, or of the part in its vnet.
    pub name: String,
    /// State of the vnet or part.
    pub state: String,
    /// Number of connected forwarding guests; absent for a part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guests_connected: Option<u32>,
    /// Number of forwarding guests; absent for a part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guests: Option<u32>,
    /// Received bits per second.
    pub received_bps: f64,
    /// Sent bits per second.
    pub sent_bps: f64,
    /// Dropped frames per second.
    pub dropped_pps: f64,
    /// Frames waiting at links.
    pub waiting: u64,
    /// CPU usage, cores.
    pub cpu_cores: f64,
    /// Time that guests were throttled by their CPU limit, seconds per second.
    pub throttled: f64,
    /// Memory used, bytes.
    pub memory_bytes: u64,
}

/// Usage between the last two readings. The daemon does not read all usage for each sample.
#[derive(Clone, Copy, Debug, Default)]
struct UsageRate {
    last: ResourceUsage,
    cpu_cores: f64,
    throttled: f64,
}

impl UsageRate {
    fn take(&mut self, now: &ResourceUsage) {
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

/// Column that rows are sorted by.
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

    /// Compares rows by this column. Highest numbers come first.
    fn order(self, a: &TopEntry, b: &TopEntry) -> Ordering {
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

/// Request to the caller after a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TopRequest {
    Nothing,
    /// Quit the program.
    Quit,
    /// Watch this vnet with its parts, or all vnets.
    Watch(Option<String>),
}

/// A key with a meaning here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopKey {
    Char(char),
    Enter,
    Escape,
    Backspace,
    Up,
    Down,
    Interrupt,
}

#[derive(Debug)]
pub struct TopState {
    vnets: BTreeMap<String, VnetSummary>,
    samples: [Option<Box<WatchSample>>; 2],
    /// Usage by name of the row.
    used: BTreeMap<String, UsageRate>,
    pub events: VecDeque<String>,
    pub sort: Column,
    pub reverse: bool,
    pub filter: String,
    /// True while the user types the filter.
    pub typing: bool,
    pub help: bool,
    pub selected: usize,
    /// Vnet whose parts are shown.
    pub vnet: Option<String>,
    /// Why the watch is interrupted.
    pub gone: Option<String>,
    /// Rows shown while the display is paused.
    paused_rows: Option<Vec<TopEntry>>,
}

impl TopState {
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
            paused_rows: None,
        }
    }

    /// Processes a line of the watch.
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
                        (EventKind::Created, _) => {
                            let new = VnetSummary { name: name.clone(), ..VnetSummary::default() };
                            self.vnets.entry(name).or_insert(new);
                        }
                        (EventKind::Gone, _) => drop(self.vnets.remove(&name)),
                        (EventKind::Phase, Some(phase)) => {
                            if let Some(vnet) = self.vnets.get_mut(&name) {
                                (vnet.phase, vnet.message) = (phase, event.message.clone());
                            }
                        }
                        _ => {}
                    }
                }
                self.add_event(event_words(&event));
            }
            WatchLine::Sample(sample) => {
                self.used = self.usage(&sample);
                let last = self.samples[1].take();
                self.samples = [last, Some(sample)];
            }
            line @ (WatchLine::Gap(_) | WatchLine::End(_)) => {
                self.add_event(crate::commands::events::format_line(&line).trim_end().to_owned());
            }
        }
    }

    /// Returns the usage of each row, updated by this sample.
    fn usage(&self, sample: &WatchSample) -> BTreeMap<String, UsageRate> {
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
        let with = |(name, now): (String, ResourceUsage)| {
            let mut used = self.used.get(&name).copied().unwrap_or_default();
            used.take(&now);
            (name, used)
        };
        now.into_iter().map(with).collect()
    }

    fn add_event(&mut self, text: String) {
        self.events.push_back(text);
        while self.events.len() > EVENTS_MAX {
            self.events.pop_front();
        }
    }

    /// True if there are two samples, and therefore rates.
    pub fn has_rates(&self) -> bool {
        self.samples.iter().all(Option::is_some)
    }

    /// Counts the vnets in each phase.
    pub fn phases(&self) -> Vec<(Phase, usize)> {
        let all = [Phase::Running, Phase::Starting, Phase::Degraded, Phase::Failed, Phase::Stopped];
        let count = |phase| self.vnets.values().filter(|vnet| vnet.phase == phase).count();
        all.into_iter().map(|phase| (phase, count(phase))).filter(|(_, count)| *count > 0).collect()
    }

    /// True if the display is paused.
    pub fn is_paused(&self) -> bool {
        self.paused_rows.is_some()
    }

    /// Returns the rows to show, sorted.
    pub fn rows(&self) -> Vec<TopEntry> {
        let filter = self.filter.to_lowercase();
        let mut rows = self.paused_rows.clone().unwrap_or_else(|| self.now());
        rows.retain(|row| row.name.to_lowercase().contains(&filter) || row.state.contains(&filter));
        rows.sort_by(|a, b| {
            let order = self.sort.order(a, b).then_with(|| a.name.cmp(&b.name));
            if self.reverse { order.reverse() } else { order }
        });
        rows
    }

    fn now(&self) -> Vec<TopEntry> {
        let [before, last] = &self.samples;
        let none = WatchSample::default();
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
            TopEntry {
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

    /// Processes a key.
    pub fn key(&mut self, key: TopKey) -> TopRequest {
        if key == TopKey::Interrupt {
            return TopRequest::Quit;
        }
        if self.typing {
            match key {
                TopKey::Char(letter) => self.filter.push(letter),
                TopKey::Backspace => drop(self.filter.pop()),
                TopKey::Enter => self.typing = false,
                TopKey::Escape => {
                    self.filter.clear();
                    self.typing = false;
                }
                _ => {}
            }
            self.selected = 0;
            return TopRequest::Nothing;
        }
        if self.help && key != TopKey::Char('q') {
            self.help = false;
            return TopRequest::Nothing;
        }
        let last = self.rows().len().saturating_sub(1);
        match key {
            TopKey::Char('q') => return TopRequest::Quit,
            TopKey::Escape | TopKey::Backspace if self.vnet.is_some() => return self.watch(None),
            TopKey::Escape => self.filter.clear(),
            TopKey::Enter if self.vnet.is_none() => {
                let chosen = self.rows().get(self.selected).map(|row| row.name.clone());
                return chosen.map_or(TopRequest::Nothing, |name| self.watch(Some(name)));
            }
            TopKey::Char('/') => self.typing = true,
            TopKey::Char('s') => {
                let at = Column::ALL.iter().position(|column| *column == self.sort);
                self.sort = Column::ALL[(at.unwrap_or(0) + 1) % Column::ALL.len()];
            }
            TopKey::Char('r') => self.reverse = !self.reverse,
            TopKey::Char('p' | ' ') => {
                self.paused_rows = if self.is_paused() { None } else { Some(self.now()) };
            }
            TopKey::Char('?' | 'h') => self.help = true,
            TopKey::Up | TopKey::Char('k') => {
                self.selected = self.selected.min(last).saturating_sub(1)
            }
            TopKey::Down | TopKey::Char('j') => self.selected = (self.selected + 1).min(last),
            _ => {}
        }
        TopRequest::Nothing
    }

    /// Shows a vnet's parts or all vnets. Nothing is known of them yet.
    fn watch(&mut self, vnet: Option<String>) -> TopRequest {
        let events = std::mem::take(&mut self.events);
        let (sort, reverse) = (self.sort, self.reverse);
        *self = Self { events, sort, reverse, ..Self::new(vnet.clone()) };
        TopRequest::Watch(vnet)
    }

    /// Returns a row with its usage.
    fn used(&self, name: String) -> TopEntry {
        let used = self.used.get(&name).copied().unwrap_or_default();
        let UsageRate { last: ResourceUsage { memory_bytes, .. }, cpu_cores, throttled } = used;
        TopEntry { name, cpu_cores, throttled, memory_bytes, ..TopEntry::default() }
    }

    /// Returns rows for the ports, guests and control guests of a vnet.
    fn parts(
        &self,
        before: &BTreeMap<String, NodeSample>,
        last: &BTreeMap<String, NodeSample>,
        seconds: f64,
    ) -> Vec<TopEntry> {
        let mut rows = Vec::new();
        for (node, now) in last {
            let then = before.get(node).unwrap_or(now);
            for (port, counters) in &now.ports {
                let was = then.ports.get(port).unwrap_or(counters);
                let drops = |port: &PortStats| port.dropped.values().sum::<u64>();
                rows.push(TopEntry {
                    name: format!("{node}:{port}"),
                    state: "port".into(),
                    received_bps: rate(was.received_bytes, counters.received_bytes, seconds) * 8.0,
                    sent_bps: rate(was.sent_bytes, counters.sent_bytes, seconds) * 8.0,
                    dropped_pps: rate(drops(was), drops(counters), seconds),
                    waiting: counters.waiting,
                    ..TopEntry::default()
                });
            }
            if now.control.usage_at_ns > 0 {
                let name = format!("{node}/control");
                rows.push(TopEntry { state: "control".into(), ..self.used(name) });
            }
            if now.kernel.is_some() {
                let name = format!("{node}/kernel");
                rows.push(TopEntry { state: "kernel".into(), ..self.used(name) });
            }
            for (number, guest) in &now.guests {
                let name = format!("{node}/g{number}");
                let state = if guest.counters.connected { "connected" } else { "absent" };
                rows.push(TopEntry {
                    state: state.into(),
                    waiting: guest.counters.in_flight,
                    ..self.used(name)
                });
            }
        }
        rows
    }
}

/// Returns the increase of a counter per second.
fn rate(then: u64, now: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { since(then, now) as f64 / seconds } else { 0.0 }
}
