//! The built-in IPv4/IPv6 router of a forwarding guest.

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use pdp_guest::router::RouterProgram;
use pdp_guest::{GuestOptions, environment};

const ROUTES: &str = "/run/pdp/routes/routes.sock";

/// Forwards IPv4 and IPv6 for a vrouter, using the routes of its control guest.
#[derive(Debug, Parser)]
#[command(version)]
struct RouterArguments {
    #[command(flatten)]
    guest: GuestOptions,
    /// Socket of the route mirror [default: PDP_ROUTES of the environment, or
    /// /run/pdp/routes/routes.sock]
    #[arg(long)]
    routes: Option<PathBuf>,
    /// Number of this guest in its vrouter [default: PDP_GUEST of the environment, or 0]
    #[arg(long)]
    number: Option<u32>,
}

fn main() -> ExitCode {
    let RouterArguments { guest, routes, number } = RouterArguments::parse();
    let routes = routes.or_else(|| environment("PDP_ROUTES")).unwrap_or_else(|| ROUTES.into());
    let number = number.or_else(|| environment("PDP_GUEST")).unwrap_or(0);
    let router = RouterProgram::new(&routes, number);
    match pdp_guest::run(&guest, "pdp-router", router) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let cause = std::error::Error::source(&error);
            eprintln!("pdp-router: {error}{}", cause.map_or(String::new(), |c| format!(": {c}")));
            ExitCode::FAILURE
        }
    }
}
