//! The same endpoint traffic as seen by this project's conntrack and by the kernel's nf_conntrack. After each step,
//! both have the same entry in the same state, or the difference is one that docs/conntrack.md lists and justifies.

use std::collections::BTreeSet;
use std::fmt;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::process::Command;
use std::time::Duration;

use Difference::*;
use anyhow::{Context as _, ensure};
use health_common::ct::Timeouts;
use health_net::netns::NetNs;
use nix::sys::signal::Signal;
use socket2::{Domain, SockRef, Socket, Type};
use tests::conntrack::lab::{answering, silent};
use tests::conntrack::script::{
    ACK, About, Content, ECN, FIN, RST, SYN, Segment, Side, Talk, URG, segment,
};
use tests::conntrack::{Entry, EntrylessPackets, Kernel, Lab, Ours, TrafficCount, Way};
use tests::process::run;
use tests::{PATIENCE, wait_for};

const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/conntrack.md");
/// Heading of the table of differences in the docs.
const HEADING: &str = "### Where nf_conntrack differs";
/// Minimum number of flows to run with each IP version.
const FLOWS_AT_LEAST: usize = 40;
const FIRST_PORT: u16 = 20_000;
/// Server port.
const ANSWERING_PORT: u16 = 7_000;
/// Lifetime of entries in seconds.
const LONG: u32 = 300;

/// Why the two conntracks report a flow differently. docs/conntrack.md lists each reason by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Difference {
    LetPass,
    WhoseFin,
    LastAcknowledgement,
    Refused,
    OpenedAnew,
    OpenedAnewCounters,
    OpenedByOther,
    AnswerToLetPass,
    SequenceNumbers,
    Checksums,
    Sctp,
    UdpLite,
    EchoReply,
    OtherIcmp,
    Advice,
    Fragments,
}

impl Difference {
    const ALL: [Self; 16] = [
        Self::LetPass,
        Self::WhoseFin,
        Self::LastAcknowledgement,
        Self::Refused,
        Self::OpenedAnew,
        Self::OpenedAnewCounters,
        Self::OpenedByOther,
        Self::AnswerToLetPass,
        Self::SequenceNumbers,
        Self::Checksums,
        Self::Sctp,
        Self::UdpLite,
        Self::EchoReply,
        Self::OtherIcmp,
        Self::Advice,
        Self::Fragments,
    ];

    /// The name of the difference in the docs.
    fn name(self) -> &'static str {
        match self {
            Self::LetPass => "Segments that are let pass",
            Self::WhoseFin => "Whose FIN it is",
            Self::LastAcknowledgement => "The last acknowledgement",
            Self::Refused => "RST before an answer",
            Self::OpenedAnew => "SYN after the end",
            Self::OpenedAnewCounters => "Counters of a connection opened anew",
            Self::OpenedByOther => "Opened anew by the other side",
            Self::AnswerToLetPass => "Answer to a SYN that was let pass",
            Self::SequenceNumbers => "Sequence numbers",
            Self::Checksums => "Checksums",
            Self::Sctp => "States of SCTP",
            Self::UdpLite => "UDP-Lite",
            Self::EchoReply => "Echo replies without a request",
            Self::OtherIcmp => "Other requests of ICMP",
            Self::Advice => "Source quench and redirects",
            Self::Fragments => "Fragments",
        }
    }

    /// The only fields in which the difference shows.
    fn shows_in(self) -> &'static [Field] {
        match self {
            Self::LetPass => &[Field::Counters],
            Self::WhoseFin => &[Field::State],
            Self::LastAcknowledgement => &[Field::State],
            Self::Refused => &[Field::State],
            Self::OpenedAnew => &[Field::State, Field::Counters],
            Self::OpenedAnewCounters => &[Field::Replied, Field::Counters],
            Self::OpenedByOther => &[
                Field::State,
                Field::Tuple,
                Field::Replied,
                Field::Counters,
                Field::Noted,
            ],
            Self::AnswerToLetPass => &[Field::State],
            Self::SequenceNumbers => &[Field::State, Field::Counters, Field::Noted],
            Self::Checksums => &[Field::State, Field::Counters, Field::Noted],
            Self::Sctp => &[Field::State],
            Self::UdpLite => &[Field::State, Field::Noted],
            Self::EchoReply => &[Field::State, Field::Noted],
            Self::OtherIcmp => &[Field::State],
            Self::Advice => &[Field::Noted],
            Self::Fragments => &[Field::Counters, Field::Noted],
        }
    }
}

/// A compared property.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Field {
    /// Whether there is an entry, and its state.
    State,
    /// Addresses, ports, protocol, and the side that opened the flow.
    Tuple,
    /// Whether the other side has answered.
    Replied,
    /// Packets and bytes in each direction during the step.
    Counters,
    /// Errors about a flow, and packets that belong to no flow, during the step.
    Noted,
}

/// What one conntrack shows after a step.
#[derive(Clone, Debug, Default)]
struct EntryView {
    entries: Vec<Entry>,
    there: TrafficCount,
    back: TrafficCount,
    noted: EntrylessPackets,
}

impl EntryView {
    /// The state's name: `""` for protocols without states, `"-"` without an entry.
    fn state(&self) -> &str {
        match &self.entries[..] {
            [] => "-",
            [entry] => &entry.state,
            _ => "several entries",
        }
    }

    fn differs(&self, other: &Self) -> BTreeSet<Field> {
        let (mine, theirs) = (self.entries.first(), other.entries.first());
        let mut fields = BTreeSet::new();
        let mut compare = |field, same: bool| {
            if !same {
                fields.insert(field);
            }
        };
        compare(Field::State, self.state() == other.state());
        if let (Some(mine), Some(theirs)) = (mine, theirs) {
            compare(Field::Tuple, mine.tuple == theirs.tuple);
            compare(Field::Replied, mine.replied == theirs.replied);
            let counters = |shown: &Self| (shown.there, shown.back);
            compare(Field::Counters, counters(self) == counters(other));
        }
        compare(Field::Noted, self.noted == other.noted);
        fields
    }
}

