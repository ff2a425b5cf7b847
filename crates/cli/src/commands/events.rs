//! `pdp events`: events as they happen.

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pdp_api::client::Client;
use pdp_api::{Detail, WatchEvent, WatchLine, WatchQuery};

use crate::daemon::follow::{WatchFollower, WatchUpdate};
use crate::failure::CliFailure;
use crate::input::times::{duration, every};
use crate::interrupt::until_interrupted;
use crate::output::words::time_with_ms;
use crate::output::{Format, write};

/// Print events as they happen: phases, processes, carrier, links, guests, changes and who
/// requested them.
///
/// Ends with Ctrl-C. If the daemon goes away, the command waits for it. Missed events follow, or a
/// line tells that they are unknown.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp events\n         \
                        pdp events red --since 10m\n         \
                        pdp events --format json | jq -r .event.object")]
pub struct EventsArgs {
    /// Only events of this vnet.
    #[arg(value_name = "VNET")]
    pub vnet: Option<String>,
    /// Begin with the kept events of this long ago and later: a number with s, m, h or d.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub since: Option<Duration>,
    /// Start with a snapshot of the current state.
    #[arg(long, conflicts_with = "since")]
    pub initial: bool,
    /// Seconds between polls for states that are not pushed to the daemon: connected guests, routes
    /// in sync.
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = every)]
    pub every: Duration,
    /// Do not poll for these states.
    #[arg(long)]
    pub no_samples: bool,
    /// Print the events of --since, or else the current state, and end.
    #[arg(long, conflicts_with = "no_samples")]
    pub once: bool,
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

pub async fn events(client: &Client, args: EventsArgs) -> Result<ExitCode, CliFailure> {
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
        // The snapshot that a stream begins with.
        let mut first = !args.initial && !args.once && query.since_ms.is_none();
        // Past events are all printed once a sample follows no event.
        let mut quiet = true;
        let mut following = WatchFollower::begin(client, query).await?;
        loop {
            let line = match following.next().await? {
                WatchUpdate::Line(line) => line,
                other => {
                    let text = match &other {
                        WatchUpdate::Gone(why) => why,
                        _ => "connected again",
                    };
                    let _ = writeln!(io::stderr(), "pdp: {text}");
                    continue;
                }
            };
            if matches!(line, WatchLine::Sample(_)) {
                if args.once && quiet {
                    return Ok(ExitCode::SUCCESS);
                }
                quiet = true;
            } else {
                quiet = false;
            }
            let shown = match &line {
                WatchLine::Sample(_) => false,
                WatchLine::Snapshot(_) => !std::mem::take(&mut first),
                _ => true,
            };
            if shown {
                write(text(args.format, &line)?.as_bytes())?;
            }
        }
    })
    .await
}

fn text(format: Format, line: &WatchLine) -> Result<String, CliFailure> {
    Ok(match format {
        Format::Json => serde_json::to_string(line).map_err(io::Error::other)? + "\n",
        Format::Yaml => {
            format!("---\n{}", serde_saphyr::to_string(line).map_err(io::Error::other)?)
        }
        Format::Table => format_line(line),
    })
}

/// Formats a line of a watch for people.
pub fn format_line(line: &WatchLine) -> String {
    match line {
        WatchLine::Event(event) => event_words(event) + "\n",
        WatchLine::Snapshot(snapshot) => {
            let at = time_with_ms(snapshot.at_ms);
            let vnets = snapshot.vnets.iter().map(|vnet| {
                let message = vnet.message.iter().map(|text| format!(": {text}"));
                let (name, phase) = (&vnet.name, vnet.phase.name());
                format!("{at}  vnet/{name}  is {phase}{}\n", message.collect::<String>())
            });
            vnets.collect()
        }
        WatchLine::Gap(gap) => match gap.lost {
            Some(lost) => {
                let lost = pdp_spec::count(lost, "event");
                format!("(up to {lost} lost; the current state follows)\n")
            }
            None => "(the daemon restarted; the current state follows)\n".into(),
        },
        WatchLine::End(end) => format!("({})\n", end.reason),
        WatchLine::Sample(_) => String::new(),
    }
}

/// Formats an event in one line, without control characters.
pub fn event_words(event: &WatchEvent) -> String {
    let mut text =
        format!("{}  {}  {}", time_with_ms(event.at_ms), event.object, event.what.label());
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
    use pdp_api::{EventKind, Gap, Phase, Snapshot, VnetSummary};

    use super::*;

    #[test]
    fn event_line_is_complete_without_control_characters() {
        let event = WatchEvent {
            at_ms: 1_007,
            object: "vnet/red/node/r1".into(),
            what: EventKind::Phase,
            phase: Some(Phase::Degraded),
            message: Some("g0: ended\u{1b}[2J\nby signal 9".into()),
            who: Some("user:root".into()),
            ..WatchEvent::default()
        };
        assert_eq!(
            format_line(&WatchLine::Event(event)),
            "1970-01-01T00:00:01.007Z  vnet/red/node/r1  phase degraded: g0: ended [2J by signal 9 (user:root)\n"
        );
        let red = VnetSummary { name: "red".into(), ..VnetSummary::default() };
        let snapshot = Snapshot { vnets: vec![red], ..Snapshot::default() };
        let text = format_line(&WatchLine::Snapshot(snapshot));
        assert_eq!(text, "1970-01-01T00:00:00.000Z  vnet/red  is stopped\n");
        assert!(format_line(&WatchLine::Gap(Gap { lost: Some(7) })).contains("up to 7"));
    }
}
