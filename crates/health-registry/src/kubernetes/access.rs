//! Access to an API server: the credentials and the kind of connection.

use std::error::Error as StdError;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::StreamExt as _;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{
    BodyExt as _, BodyStream, Either, Full, LengthLimitError, Limited, StreamBody,
};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::{Request, Response};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::Client;
use kube::client::{Body, ConfigExt as _};
use kube::config::{Config, InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use tokio::sync::watch;
use tower::{BoxError, ServiceBuilder, service_fn};

/// Time limit for a connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Time limit for a response. It covers the whole response, except for a watch, where it only covers the headers.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of a response or of one event of a watch in bytes: enough for a page of very large objects.
const MAX_ANSWER: usize = 32 << 20;
/// TCP keepalive: an idle connection is probed after this time...
const KEEPALIVE_TIME: Duration = Duration::from_secs(10);
/// ...this often...
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(3);
/// ...and counts as dead after this many unanswered probes, 19 s in all. A watch can be silent for a minute, so nothing
/// else would reveal that the server's host is gone.
const KEEPALIVE_RETRIES: u32 = 3;

/// Why there are no usable credentials.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The named file cannot be used.
    #[error("cannot use kubeconfig {path}: {source}")]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// The problem with the file.
        source: KubeconfigError,
    },
    /// No cluster is configured.
    #[error(
        "no Kubernetes cluster is configured: not in a pod ({in_cluster}), and {environment}; name a \
         kubeconfig with --registry kubernetes:PATH, --pods-from-kubernetes=PATH, --services-from-kubernetes=PATH or \
         --policies-from-kubernetes=PATH"
    )]
    NoCluster {
        /// Why the pod's own cluster cannot be used.
        in_cluster: InClusterError,
        /// Why the environment's kubeconfig cannot be used.
        environment: KubeconfigError,
    },
    /// The credentials cannot be used.
    #[error("cannot use the credentials for {server}: {source}")]
    Credentials {
        /// The API server's URL.
        server: String,
        /// The problem with the credentials.
        source: Box<kube::Error>,
    },
}

/// The source of credentials, which is read each time a client is created.
#[derive(Clone, Debug)]
pub(crate) enum Access {
    /// The file at a path.
    Kubeconfig(PathBuf),
    /// The service account of this process's pod.
    Pod,
    /// `KUBECONFIG`, or `~/.kube/config`.
    Environment,
}

impl Access {
    /// Returns the file if one is named, else the service account, else the environment's kubeconfig.
    pub(crate) fn find(kubeconfig: Option<&Path>) -> Result<Self, AccessError> {
        if let Some(path) = kubeconfig {
            read_kubeconfig(path)?;
            return Ok(Self::Kubeconfig(path.to_owned()));
        }
        let Err(in_cluster) = Config::incluster() else {
            return Ok(Self::Pod);
        };
        match Kubeconfig::read() {
            Ok(_) => Ok(Self::Environment),
            Err(environment) => Err(AccessError::NoCluster {
                in_cluster,
                environment,
            }),
        }
    }

    /// Reads the credentials and creates a client with them. Sends to `watched` each time the server accepts a watch,
    /// which the event stream does not show before the first event: the revision that the watch begins with, if it names
    /// one.
    pub(crate) async fn client(
        &self,
        watched: watch::Sender<Option<u64>>,
    ) -> Result<Client, AccessError> {
        let config = self.config().await?;
        if config.proxy_url.is_some() {
            tracing::warn!(
                server = %config.cluster_url,
                "proxies are not supported; connecting to the API server directly"
            );
        }
        let server = config.cluster_url.to_string();
        connect(config, watched).map_err(|source| AccessError::Credentials {
            server,
            source: Box::new(source),
        })
    }

    async fn config(&self) -> Result<Config, AccessError> {
        let options = KubeConfigOptions::default();
        match self {
            Self::Kubeconfig(path) => {
                let kubeconfig = read_kubeconfig(path)?;
                let config = Config::from_custom_kubeconfig(kubeconfig, &options).await;
                config.map_err(|source| AccessError::Kubeconfig {
                    path: path.clone(),
                    source,
                })
            }
            Self::Pod | Self::Environment => match Config::incluster() {
                Ok(config) => Ok(config),
                Err(in_cluster) => Config::from_kubeconfig(&options)
                    .await
                    .map_err(|environment| AccessError::NoCluster {
                        in_cluster,
                        environment,
                    }),
            },
        }
    }
}

/// Returns the URL of the API server in a kubeconfig, or, without a path, in the environment. `None` if neither exists.
pub(crate) async fn server(kubeconfig: Option<&Path>) -> Option<String> {
    let config = Access::find(kubeconfig).ok()?.config().await.ok()?;
    Some(config.cluster_url.to_string())
}

fn read_kubeconfig(path: &Path) -> Result<Kubeconfig, AccessError> {
    Kubeconfig::read_from(path).map_err(|source| AccessError::Kubeconfig {
        path: path.to_owned(),
        source,
    })
}

/// Builds a client with a custom stack. Kube's own stack retries by itself, waits for responses indefinitely, and
/// accepts responses of any size; this stack does not.
fn connect(mut config: Config, watched: watch::Sender<Option<u64>>) -> Result<Client, kube::Error> {
    let is_plain = config.cluster_url.scheme_str() == Some("http");
    if is_plain || config.accept_invalid_certs {
        // Otherwise kube loads the system's certificates, which small images lack and which are not used for
        // verification here.
        config.root_cert.get_or_insert_default();
    }
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
    tcp.set_nodelay(true);
    tcp.set_keepalive(Some(KEEPALIVE_TIME));
    tcp.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
    tcp.set_keepalive_retries(Some(KEEPALIVE_RETRIES));
    let https = config.rustls_https_connector_with_connector(tcp)?;
    let http = hyper_util::client::legacy::Client::builder(TokioExecutor::new()).build(https);
    let exchange =
        service_fn(move |request: Request<Body>| exchange(http.clone(), request, watched.clone()));
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(exchange);
    Ok(Client::new(service, config.default_namespace))
}

