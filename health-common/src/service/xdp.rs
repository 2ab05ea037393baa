//! The devices on which XDP sends packets of services on: `HEALTH_XDP_DEVICES`.

/// Most devices.
pub const XDP_DEVICES: u32 = 256;

/// A device on which XDP serves, by its number.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XdpDevice {
    /// Its hardware address. Frames for others are none of this host's business.
    pub mac: [u8; 6],
    /// [`XDP_SENDS`] or 0.
    pub flags: u16,
}

/// Flag: the device sends what XDP redirects to it.
pub const XDP_SENDS: u16 = 1;

crate::map_types!(XdpDevice = 8);
