//! A guest's table equals the kernel's after any sequence of changes.

mod common;

use std::fmt::Write;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use common::guest::Guest;
use common::reference::{differences, equal, of_guest, of_kernel};
use common::{EVENTUALLY, Mirror, Netns, eventually};
use pdp_proto::routes::ResolvedRoute;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

const VPORTS: usize = 4;

/// Random words for iproute2.
struct Words(StdRng);

impl Words {
    fn of<'a>(&mut self, words: &[&'a str]) -> &'a str {
        words.choose(&mut self.0).unwrap()
    }

    fn chance(&mut self, percent: u32) -> bool {
        self.0.random_range(0..100) < percent
    }

    fn vport(&mut self) -> usize {
        self.0.random_range(0..VPORTS)
    }

    fn gateway(&mut self, v6: bool) -> String {
        let (vport, host) = (self.vport(), self.0.random_range(2..5));
        if v6 {
            format!("via fd00:{vport}::{host} dev e{vport}")
        } else if self.chance(15) {
            format!("via inet6 fd00:{vport}::{host} dev e{vport}")
        } else {
            format!("via 172.16.{vport}.{host} dev e{vport}")
        }
    }

    fn prefix(&mut self, v6: bool) -> &'static str {
        if v6 {
            self.of(&[
                "::/0",
                "2001:db8::/32",
                "2001:db8:1::/48",
                "2001:db8:1:2::/64",
                "2001:db8:1:2::3/128",
                "2001:db8:8000::/33",
            ])
        } else {
            self.of(&[
                "0.0.0.0/0",
                "10.1.0.0/16",
                "10.1.0.0/24",
                "10.1.2.0/24",
                "10.1.2.3/32",
                "192.0.2.128/25",
            ])
        }
    }

    fn object(&mut self) -> u32 {
        *[1, 2, 3, 4, 5, 6, 7, 11, 12, 13].choose(&mut self.0).unwrap()
    }

    fn route(&mut self, v6: bool) -> String {
        let verbs: &[&str] = if v6 {
            &["add", "add", "replace", "append", "append", "change", "del", "del"]
        } else {
            &["add", "add", "replace", "append", "prepend", "change", "del", "del"]
        };
        let mut verb = self.of(verbs);
        let prefix = self.prefix(v6);
        let family = if v6 { "-6" } else { "-4" };
        let kind = self.0.random_range(0..100);
        // The kernel's own dump omits routes between the hops of an IPv6 route.
        if v6 && verb == "append" && !matches!(kind, 0..35 | 48..66) {
            verb = "add";
        }
        let plain = verb == "del" && self.chance(30);
        let mut words = format!("{family} route {verb} ");
        if !plain && kind >= 88 {
            let kinds = ["blackhole", "unreachable", "prohibit", "throw"];
            write!(words, "{} ", self.of(&kinds)).unwrap();
        }
        words += prefix;
        if v6 && self.chance(4) {
            words += " from 2001:db8:f::/48";
        } else if !v6 && self.chance(4) {
            words += " tos 0x10";
        }
        if self.chance(60) {
            write!(words, " metric {}", self.of(&["10", "20"])).unwrap();
        }
        if self.chance(10) {
            words += " proto 77";
        }
        if plain {
            return words;
        }
        match kind {
            0..35 => write!(words, " {}", self.gateway(v6)).unwrap(),
            35..45 => write!(words, " dev e{}", self.vport()).unwrap(),
            45..48 => write!(words, " dev x{}", self.vport()).unwrap(),
            48..66 => {
                for _ in 0..self.0.random_range(2..4) {
                    let weight = self.0.random_range(1..4);
                    write!(words, " nexthop {} weight {weight}", self.gateway(v6)).unwrap();
                }
            }
            66..88 => write!(words, " nhid {}", self.object()).unwrap(),
            _ => {}
        }
        words
    }

    fn nexthop(&mut self) -> String {
        let id = self.object();
        let verb = self.of(&["replace", "replace", "replace", "add", "del"]);
        if verb == "del" {
            return format!("nexthop del id {id}");
        }
        match id {
            7 => format!("nexthop {verb} id 7 blackhole"),
            11.. => {
                let members: Vec<String> = (0..self.0.random_range(1..4))
                    .map(|_| format!("{},{}", self.0.random_range(1..7), self.0.random_range(1..9)))
                    .collect();
                format!("nexthop {verb} id {id} group {}", members.join("/"))
            }
            _ => {
                let v6 = id >= 4;
                let gateway = self.gateway(v6).replace("inet6 ", "");
                format!("nexthop {verb} id {id} {gateway}")
            }
        }
    }

    fn neighbour(&mut self) -> String {
        let (vport, host) = (self.vport(), self.0.random_range(2..6));
        let address = if self.chance(50) {
            format!("172.16.{vport}.{host}")
        } else {
            format!("fd00:{vport}::{host}")
        };
        match self.0.random_range(0..5) {
            0 => format!("neigh del {address} dev e{vport}"),
            1 => format!("neigh replace {address} dev e{vport} nud failed"),
            _ => {
                let state = self.of(&["permanent", "noarp", "stale"]);
                let last = self.0.random_range(0..4);
                format!(
                    "neigh replace {address} lladdr 02:00:00:00:00:0{last} dev e{vport} nud {state}"
                )
            }
        }
    }

    fn link(&mut self, netns: &Netns) -> String {
        let vport = self.vport();
        match self.0.random_range(0..13) {
            0..2 => format!("link set e{vport} down"),
            2..5 => {
                netns.try_ip(&format!("link set e{vport} up"));
                netns.addresses(vport);
                format!("link set x{vport} up")
            }
            5..7 => format!("link set x{vport} down"),
            7..9 => format!("link set x{vport} up"),
            9 => format!("addr del 172.16.{vport}.1/24 dev e{vport}"),
            10 => format!("-6 addr del fd00:{vport}::1/64 dev e{vport}"),
            11 => {
                netns.addresses(vport);
                format!("link set e{vport} mtu {}", 1400 + vport)
            }
            _ => {
                let on = self.0.random_range(0..2);
                netns.sysctl(&format!("net.ipv4.conf.e{vport}.ignore_routes_with_linkdown={on}"));
                netns.sysctl(&format!("net.ipv6.conf.e{vport}.ignore_routes_with_linkdown={on}"));
                format!("link set x{vport} down")
            }
        }
    }
}

