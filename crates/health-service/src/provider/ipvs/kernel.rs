//! Executes steps in the kernel through netlink.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use health_model::ipam::Family;

use super::diff::{Present, PresentServer, Step, mark};
use super::error::IpvsError;
use super::netlink::server::{self, Change, RealServer, ServerId, ServerKey, Timeouts};
use super::netlink::{NetlinkError, Refusal, conntrack, ipset, nft};
use super::rules::{self, RuleSettings, TABLE};
use super::sets::{SetId, SetKind};

/// All connections that steps need, in the network namespace of the thread that opened them.
#[derive(Debug)]
pub(super) struct Kernel {
    servers: server::Client,
    sets: ipset::Client,
    rules: nft::Client,
    flows: conntrack::Client,
}

/// The result of steps.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) done: Vec<Step>,
    /// Virtual servers that other programs have created meanwhile.
    pub(super) foreign: Vec<ServerKey>,
    pub(super) failed: Vec<String>,
}

impl Kernel {
    pub(super) fn open() -> Result<Self, IpvsError> {
        let mut kernel = Self {
            servers: open_servers()?,
            sets: open_sets()?,
            rules: open_rules()?.ok_or_else(no_rules)?,
            flows: conntrack::Client::open().map_err(IpvsError::netlink("use conntrack"))?,
        };
        // Opening these connections sends no request.
        let set = SetId {
            family: Family::V4,
            kind: SetKind::Servers,
        };
        match kernel.sets.index(&set.to_string()) {
            Err(error) if is_subsystem_missing(&error) => Err(missing("ipset", "ip_set")),
            Err(error) => Err(IpvsError::netlink("use ipset")(error)),
            Ok(_) => match kernel.rules.rules(Family::V4, TABLE) {
                Err(error) if is_subsystem_missing(&error) => Err(no_rules()),
                _ => Ok(kernel),
            },
        }
    }

    /// Changes how long the kernel keeps idle connections; a value of 0 leaves the current timeout unchanged.
    pub(super) fn set_timeouts(&mut self, timeouts: Timeouts) -> Result<(), IpvsError> {
        if timeouts == Timeouts::default() {
            return Ok(());
        }
        let set = self.servers.set_timeouts(timeouts);
        set.map_err(IpvsError::netlink("change the IPVS timeouts"))
    }

    /// Creates missing sets, and installs the rules.
    pub(super) fn prepare(&mut self, settings: &RuleSettings) -> Result<(), IpvsError> {
        for set in SetId::all() {
            let failed = IpvsError::netlink(format!("create the set {set}"));
            self.sets.create(&set.spec()).map_err(failed)?;
        }
        for family in Family::ALL {
            let mut indexes = [0; SetKind::ALL.len()];
            for (index, kind) in indexes.iter_mut().zip(SetKind::ALL) {
                *index = self.index(SetId { family, kind })?;
            }
            let table = rules::table(family, settings, |kind| indexes[kind as usize]);
            let attempt = format!("replace the {} table {TABLE}", family.name());
            let replaced = self.rules.replace(&table);
            replaced.map_err(IpvsError::netlink(attempt))?;
        }
        Ok(())
    }

    fn index(&mut self, set: SetId) -> Result<u16, IpvsError> {
        let attempt = || IpvsError::netlink(format!("find the set {set}"));
        let index = self.sets.index(&set.to_string()).map_err(attempt())?;
        let missing = || Refusal {
            code: libc::ENOENT,
            text: None,
        };
        index.ok_or_else(|| attempt()(NetlinkError::Refused(missing())))
    }

    /// Returns the complete kernel state, except that the caller passes in the addresses of our device. Virtual servers
    /// in `known` are ours even if someone has emptied the set that marks them.
    pub(super) fn read(
        &mut self,
        addresses: BTreeSet<IpAddr>,
        known: &BTreeSet<ServerKey>,
    ) -> Result<Present, IpvsError> {
        let mut present = Present {
            addresses,
            ..Present::default()
        };
        for set in SetId::all() {
            let failed = IpvsError::netlink(format!("list the set {set}"));
            let entries = self.sets.entries(&set.to_string()).map_err(failed)?;
            let entries = entries.into_iter().flatten();
            present.entries.extend(entries.map(|entry| (set, entry)));
        }
        let servers = self.servers.servers();
        for server in servers.map_err(IpvsError::netlink("list virtual servers"))? {
            let ServerId::Address(key) = server.id else {
                continue;
            };
            if !present.entries.contains(&mark(key)) && !known.contains(&key) {
                present.foreign.insert(key);
                continue;
            }
            let real = self.real_servers(key)?;
            let server = PresentServer {
                scheduler: server.scheduler,
                flags: server.flags.asked(),
                timeout: server.timeout,
                real: BTreeMap::new(),
            };
            present.servers.insert(key, server);
            present.note_real(key, &real);
        }
        Ok(present)
    }

    pub(super) fn real_servers(&mut self, key: ServerKey) -> Result<Vec<RealServer>, IpvsError> {
        let listed = self.servers.real_servers(key.into());
        listed.map_err(IpvsError::netlink(format!("list real servers of {key}")))
    }

