//! Conntrack: the entries of flows, found, changed and made.

use core::intrinsics::{AtomicOrdering, atomic_cxchg, atomic_xadd};
use core::ptr;

use aya_ebpf::bindings::{BPF_ANY, BPF_NOEXIST};
use health_common::ct::{
    CT_STATE_OFFSET, CtEntry, CtState, Outcome, Side, Timeouts, lifetime, tcp,
};
use health_common::events::{EVENT_CT_CLOSED, EVENT_CT_CREATED, EVENT_CT_REOPENED};
use health_common::identity;
use health_common::packet::Packet;
use health_common::tcp::{ACK, FIN, IP_PROTOCOL_TCP, RST, SYN};
use health_common::tuple::Tuple;

use crate::clock::{coarse_now_ns, coarse_now_secs, seconds};
use crate::events::tell_flow;
use crate::ipcache::identity_of;
use crate::table::{E2BIG, EEXIST, FlowMap, Table};

/// How often a change of an entry's flags is tried that other CPUs change too: what is not entered now
/// comes with the next packet.
const STATE_ATTEMPTS: u32 = 4;

/// What one packet, or one exchange, adds to its entry.
#[derive(Clone, Copy, Default)]
pub struct Traffic {
    /// Bytes received, from the IP header on; 0 for no packet.
    pub rx_bytes: u32,
    /// Bytes sent, from the IP header on; 0 for no packet.
    pub tx_bytes: u32,
    /// Identity of the side that opened the flow; of flows that others opened, unknown unless they are local:
    /// it is looked up for each new entry.
    pub source_identity: u32,
    /// Device on which it was opened.
    pub ifindex: u32,
    /// Number of the policy table that allowed a flow to be opened; 0 if none was asked.
    pub policy: u32,
}

/// How the entry was found.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Tracked {
    /// It was there.
    Known,
    /// It was made.
    New,
    /// There is none, and the packet makes none.
    Invalid,
    /// It could not be made.
    Full,
}

/// The flags of a packet, as far as it holds them.
#[derive(Clone, Copy)]
pub enum PacketFlags {
    /// A later fragment has none, and makes no entry.
    Unknown,
    /// TCP flags; of other protocols they mean nothing.
    Tcp(u8),
}

impl PacketFlags {
    /// Those of a packet.
    #[inline(always)]
    pub fn of<T>(packet: &Packet<T>) -> Self {
        if packet.is_later() {
            Self::Unknown
        } else {
            Self::Tcp(packet.tcp_flags)
        }
    }
}

