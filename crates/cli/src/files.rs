//! Spec files of the command line.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use pdp_spec::{Existing, Object, SourceFile, limits, parse};

use crate::args::Validate;
use crate::failure::Failure;
use crate::output;

/// Reads files with all that they name; a directory stands for the specs in it, in the order of
/// their names, and `-` for standard input.
pub fn read(paths: &[PathBuf]) -> Result<Vec<SourceFile>, Failure> {
    let mut files = Vec::new();
    for path in paths {
        if path.as_os_str() == "-" {
            let mut text = String::new();
            std::io::stdin().take(limits::SPEC_BYTES_MAX as u64 + 1).read_to_string(&mut text)?;
            files.push(source("-".into(), text, Path::new(".")));
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
                files.push(file(&path)?);
            }
        } else {
            files.push(file(path)?);
        }
    }
    Ok(files)
}

fn file(path: &Path) -> Result<SourceFile, Failure> {
    let bytes = bytes(path, limits::SPEC_BYTES_MAX).map_err(Failure::Other)?;
    let text = String::from_utf8(bytes)
        .map_err(|_| Failure::Other(format!("{}: not UTF-8 text", path.display())))?;
    let directory = path.parent().unwrap_or(Path::new(""));
    Ok(source(path.display().to_string(), text, directory))
}

fn source(name: String, text: String, directory: &Path) -> SourceFile {
    SourceFile::read(name, text, |from, bytes_max| bytes(&directory.join(from), bytes_max))
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
    let paths: Vec<PathBuf> = args.files.into_iter().chain(args.more).collect();
    let files = read(&paths)?;
    let documents = parse(&files).map_err(|faults| Failure::Files(faults, files.clone()))?;
    let whole = documents.iter().any(|document| matches!(document.object, Object::Substrate(_)));
    if whole {
        pdp_spec::check(&documents, &Existing::default())
            .map_err(|faults| Failure::Files(faults, files.clone()))?;
    }
    let scope = if whole {
        "they fit together"
    } else {
        "without a Substrate only each by itself; `pdp apply --dry-run` checks against the node"
    };
    let count = match documents.len() {
        1 => "1 object is".to_owned(),
        count => format!("{count} objects are"),
    };
    output::write(format!("{count} valid: {scope}\n").as_bytes())
}
