//! `pdp top` on the screen. It needs only text and reverse video.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Paragraph, Row as Cells, Table, TableState};

use super::state::{Column, TopEntry, TopState};
use crate::output::words::bits;

/// Lines for events, if there is space.
const EVENTS: u16 = 6;

const HELP: &str = "
 Up/Down  choose a vnet            Enter    its ports and guests; Esc: back
 s        sort by the next column  r        reverse the order
 /        filter by name or state  Esc      show all again
 p        pause the display        q        quit

 IN, OUT  bits per second of its ports
 DROPS    frames per second
 WAIT     frames that wait at links, or inside a guest
 CPU      cores in use
 THR      share of the time in which its CPU limit stopped it
 MEM      memory in use";

const KEYS: &str = "q quit  s sort  r reverse  / filter  p pause  Enter detail  ? help";

pub fn draw(frame: &mut Frame<'_>, state: &TopState, colour: bool) {
    let events = if frame.area().height >= 16 { EVENTS } else { 0 };
    let areas = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(3),
        Constraint::Length(events),
        Constraint::Length(1),
    ]);
    let [head, middle, below, foot] = areas.areas(frame.area());
    frame.render_widget(Line::from(title(state)), head);
    if state.help {
        frame.render_widget(Paragraph::new(HELP), middle);
    } else {
        table(frame, middle, state, colour);
    }
    if events > 0 {
        let room = usize::from(events) - 1;
        let first = state.events.len().saturating_sub(room);
        let mut lines = vec![Line::from("EVENTS").style(Modifier::BOLD)];
        lines.extend(state.events.iter().skip(first).map(|event| Line::from(event.as_str())));
        frame.render_widget(Paragraph::new(lines), below);
    }
    let keys = match state.typing {
        true => format!("filter: {}_   (Enter: keep, Esc: show all)", state.filter),
        false => KEYS.to_owned(),
    };
    frame.render_widget(Line::from(keys).style(Modifier::REVERSED), foot);
}

fn title(state: &TopState) -> String {
    let mut text = match &state.vnet {
        Some(vnet) => format!("pdp top {vnet}"),
        None => "pdp top".to_owned(),
    };
    for (phase, count) in state.phases() {
        text += &format!("  {count} {}", phase.name());
    }
    if !state.filter.is_empty() {
        text += &format!("  filter {:?}", state.filter);
    }
    if state.is_paused() {
        text += "  PAUSED";
    }
    if let Some(gone) = &state.gone {
        text += &format!("  NO ANSWER: {gone}");
    }
    text
}

/// Titles, sort columns, and widths. The first column takes the rest of the width.
pub const COLUMNS: [(&str, Option<Column>, u16); 10] = [
    ("NAME", Some(Column::Name), 0),
    ("STATE", Some(Column::State), 9),
    ("GUESTS", None, 6),
    ("IN", Some(Column::In), 7),
    ("OUT", Some(Column::Out), 7),
    ("DROPS", Some(Column::Drops), 6),
    ("WAIT", Some(Column::Waiting), 5),
    ("CPU", Some(Column::Cpu), 5),
    ("THR", Some(Column::Throttled), 4),
    ("MEM", Some(Column::Memory), 6),
];

/// Formats the cells of a row.
pub fn cells(row: &TopEntry) -> [String; 10] {
    [
        row.name.clone(),
        row.state.clone(),
        match (row.guests_connected, row.guests) {
            (Some(connected), Some(all)) => format!("{connected}/{all}"),
            _ => "-".to_owned(),
        },
        short(row.received_bps),
        short(row.sent_bps),
        format!("{:.0}", row.dropped_pps),
        row.waiting.to_string(),
        format!("{:.2}", row.cpu_cores),
        format!("{:.0}%", (row.throttled * 100.0).min(999.0)),
        bytes(row.memory_bytes),
    ]
}

