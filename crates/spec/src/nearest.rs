//! Similar words, for advice about misspelt ones.

/// Returns the entry of `known` that is most similar to `word`, if one is similar.
pub(crate) fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let distance = |k: &&str| strsim::damerau_levenshtein(&word.to_lowercase(), &k.to_lowercase());
    let best = known.min_by_key(distance)?;
    (distance(&best) <= 1 + word.chars().count() / 4).then_some(best)
}
