//! What the segments of a TCP connection do to its conntrack entry.
//!
//! The states are those of RFC 9293 section 3.3.2 as seen by an observer between the two hosts, named as in
//! nf_conntrack (`net/netfilter/nf_conntrack_proto_tcp.c`), and so are the transitions. They are derived
//! from bits that are only added, but for those of a RST ([`CtState`]), so three of them differ:
//!
//! - A retransmitted FIN is distinguished from one of the other side: it does not lead to LAST_ACK.
//! - LAST_ACK becomes TIME_WAIT once both sides have acknowledged after the other's FIN.
//! - A SYN of the original side in LAST_ACK reopens the connection, as in TIME_WAIT and CLOSE, since the
//!   last acknowledgement may have taken another path or been lost before it came here. In CLOSE it does so
//!   whoever sent the RST.
//!
//! Sequence numbers are ignored, so a RST that its receiver will refuse (RFC 9293 section 3.10.7.4) closes
//! the entry too. The entry still serves the connection, with the closing timeout from each packet on. It is
//! open again once the side in whose name the RST came sends an ACK or FIN, and the other side one after it:
//! who has reset a connection answers with nothing but RSTs. The first one alone may have been sent before the
//! RST, which overtook it.

#[cfg(test)]
mod tests;

use super::{
    CT_RESET_DOUBTED, CT_RX_ACKED_FIN, CT_RX_CLOSING, CT_SEEN_NON_SYN, CT_TX_ACKED_FIN,
    CT_TX_CLOSING, CtState, Outcome, Side, TUPLE_IN,
};
use crate::tcp::{ACK, FIN, RST, SYN};

/// Urgent data ends at the urgent pointer.
const URG: u8 = 0x20;
/// Flags that a connection that is opened anew forgets.
const OF_ONE_CONNECTION: u16 = CT_RX_CLOSING
    | CT_TX_CLOSING
    | CT_SEEN_NON_SYN
    | CT_RX_ACKED_FIN
    | CT_TX_ACKED_FIN
    | CT_RESET_DOUBTED;

/// State of a connection, as far as it can be told from between the two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpState {
    /// No segment was seen.
    None,
    /// A SYN was seen.
    SynSent,
    /// A SYN of both sides: they open it at once (RFC 9293 section 3.5, figure 8).
    SynSent2,
    /// A SYN was acknowledged.
    SynRecv,
    /// The handshake is over, or was not seen.
    Established,
    /// A FIN was seen.
    FinWait,
    /// A FIN, and an acknowledgement of the other side after it.
    CloseWait,
    /// A FIN of each side.
    LastAck,
    /// A FIN of each side, and an acknowledgement of each after the other's.
    TimeWait,
    /// A RST was seen.
    Close,
}

impl TcpState {
    /// The name that `conntrack -L` prints.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "NONE",
            Self::SynSent => "SYN_SENT",
            Self::SynSent2 => "SYN_SENT2",
            Self::SynRecv => "SYN_RECV",
            Self::Established => "ESTABLISHED",
            Self::FinWait => "FIN_WAIT",
            Self::CloseWait => "CLOSE_WAIT",
            Self::LastAck => "LAST_ACK",
            Self::TimeWait => "TIME_WAIT",
            Self::Close => "CLOSE",
        }
    }

    /// The state of a TCP connection's entry.
    #[inline(always)]
    pub const fn of(state: CtState) -> Self {
        let (rx, tx) = (state.rx_flags_seen(), state.tx_flags_seen());
        if (rx | tx) & RST != 0 {
            return Self::Close;
        }
        if state.is_closed() {
            return if state.has(CT_RX_ACKED_FIN | CT_TX_ACKED_FIN) {
                Self::TimeWait
            } else {
                Self::LastAck
            };
        }
        if state.has(CT_RX_CLOSING) || state.has(CT_TX_CLOSING) {
            return if state.has(CT_RX_ACKED_FIN) || state.has(CT_TX_ACKED_FIN) {
                Self::CloseWait
            } else {
                Self::FinWait
            };
        }
        if state.has(CT_SEEN_NON_SYN) {
            return Self::Established;
        }
        // Until then nothing but SYN and SYN/ACK is taken in.
        if (rx | tx) & ACK != 0 {
            Self::SynRecv
        } else if rx & tx & SYN != 0 {
            Self::SynSent2
        } else if (rx | tx) & SYN != 0 {
            Self::SynSent
        } else {
            Self::None
        }
    }
}

