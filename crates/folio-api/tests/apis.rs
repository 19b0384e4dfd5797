//! What requests of the three APIs come to, and how one answer is written for each. Nothing here opens a socket.

mod common;

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use common::merged;
use folio_api::conversation::ConversationRequest;
use folio_api::events::{Delta, Finish, Finished, PromptReport, StreamSink, Times, Usage, Writer};
use folio_api::hints::HintPolicy;
use folio_api::openapi::tables::{self, Body};
use folio_api::responses::History;
use folio_api::speculation::SpeculationOptions;
use folio_api::tools::ToolChoice;
use folio_api::{ApiError, Context};
use folio_api::{anthropic, openai, responses};
use folio_text::OutputEvent;
use serde_json::{Map, Value, json};

fn context() -> Context {
    common::context("", None)
}

/// Nothing was answered before but `resp_1`.
struct Past;

impl History for Past {
    fn messages(&self, response: &str) -> Result<Option<Arc<[Value]>>, ApiError> {
        let said =
            [json!({"role": "user", "content": "earlier"}), json!({"role": "assistant", "content": "yes"})];
        Ok((response == "resp_1").then(|| said.into()))
    }
    fn item(&self, _: &str, _: &str) -> Result<Option<Value>, ApiError> {
        Ok(None)
    }
    fn unseal(&self, sealed: &str, _: &str) -> Result<String, ApiError> {
        Ok(format!("unsealed {sealed}"))
    }
}

fn chat(body: Value) -> Result<ConversationRequest, ApiError> {
    openai::chat::read(body.to_string().as_bytes(), &context())
}

fn response(body: Value) -> Result<responses::ResponsesRequest, ApiError> {
    responses::ResponsesRequest::read(body.to_string().as_bytes(), &context(), &Past, "resp_2")
}

fn message(mut body: Value) -> Result<ConversationRequest, ApiError> {
    body["max_tokens"] = json!(10);
    anthropic::MessagesRequest::read(body.to_string().as_bytes(), &context()).map(|read| read.request)
}

/// The request's beginning in each API's spelling, and how to read it.
type Spelling = (Value, fn(Value) -> Result<ConversationRequest, ApiError>);

fn spellings() -> [Spelling; 3] {
    [
        (json!({"messages": [{"role": "user", "content": "Hi"}]}), chat),
        (json!({"input": "Hi"}), |body| response(body).map(|read| read.request)),
        (json!({"messages": [{"role": "user", "content": "Hi"}]}), message),
    ]
}

#[test]
fn three_spellings_of_one_request_are_one_request() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let plain = json!({"name": "add", "description": "Adds.", "parameters": schema, "strict": true});
    let tools = [
        json!({"tools": [{"type": "function", "function": plain}],
            "tool_choice": {"type": "function", "function": {"name": "add"}}, "parallel_tool_calls": false}),
        json!({"tools": [merged(json!({"type": "function"}), plain.clone())],
            "tool_choice": {"type": "function", "name": "add"}, "parallel_tool_calls": false}),
        json!({"tools": [{"name": "add", "description": "Adds.", "input_schema": schema, "strict": true}],
            "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": true}}),
    ];
    let read: Vec<ConversationRequest> = spellings()
        .into_iter()
        .zip(tools)
        .map(|((begin, read), tools)| read(merged(begin, tools)).expect("a request"))
        .collect();
    for request in &read {
        let (first, this) = (&read[0].conversation, &request.conversation);
        assert_eq!(this.messages, first.messages);
        assert_eq!(this.tools.shown(), first.tools.shown());
        assert_eq!((&this.tools.choice, this.tools.parallel), (&ToolChoice::Named("add".into()), false));
        let held = this.tools.held().expect("a call that must be made is held");
        assert!(held.callees.iter().all(|(strict, callee)| *strict && callee.schema == Some(schema.clone())));
        assert!(held.param.is_some_and(|param| param.ends_with("strict")));
    }
}

