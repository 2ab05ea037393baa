//! A prober with the datapath's programs on its uplink, which times each of its probes itself, too.

use std::collections::HashMap;
use std::io::{ErrorKind, Read as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use health_agent::config::Location;
use health_agent::datapath::loader::ProgramLog;
use health_agent::datapath::rtt::KernelRtt;
use health_agent::datapath::{Datapath, Hook};
use health_agent::mesh::rtt_store::{LossOutcome, RttStore as _};
use health_common::LAYOUT_VERSION;
use health_common::config::DatapathConfig;
use health_common::probe::{Path, ProbePayload};
use health_common::rtt::{PROTOCOL_ICMP, RttKey, RttRow, SOURCE_KERNEL};
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::TimeSpec;
use socket2::{Domain, Protocol, Socket, Type};

use super::line::{DEVICE, Line};
use crate::packet::echo4;
use crate::testrun::Bpffs;

const INSTANCE: &str = "bench-rtt";
const ICMP_ID: u16 = 0x4a11;
const MAGIC: u64 = 0x6265_6e63_6820_7274;
const ECHO_REQUEST: u8 = 8;
const ECHO_REPLY: u8 = 0;
/// Longest packet worth reading.
const PACKET_LEN: usize = 256;
const RECEIVE_BUFFER: usize = 8 << 20;
/// How long an answer may take beyond what the wire holds it.
const PATIENCE: Duration = Duration::from_secs(1);

/// What became of a probe.
#[derive(Clone, Copy, Debug)]
pub(super) struct Probed {
    pub(super) peer: Ipv4Addr,
    pub(super) sequence: u16,
    /// `None`: no answer came in time.
    pub(super) answer: Option<Answer>,
}

/// The round trip of one probe, measured twice.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    /// By the programs on the uplink.
    pub(super) kernel: Duration,
    /// By this process: from before the call that sends until after the one that receives.
    pub(super) user: Duration,
}

/// A raw socket in the near namespace, and the programs on its uplink.
pub(super) struct Prober<'a> {
    line: &'a Line,
    socket: Socket,
    datapath: Datapath,
    rows: KernelRtt,
    sequence: u16,
    _bpffs: Bpffs,
}

/// Probes of one call, in the order in which they were sent.
#[derive(Default)]
struct Round {
    probed: Vec<Probed>,
    /// Those without an answer by sequence number: when they were sent, and their place.
    waiting: HashMap<u16, (Instant, usize)>,
    /// The last one to each peer.
    last: HashMap<Ipv4Addr, u16>,
}

impl Round {
    fn begin(&mut self, peer: Ipv4Addr, sequence: u16) {
        self.probed.push(Probed {
            peer,
            sequence,
            answer: None,
        });
        self.last.insert(peer, sequence);
        self.waiting
            .insert(sequence, (Instant::now(), self.probed.len() - 1));
    }

    /// Until when the last probe to a peer may still be answered; `None` if it was, or will not be.
    fn busy_until(&self, peer: Ipv4Addr) -> Option<Instant> {
        let (sent, _) = self.waiting.get(self.last.get(&peer)?)?;
        let end = *sent + PATIENCE;
        (Instant::now() < end).then_some(end)
    }
}

impl<'a> Prober<'a> {
    /// Loads the programs, and attaches them to the near end.
    pub(super) fn new(line: &'a Line) -> anyhow::Result<Self> {
        let bpffs = Bpffs::mount();
        let location = Location {
            instance: INSTANCE.to_owned(),
            runtime_dir: "/nonexistent".into(),
            state_dir: "/nonexistent".into(),
            bpf_root: bpffs.path().to_owned(),
        };
        let mut datapath = Datapath::load(&location, ProgramLog::Warn)?;
        datapath.configure(DatapathConfig {
            layout_version: LAYOUT_VERSION,
            ct_any_timeout_secs: 60,
            icmp_id_be: ICMP_ID.to_be(),
            probe_magic: MAGIC,
            ..DatapathConfig::default()
        })?;
        let rows = datapath.rtt()?;
        let mut prober = Self {
            line,
            socket: line
                .near()
                .run_in(open)?
                .context("cannot open a raw socket")?,
            datapath,
            rows,
            sequence: 0,
            _bpffs: bpffs,
        };
        prober.attach()?;
        Ok(prober)
    }

    /// Puts the programs on the near end.
    pub(super) fn attach(&mut self) -> anyhow::Result<()> {
        self.attach_to(&Hook::uplink(DEVICE))
    }

    /// Takes the programs off again.
    pub(super) fn detach(&mut self) -> anyhow::Result<()> {
        self.attach_to(&[])
    }

    fn attach_to(&mut self, hooks: &[Hook]) -> anyhow::Result<()> {
        let datapath = &mut self.datapath;
        self.line.near().run_in(|| datapath.attach(hooks))??;
        Ok(())
    }

