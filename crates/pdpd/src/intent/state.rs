//! The state file: one SQLite file in the state directory.
//!
//! - **documents**: the specs as applied, the source of truth;
//! - **ledger**: allocated numbers and placements, see [`Allocations`], and the owners of free
//!   numbers;
//! - **remains**: earlier parts of tenants' vnets that may still exist, which count in their
//!   quotas;
//! - **links down**: vlinks that a user set down;
//! - **things**: the journal of side effects. An object (a node, a guest, a helper, a pin) is
//!   recorded before it is created ([`StateFile::intend`]), confirmed with the hash of its inputs
//!   ([`StateFile::confirm`]), and forgotten once it is gone ([`StateFile::forget`]). An object
//!   that a restart finds recorded but not confirmed exists partly; it is removed and recreated;
//! - **tokens**: credentials of clients, see [`access`]. The audit log has its own file, see
//!   [`trail`].
//!
//! Every change is one transaction, on disk when the call returns (WAL,
//! `synchronous=FULL`). Limits: [`DOCUMENT_BYTES_MAX`] per document.

pub mod access;
pub mod trail;

use std::collections::BTreeMap;
use std::fs::{File, Permissions};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use pdp_spec::Object;
use pdp_spec::remains::{RemainsByVnet, VnetRemains};
use rusqlite::{Connection, OptionalExtension, Transaction, params};

use crate::plan::allocations::{
    Allocations, EnginePlacement, GONE, OPERATORS, ScheduleStart, VnetAllocation, owner_of,
};
use crate::util::PRIVATE;
use crate::util::shared::SharedMap;
use trail::Trail;

/// Largest stored document, bytes.
pub const DOCUMENT_BYTES_MAX: usize = 16 << 20;

/// Version of the tables; a newer one is refused. Version 2 adds the tables of [`access`]
/// and changes none of version 1. So creating the missing tables upgrades from version 1.
const SCHEMA_VERSION: i64 = 2;

/// Scope of the vnets' numbers, the only one.
const SCOPE: &str = "vnet";

const SCHEMA: &str = "
CREATE TABLE IF NOT EXISTS documents (
    kind TEXT NOT NULL, name TEXT NOT NULL, generation INTEGER NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (kind, name)) STRICT;
CREATE TABLE IF NOT EXISTS numbers (
    scope TEXT NOT NULL, name TEXT NOT NULL, number INTEGER NOT NULL,
    PRIMARY KEY (scope, name), UNIQUE (scope, number)) STRICT;
CREATE TABLE IF NOT EXISTS number_owners (number INTEGER PRIMARY KEY, owner TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS remains (vnet TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS placements (
    vnet TEXT NOT NULL, node TEXT NOT NULL, guest INTEGER NOT NULL,
    engine TEXT NOT NULL, power_millicores INTEGER NOT NULL,
    PRIMARY KEY (vnet, node, guest)) STRICT;
CREATE TABLE IF NOT EXISTS ports (
    vnet TEXT NOT NULL, node TEXT NOT NULL, interface TEXT NOT NULL, number INTEGER NOT NULL UNIQUE,
    PRIMARY KEY (vnet, node, interface)) STRICT;
CREATE TABLE IF NOT EXISTS links_down (
    vnet TEXT NOT NULL, link TEXT NOT NULL, PRIMARY KEY (vnet, link)) STRICT;
CREATE TABLE IF NOT EXISTS links_silent (
    vnet TEXT NOT NULL, link TEXT NOT NULL, PRIMARY KEY (vnet, link)) STRICT;
CREATE TABLE IF NOT EXISTS schedules (
    vnet TEXT NOT NULL, link TEXT NOT NULL, hash TEXT NOT NULL, boot TEXT NOT NULL,
    at_ns INTEGER NOT NULL, PRIMARY KEY (vnet, link)) STRICT;
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS things (
    key TEXT PRIMARY KEY, hash TEXT, detail TEXT NOT NULL) STRICT;
";

const PASSABLE: u32 = 0o711;

/// Why the state can't be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// SQLite refused.
    #[error("state {path}: {action} failed; check the disk and its free space")]
    Database {
        /// The file.
        path: PathBuf,
        /// The attempted action.
        action: &'static str,
        /// SQLite's reason.
        source: rusqlite::Error,
    },
    /// The directory can't be created.
    #[error("state directory {path}: can't be made or opened")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A newer pdpd wrote it.
    #[error(
        "state {path}: schema version {found}, this pdpd knows {SCHEMA_VERSION}; \
         install the newer pdpd again"
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// The version found.
        found: i64,
    },
    /// It is damaged.
    #[error(
        "state {path} is damaged: {found}; networks keep running. Restore a copy of the file; or \
         move it away, start pdpd once with --forget, which ends the networks, and apply the specs \
         again"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The damage.
        found: String,
    },
    /// A document exceeds the limit.
    #[error("{kind} {name}: document of {bytes} bytes, {DOCUMENT_BYTES_MAX} at most")]
    DocumentTooLarge {
        /// Kind of the document.
        kind: String,
        /// Name of the document.
        name: String,
        /// Size, bytes.
        bytes: usize,
    },
}

