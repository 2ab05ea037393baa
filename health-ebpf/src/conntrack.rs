//! Conntrack: finds, updates and creates the entries of flows.

mod state;

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use aya_ebpf::bindings::{BPF_ANY, BPF_NOEXIST};
use health_common::ct::{CtEntry, CtState, Side, Timeouts, lifetime};
use health_common::events::EVENT_CT_CREATED;
use health_common::identity;
use health_common::packet::Packet;
use health_common::tcp::{ACK, FIN, IP_PROTOCOL_TCP, RST, SYN};
use health_common::tuple::Tuple;

use crate::clock::{coarse_now_ns, coarse_now_secs, seconds};
use crate::events::report_flow;
use crate::ipcache::identity_of;
use crate::table::{E2BIG, EEXIST, FlowMap, Table};

pub(crate) use self::state::advance;
use self::state::{REFUSED, tcp_step};

/// The contribution of one packet, or one exchange, to its entry.
#[derive(Clone, Copy, Default)]
pub struct Traffic {
    /// Bytes received, from the IP header on; 0 for no packet.
    pub rx_bytes: u32,
    /// Bytes sent, from the IP header on; 0 for no packet.
    pub tx_bytes: u32,
    /// Identity of the side that opened the flow, if that side is local. Otherwise it is unknown, and is looked up for
    /// each new entry.
    pub source_identity: u32,
    /// Device on which the flow was opened.
    pub ifindex: u32,
    /// Number of the policy table that allowed the flow to be opened; 0 if none was consulted.
    pub policy: u32,
}

/// Outcome of looking up or creating an entry.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Tracked {
    /// The entry already existed.
    Known,
    /// The entry was created.
    New,
    /// The packet fits no entry, and does not create one.
    Invalid,
    /// The entry could not be created.
    Full,
}

/// The flags of a packet, if the packet contains them.
#[derive(Clone, Copy)]
pub enum PacketFlags {
    /// A later fragment, which has no flags and creates no entry.
    Unknown,
    /// TCP flags; meaningless for other protocols.
    Tcp(u8),
}

impl PacketFlags {
    /// The flags of a packet.
    #[inline(always)]
    pub fn of<T>(packet: &Packet<T>) -> Self {
        Self::new(packet.is_later(), packet.tcp_flags)
    }

    /// The flags of a packet that is a later fragment, or has these TCP flags.
    #[inline(always)]
    pub fn new(is_later: bool, tcp_flags: u8) -> Self {
        if is_later {
            Self::Unknown
        } else {
            Self::Tcp(tcp_flags)
        }
    }
}

/// Decides which flows may exist.
pub trait Gate<K> {
    /// Reason for refusing a flow.
    type Refusal;
    /// Whether an entry belongs to this gate's endpoint, not to an earlier one with the same address.
    fn owns(&self, entry: &CtEntry) -> bool;
    /// Number of the policy table that decides who may open flows in `direction` (as in a tuple); `None` if everyone
    /// may.
    fn table(&self, direction: u8) -> Option<u32>;
    /// Whether a packet with this tuple may open a flow.
    fn admit(&self, tuple: &K) -> Result<(), Self::Refusal>;
}

/// Admits every flow.
struct Open;

impl<K> Gate<K> for Open {
    type Refusal = Never;

    #[inline(always)]
    fn owns(&self, _entry: &CtEntry) -> bool {
        true
    }

    #[inline(always)]
    fn table(&self, _direction: u8) -> Option<u32> {
        None
    }

    #[inline(always)]
    fn admit(&self, _tuple: &K) -> Result<(), Never> {
        Ok(())
    }
}

/// Records a packet with this tuple, in the packet's direction, in the entry of its flow, or creates the entry. The
/// tuple is reversed in place: two would not fit on the stack.
#[inline(always)]
pub fn enter<K: Tuple>(
    flows: Table<K, CtEntry>,
    tuple: &mut K,
    flags: PacketFlags,
    traffic: Traffic,
    timeouts: &Timeouts,
) -> Tracked {
    match enter_if(flows, tuple, flags, || traffic, timeouts, &Open) {
        Ok(tracked) => tracked,
        Err(never) => match never {},
    }
}

