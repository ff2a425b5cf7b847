//! `pdp`: the command for people and scripts. It is only a client of the daemon's API.
//!
//! Exit codes: 0 done; 1 failed (and: `routes --diff` found differences); 2 wrong usage; 3 no
//! daemon answers. `exec` and `shell` return the command's exit code.

#![forbid(unsafe_code)]

mod access;
mod args;
mod capture;
mod change;
mod complete;
mod cp;
mod daemon;
mod events;
mod exec;
mod experiment;
mod export;
mod failure;
mod fastpath;
mod files;
mod filter;
mod follow;
mod get;
mod images;
mod many;
mod name;
mod nodes;
mod output;
mod pcap;
mod restart;
mod routes;
mod selector;
mod shape;
mod show;
mod stats;
mod tip;
mod top;
mod wait;
mod watch;

use std::path::Path;
use std::process::ExitCode;

use pdp_api::DaemonName;
use pdp_api::client::Client;

use args::{Args, CliCommand};
use failure::CliFailure;

fn main() -> ExitCode {
    complete::answer();
    let args = match Args::read() {
        Ok(args) => args,
        Err(error) => match tip::tip(&error) {
            Some(tip) => return CliFailure::Usage(tip).report(),
            None => error.exit(),
        },
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return CliFailure::from(error).report(),
    };
    let result = runtime.block_on(run(args));
    // A thread that waits for standard input must not delay the end of the process.
    runtime.shutdown_background();
    match result {
        Ok(code) => code,
        Err(failure) => failure.report(),
    }
}

/// Returns a client for the daemon and the identity that the arguments select.
fn client(args: &Args) -> Result<Client, CliFailure> {
    let read = |path: &Path| {
        std::fs::read(path)
            .map_err(|error| CliFailure::Other(format!("{}: {error}", path.display())))
    };
    let client = match &args.server {
        Some(server) => Client::over_tls(server, &read(&args.ca)?)?,
        None => {
            let named = || DaemonName::socket(args.daemon.as_ref());
            Client::new(args.socket.clone().unwrap_or_else(named))
        }
    };
    let token = match (&args.token_file, std::env::var("PDP_TOKEN")) {
        (Some(path), _) => Some(String::from_utf8_lossy(&read(path)?).into_owned()),
        (None, Ok(token)) => Some(token),
        (None, Err(_)) => None,
    };
    let token = token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty());
    Ok(match token {
        Some(token) => client.with_token(token),
        None => client,
    })
}

async fn run(args: Args) -> Result<ExitCode, CliFailure> {
    let client = client(&args)?;
    match args.command {
        CliCommand::Up(up) => change::up(&client, args.daemon.as_ref(), up).await,
        CliCommand::Down(down) => change::down(&client, down).await,
        CliCommand::Apply(apply) => change::apply(&client, apply).await,
        CliCommand::Export(wanted) => export::export(&client, wanted).await,
        CliCommand::Delete(delete) => change::delete(&client, delete).await,
        CliCommand::Link(link) => change::link(&client, link).await,
        CliCommand::Fdb(fdb) => show::fdb(&client, fdb).await,
        CliCommand::Restart(wanted) => restart::restart(&client, wanted).await,
        CliCommand::Scale(scale) => change::scale(&client, scale).await,
        CliCommand::Get(get) => get::get(&client, get).await,
        CliCommand::Inspect(inspect) => show::inspect(&client, inspect).await,
        CliCommand::Wait(wait) => wait::wait(&client, wait).await,
        CliCommand::Exec(exec) => exec::exec(&client, exec).await,
        CliCommand::Cp(cp) => cp::cp(&client, cp).await,
        CliCommand::Shell(shell) => exec::shell(&client, shell).await,
        CliCommand::Logs(logs) => watch::logs(&client, logs).await,
        CliCommand::Capture(capture) => capture::capture(&client, capture).await,
        CliCommand::Trace(trace) => watch::trace(&client, trace).await,
        CliCommand::Stats(stats) => stats::stats(&client, stats).await,
        CliCommand::Events(wanted) => events::events(&client, wanted).await,
        CliCommand::Top(wanted) => top::top(&client, wanted).await,
        CliCommand::Fastpath(wanted) => fastpath::fastpath(&client, wanted).await,
        CliCommand::Routes(routes) => routes::routes(&client, routes).await,
        CliCommand::Validate(validate) => files::validate(validate),
        CliCommand::Images(images) => images::images(&client, images).await,
        CliCommand::Token(token) => access::token(&client, token).await,
        CliCommand::Audit(audit) => access::audit(&client, audit).await,
        CliCommand::Doctor(doctor) => show::doctor(&client, doctor).await,
        CliCommand::Experiment(wanted) => experiment::run(wanted),
        CliCommand::Version(version) => show::version(&client, version).await,
        CliCommand::Completion { shell } => complete::script(shell),
    }
}
