//! Results of iperf3.

use anyhow::{Context, Result};

/// TCP throughput, measured by iperf3's client.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TcpResult {
    /// Bits per second that the server received.
    pub received_bps: f64,
    /// Segments that the client sent again.
    pub retransmits: u64,
}

impl TcpResult {
    /// Parses the output of `iperf3 --client ADDRESS --json`.
    pub fn parse(text: &str) -> Result<Self> {
        let result: serde_json::Value = serde_json::from_str(text).context("iperf3 --json")?;
        let end = &result["end"];
        let received_bps = end["sum_received"]["bits_per_second"].as_f64();
        let retransmits = end["sum_sent"]["retransmits"].as_u64().unwrap_or(0);
        Ok(Self { received_bps: received_bps.context("iperf3 has no result")?, retransmits })
    }
}
