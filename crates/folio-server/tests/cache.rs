//! Retention over HTTP: `cache` in requests, `/v1/cache/prefixes`, `prompt_cache_key`; with the real engine and cache, only
//! the arithmetic is modelled.

mod common;

use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use common::{Client, Reply, app, facts, reply};
use folio_engine::{
    Clock, EngineHandle, EventFeed, LoadOrder, Report, ReportSink, SchedulerConfig, Tier, TierStats,
    TransferOrder,
};
use folio_kv::BlockHashes;
use folio_server::ServerConfig;
use serde_json::{Value, json};

/// Of 16 tokens. A quarter may be pinned: 256 tokens.
const BLOCKS: u32 = 64;

fn engine() -> EngineHandle {
    let config = SchedulerConfig {
        max_model_len: 256,
        max_num_seqs: 8,
        max_num_batched_tokens: 256,
        ..Default::default()
    };
    common::modelled(config, BLOCKS, 1)
}

fn client() -> Client {
    Client::new(Arc::new(engine()))
}

/// A tier that says to have what it is told to have of any prompt, and brings it, or not, at once.
struct Shelf {
    name: &'static str,
    has: Mutex<Option<Range<u32>>>,
    brings: Mutex<bool>,
    /// Blocks that it was asked for.
    loaded: Mutex<Vec<u32>>,
    reports: OnceLock<ReportSink>,
}

impl Shelf {
    fn new(name: &'static str) -> Arc<Self> {
        let (has, loaded, reports) = Default::default();
        Arc::new(Self { name, has, brings: Mutex::new(true), loaded, reports })
    }

    fn has(&self, blocks: Range<u32>) {
        *self.has.lock().unwrap() = Some(blocks);
    }

    fn loaded(&self) -> Vec<u32> {
        std::mem::take(&mut *self.loaded.lock().unwrap())
    }
}

impl Tier for Shelf {
    fn start(&self, reports: ReportSink, _: Arc<dyn Clock>, _: Option<&Arc<EventFeed>>) {
        assert!(self.reports.set(reports).is_ok());
    }

    fn find(&self, _: &BlockHashes, most: u32) -> Vec<Range<u32>> {
        let has = self.has.lock().unwrap().clone();
        has.map(|has| has.start..has.end.min(most)).filter(|has| !has.is_empty()).into_iter().collect()
    }

    fn order(&self, order: TransferOrder) -> bool {
        let TransferOrder::Load(LoadOrder { tier, ticket, contents, .. }) = order else { return false };
        self.loaded.lock().unwrap().extend(contents.iter().map(|content| content.index));
        let verified = *self.brings.lock().unwrap();
        self.reports.get().unwrap()(Report::Loaded { tier, ticket, verified, bytes: 1, us: 0 });
        true
    }

    fn stats(&self) -> TierStats {
        TierStats { name: self.name, ..TierStats::default() }
    }

    fn close(&self, _: Duration) {}
}

/// Clients of two tenants, the second of which may have 150 tokens a minute, and tiers.
fn with_tiers() -> (Client, Client, Arc<Shelf>, Arc<Shelf>) {
    let (near, far) = (Shelf::new("disk"), Shelf::new("valkey"));
    let config = SchedulerConfig {
        max_model_len: 256,
        max_num_seqs: 8,
        max_num_batched_tokens: 256,
        ..Default::default()
    };
    let engine = common::modelled_with(config, BLOCKS, 1, vec![near.clone(), far.clone()]);
    let file = r#"{"tenants": [{"name": "one", "keys": ["one"]},
        {"name": "two", "keys": ["two"], "limits": {"tokens_per_minute": 150}}]}"#;
    let tenants = folio_server::Declared::parse(file, &|_| None).unwrap();
    let client = Client::with(ServerConfig { tenants, ..ServerConfig::default() }, app(Arc::new(engine)));
    (client.key("one"), client.key("two"), near, far)
}

/// Clients of two tenants.
fn two() -> (Client, Client) {
    let config = ServerConfig { api_keys: vec!["one".into(), "two".into()], ..ServerConfig::default() };
    let client = Client::with(config, app(Arc::new(engine())));
    (client.key("one"), client.key("two"))
}

/// A prompt of so many tokens (bytes) that shares nothing with others.
fn text(which: char, tokens: usize) -> String {
    std::iter::repeat_n(which, tokens).collect()
}