/// Decides which flows may exist.
pub trait Gate<K> {
    /// Why a flow is refused.
    type Refusal;
    /// Whether an entry belongs to this gate's endpoint, not to an earlier one with the same address.
    fn owns(&self, entry: &CtEntry) -> bool;
    /// Number of the policy table that decides who may open flows of this direction, as in a tuple; `None` if all may.
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

/// Enters a packet with this tuple, in the direction that it goes, into the entry of its flow, or makes
/// one. The tuple is turned round in its place: two would not fit on the stack.
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

/// As [`enter`], but only what the gate admits: it is asked about each packet that is no reply, and about the flow of
/// a reply if another table allowed that, before anything is entered. `traffic` is asked for when it is needed: the stack
/// has no room to keep it.
#[inline(always)]
pub fn enter_if<K: Tuple, G: Gate<K>>(
    flows: Table<K, CtEntry>,
    tuple: &mut K,
    flags: PacketFlags,
    traffic: impl Fn() -> Traffic,
    timeouts: &Timeouts,
    gate: &G,
) -> Result<Tracked, G::Refusal> {
    // Branches once, so that the compiler removes TCP's states from the other branch.
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
                        // What the other side sends from the same ports is not for that a reply, such as a SYN.
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
            // Only a SYN may open a flow in the other direction on the same ports, and what may have been opened that
            // way: any other packet of the replying side is refused with its flow.
            Err(refusal)
                if !opens(protocol, flags)
                    // SAFETY: as above.
                    && unsafe { !is_picked_up(entry, protocol) } =>
            {
                return Err(refusal);
            }
            Ok(false) | Err(_) => {
                // Expires it: otherwise look-ups would find it before the new entry.
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

/// What does not happen.
enum Never {}

/// Whether a packet opens a connection, whatever there was before it.
#[inline(always)]
fn opens(protocol: u8, flags: PacketFlags) -> bool {
    let PacketFlags::Tcp(tcp_flags) = flags else {
        return false;
    };
    protocol == IP_PROTOCOL_TCP && tcp_flags & (SYN | ACK | RST | FIN) == SYN
}

/// Whether the first segments of an entry's connection were not seen: either side may have opened it.
///
/// # Safety
///
/// `entry` must point to a value of a conntrack map.
#[inline(always)]
unsafe fn is_picked_up(entry: *const CtEntry, protocol: u8) -> bool {
    // SAFETY: the caller's promise; map values stay valid memory for the program's run.
    let state = unsafe { (*entry).state() };
    protocol == IP_PROTOCOL_TCP && (state.rx_flags_seen() | state.tx_flags_seen()) & SYN == 0
}

/// Judges the flow of an entry: `Ok(true)` if it may go on, `Ok(false)` if the entry belongs to another endpoint, the
/// refusal otherwise. Stores the table that allowed it, or 0.
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
    // SAFETY: the caller's promise; map values stay valid memory for the program's run.
    if unsafe { !gate.owns(&*entry) } {
        return Ok(false);
    }
    // SAFETY: as above; single words, as below.
    let allowed_by = unsafe { (*entry).policy };
    // Each change of a policy has a table of its own. That there was none is 0.
    let table = gate.table(tuple.direction());
    let is_allowed = table.is_none_or(|table| table == allowed_by && table != 0);
    if side == Side::Reply && is_allowed {
        return Ok(true);
    }
    let admission = gate.admit(tuple);
    // The same table may refuse it by now: its peer may be another.
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

/// Whether there is a flow to which a packet with this tuple, in the direction that it goes, belongs.
#[inline(always)]
pub fn is_known<K: Tuple>(flows: Table<K, CtEntry>, tuple: &mut K) -> bool {
    find(flows, tuple).is_some()
}

/// Whether there is an entry under this very key.
#[inline(always)]
pub fn has_entry<K: Tuple>(flows: Table<K, CtEntry>, key: &K) -> bool {
    flows
        .get_ptr(key)
        // SAFETY: a value of that map.
        .is_some_and(|entry| unsafe { !(*entry).has_expired(coarse_now_secs()) })
}

/// Whether there is an entry under this very key, of a flow that was answered or of TCP.
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

/// As [`is_known`], if the gate admits the flow.
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

/// As [`live`], in the map of the tuple's protocol.
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

/// Updates an echo's entry under its own tuple, whichever side sent, or makes it.
#[inline(always)]
pub fn track<K: Tuple>(
    flows: Table<K, CtEntry>,
    tuple: &K,
    traffic: Traffic,
    timeouts: &Timeouts,
) -> Tracked {
    // Milliseconds of error do not matter in seconds.
    track_at(flows, tuple, traffic, timeouts, coarse_now_ns())
}

/// As [`track`], at a time that is known already: `CLOCK_MONOTONIC`, nanoseconds.
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

/// The entry that a packet with this tuple belongs to, and which side of the flow sent it. One whose time
/// is over is none: it waits to be collected. The tuple becomes that of the entry, if there is one.
#[inline(always)]
fn live<K: Tuple>(
    map: &impl FlowMap<K, CtEntry>,
    tuple: &mut K,
    now: u32,
) -> Option<(*mut CtEntry, Side)> {
    let key: &K = tuple;
    if let Some(entry) = map.get_ptr_mut(key) {
        // SAFETY: a map value stays valid memory for the program's run.
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
    if made == Err(E2BIG) && map.make_room() {
        made = map.insert(tuple, &entry, u64::from(BPF_NOEXIST));
    }
    if made == Err(EEXIST) {
        // Another CPU has made it in the meantime, or one whose time is over stands there.
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
    tell_flow(EVENT_CT_CREATED, tuple, &entry);
    Tracked::New
}

/// Takes what a segment says about the state of its connection in. `false` when it cannot be part of it.
///
/// # Safety
///
/// `entry` must point to a value of a conntrack map.
#[inline(always)]
pub(crate) unsafe fn advance<K: Tuple>(
    entry: *mut CtEntry,
    tuple: &K,
    side: Side,
    tcp_flags: u8,
) -> bool {
    // SAFETY: the caller's promise; the word is aligned and inside the entry.
    let word = unsafe { entry.cast::<u8>().add(CT_STATE_OFFSET).cast::<u32>() };
    for _ in 0..STATE_ATTEMPTS {
        // SAFETY: as above. Volatile: in one piece, and anew each time.
        let last = unsafe { ptr::read_volatile(word) };
        let step = tcp_step(
            last,
            tuple.direction().into(),
            (side == Side::Reply).into(),
            tcp_flags.into(),
        );
        if step & REFUSED != 0 {
            return false;
        }
        if step as u32 == last {
            return true;
        }
        // SAFETY: as above. For why an intrinsic see `add`.
        let (seen, _) = unsafe {
            atomic_cxchg::<u32, { AtomicOrdering::SeqCst }, { AtomicOrdering::SeqCst }>(
                word,
                last,
                step as u32,
            )
        };
        if seen == last {
            // SAFETY: as above.
            tell_turn(last, step as u32, tuple, unsafe { &*entry });
            return true;
        }
    }
    true
}

/// Tells whoever monitors that a segment closed a connection, or opened a closed one anew.
#[inline(always)]
fn tell_turn<K: Tuple>(before: u32, after: u32, tuple: &K, entry: &CtEntry) {
    let was_closed = CtState::from_word(before).is_closed();
    let is_closed = CtState::from_word(after).is_closed();
    if is_closed != was_closed {
        let kind = if is_closed {
            EVENT_CT_CLOSED
        } else {
            EVENT_CT_REOPENED
        };
        tell_flow(kind, tuple, entry);
    }
}

/// Bit of [`tcp_step`]'s result: the segment cannot be part of the connection.
const REFUSED: u64 = 1 << 32;

/// The state of a connection, as a word, after a segment; see [`tcp::next`].
///
/// A function of its own in the kernel too: the verifier looks at its many ways once, and not once for
/// each of those that lead there.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn tcp_step(word: u32, opened: u32, is_reply: u32, tcp_flags: u32) -> u64 {
    let side = if is_reply == 0 {
        Side::Original
    } else {
        Side::Reply
    };
    let step = tcp::next(
        CtState::from_word(word),
        opened as u8,
        side,
        tcp_flags as u8,
    );
    let refused = if step.outcome == Outcome::Invalid {
        REFUSED
    } else {
        0
    };
    u64::from(step.state.word()) | refused
}

/// Adds to an entry what happened at `now_ns`: `CLOCK_MONOTONIC`, nanoseconds.
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
    // SAFETY: the caller's promise; map values stay valid memory for the program's run. Counters are added
    // to atomically, since several CPUs may carry one flow; the rest are single words of which the last
    // writer's serves.
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

/// Adds to a counter that several CPUs write.
///
/// # Safety
///
/// `counter` must point to a counter in a map value.
#[inline(always)]
pub unsafe fn add(counter: *mut u64, value: u64) {
    // SAFETY: the caller's promise; map values are aligned to eight bytes. The standard library offers
    // no `fetch_add` on targets without compare-and-swap, which BPF is to it; the unused result makes
    // this one `lock add`.
    unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(counter, value) };
}
