//! Arguments of the command line.

use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{OsStringValueParser, Resettable, TypedValueParser};
use clap::{ArgGroup, CommandFactory, Parser, Subcommand, ValueEnum};
use ipnet::IpNet;
use pdp_api::{DaemonName, FrameMatch, TRACE_WAIT_MS_MAX, WATCH_EVERY_MS};
use pdp_spec::units::{Bytes, Cores};

use crate::complete;
use crate::name::{CopyLocation, LinkName, NodeName, VnetPortName};
use crate::nodes::{NodeChoice, NodeNames};
use crate::shape::Shape;

/// Path of Debian's file of CA certificates.
const CA_DEFAULT: &str = "/etc/ssl/certs/ca-certificates.crt";

/// Heading of the options that all verbs have, listed after the verb's own.
const CONNECTION: &str = "Connection";

/// Host isolated virtual networks on this machine.
#[derive(Debug, Parser)]
#[command(
    name = "pdp",
    version,
    max_term_width = 100,
    propagate_version = false,
    after_help = "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no daemon answers; exec and \
                  shell pass the command's on.\n\n\
                  Example: pdp up examples/ospf.yaml && pdp inspect ospf"
)]
pub struct Args {
    /// Socket of the daemon [default: /run/pdp/pdpd.sock].
    #[arg(
        long,
        global = true,
        env = "PDP_SOCKET",
        value_name = "PATH",
        help_heading = CONNECTION
    )]
    pub socket: Option<PathBuf>,
    /// Daemon with this name, if this machine runs several. `pdp up` starts it with its own
    /// directories and cgroup, each named pdp-NAME.
    #[arg(
        id = "daemon",
        long = "name",
        global = true,
        env = "PDP_NAME",
        value_name = "NAME",
        help_heading = CONNECTION,
        conflicts_with = "socket"
    )]
    pub daemon: Option<DaemonName>,
    /// Daemon on another machine, over TLS, instead of the socket; needs a token.
    #[arg(
        long,
        global = true,
        env = "PDP_SERVER",
        value_name = "https://HOST:PORT",
        help_heading = CONNECTION
    )]
    pub server: Option<String>,
    /// Certificates (PEM) to trust the server by: those of authorities, or its own.
    #[arg(
        long,
        global = true,
        env = "PDP_CA",
        value_name = "FILE",
        default_value = CA_DEFAULT,
        help_heading = CONNECTION
    )]
    pub ca: PathBuf,
    /// File with the token that identifies the client. Without it: the variable PDP_TOKEN, or else
    /// the Unix user.
    #[arg(
        long,
        global = true,
        env = "PDP_TOKEN_FILE",
        value_name = "FILE",
        help_heading = CONNECTION
    )]
    pub token_file: Option<PathBuf>,
    #[command(subcommand)]
    pub command: CliCommand,
}

impl Args {
    /// Reads the command line.
    ///
    /// # Errors
    /// Invalid command line. A usage in the error shows the options that were given there, and no
    /// values of the environment.
    pub fn read() -> Result<Self, clap::Error> {
        Self::try_parse().map_err(|error| {
            // Help names the environment variables, so it stays as it is.
            if !error.use_stderr() {
                return error;
            }
            let command = Self::command().mut_args(|arg| arg.env(Resettable::Reset));
            command.try_get_matches().err().unwrap_or(error)
        })
    }
}

#[derive(Debug, Subcommand)]
pub enum CliCommand {
    Up(UpArgs),
    Down(DownArgs),
    Apply(ApplyArgs),
    Delete(DeleteArgs),
    Export(crate::export::ExportArgs),
    #[command(visible_alias = "list")]
    Get(crate::get::GetArgs),
    Inspect(InspectArgs),
    Wait(crate::wait::WaitArgs),
    Exec(ExecArgs),
    Cp(CpArgs),
    Shell(ShellArgs),
    Logs(LogsArgs),
    Link(LinkArgs),
    Fdb(FdbArgs),
    Scale(ScaleArgs),
    Restart(crate::restart::RestartArgs),
    Stats(StatsArgs),
    Events(EventsArgs),
    Top(TopArgs),
    Routes(RoutesArgs),
    Fastpath(crate::fastpath::FastpathArgs),
    Capture(crate::capture::CaptureArgs),
    Trace(TraceArgs),
    Validate(ValidateArgs),
    #[command(visible_alias = "image")]
    Images(ImagesArgs),
    Token(TokenArgs),
    Audit(AuditArgs),
    Doctor(DoctorArgs),
    Experiment(crate::experiment::ExperimentArgs),
    /// Print a completion script for a shell.
    #[command(after_help = "Example: source <(pdp completion bash)")]
    Completion {
        /// Name of the shell.
        shell: clap_complete::Shell,
    },
    Version(VersionArgs),
}

