//! Messages between processes.

use std::fmt::Debug;

use pdp_api::exec;
use pdp_proto::channel::FrameReader;
use pdp_proto::routes::{self, BATCH_MAX, FromGuest, Messages, ToGuest};
use pdp_proto::{mirror, mux, tap};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::input::FuzzInput;

/// Longest frame that the tested reader accepts.
const FRAME_BYTES_MAX: usize = 4096;

/// A stream in pieces. Frames are the same however it is
/// cut, and each message is written back unchanged.
pub(crate) fn channel(bytes: &[u8]) {
    let mut input = FuzzInput(bytes);
    let cut = usize::from(input.byte()) + 1;
    let stream = input.0;
    let read = |cut: usize| {
        let mut reader = FrameReader::with_max(FRAME_BYTES_MAX);
        let mut frames = Vec::new();
        for piece in stream.chunks(cut) {
            reader.extend(piece);
            loop {
                match reader.next_frame() {
                    Ok(Some(frame)) => frames.push(frame.to_vec()),
                    Ok(None) => break,
                    Err(_) => return (frames, true),
                }
            }
        }
        (frames, false)
    };
    let (frames, refused) = read(stream.len().max(1));
    assert_eq!((&frames, refused), (&read(cut).0, read(cut).1));
    for frame in frames {
        assert!(frame.len() <= FRAME_BYTES_MAX);
        round_trip::<mux::MuxRequest>(&frame);
        round_trip::<mux::MuxReply>(&frame);
        round_trip::<tap::TapRequest>(&frame);
        round_trip::<tap::TapReply>(&frame);
        round_trip::<mirror::MirrorRequest>(&frame);
        round_trip::<mirror::MirrorReply>(&frame);
        round_trip::<mirror::MirrorConfig>(&frame);
    }
}

fn round_trip<M: Serialize + DeserializeOwned + Debug>(bytes: &[u8]) {
    if let Ok(message) = serde_json::from_slice::<M>(bytes) {
        let written = serde_json::to_string(&message).expect("text");
        let again: M = serde_json::from_str(&written).expect("what is written reads back");
        assert_eq!(serde_json::to_string(&again).expect("text"), written);
    }
}

/// Checks that decoding a batch at once and one message at a time gives the same.
pub(crate) fn batch<M>(payload: &[u8]) -> Vec<M>
where
    M: Serialize + DeserializeOwned + Debug + PartialEq,
{
    let mut messages = Messages::default();
    let mut single = Vec::new();
    let whole = messages.start(payload).and_then(|()| {
        while let Some(message) = messages.take::<M>()? {
            single.push(message);
        }
        Ok(())
    });
    assert!(single.len() <= BATCH_MAX);
    let batch = routes::decode::<M>(payload);
    assert_eq!(batch.is_ok(), whole.is_ok(), "{batch:?}, {whole:?}");
    if let Ok(batch) = batch {
        assert_eq!(batch, single);
        let written = routes::encode(&batch).expect("a frame");
        assert_eq!(routes::decode::<M>(&written[4..]).expect("reads back"), batch);
    }
    single
}

pub(crate) fn routes_from_guest(bytes: &[u8]) {
    batch::<FromGuest>(bytes);
    batch::<ToGuest>(bytes);
}

/// Messages between the two ends of an `exec`.
pub(crate) fn exec_frames(bytes: &[u8]) {
    thread_local! {
        static RUNTIME: tokio::runtime::Runtime =
            tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    }
    RUNTIME.with(|runtime| {
        runtime.block_on(async {
            let mut rest = bytes;
            loop {
                let before = rest;
                let Ok(Some(frame)) = exec::read_frame(&mut rest).await else { break };
                let taken = &before[..before.len() - rest.len()];
                assert_eq!(frame.emit(), taken, "what is read is written back");
            }
        });
    });
}
