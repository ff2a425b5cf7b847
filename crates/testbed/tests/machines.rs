//! Machines in network namespaces. Needs root.

use pdp_testbed::{TestMachine, remove_machines};

#[test]
fn removed_machines_leave_no_process() {
    let name = |letter| format!("pt{}-{letter}", std::process::id());
    let [a, b] = ["a", "b"].map(|letter| TestMachine::make(name(letter)).unwrap());
    a.connect("eth0", (&b, "eth1"), "tx off").unwrap();
    assert!(b.run("ip -o link show eth1").contains("state UP"));
    let mut sleep = a.spawn("sleep 1000");
    assert!(sleep.runs());
    remove_machines(&[a.netns.clone(), b.netns]).unwrap();
    assert!(!sleep.runs());
    assert!(a.try_run("true").is_err());
    assert!(remove_machines(&[a.netns]).is_err());
}
