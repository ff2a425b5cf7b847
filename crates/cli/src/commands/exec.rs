//! Commands and shells in nodes.

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::process::ExitCode;

use pdp_api::GuestProcess;
use pdp_api::client::Client;
use pdp_api::exec::{ExecFrame, ExecFrameError, ExecRequest, WindowSize, write_frame};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use tokio::io::{AsyncReadExt, AsyncWrite};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use super::many;
use crate::daemon::complete;
use crate::daemon::node_command::output;
use crate::failure::CliFailure;
use crate::input::name::NodeName;
use crate::input::nodes::{NodeChoice, NodeNames};

/// Assumed size if the terminal does not report one.
const SIZE_DEFAULT: WindowSize = WindowSize { rows: 24, columns: 80 };

/// Bytes read at a time from standard input.
const INPUT_BYTES: usize = 32 << 10;

/// Largest number of frames waiting to be sent to the daemon.
const FRAMES_MAX: usize = 4;

/// Run a command in one or more nodes and return its exit code; of several codes, the highest.
///
/// Options after the command's first word belong to the command. As with ssh, the command reads
/// standard input: in a loop that reads lines, give -n. With several nodes, each line begins with
/// its node's name, and the commands have no standard input.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp exec red/h1 ping -c 3 10.2.0.2\n         \
                        pdp exec -it red/h1 bash\n         \
                        pdp exec red/r1 -- vtysh -c 'show ip ospf neighbor'\n         \
                        pdp exec red/r1,r2 ip route\n         \
                        pdp exec -u www-data -w /srv red/h1 ./update\n         \
                        pdp exec red -l role=spine vtysh -c 'show bgp summary'\n         \
                        pdp exec red --all uptime")]
