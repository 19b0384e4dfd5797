//! Answers: OpenAI's response object, whole and as typed events.
//!
//! Owns: output items in their shape, and the order of events. Invariants: a stream's last event holds the response that is not
//! streamed; `sequence_number` counts events from 0; what is stored is what was answered.
//!
//! Cost: the response repeats its request, in the first two events and the last, and an item's end repeats the item; both grow with what was
//! sent and said, so whoever has it written asks first how much that is (`Writer::repeats`, `Writer::owes`). The end of a long item is put
//! off until then, and what comes behind it with it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use folio_text::work;
use serde_json::{Map, Value, json};

use super::items::said;
use crate::blocks::{BlockKind, BlockStep, Blocks};
use crate::error::ApiError;
use crate::events::{CONTENT_FILTER, Delta, Finish, Finished, PromptReport, StreamSink, Usage, Writer};
use crate::unix_s;

/// Stores a finished response: as JSON, its output items, and the messages that it says.
pub type Keep = Box<dyn FnOnce(Arc<str>, Vec<Value>, Vec<Value>) + Send>;
/// Seals what was thought, for the client to carry.
pub type Seal = Box<dyn Fn(&str) -> Option<String> + Send>;

/// Bytes of an item's text whose end is told at once.
const TOLD_AT_ONCE: usize = 16 << 10;
/// How often a byte of a response is copied where one is written: as a value, as JSON, and into one or two events.
const COPIES: usize = 4;

