//! The key of a mesh. With it, agents recognize each other's echo probes and authenticate both sides of `GET /hello`.

use std::ffi::OsString;
use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use health_common::probe::DEFAULT_KEY;
use health_common::siphash::SipKey;
use nix::unistd::geteuid;
use ring::hmac;

use super::proof::{HelloKeys, KeyAge, PUBLIC_SECRET};

/// Minimum length of a key in bytes: as long as the key derived from it.
const MIN_LEN: usize = 16;
/// Maximum length of a key in bytes: anything longer is some other file.
const MAX_LEN: u64 = 4096;
/// Labels for key derivation.
const PROBE_LABEL: &[u8] = b"health-agent probe key";
const DIRECT_LABEL: &[u8] = b"health-agent direct return key";
/// Permission bits of group and others.
const OTHERS: u32 = 0o077;
/// Suffixes of the key file's name for the previous and the next key.
const SUFFIXES: [(KeyAge, &str); 2] = [(KeyAge::Previous, ".previous"), (KeyAge::Next, ".next")];

/// The keys of a mesh.
#[derive(Clone)]
pub struct MeshKeys {
    /// Key for the tags of echo probes.
    pub probe: SipKey,
    /// Keys for the tags of packets forwarded to a backend that answers the client directly; the signing key comes
    /// first. Publicly known keys are left out.
    pub direct: Vec<SipKey>,
    /// Keys for `GET /hello`.
    pub hello: Arc<HelloKeys>,
}

impl fmt::Debug for MeshKeys {
    /// Shows no keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MeshKeys").finish_non_exhaustive()
    }
}

impl Default for MeshKeys {
    /// The publicly known keys.
    fn default() -> Self {
        Self {
            probe: DEFAULT_KEY,
            direct: Vec::new(),
            hello: Arc::default(),
        }
    }
}

/// Why a key file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MeshKeyError {
    /// Missing or not readable.
    #[error("cannot read --mesh-key-file {path}: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A folder, a pipe or a device.
    #[error("--mesh-key-file {path}: not a regular file")]
    NotAFile {
        /// The file.
        path: PathBuf,
    },
    /// Another user can change it.
    #[error(
        "--mesh-key-file {path}: owned by user {owner}; expected root or the agent's own user; run: chown root {path}"
    )]
    Owner {
        /// The file.
        path: PathBuf,
        /// User ID of its owner.
        owner: u32,
    },
    /// Users other than its owner may access it.
    #[error(
        "--mesh-key-file {path}: mode {mode:04o} lets other users access the key; run: chmod 600 {path}"
    )]
    Open {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// Too short to be secret, or not a key at all.
    #[error(
        "--mesh-key-file {path}: {len} bytes; expected {MIN_LEN} to {MAX_LEN}; copy the mesh's key there, or create one for a new mesh: \
         head -c 32 /dev/urandom"
    )]
    Length {
        /// The file.
        path: PathBuf,
        /// Bytes in it.
        len: u64,
    },
    /// Both a previous and a next key.
    #[error(
        "--mesh-key-file: both {previous} and {next} exist, but only two keys can be in force; remove one of them"
    )]
    Three {
        /// The file of the previous key.
        previous: PathBuf,
        /// The file of the next key.
        next: PathBuf,
    },
}

/// Loads the keys from a file and from the file next to it that ends with `.previous` or `.next`. They are the same on
/// all nodes of the mesh. Without a file, returns the publicly known keys.
pub fn of_mesh(file: Option<&Path>) -> Result<MeshKeys, MeshKeyError> {
    let Some(path) = file else {
        return Ok(MeshKeys::default());
    };
    let current = read(path)?;
    let beside = SUFFIXES.map(|(age, suffix)| {
        let mut name = OsString::from(path);
        name.push(suffix);
        (age, PathBuf::from(name))
    });
    // If this cannot tell whether the file exists, reading it reports the error.
    let is_there = |(_, path): &&(KeyAge, PathBuf)| !matches!(path.symlink_metadata(), Err(error) if error.kind() == io::ErrorKind::NotFound);
    let other = match beside.iter().filter(is_there).collect::<Vec<_>>()[..] {
        [] => None,
        [(age, path)] => Some((*age, read(path)?)),
        _ => {
            let [(_, previous), (_, next)] = beside;
            return Err(MeshKeyError::Three { previous, next });
        }
    };
    let other = other.as_ref().map(|(age, secret)| (*age, &secret[..]));
    let hello = HelloKeys::new(&current, other);
    // Nodes with the public key in a file belong to the same mesh as nodes without a file.
    let probe = if hello.is_public() {
        DEFAULT_KEY
    } else {
        sip_key(PROBE_LABEL, &current)
    };
    let secret = |(_, secret): (KeyAge, &[u8])| secret.to_vec();
    let secrets = [Some(current.clone()), other.map(secret)];
    let secrets = secrets.into_iter().flatten();
    let secrets = secrets.filter(|secret| secret != PUBLIC_SECRET);
    Ok(MeshKeys {
        probe,
        direct: secrets
            .map(|secret| sip_key(DIRECT_LABEL, &secret))
            .collect(),
        hello: Arc::new(hello),
    })
}

