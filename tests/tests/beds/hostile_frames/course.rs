//! Frames of one sender, and their expected fates.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;
use std::net::Ipv4Addr;

use anyhow::Context as _;
use tests::frames::{
    Fate, Frame, Outlet, Scene, Tap, fate_of_sent, frame, is_of_host, marked_number, names_address,
    without_tags,
};
use tests::packet::{ARP, arp, ethernet};
use tests::seed;

use super::stand::Stand;
use super::{BATCH, NUMBERS};

/// Longest frame in bytes that gets through a device without segmentation.
const LONGEST: usize = 1514;
/// Maximum number of findings to report.
const FINDINGS_MAX: usize = 12;
/// An unused address.
const FENCE: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
const FENCE_MAC: [u8; 6] = [2, 0, 0, 0, 0xfe, 1];

/// A point where frames are watched. Frames from its own outlet, at the other end of its wire, arrive there last.
pub(super) struct Watch {
    pub(super) name: &'static str,
    pub(super) tap: Tap,
    pub(super) fence: Outlet,
    pub(super) mac: [u8; 6],
}

impl Watch {
    /// Returns everything that arrived before a fence. The fence is sent now, after everything that the kernel has
    /// queued.
    pub(super) fn arrivals(&self, fence: u64) -> anyhow::Result<Vec<Vec<u8>>> {
        let last = arp(2, (FENCE_MAC, FENCE), (self.mac, FENCE));
        let last = [&last[..], &fence.to_be_bytes()].concat();
        let last = ethernet(self.mac, FENCE_MAC, ARP, &last);
        self.fence.send_plain(&last)?;
        self.tap.until(&last).with_context(|| self.name)
    }
}

/// What to look for among a sender's frames, other than those behind the programs at the sender's own wire.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sought {
    /// None of the frames may arrive anywhere.
    Nothing,
    /// The frames arrive at others, but none may arrive at the endpoint that may receive nothing.
    Others,
}

/// Frames of one sender.
pub(super) struct Course<'a> {
    pub(super) name: &'static str,
    pub(super) scene: Scene,
    pub(super) outlet: Outlet,
    /// Taps by Ethernet type, behind the programs at the other end of the sender's wire.
    pub(super) landed: Vec<(u16, Tap)>,
    /// Whether policy is enforced on these frames.
    pub(super) is_enforced: bool,
    /// The endpoint that may receive nothing.
    pub(super) victim: Watch,
    pub(super) others: Vec<Watch>,
    pub(super) sought: Sought,
    pub(super) stand: &'a Stand,
    /// The number of the first frame.
    pub(super) first: u64,
}

/// What happened to the frames of a course.
#[derive(Debug, Default)]
pub(super) struct Totals {
    pub(super) sent: u64,
    pub(super) refused_by_kernel: u64,
    pub(super) fates: BTreeMap<Fate, u64>,
    pub(super) landed: u64,
    /// Number of frames seen, by the place where they were seen.
    pub(super) seen: BTreeMap<&'static str, u64>,
    pub(super) findings: Vec<String>,
}

impl Totals {
    pub(super) fn find(&mut self, what: String) {
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(what);
        }
    }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Sends a batch of frames, numbered from `first`. Returns the frames that the kernel accepted, with their numbers.
pub(super) fn send_batch(
    outlet: &Outlet,
    scene: &Scene,
    first: u64,
    totals: &mut Totals,
) -> anyhow::Result<Vec<(u64, Frame)>> {
    let mut sent = Vec::new();
    for number in first..first + BATCH {
        let frame = frame(scene, seed(), number);
        if outlet.send(&frame)? {
            sent.push((number, frame));
        } else {
            totals.refused_by_kernel += 1;
        }
    }
    totals.sent += sent.len() as u64;
    Ok(sent)
}

