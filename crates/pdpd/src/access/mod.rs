//! Authenticates clients, and limits them to the permissions of their roles. The
//! API's table of endpoints has the permission for each request.
//!
//! | role | may |
//! |---|---|
//! | operator | everything |
//! | tenant | everything with vnets called `TENANT.NAME`, within its quota |
//! | viewer | look, at the whole node or at one tenant's vnets; not into frames or guests |
//!
//! If a vnet is outside the client's scope, the answer is the same as
//! for a vnet that does not exist. It is given before anything checks
//! whether the vnet exists. A method without an endpoint is refused.

pub mod audit;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use pdp_api::{NewToken, Problem, ProblemKind, Role, TOKEN_SECONDS_MAX, TokenRequest};
use pdp_spec::Tenant;
use sha2::{Digest, Sha256};

use crate::access::audit::PendingAudit;
use crate::intent::state::StateFile;
use crate::intent::state::access::TOKENS_MAX;
use crate::util::{hex, now_ms};

/// Random bytes of a token.
const TOKEN_BYTES: usize = 32;

/// Prefix of all tokens, so that a leaked token is recognizable.
const TOKEN_PREFIX: &str = "pdp_";

/// Set of vnets that a client may know of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AccessScope {
    /// All vnets, and the node itself.
    Node,
    /// The vnets of this tenant.
    Tenant(String),
}

impl AccessScope {
    /// True if a vnet of this name is, or would be, in the scope.
    pub fn sees(&self, vnet: &str) -> bool {
        self.tenant().is_none_or(|tenant| pdp_spec::tenant_of(vnet) == Some(tenant))
    }

    /// Returns the tenant, if the scope is a tenant's.
    pub fn tenant(&self) -> Option<&str> {
        match self {
            Self::Node => None,
            Self::Tenant(name) => Some(name),
        }
    }
}

/// Identity in the audit log of a client whose token does not exist.
pub const UNKNOWN_TOKEN: &str = "token:?";

/// Client on whose behalf a thread works.
#[derive(Clone, Debug)]
pub struct Requester {
    /// `user:NAME` or `token:ID`.
    pub identity: String,
    /// Scope in which the client may act.
    pub scope: AccessScope,
    /// The request's entry in the audit log.
    pub audit_entry: Option<Arc<PendingAudit>>,
}

thread_local! {
    static ASKER: RefCell<Option<Requester>> = const { RefCell::new(None) };
}

/// Runs `act` on behalf of `current_requester`. Meanwhile [`current_requester`] returns it on this
/// thread.
pub fn on_behalf_of<T>(asker: Requester, act: impl FnOnce() -> T) -> T {
    struct Reset;
    impl Drop for Reset {
        fn drop(&mut self) {
            ASKER.take();
        }
    }
    let _reset = Reset;
    ASKER.set(Some(asker));
    act()
}

/// Returns the client on whose behalf this thread works; `None` if there is none.
pub fn current_requester() -> Option<Requester> {
    ASKER.with_borrow(Clone::clone)
}

/// An authenticated client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// `user:NAME` or `token:ID`.
    pub identity: String,
    /// Role, which decides what the client may do.
    pub role: Role,
    /// Objects on which it may do that.
    pub scope: AccessScope,
}

/// The other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerIdentity {
    /// A process of this machine.
    Unix {
        /// The user, as the kernel reports it.
        uid: u32,
        /// The process; 0 if unknown.
        pid: i32,
    },
    /// A client that connects over TLS.
    Tls(SocketAddr),
}

impl fmt::Display for PeerIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix { pid, .. } => write!(f, "pid {pid}"),
            Self::Tls(address) => address.fmt(f),
        }
    }
}

/// Permission that a request requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permission {
    /// Any authenticated client; the answer contains what is in its scope.
    Known,
    /// Read the node.
    ReadNode,
    /// Change the node.
    ChangeNode,
    /// Apply files; their content is checked against the scope.
    Apply,
    /// Read the vnet that the path names.
    ReadVnet,
    /// Read the vnet's frames and guests, or run commands in it.
    EnterVnet,
    /// Change the vnet.
    ChangeVnet,
}

impl Permission {
    /// True if the request changes something. Such a request is logged before it acts.
    pub fn changes(self) -> bool {
        matches!(self, Self::ChangeNode | Self::Apply | Self::EnterVnet | Self::ChangeVnet)
    }