#[test]
fn speculation_is_said_alike_in_each_spelling() {
    let named = |name: &str| Some(name.to_owned());
    for (begin, read) in spellings() {
        let said = |more: Value| read(merged(begin.clone(), more)).map(|read| read.generation.speculation);
        let options = |more: Value| said(more).expect("a request");
        assert_eq!(options(json!({})), SpeculationOptions::default());
        let all = json!({"speculative.n_max": 3, "speculative.type": "ngram",
            "prediction": {"type": "content", "content": "abc"}});
        let expected =
            SpeculationOptions { most: Some(3), drafter: named("ngram"), prediction: named("abc") };
        assert_eq!(options(all), expected);
        assert!(options(json!({"speculative.type": "ngram"})).wants_drafts());
        for off in [
            json!({"speculative.n_max": 0}),
            json!({"speculative.type": "off"}),
            json!({"speculative.type": "none", "speculative.n_max": 4}),
        ] {
            let read = options(off);
            assert_eq!(read, SpeculationOptions { most: Some(0), ..Default::default() });
            assert!(!read.wants_drafts());
        }
        for (more, name, part) in [
            (json!({"speculative.n_max": 17}), "speculative.n_max", "17 is not between 0 and 16"),
            (json!({"speculative.n_max": -1}), "speculative.n_max", "a non-negative integer"),
            (json!({"speculative.n_max": "4"}), "speculative.n_max", "a non-negative integer"),
            (json!({"speculative.n_max": 1.5}), "speculative.n_max", "a non-negative integer"),
            (json!({"speculative.type": 4}), "speculative.type", "a string"),
            (json!({"prediction": {"type": "text"}}), "prediction.type", "content"),
        ] {
            let error = said(more).expect_err("a mistake");
            assert_eq!((error.status, error.param.as_deref()), (400, Some(name)));
            assert!(error.message.contains(part), "{}", error.message);
        }
    }
}

#[test]
fn a_tool_of_chat_completions_stays_as_it_was_written() {
    let function =
        json!({"parameters": {"type": "object"}, "strict": true, "name": "f", "description": null});
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "tools": [{"function": function, "type": "function"}]});
    let shown = chat(body).unwrap().conversation.tools.shown().unwrap()[0].to_string();
    assert_eq!(
        shown,
        r#"{"function":{"parameters":{"type":"object"},"name":"f","description":null},"type":"function"}"#
    );
}

#[test]
fn what_is_wrong_with_tools_is_named_in_each_spelling() {
    let function = |name: &str| json!({"type": "function", "function": {"name": name}});
    let flat = |name: &str| json!({"type": "function", "name": name});
    let own = |name: &str| json!({"name": name, "input_schema": {"type": "object"}});
    let allowed = |tools: Value| json!({"type": "allowed_tools", "mode": "auto", "tools": tools});
    let [chat, responses, messages] = spellings();
    for ((begin, read), more, param) in [
        (&chat, json!({"tools": [function("a"), function("a")]}), "tools[1].function.name"),
        (&chat, json!({"tools": [{"type": "other"}]}), "tools[0].type"),
        (&chat, json!({"tools": [function("a b")]}), "tools[0].function.name"),
        (&chat, json!({"parallel_tool_calls": true}), "parallel_tool_calls"),
        (&chat, json!({"tool_choice": function("a")}), "tool_choice"),
        (&chat, json!({"tools": [function("a")], "tool_choice": function("b")}), "tool_choice.function.name"),
        (
            &chat,
            json!({"tools": [function("a")], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}),
            "tool_choice.allowed_tools.tools",
        ),
        (&responses, json!({"tools": [flat("a"), flat("a")]}), "tools[1].name"),
        (&responses, json!({"tools": [flat("a")], "tool_choice": allowed(json!([]))}), "tool_choice.tools"),
        (
            &responses,
            json!({"tools": [flat("a")], "tool_choice": allowed(json!([flat("a"), flat("a")]))}),
            "tool_choice.tools",
        ),
        (
            &responses,
            json!({"tools": [flat("a")], "tool_choice": allowed(json!([flat("b")]))}),
            "tool_choice.tools[0].name",
        ),
        (&responses, json!({"tool_choice": "required"}), "tool_choice"),
        (&messages, json!({"tools": [own("a"), own("a")]}), "tools[1].name"),
        (&messages, json!({"tools": [{"name": "a", "input_schema": {}}]}), "tools[0].input_schema.type"),
        (
            &messages,
            json!({"tools": [own("a")], "tool_choice": {"type": "tool", "name": "b"}}),
            "tool_choice.name",
        ),
        (&messages, json!({"tools": [own("a")], "tool_choice": {"type": "some"}}), "tool_choice.type"),
        (&messages, json!({"tool_choice": {"type": "any"}}), "tool_choice"),
    ] {
        let error = read(merged(begin.clone(), more.clone())).expect_err("a mistake");
        assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{more}");
    }
}