impl fmt::Display for EntryView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:11}", format!("{:?}", self.state()))?;
        if let Some(entry) = self.entries.first() {
            let tuple = &entry.tuple;
            write!(
                f,
                " {} {}:{} > {}:{}{} +{}/{} +{}/{}",
                tuple.protocol,
                tuple.source,
                tuple.source_port,
                tuple.destination,
                tuple.destination_port,
                if entry.replied { " replied" } else { "" },
                self.there.packets,
                self.there.bytes,
                self.back.packets,
                self.back.bytes,
            )?;
        }
        if self.noted != EntrylessPackets::default() {
            write!(
                f,
                " related +{} invalid +{}",
                self.noted.related, self.noted.invalid
            )?;
        }
        Ok(())
    }
}

/// One packet of a flow, or several that belong together, and what both conntracks show afterwards.
struct Step {
    side: Side,
    content: Content,
    ours: &'static str,
    theirs: &'static str,
    differences: Vec<Difference>,
}

impl Step {
    /// Expects the kernel to differ in this way.
    fn but(mut self, difference: Difference) -> Self {
        self.differences.push(difference);
        self
    }

    /// Expects the kernel to differ in this way and to show this state.
    fn but_in(self, difference: Difference, theirs: &'static str) -> Self {
        Self {
            theirs,
            ..self.but(difference)
        }
    }
}

fn step(side: Side, content: Content, state: &'static str) -> Step {
    Step {
        side,
        content,
        ours: state,
        theirs: state,
        differences: Vec::new(),
    }
}

/// A packet from the side that opens the flow, and the state afterwards.
fn there(content: impl Into<SentContent>, state: &'static str) -> Step {
    step(Side::Opener, content.into().0, state)
}

/// A packet from the other side, and the state afterwards.
fn back(content: impl Into<SentContent>, state: &'static str) -> Step {
    step(Side::Answerer, content.into().0, state)
}

/// TCP flags alone, a segment, or any other content.
struct SentContent(Content);

impl From<u8> for SentContent {
    fn from(flags: u8) -> Self {
        segment(flags).into()
    }
}

impl From<Segment> for SentContent {
    fn from(segment: Segment) -> Self {
        Self(Content::Segment(segment))
    }
}

impl From<Content> for SentContent {
    fn from(content: Content) -> Self {
        Self(content)
    }
}

/// The hosts at the two ends of a flow.
#[derive(Clone, Copy)]
struct Run {
    opener: Way,
    is_v4: bool,
}

const ALL_RUNS: [Run; 4] = [
    Run {
        opener: Way::Out,
        is_v4: true,
    },
    Run {
        opener: Way::In,
        is_v4: true,
    },
    Run {
        opener: Way::Out,
        is_v4: false,
    },
    Run {
        opener: Way::In,
        is_v4: false,
    },
];

struct Flow {
    name: String,
    runs: Vec<Run>,
    steps: Vec<Step>,
}

fn flow(name: &str, steps: Vec<Step>) -> Flow {
    Flow {
        name: name.to_owned(),
        runs: ALL_RUNS.to_vec(),
        steps,
    }
}

/// A flow with the handshake and then these steps.
fn opened(name: &str, steps: Vec<Step>) -> Flow {
    let mut all = vec![
        there(SYN, "SYN_SENT"),
        back(SYN | ACK, "SYN_RECV"),
        there(ACK, "ESTABLISHED"),
    ];
    all.extend(steps);
    flow(name, all)
}

/// A flow whose opener closes the connection first, and then these steps.
fn closed(name: &str, steps: Vec<Step>) -> Flow {
    let mut all = vec![
        there(FIN | ACK, "FIN_WAIT"),
        back(ACK, "CLOSE_WAIT"),
        back(FIN | ACK, "LAST_ACK"),
        there(ACK, "TIME_WAIT"),
    ];
    all.extend(steps);
    opened(name, all)
}

