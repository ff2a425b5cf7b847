//! Records of running processes, and directories to remove. Files written by others are neither
//! trusted nor followed. Needs root.

use std::fs;
use std::os::unix::fs::{chown, symlink};
use std::path::Path;

use pdp_container::{ProcessState, Runtime, RuntimePaths, safe_removal};

use crate::input::FuzzInput;

/// A user other than root.
const ANOTHER: u32 = 900_000;

/// Most levels of a tree.
const DEPTH_MAX: usize = 64;

struct RecordDirectory {
    directory: tempfile::TempDir,
    runtime: Runtime,
}

impl RecordDirectory {
    fn new() -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let at = |name: &str| directory.path().join(name);
        fs::write(at("canary"), "as it was").expect("room");
        let paths = RuntimePaths {
            // Nothing is executed.
            runc: "/bin/false".into(),
            shim: "/bin/false".into(),
            init: "/bin/false".into(),
            work: "/bin/false".into(),
            records: at("records"),
            runc_root: at("runc"),
            logs: at("logs"),
            images: at("images"),
            volumes: at("volumes"),
            cgroup: format!("pdp-fuzz-{}", std::process::id()),
        };
        Self { runtime: Runtime::new(paths).expect("cgroups"), directory }
    }
}

/// Files of a record: each with its bytes, owned by root or another user, or a link to one.
pub(crate) fn records(bytes: &[u8]) {
    thread_local! {
        static PLACE: RecordDirectory = RecordDirectory::new();
    }
    PLACE.with(|place| {
        let (top, mut input) = (place.directory.path(), FuzzInput(bytes));
        let dir = top.join("records/red.r1");
        fs::create_dir(&dir).expect("not there");
        let mut record_is_roots = false;
        for name in ["record.json", "shim", "pid", "exit"] {
            let (kind, content) = (input.byte() % 8, input.counted());
            let path = dir.join(name);
            match kind {
                0 => continue,
                1 => fs::create_dir(&path).expect("room"),
                2 => symlink(top.join("canary"), &path).expect("room"),
                3 => {
                    fs::write(&path, content).expect("room");
                    chown(&path, Some(ANOTHER), None).expect("root may");
                }
                _ => fs::write(&path, content).expect("room"),
            }
            record_is_roots |= name == "record.json" && kind > 3;
        }
        let state = place.runtime.state(&dir);
        if !record_is_roots {
            assert!(
                matches!(state, Err(_) | Ok(ProcessState::Absent)),
                "{state:?} of nobody's record"
            );
        }
        assert_eq!(place.runtime.list().expect("root's"), std::slice::from_ref(&dir));
        grow(&dir, top, &mut input);
        safe_removal::remove(&dir).expect("it can be removed");
        assert!(!dir.exists());
        assert_eq!(fs::read(top.join("canary")).expect("it is there"), b"as it was");
    });
}

/// Makes a tree with links out of it.
fn grow(dir: &Path, top: &Path, input: &mut FuzzInput<'_>) {
    let (mut here, mut depth) = (dir.to_owned(), 0);
    for number in 0.. {
        if input.is_empty() {
            break;
        }
        let name = match input.byte() % 4 {
            0 => format!(".removed-{}", input.byte() % 16),
            _ => number.to_string(),
        };
        let path = here.join(name);
        // Existing files stay.
        let made = match input.byte() % 8 {
            0 => symlink(top, &path),
            1 => symlink(top.join("canary"), &path),
            2 => fs::hard_link(top.join("canary"), &path),
            3 if depth > 0 => {
                here.pop();
                depth -= 1;
                Ok(())
            }
            4 => fs::File::create_new(&path).map(drop),
            _ if depth < DEPTH_MAX => fs::create_dir(&path).map(|()| {
                here = path;
                depth += 1;
            }),
            _ => Ok(()),
        };
        drop(made);
    }
}
