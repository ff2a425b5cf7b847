//! The daemon's HTTP API over a Unix socket: requests in, JSON out, nothing decided here.
//!
//! [`Daemon`] is what the rest of the daemon gives this module; [`serve`] runs the API on a
//! listener of [`listen`]. Types and paths are [`pdp_api`]'s; the description is in
//! `schema/openapi.json` and at `GET /v1/openapi.json`.
//!
//! Whatever a client sends or however it goes away, the answer is JSON (a
//! [`Problem`](pdp_api::Problem) for every failure), and what it had running is ended: commands
//! are killed, captures and logs closed. Changes that have begun run to their end.

mod daemon;

use std::io;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;

pub use daemon::{Daemon, ProgressFn, RouteFn};

/// Listens at `path`, for root and the group of the directory (mode 0660). A socket that nobody
/// answers at is replaced; another daemon's is left alone, as an error.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    let _ = path;
    todo!()
}

/// Serves the API until `stop` is done; streams and commands that still run are ended then.
pub async fn serve(
    listener: UnixListener,
    daemon: Arc<dyn Daemon>,
    stop: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let _ = (listener, daemon, stop);
    todo!()
}
