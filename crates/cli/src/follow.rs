//! A watch that goes on where it ended: across restarts of the daemon and broken connections.

use std::time::Duration;

use pdp_api::client::{Client, Error, Watch};
use pdp_api::{Cursor, ProblemKind, Snapshot, WatchEvent, WatchLine, WatchQuery};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Pause before a daemon that went is looked for again.
const AGAIN_PAUSE: Duration = Duration::from_millis(500);

/// Lines that wait here for who reads them; then they wait at the daemon, which says what was lost.
const LINES_MAX: usize = 64;

/// What comes of it.
#[derive(Debug)]
pub enum Said {
    Line(WatchLine),
    /// Nothing comes any more, and why; it is tried again.
    Gone(String),
    /// Something comes again.
    Back,
}

/// A stream of one daemon, and of the next where that started anew.
pub struct Following {
    client: Client,
    query: WatchQuery,
    watch: Option<Watch>,
    gone: bool,
}

impl Following {
    /// Begins at once. An error: the daemon does not answer, or refuses.
    pub async fn begin(client: &Client, query: WatchQuery) -> Result<Self, Error> {
        let watch = Some(client.watch(&query).await?);
        Ok(Self { watch, ..Self::later(client, query) })
    }

    /// Begins when it is asked for its first line, and as soon as a daemon answers.
    pub fn later(client: &Client, query: WatchQuery) -> Self {
        Self { client: client.clone(), query, watch: None, gone: false }
    }

    /// What comes next. An error: who asks may not, or not any more.
    pub async fn next(&mut self) -> Result<Said, Error> {
        loop {
            let why = match &mut self.watch {
                Some(watch) => match watch.next().await {
                    Ok(Some(WatchLine::End(end))) => end.reason,
                    Ok(Some(line)) => {
                        self.note(&line);
                        return Ok(Said::Line(line));
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
                                return Ok(Said::Back);
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
                return Ok(Said::Gone(format!("{why}; waiting for the daemon")));
            }
        }
    }

    /// Keeps the place from where to go on.
    fn note(&mut self, line: &WatchLine) {
        if let WatchLine::Event(WatchEvent { boot, seq, .. })
        | WatchLine::Snapshot(Snapshot { boot, seq, .. }) = line
        {
            self.query.after = Some(Cursor { boot: boot.clone(), seq: *seq });
            self.query.since_ms = None;
        }
    }

    /// Has it read beside everything else.
    pub fn spawn(mut self) -> Followed {
        let (send, said) = mpsc::channel(LINES_MAX);
        let reader = tokio::spawn(async move {
            loop {
                let next = self.next().await;
                let last = next.is_err();
                if send.send(next).await.is_err() || last {
                    return;
                }
            }
        });
        Followed { said, reader }
    }
}

/// One that is read beside everything else, as long as this lives.
pub struct Followed {
    said: mpsc::Receiver<Result<Said, Error>>,
    reader: JoinHandle<()>,
}

impl Drop for Followed {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl Followed {
    /// What comes next; `None` after an error. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Option<Result<Said, Error>> {
        self.said.recv().await
    }

    /// What came already.
    pub fn next_now(&mut self) -> Option<Result<Said, Error>> {
        self.said.try_recv().ok()
    }
}
