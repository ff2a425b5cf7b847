//! The file of the audit log, `audit.sqlite`, next to the state file. So
//! writes to the audit log and to the journal do not wait for each other.
//!
//! Entries are limited per owner and kind. So nobody displaces another's entries, and neither
//! queries nor refusals displace changes. Owners are: the node's operators and viewers
//! together, each tenant, all unknown clients, and all deleted tenants. For each owner and
//! [`AuditKind`], the newest entries are kept ([`AuditRetention`]), and up to [`PRUNE_ROWS`] more.

use crate::util::{PRIVATE, lock};
use std::collections::HashMap;
use std::fs::{File, Permissions};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use pdp_api::{AuditEntry, AuditQuery, ObjectChange, Role};
use rusqlite::types::Type;
use rusqlite::{Connection, OptionalExtension, Row, Transaction, params};

use super::StateError;

/// Entries of each kind that are kept for the node's operators and
/// viewers, and for all deleted tenants.
pub const NODE_ROWS_MAX: u64 = 100_000;

/// Entries of each kind that are kept for unknown clients.
pub const STRANGER_ROWS_MAX: u64 = 10_000;

/// New entries after which the oldest ones are deleted.
pub const PRUNE_ROWS: u64 = 1000;

/// Name of the file.
pub const FILE: &str = "audit.sqlite";

/// Version of the tables; a newer one is refused.
const SCHEMA_VERSION: i64 = 1;

const SCHEMA: &str = "
CREATE TABLE IF NOT EXISTS rows (
    id INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, sort INTEGER NOT NULL,
    at_ms INTEGER NOT NULL, who TEXT NOT NULL, origin TEXT NOT NULL, role TEXT, tenant TEXT,
    what TEXT NOT NULL, vnet TEXT, changes INTEGER NOT NULL, status INTEGER, error TEXT,
    duration_us INTEGER, command TEXT, exit INTEGER, objects TEXT, more_objects INTEGER) STRICT;
CREATE INDEX IF NOT EXISTS rows_by_owner ON rows (owner, sort, id);
";

const COLUMNS: &str = "id, at_ms, who, origin, role, tenant, what, vnet, changes, status, error, \
                       duration_us, command, exit, objects, more_objects";

/// Columns that files of earlier versions lack. Earlier versions of pdpd ignore them.
const LATER: [(&str, &str); 2] = [("objects", "TEXT"), ("more_objects", "INTEGER")];

/// Owners that are not tenants; no tenant has such a name.
const NODE: &str = "";
const STRANGERS: &str = "-";
const GONE: &str = "~";

/// Kind of a logged request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AuditKind {
    /// A query.
    Query,
    /// An authorized change.
    Changed,
    /// A refused request.
    Refused,
}

/// Entries of each kind that are kept for a tenant. For other owners it is a constant here.
pub type AuditRetention = u64;

/// Result of a logged request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestEnd {
    /// HTTP status.
    pub status: u16,
    /// Reason of its failure.
    pub error: Option<String>,
    /// Duration, microseconds.
    pub duration_us: u64,
    /// Exit code of a command that ended by itself.
    pub exit_code: Option<i32>,
}

/// One write to the log.
#[derive(Clone, Debug)]
pub enum TrailWrite {
    /// An entry, complete or only begun.
    Entry(Box<AuditEntry>, AuditRetention),
    /// The command that the request with this entry id is about to run.
    Command(u64, String),
    /// Objects that the request with this entry id changed, and the number of further ones.
    Objects(u64, Vec<ObjectChange>, u64),
    /// Result of the request with this entry id.
    End(u64, RequestEnd),
}

/// The audit log's file, open.
#[derive(Debug)]
pub struct Trail {
    path: PathBuf,
    /// Connection for writing, used by the audit log's thread only, and one for reading.
    writer: Mutex<Connection>,
    reader: Mutex<Connection>,
    /// Entries since the last pruning, by owner and kind.
    fresh: Mutex<HashMap<(String, i64), u64>>,
}

