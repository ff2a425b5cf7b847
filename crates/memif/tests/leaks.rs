//! Hostile clients leak no descriptors in the server.
//! Alone in its process, whose descriptors it counts.

mod common;
#[path = "common/raw.rs"]
#[allow(dead_code)]
mod raw;

use pdp_memif::Listener;
use raw::{bare, honest, send_all};

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn mappings() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("memfd:raw")).count()
}

#[test]
fn closed_connections_release_descriptors_and_mappings() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("memif.sock");
    let listener = Listener::bind(&path).unwrap();
    // The first run creates what the thread keeps.
    drop(send_all(&listener, &path, &honest().0));
    let before = descriptors();
    for _ in 0..20 {
        for cut in 0..5 {
            let (mut messages, _memory) = honest();
            messages.truncate(cut);
            drop(send_all(&listener, &path, &messages));
            messages.push(bare(7));
            drop(send_all(&listener, &path, &messages));
        }
        let (mut messages, _memory) = honest();
        // Descriptors on messages that take none.
        let bell = messages[2].fds[0].clone();
        messages[0].fds.push(bell.clone());
        messages[1].fds.push(bell);
        drop(send_all(&listener, &path, &messages));
        drop(send_all(&listener, &path, &honest().0));
    }
    assert_eq!(descriptors(), before);
    assert_eq!(mappings(), 0);
}
