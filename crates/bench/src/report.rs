//! The report: REPORT.md and plots, made of the results alone.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::experiments;
use crate::machine::Machine;
use crate::paper;
use crate::plot::{self, short};
use crate::sample::{Results, State};
use crate::statistics::{Summary, groups};
use crate::steal::{REPEATS_MAX, STOLEN_MAX};
use crate::targets;

/// Reads `results/` of a directory; writes `plots/` and `REPORT.md` there.
pub fn write(directory: &Path) -> Result<()> {
    let mut all = Vec::new();
    for experiment in experiments::ALL {
        let path = directory.join(format!("results/{}.json", experiment.name));
        if path.exists() {
            all.push(Results::read(&path)?);
        }
    }
    let plots = directory.join("plots");
    fs::create_dir_all(&plots).with_context(|| plots.display().to_string())?;
    for entry in fs::read_dir(&plots)?.flatten() {
        // Those of results that are gone.
        if entry.path().extension().is_some_and(|extension| extension == "svg") {
            fs::remove_file(entry.path())?;
        }
    }
    let mut drawn = Vec::new();
    for results in &all {
        for (what, _) in results.measured() {
            for state in [State::Near, State::Between, State::Far] {
                let name = plot_name(&results.experiment, &what, state);
                if plot::write(&plots.join(&name), results, &what, state)? {
                    drawn.push(name);
                }
            }
        }
    }
    let path = directory.join("REPORT.md");
    fs::write(&path, text(&all, &drawn)).with_context(|| path.display().to_string())?;
    println!("{}: {} experiments, {} plots", path.display(), all.len(), drawn.len());
    Ok(())
}

fn plot_name(experiment: &str, what: &str, state: State) -> String {
    let words: Vec<&str> =
        what.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()).collect();
    format!("{experiment}-{}-{}.svg", words.join("-"), state.word())
}

/// The report, with those of `plots` that belong to each experiment.
pub fn text(all: &[Results], plots: &[String]) -> String {
    let mut text = String::from(
        "# Measurements\n\n\
         Made by `make bench` from the files in [results/](results/); not written by hand. A figure \
         is the median of its rounds, with least and most in brackets. *near*, *between* and *far* \
         are states of the machine: the way of a cache line between its first and last core, taken \
         before each sample (below 100 ns, between, above 250 ns; below 30 ns the two are threads of \
         one core). Figures of different states are not to be compared. Nor are those of a core at full \
         speed and of one whose other thread another machine has: before each sample it is measured \
         how many simple operations a core does in a cycle, about half as many with half of the core. \
         Cycles are CPU time at the processor's frequency where it counts none: a process that polls has them all the time.\n",
    );
    // Writing to a text never fails.
    let _ = writeln!(
        text,
        "\nThe host of a virtual machine takes CPU time away at moments (`steal`). A sample during which \
         a CPU lost more than {:.0}% of its time was taken again, at most {REPEATS_MAX} times, while \
         the experiment had time for it, and the least disturbed one counts. Where what counts was \
         disturbed, the most that a CPU lost stands below its table.",
        STOLEN_MAX * 100.0
    );
    let _ = machines(&mut text, all);
    let _ = absent(&mut text, all);
    let _ = standings(&mut text, all);
    for results in all {
        let _ = experiment(&mut text, results, plots);
    }
    text
}

fn machines(text: &mut String, all: &[Results]) -> std::fmt::Result {
    let mut seen: Vec<&Machine> = Vec::new();
    for results in all {
        if !seen.contains(&&results.machine) {
            seen.push(&results.machine);
        }
    }
    writeln!(text, "\n## Machine\n\n| experiments | CPU | cores | kernel, system | PdP | peers |")?;
    writeln!(text, "|---|---|---|---|---|---|")?;
    for machine in seen {
        let of = all.iter().filter(|results| &results.machine == machine);
        let names: Vec<&str> = of.map(|results| &*results.experiment).collect();
        writeln!(
            text,
            "| {} | {}, {} MHz{} | {} | {}, {} | {} | DPDK {}, Open vSwitch {} |",
            names.join(", "),
            machine.cpu,
            machine.cpu_mhz,
            match &*machine.hypervisor {
                "" => String::new(),
                hypervisor => format!(", virtual ({hypervisor})"),
            },
            machine.cores,
            machine.kernel,
            machine.system,
            machine.pdp,
            machine.dpdk,
            machine.openvswitch
        )?;
    }
    Ok(())
}

/// Experiments that no results are there of.
fn absent(text: &mut String, all: &[Results]) -> std::fmt::Result {
    let has = |name: &str| all.iter().any(|results| results.experiment == name);
    let names: Vec<&str> =
        experiments::ALL.iter().map(|e| e.name).filter(|name| !has(name)).collect();
    if !names.is_empty() {
        writeln!(text, "\nNo results of: {}.", names.join(", "))?;
    }
    Ok(())
}