impl Trail {
    /// Opens or creates the file in `directory`, which exists.
    pub fn open(directory: &Path) -> Result<Self, StateError> {
        let path = directory.join(FILE);
        File::options()
            .create(true)
            .append(true)
            .mode(PRIVATE)
            .open(&path)
            .and_then(|file| file.set_permissions(Permissions::from_mode(PRIVATE)))
            .map_err(|source| StateError::Directory { path: directory.into(), source })?;
        let failed = |action| {
            let path = path.clone();
            move |source| StateError::Database { path, action, source }
        };
        let open = || {
            let database = Connection::open(&path)?;
            database.execute_batch(
                "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA busy_timeout=5000;",
            )?;
            Ok(database)
        };
        let writer = open().map_err(failed("opening the audit log"))?;
        let found: i64 = writer
            .query_row("PRAGMA user_version", [], |row| row.get(0))
            .map_err(failed("reading the version"))?;
        if found > SCHEMA_VERSION {
            return Err(StateError::Newer { path, found });
        }
        writer
            .execute_batch(&format!(
                "BEGIN; {SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;"
            ))
            .map_err(failed("creating tables"))?;
        add_later(&writer).map_err(failed("adding columns"))?;
        let reader = open().map_err(failed("opening the audit log"))?;
        let (writer, reader) = (Mutex::new(writer), Mutex::new(reader));
        Ok(Self { path, writer, reader, fresh: Mutex::default() })
    }

    /// Writes everything in one transaction. Returns the ids of the
    /// entries, in order; the `id` field of an entry is ignored.
    pub fn write(&self, writes: &[TrailWrite]) -> Result<Vec<u64>, StateError> {
        let mut ids = Vec::new();
        let mut fresh = lock(&self.fresh);
        self.transact(|tx| {
            ids.clear();
            for write in writes {
                match write {
                    TrailWrite::Entry(row, kept) => ids.push(insert(tx, row, *kept, &mut fresh)?),
                    TrailWrite::Command(id, command) => {
                        tx.prepare_cached("UPDATE rows SET command=?2 WHERE id=?1")?
                            .execute(params![id, command])?;
                    }
                    TrailWrite::Objects(id, objects, more) => {
                        // A later change of the same request is only a clean-up.
                        tx.prepare_cached(
                            "UPDATE rows SET objects=?2, more_objects=?3
                             WHERE id=?1 AND objects IS NULL",
                        )?
                        .execute(params![id, json(objects), more])?;
                    }
                    TrailWrite::End(id, end) => ended(tx, *id, end)?,
                }
            }
            Ok(())
        })?;
        Ok(ids)
    }

    /// Returns the newest entries that match, oldest first. If `tenant` is given, only its entries.
    pub fn entries(
        &self,
        query: &AuditQuery,
        tenant: Option<&str>,
    ) -> Result<Vec<AuditEntry>, StateError> {
        let since = query.since_ms.map(|ms| i64::try_from(ms).unwrap_or(i64::MAX));
        // The index finds a tenant's entries, so the query's time depends on them alone.
        let of = if tenant.is_some() { "owner = ?4" } else { "?4 IS NULL" };
        let queries = AuditKind::Query as i64;
        let sql = format!(
            "SELECT {COLUMNS} FROM rows
             WHERE (?1 IS NULL OR at_ms >= ?1) AND (?2 IS NULL OR who = ?2)
               AND (?3 IS NULL OR vnet = ?3 OR more_objects > 0 OR EXISTS (
                    SELECT 1 FROM json_each(objects) AS one
                    WHERE one.value ->> 'object' = 'vnet/' || ?3))
               AND (NOT ?6 OR sort <> {queries}) AND {of}
             ORDER BY id DESC LIMIT ?5"
        );
        let read = |db: &Connection| -> rusqlite::Result<Vec<AuditEntry>> {
            db.prepare_cached(&sql)?
                .query_map(
                    params![since, query.who, query.vnet, tenant, query.limit(), query.changes],
                    entry,
                )?
                .collect()
        };
        let mut rows = read(&lock(&self.reader)).map_err(|source| StateError::Database {
            path: self.path.clone(),
            action: "reading the audit log",
            source,
        })?;
        rows.reverse();
        Ok(rows)
    }

    /// Assigns a deleted tenant's entries to the common owner of deleted
    /// tenants. A later tenant of the same name sees none of them.
    pub fn forget_tenant(&self, tenant: &str) -> Result<(), StateError> {
        self.transact(|tx| {
            tx.execute("UPDATE rows SET owner=?2 WHERE owner=?1", [tenant, GONE])?;
            for sort in [AuditKind::Query, AuditKind::Changed, AuditKind::Refused] {
                prune(tx, GONE, sort as i64, NODE_ROWS_MAX)?;
            }
            Ok(())
        })
    }

