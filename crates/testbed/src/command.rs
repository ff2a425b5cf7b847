//! Commands: run to their end, in the background, in a network namespace.

use std::fmt;
use std::io::{self, Write as _};
use std::ops::Deref;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

/// Longest run of a command of [`run`].
pub const COMMAND_MAX: Duration = Duration::from_secs(180);

/// Failed command: the first line of its words, its status, and its output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandError(String);

impl Deref for CommandError {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for CommandError {}

impl From<CommandError> for String {
    fn from(error: CommandError) -> Self {
        error.0
    }
}

/// Runs a command to its end, at most [`COMMAND_MAX`]. `input` is its standard input.
pub fn run(command: &mut Command, input: &str) -> Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    // If the reader ends early, its exit code shows it.
    let _ = child.stdin.take().expect("piped").write_all(input.as_bytes());
    let pid = child.id();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    match receiver.recv_timeout(COMMAND_MAX) {
        Ok(output) => output.unwrap_or_else(|error| panic!("{command:?}: {error}")),
        Err(_) => {
            kill(pid);
            panic!("{command:?} did not end within {COMMAND_MAX:?}");
        }
    }
}

/// Like [`run`], and returns the standard output. Fails with all output if the command failed.
pub fn output_of(command: &mut Command, input: &str) -> Result<String, CommandError> {
    let output = run(command, input);
    checked(command, Ok(output))
}

/// Runs a command without input to its end, however long it
/// takes. Returns its standard output, or all output as error.
pub fn finish(command: &mut Command) -> Result<String, CommandError> {
    let output = command.stdin(Stdio::null()).output();
    checked(command, output)
}

fn checked(command: &Command, output: io::Result<Output>) -> Result<String, CommandError> {
    let words = [command.get_program()].into_iter().chain(command.get_args());
    let words = words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
    // The output tells which line of a script failed.
    let words = words.trim_start().lines().next().unwrap_or_default();
    let output = output.map_err(|error| CommandError(format!("{words}: {error}")))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(text);
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    Err(CommandError(format!("{words}: {}\n{text}{errors}", output.status)))
}

/// Runs a shell line in this program's own namespaces; panics if it fails.
#[track_caller]
pub fn sh(line: &str) -> String {
    try_sh(line).unwrap_or_else(|error| panic!("{error}"))
}

/// Runs a shell line in this program's own namespaces. Returns its output as error on failure.
pub fn try_sh(line: &str) -> Result<String, CommandError> {
    output_of(Command::new("sh").args(["-ec", line]), "")
}

/// Command in the network namespace with this file. Unlike `ip netns exec`, it
/// keeps this program's mounts, which cgroups and BPF need.
pub fn enter(netns: &str, program: &str) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={netns}")).arg(program);
    command
}

/// Runs lines for `ip -batch`. `ip` is the command of ip(8), in any namespace.
pub fn ip_batch(mut ip: Command, lines: &str) -> Result<(), CommandError> {
    output_of(ip.args(["-batch", "-"]), lines).map(drop)
}

/// Kills one process with kill -9.
pub fn kill(pid: u32) {
    // It may have ended meanwhile.
    let _ = Command::new("kill").args(["-9", &pid.to_string()]).stderr(Stdio::null()).status();
}

/// Command in the background until it is stopped or dropped.
#[derive(Debug)]
pub struct Background {
    child: Option<Child>,
}

impl Background {
    /// Starts it, and keeps its output.
    #[track_caller]
    pub fn start(command: &mut Command) -> Self {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        Self { child: Some(child) }
    }

    /// Process id.
    #[track_caller]
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("not stopped").id()
    }

    /// True if it has not ended.
    pub fn runs(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| child.try_wait().is_ok_and(|end| end.is_none()))
    }

    /// Sends it this signal (`INT`, `TERM`, …) and returns its output.
    #[track_caller]
    pub fn stop(mut self, signal: &str) -> String {
        let child = self.child.take().expect("stopped once");
        sh(&format!("kill -{signal} {}", child.id()));
        let output = child.wait_with_output().expect("own child");
        String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr)
    }

    /// Waits for its end and returns its output. Panics if it failed.
    #[track_caller]
    pub fn finish(mut self) -> String {
        let child = self.child.take().expect("finished once");
        let output = child.wait_with_output().expect("own child");
        let text = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {text}", output.status);
        text
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
