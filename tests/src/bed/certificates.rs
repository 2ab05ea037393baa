//! Certificates from a test's own authority.

use anyhow::Context as _;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

/// A certificate authority.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

/// A certificate and its key, both in PEM.
#[derive(Clone, Debug)]
pub struct SignedCertificate {
    /// The certificate.
    pub certificate: String,
    /// The private key.
    pub key: String,
}

impl Authority {
    /// Creates an authority.
    pub fn new(name: &str) -> anyhow::Result<Self> {
        let key = KeyPair::generate().context("cannot generate a key")?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).context("cannot sign")?.pem();
        Ok(Self {
            issuer: Issuer::new(params, key),
            pem,
        })
    }

    /// The authority's own certificate in PEM.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// Signs a certificate for these host names and addresses.
    pub fn sign(&self, names: &[&str]) -> anyhow::Result<SignedCertificate> {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let params = CertificateParams::new(names).context("invalid certificate name")?;
        self.sign_params(params)
    }

    /// Signs a client's certificate for this user and group, as Kubernetes names them.
    pub fn sign_client(&self, user: &str, group: &str) -> anyhow::Result<SignedCertificate> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, user);
        params
            .distinguished_name
            .push(DnType::OrganizationName, group);
        self.sign_params(params)
    }

    fn sign_params(&self, params: CertificateParams) -> anyhow::Result<SignedCertificate> {
        let key = KeyPair::generate().context("cannot generate a key")?;
        let certificate = params
            .signed_by(&key, &self.issuer)
            .context("cannot sign")?;
        Ok(SignedCertificate {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        })
    }
}
