//! The request: its items become a conversation (`items`), everything else is read as for a chat.
//!
//! Invariants: as everywhere, a field is honoured, refused by its path, or a hint; [`refused`](crate::refused::RESPONSES) has what exists at OpenAI's and not here.

use serde_json::{Map, Value, json};

use super::{History, items, not_found};
use crate::cache::CacheOptions;
use crate::constraint::Constraint;
use crate::context::{Context, RequestLimits};
use crate::conversation::{self, Conversation};
use crate::effort::Thinking;
use crate::error::ApiError;
use crate::fields::{Fields, parse};
use crate::hints::{Api, Hints};
use crate::labels;
use crate::openapi::tables::RESPONSE;
use crate::params::Generation;
use crate::tools::{self, Dialect};

/// What `include` may ask for. All but the first are parts of results of tools that run at a provider's, of which there are none.
const INCLUDES: &[&str] = &[
    ENCRYPTED,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
];
const ENCRYPTED: &str = "reasoning.encrypted_content";
const SUMMARIES: &[&str] = &["auto", "concise", "detailed", "none"];

/// A request that was read.
pub struct ResponsesRequest {
    pub request: conversation::ConversationRequest,
    /// The conversation without instructions, for what goes on from the answer.
    pub messages: Vec<Value>,
    /// The request's own items.
    pub items: Vec<Value>,
    /// The response's fields that the request decides.
    pub repeated: Map<String, Value>,
    pub store: bool,
    pub background: bool,
    /// Reasoning is carried by the client, sealed.
    pub seals: bool,
    /// What does not fit is left out from the beginning.
    pub truncates: bool,
}

impl ResponsesRequest {
    /// Reads the request whose response has this id.
    pub fn read(body: &[u8], context: &Context, history: &dyn History, id: &str) -> Result<Self, ApiError> {
        let limits = &context.limits;
        let mut fields = Fields::of_body(body)?;
        let mut hints = Hints::new(&context.hints, Api::Responses);
        let adapter = context.adapter(&mut fields)?;
        let plain = Generation::read_plain(&mut fields, context, "stop")?;
        let mut generation = Generation { adapter, ..plain };
        generation.cache = CacheOptions::read(&mut fields)?;
        generation.max_tokens = fields.take("max_output_tokens")?;
        if generation.max_tokens == Some(0) {
            let message = "Invalid 'max_output_tokens': 0 is not a positive number.";
            return Err(ApiError::invalid("max_output_tokens", message));
        }
        let mut repeated = Repeated::default();
        let mut kwargs = Map::new();
        repeated.plain(&mut fields)?;
        generation.constraint = repeated.text(&mut fields, limits, &mut hints)?;
        generation.bounds.thinking = repeated.reasoning(&mut fields, context, &mut kwargs)?;
        repeated.tools(&fields)?;
        let mut tools = tools::read(&mut fields, Dialect::Responses, limits, &mut |_, _| Ok(()))?;
        let store = fields.take::<bool>("store")?.unwrap_or(history.keeps());
        let background = fields.take::<bool>("background")?.unwrap_or(false);
        if background && !store {
            let message = "'background' needs 'store': its answer is asked for later.";
            return Err(ApiError::invalid("background", message));
        }
        let instructions = fields.take::<String>("instructions")?;
        let previous = fields.take::<String>("previous_response_id")?;
        let mut messages: Vec<Value> = match &previous {
            Some(id) => history.messages(id)?.ok_or_else(|| not_found("previous_response_id", id))?.to_vec(),
            None => Vec::new(),
        };
        let input = items::read(&mut fields, history, limits, &mut hints)?;
        messages.extend(input.messages);
        let mut notes = hints.close(fields, &RESPONSE)?;
        notes.left_out = std::mem::take(&mut tools.left_out);
        if messages.len() > limits.messages {
            let message = format!(
                "The conversation has {} messages; the limit is {}.",
                messages.len(),
                limits.messages
            );
            return Err(ApiError::invalid("input", message));
        }
        let mut all = messages.clone();
        if let Some(text) = &instructions {
            all.insert(0, json!({"role": "system", "content": text}));
        }
        let Repeated { mut fields, seals, truncates } = repeated;
        let rest = json!({
            "id": id, "object": "response", "created_at": crate::unix_s(), "completed_at": null, "error": null,
            "incomplete_details": null, "instructions": instructions, "max_output_tokens": generation.max_tokens,
            "model": generation.model(context.model.name()), "usage": null, "previous_response_id": previous,
            "temperature": generation.sampling.temperature, "top_p": generation.sampling.top_p, "store": store,
            "background": background, "truncation": if truncates { "auto" } else { "disabled" },
            "service_tier": "default", "top_logprobs": 0, "max_tool_calls": null,
        });
        if let Value::Object(rest) = rest {
            fields.extend(rest);
        }
        let conversation =
            Conversation { messages: all, tools, kwargs, add_generation_prompt: true, continue_final: false };
        let request =
            conversation::ConversationRequest { generation, conversation, include_reasoning: true, notes };
        Ok(Self {
            request,
            messages,
            items: input.items,
            repeated: fields,
            store,
            background,
            seals,
            truncates,
        })
    }
}