/// A stored spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredDocument {
    /// `Substrate`, `VirtualNetwork` or `Tenant`.
    pub kind: String,
    /// The spec's `metadata.name`.
    pub name: String,
    /// The spec as JSON.
    pub body: String,
}

/// An entry of the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalEntry {
    /// Hash of its inputs; `None` while the object may exist partly.
    pub hash: Option<String>,
    /// Applied settings of guests and hosts (`reconcile/applied.rs`), the directory of an external
    /// interface's pins, or empty.
    pub detail: String,
}

/// A change of the desired state, applied as a whole or not at all.
#[derive(Debug, Default)]
pub struct StateChange {
    /// New or replaced documents.
    pub put: Vec<StoredDocument>,
    /// Deleted documents, by kind and name.
    pub delete: Vec<(String, String)>,
    /// New allocations of the vnets whose allocations changed; `None` removes them.
    pub allocations: BTreeMap<String, Option<Arc<VnetAllocation>>>,
    /// New remains of the vnets whose remains changed; `None` removes them.
    pub remains: BTreeMap<String, Option<VnetRemains>>,
    /// True if the user stopped everything.
    pub stopped: bool,
}

impl StateChange {
    /// Adds a document, or deletes it if the object no longer exists.
    pub fn document(&mut self, kind: &str, name: &str, object: Option<&Object>) {
        match object {
            None => self.delete.push((kind.to_owned(), name.to_owned())),
            Some(object) => self.put.push(StoredDocument {
                kind: kind.to_owned(),
                name: name.to_owned(),
                // Plain data with string keys is always valid JSON.
                body: serde_json::to_string(object).unwrap_or_default(),
            }),
        }
    }
}

/// The state file, open.
#[derive(Debug)]
pub struct StateFile {
    path: PathBuf,
    database: Mutex<Connection>,
    /// The audit log.
    pub trail: Trail,
    is_new: bool,
}

