//! Answers with a table: the kernel's, a guest's, or where the two differ.
//!
//! Promises that the kernel's side is dumped anew and owes nothing to the mirror's copy, and that
//! a difference is real: what differs is compared again, once the guest has applied all that it
//! was sent, and shown only if it differed in each of [`PASSES`] comparisons and its routes did not
//! change during the last.
//!
//! Limits: one such answer at a time; a guest's table may have [`ROWS_SPARE`] prefixes more than
//! `routes_max`, and takes up to [`ANSWER_TIME_MAX`] to come.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use pdp_proto::mirror::{Config, RouteRow, Source};
use pdp_proto::routes::{HOPS_MAX, Resolved};

use crate::guests::{Answer, Guests};
use crate::listing::{Listing, is_within};
use crate::table::Table;

/// Comparisons in which a difference must show.
pub const PASSES: u32 = 4;

/// Prefixes that a guest's table may have beyond the configured count: local ones.
const ROWS_SPARE: u64 = 65_536;

/// Time for a guest to apply what it was sent, and to tell its table.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(60);

/// Rows of one part.
const ROWS_MAX: usize = 1024;

enum State {
    /// Until the guest has applied everything that it was sent.
    Settle,
    /// Until the guest's table is whole.
    Gather(u64),
    /// The kernel's routes are read.
    Kernel(Box<Listing>),
    /// What is left of the guest's rows is passed on.
    Rest,
    Done,
}

/// An answer that is being made.
pub struct Tables {
    source: Source,
    within: Option<IpNet>,
    config: Config,
    state: State,
    deadline: Instant,
    pass: u32,
    /// Only these, from the second pass on.
    only: Option<BTreeSet<IpNet>>,
    /// The guest's rows that were not compared yet; values are in `values`.
    rows: BTreeMap<IpNet, u32>,
    values: Vec<Resolved>,
    numbers: HashMap<Resolved, u32>,
    different: Vec<RouteRow>,
}

/// What a step gave.
pub enum Progress {
    /// Rows to pass on, maybe none; more follow.
    Rows(Vec<RouteRow>),
    /// The last were passed on.
    End,
    /// It cannot be answered.
    Failed(String),
}