fn connections() -> Vec<Flow> {
    let data = || segment(ACK).data(500);
    vec![
        opened(
            "data both ways",
            vec![
                there(data(), "ESTABLISHED"),
                back(ACK, "ESTABLISHED"),
                back(data(), "ESTABLISHED"),
                there(ACK, "ESTABLISHED"),
            ],
        ),
        closed("closed by its opener", vec![]),
        opened(
            "closed by its answerer",
            vec![
                back(FIN | ACK, "FIN_WAIT"),
                there(ACK, "CLOSE_WAIT"),
                there(FIN | ACK, "LAST_ACK"),
                back(ACK, "TIME_WAIT"),
            ],
        ),
        opened(
            "closed by both at once",
            vec![
                there(FIN | ACK, "FIN_WAIT"),
                back(FIN | ACK, "LAST_ACK"),
                back(ACK, "LAST_ACK").but_in(LastAcknowledgement, "TIME_WAIT"),
                there(ACK, "TIME_WAIT"),
            ],
        ),
        opened(
            "closed by two segments",
            vec![
                there(FIN | ACK, "FIN_WAIT"),
                back(FIN | ACK, "LAST_ACK"),
                there(ACK, "TIME_WAIT"),
            ],
        ),
        opened(
            "half closed, data goes on",
            vec![
                there(FIN | ACK, "FIN_WAIT"),
                back(ACK, "CLOSE_WAIT"),
                back(data(), "CLOSE_WAIT"),
                there(ACK, "CLOSE_WAIT"),
                back(FIN | ACK, "LAST_ACK"),
                there(ACK, "TIME_WAIT"),
            ],
        ),
        opened("reset by its opener", vec![there(RST | ACK, "CLOSE")]),
        opened("reset by its answerer", vec![back(RST, "CLOSE")]),
        opened(
            "reset after data",
            vec![there(data(), "ESTABLISHED"), back(RST | ACK, "CLOSE")],
        ),
        opened(
            "reset while half closed",
            vec![
                there(FIN | ACK, "FIN_WAIT"),
                back(ACK, "CLOSE_WAIT"),
                back(data(), "CLOSE_WAIT"),
                there(RST, "CLOSE"),
            ],
        ),
        flow(
            "refused",
            vec![
                there(SYN, "SYN_SENT"),
                back(segment(RST | ACK).of_nothing(), "CLOSE").but_in(Refused, "-"),
            ],
        ),
        flow(
            "half open: no answer",
            vec![
                there(SYN, "SYN_SENT"),
                there(segment(SYN).again(), "SYN_SENT").but(LetPass),
                there(segment(SYN).again(), "SYN_SENT").but(LetPass),
            ],
        ),
        flow(
            "half open: the answer is not acknowledged",
            vec![
                there(SYN, "SYN_SENT"),
                back(SYN | ACK, "SYN_RECV"),
                back(segment(SYN | ACK).again(), "SYN_RECV").but(LetPass),
            ],
        ),
        flow(
            "SYN, SYN/ACK sent again",
            vec![
                there(SYN, "SYN_SENT"),
                there(segment(SYN).again(), "SYN_SENT").but(LetPass),
                back(SYN | ACK, "SYN_RECV"),
                there(segment(SYN).again(), "SYN_RECV").but(LetPass),
                back(segment(SYN | ACK).again(), "SYN_RECV"),
                there(ACK, "ESTABLISHED"),
            ],
        ),
        opened(
            "SYN/ACK comes again after the handshake",
            vec![
                back(segment(SYN | ACK).again(), "ESTABLISHED").but(LetPass),
                there(ACK, "ESTABLISHED"),
            ],
        ),
        flow(
            "given up before an answer",
            vec![
                there(SYN, "SYN_SENT"),
                there(RST, "CLOSE").but_in(Refused, "-"),
            ],
        ),
        flow(
            "given up after the SYN/ACK",
            vec![
                there(SYN, "SYN_SENT"),
                back(SYN | ACK, "SYN_RECV"),
                there(RST, "CLOSE"),
            ],
        ),
        flow(
            "opened by both at once",
            vec![
                there(SYN, "SYN_SENT"),
                back(SYN, "SYN_SENT2").but(LetPass),
                there(segment(SYN | ACK).again(), "SYN_RECV"),
                back(segment(SYN | ACK).again(), "SYN_RECV").but(LetPass),
                there(ACK, "ESTABLISHED"),
                back(ACK, "ESTABLISHED"),
            ],
        ),
        flow(
            "opened with data and with notification of congestion",
            vec![
                there(segment(SYN | ECN).data(20), "SYN_SENT"),
                back(SYN | ACK | 0x40, "SYN_RECV"),
                there(ACK, "ESTABLISHED"),
            ],
        ),
        opened(
            "data sent again",
            vec![
                there(data(), "ESTABLISHED"),
                there(data().again(), "ESTABLISHED"),
                back(ACK, "ESTABLISHED"),
                there(Content::Lost(data()), "ESTABLISHED"),
                there(data(), "ESTABLISHED"),
                there(data().ahead(-1_000), "ESTABLISHED"),
                back(ACK, "ESTABLISHED"),
            ],
        ),
        opened(
            "urgent data",
            vec![
                there(segment(ACK | URG).data(1), "ESTABLISHED"),
                back(ACK, "ESTABLISHED"),
            ],
        ),
        opened(
            "zero window",
            vec![
                there(data(), "ESTABLISHED"),
                back(segment(ACK).without_window(), "ESTABLISHED"),
                // A window probe, which is refused. Then the window opens again.
                there(segment(ACK).ahead(-1), "ESTABLISHED"),
                back(segment(ACK).without_window(), "ESTABLISHED"),
                back(ACK, "ESTABLISHED"),
                there(data(), "ESTABLISHED"),
            ],
        ),
        opened(
            "FIN sent again",
            vec![
                there(FIN | ACK, "FIN_WAIT"),
                there(segment(FIN | ACK).again(), "FIN_WAIT").but_in(WhoseFin, "LAST_ACK"),
                back(ACK, "CLOSE_WAIT").but_in(WhoseFin, "TIME_WAIT"),
                back(FIN | ACK, "LAST_ACK").but_in(WhoseFin, "TIME_WAIT"),
                there(ACK, "TIME_WAIT"),
            ],
        ),
        opened(
            "FIN sent again though acknowledged",
            vec![
                there(FIN | ACK, "FIN_WAIT"),
                back(ACK, "CLOSE_WAIT"),
                there(segment(FIN | ACK).again(), "CLOSE_WAIT").but_in(WhoseFin, "LAST_ACK"),
                back(ACK, "CLOSE_WAIT").but_in(WhoseFin, "TIME_WAIT"),
                back(FIN | ACK, "LAST_ACK").but_in(WhoseFin, "TIME_WAIT"),
                there(ACK, "TIME_WAIT"),
            ],
        ),
        opened(
            "the other side's FIN sent again",
            vec![
                there(FIN | ACK, "FIN_WAIT"),
                back(ACK, "CLOSE_WAIT"),
                back(FIN | ACK, "LAST_ACK"),
                back(segment(FIN | ACK).again(), "LAST_ACK"),
                there(ACK, "TIME_WAIT"),
                back(segment(FIN | ACK).again(), "TIME_WAIT"),
                there(ACK, "TIME_WAIT"),
            ],
        ),
        opened(
            "data overtaken by the FIN",
            vec![
                there(Content::Lost(data()), "ESTABLISHED"),
                there(FIN | ACK, "FIN_WAIT"),
                there(data().ahead(-501), "FIN_WAIT").but_in(WhoseFin, "CLOSE_WAIT"),
                back(ACK, "CLOSE_WAIT"),
            ],
        ),
        closed(
            "late segments in TIME_WAIT",
            vec![
                back(segment(ACK).ahead(-1), "TIME_WAIT"),
                there(ACK, "TIME_WAIT"),
            ],
        ),
        opened(
            "a segment after the reset",
            vec![
                there(RST | ACK, "CLOSE"),
                back(data(), "CLOSE"),
                there(RST, "CLOSE"),
            ],
        ),
        opened(
            "reset by a number of the past",
            vec![
                there(data(), "ESTABLISHED"),
                back(ACK, "ESTABLISHED"),
                there(segment(RST).ahead(-400), "CLOSE").but_in(SequenceNumbers, "ESTABLISHED"),
            ],
        ),
        opened(
            "reset by a number of the window",
            vec![
                there(data(), "ESTABLISHED"),
                back(ACK, "ESTABLISHED"),
                there(segment(RST).ahead(300), "CLOSE").but_in(SequenceNumbers, "ESTABLISHED"),
                back(ACK, "CLOSE").but_in(SequenceNumbers, "ESTABLISHED"),
                there(data(), "CLOSE").but_in(SequenceNumbers, "ESTABLISHED"),
                back(ACK, "ESTABLISHED"),
            ],
        ),
        opened(
            "data beyond the window",
            vec![
                there(data().ahead(1_000_000), "ESTABLISHED").but(SequenceNumbers),
                there(data(), "ESTABLISHED"),
            ],
        ),
        opened(
            "wrong checksum",
            vec![
                there(data().damaged(), "ESTABLISHED").but(Checksums),
                there(data().again(), "ESTABLISHED"),
            ],
        ),
        flow(
            "SYN with a wrong checksum",
            vec![there(segment(SYN).damaged(), "SYN_SENT").but_in(Checksums, "-")],
        ),
        closed(
            "opened again on the same ports",
            vec![
                there(SYN, "SYN_SENT").but(OpenedAnewCounters),
                back(SYN | ACK, "SYN_RECV"),
                there(ACK, "ESTABLISHED"),
                there(FIN | ACK, "FIN_WAIT"),
            ],
        ),
        opened(
            "opened again on the same ports after a reset",
            vec![
                back(RST | ACK, "CLOSE"),
                there(SYN, "SYN_SENT").but_in(OpenedAnew, "CLOSE"),
                back(SYN | ACK, "SYN_RECV"),
                there(ACK, "ESTABLISHED"),
            ],
        ),
        opened(
            "opened again though its end was lost",
            vec![
                there(FIN | ACK, "FIN_WAIT"),
                back(ACK, "CLOSE_WAIT"),
                back(FIN | ACK, "LAST_ACK"),
                there(SYN, "SYN_SENT").but_in(OpenedAnew, "LAST_ACK"),
                back(SYN | ACK, "SYN_RECV"),
                there(ACK, "ESTABLISHED"),
            ],
        ),
        closed(
            "opened again by the other side",
            vec![
                back(SYN, "TIME_WAIT").but_in(OpenedByOther, "SYN_SENT"),
                there(SYN | ACK, "TIME_WAIT").but_in(OpenedByOther, "SYN_RECV"),
                back(ACK, "TIME_WAIT").but_in(OpenedByOther, "ESTABLISHED"),
            ],
        ),
        opened(
            "opened again while it is open",
            vec![
                there(segment(SYN).ahead(70_000), "ESTABLISHED").but(LetPass),
                // A challenge ACK (RFC 5961 section 4) and the reset that answers it.
                back(ACK, "ESTABLISHED"),
                there(segment(RST), "CLOSE"),
            ],
        ),
        opened(
            "opened again where the node has missed the end",
            vec![
                there(SYN, "ESTABLISHED").but(LetPass),
                back(SYN | ACK, "ESTABLISHED").but_in(AnswerToLetPass, "SYN_RECV"),
                there(ACK, "ESTABLISHED"),
            ],
        ),
        flow(
            "SYN to a connection of which only its answerer knows",
            vec![
                there(SYN, "SYN_SENT"),
                back(segment(ACK).ahead(9_000), "SYN_SENT").but(LetPass),
                there(RST, "CLOSE"),
            ],
        ),
        flow(
            "met in its midst",
            vec![
                there(data(), "ESTABLISHED"),
                back(ACK, "ESTABLISHED"),
                back(data(), "ESTABLISHED"),
                there(FIN | ACK, "FIN_WAIT"),
            ],
        ),
        flow(
            "met at its end",
            vec![there(FIN | ACK, "-"), back(FIN | ACK, "-")],
        ),
        flow(
            "met at a reset",
            vec![there(RST, "-"), back(RST | ACK, "-")],
        ),
        flow("met at its SYN/ACK", vec![back(SYN | ACK, "-")]),
        flow(
            "impossible flags",
            vec![
                there(SYN | FIN, "-"),
                there(0, "-"),
                there(FIN, "-"),
                there(SYN | RST, "-"),
            ],
        ),
        opened(
            "impossible flags in an open connection",
            vec![
                there(SYN | FIN, "ESTABLISHED"),
                back(0, "ESTABLISHED"),
                back(FIN | RST, "ESTABLISHED"),
            ],
        ),
    ]
}