/// Spec files, given with -f or without.
#[derive(Debug, clap::Args)]
pub struct SpecFiles {
    /// Spec file, directory of spec files (*.yaml, *.yml), or - for standard input; may be
    /// repeated.
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Same as FILE.
    #[arg(short = 'f', long = "file", value_name = "FILE", num_args = 1..)]
    more: Vec<PathBuf>,
}

impl SpecFiles {
    /// Requires at least one file.
    fn some() -> ArgGroup {
        ArgGroup::new("specs").args(["files", "more"]).multiple(true).required(true)
    }

    pub fn paths(&self) -> Vec<PathBuf> {
        self.files.iter().chain(&self.more).cloned().collect()
    }
}

/// Files that specs may refer to.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct FileAccessArgs {
    /// Let specs refer to files (`from`, `frames`) outside their own directory.
    #[arg(long)]
    pub allow_files_outside: bool,
}

/// Output format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Tables for people.
    #[default]
    Table,
    Json,
    Yaml,
}

/// Start the daemon if none answers, start everything that is stored, apply files.
///
/// The daemon is pdpd beside this command or in PATH; PDP_DAEMON names another program.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp up examples/ospf.yaml --wait\n         \
                        pdp up --daemon-args '--state-dir /srv/pdp'\n         \
                        pdp --name lab2 up                    # a second daemon")]
pub struct UpArgs {
    #[command(flatten)]
    pub files: SpecFiles,
    #[command(flatten)]
    pub outside: FileAccessArgs,
    /// More arguments for the daemon if it has to be started, split at spaces.
    #[arg(long, value_name = "ARGS", allow_hyphen_values = true, default_value = "")]
    pub daemon_args: String,
    #[command(flatten)]
    pub until: crate::wait::ReadyWaitArgs,
    /// Format of the changes.
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

/// Stop all vnets, the mux and the daemon. Specs stay stored.
///
/// If a service manager runs the daemon, it continues with nothing up.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp down --purge")]
pub struct DownArgs {
    /// Forget the stored specs too.
    #[arg(long)]
    pub purge: bool,
    /// Format of the changes.
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

/// Create or change the objects of spec files. PdP changes only the differences.
#[derive(Debug, clap::Args)]
#[command(group = SpecFiles::some(), after_help = "Example: pdp apply substrate.yaml vnets/ --dry-run\n         \
                        pdp apply red.yaml --only r1,r2\n         \
                        generate | pdp apply -")]
pub struct ApplyArgs {
    #[command(flatten)]
    pub files: SpecFiles,
    #[command(flatten)]
    pub outside: FileAccessArgs,
    /// Apply only these nodes of the files' vnets, with the links between them and existing nodes.
    #[arg(long, value_name = "NODE", value_delimiter = ',', num_args = 1)]
    pub only: Vec<String>,
    /// Only print what would change.
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub until: crate::wait::ReadyWaitArgs,
    /// Format of the changes.
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

/// Stop and forget vnets or some of their nodes; forget tenants or the substrate.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example: pdp delete red blue\n         pdp delete red --only r1,r2\n         pdp delete tenant/acme\n         pdp delete -f examples/ospf.yaml"
)]
pub struct DeleteArgs {
    /// Vnets; `tenant/NAME` for a tenant and its tokens, `substrate` for the substrate.
    #[arg(value_name = "NAME", required_unless_present = "files", add = complete::vnets())]
    pub names: Vec<String>,
    /// Delete only these nodes of the given vnet, with their links.
    #[arg(
        long,
        value_name = "NODE",
        value_delimiter = ',',
        num_args = 1,
        conflicts_with = "files"
    )]
    pub only: Vec<String>,
    /// Delete the objects that these files describe.
    #[arg(short, long = "file", value_name = "FILE", num_args = 1.., conflicts_with = "names")]
    pub files: Vec<PathBuf>,
    /// Format of the changes.
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

