//! Inside the crate imports only go down.

use std::path::{Path, PathBuf};

/// The crate's modules, from the top.
const LAYERS: &[&str] = &[
    "serve",
    "admin",
    "endpoints",
    "generation",
    "arrival",
    "app",
    "config",
    "response_store",
    "batch",
    "decoding",
    "safety",
    "observability",
    "http",
    "tenancy",
    "engine",
    "error",
];

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| *layer == module)
}

fn files(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() { files(&path, out) } else { out.push(path) }
    }
}

#[test]
fn imports_only_go_down() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut sources = Vec::new();
    files(&root, &mut sources);
    let mut imports = 0;
    for source in sources {
        let name = source.strip_prefix(&root).expect("within").with_extension("");
        let module = name.iter().next().expect("a name").to_str().expect("UTF-8").to_owned();
        if module == "lib" {
            continue;
        }
        let own = layer(&module).unwrap_or_else(|| panic!("{module} has no place among the layers"));
        let text = std::fs::read_to_string(&source).expect("a source");
        for path in text.split("crate::").skip(1) {
            let end = path.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(path.len());
            assert!(end > 0, "{}: name one module per import of the crate", source.display());
            let Some(below) = layer(&path[..end]) else { continue };
            imports += 1;
            assert!(own <= below, "{} imports {}, which is above it", source.display(), &path[..end]);
        }
    }
    assert!(imports > 200, "only {imports} imports were found");
}
