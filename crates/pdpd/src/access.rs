//! Who may do what: who asks, and the one table of what each request takes.
//!
//! | role | may |
//! |---|---|
//! | operator | everything |
//! | tenant | everything with vnets called `TENANT.NAME`, within its quota |
//! | viewer | look, at the whole node or at one tenant's vnets; not into frames or guests |
//!
//! A vnet that is not in the scope of who asks is answered like one that does not exist, before
//! anybody looks whether it does. What no rule is there for is refused.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use pdp_api::{NewToken, Problem, ProblemKind, Role, TOKEN_SECONDS_MAX, TokenRequest};
use pdp_spec::Tenant;
use sha2::{Digest, Sha256};

use crate::audit::Begun;
use crate::state::State;
use crate::state::access::{TOKENS_MAX, now_ms};

/// Random bytes of a token.
const TOKEN_BYTES: usize = 32;

/// What tokens begin with, so that they are known for what they are where they should not be.
const TOKEN_PREFIX: &str = "pdp_";

/// Whose vnets somebody may know of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All, and the node itself.
    Node,
    /// This tenant's.
    Tenant(String),
}

impl Scope {
    /// Whether a vnet of this name is, or would be, in it.
    pub fn sees(&self, vnet: &str) -> bool {
        self.tenant().is_none_or(|tenant| pdp_spec::tenant_of(vnet) == Some(tenant))
    }

    /// The tenant, if it is one's.
    pub fn tenant(&self) -> Option<&str> {
        match self {
            Self::Node => None,
            Self::Tenant(name) => Some(name),
        }
    }
}

/// Identity in the audit log of a client whose token does not exist.
pub const UNKNOWN_TOKEN: &str = "token:?";

/// Who asked for what a thread does.
#[derive(Clone, Debug)]
pub struct Asker {
    /// `user:NAME` or `token:ID`.
    pub who: String,
    /// With what it may do something.
    pub scope: Scope,
    /// Its request's row in the audit log.
    pub begun: Option<Arc<Begun>>,
}

thread_local! {
    static ASKER: RefCell<Option<Asker>> = const { RefCell::new(None) };
}

/// Does something on behalf of somebody, whom [`asker`] names meanwhile on this thread.
pub fn on_behalf_of<T>(asker: Asker, act: impl FnOnce() -> T) -> T {
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

/// On whose behalf this thread works; `None`: on nobody's.
pub fn asker() -> Option<Asker> {
    ASKER.with_borrow(Clone::clone)
}

/// Somebody who is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// `user:NAME` or `token:ID`.
    pub who: String,
    /// What it may do.
    pub role: Role,
    /// With what.
    pub scope: Scope,
}

/// The other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// A process of this machine.
    Unix {
        /// Its user, as the kernel has it.
        uid: u32,
        /// The process; 0 where it is not known.
        pid: i32,
    },
    /// Over TLS.
    Tls(SocketAddr),
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix { pid, .. } => write!(f, "pid {pid}"),
            Self::Tls(address) => address.fmt(f),
        }
    }
}

/// What a request takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Right {
    /// Somebody known; the answer has what is in its scope.
    Known,
    /// To look at the node.
    ReadNode,
    /// To change the node.
    ChangeNode,
    /// To apply files; what is in them is checked against the scope.
    Apply,
    /// To look at the vnet that the path names.
    ReadVnet,
    /// To look into its frames and guests, or to run commands there.
    EnterVnet,
    /// To change it.
    ChangeVnet,
}

impl Right {
    /// Whether it is one to change something, which is written down before that.
    pub fn changes(self) -> bool {
        matches!(self, Self::ChangeNode | Self::Apply | Self::EnterVnet | Self::ChangeVnet)
    }

    /// Whether somebody has it, for the vnet that the path names if any.
    pub fn check(self, caller: &Caller, vnet: Option<&str>) -> Result<(), Problem> {
        if let Some(vnet) = vnet
            && !caller.scope.sees(vnet)
        {
            return Err(no_vnet(vnet));
        }
        let node = caller.scope == Scope::Node;
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
        let problem = Problem::new(ProblemKind::Forbidden, format!("not for the role {role}"));
        Err(problem.hint("ask an operator"))
    }
}

