//! Commands and shells in nodes.

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use pdp_api::GuestProcess;
use pdp_api::client::{Client, Error};
use pdp_api::exec::{ExecRequest, Frame, FrameError, WindowSize, read_frame, write_frame};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::args::{Exec, Shell, Stand};
use crate::failure::Failure;
use crate::many;
use crate::name::NodeName;
use crate::nodes::Nodes;

/// Size of a terminal that does not say.
const SIZE_DEFAULT: WindowSize = WindowSize { rows: 24, columns: 80 };

/// Bytes read at a time from standard input.
const INPUT_BYTES: usize = 32 << 10;

/// Exit code of the OCI runtime where it could not start a command.
const RUNTIME_FAILED: i32 = 255;

/// Exit code of a command that signal 31 (SIGSYS) ended.
const FORBIDDEN: i32 = 128 + 31;

/// Frames for the daemon that may wait.
const FRAMES_MAX: usize = 4;

pub async fn exec(client: &Client, args: Exec) -> Result<ExitCode, Failure> {
    let command = args.command.into_iter().map(OsString::into_string).collect::<Result<_, _>>();
    let command =
        command.map_err(|word| Failure::Usage(format!("{}: not UTF-8", word.to_string_lossy())))?;
    let request = request(command, args.guest, args.stand, args.tty);
    let Nodes { vnet, .. } = &args.nodes;
    if let Some(node) = args.nodes.one(&args.choice) {
        let name = NodeName { vnet: vnet.clone(), node: node.into() };
        return run(client, &name, &request, !args.no_stdin).await;
    }
    if args.tty || args.interactive {
        return Err(Failure::Usage(
            "a terminal and standard input (-t, -i) are for one node".into(),
        ));
    }
    many::run(client, vnet, args.nodes.chosen(client, &args.choice).await?, request).await
}

pub async fn shell(client: &Client, args: Shell) -> Result<ExitCode, Failure> {
    run(client, &args.name, &request(Vec::new(), args.guest, args.stand, true), true).await
}

