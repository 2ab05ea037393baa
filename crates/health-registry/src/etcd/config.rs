//! How to reach an etcd cluster: just its URLs, or a YAML file with certificates and credentials in the format of
//! etcd's own client and Cilium's cluster mesh.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use etcd_client::{Certificate, ConnectOptions, Identity, TlsOptions};
use serde::Deserialize;
use serde_saphyr::{MessageFormatter as _, UserMessageFormatter};

use health_settings::RegistrySpec;

/// Maximum wait for a connection to a member.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum EtcdConfigError {
    /// A file cannot be read.
    #[error("cannot read {what} {path}: {source}")]
    Unreadable {
        /// `etcd configuration`, or the field that names the file.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// The file is not YAML, or has unknown or malformed fields.
    #[error("etcd configuration {path}: {reason}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        reason: String,
    },
    /// The fields do not fit together.
    #[error("etcd configuration {path}: {reason}")]
    Incomplete {
        /// The file.
        path: PathBuf,
        /// The missing part.
        reason: &'static str,
    },
}

/// The URLs of an etcd cluster's members, or a configuration file that contains them.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    Urls(Vec<String>),
    File(PathBuf),
}

/// Everything needed to connect.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    /// The URLs of the members; at least one.
    pub(crate) endpoints: Vec<String>,
    tls: Option<TlsOptions>,
    user: Option<(String, String)>,
}

impl Source {
    /// Returns the source that the settings name; `None` if they do not name etcd.
    pub(crate) fn of(spec: &RegistrySpec) -> Option<Self> {
        match spec {
            RegistrySpec::Etcd(urls) => Some(Self::Urls(urls.clone())),
            RegistrySpec::EtcdConfig(path) => Some(Self::File(path.clone())),
            RegistrySpec::File(_) | RegistrySpec::Kubernetes(_) => None,
        }
    }

    /// Reads all files. They are read on each call, so that renewed certificates are used.
    pub(crate) fn access(&self) -> Result<Access, EtcdConfigError> {
        match self {
            Self::Urls(urls) => Ok(Access {
                endpoints: urls.clone(),
                tls: None,
                user: None,
            }),
            Self::File(path) => {
                let text = read("etcd configuration", path)?;
                File::parse(&text, path)?.access(path)
            }
        }
    }
}

impl Access {
    /// Returns the options for one endpoint.
    pub(crate) fn options(&self, endpoint: &str) -> ConnectOptions {
        let mut options = ConnectOptions::new()
            .with_connect_timeout(CONNECT_TIMEOUT)
            .with_require_leader(true)
            .with_auto_token_refresh(true);
        if endpoint.starts_with("https://") {
            let tls = self.tls.clone();
            options =
                options.with_tls(tls.unwrap_or_else(|| TlsOptions::new().with_native_roots()));
        }
        if let Some((name, password)) = &self.user {
            options = options.with_user(name, password);
        }
        options
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    endpoints: Vec<String>,
    trusted_ca_file: Option<PathBuf>,
    cert_file: Option<PathBuf>,
    key_file: Option<PathBuf>,
    username: Option<String>,
    password: Option<String>,
}

impl File {
    fn parse(text: &[u8], path: &Path) -> Result<Self, EtcdConfigError> {
        let malformed = |reason| EtcdConfigError::Malformed {
            path: path.to_owned(),
            reason,
        };
        let text = std::str::from_utf8(text).map_err(|error| malformed(error.to_string()))?;
        // By default, more than 32 consecutive comment lines are an error.
        let options = serde_saphyr::options! { emit_comments: false };
        serde_saphyr::from_str_with_options(text, options).map_err(|error| {
            let error = error.without_snippet();
            let place = error.location().map_or_else(String::new, |place| {
                format!("line {}, column {}: ", place.line(), place.column())
            });
            malformed(place + &UserMessageFormatter.format_message(error))
        })
    }

    fn access(self, path: &Path) -> Result<Access, EtcdConfigError> {
        let incomplete = |reason| EtcdConfigError::Incomplete {
            path: path.to_owned(),
            reason,
        };
        let is_url = |url: &String| url.starts_with("http://") || url.starts_with("https://");
        if self.endpoints.is_empty() || !self.endpoints.iter().all(is_url) {
            return Err(incomplete(
                "endpoints must be one or more URLs such as https://192.0.2.1:2379",
            ));
        }
        // Paths are relative to the file that names them.
        let folder = path.parent().unwrap_or(Path::new("/"));
        let mut tls = match &self.trusted_ca_file {
            Some(ca) => {
                let pem = read("trusted-ca-file", &folder.join(ca))?;
                TlsOptions::new().ca_certificate(Certificate::from_pem(pem))
            }
            None => TlsOptions::new().with_native_roots(),
        };
        match (&self.cert_file, &self.key_file) {
            (Some(cert), Some(key)) => {
                let cert = read("cert-file", &folder.join(cert))?;
                let key = read("key-file", &folder.join(key))?;
                tls = tls.identity(Identity::from_pem(cert, key));
            }
            (None, None) => {}
            _ => return Err(incomplete("cert-file and key-file must be given together")),
        }
        let user = match (self.username, self.password) {
            (Some(name), Some(password)) => Some((name, password)),
            (None, None) => None,
            _ => return Err(incomplete("username and password must be given together")),
        };
        Ok(Access {
            endpoints: self.endpoints,
            tls: Some(tls),
            user,
        })
    }
}

fn read(what: &'static str, path: &Path) -> Result<Vec<u8>, EtcdConfigError> {
    std::fs::read(path).map_err(|source| EtcdConfigError::Unreadable {
        what,
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_with_a_configuration_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("etcd.yaml");
        for (text, expected) in [
            ("endpoints: []", "endpoints must be one or more URLs"),
            (
                "endpoints: [192.0.2.1:2379]",
                "endpoints must be one or more URLs",
            ),
            (
                "endpoints: [http://a]\nendpoint: b",
                "line 2, column 1: unknown field",
            ),
            (
                "endpoints: [https://a]\ncert-file: a.pem",
                "cert-file and key-file must be given together",
            ),
            (
                "endpoints: [https://a]\nusername: root",
                "username and password must be given together",
            ),
            (
                "endpoints: [https://a]\ntrusted-ca-file: ca.pem",
                "cannot read trusted-ca-file",
            ),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = Source::File(path.clone()).access().unwrap_err().to_string();
            assert!(error.contains(expected), "{error:?} for {text:?}");
            assert_eq!(error.lines().count(), 1, "{error:?}");
        }
        let absent = Source::File(dir.path().join("absent.yaml"));
        let error = absent.access().unwrap_err().to_string();
        assert!(error.contains("cannot read etcd configuration"), "{error}");
    }

    #[test]
    fn files_are_found_beside_the_one_that_names_them() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("etcd.yaml");
        std::fs::write(dir.path().join("ca.pem"), "certificate").unwrap();
        let text = "endpoints: [\"https://a:2379\", \"https://b:2379\"]\n\
                    trusted-ca-file: ca.pem\nusername: u\npassword: p\n";
        std::fs::write(&path, text).unwrap();
        let access = Source::File(path).access().unwrap();
        assert_eq!(access.endpoints.len(), 2);
        assert_eq!(access.user, Some(("u".to_owned(), "p".to_owned())));
    }
}
