//! The program as a stranger meets it: commands, exit codes, messages, a server that is measured and stopped.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Output, Stdio};

use serde_json::{Value, json};

fn folio(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_folio"));
    command.args(arguments).stdin(Stdio::null());
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("FOLIO_") && name != "FOLIO_ISA") {
        command.env_remove(name);
    }
    command
}

fn output(arguments: &[&str]) -> Output {
    folio(arguments).output().expect("folio runs")
}

/// Standard output of a command that must succeed.
fn stdout(arguments: &[&str]) -> String {
    let output = output(arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {errors}");
    String::from_utf8(output.stdout).expect("text")
}

/// Standard error of a command that must fail with exit code 1.
fn refusal(arguments: &[&str]) -> String {
    let output = output(arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    assert!(output.stdout.is_empty(), "{arguments:?} wrote to standard output");
    String::from_utf8(output.stderr).expect("text")
}

const STORY: [&str; 7] = ["run", "demo", "Once upon a time", "--raw", "--max-tokens", "40", "--ignore-eos"];

fn story(more: &[&str]) -> String {
    stdout(&[&STORY[..], more].concat())
}

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

/// A server of the built-in model on a free port; killed when dropped.
struct Served {
    child: Child,
    errors: BufReader<ChildStderr>,
    address: String,
}

impl Served {
    fn start(arguments: &[&str]) -> Self {
        let mut child = folio(&[&["serve", "--port", "0"][..], arguments].concat())
            .stderr(Stdio::piped())
            .spawn()
            .expect("folio runs");
        let errors = BufReader::new(child.stderr.take().expect("pipe"));
        let mut served = Self { child, errors, address: String::new() };
        let mut log = String::new();
        while served.address.is_empty() {
            let mut line = String::new();
            assert!(served.errors.read_line(&mut line).expect("text") > 0, "the server ended: {log}");
            if let Some(rest) = line.strip_prefix("listening on http://") {
                served.address = rest.split_whitespace().next().expect("address").to_owned();
            }
            log.push_str(&line);
        }
        served
    }

    fn get(&self, path: &str, header: &str) -> String {
        let mut socket = TcpStream::connect(&self.address).expect("connects");
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{header}\r\n");
        socket.write_all(request.as_bytes()).expect("sent");
        let mut answer = String::new();
        socket.read_to_string(&mut answer).expect("answer");
        answer
    }

    /// The answer's body, which must be JSON.
    fn post(&self, path: &str, body: &Value) -> Value {
        let mut socket = TcpStream::connect(&self.address).expect("connects");
        let body = body.to_string();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        );
        socket
            .write_all(format!("{head}content-length: {}\r\n\r\n{body}", body.len()).as_bytes())
            .expect("sent");
        let mut answer = String::new();
        socket.read_to_string(&mut answer).expect("answer");
        let (_, body) = answer.split_once("\r\n\r\n").expect("a head");
        serde_json::from_str(body).unwrap_or_else(|_| panic!("{answer}"))
    }

    /// SIGTERM; the rest of standard error.
    fn stop(mut self) -> String {
        let status = Command::new("kill").arg(self.child.id().to_string()).status().expect("kill");
        assert!(status.success());
        let mut rest = String::new();
        self.errors.read_to_string(&mut rest).expect("text");
        assert_eq!(self.child.wait().expect("ends").code(), Some(0), "{rest}");
        rest
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // Already gone after `stop`.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ids(value: &Value) -> Vec<u64> {
    value.as_array().expect("a list").iter().filter_map(Value::as_u64).collect()
}

/// A fixture's checkpoint with the built-in model's tokens.
fn servable(checkpoint: &Path) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo");
    let own = std::fs::read_dir(checkpoint).expect("a fixture").map(|file| file.expect("a file").path());
    let of_expected = |file: &PathBuf| file.file_stem().is_some_and(|name| name == "expected");
    let files = ["generation_config.json", "tokenizer.json", "tokenizer_config.json"];
    for file in own.filter(|file| !of_expected(file)).chain(files.map(|file| demo.join(file))) {
        std::fs::copy(&file, folder.path().join(file.file_name().expect("a name"))).expect("copied");
    }
    folder
}

/// A prompt for a fixture, and the tokens behind it.
fn said_by_transformers(name: &str) -> [Vec<u64>; 2] {
    let file = folio_model::testing::fixture(name).join("expected.json");
    let text = std::fs::read_to_string(file).expect("what is expected");
    let expected: Value = serde_json::from_str(&text).expect("JSON");
    ["prompt", "greedy"].map(|field| ids(&expected["cases"][0][field]))
}

/// Each family through the API: the tokens that transformers chooses, and what follows them from what was kept.
#[test]
fn each_family_says_what_transformers_says_and_goes_on_from_what_is_kept() {
    use folio_model::testing::FIXTURES;
    for name in FIXTURES {
        let fixture = folio_model::testing::fixture(name);
        let (folder, [prompt, greedy]) = (servable(&fixture), said_by_transformers(name));
        let model = folder.path().to_str().expect("a path");
        let served = Served::start(&[model, "--served-model-name", "it", "--kv-cache-dtype", "f32"]);
        let ask = |prompt: &[u64], most: usize| {
            let body = json!({"model": "it", "prompt": prompt, "max_tokens": most, "temperature": 0,
                "ignore_eos": true, "return_token_ids": true});
            let answer = served.post("/v1/completions", &body);
            let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
            (ids(&answer["choices"][0]["token_ids"]), cached.expect("a number") as usize)
        };
        assert_eq!(ask(&prompt, greedy.len()), (greedy.clone(), 0), "{name}");
        // The next turn of the conversation, and the same without what was kept.
        let next = [&prompt[..], &greedy].concat();
        let (said, cached) = ask(&next, 8);
        assert_eq!(cached, next.len() - 1, "{name}");
        let alone = Served::start(&[model, "--served-model-name", "it", "--kv-cache-dtype", "f32"]);
        let body = json!({"model": "it", "prompt": next, "max_tokens": 8, "temperature": 0,
            "ignore_eos": true, "return_token_ids": true});
        let cold = alone.post("/v1/completions", &body);
        assert_eq!(ids(&cold["choices"][0]["token_ids"]), said, "{name}");
    }
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

#[test]
fn a_server_is_measured_and_stopped() {
    let served = Served::start(&["--served-model-name", "tiny,alias"]);
    let models = served.get("/v1/models", "");
    assert!(models.contains("tiny") && models.contains("alias"), "{models}");
    let url = format!("http://{}", served.address);
    for endpoint in ["completions", "chat"] {
        let load = ["--requests", "12", "--warmup", "2", "--concurrency", "4", "--input-len", "20..60"];
        let more = ["--output-len", "4..8", "--endpoint", endpoint, "--slo-e2e-ms", "600000", "--json"];
        let report = stdout(&[&["bench", "serve", "--url", &url][..], &load, &more].concat());
        let report: Value = serde_json::from_str(&report).expect("JSON");
        assert_eq!((&report["completed"], &report["model"]), (&12.into(), &"tiny".into()), "{report}");
        assert_eq!(report["goodput"]["good"], 12);
        let output_tokens = report["output_tokens"].as_u64().expect("count");
        assert!(
            (12 * 4..=12 * 8).contains(&output_tokens),
            "ignore_eos gives the length asked for: {report}"
        );
        let mean_prompt = report["prompt_tokens"].as_u64().expect("count") / 12;
        assert!((15..=90).contains(&mean_prompt), "{report}");
    }
    let shared = ["--requests", "8", "--warmup", "0", "--concurrency", "1", "--shared-prefixes", "1"];
    let more = ["--prefix-len", "200", "--input-len", "10", "--output-len", "2", "--rate", "50", "--json"];
    let report = stdout(&[&["bench", "serve", "--url", &url][..], &shared, &more].concat());
    let report: Value = serde_json::from_str(&report).expect("JSON");
    assert!(report["cached_tokens"].as_u64() > Some(7 * 150), "the prefix is found: {report}");
    let exact = ["--requests", "6", "--warmup", "0", "--shared-prefixes", "3", "--prefix-len", "100"];
    let more = ["--input-len", "20", "--output-len", "2", "--token-ids", "300..900", "--json"];
    let report = stdout(&[&["bench", "serve", "--url", &url][..], &exact, &more].concat());
    let report: Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!((&report["completed"], &report["prompt_tokens"]), (&6.into(), &720.into()), "{report}");
    let talk = folio(&["chat", "--url", &url, "--max-tokens", "4"]).output().expect("folio runs");
    assert!(String::from_utf8_lossy(&talk.stderr).contains("Talking to tiny at"));
    served.stop();
}

/// On the first run, with nothing set: a tool is called where it fits, or where it must be, its result is read, and no call is made
/// where none fits.
#[test]
fn the_built_in_model_calls_tools() {
    let served = Served::start(&[]);
    let tool = |name: &str, about: &str, key: &str| {
        json!({"type": "function", "function": {"name": name, "description": about,
            "parameters": {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}}})
    };
    let tools = [
        tool("get_time", "Get the current time in a city", "city"),
        tool("calculate", "Calculate an expression", "expression"),
        tool("lookup", "Look up a topic", "query"),
    ];
    let ask = |messages: &Value, choice: Value| {
        let body = json!({"messages": messages, "tools": tools, "tool_choice": choice, "temperature": 0, "max_tokens": 100});
        let answer = served.post("/v1/chat/completions", &body);
        answer["choices"][0]["message"].clone()
    };
    let user = |text: &str| json!([{"role": "user", "content": text}]);
    let call = |message: &Value| {
        let function = &message["tool_calls"][0]["function"];
        let arguments = function["arguments"].as_str().unwrap_or_else(|| panic!("no call: {message}"));
        (function["name"].clone(), serde_json::from_str::<Value>(arguments).expect("JSON"))
    };
    for (text, name, arguments) in [
        ("What time is it in Oslo?", "get_time", json!({"city": "Oslo"})),
        ("What is 384 * 27?", "calculate", json!({"expression": "384 * 27"})),
        ("Look up Mount Fuji.", "lookup", json!({"query": "Mount Fuji"})),
    ] {
        assert_eq!(call(&ask(&user(text), json!("auto"))), (name.into(), arguments), "{text}");
    }
    let forced = json!({"type": "function", "function": {"name": "lookup"}});
    let (name, arguments) = call(&ask(&user("Hello!"), forced));
    assert_eq!(name, "lookup");
    assert!(arguments["query"].is_string(), "{arguments}");
    let (name, _) = call(&ask(&user("Tell me the time in Lima."), json!("required")));
    assert_eq!(name, "get_time");

    let asked = ask(&user("What is 384 * 27?"), json!("auto"));
    let result = json!({"role": "tool", "tool_call_id": asked["tool_calls"][0]["id"], "content": "10368"});
    let question = json!({"role": "user", "content": "What is 384 * 27?"});
    let told = ask(&json!([question, asked, result]), json!("auto"));
    assert!(told["content"].as_str().is_some_and(|text| text.contains("10368")), "{told}");
    let hello = ask(&user("Hello!"), json!("auto"));
    assert!(hello["tool_calls"].is_null() && hello["content"].is_string(), "{hello}");
    served.stop();
}

#[test]
fn keys_are_required_where_given() {
    let served = Served::start(&["--api-key", "secret"]);
    assert!(served.get("/v1/models", "").starts_with("HTTP/1.1 401"));
    assert!(served.get("/v1/models", "authorization: Bearer secret\r\n").starts_with("HTTP/1.1 200"));
    let url = format!("http://{}", served.address);
    let without = refusal(&["bench", "serve", "--url", &url, "--requests", "1"]);
    assert!(without.contains("401"), "{without}");
    served.stop();
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

#[test]
fn what_only_a_gpu_honours_is_refused_without_one() {
    let error = refusal(&["run", "demo", "Once", "--device", "cpu", "--enforce-eager"]);
    assert!(error.contains("--enforce-eager is for a GPU"), "{error}");
    let error = refusal(&["run", "demo", "Once", "--device", "cpu", "--gemm-backend", "cublaslt"]);
    assert!(error.contains("--gemm-backend cublaslt is for a GPU"), "{error}");
}
