//! Asks many helpers in parallel, with one deadline for all.
//!
//! A helper runs on its node's CPU share. If the node leaves it none, the helper answers late or
//! never. The helpers of one tenant must not delay the answers of others. Tenants therefore take
//! turns, each helper has [`PATIENCE`], and helpers that were late the last time are asked last.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::host::control::ControlError;
use crate::util::lock;

/// Helpers that are asked in parallel.
pub const ASKED_AT_ONCE: usize = 64;

/// Longest wait for one helper.
pub const PATIENCE: Duration = Duration::from_secs(3);

/// Longest wait for all helpers.
pub const DEADLINE: Duration = Duration::from_secs(6);

/// Socket paths of the helpers that were late the last time they were asked.
#[derive(Debug, Default)]
pub struct LateHelpers(Mutex<BTreeSet<PathBuf>>);

/// Question to one helper.
pub struct Question<Q> {
    /// Socket of the helper.
    pub path: PathBuf,
    /// Tenant of the helper's vnet.
    pub tenant: Option<String>,
    /// The question.
    pub what: Q,
}

/// Result of one question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HelperReply<A> {
    /// The helper's answer.
    Reply(A),
    /// The helper does not run, or refused.
    None,
    /// The helper did not answer in time.
    TimedOut,
}

impl LateHelpers {
    /// Asks all helpers. Returns the answers in the order of `questions`.
    pub fn query_all<Q: Sync, A: Send>(
        &self,
        questions: &[Question<Q>],
        ask: impl Fn(&Q, Duration) -> Result<A, ControlError> + Sync,
    ) -> Vec<HelperReply<A>> {
        let end = Instant::now() + DEADLINE;
        let queue = Mutex::new(self.order(questions));
        let answers =
            Mutex::new(questions.iter().map(|_| HelperReply::TimedOut).collect::<Vec<_>>());
        std::thread::scope(|scope| {
            for _ in 0..questions.len().min(ASKED_AT_ONCE) {
                scope.spawn(|| {
                    while let Some(index) = { lock(&queue).pop() } {
                        let wait = end.saturating_duration_since(Instant::now()).min(PATIENCE);
                        if wait.is_zero() {
                            return;
                        }
                        let Question { path, what, .. } = &questions[index];
                        let answer = match ask(what, wait) {
                            Ok(reply) => HelperReply::Reply(reply),
                            Err(error) if error.is_timeout() => HelperReply::TimedOut,
                            Err(_) => HelperReply::None,
                        };
                        let mut late = lock(&self.0);
                        match answer {
                            HelperReply::TimedOut => drop(late.insert(path.clone())),
                            _ => drop(late.remove(path)),
                        }
                        drop(late);
                        lock(&answers)[index] = answer;
                    }
                });
            }
        });
        answers.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Forgets the helpers for which `keep` returns false.
    pub fn keep_only(&self, keep: impl Fn(&PathBuf) -> bool) {
        lock(&self.0).retain(keep);
    }

    /// Returns the indexes of the questions in reverse order: the first one to ask is last.
    fn order<Q>(&self, questions: &[Question<Q>]) -> Vec<usize> {
        let late = lock(&self.0);
        let mut ranks: BTreeMap<&Option<String>, usize> = BTreeMap::new();
        let mut order: Vec<(bool, usize, usize)> = Vec::new();
        for (index, question) in questions.iter().enumerate() {
            let rank = ranks.entry(&question.tenant).or_default();
            *rank += 1;
            order.push((late.contains(&question.path), *rank, index));
        }
        order.sort_unstable_by(|a, b| b.cmp(a));
        order.into_iter().map(|(_, _, index)| index).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The question is whether the helper answers at all.
    fn question(name: &str, tenant: Option<&str>, answers: bool) -> Question<bool> {
        let (path, tenant) = (PathBuf::from(name), tenant.map(str::to_owned));
        Question { path, tenant, what: answers }
    }

    fn answer(answers: &bool, wait: Duration) -> Result<u32, ControlError> {
        if *answers {
            return Ok(7);
        }
        std::thread::sleep(wait);
        Err(ControlError::Unreachable {
            peer: "test",
            path: PathBuf::new(),
            request: "test",
            source: std::io::ErrorKind::WouldBlock.into(),
        })
    }

    #[test]
    fn starved_helpers_do_not_delay_other_replies() {
        let late = LateHelpers::default();
        let mut questions: Vec<_> = (0..3 * ASKED_AT_ONCE)
            .map(|number| question(&format!("starved-{number}"), Some("acme"), false))
            .collect();
        // Behind all starved helpers.
        for number in 0..10 {
            questions.push(question(&format!("other-{number}"), Some("other"), true));
            questions.push(question(&format!("node-{number}"), None, true));
        }
        let begin = Instant::now();
        let answers = late.query_all(&questions, answer);
        assert!(begin.elapsed() < DEADLINE + PATIENCE, "{:?}", begin.elapsed());
        let (starved, others) = answers.split_at(3 * ASKED_AT_ONCE);
        assert!(starved.iter().all(|answer| *answer == HelperReply::TimedOut));
        assert!(others.iter().all(|answer| *answer == HelperReply::Reply(7)), "{others:?}");
        // The late helpers come last from now on, in whatever order they are asked.
        questions.reverse();
        let order = late.order(&questions);
        let known: Vec<bool> = {
            let late = lock(&late.0);
            order.iter().rev().map(|index| late.contains(&questions[*index].path)).collect()
        };
        assert!(known.is_sorted(), "{known:?}");
        late.keep_only(|_| false);
        assert!(lock(&late.0).is_empty());
    }
}
