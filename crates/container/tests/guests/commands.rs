//! Commands that wait for each other, and their reported status.

use std::fs;
use std::io::Write;
use std::path::PathBuf;

use pdp_container::{
    CommandProbe, CommandRestart, GuestCommand, GuestCommandStatus, GuestSpec, Probe, ProcessState,
    Profile, WORDS_BYTES_MAX,
};
use pdp_model::CommandState;

use super::{Fixture, command, eventually, log};

fn shell(script: &str, restart: CommandRestart) -> GuestCommand {
    command(&["sh", "-c", script], restart)
}

/// Returns a daemon that is ready once `probe` succeeds.
fn ready(script: &str, probe: Probe) -> GuestCommand {
    let check = CommandProbe { what: probe, interval_ms: 20, timeout_ms: 5000, within_ms: 60_000 };
    GuestCommand { ready: Some(check), ..shell(script, CommandRestart::Always) }
}

fn once(script: &str, after: &[usize]) -> GuestCommand {
    GuestCommand { once: true, after: after.to_vec(), ..shell(script, CommandRestart::Never) }
}

fn run(fixture: &Fixture, commands: Vec<GuestCommand>) -> GuestSpec {
    let spec = GuestSpec { commands, ..fixture.spec(Profile::Host, &[]) };
    fixture.run(&spec);
    spec
}

fn statuses(fixture: &Fixture, spec: &GuestSpec) -> Vec<GuestCommandStatus> {
    fixture.runtime.commands(&spec.dir).unwrap().expect("what was told")
}

fn states(fixture: &Fixture, spec: &GuestSpec) -> Vec<CommandState> {
    statuses(fixture, spec).into_iter().map(|status| status.state).collect()
}

#[test]
fn command_starts_after_its_dependencies() {
    use CommandState::{Done, Ready, Running, Starting, Waiting};
    let fixture = Fixture::new();
    let program = ["sh", "-c", "test -e /run/go"].map(str::to_owned).into();
    let port =
        "import socket; s = socket.create_server(('127.0.0.1', 4321)); print('on'); s.accept()
import time; time.sleep(1000)";
    let spec = run(
        &fixture,
        vec![
            // Last in the list but first in time: positions do not define the order.
            once("cat /run/3 /run/2 > /run/4; echo four", &[1, 3]),
            once("echo 2 > /run/2", &[2]),
            ready("exec sleep 1000", Probe::Command(program)),
            once("test -e /run/2 && echo 3 > /run/3", &[4]),
            GuestCommand {
                after: vec![1],
                ready: Some(CommandProbe {
                    what: Probe::Tcp(4321),
                    interval_ms: 20,
                    timeout_ms: 5000,
                    within_ms: 60_000,
                }),
                ..command(&["python3", "-c", port], CommandRestart::Always)
            },
            GuestCommand { after: vec![0], ..shell("exec sleep 1000", CommandRestart::Always) },
        ],
    );
    let waits = [Waiting, Waiting, Starting, Waiting, Waiting, Waiting];
    eventually("one is being started", || states(&fixture, &spec) == waits);
    fixture.exec(&spec, "touch /run/go");
    eventually("all are ready", || {
        states(&fixture, &spec) == [Done, Done, Ready, Done, Ready, Running]
    });
    assert_eq!(fixture.exec(&spec, "cat /run/4").1, "3\n2\n");
    assert!(log(&spec.dir).contains(" four\n"), "what commands write is logged");
    assert!(
        statuses(&fixture, &spec).iter().all(|status| !status.troubled && status.restarts == 0)
    );
}

