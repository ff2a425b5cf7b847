//! What pdpd remembers: one SQLite file in the state directory.
//!
//! - **documents**: the specs as applied, the source of truth;
//! - **ledger**: numbers and placements given out, see [`Ledger`], and whose numbers are that nobody has now;
//! - **remains**: what may still be there of tenants' vnets beside what is wanted, which counts in their quotas;
//! - **links down**: vlinks that a user took down;
//! - **things**: the journal of side effects. A thing (a node, a guest, a helper, a pin) is
//!   written down before it is made ([`State::intend`]), confirmed with the hash of what it was
//!   made from ([`State::confirm`]), and forgotten after it is gone ([`State::forget`]). What a
//!   restart finds intended and not confirmed exists by half, and is taken down and made anew.
//!
//! - **tokens**: who may come; see [`access`]. Who came is in a file of its own, see [`trail`].
//!
//! Every change is one transaction, on disk when the call returns (WAL, `synchronous=FULL`).
//! Limits: [`DOCUMENT_BYTES_MAX`] a document.

pub mod access;
pub mod trail;

use std::collections::BTreeMap;
use std::fs::{File, Permissions};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use pdp_spec::Object;
use pdp_spec::remains::{AllRemains, Remains};
use rusqlite::{Connection, OptionalExtension, Transaction, params};

use crate::ledger::{Began, GONE, Holding, Ledger, OPERATORS, Placement, owner_of};
use crate::shared::Shared;
use trail::Trail;

/// Bytes of one stored document.
pub const DOCUMENT_BYTES_MAX: usize = 16 << 20;

/// Version of the tables; a newer one is refused. 2 has the tables of [`access`] beside those of 1,
/// which are as they were: making what is missing is all it takes to go on from 1.
const SCHEMA_VERSION: i64 = 2;

/// The scope of the vnets' numbers, the only one.
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

/// Modes of the state file and of its directory.
pub(crate) const PRIVATE: u32 = 0o600;
const PASSABLE: u32 = 0o711;

/// Why the state could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// SQLite refused.
    #[error("state {path}: {doing} failed; check the disk and its free space")]
    Database {
        /// The file.
        path: PathBuf,
        /// What was tried.
        doing: &'static str,
        /// SQLite's reason.
        source: rusqlite::Error,
    },
    /// The directory can't be made.
    #[error("state directory {path}: can't be made or opened")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Written by a newer pdpd.
    #[error(
        "state {path}: schema version {found}, this pdpd knows {SCHEMA_VERSION}; \
         install the newer pdpd again"
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// Version found.
        found: i64,
    },
    /// It does not read back whole.
    #[error(
        "state {path} is damaged: {found}; what runs goes on. Put a copy of the file back, or move it \
         away and start pdpd once with --forget: it ends what runs, and the specs are to be applied \
         again"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        found: String,
    },
    /// A document beyond the limit.
    #[error("{kind} {name}: document of {bytes} bytes, {DOCUMENT_BYTES_MAX} at most")]
    DocumentTooLarge {
        /// Its kind.
        kind: String,
        /// Its name.
        name: String,
        /// Its size.
        bytes: usize,
    },
}

/// A spec as stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    /// `Substrate`, `VirtualNetwork` or `Tenant`.
    pub kind: String,
    /// Its `metadata.name`.
    pub name: String,
    /// The spec as JSON.
    pub body: String,
}

/// One entry of the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thing {
    /// Hash of what it was made from; `None` while it may exist by half.
    pub hash: Option<String>,
    /// What is needed to find it again (JSON).
    pub detail: String,
}

/// One change of what is wanted; applied whole or not at all.
#[derive(Debug, Default)]
pub struct Change {
    /// Documents put, new or replaced.
    pub put: Vec<Document>,
    /// Documents deleted, by kind and name.
    pub delete: Vec<(String, String)>,
    /// What vnets hold that held something else before; `None`: nothing.
    pub held: BTreeMap<String, Option<Arc<Holding>>>,
    /// What may still be there of vnets where that is otherwise than before; `None`: nothing.
    pub remains: BTreeMap<String, Option<Remains>>,
    /// Everything is stopped by its user.
    pub stopped: bool,
}

impl Change {
    /// Puts a document, or deletes it where there is no object any more.
    pub fn document(&mut self, kind: &str, name: &str, object: Option<&Object>) {
        match object {
            None => self.delete.push((kind.to_owned(), name.to_owned())),
            Some(object) => self.put.push(Document {
                kind: kind.to_owned(),
                name: name.to_owned(),
                // Plain data with string keys: it is always JSON.
                body: serde_json::to_string(object).unwrap_or_default(),
            }),
        }
    }
}

