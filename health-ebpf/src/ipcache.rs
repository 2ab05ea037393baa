//! Identities of addresses, and which addresses belong to endpoints of this node.

use core::ptr;

use aya_ebpf::maps::lpm_trie::Key;
use health_common::addr::Addr;
use health_common::identity;
use health_common::masquerade::Address;

use crate::maps::{HEALTH_ENDPOINTS, HEALTH_IPCACHE};

/// Number of address bits to match.
const ADDRESS_BITS: u32 = 128;

/// Identity of an address (network byte order). Unknown addresses belong to the world.
#[inline(always)]
pub fn identity_of<A: Address>(address: A) -> u32 {
    address_identity(&address.to_addr())
}

/// Whether an address belongs to an endpoint of this node.
#[inline(always)]
pub fn is_endpoint(address: Addr) -> bool {
    HEALTH_ENDPOINTS.get_ptr(address).is_some()
}

/// A separate function in the kernel as well: the key needs its own stack.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn address_identity(addr: *const Addr) -> u32 {
    // SAFETY: made from a reference to an address; the verifier requires a null check.
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

/// A trie key. aya's own is packed, which makes LLVM store it byte by byte.
#[repr(C)]
pub struct TrieKey<T> {
    /// Number of data bits to match.
    pub prefix_len: u32,
    /// The data to look up, with an alignment of 4.
    pub data: T,
}

impl<T> TrieKey<T> {
    const IS_DENSE: () = assert!(size_of::<Self>() == size_of::<Key<T>>());

    /// Converts to aya's type.
    #[inline(always)]
    pub fn as_key(&self) -> &Key<T> {
        let () = Self::IS_DENSE;
        // SAFETY: the same fields at the same offsets, as the equal size shows, with a smaller alignment.
        unsafe { &*ptr::from_ref(self).cast() }
    }
}
