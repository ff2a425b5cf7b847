//! Waits until something is so, and says what is missing if it is not in time.
//!
//! [`Changes`] says when to look again, and at what: a watch tells it.

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use pdp_api::client::{Client, Error};
use pdp_api::exec::{ExecRequest, Frame};
use pdp_api::{
    Detail, GuestProcess, NodeStatus, Phase, ProblemKind, Progress, Stats, StatsQuery, Vnet,
    WATCH_EVERY_MS, WATCH_EVERY_MS_DEFAULT, WatchLine, WatchQuery, What,
};
use pdp_spec::units::Span;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use crate::exec::until_end;
use crate::failure::Failure;
use crate::follow::{Followed, Following, Said};
use crate::output::Shown;

/// Bounds of the pause between two looks at what no event tells of: a quarter of the time that was waited so far.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// Pause between two looks where events tell all: what is told may be from before what was looked at.
const TOLD_PAUSE: Duration = Duration::from_secs(2);

/// How often the daemon looks at a vnet that is waited for, milliseconds: at its guests, and at how its commands are. Of
/// several vnets, at all others as well.
const EVERY_MS: u64 = *WATCH_EVERY_MS.start();
const EVERY_MS_OF_SEVERAL: u64 = WATCH_EVERY_MS_DEFAULT;

/// Longest wait for the first line of the watch.
const BEGIN_TIME_MAX: Duration = Duration::from_secs(5);

/// Bytes kept of what a command in a node says.
const WORDS_BYTES_MAX: usize = 200;

/// Wait until virtual networks, or nodes of them, are as you want them.
///
/// Exits with 0 once all of it holds, and with 1 where it does not in time; what is missing is said then.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example: pdp wait ospf --for ready\n         pdp wait ospf/r1 --for routes-synced --timeout 30s\n         \
                  pdp wait ospf --for ready --for 'exec h1 ping -c1 10.2.0.2'\n         \
                  pdp delete red & pdp wait red --for gone"
)]
pub struct Wait {
    /// Virtual networks, or nodes of them: VNET or VNET/NODE.
    #[arg(value_name = "VNET[/NODE]", required = true)]
    pub names: Vec<Target>,
    /// Condition to wait for; repeat it to require several: running (as the spec says), ready (and its commands are
    /// too), connected (all forwarding guests are), routes-synced (and have the kernel's routes), gone, or
    /// `exec NODE COMMAND...` (`exec COMMAND...` of a VNET/NODE), which is to return 0.
    #[arg(long = "for", value_name = "CONDITION", default_value = "ready")]
    pub conditions: Vec<Condition>,
    /// How long, seconds or with a unit: 60, 90s, 5m.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time)]
    pub timeout: Duration,
}

/// How long `up` and `apply` wait.
#[derive(Debug, clap::Args)]
pub struct Until {
    /// Return when all is ready, at most after TIME (not given: 60s); what is missing then is said, and the exit code
    /// is 1.
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true,
        default_missing_value = "60s", value_parser = time)]
    pub wait: Option<Duration>,
}

/// Seconds, or with a unit as specs have it.
fn time(text: &str) -> Result<Duration, String> {
    let seconds = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let with_unit = if seconds { format!("{text}s") } else { text.to_owned() };
    let span: Span =
        with_unit.parse().map_err(|error: pdp_spec::units::BadValue| error.to_string())?;
    Ok(Duration::from_nanos(span.0))
}

/// A virtual network, or a node of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    vnet: String,
    node: Option<String>,
}

impl FromStr for Target {
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

/// What is to hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    Running,
    Ready,
    Connected,
    RoutesSynced,
    Gone,
    /// A command returns 0.
    Exec(Vec<String>),
}

