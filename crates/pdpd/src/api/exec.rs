//! Commands in guests, over an upgraded connection (see [`pdp_api::exec`]).

use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use hyper::header::{CONNECTION, UPGRADE};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use pdp_api::exec::{self, ExecFrame, ExecFrameError, ExecRequest, PAYLOAD_BYTES_MAX};
use pdp_api::{Problem, ProblemKind, paths};
use pdp_container::cgroup::Session;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::process::{Child, ChildStdin};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::answer::{JsonBody, PathParams, ProblemResponse};
use super::process::{Terminal, resize};
use super::{AuthorizedRequest, UpgradedConnection};

/// Frames that may wait for the client; then the command blocks.
const FRAMES_MAX: usize = 8;

/// Longest wait for more output after the command ended. Its background
/// processes may keep its output open forever.
const LAST_OUTPUT_WAIT: Duration = Duration::from_millis(300);

/// Interval of empty frames, which reveal whether the client is still there.
const KEEPALIVE: Duration = Duration::from_secs(5);

/// Runs a command in a guest; the connection is upgraded to `pdp-exec`.
#[utoipa::path(post, path = paths::EXEC, tag = "guests",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("node" = String, Path, description = "The node")),
    request_body = ExecRequest, responses(
    (status = SWITCHING_PROTOCOLS, description = "Frames of type u8 (0 stdin, 1 stdout, 2 \
        stderr, 3 resize, 4 exit, 5 end of stdin), length u32 BE, payload")))]
pub async fn exec(
    api: AuthorizedRequest,
    PathParams((vnet, node)): PathParams<(String, String)>,
    mut request: Request,
) -> Result<Response, ProblemResponse> {
    let is_upgrade = request.headers().get(UPGRADE).is_some_and(|name| name == exec::UPGRADE);
    let Some(upgrade) = request.extensions_mut().remove::<OnUpgrade>().filter(|_| is_upgrade)
    else {
        return Err(Problem::new(ProblemKind::Invalid, "exec needs a protocol upgrade")
            .hint(format!("send Connection: upgrade and Upgrade: {}", exec::UPGRADE))
            .into());
    };
    let JsonBody(request) =
        <JsonBody<ExecRequest> as axum::extract::FromRequest<_>>::from_request(request, &api)
            .await?;
    let tty = request.tty;
    let words = shlex::try_join(request.command.iter().map(String::as_str));
    let words = words.unwrap_or_else(|_| request.command.join(" "));
    let shell = if words.is_empty() { "(a shell)" } else { &words };
    // As a user would type it.
    let user = request.user.iter().map(|user| format!("-u {user} "));
    let place = request.workdir.iter().map(|workdir| format!("-w {workdir} "));
    let words: String = user.chain(place).chain([shell.to_owned()]).collect();
    let (command, session) = api.call(move |daemon, _| daemon.exec(&vnet, &node, &request)).await?;
    if let Some(begun) = &api.audit_entry {
        begun.runs(&words).await?;
    }
    let running = RunningCommand::start(command, session, tty)
        .map_err(|error| Problem::internal(format!("can't start the command: {error}")))?;
    // The result is known when the command ends, not with this response.
    if let Some(begun) = &api.audit_entry {
        begun.take();
    }
    let attended = UpgradedConnection::new(&api.api);
    tokio::spawn(async move {
        run(api, upgrade, running).await;
        drop(attended);
    });
    let headers = [(CONNECTION, "upgrade"), (UPGRADE, exec::UPGRADE)];
    Ok((StatusCode::SWITCHING_PROTOCOLS, headers).into_response())
}

/// A command, and its terminal if it has one. If it is dropped before the
/// command ended by itself, the command and all its descendants are killed.
struct RunningCommand {
    child: Child,
    terminal: Option<Terminal>,
    session: Session,
}

impl RunningCommand {
    fn start(
        mut command: std::process::Command,
        session: Session,
        tty: Option<exec::WindowSize>,
    ) -> std::io::Result<Self> {
        let terminal = match tty {
            Some(size) => {
                let (terminal, side) = Terminal::open(size)?;
                command.stdin(side.try_clone()?).stdout(side.try_clone()?).stderr(side);
                Some(terminal)
            }
            None => {
                command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
                // The command shall not get signals of the daemon's terminal.
                command.process_group(0);
                None
            }
        };
        let child = tokio::process::Command::from(command).spawn()?;
        Ok(Self { child, terminal, session })
    }
}

impl Drop for RunningCommand {
    fn drop(&mut self) {
        // `None` once it has been waited for. Processes that it left in
        // the guest then belong to the guest.
        if self.child.id().is_some() {
            // First the parent, so that nothing new can start in the session.
            let _ = self.child.start_kill();
            self.session.kill();
        }
    }
}

/// Forwards a command's streams until it ends, and logs the result.
async fn run(api: AuthorizedRequest, upgrade: OnUpgrade, run: RunningCommand) {
    let ended = relay_streams(&api, upgrade, run).await;
    if let Some(begun) = &api.audit_entry {
        let (error, exit) = match ended {
            Ok(code) => (None, Some(code)),
            Err(why) => (Some(format!("broken off: {why}")), None),
        };
        begun.end(StatusCode::SWITCHING_PROTOCOLS.as_u16(), error.as_deref(), exit).await;
    }
}

/// Character that ends a terminal's input (VEOF of termios(3)), unless the program chose another.
const END_OF_INPUT: u8 = 4;

const CLIENT_GONE: &str = "the client went away";