/// Show the spec and status of a vnet, one of its nodes, a tenant, or the substrate.
///
/// As JSON or YAML it is the object as applied, with its status. It can be applied again.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp inspect red\n         pdp inspect red/r1\n         \
                        pdp inspect red/r1 -o jsonpath={.phase}")]
pub struct InspectArgs {
    /// VNET, VNET/NODE, `tenant/NAME`, or `substrate`.
    #[arg(value_name = "NAME", add = complete::nodes())]
    pub name: String,
    #[command(flatten)]
    pub shape: Shape,
}

/// Run a command in one or more nodes and return its exit code; of several codes, the highest.
///
/// Options after the command's first word belong to the command. As with ssh, the command reads
/// standard input: in a loop that reads lines, give -n. With several nodes, each line begins with
/// its node's name, and the commands have no standard input.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp exec red/h1 ping -c 3 10.2.0.2\n         \
                        pdp exec -it red/h1 bash\n         \
                        pdp exec red/r1 -- vtysh -c 'show ip ospf neighbor'\n         \
                        pdp exec red/r1,r2 ip route\n         \
                        pdp exec -u www-data -w /srv red/h1 ./update\n         \
                        pdp exec red -l role=spine vtysh -c 'show bgp summary'\n         \
                        pdp exec red --all uptime")]
pub struct ExecArgs {
    /// VNET/NODE, VNET/NODE,NODE..., or VNET with -l or --all.
    #[arg(value_name = "NODES", add = complete::nodes())]
    pub nodes: NodeNames,
    #[command(flatten)]
    pub choice: NodeChoice,
    /// Run in this forwarding guest instead of the control guest.
    #[arg(long, value_name = "N")]
    pub guest: Option<u32>,
    #[command(flatten)]
    pub run_as: RunAsArgs,
    /// Allocate a terminal.
    #[arg(short, long)]
    pub tty: bool,
    /// Pass standard input. This is the default; the flag is for users of docker.
    #[arg(short, long, conflicts_with = "no_stdin")]
    pub interactive: bool,
    /// Do not pass standard input.
    #[arg(short, long)]
    pub no_stdin: bool,
    /// Program and arguments.
    #[arg(trailing_var_arg = true, required = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// Copy one file with its mode into a node or out of it.
///
/// The file gets its name once it is complete; until then, an existing file of that name stays. The
/// copy uses the node's sh and cat, as the node's root.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp cp frr.conf red/r1:/tmp\n         \
                        pdp cp red/h1:/tmp/trace.pcap .\n         \
                        generate | pdp cp - red/h1:/tmp/input\n         \
                        pdp cp red/h1:/var/log/daemon.log - | less\n\n\
                        Directories: tar c DIR | pdp exec red/h1 tar x -C /tmp")]
pub struct CpArgs {
    /// VNET/NODE:PATH, a local file (with ./ before a name that looks like a file in a node), or -
    /// for standard input.
    #[arg(value_name = "FROM", value_parser = OsStringValueParser::new().map(CopyLocation::of))]
    pub from: CopyLocation,
    /// Same forms, or a directory; - for standard output.
    #[arg(value_name = "TO", value_parser = OsStringValueParser::new().map(CopyLocation::of))]
    pub to: CopyLocation,
    /// Largest file to copy from a node, like 20Gi. Guards against a node that sends without end.
    /// Not for standard output.
    #[arg(long, value_name = "BYTES", default_value = "1Gi")]
    pub max_size: Bytes,
}

/// Open a shell in a node: bash if the node has it, or else sh.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp shell red/r1\n         pdp shell -u bird -w /etc/bird red/r1")]
pub struct ShellArgs {
    /// VNET/NODE.
    #[arg(value_name = "NODE", add = complete::nodes())]
    pub name: NodeName,
    /// Open it in this forwarding guest instead of the control guest.
    #[arg(long, value_name = "N")]
    pub guest: Option<u32>,
    #[command(flatten)]
    pub run_as: RunAsArgs,
}

/// User and directory that a command runs with.
#[derive(Debug, clap::Args)]
pub struct RunAsArgs {
    /// Run as this user of the node, by name or number [default: root].
    #[arg(short, long, value_name = "USER[:GROUP]", conflicts_with = "guest")]
    pub user: Option<String>,
    /// Run in this directory of the node.
    #[arg(short, long, value_name = "DIR", conflicts_with = "guest")]
    pub workdir: Option<String>,
}

/// Print the log of the daemon, the mux, a guest or a helper.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp logs -f\n         pdp logs red/r1 --tail 50\n         \
                        pdp logs red/r1 --guest 0\n         pdp logs red/r1 --helper mirror")]
pub struct LogsArgs {
    /// `daemon`, `mux`, or VNET/NODE for its control guest.
    #[arg(value_name = "NAME", default_value = "daemon", add = complete::nodes())]
    pub name: String,
    /// Print the log of this forwarding guest of the node.
    #[arg(long, value_name = "N", conflicts_with = "helper")]
    pub guest: Option<u32>,
    /// Print the log of this helper of the node.
    #[arg(long, value_enum)]
    pub helper: Option<HelperName>,
    /// Continue with new lines as they are written.
    #[arg(short, long)]
    pub follow: bool,
    /// Print only this many of the last lines.
    #[arg(long, value_name = "LINES")]
    pub tail: Option<u64>,
}

/// A helper of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HelperName {
    /// Passes frames between the mux and the node's interfaces.
    Tap,
    /// Passes routes to the forwarding guests.
    Mirror,
    /// Connects the node beside its networks and serves its published ports.
    Management,
}

