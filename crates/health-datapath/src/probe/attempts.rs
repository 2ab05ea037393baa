//! The attempts, one a feature.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::{io, thread};

use health_net::hostns::is_bpffs;
use health_net::link::{self, VethPair};
use health_net::mac::MacAddr;
use health_net::netlink;
use health_net::tc::{Place, Side, Socket};
use nix::sched::{CloneFlags, unshare};

use super::{CLSACT, Feature, Need, TCX};
use crate::asm::{R0, R2, R3, R4, R5, call, exit, mov};
use crate::attach::attach_type;
use crate::sys::{self, CreateAttr};
use crate::{Direction, kernel};

const TC_ACT_UNSPEC: i32 = -1;
const BPF_L4_CSUM_REPLACE: i32 = 11;
const BPF_F_IPV6: i32 = 1 << 7;
const BPF_F_NO_PREALLOC: u32 = 1;
/// The loopback of a fresh namespace.
const LOOPBACK: u32 = 1;
/// A packet with room for the headers of IPv6.
const PACKET: [u8; 128] = [0; 128];
/// Bytes that the verifier may fill with what it has to say.
const LOG_ROOM: usize = 4_096;

const NO_PROGRAMS: &str = "the programs cannot be loaded";

/// Helpers that the programs call, by name and number in `enum bpf_func_id`.
const HELPERS: [(&str, i32); 22] = [
    ("helper-map-lookup-elem", 1),
    ("helper-map-update-elem", 2),
    ("helper-map-delete-elem", 3),
    ("helper-ktime-get-ns", 5),
    ("helper-get-prandom-u32", 7),
    ("helper-skb-store-bytes", 9),
    ("helper-l3-csum-replace", 10),
    ("helper-l4-csum-replace", BPF_L4_CSUM_REPLACE),
    ("helper-tail-call", 12),
    ("helper-redirect", 23),
    ("helper-skb-load-bytes", 26),
    ("helper-skb-pull-data", 39),
    ("helper-skb-adjust-room", 50),
    ("helper-sk-lookup-udp", 85),
    ("helper-sk-release", 86),
    ("helper-skc-lookup-tcp", 99),
    ("helper-ringbuf-output", 130),
    ("helper-ringbuf-reserve", 131),
    ("helper-ringbuf-submit", 132),
    ("helper-ringbuf-discard", 133),
    ("helper-ktime-get-coarse-ns", 160),
    ("helper-ktime-get-tai-ns", 208),
];

/// Kinds of maps that the programs use: name, number in `enum bpf_map_type`, bytes of a key and of a value, flags.
const MAPS: [(&str, u32, u32, u32, u32); 7] = [
    ("map-hash", 1, 4, 8, BPF_F_NO_PREALLOC),
    ("map-array", 2, 4, 8, 0),
    ("map-prog-array", 3, 4, 4, 0),
    ("map-percpu-array", 6, 4, 8, 0),
    ("map-lru-hash", 9, 4, 8, 0),
    ("map-lpm-trie", LPM_TRIE, 8, 8, BPF_F_NO_PREALLOC),
    ("map-ringbuf", RING_BUFFER, 0, 0, 0),
];
const LPM_TRIE: u32 = 11;
const RING_BUFFER: u32 = 27;

/// Tries everything.
pub(super) fn features(bpf_root: &Path) -> Vec<Feature> {
    let required = |name, available, without| Feature {
        name,
        available,
        need: Need::Required,
        without,
    };
    let mut features = vec![
        required("bpffs", is_bpffs(bpf_root), "nothing outlives the agent"),
        required(
            "vmlinux-btf",
            Path::new(kernel::BTF).exists(),
            "the kernel's types are not known",
        ),
        required(
            "btf-load",
            loads_btf(),
            "functions of programs have no types",
        ),
        required("sched-cls", load_pass().is_ok(), NO_PROGRAMS),
        required(
            "test-run",
            load_pass()
                .and_then(|program| sys::run_classifier(program.as_fd(), &PACKET))
                .is_ok(),
            "round-trip times and conntrack entries cannot be written or collected",
        ),
    ];
    features.extend(HELPERS.map(|(name, helper)| required(name, has_helper(helper), NO_PROGRAMS)));
    features.extend(MAPS.map(|(name, kind, key_size, value_size, flags)| {
        let is_there = map(kind, key_size, value_size, flags).is_ok();
        required(name, is_there, NO_PROGRAMS)
    }));
    features.push(required(
        "lpm-trie-batch",
        trie_takes_batches().is_ok(),
        "policy and identities cannot be written",
    ));
    features.push(required(
        "membarrier",
        sys::wait_for_programs().is_ok(),
        "tables of policy cannot be retired",
    ));
    features.push(required(
        "jit",
        load_pass()
            .and_then(|program| sys::jited_len(program.as_fd()))
            .is_ok_and(|len| len > 0),
        "programs that call functions and go on with others cannot be loaded",
    ));
    let devices = in_namespace_of_its_own();
    features.push(required("veth", devices.veth, "there are no endpoints"));
    let one_of_two = |name, available, without| Feature {
        name,
        available,
        need: Need::OneOfTwo,
        without,
    };
    features.extend([
        one_of_two(TCX, devices.tcx, "programs are attached by clsact"),
        one_of_two(CLSACT, devices.clsact, "programs can only be attached by TCX"),
        Feature {
            name: "csum-ipv6",
            available: has_checksum_flag().is_ok_and(|has| has),
            need: Need::Optional,
            without: "the host drops translated IPv6 packets whose checksum a network card summed up",
        },
    ]);
    features
}

