//! Drafts of a model or a head: what they change, and what is said of them.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::served::{Served, ids, said_by_transformers, servable};
use crate::{STORY, output, refusal, stdout, story};

#[test]
fn a_draft_model_changes_no_token_and_needs_the_same_vocabulary() {
    for more in [&[][..], &["--temperature", "1.5", "--seed", "5"]] {
        assert_eq!(story(&[more, &["--draft-model", "demo"]].concat()), story(more), "{more:?}");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let assets = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo");
    for file in std::fs::read_dir(assets).expect("the built-in model") {
        let file = file.expect("a file").path();
        std::fs::copy(&file, folder.path().join(file.file_name().expect("a name"))).expect("copied");
    }
    let (tokens, draft) = (folder.path().join("tokenizer.json"), folder.path().display().to_string());
    let refused = |change: fn(&mut Value)| {
        let text = std::fs::read_to_string(format!("{assets}/tokenizer.json")).expect("its tokens");
        let mut spec: Value = serde_json::from_str(&text).expect("JSON");
        change(&mut spec);
        std::fs::write(&tokens, spec.to_string()).expect("written");
        refusal(&[&STORY[..], &["--draft-model", &draft]].concat())
    };
    let what = refused(|spec| {
        let vocab = &mut spec["model"]["vocab"];
        (vocab["So"], vocab["zard"]) = (vocab["zard"].clone(), vocab["So"].clone());
    });
    assert!(what.contains("2 of its 1024 tokens are not the model's"), "{what}");
    let what = refused(|spec| {
        let mut token = spec["added_tokens"][0].clone();
        (token["id"], token["content"]) = (json!(1024), json!("<more>"));
        spec["added_tokens"].as_array_mut().expect("a list").push(token);
    });
    assert!(what.contains("its vocabulary has 1025 tokens, the model's 1024"), "{what}");
    let what = refusal(&[&STORY[..], &["--speculate", "model"]].concat());
    assert!(what.contains("--speculate model needs --draft-model"), "{what}");
    let what = refusal(&[&STORY[..], &["--draft-model", "demo", "--speculate", "off"]].concat());
    assert!(what.contains("--draft-model has no use with --speculate off"), "{what}");
}

/// The built-in head, which `tools/demo_model/eagle.py` trained for the built-in model.
const HEAD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo-eagle3");

#[test]
fn a_head_changes_no_token_and_is_known_by_its_configuration() {
    let cache = tempfile::tempdir().expect("a folder");
    let packed = ["--packed-cache", cache.path().to_str().expect("text"), "--packed-cache-min", "1"];
    for more in
        [&[][..], &["--temperature", "1.5", "--seed", "5"], &["--quantize", "q8"], &["--speculate", "eagle3"]]
    {
        let plain: Vec<&str> =
            more.iter().copied().filter(|flag| !["--speculate", "eagle3"].contains(flag)).collect();
        let head = [more, &["--draft-model", HEAD]].concat();
        assert_eq!(story(&head), story(&plain), "{more:?}");
    }
    // Packed beside what is tapped, and mapped with it and without.
    for more in [&["--draft-model", HEAD][..], &["--draft-model", HEAD], &[]] {
        assert_eq!(story(&[more, &packed].concat()), story(&[]), "{more:?}");
    }
    // The one in the program is the built-in model's alone.
    assert_eq!(story(&["--speculate", "eagle3"]), story(&[]));
    let refused = |more: &[&str]| refusal(&[&STORY[..], more].concat());
    let other = concat!(env!("CARGO_MANIFEST_DIR"), "/../folio-model/tests/fixtures/llama3");
    let what = refusal(&["run", other, "Hi", "--speculate", "eagle3"]);
    assert!(what.contains("--speculate eagle3 needs --draft-model"), "{what}");
    let what = refused(&["--draft-model", HEAD, "--speculate", "model"]);
    assert!(what.contains("is an EAGLE-3 head; give --speculate eagle3"), "{what}");
    let what = refused(&["--draft-model", "demo", "--speculate", "eagle3"]);
    assert!(what.contains("demo is a model by itself; give --speculate model"), "{what}");
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::copy(format!("{HEAD}/model.safetensors"), folder.path().join("pytorch_model.bin"))
        .expect("copied");
    std::fs::copy(format!("{HEAD}/config.json"), folder.path().join("config.json")).expect("copied");
    let what = refused(&["--draft-model", folder.path().to_str().expect("text")]);
    assert!(what.contains("convert it to model.safetensors"), "{what}");
}

/// What `folio doctor` says of the built-in model and a drafter.
fn pair(drafter: &[&str]) -> Value {
    let report = stdout(&[&["doctor", "demo", "--threads", "1", "--json"], drafter].concat());
    serde_json::from_str::<Value>(&report).expect("JSON")["pair"].take()
}

#[test]
fn a_head_that_reads_other_layers_is_doubted_and_the_right_one_is_not() {
    let right = pair(&["--draft-model", HEAD]);
    let share =
        |pair: &Value| pair["same"].as_f64().expect("a number") / pair["places"].as_f64().expect("a number");
    assert_eq!((&right["drafter"], &right["doubt"]), (&"eagle3".into(), &Value::Null), "{right}");
    assert!(share(&right) > 0.9 && right["places"].as_u64() > Some(50), "{right}");
    let own = pair(&["--speculate", "eagle3"]);
    assert_eq!(
        (&own["same"], &own["name"]),
        (&right["same"], &"the EAGLE-3 head of folio-demo".into()),
        "{own}"
    );
    let same = pair(&["--draft-model", "demo"]);
    assert_eq!(
        (same["same"].as_u64(), same["tokens_per_step"].as_f64()),
        (same["places"].as_u64(), Some(4.0))
    );
    let bytes = std::fs::metadata(format!("{HEAD}/model.safetensors")).expect("weights").len();
    assert!(bytes < 2_000_000, "{bytes} bytes of weights that every program has with it");
    // It reads layers 2, 2 and 1: their inputs.
    let folder = tempfile::tempdir().expect("a folder");
    let (place, path) = (folder.path().to_str().expect("text"), folder.path().join("config.json"));
    let weights = folder.path().join("model.safetensors");
    std::fs::copy(format!("{HEAD}/model.safetensors"), &weights).expect("copied");
    let config = std::fs::read_to_string(format!("{HEAD}/config.json")).expect("text");
    let reading = |layers: [u32; 3]| {
        let mut config: Value = serde_json::from_str(&config).expect("JSON");
        config["eagle_aux_hidden_state_layer_ids"] = json!(layers);
        std::fs::write(&path, config.to_string()).expect("written");
        pair(&["--draft-model", place])
    };
    assert_eq!(reading([2, 2, 1])["same"], right["same"]);
    // The next layers: right less often, and often enough to be of use. That it would be right more often with those before them tells.
    let near = reading([3, 3, 2]);
    assert!((0.4..share(&right) - 0.2).contains(&share(&near)), "{near}");
    assert_eq!(
        (&near["neighbours"][0]["layers_behind"], &near["neighbours"][0]["same"]),
        (&json!(-1), &right["same"])
    );
    let doubt = near["doubt"].as_str().expect("a sentence");
    assert!(
        doubt
            .contains(&format!("{} of {} places with the layers one before", right["same"], right["places"])),
        "{doubt}"
    );
    assert_eq!(right["neighbours"].as_array().map(Vec::len), Some(2), "{right}");
    for layers in [[0, 0, 0], [1, 1, 0]] {
        let wrong = reading(layers);
        assert!(share(&wrong) < 0.3, "{wrong}");
        let doubt = wrong["doubt"].as_str().expect("a sentence");
        for part in [
            format!("at {} of {} places of the model's answers", wrong["same"], wrong["places"]),
            "eagle_aux_hidden_state_layer_ids".to_owned(),
            "norm_before_residual".to_owned(),
            "hidden states of another model".to_owned(),
        ] {
            assert!(doubt.contains(&part), "{doubt}");
        }
    }
    // Serving says it, too, and goes on.
    let run = output(&[&STORY[..], &["--draft-model", place]].concat());
    let said = String::from_utf8_lossy(&run.stderr).into_owned();
    assert!(run.status.success() && said.contains("places of the model's answers"), "{said}");
    // The features of another model: each value in another one's place.
    let mut file = std::fs::read(&weights).expect("weights");
    let start = 8 + u64::from_le_bytes(*file.first_chunk().expect("a length")) as usize;
    let header: Value = serde_json::from_slice(&file[8..start]).expect("JSON");
    let offset =
        |at: usize| start + header["fc.weight"]["data_offsets"][at].as_u64().expect("an offset") as usize;
    file[offset(0)..offset(1)].rotate_left(7 * 3 * 192 * 2);
    std::fs::write(&weights, file).expect("written");
    let foreign = reading([2, 2, 1]);
    assert!(share(&foreign) < 0.2 && foreign["doubt"].is_string(), "{foreign}");
}

#[test]
fn drafts_are_counted_with_the_same_number_in_every_step() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("dialogues.jsonl");
    let asked = |text: &str| json!({"messages": [{"role": "user", "content": text}]}).to_string();
    let dialogues = [asked("Tell me a story about a fox."), String::new(), asked("What can you do?")];
    std::fs::write(&path, dialogues.join("\n")).expect("written");
    let path = path.to_str().expect("text");
    let small = ["--tokens", "24", "--threads", "1", "--kv-cache-memory", "8MiB"];
    let bench = [&["bench", "drafts", "--dialogues", path], &small[..]].concat();
    // Itself as its draft model is always right; at half the temperature not always.
    let same = ["--draft-model", "demo", "--drafts", "2", "--temperature", "0,1", "--json"];
    let report: Value = serde_json::from_str(&stdout(&[&bench[..], &same].concat())).expect("JSON");
    let [cold, warm] = [0, 1].map(|at| &report["figures"][at]);
    assert_eq!((&cold["answers"], &cold["right"]), (&2.into(), &cold["drafted"]), "{report}");
    assert!(cold["tokens_per_step"].as_f64() > Some(2.5), "the last step of an answer has fewer: {report}");
    for figure in [cold, warm] {
        let number = |name: &str| figure[name].as_u64().expect("a number");
        let by_place: Vec<u64> = serde_json::from_value(figure["right_by_place"].clone()).expect("numbers");
        assert_eq!(by_place.iter().sum::<u64>(), number("right"), "{figure}");
        assert_eq!(by_place.len(), 2);
        assert!(number("drafted") > number("steps"), "two nearly everywhere: {figure}");
    }
    assert!(report["draft_weight_bytes"].as_u64() > Some(4_000_000), "{report}");
    // A model that holds no conversations goes on from what they say.
    let base = folder.path().join("base");
    std::fs::create_dir(&base).expect("a folder");
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo");
    for name in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(format!("{demo}/{name}"), base.join(name)).expect("copied");
    }
    let base = [&bench[..2], &[base.to_str().expect("text")], &bench[2..], &same].concat();
    let report: Value = serde_json::from_str(&stdout(&base)).expect("JSON");
    assert_eq!(report["figures"][0]["answers"], 2, "{report}");
    let what = refusal(&bench);
    assert!(what.contains("give --draft-model, or --speculate mtp"), "{what}");
    let empty = folder.path().join("empty.jsonl");
    std::fs::write(&empty, "\n").expect("written");
    let empty = ["bench", "drafts", "--draft-model", "demo", "--dialogues", empty.to_str().expect("text")];
    assert!(refusal(&empty).contains("empty.jsonl has no dialogues"));
}

