//! Reading answers in tests: what is parsed put together again, texts cut in every way, and each family's own words.
#![allow(dead_code)] // Each test file uses a part of this.

use std::sync::Arc;

use folio_text::{Functions, OutputEvent, OutputParser, ParserSetup, ReasoningFormat, ToolFormat};
use serde_json::json;

/// A whole answer, as a client would put it together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    pub content: String,
    pub reasoning: String,
    /// Name and arguments.
    pub calls: Vec<(String, String)>,
    pub ids: Vec<String>,
    pub ended: usize,
}

impl Answer {
    pub fn of(events: &[OutputEvent]) -> Self {
        let mut answer = Self::default();
        for event in events {
            match event {
                OutputEvent::Content(text) => answer.content += text,
                OutputEvent::Reasoning(text) => answer.reasoning += text,
                OutputEvent::CallStarted { index, id, name } => {
                    assert_eq!(*index as usize, answer.calls.len());
                    answer.calls.push((name.clone(), String::new()));
                    answer.ids.push(id.clone());
                }
                OutputEvent::Arguments { index, text } => {
                    assert_eq!(*index as usize + 1, answer.calls.len());
                    answer.calls.last_mut().expect("a call has begun").1 += text;
                }
                OutputEvent::CallEnded { index } => {
                    assert_eq!(*index as usize, answer.ended);
                    answer.ended += 1;
                }
            }
        }
        answer
    }
}

/// Neighbouring events of a kind joined.
pub fn joined(events: Vec<OutputEvent>) -> Vec<OutputEvent> {
    let mut out: Vec<OutputEvent> = Vec::new();
    for event in events {
        match (out.last_mut(), &event) {
            (Some(OutputEvent::Content(last)), OutputEvent::Content(text)) => last.push_str(text),
            (Some(OutputEvent::Reasoning(last)), OutputEvent::Reasoning(text)) => last.push_str(text),
            (Some(OutputEvent::Arguments { text: last, .. }), OutputEvent::Arguments { text, .. }) => {
                last.push_str(text);
            }
            _ => out.push(event),
        }
    }
    out
}

pub fn functions() -> Arc<Functions> {
    let tools = json!([
        {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "opts": {"type": "object"}}}}},
        {"type": "function", "function": {"name": "now", "parameters": {}}},
    ]);
    Arc::new(Functions::of_tools(tools.as_array().expect("list")))
}

pub fn setup(tools: &str, reasoning: &str) -> ParserSetup {
    let known = |name: &str| !name.is_empty();
    ParserSetup {
        tools: known(tools).then(|| ToolFormat::named(tools).expect(tools)),
        reasoning: known(reasoning).then(|| ReasoningFormat::named(reasoning).expect(reasoning)),
        functions: functions(),
        id_seed: 7,
        ..ParserSetup::default()
    }
}

pub fn parse<'a>(setup: &ParserSetup, pieces: impl IntoIterator<Item = &'a str>) -> Vec<OutputEvent> {
    let mut parser = OutputParser::new(setup.clone());
    let mut events = Vec::new();
    for piece in pieces {
        parser.push(piece, &mut events);
    }
    parser.finish(&mut events);
    joined(events)
}

/// Pieces of `size` characters.
pub fn cut(text: &str, size: usize) -> Vec<&str> {
    let starts: Vec<usize> =
        text.char_indices().map(|(at, _)| at).step_by(size).chain([text.len()]).collect();
    starts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect()
}

/// The events of the whole text, which must be those of every cutting into equal pieces and of every cutting in two.
pub fn all_cuts(setup: &ParserSetup, text: &str) -> Vec<OutputEvent> {
    let whole = parse(setup, [text]);
    for size in [1, 2, 3, 5, 8, 13] {
        assert_eq!(parse(setup, cut(text, size)), whole, "{text:?} by {size}");
    }
    for (at, _) in text.char_indices() {
        assert_eq!(parse(setup, [&text[..at], &text[at..]]), whole, "{text:?} cut at {at}");
    }
    whole
}

pub const PARIS: &str = r#"{"city": "Paris", "days": 3}"#;

