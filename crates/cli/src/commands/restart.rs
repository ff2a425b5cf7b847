//! `pdp restart`.

use std::process::ExitCode;

use pdp_api::RestartRequest;
use pdp_api::client::Client;

use crate::failure::CliFailure;
use crate::input::nodes::{NodeChoice, NodeNames};
use crate::output::{self, Format, ProgressDisplay};

/// Restart nodes: their control guest or host, with the spec's files and commands.
///
/// Processes there are killed, and files written there are lost. Forwarding guests continue with
/// their routes until routing software changes them. Links keep their state, with the carrier of
/// their other ends. With --guest, a forwarding guest restarts instead, and its frames are lost.
/// Neither counts as a failure.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp restart red/r1\n         \
                        pdp restart red/r1 --guest 0\n         \
                        pdp restart red -l role=spine")]
pub struct RestartArgs {
    /// VNET/NODE, VNET/NODE,NODE..., or VNET with -l or --all.
    #[arg(value_name = "NODES", add = crate::daemon::complete::nodes())]
    pub nodes: NodeNames,
    #[command(flatten)]
    pub choice: NodeChoice,
    /// Restart this forwarding guest of each node, instead of the control guest.
    #[arg(long, value_name = "N")]
    pub guest: Option<u32>,
    /// Format of the changes.
    #[arg(short = 'o', long, value_enum, default_value_t)]
    pub format: Format,
}

pub async fn restart(client: &Client, args: RestartArgs) -> Result<ExitCode, CliFailure> {
    let nodes = args.nodes.chosen(client, &args.choice).await?;
    let request = RestartRequest { nodes, guest: args.guest };
    let report = {
        let mut shown = ProgressDisplay::new();
        client.restart(&args.nodes.vnet, &request, |step| shown.step(step)).await?
    };
    output::report(args.format, &report)
}