fn load(instructions: &[u64]) -> io::Result<OwnedFd> {
    sys::load_classifier(instructions, &mut [])
}

/// A program that lets every packet pass.
fn load_pass() -> io::Result<OwnedFd> {
    load(&[mov(R0, TC_ACT_UNSPEC), exit()])
}

/// Whether programs for tc may call a helper. Without arguments the verifier refuses most calls; but of a helper
/// that is not there, it says so.
fn has_helper(helper: i32) -> bool {
    let mut log = vec![0; LOG_ROOM];
    if sys::load_classifier(&[call(helper), exit()], &mut log).is_ok() {
        return true;
    }
    let log = String::from_utf8_lossy(&log);
    let says_no = ["unknown func", "invalid func", "cannot use helper"];
    log.contains(&format!("#{helper}")) && !says_no.iter().any(|text| log.contains(text))
}

fn map(kind: u32, key_size: u32, value_size: u32, flags: u32) -> io::Result<OwnedFd> {
    // The size of a ring buffer is whole pages.
    let max_entries = if kind == RING_BUFFER { 1 << 16 } else { 1 };
    sys::create_map(CreateAttr {
        kind,
        key_size,
        value_size,
        max_entries,
        flags,
        ..CreateAttr::default()
    })
}

fn trie_takes_batches() -> io::Result<()> {
    let trie = map(LPM_TRIE, 8, 8, BPF_F_NO_PREALLOC)?;
    let (key, value) = ([0; 8], [0; 8]);
    let (mut keys, mut values, mut next) = (key, value, key);
    sys::update_batch(trie.as_fd(), &key, &value, 1).map_err(|(_, error)| error)?;
    sys::lookup_batch(trie.as_fd(), None, &mut next, &mut keys, &mut values, 1)?;
    sys::delete_batch(trie.as_fd(), &key, 1).map_err(|(_, error)| error)
}

/// Hands in the types of one number.
fn loads_btf() -> bool {
    const MAGIC: u16 = 0xeb9f;
    const VERSION_AND_FLAGS: [u8; 2] = [1, 0];
    const HEADER_LEN: u32 = 24;
    const INT: u32 = 1 << 24;
    const STRINGS: [u8; 5] = *b"\0int\0";
    let types: [u32; 4] = [1, INT, 4, 32];
    let types_len = size_of_val(&types) as u32;
    let mut btf = Vec::from(MAGIC.to_ne_bytes());
    btf.extend(VERSION_AND_FLAGS);
    let sections = [HEADER_LEN, 0, types_len, types_len, STRINGS.len() as u32];
    btf.extend(sections.map(u32::to_ne_bytes).concat());
    btf.extend(types.map(u32::to_ne_bytes).concat());
    btf.extend(STRINGS);
    sys::load_btf(&btf).is_ok()
}

/// Whether `bpf_l4_csum_replace` takes `BPF_F_IPV6`. It answers 0, or with an error number.
fn has_checksum_flag() -> io::Result<bool> {
    const CHECK_AT: i32 = 64;
    let program = load(&[
        mov(R2, CHECK_AT),
        mov(R3, 0),
        mov(R4, 0),
        mov(R5, BPF_F_IPV6),
        call(BPF_L4_CSUM_REPLACE),
        exit(),
    ])?;
    Ok(sys::run_classifier(program.as_fd(), &PACKET)? == 0)
}

/// What can be done with devices.
#[derive(Default)]
struct Devices {
    veth: bool,
    tcx: bool,
    clsact: bool,
}

/// Tries what takes a device in a namespace that goes with the thread.
fn in_namespace_of_its_own() -> Devices {
    let attempt = || {
        unshare(CloneFlags::CLONE_NEWNET)?;
        let program = load_pass()?;
        Ok::<_, io::Error>(Devices {
            veth: makes_veth().is_ok_and(|made| made),
            tcx: attaches_by_tcx(program.as_fd()).is_ok(),
            clsact: attaches_by_clsact(program.as_fd()).is_ok(),
        })
    };
    let devices = thread::spawn(attempt).join();
    devices.ok().and_then(Result::ok).unwrap_or_default()
}

fn attaches_by_tcx(program: BorrowedFd<'_>) -> io::Result<()> {
    sys::create_tcx_link(program, LOOPBACK, attach_type(Direction::Ingress)).map(drop)
}

fn attaches_by_clsact(program: BorrowedFd<'_>) -> io::Result<()> {
    let place = Place {
        priority: 1,
        handle: 1,
    };
    let mut socket = Socket::open()?;
    socket.add_clsact(LOOPBACK)?;
    socket.add_filter(LOOPBACK, Side::Ingress, place, "probe", program)
}

fn makes_veth() -> io::Result<bool> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let pair = VethPair {
            name: "probe0",
            mac: MacAddr([2, 0, 0, 0, 0, 1]),
            peer_name: "probe1",
            peer_mac: MacAddr([2, 0, 0, 0, 0, 2]),
            mtu: 1500,
        };
        Ok(link::create_veth(&netlink::open()?, &pair).await.is_ok())
    })
}
