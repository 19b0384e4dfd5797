//! `folio plan` and `folio trace` as a stranger meets them.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

fn output(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_folio"));
    command.args(arguments).stdin(Stdio::null());
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("FOLIO_") && name != "FOLIO_ISA") {
        command.env_remove(name);
    }
    command.output().expect("folio runs")
}

fn stdout(arguments: &[&str]) -> String {
    let output = output(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

fn plan(arguments: &[&str]) -> Value {
    let text = stdout(&[&["plan", "--json"], arguments].concat());
    serde_json::from_str(&text).expect("JSON")
}

fn refusal(arguments: &[&str]) -> String {
    let output = output(arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    String::from_utf8(output.stderr).expect("text")
}

/// Llama-2-7B.
const LLAMA: &str = "layers=32,hidden=4096,heads=32,intermediate=11008,vocab=32000,context=4096";

#[test]
fn a_plan_of_a_shape_on_a_published_machine_is_a_range() {
    let plan =
        plan(&[LLAMA, "--machine", "h100", "--max-num-seqs", "64", "--rate", "0.1", "--price-per-hour", "3"]);
    assert_eq!(plan["kv"]["bytes_per_token"], json!(512 << 10));
    assert_eq!(plan["kv"]["by_formula"], json!(512 << 10));
    assert_eq!(plan["fits"]["bytes_at_full_length"], json!(2u64 << 30), "4,096 tokens");
    assert_eq!(plan["model"]["parameters"], json!(6_738_415_616u64));
    let cases = plan["cases"].as_array().expect("cases");
    assert_eq!(cases.len(), 2, "a slow end and a fast end");
    let of = |case: &Value, path: &str| case.pointer(path).and_then(Value::as_f64).expect("a number");
    assert_eq!([of(&cases[0], "/share_of_limits"), of(&cases[1], "/share_of_limits")], [0.2, 0.8]);
    // Nothing but the share is different.
    let knees = [of(&cases[0], "/knee_per_s"), of(&cases[1], "/knee_per_s")];
    assert!((knees[1] / knees[0] - 4.0).abs() < 0.05, "{knees:?}");
    for case in cases {
        let points = case["points"].as_array().expect("points");
        assert_eq!(points.len(), 6, "five shares of the knee, and the rate that was asked for");
        let waits: Vec<f64> = points[..5].iter().map(|point| of(point, "/ttft_s/p50")).collect();
        assert!(waits[4] > 3.0 * waits[0], "beyond the knee a queue grows: {waits:?}");
        assert_eq!(points[4]["over"], json!(true));
        let served = 0.8 * of(case, "/knee_per_s") * 3600.0 * 128.0;
        assert!((of(case, "/per_million_output") / (3.0 / served * 1e6) - 1.0).abs() < 1e-9);
    }
    let changes = plan["alternatives"].as_array().expect("changes");
    let smaller = changes.iter().find(|of| of["change"] == "KV in int8").expect("int8");
    assert!(smaller["kv_tokens"].as_u64() > plan["kv"]["tokens"].as_u64(), "{smaller}");
    let twice = changes.iter().find(|of| of["change"] == "twice the devices").expect("devices");
    assert!(of(twice, "/times") > 1.5, "{twice}");
}

#[test]
fn what_a_plan_leaves_out_is_said() {
    let small = ["--prompt", "64", "--output", "16", "--max-num-seqs", "4"];
    let one = plan(&[&[LLAMA, "--machine", "h100"][..], &small].concat());
    assert_eq!(one["notes"], json!([]));
    let two = plan(&[&[LLAMA, "--machine", "h100", "--devices", "2"][..], &small].concat());
    assert!(two["notes"][0].as_str().is_some_and(|note| note.contains("tell one another")), "{two}");
    // A context that does not fit beside the weights.
    let long = LLAMA.replace("context=4096", "context=131072");
    let long = plan(&[&[&long, "--machine", "l4"][..], &small].concat());
    assert!(long["notes"][0].as_str().is_some_and(|note| note.contains("--max-model-len 1024")), "{long}");
}

#[test]
fn a_plan_is_told_in_words_and_drawn() {
    let folder = tempfile::tempdir().expect("folder");
    let file = folder.path().join("plan.svg");
    let text = stdout(&[
        "plan",
        LLAMA,
        "--machine",
        "h200",
        "--max-num-seqs",
        "8",
        "--shared-prefixes",
        "2",
        "--prefix-len",
        "200",
        "--plot",
        file.to_str().expect("text"),
    ]);
    for part in [
        "20 to 70 % of its limits",
        "2 x 32 layers x 32 KV heads x 128 x 2 B = 512 KiB",
        "2 x layers x KV heads x head_dim x bytes says 512 KiB",
        "The knee:",
        "--host-kv-memory",
        "weights in q4",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let svg = std::fs::read_to_string(&file).expect("a plot");
    assert_eq!(svg.matches("<polyline").count(), 4, "two ends in two panels");
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    let machines = stdout(&["plan", "--machines"]);
    for line in [
        "mi300x, reads: stated, AMD Instinct MI300X data sheet",
        "h100, reads: measured, docs/performance-gpu.md",
        "epyc, host: assumed, half of what it reads",
    ] {
        assert!(machines.contains(line), "{line}: {machines}");
    }
}

#[test]
fn drafts_that_are_right_are_tokens_of_the_same_step() {
    let knee = |drafts: &[&str]| {
        let traffic = ["--prompt", "16", "--output", "64", "--max-num-seqs", "4"];
        let plan = plan(&[&[LLAMA, "--machine", "h100"][..], &traffic, drafts].concat());
        plan["cases"][1]["knee_per_s"].as_f64().expect("a number")
    };
    let without = knee(&[]);
    // Of three drafts a step, each right with 0.7: 1 + 0.7 + 0.49 + 0.34 tokens. Weights are read as often.
    let times = knee(&["--drafts", "3:0.7"]) / without;
    assert!((2.0..2.6).contains(&times), "{times}");
    let wrong = knee(&["--drafts", "3:0"]) / without;
    assert!((0.9..=1.0).contains(&wrong), "{wrong}");
    let refused = output(&["plan", LLAMA, "--machine", "h100", "--drafts", "3:1.5"]);
    assert!(!refused.status.success() && String::from_utf8_lossy(&refused.stderr).contains("such as 3:0.7"));
}

#[test]
fn what_cannot_be_planned_is_refused_with_numbers() {
    let refused = |arguments: &[&str]| refusal(&[&["plan"], arguments].concat());
    let small = refused(&[LLAMA, "--machine", "groq"]);
    assert!(
        small.contains("12.6 GiB") && small.contains("GroqChip 1") && small.contains("--devices"),
        "{small}"
    );
    let long = refused(&[LLAMA, "--machine", "h100", "--prompt", "5000"]);
    assert!(long.contains("5128") && long.contains("4096"), "{long}");
    assert!(refused(&["./nothing", "--machine", "h100"]).contains("layers=32"));
    assert!(refused(&[LLAMA, "--machine", "h1000"]).contains("h100, h200"));
    let latent = refused(&[LLAMA, "--machine", "h100", "--max-model-len", "9000"]);
    assert!(latent.contains("9000") && latent.contains("4096"), "{latent}");
}

#[test]
fn a_model_that_was_measured_has_one_end_and_is_held_against_the_engine() {
    let folder = tempfile::tempdir().expect("folder");
    let file = folder.path().join("machine.json");
    let file = file.to_str().expect("text");
    stdout(&["doctor", "demo", "--threads", "1", &format!("--write-profile={file}"), "--json"]);
    let small = ["--prompt", "64", "--output", "16", "--max-num-seqs", "8"];
    let measured = plan(&[&["demo", "--machine", file][..], &small].concat());
    assert_eq!(measured["steps"]["measured"], json!(true), "{}", measured["steps"]);
    assert_eq!(measured["cases"].as_array().map(Vec::len), Some(1));
    // In another form it was not.
    let other = plan(&[&["demo", "--machine", file, "--weights", "f32"][..], &small].concat());
    assert_eq!(other["steps"]["measured"], json!(false));
    let report = stdout(&[
        "bench",
        "plan",
        "--threads",
        "1",
        "--max-num-seqs",
        "4",
        "--seconds",
        "1",
        "--repeat",
        "1",
        "--json",
    ]);
    let report: Value = serde_json::from_str(&report).expect("JSON");
    let cells = report["cells"].as_array().expect("cells");
    // Four kinds of traffic: a knee, and four figures at each of two loads. Beside them, what steps of each kind took.
    let is_of_steps = |cell: &&Value| cell["what"].as_str().is_some_and(|what| what.starts_with("a step"));
    let of_steps = cells.iter().filter(is_of_steps).count();
    assert_eq!(cells.len() - of_steps, 4 * (1 + 2 * 4), "{report}");
    assert!(of_steps >= 4 * 3, "{report}");
    for cell in cells {
        let figures = [cell["planned"].as_f64(), cell["measured"].as_f64()];
        // No run finds what another left behind.
        match cell["what"] == json!("cached, %") && cell["traffic"] != json!("shared beginnings") {
            true => assert!(figures.iter().all(|figure| *figure < Some(1.0)), "{cell}"),
            false => assert!(figures.iter().all(|figure| *figure > Some(0.0)), "{cell}"),
        }
    }
    assert_eq!(report["bounds"].as_array().map(Vec::len), Some(4));
}

fn recording(folder: &Path, requests: &[Value]) -> String {
    let file = folder.join("trace.json");
    let steps: Vec<Value> = (1..=8u64)
        .map(|rows| {
            json!({"ph": "X", "cat": "folio.steps", "ts": rows, "dur": 1, "args": {"decode": {"steps": 10, "us": 10_000 + 500 * rows,
                "sequences": 10 * rows, "rows": 10 * rows, "logit_rows": 10 * rows, "kv_positions": 600 * rows, "attention": 600 * rows}}})
        })
        .collect();
    let events = [steps, requests.to_vec()].concat();
    let text = json!({
        "otherData": {"format": "folio-trace", "version": 1, "blocks": 200, "block_tokens": 16, "bytes_per_block": 1024, "seconds": 5.0,
            "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_prefill_while_decoding": 16, "max_model_len": 1024},
        "traceEvents": events,
    });
    std::fs::write(&file, text.to_string()).expect("written");
    file.to_str().expect("text").to_owned()
}

fn request(second: u64, cached: u32) -> Value {
    json!({"ph": "X", "cat": "folio.request", "ts": second * 1_000_000, "dur": 50_000, "args": {"tenant": 0,
        "prompt_tokens": 64, "cached_tokens": cached, "output_tokens": 10, "max_tokens": 10, "first_token": second * 1_000_000 + 9000,
        "prompt_blocks": [[0, 4]], "prompt_tail": null, "output_blocks": []}})
}

#[test]
fn a_recording_is_run_again_as_it_was_or_elsewhere() {
    let folder = tempfile::tempdir().expect("folder");
    let file = recording(folder.path(), &[request(0, 0), request(1, 63), request(2, 63)]);
    let replayed = |more: &[&str]| -> Value {
        let text = stdout(&[&["trace", "replay", &file, "--json"], more].concat());
        serde_json::from_str(&text).expect("JSON")
    };
    let same = replayed(&[]);
    for figure in ["requests", "prompt_tokens", "cached_tokens", "output_tokens"] {
        assert_eq!(same["simulated"][0][figure], same["recorded"][figure], "{figure}: {same}");
    }
    assert_eq!(same["recorded"]["cached_tokens"], json!(126));
    // As fast as the steps that were recorded.
    let tpot = same["simulated"][0]["tpot_s"]["p50"].as_f64().expect("a number");
    assert!((0.0009..0.0013).contains(&tpot), "{tpot}");
    let elsewhere = replayed(&["--model", LLAMA, "--machine", "h100"]);
    assert_eq!(elsewhere["simulated"].as_array().map(Vec::len), Some(2), "a range");
    assert_eq!(elsewhere["simulated"][0]["cached_tokens"], json!(126));
    // Less than a sequence, and a request that ends with its first token.
    let none = refusal(&["trace", "replay", &file, "--blocks", "2"]);
    assert!(none.contains("not one of 3 requests") && none.contains("2 blocks of 16 tokens"), "{none}");
    let mut short = request(0, 0);
    short["args"]["output_tokens"] = json!(1);
    short["args"]["max_tokens"] = json!(1);
    let other = tempfile::tempdir().expect("folder");
    let one = stdout(&["trace", "replay", &recording(other.path(), &[short]), "--json"]);
    let one: Value = serde_json::from_str(&one).expect("JSON");
    assert!(one["cases"][0]["knee_per_s"].as_f64() > Some(0.0), "{one}");
    let text = stdout(&["trace", "replay", &file]);
    assert!(text.contains("recorded") && text.contains("The knee:"), "{text}");
    // As traffic of a plan, too.
    let plan = plan(&[LLAMA, "--machine", "h100", "--trace", &file]);
    assert_eq!(plan["traffic"]["prompt_tokens"], json!(64.0));
}

#[test]
fn recordings_that_are_none_are_refused_by_name() {
    let folder = tempfile::tempdir().expect("folder");
    let refused = |file: &str, more: &[&str]| refusal(&[&["trace", "replay", file], more].concat());
    let good = recording(folder.path(), &[request(0, 0)]);
    assert!(refused(&good, &["--machine", "h100"]).contains("--machine needs --model"));
    assert!(refused(&recording(folder.path(), &[]), &[]).contains("no request"));
    let mut negative = request(0, 0);
    negative["ts"] = json!(-1);
    let error = refused(&recording(folder.path(), &[negative]), &[]);
    assert!(error.contains("request 1") && error.contains("-1"), "{error}");
    let broken = folder.path().join("broken.json");
    std::fs::write(&broken, "{\"traceEvents\": [").expect("written");
    assert!(refused(broken.to_str().expect("text"), &[]).contains("no trace of `folio trace record`"));
    let nobody = refusal(&["trace", "record", "--url", "http://127.0.0.1:9", "--seconds", "1"]);
    assert!(nobody.contains("no answer from http://127.0.0.1:9"), "{nobody}");
}
