//! docs/guarantees.md: each test named there exists, and the ones here all run.

use std::fs;
use std::path::Path;

/// A promise is a list item: a sentence, then files and their tests.
#[test]
fn each_promise_has_its_test() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("crates/e2e");
    let page = fs::read_to_string(repository.join("docs/guarantees.md")).expect("the page");
    let (promises, _) = page.split_once("\n## What does not hold\n").expect("the heading");
    // Wrapped lines of an item are indented.
    let promises = promises.replace("\n  ", " ");
    let mut named = 0;
    for item in promises.lines().filter_map(|line| line.strip_prefix("- ")) {
        let tests = item.find("`crates/").unwrap_or_else(|| panic!("without a file: {item}"));
        let before_item = named;
        let mut source = String::new();
        for word in item[tests..].split('`').skip(1).step_by(2) {
            if word.starts_with("crates/") {
                source = fs::read_to_string(repository.join(word)).expect(word);
            } else {
                let test = format!("fn {word}(");
                let (before, _) = source.split_once(&test).unwrap_or_else(|| panic!("{word}"));
                let attributes = before.rsplit("\n\n").next().unwrap_or_default();
                let is_test = ["test]", "::test("].iter().any(|test| attributes.contains(test))
                    || before.contains("proptest! {");
                assert!(is_test && !attributes.contains("ignore"), "{word} is not run");
                named += 1;
            }
        }
        assert!(named > before_item, "without a test: {item}");
    }
    assert!(named > 50, "{named} tests are named");
}

#[test]
fn every_test_file_takes_the_right_permit() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/e2e");
    for (directory, is_alone) in [("alone", true), ("beside", false)] {
        let modules = fs::read_to_string(tests.join(directory).join("mod.rs")).expect("mod.rs");
        let mut files = 0;
        for entry in fs::read_dir(tests.join(directory)).expect("tests").flatten() {
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            let Some(module) = name.strip_suffix(".rs").filter(|module| *module != "mod") else {
                continue;
            };
            let is_in = ["mod ", "mod _", "pub(crate) mod "]
                .map(|first| modules.contains(&format!("\n{first}{module};")));
            assert!(is_in.contains(&true), "{name} is not in mod.rs");
            let text = fs::read_to_string(path).expect("a test");
            let tests = text.matches("\n#[test]\n").count();
            let alone = text.matches("() {\n    let _alone = alone();\n").count();
            assert_eq!(alone, if is_alone { tests } else { 0 }, "{directory}/{name}");
            files += 1;
        }
        assert!(files > 5, "{files} in {directory}");
    }
}
