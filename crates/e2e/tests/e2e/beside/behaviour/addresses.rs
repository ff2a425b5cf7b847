//! Special source and destination addresses.

use super::case::{Case, v4, v6};

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for source in [
        "127.0.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "239.1.1.1",
        "255.255.255.255",
        "169.254.1.1",
        "10.0.255.255",
        "10.1.255.255",
        "10.0.0.0",
        "10.1.0.9",
        "192.168.77.1",
    ] {
        cases.push(v4(&format!("source {source}"), move |p, _| p.from(source).done()));
    }
    for destination in [
        "127.0.0.1",
        "127.255.255.255",
        "0.0.0.0",
        "255.255.255.255",
        "169.254.1.1",
        "10.1.255.255",
        "10.1.0.0",
        "10.0.255.255",
        "10.0.0.0",
        "224.0.0.5",
        "224.0.1.1",
        "232.5.5.5",
        "239.255.255.250",
        "192.0.0.8",
        "100.64.0.1",
    ] {
        let name = format!("destination {destination} to our MAC");
        cases.push(v4(&name, move |p, _| p.to(destination).done()));
    }
    for source in [
        "::",
        "::1",
        "::ffff:1.2.3.4",
        "::1.2.3.4",
        "ff02::1",
        "ff05::5",
        "fe80::99",
        "fec0::9",
        "fd00::1",
        "fd00:1::1",
        "fd00:1::9",
        "fd00::",
        "2002:7f00:1::1",
        "2001:db8::1",
        "100::1",
        "64:ff9b::1.2.3.4",
    ] {
        cases.push(v6(&format!("source {source}"), move |p, _| p.from(source).done()));
    }
    for destination in [
        "::1",
        "::ffff:1.2.3.4",
        "::1.2.3.4",
        "fec0::9",
        "ff02::1",
        "ff02::5",
        "ff01::1",
        "ff05::5",
        "ff0e::9",
        "fe80::1234",
        "fd00:1::",
        "fd00::",
        "2002:7f00:1::1",
        "100::1",
        "64:ff9b::1.2.3.4",
        "3fff::1",
        "febf::1",
    ] {
        let name = format!("destination {destination} to our MAC");
        cases.push(v6(&name, move |p, _| p.to(destination).done()));
    }
    cases.extend(otherwise());
    cases
}

pub const RESERVED: &str = "0.0.0.0/8 and 240.0.0.0/4 as source or destination";

fn otherwise() -> Vec<Case> {
    let mut cases = Vec::new();
    for source in ["0.1.2.3", "240.0.0.1", "250.1.2.3"] {
        let case = v4(&format!("source {source}"), move |p, _| p.from(source).done());
        cases.push(case.differs(RESERVED, "eth1 udp", "nothing"));
    }
    for destination in ["0.1.2.3", "240.0.0.1", "255.255.255.254"] {
        let name = format!("destination {destination} to our MAC");
        let case = v4(&name, move |p, _| p.to(destination).done());
        cases.push(case.differs(RESERVED, "eth3 udp", "nothing"));
    }
    let case = v4("to 240.0.0.0/8 with a route of its own", |p, _| p.to("240.1.1.1").done());
    let case = case.setup("ip route add 240.0.0.0/8 via 10.1.0.7");
    cases.push(case.differs(RESERVED, "eth1 udp", "nothing"));
    cases.push(v6("destination :: to our MAC", |p, _| p.to("::").done()).differs(
        ":: as destination",
        "eth3 udp6",
        "nothing",
    ));
    for own in ["10.0.0.1", "10.1.0.1", "10.3.0.1"] {
        cases.push(v4(&format!("source {own}"), move |p, _| p.from(own).done()));
    }
    cases
}
