//! Labels of nodes, in the format of Kubernetes.
//!
//! Source: Kubernetes, "Labels and Selectors", syntax and character set.

use crate::limits::{LABEL_CHARS_MAX, LABEL_PREFIX_CHARS_MAX};

/// Rules for keys.
pub(super) const KEY_HINT: &str = "use letters, digits, -, _ and ., with a letter or digit first \
                                   and last, after an optional domain and /, as in \
                                   example.org/role";

/// Rules for values.
pub(super) const VALUE_HINT: &str =
    "use letters, digits, -, _ and ., with a letter or digit first and last, or nothing";

/// Returns why a text is no valid label key.
pub(super) fn bad_key(key: &str) -> Option<String> {
    let (prefix, name) = key.rsplit_once('/').map_or((None, key), |(a, b)| (Some(a), b));
    let bad_prefix = prefix.is_some_and(|prefix| {
        prefix.len() > LABEL_PREFIX_CHARS_MAX || !prefix.split('.').all(is_domain_part)
    });
    if bad_prefix {
        return Some(format!(
            "does not have a domain of at most {LABEL_PREFIX_CHARS_MAX} characters before its /"
        ));
    }
    match name.is_empty() {
        true => Some("has no name".into()),
        false => bad_word(name),
    }
}

/// Returns why a text is no valid label value.
pub(super) fn bad_value(value: &str) -> Option<String> {
    if value.is_empty() { None } else { bad_word(value) }
}

fn bad_word(word: &str) -> Option<String> {
    let chars = word.chars().count();
    if chars > LABEL_CHARS_MAX {
        return Some(format!("has {chars} characters, {LABEL_CHARS_MAX} at most"));
    }
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let ends = [word.bytes().next(), word.bytes().last()];
    let ends = ends.into_iter().flatten().all(|byte| byte.is_ascii_alphanumeric());
    (!ends || !word.bytes().all(good)).then(|| "has characters that labels can't have there".into())
}

fn is_domain_part(part: &str) -> bool {
    let good = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !part.is_empty() && !part.starts_with('-') && !part.ends_with('-') && part.bytes().all(good)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_syntax_is_that_of_kubernetes() {
        let long = "a".repeat(LABEL_CHARS_MAX);
        for key in ["a", "A.b_c-1", "example.org/role", "a/b", &long] {
            assert_eq!(bad_key(key), None, "{key}");
        }
        let too_long = long.clone() + "a";
        let domain = format!("{}/a", "a.".repeat(127));
        for key in [
            "", "a/", "/a", "-a", "a-", "a b", "ü", "a=b", "A/b", "a/b/c", "!a", &too_long, &domain,
        ] {
            assert!(bad_key(key).is_some(), "{key}");
        }
        assert_eq!([bad_value(""), bad_value("v1.2"), bad_value(&long)], [None, None, None]);
        for value in [" ", "a,b", "_a", "a/b", &too_long] {
            assert!(bad_value(value).is_some(), "{value}");
        }
    }
}
