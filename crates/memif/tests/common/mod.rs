//! A connected pair of our own two sides.

use std::path::Path;
use std::time::{Duration, Instant};

use pdp_memif::{
    ConnectionState, HandshakeError, Listener, MemifClient, MemifConnection, MemifSettings,
};

/// Longest time that "soon" may take on a busy machine.
pub const SOON: Duration = Duration::from_secs(20);

/// Runs `step` until it returns a value.
pub fn soon<T>(what: &str, mut step: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + SOON;
    loop {
        if let Some(value) = step() {
            return value;
        }
        assert!(Instant::now() < deadline, "{what}: not within {SOON:?}");
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Accepts the next client of any id and finishes its handshake.
#[allow(dead_code)]
pub fn accept(listener: &Listener) -> Result<MemifConnection, HandshakeError> {
    let mut handshake = soon("accept", || listener.accept().unwrap());
    soon("handshake", || handshake.poll(|_| true).transpose())
}

/// Connects a client to a listener.
#[allow(dead_code)]
pub fn join(listener: &Listener, client: &mut MemifClient) -> MemifConnection {
    assert_eq!(client.poll(), ConnectionState::Connecting);
    let mut handshake = soon("accept", || listener.accept().unwrap());
    let connection = soon("handshake", || {
        client.poll();
        handshake.poll(|_| true).unwrap()
    });
    soon("link", || (client.poll() == ConnectionState::Up).then_some(()));
    connection
}

/// A listener, a client and their connection, in a directory.
#[allow(dead_code)]
pub fn pair(directory: &Path, settings: MemifSettings) -> (Listener, MemifClient, MemifConnection) {
    let path = directory.join("memif.sock");
    let listener = Listener::bind(&path).unwrap();
    let mut client = MemifClient::new(&path, 3, "test client", settings).unwrap();
    let connection = join(&listener, &mut client);
    (listener, client, connection)
}
