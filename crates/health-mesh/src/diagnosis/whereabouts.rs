//! Where echo probes got lost, in words.

use super::exceeds;
use crate::direction::Passage;
use crate::history::Loss;

/// A part of the way to a peer and back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    There,
    InPeer,
    Back,
    Here,
}

/// The parts on which more probes got lost than the threshold, and than chance makes of it.
#[derive(Clone, Debug)]
pub(super) struct Whereabouts {
    passage: Passage,
    lossy: Vec<Part>,
}

impl Part {
    const ALL: [Self; 4] = [Self::There, Self::InPeer, Self::Back, Self::Here];

    /// How many got lost there, of how many.
    fn lost(self, passage: &Passage) -> (u32, u32) {
        match self {
            Self::There => (passage.lost_there, passage.sent),
            Self::InPeer => (passage.lost_in_peer, passage.arrived),
            Self::Back => (passage.lost_back, passage.replied),
            Self::Here => (passage.lost_here, passage.returned),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::There => "on the way there",
            Self::InPeer => "in the peer's host",
            Self::Back => "on the way back",
            Self::Here => "in this host",
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
            Self::There => format!("{arrived} of {sent} arrived"),
            Self::InPeer => format!("{replied} of {arrived} that arrived were answered"),
            Self::Back => format!("{returned} of {replied} replies came back"),
            Self::Here => {
                format!("{lost_here} of {returned} replies that came back did not reach the agent")
            }
        }
    }
}

impl Whereabouts {
    /// What the first of these passages that tells a loss says.
    pub(super) fn of(passages: &[Option<Passage>], threshold: f64) -> Option<Self> {
        passages.iter().flatten().find_map(|passage| {
            let is_lossy = |part: &Part| {
                let (lost, probes) = part.lost(passage);
                let loss = Loss {
                    probes,
                    lost: lost.min(probes),
                    window: passage.time,
                };
                exceeds(&loss, threshold)
            };
            let lossy: Vec<Part> = Part::ALL.into_iter().filter(is_lossy).collect();
            (!lossy.is_empty()).then_some(Self {
                passage: *passage,
                lossy,
            })
        })
    }

    /// Of a target that answers: `all on the way there: 46 of 60 arrived`.
    pub(super) fn of_losses(&self) -> String {
        let passage = &self.passage;
        let elsewhere = Part::ALL
            .iter()
            .any(|part| !self.lossy.contains(part) && part.lost(passage).0 > 0);
        match self.lossy.as_slice() {
            [part] => {
                let all = if elsewhere { "most" } else { "all" };
                format!("{all} {}: {}", part.name(), part.counts(passage))
            }
            parts => {
                let part = |part: &Part| format!("{} ({})", part.name(), part.counts(passage));
                parts.iter().map(part).collect::<Vec<_>>().join(" and ")
            }
        }
    }

    /// Of a target that does not answer.
    pub(super) fn of_silence(&self) -> String {
        let Passage {
            sent,
            arrived,
            replied,
            ..
        } = self.passage;
        let of = format!("{arrived} of {sent}");
        match self.lossy.first() {
            // They may have left by another device.
            Some(Part::InPeer) => format!(
                "echo requests arrive there ({of}), but {replied} replies left by its uplinks: check its \
                 own firewall and limits of ICMP"
            ),
            Some(Part::Back) => {
                format!("echo requests arrive there ({of}), replies do not come back")
            }
            Some(Part::Here) => {
                "replies come back to this host and do not reach the agent: check the \
                                 firewall of this host"
                    .to_owned()
            }
            Some(Part::There) | None => format!("echo requests do not arrive there ({of} did)"),
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
