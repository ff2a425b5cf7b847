//! The machine, and the versions of both sides.

use std::process::ExitCode;

use pdp_api::client::{Client, Error};
use pdp_api::{MachineCheck, MachineCheckState};
use serde::Serialize;

use crate::daemon::launch;
use crate::failure::CliFailure;
use crate::output::{Format, print, table};

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

pub async fn doctor(client: &Client, args: DoctorArgs) -> Result<ExitCode, CliFailure> {
    let checks = match client.doctor().await {
        Err(Error::NoDaemon { .. }) => launch::checks()?,
        checks => checks?,
    };
    let missing = checks.iter().any(|check| check.state == MachineCheckState::Missing);
    let printed = print(args.format, &checks, |checks| {
        table(["CHECK", "STATE", "FOUND", "HINT"], checks.iter().map(check).collect())
    })?;
    Ok(if missing { ExitCode::FAILURE } else { printed })
}

fn check(check: &MachineCheck) -> [String; 4] {
    let state = match check.state {
        MachineCheckState::Ok => "ok",
        MachineCheckState::Warn => "warn",
        MachineCheckState::Missing => "missing",
    };
    [check.name.clone(), state.into(), check.detail.clone(), check.hint.clone().unwrap_or_default()]
}

/// Versions of both sides; `daemon` is absent if none answers.
#[derive(Serialize)]
struct Versions {
    client: &'static str,
    daemon: Option<pdp_api::DaemonVersion>,
}

pub async fn version(client: &Client, args: VersionArgs) -> Result<ExitCode, CliFailure> {
    let daemon = match client.version().await {
        Ok(version) => Some(version),
        Err(Error::NoDaemon { .. }) => None,
        Err(error) => return Err(error.into()),
    };
    let versions = Versions { client: env!("CARGO_PKG_VERSION"), daemon };
    print(args.format, &versions, |versions| {
        let daemon = match &versions.daemon {
            Some(daemon) => format!("{} (pid {})", daemon.version, daemon.pid),
            None => "none answers".into(),
        };
        let listens = versions.daemon.as_ref().and_then(|daemon| daemon.listens.as_ref());
        let listens = listens.map(|at| {
            format!("TLS {} certificate SHA-256 {}\n", at.address, at.certificate_sha256)
        });
        format!("pdp {}\npdpd {daemon}\n{}", versions.client, listens.unwrap_or_default())
    })
}
