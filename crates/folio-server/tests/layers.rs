//! Inside the crate imports only go down, from module to module and from file to file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The crate's modules, from the top.
const LAYERS: &[&str] = &[
    "router",
    "serve",
    "routes",
    "app",
    "admin",
    "endpoints",
    "generation",
    "arrival",
    "listening",
    "load",
    "config",
    "response_store",
    "batch",
    "decoding",
    "safety",
    "observability",
    "http",
    "tenancy",
    "engine",
    "adapters",
    "threads",
    "trace_context",
    "error",
];

/// A source: its place below `src` (`["tenancy", "gate"]`; of a `mod.rs`, its folder), and its code without tests.
struct Source {
    path: Vec<String>,
    text: String,
}

fn files(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() { files(&path, out) } else { out.push(path) }
    }
}

/// All but the crate's root, and what tests share.
fn sources() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut paths = Vec::new();
    files(&root, &mut paths);
    let read = |path: PathBuf| {
        let text = std::fs::read_to_string(&path).expect("a source");
        let text = text.split("#[cfg(test)]").next().unwrap_or_default();
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        let text = code.collect::<Vec<_>>().join("\n");
        let path = path.strip_prefix(&root).expect("within").with_extension("");
        let mut path: Vec<String> =
            path.iter().map(|name| name.to_str().expect("UTF-8").to_owned()).collect();
        path.pop_if(|name| name == "mod");
        Source { path, text }
    };
    paths
        .into_iter()
        .map(read)
        .filter(|source| source.path != ["lib"] && source.path.last().is_none_or(|name| name != "testing"))
        .collect()
}

/// The names that follow `start` wherever it stands in the text, up to where no single name follows.
fn paths_after<'a>(text: &'a str, start: &'a str) -> impl Iterator<Item = Vec<&'a str>> {
    let bounded =
        move |at: &usize| !text[..*at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
    let starts = text.match_indices(start).map(|(at, _)| at).filter(bounded);
    starts.map(move |at| {
        let names = text[at + start.len()..].split("::");
        let word = |name: &'a str| {
            let end = name.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(name.len());
            (&name[..end], end == name.len())
        };
        let mut more = true;
        let list = names.map(word).take_while(|(_, whole)| std::mem::replace(&mut more, *whole));
        list.map(|(name, _)| name).filter(|name| !name.is_empty()).collect()
    })
}

#[test]
fn imports_only_go_down() {
    let layer = |module: &str| LAYERS.iter().position(|layer| *layer == module);
    let mut imports = 0;
    for Source { path, text } in sources() {
        let own = layer(&path[0]).unwrap_or_else(|| panic!("{} has no place among the layers", path[0]));
        for names in paths_after(&text, "crate::") {
            let name =
                names.first().unwrap_or_else(|| panic!("{path:?}: name one module per import of the crate"));
            let below = layer(name);
            let below =
                below.unwrap_or_else(|| panic!("{path:?} takes {name} from the root, which is above it"));
            imports += 1;
            assert!(own <= below, "{path:?} imports {name}, which is above it");
        }
    }
    assert!(imports > 200, "only {imports} imports were found");
}

#[test]
fn no_files_import_each_other() {
    let sources = sources();
    let known: BTreeSet<&[String]> = sources.iter().map(|source| &source.path[..]).collect();
    // The file that a path leads into: the longest beginning that is one.
    let file = |names: Vec<String>| (1..=names.len()).rev().find_map(|end| known.get(&names[..end]).copied());
    let mut imports: BTreeMap<&[String], BTreeSet<&[String]>> = BTreeMap::new();
    for Source { path, text } in &sources {
        let (folder, within) = (&path[..path.len() - 1], &path[..]);
        let child = |name: &str| known.contains(&[within, &[name.to_owned()]].concat()[..]);
        let absolute = paths_after(text, "crate::").map(|names| (&[][..], names));
        let siblings = paths_after(text, "super::").map(|names| (folder, names));
        // `mod.rs` names its children without more ado.
        let children =
            paths_after(text, "use ").filter(|names| names.first().is_some_and(|name| child(name)));
        let all = absolute.chain(siblings).chain(children.map(|names| (within, names)));
        let found = all.filter_map(|(base, names)| {
            file(base.iter().cloned().chain(names.into_iter().map(str::to_owned)).collect())
        });
        imports.insert(path, found.filter(|found| found != path).collect());
    }
    // Takes away what imports nothing that is left, and then what nothing imports.
    while let Some(ground) = imports.iter().find(|(_, below)| below.is_empty()).map(|(path, _)| *path) {
        imports.remove(ground);
        for below in imports.values_mut() {
            below.remove(ground);
        }
    }
    while let Some(top) = imports.keys().find(|path| !imports.values().any(|below| below.contains(*path))) {
        imports.remove(*top);
    }
    assert!(imports.is_empty(), "these import each other: {imports:#?}");
}

