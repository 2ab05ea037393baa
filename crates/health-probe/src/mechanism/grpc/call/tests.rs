use proptest::prelude::*;

use super::*;

const REQUEST: Request<'static> = Request {
    is_tls: false,
    path: "/a/B",
    authority: "127.0.0.1:1",
    user_agent: "test",
    timeout_ms: 1000,
    message: &[0, 0, 0, 0, 0],
};

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    push(&mut bytes, kind, flags, stream, payload);
    bytes
}

fn settings() -> Vec<u8> {
    frame(frame::SETTINGS, 0, 0, &[])
}

/// The headers of a gRPC response with status 200.
fn head() -> Vec<u8> {
    let mut block = vec![0x88];
    pack(&mut block, Ok(31), "application/grpc");
    block
}

fn trailers() -> Vec<u8> {
    let mut block = Vec::new();
    pack(&mut block, Err("grpc-status"), "0");
    block
}

fn expected() -> Answer {
    Answer {
        status: b"200".to_vec(),
        content_type: Some(b"application/grpc".to_vec()),
        grpc_status: Some(b"0".to_vec()),
        reply: b"reply".to_vec(),
    }
}

/// The result of a call whose response arrives in these pieces.
fn call(pieces: &[&[u8]]) -> Option<Result<Answer, String>> {
    let mut call = Call::new(&REQUEST);
    let mut received = pieces.iter().filter_map(|piece| call.receive(piece));
    let first = received.next()?;
    Some(first.map_err(|error| error.to_string()))
}

fn whole(flags: u8) -> Vec<u8> {
    let padded = |payload: &[u8]| match flags & flag::PADDED {
        0 => payload.to_vec(),
        _ => [&[3][..], payload, &[0; 3]].concat(),
    };
    [
        settings(),
        frame(8, 0, 0, &[0, 0, 1, 0]),
        frame(frame::PING, 0, 0, &[1; 8]),
        frame(0x77, 0xff, 5, b"unknown"),
        frame(
            frame::HEADERS,
            flag::END_HEADERS,
            STREAM,
            &[0x08, 3, b'1', b'0', b'3'],
        ),
        frame(
            frame::HEADERS,
            flag::END_HEADERS | flags,
            STREAM,
            &padded(&head()),
        ),
        frame(frame::DATA, flags, STREAM, &padded(b"re")),
        frame(frame::DATA, flags, STREAM, &padded(b"ply")),
        frame(frame::GOAWAY, 0, 0, &[0, 0, 0, 1, 0, 0, 0, 0]),
        frame(frame::HEADERS, flag::END_STREAM, STREAM, &trailers()[..4]),
        frame(frame::CONTINUATION, 0, STREAM, &trailers()[4..6]),
        frame(
            frame::CONTINUATION,
            flag::END_HEADERS,
            STREAM,
            &trailers()[6..],
        ),
    ]
    .concat()
}

#[test]
fn an_answer_is_read_however_it_is_cut() {
    for flags in [0, flag::PADDED] {
        let answer = whole(flags);
        assert_eq!(call(&[&answer]), Some(Ok(expected())));
        for cut in 1..answer.len() {
            let (a, b) = answer.split_at(cut);
            assert_eq!(call(&[a, b]), Some(Ok(expected())), "cut at {cut}");
            assert_eq!(call(&[a]), None, "cut at {cut}");
        }
        let bytes: Vec<&[u8]> = answer.chunks(1).collect();
        assert_eq!(call(&bytes), Some(Ok(expected())));
    }
}

#[test]
fn headers_alone_are_an_answer() {
    let block = [head(), trailers()].concat();
    let flags = flag::END_HEADERS | flag::END_STREAM;
    let answer = [settings(), frame(frame::HEADERS, flags, STREAM, &block)].concat();
    let expected = Answer {
        reply: Vec::new(),
        ..expected()
    };
    assert_eq!(call(&[&answer]), Some(Ok(expected)));
}

