//! Authenticates both sides of `GET /hello`: each proves with a message authentication code that it holds the mesh key.
//! `docs/mesh-key.md` describes the format.
//!
//! A code is the first half of an HMAC-SHA256. It covers the preceding fields of its header, and the values of other
//! headers, each preceded by a line feed; no header contains a line feed.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ring::hmac;

/// Header of a request and of its answer; ends with the code.
pub const AUTH_HEADER: &str = "health-auth";
/// Answer header that says why an authentic request is refused.
pub(crate) const REASON_HEADER: &str = "health-reason";
/// Value of [`REASON_HEADER`]: the clocks differ by more than [`CLOCK_WINDOW`].
pub(crate) const REASON_CLOCK: &str = "clock";

/// A request is refused if its time stamp differs from the asked node's clock by more than this.
pub(crate) const CLOCK_WINDOW: Duration = Duration::from_secs(300);

/// First field of a request's and of an answer's header.
const REQUEST: &str = "request/1";
const ANSWER: &str = "answer/1";
/// Number of digits of a nonce or code: 128 bits in lower-case hexadecimal.
const HEX_LEN: usize = 32;
/// Label for key derivation, and the secret that is used without a key file.
const LABEL: &[u8] = b"health-agent hello key";
pub(super) const PUBLIC_SECRET: &[u8] = b"health-agent-key";

/// Identifies one of a node's keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KeyAge {
    /// The key that it signs its requests with.
    #[default]
    Current,
    /// The key that it signed its requests with before.
    Previous,
    /// The key that it will sign its requests with.
    Next,
}

impl KeyAge {
    const ALL: [Self; 3] = [Self::Current, Self::Previous, Self::Next];

    const fn word(self) -> &'static str {
        match self {
            Self::Current => "current",
            Self::Previous => "previous",
            Self::Next => "next",
        }
    }
}

/// The mesh keys that a node holds, ready for use.
#[derive(Clone, Debug)]
pub struct HelloKeys {
    current: hmac::Key,
    /// A second accepted key.
    other: Option<(KeyAge, hmac::Key)>,
    is_public: bool,
    other_is_public: bool,
}

impl Default for HelloKeys {
    /// The publicly known key of a mesh without a key file.
    fn default() -> Self {
        Self::new(PUBLIC_SECRET, None)
    }
}

impl HelloKeys {
    /// Derives the keys from secrets: one to sign with, and another one to accept.
    pub fn new(current: &[u8], other: Option<(KeyAge, &[u8])>) -> Self {
        let is_public = |secret| secret == PUBLIC_SECRET;
        Self {
            current: derived(current),
            other: other.map(|(age, secret)| (age, derived(secret))),
            is_public: is_public(current),
            other_is_public: other.is_some_and(|(_, secret)| is_public(secret)),
        }
    }

    /// Whether the signing key is publicly known.
    pub fn is_public(&self) -> bool {
        self.is_public
    }

    /// Whether the other key is publicly known.
    pub fn other_is_public(&self) -> bool {
        self.other_is_public
    }

    /// Whether one of the keys is publicly known, so that anyone can answer for a peer.
    pub fn accepts_public(&self) -> bool {
        self.is_public || self.other_is_public
    }

    /// Which key is accepted besides the current one.
    pub fn other(&self) -> Option<KeyAge> {
        self.other.as_ref().map(|(age, _)| *age)
    }

    /// Appends the value of a request's [`AUTH_HEADER`]. `covered` is the value of the header that says whose probes to
    /// count.
    pub(crate) fn write_request(&self, out: &mut Vec<u8>, request: &Request<'_>, covered: &[u8]) {
        let begin = out.len();
        push(out, &[REQUEST.as_bytes(), b" "]);
        push_hex(out, request.nonce);
        let mut time = itoa::Buffer::new();
        push(
            out,
            &[
                b" ",
                time.format(request.time).as_bytes(),
                b" ",
                request.asker.as_bytes(),
                b" ",
                request.asked.as_bytes(),
                b" ",
                request.address.as_bytes(),
            ],
        );
        let code = code(&self.current, &out[begin..], &[covered]);
        out.push(b' ');
        push_hex(out, code);
    }

