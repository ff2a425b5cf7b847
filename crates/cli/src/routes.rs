//! Route tables of a router or host, one line a route, as they come.

use std::io::{self, BufWriter, Write};
use std::process::ExitCode;

use pdp_api::client::Client;
use pdp_api::{DataPlane, NodeStatus, RouteRow, RoutesQuery};

use crate::args::{Format, Routes};
use crate::failure::Failure;

pub async fn routes(client: &Client, args: Routes) -> Result<ExitCode, Failure> {
    let name = &args.name;
    let node = match args.guest.is_some() || args.diff {
        true => status(client, &args).await?,
        false => None,
    };
    let guests: Vec<Option<u32>> = match (args.guest, args.diff) {
        (None, true) => guests(&node, &args)?.into_iter().map(Some).collect(),
        (guest, _) => vec![guest],
    };
    let mut out = Rows { out: BufWriter::new(io::stdout().lock()), args: &args, count: 0 };
    for guest in guests {
        let query = RoutesQuery { guest, diff: args.diff, within: args.within };
        client.routes(&name.vnet, &name.node, &query, |row| out.write(guest, &row)).await?;
    }
    let differ = args.diff && out.count > 0;
    out.end()?;
    if let Some(node) = node {
        // Routes that were refused are why a guest has fewer; and tables that are equal do not mean that
        // packets go the same way.
        let refused = node.mirror.and_then(|mirror| mirror.message);
        let conditions = node.conditions.into_iter().map(|condition| condition.message);
        refused.into_iter().chain(conditions).for_each(|note| eprintln!("note: {note}"));
    }
    Ok(if differ { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

async fn status(client: &Client, args: &Routes) -> Result<Option<NodeStatus>, Failure> {
    let vnet = client.vnet(&args.name.vnet).await?;
    Ok(vnet.status.nodes.into_iter().find(|node| node.name == args.name.node))
}

/// Numbers of the router's forwarding guests.
fn guests(node: &Option<NodeStatus>, args: &Routes) -> Result<Vec<u32>, Failure> {
    let guests = node.iter().flat_map(|node| &node.guests).map(|guest| guest.number);
    // The mux's own tables are those of guest 0.
    let engine = node.iter().filter_map(|node| node.engine.as_ref()).map(|_| 0);
    let numbers: Vec<u32> = guests.chain(engine).collect();
    if node.as_ref().is_some_and(|node| node.data_plane == Some(DataPlane::Kernel)) {
        eprintln!("note: the kernel forwards by this table itself; there is no other to compare");
        return Ok(numbers);
    }
    if numbers.is_empty() {
        return Err(Failure::Other(format!(
            "{}/{}: no forwarding guest to compare with; `pdp inspect {0}` lists what there is",
            args.name.vnet, args.name.node
        )));
    }
    Ok(numbers)
}

struct Rows<'a, W: Write> {
    out: W,
    args: &'a Routes,
    count: u64,
}

impl<W: Write> Rows<'_, W> {
    fn write(&mut self, guest: Option<u32>, row: &RouteRow) -> io::Result<()> {
        self.count += 1;
        match self.args.format {
            Format::Json => {
                // One array, whose parts are written as they come.
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