#[test]
fn functions_of_namespaces_are_flattened_and_remembered() {
    let tools = json!([{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}, {"type": "web_search"}]);
    let choice = json!({"type": "function", "name": "f", "namespace": "n"});
    let read = response(json!({"input": "Hi", "tools": tools, "tool_choice": choice})).unwrap();
    let used = &read.request.conversation.tools;
    assert_eq!(used.choice, ToolChoice::Named("n__f".into()));
    assert_eq!(used.namespaces["n__f"], ("n".to_owned(), "f".to_owned()));
    assert_eq!(read.request.notes.left_out, ["web_search"]);
    // The response repeats what was said, not what became of it.
    assert_eq!((&read.repeated["tools"], &read.repeated["tool_choice"]), (&tools, &choice));
}

#[test]
fn a_response_goes_on_from_an_earlier_one() {
    let read =
        response(json!({"input": "Hi", "previous_response_id": "resp_1", "instructions": "Be brief."}))
            .unwrap();
    let said: Vec<&Value> =
        read.request.conversation.messages.iter().map(|message| &message["content"]).collect();
    assert_eq!(said, ["Be brief.", "earlier", "yes", "Hi"]);
    assert_eq!(read.messages.len(), 3, "instructions are this request's own");
    let error = response(json!({"input": "Hi", "previous_response_id": "resp_9"})).err().unwrap();
    assert_eq!((error.status, error.code), (404, Some("response_not_found")));
}

#[test]
fn no_api_ignores_a_field() {
    for (begin, read) in spellings() {
        for (name, value) in
            [("mood", json!(1)), ("tempreature", json!(1)), ("tools_", json!([])), ("mirostat", json!(2))]
        {
            let error = read(merged(begin.clone(), json!({name: value}))).expect_err(name);
            assert_eq!((error.status, error.param.as_deref()), (400, Some(name)));
        }
    }
}

#[test]
fn every_field_of_the_tables_is_read_or_refused_by_name() {
    type Read = fn(&[u8]) -> Result<(), ApiError>;
    let readers: [(&Body, Read); 6] = [
        (&tables::CHAT, |body| openai::chat::read(body, &context()).map(drop)),
        (&tables::COMPLETION, |body| openai::completions::read(body, &context()).map(drop)),
        (&tables::EMBEDDING, |body| openai::embeddings::read(body, &context(), Ok(())).map(drop)),
        (&tables::RESPONSE, |body| {
            responses::ResponsesRequest::read(body, &context(), &Past, "resp_2").map(drop)
        }),
        (&tables::MESSAGE, |body| anthropic::MessagesRequest::read(body, &context()).map(drop)),
        (&tables::COUNT, |body| anthropic::counted(body, &context()).map(drop)),
    ];
    for (body, read) in readers {
        let mut example: Value = serde_json::from_str(body.example).expect("an example is JSON");
        example["model"] = json!("m");
        read(example.to_string().as_bytes())
            .unwrap_or_else(|error| panic!("{}: {}", body.name, error.message));
        // The variables of a template may be any; all else has a type that this is not.
        for name in body.names().filter(|name| *name != "chat_template_kwargs") {
            let mut wrong = example.clone();
            wrong[name] = json!({"zzz": [1]});
            let error = read(wrong.to_string().as_bytes()).expect_err(name);
            let param = error.param.unwrap_or_default();
            let about =
                param.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']));
            assert!(error.status == 400 && about, "{} {name}: {}", body.name, error.message);
        }
        for (name, why) in body.refusals() {
            let mut wrong = example.clone();
            wrong[name] = json!({"zzz": [1]});
            let error = read(wrong.to_string().as_bytes()).expect_err(name);
            assert_eq!((error.param.as_deref(), error.code), (Some(name), Some("unsupported_parameter")));
            assert!(error.message.contains(why) || name == "suffix", "{name}: {}", error.message);
        }
    }
}

/// Gathers events.
#[derive(Default)]
struct Gathered(RefCell<Vec<Value>>);