/// Where work may leave the event loop beside the pools of `threads`: what is bounded there by itself.
const THREADS: &[(&[&str], &str)] = &[
    (&["threads"], "the pools"),
    (&["tenancy", "tenants"], "one look at the file of keys at a time"),
    (&["safety", "callout"], "as many calls as the callout allows at once"),
    (&["admin", "records"], "one page of records at a time"),
    (&["serve"], "one file of usage, one pair of TLS files"),
];

#[test]
fn work_leaves_the_event_loop_by_pools_that_are_bounded() {
    let leaving: BTreeSet<Vec<String>> = sources()
        .into_iter()
        .filter(|source| source.text.contains("spawn_blocking"))
        .map(|source| source.path)
        .collect();
    let known: BTreeSet<Vec<String>> =
        THREADS.iter().map(|(path, _)| path.iter().map(|name| (*name).to_owned()).collect()).collect();
    assert_eq!(leaving, known);
}

/// Where JSON is read by other means than `folio_api::fields`, which has limits: what is small or the operator's, or is read off the event loop.
const JSON: &[(&[&str], &str)] = &[
    (&["batch", "lines"], "lines and results, on threads for files"),
    (&["batch", "records"], "what an earlier process left, at the start"),
    (&["endpoints", "batches", "run"], "results of an earlier process, on a thread for files"),
    (
        &["router", "asked"],
        "which model is meant; nothing is kept of the rest, and long ones are read on text threads",
    ),
    (&["router", "pages"], "pages of the router's own processes"),
    (&["safety", "callout"], "an answer of the operator's, on the thread that asked"),
    (&["safety", "declared"], "the operator's file, at the start"),
    (&["tenancy", "declared"], "the operator's file, at the start"),
    (&["tenancy", "keys"], "a record of the file of keys"),
];

#[test]
fn json_of_strangers_is_read_within_limits() {
    let reading: BTreeSet<Vec<String>> = sources()
        .into_iter()
        .filter(|source| {
            ["serde_json::from_", "serde_json::Deserializer"].iter().any(|by| source.text.contains(by))
        })
        .map(|source| source.path)
        .collect();
    let known: BTreeSet<Vec<String>> =
        JSON.iter().map(|(path, _)| path.iter().map(|name| (*name).to_owned()).collect()).collect();
    assert_eq!(reading, known);
}

/// Hashing is as long as a prompt: the engine does it, where `engine::hashes` says.
#[test]
fn prompts_are_hashed_by_the_engine_alone() {
    let hashing = |source: &Source| source.text.contains("BlockHashes::new");
    let found: Vec<_> = sources().into_iter().filter(hashing).map(|source| source.path).collect();
    assert!(found.is_empty(), "{found:?}");
}

/// Of a type they say nothing.
const VAGUE: [&str; 6] = ["Told", "Parts", "Info", "Data", "Manager", "Helper"];

/// A reader who finds a name knows what is meant, whichever of the crates he is in.
#[test]
fn no_two_types_of_the_api_the_server_and_the_text_have_one_name() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut named: BTreeMap<String, PathBuf> = BTreeMap::new();
    for name in ["folio-api", "folio-server", "folio-text"] {
        let mut paths = Vec::new();
        files(&root.join("..").join(name).join("src"), &mut paths);
        for path in paths {
            let text = std::fs::read_to_string(&path).expect("a source");
            let mut within_macro = false;
            for line in text.lines() {
                within_macro = line.starts_with("macro_rules!") || (within_macro && !line.starts_with('}'));
                // What a macro makes is no less a type.
                let line = if within_macro { line.trim_start() } else { line };
                let line =
                    line.strip_prefix("pub").map_or(line, |rest| rest.trim_start_matches(|c| c != ' '));
                let mut words =
                    line.trim_start_matches(' ').split(|c: char| !(c.is_alphanumeric() || c == '_'));
                let is_type = !line.starts_with("  ")
                    && words.next().is_some_and(|word| ["struct", "enum", "trait", "type"].contains(&word));
                let Some(name) = words.next().filter(|name| is_type && !name.is_empty()) else { continue };
                assert!(!VAGUE.contains(&name), "{name} is a type in {}, and says nothing", path.display());
                if let Some(other) = named.insert(name.to_owned(), path.clone()) {
                    panic!("{name} is a type in {} and in {}", other.display(), path.display());
                }
            }
        }
    }
    assert!(
        named.len() > 400 && named.contains_key("FairQueue") && named.contains_key("Follower"),
        "{named:?}"
    );
}
