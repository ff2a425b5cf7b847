//! `pdp-mirror --config FILE`: see the library.

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use pdp_mirror::control::MirrorControl;
use pdp_mirror::follower::KernelFollower;
use pdp_mirror::guests::Guests;
use pdp_mirror::hooks::Hooks;
use pdp_mirror::process;
use pdp_mirror::table::MirrorTable;
use pdp_proto::mirror::MirrorConfig;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::LinkNameSpaceType;

/// Longest sleep, for work that depends on time.
const SLEEP_MAX: Duration = Duration::from_secs(1);

/// Environment variable for the bytes that may wait for a guest, for tests of slow guests.
const BACKLOG_BYTES_VARIABLE: &str = "PDP_MIRROR_BACKLOG_BYTES";

fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(std::io::stderr)
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into()),
        )
        .init();
    let path = match std::env::args_os().skip(1).collect::<Vec<_>>().as_slice() {
        [flag, path] if flag == "--config" => PathBuf::from(path),
        _ => bail!("usage: pdp-mirror --config FILE"),
    };
    let text = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let config: MirrorConfig = serde_json::from_slice(&text)
        .with_context(|| format!("{} is not a mirror's configuration", path.display()))?;

    // Everything that needs the host happens before entering the namespaces.
    let guests = process::listen(&config.routes_socket, 0o666)?;
    let control = process::listen(&config.control_socket, 0o600)?;
    let netns = process::open(&config.netns)?;
    let userns = config.userns.as_deref().map(|path| (path, process::open(path)));
    process::enter(&config.netns, &netns, LinkNameSpaceType::Network)?;
    let table = MirrorTable::new(config.vports.clone(), config.routes_max, rand::random());
    let receive_bytes = usize::try_from(config.receive_bytes).unwrap_or(usize::MAX);
    let follower = KernelFollower::new(table, receive_bytes).context("cannot follow the kernel")?;
    let hooks =
        Hooks::new(config.vports.clone(), config.hooks).context("cannot watch the kernel")?;
    if let Some((path, file)) = userns {
        process::enter(path, &file?, LinkNameSpaceType::User)?;
        process::become_its_root()?;
    }
    process::drop_privileges()?;
    drop(netns);
    let guests = Guests::new(guests, setting(BACKLOG_BYTES_VARIABLE))?;
    run(follower, hooks, guests, MirrorControl::new(control, config)?)
}

fn setting(variable: &str) -> Option<usize> {
    std::env::var(variable).ok()?.parse().ok()
}

fn run(
    mut follower: KernelFollower,
    mut hooks: Hooks,
    mut guests: Guests,
    mut control: MirrorControl,
) -> anyhow::Result<()> {
    loop {
        let busy = guests.is_busy() || control.is_busy();
        let now = Instant::now();
        let due = [follower.due(), guests.due(), Some(hooks.due())].into_iter().flatten().min();
        let mut sleep = due.map_or(SLEEP_MAX, |due| due.saturating_duration_since(now));
        if control.is_waiting() {
            sleep = sleep.min(Duration::from_millis(20));
        }
        sleep = if busy { Duration::ZERO } else { sleep.min(SLEEP_MAX) };
        wait(&follower, &hooks, &guests, &control, sleep)?;
        let read = follower.step().context("cannot read from the kernel")?;
        hooks.step(&mut follower.table);
        guests.broadcast(&mut follower.table, read.unwrap_or_else(Instant::now));
        guests.accept();
        let answers = guests.step(&mut follower);
        control.accept();
        control.step(&mut follower, &hooks, &mut guests, answers);
    }
}

fn wait(
    follower: &KernelFollower,
    hooks: &Hooks,
    guests: &Guests,
    control: &MirrorControl,
    sleep: Duration,
) -> anyhow::Result<()> {
    let listens = if follower.listens() { PollFlags::IN } else { PollFlags::empty() };
    let mut polled = vec![
        PollFd::new(follower, listens),
        PollFd::new(guests.listener(), PollFlags::IN),
        PollFd::new(control.listener(), PollFlags::IN),
    ];
    polled.extend(hooks.sockets().map(|socket| PollFd::new(socket, PollFlags::IN)));
    polled.extend(guests.streams().chain(control.streams()).map(|(stream, writes)| {
        let flags = if writes { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        PollFd::new(stream, flags)
    }));
    let sleep = Timespec::try_from(sleep)?;
    match poll(&mut polled, Some(&sleep)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error).context("cannot wait for events"),
    }
}