impl StreamSink for Gathered {
    fn send(&self, json: &str) {
        self.0.borrow_mut().push(serde_json::from_str(json).unwrap_or_else(|_| json.into()));
    }
    fn named(&self, name: &str, json: &str) {
        let event: Value = serde_json::from_str(json).expect("an event is JSON");
        assert_eq!(event["type"], name);
        self.0.borrow_mut().push(event);
    }
}

const USAGE: Usage = Usage {
    prompt_tokens: 3,
    cached_tokens: 2,
    completion_tokens: 4,
    reasoning_tokens: Some(1),
    predicted: None,
    times: Times { total: Duration::ZERO, prompt: Duration::ZERO, answer: Duration::ZERO },
};

/// One answer in two parts: a thought, text, and a call.
fn parts() -> [Delta; 2] {
    let call = OutputEvent::CallStarted { index: 0, id: "call_1".into(), name: "f".into() };
    let pieces = |pieces: Vec<OutputEvent>| Delta { pieces, ..Delta::default() };
    [
        pieces(vec![OutputEvent::Reasoning("hm".into()), OutputEvent::Content("he".into())]),
        pieces(vec![
            OutputEvent::Content("llo".into()),
            call,
            OutputEvent::Arguments { index: 0, text: "{\"a\":1}".into() },
        ]),
    ]
}

fn streamed(writer: &mut dyn Writer) -> Vec<Value> {
    let events = Gathered::default();
    let report = PromptReport { tokens: Arc::new([1, 2, 3]), logprobs: None };
    let [first, second] = parts();
    writer.opening(0, &report, USAGE, &events);
    writer.delta(0, &first, None, USAGE, &events);
    writer.delta(0, &second, Some(&Finish::new("tool_calls", None)), USAGE, &events);
    writer.closing(USAGE, &events);
    events.0.into_inner()
}

fn whole(writer: &mut dyn Writer) -> Value {
    let [mut delta, second] = parts();
    delta.append(second);
    let finish = Finish::new("tool_calls", None);
    let choice = Finished { index: 0, delta, finish, prompt: None };
    serde_json::from_str(&writer.whole(&[choice], USAGE)).expect("an answer is JSON")
}

#[test]
fn a_stream_of_messages_is_the_whole_message() {
    let writer = || anthropic::MessageWriter::new("1", "m", Vec::new(), false);
    let whole = whole(&mut writer());
    let blocks = whole["content"].as_array().unwrap();
    assert_eq!(blocks[0]["thinking"], "hm");
    assert_eq!(blocks[1]["text"], "hello");
    assert_eq!((&blocks[2]["name"], &blocks[2]["input"]), (&json!("f"), &json!({"a": 1})));
    assert_eq!(whole["stop_reason"], "tool_use");
    let events = streamed(&mut writer());
    let text =
        |kind: &str| -> String { events.iter().filter_map(|event| event["delta"][kind].as_str()).collect() };
    assert_eq!(
        (text("thinking"), text("text"), text("partial_json")),
        ("hm".into(), "hello".into(), "{\"a\":1}".into())
    );
    assert_eq!(events.last().unwrap()["type"], "message_stop");
    assert_eq!(events[events.len() - 2]["usage"], whole["usage"]);
}

#[test]
fn a_stream_of_a_response_ends_with_the_whole_one_which_is_stored() {
    let stored = Arc::new(std::sync::Mutex::new(Vec::new()));
    let writer = |repeated: Map<String, Value>| {
        let stored = stored.clone();
        let keep: responses::Keep =
            Box::new(move |response: Arc<str>, output: Vec<Value>, said: Vec<Value>| {
                let response: Value = serde_json::from_str(&response).unwrap();
                assert_eq!(response["output"], json!(output));
                stored.lock().unwrap().push((response, said));
            });
        let seal: responses::Seal = Box::new(|text| Some(format!("sealed {text}")));
        responses::ResponseWriter::new("resp_2".into(), repeated, Some(keep), Default::default(), Some(seal))
    };
    let repeated = response(json!({"input": "Hi"})).unwrap().repeated;
    let whole = whole(&mut writer(repeated.clone()));
    let events = streamed(&mut writer(repeated));
    let mut last = events.last().unwrap()["response"].clone();
    last["completed_at"] = whole["completed_at"].clone();
    assert_eq!(last, whole);
    assert_eq!(whole["output"][0]["encrypted_content"], "sealed hm");
    let numbers: Vec<u64> = events.iter().filter_map(|event| event["sequence_number"].as_u64()).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
    let stored = stored.lock().unwrap();
    assert_eq!(stored.len(), 2);
    assert_eq!(stored[0].0, whole);
    assert_eq!(stored[0].1[0]["tool_calls"][0]["function"]["arguments"], "{\"a\":1}");
}

