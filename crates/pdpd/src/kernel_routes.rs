//! Routes of a node that has no route mirror, since its own kernel has all of them: a router that it forwards for, or a
//! host.
//!
//! They are read as a mirror reads them ([`Listing`]), by a thread of the request in the node's network namespace, and
//! passed on as they come. What the node can make many is bounded: what is kept to read them, by [`KEPT_MAX`], and how
//! long that takes, by [`TIME_MAX`].

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use pdp_api::{Problem, ProblemKind};
use pdp_container::Process;
use pdp_mirror::listing::{Listing, is_within};
use pdp_net::netns;
use pdp_proto::routes::Resolved;

use crate::host::{network_namespace, words};

/// Interfaces, nexthop objects, local routes and the like that are kept while routes are read, some hundred bytes each.
const KEPT_MAX: usize = 16_384;

/// Time for all of them, with what their reader takes: the node's network namespace does not end before.
const TIME_MAX: Duration = Duration::from_secs(300);

/// Hands the routes of a guest to `row`, which says whether it wants more; only those that cover `within` or are inside
/// it. Hops are told by the index of their interface in `ports`.
///
/// # Errors
/// The guest is gone, or its routes can't be read: those that were passed on are not all.
pub fn list(
    guest: Process,
    ports: Vec<String>,
    within: Option<IpNet>,
    mut row: impl FnMut(IpNet, Resolved) -> bool + Send,
) -> Result<(), Problem> {
    let unavailable = |text: String| Problem::new(ProblemKind::Unavailable, text);
    let netns = network_namespace(guest).map_err(|error| unavailable(words(&error)))?;
    let over = Instant::now() + TIME_MAX;
    let list = || {
        let mut listing = Listing::new(ports, KEPT_MAX);
        while let Some(routes) = listing.part().map_err(unavailable)? {
            let mut wanted =
                routes.into_iter().filter(|(prefix, _)| is_within(within.as_ref(), prefix));
            if !wanted.all(|(prefix, target)| row(prefix, target)) {
                return Ok(());
            }
            if Instant::now() > over {
                let text = format!("not all routes were read within {} s", TIME_MAX.as_secs());
                return Err(Problem::new(ProblemKind::TimedOut, text).hint("ask for fewer"));
            }
        }
        Ok(())
    };
    netns::within(netns.as_fd(), || Ok(list())).map_err(|error| unavailable(words(&error)))?
}