type Http<C> = hyper_util::client::legacy::Client<C, Body>;
type Answer = Response<Either<UnsyncBoxBody<Bytes, BoxError>, Full<Bytes>>>;

async fn exchange<C>(
    http: Http<C>,
    request: Request<Body>,
    watched: watch::Sender<Option<u64>>,
) -> Result<Answer, BoxError>
where
    C: hyper_util::client::legacy::connect::Connect + Clone + Send + Sync + 'static,
{
    let query = request.uri().query().unwrap_or_default();
    let is_watch = query.split('&').any(|pair| pair == "watch=true");
    let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    let revision = pairs.find_map(|(key, value)| (key == "resourceVersion").then_some(value));
    let revision = revision.and_then(|revision| revision.parse().ok());
    let answer = tokio::time::timeout(ANSWER_TIMEOUT, async {
        let answer = http.request(request).await?;
        if is_watch && answer.status().is_success() {
            watched.send_replace(revision);
            return Ok(answer.map(|events| Either::Left(bounded_lines(events))));
        }
        let (head, body) = answer.into_parts();
        let body = Limited::new(body, MAX_ANSWER).collect().await?.to_bytes();
        Ok(Response::from_parts(head, Either::Right(Full::new(body))))
    });
    answer
        .await
        .unwrap_or_else(|_| Err(format!("no answer within {ANSWER_TIMEOUT:?}").into()))
}

/// The events of a watch, one per line. The reader buffers each line until its end, so lines that are too long are
/// errors.
fn bounded_lines(events: Incoming) -> UnsyncBoxBody<Bytes, BoxError> {
    let mut length = 0;
    let frames = BodyStream::new(events).map(move |frame| {
        let frame = frame?;
        bound_line(&mut length, &frame)?;
        Ok(frame)
    });
    StreamBody::new(frames).boxed_unsync()
}

/// Counts the bytes of the last, still incomplete line of all frames so far.
fn bound_line(length: &mut usize, frame: &Frame<Bytes>) -> Result<(), BoxError> {
    let Some(bytes) = frame.data_ref() else {
        return Ok(());
    };
    *length = match bytes.iter().rposition(|&byte| byte == b'\n') {
        Some(at) => bytes.len() - at - 1,
        None => *length + bytes.len(),
    };
    if *length > MAX_ANSWER {
        return Err(format!("an event has more than {MAX_ANSWER} bytes").into());
    }
    Ok(())
}

/// The error for a report: a single line of bounded length, whatever the server sent.
pub(crate) fn reason(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => match status.code {
            401 => "the API server refuses the credentials (401)".to_owned(),
            403 => line(&format!(
                "the API server forbids it (403): {}",
                status.message
            )),
            code => line(&format!(
                "the API server answers {code}: {}",
                status.message
            )),
        },
        kube::Error::SerdeError(source) => line(&format!("the answer cannot be parsed: {source}")),
        kube::Error::FromUtf8(_) => "the answer cannot be parsed: it is not UTF-8".to_owned(),
        kube::Error::Service(source) => line(&innermost(source.as_ref()).to_string()),
        other => line(&innermost(other).to_string()),
    }
}

/// Whether a response has more bytes than are read.
pub(crate) fn is_too_long(error: &kube::Error) -> bool {
    let kube::Error::Service(source) = error else {
        return false;
    };
    innermost(source.as_ref()).is::<LengthLimitError>()
}

/// The innermost cause, which is the most specific: `connection refused`.
fn innermost<'a>(error: &'a (dyn StdError + 'static)) -> &'a (dyn StdError + 'static) {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost
}

/// Converts text of any length to a single line.
pub(crate) fn line(text: &str) -> String {
    const LONGEST: usize = 240;
    let words: Vec<_> = text.split_whitespace().collect();
    let mut line = words.join(" ");
    line.retain(|c| !c.is_control());
    if line.len() > LONGEST {
        line.truncate(line.floor_char_boundary(LONGEST));
        line.push('…');
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    #[test]
    fn an_event_of_a_watch_that_does_not_end_is_an_error() {
        let frame = |length: usize, end: &str| {
            let line = "x".repeat(length) + end;
            Frame::data(Bytes::from(line))
        };
        let mut length = 0;
        for _ in 0..4 {
            bound_line(&mut length, &frame(MAX_ANSWER / 2, "\n")).unwrap();
        }
        bound_line(&mut length, &frame(MAX_ANSWER, "")).unwrap();
        bound_line(&mut length, &frame(1, "")).unwrap_err();
    }

    #[test]
    fn a_kubeconfig_that_cannot_be_used_is_named() {
        let absent = Access::find(Some(Path::new("/nonexistent/config"))).unwrap_err();
        assert!(
            absent
                .to_string()
                .contains("kubeconfig /nonexistent/config: "),
            "{absent}"
        );
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"clusters: 5\n").unwrap();
        let malformed = Access::find(Some(file.path())).unwrap_err();
        assert!(malformed.to_string().contains("parse"), "{malformed}");
    }

    #[test]
    fn reasons_are_single_lines_of_bounded_length() {
        let page = format!("<html>\n\t<p>\u{1b}[31m{}", "Bad Gateway ".repeat(100));
        let reason = line(&page);
        assert!(reason.len() < 250 && reason.ends_with('…'), "{reason}");
        assert!(!reason.contains(['\n', '\u{1b}']), "{reason}");
    }
}
