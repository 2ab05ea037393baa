//! Reads and writes map entries as bytes, whatever their types.

use std::io;

use super::{DumpError, OpenMap};
use crate::sys;
use crate::walk::walk;

impl OpenMap {
    /// Its kernel id.
    pub fn id(&self) -> u32 {
        self.info().id
    }

    /// Calls `each` with the key and value of every entry; for per-CPU maps, the values of all CPUs in sequence.
    pub fn each_raw(&self, mut each: impl FnMut(&[u8], &[u8])) -> Result<(), DumpError> {
        walk(self.fd(), self.entry_size()?, &mut each).map_err(|source| self.cannot("read", source))
    }

    /// Writes an entry, replacing one with the same key.
    pub fn set_raw(&self, key: &[u8], value: &[u8]) -> Result<(), DumpError> {
        let size = self.entry_size()?;
        self.check(
            "write to",
            key.len() == size.key && value.len() == size.value,
        )?;
        sys::set(self.fd(), key, value).map_err(|source| self.cannot("write to", source))
    }

    /// Deletes an entry. Returns `false` if the key does not exist.
    pub fn delete_raw(&self, key: &[u8]) -> Result<bool, DumpError> {
        self.check("delete from", key.len() == self.info().key_size as usize)?;
        sys::delete(self.fd(), key).map_err(|source| self.cannot("delete from", source))
    }

    /// Checks an entry's size, because the kernel reads as many bytes as the map's sizes say.
    fn check(&self, what: &'static str, has_its_size: bool) -> Result<(), DumpError> {
        if has_its_size {
            return Ok(());
        }
        Err(self.cannot(what, io::ErrorKind::InvalidInput.into()))
    }
}
