//! Conntrack and NAT entries of this agent's own echo probes.

use aya_ebpf::bindings::BPF_ANY;
use health_common::config::DatapathConfig;
use health_common::ct::{TUPLE_OUT, Tuple4, Tuple6};
use health_common::identity;
use health_common::inflight::Inflight;
use health_common::masquerade::Address as _;
use health_common::nat::NAT_HOST_LOCAL;
use health_common::probe::MESSAGE_LEN;

use crate::conntrack::{self, Tracked, Traffic};
use crate::ip_version::Version;

/// Records a probe that left on an uplink, and its reply if there was one. The agent reported the probe at `now_ns`.
#[inline(always)]
pub fn exchanged(probe: &Inflight, is_answered: bool, config: &DatapathConfig, now_ns: u64) {
    if probe.peer.is_v4() {
        enter_exchange::<Tuple4>(probe, is_answered, config, now_ns);
    } else {
        enter_exchange::<Tuple6>(probe, is_answered, config, now_ns);
    }
}

#[inline(always)]
fn enter_exchange<T: Version>(
    probe: &Inflight,
    is_answered: bool,
    config: &DatapathConfig,
    now_ns: u64,
) {
    let local = T::Address::of_addr(&probe.local);
    let tuple = T::of_echo(
        local,
        T::Address::of_addr(&probe.peer),
        config.icmp_id_be,
        TUPLE_OUT,
    );
    let bytes = packet_len::<T>();
    let traffic = Traffic {
        tx_bytes: bytes,
        rx_bytes: if is_answered { bytes } else { 0 },
        source_identity: identity::HOST,
        ifindex: probe.ifindex,
        ..Traffic::default()
    };
    let tracked = conntrack::track_at(T::flows(), &tuple, traffic, &config.timeouts, now_ns);
    if tracked != Tracked::New {
        return;
    }
    let entry = T::translation((local, config.icmp_id_be), NAT_HOST_LOCAL, now_ns);
    // Host-local entries only reserve the identifier: if there is no space for them, no translation goes wrong.
    let translations = T::translations().others;
    let _ = translations.insert(tuple, entry, u64::from(BPF_ANY));
    let _ = translations.insert(tuple.reply(), entry, u64::from(BPF_ANY));
}

/// Records a reply that came in at `now_ns` from `peer` to this host's address `local` (both in network byte order).
#[inline(always)]
pub fn received<T: Version>(
    local: T::Address,
    peer: T::Address,
    config: &DatapathConfig,
    now_ns: u64,
) {
    let tuple = T::of_echo(local, peer, config.icmp_id_be, TUPLE_OUT);
    let traffic = Traffic {
        rx_bytes: packet_len::<T>(),
        source_identity: identity::HOST,
        ..Traffic::default()
    };
    conntrack::track_at(T::flows(), &tuple, traffic, &config.timeouts, now_ns);
}

/// Bytes of a probe, from the IP header on.
#[inline(always)]
const fn packet_len<T: Version>() -> u32 {
    (T::HEADER_LEN + MESSAGE_LEN) as u32
}
