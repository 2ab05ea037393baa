//! OpenSSL servers that insist on features that Go accepts and newer libraries lack.

use std::path::Path;
use std::process::Stdio;

use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use super::*;

/// An HTTPS server. Dropping it stops it.
struct Openssl {
    address: SocketAddr,
    _child: Child,
    _folder: TempDir,
}

/// Creates a key, and a self-signed certificate.
async fn certify(folder: &Path, key: &str) {
    let mut command = Command::new("openssl");
    command.args("req -x509 -nodes -keyout key.pem -out cert.pem -subj /CN=web -days 2".split(' '));
    let made = command.args(key.split(' ')).current_dir(folder).output();
    let made = made.await.expect("openssl");
    let said = String::from_utf8_lossy(&made.stderr).into_owned();
    assert!(made.status.success(), "{said}");
}

impl Openssl {
    /// Starts a server with a key made with flags of `openssl req`, and with flags of `openssl s_server`.
    async fn start(key: &str, flags: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        certify(folder.path(), key).await;
        let mut command = Command::new("openssl");
        command
            .args("s_server -accept 127.0.0.1:0 -www -key key.pem -cert cert.pem".split(' '))
            .args(flags.split(' '))
            .current_dir(folder.path())
            .kill_on_drop(true)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .stdout(Stdio::piped());
        let mut child = command.spawn().expect("openssl");
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let address = loop {
            let line = lines.next_line().await.unwrap();
            let line = line.expect("openssl takes these flags");
            if let Some(address) = line.strip_prefix("ACCEPT ") {
                break address.parse().unwrap();
            }
        };
        Self {
            address,
            _child: child,
            _folder: folder,
        }
    }
}

const RSA: &str = "-newkey rsa:2048";
const P256: &str = "-newkey ec -pkeyopt ec_paramgen_curve:P-256";
const P521: &str = "-newkey ec -pkeyopt ec_paramgen_curve:P-521";

#[tokio::test]
async fn whatever_go_accepts_is_accepted() {
    for (key, flags) in [
        (P521, "-tls1_2"),
        (P521, "-tls1_3"),
        (RSA, "-tls1_2 -groups P-521"),
        (RSA, "-tls1_3 -groups P-521"),
        (P521, "-tls1_2 -groups P-521"),
        (P521, "-tls1_3 -groups P-521"),
        (RSA, "-tls1_2 -cipher ECDHE-RSA-AES128-SHA"),
        (RSA, "-tls1_2 -cipher ECDHE-RSA-AES256-SHA"),
        (P256, "-tls1_2 -cipher ECDHE-ECDSA-AES128-SHA"),
        (P256, "-tls1_2 -cipher ECDHE-ECDSA-AES256-SHA"),
        (P521, "-tls1_2 -groups P-521 -cipher ECDHE-ECDSA-AES256-SHA"),
        (RSA, "-tls1_2 -cipher ALL:@SECLEVEL=0 -sigalgs RSA+SHA1"),
        (P256, "-tls1_2 -cipher ALL:@SECLEVEL=0 -sigalgs ECDSA+SHA1"),
        (
            RSA,
            "-tls1_2 -cipher ECDHE-RSA-AES128-SHA:@SECLEVEL=0 -sigalgs RSA+SHA1",
        ),
        ("-newkey rsa:1024", "-tls1_2 -cipher ALL:@SECLEVEL=0"),
        ("-newkey ed25519", "-tls1_3"),
        (RSA, "-tls1_3"),
    ] {
        let server = Openssl::start(key, flags).await;
        let outcome = ask(server.address, &TlsSettings::default()).await;
        let case = format!("{key} {flags}: {outcome:?}");
        assert_eq!(outcome.result, RawResult::Success, "{case}");
        assert_eq!(outcome.message, "HTTP status 200", "{case}");
    }
}

#[tokio::test]
async fn a_probe_that_verifies_has_no_old_suites() {
    let server = Openssl::start(RSA, "-tls1_2 -cipher ECDHE-RSA-AES128-SHA").await;
    let settings = TlsSettings {
        authorities: Some(Authority::new().pem()),
        ..TlsSettings::default()
    };
    let outcome = ask(server.address, &settings).await;
    assert_eq!(outcome.result, RawResult::Failure, "{outcome:?}");
    assert!(outcome.message.starts_with("no TLS with "), "{outcome:?}");
}

#[tokio::test]
async fn what_go_refuses_is_refused() {
    for (key, flags) in [
        (RSA, "-tls1_1 -cipher ALL:@SECLEVEL=0"),
        (RSA, "-tls1_2 -cipher AES128-GCM-SHA256"),
        (RSA, "-tls1_2 -cipher ECDHE-RSA-AES128-SHA256"),
        (RSA, "-tls1_2 -cipher DHE-RSA-AES128-GCM-SHA256"),
    ] {
        let server = Openssl::start(key, flags).await;
        let outcome = ask(server.address, &TlsSettings::default()).await;
        let case = format!("{key} {flags}: {outcome:?}");
        assert_eq!(outcome.result, RawResult::Failure, "{case}");
        assert!(outcome.message.starts_with("no TLS with "), "{case}");
    }
}
