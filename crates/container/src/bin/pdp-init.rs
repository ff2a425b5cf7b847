//! Process 1 of a guest with commands; see [`pdp_container::init`].

use std::process::ExitCode;

fn main() -> ExitCode {
    pdp_container::init::main()
}
