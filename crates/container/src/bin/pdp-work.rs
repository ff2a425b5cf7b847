//! Does one piece of work for an owner in that owner's cgroup; see [`pdp_container::work`].

use std::process::ExitCode;

fn main() -> ExitCode {
    pdp_container::work::main()
}
