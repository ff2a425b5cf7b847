//! Harness of the end-to-end tests: a whole PdP node, with external machines, in namespaces of
//! its own ([`pdp_testbed`]), and turns of the tests.
//!
//! ```no_run
//! use pdp_e2e::{TestNode, eventually};
//! let mut node = TestNode::start("ping");         // pdpd runs in a fresh network namespace
//! let outside = node.machine("mA", "extA");       // a machine behind a veth pair; device extA
//! outside.run("ip addr add 192.0.2.1/24 dev eth0");
//! node.apply(r#"
//! apiVersion: pdp/v1
//! kind: VirtualNetwork
//! # …
//! "#);                                            // pdp apply -f - ; panics if refused
//! node.exec("red/h1", "ping -c1 -W1 10.0.1.2");   // pdp exec; panics if it fails
//! eventually("h1 reaches h2", || node.try_exec("red/h1", "ping -c1 -W1 10.0.2.2").is_ok());
//! let stats = node.json(&["stats", "red"]);       // any verb with --format json
//! node.kill_pdpd();                               // kill -9
//! node.start_pdpd();
//! // Drop takes everything down, after a panic too, and prints pdpd's log after a panic.
//! ```
//!
//! - Tests need root and the binaries of `cargo build --bins` in the same target directory (the
//!   directory above the test's own); [`bin`] returns their paths.
//! - Every [`TestNode`] has its own network namespace, cgroup, BPF pin directory, and run and state
//!   directories under /dev/shm or /tmp (short paths: Unix socket names are limited to 107 bytes).
//!   So tests run side by side. The host's network namespace stays unchanged.
//! - A test runs beside others, unless its first line is `let _alone = alone();`. [`turn`] tells
//!   which tests must be alone. Every [`TestNode`] calls [`beside`] by itself; a test without a
//!   node calls it explicitly.
//! - [`TemporaryNode::leftovers`] lists all remains of a node (processes, mounts, cgroups,
//!   interfaces, files). It must be empty after `down --purge`.
//! - [`eventually`] polls with a generous deadline; there are no timing thresholds.

#![forbid(unsafe_code)]

pub mod counters;
pub mod frame;
pub mod identity;
pub mod routing;
pub mod turn;

use std::ops::{Deref, DerefMut};

pub use pdp_testbed::*;
pub use turn::{TestPermit, alone, beside};

/// A PdP node under test.
#[derive(Debug)]
pub struct TestNode {
    node: TemporaryNode,
    // Returned after the node is removed.
    _permit: TestPermit,
}

impl TestNode {
    /// Starts pdpd in a fresh network namespace. `label` appears in names, for people.
    #[track_caller]
    pub fn start(label: &str) -> Self {
        let mut node = Self::prepare(label);
        node.start_pdpd();
        node
    }

    /// Prepares everything without starting pdpd, so that a test can make devices first.
    #[track_caller]
    pub fn prepare(label: &str) -> Self {
        let permit = beside();
        Self { node: TemporaryNode::prepare(label), _permit: permit }
    }
}

impl Deref for TestNode {
    type Target = TemporaryNode;

    fn deref(&self) -> &TemporaryNode {
        &self.node
    }
}

impl DerefMut for TestNode {
    fn deref_mut(&mut self) -> &mut TemporaryNode {
        &mut self.node
    }
}

/// True if each of the first `count` requests of a `ping -c COUNT -w SECONDS` was answered, in
/// order; while answers are late, ping sends more requests. Without `-w`, ping waits only two
/// round-trip times for its last answers, and then calls them lost.
pub fn all_answered(words: &str, count: usize) -> bool {
    let numbers = words.lines().filter_map(|line| {
        line.split_once("icmp_seq=")?.1.split_whitespace().next()?.parse::<usize>().ok()
    });
    numbers.take(count).eq(1..=count)
}