/// How a request is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// At once, or after a change.
    Whole,
    /// As long as there is something to be said: a session.
    GoesOn,
}

/// What each request takes. `http`'s tests hold it against the description of the API.
const RULES: &[(&str, &str, Right)] = &[
    ("GET", "/v1/openapi.json", Right::Known),
    ("GET", "/v1/pdp-v1.json", Right::Known),
    ("GET", "/v1/version", Right::Known),
    ("GET", "/v1/vnets", Right::Known),
    ("GET", "/v1/stats", Right::Known),
    ("GET", "/v1/watch", Right::Known),
    ("GET", "/v1/substrate", Right::Known),
    ("GET", "/v1/tenants", Right::Known),
    ("GET", "/v1/audit", Right::Known),
    ("GET", "/v1/images", Right::Known),
    ("POST", "/v1/images", Right::Apply),
    ("DELETE", "/v1/images/{image}", Right::Apply),
    ("DELETE", "/v1/images", Right::Apply),
    ("GET", "/v1/doctor", Right::ReadNode),
    ("GET", "/v1/logs/{process}", Right::ReadNode),
    ("GET", "/v1/tokens", Right::ReadNode),
    ("POST", "/v1/tokens", Right::ChangeNode),
    ("DELETE", "/v1/tokens/{id}", Right::ChangeNode),
    ("DELETE", "/v1/tenants/{tenant}", Right::ChangeNode),
    ("DELETE", "/v1/substrate", Right::ChangeNode),
    ("POST", "/v1/up", Right::ChangeNode),
    ("POST", "/v1/down", Right::ChangeNode),
    ("POST", "/v1/apply", Right::Apply),
    ("GET", "/v1/vnets/{vnet}", Right::ReadVnet),
    ("GET", "/v1/vnets/{vnet}/links/{link}/fdb", Right::ReadVnet),
    ("DELETE", "/v1/vnets/{vnet}/links/{link}/fdb", Right::ChangeVnet),
    ("GET", "/v1/vnets/{vnet}/nodes/{node}/routes", Right::ReadVnet),
    ("GET", "/v1/vnets/{vnet}/nodes/{node}/logs/{process}", Right::ReadVnet),
    ("GET", "/v1/vnets/{vnet}/nodes/{node}/fastpath/filters", Right::ReadVnet),
    ("GET", "/v1/vnets/{vnet}/nodes/{node}/fastpath/counters", Right::ReadVnet),
    ("GET", "/v1/vnets/{vnet}/nodes/{node}/fastpath/queues", Right::ReadVnet),
    ("POST", "/v1/vnets/{vnet}/nodes/{node}/fastpath/filters", Right::ChangeVnet),
    ("POST", "/v1/vnets/{vnet}/nodes/{node}/fastpath/frames", Right::EnterVnet),
    ("GET", "/v1/vnets/{vnet}/nodes/{node}/ports/{port}/capture", Right::EnterVnet),
    ("POST", "/v1/vnets/{vnet}/nodes/{node}/ports/{port}/trace", Right::EnterVnet),
    ("POST", "/v1/vnets/{vnet}/nodes/{node}/exec", Right::EnterVnet),
    ("DELETE", "/v1/vnets/{vnet}", Right::ChangeVnet),
    ("POST", "/v1/vnets/{vnet}/restart", Right::ChangeVnet),
    ("PUT", "/v1/vnets/{vnet}/nodes/{node}/guests", Right::ChangeVnet),
    ("PUT", "/v1/vnets/{vnet}/links/{link}", Right::ChangeVnet),
    ("PATCH", "/v1/vnets/{vnet}/links/{link}", Right::ChangeVnet),
];

/// What a request takes, by its method and the path as the API describes it.
pub fn rule(method: &str, path: &str) -> Option<Right> {
    // What answers GET answers HEAD.
    let method = if method == "HEAD" { "GET" } else { method };
    RULES.iter().find(|rule| rule.0 == method && rule.1 == path).map(|rule| rule.2)
}