    /// Probes one address after the other, `gap` apart or more, and waits for the answers. An address is
    /// not probed again before its last probe is done with: its row tells of the last one alone.
    pub(super) fn probe(
        &mut self,
        peers: &[Ipv4Addr],
        gap: Duration,
    ) -> anyhow::Result<Vec<Probed>> {
        for peer in peers {
            self.rows.ensure(key(*peer))?;
        }
        let mut round = Round::default();
        let start = Instant::now();
        for (index, peer) in (0..).zip(peers) {
            let due = start + gap * index;
            while Instant::now() < due {
                self.receive(due, &mut round)?;
            }
            while let Some(end) = round.busy_until(*peer) {
                self.receive(end, &mut round)?;
            }
            let sequence = self.next_sequence();
            round.begin(*peer, sequence);
            self.send(*peer, sequence)?;
        }
        let end = Instant::now() + PATIENCE;
        while !round.waiting.is_empty() && Instant::now() < end {
            self.receive(end, &mut round)?;
        }
        Ok(round.probed)
    }

    /// As [`Self::probe`]; fails if an answer is missing.
    pub(super) fn probe_all(
        &mut self,
        peers: &[Ipv4Addr],
        gap: Duration,
    ) -> anyhow::Result<Vec<Answer>> {
        let probed = self.probe(peers, gap)?;
        let answers: Vec<Answer> = probed.iter().filter_map(|probe| probe.answer).collect();
        let missing = probed.len() - answers.len();
        ensure!(missing == 0, "{missing} probes were not answered");
        Ok(answers)
    }

    /// Gives up a probe, as an agent does after its time-out.
    pub(super) fn give_up(&self, probe: &Probed) -> anyhow::Result<LossOutcome> {
        Ok(self
            .rows
            .lost(key(probe.peer), ICMP_ID, probe.sequence, true)?)
    }

    /// What is known of a peer.
    pub(super) fn row(&self, peer: Ipv4Addr) -> anyhow::Result<RttRow> {
        let row = self.rows.row(key(peer))?;
        row.with_context(|| format!("no row for {peer}"))
    }

    /// Not 0, which rows without samples hold.
    fn next_sequence(&mut self) -> u16 {
        self.sequence = self.sequence.checked_add(1).unwrap_or(1);
        self.sequence
    }

    fn send(&self, peer: Ipv4Addr, sequence: u16) -> anyhow::Result<()> {
        let payload = ProbePayload::encode(MAGIC, Path::Host);
        let request = echo4(ECHO_REQUEST, 0, ICMP_ID, sequence, &payload);
        let to = SocketAddr::new(peer.into(), 0).into();
        self.socket
            .send_to(&request, &to)
            .with_context(|| format!("cannot probe {peer}"))?;
        Ok(())
    }

    /// Takes in one answer, if one comes until `end`.
    fn receive(&self, end: Instant, round: &mut Round) -> anyhow::Result<()> {
        let mut packet = [0; PACKET_LEN];
        let len = match (&self.socket).read(&mut packet) {
            Ok(len) => len,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return self.wait(end),
            Err(error) => return Err(error).context("cannot receive"),
        };
        let now = Instant::now();
        let Some((from, sequence)) = read_reply(&packet[..len]) else {
            return Ok(());
        };
        let Some((sent, index)) = round.waiting.remove(&sequence) else {
            return Ok(());
        };
        let row = self.row(from)?;
        ensure!(
            row.last_sequence == sequence && row.source == SOURCE_KERNEL,
            "the answer of {from} to probe {sequence} was not matched in the kernel"
        );
        round.probed[index].answer = Some(Answer {
            kernel: Duration::from_nanos(row.last_ns),
            user: now - sent,
        });
        Ok(())
    }

    fn wait(&self, end: Instant) -> anyhow::Result<()> {
        let rest = TimeSpec::from(end.saturating_duration_since(Instant::now()));
        let mut socket = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
        ppoll(&mut socket, Some(rest), None).context("cannot wait for answers")?;
        Ok(())
    }
}

fn open() -> std::io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::ICMPV4))?;
    setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

pub(super) fn key(peer: Ipv4Addr) -> RttKey {
    RttKey {
        peer: IpAddr::from(peer).into(),
        path: Path::Host as u8,
        protocol: PROTOCOL_ICMP,
        pad: 0,
    }
}

/// The source and the sequence number of an answer to a probe of ours, from its IP header on.
pub(super) fn read_reply(packet: &[u8]) -> Option<(Ipv4Addr, u16)> {
    read_echo(packet, ECHO_REPLY, 12)
}

/// The destination and the sequence number of a probe of ours, from its IP header on.
pub(super) fn read_request(packet: &[u8]) -> Option<(Ipv4Addr, u16)> {
    read_echo(packet, ECHO_REQUEST, 16)
}

fn read_echo(packet: &[u8], kind: u8, address_at: usize) -> Option<(Ipv4Addr, u16)> {
    let header_len = usize::from(packet.first()? & 0x0f) * 4;
    let address: [u8; 4] = packet.get(address_at..address_at + 4)?.try_into().ok()?;
    let echo = packet.get(header_len..header_len + 8)?;
    let is_ours = packet[0] >> 4 == 4
        && packet.get(9) == Some(&1)
        && echo[0] == kind
        && echo[4..6] == ICMP_ID.to_be_bytes();
    is_ours.then(|| (address.into(), u16::from_be_bytes([echo[6], echo[7]])))
}
