//! Verbs that change something.

use std::process::ExitCode;

use pdp_api::client::{Client, Error};
use pdp_api::{
    ApplyRequest, ChangeReport, DaemonName, DownRequest, LinkChange, LinkRequest, Phase,
    ProblemKind, ScaleRequest,
};

use crate::args::{ApplyArgs, DeleteArgs, DownArgs, LinkArgs, LinkState, ScaleArgs, UpArgs};
use crate::failure::CliFailure;
use crate::files::AllowedFiles;
use crate::name::LinkName;
use crate::output::{self, ProgressDisplay};
use crate::{daemon, files, wait};

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
        Err(Error::NoDaemon { .. }) => daemon::start(client, name, &args.daemon_args).await?,
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
        daemon::wait_gone(client).await?;
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
