//! The queue of news from a prober to the task that acts on it.
//!
//! Sending never waits, because the receiver may itself be the sender. The queue has space for [`ROOM`] news; once it
//! is full, news replaces earlier news that it makes obsolete. So at most [`ROOM`] news, plus one per probe and pod,
//! ever wait.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::Notify;
use tracing::warn;

use super::lock;
use crate::spec::{PodSpec, ProbeType};
use crate::worker::restart::Kill;
use crate::worker::{Event, PodStatus, ResultUpdate};

/// Number of waiting news from which on newer news replaces older news.
const ROOM: usize = 4096;

/// A report of a prober. Reports come in order of occurrence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// A new or changed result, and the kill that follows from it, if any.
    Result(ResultUpdate, Option<Kill>),
    /// A pod's status has changed.
    Status(Arc<str>, PodStatus),
    /// An event to report about a container.
    Event {
        /// The pod.
        pod: Arc<PodSpec>,
        /// The container's name.
        container: Arc<str>,
        /// The type of the probe.
        kind: ProbeType,
        /// The event.
        event: Event,
    },
}

/// The subject of a piece of news. Later news on the same subject makes earlier news obsolete: a failure that kills its
/// container is that container's last result.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Subject {
    Probe(Arc<str>, Arc<str>, ProbeType),
    Pod(Arc<str>),
}

impl News {
    /// The subject; `None` for news that later news cannot make obsolete.
    fn subject(&self) -> Option<Subject> {
        match self {
            Self::Result(update, _) => Some(Subject::Probe(
                update.pod_uid.clone(),
                update.container.clone(),
                update.kind,
            )),
            Self::Status(uid, _) => Some(Subject::Pod(uid.clone())),
            Self::Event { .. } => None,
        }
    }
}

#[derive(Debug, Default)]
struct Waiting {
    next: u64,
    /// The waiting news, by sequence number.
    news: BTreeMap<u64, News>,
    /// The sequence number of the latest news on each subject.
    latest: HashMap<Subject, u64>,
    /// Number of events dropped for lack of space.
    lost: u64,
    is_closed: bool,
}

impl Waiting {
    fn push(&mut self, news: News) {
        let subject = news.subject();
        if self.news.len() >= ROOM {
            match &subject {
                Some(subject) => {
                    if let Some(void) = self.latest.get(subject) {
                        self.news.remove(void);
                    }
                }
                None => {
                    self.lost += 1;
                    return;
                }
            }
        }
        if let Some(subject) = subject {
            self.latest.insert(subject, self.next);
        }
        self.news.insert(self.next, news);
        self.next += 1;
    }

    fn pop(&mut self) -> Option<News> {
        let (number, news) = self.news.pop_first()?;
        if let Some(subject) = news.subject()
            && self.latest.get(&subject) == Some(&number)
        {
            self.latest.remove(&subject);
        }
        Some(news)
    }
}

#[derive(Debug, Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    arrived: Notify,
}

impl Queue {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        lock(&self.waiting)
    }

    fn close(&self) {
        self.waiting().is_closed = true;
        self.arrived.notify_one();
    }
}

/// The sending end.
#[derive(Debug)]
pub(super) struct NewsSender(Arc<Queue>);

/// The receiving end.
#[derive(Debug)]
pub struct NewsReceiver(Arc<Queue>);

pub(super) fn channel() -> (NewsSender, NewsReceiver) {
    let queue = Arc::new(Queue::default());
    (NewsSender(queue.clone()), NewsReceiver(queue))
}

impl NewsSender {
    /// Sends news without waiting. The receiver may be gone.
    pub(super) fn send(&self, news: News) {
        let mut waiting = self.0.waiting();
        if waiting.is_closed {
            return;
        }
        waiting.push(news);
        drop(waiting);
        self.0.arrived.notify_one();
    }
}

impl NewsReceiver {
    /// The next news; `None` when the prober has stopped. Cancel-safe: nothing is lost if this future is dropped.
    pub async fn recv(&mut self) -> Option<News> {
        loop {
            // Check in this order: news sent before the close is already in the queue.
            let is_closed = self.0.waiting().is_closed;
            if let Some(news) = self.try_recv() {
                return Some(news);
            }
            if is_closed {
                return None;
            }
            self.0.arrived.notified().await;
        }
    }

    /// Returns the next news, if any.
    pub fn try_recv(&mut self) -> Option<News> {
        let mut waiting = self.0.waiting();
        let lost = std::mem::take(&mut waiting.lost);
        let news = waiting.pop();
        drop(waiting);
        if lost > 0 {
            warn!(lost, "too many probe events at once; some were dropped");
        }
        news
    }
}

impl Drop for NewsSender {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl Drop for NewsReceiver {
    fn drop(&mut self) {
        let mut waiting = self.0.waiting();
        let left = std::mem::take(&mut *waiting);
        waiting.is_closed = true;
        drop(waiting);
        drop(left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec;

    fn status(pod: usize, ready: bool) -> News {
        let status = PodStatus {
            ready,
            ..PodStatus::default()
        };
        News::Status(format!("uid-{pod}").into(), status)
    }

    fn event() -> News {
        let text = r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"},
            "spec": {"containers": [{"name": "app", "livenessProbe": {"tcpSocket": {"port": 80}}}]}}"#;
        let pod = spec::read(text).pods.into_iter().next().expect("a pod");
        News::Event {
            pod: Arc::new(pod),
            container: "app".into(),
            kind: ProbeType::Liveness,
            event: Event {
                reason: "Unhealthy",
                message: String::new(),
            },
        }
    }

    #[tokio::test]
    async fn news_are_bounded_and_the_last_word_about_each_pod_is_kept() {
        let (sender, mut receiver) = channel();
        for pod in 0..ROOM {
            sender.send(status(pod % 8, false));
        }
        // While nobody reads, obsolete news is removed, and new news comes last.
        for _ in 0..3 {
            for pod in 0..16 {
                sender.send(status(pod, true));
                sender.send(event());
            }
        }
        let all: Vec<News> = std::iter::from_fn(|| receiver.try_recv()).collect();
        assert_eq!(all.len(), ROOM + 8);
        let last: Vec<News> = (0..16).map(|pod| status(pod, true)).collect();
        assert_eq!(all[all.len() - 16..], last);
        // There is space again, also for events, and nothing is dropped.
        for news in [status(1, false), event(), status(1, true)] {
            sender.send(news.clone());
            assert_eq!(receiver.recv().await, Some(news));
        }
        sender.send(status(1, false));
        sender.send(status(1, true));
        drop(sender);
        assert_eq!(receiver.recv().await, Some(status(1, false)));
        assert_eq!(receiver.recv().await, Some(status(1, true)));
        assert_eq!(receiver.recv().await, None);
    }

    #[tokio::test]
    async fn who_waits_for_news_gets_them_and_whoever_does_not_listen_keeps_none() {
        let (sender, mut receiver) = channel();
        let waits = tokio::spawn(async move { (receiver.recv().await, receiver) });
        tokio::task::yield_now().await;
        sender.send(event());
        let (news, receiver) = waits.await.unwrap();
        assert_eq!(news, Some(event()));
        drop(receiver);
        sender.send(event());
        assert!(sender.0.waiting().news.is_empty());
    }
}