/// Off and on in turn, with what drafts can be worth beside it.
#[test]
fn what_drafts_are_worth_is_a_line_of_the_engines_figures() {
    let arguments = [
        &["bench", "engine", "--prefill", "16", "--batch", "1", "--decode", "4", "--repeat", "1"][..],
        &["--threads", "1", "--draft-model", HEAD, "--kv-cache-memory", "8MiB"],
    ]
    .concat();
    let report: Value = serde_json::from_str(&stdout(&[&arguments[..], &["--json"]].concat())).expect("JSON");
    let [line] = report["speculation"].as_array().expect("lines").as_slice() else { panic!("{report}") };
    assert_eq!(line["batch"], 1, "{line}");
    assert!(
        line["drafts"].as_u64() >= line["right"].as_u64() && line["ratio"].as_f64() > Some(0.0),
        "{line}"
    );
    assert!(stdout(&arguments).contains("on / off"));
}

/// The built-in model with an MTP head: its last layer once more, which reads the hidden state alone.
fn with_mtp() -> tempfile::TempDir {
    let demo = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo"));
    let folder = tempfile::tempdir().expect("a folder");
    for entry in std::fs::read_dir(&demo).expect("the built-in model").flatten() {
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).expect("copied");
    }
    let file = std::fs::read(demo.join("model.safetensors")).expect("weights");
    let start = 8 + u64::from_le_bytes(*file.first_chunk().expect("a length")) as usize;
    let mut header: serde_json::Map<String, Value> = serde_json::from_slice(&file[8..start]).expect("JSON");
    let mut data = file[start..].to_vec();
    let last = header.iter().filter_map(|(name, entry)| {
        Some((format!("mtp.layers.0.{}", name.strip_prefix("model.layers.3.")?), entry.clone()))
    });
    for (name, mut entry) in last.collect::<Vec<(String, Value)>>() {
        let place = |at: usize| entry["data_offsets"][at].as_u64().expect("an offset") as usize;
        let (begin, range) = (data.len(), place(0)..place(1));
        data.extend_from_within(range);
        entry["data_offsets"] = json!([begin, data.len()]);
        header.insert(name, entry);
    }
    let one = 0x3f80u16.to_le_bytes();
    let mut add = |name: &str, shape: &[usize], value: &dyn Fn(usize) -> bool| {
        let (begin, values) = (data.len(), shape.iter().product::<usize>());
        data.extend((0..values).flat_map(|at| if value(at) { one } else { [0; 2] }));
        let entry = json!({"dtype": "BF16", "shape": shape, "data_offsets": [begin, data.len()]});
        header.insert(format!("mtp.{name}.weight"), entry);
    };
    for norm in ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"] {
        add(norm, &[192], &|_| true);
    }
    // Column 192 + i of row i.
    add("fc", &[192, 384], &|at| at % 384 == 192 + at / 384);
    let mut header = serde_json::to_vec(&header).expect("JSON");
    header.resize(header.len().next_multiple_of(8), b' ');
    let whole = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    std::fs::write(folder.path().join("model.safetensors"), whole).expect("written");
    folder
}