fn others() -> Vec<Flow> {
    use Content::{Chunk, Datagram, LiteDatagram, Message, Parts, Protocol, Reply, Request};
    let out_only = |flow: Flow| Flow {
        runs: vec![ALL_RUNS[0], ALL_RUNS[2]],
        ..flow
    };
    let in_only = |flow: Flow| Flow {
        runs: vec![ALL_RUNS[1], ALL_RUNS[3]],
        ..flow
    };
    let v4_only = |flow: Flow| Flow {
        runs: vec![ALL_RUNS[0], ALL_RUNS[1]],
        ..flow
    };
    vec![
        flow(
            "UDP one way",
            vec![there(Datagram(100), ""), there(Datagram(10), "")],
        ),
        flow(
            "UDP both ways",
            vec![
                there(Datagram(100), ""),
                back(Datagram(300), ""),
                there(Datagram(0), ""),
                back(Datagram(1_000), ""),
            ],
        ),
        flow(
            "UDP-Lite",
            vec![
                there(LiteDatagram, "").but_in(UdpLite, "-"),
                back(LiteDatagram, "").but_in(UdpLite, "-"),
            ],
        ),
        flow(
            "SCTP",
            vec![
                there(Chunk(1), "").but_in(Sctp, "CLOSED"),
                back(Chunk(2), "").but_in(Sctp, "COOKIE_WAIT"),
                there(Chunk(10), "").but_in(Sctp, "COOKIE_ECHOED"),
                back(Chunk(11), "").but_in(Sctp, "ESTABLISHED"),
                there(Chunk(7), "").but_in(Sctp, "SHUTDOWN_SENT"),
                back(Chunk(8), "").but_in(Sctp, "SHUTDOWN_ACK_SENT"),
                there(Chunk(14), "").but_in(Sctp, "CLOSED"),
            ],
        ),
        flow(
            "SCTP met at its end",
            vec![there(Chunk(8), "").but_in(Sctp, "SHUTDOWN_ACK_SENT")],
        ),
        flow("GRE", vec![there(Protocol(47), ""), back(Protocol(47), "")]),
        flow("ESP", vec![there(Protocol(50), ""), back(Protocol(50), "")]),
        flow(
            "an unknown protocol",
            vec![there(Protocol(253), ""), back(Protocol(253), "")],
        ),
        out_only(flow(
            "echo",
            vec![there(Request, ""), back(Reply, ""), there(Request, "")],
        )),
        out_only(flow(
            "echo without an answer",
            vec![there(Request, ""), there(Request, "")],
        )),
        in_only(flow(
            "echo answered at the veth",
            vec![there(Request, ""), there(Request, "")],
        )),
        flow(
            "echo reply to nothing",
            vec![back(Reply, "").but_in(EchoReply, "-")],
        ),
        v4_only(flow(
            "ICMP timestamps",
            vec![
                there(Message(13), "-").but_in(OtherIcmp, ""),
                back(Message(14), "-").but_in(OtherIcmp, ""),
            ],
        )),
        flow(
            "fragments in order",
            vec![there(Parts(3, &[0, 1, 2]), "").but(Fragments)],
        ),
        flow(
            "fragments both ways",
            vec![
                there(Parts(2, &[0, 1]), "").but(Fragments),
                back(Parts(4, &[0, 1, 2, 3]), "").but(Fragments),
            ],
        ),
        flow(
            "the last fragment before its turn",
            vec![there(Parts(3, &[0, 2, 1]), "").but(Fragments)],
        ),
        flow(
            "the first fragment last",
            vec![there(Parts(3, &[2, 1, 0]), "").but(Fragments)],
        ),
        flow(
            "a fragment twice",
            vec![there(Parts(3, &[0, 1, 1, 2]), "").but(Fragments)],
        ),
        out_only(flow(
            "fragments without the first",
            vec![there(Parts(3, &[1, 2]), "-")],
        )),
        // The node reassembles before the endpoint's programs see the packet, and waits for the first fragment.
        in_only(flow(
            "fragments without the first, to the endpoint",
            vec![there(Parts(3, &[1, 2]), "-")],
        )),
    ]
}

