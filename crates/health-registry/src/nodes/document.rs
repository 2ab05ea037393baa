//! Parses and validates the YAML document of the node registry. Does no file access.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde_saphyr::{Location, MessageFormatter as _, Spanned, UserMessageFormatter};

use super::Node;
use super::validate::{self, Claims, Entry, SourceText};

/// Why a document is refused, and where the problem is.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// The document contains only white space and comments.
    #[error("it is empty; expected a `nodes` list with at least one node")]
    Empty,
    /// Something in the document is wrong.
    #[error("{place}: {problem}")]
    At {
        /// Where the problem is.
        place: Place,
        /// The problem.
        problem: Problem,
    },
    /// Something in the document is wrong, but the parser does not know where.
    #[error("{0}")]
    Somewhere(Problem),
}

/// A problem with a document.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// Not YAML, or not the fields of a registry.
    #[error("{0}")]
    Malformed(String),
    /// The list is empty.
    #[error("`nodes` is empty")]
    NoNodes,
    /// An entry cannot be used.
    #[error(transparent)]
    Entry(#[from] validate::Problem<Place>),
}

/// A place in the document, for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    line: u64,
    column: u64,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}", self.line, self.column)
    }
}

impl From<Location> for Place {
    fn from(location: Location) -> Self {
        Self {
            line: location.line(),
            column: location.column(),
        }
    }
}

impl Place {
    fn error(self, problem: Problem) -> DocumentError {
        DocumentError::At {
            place: self,
            problem,
        }
    }
}

impl From<validate::RefusedEntry<Place>> for DocumentError {
    fn from(refused: validate::RefusedEntry<Place>) -> Self {
        refused.place.error(refused.problem.into())
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    nodes: Spanned<Vec<Spanned<DocumentEntry>>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DocumentEntry {
    name: Spanned<String>,
    #[serde(default)]
    cluster: Option<Spanned<String>>,
    #[serde(default)]
    addresses: Vec<Spanned<String>>,
    #[serde(rename = "podCIDRs", default)]
    pod_cidrs: Vec<Spanned<String>>,
    #[serde(rename = "healthAddresses", default)]
    health_addresses: Vec<Spanned<String>>,
    #[serde(rename = "secondaryAddresses", default)]
    secondary_addresses: Vec<Spanned<String>>,
}

/// Maximum number of YAML nodes in a registry. A cluster node takes up to 30 YAML nodes, so there is space for 100 000
/// cluster nodes.
const YAML_NODES: usize = 3_000_000;

/// Parses a registry. Nodes without a cluster belong to `default_cluster`. The result is sorted by full name.
///
/// The result satisfies the guarantees of [`Node`]: each node has an address, and no two nodes share a name, address or
/// pod CIDR.
pub fn parse(text: &str, default_cluster: &str) -> Result<Vec<Node>, DocumentError> {
    let blank = |line: &str| line.trim_start().is_empty() || line.trim_start().starts_with('#');
    if text.lines().all(blank) {
        return Err(DocumentError::Empty);
    }
    let limits = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_nodes: YAML_NODES,
            max_events: 2 * YAML_NODES,
        },
        // By default, more than 32 consecutive comment lines are an error.
        emit_comments: false,
    };
    let document: Document =
        serde_saphyr::from_str_with_options(text, limits).map_err(malformed)?;
    if document.nodes.value.is_empty() {
        return Err(Place::from(document.nodes.referenced).error(Problem::NoNodes));
    }

    let mut claims = Claims::default();
    let mut nodes = Vec::with_capacity(document.nodes.value.len());
    for entry in document.nodes.value {
        nodes.push(claims.take(entry.into(), default_cluster)?);
    }
    nodes.sort_by(|a, b| (&a.cluster, &a.name).cmp(&(&b.cluster, &b.name)));
    Ok(nodes)
}

fn malformed(error: serde_saphyr::Error) -> DocumentError {
    let error = error.without_snippet();
    let problem = Problem::Malformed(UserMessageFormatter.format_message(error).into_owned());
    match error.location().map(Place::from) {
        Some(place) if place.line > 0 => place.error(problem),
        _ => DocumentError::Somewhere(problem),
    }
}

impl From<Spanned<DocumentEntry>> for Entry<Place> {
    fn from(entry: Spanned<DocumentEntry>) -> Self {
        let all = |list: Vec<Spanned<String>>| list.into_iter().map(SourceText::from).collect();
        let place = Place::from(entry.referenced);
        let entry = entry.value;
        Self {
            place,
            name: entry.name.into(),
            cluster: entry.cluster.map(SourceText::from),
            addresses: all(entry.addresses),
            secondary_addresses: all(entry.secondary_addresses),
            pod_cidrs: all(entry.pod_cidrs),
            health_addresses: all(entry.health_addresses),
            labels: BTreeMap::new(),
        }
    }
}