    /// Checks that the caller has the permission, for the vnet in the path if there is one.
    pub fn check(self, caller: &Caller, vnet: Option<&str>) -> Result<(), Problem> {
        if let Some(vnet) = vnet
            && !caller.scope.sees(vnet)
        {
            return Err(no_vnet(vnet));
        }
        let node = caller.scope == AccessScope::Node;
        let may = match (self, caller.role) {
            (_, Role::Operator) => true,
            (Self::Known | Self::ReadVnet, _) => true,
            (Self::Apply | Self::EnterVnet | Self::ChangeVnet, Role::Tenant) => true,
            (Self::ReadNode, Role::Viewer) => node,
            _ => false,
        };
        if may {
            return Ok(());
        }
        let role = caller.role.name();
        let problem =
            Problem::new(ProblemKind::Forbidden, format!("the role {role} may not do this"));
        Err(problem.hint("ask an operator"))
    }
}

/// Problem: no vnet has this name, or the client may not know of it.
pub fn no_vnet(vnet: &str) -> Problem {
    Problem::not_found(format!("no vnet {vnet:?}")).hint("`pdp get` lists the vnets")
}

/// Authenticates clients.
#[derive(Debug)]
pub struct Authenticator {
    /// State file with the tokens.
    pub state: Arc<StateFile>,
    /// Names or numbers of the users that are operators, besides root and this process's own user.
    pub operators: Vec<String>,
    /// Names or numbers of the users that may view the whole node.
    pub viewers: Vec<String>,
}

impl Authenticator {
    /// Identifies the client by its token, or else by the user at the other end of the Unix socket.
    ///
    /// # Errors
    /// The client is unknown. The error contains its apparent identity.
    pub fn identify(
        &self,
        peer: PeerIdentity,
        token: Option<&str>,
        tenants: &BTreeMap<String, Tenant>,
    ) -> Result<Caller, (String, Problem)> {
        match (token, peer) {
            (Some(token), _) => self.by_token(token),
            (None, PeerIdentity::Unix { uid, .. }) => self.by_user(uid, tenants),
            (None, PeerIdentity::Tls(_)) => {
                let problem = Problem::new(ProblemKind::Unauthorized, "the request has no token");
                let hint = "an operator creates one with `pdp token create`; give it with \
                            --token-file FILE";
                Err(("-".into(), problem.hint(hint)))
            }
        }
    }

    fn by_token(&self, token: &str) -> Result<Caller, (String, Problem)> {
        let unknown = |who: String, why: &str| {
            let problem = Problem::new(ProblemKind::Unauthorized, why);
            (who, problem.hint("an operator creates another with `pdp token create`"))
        };
        // The look-up uses the hash of the received token, so its
        // duration reveals nothing about a token.
        let found = self.state.token(&hash(token)).map_err(|error| {
            tracing::warn!("{}", crate::util::error_chain(&error));
            (UNKNOWN_TOKEN.to_owned(), Problem::internal("tokens can't be read"))
        })?;
        let Some(token) = found else {
            return Err(unknown(UNKNOWN_TOKEN.into(), "the token is unknown, or was revoked"));
        };
        let who = format!("token:{}", token.id);
        if token.expires_ms.is_some_and(|end| end <= now_ms()) {
            return Err(unknown(who, "the token has expired"));
        }
        let scope = token.tenant.map_or(AccessScope::Node, AccessScope::Tenant);
        Ok(Caller { identity: who, role: token.role, scope })
    }

    fn by_user(
        &self,
        uid: u32,
        tenants: &BTreeMap<String, Tenant>,
    ) -> Result<Caller, (String, Problem)> {
        let name = user_name(uid);
        let number = uid.to_string();
        let who = format!("user:{}", name.as_ref().unwrap_or(&number));
        let is_in = |users: &[String]| {
            users.iter().any(|user| *user == number || Some(user) == name.as_ref())
        };
        let of_node = |role| Caller { identity: who.clone(), role, scope: AccessScope::Node };
        if is_operator(uid) || is_in(&self.operators) {
            return Ok(of_node(Role::Operator));
        }
        if is_in(&self.viewers) {
            return Ok(of_node(Role::Viewer));
        }
        let mut mine = tenants.iter().filter(|(_, tenant)| is_in(&tenant.spec.unix_users));
        // If one tenant lists the user by name and another by number,
        // it belongs to neither, rather than to the wrong one.
        if let (Some((tenant, _)), None) = (mine.next(), mine.next()) {
            let scope = AccessScope::Tenant(tenant.clone());
            return Ok(Caller { identity: who, role: Role::Tenant, scope });
        }
        let known = name.unwrap_or(number);
        let problem = Problem::new(ProblemKind::Forbidden, format!("unknown user {known}"));
        let hint = "ask an operator for a token, or for an entry in the unixUsers of one Tenant";
        Err((who, problem.hint(hint)))
    }

