//! Open vSwitch with its datapath in user space (Debian's package
//! `openvswitch-switch`), which needs no kernel module.

use std::path::Path;
use std::process::Command;

use crate::{Background, TestMachine, eventually, run};

/// Running switch; ends when dropped.
#[derive(Debug)]
pub struct OpenVswitch {
    machine: TestMachine,
    switch: Background,
    _database: Background,
    directory: tempfile::TempDir,
}

impl OpenVswitch {
    /// Starts it in a machine, with database settings (`other_config:…`) and words that precede its
    /// command line (`taskset …`). Panics if it does not start.
    #[track_caller]
    pub fn start(machine: &TestMachine, settings: &str, before: &[&str]) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let at = directory.path();
        let database = at.join("conf.db");
        let mut create = command(machine, at, &["ovsdb-tool", "create"]);
        done(create.arg(&database).arg("/usr/share/openvswitch/vswitch.ovsschema"));
        let mut server = command(machine, at, &["ovsdb-server"]);
        let server =
            Background::start(server.arg(&database).arg(format!("--remote=p{}", remote(at))));
        eventually("ovsdb-server listens", || at.join("db.sock").exists());
        let vsctl = |words: &str| done(&mut vsctl(machine, at, &format!("--no-wait {words}")));
        vsctl("init");
        if !settings.is_empty() {
            vsctl(&format!("set Open_vSwitch . {settings}"));
        }
        let mut line = before.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
        line.extend(words(machine, at, &["ovs-vswitchd", &remote(at)]));
        let switch = Background::start(Command::new(&line[0]).args(&line[1..]));
        Self { machine: machine.clone(), switch, _database: server, directory }
    }

    /// Process ID.
    pub fn pid(&self) -> u32 {
        self.switch.pid()
    }

    /// Changes its configuration; panics if that fails.
    #[track_caller]
    pub fn vsctl(&self, words: &str) {
        let words = format!("--timeout=20 {words}");
        done(&mut vsctl(&self.machine, self.directory.path(), &words));
    }

    /// Changes a bridge's flows; panics if that fails.
    #[track_caller]
    pub fn ofctl(&self, words: &[&str]) {
        done(command(&self.machine, self.directory.path(), &["ovs-ofctl"]).args(words));
    }
}

fn remote(directory: &Path) -> String {
    format!("unix:{}", directory.join("db.sock").display())
}

fn vsctl(machine: &TestMachine, directory: &Path, line: &str) -> Command {
    let mut vsctl = command(machine, directory, &["ovs-vsctl"]);
    vsctl.arg(format!("--db={}", remote(directory))).args(line.split_whitespace());
    vsctl
}

/// Words of a command that runs a program in a machine, with its files in a directory. There is no
/// shell or other process between, so that signals reach the program.
fn words(machine: &TestMachine, directory: &Path, program: &[&str]) -> Vec<String> {
    let directory = directory.display();
    let mut line = vec!["nsenter".to_owned(), format!("--net=/run/netns/{}", machine.netns)];
    line.push("env".into());
    for variable in ["OVS_RUNDIR", "OVS_LOGDIR", "OVS_DBDIR", "OVS_SYSCONFDIR"] {
        line.push(format!("{variable}={directory}"));
    }
    line.extend(program.iter().map(|&word| word.to_owned()));
    line
}

fn command(machine: &TestMachine, directory: &Path, program: &[&str]) -> Command {
    let line = words(machine, directory, program);
    let mut command = Command::new(&line[0]);
    command.args(&line[1..]);
    command
}

#[track_caller]
fn done(command: &mut Command) {
    let output = run(command, "");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
}
