//! The kernel's own conntrack and packet filter, for comparison.

use crate::bench::endpoint::output;

const TABLE: &str = "bench_ct";

/// Replaces the IPv4 nftables chains of the benchmark's namespace with these. Without chains, nf_conntrack is inactive.
pub(super) fn set_rules(chains: &str) -> anyhow::Result<()> {
    // The first line declares the table, so that the second one can delete it.
    let rules =
        format!("table ip {TABLE}\ndelete table ip {TABLE}\ntable ip {TABLE} {{\n{chains}\n}}\n");
    output("nft", &[&rules], "nftables")?;
    Ok(())
}
