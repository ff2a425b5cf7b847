//! Tenants, as `pdp get` and `pdp inspect` show them.

use std::process::ExitCode;

use pdp_api::TenantInfo;
use pdp_api::client::Client;
use serde_json::{Value, json};

use crate::failure::CliFailure;
use crate::output::shape::Shape;
use crate::output::words::mebibytes;
use crate::output::{or_dash, section, table};

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
    shape.print_object((Some(&tenant.spec), &status), &tenant, |tenant: &TenantInfo| {
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
