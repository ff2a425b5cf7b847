//! `pdp-management --config FILE`: see the library.

#![forbid(unsafe_code)]

use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use pdp_management::outside::Uplink;
use pdp_management::privileges;
use pdp_management::publish::{CONNECTIONS_MAX, Listening};
use pdp_proto::management::ManagementConfig;
use tokio::sync::Semaphore;
use tokio::task::LocalSet;

/// Time for the starter to see that the process runs, and to read its output.
const SEEN: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // pdpd reports this line; its shim reads it only from a process that it has seen.
            eprintln!("Error: {error:#}");
            std::thread::sleep(SEEN);
            ExitCode::FAILURE
        }
    }
}

fn serve() -> Result<()> {
    let path = match std::env::args_os().skip(1).collect::<Vec<_>>().as_slice() {
        [flag, path] if flag == "--config" => PathBuf::from(path),
        _ => bail!("usage: pdp-management --config FILE"),
    };
    let text = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let config: ManagementConfig = serde_json::from_slice(&text)
        .with_context(|| format!("{} is not this helper's configuration", path.display()))?;

    // Everything that needs the machine or a privilege precedes entering the node's namespace.
    privileges::bound()?;
    let ports = config.ports.iter().map(Listening::at).collect::<Result<Vec<_>>>()?;
    let netns = File::open(&config.netns)
        .with_context(|| format!("cannot open {}", config.netns.display()))?;
    let outside = config.outside.then(|| Uplink::open(&netns, config.uid)).transpose()?;
    let control = listen(&config.control_socket)?;
    privileges::enter(&netns, config.uid)?;
    drop(netns);

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, run(control, ports, outside))
}

/// Listens for pdpd, and replaces an earlier process.
fn listen(path: &Path) -> Result<UnixListener> {
    let listen = || {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    listen().with_context(|| format!("cannot listen at {}", path.display()))
}

async fn run(control: UnixListener, ports: Vec<Listening>, outside: Option<Uplink>) -> Result<()> {
    let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut tasks = tokio::task::JoinSet::new();
    for port in ports {
        tasks.spawn_local(port.serve(connections.clone()));
    }
    if let Some(outside) = outside {
        tasks.spawn_local(outside.run());
    }
    let control = tokio::net::UnixListener::from_std(control).context("cannot watch for pdpd")?;
    tasks.spawn_local(async move {
        loop {
            // An accepted connection is all that pdpd needs to know.
            let _ = control.accept().await;
        }
    });
    // A task only ends after a failure; the next helper starts over.
    match tasks.join_next().await {
        Some(Ok(result)) => result,
        _ => bail!("a task of the helper failed"),
    }
}
