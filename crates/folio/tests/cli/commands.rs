//! What commands refuse, and what the program writes of itself.

use std::path::PathBuf;

use crate::{output, refusal, stdout};

#[test]
fn only_a_server_keeps_kv_on_a_disk() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path().join("kv");
    let dir = dir.to_str().expect("a name");
    for option in ["--disk-kv", "--disk-kv-shared"] {
        for command in [&["run", "demo", "once"][..], &["bench", "engine"]] {
            let error = refusal(&[command, &[option, dir]].concat());
            assert!(error.contains(&format!("{option}: only `folio serve`")), "{error}");
        }
    }
    // Servers that share it need a key in common.
    let error = refusal(&["serve", "--disk-kv-shared", dir]);
    assert!(error.contains("--disk-kv-shared") && error.contains("--keyring"), "{error}");
    assert!(!folder.path().join("kv").exists());
    let alone = output(&["serve", "--disk-kv-size", "1GiB"]);
    let error = String::from_utf8_lossy(&alone.stderr);
    assert!(alone.status.code() == Some(2) && error.contains("--disk-kv <DIR>"), "{error}");
}

#[test]
fn refusals_say_what_and_where() {
    for (arguments, text) in [
        (&["serve", "./no-such-folder"][..], "no folder ./no-such-folder"),
        (&["serve", "model"], "org/model"),
        (&["serve", "--max-model-len", "1000000"], "max_position_embeddings"),
        (&["serve", "--kv-cache-memory", "64KiB"], "--kv-cache-memory"),
        (&["serve", "--max-num-seqs", "1000"], "max_num_batched_tokens"),
        (&["serve", "--api-key", "a,a"], "twice"),
        (&["serve", "--chat-template", "/no/such/template"], "/no/such/template"),
        (&["run", "demo", "--raw", "a", "--max-model-len", "2"], "no room"),
        (&["bench", "serve", "--url", "http://127.0.0.1:9"], "127.0.0.1:9"),
        (&["bench", "serve", "--url", "https://localhost"], "only http"),
        (
            &["bench", "serve", "--url", "http://h", "--endpoint", "chat", "--token-ids", "1..9"],
            "no prompts of token ids",
        ),
        (&["bench", "kl", "demo", "--text", "/no/such/text", "--quantize", "q8"], "/no/such/text"),
        (&["bench", "kl", "demo", "--text", "/no/such/text"], "nothing to compare"),
        (&["bench", "claims", "--only", "pagings"], "there is no such claim, only kv-cache"),
        (&["doctor", "./no-such-model"], "no folder ./no-such-model"),
        (&["chat", "--url", "http://127.0.0.1:9"], "127.0.0.1:9"),
        (&["pull", "nonsense"], "nonsense"),
    ] {
        let message = refusal(arguments);
        assert!(message.contains(text), "{arguments:?}: {message}");
    }
    assert_eq!(output(&["serve", "--block-size", "7"]).status.code(), Some(2), "usage errors are clap's");
}

#[test]
fn completions_know_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let script = stdout(&["completions", shell]);
        for word in ["serve", "--kv-cache-memory", "completions"] {
            assert!(script.contains(word.trim_start_matches("--")), "{shell}: {word}");
        }
    }
    assert_eq!(output(&["completions", "cmd"]).status.code(), Some(2));
}

#[test]
fn generated_pages_are_up_to_date() {
    let docs = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    for page in ["api", "cli", "models", "metrics"] {
        let committed = std::fs::read_to_string(docs.join(format!("{page}.md"))).expect("page");
        assert!(stdout(&["docs", page]) == committed, "stale: folio docs {page} > docs/{page}.md");
    }
}

#[test]
fn what_only_a_gpu_honours_is_refused_without_one() {
    let error = refusal(&["run", "demo", "Once", "--device", "cpu", "--enforce-eager"]);
    assert!(error.contains("--enforce-eager is for a GPU"), "{error}");
    let error = refusal(&["run", "demo", "Once", "--device", "cpu", "--gemm-backend", "cublaslt"]);
    assert!(error.contains("--gemm-backend cublaslt is for a GPU"), "{error}");
}