impl StateFile {
    /// Opens or creates `pdpd.sqlite` in `directory`, which is created if missing.
    pub fn open(directory: &Path) -> Result<Self, StateError> {
        let refused = |source| StateError::Directory { path: directory.into(), source };
        std::fs::create_dir_all(directory).map_err(refused)?;
        // Guests that run on images unpacked below it traverse the directory;
        // nobody reads it. Files that SQLite creates next to the file get its mode.
        let path = directory.join("pdpd.sqlite");
        File::options()
            .create(true)
            .append(true)
            .mode(PRIVATE)
            .open(&path)
            .and_then(|file| file.set_permissions(Permissions::from_mode(PRIVATE)))
            .and_then(|()| std::fs::set_permissions(directory, Permissions::from_mode(PASSABLE)))
            .map_err(refused)?;
        let failed = |action| {
            let path = path.clone();
            move |source| StateError::Database { path, action, source }
        };
        let damaged = |found: String| StateError::Damaged { path: path.clone(), found };
        let database = Connection::open(&path).map_err(failed("opening"))?;
        let looked = database
            .execute_batch(
                "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA foreign_keys=ON;
                 PRAGMA busy_timeout=5000;",
            )
            .and_then(|()| database.query_row("PRAGMA quick_check(1)", [], |row| row.get(0)));
        match looked {
            Ok(found) if found == "ok" => {}
            Ok(found) => return Err(damaged(found)),
            Err(error) => {
                use rusqlite::ErrorCode::{DatabaseCorrupt, NotADatabase};
                return match error.sqlite_error_code() {
                    Some(DatabaseCorrupt | NotADatabase) => Err(damaged(error.to_string())),
                    _ => Err(failed("setting up the database")(error)),
                };
            }
        }
        let found: i64 = database
            .query_row("PRAGMA user_version", [], |row| row.get(0))
            .map_err(failed("reading the version"))?;
        if found > SCHEMA_VERSION {
            return Err(StateError::Newer { path, found });
        }
        let is_new = found == 0;
        database
            .execute_batch(&format!(
                "BEGIN; {SCHEMA} {} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;",
                access::SCHEMA
            ))
            .map_err(failed("creating tables"))?;
        // Earlier versions did not record the owners of the numbers.
        database
            .execute(
                "INSERT OR IGNORE INTO number_owners SELECT number,
                 CASE instr(name, '.') WHEN 0 THEN ?1 ELSE substr(name, 1, instr(name, '.') - 1) END
                 FROM numbers WHERE scope=?2",
                [OPERATORS, SCOPE],
            )
            .map_err(failed("recording the owners of numbers"))?;
        let trail = Trail::open(directory)?;
        trail.take_over(&database).map_err(failed("moving the audit log to its own file"))?;
        Ok(Self { path, database: Mutex::new(database), trail, is_new })
    }

    /// True if there was no state before: the file was missing or empty.
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    /// Returns all specs, by kind and name.
    pub fn documents(&self) -> Result<Vec<StoredDocument>, StateError> {
        self.read("reading documents", |db| {
            db.prepare("SELECT kind, name, body FROM documents ORDER BY kind, name")?
                .query_map([], |row| {
                    // A body that is not text is no spec. Only this document is reported.
                    let body = row.get(2).unwrap_or_default();
                    Ok(StoredDocument { kind: row.get(0)?, name: row.get(1)?, body })
                })?
                .collect()
        })
    }

    /// Returns the allocations.
    pub fn allocations(&self) -> Result<Allocations, StateError> {
        self.read("reading allocations", |db| {
            let mut vnets: BTreeMap<String, VnetAllocation> = BTreeMap::new();
            let mut numbers = db.prepare("SELECT name, number FROM numbers WHERE scope=?1")?;
            let mut rows = numbers.query([SCOPE])?;
            while let Some(row) = rows.next()? {
                let allocation =
                    VnetAllocation { number: row.get(1)?, ..VnetAllocation::default() };
                vnets.insert(row.get(0)?, allocation);
            }
            let mut placements =
                db.prepare("SELECT vnet, node, guest, engine, power_millicores FROM placements")?;
            let mut rows = placements.query([])?;
            while let Some(row) = rows.next()? {
                let (vnet, node): (String, String) = (row.get(0)?, row.get(1)?);
                let placement =
                    EnginePlacement { engine: row.get(3)?, power_millicores: row.get(4)? };
                if let Some(allocation) = vnets.get_mut(&vnet) {
                    allocation.guests.entry(node).or_default().insert(row.get(2)?, placement);
                }
            }
            let mut ports = db.prepare("SELECT vnet, node, interface, number FROM ports")?;
            let mut rows = ports.query([])?;
            while let Some(row) = rows.next()? {
                let (vnet, node): (String, String) = (row.get(0)?, row.get(1)?);
                if let Some(allocation) = vnets.get_mut(&vnet) {
                    allocation.ports.entry(node).or_default().insert(row.get(2)?, row.get(3)?);
                }
            }
            for table in ["links_down", "links_silent"] {
                let mut links = db.prepare(&format!("SELECT vnet, link FROM {table}"))?;
                let mut rows = links.query([])?;
                while let Some(row) = rows.next()? {
                    let vnet: String = row.get(0)?;
                    let Some(allocation) = vnets.get_mut(&vnet) else { continue };
                    match table {
                        "links_down" => allocation.links_down.insert(row.get(1)?),
                        _ => allocation.links_silent.insert(row.get(1)?),
                    };
                }
            }
            let mut schedules =
                db.prepare("SELECT vnet, link, hash, boot, at_ns FROM schedules")?;
            let mut rows = schedules.query([])?;
            while let Some(row) = rows.next()? {
                let began =
                    ScheduleStart { hash: row.get(2)?, boot: row.get(3)?, at_ns: row.get(4)? };
                if let Some(allocation) = vnets.get_mut(&row.get::<_, String>(0)?) {
                    allocation.schedules.insert(row.get(1)?, began);
                }
            }
            let mut owners = db.prepare("SELECT number, owner FROM number_owners")?;
            let rows = owners.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
            let owners = Arc::new(rows.collect::<rusqlite::Result<BTreeMap<u32, String>>>()?);
            let vnets = vnets.into_iter().map(|(name, allocation)| (name, Arc::new(allocation)));
            let vnets: SharedMap<VnetAllocation> = Arc::new(vnets.collect());
            let stopped = "SELECT value FROM settings WHERE name='stopped'";
            let stopped = db.query_row(stopped, [], |row| row.get(0)).optional()?.unwrap_or(false);
            Ok(Allocations { vnets, owners, stopped })
        })
    }

