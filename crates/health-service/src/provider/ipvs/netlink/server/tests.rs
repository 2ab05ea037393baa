use netlink_packet_core::Emitable as _;
use proptest::prelude::*;

use super::message::{change, read_info, read_real, read_server, read_timeouts};
use super::*;
use health_model::ipam::Family;
use health_model::policy::Protocol;

fn bytes_of(asked: &Change) -> Vec<u8> {
    let (_, attributes) = change(asked);
    let mut bytes = vec![0; 4 + attributes.as_slice().buffer_len()];
    attributes.as_slice().emit(&mut bytes[4..]);
    bytes
}

fn id(address: &str) -> ServerId {
    ServerId::Address(ServerKey {
        address: address.parse().unwrap(),
        protocol: Protocol::TCP,
    })
}

#[test]
fn a_virtual_server_is_written_as_the_kernel_has_it() {
    let server = VirtualServer {
        id: id("10.96.0.1:80"),
        scheduler: Scheduler::RoundRobin,
        flags: Flags::PERSISTENT | Flags::HASHED,
        timeout: 10_800,
    };
    let number = |number: u32| number.to_ne_bytes().to_vec();
    let expected: Vec<u8> = [
        &[0, 0, 0, 0][..],
        &[84_u16.to_ne_bytes(), 0x8001_u16.to_ne_bytes()].concat(),
        &[6_u16, 1, 2].map(u16::to_ne_bytes).concat(),
        &[0, 0],
        &[6_u16, 2, 6].map(u16::to_ne_bytes).concat(),
        &[0, 0],
        &[20_u16, 3].map(u16::to_ne_bytes).concat(),
        &[10, 96, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        &[6_u16, 4].map(u16::to_ne_bytes).concat(),
        &[0, 80, 0, 0],
        &[7_u16, 6].map(u16::to_ne_bytes).concat(),
        b"rr\0\0",
        &[12_u16, 7].map(u16::to_ne_bytes).concat(),
        &number(1),
        &number(u32::MAX),
        &[8_u16, 8].map(u16::to_ne_bytes).concat(),
        &number(10_800),
        &[8_u16, 9].map(u16::to_ne_bytes).concat(),
        &number(u32::MAX),
    ]
    .concat();
    let bytes = bytes_of(&Change::AddServer(server.clone()));
    let expected_len = expected.len() - 4;
    assert_eq!(bytes[4..6], (expected_len as u16).to_ne_bytes());
    assert_eq!(bytes[6..], expected[6..]);
    let read = read_server(&bytes).unwrap().unwrap();
    assert_eq!(read.flags, Flags::PERSISTENT);
    assert_eq!((read.id, read.timeout), (server.id, server.timeout));
}

#[test]
fn what_is_written_of_both_families_is_read_again() {
    for (address, real) in [
        ("10.96.0.1:80", "10.1.0.1:8080"),
        ("[fd00::1]:80", "[fd01::1]:8080"),
    ] {
        for (scheduler, name) in Scheduler::KNOWN {
            assert_eq!(Scheduler::from(name), scheduler);
            let server = VirtualServer {
                id: id(address),
                scheduler,
                flags: Flags::default(),
                timeout: 0,
            };
            let bytes = bytes_of(&Change::SetServer(server.clone()));
            assert_eq!(read_server(&bytes), Ok(Some(server)));
        }
        let mut server = RealServer::new(real.parse().unwrap(), 7);
        server.upper_threshold = 9;
        let bytes = bytes_of(&Change::AddReal(id(address), server));
        assert_eq!(read_real(&bytes, Family::V4), Ok(Some(server)));
    }
    let marked = VirtualServer {
        id: ServerId::Mark(Family::V6, 5),
        scheduler: Scheduler::Other("new".into()),
        flags: Flags(0x4),
        timeout: 1,
    };
    let bytes = bytes_of(&Change::AddServer(marked.clone()));
    assert_eq!(read_server(&bytes), Ok(Some(marked)));
}

#[test]
fn a_server_without_address_is_an_error() {
    let (_, attributes) = change(&Change::DeleteServer(ServerId::Mark(Family::V4, 1)));
    let mut bytes = vec![0; 4 + attributes.as_slice().buffer_len()];
    attributes.as_slice().emit(&mut bytes[4..]);
    let end = bytes.len();
    // Cut off the mark, which comes last.
    let cut = &mut bytes[..end - 8];
    cut[4..6].copy_from_slice(&12_u16.to_ne_bytes());
    assert!(read_server(cut).is_err());
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(bytes: Vec<u8>, at: usize, with: u8) {
        let server = VirtualServer {
            id: id("10.96.0.1:80"),
            scheduler: Scheduler::RoundRobin,
            flags: Flags::default(),
            timeout: 0,
        };
        let real = RealServer::new("[fd00::1]:80".parse().unwrap(), 7);
        let mut sound = bytes_of(&Change::AddServer(server));
        let mut sound_real = bytes_of(&Change::AddReal(id("[fd00::1]:1"), real));
        for one in [&mut sound, &mut sound_real] {
            let at = at % one.len();
            one[at] = with;
        }
        for one in [&bytes, &sound, &sound_real] {
            let _ = read_server(one);
            let _ = read_real(one, Family::V6);
            let _ = read_info(one);
            let _ = read_timeouts(one);
        }
    }
}