#[test]
fn the_crate_knows_neither_http_nor_the_engine() {
    let manifest = include_str!("../Cargo.toml");
    let (_, dependencies) = manifest.split_once("[dependencies]\n").expect("dependencies");
    for line in dependencies.lines().take_while(|line| !line.starts_with('[')).filter(|line| !line.is_empty())
    {
        let name = line.split(['.', ' ', '=']).next().unwrap();
        assert!(
            ["folio-text", "form_urlencoded", "hex", "memchr", "serde", "serde_json", "sha2", "thiserror"]
                .contains(&name),
            "{name}"
        );
    }
}

/// A field that nobody knows is refused with the flag that lets it pass, wherever it stands, and the flag lets it pass.
#[test]
fn flags_for_hints_have_an_effect_wherever_they_are_taken() {
    let said = |content: Value| {
        json!({"max_tokens": 5, "messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "t", "name": "f", "input": {}, "zzz": content["use"],
                "caller": {"type": "direct", "zzz": content["caller"]}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "zzz": content["result"],
                "content": [{"type": "text", "text": "b", "zzz": content["inner"]}]},
            {"type": "text", "text": "c", "zzz": content["text"]}]}]})
    };
    let cleaned = |mut body: Value| {
        fn clean(value: &mut Value) {
            match value {
                Value::Object(map) => {
                    map.retain(|name, value| name != "zzz" || !value.is_null());
                    map.values_mut().for_each(clean);
                }
                Value::Array(list) => list.iter_mut().for_each(clean),
                _ => {}
            }
        }
        clean(&mut body);
        body.to_string()
    };
    let context = || {
        let mut context = context();
        context.capabilities.template.iter_mut().for_each(|template| template.takes_calls = true);
        context
    };
    type Read = fn(&[u8], &Context) -> Option<ApiError>;
    let messages: Read = |body, context| anthropic::MessagesRequest::read(body, context).err();
    let chat: Read = |body, context| openai::chat::read(body, context).err();
    let responses: Read =
        |body, context| responses::ResponsesRequest::read(body, context, &Past, "resp_2").err();
    let embeddings: Read = |body, context| openai::embeddings::read(body, context, Ok(())).err();
    let call = |call: Value, function: Value| {
        json!({"messages": [{"role": "user", "content": "a"},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "t", "type": "function", "zzz": call,
            "function": {"name": "f", "arguments": "{}", "zzz": function}}]},
        {"role": "tool", "tool_call_id": "t", "content": "b"}]})
    };
    for (read, body, path) in [
        (messages, said(json!({"text": 1})), "messages[].content[].zzz"),
        (messages, said(json!({"use": 1})), "messages[].content[].zzz"),
        (messages, said(json!({"caller": 1})), "messages[].content[].caller.zzz"),
        (messages, said(json!({"result": 1})), "messages[].content[].zzz"),
        (messages, said(json!({"inner": 1})), "messages[].content[].content[].zzz"),
        (
            messages,
            json!({"max_tokens": 5, "messages": [{"role": "user", "content": "a"}],
            "metadata": {"zzz": 1}}),
            "metadata.zzz",
        ),
        (chat, call(json!(1), Value::Null), "messages[].tool_calls[].zzz"),
        (chat, call(Value::Null, json!(1)), "messages[].tool_calls[].function.zzz"),
        (
            responses,
            json!({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "zzz": 1}]}]}),
            "input[].content[].zzz",
        ),
        (embeddings, json!({"input": "a", "zzz": 1}), "zzz"),
    ] {
        let body = cleaned(body);
        let refused = read(body.as_bytes(), &context()).expect("nobody knows it");
        assert!(refused.message.contains(&format!("--accept-hint {path}'")), "{path}: {}", refused.message);
        let hints = HintPolicy::new(vec![path.into()], false).expect("a flag that may be given");
        let passed = read(body.as_bytes(), &Context { hints, ..context() });
        assert_eq!(passed.map(|error| error.message), None, "{path}");
    }
}
