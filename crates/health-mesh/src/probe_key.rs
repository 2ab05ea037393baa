//! The key by which the agents of a mesh know each other's echo probes.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use health_common::probe::DEFAULT_KEY;
use health_common::siphash::SipKey;
use ring::hmac;

/// Fewest bytes of a key: as many as the key made of them has.
const MIN_LEN: usize = 16;
/// Most bytes of a key: more is some other file.
const MAX_LEN: u64 = 4096;
/// Permission bits of group and others.
const OTHERS: u32 = 0o077;

/// Why a key file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProbeKeyError {
    /// Not there, or not readable.
    #[error("cannot read --probe-key-file {path}: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// Others than its owner may use it.
    #[error(
        "--probe-key-file {path}: mode {mode:04o} lets others at the key; set it: chmod 600 {path}"
    )]
    Open {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// Too little to be secret, or no key at all.
    #[error(
        "--probe-key-file {path}: {len} bytes, not {MIN_LEN} to {MAX_LEN}; make one: head -c 32 /dev/urandom > {path}"
    )]
    Length {
        /// The file.
        path: PathBuf,
        /// Bytes in it.
        len: u64,
    },
}

/// The key in a file, the same on all nodes of the mesh, or without one the key that everybody knows.
pub fn of_mesh(file: Option<&Path>) -> Result<SipKey, ProbeKeyError> {
    match file {
        Some(path) => derived(path),
        None => Ok(DEFAULT_KEY),
    }
}

fn derived(path: &Path) -> Result<SipKey, ProbeKeyError> {
    let unreadable = |source| ProbeKeyError::Unreadable {
        path: path.to_owned(),
        source,
    };
    let file = File::open(path).map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    let mode = metadata.permissions().mode() & 0o7777;
    if mode & OTHERS != 0 {
        return Err(ProbeKeyError::Open {
            path: path.to_owned(),
            mode,
        });
    }
    let mut secret = Vec::new();
    file.take(MAX_LEN + 1)
        .read_to_end(&mut secret)
        .map_err(unreadable)?;
    let len = secret.len() as u64;
    if secret.len() < MIN_LEN || len > MAX_LEN {
        return Err(ProbeKeyError::Length {
            path: path.to_owned(),
            len: len.max(metadata.len()),
        });
    }
    // RFC 5869 section 2.2: keys of any length and form become one of even randomness.
    let salt = hmac::Key::new(hmac::HMAC_SHA256, b"health-agent probe key");
    let tag = hmac::sign(&salt, &secret);
    let mut words = tag.as_ref().chunks_exact(8).map(|bytes| {
        bytes
            .iter()
            .rev()
            .fold(0, |word, &byte| word << 8 | u64::from(byte))
    });
    Ok([(); 2].map(|()| words.next().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};

    use super::*;

    fn key(bytes: &[u8], mode: u32) -> Result<SipKey, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        fs::write(&path, bytes).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        of_mesh(Some(&path))
            .map_err(|error| error.to_string().replace(path.to_str().unwrap(), "FILE"))
    }

    #[test]
    fn a_key_depends_on_all_of_its_file() {
        let key = |bytes: &[u8]| key(bytes, 0o600).unwrap();
        let one = key(&[7; 32]);
        assert_eq!(one, key(&[7; 32]));
        let mut other = [7; 32];
        other[31] = 8;
        for differs in [key(&other), key(&[7; 31]), DEFAULT_KEY] {
            assert!(one[0] != differs[0] && one[1] != differs[1]);
        }
        assert_eq!(of_mesh(None).unwrap(), DEFAULT_KEY);
    }

    #[test]
    fn what_is_no_secret_key_is_refused() {
        assert_eq!(
            key(&[7; 15], 0o600).unwrap_err(),
            "--probe-key-file FILE: 15 bytes, not 16 to 4096; make one: head -c 32 /dev/urandom > FILE"
        );
        assert!(key(&[7; 5000], 0o600).is_err());
        for mode in [0o640, 0o604, 0o660] {
            assert_eq!(
                key(&[7; 32], mode).unwrap_err(),
                format!(
                    "--probe-key-file FILE: mode 0{mode:o} lets others at the key; set it: chmod 600 FILE"
                )
            );
        }
        let missing = of_mesh(Some(Path::new("/nonexistent/key"))).unwrap_err();
        assert!(
            missing
                .to_string()
                .starts_with("cannot read --probe-key-file /nonexistent/key: No such file"),
            "{missing}"
        );
    }
}
