//! pdpd in front of a mux that may answer anything. Each call ends with a descriptive
//! error, uses no more memory than an answer may, and leaves nothing open.
//! `crates/proto/src/channel.rs` tests that no answer delays a call beyond its limit.

use std::fs;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use pdp_model::{ExternalStats, REASONS_MAX, Stats};
use pdp_proto::channel::{Channel, DESCRIPTORS_MAX, FRAME_BYTES_MAX};
use pdp_proto::mux;
use pdpd::host::control::{ControlError, MuxClient};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// Serializes tests that look at resources of the whole process.
static ONE: Mutex<()> = Mutex::new(());

fn one() -> MutexGuard<'static, ()> {
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A mux that takes one request, sends a given answer, and then nothing more.
struct Fake {
    mux: MuxClient,
    thread: Option<JoinHandle<()>>,
    _directory: tempfile::TempDir,
}

impl Fake {
    fn new(answer: impl FnOnce(UnixStream) + Send + 'static) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let thread = Some(std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut channel = Channel::new(stream.try_clone().unwrap());
            channel.receive::<mux::MuxRequest>().unwrap().expect("a request");
            // pdpd may disconnect before the whole answer is sent.
            answer(stream.try_clone().unwrap());
            let _ = channel.receive::<mux::MuxRequest>();
        }));
        Self { mux: MuxClient { path }, thread, _directory: directory }
    }

    /// Sends these bytes.
    fn answering(bytes: impl Into<Vec<u8>>) -> Self {
        let bytes = bytes.into();
        Self::new(move |mut stream| drop(stream.write_all(&bytes)))
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking());
    }
}

fn frame(text: &[u8]) -> Vec<u8> {
    pdp_proto::channel::frame(text).unwrap()
}

fn port() -> mux::PortName {
    mux::PortName { vnet: "red".into(), node: "r1".into(), port: "eth0".into() }
}

fn vnet() -> mux::VnetConfig {
    mux::VnetConfig { name: "red".into(), police: None, nodes: Vec::new(), vlinks: Vec::new() }
}