impl From<Spanned<String>> for SourceText<Place> {
    fn from(written: Spanned<String>) -> Self {
        Self {
            place: written.referenced.into(),
            text: written.value,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    #[test]
    fn comments_may_be_long() {
        let comments = "# a comment\n".repeat(100);
        let node = |name: &str, address: &str| {
            format!("{comments}- name: {name}\n{comments}  addresses: [{address}]\n")
        };
        let text = format!(
            "{comments}nodes:\n{}{}{comments}",
            node("a", "192.0.2.1"),
            node("b", "192.0.2.2")
        );
        assert_eq!(parse(&text, "default").unwrap().len(), 2);
    }

    #[test]
    fn a_full_document_is_read() {
        let nodes = parse(
            r#"
nodes:
  - name: hnode2
    addresses: [172.30.0.2]
    podCIDRs: [10.244.2.0/24]
  - name: hnode1
    cluster: other
    addresses: [172.30.0.1, "fd00:30::1"]
    podCIDRs: [10.244.1.0/24, "fd00:10:244:1::/64"]
    healthAddresses: [10.244.1.7]
    secondaryAddresses: [192.168.0.1]
"#,
            "default",
        )
        .unwrap();
        let names: Vec<_> = nodes.iter().map(Node::full_name).collect();
        assert_eq!(names, ["default/hnode2", "other/hnode1"]);
        assert_eq!(nodes[1].addresses.len(), 2);
        assert_eq!(nodes[1].pod_cidrs[1], "fd00:10:244:1::/64".parse().unwrap());
        assert_eq!(
            nodes[1].health_addresses,
            ["10.244.1.7".parse::<IpAddr>().unwrap()]
        );
        assert_eq!(
            nodes[1].secondary_addresses,
            ["192.168.0.1".parse::<IpAddr>().unwrap()]
        );
    }

    #[test]
    fn each_problem_is_named_with_its_place() {
        for (text, expected) in [
            (
                "",
                "it is empty; expected a `nodes` list with at least one node",
            ),
            (
                "# nothing\n\n",
                "it is empty; expected a `nodes` list with at least one node",
            ),
            ("nodes: []", "line 1, column 8: `nodes` is empty"),
            (
                "nodes:\n- name: a\n  addresses: [10.0.0.1\n",
                "line 3, column 14: ",
            ),
            (
                "nodes:\n- name: a\n  address: [10.0.0.1]\n",
                "line 3, column 3: unknown field `address`",
            ),
            (
                "nodes:\n- addresses: [10.0.0.1]\n",
                "line 2, column 3: missing field `name`",
            ),
            (
                "nodes:\n- name: a/b\n",
                "line 2, column 9: node name \"a/b\" must not",
            ),
            (
                "nodes:\n- name: a\n",
                "line 2, column 3: node default/a has no address",
            ),
            (
                "nodes:\n- {name: a, addresses: [10.0.0.1]}\n- {name: a, addresses: [10.0.0.2]}",
                "line 3, column 10: node default/a is listed twice, first at line 2, column 10",
            ),
            (
                "nodes:\n- {name: a, addresses: [10.0.0.1]}\n- {name: b, addresses: [10.0.0.1]}",
                "line 3, column 25: address 10.0.0.1 is listed twice, first at line 2, column 25 \
                 as default/a",
            ),
            (
                "nodes:\n- {name: a, addresses: [10.0.0.1], secondaryAddresses: [10.0.0.1]}",
                "line 2, column 57: address 10.0.0.1 is listed twice",
            ),
            (
                "nodes:\n- {name: a, addresses: [10.0.0.256]}",
                "line 2, column 25: \"10.0.0.256\" is not an IP address",
            ),
            (
                "nodes:\n- {name: a, addresses: [224.0.0.1]}",
                "line 2, column 25: 224.0.0.1 is not a unicast address",
            ),
            (
                "nodes:\n- {name: a, addresses: [10.0.0.1], podCIDRs: [10.1.0.0/33]}",
                "line 2, column 47: \"10.1.0.0/33\" is not a CIDR",
            ),
            (
                "nodes:\n- {name: a, addresses: [10.0.0.1], podCIDRs: [10.1.0.1/24]}",
                "line 2, column 47: CIDR 10.1.0.1/24 has host bits set; write 10.1.0.0/24",
            ),
            (
                "nodes:\n- {name: a, addresses: [10.0.0.1], podCIDRs: [10.1.0.0/24], \
                 healthAddresses: [10.1.1.1]}",
                "line 2, column 79: health address 10.1.1.1 is in none of the pod CIDRs",
            ),
            (
                "nodes:\n- {name: a, addresses: [10.0.0.1], podCIDRs: [10.1.0.0/16]}\n\
                 - {name: b, addresses: [10.0.0.2], podCIDRs: [10.2.0.0/16, 10.1.3.0/24]}",
                "line 3, column 60: pod CIDR 10.1.3.0/24 of default/b overlaps 10.1.0.0/16 of \
                 default/a at line 2, column 47",
            ),
            (
                "nodes:\n- {name: a, addresses: [10.0.0.1], podCIDRs: [10.0.0.0/24]}",
                "line 2, column 25: address 10.0.0.1 of default/a lies in the pod CIDR",
            ),
        ] {
            let error = parse(text, "default").unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error:?} for {text:?}");
            assert_eq!(error.lines().count(), 1, "{error:?}");
        }
    }

    #[test]
    fn thirty_thousand_nodes_fit() {
        let mut text = "nodes:\n".to_owned();
        for i in 0..30_000_u32 {
            let (high, low) = (i >> 8, i & 255);
            text.push_str(&format!(
                "- name: n{i}\n  addresses: [172.16.{high}.{low}, \"fd00:30::{i:x}\"]\n  \
                 podCIDRs: [10.{high}.{low}.0/24, \"fd00:10:{i:x}::/64\"]\n"
            ));
        }
        assert_eq!(parse(&text, "default").unwrap().len(), 30_000);
    }
}
