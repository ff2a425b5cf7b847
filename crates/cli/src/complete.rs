//! Completion of names that the daemon knows: vnets, nodes, ports, links, images.
//!
//! The shell calls `pdp` for every TAB. Where no daemon answers soon, there is nothing to choose from and nothing said.

use std::ffi::{OsStr, OsString};
use std::time::Duration;

use clap_complete::CompletionCandidate;
use clap_complete::engine::ArgValueCompleter;
use pdp_api::client::Client;
use pdp_api::{LinkStatus, Vnet};

use crate::args::{Args, Command};
use crate::{client, output};
use clap::{CommandFactory, Parser};
use std::process::ExitCode;

use crate::failure::Failure;

/// Longest wait for the daemon, for all that is asked at one TAB.
const PATIENCE: Duration = Duration::from_millis(200);

/// The variable by which a shell asks for completions.
const ASKED: &str = "PDP_COMPLETE";

/// What stands after `VNET/`.
#[derive(Clone, Copy)]
enum Part {
    Nothing,
    Nodes,
    Ports,
    Links,
    /// Nothing: it is another name.
    Images,
}

/// `VNET`.
pub fn vnets() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| names(current, Part::Nothing))
}

/// `VNET/NODE`.
pub fn nodes() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| names(current, Part::Nodes))
}

/// `VNET/NODE:PORT`.
pub fn ports() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| names(current, Part::Ports))
}

/// `VNET/LINK`.
pub fn links() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| names(current, Part::Links))
}

/// Names of images, and digests of those without one.
pub fn images() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| names(current, Part::Images))
}

/// Answers a shell that asks for completions, and ends then; returns where none does.
pub fn answer() {
    clap_complete::CompleteEnv::with_factory(Args::command).var(ASKED).complete();
}

/// Prints what has a shell ask.
pub fn script(shell: clap_complete::Shell) -> Result<ExitCode, Failure> {
    let mut script = Vec::new();
    let shells = clap_complete::env::Shells::builtins();
    if let Some(completer) = shells.completer(&shell.to_string()) {
        completer.write_registration(ASKED, "pdp", "pdp", "pdp", &mut script)?;
    }
    if shell == clap_complete::Shell::Bash {
        // Names of ports are one word.
        script.extend(b"COMP_WORDBREAKS=${COMP_WORDBREAKS//:}\n");
    }
    output::write(&script)
}

fn names(current: &OsStr, part: Part) -> Vec<CompletionCandidate> {
    let Some(current) = current.to_str() else { return Vec::new() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let Ok(runtime) = runtime else { return Vec::new() };
    let asked = runtime.block_on(async {
        let client = named_client()?;
        tokio::time::timeout(PATIENCE, all(&client, current, part)).await.ok()
    });
    runtime.shutdown_background();
    let names = asked.unwrap_or_default();
    names
        .into_iter()
        .filter(|name| name.starts_with(current))
        .map(CompletionCandidate::new)
        .collect()
}

/// A client of the daemon that the words on the line name so far.
fn named_client() -> Option<Client> {
    let mut words = std::env::args_os().skip_while(|word| word != "--").skip(1);
    let mut line: Vec<OsString> = vec!["pdp".into()];
    while let Some(word) = words.next() {
        let text = word.to_string_lossy();
        let flag = ["--socket", "--name", "--server", "--ca", "--token-file"];
        if flag.iter().any(|flag| text == *flag) {
            let Some(value) = words.next() else { break };
            line.extend([word, value]);
        } else if flag.iter().any(|flag| text.starts_with(&format!("{flag}="))) {
            line.push(word);
        }
    }
    line.push("version".into());
    let args = Args::try_parse_from(line).ok()?;
    debug_assert!(matches!(args.command, Command::Version(_)));
    client(&args).ok()
}

async fn all(client: &Client, current: &str, part: Part) -> Vec<String> {
    if matches!(part, Part::Images) {
        let images = client.images().await.unwrap_or_default();
        let names = images.into_iter().flat_map(|image| match image.names.is_empty() {
            true => vec![image.digest],
            false => image.names,
        });
        return names.collect();
    }
    let Some((vnet, _)) = current.split_once('/').filter(|_| !matches!(part, Part::Nothing)) else {
        let end = if matches!(part, Part::Nothing) { "" } else { "/" };
        let vnets = client.vnets().await.unwrap_or_default();
        return vnets.into_iter().map(|vnet| vnet.name + end).collect();
    };
    client.vnet(vnet).await.map(|found| inside(vnet, &found, part)).unwrap_or_default()
}

fn inside(vnet: &str, found: &Vnet, part: Part) -> Vec<String> {
    let status = &found.status;
    let ports = || {
        let ports = status
            .nodes
            .iter()
            .flat_map(|node| node.ports.iter().map(|port| (&node.name, &port.name)));
        ports.map(|(node, port)| format!("{vnet}/{node}:{port}"))
    };
    let link = |link: &LinkStatus| format!("{vnet}/{}", link.name);
    match part {
        Part::Nothing | Part::Images => Vec::new(),
        Part::Nodes => status.nodes.iter().map(|node| format!("{vnet}/{}", node.name)).collect(),
        Part::Ports => ports().collect(),
        Part::Links => status.links.iter().map(link).collect(),
    }
}
