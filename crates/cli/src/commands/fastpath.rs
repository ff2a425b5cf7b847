//! `pdp fastpath`: filters, counters, queues and frames of a router that the mux forwards for.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{ArgGroup, Subcommand};
use pdp_api::client::Client;
use pdp_api::{
    FASTPATH_COUNTERS_AT_ONCE, FastpathChange, FastpathCountersQuery, FastpathDirection,
    FastpathFilter, FastpathFilters, FastpathFiltersQuery, FastpathFrame, FastpathQueue,
    FastpathQueueSetting, FastpathQueuesQuery, FilterCounter, FilterVerdict,
};
use serde::{Deserialize, Serialize};

use crate::daemon::complete;
use crate::failure::CliFailure;
use crate::input::name::NodeName;
use crate::input::times::seconds;
use crate::interrupt::until_interrupted;
use crate::output::samples::{show, since};
use crate::output::words::bits;
use crate::output::{Format, or_dash, print, table};

/// Largest file of filters, bytes.
const FILE_BYTES_MAX: u64 = pdp_api::BODY_BYTES_MAX as u64;

/// Show and change the filters of a fast path (`dataPlane: {kind: fastpath}`), read its counters,
/// send frames.
///
/// A program in the control guest may control the filters as well (docs/slowpath.md). When it
/// connects, it removes the filters of this command; this command's `apply` removes the program's.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp fastpath red/r1 filters\n         \
                        pdp fastpath red/r1 add --id 1 --priority 10 --match 'ip proto udp dport 53' --drop --counter 0\n         \
                        pdp fastpath red/r1 add --id 2 --match 'ip dst 192.0.2.0/24 in eth0' --send eth1 --to 02:00:00:00:00:01\n         \
                        pdp fastpath red/r1 counters --watch\n         \
                        pdp fastpath red/r1 queues\n         \
                        pdp fastpath red/r1 queue eth1 2 --weight 30 --frames 64\n         \
                        pdp fastpath red/r1 remove 1 2\n         \
                        pdp fastpath red/r1 apply -f filters.yaml\n         \
                        pdp fastpath red/r1 send --out eth1 ffffffffffff02000000000188b5")]
pub struct FastpathArgs {
    /// VNET/ROUTER.
    #[arg(value_name = "ROUTER", add = complete::nodes())]
    pub name: NodeName,
    #[command(subcommand)]
    pub action: FastpathAction,
    #[arg(short = 'o', long, value_enum, global = true, default_value_t)]
    pub format: Format,
}

#[derive(Debug, Subcommand)]
pub enum FastpathAction {
    /// List the filters and the counts of their counters.
    #[command(visible_alias = "list")]
    Filters,
    /// Add a filter, or replace the one with the same number.
    Add(AddFilterArgs),
    /// Remove filters, all at once.
    Remove {
        /// Numbers of the filters.
        #[arg(value_name = "ID", required = true)]
        ids: Vec<u32>,
    },
    /// Print these counters, or all that are not zero.
    Counters {
        /// Numbers of the counters.
        #[arg(value_name = "NUMBER")]
        numbers: Vec<u32>,
        /// Print again and again, with rates, every so many seconds.
        #[arg(short, long, value_name = "SECONDS", num_args = 0..=1, require_equals = true,
            default_missing_value = "1", value_parser = seconds)]
        watch: Option<Duration>,
    },
    /// List the queues of its interfaces' links, with their counters.
    Queues {
        /// Only queues of this interface.
        #[arg(value_name = "IFACE")]
        port: Option<String>,
    },
    /// Set a queue's weight and length, within the spec's limits. Omitted values return to the
    /// spec's.
    Queue(SetQueueArgs),
    /// Replace all filters by those of a file, all at once.
    ///
    /// The file has a list `filters`, each with the keys that `filters -o yaml` prints.
    Apply {
        /// YAML or JSON file; - for standard input.
        #[arg(short, long, value_name = "FILE")]
        file: PathBuf,
    },
    /// Send a frame out of an interface, or process it as if received from one, by filters and
    /// routes.
    Send(SendFrameArgs),
}

