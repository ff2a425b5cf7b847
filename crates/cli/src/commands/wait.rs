//! Waits until conditions are met. Lists the unmet ones if the time is over.
//!
//! [`ChangeWatcher`] decides when to check which vnets again, with the help of a watch.

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use pdp_api::client::{Client, Error};
use pdp_api::exec::{ExecFrame, ExecRequest};
use pdp_api::{
    Detail, EventKind, GuestProcess, NodeStatus, Phase, ProblemKind, Progress, Stats, StatsQuery,
    Vnet, WATCH_EVERY_MS, WATCH_EVERY_MS_DEFAULT, WatchLine, WatchQuery,
};
use pdp_spec::units::Span;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use crate::daemon::follow::{BackgroundWatch, WatchFollower, WatchUpdate};
use crate::daemon::node_command::until_end;
use crate::failure::CliFailure;
use crate::output::ProgressDisplay;

/// Bounds of the pause between two checks of states without events. The pause is a quarter of the
/// time waited so far.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// Pause between two checks of states with events. An event may be older than the last check.
const COVERED_PAUSE: Duration = Duration::from_secs(2);

/// Interval at which the daemon samples one watched vnet, milliseconds: its guests, and the state
/// of its commands. A watch of several vnets samples all others too.
const EVERY_MS: u64 = *WATCH_EVERY_MS.start();
const EVERY_MS_OF_SEVERAL: u64 = WATCH_EVERY_MS_DEFAULT;

/// Longest wait for the first line of the watch.
const BEGIN_TIME_MAX: Duration = Duration::from_secs(5);

/// Bytes kept of a command's output.
const WORDS_BYTES_MAX: usize = 200;

/// Wait until virtual networks, or nodes of them, meet conditions.
///
/// Exit code 0: all conditions are met. Exit code 1: they are not met in time; the unmet ones are
/// listed.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example: pdp wait ospf --for ready\n         pdp wait ospf/r1 --for routes-synced --timeout 30s\n         \
                  pdp wait ospf --for ready --for 'exec h1 ping -c1 10.2.0.2'\n         \
                  pdp delete red & pdp wait red --for gone"
)]
pub struct WaitArgs {
    /// Virtual networks, or nodes of them: VNET or VNET/NODE.
    #[arg(value_name = "VNET[/NODE]", required = true)]
    pub names: Vec<WaitTarget>,
    /// Condition to wait for; repeat it to require several: running (as the spec says), ready (its
    /// commands are ready too), connected (all forwarding guests are connected), routes-synced
    /// (guests have the kernel's routes too), gone, or `exec NODE COMMAND...` (`exec COMMAND...`
    /// for a VNET/NODE), which must return 0.
    #[arg(long = "for", value_name = "CONDITION", default_value = "ready")]
    pub conditions: Vec<WaitCondition>,
    /// Longest wait, seconds or with a unit: 60, 90s, 5m.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time)]
    pub timeout: Duration,
}

/// Waiting of `up` and `apply`.
#[derive(Debug, clap::Args)]
pub struct ReadyWaitArgs {
    /// Wait until everything is ready, at most for TIME [default: 60s]. If not, list what is
    /// missing and return 1.
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true,
        default_missing_value = "60s", value_parser = time)]
    pub wait: Option<Duration>,
}

/// Parses seconds, or a time with a unit as in specs.
fn time(text: &str) -> Result<Duration, String> {
    let seconds = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let with_unit = if seconds { format!("{text}s") } else { text.to_owned() };
    let span: Span =
        with_unit.parse().map_err(|error: pdp_spec::units::BadValue| error.to_string())?;
    Ok(Duration::from_nanos(span.0))
}

/// A virtual network, or a node of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitTarget {
    vnet: String,
    node: Option<String>,
}

impl FromStr for WaitTarget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (vnet, node) = match text.split_once('/') {
            Some((vnet, node)) => (vnet, Some(node)),
            None => (text, None),
        };
        if vnet.is_empty() || node.is_some_and(|node| node.is_empty() || node.contains('/')) {
            return Err("use VNET or VNET/NODE, for example red or red/r1".into());
        }
        Ok(Self { vnet: vnet.into(), node: node.map(Into::into) })
    }
}

/// A condition to wait for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitCondition {
    Running,
    Ready,
    Connected,
    RoutesSynced,
    Gone,
    /// A command returns 0.
    Exec(Vec<String>),
}

