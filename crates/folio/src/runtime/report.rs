//! What was decided at start, for people.
//!
//! Owns: the lines that `serve`, `run` and `chat` print. Must never: decide anything.

use std::path::Path;

use folio_model::backend::{GroupKind, KvFormat, KvLayout};
use folio_model::{Checkpoint, LoadedModel};
use folio_text::ChatTemplate;

use super::Pair;
use super::draft::Draft;
use crate::cli::Quantize;
use crate::memory;
use crate::models::Source;
use crate::packed_cache::Unsaved;
use crate::units;

/// What was decided at start, for people.
#[derive(Clone, Debug)]
pub struct StartReport {
    /// (what, text), in order.
    pub lines: Vec<(&'static str, String)>,
    pub backend: String,
    pub threads: usize,
    /// "2 threads", "NVIDIA H200, 140 GiB".
    pub device: String,
    pub on_gpu: bool,
    pub weight_bytes: u64,
    pub kv_blocks: u32,
    pub kv_bytes: u64,
}

/// Of a checkpoint with parts that are not served: "vision tower, 123 tensors; this model answers text only".
fn skipped(checkpoint: &Checkpoint) -> Option<String> {
    let towers = checkpoint.skipped_towers();
    let told = towers
        .iter()
        .map(|(tower, count)| format!("{}, {} tensors", tower.name(), units::count(*count as u64)));
    let told: Vec<String> = told.collect();
    (!told.is_empty()).then(|| format!("{}; this model answers text only", told.join(", ")))
}

/// "int8", or "int8 (2 of 28 layers bf16)".
pub(crate) fn formats(layout: &KvLayout) -> String {
    let kv = layout.groups.iter().filter(|group| group.state_values().is_none());
    let layers: Vec<KvFormat> = kv.flat_map(|group| group.formats.iter().copied()).collect();
    let count = |format: &KvFormat| layers.iter().filter(|other| *other == format).count();
    let mut formats: Vec<KvFormat> = KvFormat::ALL.into_iter().filter(|format| count(format) > 0).collect();
    formats.sort_by_key(|format| std::cmp::Reverse(count(format)));
    let others =
        formats.iter().skip(1).map(|format| format!("{} of {} layers {format}", count(format), layers.len()));
    let others: Vec<String> = others.collect();
    match formats.first() {
        Some(most) if others.is_empty() => most.to_string(),
        Some(most) => format!("{most} ({})", others.join(", ")),
        None => "no layers".to_owned(),
    }
}

impl StartReport {
    pub(super) fn describe(
        &mut self,
        source: &Source,
        checkpoint: &Checkpoint,
        model: &LoadedModel,
        pool: &memory::Pool,
        free: Option<&memory::FreeMemory>,
        template: Option<&ChatTemplate>,
    ) {
        let family = model.config.family.model_type;
        let parameters = units::parameters(model.parameters);
        self.lines.push((
            "model",
            format!("{} ({family}, {parameters} parameters) from {}", source.name(), checkpoint.location()),
        ));
        self.lines.extend(skipped(checkpoint).map(|text| ("skipped", text)));
        self.lines.push((
            "weights",
            format!(
                "{} as {} on {}, {}",
                units::bytes(self.weight_bytes),
                model.weight_encoding,
                self.backend,
                self.device
            ),
        ));
        let context = units::count(model.max_model_len as u64);
        self.lines.push(("context", format!("{context} tokens")));
        let layout = &model.kv_layout;
        let tokens = u64::from(pool.blocks) * layout.block_tokens() as u64;
        self.lines.push((
            "KV cache",
            format!(
                "{} = {} tokens in {} blocks of {}, {}, {} per token: {}",
                units::bytes(pool.bytes),
                units::count(tokens),
                units::count(pool.blocks.into()),
                layout.block_tokens(),
                formats(layout),
                units::bytes(layout.bytes_per_token() as u64),
                pool.why
            ),
        ));
        for (group, window) in layout.groups.iter().skip(1).zip(&pool.windows) {
            let bytes = u64::from(window.blocks) * window.bytes_per_block;
            if group.state_values().is_some() {
                self.lines.push((
                    "states",
                    format!(
                        "{} of that for {} layers that keep a state: {} of {}, kept every {} tokens and where a conversation ends",
                        units::bytes(bytes),
                        group.layers(),
                        units::count(window.blocks.into()),
                        units::bytes(window.bytes_per_block),
                        units::count(window.block_tokens.into()),
                    ),
                ));
            }
            let GroupKind::Window { tokens } = group.kind else { continue };
            self.lines.push((
                "window",
                format!(
                    "{} of that for {} layers that see {} tokens: {} blocks of {}, in step with the rest at half the context",
                    units::bytes(bytes),
                    group.layers(),
                    units::count(tokens.into()),
                    units::count(window.blocks.into()),
                    window.block_tokens,
                ),
            ));
        }
        if let Some(free) = free {
            let after = match free.bytes.checked_sub(pool.bytes) {
                Some(left) => format!("{} will be left", units::bytes(left)),
                None => format!(
                    "weights of {} do not fit beside the KV cache: what lacks is read from their file whenever it is needed, which is slow",
                    units::bytes(self.weight_bytes)
                ),
            };
            self.lines.push(("memory", format!("{} {}; {after}", units::bytes(free.bytes), free.source)));
        }
        self.lines.push((
            "template",
            match template {
                Some(template) => template.origin().to_owned(),
                None => "none: chat is refused, plain completions work".to_owned(),
            },
        ));
    }