    /// Returns earlier parts of vnets that may still exist.
    pub fn remains(&self) -> Result<RemainsByVnet, StateError> {
        self.read("reading remains", |db| {
            let mut all = db.prepare("SELECT vnet, body FROM remains")?;
            let rows = all.query_map([], |row| {
                let body: String = row.get(1)?;
                Ok((row.get(0)?, serde_json::from_str(&body).unwrap_or_default()))
            });
            rows?.collect()
        })
    }

    /// Stores a change of the desired state.
    pub fn commit(&self, change: &StateChange) -> Result<(), StateError> {
        for document in &change.put {
            if document.body.len() > DOCUMENT_BYTES_MAX {
                return Err(StateError::DocumentTooLarge {
                    kind: document.kind.clone(),
                    name: document.name.clone(),
                    bytes: document.body.len(),
                });
            }
        }
        self.write("storing specs", |tx| {
            for (kind, name) in &change.delete {
                tx.execute("DELETE FROM documents WHERE kind=?1 AND name=?2", [kind, name])?;
                if kind == "Tenant" {
                    tx.execute("DELETE FROM tokens WHERE tenant=?1", [name])?;
                    let sql = "UPDATE number_owners SET owner=?1 WHERE owner=?2";
                    tx.execute(sql, [GONE, name])?;
                }
            }
            for d in &change.put {
                tx.execute(
                    "INSERT INTO documents VALUES (?1, ?2, 1, ?3) ON CONFLICT (kind, name)
                     DO UPDATE SET generation = generation + 1, body = excluded.body",
                    params![d.kind, d.name, d.body],
                )?;
            }
            // First free everything, since it may belong to another vnet now.
            for vnet in change.allocations.keys() {
                tx.execute("DELETE FROM numbers WHERE scope=?1 AND name=?2", [SCOPE, vnet])?;
                tx.execute("DELETE FROM placements WHERE vnet=?1", [vnet])?;
                tx.execute("DELETE FROM ports WHERE vnet=?1", [vnet])?;
                tx.execute("DELETE FROM links_down WHERE vnet=?1", [vnet])?;
                tx.execute("DELETE FROM links_silent WHERE vnet=?1", [vnet])?;
                tx.execute("DELETE FROM schedules WHERE vnet=?1", [vnet])?;
            }
            for (vnet, allocation) in &change.allocations {
                allocation
                    .iter()
                    .try_for_each(|allocation| put_allocation(tx, vnet, allocation))?;
            }
            for (vnet, remains) in &change.remains {
                match remains {
                    None => tx.execute("DELETE FROM remains WHERE vnet=?1", [vnet])?,
                    Some(remains) => {
                        // Plain data with string keys is always valid JSON.
                        let body = serde_json::to_string(remains).unwrap_or_default();
                        let put = "INSERT OR REPLACE INTO remains VALUES (?1, ?2)";
                        tx.execute(put, [vnet, &body])?
                    }
                };
            }
            let stopped = "INSERT OR REPLACE INTO settings VALUES ('stopped', ?1)";
            tx.execute(stopped, [change.stopped]).map(drop)
        })?;
        let mut tenants = change.delete.iter().filter(|(kind, _)| kind == "Tenant");
        tenants.try_for_each(|(_, name)| self.trail.forget_tenant(name))
    }

