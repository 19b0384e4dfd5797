//! Whatever a request asks for, its answer with drafts is the one it has without: one case a parameter, over the real engine, sampler and
//! grammars, with a model whose logits are as good as random.

mod common;

use std::sync::Arc;

use common::{Client, Submitting, VOCAB, app, merged, tokenizer_with, tool_template};
use folio_engine::engine::EngineParts;
use folio_engine::{
    Clock, Drafter, DrafterModel, DraftingExecutor, EngineHandle, EventSink, Executor, Guide, Micros,
    ModelExecutor, Reads, Request, Restricted, Rules, RulesRef, SchedulerConfig, start,
};
use folio_kv::{CacheConfig, GroupConfig, KvCache, default_policy};
use folio_model::backend::Backend;
use folio_server::{App, Engine, ModelFacts, Parsers, ServerConfig};
use folio_sim::{FEATURES, HeadBackend, SimBackend};
use folio_text::{ReasoningFormat, ToolFormat};
use serde_json::{Value, json};

/// Steps take no time, so every draft is worth its row.
struct Stopped;

impl Clock for Stopped {
    fn now(&self) -> Micros {
        Micros(0)
    }
}

const BLOCKS: u32 = 256;
const ROWS: usize = 64;

fn executor(backend: impl Backend + 'static) -> ModelExecutor {
    ModelExecutor::new(Box::new(backend), VOCAB as usize, ROWS, ROWS)
}

fn sim() -> SimBackend {
    SimBackend::new(VOCAB as usize, BLOCKS as usize, 16, ROWS, ROWS)
}

/// Rules that do not say what must come.
struct Unforced(RulesRef);

struct Followed(Arc<dyn Guide>);

impl Rules for Unforced {
    fn guide(&self, chosen: &[u32]) -> Arc<dyn Guide> {
        Arc::new(Followed(self.0.0.guide(chosen)))
    }

    fn name(&self) -> &str {
        self.0.0.name()
    }
}

impl Guide for Followed {
    fn advance(&self, token: u32) {
        self.0.advance(token);
    }

    fn expect(&self, drafts: &[u32]) {
        self.0.expect(drafts);
    }

    fn restrict(&self, drafts: &[u32], logits: &mut [f32]) -> Result<Restricted, String> {
        self.0.restrict(drafts, logits)
    }

    fn is_ready(&self, drafts: &[u32]) -> bool {
        self.0.is_ready(drafts)
    }
}

fn client() -> Client {
    client_of(None)
}

fn client_of(drafter: Option<Drafter>) -> Client {
    client_over(Arc::new(engine_of(drafter)), drafter)
}

/// The same without jump-ahead.
fn without_jumps() -> Client {
    let submit = |engine: &EngineHandle, mut request: Request, sink: Box<dyn EventSink>| {
        let rules = request.sampling.rules.take();
        request.sampling.rules = rules.map(|rules| RulesRef(Arc::new(Unforced(rules))));
        engine.submit(request, sink)
    };
    client_over(Arc::new(Submitting { engine: engine_of(None), submit }), None)
}

/// One with this drafter: a model that is the same, or a head for it.
fn engine_of(drafter: Option<Drafter>) -> EngineHandle {
    let config =
        SchedulerConfig { max_model_len: 1024, max_num_batched_tokens: ROWS as u32, ..Default::default() };
    let geometry = CacheConfig { blocks: BLOCKS, block_tokens: 16, bytes_per_block: 1 };
    let by_model = drafter.filter(|drafter| drafter.is_model());
    let executor: Box<dyn Executor> = match by_model {
        None => Box::new(executor(sim())),
        Some(drafter) => {
            let (reads, own) = match drafter {
                Drafter::Model => (Reads::Tokens, executor(sim())),
                _ => {
                    let head = HeadBackend::new(VOCAB as usize, BLOCKS as usize, 16, ROWS);
                    (Reads::Features { width: FEATURES }, executor(head))
                }
            };
            let as_drafter =
                DrafterModel { group: 1, groups: 1, block_tokens: 16, positions: u32::MAX, reads };
            Box::new(DraftingExecutor::new(executor(sim()).with_groups(1), own, as_drafter, VOCAB))
        }
    };
    let groups = by_model.map(|_| GroupConfig { optional: true, ..geometry.first_group() });
    start(EngineParts {
        config,
        cache: KvCache::with_groups(geometry, groups.as_slice(), default_policy(0.01)),
        executor,
        clock: Arc::new(Stopped),
        vocab: VOCAB,
        tiers: Vec::new(),
        events: None,
    })
    .expect("an engine")
}

fn client_over(engine: Arc<dyn Engine>, drafter: Option<Drafter>) -> Client {
    let app = App {
        model: ModelFacts { context_length: 1024, ..common::facts() },
        parsers: Parsers { tools: ToolFormat::named("hermes"), reasoning: ReasoningFormat::named("think") },
        tokenizer: Arc::new(tokenizer_with(["<|end|>", "<think>", "</think>"])),
        template: Some(Arc::new(tool_template())),
        ..app(engine)
    };
    Client::with(ServerConfig { speculate: drafter, ..ServerConfig::default() }, app)
}

