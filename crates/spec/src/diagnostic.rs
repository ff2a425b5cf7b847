//! Errors in a spec: location and advice.

use std::fmt;

use miette::{GraphicalReportHandler, GraphicalTheme, LabeledSpan, NamedSource};
use serde::{Deserialize, Serialize};

use crate::source::SourceFile;

/// One error.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Diagnostic {
    /// Name of the spec file; empty if the error is in no file.
    pub file: String,
    /// Line, from 1; 0 if the error is in no file.
    pub line: u32,
    /// Column in characters, from 1; 0 if the error is in no file.
    pub column: u32,
    /// The object: `vport red/r1:eth2`.
    pub object: String,
    /// The value and the bound: `mtu 9000 exceeds the underlay's 1450`.
    pub message: String,
    /// Advice; may be empty.
    pub hint: String,
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.file.is_empty() {
            write!(f, "{}:{}:{}: ", self.file, self.line, self.column)?;
        }
        if !self.object.is_empty() {
            write!(f, "{}: ", self.object)?;
        }
        write!(f, "{}", self.message)?;
        if !self.hint.is_empty() {
            write!(f, " ({})", self.hint)?;
        }
        Ok(())
    }
}

impl std::error::Error for Diagnostic {}

/// A diagnostic with its source text, for miette.
#[derive(Debug)]
struct DiagnosticReport<'a> {
    diagnostic: &'a Diagnostic,
    source: Option<NamedSource<String>>,
    offset: usize,
    length: usize,
}

impl fmt::Display for DiagnosticReport<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Diagnostic { object, message, .. } = self.diagnostic;
        let colon = if object.is_empty() { "" } else { ": " };
        write!(f, "{object}{colon}{message}")
    }
}

impl std::error::Error for DiagnosticReport<'_> {}

impl miette::Diagnostic for DiagnosticReport<'_> {
    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        let hint = &self.diagnostic.hint;
        if hint.is_empty() { None } else { Some(Box::new(hint)) }
    }

    fn source_code(&self) -> Option<&dyn miette::SourceCode> {
        self.source.as_ref().map(|source| source as &dyn miette::SourceCode)
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        self.source.as_ref()?;
        let span = LabeledSpan::new(Some("here".into()), self.offset, self.length);
        Some(Box::new(std::iter::once(span)))
    }
}

/// Renders diagnostics, each with its line of the spec and a mark under the
/// location. With `colour`: terminal colours and box characters, else plain text.
pub fn render(diagnostics: &[Diagnostic], sources: &[SourceFile], colour: bool) -> String {
    let theme = if colour { GraphicalTheme::unicode() } else { GraphicalTheme::none() };
    let handler = GraphicalReportHandler::new_themed(theme);
    let mut text = String::new();
    for diagnostic in diagnostics {
        let source = sources.iter().find(|source| source.name == diagnostic.file);
        let place = source.and_then(|source| {
            let text = with_line_feeds(&source.text);
            let (offset, length) = byte_span(&text, diagnostic.line, diagnostic.column)?;
            Some((NamedSource::new(&source.name, text), offset, length))
        });
        // A mark below such a line is unreadable, and miette
        // can't print one. Show the surroundings instead.
        if let Some((source, offset, length)) = &place
            && let Some(near) = of_long_line(source.inner(), *offset, *length)
        {
            text.push_str(&format!("{diagnostic}\n  near: {near}\n\n"));
            continue;
        }
        let (source, offset, length) = match place {
            Some((source, offset, length)) => (Some(source), offset, length),
            None => (None, 0, 0),
        };
        let report = DiagnosticReport { diagnostic, source, offset, length };
        if handler.render_report(&mut text, &report).is_err() {
            text.push_str(&diagnostic.to_string());
        }
        text.push('\n');
    }
    text
}

/// Bytes of a line that is shown whole.
const LINE_BYTES_MAX: usize = 4096;

/// Characters shown on both sides of a location in a longer line.
const NEAR_CHARS: usize = 60;

/// Returns the surroundings of a location whose line is too long to be shown.
fn of_long_line(text: &str, offset: usize, length: usize) -> Option<String> {
    let (before, after) = text.split_at_checked(offset)?;
    let before = before.rsplit('\n').next().unwrap_or_default();
    let after = after.split('\n').next().unwrap_or_default();
    if before.len() + after.len() <= LINE_BYTES_MAX {
        return None;
    }
    let from = before.char_indices().rev().nth(NEAR_CHARS).map_or(0, |(at, _)| at);
    let word = after.get(..length).map_or(0, |word| word.chars().count());
    let shown = after.chars().take(word.min(NEAR_CHARS) + NEAR_CHARS);
    let shown: String = before[from..].chars().chain(shown).collect();
    Some(shown.replace(char::is_control, " "))
}

/// Returns the text with a line feed for each carriage return
/// that ends a line, as YAML allows (1.2.2, section 5.4).
fn with_line_feeds(text: &str) -> String {
    let mut rest = text.chars().peekable();
    let mut lines = String::with_capacity(text.len());
    while let Some(char) = rest.next() {
        let alone = char == '\r' && rest.peek() != Some(&'\n');
        lines.push(if alone { '\n' } else { char });
    }
    lines
}

/// Byte offset and length of the word at a line and column, both from 1.
fn byte_span(text: &str, line: u32, column: u32) -> Option<(usize, usize)> {
    let line = usize::try_from(line).ok()?.checked_sub(1)?;
    let column = usize::try_from(column).ok()?.checked_sub(1)?;
    let start: usize = text.split_inclusive('\n').take(line).map(str::len).sum();
    let line = text[start..].lines().next().unwrap_or("");
    let skipped: usize = line.chars().take(column).map(char::len_utf8).sum();
    let rest = &line[skipped..];
    let word = rest.find([' ', ',', '}', ']']).unwrap_or(rest.len());
    Some((start + skipped, word))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Specs on a single line, as programs write them, with
    /// an error at the end; and a word of that length.
    #[test]
    fn shows_context_of_a_fault_in_long_lines() {
        for (length, word) in [(0, 3), (70_000, 3), (65_535, 3), (200_000, 1), (3, 70_000)] {
            for filler in ["x", "\t", "ü", "漢"] {
                let text = format!("{{a: '{}', mtu: {}}}", filler.repeat(length), "9".repeat(word));
                let at = text.find("mtu").unwrap() + 5;
                let column = text[..at].chars().count() as u32 + 1;
                let diagnostic = Diagnostic {
                    file: "one.json".into(),
                    line: 2,
                    column,
                    message: "mtu is too large".into(),
                    hint: "give a smaller one".into(),
                    ..Diagnostic::default()
                };
                let text = format!("first\n{text}\nlast");
                let source = SourceFile { name: "one.json".into(), text, ..SourceFile::default() };
                for colour in [false, true] {
                    let shown = render(
                        std::slice::from_ref(&diagnostic),
                        std::slice::from_ref(&source),
                        colour,
                    );
                    assert!(shown.contains("mtu is too large") && shown.contains("mtu: 9"));
                    let long = length.max(word) > 4;
                    assert_eq!(shown.contains(&format!("one.json:2:{column}: mtu is")), long);
                    assert!(shown.len() < 2000, "{} bytes", shown.len());
                }
            }
        }
    }
}
