//! Results and reports, from hand-made input.

use std::collections::BTreeMap;

use health_model::api::Reachability;
use health_registry::nodes::Node;
use nix::errno::Errno;

use super::report::LISTED_RESULTS;
use super::*;
use crate::failure::IcmpError;
use crate::mesh_key::MeshKeys;
use crate::proof::KeyAge;
use crate::target::Target;

const SECOND: Duration = Duration::from_secs(1);

fn options() -> MeshOptions {
    MeshOptions {
        local: "default/a".to_owned(),
        local_addresses: Vec::new(),
        uplinks: Vec::new(),
        tuning: Tuning {
            intervals: ProbeIntervals::all(Duration::from_secs(10)),
            rate: 1000,
            timeout: SECOND,
            loss_threshold: 0.05,
            passive_relief: 1,
            path_mtu_interval: None,
        },
        passive_rtt: true,
        port: 4240,
        icmp_id: 1,
        session: 1,
        keys: MeshKeys::default(),
        one_way: false,
        hosts_only: None,
        state_dir: "/nonexistent".into(),
        full_maps: watch::channel(Vec::new()).1,
        policy_lag: watch::channel(None).1,
        problems: watch::channel(Vec::new()).1,
    }
}

/// Results of one node with three addresses, and its six targets.
fn results() -> (Results, Vec<TargetId>) {
    results_of(|_| true)
}

/// Results of the same node with only some of the targets.
fn results_of(is_probed: impl Fn(&TargetKey) -> bool) -> (Results, Vec<TargetId>) {
    let node = Node {
        name: "a".to_owned(),
        cluster: "default".to_owned(),
        addresses: vec!["fd00::1".parse().unwrap(), "10.0.0.1".parse().unwrap()],
        secondary_addresses: Vec::new(),
        pod_cidrs: Vec::new(),
        health_addresses: Vec::new(),
        labels: BTreeMap::new(),
    };
    let paths = NodePaths::new(&node, true, Some(&["10.1.0.7".parse().unwrap()]));
    let mut targets = Targets::default();
    let wanted = paths.targets().filter(|key| is_probed(key));
    let wanted = wanted.map(|key| Target { key, node: 0 });
    let ids = targets.replace(wanted).fresh;
    let set = NodeSet {
        nodes: vec![node],
        sources: Vec::new(),
    };
    let mut results = Results::new(&options());
    results.set_nodes(Arc::new(set), vec![paths], &targets, |interval| interval);
    (results, ids.into_iter().map(|(id, _)| id).collect())
}

fn at(second: u64) -> (Duration, Timestamp) {
    let probed = Timestamp::from_second(second as i64).unwrap();
    (Duration::from_secs(second), probed)
}

fn answered(results: &mut Results, id: TargetId, second: u64) {
    let (sent, probed) = at(second);
    let answer = Answer {
        rtt: Duration::from_micros(1),
        source: RttSource::Socket,
        http: None,
        key: KeyAge::Current,
    };
    results.note(id, sent, Some(answer.rtt), sent);
    results.answered(id, sent, probed, answer);
}

fn failed(results: &mut Results, id: TargetId, second: u64) {
    failed_by(results, id, second, Failure::TimedOut);
}

fn failed_by(results: &mut Results, id: TargetId, second: u64, failure: Failure) {
    let (sent, probed) = at(second);
    results.note(id, sent, None, sent);
    let unanswered = ConfirmedFailure {
        failure,
        probes: 5,
        since: sent,
    };
    results.unreachable(id, sent, probed, unanswered);
}

#[test]
fn the_list_of_nodes_names_addresses_that_are_not_probed() {
    let not_probed = |results: Results| results.node_list().nodes[0].not_probed.clone();
    assert_eq!(not_probed(results().0), Vec::<IpAddr>::new());
    let ipv4 = IpAddr::from([10, 0, 0, 1]);
    let by_icmp = |key: &TargetKey| key.address == ipv4 && key.protocol == Protocol::Icmp;
    let expected = ["fd00::1", "10.1.0.7"].map(|ip| ip.parse::<IpAddr>().unwrap());
    assert_eq!(not_probed(results_of(by_icmp).0), expected);
}

