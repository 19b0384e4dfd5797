//! What opens something is in nothing that is printed: no struct of any crate derives `Debug` over a key, a password, a token or a file that
//! has such in it. It has a type of its own that prints as `***`, or what holds it is printed by hand or not at all.

use std::path::{Path, PathBuf};

/// What such fields are called, alone or as the end of a name.
const SECRETS: &[&str] = &[
    "authorization",
    "configuration",
    "credential",
    "credentials",
    "key",
    "keys",
    "line",
    "password",
    "secret",
    "secrets",
    "token",
];

/// Types that print what they hold.
const PLAIN: &[&str] = &["String", "OsString", "str", "u8", "HeaderValue", "HeaderMap"];

/// Fields that are called so and are no secret.
const OTHERS: &[(&str, &str, &str)] = &[
    ("BatchRecord", "key", "what an operator calls a key"),
    ("CacheOptions", "key", "a name that a client gives its conversations"),
    ("PackedPlace", "key", "a digest of a file's name and date"),
    ("RowKey", "key", "what an operator calls a key"),
];

fn files(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() { files(&path, out) } else { out.push(path) }
    }
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// Names and types; of a tuple's the struct's name.
type StructFields<'a> = Vec<(&'a str, &'a str)>;

/// Names and fields of the structs of a source that derive `Debug`.
fn printed(source: &str) -> Vec<(&str, StructFields<'_>)> {
    let mut found = Vec::new();
    for item in source.split("#[derive(").skip(1) {
        let Some((derived, item)) = item.split_once(")]") else { continue };
        let Some((before, item)) = item.split_once("struct ") else { continue };
        let own = !["enum ", "fn ", "impl ", "union "].iter().any(|other| before.contains(other));
        if !own || !derived.contains("Debug") {
            continue;
        }
        let name = &item[..item.find(|c: char| !is_name(c)).unwrap_or(item.len())];
        let Some(begin) = item.find(['{', '(', ';']) else { continue };
        let fields: StructFields<'_> = match &item[begin..=begin] {
            "{" => {
                let body = item[begin + 1..].split("\n}").next().unwrap_or_default();
                let lines = body.lines().map(str::trim).filter(|line| !line.starts_with("//"));
                lines
                    .filter_map(|line| line.split_once(": "))
                    .map(|(field, kind)| (field.rsplit(' ').next().unwrap_or_default(), kind))
                    .collect()
            }
            "(" => vec![(name, item[begin + 1..].split(");").next().unwrap_or_default())],
            _ => Vec::new(),
        };
        found.push((name, fields));
    }
    found
}

fn is_secret(name: &str) -> bool {
    // `DataKey` is called as `data_key` is.
    let words = name
        .chars()
        .flat_map(|c| c.is_ascii_uppercase().then_some('_').into_iter().chain([c.to_ascii_lowercase()]));
    let words: String = words.collect();
    words.rsplit('_').next().is_some_and(|last| SECRETS.contains(&last))
}

/// Whether a type prints its content.
fn is_plain(kind: &str) -> bool {
    kind.split(|c: char| !is_name(c)).any(|name| PLAIN.contains(&name))
}

#[test]
fn nothing_prints_what_opens_something() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the folder of all crates");
    let mut sources = Vec::new();
    for one in std::fs::read_dir(crates).expect("crates") {
        files(&one.expect("an entry").path().join("src"), &mut sources);
    }
    let (mut seen, mut others) = (0, Vec::new());
    for path in sources.iter().filter(|path| path.extension().is_some_and(|end| end == "rs")) {
        let source = std::fs::read_to_string(path).expect("a source");
        for (name, fields) in printed(&source) {
            seen += 1;
            for (field, kind) in fields.into_iter().filter(|(field, kind)| is_secret(field) && is_plain(kind))
            {
                let known = OTHERS.iter().any(|(of, called, _)| (*of, *called) == (name, field));
                assert!(known, "{}: {name} prints its {field}: {kind}", path.display());
                others.push((name.to_owned(), field.to_owned()));
            }
        }
    }
    assert!(seen > 300, "only {seen} structs were found");
    for (name, field, _) in OTHERS {
        let found = others.iter().any(|(of, called)| (of.as_str(), called.as_str()) == (*name, *field));
        assert!(found, "{name} has no {field}, or does not print it");
    }
}

#[test]
fn what_would_be_printed_is_seen() {
    let source = "/// A key.\n#[derive(Clone, Debug)]\npub struct Given {\n    /// Opens it.\n    pub api_key: Option<String>,\n    pub name: String,\n}\n\
        #[derive(Debug)]\nstruct DataKey([u8; 32]);\n#[derive(Debug)]\nenum E { A }\nstruct Other { key: String }\n\
        #[derive(Debug)]\nstruct Wrapped {\n    password: Secret,\n}\n";
    let found: Vec<(&str, &str)> = printed(source)
        .into_iter()
        .flat_map(|(name, fields)| fields.into_iter().map(move |(field, kind)| (name, field, kind)))
        .filter(|(_, field, kind)| is_secret(field) && is_plain(kind))
        .map(|(name, field, _)| (name, field))
        .collect();
    assert_eq!(found, [("Given", "api_key"), ("DataKey", "DataKey")]);
}