    /// Parses and verifies a request's [`AUTH_HEADER`]; `None` unless it was made with one of these keys.
    pub fn verify_request<'a>(&self, value: &'a [u8], covered: &[u8]) -> Option<Verified<'a>> {
        let (text, given) = split_code(value)?;
        let mut fields = text.split(' ');
        let mut next = || fields.next();
        if next()? != REQUEST {
            return None;
        }
        let request = Request {
            nonce: parse_hex(next()?)?,
            time: parse_decimal(next()?)?,
            asker: next()?,
            asked: next()?,
            address: next()?,
        };
        if next().is_some() {
            return None;
        }
        let key = self.find(text, &[covered], given)?;
        Some(Verified { request, key })
    }

    /// The value of an answer's [`AUTH_HEADER`], made with the same key as the request. `covered` holds the values of
    /// the reason, health endpoint and arrivals headers, empty for a missing header.
    pub fn answer(
        &self,
        verified: &Verified<'_>,
        answer: &Answer<'_>,
        covered: [&[u8]; 3],
    ) -> String {
        let key = match &self.other {
            Some((age, key)) if *age == verified.key => key,
            _ => &self.current,
        };
        let Answer { time, status, node } = answer;
        let nonce = verified.request.nonce;
        let word = verified.key.word();
        let text = format!("{ANSWER} {nonce:032x} {time} {word} {status} {node}");
        let code = code(key, text.as_bytes(), &covered);
        format!("{text} {code:032x}")
    }

    /// Parses and verifies the [`AUTH_HEADER`] of the answer to the request with this nonce. `covered` is as in
    /// [`Self::answer`].
    pub(crate) fn verify_answer<'a>(
        &self,
        nonce: u128,
        value: &'a [u8],
        covered: [&[u8]; 3],
    ) -> Result<(Answer<'a>, KeyAge), ProofError> {
        let parsed = split_code(value).and_then(|(text, code)| {
            let (answered, key, answer) = parse_answer(text)?;
            Some((text, code, answered, key, answer))
        });
        let (text, given, answered, key, answer) = parsed.ok_or(ProofError::Wrong)?;
        if answered == nonce {
            let is_right = code(&self.current, text.as_bytes(), &covered) ^ given == 0;
            return is_right.then_some((answer, key)).ok_or(ProofError::Wrong);
        }
        Err(match self.find(text, &covered, given) {
            Some(_) => ProofError::Replayed,
            None => ProofError::Wrong,
        })
    }

    /// Which key the code was made with. Compares in constant time.
    fn find(&self, text: &str, covered: &[&[u8]], given: u128) -> Option<KeyAge> {
        let fits = |key| code(key, text.as_bytes(), covered) ^ given == 0;
        if fits(&self.current) {
            return Some(KeyAge::Current);
        }
        let (age, key) = self.other.as_ref()?;
        fits(key).then_some(*age)
    }
}

/// The contents of a request's proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// Drawn at random for this request.
    pub nonce: u128,
    /// The asking node's clock: seconds since 1970.
    pub time: u64,
    /// Full name of the node that asks.
    pub asker: &'a str,
    /// Full name of the node that is asked.
    pub asked: &'a str,
    /// Address and port of the node that is asked.
    pub address: &'a str,
}

impl Request<'_> {
    /// Whether its time stamp is too far from `now` (in seconds since 1970).
    pub(crate) fn is_out_of_window(&self, now: u64) -> bool {
        now.abs_diff(self.time) > CLOCK_WINDOW.as_secs()
    }
}

/// A request from a holder of a mesh key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verified<'a> {
    /// The request.
    pub request: Request<'a>,
    /// The key that it was made with.
    pub key: KeyAge,
}

/// The contents of an answer's proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer<'a> {
    /// The answering node's clock: seconds since 1970.
    pub time: u64,
    /// The status of the response.
    pub status: u16,
    /// Full name of the node that answers.
    pub node: &'a str,
}

/// Why an answer is not from the asked node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProofError {
    /// Made with none of the keys, or altered.
    Wrong,
    /// Made with a mesh key, but for another request.
    Replayed,
}

/// The current time in seconds since 1970.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_secs()
}

fn derived(secret: &[u8]) -> hmac::Key {
    // RFC 5869 section 2.2: turns keys of any length and form into uniformly random ones.
    let label = hmac::Key::new(hmac::HMAC_SHA256, LABEL);
    hmac::Key::new(hmac::HMAC_SHA256, hmac::sign(&label, secret).as_ref())
}

fn code(key: &hmac::Key, text: &[u8], covered: &[&[u8]]) -> u128 {
    let mut context = hmac::Context::with_key(key);
    context.update(text);
    for value in covered {
        context.update(b"\n");
        context.update(value);
    }
    let tag = context.sign();
    let bytes = tag.as_ref().iter().take(16);
    bytes.fold(0, |number, &byte| number << 8 | u128::from(byte))
}

/// The fields before the code, and the code.
fn split_code(value: &[u8]) -> Option<(&str, u128)> {
    let (text, code) = std::str::from_utf8(value).ok()?.rsplit_once(' ')?;
    Some((text, parse_hex(code)?))
}