#[test]
fn a_report_says_what_is_known_and_no_more() {
    let (mut results, ids) = results();
    let report = results.report(SECOND);
    assert_eq!(report.timestamp, None);
    assert_eq!(report.probe_interval, "10s");
    assert_eq!(report.configured_interval, None);
    assert_eq!(report.nodes[0].reachability(), Reachability::Unknown);
    let primary = &report.nodes[0].host.primary_address;
    assert_eq!(primary.ip, IpAddr::from([10, 0, 0, 1]));
    assert_eq!(report.nodes[0].host.secondary_addresses.len(), 1);

    assert_eq!(ids.len(), 6);
    for (second, &id) in ids.iter().enumerate() {
        answered(&mut results, id, second as u64);
    }
    let report = results.report(SECOND * 9);
    assert_eq!(report.nodes[0].reachability(), Reachability::Reachable);
    assert_eq!(report.timestamp, Timestamp::from_second(5).ok());
    assert_eq!(report.nodes[0].diagnosis, None);
    results.remove(ids[0]);
    assert_eq!(
        results.report(SECOND * 9).nodes[0].reachability(),
        Reachability::Unknown
    );
}

#[test]
fn a_diagnosis_waits_until_all_targets_were_probed_since_the_failure() {
    let (mut results, ids) = results();
    let cause = |results: &Results, now: u64| {
        let diagnosis = results.report(SECOND * now as u32).nodes[0]
            .diagnosis
            .clone();
        diagnosis.map(|diagnosis| diagnosis.cause)
    };
    for &id in &ids {
        answered(&mut results, id, 1);
    }
    failed(&mut results, ids[0], 10);
    assert_eq!(cause(&results, 10), None);
    for &id in &ids[1..5] {
        answered(&mut results, id, 10);
    }
    assert_eq!(cause(&results, 11), None);
    answered(&mut results, ids[5], 10);
    assert!(cause(&results, 11).is_some());

    // A later failure makes all other results outdated, but a diagnosis does not wait for new ones forever.
    failed(&mut results, ids[1], 12);
    assert_eq!(cause(&results, 13), None);
    assert!(cause(&results, 14).is_some());

    // The end of a failure is a change just like its start.
    answered(&mut results, ids[1], 20);
    assert_eq!(cause(&results, 20), None);
    for &id in &ids[2..] {
        answered(&mut results, id, 20);
    }
    failed(&mut results, ids[0], 20);
    assert!(cause(&results, 20).is_some());
}

#[test]
fn a_diagnosis_stands_until_a_verdict_changes() {
    let (mut results, ids) = results();
    let fail_all = |results: &mut Results, second, failure: Failure| {
        for &id in &ids {
            failed_by(results, id, second, failure.clone());
        }
    };
    let diagnosis = |results: &Results, second: u64| {
        let mut report = results.report(SECOND * second as u32);
        report.nodes.remove(0).diagnosis.unwrap()
    };
    fail_all(&mut results, 1, Failure::TimedOut);
    let silent = diagnosis(&results, 1);
    fail_all(&mut results, 11, Failure::TimedOut);
    assert_eq!(silent, diagnosis(&results, 11));
    fail_all(&mut results, 21, Failure::Os(Errno::ENETUNREACH));
    let no_route = diagnosis(&results, 21);
    assert_eq!(no_route.cause, "no-route");
    assert!(no_route.evidence[0].ends_with("Network is unreachable"));
}

#[test]
fn an_icmp_error_is_reported_for_a_while_though_silence_follows() {
    let (mut results, ids) = results();
    let fail = |results: &mut Results, second: u64, failure: Failure| {
        failed_by(results, ids[0], second, failure);
        let result = results.known[ids[0]].result.as_ref().unwrap();
        result.outcome.as_ref().unwrap_err().failure.clone()
    };
    let prohibited = Failure::Icmp(IcmpError {
        kind: 3,
        code: 13,
        from: IpAddr::from([10, 0, 0, 9]),
    });
    let refused = Failure::Os(Errno::ECONNREFUSED);
    let silence = Failure::TimedOut;
    assert_eq!(fail(&mut results, 1, prohibited.clone()), prohibited);
    assert_eq!(fail(&mut results, 3, silence.clone()), prohibited);
    assert_eq!(fail(&mut results, 10, silence.clone()), prohibited);
    assert_eq!(fail(&mut results, 11, silence.clone()), silence);
    assert_eq!(fail(&mut results, 12, prohibited.clone()), prohibited);
    assert_eq!(fail(&mut results, 13, refused.clone()), refused);
    assert_eq!(fail(&mut results, 14, silence.clone()), silence);
}

