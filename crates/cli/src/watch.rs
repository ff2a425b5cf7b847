//! Verbs that look at what goes on: logs, captures, traces.

use std::io::{self, Write};
use std::process::ExitCode;

use pdp_api::client::{Client, Stream};
use pdp_api::{GuestProcess, LogQuery, NodeProcess, TraceRequest};
use tokio::signal::unix::{SignalKind, signal};

use crate::args::{Helper, Logs, Trace};
use crate::failure::Failure;
use crate::filter;
use crate::name::NodeName;
use crate::output;

/// `not (ip6 and ip6[24:2] = 0xff02)`: without what kernels say to all on a link by themselves.
const NO_MULTICAST: &str = "6,40 0 0 12,21 0 2 34525,40 0 0 38,21 1 0 65282,6 0 0 262144,6 0 0 0";

pub async fn logs(client: &Client, args: Logs) -> Result<ExitCode, Failure> {
    let query = LogQuery { tail: args.tail, follow: args.follow };
    let of_node = |what| match (args.guest, args.helper) {
        (None, None) => Ok(what),
        _ => Err(Failure::Usage("--guest and --helper go with VNET/NODE".into())),
    };
    let stream = match args.name.as_str() {
        "daemon" => client.logs(of_node(NodeProcess::Daemon)?, &query).await?,
        "mux" => client.logs(of_node(NodeProcess::Mux)?, &query).await?,
        name => {
            let node: NodeName = name
                .parse()
                .map_err(|_| Failure::Usage(format!("{name}: use daemon, mux or VNET/NODE")))?;
            let process = match (args.guest, args.helper) {
                (Some(number), _) => GuestProcess::Guest(number),
                (None, Some(Helper::Tap)) => GuestProcess::Tap,
                (None, Some(Helper::Mirror)) => GuestProcess::Mirror,
                (None, Some(Helper::Management)) => GuestProcess::Management,
                (None, None) => GuestProcess::Control,
            };
            client.node_logs(&node.vnet, &node.node, process, &query).await?
        }
    };
    copy(stream, io::stdout()).await
}

/// Writes a stream out as it comes; an interrupt ends it well.
async fn copy(mut stream: Stream, mut to: impl Write) -> Result<ExitCode, Failure> {
    until_interrupted(async {
        while let Some(bytes) = stream.next().await? {
            to.write_all(&bytes)?;
            to.flush()?;
        }
        Ok(ExitCode::SUCCESS)
    })
    .await
}

/// Does `work` until it ends or an interrupt (Ctrl-C) ends it well, wherever it waits. What listens is there
/// from start to end: an interrupt is not missed between two waits.
pub async fn until_interrupted(
    work: impl Future<Output = Result<ExitCode, Failure>>,
) -> Result<ExitCode, Failure> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        ended = work => ended,
        _ = interrupt.recv() => Ok(ExitCode::SUCCESS),
    }
}

pub async fn trace(client: &Client, args: Trace) -> Result<ExitCode, Failure> {
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
    fn a_trace_is_of_no_packet_that_a_kernel_sends_by_itself() {
        let program: pdp_wire::bpf::Program = NO_MULTICAST.parse().unwrap();
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
    async fn an_interrupt_between_two_waits_is_not_missed() {
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
