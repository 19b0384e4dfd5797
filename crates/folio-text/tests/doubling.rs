//! Tokenizers and templates cost in proportion to what they are given: work is counted, and what is made room for, at a size and at twice
//! that. What servers do with them is `folio-server/tests/doubling.rs`.

mod common;
#[path = "../../folio-server/tests/common/room.rs"]
mod room;
#[path = "common/spm.rs"]
mod spm;
#[path = "common/tiktoken.rs"]
#[allow(dead_code)] // The other parts read real vocabularies.
mod tiktoken;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use folio_model::checkpoint::gguf::{Metadata, read_header};
use folio_model::testing::gguf::Writer;
use folio_text::{AnswerFormats, BesideModel, ChatInput, ChatTemplate, TemplateSources, Tokenizer, work};
use serde_json::{Map, Value, json};

#[global_allocator]
static ALLOCATOR: room::Counting = room::Counting;

/// Twice the input, and no more than so much of the work.
const MOST: f64 = 2.3;

fn counted(run: impl Fn()) -> [f64; 2] {
    let before = [work::done(), room::made()];
    run();
    [work::done() - before[0], room::made() - before[1]].map(|count| count as f64)
}

fn doubles(what: &str, size: usize, run: impl Fn(usize)) {
    grows(what, MOST, size, run);
}

fn grows(what: &str, most: f64, size: usize, run: impl Fn(usize)) {
    run(size / 2);
    let (single, double) = (counted(|| run(size)), counted(|| run(2 * size)));
    for (kind, (single, double)) in ["steps", "bytes"].iter().zip(single.into_iter().zip(double)) {
        assert!(
            double < 4096.0 || double <= most * single,
            "{what}: {single} {kind} at {size} and {double} at twice that"
        );
    }
}

/// Byte-level BPE: all bytes, and words of up to 64 of them that are merged from their halves.
fn merged_bytes() -> Tokenizer {
    let mut ranks: tiktoken::Ranks = (0..=255u8).map(|byte| (vec![byte], u32::from(byte))).collect();
    for word in ["a", "ab", "the", " "] {
        for times in [2, 4, 8, 16, 32, 64] {
            let next = ranks.len() as u32;
            ranks.entry(word.repeat(times).into_bytes()).or_insert(next);
        }
        let next = ranks.len() as u32;
        ranks.entry(word.as_bytes().to_vec()).or_insert(next);
    }
    let json = tiktoken::tokenizer_json(&ranks, tiktoken::LLAMA3, false, &[("<|end|>", ranks.len() as u32)]);
    Tokenizer::from_bytes(json.to_string().as_bytes(), None).expect("loads")
}

/// Sentencepiece's, by our own code: the same words, bytes for what is none.
fn scored_pieces() -> Tokenizer {
    let bytes: Vec<String> = (0..=255u8).map(|byte| format!("<0x{byte:02X}>")).collect();
    let mut words: Vec<String> =
        ["<unk>", "<s>", "</s>", "▁", "a", "b", "t", "h", "e", "ab", "th", "the"].map(str::to_owned).into();
    for word in ["▁", "a", "ab", "the"] {
        words.extend([2, 4, 8, 16, 32, 64].map(|times| word.repeat(times)));
    }
    let kinds: Vec<i32> =
        (0..words.len()).map(|at| [2, 3, 3].get(at).copied().unwrap_or(1)).chain([6; 256]).collect();
    let tokens: Vec<&str> = words.iter().chain(&bytes).map(String::as_str).collect();
    let scores: Vec<f32> = (0..tokens.len()).map(|at| -(at as f32)).collect();
    let writer = Writer::new("llama")
        .text("tokenizer.ggml.model", "llama")
        .texts("tokenizer.ggml.tokens", &tokens)
        .f32s("tokenizer.ggml.scores", &scores)
        .i32s("tokenizer.ggml.token_type", &kinds)
        .u32("tokenizer.ggml.unknown_token_id", 0)
        .finish();
    let header = read_header(&writer).expect("sound");
    Tokenizer::from_gguf(Metadata::new("made", &writer, &header)).expect("supported")
}

