//! The devices on which XDP sends packets of services on: `HEALTH_XDP_DEVICES`.

/// Most devices.
pub const XDP_DEVICES: u32 = 256;

/// A device on which XDP serves, by its number.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XdpDevice {
    /// Its hardware address. Frames for others are none of this host's business.
    pub mac: [u8; 6],
    /// [`XDP_RETURNS`] and [`XDP_SENDS`].
    pub flags: u16,
}

/// Flag: the device sends back what its program returns (`XDP_TX`).
pub const XDP_RETURNS: u16 = 1;
/// Flag: the device sends what programs redirect to it.
pub const XDP_SENDS: u16 = 2;

crate::map_types!(XdpDevice = 8);
