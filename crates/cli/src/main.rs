//! `pdp`: the command for people and scripts. It is only a client of the daemon's API.
//!
//! Exit codes: 0 done; 1 failed (and: `routes --diff` found differences); 2 wrong usage; 3 no
//! daemon answers. `exec` and `shell` return the command's exit code.

#![forbid(unsafe_code)]

mod args;
mod commands;
mod daemon;
mod failure;
mod input;
mod interrupt;
mod output;
mod tip;

use std::process::ExitCode;

use clap::CommandFactory;

use args::{Args, CliCommand};
use commands::{
    access, capture, change, cp, events, exec, experiment, export, fastpath, fdb, get, images,
    inspect, machine, restart, routes, stats, top, validate, wait, watch,
};
use daemon::complete;
use failure::CliFailure;

fn main() -> ExitCode {
    complete::answer(Args::command);
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

async fn run(args: Args) -> Result<ExitCode, CliFailure> {
    let client = args.connection.client()?;
    match args.command {
        CliCommand::Up(up) => change::up(&client, args.connection.daemon.as_ref(), up).await,
        CliCommand::Down(down) => change::down(&client, down).await,
        CliCommand::Apply(apply) => change::apply(&client, apply).await,
        CliCommand::Export(wanted) => export::export(&client, wanted).await,
        CliCommand::Delete(delete) => change::delete(&client, delete).await,
        CliCommand::Link(link) => change::link(&client, link).await,
        CliCommand::Fdb(fdb) => fdb::fdb(&client, fdb).await,
        CliCommand::Restart(wanted) => restart::restart(&client, wanted).await,
        CliCommand::Scale(scale) => change::scale(&client, scale).await,
        CliCommand::Get(get) => get::get(&client, get).await,
        CliCommand::Inspect(inspect) => inspect::inspect(&client, inspect).await,
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
        CliCommand::Validate(validate) => validate::validate(validate),
        CliCommand::Images(images) => images::images(&client, images).await,
        CliCommand::Token(token) => access::token(&client, token).await,
        CliCommand::Audit(audit) => access::audit(&client, audit).await,
        CliCommand::Doctor(doctor) => machine::doctor(&client, doctor).await,
        CliCommand::Experiment(wanted) => experiment::run(wanted),
        CliCommand::Version(version) => machine::version(&client, version).await,
        CliCommand::Completion { shell } => complete::script(shell),
    }
}
