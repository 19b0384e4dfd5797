//! `folio bench` and `folio doctor`.

use std::path::PathBuf;

use serde_json::Value;

use crate::{refusal, stdout};

#[test]
fn the_engine_bench_fills_its_report() {
    let arguments =
        ["bench", "engine", "--json", "--prefill", "64,99999", "--batch", "1,2", "--depth", "0,32"];
    let report: Value =
        serde_json::from_str(&stdout(&[&arguments[..], &["--decode", "4", "--repeat", "1"]].concat()))
            .expect("JSON");
    assert_eq!(report["prefill"].as_array().map(Vec::len), Some(1));
    assert_eq!(report["decode"].as_array().map(Vec::len), Some(4));
    assert_eq!(report["skipped"].as_array().map(Vec::len), Some(1));
    for figure in report["prefill"].as_array().into_iter().chain(report["decode"].as_array()).flatten() {
        assert!(
            figure["tokens_per_s"].as_f64() > Some(0.0) && figure["share_of_limit"].as_f64() > Some(0.0),
            "{figure}"
        );
    }
}

#[test]
fn the_claims_bench_measures_pairs_and_names_what_it_leaves_out() {
    let report: Value =
        serde_json::from_str(&stdout(&["bench", "claims", "--repeat", "1", "--json"])).expect("JSON");
    let figures = report["figures"].as_array().expect("figures");
    let mut claims: Vec<_> = figures.iter().filter_map(|figure| figure["claim"].as_str()).collect();
    claims.dedup();
    assert_eq!(
        claims,
        [
            "kv-cache",
            "continuous-batching",
            "paging",
            "prefix-cache",
            "offload",
            "multi-round",
            "block-size",
            "speculation",
            "swapping"
        ]
    );
    for figure in figures {
        // What is not finite is no number in JSON.
        for of in [&figure["with"], &figure["without"], &figure["gain"], &figure["gains"][0]] {
            assert!(of.as_f64() > Some(0.0), "{figure}");
        }
        assert!(
            !figure["note"].as_str().expect("a note").is_empty() && figure["gains"][1].is_null(),
            "{figure}"
        );
    }
    let of = |name: &str| figures.iter().find(|figure| figure["claim"] == name).expect("a figure");
    assert_eq!(of("prefix-cache")["field"], serde_json::json!([5.0, 5.0]));
    let waste = figures.iter().find(|figure| figure["of"] == "waste").expect("a figure");
    assert!(waste["with"].as_f64() < Some(25.0) && waste["without"].as_f64() > Some(80.0), "{waste}");
    let int8 = report["formats"].as_array().expect("formats").iter().find(|format| format["name"] == "int8");
    assert!(int8.expect("int8")["share"].as_f64() < Some(0.6), "{report}");
    assert!(report["left_out"].to_string().contains("H2O"), "{report}");

    let short = stdout(&["bench", "claims", "--only", "paging", "--max-model-len", "512", "--json"]);
    let report: Value = serde_json::from_str(&short).expect("JSON");
    assert!(report["left_out"].to_string().contains("512 tokens, the loads need 2048"), "{report}");
    assert_eq!(report["figures"], serde_json::json!([]));

    let policies = stdout(&["bench", "claims", "--policy", "static,contiguous", "--repeat", "1", "--json"]);
    let report: Value = serde_json::from_str(&policies).expect("JSON");
    let measured = report["policies"].as_array().expect("figures of policies");
    let names: Vec<_> = measured.iter().filter_map(|figure| figure["policy"].as_str()).collect();
    assert_eq!((names, &report["figures"]), (vec!["static", "contiguous"], &serde_json::json!([])));
    for figure in measured {
        assert!(figure["tokens_per_s"].as_f64() > Some(0.0), "{figure}");
        assert_eq!(figure["ttft_ms"]["count"], 32, "{figure}");
    }
}

