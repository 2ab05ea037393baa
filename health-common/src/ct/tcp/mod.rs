//! How the segments of a TCP connection change its conntrack entry.
//!
//! The states are those of RFC 9293 section 3.3.2, as seen by an observer between the two hosts. Their names and
//! transitions follow nf_conntrack (`net/netfilter/nf_conntrack_proto_tcp.c`). Because states are derived from bits
//! that are only ever added, except those of a RST ([`CtState`]), there are three differences:
//!
//! - A retransmitted FIN is distinguished from the other side's FIN: it does not lead to LAST_ACK.
//! - LAST_ACK becomes TIME_WAIT once each side has sent an acknowledgement after the other's FIN.
//! - A SYN from the original side in LAST_ACK reopens the connection, as in TIME_WAIT and CLOSE, since the last
//!   acknowledgement may have taken another path or been lost before it reached this host. In CLOSE, it does not matter
//!   which side sent the RST.
//!
//! Sequence numbers are ignored, so a RST that its receiver will reject (RFC 9293 section 3.10.7.4) closes the entry
//! too. The entry still serves the connection; each packet restarts the closing timeout. The connection reopens once
//! the purported sender of the RST sends an ACK or FIN and the other side then sends one too: a host that has reset a
//! connection answers only with RSTs. The first ACK or FIN alone is not enough: it may have been sent before the RST
//! and overtaken by it.

#[cfg(test)]
mod tests;

use super::{
    CT_RESET_DOUBTED, CT_RX_ACKED_FIN, CT_RX_CLOSING, CT_SEEN_NON_SYN, CT_TX_ACKED_FIN,
    CT_TX_CLOSING, CtState, Outcome, Side, TUPLE_IN,
};
use crate::tcp::{ACK, FIN, RST, SYN};

/// The urgent pointer, which marks the end of urgent data, is valid.
const URG: u8 = 0x20;
/// Flags that are cleared when a connection is reopened.
const OF_ONE_CONNECTION: u16 = CT_RX_CLOSING
    | CT_TX_CLOSING
    | CT_SEEN_NON_SYN
    | CT_RX_ACKED_FIN
    | CT_TX_ACKED_FIN
    | CT_RESET_DOUBTED;

/// State of a connection, as far as an observer between the two hosts can tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpState {
    /// No segment has been seen.
    None,
    /// A SYN has been seen.
    SynSent,
    /// A SYN from each side: simultaneous open (RFC 9293 section 3.5, figure 8).
    SynSent2,
    /// A SYN has been acknowledged.
    SynRecv,
    /// The handshake is over, or was never seen.
    Established,
    /// A FIN has been seen.
    FinWait,
    /// A FIN has been seen, followed by an acknowledgement from the other side.
    CloseWait,
    /// A FIN from each side.
    LastAck,
    /// A FIN from each side, followed by an acknowledgement from the other side.
    TimeWait,
    /// A RST has been seen.
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
        // Before the end of the handshake, only SYN and SYN/ACK are recorded.
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

/// How a segment changed an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The entry's state after the segment.
    pub state: CtState,
    /// How the segment relates to the connection. With [`Outcome::Invalid`], the caller must leave the entry unchanged,
    /// including its counters and times, and must not create one.
    pub outcome: Outcome,
    /// Whether this segment closed the connection.
    pub closed: bool,
}

/// Type of a segment, derived from its flags.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Syn,
    SynAck,
    Fin,
    Ack,
    Rst,
}

impl Kind {
    /// `None` for contradictory flags, as in nf_conntrack's `tcp_valid_flags`.
    #[inline(always)]
    const fn of(tcp_flags: u8) -> Option<Self> {
        const SYN_ACK: u8 = SYN | ACK;
        const RST_ACK: u8 = RST | ACK;
        const FIN_ACK: u8 = FIN | ACK;
        // Urgent data may come with a SYN, data or a FIN.
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

/// What to do with a segment.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Effect {
    /// Record the segment.
    Take,
    /// Forget the closed connection and record the segment.
    Reopen,
    /// Pass the segment as part of the connection without recording it: its receiver can interpret it better.
    Ignore,
    /// Refuse the segment: it cannot be part of the connection.
    Refuse,
}

/// Records a segment from `side` with these flags. `state` is the state of its entry, or [`CtState::default`] if there
/// is no entry; `direction` is the direction in the entry's tuple, which is that of the connection's first segment.
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

/// The state after a side sends an ACK or FIN, which may undo earlier RSTs if the handshake was over.
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

/// The effect of a segment, depending on the previous state.
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
            // From an earlier connection that only this side remembers (RFC 9293 section 3.5.1).
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
        // An acknowledgement from the replying side does not end the handshake, since it may answer an old SYN. In a
        // simultaneous open it does, because the original side has sent a SYN/ACK.
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
