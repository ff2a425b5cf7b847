//! Verbs that observe: logs and traces.

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use clap::ValueEnum;
use pdp_api::client::{Client, ResponseStream};
use pdp_api::{FrameMatch, GuestProcess, LogQuery, NodeProcess, TRACE_WAIT_MS_MAX, TraceRequest};

use crate::daemon::complete;
use crate::failure::CliFailure;
use crate::input::filter;
use crate::input::name::{NodeName, VnetPortName};
use crate::input::times::seconds_within;
use crate::interrupt::until_interrupted;
use crate::output::{self, Format};

/// Accepts all but link-local IPv6 multicast, which kernels send by themselves: `not (ip6 and
/// ip6[24:2] = 0xff02)`.
const NO_MULTICAST: &str = "6,40 0 0 12,21 0 2 34525,40 0 0 38,21 1 0 65282,6 0 0 262144,6 0 0 0";

/// Print the log of the daemon, the mux, a guest or a helper.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp logs -f\n         pdp logs red/r1 --tail 50\n         \
                        pdp logs red/r1 --guest 0\n         pdp logs red/r1 --helper mirror")]
pub struct LogsArgs {
    /// `daemon`, `mux`, or VNET/NODE for its control guest.
    #[arg(value_name = "NAME", default_value = "daemon", add = complete::nodes())]
    pub name: String,
    /// Print the log of this forwarding guest of the node.
    #[arg(long, value_name = "N", conflicts_with = "helper")]
    pub guest: Option<u32>,
    /// Print the log of this helper of the node.
    #[arg(long, value_enum)]
    pub helper: Option<HelperName>,
    /// Continue with new lines as they are written.
    #[arg(short, long)]
    pub follow: bool,
    /// Print only this many of the last lines.
    #[arg(long, value_name = "LINES")]
    pub tail: Option<u64>,
}

/// A helper of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HelperName {
    /// Passes frames between the mux and the node's interfaces.
    Tap,
    /// Passes routes to the forwarding guests.
    Mirror,
    /// Connects the node beside its networks and serves its published ports.
    Management,
}

/// Follow one packet through the node: its stages, its route, and its verdict.
///
/// Without a filter: the first packet that is not link-local IPv6 multicast, which every kernel
/// sends by itself.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp trace red/r1:eth0\n         \
                        pdp trace red/r1:eth0 -f 'icmp and dst 10.2.0.2'\n         \
                        pdp trace red/r1:eth0 --match 12=0800 --match 30=0a020002")]
pub struct TraceArgs {
    /// VNET/NODE:PORT at which the packet arrives.
    #[arg(value_name = "PORT", add = complete::ports())]
    pub name: VnetPortName,
    /// Only a frame that matches this filter, in libpcap's language (man pcap-filter), '' for any;
    /// compiled by tcpdump.
    #[arg(short, long, value_name = "FILTER")]
    pub filter: Option<String>,
    /// Only a frame with these bytes (hexadecimal) at this offset from its start; may be repeated.
    #[arg(short, long = "match", value_name = "OFFSET=BYTES[/MASK]", value_parser = frame_match)]
    pub matches: Vec<FrameMatch>,
    /// Longest wait for such a packet, 0.1 to 60 seconds.
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = trace_wait)]
    pub wait: Duration,
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

pub async fn logs(client: &Client, args: LogsArgs) -> Result<ExitCode, CliFailure> {
    let query = LogQuery { tail: args.tail, follow: args.follow };
    let of_node = |what| match (args.guest, args.helper) {
        (None, None) => Ok(what),
        _ => Err(CliFailure::Usage("--guest and --helper go with VNET/NODE".into())),
    };
    let stream = match args.name.as_str() {
        "daemon" => client.logs(of_node(NodeProcess::Daemon)?, &query).await?,
        "mux" => client.logs(of_node(NodeProcess::Mux)?, &query).await?,
        name => {
            let node: NodeName = name
                .parse()
                .map_err(|_| CliFailure::Usage(format!("{name}: use daemon, mux or VNET/NODE")))?;
            let process = match (args.guest, args.helper) {
                (Some(number), _) => GuestProcess::Guest(number),
                (None, Some(HelperName::Tap)) => GuestProcess::Tap,
                (None, Some(HelperName::Mirror)) => GuestProcess::Mirror,
                (None, Some(HelperName::Management)) => GuestProcess::Management,
                (None, None) => GuestProcess::Control,
            };
            client.node_logs(&node.vnet, &node.node, process, &query).await?
        }
    };
    copy(stream, io::stdout()).await
}

