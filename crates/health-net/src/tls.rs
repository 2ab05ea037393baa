//! What all users of TLS share: the cryptography, and certificates and keys in PEM (RFC 7468).

use std::sync::{Arc, LazyLock};

use rustls::RootCertStore;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// The cryptography of ring, the same for all connections.
pub fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> =
        LazyLock::new(|| Arc::new(ring::default_provider()));
    PROVIDER.clone()
}

/// Why a document does not contain usable authority certificates.
#[derive(Debug, thiserror::Error)]
pub enum AuthoritiesError {
    /// The document is not PEM.
    #[error("cannot read the CA certificates: {0}")]
    Unreadable(#[source] pem::Error),
    /// There is no certificate.
    #[error("no CA certificate found")]
    Missing,
    /// A certificate is not an authority's.
    #[error("cannot use a CA certificate: {0}")]
    Unusable(#[source] rustls::Error),
}

/// The authorities whose certificates `pem` contains.
pub fn authorities(pem: &[u8]) -> Result<RootCertStore, AuthoritiesError> {
    let mut store = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem) {
        let certificate = certificate.map_err(AuthoritiesError::Unreadable)?;
        store.add(certificate).map_err(AuthoritiesError::Unusable)?;
    }
    if store.is_empty() {
        return Err(AuthoritiesError::Missing);
    }
    Ok(store)
}

/// Which of the two PEM documents is invalid. The message completes "cannot read the".
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The certificates.
    #[error("certificate: {0}")]
    Certificate(#[source] pem::Error),
    /// The key.
    #[error("key: {0}")]
    Key(#[source] pem::Error),
}

/// A certificate chain, the own certificate first, and its private key.
#[derive(Debug)]
pub struct Identity {
    /// The chain.
    pub chain: Vec<CertificateDer<'static>>,
    /// The key.
    pub key: PrivateKeyDer<'static>,
}

impl Identity {
    /// Reads both from PEM. Does not check whether there is a certificate and whether the key belongs to it.
    pub fn from_pem(certificates: &[u8], key: &[u8]) -> Result<Self, IdentityError> {
        let chain = CertificateDer::pem_slice_iter(certificates)
            .collect::<Result<_, _>>()
            .map_err(IdentityError::Certificate)?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(IdentityError::Key)?;
        Ok(Self { chain, key })
    }
}