    /// Executes steps that do not concern addresses of devices. Continues after failures.
    pub(super) fn run(&mut self, steps: Vec<Step>) -> Result<Outcome, IpvsError> {
        let mut outcome = Outcome::default();
        let mut changes = Vec::new();
        for step in steps {
            match step {
                Step::Change(change) => changes.push(change),
                step => {
                    self.change(&mut changes, &mut outcome)?;
                    self.edit(step, &mut outcome)?;
                }
            }
        }
        self.change(&mut changes, &mut outcome)?;
        Ok(outcome)
    }

    /// Deletes the flows to these virtual servers whose replies do not come from one of their real servers. Returns the
    /// number of deleted flows.
    pub(super) fn forget_flows(
        &mut self,
        servers: &BTreeMap<ServerKey, BTreeSet<SocketAddr>>,
    ) -> Result<usize, IpvsError> {
        let is_stale = |flow: &conntrack::Flow| {
            let real = servers.get(&flow.to);
            real.is_some_and(|real| !real.contains(&flow.answered_by))
        };
        let mut forgotten = 0;
        for family in Family::ALL {
            if !servers
                .keys()
                .any(|key| Family::of(key.address.ip()) == family)
            {
                continue;
            }
            let listed = self.flows.flows(family, is_stale);
            let stale = listed.map_err(IpvsError::netlink("list conntrack flows"))?;
            let deleted = self.flows.delete(stale);
            forgotten += deleted.map_err(IpvsError::netlink("delete conntrack flows"))?;
        }
        Ok(forgotten)
    }

    fn edit(&mut self, step: Step, outcome: &mut Outcome) -> Result<(), IpvsError> {
        let (attempt, result) = match &step {
            Step::AddEntries(set, entries) => (
                format!("add entries to the set {set}"),
                self.sets.add(&set.to_string(), entries),
            ),
            Step::DeleteEntries(set, entries) => (
                format!("delete entries of the set {set}"),
                self.sets.delete(&set.to_string(), entries),
            ),
            Step::Change(_) | Step::Bind(_) | Step::Unbind(_) => return Ok(()),
        };
        let refusals = result.map_err(IpvsError::netlink(&attempt))?;
        match refusals.first() {
            None => outcome.done.push(step),
            Some(refusal) => outcome.failed.push(format!("cannot {attempt}: {refusal}")),
        }
        Ok(())
    }

    fn change(
        &mut self,
        changes: &mut Vec<Change>,
        outcome: &mut Outcome,
    ) -> Result<(), IpvsError> {
        if changes.is_empty() {
            return Ok(());
        }
        let changes = std::mem::take(changes);
        let results = self.servers.change(&changes);
        let results = results.map_err(IpvsError::netlink("change virtual servers"))?;
        for (change, result) in changes.into_iter().zip(results) {
            match result {
                Ok(()) => outcome.done.push(Step::Change(change)),
                Err(refusal) if is_done(&change, &refusal) => {
                    outcome.done.push(Step::Change(change));
                }
                Err(refusal) => match &change {
                    Change::AddServer(server::VirtualServer {
                        id: ServerId::Address(key),
                        ..
                    }) if refusal.code == libc::EEXIST => outcome.foreign.push(*key),
                    change if of_foreign(change, &outcome.foreign) => {}
                    change => {
                        let attempt = attempt(change);
                        outcome.failed.push(format!("cannot {attempt}: {refusal}"));
                    }
                },
            }
        }
        Ok(())
    }
}

/// Whether a refusal means that the change has already been made.
fn is_done(change: &Change, refusal: &Refusal) -> bool {
    match change {
        Change::DeleteServer(_) => refusal.code == libc::ESRCH,
        Change::DeleteReal(..) => [libc::ESRCH, libc::ENOENT].contains(&refusal.code),
        _ => false,
    }
}

fn of_foreign(change: &Change, foreign: &[ServerKey]) -> bool {
    match change {
        Change::AddReal(ServerId::Address(key), _) => foreign.contains(key),
        _ => false,
    }
}

fn attempt(change: &Change) -> String {
    let name = |id: &ServerId| match id {
        ServerId::Address(key) => key.to_string(),
        ServerId::Mark(_, mark) => format!("mark {mark}"),
    };
    match change {
        Change::AddServer(server) => {
            let scheduler = &server.scheduler;
            format!(
                "add the virtual server {} with scheduler {scheduler}",
                name(&server.id)
            )
        }
        Change::SetServer(server) => format!("change the virtual server {}", name(&server.id)),
        Change::DeleteServer(id) => format!("delete the virtual server {}", name(id)),
        Change::AddReal(id, real) => {
            format!("add the real server {} to {}", real.address, name(id))
        }
        Change::SetReal(id, real) => {
            format!("change the real server {} of {}", real.address, name(id))
        }
        Change::DeleteReal(id, real) => {
            format!("delete the real server {} of {}", real.address, name(id))
        }
    }
}

