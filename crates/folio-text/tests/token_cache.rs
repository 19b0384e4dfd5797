//! Tokenizing with a cache gives the ids of the whole text, for every kind of tokenizer, and tokenizes what is new.

mod common;
#[path = "common/spm.rs"]
mod spm;
#[path = "common/tiktoken.rs"]
#[allow(dead_code)] // The other parts read real vocabularies.
mod tiktoken;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, LazyLock, Mutex};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use folio_text::{
    AnswerFormats, ChatInput, ChatTemplate, Prompt, SegmentKey, TemplateSources, TokenCache, Tokenizer,
};
use proptest::prelude::*;
use serde_json::{Value, json};

const NO_LIMIT: usize = usize::MAX;

/// Keeps everything, and counts.
#[derive(Default)]
struct Kept {
    segments: Mutex<HashMap<SegmentKey, Arc<[u32]>>>,
    tokenized: Mutex<usize>,
}

impl TokenCache for Kept {
    fn find(&self, key: &SegmentKey) -> Option<Arc<[u32]>> {
        self.segments.lock().expect("no panic").get(key).cloned()
    }

    fn keep(&self, key: SegmentKey, ids: &[u32]) {
        *self.tokenized.lock().expect("no panic") += ids.len();
        let before = self.segments.lock().expect("no panic").insert(key, ids.into());
        assert!(before.is_none(), "it had been found");
    }
}

impl Kept {
    fn encode(&self, tokenizer: &Tokenizer, prompt: &Prompt) -> Vec<u32> {
        let ids = tokenizer.encode_with(prompt.text(), Some(prompt.breaks()), false, NO_LIMIT, Some(self));
        ids.expect("encodes")
    }

    fn tokenized(&self) -> usize {
        std::mem::take(&mut self.tokenized.lock().expect("no panic"))
    }
}

/// A tokenizer and the library's own view of its file.
struct Pair {
    what: String,
    ours: Tokenizer,
    library: tokenizers::Tokenizer,
}

/// Added tokens with everything that they can ask for; the last two are found in normalized text.
fn added(first: u32) -> Value {
    let list = [
        ("<|im_start|>", false, false, false, false),
        ("<|im_end|>", false, false, false, false),
        ("<l>", true, false, false, false),
        ("<r>", false, true, false, false),
        ("word", false, false, true, false),
        ("<N>", false, false, false, true),
        ("norm", true, true, true, true),
    ];
    let list = list.into_iter().zip(first..).map(|((content, left, right, single, normalized), id)| {
        json!({"id": id, "content": content, "single_word": single, "lstrip": left, "rstrip": right,
               "normalized": normalized, "special": !normalized})
    });
    list.collect::<Vec<_>>().into()
}

fn pair(what: &str, mut file: Value) -> Pair {
    let vocab = file["model"]["vocab"].as_object().expect("a vocabulary").len() as u32;
    file["added_tokens"] = added(vocab);
    let bytes = file.to_string();
    let ours =
        Tokenizer::from_bytes(bytes.as_bytes(), None).unwrap_or_else(|error| panic!("{what}: {error}"));
    Pair { what: what.to_owned(), ours, library: tokenizers::Tokenizer::from_bytes(&bytes).expect("loads") }
}