/// Writes one answer.
pub struct ResponseWriter {
    pub id: String,
    /// The response's fields that the request decides, and their bytes as JSON.
    repeated: Map<String, Value>,
    repeated_bytes: usize,
    keep: Option<Keep>,
    /// See [`ToolUse::namespaces`](crate::tools::ToolUse).
    namespaces: HashMap<String, (String, String)>,
    seal: Option<Seal>,
    blocks: Blocks,
    /// Steps behind the end of a long item, which is the first, each with whether the answer was cut off there.
    put_off: VecDeque<(BlockStep, bool)>,
    output: Vec<Value>,
    /// Bytes of the items' texts.
    said_bytes: usize,
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
        let repeated_bytes = serde_json::to_string(&repeated).map_or(0, |json| json.len());
        work::add(repeated_bytes);
        Self {
            namespaces,
            seal,
            id,
            repeated,
            repeated_bytes,
            keep,
            blocks: Blocks::default(),
            put_off: VecDeque::new(),
            output: Vec::new(),
            said_bytes: 0,
            text: String::new(),
            open: false,
            sequence: 0,
            finish: None,
        }
    }

    /// The response in a state before its end, as JSON.
    pub fn unfinished(&self, status: &str) -> String {
        self.told(self.repeated.clone(), status)
    }

    fn told(&self, mut response: Map<String, Value>, status: &str) -> String {
        response.insert("status".into(), status.into());
        response.entry("output").or_insert_with(|| json!([]));
        let json = Value::Object(response).to_string();
        // As a value, and as JSON.
        work::add(2 * json.len());
        json
    }

    /// Why the answer is not complete, if it is not.
    fn cut(&self) -> Option<&'static str> {
        match self.finish.as_ref()?.reason {
            "length" => Some("max_output_tokens"),
            CONTENT_FILTER => Some(CONTENT_FILTER),
            _ => None,
        }
    }

    /// How the answer ended, and the response.
    fn finished(&self, usage: Usage) -> (&'static str, Arc<str>) {
        let mut response = self.repeated.clone();
        let cut = self.cut();
        let status = if cut.is_some() { "incomplete" } else { "completed" };
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
        (status, self.told(response, status).into())
    }

    /// Stores the finished response with the conversation it belongs to.
    fn keep(&mut self, response: &Arc<str>) {
        if let Some(keep) = self.keep.take() {
            let said = said(&self.output);
            keep(response.clone(), std::mem::take(&mut self.output), said);
        }
    }

    fn send(&mut self, events: Option<&dyn StreamSink>, kind: &str, mut event: Value) {
        let Some(events) = events else { return };
        if let Some(event) = event.as_object_mut() {
            event.insert("type".into(), kind.into());
            event.insert("sequence_number".into(), self.sequence.into());
        }
        self.name(events, kind, &event.to_string());
    }

    /// An event that holds the whole response.
    fn send_response(&mut self, events: &dyn StreamSink, kind: &str, response: &str) {
        let number = self.sequence;
        let event = format!(r#"{{"response":{response},"sequence_number":{number},"type":"{kind}"}}"#);
        self.name(events, kind, &event);
    }

    fn name(&mut self, events: &dyn StreamSink, kind: &str, event: &str) {
        self.sequence += 1;
        work::add(event.len());
        events.named(kind, event);
    }

    fn step(&mut self, step: BlockStep, cut: bool, events: Option<&dyn StreamSink>) {
        match step {
            BlockStep::Start(kind) => self.start(kind, events),
            BlockStep::Text(text) => self.more("response.output_text.delta", text, events),
            BlockStep::Thinking(text) => self.more("response.reasoning_text.delta", text, events),
            BlockStep::Input(text) => self.more("response.function_call_arguments.delta", text, events),
            BlockStep::Stop => self.stop(cut, events),
        }
    }

    fn start(&mut self, kind: BlockKind, events: Option<&dyn StreamSink>) {
        let index = self.output.len();
        let name = |prefix: &str| format!("{prefix}_{}_{index}", self.id.trim_start_matches("resp_"));
        let item = match &kind {
            BlockKind::Text => {
                json!({"type": "message", "id": name("msg"), "status": "in_progress", "role": "assistant", "content": []})
            }
            BlockKind::Thinking => {
                json!({"type": "reasoning", "id": name("rs"), "status": "in_progress", "summary": [], "content": []})
            }
            BlockKind::Tool { id, name: function } => {
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
        if !matches!(kind, BlockKind::Tool { .. }) {
            let part = part(&item, "");
            let event =
                json!({"item_id": item["id"], "output_index": index, "content_index": 0, "part": part});
            self.send(events, "response.content_part.added", event);
        }
    }

    fn more(&mut self, kind: &str, text: String, events: Option<&dyn StreamSink>) {
        self.text.push_str(&text);
        self.said_bytes += text.len();
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

    fn stop(&mut self, cut: bool, events: Option<&dyn StreamSink>) {
        let text = std::mem::take(&mut self.text);
        let index = self.output.len().saturating_sub(1);
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

    fn take(&mut self, delta: &Delta, finish: Option<&Finish>) {
        let mut steps = Vec::new();
        delta.pieces.iter().for_each(|piece| self.blocks.push(piece, &mut steps));
        // Items that were complete before the end stay so.
        self.put_off.extend(steps.drain(..).map(|step| (step, false)));
        if let Some(finish) = finish {
            self.finish = Some(finish.clone());
            self.blocks.finish(&mut steps);
            let cut = self.cut().is_some();
            self.put_off.extend(steps.into_iter().map(|step| (step, cut)));
        }
    }

    /// Writes what was put off, up to the end of an item that is longer than so many bytes.
    fn write(&mut self, events: Option<&dyn StreamSink>, most: usize) {
        while let Some((step, cut)) = self.put_off.pop_front() {
            if matches!(step, BlockStep::Stop) && self.text.len() > most {
                self.put_off.push_front((step, cut));
                return;
            }
            self.step(step, cut, events);
        }
    }
}

fn part(item: &Value, text: &str) -> Value {
    match item["type"] == "message" {
        true => json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []}),
        false => json!({"type": "reasoning_text", "text": text}),
    }
}

impl Writer for ResponseWriter {
    fn opening(&mut self, _: u32, _: &PromptReport, _: Usage, events: &dyn StreamSink) {
        let response = self.unfinished("in_progress");
        self.send_response(events, "response.created", &response);
        self.send_response(events, "response.in_progress", &response);
    }

    fn delta(&mut self, _: u32, delta: &Delta, finish: Option<&Finish>, _: Usage, events: &dyn StreamSink) {
        // Behind an end that is put off everything is.
        let waits = !self.put_off.is_empty();
        self.take(delta, finish);
        if !waits {
            self.write(Some(events), TOLD_AT_ONCE);
        }
    }

    fn closing(&mut self, usage: Usage, events: &dyn StreamSink) {
        self.catch_up(events);
        let (status, response) = self.finished(usage);
        self.keep(&response);
        self.send_response(events, &format!("response.{status}"), &response);
    }

    fn failed(&mut self, error: &ApiError, events: &dyn StreamSink) {
        let mut response = self.repeated.clone();
        response.insert("error".into(), failure(error));
        let response = self.told(response, "failed");
        self.send_response(events, "response.failed", &response);
    }

    fn whole(&mut self, choices: &[Finished], usage: Usage) -> String {
        for choice in choices {
            self.take(&choice.delta, Some(&choice.finish));
        }
        self.write(None, usize::MAX);
        let (_, response) = self.finished(usage);
        self.keep(&response);
        (*response).to_owned()
    }

    fn repeats(&self) -> usize {
        COPIES * (self.repeated_bytes + self.said_bytes)
    }

    fn owes(&self) -> usize {
        if self.put_off.is_empty() { 0 } else { COPIES * self.text.len().max(1) }
    }

    fn catch_up(&mut self, events: &dyn StreamSink) {
        self.write(Some(events), usize::MAX);
    }
}

/// What a response says that failed.
fn failure(error: &ApiError) -> Value {
    json!({"code": "server_error", "message": error.message})
}

/// A response that runs, as it is once it ended before its answer did. O(response).
pub fn ended(response: &str, status: &str, error: Option<&ApiError>) -> String {
    let mut response: Map<String, Value> = serde_json::from_str(response).unwrap_or_default();
    response.insert("status".into(), status.into());
    if let Some(error) = error {
        response.insert("error".into(), failure(error));
    }
    let json = Value::Object(response).to_string();
    work::add(3 * json.len());
    json
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use folio_text::OutputEvent;

    use super::*;

    #[derive(Default)]
    struct EventNames(RefCell<Vec<String>>);

    impl StreamSink for EventNames {
        fn send(&self, _: &str) {}
        fn named(&self, name: &str, _: &str) {
            self.0.borrow_mut().push(name.to_owned());
        }
    }

    /// The end of an item repeats it: where that is long it is written when it is asked for, and nothing before it.
    #[test]
    fn the_end_of_a_long_item_waits_to_be_written_and_what_follows_with_it() {
        let mut writer = ResponseWriter::new("resp_1".into(), Map::new(), None, HashMap::new(), None);
        let told = EventNames::default();
        let thought = OutputEvent::Reasoning("a".repeat(TOLD_AT_ONCE + 1));
        let pieces = |pieces: Vec<OutputEvent>| Delta { pieces, ..Delta::default() };
        writer.delta(0, &pieces(vec![thought]), None, Usage::default(), &told);
        assert_eq!(writer.owes(), 0, "it may go on");
        writer.delta(0, &Delta::text("hi".into()), None, Usage::default(), &told);
        writer.delta(0, &Delta::text(" there".into()), None, Usage::default(), &told);
        assert!(told.0.borrow().last().unwrap() == "response.reasoning_text.delta");
        assert!(writer.owes() > TOLD_AT_ONCE);
        writer.catch_up(&told);
        assert_eq!(writer.owes(), 0);
        let told = told.0.borrow();
        let behind: Vec<&str> = told.iter().skip(3).map(String::as_str).collect();
        assert_eq!(
            behind,
            [
                "response.reasoning_text.done",
                "response.content_part.done",
                "response.output_item.done",
                "response.output_item.added",
                "response.content_part.added",
                "response.output_text.delta",
                "response.output_text.delta",
            ]
        );
    }
}
