//! Closes the host's connected UDP sockets whose backends no longer serve. The kernel runs no program for the datagrams
//! of such a socket, so the agent closes it; the process gets an error and opens a new socket.

use std::collections::HashMap;
use std::io;
use std::time::Duration;

use health_datapath::services::SocketTable;
use health_model::task::AbortOnDrop;
use health_net::socket_diag::SocketDiag;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

/// Minimum time between two checks.
const SHORTEST_PERIOD: Duration = Duration::from_millis(100);
/// Maximum time between two checks. A socket may have been connected while its backend was being removed.
const LONGEST_PERIOD: Duration = Duration::from_secs(30);

/// Closes sockets whose backends no longer serve, until dropped.
pub(super) struct SocketWatch {
    _task: AbortOnDrop,
}

impl SocketWatch {
    /// Checks after each change of the services. Must be called in a tokio runtime, from a thread in the host's
    /// namespace.
    pub(super) fn follow<T: Send + Sync + 'static>(
        table: SocketTable,
        mut changes: watch::Receiver<T>,
    ) -> io::Result<Self> {
        let mut parts = (table, SocketDiag::open()?);
        let task = AbortOnDrop::spawn(async move {
            loop {
                let look = spawn_blocking(move || {
                    let ended = end_stuck(&parts.0, &mut parts.1);
                    (parts, ended)
                });
                let Ok((back, ended)) = look.await else {
                    return;
                };
                parts = back;
                match ended {
                    Ok(0) => {}
                    Ok(sockets) => {
                        info!(sockets, "closed UDP sockets whose backends no longer serve");
                    }
                    Err(error) => {
                        warn!(%error, "cannot close UDP sockets whose backends no longer serve");
                    }
                }
                sleep(SHORTEST_PERIOD).await;
                if matches!(timeout(LONGEST_PERIOD, changes.changed()).await, Ok(Err(_))) {
                    return;
                }
            }
        });
        Ok(Self { _task: task })
    }
}

/// Closes the stuck sockets, and returns their number.
fn end_stuck(table: &SocketTable, diag: &mut SocketDiag) -> io::Result<usize> {
    let stuck = table.stuck()?;
    if stuck.is_empty() {
        return Ok(0);
    }
    let stuck: HashMap<_, _> = stuck
        .into_iter()
        .map(|socket| (socket.cookie, socket.backend))
        .collect();
    let sockets = diag.connected_udp()?.into_iter();
    // The socket may be connected to something else by now.
    let sockets = sockets.filter(|socket| stuck.get(&socket.cookie) == Some(&socket.peer));
    let mut ended = 0;
    for socket in sockets {
        match diag.destroy(&socket) {
            Ok(()) => ended += 1,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(ended)
}