#[test]
fn the_head_of_a_checkpoint_is_served_if_it_is_asked_for_and_changes_no_token() {
    let folder = with_mtp();
    let place = folder.path().to_str().expect("text");
    for more in [&[][..], &["--temperature", "1.5", "--seed", "5"], &["--quantize", "q8"]] {
        let arguments = [&["run", place], &STORY[2..], more].concat();
        let plain = story(more);
        assert_eq!(stdout(&arguments), plain, "{more:?}: it is there and nobody asked");
        assert_eq!(stdout(&[&arguments[..], &["--speculate", "mtp"]].concat()), plain, "{more:?}");
    }
    let report = stdout(&["doctor", place, "--threads", "1", "--json", "--speculate", "mtp"]);
    let pair = serde_json::from_str::<Value>(&report).expect("JSON")["pair"].take();
    assert_eq!(pair["drafter"], "mtp", "{pair}");
    assert!(
        pair["places"].as_u64() > Some(50)
            && pair["name"].as_str().is_some_and(|name| name.contains("MTP head")),
        "{pair}"
    );
}

#[test]
fn mtp_is_refused_where_there_is_no_such_head() {
    let what = refusal(&["doctor", "demo", "--threads", "1", "--speculate", "ngram"]);
    assert!(what.contains("give --draft-model, or --speculate mtp"), "{what}");
    let what = refusal(&[&STORY[..], &["--speculate", "mtp"]].concat());
    assert!(what.contains("--speculate mtp") && what.contains("has no MTP head"), "{what}");
    let what = refusal(&[&STORY[..], &["--speculate", "mtp", "--draft-model", HEAD]].concat());
    assert!(what.contains("--draft-model has no use with --speculate mtp"), "{what}");
}