/// What a segment made of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The entry's state after it.
    pub state: CtState,
    /// What it is to the connection. [`Outcome::Invalid`]: the entry is to be left as it is, its
    /// counters and its time too, and where there is none, none is to be made.
    pub outcome: Outcome,
    /// Whether it closed the connection.
    pub closed: bool,
}

/// What a segment asks for, by its flags.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Syn,
    SynAck,
    Fin,
    Ack,
    Rst,
}

impl Kind {
    /// `None` for flags that contradict each other, as `tcp_valid_flags` has them.
    #[inline(always)]
    const fn of(tcp_flags: u8) -> Option<Self> {
        const SYN_ACK: u8 = SYN | ACK;
        const RST_ACK: u8 = RST | ACK;
        const FIN_ACK: u8 = FIN | ACK;
        // Urgent data may come with an opening, data or the end.
        let flags = tcp_flags & (FIN | SYN | RST | ACK | URG);
        match flags & !URG {
            SYN => Some(Self::Syn),
            FIN_ACK => Some(Self::Fin),
            ACK => Some(Self::Ack),
            _ if flags & URG != 0 => None,
            SYN_ACK => Some(Self::SynAck),
            RST | RST_ACK => Some(Self::Rst),
            _ => None,
        }
    }
}

/// What is done about a segment.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Effect {
    /// Take it in.
    Take,
    /// Forget the closed connection, and take it in.
    Reopen,
    /// Let it pass as part of the connection: its receiver knows better what it means.
    Ignore,
    /// It cannot be part of the connection.
    Refuse,
}

/// Takes in a segment of `side` with these flags. `state` is that of its entry, or
/// [`CtState::default`] where there is none, and `direction` the one in the entry's tuple, which is
/// that of the connection's first segment.
#[inline(always)]
pub const fn next(state: CtState, direction: u8, side: Side, tcp_flags: u8) -> Step {
    let is_rx = (direction == TUPLE_IN) == matches!(side, Side::Original);
    let kind = Kind::of(tcp_flags);
    let valid = match kind {
        Some(Kind::Ack | Kind::Fin) => after_reset(state, is_rx),
        _ => state,
    };
    let before = TcpState::of(valid);
    let effect = match kind {
        Some(kind) => effect(before, side, kind),
        None => Effect::Refuse,
    };
    let state_after = match effect {
        Effect::Take => take(valid, is_rx, side, tcp_flags),
        Effect::Reopen => {
            let kept = CtState::new(state.flags() & !OF_ONE_CONNECTION, 0, 0);
            take(kept, is_rx, side, tcp_flags)
        }
        Effect::Ignore | Effect::Refuse => state,
    };
    Step {
        state: state_after,
        outcome: match effect {
            Effect::Refuse => Outcome::Invalid,
            Effect::Reopen => Outcome::Reopened,
            Effect::Take if matches!(before, TcpState::None) => Outcome::New,
            Effect::Take | Effect::Ignore => side.outcome(),
        },
        closed: state_after.is_closed() && !state.is_closed(),
    }
}

