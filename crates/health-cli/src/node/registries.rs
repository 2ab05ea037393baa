//! The state of the node registries, and their unusable entries.

use health_model::api::RegistryState;
use health_model::duration::go_duration;
use jiff::{SignedDuration, Timestamp};

use super::super::output::{NONE, printable, table};

/// Formats one line per registry, followed by one line per rejected entry.
pub(super) fn text(registries: &[RegistryState], now: Timestamp) -> String {
    let rows = registries.iter().map(|state| {
        [
            state.registry.clone(),
            state.cluster.clone(),
            if is_stale(state) { "stale" } else { "ok" }.to_owned(),
            age(state.last_read, now),
            state.rejected.len().to_string(),
            state.stale.clone().unwrap_or_else(|| NONE.to_owned()),
        ]
    });
    let header = ["REGISTRY", "CLUSTER", "STATE", "AGE", "LEFT OUT", "REASON"];
    let mut text = table(header, rows);
    let rejected: Vec<[String; 3]> = registries
        .iter()
        .flat_map(|state| {
            state.rejected.iter().map(|entry| {
                [
                    entry.key.clone(),
                    state.registry.clone(),
                    entry.reason.clone(),
                ]
            })
        })
        .collect();
    if !rejected.is_empty() {
        text.push('\n');
        text += &table(["LEFT OUT", "REGISTRY", "REASON"], rejected);
    }
    text
}

/// Warns on stderr if a listing of nodes is outdated or incomplete.
pub(super) fn warn(registries: &[RegistryState], now: Timestamp) {
    for warning in registries.iter().flat_map(|state| warnings(state, now)) {
        eprintln!("warning: {}", printable(&warning));
    }
}

/// Why the nodes of a registry are outdated or incomplete, one sentence per reason.
fn warnings(state: &RegistryState, now: Timestamp) -> impl Iterator<Item = String> {
    let rejected = state.rejected.iter().map(|entry| {
        let registry = &state.registry;
        format!("{} of {registry} is left out: {}", entry.key, entry.reason)
    });
    stale_warning(state, now).into_iter().chain(rejected)
}

/// How old a stale registry's data is, and why.
pub(super) fn stale_warning(state: &RegistryState, now: Timestamp) -> Option<String> {
    let registry = &state.registry;
    let reason = state.stale.as_deref().unwrap_or("it cannot be read");
    let age = age(state.last_read, now);
    is_stale(state).then(|| format!("the data of {registry} is {age} old: {reason}"))
}

fn is_stale(state: &RegistryState) -> bool {
    state.stale.is_some() || state.stale_since.is_some()
}

/// Formats the age in whole seconds.
pub(crate) fn age(since: Timestamp, now: Timestamp) -> String {
    let age = now.duration_since(since).max(SignedDuration::ZERO);
    go_duration(age.as_secs().saturating_mul(1_000_000_000))
}

#[cfg(test)]
mod tests {
    use health_model::api::RejectedEntry;

    use super::*;

    fn registries() -> [RegistryState; 2] {
        [
            RegistryState {
                registry: "file:/etc/nodes.yaml".into(),
                cluster: "default".into(),
                last_read: "2026-11-21T03:00:00Z".parse().unwrap(),
                stale: Some("nodes.yaml:3:5: unknown field".into()),
                stale_since: Some("2026-11-21T03:00:00Z".parse().unwrap()),
                rejected: vec![],
            },
            RegistryState {
                registry: "etcd:http://192.0.2.1:2379".into(),
                cluster: "west".into(),
                last_read: "2026-11-21T03:01:28Z".parse().unwrap(),
                stale: None,
                stale_since: None,
                rejected: vec![RejectedEntry {
                    key: "nodes/west/host9".into(),
                    reason: "no address".into(),
                }],
            },
        ]
    }

    fn now() -> Timestamp {
        "2026-11-21T03:01:30.5Z".parse().unwrap()
    }

    #[test]
    fn registries_show_their_age_and_what_is_left_out() {
        assert_eq!(
            text(&registries(), now()),
            "\
REGISTRY                     CLUSTER   STATE   AGE     LEFT OUT   REASON
file:/etc/nodes.yaml         default   stale   1m30s   0          nodes.yaml:3:5: unknown field
etcd:http://192.0.2.1:2379   west      ok      2s      1          -

LEFT OUT           REGISTRY                     REASON
nodes/west/host9   etcd:http://192.0.2.1:2379   no address
"
        );
        let [file, _] = registries();
        assert_eq!(text(&[file], now()).lines().count(), 2);
    }

    #[test]
    fn warnings_name_registry_age_and_reason() {
        let warnings: Vec<String> = registries()
            .iter()
            .flat_map(|state| warnings(state, now()))
            .collect();
        assert_eq!(
            warnings,
            [
                "the data of file:/etc/nodes.yaml is 1m30s old: nodes.yaml:3:5: unknown field",
                "nodes/west/host9 of etcd:http://192.0.2.1:2379 is left out: no address",
            ]
        );
        let [file, _] = registries();
        let clock_set_back = "2026-11-21T02:00:00Z".parse().unwrap();
        let warning = stale_warning(&file, clock_set_back).expect("it is stale");
        assert!(warning.contains(" is 0s old: "), "{warning}");
    }
}
