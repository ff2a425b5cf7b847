//! Compiles the BPF programs with clang into `OUT_DIR/NAME.bpf.o`.

use std::env;
use std::path::PathBuf;

use libbpf_cargo::SkeletonBuilder;

/// BPF programs to compile. The last one is only for tests and measurements.
const NAMES: [&str; 4] = ["pdp_xdp", "pdp_ports", "pdp_limits", "measure"];

fn main() {
    println!("cargo:rerun-if-changed=bpf");
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    let target = env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
    for name in NAMES {
        let source = format!("bpf/{name}.bpf.c");
        let built = SkeletonBuilder::new()
            .source(&source)
            .obj(out.join(format!("{name}.bpf.o")))
            // Debian keeps asm/types.h here; clang does not
            // search this path when it compiles for BPF.
            .clang_args([format!("-I/usr/include/{target}-linux-gnu")])
            .build();
        if let Err(error) = built {
            panic!("{source}: {error:#}; is clang installed? (apt install clang libbpf-dev)");
        }
    }
}