#[derive(Debug, clap::Args)]
#[command(group = ArgGroup::new("verdict").args(["drop", "pass", "punt", "send"]).required(true))]
pub struct AddFilterArgs {
    /// Number of the filter, from 0 on.
    #[arg(long, value_name = "N")]
    id: u32,
    /// The matching filter with the highest priority wins; among equals, the oldest.
    #[arg(short, long, value_name = "P", default_value_t)]
    priority: u32,
    /// Packets to match: `ip` or `ip6`, then any of src PREFIX, dst PREFIX, proto NAME, sport N,
    /// dport N, tos N, dscp N, in IFACE. With the code `fields`: `raw HEX[/MASK]`, then in IFACE.
    #[arg(short, long, value_name = "MATCH")]
    r#match: String,
    /// Drop matching packets.
    #[arg(long)]
    drop: bool,
    /// Treat matching packets as if there were no filter.
    #[arg(long)]
    pass: bool,
    /// Punt matching packets to the control guest.
    #[arg(long)]
    punt: bool,
    /// Send matching packets out of this interface.
    #[arg(long, value_name = "IFACE")]
    send: Option<String>,
    /// With --send: destination MAC address.
    #[arg(long, value_name = "MAC")]
    to: Option<String>,
    /// With --send and the code `fields`: bytes for the header, in hexadecimal.
    #[arg(long, value_name = "HEX", conflicts_with = "to")]
    data: Option<String>,
    /// Number of the counter for matching packets.
    #[arg(long, value_name = "N")]
    counter: Option<u32>,
    /// Send a copy out of this interface; may be repeated.
    #[arg(long = "copy", value_name = "IFACE")]
    copies: Vec<String>,
    /// Queue of the egress interface, counted from 1.
    #[arg(long, value_name = "N")]
    queue: Option<u16>,
}

#[derive(Debug, clap::Args)]
pub struct SetQueueArgs {
    /// Egress interface.
    #[arg(value_name = "IFACE")]
    port: String,
    /// Number of the interface's queue, counted from 1.
    #[arg(value_name = "QUEUE")]
    queue: u16,
    /// Weight relative to other queues that have frames.
    #[arg(long, value_name = "W")]
    weight: Option<u32>,
    /// Largest number of waiting frames.
    #[arg(long, value_name = "N")]
    frames: Option<u32>,
    /// Largest number of waiting bytes.
    #[arg(long, value_name = "N")]
    bytes: Option<u32>,
}

#[derive(Debug, clap::Args)]
#[command(group = ArgGroup::new("direction").args(["out", "into"]).required(true))]
pub struct SendFrameArgs {
    /// Send out of this interface.
    #[arg(long, value_name = "IFACE")]
    out: Option<String>,
    /// Process as if received from this interface.
    #[arg(long = "in", value_name = "IFACE")]
    into: Option<String>,
    /// With --out: queue of the interface, counted from 1.
    #[arg(long, value_name = "N", conflicts_with = "into")]
    queue: Option<u16>,
    /// Frame from the Ethernet header on, without checksum, in hexadecimal; colons and blanks are
    /// ignored.
    #[arg(value_name = "HEX")]
    frame: String,
}

/// A file of filters.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FilterFile {
    filters: Vec<FastpathFilter>,
}

/// A filter with its counts.
#[derive(Serialize)]
struct FilterWithCounter {
    #[serde(flatten)]
    filter: FastpathFilter,
    #[serde(flatten)]
    counted: Option<FilterCounter>,
}

/// Counts of one counter.
#[derive(Serialize)]
struct NumberedCounter {
    counter: u32,
    #[serde(flatten)]
    counted: FilterCounter,
    #[serde(flatten)]
    rates: Option<CounterRates>,
}

#[derive(Clone, Copy, Serialize)]
struct CounterRates {
    pps: f64,
    bps: f64,
}

