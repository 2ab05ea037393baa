//! `health-agent path-mtu`: the path MTUs to other nodes.

use std::time::{Duration, Instant};

use clap::Args;
use health_api::client::Client;
use health_model::api::{LargerPackets, NodeList, PathMtuEntry, PathMtuStatus};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use super::node;
use super::output::{NONE, OutputArgs, table};

/// Pause before asking the agent again for missing results.
const PAUSE: Duration = Duration::from_millis(500);
/// How long to keep asking while no path completes. A single path takes up to half a minute with the default timeout.
const PATIENCE: Duration = Duration::from_secs(600);

const EXAMPLES: &str = "\
Packets are echo requests that must not be fragmented: a small one, one as large as the device or
the route of this host allows, and if that is not answered, sizes in between. A path that rejects
or loses large packets is probed twice, which takes up to half a minute.

The agent also does this once per --path-mtu-interval; `health-agent status` reports problems, and
with --verbose the last results.

Examples:
  health-agent path-mtu
  health-agent path-mtu host2
  health-agent path-mtu -o json | jq '.[] | select(.pathMtu.larger == \"vanish\")'";

/// Flags of `path-mtu`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct PathMtuArgs {
    /// Only paths to this node, `cluster/name` or a name that only one cluster has
    #[arg(value_name = "NODE")]
    node: Option<String>,
    #[command(flatten)]
    output: OutputArgs,
}

impl PathMtuArgs {
    pub(super) async fn execute(self, client: &Client) -> anyhow::Result<()> {
        let mut path = "/v1beta/status/path-mtu".to_owned();
        if let Some(wanted) = &self.node {
            let list: NodeList = client.get("/v1/nodes").await?;
            let name = node::find(wanted, list.nodes.iter().map(|node| &node.name))?;
            path += &format!("?node={}", utf8_percent_encode(&name, NON_ALPHANUMERIC));
        }
        let mut paths: Vec<PathMtuEntry> = client.put(&path).await?;
        let mut last = (0, Instant::now());
        loop {
            let probing = paths.iter().filter(|path| path.probing).count();
            if probing != last.0 {
                last = (probing, Instant::now());
            } else if probing > 0 && last.1.elapsed() >= PATIENCE {
                eprintln!("warning: {probing} paths are still being probed");
                break;
            }
            if probing == 0 {
                break;
            }
            tokio::time::sleep(PAUSE).await;
            paths = client.get(&path).await?;
        }
        self.output.output.print_rows(&paths, paths_table)
    }
}

fn paths_table(paths: &[PathMtuEntry]) -> String {
    let rows = paths.iter().map(|path| {
        let seen = path.path_mtu.as_ref();
        let cell = |text: fn(&PathMtuStatus) -> String| seen.map_or_else(|| NONE.to_owned(), text);
        [
            path.node.clone(),
            path.ip.to_string(),
            cell(|seen| seen.device.clone()),
            cell(|seen| seen.local_mtu.to_string()),
            seen.map_or_else(|| "unknown".to_owned(), |seen| seen.mtu.to_string()),
            cell(larger),
            cell(|seen| format!("{:.0}", seen.last_probed)),
        ]
    });
    let header = [
        "NODE",
        "ADDRESS",
        "DEVICE",
        "LOCAL MTU",
        "PATH MTU",
        "LARGER PACKETS",
        "PROBED",
    ];
    table(header, rows)
}

/// What happens to packets larger than the path MTU.
pub(super) fn larger(seen: &PathMtuStatus) -> String {
    match (seen.larger, seen.rejected_by) {
        (LargerPackets::None, _) => NONE.to_owned(),
        (LargerPackets::Rejected, Some(router)) => format!("rejected by {router}"),
        (LargerPackets::Rejected, None) => "rejected".to_owned(),
        (LargerPackets::Vanish, _) => "vanish".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str, ip: &str, path_mtu: Option<PathMtuStatus>) -> PathMtuEntry {
        PathMtuEntry {
            node: format!("default/{name}"),
            ip: ip.parse().unwrap(),
            probing: false,
            path_mtu,
        }
    }

    fn seen(mtu: u32, larger: LargerPackets) -> Option<PathMtuStatus> {
        Some(PathMtuStatus {
            mtu,
            local_mtu: 1500,
            device: "eth0".into(),
            larger,
            rejected_by: (larger == LargerPackets::Rejected).then(|| "10.0.0.9".parse().unwrap()),
            last_probed: "2026-11-21T03:00:00.7Z".parse().unwrap(),
        })
    }

    #[test]
    fn each_path_takes_a_line() {
        let paths = [
            path("a", "10.0.0.1", seen(1500, LargerPackets::None)),
            path("b", "10.0.0.2", seen(1400, LargerPackets::Rejected)),
            path("c", "fd00::3", seen(1404, LargerPackets::Vanish)),
            path("d", "10.0.0.4", None),
        ];
        assert_eq!(
            paths_table(&paths),
            "\
NODE        ADDRESS    DEVICE   LOCAL MTU   PATH MTU   LARGER PACKETS         PROBED
default/a   10.0.0.1   eth0     1500        1500       -                      2026-11-21T03:00:00Z
default/b   10.0.0.2   eth0     1500        1400       rejected by 10.0.0.9   2026-11-21T03:00:00Z
default/c   fd00::3    eth0     1500        1404       vanish                 2026-11-21T03:00:00Z
default/d   10.0.0.4   -        -           unknown    -                      -
"
        );
    }
}
