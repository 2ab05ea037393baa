//! `health-agent bpf prog`: the pinned programs.

use std::path::PathBuf;

use clap::Subcommand;
use health_datapath::dump::{Pinned, ProgInfo};
use serde::Serialize;

use crate::output::{OutputArgs, comma_separated, table};

const EXAMPLES: &str = "\
Examples:
  health-agent bpf prog list
  health-agent bpf prog list -o json";

/// Commands of `bpf prog`.
#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub enum ProgCommand {
    /// List the programs and where they are attached
    #[command(after_help = EXAMPLES)]
    List(OutputArgs),
}

impl ProgCommand {
    pub(super) fn execute(self, pinned: &Pinned) -> anyhow::Result<()> {
        let Self::List(args) = self;
        let mut rows: Vec<ProgRow> = pinned.programs()?.into_iter().map(ProgRow::from).collect();
        rows.sort_by(|a, b| a.name.cmp(&b.name));
        args.output.print_rows(&rows, programs_table)
    }
}

/// A program as JSON.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct ProgRow {
    name: String,
    id: u32,
    tag: String,
    attached: Vec<String>,
    jited_bytes: u32,
    verified_instructions: u32,
    memory_bytes: u64,
    pin: PathBuf,
}

impl From<ProgInfo> for ProgRow {
    fn from(info: ProgInfo) -> Self {
        Self {
            name: info.name,
            id: info.id,
            tag: info.tag,
            attached: info.attached,
            jited_bytes: info.jited_bytes,
            verified_instructions: info.verified_instructions,
            memory_bytes: info.memory_bytes,
            pin: info.pin,
        }
    }
}

fn programs_table(rows: &[ProgRow]) -> String {
    let rows = rows.iter().map(|row| {
        [
            row.name.clone(),
            row.id.to_string(),
            row.tag.clone(),
            comma_separated(&row.attached),
            row.jited_bytes.to_string(),
            row.verified_instructions.to_string(),
            row.memory_bytes.to_string(),
        ]
    });
    table(
        [
            "NAME",
            "ID",
            "TAG",
            "ATTACHED",
            "JITED BYTES",
            "VERIFIED INSNS",
            "MEMORY BYTES",
        ],
        rows,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attachments_are_listed() {
        let prog = |name: &str, attached: &[&str]| {
            ProgRow::from(ProgInfo {
                name: name.into(),
                id: 41,
                tag: "a04f5eef06a7f555".into(),
                attached: attached.iter().map(|&at| at.to_owned()).collect(),
                jited_bytes: 2048,
                verified_instructions: 900,
                memory_bytes: 4096,
                pin: "/sys/fs/bpf/health/default/programs".into(),
            })
        };
        let rows = [
            prog("rtt_account", &[]),
            prog("to_netdev", &["eth0/egress", "eth1/egress"]),
        ];
        assert_eq!(
            programs_table(&rows),
            "\
NAME          ID   TAG                ATTACHED                  JITED BYTES   VERIFIED INSNS   MEMORY BYTES
rtt_account   41   a04f5eef06a7f555   -                         2048          900              4096
to_netdev     41   a04f5eef06a7f555   eth0/egress,eth1/egress   2048          900              4096
"
        );
    }
}
