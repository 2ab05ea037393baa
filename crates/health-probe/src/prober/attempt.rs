//! One attempt: passes a probe, and what is known of its container, to a mechanism, and returns the outcome.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::Instant;

use super::{Containers, Execution};
use crate::mechanism::exec::cri::CriExec;
use crate::mechanism::exec::direct::DirectExec;
use crate::mechanism::exec::{cri, direct};
use crate::mechanism::grpc::GrpcProbe;
use crate::mechanism::http::{HttpProbe, Scheme};
use crate::mechanism::tls::{TlsClient, TlsError, TlsIdentity, TlsSettings};
use crate::mechanism::{Deadline, Host, Target, grpc, http, tcp};
use crate::spec::{Handler, HttpGet, Origin, TargetAction, Tls};
use crate::worker::{Report, Start, WorkerId};
use crate::{Outcome, RawResult};

/// An attempt that failed this long after its deadline was not watched: the answer may have come in time. This value is
/// for long timeouts; for short ones it is a quarter of the timeout, and at least the minimum.
const UNWATCHED: Duration = Duration::from_millis(100);
const UNWATCHED_MIN: Duration = Duration::from_millis(5);

/// An attempt to make.
pub(super) struct Attempt<'a> {
    pub(super) start: &'a Start,
    pub(super) containers: &'a dyn Containers,
    pub(super) certificates: &'a Path,
    pub(super) commands: &'a Commands,
}

/// Why certificates are unusable.
#[derive(Debug, thiserror::Error)]
enum CertificateError {
    #[error("cannot read {0}: {1}")]
    Read(PathBuf, #[source] io::Error),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("reading the certificates was interrupted")]
    Interrupted,
}

impl Attempt<'_> {
    /// Makes the attempt. A failure that only occurred because the clock was checked late does not count as the
    /// target's. Commands detect this themselves: their time counts from when they were started.
    pub(super) async fn make(&self) -> Report {
        let deadline = Deadline::after(self.start.probe.timeout);
        let outcome = self.outcome(deadline).await;
        let unwatched = UNWATCHED.min((self.start.probe.timeout / 4).max(UNWATCHED_MIN));
        let is_command = matches!(self.start.probe.handler, Handler::Exec { .. });
        let is_late = !is_command && Instant::now() > deadline.made_up() + unwatched;
        if outcome.result == RawResult::Failure && !outcome.errored && is_late {
            return Report::NotSent;
        }
        Report::Outcome(outcome)
    }

    async fn outcome(&self, deadline: Deadline) -> Outcome {
        let Start {
            pod,
            container,
            probe,
            ..
        } = self.start;
        let Some(container) = pod.container(container) else {
            return unknown("the pod has no such container");
        };
        let target = match probe.target(pod, container) {
            Ok(target) => target,
            Err(error) => return error.into(),
        };
        let netns = match target.origin {
            Origin::Node => None,
            Origin::Pod => match self.containers.netns(pod) {
                Some(netns) => Some(netns),
                None => return unknown("the pod's network namespace is unknown"),
            },
        };
        let to = |host: String, port| Target {
            host: match host.parse::<Host>() {
                Ok(host) => host,
                Err(never) => match never {},
            },
            port,
            netns: netns.clone(),
            asker: Arc::from(&*pod.namespace),
        };
        match target.action {
            // Boxed, so that other probes need no space for it.
            TargetAction::Exec(command) => Box::pin(self.exec(command, deadline)).await,
            TargetAction::Tcp { host, port } => tcp::probe(&to(host, port), deadline).await,
            TargetAction::Http {
                host,
                port,
                request,
            } => self.http(to(host, port), request, deadline).await,
            TargetAction::Grpc {
                host,
                port,
                service,
                tls,
            } => {
                let tls = match tls {
                    None => None,
                    Some(tls) => match self.tls(tls).await {
                        Ok(client) => Some(client),
                        Err(error) => return unknown(error),
                    },
                };
                let probe = GrpcProbe {
                    target: to(host, port),
                    service: service.to_owned(),
                    tls,
                };
                grpc::probe(&probe, deadline).await
            }
        }
    }