impl FromStr for Condition {
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

pub async fn wait(client: &Client, args: Wait) -> Result<ExitCode, Failure> {
    for (target, condition) in pairs(&args.names, &args.conditions) {
        if matches!(condition, Condition::Exec(words) if target.node.is_none() && words.len() < 2) {
            return Err(Failure::Usage("exec NODE COMMAND... names no command".into()));
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
) -> Result<(), Failure> {
    let targets: Vec<_> = vnets.into_iter().map(|vnet| Target { vnet, node: None }).collect();
    until(client, &targets, &[Condition::Ready], time).await
}

fn pairs<'a>(
    targets: &'a [Target],
    conditions: &'a [Condition],
) -> impl Iterator<Item = (&'a Target, &'a Condition)> {
    targets.iter().flat_map(move |target| conditions.iter().map(move |it| (target, it)))
}

async fn until(
    client: &Client,
    targets: &[Target],
    conditions: &[Condition],
    time: Duration,
) -> Result<(), Failure> {
    let deadline = Instant::now() + time;
    let mut shown = Shown::new();
    let mut changes = match timeout_at(deadline, Changes::begin(client, targets, conditions)).await
    {
        Ok(changes) => changes?,
        Err(_) => Changes::without(targets),
    };
    // What is missing, by vnet, as of the last look at it.
    let mut missing = BTreeMap::new();
    loop {
        let all = changes.dirty.len() == changes.vnets.len();
        let look = look(client, targets, conditions, &mut changes, &mut missing);
        let looked = timeout_at(deadline, look).await;
        let mut list: Vec<String> = missing.values().flatten().cloned().collect();
        let whole = match looked {
            Ok(Ok(())) => true,
            // It may be starting anew, and what runs goes on.
            Ok(Err(Failure::Api(Error::NoDaemon { place, .. }))) if !missing.is_empty() => {
                list = vec![format!("no daemon answers at {place}")];
                false
            }
            Ok(Err(other)) => return Err(other),
            // A look that is broken off says less than the one before.
            Err(_) => {
                if list.is_empty() {
                    list.push("it takes longer to find out".to_owned());
                }
                false
            }
        };
        let Some(first) = list.first() else {
            if all {
                return Ok(());
            }
            // Each was so, and now it is to be seen that all are.
            changes.look_at_all();
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
                let names: Vec<_> = targets.iter().map(Target::name).collect();
                let list: String = list.iter().map(|it| format!("\n  {it}")).collect();
                let names = names.join(", ");
                return Err(Failure::Other(format!("{names}: not within {time:?}; missing:{list}")));
            }
            () = again => {}
        }
    }
}

/// Says when something may be otherwise than before, and of which vnets.
struct Changes {
    /// All that are waited for.
    vnets: BTreeSet<String>,
    /// Those to be looked at.
    dirty: BTreeSet<String>,
    /// `None`: there is no room for a watch, or nothing to see by one, and it is looked again and again.
    watch: Option<Followed>,
    /// The daemon answers the watch.
    live: bool,
    /// Events tell of all that is waited for.
    told: bool,
    /// Vnets that are there, wanted or being taken down, as the watch says.
    there: Option<BTreeSet<String>>,
    since: Instant,
}

impl Changes {
    /// Without a watch.
    fn without(targets: &[Target]) -> Self {
        let vnets: BTreeSet<String> = targets.iter().map(|target| target.vnet.clone()).collect();
        Self {
            dirty: vnets.clone(),
            vnets,
            watch: None,
            live: false,
            told: false,
            there: None,
            since: Instant::now(),
        }
    }

    /// With one, and with its first line where that is needed. An error: no daemon answers.
    async fn begin(
        client: &Client,
        targets: &[Target],
        conditions: &[Condition],
    ) -> Result<Self, Failure> {
        let mut this = Self::without(targets);
        let one = this.vnets.first().filter(|_| this.vnets.len() == 1).cloned();
        let every_ms = if one.is_some() { EVERY_MS } else { EVERY_MS_OF_SEVERAL };
        // Commands are run to know, and mirrors are asked less often than routes come.
        let untold = |it: &Condition| matches!(it, Condition::Exec(_) | Condition::RoutesSynced);
        this.told = one.is_some() && !conditions.iter().any(untold);
        let query = WatchQuery { vnet: one, every_ms: Some(every_ms), ..WatchQuery::default() };
        match Following::begin(client, query).await {
            Ok(following) => this.watch = Some(following.spawn()),
            // Refused, of what is another's or for want of room.
            Err(Error::Problem(_)) => return Ok(this),
            Err(error) => return Err(error.into()),
        }
        this.live = true;
        if conditions.contains(&Condition::Gone) {
            let _ = timeout(BEGIN_TIME_MAX, this.first()).await;
        }
        Ok(this)
    }

    /// Waits until it is known which vnets are there.
    async fn first(&mut self) {
        while let Some(watch) = &mut self.watch
            && self.there.is_none()
        {
            let said = watch.next().await;
            self.take(said);
        }
    }

    fn look_at_all(&mut self) {
        self.dirty.clone_from(&self.vnets);
    }

    fn pause(&self) -> Duration {
        (self.since.elapsed() / 4).clamp(PAUSE_MIN, PAUSE_MAX)
    }

    /// Waits until there is something to look at: what was told, or after a pause of what is `open` all.
    async fn next(&mut self, open: BTreeSet<String>) {
        let end = Instant::now() + if self.told && self.live { TOLD_PAUSE } else { self.pause() };
        while self.dirty.is_empty() {
            let Some(watch) = &mut self.watch else {
                sleep_until(end).await;
                break;
            };
            match timeout_at(end, watch.next()).await {
                Ok(said) => self.take(said),
                Err(_) => break,
            }
        }
        // Of many events at once, one look comes.
        while let Some(said) = self.watch.as_mut().and_then(Followed::next_now) {
            self.take(Some(said));
        }
        if self.dirty.is_empty() {
            self.dirty = open;
        }
    }