impl FromStr for WaitCondition {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "running" => return Ok(Self::Running),
            "ready" => return Ok(Self::Ready),
            "connected" => return Ok(Self::Connected),
            "routes-synced" => return Ok(Self::RoutesSynced),
            "gone" => return Ok(Self::Gone),
            _ => {}
        }
        let mut words = pdp_spec::Command::Line(text.into()).words();
        if words.len() > 1 && words[0] == "exec" {
            return Ok(Self::Exec(words.split_off(1)));
        }
        Err("use running, ready, connected, routes-synced, gone or 'exec NODE COMMAND...'".into())
    }
}

pub async fn wait(client: &Client, args: WaitArgs) -> Result<ExitCode, CliFailure> {
    for (target, condition) in pairs(&args.names, &args.conditions) {
        if matches!(condition, WaitCondition::Exec(words) if target.node.is_none() && words.len() < 2)
        {
            return Err(CliFailure::Usage("exec NODE COMMAND... names no command".into()));
        }
    }
    until(client, &args.names, &args.conditions, args.timeout).await?;
    Ok(ExitCode::SUCCESS)
}

/// Waits until these virtual networks are ready.
pub async fn until_ready(
    client: &Client,
    vnets: Vec<String>,
    time: Duration,
) -> Result<(), CliFailure> {
    let targets: Vec<_> = vnets.into_iter().map(|vnet| WaitTarget { vnet, node: None }).collect();
    until(client, &targets, &[WaitCondition::Ready], time).await
}

fn pairs<'a>(
    targets: &'a [WaitTarget],
    conditions: &'a [WaitCondition],
) -> impl Iterator<Item = (&'a WaitTarget, &'a WaitCondition)> {
    targets.iter().flat_map(move |target| conditions.iter().map(move |it| (target, it)))
}

async fn until(
    client: &Client,
    targets: &[WaitTarget],
    conditions: &[WaitCondition],
    time: Duration,
) -> Result<(), CliFailure> {
    let deadline = Instant::now() + time;
    let mut shown = ProgressDisplay::new();
    let mut changes =
        match timeout_at(deadline, ChangeWatcher::begin(client, targets, conditions)).await {
            Ok(changes) => changes?,
            Err(_) => ChangeWatcher::without(targets),
        };
    // Unmet conditions, by vnet, from the last check of each.
    let mut missing = BTreeMap::new();
    loop {
        let all = changes.dirty.len() == changes.vnets.len();
        let check = check_vnets(client, targets, conditions, &mut changes, &mut missing);
        let checked = timeout_at(deadline, check).await;
        let mut list: Vec<String> = missing.values().flatten().cloned().collect();
        let whole = match checked {
            Ok(Ok(())) => true,
            // The daemon may be restarting while guests continue.
            Ok(Err(CliFailure::Api(Error::NoDaemon { place, .. }))) if !missing.is_empty() => {
                list = vec![format!("no daemon answers at {place}")];
                false
            }
            Ok(Err(other)) => return Err(other),
            // An interrupted check is less informative than the one before.
            Err(_) => {
                if list.is_empty() {
                    list.push("the check took longer".to_owned());
                }
                false
            }
        };
        let Some(first) = list.first() else {
            if all {
                return Ok(());
            }
            // Each vnet met its conditions at some time. Check that all do now.
            changes.mark_all_dirty();
            continue;
        };
        let total = u64::try_from(list.len()).unwrap_or(u64::MAX);
        shown.step(Progress { done: 0, total, what: format!("waiting: {first}") });
        let open = missing.iter().filter(|(_, missing)| !missing.is_empty());
        let open = open.map(|(name, _)| name.clone()).collect();
        let again = async {
            match whole {
                true => changes.next(open).await,
                false => sleep(changes.pause()).await,
            }
        };
        tokio::select! {
            biased;
            () = sleep_until(deadline) => {
                drop(shown);
                let names: Vec<_> = targets.iter().map(WaitTarget::name).collect();
                let list: String = list.iter().map(|it| format!("\n  {it}")).collect();
                let names = names.join(", ");
                return Err(CliFailure::Other(format!("{names}: not within {time:?}; missing:{list}")));
            }
            () = again => {}
        }
    }
}

/// Tracks which vnets may have changed and need a check.
struct ChangeWatcher {
    /// All vnets to wait for.
    vnets: BTreeSet<String>,
    /// Vnets to check.
    dirty: BTreeSet<String>,
    /// `None`: the daemon has no free watch, or refuses one. Then vnets are checked periodically.
    watch: Option<BackgroundWatch>,
    /// True while the daemon answers the watch.
    live: bool,
    /// True if events cover all conditions.
    covered: bool,
    /// Vnets that exist, wanted or being deleted, according to the watch.
    existing: Option<BTreeSet<String>>,
    since: Instant,
}