impl Course<'_> {
    /// Sends frames until `goes_on` returns false. Runs on one processor, so that no frame overtakes another.
    pub(super) fn run(&self, mut goes_on: impl FnMut(u64) -> bool) -> anyhow::Result<Totals> {
        let mut totals = Totals::default();
        let mut number = 0;
        while goes_on(number) {
            self.batch(self.first + number, &mut totals)
                .with_context(|| format!("{}, after frame {number}", self.name))?;
            number += BATCH;
        }
        self.stand.note(self.name, &mut totals);
        Ok(totals)
    }

    fn batch(&self, first: u64, totals: &mut Totals) -> anyhow::Result<()> {
        let sent = send_batch(&self.outlet, &self.scene, first, totals)?;
        self.check_landed(first, &sent, totals)?;
        for arrived in self.victim.arrivals(first)? {
            // The datapath turns an ARP request into its reply, along with any bytes after it.
            let is_arp = arrived[12..14] == ARP.to_be_bytes();
            let number = self.number(&arrived).filter(|_| !is_arp);
            if number.is_some() || !is_of_host(&arrived) {
                totals.find(format!(
                    "{} got {} of {number:?}",
                    self.victim.name,
                    hex(&arrived)
                ));
            }
        }
        for watch in &self.others {
            for arrived in watch.arrivals(first)? {
                let number = self.number(&arrived);
                if number.is_some() {
                    *totals.seen.entry(watch.name).or_insert(0) += 1;
                }
                let hostile = self.stand.hostile.party;
                let is_named = [hostile.v4.into(), hostile.v6.into()]
                    .iter()
                    .any(|address| names_address(&arrived, *address));
                if self.sought == Sought::Nothing && (number.is_some() || is_named) {
                    totals.find(format!(
                        "{} got {} of {number:?}",
                        watch.name,
                        hex(&arrived)
                    ));
                }
            }
        }
        Ok(())
    }

    /// Returns the number of the frame that `bytes` came from, or `None` if this course did not send it: ICMP errors
    /// for fragments from earlier courses may still arrive, because they are sent only when reassembly times out.
    fn number(&self, bytes: &[u8]) -> Option<u64> {
        let number = marked_number(seed(), bytes)?.into();
        (self.first..self.first + NUMBERS)
            .contains(&number)
            .then_some(number)
    }

    /// Checks that exactly the frames that the programs at the sender's wire should let pass are found behind them.
    fn check_landed(
        &self,
        first: u64,
        sent: &[(u64, Frame)],
        totals: &mut Totals,
    ) -> anyhow::Result<()> {
        let own = self.scene.own;
        let fence = arp(2, (own.mac, own.v4), (self.scene.peer.mac, FENCE));
        let fence = [&fence[..], &first.to_be_bytes()].concat();
        let fence = ethernet(self.scene.peer.mac, own.mac, ARP, &fence);
        self.outlet.send_plain(&fence)?;
        let of_arp = self.landed.iter().find(|(kind, _)| *kind == ARP);
        let (_, of_arp) = of_arp.context("nothing is seen of ARP")?;
        let mut landed = of_arp.until(&fence)?;
        for (kind, tap) in &self.landed {
            if *kind != ARP {
                landed.extend(tap.drain()?);
            }
        }
        totals.landed += landed.len() as u64;
        let fate_of = |bytes: &[u8]| fate_of_sent(&self.scene, bytes);
        self.compare(sent, &landed, fate_of, totals);
        Ok(())
    }

    /// Compares the frames that arrived unchanged with their expected fates.
    pub(super) fn compare(
        &self,
        sent: &[(u64, Frame)],
        arrived: &[Vec<u8>],
        fate_of: impl Fn(&[u8]) -> Fate,
        totals: &mut Totals,
    ) {
        let mut numbers: HashMap<&[u8], u64> = HashMap::new();
        let mut shortened: HashMap<Vec<u8>, u64> = HashMap::new();
        for (number, frame) in sent {
            numbers.insert(&frame.bytes, *number);
            for shorter in without_tags(&frame.bytes) {
                shortened.insert(shorter, *number);
            }
        }
        let may_pass = |fate| match fate {
            Fate::Passes => true,
            Fate::Judged | Fate::Odd => !self.is_enforced,
            Fate::Dropped | Fate::Answered => false,
        };
        for bytes in arrived {
            let number = numbers.get(&bytes[..]);
            let fate = fate_of(bytes);
            match shortened.get(bytes) {
                Some(number) if !numbers.contains_key(&bytes[..]) => totals.find(format!(
                    "frame {number} passed without its tags: {}",
                    hex(bytes)
                )),
                _ if !may_pass(fate) => {
                    totals.find(format!("frame {number:?} passed, {fate:?}: {}", hex(bytes)));
                }
                _ => {}
            }
        }
        let arrived: BTreeSet<&[u8]> = arrived.iter().map(|bytes| &bytes[..]).collect();
        for (number, frame) in sent {
            let fate = fate_of(&frame.bytes);
            *totals.fates.entry(fate).or_insert(0) += 1;
            let is_whole = frame.segmentation.is_none() && frame.bytes.len() <= LONGEST;
            if is_whole
                && fate != Fate::Odd
                && may_pass(fate)
                && !arrived.contains(&frame.bytes[..])
            {
                totals.find(format!(
                    "frame {number} did not pass, {fate:?}: {}",
                    hex(&frame.bytes)
                ));
            }
        }
    }
}
