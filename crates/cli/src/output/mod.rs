//! Standard output: tables for people, JSON and YAML for programs. Also the progress on standard
//! error.

pub mod pcap;
pub mod samples;
pub mod shape;
pub mod status;
pub mod words;

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use comfy_table::Table;
use comfy_table::presets::NOTHING;
use indicatif::{ProgressBar, ProgressStyle};
use pdp_api::{ChangeAction, ChangeReport, Progress};
use serde::Serialize;

use crate::failure::CliFailure;

/// Interval of progress lines if standard error is no terminal.
const PROGRESS_PAUSE: Duration = Duration::from_secs(2);

/// Output format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Tables for people.
    #[default]
    Table,
    Json,
    Yaml,
}

/// Writes bytes to standard output.
pub fn write(bytes: &[u8]) -> Result<ExitCode, CliFailure> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)?;
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

/// Prints a value as JSON or YAML, or as the text that `table` returns.
pub fn print<T: Serialize>(
    format: Format,
    value: &T,
    table: impl FnOnce(&T) -> String,
) -> Result<ExitCode, CliFailure> {
    let text = match format {
        Format::Table => table(value),
        Format::Json => serde_json::to_string_pretty(value).map_err(io::Error::other)? + "\n",
        Format::Yaml => serde_saphyr::to_string(value).map_err(io::Error::other)?,
    };
    write(text.as_bytes())
}

/// Last columns that are cut at a terminal's edge. `pdp inspect` and pipes have the whole text.
const CUT: [&str; 2] = ["NOTE", "DETAIL"];

/// Formats a table: columns separated by spaces, one line per row. On a terminal, a last column in
/// [`CUT`] ends at the edge.
pub fn table<const N: usize>(header: [&str; N], rows: Vec<[String; N]>) -> String {
    let mut table = Table::new();
    let edge = io::stdout().is_terminal().then(|| table.width()).flatten();
    let edge = edge.filter(|_| header.last().is_some_and(|last| CUT.contains(last)));
    table.load_style(NOTHING).set_header(header);
    for row in rows {
        table.add_row(row);
    }
    lines(&table.to_string(), edge.map(usize::from))
}

fn lines(table: &str, edge: Option<usize>) -> String {
    let line = |line: &str| {
        // Comfy-table pads the first and the last column too.
        let line = line.trim_end().trim_start_matches(' ');
        match edge {
            Some(edge) if line.chars().count() > edge => {
                let kept: String = line.chars().take(edge.saturating_sub(1)).collect();
                format!("{kept}…\n")
            }
            _ => format!("{line}\n"),
        }
    };
    table.lines().map(line).collect()
}

/// Formats a section with its title; empty if the body is empty.
pub fn section(title: &str, body: &str) -> String {
    if body.is_empty() { String::new() } else { format!("\n{title}\n{body}") }
}

/// Returns `-` for an empty text.
pub fn or_dash(text: impl Into<String>) -> String {
    let text = text.into();
    if text.is_empty() { "-".into() } else { text }
}

/// Prints the changes that a request made.
pub fn report(format: Format, report: &ChangeReport) -> Result<ExitCode, CliFailure> {
    print(format, report, |report| {
        let changed =
            report.changes.iter().filter(|change| change.action != ChangeAction::Unchanged);
        let rows: Vec<_> = changed
            .map(|change| {
                [change.object.clone(), change.action.name().into(), change.detail.clone()]
            })
            .collect();
        let unchanged = report.changes.len() - rows.len();
        let would = if report.dry_run { "would change" } else { "changed" };
        let count = rows.len();
        let list = if rows.is_empty() {
            String::new()
        } else {
            table(["OBJECT", "ACTION", "DETAIL"], rows)
        };
        format!("{list}{count} {would}, {unchanged} unchanged\n")
    })
}

/// Shows the progress of a change on standard error. On a terminal it is a bar. Otherwise it is a
/// line from time to time, if the step differs from the last line.
pub struct ProgressDisplay {
    bar: Option<ProgressBar>,
    last: Instant,
    line: String,
}

impl ProgressDisplay {
    pub fn new() -> Self {
        let bar = io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(0);
            if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {msg}")
            {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        Self { bar, last: Instant::now(), line: String::new() }
    }

    pub fn step(&mut self, step: Progress) {
        match &self.bar {
            Some(bar) => {
                bar.set_length(step.total);
                bar.set_position(step.done);
                bar.set_message(step.what);
            }
            None => {
                let line = format!("{}/{} {}\n", step.done, step.total, step.what);
                if line != self.line && self.last.elapsed() >= PROGRESS_PAUSE {
                    self.last = Instant::now();
                    let _ = io::stderr().write_all(line.as_bytes());
                    self.line = line;
                }
            }
        }
    }
}

impl Drop for ProgressDisplay {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_rows_are_cut_at_the_terminal_edge() {
        let table = " VNET  NOTE                 \n lab   r1: übel, and why so  \n";
        assert_eq!(lines(table, None), "VNET  NOTE\nlab   r1: übel, and why so\n");
        assert_eq!(lines(table, Some(15)), "VNET  NOTE\nlab   r1: übel…\n");
        assert_eq!(lines(table, Some(0)), "…\n…\n");
    }
}
