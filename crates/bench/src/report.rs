//! The report: REPORT.md with the most important results first, its plots, and a file with the
//! series of each experiment. It is made only from the results.
//!
//! Disturbed samples are no results: they are left out at first, and counted.

use std::collections::BTreeSet;
use std::fmt::{self, Write as _};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::against::{Comparison, Ratio};
use crate::experiments;
use crate::machine::MachineInfo;
use crate::paper;
use crate::plot::{self, short};
use crate::sample::{CoreProximity, Results, SPEED_SHARE_MIN};
use crate::statistics::{SampleGroup, Summary, groups};
use crate::steal::{REPEATS_MAX, STOLEN_MAX};
use crate::targets::{self, BenchTarget, TargetResult};

/// Plots: an experiment and a kind of its figures.
const PLOTS: [(&str, &str); 24] = [
    ("vnets", "of one"),
    ("ports", "of one"),
    ("veth", "rate"),
    ("veth-load", "rate"),
    ("overload", "of peak"),
    ("scaling", "of linear"),
    ("kernel-vnets", "CPU time"),
    ("kernel-vnets", "of one"),
    ("links", "rate off"),
    ("links", "delay off"),
    ("spp", "figure 5: rounds no longer than that"),
    ("spp", "figure 7: rate in"),
    ("spp", "figure 7: rate out, with those above"),
    ("spp", "figure 7: waiting"),
    ("spp", "figure 8: rate of all"),
    ("spp", "figure 8: rate out"),
    ("spp", "figure 8: waiting"),
    ("spp", "figure 9: throughput, 22 bytes"),
    ("spp", "figure 9: throughput, 400 bytes"),
    ("spp", "figure 9: throughput, 1400 bytes"),
    ("spp", "figure 10: round trip beside 400 bytes, mean"),
    ("spp", "figure 10: beside 400 bytes, median"),
    ("spp", "figure 10: round trip beside 1400 bytes, mean"),
    ("spp", "figure 10: beside 1400 bytes, median"),
];

/// Experiment whose plots are shown beside its series, not in the report.
const OWN_PLOTS: &str = "spp";

/// Plots of these that are courses or distributions. Their many points are in no table.
const COURSES: [&str; 7] = [
    "figure 5: rounds no longer than that",
    "figure 7: rate in",
    "figure 7: rate out, with those above",
    "figure 7: waiting",
    "figure 8: rate of all",
    "figure 8: rate out",
    "figure 8: waiting",
];

/// Comparisons of PdP with its peers: an experiment, a kind of its figures, and the parameters.
const PEERS: [(&str, &str); 4] =
    [("veth", "rate"), ("memif", "rate"), ("rtt", "median"), ("rtt", "p99")];

/// Results without disturbed samples.
struct Clean {
    results: Results,
    /// Samples that were left out because the host took a CPU away, or because a core was slow.
    stolen: usize,
    slow: usize,
}

/// Removes disturbed samples. A core's full speed is the highest seen on
/// that kind of CPU. Different CPUs of virtual machines may have the same
/// name, but not the same frequency, which the kernel has measured.
fn clean(all: Vec<Results>) -> Vec<Clean> {
    let kind = |machine: &MachineInfo| (machine.cpu.clone(), machine.cpu_mhz.clone());
    let speed = |results: &Results| {
        results.samples.iter().map(|sample| sample.core_speed).fold(0.0, f64::max)
    };
    let speeds: Vec<_> =
        all.iter().map(|results| (kind(&results.machine), speed(results))).collect();
    let clean = |mut results: Results| {
        let same = speeds.iter().filter(|(other, _)| *other == kind(&results.machine));
        let full_speed = same.map(|(_, speed)| *speed).fold(0.0, f64::max);
        let count = results.samples.len();
        results.samples.retain(|sample| sample.stolen <= STOLEN_MAX);
        let stolen = count - results.samples.len();
        results.samples.retain(|sample| !sample.is_disturbed(full_speed));
        let slow = count - stolen - results.samples.len();
        Clean { results, stolen, slow }
    };
    all.into_iter().map(clean).collect()
}

