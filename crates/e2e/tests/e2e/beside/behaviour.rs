//! What PdP's router does with a packet is what the kernel does: the same frames and the same commands go
//! to a router of PdP and to a network namespace that has the control guest's settings, and what comes
//! out of the four ports of each is compared byte by byte, with neighbours unknown and known.
//!
//! To add a case, add it to a list in a file of `behaviour/`: a name, shell lines for both routers
//! ([`Case::setup`](case::Case::setup), [`Case::undo`](case::Case::undo) where routes and nexthop objects are
//! not all), and frames ([`case::v4`], [`case::v6`]). Both routers have eth0 to eth3 with the addresses
//! 10.N.0.1/16 and fd00:N::1/64 (fd00::1/64 on eth0), eth2 an MTU of 1,400, and a default route by 10.3.0.5
//! and fd00:3::5. Each case sends from a machine of its own behind eth0. All other machines answer for
//! themselves, but those whose address ends in 102 (0x66).
//!
//! Where PdP does otherwise by design, `differs` says what both do, and names the row of docs/dataplane.md.

mod addresses;
mod bench;
mod case;
mod frames;
mod packets;
mod routes;
mod settings;

use std::time::Instant;

use bench::Bench;
use case::Case;

fn cases() -> Vec<Case> {
    let all = [packets::cases(), addresses::cases(), routes::cases(), settings::cases()];
    all.into_iter().flatten().collect()
}

#[test]
fn a_router_does_as_the_kernel_does() {
    let cases = cases();
    let mut bench = Bench::new();
    let started = Instant::now();
    let wanted = std::env::var("PDP_CASES").unwrap_or_default();
    let mut wrong = String::new();
    let mut count = 0;
    for case in cases.iter().filter(|case| case.name.contains(&wanted)) {
        if let Some(text) = bench.judge(case) {
            wrong += &format!("{}\n{text}", case.name);
        }
        count += 1;
    }
    println!("{count} cases in {:.1} s", started.elapsed().as_secs_f64());
    assert!(wrong.is_empty(), "not as expected:\n{wrong}");
}