fn parse_answer(text: &str) -> Option<(u128, KeyAge, Answer<'_>)> {
    let mut fields = text.split(' ');
    let mut next = || fields.next();
    if next()? != ANSWER {
        return None;
    }
    let nonce = parse_hex(next()?)?;
    let time = parse_decimal(next()?)?;
    let word = next()?;
    let key = KeyAge::ALL.into_iter().find(|age| age.word() == word)?;
    let status = parse_decimal(next()?)?.try_into().ok()?;
    let node = next()?;
    let answer = Answer { time, status, node };
    next().is_none().then_some((nonce, key, answer))
}

fn parse_hex(text: &str) -> Option<u128> {
    let is_hex = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let is_number = text.len() == HEX_LEN && text.bytes().all(is_hex);
    is_number.then(|| u128::from_str_radix(text, 16).ok())?
}

fn parse_decimal(text: &str) -> Option<u64> {
    // `parse` would accept a sign.
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().ok())?
}

fn push(out: &mut Vec<u8>, parts: &[&[u8]]) {
    for part in parts {
        out.extend_from_slice(part);
    }
}

/// Appends a number in hexadecimal. Called twice per probe: the standard library's formatting takes several times as
/// long.
fn push_hex(out: &mut Vec<u8>, number: u128) {
    let digits = number.to_be_bytes().map(|byte| {
        let digit = |half: u8| b"0123456789abcdef"[usize::from(half)];
        [digit(byte >> 4), digit(byte & 0xf)]
    });
    out.extend_from_slice(digits.as_flattened());
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PROBER: &[u8] = b"1a2b3c4d-5e6f";
    const NONCE: u128 = 0x000102030405060708090a0b0c0d0e0f;
    const TIME: u64 = 1_795_415_000;
    const REQUEST_VALUE: &str = "request/1 000102030405060708090a0b0c0d0e0f 1795415000 default/a \
                                 default/b 192.0.2.2:4240";

    fn request() -> Request<'static> {
        Request {
            nonce: NONCE,
            time: TIME,
            asker: "default/a",
            asked: "default/b",
            address: "192.0.2.2:4240",
        }
    }

    fn signed(keys: &HelloKeys) -> Vec<u8> {
        let mut value = Vec::new();
        keys.write_request(&mut value, &request(), PROBER);
        value
    }

    fn secret() -> [u8; 32] {
        std::array::from_fn(|i| i as u8)
    }

    const COVERED: [&[u8]; 3] = [
        b"",
        b"10.244.2.7, fd00:10:244:2::7",
        b"7 60 58 46 46 0 0 9 1",
    ];

    fn answered(keys: &HelloKeys, request: &[u8]) -> String {
        let verified = keys.verify_request(request, PROBER).unwrap();
        let answer = Answer {
            time: TIME + 1,
            status: 200,
            node: "default/b",
        };
        keys.answer(&verified, &answer, COVERED)
    }

    /// As in `docs/mesh-key.md`, made with `openssl dgst -sha256 -mac HMAC`.
    #[test]
    fn the_documented_vectors_hold() {
        for (keys, request_code, answer_code) in [
            (
                HelloKeys::default(),
                "e372eb8820f0c966c5c4dc388a3aacf2",
                "92f3555fd09eb461c10854b2fccefe22",
            ),
            (
                HelloKeys::new(&secret(), None),
                "4bbc00bd1e90b620a6bc94a83bd2bf41",
                "987a3746d5058013b52fb5e78d8ee71f",
            ),
        ] {
            let request = signed(&keys);
            let expected = format!("{REQUEST_VALUE} {request_code}");
            assert_eq!(String::from_utf8_lossy(&request), expected);
            let expected = format!(
                "answer/1 000102030405060708090a0b0c0d0e0f 1795415001 current 200 default/b \
                 {answer_code}"
            );
            assert_eq!(answered(&keys, &request), expected);
            let document = include_str!("../../../docs/mesh-key.md");
            assert!(document.contains(request_code) && document.contains(answer_code));
        }
    }

    #[test]
    fn only_a_key_of_the_mesh_makes_a_request() {
        let keys = HelloKeys::new(&secret(), None);
        let value = signed(&keys);
        let verified = keys.verify_request(&value, PROBER).unwrap();
        assert_eq!(
            (verified.request, verified.key),
            (request(), KeyAge::Current)
        );
        assert!(keys.verify_request(&value, b"1a2b3c4d-5e70").is_none());
        assert!(
            HelloKeys::default()
                .verify_request(&value, PROBER)
                .is_none()
        );
        for at in 0..value.len() {
            let mut altered = value.clone();
            altered[at] ^= 1;
            assert!(keys.verify_request(&altered, PROBER).is_none(), "{at}");
        }
    }

    #[test]
    fn a_second_key_is_accepted_and_answered_with() {
        let (old, new) = (&[1; 16][..], &[2; 16][..]);
        let first = HelloKeys::new(old, None);
        let before = HelloKeys::new(old, Some((KeyAge::Next, new)));
        let after = HelloKeys::new(new, Some((KeyAge::Previous, old)));
        let last = HelloKeys::new(new, None);
        for (asker, asked, expected) in [
            (&first, &before, Some(KeyAge::Current)),
            (&before, &first, Some(KeyAge::Current)),
            (&before, &after, Some(KeyAge::Previous)),
            (&after, &before, Some(KeyAge::Next)),
            (&after, &last, Some(KeyAge::Current)),
            (&last, &after, Some(KeyAge::Current)),
            (&first, &after, Some(KeyAge::Previous)),
            (&after, &first, None),
            (&first, &last, None),
        ] {
            let value = signed(asker);
            let verified = asked.verify_request(&value, PROBER);
            assert_eq!(verified.map(|verified| verified.key), expected);
            if let Some(age) = expected {
                let answer = answered(asked, &value);
                let verified = asker.verify_answer(NONCE, answer.as_bytes(), COVERED);
                assert_eq!(verified.unwrap().1, age);
            }
        }
    }

    #[test]
    fn an_answer_is_the_asked_nodes_or_none() {
        let keys = HelloKeys::new(&secret(), Some((KeyAge::Previous, &[1; 16])));
        let value = answered(&keys, &signed(&keys));
        let value = value.as_bytes();
        let (answer, key) = keys.verify_answer(NONCE, value, COVERED).unwrap();
        assert_eq!((answer.status, answer.node), (200, "default/b"));
        assert_eq!((answer.time, key), (TIME + 1, KeyAge::Current));
        for (at, _) in COVERED.iter().enumerate() {
            let mut covered = COVERED;
            covered[at] = b"10.244.2.8";
            let verified = keys.verify_answer(NONCE, value, covered);
            assert_eq!(verified, Err(ProofError::Wrong));
        }
        for at in 0..value.len() {
            let mut altered = value.to_vec();
            altered[at] ^= 1;
            let verified = keys.verify_answer(NONCE, &altered, COVERED);
            assert_eq!(verified, Err(ProofError::Wrong), "{at}");
        }
    }

    #[test]
    fn an_answer_to_another_request_is_a_replay() {
        let keys = HelloKeys::new(&[2; 16], Some((KeyAge::Previous, &[1; 16])));
        for of in [&keys, &HelloKeys::new(&[1; 16], None)] {
            let value = answered(of, &signed(of));
            let verified = keys.verify_answer(NONCE + 1, value.as_bytes(), COVERED);
            assert_eq!(verified, Err(ProofError::Replayed));
        }
        let stranger = HelloKeys::default();
        let value = answered(&stranger, &signed(&stranger));
        let verified = keys.verify_answer(NONCE + 1, value.as_bytes(), COVERED);
        assert_eq!(verified, Err(ProofError::Wrong));
        // A request is not an answer.
        let value = signed(&keys);
        let verified = keys.verify_answer(NONCE, &value, COVERED);
        assert_eq!(verified, Err(ProofError::Wrong));
    }

    #[test]
    fn a_time_stamp_has_a_window_on_both_sides() {
        let window = CLOCK_WINDOW.as_secs();
        for (now, is_out) in [
            (TIME, false),
            (TIME + window, false),
            (TIME - window, false),
            (TIME + window + 1, true),
            (TIME - window - 1, true),
            (TIME + 86_400, true),
            (0, true),
            (u64::MAX, true),
        ] {
            assert_eq!(request().is_out_of_window(now), is_out, "{now}");
        }
    }

    proptest! {
        #[test]
        fn no_value_panics(value in prop::collection::vec(any::<u8>(), 0..200)) {
            let keys = HelloKeys::default();
            prop_assert!(keys.verify_request(&value, PROBER).is_none());
            prop_assert!(keys.verify_answer(NONCE, &value, COVERED).is_err());
        }

        #[test]
        fn numbers_are_written_as_they_are_read(number: u64, nonce: u128) {
            let request = Request { nonce, time: number, ..request() };
            let keys = HelloKeys::default();
            let mut out = Vec::new();
            keys.write_request(&mut out, &request, PROBER);
            let begin = format!("request/1 {nonce:032x} {number} ");
            prop_assert!(out.starts_with(begin.as_bytes()));
            let verified = keys.verify_request(&out, PROBER);
            prop_assert_eq!(verified.map(|verified| verified.request), Some(request));
        }
    }
}
