//! Versions of what runs, and what a pdpd does with what another version left.
//!
//! | what | version | of another version |
//! |---|---|---|
//! | the run directory: where what is | [`RUN_VERSION`], in `RUN/version` | all that runs is ended and started anew |
//! | a record of a process | [`pdp_container::RECORD_VERSION`] | that process is started anew |
//! | the mux's protocol | [`pdp_proto::mux::VERSION`] | the mux is replaced: the gap of a mux's death |
//! | what TAP helper and mirror speak with pdpd | [`pdp_proto::tap::VERSION`], [`pdp_proto::mirror::VERSION`] | the control side is made anew |
//! | tags on trunks, and routes | [`pdp_wire::tag::VERSION`], [`pdp_proto::routes::VERSION`] | forwarding guests are made anew, and of another version of routes the mirror |
//! | the state file | its schema version | taken over if it is older |
//!
//! `data/kept` has what each version wrote, `tests/kept.rs` reads it: what is raised when is in its README.
//!
//! The protocols' versions are part of the hashes in the journal, so that what speaks another is found by that and
//! nothing is asked in words that it may not know.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use pdp_container::cgroup::Cgroups;
use pdp_container::{LogFile, tree};

use crate::host::{HostError, failed, words, write_file};
use crate::plan::Places;
use crate::state::PRIVATE;

/// Version of the run directory. What came before 2 had records where guests could write them: none is read.
pub const RUN_VERSION: u32 = 2;

/// The file that says which it is.
pub const FILE: &str = "version";

/// Longest number in it, bytes.
const FILE_BYTES_MAX: u64 = 16;

/// The log beside it.
pub const LOG: &str = "pdpd.log";

/// Files of a node's helpers.
const CONFIGURATIONS: [&str; 2] = ["mirror.json", "management.json"];

/// What versions before had in a run directory, and this one has.
pub const NAMES: [&str; 5] = ["vnets", "externals", "mux", "records", "runc"];

/// Begins the name of what could not be removed.
pub const LEFT: &str = "left-";

/// Of one name.
const ASIDE_MAX: u32 = 100;

/// Time for what runs to end.
const END_WAIT: Duration = Duration::from_secs(20);

/// Makes a run directory one of this version: one that another version left is cleared, and with it ends what runs
/// below `cgroup`. To be called with the lock of the directory held, before anything in it is used.
pub fn prepare(run: &Path, cgroup: &str) -> Result<(), HostError> {
    let file = run.join(FILE);
    let found = read(&file);
    if found.as_deref() == Some(&RUN_VERSION.to_string()) {
        return close(run);
    }
    if NAMES.iter().any(|name| run.join(name).exists()) {
        let found = found.as_deref().unwrap_or("before there were any");
        tracing::warn!(
            "what runs is of version {found}, this pdpd's is {RUN_VERSION}: all of it is started anew"
        );
        // What one owner left keeps nobody from a start: it is out of the way, and told.
        if let Err(error) = Cgroups::new(cgroup)?.remove("", END_WAIT) {
            tracing::warn!("{}", words(&error));
        }
        for name in NAMES {
            set_aside(run, name)?;
        }
    }
    write_file(&file, RUN_VERSION.to_string().as_bytes(), PRIVATE)
}

/// Takes from others than root what versions before let everybody read: names, addresses and settings of nodes.
fn close(run: &Path) -> Result<(), HostError> {
    let below = |dir: &Path| -> Vec<PathBuf> {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    };
    let mut files = vec![run.join(FILE), LogFile::older(&run.join(LOG))];
    for vnet in below(&run.join("vnets")) {
        let (hosts, names) = (vnet.join(Places::HOSTS_BEFORE), vnet.join(Places::NAMES));
        if hosts.is_file() {
            // Nodes that run have it bound: it stays the same file. Whose directory it is follows with the vnet.
            let moved = fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&names)
                .and_then(|()| fs::rename(&hosts, names.join(Places::HOSTS)));
            if let Err(error) = moved {
                tracing::warn!("{}", words(&failed("can't move", &hosts)(error)));
            }
        }
        let nodes = below(&vnet).into_iter();
        files.extend(nodes.flat_map(|node| CONFIGURATIONS.map(|name| node.join(name))));
    }
    for file in files.iter().filter(|file| file.is_file()) {
        fs::set_permissions(file, fs::Permissions::from_mode(PRIVATE))
            .map_err(failed("can't set the mode of", file))?;
    }
    Ok(())
}

/// Removes what has a name in a run directory, or gives it another one, [`LEFT`]`NAME`, where it can't be removed.
fn set_aside(run: &Path, name: &str) -> Result<(), HostError> {
    let place = run.join(name);
    let Err(error) = tree::remove(&place) else { return Ok(()) };
    let aside = (0..ASIDE_MAX).map(|number| run.join(format!("{LEFT}{name}-{number}")));
    let free = aside.into_iter().find(|aside| !aside.exists());
    match free.map(|free| fs::rename(&place, &free).map(|()| free)) {
        Some(Ok(free)) => {
            let free = free.display();
            tracing::warn!("{}; it is {free} now: remove it by `rm -rf {free}`", words(&error));
            Ok(())
        }
        _ => Err(error.into()),
    }
}

/// What the file says, if it says anything that can be a version.
fn read(file: &Path) -> Option<String> {
    let text = || -> io::Result<String> {
        if fs::symlink_metadata(file)?.len() > FILE_BYTES_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        fs::read_to_string(file)
    };
    text().ok().map(|text| text.trim().to_owned()).filter(|text| text.parse::<u32>().is_ok())
}
