//! Every format of tool calls and reasoning: what it parses to, at every cutting of the text; and what damage does not do.

mod common;

use std::sync::Arc;

use folio_text::{
    Functions, OutputEvent, OutputParser, ParserSetup, ReasoningFormat, TOOL_FORMATS, ToolFormat,
};
use proptest::prelude::*;
use serde_json::{Value, json};

/// A whole answer, as a client would put it together.
#[derive(Clone, Debug, Default, PartialEq)]
struct Answer {
    content: String,
    reasoning: String,
    /// Name and arguments.
    calls: Vec<(String, String)>,
    ids: Vec<String>,
    ended: usize,
}

impl Answer {
    fn of(events: &[OutputEvent]) -> Self {
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
fn joined(events: Vec<OutputEvent>) -> Vec<OutputEvent> {
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

fn functions() -> Arc<Functions> {
    let tools = json!([
        {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "opts": {"type": "object"}}}}},
        {"type": "function", "function": {"name": "now", "parameters": {}}},
    ]);
    Arc::new(Functions::of_tools(tools.as_array().expect("list")))
}

fn setup(tools: &str, reasoning: &str) -> ParserSetup {
    let known = |name: &str| !name.is_empty();
    ParserSetup {
        tools: known(tools).then(|| ToolFormat::named(tools).expect(tools)),
        reasoning: known(reasoning).then(|| ReasoningFormat::named(reasoning).expect(reasoning)),
        functions: functions(),
        id_seed: 7,
        ..ParserSetup::default()
    }
}

fn parse<'a>(setup: &ParserSetup, pieces: impl IntoIterator<Item = &'a str>) -> Vec<OutputEvent> {
    let mut parser = OutputParser::new(setup.clone());
    let mut events = Vec::new();
    for piece in pieces {
        parser.push(piece, &mut events);
    }
    parser.finish(&mut events);
    joined(events)
}

/// Pieces of `size` characters.
fn cut(text: &str, size: usize) -> Vec<&str> {
    let starts: Vec<usize> =
        text.char_indices().map(|(at, _)| at).step_by(size).chain([text.len()]).collect();
    starts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect()
}

/// The events of the whole text, which must be those of every cutting into equal pieces and of every cutting in two.
fn all_cuts(setup: &ParserSetup, text: &str) -> Vec<OutputEvent> {
    let whole = parse(setup, [text]);
    for size in [1, 2, 3, 5, 8, 13] {
        assert_eq!(parse(setup, cut(text, size)), whole, "{text:?} by {size}");
    }
    for (at, _) in text.char_indices() {
        assert_eq!(parse(setup, [&text[..at], &text[at..]]), whole, "{text:?} cut at {at}");
    }
    whole
}

const PARIS: &str = r#"{"city": "Paris", "days": 3}"#;

fn check(tools: &str, text: &str, content: &str, calls: &[(&str, &str)]) {
    let answer = Answer::of(&all_cuts(&setup(tools, ""), text));
    let calls: Vec<(String, String)> = calls.iter().map(|(n, a)| (n.to_string(), a.to_string())).collect();
    assert_eq!((answer.content.as_str(), &answer.calls), (content, &calls), "{tools}: {text:?}");
    assert_eq!(answer.ended, calls.len(), "{tools}: {text:?}");
    assert_eq!(answer.reasoning, "");
}

