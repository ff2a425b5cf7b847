//! Locations and names of the demo. Every network namespace, directory, cgroup
//! and pin is named `pdp-` and the demo's name, optionally followed by a dot
//! and more. A name has no dot, so several demos can run at a time.

use std::path::PathBuf;
use std::sync::OnceLock;

use pdp_testbed::{PdpNode, TestMachine};

/// The demo's default name.
pub const NAME_DEFAULT: &str = "fig1";

/// Longest name, bytes: Unix sockets below the run directory are limited to 107.
const NAME_BYTES_MAX: usize = 16;

static NAME: OnceLock<String> = OnceLock::new();

/// Checks a name, for the command line.
pub fn parse(name: &str) -> Result<String, String> {
    let fits = (1..=NAME_BYTES_MAX).contains(&name.len());
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if fits && name.bytes().all(plain) && name.as_bytes()[0] != b'-' {
        return Ok(name.to_owned());
    }
    Err(format!("use 1 to {NAME_BYTES_MAX} lower-case letters, digits and -, not - first"))
}

/// Sets the name, once, before its first use.
pub fn set_name(name: String) {
    let _ = NAME.set(name);
}

/// The demo's name.
pub fn name() -> &'static str {
    NAME.get().map_or(NAME_DEFAULT, String::as_str)
}

/// Common prefix of all names; also the name of its cgroup and of its directory of BPF pins.
pub fn base() -> String {
    format!("pdp-{}", name())
}

/// Network namespace of the node, of the underlay or of an external machine.
pub fn netns(machine: &str) -> String {
    format!("{}.{machine}", base())
}

/// Returns the machine with this name: the node, the underlay or an external machine.
pub fn machine(name: &str) -> TestMachine {
    TestMachine { netns: netns(name) }
}

/// The node's network namespace.
pub fn node() -> TestMachine {
    machine("node")
}

/// The network namespace with the two bridges of the underlay.
pub fn underlay() -> TestMachine {
    machine("underlay")
}

/// The node.
pub fn pdp_node() -> PdpNode {
    PdpNode::new(node().netns, base(), [run(), state()])
}

/// Run directory of the demo's daemon.
pub fn run() -> PathBuf {
    PathBuf::from(format!("/run/{}", base()))
}

/// State directory.
pub fn state() -> PathBuf {
    PathBuf::from(format!("/var/lib/{}", base()))
}

/// Directory of files and logs outside the node.
pub fn outside() -> PathBuf {
    PathBuf::from(format!("/run/{}.outside", base()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        assert_eq!(parse("fig1").as_deref(), Ok("fig1"));
        for bad in ["", "-a", "a/b", "..", "A", "a b", "12345678901234567"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