#[test]
fn the_result_of_a_later_probe_stands() {
    let (mut results, ids) = results();
    answered(&mut results, ids[0], 7);
    failed(&mut results, ids[0], 6);
    assert_eq!(results.is_reachable(ids[0]), Some(true));
    failed(&mut results, ids[0], 8);
    assert_eq!(results.is_reachable(ids[0]), Some(false));
}

#[test]
fn the_last_change_is_that_of_the_verdict() {
    let (mut results, ids) = results();
    let changed = |results: &Results| {
        let result = results.known[ids[0]].result.as_ref().unwrap();
        result.changed_at.as_secs()
    };
    for (second, ok, since) in [(1, true, 1), (2, true, 1), (3, false, 3), (4, false, 3)] {
        if ok {
            answered(&mut results, ids[0], second);
        } else {
            failed(&mut results, ids[0], second);
        }
        assert_eq!(changed(&results), since);
    }
    answered(&mut results, ids[0], 5);
    assert_eq!(changed(&results), 5);
}

#[test]
fn lasting_loss_degrades_a_target_that_answers() {
    let (mut results, ids) = results();
    for (second, &id) in (1..).zip(ids.iter().cycle()).take(1200) {
        answered(&mut results, id, second);
    }
    // Every third probe of one target.
    for second in 1201..1300 {
        if second % 3 == 0 {
            let (sent, _) = at(second);
            results.note(ids[0], sent, None, sent);
        } else {
            answered(&mut results, ids[0], second);
        }
    }
    let report = results.report(SECOND * 1300);
    let node = &report.nodes[0];
    assert_eq!(node.reachability(), Reachability::Degraded);
    let degraded = node.host.primary_address.icmp.as_ref().unwrap();
    let reason = degraded.degraded.as_deref().unwrap_or_default();
    assert!(reason.starts_with("lost "), "{reason}");
    assert_eq!(node.diagnosis.as_ref().unwrap().cause, "loss");
    let history = results.history(Some("default/a"), SECOND * 1300);
    assert_eq!(history.len(), 6);
    assert!(history[0].windows[0].lost >= 15, "{:?}", history[0]);
    assert_eq!(history[0].last_results_ns.len(), LISTED_RESULTS);
    assert!(results.history(Some("default/b"), SECOND).is_empty());
}

#[test]
fn a_latency_shift_is_reported_while_it_lasts_and_for_an_hour() {
    let (mut results, ids) = results();
    let trip = |results: &mut Results, second: u64, ms: u64| {
        for &id in &ids {
            let (sent, probed) = at(second);
            let answer = Answer {
                rtt: Duration::from_millis(if id == ids[0] { ms } else { 1 }),
                source: RttSource::Kernel,
                http: None,
                key: KeyAge::Current,
            };
            results.note(id, sent, Some(answer.rtt), sent);
            results.answered(id, sent, probed, answer);
        }
        let report = results.report(SECOND * second as u32);
        report.nodes[0]
            .diagnosis
            .clone()
            .map(|reported| reported.cause)
    };
    let mut run = |seconds: std::ops::Range<u64>, ms| {
        let causes = seconds
            .step_by(10)
            .map(|second| trip(&mut results, second, ms));
        causes.collect::<Vec<_>>()
    };
    let shift = Some("latency-shift".to_owned());
    assert!(run(0..400, 1).iter().all(Option::is_none));
    let causes = run(400..4000, 30);
    assert_eq!(causes[8..], vec![shift.clone(); causes.len() - 8]);
    // After an hour, the new state is the usual one.
    assert_eq!(run(4000..4200, 30).last(), Some(&None));
    assert_eq!(run(4200..4300, 90).last(), Some(&shift));
    assert_eq!(run(4300..4350, 30).last(), Some(&None));
}