impl ChangeWatcher {
    /// Returns a tracker without a watch.
    fn without(targets: &[WaitTarget]) -> Self {
        let vnets: BTreeSet<String> = targets.iter().map(|target| target.vnet.clone()).collect();
        Self {
            dirty: vnets.clone(),
            vnets,
            watch: None,
            live: false,
            covered: false,
            existing: None,
            since: Instant::now(),
        }
    }

    /// Returns a tracker with a watch, and with the watch's first line if that is needed.
    ///
    /// # Errors
    /// No daemon answers.
    async fn begin(
        client: &Client,
        targets: &[WaitTarget],
        conditions: &[WaitCondition],
    ) -> Result<Self, CliFailure> {
        let mut this = Self::without(targets);
        let one = this.vnets.first().filter(|_| this.vnets.len() == 1).cloned();
        let every_ms = if one.is_some() { EVERY_MS } else { EVERY_MS_OF_SEVERAL };
        // Only running a command shows its result. Mirrors are sampled less often than routes
        // change.
        let uncovered =
            |it: &WaitCondition| matches!(it, WaitCondition::Exec(_) | WaitCondition::RoutesSynced);
        this.covered = one.is_some() && !conditions.iter().any(uncovered);
        let query = WatchQuery { vnet: one, every_ms: Some(every_ms), ..WatchQuery::default() };
        match WatchFollower::begin(client, query).await {
            Ok(following) => this.watch = Some(following.spawn()),
            // Refused: the vnet belongs to another tenant, or there are too many watches.
            Err(Error::Problem(_)) => return Ok(this),
            Err(error) => return Err(error.into()),
        }
        this.live = true;
        if conditions.contains(&WaitCondition::Gone) {
            let _ = timeout(BEGIN_TIME_MAX, this.first()).await;
        }
        Ok(this)
    }

    /// Waits until the watch has reported which vnets exist.
    async fn first(&mut self) {
        while let Some(watch) = &mut self.watch
            && self.existing.is_none()
        {
            let update = watch.next().await;
            self.take(update);
        }
    }

    fn mark_all_dirty(&mut self) {
        self.dirty.clone_from(&self.vnets);
    }

    fn pause(&self) -> Duration {
        (self.since.elapsed() / 4).clamp(PAUSE_MIN, PAUSE_MAX)
    }

    /// Waits until there are vnets to check: those with events, or all `open` ones after a pause.
    async fn next(&mut self, open: BTreeSet<String>) {
        let end =
            Instant::now() + if self.covered && self.live { COVERED_PAUSE } else { self.pause() };
        while self.dirty.is_empty() {
            let Some(watch) = &mut self.watch else {
                sleep_until(end).await;
                break;
            };
            match timeout_at(end, watch.next()).await {
                Ok(update) => self.take(update),
                Err(_) => break,
            }
        }
        // Many simultaneous events lead to one check.
        while let Some(update) = self.watch.as_mut().and_then(BackgroundWatch::next_now) {
            self.take(Some(update));
        }
        if self.dirty.is_empty() {
            self.dirty = open;
        }
    }

    fn take(&mut self, update: Option<Result<WatchUpdate, Error>>) {
        match update {
            Some(Ok(WatchUpdate::Line(WatchLine::Snapshot(now)))) => {
                let names = now.vnets.into_iter().map(|vnet| vnet.name);
                self.existing = Some(names.chain(now.removing).collect());
                self.mark_all_dirty();
            }
            Some(Ok(WatchUpdate::Line(WatchLine::Event(event)))) => {
                let Some(vnet) = event.vnet().filter(|vnet| self.vnets.contains(*vnet)) else {
                    return;
                };
                if let Some(existing) = &mut self.existing
                    && event.object.len() == "vnet/".len() + vnet.len()
                {
                    match event.what {
                        EventKind::Created => drop(existing.insert(vnet.to_owned())),
                        EventKind::Gone => drop(existing.remove(vnet)),
                        _ => {}
                    }
                }
                self.dirty.insert(vnet.to_owned());
            }
            Some(Ok(WatchUpdate::Line(_))) => {}
            Some(Ok(WatchUpdate::Gone(_))) => self.live = false,
            Some(Ok(WatchUpdate::Back)) => {
                self.live = true;
                self.mark_all_dirty();
            }
            // The next check tells why.
            Some(Err(_)) | None => {
                (self.watch, self.live) = (None, false);
                self.mark_all_dirty();
            }
        }
    }
}

