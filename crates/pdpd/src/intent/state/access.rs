//! Tokens. Only the SHA-256 of each token is stored, so that a reader
//! of the file can't use its content to authenticate.

use pdp_api::{Role, Token};
use rusqlite::{OptionalExtension, Row, params};

use super::{StateError, StateFile};
use crate::util::now_ms;

/// Limit of stored tokens. Expired ones count until they are revoked.
pub const TOKENS_MAX: u64 = 10_000;

pub(super) const SCHEMA: &str = "
CREATE TABLE IF NOT EXISTS tokens (
    id INTEGER PRIMARY KEY AUTOINCREMENT, hash BLOB NOT NULL UNIQUE, role TEXT NOT NULL,
    tenant TEXT, created_ms INTEGER NOT NULL, expires_ms INTEGER) STRICT;
";

impl StateFile {
    /// Stores a token with this hash; `None` if there are [`TOKENS_MAX`].
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

    /// Returns the token with this hash, which may have expired.
    pub fn token(&self, hash: &[u8]) -> Result<Option<Token>, StateError> {
        self.read("looking for a token", |db| {
            let sql = "SELECT id, role, tenant, created_ms, expires_ms FROM tokens WHERE hash=?1";
            db.prepare_cached(sql)?.query_row([hash], token).optional()
        })
    }

    /// Returns all tokens, by id.
    pub fn tokens(&self) -> Result<Vec<Token>, StateError> {
        self.read("reading tokens", |db| {
            let sql = "SELECT id, role, tenant, created_ms, expires_ms FROM tokens ORDER BY id";
            db.prepare(sql)?.query_map([], token)?.collect()
        })
    }

    /// Deletes a token. Returns true if it existed.
    pub fn revoke(&self, id: u64) -> Result<bool, StateError> {
        // A number beyond SQLite's range belongs to no token.
        let Ok(id) = i64::try_from(id) else { return Ok(false) };
        let mut count = 0;
        self.write("revoking a token", |tx| {
            count = tx.execute("DELETE FROM tokens WHERE id=?1", [id])?;
            Ok(())
        })?;
        Ok(count > 0)
    }
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

pub(super) fn role(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<Role>> {
    let name: Option<String> = row.get(column)?;
    Ok(name.and_then(|name| Role::ALL.into_iter().find(|role| role.name() == name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deleting_a_tenant_deletes_its_tokens() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateFile::open(directory.path()).unwrap();
        state.put_token(b"1", Role::Tenant, Some("acme"), None).unwrap();
        state.put_token(b"2", Role::Tenant, Some("other"), None).unwrap();
        let gone = super::super::StateChange {
            delete: vec![("Tenant".into(), "acme".into())],
            ..Default::default()
        };
        state.commit(&gone).unwrap();
        assert_eq!(state.token(b"1").unwrap(), None);
        let ids: Vec<u64> = state.tokens().unwrap().iter().map(|token| token.id).collect();
        assert_eq!(ids, [2]);
    }
}
