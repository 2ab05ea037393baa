//! All that this node needs from a store: identities for the labels of its endpoints, and announcements of its
//! endpoints' addresses. Waiting callers are sent the results.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use health_model::identity::Identity;
use health_model::labels::LabelSet;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::{EndpointDetails, HeldIdentities, IdentityError, OnOutage};

/// The answer to a waiting caller.
pub(super) type Answer = Result<Identity, IdentityError>;

/// All that this node wants from the store.
#[derive(Debug, Default)]
pub(super) struct Wants {
    sets: BTreeMap<Arc<LabelSet>, Want>,
    addresses: BTreeMap<IpAddr, Announce>,
    /// The details of endpoints, by id.
    details: Arc<BTreeMap<u16, EndpointDetails>>,
    /// Why the store cannot be used at present.
    outage: Option<IdentityError>,
    /// Whether to delete the entries of earlier agents of this node.
    forgets_earlier: bool,
}

/// A wanted label set.
#[derive(Debug, Default)]
struct Want {
    /// The number of endpoints with these labels.
    uses: usize,
    waiters: Vec<(OnOutage, oneshot::Sender<Answer>)>,
    identity: Option<Identity>,
    /// When the reference was last written; `None` if there is none.
    written: Option<Instant>,
    /// When the store last refused the label set.
    refused: Option<Instant>,
}

/// An announced address.
#[derive(Clone, Debug)]
pub(super) struct Announce {
    /// The endpoint's id.
    pub(super) endpoint: u16,
    /// The endpoint's identity.
    pub(super) identity: Identity,
    /// The address of this node.
    pub(super) node: IpAddr,
    /// When the announcement was last written.
    pub(super) written: Option<Instant>,
}

/// A label set that is wanted.
#[derive(Clone, Debug)]
pub(super) struct WantedIdentity {
    /// The set.
    pub(super) labels: Arc<LabelSet>,
    /// The last identity of the set.
    pub(super) identity: Option<Identity>,
    /// When the reference was last written.
    pub(super) written: Option<Instant>,
    /// When the store last refused the set.
    pub(super) refused: Option<Instant>,
}

impl Want {
    /// Sends an error to the callers that do not want to wait.
    fn refuse(&mut self, error: &IdentityError) {
        for (on_outage, waiter) in std::mem::take(&mut self.waiters) {
            match on_outage {
                OnOutage::Wait => self.waiters.push((on_outage, waiter)),
                OnOutage::Fail => drop(waiter.send(Err(error.clone()))),
            }
        }
    }
}

impl Wants {
    /// Requests an identity for one more endpoint. If the identity is known, the answer is sent immediately.
    pub(super) fn want(
        &mut self,
        labels: &LabelSet,
        on_outage: OnOutage,
    ) -> oneshot::Receiver<Answer> {
        let (sender, answer) = oneshot::channel();
        if !self.sets.contains_key(labels) {
            self.sets.insert(Arc::new(labels.clone()), Want::default());
        }
        let Some(want) = self.sets.get_mut(labels) else {
            return answer;
        };
        want.uses += 1;
        let outage = self.outage.clone().filter(|_| on_outage == OnOutage::Fail);
        let known = match (want.identity, outage) {
            (Some(identity), _) => Some(Ok(identity)),
            (None, Some(outage)) => Some(Err(outage)),
            (None, None) => None,
        };
        match known {
            // Sending cannot fail: the receiver still exists.
            Some(known) => drop(sender.send(known)),
            None => {
                want.refused = None;
                want.waiters.push((on_outage, sender));
            }
        }
        answer
    }

    /// Releases the identity for one endpoint.
    pub(super) fn unwant(&mut self, labels: &LabelSet) {
        if let Some(want) = self.sets.get_mut(labels) {
            want.uses = want.uses.saturating_sub(1);
            if want.uses == 0 {
                self.sets.remove(labels);
            }
        }
    }

    /// Announces the addresses of an endpoint, each with the address of this node. Returns whether any of it is new.
    pub(super) fn announce(
        &mut self,
        endpoint: u16,
        identity: Identity,
        addresses: &[(IpAddr, IpAddr)],
    ) -> bool {
        let mut is_news = false;
        for (ip, node) in addresses.iter().copied() {
            let known = self.addresses.get(&ip);
            let is_known = known.is_some_and(|known| {
                (known.endpoint, known.identity, known.node) == (endpoint, identity, node)
            });
            if !is_known {
                is_news = true;
                let announce = Announce {
                    endpoint,
                    identity,
                    node,
                    written: None,
                };
                self.addresses.insert(ip, announce);
            }
        }
        is_news
    }

