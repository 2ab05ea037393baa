//! Describes where echo probes got lost.

use super::exceeds_loss_threshold;
use crate::direction::Passage;
use crate::history::Loss;

/// A segment of the way to a peer and back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Segment {
    Forward,
    PeerHost,
    Return,
    LocalHost,
}

/// The segments that lost more probes than the threshold allows, and more than chance would explain.
#[derive(Clone, Debug)]
pub(super) struct LossLocation {
    passage: Passage,
    lossy: Vec<Segment>,
}

impl Segment {
    const ALL: [Self; 4] = [Self::Forward, Self::PeerHost, Self::Return, Self::LocalHost];

    /// Returns the number of probes lost in this segment, and the number that reached it.
    fn lost(self, passage: &Passage) -> (u32, u32) {
        match self {
            Self::Forward => (passage.lost_there, passage.sent),
            Self::PeerHost => (passage.lost_in_peer, passage.arrived),
            Self::Return => (passage.lost_back, passage.replied),
            Self::LocalHost => (passage.lost_here, passage.returned),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Forward => "on the way there",
            Self::PeerHost => "in the peer's host",
            Self::Return => "on the way back",
            Self::LocalHost => "in this host",
        }
    }

    /// `46 of 60 arrived`.
    fn counts(self, passage: &Passage) -> String {
        let Passage {
            sent,
            arrived,
            replied,
            returned,
            lost_here,
            ..
        } = *passage;
        match self {
            Self::Forward => format!("{arrived} of {sent} arrived"),
            Self::PeerHost => format!("{replied} of {arrived} that arrived were answered"),
            Self::Return => format!("{returned} of {replied} replies came back"),
            Self::LocalHost => {
                format!("{lost_here} of {returned} replies that came back did not reach the agent")
            }
        }
    }
}

impl LossLocation {
    /// Locates the losses by the first of these passages that shows any.
    pub(super) fn of(passages: &[Option<Passage>], threshold: f64) -> Option<Self> {
        passages.iter().flatten().find_map(|passage| {
            let is_lossy = |segment: &Segment| {
                let (lost, probes) = segment.lost(passage);
                let loss = Loss {
                    probes,
                    lost: lost.min(probes),
                    window: passage.time,
                };
                exceeds_loss_threshold(&loss, threshold)
            };
            let lossy: Vec<Segment> = Segment::ALL.into_iter().filter(is_lossy).collect();
            (!lossy.is_empty()).then_some(Self {
                passage: *passage,
                lossy,
            })
        })
    }

    /// For a target that answers: `all on the way there: 46 of 60 arrived`.
    pub(super) fn of_losses(&self) -> String {
        let passage = &self.passage;
        let elsewhere = Segment::ALL
            .iter()
            .any(|segment| !self.lossy.contains(segment) && segment.lost(passage).0 > 0);
        match self.lossy.as_slice() {
            [segment] => {
                let all = if elsewhere { "most" } else { "all" };
                format!("{all} {}: {}", segment.name(), segment.counts(passage))
            }
            segments => {
                let segment =
                    |segment: &Segment| format!("{} ({})", segment.name(), segment.counts(passage));
                segments
                    .iter()
                    .map(segment)
                    .collect::<Vec<_>>()
                    .join(" and ")
            }
        }
    }

    /// For a target that does not answer.
    pub(super) fn of_silence(&self) -> String {
        let Passage {
            sent,
            arrived,
            replied,
            ..
        } = self.passage;
        let of = format!("{arrived} of {sent}");
        match self.lossy.first() {
            // The replies may have left by another device.
            Some(Segment::PeerHost) => format!(
                "echo requests arrive there ({of}), but {replied} replies left through its \
                 uplinks: check its firewall and its limits on ICMP"
            ),
            Some(Segment::Return) => {
                format!("echo requests arrive there ({of}), replies do not come back")
            }
            Some(Segment::LocalHost) => {
                "replies come back to this host but do not reach the agent: check the \
                                 firewall of this host"
                    .to_owned()
            }
            Some(Segment::Forward) | None => {
                format!("echo requests do not arrive there ({of} did)")
            }
        }
    }

    /// All counts.
    pub(super) fn evidence(&self) -> String {
        let Passage {
            time,
            sent,
            arrived,
            replied,
            returned,
            ..
        } = self.passage;
        format!(
            "{sent} sent, {arrived} arrived there, {replied} replies left there, {returned} came back \
             (in {time:.1?}, by both agents' counts)"
        )
    }
}