/// Checks vnets that may have changed, and stores their unmet conditions.
async fn check_vnets(
    client: &Client,
    targets: &[WaitTarget],
    conditions: &[WaitCondition],
    changes: &mut ChangeWatcher,
    missing: &mut BTreeMap<String, Vec<String>>,
) -> Result<(), CliFailure> {
    while let Some(vnet) = changes.dirty.first().cloned() {
        let its: Vec<&WaitTarget> = targets.iter().filter(|target| target.vnet == vnet).collect();
        let is =
            missing_of_vnet(client, &vnet, &its, conditions, changes.existing.as_ref()).await?;
        missing.insert(vnet.clone(), is);
        changes.dirty.remove(&vnet);
    }
    Ok(())
}

/// Lists the unmet conditions of a vnet and its nodes.
async fn missing_of_vnet(
    client: &Client,
    name: &str,
    targets: &[&WaitTarget],
    conditions: &[WaitCondition],
    existing: Option<&BTreeSet<String>>,
) -> Result<Vec<String>, CliFailure> {
    let vnet = match client.vnet(name).await {
        Ok(vnet) => Some(vnet),
        Err(Error::Problem(problem)) if problem.kind == ProblemKind::NotFound => None,
        Err(error) => return Err(error.into()),
    };
    let mut all = Vec::new();
    for condition in conditions {
        match condition {
            WaitCondition::Exec(_) => {}
            WaitCondition::Gone if vnet.is_none() => {
                let removing = match existing {
                    Some(existing) => existing.contains(name),
                    None => is_removing(client, name).await?,
                };
                all.extend(removing.then(|| format!("{name} is being removed")));
            }
            condition => {
                let targets = targets.iter();
                all.extend(targets.flat_map(|target| missing(target, condition, vnet.as_ref())));
            }
        }
    }
    if conditions.contains(&WaitCondition::RoutesSynced) && vnet.is_some() {
        let stats = client.stats(&StatsQuery { vnet: Some(name.to_owned()) }).await?;
        all.extend(targets.iter().flat_map(|target| behind(target, &stats)));
    }
    for target in targets {
        for condition in conditions {
            let WaitCondition::Exec(words) = condition else { continue };
            // A command would fail while other conditions are unmet.
            if !all.is_empty() {
                break;
            }
            let why = run(client, target, words).await;
            all.extend(why.map(|why| format!("{}: `{}`: {why}", target.name(), words.join(" "))));
        }
    }
    Ok(all)
}

/// True if a deleted virtual network is not gone yet.
async fn is_removing(client: &Client, vnet: &str) -> Result<bool, CliFailure> {
    let query =
        WatchQuery { vnet: Some(vnet.into()), detail: Detail::None, ..WatchQuery::default() };
    let first = client.watch(&query).await?.next().await?;
    Ok(matches!(first, Some(WatchLine::Snapshot(it)) if it.removing.iter().any(|it| it == vnet)))
}

/// Runs a command in a node. Returns why it did not return 0; `None` if it did.
async fn run(client: &Client, target: &WaitTarget, words: &[String]) -> Option<String> {
    let (node, words) = match &target.node {
        Some(node) => (node, words),
        None => words.split_first()?,
    };
    let request = ExecRequest {
        command: words.to_vec(),
        process: GuestProcess::Control,
        ..ExecRequest::default()
    };
    let mut output = Vec::new();
    let ended = async {
        let mut connection = client.exec(&target.vnet, node, &request).await?;
        let take = |frame| {
            if let ExecFrame::Stdout(bytes) | ExecFrame::Stderr(bytes) = frame {
                output.extend_from_slice(&bytes);
                let more = output.len().saturating_sub(WORDS_BYTES_MAX);
                output.drain(..more);
            }
            Ok(())
        };
        until_end(&mut connection, take).await
    };
    let ended: Result<i32, CliFailure> = ended.await;
    let output = String::from_utf8_lossy(&output).into_owned();
    let last = output.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
    let last: String = last.chars().filter(|letter| !letter.is_control()).collect();
    match ended {
        Ok(0) => None,
        Ok(code) if last.is_empty() => Some(format!("code {code}")),
        Ok(code) => Some(format!("code {code}: {last}")),
        Err(error) => Some(error.to_string()),
    }
}