/// ICMP errors: type, code and name.
const ERRORS4: [(u8, u8, &str); 13] = [
    (3, 0, "network unreachable"),
    (3, 1, "host unreachable"),
    (3, 2, "protocol unreachable"),
    (3, 3, "port unreachable"),
    (3, 4, "fragmentation needed"),
    (3, 5, "source route failed"),
    (3, 13, "administratively prohibited"),
    (4, 0, "source quench"),
    (5, 1, "redirect"),
    (11, 0, "time exceeded on the way"),
    (11, 1, "time exceeded in reassembly"),
    (12, 0, "parameter problem"),
    (12, 2, "bad length"),
];
const ERRORS6: [(u8, u8, &str); 11] = [
    (1, 0, "no route"),
    (1, 1, "administratively prohibited"),
    (1, 3, "address unreachable"),
    (1, 4, "port unreachable"),
    (1, 5, "source address failed policy"),
    (2, 0, "packet too big"),
    (3, 0, "hop limit exceeded"),
    (3, 1, "time exceeded in reassembly"),
    (4, 0, "erroneous header"),
    (4, 1, "unknown next header"),
    (4, 2, "unknown option"),
];

fn errors() -> Vec<Flow> {
    use Content::{DamagedError, Datagram, Error};
    let mut flows = Vec::new();
    let kinds4 = ERRORS4.map(|kind| (true, kind));
    let kinds6 = ERRORS6.map(|kind| (false, kind));
    for (is_v4, (kind, code, name)) in kinds4.into_iter().chain(kinds6) {
        let error = (kind, code);
        flows.push(Flow {
            runs: ALL_RUNS
                .into_iter()
                .filter(|run| run.is_v4 == is_v4)
                .collect(),
            ..flow(
                &format!("ICMP error: {name}"),
                vec![
                    there(Datagram(100), ""),
                    match (is_v4, kind) {
                        (true, 4 | 5) => back(Error(error, About::Last), "").but(Advice),
                        _ => back(Error(error, About::Last), ""),
                    },
                ],
            )
        });
    }
    for (is_v4, error) in [(true, (3, 1)), (false, (1, 3))] {
        let mut of_version = |name: &str, steps| {
            flows.push(Flow {
                runs: ALL_RUNS
                    .into_iter()
                    .filter(|run| run.is_v4 == is_v4)
                    .collect(),
                ..flow(name, steps)
            });
        };
        of_version(
            "ICMP error about a SYN",
            vec![
                there(SYN, "SYN_SENT"),
                back(Error(error, About::Last), "SYN_SENT"),
            ],
        );
        of_version(
            "ICMP error about a reply",
            vec![
                there(Datagram(100), ""),
                back(Datagram(100), ""),
                there(Error(error, About::Last), ""),
            ],
        );
        of_version(
            "ICMP error about a packet of no flow",
            vec![there(Error(error, About::Unsent), "-")],
        );
        of_version(
            "ICMP error to the wrong side",
            vec![
                there(Datagram(100), ""),
                there(Error(error, About::Own), ""),
            ],
        );
        of_version(
            "ICMP error with a wrong checksum",
            vec![
                there(Datagram(100), ""),
                back(DamagedError(error), "").but(Checksums),
            ],
        );
    }
    flows
}

