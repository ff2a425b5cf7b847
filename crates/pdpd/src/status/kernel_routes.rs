//! Routes of a node without a route mirror, since its own kernel has
//! all of them: a host, or a router that its kernel forwards for.
//!
//! They are read as a mirror reads them ([`Listing`]), by a thread of the request in the
//! node's network namespace, and passed on as they arrive. The node controls their number.
//! So [`KEPT_MAX`] limits the memory for reading them, and [`TIME_MAX`] limits the time.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use pdp_api::{Problem, ProblemKind};
use pdp_container::Process;
use pdp_mirror::listing::{Listing, is_within};
use pdp_net::netns;
use pdp_proto::routes::ResolvedRoute;

use crate::host::network_namespace;
use crate::util::error_chain;

/// Interfaces, nexthop objects, local routes and the like that are kept
/// while routes are read; some hundred bytes each.
const KEPT_MAX: usize = 16_384;

/// Longest time for all routes, including their reader. The node's
/// network namespace does not end before.
const TIME_MAX: Duration = Duration::from_secs(300);

/// Passes the routes of a guest to `row`, which returns whether it wants
/// more. Only routes that cover `within` or are inside of it are passed.
/// Next hops are named by the index of their interface in `ports`.
///
/// # Errors
/// The guest is gone, or its routes can't be read. The routes passed so far are incomplete then.
pub fn list(
    guest: Process,
    ports: Vec<String>,
    within: Option<IpNet>,
    mut row: impl FnMut(IpNet, ResolvedRoute) -> bool + Send,
) -> Result<(), Problem> {
    let unavailable = |text: String| Problem::new(ProblemKind::Unavailable, text);
    let netns = network_namespace(guest).map_err(|error| unavailable(error_chain(&error)))?;
    let over = Instant::now() + TIME_MAX;
    let list = || {
        let mut listing = Listing::new(ports, KEPT_MAX);
        while let Some(routes) = listing.part().map_err(unavailable)? {
            let mut routes =
                routes.into_iter().filter(|(prefix, _)| is_within(within.as_ref(), prefix));
            if !routes.all(|(prefix, target)| row(prefix, target)) {
                return Ok(());
            }
            if Instant::now() > over {
                let text = format!("not all routes were read within {} s", TIME_MAX.as_secs());
                return Err(Problem::new(ProblemKind::TimedOut, text).hint("ask for fewer"));
            }
        }
        Ok(())
    };
    netns::within(netns.as_fd(), || Ok(list())).map_err(|error| unavailable(error_chain(&error)))?
}
