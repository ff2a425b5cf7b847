//! Versions of formats and protocols, and how pdpd handles the state of another version.
//!
//! | what | version | of another version |
//! |---|---|---|
//! | layout of the run directory | [`RUN_VERSION`], in `RUN/version` | all processes are ended and restarted |
//! | record of a process | [`pdp_container::RECORD_VERSION`] | that process is restarted |
//! | the mux's protocol | [`pdp_proto::mux::VERSION`] | the mux is replaced, with the same gap as after a crash of the mux |
//! | protocols of TAP helper and mirror with pdpd | [`pdp_proto::tap::VERSION`], [`pdp_proto::mirror::VERSION`] | the control side is recreated |
//! | tags on trunks, and routes | [`pdp_wire::tag::VERSION`], [`pdp_proto::routes::VERSION`] | forwarding guests are recreated; for routes, the mirror too |
//! | settings of running guests in the journal | [`crate::reconcile::applied::VERSION`] | of an earlier version: taken over; of a later one: applied again, and the mirror is replaced |
//! | the state file | its schema version | taken over if it is older |
//!
//! `data/kept` has files of each version, and `tests/kept.rs` reads
//! them. Its README says when to raise which version.
//!
//! The hashes in the journal include the protocols' versions. So pdpd recognizes a
//! peer of another version without sending it requests that it may not understand.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use pdp_container::cgroup::Cgroups;
use pdp_container::{LogFile, safe_removal};

use crate::host::{HostError, failed, write_file};
use crate::plan::DaemonPaths;
use crate::util::{PRIVATE, error_chain};

/// Version of the run directory's layout. Versions before 2 had records
/// where guests could write them; those are not read.
pub const RUN_VERSION: u32 = 2;

/// File with the version.
pub const FILE: &str = "version";

/// Longest number in it, bytes.
const FILE_BYTES_MAX: u64 = 16;

/// Log file next to it.
pub const LOG: &str = "pdpd.log";

/// Configuration files of a node's helpers.
const CONFIGURATIONS: [&str; 2] = ["mirror.json", "management.json"];

/// Names in a run directory of earlier versions and of this one.
pub const NAMES: [&str; 5] = ["vnets", "externals", "mux", "records", "runc"];

/// Prefix of the new name of an object that could not be removed.
pub const LEFT: &str = "left-";

/// Most such objects of one name.
const ASIDE_MAX: u32 = 100;

/// Longest wait for processes to end.
const END_WAIT: Duration = Duration::from_secs(20);

/// Prepares a run directory for this version. If another version left
/// it, it is cleared, and all processes below `cgroup` are ended. Call
/// it while the directory is locked, before anything in it is used.
pub fn prepare(run: &Path, cgroup: &str) -> Result<(), HostError> {
    let file = run.join(FILE);
    let found = read(&file);
    if found.as_deref() == Some(&RUN_VERSION.to_string()) {
        return close(run);
    }
    if NAMES.iter().any(|name| run.join(name).exists()) {
        let found = found.as_deref().unwrap_or("unknown");
        tracing::warn!(
            "the run directory is of version {found}, this pdpd uses {RUN_VERSION}: everything \
             restarts"
        );
        // Remains of one owner must not prevent a start. They are moved aside and reported.
        if let Err(error) = Cgroups::new(cgroup)?.remove("", END_WAIT) {
            tracing::warn!("{}", error_chain(&error));
        }
        for name in NAMES {
            set_aside(run, name)?;
        }
    }
    write_file(&file, RUN_VERSION.to_string().as_bytes(), PRIVATE)
}

/// Removes everybody's access to files that earlier versions left
/// readable: names, addresses and settings of nodes.
fn close(run: &Path) -> Result<(), HostError> {
    let below = |dir: &Path| -> Vec<PathBuf> {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    };
    let mut files = vec![run.join(FILE), LogFile::older(&run.join(LOG))];
    for vnet in below(&run.join("vnets")) {
        let (hosts, names) = (vnet.join(DaemonPaths::HOSTS_BEFORE), vnet.join(DaemonPaths::NAMES));
        if hosts.is_file() {
            // Running nodes have bound the file, so it keeps its inode.
            // The vnet's step sets the owner of its directory.
            let moved = fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&names)
                .and_then(|()| fs::rename(&hosts, names.join(DaemonPaths::HOSTS)));
            if let Err(error) = moved {
                tracing::warn!("{}", error_chain(&failed("can't move", &hosts)(error)));
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

/// Removes an object in a run directory, or renames it to [`LEFT`]`NAME` if it can't be removed.
fn set_aside(run: &Path, name: &str) -> Result<(), HostError> {
    let place = run.join(name);
    let Err(error) = safe_removal::remove(&place) else { return Ok(()) };
    let aside = (0..ASIDE_MAX).map(|number| run.join(format!("{LEFT}{name}-{number}")));
    let free = aside.into_iter().find(|aside| !aside.exists());
    match free.map(|free| fs::rename(&place, &free).map(|()| free)) {
        Some(Ok(free)) => {
            let free = free.display();
            tracing::warn!(
                "{}; moved to {free}: remove it with `rm -rf {free}`",
                error_chain(&error)
            );
            Ok(())
        }
        _ => Err(error.into()),
    }
}

/// Returns the content of the file, if it can be a version.
fn read(file: &Path) -> Option<String> {
    let text = || -> io::Result<String> {
        if fs::symlink_metadata(file)?.len() > FILE_BYTES_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        fs::read_to_string(file)
    };
    text().ok().map(|text| text.trim().to_owned()).filter(|text| text.parse::<u32>().is_ok())
}
