//! Every rendering of the golden set equals transformers', byte for byte, and what it refuses is refused.

mod common;

use std::collections::BTreeMap;

use folio_text::{AnswerFormats, ChatInput, ChatTemplate, Prompt, SpecialTokens, TemplateSources, TextError};
use serde_json::{Value, json};

/// 2024-07-26 00:00:00 UTC, the date of the goldens.
const NOW: i64 = 1_721_952_000;

const CRASH: &str = "TypeError: 'NoneType' object is not iterable";

#[test]
fn renderings_equal_transformers() {
    let Some(goldens) = common::data("goldens-chat-templates") else { return };
    let root = goldens.parent().expect("data folder").to_owned();
    let contexts: Value =
        serde_json::from_slice(&std::fs::read(goldens.join("contexts.json")).expect("contexts"))
            .expect("json");
    let mut templates: BTreeMap<String, Option<ChatTemplate>> = BTreeMap::new();
    let (mut cases, mut refusals, mut absent, mut crashes) = (0, 0, 0, 0);
    let mut wrong: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for case in common::gz_lines(goldens.join("renderings.jsonl.gz")) {
        let name = case["template"].as_str().expect("template").to_owned();
        let template = templates.entry(name.clone()).or_insert_with(|| compile(&root.join(&name)));
        let Some(template) = template else {
            absent += 1;
            continue;
        };
        cases += 1;
        let context = case["context"].as_str().expect("context");
        let rendered = render(template, &contexts[context], case["add_generation_prompt"] == true);
        match (case.get("expected").and_then(Value::as_str), rendered) {
            (Some(expected), Ok(text)) if expected == text => {}
            (Some(expected), Ok(text)) => {
                wrong.entry(name).or_default().push(format!("{context}: {}", difference(expected, &text)))
            }
            (Some(_), Err(error)) => wrong.entry(name).or_default().push(format!("{context}: {error}")),
            (None, Err(_)) => refusals += 1,
            // A crash of Python's iteration over `tools=None` in a template that is only chosen when there are tools.
            (None, Ok(_)) if case["error"] == CRASH && name.ends_with("-tool_use.jinja") => crashes += 1,
            (None, Ok(text)) => {
                let error = &case["error"];
                wrong.entry(name).or_default().push(format!("{context}: no refusal ({error}), but {text:?}"));
            }
        }
    }
    println!(
        "{cases} cases of {} templates: {refusals} refusals, {crashes} rendered where Python crashes; {absent} more without their template",
        templates.len()
    );
    for (name, list) in &wrong {
        println!("{name}: {} wrong, first: {}", list.len(), list[0]);
    }
    assert!(cases > 0);
    assert!(wrong.is_empty(), "{} templates render differently", wrong.len());
}

/// What a template wrote before it asked whether the assistant's turn begins is the same with and without it, for every real template; and it is
/// all that is the same, but for those that ask early.
#[test]
fn what_is_before_the_answer_does_not_depend_on_it() {
    let Some(goldens) = common::data("goldens-chat-templates") else { return };
    let root = goldens.parent().expect("data folder").to_owned();
    let contexts: BTreeMap<String, Value> =
        serde_json::from_slice(&std::fs::read(goldens.join("contexts.json")).expect("contexts"))
            .expect("json");
    let names: std::collections::BTreeSet<String> = common::gz_lines(goldens.join("renderings.jsonl.gz"))
        .into_iter()
        .map(|case| case["template"].as_str().expect("template").to_owned())
        .collect();
    let (mut compared, mut early) = (0, BTreeMap::<String, usize>::new());
    for name in names {
        let Some(template) = compile(&root.join(&name)) else { continue };
        for (context, value) in &contexts {
            let [Ok(with), Ok(without)] = [true, false].map(|add| render_prompt(&template, value, add))
            else {
                continue;
            };
            let same = with.text().bytes().zip(without.text().bytes()).take_while(|(a, b)| a == b).count();
            let before = with.before_answer();
            assert!(before <= same, "{name} {context}: {before} of {same}");
            compared += 1;
            if before < same {
                *early.entry(name.clone()).or_default() += 1;
            }
        }
    }
    println!("{compared} renderings; asked early: {early:?}");
    assert!(compared > 100 && early.values().sum::<usize>() * 10 < compared, "{early:?}");
}

fn compile(path: &std::path::Path) -> Option<ChatTemplate> {
    let source = std::fs::read_to_string(path).ok()?;
    let mut sources = TemplateSources::default();
    sources.add("default", &source, "golden");
    let mut special = SpecialTokens::default();
    special.named.insert("bos".into(), "<BOS>".into());
    special.named.insert("eos".into(), "<EOS>".into());
    Some(ChatTemplate::compile(sources, &special).expect("template compiles").expect("one template"))
}

fn render(
    template: &ChatTemplate,
    context: &Value,
    add_generation_prompt: bool,
) -> Result<String, TextError> {
    render_prompt(template, context, add_generation_prompt).map(Prompt::into_text)
}

