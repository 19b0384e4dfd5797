//! What the cache holds, who uses it, and what goes with a model that is removed.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use folio_model::hub::{CachedKind, CachedModel, Held, Hub, HubError, ModelName};

const OLD: &str = "0000000000000000000000000000000000000001";
const NEW: &str = "0000000000000000000000000000000000000002";

/// A cache as huggingface_hub leaves it: two revisions that share a file.
struct Cache {
    folder: tempfile::TempDir,
}

impl Cache {
    fn new() -> Self {
        let cache = Self { folder: tempfile::tempdir().unwrap() };
        cache.link(OLD, "m-Q4_0.gguf", "a");
        cache.link(NEW, "m-Q4_0.gguf", "a");
        cache.link(NEW, "m-Q8_0.gguf", "b");
        cache.link(NEW, "UD/m-BF16-00001-of-00002.gguf", "c");
        cache.link(NEW, "UD/m-BF16-00002-of-00002.gguf", "d");
        cache.link(NEW, "README.md", "e");
        fs::create_dir_all(cache.root().join("refs/pr")).unwrap();
        fs::write(cache.root().join("refs/main"), NEW).unwrap();
        fs::write(cache.root().join("refs/v1"), OLD).unwrap();
        cache
    }

    fn hub(&self) -> Hub {
        Hub::new("http://127.0.0.1:9", self.folder.path()).with_offline(true)
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join("models--org--m")
    }

    fn blob(&self, name: &str) -> PathBuf {
        self.root().join("blobs").join(name)
    }

    /// A blob has as many bytes as its name says.
    fn link(&self, commit: &str, file: &str, blob: &str) {
        let link = self.root().join("snapshots").join(commit).join(file);
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        fs::create_dir_all(self.root().join("blobs")).unwrap();
        fs::write(self.blob(blob), vec![0; usize::from(blob.as_bytes()[0] - b'a' + 1)]).unwrap();
        let up = "../".repeat(2 + file.matches('/').count());
        std::os::unix::fs::symlink(format!("{up}blobs/{blob}"), link).unwrap();
    }

    fn names(&self) -> Vec<String> {
        self.hub().models().unwrap().iter().map(|model| model.name.to_string()).collect()
    }

