//! TLS for HTTPS and gRPC probes. As with the kubelet, certificates are only verified if the settings ask for it. A
//! probe that does not verify accepts everything that Go does, including the key exchange [`group`], the suites of
//! [`cbc`], and any signature.

mod cbc;
mod group;

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::pin::Pin;
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll};

use health_net::tls::{AuthoritiesError, Identity, IdentityError, authorities, provider};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WantsClientCert};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::Host;
use super::connect::Connection;

/// The name of HTTP/2 in ALPN.
const H2: &[u8] = b"h2";

static UNVERIFIED: LazyLock<TlsClient> = LazyLock::new(|| TlsClient {
    configs: Configs::of(unverified()),
    server_name: None,
    is_verified: false,
});

/// Why TLS settings are unusable.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// There are no usable authority certificates.
    #[error(transparent)]
    Authorities(#[from] AuthoritiesError),
    /// The name is not a valid server name.
    #[error("invalid server name {0:?}")]
    ServerName(String),
    /// The client's certificate or key cannot be read.
    #[error("cannot read the client {0}")]
    Unreadable(#[from] IdentityError),
    /// The client's certificate and key cannot be used together.
    #[error("cannot use the client certificate with its key: {0}")]
    Identity(#[source] rustls::Error),
}

/// How to speak TLS. The default is the kubelet's: nothing is verified, and no certificate is presented.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsSettings {
    /// Authority certificates to verify the server's certificate with, in PEM.
    pub authorities: Option<Vec<u8>>,
    /// The server name to request and verify; by default the target's host name or address.
    pub server_name: Option<String>,
    /// The certificate to present to a server that asks for one.
    pub identity: Option<TlsIdentity>,
}

/// A client's certificate.
#[derive(Clone, PartialEq, Eq)]
pub struct TlsIdentity {
    /// The certificate chain, in PEM.
    pub certificates: Vec<u8>,
    /// The private key, in PEM.
    pub key: Vec<u8>,
}

impl fmt::Debug for TlsIdentity {
    /// Hides the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsIdentity").finish_non_exhaustive()
    }
}

/// TLS settings, ready for use.
#[derive(Clone, Debug)]
pub struct TlsClient {
    configs: Configs,
    server_name: Option<ServerName<'static>>,
    is_verified: bool,
}

#[derive(Clone, Debug)]
struct Configs {
    http1: Arc<ClientConfig>,
    http2: Arc<ClientConfig>,
}

impl Configs {
    fn of(mut config: ClientConfig) -> Self {
        // A resumed session would not show whether the certificate is still valid. Probes must be independent of each
        // other.
        config.resumption = Resumption::disabled();
        let http1 = Arc::new(config.clone());
        config.alpn_protocols = vec![H2.to_vec()];
        Self {
            http1,
            http2: Arc::new(config),
        }
    }
}

/// The protocol that TLS carries.
#[derive(Clone, Copy, Debug)]
pub(super) enum Protocol {
    Http1,
    Http2,
}

impl Default for TlsClient {
    fn default() -> Self {
        UNVERIFIED.clone()
    }
}

impl TlsClient {
    /// Fails if certificates or keys are invalid.
    pub fn new(settings: &TlsSettings) -> Result<Self, TlsError> {
        let builder = match &settings.authorities {
            None => unverified_builder(),
            Some(pem) => builder(provider()).with_root_certificates(authorities(pem)?),
        };
        let config = match &settings.identity {
            None => builder.with_no_client_auth(),
            Some(identity) => {
                let Identity { chain, key } =
                    Identity::from_pem(&identity.certificates, &identity.key)?;
                builder
                    .with_client_auth_cert(chain, key)
                    .map_err(TlsError::Identity)?
            }
        };
        let server_name = settings.server_name.as_ref().map(|name| {
            ServerName::try_from(name.clone()).map_err(|_| TlsError::ServerName(name.clone()))
        });
        Ok(Self {
            configs: Configs::of(config),
            server_name: server_name.transpose()?,
            is_verified: settings.authorities.is_some(),
        })
    }

