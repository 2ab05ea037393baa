//! Where an agent's API is, and how to connect to it.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use health_net::tls::{AuthoritiesError, Identity, IdentityError, authorities, provider};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, version};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;

use super::error::ClientError;
use super::tls_error;

/// Pause between two attempts to connect to an overloaded agent.
const CONNECT_PAUSE: Duration = Duration::from_millis(10);

/// The URL of an agent's API: `unix:PATH` or `https://HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApiUrl {
    /// A unix socket.
    Unix(PathBuf),
    /// A TCP port with TLS.
    Https {
        /// A name or an address, without brackets.
        host: String,
        /// The port.
        port: u16,
    },
}

impl fmt::Display for ApiUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Https { host, port } if host.contains(':') => {
                write!(f, "https://[{host}]:{port}")
            }
            Self::Https { host, port } => write!(f, "https://{host}:{port}"),
        }
    }
}

/// The string is not an [`ApiUrl`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "not the URL of an API; write it like https://192.0.2.1:4245, https://[2001:db8::1]:4245 or unix:/run/health-agent/reader.sock"
)]
pub struct ApiUrlError;

impl FromStr for ApiUrl {
    type Err = ApiUrlError;

    fn from_str(text: &str) -> Result<Self, ApiUrlError> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = PathBuf::from(path);
            return match path.is_absolute() {
                true => Ok(Self::Unix(path)),
                false => Err(ApiUrlError),
            };
        }
        let authority = text.strip_prefix("https://").ok_or(ApiUrlError)?;
        let authority = authority.strip_suffix('/').unwrap_or(authority);
        let (host, port) = authority.rsplit_once(':').ok_or(ApiUrlError)?;
        let bare = host
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'));
        let host = bare.unwrap_or(host);
        let is_v6 = host.parse::<std::net::Ipv6Addr>().is_ok();
        let port = port.parse().ok().filter(|port| *port != 0);
        // The name is verified when TLS is set up.
        match (
            port,
            is_v6 == bare.is_some() && !host.contains('/') && !host.is_empty(),
        ) {
            (Some(port), true) => Ok(Self::Https {
                host: host.to_owned(),
                port,
            }),
            _ => Err(ApiUrlError),
        }
    }
}

/// The certificates for an agent that is reached over TLS, in PEM.
#[derive(Clone, Copy, Debug)]
pub struct TlsMaterial<'a> {
    /// The authorities that may have signed the agent's certificate.
    pub authorities: &'a [u8],
    /// The client's certificate, with any intermediate ones after it, and its key.
    pub identity: Option<(&'a [u8], &'a [u8])>,
}

/// Why an agent cannot be reached over TLS.
#[derive(Debug, thiserror::Error)]
pub enum TlsSetupError {
    /// The host is neither a name nor an address.
    #[error("invalid host name '{0}'")]
    Host(String),
    /// There are no usable authority certificates.
    #[error(transparent)]
    Authorities(#[from] AuthoritiesError),
    /// The client's certificate or key cannot be read.
    #[error("cannot read the client {0}")]
    Identity(#[from] IdentityError),
    /// The client's certificate and key cannot be used together.
    #[error("cannot use the client certificate with this key: {0}")]
    Pair(#[source] rustls::Error),
}

/// How to reach one agent.
#[derive(Clone)]
pub(super) enum Access {
    Unix(PathBuf),
    Tls(Arc<TlsAccess>),
}

pub(super) struct TlsAccess {
    host: String,
    port: u16,
    name: ServerName<'static>,
    connector: TlsConnector,
}

/// A connection to an agent.
pub(super) trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Names the agent in errors.
impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => path.display().fmt(f),
            Self::Tls(access) => access.url().fmt(f),
        }
    }
}

impl Access {
    /// Fails if the certificates are unusable.
    pub(super) fn over_tls(
        host: &str,
        port: u16,
        material: &TlsMaterial<'_>,
    ) -> Result<Self, TlsSetupError> {
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| TlsSetupError::Host(host.to_owned()))?;
        let builder = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&version::TLS13])
            .expect("ring has suites for TLS 1.3")
            .with_root_certificates(authorities(material.authorities)?);
        let config = match material.identity {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => {
                let own = Identity::from_pem(certificate, key)?;
                builder
                    .with_client_auth_cert(own.chain, own.key)
                    .map_err(TlsSetupError::Pair)?
            }
        };
        Ok(Self::Tls(Arc::new(TlsAccess {
            host: host.to_owned(),
            port,
            name,
            connector: TlsConnector::from(Arc::new(config)),
        })))
    }

    /// Opens a connection.
    pub(super) async fn connect(&self) -> Result<Box<dyn Stream>, ClientError> {
        match self {
            Self::Unix(path) => match connect_unix(path).await {
                Ok(stream) => Ok(Box::new(stream)),
                Err(error) => Err(socket_error(path.clone(), error)),
            },
            Self::Tls(access) => access.connect().await,
        }
    }
}

impl TlsAccess {
    fn url(&self) -> ApiUrl {
        ApiUrl::Https {
            host: self.host.clone(),
            port: self.port,
        }
    }

    async fn connect(&self) -> Result<Box<dyn Stream>, ClientError> {
        let failed = |source: io::Error| match tls_error::reason(&source) {
            Some(reason) => ClientError::Tls {
                agent: self.url().to_string(),
                reason,
            },
            None => ClientError::Connect {
                agent: self.url().to_string(),
                source,
            },
        };
        let stream = TcpStream::connect((self.host.as_str(), self.port))
            .await
            .map_err(failed)?;
        let stream = self
            .connector
            .connect(self.name.clone(), stream)
            .await
            .map_err(failed)?;
        Ok(Box::new(stream))
    }
}

async fn connect_unix(path: &std::path::Path) -> io::Result<UnixStream> {
    loop {
        match UnixStream::connect(path).await {
            // The listener's backlog is full, and there is no notification when that changes.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                tokio::time::sleep(CONNECT_PAUSE).await;
            }
            connected => return connected,
        }
    }
}

fn socket_error(path: PathBuf, source: io::Error) -> ClientError {
    match source.kind() {
        io::ErrorKind::NotFound => ClientError::NoAgent(path),
        io::ErrorKind::ConnectionRefused => ClientError::Stale(path),
        io::ErrorKind::PermissionDenied => ClientError::Permission(path),
        _ => ClientError::Connect {
            agent: path.display().to_string(),
            source,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_read_as_they_are_shown() {
        for text in [
            "unix:/run/health-agent/reader.sock",
            "https://192.0.2.1:4245",
            "https://[2001:db8::1]:4245",
            "https://node1.example:4245",
        ] {
            let url: ApiUrl = text.parse().expect(text);
            assert_eq!(url.to_string(), text);
        }
        let url: ApiUrl = "https://node1:4245/".parse().expect("a URL");
        assert_eq!(url.to_string(), "https://node1:4245");
        for bad in [
            "",
            "http://192.0.2.1:4245",
            "https://192.0.2.1",
            "https://192.0.2.1:0",
            "https://2001:db8::1:4245",
            "https://[192.0.2.1]:4245",
            "https://:4245",
            "https://a/b:4245",
            "192.0.2.1:4245",
            "unix:reader.sock",
        ] {
            assert_eq!(bad.parse::<ApiUrl>(), Err(ApiUrlError), "{bad}");
        }
    }
}
