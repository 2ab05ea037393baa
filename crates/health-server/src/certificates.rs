//! TLS for the API: the agent's certificate, the authorities of its clients, and what each client may do. The files are
//! read again when they change.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use health_model::file::{FileIdentity, read_regular};
use health_net::tls::{AuthoritiesError, Identity, IdentityError, authorities, provider};
use health_settings::ApiSettings;
use rustls::pki_types::UnixTime;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig, ServerConnection, version};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tracing::{debug, info, warn};

use super::serve::Admit;

/// How often the files are polled. They are read once two polls in a row agree, so that a half-written file is not
/// read.
const POLL_PERIOD: Duration = Duration::from_secs(1);
/// Maximum size of a file in bytes.
const MAX_FILE: u64 = 1 << 20;
/// How much is read from a client after its handshake has failed, in bytes.
const MAX_LINGER: u64 = 64 << 10;
/// The name of HTTP/1.1 in ALPN.
const HTTP1: &[u8] = b"http/1.1";

/// Why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CertificatesError {
    /// A file cannot be read.
    #[error("cannot read {flag} {path}: {source}")]
    File {
        /// The flag that names it.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file does not contain usable authority certificates.
    #[error("{flag} {path}: {source}")]
    Authorities {
        /// The flag that names it.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// The error.
        source: AuthoritiesError,
    },
    /// The authorities cannot verify clients.
    #[error("cannot verify clients with the CA certificates: {0}")]
    Verifier(#[from] VerifierBuilderError),
    /// The agent's certificate or key cannot be read.
    #[error("--api-certificate {certificate}, --api-key {key}: cannot read the {source}")]
    Identity {
        /// The file of the certificate.
        certificate: PathBuf,
        /// The file of the key.
        key: PathBuf,
        /// The error.
        source: IdentityError,
    },
    /// The agent's certificate and key cannot be used together.
    #[error(
        "--api-certificate {certificate}, --api-key {key}: cannot use the certificate with this key: {source}"
    )]
    Pair {
        /// The file of the certificate.
        certificate: PathBuf,
        /// The file of the key.
        key: PathBuf,
        /// The error.
        source: rustls::Error,
    },
}

/// The files of the API's certificates.
#[derive(Clone, Debug)]
struct Files {
    certificate: PathBuf,
    key: PathBuf,
    client_ca: Option<PathBuf>,
    read_only_client_ca: Option<PathBuf>,
}

impl Files {
    /// The states of all files; `None` for a file that does not exist.
    fn identities(&self) -> Vec<Option<FileIdentity>> {
        let authorities = [&self.client_ca, &self.read_only_client_ca];
        let files = [&self.certificate, &self.key].into_iter();
        let files = files.chain(authorities.into_iter().flatten());
        files.map(|path| FileIdentity::of(path).ok()).collect()
    }

    fn load(&self) -> Result<Loaded, CertificatesError> {
        let full = trusted("--api-client-ca", self.client_ca.as_deref())?;
        let readers = trusted(
            "--api-client-ca-read-only",
            self.read_only_client_ca.as_deref(),
        )?;
        let mut all = RootCertStore::empty();
        for store in [&full, &readers].into_iter().flatten() {
            all.extend(store.roots.iter().cloned());
        }
        let verifier = |roots: RootCertStore| {
            WebPkiClientVerifier::builder_with_provider(roots.into(), provider()).build()
        };
        let own = self.identity()?;
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&version::TLS13])
            .expect("ring has suites for TLS 1.3")
            .with_client_cert_verifier(verifier(all)?)
            .with_single_cert(own.chain, own.key)
            .map_err(|source| CertificatesError::Pair {
                certificate: self.certificate.clone(),
                key: self.key.clone(),
                source,
            })?;
        // A resumed session would not show whether the client's certificate is still valid.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        config.alpn_protocols = vec![HTTP1.to_vec()];
        Ok(Loaded {
            acceptor: TlsAcceptor::from(Arc::new(config)),
            full: full.map(verifier).transpose()?,
        })
    }

    /// The agent's own certificate.
    fn identity(&self) -> Result<Identity, CertificatesError> {
        let certificate = read("--api-certificate", &self.certificate)?;
        let key = read("--api-key", &self.key)?;
        Identity::from_pem(certificate.as_bytes(), key.as_bytes()).map_err(|source| {
            CertificatesError::Identity {
                certificate: self.certificate.clone(),
                key: self.key.clone(),
                source,
            }
        })
    }
}

fn read(flag: &'static str, path: &Path) -> Result<String, CertificatesError> {
    read_regular(path, MAX_FILE).map_err(|source| CertificatesError::File {
        flag,
        path: path.to_owned(),
        source,
    })
}