    async fn http(&self, target: Target, request: &HttpGet, deadline: Deadline) -> Outcome {
        let tls = match &request.tls {
            None => TlsClient::default(),
            Some(tls) => match self.tls(tls).await {
                Ok(client) => client,
                Err(error) => return unknown(error),
            },
        };
        let probe = HttpProbe {
            target,
            scheme: match request.tls {
                None => Scheme::Http,
                Some(_) => Scheme::Https,
            },
            path: request.path.clone(),
            headers: request.headers.clone(),
            tls,
        };
        http::probe(&probe, deadline).await
    }

    /// Reads the certificates for each attempt, because they may be renewed at any time.
    async fn tls(&self, tls: &Tls) -> Result<TlsClient, CertificateError> {
        if *tls == Tls::default() {
            return Ok(TlsClient::default());
        }
        let (tls, folder) = (tls.clone(), self.certificates.to_owned());
        let read = spawn_blocking(move || client(&tls, &folder)).await;
        read.unwrap_or(Err(CertificateError::Interrupted))
    }

    async fn exec(&self, command: &[String], deadline: Deadline) -> Outcome {
        let Start {
            worker,
            pod,
            container,
            container_id,
            kind,
            ..
        } = self.start;
        match self.containers.execution(pod, container_id) {
            None => unknown("the container's processes are unknown"),
            Some(Execution::Direct { pid, started }) => {
                let probe = DirectExec {
                    pid,
                    started,
                    name: format!("{}-{container}-{kind}", pod.uid).replace('/', "_"),
                    command: command.to_vec(),
                    program: None,
                };
                direct::probe(&probe, deadline).await
            }
            Some(Execution::Runtime {
                runtime,
                container_id,
                pid,
            }) => {
                let key = (container_id.clone(), command.to_vec());
                let new = || CriExec::new(runtime, container_id, pid, command.to_vec());
                let probe = self.commands.of(*worker, key, new);
                cri::probe(&probe, deadline).await
            }
        }
    }
}

/// The outcome of an attempt that went wrong on this side.
fn unknown(message: impl ToString) -> Outcome {
    Outcome {
        result: RawResult::Unknown,
        message: message.to_string(),
        errored: true,
    }
}

fn client(tls: &Tls, folder: &Path) -> Result<TlsClient, CertificateError> {
    let read = |name: &String| {
        let path = folder.join(name);
        std::fs::read(&path).map_err(|error| CertificateError::Read(path, error))
    };
    let check = tls.check.as_ref();
    let identity = tls.client.as_ref().map(|client| {
        Ok::<_, CertificateError>(TlsIdentity {
            certificates: read(&client.certificate)?,
            key: read(&client.key)?,
        })
    });
    let settings = TlsSettings {
        authorities: check.map(|check| read(&check.ca)).transpose()?,
        server_name: check.and_then(|check| check.server_name.clone()),
        identity: identity.transpose()?,
    };
    Ok(TlsClient::new(&settings)?)
}

/// The commands that a runtime executes. Each run waits for whatever the previous run left.
#[derive(Debug, Default)]
pub(super) struct Commands(Mutex<HashMap<WorkerId, (Command, CriExec)>>);

/// The runtime's container ID, and the command.
type Command = (String, Vec<String>);

impl Commands {
    fn of(&self, worker: WorkerId, command: Command, new: impl FnOnce() -> CriExec) -> CriExec {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((same, exec)) = known.get(&worker)
            && *same == command
        {
            return exec.clone();
        }
        let exec = new();
        known.insert(worker, (command, exec.clone()));
        exec
    }

    /// Forgets the commands of all workers but the known ones.
    pub(super) fn retain(&self, is_known: impl Fn(WorkerId) -> bool) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|worker, _| is_known(*worker));
    }
}
