//! Probes of real servers: nginx, and servers in other network namespaces.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use health_net::netns::{self, NetNs};
use health_probe::mechanism::grpc::{self, GrpcProbe};
use health_probe::mechanism::http::{self, HttpProbe, Scheme};
use health_probe::mechanism::tls::{TlsClient, TlsSettings};
use health_probe::mechanism::{Deadline, Host, OUTPUT_LIMIT, Target, tcp};
use health_probe::{Outcome, RawResult};
use tempfile::TempDir;
use tests::bed::Authority;
use tests::process::{Running, run};
use tests::{PATIENCE, wait_for};

const PORT: u16 = 8080;
const TLS_PORT: u16 = 8443;
/// Timeout where no answer is expected.
const SHORT: Duration = Duration::from_millis(300);

/// A private nginx for the test.
struct Nginx {
    _server: Running,
    authority: Authority,
    _dir: TempDir,
}

impl Nginx {
    fn start() -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let authority = Authority::new("probe test")?;
        let certificate = authority.sign(&["web.test", "127.0.0.1"])?;
        let file = |name: &str| dir.path().join(name);
        fs::write(file("certificate.pem"), certificate.certificate)?;
        fs::write(file("key.pem"), certificate.key)?;
        fs::create_dir(file("html"))?;
        fs::write(file("html/large"), vec![b'x'; OUTPUT_LIMIT + 1])?;
        fs::write(file("html/well"), "well")?;
        fs::write(file("nginx.conf"), configuration(&dir.path().display()))?;
        let mut server = Command::new("setpriv");
        // nginx must not outlive the test.
        server
            .args(["--pdeathsig", "KILL", "nginx", "-c"])
            .arg(file("nginx.conf"));
        let nginx = Self {
            _server: Running::start(&mut server)?,
            authority,
            _dir: dir,
        };
        wait_for("nginx to serve", PATIENCE, || {
            std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, TLS_PORT))?;
            Ok(Some(()))
        })?;
        Ok(nginx)
    }

    /// Lines in the access log for this path.
    fn log(&self, path: &str) -> anyhow::Result<Vec<String>> {
        let log = fs::read_to_string(self._dir.path().join("access.log"))?;
        let asked = format!(" {path} ");
        Ok(log
            .lines()
            .filter(|line| line.contains(&asked))
            .map(str::to_owned)
            .collect())
    }

    fn errors(&self) -> anyhow::Result<String> {
        Ok(fs::read_to_string(self._dir.path().join("error.log"))?)
    }
}