    /// Takes over the entries that older versions kept in the state file.
    pub(super) fn take_over(&self, state: &Connection) -> rusqlite::Result<()> {
        let table = "SELECT name FROM sqlite_schema WHERE type='table' AND name='audit'";
        if state.query_row(table, [], |_| Ok(())).optional()?.is_none() {
            return Ok(());
        }
        let sql = "SELECT id, at_ms, who, origin, role, tenant, what, vnet, changes, status, \
                   error, duration_us, NULL, NULL, NULL, NULL FROM audit ORDER BY id";
        {
            let mut statement = state.prepare(sql)?;
            let mut rows = statement.query_map([], entry)?;
            let mut writer = lock(&self.writer);
            let tx = writer.transaction()?;
            let empty: bool =
                tx.query_row("SELECT count(*) = 0 FROM rows", [], |row| row.get(0))?;
            // If it is not empty, a crash happened before the old table was dropped.
            while let Some(row) = rows.next().filter(|_| empty) {
                insert(&tx, &row?, NODE_ROWS_MAX, &mut HashMap::new())?;
            }
            tx.commit()?;
        }
        state.execute_batch("DROP TABLE audit")
    }

    fn transact(
        &self,
        mut run: impl FnMut(&Transaction<'_>) -> rusqlite::Result<()>,
    ) -> Result<(), StateError> {
        let mut database = lock(&self.writer);
        let done = database.transaction().and_then(|tx| {
            run(&tx)?;
            tx.commit()
        });
        done.map_err(|source| StateError::Database {
            path: self.path.clone(),
            action: "writing the audit log",
            source,
        })
    }
}

fn owner(row: &AuditEntry) -> &str {
    match (&row.tenant, row.role) {
        (Some(tenant), _) => tenant,
        (None, Some(_)) => NODE,
        (None, None) => STRANGERS,
    }
}

/// Returns the kind of an entry. A change counts as a change until it is known to be refused.
fn classify(changes: bool, status: Option<u16>) -> AuditKind {
    match (changes, status) {
        (_, Some(400..=499)) => AuditKind::Refused,
        (true, _) => AuditKind::Changed,
        (false, _) => AuditKind::Query,
    }
}

fn insert(
    tx: &Transaction<'_>,
    row: &AuditEntry,
    kept: AuditRetention,
    fresh: &mut HashMap<(String, i64), u64>,
) -> rusqlite::Result<u64> {
    let owner = owner(row);
    let sort = classify(row.changes, row.status) as i64;
    tx.prepare_cached(
        "INSERT INTO rows (owner, sort, at_ms, who, origin, role, tenant, what, vnet, changes,
                           status, error, duration_us, command, exit, objects, more_objects)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17)",
    )?
    .execute(params![
        owner,
        sort,
        row.at_ms,
        row.who,
        row.from,
        row.role.map(Role::name),
        row.tenant,
        row.what,
        row.vnet,
        row.changes,
        row.status,
        row.error,
        row.duration_us,
        row.command,
        row.exit,
        (!row.objects.is_empty()).then(|| json(&row.objects)),
        row.more_objects
    ])?;
    let id = u64::try_from(tx.last_insert_rowid()).unwrap_or(0);
    // The first entry after opening the file prunes what an earlier daemon left.
    let count = fresh.entry((owner.into(), sort)).or_insert(PRUNE_ROWS);
    *count += 1;
    if *count > PRUNE_ROWS {
        *count = 0;
        let max = match owner {
            NODE => NODE_ROWS_MAX,
            STRANGERS => STRANGER_ROWS_MAX,
            _ => kept,
        };
        // An entry that ends refused changes its kind without being
        // counted, so both kinds are pruned.
        for sort in [sort, AuditKind::Refused as i64] {
            prune(tx, owner, sort, max)?;
        }
    }
    Ok(id)
}

fn ended(tx: &Transaction<'_>, id: u64, end: &RequestEnd) -> rusqlite::Result<()> {
    let refused = classify(true, Some(end.status)) == AuditKind::Refused;
    tx.prepare_cached(
        "UPDATE rows SET status=?2, error=?3, duration_us=?4, exit=?5,
                         sort=CASE ?6 WHEN 1 THEN ?7 ELSE sort END WHERE id=?1",
    )?
    .execute(params![
        id,
        end.status,
        end.error,
        end.duration_us,
        end.exit_code,
        refused,
        AuditKind::Refused as i64
    ])
    .map(drop)
}

