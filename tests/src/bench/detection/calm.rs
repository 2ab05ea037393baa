//! Periods without faults in which packets are lost or the CPUs are busy: every failure reported in such a period is
//! false.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::fault::firewall;
use super::watch::{Story, Watch};
use crate::Bed;

/// Pause between requests to each agent.
const PAUSE: Duration = Duration::from_millis(100);

/// False reports of all agents.
#[derive(Debug, Default)]
pub(super) struct Falsehoods {
    /// Number of reports of unreachable targets, by reason.
    pub(super) verdicts: BTreeMap<String, u32>,
    /// Number of diagnoses other than `loss`, by cause.
    pub(super) diagnoses: BTreeMap<String, u32>,
}

impl Falsehoods {
    /// Counts the false reports about one node.
    pub(super) fn count(&mut self, story: &Story) {
        for reports in story.verdicts.values() {
            for report in reports {
                if let Err(status) = &report.value {
                    *self.verdicts.entry(status.clone()).or_default() += 1;
                }
            }
        }
        for report in &story.diagnoses {
            if let Some(cause) = report.value.as_deref().filter(|&cause| cause != "loss") {
                *self.diagnoses.entry(cause.to_owned()).or_default() += 1;
            }
        }
    }
}

/// Drops this percentage of the packets to each node, and watches all agents.
pub(super) fn under_loss(bed: &Bed, percent: u32, time: Duration) -> anyhow::Result<Falsehoods> {
    for node in bed.nodes() {
        firewall(
            node,
            &format!(
                "chain in {{ type filter hook prerouting priority raw; \
                 iifname eth0 meta l4proto {{ icmp, tcp }} numgen random mod 100 < {percent} drop; }}"
            ),
        )?;
    }
    let found = watch_all(bed, time)?;
    for node in bed.nodes() {
        node.exec("nft delete table ip fault")?;
    }
    Ok(found)
}

/// Keeps all CPUs busy, and watches all agents.
pub(super) fn under_load(bed: &Bed, time: Duration) -> anyhow::Result<Falsehoods> {
    let load = Load::start(thread::available_parallelism()?.get());
    let found = watch_all(bed, time)?;
    drop(load);
    Ok(found)
}

fn watch_all(bed: &Bed, time: Duration) -> anyhow::Result<Falsehoods> {
    let watches: Vec<Watch> = bed
        .nodes()
        .iter()
        .map(|node| Watch::start(node, PAUSE))
        .collect();
    // Nothing should happen in this time.
    thread::sleep(time);
    let mut found = Falsehoods::default();
    for watch in watches {
        watch
            .finish()?
            .values()
            .for_each(|story| found.count(story));
    }
    Ok(found)
}

/// Threads that spin until they are stopped on drop.
struct Load {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    fn start(threads: usize) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let spin = || {
            let stop = stop.clone();
            thread::spawn(move || {
                let mut turns = 0_u64;
                while !stop.load(Ordering::Relaxed) {
                    turns = black_box(turns.wrapping_add(1));
                }
            })
        };
        let threads = (0..threads).map(|_| spin()).collect();
        Self { stop, threads }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // The thread cannot panic.
            let _ = thread.join();
        }
    }
}