    fn take(&mut self, said: Option<Result<Said, Error>>) {
        match said {
            Some(Ok(Said::Line(WatchLine::Snapshot(now)))) => {
                let names = now.vnets.into_iter().map(|vnet| vnet.name);
                self.there = Some(names.chain(now.going).collect());
                self.look_at_all();
            }
            Some(Ok(Said::Line(WatchLine::Event(event)))) => {
                let Some(vnet) = event.vnet().filter(|vnet| self.vnets.contains(*vnet)) else {
                    return;
                };
                if let Some(there) = &mut self.there
                    && event.object.len() == "vnet/".len() + vnet.len()
                {
                    match event.what {
                        What::Created => drop(there.insert(vnet.to_owned())),
                        What::Gone => drop(there.remove(vnet)),
                        _ => {}
                    }
                }
                self.dirty.insert(vnet.to_owned());
            }
            Some(Ok(Said::Line(_))) => {}
            Some(Ok(Said::Gone(_))) => self.live = false,
            Some(Ok(Said::Back)) => {
                self.live = true;
                self.look_at_all();
            }
            // The next look says why.
            Some(Err(_)) | None => {
                (self.watch, self.live) = (None, false);
                self.look_at_all();
            }
        }
    }
}

/// Looks at what may be otherwise than before, and keeps what is missing of it.
async fn look(
    client: &Client,
    targets: &[Target],
    conditions: &[Condition],
    changes: &mut Changes,
    missing: &mut BTreeMap<String, Vec<String>>,
) -> Result<(), Failure> {
    while let Some(vnet) = changes.dirty.first().cloned() {
        let its: Vec<&Target> = targets.iter().filter(|target| target.vnet == vnet).collect();
        let is = missing_of_vnet(client, &vnet, &its, conditions, changes.there.as_ref()).await?;
        missing.insert(vnet.clone(), is);
        changes.dirty.remove(&vnet);
    }
    Ok(())
}

/// What is missing of a vnet and its nodes.
async fn missing_of_vnet(
    client: &Client,
    name: &str,
    targets: &[&Target],
    conditions: &[Condition],
    there: Option<&BTreeSet<String>>,
) -> Result<Vec<String>, Failure> {
    let vnet = match client.vnet(name).await {
        Ok(vnet) => Some(vnet),
        Err(Error::Problem(problem)) if problem.kind == ProblemKind::NotFound => None,
        Err(error) => return Err(error.into()),
    };
    let mut all = Vec::new();
    for condition in conditions {
        match condition {
            Condition::Exec(_) => {}
            Condition::Gone if vnet.is_none() => {
                let going = match there {
                    Some(there) => there.contains(name),
                    None => is_going(client, name).await?,
                };
                all.extend(going.then(|| format!("{name} is being taken down")));
            }
            condition => {
                let targets = targets.iter();
                all.extend(targets.flat_map(|target| missing(target, condition, vnet.as_ref())));
            }
        }
    }
    if conditions.contains(&Condition::RoutesSynced) && vnet.is_some() {
        let stats = client.stats(&StatsQuery { vnet: Some(name.to_owned()) }).await?;
        all.extend(targets.iter().flat_map(|target| behind(target, &stats)));
    }
    for target in targets {
        for condition in conditions {
            let Condition::Exec(words) = condition else { continue };
            // A command that waits for what is not there yet would only fail.
            if !all.is_empty() {
                break;
            }
            let why = run(client, target, words).await;
            all.extend(why.map(|why| format!("{}: `{}`: {why}", target.name(), words.join(" "))));
        }
    }
    Ok(all)
}

/// Whether a virtual network that was deleted is being taken down.
async fn is_going(client: &Client, vnet: &str) -> Result<bool, Failure> {
    let query =
        WatchQuery { vnet: Some(vnet.into()), detail: Detail::None, ..WatchQuery::default() };
    let first = client.watch(&query).await?.next().await?;
    Ok(matches!(first, Some(WatchLine::Snapshot(it)) if it.going.iter().any(|name| name == vnet)))
}

/// Runs a command in a node; why it did not return 0.
async fn run(client: &Client, target: &Target, words: &[String]) -> Option<String> {
    let (node, words) = match &target.node {
        Some(node) => (node, words),
        None => words.split_first()?,
    };
    let request = ExecRequest {
        command: words.to_vec(),
        process: GuestProcess::Control,
        ..ExecRequest::default()
    };
    let mut said = Vec::new();
    let ended = async {
        let mut connection = client.exec(&target.vnet, node, &request).await?;
        let take = |frame| {
            if let Frame::Stdout(bytes) | Frame::Stderr(bytes) = frame {
                said.extend_from_slice(&bytes);
                let more = said.len().saturating_sub(WORDS_BYTES_MAX);
                said.drain(..more);
            }
            Ok(())
        };
        until_end(&mut connection, take).await
    };
    let ended: Result<i32, Failure> = ended.await;
    let said = String::from_utf8_lossy(&said).into_owned();
    let last = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
    let last: String = last.chars().filter(|letter| !letter.is_control()).collect();
    match ended {
        Ok(0) => None,
        Ok(code) if last.is_empty() => Some(format!("code {code}")),
        Ok(code) => Some(format!("code {code}: {last}")),
        Err(error) => Some(error.to_string()),
    }
}

impl Target {
    fn name(&self) -> String {
        match &self.node {
            Some(node) => format!("{}/{node}", self.vnet),
            None => self.vnet.clone(),
        }
    }
}

/// What is missing of a condition.
fn missing(target: &Target, condition: &Condition, vnet: Option<&Vnet>) -> Vec<String> {
    let Some(vnet) = vnet else {
        return match condition {
            Condition::Gone => Vec::new(),
            _ => vec![format!("{}: there is no such virtual network", target.vnet)],
        };
    };
    let wanted = |node: &&NodeStatus| target.node.as_ref().is_none_or(|name| *name == node.name);
    let nodes: Vec<&NodeStatus> = vnet.status.nodes.iter().filter(wanted).collect();
    if *condition == Condition::Gone {
        let is_there = target.node.is_none() || !nodes.is_empty();
        return is_there.then(|| format!("{} is there", target.name())).into_iter().collect();
    }
    if target.node.is_some() && nodes.is_empty() {
        return vec![format!("{}: there is no such node", target.name())];
    }
    let named = |what: String| format!("{}/{what}", vnet.name);
    let mut all: Vec<String> =
        nodes.iter().flat_map(|node| missing_of(node, condition)).map(named).collect();
    let whole = target.node.is_none() && all.is_empty();
    let holds = match condition {
        Condition::Running => vnet.status.phase == Phase::Running,
        Condition::Ready => vnet.status.ready,
        _ => true,
    };
    if whole && !holds {
        all.push(format!("{}: {}", vnet.name, state(vnet.status.phase, &vnet.status.message)));
    }
    all
}

/// Forwarding guests that do not have the kernel's routes.
fn behind(target: &Target, stats: &Stats) -> Vec<String> {
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

/// What is missing of a condition at a node.
fn missing_of(node: &NodeStatus, condition: &Condition) -> Vec<String> {
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
        Condition::Running => running().into_iter().collect(),
        // Of routes, the mirror says more.
        Condition::Connected | Condition::RoutesSynced => disconnected(),
        Condition::Ready => {
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
        Condition::Gone | Condition::Exec(_) => Vec::new(),
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
    fn nothing_is_missing_of_what_is_so() {
        let vnet = vnet(vec![node("r1"), node("r2")]);
        for condition in ["running", "ready", "connected", "routes-synced"] {
            assert!(of("red", condition, Some(&vnet)).is_empty(), "{condition}");
            assert!(of("red/r1", condition, Some(&vnet)).is_empty(), "{condition}");
        }
        assert!(of("red", "gone", None).is_empty());
        assert!(of("red/r3", "gone", Some(&vnet)).is_empty());
    }

    #[test]
    fn what_is_missing_is_said_with_its_reason() {
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
        let missing = ["red: there is no such virtual network"];
        assert_eq!(of("red", "ready", None), missing);
        assert_eq!(of("red/r9", "ready", Some(&all)), ["red/r9: there is no such node"]);
        assert_eq!(of("red", "gone", Some(&all)), ["red is there"]);
        let mut starting = vnet(vec![node("r1")]);
        (starting.status.phase, starting.status.ready) = (Phase::Starting, false);
        assert_eq!(of("red", "ready", Some(&starting)), ["red: starting"]);
    }

    #[test]
    fn routes_are_behind_where_a_mirror_says_so() {
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
    fn conditions_and_times_are_read_or_refused() {
        let words = ["h1", "ping", "-c1", "10.0.0.1"].map(str::to_owned).to_vec();
        assert_eq!("exec h1 ping -c1 10.0.0.1".parse(), Ok(Condition::Exec(words)));
        for bad in ["", "exec", "exec ", "Ready", "exec '"] {
            assert!(bad.parse::<Condition>().is_err(), "{bad}");
        }
        for bad in ["", "/", "red/", "/r1", "red/r1/x"] {
            assert!(bad.parse::<Target>().is_err(), "{bad}");
        }
        assert_eq!(time("60"), Ok(Duration::from_secs(60)));
        assert_eq!(time("1.5"), Ok(Duration::from_millis(1500)));
        assert_eq!(time("5m"), Ok(Duration::from_secs(300)));
        assert!(time("soon").is_err() && time("").is_err() && time("-1").is_err());
    }
}
