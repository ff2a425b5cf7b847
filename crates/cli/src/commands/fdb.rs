//! `pdp fdb`: MAC addresses that an Ethernet segment has learned.

use std::process::ExitCode;

use pdp_api::client::Client;

use crate::daemon::complete;
use crate::failure::CliFailure;
use crate::input::name::LinkName;
use crate::output::{Format, print, table};

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

pub async fn fdb(client: &Client, args: FdbArgs) -> Result<ExitCode, CliFailure> {
    let name = &args.name;
    if args.clear {
        client.clear_fdb(&name.vnet, &name.link).await?;
        return Ok(ExitCode::SUCCESS);
    }
    print(args.format, &client.fdb(&name.vnet, &name.link).await?, |entries| {
        let rows = entries
            .iter()
            .map(|entry| [entry.endpoint.clone(), entry.mac.clone(), format!("{} s", entry.age_s)]);
        table(["END", "MAC", "HEARD"], rows.collect())
    })
}
