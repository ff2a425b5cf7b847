//! A watch that continues where it ended, across restarts of the daemon and broken connections.

use std::time::Duration;

use pdp_api::client::{Client, Error, WatchStream};
use pdp_api::{EventCursor, ProblemKind, Snapshot, WatchEvent, WatchLine, WatchQuery};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Pause between two attempts to reach the daemon again.
const AGAIN_PAUSE: Duration = Duration::from_millis(500);

/// Lines buffered for the reader. More lines wait at the daemon, which reports lost ones.
const LINES_MAX: usize = 64;

/// Report of a followed watch.
#[derive(Debug)]
pub enum WatchUpdate {
    Line(WatchLine),
    /// The watch broke off, and why. It is tried again.
    Gone(String),
    /// The watch works again.
    Back,
}

/// A watch of a daemon that continues with the daemon's next run.
pub struct WatchFollower {
    client: Client,
    query: WatchQuery,
    watch: Option<WatchStream>,
    gone: bool,
}

impl WatchFollower {
    /// Begins the watch at once.
    ///
    /// # Errors
    /// The daemon does not answer, or refuses.
    pub async fn begin(client: &Client, query: WatchQuery) -> Result<Self, Error> {
        let watch = Some(client.watch(&query).await?);
        Ok(Self { watch, ..Self::later(client, query) })
    }

    /// Begins the watch with the first call of [`Self::next`], as soon as a daemon answers.
    pub fn later(client: &Client, query: WatchQuery) -> Self {
        Self { client: client.clone(), query, watch: None, gone: false }
    }

    /// Returns the next line or change of the connection.
    ///
    /// # Errors
    /// The client has no rights, or lost them.
    pub async fn next(&mut self) -> Result<WatchUpdate, Error> {
        loop {
            let why = match &mut self.watch {
                Some(watch) => match watch.next().await {
                    Ok(Some(WatchLine::End(end))) => end.reason,
                    Ok(Some(line)) => {
                        self.note(&line);
                        return Ok(WatchUpdate::Line(line));
                    }
                    Ok(None) => "the stream ended".to_owned(),
                    Err(error) => error.to_string(),
                },
                None => {
                    if self.gone {
                        tokio::time::sleep(AGAIN_PAUSE).await;
                    }
                    match self.client.watch(&self.query).await {
                        Ok(watch) => {
                            self.watch = Some(watch);
                            if std::mem::take(&mut self.gone) {
                                return Ok(WatchUpdate::Back);
                            }
                            continue;
                        }
                        Err(Error::Problem(problem)) if problem.kind != ProblemKind::Busy => {
                            return Err(Error::Problem(problem));
                        }
                        Err(error) => error.to_string(),
                    }
                }
            };
            self.watch = None;
            if !std::mem::replace(&mut self.gone, true) {
                return Ok(WatchUpdate::Gone(format!("{why}; waiting for the daemon")));
            }
        }
    }

    /// Remembers the position to continue at.
    fn note(&mut self, line: &WatchLine) {
        if let WatchLine::Event(WatchEvent { boot, seq, .. })
        | WatchLine::Snapshot(Snapshot { boot, seq, .. }) = line
        {
            self.query.after = Some(EventCursor { boot: boot.clone(), seq: *seq });
            self.query.since_ms = None;
        }
    }

    /// Reads the watch in a task of its own.
    pub fn spawn(mut self) -> BackgroundWatch {
        let (send, updates) = mpsc::channel(LINES_MAX);
        let reader = tokio::spawn(async move {
            loop {
                let next = self.next().await;
                let last = next.is_err();
                if send.send(next).await.is_err() || last {
                    return;
                }
            }
        });
        BackgroundWatch { updates, reader }
    }
}

/// A watch that a task reads, until this is dropped.
pub struct BackgroundWatch {
    updates: mpsc::Receiver<Result<WatchUpdate, Error>>,
    reader: JoinHandle<()>,
}

impl Drop for BackgroundWatch {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl BackgroundWatch {
    /// Returns the next line or change; `None` after an error. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Option<Result<WatchUpdate, Error>> {
        self.updates.recv().await
    }

    /// Returns the next line or change if it has already arrived.
    pub fn next_now(&mut self) -> Option<Result<WatchUpdate, Error>> {
        self.updates.try_recv().ok()
    }
}