/// Reads `results/` of a directory; writes `REPORT.md`, `plots/` and the series there.
pub fn write(directory: &Path) -> Result<()> {
    let (mut all, mut comparisons) = (Vec::new(), Vec::new());
    for experiment in experiments::ALL {
        let path = directory.join(format!("results/{}.json", experiment.name));
        if path.exists() {
            all.push(Results::read(&path)?);
        }
        let path = directory.join(format!("results/{}-against.json", experiment.name));
        if path.exists() {
            comparisons.push(Comparison::read(&path)?);
        }
    }
    let all = clean(all);
    remove(&directory.join("plots"), "svg")?;
    remove(&directory.join("results"), "md")?;
    let mut drawn = Vec::new();
    for (experiment, what) in PLOTS {
        let Some(Clean { results, .. }) = all.iter().find(|c| c.results.experiment == experiment)
        else {
            continue;
        };
        let Some(state) = usual_state(results, what) else { continue };
        let name = format!("{experiment}-{}.svg", what.replace(' ', "-").replace([':', ','], ""));
        if plot::write(&directory.join("plots").join(&name), results, what, state)? {
            drawn.push((experiment, what, name));
        }
    }
    for clean in &all {
        let path = directory.join(format!("results/{}.md", clean.results.experiment));
        fs::write(&path, series(clean, &drawn)).with_context(|| path.display().to_string())?;
    }
    let path = directory.join("REPORT.md");
    fs::write(&path, text(&all, &comparisons, &drawn))
        .with_context(|| path.display().to_string())?;
    println!("{}: {} experiments, {} plots", path.display(), all.len(), drawn.len());
    Ok(())
}

