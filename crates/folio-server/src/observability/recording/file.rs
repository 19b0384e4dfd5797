//! A recording as a file: Chrome's trace events, which Perfetto opens, with all that `folio trace replay` reads in their arguments.
//!
//! Owns: the format, version [`VERSION`] (`docs/traces.md`). Its reader is `folio_sim::recorded`; a change of one is a change of both.
//!
//! A request has a track of its own: the whole of it, and within it queue, prefill, decode and preemptions. The engine has one with what its
//! steps did between two samples, and counters. Times are microseconds since the recording began.

use folio_engine::{Activity, FinishReason, Micros, StepWork};
use serde_json::{Value, json};

use super::{NumberedAnswer, RecordedSample, Recording};

/// Of the format; whoever reads another refuses it.
pub const VERSION: u32 = 1;
/// Perfetto's processes: those who ask, and who answers.
const REQUESTS: u32 = 1;
const ENGINE: u32 = 2;

impl Recording {
    /// `model`: its served name.
    pub fn json(&self, model: &str) -> String {
        let mut events = vec![
            named("process_name", REQUESTS, 0, "requests"),
            named("process_name", ENGINE, 0, "engine"),
            named("thread_name", ENGINE, 1, "steps"),
        ];
        for pair in self.samples.windows(2) {
            self.steps(&mut events, &pair[0], &pair[1]);
        }
        for (index, answer) in self.answers.iter().enumerate() {
            self.answer(&mut events, index as u32 + 1, answer);
        }
        let limits = &self.limits;
        let told = self.answers.len() as u64 + self.left_out;
        let file = json!({
            "displayTimeUnit": "ms",
            "otherData": {
                "format": "folio-trace",
                "version": VERSION,
                "folio": env!("CARGO_PKG_VERSION"),
                "model": model,
                "seconds": self.since(self.to) as f64 / 1e6,
                "requests": self.answers.len(),
                "unfinished": self.submitted.saturating_sub(told),
                "left_out": self.left_out,
                "blocks": self.blocks,
                "block_tokens": self.block_tokens,
                "bytes_per_block": self.bytes_per_block,
                "max_num_seqs": limits.max_num_seqs,
                "max_num_batched_tokens": limits.max_num_batched_tokens,
                "max_prefill_while_decoding": limits.max_prefill_tokens_while_decoding,
                "max_model_len": limits.max_model_len,
            },
            "traceEvents": events,
        });
        file.to_string()
    }

    fn since(&self, at: Micros) -> u64 {
        at.0.saturating_sub(self.from.0)
    }

    /// What steps did between two samples.
    fn steps(&self, events: &mut Vec<Value>, before: &RecordedSample, after: &RecordedSample) {
        let ts = self.since(after.at);
        events.push(counter("sequences", ts, json!({"running": after.running, "waiting": after.waiting})));
        let blocks = json!({"held": after.active_blocks, "cached": after.cached_blocks});
        events.push(counter("KV blocks", ts, blocks));
        let kinds = [Activity::Prefill, Activity::Decode, Activity::Mixed];
        let done = kinds.map(|kind| {
            let index = kind as usize;
            let work = after.work.steps[index].since(&before.work.steps[index]);
            (kind, work, after.work.us(kind) - before.work.us(kind))
        });
        let steps: u64 = done.iter().map(|(_, work, _)| work.steps).sum();
        if steps == 0 {
            return;
        }
        let args: serde_json::Map<String, Value> = done
            .iter()
            .filter(|(_, work, _)| work.steps > 0)
            .map(|(kind, work, us)| (kind.name().to_owned(), work_json(work, *us)))
            .collect();
        let mostly = done.iter().max_by_key(|(.., us)| *us).map_or("steps", |(kind, ..)| kind.name());
        let from = self.since(before.at);
        events.push(json!({
            "ph": "X", "cat": "folio.steps", "pid": ENGINE, "tid": 1,
            "name": format!("{steps} steps, mostly {mostly}"), "ts": from, "dur": ts - from, "args": args,
        }));
    }

    fn answer(&self, events: &mut Vec<Value>, number: u32, answer: &NumberedAnswer) {
        let NumberedAnswer { timing, numbered, .. } = answer;
        events.push(named("thread_name", REQUESTS, number, &format!("request {number}")));
        let (from, to) = (answer.submitted, timing.finished.max(answer.submitted));
        let waited = timing.waited_us.iter().map(|(reason, us)| (reason.name().to_owned(), json!(us)));
        let mut slice = |category: &str, name: &str, (from, to): (Micros, Micros), args: Value| {
            let (ts, end) = (self.since(from), self.since(to.max(from)));
            events.push(json!({
                "ph": "X", "cat": category, "pid": REQUESTS, "tid": number,
                "name": name, "ts": ts, "dur": end - ts, "args": args,
            }));
        };
        let args = json!({
            "tenant": answer.tenant,
            "prompt_tokens": answer.prompt_tokens,
            "cached_tokens": answer.cached_tokens,
            "output_tokens": answer.output_tokens,
            "max_tokens": answer.max_tokens,
            "finished": reason(answer.reason),
            "first_token": (timing.first_token > Micros(0)).then(|| self.since(timing.first_token)),
            "preemptions": timing.preemptions,
            "draft_tokens": timing.draft_tokens,
            "accepted_draft_tokens": timing.accepted_draft_tokens,
            "waited_us": waited.collect::<serde_json::Map<String, Value>>(),
            "prompt_blocks": numbered.prompt,
            "prompt_tail": numbered.tail,
            "output_blocks": numbered.output,
        });
        slice("folio.request", &format!("tenant {}", answer.tenant), (from, to), args);
        let marks = [from, timing.scheduled, timing.first_token, to];
        for (name, pair) in ["queue", "prefill", "decode"].into_iter().zip(marks.windows(2)) {
            // What did not begin, or did not end, is not shown.
            if pair[0] > Micros(0) && pair[1] >= pair[0] {
                slice("folio.phase", name, (pair[0], pair[1]), json!({}));
            }
        }
        for (gone, back) in timing.pauses.into_iter().filter(|(gone, _)| *gone > Micros(0)) {
            let back = if back > Micros(0) { back } else { to };
            slice("folio.phase", "preempted", (gone, back), json!({}));
        }
    }
}

fn reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Cancelled => "cancelled",
        FinishReason::Deadline => "deadline",
        FinishReason::Error => "error",
    }
}

fn work_json(work: &StepWork, us: u64) -> Value {
    json!({
        "steps": work.steps,
        "us": us,
        "sequences": work.sequences,
        "rows": work.rows(),
        "logit_rows": work.logit_rows,
        "kv_positions": work.kv_positions,
        "attention": work.attention,
    })
}

fn named(what: &str, process: u32, thread: u32, name: &str) -> Value {
    json!({"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}})
}

fn counter(name: &str, ts: u64, args: Value) -> Value {
    json!({"ph": "C", "name": name, "pid": ENGINE, "tid": 0, "ts": ts, "args": args})
}
