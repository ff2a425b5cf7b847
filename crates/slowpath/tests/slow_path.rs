//! The client against a mux's side of the channel.

mod fake;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use fake::{EVENTUALLY, Fake, eventually};
use pdp_proto::slowpath::{FilterCounter, QueueSetting, QueueState, SlowPathRequest};
use pdp_slowpath::{
    Error, Filter, FilterAction, FrameDestination, IpMatch, SlowPathConnection, SlowPathSession,
    copied, discard, filter, pass, send,
};
use proptest::prelude::*;

/// Time limit of calls that are expected to fail.
const SOON: Duration = Duration::from_millis(200);

fn start() -> (tempfile::TempDir, Fake, SlowPathSession) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control.sock");
    let fake = Fake::start(&path);
    let slow_path = SlowPathSession::connect(path).unwrap();
    (directory, fake, slow_path)
}

fn port(id: u32, port: u16) -> Filter {
    filter(id, 10, IpMatch::ip().proto(17).dport(port), discard())
}

fn ids(fake: &Fake) -> Vec<u32> {
    fake.table().filters.keys().copied().collect()
}

#[test]
fn batches_apply_or_fail_as_a_whole() {
    let (_directory, fake, mut slow_path) = start();
    let copy = copied(send(2, [2, 0, 0, 0, 0, 9]), &[1, 3]).unwrap();
    let filters = [port(1, 53), filter(2, 20, IpMatch::ip6(), FilterAction { counter: 7, ..copy })];
    let done = slow_path.batch().set(filters[0]).set(filters[1]).commit().unwrap();
    assert_eq!(done, 2);
    assert_eq!(slow_path.list().unwrap(), filters);
    assert_eq!(fake.table().filters.values().copied().collect::<Vec<_>>(), filters);
    let wrong = filter(3, 1, IpMatch::ip(), send(9, [2, 0, 0, 0, 0, 9]));
    match slow_path.batch().remove(1).set(wrong).commit() {
        Err(Error::Refused { id: 3, reason }) => assert_eq!(reason, "there is no such vport"),
        other => panic!("{other:?}"),
    }
    assert_eq!(ids(&fake), [1, 2]);
    assert_eq!(slow_path.wanted().keys().copied().collect::<Vec<_>>(), [1, 2]);
    assert_eq!(slow_path.batch().remove(1).set(port(4, 1)).commit().unwrap(), 2);
    assert_eq!(ids(&fake), [2, 4]);
    assert_eq!(slow_path.batch().clear().set(port(5, 1)).commit().unwrap(), 1);
    assert_eq!(ids(&fake), [5]);
    // The first commit sweeps the filters of an earlier program.
    assert_eq!(fake.table().commits, [true, false, false]);
    assert!(copied(pass(), &[0; 9]).is_none());
}

#[test]
fn restarted_client_keeps_old_filters_until_first_batch() {
    let (directory, fake, mut slow_path) = start();
    slow_path.batch().set(port(1, 1)).set(port(2, 2)).commit().unwrap();
    drop(slow_path);
    let mut again = SlowPathSession::connect(directory.path().join("control.sock")).unwrap();
    again.counters(0, 1).unwrap();
    again.keep(Duration::ZERO).unwrap();
    assert_eq!(ids(&fake), [1, 2]);
    again.batch().set(port(2, 3)).commit().unwrap();
    assert_eq!(fake.table().filters.values().copied().collect::<Vec<_>>(), [port(2, 3)]);
}

#[test]
fn client_restores_exactly_its_filters_on_restart() {
    let (_directory, mut fake, mut slow_path) = start();
    // Needs several packets and several answers.
    let many = (0..3000).map(|id| port(id, id as u16));
    many.clone().fold(slow_path.batch(), |batch, it| batch.set(it)).commit().unwrap();
    slow_path.batch().remove(7).commit().unwrap();
    let expected: Vec<Filter> = many.filter(|it| it.id != 7).collect();
    for round in 0..3 {
        fake.start_anew();
        fake.table().filters.insert(9999, port(9999, 1));
        match round {
            // With any next call of the program.
            0 => slow_path.keep(EVENTUALLY / 600).unwrap(),
            1 => drop(slow_path.counters(0, 5000).unwrap()),
            _ => drop(slow_path.send(&[0; 60], FrameDestination::In(0))),
        }
        assert_eq!(slow_path.list().unwrap(), expected, "{round}");
        assert_eq!(fake.table().commits.last(), Some(&true));
    }
    assert_eq!(slow_path.welcome().tables, 4);
    // A mux that kept its state receives it again, and nothing is lost or duplicated.
    fake.start_again();
    assert_eq!(slow_path.batch().remove(8).commit().unwrap(), 2998);
}

