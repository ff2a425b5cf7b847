//! Completion of names that the daemon knows: vnets, nodes, ports, links, images.
//!
//! The shell calls `pdp` for every TAB. If no daemon answers soon, there are no candidates and no
//! message.

use std::ffi::{OsStr, OsString};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use clap_complete::CompletionCandidate;
use clap_complete::engine::ArgValueCompleter;
use pdp_api::client::Client;
use pdp_api::{LinkStatus, Vnet};

use super::connection::Connection;
use crate::failure::CliFailure;
use crate::output;

/// Longest wait for the daemon, for all requests of one TAB.
const PATIENCE: Duration = Duration::from_millis(200);

/// Environment variable by which a shell asks for completions.
const ASKED: &str = "PDP_COMPLETE";

/// Kind of name that follows `VNET/`.
#[derive(Clone, Copy)]
enum CompletionPart {
    Nothing,
    Nodes,
    Ports,
    Links,
    /// Completes the name of an image instead of a vnet.
    Images,
}

/// Completes `VNET`.
pub fn vnets() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| names(current, CompletionPart::Nothing))
}

/// Completes `VNET/NODE`.
pub fn nodes() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| names(current, CompletionPart::Nodes))
}

/// Completes `VNET/NODE:PORT`.
pub fn ports() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| names(current, CompletionPart::Ports))
}

/// Completes `VNET/LINK`.
pub fn links() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| names(current, CompletionPart::Links))
}

/// Completes names of images, and digests of images without a name.
pub fn images() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| names(current, CompletionPart::Images))
}

/// If a shell asks for completions, answers and ends the process; otherwise returns.
pub fn answer(command: fn() -> clap::Command) {
    clap_complete::CompleteEnv::with_factory(command).var(ASKED).complete();
}

/// Prints the script that makes a shell ask for completions.
pub fn script(shell: clap_complete::Shell) -> Result<ExitCode, CliFailure> {
    let mut script = Vec::new();
    let shells = clap_complete::env::Shells::builtins();
    if let Some(completer) = shells.completer(&shell.to_string()) {
        completer.write_registration(ASKED, "pdp", "pdp", "pdp", &mut script)?;
    }
    if shell == clap_complete::Shell::Bash {
        // A port's name is one word although it has a colon.
        script.extend(b"COMP_WORDBREAKS=${COMP_WORDBREAKS//:}\n");
    }
    output::write(&script)
}

fn names(current: &OsStr, part: CompletionPart) -> Vec<CompletionCandidate> {
    let Some(current) = current.to_str() else { return Vec::new() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let Ok(runtime) = runtime else { return Vec::new() };
    let answered = runtime.block_on(async {
        let client = named_client()?;
        tokio::time::timeout(PATIENCE, all(&client, current, part)).await.ok()
    });
    runtime.shutdown_background();
    let names = answered.unwrap_or_default();
    names
        .into_iter()
        .filter(|name| name.starts_with(current))
        .map(CompletionCandidate::new)
        .collect()
}

/// Command line with nothing but the options of the connection.
#[derive(Parser)]
struct ConnectionLine {
    #[command(flatten)]
    connection: Connection,
}

/// Returns a client of the daemon that the words typed so far select.
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
    ConnectionLine::try_parse_from(line).ok()?.connection.client().ok()
}

async fn all(client: &Client, current: &str, part: CompletionPart) -> Vec<String> {
    if matches!(part, CompletionPart::Images) {
        let images = client.images().await.unwrap_or_default();
        let names = images.into_iter().flat_map(|image| match image.names.is_empty() {
            true => vec![image.digest],
            false => image.names,
        });
        return names.collect();
    }
    let Some((vnet, _)) =
        current.split_once('/').filter(|_| !matches!(part, CompletionPart::Nothing))
    else {
        let end = if matches!(part, CompletionPart::Nothing) { "" } else { "/" };
        let vnets = client.vnets().await.unwrap_or_default();
        return vnets.into_iter().map(|vnet| vnet.name + end).collect();
    };
    client.vnet(vnet).await.map(|found| inside(vnet, &found, part)).unwrap_or_default()
}

fn inside(vnet: &str, found: &Vnet, part: CompletionPart) -> Vec<String> {
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
        CompletionPart::Nothing | CompletionPart::Images => Vec::new(),
        CompletionPart::Nodes => {
            status.nodes.iter().map(|node| format!("{vnet}/{}", node.name)).collect()
        }
        CompletionPart::Ports => ports().collect(),
        CompletionPart::Links => status.links.iter().map(link).collect(),
    }
}
