//! The kernel's own conntrack and packet filter, to compare with.

use crate::bench::endpoint::output;

const TABLE: &str = "bench_ct";

/// Has the bench's namespace filter by exactly these chains of nftables, IPv4; with none, nf_conntrack rests.
pub(super) fn set_rules(chains: &str) -> anyhow::Result<()> {
    // The first line declares the table, so that there is one to delete.
    let rules =
        format!("table ip {TABLE}\ndelete table ip {TABLE}\ntable ip {TABLE} {{\n{chains}\n}}\n");
    output("nft", &[&rules], "nftables")?;
    Ok(())
}
