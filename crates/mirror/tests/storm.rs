//! Changes that come faster than the mirror reads them.

mod common;

use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;

use common::guest::Guest;
use common::reference::{differences, of_guest, of_kernel};
use common::{Mirror, Netns, eventually};
use pdp_netlink::{Netlink, Request, family};
use pdp_proto::mirror::{MirrorReply, MirrorRequest, MirrorStatusReply, TableSource};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

const ROUTES: u32 = 20_000;
const CHANGES: u32 = 200_000;
/// Messages of one call.
const BATCH: u32 = 500;

/// Room for some hundred notifications.
const RECEIVE_BYTES: usize = 256 << 10;

/// Memory that a storm may take permanently: less than half of its notifications' size.
const GROWTH_BYTES_MAX: u64 = 64 << 20;

fn prefix(route: u32) -> Ipv4Addr {
    Ipv4Addr::from(0x1400_0000 + route * 256)
}

/// Adds `RTM_NEWROUTE` (replace or create) or `RTM_DELROUTE` for a /24 prefix and its gateway.
fn add(batch: &mut Request, route: u32, gateway: Option<[u8; 4]>) {
    let (kind, flags) = match gateway {
        Some(_) => (libc::RTM_NEWROUTE, libc::NLM_F_CREATE | libc::NLM_F_REPLACE),
        None => (libc::RTM_DELROUTE, 0),
    };
    let header = [family(false), 24, 0, 0, 254, 4, 0, libc::RTN_UNICAST, 0, 0, 0, 0];
    batch.message(kind, flags, &header).attribute(libc::RTA_DST, &prefix(route).octets());
    if let Some(gateway) = gateway {
        batch.attribute(libc::RTA_GATEWAY, &gateway);
    }
}

/// Changes routes' gateways, removes routes and adds them again, as fast as the kernel accepts it.
fn storm(netns: &Netns, changes: u32) {
    let file = File::open(format!("/run/netns/{}", netns.name)).unwrap();
    let send = || {
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        let netlink = Netlink::routing().unwrap();
        let mut batch = Request::default();
        for change in 0..changes {
            // Each change of a route differs, and the final state differs from the first.
            let (route, round) = (change * 7 % ROUTES, change / ROUTES);
            let away = (route + round).is_multiple_of(5);
            let number = 2 + (route + 3 * round) % 4;
            let gateway = [172, 16, (number % 2) as u8, number as u8];
            add(&mut batch, route, (!away).then_some(gateway));
            if (change + 1).is_multiple_of(BATCH) {
                netlink.send(&batch).unwrap();
                batch.clear();
            }
        }
    };
    std::thread::scope(|scope| scope.spawn(send).join()).unwrap();
}

/// First status of a mirror without guests, after changes that it could not read meanwhile.
fn status_after_changes(netns: &Netns, mirror: &Mirror) -> MirrorStatusReply {
    eventually("settled at the start", || mirror.status().settled);
    let mut channel = mirror.channel();
    let mut status = |meanwhile: &dyn Fn()| {
        channel.send(&MirrorRequest::Status, &[]).unwrap();
        meanwhile();
        match channel.receive().unwrap().unwrap().0 {
            MirrorReply::Status(status) => status,
            other => panic!("{other:?}"),
        }
    };
    status(&|| {});
    mirror.process.signal("-STOP");
    storm(netns, CHANGES / 4);
    let status = status(&|| mirror.process.signal("-CONT"));
    eventually("settled without guests", || mirror.status().settled);
    status
}

#[test]
fn mirror_reports_settled_only_when_synchronized() {
    let netns = Netns::new(2);
    // Notifications were lost, and the dump that repairs this has begun.
    let small = Mirror::with(&netns, u64::MAX, &[("RECEIVE", RECEIVE_BYTES)]);
    let status = status_after_changes(&netns, &small);
    assert!(status.stats.overruns > 0 && !status.settled, "{status:?}");
    drop(small);
    // More notifications wait for the mirror than it reads before it answers.
    let mirror = Mirror::new(&netns);
    let status = status_after_changes(&netns, &mirror);
    assert!(status.stats.overruns == 0 && !status.settled, "{status:?}");
    let guest = Guest::connect(&mirror.config.routes_socket, 0);
    eventually("settled with a guest", || guest.snapshots() == 1 && mirror.status().settled);
    guest.shared.lock().unwrap().silent = true;
    let before = mirror.status().stats.notifications;
    netns.ip("route add 10.0.0.0/8 via 172.16.0.2");
    eventually("read", || mirror.status().stats.notifications > before);
    assert!(!mirror.status().settled, "the guest has not confirmed it");
    guest.confirm();
    eventually("confirmed", || mirror.status().settled);
}

#[test]
fn change_storm_keeps_memory_bounded_and_guests_synced() {
    let netns = Netns::new(2);
    let mirror = Mirror::with(&netns, u64::MAX, &[("RECEIVE", RECEIVE_BYTES)]);
    let guest = Guest::connect(&mirror.config.routes_socket, 0);
    storm(&netns, CHANGES);
    // A mirror that reports settled twice has read the kernel's state since then.
    let settled = || mirror.status().settled && mirror.status().settled;
    eventually("settled", settled);
    let before = mirror.memory_bytes();
    // The mirror is stopped at first, so that the kernel must drop most notifications.
    mirror.process.signal("-STOP");
    storm(&netns, CHANGES);
    mirror.process.signal("-CONT");
    storm(&netns, CHANGES);
    eventually("settled after the storm", settled);
    let (is, should) = (of_guest(&guest.state()), of_kernel(&netns));
    assert!(is == should, "{}", differences(&is, &should));
    assert!(should.routes.len() > ROUTES as usize / 2, "{}", should.routes.len());
    assert_eq!(mirror.routes(TableSource::Diff(0), None).unwrap(), []);
    let status = mirror.status();
    assert!(status.stats.overruns > 0 && status.stats.resyncs > 0, "{status:?}");
    let growth = mirror.memory_bytes() - before;
    assert!(growth < GROWTH_BYTES_MAX, "{growth} bytes");
}
