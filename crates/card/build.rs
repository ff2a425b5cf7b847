//! Verilates the card's modules into static libraries and sets `cfg(card_models)`.
//!
//! `PDP_VERILATOR` names Verilator 5.048's program. Without it, build.rs takes the one that `make
//! deps` installed into `target/hw-tools`. If both are missing, the crate builds without models.
//! `PDP_CARD_RTL` names a directory with other RTL: tests of the tests break a copy of it.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

const RTL: &str = "../../hw/rtl";
const SHIMS: [&str; 2] = ["shim/lpm.cpp", "shim/header.cpp"];

/// Sources of `card_lpm`, packages first.
const LPM_SOURCES: [&str; 8] = [
    "card_pkg.sv",
    "card_lpm_pkg.sv",
    "card_lpm.sv",
    "card_lpm_delay.sv",
    "card_lpm_level.sv",
    "card_lpm_write.sv",
    "card_ram.sv",
    "card_ram_ext.sv",
];

/// Variants of `card_lpm` by name; src/model.rs has the same parameters.
const LPM_VARIANTS: [(&str, &[(&str, u32)]); 2] = [
    ("small", &[("VES", 4), ("LEVELS", 20), ("NODES", 256), ("LEAVES", 2048)]),
    (
        "large",
        &[
            ("VES", 2),
            ("LEVELS", 10),
            ("NODES", 1 << 19),
            ("LEAVES", 1 << 22),
            ("EXT_FROM", 3),
            ("EXT_LATENCY", 4),
        ],
    ),
];

/// Sources of `card_header`, packages first.
const HEADER_SOURCES: [&str; 21] = [
    "card_pkg.sv",
    "card_lpm_pkg.sv",
    "card_arp.sv",
    "card_context.sv",
    "card_delay_ram.sv",
    "card_flow.sv",
    "card_flow_step.sv",
    "card_header.sv",
    "card_lpm.sv",
    "card_lpm_delay.sv",
    "card_lpm_level.sv",
    "card_lpm_write.sv",
    "card_meter.sv",
    "card_nexthop.sv",
    "card_parse.sv",
    "card_ram.sv",
    "card_ram_ext.sv",
    "card_rewrite.sv",
    "card_ve.sv",
    "card_verdict.sv",
    "card_vmac.sv",
];

/// The variant of `card_header`; src/header.rs has the same parameters.
const HEADER_PARAMETERS: [(&str, u32); 8] = [
    ("VES", 4),
    ("VMACS", 256),
    ("NODES", 1024),
    ("LEAVES", 16384),
    ("GROUPS", 512),
    ("BUCKET_BLOCKS", 32),
    ("HOPS", 512),
    ("ARPS", 1024),
];

/// A module to verilate, with its parameters and its C++ functions.
struct CardModel {
    module: &'static str,
    /// Name of the library and prefix of its functions.
    name: String,
    sources: &'static [&'static str],
    parameters: &'static [(&'static str, u32)],
    shim: &'static str,
}

fn models() -> Vec<CardModel> {
    let lpm = |&(variant, parameters)| CardModel {
        module: "card_lpm",
        name: format!("card_lpm_{variant}"),
        sources: &LPM_SOURCES,
        parameters,
        shim: SHIMS[0],
    };
    let header = CardModel {
        module: "card_header",
        name: "card_header".into(),
        sources: &HEADER_SOURCES,
        parameters: &HEADER_PARAMETERS,
        shim: SHIMS[1],
    };
    LPM_VARIANTS.iter().map(lpm).chain([header]).collect()
}