fn request(command: Vec<String>, guest: Option<u32>, stand: Stand, tty: bool) -> ExecRequest {
    ExecRequest {
        command,
        user: stand.user,
        workdir: stand.workdir,
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
) -> Result<ExitCode, Failure> {
    let connection = client.exec(&name.vnet, &name.node, request).await?;
    let raw = request.tty.and_then(|_| Raw::enter());
    let (mut from_daemon, to_daemon) = tokio::io::split(connection);
    let (frames, queue) = mpsc::channel(FRAMES_MAX);
    tokio::spawn(send(to_daemon, queue));
    if with_input {
        tokio::spawn(input(frames.clone()));
    } else {
        let _ = frames.send(Frame::StdinEnd).await;
    }
    if request.tty.is_some() {
        tokio::spawn(sizes(frames.clone()));
    }
    let code = output(&mut from_daemon, name, &mut io::stdout(), &mut io::stderr()).await;
    drop(raw);
    // The low byte is what the system keeps of an exit code.
    code.map(|code| ExitCode::from(code as u8))
}

/// Hands on what a command writes, until it ends; returns its exit code.
pub async fn until_end(
    from: &mut (impl AsyncRead + Unpin),
    mut take: impl FnMut(Frame) -> Result<(), Failure>,
) -> Result<i32, Failure> {
    while let Some(frame) = read_frame(from).await? {
        match frame {
            // To see whether the client is there.
            Frame::Stdout(bytes) if bytes.is_empty() => {}
            Frame::Stdout(_) | Frame::Stderr(_) => take(frame)?,
            Frame::Exit(code) => return Ok(code),
            Frame::BrokenOff(why) => {
                return Err(Failure::Other(format!("the daemon ended the command: {why}")));
            }
            Frame::Stdin(_) | Frame::StdinEnd | Frame::Resize(_) => {
                return Err(Error::Answer("frame of a client".into()).into());
            }
        }
    }
    Err(Error::Answer("the command's connection ended before it; see `pdp logs`".into()).into())
}

/// Writes out what the command writes, until its exit code comes.
pub async fn output(
    from: &mut (impl AsyncRead + Unpin),
    name: &NodeName,
    out: &mut impl Write,
    err: &mut impl Write,
) -> Result<i32, Failure> {
    // The first words, if they may be the OCI runtime's, until it shows whether they are the last.
    let mut held: Option<Frame> = None;
    let mut written = false;
    let ended = until_end(from, |frame| {
        if !written && held.is_none() && runtime_words(&frame).is_some() {
            held = Some(frame);
            return Ok(());
        }
        for frame in held.take().iter().chain([&frame]) {
            write(frame, out, err)?;
        }
        written = true;
        Ok(())
    });
    let ended = ended.await;
    let Some(held) = held else { return told(ended, name, err) };
    if let (Ok(RUNTIME_FAILED), Some((words, code))) = (&ended, runtime_words(&held)) {
        writeln!(err, "error: {}/{}: {words}", name.vnet, name.node)?;
        return Ok(code);
    }
    write(&held, out, err)?;
    told(ended, name, err)
}

/// Explains the end of a command that made a forbidden system call: the kernel kills it without a word.
fn told(
    ended: Result<i32, Failure>,
    name: &NodeName,
    err: &mut impl Write,
) -> Result<i32, Failure> {
    if let Ok(FORBIDDEN) = ended {
        let why = "a system call that nodes may not make, as those of 32-bit programs";
        writeln!(err, "error: {}/{}: ended by signal 31 (SIGSYS): {why}", name.vnet, name.node)?;
    }
    ended
}

/// What a frame has of [`not_started`].
fn runtime_words(frame: &Frame) -> Option<(String, i32)> {
    match frame {
        Frame::Stdout(bytes) | Frame::Stderr(bytes) => not_started(bytes),
        _ => None,
    }
}

/// Writes a frame to its own stream.
fn write(frame: &Frame, out: &mut impl Write, err: &mut impl Write) -> io::Result<()> {
    match frame {
        Frame::Stdout(bytes) => out.write_all(bytes).and_then(|()| out.flush()),
        Frame::Stderr(bytes) => err.write_all(bytes),
        _ => Ok(()),
    }
}

/// What the OCI runtime says of a command that it can't start, and the exit code that a shell has for that.
pub fn not_started(bytes: &[u8]) -> Option<(String, i32)> {
    let text = String::from_utf8_lossy(bytes);
    let (_, why) = text.split_once("exec failed: unable to start container process: ")?;
    let why = why.trim_end().trim_end_matches('"').replace("\\\"", "");
    let why = why.strip_prefix("exec: ").unwrap_or(&why).to_owned();
    let code = if why.contains("permission denied") { 126 } else { 127 };
    Some((why, code))
}

async fn send(
    mut to: impl AsyncWrite + Unpin,
    mut queue: mpsc::Receiver<Frame>,
) -> Result<(), FrameError> {
    while let Some(frame) = queue.recv().await {
        write_frame(&mut to, &frame).await?;
    }
    Ok(())
}

/// Passes standard input on.
async fn input(frames: mpsc::Sender<Frame>) {
    let mut stdin = tokio::io::stdin();
    let mut bytes = vec![0; INPUT_BYTES];
    while let Ok(count @ 1..) = stdin.read(&mut bytes).await {
        if frames.send(Frame::Stdin(bytes[..count].to_vec())).await.is_err() {
            return;
        }
    }
    let _ = frames.send(Frame::StdinEnd).await;
}

/// Passes on every new size of the terminal.
async fn sizes(frames: mpsc::Sender<Frame>) {
    let Ok(mut changed) = signal(SignalKind::window_change()) else { return };
    while changed.recv().await.is_some() {
        if let Some(size) = window_size()
            && frames.send(Frame::Resize(size)).await.is_err()
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

/// The terminal in raw mode, as long as this lives: every key is the command's to see.
struct Raw(Termios);

impl Raw {
    /// `None` if standard input is no terminal.
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

impl Drop for Raw {
    fn drop(&mut self) {
        // Nothing can be done for a terminal that went away.
        let _ = tcsetattr(io::stdin(), OptionalActions::Drain, &self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_runtime_says_is_told_like_a_shell_does() {
        let says = |why: &str| {
            let words = "exec failed: unable to start container process: ".to_owned() + why;
            not_started(format!("time=\"now\" level=error msg=\"{words}\"\n").as_bytes())
        };
        let missing = r#"exec: \"nosuch\": executable file not found in $PATH"#;
        let (words, code) = says(missing).unwrap();
        assert_eq!((words.as_str(), code), ("nosuch: executable file not found in $PATH", 127));
        assert_eq!(says(r#"exec: \"/etc/motd\": permission denied"#).unwrap().1, 126);
        assert_eq!(not_started(b"no such file or directory"), None);
    }

    #[tokio::test]
    async fn what_a_command_writes_goes_to_its_own_stream() {
        let words = "exec failed: unable to start container process: x\n";
        let (stdout, stderr) =
            (|text: &str| Frame::Stdout(text.into()), |text: &str| Frame::Stderr(text.into()));
        let name: NodeName = "red/r1".parse().unwrap();
        let killed = "error: red/r1: ended by signal 31 (SIGSYS): a system call that nodes may not make, as those of \
                      32-bit programs\n";
        for (frames, wanted) in [
            (vec![stdout(words), Frame::Exit(0)], (words, "", 0)),
            (vec![stdout(words), stderr("b"), Frame::Exit(255)], (words, "b", 255)),
            (vec![stderr("a"), stdout(words), Frame::Exit(255)], (words, "a", 255)),
            (vec![stderr(words), Frame::Exit(255)], ("", "error: red/r1: x\n", 127)),
            (vec![stdout("a"), Frame::Exit(159)], ("a", killed, 159)),
            (vec![Frame::Exit(159)], ("", killed, 159)),
        ] {
            let mut stream = Vec::new();
            for frame in &frames {
                write_frame(&mut stream, frame).await.unwrap();
            }
            let (mut out, mut err) = (Vec::new(), Vec::new());
            let code = output(&mut stream.as_slice(), &name, &mut out, &mut err).await.unwrap();
            let (out, err) = (String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap());
            assert_eq!((out.as_str(), err.as_str(), code), wanted, "{frames:?}");
        }
    }
}