fn open_servers() -> Result<server::Client, IpvsError> {
    server::Client::open().map_err(|error| match error {
        error if error.is(libc::ENOENT) => missing("IPVS", "ip_vs"),
        error => IpvsError::netlink("use IPVS")(error),
    })
}

fn no_rules() -> IpvsError {
    missing("nf_tables", "nf_tables")
}

fn missing(what: &'static str, module: &'static str) -> IpvsError {
    IpvsError::Missing { what, module }
}

/// Whether netfilter lacks the subsystem of a request (net/netfilter/nfnetlink.c: `EINVAL`, and `EOPNOTSUPP` for
/// batches), or does not exist at all.
pub(super) fn is_subsystem_missing(error: &NetlinkError) -> bool {
    match error {
        NetlinkError::Socket(error) => error.raw_os_error() == Some(libc::EPROTONOSUPPORT),
        error => error.is(libc::EINVAL) || error.is(libc::EOPNOTSUPP),
    }
}

fn open_sets() -> Result<ipset::Client, IpvsError> {
    ipset::Client::open().map_err(IpvsError::netlink("use ipset"))
}

/// Opens a connection to nf_tables; `None` if the kernel has no netfilter.
pub(super) fn open_rules() -> Result<Option<nft::Client>, IpvsError> {
    match nft::Client::open() {
        Err(error) if is_subsystem_missing(&error) => Ok(None),
        rules => rules.map(Some).map_err(IpvsError::netlink("use nf_tables")),
    }
}

/// Whether our rules exist in either family.
pub(super) fn has_rules() -> Result<bool, IpvsError> {
    let Some(mut rules) = open_rules()? else {
        return Ok(false);
    };
    for family in Family::ALL {
        match rules.rules(family, TABLE) {
            Ok(rules) if rules.is_empty() => {}
            Ok(_) => return Ok(true),
            Err(error) if is_subsystem_missing(&error) || error.is(libc::ENOENT) => {}
            Err(error) => return Err(IpvsError::netlink("list rules")(error)),
        }
    }
    Ok(false)
}

/// Removes our rules and virtual servers, if the kernel has any. Returns descriptions of what was removed.
pub(super) fn remove_rules_and_servers() -> Result<Vec<String>, IpvsError> {
    let mut removed = Vec::new();
    let Some(mut rules) = open_rules()? else {
        return Ok(removed);
    };
    for family in Family::ALL {
        let attempt = format!("delete the {} table {TABLE}", family.name());
        match rules.delete(family, TABLE) {
            Ok(true) => removed.push(format!("{} table {TABLE}", family.name())),
            Ok(false) => {}
            Err(error) if is_subsystem_missing(&error) => {}
            Err(error) => return Err(IpvsError::netlink(attempt)(error)),
        }
    }
    let ours = our_servers()?;
    if ours.is_empty() {
        return Ok(removed);
    }
    let changes = ours.iter().map(|key| Change::DeleteServer((*key).into()));
    let changes: Vec<_> = changes.collect();
    let results = open_servers()?.change(&changes);
    let results = results.map_err(IpvsError::netlink("delete virtual servers"))?;
    for (change, result) in changes.iter().zip(results) {
        if let Err(refusal) = result
            && !is_done(change, &refusal)
        {
            let refused = NetlinkError::Refused(refusal);
            return Err(IpvsError::netlink(attempt(change))(refused));
        }
    }
    removed.push(format!("virtual servers ({})", ours.len()));
    Ok(removed)
}

/// Returns the virtual servers that are marked as ours.
fn our_servers() -> Result<BTreeSet<ServerKey>, IpvsError> {
    let mut sets = open_sets()?;
    let mut ours = BTreeSet::new();
    for family in Family::ALL {
        let set = SetId {
            family,
            kind: SetKind::Servers,
        };
        let entries = match sets.entries(&set.to_string()) {
            Err(error) if is_subsystem_missing(&error) => return Ok(ours),
            entries => entries.map_err(IpvsError::netlink(format!("list the set {set}")))?,
        };
        let marked = entries.into_iter().flatten();
        ours.extend(marked.filter_map(|entry| super::diff::marked_server(&(set, entry))));
    }
    Ok(ours)
}

/// Removes our sets. Returns the sets that rules still use, and the number of removed ones.
pub(super) fn remove_sets() -> Result<(Vec<SetId>, usize), IpvsError> {
    let mut sets = match ipset::Client::open() {
        Err(error) if is_subsystem_missing(&error) => return Ok((Vec::new(), 0)),
        sets => sets.map_err(IpvsError::netlink("use ipset"))?,
    };
    let (mut busy, mut removed) = (Vec::new(), 0);
    for set in SetId::all() {
        match sets.destroy(&set.to_string()) {
            Ok(destroyed) => removed += usize::from(destroyed),
            Err(error) if error.is(ipset::ERROR_BUSY) => busy.push(set),
            Err(error) if is_subsystem_missing(&error) => break,
            Err(error) => {
                return Err(IpvsError::netlink(format!("destroy the set {set}"))(error));
            }
        }
    }
    Ok((busy, removed))
}