impl WaitTarget {
    fn name(&self) -> String {
        match &self.node {
            Some(node) => format!("{}/{node}", self.vnet),
            None => self.vnet.clone(),
        }
    }
}

/// Lists what is missing for a condition.
fn missing(target: &WaitTarget, condition: &WaitCondition, vnet: Option<&Vnet>) -> Vec<String> {
    let Some(vnet) = vnet else {
        return match condition {
            WaitCondition::Gone => Vec::new(),
            _ => vec![format!("{}: no such virtual network", target.vnet)],
        };
    };
    let selected = |node: &&NodeStatus| target.node.as_ref().is_none_or(|name| *name == node.name);
    let nodes: Vec<&NodeStatus> = vnet.status.nodes.iter().filter(selected).collect();
    if *condition == WaitCondition::Gone {
        let is_there = target.node.is_none() || !nodes.is_empty();
        return is_there.then(|| format!("{} still exists", target.name())).into_iter().collect();
    }
    if target.node.is_some() && nodes.is_empty() {
        return vec![format!("{}: no such node", target.name())];
    }
    let named = |what: String| format!("{}/{what}", vnet.name);
    let mut all: Vec<String> =
        nodes.iter().flat_map(|node| missing_of(node, condition)).map(named).collect();
    let whole = target.node.is_none() && all.is_empty();
    let holds = match condition {
        WaitCondition::Running => vnet.status.phase == Phase::Running,
        WaitCondition::Ready => vnet.status.ready,
        _ => true,
    };
    if whole && !holds {
        all.push(format!("{}: {}", vnet.name, state(vnet.status.phase, &vnet.status.message)));
    }
    all
}

/// Lists forwarding guests without the kernel's routes.
fn behind(target: &WaitTarget, stats: &Stats) -> Vec<String> {
    let nodes = stats.vnets.get(&target.vnet).into_iter().flat_map(|vnet| &vnet.nodes);
    let nodes = nodes.filter(|(name, _)| target.node.as_ref().is_none_or(|node| node == *name));
    let guests = nodes.flat_map(|(name, node)| {
        let guests = node.routes.iter().flat_map(|routes| &routes.guests);
        guests.filter(|guest| !guest.synced).map(move |guest| (name, guest.guest))
    });
    let words = guests.map(|(node, guest)| {
        format!("{}/{node} g{guest}: does not have the kernel's routes yet", target.vnet)
    });
    words.collect()
}

/// Lists what is missing for a condition at a node.
fn missing_of(node: &NodeStatus, condition: &WaitCondition) -> Vec<String> {
    let running = || {
        let wrong = node.phase != Phase::Running;
        wrong.then(|| format!("{}: {}", node.name, state(node.phase, &node.message)))
    };
    let disconnected = || {
        let open = node.guests.iter().filter(|guest| !guest.connected);
        let words = open.map(|guest| format!("{} g{}: not connected", node.name, guest.number));
        words.collect::<Vec<_>>()
    };
    match condition {
        WaitCondition::Running => running().into_iter().collect(),
        // For routes, the mirror reports the rest.
        WaitCondition::Connected | WaitCondition::RoutesSynced => disconnected(),
        WaitCondition::Ready => {
            if node.ready {
                return Vec::new();
            }
            let open = node.commands.iter().filter(|command| !command.ready);
            let commands = open.map(|command| {
                let state = command.state.name();
                let why = command.message.as_ref().map(|why| format!(" ({why})"));
                format!("{} {}: {state}{}", node.name, command.name, why.unwrap_or_default())
            });
            let mut all: Vec<String> = commands.chain(disconnected()).collect();
            if all.is_empty() {
                all.extend(running());
            }
            if all.is_empty() {
                all.push(format!("{}: not ready", node.name));
            }
            all
        }
        WaitCondition::Gone | WaitCondition::Exec(_) => Vec::new(),
    }
}