    /// Records that `key` is about to be created. `detail` identifies what may exist of it.
    pub fn intend(&self, key: &str, detail: &str) -> Result<(), StateError> {
        self.write("recording an intention", |tx| {
            tx.execute("INSERT OR REPLACE INTO things VALUES (?1, NULL, ?2)", [key, detail])
                .map(drop)
        })
    }

    /// Records that `key` exists, made from inputs with this hash.
    pub fn confirm(&self, key: &str, hash: &str, detail: &str) -> Result<(), StateError> {
        self.write("confirming an object", |tx| {
            tx.execute("INSERT OR REPLACE INTO things VALUES (?1, ?2, ?3)", [key, hash, detail])
                .map(drop)
        })
    }

    /// Records that nothing is left of `key`.
    pub fn forget(&self, key: &str) -> Result<(), StateError> {
        self.write("forgetting an object", |tx| {
            tx.execute("DELETE FROM things WHERE key=?1", [key]).map(drop)
        })
    }

    /// Returns one entry of the journal.
    pub fn journal_entry(&self, key: &str) -> Result<Option<JournalEntry>, StateError> {
        self.read("reading the journal", |db| {
            db.query_row("SELECT hash, detail FROM things WHERE key=?1", [key], |row| {
                Ok(JournalEntry { hash: row.get(0)?, detail: row.get(1)? })
            })
            .optional()
        })
    }

    /// Returns the whole journal.
    pub fn journal(&self) -> Result<BTreeMap<String, JournalEntry>, StateError> {
        self.read("reading the journal", |db| {
            db.prepare("SELECT key, hash, detail FROM things")?
                .query_map([], |row| {
                    Ok((row.get(0)?, JournalEntry { hash: row.get(1)?, detail: row.get(2)? }))
                })?
                .collect()
        })
    }

