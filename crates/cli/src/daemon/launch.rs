//! Starting a daemon if none answers, waiting for its end, and working without one.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use pdp_api::client::{Client, Error};
use pdp_api::{DaemonName, MachineCheck};

use crate::failure::CliFailure;

/// Longest wait for a daemon to start (it may adopt many guests) or to end.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// Pause between two polls.
const POLL_PAUSE: Duration = Duration::from_millis(20);

/// Bytes to show of a failed daemon's log.
const LOG_BYTES_MAX: usize = 2000;

/// Starts a daemon that outlives this command, and waits until it answers.
pub async fn start(
    client: &Client,
    name: Option<&DaemonName>,
    arguments: &str,
) -> Result<(), CliFailure> {
    let socket = client.socket().ok_or_else(|| {
        CliFailure::Usage(
            "`pdp up` starts a daemon on its own machine only, without --server".into(),
        )
    })?;
    let run_dir = run_dir(socket)?;
    std::fs::create_dir_all(run_dir)?;
    let program = program()?;
    let log_path = run_dir.join("pdpd.out");
    let log = File::create(&log_path)?;
    // A session of its own, so that it does not end with this terminal. `setsid` becomes the daemon
    // itself.
    let mut command = Command::new("setsid");
    command.arg(&program).arg("--quiet");
    match name {
        Some(name) => command.arg("--name").arg(name.to_string()),
        None => command.arg("--run-dir").arg(run_dir),
    };
    let mut child = command
        .args(arguments.split_whitespace())
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .map_err(|error| {
            CliFailure::Other(format!("can't start {}: {error}", program.display()))
        })?;
    let bar = ProgressBar::new_spinner().with_message("starting pdpd");
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    let answered = wait_answer(client, &mut child).await;
    bar.finish_and_clear();
    let text = std::fs::read_to_string(&log_path).unwrap_or_default();
    // From now on the daemon writes its own log.
    std::fs::remove_file(&log_path)?;
    if answered.is_err() {
        // Remove the directory if it is empty.
        let _ = std::fs::remove_dir(run_dir);
    }
    answered.map_err(|reason| {
        // The stack backtrace does not help the user.
        let text = text.split("\nStack backtrace:").next().unwrap_or_default();
        let from = text.char_indices().rev().nth(LOG_BYTES_MAX).map_or(0, |(at, _)| at);
        let tail = text[from..].trim_end();
        CliFailure::Other(format!("{} {reason}; its last output:\n{tail}", program.display()))
    })
}

async fn wait_answer(client: &Client, child: &mut Child) -> Result<(), String> {
    let end = Instant::now() + WAIT_MAX;
    loop {
        if client.version().await.is_ok() {
            return Ok(());
        }
        if let Ok(Some(status)) = child.try_wait() {
            // Another `pdp up` may have been first.
            if client.version().await.is_ok() {
                return Ok(());
            }
            return Err(format!("ended at once with {status}"));
        }
        if Instant::now() > end {
            return Err(format!("does not answer after {} s", WAIT_MAX.as_secs()));
        }
        tokio::time::sleep(POLL_PAUSE).await;
    }
}

/// Waits until the daemon no longer answers.
pub async fn wait_gone(client: &Client) -> Result<(), CliFailure> {
    let end = Instant::now() + WAIT_MAX;
    while Instant::now() < end {
        if matches!(client.version().await, Err(Error::NoDaemon { .. })) {
            return Ok(());
        }
        tokio::time::sleep(POLL_PAUSE).await;
    }
    Err(CliFailure::Other(format!(
        "the daemon at {} still answers after {} s; see `pdp logs`",
        client.socket().unwrap_or(Path::new("its address")).display(),
        WAIT_MAX.as_secs()
    )))
}

/// Returns the run directory of the daemon that listens at `socket`.
fn run_dir(socket: &Path) -> Result<&Path, CliFailure> {
    match (socket.parent(), socket.file_name()) {
        (Some(directory), Some(name)) if name == "pdpd.sock" && directory != Path::new("") => {
            Ok(directory)
        }
        _ => Err(CliFailure::Usage(format!(
            "no daemon at {}, and `pdp up` can't start one there: use a socket DIRECTORY/pdpd.sock",
            socket.display()
        ))),
    }
}

/// Returns the daemon's program.
fn program() -> Result<PathBuf, CliFailure> {
    if let Some(program) = std::env::var_os("PDP_DAEMON") {
        return Ok(program.into());
    }
    let beside = std::env::current_exe()?.with_file_name("pdpd");
    Ok(if beside.exists() { beside } else { "pdpd".into() })
}

/// Checks this machine's abilities without a running daemon.
pub fn checks() -> Result<Vec<MachineCheck>, CliFailure> {
    let program = program()?;
    let fail = |text: String| CliFailure::Other(format!("run {}: {text}", program.display()));
    let output = Command::new(&program)
        .arg("--doctor")
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| fail(error.to_string()))?;
    serde_json::from_slice(&output.stdout).map_err(|_| fail(output.status.to_string()))
}
