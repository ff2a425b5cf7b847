//! Expansion of links: one for each name of the endpoint with ranges, or one segment of all.

use super::Expansion;
use super::merge::{merge, without};
use super::range::NamePattern;
use super::template::Values;
use crate::limits::{ENDS_MAX, LINKS_MAX};
use crate::tree::{JsonPointer, Tree, YamlValue};

/// Ranges of the endpoint that has them; their numbers are `n` and `m`.
const RANGES_MAX: usize = 2;

/// Returns a link's endpoints.
pub(super) fn ends(link: &Tree) -> &[Tree] {
    match link.value.get("endpoints").map(|tree| &tree.value) {
        Some(YamlValue::List(ends)) => ends,
        _ => &[],
    }
}

impl<'a> Expansion<'a> {
    /// Expands all links.
    pub(super) fn links(&mut self, links: &'a [Tree], at: &JsonPointer) -> Vec<Tree> {
        let mut made = Vec::new();
        for (index, link) in links.iter().enumerate() {
            let path = at.index(index);
            let Some(count) = self.count_of(link, &path) else { continue };
            let all = count.saturating_add(made.len() as u64);
            if all > LINKS_MAX as u64 && count > 1 {
                let message =
                    format!("with these endpoints there are {all} links, {LINKS_MAX} at most");
                self.fault(link.position, &path, message, "make the ranges shorter");
                return made;
            }
            for which in 0..count {
                let Some(one) = self.link(link, which, &path) else { return made };
                made.push(one);
            }
        }
        made
    }

    /// Returns the number of links that one expands to; `None` if it is invalid.
    fn count_of(&mut self, link: &Tree, path: &JsonPointer) -> Option<u64> {
        let mut ranged: Vec<(&Tree, NamePattern<'_>)> = Vec::new();
        for end in ends(link) {
            if let YamlValue::Text(text) = &end.value {
                let pattern = NamePattern::read_or_plain(text);
                ranged.extend((pattern.ranges() > 0).then_some((end, pattern)));
            }
        }
        let path = path.key("endpoints");
        if link.value.get("segment").is_some() {
            let plain = ends(link).len() - ranged.len();
            let count = ranged.iter().map(|(_, pattern)| pattern.count());
            let count = count.fold(plain as u64, u64::saturating_add);
            if count > ENDS_MAX as u64
                && let Some((end, _)) = ranged.first()
            {
                let message = format!("the segment has {count} ends, {ENDS_MAX} at most");
                self.fault(end.position, &path, message, "make the ranges shorter");
                return None;
            }
            return Some(1);
        }
        let Some((first, rest)) = ranged.split_first() else { return Some(1) };
        let most = if rest.is_empty() { RANGES_MAX } else { 1 };
        for (end, pattern) in &ranged {
            if pattern.ranges() > most {
                let hint = "give ranges at one end and placeholders at the others: \
                            [\"leaf[1-4]:eth[1-2]\", \"spine{m}:eth{n}\"]";
                let ranges = pattern.ranges();
                let message = match rest.is_empty() {
                    true => format!("an endpoint has {ranges} ranges, {most} at most"),
                    false => {
                        format!("one endpoint has {ranges} ranges and another has ranges too")
                    }
                };
                self.fault(end.position, &path, message, hint);
                return None;
            }
            if pattern.count() != first.1.count() {
                let (one, other) = (first.1.count(), pattern.count());
                let message = format!("endpoints have ranges of {one} and {other} numbers");
                let hint = "they advance together: make them equal, or add segment: {} if all are \
                            on one segment";
                self.fault(end.position, &path, message, hint);
                return None;
            }
        }
        Some(first.1.count())
    }

    /// Returns one of the links that `link` expands to.
    fn link(&mut self, link: &Tree, which: u64, path: &JsonPointer) -> Option<Tree> {
        let segment = link.value.get("segment").is_some();
        let ranged = ends(link).iter().find_map(|end| match &end.value {
            YamlValue::Text(text) => {
                Some(NamePattern::read_or_plain(text)).filter(|it| it.ranges() > 0)
            }
            _ => None,
        });
        let ranged = ranged.filter(|_| !segment);
        let numbers = ranged.map(|pattern| pattern.at(which).1).unwrap_or_default();
        let values = Values::of(&numbers);
        let group = self.group("linkGroups", link, path)?;
        let mut whole = Tree { position: link.position, value: YamlValue::Map(Vec::new()) };
        for layer in [self.of("linkDefaults"), group].into_iter().flatten() {
            let layer = self.fill(layer, &values, path)?;
            merge(&mut whole, layer, &mut Vec::new());
        }
        let mut own = self.fill(link, &values, path)?;
        if let YamlValue::Map(entries) = &mut own.value
            && let Some((.., list)) = entries.iter_mut().find(|(_, key, _)| key == "endpoints")
            && let YamlValue::List(written) = &mut list.value
        {
            let mut all = Vec::with_capacity(written.len());
            for end in written.drain(..) {
                let name = |text| Tree { position: end.position, value: YamlValue::Text(text) };
                match &end.value {
                    YamlValue::Text(text) => {
                        let pattern = NamePattern::read_or_plain(text);
                        let places = if segment { 0..pattern.count() } else { which..which + 1 };
                        match pattern.ranges() {
                            0 => all.push(end),
                            _ => all.extend(places.map(|place| name(pattern.at(place).0))),
                        }
                    }
                    _ => all.push(end),
                }
            }
            *written = all;
        }
        merge(&mut whole, without(own, "group"), &mut Vec::new());
        Some(whole)
    }
}
