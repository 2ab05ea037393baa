//! Whose an address is.

use core::ptr;

use aya_ebpf::maps::lpm_trie::Key;
use health_common::addr::Addr;
use health_common::identity;
use health_common::masquerade::Address;

use crate::maps::HEALTH_IPCACHE;

/// Bits of an address that are matched.
const ADDRESS_BITS: u32 = 128;

/// Identity behind an address (network byte order). Of those that nobody told of it is the world's.
#[inline(always)]
pub fn identity_of<A: Address>(address: A) -> u32 {
    address_identity(&address.to_addr())
}

/// A function of its own in the kernel too: the key needs a stack of its own.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn address_identity(addr: *const Addr) -> u32 {
    // SAFETY: made of a reference to an address; the verifier wants to see it compared with null.
    let Some(&data) = (unsafe { addr.as_ref() }) else {
        return identity::WORLD;
    };
    let key = TrieKey {
        prefix_len: ADDRESS_BITS,
        data,
    };
    HEALTH_IPCACHE
        .get(key.as_key())
        .map_or(identity::WORLD, |entry| entry.identity)
}

/// A key of a trie. aya's own is packed, which makes LLVM store it byte by byte.
#[repr(C)]
pub struct TrieKey<T> {
    /// How many bits of the data are matched.
    pub prefix_len: u32,
    /// What is looked up, of alignment 4.
    pub data: T,
}

impl<T> TrieKey<T> {
    const IS_DENSE: () = assert!(size_of::<Self>() == size_of::<Key<T>>());

    /// As aya takes it.
    #[inline(always)]
    pub fn as_key(&self) -> &Key<T> {
        let () = Self::IS_DENSE;
        // SAFETY: the same fields at the same places, as the size tells, and less alignment.
        unsafe { &*ptr::from_ref(self).cast() }
    }
}
