//! Bounds-checked access to a packet's bytes.

use aya_ebpf::bindings::{__sk_buff, bpf_check_mtu_flags};
use aya_ebpf::helpers::bpf_redirect;
use aya_ebpf::helpers::generated::{bpf_check_mtu, bpf_redirect_peer};
use aya_ebpf::programs::TcContext;
use aya_ebpf::{EbpfContext as _, Global};
use health_common::neighbour::{ETHERTYPE_VLAN, ETHERTYPE_VLAN_SERVICE};
use network_types::eth::EthHdr;
use network_types::vlan::VlanHdr;

use crate::subprogram::Context;

/// Offset of the IP header in an endpoint's untagged packet. Headers are at fixed offsets: no extension headers or
/// options are walked.
pub const IP_AT: usize = EthHdr::LEN;

/// Length in bytes of the link header on the programs' device, excluding VLAN tags: that of the Ethernet header, or 0
/// for devices whose packets start with the IP header. Set when the programs are loaded; the verifier treats it as a
/// constant.
#[unsafe(no_mangle)]
static LINK_HEADER_LEN: Global<u32> = Global::new(IP_AT as u32);

/// Largest offset of an IP header: behind two VLAN tags.
pub const IP_AT_MAX: u32 = IP_AT as u32 + 8;
/// Offset of the transport header after an IPv4 header without options.
pub const L4_AT4: usize = IP_AT + 20;
/// Offset of the data after the IPv6 header.
pub const L4_AT6: usize = IP_AT + 40;

/// Mark of a packet that one of an endpoint's programs turned round. The other program sees the mark once and clears
/// it. Marks do not cross namespaces, so no endpoint can set this one; any other packet that this host marks this way
/// came in on another device, or on none. At an uplink, this marks a packet that leaves unchanged: an error that
/// `to_service` sends back, or a packet forwarded to a backend that answers the client directly.
pub const MARK_ANSWERED: u32 = 0x6865_616c;

/// Mark of a packet that `to_service` sends to a backend elsewhere, which must receive it from this node's address;
/// `masquerade` clears the mark. Processes can set the mark too, so it only counts on packets that came in on a device.
/// Between the two programs, such a packet may pass the host's stack and its netfilter rules.
pub const MARK_SERVED: u32 = 0x6865_2376;

/// Mark of a packet that `from_endpoint` passes to `deliver`, which clears it: the packet answers an outside client.
pub const MARK_PAST_STACK: u32 = 0x6865_6f75;

/// Mark bits with which netfilter rules masquerade and drop packets: those of kube-proxy, which remain after it is
/// gone, and those of the `ipvs` mode.
const MARKS_OF_RULES: u32 = 0xc000;
const _: () = assert!(MARK_SERVED & MARKS_OF_RULES == 0);

/// From `linux/if_packet.h`.
const PACKET_HOST: u32 = 0;
/// From `linux/if_packet.h`.
const PACKET_LOOPBACK: u32 = 5;

/// A packet at a tc hook.
pub struct Frame {
    ctx: TcContext,
    /// The device that the packet is treated as being at, if not the hook's.
    device: Option<u32>,
}

impl Context for Frame {
    type Raw = __sk_buff;

    #[inline(always)]
    fn of(raw: *mut __sk_buff) -> Self {
        Self::new(TcContext::new(raw))
    }

    #[inline(always)]
    fn raw(&self) -> *mut __sk_buff {
        self.skb()
    }
}

impl Frame {
    /// Wraps the hook's context.
    #[inline(always)]
    pub fn new(ctx: TcContext) -> Self {
        Self { ctx, device: None }
    }

    /// The packet on its way to a device other than the hook's.
    #[inline(always)]
    pub fn on_way_to(&self, ifindex: u32) -> Self {
        Self {
            ctx: TcContext::new(self.skb()),
            device: Some(ifindex),
        }
    }

    /// The context, for logging.
    #[inline(always)]
    pub fn ctx(&self) -> &TcContext {
        &self.ctx
    }

    /// The packet's buffer, as programs see it.
    #[inline(always)]
    pub fn skb(&self) -> *mut __sk_buff {
        self.ctx.as_ptr().cast()
    }

    /// Length in bytes from the Ethernet header on, if there is one, including parts outside the linear area.
    #[inline(always)]
    pub fn length(&self) -> u32 {
        self.ctx.len()
    }