/// Removes files of an earlier report, and makes their directory.
fn remove(directory: &Path, kind: &str) -> Result<()> {
    fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    for entry in fs::read_dir(directory)?.flatten() {
        if entry.path().extension().is_some_and(|extension| extension == kind) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// State in which most parameters of a figure were measured.
fn usual_state(results: &Results, what: &str) -> Option<CoreProximity> {
    let groups = groups(&results.samples, what);
    let count = |state: CoreProximity| groups.iter().filter(|group| group.state == state).count();
    let states = [CoreProximity::Far, CoreProximity::Between, CoreProximity::Near];
    states.into_iter().max_by_key(|state| count(*state)).filter(|state| count(*state) > 0)
}

/// Text of the report.
fn text(all: &[Clean], comparisons: &[Comparison], plots: &[(&str, &str, String)]) -> String {
    let mut text = String::from(
        "# Measurements\n\n\
         Made by `make bench` from the files in [results/](results/); not written by hand. A figure \
         is the median of its rounds, with least and most in brackets. *near*, *between* and *far* \
         are states of the machine: the time that a cache line takes between its first and last core, \
         measured before each sample (below 100 ns, between, above 250 ns). Do not compare figures of \
         different states. This report shows the state with the most samples.\n",
    );
    // Writing to a String always succeeds.
    let _ = standings(&mut text, all, comparisons);
    let _ = pairs(&mut text, comparisons);
    let _ = peers(&mut text, all);
    for (experiment, what, name) in
        plots.iter().filter(|(experiment, _, _)| *experiment != OWN_PLOTS)
    {
        let _ = writeln!(text, "\n![{experiment}: {what}](plots/{name})");
    }
    let _ = machines(&mut text, all);
    let _ = index(&mut text, all);
    text
}

fn standings(text: &mut String, all: &[Clean], comparisons: &[Comparison]) -> fmt::Result {
    let all: Vec<Results> = all.iter().map(|clean| clean.results.clone()).collect();
    writeln!(text, "\n## Targets\n\n| target | goal | reached | cores | met | commit |")?;
    writeln!(text, "|---|---|---|---|---|---|")?;
    for target in targets::all() {
        let BenchTarget { description: words, goal, .. } = &target;
        let Some(standing) = target.standing(&all, comparisons) else {
            let why = match target.in_another_state(&all) {
                true => "not in that state",
                false => "not measured yet",
            };
            writeln!(text, "| {words} | {goal} | {why} | | | |")?;
            continue;
        };
        let TargetResult { reached, unit, state, met, commit } = &standing;
        let met = met.map_or("", |met| if met { "yes" } else { "**no**" });
        let (reached, state) = (spread(reached), state.map_or("pairs", CoreProximity::word));
        writeln!(text, "| {words} | {goal} | {reached} {unit} | {state} | {met} | {commit} |")?;
    }
    Ok(())
}

/// Compares this build with the previous one, figure by figure.
fn pairs(text: &mut String, comparisons: &[Comparison]) -> fmt::Result {
    writeln!(
        text,
        "\n## Against the commit before\n\n\
         Both builds run in turn, in pairs, each with its own start. The factor is how many times better \
         this build is: the median of the pairs, and its 95 % interval. The build is no slower if the \
         interval reaches 1."
    )?;
    let compared: BTreeSet<&str> = comparisons.iter().map(|c| &*c.experiment).collect();
    let with_pdp = experiments::ALL.iter().filter(|e| e.subject != experiments::Subject::Machine);
    let missing: Vec<&str> = with_pdp.map(|e| e.name).filter(|n| !compared.contains(n)).collect();
    if !missing.is_empty() {
        writeln!(text, "\nNot measured yet: {}.", missing.join(", "))?;
    }
    if comparisons.is_empty() {
        return Ok(());
    }
    writeln!(
        text,
        "\n| experiment | before | series | figure | times | 95 % | no slower | pairs |"
    )?;
    writeln!(text, "|---|---|---|---|---|---|---|---|")?;
    for comparison in comparisons {
        let (experiment, before) = (&comparison.experiment, &comparison.before);
        for ratio in comparison.ratios() {
            let no_slower = match ratio.is_no_slower() {
                Some(true) => "yes",
                Some(false) => "**no**",
                None => "too few pairs",
            };
            let Ratio { series, what, x: (x, x_unit), times, interval } = &ratio;
            let interval = interval
                .map_or(String::new(), |[lower, upper]| format!("{lower:.3} to {upper:.3}"));
            writeln!(
                text,
                "| {experiment} | {before} | {series} | {what}, {} {x_unit} | {:.3} | {interval} | {no_slower} | {} |",
                short(*x),
                times.median,
                times.count
            )?;
        }
    }
    let left_out: usize = comparisons.iter().map(|comparison| comparison.left_out).sum();
    writeln!(text, "\nLeft out, disturbed or of different states: {left_out} pairs.")
}

/// Compares series of the same run.
fn peers(text: &mut String, all: &[Clean]) -> fmt::Result {
    writeln!(text, "\n## Beside peers, in the same run\n")?;
    writeln!(text, "| experiment | at | series | reached | cycles/packet | cores |")?;
    writeln!(text, "|---|---|---|---|---|---|")?;
    for (experiment, what) in PEERS {
        let own = all.iter().find(|clean| clean.results.experiment == experiment);
        let Some(Clean { results, .. }) = own else { continue };
        let Some(state) = usual_state(results, what) else { continue };
        let Some(sample) = results.samples.iter().find(|sample| sample.what == what) else {
            continue;
        };
        for group in groups(&results.samples, what).iter().filter(|g| g.state == state) {
            let cycles = group.cycles.map_or(String::new(), |cycles| short(cycles.median));
            writeln!(
                text,
                "| {experiment}, {what} | {} {} | {} | {} {} | {cycles} | {} |",
                short(group.x),
                sample.x_unit,
                group.series,
                spread(&group.value),
                sample.unit,
                state.word()
            )?;
        }
    }
    Ok(())
}

fn machines(text: &mut String, all: &[Clean]) -> fmt::Result {
    let mut seen: Vec<&MachineInfo> = Vec::new();
    for Clean { results, .. } in all {
        if !seen.contains(&&results.machine) {
            seen.push(&results.machine);
        }
    }
    writeln!(text, "\n## Machine\n\n| CPU | cores | kernel, system | PdP | peers |")?;
    writeln!(text, "|---|---|---|---|---|")?;
    for machine in seen {
        let MachineInfo { cpu, cpu_mhz, cores, kernel, system, pdp, dpdk, openvswitch, hypervisor } =
            machine;
        let hypervisor =
            if hypervisor.is_empty() { String::new() } else { format!(", virtual ({hypervisor})") };
        writeln!(
            text,
            "| {cpu}, {cpu_mhz} MHz{hypervisor} | {cores} | {kernel}, {system} | {pdp} | \
             DPDK {dpdk}, Open vSwitch {openvswitch} |"
        )?;
    }
    let (stolen, slow) =
        all.iter().fold((0, 0), |(stolen, slow), c| (stolen + c.stolen, slow + c.slow));
    writeln!(
        text,
        "\nA sample during which the host took more than {:.0} % of a CPU's time away is taken again, at \
         most {REPEATS_MAX} times, and the least disturbed one is kept. Not shown are samples that were \
         disturbed all the same ({stolen}), and those before which a core did less than {:.0} % of the \
         simple operations a cycle that it can: another machine had its other thread ({slow}). Cycles are \
         CPU time at the processor's frequency where it counts none: a process that polls has them all \
         the time.",
        STOLEN_MAX * 100.0,
        SPEED_SHARE_MIN * 100.0
    )
}

/// The experiments and their series.
fn index(text: &mut String, all: &[Clean]) -> fmt::Result {
    writeln!(text, "\n## Experiments\n\n| series | what | began | samples, left out |")?;
    writeln!(text, "|---|---|---|---|")?;
    for experiment in experiments::ALL {
        let (name, about) = (experiment.name, experiment.about);
        let Some(clean) = all.iter().find(|clean| clean.results.experiment == name) else {
            writeln!(text, "| {name} | {about} | not measured yet | |")?;
            continue;
        };
        let Clean { results, stolen, slow } = clean;
        let (began, count) = (results.began.get(..10).unwrap_or(""), results.samples.len());
        let quick = if results.quick { ", quick" } else { "" };
        let left_out = stolen + slow;
        writeln!(
            text,
            "| [{name}](results/{name}.md) | {about} | {began}{quick} | {count}, {left_out} |"
        )?;
    }
    Ok(())
}

/// The series of an experiment: one table for all figures measured together.
fn series(clean: &Clean, plots: &[(&str, &str, String)]) -> String {
    let Clean { results, stolen, slow } = clean;
    let (name, began, seconds) = (&results.experiment, &results.began, results.seconds);
    let about = experiments::named(name).map_or("", |experiment| experiment.about);
    let quick = if results.quick { " Quick: short runs." } else { "" };
    let commit = &results.machine.pdp;
    let mut text = format!(
        "# {name}\n\n{about}. Commit {commit}, began {began}, took {seconds} s.{quick} Left out: {stolen} \
         samples during which the host took a CPU away, {slow} on slow cores. See \
         [REPORT.md](../REPORT.md).\n"
    );
    for missing in &results.missing {
        let _ = writeln!(text, "\nNot measured: {missing}");
    }
    for figures in together(results) {
        let _ = table(&mut text, results, &figures);
    }
    for (experiment, what, plot) in plots {
        if experiment == name && name == OWN_PLOTS {
            let _ = writeln!(text, "\n![{what}](../plots/{plot})");
        }
    }
    let mut notes: Vec<(&str, &str)> = Vec::new();
    for sample in results.samples.iter().filter(|sample| !sample.notes.is_empty()) {
        let note = (&*sample.series, &*sample.notes);
        if !notes.contains(&note) {
            notes.push(note);
        }
    }
    for (at, (series, note)) in notes.iter().enumerate() {
        let _ = writeln!(text, "{}- {series}: {note}", if at == 0 { "\n" } else { "" });
    }
    text
}

/// A figure with its groups.
type FigureGroups = (String, String, Vec<SampleGroup>);

/// Sort key of a group in a table.
fn row(group: &SampleGroup) -> (u64, CoreProximity, String) {
    (group.x.to_bits(), group.state, group.series.clone())
}

/// Unit of a figure's parameter.
fn x_unit<'a>(results: &'a Results, what: &str) -> &'a str {
    let sample = results.samples.iter().find(|sample| sample.what == *what);
    sample.map_or("", |sample| &*sample.x_unit)
}

