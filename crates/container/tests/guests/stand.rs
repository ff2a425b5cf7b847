//! Commands as users of a guest, and in its directories.

use std::path::PathBuf;

use pdp_container::{CommandProbe, CommandRestart, GuestCommand, GuestSpec, Probe, Profile, RunAs};
use pdp_model::CommandState;

use super::{FileOwner, Fixture, GuestFile, command, eventually, file, log};

const PASSWD: &str = "root:x:0:0::/root:/bin/sh\nalice:x:1000:1001::/home/alice:/bin/sh\n\
    none:x:4294967295:4294967295::/:/bin/sh\n";
const GROUP: &str = "root:x:0:\nalice:x:1001:\nwheel:x:10:alice\nlab:x:1010:bob,alice\n";

/// Script that prints the process's user, directory and capabilities.
const SAYS: &str =
    "echo $(id -u):$(id -g):$(id -G | tr ' ' ,) in $PWD of $HOME; grep ^Cap /proc/self/status";

fn run_as(user: &str, workdir: &str) -> RunAs {
    let some = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
    RunAs { user: some(user), workdir: some(workdir).map(PathBuf::from) }
}

fn accounts() -> Vec<GuestFile> {
    let readable =
        |path, text| GuestFile { mode: 0o644, owner: FileOwner::ROOT, ..file(path, text, true) };
    vec![readable("/etc/passwd", PASSWD), readable("/etc/group", GROUP)]
}

fn shell(script: &str, user: &str, workdir: &str) -> GuestCommand {
    GuestCommand {
        run_as: run_as(user, workdir),
        ..command(&["sh", "-c", script], CommandRestart::Always)
    }
}

/// Checks that the printed process has no capability.
#[track_caller]
fn has_none(output: &str) {
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        let line =
            output.lines().find(|line| line.contains(set)).unwrap_or_else(|| panic!("{output}"));
        assert!(line.trim_end().ends_with("0000000000000000"), "{output}");
    }
}

#[test]
fn command_runs_as_its_user_without_capabilities() {
    let fixture = Fixture::new();
    let says = format!("{{ {SAYS}; }} > /tmp/$0; echo by name > /dev/stdout; exec sleep 1000");
    let at = |name: &str, user: &str| GuestCommand {
        run_as: run_as(user, "/srv"),
        ..command(&["sh", "-c", &says, name], CommandRestart::Always)
    };
    let checks = ["sh", "-c", &format!("{{ {SAYS}; }} > /tmp/check")].map(str::to_owned);
    let check = CommandProbe {
        what: Probe::Command(checks.into()),
        interval_ms: 20,
        timeout_ms: 5000,
        within_ms: 60_000,
    };
    let spec = GuestSpec {
        // Other users than root get none of it.
        privileged: true,
        files: accounts(),
        commands: vec![
            GuestCommand { ready: Some(check), ..at("named", "alice") },
            at("alone", "alice:lab"),
            at("number", "1005"),
            at("root", ""),
            // A user that exists only after an earlier command.
            GuestCommand {
                once: true,
                restart: CommandRestart::Never,
                ..shell("echo carol:x:1100:1100::/tmp:/bin/sh >> /etc/passwd", "", "")
            },
            GuestCommand { after: vec![4], ..at("later", "carol") },
        ],
        ..fixture.spec(Profile::Control, &[])
    };
    fixture.run(&spec);
    let output = |name: &str| fixture.exec(&spec, &format!("cat /tmp/{name}")).1;
    for (name, words) in [
        ("named", "1000:1001:1001,10,1010 in /srv of /home/alice\n"),
        ("check", "1000:1001:1001,10,1010 in /srv of /home/alice\n"),
        ("alone", "1000:1010:1010 in /srv of /home/alice\n"),
        ("number", "1005:0:0 in /srv of /\n"),
        ("later", "1100:1100:1100 in /srv of /tmp\n"),
    ] {
        eventually(name, || output(name).matches('\n').count() == 6);
        assert!(output(name).starts_with(words), "{}", output(name));
        has_none(&output(name));
    }
    eventually("root's", || output("root").starts_with("0:0:0 in /srv of /root\n"));
    eventually("all open their output by its name", || {
        log(&spec.dir).matches(" by name\n").count() == 5
    });

    // The same for commands that run later.
    let words = ["sh", "-c", SAYS];
    let (_, output) = fixture.exec_as(&spec, &run_as("alice", "/tmp"), &words);
    assert!(output.starts_with("1000:1001:1001,10,1010 in /tmp of /home/alice\n"), "{output}");
    has_none(&output);
    let (_, output) = fixture.exec_as(&spec, &run_as("root", ""), &words);
    assert!(output.starts_with("0:0:0 in / of /root\n"), "{output}");
    let sets = |output: &str| output.lines().skip(1).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(sets(&output), sets(&fixture.exec(&spec, SAYS).1));
    let tries = "mount -t tmpfs none /mnt; ip link add x type dummy; kill -0 1; id -u";
    let (_, output) = fixture.exec_as(&spec, &run_as("alice", ""), &["sh", "-c", tries]);
    assert!(output.contains("mount: ") && output.contains("RTNETLINK answers: "), "{output}");
    assert!(output.contains("kill: ") && output.starts_with("1000\n"), "{output}");
    // No descriptor of the starting process leads out of the guest.
    for fd in 3..10 {
        let at = format!("/proc/self/fd/{fd}");
        let (good, output) = fixture.exec_as(&spec, &run_as("", &at), &["pwd"]);
        assert!(!good && output.contains(&format!("workdir {at}: no")), "{output}");
    }
    fixture.runtime.delete(&spec.dir).unwrap();

    let spec = GuestSpec {
        env: [("HOME".to_owned(), "/its/own".to_owned())].into(),
        files: accounts(),
        ..fixture.spec(Profile::Host, &[&["sleep", "1000"]])
    };
    fixture.run(&spec);
    let (_, output) = fixture.exec_as(&spec, &run_as("alice", ""), &["sh", "-c", "echo $HOME"]);
    assert_eq!(output, "/its/own\n");
}

