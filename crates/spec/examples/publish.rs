//! Generates schema/pdp-v1.json, docs/spec.md, docs/sysctls.md
//! and the table of docs/tenants.md from the types.

use std::path::Path;

use pdp_spec::shared::{BEGIN, END};

fn main() -> std::io::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let schema = serde_json::to_string_pretty(&pdp_spec::schema::published())?;
    std::fs::write(root.join("schema/pdp-v1.json"), schema + "\n")?;
    std::fs::write(root.join("docs/sysctls.md"), pdp_spec::sysctl::markdown())?;
    let tenants = root.join("docs/tenants.md");
    let text = std::fs::read_to_string(&tenants)?;
    if let Some((before, after)) = text.split_once(BEGIN)
        && let Some((_, after)) = after.split_once(END)
    {
        let table = pdp_spec::shared::markdown();
        std::fs::write(tenants, format!("{before}{BEGIN}{table}{END}{after}"))?;
    }
    std::fs::write(root.join("docs/spec.md"), pdp_spec::reference::markdown())
}
