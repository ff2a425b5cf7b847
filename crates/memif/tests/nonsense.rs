//! A server that writes nonsense into the rings. Alone in its process, whose descriptors it
//! searches.

mod common;

use common::{join, pair};
use pdp_memif::{ConnectionState, MemifSettings};

const SMALL: MemifSettings =
    MemifSettings { ring_log2: 3, buffer_bytes: 128, headroom_bytes: 64, buffers: 80 };

/// If a server claims more than it was given, the client disconnects and loses no buffer.
#[test]
fn client_disconnects_from_an_invalid_server() {
    let directory = tempfile::tempdir().unwrap();
    let (listener, mut client, server) = pair(directory.path(), SMALL);
    for ring in 0..2 {
        // The client's memory, found as the server would: by its descriptor among ours.
        let memory = std::fs::read_dir("/proc/self/fd").unwrap().find_map(|entry| {
            let path = entry.unwrap().path();
            let target = std::fs::read_link(&path).ok()?;
            target.to_string_lossy().starts_with("/memfd:pdp-memif").then_some(path)
        });
        let memory = std::fs::File::options().write(true).open(memory.unwrap()).unwrap();
        let at = 64 + ring * 256; // tail of the ring to the server, of the one from it
        rustix::io::pwrite(&memory, &[9, 0], at).unwrap();
        let mut bufs = Vec::new();
        assert_eq!(client.receive(&mut bufs, 8), 0);
        assert_eq!(client.room(), 0);
        assert_eq!(client.link(), ConnectionState::Down);
        assert_eq!(client.last_error(), Some("server index out of bounds"));
        let mut all: Vec<_> = std::iter::from_fn(|| client.alloc()).collect();
        assert_eq!(all.len(), SMALL.buffers as usize, "no buffer is lost");
        all.drain(..).for_each(|buf| client.free(buf));
        join(&listener, &mut client);
        client.flush();
    }
    drop(server);
}
