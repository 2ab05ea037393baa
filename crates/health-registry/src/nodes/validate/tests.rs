use super::*;
use proptest::prelude::*;

fn node(name: &str, addresses: &[&str], pod_cidrs: &[&str], health: &[&str]) -> Entry<String> {
    let place = format!("key {name}");
    let written = |text: &&str| SourceText {
        text: (*text).to_owned(),
        place: place.clone(),
    };
    Entry {
        name: written(&name),
        cluster: None,
        addresses: addresses.iter().map(written).collect(),
        secondary_addresses: Vec::new(),
        pod_cidrs: pod_cidrs.iter().map(written).collect(),
        health_addresses: health.iter().map(written).collect(),
        labels: BTreeMap::new(),
        place,
    }
}

#[test]
fn networks_that_are_no_pods_are_refused_as_pod_cidrs() {
    for cidr in [
        "127.0.0.53/32",
        "0.0.0.0/0",
        "128.0.0.0/1",
        "169.254.169.254/32",
        "239.0.0.0/8",
        "::1/128",
        "fe80::/64",
        "ff00::/7",
    ] {
        let error = Claims::default().take(node("a", &["10.0.0.1"], &[cidr], &[]), "west");
        let problem = error.unwrap_err().problem;
        assert!(
            matches!(problem, Problem::SpecialCidr { .. }),
            "{cidr}: {problem}"
        );
    }
}

#[test]
fn one_address_is_one_however_it_is_written() {
    let mut claims = Claims::default();
    let first = node(
        "a",
        &["::ffff:10.0.0.1"],
        &["::ffff:10.1.0.0/120"],
        &["010.1.0.007"],
    );
    let taken = claims.take(first, "west").unwrap();
    assert_eq!(taken.addresses, ["10.0.0.1".parse::<IpAddr>().unwrap()]);
    assert_eq!(taken.pod_cidrs, ["10.1.0.0/24".parse::<IpNet>().unwrap()]);
    for address in [
        "010.0.0.1",
        "10.0.0.1",
        "::ffff:0a00:0001",
        "::ffff:127.0.0.1",
    ] {
        let second = node("b", &[address], &[], &[]);
        let is_taken = claims.take(second, "west").is_ok();
        assert_eq!(is_taken, address == "::ffff:127.0.0.1", "{address}");
    }
}

#[test]
fn a_refused_entry_is_reported_why_and_claims_nothing() {
    let mut claims = Claims::default();
    let first = node("a", &["10.0.0.1"], &["10.1.0.0/24"], &["10.1.0.7"]);
    claims.take(first, "west").unwrap();
    let long = "n".repeat(254);
    let many = vec!["10.0.0.9"; 65];
    for (entry, expected) in [
        (
            node("a", &["10.0.0.2"], &[], &[]),
            "node west/a is listed twice, first at key a",
        ),
        (
            node("b", &["10.0.0.2", "10.0.0.1"], &[], &[]),
            "address 10.0.0.1 is listed twice, first at key a as west/a",
        ),
        (
            node("b", &["10.0.0.2", "10.1.0.9"], &[], &[]),
            "address 10.1.0.9 of west/b lies in the pod CIDR 10.1.0.0/24 of west/a at key a",
        ),
        (
            node("b", &["10.0.0.2"], &["10.0.0.0/31"], &[]),
            "pod CIDR 10.0.0.0/31 of west/b contains the address 10.0.0.1 of west/a at key a",
        ),
        (
            node("b", &["10.0.0.2"], &["10.0.0.0/8"], &[]),
            "address 10.0.0.2 of west/b lies in the pod CIDR 10.0.0.0/8 of west/b at key b",
        ),
        (
            node("b", &["10.0.0.2"], &["10.1.0.0/16"], &[]),
            "pod CIDR 10.1.0.0/16 of west/b overlaps 10.1.0.0/24 of west/a at key a",
        ),
        (
            node("b", &["10.0.0.2"], &["10.1.0.128/25"], &[]),
            "pod CIDR 10.1.0.128/25 of west/b overlaps 10.1.0.0/24 of west/a at key a",
        ),
        (
            node("b", &["10.0.0.2"], &["10.2.0.0/24"], &["10.3.0.1"]),
            "health address 10.3.0.1 is in none of the pod CIDRs of west/b",
        ),
        (
            node(&long, &["10.0.0.2"], &[], &[]),
            "node name of 254 bytes is too long; at most 253 are allowed",
        ),
        (
            node("b", &many, &[], &[]),
            "node west/b has 65 addresses; at most 64 are allowed",
        ),
    ] {
        let refused = claims.take(entry, "west").unwrap_err();
        assert_eq!(refused.to_string(), expected);
    }
    let second = node("b", &["10.0.0.2"], &["10.2.0.0/24"], &["10.2.0.1"]);
    claims.take(second, "west").unwrap();
}

proptest! {
    #[test]
    fn what_was_taken_is_disjoint(
        entries in proptest::collection::vec((0..6_u8, 0..8_u8, 0..8_u8, 26..=32_u8), 1..20),
    ) {
        let mut claims = Claims::default();
        let mut taken: Vec<Node> = Vec::new();
        for (name, address, base, len) in entries {
            let cidr = IpNet::new(IpAddr::from([10, 0, 0, base * 4]), len).expect("a length");
            let entry = node(
                &format!("n{name}"),
                &[&format!("10.0.0.{}", address * 8)],
                &[&cidr.trunc().to_string()],
                &[],
            );
            taken.extend(claims.take(entry, "default"));
        }
        for (i, a) in taken.iter().enumerate() {
            for b in &taken[..i] {
                prop_assert_ne!(&a.name, &b.name);
                prop_assert_ne!(&a.addresses, &b.addresses);
                prop_assert!(!overlap(a.pod_cidrs[0], b.pod_cidrs[0]));
                prop_assert!(!a.pod_cidrs[0].contains(&b.addresses[0]));
                prop_assert!(!b.pod_cidrs[0].contains(&a.addresses[0]));
            }
        }
    }
}
