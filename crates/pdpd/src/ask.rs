//! Many helpers asked side by side, with one deadline for all.
//!
//! A helper runs on what its node has of the CPU: one whose node leaves it none answers late or not at
//! all. No tenant's helpers hold up the answers of others: they are asked in turn, tenant by tenant, each
//! has [`PATIENCE`], and those that did not answer when they were last asked come after all others.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::control::ControlError;
use crate::reconcile::lock;

/// Helpers that are asked at the same time.
pub const ASKED_AT_ONCE: usize = 64;

/// Longest wait for one of them.
pub const PATIENCE: Duration = Duration::from_secs(3);

/// Longest wait for all of them.
pub const DEADLINE: Duration = Duration::from_secs(6);

/// Helpers that did not answer in time when they were last asked, by where they listen.
#[derive(Debug, Default)]
pub struct Late(Mutex<BTreeSet<PathBuf>>);

/// What one helper is asked.
pub struct Question<Q> {
    /// Where it listens.
    pub path: PathBuf,
    /// Whose vnet it is of.
    pub tenant: Option<String>,
    /// What is asked.
    pub what: Q,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer<A> {
    /// What it said.
    Said(A),
    /// It is not there, or refused.
    None,
    /// It did not answer in time.
    Late,
}

impl Late {
    /// Asks all, in the order of the answers.
    pub fn ask<Q: Sync, A: Send>(
        &self,
        questions: &[Question<Q>],
        ask: impl Fn(&Q, Duration) -> Result<A, ControlError> + Sync,
    ) -> Vec<Answer<A>> {
        let end = Instant::now() + DEADLINE;
        let queue = Mutex::new(self.order(questions));
        let answers = Mutex::new(questions.iter().map(|_| Answer::Late).collect::<Vec<_>>());
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
                            Ok(said) => Answer::Said(said),
                            Err(error) if error.is_late() => Answer::Late,
                            Err(_) => Answer::None,
                        };
                        let mut late = lock(&self.0);
                        match answer {
                            Answer::Late => drop(late.insert(path.clone())),
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

    /// Forgets those that are not to be asked any more.
    pub fn keep_only(&self, keep: impl Fn(&PathBuf) -> bool) {
        lock(&self.0).retain(keep);
    }

    /// Who is asked when, the first last.
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

    /// What is asked: whether it answers at all.
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
    fn who_is_starved_costs_nobody_elses_answer() {
        let late = Late::default();
        let mut questions: Vec<_> = (0..3 * ASKED_AT_ONCE)
            .map(|number| question(&format!("starved-{number}"), Some("acme"), false))
            .collect();
        // Behind all of these.
        for number in 0..10 {
            questions.push(question(&format!("other-{number}"), Some("other"), true));
            questions.push(question(&format!("node-{number}"), None, true));
        }
        let begin = Instant::now();
        let answers = late.ask(&questions, answer);
        assert!(begin.elapsed() < DEADLINE + PATIENCE, "{:?}", begin.elapsed());
        let (starved, others) = answers.split_at(3 * ASKED_AT_ONCE);
        assert!(starved.iter().all(|answer| *answer == Answer::Late));
        assert!(others.iter().all(|answer| *answer == Answer::Said(7)), "{others:?}");
        // Those that were late come last from now on, whoever asks.
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
