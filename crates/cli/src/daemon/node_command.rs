//! Output and end of a command in a node.

use std::io::{self, Write};

use pdp_api::client::Error;
use pdp_api::exec::{ExecFrame, read_frame};
use tokio::io::AsyncRead;

use crate::failure::CliFailure;
use crate::input::name::NodeName;

/// Exit code of the OCI runtime if it could not start a command.
const RUNTIME_FAILED: i32 = 255;

/// Exit code of a command that signal 31 (SIGSYS) ended.
const FORBIDDEN: i32 = 128 + 31;

/// Passes on a command's output until the command ends. Returns its exit code.
pub async fn until_end(
    from: &mut (impl AsyncRead + Unpin),
    mut take: impl FnMut(ExecFrame) -> Result<(), CliFailure>,
) -> Result<i32, CliFailure> {
    while let Some(frame) = read_frame(from).await? {
        match frame {
            // The daemon probes with an empty frame whether the client is there.
            ExecFrame::Stdout(bytes) if bytes.is_empty() => {}
            ExecFrame::Stdout(_) | ExecFrame::Stderr(_) => take(frame)?,
            ExecFrame::Exit(code) => return Ok(code),
            ExecFrame::BrokenOff(why) => {
                return Err(CliFailure::Other(format!("the daemon ended the command: {why}")));
            }
            ExecFrame::Stdin(_) | ExecFrame::StdinEnd | ExecFrame::Resize(_) => {
                return Err(Error::Answer("a frame that only clients send".into()).into());
            }
        }
    }
    Err(Error::Answer("the connection ended before the command; see `pdp logs`".into()).into())
}

/// Writes a command's output until its exit code arrives.
pub async fn output(
    from: &mut (impl AsyncRead + Unpin),
    name: &NodeName,
    out: &mut impl Write,
    err: &mut impl Write,
) -> Result<i32, CliFailure> {
    // The first message, if it may be the OCI runtime's. It waits here until it is known to be the
    // last.
    let mut pending: Option<ExecFrame> = None;
    let mut written = false;
    let ended = until_end(from, |frame| {
        if !written && pending.is_none() && runtime_words(&frame).is_some() {
            pending = Some(frame);
            return Ok(());
        }
        for frame in pending.take().iter().chain([&frame]) {
            write(frame, out, err)?;
        }
        written = true;
        Ok(())
    });
    let ended = ended.await;
    let Some(pending) = pending else { return explain_end(ended, name, err) };
    if let (Ok(RUNTIME_FAILED), Some((words, code))) = (&ended, runtime_words(&pending)) {
        writeln!(err, "error: {}/{}: {words}", name.vnet, name.node)?;
        return Ok(code);
    }
    write(&pending, out, err)?;
    explain_end(ended, name, err)
}

/// Explains the end of a command that made a forbidden system call. The kernel kills it silently.
fn explain_end(
    ended: Result<i32, CliFailure>,
    name: &NodeName,
    err: &mut impl Write,
) -> Result<i32, CliFailure> {
    if let Ok(FORBIDDEN) = ended {
        let why = "a system call that nodes may not make, such as those of 32-bit programs";
        writeln!(err, "error: {}/{}: ended by signal 31 (SIGSYS): {why}", name.vnet, name.node)?;
    }
    ended
}

/// Applies [`not_started`] to the bytes of a frame.
fn runtime_words(frame: &ExecFrame) -> Option<(String, i32)> {
    match frame {
        ExecFrame::Stdout(bytes) | ExecFrame::Stderr(bytes) => not_started(bytes),
        _ => None,
    }
}

/// Writes a frame to its output stream.
fn write(frame: &ExecFrame, out: &mut impl Write, err: &mut impl Write) -> io::Result<()> {
    match frame {
        ExecFrame::Stdout(bytes) => out.write_all(bytes).and_then(|()| out.flush()),
        ExecFrame::Stderr(bytes) => err.write_all(bytes),
        _ => Ok(()),
    }
}

/// Returns the OCI runtime's message if it can't start a command, and a shell's exit code for that.
pub fn not_started(bytes: &[u8]) -> Option<(String, i32)> {
    let text = String::from_utf8_lossy(bytes);
    let (_, why) = text.split_once("exec failed: unable to start container process: ")?;
    let why = why.trim_end().trim_end_matches('"').replace("\\\"", "");
    let why = why.strip_prefix("exec: ").unwrap_or(&why).to_owned();
    let code = if why.contains("permission denied") { 126 } else { 127 };
    Some((why, code))
}

#[cfg(test)]
mod tests {
    use pdp_api::exec::write_frame;

    use super::*;

    #[test]
    fn exec_reports_runtime_errors_like_a_shell() {
        let not_started_for = |why: &str| {
            let words = "exec failed: unable to start container process: ".to_owned() + why;
            not_started(format!("time=\"now\" level=error msg=\"{words}\"\n").as_bytes())
        };
        let missing = r#"exec: \"nosuch\": executable file not found in $PATH"#;
        let (words, code) = not_started_for(missing).unwrap();
        assert_eq!((words.as_str(), code), ("nosuch: executable file not found in $PATH", 127));
        assert_eq!(not_started_for(r#"exec: \"/etc/motd\": permission denied"#).unwrap().1, 126);
        assert_eq!(not_started(b"no such file or directory"), None);
    }

    #[tokio::test]
    async fn exec_forwards_output_to_the_matching_stream() {
        let words = "exec failed: unable to start container process: x\n";
        let (stdout, stderr) = (
            |text: &str| ExecFrame::Stdout(text.into()),
            |text: &str| ExecFrame::Stderr(text.into()),
        );
        let name: NodeName = "red/r1".parse().unwrap();
        let killed = "error: red/r1: ended by signal 31 (SIGSYS): a system call that nodes may not \
                      make, such as those of 32-bit programs\n";
        for (frames, expected) in [
            (vec![stdout(words), ExecFrame::Exit(0)], (words, "", 0)),
            (vec![stdout(words), stderr("b"), ExecFrame::Exit(255)], (words, "b", 255)),
            (vec![stderr("a"), stdout(words), ExecFrame::Exit(255)], (words, "a", 255)),
            (vec![stderr(words), ExecFrame::Exit(255)], ("", "error: red/r1: x\n", 127)),
            (vec![stdout("a"), ExecFrame::Exit(159)], ("a", killed, 159)),
            (vec![ExecFrame::Exit(159)], ("", killed, 159)),
        ] {
            let mut stream = Vec::new();
            for frame in &frames {
                write_frame(&mut stream, frame).await.unwrap();
            }
            let (mut out, mut err) = (Vec::new(), Vec::new());
            let code = output(&mut stream.as_slice(), &name, &mut out, &mut err).await.unwrap();
            let (out, err) = (String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap());
            assert_eq!((out.as_str(), err.as_str(), code), expected, "{frames:?}");
        }
    }
}