/// Paths, as the API describes them, whose answers go on.
const SESSIONS: [&str; 6] = [
    "/v1/watch",
    "/v1/logs/{process}",
    "/v1/vnets/{vnet}/nodes/{node}/routes",
    "/v1/vnets/{vnet}/nodes/{node}/logs/{process}",
    "/v1/vnets/{vnet}/nodes/{node}/ports/{port}/capture",
    "/v1/vnets/{vnet}/nodes/{node}/exec",
];

/// How requests of a path, as the API describes it, are answered.
pub fn answer(path: &str) -> Answer {
    if SESSIONS.contains(&path) { Answer::GoesOn } else { Answer::Whole }
}

/// No vnet of this name, or none that who asks may know of.
pub fn no_vnet(vnet: &str) -> Problem {
    Problem::not_found(format!("no vnet {vnet:?}")).hint("`pdp get` lists what there is")
}

/// Who is let in.
#[derive(Debug)]
pub struct Guard {
    /// Where tokens are.
    pub state: Arc<State>,
    /// Users that are operators, by name or number, beside root and this process's own.
    pub operators: Vec<String>,
    /// Users that are viewers of the whole node, by name or number.
    pub viewers: Vec<String>,
}

impl Guard {
    /// Who asks: by the token, or else by the user at the other end of the Unix socket.
    ///
    /// # Errors
    /// With who it seems to be: nobody who is known.
    pub fn identify(
        &self,
        peer: Peer,
        token: Option<&str>,
        tenants: &BTreeMap<String, Tenant>,
    ) -> Result<Caller, (String, Problem)> {
        match (token, peer) {
            (Some(token), _) => self.by_token(token),
            (None, Peer::Unix { uid, .. }) => self.by_user(uid, tenants),
            (None, Peer::Tls(_)) => {
                let problem = Problem::new(ProblemKind::Unauthorized, "a request without a token");
                let hint = "an operator makes one by `pdp token create`; say --token-file FILE";
                Err(("-".into(), problem.hint(hint)))
            }
        }
    }

    fn by_token(&self, token: &str) -> Result<Caller, (String, Problem)> {
        let unknown = |who: String, why: &str| {
            let problem = Problem::new(ProblemKind::Unauthorized, why);
            (who, problem.hint("an operator makes another by `pdp token create`"))
        };
        // The hash of what came is looked up: how long that takes tells nothing of a token.
        let found = self.state.token(&hash(token)).map_err(|error| {
            tracing::warn!("{}", crate::host::words(&error));
            (UNKNOWN_TOKEN.to_owned(), Problem::internal("tokens can't be read"))
        })?;
        let Some(token) = found else {
            return Err(unknown(UNKNOWN_TOKEN.into(), "the token is unknown, or was revoked"));
        };
        let who = format!("token:{}", token.id);
        if token.expires_ms.is_some_and(|end| end <= now_ms()) {
            return Err(unknown(who, "the token has expired"));
        }
        let scope = token.tenant.map_or(Scope::Node, Scope::Tenant);
        Ok(Caller { who, role: token.role, scope })
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
        let of_node = |role| Caller { who: who.clone(), role, scope: Scope::Node };
        if is_operator(uid) || is_in(&self.operators) {
            return Ok(of_node(Role::Operator));
        }
        if is_in(&self.viewers) {
            return Ok(of_node(Role::Viewer));
        }
        let mut mine = tenants.iter().filter(|(_, tenant)| is_in(&tenant.spec.unix_users));
        // One user by name and by number in two: neither tenant's, rather than the wrong one's.
        if let (Some((tenant, _)), None) = (mine.next(), mine.next()) {
            let scope = Scope::Tenant(tenant.clone());
            return Ok(Caller { who, role: Role::Tenant, scope });
        }
        let known = name.unwrap_or(number);
        let problem =
            Problem::new(ProblemKind::Forbidden, format!("user {known} is not known here"));
        let hint = "ask an operator for a token, or to be in unixUsers of one Tenant";
        Err((who, problem.hint(hint)))
    }