/// Like [`enter`], but only if the gate admits the packet. The gate is consulted before anything is recorded: for each
/// packet that is not a reply, and for a reply if a different table allowed its flow. `traffic` is called only when
/// needed, because its result does not fit on the stack.
#[inline(always)]
pub fn enter_if<K: Tuple, G: Gate<K>>(
    flows: Table<K, CtEntry>,
    tuple: &mut K,
    flags: PacketFlags,
    traffic: impl Fn() -> Traffic,
    timeouts: &Timeouts,
    gate: &G,
) -> Result<Tracked, G::Refusal> {
    // Branches once, so that the compiler drops the TCP states from the other branch.
    match tuple.protocol() {
        IP_PROTOCOL_TCP => enter_into(
            &flows.tcp,
            tuple,
            IP_PROTOCOL_TCP,
            flags,
            traffic,
            timeouts,
            gate,
        ),
        protocol => enter_into(
            &flows.others,
            tuple,
            protocol,
            flags,
            traffic,
            timeouts,
            gate,
        ),
    }
}

#[inline(always)]
fn enter_into<K: Tuple, G: Gate<K>>(
    map: &impl FlowMap<K, CtEntry>,
    tuple: &mut K,
    protocol: u8,
    flags: PacketFlags,
    traffic: impl Fn() -> Traffic,
    timeouts: &Timeouts,
    gate: &G,
) -> Result<Tracked, G::Refusal> {
    let now_ns = coarse_now_ns();
    if let Some((entry, side)) = live(map, tuple, seconds(now_ns)) {
        // SAFETY: a value of that map.
        match unsafe { judge(entry, side, tuple, gate) } {
            Ok(true) => {
                if let PacketFlags::Tcp(tcp_flags) = flags {
                    // SAFETY: as above.
                    let is_part = protocol != IP_PROTOCOL_TCP
                        || unsafe { advance(entry, tuple, side, tcp_flags) };
                    if !is_part {
                        // A packet from the other side on the same ports, such as a SYN, is not necessarily a reply.
                        if side == Side::Reply {
                            *tuple = tuple.reply();
                            gate.admit(tuple)?;
                        }
                        return Ok(Tracked::Invalid);
                    }
                }
                // SAFETY: as above.
                unsafe { update(entry, protocol, traffic(), timeouts, now_ns) };
                return Ok(Tracked::Known);
            }
            Err(refusal) if side == Side::Original => return Err(refusal),
            // In the reverse direction on the same ports, a flow may be opened only by a SYN, or by a packet of a flow
            // that may have been opened in that direction. Any other packet from the replying side is refused along
            // with its flow.
            Err(refusal)
                if !opens(protocol, flags)
                    // SAFETY: as above.
                    && unsafe { !is_picked_up(entry, protocol) } =>
            {
                return Err(refusal);
            }
            Ok(false) | Err(_) => {
                // Expire the old entry: otherwise, look-ups would find it before the new one.
                // SAFETY: as above; a single word.
                unsafe { (*entry).expires = seconds(now_ns) };
                if side == Side::Reply {
                    *tuple = tuple.reply();
                }
            }
        }
    }
    gate.admit(tuple)?;
    let PacketFlags::Tcp(tcp_flags) = flags else {
        return Ok(Tracked::Invalid);
    };
    let state = if protocol == IP_PROTOCOL_TCP {
        let step = tcp_step(0, tuple.direction().into(), 0, tcp_flags.into());
        if step & REFUSED != 0 {
            return Ok(Tracked::Invalid);
        }
        CtState::from_word(step as u32)
    } else {
        CtState::default()
    };
    let traffic = Traffic {
        policy: gate.table(tuple.direction()).unwrap_or(0),
        ..traffic()
    };
    Ok(create(
        map, tuple, protocol, state, traffic, timeouts, now_ns,
    ))
}

/// An error that cannot happen.
enum Never {}

/// Whether a packet opens a connection, regardless of earlier packets.
#[inline(always)]
fn opens(protocol: u8, flags: PacketFlags) -> bool {
    let PacketFlags::Tcp(tcp_flags) = flags else {
        return false;
    };
    protocol == IP_PROTOCOL_TCP && tcp_flags & (SYN | ACK | RST | FIN) == SYN
}

/// Whether conntrack missed the connection's first segments, so that either side may have opened it.
///
/// # Safety
///
/// `entry` must point to a value of a conntrack map.
#[inline(always)]
unsafe fn is_picked_up(entry: *const CtEntry, protocol: u8) -> bool {
    // SAFETY: the caller's promise; map values stay valid while the program runs.
    let state = unsafe { (*entry).state() };
    protocol == IP_PROTOCOL_TCP && (state.rx_flags_seen() | state.tx_flags_seen()) & SYN == 0
}

