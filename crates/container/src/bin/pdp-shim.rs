//! Stands over one guest or helper, so that it outlives who made it; see
//! [`pdp_container::shim_main`].

use std::process::ExitCode;

fn main() -> ExitCode {
    pdp_container::shim_main()
}