#[test]
fn missing_user_or_directory_is_reported() {
    let fixture = Fixture::new();
    let spec = GuestSpec {
        files: accounts(),
        commands: vec![
            shell("exit 0", "nosuch", ""),
            shell("exit 0", "alice:nosuch", ""),
            shell("exit 0", "", "/x"),
            shell("exit 0", "alice", "/etc/passwd"),
            shell("exit 0", "none", ""),
            GuestCommand {
                once: true,
                restart: CommandRestart::Never,
                ..shell("exit 0", "4294967295", "")
            },
            GuestCommand { after: vec![5], ..shell("exit 0", "", "") },
        ],
        ..fixture.spec(Profile::Host, &[])
    };
    fixture.run(&spec);
    let statuses = || fixture.runtime.commands(&spec.dir).unwrap().expect("what was told");
    eventually("all are told", || statuses()[..6].iter().all(|status| status.troubled));
    let statuses = statuses();
    for (status, why) in statuses.iter().zip([
        "can't be started: user nosuch: not in /etc/passwd",
        "can't be started: user alice:nosuch: group nosuch is not in /etc/group",
        "can't be started: workdir /x: no such directory",
        "can't be started: workdir /etc/passwd: not a directory",
        "can't be started: user none: id 4294967295 is not one of 0 to 65535",
        "can't be started: user 4294967295: id 4294967295 is not one of 0 to 65535 (sh -c exit 0)",
    ]) {
        assert_eq!(status.words, why);
    }
    assert_eq!(
        (statuses[5].state, statuses[6].state),
        (CommandState::Failed, CommandState::Waiting)
    );
    for (run_as, argv, why) in [
        (run_as("nosuch", ""), ["id"], "user nosuch: not in /etc/passwd\n"),
        (run_as("", "/x"), ["id"], "workdir /x: no such directory\n"),
        (run_as("alice", ""), ["nosuch"], "nosuch: no such program\n"),
        (run_as("alice", ""), ["/etc/passwd"], "/etc/passwd: permission denied\n"),
    ] {
        let (good, output) = fixture.exec_as(&spec, &run_as, &argv);
        assert!(!good, "{output}");
        assert_eq!(output, format!("exec failed: unable to start container process: {why}"));
    }
}

