//! Verbs that change something.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::ValueEnum;
use pdp_api::client::{Client, Error};
use pdp_api::{
    ApplyRequest, ChangeReport, DaemonName, DownRequest, LinkChange, LinkRequest, Phase,
    ProblemKind, ScaleRequest,
};
use pdp_spec::units::Cores;

use super::wait;
use crate::daemon::{complete, launch};
use crate::failure::CliFailure;
use crate::input::files::{self, AllowedFiles, FileAccessArgs, SpecFiles};
use crate::input::name::{LinkName, NodeName};
use crate::output::{self, Format, ProgressDisplay};

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
    pub until: wait::ReadyWaitArgs,
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
    pub until: wait::ReadyWaitArgs,
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

pub async fn apply(client: &Client, args: ApplyArgs) -> Result<ExitCode, CliFailure> {
    let named = AllowedFiles::by(args.outside.allow_files_outside);
    let files = files::read(&args.files.paths(), named)?;
    let vnets = vnets(&files);
    let request = ApplyRequest { files, dry_run: args.dry_run, only: args.only };
    let report = apply_files(client, request).await?;
    let printed = output::report(args.format, &report)?;
    if let Some(time) = args.until.wait.filter(|_| !args.dry_run) {
        wait::until_ready(client, vnets, time).await?;
    }
    Ok(printed)
}

/// Names of the files' virtual networks. Empty if the files are unreadable; then the daemon reports
/// it.
fn vnets(files: &[pdp_spec::SourceFile]) -> Vec<String> {
    let names = files::objects(files).unwrap_or_default().into_iter();
    names.filter(|name| name != "substrate" && !name.starts_with("tenant/")).collect()
}

async fn apply_files(client: &Client, request: ApplyRequest) -> Result<ChangeReport, CliFailure> {
    let mut shown = ProgressDisplay::new();
    let applied = client.apply(&request, |step| shown.step(step)).await;
    applied.map_err(|error| CliFailure::from(error).about(&request.files))
}

pub async fn up(
    client: &Client,
    name: Option<&DaemonName>,
    args: UpArgs,
) -> Result<ExitCode, CliFailure> {
    // Files are read before anything is started.
    let files =
        files::read(&args.files.paths(), AllowedFiles::by(args.outside.allow_files_outside))?;
    match client.version().await {
        Ok(_) => {}
        Err(Error::NoDaemon { .. }) => launch::start(client, name, &args.daemon_args).await?,
        Err(error) => return Err(error.into()),
    }
    let started = {
        let mut shown = ProgressDisplay::new();
        client.up(|step| shown.step(step)).await
    };
    let mut report = match started {
        // If a stored network fails, the files are applied all the same. They may correct that
        // network.
        Err(Error::Problem(problem)) if !files.is_empty() && !is_refusal(problem.kind) => {
            eprintln!("warning: {problem}");
            ChangeReport::default()
        }
        started => started?,
    };
    let mut vnets = vnets(&files);
    if files.is_empty() && args.until.wait.is_some() {
        // Deleted vnets will not become ready.
        let stays = client.vnets().await?.into_iter().filter(|it| it.phase != Phase::Removing);
        vnets.extend(stays.map(|vnet| vnet.name));
    }
    if !files.is_empty() {
        let request = ApplyRequest { files, ..Default::default() };
        report.changes.extend(apply_files(client, request).await?.changes);
    }
    let printed = output::report(args.format, &report)?;
    if let Some(time) = args.until.wait {
        wait::until_ready(client, vnets, time).await?;
    }
    Ok(printed)
}

/// True if the daemon refused the client itself, and not a stored object.
fn is_refusal(kind: ProblemKind) -> bool {
    matches!(kind, ProblemKind::Forbidden | ProblemKind::Unauthorized)
}

pub async fn down(client: &Client, args: DownArgs) -> Result<ExitCode, CliFailure> {
    let report = {
        let mut shown = ProgressDisplay::new();
        let request = DownRequest { purge: args.purge, exit: true };
        client.down(&request, |step| shown.step(step)).await?
    };
    if report.exits {
        launch::wait_gone(client).await?;
    }
    output::report(args.format, &report)
}

pub async fn delete(client: &Client, args: DeleteArgs) -> Result<ExitCode, CliFailure> {
    let names = if args.files.is_empty() {
        args.names
    } else {
        files::objects(&files::read(&args.files, AllowedFiles::Any)?)?
    };
    let mut all = ChangeReport::default();
    let mut shown = ProgressDisplay::new();
    if !args.only.is_empty() {
        let [vnet] = &names[..] else {
            return Err(CliFailure::Usage(
                "--only needs exactly one vnet: pdp delete VNET --only NODE".into(),
            ));
        };
        all = client.delete_nodes(vnet, &args.only, |step| shown.step(step)).await?;
        drop(shown);
        return output::report(args.format, &all);
    }
    let mut failed: Option<CliFailure> = None;
    for name in names {
        let deleted = match name.as_str() {
            "substrate" => client.delete_substrate(|step| shown.step(step)).await,
            name if name.starts_with("tenant/") => {
                let tenant = &name["tenant/".len()..];
                client.delete_tenant(tenant, |step| shown.step(step)).await
            }
            vnet => client.delete_vnet(vnet, |step| shown.step(step)).await,
        };
        match deleted {
            Ok(report) => all.changes.extend(report.changes),
            // Continue with the others.
            Err(error) => {
                if let Some(before) = failed.replace(error.into()) {
                    eprint!("{}", before.text().0);
                }
            }
        }
    }
    drop(shown);
    if failed.is_none() || !all.changes.is_empty() {
        output::report(args.format, &all)?;
    }
    failed.map_or(Ok(ExitCode::SUCCESS), Err)
}

pub async fn link(client: &Client, args: LinkArgs) -> Result<ExitCode, CliFailure> {
    let LinkName { vnet, link } = &args.name;
    let is_set = args.state == LinkState::Set;
    let of_set = args.at.is_some() || args.restart;
    if is_set == args.keys.is_empty() || !is_set && of_set || is_set && args.silent {
        let problem = "only `link set` takes KEY=VALUE, --at and --restart, and only `link down` \
                       takes --silent";
        return Err(CliFailure::Usage(problem.into()));
    }
    let report = if is_set {
        let set = args.keys.into_iter().collect();
        let request = LinkChange { set, at: args.at, restart: args.restart };
        client.change_link(vnet, link, &request).await?
    } else {
        let request = LinkRequest { up: args.state == LinkState::Up, silent: args.silent };
        client.set_link(vnet, link, request).await?
    };
    output::report(Default::default(), &report)
}

pub async fn scale(client: &Client, args: ScaleArgs) -> Result<ExitCode, CliFailure> {
    let request =
        ScaleRequest { guests: args.guests, power_millicores: args.power.map(|power| power.0) };
    let report = {
        let mut shown = ProgressDisplay::new();
        let name = &args.name;
        client.scale(&name.vnet, &name.node, &request, |step| shown.step(step)).await?
    };
    output::report(args.format, &report)
}