/// Each family's own words for get_weather(city=Paris, days=3), and for that and now() together.
fn examples() -> Vec<(&'static str, String, String)> {
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

#[test]
fn every_family_says_one_call_and_two() {
    let examples = examples();
    for format in TOOL_FORMATS {
        let of_format: Vec<_> = examples.iter().filter(|(name, ..)| *name == format.name).collect();
        assert_eq!(of_format.len(), 1, "{} has an example", format.name);
        let (name, one, two) = of_format[0];
        check(name, one, "", &[("get_weather", PARIS)]);
        check(name, two, "", &[("get_weather", PARIS), ("now", "{}")]);
    }
}

#[test]
fn text_around_calls_is_content() {
    for (name, one, _) in examples() {
        let bare = name == "llama3_json" || name == "pythonic";
        if bare || name == "harmony" {
            continue;
        }
        check(name, &format!("Let me look.\n\n{one}"), "Let me look.\n\n", &[("get_weather", PARIS)]);
        let text = format!("{one}\nDone.");
        check(name, &text, "\nDone.", &[("get_weather", PARIS)]);
        let twice = format!("A{one} B {one}\n");
        check(name, &twice, "A B ", &[("get_weather", PARIS), ("get_weather", PARIS)]);
    }
}

#[test]
fn text_without_calls_is_content_to_the_byte() {
    for format in TOOL_FORMATS {
        for text in
            ["", " \n ", "Hello, é world!", "a < b && [1] {x} <tool", "x = f(1)\n```json\n{}\n```\n", "{}"]
        {
            let answer = Answer::of(&all_cuts(&setup(format.name, ""), text));
            assert_eq!((answer.content.as_str(), answer.calls.len()), (text, 0), "{}", format.name);
        }
    }
    // Nobody looks for calls.
    let text = "<tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>";
    assert_eq!(Answer::of(&all_cuts(&setup("", "think"), text)).content, text);
}

#[test]
fn malformed_calls_are_given_back() {
    for (name, text) in [
        ("hermes", "<tool_call>not json</tool_call>"),
        ("hermes", "<tool_call></tool_call>"),
        ("hermes", "<tool_call>{\"name\": 5}</tool_call>"),
        ("hermes", "<tool_call>{\"nam\": \"now\"}</tool_call>"),
        ("hermes", "<tool_call>{\"name\": \"now\", \"arguments\": [1]}</tool_call>"),
        ("hermes", "<tool_call>\n{\"name\": \"now\""),
        ("llama3_json", "{\"name\": \"Bob\", \"age\": 3}"),
        ("llama3_json", "{\"name\": \"Bob\"}"),
        ("llama3_json", "{\"name\": \"other\", \"parameters\": {}}"),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("llama3_json", "So: {\"name\": \"now\", \"parameters\": {}}"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "[other(x=1)]"),
        ("pythonic", "[now(1)]"),
        ("pythonic", "[now(x=f())]"),
        ("pythonic", "[]"),
        ("pythonic", "[now(x='"),
        ("mistral", "[TOOL_CALLS] none"),
        ("mistral", "[TOOL_CALLS][{\"id\": 3}]"),
        ("mistral_v11", "[TOOL_CALLS]now[ARGS]none"),
        ("qwen3_coder", "<tool_call>\n<function=now>\ntext</function>"),
        ("qwen3_coder", "<function=no name>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n{}"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
        ("glm45", "<tool_call>no name</tool_call>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.:0"),
        ("gemma4", "<|tool_call>call:now(1)<tool_call|>"),
        ("harmony", "Hello, no channel"),
        ("harmony", "<|channel|>commentary to=browser.search<|message|>x"),
    ] {
        let answer = Answer::of(&all_cuts(&setup(name, ""), text));
        assert_eq!((answer.content.as_str(), answer.calls.len()), (text, 0), "{name}");
    }
}

#[test]
fn a_good_call_after_a_bad_one_counts() {
    let good = "<tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>";
    check("hermes", &format!("<tool_call>oops {good}"), "<tool_call>oops ", &[("now", "{}")]);
    check("hermes", &format!("<tool_call>{good}"), "<tool_call>", &[("now", "{}")]);
    // After a good one, what is none is text.
    check("hermes", &format!("{good}<tool_call>x"), "<tool_call>x", &[("now", "{}")]);
    let inner = "<tool_call>{\"name\": \"now\", \"arguments\": {}} and more</tool_call>";
    check("hermes", inner, " and more</tool_call>", &[("now", "{}")]);
    let tail = "<tool_call>{\"name\": \"now\", \"arguments\": {}, oops";
    check("hermes", tail, ", oops", &[("now", "{}")]);
}

#[test]
fn models_are_forgiven_what_is_clear() {
    // Arguments first; as a string; none at all; no closing marker or bracket; raw newlines in strings.
    let one = |text: &str, arguments: &str| check("hermes", text, "", &[("now", arguments)]);
    one("<tool_call>{\"arguments\": {\"a\": \"}\"}, \"name\": \"now\"}</tool_call>", "{\"a\": \"}\"}");
    one("<tool_call>{\"name\": \"now\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>", "{\"a\": 1}");
    one("<tool_call>{\"name\": \"now\"}</tool_call>", "{}");
    one("<tool_call>{\"name\": \"now\", \"arguments\": {}}", "{}");
    one("<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": 1}</tool_call>", "{\"a\": 1}");
    one("<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": \"x\ny\"}}</tool_call>", "{\"a\": \"x\\ny\"}");
    check("qwen3_coder", "<tool_call><function=now></function>", "", &[("now", "{}")]);
    check("mistral", "[TOOL_CALLS][{\"name\": \"now\", \"arguments\": {}}", "", &[("now", "{}")]);
    check("deepseek_v31", &examples()[6].1, "", &[("get_weather", PARIS)]);
}

#[test]
fn broken_and_cut_off_arguments_are_passed_on() {
    for (name, text, arguments, ended) in [
        (
            "hermes",
            "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": oops}}</tool_call>",
            "{\"a\": oops}}",
            1,
        ),
        ("hermes", "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": \"b", "{\"a\": \"b", 0),
        ("llama3_json", "{\"name\": \"now\", \"parameters\": {a}} x", "{a}} x", 0),
        ("qwen3_coder", "<function=now>\n<parameter=a>\ntext\n</par", "{\"a\": \"text\\n</par", 0),
        (
            "qwen3_coder",
            "<function=get_weather>\n<parameter=city>\ntext\n</par",
            "{\"city\": \"text\\n</par",
            0,
        ),
        ("harmony", "<|channel|>commentary to=functions.now<|message|>{\"a\"", "{\"a\"", 1),
        ("harmony", "<|channel|>commentary to=functions.now<|message|><|call|>", "{}", 1),
    ] {
        let answer = Answer::of(&all_cuts(&setup(name, ""), text));
        assert_eq!(
            answer.calls,
            [(
                if text.contains("get_weather") { "get_weather" } else { "now" }.to_owned(),
                arguments.to_owned()
            )],
            "{name}"
        );
        assert_eq!((answer.content.as_str(), answer.ended), ("", ended), "{name} {text}");
    }
}

