//! What real chat templates do with tools, and which formats they mean.

mod common;

use folio_text::{ChatTemplate, ReasoningFormat, SpecialTokens, TemplateSources, ToolFormat};

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
        let mut sources = TemplateSources::default();
        sources.add("default", &source, file);
        let mut special = SpecialTokens::default();
        special
            .named
            .extend([("bos", "<s>"), ("eos", "</s>")].map(|(name, text)| (name.into(), text.into())));
        let template = ChatTemplate::compile(sources, &special).expect("compiles").expect("one");
        let found = template.tools();
        assert_eq!(found.takes_tools, takes_tools, "{file}");
        assert_eq!(found.takes_calls.then_some(found.object_arguments), object_arguments, "{file}");
        assert_eq!(ToolFormat::of_template(&source).map(|format| format.name), tools, "{file}");
        assert_eq!(ReasoningFormat::of_template(&source).map(|format| format.name), reasoning, "{file}");
        seen += 1;
    }
    assert!(seen >= 10, "{seen} of the templates are there");
}
