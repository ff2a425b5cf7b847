//! `pdp validate`: checks files without a daemon.

use std::process::ExitCode;

use pdp_spec::{Existing, Object, Substrate, SubstrateSpec, parse};

use crate::failure::CliFailure;
use crate::input::files::{AllowedFiles, FileAccessArgs, SpecFiles, read};
use crate::output;

/// Check files and whether they fit together; needs no daemon.
///
/// Without a Substrate among the files, it checks against the default Substrate of this machine. It
/// then assumes that external interfaces and tenants named in the files exist. `pdp apply
/// --dry-run` checks against the actual machine, and that images exist.
#[derive(Debug, clap::Args)]
#[command(group = SpecFiles::some(), after_help = "Example: pdp validate examples/ospf.yaml")]
pub struct ValidateArgs {
    #[command(flatten)]
    pub files: SpecFiles,
    #[command(flatten)]
    pub outside: FileAccessArgs,
}

pub fn validate(args: ValidateArgs) -> Result<ExitCode, CliFailure> {
    let files = read(&args.files.paths(), AllowedFiles::by(args.outside.allow_files_outside))?;
    let documents = parse(&files).map_err(|faults| CliFailure::Files(faults, files.clone()))?;
    let substrates = documents.iter().filter_map(|document| match &document.object {
        Object::Substrate(substrate) => Some(&substrate.spec),
        Object::VirtualNetwork(_) | Object::Tenant(_) => None,
    });
    let mut substrates = substrates.peekable();
    let cpus = rustix::thread::sched_getaffinity(None).map_or(1, |cpus| cpus.count());
    let (existing, scope) = if substrates.peek().is_some() {
        // A substrate that names CPUs may be for another machine.
        let cpus = substrates.any(SubstrateSpec::is_of_machine).then_some(0..cpus);
        let cpus = cpus.into_iter().flatten().collect();
        (Existing { cpus, ..Existing::default() }, "they fit together".to_owned())
    } else {
        let substrate = Some(Substrate::of_machine(&(0..cpus).collect()));
        let scope = format!(
            "on the default substrate of {}; `pdp apply --dry-run` checks against the node",
            pdp_spec::count(cpus, "CPU")
        );
        (Existing { substrate, unknown: true, ..Existing::default() }, scope)
    };
    let intent = pdp_spec::check(&documents, &existing)
        .map_err(|faults| CliFailure::Files(faults, files.clone()))?;
    for remark in pdp_spec::remarks(&documents, &intent) {
        eprintln!("warning: {remark}");
    }
    let count = match documents.len() {
        1 => "1 object is".to_owned(),
        count => format!("{count} objects are"),
    };
    output::write(format!("{count} valid: {scope}\n").as_bytes())
}
