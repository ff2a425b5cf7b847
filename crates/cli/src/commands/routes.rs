//! Route tables of a router or host, printed line by line as they arrive.

use std::io::{self, BufWriter, Write};
use std::process::ExitCode;

use ipnet::IpNet;
use pdp_api::client::Client;
use pdp_api::{NodeStatus, NodeType, RouteEntry, RoutesQuery};

use crate::daemon::complete;
use crate::failure::CliFailure;
use crate::input::name::NodeName;
use crate::output::Format;

/// Print the routes of a router or host: those of its kernel, or those that a forwarding guest
/// uses.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp routes green/r1 --within 10.0.0.0/8\n         \
                        pdp routes green/h1\n         pdp routes green/r1 --guest 1\n         pdp routes green/r1 --diff\n\n\
                        Exit code of --diff: 0 for equal tables, 1 for different ones.")]
pub struct RoutesArgs {
    /// VNET/NODE.
    #[arg(value_name = "NODE", add = complete::nodes())]
    pub name: NodeName,
    /// Print the routes of this forwarding guest.
    #[arg(long, value_name = "N")]
    pub guest: Option<u32>,
    /// Print only differences between the kernel and the forwarding guest (all guests, unless one
    /// is given).
    #[arg(long)]
    pub diff: bool,
    /// Only routes that cover this prefix or are inside it.
    #[arg(long, value_name = "PREFIX")]
    pub within: Option<IpNet>,
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

pub async fn routes(client: &Client, args: RoutesArgs) -> Result<ExitCode, CliFailure> {
    let name = &args.name;
    let node = match args.guest.is_some() || args.diff {
        true => status(client, &args).await?,
        false => None,
    };
    let guests: Vec<Option<u32>> = match (args.guest, args.diff) {
        (None, true) => guests(&node, &args)?.into_iter().map(Some).collect(),
        (guest, _) => vec![guest],
    };
    let mut out = RoutePrinter { out: BufWriter::new(io::stdout().lock()), args: &args, count: 0 };
    for guest in guests {
        let query = RoutesQuery { guest, diff: args.diff, within: args.within };
        client.routes(&name.vnet, &name.node, &query, |row| out.write(guest, &row)).await?;
    }
    let differs = args.diff && out.count > 0;
    out.end()?;
    if let Some(node) = node {
        // Refused routes explain why a guest has fewer. Equal tables do not mean that packets take
        // the same path.
        let refused = node.mirror.and_then(|mirror| mirror.message);
        let conditions = node.conditions.into_iter().map(|condition| condition.message);
        refused.into_iter().chain(conditions).for_each(|note| eprintln!("note: {note}"));
    }
    Ok(if differs { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

async fn status(client: &Client, args: &RoutesArgs) -> Result<Option<NodeStatus>, CliFailure> {
    let vnet = client.vnet(&args.name.vnet).await?;
    Ok(vnet.status.nodes.into_iter().find(|node| node.name == args.name.node))
}

/// Returns the numbers of the router's forwarding guests.
fn guests(node: &Option<NodeStatus>, args: &RoutesArgs) -> Result<Vec<u32>, CliFailure> {
    let guests = node.iter().flat_map(|node| &node.guests).map(|guest| guest.number);
    // The mux's own tables have the guest number 0.
    let engine = node.iter().filter_map(|node| node.engine.as_ref()).map(|_| 0);
    let numbers: Vec<u32> = guests.chain(engine).collect();
    // No route mirror: the kernel forwards by itself.
    let by_kernel = |node: &NodeStatus| node.kind == NodeType::Router && node.mirror.is_none();
    if node.as_ref().is_some_and(by_kernel) {
        eprintln!("note: the kernel forwards with this table; there is no second one to compare");
        return Ok(numbers);
    }
    if numbers.is_empty() {
        return Err(CliFailure::Other(format!(
            "{}/{}: no forwarding guest to compare with; `pdp inspect {0}` lists each node's \
             guests",
            args.name.vnet, args.name.node
        )));
    }
    Ok(numbers)
}

struct RoutePrinter<'a, W: Write> {
    out: W,
    args: &'a RoutesArgs,
    count: u64,
}

impl<W: Write> RoutePrinter<'_, W> {
    fn write(&mut self, guest: Option<u32>, row: &RouteEntry) -> io::Result<()> {
        self.count += 1;
        match self.args.format {
            Format::Json => {
                // One array, whose elements are written as they arrive.
                self.out.write_all(if self.count == 1 { b"[\n" } else { b",\n" })?;
                serde_json::to_writer(&mut self.out, row)?;
                Ok(())
            }
            Format::Yaml => {
                let text = serde_saphyr::to_string(&[row]).map_err(io::Error::other)?;
                self.out.write_all(text.as_bytes())
            }
            Format::Table if self.args.diff => {
                let guest = guest.unwrap_or(0);
                for (mark, side, target) in
                    [('-', "kernel".into(), &row.kernel), ('+', format!("g{guest}"), &row.guest)]
                {
                    if let Some(target) = target {
                        writeln!(self.out, "{mark} {side} {} {target}", row.prefix)?;
                    }
                }
                Ok(())
            }
            Format::Table => {
                let target = row.guest.as_ref().or(row.kernel.as_ref());
                let target = target.map(|target| format!(" {target}")).unwrap_or_default();
                writeln!(self.out, "{}{target}", row.prefix)
            }
        }
    }

    fn end(mut self) -> io::Result<()> {
        match (self.args.format, self.count) {
            (Format::Json, 0) => self.out.write_all(b"[]\n")?,
            (Format::Json, _) => self.out.write_all(b"\n]\n")?,
            (Format::Yaml, 0) => self.out.write_all(b"[]\n")?,
            _ => {}
        }
        self.out.flush()
    }
}
