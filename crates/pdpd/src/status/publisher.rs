//! Determines the status of objects that were touched, and publishes it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pdp_api::{Detail, WATCH_EVERY_MS_DEFAULT, WatchQuery};
use pdp_model::Stats;

use crate::access::AccessScope;
use crate::engine::DaemonCore;
use crate::events::log::EventFilter;
use crate::events::{StaleStatuses, WatchHub, WatchReader, WatchStart};
use crate::host::query::HelperReply;
use crate::status::{sampler, view};
use crate::util::{error_chain, lock};

/// Range of the pause after statuses were determined, which is four times as
/// long as that took. Everything that happens meanwhile is handled together.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Starts the threads that update the hub of a node.
pub fn start(engine: &Arc<DaemonCore>) -> std::io::Result<()> {
    for (name, work) in [
        ("publisher", run as fn(&DaemonCore)),
        ("sampler", sampler::run),
        ("ask-mirrors", sampler::ask_mirrors),
    ] {
        let engine = engine.clone();
        std::thread::Builder::new().name(name.into()).spawn(move || {
            loop {
                let work = std::panic::AssertUnwindSafe(|| work(&engine));
                if std::panic::catch_unwind(work).is_err() {
                    tracing::error!("thread {name} panicked; restarting it");
                    std::thread::sleep(PAUSE_MAX);
                }
            }
        })?;
    }
    Ok(())
}

/// Runs as long as the daemon.
fn run(engine: &DaemonCore) {
    let hub = engine.watch_hub();
    loop {
        let touched = {
            let none = |touched: &mut StaleStatuses| touched.vnets.is_empty() && !touched.node;
            let touched = hub.touch.wait_while(lock(&hub.touched), none);
            std::mem::take(&mut *touched.unwrap_or_else(std::sync::PoisonError::into_inner))
        };
        let began = Instant::now();
        touched.vnets.iter().for_each(|vnet| publish_status(engine, vnet));
        if touched.node {
            hub.publish_node(view::node_itself(engine));
        }
        std::thread::sleep((4 * began.elapsed()).clamp(PAUSE_MIN, PAUSE_MAX));
    }
}

/// Determines the current status of a vnet, and publishes it.
fn publish_status(engine: &DaemonCore, vnet: &str) {
    let hub = engine.watch_hub();
    // A status that is determined later is published later.
    let _guard = lock(&hub.publishing);
    let (mux, replies) = {
        let seen = lock(&hub.latest_stats);
        (seen.mux.get(vnet).cloned(), seen.mirrors.get(vnet).cloned().unwrap_or_default())
    };
    let status = view::status(engine, vnet, mux.map(Arc::unwrap_or_clone), |path| {
        Some(replies.get(path)?.1.clone())
    });
    if status.is_none() {
        let mut seen = lock(&hub.latest_stats);
        seen.mux.remove(vnet);
        seen.mirrors.remove(vnet);
    }
    hub.publish_vnet(vnet, status, engine.reconcile_loop.may_exist(vnet));
}

/// Creates a reader whose first lines show the state at this moment.
pub fn open(engine: &DaemonCore, scope: &AccessScope, query: WatchQuery) -> WatchReader {
    let from = WatchStart::of(&query);
    let WatchQuery { vnet, every_ms, detail, .. } = query;
    let hub: &Arc<WatchHub> = engine.watch_hub();
    if detail != Detail::None {
        refresh_facts(engine, vnet.as_deref());
    }
    let every = Duration::from_millis(every_ms.unwrap_or(WATCH_EVERY_MS_DEFAULT));
    let filter = EventFilter { scope: scope.clone(), vnet };
    WatchReader::new(hub, filter, every, detail, &from)
}

/// Collects facts that are not reported to the daemon, of one vnet or
/// of all. Mirrors are asked only for a single vnet.
fn refresh_facts(engine: &DaemonCore, vnet: Option<&str>) {
    let hub = engine.watch_hub();
    let stats = match engine.host.stats(vnet, &engine.model().plan) {
        Ok(stats) => Some(stats),
        Err(error) if error.is_timeout() => None,
        Err(error) => {
            tracing::debug!("counters for a watch: {}", error_chain(&error));
            Some(Stats::default())
        }
    };
    let mut changed = Vec::new();
    if let Some(stats) = stats {
        let vnets = sampler::shared(stats.vnets);
        changed = lock(&hub.latest_stats).absorb(&vnets, vnet);
    }
    if let Some(name) = vnet {
        let model = engine.model();
        let plan = model.plan.vnets.get_key_value(name).map(|(name, plan)| (name, &**plan));
        for (path, answer) in view::ask_mirrors(engine, &model, plan.into_iter()) {
            if !matches!(answer, HelperReply::None) {
                sampler::store_reply(engine, name, path, answer);
            }
        }
        changed = vec![name.to_owned()];
    }
    changed.iter().for_each(|vnet| publish_status(engine, vnet));
}