/// Deletes the oldest entries of an owner and kind beyond `max`.
fn prune(tx: &Transaction<'_>, owner: &str, sort: i64, max: u64) -> rusqlite::Result<()> {
    tx.prepare_cached(
        "DELETE FROM rows WHERE owner=?1 AND sort=?2 AND id <=
             (SELECT id FROM rows WHERE owner=?1 AND sort=?2 ORDER BY id DESC LIMIT 1 OFFSET ?3)",
    )?
    .execute(params![owner, sort, max])
    .map(drop)
}

fn entry(row: &Row<'_>) -> rusqlite::Result<AuditEntry> {
    Ok(AuditEntry {
        id: row.get(0)?,
        at_ms: row.get(1)?,
        who: row.get(2)?,
        from: row.get(3)?,
        role: super::access::role(row, 4)?,
        tenant: row.get(5)?,
        what: row.get(6)?,
        vnet: row.get(7)?,
        changes: row.get(8)?,
        status: row.get(9)?,
        error: row.get(10)?,
        duration_us: row.get(11)?,
        command: row.get(12)?,
        exit: row.get(13)?,
        objects: objects(row, 14)?,
        more_objects: row.get::<_, Option<u64>>(15)?.unwrap_or(0),
    })
}

fn json(objects: &[ObjectChange]) -> String {
    // Plain data with string keys: can't fail.
    serde_json::to_string(objects).unwrap_or_default()
}

fn objects(row: &Row<'_>, column: usize) -> rusqlite::Result<Vec<ObjectChange>> {
    let Some(text) = row.get::<_, Option<String>>(column)? else { return Ok(Vec::new()) };
    serde_json::from_str(&text).map_err(|error| {
        rusqlite::Error::FromSqlConversionFailure(column, Type::Text, error.into())
    })
}

