//! Cargo.toml: each crate uses the dependencies that it names, in the section where it names them.
//! Some crate uses each of the workspace's.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Names in a section of a manifest.
fn section(manifest: &str, header: &str) -> Vec<String> {
    let lines = manifest.lines().skip_while(|line| *line != format!("[{header}]")).skip(1);
    let lines = lines.take_while(|line| !line.starts_with('['));
    let name = |line: &str| line.split(['.', ' ', '=']).next().unwrap_or_default().to_owned();
    lines.map(name).filter(|name| !name.is_empty() && !name.starts_with('#')).collect()
}

/// Text of all Rust files below these paths, and of
/// the files elsewhere that they include as modules.
fn source(paths: &[PathBuf]) -> String {
    let mut found = String::new();
    for path in paths {
        if path.is_dir() {
            let entries = fs::read_dir(path).expect("a directory").flatten();
            found += &source(&entries.map(|entry| entry.path()).collect::<Vec<_>>());
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(path).expect("a file");
            let modules =
                text.split("#[path = \"").skip(1).filter_map(|rest| rest.split('"').next());
            let beside = path.parent().expect("a file");
            found += &source(&modules.map(|module| beside.join(module)).collect::<Vec<_>>());
            found += &text;
        }
    }
    found
}

/// True if a text contains a whole word.
fn has(text: &str, word: &str) -> bool {
    let is_part =
        |byte: Option<&u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric() || *byte == b'_');
    text.match_indices(word).any(|(at, _)| {
        let (before, after) = (&text.as_bytes()[..at], &text.as_bytes()[at + word.len()..]);
        !is_part(before.last()) && !is_part(after.first())
    })
}

#[test]
fn every_dependency_is_used() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("crates/e2e");
    let manifest = |path: &Path| fs::read_to_string(path.join("Cargo.toml")).expect("a manifest");
    let mut unused: BTreeSet<_> =
        section(&manifest(repository), "workspace.dependencies").into_iter().collect();
    assert!(unused.len() > 50, "{unused:?}");
    let mut wrong = Vec::new();
    for entry in fs::read_dir(repository.join("crates")).expect("crates").flatten() {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        let manifest = manifest(&path);
        let places: [(&str, &[&str]); 3] = [
            ("dependencies", &["src"]),
            ("dev-dependencies", &["src", "tests", "examples"]),
            ("build-dependencies", &["build.rs"]),
        ];
        for (header, places) in places {
            let places = places.iter().map(|place| path.join(place)).filter(|path| path.exists());
            let source = source(&places.collect::<Vec<_>>());
            for dependency in section(&manifest, header) {
                unused.remove(&dependency);
                if !has(&source, &dependency.replace('-', "_")) {
                    wrong.push(format!("{name}: {header}: {dependency}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "not used: {wrong:?}");
    assert!(unused.is_empty(), "used by no crate: {unused:?}");
}
