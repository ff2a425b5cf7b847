//! Placeholders in texts: `{n}`, `{n+65000}`, `{n*4+i}`, `{name}`.
//!
//! What is between braces and is not made of known names, numbers and `+ - * / %` alone is left as it is, so that the
//! languages of configuration files keep their braces; so is what follows a `$`, as in shells. `{{n}}` is `{n}` itself.

use std::borrow::Cow;

/// Bytes between the braces of a placeholder.
const BYTES_MAX: usize = 64;

/// What placeholders stand for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Values<'a> {
    /// `{name}`: the node's name.
    pub name: Option<&'a str>,
    /// `{n}`: the number of the first range.
    pub n: Option<u64>,
    /// `{m}`: that of the second.
    pub m: Option<u64>,
    /// `{i}`: that of an interface's range.
    pub i: Option<u64>,
}

impl Values<'_> {
    /// Of the numbers of a name's ranges.
    pub fn of(numbers: &[u64]) -> Self {
        Self { n: numbers.first().copied(), m: numbers.get(1).copied(), ..Self::default() }
    }

    fn number(&self, name: &str) -> Option<u64> {
        match name {
            "n" => self.n,
            "m" => self.m,
            "i" => self.i,
            digits => digits.parse().ok().filter(|_| digits.bytes().all(|b| b.is_ascii_digit())),
        }
    }

    /// What an expression comes to; `None`: it is none of these.
    ///
    /// # Errors
    /// Why it comes to nothing.
    fn evaluate(&self, text: &str) -> Option<Result<String, String>> {
        if text == "name" {
            return Some(Ok(self.name?.to_owned()));
        }
        let named = |word: &str| word.starts_with(|c: char| c.is_ascii_alphabetic());
        let words = text.split(['+', '-', '*', '/', '%']);
        let (mut any, mut numbers) = (false, Vec::new());
        for word in words {
            any |= named(word);
            numbers.push(i128::from(self.number(word)?));
        }
        if !any {
            return None;
        }
        let signs = text.chars().filter(|c| "+-*/%".contains(*c));
        Some(self.compute(numbers, signs).map(|value| value.to_string()).ok_or_else(|| {
            let values = [("n", self.n), ("m", self.m), ("i", self.i)].into_iter();
            let values = values.filter_map(|(name, value)| Some(format!("{name} {}", value?)));
            let values: Vec<String> = values.collect();
            format!("{{{text}}} is not a whole number from 0 on where {}", values.join(", "))
        }))
    }

    /// Products before sums; `None`: below zero, too large, or divided by zero.
    fn compute(&self, numbers: Vec<i128>, signs: impl Iterator<Item = char>) -> Option<u64> {
        let mut numbers = numbers.into_iter();
        let (mut sum, mut product, mut sign) = (0i128, numbers.next()?, 1);
        for (operator, number) in signs.zip(numbers) {
            match operator {
                '*' => product = product.checked_mul(number)?,
                '/' => product = product.checked_div(number)?,
                '%' => product = product.checked_rem(number)?,
                _ => {
                    sum = sum.checked_add(sign * product)?;
                    (product, sign) = (number, if operator == '-' { -1 } else { 1 });
                }
            }
            // No product of two such is too large.
            if product > i128::from(u64::MAX) {
                return None;
            }
        }
        u64::try_from(sum.checked_add(sign * product)?).ok()
    }

    /// A text with its placeholders filled in.
    ///
    /// # Errors
    /// Why one can't be.
    pub fn fill<'t>(&self, text: &'t str) -> Result<Cow<'t, str>, String> {
        let (mut filled, mut rest) = (String::new(), text);
        while let Some(open) = rest.find('{') {
            let (before, from) = rest.split_at(open);
            filled.push_str(before);
            let plain = from.starts_with("{{");
            let skip = 1 + usize::from(plain);
            let of_expression = |b: &u8| b.is_ascii_alphanumeric() || b"+-*/%".contains(b);
            let inside = from.as_bytes()[skip..].iter().take(BYTES_MAX);
            let end = skip + inside.take_while(|byte| of_expression(byte)).count();
            let closed = from[end..].starts_with('}') && !before.ends_with('$');
            let found = closed.then(|| &from[end + 1..]).and_then(|after| {
                let inside = &from[skip..end];
                let after = if plain { after.strip_prefix('}')? } else { after };
                Some((self.evaluate(inside)?, inside, after))
            });
            rest = match found {
                Some((_, inside, after)) if plain => {
                    filled.push_str(&format!("{{{inside}}}"));
                    after
                }
                Some((value, _, after)) => {
                    filled.push_str(&value?);
                    after
                }
                None => {
                    filled.push('{');
                    &from[1..]
                }
            };
        }
        if filled.is_empty() {
            return Ok(text.into());
        }
        filled.push_str(rest);
        Ok(filled.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholders_are_filled_in_and_all_else_stays() {
        let values = Values { name: Some("leaf7"), n: Some(7), i: Some(3), m: None };
        for (text, filled) in [
            ("10.{i}.{n}.1/31", "10.3.7.1/31"),
            ("{n}", "7"),
            ("hostname {name}\nrouter bgp {n+65000}", "hostname leaf7\nrouter bgp 65007"),
            ("{n*4+i-1}", "30"),
            ("{10-n}{n%2}{n/2}", "313"),
            ("{{n}} {{name}} {{x}}", "{n} {name} {{x}}"),
            ("{{{n}}}", "{{n}}"),
            (
                "${n} {n}${HOME} {ports} {m} { n } {} {1} {1+1} {n+} {-n} {n+x} {",
                "${n} 7${HOME} {ports} {m} { n } {} {1} {1+1} {n+} {-n} {n+x} {",
            ),
            ("function f(int n) { return n; }", "function f(int n) { return n; }"),
            ("é{n}é", "é7é"),
            ("plain", "plain"),
            ("", ""),
        ] {
            assert_eq!(values.fill(text).as_deref(), Ok(filled), "{text}");
        }
    }

    #[test]
    fn what_comes_to_nothing_is_told() {
        let values = Values { n: Some(7), ..Values::default() };
        let most = "{n*18446744073709551615*18446744073709551615}";
        for text in ["{n-8}", "{n/0}", "{n%0}", "{n*18446744073709551615}", most] {
            let why = values.fill(text).unwrap_err();
            assert_eq!(why, format!("{text} is not a whole number from 0 on where n 7"));
        }
    }

    /// Whose cost grew with the square of its length would take minutes.
    #[test]
    fn braces_without_end_cost_what_they_are_long() {
        let text = "{".repeat(4 << 20);
        assert_eq!(Values { n: Some(1), ..Values::default() }.fill(&text).as_deref(), Ok(&*text));
    }
}
