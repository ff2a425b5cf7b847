//! Makes the card's register package, its constants in Rust, and the map in docs/hardware.md from
//! hw/registers.toml.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use toml_edit::{DocumentMut, InlineTable, Value};

const BEGIN: &str = "<!-- registers: begin -->\n";
const END: &str = "<!-- registers: end -->";

/// Offset of the commit register of table 0.
const COMMIT: u32 = 0x200;

/// A register, or an array of counters.
struct Register {
    name: String,
    offset: u32,
    /// Last offset.
    end: u32,
    /// The pages of the VEs have it too.
    of_ve: bool,
    access: String,
    bits: u32,
    reset: String,
    /// Words of a counter; 1 if it is no counter.
    words: u32,
    counts: Vec<u32>,
    meaning: String,
}

/// A table of the write bus.
struct Table {
    name: String,
    number: u32,
    of_ve: bool,
    words: u32,
    index: String,
    entry: String,
}

fn name(row: &InlineTable) -> &str {
    row.get("name").and_then(Value::as_str).unwrap_or("a row without name")
}

/// Panics if a row lacks a key or has an unknown one.
fn check_keys(row: &InlineTable, needed: &[&str], optional: &[&str]) {
    for key in needed {
        assert!(row.contains_key(key), "{} lacks the key {key}", name(row));
    }
    for (key, _) in row {
        assert!(
            needed.contains(&key) || optional.contains(&key),
            "{}: unknown key {key}",
            name(row)
        );
    }
}

fn text(table: &InlineTable, key: &str, default: &str) -> String {
    let value = table.get(key).map(|value| value.as_str().expect("a string"));
    value.unwrap_or(default).into()
}

/// Returns one of a few texts; the first one is the default.
fn choice(table: &InlineTable, key: &str, choices: &[&str]) -> String {
    let value = text(table, key, choices[0]);
    assert!(choices.contains(&&*value), "{}: {key} is none of {choices:?}", name(table));
    value
}

fn number(table: &InlineTable, key: &str, default: u32) -> u32 {
    let value = table.get(key).map(|value| value.as_integer().expect("a number"));
    value.map_or(default, |value| value.try_into().expect("32 bits"))
}

/// True if the pages of the VEs have it too.
fn of_ve(table: &InlineTable) -> bool {
    choice(table, "pages", &["super", "both"]) == "both"
}

fn register(table: &InlineTable) -> Register {
    let optional = ["pages", "access", "bits", "reset", "counts", "words"];
    check_keys(table, &["name", "offset", "meaning"], &optional);
    let words = number(table, "words", 1);
    let counts = table.get("counts").and_then(Value::as_array);
    let counts: Vec<u32> =
        counts.into_iter().flatten().filter_map(Value::as_integer).map(|it| it as u32).collect();
    let offset = number(table, "offset", 0);
    let size = if words == 1 { 4 } else { 16 * counts.iter().product::<u32>() };
    Register {
        name: text(table, "name", ""),
        offset,
        end: offset + size - 1,
        of_ve: of_ve(table),
        access: choice(table, "access", &["ro", "rw", "wo"]),
        bits: number(table, "bits", if words == 1 { 32 } else { 64 }),
        reset: text(table, "reset", "0"),
        words,
        counts,
        meaning: text(table, "meaning", ""),
    }
}

fn table(table: &InlineTable) -> Table {
    check_keys(table, &["name", "number", "words", "index", "entry"], &["pages"]);
    Table {
        name: text(table, "name", ""),
        number: number(table, "number", 0),
        of_ve: of_ve(table),
        words: number(table, "words", 1),
        index: text(table, "index", ""),
        entry: text(table, "entry", ""),
    }
}

impl Table {
    fn offset(&self) -> u32 {
        COMMIT + 4 * self.number
    }
}

/// All registers and tables, in the order of the file.
struct Map {
    registers: Vec<Register>,
    tables: Vec<Table>,
}