/// Take a link down or up, or change its rate, queue, delay, loss and so on while frames are under
/// way.
///
/// Carrier follows at both ends. A link that is down drops all frames, counted as `link-down`. With
/// --silent both ends keep their carrier, as if a switch in between failed; only protocols that
/// probe the link (BFD, hellos of a routing protocol) notice. `set` changes the stored spec like an
/// apply. Waiting frames are neither lost nor reordered. Between routers of kind kernel, a link
/// with a delay, a queue and the like goes through the mux; any other stays in the kernel. A change
/// from one to the other restarts both routers, and `set` refuses it without --restart.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp link down red/r1-r2\n         \
                        pdp link down red/r1-r2 --silent\n         pdp link up red/r1:eth0\n         \
                        pdp link set red/r1-r2 delay=80ms jitter=5ms loss=0.1%\n         \
                        pdp link set red/r1-r2 --at r1:eth0 rate=10Mbps loss=")]
pub struct LinkArgs {
    #[arg(value_enum)]
    pub state: LinkState,
    /// VNET/LINK, or VNET/NODE:PORT for the link of a port.
    #[arg(value_name = "LINK", add = complete::links())]
    pub name: LinkName,
    /// With `set`: keys and values as in a link's spec, like delay=20ms loss=0.1% rate=10Mbps. A
    /// plain number is milliseconds, percent, frames (queue) or bits per second. `KEY=` restores
    /// the key's default.
    #[arg(value_name = "KEY=VALUE", value_parser = key_value)]
    pub keys: Vec<(String, Option<String>)>,
    /// With `set`: only at this end.
    #[arg(long, value_name = "NODE:PORT|external:NAME")]
    pub at: Option<String>,
    /// With `set`: permit a change that restarts routers.
    #[arg(long)]
    pub restart: bool,
    /// With `down`: keep the carrier of both ends.
    #[arg(long)]
    pub silent: bool,
}

