//! How servers misbehave.

use tokio::net::TcpStream;

use super::{grpc, http, tcp, tls};

/// What a server does with each connection. Unless it says otherwise it holds the connection until the client goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Behaviour {
    /// Nothing.
    Silence,
    /// It accepts none, and has no room for any to wait.
    HalfOpen,
    /// It resets it at once.
    Reset,
    /// What is of no protocol, without an end.
    Garbage,
    /// HTTP/1: a reset once the request has come.
    HttpResetAfterRequest,
    /// A reset amid the headers.
    HttpResetInHead,
    /// A reset amid the body.
    HttpResetInBody,
    /// Headers without an end.
    HttpEndlessHead,
    /// A body without an end.
    HttpEndlessBody,
    /// Announcements of an answer (status 100) without an end.
    HttpEndlessInterim,
    /// An answer of which a byte comes each second.
    HttpSlowHead,
    /// A body of which a byte comes each second.
    HttpSlowBody,
    /// A body that stops before its end.
    HttpStalledBody,
    /// A redirect to itself.
    HttpRedirectLoop,
    /// Status 400, as of servers of HTTP/1 that understand nothing.
    HttpBadRequest,
    /// TLS: records that are longer than any may be.
    TlsGarbage,
    /// A reset once the client has said hello.
    TlsReset,
    /// An answer to the hello of 16 MiB.
    TlsHugeHandshake,
    /// An answer to the hello of which a byte comes each second.
    TlsSlow,
    /// HTTP/2: settings, and nothing else.
    H2Silence,
    /// A reset once the client's preface has come.
    H2Reset,
    /// A byte of the settings each second.
    H2Slow,
    /// A client may send nothing.
    H2NoWindow,
    /// The end of the connection is announced, in place of an answer.
    H2GoAway,
    /// The call is broken off.
    H2ResetStream,
    /// Pings without an end.
    H2EndlessPings,
    /// Settings without an end.
    H2EndlessSettings,
    /// Headers without an end.
    H2EndlessHeaders,
    /// Headers that take 48 MB once they are unpacked.
    H2PackedHeaders,
    /// An answer of HTTP/2 that is none of gRPC.
    GrpcOtherType,
    /// An answer without a status.
    GrpcNoStatus,
    /// A message that cannot be read.
    GrpcGarbageMessage,
    /// A message of 4 GiB.
    GrpcHugeMessage,
}

impl Behaviour {
    /// All of them.
    pub const ALL: [Self; 33] = [
        Self::Silence,
        Self::HalfOpen,
        Self::Reset,
        Self::Garbage,
        Self::HttpResetAfterRequest,
        Self::HttpResetInHead,
        Self::HttpResetInBody,
        Self::HttpEndlessHead,
        Self::HttpEndlessBody,
        Self::HttpEndlessInterim,
        Self::HttpSlowHead,
        Self::HttpSlowBody,
        Self::HttpStalledBody,
        Self::HttpRedirectLoop,
        Self::HttpBadRequest,
        Self::TlsGarbage,
        Self::TlsReset,
        Self::TlsHugeHandshake,
        Self::TlsSlow,
        Self::H2Silence,
        Self::H2Reset,
        Self::H2Slow,
        Self::H2NoWindow,
        Self::H2GoAway,
        Self::H2ResetStream,
        Self::H2EndlessPings,
        Self::H2EndlessSettings,
        Self::H2EndlessHeaders,
        Self::H2PackedHeaders,
        Self::GrpcOtherType,
        Self::GrpcNoStatus,
        Self::GrpcGarbageMessage,
        Self::GrpcHugeMessage,
    ];

    /// Its name, a word.
    pub fn name(self) -> String {
        format!("{self:?}")
    }

    /// The one of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.name() == name)
    }

    /// Does it with a connection.
    pub(super) async fn serve(self, mut stream: TcpStream) {
        let stream = &mut stream;
        let served = match self {
            Self::Silence | Self::HalfOpen => Ok(()),
            Self::Reset => tcp::reset(stream),
            Self::Garbage => tcp::write_forever(stream, &[0xff; 100]).await,
            Self::HttpResetAfterRequest
            | Self::HttpResetInHead
            | Self::HttpResetInBody
            | Self::HttpEndlessHead
            | Self::HttpEndlessBody
            | Self::HttpEndlessInterim
            | Self::HttpSlowHead
            | Self::HttpSlowBody
            | Self::HttpStalledBody
            | Self::HttpRedirectLoop
            | Self::HttpBadRequest => http::serve(self, stream).await,
            Self::TlsGarbage | Self::TlsReset | Self::TlsHugeHandshake | Self::TlsSlow => {
                tls::serve(self, stream).await
            }
            _ => grpc::serve(self, stream).await,
        };
        // Where it failed, the client has gone.
        if served.is_ok() {
            tcp::wait_for_end(stream).await;
        }
    }
}
