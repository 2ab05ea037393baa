//! An HTTP/1.1 request, as the bytes to send (RFC 9112, 3).

use super::HttpError;
use crate::mechanism::USER_AGENT;
use crate::mechanism::url::Url;

/// Headers that the connection decides itself. Values from a manifest are not sent.
const OWN: [&str; 4] = [
    "connection",
    "content-length",
    "trailer",
    "transfer-encoding",
];

/// The headers of a manifest, checked once for all requests of a probe.
#[derive(Debug)]
pub(super) struct Headers {
    /// The host name to send to the server.
    host: Option<String>,
    /// All other headers, as lines.
    lines: Vec<u8>,
}

impl Headers {
    /// Checks the headers. Fails with the name of a header that cannot be sent.
    pub(super) fn new(given: &[(String, String)]) -> Result<Self, HttpError> {
        let mut host = None;
        let mut lines = Vec::with_capacity(64);
        let is_given = |name: &str| {
            let mut names = given.iter().map(|(name, _)| name);
            names.any(|given| given.eq_ignore_ascii_case(name))
        };
        // An empty `User-Agent` or `Accept` means that the header is not sent.
        let is_dropped = |name: &str, value: &str| {
            value.trim().is_empty()
                && (name.eq_ignore_ascii_case("user-agent") || name.eq_ignore_ascii_case("accept"))
        };
        if !is_given("user-agent") {
            push(&mut lines, "User-Agent", USER_AGENT);
        }
        for (name, value) in given {
            let value = value.trim();
            if name.is_empty() || !name.bytes().all(is_token) || !is_value(value) {
                return Err(HttpError::Header(name.clone()));
            }
            if name.eq_ignore_ascii_case("host") {
                host = host.or((!value.is_empty()).then(|| value.to_owned()));
            } else if !OWN.iter().any(|own| name.eq_ignore_ascii_case(own))
                && !is_dropped(name, value)
            {
                push(&mut lines, &canonical(name), value);
            }
        }
        if !is_given("accept") {
            push(&mut lines, "Accept", "*/*");
        }
        push(&mut lines, "Connection", "close");
        Ok(Self { host, lines })
    }

    /// Handles a redirect that names a host: from now on the redirect's host is sent.
    pub(super) fn forget_host(&mut self) {
        self.host = None;
    }

    /// Returns the request for a URL. Fails if the URL's host cannot be sent.
    pub(super) fn request(&self, url: &Url) -> Result<Vec<u8>, HttpError> {
        let authority;
        let host = match &self.host {
            Some(host) => host,
            None => {
                authority = url.authority();
                if !is_value(&authority) {
                    return Err(HttpError::Host);
                }
                &authority
            }
        };
        let mut request = Vec::with_capacity(64 + url.target.len() + self.lines.len());
        request.extend_from_slice(b"GET ");
        request.extend_from_slice(url.target.as_bytes());
        request.extend_from_slice(b" HTTP/1.1\r\n");
        push(&mut request, "Host", host);
        request.extend_from_slice(&self.lines);
        request.extend_from_slice(b"\r\n");
        Ok(request)
    }
}

fn push(lines: &mut Vec<u8>, name: &str, value: &str) {
    lines.extend_from_slice(name.as_bytes());
    lines.extend_from_slice(b": ");
    lines.extend_from_slice(value.as_bytes());
    lines.extend_from_slice(b"\r\n");
}

/// Whether a byte may be in a token (RFC 9110, 5.6.2).
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// Whether a header may have this value (RFC 9110, 5.5): no control characters except tabs.
fn is_value(value: &str) -> bool {
    value
        .bytes()
        .all(|byte| byte == b'\t' || !byte.is_ascii_control())
}

/// Capitalises a header's name at the start and after hyphens, as the kubelet sends it.
fn canonical(name: &str) -> String {
    let mut is_first = true;
    let canonical = name.chars().map(|c| {
        let c = if is_first {
            c.to_ascii_uppercase()
        } else {
            c.to_ascii_lowercase()
        };
        is_first = c == '-';
        c
    });
    canonical.collect()
}
