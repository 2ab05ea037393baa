//! How servers misbehave.

use tokio::net::TcpStream;

use super::{grpc, http, tcp, tls};

/// What a server does with each connection. Unless stated otherwise it holds the connection until the client closes
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Behaviour {
    /// Nothing.
    Silence,
    /// Accepts no connection, and its queue is full.
    HalfOpen,
    /// Resets the connection at once.
    Reset,
    /// Endless bytes of no protocol.
    Garbage,
    /// HTTP/1: a reset after the request.
    HttpResetAfterRequest,
    /// A reset in the middle of the headers.
    HttpResetInHead,
    /// A reset in the middle of the body.
    HttpResetInBody,
    /// Endless headers.
    HttpEndlessHead,
    /// An endless body.
    HttpEndlessBody,
    /// Endless interim responses (status 100).
    HttpEndlessInterim,
    /// A response sent one byte a second.
    HttpSlowHead,
    /// A body sent one byte a second.
    HttpSlowBody,
    /// A body that stalls before its end.
    HttpStalledBody,
    /// A redirect to itself.
    HttpRedirectLoop,
    /// Status 400, as from HTTP/1 servers that do not understand the request.
    HttpBadRequest,
    /// TLS: records longer than allowed.
    TlsGarbage,
    /// A reset after the ClientHello.
    TlsReset,
    /// A ServerHello of 16 MiB.
    TlsHugeHandshake,
    /// A ServerHello sent one byte a second.
    TlsSlow,
    /// HTTP/2: settings and nothing else.
    H2Silence,
    /// A reset after the client's preface.
    H2Reset,
    /// Settings sent one byte a second.
    H2Slow,
    /// A window of zero: the client may send nothing.
    H2NoWindow,
    /// GOAWAY instead of an answer.
    H2GoAway,
    /// Resets the stream of the call.
    H2ResetStream,
    /// Endless pings.
    H2EndlessPings,
    /// Endless settings.
    H2EndlessSettings,
    /// Endless headers.
    H2EndlessHeaders,
    /// Headers that expand to 48 MB.
    H2PackedHeaders,
    /// An HTTP/2 response that is not gRPC.
    GrpcOtherType,
    /// A response without a status.
    GrpcNoStatus,
    /// A message that cannot be parsed.
    GrpcGarbageMessage,
    /// A message of 4 GiB.
    GrpcHugeMessage,
}

impl Behaviour {
    /// All behaviours.
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

    /// Its name, one word.
    pub fn name(self) -> String {
        format!("{self:?}")
    }

    /// The behaviour of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.name() == name)
    }

    /// Serves a connection this way.
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
        // On an error, the client has gone.
        if served.is_ok() {
            tcp::wait_for_end(stream).await;
        }
    }
}