fn add_later(database: &Connection) -> rusqlite::Result<()> {
    for (name, sort) in LATER {
        let sql = "SELECT count(*) > 0 FROM pragma_table_info('rows') WHERE name=?1";
        if !database.query_row(sql, [name], |row| row.get(0))? {
            database.execute_batch(&format!("ALTER TABLE rows ADD COLUMN {name} {sort}"))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use pdp_api::ChangeAction;

    use super::*;

    fn row(what: &str, tenant: Option<&str>, changes: bool, status: Option<u16>) -> TrailWrite {
        let row = AuditEntry {
            what: what.into(),
            changes,
            status,
            who: "user:x".into(),
            role: Some(if tenant.is_some() { Role::Tenant } else { Role::Operator }),
            tenant: tenant.map(str::to_owned),
            ..Default::default()
        };
        TrailWrite::Entry(Box::new(row), 50)
    }

    fn requests(trail: &Trail, tenant: Option<&str>) -> Vec<String> {
        let query = AuditQuery { limit: Some(10_000), ..AuditQuery::default() };
        trail.entries(&query, tenant).unwrap().into_iter().map(|row| row.what).collect()
    }

    #[test]
    fn audit_flood_evicts_neither_other_clients_nor_changes() {
        let directory = tempfile::tempdir().unwrap();
        let trail = Trail::open(directory.path()).unwrap();
        trail.write(&[row("operator's", None, true, Some(200))]).unwrap();
        trail.write(&[row("other's", Some("other"), true, Some(200))]).unwrap();
        trail.write(&[row("changed", Some("acme"), true, Some(200))]).unwrap();
        let stranger = AuditEntry { what: "strange".into(), ..Default::default() };
        trail.write(&[TrailWrite::Entry(Box::new(stranger), 0)]).unwrap();
        for status in [200, 403] {
            let flood: Vec<TrailWrite> =
                (0..3000).map(|_| row("flood", Some("acme"), false, Some(status))).collect();
            trail.write(&flood).unwrap();
        }
        for _ in 0..2 * PRUNE_ROWS {
            // Begun as a change, and then refused.
            let begun = trail.write(&[row("refused", Some("acme"), true, None)]).unwrap();
            let end = RequestEnd { status: 400, ..RequestEnd::default() };
            trail.write(&[TrailWrite::End(begun[0], end)]).unwrap();
        }
        for expected in ["operator's", "other's", "strange"] {
            assert!(requests(&trail, None).iter().any(|what| what == expected), "{expected}");
        }
        let left = requests(&trail, Some("acme"));
        assert_eq!(left[0], "changed");
        assert!(left.len() as u64 <= 3 * (50 + PRUNE_ROWS), "{}", left.len());
        assert_eq!(requests(&trail, Some("other")), ["other's"]);
    }

    #[test]
    fn recreated_tenant_sees_no_old_audit_entries() {
        let directory = tempfile::tempdir().unwrap();
        let trail = Trail::open(directory.path()).unwrap();
        trail.write(&[row("first", Some("acme"), true, Some(200))]).unwrap();
        trail.forget_tenant("acme").unwrap();
        trail.write(&[row("second", Some("acme"), true, Some(200))]).unwrap();
        assert_eq!(requests(&trail, Some("acme")), ["second"]);
        assert_eq!(requests(&trail, None), ["first", "second"]);
    }

    #[test]
    fn audit_entry_is_found_by_each_changed_object() {
        let directory = tempfile::tempdir().unwrap();
        let trail = Trail::open(directory.path()).unwrap();
        let begun = trail.write(&[row("POST /v1/apply", None, true, None)]).unwrap();
        trail.write(&[row("GET /v1/vnets", None, false, Some(200))]).unwrap();
        let object = |name: &str| ObjectChange {
            object: format!("vnet/{name}"),
            action: ChangeAction::Create,
            detail: String::new(),
        };
        trail.write(&[TrailWrite::Objects(begun[0], vec![object("a"), object("b")], 0)]).unwrap();
        // Objects of the later clean-up.
        trail.write(&[TrailWrite::Objects(begun[0], vec![object("c")], 0)]).unwrap();
        let found = |vnet: &str| {
            let query = AuditQuery { vnet: Some(vnet.into()), ..AuditQuery::default() };
            trail.entries(&query, None).unwrap()
        };
        assert_eq!(found("b")[0].objects, [object("a"), object("b")]);
        assert_eq!(found("c"), []);
        let changes = AuditQuery { changes: true, ..AuditQuery::default() };
        let changes = trail.entries(&changes, None).unwrap();
        assert_eq!(changes.iter().map(|row| row.id).collect::<Vec<_>>(), begun);
        assert_eq!(trail.entries(&AuditQuery::default(), None).unwrap().len(), 2);
    }

    #[test]
    fn old_audit_log_gets_object_columns() {
        let directory = tempfile::tempdir().unwrap();
        let trail = Trail::open(directory.path()).unwrap();
        trail.write(&[row("old", None, true, Some(200))]).unwrap();
        for (column, _) in LATER {
            lock(&trail.writer)
                .execute_batch(&format!("ALTER TABLE rows DROP COLUMN {column}"))
                .unwrap();
        }
        drop(trail);
        let trail = Trail::open(directory.path()).unwrap();
        let rows = trail.entries(&AuditQuery::default(), None).unwrap();
        assert_eq!((&*rows[0].what, rows[0].objects.len(), rows[0].more_objects), ("old", 0, 0));
    }

    #[test]
    fn audit_entry_stays_unfinished_until_its_end() {
        let directory = tempfile::tempdir().unwrap();
        let trail = Trail::open(directory.path()).unwrap();
        let begun = trail.write(&[row("POST exec", None, true, None)]).unwrap();
        trail.write(&[TrailWrite::Command(begun[0], "ping ::1".into())]).unwrap();
        drop(trail);
        let trail = Trail::open(directory.path()).unwrap();
        let rows = trail.entries(&AuditQuery::default(), None).unwrap();
        assert_eq!((rows[0].id, rows[0].status), (begun[0], None));
        assert_eq!(rows[0].command.as_deref(), Some("ping ::1"));
        let error = Some("1 fault".to_owned());
        let end = RequestEnd { status: 101, error, duration_us: 12, exit_code: Some(7) };
        trail.write(&[TrailWrite::End(begun[0], end)]).unwrap();
        let row = &trail.entries(&AuditQuery::default(), None).unwrap()[0];
        assert_eq!(
            (row.status, row.error.as_deref(), row.exit),
            (Some(101), Some("1 fault"), Some(7))
        );
    }
}
