//! Results of a soak as a Markdown page.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;

use super::churn::Totals;
use super::faults::{KINDS, SoakFaultKind};
use super::leaks::{self, ResourceSample, RoleUsage};

/// Checks besides those of resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SoakCheck {
    /// It ran from start to end.
    Whole,
    /// Recovery after every fault.
    Back,
    /// Datagrams lost outside of faults.
    Lost,
    /// Paths of datagrams.
    Paths,
    /// Order of datagrams.
    Order,
    /// Counters of nodes.
    Counters,
    /// Counters compared with the kernel's.
    Kernel,
    /// Route tables.
    Tables,
    /// TCP runs.
    Tcp,
    /// Remains after removal.
    Down,
}

const CHECKS: [(SoakCheck, &str); 10] = [
    (SoakCheck::Whole, "it ran from start to end"),
    (SoakCheck::Back, "everything recovered after every fault"),
    (
        SoakCheck::Lost,
        "losses only by faults that stop forwarding, and by the kernel outside vnets",
    ),
    (SoakCheck::Paths, "every datagram left by an interface that the reference look-up allows"),
    (SoakCheck::Order, "no datagram twice, and without a fault none reordered"),
    (SoakCheck::Counters, "the counters of every node add up after every cycle"),
    (SoakCheck::Kernel, "without a fault the counters agree with the kernels'"),
    (SoakCheck::Tables, "tables agree: red's after every cycle, green's at the end"),
    (SoakCheck::Tcp, "TCP gets through"),
    (SoakCheck::Down, "nothing remains after removal"),
];

/// Most differences shown for a check.
const SHOWN_MAX: usize = 10;

/// Impact of a fault.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FaultCost {
    /// Time to recovery, seconds.
    pub took_s: f64,
    /// Datagrams lost.
    pub lost: u64,
    /// Upper limit of these that the kernel lost outside vnets.
    pub outside: u64,
    /// Longest time without a datagram, milliseconds.
    pub gap_ms: u64,
}

/// Contents of the report.
#[derive(Default)]
pub struct Story {
    /// Seed of faults and route changes.
    pub seed: u64,
    /// Duration, minutes.
    pub minutes: f64,
    /// Cycles done.
    pub cycles: u64,
    /// Datagrams sent.
    pub sent: u64,
    /// Arrived.
    pub arrived: u64,
    /// Lost in cycles with a fault.
    pub lost_in_faults: u64,
    /// Lost by the kernel outside vnets.
    pub lost_in_kernel: u64,
    /// Lost and not explained.
    pub lost: u64,
    /// Faults by kind.
    pub faults: BTreeMap<SoakFaultKind, Vec<FaultCost>>,
    /// Moving prefixes.
    pub moving: usize,
    /// Route changes.
    pub churn: Totals,
    /// Resources after the first cycles.
    pub baseline: Option<ResourceSample>,
    /// Resources after every cycle.
    pub samples: Vec<ResourceSample>,
    /// Resources at the end.
    pub end: Option<ResourceSample>,
    wrong: BTreeMap<SoakCheck, Vec<String>>,
}

impl Story {
    /// Makes the report of a new soak.
    pub fn new(seed: u64) -> Self {
        Self { seed, ..Self::default() }
    }

    /// Records a problem.
    pub fn wrong(&mut self, check: SoakCheck, what: String) {
        println!("WRONG  {what}");
        self.wrong.entry(check).or_default().push(what);
    }

    /// Lines of the verdict: each check with its differences.
    fn verdict(&self) -> Vec<(&'static str, Vec<String>)> {
        let found = |check| self.wrong.get(&check).cloned().unwrap_or_default();
        let mut lines: Vec<_> = CHECKS.iter().map(|(check, what)| (*what, found(*check))).collect();
        match (&self.baseline, &self.end) {
            (Some(baseline), Some(end)) => lines.extend(leaks::compare(baseline, end)),
            _ => lines.push(("resources were compared", vec!["the run ended before".into()])),
        }
        lines
    }

