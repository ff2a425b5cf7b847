//! Finds the status of what something happened to, and puts it on the board.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pdp_api::{Detail, WATCH_EVERY_MS_DEFAULT, WatchQuery};
use pdp_proto::mux;

use super::log::Filter;
use super::{Board, From, Reader, sampler};
use crate::access::Scope;
use crate::ask::Answer;
use crate::engine::Engine;
use crate::host::words;
use crate::reconcile::lock;
use crate::view;

/// Bounds of the pause after statuses were found, for four times as long as that took: what happens meanwhile is
/// found together.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Starts the threads that keep the board of a node.
pub fn start(engine: &Arc<Engine>) -> std::io::Result<()> {
    for (name, work) in [
        ("teller", run as fn(&Engine)),
        ("sampler", sampler::run),
        ("ask-mirrors", sampler::ask_mirrors),
    ] {
        let engine = engine.clone();
        std::thread::Builder::new().name(name.into()).spawn(move || {
            loop {
                let work = std::panic::AssertUnwindSafe(|| work(&engine));
                if std::panic::catch_unwind(work).is_err() {
                    tracing::error!("the thread {name} panicked, and begins anew");
                    std::thread::sleep(PAUSE_MAX);
                }
            }
        })?;
    }
    Ok(())
}

/// Works for as long as the daemon does.
fn run(engine: &Engine) {
    let board = engine.board();
    loop {
        let touched = {
            let none = |touched: &mut super::Touched| touched.vnets.is_empty() && !touched.node;
            let touched = board.touch.wait_while(lock(&board.touched), none);
            std::mem::take(&mut *touched.unwrap_or_else(std::sync::PoisonError::into_inner))
        };
        let began = Instant::now();
        touched.vnets.iter().for_each(|vnet| tell(engine, vnet));
        if touched.node {
            board.tell_node(view::node_itself(engine));
        }
        std::thread::sleep((4 * began.elapsed()).clamp(PAUSE_MIN, PAUSE_MAX));
    }
}

/// Finds how a vnet is now, and puts it on the board.
fn tell(engine: &Engine, vnet: &str) {
    let board = engine.board();
    // What is found later is put there later.
    let _turn = lock(&board.telling);
    let (mux, said) = {
        let seen = lock(&board.seen);
        (seen.mux.get(vnet).cloned(), seen.mirrors.get(vnet).cloned().unwrap_or_default())
    };
    let status = view::status(engine, vnet, mux.map(Arc::unwrap_or_clone), |path| {
        Some(said.get(path)?.1.clone())
    });
    if status.is_none() {
        let mut seen = lock(&board.seen);
        seen.mux.remove(vnet);
        seen.mirrors.remove(vnet);
    }
    board.tell(vnet, status, engine.keeper.knows(vnet));
}

/// Begins to read: what a reader gets first is of this moment.
pub fn open(engine: &Engine, scope: &Scope, query: WatchQuery) -> Reader {
    let from = From::of(&query);
    let WatchQuery { vnet, every_ms, detail, .. } = query;
    let board: &Arc<Board> = engine.board();
    if detail != Detail::None {
        look(engine, vnet.as_deref());
    }
    let every = Duration::from_millis(every_ms.unwrap_or(WATCH_EVERY_MS_DEFAULT));
    let filter = Filter { scope: scope.clone(), vnet };
    Reader::new(board, filter, every, detail, &from)
}

/// Looks for what nobody tells the daemon, of one vnet or of all; mirrors are asked of one alone.
fn look(engine: &Engine, vnet: Option<&str>) {
    let board = engine.board();
    let stats = match engine.host.stats(vnet, &engine.model().plan) {
        Ok(stats) => Some(stats),
        Err(error) if error.is_late() => None,
        Err(error) => {
            tracing::debug!("counters for a watch: {}", words(&error));
            Some(mux::Stats::default())
        }
    };
    let mut changed = Vec::new();
    if let Some(stats) = stats {
        let vnets = sampler::shared(stats.vnets);
        changed = lock(&board.seen).absorb(&vnets, vnet);
    }
    if let Some(name) = vnet {
        let model = engine.model();
        let plan = model.plan.vnets.get_key_value(name).map(|(name, plan)| (name, &**plan));
        for (path, answer) in view::ask_mirrors(engine, &model, plan.into_iter()) {
            if !matches!(answer, Answer::None) {
                sampler::keep(engine, name, path, answer);
            }
        }
        changed = vec![name.to_owned()];
    }
    changed.iter().for_each(|vnet| tell(engine, vnet));
}
