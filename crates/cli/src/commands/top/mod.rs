//! `pdp top`: the current activity on one screen.

mod draw;
mod state;

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::Duration;

use pdp_api::client::Client;
use pdp_api::{Detail, WatchLine, WatchQuery};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;

use crate::daemon::follow::{WatchFollower, WatchUpdate};
use crate::failure::CliFailure;
use crate::input::times::every;
use crate::output::{Format, print, table};
use draw::{COLUMNS, cells};
use state::{TopKey, TopRequest, TopState};

/// Shortest interval between two redraws.
const DRAW_PAUSE: Duration = Duration::from_millis(100);

/// Show vnets with their rates, CPU, memory and events on one screen, continuously.
///
/// Keys: s sort, r reverse, / filter, p pause, Enter the ports and guests of a vnet, Esc back, ?
/// help, q quit.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp top\n         \
                        pdp top red\n         \
                        pdp top --once --format json")]
pub struct TopArgs {
    /// Show the ports and guests of this vnet.
    #[arg(value_name = "VNET")]
    pub vnet: Option<String>,
    /// Seconds between two samples.
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = every)]
    pub every: Duration,
    /// Print the rates between two samples, and end.
    #[arg(long)]
    pub once: bool,
    /// Format of --once.
    #[arg(long, value_enum, default_value_t, requires = "once")]
    pub format: Format,
}

pub async fn top(client: &Client, args: TopArgs) -> Result<ExitCode, CliFailure> {
    if args.once {
        return once(client, &args).await;
    }
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        let text =
            "top needs a terminal; print one sample with --once, or all with `pdp stats --watch`";
        return Err(CliFailure::Usage(text.into()));
    }
    // An error of a daemon that does not answer is printed before the screen opens.
    let following = WatchFollower::begin(client, query(&args, args.vnet.clone())).await?;
    // Signals are caught from before the terminal changes until it is restored. After a panic,
    // ratatui's hook restores it.
    let mut ends = TerminationSignals::new()?;
    let shown = match ratatui::try_init() {
        Ok(terminal) => tokio::select! {
            shown = show(client, &args, following, terminal) => shown,
            () = ends.next() => Ok(ExitCode::SUCCESS),
        },
        Err(error) => Err(error.into()),
    };
    // If restoring fails, nobody can read the error.
    let _ = ratatui::try_restore();
    shown
}

fn query(args: &TopArgs, vnet: Option<String>) -> WatchQuery {
    let detail = if vnet.is_some() { Detail::Ports } else { Detail::Summary };
    let every_ms = Some(args.every.as_millis() as u64);
    WatchQuery { vnet, detail, every_ms, ..WatchQuery::default() }
}

/// Prints the rates between two samples.
async fn once(client: &Client, args: &TopArgs) -> Result<ExitCode, CliFailure> {
    let mut watch = client.watch(&query(args, args.vnet.clone())).await?;
    let mut state = TopState::new(args.vnet.clone());
    while !state.has_rates() {
        match watch.next().await? {
            Some(WatchLine::End(end)) => return Err(CliFailure::Other(end.reason)),
            Some(WatchLine::Snapshot(now)) if args.vnet.is_some() && now.vnets.is_empty() => {
                let name = args.vnet.as_deref().unwrap_or_default();
                return Err(CliFailure::Other(format!("no vnet {name:?}")));
            }
            Some(line) => state.take(line),
            None => {
                return Err(CliFailure::Other("the stream ended before its second sample".into()));
            }
        }
    }
    print(args.format, &state.rows(), |rows| {
        table(COLUMNS.map(|(name, ..)| name), rows.iter().map(cells).collect())
    })
}

/// Signals that end the program and let it restore the terminal.
struct TerminationSignals([Signal; 3]);

impl TerminationSignals {
    fn new() -> io::Result<Self> {
        let [terminate, interrupt, hangup] =
            [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()].map(signal);
        Ok(Self([terminate?, interrupt?, hangup?]))
    }

    async fn next(&mut self) {
        let [terminate, interrupt, hangup] = &mut self.0;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}

/// Shows the screen until the user quits.
async fn show(
    client: &Client,
    args: &TopArgs,
    following: WatchFollower,
    mut terminal: DefaultTerminal,
) -> Result<ExitCode, CliFailure> {
    let colour = std::env::var_os("NO_COLOR").is_none();
    let mut state = TopState::new(args.vnet.clone());
    let mut keys = keys();
    let mut stream = following.spawn();
    let mut tick = tokio::time::interval(DRAW_PAUSE);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut stale = true;
    loop {
        tokio::select! {
            update = stream.next() => match update {
                Some(Ok(WatchUpdate::Line(line))) => state.take(line),
                Some(Ok(WatchUpdate::Gone(why))) => state.gone = Some(why),
                Some(Ok(WatchUpdate::Back)) => state.gone = None,
                Some(Err(error)) => return Err(error.into()),
                None => return Err(CliFailure::Other("the stream's reader ended".into())),
            },
            key = keys.recv() => match key {
                // The terminal is gone.
                None => return Ok(ExitCode::SUCCESS),
                Some(None) => {}
                Some(Some(key)) => match state.key(key) {
                    TopRequest::Nothing => {}
                    TopRequest::Quit => return Ok(ExitCode::SUCCESS),
                    TopRequest::Watch(vnet) => {
                        stream = WatchFollower::later(client, query(args, vnet)).spawn();
                    }
                },
            },
            _ = tick.tick() => {
                if std::mem::take(&mut stale) {
                    terminal.draw(|frame| draw::draw(frame, &state, colour))?;
                }
                continue;
            }
        }
        stale = true;
    }
}

/// Returns keys as they are typed. `None` stands for another event of the terminal, such as a new
/// size.
fn keys() -> mpsc::UnboundedReceiver<Option<TopKey>> {
    let (send, receive) = mpsc::unbounded_channel();
    // The thread only waits for the terminal. The process does not wait for the thread.
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            let key = match event {
                Event::Key(key) if key.kind != KeyEventKind::Release => match of(key) {
                    Some(key) => Some(key),
                    None => continue,
                },
                _ => None,
            };
            if send.send(key).is_err() {
                return;
            }
        }
    });
    receive
}

fn of(key: KeyEvent) -> Option<TopKey> {
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    match key.code {
        KeyCode::Char('c') if control => Some(TopKey::Interrupt),
        KeyCode::Char(letter) if !control => Some(TopKey::Char(letter)),
        KeyCode::Enter => Some(TopKey::Enter),
        KeyCode::Esc => Some(TopKey::Escape),
        KeyCode::Backspace => Some(TopKey::Backspace),
        KeyCode::Up => Some(TopKey::Up),
        KeyCode::Down => Some(TopKey::Down),
        _ => None,
    }
}
