//! What requests of Ollama's API come to, and how their answers are written. Nothing here opens a socket.

mod common;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use common::merged;
use folio_api::conversation::Conversation;
use folio_api::events::{
    Delta, Finish, Finished, Framing, Scored, StreamSink, Times, TokenLogprobs, Usage, Writer,
};
use folio_api::hints::{Api, HINTS};
use folio_api::ollama::{self, LineWriter, OllamaRequest, PromptSource};
use folio_api::openai::writer::CompletionKind;
use folio_api::params::Generation;
use folio_api::{ApiError, Context};
use folio_text::{OutputEvent, Syntax, Tokenizer};
use serde_json::{Value, json};

fn context() -> Context {
    common::context("{% if enable_thinking is defined and not enable_thinking %}-{% endif %}", Some("think"))
}

/// Three words.
fn tokenizer() -> Arc<Tokenizer> {
    let model = json!({"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2}, "unk_token": "a"});
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null, "added_tokens": [],
        "pre_tokenizer": null, "decoder": null, "model": model,
    });
    Arc::new(Tokenizer::from_bytes(file.to_string().as_bytes(), None).expect("a tokenizer"))
}

fn chat(body: Value) -> Result<OllamaRequest, ApiError> {
    ollama::chat(body.to_string().as_bytes(), &context())
}

fn generate(body: Value) -> Result<OllamaRequest, ApiError> {
    ollama::generate(body.to_string().as_bytes(), &context())
}

fn conversation(request: OllamaRequest) -> Conversation {
    match request.prompt {
        PromptSource::Conversation(conversation) => *conversation,
        other => panic!("{other:?}"),
    }
}

fn with_options(options: Value) -> Result<Generation, ApiError> {
    chat(json!({"messages": [{"role": "user", "content": "Hi"}], "options": options}))
        .map(|read| read.generation)
}

