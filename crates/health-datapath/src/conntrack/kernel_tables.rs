//! Garbage collection of conntrack and NAT entries: user space walks the maps for expired entries; the program
//! `ct_collect` checks each again and removes it.

use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;

use aya::maps::MapData;
use aya::programs::{SchedClassifier, TestRun as _};
use aya::{Pod, TestRunOptions};
use health_common::collect::{
    CHUNK, COLLECT_FLOWS, COLLECT_ORPHANS, COLLECT_SERVICE_FLOWS, COLLECTED, CollectHeader,
    CollectRequest, may_be_orphan,
};
use health_common::ct::{CtEntry, Tuple4, Tuple6};
use health_common::tuple::Tuple;
use health_net::clock;
use tracing::debug;

use crate::aya_io::{map_io, program_io};
use crate::conntrack::{CollectionOutcome, Family, Fill, Pass, TableError, Tables};
use crate::error::DatapathError;
use crate::layout::{self, MapLayout};
use crate::maps::{Ring, map_data};
use crate::program::DatapathProgram;
use crate::programs::open_classifier;
use crate::sys;
use crate::walk::{Batch, EntrySize, Walk};

/// Sample size for estimating the number of entries: 10 % is three standard deviations.
const SAMPLE: usize = 1_024;

/// The maps of flows and translations, and the program that removes entries from them.
pub struct KernelTables {
    /// For TCP, and for other protocols.
    v4: [Protocols; 2],
    v6: [Protocols; 2],
    /// For TCP through services, one per IP version.
    service_flows: [Table; 2],
    program: SchedClassifier,
}

/// The maps of one IP version for some protocols.
struct Protocols {
    flows: Table,
    translations: Table,
}

impl Protocols {
    fn open(pins: &Path, flows: MapLayout, translations: MapLayout) -> Result<Self, DatapathError> {
        Ok(Self {
            flows: Table::open(pins, flows)?,
            translations: Table::open(pins, translations)?,
        })
    }
}

impl KernelTables {
    /// Opens the maps and the program pinned in an instance's folder.
    pub(crate) fn from_pins(pins: &Path) -> Result<Self, DatapathError> {
        Ok(Self {
            program: open_classifier(pins, DatapathProgram::CtCollect)?,
            service_flows: [
                Table::open(pins, layout::REVNAT4)?,
                Table::open(pins, layout::REVNAT6)?,
            ],
            v4: [
                Protocols::open(pins, layout::CT4, layout::NAT4)?,
                Protocols::open(pins, layout::CT_ANY4, layout::NAT_ANY4)?,
            ],
            v6: [
                Protocols::open(pins, layout::CT6, layout::NAT6)?,
                Protocols::open(pins, layout::CT_ANY6, layout::NAT_ANY6)?,
            ],
        })
    }

    /// Rebuilds the rings of nearly full TCP tables with all keys of the tables, so that entries can be evicted.
    fn rebuild_rings(&self, family: Family) -> Result<(), TableError> {
        let (maps, service_flows) = match family {
            Family::Ipv4 => (&self.v4, &self.service_flows[0]),
            Family::Ipv6 => (&self.v6, &self.service_flows[1]),
        };
        let tables = maps
            .iter()
            .flat_map(|maps| [&maps.flows, &maps.translations]);
        for table in tables.chain([service_flows]) {
            table
                .rebuild_ring()
                .map_err(|source| table.error("record the keys of", source))?;
        }
        Ok(())
    }

    fn collect_family<T>(&self, family: &[Protocols; 2]) -> Result<CollectionOutcome, TableError>
    where
        T: Tuple + Pod + Default,
        T::Translation: Pod,
        CollectRequest<T>: Pod,
    {
        let mut all = CollectionOutcome::default();
        for maps in family {
            let collected = self.collect_protocols::<T>(maps)?;
            all.flows = all.flows.and(collected.flows);
            all.translations = all.translations.and(collected.translations);
        }
        Ok(all)
    }

    /// Removes service flows that conntrack has evicted, if the service flow map is nearly full. No other pass over
    /// conntrack finds them.
    fn collect_service_flows<T>(&self, table: &Table) -> Result<(), TableError>
    where
        T: Tuple + Pod + Default,
        T::ServiceFlow: Pod,
        CollectRequest<T>: Pod,
    {
        let collect = || -> io::Result<Answer> {
            if table.is_unused() || !table.fill()?.is_pressed() {
                return Ok(Answer::default());
            }
            let now = clock::coarse_now_secs();
            let mut chunk = Chunk::<T>::new(&self.program, COLLECT_SERVICE_FLOWS);
            table.walk(|key: T, entry: T::ServiceFlow| {
                if T::service_flow_parts(&entry).expires <= now {
                    chunk.push(key)?;
                }
                Ok(())
            })?;
            chunk.finish()
        };
        let removed = collect().map_err(|source| table.error("collect", source))?;
        if removed.flows > 0 {
            debug!(
                map = table.layout.name,
                entries = removed.flows,
                "removed service flows that conntrack evicted"
            );
        }
        Ok(())
    }