/// Judges the flow of an entry: `Ok(true)` if it may continue, `Ok(false)` if the entry belongs to another endpoint,
/// otherwise the refusal. Stores the table that allowed the flow, or 0.
///
/// # Safety
///
/// `entry` must point to a value of a conntrack map.
#[inline(always)]
unsafe fn judge<K: Tuple, G: Gate<K>>(
    entry: *mut CtEntry,
    side: Side,
    tuple: &K,
    gate: &G,
) -> Result<bool, G::Refusal> {
    // SAFETY: the caller's promise; map values stay valid while the program runs.
    if unsafe { !gate.owns(&*entry) } {
        return Ok(false);
    }
    // SAFETY: as above; single words, as below.
    let allowed_by = unsafe { (*entry).policy };
    // Every policy change creates a new table. 0 means no table.
    let table = gate.table(tuple.direction());
    let is_allowed = table.is_none_or(|table| table == allowed_by && table != 0);
    if side == Side::Reply && is_allowed {
        return Ok(true);
    }
    let admission = gate.admit(tuple);
    // Even the same table may refuse the flow now: the peer may be a different one.
    let table = if admission.is_ok() { table } else { Some(0) };
    // SAFETY: as above.
    unsafe {
        if let Some(table) = table
            && table != allowed_by
        {
            (*entry).policy = table;
        }
    }
    admission.map(|()| true)
}

/// Whether a packet with this tuple, in the packet's direction, belongs to a known flow.
#[inline(always)]
pub fn is_known<K: Tuple>(flows: Table<K, CtEntry>, tuple: &mut K) -> bool {
    find(flows, tuple).is_some()
}

/// Whether there is an entry under exactly this key.
#[inline(always)]
pub fn has_entry<K: Tuple>(flows: Table<K, CtEntry>, key: &K) -> bool {
    flows
        .get_ptr(key)
        // SAFETY: a value of that map.
        .is_some_and(|entry| unsafe { !(*entry).has_expired(coarse_now_secs()) })
}

/// Whether there is an entry under exactly this key, for a flow that was answered or is TCP.
#[inline(always)]
pub fn is_answered<K: Tuple>(flows: Table<K, CtEntry>, key: &K) -> bool {
    flows.get_ptr(key).is_some_and(|entry| {
        // SAFETY: a value of that map.
        unsafe {
            !(*entry).has_expired(coarse_now_secs())
                && (key.protocol() == IP_PROTOCOL_TCP || (*entry).rx_packets > 0)
        }
    })
}

/// Like [`is_known`], if the gate admits the flow.
#[inline(always)]
pub fn is_admitted<K: Tuple, G: Gate<K>>(
    flows: Table<K, CtEntry>,
    tuple: &mut K,
    gate: &G,
) -> bool {
    match find(flows, tuple) {
        // SAFETY: a value of a conntrack map.
        Some((entry, side)) => unsafe { matches!(judge(entry, side, tuple, gate), Ok(true)) },
        None => false,
    }
}

/// Like [`live`], in the map of the tuple's protocol.
#[inline(always)]
pub(crate) fn find<K: Tuple>(
    flows: Table<K, CtEntry>,
    tuple: &mut K,
) -> Option<(*mut CtEntry, Side)> {
    let now = coarse_now_secs();
    if tuple.protocol() == IP_PROTOCOL_TCP {
        live(&flows.tcp, tuple, now)
    } else {
        live(&flows.others, tuple, now)
    }
}

/// Updates or creates the entry of an echo under exactly this tuple, whichever side sent the packet.
#[inline(always)]
pub fn track<K: Tuple>(
    flows: Table<K, CtEntry>,
    tuple: &K,
    traffic: Traffic,
    timeouts: &Timeouts,
) -> Tracked {
    // Errors of milliseconds do not matter at a resolution of seconds.
    track_at(flows, tuple, traffic, timeouts, coarse_now_ns())
}

/// Like [`track`], at a given time (`CLOCK_MONOTONIC`, in nanoseconds).
#[inline(always)]
pub fn track_at<K: Tuple>(
    flows: Table<K, CtEntry>,
    tuple: &K,
    traffic: Traffic,
    timeouts: &Timeouts,
    now_ns: u64,
) -> Tracked {
    let state = CtState::default();
    match flows.others.get_ptr_mut(tuple) {
        Some(entry) => {
            // SAFETY: a map value.
            unsafe { update(entry, K::ICMP, traffic, timeouts, now_ns) };
            Tracked::Known
        }
        None => create(
            &flows.others,
            tuple,
            K::ICMP,
            state,
            traffic,
            timeouts,
            now_ns,
        ),
    }
}