    /// Performs the handshake with the server on a host.
    pub(super) async fn connect(
        &self,
        host: &Host,
        protocol: Protocol,
        connection: Connection,
    ) -> io::Result<TlsConnection> {
        let config = match protocol {
            Protocol::Http1 => &self.configs.http1,
            Protocol::Http2 => &self.configs.http2,
        };
        let name = match (&self.server_name, host) {
            (Some(name), _) => name.clone(),
            (None, Host::Ip(ip)) => ServerName::from(*ip),
            (None, Host::Name(host)) => match ServerName::try_from(host.clone()) {
                Ok(name) => name,
                // An address is not sent as server name.
                Err(_) if !self.is_verified => {
                    ServerName::from(IpAddr::from(Ipv4Addr::UNSPECIFIED))
                }
                Err(error) => return Err(io::Error::other(error)),
            },
        };
        let connector = TlsConnector::from(config.clone());
        // Boxed, so that plain-text probes need no space for a session.
        let stream = Box::pin(connector.connect(name, connection)).await?;
        Ok(TlsConnection {
            stream: Box::new(stream),
        })
    }
}

type Builder = rustls::ConfigBuilder<ClientConfig, rustls::WantsVerifier>;

/// A provider that accepts everything that Go's clients accept.
fn lenient_provider() -> Arc<CryptoProvider> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
        let mut provider = ring::default_provider();
        let suites = cbc::suites(&provider);
        provider.cipher_suites.extend(suites);
        provider.kx_groups.push(&group::P521);
        Arc::new(provider)
    });
    PROVIDER.clone()
}

fn builder(provider: Arc<CryptoProvider>) -> Builder {
    ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("ring has suites for TLS 1.2 and 1.3")
}

fn unverified_builder() -> rustls::ConfigBuilder<ClientConfig, WantsClientCert> {
    builder(lenient_provider())
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Unverified))
}

fn unverified() -> ClientConfig {
    unverified_builder().with_no_client_auth()
}

/// Accepts any certificate, even an unreadable one, and any signature.
#[derive(Debug)]
struct Unverified;

impl ServerCertVerifier for Unverified {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        // In Go's order. A server signs only with the schemes offered here.
        vec![
            SignatureScheme::RSA_PSS_SHA256,
            SignatureScheme::ECDSA_NISTP256_SHA256,
            SignatureScheme::ED25519,
            SignatureScheme::RSA_PSS_SHA384,
            SignatureScheme::RSA_PSS_SHA512,
            SignatureScheme::RSA_PKCS1_SHA256,
            SignatureScheme::RSA_PKCS1_SHA384,
            SignatureScheme::RSA_PKCS1_SHA512,
            SignatureScheme::ECDSA_NISTP384_SHA384,
            SignatureScheme::ECDSA_NISTP521_SHA512,
            SignatureScheme::RSA_PKCS1_SHA1,
            SignatureScheme::ECDSA_SHA1_Legacy,
        ]
    }
}

/// A TLS connection. Sends the server a close notification when dropped; otherwise the server would suspect a
/// truncation attack.
#[derive(Debug)]
pub(super) struct TlsConnection {
    stream: Box<TlsStream<Connection>>,
}

impl Drop for TlsConnection {
    fn drop(&mut self) {
        let (connection, session) = self.stream.get_mut();
        session.send_close_notify();
        // Write as much as fits; do not wait.
        let _ = session.write_tls(&mut Unwaiting(connection));
    }
}

/// Writes to a connection as much as fits, without waiting.
struct Unwaiting<'a>(&'a Connection);

impl io::Write for Unwaiting<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.try_write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsyncRead for TlsConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for TlsConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    /// Does nothing: dropping the connection closes it.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests;