/// Rules that write more than they are for, that write nothing, and one that texts of "a" are looked up for to its last byte.
fn charsmap() -> Vec<u8> {
    let nearly = format!("{}x", "a".repeat(63));
    spm::charsmap(&[(&nearly, "ab"), ("é", "e e "), ("x", ""), ("<|end|>", "a"), ("\n", " ")])
}

/// A tokenizer.model that writes texts by these rules and leaves out extra spaces.
fn normalized_pieces(model_type: i64) -> Tokenizer {
    let words = [("<unk>", spm::UNKNOWN)]
        .into_iter()
        .chain(["▁", "a", "b", "aa", "ab", "▁a", "e"].map(|word| (word, spm::NORMAL)));
    let pieces = words.flat_map(|(word, kind)| spm::piece(word.as_bytes(), -1.0, kind));
    let normalizer = [spm::bytes(2, &charsmap()), spm::number(4, 1)].concat();
    let model: Vec<u8> = pieces.chain(spm::specs(&spm::number(3, model_type), &normalizer)).collect();
    Tokenizer::from_sentencepiece(&model, BesideModel::default()).expect("supported")
}

/// The same rules in a tokenizer.json.
fn precompiled() -> Tokenizer {
    let vocab = [("<unk>", 0.0), ("a", -1.0), ("b", -1.0), ("ab", -1.0), ("e", -1.0), (" ", -1.0)];
    let file = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": BASE64.encode(charsmap())},
        "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": false, "vocab": vocab}});
    Tokenizer::from_bytes(file.to_string().as_bytes(), None).expect("loads")
}

#[test]
fn merging_costs_in_proportion() {
    let mut all = common::made_tokenizers();
    all.extend([("merged", merged_bytes()), ("scored", scored_pieces())]);
    all.extend([("normalized", normalized_pieces(2)), ("normalized unigram", normalized_pieces(1))]);
    all.push(("precompiled", precompiled()));
    for (name, tokenizer) in &all {
        for text in ["a", "ab", "the", "the ", " ", "x", "é", "ab\n", "<|end|>", "<s>", "aab"] {
            doubles(&format!("{name} {text:?}"), 20_000, |n| {
                tokenizer.encode(&text.repeat(n), true, usize::MAX).expect("encodes");
            });
        }
    }
    let ids = |tokenizer: &Tokenizer| tokenizer.encode(&"a".repeat(256), false, usize::MAX).expect("encodes");
    assert!(ids(&all[2].1).len() == 4 && ids(&all[3].1).len() <= 8, "they are merged");
}

/// Words are tokenized as they are found, so that long texts give way between them: nothing is made of the whole text but its ids.
#[test]
fn the_words_of_a_text_are_not_listed() {
    let mut ranks: tiktoken::Ranks = (0..=255u8).map(|byte| (vec![byte], u32::from(byte))).collect();
    ranks.extend((1..=6).map(|times| (vec![b'a'; 1 << times], 255 + times)));
    let json = tiktoken::tokenizer_json(&ranks, r"\S+|\s+", false, &[]);
    let tokenizer = Tokenizer::from_bytes(json.to_string().as_bytes(), None).expect("loads");
    let text = format!("{} ", "a".repeat(200)).repeat(1000);
    let encode = || drop(tokenizer.encode(&text, false, usize::MAX).expect("encodes"));
    encode();
    let bytes = counted(encode)[1] / text.len() as f64;
    assert!(bytes < 16.0, "{bytes} bytes for each of the text");
}

/// What merging does is counted as it is done: what is merged costs more than what is not.
#[test]
fn merges_are_work() {
    let pieces = scored_pieces();
    let steps = |text: &str| counted(|| drop(pieces.encode(text, false, usize::MAX).expect("encodes")))[0];
    let (merged, plain) = (steps(&"a".repeat(10_000)), steps(&"x".repeat(10_000)));
    println!("{merged} steps where much is merged, {plain} where nothing is");
    assert!(merged > 1.5 * plain && plain > 30_000.0, "{merged} and {plain}");
}

fn compiled(source: &str, tokenizer: &Tokenizer) -> ChatTemplate {
    let mut sources = TemplateSources::default();
    sources.add("default", source, "test");
    ChatTemplate::compile(sources, tokenizer.special_tokens()).expect("compiles").expect("one")
}

