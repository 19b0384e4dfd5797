//! The downloader against a local server: layout, resume, checksums, who sees the token, what each refusal says.
#![cfg(unix)]

mod cache;
mod gguf;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use folio_model::Checkpoint;
use folio_model::hub::{DownloadProgress, Hub, HubError, ModelName};
use folio_model::testing::fixture;
use folio_model::testing::hub::{COMMIT, Repo, Request, Response, Server};

const API: &str = "/api/models/org/tiny/revision/main";

fn hub(server: &Server, cache: &Path) -> Hub {
    Hub::new(&server.address, cache).with_backoff(Duration::from_millis(1))
}

fn name() -> ModelName {
    "org/tiny".parse().unwrap()
}

fn silent(_: DownloadProgress<'_>) {}

fn blob(cache: &Path, etag: &str) -> PathBuf {
    cache.join("models--org--tiny/blobs").join(etag)
}

/// Files in folders of the repository, linked from as deep.
#[test]
fn how_vectors_are_made_is_downloaded_too() {
    let mut repo = Repo::from_fixture("llama3");
    let pooling = br#"{"pooling_mode_mean_tokens": true}"#.to_vec();
    repo.files.push(("1_Pooling/config.json".into(), pooling.clone()));
    repo.files.push(("2_Dense/config.json".into(), b"not needed".to_vec()));
    repo.files.push(("modules.json".into(), b"[]".to_vec()));
    let serving = repo.clone();
    let server = Server::start(move |request| serving.answer(request));
    let cache = tempfile::tempdir().unwrap();
    let folder = hub(&server, cache.path()).get(&name(), &silent).unwrap();
    let link = folder.join("1_Pooling/config.json");
    assert_eq!(fs::read(&link).unwrap(), pooling);
    let target = Path::new("../../../blobs").join(repo.etag("1_Pooling/config.json"));
    assert_eq!(fs::read_link(&link).unwrap(), target);
    assert!(!folder.join("2_Dense").exists());
    assert_eq!(Checkpoint::open(&folder).unwrap().pooling(), Ok(folio_model::Pooling::Mean));
}

#[test]
fn downloads_into_the_hubs_layout() {
    let repo = Repo::from_fixture("llama3");
    let serving = repo.clone();
    let server = Server::start(move |request| serving.answer(request));
    let cache = tempfile::tempdir().unwrap();
    let seen = Mutex::new(Vec::new());
    let progress = |p: DownloadProgress<'_>| seen.lock().unwrap().push((p.done_bytes, p.total_bytes));
    let folder = hub(&server, cache.path()).get(&name(), &progress).unwrap();

    let root = cache.path().join("models--org--tiny");
    assert_eq!(folder, root.join("snapshots").join(COMMIT));
    assert_eq!(fs::read_to_string(root.join("refs/main")).unwrap(), COMMIT);
    // The card names the licence.
    let wanted =
        ["README.md", "config.json", "generation_config.json", "tokenizer.json", "model.safetensors"];
    for file in wanted {
        let link = fs::read_link(folder.join(file)).unwrap();
        assert_eq!(link, Path::new("../../blobs").join(repo.etag(file)));
        assert_eq!(fs::read(folder.join(file)).unwrap(), repo.content(file));
    }
    // Nothing that is not needed, nothing left over.
    assert_eq!(fs::read_dir(&folder).unwrap().count(), wanted.len());
    assert_eq!(fs::read_dir(root.join("blobs")).unwrap().count(), wanted.len());
    Checkpoint::open(&folder).unwrap();

    let total: usize = wanted.iter().map(|file| repo.content(file).len()).sum();
    let largest = seen.into_inner().unwrap().into_iter().max().unwrap();
    assert_eq!(largest, (total as u64, total as u64), "progress ends at the total");
}

#[test]
fn downloads_the_shards_that_the_index_names() {
    let repo = Repo::from_fixture("qwen2");
    let serving = repo.clone();
    let server = Server::start(move |request| serving.answer(request));
    let cache = tempfile::tempdir().unwrap();
    let folder = hub(&server, cache.path()).get(&name(), &silent).unwrap();
    assert_eq!(
        Checkpoint::open(&folder).unwrap().digest(64).unwrap(),
        Checkpoint::open(fixture("qwen2")).unwrap().digest(64).unwrap()
    );
    assert!(!folder.join("consolidated.safetensors").exists());
}

#[test]
fn a_cached_model_needs_no_network_and_a_pull_only_asks_what_is_new() {
    let repo = Repo::from_fixture("llama3");
    let server = Server::start(move |request| repo.answer(request));
    let cache = tempfile::tempdir().unwrap();
    let hub = hub(&server, cache.path());
    let folder = hub.get(&name(), &silent).unwrap();
    let before = server.requests().len();
    assert_eq!(hub.get(&name(), &silent).unwrap(), folder);
    let offline = hub.clone().with_offline(true);
    assert_eq!(offline.get(&name(), &silent).unwrap(), folder);
    let by_commit: ModelName = format!("org/tiny@{COMMIT}").parse().unwrap();
    assert_eq!(offline.get(&by_commit, &silent).unwrap(), folder);
    assert_eq!(server.requests().len(), before, "no request for what is here");

    assert_eq!(hub.pull(&name(), &silent).unwrap(), folder);
    assert_eq!(server.requests().len(), before + 1, "a pull lists the revision and downloads nothing again");

    // A snapshot that misses a file is not complete.
    fs::remove_file(folder.join("model.safetensors")).unwrap();
    assert!(matches!(offline.get(&name(), &silent), Err(HubError::Offline { .. })));
    assert!(matches!(offline.pull(&name(), &silent), Err(HubError::Offline { .. })));
    assert_eq!(hub.get(&name(), &silent).unwrap(), folder);
    assert!(folder.join("model.safetensors").exists());
}

#[test]
fn a_configuration_alone_is_read_and_nothing_kept() {
    let repo = Repo::from_fixture("llama3");
    let config = repo.content("config.json").to_vec();
    let server = Server::start(move |request| match (request.nth, &*request.path) {
        (0, "/org/tiny/resolve/main/config.json") => Response::status(503),
        (_, "/org/tiny/resolve/main/config.json") => Response::file(request, &config),
        _ => Response::status(404),
    });
    let cache = tempfile::tempdir().unwrap();
    let hub = hub(&server, cache.path());
    let text = hub.config(&name()).unwrap();
    assert!(folio_model::Config::parse("config.json", &text).is_ok());
    assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 0);
    let missing = hub.config(&"org/other".parse().unwrap());
    assert!(matches!(missing, Err(HubError::NotFound { .. })), "{missing:?}");
    let offline = hub.with_offline(true).config(&name());
    assert!(matches!(offline, Err(HubError::Offline { .. })), "{offline:?}");
}

