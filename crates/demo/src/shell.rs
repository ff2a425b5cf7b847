//! Running commands: directly, in a network namespace, or in the background.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGINT, SIGTERM};

/// Pause between two checks of an awaited condition.
pub const POLL_PAUSE: Duration = Duration::from_millis(200);

/// Makes a command that runs in the network namespace `netns`, if given. Unlike `ip netns exec`, it
/// keeps the machine's mounts, as cgroups and BPF are needed.
pub fn command(netns: Option<&str>, words: &[&str]) -> Command {
    let mut command;
    match netns {
        Some(netns) => {
            command = Command::new("nsenter");
            command.arg(format!("--net=/run/netns/{netns}")).args(words);
        }
        None => {
            command = Command::new(words.first().copied().unwrap_or("true"));
            command.args(words.iter().skip(1));
        }
    }
    command.stdin(Stdio::null());
    command
}

/// Runs a command to its end. Returns its output, or its error.
pub fn run(netns: Option<&str>, words: &[&str]) -> Result<String> {
    finish(&mut command(netns, words), words)
}

/// Runs shell lines to their end; stops at the first failure.
pub fn script(netns: Option<&str>, lines: &str) -> Result<String> {
    finish(&mut command(netns, &["sh", "-ec", lines]), &[lines.trim()])
}

/// Output of a command that must succeed.
pub fn finish(command: &mut Command, words: &[&str]) -> Result<String> {
    let what = words.join(" ");
    let output = command.output().with_context(|| format!("{what}: can't be started"))?;
    checked(&what, &output)
}

/// Output of a finished command, or its messages as an error.
pub fn checked(what: &str, output: &Output) -> Result<String> {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(text);
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    bail!("{what}: {}\n{}{}", output.status, text.trim_end(), errors.trim_end())
}

/// Starts a program in the background, with its output in a file. It outlives this program.
pub fn background(netns: &str, words: &[&str], log: &Path) -> Result<Child> {
    let log = File::create(log).with_context(|| format!("log {}", log.display()))?;
    let words = [&["setsid"], words].concat();
    command(Some(netns), &words)
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .with_context(|| words.join(" "))
}

/// Set once this program received SIGINT or SIGTERM.
static INTERRUPTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Makes SIGINT and SIGTERM end a run in order, so that nothing of it is left behind.
pub fn end_on_signals() -> Result<()> {
    let flag = INTERRUPTED.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, flag.clone())?;
    }
    Ok(())
}

/// True if this program received SIGINT or SIGTERM.
pub fn interrupted() -> bool {
    INTERRUPTED.get().is_some_and(|flag| flag.load(Ordering::Relaxed))
}

/// Repeats `done` until it succeeds, for at most
/// `limit`. Then its last error tells what is missing.
pub fn wait(what: &str, limit: Duration, mut done: impl FnMut() -> Result<()>) -> Result<()> {
    let end = Instant::now() + limit;
    loop {
        match done() {
            Ok(()) => return Ok(()),
            Err(error) if Instant::now() > end => {
                return Err(error.context(format!("{what}: not within {} s", limit.as_secs())));
            }
            Err(_) if interrupted() => bail!("{what}: interrupted"),
            Err(_) => std::thread::sleep(POLL_PAUSE),
        }
    }
}