    /// Number of problems.
    pub fn problems(&self) -> usize {
        self.verdict().iter().map(|(_, differences)| differences.len()).sum()
    }

    /// The page.
    pub fn text(&self) -> String {
        let mut text = format!(
            "# Soak\n\n{}\n\n{:.1} minutes, {} cycles, seed {}. {}\n\n",
            machine(),
            self.minutes,
            self.cycles,
            self.seed,
            match self.problems() {
                0 => "**No problems found.**".to_owned(),
                count => format!("**{count} problems found.**"),
            }
        );
        self.verdict_text(&mut text);
        self.faults_text(&mut text);
        self.traffic_text(&mut text);
        self.resources_text(&mut text);
        text
    }

    fn verdict_text(&self, text: &mut String) {
        *text += "| verdict | |\n|---|---|\n";
        let verdict = self.verdict();
        for (what, differences) in &verdict {
            let mark = match (differences.is_empty(), &self.end) {
                (true, Some(_)) => "ok",
                (true, None) => "ok so far",
                (false, _) => "WRONG",
            };
            let _ = writeln!(text, "| {what} | {mark} |");
        }
        for (what, differences) in verdict.iter().filter(|(_, all)| !all.is_empty()) {
            let _ = writeln!(text, "\n{what}: {}\n", differences.len());
            for difference in differences.iter().take(SHOWN_MAX) {
                let _ = writeln!(text, "- {}", difference.replace('\n', " "));
            }
        }
    }

    fn faults_text(&self, text: &mut String) {
        *text += "\n## Faults\n\n\
            | fault | times | back after, s: median | max | datagrams lost: median | max \
            | of them outside vnets: median | max | longest gap, ms: median | max |\n\
            |---|---|---|---|---|---|---|---|---|---|\n";
        for kind in KINDS {
            let costs = self.faults.get(&kind).map(Vec::as_slice).unwrap_or_default();
            let median_and_max = |value: fn(&FaultCost) -> f64, digits: usize| {
                let mut values: Vec<f64> = costs.iter().map(value).collect();
                values.sort_unstable_by(f64::total_cmp);
                let max = values.last().copied();
                let shown = |value: Option<f64>| {
                    value.map_or("-".into(), |value| format!("{value:.digits$}"))
                };
                format!("{} | {}", shown(values.get(values.len() / 2).copied()), shown(max))
            };
            let _ = writeln!(
                text,
                "| {} | {} | {} | {} | {} | {} |",
                kind.name(),
                costs.len(),
                median_and_max(|cost| cost.took_s, 1),
                median_and_max(|cost| cost.lost as f64, 0),
                median_and_max(|cost| cost.outside as f64, 0),
                median_and_max(|cost| cost.gap_ms as f64, 0)
            );
        }
        *text += "\nThe time covers the whole fault: 1 s of outage, and the wait until all \
                  processes, links, sessions,\nroutes and pings recovered. The gap is measured at \
                  one receiver.\n";
    }

    fn traffic_text(&self, text: &mut String) {
        let Totals { announced, withdrawn, second_max } = self.churn;
        let _ = writeln!(
            text,
            "\n## Traffic and routes\n\n\
             | datagrams | |\n|---|---|\n| sent | {} |\n| arrived | {} |\n\
             | lost in cycles with a fault | {} |\n\
             | lost without a fault, by the kernel outside vnets | {} |\n\
             | lost for no known reason | {} |\n\n\
             {} prefixes changed: {announced} announcements, {withdrawn} withdrawals, at most \
             {second_max} in a second.",
            self.sent,
            self.arrived,
            self.lost_in_faults,
            self.lost_in_kernel,
            self.lost,
            self.moving
        );
    }

