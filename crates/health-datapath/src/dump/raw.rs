//! The entries of a map as bytes, read and written whatever their types.

use std::io;

use super::{DumpError, OpenMap};
use crate::sys;
use crate::walk::walk;

impl OpenMap {
    /// Its kernel id.
    pub fn id(&self) -> u32 {
        self.info().id
    }

    /// Calls `each` with key and value of every entry; for per-CPU maps the values of all CPUs one after the other.
    pub fn each_raw(&self, mut each: impl FnMut(&[u8], &[u8])) -> Result<(), DumpError> {
        walk(self.fd(), self.entry_size()?, &mut each).map_err(|source| self.cannot("read", source))
    }

    /// Writes an entry, in place of one of the same key.
    pub fn set_raw(&self, key: &[u8], value: &[u8]) -> Result<(), DumpError> {
        let size = self.entry_size()?;
        self.check(
            "write to",
            key.len() == size.key && value.len() == size.value,
        )?;
        sys::set(self.fd(), key, value).map_err(|source| self.cannot("write to", source))
    }

    /// Deletes an entry. `false` when there is none of this key.
    pub fn delete_raw(&self, key: &[u8]) -> Result<bool, DumpError> {
        self.check("delete from", key.len() == self.info().key_size as usize)?;
        sys::delete(self.fd(), key).map_err(|source| self.cannot("delete from", source))
    }

    /// The kernel reads as many bytes as the map demands.
    fn check(&self, what: &'static str, has_its_size: bool) -> Result<(), DumpError> {
        if has_its_size {
            return Ok(());
        }
        Err(self.cannot(what, io::ErrorKind::InvalidInput.into()))
    }
}
