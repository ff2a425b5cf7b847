//! Filters in libpcap's language, compiled by running tcpdump. With libpcap as a library, `pdp`
//! could not start without it.

use std::ffi::OsStr;
use std::io;
use std::process::{Command, Stdio};

use crate::failure::CliFailure;

/// Compiles a filter to a classic BPF program, in the form that the API takes.
///
/// # Errors
/// The filter is invalid, its program is too long, or tcpdump is missing.
pub fn compile(filter: &str) -> Result<String, CliFailure> {
    by("tcpdump".as_ref(), filter)
}

fn by(compiler: &OsStr, filter: &str) -> Result<String, CliFailure> {
    let compiled = Command::new(compiler)
        .args(["-ddd", "-y", "EN10MB", "--", filter])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => CliFailure::Other(
                "tcpdump compiles filters, but is not in PATH; install it (apt install tcpdump)"
                    .into(),
            ),
            _ => CliFailure::Other(format!("tcpdump: {error}")),
        })?;
    let bad = |why: &str| CliFailure::Usage(format!("filter {filter:?}: {why}"));
    if !compiled.status.success() {
        let words = String::from_utf8_lossy(&compiled.stderr);
        let last = words.lines().next_back().unwrap_or_default();
        return Err(bad(last.trim_start_matches("tcpdump: ")));
    }
    let text = String::from_utf8_lossy(&compiled.stdout).trim().replace('\n', ",");
    match text.parse::<pdp_wire::bpf::BpfProgram>() {
        Ok(program) => Ok(program.to_string()),
        Err(fault) => Err(bad(&format!("{fault}; use a simpler one"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filter_is_compiled_or_refused_with_reason() {
        let program = compile("ip and udp port 53").unwrap();
        assert!(program.contains(",40 0 0 12,") && program.contains(",6 0 0 262144"), "{program}");
        let fails = |filter: &str| match compile(filter) {
            Err(CliFailure::Usage(text)) => text,
            other => panic!("{other:?}"),
        };
        assert!(fails("ip and and").contains("filter \"ip and and\": can't parse filter"));
        assert!(fails("-w /tmp/x").contains("filter \"-w /tmp/x\": "));
        let hosts: Vec<String> = (0..250).map(|host| format!("host 10.0.0.{host}")).collect();
        assert!(fails(&hosts.join(" or ")).contains("not 1 to 256; use a simpler one"));
        match by("/nosuch/tcpdump".as_ref(), "ip") {
            Err(CliFailure::Other(text)) => assert!(text.contains("apt install tcpdump"), "{text}"),
            other => panic!("{other:?}"),
        }
    }
}
