//! Debian's `dpdk-testpmd` over memif: a generator, a sink, and a forwarder written by others.
//!
//! Each process has one thread that polls on one CPU while forwarding is on, and none otherwise. It
//! needs no huge pages, devices or privileges.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Longest wait for an answer.
const ANSWER_MAX: Duration = Duration::from_secs(20);

/// Forwarding mode (`testpmd` User Guide, "set fwd").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TestpmdMode {
    /// Sends the same frame again and again.
    TxOnly,
    /// Takes frames and frees them.
    RxOnly,
    /// Takes frames and frees them; sends frames of 1,024 flows.
    FlowGen,
    /// Forwards frames unchanged to the next port, or back if there is only one.
    Io,
    /// Like `Io`, with MAC addresses exchanged.
    MacSwap,
}

impl TestpmdMode {
    fn word(self) -> &'static str {
        match self {
            Self::TxOnly => "txonly",
            Self::RxOnly => "rxonly",
            Self::FlowGen => "flowgen",
            Self::Io => "io",
            Self::MacSwap => "macswap",
        }
    }
}

/// A memif interface of a process.
#[derive(Clone, Debug)]
pub struct TestpmdInterface {
    /// True if it listens.
    pub server: bool,
    /// Number.
    pub id: u32,
    /// The socket.
    pub socket: String,
}

/// Frames of an interface since the process began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TestpmdCounters {
    /// Received.
    pub received: u64,
    /// Sent.
    pub sent: u64,
    /// Not sent because the ring was full.
    pub not_sent: u64,
}

/// Running testpmd; ends when dropped.
#[derive(Debug)]
pub struct Testpmd {
    child: Child,
    input: ChildStdin,
    lines: mpsc::Receiver<String>,
    ports: usize,
}

impl Testpmd {
    /// Starts it with frames of `bytes` bytes, and its polling thread on a CPU. The peers of its
    /// interfaces may start later.
    pub fn start(
        interfaces: &[TestpmdInterface],
        mode: TestpmdMode,
        bytes: usize,
        cpu: usize,
    ) -> Result<Self> {
        // Line-buffered, as answers would otherwise wait in its buffer.
        let mut command = Command::new("stdbuf");
        command.args([
            "-oL",
            "dpdk-testpmd",
            "--no-huge",
            "--no-shconf",
            "--no-pci",
            "--no-telemetry",
            "-m",
            "256",
        ]);
        command.args(["--lcores", &format!("0@{cpu},1@{cpu}")]);
        for (number, TestpmdInterface { server, id, socket }) in interfaces.iter().enumerate() {
            let role = if *server { "server" } else { "client" };
            command.arg(format!(
                "--vdev=net_memif{number},role={role},id={id},socket={socket},socket-abstract=no"
            ));
        }
        command.args(["--", "-i", "--total-num-mbufs=16384", "--no-mlockall", "--no-flush-rx"]);
        command.args(["--no-lsc-interrupt", "--disable-link-check"]);
        command.arg(format!("--forward-mode={}", mode.word()));
        if mode == TestpmdMode::FlowGen || mode == TestpmdMode::TxOnly {
            command.arg(format!("--txpkts={bytes}"));
        }
        if interfaces.len() == 1 {
            command.arg("--port-topology=loop");
        }
        let errors = File::create("/dev/null")?;
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()
            .context("dpdk-testpmd (package dpdk-dev)")?;
        let input = child.stdin.take().context("its input")?;
        let output = child.stdout.take().context("its output")?;
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let mut testpmd = Self { child, input, lines, ports: interfaces.len() };
        testpmd.counters().context("dpdk-testpmd does not start")?;
        Ok(testpmd)
    }

    /// Process ID.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Starts forwarding.
    pub fn forward(&mut self) -> Result<()> {
        self.say("start")
    }

    /// Stops forwarding and all polling.
    pub fn rest(&mut self) -> Result<()> {
        self.say("stop")?;
        self.counters().map(|_| ())
    }

    /// Waits until all interfaces are connected.
    pub fn connected(&mut self) -> Result<()> {
        let end = Instant::now() + ANSWER_MAX;
        loop {
            self.say("show port summary all")?;
            self.say("show port stats 0")?;
            let mut up = 0;
            self.until(|line| {
                up += usize::from(line.contains("net_memif") && line.contains(" up "));
                line.contains("RX-packets:")
            })?;
            if up >= self.ports {
                return Ok(());
            }
            if Instant::now() > end {
                bail!("testpmd: {up} of {} memif interfaces are connected", self.ports);
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Counters of each interface.
    pub fn counters(&mut self) -> Result<Vec<TestpmdCounters>> {
        (0..self.ports)
            .map(|port| {
                self.say(&format!("show port stats {port}"))?;
                let mut counters = TestpmdCounters::default();
                self.until(|line| {
                    if let Some(count) = number(line, "RX-packets:") {
                        counters.received = count;
                    }
                    let Some(count) = number(line, "TX-packets:") else { return false };
                    counters.sent = count;
                    counters.not_sent = number(line, "TX-errors:").unwrap_or(0);
                    true
                })?;
                Ok(counters)
            })
            .collect()
    }

    fn say(&mut self, words: &str) -> Result<()> {
        writeln!(self.input, "{words}").context("dpdk-testpmd ended")?;
        self.input.flush().context("dpdk-testpmd ended")
    }

    fn until(&mut self, mut is_it: impl FnMut(&str) -> bool) -> Result<()> {
        let end = Instant::now() + ANSWER_MAX;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left).context("dpdk-testpmd does not answer")?;
            if is_it(&line) {
                return Ok(());
            }
        }
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        // It is already gone, or still our child.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Number that follows a word in a line.
fn number(line: &str, word: &str) -> Option<u64> {
    line.split_once(word)?.1.split_whitespace().next()?.parse().ok()
}

/// A memif socket in a directory.
pub fn socket(directory: &Path) -> String {
    directory.join("memif.sock").display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_testpmd_counters() {
        let line = "  TX-packets: 123456     TX-errors: 78    TX-bytes:  7901184";
        assert_eq!(number(line, "TX-packets:"), Some(123_456));
        assert_eq!(number(line, "TX-errors:"), Some(78));
        assert_eq!(number(line, "RX-packets:"), None);
    }
}