#[test]
fn resumes_after_every_broken_connection() {
    let repo = Repo::from_fixture("llama3");
    let serving = repo.clone();
    let server = Server::start(move |request| {
        let response = serving.answer(request);
        // Each of the first six connections gives 10,000 bytes and dies: more failures than attempts without progress.
        if request.path.ends_with("model.safetensors") && request.nth < 6 {
            response.cut(10_000)
        } else {
            response
        }
    });
    let cache = tempfile::tempdir().unwrap();
    let folder = hub(&server, cache.path()).get(&name(), &silent).unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), repo.content("model.safetensors"));
    let starts: Vec<_> = server.requests_for("model.safetensors").iter().map(Request::range).collect();
    let expected: Vec<_> = (0..7).map(|n| (n > 0).then_some(n * 10_000)).collect();
    assert_eq!(starts, expected);
}

#[test]
fn resumes_what_an_earlier_run_left_and_survives_a_server_without_ranges() {
    for ranges in [true, false] {
        let repo = Repo::from_fixture("llama3");
        let serving = repo.clone();
        let server = Server::start(move |request| {
            let mut request = request.clone();
            if !ranges {
                request.headers.remove("range");
            }
            serving.answer(&request)
        });
        let cache = tempfile::tempdir().unwrap();
        let incomplete = blob(cache.path(), &format!("{}.incomplete", repo.etag("model.safetensors")));
        fs::create_dir_all(incomplete.parent().unwrap()).unwrap();
        fs::write(&incomplete, &repo.content("model.safetensors")[..12_345]).unwrap();
        let folder = hub(&server, cache.path()).get(&name(), &silent).unwrap();
        assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), repo.content("model.safetensors"));
        assert_eq!(server.requests_for("model.safetensors")[0].range(), Some(12_345));
        assert!(!incomplete.exists());
    }
}

#[test]
fn a_bad_partial_file_is_started_over() {
    let repo = Repo::from_fixture("llama3");
    let serving = repo.clone();
    let server = Server::start(move |request| serving.answer(request));
    let cache = tempfile::tempdir().unwrap();
    let incomplete = blob(cache.path(), &format!("{}.incomplete", repo.etag("model.safetensors")));
    fs::create_dir_all(incomplete.parent().unwrap()).unwrap();
    fs::write(&incomplete, vec![7; 12_345]).unwrap();
    let folder = hub(&server, cache.path()).get(&name(), &silent).unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), repo.content("model.safetensors"));
}

