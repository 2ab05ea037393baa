//! Objects of a Kubernetes cluster: how to reach its API server, and how to follow objects there.

pub(crate) mod access;
mod condition;
mod events;
pub(crate) mod follow;
mod objects;
mod pods;
mod policies;
mod services;

pub use self::access::AccessError;
pub(crate) use self::access::server;
pub use self::condition::{ConditionStatus, ConditionWriter, NodeCondition};
pub use self::events::{EventType, EventWriter, ObjectEvent};
pub use self::objects::{Lacking, ObjectTable, ObjectWatch};
pub use self::pods::{PodMetadata, PodWatch};
pub use self::policies::PolicyWatch;
pub use self::services::{ServiceScope, ServiceWatch};