fn configuration(dir: &impl std::fmt::Display) -> String {
    format!(
        r#"
daemon off; master_process off; user root;
pid {dir}/pid; error_log {dir}/error.log info;
events {{}}
http {{
  log_format probes '$status $uri "$host" "$http_user_agent" "$http_accept" "$http_connection"';
  access_log {dir}/access.log probes;
  client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy; fastcgi_temp_path {dir}/fastcgi;
  uwsgi_temp_path {dir}/uwsgi; scgi_temp_path {dir}/scgi;
  server {{
    listen {PORT}; listen [::]:{PORT}; listen {TLS_PORT} ssl;
    ssl_certificate {dir}/certificate.pem; ssl_certificate_key {dir}/key.pem;
    root {dir}/html;
    location /bad {{ return 503 "secret"; }}
    location /to-good {{ return 301 /well; }}
    location /to-bad {{ return 307 /bad; }}
    location /away {{ return 302 http://elsewhere.test/; }}
    location /loop {{ return 308 /loop; }}
    location /to-tls {{ return 302 https://127.0.0.1:{TLS_PORT}/well; }}
  }}
}}
"#
    )
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?)
}

fn target(host: &str, port: u16) -> Target {
    let Ok(host) = host.parse::<Host>();
    Target {
        host,
        port,
        asker: "test".into(),
        netns: None,
    }
}

fn probe(target: Target, path: &str) -> HttpProbe {
    HttpProbe {
        target,
        scheme: Scheme::Http,
        path: path.to_owned(),
        headers: Vec::new(),
        tls: TlsClient::default(),
    }
}

#[test]
#[ignore = "needs root"]
fn h2_h3_h5_h6_h8_h9_h12_nginx_is_probed() -> anyhow::Result<()> {
    let nginx = Nginx::start()?;
    let runtime = runtime()?;
    let ask = |probe: &HttpProbe| runtime.block_on(http::probe(probe, Deadline::after(PATIENCE)));
    for (path, result, message) in [
        ("/well", RawResult::Success, "HTTP status 200"),
        ("/large", RawResult::Success, "HTTP status 200"),
        ("/none", RawResult::Failure, "HTTP status 404"),
        ("/bad", RawResult::Failure, "HTTP status 503"),
        ("/to-good", RawResult::Success, "HTTP status 200"),
        ("/to-bad", RawResult::Failure, "HTTP status 503"),
        ("/to-tls", RawResult::Success, "HTTP status 200"),
        (
            "/away",
            RawResult::Warning,
            "HTTP status 302: a redirect that was not followed",
        ),
        ("/loop", RawResult::Failure, "stopped after 10 redirects"),
    ] {
        for host in ["127.0.0.1", "::1"] {
            if (path, host) == ("/to-tls", "::1") {
                // The redirect leads to a different host.
                continue;
            }
            let outcome = ask(&probe(target(host, PORT), path));
            let expected = Outcome {
                result,
                message: message.to_owned(),
                errored: false,
            };
            assert_eq!(outcome, expected, "{path} of {host}");
        }
    }
    let mut own = probe(target("127.0.0.1", PORT), "/well?own");
    own.headers = [
        ("Host", "muffins.test"),
        ("User-Agent", "foo/1.0"),
        ("Accept", ""),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .to_vec();
    assert_eq!(ask(&own).result, RawResult::Success);
    let first = r#"200 /well "127.0.0.1" "kube-probe/1.35" "*/*" "close""#;
    let last = r#"200 /well "muffins.test" "foo/1.0" "-" "close""#;
    // nginx logs a request after the client has its answer.
    let log = wait_for("nginx to log the last request", PATIENCE, || {
        let log = nginx.log("/well")?;
        Ok(log.iter().any(|line| line == last).then_some(log))
    })?;
    assert_eq!(log.first().context("no requests")?, first);
    wait_for("nginx to log each round of a loop", PATIENCE, || {
        let rounds = nginx.log("/loop")?.len();
        anyhow::ensure!(rounds <= 20, "{rounds} rounds");
        Ok((rounds == 20).then_some(()))
    })?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn nginx_is_probed_by_https() -> anyhow::Result<()> {
    let nginx = Nginx::start()?;
    let runtime = runtime()?;
    let ask = |settings: &TlsSettings| {
        let probe = HttpProbe {
            scheme: Scheme::Https,
            tls: TlsClient::new(settings)?,
            ..probe(target("127.0.0.1", TLS_PORT), "/well")
        };
        let outcome = runtime.block_on(http::probe(&probe, Deadline::after(PATIENCE)));
        anyhow::Ok(outcome.result)
    };
    assert_eq!(ask(&TlsSettings::default())?, RawResult::Success);
    let mut settings = TlsSettings {
        authorities: Some(nginx.authority.pem().as_bytes().to_vec()),
        ..Default::default()
    };
    assert_eq!(ask(&settings)?, RawResult::Success);
    settings.server_name = Some("web.test".to_owned());
    assert_eq!(ask(&settings)?, RawResult::Success);
    settings.server_name = Some("other.test".to_owned());
    assert_eq!(ask(&settings)?, RawResult::Failure);
    settings.authorities = Some(Authority::new("other")?.pem().as_bytes().to_vec());
    assert_eq!(ask(&settings)?, RawResult::Failure);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn g2_nginx_is_no_grpc_server() -> anyhow::Result<()> {
    let _nginx = Nginx::start()?;
    for (port, tls) in [(PORT, None), (TLS_PORT, Some(TlsClient::default()))] {
        let probe = GrpcProbe {
            target: target("127.0.0.1", port),
            service: String::new(),
            tls,
        };
        let outcome = runtime()?.block_on(grpc::probe(&probe, Deadline::after(PATIENCE)));
        assert_eq!(
            (outcome.result, outcome.errored),
            (RawResult::Failure, false)
        );
        let start = format!("failed to connect service \"127.0.0.1:{port}\"");
        assert!(outcome.message.starts_with(&start), "{outcome:?}");
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn probes_leave_no_time_wait_and_no_complaint() -> anyhow::Result<()> {
    const PROBES: usize = 2000;
    let nginx = Nginx::start()?;
    let runtime = runtime()?;
    let left_after = |what: &str| -> anyhow::Result<()> {
        let listed = run(Command::new("ss").args(["-Htan", "state", "time-wait"]))?.success()?;
        let left = listed.lines().count();
        println!("in TIME_WAIT after {PROBES} probes by {what}: {left}");
        assert!(
            left <= PROBES / 100,
            "{left} connections are in TIME_WAIT after {what}"
        );
        Ok(())
    };
    for (scheme, port) in [(Scheme::Http, PORT), (Scheme::Https, TLS_PORT)] {
        let probe = HttpProbe {
            scheme,
            ..probe(target("127.0.0.1", port), "/well")
        };
        for _ in 0..PROBES {
            let outcome = runtime.block_on(http::probe(&probe, Deadline::after(PATIENCE)));
            assert_eq!(outcome.result, RawResult::Success, "{outcome:?}");
        }
        left_after(&format!("{scheme:?}"))?;
    }
    for _ in 0..PROBES {
        let target = target("127.0.0.1", PORT);
        let outcome = runtime.block_on(tcp::probe(&target, Deadline::after(PATIENCE)));
        assert_eq!(outcome.result, RawResult::Success, "{outcome:?}");
    }
    left_after("TCP")?;
    // nginx logs connections that end with an error.
    let errors = nginx.errors()?;
    let complaints: Vec<_> = errors
        .lines()
        .filter(|line| line.contains("failed"))
        .collect();
    assert!(
        complaints.is_empty(),
        "{} complaints: {:?}",
        complaints.len(),
        complaints.first()
    );
    Ok(())
}

/// A network namespace that is removed on drop.
struct Pod(Arc<NetNs>);

impl Pod {
    fn new(name: &str) -> anyhow::Result<Self> {
        // Removes a leftover of a killed test.
        netns::remove(name)?;
        let pod = Self(Arc::new(NetNs::create(name)?));
        run(Command::new("ip").args(["-netns", name, "link", "set", "lo", "up"]))?.success()?;
        Ok(pod)
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        let name = self.0.path().file_name().and_then(|name| name.to_str());
        if let Some(name) = name {
            let _ = netns::remove(name);
        }
    }
}

#[test]
#[ignore = "needs root"]
fn probes_start_inside_a_network_namespace() -> anyhow::Result<()> {
    let pod = Pod::new("hprobe1")?;
    let listener = pod
        .0
        .run_in(|| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))??;
    let SocketAddr::V4(address) = listener.local_addr()? else {
        anyhow::bail!("it is no IPv4 address")
    };
    let mut target = target("127.0.0.1", address.port());
    let runtime = runtime()?;
    let ask = |target: &Target| runtime.block_on(tcp::probe(target, Deadline::after(PATIENCE)));
    assert_eq!(ask(&target).result, RawResult::Failure);
    target.netns = Some(pod.0.clone());
    assert_eq!(ask(&target).result, RawResult::Success);
    // The listener does not read.
    let asked = probe(target, "/");
    let outcome = runtime.block_on(http::probe(&asked, Deadline::after(SHORT)));
    assert!(
        outcome.message.starts_with("timeout: no answer"),
        "{outcome:?}"
    );
    Ok(())
}
