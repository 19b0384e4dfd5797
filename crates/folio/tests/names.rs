//! Models by name, as a stranger meets them: the program against a hub in this process.
#![cfg(unix)]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use folio_model::testing::hub::{Repo, Server};
use serde_json::Value;

/// The random model of `folio-model`'s tests: weights, tokenizer and template in one file.
const MODEL: &[u8] = include_bytes!("../../folio-model/tests/gguf/smollm2/smollm2.gguf");

struct Home {
    hub: Server,
    folder: tempfile::TempDir,
}

impl Home {
    fn new(files: &[(&str, &[u8])]) -> Self {
        let repo = Repo::of(files);
        let hub = Server::start(move |request| repo.answer(request));
        Self { hub, folder: tempfile::tempdir().expect("a folder") }
    }

    fn folio(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_folio"));
        command.args(arguments).stdin(Stdio::null()).env("HF_ENDPOINT", &self.hub.address);
        for (name, _) in
            std::env::vars().filter(|(name, _)| name.starts_with("FOLIO_") && name != "FOLIO_ISA")
        {
            command.env_remove(name);
        }
        for name in ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE"] {
            command.env_remove(name);
        }
        command.env("HF_HOME", self.folder.path().join("hf")).env("XDG_CONFIG_HOME", self.folder.path());
        command.env("XDG_CACHE_HOME", self.folder.path().join("cache"));
        command
    }

    fn output(&self, arguments: &[&str]) -> Output {
        self.folio(arguments).output().expect("folio runs")
    }

    /// Standard output of a command that must succeed.
    fn stdout(&self, arguments: &[&str]) -> String {
        let output = self.output(arguments);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {errors}");
        String::from_utf8(output.stdout).expect("text")
    }

    /// Standard error of a command that must fail.
    fn refusal(&self, arguments: &[&str]) -> String {
        let output = self.output(arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        String::from_utf8(output.stderr).expect("text")
    }

    fn snapshot(&self) -> PathBuf {
        let snapshots = self.folder.path().join("hf/hub/models--org--tiny/snapshots");
        snapshots.join(folio_model::testing::hub::COMMIT)
    }

    /// Names and formats.
    fn listed(&self) -> Vec<(String, String)> {
        let models: Value = serde_json::from_str(&self.stdout(&["list", "--json"])).expect("JSON");
        let text = |model: &Value, field: &str| model[field].as_str().expect(field).to_owned();
        models.as_array().expect("a list").iter().map(|m| (text(m, "name"), text(m, "format"))).collect()
    }
}

const ANSWER: [&str; 7] = ["the", "--raw", "--max-tokens", "4", "--temperature", "0", "--ignore-eos"];

#[test]
fn a_quantization_is_downloaded_answered_with_shown_and_removed() {
    let home = Home::new(&[
        ("README.md", b"# tiny"),
        ("tiny-Q4_K_M.gguf", MODEL),
        ("tiny-Q8_0.gguf", MODEL),
        ("mmproj-Q8_0.gguf", b"no model"),
    ]);
    let folio = |arguments: &[&str]| home.stdout(arguments);
    assert!(home.output(&["list"]).stdout.is_empty());
    let pulled = folio(&["pull", "org/tiny:q8_0"]);
    assert_eq!(Path::new(pulled.trim()), home.snapshot().join("tiny-Q8_0.gguf"));
    assert_eq!(home.listed(), [("org/tiny:Q8_0".to_owned(), "GGUF Q8_0".to_owned())]);

    // Of a name, of a path, as its own draft model: the same answer, and downloaded when it is not here.
    let run = |model: &str, more: &[&str]| folio(&[&["run", model], &ANSWER[..], more].concat());
    let answer = run(pulled.trim(), &[]);
    for (model, more) in
        [("org/tiny:Q8_0", &[][..]), ("org/tiny:Q4_K_M", &["--draft-model", "org/tiny:Q8_0"])]
    {
        assert_eq!(run(model, more), answer, "{model}");
    }
    // The same bytes are one blob, which two files of a listing share.
    assert_eq!(home.listed().len(), 2);
    assert!(home.hub.requests_for("mmproj").is_empty());
    let table = folio(&["list"]);
    let first = table.lines().nth(1).expect("a row");
    assert!(
        table.starts_with("name") && first.contains("org/tiny:Q4_K_M") && first.ends_with("just now"),
        "{table}"
    );

    let shown = folio(&["show", "org/tiny:Q8_0"]);
    for text in [
        "org/tiny:Q8_0",
        "llama: ",
        "192 B per token (bf16)",
        "99 % BF16",
        "256",
        "tokens",
        "template",
        "licence",
    ] {
        assert!(shown.contains(text), "{text} is not in {shown}");
    }
    let before = home.hub.requests().len();
    let absent = home.refusal(&["show", "org/tiny:Q2_K"]);
    assert!(absent.contains("not in the cache") && absent.contains("folio pull org/tiny:Q2_K"), "{absent}");
    assert_eq!(home.hub.requests().len(), before, "nothing is downloaded to be shown");
    let unknown = home.refusal(&["chat", "org/tiny:Q2_K"]);
    assert!(unknown.contains("Q4_K_M, Q8_0"), "{unknown}");

    assert!(folio(&["rm", "org/tiny:Q8_0"]).contains("0 B in 0 files"), "the other file has the same bytes");
    assert_eq!(home.listed(), [("org/tiny:Q4_K_M".to_owned(), "GGUF Q4_K_M".to_owned())]);
    assert!(home.refusal(&["rm", "org/tiny:Q8_0"]).contains("not in the cache"));
    assert!(folio(&["rm", "org/tiny"]).contains("removed org/tiny"));
    assert_eq!(home.listed(), []);
    for (model, text) in [("demo", "part of the program"), (env!("CARGO_MANIFEST_DIR"), "where you put it")] {
        assert!(home.refusal(&["rm", model]).contains(text), "{model}");
    }
}