    fn collect_protocols<T>(&self, maps: &Protocols) -> Result<CollectionOutcome, TableError>
    where
        T: Tuple + Pod + Default,
        T::Translation: Pod,
        CollectRequest<T>: Pod,
    {
        let (flows_seen, expired) = self
            .collect_flows::<T>(maps)
            .map_err(|source| maps.flows.error("collect", source))?;
        let (translations_seen, orphans) = self
            .collect_orphans::<T>(maps)
            .map_err(|source| maps.translations.error("collect", source))?;
        Ok(CollectionOutcome {
            flows: Pass {
                removed: expired.flows,
                refreshed: expired.refreshed,
                alive: flows_seen.saturating_sub(expired.flows),
            },
            translations: Pass {
                removed: expired.translations + orphans.translations,
                refreshed: orphans.refreshed,
                alive: translations_seen.saturating_sub(orphans.translations),
            },
        })
    }

    /// Removes expired flows. Also returns how many flows it saw.
    fn collect_flows<T>(&self, maps: &Protocols) -> io::Result<(u64, Answer)>
    where
        T: Tuple + Pod + Default,
        CollectRequest<T>: Pod,
    {
        let now = clock::coarse_now_secs();
        let mut chunk = Chunk::<T>::new(&self.program, COLLECT_FLOWS);
        let seen = maps.flows.walk(|key, entry: CtEntry| {
            if entry.has_expired(now) {
                chunk.push(key)?;
            }
            Ok(())
        })?;
        Ok((seen, chunk.finish()?))
    }

    /// Removes translations whose flow is gone. Also returns how many translations it saw.
    fn collect_orphans<T>(&self, maps: &Protocols) -> io::Result<(u64, Answer)>
    where
        T: Tuple + Pod + Default,
        T::Translation: Pod,
        CollectRequest<T>: Pod,
    {
        let now_ns = clock::now_ns();
        let mut chunk = Chunk::<T>::new(&self.program, COLLECT_ORPHANS);
        let flows = &maps.flows;
        let seen = maps.translations.walk(|key: T, entry: T::Translation| {
            // The program would find this out too, but its lookup would mark the flow's entry as used.
            let is_orphan = || {
                let flow = key.flow(&entry);
                let back = flow.reply();
                Ok::<_, io::Error>(!flows.contains(&flow)? && !flows.contains(&back)?)
            };
            if may_be_orphan(T::created_ns(&entry), now_ns) && is_orphan()? {
                chunk.push(key)?;
            }
            Ok(())
        })?;
        Ok((seen, chunk.finish()?))
    }
}

impl Tables for KernelTables {
    fn collect(&self, family: Family) -> Result<CollectionOutcome, TableError> {
        let collected = match family {
            Family::Ipv4 => self.collect_family::<Tuple4>(&self.v4),
            Family::Ipv6 => self.collect_family::<Tuple6>(&self.v6),
        }?;
        match family {
            Family::Ipv4 => self.collect_service_flows::<Tuple4>(&self.service_flows[0]),
            Family::Ipv6 => self.collect_service_flows::<Tuple6>(&self.service_flows[1]),
        }?;
        self.rebuild_rings(family)?;
        Ok(collected)
    }

    fn fills(&self) -> Result<Vec<Fill>, TableError> {
        let maps = self.v4.iter().chain(&self.v6);
        maps.flat_map(|maps| [&maps.flows, &maps.translations])
            .chain(self.service_flows.iter().filter(|table| !table.is_unused()))
            .map(|table| {
                table
                    .fill()
                    .map_err(|source| table.error("count the entries of", source))
            })
            .collect()
    }
}

/// One of the maps.
struct Table {
    map: MapData,
    layout: MapLayout,
    ring: Option<Ring>,
}

impl Table {
    fn open(pins: &Path, layout: MapLayout) -> Result<Self, DatapathError> {
        Ok(Self {
            map: map_data(pins, &layout)?,
            layout,
            ring: Ring::open(pins, &layout)?,
        })
    }

    fn size(&self) -> EntrySize {
        EntrySize {
            key: self.layout.key_size as usize,
            value: self.layout.value_size as usize,
        }
    }

    fn error(&self, what: &'static str, source: io::Error) -> TableError {
        TableError {
            what,
            map: self.layout.name,
            source,
        }
    }

