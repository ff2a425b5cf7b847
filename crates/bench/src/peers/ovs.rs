//! Open vSwitch with its datapath in user space (Debian's package `openvswitch-switch`).
//!
//! It forwards as a router would with two flows: new link addresses, one hop less. Its polling
//! thread is stopped by signal while it is not measured.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use pdp_e2e::{Background, Machine, eventually};

use crate::site::{MAC_B, MAC_MIDDLE_B, Site, words};

/// How it reads and writes network devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// By packet sockets.
    Packet,
    /// By AF_XDP.
    Xdp,
}

/// Time that it gets to start polling again.
const WAKE: Duration = Duration::from_millis(200);

/// A running switch; ends when dropped.
#[derive(Debug)]
pub struct Ovs {
    switch: Background,
    _database: Background,
    _directory: tempfile::TempDir,
}

impl Ovs {
    /// Starts it in the site's node, on one CPU.
    pub fn start(site: &Site, device: Device, cpu: usize) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let middle = site.node.namespace();
        let program = |name: &str| command(&middle, directory.path(), name);
        let database = directory.path().join("conf.db");
        let database = database.to_str().context("a directory with a plain name")?;
        let schema = "/usr/share/openvswitch/vswitch.ovsschema";
        done(program("ovsdb-tool").args(["create", database, schema]))?;
        let socket = directory.path().join("db.sock");
        let remote = format!("unix:{}", socket.display());
        let database_server = Background::start(
            program("ovsdb-server").arg(database).arg(format!("--remote=p{remote}")),
        );
        eventually("ovsdb-server listens", || socket.exists());
        let vsctl = |words: &str| {
            let words = words.split_whitespace();
            done(program("ovs-vsctl").arg(format!("--db={remote}")).args(words))
        };
        vsctl("--no-wait init")?;
        vsctl(&format!("--no-wait set Open_vSwitch . other_config:pmd-cpu-mask={:#x}", 1 << cpu))?;
        let switch =
            Background::start(Command::new("taskset").args(["-c", &cpu.to_string()]).args(line(
                &middle,
                directory.path(),
                "ovs-vswitchd",
                &[&remote],
            )));
        let more = match device {
            Device::Packet => "",
            Device::Xdp => "type=afxdp options:xdp-mode=native",
        };
        let set = |name: &str| match more {
            "" => String::new(),
            more => format!("-- set interface {name} {more}"),
        };
        vsctl(&format!(
            "--timeout=20 add-br br0 -- set bridge br0 datapath_type=netdev
             -- add-port br0 extA {} -- add-port br0 extB {}",
            set("extA"),
            set("extB")
        ))?;
        let flow = format!(
            "in_port=extA,ip,actions=mod_dl_src:{},mod_dl_dst:{},dec_ttl,output:extB",
            words(MAC_MIDDLE_B),
            words(MAC_B)
        );
        done(program("ovs-ofctl").args(["del-flows", "br0"]))?;
        done(program("ovs-ofctl").args(["add-flow", "br0", &flow]))?;
        let ovs = Self { switch, _database: database_server, _directory: directory };
        ovs.sleep();
        Ok(ovs)
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.switch.pid()
    }

    /// Lets it poll.
    pub fn wake(&self) {
        pdp_e2e::sh(&format!("kill -CONT {}", self.pid()));
        std::thread::sleep(WAKE);
    }

    /// Stops it.
    pub fn sleep(&self) {
        pdp_e2e::sh(&format!("kill -STOP {}", self.pid()));
    }
}

/// Words of a command that runs a program in the node, with files in a directory of its own. No
/// shell and no other process stands between, so that signals reach it.
fn line(middle: &Machine, directory: &Path, program: &str, arguments: &[&str]) -> Vec<String> {
    let directory = directory.display();
    let mut line = vec!["nsenter".to_owned(), format!("--net=/run/netns/{}", middle.netns)];
    line.push("env".into());
    for variable in ["OVS_RUNDIR", "OVS_LOGDIR", "OVS_DBDIR", "OVS_SYSCONFDIR"] {
        line.push(format!("{variable}={directory}"));
    }
    line.push(program.to_owned());
    line.extend(arguments.iter().map(|&word| word.to_owned()));
    line
}

fn command(middle: &Machine, directory: &Path, program: &str) -> Command {
    let line = line(middle, directory, program, &[]);
    let mut command = Command::new(&line[0]);
    command.args(&line[1..]);
    command
}

fn done(command: &mut Command) -> Result<()> {
    let output = pdp_e2e::run(command, "");
    let errors = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "{command:?}: {errors}");
    Ok(())
}
