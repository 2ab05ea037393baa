//! What happens to the agent of the model.

use health_policy::PolicyName;
use proptest::prelude::*;

use super::super::policy;
use super::Repository;

/// Namespaces that endpoints are made in.
const NAMESPACES: u16 = 4;

/// Sets of labels. With the first, nothing is known of an endpoint.
pub(super) const LABELS: [&str; 5] = ["", "app=a", "app=b", "app=a,zone=x", "zone=x"];

const POLICIES: usize = 5;

/// What is asked of the agent.
#[derive(Clone, Debug)]
pub(super) enum Change {
    /// An endpoint in a namespace, with a set of labels.
    Create(u16, usize),
    Relabel(u16, usize),
    Delete(u16),
    /// A policy, one way or another.
    Import(usize, u8),
    DeletePolicy(usize),
}

impl Change {
    /// What it is about.
    pub(super) fn object(&self) -> (bool, usize) {
        match self {
            Self::Create(n, _) | Self::Relabel(n, _) | Self::Delete(n) => (true, usize::from(*n)),
            Self::Import(policy, _) | Self::DeletePolicy(policy) => (false, *policy),
        }
    }
}

/// What fails for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Fault {
    /// The store of identities is away.
    Store,
    /// It has no identity for labels that have none.
    NoIdentity,
    /// Files of endpoints cannot be written.
    Files,
    /// The file of the policies cannot be written.
    Rules,
    /// A step with devices.
    Device(&'static str),
    /// No program can be attached.
    Programs,
    /// There is room for so many more entries of tables.
    Room(u8),
    /// No address can be written.
    Prefixes,
}

#[derive(Clone, Debug)]
pub(super) enum Step {
    Change(Change),
    /// Two at the same time.
    Pair(Change, Change),
    /// The agent is killed while it is at it, and the next one started.
    Killed(Change, u8),
    Kill,
    Fault(Fault, bool),
    /// Somebody takes the programs off an endpoint's device.
    Detach(u16),
    /// An endpoint's device goes.
    DeviceGone(u16),
    /// The store gives the numbers of two sets of labels to each other.
    Swap(usize, usize),
    /// The store forgets what nobody holds.
    Collect,
    Wait(u64),
    /// All is left alone until what can be done is done.
    Settle,
}

/// The text of a policy.
pub(in super::super) fn policy_text(number: usize, variant: u8) -> String {
    let port = 1000 + 100 * u16::from(variant);
    let name = format!("p{number}");
    match number {
        0 => policy(&name, "app=a", "app=b", port, 3),
        1 => policy(&name, "app=b", "zone=x", port, 12),
        2 => policy(&name, "zone=x", "app=a", port, 1),
        3 => format!(
            r#"[{{"labels": ["{name}"], "endpointSelector": {{"matchLabels": {{"app": "a"}}}},
                  "ingress": [{{"fromCIDR": ["198.51.{variant}.0/24"]}}]}}]"#
        ),
        _ => format!(
            r#"[{{"labels": ["{name}"], "endpointSelector": {{}},
                  "egress": [{{"toCIDR": ["198.51.{variant}.0/25", "2001:db8::/32"]}}]}}]"#
        ),
    }
}

pub(in super::super) fn policy_name(number: usize) -> PolicyName {
    let mut repository = Repository::default();
    let imported = repository.import(&policy_text(number, 0)).unwrap();
    imported.added[0].clone()
}

fn change() -> impl Strategy<Value = Change> {
    let n = || 0..NAMESPACES;
    let with = || 0..LABELS.len();
    let policy = || 0..POLICIES;
    prop_oneof![
        6 => (n(), with()).prop_map(|(n, with)| Change::Create(n, with)),
        4 => (n(), with()).prop_map(|(n, with)| Change::Relabel(n, with)),
        2 => n().prop_map(Change::Delete),
        5 => (policy(), 0_u8..3).prop_map(|(policy, variant)| Change::Import(policy, variant)),
        1 => policy().prop_map(Change::DeletePolicy),
    ]
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        3 => Just(Fault::Store),
        1 => Just(Fault::NoIdentity),
        1 => Just(Fault::Files),
        1 => Just(Fault::Rules),
        2 => prop::sample::select(vec!["create", "activate", "remove"]).prop_map(Fault::Device),
        2 => Just(Fault::Programs),
        3 => (0_u8..14).prop_map(Fault::Room),
        1 => Just(Fault::Prefixes),
    ]
}

pub(super) fn steps() -> impl Strategy<Value = Vec<Step>> {
    let n = || 0..NAMESPACES;
    let step = prop_oneof![
        12 => change().prop_map(Step::Change),
        4 => (change(), change()).prop_map(|(one, other)| Step::Pair(one, other)),
        2 => (change(), any::<u8>()).prop_map(|(change, yields)| Step::Killed(change, yields)),
        2 => Just(Step::Kill),
        5 => (fault(), any::<bool>()).prop_map(|(fault, is_on)| Step::Fault(fault, is_on)),
        1 => n().prop_map(Step::Detach),
        1 => n().prop_map(Step::DeviceGone),
        1 => (1..LABELS.len(), 1..LABELS.len()).prop_map(|(one, other)| Step::Swap(one, other)),
        1 => Just(Step::Collect),
        2 => (0_u64..2000).prop_map(Step::Wait),
        2 => Just(Step::Settle),
    ];
    prop::collection::vec(step, 1..24)
}