/// A lab whose agent has set it up and was then killed: without the agent's probes, nothing else is counted.
fn quiet_lab() -> anyhow::Result<Lab> {
    let lab = Lab::start("")?;
    lab.node().kill_agent(Signal::SIGKILL)?;
    Ok(lab)
}

/// Our conntrack, with entries that do not expire while a slow machine checks them.
fn ours(lab: &Lab) -> anyhow::Result<Ours> {
    let mut ours = Ours::open(lab.node())?;
    ours.set_timeouts(Timeouts {
        tcp_syn: LONG,
        tcp_close: LONG,
        udp: LONG,
        icmp: LONG,
        any: LONG,
        ..Timeouts::default()
    })?;
    Ok(ours)
}

/// Both sides' views of one flow, step by step.
struct Watch<'a> {
    ours: &'a Ours,
    kernel: &'a Kernel<'a>,
    host: IpAddr,
    before: [EntryView; 2],
    noted: [EntrylessPackets; 2],
}

impl<'a> Watch<'a> {
    fn new(ours: &'a Ours, kernel: &'a Kernel<'a>, host: IpAddr) -> anyhow::Result<Self> {
        Ok(Self {
            ours,
            kernel,
            host,
            before: Default::default(),
            noted: [ours.noted()?, kernel.noted()?],
        })
    }

    /// Returns what has changed since the last call.
    fn look(&mut self) -> anyhow::Result<[EntryView; 2]> {
        let entries = [
            self.ours.entries(self.host)?,
            self.kernel.entries(self.host)?,
        ];
        let noted = [self.ours.noted()?, self.kernel.noted()?];
        let mut shown: [EntryView; 2] = Default::default();
        for (index, entries) in entries.into_iter().enumerate() {
            let last = self.before[index].entries.first();
            let counted = |of: fn(&Entry) -> TrafficCount| {
                let now = entries.first().map(of).unwrap_or_default();
                now.since(last.map(of).unwrap_or_default())
            };
            shown[index] = EntryView {
                there: counted(|entry| entry.there),
                back: counted(|entry| entry.back),
                noted: noted[index].since(self.noted[index]),
                entries,
            };
        }
        self.before = shown.clone();
        self.noted = noted;
        Ok(shown)
    }
}

/// The results for all flows.
#[derive(Default)]
struct Findings {
    table: Vec<String>,
    wrong: usize,
    seen: BTreeSet<Difference>,
    flows: [usize; 2],
}

/// Returns what is wrong with a step, and which differences appeared in it.
fn judge(
    (ours, theirs): (&EntryView, &EntryView),
    expected: (&str, &str),
    differences: &[Difference],
) -> (Vec<String>, BTreeSet<Difference>) {
    let fields = ours.differs(theirs);
    let explained: BTreeSet<Field> = differences
        .iter()
        .flat_map(|difference| difference.shows_in())
        .copied()
        .collect();
    let mut faults = Vec::new();
    if (ours.state(), theirs.state()) != expected {
        faults.push(format!("expected {expected:?}"));
    }
    let unlisted: Vec<_> = fields.difference(&explained).collect();
    if !unlisted.is_empty() {
        faults.push(format!("they differ in {unlisted:?}"));
    }
    let shows = |difference: &Difference| {
        let fields_of = difference.shows_in();
        fields_of.iter().any(|field| fields.contains(field))
    };
    let (seen, unseen): (BTreeSet<Difference>, BTreeSet<Difference>) =
        differences.iter().copied().partition(shows);
    for difference in unseen {
        faults.push(format!("{:?} does not show", difference.name()));
    }
    (faults, seen)
}

impl Findings {
    fn judge(&mut self, flow: &str, number: usize, step: &Step, [ours, theirs]: &[EntryView; 2]) {
        let expected = (step.ours, step.theirs);
        let (faults, seen) = judge((ours, theirs), expected, &step.differences);
        self.seen.extend(seen);
        let content = format!("{:?}", step.content);
        self.table.push(format!(
            "{flow}, step {number}: {:?} {content}\n    ours   {ours}\n    kernel {theirs}{}",
            step.side,
            faults
                .iter()
                .map(|fault| format!("\n    WRONG: {fault}"))
                .collect::<String>()
        ));
        self.wrong += usize::from(!faults.is_empty());
    }
}

#[test]
#[ignore = "needs root"]
fn crafted_flows_are_to_conntrack_what_they_are_to_nf_conntrack() -> anyhow::Result<()> {
    let lab = quiet_lab()?;
    let ours = ours(&lab)?;
    let kernel = Kernel::start(lab.node())?;
    let mut wire = lab.wire()?;
    let mut findings = Findings::default();
    let mut number = 0;
    for flow in [connections(), others(), errors()].into_iter().flatten() {
        for &Run { opener, is_v4 } in &flow.runs {
            number += 1;
            let host = silent(number, is_v4);
            let endpoint = lab.endpoint(is_v4);
            let (source, destination) = match opener {
                Way::Out => (endpoint, host),
                Way::In => (host, endpoint),
            };
            let mut talk = Talk::new(source, destination, (FIRST_PORT + number, 80));
            let mut watch = Watch::new(&ours, &kernel, host)?;
            let version = if is_v4 { "IPv4" } else { "IPv6" };
            let name = format!("{} ({version}, opened {opener:?})", flow.name);
            for (index, step) in flow.steps.iter().enumerate() {
                let packets = talk.say(step.side, &step.content);
                let is_out = (step.side == Side::Opener) == (opener == Way::Out);
                let way = if is_out { Way::Out } else { Way::In };
                wire.carry(way, &packets)
                    .with_context(|| format!("{name}, step {index}"))?;
                findings.judge(&name, index + 1, step, &watch.look()?);
            }
            findings.flows[usize::from(!is_v4)] += 1;
        }
    }
    conclude(&findings)
}

/// A flow between the sockets of two hosts.
struct Stage<'a> {
    lab: &'a Lab,
    run: Run,
    /// The far host.
    host: IpAddr,
    port: u16,
    watch: Watch<'a>,
    /// Everything counted so far.
    total: [EntryView; 2],
}

