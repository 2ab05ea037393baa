//! Responses to `GET /hello` like an agent's, with keys that a test chooses.

use health_mesh::proof::{self, AUTH_HEADER, Answer, HelloKeys};

/// Returns the head of a valid response from the requested node to an agent's request, or `None` if the request was not
/// authenticated with these keys.
pub fn answer(keys: &HelloKeys, request: &[u8]) -> Option<Vec<u8>> {
    let request = std::str::from_utf8(request).ok()?;
    let value = |name: &str| {
        let mut headers = request
            .split("\r\n")
            .filter_map(|line| line.split_once(": "));
        headers
            .find(|(given, _)| *given == name)
            .map(|(_, value)| value)
    };
    let prober = value("health-prober").unwrap_or_default();
    let verified = keys.verify_request(value(AUTH_HEADER)?.as_bytes(), prober.as_bytes())?;
    let answer = Answer {
        time: proof::now(),
        status: 200,
        node: verified.request.asked,
    };
    let auth = keys.answer(&verified, &answer, [b""; 3]);
    let head = format!(
        "HTTP/1.1 200 OK\r\n{AUTH_HEADER}: {auth}\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
    );
    Some(head.into_bytes())
}