/// A draft model with windows keeps what lies behind them, also where their heads are of another size; one with states has those that follow
/// from what was said.
#[test]
fn a_draft_model_may_have_windows_and_states() {
    let windows = ["gemma3_text", "qwen3_window", "gpt_oss", "cohere2", "olmo3", "gemma4"];
    for name in windows.into_iter().chain(["qwen3_next", "nemotron_h", "lfm2"]) {
        let fixture = folio_model::testing::fixture(name);
        let (folder, [prompt, greedy]) = (servable(&fixture), said_by_transformers(name));
        let model = folder.path().to_str().expect("a path");
        let flags = ["--served-model-name", "it", "--kv-cache-dtype", "f32", "--draft-model", model];
        let served = Served::start(&[&[model][..], &flags].concat());
        let body = json!({"model": "it", "prompt": prompt, "max_tokens": greedy.len(), "temperature": 0,
            "ignore_eos": true, "return_token_ids": true, "speculative.n_max": 3});
        let answer = served.post("/v1/completions", &body);
        assert_eq!(ids(&answer["choices"][0]["token_ids"]), greedy, "{name}");
        let drafts = &answer["metrics"]["speculative_decoding"];
        let [drafted, right] = ["num_draft_tokens", "num_accepted_draft_tokens"]
            .map(|field| drafts[field].as_u64().unwrap_or(0));
        // It is the same model.
        assert!(drafted > 3 && right * 10 > drafted * 9, "{name}: {drafts}");
    }
}

/// The same with drafts of the checkpoint's own head.
#[test]
fn heads_over_states_and_latents_draft_and_change_no_token() {
    use folio_model::testing::heads::{PUBLISHED_WITH_MTP, with_mtp};
    for name in PUBLISHED_WITH_MTP {
        let (folder, [prompt, greedy]) = (servable(&with_mtp(name)), said_by_transformers(name));
        let model = folder.path().to_str().expect("a path");
        let flags = ["--served-model-name", "it", "--kv-cache-dtype", "f32", "--speculate", "mtp"];
        let served = Served::start(&[&[model][..], &flags].concat());
        let body = json!({"model": "it", "prompt": prompt, "max_tokens": greedy.len(), "temperature": 0,
            "ignore_eos": true, "return_token_ids": true, "speculative.n_max": 3});
        let answer = served.post("/v1/completions", &body);
        assert_eq!(ids(&answer["choices"][0]["token_ids"]), greedy, "{name}");
        let drafts = &answer["metrics"]["speculative_decoding"];
        assert_eq!(drafts["method"], "mtp", "{name}: {answer}");
        assert!(drafts["num_draft_tokens"].as_u64() > Some(0), "{name}: {drafts}");
    }
}