#[test]
fn how_a_call_ends_is_reported_at_its_end() {
    let block = [head(), trailers()].concat();
    let answer = [
        settings(),
        frame(frame::HEADERS, flag::END_HEADERS, STREAM, &block),
        frame(frame::DATA, flag::END_STREAM, STREAM, b"reply"),
    ];
    let expected = Answer {
        grpc_status: None,
        ..expected()
    };
    assert_eq!(call(&[&answer.concat()]), Some(Ok(expected)));
}

#[test]
fn announcements_and_trailers_change_nothing_of_the_first_headers() {
    let mut announcement = vec![0x08, 3, b'1', b'0', b'3'];
    pack(&mut announcement, Ok(31), "text/html");
    let mut end = trailers();
    pack(&mut end, Ok(31), "text/plain");
    let last = flag::END_HEADERS | flag::END_STREAM;
    let answer = [
        settings(),
        frame(frame::HEADERS, flag::END_HEADERS, STREAM, &announcement),
        frame(frame::HEADERS, flag::END_HEADERS, STREAM, &head()),
        frame(frame::DATA, 0, STREAM, b"reply"),
        frame(frame::HEADERS, last, STREAM, &end),
    ];
    assert_eq!(call(&[&answer.concat()]), Some(Ok(expected())));
}

#[test]
fn a_server_that_goes_away_may_answer_before() {
    let goaway = frame(frame::GOAWAY, 0, 0, &[0, 0, 0, 1, 0, 0, 0, 99]);
    let answer = whole(0);
    let (begun, rest) = answer.split_at(settings().len());
    assert_eq!(call(&[begun, &goaway, rest]), Some(Ok(expected())));
    let mut call = Call::new(&REQUEST);
    assert!(call.receive(&[begun, &goaway].concat()).is_none());
    let error = call.end(None).unwrap_err();
    assert_eq!(error.to_string(), "the server sent GOAWAY (error 99)");
}

#[test]
fn what_is_not_of_grpc_is_not_waited_for() {
    let mut html = vec![0x88];
    pack(&mut html, Ok(31), "text/html");
    let missing = vec![0x8d];
    for (block, status) in [(html, "200"), (missing, "404")] {
        let head = frame(frame::HEADERS, flag::END_HEADERS, STREAM, &block);
        let answer = call(&[&[settings(), head].concat()]);
        let answer = answer.expect("an end").expect("an answer");
        assert_eq!(answer.status, status.as_bytes());
        assert!(!answer.is_grpc());
    }
}

#[test]
fn settings_and_pings_are_acknowledged() {
    let mut call = Call::new(&REQUEST);
    assert!(call.to_write().starts_with(PREFACE));
    assert!(!call.has_heard());
    let ping = frame(frame::PING, 0, 0, b"12345678");
    assert!(call.receive(&[settings(), ping].concat()).is_none());
    assert!(call.has_heard());
    let acks = [
        frame(frame::SETTINGS, flag::ACK, 0, &[]),
        frame(frame::PING, flag::ACK, 0, b"12345678"),
    ];
    assert_eq!(call.to_write(), acks.concat());
    // Acknowledgements get no reply.
    assert!(call.receive(&acks.concat()).is_none());
    assert!(call.to_write().is_empty());
}

#[test]
fn large_requests_take_several_frames() {
    let path = "x".repeat(2 * FRAME_MAX);
    let mut call = Call::new(&Request {
        path: &path,
        message: &[0; FRAME_MAX + 1],
        ..REQUEST
    });
    let output = call.to_write();
    let mut bytes = &output[PREFACE.len()..];
    let mut kinds = Vec::new();
    while let Some((head, rest)) = bytes.split_at_checked(FRAME_HEAD) {
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        assert!(length <= FRAME_MAX);
        kinds.push((head[3], head[4]));
        bytes = &rest[length..];
    }
    assert_eq!(
        kinds,
        [
            (frame::SETTINGS, 0),
            (frame::HEADERS, 0),
            (frame::CONTINUATION, 0),
            (frame::CONTINUATION, flag::END_HEADERS),
            (frame::DATA, 0),
            (frame::DATA, flag::END_STREAM),
        ]
    );
}