impl Map {
    fn read() -> Self {
        Self::parse(&std::fs::read_to_string(root().join("hw/registers.toml")).unwrap())
    }

    fn parse(file: &str) -> Self {
        let document: DocumentMut = file.parse().unwrap();
        assert!(document.iter().all(|(key, _)| ["register", "table"].contains(&key)));
        let rows = |key: &str| document[key].as_array().unwrap().iter();
        let rows = |key: &str| rows(key).map(|row| row.as_inline_table().expect("a row"));
        Self {
            registers: rows("register").map(register).collect(),
            tables: rows("table").map(table).collect(),
        }
    }

    /// Returns the package for SystemVerilog.
    fn verilog(&self) -> String {
        let mut out = String::from(
            "// Register map of the card. Generated from hw/registers.toml; see docs/hardware.md.\n\
             package card_registers_pkg;\n\n  \
             // Offset in a page.\n  typedef logic [15:0] offset_t;\n\n  \
             // verilator lint_off UNUSEDPARAM\n",
        );
        for it in &self.registers {
            writeln!(out, "  localparam offset_t R_{} = 16'h{:04x};", it.name, it.offset).unwrap();
            if it.words > 1 {
                writeln!(out, "  localparam offset_t R_{}_END = 16'h{:04x};", it.name, it.end)
                    .unwrap();
            }
        }
        let last = self.tables.iter().map(Table::offset).max().unwrap_or(COMMIT);
        writeln!(out, "  localparam offset_t R_COMMIT = 16'h{COMMIT:04x};").unwrap();
        writeln!(out, "  localparam offset_t R_COMMIT_END = 16'h{:04x};", last + 3).unwrap();
        for it in &self.tables {
            writeln!(out, "  localparam offset_t R_COMMIT_{} = 16'h{:04x};", it.name, it.offset())
                .unwrap();
        }
        for it in self.registers.iter().filter(|it| !["parameter", "-"].contains(&&*it.reset)) {
            if it.words == 1 {
                let (name, bits) = (&it.name, it.bits);
                let reset = parse(&it.reset);
                writeln!(
                    out,
                    "  localparam logic [{}:0] R_{name}_RESET = {bits}'h{reset:x};",
                    bits - 1
                )
                .unwrap();
            }
        }
        out += "  // verilator lint_on UNUSEDPARAM\n\n  \
                // True if a page has a readable register there.\n  \
                function automatic logic can_read(input logic super_page, input offset_t offset);\n    \
                logic word;\n    word = offset[1:0] == '0;\n    case (offset) inside\n";
        for it in self.registers.iter().filter(|it| it.access != "wo") {
            let (name, counter) = (&it.name, it.words > 1);
            let conditions =
                [(!it.of_ve, "super_page"), (counter, "word"), (it.words == 2, "!offset[3]")];
            let conditions = conditions.iter().filter(|(needed, _)| *needed).map(|it| it.1);
            let conditions: Vec<_> = conditions.collect();
            let can = if conditions.is_empty() { "1'b1".into() } else { conditions.join(" && ") };
            let label =
                if counter { format!("[R_{name} : R_{name}_END]") } else { format!("R_{name}") };
            writeln!(out, "      {label}: can_read = {can};").unwrap();
        }
        out += "      default: can_read = 1'b0;\n    endcase\n  endfunction\n\n  \
                // True if a page has a writable register there.\n  \
                function automatic logic can_write(input logic super_page, input offset_t offset);\n    \
                case (offset)\n";
        let writable = self.registers.iter().filter(|it| it.access != "ro");
        let writable = writable.map(|it| (it.of_ve, it.name.clone()));
        let commits = self.tables.iter().map(|it| (it.of_ve, format!("COMMIT_{}", it.name)));
        for (of_ve, name) in writable.chain(commits) {
            let pages = if of_ve { "1'b1" } else { "super_page" };
            writeln!(out, "      R_{name}: can_write = {pages};").unwrap();
        }
        out += "      default: can_write = 1'b0;\n    endcase\n  endfunction\n\nendpackage\n";
        out
    }