pub async fn fastpath(client: &Client, args: FastpathArgs) -> Result<ExitCode, CliFailure> {
    let (name, format) = (&args.name, args.format);
    let change = match args.action {
        FastpathAction::Filters => return filters(client, name, format).await,
        FastpathAction::Counters { numbers, watch } => {
            return counters(client, name, &numbers, watch, format).await;
        }
        FastpathAction::Send(wanted) => return send(client, name, wanted).await,
        FastpathAction::Queues { port } => return queues(client, name, port, format).await,
        FastpathAction::Queue(SetQueueArgs { port, queue, weight, frames, bytes }) => {
            let queue = FastpathQueueSetting { port, queue, weight, frames, bytes };
            FastpathChange { queues: vec![queue], ..Default::default() }
        }
        FastpathAction::Add(wanted) => {
            FastpathChange { set: vec![wanted.filter()?], ..Default::default() }
        }
        FastpathAction::Remove { ids } => FastpathChange { remove: ids, ..Default::default() },
        FastpathAction::Apply { file } => {
            FastpathChange { set: read(&file)?, sweep: true, ..Default::default() }
        }
    };
    let changed = client.change_fastpath(&name.vnet, &name.node, &change).await?;
    print(format, &changed, |changed| {
        format!("{} in force\n", pdp_spec::count(changed.filters, "filter"))
    })
}

impl AddFilterArgs {
    fn filter(self) -> Result<FastpathFilter, CliFailure> {
        let verdict = match (self.drop, self.pass, self.punt) {
            (true, ..) => FilterVerdict::Drop,
            (_, true, _) => FilterVerdict::Pass,
            (.., true) => FilterVerdict::Punt,
            _ => FilterVerdict::Send,
        };
        if verdict != FilterVerdict::Send && (self.to.is_some() || self.data.is_some()) {
            return Err(CliFailure::Usage("--to and --data need --send".into()));
        }
        Ok(FastpathFilter {
            id: self.id,
            priority: self.priority,
            r#match: self.r#match,
            verdict,
            out: self.send,
            to: self.to,
            queue: self.queue,
            counter: self.counter,
            copies: self.copies,
            data: self.data,
        })
    }
}

/// Reads the filters of a file.
fn read(path: &PathBuf) -> Result<Vec<FastpathFilter>, CliFailure> {
    let bad = |why: &dyn std::fmt::Display| CliFailure::Other(format!("{}: {why}", path.display()));
    let mut text = String::new();
    let mut from: Box<dyn Read> = match path.as_os_str() == "-" {
        true => Box::new(std::io::stdin()),
        false => Box::new(std::fs::File::open(path).map_err(|error| bad(&error))?),
    };
    from.by_ref()
        .take(FILE_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .map_err(|error| bad(&error))?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(bad(&format!("more than {FILE_BYTES_MAX} bytes")));
    }
    // JSON is YAML, but has a faster parser.
    let file: FilterFile = match serde_json::from_str(&text) {
        Ok(file) => file,
        Err(_) => {
            // The budget allows the largest number of filters.
            let budget = serde_saphyr::budget! { max_events: 8_000_000, max_nodes: 4_000_000 };
            let options = serde_saphyr::options! { budget: budget, with_snippet: false };
            serde_saphyr::from_str_with_options(&text, options).map_err(|error| bad(&error))?
        }
    };
    Ok(file.filters)
}

async fn send(
    client: &Client,
    name: &NodeName,
    args: SendFrameArgs,
) -> Result<ExitCode, CliFailure> {
    let frame: String =
        args.frame.chars().filter(|c| *c != ':' && !c.is_ascii_whitespace()).collect();
    if !frame.len().is_multiple_of(2) || !frame.chars().all(|digit| digit.is_ascii_hexdigit()) {
        let problem = "the frame is not hexadecimal; write it like ffffffffffff02000000000188b5";
        return Err(CliFailure::Usage(problem.into()));
    }
    let (port, direction) = match (args.out, args.into) {
        (Some(port), _) => (port, FastpathDirection::Out),
        (None, port) => (port.unwrap_or_default(), FastpathDirection::In),
    };
    let frame = FastpathFrame { port, direction, queue: args.queue, frame };
    client.send_frame(&name.vnet, &name.node, &frame).await?;
    Ok(ExitCode::SUCCESS)
}