#[test]
fn allowed_failure_does_not_block_later_commands() {
    let fixture = Fixture::new();
    let may_fail = |words: &[&str], after: &[usize]| GuestCommand {
        may_fail: true,
        once: true,
        after: after.to_vec(),
        ..command(words, CommandRestart::Never)
    };
    let spec = run(
        &fixture,
        vec![
            may_fail(&["sh", "-c", "exit 3"], &[]),
            may_fail(&["/no/such"], &[0]),
            once("echo here > /run/here", &[1]),
        ],
    );
    eventually("all are done", || states(&fixture, &spec) == [CommandState::Done; 3]);
    assert_eq!(fixture.exec(&spec, "cat /run/here").1, "here\n");
    let statuses = statuses(&fixture, &spec);
    let exits: Vec<_> = statuses.iter().map(|status| status.exit).collect();
    assert_eq!(exits, [Some(3), Some(127), Some(0)]);
    assert!(statuses.iter().all(|status| !status.troubled));
    assert_eq!(statuses[0].words, "ended with code 3 (sh -c exit 3)");
    assert!(
        statuses[1].words.starts_with("can't be started: No such file"),
        "{}",
        statuses[1].words
    );
    assert_eq!(statuses[2].words, "");
}

#[test]
fn failed_command_is_reported_with_last_line() {
    use CommandState::{Failed, Ready, Restarting, Running, Starting, Waiting};
    let fixture = Fixture::new();
    let never_ready = GuestCommand {
        ready: Some(CommandProbe {
            what: Probe::File(PathBuf::from("/run/none")),
            interval_ms: 10,
            timeout_ms: 5000,
            within_ms: 50,
        }),
        ..shell("exec sleep 1000", CommandRestart::Always)
    };
    let spec = run(
        &fixture,
        vec![
            shell("echo begins; echo 'bad line 7' >&2; exit 3", CommandRestart::Always),
            command(&["/no/such"], CommandRestart::Always),
            once("echo 'RTNETLINK answers: no'; exit 2", &[]),
            once("true", &[2]),
            never_ready,
            GuestCommand {
                once: true,
                ..shell("mkdir /run/tried || exit 0; exit 1", CommandRestart::OnFailure)
            },
            shell("exec sleep 1000", CommandRestart::Always),
            ready("exec sleep 1000", Probe::File(PathBuf::from("/run"))),
        ],
    );
    let words = |index: usize| statuses(&fixture, &spec)[index].words.clone();
    eventually("it keeps ending", || statuses(&fixture, &spec)[0].restarts >= 2);
    eventually("all have come to what they come to", || {
        let statuses = statuses(&fixture, &spec);
        let trouble: Vec<_> = statuses.iter().map(|status| status.troubled).collect();
        let states = states(&fixture, &spec);
        trouble == [true, true, true, false, true, false, false, false]
            && states[2..5] == [Failed, Waiting, Starting]
            && states[5..] == [CommandState::Done, Running, Ready]
    });
    assert_eq!(words(0), "ended with code 3: bad line 7");
    assert!(words(1).starts_with("can't be started: No such file"), "{}", words(1));
    assert_eq!(statuses(&fixture, &spec)[1].state, Restarting);
    let script = "(sh -c echo 'RTNETLINK answers: no'; exit 2)";
    assert_eq!(words(2), format!("ended with code 2: RTNETLINK answers: no {script}"));
    assert_eq!(words(4), "not ready: /run/none: No such file or directory (os error 2)");
    let statuses = statuses(&fixture, &spec);
    assert_eq!(statuses[0].exit, Some(3));
    assert_eq!((statuses[5].restarts, statuses[5].exit), (1, Some(0)));
}

#[test]
fn with_previous_command_waits_again_after_restart() {
    let fixture = Fixture::new();
    let hanging = |command: GuestCommand| GuestCommand { with_previous: true, ..command };
    let spec = run(
        &fixture,
        vec![
            ready("exec sleep 1001", Probe::File("/run/up".into())),
            GuestCommand {
                after: vec![0],
                ..hanging(shell("exec sleep 1002", CommandRestart::Always))
            },
            hanging(once("echo again >> /run/count", &[1])),
        ],
    );
    use CommandState::{Done, Ready, Restarting, Running, Starting};
    eventually("it is being started", || states(&fixture, &spec)[0] == Starting);
    fixture.exec(&spec, "touch /run/up");
    eventually("all are ready", || states(&fixture, &spec) == [Ready, Running, Done]);
    fixture.exec(&spec, "rm /run/up; pkill -f '^sleep 1001'");
    eventually("those after it wait", || {
        states(&fixture, &spec) == [Starting, Restarting, Restarting]
    });
    fixture.exec(&spec, "touch /run/up");
    eventually("all are ready again", || states(&fixture, &spec) == [Ready, Running, Done]);
    eventually("it was done again", || fixture.exec(&spec, "cat /run/count").1 == "again\nagain\n");
}

