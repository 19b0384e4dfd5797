//! Where NVIDIA's libraries are looked for.
//!
//! Owns: the places and their order. Must never: know what is in a library.

use std::path::{Path, PathBuf};

/// Opens the first library of these names (newest first, `libx.so.13`) that can be opened: what the loader finds, else a toolkit, else
/// the wheels of the Python environment that is active. A file that exists and cannot be opened is an error.
///
/// Errors: what opening it said; or, in the inner one's place, everything that was tried.
pub fn find<T, E>(names: &[&str], open: impl Fn(&Path) -> Result<T, E>) -> Result<Result<T, E>, String> {
    let candidates = candidates(names);
    for path in &candidates {
        match open(path) {
            Err(_) if path.components().count() == 1 || !path.exists() => {}
            tried => return Ok(tried),
        }
    }
    let tried: Vec<String> = candidates.iter().map(|path| path.display().to_string()).collect();
    Err(tried.join(", "))
}

/// File names for the loader to search, then files.
fn candidates(names: &[&str]) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = names.iter().map(PathBuf::from).collect();
    found.extend(names.iter().map(|name| Path::new("/usr/local/cuda/lib64").join(name)));
    if let Some(environment) = std::env::var_os("VIRTUAL_ENV").or_else(|| std::env::var_os("CONDA_PREFIX")) {
        found.extend(in_environment(Path::new(&environment), names));
    }
    found
}

/// `lib/python3.*/site-packages/nvidia/*/lib/`: where NVIDIA's wheels put their libraries.
fn in_environment(environment: &Path, names: &[&str]) -> Vec<PathBuf> {
    let entries = |folder: PathBuf| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        paths.sort();
        paths
    };
    let is_library = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        names.contains(&name)
    };
    let pythons = entries(environment.join("lib")).into_iter();
    let packages = pythons.flat_map(|python| entries(python.join("site-packages/nvidia")));
    packages.flat_map(|package| entries(package.join("lib"))).filter(is_library).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wheels_are_found_in_an_environment() {
        let folder = tempfile::tempdir().unwrap();
        let names = ["libnvrtc.so.13", "libnvrtc.so.12"];
        let lib = folder.path().join("lib/python3.12/site-packages/nvidia/cuda_nvrtc/lib");
        std::fs::create_dir_all(&lib).unwrap();
        for name in ["libnvrtc.so.12", "libnvrtc-builtins.so.12.8", "libnvrtc.alt.so.12"] {
            std::fs::write(lib.join(name), b"x").unwrap();
        }
        assert_eq!(in_environment(folder.path(), &names), [lib.join("libnvrtc.so.12")]);
        assert!(in_environment(&folder.path().join("nowhere"), &names).is_empty());
    }

    #[test]
    fn what_was_tried_is_said() {
        let names = ["libfolio-has-no-such.so.2", "libfolio-has-no-such.so.1"];
        let tried = find(&names, |path| Err::<(), _>(path.to_owned())).expect_err("nothing is found");
        assert!(
            tried.starts_with("libfolio-has-no-such.so.2, libfolio-has-no-such.so.1, /usr/local/cuda/lib64/")
        );
    }
}
