//! Clients that may only read, and clients on other machines.

use std::fs;
use std::io::{ErrorKind, Read as _, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use health_api::client::{Client, ClientError, TlsMaterial};
use health_server::certificates::Certificates;
use health_server::server::Remote;
use health_server::socket;
use health_settings::ApiSettings;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use super::common::{Agent, Fixture};
use super::{METHODS, document};

/// How long a test waits for something that must happen, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(120);
/// Pause between two looks at something.
const LOOK: Duration = Duration::from_millis(20);

/// An authority.
struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, in PEM.
struct Own {
    certificate: String,
    key: String,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new([]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        Self(CertifiedIssuer::self_signed(params, key).unwrap())
    }

    fn certify(&self, names: &[&str]) -> Own {
        self.certify_as(names, |_| {})
    }

    fn certify_as(&self, names: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Own {
        let names: Vec<_> = names.iter().map(|&name| name.to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        Own {
            certificate: params.signed_by(&key, &self.0).unwrap().pem(),
            key: key.serialize_pem(),
        }
    }
}

/// An agent that is reached in all ways, and those who may use it.
struct Bed {
    agent: Agent,
    addresses: Vec<SocketAddr>,
    files: TempDir,
    servers: Authority,
    admins: Authority,
    readers: Authority,
    runtime: Runtime,
}

impl Bed {
    fn start(change: impl FnOnce(&mut Fixture)) -> Self {
        let files = tempfile::tempdir().unwrap();
        let [servers, admins, readers] = [(); 3].map(|()| Authority::new());
        let write = |name: &str, text: &str| {
            let path = files.path().join(name);
            fs::write(&path, text).unwrap();
            Some(path)
        };
        let own = servers.certify(&["127.0.0.1", "::1"]);
        let settings = ApiSettings {
            api_certificate: write("tls.crt", &own.certificate),
            api_key: write("tls.key", &own.key),
            api_client_ca: write("admins.crt", &admins.0.pem()),
            api_client_ca_read_only: write("readers.crt", &readers.0.pem()),
            ..health_settings::Settings::default().api
        };
        let mut addresses = Vec::new();
        let agent = Agent::start_with(change, |location| {
            let any: [SocketAddr; 2] = [
                (Ipv4Addr::LOCALHOST, 0).into(),
                (Ipv6Addr::LOCALHOST, 0).into(),
            ];
            let listeners = any.map(|any| {
                let listener = std::net::TcpListener::bind(any).unwrap();
                listener.set_nonblocking(true).unwrap();
                addresses.push(listener.local_addr().unwrap());
                TcpListener::from_std(listener).unwrap()
            });
            let remote = Remote {
                listeners: listeners.into(),
                certificates: Certificates::open(&settings).unwrap().unwrap(),
            };
            let readers = socket::bind(&location.read_only_socket(), None).unwrap();
            (Some(readers), Some(remote))
        });
        Self {
            agent,
            addresses,
            files,
            servers,
            admins,
            readers,
            runtime: Runtime::new().unwrap(),
        }
    }

    /// A client that trusts `servers` and shows `own`.
    fn client(&self, servers: &Authority, own: Option<&Own>) -> Client {
        self.client_at(self.addresses[0], servers, own)
    }

    fn client_at(&self, at: SocketAddr, servers: &Authority, own: Option<&Own>) -> Client {
        let authorities = servers.0.pem();
        let material = TlsMaterial {
            authorities: authorities.as_bytes(),
            identity: own.map(|own| (own.certificate.as_bytes(), own.key.as_bytes())),
        };
        Client::over_tls(&at.ip().to_string(), at.port(), &material).unwrap()
    }

    fn ask(&self, client: &Client, method: &str, path: &str) -> Result<Value, ClientError> {
        let none = json!({});
        self.runtime.block_on(async {
            match method {
                "get" => client.get(path).await,
                "put" => client.put(path).await,
                "post" => client.post(path, &none).await,
                "patch" => client.patch(path, &none).await,
                _ => client.delete(path).await,
            }
        })
    }

    /// The error of a client that is not let in.
    fn refusal(&self, client: &Client) -> String {
        let error = self.ask(client, "get", "/v1/agent").unwrap_err();
        assert!(matches!(error, ClientError::Tls { .. }), "{error}");
        error.to_string()
    }
}

fn is_forbidden(answer: &Result<Value, ClientError>) -> bool {
    matches!(answer, Err(ClientError::Refused { code, .. }) if code.as_u16() == 403)
}

/// Every operation of the document, with its `x-access`.
fn operations(document: &Value) -> Vec<(&'static str, String, String)> {
    let mut all = Vec::new();
    for (path, operations) in document["paths"].as_object().unwrap() {
        for method in METHODS {
            if let Some(operation) = operations.get(method) {
                let access = operation["x-access"].as_str().unwrap().to_owned();
                all.push((method, path.replace("{id}", "1018"), access));
            }
        }
    }
    all
}

#[test]
fn readers_may_use_exactly_the_operations_that_only_read() {
    let bed = Bed::start(|_| {});
    let all = operations(&document(&bed.agent));
    // Other methods than GET change something, except where this is known not to be so.
    let reading: Vec<_> = all
        .iter()
        .filter(|(method, _, access)| (*method != "get") == (access == "read"))
        .map(|(method, path, _)| (*method, path.as_str()))
        .collect();
    assert_eq!(reading, [("post", "/v1/policies/trace")]);

    let own = bed.readers.certify(&["reader"]);
    for (client, other) in [
        (
            Client::new(bed.agent.dir().join("reader.sock")),
            "health.sock",
        ),
        (bed.client(&bed.servers, Some(&own)), "--api-client-ca"),
    ] {
        for (method, path, access) in &all {
            let answer = bed.ask(&client, method, path);
            assert_eq!(
                is_forbidden(&answer),
                access == "change",
                "{method} {path}: {answer:?}"
            );
            if let (true, Err(error)) = (is_forbidden(&answer), &answer) {
                let error = error.to_string();
                assert!(error.contains("may only read"), "{error}");
                assert!(error.contains(other), "{error}");
            }
        }
    }
    // Nothing has happened.
    let before = bed.ask(
        &Client::new(bed.agent.dir().join("health.sock")),
        "get",
        "/v1/endpoints",
    );
    assert_eq!(before.unwrap()[0]["settings"]["enforcement"], "default");
}

#[test]
fn who_has_a_certificate_for_everything_may_do_everything_by_both_ip_versions() {
    let bed = Bed::start(|_| {});
    let own = bed.admins.certify(&["admin"]);
    for address in &bed.addresses {
        let client = bed.client_at(*address, &bed.servers, Some(&own));
        bed.ask(&client, "get", "/v1/agent").unwrap();
        bed.ask(&client, "put", "/v1beta/status/probe").unwrap();
    }
}

#[test]
fn a_certificate_that_is_of_no_use_is_named() {
    let bed = Bed::start(|_| {});
    let own = bed.admins.certify(&["admin"]);
    let stranger = Authority::new();
    let of_stranger = stranger.certify(&["admin"]);
    let expired = bed.admins.certify_as(&["admin"], |params| {
        params.not_before = date_time_ymd(2001, 1, 1);
        params.not_after = date_time_ymd(2002, 1, 1);
    });
    for (servers, own, words) in [
        (&stranger, Some(&own), "no CA in --api-ca has signed"),
        (
            &bed.servers,
            None,
            "the agent requires a client certificate; set --api-client-certificate",
        ),
        (
            &bed.servers,
            Some(&of_stranger),
            "no CA that the agent knows has signed the client certificate",
        ),
        (
            &bed.servers,
            Some(&expired),
            "the client certificate has expired",
        ),
    ] {
        let error = bed.refusal(&bed.client(servers, own));
        assert!(error.contains(words), "{error}");
        let url = format!("https://{}", bed.addresses[0]);
        assert!(error.contains(&url), "{error}");
    }
    let authorities = bed.servers.0.pem();
    let material = TlsMaterial {
        authorities: authorities.as_bytes(),
        identity: Some((own.certificate.as_bytes(), own.key.as_bytes())),
    };
    let port = bed.addresses[0].port();
    let other_name = Client::over_tls("localhost", port, &material).unwrap();
    let error = bed.refusal(&other_name);
    assert!(error.contains("is for another host"), "{error}");
}

/// Runs the program with settings for the agent on the other machine.
fn program(bed: &Bed, own: &Own, arguments: &[&str]) -> Output {
    let file = |name: &str, text: &str| {
        let path = bed.files.path().join(name);
        fs::write(&path, text).unwrap();
        path
    };
    let mut program = Command::new(env!("CARGO_BIN_EXE_health-agent"));
    program
        .env_clear()
        .env(
            "HEALTH_AGENT_API_CA",
            file("servers.crt", &bed.servers.0.pem()),
        )
        .env("HEALTH_AGENT_API_CLIENT_KEY", file("own.key", &own.key))
        .arg("--api-client-certificate")
        .arg(file("own.crt", &own.certificate))
        .arg(format!("--api-url=https://{}", bed.addresses[1]))
        .args(arguments);
    program.output().unwrap()
}

#[test]
fn the_command_line_reaches_an_agent_on_another_machine() {
    let bed = Bed::start(|_| {});
    let reader = bed.readers.certify(&["reader"]);
    let status = program(&bed, &reader, &["status"]);
    assert_eq!(status.status.code(), Some(0), "{status:?}");
    let text = String::from_utf8(status.stdout).unwrap();
    assert!(text.contains("2/2 reachable"), "{text}");

    let probe = program(&bed, &reader, &["status", "--probe"]);
    let error = String::from_utf8(probe.stderr).unwrap();
    assert!(error.contains("may only read"), "{error}");
    assert_eq!(probe.status.code(), Some(1));

    let maps = program(&bed, &reader, &["bpf", "ct", "list"]);
    let error = String::from_utf8(maps.stderr).unwrap();
    assert!(error.contains("reads the maps of this machine"), "{error}");
    assert_eq!(maps.status.code(), Some(2));

    let socket = format!("unix:{}", bed.agent.dir().join("reader.sock").display());
    let local = Command::new(env!("CARGO_BIN_EXE_health-agent"))
        .args(["status", "--api-url", &socket])
        .env_clear()
        .output()
        .unwrap();
    assert_eq!(local.status.code(), Some(0), "{local:?}");
}

/// What the agent logs.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn certificates_follow_their_files_unless_these_are_of_no_use() {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt()
        .with_writer(move || writer.clone())
        .init();
    let bed = Bed::start(|_| {});
    let own = bed.admins.certify(&["admin"]);
    let works = |servers: &Authority, own: &Own| {
        let answer = bed.ask(&bed.client(servers, Some(own)), "get", "/v1/agent");
        answer.is_ok()
    };
    let wait_until = |what: &str, is_so: &dyn Fn() -> bool| {
        let until = Instant::now() + PATIENCE;
        while !is_so() {
            assert!(Instant::now() < until, "{what}");
            thread::sleep(LOOK);
        }
    };
    let write = |name: &str, text: &str| replace(&bed.files.path().join(name), text);

    write("tls.key", "nonsense");
    wait_until("the agent says that the key is of no use", &|| {
        let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        log.contains("the previous ones stay in force") && log.contains("tls.key")
    });
    assert!(works(&bed.servers, &own));

    let (servers, admins) = (Authority::new(), Authority::new());
    let renewed = servers.certify(&["127.0.0.1"]);
    let new_admin = admins.certify(&["admin"]);
    write("admins.crt", &admins.0.pem());
    write("tls.crt", &renewed.certificate);
    write("tls.key", &renewed.key);
    wait_until("the agent uses the new certificates", &|| {
        works(&servers, &new_admin)
    });
    assert!(!works(&bed.servers, &new_admin));
    assert!(!works(&servers, &own), "the former authority is trusted");
}

/// Replaces a file as tools that renew certificates do.
fn replace(path: &Path, text: &str) {
    let new = path.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::rename(new, path).unwrap();
}

#[test]
fn strangers_who_say_nothing_neither_block_the_socket_nor_the_port() {
    let bed = Bed::start(|_| {});
    let own = bed.admins.certify(&["admin"]);
    // Over twice as many as are served at a time.
    let silent: Vec<_> = (0..150)
        .map(|_| TcpStream::connect(bed.addresses[0]).unwrap())
        .collect();
    for mut stream in &silent[..4] {
        // The beginning of a handshake record that never ends.
        stream.write_all(&[22, 3, 1, 64, 0, 1]).unwrap();
    }
    let local = Client::new(bed.agent.dir().join("health.sock"));
    bed.ask(&local, "get", "/v1/agent").unwrap();
    let remote = bed.client(&bed.servers, Some(&own));
    bed.ask(&remote, "get", "/v1/agent").unwrap();
    // In the end, each of them is disconnected.
    for mut stream in silent {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        if let Err(error) = stream.read_to_end(&mut Vec::new()) {
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        }
    }
}