    /// Creates a token.
    pub fn create_token(
        &self,
        request: &TokenRequest,
        tenants: &BTreeMap<String, Tenant>,
    ) -> Result<NewToken, Problem> {
        let invalid = |text: &str| Problem::new(ProblemKind::Invalid, text);
        match (request.role, &request.tenant) {
            (Role::Tenant, None) => {
                return Err(invalid("a token of the role tenant names no tenant"));
            }
            (Role::Operator, Some(_)) => {
                return Err(invalid("a token of the role operator names a tenant"));
            }
            (_, Some(tenant)) if !tenants.contains_key(tenant) => {
                let problem = Problem::not_found(format!("no tenant {tenant:?}"));
                return Err(problem.hint("`pdp get tenants` lists them"));
            }
            _ => {}
        }
        let seconds = request.expires_seconds;
        if seconds.is_some_and(|seconds| !(1..=TOKEN_SECONDS_MAX).contains(&seconds)) {
            return Err(invalid("expiresSeconds").hint(format!("use 1 to {TOKEN_SECONDS_MAX}")));
        }
        let mut bytes = [0; TOKEN_BYTES];
        let flags = rustix::rand::GetRandomFlags::empty();
        let got = rustix::rand::getrandom(&mut bytes, flags).map_err(Problem::internal)?;
        if got != TOKEN_BYTES {
            return Err(Problem::internal("no random bytes"));
        }
        let secret = TOKEN_PREFIX.to_owned() + &hex(&bytes);
        let expires_ms = seconds.map(|seconds| now_ms() + seconds * 1000);
        let tenant = request.tenant.as_deref();
        let token = self
            .state
            .put_token(&hash(&secret), request.role, tenant, expires_ms)
            .map_err(|error| Problem::internal(crate::util::error_chain(&error)))?;
        let token = token.ok_or_else(|| {
            let problem = format!("the limit of {TOKENS_MAX} tokens is reached");
            Problem::new(ProblemKind::Conflict, problem).hint("revoke some with `pdp token revoke`")
        })?;
        Ok(NewToken { secret, token })
    }

    /// Revokes a token. The next request with it is refused.
    pub fn revoke_token(&self, id: u64) -> Result<(), Problem> {
        let known =
            self.state.revoke(id).map_err(|e| Problem::internal(crate::util::error_chain(&e)))?;
        let none = || Problem::not_found(format!("no token {id}")).hint("see `pdp token list`");
        known.then_some(()).ok_or_else(none)
    }
}