fn render_prompt(
    template: &ChatTemplate,
    context: &Value,
    add_generation_prompt: bool,
) -> Result<Prompt, TextError> {
    template.render(&ChatInput {
        messages: context["messages"].as_array().expect("messages"),
        tools: context["tools"].as_array().map(Vec::as_slice),
        documents: None,
        add_generation_prompt,
        kwargs: &serde_json::Map::new(),
        now_unix_s: NOW,
        formats: AnswerFormats::default(),
    })
}

fn difference(expected: &str, text: &str) -> String {
    let same = expected.bytes().zip(text.bytes()).take_while(|(a, b)| a == b).count();
    let from = (0..=same.saturating_sub(40)).rev().find(|i| expected.is_char_boundary(*i)).unwrap_or(0);
    let show = |s: &str| s.get(from..).unwrap_or_default().chars().take(120).collect::<String>();
    format!("expected ..{:?}, rendered ..{:?}", show(expected), show(text))
}

/// Renders one user message "hi" with what the folder holds.
fn from_folder(files: &[(&str, &str)], tools: bool, kwargs: Value) -> Result<String, TextError> {
    let folder = tempfile::tempdir().expect("folder");
    for (name, text) in files {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().expect("parent")).expect("folder");
        std::fs::write(path, text).expect("file");
    }
    let mut special = SpecialTokens::default();
    special.named.insert("eos".into(), "</s>".into());
    let template = ChatTemplate::from_folder(folder.path(), &special)?.ok_or(TextError::NoTemplate)?;
    let tools: Option<Vec<Value>> = tools.then(|| vec![json!({"type": "function"})]);
    let prompt = template.render(&ChatInput {
        messages: &[json!({"role": "user", "content": "hi"})],
        tools: tools.as_deref(),
        documents: None,
        add_generation_prompt: true,
        kwargs: kwargs.as_object().expect("object"),
        now_unix_s: NOW,
        formats: AnswerFormats::default(),
    })?;
    Ok(prompt.into_text())
}

#[test]
fn sources_in_order() {
    let string =
        ("tokenizer_config.json", r#"{"chat_template": "config {{ messages[0].content }}{{ eos_token }}"}"#);
    let list = (
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]}"#,
    );
    let file = ("chat_template.jinja", "file\n{% if true %}\nyes\n  {% endif %}\n");
    let additional = ("additional_chat_templates/tool_use.jinja", "additional");
    let none = json!({});
    assert_eq!(from_folder(&[string], false, none.clone()).expect("renders"), "config hi</s>");
    assert_eq!(from_folder(&[list], false, none.clone()).expect("renders"), "plain");
    assert_eq!(from_folder(&[list], true, none.clone()).expect("renders"), "tools");
    assert_eq!(from_folder(&[list, file], true, none.clone()).expect("renders"), "file\nyes\n");
    assert_eq!(from_folder(&[file, additional], true, none.clone()).expect("renders"), "additional");
    assert_eq!(from_folder(&[file, additional], false, none.clone()).expect("renders"), "file\nyes\n");
    assert!(matches!(
        from_folder(&[additional], false, none.clone()),
        Err(TextError::UnknownTemplate { .. })
    ));
    assert!(matches!(from_folder(&[], false, none), Err(TextError::NoTemplate)));
}

#[test]
fn kwargs_are_variables_but_not_the_servers() {
    let file = ("chat_template.jinja", "{{ thinking }}{{ tools is none }}");
    assert_eq!(from_folder(&[file], false, json!({"thinking": false})).expect("renders"), "FalseTrue");
    let error = from_folder(&[file], false, json!({"messages": []})).expect_err("refused");
    assert!(matches!(error, TextError::ReservedKwarg(name) if name == "messages"));
}

#[test]
fn a_template_cannot_run_for_ever() {
    let file = (
        "chat_template.jinja",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    );
    let error = from_folder(&[file], false, json!({})).expect_err("refused").to_string();
    assert!(error.contains("ran for too long"), "{error}");
}

#[test]
fn refusals_and_errors_are_told_apart() {
    let refuse = ("chat_template.jinja", "{{ raise_exception('roles must alternate') }}");
    let error = from_folder(&[refuse], false, json!({})).expect_err("refused");
    assert!(matches!(error, TextError::Refused(message) if message == "roles must alternate"));
    let broken = ("chat_template.jinja", "{{ messages[0].nothing.at_all }}");
    assert!(matches!(from_folder(&[broken], false, json!({})), Err(TextError::Render { .. })));
    let unparsable = ("chat_template.jinja", "{% if %}");
    let error = from_folder(&[unparsable], false, json!({})).expect_err("refused").to_string();
    assert!(error.contains("chat_template.jinja"), "{error}");
    let wrong = ("tokenizer_config.json", r#"{"chat_template": 3}"#);
    assert!(matches!(from_folder(&[wrong], false, json!({})), Err(TextError::BadConfig { .. })));
}
