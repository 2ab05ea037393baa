//! The events that happen to the agent of the model.

use health_policy::PolicyName;
use proptest::prelude::*;

use super::super::policy;
use super::Repository;

/// Number of namespaces for endpoints.
const NAMESPACES: u16 = 4;

/// Label sets. The first is empty: nothing is known about the endpoint.
pub(super) const LABELS: [&str; 5] = ["", "app=a", "app=b", "app=a,zone=x", "zone=x"];

const POLICIES: usize = 5;

/// A request to the agent.
#[derive(Clone, Debug)]
pub(super) enum Change {
    /// Create an endpoint in a namespace, with a label set.
    Create(u16, usize),
    Relabel(u16, usize),
    Delete(u16),
    /// Import a policy in one of its variants.
    Import(usize, u8),
    DeletePolicy(usize),
}

impl Change {
    /// Identifies the object of the request.
    pub(super) fn object(&self) -> (bool, usize) {
        match self {
            Self::Create(n, _) | Self::Relabel(n, _) | Self::Delete(n) => (true, usize::from(*n)),
            Self::Import(policy, _) | Self::DeletePolicy(policy) => (false, *policy),
        }
    }
}

/// A temporary fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Fault {
    /// The identity store is unavailable.
    Store,
    /// The store gives no identities to new label sets.
    NoIdentity,
    /// Endpoint files cannot be written.
    Files,
    /// The policy file cannot be written.
    Rules,
    /// A step that changes devices fails.
    Device(&'static str),
    /// No program can be attached.
    Programs,
    /// There is space for only this many more table entries.
    Room(u8),
    /// No addresses can be written to the ipcache.
    Prefixes,
}

#[derive(Clone, Debug)]
pub(super) enum Step {
    Change(Change),
    /// Two concurrent requests.
    Pair(Change, Change),
    /// The agent is killed during a request, and the next agent is started.
    Killed(Change, u8),
    Kill,
    Fault(Fault, bool),
    /// The programs are removed from an endpoint's device.
    Detach(u16),
    /// An endpoint's device disappears.
    DeviceGone(u16),
    /// The store swaps the numbers of two label sets.
    Swap(usize, usize),
    /// The store forgets identities that nobody holds.
    Collect,
    Wait(u64),
    /// Nothing happens until the agent has finished all that it can.
    Settle,
}

/// Returns the document of a policy.
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