    fn lock(&self) -> MutexGuard<'_, Connection> {
        // A panic of another holder can't leave a transaction open, since it rolls back on drop.
        self.database.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn read<T>(
        &self,
        action: &'static str,
        run: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, StateError> {
        run(&self.lock()).map_err(|source| StateError::Database {
            path: self.path.clone(),
            action,
            source,
        })
    }

    fn write(
        &self,
        action: &'static str,
        run: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<()>,
    ) -> Result<(), StateError> {
        let mut database = self.lock();
        let done = database.transaction().and_then(|tx| {
            run(&tx)?;
            tx.commit()
        });
        done.map_err(|source| StateError::Database { path: self.path.clone(), action, source })
    }
}

fn put_allocation(
    tx: &Transaction<'_>,
    vnet: &str,
    allocation: &VnetAllocation,
) -> rusqlite::Result<()> {
    let VnetAllocation { number, guests, ports, links_down, links_silent, schedules } = allocation;
    tx.execute("INSERT INTO numbers VALUES (?1, ?2, ?3)", params![SCOPE, vnet, number])?;
    let owned = "INSERT OR REPLACE INTO number_owners VALUES (?1, ?2)";
    tx.execute(owned, params![number, owner_of(vnet)])?;
    for (node, guests) in guests {
        for (guest, placement) in guests {
            tx.execute(
                "INSERT INTO placements VALUES (?1, ?2, ?3, ?4, ?5)",
                params![vnet, node, guest, placement.engine, placement.power_millicores],
            )?;
        }
    }
    for (node, ports) in ports {
        for (interface, number) in ports {
            let port = params![vnet, node, interface, number];
            tx.execute("INSERT INTO ports VALUES (?1, ?2, ?3, ?4)", port)?;
        }
    }
    for link in links_down {
        tx.execute("INSERT INTO links_down VALUES (?1, ?2)", [vnet, link])?;
    }
    for link in links_silent {
        tx.execute("INSERT INTO links_silent VALUES (?1, ?2)", [vnet, link])?;
    }
    for (link, ScheduleStart { hash, boot, at_ns }) in schedules {
        let began = params![vnet, link, hash, boot, at_ns];
        tx.execute("INSERT INTO schedules VALUES (?1, ?2, ?3, ?4, ?5)", began)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(name: &str) -> StoredDocument {
        StoredDocument { kind: "VirtualNetwork".into(), name: name.into(), body: "{}".into() }
    }

    fn allocated_to(
        vnet: &str,
        allocation: VnetAllocation,
    ) -> (String, Option<Arc<VnetAllocation>>) {
        (vnet.into(), Some(Arc::new(allocation)))
    }

    #[test]
    fn committed_state_survives_reopening() {
        let directory = tempfile::tempdir().unwrap();
        let placement = EnginePlacement { engine: "fe0".into(), power_millicores: 700 };
        let red = VnetAllocation {
            number: 0,
            guests: [("r1".into(), [(0, placement)].into())].into(),
            ports: [("r1".into(), [("eth0".into(), 3), ("eth1".into(), 0)].into())].into(),
            links_down: ["r1:eth0--h1:eth0".into(), "far".into()].into(),
            links_silent: ["far".into()].into(),
            schedules: [(
                "far".into(),
                ScheduleStart { hash: "1f".into(), boot: "b".into(), at_ns: 1 << 60 },
            )]
            .into(),
        };
        let numbered = |number| VnetAllocation { number, ..VnetAllocation::default() };
        let mut change = StateChange {
            put: vec![document("red"), document("blue")],
            allocations: [allocated_to("red", red.clone()), allocated_to("blue", numbered(1))]
                .into(),
            stopped: true,
            ..StateChange::default()
        };
        let state = StateFile::open(directory.path()).unwrap();
        state.commit(&change).unwrap();
        change.put.truncate(1);
        state.commit(&change).unwrap();

        let state = StateFile::open(directory.path()).unwrap();
        assert_eq!(state.documents().unwrap(), vec![document("blue"), document("red")]);
        let mut allocations = Allocations { stopped: true, ..Allocations::default() };
        allocations.set("red", Some(red));
        allocations.set("blue", Some(numbered(1)));
        assert_eq!(state.allocations().unwrap(), allocations);
        let changes = "SELECT generation FROM documents ORDER BY name";
        let changes: Vec<u32> = {
            let database = state.lock();
            let mut rows = database.prepare(changes).unwrap();
            rows.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
        };
        assert_eq!(changes, [1, 2]);

        // A number that one vnet frees is available to another at once.
        let gone = StateChange {
            delete: vec![("VirtualNetwork".into(), "red".into())],
            allocations: [allocated_to("blue", numbered(0)), ("red".into(), None)].into(),
            ..StateChange::default()
        };
        state.commit(&gone).unwrap();
        assert_eq!(state.documents().unwrap(), vec![document("blue")]);
        allocations = Allocations { stopped: false, ..allocations };
        allocations.set("red", None);
        allocations.set("blue", Some(numbered(0)));
        assert_eq!(state.allocations().unwrap(), allocations);
    }

    #[test]
    fn journal_intention_has_no_hash_until_confirmed() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateFile::open(directory.path()).unwrap();
        state.intend("node red/r1", "{}").unwrap();
        assert_eq!(state.journal_entry("node red/r1").unwrap().unwrap().hash, None);
        state.confirm("node red/r1", "abc", "{\"pid\":1}").unwrap();
        drop(state);
        let state = StateFile::open(directory.path()).unwrap();
        let entry = state.journal_entry("node red/r1").unwrap().unwrap();
        assert_eq!(entry, JournalEntry { hash: Some("abc".into()), detail: "{\"pid\":1}".into() });
        state.forget("node red/r1").unwrap();
        assert!(state.journal().unwrap().is_empty());
    }

    #[test]
    fn a_refused_commit_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateFile::open(directory.path()).unwrap();
        let same = VnetAllocation { number: 1, ..VnetAllocation::default() };
        let allocations = [allocated_to("red", same.clone()), allocated_to("blue", same)].into();
        let change =
            StateChange { put: vec![document("red")], allocations, ..StateChange::default() };
        assert!(state.commit(&change).is_err());
        assert!(state.documents().unwrap().is_empty());
    }

