//! Supervises one guest or helper, so that it outlives its maker; see [`pdp_container::shim_main`].

use std::process::ExitCode;

fn main() -> ExitCode {
    pdp_container::shim_main()
}