fn main() {
    println!("cargo::rustc-check-cfg=cfg(card_models)");
    println!("cargo::rerun-if-env-changed=PDP_VERILATOR");
    println!("cargo::rerun-if-env-changed=PDP_CARD_RTL");
    SHIMS.iter().for_each(|shim| println!("cargo::rerun-if-changed={shim}"));
    let rtl = env::var("PDP_CARD_RTL").unwrap_or_else(|_| RTL.into());
    for source in HEADER_SOURCES {
        println!("cargo::rerun-if-changed={rtl}/{source}");
    }
    let Some(program) = verilator() else {
        println!("cargo::warning=no Verilator: built without the card's models (run `make deps`)");
        return;
    };
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    let root = verilator_root(&program);
    models().iter().for_each(|model| build(&program, &root, &out, &rtl, model));
    build_runtime(&root);
    println!("cargo::rustc-cfg=card_models");
}

/// Returns Verilator's program if there is one.
fn verilator() -> Option<PathBuf> {
    if let Some(program) = env::var_os("PDP_VERILATOR") {
        return Some(program.into());
    }
    let venv = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/hw-tools/venv/lib");
    println!("cargo::rerun-if-changed={}", venv.display());
    let programs = venv
        .read_dir()
        .ok()?
        .flatten()
        .map(|python| python.path().join("site-packages/verilator/bin/verilator"));
    programs.into_iter().find(|program| program.exists())
}

/// Returns the directory of Verilator's `include`.
fn verilator_root(program: &Path) -> PathBuf {
    if let Some(root) = env::var_os("VERILATOR_ROOT") {
        return root.into();
    }
    let beside = program.ancestors().nth(2).map(Path::to_path_buf).unwrap_or_default();
    if beside.join("include/verilated.h").exists() {
        return beside;
    }
    let output = Command::new(program).args(["--getenv", "VERILATOR_ROOT"]).output();
    match output {
        Ok(output) => String::from_utf8_lossy(&output.stdout).trim().into(),
        Err(error) => panic!("{}: {error}", program.display()),
    }
}

/// Builds the library of a model.
fn build(program: &Path, root: &Path, out: &Path, rtl: &str, model: &CardModel) {
    let class = format!("V{}", model.name);
    let directory = out.join(&class);
    // Stale files of an earlier run would be compiled too.
    let _ = std::fs::remove_dir_all(&directory);
    let mut command = Command::new(program);
    command.env("VERILATOR_ROOT", root);
    command.args(["--cc", "-O3", "--x-assign", "fast", "--x-initial", "unique", "--noassert"]);
    // Parameters of a package are for all that import it.
    command.args(["-Wall", "-Wno-UNUSEDPARAM", "--top-module", model.module, "--prefix", &class]);
    command.arg("--Mdir").arg(&directory);
    command.args(model.parameters.iter().map(|(name, value)| format!("-G{name}={value}")));
    command.args(model.sources.iter().map(|source| format!("{rtl}/{source}")));
    match command.output() {
        Ok(output) if output.status.success() => {}
        Ok(output) => panic!("{command:?}:\n{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => panic!("{}: {error}", program.display()),
    }
    let mut build = compiler(root);
    build.include(&directory).file(model.shim);
    build.define("MODEL", class.as_str());
    build.define("HEADER", format!("\"{class}.h\"").as_str());
    build.define("NAME(f)", format!("{}_##f", model.name).as_str());
    for entry in directory.read_dir().into_iter().flatten().flatten() {
        if entry.path().extension().is_some_and(|extension| extension == "cpp") {
            build.file(entry.path());
        }
    }
    build.compile(&model.name);
}

/// Builds what all models share.
fn build_runtime(root: &Path) {
    let files = ["verilated.cpp", "verilated_random.cpp", "verilated_threads.cpp"];
    compiler(root).files(files.map(|file| root.join("include").join(file))).compile("verilated");
}

fn compiler(root: &Path) -> cc::Build {
    let mut build = cc::Build::new();
    let include = root.join("include");
    build.cpp(true).std("c++17").opt_level(2).debug(false).warnings(false);
    build.include(include.join("vltstd")).include(include);
    for (name, value) in [("VM_COVERAGE", "0"), ("VM_SC", "0"), ("VM_TRACE", "0")] {
        build.define(name, value);
    }
    build
}