#[test]
fn arguments_stream() {
    let mut parser = OutputParser::new(setup("hermes", ""));
    let mut events = Vec::new();
    parser.push("Hi <tool_call>{\"name\": \"now\", \"argu", &mut events);
    assert_eq!(events, [OutputEvent::Content("Hi ".into())]);
    events.clear();
    parser.push("ments\": {\"a\": \"lo", &mut events);
    assert!(matches!(&events[0], OutputEvent::CallStarted { index: 0, name, .. } if name == "now"));
    assert_eq!(events[1], OutputEvent::Arguments { index: 0, text: "{\"a\": \"lo".into() });
    assert_eq!(parser.held_bytes(), 0);
    events.clear();
    parser.push("ng\"}", &mut events);
    assert_eq!(events, [OutputEvent::Arguments { index: 0, text: "ng\"}".into() }]);
    // The same for text between markers; what may be the closing marker is held.
    let mut parser = OutputParser::new(setup("qwen3_coder", ""));
    let mut events = Vec::new();
    parser.push("<function=get_weather><parameter=city>\nPar\n</p", &mut events);
    assert_eq!(Answer::of(&events).calls[0].1, "{\"city\": \"Par");
    parser.push("x", &mut events);
    assert_eq!(Answer::of(&events).calls[0].1, "{\"city\": \"Par\\n</px");
}