/// Formats bits per second without the unit, which the heading has.
fn short(bps: f64) -> String {
    bits(bps as u64).trim_end_matches("bit/s").to_owned()
}

fn bytes(count: u64) -> String {
    match count {
        0..1024 => count.to_string(),
        1024..1_048_576 => format!("{}K", count >> 10),
        1_048_576..10_737_418_240 => format!("{}M", count >> 20),
        _ => format!("{}G", count >> 30),
    }
}

fn table(frame: &mut Frame<'_>, area: ratatui::layout::Rect, state: &TopState, colour: bool) {
    let rows = state.rows();
    let heads = COLUMNS.map(|(name, column, _)| {
        let sorted = column == Some(state.sort);
        let mark = if state.reverse { "^" } else { "v" };
        Cell::from(if sorted { format!("{name}{mark}") } else { name.to_owned() })
    });
    let widths = COLUMNS.map(|(_, column, width)| match column {
        Some(Column::Name) => Constraint::Min(10),
        _ => Constraint::Length(width),
    });
    let shown = rows.iter().map(|row| {
        let style = match row.state.as_str() {
            "failed" | "absent" if colour => Style::new().fg(Color::Red),
            "degraded" | "starting" if colour => Style::new().fg(Color::Yellow),
            _ => Style::new(),
        };
        Cells::new(cells(row).map(Cell::from)).style(style)
    });
    let table = Table::new(shown, widths)
        .header(Cells::new(heads).style(Modifier::BOLD))
        .row_highlight_style(Modifier::REVERSED)
        .column_spacing(1);
    let chosen = (!rows.is_empty()).then(|| state.selected.min(rows.len() - 1));
    frame.render_stateful_widget(table, area, &mut TableState::new().with_selected(chosen));
}

#[cfg(test)]
mod tests {
    use pdp_api::{
        EventKind, Phase, Snapshot, VnetSample, VnetSummary, WatchEvent, WatchLine, WatchSample,
    };
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::state::{TopKey, TopRequest};
    use super::*;

    fn screen(state: &TopState) -> String {
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
        terminal.draw(|frame| draw(frame, state, false)).unwrap();
        let buffer = terminal.backend().buffer();
        let styles = buffer.content().iter().map(|cell| (cell.fg, cell.bg));
        assert!(styles.clone().all(|style| style == (Color::Reset, Color::Reset)), "no colour");
        let lines = buffer.content().chunks(80);
        lines
            .map(|cells| cells.iter().map(|cell| cell.symbol()).collect::<String>() + "\n")
            .collect()
    }

    fn sample(number: u64, names: &[&str]) -> WatchLine {
        let mut sample = WatchSample { at_ns: number * 1_000_000_000, ..WatchSample::default() };
        for (index, name) in names.iter().enumerate() {
            let at = number * (index as u64 + 1);
            let mut vnet = VnetSample {
                received_bytes: 125_000 * at,
                dropped: at,
                waiting: index as u64,
                guests: 2,
                guests_connected: 1,
                ..VnetSample::default()
            };
            vnet.usage.usage_at_ns = sample.at_ns;
            vnet.usage.cpu_ns = 250_000_000 * at;
            vnet.usage.memory_bytes = 3 << 20;
            sample.vnets.insert((*name).into(), vnet);
        }
        WatchLine::Sample(Box::new(sample))
    }

    fn state(names: &[&str]) -> TopState {
        let mut state = TopState::new(None);
        let vnet = |name: &&str| VnetSummary {
            name: (*name).into(),
            phase: Phase::Running,
            ..VnetSummary::default()
        };
        let vnets = names.iter().map(vnet).collect();
        state.take(WatchLine::Snapshot(Snapshot { vnets, ..Snapshot::default() }));
        state.take(sample(1, names));
        state.take(sample(2, names));
        state
    }

    fn order(state: &TopState) -> Vec<String> {
        state.rows().into_iter().map(|row| row.name).collect()
    }

