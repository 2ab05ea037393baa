//! Where an HTTP probe goes: how its path appears in a request, and where redirects lead.

use std::borrow::Cow;
use std::fmt;

use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use super::Host;

/// Characters that must be encoded in a path.
const PATH: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'<')
    .add(b'>')
    .add(b'\\')
    .add(b'^')
    .add(b'`')
    .add(b'{')
    .add(b'|')
    .add(b'}');
/// Characters that must be encoded in a path that is not a URL.
const RAW_PATH: &AsciiSet = &PATH.add(b'%').add(b'?').add(b'#');
/// Characters that must be encoded in a query.
const QUERY: &AsciiSet = &CONTROLS.add(b' ').add(b'"').add(b'<').add(b'>');

/// The scheme of a URL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scheme {
    /// Plain text.
    #[default]
    Http,
    /// Over TLS.
    Https,
}

impl Scheme {
    fn port(self) -> u16 {
        match self {
            Self::Http => 80,
            Self::Https => 443,
        }
    }
}

/// Where to send a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Url {
    pub(super) scheme: Scheme,
    pub(super) host: Host,
    pub(super) port: u16,
    /// Path and query, as they appear in a request.
    pub(super) target: String,
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.authority())
    }
}

/// The target of a redirect's `Location`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Redirect {
    pub(super) url: Url,
    /// Whether it names a host, even if that is the same host.
    pub(super) is_absolute: bool,
}

/// A `Location` that leads nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the redirect does not lead to an HTTP URL")]
pub(super) struct BadLocation;

impl Url {
    /// Host and port, as they appear in the `Host` header.
    pub(super) fn authority(&self) -> String {
        match &self.host {
            Host::Ip(ip) => std::net::SocketAddr::new(*ip, self.port).to_string(),
            Host::Name(name) => format!("{name}:{}", self.port),
        }
    }

    /// Whether a redirect from `other` to this URL stays on the same host.
    pub(super) fn has_host_of(&self, other: &Self) -> bool {
        match (&self.host, &other.host) {
            (Host::Name(a), Host::Name(b)) => a.eq_ignore_ascii_case(b),
            (a, b) => a == b,
        }
    }

    /// Resolves the `Location` of a response to this URL.
    pub(super) fn redirect(&self, location: &str) -> Result<Redirect, BadLocation> {
        let location = location.split('#').next().unwrap_or_default();
        let (scheme, rest) = match scheme(location) {
            Some(("http", rest)) => (Scheme::Http, rest),
            Some(("https", rest)) => (Scheme::Https, rest),
            Some(_) => return Err(BadLocation),
            None => (self.scheme, location),
        };
        let is_absolute = rest.len() < location.len();
        if let Some(rest) = rest.strip_prefix("//") {
            let end = rest.find(['/', '?']).unwrap_or(rest.len());
            let (authority, target) = rest.split_at(end);
            let (host, port) = host_and_port(authority)?;
            let url = Self {
                scheme,
                host,
                port: port.unwrap_or(scheme.port()),
                target: encode(&without_dots(target)),
            };
            return Ok(Redirect { url, is_absolute });
        }
        if is_absolute {
            return Err(BadLocation);
        }
        let own = &self.target;
        let (path, _) = own.split_once('?').unwrap_or((own, ""));
        let target = match rest.as_bytes().first() {
            None => own.clone(),
            Some(b'/') => rest.to_owned(),
            Some(b'?') => format!("{path}{rest}"),
            Some(_) => {
                let folder = path.rfind('/').map_or("/", |slash| &path[..=slash]);
                format!("{folder}{rest}")
            }
        };
        let url = Self {
            target: encode(&without_dots(&target)),
            ..self.clone()
        };
        Ok(Redirect { url, is_absolute })
    }
}

/// Converts a manifest's path to a request target: a query stays a query, a fragment is dropped, and a path that is not
/// a valid URL is encoded byte by byte.
pub(super) fn target(path: &str) -> String {
    let is_url = !path.bytes().any(|byte| byte.is_ascii_control())
        && is_encoded(path.split(['?', '#']).next().unwrap_or_default());
    if !is_url {
        let slash = if path.starts_with('/') { "" } else { "/" };
        return format!("{slash}{}", utf8_percent_encode(path, RAW_PATH));
    }
    let path = path.split('#').next().unwrap_or_default();
    let rest = match scheme(path) {
        Some((_, rest)) if rest.starts_with("//") => rest,
        _ => path,
    };
    // A host in the path does not replace the target's host.
    let rest = match rest.strip_prefix("//") {
        Some(rest) => &rest[rest.find(['/', '?']).unwrap_or(rest.len())..],
        None => rest,
    };
    encode(rest)
}

