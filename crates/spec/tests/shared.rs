//! The table of shared resources: each row refers to existing
//! code, and no limit of a shared resource is missing.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use pdp_spec::shared::{self, ALL, BEGIN, END};

/// Constants `*_MAX` that limit a single owner's resources,
/// or that affect nobody else. See the file's head.
const OWN: &str = include_str!("shared/own.txt");

/// Constants `*_MAX` that limit shared resources without a
/// share for each tenant, with the effect of exceeding them.
const WITHOUT_SHARE: &str = include_str!("shared/without_share.txt");

/// Crates whose limits affect nobody on a node: measurements, demonstrations and tests.
const OUTSIDE: [&str; 5] = ["bench", "demo", "fuzz", "e2e", "testbed"];

fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|end| end == "rs") {
            found.push(path);
        }
    }
}

/// Returns constants `*_MAX` in a file's text before its tests.
fn bounds(text: &str) -> impl Iterator<Item = &str> {
    let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    code.lines().filter_map(|line| {
        let declared = line.trim_start().split_once("const ")?;
        let is_declaration = matches!(declared.0, "" | "pub " | "pub(crate) " | "pub(super) ");
        let name = declared.1.split(':').next()?;
        (is_declaration && name.ends_with("_MAX")).then_some(name)
    })
}

/// Returns all of them, as `FILE NAME`.
fn all_bounds() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(crates()).unwrap() {
        let directory = entry.unwrap().path();
        let name = directory.file_name().unwrap().to_string_lossy().into_owned();
        if OUTSIDE.contains(&&*name) || !directory.join("src").is_dir() {
            continue;
        }
        let mut files = Vec::new();
        sources(&directory.join("src"), &mut files);
        for file in files {
            let text = fs::read_to_string(&file).unwrap();
            let place = file.strip_prefix(&directory).unwrap().display().to_string();
            found.extend(bounds(&text).map(|bound| format!("{name}/{place} {bound}")));
        }
    }
    found
}

#[test]
fn every_shared_limit_has_a_table_entry() {
    let listed: Vec<&str> = OWN.lines().filter(|line| !line.starts_with('#')).collect();
    let mut known: BTreeSet<String> = listed.iter().map(|line| (*line).to_owned()).collect();
    assert!(known.len() == listed.len() && listed.is_sorted(), "own.txt: sorted, each line once");
    for line in WITHOUT_SHARE.lines().filter(|line| !line.starts_with('#')) {
        let (bound, why) = line.split_once(": ").expect("a reason");
        assert!(!why.is_empty() && known.insert(bound.to_owned()), "{line}: it is in two lists");
    }
    for (file, name) in ALL.iter().flat_map(|row| row.constants) {
        assert!(known.insert(format!("{file} {name}")), "{file} {name} is in a row and a list");
    }
    let found = all_bounds();
    let new: Vec<&String> = found.difference(&known).collect();
    assert!(
        new.is_empty(),
        "{new:#?}: does it bound what all share? Then give it a row in crates/spec/src/shared.rs, with a share for each \
         tenant; if not, a line in crates/spec/tests/shared/own.txt"
    );
    let gone: Vec<&String> = known.difference(&found).collect();
    assert!(gone.is_empty(), "{gone:#?} are not there any more");
}

#[test]
fn finds_bounds_in_source_text() {
    let text = "pub const A_MAX: u32 = 1;\n    const B_MAX: u8 = 2;\nconst MAX_C: u8 = 1;\n\
                #[cfg(test)]\nmod tests {\n    const D_MAX: u8 = 1;\n}\n";
    assert_eq!(bounds(text).collect::<Vec<_>>(), ["A_MAX", "B_MAX"]);
}

/// A row without counting code and a test is only words.
#[test]
fn every_shared_limit_has_counter_and_test() {
    for row in &ALL {
        assert!(crates().join(row.counted).is_file(), "{}: no {}", row.name, row.counted);
        let (file, test) = row.test;
        let text = fs::read_to_string(crates().join(file)).unwrap();
        assert!(text.contains(&format!("fn {test}(")), "{}: no {test} in {file}", row.name);
        if let Some(total) = row.total {
            assert!(row.operators < total, "{}", row.name);
            assert!(row.tenant <= row.tenants(), "{}: one tenant has all", row.name);
        }
    }
}

/// A tenant gets what the table says, regardless of the code that enforces it.
#[test]
fn every_quota_key_has_a_table_entry() {
    let schema = pdp_spec::schema::published();
    let keys = schema["$defs"]["Quota"]["properties"].as_object().unwrap().keys();
    let rows: BTreeSet<&str> = ALL.iter().filter_map(|row| row.key).collect();
    let keys: BTreeSet<&str> = keys.map(String::as_str).collect();
    assert_eq!(rows, keys);
}

#[test]
fn documented_limits_table_is_current() {
    let text = fs::read_to_string(crates().join("../docs/tenants.md")).unwrap();
    let table = text.split_once(BEGIN).unwrap().1.split_once(END).unwrap().0;
    assert!(
        table == shared::markdown(),
        "run `cargo run -p pdp-spec --example publish` and commit what it wrote"
    );
}