    /// Withdraws an address.
    pub(super) fn withdraw(&mut self, ip: IpAddr) {
        self.addresses.remove(&ip);
    }

    /// Replaces what is known about the endpoints. Returns whether it is different.
    pub(super) fn describe(&mut self, details: BTreeMap<u16, EndpointDetails>) -> bool {
        let is_news = *self.details != details;
        if is_news {
            self.details = Arc::new(details);
        }
        is_news
    }

    /// See [`Self::describe`].
    pub(super) fn details(&self) -> Arc<BTreeMap<u16, EndpointDetails>> {
        self.details.clone()
    }

    /// Marks all entries of earlier agents of this node for deletion.
    pub(super) fn forget_earlier(&mut self) {
        self.forgets_earlier = true;
    }

    /// See [`Self::forget_earlier`].
    pub(super) fn forgets_earlier(&self) -> bool {
        self.forgets_earlier
    }

    /// Whether any caller waits for an answer.
    pub(super) fn has_waiters(&self) -> bool {
        self.sets.values().any(|want| !want.waiters.is_empty())
    }

    /// The wanted label sets.
    pub(super) fn sets(&self) -> impl Iterator<Item = WantedIdentity> {
        self.sets.iter().map(|(labels, want)| WantedIdentity {
            labels: labels.clone(),
            identity: want.identity,
            written: want.written,
            refused: want.refused,
        })
    }

    /// The announced addresses.
    pub(super) fn addresses(&self) -> impl Iterator<Item = (IpAddr, &Announce)> {
        self.addresses.iter().map(|(ip, announce)| (*ip, announce))
    }

    /// Whether an address is announced.
    pub(super) fn is_announced(&self, ip: IpAddr) -> bool {
        self.addresses.contains_key(&ip)
    }

    /// Records the store's answer for a label set.
    pub(super) fn answered(&mut self, labels: &LabelSet, answer: &Answer, now: Instant) {
        let Some(want) = self.sets.get_mut(labels) else {
            return;
        };
        match answer {
            Ok(identity) => {
                if let Some(before) = want.identity.filter(|before| before != identity) {
                    tracing::warn!(%before, %identity, "an identity changed because the store lost its number");
                }
                want.identity = Some(*identity);
                (want.written, want.refused) = (Some(now), None);
            }
            Err(error) => {
                if want.identity.is_some() && want.refused.is_none() {
                    tracing::error!(%error, "cannot keep an in-use identity in the store");
                }
                want.refused = Some(now);
            }
        }
        for (_, waiter) in want.waiters.drain(..) {
            // A caller that stopped waiting withdraws its request itself.
            let _ = waiter.send(answer.clone());
        }
        if let Ok(identity) = answer {
            self.take_from_others(labels, *identity);
        }
    }

    /// Records that the store did not take a label set, and may take it later. Callers that do not want to wait get the
    /// error.
    #[cfg(feature = "kubernetes")]
    pub(super) fn postpone(&mut self, labels: &LabelSet, error: &IdentityError, now: Instant) {
        if let Some(want) = self.sets.get_mut(labels) {
            want.refused = Some(now);
            want.refuse(error);
        }
    }

    /// Takes the number from any other label set that had it. That set has lost the number, and requests a new one
    /// immediately.
    fn take_from_others(&mut self, labels: &LabelSet, identity: Identity) {
        let others = self
            .sets
            .iter_mut()
            .filter(|(other, _)| ***other != *labels);
        for (_, other) in others.filter(|(_, other)| other.identity == Some(identity)) {
            other.written = None;
        }
    }

    /// Records that an address was written.
    pub(super) fn announced(&mut self, ip: IpAddr, identity: Identity, now: Instant) {
        let announce = self.addresses.get_mut(&ip);
        if let Some(announce) = announce.filter(|announce| announce.identity == identity) {
            announce.written = Some(now);
        }
    }

    /// Records that the store cannot be used. Callers that do not want to wait get an error.
    pub(super) fn fail(&mut self, outage: IdentityError) {
        for want in self.sets.values_mut() {
            want.refuse(&outage);
        }
        self.outage = Some(outage);
    }

    /// Records that the store can be used.
    pub(super) fn recover(&mut self) {
        self.outage = None;
    }

    /// The identities that this node holds.
    pub(super) fn held(&self) -> HeldIdentities {
        let held = self.sets.iter();
        held.filter_map(|(labels, want)| Some((labels.clone(), want.identity?)))
            .collect()
    }
}
