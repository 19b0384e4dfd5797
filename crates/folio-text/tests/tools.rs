//! Every format of tool calls and reasoning: what it parses to, at every cutting of the text.

#[path = "common/answers.rs"]
mod answers;

use answers::{Answer, PARIS, all_cuts, cut, examples, parse, setup};
use folio_text::{OutputEvent, OutputParser, ParserSetup, TOOL_FORMATS, ToolFormat};

fn check(tools: &str, text: &str, content: &str, calls: &[(&str, &str)]) {
    let answer = Answer::of(&all_cuts(&setup(tools, ""), text));
    let calls: Vec<(String, String)> = calls.iter().map(|(n, a)| (n.to_string(), a.to_string())).collect();
    assert_eq!((answer.content.as_str(), &answer.calls), (content, &calls), "{tools}: {text:?}");
    assert_eq!(answer.ended, calls.len(), "{tools}: {text:?}");
    assert_eq!(answer.reasoning, "");
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

#[test]
fn arguments_said_twice_are_taken_once_and_the_rest_is_text() {
    let text = format!(
        "[TOOL_CALLS] [{{\"name\": \"get_weather\", \"arguments\": {PARIS}, \"arguments\": {{\"a\": 1}}}}]"
    );
    let answer = Answer::of(&all_cuts(&setup("mistral", ""), &text));
    assert_eq!(answer.calls, [("get_weather".to_owned(), PARIS.to_owned())]);
    assert!(answer.content.contains("{\"a\": 1}"), "{}", answer.content);
}
