//! What the heart gives out is called as nothing else is: who meets a name in another crate knows what is meant.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The same thing on both sides of a seam that knows no other crate.
const THE_SAME: [&str; 2] = ["BlockCopy", "TokenLogprobs"];

fn files(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() { files(&path, out) } else { out.push(path) }
    }
}

/// The types that the crates below `folder` define for others, their own or those outside, and whether for those outside.
fn types(folder: &Path) -> Vec<(String, bool, PathBuf)> {
    let mut paths = Vec::new();
    files(&folder.join("src"), &mut paths);
    let mut types = Vec::new();
    for path in paths {
        for line in std::fs::read_to_string(&path).expect("a source").lines() {
            let mut words = line.split([' ', '<', '(', ';', ':', '{']).filter(|word| !word.is_empty());
            let visible = line.starts_with("pub");
            let outside = line.starts_with("pub ");
            words.find(|word| ["struct", "enum", "trait", "type"].contains(word));
            let name = words.next().filter(|name| visible && name.starts_with(char::is_uppercase));
            types.extend(name.map(|name| (name.to_owned(), outside, path.clone())));
        }
    }
    types
}

#[test]
fn no_other_crate_calls_a_type_what_the_heart_calls_one_of_its_own() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let heart = ["folio-kv", "folio-engine"];
    let given: BTreeMap<String, PathBuf> = heart
        .iter()
        .flat_map(|name| types(&crates.join(name)))
        .filter(|(name, outside, _)| *outside && !THE_SAME.contains(&name.as_str()))
        .map(|(name, _, path)| (name, path))
        .collect();
    assert!(given.len() > 100 && given.contains_key("KvCache") && given.contains_key("Layout"), "{given:?}");
    for entry in std::fs::read_dir(&crates).expect("the workspace") {
        let folder = entry.expect("an entry").path();
        if heart.iter().any(|name| folder.ends_with(name)) {
            continue;
        }
        for (name, _, path) in types(&folder) {
            // What tests are made of is called as it likes.
            let is_for_tests = path.components().any(|part| part.as_os_str() == "testing");
            if let Some(own) = given.get(&name).filter(|_| !is_for_tests) {
                panic!("{name} is a type in {} and in {}", own.display(), path.display());
            }
        }
    }
}