async fn queues(
    client: &Client,
    name: &NodeName,
    port: Option<String>,
    format: Format,
) -> Result<ExitCode, CliFailure> {
    let query = FastpathQueuesQuery { port };
    let all = client.fastpath_queues(&name.vnet, &name.node, &query).await?;
    print(format, &all.queues, |queues| {
        let header = [
            "PORT", "QUEUE", "NAME", "WEIGHT", "FRAMES", "BYTES", "BUFFERS", "WAITING", "SENT",
            "DROPPED",
        ];
        let row = |it: &FastpathQueue| {
            let bytes = or_dash(it.bytes.map_or(String::new(), |bytes| bytes.to_string()));
            let [queue, weight, frames, buffers, waiting] =
                [it.queue.into(), it.weight, it.frames, it.buffers, it.waiting]
                    .map(|it: u32| it.to_string());
            let (port, name) = (it.port.clone(), it.name.clone());
            let [sent, dropped] = [it.sent, it.dropped].map(|it| it.to_string());
            [port, queue, name, weight, frames, bytes, buffers, waiting, sent, dropped]
        };
        match queues.is_empty() {
            true => "no `queues` configured: each end has a single queue\n".into(),
            false => table(header, queues.iter().map(row).collect()),
        }
    })
}

async fn filters(client: &Client, name: &NodeName, format: Format) -> Result<ExitCode, CliFailure> {
    let mut all = FastpathFilters::default();
    let mut first = 0;
    loop {
        let query = FastpathFiltersQuery { first };
        let part = client.fastpath_filters(&name.vnet, &name.node, &query).await?;
        all.filters.extend(part.filters);
        (all.code, all.filters_max, all.counters) = (part.code, part.filters_max, part.counters);
        match part.next {
            // Always advance, whatever the answer is.
            Some(next) if next > first => first = next,
            _ => break,
        }
    }
    let counters = all.filters.iter().filter_map(|filter| filter.counter);
    let counted = read_counters(client, name, counters).await?;
    let rows: Vec<FilterWithCounter> = all
        .filters
        .into_iter()
        .map(|filter| {
            let counted = filter.counter.and_then(|counter| counted.get(&counter).copied());
            FilterWithCounter { filter, counted }
        })
        .collect();
    let end = format!(
        "{} of {}, {}, code {}\n",
        rows.len(),
        pdp_spec::count(all.filters_max, "filter"),
        pdp_spec::count(all.counters, "counter"),
        all.code
    );
    print(format, &rows, |rows| {
        let header = ["ID", "PRIORITY", "MATCH", "VERDICT", "COUNTER", "PACKETS", "BYTES"];
        let or_none =
            |number: Option<u64>| or_dash(number.map_or(String::new(), |it| it.to_string()));
        let row = |row: &FilterWithCounter| {
            [
                row.filter.id.to_string(),
                row.filter.priority.to_string(),
                row.filter.r#match.clone(),
                verdict(&row.filter),
                or_none(row.filter.counter.map(u64::from)),
                or_none(row.counted.map(|counted| counted.packets)),
                or_none(row.counted.map(|counted| counted.bytes)),
            ]
        };
        table(header, rows.iter().map(row).collect()) + &end
    })
}

/// Formats the verdict of a filter.
fn verdict(filter: &FastpathFilter) -> String {
    let word = |name: &str, value: &Option<String>| {
        value.as_ref().map_or(String::new(), |value| format!("{name}{value}"))
    };
    let mut text = filter.verdict.name().to_owned();
    text += &word(" ", &filter.out);
    text += &word(" to ", &filter.to);
    text += &word(" data ", &filter.data);
    text += &word(" queue ", &filter.queue.map(|queue| queue.to_string()));
    if !filter.copies.is_empty() {
        text += &format!(", copies to {}", filter.copies.join(" "));
    }
    text
}