/// Writes a stream to `to` as it arrives. An interrupt ends it successfully.
async fn copy(mut stream: ResponseStream, mut to: impl Write) -> Result<ExitCode, CliFailure> {
    until_interrupted(async {
        while let Some(bytes) = stream.next().await? {
            to.write_all(&bytes)?;
            to.flush()?;
        }
        Ok(ExitCode::SUCCESS)
    })
    .await
}

/// Parses the seconds for which a trace waits.
fn trace_wait(text: &str) -> Result<Duration, String> {
    seconds_within(text, 100..=TRACE_WAIT_MS_MAX)
}

/// Parses `OFFSET=BYTES[/MASK]`, bytes and mask in hexadecimal.
fn frame_match(text: &str) -> Result<FrameMatch, String> {
    const FORM: &str = "use OFFSET=BYTES[/MASK] with bytes in hexadecimal, for example 12=0800";
    let (offset, bytes) = text.split_once('=').ok_or(FORM)?;
    let (value, mask) = match bytes.split_once('/') {
        Some((value, mask)) => (hex(value).ok_or(FORM)?, Some(hex(mask).ok_or(FORM)?)),
        None => (hex(bytes).ok_or(FORM)?, None),
    };
    let mask = mask.unwrap_or_else(|| vec![0xff; value.len()]);
    if mask.len() != value.len() || value.is_empty() {
        return Err("make the mask as long as the bytes, and neither empty".into());
    }
    Ok(FrameMatch { offset: offset.parse().map_err(|_| FORM)?, value, mask })
}

fn hex(text: &str) -> Option<Vec<u8>> {
    let digits: Vec<u8> =
        text.chars().map(|c| c.to_digit(16).map(|digit| digit as u8)).collect::<Option<_>>()?;
    digits
        .len()
        .is_multiple_of(2)
        .then(|| digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

pub async fn trace(client: &Client, args: TraceArgs) -> Result<ExitCode, CliFailure> {
    let name = &args.name;
    let wait_ms = u64::try_from(args.wait.as_millis()).unwrap_or(u64::MAX);
    let program = match &args.filter {
        Some(filter) => Some(filter::compile(filter)?),
        None if args.matches.is_empty() => Some(NO_MULTICAST.to_owned()),
        None => None,
    };
    let request = TraceRequest { filter: args.matches, program, wait_ms };
    let trace = client.trace(&name.vnet, &name.node, &name.port, &request).await?;
    output::print(args.format, &trace, |trace| {
        let rows = trace.stages.iter().map(|stage| {
            let at_us = stage.at_ns as f64 / 1000.0;
            [format!("{at_us:.1}"), stage.stage.clone(), stage.detail.clone()]
        });
        output::table(["AT µs", "STAGE", "DETAIL"], rows.collect())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trace_skips_packets_that_kernels_send_unasked() {
        let program: pdp_wire::bpf::BpfProgram = NO_MULTICAST.parse().unwrap();
        let mut frame = vec![0; 60];
        assert!(program.matches(&frame) && program.matches(&frame[..20]));
        frame[12..14].copy_from_slice(&[0x86, 0xdd]);
        assert!(program.matches(&frame));
        frame[38..40].copy_from_slice(&[0xff, 0x02]);
        assert!(!program.matches(&frame));
        frame[38..40].copy_from_slice(&[0xff, 0x05]);
        assert!(program.matches(&frame));
    }

    #[test]
    fn frame_matches_are_parsed_or_refused() {
        let one = frame_match("12=0800").unwrap();
        assert_eq!((one.offset, one.value, one.mask), (12, vec![8, 0], vec![255, 255]));
        let masked = frame_match("0=0102/ff00").unwrap();
        assert_eq!((masked.value, masked.mask), (vec![1, 2], vec![255, 0]));
        for bad in ["", "12", "x=00", "12=0", "12=zz", "12=", "12=00/ffff", "70000=00"] {
            assert!(frame_match(bad).is_err(), "{bad}");
        }
    }
}