/// Groups figures that have rows in common.
fn together(results: &Results) -> Vec<Vec<FigureGroups>> {
    let mut tables: Vec<Vec<FigureGroups>> = Vec::new();
    for (what, unit) in results.measured() {
        if COURSES.contains(&&*what) {
            continue;
        }
        let own = groups(&results.samples, &what);
        let rows: BTreeSet<_> = own.iter().map(row).collect();
        let is_with = |table: &&mut Vec<FigureGroups>| {
            let is_same =
                |(other, _, _): &FigureGroups| x_unit(results, other) == x_unit(results, &what);
            table.iter().all(is_same)
                && table
                    .iter()
                    .any(|(_, _, groups)| groups.iter().any(|group| rows.contains(&row(group))))
        };
        match tables.iter_mut().find(is_with) {
            Some(table) => table.push((what, unit, own)),
            None => tables.push(vec![(what, unit, own)]),
        }
    }
    tables
}

fn table(text: &mut String, results: &Results, figures: &[FigureGroups]) -> fmt::Result {
    let is_nothing = |(_, _, groups): &&FigureGroups| {
        groups.iter().all(|group| group.value.least == 0.0 && group.value.most == 0.0)
    };
    let shown: Vec<&FigureGroups> = figures.iter().filter(|figure| !is_nothing(figure)).collect();
    let nothing: Vec<&str> =
        figures.iter().filter(is_nothing).map(|(what, _, _)| &**what).collect();
    let mut rows: Vec<&SampleGroup> = Vec::new();
    for group in figures.iter().flat_map(|(_, _, groups)| groups) {
        if !rows.iter().any(|other| row(other) == row(group)) {
            rows.push(group);
        }
    }
    rows.sort_by(|a, b| a.x.total_cmp(&b.x).then(a.state.cmp(&b.state)));
    let has_cycles = shown.iter().any(|(_, _, groups)| groups.iter().any(|g| g.cycles.is_some()));
    let x_unit = x_unit(results, &figures[0].0);
    write!(text, "\n| {x_unit} | series | cores | runs |")?;
    for (what, unit, _) in &shown {
        write!(text, " {what}, {unit} |")?;
    }
    writeln!(text, "{}", if has_cycles { " cycles/packet |" } else { "" })?;
    writeln!(text, "|{}", "---|".repeat(4 + shown.len() + usize::from(has_cycles)))?;
    for at in rows {
        let count = at.value.count;
        write!(text, "| {} | {} | {} | {count} |", at.x, at.series, at.state.word())?;
        let mut cycles = None;
        for (_, _, groups) in &shown {
            let own = groups.iter().find(|group| row(group) == row(at));
            write!(text, " {} |", own.map_or(String::new(), |group| spread(&group.value)))?;
            cycles = cycles.or(own.and_then(|group| group.cycles));
        }
        let cycles = cycles.map_or(String::new(), |cycles| spread(&cycles));
        writeln!(text, "{}", if has_cycles { format!(" {cycles} |") } else { String::new() })?;
    }
    for figure in paper::figures(&results.experiment) {
        let paper::PaperFigure { what, x, series, value } = figure;
        if shown.iter().any(|(shown, _, _)| shown == what) {
            writeln!(text, "\nThe paper, {what}: {series} at {x}: {value}.")?;
        }
    }
    if !nothing.is_empty() {
        writeln!(text, "\n0 everywhere: {}.", nothing.join(", "))?;
    }
    Ok(())
}