async fn counters(
    client: &Client,
    name: &NodeName,
    numbers: &[u32],
    watch: Option<Duration>,
    format: Format,
) -> Result<ExitCode, CliFailure> {
    let now = async || match numbers {
        [] => {
            let mut all = all_counters(client, name).await?;
            all.retain(|_, counted| *counted != FilterCounter::default());
            Ok::<_, CliFailure>(all)
        }
        _ => read_counters(client, name, numbers.iter().copied()).await,
    };
    let mut last = (Instant::now(), now().await?);
    let Some(pause) = watch else {
        let rows = last.1.into_iter().map(|(counter, counted)| NumberedCounter {
            counter,
            counted,
            rates: None,
        });
        return print(format, &rows.collect::<Vec<_>>(), |rows| text(rows));
    };
    until_interrupted(async {
        loop {
            tokio::time::sleep(pause).await;
            let (at, all) = (Instant::now(), now().await?);
            let seconds = (at - last.0).as_secs_f64();
            let rate = |then: u64, now: u64| since(then, now) as f64 / seconds;
            let row = |(&counter, &counted): (&u32, &FilterCounter)| {
                let then = last.1.get(&counter).copied().unwrap_or_default();
                let rates = CounterRates {
                    pps: rate(then.packets, counted.packets),
                    bps: rate(then.bytes, counted.bytes) * 8.0,
                };
                NumberedCounter { counter, counted, rates: Some(rates) }
            };
            show(format, true, &all.iter().map(row).collect::<Vec<_>>(), |rows| text(rows))?;
            last = (at, all);
        }
    })
    .await
}

fn text(rows: &[NumberedCounter]) -> String {
    let first = |row: &NumberedCounter| {
        let FilterCounter { packets, bytes, sent, sent_bytes } = row.counted;
        [u64::from(row.counter), packets, bytes, sent, sent_bytes].map(|it| it.to_string())
    };
    if rows.iter().all(|row| row.rates.is_none()) {
        let header = ["COUNTER", "PACKETS", "BYTES", "SENT", "BYTES"];
        return table(header, rows.iter().map(first).collect());
    }
    let row = |row: &NumberedCounter| {
        let [counter, packets, bytes, sent, sent_bytes] = first(row);
        let rates = row.rates.unwrap_or(CounterRates { pps: 0.0, bps: 0.0 });
        let (pps, bps) = (format!("{:.0}", rates.pps), bits(rates.bps as u64));
        [counter, packets, bytes, sent, sent_bytes, pps, bps]
    };
    let header = ["COUNTER", "PACKETS", "BYTES", "SENT", "BYTES", "pps", "RATE"];
    table(header, rows.iter().map(row).collect())
}

/// Reads all counters of a fast path.
async fn all_counters(
    client: &Client,
    name: &NodeName,
) -> Result<BTreeMap<u32, FilterCounter>, CliFailure> {
    let mut all = BTreeMap::new();
    let mut first = 0;
    loop {
        let query = FastpathCountersQuery { first, count: None };
        let part = client.fastpath_counters(&name.vnet, &name.node, &query).await?;
        let count = part.counters.len() as u32;
        all.extend((first..).zip(part.counters));
        first += count;
        if count == 0 || first >= part.total {
            return Ok(all);
        }
    }
}

/// Reads some counters. One request reads counters with near numbers.
async fn read_counters(
    client: &Client,
    name: &NodeName,
    numbers: impl Iterator<Item = u32>,
) -> Result<BTreeMap<u32, FilterCounter>, CliFailure> {
    let mut asked: Vec<u32> = numbers.collect();
    asked.sort_unstable();
    asked.dedup();
    let mut all = BTreeMap::new();
    let mut rest = &asked[..];
    while let Some(&first) = rest.first() {
        let near = rest.partition_point(|it| it - first < FASTPATH_COUNTERS_AT_ONCE);
        let count = Some(rest[near - 1] - first + 1);
        let query = FastpathCountersQuery { first, count };
        let part = client.fastpath_counters(&name.vnet, &name.node, &query).await?;
        let part: BTreeMap<u32, FilterCounter> = (first..).zip(part.counters).collect();
        let found = rest[..near].iter().filter_map(|it| part.get(it).map(|found| (*it, *found)));
        all.extend(found);
        rest = &rest[near..];
    }
    Ok(all)
}