fn state(phase: Phase, message: &Option<String>) -> String {
    let why = message.as_ref().map(|why| format!(" ({why})"));
    format!("{}{}", phase.name(), why.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use pdp_api::{
        CommandState, CommandStatus, ForwardingGuest, NodeStats, RouteGuestStats, RouteStats,
        VnetStats, VnetStatus,
    };

    fn vnet(nodes: Vec<NodeStatus>) -> Vnet {
        let ready = nodes.iter().all(|node| node.ready);
        let status = VnetStatus { phase: Phase::Running, ready, nodes, ..VnetStatus::default() };
        Vnet { name: "red".into(), spec: serde_json::Value::Null, status }
    }

    fn node(name: &str) -> NodeStatus {
        let guest = ForwardingGuest { connected: true, ..ForwardingGuest::default() };
        NodeStatus {
            name: name.into(),
            phase: Phase::Running,
            ready: true,
            guests: vec![guest],
            ..NodeStatus::default()
        }
    }

    fn of(target: &str, condition: &str, vnet: Option<&Vnet>) -> Vec<String> {
        missing(&target.parse().unwrap(), &condition.parse().unwrap(), vnet)
    }

    #[test]
    fn fulfilled_conditions_report_no_missing_parts() {
        let vnet = vnet(vec![node("r1"), node("r2")]);
        for condition in ["running", "ready", "connected", "routes-synced"] {
            assert!(of("red", condition, Some(&vnet)).is_empty(), "{condition}");
            assert!(of("red/r1", condition, Some(&vnet)).is_empty(), "{condition}");
        }
        assert!(of("red", "gone", None).is_empty());
        assert!(of("red/r3", "gone", Some(&vnet)).is_empty());
    }

    #[test]
    fn unmet_conditions_are_reported_with_their_reason() {
        let mut bad = node("r1");
        bad.ready = false;
        bad.commands = vec![CommandStatus {
            name: "ospfd".into(),
            state: CommandState::Waiting,
            message: Some("waits for zebra".into()),
            ..CommandStatus::default()
        }];
        bad.guests[0].connected = false;
        let all = vnet(vec![bad.clone(), node("r2")]);
        assert_eq!(
            of("red", "ready", Some(&all)),
            ["red/r1 ospfd: waiting (waits for zebra)", "red/r1 g0: not connected"]
        );
        assert!(of("red/r2", "ready", Some(&all)).is_empty(), "another node's is no matter");
        assert_eq!(of("red", "connected", Some(&all)), ["red/r1 g0: not connected"]);
        assert_eq!(of("red/r1", "routes-synced", Some(&all)), ["red/r1 g0: not connected"]);
        bad.phase = Phase::Degraded;
        bad.message = Some("why".into());
        assert_eq!(of("red", "running", Some(&vnet(vec![bad]))), ["red/r1: degraded (why)"]);
        let missing = ["red: no such virtual network"];
        assert_eq!(of("red", "ready", None), missing);
        assert_eq!(of("red/r9", "ready", Some(&all)), ["red/r9: no such node"]);
        assert_eq!(of("red", "gone", Some(&all)), ["red still exists"]);
        let mut starting = vnet(vec![node("r1")]);
        (starting.status.phase, starting.status.ready) = (Phase::Starting, false);
        assert_eq!(of("red", "ready", Some(&starting)), ["red: starting"]);
    }

    #[test]
    fn unsynced_guests_are_reported_as_behind() {
        let guests = [(0, true), (1, false)];
        let guests =
            guests.map(|(guest, synced)| RouteGuestStats { guest, synced, ..Default::default() });
        let routes = Some(RouteStats { guests: guests.into(), ..RouteStats::default() });
        let nodes = [("r1".into(), NodeStats { routes, ..NodeStats::default() })].into();
        let vnets = [("red".into(), VnetStats { nodes })].into();
        let stats = Stats { vnets, ..Stats::default() };
        let of = |target: &str| behind(&target.parse().unwrap(), &stats);
        assert_eq!(of("red"), ["red/r1 g1: does not have the kernel's routes yet"]);
        assert_eq!(of("red/r1").len(), 1);
        assert!(of("red/r2").is_empty() && of("blue").is_empty());
    }

    #[test]
    fn wait_conditions_and_times_are_parsed_or_refused() {
        let words = ["h1", "ping", "-c1", "10.0.0.1"].map(str::to_owned).to_vec();
        assert_eq!("exec h1 ping -c1 10.0.0.1".parse(), Ok(WaitCondition::Exec(words)));
        for bad in ["", "exec", "exec ", "Ready", "exec '"] {
            assert!(bad.parse::<WaitCondition>().is_err(), "{bad}");
        }
        for bad in ["", "/", "red/", "/r1", "red/r1/x"] {
            assert!(bad.parse::<WaitTarget>().is_err(), "{bad}");
        }
        assert_eq!(time("60"), Ok(Duration::from_secs(60)));
        assert_eq!(time("1.5"), Ok(Duration::from_millis(1500)));
        assert_eq!(time("5m"), Ok(Duration::from_secs(300)));
        assert!(time("soon").is_err() && time("").is_err() && time("-1").is_err());
    }
}
