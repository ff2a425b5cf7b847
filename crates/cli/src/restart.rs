//! `pdp restart`.

use std::process::ExitCode;

use pdp_api::RestartRequest;
use pdp_api::client::Client;

use crate::args::Format;
use crate::failure::Failure;
use crate::nodes::{Choice, Nodes};
use crate::output::{self, Shown};

/// Start nodes anew: their control guest or host, with files and commands as the spec has them.
///
/// What runs there is killed, and what it wrote is gone. Forwarding guests stay and go on with the routes they have until
/// routing software says others; links keep their state, with the carrier of their other ends. With --guest a forwarding
/// guest is started anew instead; frames that it holds are lost. Neither counts as a failure.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp restart red/r1\n         \
                        pdp restart red/r1 --guest 0\n         \
                        pdp restart red -l role=spine")]
pub struct Restart {
    /// VNET/NODE, VNET/NODE,NODE..., or VNET with -l or --all.
    #[arg(value_name = "NODES", add = crate::complete::nodes())]
    pub nodes: Nodes,
    #[command(flatten)]
    pub choice: Choice,
    /// This forwarding guest of each, instead of the control guest.
    #[arg(long, value_name = "N")]
    pub guest: Option<u32>,
    /// How to print the changes.
    #[arg(short = 'o', long, value_enum, default_value_t)]
    pub format: Format,
}

pub async fn restart(client: &Client, args: Restart) -> Result<ExitCode, Failure> {
    let nodes = args.nodes.chosen(client, &args.choice).await?;
    let request = RestartRequest { nodes, guest: args.guest };
    let report = {
        let mut shown = Shown::new();
        client.restart(&args.nodes.vnet, &request, |step| shown.step(step)).await?
    };
    output::report(args.format, &report)
}