/// Reads the kernel before and after the guest, because some of its state changes by itself.
fn assert_equal(netns: &Netns, guest: &Guest, within: Duration, history: &[String]) {
    let end = Instant::now() + within;
    loop {
        let kernel = of_kernel(netns);
        let is = of_guest(&guest.state());
        if is == kernel {
            return;
        }
        if Instant::now() > end {
            let recent = history.join("\n");
            panic!("{recent}\n{}\n{:?}", differences(&is, &kernel), guest.state().vports);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The answer of `ip route get` must be among the guest's choices.
fn assert_spots(netns: &Netns, guest: &Guest, history: &[String]) {
    let state = guest.state();
    let defaults = netns.ip("-4 route show default").lines().count();
    let spots = [
        "10.1.2.3",
        "10.1.2.4",
        "10.1.0.9",
        "10.1.9.9",
        "192.0.2.200",
        "198.51.100.1",
        "172.16.1.77",
        "2001:db8:1:2::3",
        "2001:db8:1:2::4",
        "2001:db8:1::9",
        "2001:db8:9000::1",
        "fd00:2::77",
        "2001:db9::1",
    ];
    for spot in spots {
        let address: IpAddr = spot.parse().unwrap();
        if state.locals.contains_key(&address) {
            continue;
        }
        let output = netns.try_ip(&format!("-j route get {spot}"));
        let covering = state.routes.iter().filter(|(prefix, _)| prefix.contains(&address));
        let longest = covering.max_by_key(|(prefix, _)| prefix.prefix_len());
        let guest = longest.map(|(_, target)| state.resolve(*target));
        let answer = serde_json::from_slice::<Vec<serde_json::Value>>(&output.stdout);
        let answer = answer.ok().filter(|_| output.status.success()).and_then(|mut a| a.pop());
        let Some(answer) = answer else {
            let refused = matches!(guest, None | Some(ResolvedRoute::Punt | ResolvedRoute::Drop));
            assert!(refused, "{spot}: kernel refuses, guest has {guest:?}\n{}", history.join("\n"));
            continue;
        };
        let text = |key: &str| answer[key].as_str().unwrap_or_default().to_string();
        let gateway =
            answer["via"]["host"].as_str().map_or_else(|| text("gateway"), str::to_string);
        let gateway = gateway.parse::<IpAddr>().ok();
        let fits = match &guest {
            // Among several default routes, the kernel chooses one whose gateway answers.
            _ if defaults > 1 && spot == "198.51.100.1" => true,
            Some(ResolvedRoute::Hops(hops)) => hops
                .iter()
                .any(|hop| format!("e{}", hop.vport) == text("dev") && hop.gateway == gateway),
            // For punted packets, any answer of the kernel is right.
            Some(ResolvedRoute::Punt) => true,
            Some(ResolvedRoute::Drop) => text("dev") == "lo" || text("type") == "blackhole",
            None => false,
        };
        assert!(fits, "{spot}: kernel {answer}, guest {guest:?}\n{}", history.join("\n"));
    }
}

fn synced(mirror: &Mirror) -> Guest {
    let guest = Guest::connect(&mirror.config.routes_socket, 0);
    eventually("a snapshot", || guest.snapshots() == 1);
    guest
}

fn seeds() -> Vec<u64> {
    match std::env::var("PDP_MIRROR_SEED") {
        Ok(seed) => vec![seed.parse().unwrap()],
        Err(_) => vec![1, 2, 15, 63],
    }
}

/// Notifications suffice: there is no dump after the first.
#[test]
fn notifications_keep_guests_in_sync() {
    for seed in seeds() {
        let netns = Netns::new(VPORTS);
        // Addresses that IPv6 makes by itself add routes.
        eventually("quiet", || netns.ip("-6 addr show tentative").is_empty());
        let mirror = Mirror::new(&netns);
        let guest = synced(&mirror);
        let mut words = Words(StdRng::seed_from_u64(seed));
        let mut history = vec![format!("seed {seed}")];
        let resyncs = mirror.status().stats.resyncs;
        for step in 0..400 {
            let operation = match words.0.random_range(0..10) {
                0..7 => {
                    let v6 = words.chance(50);
                    words.route(v6)
                }
                7..9 => words.nexthop(),
                _ => words.neighbour(),
            };
            // The effect of these operations cannot be determined from notifications alone.
            let replaces = operation.contains("replace") || operation.contains("change");
            if replaces && operation.starts_with("-6 route") && operation.contains("nhid") {
                continue;
            }
            if netns.try_ip(&operation).status.success() {
                history.push(operation);
            }
            if step % 8 == 7 {
                assert_equal(&netns, &guest, EVENTUALLY / 10, &history);
            }
        }
        assert_spots(&netns, &guest, &history);
        assert!(history.len() > 100, "{}", history.len());
        assert_eq!(mirror.status().stats.resyncs, resyncs, "a dump hid something");
    }
}

/// Among several routes of one prefix and metric, exactly the named one is removed.
#[test]
fn equal_metric_routes_are_removed_one_by_one() {
    const ROUTES: usize = 3;
    let netns = Netns::new(ROUTES);
    let mirror = Mirror::new(&netns);
    let guest = synced(&mirror);
    let routes = |vport: usize| {
        let v4 = format!("10.1.0.0/16 via 172.16.{vport}.2");
        [("-4", v4), ("-6", format!("2001:db8::/32 dev e{vport}"))]
    };
    for (family, route) in (0..ROUTES).flat_map(routes) {
        netns.ip(&format!("{family} route append {route}"));
    }
    equal(&netns, &guest);
    for (family, route) in [1, 0, 2].into_iter().flat_map(routes) {
        netns.ip(&format!("{family} route del {route}"));
        equal(&netns, &guest);
    }
}

/// Includes changes that the kernel makes without notification.
#[test]
fn link_and_address_changes_keep_guests_in_sync() {
    for seed in seeds() {
        let netns = Netns::new(VPORTS);
        let mirror = Mirror::new(&netns);
        let guest = synced(&mirror);
        let mut words = Words(StdRng::seed_from_u64(1000 + seed));
        let mut history = vec![format!("seed {seed}")];
        for step in 0..300 {
            let operation = match words.0.random_range(0..10) {
                0..4 => {
                    let v6 = words.chance(50);
                    words.route(v6)
                }
                4..6 => words.nexthop(),
                6 => words.neighbour(),
                _ => words.link(&netns),
            };
            if netns.try_ip(&operation).status.success() {
                history.push(operation);
            }
            if step % 10 == 9 {
                assert_equal(&netns, &guest, EVENTUALLY, &history);
            }
            if step % 50 == 49 {
                assert_spots(&netns, &guest, &history);
            }
        }
    }
}