#[test]
fn a_wrong_checksum_is_an_error_and_leaves_nothing_behind() {
    for file in ["model.safetensors", "tokenizer.json"] {
        let repo = Repo::from_fixture("llama3");
        let etag = repo.etag(file);
        let server = Server::start(move |request| {
            let mut response = repo.answer(request);
            if request.path.ends_with(file) {
                response.body[3] ^= 1;
            }
            response
        });
        let cache = tempfile::tempdir().unwrap();
        let error = hub(&server, cache.path()).get(&name(), &silent).unwrap_err();
        assert!(matches!(&error, HubError::Checksum { file: found, .. } if found == file), "{error}");
        assert!(!blob(cache.path(), &etag).exists());
        assert!(!blob(cache.path(), &format!("{etag}.incomplete")).exists());
        assert!(!cache.path().join("models--org--tiny/refs/main").exists());
    }
}

#[test]
fn the_token_goes_to_the_hub_and_nowhere_else() {
    let repo = Repo::from_fixture("llama3");
    let weights = repo.content("model.safetensors").to_vec();
    let network = Server::start(move |request| Response::file(request, &weights));
    let elsewhere = format!("{}/blob?signed=1", network.address);
    let server = Server::start(move |request| {
        // A rename, answered with a relative address on the same host; then large files elsewhere.
        if let Some(path) = request.path.strip_prefix(API) {
            return Response::status(307)
                .with("location", &format!("/api/models/org/tiny/revision/moved{path}"));
        }
        if request.path.ends_with("model.safetensors") {
            return Response::status(302).with("location", &elsewhere);
        }
        repo.answer(request)
    });
    let cache = tempfile::tempdir().unwrap();
    hub(&server, cache.path()).with_token("hf_secret").get(&name(), &silent).unwrap();
    for request in server.requests() {
        assert_eq!(request.header("authorization"), Some("Bearer hf_secret"), "{}", request.path);
    }
    assert_eq!(server.requests_for("/moved").len(), 1);
    let outside = network.requests();
    assert_eq!(outside.len(), 1);
    assert_eq!(outside[0].header("authorization"), None);
}

#[test]
fn busy_servers_are_asked_again_and_silent_ones_given_up() {
    let repo = Repo::from_fixture("llama3");
    let server = Server::start(move |request| match request.nth {
        0 => Response::status(503),
        1 => Response::status(429).with("retry-after", "0"),
        _ => repo.answer(request),
    });
    let cache = tempfile::tempdir().unwrap();
    hub(&server, cache.path()).get(&name(), &silent).unwrap();

    let repo = Repo::from_fixture("llama3");
    let server = Server::start(move |request| {
        if request.path.ends_with("model.safetensors") { Response::status(500) } else { repo.answer(request) }
    });
    let cache = tempfile::tempdir().unwrap();
    let error = hub(&server, cache.path()).get(&name(), &silent).unwrap_err();
    assert!(matches!(error, HubError::Network { attempts: 5, .. }), "{error}");
    assert_eq!(server.requests_for("model.safetensors").len(), 5);

    let closed = Hub::new("http://127.0.0.1:9", cache.path()).with_backoff(Duration::from_millis(1));
    let error = closed.pull(&name(), &silent).unwrap_err();
    assert!(matches!(error, HubError::Network { .. }), "{error}");
}

#[test]
fn refusals_say_what_to_do() {
    let cases: [(u16, &str, Option<&str>, &[&str]); 6] = [
        (401, "", None, &["org/tiny", "401", "set HF_TOKEN"]),
        (401, "", Some("hf_old"), &["token in use (HF_TOKEN) is invalid"]),
        (403, "GatedRepo", Some("hf_x"), &["403", "accept its terms at http://", "/org/tiny"]),
        (401, "GatedRepo", None, &["accept its terms", "then set HF_TOKEN"]),
        (404, "RepoNotFound", None, &["org/tiny was not found", "name right"]),
        (404, "RevisionNotFound", None, &["no revision `main`"]),
    ];
    for (status, code, token, expected) in cases {
        let server = Server::start(move |_| Response::status(status).with("x-error-code", code));
        let cache = tempfile::tempdir().unwrap();
        let mut hub = hub(&server, cache.path());
        if let Some(token) = token {
            hub = hub.with_token(token);
        }
        let error = hub.get(&name(), &silent).unwrap_err().to_string();
        for part in expected {
            assert!(error.contains(part), "{status} {code}: {error}");
        }
        assert_eq!(server.requests().len(), 1, "a refusal is not retried");
    }
}

