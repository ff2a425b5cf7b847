//! An experiment from end to end: the kernel's generator, a peer, the sink, the results' file and the
//! report. Needs root, and no binaries but this crate's own.

use std::fs;
use std::process::Command;
use std::time::Duration;

use pdp_bench::live::Load;
use pdp_bench::peers::kernel;
use pdp_bench::sample::Results;
use pdp_bench::site::{Site, few};
use pdp_e2e::meter::Clock;

const FRAME_BYTES: usize = 64;

#[test]
fn what_the_kernel_forwards_is_counted_in_order_and_not_twice() {
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

    // Without routes nothing arrives, and that is an error and no figure.
    site.node.namespace().run("ip route flush root 20.0.0.0/8");
    assert!(site.offer(Load::Most, Duration::from_millis(50), &[], &clock).is_err());
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
