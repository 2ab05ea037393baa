//! The attempts, one per feature.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::{io, thread};

use aya_obj::generated::BPF_F_NO_PREALLOC;
use aya_obj::generated::bpf_attach_type::BPF_TCX_INGRESS;
use aya_obj::generated::bpf_func_id::{self, *};
use aya_obj::generated::bpf_map_type::{self, *};
use health_net::hostns::is_bpffs;
use health_net::link::{self, VethPair};
use health_net::mac::MacAddr;
use health_net::netlink;
use health_net::tc::{Place, Side, Socket};
use nix::sched::{CloneFlags, unshare};

use super::{BTF, CLSACT, Feature, Need, TCX};
use crate::asm::{R0, R2, R3, R4, R5, call, exit, mov};
use crate::sys::{self, CreateAttr, LinkTarget};

const TC_ACT_UNSPEC: i32 = -1;
/// Newer than the generated bindings.
const BPF_F_IPV6: i32 = 1 << 7;
/// Ifindex of the loopback device in a fresh namespace.
const LOOPBACK: u32 = 1;
/// A packet with space for IPv6 headers.
const PACKET: [u8; 128] = [0; 128];
/// Size of the verifier's log in bytes.
const LOG_ROOM: usize = 4_096;

const NO_PROGRAMS: &str = "the programs cannot be loaded";

/// Helpers that the programs call, by name.
const HELPERS: [(&str, bpf_func_id); 22] = [
    ("helper-map-lookup-elem", BPF_FUNC_map_lookup_elem),
    ("helper-map-update-elem", BPF_FUNC_map_update_elem),
    ("helper-map-delete-elem", BPF_FUNC_map_delete_elem),
    ("helper-ktime-get-ns", BPF_FUNC_ktime_get_ns),
    ("helper-get-prandom-u32", BPF_FUNC_get_prandom_u32),
    ("helper-skb-store-bytes", BPF_FUNC_skb_store_bytes),
    ("helper-l3-csum-replace", BPF_FUNC_l3_csum_replace),
    ("helper-l4-csum-replace", BPF_FUNC_l4_csum_replace),
    ("helper-tail-call", BPF_FUNC_tail_call),
    ("helper-redirect", BPF_FUNC_redirect),
    ("helper-skb-load-bytes", BPF_FUNC_skb_load_bytes),
    ("helper-skb-pull-data", BPF_FUNC_skb_pull_data),
    ("helper-skb-adjust-room", BPF_FUNC_skb_adjust_room),
    ("helper-sk-lookup-udp", BPF_FUNC_sk_lookup_udp),
    ("helper-sk-release", BPF_FUNC_sk_release),
    ("helper-skc-lookup-tcp", BPF_FUNC_skc_lookup_tcp),
    ("helper-ringbuf-output", BPF_FUNC_ringbuf_output),
    ("helper-ringbuf-reserve", BPF_FUNC_ringbuf_reserve),
    ("helper-ringbuf-submit", BPF_FUNC_ringbuf_submit),
    ("helper-ringbuf-discard", BPF_FUNC_ringbuf_discard),
    ("helper-ktime-get-coarse-ns", BPF_FUNC_ktime_get_coarse_ns),
    ("helper-ktime-get-tai-ns", BPF_FUNC_ktime_get_tai_ns),
];

/// Kinds of maps that the programs use: name, type, key and value sizes in bytes, flags.
const MAPS: [(&str, bpf_map_type, u32, u32, u32); 7] = [
    ("map-hash", BPF_MAP_TYPE_HASH, 4, 8, BPF_F_NO_PREALLOC),
    ("map-array", BPF_MAP_TYPE_ARRAY, 4, 8, 0),
    ("map-prog-array", BPF_MAP_TYPE_PROG_ARRAY, 4, 4, 0),
    ("map-percpu-array", BPF_MAP_TYPE_PERCPU_ARRAY, 4, 8, 0),
    ("map-lru-hash", BPF_MAP_TYPE_LRU_HASH, 4, 8, 0),
    (
        "map-lpm-trie",
        BPF_MAP_TYPE_LPM_TRIE,
        8,
        8,
        BPF_F_NO_PREALLOC,
    ),
    ("map-ringbuf", BPF_MAP_TYPE_RINGBUF, 0, 0, 0),
];