/// Every normalizer, pre-tokenizer, model and post-processor that looks at more than a word.
fn kinds() -> Vec<Pair> {
    let mut ranks: tiktoken::Ranks = (0..=255u8).map(|b| (vec![b], u32::from(b))).collect();
    for (merged, id) in [&b"ab"[..], b" a", b"  ", b"\n\n", b"12", b"us", b"'s"].into_iter().zip(256..) {
        ranks.insert(merged.to_vec(), id);
    }
    let bytes = |pattern| tiktoken::tokenizer_json(&ranks, pattern, false, &[]);
    let with = |mut file: Value, changes: &[(&str, Value)]| {
        changes.iter().for_each(|(key, value)| file[*key] = value.clone());
        file
    };
    let mut all = vec![
        pair("gpt2", bytes(tiktoken::GPT2)),
        pair("llama3", bytes(tiktoken::LLAMA3)),
        pair("qwen2", with(bytes(tiktoken::QWEN2), &[("normalizer", json!({"type": "NFC"}))])),
    ];
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let cut = |pattern: &str, behavior: &str, invert: bool| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert});
    for (what, first) in [
        ("cut twice", cut("[0-9]", "Isolated", false)),
        ("what is between is dropped", cut("[0-9 ]", "Removed", false)),
        ("cut around", cut("[a-z]+", "Isolated", true)),
    ] {
        let cuts = [first, cut(tiktoken::LLAMA3, "Isolated", false), byte_level.clone()];
        let pre = json!({"type": "Sequence", "pretokenizers": cuts});
        all.push(pair(what, with(bytes(tiktoken::LLAMA3), &[("pre_tokenizer", pre)])));
    }
    let template = json!({"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "ab", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                   {"SpecialToken": {"id": "us", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"ab": {"id": "ab", "ids": [256, 257], "tokens": ["ab", " a"]},
                           "us": {"id": "us", "ids": [261], "tokens": ["us"]}}});
    let lower = json!({"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]});
    let prefixed =
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    all.push(pair(
        "a space before each part, lower case, tokens around",
        with(
            bytes(tiktoken::GPT2),
            &[("normalizer", lower), ("pre_tokenizer", prefixed), ("post_processor", template)],
        ),
    ));
    let mut vocab: serde_json::Map<String, Value> =
        (0..256).map(|byte| (format!("<0x{byte:02X}>"), json!(byte))).collect();
    for (token, id) in ["▁", "a", "b", "▁a", "▁▁", "ab", "us", "u", "s", "<unk>"].iter().zip(256..) {
        vocab.insert(token.to_string(), json!(id));
    }
    let sentencepiece = json!({"version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true, "vocab": vocab,
                  "merges": [["▁", "a"], ["▁", "▁"], ["a", "b"], ["u", "s"]]}});
    let prepend = json!({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]});
    all.push(pair("sentencepiece, prepended", with(sentencepiece.clone(), &[("normalizer", prepend)])));
    for scheme in ["first", "always", "never"] {
        for split in [false, true] {
            let pre =
                json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split});
            let file = with(sentencepiece.clone(), &[("pre_tokenizer", pre)]);
            all.push(pair(&format!("metaspace {scheme} {split}"), file));
        }
    }
    let strip = json!({"type": "Strip", "strip_left": true, "strip_right": true});
    all.push(pair("stripped", with(sentencepiece.clone(), &[("normalizer", strip)])));
    let map = spm::charsmap(&[("a", "b"), ("ab", "a"), (" ", "  ")]);
    let map = json!({"type": "Precompiled", "precompiled_charsmap": BASE64.encode(map)});
    all.push(pair("written by rules", with(sentencepiece.clone(), &[("normalizer", map)])));
    for pre in [
        json!({"type": "Digits", "individual_digits": false}),
        json!({"type": "UnicodeScripts"}),
        json!({"type": "FixedLength", "length": 5}),
        json!({"type": "Punctuation", "behavior": "Contiguous"}),
        json!({"type": "Split", "pattern": {"Regex": "a+"}, "behavior": "MergedWithPrevious", "invert": true}),
    ] {
        let what = pre["type"].to_string();
        all.push(pair(&what, with(sentencepiece.clone(), &[("pre_tokenizer", pre)])));
    }
    let words = ["[UNK]", "[CLS]", "[SEP]", "a", "##a", "ab", "##b", "user", "1", "##2", "!"];
    let words: serde_json::Map<String, Value> =
        words.iter().zip(0..).map(|(word, id)| (word.to_string(), json!(id))).collect();
    all.push(pair(
        "pieces of words",
        json!({"version": "1.0", "truncation": null, "padding": null,
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                       "strip_accents": null, "lowercase": true},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1]},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": words}}),
    ));
    all
}

