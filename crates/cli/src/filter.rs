//! Filters in libpcap's language, compiled by tcpdump: a program that is run once, where libpcap as a library would be
//! needed for `pdp` to start at all.

use std::ffi::OsStr;
use std::io;
use std::process::{Command, Stdio};

use crate::failure::Failure;

/// A filter as a program of classic BPF, in the form that the API takes.
///
/// # Errors
/// It is none, too long a program comes of it, or there is no tcpdump.
pub fn compile(filter: &str) -> Result<String, Failure> {
    by("tcpdump".as_ref(), filter)
}

fn by(compiler: &OsStr, filter: &str) -> Result<String, Failure> {
    let compiled = Command::new(compiler)
        .args(["-ddd", "-y", "EN10MB", "--", filter])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Failure::Other(
                "filters are compiled by tcpdump, which is not in PATH; install it (apt install tcpdump)".into(),
            ),
            _ => Failure::Other(format!("tcpdump: {error}")),
        })?;
    let bad = |why: &str| Failure::Usage(format!("filter {filter:?}: {why}"));
    if !compiled.status.success() {
        let words = String::from_utf8_lossy(&compiled.stderr);
        let last = words.lines().next_back().unwrap_or_default();
        return Err(bad(last.trim_start_matches("tcpdump: ")));
    }
    let text = String::from_utf8_lossy(&compiled.stdout).trim().replace('\n', ",");
    match text.parse::<pdp_wire::bpf::Program>() {
        Ok(program) => Ok(program.to_string()),
        Err(fault) => Err(bad(&format!("{fault}; use a simpler one"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_compiled_or_the_reason_is_told() {
        let program = compile("ip and udp port 53").unwrap();
        assert!(program.contains(",40 0 0 12,") && program.contains(",6 0 0 262144"), "{program}");
        let fails = |filter: &str| match compile(filter) {
            Err(Failure::Usage(text)) => text,
            other => panic!("{other:?}"),
        };
        assert!(fails("ip and and").contains("filter \"ip and and\": can't parse filter"));
        assert!(fails("-w /tmp/x").contains("filter \"-w /tmp/x\": "));
        let hosts: Vec<String> = (0..250).map(|host| format!("host 10.0.0.{host}")).collect();
        assert!(fails(&hosts.join(" or ")).contains("not 1 to 256; use a simpler one"));
        match by("/nosuch/tcpdump".as_ref(), "ip") {
            Err(Failure::Other(text)) => assert!(text.contains("apt install tcpdump"), "{text}"),
            other => panic!("{other:?}"),
        }
    }
}
