//! GGUF files of a repository: which one is meant, its parts, and what is never downloaded.

use std::fs;
use std::path::Path;

use folio_model::Checkpoint;
use folio_model::hub::{Hub, HubError, ModelName};
use folio_model::testing::gguf::{Writer, as_gguf};
use folio_model::testing::hub::{COMMIT, Repo, Response, Server};

use crate::{hub, silent};

fn repo() -> Repo {
    let whole = as_gguf("llama3");
    let (small, parts) = (whole.clone().finish(), whole.split(3));
    let mut repo = Repo::of(&[
        ("README.md", b"---\nlicense: mit\n---\n"),
        ("config.json", b"{\"model_type\": \"llama\"}"),
        ("tiny-Q4_K_M.gguf", &small),
        ("tiny-Q5_K_M.gguf", b"another"),
        ("mmproj-tiny-Q8_0.gguf", b"not a model"),
        ("tiny-imatrix.gguf", b"not a model"),
    ]);
    for (number, part) in parts.into_iter().enumerate() {
        repo.files.push((format!("Q8_0/tiny Q8-Q8_0-{:05}-of-00003.gguf", number + 1), part.finish()));
    }
    repo
}

fn serve(repo: Repo) -> Server {
    Server::start(move |request| repo.answer(request))
}

fn named(text: &str) -> ModelName {
    text.parse().unwrap()
}

/// The file's path in its snapshot.
fn get(hub: &Hub, name: &str) -> String {
    let path = hub.get(&named(name), &silent).unwrap_or_else(|error| panic!("{name}: {error}"));
    let snapshot = hub.cache().join("models--org--tiny/snapshots").join(COMMIT);
    path.strip_prefix(snapshot).unwrap().to_str().unwrap().to_owned()
}

#[test]
fn a_quantization_is_downloaded_with_all_its_parts_and_nothing_else() {
    let server = serve(repo());
    let cache = tempfile::tempdir().unwrap();
    let hub = hub(&server, cache.path());
    let first = get(&hub, "org/tiny:q8_0");
    assert_eq!(first, "Q8_0/tiny Q8-Q8_0-00001-of-00003.gguf");
    for file in ["Q4_K_M", "Q5_K_M", "mmproj", "imatrix", "config.json"] {
        assert!(server.requests_for(file).is_empty(), "{file}");
    }
    let snapshot = cache.path().join("models--org--tiny/snapshots").join(COMMIT);
    let link = fs::read_link(snapshot.join(&first)).unwrap();
    assert!(link.starts_with("../../../blobs"), "{link:?}");
    let whole = cache.path().join("whole.gguf");
    fs::write(&whole, as_gguf("llama3").finish()).unwrap();
    assert_eq!(
        Checkpoint::open(snapshot.join(first)).unwrap().digest(64).unwrap(),
        Checkpoint::open(&whole).unwrap().digest(64).unwrap()
    );
}

#[test]
fn without_a_quantization_the_default_is_taken_and_what_is_here_already_is_preferred() {
    let server = serve(repo());
    let cache = tempfile::tempdir().unwrap();
    let hub = hub(&server, cache.path());
    assert_eq!(get(&hub, "org/tiny"), "tiny-Q4_K_M.gguf");
    let before = server.requests().len();
    assert_eq!(get(&hub, "org/tiny:Q4_K_M"), "tiny-Q4_K_M.gguf");
    let offline = hub.clone().with_offline(true);
    assert_eq!(get(&offline, "org/tiny"), "tiny-Q4_K_M.gguf");
    assert!(matches!(offline.get(&named("org/tiny:Q8_0"), &silent), Err(HubError::Offline { .. })));
    assert_eq!(server.requests().len(), before, "no request for what is here");

    // Another one, and no longer the default.
    get(&hub, "org/tiny:Q8_0");
    let snapshot = cache.path().join("models--org--tiny/snapshots").join(COMMIT);
    fs::remove_file(snapshot.join("tiny-Q4_K_M.gguf")).unwrap();
    assert_eq!(get(&offline, "org/tiny"), "Q8_0/tiny Q8-Q8_0-00001-of-00003.gguf");
    // With a part missing it is not here.
    fs::remove_file(snapshot.join("Q8_0/tiny Q8-Q8_0-00002-of-00003.gguf")).unwrap();
    assert!(matches!(offline.get(&named("org/tiny"), &silent), Err(HubError::Offline { .. })));
}

#[test]
fn a_folder_of_safetensors_is_meant_unless_a_quantization_is_named() {
    let mut both = Repo::from_fixture("llama3");
    both.files.push(("m-Q4_K_M.gguf".to_owned(), as_gguf("llama3").finish()));
    let server = serve(both);
    let cache = tempfile::tempdir().unwrap();
    let hub = hub(&server, cache.path());
    assert_eq!(get(&hub, "org/tiny"), "");
    assert_eq!(get(&hub, "org/tiny:Q4_K_M"), "m-Q4_K_M.gguf");
    assert_eq!(get(&hub, "org/tiny"), "", "both are here");
}

