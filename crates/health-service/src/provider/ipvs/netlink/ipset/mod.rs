//! Sets of addresses and ports, through netfilter's ipset subsystem (include/uapi/linux/netfilter/ipset/ip_set.h,
//! net/netfilter/ipset/ip_set_core.c).

mod message;
mod model;
#[cfg(test)]
mod tests;

use netlink_packet_core::NLM_F_EXCL;
use netlink_sys::protocols::NETLINK_NETFILTER;

use super::connection::{Connection, NetlinkError, Refusal};
use message::Command;

pub use model::{Entry, SetSpec, SetType};

/// Entries per message: an attribute holds at most 64 KiB.
const CHUNK: usize = 400;

/// Returns the meaning of an ipset error (`enum ipset_errno`).
pub(super) fn error_text(code: i32) -> Option<&'static str> {
    Some(match code {
        4097 => "the kernel uses another ipset protocol",
        4098 => "the kernel has no such type of set",
        4099 => "the maximum number of sets is reached",
        4100 => "the set is in use",
        4102 => "the set is of another type",
        4103 => "the entry is already in the set",
        4104 => "invalid prefix",
        4106 => "invalid family",
        4352 => "the set is full",
        _ => return None,
    })
}

/// The set is in use by rules (`IPSET_ERR_BUSY`).
pub(crate) const ERROR_BUSY: i32 = 4100;

/// A connection to ipset.
#[derive(Debug)]
pub struct Client(Connection);

impl Client {
    /// Opens a connection in the calling thread's network namespace.
    pub fn open() -> Result<Self, NetlinkError> {
        Ok(Self(Connection::open(NETLINK_NETFILTER)?))
    }

    /// Creates a set. An existing set with this name and type is left unchanged.
    pub fn create(&mut self, set: &SetSpec) -> Result<(), NetlinkError> {
        self.0.request(message::create(set), 0, &mut |_| Ok(()))
    }

    /// Removes a set that no rule uses. Returns whether it existed.
    pub fn destroy(&mut self, name: &str) -> Result<bool, NetlinkError> {
        let request = message::named(Command::Destroy, name);
        // Without this flag, a missing set is not an error.
        match self.0.request(request, NLM_F_EXCL, &mut |_| Ok(())) {
            Ok(()) => Ok(true),
            Err(error) if error.is(libc::ENOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns the index by which rules refer to a set; `None` if no set has this name.
    pub fn index(&mut self, name: &str) -> Result<Option<u16>, NetlinkError> {
        let request = message::named(Command::GetByName, name);
        let mut index = None;
        let answer = self.0.request(request, 0, &mut |object| {
            index = message::read_index(object)?;
            Ok(())
        });
        match answer {
            Err(error) if error.is(libc::ENOENT) => Ok(None),
            answer => answer.map(|()| index),
        }
    }

    /// Returns the entries of a set; `None` if no set has this name.
    pub fn entries(&mut self, name: &str) -> Result<Option<Vec<Entry>>, NetlinkError> {
        let request = message::named(Command::List, name);
        let read = |object: &[u8]| message::read_entries(object).map(Some);
        match self.0.list(&request, read) {
            Ok(parts) => Ok(Some(parts.into_iter().flatten().collect())),
            Err(error) if error.is(libc::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Adds entries; existing ones stay. Returns the first error of each chunk that could not be added completely.
    pub fn add(&mut self, name: &str, entries: &[Entry]) -> Result<Vec<Refusal>, NetlinkError> {
        self.edit(Command::Add, name, entries)
    }

    /// Removes entries; missing ones are ignored. Returns errors like [`Self::add`].
    pub fn delete(&mut self, name: &str, entries: &[Entry]) -> Result<Vec<Refusal>, NetlinkError> {
        self.edit(Command::Del, name, entries)
    }

    fn edit(
        &mut self,
        command: Command,
        name: &str,
        entries: &[Entry],
    ) -> Result<Vec<Refusal>, NetlinkError> {
        let mut refusals = Vec::new();
        for chunk in entries.chunks(CHUNK) {
            let request = message::edit(command, name, chunk);
            match self.0.request(request, 0, &mut |_| Ok(())) {
                Ok(()) => {}
                Err(NetlinkError::Refused(refusal)) => refusals.push(refusal),
                Err(error) => return Err(error),
            }
        }
        Ok(refusals)
    }
}
