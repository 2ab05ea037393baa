//! What commands need of the daemon. The program passes it in, so that this crate does not depend on the daemon.

use std::pin::Pin;

use health_model::settings::Location;
use health_settings::{ServiceProxyMode, Settings};

/// A future, boxed so that the crate that makes it also compiles it.
pub type Task<'a, T, E = anyhow::Error> = Pin<Box<dyn Future<Output = Result<T, E>> + 'a>>;

/// The daemon of `run`, and the removal of what it leaves.
pub trait Daemon {
    /// Runs until SIGINT or SIGTERM.
    fn run(&self, settings: Settings) -> Task<'_, ()>;
    /// Removes everything that an agent created on this machine, and returns what it was.
    fn cleanup<'a>(&'a self, location: &'a Location) -> Task<'a, Vec<String>>;
    /// Removes what serves services in these modes, and returns what it was.
    fn cleanup_services<'a>(
        &'a self,
        location: &'a Location,
        modes: &'a [ServiceProxyMode],
    ) -> Task<'a, Vec<String>>;
}
