//! Placeholders in texts: `{n}`, `{n+65000}`, `{(n-1)%4}`, `{name}`.
//!
//! Braces with anything other than known names, numbers and
//! `+ - * / % ( )` are kept, for configuration languages with braces.
//! Text after a `$` is kept, for shells. `{{n}}` means a literal `{n}`.

use std::borrow::Cow;

/// Maximum bytes between the braces of a placeholder.
const BYTES_MAX: usize = 64;

/// Values of placeholders.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Values<'a> {
    /// `{name}`: the node's name.
    pub name: Option<&'a str>,
    /// `{n}`: number of the first range.
    pub n: Option<u64>,
    /// `{m}`: number of the second range.
    pub m: Option<u64>,
    /// `{i}`: number of an interface's range.
    pub i: Option<u64>,
}

impl Values<'_> {
    /// Takes the numbers of a name's ranges.
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

    /// Returns the value of an expression; `None` if it is no placeholder.
    ///
    /// # Errors
    /// Why it has no value.
    fn evaluate(&self, text: &str) -> Option<Result<String, String>> {
        if text == "name" {
            return Some(Ok(self.name?.to_owned()));
        }
        let mut expression = Expression { values: self, rest: text, named: false };
        let value = expression.sum()?;
        if !expression.rest.is_empty() || !expression.named {
            return None;
        }
        let value = value.and_then(|value| u64::try_from(value).ok());
        Some(value.map(|value| value.to_string()).ok_or_else(|| {
            let values = [("n", self.n), ("m", self.m), ("i", self.i)].into_iter();
            let values = values.filter_map(|(name, value)| Some(format!("{name} {}", value?)));
            let values: Vec<String> = values.collect();
            format!("{{{text}}} is not a whole number of 0 or more where {}", values.join(", "))
        }))
    }

    /// Returns a text with its placeholders replaced.
    ///
    /// # Errors
    /// Why one can't be replaced.
    pub fn fill<'t>(&self, text: &'t str) -> Result<Cow<'t, str>, String> {
        let (mut filled, mut rest) = (String::new(), text);
        while let Some(open) = rest.find('{') {
            let (before, from) = rest.split_at(open);
            filled.push_str(before);
            let plain = from.starts_with("{{");
            let skip = 1 + usize::from(plain);
            let of_expression = |b: &u8| b.is_ascii_alphanumeric() || b"+-*/%()".contains(b);
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

/// Parser of an expression. Its functions return `None` if the text is no expression,
/// and `Some(None)` if it has no value: it divides by zero or is too large.
struct Expression<'a> {
    values: &'a Values<'a>,
    rest: &'a str,
    /// True after a name.
    named: bool,
}

impl Expression<'_> {
    fn sum(&mut self) -> Option<Option<i128>> {
        let mut sum = self.product()?;
        while let Some(sign) = self.take("+-") {
            let pair = sum.zip(self.product()?);
            sum = pair.and_then(|(a, b)| match sign {
                '+' => a.checked_add(b),
                _ => a.checked_sub(b),
            });
        }
        Some(sum)
    }

    fn product(&mut self) -> Option<Option<i128>> {
        let mut product = self.factor()?;
        while let Some(sign) = self.take("*/%") {
            let pair = product.zip(self.factor()?);
            product = pair.and_then(|(a, b)| match sign {
                '*' => a.checked_mul(b),
                '/' => a.checked_div(b),
                _ => a.checked_rem(b),
            });
        }
        Some(product)
    }

    fn factor(&mut self) -> Option<Option<i128>> {
        if self.take("(").is_some() {
            let value = self.sum()?;
            return self.take(")").map(|_| value);
        }
        let end = self.rest.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        self.named |= word.starts_with(|c: char| c.is_ascii_alphabetic());
        self.values.number(word).map(|number| Some(number.into()))
    }

    /// Takes the next character if it is one of these.
    fn take(&mut self, signs: &str) -> Option<char> {
        let sign = self.rest.chars().next().filter(|sign| signs.contains(*sign))?;
        self.rest = &self.rest[sign.len_utf8()..];
        Some(sign)
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
            ("{(n-1)%4}{2*(n+(i-1))}{((n))}", "2187"),
            ("{(n}{n)}{()}{(n)i}{(1+1)} {n/0+x}", "{(n}{n)}{()}{(n)i}{(1+1)} {n/0+x}"),
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
    fn placeholders_without_a_whole_number_are_reported() {
        let values = Values { n: Some(7), ..Values::default() };
        let most = "{n*18446744073709551615*18446744073709551615}";
        for text in ["{n-8}", "{n/0}", "{n%0}", "{n*18446744073709551615}", most] {
            let why = values.fill(text).unwrap_err();
            assert_eq!(why, format!("{text} is not a whole number of 0 or more where n 7"));
        }
    }

    /// Quadratic time would take minutes here.
    #[test]
    fn unclosed_braces_take_linear_time() {
        let text = "{".repeat(4 << 20);
        assert_eq!(Values { n: Some(1), ..Values::default() }.fill(&text).as_deref(), Ok(&*text));
    }
}