impl Stage<'_> {
    fn is_endpoint(&self, side: Side) -> bool {
        (side == Side::Opener) == (self.run.opener == Way::Out)
    }

    fn ip(&self, side: Side) -> IpAddr {
        if self.is_endpoint(side) {
            self.lab.endpoint(self.run.is_v4)
        } else {
            self.host
        }
    }

    fn address(&self, side: Side) -> SocketAddr {
        let port = match side {
            Side::Opener => self.port,
            Side::Answerer => ANSWERING_PORT,
        };
        SocketAddr::new(self.ip(side), port)
    }

    fn netns(&self, side: Side) -> String {
        if self.is_endpoint(side) {
            format!("health-{}", self.lab.node().name())
        } else {
            self.lab.bed.node(2).name().to_owned()
        }
    }

    /// Opens a socket with a side's address.
    fn socket(&self, side: Side, kind: Type) -> anyhow::Result<Socket> {
        let address = self.address(side);
        let open = || {
            let socket = Socket::new(Domain::for_address(address), kind, None)?;
            socket.set_reuse_address(true)?;
            socket.bind(&address.into())?;
            socket.set_read_timeout(Some(PATIENCE))?;
            socket.set_write_timeout(Some(PATIENCE))?;
            anyhow::Ok(socket)
        };
        NetNs::open(&self.netns(side))?.run_in(open)?
    }

    /// Returns the two ends of a connection, the opener's first.
    fn connect(&self) -> anyhow::Result<(Socket, Socket)> {
        let listener = self.socket(Side::Answerer, Type::STREAM)?;
        listener.listen(1)?;
        let opener = self.socket(Side::Opener, Type::STREAM)?;
        opener.connect(&self.address(Side::Answerer).into())?;
        let (answerer, _) = listener.accept()?;
        answerer.set_read_timeout(Some(PATIENCE))?;
        Ok((opener, answerer))
    }

    /// Returns two sockets that send datagrams to each other, the opener's first.
    fn datagrams(&self) -> anyhow::Result<(Socket, Socket)> {
        let [opener, answerer] =
            [Side::Opener, Side::Answerer].map(|side| self.socket(side, Type::DGRAM));
        let (opener, answerer) = (opener?, answerer?);
        opener.connect(&self.address(Side::Answerer).into())?;
        answerer.connect(&self.address(Side::Opener).into())?;
        Ok((opener, answerer))
    }

    /// Waits until both conntracks show this state.
    fn both(&mut self, state: &str) -> anyhow::Result<()> {
        self.differ(state, state, &[])
    }

    /// Waits until our conntrack and the kernel's show these states and differ only in the listed ways.
    fn differ(
        &mut self,
        ours: &str,
        theirs: &str,
        differences: &[Difference],
    ) -> anyhow::Result<()> {
        let mut faults = Vec::new();
        let looked = wait_for("both to agree", PATIENCE, || {
            let shown = self.watch.look()?;
            for (total, shown) in self.total.iter_mut().zip(shown) {
                let noted = EntrylessPackets {
                    related: total.noted.related + shown.noted.related,
                    invalid: total.noted.invalid + shown.noted.invalid,
                };
                let entry = shown.entries.first().cloned();
                *total = EntryView {
                    there: entry.as_ref().map(|entry| entry.there).unwrap_or_default(),
                    back: entry.as_ref().map(|entry| entry.back).unwrap_or_default(),
                    noted,
                    ..shown
                };
            }
            let [mine, kernels] = &self.total;
            (faults, _) = judge((mine, kernels), (ours, theirs), differences);
            Ok(faults.is_empty().then_some(()))
        });
        let [mine, kernels] = &self.total;
        looked.with_context(|| format!("{faults:?}\n    ours   {mine}\n    kernel {kernels}"))
    }
}

/// Reads this many bytes.
fn receive(socket: &Socket, mut len: usize) -> anyhow::Result<()> {
    let mut buffer = vec![0; 1 << 16];
    while len > 0 {
        let most = len.min(buffer.len());
        let read = (&*socket).read(&mut buffer[..most])?;
        ensure!(read > 0, "{len} bytes are missing");
        len -= read;
    }
    Ok(())
}

/// Reads the end of the stream.
fn receive_end(mut socket: &Socket) -> anyhow::Result<()> {
    let read = socket.read(&mut [0])?;
    ensure!(read == 0, "data instead of the end");
    Ok(())
}

