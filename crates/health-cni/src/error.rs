//! Errors as runtimes receive them: a code and a human-readable message.

use health_api::client::ClientError;
use hyper::StatusCode;
use serde::Serialize;

use super::version::Version;

/// The codes of the specification (section 5, "Error"), and our own codes from 100 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Code {
    /// The configuration's version is not supported.
    IncompatibleVersion = 1,
    /// A field of the configuration requests an unsupported feature.
    UnsupportedField = 2,
    /// An environment variable is missing or invalid.
    InvalidEnvironment = 4,
    /// Reading or writing failed.
    Io = 5,
    /// The configuration is not JSON.
    Decode = 6,
    /// The configuration is invalid.
    InvalidConfig = 7,
    /// The request may succeed later.
    TryAgainLater = 11,
    /// STATUS: no container can be added at the moment.
    NotAvailable = 50,
    /// The agent failed to carry out the request.
    Failed = 100,
    /// The endpoint exists already.
    Exists = 101,
    /// CHECK: the container differs from the state that ADD left.
    Differs = 102,
}

/// Why a request was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(super) struct CniError {
    code: Code,
    message: String,
}

/// The error as a runtime reads it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ErrorAnswer<'a> {
    cni_version: Version,
    code: u32,
    msg: &'a str,
}

impl CniError {
    pub(super) fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }

    pub(super) fn with_code(self, code: Code) -> Self {
        Self { code, ..self }
    }

    pub(super) fn answer(&self, cni_version: Version) -> ErrorAnswer<'_> {
        ErrorAnswer {
            cni_version,
            code: self.code as u32,
            msg: &self.message,
        }
    }

    pub(super) fn code(&self) -> Code {
        self.code
    }
}

impl From<ClientError> for CniError {
    fn from(error: ClientError) -> Self {
        let code = match &error {
            ClientError::NoAgent(_)
            | ClientError::Stale(_)
            | ClientError::Connect { .. }
            | ClientError::Timeout { .. }
            | ClientError::Broken { .. }
            | ClientError::Cut { .. } => Code::TryAgainLater,
            ClientError::Refused { code, .. } => match *code {
                StatusCode::SERVICE_UNAVAILABLE => Code::TryAgainLater,
                StatusCode::CONFLICT => Code::Exists,
                // The namespace, names and addresses of the request come from the environment.
                StatusCode::BAD_REQUEST => Code::InvalidEnvironment,
                _ => Code::Failed,
            },
            ClientError::Permission(_)
            | ClientError::Tls { .. }
            | ClientError::Request { .. }
            | ClientError::Decode { .. } => Code::Failed,
        };
        Self::new(code, error.to_string())
    }
}
