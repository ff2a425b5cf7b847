//! Replies with a table: the kernel's, a guest's, or the differences between the two.
//!
//! Guarantees that the kernel's side is dumped anew, independently of the mirror's copy, and that a
//! difference is real. Different prefixes are compared again once the guest has applied everything
//! that it was sent. A difference is shown only if it appeared in each of [`PASSES`] comparisons
//! and its routes did not change during the last one.
//!
//! Limits: one such reply at a time; a guest's table may have [`ROWS_SPARE`] prefixes more than
//! `routes_max`, and may take up to [`ANSWER_TIME_MAX`] to arrive.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use pdp_proto::mirror::{MirrorConfig, MirrorRoute, TableSource};
use pdp_proto::routes::{HOPS_MAX, ResolvedRoute};

use crate::guests::{Guests, TableAnswer};
use crate::listing::{Listing, is_within};
use crate::table::MirrorTable;

/// Comparisons in which a difference must appear.
pub const PASSES: u32 = 4;

/// Prefixes that a guest's table may have beyond the configured count: local ones.
const ROWS_SPARE: u64 = 65_536;

/// Longest time for a guest to apply what it was sent, and to send its table.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(60);

/// Most routes of one part.
const ROWS_MAX: usize = 1024;

enum TableQueryState {
    /// Waits until the guest has applied everything that it was sent.
    Settle,
    /// Waits until the guest's table is complete.
    Gather(u64),
    /// Reads the kernel's routes.
    Kernel(Box<Listing>),
    /// Passes on the rest of the guest's routes.
    Rest,
    Done,
}

/// A reply in progress.
pub struct TableQuery {
    source: TableSource,
    within: Option<IpNet>,
    config: MirrorConfig,
    state: TableQueryState,
    deadline: Instant,
    pass: u32,
    /// Prefixes to compare, from the second pass on.
    only: Option<BTreeSet<IpNet>>,
    /// The guest's routes that were not compared yet, as indices into `values`.
    rows: BTreeMap<IpNet, u32>,
    values: Vec<ResolvedRoute>,
    numbers: HashMap<ResolvedRoute, u32>,
    different: Vec<MirrorRoute>,
}

/// Result of a step.
pub enum TableQueryProgress {
    /// Routes to pass on, possibly none; more follow.
    Rows(Vec<MirrorRoute>),
    /// All routes were passed on.
    End,
    /// The request cannot be answered.
    Failed(String),
}

impl TableQuery {
    /// Starts a reply for `source`.
    pub fn new(source: TableSource, within: Option<IpNet>, config: &MirrorConfig) -> Self {
        let mut tables = Self {
            source,
            within,
            config: config.clone(),
            state: TableQueryState::Done,
            deadline: Instant::now(),
            pass: 0,
            only: None,
            rows: BTreeMap::new(),
            values: Vec::new(),
            numbers: HashMap::new(),
            different: Vec::new(),
        };
        tables.start_pass();
        tables
    }

    fn start_pass(&mut self) {
        self.pass += 1;
        self.deadline = Instant::now() + ANSWER_TIME_MAX;
        self.state = TableQueryState::Settle;
    }

    fn guest(&self) -> Option<u32> {
        match self.source {
            TableSource::Kernel => None,
            TableSource::Guest(guest) | TableSource::Diff(guest) => Some(guest),
        }
    }

    /// True if [`Self::step`] has work at once.
    pub fn is_busy(&self) -> bool {
        matches!(self.state, TableQueryState::Kernel(_) | TableQueryState::Rest)
    }

    /// Continues for a few milliseconds at most.
    pub fn step(&mut self, guests: &mut Guests, table: &mut MirrorTable) -> TableQueryProgress {
        if let Some(guest) = self.guest() {
            if !guests.is_live(guest) {
                return TableQueryProgress::Failed(format!(
                    "forwarding guest {guest} is not connected to the route mirror, or has not \
                     its whole table yet: try again once the mirror's status shows it synced"
                ));
            }
            if matches!(self.state, TableQueryState::Settle | TableQueryState::Gather(_))
                && Instant::now() > self.deadline
            {
                let seconds = ANSWER_TIME_MAX.as_secs();
                return TableQueryProgress::Failed(format!(
                    "forwarding guest {guest} sent no table within {seconds} s (see its log)"
                ));
            }
        }
        match &mut self.state {
            TableQueryState::Settle => {
                let Some(guest) = self.guest() else {
                    self.state = self.listing();
                    return TableQueryProgress::Rows(Vec::new());
                };
                if self.source == TableSource::Guest(guest) || guests.has_applied_all(guest) {
                    let number = rand::random();
                    guests.ask_table(guest, number);
                    table.watch();
                    self.state = TableQueryState::Gather(number);
                }
                TableQueryProgress::Rows(Vec::new())
            }
            TableQueryState::Gather(_) => TableQueryProgress::Rows(Vec::new()),
            TableQueryState::Kernel(listing) => match listing.part() {
                Ok(Some(routes)) => TableQueryProgress::Rows(self.compare(routes)),
                Ok(None) => {
                    self.state = TableQueryState::Rest;
                    TableQueryProgress::Rows(Vec::new())
                }
                Err(error) => TableQueryProgress::Failed(error),
            },
            TableQueryState::Rest => self.rest(table),
            TableQueryState::Done => TableQueryProgress::End,
        }
    }