/// A guest's root may change its accounts in any way. Unknown users are refused, process 1
/// continues, and no file of the machine is read.
#[test]
fn hostile_account_files_are_harmless() {
    let fixture = Fixture::new();
    let machine = fixture.path("machine");
    std::fs::write(&machine, "alice:x:0:0::/:/bin/sh\n").unwrap();
    let machine = machine.display();
    let spec = GuestSpec {
        privileged: true,
        files: accounts(),
        commands: vec![
            GuestCommand {
                once: true,
                restart: CommandRestart::Never,
                ..shell("rm /etc/passwd; mkfifo /etc/passwd", "", "")
            },
            GuestCommand { after: vec![0], ..shell("exec sleep 1000", "alice", "") },
        ],
        ..fixture.spec(Profile::Control, &[])
    };
    let process = fixture.run(&spec);
    // With a pipe that nobody writes to, process 1 reports that there is no such user, and tries
    // again.
    let statuses = || fixture.runtime.commands(&spec.dir).unwrap().expect("what was told");
    eventually("it is told, and tried again", || {
        let status = statuses()[1].clone();
        status.words.ends_with("user alice: not in /etc/passwd") && status.restarts > 1
    });
    std::fs::remove_file(format!("/proc/{}/root/etc/passwd", process.pid)).unwrap();
    for (case, script) in [
        ("nothing", "true".to_owned()),
        ("a device without end", "ln -s /dev/zero /etc/passwd".to_owned()),
        ("a huge file", "truncate -s 4G /etc/passwd".to_owned()),
        ("a directory", "mkdir /etc/passwd".to_owned()),
        ("a circle", "ln -s passwd /etc/passwd".to_owned()),
        ("the machine's", format!("ln -s {machine} /etc/passwd")),
        ("the same from below", format!("ln -s ../../../../../../..{machine} /etc/passwd")),
        ("the kernel's words", "ln -s /proc/kmsg /etc/passwd".to_owned()),
        ("memory of process 1", "ln -s /proc/1/mem /etc/passwd".to_owned()),
        ("no text", "printf 'alice:\\377:\\377' > /etc/passwd".to_owned()),
        ("an id of nobody's", "echo alice:x:65536:0::/: > /etc/passwd".to_owned()),
        (
            "an id that means none",
            "echo alice:x:4294967295:4294967295::/: > /etc/passwd".to_owned(),
        ),
    ] {
        let (_, made) = fixture.exec(&spec, &format!("rm -rf /etc/passwd; {script}"));
        let (good, output) = fixture.exec_as(&spec, &run_as("alice", ""), &["id"]);
        // The OCI runtime may report before that it can't read the accounts.
        assert!(
            !good && output.contains("unable to start container process"),
            "{case}: {made}{output}"
        );
        assert!(!output.contains("uid="), "{case}: {output}");
        // Removed from outside: with a directory there, the OCI runtime starts no command.
        let passwd = format!("/proc/{}/root/etc/passwd", process.pid);
        let _ = std::fs::remove_file(&passwd).or_else(|_| std::fs::remove_dir(&passwd));
    }
    // Repaired accounts apply again, also for process 1.
    fixture.exec(&spec, "rm -rf /etc/passwd; echo alice:x:7:8::/: > /etc/passwd");
    assert_eq!(fixture.exec_as(&spec, &run_as("alice", ""), &["id", "-u"]).1, "7\n");
    eventually("it is started", || statuses()[1].state == CommandState::Running);
}

#[test]
fn forwarding_guest_has_a_single_user() {
    let fixture = Fixture::new();
    for tap in [false, true] {
        let mut spec = fixture.spec(Profile::Forwarding { tap }, &[&["sleep", "1000"]]);
        spec.commands[0].run_as = run_as("root", "");
        let refused = fixture.runtime.create(&spec, &[]).unwrap_err().to_string();
        assert!(refused.contains("one user"), "{refused}");
        spec.commands[0].run_as = RunAs::default();
        fixture.run(&spec);
        for denied in [run_as("root", ""), run_as("", "/tmp")] {
            let asked = fixture.runtime.exec_command(
                &spec.dir,
                &["id".into()],
                &denied,
                false,
                &Default::default(),
            );
            assert!(asked.unwrap_err().to_string().contains("forwarding guest"));
        }
    }
}
