//! An experiment from end to end: the kernel's generator, a peer, the sink, the results' file and
//! the report. Needs root. Needs no binaries except this crate's own, unless a node is measured.

use std::fs;
use std::process::Command;
use std::time::Duration;

use pdp_bench::live::Load;
use pdp_bench::peers::kernel;
use pdp_bench::sample::Results;
use pdp_bench::site::{Site, few};
use pdp_bench::vrouters::{RouterPath, TrafficEnds, VrouterTestbed, isolated};
use pdp_testbed::meter::Clock;

const FRAME_BYTES: usize = 64;

#[test]
fn kernel_forwarded_frames_are_counted_once_in_order() {
    let mut site = Site::make("smoke");
    kernel::start(&site);
    kernel::add_routes(&site, &few()).unwrap();
    site.aim(&few(), FRAME_BYTES, 0).unwrap();
    let clock = Clock::of_this_machine();
    let readings = site.offer(Load::Most, Duration::from_millis(200), &[], &clock).unwrap();
    let value = |what| readings.iter().find(|r| r.what() == what).unwrap().value();
    assert!(value("rate") > 0.0);
    // On a busy machine some may be lost.
    assert!(value("loss") >= 0.0 && value("late") == 0.0, "{readings:?}");

    // Without routes nothing arrives; that is an error and not a figure.
    site.node.namespace().run("ip route flush root 20.0.0.0/8");
    assert!(site.offer(Load::Most, Duration::from_millis(50), &[], &clock).is_err());
}

/// Any other path is an error.
#[test]
fn frames_take_the_measured_kernel_path() {
    let [near, far] = [TrafficEnds::Near, TrafficEnds::Tunnels];
    let paths = [
        RouterPath::Plain,
        RouterPath::Vxlan,
        RouterPath::Stack(near),
        RouterPath::Bypass(near),
        RouterPath::Stack(far),
        RouterPath::Bypass(far),
        RouterPath::Stack(near),
    ];
    let measured = isolated(|| {
        let mut field = VrouterTestbed::new([2, 1, 3], 0)?;
        for threads in [0, 2] {
            for path in paths {
                let count = if path == RouterPath::Vxlan { 1 } else { 2 };
                let found = field.set_threads(path, threads.min(count), 0)?;
                assert_eq!(found, 2 * threads.min(count));
                let passed = field.offer(path, count, 0, Duration::from_millis(100))?;
                assert!(passed.rate_pps > 0.0, "{path:?}");
                assert_eq!(passed.threads_ns > 0.0, threads > 0, "{path:?}");
            }
        }
        Ok(())
    });
    measured.unwrap();
}

#[test]
fn the_program_writes_results_and_a_report() {
    let directory = tempfile::tempdir().unwrap();
    let bench = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pdp-bench"));
        let output = command.args(arguments).current_dir(directory.path()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    let file = directory.path().join("bench/results/core-latency.json");
    bench(&["run", "core-latency", "--quick", "--rounds", "1", "--json", file.to_str().unwrap()]);
    let results = Results::read(&file).unwrap();
    assert!(results.quick && results.samples.len() > 1);
    assert!(results.samples.iter().all(|sample| sample.value > 0.0));
    bench(&["report"]);
    let report = fs::read_to_string(directory.path().join("bench/REPORT.md")).unwrap();
    assert!(report.contains("| [core-latency](results/core-latency.md) |"), "{report}");
    let series =
        fs::read_to_string(directory.path().join("bench/results/core-latency.md")).unwrap();
    assert!(series.contains("| sample | series | cores | runs | latency, ns |"), "{series}");
}

#[test]
fn evaluation_plots_the_figures_of_a_node() {
    let directory = tempfile::tempdir().unwrap();
    let bench = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pdp-bench"));
        let output = command.args(arguments).current_dir(directory.path()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    let file = directory.path().join("bench/results/spp.json");
    let quick = ["run", "spp", "--quick", "--rounds", "1", "--at", "5,7", "--json"];
    bench(&[&quick[..], &[file.to_str().unwrap()]].concat());
    let mut results = Results::read(&file).unwrap();
    // The report leaves out disturbed samples, which is not tested here.
    results.samples.iter_mut().for_each(|sample| (sample.stolen, sample.core_speed) = (0.0, 1.0));
    results.write(&file).unwrap();
    let values = |what: &str| -> Vec<f64> {
        let own = results.samples.iter().filter(|sample| sample.what == what);
        own.map(|sample| sample.value).collect()
    };
    // Each queue gets its weight's part, in percent, whatever the machine's speed.
    let parts = results.samples.iter().filter(|it| it.what == "figure 7: part of the output");
    let parts: Vec<[f64; 2]> = parts.map(|sample| [sample.x, sample.value]).collect();
    assert_eq!(parts.len(), 5, "{:?}", results.missing);
    assert!(parts.iter().all(|[weight, part]| (weight - part).abs() < 2.0), "{parts:?}");
    // With several busy guests, each is absent for most of a round.
    let rounds = values("figure 5: round, median");
    assert!(rounds.len() == 3 && rounds.iter().all(|round| *round > 0.0), "{:?}", results.missing);
    assert!(values("figure 5: rounds no longer than that").iter().all(|share| *share <= 100.0));
    bench(&["report"]);
    let series = fs::read_to_string(directory.path().join("bench/results/spp.md")).unwrap();
    assert!(series.contains("](../plots/spp-figure-7-rate-in.svg)"), "{series}");
    assert!(!series.contains("figure 7: rate in, Mb/s |"), "{series}");
}