impl Tables {
    /// An answer for `source`.
    pub fn new(source: Source, within: Option<IpNet>, config: &Config) -> Self {
        let mut tables = Self {
            source,
            within,
            config: config.clone(),
            state: State::Done,
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
        self.state = State::Settle;
    }

    fn guest(&self) -> Option<u32> {
        match self.source {
            Source::Kernel => None,
            Source::Guest(guest) | Source::Diff(guest) => Some(guest),
        }
    }

    /// Whether [`Self::step`] has something to do at once.
    pub fn is_busy(&self) -> bool {
        matches!(self.state, State::Kernel(_) | State::Rest)
    }

    /// Goes on for a few milliseconds at most.
    pub fn step(&mut self, guests: &mut Guests, table: &mut Table) -> Progress {
        if let Some(guest) = self.guest() {
            if !guests.is_live(guest) {
                return Progress::Failed(format!(
                    "forwarding guest {guest} is not connected to the route mirror, or has not \
                     its whole table yet: try again once the mirror's status shows it synced"
                ));
            }
            if matches!(self.state, State::Settle | State::Gather(_))
                && Instant::now() > self.deadline
            {
                let seconds = ANSWER_TIME_MAX.as_secs();
                return Progress::Failed(format!(
                    "forwarding guest {guest} did not tell its table within {seconds} s: see its log"
                ));
            }
        }
        match &mut self.state {
            State::Settle => {
                let Some(guest) = self.guest() else {
                    self.state = self.listing();
                    return Progress::Rows(Vec::new());
                };
                if self.source == Source::Guest(guest) || guests.has_applied_all(guest) {
                    let number = rand::random();
                    guests.ask_table(guest, number);
                    table.watch();
                    self.state = State::Gather(number);
                }
                Progress::Rows(Vec::new())
            }
            State::Gather(_) => Progress::Rows(Vec::new()),
            State::Kernel(listing) => match listing.part() {
                Ok(Some(routes)) => Progress::Rows(self.compare(routes)),
                Ok(None) => {
                    self.state = State::Rest;
                    Progress::Rows(Vec::new())
                }
                Err(error) => Progress::Failed(error),
            },
            State::Rest => self.rest(table),
            State::Done => Progress::End,
        }
    }

    /// Takes what a guest said.
    pub fn take(&mut self, guest: u32, answer: Answer) -> Result<(), String> {
        let State::Gather(number) = self.state else { return Ok(()) };
        if self.guest() != Some(guest) {
            return Ok(());
        }
        match answer {
            Answer::Table(dump, routes) if dump == number => {
                for (prefix, resolved) in routes {
                    self.keep(guest, prefix, resolved)?;
                }
            }
            Answer::TableEnd(dump) if dump == number => {
                self.state = match self.source {
                    // The kernel's side is dumped after the guest's and compared as it comes.
                    Source::Diff(_) => self.listing(),
                    _ => State::Rest,
                };
            }
            Answer::Table(..) | Answer::TableEnd(_) => {}
        }
        Ok(())
    }

    fn keep(&mut self, guest: u32, prefix: IpNet, resolved: Resolved) -> Result<(), String> {
        if !self.is_wanted(&prefix) {
            return Ok(());
        }
        if self.rows.len() as u64 > self.config.routes_max.saturating_add(ROWS_SPARE) {
            let max = self.config.routes_max;
            return Err(format!("forwarding guest {guest} tells more than {max} routes"));
        }
        if matches!(&resolved, Resolved::Hops(hops) if hops.len() > HOPS_MAX) {
            return Err(format!("forwarding guest {guest} tells more than {HOPS_MAX} hops"));
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

    /// The kernel's side is read now. The mirror's memory is its router's own.
    fn listing(&self) -> State {
        State::Kernel(Box::new(Listing::new(self.config.vports.clone(), usize::MAX)))
    }

    /// Takes rows of the kernel: passes them on, or compares them with the guest's.
    fn compare(&mut self, rows: Vec<(IpNet, Resolved)>) -> Vec<RouteRow> {
        let mut out = Vec::new();
        for (prefix, kernel) in rows {
            if !self.is_wanted(&prefix) {
                continue;
            }
            let kernel = Some(kernel);
            if self.source == Source::Kernel {
                out.push(RouteRow { prefix, kernel, guest: None });
                continue;
            }
            let guest = self.rows.remove(&prefix).map(|n| self.values[n as usize].clone());
            if guest != kernel {
                self.different.push(RouteRow { prefix, kernel, guest });
            }
        }
        out
    }

    /// What the guest has and the kernel has not, and the end of a pass.
    fn rest(&mut self, table: &mut Table) -> Progress {
        match self.source {
            Source::Kernel => {}
            Source::Guest(_) => {
                let mut out = Vec::new();
                while out.len() < ROWS_MAX
                    && let Some((prefix, number)) = self.rows.pop_first()
                {
                    let guest = Some(self.values[number as usize].clone());
                    out.push(RouteRow { prefix, kernel: None, guest });
                }
                if !out.is_empty() {
                    return Progress::Rows(out);
                }
            }
            Source::Diff(_) => {
                for (prefix, number) in std::mem::take(&mut self.rows) {
                    let guest = Some(self.values[number as usize].clone());
                    self.different.push(RouteRow { prefix, kernel: None, guest });
                }
                // Notifications up to the end of the kernel's dump were read since then. What is
                // passed on in later steps is not compared with what changes later.
                let changed = table.take_watched();
                self.different.retain(|row| !changed.contains(&row.prefix));
                if !self.different.is_empty() && self.pass < PASSES {
                    let different = std::mem::take(&mut self.different);
                    self.only = Some(different.into_iter().map(|row| row.prefix).collect());
                    self.start_pass();
                    return Progress::Rows(Vec::new());
                }
            }
        }
        if self.different.is_empty() {
            self.state = State::Done;
            return Progress::End;
        }
        let rest = self.different.len().min(ROWS_MAX);
        Progress::Rows(self.different.drain(..rest).collect())
    }
}
