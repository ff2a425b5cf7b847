//! Tokens, and the audit log.
//!
//! - Of a token only its SHA-256 is stored: who reads the file can't come with what is in it.
//! - The audit log has a row a request. Of requests that change something, and of all others, the
//!   newest [`AUDIT_ROWS_MAX`] each are kept, and up to [`PRUNE_ROWS`] more: whoever asks much does
//!   not push out what was changed.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pdp_api::{AuditEntry, AuditQuery, Role, Token};
use rusqlite::{OptionalExtension, Row, params};

use super::{State, StateError};

/// Rows of the audit log that are kept of requests that change something, and of all others.
pub const AUDIT_ROWS_MAX: u64 = 100_000;

/// Rows that may come before the oldest go.
pub const PRUNE_ROWS: u64 = 1000;

/// Tokens at a time, expired ones too until they are revoked.
pub const TOKENS_MAX: u64 = 10_000;

pub(super) const SCHEMA: &str = "
CREATE TABLE IF NOT EXISTS tokens (
    id INTEGER PRIMARY KEY AUTOINCREMENT, hash BLOB NOT NULL UNIQUE, role TEXT NOT NULL,
    tenant TEXT, created_ms INTEGER NOT NULL, expires_ms INTEGER) STRICT;
CREATE TABLE IF NOT EXISTS audit (
    id INTEGER PRIMARY KEY AUTOINCREMENT, at_ms INTEGER NOT NULL, who TEXT NOT NULL,
    origin TEXT NOT NULL, role TEXT, tenant TEXT, what TEXT NOT NULL, vnet TEXT,
    changes INTEGER NOT NULL, status INTEGER, error TEXT, duration_us INTEGER) STRICT;
CREATE INDEX IF NOT EXISTS audit_changes ON audit (changes, id);
";

const COLUMNS: &str =
    "id, at_ms, who, origin, role, tenant, what, vnet, changes, status, error, duration_us";

/// Milliseconds since 1970.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

impl State {
    /// Stores a token of this hash; `None` if there are [`TOKENS_MAX`].
    pub fn put_token(
        &self,
        hash: &[u8],
        role: Role,
        tenant: Option<&str>,
        expires_ms: Option<u64>,
    ) -> Result<Option<Token>, StateError> {
        let created_ms = now_ms();
        let mut id = None;
        self.write("storing a token", |tx| {
            let count: u64 = tx.query_row("SELECT count(*) FROM tokens", [], |row| row.get(0))?;
            if count < TOKENS_MAX {
                tx.execute(
                    "INSERT INTO tokens (hash, role, tenant, created_ms, expires_ms)
                     VALUES (?1, ?2, ?3, ?4, ?5)",
                    params![hash, role.name(), tenant, created_ms, expires_ms],
                )?;
                id = u64::try_from(tx.last_insert_rowid()).ok();
            }
            Ok(())
        })?;
        let tenant = tenant.map(str::to_owned);
        Ok(id.map(|id| Token { id, role, tenant, created_ms, expires_ms }))
    }

    /// The token of this hash. It may have expired.
    pub fn token(&self, hash: &[u8]) -> Result<Option<Token>, StateError> {
        self.read("looking for a token", |db| {
            let sql = "SELECT id, role, tenant, created_ms, expires_ms FROM tokens WHERE hash=?1";
            db.prepare_cached(sql)?.query_row([hash], token).optional()
        })
    }

    /// All tokens, by id.
    pub fn tokens(&self) -> Result<Vec<Token>, StateError> {
        self.read("reading tokens", |db| {
            let sql = "SELECT id, role, tenant, created_ms, expires_ms FROM tokens ORDER BY id";
            db.prepare(sql)?.query_map([], token)?.collect()
        })
    }

    /// Forgets a token; whether there was one.
    pub fn revoke(&self, id: u64) -> Result<bool, StateError> {
        // No token has a number that is none to SQLite.
        let Ok(id) = i64::try_from(id) else { return Ok(false) };
        let mut count = 0;
        self.write("revoking a token", |tx| {
            count = tx.execute("DELETE FROM tokens WHERE id=?1", [id])?;
            Ok(())
        })?;
        Ok(count > 0)
    }

