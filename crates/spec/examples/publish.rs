//! Writes schema/pdp-v1.json, docs/spec.md and docs/sysctls.md anew from the types.

use std::path::Path;

fn main() -> std::io::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let schema = serde_json::to_string_pretty(&pdp_spec::schema::published())?;
    std::fs::write(root.join("schema/pdp-v1.json"), schema + "\n")?;
    std::fs::write(root.join("docs/sysctls.md"), pdp_spec::sysctl::markdown())?;
    std::fs::write(root.join("docs/spec.md"), pdp_spec::reference::markdown())
}
