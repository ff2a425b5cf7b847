//! `-o`: the format of an answer, or parts of it.
//!
//! Templates of `jsonpath` are like kubectl's: text, with expressions in braces. Expressions follow
//! RFC 9535, and their `$` is optional. Use `[*]` instead of kubectl's `range` and `end`.

use std::io;
use std::process::ExitCode;
use std::str::FromStr;

use serde::Serialize;
use serde_json::{Value, json};
use serde_json_path::JsonPath;

use super::Format;
use crate::failure::CliFailure;
use crate::output;

/// Flags of verbs with several output formats.
#[derive(Debug, clap::Args)]
pub struct Shape {
    /// Format: table, wide (some tables with more columns), json, yaml, or jsonpath=TEMPLATE for
    /// parts of the answer, as `{[*].name}` or 'is {.status.phase}'.
    #[arg(
        short = 'o',
        long = "format",
        visible_alias = "output",
        value_name = "FORMAT",
        default_value = "table"
    )]
    how: OutputShape,
}

#[derive(Clone, Debug)]
enum OutputShape {
    Plain(Format),
    Wide,
    Parts(JsonPathTemplate),
}

impl FromStr for OutputShape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "table" => Ok(Self::Plain(Format::Table)),
            "wide" => Ok(Self::Wide),
            "json" => Ok(Self::Plain(Format::Json)),
            "yaml" => Ok(Self::Plain(Format::Yaml)),
            _ => match text.strip_prefix("jsonpath=") {
                Some(template) => template.parse().map(Self::Parts),
                None => Err("use table, wide, json, yaml or jsonpath=TEMPLATE".into()),
            },
        }
    }
}

impl Shape {
    /// True for a table.
    pub fn is_table(&self) -> bool {
        matches!(self.how, OutputShape::Plain(Format::Table) | OutputShape::Wide)
    }

    /// Prints a value, or the text that `table` returns. The second argument of `table` is true for
    /// the wide format.
    pub fn print<T: Serialize>(
        &self,
        value: &T,
        table: impl FnOnce(&T, bool) -> String,
    ) -> Result<ExitCode, CliFailure> {
        match &self.how {
            OutputShape::Plain(format) => {
                output::print(*format, value, |value| table(value, false))
            }
            OutputShape::Wide => output::write(table(value, true).as_bytes()),
            OutputShape::Parts(template) => {
                let value = serde_json::to_value(value).map_err(io::Error::other)?;
                output::write((template.of(&value) + "\n").as_bytes())
            }
        }
    }

    /// Prints an object. Other formats than the table print the applied document with its status.
    /// If there is no document, they print only the status.
    pub fn print_object<T>(
        &self,
        (document, status): (Option<&Value>, &impl Serialize),
        value: &T,
        table: impl FnOnce(&T) -> String,
    ) -> Result<ExitCode, CliFailure> {
        if self.is_table() {
            return output::write(table(value).as_bytes());
        }
        let mut object = document.cloned().unwrap_or_else(|| json!({}));
        object["status"] = serde_json::to_value(status).map_err(std::io::Error::other)?;
        self.print(&object, |_, _| String::new())
    }
}

/// Text with expressions for parts of a value.
#[derive(Clone, Debug)]
struct JsonPathTemplate(Vec<TemplatePart>);

#[derive(Clone, Debug)]
enum TemplatePart {
    Text(String),
    Path(JsonPath),
}

impl FromStr for JsonPathTemplate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if !text.contains('{') {
            return Ok(Self(vec![path(text)?]));
        }
        let (mut parts, mut rest) = (Vec::new(), text);
        while let Some((before, inside)) = rest.split_once('{') {
            let end =
                end_of(inside).ok_or_else(|| format!("missing }} for the {{ before {inside:?}"))?;
            parts.extend((!before.is_empty()).then(|| TemplatePart::Text(before.into())));
            parts.push(part(inside[..end].trim())?);
            rest = &inside[end + 1..];
        }
        parts.extend((!rest.is_empty()).then(|| TemplatePart::Text(rest.into())));
        Ok(Self(parts))
    }
}