/// True if a user is an operator regardless of the settings: root, and the user of this process.
pub fn is_operator(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

/// Returns a user's first name on this machine.
fn user_name(uid: u32) -> Option<String> {
    let user = nix::unistd::User::from_uid(nix::unistd::Uid::from_raw(uid));
    user.ok().flatten().map(|user| user.name)
}

fn hash(token: &str) -> Vec<u8> {
    Sha256::digest(token.as_bytes()).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard() -> (tempfile::TempDir, Authenticator) {
        let directory = tempfile::tempdir().unwrap();
        let state = Arc::new(StateFile::open(directory.path()).unwrap());
        let guard =
            Authenticator { state, operators: vec!["70001".into()], viewers: vec!["70002".into()] };
        (directory, guard)
    }

    fn tenant(name: &str, users: &[&str]) -> (String, Tenant) {
        let text = serde_json::json!({"apiVersion": "pdp/v1", "metadata": {"name": name},
            "spec": {"unixUsers": users}});
        (name.into(), serde_json::from_value(text).unwrap())
    }

    #[test]
    fn users_get_roles_from_settings_and_tenants() {
        let (_directory, guard) = guard();
        let tenants = BTreeMap::from([
            tenant("acme", &["70003", "70005"]),
            tenant("other", &["70004", "70005"]),
        ]);
        let who = |uid| guard.identify(PeerIdentity::Unix { uid, pid: 1 }, None, &tenants);
        let what = |uid| who(uid).map(|caller| (caller.role, caller.scope)).ok();
        let of = |name: &str| AccessScope::Tenant(name.into());
        assert_eq!(what(0), Some((Role::Operator, AccessScope::Node)));
        assert_eq!(what(70001), Some((Role::Operator, AccessScope::Node)));
        assert_eq!(what(70002), Some((Role::Viewer, AccessScope::Node)));
        assert_eq!(what(70003), Some((Role::Tenant, of("acme"))));
        assert_eq!(what(70004), Some((Role::Tenant, of("other"))));
        for uid in [70005, 70006] {
            let (name, problem) = who(uid).unwrap_err();
            assert_eq!((name, problem.kind), (format!("user:{uid}"), ProblemKind::Forbidden));
            assert!(!problem.to_string().contains("acme"), "{problem}");
        }
    }

    #[test]
    fn tokens_are_valid_until_expiry_or_revocation() {
        let (directory, guard) = guard();
        let tenants = BTreeMap::from([tenant("acme", &[])]);
        let request =
            TokenRequest { role: Role::Tenant, tenant: Some("acme".into()), expires_seconds: None };
        let made = guard.create_token(&request, &tenants).unwrap();
        assert_eq!(made.secret.len(), TOKEN_PREFIX.len() + 2 * TOKEN_BYTES);
        let peer = PeerIdentity::Tls("192.0.2.1:1".parse().unwrap());
        let role = |token: &str| guard.identify(peer, Some(token), &tenants).map(|c| c.role);
        assert_eq!(role(&made.secret), Ok(Role::Tenant));
        let mut wrong = made.secret.clone();
        wrong.pop();
        for bad in [wrong.as_str(), "", "pdp_"] {
            let (who, problem) = role(bad).unwrap_err();
            assert_eq!((who.as_str(), problem.kind), ("token:?", ProblemKind::Unauthorized));
        }
        // A wrong token is refused even if the user who sends it is known.
        let root = guard.identify(PeerIdentity::Unix { uid: 0, pid: 1 }, Some("pdp_"), &tenants);
        assert!(root.is_err());
        let past = guard.state.put_token(&hash("old"), Role::Operator, None, Some(now_ms() - 1));
        assert_eq!(past.unwrap().unwrap().id, 2);
        let (who, problem) = role("old").unwrap_err();
        assert_eq!((who.as_str(), problem.kind), ("token:2", ProblemKind::Unauthorized));
        for file in std::fs::read_dir(directory.path()).unwrap() {
            let bytes = std::fs::read(file.unwrap().path()).unwrap();
            let secret = made.secret.as_bytes();
            assert!(!bytes.windows(secret.len()).any(|part| part == secret), "it is stored");
        }
        guard.revoke_token(made.token.id).unwrap();
        assert!(role(&made.secret).is_err());
        assert_eq!(guard.revoke_token(made.token.id).unwrap_err().kind, ProblemKind::NotFound);
    }

    #[test]
    fn only_tenant_tokens_name_a_tenant() {
        let (_directory, guard) = guard();
        let tenants = BTreeMap::from([tenant("acme", &[])]);
        let make = |role, tenant: Option<&str>, expires_seconds| {
            let request = TokenRequest { role, tenant: tenant.map(Into::into), expires_seconds };
            guard.create_token(&request, &tenants).map(drop).map_err(|problem| problem.kind)
        };
        assert_eq!(make(Role::Tenant, None, None), Err(ProblemKind::Invalid));
        assert_eq!(make(Role::Operator, Some("acme"), None), Err(ProblemKind::Invalid));
        assert_eq!(make(Role::Viewer, Some("none"), None), Err(ProblemKind::NotFound));
        assert_eq!(make(Role::Operator, None, Some(0)), Err(ProblemKind::Invalid));
        assert_eq!(make(Role::Operator, None, Some(u64::MAX)), Err(ProblemKind::Invalid));
        assert_eq!(make(Role::Viewer, None, Some(60)), Ok(()));
        assert_eq!(make(Role::Viewer, Some("acme"), None), Ok(()));
    }
}