#[test]
fn what_is_not_there_is_told_with_what_is() {
    let mut repo = repo();
    repo.files.retain(|(name, _)| !name.contains("00002-of"));
    let server = serve(repo);
    let cache = tempfile::tempdir().unwrap();
    let hub = hub(&server, cache.path());
    let refusal = |name: &str| hub.get(&named(name), &silent).unwrap_err().to_string();
    let unknown = refusal("org/tiny:Q2_K");
    assert!(unknown.contains("org/tiny:Q2_K") && unknown.contains("Q4_K_M, Q5_K_M, Q8_0"), "{unknown}");
    assert!(!unknown.contains("mmproj"), "{unknown}");
    let incomplete = refusal("org/tiny:Q8_0");
    assert!(incomplete.contains("00001-of-00003") && incomplete.contains("00002-of-00003"), "{incomplete}");
    assert!(server.requests_for("/resolve/").is_empty());

    let server = serve(Repo::of(&[("mmproj-F16.gguf", b"x")]));
    let hub = crate::hub(&server, cache.path());
    assert!(hub.pull(&named("org/tiny:F16"), &silent).unwrap_err().to_string().contains("none at all"));
    assert!(matches!(hub.pull(&named("org/tiny"), &silent), Err(HubError::NotServable { .. })));
}

#[test]
fn an_architecture_that_cannot_be_served_is_not_downloaded() {
    let large = Writer::new("mamba2").tensor("t", &[1 << 20], 0, &vec![0; 4 << 20]).finish();
    let server = serve(Repo::of(&[("m-Q4_0.gguf", &large)]));
    let cache = tempfile::tempdir().unwrap();
    let error = hub(&server, cache.path()).get(&named("org/tiny"), &silent).unwrap_err().to_string();
    assert!(error.contains("`mamba2`") && error.contains("qwen3"), "{error}");
    let blobs = cache.path().join("models--org--tiny/blobs");
    assert_eq!(fs::read_dir(blobs).unwrap().count(), 0, "nothing is kept");
}

#[test]
fn hostile_lists_of_files_write_nothing_outside_and_overflow_nothing() {
    let sound = repo();
    let text = String::from_utf8(sound.listing()).unwrap();
    let outside = [
        "../../../evil-Q4_K_M.gguf",
        "/tmp/evil-Q4_K_M.gguf",
        "a/../../evil-Q4_K_M.gguf",
        "..\\\\evil-Q4_K_M.gguf",
        ".hidden/evil-Q4_K_M.gguf",
        "a/b/c/d/e/evil-Q4_K_M.gguf",
        "evil\\u0000-Q4_K_M.gguf",
        "C:evil-Q4_K_M.gguf",
    ];
    for name in outside {
        let body = text.replace("tiny-Q4_K_M.gguf", name);
        let (sound, body) = (sound.clone(), body.into_bytes());
        let server = Server::start(move |request| match request.path.starts_with("/api") {
            true => Response::file(request, &body),
            false => sound.answer(request),
        });
        let outer = tempfile::tempdir().unwrap();
        let hub = hub(&server, &outer.path().join("cache"));
        let error = hub.get(&named("org/tiny:Q4_K_M"), &silent).unwrap_err();
        assert!(matches!(&error, HubError::NoVariant { .. }), "{name}: {error}");
        assert!(server.requests_for("evil").is_empty(), "{name}");
        assert!(walk(outer.path()).iter().all(|file| !file.contains("evil")), "{name}");
    }
    let huge = |size: &str| {
        let length = sound.content("tiny-Q4_K_M.gguf").len();
        let body = text.replace(&format!("\"size\":{length}"), &format!("\"size\":{size}")).into_bytes();
        let server = Server::start(move |request| Response::file(request, &body));
        let cache = tempfile::tempdir().unwrap();
        hub(&server, cache.path()).get(&named("org/tiny"), &silent).unwrap_err().to_string()
    };
    for size in [u64::MAX.to_string(), (1u64 << 50).to_string()] {
        let error = huge(&size);
        assert!(error.contains(&size) && error.contains("more than the limit"), "{error}");
    }
    for size in ["-1", "1e400", "18446744073709551616", "\"many\""] {
        let error = huge(size);
        assert!(error.contains("size or checksum") || error.contains("JSON"), "{size}: {error}");
    }
}

#[test]
fn a_file_with_another_hash_is_refused_and_not_kept() {
    let repo = repo();
    let server = Server::start(move |request| {
        let mut response = repo.answer(request);
        if request.path.ends_with(".gguf") && response.status == 200 {
            let last = response.body.len() - 1;
            response.body[last] ^= 1;
        }
        response
    });
    let cache = tempfile::tempdir().unwrap();
    let error = hub(&server, cache.path()).get(&named("org/tiny"), &silent).unwrap_err();
    assert!(matches!(error, HubError::Checksum { .. }), "{error}");
    assert!(!walk(cache.path()).iter().any(|file| file.contains("snapshots") && file.ends_with(".gguf")));
}

/// Every file below a folder.
fn walk(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries
        .flatten()
        .flat_map(|entry| match entry.path().is_dir() {
            true => walk(&entry.path()),
            false => vec![entry.path().display().to_string()],
        })
        .collect()
}