#[test]
fn client_waits_for_the_mux_until_its_timeout() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control.sock");
    let none = SlowPathSession::connect_within(&path, SOON).unwrap_err();
    assert!(none.is_gone() && none.to_string().contains("no mux listens at "), "{none}");
    let connecting = {
        let path = path.clone();
        std::thread::spawn(move || SlowPathSession::connect(path).map(|it| it.welcome().vports))
    };
    // Probably after a failed attempt.
    std::thread::sleep(SOON);
    let mut fake = Fake::start(&path);
    assert_eq!(connecting.join().unwrap().unwrap(), 4);
    let mut slow_path = SlowPathSession::connect_within(&path, SOON).unwrap();
    slow_path.batch().set(port(1, 1)).commit().unwrap();
    fake.kill();
    let begin = Instant::now();
    assert!(slow_path.counters(0, 1).unwrap_err().is_gone());
    assert!(slow_path.keep(SOON).unwrap_err().is_gone());
    assert!(slow_path.batch().set(port(2, 2)).commit().unwrap_err().is_gone());
    assert!(begin.elapsed() < EVENTUALLY);
    // A batch that may not be in force is not wanted.
    fake.start_anew();
    eventually("the mux", || slow_path.keep(Duration::ZERO).is_ok());
    assert_eq!(ids(&fake), [1]);
}

#[test]
fn client_repeats_a_commit_without_answer() {
    let (_directory, mut fake, mut slow_path) = start();
    slow_path.batch().set(port(1, 1)).set(port(2, 2)).commit().unwrap();
    fake.table().dies_at_commit = true;
    let committing =
        std::thread::spawn(move || slow_path.batch().remove(1).set(port(3, 3)).commit());
    eventually("it died", || fake.table().commits.len() == 2);
    fake.start_anew();
    assert_eq!(committing.join().unwrap().unwrap(), 2);
    assert_eq!(ids(&fake), [2, 3]);
}

#[test]
fn filters_refused_on_restore_are_reported_and_kept() {
    let (_directory, mut fake, mut slow_path) = start();
    slow_path.batch().set(port(1, 1)).set(port(2, 2)).commit().unwrap();
    fake.table().refuses = Some(2);
    fake.start_anew();
    for _ in 0..2 {
        match slow_path.counters(0, 1) {
            Err(Error::Refused { id: 2, .. }) => {}
            other => panic!("{other:?}"),
        }
    }
    assert!(ids(&fake).is_empty());
    slow_path.batch().remove(2).commit().unwrap();
    assert_eq!(ids(&fake), [1]);
}

#[test]
fn disconnected_client_gets_the_reason_and_reconnects() {
    let (directory, fake, mut slow_path) = start();
    slow_path.batch().set(port(1, 1)).commit().unwrap();
    let assert_reason = |result: Result<(), Error>, why: &str| match result {
        Err(Error::Bye(words)) => assert_eq!(words, why),
        other => panic!("{other:?}"),
    };
    // Whether the client waits, requests, or only sends.
    // Also with more than fits once nobody reads.
    fake.table().farewell = Some("too much".into());
    assert_reason(slow_path.counters(0, 1).map(drop), "too much");
    assert!(slow_path.list().is_ok());
    fake.disconnect("for no reason");
    assert_reason(slow_path.keep(EVENTUALLY), "for no reason");
    assert!(slow_path.list().is_ok());
    fake.table().farewell = Some("a flood".into());
    let flood = (0..).find_map(|_| slow_path.send(&[0; 1500], FrameDestination::In(0)).err());
    assert_reason(Err(flood.unwrap()), "a flood");
    assert_eq!(slow_path.list().unwrap(), [port(1, 1)]);
    assert!(matches!(slow_path.send(&[0; 13], FrameDestination::In(0)), Err(Error::Frame(13))));
    fake.table().welcome.version = 9;
    match SlowPathConnection::open(
        &directory.path().join("control.sock"),
        Instant::now() + EVENTUALLY,
    ) {
        Err(Error::Unexpected(words)) => assert!(words.contains("version 9"), "{words}"),
        other => panic!("{other:?}"),
    }
}

/// Any message of the other end causes at most an error.
#[test]
fn invalid_mux_messages_are_errors() {
    for nonsense in [&[0, 4, 200, 0][..], &[0], &[0, 200, 129, 0], &[0, 4, 129, 0]] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.sock");
        let listener = fake::listen_at(&path);
        let says = std::thread::spawn(move || fake::say_once(&listener, nonsense));
        match SlowPathSession::connect(&path) {
            Err(Error::Unexpected(_)) => {}
            other => panic!("{nonsense:?}: {other:?}"),
        }
        says.join().unwrap();
    }
    // A silent mux is waited for at most as long as requested.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control.sock");
    let _listener = fake::listen_at(&path);
    assert!(SlowPathSession::connect_within(&path, SOON).unwrap_err().is_gone());
}