/// Show the MAC addresses that an Ethernet segment (a link with more than two ends) has learned.
///
/// Each is listed with the end that last received a frame from it and the seconds since. The
/// segment forgets an address after 300 s without a frame from it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp fdb red/lan\n         pdp fdb red/lan --clear")]
pub struct FdbArgs {
    /// VNET/LINK, or VNET/NODE:PORT for the link of a port.
    #[arg(value_name = "LINK", add = complete::links())]
    pub name: LinkName,
    /// Make the segment forget them.
    #[arg(long)]
    pub clear: bool,
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LinkState {
    Down,
    Up,
    Set,
}

/// Parses `KEY=VALUE` or `KEY=`.
fn key_value(text: &str) -> Result<(String, Option<String>), String> {
    let (key, value) = text.split_once('=').ok_or("write it as KEY=VALUE, like delay=20ms")?;
    Ok((key.into(), (!value.is_empty()).then(|| value.into())))
}

/// Change the number of a running router's forwarding guests, without loss.
///
/// Sets dataPlane.guests and, if given, dataPlane.power of the stored spec, like an apply. A new
/// guest receives frames once it has all routes. A removed guest first finishes its frames.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp scale red/r1 3\n         \
                        pdp scale red/r1 2 --power 1.5")]
pub struct ScaleArgs {
    /// VNET/ROUTER.
    #[arg(value_name = "ROUTER", add = complete::nodes())]
    pub name: NodeName,
    /// Forwarding guests, 1 to 64.
    #[arg(value_parser = clap::value_parser!(u32).range(1..=pdp_spec::limits::GUESTS_MAX as i64))]
    pub guests: u32,
    /// Total power that the guests are guaranteed. Without it, each guest keeps its current share,
    /// and borrowing guests keep borrowing.
    #[arg(long, value_name = "CORES")]
    pub power: Option<Cores>,
    /// Format of the changes.
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

/// Print counters, and rates between two samples.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp stats red --watch\n         \
                        pdp stats --cycles --watch=10\n         pdp stats --format json")]
pub struct StatsArgs {
    /// Only counters of this vnet.
    #[arg(value_name = "VNET", add = complete::vnets())]
    pub vnet: Option<String>,
    /// Print again and again, with rates, every so many seconds.
    #[arg(short, long, value_name = "SECONDS", num_args = 0..=1, require_equals = true,
        default_missing_value = "1", value_parser = seconds)]
    pub watch: Option<Duration>,
    /// Print once, with the rates of one second.
    #[arg(long, conflicts_with = "watch")]
    pub rates: bool,
    /// Print the cycles per frame of each stage of each mux worker, in one second or in the
    /// interval of --watch.
    /// The mux's workers serve all vnets, so that this goes without VNET.
    #[arg(long, conflicts_with = "vnet")]
    pub cycles: bool,
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

/// Print events as they happen: phases, processes, carrier, links, guests, changes and who
/// requested them.
///
/// Ends with Ctrl-C. If the daemon goes away, the command waits for it. Missed events follow, or a
/// line tells that they are unknown.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp events\n         \
                        pdp events red --since 10m\n         \
                        pdp events --format json | jq -r .event.object")]
pub struct EventsArgs {
    /// Only events of this vnet.
    #[arg(value_name = "VNET")]
    pub vnet: Option<String>,
    /// Begin with the kept events of this long ago and later: a number with s, m, h or d.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub since: Option<Duration>,
    /// Start with a snapshot of the current state.
    #[arg(long, conflicts_with = "since")]
    pub initial: bool,
    /// Seconds between polls for states that are not pushed to the daemon: connected guests, routes
    /// in sync.
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = every)]
    pub every: Duration,
    /// Do not poll for these states.
    #[arg(long)]
    pub no_samples: bool,
    /// Print the events of --since, or else the current state, and end.
    #[arg(long, conflicts_with = "no_samples")]
    pub once: bool,
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

/// Show vnets with their rates, CPU, memory and events on one screen, continuously.
///
/// Keys: s sort, r reverse, / filter, p pause, Enter the ports and guests of a vnet, Esc back, ?
/// help, q quit.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp top\n         \
                        pdp top red\n         \
                        pdp top --once --format json")]