    /// The model that proposes drafts, and its part of the KV cache.
    pub(super) fn describe_draft(&mut self, draft: Option<&Draft>, pool: &memory::Pool) {
        let Some(draft) = draft else { return };
        let own = pool.windows.iter().filter(|group| group.optional);
        let bytes: u64 = own.map(|group| u64::from(group.blocks) * group.bytes_per_block).sum();
        let (weights, bytes) = (units::bytes(draft.device.weight_bytes()), units::bytes(bytes));
        let text = format!("by {}: {weights} of weights, and {bytes} of the KV cache", draft.name);
        let at = self.lines.iter().rposition(|(what, _)| matches!(*what, "KV cache" | "window" | "states"));
        self.lines.insert(at.map_or(self.lines.len(), |at| at + 1), ("drafts", text));
    }

    /// How often the model and what drafts for it say the same.
    pub(super) fn describe_pair(&mut self, pair: Option<&Pair>) {
        let line = self.lines.iter_mut().find(|(what, _)| *what == "drafts");
        let (Some(pair), Some((_, text))) = (pair, line) else { return };
        *text += &format!("; {}", pair.sentence());
    }

    /// Memory beside the device's for KV.
    pub(super) fn describe_host_kv(&mut self, bytes: u64, is_gpu: bool) {
        let mut text = format!("KV of requests that ended or were preempted, up to {}", units::bytes(bytes));
        if !is_gpu {
            text += ", copied from memory to memory: the same size added to --kv-cache-memory serves better";
        }
        let at = self.lines.iter().rposition(|(what, _)| matches!(*what, "KV cache" | "window" | "states"));
        self.lines.insert(at.map_or(self.lines.len(), |at| at + 1), ("host", text));
    }

    /// Where KV goes that the device cannot keep.
    pub(super) fn describe_disk_kv(&mut self, dir: &Path, bytes: u64, is_shared: bool) {
        let others = if is_shared { ", and what other servers have there" } else { "" };
        let (most, dir) = (units::bytes(bytes), dir.display());
        let text = format!("KV of requests that ended, up to {most}, in {dir}{others}");
        let at = self.lines.iter().rposition(|(what, _)| matches!(*what, "KV cache" | "window" | "states"));
        self.lines.insert(at.map_or(self.lines.len(), |at| at + 1), ("disk", text));
    }

    /// Which server keeps KV that the device cannot.
    pub(super) fn describe_remote_kv(&mut self, kind: &'static str, server: &str) {
        let text = format!("KV of requests that ended, sealed, with {server}");
        let at = self.lines.iter().rposition(|(what, _)| matches!(*what, "KV cache" | "window" | "states"));
        self.lines.insert(at.map_or(self.lines.len(), |at| at + 1), (kind, text));
    }

    /// Where the packed weights come from, or go to.
    pub(super) fn describe_packed(&mut self, mapped: Option<&Path>, unsaved: Option<&Unsaved>) {
        let text = match (mapped, unsaved) {
            (Some(file), _) => format!("mapped from {}", file.display()),
            (None, Some(unsaved)) => format!("now; the next start maps {}", unsaved.path().display()),
            (None, None) => return,
        };
        self.after_weights("packed", text);
    }

    fn after_weights(&mut self, what: &'static str, text: String) {
        let at = self.lines.iter().position(|(what, _)| *what == "weights").map_or(0, |at| at + 1);
        self.lines.insert(at, (what, text));
    }

    /// What `--quantize` did, now or when the weights were packed.
    pub(super) fn describe_quantized(
        &mut self,
        asked: Option<Quantize>,
        before: bool,
        quantized: folio_cpu::Quantized,
    ) {
        let Some(to) = asked else { return };
        let format = to.packed().format();
        if before {
            return self.after_weights("quantized", format!("to {format:?}, when they were packed"));
        }
        let mut text = format!("{} matrices to {format:?} while loading", quantized.matrices);
        if quantized.kept_plain > 0 {
            text += &format!("; {} stayed as they are: columns not a multiple of 32", quantized.kept_plain);
        }
        self.after_weights("quantized", text);
    }

    /// Prints to standard error, aligned.
    pub fn print(&self) {
        eprintln!("folio {}", env!("CARGO_PKG_VERSION"));
        for (what, text) in &self.lines {
            eprintln!("  {what:<9} {text}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_of_layers_are_told_in_a_word_where_they_are_one() {
        let mut layout = KvLayout::full(3, 1, 64, KvFormat::Int8, 16);
        assert_eq!(formats(&layout), "int8");
        layout.groups[0].formats[1] = KvFormat::BF16;
        assert_eq!(formats(&layout), "int8 (1 of 3 layers bf16)");
        assert_eq!(formats(&KvLayout { groups: vec![] }), "no layers");
    }

    #[test]
    fn a_tower_that_is_skipped_is_said_so() {
        let told = |name: &str| {
            let checkpoint = Checkpoint::open(folio_model::testing::fixture(name)).expect("a fixture");
            skipped(&checkpoint)
        };
        let expected = "vision tower, 15 tensors; this model answers text only";
        assert_eq!(told("mistral3").as_deref(), Some(expected));
        assert_eq!(told("mistral"), None);
    }
}
