//! Expected state of guests, from the output of iproute2; slow and simple.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::IpAddr;

use ipnet::IpNet;
use pdp_proto::routes::{GroupHop, ResolvedRoute};
use serde_json::Value;

use super::Netns;

/// Expected forwarding state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reference {
    pub routes: BTreeMap<IpNet, ResolvedRoute>,
    /// Local addresses; true for the router's own.
    pub locals: BTreeMap<IpAddr, bool>,
    pub neighbours: BTreeMap<(u16, IpAddr), [u8; 6]>,
}

fn json(netns: &Netns, arguments: &str) -> Vec<Value> {
    let text = netns.ip(&format!("-j -d {arguments}"));
    if text.trim().is_empty() { Vec::new() } else { serde_json::from_str(&text).unwrap() }
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

fn has_flag(value: &Value, flag: &str) -> bool {
    value["flags"].as_array().is_some_and(|flags| flags.iter().any(|f| f == flag))
}

fn vport(device: &str) -> Option<u16> {
    device.strip_prefix('e').and_then(|index| index.parse().ok())
}

fn prefix(text: &str, v6: bool) -> IpNet {
    match (text, v6) {
        ("default", false) => "0.0.0.0/0".parse().unwrap(),
        ("default", true) => "::/0".parse().unwrap(),
        _ => text.parse().unwrap_or_else(|_| IpNet::from(text.parse::<IpAddr>().unwrap())),
    }
}

/// Parses one hop of iproute2: `Err` if only the kernel can use it, `None` if it is unused.
fn hop(value: &Value, weight: u16) -> Option<Result<GroupHop, ()>> {
    if has_flag(value, "dead") {
        return None;
    }
    let gateway = match &value["via"]["host"] {
        Value::String(host) => host.parse().ok(),
        _ => text(value, "gateway").parse().ok(),
    };
    let Some(vport) = vport(text(value, "dev")) else { return Some(Err(())) };
    if !value["encap"].is_null() {
        return Some(Err(()));
    }
    Some(Ok(GroupHop { vport, gateway, weight }))
}

fn hops(all: Vec<Result<GroupHop, ()>>) -> Option<ResolvedRoute> {
    if all.is_empty() {
        return None;
    }
    if all.iter().any(Result::is_err) {
        return Some(ResolvedRoute::Punt);
    }
    let mut merged = BTreeMap::<(u16, Option<IpAddr>), u16>::new();
    for hop in all.into_iter().flatten() {
        *merged.entry((hop.vport, hop.gateway)).or_default() += hop.weight;
    }
    let alone = merged.len() == 1;
    let hop = |((vport, gateway), weight)| GroupHop {
        vport,
        gateway,
        weight: if alone { 1 } else { weight },
    };
    Some(ResolvedRoute::Hops(merged.into_iter().map(hop).collect()))
}

fn nexthop(objects: &BTreeMap<u64, Value>, id: u64) -> Option<ResolvedRoute> {
    let object = objects.get(&id)?;
    if object.get("blackhole").is_some() {
        return Some(ResolvedRoute::Drop);
    }
    let Some(group) = object["group"].as_array() else {
        return hops(hop(object, 1).into_iter().collect());
    };
    let mut all = Vec::new();
    for member in group {
        let object = objects.get(&member["id"].as_u64().unwrap())?;
        if object.get("blackhole").is_some() {
            return Some(ResolvedRoute::Drop);
        }
        let weight = member["weight"].as_u64().unwrap_or(1) as u16;
        all.extend(hop(object, weight));
    }
    hops(all)
}

fn route(value: &Value, objects: &BTreeMap<u64, Value>) -> Option<ResolvedRoute> {
    if let Some(id) = value["nhid"].as_u64() {
        return nexthop(objects, id);
    }
    match text(value, "type") {
        "unicast" => match value["nexthops"].as_array() {
            Some(all) => {
                let weight = |v: &Value| v["weight"].as_u64().unwrap_or(1) as u16;
                hops(all.iter().filter_map(|value| hop(value, weight(value))).collect())
            }
            None => hops(hop(value, 1).into_iter().collect()),
        },
        "blackhole" => Some(ResolvedRoute::Drop),
        _ => Some(ResolvedRoute::Punt),
    }
}

/// True for destinations that guests handle by themselves.
fn is_quiet(prefix: &IpNet) -> bool {
    ["127.0.0.0/8", "::1/128", "fe80::/10", "ff00::/8"]
        .iter()
        .any(|quiet| quiet.parse::<IpNet>().unwrap().contains(prefix))
}

/// Reads the kernel's current state.
pub fn of_kernel(netns: &Netns) -> Reference {
    let mut reference = Reference::default();
    let objects = json(netns, "nexthop");
    let objects: BTreeMap<u64, Value> =
        objects.into_iter().map(|value| (value["id"].as_u64().unwrap(), value)).collect();
    for (v6, option) in [(false, "-4"), (true, "-6")] {
        let mut lists = BTreeMap::<IpNet, Vec<Option<ResolvedRoute>>>::new();
        for table in ["local", "main"] {
            for value in json(netns, &format!("{option} route show table {table}")) {
                let prefix = prefix(text(&value, "dst"), v6);
                if is_quiet(&prefix) {
                    continue;
                }
                let is_host = prefix.prefix_len() == prefix.max_prefix_len();
                let own = matches!(text(&value, "type"), "local" | "anycast");
                if is_host && (own || text(&value, "type") == "broadcast") {
                    *reference.locals.entry(prefix.addr()).or_default() |= own;
                    continue;
                }
                let list = lists.entry(prefix).or_default();
                if value.get("tos").is_some() || value.get("from").is_some() {
                    list.insert(0, Some(ResolvedRoute::Punt));
                } else {
                    list.push(route(&value, &objects));
                }
            }
        }
        for (prefix, list) in lists {
            if let Some(first) = list.into_iter().flatten().next() {
                reference.routes.insert(prefix, first);
            }
        }
    }
    for value in json(netns, "neigh show nud all") {
        let valid = ["PERMANENT", "NOARP", "REACHABLE", "STALE", "DELAY", "PROBE"];
        let state = value["state"][0].as_str().unwrap_or_default();
        let Some(vport) = vport(text(&value, "dev")) else { continue };
        if !valid.contains(&state) || text(&value, "lladdr").is_empty() {
            continue;
        }
        let bytes = text(&value, "lladdr").split(':');
        let bytes: Vec<u8> = bytes.map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
        let address: IpAddr = text(&value, "dst").parse().unwrap();
        if address.is_multicast() {
            continue;
        }
        reference.neighbours.insert((vport, address), bytes.try_into().unwrap());
    }
    reference
}

/// Returns a guest's state in the same form.
pub fn of_guest(state: &super::guest::State) -> Reference {
    Reference {
        routes: state.resolved(),
        locals: state.locals.clone(),
        neighbours: state.neighbours.clone(),
    }
}

/// Describes the differences for people.
pub fn differences(guest: &Reference, kernel: &Reference) -> String {
    let mut text = String::new();
    for prefix in guest.routes.keys().chain(kernel.routes.keys()) {
        let (is, should) = (guest.routes.get(prefix), kernel.routes.get(prefix));
        if is != should {
            writeln!(text, "{prefix}: is {is:?}\n  should be {should:?}").unwrap();
        }
    }
    if guest.locals != kernel.locals {
        let (is, should) = (&guest.locals, &kernel.locals);
        writeln!(text, "locals: are {is:?}\n  should be {should:?}").unwrap();
    }
    if guest.neighbours != kernel.neighbours {
        let (is, should) = (&guest.neighbours, &kernel.neighbours);
        writeln!(text, "neighbours: are {is:?}\n  should be {should:?}").unwrap();
    }
    text
}

/// Waits until a guest's state equals the kernel's.
pub fn equal(netns: &Netns, guest: &super::guest::Guest) {
    let end = std::time::Instant::now() + super::EVENTUALLY;
    loop {
        let (is, should) = (of_guest(&guest.state()), of_kernel(netns));
        if is == should {
            return;
        }
        assert!(std::time::Instant::now() < end, "{}", differences(&is, &should));
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}