    fn resources_text(&self, text: &mut String) {
        let (Some(baseline), Some(end)) = (&self.baseline, &self.end) else { return };
        let _ = writeln!(
            text,
            "\n## Resources of the node\n\nAt minute {:.1} and at the end. Memory is anonymous, in \
             KiB;\nits slope is that of the line of least squares over {} samples, one after each \
             cycle. Resident includes\nshared memory.\n\n\
             | program | processes | memory | then | slope, KiB/min | resident | then \
             | descriptors | then | mappings | then |\n\
             |---|---|---|---|---|---|---|---|---|---|---|",
            baseline.minute,
            self.samples.iter().filter(|sample| sample.minute > baseline.minute).count()
        );
        for (name, from) in &baseline.roles {
            let to = end.roles.get(name).copied().unwrap_or_default();
            let later = self.samples.iter().filter(|sample| sample.minute > baseline.minute);
            let role =
                |sample: &ResourceSample| sample.roles.get(name).copied().unwrap_or_default();
            let points: Vec<(f64, f64)> =
                later.map(|it| (it.minute, role(it).memory_kb as f64)).collect();
            let RoleUsage { processes, memory_kb, resident_kb, descriptors, maps } = *from;
            let _ = writeln!(
                text,
                "| {name} | {processes} | {memory_kb} | {} | {:+.0} | {resident_kb} | {} \
                 | {descriptors} | {} | {maps} | {} |",
                to.memory_kb,
                leaks::slope(&points),
                to.resident_kb,
                to.descriptors,
                to.maps
            );
        }
        *text += "\n| resource | | then |\n|---|---|---|\n";
        for (kind, names) in &baseline.resources {
            let then = end.resources.get(kind).map_or(0, |names| names.len());
            let kind = kind.trim_end_matches(" as before");
            let _ = writeln!(text, "| {kind} | {} | {then} |", names.len());
        }
        let _ = writeln!(
            text,
            "| network namespaces in use | {} | {} |",
            baseline.namespaces, end.namespaces
        );
        for (table, count) in &baseline.rows {
            let then = end.rows.get(table).copied().unwrap_or(0);
            let _ = writeln!(text, "| rows of {table} | {count} | {then} |");
        }
        let _ = writeln!(
            text,
            "| bytes of the state | {} | {} |\n| bytes of {} logs | {} | {} |",
            baseline.state_bytes, end.state_bytes, end.logs, baseline.log_bytes, end.log_bytes
        );
    }
}

/// The machine, in a line.
fn machine() -> String {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let cpus = read("/proc/cpuinfo");
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name"));
    let model = model.map_or("?", |line| line.trim_start_matches(['\t', ' ', ':']));
    let count = cpus.lines().filter(|line| line.starts_with("processor")).count();
    let memory = read("/proc/meminfo");
    let total = memory.split_whitespace().nth(1).and_then(|kb| kb.parse::<u64>().ok());
    let total = total.unwrap_or(0) >> 20;
    let kernel = read("/proc/sys/kernel/osrelease");
    format!("{count} CPUs ({model}), {total} GiB, Linux {}.", kernel.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdict_counts_problems() {
        let mut story = Story::new(1);
        story.baseline = Some(ResourceSample::default());
        story.end = Some(ResourceSample::default());
        let cost = |lost| FaultCost { took_s: 1.0, lost, outside: 0, gap_ms: 5 };
        story.faults.insert(SoakFaultKind::Mux, vec![cost(1), cost(9), cost(3)]);
        assert_eq!(story.problems(), 0);
        assert!(story.text().contains("No problems found") && !story.text().contains("WRONG"));
        assert!(
            story.text().contains("| kill -9 of the mux | 3 | 1.0 | 1.0 | 3 | 9 | 0 | 0 | 5 | 5 |")
        );
        story.wrong(SoakCheck::Lost, "some".into());
        assert_eq!(story.problems(), 1);
        assert!(story.text().contains("outside vnets | WRONG |"));
        story.end = None;
        assert_eq!(story.problems(), 2);
    }
}
