//! Label selectors like kubectl's: `key=value,key!=value,key,!key,key in (a,b),key notin (a,b)`.
//!
//! Source: Kubernetes, "Labels and Selectors". An object must meet all requirements. An object
//! without the key meets `!=` and `notin`.

use std::collections::BTreeMap;
use std::str::FromStr;

/// Requirements for labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector {
    text: String,
    requirements: Vec<Requirement>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Requirement {
    /// The key exists.
    Has(String),
    /// The key does not exist.
    HasNot(String),
    /// The key has one of these values.
    In(String, Vec<String>),
    /// The key has none of these values, or does not exist.
    NotIn(String, Vec<String>),
}

impl Selector {
    /// True if the labels meet all requirements.
    pub fn selects(&self, labels: &BTreeMap<String, String>) -> bool {
        self.requirements.iter().all(|requirement| match requirement {
            Requirement::Has(key) => labels.contains_key(key),
            Requirement::HasNot(key) => !labels.contains_key(key),
            Requirement::In(key, values) => labels.get(key).is_some_and(|v| values.contains(v)),
            Requirement::NotIn(key, values) => labels.get(key).is_none_or(|v| !values.contains(v)),
        })
    }
}

impl std::fmt::Display for Selector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for Selector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let requirements = parts(text).into_iter().map(requirement).collect::<Result<_, _>>()?;
        Ok(Self { text: text.into(), requirements })
    }
}

/// Splits at commas outside of parentheses.
fn parts(text: &str) -> Vec<&str> {
    let mut depth = 0;
    let between = |letter: char| {
        match letter {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        letter == ',' && depth == 0
    };
    text.split(between).map(str::trim).collect()
}

fn requirement(part: &str) -> Result<Requirement, String> {
    if let Some((key, value)) = part.split_once("!=") {
        return Ok(Requirement::NotIn(word(key)?, vec![value_of(value)?]));
    }
    if let Some((key, value)) = part.split_once('=') {
        let value = value.strip_prefix('=').unwrap_or(value);
        return Ok(Requirement::In(word(key)?, vec![value_of(value)?]));
    }
    if let Some((head, list)) = part.split_once('(') {
        let list = list.strip_suffix(')').ok_or_else(|| wrong(part))?;
        let values = list.split(',').map(value_of).collect::<Result<_, _>>()?;
        return match head.split_whitespace().collect::<Vec<_>>()[..] {
            [key, "in"] => Ok(Requirement::In(word(key)?, values)),
            [key, "notin"] => Ok(Requirement::NotIn(word(key)?, values)),
            _ => Err(wrong(part)),
        };
    }
    match part.strip_prefix('!') {
        Some(key) => Ok(Requirement::HasNot(word(key)?)),
        None => Ok(Requirement::Has(word(part)?)),
    }
}

fn word(text: &str) -> Result<String, String> {
    match value_of(text)? {
        word if word.is_empty() => Err(wrong(text)),
        word => Ok(word),
    }
}

fn value_of(text: &str) -> Result<String, String> {
    let word = text.trim();
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./".contains(&byte);
    if word.bytes().all(good) { Ok(word.into()) } else { Err(wrong(word)) }
}

fn wrong(part: &str) -> String {
    format!(
        "{part:?} is not a requirement; use key=value, key!=value, key, !key, key in (a,b) or key \
         notin (a,b), with commas between"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selectors_match_like_kubectls() {
        let labels = |text: &str| {
            let pairs = text.split_whitespace().filter_map(|pair| pair.split_once('='));
            pairs.map(|(key, value)| (key.into(), value.into())).collect::<BTreeMap<_, _>>()
        };
        let spine = labels("role=spine rack=1 example.org/x=");
        let leaf = labels("role=leaf");
        for (text, of_spine, of_leaf) in [
            ("role=spine", true, false),
            ("role==spine", true, false),
            ("role!=spine", false, true),
            ("rack!=2", true, true),
            ("rack", true, false),
            ("!rack", false, true),
            ("example.org/x=", true, false),
            ("role in (spine, leaf)", true, true),
            ("role notin (leaf),rack", true, false),
            ("role in (spine,leaf), rack notin (1)", false, true),
            (" role = leaf , !rack ", false, true),
        ] {
            let selector: Selector = text.parse().unwrap();
            assert_eq!(
                (selector.selects(&spine), selector.selects(&leaf)),
                (of_spine, of_leaf),
                "{text}"
            );
            assert_eq!(selector.to_string(), text);
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            ",",
            "a,",
            "=b",
            "!",
            "a b",
            "a in b",
            "a in (b",
            "a near (b)",
            "a=b=c",
            "a>1",
            "a)",
            "ü",
        ] {
            assert!(text.parse::<Selector>().is_err(), "{text}");
        }
    }
}
