//! `pdp exec` in several nodes at a time: their output by lines, with the node's name before each.

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;

use pdp_api::client::Client;
use pdp_api::exec::{ExecRequest, Frame, write_frame};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::exec::output;
use crate::failure::Failure;
use crate::name::NodeName;

/// Nodes in which the command runs at a time: half of the sessions that a tenant has where nobody says otherwise.
const AT_ONCE: usize = 8;

/// Longest line that is kept until its end.
const LINE_BYTES_MAX: usize = 64 << 10;

/// Runs a command in each of the nodes, without standard input. The exit code is the highest of all; 1 of one in which
/// it could not be run.
pub async fn run(
    client: &Client,
    vnet: &str,
    nodes: Vec<String>,
    request: ExecRequest,
) -> Result<ExitCode, Failure> {
    let width = nodes.iter().map(String::len).max().unwrap_or_default();
    let (request, turns) = (Arc::new(request), Arc::new(Semaphore::new(AT_ONCE)));
    let mut running = JoinSet::new();
    for node in nodes {
        let (client, request, turns) = (client.clone(), request.clone(), turns.clone());
        let name = NodeName { vnet: vnet.into(), node };
        running.spawn(async move {
            let _turn = turns.acquire().await;
            let mut out = Lines::new(&name.node, width, io::stdout());
            let mut err = Lines::new(&name.node, width, io::stderr());
            let ended = one(&client, &name, &request, &mut out, &mut err).await;
            let code = match ended {
                Err(Failure::Io(error)) => return Err(Failure::Io(error)),
                Err(failure) => {
                    err.write_all(failure.text().0.as_bytes())?;
                    1
                }
                Ok(code) => code,
            };
            out.end()?;
            err.end()?;
            // The low byte is what the system keeps of an exit code.
            Ok(code as u8)
        });
    }
    let mut worst = 0;
    while let Some(ended) = running.join_next().await {
        worst = worst.max(ended.map_err(io::Error::other)??);
    }
    Ok(ExitCode::from(worst))
}

async fn one(
    client: &Client,
    name: &NodeName,
    request: &ExecRequest,
    out: &mut impl Write,
    err: &mut impl Write,
) -> Result<i32, Failure> {
    let connection = client.exec(&name.vnet, &name.node, request).await?;
    let (mut from, mut to) = tokio::io::split(connection);
    write_frame(&mut to, &Frame::StdinEnd).await?;
    output(&mut from, name, out, err).await
}

/// Writes whole lines, each after the name of its node.
struct Lines<W> {
    head: String,
    line: Vec<u8>,
    to: W,
}

impl<W: Write> Lines<W> {
    fn new(node: &str, width: usize, to: W) -> Self {
        Self { head: format!("{node:width$} | "), line: Vec::new(), to }
    }

    /// Writes what is left of a line without its end.
    fn end(&mut self) -> io::Result<()> {
        if self.line.is_empty() { Ok(()) } else { self.line() }
    }

    fn line(&mut self) -> io::Result<()> {
        let mut whole = self.head.clone().into_bytes();
        whole.append(&mut self.line);
        whole.push(b'\n');
        self.to.write_all(&whole)?;
        self.to.flush()
    }
}

impl<W: Write> Write for Lines<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for &byte in bytes {
            if byte != b'\n' {
                self.line.push(byte);
            }
            if byte == b'\n' || self.line.len() >= LINE_BYTES_MAX {
                self.line()?;
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_has_its_node_and_no_line_is_kept_for_ever() {
        let mut written = Vec::new();
        let mut lines = Lines::new("r1", 3, &mut written);
        lines.write_all(b"a\n\nb").unwrap();
        lines.write_all(b"c").unwrap();
        lines.end().unwrap();
        lines.end().unwrap();
        assert_eq!(String::from_utf8_lossy(&written), "r1  | a\nr1  | \nr1  | bc\n");
        let mut long = Vec::new();
        Lines::new("r1", 2, &mut long).write_all(&vec![b'x'; 2 * LINE_BYTES_MAX + 1]).unwrap();
        assert_eq!(long.iter().filter(|byte| **byte == b'\n').count(), 2);
    }
}