    /// Writes requests down, one transaction for all; the id of the last. Their own ids are ignored.
    pub fn audit(&self, entries: &[AuditEntry]) -> Result<u64, StateError> {
        let mut id = 0;
        self.write("writing the audit log", |tx| {
            for e in entries {
                tx.prepare_cached(
                    "INSERT INTO audit (at_ms, who, origin, role, tenant, what, vnet, changes,
                                        status, error, duration_us)
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
                )?
                .execute(params![
                    e.at_ms,
                    e.who,
                    e.from,
                    e.role.map(Role::name),
                    e.tenant,
                    e.what,
                    e.vnet,
                    e.changes,
                    e.status,
                    e.error,
                    e.duration_us
                ])?;
                let last = tx.last_insert_rowid();
                id = u64::try_from(last).unwrap_or(0);
                if id.is_multiple_of(PRUNE_ROWS) {
                    prune(tx, AUDIT_ROWS_MAX)?;
                }
            }
            Ok(())
        })?;
        Ok(id)
    }

    /// Writes down how a request ended.
    pub fn audit_end(
        &self,
        id: u64,
        status: u16,
        error: Option<&str>,
        duration_us: u64,
    ) -> Result<(), StateError> {
        self.write("writing the audit log", |tx| {
            tx.execute(
                "UPDATE audit SET status=?2, error=?3, duration_us=?4 WHERE id=?1",
                params![id, status, error, duration_us],
            )
            .map(drop)
        })
    }

    /// The newest rows that match, oldest first; those of a tenant alone where one is given.
    pub fn audited(
        &self,
        query: &AuditQuery,
        tenant: Option<&str>,
    ) -> Result<Vec<AuditEntry>, StateError> {
        let since = query.since_ms.map(|ms| i64::try_from(ms).unwrap_or(i64::MAX));
        let mut rows: Vec<AuditEntry> = self.read("reading the audit log", |db| {
            db.prepare(&format!(
                "SELECT {COLUMNS} FROM audit
                 WHERE (?1 IS NULL OR at_ms >= ?1) AND (?2 IS NULL OR who = ?2)
                   AND (?3 IS NULL OR vnet = ?3) AND (?4 IS NULL OR tenant = ?4)
                 ORDER BY id DESC LIMIT ?5"
            ))?
            .query_map(params![since, query.who, query.vnet, tenant, query.limit()], entry)?
            .collect()
        })?;
        rows.reverse();
        Ok(rows)
    }
}

/// Deletes the oldest rows of each sort beyond `max`.
fn prune(tx: &rusqlite::Transaction<'_>, max: u64) -> rusqlite::Result<()> {
    for changes in [false, true] {
        tx.execute(
            "DELETE FROM audit WHERE changes=?1 AND id <=
                 (SELECT id FROM audit WHERE changes=?1 ORDER BY id DESC LIMIT 1 OFFSET ?2)",
            params![changes, max],
        )?;
    }
    Ok(())
}

fn token(row: &Row<'_>) -> rusqlite::Result<Token> {
    Ok(Token {
        id: row.get(0)?,
        role: role(row, 1)?.ok_or(rusqlite::Error::InvalidQuery)?,
        tenant: row.get(2)?,
        created_ms: row.get(3)?,
        expires_ms: row.get(4)?,
    })
}

fn entry(row: &Row<'_>) -> rusqlite::Result<AuditEntry> {
    Ok(AuditEntry {
        id: row.get(0)?,
        at_ms: row.get(1)?,
        who: row.get(2)?,
        from: row.get(3)?,
        role: role(row, 4)?,
        tenant: row.get(5)?,
        what: row.get(6)?,
        vnet: row.get(7)?,
        changes: row.get(8)?,
        status: row.get(9)?,
        error: row.get(10)?,
        duration_us: row.get(11)?,
    })
}

fn role(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<Role>> {
    let name: Option<String> = row.get(column)?;
    Ok(name.and_then(|name| Role::ALL.into_iter().find(|role| role.name() == name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(what: &str, changes: bool) -> AuditEntry {
        AuditEntry { what: what.into(), changes, who: "user:root".into(), ..Default::default() }
    }

    #[test]
    fn the_oldest_rows_go_and_questions_do_not_push_out_changes() {
        let directory = tempfile::tempdir().unwrap();
        let state = State::open(directory.path()).unwrap();
        state.audit(&[row("the change", true)]).unwrap();
        let asked: Vec<_> = (0..50).map(|number| row(&format!("GET {number}"), false)).collect();
        state.audit(&asked).unwrap();
        state.write("pruning", |tx| prune(tx, 3)).unwrap();
        let left = state.audited(&AuditQuery::default(), None).unwrap();
        let what: Vec<&str> = left.iter().map(|row| row.what.as_str()).collect();
        assert_eq!(what, ["the change", "GET 47", "GET 48", "GET 49"]);
    }

    #[test]
    fn what_was_begun_stays_unfinished_until_its_end_is_written() {
        let directory = tempfile::tempdir().unwrap();
        let state = State::open(directory.path()).unwrap();
        let id = state.audit(&[row("POST /v1/apply", true)]).unwrap();
        drop(state);
        let state = State::open(directory.path()).unwrap();
        let rows = state.audited(&AuditQuery::default(), None).unwrap();
        assert_eq!((rows[0].id, rows[0].status), (id, None));
        state.audit_end(id, 400, Some("1 fault"), 12).unwrap();
        let rows = state.audited(&AuditQuery::default(), None).unwrap();
        assert_eq!((rows[0].status, rows[0].error.as_deref()), (Some(400), Some("1 fault")));
    }

    #[test]
    fn a_tenant_that_goes_takes_its_tokens_along() {
        let directory = tempfile::tempdir().unwrap();
        let state = State::open(directory.path()).unwrap();
        state.put_token(b"1", Role::Tenant, Some("acme"), None).unwrap();
        state.put_token(b"2", Role::Tenant, Some("other"), None).unwrap();
        let gone = super::super::Change {
            delete: vec![("Tenant".into(), "acme".into())],
            ..Default::default()
        };
        state.commit(&gone, &crate::ledger::Ledger::default()).unwrap();
        assert_eq!(state.token(b"1").unwrap(), None);
        let ids: Vec<u64> = state.tokens().unwrap().iter().map(|token| token.id).collect();
        assert_eq!(ids, [2]);
    }
}