fn standings(text: &mut String, all: &[Results]) -> std::fmt::Result {
    writeln!(text, "\n## Targets\n\n| target | reached | cores | met |\n|---|---|---|---|")?;
    for target in targets::all() {
        let standings = target.standings(all);
        if standings.is_empty() {
            let state = target.state.map_or("", State::word);
            let why = match target.in_another_state(all) {
                true => "not in that state during the run",
                false => "not measured",
            };
            writeln!(text, "| {} | {why} | {state} | |", target.words)?;
        }
        for standing in standings {
            let met = standing.met.map_or("", |met| if met { "yes" } else { "**no**" });
            let reached = spread(&standing.reached);
            let (unit, state) = (&standing.unit, standing.state.word());
            writeln!(text, "| {} | {reached} {unit} | {state} | {met} |", target.words)?;
        }
    }
    Ok(())
}

fn experiment(text: &mut String, results: &Results, plots: &[String]) -> std::fmt::Result {
    let name = &results.experiment;
    writeln!(text, "\n## {name}\n")?;
    if let Some(experiment) = experiments::named(name) {
        let about = experiment.about;
        let quick = if results.quick { " Quick: short runs." } else { "" };
        let (began, seconds) = (&results.began, results.seconds);
        writeln!(text, "{about}. Began {began}, took {seconds} s.{quick}")?;
    }
    for missing in &results.missing {
        writeln!(text, "\nNot measured: {missing}")?;
    }
    for (what, unit) in results.measured() {
        let x_unit = results.samples.iter().find(|sample| sample.what == what);
        let x_unit = x_unit.map_or("", |sample| &*sample.x_unit);
        writeln!(text, "\n| {x_unit} | series | {what}, {unit} | cycles/packet | cores | runs |")?;
        writeln!(text, "|---|---|---|---|---|---|")?;
        let groups = groups(&results.samples, &what);
        for group in &groups {
            writeln!(
                text,
                "| {} | {} | {} | {} | {} | {} |",
                group.x,
                group.series,
                spread(&group.value),
                group.cycles.map_or(String::new(), |cycles| spread(&cycles)),
                group.state.word(),
                group.value.count
            )?;
        }
        for figure in paper::FIGURES.iter().filter(|figure| figure.what == what) {
            let paper::Figure { x, series, value, .. } = figure;
            writeln!(text, "| {x} | *the paper: {series}* | *{value}* | | | |")?;
        }
        let stolen = groups.iter().map(|group| group.stolen).fold(0.0, f64::max);
        if stolen > 0.0 {
            writeln!(text, "\nStolen by the host: at most {:.1}% of a CPU.", stolen * 100.0)?;
        }
        let samples = results.samples.iter().filter(|sample| sample.what == what);
        let speeds = samples.map(|sample| sample.core_speed).filter(|speed| *speed > 0.0);
        if let Some(speed) = Summary::of(speeds) {
            let speed = spread(&speed);
            writeln!(text, "\nThe slower core did {speed} operations a cycle before the samples.")?;
        }
        for state in [State::Near, State::Between, State::Far] {
            let plot = plot_name(name, &what, state);
            if plots.contains(&plot) {
                writeln!(text, "\n![{name}: {what}, cores {}](plots/{plot})", state.word())?;
            }
        }
    }
    let mut notes: Vec<(&str, &str)> = Vec::new();
    for sample in results.samples.iter().filter(|sample| !sample.notes.is_empty()) {
        let note = (&*sample.series, &*sample.notes);
        if !notes.contains(&note) {
            notes.push(note);
        }
    }
    if !notes.is_empty() {
        writeln!(text)?;
    }
    for (series, note) in notes {
        writeln!(text, "- {series}: {note}")?;
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
    if summary.count == 1 { median } else { format!("{median} ({least} to {most})") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::tests::results;

    #[test]
    fn the_report_has_machine_targets_tables_and_plots() {
        let mut results = results(&[
            ("pdp, two cores", 2.0, 0.5, 60.0),
            ("pdp, two cores", 2.0, 0.7, 60.0),
            ("pdp, two cores", 2.0, 0.8, 60.0),
            ("kernel", 2.0, 0.8, 300.0),
        ]);
        results.samples[1].stolen = 0.123;
        results.samples[0].core_speed = 2.0;
        results.samples[2].core_speed = 4.0;
        results.machine.cpu = "Some CPU".into();
        results.missing.push("ovs: not installed".into());
        results.samples[3].notes = "in interrupts".into();
        let plots = ["veth-rate-near.svg".to_owned()];
        let text = text(&[results], &plots);
        for part in [
            "| veth | Some CPU,",
            "| veth to veth, 2 routes, AF_XDP, two cores: above 600 kpps | 0.700 (0.500 to 0.800) Mpps | near | yes |",
            "| overload: at ten times the capacity within 5% of the peak | not measured |",
            "| 2 | kernel | 0.800 | 100 | far | 1 |",
            "Stolen by the host: at most 12.3% of a CPU.",
            "The slower core did 3.000 (2.000 to 4.000) operations a cycle before the samples.",
            "Not measured: ovs: not installed",
            "No results of: core-latency, lookup,",
            "![veth: rate, cores near](plots/veth-rate-near.svg)",
            "- kernel: in interrupts",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        assert!(!text.contains("veth-rate-far.svg"));
    }
}