    /// Makes a token.
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
            .map_err(|error| Problem::internal(crate::host::words(&error)))?;
        let token = token.ok_or_else(|| {
            let problem = format!("{TOKENS_MAX} tokens are the limit");
            Problem::new(ProblemKind::Conflict, problem).hint("revoke some by `pdp token revoke`")
        })?;
        Ok(NewToken { secret, token })
    }

    /// Revokes a token: from the next request on it is none.
    pub fn revoke_token(&self, id: u64) -> Result<(), Problem> {
        let known = self.state.revoke(id).map_err(|e| Problem::internal(crate::host::words(&e)))?;
        let none = || Problem::not_found(format!("no token {id}")).hint("see `pdp token list`");
        known.then_some(()).ok_or_else(none)
    }
}

/// Whether a user is an operator whatever is set: root, and who runs this process.
pub fn is_operator(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

/// A user's first name on this machine.
fn user_name(uid: u32) -> Option<String> {
    let user = nix::unistd::User::from_uid(nix::unistd::Uid::from_raw(uid));
    user.ok().flatten().map(|user| user.name)
}

fn hash(token: &str) -> Vec<u8> {
    Sha256::digest(token.as_bytes()).to_vec()
}

/// Bytes in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard() -> (tempfile::TempDir, Guard) {
        let directory = tempfile::tempdir().unwrap();
        let state = Arc::new(State::open(directory.path()).unwrap());
        let guard = Guard { state, operators: vec!["70001".into()], viewers: vec!["70002".into()] };
        (directory, guard)
    }

    fn tenant(name: &str, users: &[&str]) -> (String, Tenant) {
        let text = serde_json::json!({"apiVersion": "pdp/v1", "metadata": {"name": name},
            "spec": {"unixUsers": users}});
        (name.into(), serde_json::from_value(text).unwrap())
    }

    #[test]
    fn users_are_who_settings_and_tenants_say() {
        let (_directory, guard) = guard();
        let tenants = BTreeMap::from([
            tenant("acme", &["70003", "70005"]),
            tenant("other", &["70004", "70005"]),
        ]);
        let who = |uid| guard.identify(Peer::Unix { uid, pid: 1 }, None, &tenants);
        let what = |uid| who(uid).map(|caller| (caller.role, caller.scope)).ok();
        let of = |name: &str| Scope::Tenant(name.into());
        assert_eq!(what(0), Some((Role::Operator, Scope::Node)));
        assert_eq!(what(70001), Some((Role::Operator, Scope::Node)));
        assert_eq!(what(70002), Some((Role::Viewer, Scope::Node)));
        assert_eq!(what(70003), Some((Role::Tenant, of("acme"))));
        assert_eq!(what(70004), Some((Role::Tenant, of("other"))));
        for uid in [70005, 70006] {
            let (name, problem) = who(uid).unwrap_err();
            assert_eq!((name, problem.kind), (format!("user:{uid}"), ProblemKind::Forbidden));
            assert!(!problem.to_string().contains("acme"), "{problem}");
        }
    }

    #[test]
    fn tokens_are_known_by_their_hash_until_they_expire_or_are_revoked() {
        let (directory, guard) = guard();
        let tenants = BTreeMap::from([tenant("acme", &[])]);
        let request =
            TokenRequest { role: Role::Tenant, tenant: Some("acme".into()), expires_seconds: None };
        let made = guard.create_token(&request, &tenants).unwrap();
        assert_eq!(made.secret.len(), TOKEN_PREFIX.len() + 2 * TOKEN_BYTES);
        let peer = Peer::Tls("192.0.2.1:1".parse().unwrap());
        let role = |token: &str| guard.identify(peer, Some(token), &tenants).map(|c| c.role);
        assert_eq!(role(&made.secret), Ok(Role::Tenant));
        let mut wrong = made.secret.clone();
        wrong.pop();
        for bad in [wrong.as_str(), "", "pdp_"] {
            let (who, problem) = role(bad).unwrap_err();
            assert_eq!((who.as_str(), problem.kind), ("token:?", ProblemKind::Unauthorized));
        }
        // A token that is wrong is not made good by the user who sends it.
        let root = guard.identify(Peer::Unix { uid: 0, pid: 1 }, Some("pdp_"), &tenants);
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
    fn tokens_name_a_tenant_where_they_have_to() {
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
