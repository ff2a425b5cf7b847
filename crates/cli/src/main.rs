//! `pdp`: the command for people and scripts. A client of the daemon's API, and nothing else.
//!
//! Exit codes: 0 done; 1 failed (and: `routes --diff` found differences); 2 wrong usage; 3 no
//! daemon answers. `exec` and `shell` pass the code of the command on.

#![forbid(unsafe_code)]

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
mod who;

use std::path::Path;
use std::process::ExitCode;

use pdp_api::DaemonName;
use pdp_api::client::Client;

use args::{Args, Command};
use failure::Failure;

fn main() -> ExitCode {
    complete::answer();
    let args = match Args::read() {
        Ok(args) => args,
        Err(error) => match tip::tip(&error) {
            Some(tip) => return Failure::Usage(tip).report(),
            None => error.exit(),
        },
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return Failure::from(error).report(),
    };
    let result = runtime.block_on(run(args));
    // A thread that waits for standard input must not hold the exit up.
    runtime.shutdown_background();
    match result {
        Ok(code) => code,
        Err(failure) => failure.report(),
    }
}

/// A client of the daemon that the arguments name, as whom they say.
fn client(args: &Args) -> Result<Client, Failure> {
    let read = |path: &Path| {
        std::fs::read(path).map_err(|error| Failure::Other(format!("{}: {error}", path.display())))
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

async fn run(args: Args) -> Result<ExitCode, Failure> {
    let client = client(&args)?;
    match args.command {
        Command::Up(up) => change::up(&client, args.daemon.as_ref(), up).await,
        Command::Down(down) => change::down(&client, down).await,
        Command::Apply(apply) => change::apply(&client, apply).await,
        Command::Export(wanted) => export::export(&client, wanted).await,
        Command::Delete(delete) => change::delete(&client, delete).await,
        Command::Link(link) => change::link(&client, link).await,
        Command::Fdb(fdb) => show::fdb(&client, fdb).await,
        Command::Restart(wanted) => restart::restart(&client, wanted).await,
        Command::Scale(scale) => change::scale(&client, scale).await,
        Command::Get(get) => get::get(&client, get).await,
        Command::Inspect(inspect) => show::inspect(&client, inspect).await,
        Command::Wait(wait) => wait::wait(&client, wait).await,
        Command::Exec(exec) => exec::exec(&client, exec).await,
        Command::Cp(cp) => cp::cp(&client, cp).await,
        Command::Shell(shell) => exec::shell(&client, shell).await,
        Command::Logs(logs) => watch::logs(&client, logs).await,
        Command::Capture(capture) => capture::capture(&client, capture).await,
        Command::Trace(trace) => watch::trace(&client, trace).await,
        Command::Stats(stats) => stats::stats(&client, stats).await,
        Command::Events(wanted) => events::events(&client, wanted).await,
        Command::Top(wanted) => top::top(&client, wanted).await,
        Command::Fastpath(wanted) => fastpath::fastpath(&client, wanted).await,
        Command::Routes(routes) => routes::routes(&client, routes).await,
        Command::Validate(validate) => files::validate(validate),
        Command::Images(images) => images::images(&client, images).await,
        Command::Token(token) => who::token(&client, token).await,
        Command::Audit(audit) => who::audit(&client, audit).await,
        Command::Doctor(doctor) => show::doctor(&client, doctor).await,
        Command::Experiment(wanted) => experiment::run(wanted),
        Command::Version(version) => show::version(&client, version).await,
        Command::Completion { shell } => complete::script(shell),
    }
}