static KINDS: LazyLock<Vec<Pair>> = LazyLock::new(kinds);
static REAL: LazyLock<Vec<(&str, Tokenizer)>> = LazyLock::new(common::real_tokenizers);

/// Texts with markers of every tokenizer, long enough to be cut.
fn texts() -> impl Strategy<Value = Vec<String>> {
    let marker = prop::sample::select(vec![
        "<|im_start|>",
        "<|im_end|>",
        "<l>",
        "<r>",
        "word",
        "<N>",
        "norm",
        "</s>",
        "<s>",
        "<|eot_id|>",
        "<|endoftext|>",
        "<|end|>",
        "<|user|>",
        "<jupyter_code>",
    ]);
    let between = prop::sample::select(vec!["", " ", "\n", "  ", "\n\n", "a", "_"]);
    let filling = ("[a-cA-CuUsS12 \n'!é中ﬁ\u{301}<|>▁]{0,12}", prop::sample::select(vec![1usize, 3, 120]));
    let filling = filling.prop_map(|(text, times)| text.repeat(times));
    let part = (marker, between.clone(), filling, between)
        .prop_map(|(marker, after, filling, before)| format!("{marker}{after}{filling}{before}"));
    prop::collection::vec(part, 1..8)
}

/// All of `parts` so far, turn by turn, each time with an end that goes on differently.
fn turns(parts: &[String]) -> impl Iterator<Item = String> {
    (1..=parts.len()).map(|count| parts[..count].concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// The library's own ids, whatever of the text is kept.
    #[test]
    fn every_kind_gives_the_librarys_ids(parts in texts(), special in any::<bool>()) {
        for Pair { what, ours, library } in KINDS.iter() {
            let kept = Kept::default();
            for text in turns(&parts).chain(turns(&parts)) {
                let expected = library.encode_fast(text.as_str(), special).expect("encodes");
                let cold = ours.encode(&text, special, NO_LIMIT).expect("encodes");
                prop_assert_eq!(&cold[..], expected.get_ids(), "{}: {:?}", what, text);
                let ids = ours.encode_with(&text, None, special, NO_LIMIT, Some(&kept)).expect("encodes");
                prop_assert_eq!(&ids[..], expected.get_ids(), "{} with a cache: {:?}", what, text);
            }
        }
    }

    /// Real vocabularies, with and without special tokens around: the ids are those without a cache.
    #[test]
    fn real_tokenizers_give_the_same_ids(parts in texts()) {
        for (name, tokenizer) in REAL.iter() {
            let kept = Kept::default();
            for text in turns(&parts) {
                for special in [false, true] {
                    let expected = tokenizer.encode(&text, special, NO_LIMIT).expect("encodes");
                    let ids = tokenizer.encode_with(&text, None, special, NO_LIMIT, Some(&kept));
                    prop_assert_eq!(ids.expect("encodes"), expected, "{}: {:?}", name, text);
                }
            }
        }
    }
}

/// Conversations that grow through each real template, with markers in what clients wrote: the ids are those of the whole prompt.
#[test]
fn real_templates_grow_to_the_same_ids() {
    let (Some(goldens), Some(templates)) =
        (common::data("goldens-chat-templates"), common::data("templates-llamacpp"))
    else {
        return;
    };
    let contexts = std::fs::read(goldens.join("contexts.json")).expect("contexts");
    let contexts: BTreeMap<String, Value> = serde_json::from_slice(&contexts).expect("JSON");
    let mut compared = 0;
    for (name, tokenizer) in
        REAL.iter().filter(|(name, _)| ["qwen2", "llama-bpe", "phi-3", "llama2"].contains(name))
    {
        let marker = &tokenizer.special_tokens().added[0].0;
        let filling = format!(" and so on, {marker} it went;").repeat(20);
        let kept = Kept::default();
        for path in
            std::fs::read_dir(&templates).expect("templates").map(|entry| entry.expect("entry").path())
        {
            if path.extension().is_none_or(|end| end != "jinja") {
                continue;
            }
            let mut sources = TemplateSources::default();
            sources.add("default", &std::fs::read_to_string(&path).expect("template"), "test");
            let template =
                ChatTemplate::compile(sources, tokenizer.special_tokens()).expect("compiles").expect("one");
            for context in contexts.values() {
                let mut messages = context["messages"].as_array().expect("messages").clone();
                for message in &mut messages {
                    if let Some(content) = message["content"].as_str() {
                        message["content"] = format!("{content}{filling}").into();
                    }
                }
                for count in 1..=messages.len() {
                    let prompt = template.render(&ChatInput {
                        messages: &messages[..count],
                        tools: context["tools"].as_array().map(Vec::as_slice),
                        documents: None,
                        add_generation_prompt: true,
                        kwargs: &serde_json::Map::new(),
                        now_unix_s: 1_721_952_000,
                        formats: AnswerFormats::default(),
                    });
                    let Ok(prompt) = prompt else { continue };
                    let whole = tokenizer.encode_prompt(&prompt, false, NO_LIMIT).expect("encodes");
                    assert_eq!(kept.encode(tokenizer, &prompt), whole, "{name} {}", path.display());
                    compared += 1;
                }
            }
        }
    }
    println!("{compared} prompts");
    assert!(compared > 1000);
}

/// A turn tokenizes itself and the end of what was there, however long the conversation is.
#[test]
fn a_turn_tokenizes_what_is_new() {
    let Some((_, tokenizer)) = REAL.iter().find(|(name, _)| *name == "qwen2") else { return };
    let source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                  {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let mut sources = TemplateSources::default();
    sources.add("default", source, "test");
    let template =
        ChatTemplate::compile(sources, tokenizer.special_tokens()).expect("compiles").expect("one");
    let kept = Kept::default();
    let mut messages = vec![json!({"role": "system", "content": "Be brief. ".repeat(2000)})];
    for turn in 0..40 {
        let role = if turn % 2 == 0 { "user" } else { "assistant" };
        let content = format!("turn {turn}: <|im_end|> is text. ").repeat(30);
        messages.push(json!({"role": role, "content": content}));
        let prompt = template.render(&ChatInput {
            messages: &messages,
            tools: None,
            documents: None,
            add_generation_prompt: true,
            kwargs: &serde_json::Map::new(),
            now_unix_s: 0,
            formats: AnswerFormats::default(),
        });
        let prompt = prompt.expect("renders");
        let before = folio_text::work::done();
        let ids = kept.encode(tokenizer, &prompt);
        let steps = folio_text::work::done() - before;
        let (tokenized, own) = (kept.tokenized(), content.len());
        if turn > 0 {
            // In bytes of text: this turn and at most two segments before it.
            assert!(tokenized <= own + 2 * 1024, "{tokenized} tokens were made of a turn of {own} bytes");
            let length = prompt.text().len();
            let most = 2 * length + 16 * (own + 3 * 1024);
            assert!(steps <= most as u64, "{steps} steps for a turn of {own} bytes in {length}");
        }
        assert_eq!(ids, tokenizer.encode_prompt(&prompt, false, NO_LIMIT).expect("encodes"));
        assert_eq!(kept.encode(tokenizer, &prompt), ids);
        assert_eq!(kept.tokenized(), 0, "all of it is kept");
    }
}

#[test]
fn a_post_processor_that_drops_the_text_is_refused() {
    let ranks: tiktoken::Ranks = (0..=255u8).map(|b| (vec![b], u32::from(b))).collect();
    let mut file = tiktoken::tokenizer_json(&ranks, tiktoken::GPT2, false, &[]);
    file["post_processor"] = json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "a", "type_id": 0}}],
        "pair": [{"SpecialToken": {"id": "a", "type_id": 0}}],
        "special_tokens": {"a": {"id": "a", "ids": [97], "tokens": ["a"]}}});
    let error = Tokenizer::from_bytes(file.to_string().as_bytes(), None).expect_err("refused").to_string();
    assert!(error.contains("post-processor"), "{error}");
}
