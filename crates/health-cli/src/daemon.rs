//! The interface of commands to the daemon. The binary passes in the daemon, so that this crate does not depend on it.

use std::pin::Pin;

use health_model::settings::Location;
use health_settings::{ServiceProxyMode, Settings};

/// A future, boxed so that it is compiled in the crate that creates it.
pub type Task<'a, T, E = anyhow::Error> = Pin<Box<dyn Future<Output = Result<T, E>> + 'a>>;

/// Runs the daemon, and removes whatever it leaves behind.
pub trait Daemon {
    /// Runs until SIGINT or SIGTERM.
    fn run(&self, settings: Settings) -> Task<'_, ()>;
    /// Removes everything that an agent created on this machine, and returns a description of each removed item.
    fn cleanup<'a>(&'a self, location: &'a Location) -> Task<'a, Vec<String>>;
    /// Removes everything that serves services in these modes, and returns a description of each removed item.
    fn cleanup_services<'a>(
        &'a self,
        location: &'a Location,
        modes: &'a [ServiceProxyMode],
    ) -> Task<'a, Vec<String>>;
}
