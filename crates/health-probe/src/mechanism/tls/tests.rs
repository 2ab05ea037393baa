use std::net::SocketAddr;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::server::WebPkiClientVerifier;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::TlsAcceptor;

use super::super::http::{self, HttpProbe, Scheme};
use super::super::testing::{Server, patience, target};
use super::*;
use crate::{Outcome, RawResult};

mod openssl;

/// An authority, and a certificate that it issued for a name.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

struct Certificate {
    der: CertificateDer<'static>,
    pem: String,
    key: KeyPair,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new([]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let issuer = CertifiedIssuer::self_signed(params, key).unwrap();
        Self { issuer }
    }

    fn pem(&self) -> Vec<u8> {
        self.issuer.pem().into_bytes()
    }

    fn certify(&self, name: &str) -> Certificate {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new([name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        Certificate {
            der: certificate.der().clone(),
            pem: certificate.pem(),
            key,
        }
    }
}

fn acceptor(certificate: &Certificate, clients: Option<&Authority>) -> TlsAcceptor {
    let builder = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap();
    let builder = match clients {
        None => builder.with_no_client_auth(),
        Some(clients) => {
            let roots = Arc::new(authorities(&clients.pem()).unwrap());
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider());
            builder.with_client_cert_verifier(verifier.build().unwrap())
        }
    };
    let key = PrivatePkcs8KeyDer::from(certificate.key.serialize_der());
    let config = builder
        .with_single_cert(vec![certificate.der.clone()], key.into())
        .unwrap();
    TlsAcceptor::from(Arc::new(config))
}

/// An HTTPS server that responds with 200 after any handshake. Reports whether the connection ended properly.
async fn serve(
    certificate: &Certificate,
    clients: Option<&Authority>,
) -> (Server, tokio::sync::mpsc::UnboundedReceiver<bool>) {
    let acceptor = acceptor(certificate, clients);
    let (sender, received) = tokio::sync::mpsc::unbounded_channel();
    let server = Server::new(move |stream| {
        let (acceptor, sender) = (acceptor.clone(), sender.clone());
        async move {
            let Ok(mut stream) = acceptor.accept(stream).await else {
                return;
            };
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                if !matches!(stream.read_buf(&mut head).await, Ok(1..)) {
                    return;
                }
            }
            let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
            let _ = stream.write_all(answer).await;
            // An end without a close notification is an error.
            let _ = sender.send(matches!(stream.read(&mut [0; 16]).await, Ok(0)));
        }
    })
    .await;
    (server, received)
}

async fn ask(address: SocketAddr, settings: &TlsSettings) -> Outcome {
    let probe = HttpProbe {
        target: target(address),
        scheme: Scheme::Https,
        path: "/".to_owned(),
        headers: Vec::new(),
        tls: TlsClient::new(settings).unwrap(),
    };
    http::probe(&probe, patience()).await
}

#[tokio::test]
async fn certificates_are_not_verified_unless_asked_for() {
    let authority = Authority::new();
    let (server, mut received) = serve(&authority.certify("web"), None).await;
    let outcome = ask(server.address, &TlsSettings::default()).await;
    assert_eq!(outcome.result, RawResult::Success, "{outcome:?}");
    assert_eq!(
        received.recv().await,
        Some(true),
        "the end was not announced"
    );

    let mut settings = TlsSettings {
        authorities: Some(authority.pem()),
        server_name: Some("web".to_owned()),
        ..Default::default()
    };
    let outcome = ask(server.address, &settings).await;
    assert_eq!(outcome.result, RawResult::Success, "{outcome:?}");
    // The certificate is for a name, not for the address.
    for name in [None, Some("other".to_owned())] {
        settings.server_name = name;
        let outcome = ask(server.address, &settings).await;
        assert_eq!(
            (outcome.result, outcome.errored),
            (RawResult::Failure, false)
        );
        assert!(outcome.message.contains("certificate"), "{outcome:?}");
    }
    // The name now matches, but another authority issued the certificate.
    settings.server_name = Some("web".to_owned());
    settings.authorities = Some(Authority::new().pem());
    let outcome = ask(server.address, &settings).await;
    assert_eq!(outcome.result, RawResult::Failure);
    assert!(outcome.message.contains("certificate"), "{outcome:?}");
}

#[tokio::test]
async fn a_certificate_is_shown_to_servers_that_ask_for_one() {
    let authority = Authority::new();
    let (server, _told) = serve(&authority.certify("web"), Some(&authority)).await;
    let outcome = ask(server.address, &TlsSettings::default()).await;
    assert_eq!(
        (outcome.result, outcome.errored),
        (RawResult::Failure, false)
    );
    let own = authority.certify("prober");
    let settings = TlsSettings {
        identity: Some(TlsIdentity {
            certificates: own.pem.into_bytes(),
            key: own.key.serialize_pem().into_bytes(),
        }),
        ..Default::default()
    };
    let outcome = ask(server.address, &settings).await;
    assert_eq!(outcome.result, RawResult::Success, "{outcome:?}");
}

#[tokio::test]
async fn a_body_may_end_with_the_connection_alone() {
    for (length, errored) in [("", false), ("Content-Length: 9\r\n", true)] {
        let acceptor = acceptor(&Authority::new().certify("web"), None);
        let server = Server::new(move |stream| {
            let acceptor = acceptor.clone();
            async move {
                let Ok(mut stream) = acceptor.accept(stream).await else {
                    return;
                };
                let _ = stream.read(&mut [0; 4096]).await;
                let answer = format!("HTTP/1.1 200 OK\r\n{length}\r\nwell");
                let _ = stream.write_all(answer.as_bytes()).await;
                // The stream is dropped without a TLS close.
            }
        })
        .await;
        let outcome = ask(server.address, &TlsSettings::default()).await;
        assert_eq!(outcome.errored, errored, "{outcome:?}");
        assert_eq!(outcome.result == RawResult::Success, !errored);
    }
}

#[test]
fn settings_that_are_of_no_use_are_refused() {
    let authority = Authority::new();
    let own = authority.certify("prober");
    let refused = |settings: TlsSettings| TlsClient::new(&settings).unwrap_err().to_string();
    let authorities = |pem: &[u8]| TlsSettings {
        authorities: Some(pem.to_vec()),
        ..Default::default()
    };
    assert_eq!(refused(authorities(b"x")), "no CA certificate found");
    let name = TlsSettings {
        server_name: Some("not a name".to_owned()),
        ..Default::default()
    };
    assert_eq!(refused(name), "invalid server name \"not a name\"");
    let identity = |certificates: &str, key: &str| TlsSettings {
        identity: Some(TlsIdentity {
            certificates: certificates.as_bytes().to_vec(),
            key: key.as_bytes().to_vec(),
        }),
        ..Default::default()
    };
    let key = own.key.serialize_pem();
    assert!(refused(identity(&own.pem, "x")).starts_with("cannot read the client key"));
    assert!(refused(identity("", &key)).starts_with("cannot use the client certificate"));
    let other = authority.certify("other").key.serialize_pem();
    assert!(refused(identity(&own.pem, &other)).starts_with("cannot use the client certificate"));
    // The key is not printed.
    assert!(!format!("{:?}", identity(&own.pem, &key)).contains("key"));
}