/// Finds the brace that ends an expression. Quotes in it may have braces.
fn end_of(text: &str) -> Option<usize> {
    let (mut quote, mut escaped) = (None, false);
    for (at, letter) in text.char_indices() {
        match quote {
            _ if escaped => escaped = false,
            Some(_) if letter == '\\' => escaped = true,
            Some(open) if letter == open => quote = None,
            Some(_) => {}
            None if letter == '}' => return Some(at),
            None => quote = Some(letter).filter(|letter| ['"', '\''].contains(letter)),
        }
    }
    None
}

fn part(text: &str) -> Result<TemplatePart, String> {
    let keyword = text.split(' ').next().unwrap_or_default();
    if ["range", "end"].contains(&keyword) {
        return Err(format!("{keyword} is not supported; {{[*].name}} prints every object's name"));
    }
    if text.starts_with('"') {
        let literal = serde_json::from_str(text);
        return literal.map(TemplatePart::Text).map_err(|error| format!("{text}: {error}"));
    }
    path(text)
}

fn path(text: &str) -> Result<TemplatePart, String> {
    let whole = match text.chars().next() {
        Some('$') => text.to_owned(),
        Some('.' | '[') if text != "." => format!("${text}"),
        Some('@') => format!("${}", &text[1..]),
        None | Some('.') => "$".to_owned(),
        Some(_) => format!("$.{text}"),
    };
    JsonPath::parse(&whole).map(TemplatePart::Path).map_err(|error| format!("{text:?}: {error}"))
}

impl JsonPathTemplate {
    /// Evaluates the template. Several values of an expression have a space in between; texts have
    /// no quotes.
    fn of(&self, value: &Value) -> String {
        let word = |value: &Value| match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let part = |part: &TemplatePart| match part {
            TemplatePart::Text(text) => text.clone(),
            TemplatePart::Path(path) => {
                path.query(value).iter().map(|value| word(value)).collect::<Vec<_>>().join(" ")
            }
        };
        self.0.iter().map(part).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jsonpath_templates_work_like_kubectls() {
        let value = serde_json::json!([
            {"name": "r1", "up": true, "labels": {"a.b/c": "x}"}, "ports": [{"name": "eth0"}, {"name": "eth1"}]},
            {"name": "h1", "up": false, "labels": {}},
        ]);
        for (template, text) in [
            ("{[*].name}", "r1 h1"),
            ("$[*].name", "r1 h1"),
            ("[0].up", "true"),
            ("{$[0].ports}", r#"[{"name":"eth0"},{"name":"eth1"}]"#),
            (r#"{[1].name}: {[1].up}{"\n\t"}{[0].ports[-1].name}!"#, "h1: false\n\teth1!"),
            ("{..name}", "r1 h1 eth0 eth1"),
            ("{[?@.up==true].name}", "r1"),
            ("{[?@.labels['a.b/c']=='x}'].name}", "r1"),
            ("<{[*].none}>", "<>"),
        ] {
            let parsed: JsonPathTemplate =
                template.parse().unwrap_or_else(|error| panic!("{template}: {error}"));
            let mut words: Vec<_> = parsed.of(&value).split(' ').map(str::to_owned).collect();
            let mut expected: Vec<_> = text.split(' ').map(str::to_owned).collect();
            if template.contains("..") {
                // RFC 9535 does not define the order of descendants.
                words.sort();
                expected.sort();
            }
            assert_eq!(words, expected, "{template}");
        }
        assert_eq!("name".parse::<JsonPathTemplate>().unwrap().of(&value[1]), "h1");
        assert_eq!("{.}".parse::<JsonPathTemplate>().unwrap().of(&serde_json::json!(7)), "7");
    }

    #[test]
    fn other_templates_and_shapes_are_refused() {
        for text in ["{", "{.a", "{range [*]}{end}", "{.a[}", "{\"x}", "{'}'", "a b"] {
            assert!(text.parse::<JsonPathTemplate>().is_err(), "{text}");
        }
        for text in ["", "xml", "jsonpath", "jsonpath={"] {
            assert!(text.parse::<OutputShape>().is_err(), "{text}");
        }
    }
}