#[test]
fn a_chat_is_the_conversation_it_says() {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let tool =
        json!({"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}});
    let call = |city: &str| json!({"function": {"name": "f", "arguments": {"city": city}}});
    let read = chat(json!({
        "model": "m:latest", "tools": [tool], "keep_alive": "5m", "format": "", "think": true,
        "messages": [
            {"role": "System", "content": "s"}, {"role": "user", "content": "u", "images": []},
            {"role": "assistant", "content": "", "thinking": "t", "tool_calls": [call("a"), call("b")]},
            {"role": "tool", "tool_name": "f", "content": "1"}, {"role": "tool", "content": "2"},
        ],
    }))
    .unwrap();
    assert!(read.generation.stream.is_some(), "a stream unless told otherwise");
    let said = conversation(read);
    let call = |id: &str, city: &str| {
        let function = json!({"name": "f", "arguments": format!("{{\"city\":\"{city}\"}}")});
        json!({"id": id, "type": "function", "function": function})
    };
    let result =
        |id: &str, text: &str| json!({"role": "tool", "content": text, "tool_call_id": id, "name": "f"});
    let expected = json!([
        {"role": "system", "content": "s"}, {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "reasoning_content": "t", "tool_calls": [call("call_0", "a"), call("call_1", "b")]},
        result("call_0", "1"), result("call_1", "2"),
    ]);
    assert_eq!(Value::from(said.messages), expected);
    assert_eq!(said.tools.shown().unwrap(), [tool]);
    assert_eq!(said.kwargs["enable_thinking"], true);
    assert!(said.add_generation_prompt && !said.continue_final);
    // A message of the assistant's at the end is the beginning of the answer.
    let begun = json!([{"role": "user", "content": "u"}, {"role": "assistant", "content": "Well"}]);
    assert!(conversation(chat(json!({"messages": begun})).unwrap()).continue_final);
}

#[test]
fn results_are_of_the_calls_they_name_or_of_the_next() {
    let call = |id: Option<&str>, name: &str| json!({"id": id, "function": {"name": name, "arguments": {}}});
    let calls = [call(Some("x"), "f"), call(None, "g"), call(None, "f"), call(None, "g")];
    let of = |messages: Vec<Value>| {
        let made = json!({"role": "assistant", "tool_calls": calls});
        let all: Vec<Value> = std::iter::once(made).chain(messages).collect();
        let read = conversation(chat(json!({"messages": all})).unwrap()).messages;
        let ids = read.iter().skip(1).map(|message| message["tool_call_id"].as_str().unwrap().to_owned());
        ids.collect::<Vec<_>>()
    };
    let result = |more: Value| merged(json!({"role": "tool", "content": "1"}), more);
    assert_eq!(
        of(vec![
            result(json!({"tool_name": "g"})),
            result(json!({"tool_call_id": "x"})),
            result(json!({})),
            result(json!({"tool_name": "g"})),
            result(json!({"tool_name": "h"})),
        ]),
        ["call_1", "x", "call_2", "call_3", "call_4"]
    );
}

#[test]
fn a_generation_is_a_text_or_a_conversation() {
    let read = generate(json!({"prompt": "p", "system": "s", "think": false, "stream": false})).unwrap();
    assert!(read.generation.stream.is_none() && !read.include_reasoning);
    let said = conversation(read);
    let expected = json!([{"role": "system", "content": "s"}, {"role": "user", "content": "p"}]);
    assert_eq!(Value::from(said.messages), expected);
    assert_eq!(said.kwargs["enable_thinking"], false);
    let raw = generate(
        json!({"prompt": "p", "raw": true, "images": [], "suffix": "", "template": "", "context": []}),
    )
    .unwrap();
    assert!(matches!(raw.prompt, PromptSource::Text(text) if text == "p"));
    for nothing in [json!({}), json!({"prompt": "", "keep_alive": 0}), json!({"system": "s"})] {
        assert!(matches!(generate(nothing).unwrap().prompt, PromptSource::Nothing));
    }
    assert!(matches!(chat(json!({"messages": []})).unwrap().prompt, PromptSource::Nothing));
    // A model without a template goes on with the text.
    let base = Context { capabilities: Default::default(), ..context() };
    let read = ollama::generate(br#"{"prompt": "p"}"#, &base).unwrap();
    assert!(matches!(read.prompt, PromptSource::Text(_)));
}

#[test]
fn options_are_honoured() {
    let read = with_options(json!({
        "temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "seed": 7, "repeat_penalty": 1.5, "presence_penalty": 0.25,
        "frequency_penalty": -1, "num_predict": 9, "stop": ["a", "b"], "draft_num_predict": 4, "repeat_last_n": -1,
    }))
    .unwrap();
    let sampling = &read.sampling;
    assert_eq!((sampling.temperature, sampling.top_p, sampling.min_p), (0.5, 0.9, 0.1));
    assert_eq!((sampling.top_k, sampling.seed), (20, 7));
    assert_eq!(
        (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty),
        (1.5, 0.25, -1.0)
    );
    assert_eq!(
        (read.max_tokens, read.stop, read.speculation.most),
        (Some(9), vec!["a".into(), "b".into()], Some(4))
    );
    for none in [json!({}), json!({"num_predict": -1}), json!({"num_predict": -2}), json!({"num_predict": 0})]
    {
        assert_eq!(with_options(none).unwrap().max_tokens, None);
    }
    let drawn = || with_options(json!({"seed": -1})).unwrap().sampling.seed;
    assert_ne!(drawn(), drawn(), "-1 is any seed");
    let off =
        json!({"repeat_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": 1, "repeat_last_n": 0});
    let off = with_options(off).unwrap().sampling;
    assert_eq!((off.repetition_penalty, off.presence_penalty, off.frequency_penalty), (1.0, 0.0, 0.0));
    with_options(
        json!({"mirostat": 0, "mirostat_eta": 0.1, "tfs_z": 1, "typical_p": 1.0, "penalize_newline": true}),
    )
    .unwrap();
    with_options(json!({"repeat_last_n": 64})).expect("without penalties there is no window");
}

/// All that the SDKs' types list.
const SDK_OPTIONS: &[&str] = &[
    "numa",
    "num_ctx",
    "num_batch",
    "num_gpu",
    "main_gpu",
    "low_vram",
    "f16_kv",
    "logits_all",
    "vocab_only",
    "use_mmap",
    "use_mlock",
    "embedding_only",
    "num_thread",
    "num_keep",
    "seed",
    "num_predict",
    "top_k",
    "top_p",
    "min_p",
    "tfs_z",
    "typical_p",
    "repeat_last_n",
    "temperature",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "penalize_newline",
    "stop",
    "draft_num_predict",
];

#[test]
fn every_option_is_read() {
    let hints: BTreeSet<&str> = HINTS
        .iter()
        .filter(|hint| hint.api == Api::Ollama)
        .filter_map(|hint| hint.path.strip_prefix("options."))
        .collect();
    for name in SDK_OPTIONS {
        let error = with_options(json!({*name: {"no": [1]}})).unwrap_err();
        assert_eq!(error.param, Some(format!("options.{name}")), "{name}: {error:?}");
        assert_ne!(error.code, Some("unrecognized_parameter"), "{name}");
        if hints.contains(name) {
            let fits = |value: Value| with_options(json!({*name: value})).is_ok();
            assert!(fits(json!(1)) || fits(json!(true)), "{name} is a hint");
        }
    }
    assert!(hints.iter().all(|hint| SDK_OPTIONS.contains(hint)), "no hint without a client");
}

#[test]
fn what_cannot_be_honoured_is_refused_by_its_path() {
    let message = |more: Value| json!({"messages": [merged(json!({"role": "user", "content": "Hi"}), more)]});
    let begin = message(json!({}));
    for (more, param) in [
        (json!({"options": {"mirostat": 2}}), "options.mirostat"),
        (json!({"options": {"tfs_z": 0.5}}), "options.tfs_z"),
        (json!({"options": {"typical_p": 0.5}}), "options.typical_p"),
        (json!({"options": {"penalize_newline": false}}), "options.penalize_newline"),
        (json!({"options": {"vocab_only": true}}), "options.vocab_only"),
        (json!({"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}), "options.repeat_last_n"),
        (json!({"options": {"num_predict": -3}}), "options.num_predict"),
        (json!({"options": {"temperature": 9}}), "options.temperature"),
        (json!({"options": {"stop": [""]}}), "options.stop"),
        (json!({"options": {"temprature": 1}}), "options.temprature"),
        (json!({"options": {"mood": 1}}), "options.mood"),
        (json!({"options": 1}), "options"),
        (json!({"format": "yaml"}), "format"),
        (json!({"think": "much"}), "think"),
        (json!({"think": 3}), "think"),
        (json!({"keep_alive": "forever"}), "keep_alive"),
        (json!({"shift": true}), "shift"),
        (json!({"top_logprobs": 3}), "top_logprobs"),
        (json!({"stream": "yes"}), "stream"),
        (json!({"max_tokens": 3}), "max_tokens"),
        (message(json!({"images": ["aGk="]})), "messages[0].images"),
        (message(json!({"role": "nobody"})), "messages[0].role"),
        (message(json!({"tool_calls": [{}]})), "messages[0].tool_calls"),
        (
            message(
                json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}),
            ),
            "messages[0].tool_calls[0].function.arguments",
        ),
    ] {
        let error = chat(merged(begin.clone(), more.clone())).expect_err(&more.to_string());
        assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{more}");
    }
    for (more, param) in [
        (json!({"images": ["aGk="]}), "images"),
        (json!({"context": [1]}), "context"),
        (json!({"suffix": "end"}), "suffix"),
        (json!({"template": "{{ .Prompt }}"}), "template"),
        (json!({"truncate": true}), "truncate"),
        (json!({"raw": true, "system": "s"}), "system"),
        (json!({"raw": true, "think": "low"}), "think"),
        (json!({"messages": []}), "messages"),
    ] {
        let error = generate(merged(json!({"prompt": "p"}), more.clone())).expect_err(&more.to_string());
        assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{more}");
    }
    let error = chat(merged(begin, json!({"model": "other:latest"}))).unwrap_err();
    assert_eq!((error.status, error.code), (404, Some("model_not_found")));
}

#[test]
fn a_format_is_a_schema() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    for (format, held) in
        [(json!("json"), Some(json!({"type": "object"}))), (schema.clone(), Some(schema)), (json!(""), None)]
    {
        let read = chat(json!({"messages": [{"role": "user", "content": "Hi"}], "format": format})).unwrap();
        let schema = read.generation.constraint.map(|constraint| match constraint.syntax {
            Syntax::Json { schema, .. } => schema,
            other => panic!("{other:?}"),
        });
        assert_eq!(schema, held);
    }
}

#[derive(Default)]
struct Lines(RefCell<Vec<Value>>);

impl StreamSink for Lines {
    fn send(&self, json: &str) {
        assert!(!json.contains('\n'));
        self.0.borrow_mut().push(serde_json::from_str(json).unwrap());
    }
    fn named(&self, name: &str, _: &str) {
        panic!("a line has no name: {name}");
    }
}

fn writer(kind: CompletionKind, more: Value) -> LineWriter {
    let body = merged(json!({"messages": [{"role": "user", "content": "Hi"}]}), more);
    LineWriter::new(kind, "m", tokenizer(), &chat(body).unwrap().generation)
}

fn usage() -> Usage {
    let times = Times {
        total: Duration::from_millis(50),
        prompt: Duration::from_millis(20),
        answer: Duration::from_millis(30),
    };
    Usage { prompt_tokens: 5, completion_tokens: 7, times, ..Usage::default() }
}

/// Both ways of writing an answer of these deltas: lines, and the whole.
fn written(
    mut make: impl FnMut() -> LineWriter,
    deltas: Vec<Delta>,
    reason: &'static str,
) -> (Vec<Value>, Value) {
    let (mut streamed, lines) = (make(), Lines::default());
    assert_eq!(
        (streamed.framing(), streamed.keep_alive()),
        (Framing::Lines, " "),
        "no line, and no error before one"
    );
    let mut whole = Delta::default();
    let finish = Finish::new(reason, None);
    let last = deltas.len() - 1;
    for (at, delta) in deltas.into_iter().enumerate() {
        streamed.delta(0, &delta, (at == last).then_some(&finish), Usage::default(), &lines);
        if streamed.owes() > 0 {
            streamed.catch_up(&lines);
            assert_eq!(streamed.owes(), 0);
        }
        whole.append(delta);
    }
    streamed.closing(usage(), &lines);
    let finished = Finished { index: 0, delta: whole, finish, prompt: None };
    (lines.0.take(), serde_json::from_str(&make().whole(&[finished], usage())).unwrap())
}

fn call(index: u32, arguments: &str, ended: bool) -> Vec<OutputEvent> {
    let mut pieces = vec![
        OutputEvent::CallStarted { index, id: format!("call_{index}"), name: "f".into() },
        OutputEvent::Arguments { index, text: arguments.into() },
    ];
    pieces.extend(ended.then_some(OutputEvent::CallEnded { index }));
    pieces
}

#[test]
fn an_answer_is_lines_and_the_last_has_the_figures() {
    let delta = |pieces: Vec<OutputEvent>| Delta { pieces, ..Delta::default() };
    let deltas = vec![
        delta(vec![OutputEvent::Reasoning("hm".into())]),
        delta(vec![OutputEvent::Content("Hel".into())]),
        delta(vec![OutputEvent::Content("lo".into())]),
        delta(call(0, "{\"a\": [1]}", true)),
        delta(call(1, "{\"a\": ", false)),
    ];
    let (lines, whole) = written(|| writer(CompletionKind::Chat, json!({})), deltas, "tool_calls");
    let said = |line: &Value| line["message"].clone();
    let made = |id: u32, arguments: Value| json!({"id": format!("call_{id}"), "function": {"index": id, "name": "f", "arguments": arguments}});
    let (first, second) = (made(0, json!({"a": [1]})), made(1, json!({"INVALID_JSON": "{\"a\": "})));
    assert_eq!(
        lines.iter().map(said).collect::<Vec<_>>(),
        [
            json!({"role": "assistant", "content": "", "thinking": "hm"}),
            json!({"role": "assistant", "content": "Hel"}),
            json!({"role": "assistant", "content": "lo"}),
            json!({"role": "assistant", "content": "", "tool_calls": [first]}),
            json!({"role": "assistant", "content": "", "tool_calls": [second]}),
            json!({"role": "assistant", "content": ""}),
        ]
    );
    assert!(lines.iter().rev().skip(1).all(|line| line["done"] == false && line.get("eval_count").is_none()));
    let end = lines.last().unwrap();
    let figures = json!({
        "done": true, "done_reason": "stop", "total_duration": 50_000_000, "load_duration": 0, "prompt_eval_count": 5,
        "prompt_eval_duration": 20_000_000, "eval_count": 7, "eval_duration": 30_000_000,
    });
    for (name, value) in figures.as_object().unwrap() {
        assert_eq!((&end[name], &whole[name]), (value, value), "{name}");
    }
    assert_eq!(
        whole["message"],
        json!({"role": "assistant", "content": "Hello", "thinking": "hm", "tool_calls": [first, second]})
    );
    assert!(whole["created_at"].as_str().is_some_and(|at| at.ends_with('Z') && at.len() == 20), "{whole}");
    assert_eq!(whole["model"], "m");
}

#[test]
fn a_generation_has_its_text_beside_it() {
    let scored = Scored {
        id: 1,
        logprobs: TokenLogprobs { logprob: -0.5, rank: 1, top: vec![(1, -0.5), (2, -2.0)] },
        offset: 0,
    };
    let delta = Delta {
        pieces: vec![OutputEvent::Reasoning("hm".into()), OutputEvent::Content("a".into())],
        scored: vec![scored],
        ..Delta::default()
    };
    let make = || writer(CompletionKind::Completion, json!({"logprobs": true, "top_logprobs": 1}));
    let (lines, whole) = written(make, vec![delta], "length");
    assert_eq!((&lines[0]["response"], &lines[0]["thinking"]), (&json!("a"), &json!("hm")));
    assert_eq!((&lines[1]["response"], &lines[1]["done_reason"]), (&json!(""), &json!("length")));
    assert_eq!((&whole["response"], &whole["thinking"]), (&json!("a"), &json!("hm")));
    assert!(whole.get("message").is_none() && lines[1].get("logprobs").is_none());
    for told in [&lines[0]["logprobs"], &whole["logprobs"]] {
        assert_eq!(
            (told[0]["logprob"].as_f64(), told[0]["top_logprobs"].as_array().unwrap().len()),
            (Some(-0.5), 1)
        );
    }
}

#[test]
fn who_asks_for_nothing_is_told_that_the_model_is_loaded() {
    let lines = Lines::default();
    writer(CompletionKind::Chat, json!({})).closing(usage(), &lines);
    let whole: Value =
        serde_json::from_str(&writer(CompletionKind::Chat, json!({})).whole(&[], usage())).unwrap();
    assert_eq!(Value::from(lines.0.take()), json!([whole]));
    assert_eq!((&whole["done"], &whole["done_reason"]), (&json!(true), &json!("load")));
    assert!(whole.get("eval_count").is_none());
    let lines = Lines::default();
    writer(CompletionKind::Chat, json!({})).failed(&ApiError::deadline(), &lines);
    assert_eq!(lines.0.take()[0]["code"], "deadline_exceeded");
}
