//! What happens, as it happens.

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use pdp_api::client::Client;
use pdp_api::{Detail, WatchEvent, WatchLine, WatchQuery};

use crate::args::{Events, Format};
use crate::failure::Failure;
use crate::follow::{Following, Said};
use crate::output::write;
use crate::watch::until_interrupted;
use crate::who::time_with_ms;

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
        // The one that a stream begins with.
        let mut first = !args.initial && query.since_ms.is_none();
        // Past events are all printed once a sample follows no event.
        let mut quiet = true;
        let mut following = Following::begin(client, query).await?;
        loop {
            let line = match following.next().await? {
                Said::Line(line) => line,
                other => {
                    let told = match &other {
                        Said::Gone(why) => why,
                        _ => "connected again",
                    };
                    let _ = writeln!(io::stderr(), "pdp: {told}");
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
            let wanted = match &line {
                WatchLine::Sample(_) => false,
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
pub fn words(line: &WatchLine) -> String {
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
                format!("(up to {lost} lost; what follows is what is)\n")
            }
            None => "(the daemon started anew; what follows is what is)\n".into(),
        },
        WatchLine::End(end) => format!("({})\n", end.reason),
        WatchLine::Sample(_) => String::new(),
    }
}

/// An event in one line, with neither control characters nor an end of line.
pub fn event_words(event: &WatchEvent) -> String {
    let mut text =
        format!("{}  {}  {}", time_with_ms(event.at_ms), event.object, event.what.words());
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
    use pdp_api::{Gap, Phase, Snapshot, VnetSummary, What};

    use super::*;

    #[test]
    fn a_line_for_people_says_all_of_an_event_and_nothing_to_the_terminal() {
        let event = WatchEvent {
            at_ms: 1_007,
            object: "vnet/red/node/r1".into(),
            what: What::Phase,
            phase: Some(Phase::Degraded),
            message: Some("g0: ended\u{1b}[2J\nby signal 9".into()),
            who: Some("user:root".into()),
            ..WatchEvent::default()
        };
        assert_eq!(
            words(&WatchLine::Event(event)),
            "1970-01-01T00:00:01.007Z  vnet/red/node/r1  phase degraded: g0: ended [2J by signal 9 (user:root)\n"
        );
        let red = VnetSummary { name: "red".into(), ..VnetSummary::default() };
        let snapshot = Snapshot { vnets: vec![red], ..Snapshot::default() };
        let told = words(&WatchLine::Snapshot(snapshot));
        assert_eq!(told, "1970-01-01T00:00:00.000Z  vnet/red  is stopped\n");
        assert!(words(&WatchLine::Gap(Gap { lost: Some(7) })).contains("up to 7"));
    }
}
