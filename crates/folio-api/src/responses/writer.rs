//! Answers: OpenAI's response object, whole and as typed events.
//!
//! Owns: output items in their shape, and the order of events. Invariants: a stream's last event holds the response that is not
//! streamed; `sequence_number` counts events from 0; what is stored is what was answered.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::items::said;
use crate::blocks::{Blocks, Kind, Step};
use crate::error::ApiError;
use crate::events::{CONTENT_FILTER, Delta, EventSink, Finish, Finished, PromptReport, Usage, Writer};
use crate::unix_s;

/// Stores a finished response, with the messages that it says.
pub type Keep = Box<dyn FnOnce(&Value, Vec<Value>) + Send>;
/// Seals what was thought, for the client to carry.
pub type Seal = Box<dyn Fn(&str) -> Option<String> + Send>;

/// Writes one answer.
pub struct ResponseWriter {
    pub id: String,
    /// The response's fields that the request decides.
    repeated: Map<String, Value>,
    keep: Option<Keep>,
    /// See [`ToolUse::namespaces`](crate::tools::ToolUse).
    namespaces: HashMap<String, (String, String)>,
    seal: Option<Seal>,
    blocks: Blocks,
    output: Vec<Value>,
    /// What was written of the item that is open.
    text: String,
    open: bool,
    sequence: u64,
    finish: Option<Finish>,
}

impl ResponseWriter {
    pub fn new(
        id: String,
        repeated: Map<String, Value>,
        keep: Option<Keep>,
        namespaces: HashMap<String, (String, String)>,
        seal: Option<Seal>,
    ) -> Self {
        Self {
            namespaces,
            seal,
            id,
            repeated,
            keep,
            blocks: Blocks::default(),
            output: Vec::new(),
            text: String::new(),
            open: false,
            sequence: 0,
            finish: None,
        }
    }

    /// The response in a state before its end.
    pub fn unfinished(&self, status: &str) -> Value {
        let mut response = self.repeated.clone();
        response.insert("status".into(), status.into());
        response.insert("output".into(), json!([]));
        Value::Object(response)
    }