    /// Calls `each` with every entry until it fails. Returns the number of entries.
    fn walk<K: Pod, V: Pod>(
        &self,
        mut each: impl FnMut(K, V) -> io::Result<()>,
    ) -> io::Result<u64> {
        let mut walk = Walk::new(self.size());
        let mut batch = Batch::default();
        let mut seen = 0;
        while walk.read(self.map.fd().as_fd(), &mut batch)? {
            for (key, value) in batch.entries() {
                if let (Some(key), Some(value)) = (sys::read(key), sys::read(value)) {
                    seen += 1;
                    each(key, value)?;
                }
            }
        }
        Ok(seen)
    }

    /// Whether the map is switched off: its capacity is one entry.
    fn is_unused(&self) -> bool {
        self.map.info().is_ok_and(|info| info.max_entries() <= 1)
    }

    /// Rewrites the table's ring from its keys, if it has a ring and is nearly full.
    fn rebuild_ring(&self) -> io::Result<()> {
        match &self.ring {
            Some(ring) if !self.is_unused() && self.fill()?.is_pressed() => {
                ring.rebuild(&self.layout, &self.map)
            }
            _ => Ok(()),
        }
    }

    /// Whether an entry exists. In an LRU map, this lookup does not mark the entry as used, unlike a program's lookup.
    fn contains<K: Pod>(&self, key: &K) -> io::Result<bool> {
        let mut value = vec![0; self.size().value];
        sys::lookup(self.map.fd().as_fd(), sys::bytes_of(key), &mut value)
    }

    fn fill(&self) -> io::Result<Fill> {
        let capacity = self.map.info().map_err(map_io)?.max_entries();
        let size = self.size();
        // For a hash map, the cursor is the number of the next bucket (`kernel/bpf/hashtab.c`,
        // `__htab_map_lookup_and_delete_batch`).
        let mut cursor = vec![0; size.key];
        let (count, is_all) = sys::lookup_batch(
            self.map.fd().as_fd(),
            None,
            &mut cursor,
            &mut vec![0; SAMPLE * size.key],
            &mut vec![0; SAMPLE * size.value],
            SAMPLE as u32,
        )?;
        let mut entries = u64::from(count);
        if !is_all {
            let buckets = sys::read::<u32>(&cursor).unwrap_or_default().max(1);
            // `htab_map_alloc` allocates a power of two of buckets.
            let all_buckets = u64::from(capacity.next_power_of_two());
            entries = (entries * all_buckets / u64::from(buckets)).min(capacity.into());
        }
        Ok(Fill {
            map: self.layout.name,
            entries,
            capacity: capacity.into(),
        })
    }
}

/// What the program did in total.
#[derive(Clone, Copy, Default)]
struct Answer {
    flows: u64,
    refreshed: u64,
    translations: u64,
}

/// Keys batched for a request.
struct Chunk<'a, T> {
    program: &'a SchedClassifier,
    request: CollectRequest<T>,
    answer: Answer,
}

impl<'a, T> Chunk<'a, T>
where
    T: Tuple + Pod + Default,
    CollectRequest<T>: Pod,
{
    fn new(program: &'a SchedClassifier, operation: u32) -> Self {
        Self {
            program,
            request: CollectRequest {
                header: CollectHeader {
                    operation,
                    ip_version: T::IP_VERSION,
                    ..CollectHeader::default()
                },
                keys: [T::default(); CHUNK],
            },
            answer: Answer::default(),
        }
    }

    fn push(&mut self, key: T) -> io::Result<()> {
        let count = &mut self.request.header.count;
        self.request.keys[*count as usize] = key;
        *count += 1;
        if *count as usize == CHUNK {
            self.send()?;
        }
        Ok(())
    }

    /// Sends the remaining keys. Returns the totals.
    fn finish(mut self) -> io::Result<Answer> {
        if self.request.header.count > 0 {
            self.send()?;
        }
        Ok(self.answer)
    }

    fn send(&mut self) -> io::Result<()> {
        // The kernel returns an error if the buffer is smaller than the request.
        let mut answer = vec![0; size_of::<CollectRequest<T>>()];
        let options = TestRunOptions {
            data_in: Some(sys::bytes_of(&self.request)),
            data_out: Some(&mut answer),
            ..TestRunOptions::new()
        };
        let result = self.program.test_run(options).map_err(program_io)?;
        match (result.return_value, sys::read::<CollectHeader>(&answer)) {
            (COLLECTED, Some(answer)) => {
                self.answer.flows += u64::from(answer.flows);
                self.answer.refreshed += u64::from(answer.refreshed);
                self.answer.translations += u64::from(answer.translations);
                self.request.header.count = 0;
                Ok(())
            }
            (other, _) => {
                let text = format!("ct_collect is from another version: it returned {other}");
                Err(io::Error::other(text))
            }
        }
    }
}