async fn complete(client: &Client, prompt: &str, extra: Value) -> Reply {
    let body = json!({"prompt": prompt, "max_tokens": 1, "ignore_eos": true});
    client.post("/v1/completions", &common::merged(body, extra)).await
}

/// Tokens of `prompt` that were cached.
async fn cached(client: &Client, prompt: &str) -> u64 {
    let answer = complete(client, prompt, json!({})).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

async fn make(client: &Client, body: Value) -> Value {
    let answer = client.post("/v1/cache/prefixes", &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    answer.json()
}

async fn delete(client: &Client, id: &str) -> Reply {
    let path = format!("/v1/cache/prefixes/{id}");
    reply(client.send(client.request("DELETE", &path, "")).await).await
}

fn id(prefix: &Value) -> String {
    prefix["id"].as_str().unwrap().to_owned()
}

async fn list(client: &Client) -> Vec<Value> {
    client.get("/v1/cache/prefixes").await.json()["data"].as_array().unwrap().clone()
}

/// Fills the pool with other content, three times over.
async fn press(client: &Client) {
    for which in b'A'..=b'P' {
        complete(client, &text(which.into(), 200), json!({})).await;
    }
}

#[tokio::test]
async fn a_warmed_prefix_is_found_by_the_requests_that_begin_with_it() {
    let client = client();
    let prefix = make(&client, json!({"prompt": text('x', 100), "ttl": "1h", "priority": 70})).await;
    assert_eq!(prefix["usage"]["prompt_tokens"], 100);
    assert_eq!(prefix["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!((&prefix["tokens"], &prefix["cached_tokens"]), (&json!(96), &json!(96)), "whole blocks");
    assert_eq!(
        (&prefix["pinned"], &prefix["priority"], &prefix["ttl"]),
        (&json!(false), &json!(70), &json!(3600))
    );
    assert!((3590..=3600).contains(&prefix["expires_in"].as_u64().unwrap()), "{prefix}");
    assert!(cached(&client, &format!("{}more", text('x', 100))).await >= 96);
    let again = make(&client, json!({"prompt": text('x', 100)})).await;
    assert_eq!(again["id"], prefix["id"], "the same content is the same prefix");
    assert!(again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() >= 96);
    assert_eq!(again["ttl"], Value::Null, "said anew");
    let shown = client.get(&format!("/v1/cache/prefixes/{}", id(&prefix))).await.json();
    assert_eq!((&shown["id"], &shown["tokens"]), (&prefix["id"], &json!(96)));
    assert_eq!(list(&client).await.len(), 1);
    assert_eq!(client.metric("vllm:prompt_tokens_total", &[]).await, 304.0, "counted like any prompt");
}

#[tokio::test]
async fn messages_warm_what_conversations_begin_with() {
    let client = client();
    let system = json!({"role": "system", "content": text('s', 90)});
    let prefix = make(&client, json!({"messages": [system.clone()]})).await;
    // "[system]" + 90 + the end of the turn
    assert_eq!((&prefix["usage"]["prompt_tokens"], &prefix["tokens"]), (&json!(99), &json!(96)));
    let chat =
        client.chat(json!({"messages": [system, {"role": "user", "content": "hi"}], "max_tokens": 1})).await;
    let usage = &chat.json()["usage"];
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 99, "{}", chat.text);
    let ids: Vec<u32> = text('t', 40).bytes().map(u32::from).collect();
    assert_eq!(make(&client, json!({"token_ids": ids})).await["tokens"], 32);
    assert!(cached(&client, &text('t', 41)).await >= 32);
}

#[tokio::test]
async fn a_pinned_prefix_survives_what_evicts_everything_else() {
    let client = client();
    let pinned = make(&client, json!({"prompt": text('x', 64), "pin": true})).await;
    assert_eq!(pinned["pinned"], true);
    make(&client, json!({"prompt": text('y', 64)})).await;
    press(&client).await;
    assert_eq!(cached(&client, &text('y', 65)).await, 0);
    assert_eq!(cached(&client, &text('x', 65)).await, 64);
    let path = format!("/v1/cache/prefixes/{}", id(&pinned));
    let unpinned = client.post(&path, &json!({"pin": false})).await.json();
    assert_eq!((&unpinned["pinned"], &unpinned["cached_tokens"]), (&json!(false), &json!(64)));
    press(&client).await;
    assert_eq!(client.get(&path).await.json()["cached_tokens"], 0, "the record stays, the content may go");
    let refused = client.post(&path, &json!({"pin": true})).await;
    assert_eq!((refused.status.as_u16(), &refused.error()["code"]), (409, &json!("not_cached")));
}

#[tokio::test]
async fn what_tiers_have_of_a_prefix_is_loaded_ahead() {
    let (one, two, near, far) = with_tiers();
    let prefix = make(&one, json!({"prompt": text('x', 100), "ttl": "1h"})).await;
    let path = format!("/v1/cache/prefixes/{}", id(&prefix));
    let load = async |client: &Client| client.post(&path, &json!({"load": true})).await;
    let here = load(&one).await.json();
    assert_eq!(here["found"], json!({"device": 96, "disk": 0, "valkey": 0}));
    assert_eq!(here["usage"]["prompt_tokens"], 0, "nothing is to be done, or charged");
    press(&one).await;
    // No tier has any of it: nothing is computed.
    let nowhere = load(&one).await.json();
    assert_eq!(nowhere["found"], json!({"device": 0, "disk": 0, "valkey": 0}));
    assert_eq!(nowhere["cached_tokens"], 0);
    near.has(0..2);
    far.has(0..6);
    let before = one.metric("vllm:prompt_tokens_total", &[]).await;
    let loaded = load(&one).await;
    assert_eq!(loaded.status, 200, "{}", loaded.text);
    let loaded = loaded.json();
    assert_eq!(loaded["found"], json!({"device": 0, "disk": 32, "valkey": 64}));
    assert_eq!((&loaded["cached_tokens"], &loaded["ttl"]), (&json!(96), &json!(3600)));
    assert_eq!(
        loaded["usage"],
        json!({"prompt_tokens": 97, "prompt_tokens_details": {"cached_tokens": 96}}),
        "the row behind it is computed"
    );
    assert_eq!(one.metric("vllm:prompt_tokens_total", &[]).await - before, 97.0);
    assert_eq!((near.loaded().len(), far.loaded().len()), (2, 4));
    near.has(0..0);
    far.has(0..0);
    assert!(cached(&one, &text('x', 100)).await >= 96);
    for tier in ["tier=\"disk\"", "tier=\"valkey\""] {
        let offers =
            async |decision: &'static str| one.metric("folio:tier_offers_total", &[tier, decision]).await;
        assert_eq!((offers("decision=\"load\"").await, offers("decision=\"compute\"").await), (1.0, 0.0));
        assert_eq!(one.metric("folio:tier_load_latency_seconds", &[tier]).await, 0.0, "it brings it at once");
    }
    assert!(one.metric("folio:prefill_tokens_per_second", &[]).await >= 0.0);
    // Another's id is as missing as ever, and so is what was dropped.
    for (client, body) in [(&two, json!({"load": true})), (&two, json!({"load": true, "pin": true}))] {
        assert_eq!(client.post(&path, &body).await.error()["code"], "prefix_not_found");
    }
    delete(&one, &id(&prefix)).await;
    assert_eq!(load(&one).await.status, 404);
}

#[tokio::test]
async fn what_a_tier_does_not_bring_is_computed_and_pinned_with_the_rest() {
    let (one, _, near, _) = with_tiers();
    let prefix = make(&one, json!({"prompt": text('x', 100)})).await;
    let path = format!("/v1/cache/prefixes/{}", id(&prefix));
    press(&one).await;
    near.has(0..3);
    let part = one.post(&path, &json!({"load": true, "pin": true})).await;
    assert_eq!((part.status.as_u16(), &part.error()["code"]), (409, &json!("not_cached")), "half of it");
    press(&one).await;
    near.has(0..6);
    *near.brings.lock().unwrap() = false;
    let whole = one.post(&path, &json!({"load": true, "pin": true})).await.json();
    assert_eq!((&whole["pinned"], &whole["cached_tokens"]), (&json!(true), &json!(96)));
    assert_eq!(whole["found"]["disk"], 96, "as it said");
    assert_eq!(whole["usage"]["prompt_tokens_details"]["cached_tokens"], 0, "it did not bring it");
}

#[tokio::test]
async fn a_load_is_charged_to_its_tenant_and_needs_its_text() {
    let (one, two, near, _) = with_tiers();
    let prefix = make(&two, json!({"prompt": text('x', 100)})).await;
    let path = format!("/v1/cache/prefixes/{}", id(&prefix));
    press(&one).await;
    near.has(0..6);
    let refused = two.post(&path, &json!({"load": true})).await;
    assert_eq!(refused.status, 429, "of 150 tokens a minute 50 are left: {}", refused.text);
    assert!(near.loaded().is_empty());
    // What a request pinned has a record, and no text.
    near.has(0..0);
    complete(&one, &text('y', 64), json!({"cache": {"pin": true}})).await;
    let path = format!("/v1/cache/prefixes/{}", id(&list(&one).await[0]));
    let unknown = one.post(&path, &json!({"load": true})).await;
    assert_eq!(
        (unknown.status.as_u16(), &unknown.error()["code"]),
        (409, &json!("no_text")),
        "{}",
        unknown.text
    );
}

#[tokio::test]
async fn priorities_order_eviction() {
    let client = client();
    complete(&client, &text('h', 96), json!({"cache": {"priority": 90}})).await;
    complete(&client, &text('d', 96), json!({})).await;
    complete(&client, &text('l', 96), json!({"cache": {"priority": 10}})).await;
    for which in b'A'..=b'C' {
        complete(&client, &text(which.into(), 200), json!({})).await;
    }
    // 18 blocks of the three above, 39 of these: 13 more do not fit.
    complete(&client, &text('D', 200), json!({})).await;
    assert_eq!(cached(&client, &text('l', 97)).await, 0, "used last, and disposable as a whole");
    press(&client).await;
    assert_eq!(cached(&client, &text('d', 97)).await, 0);
    assert_eq!(cached(&client, &text('h', 97)).await, 96);
}

#[tokio::test]
async fn pins_are_limited_and_the_refusal_says_so() {
    let client = client();
    make(&client, json!({"prompt": text('a', 128), "pin": true})).await;
    let second = make(&client, json!({"prompt": text('b', 112), "pin": true})).await;
    let refused = client.post("/v1/cache/prefixes", &json!({"prompt": text('c', 32), "pin": true})).await;
    assert_eq!(refused.status, 400);
    let error = refused.error();
    assert_eq!((&error["code"], &error["param"]), (&json!("pin_limit_exceeded"), &json!("pin")));
    assert!(error["message"].as_str().unwrap().contains("240 of 256 tokens"), "{error}");
    // Requests still run at their full length, and pins in them meet the same limit.
    assert_eq!(complete(&client, &text('z', 255), json!({})).await.status, 200);
    let refused = complete(&client, &text('c', 32), json!({"cache": {"pin": true}})).await;
    assert_eq!((refused.status.as_u16(), &refused.error()["param"]), (400, &json!("cache.pin")));
    let stream = complete(&client, &text('c', 32), json!({"cache": {"pin": true}, "stream": true})).await;
    assert_eq!(stream.events()[0]["error"]["code"], "pin_limit_exceeded", "{}", stream.text);
    assert_eq!(delete(&client, &id(&second)).await.json()["deleted"], true);
    make(&client, json!({"prompt": text('c', 32), "pin": true})).await;
}

/// The room that another's pins leave is small; how much they are is nobody else's business.
#[tokio::test]
async fn a_refused_pin_says_nothing_about_another_tenant_s_pins() {
    let (one, two) = two();
    let refusal = async |pinned: usize| {
        make(&one, json!({"prompt": text('a', pinned), "pin": true})).await;
        let refused = two.post("/v1/cache/prefixes", &json!({"prompt": text('b', 128), "pin": true})).await;
        assert_eq!((refused.status.as_u16(), &refused.error()["code"]), (400, &json!("pin_limit_exceeded")));
        refused.text
    };
    let less = refusal(144).await;
    assert_eq!(less, refusal(224).await, "byte for byte");
    assert!(less.contains("pinning 128 tokens more"), "{less}");
}

#[tokio::test]
async fn a_request_can_pin_its_own_prompt() {
    let client = client();
    let answer = complete(&client, &text('q', 70), json!({"cache": {"pin": true, "priority": 60}})).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let [prefix] = &list(&client).await[..] else { panic!("one prefix") };
    assert_eq!(
        (&prefix["tokens"], &prefix["pinned"], &prefix["priority"]),
        (&json!(64), &json!(true), &json!(60))
    );
    let short = complete(&client, "short", json!({"cache": {"pin": true}})).await;
    assert_eq!((short.status.as_u16(), &short.error()["param"]), (400, &json!("cache.pin")));
    let ranges = json!({"cache": {"ranges": [{"tokens": [0, 17], "pin": true}]}});
    complete(&client, &text('r', 70), ranges).await;
    assert_eq!(list(&client).await[1]["tokens"], 32, "up to the end of the range, in whole blocks");
}

#[tokio::test]
async fn a_pin_ends_with_its_time() {
    let client = client();
    let prefix = make(&client, json!({"prompt": text('x', 64), "pin": true, "ttl": 1})).await;
    assert_eq!((&prefix["pinned"], &prefix["ttl"]), (&json!(true), &json!(1)));
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!(list(&client).await[0]["pinned"], false);
}

#[tokio::test]
async fn another_tenant_s_prefix_is_like_one_that_never_existed() {
    let (one, two) = two();
    let mine = id(&make(&one, json!({"prompt": text('x', 64), "pin": true})).await);
    let theirs = id(&make(&two, json!({"prompt": text('x', 64)})).await);
    assert_ne!(mine, theirs, "the same text has another name");
    assert_eq!(list(&two).await.len(), 1);
    let never = format!("pfx_{}", "0".repeat(32));
    let mut texts = std::collections::BTreeSet::new();
    for unknown in [&mine, &never, &"nonsense".to_owned()] {
        let path = format!("/v1/cache/prefixes/{unknown}");
        let answers = [
            two.get(&path).await,
            two.post(&path, &json!({"pin": false})).await,
            delete(&two, unknown).await,
        ];
        for answer in answers {
            assert_eq!(answer.status, 404);
            assert_eq!(answer.error()["code"], "prefix_not_found");
            texts.insert(answer.text);
        }
    }
    assert_eq!(texts.len(), 1, "byte for byte");
    assert_eq!(list(&one).await[0]["pinned"], true);
    assert_eq!(cached(&two, &text('x', 65)).await, 64, "its own");
    delete(&two, &theirs).await;
    assert_eq!(cached(&one, &text('x', 65)).await, 64, "the other's is not touched");
}

/// Paired: whoever warms a prefix finds it, in requests and when warming again; another finds nothing, warmed or pinned.
#[tokio::test]
async fn what_one_tenant_warms_another_computes() {
    for pin in [false, true] {
        let (one, two) = two();
        let found = async |client: &Client, which: char| {
            let prefix = make(client, json!({"prompt": text(which, 64), "pin": pin})).await;
            prefix["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
        };
        assert_eq!(found(&one, 'x').await, 0);
        assert_eq!(cached(&one, &text('x', 65)).await, 64, "pin {pin}: its own request hits");
        assert!(found(&one, 'x').await >= 48, "pin {pin}: its own warming hits");
        assert_eq!(found(&two, 'x').await, 0, "pin {pin}: another's warming computes");
        make(&one, json!({"prompt": text('y', 64), "pin": pin})).await;
        assert_eq!(cached(&two, &text('y', 65)).await, 0, "pin {pin}: another's request computes");
        assert_eq!(cached(&one, &text('y', 65)).await, 64);
    }
}

#[tokio::test]
async fn what_a_group_s_member_warms_the_others_find_and_nobody_else() {
    let file = r#"{"tenants": [{"name": "acme", "keys": ["k1"]}, {"name": "a", "keys": ["k2"], "group": "lab"},
        {"name": "b", "keys": ["k3"], "group": "lab"}], "groups": [{"name": "lab"}]}"#;
    let tenants = folio_server::Declared::parse(file, &|_| None).unwrap();
    let client = Client::with(ServerConfig { tenants, ..ServerConfig::default() }, app(Arc::new(engine())));
    let [outsider, member, other] = ["k1", "k2", "k3"].map(|key| client.key(key));
    make(&member, json!({"prompt": text('x', 64), "pin": true})).await;
    assert_eq!(cached(&outsider, &text('x', 65)).await, 0, "not of the group");
    assert!(list(&outsider).await.is_empty());
    assert_eq!(cached(&other, &text('x', 65)).await, 64, "of the group");
    let again = make(&other, json!({"prompt": text('x', 64)})).await;
    assert!(again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() >= 48);
    assert_eq!(make(&outsider, json!({"prompt": text('x', 64)})).await["pinned"], false);
}

#[tokio::test]
async fn what_is_dropped_is_gone() {
    let client = client();
    let prefix = make(&client, json!({"prompt": text('x', 64), "pin": true})).await;
    assert!(cached(&client, &text('x', 90)).await >= 64);
    let dropped = delete(&client, &id(&prefix)).await.json();
    assert!(dropped["dropped_tokens"].as_u64().unwrap() >= 80, "with what continued it: {dropped}");
    assert_eq!(cached(&client, &text('x', 90)).await, 0);
    assert_eq!(delete(&client, &id(&prefix)).await.status, 404);
    assert!(list(&client).await.is_empty());
}

#[tokio::test]
async fn hits_are_accounted_by_prompt_cache_key() {
    let (one, two) = two();
    for key in ["chat", "chat", "batch"] {
        complete(&one, &text('k', 64), json!({"prompt_cache_key": key})).await;
    }
    complete(&one, &text('k', 64), json!({})).await;
    let keys = one.get("/v1/cache/keys").await.json();
    let figures = |index: usize| {
        let key = &keys["data"][index];
        (
            key["key"].as_str().unwrap(),
            key["requests"].as_u64().unwrap(),
            key["prompt_tokens"].as_u64().unwrap(),
        )
    };
    assert_eq!((figures(0), figures(1)), (("batch", 1, 64), ("chat", 2, 128)));
    assert_eq!(keys["data"][0]["cached_tokens"], 63, "a key shares everything with others");
    assert_eq!(keys["data"][1]["cached_tokens"], 63);
    assert_eq!(two.get("/v1/cache/keys").await.json()["data"], json!([]));
}

#[tokio::test]
async fn bad_input_is_refused_by_name() {
    let client = client();
    let long = text('x', facts().context_length as usize + 1);
    for (body, param) in [
        (json!({}), "messages"),
        (json!({"prompt": "x", "token_ids": [1]}), "token_ids"),
        (json!({"prompt": ""}), "prompt"),
        (json!({"prompt": "x"}), "prompt"),
        (json!({"prompt": long}), "prompt"),
        (json!({"prompt": 5}), "prompt"),
        (json!({"token_ids": []}), "token_ids"),
        (json!({"token_ids": [999]}), "token_ids"),
        (json!({"messages": "x"}), "messages"),
        (json!({"prompt": text('x', 64), "priority": 101}), "priority"),
        (json!({"prompt": text('x', 64), "ttl": "soon"}), "ttl"),
        (json!({"prompt": text('x', 64), "pin": 1}), "pin"),
        (json!({"prompt": text('x', 64), "stream": true}), "stream"),
        (json!({"prompt": text('x', 64), "colour": 1}), "colour"),
    ] {
        let answer = client.post("/v1/cache/prefixes", &body).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.error()["param"]),
            (400, &json!(param)),
            "{}",
            answer.text
        );
    }
    let model = client.post("/v1/cache/prefixes", &json!({"model": "other", "prompt": "x"})).await;
    assert_eq!(model.status, 404);
    let prefix = make(&client, json!({"prompt": text('x', 64)})).await;
    let path = format!("/v1/cache/prefixes/{}", id(&prefix));
    for (body, param) in [
        (json!({"pin": 1}), "pin"),
        (json!({"priority": -1}), "priority"),
        (json!({"x": 1}), "x"),
        (json!({"load": 1}), "load"),
        (json!({"load": "true"}), "load"),
        (json!({"load": [true]}), "load"),
    ] {
        let answer = client.post(&path, &body).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.error()["param"]),
            (400, &json!(param)),
            "{}",
            answer.text
        );
    }
    let ranges = json!({"cache": {"ranges": [{"tokens": [0, 65]}]}});
    let answer = complete(&client, &text('x', 64), ranges).await;
    assert_eq!((answer.status.as_u16(), &answer.error()["param"]), (400, &json!("cache.ranges[0].tokens")));
    let both = json!({"cache": {"pin": true}, "prompt_cache_retention": "24h"});
    let answer = complete(&client, &text('x', 64), both).await;
    assert_eq!((answer.status.as_u16(), &answer.error()["param"]), (400, &json!("prompt_cache_retention")));
    assert_eq!(complete(&client, &text('x', 64), json!({"prompt_cache_retention": "24h"})).await.status, 200);
}
