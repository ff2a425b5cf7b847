//! The state file: read, or refused with what was being done.

use pdpd::state::State;

/// Bytes in place of the file.
pub(crate) fn state(bytes: &[u8]) {
    thread_local! {
        // In memory: SQLite waits for the disk at each change.
        static PLACE: tempfile::TempDir = tempfile::tempdir_in("/dev/shm").expect("a directory");
    }
    PLACE.with(|place| {
        let directory = place.path();
        for name in ["pdpd.sqlite-wal", "pdpd.sqlite-shm"] {
            let _ = std::fs::remove_file(directory.join(name));
        }
        std::fs::write(directory.join("pdpd.sqlite"), bytes).expect("room");
        let used = State::open(directory).and_then(|state| {
            state.documents()?;
            state.ledger()?;
            state.things()?;
            state.intend("tap/red", "made by a test")?;
            state.confirm("tap/red", "hash", "made")?;
            let thing = state.thing("tap/red")?;
            state.forget("tap/red")?;
            Ok(thing.is_some())
        });
        match used {
            Ok(kept) => assert!(kept, "what is written is there"),
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains(&*directory.to_string_lossy()), "no file in: {text}");
            }
        }
    });
}