pub struct TopArgs {
    /// Show the ports and guests of this vnet.
    #[arg(value_name = "VNET")]
    pub vnet: Option<String>,
    /// Seconds between two samples.
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = every)]
    pub every: Duration,
    /// Print the rates between two samples, and end.
    #[arg(long)]
    pub once: bool,
    /// Format of --once.
    #[arg(long, value_enum, default_value_t, requires = "once")]
    pub format: Format,
}

/// Print the routes of a router or host: those of its kernel, or those that a forwarding guest
/// uses.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp routes green/r1 --within 10.0.0.0/8\n         \
                        pdp routes green/h1\n         pdp routes green/r1 --guest 1\n         pdp routes green/r1 --diff\n\n\
                        Exit code of --diff: 0 for equal tables, 1 for different ones.")]
pub struct RoutesArgs {
    /// VNET/NODE.
    #[arg(value_name = "NODE", add = complete::nodes())]
    pub name: NodeName,
    /// Print the routes of this forwarding guest.
    #[arg(long, value_name = "N")]
    pub guest: Option<u32>,
    /// Print only differences between the kernel and the forwarding guest (all guests, unless one
    /// is given).
    #[arg(long)]
    pub diff: bool,
    /// Only routes that cover this prefix or are inside it.
    #[arg(long, value_name = "PREFIX")]
    pub within: Option<IpNet>,
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

/// Follow one packet through the node: its stages, its route, and its verdict.
///
/// Without a filter: the first packet that is not link-local IPv6 multicast, which every kernel
/// sends by itself.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp trace red/r1:eth0\n         \
                        pdp trace red/r1:eth0 -f 'icmp and dst 10.2.0.2'\n         \
                        pdp trace red/r1:eth0 --match 12=0800 --match 30=0a020002")]
pub struct TraceArgs {
    /// VNET/NODE:PORT at which the packet arrives.
    #[arg(value_name = "PORT", add = complete::ports())]
    pub name: VnetPortName,
    /// Only a frame that matches this filter, in libpcap's language (man pcap-filter), '' for any;
    /// compiled by tcpdump.
    #[arg(short, long, value_name = "FILTER")]
    pub filter: Option<String>,
    /// Only a frame with these bytes (hexadecimal) at this offset from its start; may be repeated.
    #[arg(short, long = "match", value_name = "OFFSET=BYTES[/MASK]", value_parser = frame_match)]
    pub matches: Vec<FrameMatch>,
    /// Longest wait for such a packet, 0.1 to 60 seconds.
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = trace_wait)]
    pub wait: Duration,
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

/// Check files and whether they fit together; needs no daemon.
///
/// Without a Substrate among the files, it checks against the default Substrate of this machine. It
/// then assumes that external interfaces and tenants named in the files exist. `pdp apply
/// --dry-run` checks against the actual machine, and that images exist.
#[derive(Debug, clap::Args)]
#[command(group = SpecFiles::some(), after_help = "Example: pdp validate examples/ospf.yaml")]
pub struct ValidateArgs {
    #[command(flatten)]
    pub files: SpecFiles,
    #[command(flatten)]
    pub outside: FileAccessArgs,
}

/// List, pull and remove images of registries and archives that the daemon keeps.
///
/// Applying a spec pulls the images that it names and the daemon lacks. Each tenant has its own
/// images.
#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Example: pdp images\n         pdp images pull frrouting/frr:latest\n         \
                        pdp images rm registry.example/frr:10\n         pdp images prune"
)]
pub struct ImagesArgs {
    #[command(subcommand)]
    pub action: Option<ImagesAction>,
    #[command(flatten)]
    pub list: ImagesListArgs,
}