/// The state file, open.
#[derive(Debug)]
pub struct State {
    path: PathBuf,
    database: Mutex<Connection>,
    /// The audit log.
    pub trail: Trail,
    is_new: bool,
}

impl State {
    /// Opens or makes `pdpd.sqlite` in `directory`, which is made where it is missing.
    pub fn open(directory: &Path) -> Result<Self, StateError> {
        let refused = |source| StateError::Directory { path: directory.into(), source };
        std::fs::create_dir_all(directory).map_err(refused)?;
        // Passed by guests that run on images unpacked below it, read by nobody: what SQLite makes
        // beside the file gets the file's mode.
        let path = directory.join("pdpd.sqlite");
        File::options()
            .create(true)
            .append(true)
            .mode(PRIVATE)
            .open(&path)
            .and_then(|file| file.set_permissions(Permissions::from_mode(PRIVATE)))
            .and_then(|()| std::fs::set_permissions(directory, Permissions::from_mode(PASSABLE)))
            .map_err(refused)?;
        let failed = |doing| {
            let path = path.clone();
            move |source| StateError::Database { path, doing, source }
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
                    _ => Err(failed("setting it up")(error)),
                };
            }
        }
        let found: i64 = database
            .query_row("PRAGMA user_version", [], |row| row.get(0))
            .map_err(failed("reading its version"))?;
        if found > SCHEMA_VERSION {
            return Err(StateError::Newer { path, found });
        }
        let is_new = found == 0;
        database
            .execute_batch(&format!(
                "BEGIN; {SCHEMA} {} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;",
                access::SCHEMA
            ))
            .map_err(failed("making its tables"))?;
        // Earlier versions did not write down whose the numbers are that they gave out.
        database
            .execute(
                "INSERT OR IGNORE INTO number_owners SELECT number,
                 CASE instr(name, '.') WHEN 0 THEN ?1 ELSE substr(name, 1, instr(name, '.') - 1) END
                 FROM numbers WHERE scope=?2",
                [OPERATORS, SCOPE],
            )
            .map_err(failed("writing down owners of numbers"))?;
        let trail = Trail::open(directory)?;
        trail.take_over(&database).map_err(failed("moving the audit log to its own file"))?;
        Ok(Self { path, database: Mutex::new(database), trail, is_new })
    }

    /// Whether nothing was there before: the file was missing or empty.
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    /// All specs, by kind and name.
    pub fn documents(&self) -> Result<Vec<Document>, StateError> {
        self.read("reading documents", |db| {
            db.prepare("SELECT kind, name, body FROM documents ORDER BY kind, name")?
                .query_map([], |row| {
                    // A body that is no text is no spec, which is told of this document alone.
                    let body = row.get(2).unwrap_or_default();
                    Ok(Document { kind: row.get(0)?, name: row.get(1)?, body })
                })?
                .collect()
        })
    }

    /// Numbers and placements given out.
    pub fn ledger(&self) -> Result<Ledger, StateError> {
        self.read("reading the ledger", |db| {
            let mut vnets: BTreeMap<String, Holding> = BTreeMap::new();
            let mut numbers = db.prepare("SELECT name, number FROM numbers WHERE scope=?1")?;
            let mut rows = numbers.query([SCOPE])?;
            while let Some(row) = rows.next()? {
                let holding = Holding { number: row.get(1)?, ..Holding::default() };
                vnets.insert(row.get(0)?, holding);
            }
            let mut placements =
                db.prepare("SELECT vnet, node, guest, engine, power_millicores FROM placements")?;
            let mut rows = placements.query([])?;
            while let Some(row) = rows.next()? {
                let (vnet, node): (String, String) = (row.get(0)?, row.get(1)?);
                let placement = Placement { engine: row.get(3)?, power_millicores: row.get(4)? };
                if let Some(holding) = vnets.get_mut(&vnet) {
                    holding.guests.entry(node).or_default().insert(row.get(2)?, placement);
                }
            }
            let mut ports = db.prepare("SELECT vnet, node, interface, number FROM ports")?;
            let mut rows = ports.query([])?;
            while let Some(row) = rows.next()? {
                let (vnet, node): (String, String) = (row.get(0)?, row.get(1)?);
                if let Some(holding) = vnets.get_mut(&vnet) {
                    holding.ports.entry(node).or_default().insert(row.get(2)?, row.get(3)?);
                }
            }
            for table in ["links_down", "links_silent"] {
                let mut links = db.prepare(&format!("SELECT vnet, link FROM {table}"))?;
                let mut rows = links.query([])?;
                while let Some(row) = rows.next()? {
                    let vnet: String = row.get(0)?;
                    let Some(holding) = vnets.get_mut(&vnet) else { continue };
                    match table {
                        "links_down" => holding.links_down.insert(row.get(1)?),
                        _ => holding.links_silent.insert(row.get(1)?),
                    };
                }
            }
            let mut schedules =
                db.prepare("SELECT vnet, link, hash, boot, at_ns FROM schedules")?;
            let mut rows = schedules.query([])?;
            while let Some(row) = rows.next()? {
                let began = Began { hash: row.get(2)?, boot: row.get(3)?, at_ns: row.get(4)? };
                if let Some(holding) = vnets.get_mut(&row.get::<_, String>(0)?) {
                    holding.schedules.insert(row.get(1)?, began);
                }
            }
            let mut owners = db.prepare("SELECT number, owner FROM number_owners")?;
            let rows = owners.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
            let owners = Arc::new(rows.collect::<rusqlite::Result<BTreeMap<u32, String>>>()?);
            let vnets = vnets.into_iter().map(|(name, holding)| (name, Arc::new(holding)));
            let vnets: Shared<Holding> = Arc::new(vnets.collect());
            let stopped = "SELECT value FROM settings WHERE name='stopped'";
            let stopped = db.query_row(stopped, [], |row| row.get(0)).optional()?.unwrap_or(false);
            Ok(Ledger { vnets, owners, stopped })
        })
    }

    /// What may still be there of vnets beside what is wanted of them.
    pub fn remains(&self) -> Result<AllRemains, StateError> {
        self.read("reading remains", |db| {
            let mut all = db.prepare("SELECT vnet, body FROM remains")?;
            let rows = all.query_map([], |row| {
                let body: String = row.get(1)?;
                Ok((row.get(0)?, serde_json::from_str(&body).unwrap_or_default()))
            });
            rows?.collect()
        })
    }

    /// Stores what is wanted from now on.
    pub fn commit(&self, change: &Change) -> Result<(), StateError> {
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
                    let gone = "UPDATE number_owners SET owner=?1 WHERE owner=?2";
                    tx.execute(gone, [GONE, name])?;
                }
            }
            for d in &change.put {
                tx.execute(
                    "INSERT INTO documents VALUES (?1, ?2, 1, ?3) ON CONFLICT (kind, name)
                     DO UPDATE SET generation = generation + 1, body = excluded.body",
                    params![d.kind, d.name, d.body],
                )?;
            }
            // First all that is given back, which may be another's now.
            for vnet in change.held.keys() {
                tx.execute("DELETE FROM numbers WHERE scope=?1 AND name=?2", [SCOPE, vnet])?;
                tx.execute("DELETE FROM placements WHERE vnet=?1", [vnet])?;
                tx.execute("DELETE FROM ports WHERE vnet=?1", [vnet])?;
                tx.execute("DELETE FROM links_down WHERE vnet=?1", [vnet])?;
                tx.execute("DELETE FROM links_silent WHERE vnet=?1", [vnet])?;
                tx.execute("DELETE FROM schedules WHERE vnet=?1", [vnet])?;
            }
            for (vnet, holding) in &change.held {
                holding.iter().try_for_each(|holding| put_holding(tx, vnet, holding))?;
            }
            for (vnet, remains) in &change.remains {
                match remains {
                    None => tx.execute("DELETE FROM remains WHERE vnet=?1", [vnet])?,
                    Some(remains) => {
                        // Plain data with string keys: it is always JSON.
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

    /// Writes down that `key` is about to be made. `detail` finds what may exist of it.
    pub fn intend(&self, key: &str, detail: &str) -> Result<(), StateError> {
        self.write("writing down an intention", |tx| {
            tx.execute("INSERT OR REPLACE INTO things VALUES (?1, NULL, ?2)", [key, detail])
                .map(drop)
        })
    }

    /// Writes down that `key` exists, made from what has this hash.
    pub fn confirm(&self, key: &str, hash: &str, detail: &str) -> Result<(), StateError> {
        self.write("confirming a thing", |tx| {
            tx.execute("INSERT OR REPLACE INTO things VALUES (?1, ?2, ?3)", [key, hash, detail])
                .map(drop)
        })
    }

    /// Writes down that nothing is left of `key`.
    pub fn forget(&self, key: &str) -> Result<(), StateError> {
        self.write("forgetting a thing", |tx| {
            tx.execute("DELETE FROM things WHERE key=?1", [key]).map(drop)
        })
    }

    /// One entry of the journal.
    pub fn thing(&self, key: &str) -> Result<Option<Thing>, StateError> {
        self.read("reading the journal", |db| {
            db.query_row("SELECT hash, detail FROM things WHERE key=?1", [key], |row| {
                Ok(Thing { hash: row.get(0)?, detail: row.get(1)? })
            })
            .optional()
        })
    }

    /// The whole journal.
    pub fn things(&self) -> Result<BTreeMap<String, Thing>, StateError> {
        self.read("reading the journal", |db| {
            db.prepare("SELECT key, hash, detail FROM things")?
                .query_map([], |row| {
                    Ok((row.get(0)?, Thing { hash: row.get(1)?, detail: row.get(2)? }))
                })?
                .collect()
        })
    }

    fn lock(&self) -> MutexGuard<'_, Connection> {
        // A panic of another holder can't leave a transaction open: it rolls back on drop.
        self.database.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn read<T>(
        &self,
        doing: &'static str,
        run: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, StateError> {
        run(&self.lock()).map_err(|source| StateError::Database {
            path: self.path.clone(),
            doing,
            source,
        })
    }

    fn write(
        &self,
        doing: &'static str,
        run: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<()>,
    ) -> Result<(), StateError> {
        let mut database = self.lock();
        let done = database.transaction().and_then(|tx| {
            run(&tx)?;
            tx.commit()
        });
        done.map_err(|source| StateError::Database { path: self.path.clone(), doing, source })
    }
}

fn put_holding(tx: &Transaction<'_>, vnet: &str, holding: &Holding) -> rusqlite::Result<()> {
    let Holding { number, guests, ports, links_down, links_silent, schedules } = holding;
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
    for (link, Began { hash, boot, at_ns }) in schedules {
        let began = params![vnet, link, hash, boot, at_ns];
        tx.execute("INSERT INTO schedules VALUES (?1, ?2, ?3, ?4, ?5)", began)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(name: &str) -> Document {
        Document { kind: "VirtualNetwork".into(), name: name.into(), body: "{}".into() }
    }

    fn held(vnet: &str, holding: Holding) -> (String, Option<Arc<Holding>>) {
        (vnet.into(), Some(Arc::new(holding)))
    }

    #[test]
    fn what_was_committed_is_there_after_reopening() {
        let directory = tempfile::tempdir().unwrap();
        let placement = Placement { engine: "fe0".into(), power_millicores: 700 };
        let red = Holding {
            number: 0,
            guests: [("r1".into(), [(0, placement)].into())].into(),
            ports: [("r1".into(), [("eth0".into(), 3), ("eth1".into(), 0)].into())].into(),
            links_down: ["r1:eth0--h1:eth0".into(), "far".into()].into(),
            links_silent: ["far".into()].into(),
            schedules: [(
                "far".into(),
                Began { hash: "1f".into(), boot: "b".into(), at_ns: 1 << 60 },
            )]
            .into(),
        };
        let numbered = |number| Holding { number, ..Holding::default() };
        let mut change = Change {
            put: vec![document("red"), document("blue")],
            held: [held("red", red.clone()), held("blue", numbered(1))].into(),
            stopped: true,
            ..Change::default()
        };
        let state = State::open(directory.path()).unwrap();
        state.commit(&change).unwrap();
        change.put.truncate(1);
        state.commit(&change).unwrap();

        let state = State::open(directory.path()).unwrap();
        assert_eq!(state.documents().unwrap(), vec![document("blue"), document("red")]);
        let mut ledger = Ledger { stopped: true, ..Ledger::default() };
        ledger.set("red", Some(red));
        ledger.set("blue", Some(numbered(1)));
        assert_eq!(state.ledger().unwrap(), ledger);
        let changes = "SELECT generation FROM documents ORDER BY name";
        let changes: Vec<u32> = {
            let database = state.lock();
            let mut rows = database.prepare(changes).unwrap();
            rows.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
        };
        assert_eq!(changes, [1, 2]);

        // What one gives back another gets at once.
        let gone = Change {
            delete: vec![("VirtualNetwork".into(), "red".into())],
            held: [held("blue", numbered(0)), ("red".into(), None)].into(),
            ..Change::default()
        };
        state.commit(&gone).unwrap();
        assert_eq!(state.documents().unwrap(), vec![document("blue")]);
        ledger = Ledger { stopped: false, ..ledger };
        ledger.set("red", None);
        ledger.set("blue", Some(numbered(0)));
        assert_eq!(state.ledger().unwrap(), ledger);
    }

    #[test]
    fn an_intention_has_no_hash_until_confirmed() {
        let directory = tempfile::tempdir().unwrap();
        let state = State::open(directory.path()).unwrap();
        state.intend("node red/r1", "{}").unwrap();
        assert_eq!(state.thing("node red/r1").unwrap().unwrap().hash, None);
        state.confirm("node red/r1", "abc", "{\"pid\":1}").unwrap();
        drop(state);
        let state = State::open(directory.path()).unwrap();
        let thing = state.thing("node red/r1").unwrap().unwrap();
        assert_eq!(thing, Thing { hash: Some("abc".into()), detail: "{\"pid\":1}".into() });
        state.forget("node red/r1").unwrap();
        assert!(state.things().unwrap().is_empty());
    }

    #[test]
    fn a_refused_commit_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let state = State::open(directory.path()).unwrap();
        let same = Holding { number: 1, ..Holding::default() };
        let held = [held("red", same.clone()), held("blue", same)].into();
        let change = Change { put: vec![document("red")], held, ..Change::default() };
        assert!(state.commit(&change).is_err());
        assert!(state.documents().unwrap().is_empty());
    }

    #[test]
    fn numbers_of_an_earlier_version_are_their_vnets_owners() {
        let directory = tempfile::tempdir().unwrap();
        let state = State::open(directory.path()).unwrap();
        let numbered = |number| Holding { number, ..Holding::default() };
        let vnets = [held("acme.lab", numbered(0)), held("red", numbered(1))];
        state.commit(&Change { held: vnets.into(), ..Change::default() }).unwrap();
        state.lock().execute_batch("DROP TABLE number_owners").unwrap();
        let state = State::open(directory.path()).unwrap();
        let gone = [("acme.lab".into(), None), ("red".into(), None)].into();
        state.commit(&Change { held: gone, ..Change::default() }).unwrap();
        let owners = State::open(directory.path()).unwrap().ledger().unwrap().owners;
        assert_eq!(*owners, [(0, "acme".into()), (1, OPERATORS.into())].into());
    }

    #[test]
    fn a_damaged_file_is_told_and_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let state = State::open(directory.path()).unwrap();
        assert!(state.is_new());
        let put = (0..200).map(|n| document(&format!("vnet{n}"))).collect();
        state.commit(&Change { put, ..Change::default() }).unwrap();
        // What waits in the log goes into the file.
        drop(state);
        assert!(!State::open(directory.path()).unwrap().is_new());
        let path = directory.path().join("pdpd.sqlite");
        let whole = std::fs::read(&path).unwrap();
        let mut other = whole.clone();
        other[..4096].fill(b'x');
        let half = &whole[..whole.len() / 2];
        for damaged in [half, &whole[..whole.len() - 4096], &other, b"not a database at all"] {
            std::fs::write(&path, damaged).unwrap();
            let error = State::open(directory.path()).unwrap_err();
            let length = damaged.len();
            assert!(matches!(error, StateError::Damaged { .. }), "{length} bytes: {error:?}");
            assert_eq!(std::fs::read(&path).unwrap(), damaged, "{length} bytes");
        }
        std::fs::write(&path, &whole).unwrap();
        assert_eq!(State::open(directory.path()).unwrap().documents().unwrap().len(), 200);
    }

    #[test]
    fn a_newer_schema_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        drop(State::open(directory.path()).unwrap());
        let database = Connection::open(directory.path().join("pdpd.sqlite")).unwrap();
        database.execute_batch("PRAGMA user_version=3").unwrap();
        let refused = State::open(directory.path()).unwrap_err();
        assert!(matches!(refused, StateError::Newer { found: 3, .. }), "{refused}");
    }

    #[test]
    fn a_state_of_the_first_version_is_taken_over() {
        let directory = tempfile::tempdir().unwrap();
        let old = Connection::open(directory.path().join("pdpd.sqlite")).unwrap();
        let row = "INSERT INTO documents VALUES ('VirtualNetwork', 'red', 3, '{}')";
        old.execute_batch(&format!("{SCHEMA} {row}; PRAGMA user_version=1")).unwrap();
        drop(old);
        let state = State::open(directory.path()).unwrap();
        assert_eq!(state.documents().unwrap(), vec![document("red")]);
        assert!(state.tokens().unwrap().is_empty());
        let version: i64 = state.lock().query_row("PRAGMA user_version", [], |r| r.get(0)).unwrap();
        assert_eq!(version, SCHEMA_VERSION);
    }
}
