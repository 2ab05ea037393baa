//! A prober with the datapath's programs on its uplink, which also measures each round trip in user space.

use std::collections::HashMap;
use std::io::{ErrorKind, Read as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use health_common::probe::{DEFAULT_KEY, Path, ProbeId, ProbePayload};
use health_common::rtt::{PROTOCOL_ICMP, PROTOCOL_TCP, RttKey, RttRow};
use health_datapath::kernel_rtt::KernelRtt;
use health_datapath::rtt_store::{LossOutcome, Measurement, RttStore as _};
use health_datapath::{Datapath, Hook, LoadSettings};
use health_model::settings::Location;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::TimeSpec;
use socket2::{Domain, Protocol, Socket, Type};

use super::line::{DEVICE, Line};
use super::{ICMP_ID, SESSION, settings};
use crate::packet::echo4;
use crate::testrun::Bpffs;

const INSTANCE: &str = "bench-rtt";
const ECHO_REQUEST: u8 = 8;
const ECHO_REPLY: u8 = 0;
/// Number of bytes to read of each packet.
const PACKET_LEN: usize = 256;
const RECEIVE_BUFFER: usize = 8 << 20;
/// How long to wait for a reply, in addition to the wire's delay.
const PATIENCE: Duration = Duration::from_secs(1);

/// The outcome of a probe.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProbeOutcome {
    pub(super) peer: Ipv4Addr,
    /// Number of times that the sequence numbers have wrapped.
    round: u16,
    pub(super) sequence: u16,
    /// `None` if no reply arrived in time or no program matched it.
    pub(super) answer: Option<Answer>,
}

/// The round-trip time of a probe, measured twice.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    /// Measured by the programs on the uplink.
    pub(super) kernel: Duration,
    /// Measured by this process, from before the send call until after the receive call.
    pub(super) user: Duration,
}

/// A raw socket in the near namespace, and the programs on its uplink.
pub(super) struct Prober<'a> {
    line: &'a Line,
    socket: Socket,
    datapath: Datapath,
    rows: KernelRtt,
    round: u16,
    sequence: u16,
    _bpffs: Bpffs,
}

/// The probes of one call.
#[derive(Default)]
struct Round {
    /// All probes in sending order.
    probed: Vec<ProbeOutcome>,
    /// Unanswered probes by sequence number: sending time and index.
    waiting: HashMap<u16, (Instant, usize)>,
}

impl<'a> Prober<'a> {
    /// Loads the programs and attaches them to the near end's uplink.
    pub(super) fn new(line: &'a Line) -> anyhow::Result<Self> {
        let bpffs = Bpffs::mount();
        let location = Location {
            instance: INSTANCE.to_owned(),
            runtime_dir: "/nonexistent".into(),
            state_dir: "/nonexistent".into(),
            bpf_root: bpffs.path().to_owned(),
        };
        let mut datapath = Datapath::load(&location, LoadSettings::default())?;
        datapath.configure(settings())?;
        let rows = datapath.rtt()?;
        let mut prober = Self {
            line,
            socket: line
                .near()
                .run_in(open)?
                .context("cannot open a raw socket")?,
            datapath,
            rows,
            round: 0,
            sequence: 0,
            _bpffs: bpffs,
        };
        prober.attach()?;
        Ok(prober)
    }

    /// Attaches the programs to the near end's uplink.
    pub(super) fn attach(&mut self) -> anyhow::Result<()> {
        self.attach_to(&Hook::uplink(DEVICE))
    }

    /// Detaches the programs.
    pub(super) fn detach(&mut self) -> anyhow::Result<()> {
        self.attach_to(&[])
    }

    fn attach_to(&mut self, hooks: &[Hook]) -> anyhow::Result<()> {
        let datapath = &mut self.datapath;
        self.line.near().run_in(|| datapath.attach(hooks))??;
        Ok(())
    }

    /// Also measures the round-trip times of TCP connections to a peer.
    pub(super) fn follow(&self, peer: Ipv4Addr) -> anyhow::Result<()> {
        Ok(self.rows.follow(peer.into(), Path::Host)?)
    }

    /// Number of measured round trips of TCP connections to a peer.
    pub(super) fn followed_samples(&self, peer: Ipv4Addr) -> anyhow::Result<u64> {
        let key = RttKey {
            protocol: PROTOCOL_TCP,
            ..key(peer)
        };
        Ok(self.rows.row(key)?.map_or(0, |row| row.samples))
    }