/// Finds the entry for a packet with this tuple, and which side of the flow sent the packet. Ignores expired entries,
/// which are waiting to be collected. If there is an entry, its key replaces the tuple.
#[inline(always)]
fn live<K: Tuple>(
    map: &impl FlowMap<K, CtEntry>,
    tuple: &mut K,
    now: u32,
) -> Option<(*mut CtEntry, Side)> {
    let key: &K = tuple;
    if let Some(entry) = map.get_ptr_mut(key) {
        // SAFETY: a map value stays valid while the program runs.
        if unsafe { !(*entry).has_expired(now) } {
            return Some((entry, Side::Original));
        }
    }
    *tuple = tuple.reply();
    let key: &K = tuple;
    if let Some(entry) = map.get_ptr_mut(key) {
        // SAFETY: as above.
        if unsafe { !(*entry).has_expired(now) } {
            return Some((entry, Side::Reply));
        }
    }
    *tuple = tuple.reply();
    None
}

#[inline(always)]
fn create<K: Tuple>(
    map: &impl FlowMap<K, CtEntry>,
    tuple: &K,
    protocol: u8,
    state: CtState,
    traffic: Traffic,
    timeouts: &Timeouts,
    now_ns: u64,
) -> Tracked {
    let now = seconds(now_ns);
    let source_identity = match traffic.source_identity {
        identity::UNKNOWN => identity_of(tuple.source().0),
        known => known,
    };
    let mut entry = CtEntry {
        rx_packets: u64::from(traffic.rx_bytes != 0),
        rx_bytes: u64::from(traffic.rx_bytes),
        tx_packets: u64::from(traffic.tx_bytes != 0),
        tx_bytes: u64::from(traffic.tx_bytes),
        expires: now + lifetime(protocol, state, timeouts),
        last_rx: if traffic.rx_bytes != 0 { now } else { 0 },
        last_tx: if traffic.tx_bytes != 0 { now } else { 0 },
        source_identity,
        ifindex: traffic.ifindex,
        policy: traffic.policy,
        ..CtEntry::default()
    };
    entry.set_state(state);
    let mut made = map.insert(tuple, &entry, u64::from(BPF_NOEXIST));
    if made == Err(E2BIG) && map.evict() {
        made = map.insert(tuple, &entry, u64::from(BPF_NOEXIST));
    }
    if made == Err(EEXIST) {
        // Another CPU has created the entry in the meantime, or an expired one is still there.
        if let Some(there) = map.get_ptr_mut(tuple)
            // SAFETY: a map value.
            && unsafe { !(*there).has_expired(now) }
        {
            // SAFETY: as above.
            unsafe { update(there, protocol, traffic, timeouts, now_ns) };
            return Tracked::Known;
        }
        made = map.insert(tuple, &entry, u64::from(BPF_ANY));
    }
    if made.is_err() {
        return Tracked::Full;
    }
    report_flow(EVENT_CT_CREATED, tuple, &entry);
    Tracked::New
}

/// Adds traffic to an entry. `now_ns` is `CLOCK_MONOTONIC`, in nanoseconds.
///
/// # Safety
///
/// `entry` must point to a value of a conntrack map.
#[inline(always)]
pub unsafe fn update(
    entry: *mut CtEntry,
    protocol: u8,
    traffic: Traffic,
    timeouts: &Timeouts,
    now_ns: u64,
) {
    let now = seconds(now_ns);
    // SAFETY: the caller's promise; map values stay valid while the program runs. Counters are incremented atomically,
    // since several CPUs may handle the same flow; the other fields are single words, where the last writer wins.
    unsafe {
        if traffic.rx_bytes != 0 {
            add(&raw mut (*entry).rx_packets, 1);
            add(&raw mut (*entry).rx_bytes, u64::from(traffic.rx_bytes));
            (*entry).last_rx = now;
        }
        if traffic.tx_bytes != 0 {
            add(&raw mut (*entry).tx_packets, 1);
            add(&raw mut (*entry).tx_bytes, u64::from(traffic.tx_bytes));
            (*entry).last_tx = now;
        }
        (*entry).expires = now + lifetime(protocol, (*entry).state(), timeouts);
    }
}

/// Adds to a counter that several CPUs may change.
///
/// # Safety
///
/// `counter` must point to a counter in a map value.
#[inline(always)]
pub unsafe fn add(counter: *mut u64, value: u64) {
    // SAFETY: the caller's promise; map values are aligned to eight bytes. The standard library offers
    // no `fetch_add` on targets without compare-and-swap, and treats BPF as one; since the result is
    // unused, this becomes a `lock add`.
    unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(counter, value) };
}