    /// The device that the packet is at.
    #[inline(always)]
    pub fn ifindex(&self) -> u32 {
        match self.device {
            Some(ifindex) => ifindex,
            // SAFETY: the context pointer is valid while the program runs. Volatile: otherwise LLVM would merge this
            // read with that of another field, through a pointer that verifiers reject.
            None => unsafe { (&raw const (*self.skb()).ifindex).read_volatile() },
        }
    }

    /// The device on which the packet came into this namespace; 0 if it was created here.
    #[inline(always)]
    pub fn came_by(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (*self.skb()).ingress_ifindex }
    }

    /// Whether this mark was set by a program on this host, not by the process that sent the packet.
    #[inline(always)]
    pub fn was_marked(&self, mark: u32) -> bool {
        self.mark() == mark && self.came_by() != 0
    }

    /// Whether the link sent the packet to this host's own address, not to a group or to another host.
    #[inline(always)]
    pub fn is_to_host(&self) -> bool {
        // SAFETY: as above.
        unsafe { (*self.skb()).pkt_type == PACKET_HOST }
    }

    /// Whether the packet is the host's copy of its own multicast packet, which comes back on the device that it left
    /// on.
    #[inline(always)]
    pub fn is_looped_back(&self) -> bool {
        // SAFETY: as above.
        unsafe { (*self.skb()).pkt_type == PACKET_LOOPBACK }
    }

    /// Length of the link header in bytes, excluding tags.
    #[inline(always)]
    pub fn link_header_len(&self) -> usize {
        LINK_HEADER_LEN.load() as usize
    }

    /// When the kernel received the packet from the device: `CLOCK_REALTIME`, in nanoseconds; 0 while no process on the
    /// machine asks for time stamps (`SO_TIMESTAMP`, a capture).
    #[inline(always)]
    pub fn stamped_ns(&self) -> u64 {
        // SAFETY: as above.
        unsafe { (*self.skb()).tstamp }
    }

    /// The packet's mark.
    #[inline(always)]
    pub fn mark(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (*self.skb()).mark }
    }

    /// Sets the packet's mark.
    #[inline(always)]
    pub fn set_mark(&self, mark: u32) {
        // SAFETY: as above; the kernel lets classifiers write this field.
        unsafe { (*self.skb()).mark = mark }
    }

    /// Whether the packet has a VLAN tag that is stored outside its bytes.
    #[inline(always)]
    pub fn has_vlan_tag(&self) -> bool {
        // SAFETY: as above.
        unsafe { (*self.skb()).vlan_present != 0 }
    }

    /// EtherType of the packet in host byte order. A tag inside the bytes shows up as its own type.
    #[inline(always)]
    pub fn protocol(&self) -> u16 {
        // SAFETY: as above. The kernel keeps the 16-bit field in network byte order.
        u16::from_be(unsafe { (*self.skb()).protocol } as u16)
    }

    /// EtherType of the packet's content in host byte order, and the content's offset, after any tags (at most two) in
    /// the bytes. A tag outside the bytes, where devices with tag offload keep it, does not shift the offset.
    #[inline(always)]
    pub fn network(&self) -> Option<(u16, usize)> {
        let at = LINK_HEADER_LEN.load() as usize;
        let protocol = self.protocol();
        if !is_tag(protocol) {
            return Some((protocol, at));
        }
        let tag = self.at::<VlanHdr>(at)?;
        let protocol = u16::from_be(tag.ether_type);
        if !is_tag(protocol) {
            return Some((protocol, at + VlanHdr::LEN));
        }
        let tag = self.at::<VlanHdr>(at + VlanHdr::LEN)?;
        Some((u16::from_be(tag.ether_type), at + 2 * VlanHdr::LEN))
    }

    /// Number of full-sized segments that the device splits the packet into (GSO), given the number of bytes after
    /// the transport header; 0 for a packet that is not split.
    #[inline(always)]
    pub fn full_segments(&self, data_len: u32) -> u32 {
        // SAFETY: as above.
        let size = unsafe { (*self.skb()).gso_size };
        data_len.checked_div(size).unwrap_or(0)
    }

    /// Makes the first `len` bytes readable and writable in place; `false` if the packet is shorter. Invalidates
    /// earlier pointers.
    #[inline(always)]
    pub fn pull(&self, len: usize) -> bool {
        if self.ctx.data() + len <= self.ctx.data_end() {
            return true;
        }
        self.length() as usize >= len
            && self.ctx.pull_data(len as u32).is_ok()
            && self.ctx.data() + len <= self.ctx.data_end()
    }

    /// The bytes at `offset` as `T`; `None` if the packet is too short.
    ///
    /// The reference is aligned as far as BPF is concerned: the kernel places the IP header on a four-byte boundary
    /// or runs on hardware that does not care, and LLVM emits plain loads.
    #[inline(always)]
    #[allow(
        clippy::mut_from_ref,
        reason = "the bytes belong to the packet, not to the context"
    )]
    pub fn at<T>(&self, offset: usize) -> Option<&mut T> {
        let start = self.ctx.data() + offset;
        // The verifier requires the end of the access to be compared with data_end.
        if start + size_of::<T>() > self.ctx.data_end() {
            return None;
        }
        // SAFETY: in bounds, as just checked, and all `T` used are plain integers.
        Some(unsafe { &mut *(start as *mut T) })
    }

    /// Ethernet header, IP header and the `T` at `offset`, after a single bounds check: the verifier loses track when
    /// LLVM merges the results of several checks.
    #[inline(always)]
    #[allow(
        clippy::mut_from_ref,
        reason = "the bytes belong to the packet, not to the context"
    )]
    pub fn headers<I, T>(&self, offset: usize) -> Option<(&mut EthHdr, &mut I, &mut T)> {
        let start = self.ctx.data();
        if start + offset + size_of::<T>() > self.ctx.data_end() {
            return None;
        }
        // SAFETY: in bounds, since `offset` is behind the other two headers; they do not overlap, and
        // all are plain integers. For alignment see `at`.
        Some(unsafe {
            (
                &mut *(start as *mut EthHdr),
                &mut *((start + IP_AT) as *mut I),
                &mut *((start + offset) as *mut T),
            )
        })
    }

    /// Overwrites the bytes at `offset`; `false` if that fails. Invalidates earlier references.
    ///
    /// Uses a helper rather than a plain store: if a program stores into packets directly, the kernel makes it copy the
    /// headers of every shared packet first, which includes all TCP packets.
    #[inline(always)]
    pub fn store<T>(&self, offset: usize, value: &T) -> bool {
        // The device's checksum over the whole packet stays correct: the caller changes the checksum in the message by
        // the same amount.
        self.ctx.store(offset, value, 0).is_ok()
    }

    /// Whether the packet, or each segment that it is split into, fits the device's MTU.
    #[inline(always)]
    pub fn fits(&self, ifindex: u32) -> bool {
        let mut mtu = 0_u32;
        // SAFETY: a valid context, and a word to write to.
        unsafe {
            bpf_check_mtu(
                self.skb().cast(),
                ifindex,
                &raw mut mtu,
                0,
                bpf_check_mtu_flags::BPF_MTU_CHK_SEGS.into(),
            ) == 0
        }
    }

    /// Whether the packet consists of several merged packets, which are split again when it leaves.
    #[inline(always)]
    pub fn is_merged(&self) -> bool {
        // SAFETY: as above.
        unsafe { (*self.skb()).gso_size != 0 }
    }

    /// Whether the packet, which is not merged, would fit the device's MTU if it were `by` bytes longer.
    #[inline(always)]
    pub fn fits_longer(&self, ifindex: u32, by: u32) -> bool {
        let mut mtu = 0_u32;
        // SAFETY: as above.
        unsafe { bpf_check_mtu(self.skb().cast(), ifindex, &raw mut mtu, by as i32, 0) == 0 }
    }

    /// Passes a received packet to the other end of a veth pair, as if received there. The result is the classifier's
    /// return value.
    #[inline(always)]
    pub fn redirect_to_peer(&self, ifindex: u32) -> i64 {
        // SAFETY: a helper without memory arguments.
        unsafe { bpf_redirect_peer(ifindex, 0) }
    }

    /// Sends the packet back out of the device that it came in on, where the program lets it pass. The result is the
    /// classifier's return value.
    #[inline(always)]
    pub fn send_back(&self, ifindex: u32) -> i64 {
        self.set_mark(MARK_ANSWERED);
        self.redirect(ifindex, 0)
    }

    /// Passes the packet to a device, as if received (`BPF_F_INGRESS`) or to be sent (0). The result is the
    /// classifier's return value.
    #[inline(always)]
    pub fn redirect(&self, ifindex: u32, flags: u64) -> i64 {
        // SAFETY: a helper without memory arguments.
        unsafe { bpf_redirect(ifindex, flags) }
    }
}

#[inline(always)]
fn is_tag(ethertype: u16) -> bool {
    ethertype == ETHERTYPE_VLAN || ethertype == ETHERTYPE_VLAN_SERVICE
}