/// The authorities in a file; `None` without a file.
fn trusted(
    flag: &'static str,
    path: Option<&Path>,
) -> Result<Option<RootCertStore>, CertificatesError> {
    let Some(path) = path else {
        return Ok(None);
    };
    let store = authorities(read(flag, path)?.as_bytes());
    store
        .map(Some)
        .map_err(|source| CertificatesError::Authorities {
            flag,
            path: path.to_owned(),
            source,
        })
}

/// The certificates in force.
struct Loaded {
    acceptor: TlsAcceptor,
    /// Verifies the certificates of clients that may do everything.
    full: Option<Arc<dyn ClientCertVerifier>>,
}

impl Loaded {
    /// Whether the client of this connection, whose certificate some authority has signed, may do everything. Verifies
    /// the certificate again with only the authorities for full access: no other authority can sign such a certificate.
    fn is_full(&self, connection: &ServerConnection) -> bool {
        let chain = connection.peer_certificates().unwrap_or_default();
        match (&self.full, chain.split_first()) {
            (Some(full), Some((own, rest))) => {
                full.verify_client_cert(own, rest, UnixTime::now()).is_ok()
            }
            _ => false,
        }
    }
}

/// The API's certificates, which follow their files.
pub struct Certificates {
    files: Files,
    /// The files as they were when they were last read.
    read: Vec<Option<FileIdentity>>,
    current: watch::Sender<Arc<Loaded>>,
}

impl Certificates {
    /// Reads the files that the settings name; `None` if they do not name all that is needed. Blocks.
    pub fn open(settings: &ApiSettings) -> Result<Option<Self>, CertificatesError> {
        let (Some(certificate), Some(key)) = (&settings.api_certificate, &settings.api_key) else {
            return Ok(None);
        };
        let files = Files {
            certificate: certificate.clone(),
            key: key.clone(),
            client_ca: settings.api_client_ca.clone(),
            read_only_client_ca: settings.api_client_ca_read_only.clone(),
        };
        // Before they are read, so that a later change is noticed.
        let read = files.identities();
        let current = watch::Sender::new(Arc::new(files.load()?));
        Ok(Some(Self {
            files,
            read,
            current,
        }))
    }

    /// Lets clients with a certificate in, to `full` or to `readers`.
    pub(super) fn door(&self, full: Router, readers: Router) -> Door {
        Door {
            current: self.current.subscribe(),
            full,
            readers,
        }
    }

    /// Reads the files again whenever they change. If the new ones are unusable, the previous ones stay in
    /// force until the next change.
    pub(super) async fn follow(mut self) {
        let mut polls = interval(POLL_PERIOD);
        polls.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last = self.read.clone();
        loop {
            polls.tick().await;
            let files = self.files.clone();
            let Ok(found) = spawn_blocking(move || files.identities()).await else {
                continue;
            };
            if found == last && found != self.read {
                self.read.clone_from(&found);
                self.reload().await;
            }
            last = found;
        }
    }

    async fn reload(&self) {
        let files = self.files.clone();
        match spawn_blocking(move || files.load()).await {
            Ok(Ok(loaded)) => {
                self.current.send_replace(Arc::new(loaded));
                info!("the API uses the new certificates");
            }
            Ok(Err(error)) => {
                warn!(%error, "cannot use the API's new certificates; the previous ones stay in force");
            }
            Err(error) => {
                warn!(%error, "cannot read the API's new certificates; the previous ones stay in force");
            }
        }
    }
}

/// Lets in clients whose certificate an authority has signed.
#[derive(Clone)]
pub(super) struct Door {
    current: watch::Receiver<Arc<Loaded>>,
    full: Router,
    readers: Router,
}

impl Admit<TcpStream> for Door {
    type Stream = TlsStream<TcpStream>;

    async fn admit(self, stream: TcpStream) -> io::Result<(Self::Stream, Router)> {
        let loaded = self.current.borrow().clone();
        match loaded.acceptor.accept(stream).into_fallible().await {
            Ok(stream) => {
                let router = match loaded.is_full(stream.get_ref().1) {
                    true => self.full,
                    false => self.readers,
                };
                Ok((stream, router))
            }
            Err((error, stream)) => {
                let peer = stream.peer_addr().ok();
                debug!(?peer, %error, "a client of the API was not let in");
                linger(stream).await?;
                Err(error)
            }
        }
    }
}

/// Waits until the client has closed its side. If the agent closed the connection with unread data, the client might
/// not receive the alert that says why.
async fn linger(mut stream: TcpStream) -> io::Result<()> {
    stream.shutdown().await?;
    let mut rest = stream.take(MAX_LINGER);
    tokio::io::copy(&mut rest, &mut tokio::io::sink()).await?;
    Ok(())
}
