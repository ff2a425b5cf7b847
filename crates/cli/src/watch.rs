//! Verbs that observe: logs and traces.

use std::io::{self, Write};
use std::process::ExitCode;

use pdp_api::client::{Client, ResponseStream};
use pdp_api::{GuestProcess, LogQuery, NodeProcess, TraceRequest};
use tokio::signal::unix::{SignalKind, signal};

use crate::args::{HelperName, LogsArgs, TraceArgs};
use crate::failure::CliFailure;
use crate::filter;
use crate::name::NodeName;
use crate::output;

/// Accepts all but link-local IPv6 multicast, which kernels send by themselves: `not (ip6 and
/// ip6[24:2] = 0xff02)`.
const NO_MULTICAST: &str = "6,40 0 0 12,21 0 2 34525,40 0 0 38,21 1 0 65282,6 0 0 262144,6 0 0 0";

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

/// Runs `work` until it ends, or until an interrupt (Ctrl-C) ends it successfully. The signal is
/// caught from start to end, so that no interrupt is missed between two waits.
pub async fn until_interrupted(
    work: impl Future<Output = Result<ExitCode, CliFailure>>,
) -> Result<ExitCode, CliFailure> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        ended = work => ended,
        _ = interrupt.recv() => Ok(ExitCode::SUCCESS),
    }
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
    use std::time::Duration;

    use nix::sys::signal::{Signal, raise};

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

    #[tokio::test]
    async fn interrupt_between_two_waits_is_noticed() {
        let work = async {
            tokio::time::sleep(Duration::from_millis(1)).await;
            raise(Signal::SIGINT).unwrap();
            loop {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let ended = tokio::time::timeout(Duration::from_secs(20), until_interrupted(work)).await;
        assert_eq!(ended.unwrap().ok(), Some(ExitCode::SUCCESS));
    }
}
