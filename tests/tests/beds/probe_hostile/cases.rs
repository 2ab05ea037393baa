//! The expected outcome of every probe of every hostile server.

use health_probe::mechanism::grpc::{self, GrpcProbe};
use health_probe::mechanism::http::{self, HttpProbe, Scheme};
use health_probe::mechanism::tls::TlsClient;
use health_probe::mechanism::{Deadline, Host, Target, tcp};
use health_probe::{Outcome, RawResult};
use std::net::Ipv4Addr;
use tests::hostile::{Behaviour, Hostile};

use self::Behaviour::*;
use self::Expected::*;
use self::Way::*;

/// How a server is probed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Tcp,
    Http,
    Https,
    Grpc,
    GrpcTls,
}

/// Expected outcome of a probe. The strings are a prefix of the message or, for errors, a part of it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Expected {
    /// The target is healthy.
    Succeeds,
    /// The probe fails, but not by timeout.
    Fails(&'static str),
    /// The probe times out at this stage.
    TimesOut(&'static str),
    /// The probe ends with an error, which says nothing about the target.
    Errs(&'static str),
    /// The connection closes at once, and the probe may or may not see it open.
    SucceedsOrFails,
}

/// A probe of a hostile server, or of port 0 without a server.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) behaviour: Option<Behaviour>,
    pub(super) way: Way,
    pub(super) expected: Expected,
}

const NO_ANSWER: &str = "no answer from 127.0.0.1";
const NO_TLS: &str = "no TLS with 127.0.0.1";
const NO_SERVICE: &str = "failed to connect service \"127.0.0.1";
const RPC: &str = "health rpc failed: ";
const LATE_CONNECTION: &str = "timeout: no connection to 127.0.0.1";
const LATE_ANSWER: &str = "timeout: no answer from 127.0.0.1";
const LATE_BODY: &str = "timeout: the body from 127.0.0.1";
const LATE_TLS: &str = "timeout: no TLS with 127.0.0.1";
const LATE_SERVICE: &str = "timeout: failed to connect service \"127.0.0.1";
const LATE_RPC: &str = "timeout: health rpc did not complete within";

/// All cases.
pub(super) const CASES: &[Case] = &[
    at(None, Tcp, Fails("cannot connect to 127.0.0.1:0: ")),
    of(Silence, Tcp, Succeeds),
    of(Garbage, Tcp, Succeeds),
    of(HalfOpen, Tcp, TimesOut(LATE_CONNECTION)),
    of(Reset, Tcp, SucceedsOrFails),
    at(None, Http, Fails("cannot connect to 127.0.0.1:0: ")),
    of(Silence, Http, TimesOut(LATE_ANSWER)),
    of(HalfOpen, Http, TimesOut(LATE_CONNECTION)),
    of(Reset, Http, Fails("")),
    of(Garbage, Http, Fails(NO_ANSWER)),
    of(HttpResetAfterRequest, Http, Fails(NO_ANSWER)),
    of(HttpResetInHead, Http, Fails(NO_ANSWER)),
    of(HttpResetInBody, Http, Errs("the body from 127.0.0.1")),
    of(HttpEndlessHead, Http, Fails(NO_ANSWER)),
    of(HttpEndlessBody, Http, Succeeds),
    of(HttpEndlessInterim, Http, Fails(NO_ANSWER)),
    of(HttpSlowHead, Http, TimesOut(LATE_ANSWER)),
    of(HttpSlowBody, Http, TimesOut(LATE_BODY)),
    of(HttpStalledBody, Http, TimesOut(LATE_BODY)),
    of(HttpRedirectLoop, Http, Fails("stopped after 10 redirects")),
    of(HttpBadRequest, Http, Fails("HTTP status 400")),
    of(H2Silence, Http, Fails(NO_ANSWER)),
    of(Silence, Https, TimesOut(LATE_TLS)),
    of(HalfOpen, Https, TimesOut(LATE_CONNECTION)),
    of(Reset, Https, Fails("")),
    of(Garbage, Https, Fails(NO_TLS)),
    of(HttpBadRequest, Https, Fails(NO_TLS)),
    of(TlsGarbage, Https, Fails(NO_TLS)),
    of(TlsReset, Https, Fails(NO_TLS)),
    of(TlsHugeHandshake, Https, Fails(NO_TLS)),
    of(TlsSlow, Https, TimesOut(LATE_TLS)),
    // gRPC keeps trying to connect until its timeout.
    at(None, Grpc, TimesOut(LATE_SERVICE)),
    of(Silence, Grpc, TimesOut(LATE_SERVICE)),
    of(HalfOpen, Grpc, TimesOut(LATE_SERVICE)),
    of(Reset, Grpc, Fails("")),
    of(Garbage, Grpc, Fails(NO_SERVICE)),
    of(HttpBadRequest, Grpc, Fails(NO_SERVICE)),
    of(HttpEndlessBody, Grpc, Fails(NO_SERVICE)),
    of(H2Silence, Grpc, TimesOut(LATE_RPC)),
    of(H2Reset, Grpc, Fails("")),
    of(H2Slow, Grpc, TimesOut(LATE_RPC)),
    of(H2NoWindow, Grpc, TimesOut(LATE_RPC)),
    of(H2GoAway, Grpc, Fails(RPC)),
    of(H2ResetStream, Grpc, Fails(RPC)),
    of(H2EndlessPings, Grpc, Fails(RPC)),
    of(H2EndlessSettings, Grpc, Fails(RPC)),
    of(H2EndlessHeaders, Grpc, Fails("")),
    of(H2PackedHeaders, Grpc, Fails("")),
    of(GrpcOtherType, Grpc, Fails(RPC)),
    of(GrpcNoStatus, Grpc, Fails(RPC)),
    of(GrpcGarbageMessage, Grpc, Fails(RPC)),
    of(GrpcHugeMessage, Grpc, Fails(RPC)),
    of(Silence, GrpcTls, TimesOut(LATE_SERVICE)),
    of(TlsGarbage, GrpcTls, Fails(NO_SERVICE)),
    of(TlsReset, GrpcTls, Fails(NO_SERVICE)),
    of(TlsHugeHandshake, GrpcTls, Fails(NO_SERVICE)),
    of(TlsSlow, GrpcTls, TimesOut(LATE_SERVICE)),
];

const fn of(behaviour: Behaviour, way: Way, expected: Expected) -> Case {
    at(Some(behaviour), way, expected)
}

const fn at(behaviour: Option<Behaviour>, way: Way, expected: Expected) -> Case {
    Case {
        behaviour,
        way,
        expected,
    }
}

impl Case {
    /// Whether the probe ends only by timeout.
    pub(super) fn times_out(&self) -> bool {
        matches!(self.expected, TimesOut(_))
    }

    /// Whether a container with this outcome counts as unhealthy; `None` if that is uncertain.
    pub(super) fn is_ill(&self) -> Option<bool> {
        match self.expected {
            Fails(_) | TimesOut(_) => Some(true),
            Succeeds | Errs(_) => Some(false),
            SucceedsOrFails => None,
        }
    }

    /// The server's port, or 0.
    pub(super) fn port(&self, hostile: &Hostile) -> u16 {
        self.behaviour
            .map_or(0, |behaviour| hostile.port(behaviour))
    }

    /// Runs the probe once.
    pub(super) async fn probe(&self, hostile: &Hostile, deadline: Deadline) -> Outcome {
        let target = Target {
            host: Host::Ip(Ipv4Addr::LOCALHOST.into()),
            port: self.port(hostile),
            asker: "test".into(),
            netns: None,
        };
        let tls = TlsClient::default();
        match self.way {
            Tcp => tcp::probe(&target, deadline).await,
            Http | Https => {
                let probe = HttpProbe {
                    target,
                    scheme: match self.way {
                        Https => Scheme::Https,
                        _ => Scheme::Http,
                    },
                    path: "/".to_owned(),
                    headers: Vec::new(),
                    tls,
                };
                http::probe(&probe, deadline).await
            }
            Grpc | GrpcTls => {
                let probe = GrpcProbe {
                    target,
                    service: String::new(),
                    tls: (self.way == GrpcTls).then_some(tls),
                };
                grpc::probe(&probe, deadline).await
            }
        }
    }

    /// Whether this is the expected outcome. If time is short, the timeout may hit any stage.
    pub(super) fn expects(&self, outcome: &Outcome, has_time: bool) -> bool {
        let Outcome {
            result,
            message,
            errored,
        } = outcome;
        if !has_time && is_timeout(outcome) {
            return true;
        }
        match self.expected {
            Succeeds => *result == RawResult::Success && !errored,
            Fails(start) | TimesOut(start) => {
                *result == RawResult::Failure
                    && !errored
                    && message.starts_with(start)
                    && message.starts_with("timeout: ") == self.times_out()
            }
            Errs(start) => *result == RawResult::Failure && *errored && message.starts_with(start),
            SucceedsOrFails => {
                matches!(result, RawResult::Success | RawResult::Failure) && !errored
            }
        }
    }
}

/// Whether a probe failed by timeout.
pub(super) fn is_timeout(outcome: &Outcome) -> bool {
    outcome.result == RawResult::Failure
        && !outcome.errored
        && outcome.message.starts_with("timeout: ")
}
