//! `HEALTH_SOCKETS`: the backends to which the host's own sockets were redirected. `HEALTH_TURNS`: for unconnected
//! sockets that reach one backend through several addresses, the address to which the next answer belongs.

use crate::addr::Addr;
use crate::ct::{TUPLE_IN, TUPLE_OUT};

/// Entries of `HEALTH_SOCKETS`. A connected socket has two, an unconnected one has two per frontend.
pub const SOCKET_ENTRIES: u32 = 65_536;

/// Entries of `HEALTH_TURNS`: sockets that reach a backend through several addresses.
pub const TURN_ENTRIES: u32 = 1024;
/// Maximum number of successive addresses from which answers are outstanding.
pub const TURNS: usize = 4;
/// How long a process is assumed to wait for an answer, in milliseconds. A process that sends to another address after
/// that time has given up on the answer: otherwise it would have resent the request.
pub const GIVEN_UP_MS: u32 = 250;

/// The remote end of a socket. Without address and port: whatever the socket is connected to.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SocketKey {
    /// The kernel's number for the socket (`SO_COOKIE`), never reused.
    pub cookie: u64,
    /// With [`crate::ct::TUPLE_OUT`], the frontend's address; with [`crate::ct::TUPLE_IN`], the backend's.
    pub addr: Addr,
    /// The port at that address.
    pub port_be: u16,
    /// IP protocol number.
    pub protocol: u8,
    /// [`crate::ct::TUPLE_OUT`] for the destination of sent packets, [`crate::ct::TUPLE_IN`] for the source of
    /// received answers.
    pub direction: u8,
    /// Explicit padding, zero.
    pub pad: u32,
}

/// The address that replaces the socket's remote end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketFlow {
    /// With [`crate::ct::TUPLE_OUT`], the backend's address; with [`crate::ct::TUPLE_IN`], the frontend's.
    pub addr: Addr,
    /// The port at that address.
    pub port_be: u16,
    /// With [`crate::ct::TUPLE_IN`], whether an unconnected socket has received nothing since it last sent.
    pub is_asked: u16,
    /// Index of the backend in `HEALTH_BACKENDS`, where another backend may have replaced it.
    pub backend: u32,
    /// Number of the service port.
    pub service: u32,
}

impl SocketKey {
    /// The key for whatever a socket is connected to.
    #[inline(always)]
    pub const fn connected(cookie: u64, protocol: u8) -> Self {
        Self {
            cookie,
            addr: Addr { words_be: [0; 4] },
            port_be: 0,
            protocol,
            direction: TUPLE_OUT,
            pad: 0,
        }
    }

    /// Whether this is a key made by [`Self::connected`].
    #[inline(always)]
    pub const fn is_connected(&self) -> bool {
        self.port_be == 0
    }

    /// The key for answers from the backend with this address and port.
    #[inline(always)]
    pub const fn answers(&self, addr: Addr, port_be: u16) -> Self {
        Self {
            addr,
            port_be,
            direction: TUPLE_IN,
            ..*self
        }
    }
}

/// Consecutive unanswered datagrams from a socket to one address.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Turn {
    /// The destination: a frontend or the backend itself.
    pub addr: Addr,
    /// The port at that address.
    pub port_be: u16,
    /// Number of datagrams.
    pub datagrams: u16,
    /// When the last one was sent: lower bits of `CLOCK_MONOTONIC` in milliseconds.
    pub sent_ms: u32,
}

/// The addresses through which a socket has reached one backend, in order, starting with the first unanswered one.
///
/// A backend's answers look the same whichever address the socket used, so they are assumed to arrive in the order of
/// the requests. If threads use one socket concurrently, answers may be misattributed.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Turns {
    /// The first [`Self::len`] entries are valid.
    pub turns: [Turn; TURNS],
    /// Number of valid entries.
    pub len: u32,
    /// Whether all datagrams of the only entry have been answered. Further answers are attributed to that entry too.
    pub is_over: u32,
}

