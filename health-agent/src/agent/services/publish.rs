//! Publishing of values that are compared and shared.

use std::sync::Arc;

use tokio::sync::watch;

/// Notifies receivers if the value has changed.
pub(in crate::agent::services) fn publish<T: PartialEq>(sender: &watch::Sender<Arc<T>>, found: T) {
    sender.send_if_modified(|known| {
        let differs = **known != found;
        if differs {
            *known = Arc::new(found);
        }
        differs
    });
}
