//! What goes on, on one screen.

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

use crate::args::Top;
use crate::failure::Failure;
use crate::follow::{Following, Said};
use crate::output::{print, table};
use draw::{COLUMNS, cells};
use state::{Ask, Key, State};

/// How often the screen is drawn at most.
const DRAW_PAUSE: Duration = Duration::from_millis(100);

pub async fn top(client: &Client, args: Top) -> Result<ExitCode, Failure> {
    if args.once {
        return once(client, &args).await;
    }
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        let text =
            "top needs a terminal; print one look with --once, or each by `pdp stats --watch`";
        return Err(Failure::Usage(text.into()));
    }
    // Of a daemon that does not answer is told where it can be read.
    let following = Following::begin(client, query(&args, args.vnet.clone())).await?;
    // From before the terminal is another until it is given back; a panic gives it back by ratatui's hook.
    let mut ends = Ends::new()?;
    let shown = match ratatui::try_init() {
        Ok(terminal) => tokio::select! {
            shown = show(client, &args, following, terminal) => shown,
            () = ends.next() => Ok(ExitCode::SUCCESS),
        },
        Err(error) => Err(error.into()),
    };
    // Where it can't be, nobody is there to read why.
    let _ = ratatui::try_restore();
    shown
}

fn query(args: &Top, vnet: Option<String>) -> WatchQuery {
    let detail = if vnet.is_some() { Detail::Ports } else { Detail::Summary };
    let every_ms = Some(args.every.as_millis() as u64);
    WatchQuery { vnet, detail, every_ms, ..WatchQuery::default() }
}

/// Two samples, and what is between them.
async fn once(client: &Client, args: &Top) -> Result<ExitCode, Failure> {
    let mut watch = client.watch(&query(args, args.vnet.clone())).await?;
    let mut state = State::new(args.vnet.clone());
    while !state.has_rates() {
        match watch.next().await? {
            Some(WatchLine::End(end)) => return Err(Failure::Other(end.reason)),
            Some(WatchLine::Snapshot(now)) if args.vnet.is_some() && now.vnets.is_empty() => {
                let name = args.vnet.as_deref().unwrap_or_default();
                return Err(Failure::Other(format!("no vnet {name:?}")));
            }
            Some(line) => state.take(line),
            None => return Err(Failure::Other("the stream ended before its second sample".into())),
        }
    }
    print(args.format, &state.rows(), |rows| {
        table(COLUMNS.map(|(name, ..)| name), rows.iter().map(cells).collect())
    })
}

/// Signals that end it, with the terminal as it was.
struct Ends([Signal; 3]);

impl Ends {
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

/// Shows it until it is quit.
async fn show(
    client: &Client,
    args: &Top,
    following: Following,
    mut terminal: DefaultTerminal,
) -> Result<ExitCode, Failure> {
    let colour = std::env::var_os("NO_COLOR").is_none();
    let mut state = State::new(args.vnet.clone());
    let mut keys = keys();
    let mut stream = following.spawn();
    let mut tick = tokio::time::interval(DRAW_PAUSE);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut stale = true;
    loop {
        tokio::select! {
            said = stream.next() => match said {
                Some(Ok(Said::Line(line))) => state.take(line),
                Some(Ok(Said::Gone(why))) => state.gone = Some(why),
                Some(Ok(Said::Back)) => state.gone = None,
                Some(Err(error)) => return Err(error.into()),
                None => return Err(Failure::Other("nobody reads the stream any more".into())),
            },
            key = keys.recv() => match key {
                // The terminal is gone.
                None => return Ok(ExitCode::SUCCESS),
                Some(None) => {}
                Some(Some(key)) => match state.key(key) {
                    Ask::Nothing => {}
                    Ask::Quit => return Ok(ExitCode::SUCCESS),
                    Ask::Watch(vnet) => {
                        stream = Following::later(client, query(args, vnet)).spawn();
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

/// Keys as they are typed; `None`: something else happened to the terminal, as that it has another size.
fn keys() -> mpsc::UnboundedReceiver<Option<Key>> {
    let (send, receive) = mpsc::unbounded_channel();
    // It waits for the terminal and for nobody else; the process ends with or without it.
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

fn of(key: KeyEvent) -> Option<Key> {
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    match key.code {
        KeyCode::Char('c') if control => Some(Key::Interrupt),
        KeyCode::Char(letter) if !control => Some(Key::Char(letter)),
        KeyCode::Enter => Some(Key::Enter),
        KeyCode::Esc => Some(Key::Escape),
        KeyCode::Backspace => Some(Key::Backspace),
        KeyCode::Up => Some(Key::Up),
        KeyCode::Down => Some(Key::Down),
        _ => None,
    }
}
