//! Relays the programs' events to monitors as they happen: each reader gets the events that it wants, and the programs
//! write only events that some reader wants.

mod filter;
mod kernel;
mod relay;
mod show;

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use health_common::events::{Event, MonitorFilter};
use health_model::events::{EventFilter, LossCause, MonitorLine};
use tokio::sync::mpsc;
use tracing::warn;

pub use kernel::{KernelRing, KernelSwitch};
pub use relay::{Ring, relay};

/// Maximum number of readers at a time.
pub const READERS: usize = 16;
/// Lines queued per reader: about 2 MB, or one second at a thousand events per second.
const LINES: usize = 1_024;

/// Selects which events the programs write.
pub trait Switch: Send + Sync + 'static {
    /// Makes the programs write the events that this filter passes, from now on.
    fn set(&self, filter: &MonitorFilter) -> io::Result<()>;
}

/// Why a subscription failed.
#[derive(Debug, thiserror::Error)]
pub enum SubscribeError {
    /// All reader slots are taken.
    #[error("{READERS} monitors are already running; stop one of them")]
    TooMany,
    /// The agent is stopping.
    #[error("the agent is stopping; try again once it is back")]
    Closed,
    /// The programs' filter cannot be set.
    #[error("cannot set which events the programs report: {0}")]
    Switch(io::Error),
}

/// Totals since the agent started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Current number of readers.
    pub readers: usize,
    /// Events that the programs wrote and the agent read.
    pub read: u64,
    /// Events that the programs could not write because the ring buffer was full.
    pub lost_in_ring: u64,
    /// Events that a reader was too slow for, counted once per such reader.
    pub lost_by_readers: u64,
}

/// The registry of monitors.
pub struct Hub {
    switch: Box<dyn Switch>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    readers: BTreeMap<u64, Reader>,
    last: u64,
    is_closed: bool,
    counts: Counts,
}

struct Reader {
    filter: EventFilter,
    lines: mpsc::Sender<MonitorLine>,
    /// Lost but not reported yet, by cause.
    unreported: [u64; 2],
}

const CAUSES: [LossCause; 2] = [LossCause::RingFull, LossCause::SlowReader];

impl Reader {
    /// Reports losses, as far as the queue has space.
    fn report_losses(&mut self) {
        for (events, cause) in self.unreported.iter_mut().zip(CAUSES) {
            let line = MonitorLine::Lost {
                events: *events,
                cause,
            };
            if *events > 0 && self.lines.try_send(line).is_ok() {
                *events = 0;
            }
        }
    }

    /// Sends a line, unless losses are still unreported: nothing overtakes a loss report.
    fn send(&mut self, line: MonitorLine) -> bool {
        self.report_losses();
        let is_sent = self.unreported == [0; 2] && self.lines.try_send(line).is_ok();
        if !is_sent {
            self.unreported[1] += 1;
        }
        is_sent
    }
}

impl Hub {
    /// Creates a hub without readers. Makes the programs write nothing, whatever a former agent had set.
    pub fn new(switch: impl Switch) -> io::Result<Self> {
        switch.set(&MonitorFilter::default())?;
        Ok(Self {
            switch: Box::new(switch),
            state: Mutex::default(),
        })
    }

    /// Adds a reader until the returned subscription is dropped. When this returns, the programs write the events that
    /// the reader wants.
    pub fn subscribe(
        self: &Arc<Self>,
        filter: EventFilter,
    ) -> Result<Subscription, SubscribeError> {
        let mut state = self.lock();
        if state.is_closed {
            return Err(SubscribeError::Closed);
        }
        if state.readers.len() >= READERS {
            return Err(SubscribeError::TooMany);
        }
        let (sender, lines) = mpsc::channel(LINES);
        let reader = Reader {
            filter,
            lines: sender,
            unreported: [0; 2],
        };
        state.last += 1;
        let id = state.last;
        state.readers.insert(id, reader);
        if let Err(error) = self.switch.set(&wanted(&state)) {
            state.readers.remove(&id);
            return Err(SubscribeError::Switch(error));
        }
        Ok(Subscription {
            hub: self.clone(),
            id,
            lines,
        })
    }

