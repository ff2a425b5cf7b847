//! Lost and missing notifications are repaired.

mod common;

use common::guest::Guest;
use common::reference::equal;
use common::{Mirror, Netns, eventually, many};
use pdp_proto::mirror::TableSource;

fn connect(mirror: &Mirror) -> Guest {
    let guest = Guest::connect(&mirror.config.routes_socket, 0);
    eventually("a snapshot", || guest.snapshots() == 1);
    guest
}

#[test]
fn lost_notifications_are_repaired() {
    let netns = Netns::new(2);
    let mirror = Mirror::with(&netns, u64::MAX, &[("RECEIVE", 4096)]);
    let guest = connect(&mirror);
    mirror.process.signal("-STOP");
    netns.batch(&many("add", 3000, "via 172.16.0.2"));
    netns.ip("nexthop add id 1 via 172.16.1.2 dev e1");
    netns.ip("route add 10.0.0.0/8 nhid 1");
    netns.ip("neigh add 172.16.0.2 lladdr 02:00:00:00:00:01 dev e0");
    netns.ip("link set e1 mtu 1444");
    mirror.process.signal("-CONT");
    equal(&netns, &guest);
    assert_eq!(guest.state().vports[&1].mtu, 1444);
    assert!(mirror.status().stats.overruns > 0);

    mirror.process.signal("-STOP");
    netns.batch(&many("del", 1500, ""));
    netns.ip("route del 10.0.0.0/8");
    netns.ip("nexthop del id 1");
    netns.ip("neigh del 172.16.0.2 dev e0");
    mirror.process.signal("-CONT");
    equal(&netns, &guest);
    assert_eq!(mirror.routes(TableSource::Diff(0), None).unwrap(), []);
}

/// Notifications are lost all the time, and changes happen during each dump.
#[test]
fn mirror_converges_despite_steady_loss() {
    let netns = Netns::new(2);
    let mirror = Mirror::with(&netns, u64::MAX, &[("RECEIVE", 4096)]);
    let guest = connect(&mirror);
    netns.batch(&many("add", 30_000, "via 172.16.0.2"));
    let unchanged = "route add 10.0.0.0/8 via 172.16.0.2";
    netns.ip(unchanged);
    for round in 0..6 {
        let lines = many("del", 10_000, "") + &many("add", 10_000, "via 172.16.1.3");
        netns.batch(&lines);
        assert!(round > 4 || !guest.state().routes.is_empty());
    }
    equal(&netns, &guest);
    let status = mirror.status();
    assert!(status.stats.overruns > 0 && status.stats.resyncs > 0, "{status:?}");
}

#[test]
fn a_stopped_mirror_catches_up() {
    let netns = Netns::new(2);
    let mirror = Mirror::new(&netns);
    let guest = connect(&mirror);
    mirror.process.signal("-STOP");
    netns.batch(&many("add", 300_000, "via 172.16.0.2"));
    mirror.process.signal("-CONT");
    eventually("all routes", || guest.shared.lock().unwrap().state.routes.len() >= 300_000);
    assert_eq!(mirror.routes(TableSource::Diff(0), None).unwrap(), []);
    let gone = guest.shared.lock().unwrap().routes_gone;
    assert_eq!(gone, 0, "routes that did not change were taken away");
}

/// The kernel sends no notification of routes that are removed
/// with a link; the next best ones replace them.
#[test]
fn routes_disappear_with_their_link() {
    let netns = Netns::new(2);
    let mirror = Mirror::new(&netns);
    let guest = connect(&mirror);
    netns.batch(&many("add", 20_000, "via 172.16.0.2 metric 10"));
    netns.batch(&many("add", 10_000, "via 172.16.1.2 metric 20"));
    netns.ip("route add 10.0.0.0/8 nexthop via 172.16.0.2 nexthop via 172.16.1.2");
    equal(&netns, &guest);
    netns.ip("link set e0 down");
    equal(&netns, &guest);
    let state = guest.state();
    assert!(!state.vports[&0].up);
    assert_eq!(
        state
            .routes
            .values()
            .filter(|target| matches!(target, pdp_proto::routes::RouteDecision::Group(_)))
            .count(),
        10_003
    );
    netns.ip("link set e0 up");
    netns.addresses(0);
    equal(&netns, &guest);
    netns.ip("link del e1");
    equal(&netns, &guest);
    assert_eq!(mirror.routes(TableSource::Diff(0), None).unwrap(), []);
}
