//! Spec files of the command line.

use std::io::Read;
use std::path::{Path, PathBuf};

use clap::ArgGroup;
use pdp_spec::{Object, SourceFile, limits, parse};

use crate::failure::CliFailure;

/// Spec files, given with -f or without.
#[derive(Debug, clap::Args)]
pub struct SpecFiles {
    /// Spec file, directory of spec files (*.yaml, *.yml), or - for standard input; may be
    /// repeated.
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Same as FILE.
    #[arg(short = 'f', long = "file", value_name = "FILE", num_args = 1..)]
    more: Vec<PathBuf>,
}

impl SpecFiles {
    /// Requires at least one file.
    pub fn some() -> ArgGroup {
        ArgGroup::new("specs").args(["files", "more"]).multiple(true).required(true)
    }

    pub fn paths(&self) -> Vec<PathBuf> {
        self.files.iter().chain(&self.more).cloned().collect()
    }
}

/// Files that specs may refer to.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct FileAccessArgs {
    /// Let specs refer to files (`from`, `frames`) outside their own directory.
    #[arg(long)]
    pub allow_files_outside: bool,
}

/// Files of the machine that a spec may refer to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllowedFiles {
    /// Only files below the spec's own directory. The spec's author can't read other files of the
    /// user who applies it.
    Below,
    /// All files.
    Any,
}

impl AllowedFiles {
    /// Returns the rule for the flag `--allow-files-outside`.
    pub fn by(outside: bool) -> Self {
        if outside { Self::Any } else { Self::Below }
    }
}

/// Reads files with the files that they refer to. A directory stands for its specs, in the order of
/// their names, and `-` for standard input.
pub fn read(paths: &[PathBuf], named: AllowedFiles) -> Result<Vec<SourceFile>, CliFailure> {
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
                return Err(CliFailure::Other(format!(
                    "{}: has no *.yaml or *.yml file",
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

fn file(path: &Path, named: AllowedFiles) -> Result<SourceFile, CliFailure> {
    let bytes = bytes(path, limits::SPEC_BYTES_MAX).map_err(CliFailure::Other)?;
    let text = String::from_utf8(bytes)
        .map_err(|_| CliFailure::Other(format!("{}: not UTF-8 text", path.display())))?;
    let directory = path.parent().unwrap_or(Path::new(""));
    Ok(source(path.display().to_string(), text, directory, named))
}

fn source(name: String, text: String, directory: &Path, named: AllowedFiles) -> SourceFile {
    SourceFile::read(name, text, |from, bytes_max| {
        let path = directory.join(from);
        if named == AllowedFiles::Below {
            below(&path, directory)?;
        }
        bytes(&path, bytes_max)
    })
}

/// Checks that a path is below a directory after following symbolic links.
fn below(path: &Path, directory: &Path) -> Result<(), String> {
    let real = |path: &Path| {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        path.canonicalize().map_err(|error| format!("{}: {error}", path.display()))
    };
    if real(path)?.starts_with(real(directory)?) {
        return Ok(());
    }
    Err("outside the spec's directory; copy it there, or apply with --allow-files-outside if you \
         trust the spec's author"
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

fn unreadable(path: &Path, error: &std::io::Error) -> CliFailure {
    CliFailure::Other(format!("{}: {error}", path.display()))
}

/// Lists the objects of files by their names in `pdp delete` and `pdp inspect`: vnets, then
/// tenants, then the substrate.
pub fn objects(files: &[SourceFile]) -> Result<Vec<String>, CliFailure> {
    let documents = parse(files).map_err(|faults| CliFailure::Files(faults, files.to_vec()))?;
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
