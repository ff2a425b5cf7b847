//! Compiles the generator and the sink with clang into `OUT_DIR/measure.bpf.o`.

use std::env;
use std::path::PathBuf;

use libbpf_cargo::SkeletonBuilder;

const SOURCE: &str = "../net/bpf/measure.bpf.c";

fn main() {
    println!("cargo:rerun-if-changed={SOURCE}");
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    let target = env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
    let built = SkeletonBuilder::new()
        .source(SOURCE)
        .obj(out.join("measure.bpf.o"))
        // Debian keeps asm/types.h here; clang does not search it when compiling for BPF.
        .clang_args([format!("-I/usr/include/{target}-linux-gnu")])
        .build();
    if let Err(error) = built {
        panic!("{SOURCE}: {error:#}; is clang installed? (apt install clang libbpf-dev)");
    }
}