/// Forwards a command's streams until the command has ended, the client has gone, or
/// [`AuthorizedRequest::over`] ends the session. Returns the exit code, or why the session was
/// aborted.
async fn relay_streams(
    api: &AuthorizedRequest,
    upgrade: OnUpgrade,
    mut run: RunningCommand,
) -> Result<i32, String> {
    let connection = tokio::select! {
        upgraded = upgrade => match upgraded {
            Ok(upgraded) => TokioIo::new(upgraded),
            Err(_) => return Err(CLIENT_GONE.into()),
        },
        why = api.over() => return Err(why),
    };
    let (from_client, to_client) = tokio::io::split(connection);
    let (frames, queue) = mpsc::channel(FRAMES_MAX);
    let (ending, ended) = watch::channel(false);
    let mut output = JoinSet::new();
    let input = match run.terminal.take() {
        Some(terminal) => {
            output.spawn(pump(terminal.output, ExecFrame::Stdout, frames.clone(), ended));
            ExecInput::Terminal(terminal.input, terminal.size)
        }
        None => {
            if let Some(stdout) = run.child.stdout.take() {
                output.spawn(pump(stdout, ExecFrame::Stdout, frames.clone(), ended.clone()));
            }
            if let Some(stderr) = run.child.stderr.take() {
                output.spawn(pump(stderr, ExecFrame::Stderr, frames.clone(), ended));
            }
            ExecInput::Pipe(run.child.stdin.take())
        }
    };
    let mut writer = tokio::spawn(write(to_client, queue));
    let reader = read(from_client, input);
    tokio::pin!(reader);
    let status = tokio::select! {
        status = run.child.wait() => status,
        _ = &mut reader => return Err(CLIENT_GONE.into()),
        _ = &mut writer => return Err(CLIENT_GONE.into()),
        why = api.over() => {
            // The command ends at once, even if its client reads slowly.
            drop(run);
            let sent = async {
                let _ = frames.send(ExecFrame::BrokenOff(why.clone())).await;
                drop(frames);
                output.shutdown().await;
                let _ = (&mut writer).await;
            };
            let _ = timeout(LAST_OUTPUT_WAIT, sent).await;
            return Err(why);
        }
    };
    let code = status.map_or(-1, exit_code);
    ending.send_replace(true);
    let rest = async {
        while output.join_next().await.is_some() {}
        let _ = frames.send(ExecFrame::Exit(code)).await;
        drop(frames);
        let _ = (&mut writer).await;
    };
    tokio::select! {
        () = rest => {}
        _ = &mut reader => {}
        _ = api.over() => {}
    }
    Ok(code)
}

/// Destination of the client's input.
enum ExecInput {
    Pipe(Option<ChildStdin>),
    Terminal(pipe::Sender, OwnedFd),
}

/// Forwards the client's frames until the client goes away or violates the format.
async fn read(
    mut from: impl AsyncRead + Unpin,
    mut input: ExecInput,
) -> Result<(), ExecFrameError> {
    while let Some(frame) = exec::read_frame(&mut from).await? {
        match (frame, &mut input) {
            (ExecFrame::Stdin(bytes), ExecInput::Terminal(typed, _)) => {
                typed.write_all(&bytes).await?
            }
            (ExecFrame::Stdin(bytes), ExecInput::Pipe(stdin)) => {
                if let Some(pipe) = stdin
                    && pipe.write_all(&bytes).await.is_err()
                {
                    // The command no longer reads its input. This is no error.
                    *stdin = None;
                }
            }
            (ExecFrame::StdinEnd, ExecInput::Pipe(stdin)) => *stdin = None,
            // Like sshd: a terminal has no other end of input.
            (ExecFrame::StdinEnd, ExecInput::Terminal(typed, _)) => {
                typed.write_all(&[END_OF_INPUT]).await?
            }
            (ExecFrame::Resize(size), ExecInput::Terminal(_, terminal)) => resize(terminal, size)?,
            _ => {}
        }
    }
    Ok(())
}

/// Sends frames, and empty ones when idle, until the client goes away or the queue is closed.
async fn write(
    mut to: impl AsyncWrite + Unpin,
    mut queue: mpsc::Receiver<ExecFrame>,
) -> Result<(), ExecFrameError> {
    let mut tick = interval(KEEPALIVE);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let frame = tokio::select! {
            frame = queue.recv() => match frame {
                Some(frame) => frame,
                None => break,
            },
            _ = tick.tick() => ExecFrame::Stdout(Vec::new()),
        };
        exec::write_frame(&mut to, &frame).await?;
    }
    Ok(to.shutdown().await?)
}

/// Forwards a command's output until its end, or until it is silent after `ended` is set.
async fn pump(
    mut from: impl AsyncRead + Unpin,
    frame: fn(Vec<u8>) -> ExecFrame,
    frames: mpsc::Sender<ExecFrame>,
    mut ended: watch::Receiver<bool>,
) {
    let mut bytes = vec![0; PAYLOAD_BYTES_MAX];
    while let Some(Ok(count @ 1..)) = until_silent(from.read(&mut bytes), &mut ended).await {
        if frames.send(frame(bytes[..count].to_vec())).await.is_err() {
            return;
        }
    }
}

/// Returns the result of `read`, or `None` if it takes longer than
/// [`LAST_OUTPUT_WAIT`] after the end.
async fn until_silent<T>(
    read: impl Future<Output = T>,
    ended: &mut watch::Receiver<bool>,
) -> Option<T> {
    tokio::pin!(read);
    tokio::select! {
        biased;
        value = &mut read => return Some(value),
        _ = ended.wait_for(|&ended| ended) => {}
    }
    timeout(LAST_OUTPUT_WAIT, read).await.ok()
}

/// Returns the exit code as a shell computes it.
fn exit_code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}