impl Turns {
    /// Records a sent datagram.
    #[inline(always)]
    pub fn send(&mut self, addr: Addr, port_be: u16, now_ms: u32) {
        self.forget_given_up(now_ms);
        let len = self.len as usize;
        for (place, turn) in self.turns.iter_mut().enumerate() {
            if place + 1 == len && turn.addr == addr && turn.port_be == port_be {
                turn.datagrams = turn.datagrams.saturating_add(1);
                turn.sent_ms = now_ms;
                return;
            }
        }
        if len >= TURNS {
            self.shift();
        }
        let last = self.len as usize;
        for (place, turn) in self.turns.iter_mut().enumerate() {
            if place == last {
                *turn = Turn {
                    addr,
                    port_be,
                    datagrams: 1,
                    sent_ms: now_ms,
                };
            }
        }
        self.len += 1;
    }

    /// Records a received answer. Returns the address that was presumably asked.
    #[inline(always)]
    pub fn receive(&mut self) -> Option<(Addr, u16)> {
        if self.len == 0 {
            return None;
        }
        let first = &mut self.turns[0];
        let from = (first.addr, first.port_be);
        if first.datagrams > 1 {
            first.datagrams -= 1;
        } else if self.len > 1 {
            self.shift();
        } else {
            self.is_over = 1;
        }
        Some(from)
    }

    /// Removes entries that have been answered or no longer await an answer.
    #[inline(always)]
    fn forget_given_up(&mut self, now_ms: u32) {
        if self.is_over != 0 {
            (self.len, self.is_over) = (0, 0);
        }
        for _ in 0..TURNS {
            if self.len > 0 && now_ms.wrapping_sub(self.turns[0].sent_ms) > GIVEN_UP_MS {
                self.shift();
            }
        }
    }

    #[inline(always)]
    fn shift(&mut self) {
        for place in 1..TURNS {
            self.turns[place - 1] = self.turns[place];
        }
        self.len -= 1;
    }
}

crate::map_types!(SocketKey = 32, SocketFlow = 28, Turn = 24, Turns = 104);

#[cfg(test)]
mod tests {
    use super::*;

    const SERVICE: (Addr, u16) = (
        Addr {
            words_be: [0, 0, 0, 1],
        },
        1,
    );
    const DIRECT: (Addr, u16) = (
        Addr {
            words_be: [0, 0, 0, 2],
        },
        2,
    );

    fn asked(turns: &mut Turns, to: (Addr, u16), now_ms: u32) {
        turns.send(to.0, to.1, now_ms);
    }

    #[test]
    fn answers_in_turn_are_from_where_was_asked() {
        let mut turns = Turns::default();
        for now_ms in 0..100 {
            let to = if now_ms % 3 == 0 { SERVICE } else { DIRECT };
            asked(&mut turns, to, now_ms);
            assert_eq!(turns.receive(), Some(to), "{now_ms}");
        }
    }

    #[test]
    fn answers_come_in_the_order_of_the_questions() {
        let mut turns = Turns::default();
        let order = [SERVICE, SERVICE, DIRECT, SERVICE, DIRECT, DIRECT];
        for to in order {
            asked(&mut turns, to, 7);
        }
        for to in order {
            assert_eq!(turns.receive(), Some(to));
        }
        assert_eq!(turns.receive(), Some(DIRECT), "a second answer");
    }

    #[test]
    fn a_lost_answer_is_given_up() {
        let mut turns = Turns::default();
        asked(&mut turns, SERVICE, u32::MAX - 10);
        asked(&mut turns, DIRECT, GIVEN_UP_MS);
        assert_eq!(turns.receive(), Some(DIRECT));
        asked(&mut turns, SERVICE, GIVEN_UP_MS);
        assert_eq!(turns.receive(), Some(SERVICE));
    }

    #[test]
    fn more_addresses_in_a_row_than_there_is_room_for_push_out_the_first() {
        let mut turns = Turns::default();
        for _ in 0..3 {
            asked(&mut turns, SERVICE, 0);
            asked(&mut turns, DIRECT, 0);
        }
        assert_eq!(turns.len as usize, TURNS);
        for to in [SERVICE, DIRECT, SERVICE, DIRECT, DIRECT] {
            assert_eq!(turns.receive(), Some(to));
        }
    }

    #[test]
    fn nothing_was_asked() {
        assert_eq!(Turns::default().receive(), None);
    }
}
