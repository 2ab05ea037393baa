//! Errors as runtimes get them: a code, and words for people.

use hyper::StatusCode;
use serde::Serialize;

use super::version::Version;
use crate::api::client::ClientError;

/// The codes of the specification (section 5, "Error"), and one of our own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Code {
    /// The version of the configuration is not spoken.
    IncompatibleVersion = 1,
    /// A field of the configuration means something that is not done here.
    UnsupportedField = 2,
    /// A variable of the environment is missing or makes no sense.
    InvalidEnvironment = 4,
    /// Reading or writing failed.
    Io = 5,
    /// The configuration is no JSON.
    Decode = 6,
    /// The configuration makes no sense.
    InvalidConfig = 7,
    /// It may go well later.
    TryAgainLater = 11,
    /// STATUS: no container can be added for now.
    NotAvailable = 50,
    /// The agent could not do it.
    Failed = 100,
    /// Something is there already.
    Exists = 101,
    /// CHECK: the container is not as it was left.
    Differs = 102,
}

/// Why a request was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(super) struct CniError {
    code: Code,
    message: String,
}

/// It as a runtime reads it.
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

    #[cfg(test)]
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
                // What is asked for comes from there: the namespace, the names, the addresses.
                StatusCode::BAD_REQUEST => Code::InvalidEnvironment,
                _ => Code::Failed,
            },
            ClientError::Permission(_)
            | ClientError::Request { .. }
            | ClientError::Decode { .. } => Code::Failed,
        };
        Self::new(code, error.to_string())
    }
}
