//! Checks that the counters of `pdp stats --format json` add up.

use serde_json::Value;

/// Nodes, as `VNET/NODE`, whose counters do not add up, with the difference: frames received and
/// made, less those ended. Every counter must be present.
pub fn missing(stats: &Value) -> Vec<(String, i64)> {
    let count = |value: &Value| value.as_i64().unwrap_or_else(|| panic!("a counter: {stats}"));
    let sum_of = |node: &Value| -> i64 {
        let ports = node["ports"].as_object().expect("ports").values().map(|port| {
            let dropped = port["dropped"].as_object().expect("reasons");
            let dropped: i64 = dropped.values().map(count).sum();
            count(&port["received"]) + count(&port["made"])
                - count(&port["sent"])
                - count(&port["punted"])
                - count(&port["consumed"])
                - dropped
        });
        ports.sum::<i64>() - count(&node["inFlight"])
    };
    let vnets = stats["vnets"].as_object().expect("vnets");
    assert!(!vnets.is_empty(), "no vnets: {stats}");
    let mut found = Vec::new();
    for (vnet, counters) in vnets {
        for (name, node) in counters["nodes"].as_object().expect("nodes") {
            let sum = sum_of(node);
            if sum != 0 {
                found.push((format!("{vnet}/{name}"), sum));
            }
        }
    }
    found
}
