//! What the tests of several APIs need.

use std::sync::Arc;

use folio_api::hints::HintPolicy;
use folio_api::{Capabilities, Context, Model, Parsers, RequestLimits, SamplingDefaults};
use folio_text::{ChatTemplate, ReasoningFormat, SpecialTokens, TemplateSources, ToolFormat};
use serde_json::Value;

/// Of a model whose template shows tools and calls and ends with `more`, and that marks its reasoning so.
pub fn context(more: &str, reasoning: Option<&str>) -> Context {
    let mut sources = TemplateSources::default();
    let text = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}\
                {% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}{% endfor %}";
    sources.add("default", &format!("{text}{more}"), "test");
    let template = ChatTemplate::compile(sources, &SpecialTokens::default()).expect("a template");
    let parsers =
        Parsers { tools: ToolFormat::named("hermes"), reasoning: reasoning.and_then(ReasoningFormat::named) };
    Context {
        model: Model {
            names: vec!["m".into()],
            vocab_size: 100,
            eos_token_ids: Arc::new([1]),
            hidden: 4,
            defaults: SamplingDefaults::default(),
            has_adapters: false,
        },
        limits: RequestLimits::default(),
        hints: HintPolicy::default(),
        capabilities: Capabilities::new(parsers, template.as_ref()),
    }
}

pub fn merged(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}