#[test]
fn doctor_tells_the_limits_of_every_number_of_threads_and_of_a_model() {
    let report = stdout(&["doctor", "demo", "--threads", "2", "--quantize", "q8", "--json"]);
    let report: Value = serde_json::from_str(&report).expect("JSON");
    let threads: Vec<_> = report["by_threads"].as_array().expect("machines").iter().collect();
    assert_eq!(threads.iter().map(|m| m["threads"].as_u64()).collect::<Vec<_>>(), [Some(1), Some(2)]);
    for rate in ["read_bytes_per_s", "f32_flop_per_s", "int8_op_per_s"] {
        assert!(threads.iter().all(|machine| machine[rate].as_f64() > Some(0.0)), "{report}");
    }
    let model = &report["model"];
    assert_eq!(model["format"], "BF16 to Q8_0");
    // 512 tokens of prompt; 128 of context alone, eight and 32 times; 8,192 do not fit this model.
    let limits = model["limits"].as_array().expect("limits");
    assert_eq!(limits.iter().map(|row| row["batch"].as_u64()).collect::<Vec<_>>(), [1, 1, 8, 32].map(Some));
    assert!(limits.iter().all(|row| row["tokens_per_s"].as_f64() > Some(0.0)), "{report}");
    let bytes = |at: usize| limits[at]["bytes_per_token"].as_f64().expect("bytes");
    assert!(
        bytes(1) > 2.4e6 && bytes(2) < bytes(1) / 4.0,
        "one reads all weights, eight share them: {report}"
    );
}

#[test]
fn a_model_is_compared_with_what_it_was_made_from() {
    let folder = tempfile::tempdir().expect("folder");
    let (text, tokens) = (folder.path().join("text"), folder.path().join("tokens"));
    std::fs::write(&text, "Once upon a time there was a little fox who lived in a wood. ".repeat(20))
        .expect("text");
    std::fs::write(&tokens, serde_json::to_string(&vec![7; 100]).expect("JSON")).expect("tokens");
    let [text, tokens] = [&text, &tokens].map(|path| path.to_str().expect("a path"));
    let kl = |more: &[&str]| -> Value {
        let arguments = [&["bench", "kl", "demo"][..], more, &["--context", "64", "--json"]].concat();
        serde_json::from_str(&stdout(&arguments)).expect("JSON")
    };
    let number = |report: &Value, name: &str| report[name].as_f64().expect("a number");
    let same = kl(&["demo", "--text", text]);
    assert_eq!((number(&same, "max_kl"), number(&same, "same_top")), (0.0, 1.0), "{same}");
    assert_eq!(same["base"]["perplexity"], same["model"]["perplexity"]);
    let (q8, q4) = (kl(&["--quantize", "q8", "--text", text]), kl(&["--quantize", "q4", "--text", text]));
    assert!(
        0.0 < number(&q8, "mean_kl") && number(&q8, "mean_kl") * 5.0 < number(&q4, "mean_kl"),
        "{q8} {q4}"
    );
    assert_eq!((&q8["base"]["format"], &q8["model"]["format"]), (&"BF16".into(), &"BF16 to Q8_0".into()));
    // One window of 64, of which the second half is scored but for the last token, which nothing follows.
    let short = kl(&["--quantize", "q8", "--tokens", tokens]);
    assert_eq!((&short["windows"], &short["positions"]), (&1.into(), &31.into()), "{short}");

    let refuse = |more: &[&str]| refusal(&[&["bench", "kl", "demo"][..], more].concat());
    assert!(refuse(&["demo", "--tokens", tokens]).contains("fewer than 512 tokens"));
    assert!(refuse(&["demo", "--tokens", text]).contains("`Once` is not a token id"));
    std::fs::write(tokens, "5000 ".repeat(600)).expect("tokens");
    assert!(refuse(&["demo", "--tokens", tokens]).contains("token 5000 is not in the vocabulary of 1024"));
    let other = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../folio-model/tests/gguf/mixed/mixed.gguf");
    let said = refuse(&[other.to_str().expect("a path"), "--text", text, "--context", "64"]);
    assert!(said.contains("vocabularies of 1024 and 288"), "{said}");
}

/// A folder with nothing but a configuration is a model for measurements, in any type of weights, the same at every start.
#[test]
fn weights_are_made_up_where_that_is_asked_for() {
    let folder = tempfile::tempdir().expect("folder");
    let shape = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo/config.json");
    std::fs::copy(shape, folder.path().join("config.json")).expect("a configuration");
    let path = folder.path().to_str().expect("text");
    let run = [
        "run",
        path,
        "Once",
        "--raw",
        "--max-tokens",
        "8",
        "--ignore-eos",
        "--temperature",
        "0",
        "--device",
        "cpu",
        "--load-format",
    ];
    for format in ["dummy", "dummy:Q8_0", "dummy:Int4x32"] {
        let arguments = [&run[..], &[format]].concat();
        assert_eq!(stdout(&arguments), stdout(&arguments), "{format}");
    }
    let error = refusal(&["run", "demo", "Once", "--load-format", "dummy"]);
    assert!(error.contains("needs a folder with a config.json"), "{error}");
    let error = refusal(&[&run[..], &["auto"]].concat());
    assert!(error.contains("safetensors"), "nothing is made up unasked: {error}");
}
