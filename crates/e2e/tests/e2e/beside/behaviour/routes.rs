//! Routes of all sorts.

use super::case::{Case, case, v4, v6};

const TO: &str = "203.0.113.5";
const TO_V6: &str = "2001:db8:9::5";

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in ["blackhole", "unreachable", "prohibit", "throw"] {
        cases.push(
            case(&format!("{kind}, both families"))
                .setup(&format!("ip route add {kind} 203.0.113.0/24"))
                .setup(&format!("ip -6 route add {kind} 2001:db8:9::/48"))
                .v4(|p, _| p.to(TO).done())
                .v6(|p, _| p.to(TO_V6).done()),
        );
    }
    cases.extend(vec![
        v4("no route", |p, _| p.to(TO).done())
            .setup("ip route del default")
            .undo("ip route add default via 10.3.0.5 proto static"),
        v6("no route", |p, _| p.to(TO_V6).done())
            .setup("ip -6 route del default")
            .undo("ip -6 route add default via fd00:3::5 proto static"),
        v4("route via gateway", |p, _| p.to(TO).done())
            .setup("ip route add 203.0.113.0/24 via 10.1.0.7"),
        v4("route by device, destination is the neighbour", |p, _| p.to(TO).done())
            .setup("ip route add 203.0.113.0/24 dev eth1"),
    ]);
    cases
}