/// Path and query, with a leading slash and invalid characters encoded.
fn encode(target: &str) -> String {
    let (path, query) = match target.split_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (target, None),
    };
    let set = if is_encoded(path) { PATH } else { RAW_PATH };
    let slash = if path.starts_with('/') { "" } else { "/" };
    let mut encoded = format!("{slash}{}", utf8_percent_encode(path, set));
    if let Some(query) = query {
        encoded.push('?');
        encoded.extend(utf8_percent_encode(query, QUERY));
    }
    encoded
}

/// Whether each percent sign starts an encoded byte.
fn is_encoded(path: &str) -> bool {
    path.split('%').skip(1).all(|rest| {
        let digits = rest.as_bytes().get(..2);
        digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    })
}

/// Splits a URL into its scheme, in lower case, and the part after the colon.
fn scheme(url: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = url.split_once(':')?;
    let is_one = scheme.starts_with(|first: char| first.is_ascii_alphabetic())
        && scheme
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte));
    let known = ["http", "https"];
    let known = known
        .into_iter()
        .find(|known| known.eq_ignore_ascii_case(scheme));
    is_one.then_some((known.unwrap_or(scheme), rest))
}

fn host_and_port(authority: &str) -> Result<(Host, Option<u16>), BadLocation> {
    let authority = authority.rsplit('@').next().unwrap_or_default();
    let after_host = authority.rfind(']').unwrap_or(0);
    let (host, port) = match authority[after_host..].rfind(':') {
        None => (authority, ""),
        Some(colon) => {
            let colon = after_host + colon;
            (&authority[..colon], &authority[colon + 1..])
        }
    };
    if host.is_empty() {
        return Err(BadLocation);
    }
    let host = host.parse().unwrap_or_else(|never| match never {});
    let port = match port {
        "" => None,
        port => Some(port.parse().map_err(|_| BadLocation)?),
    };
    Ok((host, port))
}

/// Removes dot segments from the path (RFC 3986, 5.2.4); keeps the query.
fn without_dots(target: &str) -> Cow<'_, str> {
    let (path, query) = target.split_at(target.find('?').unwrap_or(target.len()));
    if !path.split('/').any(|step| step == "." || step == "..") {
        return Cow::Borrowed(target);
    }
    let mut steps = Vec::new();
    let mut is_folder = false;
    for step in path.split('/').skip(1) {
        is_folder = matches!(step, "." | "..");
        match step {
            "." => {}
            ".." => {
                steps.pop();
            }
            step => steps.push(step),
        }
    }
    let mut short = String::with_capacity(target.len());
    for step in &steps {
        short.push('/');
        short.push_str(step);
    }
    if is_folder || steps.is_empty() {
        short.push('/');
    }
    short.push_str(query);
    Cow::Owned(short)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(target: &str) -> Url {
        Url {
            scheme: Scheme::Http,
            host: Host::Ip([10, 0, 0, 1].into()),
            port: 8080,
            target: target.to_owned(),
        }
    }

    #[test]
    fn paths_become_targets() {
        for (path, expected) in [
            ("", "/"),
            ("/", "/"),
            ("healthz", "/healthz"),
            ("/healthz?verbose=1&a=b", "/healthz?verbose=1&a=b"),
            ("?a=b", "/?a=b"),
            ("/a#b", "/a"),
            ("/a b", "/a%20b"),
            ("/a%20b", "/a%20b"),
            ("/%zz?a", "/%25zz%3Fa"),
            ("/a\nb?c", "/a%0Ab%3Fc"),
            ("http://other/x?y", "/x?y"),
            ("//other/x", "/x"),
            ("/ü", "/%C3%BC"),
        ] {
            assert_eq!(target(path), expected, "{path:?}");
        }
    }

    #[test]
    fn redirects_lead_to_urls() {
        let base = url("/a/b?c=d");
        for (location, expected) in [
            ("", "/a/b?c=d"),
            ("/x", "/x"),
            ("x?y", "/a/x?y"),
            ("?y", "/a/b?y"),
            ("../x", "/x"),
            ("../../x/./y/..", "/x/"),
            ("/x#y", "/x"),
        ] {
            let redirect = base.redirect(location).unwrap();
            assert_eq!(redirect.url, url(expected), "{location:?}");
            assert!(!redirect.is_absolute);
        }
        let redirect = base.redirect("https://10.0.0.1/x").unwrap();
        assert!(redirect.is_absolute && redirect.url.has_host_of(&base));
        assert_eq!(
            (redirect.url.scheme, redirect.url.port),
            (Scheme::Https, 443)
        );
        let redirect = base.redirect("//user:word@[fd00::1]:81?x").unwrap();
        assert_eq!(redirect.url.authority(), "[fd00::1]:81");
        assert_eq!(redirect.url.target, "/?x");
        assert!(!redirect.url.has_host_of(&base));
        for bad in [
            "ftp://10.0.0.1/",
            "http:x",
            "http://",
            "http://a:b",
            "http://a:70000",
        ] {
            assert_eq!(base.redirect(bad), Err(BadLocation), "{bad}");
        }
    }
}