/// What the response repeats of the request, and what that asks for.
#[derive(Default)]
struct Repeated {
    fields: Map<String, Value>,
    /// Reasoning is carried by the client, sealed.
    seals: bool,
    /// What does not fit is left out from the beginning.
    truncates: bool,
}

impl Repeated {
    /// What is said about tools, as it is said.
    fn tools(&mut self, fields: &Fields) -> Result<(), ApiError> {
        for (name, default) in
            [("tools", json!([])), ("tool_choice", json!("auto")), ("parallel_tool_calls", json!(true))]
        {
            let given = fields.peek(name).map(|raw| parse(raw.clone(), name)).transpose()?;
            self.fields.insert(name.into(), given.unwrap_or(default));
        }
        Ok(())
    }

    /// What is checked and repeated, and has no effect; and what can only have its default.
    fn plain(&mut self, fields: &mut Fields) -> Result<(), ApiError> {
        for name in labels::NAMES {
            self.fields.insert(name.into(), labels::name(fields, name)?.into());
        }
        let metadata = labels::metadata(fields)?.unwrap_or_default();
        self.fields.insert("metadata".into(), metadata.into());
        fields.only("service_tier", &["auto", "default"], "there is one tier")?;
        self.truncates = match fields.take::<String>("truncation")?.as_deref() {
            None | Some("disabled") => false,
            Some("auto") => true,
            Some(other) => {
                let message =
                    format!("Invalid value for 'truncation': '{other}' is not one of auto, disabled.");
                return Err(ApiError::invalid("truncation", message));
            }
        };
        if fields.take::<u32>("top_logprobs")?.is_some_and(|top| top > 0) {
            return Err(ApiError::unsupported("top_logprobs", "use chat completions for log probabilities"));
        }
        let include = fields.take::<Vec<String>>("include")?.unwrap_or_default();
        if let Some(what) = include.iter().find(|what| !INCLUDES.contains(&&***what)) {
            let known = INCLUDES.join(", ");
            let why = format!("'{what}' is not available; known are {known}");
            return Err(ApiError::unsupported("include", &why));
        }
        self.seals = include.iter().any(|what| what == ENCRYPTED);
        if let Some(raw) = fields.raw("stream_options") {
            let mut options = Fields::of_value(raw, "stream_options".into())?;
            if options.take("include_obfuscation")?.unwrap_or(false) {
                let why = "events are not padded; leave it out or send false";
                return Err(ApiError::unsupported(options.path("include_obfuscation"), why));
            }
            options.finish(&[])?;
        }
        Ok(())
    }

    fn text(
        &mut self,
        fields: &mut Fields,
        limits: &RequestLimits,
        hints: &mut Hints,
    ) -> Result<Option<Constraint>, ApiError> {
        let mut constraint = None;
        let mut told = json!({"format": {"type": "text"}});
        if let Some(raw) = fields.raw("text") {
            let mut text = Fields::of_value(raw, "text".into())?;
            if let Some(raw) = text.raw("format") {
                told["format"] = parse(raw.clone(), "text.format")?;
                let mut format = Fields::of_value(raw, "text.format".into())?;
                constraint = match format.require::<String>("type")?.as_str() {
                    "text" => None,
                    "json_object" => Some(Constraint::json(json!({"type": "object"}), "text.format".into())),
                    "json_schema" => Some(Constraint::of_named(&mut format, limits)?),
                    other => {
                        let message = format!(
                            "Invalid value for 'text.format.type': '{other}' is not one of text, json_object, json_schema."
                        );
                        return Err(ApiError::invalid("text.format.type", message));
                    }
                };
                format.finish(&[])?;
            }
            hints.finish(text, &["format"], &[])?;
        }
        self.fields.insert("text".into(), told);
        Ok(constraint)
    }

    fn reasoning(
        &mut self,
        fields: &mut Fields,
        context: &Context,
        kwargs: &mut Map<String, Value>,
    ) -> Result<Option<(u32, &'static str)>, ApiError> {
        let mut budget = None;
        let mut told = json!({"effort": null, "summary": null});
        if let Some(raw) = fields.raw("reasoning") {
            let mut reasoning = Fields::of_value(raw, "reasoning".into())?;
            let effort = reasoning.take::<String>("effort")?;
            told["effort"] = effort.clone().into();
            let thinking = Thinking::default();
            budget = context.capabilities.efforts.apply(
                "reasoning.effort",
                effort.as_deref(),
                thinking,
                kwargs,
            )?;
            for name in ["summary", "generate_summary"] {
                // What there is is told: the reasoning itself.
                let summary = reasoning.take::<String>(name)?;
                if let Some(summary) = summary.filter(|summary| !SUMMARIES.contains(&&**summary)) {
                    let (path, known) = (reasoning.path(name), SUMMARIES.join(", "));
                    let message = format!("Invalid value for '{path}': '{summary}' is not one of {known}.");
                    return Err(ApiError::invalid(path, message));
                }
            }
            reasoning.finish(&[])?;
        }
        self.fields.insert("reasoning".into(), told);
        Ok(budget)
    }
}
