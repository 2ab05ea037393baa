//! `HEALTH_POLICY` and its counters: verdict tables, each fully written before an endpoint refers to it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::path::Path;

use aya::maps::{MapData, MapError, PerCpuArray, PerCpuValues};
use aya::util::nr_cpus;
use health_common::metrics::Counter;
use health_common::policy::{
    POLICY_COUNTERS, POLICY_ENTRIES, PolicyEntry, PolicyKey, VERDICT_ALLOW, VERDICT_DENY,
    VERDICT_NONE,
};

use crate::aya_io::map_io;
use crate::error::{DatapathError, map_error};
use crate::maps::{map_data, typed};
use crate::trie::{Prefix, Trie};
use crate::{layout, sys};

/// The counter shared by all entries without their own.
const SHARED_COUNTER: u32 = 0;

/// What a table entry matches: the peer and the packets. Among the matching entries, the longest prefix decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PolicyMatch {
    /// [`POLICY_INGRESS`](health_common::policy::POLICY_INGRESS) or
    /// [`POLICY_EGRESS`](health_common::policy::POLICY_EGRESS).
    pub direction: u8,
    /// Identity of the other side, or [`ANY_IDENTITY`](health_common::policy::ANY_IDENTITY).
    pub identity: u32,
    /// IP protocol; 0 if the prefix ends before it.
    pub protocol: u8,
    /// Destination port or ICMP type, network byte order; 0 if the prefix ends before it.
    pub port_be: u16,
    /// Number of matched bits, from [`PREFIX_ALL`](health_common::policy::PREFIX_ALL) to
    /// [`PREFIX_PORT`](health_common::policy::PREFIX_PORT). Values between
    /// [`PREFIX_PROTOCOL`](health_common::policy::PREFIX_PROTOCOL) and `PREFIX_PORT` match a port range.
    pub prefix_len: u32,
}

impl PolicyMatch {
    fn key(self, table: u32) -> Prefix<PolicyKey> {
        let key = PolicyKey {
            table,
            direction: self.direction,
            pad: [0; 3],
            identity: self.identity,
            protocol: self.protocol,
            pad2: 0,
            port_be: self.port_be,
        };
        (self.prefix_len, key)
    }

    pub(super) fn of(&(prefix_len, key): &Prefix<PolicyKey>) -> Self {
        Self {
            direction: key.direction,
            identity: key.identity,
            protocol: key.protocol,
            port_be: key.port_be,
            prefix_len,
        }
    }
}