    /// Takes an answer of a guest.
    pub fn handle_answer(&mut self, guest: u32, answer: TableAnswer) -> Result<(), String> {
        let TableQueryState::Gather(number) = self.state else { return Ok(()) };
        if self.guest() != Some(guest) {
            return Ok(());
        }
        match answer {
            TableAnswer::Table(dump, routes) if dump == number => {
                for (prefix, resolved) in routes {
                    self.keep(guest, prefix, resolved)?;
                }
            }
            TableAnswer::TableEnd(dump) if dump == number => {
                self.state = match self.source {
                    // The kernel's side is dumped after the guest's, and compared as it arrives.
                    TableSource::Diff(_) => self.listing(),
                    _ => TableQueryState::Rest,
                };
            }
            TableAnswer::Table(..) | TableAnswer::TableEnd(_) => {}
        }
        Ok(())
    }

    fn keep(&mut self, guest: u32, prefix: IpNet, resolved: ResolvedRoute) -> Result<(), String> {
        if !self.is_wanted(&prefix) {
            return Ok(());
        }
        if self.rows.len() as u64 > self.config.routes_max.saturating_add(ROWS_SPARE) {
            let max = self.config.routes_max;
            return Err(format!("forwarding guest {guest} sent more than {max} routes"));
        }
        if matches!(&resolved, ResolvedRoute::Hops(hops) if hops.len() > HOPS_MAX) {
            return Err(format!("forwarding guest {guest} sent more than {HOPS_MAX} hops"));
        }
        let next = self.values.len() as u32;
        let number = *self.numbers.entry(resolved).or_insert_with_key(|resolved| {
            self.values.push(resolved.clone());
            next
        });
        self.rows.insert(prefix, number);
        Ok(())
    }

    fn is_wanted(&self, prefix: &IpNet) -> bool {
        is_within(self.within.as_ref(), prefix)
            && self.only.as_ref().is_none_or(|only| only.contains(prefix))
    }

    /// Starts reading the kernel's side. No limit is needed, since the
    /// mirror's memory is charged to its own router.
    fn listing(&self) -> TableQueryState {
        TableQueryState::Kernel(Box::new(Listing::new(self.config.vports.clone(), usize::MAX)))
    }

    /// Takes routes of the kernel. Passes them on, or compares them with the guest's.
    fn compare(&mut self, rows: Vec<(IpNet, ResolvedRoute)>) -> Vec<MirrorRoute> {
        let mut out = Vec::new();
        for (prefix, kernel) in rows {
            if !self.is_wanted(&prefix) {
                continue;
            }
            let kernel = Some(kernel);
            if self.source == TableSource::Kernel {
                out.push(MirrorRoute { prefix, kernel, guest: None });
                continue;
            }
            let guest = self.rows.remove(&prefix).map(|n| self.values[n as usize].clone());
            if guest != kernel {
                self.different.push(MirrorRoute { prefix, kernel, guest });
            }
        }
        out
    }

    /// Handles routes that only the guest has, and the end of a pass.
    fn rest(&mut self, table: &mut MirrorTable) -> TableQueryProgress {
        match self.source {
            TableSource::Kernel => {}
            TableSource::Guest(_) => {
                let mut out = Vec::new();
                while out.len() < ROWS_MAX
                    && let Some((prefix, number)) = self.rows.pop_first()
                {
                    let guest = Some(self.values[number as usize].clone());
                    out.push(MirrorRoute { prefix, kernel: None, guest });
                }
                if !out.is_empty() {
                    return TableQueryProgress::Rows(out);
                }
            }
            TableSource::Diff(_) => {
                for (prefix, number) in std::mem::take(&mut self.rows) {
                    let guest = Some(self.values[number as usize].clone());
                    self.different.push(MirrorRoute { prefix, kernel: None, guest });
                }
                // All notifications up to the end of the kernel's dump have been read. Later steps
                // only pass on results, so later changes do not matter.
                let changed = table.take_watched();
                self.different.retain(|row| !changed.contains(&row.prefix));
                if !self.different.is_empty() && self.pass < PASSES {
                    let different = std::mem::take(&mut self.different);
                    self.only = Some(different.into_iter().map(|row| row.prefix).collect());
                    self.start_pass();
                    return TableQueryProgress::Rows(Vec::new());
                }
            }
        }
        if self.different.is_empty() {
            self.state = TableQueryState::Done;
            return TableQueryProgress::End;
        }
        let rest = self.different.len().min(ROWS_MAX);
        TableQueryProgress::Rows(self.different.drain(..rest).collect())
    }
}