/// A scenario to run on a stage.
type Scene = fn(&mut Stage<'_>) -> anyhow::Result<()>;

const SCENES: [(&str, Scene); 13] = [
    ("closed by its opener", |stage| {
        let (opener, answerer) = stage.connect()?;
        stage.both("ESTABLISHED")?;
        (&opener).write_all(b"a request")?;
        receive(&answerer, 9)?;
        (&answerer).write_all(b"its answer")?;
        receive(&opener, 10)?;
        stage.both("ESTABLISHED")?;
        opener.shutdown(Shutdown::Write)?;
        receive_end(&answerer)?;
        stage.both("CLOSE_WAIT")?;
        drop(answerer);
        receive_end(&opener)?;
        stage.both("TIME_WAIT")
    }),
    ("closed by its answerer", |stage| {
        let (opener, answerer) = stage.connect()?;
        drop(answerer);
        receive_end(&opener)?;
        stage.both("CLOSE_WAIT")?;
        drop(opener);
        stage.both("TIME_WAIT")
    }),
    ("half closed, much data goes on", |stage| {
        let (opener, answerer) = stage.connect()?;
        opener.shutdown(Shutdown::Write)?;
        receive_end(&answerer)?;
        transfer(&answerer, &opener)?;
        stage.both("CLOSE_WAIT")?;
        drop(answerer);
        receive_end(&opener)?;
        stage.both("TIME_WAIT")
    }),
    ("much data both ways", |stage| {
        let (opener, answerer) = stage.connect()?;
        transfer(&opener, &answerer)?;
        transfer(&answerer, &opener)?;
        stage.both("ESTABLISHED")
    }),
    ("reset by its opener", |stage| {
        let (opener, _answerer) = stage.connect()?;
        SockRef::from(&opener).set_linger(Some(Duration::ZERO))?;
        drop(opener);
        stage.both("CLOSE")
    }),
    ("reset by its answerer, which leaves data unread", |stage| {
        let (opener, answerer) = stage.connect()?;
        (&opener).write_all(b"to nobody")?;
        answerer.peek(&mut [std::mem::MaybeUninit::uninit()])?;
        drop(answerer);
        stage.both("CLOSE")
    }),
    ("refused", |stage| {
        let opener = stage.socket(Side::Opener, Type::STREAM)?;
        let refused = opener.connect(&stage.address(Side::Answerer).into());
        ensure!(
            refused.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused),
            "somebody answers"
        );
        stage.differ("CLOSE", "-", &[Refused])
    }),
    ("zero window", |stage| {
        let (opener, answerer) = stage.connect()?;
        opener.set_nonblocking(true)?;
        let mut sent = 0;
        while let Ok(more) = (&opener).write(&[0; 10_000]) {
            sent += more;
        }
        stage.both("ESTABLISHED")?;
        opener.set_nonblocking(false)?;
        receive(&answerer, sent)?;
        (&opener).write_all(b"once more")?;
        receive(&answerer, 9)?;
        stage.both("ESTABLISHED")
    }),
    ("opened again on the same ports", |stage| {
        let (opener, answerer) = stage.connect()?;
        drop(answerer);
        receive_end(&opener)?;
        drop(opener);
        stage.both("TIME_WAIT")?;
        let (opener, answerer) = stage.connect()?;
        (&opener).write_all(b"again")?;
        receive(&answerer, 5)?;
        stage.differ("ESTABLISHED", "ESTABLISHED", &[OpenedAnewCounters])
    }),
    ("UDP both ways", |stage| {
        let (opener, answerer) = stage.datagrams()?;
        opener.send(b"a question")?;
        receive(&answerer, 10)?;
        stage.both("")?;
        answerer.send(b"an answer")?;
        receive(&opener, 9)?;
        stage.both("")
    }),
    ("UDP to a closed port", |stage| {
        let opener = stage.socket(Side::Opener, Type::DGRAM)?;
        opener.connect(&stage.address(Side::Answerer).into())?;
        opener.send(b"to nobody")?;
        // An ICMP error reports that the port is unreachable.
        let refused = (&opener).read(&mut [0]);
        ensure!(
            refused.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused),
            "somebody answers"
        );
        stage.both("")
    }),
    ("UDP in fragments", |stage| {
        let (opener, answerer) = stage.datagrams()?;
        opener.send(&[1; 5_000])?;
        receive_datagram(&answerer, 5_000)?;
        stage.differ("", "", &[Fragments])?;
        answerer.send(&[2; 4_000])?;
        receive_datagram(&opener, 4_000)?;
        stage.differ("", "", &[Fragments])
    }),
    ("echo", |stage| {
        let netns = stage.netns(Side::Opener);
        let [own, other] = [Side::Opener, Side::Answerer].map(|side| stage.ip(side));
        let ping = format!("netns exec {netns} ping -q -c 3 -i 0.01 -I {own} {other}");
        run(Command::new("ip").args(ping.split(' ')))?.success()?;
        stage.both("")
    }),
];

/// Sends more data than any buffer holds.
fn transfer(from: &Socket, to: &Socket) -> anyhow::Result<()> {
    const LEN: usize = 4 << 20;
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| (&*from).write_all(&vec![7; LEN]));
        receive(to, LEN)?;
        sending.join().ok().context("the sender panicked")??;
        Ok(())
    })
}

/// Receives one datagram of this length.
fn receive_datagram(mut socket: &Socket, len: usize) -> anyhow::Result<()> {
    let read = socket.read(&mut vec![0; len + 1])?;
    ensure!(read == len, "{read} bytes instead of {len}");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn flows_of_real_stacks_are_to_conntrack_what_they_are_to_nf_conntrack() -> anyhow::Result<()> {
    let lab = quiet_lab()?;
    let ours = ours(&lab)?;
    let kernel = Kernel::start(lab.node())?;
    let mut number = 0;
    for (name, scene) in SCENES {
        for run in ALL_RUNS {
            number += 1;
            let host = answering(number, run.is_v4);
            let mut stage = Stage {
                lab: &lab,
                run,
                host,
                port: FIRST_PORT + number,
                watch: Watch::new(&ours, &kernel, host)?,
                total: Default::default(),
            };
            let version = if run.is_v4 { "IPv4" } else { "IPv6" };
            scene(&mut stage)
                .with_context(|| format!("{name} ({version}, opened {:?})", run.opener))?;
        }
    }
    Ok(())
}

fn conclude(findings: &Findings) -> anyhow::Result<()> {
    let unseen: Vec<_> = Difference::ALL
        .into_iter()
        .filter(|difference| !findings.seen.contains(difference))
        .map(Difference::name)
        .collect();
    println!("flows of IPv4 and IPv6: {:?}", findings.flows);
    if findings.wrong > 0 {
        println!("{}", findings.table.join("\n"));
    }
    ensure!(findings.wrong == 0, "{} steps are wrong", findings.wrong);
    ensure!(
        unseen.is_empty(),
        "differences that do not occur any more: {unseen:?}"
    );
    ensure!(
        findings.flows.iter().all(|&flows| flows >= FLOWS_AT_LEAST),
        "too few flows: {:?}",
        findings.flows
    );
    Ok(())
}

#[test]
fn the_documentation_lists_each_difference_by_its_name() -> anyhow::Result<()> {
    let docs = std::fs::read_to_string(DOCS)?;
    let (_, section) = docs
        .split_once(HEADING)
        .context("no table of differences")?;
    let rows = section
        .lines()
        .skip_while(|line| !line.starts_with("| ---"));
    let listed: BTreeSet<&str> = rows
        .skip(1)
        .map_while(|line| line.strip_prefix("| ")?.split(" | ").next())
        .collect();
    assert_eq!(listed, Difference::ALL.map(Difference::name).into());
    Ok(())
}
