//! What a look-up has found out about a packet.

use aya_ebpf::helpers::generated::bpf_jiffies64;
use aya_ebpf::maps::PerCpuArray;
use health_common::ct::{Tuple4, Tuple6};
use health_common::packet::{Kind, Packet};
use health_common::service::xdp::XdpFlow;

use super::frame::Plain;
use super::transport::is_between;
use crate::clock::coarse_now_ns;
use crate::ip_version::Version;
use crate::maps::{HEALTH_XDP_DRAFT4, HEALTH_XDP_DRAFT6, HEALTH_XDP_TIMES};

/// State of a packet across the steps of a look-up.
#[repr(C)]
pub struct Draft<T: Version> {
    /// What to do with the packet.
    pub(super) known: XdpFlow<T::Address>,
    /// Its tuple as received.
    pub(super) received: T,
    /// Like [`super::flow::Passage::flow`].
    pub(super) flow: T,
    /// TCP flags of the segment; 0 for UDP.
    pub(super) tcp_flags: u32,
    /// Explicit padding, zero.
    pad: u32,
}

/// An IP version with space for drafts.
pub trait Drafted: Plain {
    /// Scratch space for building look-up results.
    fn drafts() -> &'static PerCpuArray<Draft<Self>>;
}

impl Drafted for Tuple4 {
    #[inline(always)]
    fn drafts() -> &'static PerCpuArray<Draft<Self>> {
        &HEALTH_XDP_DRAFT4
    }
}

impl Drafted for Tuple6 {
    #[inline(always)]
    fn drafts() -> &'static PerCpuArray<Draft<Self>> {
        &HEALTH_XDP_DRAFT6
    }
}

impl<T: Drafted> Draft<T> {
    /// This CPU's draft.
    #[inline(always)]
    pub(super) fn here() -> Option<&'static mut Self> {
        let draft = T::drafts().get_ptr_mut(0)?;
        // SAFETY: a map value stays valid memory for the program's run; no other program uses it, and none interrupts
        // this one.
        unsafe { draft.as_mut() }
    }

    /// Starts the look-up of a packet; `None` if there is no draft.
    #[inline(always)]
    pub(super) fn begin(received: &T, tcp_flags: u8) -> Option<()> {
        let draft = Self::here()?;
        // Anything that changes during the look-up counts as later.
        draft.known.made_ns = coarse_now_ns();
        // SAFETY: a helper without arguments.
        draft.known.until_ticks = unsafe { bpf_jiffies64() } + HEALTH_XDP_TIMES.get(0)?.way_ticks;
        draft.received = *received;
        draft.tcp_flags = tcp_flags.into();
        Some(())
    }

    /// Like [`is_between`].
    #[inline(always)]
    pub(super) fn is_between(&self) -> bool {
        is_between(self.received.protocol(), self.tcp_flags as u8)
    }

    /// The packet.
    #[inline(always)]
    pub(super) fn packet(&self) -> Packet<T> {
        Packet {
            tuple: self.received,
            tcp_flags: self.tcp_flags as u8,
            kind: Kind::Flow,
        }
    }
}
