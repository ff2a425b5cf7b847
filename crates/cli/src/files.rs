//! Spec files of the command line.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use pdp_spec::{Existing, Object, SourceFile, Substrate, SubstrateSpec, limits, parse};

use crate::args::Validate;
use crate::failure::Failure;
use crate::output;

/// Which files of the machine a spec may name, to be put into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Named {
    /// Those below the spec's own directory: who wrote it gets at no others of who applies it.
    Below,
    /// All.
    Any,
}

impl Named {
    /// As the flag says.
    pub fn by(outside: bool) -> Self {
        if outside { Self::Any } else { Self::Below }
    }
}

/// Reads files with all that they name; a directory stands for the specs in it, in the order of
/// their names, and `-` for standard input.
pub fn read(paths: &[PathBuf], named: Named) -> Result<Vec<SourceFile>, Failure> {
    let mut files = Vec::new();
    for path in paths {
        if path.as_os_str() == "-" {
            let mut text = String::new();
            std::io::stdin().take(limits::SPEC_BYTES_MAX as u64 + 1).read_to_string(&mut text)?;
            files.push(source("-".into(), text, Path::new("."), named));
        } else if path.is_dir() {
            let mut found = Vec::new();
            for entry in std::fs::read_dir(path).map_err(|error| unreadable(path, &error))? {
                let path = entry?.path();
                if path.extension().is_some_and(|kind| kind == "yaml" || kind == "yml") {
                    found.push(path);
                }
            }
            if found.is_empty() {
                return Err(Failure::Other(format!(
                    "{}: no *.yaml or *.yml in it",
                    path.display()
                )));
            }
            found.sort();
            for path in found {
                files.push(file(&path, named)?);
            }
        } else {
            files.push(file(path, named)?);
        }
    }
    Ok(files)
}

fn file(path: &Path, named: Named) -> Result<SourceFile, Failure> {
    let bytes = bytes(path, limits::SPEC_BYTES_MAX).map_err(Failure::Other)?;
    let text = String::from_utf8(bytes)
        .map_err(|_| Failure::Other(format!("{}: not UTF-8 text", path.display())))?;
    let directory = path.parent().unwrap_or(Path::new(""));
    Ok(source(path.display().to_string(), text, directory, named))
}

fn source(name: String, text: String, directory: &Path, named: Named) -> SourceFile {
    SourceFile::read(name, text, |from, bytes_max| {
        let path = directory.join(from);
        if named == Named::Below {
            below(&path, directory)?;
        }
        bytes(&path, bytes_max)
    })
}

/// That a path is below a directory, wherever symbolic links lead.
fn below(path: &Path, directory: &Path) -> Result<(), String> {
    let real = |path: &Path| {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        path.canonicalize().map_err(|error| format!("{}: {error}", path.display()))
    };
    if real(path)?.starts_with(real(directory)?) {
        return Ok(());
    }
    Err("not below the spec's own directory; copy it there, or apply it with --allow-files-outside if \
         you trust who wrote the spec"
        .to_owned())
}

fn bytes(path: &Path, bytes_max: usize) -> Result<Vec<u8>, String> {
    let unreadable = |error: std::io::Error| format!("{}: {error}", path.display());
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(unreadable)?;
    file.take(bytes_max as u64 + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() > bytes_max {
        return Err(format!("{}: over {bytes_max} bytes", path.display()));
    }
    Ok(bytes)
}

fn unreadable(path: &Path, error: &std::io::Error) -> Failure {
    Failure::Other(format!("{}: {error}", path.display()))
}

/// The objects of files, as `pdp delete` and `pdp inspect` name them: vnets, then tenants, then the
/// substrate.
pub fn objects(files: &[SourceFile]) -> Result<Vec<String>, Failure> {
    let documents = parse(files).map_err(|faults| Failure::Files(faults, files.to_vec()))?;
    let (mut vnets, mut tenants, mut substrate) = (Vec::new(), Vec::new(), None);
    for document in &documents {
        let name = document.object.name();
        match &document.object {
            Object::VirtualNetwork(_) => vnets.push(name.to_owned()),
            Object::Tenant(_) => tenants.push(format!("tenant/{name}")),
            Object::Substrate(_) => substrate = Some("substrate".to_owned()),
        }
    }
    vnets.extend(tenants);
    vnets.extend(substrate);
    Ok(vnets)
}

pub fn validate(args: Validate) -> Result<ExitCode, Failure> {
    let files = read(&args.files.paths(), Named::by(args.outside.allow_files_outside))?;
    let documents = parse(&files).map_err(|faults| Failure::Files(faults, files.clone()))?;
    let substrates = documents.iter().filter_map(|document| match &document.object {
        Object::Substrate(substrate) => Some(&substrate.spec),
        Object::VirtualNetwork(_) | Object::Tenant(_) => None,
    });
    let mut substrates = substrates.peekable();
    let cpus = rustix::thread::sched_getaffinity(None).map_or(1, |cpus| cpus.count());
    let (existing, scope) = if substrates.peek().is_some() {
        // One that names CPUs may be of another machine.
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
        .map_err(|faults| Failure::Files(faults, files.clone()))?;
    for remark in pdp_spec::remarks(&documents, &intent) {
        eprintln!("warning: {remark}");
    }
    let count = match documents.len() {
        1 => "1 object is".to_owned(),
        count => format!("{count} objects are"),
    };
    output::write(format!("{count} valid: {scope}\n").as_bytes())
}
