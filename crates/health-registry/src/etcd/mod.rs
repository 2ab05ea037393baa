//! What keeps things in etcd: how a cluster is reached, a connection to one of its members, and a
//! feed of the keys under a prefix, and documents there. What the keys mean is for those who use it.

mod config;
mod documents;
mod feed;
mod store;

pub use self::config::EtcdConfigError;
pub use self::documents::{DocumentTable, DocumentWatch, DocumentsError, Text, services_prefix};

pub(crate) use self::config::Source;
pub(crate) use self::feed::{Cursor, Feed, FeedEnd, Mirror};
pub(crate) use self::store::{Change, LeaseHold, Pair, Store, StoreError, Value};