fn tool() -> Value {
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["to", "cents"], "properties": {
        "to": {"enum": ["ann", "bob"]}, "cents": {"type": "integer", "minimum": 1, "maximum": 99},
    }});
    json!({"type": "function", "function": {"name": "pay", "parameters": schema, "strict": true}})
}

/// Nobody thinks unless that is what a case is about.
fn cases() -> Vec<(&'static str, Value)> {
    let abc = json!([97, 98, 99]);
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["name"], "properties": {
        "name": {"type": "string", "maxLength": 12}, "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    }});
    vec![
        ("temperature 0", json!({"temperature": 0})),
        ("penalties", json!({"presence_penalty": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.2})),
        ("min_p", json!({"min_p": 0.1, "top_p": 0.9, "top_k": 40})),
        ("logit_bias", json!({"logit_bias": {"97": 9, "98": 9, "99": 8, "257": -100}})),
        ("bad_words", json!({"allowed_token_ids": abc, "bad_words": ["aa", "bcb"]})),
        ("stop strings", json!({"allowed_token_ids": abc, "stop": ["abcab", "ccc"]})),
        (
            "stop strings that are kept",
            json!({"allowed_token_ids": abc, "stop": ["abca"], "include_stop_str_in_output": true}),
        ),
        ("min_tokens", json!({"min_tokens": 25, "logit_bias": {"256": 12, "257": -100}})),
        ("logprobs", json!({"logprobs": true, "top_logprobs": 3})),
        ("n", json!({"n": 3})),
        (
            "a schema",
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": schema, "strict": true}}}),
        ),
        ("a regular expression", json!({"structured_outputs": {"regex": "(total: [0-9]{2} euros; ){1,3}"}})),
        ("a choice", json!({"structured_outputs": {"choice": ["the first of them", "the second of them"]}})),
        ("a reasoning budget", json!({"thinking_token_budget": 9, "logit_bias": {"257": 100, "258": -100}})),
        ("a tool that must be called", json!({"tools": [tool()], "tool_choice": "required"})),
        ("tools", json!({"tools": [tool()]})),
    ]
}

/// An answer's choices, and how many drafts were right and wrong.
async fn answer(client: &Client, name: &str, ask: Value) -> (Value, (u64, u64)) {
    let reply = client.chat(ask).await;
    assert_eq!(reply.status, 200, "{name}: {}", reply.text);
    let reply = reply.json();
    let figure = |field: &str| reply["usage"]["completion_tokens_details"][field].as_u64().unwrap_or(0);
    let drafts = (figure("accepted_prediction_tokens"), figure("rejected_prediction_tokens"));
    // A call's id is drawn anew.
    let mut choices = reply["choices"].clone();
    for choice in choices.as_array_mut().expect("choices") {
        let calls = choice["message"].get_mut("tool_calls").and_then(Value::as_array_mut);
        calls.into_iter().flatten().for_each(|call| call["id"] = Value::Null);
    }
    (choices, drafts)
}

fn ask(extra: Value) -> Value {
    let base = json!({"temperature": 1, "seed": 7, "max_tokens": 70, "return_token_ids": true, "logit_bias": {"257": -100}});
    merged(base, extra)
}

#[tokio::test]
async fn an_answer_is_the_same_with_drafts_whatever_is_asked_for() {
    for served in [None, Some(Drafter::Model), Some(Drafter::Eagle3), Some(Drafter::Mtp)] {
        same_whatever_is_asked_for(served).await;
    }
}

async fn same_whatever_is_asked_for(served: Option<Drafter>) {
    let client = client_of(served);
    let (mut verified, mut wrong) = (0, 0);
    for (name, extra) in cases() {
        let ask = ask(extra);
        let answer = async |more: Value| answer(&client, name, merged(ask.clone(), more)).await;
        let (plain, drafted) = answer(json!({"speculative.n_max": 0})).await;
        assert_eq!(drafted, (0, 0), "{name}");
        // Then what it said is drafted from, right and, of another seed's, wrong.
        for (seed, same) in [(7, true), (7, true), (8, false), (9, false), (7, true)] {
            let (choices, (right, rejected)) = answer(json!({"speculative.n_max": 16, "seed": seed})).await;
            assert!(!same || choices == plain, "{name}, {served:?}: {choices} without drafts {plain}");
            verified += right;
            wrong += rejected;
        }
    }
    // A model's are of a model that is the same.
    let least = if served.is_none() { 50 } else { 0 };
    assert!(verified > 300 && wrong >= least, "{served:?}: {verified} right, {wrong} wrong");
}

/// Whichever of the server's drafters a request names: one after the other on one server, so that each meets what the others left.
#[tokio::test]
async fn an_answer_is_the_same_with_each_drafter() {
    for served in [None, Some(Drafter::Model), Some(Drafter::Eagle3), Some(Drafter::Mtp)] {
        let client = client_of(served);
        // The few tokens are said again and again, for who looks at its own text alone.
        let cases = [
            ("any", ask(json!({}))),
            ("few tokens", ask(json!({"allowed_token_ids": [97, 98], "logit_bias": {"97": 3}}))),
            ("logprobs", ask(json!({"logprobs": true, "top_logprobs": 3, "n": 2}))),
        ];
        let types = ["suffix", "ngram", served.map_or("suffix", Drafter::name), "off", "none"];
        let mut verified = types.map(|_| (0, 0));
        for (name, ask) in cases {
            let (plain, drafts) =
                answer(&client, name, merged(ask.clone(), json!({"speculative.n_max": 0}))).await;
            assert_eq!(drafts, (0, 0), "{name}");
            for _ in 0..2 {
                for (kind, verified) in types.iter().zip(&mut verified) {
                    let asked = merged(ask.clone(), json!({"speculative.type": kind}));
                    let (choices, (right, wrong)) = answer(&client, name, asked).await;
                    assert_eq!(choices, plain, "{name}, {kind}");
                    *verified = (verified.0 + right, verified.1 + wrong);
                }
            }
        }
        let [suffix, ngram, own, off, none] = verified;
        assert!(suffix.0 > 50 && ngram.0 > 10 && own.0 > 50, "{served:?}: {verified:?}");
        assert_eq!([off, none], [(0, 0); 2], "{served:?}");
        let of = async |drafter: Drafter| {
            let label = format!("drafter=\"{}\"", drafter.name());
            client.metric("vllm:spec_decode_num_accepted_tokens_total", &[&label]).await as u64
        };
        assert_eq!(of(Drafter::Ngram).await, ngram.0, "each is counted by its name");
        if let Some(drafter) = served {
            assert_eq!((of(drafter).await, of(Drafter::Suffix).await), (own.0, suffix.0));
        }
    }
}

/// Whatever a grammar leaves no choice about: the same tokens and log probabilities as where nothing is drafted.
#[tokio::test]
async fn an_answer_is_the_same_without_jump_ahead() {
    let (jumping, plain) = (client(), without_jumps());
    let (mut forced, mut counted) = (0.0, (0, 0));
    for name in ["a schema", "a regular expression", "a choice", "a tool that must be called"] {
        let (_, extra) = cases().into_iter().find(|(case, _)| *case == name).expect("a case");
        // Twice with drafts from text, which then have what was said before.
        for (seed, most) in (0..4).flat_map(|seed| [0, 16, 16].map(|most| (seed, most))) {
            let base = json!({"temperature": 1, "seed": seed, "max_tokens": 70, "return_token_ids": true, "logprobs": true,
                "top_logprobs": 3, "logit_bias": {"257": -100}, "speculative.n_max": most});
            let ask = merged(base, extra.clone());
            let (with, drafts) = answer(&jumping, name, ask.clone()).await;
            let (without, all) = answer(&plain, name, ask).await;
            assert_eq!(with, without, "{name}, seed {seed}");
            assert!(most > 0 || drafts == all, "{name}, seed {seed}: {drafts:?} {all:?}");
            counted.0 += drafts.0 + drafts.1;
            counted.1 += all.0 + all.1;
        }
        let before = forced;
        forced = jumping.metric("folio:grammar_accepted_forced_tokens_total", &[]).await;
        assert!(forced > before + 20.0, "{name}: {before} {forced}");
    }
    assert_eq!(plain.metric("folio:grammar_forced_tokens_total", &[]).await, 0.0);
    // What must come is nobody's draft.
    assert!(0 < counted.0 && counted.0 < counted.1, "{counted:?}");
}

/// What must come anyway is drafted without anybody's asking: fewer steps, the same tokens.
#[tokio::test]
async fn text_that_a_grammar_leaves_no_choice_about_is_verified_several_tokens_at_a_time() {
    let client = client();
    let ask = json!({"temperature": 1, "seed": 3, "max_tokens": 200, "speculative.n_max": 0,
        "structured_outputs": {"regex": "the answer to all of the questions is [0-9]{2}, and nothing else"}});
    let reply = client.chat(ask).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    let text = reply.json()["choices"][0]["message"]["content"].as_str().expect("text").to_owned();
    assert!(
        text.starts_with("the answer to all of the questions is ") && text.ends_with(", and nothing else"),
        "{text}"
    );
    let forced = client.metric("folio:grammar_forced_tokens_total", &[]).await;
    let right = client.metric("folio:grammar_accepted_forced_tokens_total", &[]).await;
    assert!(right > 20.0 && forced >= right, "{right} of {forced}");
    let asked_for = client.metric("vllm:spec_decode_num_draft_tokens_total", &["drafter=\"suffix\""]).await;
    assert_eq!(asked_for, 0.0);
}