/// Each family's own words for get_weather(city=Paris, days=3), and for that and now() together.
pub fn examples() -> Vec<(&'static str, String, String)> {
    let own = |text: &str| text.replace("PARIS", PARIS);
    let of = |name, one: &str, two: &str| (name, own(one), own(two));
    vec![
        of(
            "hermes",
            "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": PARIS}\n</tool_call>",
            "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": PARIS}\n</tool_call>\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>",
        ),
        of(
            "llama3_json",
            "{\"name\": \"get_weather\", \"parameters\": PARIS}",
            "<|python_tag|>{\"name\": \"get_weather\", \"parameters\": PARIS}; {\"name\": \"now\", \"parameters\": {}}",
        ),
        of("pythonic", "[get_weather(city='Paris', days=3)]", "[get_weather(city=\"Paris\", days=3), now()]"),
        of(
            "mistral",
            "[TOOL_CALLS][{\"name\": \"get_weather\", \"arguments\": PARIS}]",
            "[TOOL_CALLS] [{\"name\": \"get_weather\", \"arguments\": PARIS, \"id\": \"abcdefghi\"}, {\"name\": \"now\", \"arguments\": {}}]",
        ),
        of(
            "mistral_v11",
            "[TOOL_CALLS]get_weather[ARGS]PARIS",
            "[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]PARIS[TOOL_CALLS]now{}",
        ),
        of(
            "qwen3_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
            "<function=get_weather>\n<parameter=city>Paris</parameter><parameter=days>3</parameter></function></tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        ),
        of(
            "deepseek_v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\nPARIS\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\nPARIS\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        of(
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>PARIS<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>PARIS<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        of(
            "deepseek_v32",
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Paris</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
            "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Paris</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"now\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        ),
        of(
            "glm45",
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call>\n<tool_call>now</tool_call>",
        ),
        of(
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>PARIS<|tool_call_end|><|tool_calls_section_end|>",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>PARIS<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        ),
        of(
            "minimax_m2",
            "<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Paris</parameter>\n<parameter name=\"days\">3</parameter>\n</invoke>\n</minimax:tool_call>",
            "<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Paris</parameter>\n<parameter name=\"days\">3</parameter>\n</invoke>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>",
        ),
        of(
            "gemma4",
            "<|tool_call>call:get_weather{city:<|\"|>Paris<|\"|>,days:3}<tool_call|>",
            "<|tool_call>call:get_weather{city:<|\"|>Paris<|\"|>,days:3}<tool_call|><|tool_call>call:now{}<tool_call|>",
        ),
        of(
            "functiongemma",
            "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>",
            "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call><start_function_call>call:now{}<end_function_call>",
        ),
        of(
            "gemma3",
            "```tool_code\nget_weather(city=\"Paris\", days=3)\n```",
            "[get_weather(city=\"Paris\", days=3), now()]",
        ),
        of(
            "phi4_mini_json",
            "functools[{\"name\": \"get_weather\", \"arguments\": PARIS}]",
            "<|tool_call|>[{\"name\": \"get_weather\", \"arguments\": PARIS}, {\"name\": \"now\", \"arguments\": {}}]<|/tool_call|>",
        ),
        of(
            "nemotron_json",
            "<TOOLCALL>[{\"name\": \"get_weather\", \"arguments\": PARIS}]</TOOLCALL>",
            "<TOOLCALL>[{\"name\": \"get_weather\", \"arguments\": PARIS}, {\"name\": \"now\", \"arguments\": {}}]</TOOLCALL>",
        ),
        of(
            "granite",
            "<|tool_call|>[{\"name\": \"get_weather\", \"arguments\": PARIS}]",
            "<tool_call>[{\"name\": \"get_weather\", \"arguments\": PARIS}, {\"name\": \"now\", \"arguments\": {}}]",
        ),
        of(
            "jamba",
            "<tool_calls>[{\"name\": \"get_weather\", \"arguments\": PARIS}]</tool_calls>",
            "<tool_calls>[\n{\"name\": \"get_weather\", \"arguments\": PARIS},\n{\"name\": \"now\", \"arguments\": {}}\n]</tool_calls>",
        ),
        of(
            "olmo3",
            "<function_calls>get_weather(city='Paris', days=3)</function_calls>",
            "<function_calls>get_weather(city='Paris', days=3)\nnow()</function_calls>",
        ),
        of(
            "harmony",
            "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>PARIS<|call|>",
            "<|channel|>commentary to=functions.get_weather<|message|>PARIS<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}",
        ),
    ]
}
