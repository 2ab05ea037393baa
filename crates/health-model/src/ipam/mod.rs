//! Addresses of endpoints: the pools of a node's pod CIDRs, who has what of them, and what is excluded.

mod node;
mod pool;
mod range;

pub use self::node::{NodeIpam, Owner, Search};
pub use self::pool::{Cidrs, Family, IpamError, Pool};
pub use self::range::{AddressRange, AddressRangeError};