    fn remove(&self, name: &str) -> (usize, u64) {
        let removed = self.hub().remove(&named(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        (removed.files, removed.bytes)
    }

    fn has(&self, blobs: &str) {
        for blob in ["a", "b", "c", "d", "e"] {
            assert_eq!(self.blob(blob).exists(), blobs.contains(blob), "{blob} of {blobs}");
        }
    }
}

fn named(text: &str) -> ModelName {
    text.parse().unwrap()
}

#[test]
fn models_are_listed_by_the_names_that_mean_them() {
    let cache = Cache::new();
    assert_eq!(cache.names(), ["org/m:BF16", "org/m:Q4_0", "org/m:Q8_0", "org/m@v1:Q4_0"]);
    for CachedModel { name, kind, bytes, .. } in cache.hub().models().unwrap() {
        let CachedKind::Gguf { file, quantization } = kind else { panic!("{name}") };
        assert_eq!(cache.hub().cached(&name), Some(file), "{name}");
        assert_eq!(Some(quantization.as_str()), name.variant());
        assert_eq!(
            bytes,
            match &*quantization {
                "BF16" => 3 + 4,
                "Q8_0" => 2,
                _ => 1,
            }
        );
    }
    // A commit without a name; a file whose quantization means another; a folder; what is not whole; what is no model's.
    fs::remove_file(cache.root().join("refs/v1")).unwrap();
    cache.link(NEW, "m-special-Q8_0.gguf", "b");
    let other = cache.folder.path().join("models--x--folder/snapshots").join(OLD);
    fs::create_dir_all(&other).unwrap();
    for file in ["config.json", "tekken.json", "model.safetensors"] {
        fs::write(other.join(file), b"{}").unwrap();
    }
    let partial = cache.folder.path().join("models--x--partial/blobs");
    fs::create_dir_all(&partial).unwrap();
    fs::write(partial.join("abc.incomplete"), b"12345").unwrap();
    for folder in ["datasets--x--y", "models--gpt2", ".locks", "models--..--x"] {
        fs::create_dir_all(cache.folder.path().join(folder).join("snapshots")).unwrap();
    }
    let commit = format!("org/m@{OLD}:Q4_0");
    let folder = format!("x/folder@{OLD}");
    let expected = [
        "org/m:BF16",
        "org/m:Q4_0",
        "org/m:Q8_0",
        "org/m:m-special-Q8_0.gguf",
        &commit,
        &folder,
        "x/partial",
    ];
    assert_eq!(cache.names(), expected);
    let models = cache.hub().models().unwrap();
    let kind = |name: &str| &models.iter().find(|model| model.name.to_string() == name).unwrap().kind;
    assert_eq!(kind(&folder), &CachedKind::Folder(other));
    assert_eq!(kind("x/partial"), &CachedKind::Partial);
    assert_eq!(Hub::new("http://127.0.0.1:9", "/no/such/cache").models().unwrap(), []);
}

#[test]
fn exactly_what_nothing_else_references_goes() {
    let cache = Cache::new();
    assert_eq!(cache.remove("org/m:q8_0"), (1, 2));
    cache.has("acde");
    assert_eq!(cache.remove("org/m:BF16"), (2, 7));
    cache.has("ae");
    assert!(!cache.root().join("snapshots").join(NEW).join("UD").exists(), "an empty folder goes, too");
    // One revision still links to it.
    assert_eq!(cache.remove("org/m@main:Q4_0"), (0, 0));
    cache.has("ae");
    assert_eq!(cache.names(), ["org/m", "org/m@v1:Q4_0"]);
    assert_eq!(cache.remove("org/m@v1"), (1, 1));
    cache.has("e");
    assert!(!cache.root().join("refs/v1").exists() && cache.root().join("refs/main").exists());
    assert_eq!(cache.remove("org/m"), (1, 5));
    assert!(!cache.root().exists());
    for absent in ["org/m", "org/m:Q4_0", "org/m@v1", "no/such"] {
        assert!(matches!(cache.hub().remove(&named(absent)), Err(HubError::NotCached { .. })), "{absent}");
    }

    let cache = Cache::new();
    assert_eq!(cache.remove("org/m:Q4_0"), (1, 1), "of all revisions");
    cache.has("bcde");
    for absent in ["org/m:Q4_0", "org/m:Q2_K", "org/m@v9", "org/m@v9:Q8_0"] {
        assert!(matches!(cache.hub().remove(&named(absent)), Err(HubError::NotCached { .. })), "{absent}");
    }
    cache.has("bcde");
}

#[test]
fn what_is_served_or_downloaded_stays_whole() {
    let cache = Cache::new();
    let held = Held::of(&cache.hub().cached(&named("org/m:BF16")).unwrap());
    for name in ["org/m:BF16", "org/m@main", "org/m"] {
        let error = cache.hub().remove(&named(name)).unwrap_err();
        assert!(matches!(error, HubError::InUse { .. }), "{name}: {error}");
        cache.has("abcde");
        assert_eq!(cache.names().len(), 4);
    }
    assert_eq!(cache.remove("org/m:Q8_0"), (1, 2), "nobody uses that one");
    drop(held);

    let locks = cache.folder.path().join(".locks/models--org--m");
    fs::create_dir_all(&locks).unwrap();
    let lock = fs::File::create(locks.join("abc.lock")).unwrap();
    lock.lock().unwrap();
    assert!(matches!(cache.hub().remove(&named("org/m:BF16")), Err(HubError::Downloading { .. })));
    cache.has("acde");
    drop(lock);
    cache.remove("org/m");
    assert!(!locks.exists());
}

#[test]
fn opening_a_model_notes_the_time_and_nothing_else() {
    let cache = Cache::new();
    let (long_ago, written) = (SystemTime::now() - Duration::from_secs(1 << 20), SystemTime::UNIX_EPOCH);
    let times = fs::FileTimes::new().set_accessed(long_ago).set_modified(written);
    for blob in ["a", "b", "c", "d"] {
        fs::File::open(cache.blob(blob)).unwrap().set_times(times).unwrap();
    }
    let age = |name: &str| {
        let models = cache.hub().models().unwrap();
        let model = models.into_iter().find(|model| model.name == named(name)).unwrap();
        model.used.unwrap().elapsed().unwrap_or_default().as_secs()
    };
    assert!(age("org/m:Q8_0") > 1 << 19 && age("org/m:BF16") > 1 << 19);
    drop(Held::of(&cache.hub().cached(&named("org/m:BF16")).unwrap()));
    assert!(age("org/m:BF16") < 1 << 19 && age("org/m:Q8_0") > 1 << 19);
    assert_eq!(fs::metadata(cache.blob("c")).unwrap().modified().unwrap(), written);
}

/// Nothing outside of the model's folder goes, whatever its links say.
#[test]
fn links_that_lead_elsewhere_take_nothing_with_them() {
    let cache = Cache::new();
    let outside = cache.folder.path().join("precious.gguf");
    fs::write(&outside, b"mine").unwrap();
    let link = cache.root().join("snapshots").join(NEW).join("m-Q2_K.gguf");
    std::os::unix::fs::symlink(&outside, &link).unwrap();
    assert_eq!(cache.remove("org/m:Q2_K"), (0, 0));
    assert!(outside.exists() && !Path::new(&link).is_symlink());
    std::os::unix::fs::symlink(cache.folder.path(), cache.root().join("snapshots").join(NEW).join("up"))
        .unwrap();
    cache.remove("org/m");
    assert!(outside.exists());
}