#[test]
fn client_restores_queue_settings_on_restart() {
    let (_directory, mut fake, mut slow_path) = start();
    fake.table().queues = vec![QueueState { weight: 3, frames: 7, ..Default::default() }; 600];
    let set = |queue, weight| QueueSetting { vport: 1, queue, weight, ..Default::default() };
    slow_path.batch().queue(set(1, 5)).queue(set(2, 9)).set(port(1, 53)).commit().unwrap();
    slow_path.batch().queue(set(2, 0)).queue(set(600, 8)).commit().unwrap();
    let refused = slow_path.batch().queue(set(601, 8)).commit().unwrap_err();
    assert_eq!(refused.to_string(), "queue 601 does not exist");
    let queues = slow_path.queues(1).unwrap();
    assert_eq!((queues.len(), queues[599].weight, queues[599].frames), (600, 3, 7));
    assert!(slow_path.queues(0).unwrap().is_empty());
    assert_eq!(
        slow_path.queues(4).unwrap_err().to_string(),
        "vport 4 does not exist: the router has 4, numbered from 0"
    );
    fake.start_anew();
    slow_path.keep(Duration::from_millis(50)).unwrap();
    let expected = [set(1, 5), set(600, 8)].map(|it| ((1, it.queue), it));
    assert_eq!(fake.table().set, expected.into());
}

fn counter_of(number: u64) -> FilterCounter {
    FilterCounter { packets: number, bytes: 64 * number, sent: number / 2, sent_bytes: 32 * number }
}

#[test]
fn client_reads_counters_and_sends_frames() {
    let (_directory, fake, mut slow_path) = start();
    for (number, counter) in fake.table().counters.iter_mut().enumerate() {
        *counter = counter_of(number as u64);
    }
    let counters = slow_path.counters(3, 4997).unwrap();
    assert_eq!(counters.len(), 4997);
    assert_eq!(counters[4000], counter_of(4003));
    match slow_path.counters(4999, 2) {
        Err(error @ Error::Counters { .. }) => {
            let text = "2 counters from 4999 do not exist: the router has 5000, numbered from 0";
            assert_eq!(error.to_string(), text);
        }
        other => panic!("{other:?}"),
    }
    slow_path.send(&[1; 60], FrameDestination::Out(2, 5)).unwrap();
    slow_path.send(&[2; 60], FrameDestination::In(3)).unwrap();
    slow_path.counters(0, 0).unwrap();
    let frame = |out, vport, queue, byte| SlowPathRequest::Frame {
        out,
        vport,
        queue,
        bytes: vec![byte; 60],
    };
    assert_eq!(fake.table().frames, [frame(true, 2, 5, 1), frame(false, 3, 0, 2)]);
}

/// Event in a client's life.
#[derive(Clone, Debug)]
enum Step {
    Change(Vec<(u32, Option<u16>)>),
    NewMux,
    SameMux,
    Look,
}

fn step() -> impl Strategy<Value = Step> {
    let change = (0..6_u32, prop::option::of(0..3_u16));
    prop_oneof![
        4 => prop::collection::vec(change, 0..4).prop_map(Step::Change),
        1 => Just(Step::NewMux),
        1 => Just(Step::SameMux),
        2 => Just(Step::Look),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// After any events the mux has the last committed
    /// state. Filter 5 is refused together with its batch.
    #[test]
    fn mux_holds_the_last_committed_state(steps in prop::collection::vec(step(), 0..12)) {
        let (_directory, mut fake, mut slow_path) = start();
        fake.table().refuses = Some(5);
        let mut model: BTreeMap<u32, Filter> = BTreeMap::new();
        for step in steps {
            match step {
                Step::NewMux => fake.start_anew(),
                Step::SameMux => fake.start_again(),
                Step::Look => {
                    let all: Vec<Filter> = model.values().copied().collect();
                    prop_assert_eq!(slow_path.list().unwrap(), all);
                }
                Step::Change(changes) => {
                    let mut last: BTreeMap<u32, Option<u16>> = BTreeMap::new();
                    let mut batch = slow_path.batch();
                    for (id, change) in changes {
                        batch = match change {
                            Some(number) => batch.set(port(id, number)),
                            None => batch.remove(id),
                        };
                        last.insert(id, change);
                    }
                    let refused = last.get(&5).is_some_and(Option::is_some);
                    prop_assert_eq!(batch.commit().is_err(), refused);
                    if !refused {
                        for (id, change) in last {
                            match change {
                                Some(number) => model.insert(id, port(id, number)),
                                None => model.remove(&id),
                            };
                        }
                    }
                }
            }
        }
        let all: Vec<Filter> = model.values().copied().collect();
        prop_assert_eq!(slow_path.list().unwrap(), all);
    }
}