pub struct ExecArgs {
    /// VNET/NODE, VNET/NODE,NODE..., or VNET with -l or --all.
    #[arg(value_name = "NODES", add = complete::nodes())]
    pub nodes: NodeNames,
    #[command(flatten)]
    pub choice: NodeChoice,
    /// Run in this forwarding guest instead of the control guest.
    #[arg(long, value_name = "N")]
    pub guest: Option<u32>,
    #[command(flatten)]
    pub run_as: RunAsArgs,
    /// Allocate a terminal.
    #[arg(short, long)]
    pub tty: bool,
    /// Pass standard input. This is the default; the flag is for users of docker.
    #[arg(short, long, conflicts_with = "no_stdin")]
    pub interactive: bool,
    /// Do not pass standard input.
    #[arg(short, long)]
    pub no_stdin: bool,
    /// Program and arguments.
    #[arg(trailing_var_arg = true, required = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// Open a shell in a node: bash if the node has it, or else sh.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp shell red/r1\n         pdp shell -u bird -w /etc/bird red/r1")]
pub struct ShellArgs {
    /// VNET/NODE.
    #[arg(value_name = "NODE", add = complete::nodes())]
    pub name: NodeName,
    /// Open it in this forwarding guest instead of the control guest.
    #[arg(long, value_name = "N")]
    pub guest: Option<u32>,
    #[command(flatten)]
    pub run_as: RunAsArgs,
}

/// User and directory that a command runs with.
#[derive(Debug, clap::Args)]
pub struct RunAsArgs {
    /// Run as this user of the node, by name or number [default: root].
    #[arg(short, long, value_name = "USER[:GROUP]", conflicts_with = "guest")]
    pub user: Option<String>,
    /// Run in this directory of the node.
    #[arg(short, long, value_name = "DIR", conflicts_with = "guest")]
    pub workdir: Option<String>,
}

pub async fn exec(client: &Client, args: ExecArgs) -> Result<ExitCode, CliFailure> {
    let command = args.command.into_iter().map(OsString::into_string).collect::<Result<_, _>>();
    let command = command
        .map_err(|word| CliFailure::Usage(format!("{}: not UTF-8", word.to_string_lossy())))?;
    let request = request(command, args.guest, args.run_as, args.tty);
    let NodeNames { vnet, .. } = &args.nodes;
    if let Some(node) = args.nodes.one(&args.choice) {
        let name = NodeName { vnet: vnet.clone(), node: node.into() };
        return run(client, &name, &request, !args.no_stdin).await;
    }
    if args.tty || args.interactive {
        return Err(CliFailure::Usage("-t and -i need exactly one node".into()));
    }
    many::run(client, vnet, args.nodes.chosen(client, &args.choice).await?, request).await
}

pub async fn shell(client: &Client, args: ShellArgs) -> Result<ExitCode, CliFailure> {
    run(client, &args.name, &request(Vec::new(), args.guest, args.run_as, true), true).await
}

fn request(command: Vec<String>, guest: Option<u32>, run_as: RunAsArgs, tty: bool) -> ExecRequest {
    ExecRequest {
        command,
        user: run_as.user,
        workdir: run_as.workdir,
        process: guest.map_or(GuestProcess::Control, GuestProcess::Guest),
        tty: tty.then(|| window_size().unwrap_or(SIZE_DEFAULT)),
        term: tty.then(|| std::env::var("TERM").ok()).flatten(),
    }
}

async fn run(
    client: &Client,
    name: &NodeName,
    request: &ExecRequest,
    with_input: bool,
) -> Result<ExitCode, CliFailure> {
    let connection = client.exec(&name.vnet, &name.node, request).await?;
    let raw = request.tty.and_then(|_| RawTerminal::enter());
    let (mut from_daemon, to_daemon) = tokio::io::split(connection);
    let (frames, queue) = mpsc::channel(FRAMES_MAX);
    tokio::spawn(send(to_daemon, queue));
    if with_input {
        tokio::spawn(input(frames.clone()));
    } else {
        let _ = frames.send(ExecFrame::StdinEnd).await;
    }
    if request.tty.is_some() {
        tokio::spawn(sizes(frames.clone()));
    }
    let code = output(&mut from_daemon, name, &mut io::stdout(), &mut io::stderr()).await;
    drop(raw);
    // The system keeps only the low byte of an exit code.
    code.map(|code| ExitCode::from(code as u8))
}

async fn send(
    mut to: impl AsyncWrite + Unpin,
    mut queue: mpsc::Receiver<ExecFrame>,
) -> Result<(), ExecFrameError> {
    while let Some(frame) = queue.recv().await {
        write_frame(&mut to, &frame).await?;
    }
    Ok(())
}

/// Sends standard input as frames.
async fn input(frames: mpsc::Sender<ExecFrame>) {
    let mut stdin = tokio::io::stdin();
    let mut bytes = vec![0; INPUT_BYTES];
    while let Ok(count @ 1..) = stdin.read(&mut bytes).await {
        if frames.send(ExecFrame::Stdin(bytes[..count].to_vec())).await.is_err() {
            return;
        }
    }
    let _ = frames.send(ExecFrame::StdinEnd).await;
}

/// Sends every new size of the terminal.
async fn sizes(frames: mpsc::Sender<ExecFrame>) {
    let Ok(mut changed) = signal(SignalKind::window_change()) else { return };
    while changed.recv().await.is_some() {
        if let Some(size) = window_size()
            && frames.send(ExecFrame::Resize(size)).await.is_err()
        {
            return;
        }
    }
}

fn window_size() -> Option<WindowSize> {
    let size = tcgetwinsize(io::stdout()).or_else(|_| tcgetwinsize(io::stdin())).ok()?;
    (size.ws_row > 0 && size.ws_col > 0)
        .then_some(WindowSize { rows: size.ws_row, columns: size.ws_col })
}

/// Terminal in raw mode while this lives: every key goes to the command.
struct RawTerminal(Termios);

impl RawTerminal {
    /// Returns `None` if standard input is no terminal.
    fn enter() -> Option<Self> {
        if !io::stdin().is_terminal() {
            return None;
        }
        let before = tcgetattr(io::stdin()).ok()?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw).ok()?;
        Some(Self(before))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // If the terminal went away, nothing can be restored.
        let _ = tcsetattr(io::stdin(), OptionalActions::Drain, &self.0);
    }
}
