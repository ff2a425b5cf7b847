//! Samples that are printed again and again.

use std::io::{self, IsTerminal};

use serde::Serialize;

use super::{Format, print, write};
use crate::failure::CliFailure;

/// Prints one sample. `again` is true in a series of samples.
pub fn show<T: Serialize>(
    format: Format,
    again: bool,
    sample: &T,
    text: impl Fn(&T) -> String,
) -> Result<(), CliFailure> {
    match format {
        // One line per sample, for programs that read line by line.
        Format::Json if again => {
            let line = serde_json::to_string(sample).map_err(io::Error::other)? + "\n";
            write(line.as_bytes())?;
        }
        Format::Yaml if again => {
            write(b"---\n")?;
            print(format, sample, text)?;
        }
        Format::Table if again && io::stdout().is_terminal() => {
            // Cursor home, and clear the screen (ECMA-48).
            write(format!("\x1b[H\x1b[2J{}", text(sample)).as_bytes())?;
        }
        format => {
            print(format, sample, text)?;
        }
    }
    Ok(())
}

/// Returns the increase of a counter between two samples. A lower value belongs to a new mux, whose
/// counters began at 0.
pub fn since(then: u64, now: u64) -> u64 {
    now.checked_sub(then).unwrap_or(now)
}