    #[test]
    fn upgrade_assigns_numbers_to_their_vnets_owners() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateFile::open(directory.path()).unwrap();
        let numbered = |number| VnetAllocation { number, ..VnetAllocation::default() };
        let vnets = [allocated_to("acme.lab", numbered(0)), allocated_to("red", numbered(1))];
        state.commit(&StateChange { allocations: vnets.into(), ..StateChange::default() }).unwrap();
        state.lock().execute_batch("DROP TABLE number_owners").unwrap();
        let state = StateFile::open(directory.path()).unwrap();
        let gone = [("acme.lab".into(), None), ("red".into(), None)].into();
        state.commit(&StateChange { allocations: gone, ..StateChange::default() }).unwrap();
        let owners = StateFile::open(directory.path()).unwrap().allocations().unwrap().owners;
        assert_eq!(*owners, [(0, "acme".into()), (1, OPERATORS.into())].into());
    }

    #[test]
    fn damaged_state_file_is_reported_and_left_unchanged() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateFile::open(directory.path()).unwrap();
        assert!(state.is_new());
        let put = (0..200).map(|n| document(&format!("vnet{n}"))).collect();
        state.commit(&StateChange { put, ..StateChange::default() }).unwrap();
        // Closing moves the write-ahead log into the file.
        drop(state);
        assert!(!StateFile::open(directory.path()).unwrap().is_new());
        let path = directory.path().join("pdpd.sqlite");
        let whole = std::fs::read(&path).unwrap();
        let mut other = whole.clone();
        other[..4096].fill(b'x');
        let half = &whole[..whole.len() / 2];
        for damaged in [half, &whole[..whole.len() - 4096], &other, b"not a database at all"] {
            std::fs::write(&path, damaged).unwrap();
            let error = StateFile::open(directory.path()).unwrap_err();
            let length = damaged.len();
            assert!(matches!(error, StateError::Damaged { .. }), "{length} bytes: {error:?}");
            assert_eq!(std::fs::read(&path).unwrap(), damaged, "{length} bytes");
        }
        std::fs::write(&path, &whole).unwrap();
        assert_eq!(StateFile::open(directory.path()).unwrap().documents().unwrap().len(), 200);
    }

    #[test]
    fn a_newer_schema_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        drop(StateFile::open(directory.path()).unwrap());
        let database = Connection::open(directory.path().join("pdpd.sqlite")).unwrap();
        database.execute_batch("PRAGMA user_version=3").unwrap();
        let refused = StateFile::open(directory.path()).unwrap_err();
        assert!(matches!(refused, StateError::Newer { found: 3, .. }), "{refused}");
    }

    #[test]
    fn state_of_version_1_is_migrated() {
        let directory = tempfile::tempdir().unwrap();
        let old = Connection::open(directory.path().join("pdpd.sqlite")).unwrap();
        let row = "INSERT INTO documents VALUES ('VirtualNetwork', 'red', 3, '{}')";
        old.execute_batch(&format!("{SCHEMA} {row}; PRAGMA user_version=1")).unwrap();
        drop(old);
        let state = StateFile::open(directory.path()).unwrap();
        assert_eq!(state.documents().unwrap(), vec![document("red")]);
        assert!(state.tokens().unwrap().is_empty());
        let version: i64 = state.lock().query_row("PRAGMA user_version", [], |r| r.get(0)).unwrap();
        assert_eq!(version, SCHEMA_VERSION);
    }
}