/// The state as a side that sends no RST leaves those that there were, if the handshake was over.
#[inline(always)]
const fn after_reset(state: CtState, is_rx: bool) -> CtState {
    let (rx, tx) = (state.rx_flags_seen(), state.tx_flags_seen());
    if (rx | tx) & RST == 0 || !state.has(CT_SEEN_NON_SYN) {
        return state;
    }
    let (own, other) = if is_rx { (rx, tx) } else { (tx, rx) };
    if own & RST != 0 {
        if other & RST == 0 {
            return state.with(CT_RESET_DOUBTED);
        }
        let (rx, tx) = if is_rx {
            (rx & !RST, tx)
        } else {
            (rx, tx & !RST)
        };
        return CtState::new(state.flags(), rx, tx);
    }
    if !state.has(CT_RESET_DOUBTED) {
        return state;
    }
    let mut flags = state.flags() & !CT_RESET_DOUBTED;
    if rx & FIN == 0 {
        flags &= !CT_RX_CLOSING;
    }
    if tx & FIN == 0 {
        flags &= !CT_TX_CLOSING;
    }
    CtState::new(flags, rx & !RST, tx & !RST)
}

/// The transitions, by what was seen before.
#[inline(always)]
const fn effect(before: TcpState, side: Side, kind: Kind) -> Effect {
    use TcpState::{Close, LastAck, None, SynRecv, SynSent, SynSent2, TimeWait};
    match (kind, side) {
        (Kind::Syn, Side::Original) => match before {
            None | SynSent | SynSent2 => Effect::Take,
            LastAck | TimeWait | Close => Effect::Reopen,
            _ => Effect::Ignore,
        },
        (Kind::Syn, Side::Reply) => match before {
            SynSent | SynSent2 => Effect::Take,
            _ => Effect::Refuse,
        },
        (Kind::SynAck, _) => match before {
            None => Effect::Refuse,
            SynSent if matches!(side, Side::Original) => Effect::Refuse,
            SynSent | SynSent2 | SynRecv => Effect::Take,
            _ => Effect::Ignore,
        },
        (Kind::Fin, _) => match before {
            None | SynSent | SynSent2 => Effect::Refuse,
            _ => Effect::Take,
        },
        (Kind::Ack, Side::Original) => match before {
            SynSent | SynSent2 => Effect::Refuse,
            _ => Effect::Take,
        },
        (Kind::Ack, Side::Reply) => match before {
            None => Effect::Refuse,
            // Of a connection of before that only this side remembers (RFC 9293 section 3.5.1).
            SynSent | SynSent2 => Effect::Ignore,
            _ => Effect::Take,
        },
        (Kind::Rst, _) => match before {
            None => Effect::Refuse,
            _ => Effect::Take,
        },
    }
}

/// The state with the segment's bits added.
#[inline(always)]
const fn take(state: CtState, is_rx: bool, side: Side, tcp_flags: u8) -> CtState {
    let (rx, tx) = (state.rx_flags_seen(), state.tx_flags_seen());
    let (rx, tx, other, closing, acked_fin) = if is_rx {
        (rx | tcp_flags, tx, tx, CT_RX_CLOSING, CT_RX_ACKED_FIN)
    } else {
        (rx, tx | tcp_flags, rx, CT_TX_CLOSING, CT_TX_ACKED_FIN)
    };
    let mut flags = state.flags();
    if tcp_flags & RST != 0 {
        flags = flags & !CT_RESET_DOUBTED | CT_RX_CLOSING | CT_TX_CLOSING;
    } else if tcp_flags & SYN == 0 {
        // An acknowledgement of the replying side does not end the handshake, it may answer a SYN that
        // came late. It does where both sides open, and the original one has sent a SYN/ACK.
        let ends_handshake =
            matches!(side, Side::Original) || tcp_flags & FIN != 0 || other & ACK != 0;
        if ends_handshake {
            flags |= CT_SEEN_NON_SYN;
        }
        if tcp_flags & FIN != 0 {
            flags |= closing;
        }
        if other & FIN != 0 {
            flags |= acked_fin;
        }
    }
    CtState::new(flags, rx, tx)
}