fn rendered(template: &ChatTemplate, messages: &[Value], tools: &[Value]) -> bool {
    let input = ChatInput {
        messages,
        tools: (!tools.is_empty()).then_some(tools),
        documents: None,
        add_generation_prompt: true,
        kwargs: &Map::new(),
        now_unix_s: 1_721_952_000,
        formats: AnswerFormats::default(),
    };
    template.render(&input).is_ok()
}

fn turns(n: usize) -> Vec<Value> {
    let turn =
        [json!({"role": "user", "content": "hello"}), json!({"role": "assistant", "content": "world"})];
    let mut messages: Vec<Value> = turn.into_iter().cycle().take(2 * n).collect();
    messages.push(json!({"role": "user", "content": "last"}));
    messages
}

fn calls(n: usize) -> Vec<Value> {
    let call = |at: usize| json!({"id": format!("call{at:05}"), "type": "function", "function": {"name": "f0", "arguments": {"a": "b"}}});
    let turn = |at: usize| {
        [
            json!({"role": "user", "content": "hello"}),
            json!({"role": "assistant", "content": "", "tool_calls": [call(at)]}),
            json!({"role": "tool", "tool_call_id": format!("call{at:05}"), "name": "f0", "content": "c"}),
            json!({"role": "assistant", "content": "world"}),
        ]
    };
    let mut messages: Vec<Value> = (0..n).flat_map(turn).collect();
    messages.push(json!({"role": "user", "content": "last"}));
    messages
}

fn tools(n: usize) -> Vec<Value> {
    let tool = |at: usize| {
        let parameters = json!({"type": "object", "required": ["a"], "properties": {"a": {"type": "string", "description": "d"}}});
        json!({"type": "function", "function": {"name": format!("f{at}"), "description": "d", "parameters": parameters}})
    };
    (0..n).map(tool).collect()
}

/// One that every test has; the others are there with the test data.
const MADE: &str = "{% for t in tools or [] %}<tool>{{ t | tojson }}</tool>{% endfor %}{% set ns = namespace(last=0) %}\
    {% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}\
    {% for m in messages %}<|im_start|>{{ m.role }}{{ m.content | trim }}{% for c in m.tool_calls or [] %}\
    <call>{{ c.function | tojson }}</call>{% endfor %}{% if loop.index0 > ns.last %}!{% endif %}<|im_end|>{% endfor %}";

#[test]
fn templates_cost_in_proportion() {
    const SIZE: usize = 40;
    let folders = ["templates-llamacpp", "templates-minja-contexts"].map(common::data);
    let files = folders.into_iter().flatten().flat_map(|folder| std::fs::read_dir(folder).expect("folder"));
    let mut sources: Vec<(String, String)> = files
        .map(|file| file.expect("entry").path())
        .filter(|path| path.extension().is_some_and(|end| end == "jinja"))
        .map(|path| (path.display().to_string(), std::fs::read_to_string(&path).expect("a template")))
        .collect();
    sources.sort();
    let least = if sources.is_empty() { 3 } else { 30 };
    sources.push(("made".into(), MADE.into()));
    let tokenizer = merged_bytes();
    let mut rendered_in_all = 0;
    for (name, source) in &sources {
        let template = compiled(source, &tokenizer);
        type Given = fn(usize) -> (Vec<Value>, Vec<Value>);
        let kinds: [(&str, Given); 3] = [
            ("turns", |n| (turns(n), Vec::new())),
            ("tools", |n| (turns(1), tools(n))),
            ("calls", |n| (calls(n), tools(1))),
        ];
        for (kind, given) in kinds {
            let render = |n: usize| {
                let (messages, tools) = given(n);
                rendered(&template, &messages, &tools)
            };
            // Not each takes such a conversation.
            if !render(2 * SIZE) {
                continue;
            }
            rendered_in_all += 1;
            // It looks for what follows each call; what that may take is bounded by the steps of a rendering.
            let searches = name.contains("gpt-oss") && kind == "calls";
            let most = if searches { 2.0 * MOST } else { MOST };
            grows(&format!("{name} {kind}"), most, SIZE, |n| assert!(render(n)));
        }
    }
    assert!(rendered_in_all >= least, "{rendered_in_all}");
}