    #[test]
    fn top_fits_eighty_columns_without_colour() {
        let mut state = state(&["acme.lab", "red"]);
        let event = WatchEvent {
            object: "vnet/red".into(),
            what: EventKind::Phase,
            phase: Some(Phase::Failed),
            message: Some("why\u{1b}[2J".into()),
            ..WatchEvent::default()
        };
        state.take(WatchLine::Event(event));
        let screen = screen(&state);
        let has = |parts: &[&str]| {
            let line = screen.lines().find(|line| line.contains(parts[0])).expect(parts[0]);
            for part in parts {
                assert!(line.contains(part), "{part:?} in {line:?}");
            }
        };
        has(&["pdp top", "1 running", "1 failed"]);
        has(&["NAMEv", "STATE", "IN", "OUT", "DROPS", "WAIT", "CPU", "THR", "MEM"]);
        has(&["acme.lab", "running", "1/2", " 1M ", "0.25", "3M"]);
        has(&["red  ", "failed", " 2M ", "0.50"]);
        has(&["vnet/red  phase failed: why [2J"]);
        has(&["q quit", "? help"]);
    }

    #[test]
    fn top_keys_sort_filter_pause_and_select() {
        let mut state = state(&["a1", "a2", "b1"]);
        assert_eq!(order(&state), ["a1", "a2", "b1"]);
        for _ in 0..2 {
            state.key(TopKey::Char('s'));
        }
        assert_eq!(
            (state.sort, order(&state)),
            (Column::In, vec!["b1".into(), "a2".into(), "a1".into()])
        );
        state.key(TopKey::Char('r'));
        assert_eq!(order(&state), ["a1", "a2", "b1"]);
        for key in ['/', 'a', '1'] {
            state.key(TopKey::Char(key));
        }
        assert_eq!(order(&state), ["a1"]);
        assert!(screen(&state).contains("filter: a1_"));
        state.key(TopKey::Enter);
        state.key(TopKey::Char('p'));
        state.take(WatchLine::Snapshot(Snapshot::default()));
        assert_eq!(order(&state), ["a1"], "held");
        assert!(screen(&state).contains("PAUSED"));
        state.key(TopKey::Char(' '));
        assert!(order(&state).is_empty());
        assert_eq!((state.key(TopKey::Escape), state.filter.as_str()), (TopRequest::Nothing, ""));
        assert_eq!(
            state.key(TopKey::Escape),
            TopRequest::Nothing,
            "there is nothing to go back to"
        );
        state.key(TopKey::Char('?'));
        assert!(state.help);
        assert_eq!((state.key(TopKey::Escape), state.help), (TopRequest::Nothing, false));
        let mut state = self::state(&["a1", "a2"]);
        state.key(TopKey::Down);
        assert_eq!(state.key(TopKey::Enter), TopRequest::Watch(Some("a2".into())));
        assert_eq!(state.key(TopKey::Escape), TopRequest::Watch(None));
        assert_eq!(state.key(TopKey::Char('q')), TopRequest::Quit);
    }

    #[test]
    fn top_help_fits_eighty_columns() {
        let mut state = state(&["red"]);
        state.key(TopKey::Char('?'));
        let screen = screen(&state);
        for line in HELP.lines() {
            assert!(screen.lines().any(|shown| shown.trim_end() == line), "{line:?}");
        }
    }

    /// No size of the terminal is too small.
    #[test]
    fn top_draws_on_any_terminal_size() {
        let state = state(&["red"]);
        for (width, height) in [(1, 1), (10, 3), (80, 5), (300, 100)] {
            let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
            terminal.draw(|frame| draw(frame, &state, true)).unwrap();
        }
    }

    #[test]
    fn top_treats_decreased_counters_as_restarted() {
        let mut state = state(&["red"]);
        state.take(sample(0, &["red"]));
        assert_eq!(state.rows()[0].cpu_cores, 0.0);
        assert_eq!(state.rows()[0].received_bps, 0.0);
    }
}
