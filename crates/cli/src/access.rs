//! Tenants, tokens, the audit log.

use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pdp_api::client::Client;
use pdp_api::{AuditEntry, AuditQuery, Role, TenantInfo, Token, TokenRequest};
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::args::{self, Format, RoleName, TokenAction};
use crate::failure::CliFailure;
use crate::images::mebibytes;
use crate::output::{or_dash, print, section, table, write};
use crate::shape::Shape;
use crate::show::object;

pub async fn tenants(client: &Client, shape: &Shape) -> Result<ExitCode, CliFailure> {
    shape.print(&client.tenants().await?, |tenants, _| {
        if tenants.is_empty() {
            return "no tenants; `pdp apply` one (`kind: Tenant`)\n".into();
        }
        let rows = tenants.iter().map(|tenant| {
            let spec = &tenant.spec["spec"];
            let keys = spec["interfaces"].as_object().into_iter().flat_map(|all| all.keys());
            [
                tenant.name.clone(),
                or_dash(words(&spec["unixUsers"])),
                or_dash(quota(&spec["quota"])),
                or_dash(keys.cloned().collect::<Vec<_>>().join(",")),
                tenant.vnets.len().to_string(),
                mebibytes(tenant.image_bytes),
            ]
        });
        table(["TENANT", "USERS", "QUOTA", "INTERFACES", "VNETS", "IMAGES"], rows.collect())
    })
}

pub async fn tenant(client: &Client, name: &str, shape: &Shape) -> Result<ExitCode, CliFailure> {
    let all = client.tenants().await?;
    let Some(tenant) = all.into_iter().find(|tenant| tenant.name == name) else {
        return Err(CliFailure::Other(format!("no tenant {name}; `pdp get tenants` lists them")));
    };
    let status = json!({"vnets": tenant.vnets, "imageBytes": tenant.image_bytes});
    object(shape, (Some(&tenant.spec), &status), &tenant, |tenant: &TenantInfo| {
        let spec = &tenant.spec["spec"];
        let grants = spec["interfaces"].as_object().into_iter().flatten().map(|(name, grant)| {
            let keys = |key: &str| or_dash(grant[key].as_str().unwrap_or_default());
            let whole = if grant["whole"] == true { "yes" } else { "no" };
            let locals = or_dash(words(&grant["locals"]));
            [name.clone(), keys("vxlan"), keys("udp"), whole.into(), locals]
        });
        let grants: Vec<_> = grants.collect();
        let interfaces = match grants.is_empty() {
            true => String::new(),
            false => table(["INTERFACE", "VXLAN", "UDP", "WHOLE", "LOCALS"], grants),
        };
        format!("{}\n", tenant.name)
            + &format!("users: {}\n", or_dash(words(&spec["unixUsers"])))
            + &format!("quota: {}\n", or_dash(quota(&spec["quota"])))
            + &format!("images: {}\n", or_dash(words(&spec["images"])))
            + &format!("registries: {}\n", or_dash(words(&spec["registries"])))
            + &format!("images kept: {}\n", mebibytes(tenant.image_bytes))
            + &format!("vnets: {}\n", or_dash(tenant.vnets.join(", ")))
            + &section("Interfaces", &interfaces)
    })
}

fn words(list: &Value) -> String {
    let words = list.as_array().into_iter().flatten().filter_map(Value::as_str);
    words.collect::<Vec<_>>().join(",")
}

fn quota(quota: &Value) -> String {
    let bounds = quota.as_object().into_iter().flatten();
    bounds.map(|(name, bound)| format!("{name} {bound}")).collect::<Vec<_>>().join(", ")
}

pub async fn token(client: &Client, args: args::TokenArgs) -> Result<ExitCode, CliFailure> {
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

pub async fn audit(client: &Client, args: args::AuditArgs) -> Result<ExitCode, CliFailure> {
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

/// Formats a time in UTC, RFC 3339, with a precision of seconds.
pub fn time(ms: u64) -> String {
    rfc3339(ms).unwrap_or_else(|| "-".into())
}

/// Time with milliseconds, from milliseconds since 1970.
pub fn time_with_ms(ms: u64) -> String {
    let whole = rfc3339(ms).as_deref().and_then(|text| text.strip_suffix('Z')).map(str::to_owned);
    whole.map_or_else(|| "-".into(), |text| format!("{text}.{:03}Z", ms % 1000))
}

fn rfc3339(ms: u64) -> Option<String> {
    let seconds = i64::try_from(ms / 1000).unwrap_or(i64::MAX);
    let at = OffsetDateTime::from_unix_timestamp(seconds).ok();
    at.and_then(|at| at.format(&Rfc3339).ok())
}
