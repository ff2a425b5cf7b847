//! What happens, as it happens.

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pdp_api::client::{Client, Error, Watch};
use pdp_api::{Cursor, Detail, Snapshot, WatchEvent, WatchLine, WatchQuery};

use crate::args::{Events, Format};
use crate::failure::Failure;
use crate::output::write;
use crate::watch::until_interrupted;
use crate::who::time;

/// Pause before a daemon that went is looked for again.
const AGAIN_PAUSE: Duration = Duration::from_secs(1);

/// A stream of one daemon, and of the next where that started anew.
struct Following {
    client: Client,
    query: WatchQuery,
    watch: Option<Watch>,
    gone: bool,
}

impl Following {
    /// Begins; a daemon that does not answer is an error.
    async fn begin(client: &Client, query: WatchQuery) -> Result<Self, Error> {
        let watch = Some(client.watch(&query).await?);
        Ok(Self { client: client.clone(), query, watch, gone: false })
    }

    /// The next line. Where the stream ends, `told` is told why, once, and it goes on where it ended. An error: who
    /// asks may not any more.
    async fn next(&mut self, told: &mut (dyn FnMut(&str) + Send)) -> Result<WatchLine, Error> {
        loop {
            let Some(watch) = &mut self.watch else {
                match self.client.watch(&self.query).await {
                    Ok(watch) => {
                        self.watch = Some(watch);
                        if std::mem::take(&mut self.gone) {
                            told("connected again");
                        }
                    }
                    Err(error @ Error::Problem(_)) => return Err(error),
                    Err(_) => tokio::time::sleep(AGAIN_PAUSE).await,
                }
                continue;
            };
            let why = match watch.next().await {
                Ok(Some(WatchLine::End(end))) => end.reason,
                Ok(Some(line)) => {
                    let at = match &line {
                        WatchLine::Event(WatchEvent { boot, seq, .. })
                        | WatchLine::Snapshot(Snapshot { boot, seq, .. }) => Some((boot, *seq)),
                        _ => None,
                    };
                    if let Some((boot, seq)) = at {
                        self.query.after = Some(Cursor { boot: boot.clone(), seq });
                        self.query.since_ms = None;
                    }
                    return Ok(line);
                }
                Ok(None) => "the stream ended".to_owned(),
                Err(error @ Error::Problem(_)) => return Err(error),
                Err(error) => error.to_string(),
            };
            self.watch = None;
            if !std::mem::replace(&mut self.gone, true) {
                told(&format!("{why}; waiting for the daemon"));
            }
        }
    }
}

pub async fn events(client: &Client, args: Events) -> Result<ExitCode, Failure> {
    let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let since_ms = args.since.map(|since| now_ms.saturating_sub(since.as_millis()) as u64);
    let detail = if args.no_samples { Detail::None } else { Detail::Summary };
    let query = WatchQuery {
        vnet: args.vnet,
        detail,
        since_ms,
        every_ms: Some(args.every.as_millis() as u64),
        after: None,
    };
    until_interrupted(async {
        let mut following = Following::begin(client, query).await?;
        let mut first = !args.initial;
        loop {
            let told = &mut |why: &str| {
                let _ = writeln!(io::stderr(), "pdp: {why}");
            };
            let line = following.next(told).await?;
            let wanted = match &line {
                WatchLine::Sample(_) => false,
                // What is, is what was asked for or what a gap took.
                WatchLine::Snapshot(_) => !std::mem::take(&mut first),
                _ => true,
            };
            if wanted {
                write(text(args.format, &line)?.as_bytes())?;
            }
        }
    })
    .await
}

fn text(format: Format, line: &WatchLine) -> Result<String, Failure> {
    Ok(match format {
        Format::Json => serde_json::to_string(line).map_err(io::Error::other)? + "\n",
        Format::Yaml => {
            format!("---\n{}", serde_saphyr::to_string(line).map_err(io::Error::other)?)
        }
        Format::Table => words(line),
    })
}

/// A line for people.
fn words(line: &WatchLine) -> String {
    match line {
        WatchLine::Event(event) => event_words(event) + "\n",
        WatchLine::Snapshot(snapshot) => {
            let at = time(snapshot.at_ms);
            let vnets = snapshot.vnets.iter().map(|vnet| {
                let message = vnet.message.iter().map(|text| format!(": {text}"));
                let (name, phase) = (&vnet.name, vnet.phase.name());
                format!("{at}  vnet/{name}  is {phase}{}\n", message.collect::<String>())
            });
            vnets.collect()
        }
        WatchLine::Gap(gap) => match gap.lost {
            Some(lost) => format!("(up to {lost} events were lost; what follows is what is)\n"),
            None => "(the daemon started anew; what follows is what is)\n".into(),
        },
        WatchLine::End(end) => format!("({})\n", end.reason),
        WatchLine::Sample(_) => String::new(),
    }
}

/// An event in one line, with neither control characters nor an end of line.
fn event_words(event: &WatchEvent) -> String {
    let mut text = format!("{}  {}  {}", time(event.at_ms), event.object, event.what.words());
    if let Some(phase) = event.phase {
        text += &format!(" {}", phase.name());
    }
    if let Some(message) = &event.message {
        text += &format!(": {message}");
    }
    if let Some(who) = &event.who {
        text += &format!(" ({who})");
    }
    text.replace(char::is_control, " ")
}

#[cfg(test)]
mod tests {
    use pdp_api::{Gap, Phase, VnetSummary, What};

    use super::*;

    #[test]
    fn a_line_for_people_says_all_of_an_event_and_nothing_to_the_terminal() {
        let event = WatchEvent {
            at_ms: 1_000,
            object: "vnet/red/node/r1".into(),
            what: What::Phase,
            phase: Some(Phase::Degraded),
            message: Some("g0: ended\u{1b}[2J\nby signal 9".into()),
            who: Some("user:root".into()),
            ..WatchEvent::default()
        };
        assert_eq!(
            words(&WatchLine::Event(event)),
            "1970-01-01T00:00:01Z  vnet/red/node/r1  phase degraded: g0: ended [2J by signal 9 (user:root)\n"
        );
        let red = VnetSummary { name: "red".into(), ..VnetSummary::default() };
        let snapshot = Snapshot { vnets: vec![red], ..Snapshot::default() };
        let told = words(&WatchLine::Snapshot(snapshot));
        assert_eq!(told, "1970-01-01T00:00:00Z  vnet/red  is stopped\n");
        assert!(words(&WatchLine::Gap(Gap { lost: Some(7) })).contains("up to 7"));
    }
}