    /// Returns the constants for Rust.
    fn rust(&self) -> String {
        let mut out = String::from(
            "//! Register map of the card. Generated from hw/registers.toml; see docs/hardware.md.\n\n\
             /// Returns the address of an offset in the super page.\n\
             pub const fn super_page(offset: u32) -> u32 {\n    offset\n}\n\n\
             /// Returns the address of an offset in a VE's page.\n\
             pub const fn ve_page(ve: u8, offset: u32) -> u32 {\n    \
             (1 + ve as u32) << 16 | offset\n}\n\n\
             /// Returns the offset of the register that commits an entry to a table.\n\
             pub const fn commit(table: u32) -> u32 {\n    COMMIT + 4 * table\n}\n\n\
             /// Returns the offset of a counter by ingress port and verdict.\n\
             pub const fn verdict(port: u8, verdict: u8) -> u32 {\n    \
             VERDICT + 256 * port as u32 + 16 * verdict as u32\n}\n\n",
        );
        for it in &self.registers {
            let comment = it.meaning.replace(" See below.", "");
            for line in wrapped(&comment, 96) {
                writeln!(out, "/// {line}").unwrap();
            }
            writeln!(out, "pub const {}: u32 = 0x{:04x};", it.name, it.offset).unwrap();
        }
        writeln!(out, "/// Index to commit an entry of table 0.").unwrap();
        writeln!(out, "pub const COMMIT: u32 = 0x{COMMIT:04x};\n").unwrap();
        for it in &self.tables {
            writeln!(out, "/// Number of table {}.", it.name).unwrap();
            writeln!(out, "pub const TABLE_{}: u32 = {};", it.name, it.number).unwrap();
        }
        writeln!(out, "\n/// Words of an entry, by table.").unwrap();
        let words: Vec<String> = self.tables.iter().map(|it| it.words.to_string()).collect();
        let (start, list) = (format!("[usize; {}] =", words.len()), words.join(", "));
        writeln!(out, "pub const ENTRY_WORDS: {start} [{list}];").unwrap();
        out
    }

    /// Returns the map for docs/hardware.md.
    fn markdown(&self) -> String {
        let pages = |of_ve| if of_ve { "super, VE" } else { "super" };
        let mut out = String::from(
            "offset | register | pages | access | bits | reset | meaning\n---|---|---|---|---|---|---\n",
        );
        for it in &self.registers {
            let index: String = it.counts.iter().map(|count| format!("[{count}]")).collect();
            let (name, pages) = (&it.name, pages(it.of_ve));
            let kind = match it.words {
                1 => it.bits.to_string(),
                2 => "64".into(),
                _ => "2 × 64".into(),
            };
            let (offset, access, reset) = (it.offset, &it.access, &it.reset);
            let meaning = &it.meaning;
            writeln!(
                out,
                "`0x{offset:04x}` | `{name}{index}` | {pages} | {access} | {kind} | {reset} | {meaning}"
            )
            .unwrap();
        }
        out += "\noffset | register | pages | words | index | entry\n---|---|---|---|---|---\n";
        for it in &self.tables {
            let (offset, name, pages) = (it.offset(), &it.name, pages(it.of_ve));
            let (words, index, entry) = (it.words, &it.index, &it.entry);
            writeln!(
                out,
                "`0x{offset:04x}` | `COMMIT_{name}` | {pages} | {words} | {index} | {entry}"
            )
            .unwrap();
        }
        out
    }

    /// Returns each generated file with its contents.
    fn files(&self) -> [(PathBuf, String); 3] {
        let page = root().join("docs/hardware.md");
        let old = std::fs::read_to_string(&page).unwrap();
        let (before, rest) = old.split_once(BEGIN).unwrap();
        let (_, after) = rest.split_once(END).unwrap();
        [
            (root().join("hw/rtl/card_registers_pkg.sv"), self.verilog()),
            (root().join("crates/card/src/registers.rs"), self.rust()),
            (page, format!("{before}{BEGIN}{}{END}{after}", self.markdown())),
        ]
    }
}

