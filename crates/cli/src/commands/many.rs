//! `pdp exec` in several nodes at a time: their output line by line, each after the node's name.
//!
//! Lines are written node by node, in the order in which the nodes are named. If a command delays
//! the others' lines for a second, each line is written as it arrives from then on.

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pdp_api::client::Client;
use pdp_api::exec::{ExecFrame, ExecRequest, write_frame};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use crate::daemon::node_command::output;
use crate::failure::CliFailure;
use crate::input::name::NodeName;

/// Largest number of nodes that run the command at a time: half of the default limit of a tenant's
/// sessions.
const AT_ONCE: usize = 8;

/// Longest line that is kept until its end, bytes.
const LINE_BYTES_MAX: usize = 64 << 10;

/// Longest time that one node delays the lines of others.
const CURRENT_TIME: Duration = Duration::from_secs(1);

/// Largest size of all waiting lines, bytes.
const WAITING_BYTES_MAX: usize = 16 << 20;

/// Runs a command in each of the nodes, without standard input. Returns the highest exit code; a
/// command that could not be run counts as 1.
pub async fn run(
    client: &Client,
    vnet: &str,
    nodes: Vec<String>,
    request: ExecRequest,
) -> Result<ExitCode, CliFailure> {
    let width = nodes.iter().map(String::len).max().unwrap_or_default();
    let (request, places) = (Arc::new(request), Arc::new(Semaphore::new(AT_ONCE)));
    let order = OutputOrder::new(nodes.len());
    let mut running = JoinSet::new();
    for (number, node) in nodes.into_iter().enumerate() {
        let (client, request, places) = (client.clone(), request.clone(), places.clone());
        let order = order.clone();
        let name = NodeName { vnet: vnet.into(), node };
        running.spawn(async move {
            let _place = places.acquire().await;
            let to = |stream| PrefixedWriter::new(&name.node, width, order.writer(number, stream));
            let (mut out, mut err) = (to(OutputStream::Out), to(OutputStream::Err));
            let ended = one(&client, &name, &request, &mut out, &mut err).await;
            let code = match ended {
                Err(CliFailure::Io(error)) => return Err(CliFailure::Io(error)),
                Err(failure) => {
                    err.write_all(failure.text().0.as_bytes())?;
                    1
                }
                Ok(code) => code,
            };
            out.end()?;
            err.end()?;
            order.ended(number)?;
            // The system keeps only the low byte of an exit code.
            Ok(code as u8)
        });
    }
    let mut worst = 0;
    loop {
        tokio::select! {
            ended = running.join_next() => match ended {
                Some(ended) => worst = worst.max(ended.map_err(io::Error::other)??),
                None => return Ok(ExitCode::from(worst)),
            },
            () = order.overdue() => order.release()?,
        }
    }
}

async fn one(
    client: &Client,
    name: &NodeName,
    request: &ExecRequest,
    out: &mut impl Write,
    err: &mut impl Write,
) -> Result<i32, CliFailure> {
    let connection = client.exec(&name.vnet, &name.node, request).await?;
    let (mut from, mut to) = tokio::io::split(connection);
    // A command that has ended needs no input; its output follows all the same.
    let _ = write_frame(&mut to, &ExecFrame::StdinEnd).await;
    output(&mut from, name, out, err).await
}

/// Destination of a line.
#[derive(Clone, Copy)]
enum OutputStream {
    Out,
    Err,
}

impl OutputStream {
    fn write(self, line: &[u8]) -> io::Result<()> {
        match self {
            Self::Out => io::stdout().write_all(line).and_then(|()| io::stdout().flush()),
            Self::Err => io::stderr().write_all(line),
        }
    }
}

/// Order of the output: the node whose lines are written now, and the waiting lines of the others.
#[derive(Clone)]
struct OutputOrder(Arc<Mutex<OutputOrderState>>);