#[derive(Debug, clap::Args)]
pub struct ImagesListArgs {
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

#[derive(Debug, Subcommand)]
pub enum ImagesAction {
    /// List images: names, digest, size, and the nodes that run on them.
    #[command(visible_alias = "ls")]
    List(ImagesListArgs),
    /// Pull the current image of a name. Running nodes keep theirs; the next `pdp apply` uses the
    /// new one.
    Pull {
        /// Name of the image, in docker's notation.
        #[arg(add = complete::images())]
        image: String,
        /// Pull for this tenant.
        #[arg(long, value_name = "NAME")]
        tenant: Option<String>,
    },
    /// Remove images that no node runs on.
    #[command(visible_alias = "remove")]
    Rm {
        /// Names, digests, or beginnings of these.
        #[arg(required = true, add = complete::images())]
        images: Vec<String>,
        /// Only images of this tenant.
        #[arg(long, value_name = "NAME")]
        tenant: Option<String>,
    },
    /// Remove all images that no node runs on.
    Prune {
        /// Only images of this tenant.
        #[arg(long, value_name = "NAME")]
        tenant: Option<String>,
    },
}

/// Create, list and revoke tokens, which identify clients over TLS. For operators.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example: pdp token create --tenant acme --expires 30d > acme.token\n         \
                        pdp token create --role viewer\n         \
                        pdp token list\n         pdp token revoke 3"
)]
pub struct TokenArgs {
    #[command(subcommand)]
    pub action: TokenAction,
}

#[derive(Debug, Subcommand)]
pub enum TokenAction {
    /// Create a token and print it. Nobody can read it again later.
    Create(TokenCreateArgs),
    /// List tokens, without their secrets.
    List {
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
    /// Revoke a token from the next request on. Its open connections break off within seconds.
    Revoke {
        /// Number of the token.
        id: u64,
    },
}

#[derive(Debug, clap::Args)]
pub struct TokenCreateArgs {
    /// Grant the vnets of this tenant.
    #[arg(long, value_name = "NAME")]
    pub tenant: Option<String>,
    /// Rights of the token [default: tenant with --tenant].
    #[arg(long, value_enum, required_unless_present = "tenant")]
    pub role: Option<RoleName>,
    /// Lifetime: a number with s, m, h or d. Without it: until it is revoked.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub expires: Option<Duration>,
    /// `table` prints the token to standard output and its description to standard error.
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RoleName {
    /// Read and change everything.
    Operator,
    /// Read and change the tenant's own vnets.
    Tenant,
    /// Read the whole node or the tenant's vnets.
    Viewer,
}

/// Print requests, their clients and results, oldest first.
///
/// Operators see all requests, a tenant its own. The result `unfinished` stands for a change in
/// progress, or one in progress when the daemon was killed.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp audit --since 1h\n         \
                        pdp audit --who user:alice --vnet acme.lab\n         \
                        pdp audit --reads -o json --limit 10000")]
pub struct AuditArgs {
    /// Only requests of this long ago and later: a number with s, m, h or d.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub since: Option<Duration>,
    /// Only requests of `user:NAME` or `token:ID`.
    #[arg(long, value_name = "WHO")]
    pub who: Option<String>,
    /// Only requests that name this vnet in their path, or changed it.
    #[arg(long, value_name = "VNET")]
    pub vnet: Option<String>,
    /// List requests that only read something as well.
    #[arg(long)]
    pub reads: bool,
    /// Number of requests, newest first.
    #[arg(long, value_name = "COUNT", default_value_t = pdp_api::AUDIT_LIMIT_DEFAULT,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(pdp_api::AUDIT_LIMIT_MAX)))]
    pub limit: u32,
    #[arg(short = 'o', long, value_enum, default_value_t)]
    pub format: Format,
}

/// Print what this machine can and can't do, and what to install.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp doctor")]
pub struct DoctorArgs {
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

/// Print the versions of this command and of the daemon.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp version")]
pub struct VersionArgs {
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

/// Parses seconds with a fraction, from a tenth to an hour.
pub fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds @ 0.1..=3600.0) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("use seconds from 0.1 to 3600".into()),
    }
}

/// Parses the seconds between two samples of a watch.
fn every(text: &str) -> Result<Duration, String> {
    seconds_within(text, WATCH_EVERY_MS)
}

/// Parses the seconds for which a trace waits.
fn trace_wait(text: &str) -> Result<Duration, String> {
    seconds_within(text, 100..=TRACE_WAIT_MS_MAX)
}

fn seconds_within(text: &str, range_ms: RangeInclusive<u64>) -> Result<Duration, String> {
    let (min, max) = (*range_ms.start() as f64, *range_ms.end() as f64);
    match text.parse::<f64>() {
        Ok(seconds) if (min..=max).contains(&(seconds * 1000.0)) => {
            Ok(Duration::from_secs_f64(seconds))
        }
        _ => Err(format!("use seconds from {} to {}", min / 1000.0, max / 1000.0)),
    }
}

/// Parses a number with `s`, `m`, `h` or `d`, from one second to [`pdp_api::TOKEN_SECONDS_MAX`].
fn duration(text: &str) -> Result<Duration, String> {
    const FORM: &str = "use a number with s, m, h or d, for example 90m or 30d, at most ten years";
    let unit = text.chars().last().ok_or(FORM)?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        'd' => 24 * 3600,
        _ => return Err(FORM.into()),
    };
    let number: u64 = text[..text.len() - 1].parse().map_err(|_| FORM)?;
    match number.checked_mul(seconds) {
        Some(all @ 1..=pdp_api::TOKEN_SECONDS_MAX) => Ok(Duration::from_secs(all)),
        _ => Err(FORM.into()),
    }
}