    /// Probes the addresses one after another, `gap` apart, and waits for the replies.
    pub(super) fn probe(
        &mut self,
        peers: &[Ipv4Addr],
        gap: Duration,
    ) -> anyhow::Result<Vec<ProbeOutcome>> {
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
            let probe = self.next(*peer);
            round.probed.push(probe);
            let place = round.probed.len() - 1;
            let (request, to) = (request(&probe), SocketAddr::new((*peer).into(), 0).into());
            let sent = Instant::now();
            self.socket
                .send_to(&request, &to)
                .with_context(|| format!("cannot probe {peer}"))?;
            round.waiting.insert(probe.sequence, (sent, place));
        }
        let end = Instant::now() + PATIENCE;
        while !round.waiting.is_empty() && Instant::now() < end {
            self.receive(end, &mut round)?;
        }
        Ok(round.probed)
    }

    /// Like [`Self::probe`], but fails if any reply is missing.
    pub(super) fn probe_all(
        &mut self,
        peers: &[Ipv4Addr],
        gap: Duration,
    ) -> anyhow::Result<Vec<Answer>> {
        let probed = self.probe(peers, gap)?;
        let answers: Vec<Answer> = probed.iter().filter_map(|probe| probe.answer).collect();
        let missing = probed.len() - answers.len();
        ensure!(
            missing == 0,
            "{missing} probes were not answered, or no program matched the answers"
        );
        Ok(answers)
    }

    /// Counts a probe as lost, like an agent does after its timeout.
    pub(super) fn give_up(&self, probe: &ProbeOutcome) -> anyhow::Result<LossOutcome> {
        Ok(self.rows.lost(key(probe.peer), id(probe))?)
    }

    /// The row of a peer.
    pub(super) fn row(&self, peer: Ipv4Addr) -> anyhow::Result<RttRow> {
        let row = self.rows.row(key(peer))?;
        row.with_context(|| format!("no row for {peer}"))
    }

    fn next(&mut self, peer: Ipv4Addr) -> ProbeOutcome {
        self.sequence = self.sequence.wrapping_add(1);
        self.round += u16::from(self.sequence == 0);
        ProbeOutcome {
            peer,
            round: self.round,
            sequence: self.sequence,
            answer: None,
        }
    }

    /// Receives and records one reply if it arrives before `end`.
    fn receive(&self, end: Instant, round: &mut Round) -> anyhow::Result<()> {
        let mut packet = [0; PACKET_LEN];
        let len = match (&self.socket).read(&mut packet) {
            Ok(len) => len,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return self.wait(end),
            Err(error) => return Err(error).context("cannot receive"),
        };
        let now = Instant::now();
        let Some((sent, place)) =
            read_reply(&packet[..len]).and_then(|(_, sequence)| round.waiting.remove(&sequence))
        else {
            return Ok(());
        };
        let user = now - sent;
        let probe = &mut round.probed[place];
        let measured =
            self.rows
                .answered(key(probe.peer), id(probe), user.as_nanos().try_into()?)?;
        if let Measurement::ByKernel(rtt_ns) = measured {
            probe.answer = Some(Answer {
                kernel: Duration::from_nanos(rtt_ns),
                user,
            });
        }
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

fn request(probe: &ProbeOutcome) -> Vec<u8> {
    let payload = ProbePayload::new(DEFAULT_KEY, ICMP_ID, id(probe), Path::Host, 0);
    echo4(
        ECHO_REQUEST,
        0,
        ICMP_ID,
        probe.sequence,
        &payload.to_bytes(),
    )
}

fn id(probe: &ProbeOutcome) -> ProbeId {
    ProbeId {
        session: SESSION,
        round: probe.round,
        sequence: probe.sequence,
    }
}

fn key(peer: Ipv4Addr) -> RttKey {
    RttKey {
        peer: IpAddr::from(peer).into(),
        path: Path::Host as u8,
        protocol: PROTOCOL_ICMP,
        pad: 0,
    }
}

/// Source and sequence number of a reply to one of our probes. The packet starts with its IP header.
pub(super) fn read_reply(packet: &[u8]) -> Option<(Ipv4Addr, u16)> {
    read_echo(packet, ECHO_REPLY, 12)
}

/// Destination and sequence number of one of our probes. The packet starts with its IP header.
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