#[test]
fn only_what_may_be_a_marker_is_held() {
    let mut parser = OutputParser::new(setup("hermes", "think"));
    let mut shown = |text: &str| {
        let mut events = Vec::new();
        parser.push(text, &mut events);
        (Answer::of(&events), parser.held_bytes())
    };
    let content = |text: &str, held| (Answer { content: text.into(), ..Answer::default() }, held);
    assert_eq!(shown("<thi"), content("", 4));
    assert_eq!(shown("s> a"), content("<this> a", 0));
    assert_eq!(shown(" <tool_"), content(" ", 6));
    assert_eq!(shown("x<"), content("<tool_x", 1));
    assert_eq!(shown("<think>"), content("<<think>", 0));
}

#[test]
fn reasoning_is_separated() {
    let split = |tools: &str, reasoning: &str, inside: bool, text: &str| {
        let setup = ParserSetup { inside_reasoning: inside, ..setup(tools, reasoning) };
        let answer = Answer::of(&all_cuts(&setup, text));
        (answer.reasoning, answer.content, answer.calls.len())
    };
    let want = |reasoning: &str, content: &str, calls| (reasoning.to_owned(), content.to_owned(), calls);
    assert_eq!(split("", "think", false, "<think>\nso\n</think>\n\nYes"), want("\nso\n", "\n\nYes", 0));
    assert_eq!(split("", "think", false, "Yes <think>no</think>"), want("", "Yes <think>no</think>", 0));
    assert_eq!(split("", "think", true, "so</think>Yes</think>"), want("so", "Yes</think>", 0));
    assert_eq!(split("", "think", true, "<think>so</think>Yes"), want("so", "Yes", 0));
    assert_eq!(split("", "think", true, "so and"), want("so and", "", 0));
    assert_eq!(split("", "mistral", false, "[THINK]so[/THINK]Yes[THINK]x"), want("sox", "Yes", 0));
    assert_eq!(split("", "gemma4", false, "<|channel>thought\nso<channel|>Yes"), want("so", "Yes", 0));
    let call = "<tool_call>{\"name\": \"now\"}</tool_call>";
    assert_eq!(split("hermes", "think", true, &format!("so</think>\n{call}")), want("so", "\n", 1));
    // Written about, not made; unless the marker is a token of its own.
    assert_eq!(split("hermes", "think", true, &format!("{call}</think>Y")), want(call, "Y", 0));
    assert_eq!(split("mistral", "mistral", true, "so[TOOL_CALLS]now{}"), want("so", "", 1));
    assert_eq!(
        split("llama3_json", "think", true, "{}</think>{\"name\": \"now\", \"parameters\": {}}"),
        want("{}", "", 1)
    );
}

#[test]
fn thinking_is_known_at_every_moment() {
    for (tools, reasoning, pieces) in [
        ("mistral", "think", &[("<think>", true), ("so", true), ("</think>", false), ("Yes", false)][..]),
        (
            "mistral",
            "mistral",
            &[("[THINK]so [TOOL_CALLS]", true), ("now{", false), ("}", false), ("x", false)],
        ),
        ("harmony", "harmony", &[("<|channel|>analysis<|message|>", true), ("x<|en", true), ("d|>", false)]),
    ] {
        let mut parser = OutputParser::new(setup(tools, reasoning));
        for (piece, thinking) in pieces {
            parser.push(piece, &mut Vec::new());
            assert_eq!(parser.in_reasoning(), *thinking, "{tools} {piece}");
        }
    }
}

#[test]
fn harmony_has_channels() {
    let text = "<|channel|>analysis<|message|>User asks. Use function.<|end|><|start|>assistant<|channel|>commentary<|message|>\
                One moment.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>\
                {\"city\":\"Paris\"}<|call|><|start|>assistant<|channel|>final<|message|>Sunny.<|return|>";
    for (tools, reasoning) in [("harmony", "harmony"), ("harmony", "")] {
        let answer = Answer::of(&all_cuts(&setup(tools, reasoning), text));
        assert_eq!(answer.reasoning, "User asks. Use function.");
        assert_eq!(answer.content, "One moment.Sunny.");
        assert_eq!(answer.calls, [("get_weather".to_owned(), "{\"city\":\"Paris\"}".to_owned())]);
    }
    // Without tools a call is text.
    let answer = Answer::of(&all_cuts(&setup("", "harmony"), text));
    assert!(answer.calls.is_empty() && answer.content.contains("{\"city\":\"Paris\"}"));
    assert_eq!(answer.reasoning, "User asks. Use function.");
}