/// Parses `OFFSET=BYTES[/MASK]`, bytes and mask in hexadecimal.
fn frame_match(text: &str) -> Result<FrameMatch, String> {
    const FORM: &str = "use OFFSET=BYTES[/MASK] with bytes in hexadecimal, for example 12=0800";
    let (offset, bytes) = text.split_once('=').ok_or(FORM)?;
    let (value, mask) = match bytes.split_once('/') {
        Some((value, mask)) => (hex(value).ok_or(FORM)?, Some(hex(mask).ok_or(FORM)?)),
        None => (hex(bytes).ok_or(FORM)?, None),
    };
    let mask = mask.unwrap_or_else(|| vec![0xff; value.len()]);
    if mask.len() != value.len() || value.is_empty() {
        return Err("make the mask as long as the bytes, and neither empty".into());
    }
    Ok(FrameMatch { offset: offset.parse().map_err(|_| FORM)?, value, mask })
}

fn hex(text: &str) -> Option<Vec<u8>> {
    let digits: Vec<u8> =
        text.chars().map(|c| c.to_digit(16).map(|digit| digit as u8)).collect::<Option<_>>()?;
    digits
        .len()
        .is_multiple_of(2)
        .then(|| digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent_and_every_verb_has_an_example() {
        let mut command = Args::command();
        command.build();
        command.clone().debug_assert();
        for verb in command.get_subcommands().filter(|verb| verb.get_name() != "help") {
            let help = verb.get_after_help().map(ToString::to_string).unwrap_or_default();
            let example = format!("pdp {}", verb.get_name());
            assert!(help.contains(&example), "{}: no example", verb.get_name());
            assert!(verb.get_about().is_some(), "{}: not described", verb.get_name());
        }
    }

    #[test]
    fn frame_matches_are_parsed_or_refused() {
        let one = frame_match("12=0800").unwrap();
        assert_eq!((one.offset, one.value, one.mask), (12, vec![8, 0], vec![255, 255]));
        let masked = frame_match("0=0102/ff00").unwrap();
        assert_eq!((masked.value, masked.mask), (vec![1, 2], vec![255, 0]));
        for bad in ["", "12", "x=00", "12=0", "12=zz", "12=", "12=00/ffff", "70000=00"] {
            assert!(frame_match(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn durations_have_a_unit_and_bounds() {
        assert_eq!(duration("90m"), Ok(Duration::from_secs(5400)));
        assert_eq!(duration("30d"), Ok(Duration::from_secs(30 * 24 * 3600)));
        for bad in ["", "s", "0s", "-1s", "5", "1.5h", "999999d", "18446744073709551615d", "1ü"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn seconds_have_bounds() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(trace_wait("60"), Ok(Duration::from_secs(60)));
        assert!(trace_wait("61").is_err_and(|text| text == "use seconds from 0.1 to 60"));
        for bad in ["0", "-1", "nan", "inf", "3601", "x"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }
}