    /// Why the answer is not complete, if it is not.
    fn cut(&self) -> Option<&'static str> {
        match self.finish.as_ref()?.reason {
            "length" => Some("max_output_tokens"),
            CONTENT_FILTER => Some(CONTENT_FILTER),
            _ => None,
        }
    }

    fn finished(&self, usage: Usage) -> Value {
        let mut response = self.repeated.clone();
        let cut = self.cut();
        let status = if cut.is_some() { "incomplete" } else { "completed" };
        response.insert("status".into(), status.into());
        response.insert("completed_at".into(), if cut.is_some() { Value::Null } else { unix_s().into() });
        if let Some(reason) = cut {
            response.insert("incomplete_details".into(), json!({"reason": reason}));
        }
        if let Some(notes) = self.finish.as_ref().and_then(|finish| finish.safety.clone()) {
            response.insert("safety".into(), notes);
        }
        response.insert("output".into(), self.output.clone().into());
        let figures = json!({
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens.unwrap_or(0)},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        });
        response.insert("usage".into(), figures);
        Value::Object(response)
    }

    /// Stores the finished response with the conversation it belongs to.
    fn keep(&mut self, response: &Value) {
        if let Some(keep) = self.keep.take() {
            keep(response, said(&self.output));
        }
    }

    fn send(&mut self, events: Option<&dyn EventSink>, kind: &str, mut event: Value) {
        let Some(events) = events else { return };
        if let Some(event) = event.as_object_mut() {
            event.insert("type".into(), kind.into());
            event.insert("sequence_number".into(), self.sequence.into());
        }
        self.sequence += 1;
        events.named(kind, &event.to_string());
    }

    fn step(&mut self, step: Step, events: Option<&dyn EventSink>) {
        match step {
            Step::Start(kind) => self.start(kind, events),
            Step::Text(text) => self.more("response.output_text.delta", text, events),
            Step::Thinking(text) => self.more("response.reasoning_text.delta", text, events),
            Step::Input(text) => self.more("response.function_call_arguments.delta", text, events),
            Step::Stop => self.stop(events),
        }
    }

    fn start(&mut self, kind: Kind, events: Option<&dyn EventSink>) {
        let index = self.output.len();
        let name = |prefix: &str| format!("{prefix}_{}_{index}", self.id.trim_start_matches("resp_"));
        let item = match &kind {
            Kind::Text => {
                json!({"type": "message", "id": name("msg"), "status": "in_progress", "role": "assistant", "content": []})
            }
            Kind::Thinking => {
                json!({"type": "reasoning", "id": name("rs"), "status": "in_progress", "summary": [], "content": []})
            }
            Kind::Tool { id, name: function } => {
                let mut item = json!({
                    "type": "function_call", "id": name("fc"), "status": "in_progress", "call_id": id, "name": function, "arguments": "",
                });
                if let Some((namespace, own)) = self.namespaces.get(function) {
                    item["namespace"] = namespace.as_str().into();
                    item["name"] = own.as_str().into();
                }
                item
            }
        };
        self.text.clear();
        self.open = true;
        self.output.push(item.clone());
        self.send(events, "response.output_item.added", json!({"output_index": index, "item": item}));
        if !matches!(kind, Kind::Tool { .. }) {
            let part = part(&item, "");
            let event =
                json!({"item_id": item["id"], "output_index": index, "content_index": 0, "part": part});
            self.send(events, "response.content_part.added", event);
        }
    }

    fn more(&mut self, kind: &str, text: String, events: Option<&dyn EventSink>) {
        self.text.push_str(&text);
        let index = self.output.len().saturating_sub(1);
        let Some(item) = self.output.last() else { return };
        let mut event = json!({"item_id": item["id"], "output_index": index, "delta": text});
        match kind {
            "response.output_text.delta" => {
                event["content_index"] = 0.into();
                event["logprobs"] = json!([]);
            }
            "response.reasoning_text.delta" => event["content_index"] = 0.into(),
            _ => {}
        }
        self.send(events, kind, event);
    }

    fn stop(&mut self, events: Option<&dyn EventSink>) {
        let text = std::mem::take(&mut self.text);
        let index = self.output.len().saturating_sub(1);
        let cut = self.cut().is_some();
        let Some(item) = self.output.last_mut().filter(|_| std::mem::take(&mut self.open)) else { return };
        item["status"] = if cut { "incomplete" } else { "completed" }.into();
        let id = item["id"].clone();
        let mut place = json!({"item_id": id, "output_index": index});
        if item["type"] == "function_call" {
            item["arguments"] = text.as_str().into();
            place["name"] = item["name"].clone();
            place["arguments"] = text.into();
            let item = item.clone();
            self.send(events, "response.function_call_arguments.done", place);
            return self.send(
                events,
                "response.output_item.done",
                json!({"output_index": index, "item": item}),
            );
        }
        let part = part(item, &text);
        item["content"] = json!([part]);
        if let Some(seal) = self.seal.as_ref().filter(|_| item["type"] == "reasoning") {
            item["encrypted_content"] = seal(&text).into();
        }
        let item = item.clone();
        place["content_index"] = 0.into();
        let mut done = place.clone();
        done["text"] = text.into();
        let kind = match item["type"] == "message" {
            true => {
                done["logprobs"] = json!([]);
                "response.output_text.done"
            }
            false => "response.reasoning_text.done",
        };
        self.send(events, kind, done);
        place["part"] = part;
        self.send(events, "response.content_part.done", place);
        self.send(events, "response.output_item.done", json!({"output_index": index, "item": item}));
    }

    fn take(&mut self, delta: &Delta, finish: Option<&Finish>, events: Option<&dyn EventSink>) {
        let mut steps = Vec::new();
        delta.pieces.iter().for_each(|piece| self.blocks.push(piece, &mut steps));
        if let Some(finish) = finish {
            // Items that were complete before stay so.
            steps.drain(..).for_each(|step| self.step(step, events));
            self.finish = Some(finish.clone());
            self.blocks.finish(&mut steps);
        }
        steps.into_iter().for_each(|step| self.step(step, events));
    }
}

fn part(item: &Value, text: &str) -> Value {
    match item["type"] == "message" {
        true => json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []}),
        false => json!({"type": "reasoning_text", "text": text}),
    }
}

impl Writer for ResponseWriter {
    fn opening(&mut self, _: u32, _: &PromptReport, _: Usage, events: &dyn EventSink) {
        let response = self.unfinished("in_progress");
        self.send(Some(events), "response.created", json!({"response": response}));
        self.send(Some(events), "response.in_progress", json!({"response": response}));
    }

    fn delta(&mut self, _: u32, delta: &Delta, finish: Option<&Finish>, _: Usage, events: &dyn EventSink) {
        self.take(delta, finish, Some(events));
    }

    fn closing(&mut self, usage: Usage, events: &dyn EventSink) {
        let response = self.finished(usage);
        self.keep(&response);
        let kind = format!("response.{}", response["status"].as_str().unwrap_or("completed"));
        self.send(Some(events), &kind, json!({"response": response}));
    }

    fn failed(&mut self, error: &ApiError, events: &dyn EventSink) {
        let mut response = self.unfinished("failed");
        response["error"] = failure(error);
        self.send(Some(events), "response.failed", json!({"response": response}));
    }

    fn whole(&mut self, choices: &[Finished], usage: Usage) -> String {
        for choice in choices {
            self.take(&choice.delta, Some(&choice.finish), None);
        }
        let response = self.finished(usage);
        self.keep(&response);
        response.to_string()
    }
}

/// What a response says that failed.
pub fn failure(error: &ApiError) -> Value {
    json!({"code": "server_error", "message": error.message})
}