#[test]
fn a_forced_call_goes_on_from_the_prompt() {
    for format in TOOL_FORMATS {
        let (_, one, _) = examples().into_iter().find(|(name, ..)| *name == format.name).expect("example");
        // What the model writes after the opening: the rest of its own example, where that begins in the same way.
        let squeezed = |text: &str| text.replace(['\n', ' '], "");
        for opening in [format.opening(Some("get_weather")), format.opening(None)] {
            let start = squeezed(&opening);
            let Some(end) =
                (0..=one.len()).find(|&end| one.is_char_boundary(end) && squeezed(&one[..end]) == start)
            else {
                panic!("{}: {opening:?} does not begin {one:?}", format.name);
            };
            let answer = Answer::of(&all_cuts(&setup(format.name, ""), &format!("{opening}{}", &one[end..])));
            assert_eq!(answer.calls, [("get_weather".to_owned(), PARIS.to_owned())], "{}", format.name);
            assert_eq!(answer.content, "");
        }
    }
}

#[test]
fn calls_can_be_limited_and_have_ids() {
    for (name, _, two) in examples() {
        let limited = ParserSetup { calls_max: 1, ..setup(name, "") };
        let mut parser = OutputParser::new(limited.clone());
        let mut events = Vec::new();
        parser.push(&two, &mut events);
        assert!(parser.is_over(), "{name}");
        let answer = Answer::of(&all_cuts(&limited, &two));
        assert_eq!((answer.calls.len(), answer.content.as_str()), (1, ""), "{name}");
        let ids = Answer::of(&parse(&setup(name, ""), [two.as_str()])).ids;
        assert_ne!(ids[0], ids[1], "{name}");
        let other = Answer::of(&parse(&ParserSetup { id_seed: 8, ..setup(name, "") }, [two.as_str()])).ids;
        match name {
            "mistral" => assert_eq!(ids[1].len(), 9),
            "mistral_v11" => assert_eq!(ids[0], "123456789"),
            "kimi_k2" => assert_eq!(ids, ["functions.get_weather:0", "functions.now:1"]),
            _ => {
                assert!(ids[0].starts_with("call_") && ids[0].len() == 29, "{name} {ids:?}");
                assert_ne!(ids[0], other[0]);
            }
        }
    }
}

#[test]
fn names_of_formats_are_unique() {
    for (index, format) in TOOL_FORMATS.iter().enumerate() {
        for name in format.aliases.iter().chain([&format.name]) {
            assert!(std::ptr::eq(ToolFormat::named(name).expect("found"), format), "{name}");
            assert!(TOOL_FORMATS[..index].iter().all(|other| !other.aliases.contains(name)), "{name}");
        }
    }
}

#[test]
fn held_text_is_bounded() {
    let mut parser = OutputParser::new(setup("hermes", ""));
    let mut events = Vec::new();
    parser.push("<tool_call>{\"arguments\": {\"a\": \"", &mut events);
    let mut pushed = 0;
    while pushed < 3 * folio_text::HELD_MAX {
        parser.push(&"word ".repeat(10_000), &mut events);
        pushed += 50_000;
        assert!(parser.held_bytes() <= folio_text::HELD_MAX + 100_000);
    }
    parser.finish(&mut events);
    let answer = Answer::of(&events);
    assert_eq!((answer.content.len() > pushed, answer.calls.len()), (true, 0));
}

#[test]
fn reading_again_is_bounded() {
    // Every opening mark begins what may be a call to the very end; and then it is none.
    let text = "<|tool_call>call:now{a:<|\"|>".repeat(20_000);
    let answer = Answer::of(&parse(&setup("gemma4", ""), cut(&text, 1000)));
    assert!(answer.content == text && answer.calls.is_empty());
    let tail = "<tool_call>no ".repeat(100) + "<tool_call>{\"name\": \"now\"}</tool_call>";
    assert_eq!(Answer::of(&all_cuts(&setup("hermes", ""), &tail)).content, tail);
}

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
