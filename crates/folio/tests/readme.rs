//! What the README shows is what the code is.

use std::path::Path;

fn read(relative: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(relative);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn the_step_loop_is_the_real_one() {
    let source = read("crates/folio-engine/src/engine.rs");
    let start = source.find("    fn run(&mut self) {").expect("engine.rs has the loop");
    let end = start + source[start..].find("\n    }\n").expect("the loop ends") + "\n    }".len();
    let code: Vec<&str> =
        source[start..end].lines().map(|line| line.strip_prefix("    ").unwrap_or(line)).collect();
    assert!(read("README.md").contains(&code.join("\n")), "README.md shows another step loop than engine.rs");
}

#[test]
fn the_documents_it_names_exist() {
    let readme = read("README.md");
    let links: Vec<&str> = readme.split("](").skip(1).filter_map(|rest| rest.split(')').next()).collect();
    assert!(links.len() > 4);
    for link in links.into_iter().filter(|link| !link.starts_with("http")) {
        read(link);
    }
}