    /// Disconnects all readers, and rejects new ones.
    pub fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        for (_, mut reader) in std::mem::take(&mut state.readers) {
            // If the queue is full, the reader's stream just ends, which means the same.
            reader.send(MonitorLine::End);
        }
        self.switch_to(&MonitorFilter::default());
    }

    /// The current totals.
    pub fn counts(&self) -> Counts {
        let state = self.lock();
        Counts {
            readers: state.readers.len(),
            ..state.counts
        }
    }

    /// Sends an event to the readers that want it; `show` renders it as a line.
    fn deliver(&self, event: &Event, show: impl FnOnce(&Event) -> Option<MonitorLine>) {
        let mut state = self.lock();
        let State {
            readers, counts, ..
        } = &mut *state;
        counts.read += 1;
        let mut wanting = readers
            .values_mut()
            .filter(|reader| filter::has(&reader.filter, event))
            .peekable();
        if wanting.peek().is_none() {
            return;
        }
        let Some(line) = show(event) else { return };
        for reader in wanting {
            if !reader.send(line.clone()) {
                counts.lost_by_readers += 1;
            }
        }
    }

    /// Reports to all readers how many events the ring buffer lost, and how many each reader was too slow for.
    fn report_losses(&self, lost_in_ring: u64) {
        let mut state = self.lock();
        state.counts.lost_in_ring += lost_in_ring;
        for reader in state.readers.values_mut() {
            reader.unreported[0] += lost_in_ring;
            reader.report_losses();
        }
    }

    fn remove(&self, id: u64) {
        let mut state = self.lock();
        if state.readers.remove(&id).is_some() {
            let filter = wanted(&state);
            self.switch_to(&filter);
        }
    }

    /// Sets the programs' filter. On failure, the programs write more than any reader wants.
    fn switch_to(&self, filter: &MonitorFilter) {
        if let Err(error) = self.switch.set(filter) {
            warn!(%error, "cannot set which events the programs write");
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the filter for the programs: all events that some reader wants.
fn wanted(state: &State) -> MonitorFilter {
    filter::union(
        state
            .readers
            .values()
            .map(|reader| filter::widened(&reader.filter)),
    )
}

/// One reader's events. The programs write them until this is dropped.
pub struct Subscription {
    hub: Arc<Hub>,
    id: u64,
    lines: mpsc::Receiver<MonitorLine>,
}

impl Subscription {
    /// Waits for lines and returns up to `most` of them; empty after the last.
    pub async fn next(&mut self, most: usize) -> Vec<MonitorLine> {
        let mut lines = Vec::new();
        self.lines.recv_many(&mut lines, most).await;
        lines
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.hub.remove(self.id);
    }
}

#[cfg(test)]
mod tests {
    use health_common::events::{EVENT_DROP, WANT_CT, WANT_DROP};
    use health_model::events::EventType;
    use jiff::Timestamp;

    use super::*;

    /// Remembers the last filter.
    #[derive(Clone, Default)]
    struct RecordingSwitch(Arc<Mutex<Option<MonitorFilter>>>);

    impl Switch for RecordingSwitch {
        fn set(&self, filter: &MonitorFilter) -> io::Result<()> {
            *self.0.lock().unwrap() = Some(*filter);
            Ok(())
        }
    }

    impl RecordingSwitch {
        fn wanted(&self) -> Option<u32> {
            self.0.lock().unwrap().map(|filter| filter.wanted)
        }
    }

    fn hub() -> (Arc<Hub>, RecordingSwitch) {
        let switch = RecordingSwitch::default();
        (Arc::new(Hub::new(switch.clone()).unwrap()), switch)
    }

    fn of(types: &[EventType]) -> EventFilter {
        EventFilter {
            types: types.to_vec(),
            ..EventFilter::default()
        }
    }

    fn lost(events: u64, cause: LossCause) -> MonitorLine {
        MonitorLine::Lost { events, cause }
    }

    fn drops(hub: &Hub, count: usize) {
        let event = Event {
            kind: EVENT_DROP,
            reason: 132,
            ..Event::default()
        };
        for _ in 0..count {
            hub.deliver(&event, |event| {
                show::line(event, Timestamp::UNIX_EPOCH, None)
            });
        }
    }

    #[test]
    fn the_programs_write_what_somebody_reads() {
        let (hub, switch) = hub();
        assert_eq!(switch.wanted(), Some(0), "whatever a former agent had set");
        let drops = hub.subscribe(of(&[EventType::Drop])).unwrap();
        assert_eq!(switch.wanted(), Some(WANT_DROP));
        let flows = hub.subscribe(of(&[EventType::Ct])).unwrap();
        assert_eq!(switch.wanted(), Some(WANT_DROP | WANT_CT));
        drop(drops);
        assert_eq!(switch.wanted(), Some(WANT_CT));
        drop(flows);
        assert_eq!(switch.wanted(), Some(0));
        assert_eq!(hub.counts(), Counts::default());
    }

    #[tokio::test]
    async fn each_reader_gets_what_it_wants() {
        let (hub, _) = hub();
        let mut all = hub.subscribe(of(&[])).unwrap();
        let mut flows = hub.subscribe(of(&[EventType::Ct])).unwrap();
        drops(&hub, 2);
        assert_eq!(all.next(10).await.len(), 2);
        hub.close();
        assert_eq!(flows.next(10).await, [MonitorLine::End]);
        assert_eq!(flows.next(10).await, []);
        let counts = hub.counts();
        assert_eq!((counts.read, counts.readers), (2, 0));
    }

    #[tokio::test]
    async fn a_slow_reader_learns_what_it_lost_and_where() {
        let (hub, _) = hub();
        let mut slow = hub.subscribe(of(&[])).unwrap();
        let mut quick = hub.subscribe(of(&[])).unwrap();
        drops(&hub, LINES);
        assert_eq!(quick.next(LINES).await.len(), LINES);
        drops(&hub, 5);
        assert_eq!(slow.next(LINES).await.len(), LINES);
        drops(&hub, 1);
        let lines = slow.next(10).await;
        assert_eq!(lines[0], lost(5, LossCause::SlowReader));
        assert_eq!(lines.len(), 2);
        assert_eq!(quick.next(10).await.len(), 6);
        assert_eq!(hub.counts().lost_by_readers, 5);
    }

    #[tokio::test]
    async fn what_the_ring_had_no_room_for_is_reported_to_all() {
        let (hub, _) = hub();
        let mut readers = [(); 2].map(|()| hub.subscribe(of(&[EventType::Ct])).unwrap());
        hub.report_losses(7);
        hub.report_losses(0);
        for reader in &mut readers {
            assert_eq!(reader.next(10).await, [lost(7, LossCause::RingFull)]);
        }
        assert_eq!(hub.counts().lost_in_ring, 7);
    }

    #[test]
    fn readers_have_their_number_and_none_comes_after_the_end() {
        let (hub, switch) = hub();
        let readers: Vec<_> = (0..READERS)
            .map(|_| hub.subscribe(of(&[])).unwrap())
            .collect();
        assert!(matches!(
            hub.subscribe(of(&[])),
            Err(SubscribeError::TooMany)
        ));
        hub.close();
        assert_eq!(switch.wanted(), Some(0));
        assert!(matches!(
            hub.subscribe(of(&[])),
            Err(SubscribeError::Closed)
        ));
        drop(readers);
    }
}