fn spread(summary: &Summary) -> String {
    let precise = |value: f64| match value.abs() {
        size if size >= 1000.0 => short(value),
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.3}"),
    };
    let [median, least, most] = [summary.median, summary.least, summary.most].map(precise);
    if summary.count == 1 { median + " (1 run)" } else { format!("{median} ({least} to {most})") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::tests::results;

    fn some() -> Vec<Clean> {
        let mut results = results(&[
            ("pdp, two cores", 2.0, 0.5, 60.0),
            ("pdp, two cores", 2.0, 0.7, 60.0),
            ("pdp, two cores", 2.0, 0.8, 60.0),
            ("ovs, AF_XDP", 2.0, 0.5, 60.0),
            ("kernel", 2.0, 9.0, 300.0),
            ("kernel", 2.0, 8.0, 300.0),
        ]);
        results.samples[4].stolen = 0.123;
        results.samples[0].core_speed = 4.0;
        results.samples[5].core_speed = 2.9;
        results.machine.cpu = "Some CPU".into();
        results.machine.pdp = "abc".into();
        results.missing.push("ovs, packet sockets: not installed".into());
        results.samples[3].notes = "in turn".into();
        let mut nothing = results.samples.clone();
        for sample in &mut nothing {
            (sample.what, sample.value) = ("late".into(), 0.0);
        }
        results.samples.extend(nothing);
        clean(vec![results])
    }

    #[test]
    fn report_has_targets_peers_machine_and_gaps() {
        let plots = [("veth", "rate", "veth-rate.svg".to_owned())];
        let text = text(&some(), &[], &plots);
        for part in [
            "| veth to veth, 2 routes, AF_XDP, two cores | 0.6 Mpps | 0.700 (0.500 to 0.800) Mpps | near | yes | abc |",
            "datapath | 1 times | 1.400 (1.000 to 1.600) times | near | yes | abc |",
            "| 64 vnets | 75% | not measured yet | | | |",
            "| veth, rate | 2 routes | ovs, AF_XDP | 0.500 (1 run) Mpps | 100 | near |",
            "| Some CPU,",
            "disturbed all the same (2)",
            "had its other thread (2)",
            "| lookup |",
            "![veth: rate](plots/veth-rate.svg)",
            "Not measured yet: lookup, router,",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        assert!(!text.contains("routes | kernel | "), "disturbed figures are not shown");
    }

    #[test]
    fn samples_measured_together_form_one_table() {
        let text = series(&some()[0], &[]);
        for part in [
            "| routes | series | cores | runs | rate, Mpps | cycles/packet |",
            "| 2 | pdp, two cores | near | 3 | 0.700 (0.500 to 0.800) | 100 (100 to 100) |",
            "0 everywhere: late.",
            "Left out: 2 samples during which the host took a CPU away, 2 on slow cores.",
            "Not measured: ovs, packet sockets: not installed",
            "- ovs, AF_XDP: in turn",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        assert_eq!(text.matches("| series |").count(), 1);
    }

    #[test]
    fn other_parameter_kinds_get_their_own_table() {
        let mut results = results(&[("pdp", 2.0, 0.5, 60.0), ("pdp", 2.0, 9.0, 60.0)]);
        (results.samples[1].what, results.samples[1].x_unit) = ("time".into(), "frames".into());
        let text = series(&clean(vec![results])[0], &[]);
        for part in [
            "| routes | series | cores | runs | rate, Mpps |",
            "| frames | series | cores | runs | time,",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
    }
}