fn parse(number: &str) -> u64 {
    match number.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).unwrap(),
        None => number.parse().unwrap(),
    }
}

/// Breaks a text into lines of at most `width` characters.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().unwrap();
        if line.is_empty() {
            *line = word.into();
        } else if line.len() + 1 + word.len() <= width {
            *line += &format!(" {word}");
        } else {
            lines.push(word.into());
        }
    }
    lines
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn main() -> std::io::Result<()> {
    Map::read().files().into_iter().try_for_each(|(path, text)| std::fs::write(path, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_files_are_current() {
        for (path, text) in Map::read().files() {
            let current = std::fs::read_to_string(&path).unwrap();
            assert!(
                current == text,
                "{}: run `cargo run -p pdp-card --example publish` and commit what it wrote",
                path.display()
            );
        }
    }

    /// Reads a map of one register and one table.
    fn read_rows(register: &str, table: &str) -> Result<Map, String> {
        let register = format!(r#"{{ name = "A", offset = 0, {register} }}"#);
        let table = format!(r#"{{ name = "B", number = 0, words = 1, index = "0", {table} }}"#);
        let file = format!("register = [{register}]\ntable = [{table}]\n");
        let read = std::panic::catch_unwind(|| Map::parse(&file));
        read.map_err(|panic| panic.downcast::<String>().map_or_else(|_| "?".into(), |it| *it))
    }

    #[test]
    fn unknown_and_missing_keys_are_refused() {
        let (register, table) = (r#"meaning = "m""#, r#"entry = "e""#);
        assert!(read_rows(register, table).is_ok());
        let refused = |register: &str, table: &str, text: &str| {
            let message = read_rows(register, table).err().unwrap();
            assert!(message.contains(text), "{message}");
        };
        refused(r#"meaning = "m", mode = "rw""#, table, "unknown key mode");
        refused(r#"bits = 3"#, table, "lacks the key meaning");
        refused(r#"meaning = "m", access = "w""#, table, "access is none of");
        refused(register, r#"entry = "e", page = "both""#, "unknown key page");
        refused(register, r#"pages = "both""#, "lacks the key entry");
    }

    #[test]
    fn registers_do_not_overlap() {
        let map = Map::read();
        let commits = map.tables.iter().map(|it| (it.offset(), it.offset() + 3));
        let mut ranges: Vec<(u32, u32)> =
            map.registers.iter().map(|it| (it.offset, it.end)).chain(commits).collect();
        ranges.sort_unstable();
        for pair in ranges.windows(2) {
            assert!(pair[0].1 < pair[1].0, "{:04x} and {:04x}", pair[0].0, pair[1].0);
        }
    }

    #[test]
    fn tables_are_those_of_the_write_bus() {
        let package = std::fs::read_to_string(root().join("hw/rtl/card_pkg.sv")).unwrap();
        let rows = package.lines().filter_map(|line| line.trim().strip_prefix("TABLE_"));
        let rows: Vec<(String, u32, bool)> = rows
            .filter_map(|row| {
                let (name, rest) = row.split_once('=')?;
                let (number, comment) = rest.split_once("//")?;
                let number = number.trim().trim_end_matches(',').strip_prefix("5'd")?;
                let of_ve = !comment.trim_start().starts_with("super");
                Some((name.trim().into(), number.parse().ok()?, of_ve))
            })
            .collect();
        let tables = Map::read().tables;
        let tables: Vec<_> =
            tables.into_iter().map(|it| (it.name, it.number, it.of_ve)).take(rows.len()).collect();
        assert!(rows.len() == 18);
        assert_eq!(tables, rows);
    }
}