#[test]
fn what_breaks_the_protocol_is_reported() {
    let begun = frame(frame::HEADERS, flag::END_HEADERS, STREAM, &head());
    let large = vec![0; REPLY_LIMIT + 1];
    let endless = frame(frame::CONTINUATION, 0, STREAM, &[0x88; FRAME_MAX]);
    for (frames, expected) in [
        (
            vec![b"HTTP/1.1 400 Bad Request\r\n".to_vec()],
            "the first frame is not SETTINGS",
        ),
        (
            vec![frame(frame::SETTINGS, flag::ACK, 0, &[])],
            "the first frame is not SETTINGS",
        ),
        (
            vec![settings(), vec![0, 0x40, 1, 0, 0, 0, 0, 0, 1]],
            "frame exceeds the maximum size",
        ),
        (
            vec![frame(frame::SETTINGS, 0, 0, &[0])],
            "invalid frame length for its type",
        ),
        (
            vec![settings(), frame(frame::PING, 0, 0, &[0])],
            "invalid frame length for its type",
        ),
        (
            vec![settings(), frame(frame::PING, 0, 1, &[0; 8])],
            "unexpected frame",
        ),
        (
            vec![settings(), frame(frame::DATA, 0, STREAM, b"x")],
            "unexpected frame",
        ),
        (
            vec![settings(), frame(frame::HEADERS, 4, 3, &head())],
            "unexpected frame",
        ),
        (
            vec![settings(), frame(frame::PUSH_PROMISE, 4, STREAM, &[0; 4])],
            "unexpected frame",
        ),
        (
            vec![settings(), frame(frame::CONTINUATION, 4, STREAM, &head())],
            "unexpected frame",
        ),
        (
            vec![settings(), begun.clone(), begun.clone()],
            "unexpected frame",
        ),
        (
            vec![
                settings(),
                frame(frame::HEADERS, 0, STREAM, &head()),
                frame(frame::PING, 0, 0, &[0; 8]),
            ],
            "unexpected frame",
        ),
        (
            vec![
                settings(),
                frame(
                    frame::HEADERS,
                    flag::END_HEADERS | flag::PADDED,
                    STREAM,
                    &[9, 0x88],
                ),
            ],
            "padding exceeds its frame",
        ),
        (
            vec![settings(), frame(frame::HEADERS, 4, STREAM, &[0x80])],
            "invalid HPACK table index",
        ),
        (
            vec![
                settings(),
                frame(frame::HEADERS, 0, STREAM, &head()),
                endless,
            ],
            "the headers are too large",
        ),
        (
            vec![
                settings(),
                begun.clone(),
                frame(frame::DATA, 0, STREAM, &large),
            ],
            "the response is too long",
        ),
        (
            vec![
                settings(),
                frame(frame::RST_STREAM, 0, STREAM, &[0, 0, 0, 7]),
            ],
            "the server reset the stream (REFUSED_STREAM)",
        ),
        (
            vec![
                settings(),
                frame(frame::GOAWAY, 0, 0, &[0, 0, 0, 0, 0, 0, 0, 0]),
            ],
            "the server sent GOAWAY (NO_ERROR)",
        ),
    ] {
        let bytes = frames.concat();
        assert_eq!(call(&[&bytes]), Some(Err(expected.to_owned())), "{bytes:?}");
    }
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), at in 0_usize..200, change in any::<u8>()) {
        let _ = call(&[&bytes]);
        let mut answer = whole(0);
        let at = at % answer.len();
        answer[at] = change;
        let _ = call(&[&answer]);
        let (a, b) = answer.split_at(at);
        // The result does not depend on how the response is split.
        prop_assert_eq!(call(&[a, b]), call(&[&answer]));
    }
}
