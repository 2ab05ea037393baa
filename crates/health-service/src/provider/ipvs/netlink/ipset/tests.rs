use health_model::ipam::Family;
use health_model::policy::Protocol;
use netlink_packet_core::NetlinkSerializable as _;
use nix::sched::{CloneFlags, unshare};
use proptest::prelude::*;

use super::message::{edit, read_entries, read_index};
use super::*;

fn entries(family: Family, kind: SetType) -> Vec<Entry> {
    let (ip, second, net) = match family {
        Family::V4 => ("10.96.0.1", "10.1.0.1", "10.0.0.0/9"),
        Family::V6 => ("fd00::1", "fd01::1", "fd02::/17"),
    };
    let (ip, second, net) = (
        ip.parse().unwrap(),
        second.parse().unwrap(),
        net.parse().unwrap(),
    );
    let protocols = [Protocol::TCP, Protocol::UDP, Protocol::SCTP];
    let each = |entry: &dyn Fn(Protocol) -> Entry| protocols.map(entry).to_vec();
    match kind {
        SetType::HashIp => vec![Entry::Ip(ip)],
        SetType::BitmapPort => vec![Entry::Port(80), Entry::Port(30_000)],
        SetType::HashIpPort => each(&|protocol| Entry::IpPort(ip, protocol, 80)),
        SetType::HashIpPortIp => each(&|protocol| Entry::IpPortIp(ip, protocol, 80, second)),
        SetType::HashIpPortNet => each(&|protocol| Entry::IpPortNet(ip, protocol, 80, net)),
    }
}

const TYPES: [SetType; 5] = [
    SetType::HashIp,
    SetType::HashIpPort,
    SetType::HashIpPortIp,
    SetType::HashIpPortNet,
    SetType::BitmapPort,
];

fn bytes_of(entries: &[Entry]) -> Vec<u8> {
    let message = edit(Command::Add, "some", entries);
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

#[test]
fn what_is_written_is_read_again() {
    for family in Family::ALL {
        for kind in TYPES {
            let entries = entries(family, kind);
            assert_eq!(read_entries(&bytes_of(&entries)), Ok(entries));
        }
    }
}

#[test]
fn addresses_and_ports_are_in_network_byte_order() {
    let ip = [10, 96, 0, 1].into();
    let bytes = bytes_of(&[Entry::IpPort(ip, Protocol::TCP, 80)]);
    let entry = [
        &[12_u16, 0x8001, 8, 0x4001].map(u16::to_ne_bytes).concat()[..],
        &[10, 96, 0, 1],
        &[6_u16, 0x4004].map(u16::to_ne_bytes).concat(),
        &[0, 80, 0, 0],
        &[5_u16, 7].map(u16::to_ne_bytes).concat(),
        &[6, 0, 0, 0],
    ]
    .concat();
    assert!(bytes.ends_with(&entry), "{bytes:?}");
}

/// Runs in the kernel, in a namespace of its own.
#[test]
fn sets_of_all_types_hold_what_they_are_given() {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: needs root");
        return;
    }
    let run = || {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        let mut client = Client::open().unwrap();
        for family in Family::ALL {
            for kind in TYPES {
                hold(&mut client, family, kind);
            }
        }
        fill(&mut client);
    };
    std::thread::scope(|scope| scope.spawn(run).join().unwrap());
}

fn hold(client: &mut Client, family: Family, kind: SetType) {
    let set = SetSpec {
        name: "HEALTH-TEST".to_owned(),
        kind,
        family,
        max_entries: 1000,
    };
    assert_eq!(client.entries(&set.name).unwrap(), None);
    assert_eq!(client.index(&set.name).unwrap(), None);
    client.create(&set).unwrap();
    client.create(&set).unwrap();
    assert!(client.index(&set.name).unwrap().is_some());
    let mut wanted = entries(family, kind);
    // Both requests give the desired result even if half of it is already in place.
    client.add(&set.name, &wanted[..1]).unwrap();
    assert_eq!(client.add(&set.name, &wanted).unwrap(), []);
    let listed = |client: &mut Client| {
        let mut listed = client.entries(&set.name).unwrap().unwrap();
        listed.sort();
        listed
    };
    wanted.sort();
    assert_eq!(listed(client), wanted);
    let gone = wanted.remove(0);
    assert_eq!(client.delete(&set.name, &[gone]).unwrap(), []);
    assert_eq!(client.delete(&set.name, &[gone]).unwrap(), []);
    assert_eq!(listed(client), wanted);

    let other = SetSpec {
        kind: match kind {
            SetType::HashIp => SetType::BitmapPort,
            _ => SetType::HashIp,
        },
        ..set.clone()
    };
    assert!(client.create(&other).is_err());
    assert!(client.destroy(&set.name).unwrap());
    assert!(!client.destroy(&set.name).unwrap());
}

fn fill(client: &mut Client) {
    let set = SetSpec {
        name: "HEALTH-TEST".to_owned(),
        kind: SetType::HashIp,
        family: Family::V4,
        max_entries: 10_000,
    };
    client.create(&set).unwrap();
    let entry = |number: u32| Entry::Ip(std::net::Ipv4Addr::from(0x0a00_0000 + number).into());
    let many: Vec<_> = (0..5000).map(entry).collect();
    assert_eq!(client.add(&set.name, &many).unwrap(), []);
    let mut listed = client.entries(&set.name).unwrap().unwrap();
    listed.sort();
    assert_eq!(listed, many);
    // The kernel enforces the limit only roughly.
    let more: Vec<_> = (5000..50_000).map(entry).collect();
    let refused = client.add(&set.name, &more).unwrap();
    assert_eq!(refused[0].to_string(), "the set is full");
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(bytes: Vec<u8>, at: usize, with: u8) {
        let mut sound = bytes_of(&entries(Family::V6, SetType::HashIpPortNet));
        let at = at % sound.len();
        sound[at] = with;
        for one in [&bytes, &sound] {
            let _ = read_entries(one);
            let _ = read_index(one);
        }
    }
}