/// Opens the pipe of process 1's reports, the first one that it writes to.
fn pipe(pid: u32) -> fs::File {
    let fds = (3..20).map(|fd| PathBuf::from(format!("/proc/{pid}/fd/{fd}")));
    let is_pipe = |path: &PathBuf| {
        fs::read_link(path).is_ok_and(|to| to.to_string_lossy().starts_with("pipe:"))
    };
    let written = |path: &PathBuf| {
        let info = fs::read_to_string(path.to_str().unwrap().replace("/fd/", "/fdinfo/")).unwrap();
        info.split_whitespace().nth(3).is_some_and(|flags| flags.ends_with('1'))
    };
    let path = fds.into_iter().filter(is_pipe).find(written).expect("a pipe");
    fs::OpenOptions::new().write(true).open(path).unwrap()
}

#[test]
fn lying_guest_affects_only_its_own_status() {
    let fixture = Fixture::new();
    let spec = run(
        &fixture,
        vec![
            shell("exec sleep 1000", CommandRestart::Always),
            ready("exec sleep 1000", Probe::File("/run/never".into())),
        ],
    );
    eventually("they run", || states(&fixture, &spec)[1] == CommandState::Starting);
    let ProcessState::Running(process) = fixture.runtime.state(&spec.dir).unwrap() else {
        panic!()
    };
    // Only process 1 has its end of the pipe.
    let take = "for fd in /proc/1/fd/*; do case $(readlink $fd) in pipe*) : >> $fd;; esac; done";
    assert!(!fixture.exec(&spec, take).0, "a guest has a pipe of its process 1");
    // A process 1 that an attacker has taken over may report anything, or nothing.
    let mut pipe = pipe(process.pid);
    let pid = process.pid.to_string();
    let stop = std::process::Command::new("kill").args(["-STOP", &pid]).status();
    assert!(stop.unwrap().success());
    let lies = [
        format!("{}\n{}\n", "\0".repeat(100_000), "[".repeat(100_000)),
        r#"{"command":9999,"status":{"state":"ready"}}"#.to_owned() + "\n",
        r#"{"command":"zebra","status":{"state":"ready"}}"#.to_owned() + "\n",
        format!(
            r#"{{"command":0,"status":{{"state":"ready","words":"\u001b[2J{}"}}}}"#,
            "x".repeat(700)
        ),
        "\n".to_owned()
            + r#"{"command":1,"status":{"state":"failed","troubled":true,"words":"lies"}}"#,
        "\n".to_owned(),
    ];
    pipe.write_all(lies.concat().as_bytes()).unwrap();
    eventually("its lies are kept", || statuses(&fixture, &spec)[1].words == "lies");
    let statuses_now = statuses(&fixture, &spec);
    assert_eq!(statuses_now.len(), 2, "{statuses_now:?}");
    assert!(statuses_now[0].words.starts_with("[2Jxx"), "{statuses_now:?}");
    assert!(statuses_now[0].words.len() <= WORDS_BYTES_MAX, "{statuses_now:?}");
    // A flooding writer is slowed down, and the file stays small.
    let flood = std::thread::spawn(move || {
        let noise = [0xff_u8; 4096];
        for restarts in 1.. {
            let line =
                format!(r#"{{"command":1,"status":{{"state":"ready","restarts":{restarts}}}}}"#);
            let line = [line.as_bytes(), b"\n", &noise, b"\n"].concat();
            if pipe.write_all(&line).is_err() {
                return restarts;
            }
        }
        0
    });
    eventually("the flood is heard", || statuses(&fixture, &spec)[1].restarts >= 1);
    let file = fs::metadata(spec.dir.join("commands")).unwrap();
    assert!(file.len() < 1 << 10, "{file:?}");
    fixture.runtime.delete(&spec.dir).unwrap();
    assert!(!spec.dir.exists(), "and it ends as any other");
    flood.join().unwrap();
}
