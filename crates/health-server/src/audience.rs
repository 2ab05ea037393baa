//! Who may use which operations of the API.

use axum::http::StatusCode;

use super::answer::Refusal;

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// Only reads: has no effect after the request.
    Read,
    /// Changes the state of the agent, sends probes, or makes others do so.
    Change,
}

impl Access {
    /// The value of `x-access` in the OpenAPI document.
    #[cfg(test)]
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Change => "change",
        }
    }
}

/// The clients of one entrance. Each audience has limits of its own, so that none can use up those of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Audience {
    /// Clients of the unix socket.
    Local,
    /// Clients of the unix socket for reading.
    LocalReaders,
    /// Clients with a certificate from `--api-client-ca`.
    Remote,
    /// Clients with a certificate from `--api-client-ca-read-only`.
    RemoteReaders,
}

impl Audience {
    pub(super) const fn may(self, access: Access) -> bool {
        match access {
            Access::Read => true,
            Access::Change => matches!(self, Self::Local | Self::Remote),
        }
    }

    /// Refuses an operation that this audience [may](Self::may) not use.
    pub(super) fn refusal(self, operation: &str) -> Refusal {
        let why = match self {
            Self::RemoteReaders => {
                "a client with a certificate from --api-client-ca-read-only may only read; use one from --api-client-ca"
            }
            _ => "a client of reader.sock may only read; use health.sock",
        };
        Refusal(StatusCode::FORBIDDEN, format!("{operation}: {why}"))
    }
}
