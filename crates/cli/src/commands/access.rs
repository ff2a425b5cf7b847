//! Tokens, the audit log.

use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::{Subcommand, ValueEnum};
use pdp_api::client::Client;
use pdp_api::{AuditEntry, AuditQuery, Role, Token, TokenRequest};

use crate::failure::CliFailure;
use crate::input::times::duration;
use crate::output::words::time;
use crate::output::{Format, or_dash, print, table, write};

/// Create, list and revoke tokens, which identify clients over TLS. For operators.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example: pdp token create --tenant acme --expires 30d > acme.token\n         \
                        pdp token create --role viewer\n         \
                        pdp token list\n         pdp token revoke 3"
)]
pub struct TokenArgs {
    #[command(subcommand)]
    pub action: TokenAction,
}

#[derive(Debug, Subcommand)]
pub enum TokenAction {
    /// Create a token and print it. Nobody can read it again later.
    Create(TokenCreateArgs),
    /// List tokens, without their secrets.
    List {
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
    /// Revoke a token from the next request on. Its open connections break off within seconds.
    Revoke {
        /// Number of the token.
        id: u64,
    },
}

#[derive(Debug, clap::Args)]
pub struct TokenCreateArgs {
    /// Grant the vnets of this tenant.
    #[arg(long, value_name = "NAME")]
    pub tenant: Option<String>,
    /// Rights of the token [default: tenant with --tenant].
    #[arg(long, value_enum, required_unless_present = "tenant")]
    pub role: Option<RoleName>,
    /// Lifetime: a number with s, m, h or d. Without it: until it is revoked.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub expires: Option<Duration>,
    /// `table` prints the token to standard output and its description to standard error.
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RoleName {
    /// Read and change everything.
    Operator,
    /// Read and change the tenant's own vnets.
    Tenant,
    /// Read the whole node or the tenant's vnets.
    Viewer,
}

/// Print requests, their clients and results, oldest first.
///
/// Operators see all requests, a tenant its own. The result `unfinished` stands for a change in
/// progress, or one in progress when the daemon was killed.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp audit --since 1h\n         \
                        pdp audit --who user:alice --vnet acme.lab\n         \
                        pdp audit --reads -o json --limit 10000")]
pub struct AuditArgs {
    /// Only requests of this long ago and later: a number with s, m, h or d.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub since: Option<Duration>,
    /// Only requests of `user:NAME` or `token:ID`.
    #[arg(long, value_name = "WHO")]
    pub who: Option<String>,
    /// Only requests that name this vnet in their path, or changed it.
    #[arg(long, value_name = "VNET")]
    pub vnet: Option<String>,
    /// List requests that only read something as well.
    #[arg(long)]
    pub reads: bool,
    /// Number of requests, newest first.
    #[arg(long, value_name = "COUNT", default_value_t = pdp_api::AUDIT_LIMIT_DEFAULT,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(pdp_api::AUDIT_LIMIT_MAX)))]
    pub limit: u32,
    #[arg(short = 'o', long, value_enum, default_value_t)]
    pub format: Format,
}

pub async fn token(client: &Client, args: TokenArgs) -> Result<ExitCode, CliFailure> {
    match args.action {
        TokenAction::Create(create) => {
            let role = match create.role {
                Some(RoleName::Operator) => Role::Operator,
                Some(RoleName::Viewer) => Role::Viewer,
                Some(RoleName::Tenant) | None => Role::Tenant,
            };
            let expires_seconds = create.expires.map(|duration| duration.as_secs());
            let request = TokenRequest { role, tenant: create.tenant, expires_seconds };
            let made = client.create_token(&request).await?;
            if create.format == Format::Table {
                let line = format!("token {}, {}; keep it\n", made.token.id, scope(&made.token));
                let _ = std::io::stderr().write_all(line.as_bytes());
            }
            print(create.format, &made, |made| format!("{}\n", made.secret))
        }
        TokenAction::List { format } => print(format, &client.tokens().await?, |tokens| {
            if tokens.is_empty() {
                return "no tokens; `pdp token create` makes one\n".into();
            }
            let rows = tokens.iter().map(|token| {
                let end = token.expires_ms.map(|end| match end <= now_ms() {
                    true => format!("{} (over)", time(end)),
                    false => time(end),
                });
                [
                    token.id.to_string(),
                    token.role.name().into(),
                    or_dash(token.tenant.clone().unwrap_or_default()),
                    time(token.created_ms),
                    or_dash(end.unwrap_or_default()),
                ]
            });
            table(["ID", "ROLE", "TENANT", "MADE", "EXPIRES"], rows.collect())
        }),
        TokenAction::Revoke { id } => {
            client.revoke_token(id).await?;
            write(format!("token {id} is revoked\n").as_bytes())
        }
    }
}

fn scope(token: &Token) -> String {
    match &token.tenant {
        Some(tenant) => format!("role {}, tenant {tenant}", token.role.name()),
        None => format!("role {}", token.role.name()),
    }
}

pub async fn audit(client: &Client, args: AuditArgs) -> Result<ExitCode, CliFailure> {
    let since = |ago: Duration| now_ms().saturating_sub(ago.as_millis() as u64);
    let query = AuditQuery {
        since_ms: args.since.map(since),
        who: args.who,
        vnet: args.vnet,
        changes: !args.reads,
        limit: Some(args.limit),
    };
    print(args.format, &client.audit(&query).await?, |rows| {
        let header =
            ["TIME", "WHO", "ROLE", "FROM", "WHAT", "RESULT", "MS", "CHANGED", "COMMAND", "ERROR"];
        table(header, rows.iter().map(row).collect())
    })
}

fn row(row: &AuditEntry) -> [String; 10] {
    let role = row.role.map_or("-", Role::name);
    [
        time(row.at_ms),
        row.who.clone(),
        row.tenant.as_ref().map_or(role.into(), |tenant| format!("{role} {tenant}")),
        row.from.clone(),
        row.what.clone(),
        match (row.exit, row.status) {
            (Some(code), _) => format!("exit {code}"),
            (None, Some(status)) => status.to_string(),
            (None, None) => "unfinished".into(),
        },
        row.duration_us.map_or("-".into(), |us| format!("{:.1}", us as f64 / 1000.0)),
        or_dash(changed(row)),
        or_dash(row.command.clone().unwrap_or_default()),
        row.error.clone().unwrap_or_default(),
    ]
}

/// Lists the objects that a request changed.
fn changed(row: &AuditEntry) -> String {
    let mut words: Vec<String> =
        row.objects.iter().map(|it| format!("{} {}", it.action.name(), it.object)).collect();
    if row.more_objects > 0 {
        words.push(format!("{} more", row.more_objects));
    }
    words.join(", ")
}

fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}
