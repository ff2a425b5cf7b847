//! `pdp capture`: frames of ports as pcap.

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};

use pdp_api::CaptureQuery;
use pdp_api::client::Client;
use tokio::sync::mpsc;

use crate::failure::CliFailure;
use crate::input::filter;
use crate::input::name::VnetPortName;
use crate::interrupt::until_interrupted;
use crate::output::pcap::{PcapReader, PcapRecord, PcapWriter};

/// Largest number of frames that wait to be written.
const FRAMES_MAX: usize = 64;

/// Write the frames of ports as pcap, both directions, until interrupted.
///
/// Several ports are written as pcapng, which records each frame's port. Frames that the filter
/// rejects are not copied. An external is captured at its link: red/external:NAME has the frames
/// inside the tunnel.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp capture red/r1:eth0 --wireshark\n         \
                        pdp capture red/r1:eth0 -f 'tcp port 179' -w - | tcpdump -nr -\n         \
                        pdp capture red/r1:eth0 red/external:isp -c 100 -w both.pcapng")]
pub struct CaptureArgs {
    /// VNET/NODE:PORT or VNET/external:NAME; may be repeated.
    #[arg(value_name = "PORT", required = true, add = crate::daemon::complete::ports())]
    pub ports: Vec<VnetPortName>,
    /// Write into this file; - for standard output.
    #[arg(short, long, value_name = "FILE", required_unless_present = "wireshark")]
    pub write: Option<PathBuf>,
    /// Only frames that match this filter, in libpcap's language (man pcap-filter); compiled by
    /// tcpdump.
    #[arg(short, long, value_name = "FILTER")]
    pub filter: Option<String>,
    /// Stop after this many frames.
    #[arg(short, long, value_name = "FRAMES", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// Bytes to capture of each frame, 0 for all.
    #[arg(short, long, value_name = "BYTES", default_value_t = 0)]
    pub snap: u32,
    /// Start wireshark and write into it, until it is closed.
    #[arg(long, conflicts_with = "write")]
    pub wireshark: bool,
}

pub async fn capture(client: &Client, args: CaptureArgs) -> Result<ExitCode, CliFailure> {
    let filter = args.filter.as_deref().map(filter::compile).transpose()?;
    let to_stdout = args.write.as_ref().is_some_and(|path| path.as_os_str() == "-");
    if to_stdout && io::stdout().is_terminal() {
        return Err(CliFailure::Usage(
            "frames are binary: pipe them, as in `pdp capture ... -w - | tcpdump -nr -`".into(),
        ));
    }
    let query = CaptureQuery { snap_bytes: args.snap, filter };
    let mut streams = Vec::new();
    for name in &args.ports {
        streams.push(client.capture(&name.vnet, &name.node, &name.port, &query).await?);
    }
    let mut wireshark = None;
    let to: Box<dyn Write> = match &args.write {
        Some(_) if to_stdout => Box::new(io::stdout()),
        Some(path) => Box::new(
            File::create(path)
                .map_err(|error| CliFailure::Other(format!("{}: {error}", path.display())))?,
        ),
        None => {
            let mut child = start_wireshark()?;
            let input =
                child.stdin.take().ok_or_else(|| io::Error::other("wireshark has no input"))?;
            wireshark = Some(child);
            Box::new(input)
        }
    };
    let names: Vec<String> = args.ports.iter().map(ToString::to_string).collect();
    let mut writer = PcapWriter::new(to, &names)?;
    let (frames, mut queue) = mpsc::channel::<Result<(u32, PcapRecord), CliFailure>>(FRAMES_MAX);
    for (port, mut stream) in streams.into_iter().enumerate() {
        let frames = frames.clone();
        tokio::spawn(async move {
            let mut records = PcapReader::default();
            loop {
                let next = match records.next(&mut stream).await {
                    Ok(None) => return,
                    Ok(Some(record)) => Ok((port as u32, record)),
                    Err(failure) => Err(failure),
                };
                let last = next.is_err();
                if frames.send(next).await.is_err() || last {
                    return;
                }
            }
        });
    }
    drop(frames);
    let mut left = args.count.unwrap_or(u64::MAX);
    let written = until_interrupted(async {
        while left > 0
            && let Some(next) = queue.recv().await
        {
            let (port, record) = next?;
            writer.write(port, &record)?;
            left -= 1;
        }
        Ok(ExitCode::SUCCESS)
    })
    .await;
    drop(writer);
    if let (Ok(_), Some(mut child)) = (&written, wireshark) {
        // Wireshark shows the frames until it is closed.
        child.wait()?;
    }
    written
}

fn start_wireshark() -> Result<Child, CliFailure> {
    let started = Command::new("wireshark").args(["-k", "-i", "-"]).stdin(Stdio::piped()).spawn();
    started.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => CliFailure::Other(
            "wireshark is not in PATH; install it (apt install wireshark), or write the frames with -w FILE \
             or -w - (as in `-w - | tcpdump -nr -`)"
                .into(),
        ),
        _ => CliFailure::Other(format!("wireshark: {error}")),
    })
}
