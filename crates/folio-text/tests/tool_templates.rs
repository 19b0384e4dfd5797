//! What real chat templates do with tools, and which formats they mean.

mod common;

use folio_text::{
    AnswerFormats, ChatInput, ChatTemplate, Functions, OutputEvent, OutputParser, ParserSetup, Prompt,
    ReasoningFormat, SpecialTokens, TemplateSources, ToolFormat,
};
use serde_json::{Value, json};

/// Which real templates know tools, in which form, and which formats they mean.
#[test]
fn templates_tell_what_they_do_with_tools() {
    let Some(folder) = common::data("templates-llamacpp") else { return };
    let (mut seen, object) = (0, Some(true));
    for (file, takes_tools, object_arguments, tools, reasoning) in [
        ("Qwen-Qwen2.5-7B-Instruct", true, object, Some("hermes"), None),
        ("Qwen-Qwen3-0.6B", true, object, Some("hermes"), Some("think")),
        ("Qwen-QwQ-32B", true, object, Some("hermes"), Some("think")),
        ("Qwen3-Coder", true, object, Some("qwen3_coder"), None),
        ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", true, object, Some("hermes"), None),
        ("meta-llama-Llama-3.1-8B-Instruct", true, object, Some("llama3_json"), None),
        ("meta-llama-Llama-3.2-3B-Instruct", true, object, Some("llama3_json"), None),
        ("mistralai-Mistral-Nemo-Instruct-2407", true, object, Some("mistral"), None),
        ("Mistral-Small-3.2-24B-Instruct-2506", true, object, Some("mistral_v11"), None),
        ("openai-gpt-oss-120b", true, object, Some("harmony"), Some("harmony")),
        ("google-gemma-2-2b-it", false, None, None, None),
        ("microsoft-Phi-3.5-mini-instruct", false, None, None, None),
    ] {
        let Ok(source) = std::fs::read_to_string(folder.join(format!("{file}.jinja"))) else { continue };
        let template = compile(&source);
        let found = template.tools();
        assert_eq!(found.takes_tools, takes_tools, "{file}");
        assert_eq!(found.takes_calls.then_some(found.object_arguments), object_arguments, "{file}");
        assert_eq!(ToolFormat::of_template(&source).map(|format| format.name), tools, "{file}");
        assert_eq!(ReasoningFormat::of_template(&source).map(|format| format.name), reasoning, "{file}");
        seen += 1;
    }
    assert!(seen >= 10, "{seen} of the templates are there");
}

/// What a template writes for an earlier call is what the parser reads of a new one.
#[test]
fn what_templates_write_parsers_read() {
    let Some(folder) = common::data("templates-llamacpp") else { return };
    let mut seen = 0;
    for file in std::fs::read_dir(folder).expect("folder") {
        let path = file.expect("entry").path();
        let name = path.display().to_string();
        let Ok(source) = std::fs::read_to_string(&path) else { continue };
        let Some(format) = ToolFormat::of_template(&source) else { continue };
        let Some(template) = name.ends_with(".jinja").then(|| compile(&source)) else { continue };
        let found = template.tools();
        if !found.takes_calls {
            continue;
        }
        let arguments = json!({"city": "Paris \"é\"", "days": 3});
        let arguments = if found.object_arguments { arguments } else { arguments.to_string().into() };
        let function = json!({"name": "get_weather", "arguments": arguments});
        let content = if found.null_content { Value::Null } else { "".into() };
        let call = json!({"id": "call12345", "type": "function", "function": function});
        let question = json!({"role": "user", "content": "Weather?"});
        let answer = json!({"role": "assistant", "content": content, "tool_calls": [call]});
        let (Some(prompt), Some(whole)) = (
            render(&template, std::slice::from_ref(&question), true),
            render(&template, &[question, answer], false),
        ) else {
            panic!("{name} does not render");
        };
        // Reasoning that a prompt opens is no part of earlier turns.
        let prompt = prompt.split("<think>").next().unwrap_or_default();
        let common = prompt.bytes().zip(whole.bytes()).take_while(|(a, b)| a == b).count();
        let written = &whole[whole.floor_char_boundary(common)..];
        // A call that must be made begins as the template begins one. (gpt-oss's template puts the recipient first, Mistral's
        // gives earlier calls their id; the models themselves do neither.)
        let squeezed = |text: &str| text.replace(['\n', ' '], "");
        let opening = squeezed(&format.opening(Some("get_weather")));
        let own = ["harmony", "mistral_v11"].contains(&format.name);
        assert!(own || squeezed(written).contains(&opening), "{name}: {opening} {written}");
        let tools = [json!({"function": {"name": "get_weather", "parameters": {"properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}}}}})];
        let functions = Functions::of_tools(&tools).into();
        let setup = ParserSetup { tools: Some(format), functions, ..ParserSetup::default() };
        let (mut parser, mut events) = (OutputParser::new(setup), Vec::new());
        written.chars().for_each(|c| parser.push(c.encode_utf8(&mut [0; 4]), &mut events));
        parser.finish(&mut events);
        let mut read = (String::new(), String::new());
        for event in events {
            match event {
                OutputEvent::CallStarted { name, .. } => read.0 += &name,
                OutputEvent::Arguments { text, .. } => read.1 += &text,
                _ => {}
            }
        }
        assert_eq!(read.0, "get_weather", "{name}: {written}");
        let value: Value = serde_json::from_str(&read.1).expect("arguments are JSON");
        assert_eq!(value, json!({"city": "Paris \"é\"", "days": 3}), "{name}: {written}");
        seen += 1;
    }
    assert!(seen >= 10, "{seen} templates");
}

fn compile(source: &str) -> ChatTemplate {
    let mut sources = TemplateSources::default();
    sources.add("default", source, "test");
    let mut special = SpecialTokens::default();
    special.named.extend([("bos", "<s>"), ("eos", "</s>")].map(|(name, text)| (name.into(), text.into())));
    ChatTemplate::compile(sources, &special).expect("compiles").expect("one")
}

fn render(template: &ChatTemplate, messages: &[Value], add_generation_prompt: bool) -> Option<String> {
    let kwargs = serde_json::Map::new();
    let input = ChatInput {
        messages,
        tools: None,
        documents: None,
        add_generation_prompt,
        kwargs: &kwargs,
        now_unix_s: 0,
        formats: AnswerFormats::default(),
    };
    template.render(&input).ok().map(Prompt::into_text)
}
