//! Endpoint addresses: the pools of a node's pod CIDRs, the owners of addresses, and exclusions.

mod node;
mod pool;
mod range;

pub use self::node::{NodeIpam, Owner, Search};
pub use self::pool::{Cidrs, Family, IpamError, Pool};
pub use self::range::{AddressRange, AddressRangeError};