/// Errors of the policy tables.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// The map is full. Nothing of the table was kept.
    #[error(
        "cannot write the {wanted} entries of policy table {table}: {used} of {POLICY_ENTRIES} in \
         HEALTH_POLICY are in use; use fewer rules, identities or port ranges"
    )]
    Full {
        /// The table.
        table: u32,
        /// Number of its entries.
        wanted: usize,
        /// Number of entries in other tables.
        used: usize,
    },
    /// Tables are immutable: endpoints may be using them.
    #[error("policy table {0} already exists: write the new policy to another one")]
    Exists(u32),
    /// Table 0 does not exist.
    #[error("policy tables are numbered from 1")]
    NoNumber,
    /// The entry is invalid, or no packet could match it.
    #[error("cannot write policy table {table}: {what}: {entry:?}")]
    Entry {
        /// The table.
        table: u32,
        /// What is wrong with the entry.
        what: &'static str,
        /// The entry.
        entry: PolicyMatch,
    },
    /// The kernel refused. Nothing of a table being written was kept.
    #[error("cannot {what} policy table {table}: {source}")]
    Kernel {
        /// The attempted operation.
        what: &'static str,
        /// The table.
        table: u32,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// An entry's identity across the tables of one policy, before and after a change.
type Logical = (u32, PolicyMatch);

/// An entry in the map.
#[derive(Clone, Copy, Debug)]
struct WrittenEntry {
    logical: Logical,
    counter: u32,
}

/// A counter in use.
#[derive(Debug)]
struct TakenCounter {
    index: u32,
    /// Number of tables with an entry that uses this counter.
    tables: usize,
}

/// The tables in the map.
pub struct PolicyTables {
    trie: Trie<PolicyKey, PolicyEntry>,
    counters: PerCpuArray<MapData, Counter>,
    tables: BTreeMap<u32, Vec<WrittenEntry>>,
    taken: HashMap<Logical, TakenCounter>,
    /// Unused counters; the last one is used next.
    free: Vec<u32>,
}

impl PolicyTables {
    /// Reads a former agent's entries from the maps pinned in an instance's folder. No other agent may write to the
    /// maps from now on.
    pub(crate) fn from_pins(pins: &Path) -> Result<Self, DatapathError> {
        let entries = map_data(pins, &layout::POLICY)?;
        let counters = typed(pins, &layout::POLICY_COUNTERS, PerCpuArray::try_from)?;
        Self::open(entries, counters)
            .map_err(|source| map_error("read", layout::POLICY.name)(MapError::IoError(source)))
    }

    fn open(entries: MapData, counters: PerCpuArray<MapData, Counter>) -> io::Result<Self> {
        let trie: Trie<PolicyKey, PolicyEntry> = Trie::new(entries);
        let mut tables: BTreeMap<u32, Vec<WrittenEntry>> = BTreeMap::new();
        let mut taken: HashMap<Logical, TakenCounter> = HashMap::new();
        let mut is_free = vec![true; POLICY_COUNTERS as usize];
        for (prefix, entry) in trie.entries()? {
            let logical = (entry.subject, PolicyMatch::of(&prefix));
            let counter = entry.counter;
            let written = WrittenEntry { logical, counter };
            tables.entry(prefix.1.table).or_default().push(written);
            if let Some(is_free) = is_free.get_mut(counter as usize)
                && counter != SHARED_COUNTER
            {
                *is_free = false;
                let first = TakenCounter {
                    index: counter,
                    tables: 0,
                };
                taken.entry(logical).or_insert(first).tables += 1;
            }
        }
        let free = (SHARED_COUNTER + 1..POLICY_COUNTERS)
            .rev()
            .filter(|&index| is_free[index as usize])
            .collect();
        Ok(Self {
            trie,
            counters,
            tables,
            taken,
            free,
        })
    }

    /// Returns the numbers of the tables in the map, in order.
    pub fn tables(&self) -> impl Iterator<Item = u32> {
        self.tables.keys().copied()
    }

    /// Returns the number of entries in the map, over all tables.
    pub fn len(&self) -> usize {
        self.tables.values().map(Vec::len).sum()
    }

    /// Whether there are no tables.
    pub fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    /// Whether a table with this many entries would fit after the removal of the tables in `without`.
    pub fn has_room(&self, entries: usize, without: &BTreeSet<u32>) -> bool {
        let kept = self
            .tables
            .iter()
            .filter(|(table, _)| !without.contains(table));
        let kept: usize = kept.map(|(_, entries)| entries.len()).sum();
        kept + entries <= POLICY_ENTRIES as usize
    }

    /// Writes a table, completely or not at all. No endpoint may refer to the table before that.
    ///
    /// `subject` identifies the policy's owner, such as the identity of the endpoints. An entry that two tables of one
    /// subject have in common uses the same counter in both, so the counter continues when a policy changes and when an
    /// agent restarts. When the [`POLICY_COUNTERS`] run out, the remaining entries share one counter.
    ///
    /// Verdicts are [`VERDICT_NONE`], [`VERDICT_ALLOW`] and [`VERDICT_DENY`]. A table without entries is valid; it
    /// allows nothing.
    pub fn install(
        &mut self,
        table: u32,
        subject: u32,
        entries: impl IntoIterator<Item = (PolicyMatch, u8)>,
    ) -> Result<(), PolicyError> {
        if table == 0 {
            return Err(PolicyError::NoNumber);
        }
        if self.tables.contains_key(&table) {
            return Err(PolicyError::Exists(table));
        }
        let entries = checked(table, entries)?;
        let used = self.len();
        let wanted = entries.len();
        if used + wanted > POLICY_ENTRIES as usize {
            return Err(PolicyError::Full {
                table,
                wanted,
                used,
            });
        }
        let mut written = Vec::with_capacity(wanted);
        let result = self.write(table, subject, &entries, &mut written);
        if let Err(source) = result {
            self.undo(table, written);
            return Err(match source.raw_os_error() {
                Some(libc::ENOSPC) => PolicyError::Full {
                    table,
                    wanted,
                    used,
                },
                _ => kernel("write", table, source),
            });
        }
        self.tables.insert(table, written);
        Ok(())
    }

    /// Removes tables that no endpoint refers to any more. Waits until no program is using them for a packet: some
    /// milliseconds, however many tables there are.
    pub fn remove(&mut self, tables: &[u32]) -> Result<(), PolicyError> {
        let Some(&first) = tables.first() else {
            return Ok(());
        };
        sys::wait_for_programs().map_err(|source| kernel("retire", first, source))?;
        for &table in tables {
            let Some(entries) = self.tables.get(&table) else {
                continue;
            };
            self.trie
                .delete(&keys(table, entries))
                .map_err(|source| kernel("remove", table, source))?;
            for entry in self.tables.remove(&table).unwrap_or_default() {
                self.release(&entry);
            }
        }
        Ok(())
    }

    /// Returns the packets and bytes that matched an entry of a subject's tables, summed over all CPUs; `None` if the
    /// entry has no counter of its own.
    pub fn counted(&self, subject: u32, what: &PolicyMatch) -> io::Result<Option<Counter>> {
        let Some(taken) = self.taken.get(&(subject, *what)) else {
            return Ok(None);
        };
        let values = self.counters.get(&taken.index, 0).map_err(map_io)?;
        Ok(Some(values.iter().fold(
            Counter::default(),
            |sum, counter| Counter {
                packets: sum.packets + counter.packets,
                bytes: sum.bytes + counter.bytes,
            },
        )))
    }

    /// Allocates counters and writes the entries. `written` receives the entries with their counters, even if an error
    /// follows.
    fn write(
        &mut self,
        table: u32,
        subject: u32,
        entries: &[(PolicyMatch, u8)],
        written: &mut Vec<WrittenEntry>,
    ) -> io::Result<()> {
        let mut rows = Vec::with_capacity(entries.len());
        for &(what, verdict) in entries {
            let logical = (subject, what);
            let counter = self.take(logical)?;
            written.push(WrittenEntry { logical, counter });
            let entry = PolicyEntry {
                counter,
                subject,
                verdict,
                pad: [0; 3],
            };
            rows.push((what.key(table), entry));
        }
        self.trie.write(&rows).map_err(|(_, error)| error)
    }

    fn undo(&mut self, table: u32, written: Vec<WrittenEntry>) {
        match self.trie.delete(&keys(table, &written)) {
            Ok(()) => written.iter().for_each(|entry| self.release(entry)),
            // Keeps the table, so that it is removed with other unreferenced tables.
            Err(error) => {
                tracing::warn!(table, %error, "cannot release a policy table");
                self.tables.insert(table, written);
            }
        }
    }

    /// Returns the counter of an entry: its existing one, or a new one that starts at zero.
    fn take(&mut self, logical: Logical) -> io::Result<u32> {
        if let Some(taken) = self.taken.get_mut(&logical) {
            taken.tables += 1;
            return Ok(taken.index);
        }
        let Some(index) = self.free.pop() else {
            return Ok(SHARED_COUNTER);
        };
        if let Err(error) = self.clear(index) {
            self.free.push(index);
            return Err(error);
        }
        self.taken
            .insert(logical, TakenCounter { index, tables: 1 });
        Ok(index)
    }

    fn clear(&mut self, index: u32) -> io::Result<()> {
        let cpus = nr_cpus().map_err(|(_, error)| error)?;
        let zero = PerCpuValues::try_from(vec![Counter::default(); cpus])?;
        self.counters.set(index, zero, 0).map_err(map_io)
    }

    fn release(&mut self, entry: &WrittenEntry) {
        let Some(taken) = self.taken.get_mut(&entry.logical) else {
            return;
        };
        // Otherwise no counter was free when the entry's table was written.
        if taken.index != entry.counter {
            return;
        }
        taken.tables -= 1;
        if taken.tables == 0 {
            self.free.push(taken.index);
            self.taken.remove(&entry.logical);
        }
    }
}

fn keys(table: u32, entries: &[WrittenEntry]) -> Vec<Prefix<PolicyKey>> {
    let keys = entries.iter().map(|entry| entry.logical.1.key(table));
    keys.collect()
}

/// Sorts the entries and checks that every entry can match a packet.
fn checked(
    table: u32,
    entries: impl IntoIterator<Item = (PolicyMatch, u8)>,
) -> Result<Vec<(PolicyMatch, u8)>, PolicyError> {
    let mut entries: Vec<(PolicyMatch, u8)> = entries.into_iter().collect();
    entries.sort_unstable();
    let mut former = None;
    for &(entry, verdict) in &entries {
        let wrong = if former == Some(entry) {
            Some("duplicate entry")
        } else {
            mistake(&entry, verdict)
        };
        if let Some(what) = wrong {
            return Err(PolicyError::Entry { table, what, entry });
        }
        former = Some(entry);
    }
    Ok(entries)
}

/// Returns what is wrong with an entry on its own.
fn mistake(entry: &PolicyMatch, verdict: u8) -> Option<&'static str> {
    use health_common::policy::{POLICY_EGRESS, PREFIX_ALL, PREFIX_PORT, PREFIX_PROTOCOL};
    let port_bits = entry.prefix_len.saturating_sub(PREFIX_PROTOCOL);
    let beyond = u32::from(u16::MAX) >> port_bits;
    if ![VERDICT_NONE, VERDICT_ALLOW, VERDICT_DENY].contains(&verdict) {
        Some("invalid verdict")
    } else if entry.direction > POLICY_EGRESS {
        Some("invalid direction")
    } else if entry.prefix_len != PREFIX_ALL
        && !(PREFIX_PROTOCOL..=PREFIX_PORT).contains(&entry.prefix_len)
    {
        Some("invalid prefix length")
    } else if entry.prefix_len == PREFIX_ALL && entry.protocol != 0
        || u32::from(u16::from_be(entry.port_be)) & beyond != 0
    {
        Some("bits set beyond the prefix")
    } else {
        None
    }
}

fn kernel(what: &'static str, table: u32, source: io::Error) -> PolicyError {
    PolicyError::Kernel {
        what,
        table,
        source,
    }
}
