//! Processes of the node and of guests: their logs, and commands in guests.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use pdp_api::exec::ExecRequest;
use pdp_api::{GuestProcess, NodeProcess, Problem, ProblemKind};
use pdp_container::cgroup::Session;
use pdp_container::{Process, RunAs};
use pdp_spec::units::User;

use super::DaemonCore;
use crate::access::no_vnet;
use crate::machine::Machine;
use crate::plan::NodePlan;
use crate::plan::key::{ObjectKey, ProcessRole};
use crate::util::error_chain;

/// Runs the shell of a guest: bash if it exists, else sh.
const SHELL: [&str; 3] =
    ["/bin/sh", "-c", "command -v bash > /dev/null && exec bash; exec /bin/sh"];

impl DaemonCore {
    /// Returns the log file of one of the node's own processes. Its writer
    /// may replace or truncate the file at any time; the reader follows.
    pub fn log(&self, process: NodeProcess) -> Result<PathBuf, Problem> {
        match process {
            NodeProcess::Daemon => Ok(self.host.places.run.join("pdpd.log")),
            NodeProcess::Mux => self.log_of(&ObjectKey::Mux, ProcessRole::Main),
        }
    }

    /// Returns the log file of a process of a vnet's node.
    pub fn node_log(
        &self,
        vnet: &str,
        node: &str,
        process: GuestProcess,
    ) -> Result<PathBuf, Problem> {
        let plan = self.node_plan(vnet, node)?;
        let key = ObjectKey::node(vnet, node);
        match process {
            GuestProcess::Control => self.log_of(&key, ProcessRole::Main),
            GuestProcess::Tap => self.log_of(&key, ProcessRole::Tap),
            GuestProcess::Mirror => self.log_of(&key, ProcessRole::Mirror),
            GuestProcess::Management => self.log_of(&key, ProcessRole::Management),
            GuestProcess::Guest(number) => {
                has_guest(vnet, node, &plan, number)?;
                self.log_of(&ObjectKey::guest(vnet, node, number), ProcessRole::Main)
            }
        }
    }

    /// Returns the command, not yet started, that runs `request.command` in a guest, or a shell
    /// if that is empty. Also returns the cgroup for the command and all its descendants.
    ///
    /// The caller gives the command pipes, or a terminal that becomes its
    /// session's own. It kills everything in the cgroup when the client goes away.
    pub fn exec(
        &self,
        vnet: &str,
        node: &str,
        request: &ExecRequest,
    ) -> Result<(Command, Session), Problem> {
        let plan = self.node_plan(vnet, node)?;
        let directory = match request.process {
            GuestProcess::Control => plan.control.dir.clone(),
            GuestProcess::Guest(number) => {
                has_guest(vnet, node, &plan, number)?;
                self.host.places.record(&ObjectKey::guest(vnet, node, number), ProcessRole::Main)
            }
            other @ (GuestProcess::Tap | GuestProcess::Mirror | GuestProcess::Management) => {
                return Err(Problem::new(
                    ProblemKind::Invalid,
                    format!("{vnet}/{node}: {other} is not a guest"),
                )
                .hint("run commands in control, g0, g1, …"));
            }
        };
        let run_as = run_as(vnet, node, request)?;
        let mut argv: Vec<OsString> = request.command.iter().map(OsString::from).collect();
        if argv.is_empty() {
            argv.extend(SHELL.map(OsString::from));
        }
        let env: BTreeMap<String, String> =
            request.term.iter().map(|term| ("TERM".to_string(), term.clone())).collect();
        self.running(vnet, node, request.process, &directory)?;
        self.host
            .runtime
            .exec_command(&directory, &argv, &run_as, request.tty.is_some(), &env)
            .map_err(|error| Problem::internal(error_chain(&error)))
    }

    /// Returns the process of a node, whose records are in this directory.
    pub(crate) fn running(
        &self,
        vnet: &str,
        node: &str,
        process: GuestProcess,
        directory: &Path,
    ) -> Result<Process, Problem> {
        self.host.running(directory).ok_or_else(|| {
            let text = format!("{vnet}/{node}: {process} does not run");
            Problem::new(ProblemKind::Conflict, text).hint("`pdp inspect` shows why")
        })
    }

    /// Returns the log of an object's process.
    fn log_of(&self, key: &ObjectKey, role: ProcessRole) -> Result<PathBuf, Problem> {
        let logs = self.host.runtime.logs(&self.host.places.record(key, role));
        logs.map(|[log, _]| log).map_err(|error| Problem::internal(error_chain(&error)))
    }

    /// Returns the plan of a node.
    pub(crate) fn node_plan(&self, vnet: &str, node: &str) -> Result<NodePlan, Problem> {
        let model = self.model();
        let Some(plan) = model.plan.vnets.get(vnet) else { return Err(no_vnet(vnet)) };
        plan.nodes.get(node).cloned().ok_or_else(|| {
            let names: Vec<&str> = plan.nodes.keys().map(String::as_str).collect();
            Problem::not_found(format!("vnet {vnet}: no node {node:?}"))
                .hint(format!("its nodes are {}", names.join(", ")))
        })
    }
}

/// Checks that a node has a forwarding guest of this number.
pub(crate) fn has_guest(
    vnet: &str,
    node: &str,
    plan: &NodePlan,
    number: u32,
) -> Result<(), Problem> {
    if plan.guests.contains_key(&number) {
        return Ok(());
    }
    let numbers: Vec<String> = plan.guests.keys().map(|number| format!("g{number}")).collect();
    let problem = Problem::not_found(format!("{vnet}/{node}: no forwarding guest g{number}"));
    match numbers.is_empty() {
        true => {
            Err(problem
                .hint("it has none: it is a host, or the mux or its own kernel forwards for it"))
        }
        false => Err(problem.hint(format!("it has {}", numbers.join(", ")))),
    }
}

/// Returns the user and directory with which a command shall run.
fn run_as(vnet: &str, node: &str, request: &ExecRequest) -> Result<RunAs, Problem> {
    let invalid = |text: String| Problem::new(ProblemKind::Invalid, text);
    let user = request.user.as_deref().map(str::parse::<User>).transpose();
    user.map_err(|bad| invalid(format!("{vnet}/{node}: user {bad}")).hint(bad.hint))?;
    if let Some(why) = request.workdir.as_deref().and_then(pdp_spec::bad_workdir) {
        return Err(invalid(format!("{vnet}/{node}: {why}")));
    }
    let run_as =
        RunAs { user: request.user.clone(), workdir: request.workdir.clone().map(Into::into) };
    if run_as != RunAs::default() && request.process != GuestProcess::Control {
        let text = format!(
            "{vnet}/{node}: commands in {} run as its program's user, in its directory",
            request.process
        );
        return Err(
            invalid(text).hint("leave out the user and the directory for a forwarding guest")
        );
    }
    Ok(run_as)
}
