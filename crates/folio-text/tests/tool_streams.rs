//! Recorded streams of real models, and damaged texts: the same at every cutting, nothing lost, no panic.

#[path = "common/answers.rs"]
mod answers;
mod common;

use answers::{Answer, cut, examples, parse, setup};
use folio_text::{ParserSetup, TOOL_FORMATS};
use proptest::prelude::*;
use serde_json::Value;

/// Recorded streams of real models, with what they should parse to.
#[test]
fn recorded_streams_parse_as_expected() {
    let Some(root) = common::data("streams-dynamo/vllm") else { return };
    let mut checked = 0;
    for (folder, tools, reasoning) in [
        ("qwen3-0.6B", "hermes", "think"),
        ("nemotron-49b", "nemotron_json", "think"),
        ("gpt-oss-20b", "harmony", "harmony"),
        ("deepseek-v3", "deepseek_v3", "think"),
        ("deepseek-v3.1", "deepseek_v31", "think"),
        ("deepseek-v4", "deepseek_v32", "think"),
    ] {
        let Ok(files) = std::fs::read_dir(root.join(folder)) else { continue };
        for file in files {
            let path = file.expect("entry").path();
            let record: Value = serde_json::from_slice(&std::fs::read(&path).expect("file")).expect("json");
            recorded(&record, tools, reasoning, &path.display().to_string());
            checked += 1;
        }
    }
    assert!(checked > 0, "no recorded stream in {}", root.display());
    println!("{checked} recorded streams");
}

fn recorded(record: &Value, tools: &str, reasoning: &str, path: &str) {
    let chunks =
        record.get("data").or_else(|| record.get("input_stream")).and_then(Value::as_array).expect("chunks");
    let pieces: Vec<&str> =
        chunks.iter().filter_map(|chunk| chunk.pointer("/data/choices/0/delta/content")?.as_str()).collect();
    let want = record.get("expected_output").unwrap_or(record);
    let setup = setup(tools, reasoning);
    let events = parse(&setup, pieces.iter().copied());
    let text = pieces.concat();
    for size in [1, 2, 7, usize::MAX / 2] {
        assert_eq!(parse(&setup, cut(&text, size)), events, "{path} by {size}");
    }
    let answer = Answer::of(&events);
    assert_eq!(answer.content, want["normal_content"].as_str().unwrap_or(""), "{path}");
    assert_eq!(answer.reasoning, want["reasoning_content"].as_str().unwrap_or(""), "{path}");
    let calls = want["tool_calls"].as_array().cloned().unwrap_or_default();
    assert_eq!(answer.calls.len(), calls.len(), "{path}");
    assert_eq!(answer.ended, calls.len(), "{path}");
    for ((name, arguments), call) in answer.calls.iter().zip(calls) {
        assert_eq!(*name, call["function"]["name"], "{path}");
        let value = |text: &str| serde_json::from_str::<Value>(text).expect("arguments are JSON");
        assert_eq!(value(arguments), value(call["function"]["arguments"].as_str().expect("text")), "{path}");
    }
}

/// Recorded texts of models that were given no tools: whatever the format, they are content.
#[test]
fn recorded_texts_stay_text() {
    let Some(root) = common::data("streams-dynamo/replays/meta/llama-3.1-8b-instruct/chat_completions")
    else {
        return;
    };
    let stream = std::fs::read_to_string(root.join("chat-completion.streaming.3")).expect("stream");
    let chunks =
        stream.lines().filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok());
    let pieces: Vec<String> = chunks
        .filter_map(|chunk| Some(chunk.pointer("/choices/0/delta/content")?.as_str()?.to_owned()))
        .collect();
    assert!(pieces.len() > 50, "{} pieces", pieces.len());
    for format in TOOL_FORMATS {
        let answer = Answer::of(&parse(&setup(format.name, "think"), pieces.iter().map(String::as_str)));
        assert_eq!((answer.content, answer.calls.len()), (pieces.concat(), 0), "{}", format.name);
    }
}

/// Texts made of a family's own markers, JSON and words.
fn damaged() -> impl Strategy<Value = (usize, String)> {
    (0..TOOL_FORMATS.len()).prop_flat_map(|index| {
        let (_, one, two) =
            examples().into_iter().find(|(name, ..)| *name == TOOL_FORMATS[index].name).expect("example");
        let mut parts: Vec<String> = TOOL_FORMATS[index].markers().map(str::to_owned).collect();
        parts.extend(
            ["<think>", "</think>", "{", "}", "\"", "[", "(", ")", "]", "\n", " ", "é", ",", "now"]
                .map(String::from),
        );
        parts.extend(
            ["\"name\": \"now\"", "\"arguments\": {\"a\": 1}", "{\"name\": \"", "a='b'", "city"]
                .map(String::from),
        );
        parts.extend([one.clone(), two.clone()]);
        let mixture = prop::collection::vec(prop::sample::select(parts.clone()), 0..14)
            .prop_map(|parts| parts.concat());
        // An example with a part put in or some characters taken out.
        let broken = (
            prop::sample::select(vec![one, two]),
            any::<prop::sample::Index>(),
            0..6_usize,
            prop::sample::select(parts),
        )
            .prop_map(|(text, at, drop, part)| {
                let chars: Vec<char> = text.chars().collect();
                let at = at.index(chars.len() + 1);
                let end = (at + drop).min(chars.len());
                chars[..at].iter().copied().chain(part.chars()).chain(chars[end..].iter().copied()).collect()
            });
        (Just(index), prop_oneof![mixture, broken])
    })
}

proptest! {
    /// Whatever the text and however it is cut: the same events.
    #[test]
    fn cutting_does_not_matter(
        (index, text) in damaged(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        inside in any::<bool>(),
    ) {
        let setup = ParserSetup { inside_reasoning: inside, ..setup(TOOL_FORMATS[index].name, "think") };
        let whole = parse(&setup, [text.as_str()]);
        prop_assert_eq!(&parse(&setup, cut(&text, 1)), &whole);
        let mut ends: Vec<usize> = cuts.iter().map(|cut| text.floor_char_boundary(cut.index(text.len() + 1))).collect();
        ends.extend([0, text.len()]);
        ends.sort_unstable();
        prop_assert_eq!(&parse(&setup, ends.windows(2).map(|pair| &text[pair[0]..pair[1]])), &whole);
    }

    /// Words put anywhere into a text come out somewhere.
    #[test]
    fn no_word_is_lost((index, text) in damaged(), at in any::<prop::sample::Index>()) {
        let at = text.floor_char_boundary(at.index(text.len() + 1));
        let text = format!("{}wxyzzy{}", &text[..at], &text[at..]);
        // An id behind the arguments comes too late to be told.
        let mut ids = text.split("\"id\": \"").skip(1).filter_map(|rest| rest.split('"').next());
        prop_assume!(!ids.any(|id| id.contains("wxyzzy")));
        let events = parse(&setup(TOOL_FORMATS[index].name, "think"), [text.as_str()]);
        let answer = Answer::of(&events);
        let mut all = answer.content + "\u{1}" + &answer.reasoning;
        for ((name, arguments), id) in answer.calls.iter().zip(&answer.ids) {
            all = all + "\u{1}" + name + "\u{1}" + arguments + "\u{1}" + id;
        }
        prop_assert!(all.contains("wxyzzy"), "{} {:?}: {:?}", TOOL_FORMATS[index].name, text, events);
    }

    /// Any text at all.
    #[test]
    fn nothing_panics(index in 0..TOOL_FORMATS.len(), text in any::<String>()) {
        parse(&setup(TOOL_FORMATS[index].name, "think"), cut(&text, 3));
    }
}