/// A call, and the answer that it accepts.
type Call = (&'static str, fn(&MuxClient) -> Result<(), ControlError>);

const CALLS: [Call; 7] = [
    ("Hello", |mux| mux.hello().map(drop)),
    ("Done, Lacks", |mux| mux.put_vnet(vnet()).map(drop)),
    ("Done", |mux| mux.delete_vnet("red")),
    ("Done", |mux| mux.listen(vec![PathBuf::from("/x")], &[])),
    ("Stats", |mux| mux.stats(None).map(drop)),
    ("Done", |mux| mux.capture(port(), 0, None, fs::File::open("/dev/null").unwrap().as_fd())),
    ("Traced", |mux| mux.trace(port(), Vec::new(), None, Duration::from_millis(1)).map(drop)),
];

#[test]
fn mismatched_mux_reply_is_a_clear_error() {
    let _one = one();
    // One answer of each kind.
    let kept = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/kept");
    let kept = fs::read_to_string(format!("{kept}/mux-{}.txt", mux::VERSION)).unwrap();
    for answer in kept.lines().filter_map(|line| line.strip_prefix("< ")) {
        let kind = answer.split('"').nth(1).unwrap();
        for (number, (fits, call)) in CALLS.iter().enumerate() {
            let fake = Fake::answering(frame(answer.as_bytes()));
            let result = call(&fake.mux);
            match &result {
                Ok(()) => assert!(fits.contains(kind), "{number}: {kind}"),
                // The Hello answer comes with a descriptor.
                Err(ControlError::Refused { .. }) => {
                    assert!(kind == "Failed" || kind == "Hello" && *fits == "Hello", "{number}");
                }
                Err(error) => {
                    assert!(!fits.contains(kind), "{number}: {kind}: {error}");
                    assert!(error.is_nonsense_of_mux(), "{number}: {error}");
                    assert!(error.to_string().contains("unexpected answer to"), "{error}");
                }
            }
        }
    }
}

/// Counters with this many reasons of drops.
fn reasons(count: usize) -> Vec<u8> {
    let dropped = (0..count).map(|number| (number.to_string(), number as u64)).collect();
    let external = ExternalStats { dropped, ..Default::default() };
    let stats = Stats { externals: [("A".into(), external)].into(), ..Default::default() };
    frame(&serde_json::to_vec(&mux::MuxReply::Stats(Box::new(stats))).unwrap())
}

#[test]
fn garbage_replies_are_refused_before_allocation() {
    let _one = one();
    let deep = [vec![b'['; 1 << 20], br#"{"Stats":"#.repeat(100_000)].map(|text| frame(&text));
    let garbage: Vec<Vec<u8>> = vec![
        vec![0xff; 64],
        vec![0; 4],
        (FRAME_BYTES_MAX as u32 + 1).to_le_bytes().into(),
        frame(b"\xff\xfe\x00"),
        frame(br#"{"Hello":{"version":2}}"#),
        frame(br#"{"Hello":{"version":4294967296,"externals":[],"vnets":[]}}"#),
        frame(br#"{"Stats":{"externals":{},"vnets":{},"workers":{}}}"#),
        frame(br#""Done" "Done""#),
        reasons(REASONS_MAX + 1),
    ];
    assert!(CALLS[4].1(&Fake::answering(reasons(REASONS_MAX)).mux).is_ok());
    for bytes in garbage.into_iter().chain(deep) {
        for (number, (_, call)) in CALLS.iter().enumerate() {
            let fake = Fake::answering(&bytes[..]);
            let error = call(&fake.mux).unwrap_err();
            assert!(error.is_nonsense_of_mux(), "{number}: {error:?}");
        }
    }
    // An announced length alone reserves no memory. Answers other than
    // counters have a low limit, and counters that of a frame.
    let whole = |length: usize| {
        let text = br#"{"Hello":{"version":2,"vnets":[],"externals":["#;
        let mut bytes = (length as u32).to_le_bytes().to_vec();
        bytes.extend(text);
        while bytes.len() < length {
            bytes.extend(br#""","#);
        }
        bytes
    };
    for (length, bytes) in
        [(FRAME_BYTES_MAX, 100), (FRAME_BYTES_MAX, FRAME_BYTES_MAX), (5 << 20, 5 << 20)]
    {
        let part = whole(length)[..bytes].to_vec();
        let fake = Fake::answering(part);
        let before = peak(true);
        let error = fake.mux.hello().unwrap_err();
        let more = peak(false).saturating_sub(before);
        assert!(error.is_nonsense_of_mux(), "{error:?}");
        assert!(more < 4 << 20, "{bytes} of {length} took {more} bytes");
    }
    // A connection that ends in the middle is no nonsense: the mux died.
    let fake = Fake::new(|mut stream| {
        let _ = stream.write_all(&100u32.to_le_bytes());
        let _ = stream.shutdown(std::net::Shutdown::Both);
    });
    let error = fake.mux.hello().unwrap_err();
    assert!(!error.is_nonsense_of_mux() && !error.is_timeout(), "{error:?}");
}

/// Returns the peak memory of this process, bytes. With `anew` it is measured from now on.
fn peak(anew: bool) -> u64 {
    if anew {
        // proc(5): this resets the peak.
        fs::write("/proc/self/clear_refs", "5").unwrap();
    }
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn surplus_descriptors_are_closed() {
    let _one = one();
    let hello = format!(r#"{{"Hello":{{"version":{},"externals":[],"vnets":[]}}}}"#, mux::VERSION);
    let hello = hello.as_bytes();
    let done = br#""Done""#;
    let before = descriptors();
    // More descriptors than one frame may have come with several bytes.
    for count in [0, 1, 2, 250, DESCRIPTORS_MAX + 50] {
        for (text, call) in [(hello, CALLS[0].1), (&done[..], CALLS[2].1)] {
            let bytes = frame(text);
            let fake = Fake::new(move |stream| {
                let file = fs::File::open("/dev/null").unwrap();
                let files = vec![file.as_fd(); count];
                let mut rest = &bytes[..];
                for lot in files.chunks(100) {
                    let mut space = vec![std::mem::MaybeUninit::uninit(); 4096];
                    let mut control = SendAncillaryBuffer::new(&mut space);
                    assert!(control.push(SendAncillaryMessage::ScmRights(lot)));
                    let part = [std::io::IoSlice::new(&rest[..1])];
                    if sendmsg(&stream, &part, &mut control, SendFlags::NOSIGNAL).is_err() {
                        return;
                    }
                    rest = &rest[1..];
                }
                let _ = (&stream).write_all(rest);
            });
            let result = call(&fake.mux);
            let is_hello = text == hello;
            match count {
                // If this process has no free descriptor for it, another mux would not help.
                0 if is_hello => {
                    let error = result.unwrap_err();
                    assert!(matches!(error, ControlError::Refused { .. }), "{error:?}");
                }
                count if count > DESCRIPTORS_MAX => {
                    assert!(result.unwrap_err().is_nonsense_of_mux());
                }
                _ => result.unwrap(),
            }
            drop(fake);
            assert_eq!(descriptors(), before, "{count} came with {}", text.len());
        }
    }
}