#[test]
fn a_gate_in_front_of_the_files_alone_is_explained_too() {
    let repo = Repo::from_fixture("llama3");
    let server = Server::start(move |request| {
        let gate = || Response::status(403).with("x-error-code", "GatedRepo");
        if request.path.starts_with("/api") { repo.answer(request) } else { gate() }
    });
    let cache = tempfile::tempdir().unwrap();
    let error = hub(&server, cache.path()).get(&name(), &silent).unwrap_err();
    assert!(matches!(error, HubError::Refused { status: 403, .. }), "{error}");
}

#[test]
fn what_cannot_be_served_is_not_downloaded() {
    let mut repo = Repo::from_fixture("llama3");
    for (file, content) in &mut repo.files {
        if file == "config.json" {
            *content =
                String::from_utf8(content.clone()).unwrap().replace("\"llama\"", "\"gemma9\"").into_bytes();
        }
    }
    let server = Server::start(move |request| repo.answer(request));
    let cache = tempfile::tempdir().unwrap();
    let error = hub(&server, cache.path()).get(&name(), &silent).unwrap_err();
    assert!(matches!(error, HubError::NotServable { .. }) && error.to_string().contains("gemma9"), "{error}");
    assert!(server.requests_for(".safetensors").is_empty());
}

#[test]
fn hostile_listings_write_nothing_outside() {
    let sound = Repo::from_fixture("llama3");
    let text = String::from_utf8(sound.listing()).unwrap();
    let hostile = [
        text.replace("\"model.safetensors\"", "\"../../evil.safetensors\""),
        text.replace(COMMIT, "../../../evil"),
        text.replace(&sound.etag("config.json"), "../evil"),
        "[]".to_owned(),
        "{".to_owned(),
    ];
    for listing in hostile {
        let (sound, body) = (sound.clone(), listing.clone().into_bytes());
        let server = Server::start(move |request| {
            if request.path.starts_with("/api") {
                Response::file(request, &body)
            } else {
                sound.answer(request)
            }
        });
        let outer = tempfile::tempdir().unwrap();
        let cache = outer.path().join("cache");
        let error = hub(&server, &cache).get(&name(), &silent).unwrap_err();
        assert!(matches!(error, HubError::Protocol { .. } | HubError::NotServable { .. }), "{error}");
        assert!(!outer.path().join("evil").exists() && !outer.path().join("evil.safetensors").exists());
    }
}

#[test]
fn the_environment_is_honoured() {
    let home = tempfile::tempdir().unwrap();
    fs::write(home.path().join("token"), "hf_stored\n").unwrap();
    let seen = |vars: &[(&str, &str)]| {
        let vars: Vec<(String, String)> =
            vars.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        Hub::from_vars(move |name| vars.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone()))
    };
    let home_path = home.path().to_str().unwrap();
    assert_eq!(seen(&[("HOME", "/h")]).unwrap().cache(), Path::new("/h/.cache/huggingface/hub"));
    assert_eq!(
        seen(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]).unwrap().cache(),
        Path::new("/x/huggingface/hub")
    );
    assert_eq!(seen(&[("HF_HOME", "/a"), ("HOME", "/h")]).unwrap().cache(), Path::new("/a/hub"));
    assert_eq!(seen(&[("HF_HOME", "/a"), ("HF_HUB_CACHE", "/c")]).unwrap().cache(), Path::new("/c"));
    assert!(matches!(seen(&[]), Err(HubError::NoCacheFolder)));

    let repo = Repo::from_fixture("llama3");
    let server = Server::start(move |request| repo.answer(request));
    for (token, expected) in [("", "Bearer hf_stored"), ("hf_set", "Bearer hf_set")] {
        let cache = tempfile::tempdir().unwrap();
        let vars = [
            ("HF_HOME", home_path),
            ("HF_ENDPOINT", server.address.as_str()),
            ("HF_TOKEN", token),
            ("HF_HUB_CACHE", cache.path().to_str().unwrap()),
        ];
        seen(&vars).unwrap().get(&name(), &silent).unwrap();
        assert_eq!(server.requests().last().unwrap().header("authorization"), Some(expected));
    }
    let vars = [("HF_HOME", home_path), ("HF_ENDPOINT", server.address.as_str()), ("HF_HUB_OFFLINE", "1")];
    assert!(matches!(seen(&vars).unwrap().get(&name(), &silent), Err(HubError::Offline { .. })));
}
