//! The state file: read, or refused with the failed step.

use pdpd::intent::state::StateFile;

/// Bytes as the file's contents.
pub(crate) fn state(bytes: &[u8]) {
    thread_local! {
        // In memory, since SQLite syncs to disk on each change.
        static PLACE: tempfile::TempDir = tempfile::tempdir_in("/dev/shm").expect("a directory");
    }
    PLACE.with(|place| {
        let directory = place.path();
        for name in ["pdpd.sqlite-wal", "pdpd.sqlite-shm"] {
            let _ = std::fs::remove_file(directory.join(name));
        }
        std::fs::write(directory.join("pdpd.sqlite"), bytes).expect("room");
        let used = StateFile::open(directory).and_then(|state| {
            state.documents()?;
            state.allocations()?;
            state.journal()?;
            state.intend("tap/red", "made by a test")?;
            state.confirm("tap/red", "hash", "made")?;
            let thing = state.journal_entry("tap/red")?;
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
