//! What `folio run` and `folio chat` say.

use std::io::Write;
use std::path::PathBuf;
use std::process::Stdio;

use serde_json::Value;

use crate::{STORY, folio, output, refusal, stdout, story};

#[test]
fn the_same_prompt_gives_the_same_answer() {
    let first = story(&[]);
    assert!(first.trim().len() > 20, "{first:?}");
    for more in [
        &["--threads", "1"][..],
        &["--max-num-batched-tokens", "64"],
        &["--block-size", "8"],
        &["--kv-cache-memory", "8MiB", "--max-model-len", "512"],
        &["--seed", "5"],
    ] {
        assert_eq!(story(more), first, "{more:?}");
    }
    assert_eq!(
        story(&["--temperature", "1.5", "--seed", "5"]),
        story(&["--temperature", "1.5", "--seed", "5"])
    );
    assert_ne!(
        story(&["--temperature", "1.5", "--seed", "5"]),
        story(&["--temperature", "1.5", "--seed", "6"])
    );
}

#[test]
fn weights_are_quantized_while_loading_or_refused_as_quantized_already() {
    let arguments = |to| {
        [
            "bench",
            "engine",
            "--quantize",
            to,
            "--prefill",
            "16",
            "--batch",
            "1",
            "--decode",
            "4",
            "--repeat",
            "1",
            "--json",
        ]
    };
    let bytes = |to| {
        let report: Value = serde_json::from_str(&stdout(&arguments(to))).expect("JSON");
        report["weight_bytes"].as_u64().expect("weight_bytes")
    };
    let (q8, q4) = (bytes("q8"), bytes("q4"));
    // 2.36 M weights of 8.5 and 4.5 bits.
    assert!((2_400_000..2_700_000).contains(&q8) && (1_250_000..1_500_000).contains(&q4), "{q8} and {q4}");
    let gguf = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../folio-model/tests/gguf/mixed/mixed.gguf");
    let said = refusal(&["run", gguf.to_str().expect("a path"), "Hello", "--raw", "--quantize", "q8"]);
    assert!(said.contains("--quantize is for weights in F32, F16 or BF16"), "{said}");
}

#[test]
fn stop_strings_end_an_answer() {
    let whole = story(&[]);
    let middle: String = whole.chars().skip(8).take(5).collect();
    let expected = whole.split(&middle).next().expect("a part");
    assert_eq!(story(&["--stop", &middle]).trim_end_matches('\n'), expected);
}

#[test]
fn a_prompt_may_come_from_standard_input() {
    let arguments = [&["run", "demo", "-"][..], &STORY[3..]].concat();
    let mut child = folio(&arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("folio runs");
    child.stdin.take().expect("pipe").write_all(b"Once upon a time").expect("written");
    let output = child.wait_with_output().expect("ends");
    assert_eq!(String::from_utf8(output.stdout).expect("text"), story(&[]));
}

/// The random model of `folio-model`'s tests, as one file: weights, tokenizer and template.
#[test]
fn a_gguf_file_is_a_model() {
    let file =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../folio-model/tests/gguf/smollm2/smollm2.gguf");
    let file = file.to_str().expect("text");
    let arguments = ["run", file, "the", "--max-tokens", "8", "--temperature", "0", "--ignore-eos"];
    let chat = output(&arguments);
    let errors = String::from_utf8_lossy(&chat.stderr);
    assert!(chat.status.success() && errors.contains("8 tokens"), "{errors}");
    assert!(!errors.contains("no chat template"), "{errors}");
    let raw = output(&[&arguments[..], &["--raw"]].concat());
    let errors = String::from_utf8_lossy(&raw.stderr);
    // bos and one token.
    assert!(errors.contains("prompt 2 "), "{errors}");
    assert_ne!(chat.stdout, raw.stdout);
    assert!(refusal(&["run", "./no.gguf", "a"]).contains("./no.gguf"));
}

#[test]
fn a_chat_follows_its_commands() {
    let mut child = folio(&["chat", "--max-tokens", "8"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("folio runs");
    child
        .stdin
        .take()
        .expect("pipe")
        .write_all(b"/nonsense\nHello there.\n/reset\n/exit\nnever read\n")
        .expect("written");
    let output = child.wait_with_output().expect("ends");
    assert!(output.status.success());
    let errors = String::from_utf8(output.stderr).expect("text");
    for text in ["no command /nonsense", "tokens/s", "forgotten"] {
        assert!(errors.contains(text), "{errors}");
    }
    assert_eq!(errors.matches("prompt ").count(), 1, "one answer: {errors}");
}
