//! Copies one file into a node or out of it, by commands in the node. No process outside the node
//! follows paths of the node.
//!
//! The bytes go into a temporary file beside the wanted one, which is renamed once it is complete.
//! Each side buffers only a few frames. A file from a node is limited to the given size.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::ExitCode;

use clap::builder::{OsStringValueParser, TypedValueParser};
use pdp_api::client::Client;
use pdp_api::exec::{ExecFrame, ExecRequest, PAYLOAD_BYTES_MAX, write_frame};
use pdp_spec::units::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::signal::unix::{SignalKind, signal};

use crate::daemon::node_command::{not_started, until_end};
use crate::failure::CliFailure;
use crate::input::name::{CopyLocation, NodeName};

/// Bytes kept of a failed command's message.
const WORDS_BYTES_MAX: usize = 2000;

/// Permissions that are copied. Set-user-id and set-group-id bits are not.
const MODE: u32 = 0o777;

/// Longest line of permissions: octal digits and the line's end, bytes.
const MODE_LINE_BYTES_MAX: usize = 8;

/// Finds the target file ($1, or below it the name $2) and the temporary file for its bytes.
const INTO: &str = r#"
fail() { echo "$1" >&2; exit 1; }
to=$1
case $to in /*) ;; *) to=./$to ;; esac
if [ -d "$to" ]; then
    [ -n "$2" ] || fail "$1: is a directory"
    to=${to%/}/$2
fi
if [ -L "$to" ]; then to=$(readlink -f "$to") || fail "$1: a dangling symbolic link"; fi
part=$to.$3
"#;

/// Copies standard input to the temporary file.
const WRITE: &str = r#"
[ ! -d "$to" ] || fail "$to: is a directory"
[ ! -e "$to" ] || [ -f "$to" ] || fail "$to: not a regular file"
[ -d "${to%/*}/" ] || fail "$to: no such directory"
umask 077
set -C
exec 3> "$part" || exit 1
exec cat >&3
"#;

/// Renames the temporary file, with the permissions $4. Without $4, the existing file's permissions
/// stay.
const NAME: &str = r#"
mode=${4:-$(stat -c %a "$to" 2>/dev/null || echo 644)}
chmod "$mode" "$part"
exec mv -f "$part" "$to"
"#;

/// Removes an incomplete temporary file.
const UNDO: &str = r#"exec rm -f "$part""#;

/// Prints the permissions of the file $1, a line, and then its bytes.
const FETCH: &str = r#"
fail() { echo "$1" >&2; exit 1; }
from=$1
case $from in /*) ;; *) from=./$from ;; esac
[ ! -d "$from" ] || fail "$1: is a directory"
[ -e "$from" ] || fail "$1: no such file"
[ -f "$from" ] || fail "$1: not a regular file"
exec < "$from" || exit 1
stat -L -c %a "$from" 2>/dev/null || echo 644
exec cat
"#;

/// Copy one file with its mode into a node or out of it.
///
/// The file gets its name once it is complete; until then, an existing file of that name stays. The
/// copy uses the node's sh and cat, as the node's root.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp cp frr.conf red/r1:/tmp\n         \
                        pdp cp red/h1:/tmp/trace.pcap .\n         \
                        generate | pdp cp - red/h1:/tmp/input\n         \
                        pdp cp red/h1:/var/log/daemon.log - | less\n\n\
                        Directories: tar c DIR | pdp exec red/h1 tar x -C /tmp")]
pub struct CpArgs {
    /// VNET/NODE:PATH, a local file (with ./ before a name that looks like a file in a node), or -
    /// for standard input.
    #[arg(value_name = "FROM", value_parser = OsStringValueParser::new().map(CopyLocation::of))]
    pub from: CopyLocation,
    /// Same forms, or a directory; - for standard output.
    #[arg(value_name = "TO", value_parser = OsStringValueParser::new().map(CopyLocation::of))]
    pub to: CopyLocation,
    /// Largest file to copy from a node, like 20Gi. Guards against a node that sends without end.
    /// Not for standard output.
    #[arg(long, value_name = "BYTES", default_value = "1Gi")]
    pub max_size: Bytes,
}

pub async fn cp(client: &Client, args: CpArgs) -> Result<ExitCode, CliFailure> {
    let ends = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
    let [mut interrupt, mut terminate, mut hangup] =
        [signal(ends[0])?, signal(ends[1])?, signal(ends[2])?];
    let interrupted = async {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    };
    match (&args.from, &args.to) {
        (CopyLocation::Node(..), CopyLocation::Node(..)) => Err(usage(
            "copy between nodes in two steps: pdp cp VNET/NODE:PATH - | pdp cp - VNET/NODE:PATH",
        )),
        (CopyLocation::Node(name, path), to) => tokio::select! {
            ended = fetch(client, name, path, to, args.max_size.0) => ended,
            () = interrupted => Err(broken_off()),
        },
        (from, CopyLocation::Node(name, path)) => put(client, from, name, path, interrupted).await,
        _ => Err(usage("FROM or TO must be a file in a node: VNET/NODE:PATH, like red/r1:/tmp/x")),
    }?;
    Ok(ExitCode::SUCCESS)
}

fn usage(text: &str) -> CliFailure {
    CliFailure::Usage(text.into())
}

fn broken_off() -> CliFailure {
    CliFailure::Other("interrupted; no file was changed".into())
}

fn at(path: &Path) -> impl Fn(io::Error) -> CliFailure {
    move |error| CliFailure::Other(format!("{}: {error}", path.display()))
}

fn is_directory(path: &Path) -> CliFailure {
    let hint = "copy directories with `tar c DIR | pdp exec VNET/NODE tar x -C /tmp`";
    CliFailure::Other(format!("{}: is a directory; {hint}", path.display()))
}

/// Returns a request that runs `sh` with a script and its arguments.
fn script(script: String, arguments: &[&str]) -> ExecRequest {
    let words = ["sh", "-c", &script, "sh"].into_iter().chain(arguments.iter().copied());
    ExecRequest { command: words.map(Into::into).collect(), ..Default::default() }
}

async fn put(
    client: &Client,
    from: &CopyLocation,
    name: &NodeName,
    path: &str,
    interrupted: impl Future<Output = ()>,
) -> Result<(), CliFailure> {
    if path.is_empty() {
        return Err(usage("no path in the node; give one, like red/r1:/tmp"));
    }
    let mut mode = String::new();
    let mut file_name = "";
    let source: Box<dyn AsyncRead + Unpin> = match from {
        CopyLocation::Local(here) => {
            let file = fs::File::open(here).map_err(at(here))?;
            let metadata = file.metadata().map_err(at(here))?;
            if metadata.is_dir() {
                return Err(is_directory(here));
            }
            if metadata.is_file() {
                mode = format!("{:o}", metadata.permissions().mode() & MODE);
            }
            file_name = here.file_name().and_then(OsStr::to_str).unwrap_or_default();
            Box::new(tokio::fs::File::from_std(file))
        }
        _ => Box::new(tokio::io::stdin()),
    };
    let part = part();
    let arguments = [path, file_name, &part, &mode];
    let start = async |step: &str| {
        let request = script(INTO.to_owned() + step, &arguments);
        client.exec(&name.vnet, &name.node, &request).await.map(tokio::io::split)
    };
    let (from_node, to_node) = start(WRITE).await?;
    let mut written = {
        let mut interrupted = pin!(interrupted);
        let mut sending = pin!(send(to_node, source, from));
        let mut ending = pin!(end(from_node, name, |_| Ok(())));
        tokio::select! {
            ended = &mut ending => ended,
            sent = &mut sending => match sent {
                Ok(()) => tokio::select! {
                    ended = &mut ending => ended,
                    () = &mut interrupted => Err(broken_off()),
                },
                Err(failure) => Err(failure),
            },
            () = &mut interrupted => Err(broken_off()),
        }
    };
    // Renaming is a command of its own. The first command's input also ends if the daemon is
    // killed.
    if written.is_ok() {
        written = match start(NAME).await {
            Ok((from_node, _to_node)) => end(from_node, name, |_| Ok(())).await,
            Err(error) => Err(error.into()),
        };
    }
    if written.is_err()
        && let Ok((from_node, _to_node)) = start(UNDO).await
    {
        let _ = end(from_node, name, |_| Ok(())).await;
    }
    written
}

/// Returns a unique suffix for a temporary file.
fn part() -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let nanoseconds = now.map_or(0, |since| since.subsec_nanos());
    format!("{}-{nanoseconds}.part", std::process::id())
}

/// Sends all bytes of a source. Returns only errors of the source.
async fn send(
    mut to: impl AsyncWrite + Unpin,
    mut source: impl AsyncRead + Unpin,
    from: &CopyLocation,
) -> Result<(), CliFailure> {
    let mut bytes = vec![0; PAYLOAD_BYTES_MAX];
    loop {
        let count = source.read(&mut bytes).await.map_err(|error| match from {
            CopyLocation::Local(here) => at(here)(error),
            _ => CliFailure::Other(format!("standard input: {error}")),
        })?;
        let frame = match count {
            0 => ExecFrame::StdinEnd,
            _ => ExecFrame::Stdin(bytes[..count].to_vec()),
        };
        if write_frame(&mut to, &frame).await.is_err() || count == 0 {
            return Ok(());
        }
    }
}

/// Passes on the command's output until it ends. If it fails, returns its message as an error.
async fn end(
    mut from: impl AsyncRead + Unpin,
    name: &NodeName,
    mut take: impl FnMut(Vec<u8>) -> Result<(), CliFailure>,
) -> Result<(), CliFailure> {
    let mut words = Vec::new();
    let code = until_end(&mut from, |frame| match frame {
        ExecFrame::Stdout(bytes) => take(bytes),
        ExecFrame::Stderr(bytes) => {
            words.extend(bytes);
            words.truncate(WORDS_BYTES_MAX);
            Ok(())
        }
        _ => Ok(()),
    });
    match code.await? {
        0 => Ok(()),
        code => Err(failed(name, &words, code)),
    }
}

/// Returns a node's message as an error, on one line and without control characters.
fn failed(name: &NodeName, words: &[u8], code: i32) -> CliFailure {
    let words = match not_started(words) {
        Some((words, _)) => words,
        None => String::from_utf8_lossy(words).trim_end().replace('\n', "; "),
    };
    let words: String = words.chars().filter(|letter| !letter.is_control()).collect();
    let words = if words.is_empty() { format!("ended with exit code {code}") } else { words };
    CliFailure::Other(format!("{}/{}: {words}", name.vnet, name.node))
}

async fn fetch(
    client: &Client,
    name: &NodeName,
    path: &str,
    to: &CopyLocation,
    bytes_max: u64,
) -> Result<(), CliFailure> {
    if path.is_empty() {
        return Err(usage("no path in the node; give one, like red/r1:/tmp/x"));
    }
    let mut goal = match to {
        CopyLocation::Local(here) => CopyDestination::of(here, path)?,
        _ => CopyDestination::Stream,
    };
    let request = script(FETCH.into(), &[path]);
    let connection = client.exec(&name.vnet, &name.node, &request).await?;
    let mut head = Some(Vec::new());
    let mut left = bytes_max;
    let mut take = |goal: &mut CopyDestination, bytes: &[u8]| {
        // Standard output takes no space on this machine's disk.
        if !matches!(goal, CopyDestination::Stream) {
            left = left.checked_sub(bytes.len() as u64).ok_or_else(|| {
                let what = format!("{}/{}: {path:?}", name.vnet, name.node);
                let hint =
                    "raise --max-size, or copy it to standard output: pdp cp VNET/NODE:PATH -";
                CliFailure::Other(format!("{what} has more than {bytes_max} bytes; {hint}"))
            })?;
        }
        goal.write(bytes)
    };
    end(connection, name, |bytes| {
        let Some(line) = &mut head else { return take(&mut goal, &bytes) };
        line.extend(bytes);
        let Some(end) = line.iter().take(MODE_LINE_BYTES_MAX).position(|byte| *byte == b'\n')
        else {
            return if line.len() < MODE_LINE_BYTES_MAX { Ok(()) } else { Err(no_mode()) };
        };
        let digits = std::str::from_utf8(&line[..end]).map_err(|_| no_mode())?;
        goal.begin(u32::from_str_radix(digits, 8).map_err(|_| no_mode())? & MODE)?;
        let rest = line.split_off(end + 1);
        head = None;
        take(&mut goal, &rest)
    })
    .await?;
    if head.is_some() { Err(no_mode()) } else { goal.finish() }
}

fn no_mode() -> CliFailure {
    CliFailure::Other("the node's sh or stat did not report the file's permissions".into())
}

/// Destination of a node's file.
enum CopyDestination {
    Stream,
    /// File with this name, not created yet.
    Named(PathBuf),
    Begun(PartialFile, PathBuf),
}

/// An incomplete file. Removed when dropped.
struct PartialFile {
    path: PathBuf,
    file: fs::File,
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        // A complete file no longer has this name.
        let _ = fs::remove_file(&self.path);
    }
}

impl CopyDestination {
    /// Returns `here`, or the file's name below it if it is a directory. Follows symbolic links.
    fn of(here: &Path, path: &str) -> Result<Self, CliFailure> {
        let mut here = here.to_owned();
        if here.is_dir() {
            let name = Path::new(path).file_name();
            here.push(
                name.ok_or_else(|| usage("the path in the node does not end in a file name"))?,
            );
        }
        match fs::canonicalize(&here) {
            Ok(real) => here = real,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(at(&here)(error)),
        }
        match fs::symlink_metadata(&here) {
            Ok(metadata) if metadata.is_dir() => Err(is_directory(&here)),
            Ok(metadata) if !metadata.is_file() => Err(CliFailure::Other(format!(
                "{}: not a regular file; use - for standard output",
                here.display()
            ))),
            Ok(_) => Ok(Self::Named(here)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::Named(here)),
            Err(error) => Err(at(&here)(error)),
        }
    }

    fn begin(&mut self, mode: u32) -> Result<(), CliFailure> {
        if let Self::Named(to) = self {
            let mut path = to.clone().into_os_string();
            path.push(".");
            path.push(part());
            let path = PathBuf::from(path);
            let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&path);
            let file = file.map_err(at(to))?;
            *self = Self::Begun(PartialFile { path, file }, to.clone());
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), CliFailure> {
        match self {
            Self::Begun(part, to) => part.file.write_all(bytes).map_err(at(to)),
            _ => {
                let mut out = io::stdout();
                Ok(out.write_all(bytes).and_then(|()| out.flush())?)
            }
        }
    }

    fn finish(self) -> Result<(), CliFailure> {
        match self {
            Self::Begun(part, to) => fs::rename(&part.path, &to).map_err(at(&to)),
            _ => Ok(()),
        }
    }
}