/// Reads the secret from a file.
fn read(path: &Path) -> Result<Vec<u8>, MeshKeyError> {
    let unreadable = |source| MeshKeyError::Unreadable {
        path: path.to_owned(),
        source,
    };
    // Otherwise a pipe would make the agent wait for a writer.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    if !metadata.is_file() {
        return Err(MeshKeyError::NotAFile {
            path: path.to_owned(),
        });
    }
    let owner = metadata.uid();
    if owner != 0 && owner != geteuid().as_raw() {
        return Err(MeshKeyError::Owner {
            path: path.to_owned(),
            owner,
        });
    }
    let mode = metadata.permissions().mode() & 0o7777;
    if mode & OTHERS != 0 {
        return Err(MeshKeyError::Open {
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
        return Err(MeshKeyError::Length {
            path: path.to_owned(),
            len: len.max(metadata.len()),
        });
    }
    // Text files end with a newline.
    if secret.trim_ascii_end() == PUBLIC_SECRET {
        secret.truncate(PUBLIC_SECRET.len());
    }
    Ok(secret)
}

/// Derives the key for the label's purpose.
fn sip_key(label: &[u8], secret: &[u8]) -> SipKey {
    // RFC 5869 section 2.2: turns keys of any length and form into uniformly random ones.
    let salt = hmac::Key::new(hmac::HMAC_SHA256, label);
    let tag = hmac::sign(&salt, secret);
    let mut words = tag.as_ref().chunks_exact(8).map(|bytes| {
        bytes
            .iter()
            .rev()
            .fold(0, |word, &byte| word << 8 | u64::from(byte))
    });
    [(); 2].map(|()| words.next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::chown;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    fn key(bytes: &[u8], mode: u32) -> Result<SipKey, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        fs::write(&path, bytes).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        of_mesh(Some(&path))
            .map(|keys| keys.probe)
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
        // In a file, the public key is the same as that of nodes without a file.
        assert_eq!(key(b"health-agent-key"), DEFAULT_KEY);
        assert_eq!(key(b"health-agent-key\n"), DEFAULT_KEY);
        let public = of_mesh(None).unwrap();
        assert_eq!(public.probe, DEFAULT_KEY);
        assert!(public.hello.is_public());
    }

    #[test]
    fn a_second_key_is_that_of_the_file_beside() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let write = |name: &str, mode| {
            fs::write(path(name), [7; 32]).unwrap();
            fs::set_permissions(path(name), Permissions::from_mode(mode)).unwrap();
        };
        let other = || of_mesh(Some(&path("key"))).map(|keys| keys.hello.other());
        write("key", 0o600);
        assert_eq!(other().unwrap(), None);
        write("key.next", 0o400);
        assert_eq!(other().unwrap(), Some(KeyAge::Next));
        write("key.previous", 0o600);
        let error = other().unwrap_err().to_string();
        assert!(error.contains("two keys can be in force"), "{error}");
        fs::remove_file(path("key.next")).unwrap();
        assert_eq!(other().unwrap(), Some(KeyAge::Previous));
        write("key.previous", 0o644);
        let error = other().unwrap_err().to_string();
        assert!(error.contains("key.previous: mode 0644"), "{error}");
        fs::set_permissions(path("key.previous"), Permissions::from_mode(0o600)).unwrap();
        let is_public = || {
            let keys = of_mesh(Some(&path("key"))).unwrap().hello;
            [
                keys.is_public(),
                keys.other_is_public(),
                keys.accepts_public(),
            ]
        };
        assert_eq!(is_public(), [false; 3]);
        fs::write(path("key.previous"), PUBLIC_SECRET).unwrap();
        assert_eq!(is_public(), [false, true, true]);
    }

    #[test]
    fn packets_are_known_by_keys_that_are_nobody_elses() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| {
            let path = dir.path().join(name);
            fs::write(&path, bytes).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        };
        let keys = || of_mesh(Some(&dir.path().join("key"))).unwrap();
        assert!(of_mesh(None).unwrap().direct.is_empty());
        write("key", PUBLIC_SECRET);
        assert!(keys().direct.is_empty());
        write("key.next", &[2; 32]);
        let next = keys().direct;
        assert_eq!(next.len(), 1);
        write("key", &[1; 32]);
        let [first, second] = keys().direct[..] else {
            panic!("two keys");
        };
        assert_ne!(first, keys().probe);
        assert_eq!([second], next[..]);
        fs::remove_file(dir.path().join("key.next")).unwrap();
        assert_eq!(keys().direct, [first]);
    }

    #[test]
    fn what_is_no_secret_key_is_refused() {
        assert_eq!(
            key(&[7; 15], 0o600).unwrap_err(),
            "--mesh-key-file FILE: 15 bytes; expected 16 to 4096; copy the mesh's key there, or create one for a new \
             mesh: head -c 32 /dev/urandom"
        );
        assert!(key(&[7; 5000], 0o600).is_err());
        for mode in [0o640, 0o604, 0o660] {
            assert_eq!(
                key(&[7; 32], mode).unwrap_err(),
                format!(
                    "--mesh-key-file FILE: mode 0{mode:o} lets other users access the key; run: chmod 600 FILE"
                )
            );
        }
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        mkfifo(&pipe, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
        for no_file in [pipe.as_path(), dir.path()] {
            let error = of_mesh(Some(no_file)).unwrap_err();
            assert!(matches!(error, MeshKeyError::NotAFile { .. }), "{error}");
        }
        if geteuid().is_root() {
            let path = dir.path().join("key");
            fs::write(&path, [7; 32]).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
            chown(&path, Some(65534), None).unwrap();
            let error = of_mesh(Some(&path)).unwrap_err();
            assert!(
                matches!(error, MeshKeyError::Owner { owner: 65534, .. }),
                "{error}"
            );
        }
        let missing = of_mesh(Some(Path::new("/nonexistent/key"))).unwrap_err();
        assert!(
            missing
                .to_string()
                .starts_with("cannot read --mesh-key-file /nonexistent/key: No such file"),
            "{missing}"
        );
    }
}