/// Tries all features.
pub(super) fn features(bpf_root: &Path) -> Vec<Feature> {
    let required = |name, available, without| Feature {
        name,
        available,
        need: Need::Required,
        without,
    };
    let mut features = vec![
        required(
            "bpffs",
            is_bpffs(bpf_root),
            "no state survives an agent restart",
        ),
        required(
            "vmlinux-btf",
            Path::new(BTF).exists(),
            "the kernel's types are not known",
        ),
        required(
            "btf-load",
            loads_btf(),
            "the programs' functions have no types",
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
        "policy tables cannot be retired",
    ));
    features.push(required(
        "jit",
        load_pass()
            .and_then(|program| sys::jited_len(program.as_fd()))
            .is_ok_and(|len| len > 0),
        "programs that mix function calls and tail calls cannot be loaded",
    ));
    let devices = in_namespace_of_its_own();
    features.push(required(
        "veth",
        devices.veth,
        "endpoints cannot be created",
    ));
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
            without: "the host drops translated IPv6 packets whose checksum the network card computed",
        },
    ]);
    features
}

fn load(instructions: &[u64]) -> io::Result<OwnedFd> {
    sys::load_classifier(instructions, &mut [])
}

/// Loads a program that passes every packet.
fn load_pass() -> io::Result<OwnedFd> {
    load(&[mov(R0, TC_ACT_UNSPEC), exit()])
}

/// Whether tc programs may call a helper. The verifier rejects most calls anyway, because they lack arguments; but its
/// log tells if the helper is missing.
fn has_helper(helper: bpf_func_id) -> bool {
    let mut log = vec![0; LOG_ROOM];
    if sys::load_classifier(&[call(helper), exit()], &mut log).is_ok() {
        return true;
    }
    let log = String::from_utf8_lossy(&log);
    let says_no = ["unknown func", "invalid func", "cannot use helper"];
    log.contains(&format!("#{}", helper as u32)) && !says_no.iter().any(|text| log.contains(text))
}

fn map(kind: bpf_map_type, key_size: u32, value_size: u32, flags: u32) -> io::Result<OwnedFd> {
    // The size of a ring buffer is a whole number of pages.
    let max_entries = if kind == BPF_MAP_TYPE_RINGBUF {
        1 << 16
    } else {
        1
    };
    sys::create_map(CreateAttr {
        kind: kind as u32,
        key_size,
        value_size,
        max_entries,
        flags,
        ..CreateAttr::default()
    })
}

fn trie_takes_batches() -> io::Result<()> {
    let trie = map(BPF_MAP_TYPE_LPM_TRIE, 8, 8, BPF_F_NO_PREALLOC)?;
    let (key, value) = ([0; 8], [0; 8]);
    let (mut keys, mut values, mut next) = (key, value, key);
    sys::update_batch(trie.as_fd(), &key, &value, 1).map_err(|(_, error)| error)?;
    sys::lookup_batch(trie.as_fd(), None, &mut next, &mut keys, &mut values, 1)?;
    sys::delete_batch(trie.as_fd(), &key, 1).map_err(|(_, error)| error)
}

/// Whether the kernel loads BTF with a single integer type.
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

/// Whether `bpf_l4_csum_replace` accepts `BPF_F_IPV6`. It returns 0 or an error number.
fn has_checksum_flag() -> io::Result<bool> {
    const CHECK_AT: i32 = 64;
    let program = load(&[
        mov(R2, CHECK_AT),
        mov(R3, 0),
        mov(R4, 0),
        mov(R5, BPF_F_IPV6),
        call(BPF_FUNC_l4_csum_replace),
        exit(),
    ])?;
    Ok(sys::run_classifier(program.as_fd(), &PACKET)? == 0)
}

/// The features that work with devices.
#[derive(Default)]
struct Devices {
    veth: bool,
    tcx: bool,
    clsact: bool,
}

/// Tries whatever needs a device, in a namespace that disappears with the thread.
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
    let target = LinkTarget::Tcx {
        device: LOOPBACK,
        hook: BPF_TCX_INGRESS,
    };
    sys::create_link(program, &target).map(drop)
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
        let netlink = netlink::open().map_err(io::Error::other)?;
        Ok(link::create_veth(&netlink, &pair).await.is_ok())
    })
}
