//! How servers misbehave.

use tokio::net::TcpStream;

use super::{grpc, http, tcp, tls};

/// What a server does with each connection. Unless stated otherwise, the server then keeps the connection open until
/// the client closes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Behaviour {
    /// Sends nothing.
    Silence,
    /// Accepts no connections; its accept queue is full.
    HalfOpen,
    /// Resets the connection immediately.
    Reset,
    /// Sends endless bytes that are no known protocol.
    Garbage,
    /// HTTP/1: resets the connection after the request.
    HttpResetAfterRequest,
    /// Resets the connection in the middle of the headers.
    HttpResetInHead,
    /// Resets the connection in the middle of the body.
    HttpResetInBody,
    /// Sends endless headers.
    HttpEndlessHead,
    /// Sends an endless body.
    HttpEndlessBody,
    /// Sends endless interim responses (status 100).
    HttpEndlessInterim,
    /// Sends a response at one byte per second.
    HttpSlowHead,
    /// Sends a body at one byte per second.
    HttpSlowBody,
    /// Sends a body that stalls before its end.
    HttpStalledBody,
    /// Redirects to the same URL.
    HttpRedirectLoop,
    /// Responds with status 400, like HTTP/1 servers that do not understand the request.
    HttpBadRequest,
    /// TLS: sends records that are longer than allowed.
    TlsGarbage,
    /// Resets the connection after the ClientHello.
    TlsReset,
    /// Sends a ServerHello of 16 MiB.
    TlsHugeHandshake,
    /// Sends a ServerHello at one byte per second.
    TlsSlow,
    /// HTTP/2: sends SETTINGS and nothing else.
    H2Silence,
    /// Resets the connection after the client's preface.
    H2Reset,
    /// Sends SETTINGS at one byte per second.
    H2Slow,
    /// Announces a window of zero: the client may not send any data.
    H2NoWindow,
    /// Sends GOAWAY instead of a response.
    H2GoAway,
    /// Resets the stream of the call.
    H2ResetStream,
    /// Sends endless PING frames.
    H2EndlessPings,
    /// Sends endless SETTINGS frames.
    H2EndlessSettings,
    /// Sends endless headers.
    H2EndlessHeaders,
    /// Sends headers that expand to 48 MB.
    H2PackedHeaders,
    /// Sends an HTTP/2 response that is not gRPC.
    GrpcOtherType,
    /// Sends a response without a gRPC status.
    GrpcNoStatus,
    /// Sends a message that cannot be parsed.
    GrpcGarbageMessage,
    /// Sends a message of 4 GiB.
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

    /// The behaviour's name, a single word.
    pub fn name(self) -> String {
        format!("{self:?}")
    }

    /// Returns the behaviour with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.name() == name)
    }

    /// Serves a connection with this behaviour.
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
        // An error means that the client has gone.
        if served.is_ok() {
            tcp::wait_for_end(stream).await;
        }
    }
}