struct Serving(Child);

impl Drop for Serving {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn an_alias_is_served_and_what_is_served_is_not_removed() {
    let home = Home::new(&[("tiny-Q4_0.gguf", MODEL), ("tiny-Q6_K.gguf", b"never asked for")]);
    std::fs::create_dir_all(home.folder.path().join("folio")).expect("a folder");
    let own = home.folder.path().join("folio/aliases.toml");
    std::fs::write(&own, "small = \"org/tiny:Q6_K\"\nother = \"org/tiny:q4_0\"\n").expect("a file");
    assert!(home.stdout(&["run", "other", "a", "--raw", "--max-tokens", "1"]).ends_with('\n'));

    // What the configuration says of a name goes before what the user does.
    let config = home.folder.path().join("folio.toml");
    let text = "model = \"small\"\nport = 0\ndraft-model = \"other\"\n[aliases]\nsmall = \"org/tiny:Q4_0\"\n";
    std::fs::write(&config, text).expect("a file");
    let config = config.to_str().expect("text");
    assert!(home.stdout(&["config", "check", config]).contains("is fine"));
    let arguments = ["serve", "--config", config, "--threads", "1", "--device", "cpu"];
    let child = home.folio(&arguments).stderr(Stdio::piped()).spawn().expect("serves");
    let mut serving = Serving(child);
    // Open until the end: who cannot report ends.
    let mut report = BufReader::new(serving.0.stderr.take().expect("piped")).lines().map_while(Result::ok);
    let mut seen = Vec::new();
    for line in report.by_ref() {
        let last = line.trim_start().starts_with("curl ");
        seen.push(line);
        if last {
            break;
        }
    }
    let line = |what: &str| {
        let found = seen.iter().find_map(|line| line.trim_start().strip_prefix(what));
        found.unwrap_or_else(|| panic!("nothing of {what}: {seen:#?}")).trim()
    };
    assert!(line("model").contains("org/tiny:Q4_0 (llama"));
    // What it does with cores and memory, and where a person looks.
    assert!(line("weights").contains(" on cpu/") && line("weights").ends_with(", 1 threads"));
    assert!(line("KV cache").contains(" tokens in ") && line("KV cache").contains(" per token: "));
    assert!(line("memory").contains("; ") && line("memory").ends_with(" will be left"));
    let (address, _) = line("listening on").split_once(' ').expect("and how to stop it");
    assert!(address.starts_with("http://127.0.0.1:"), "{address}");
    assert_eq!(line("page"), format!("{address}/"));
    assert!(line("curl").starts_with(&format!("{address}/v1/")), "{}", line("curl"));
    for name in ["org/tiny:Q4_0", "small", "org/tiny"] {
        let refused = home.refusal(&["rm", name]);
        let expected = if name == "small" { "not in the cache" } else { "in use" };
        assert!(refused.contains(expected), "{name}: {refused}");
    }
    drop(serving);
    assert!(home.stdout(&["rm", "other"]).contains("removed org/tiny:q4_0"));

    std::fs::write(&own, "broken = 3\n").expect("a file");
    let refused = home.refusal(&["show", "broken"]);
    assert!(refused.contains("aliases.toml") && refused.contains("broken: names no model"), "{refused}");
    assert!(home.refusal(&["show", "unknown"]).contains("aliases.toml"));
}