struct OutputOrderState {
    /// Waiting lines, by node.
    waiting: Vec<Vec<(OutputStream, Vec<u8>)>>,
    waiting_bytes: usize,
    ended: Vec<bool>,
    /// First node whose command still runs. Its lines are written now.
    current: usize,
    /// Start of that node's time.
    since: Instant,
    /// True if lines are written as they arrive.
    released: bool,
}

impl OutputOrder {
    fn new(nodes: usize) -> Self {
        Self(Arc::new(Mutex::new(OutputOrderState {
            waiting: vec![Vec::new(); nodes],
            waiting_bytes: 0,
            ended: vec![false; nodes],
            current: 0,
            since: Instant::now(),
            released: false,
        })))
    }

    fn with<T>(&self, work: impl FnOnce(&mut OutputOrderState) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns a writer for whole lines of a node.
    fn writer(&self, node: usize, stream: OutputStream) -> OrderedWriter {
        OrderedWriter { order: self.clone(), node, stream }
    }

    /// Notes that a node's command ended.
    fn ended(&self, node: usize) -> io::Result<()> {
        self.with(|state| {
            state.ended[node] = true;
            while state.ended.get(state.current) == Some(&true) {
                (state.current, state.since) = (state.current + 1, Instant::now());
                state.flush(state.current)?;
            }
            Ok(())
        })
    }

    /// Waits until a node delays the others too long.
    async fn overdue(&self) {
        while let Some(until) = self.with(|state| (!state.released).then_some(state.since)) {
            let until = until + CURRENT_TIME;
            if until <= Instant::now() {
                return;
            }
            sleep_until(until).await;
        }
        std::future::pending().await
    }

    /// Writes lines as they arrive from now on.
    fn release(&self) -> io::Result<()> {
        self.with(OutputOrderState::release)
    }
}

impl OutputOrderState {
    fn line(&mut self, node: usize, stream: OutputStream, line: &[u8]) -> io::Result<()> {
        if self.released || node == self.current {
            return stream.write(line);
        }
        self.waiting_bytes += line.len();
        self.waiting[node].push((stream, line.to_vec()));
        if self.waiting_bytes > WAITING_BYTES_MAX { self.release() } else { Ok(()) }
    }

    /// Writes a node's waiting lines.
    fn flush(&mut self, node: usize) -> io::Result<()> {
        for (stream, line) in self.waiting.get_mut(node).map(std::mem::take).unwrap_or_default() {
            self.waiting_bytes -= line.len();
            stream.write(&line)?;
        }
        Ok(())
    }

    fn release(&mut self) -> io::Result<()> {
        self.released = true;
        (0..self.waiting.len()).try_for_each(|node| self.flush(node))
    }
}

/// Writer of one node's lines to one stream, in the nodes' order.
struct OrderedWriter {
    order: OutputOrder,
    node: usize,
    stream: OutputStream,
}

impl Write for OrderedWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.order.with(|state| state.line(self.node, self.stream, line)).map(|()| line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes whole lines, each after the name of its node.
struct PrefixedWriter<W> {
    head: String,
    line: Vec<u8>,
    to: W,
}

impl<W: Write> PrefixedWriter<W> {
    fn new(node: &str, width: usize, to: W) -> Self {
        Self { head: format!("{node:width$} | "), line: Vec::new(), to }
    }

    /// Writes the rest of a line without an end.
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

impl<W: Write> Write for PrefixedWriter<W> {
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
    fn output_lines_are_prefixed_and_bounded() {
        let mut written = Vec::new();
        let mut lines = PrefixedWriter::new("r1", 3, &mut written);
        lines.write_all(b"a\n\nb").unwrap();
        lines.write_all(b"c").unwrap();
        lines.end().unwrap();
        lines.end().unwrap();
        assert_eq!(String::from_utf8_lossy(&written), "r1  | a\nr1  | \nr1  | bc\n");
        let mut long = Vec::new();
        PrefixedWriter::new("r1", 2, &mut long)
            .write_all(&vec![b'x'; 2 * LINE_BYTES_MAX + 1])
            .unwrap();
        assert_eq!(long.iter().filter(|byte| **byte == b'\n').count(), 2);
    }
}
