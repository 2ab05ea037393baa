//! Access to etcd: how to reach a cluster, a connection to one of its members, a feed of the keys under a prefix, and
//! documents under a prefix. The users of this module define the meaning of the keys.

mod config;
mod documents;
mod feed;
mod store;

pub use self::config::EtcdConfigError;
pub use self::documents::{DocumentTable, DocumentWatch, DocumentsError, Text, services_prefix};

pub(crate) use self::config::Source;
pub(crate) use self::feed::{Cursor, Feed, FeedEnd, Mirror};
pub(crate) use self::store::{Change, LeaseHold, Pair, Store, StoreError, Value};
