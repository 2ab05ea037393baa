//! Parses iperf3's JSON report.

use anyhow::Context as _;

/// Throughput at the receiver in Gbit/s.
pub(super) fn received_gigabits(json: &str) -> anyhow::Result<f64> {
    let result: serde_json::Value =
        serde_json::from_str(json).context("cannot parse the output of iperf3")?;
    let bits = result["end"]["sum_received"]["bits_per_second"].as_f64();
    Ok(bits.with_context(|| format!("iperf3 printed no throughput: {json}"))? / 1e9)
}
