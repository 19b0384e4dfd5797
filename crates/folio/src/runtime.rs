//! Options to a running engine: the one place where a checkpoint, a backend, a cache and a scheduler are put together.
//!
//! Owns: the order (resolve, open, pack, size the pool, start) and the report of what was decided and why. Used by serve,
//! chat, run and bench alike.

mod agreement;
mod draft;
mod pair;
mod plan;
mod report;
mod tier;
mod weights;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use agreement::{PoolShape, Questions};
use anyhow::{Context, Result, bail};
use folio_engine::engine::EngineParts;
use folio_engine::{
    Clock, DRAFTS_MAX, Drafter, EngineHandle, EventFeed, Executor, ModelExecutor, SchedulerConfig,
    Speculation, SystemClock, Tier,
};
use folio_kv::{CacheConfig, GroupConfig, KvCache, Layout, QuotaError, default_policy};
use folio_model::backend::{GroupKind, KvGroup, KvLayout};
use folio_model::hub::Held;
use folio_model::{Checkpoint, Config, LoadedModel};
use folio_server::Declared;
use folio_text::{AnswerFormats, ChatInput, ChatTemplate, TemplateSources, Tokenizer};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::cli::{EngineArgs, Quantize, Sizes};
use crate::load_format::LoadFormat;
use crate::memory::{self, PoolRequest};
use crate::packed_cache::{Saving, Unsaved};
pub use agreement::Agreement;
use draft::Draft;
pub use draft::DraftCost;

pub use pair::Pair;
pub use plan::{MemoryPlan, computes_on_a_gpu, weight_files};
pub use report::StartReport;
pub(crate) use report::formats;
pub(crate) use weights::kv_dtype;
pub use weights::{Loaded, WeightArgs, Weights, pack};

/// A model in memory with its engine running.
pub struct Runtime {
    pub engine: EngineHandle,
    pub tokenizer: Arc<Tokenizer>,
    pub template: Option<Arc<ChatTemplate>>,
    pub model: LoadedModel,
    pub name: String,
    /// See [`Weights::format`].
    pub format: String,
    pub layout_digest: [u8; 32],
    pub report: StartReport,
    /// What computes can add adapters to the model.
    pub serves_adapters: bool,
    /// Where drafts come from for a request that says nothing of it.
    pub drafter: Option<Drafter>,
    /// How well what drafts fits the model, where it is a model or a head.
    pub pair: Option<Pair>,
    /// What a draft costs, where a model or a head proposes it.
    pub draft_cost: Option<DraftCost>,
    /// Packed weights on their way to the disk.
    saving: Option<Saving>,
    /// KV off the device, the nearest first.
    tiers: Vec<Arc<dyn Tier>>,
    /// What was downloaded of this model and its draft model stays while they are served.
    _held: Vec<Held>,
}

impl Runtime {
    pub fn start(model: Option<&str>, args: &EngineArgs) -> Result<Self> {
        args.refuse_tiers()?;
        Self::serving(Loaded::open(model, args)?, args, &Declared::default(), None)
    }

    /// Starts the engine for these tenants; `args` are those the model was loaded with. `events`: where what becomes of the cache's content is
    /// told.
    pub fn serving(
        loaded: Loaded,
        args: &EngineArgs,
        tenants: &Declared,
        events: Option<Arc<EventFeed>>,
    ) -> Result<Self> {
        Self::serving_with(loaded, args, tenants, events, Arc::new(SystemClock::new()))
    }

    /// The same with another clock.
    pub fn serving_with(
        loaded: Loaded,
        args: &EngineArgs,
        tenants: &Declared,
        events: Option<Arc<EventFeed>>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        let Loaded { weights, source, checkpoint, mut held, tokenizer, template, head } = loaded;
        let Weights { backend: mut device, model, format, quantized, here, mapped, unsaved } = weights;
        let max_model_len = u32::try_from(model.max_model_len).context("the model's context length")?;
        let tenant_weights = tenants.weights();
        let sizes = args.sizes(device.is_gpu());
        let drafter = args.drafter(head.as_ref().map(|head| head.drafter))?;
        let mut config = SchedulerConfig { tenant_weights, ..scheduler_config(args, &sizes, max_model_len) };
        let mut draft = match &head {
            Some(head) => {
                let of = (&checkpoint, source.name());
                Some(Draft::of_head(head, args, &sizes, of, model.max_model_len)?)
            }
            None => Draft::load(args, &tokenizer)?,
        };
        held.extend(draft.iter_mut().flat_map(|draft| std::mem::take(&mut draft.held)));
        let free = device.free_memory();
        let request = PoolRequest {
            asked_bytes: args.kv_cache_memory,
            share: sizes.kv_cache_share,
            free: free.clone(),
            bytes_per_block: model.kv_layout.groups[0].bytes_per_block() as u64,
            windows: windows(&model.kv_layout, &draft.as_ref().map(Draft::groups).unwrap_or_default())?,
            block_tokens: args.block_size,
            max_model_len,
            max_num_seqs: sizes.max_num_seqs,
            max_num_batched_tokens: sizes.max_num_batched_tokens,
        };
        let pool = memory::pool(&request)?;
        // A disk that stops answering keeps no more than that from others.
        config.max_transfer_bytes = pool.bytes / 2;
        config.max_prefetch_bytes = pool.bytes / 8;
        config.max_store_bytes = memory::store_bytes(pool.bytes);
        let left = match device.as_cpu() {
            Some(_) => free.as_ref().map(|free| free.bytes.saturating_sub(pool.bytes)),
            // The pool is the device's.
            None => memory::free().map(|free| free.bytes),
        };
        memory::host_kv(args.host_kv_memory.unwrap_or(0), left)?;
        let mut report = StartReport {
            lines: Vec::new(),
            backend: device.name(),
            threads: device.threads(),
            device: device.described(),
            on_gpu: device.is_gpu(),
            weight_bytes: device.weight_bytes(),
            kv_blocks: pool.blocks,
            kv_bytes: pool.bytes,
        };
        report.describe(&source, &checkpoint, &model, &pool, free.as_ref(), template.as_deref());
        report.describe_draft(draft.as_ref(), &pool);
        report.describe_packed(mapped.as_deref(), unsaved.as_ref());
        report.describe_quantized(quantized, mapped.is_some(), here);
        let groups = model.kv_layout.groups.len();
        let windows = pool.windows[..groups - 1].iter().map(|window| window.blocks);
        let blocks: Vec<usize> = std::iter::once(pool.blocks).chain(windows).map(|n| n as usize).collect();
        device.allocate_cache(&model.kv_layout, &blocks)?;

        let mut cache = KvCache::with_groups(
            CacheConfig {
                blocks: pool.blocks,
                block_tokens: args.block_size,
                bytes_per_block: model.kv_layout.groups[0].bytes_per_block() as u64,
            },
            &pool.windows,
            default_policy(depth_cost(&model.config, args.block_size)),
        );
        divide(&mut cache, tenants)?;
        let layout_digest = layout_digest(&model.kv_layout, &device.numerics(), quantized);
        let serves_adapters = device.serves_adapters();
        let tiers = tier::open(args, &device, &cache, &layout_digest, &mut report)?;
        let model_executor = ModelExecutor::new(
            device.into_backend(),
            model.vocab,
            sizes.max_num_batched_tokens as usize,
            logit_rows(&sizes),
        );
        let draft_cost = draft.as_ref().map(Draft::cost);
        let (executor, pair): (Box<dyn Executor>, _) = match draft {
            Some(draft) => {
                let first = PoolShape { block_tokens: args.block_size, blocks: pool.blocks };
                let of_group =
                    |of: &GroupConfig| PoolShape { block_tokens: of.block_tokens, blocks: of.blocks };
                let pools: Vec<PoolShape> =
                    [first].into_iter().chain(pool.windows.iter().map(of_group)).collect();
                let (name, by) = (draft.name.clone(), draft.drafter);
                // What weights that are made up say means nothing.
                let questions = match args.load_format {
                    LoadFormat::Auto => {
                        pair::questions(&tokenizer, template.as_deref(), &model.eos_token_ids)?
                    }
                    LoadFormat::Dummy(_) => Questions::default(),
                };
                let (executor, found) =
                    draft.executor(model_executor, &pools, &sizes, model.vocab, &questions)?;
                (executor, found.filter(|found| found.places > 0).map(|found| Pair::new(name, by, found)))
            }
            None => (Box::new(model_executor), None),
        };
        report.describe_pair(pair.as_ref());
        if let Some(doubt) = pair.as_ref().and_then(|pair| pair.doubt.as_ref()) {
            tracing::warn!("{doubt}");
        }
        let engine = folio_engine::start(EngineParts {
            config,
            cache,
            executor,
            clock,
            vocab: u32::try_from(model.vocab).context("the model's vocabulary")?,
            tiers: tiers.clone(),
            events,
        })?;
        let saving = unsaved.map(Unsaved::save_behind);
        let name = source.name();
        drop(checkpoint);
        folio_cpu::trim_heap();
        Ok(Self {
            engine,
            tokenizer,
            template,
            name,
            format,
            layout_digest,
            report,
            serves_adapters,
            pair,
            model,
            drafter,
            draft_cost,
            saving,
            tiers,
            _held: held,
        })
    }

    /// How a request that says nothing of it is speculated on.
    pub fn speculation(&self, prompt: &[u32]) -> Option<Speculation> {
        self.drafter.map(|drafter| Speculation::new(drafter, DRAFTS_MAX, prompt, &[]))
    }

    /// Waits for the engine to end, and then for KV to be stored, for `patience` at most.
    pub fn join(&self, patience: Duration) {
        self.engine.join();
        let end = Instant::now() + patience;
        self.tiers.iter().for_each(|tier| tier.close(end.saturating_duration_since(Instant::now())));
    }

    /// Waits until packed weights are kept, where they are being written.
    pub fn finish(mut self) {
        if let Some(saving) = self.saving.take() {
            saving.finish();
        }
    }

    /// Most tokens of one sequence.
    pub fn max_model_len(&self) -> u32 {
        self.engine.config().max_model_len
    }
}

/// The groups but the first, without their pools: the windows and states of a layout, and behind them what a drafter needs.
pub(crate) fn windows(layout: &KvLayout, draft: &[GroupConfig]) -> Result<Vec<GroupConfig>> {
    let window = |(group, kv): (usize, &KvGroup)| match kv.kind {
        GroupKind::Window { tokens } => {
            let (size, bytes) = (kv.block_tokens as u32, kv.bytes_per_block() as u64);
            Ok(GroupConfig::window(tokens, 0, size, bytes))
        }
        GroupKind::State { .. } => {
            let (block_tokens, bytes_per_block) = (kv.block_tokens as u32, kv.bytes_per_block() as u64);
            Ok(GroupConfig {
                layout: Layout::State,
                blocks: 0,
                block_tokens,
                bytes_per_block,
                optional: false,
            })
        }
        kind => bail!("cache group {group} is {kind:?}: only the first may have no window"),
    };
    let (groups, most) = (layout.groups.len(), folio_kv::MAX_GROUPS);
    if groups + draft.len() > most {
        let more = if draft.is_empty() { String::new() } else { format!(", what drafts {}", draft.len()) };
        bail!("the model has {groups} kinds of layers{more}: at most {most} are possible");
    }
    let windows = layout.groups.iter().enumerate().skip(1).map(window);
    windows.chain(draft.iter().copied().map(Ok)).collect()
}

/// Guarantees and ceilings of the tenants file; a wrong one is named as the file names its owner.
fn divide(cache: &mut KvCache, tenants: &Declared) -> Result<()> {
    let quotas = tenants.quotas(cache.config().blocks);
    cache.set_quotas(&quotas).map_err(|error| {
        let whose = match error {
            QuotaError::GuaranteeAboveCeiling { tenant, .. } | QuotaError::Ceiling { tenant, .. } => {
                tenants.name(tenant)
            }
            QuotaError::Guarantees { .. } => None,
        };
        let whose = whose.map_or(String::new(), |name| format!(" of {name:?}"));
        anyhow::anyhow!("the tenants file: guarantee and ceiling{whose}: {error}")
    })
}

/// What attention over one earlier block adds to the cost of computing a block, as a share of that: the multiply-adds of
/// attention per key against those of the weights.
pub(crate) fn depth_cost(config: &Config, block_tokens: u32) -> f64 {
    let [weights, of_key] = config.attention_costs();
    let chosen = config.experts.map_or(1.0, |experts| experts.chosen as f64);
    let weights = weights + 3.0 * config.hidden as f64 * chosen * config.intermediate as f64;
    f64::from(block_tokens) * of_key / weights
}

/// Rows of logits in one forward pass: every sequence samples one, but a large vocabulary times thousands of sequences
/// would take gigabytes. The executor splits what does not fit.
fn logit_rows(sizes: &Sizes) -> usize {
    sizes.max_num_seqs.min(256) as usize
}

fn scheduler_config(args: &EngineArgs, sizes: &Sizes, max_model_len: u32) -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: sizes.max_num_seqs,
        max_num_batched_tokens: sizes.max_num_batched_tokens,
        max_prefill_tokens_while_decoding: sizes.max_prefill_while_decoding,
        max_model_len,
        max_queued_requests: args.max_queued_requests,
        max_queued_tokens: args.max_queued_tokens,
        max_prefetch_requests: args.kv_prefetch_requests,
        max_adapters: args.max_adapters,
        max_resident_adapters: args.max_resident_adapters,
        max_adapter_bytes: args.max_adapter_bytes,
        guarantee_completion: args.guarantee_completion,
        admission: args.admission,
        pin_permille: permille(args.max_pinned_share),
        // What one pins others cannot: half is left to them.
        tenant_pin_permille: permille(
            args.max_pinned_share_per_tenant.unwrap_or(args.max_pinned_share / 2.0),
        ),
        ..SchedulerConfig::default()
    }
}

/// A share is 0 to 1.
fn permille(share: f64) -> u32 {
    (share * 1000.0).round() as u32
}

pub fn load_tokenizer(checkpoint: &Checkpoint) -> Result<Tokenizer> {
    if let Some(metadata) = checkpoint.gguf() {
        return Ok(Tokenizer::from_gguf(metadata)?);
    }
    if let Some(folder) = checkpoint.folder() {
        return Ok(Tokenizer::from_folder(folder)?);
    }
    let json = checkpoint.read("tokenizer.json")?.context("the built-in model has no tokenizer.json")?;
    let config = checkpoint.read("tokenizer_config.json")?;
    Ok(Tokenizer::from_bytes(&json, config.as_deref())?)
}

/// The checkpoint's chat template, or that of `file`.
pub fn load_template(
    checkpoint: &Checkpoint,
    tokenizer: &Tokenizer,
    file: Option<&Path>,
) -> Result<Option<ChatTemplate>> {
    let mut sources = match (checkpoint.gguf(), checkpoint.folder()) {
        (Some(metadata), _) => TemplateSources::from_gguf(metadata)?,
        (None, Some(folder)) => TemplateSources::from_folder(folder)?,
        (None, None) => TemplateSources::from_config(checkpoint.read("tokenizer_config.json")?.as_deref())?,
    };
    let file = match file {
        Some(path) => {
            let text =
                std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            Some((text, path.display().to_string()))
        }
        None if checkpoint.folder().is_none() => {
            let text = checkpoint.read("chat_template.jinja")?;
            text.map(|text| (String::from_utf8_lossy(&text).into_owned(), "chat_template.jinja".to_owned()))
        }
        None => None,
    };
    if let Some((text, origin)) = file {
        sources = TemplateSources::default();
        sources.add("default", &text, &origin);
    }
    Ok(ChatTemplate::compile(sources, tokenizer.special_tokens())?)
}

/// Prompt ids of a conversation in OpenAI's messages, at most so many bytes of text.
pub fn chat_prompt(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    messages: &[Value],
    now_unix_s: i64,
    bytes_max: usize,
) -> Result<Vec<u32>> {
    let prompt = template.render(&ChatInput {
        messages,
        tools: None,
        documents: None,
        add_generation_prompt: true,
        kwargs: &serde_json::Map::new(),
        now_unix_s,
        formats: AnswerFormats::default(),
    })?;
    // The template writes the special tokens itself.
    Ok(tokenizer.encode_prompt(&prompt, false, bytes_max)?)
}

/// Identity of KV bytes besides the model's: geometry, element type and the arithmetic that makes them
/// ([`Backend::numerics`](folio_model::backend::Backend::numerics)), so that no cached byte outlives it.
fn layout_digest(layout: &KvLayout, numerics: &str, quantize: Option<Quantize>) -> [u8; 32] {
    let decoder = folio_model::decoder::NUMERICS;
    let mut text = format!("folio kv layout: decoder {decoder}, {numerics}");
    for KvGroup { kind, block_tokens, kv_heads, head_dim, formats } in &layout.groups {
        text += &format!(
            ", {kind:?} in blocks of {block_tokens}, {kv_heads} heads, {head_dim} dims, {formats:?}"
        );
    }
    if let Some(to) = quantize {
        text += &format!(", weights quantized to {to:?} while loading");
    }
    Sha256::digest(text.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use folio_cpu::{CpuBackend, CpuOptions, Isa};
    use folio_model::backend::{Backend, DType};
    use folio_model::kv_format::KvFormat;
    use folio_model::{LoadOptions, Model};

    use super::weights::kv_dtype;
    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        engine: EngineArgs,
    }

    #[test]
    fn the_limit_of_pins_is_the_operators() {
        let config = |flags: &[&str]| {
            let flags = Flags::try_parse_from([&["folio"], flags].concat());
            flags
                .map(|flags| scheduler_config(&flags.engine, &flags.engine.sizes(false), 160))
                .map_err(|error| error.to_string())
        };
        let kv = CacheConfig { blocks: 100, block_tokens: 16, bytes_per_block: 1 };
        let limits = |flags: &[&str]| {
            let limits = config(flags).expect("valid").pin_limits(&kv);
            (limits.pool, limits.tenant)
        };
        assert_eq!(limits(&[]), (25, 12));
        assert_eq!(limits(&["--max-pinned-share", "0.5"]), (50, 25));
        assert_eq!(limits(&["--max-pinned-share", "0.5", "--max-pinned-share-per-tenant", "0.1"]), (50, 10));
        assert_eq!(limits(&["--max-pinned-share", "1"]), (90, 50), "the longest request fits beside");
        assert_eq!(limits(&["--max-pinned-share", "1", "--max-pinned-share-per-tenant", "1"]), (90, 90));
        assert_eq!(limits(&["--max-pinned-share", "0"]), (0, 0));
        for wrong in ["1.5", "-0.1", "NaN", "many"] {
            let error = config(&[&format!("--max-pinned-share={wrong}")]).expect_err(wrong);
            assert!(error.contains("--max-pinned-share"), "{error}");
        }
    }

    /// The `folio-model` fixture of that name.
    fn gguf(name: &str) -> Checkpoint {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../folio-model/tests/gguf");
        Checkpoint::open(folder.join(name)).expect("opens")
    }

    #[test]
    fn a_gguf_file_brings_its_tokenizer_and_template() {
        let checkpoint = gguf("smollm2");
        let tokenizer = load_tokenizer(&checkpoint).expect("tokenizer");
        assert_eq!(tokenizer.encode("the<|im_end|>", true, 100).expect("encodes"), [1, 7, 4]);
        let template = load_template(&checkpoint, &tokenizer, None).expect("loads");
        let origin = template.expect("there is one").origin().to_owned();
        assert!(origin.contains("tokenizer.chat_template") && origin.contains("smollm2.gguf"), "{origin}");
    }

    fn layout() -> KvLayout {
        let mut layout = KvLayout::full(2, 4, 64, KvFormat::F16, 16);
        layout.groups.push(KvGroup { kind: GroupKind::Window { tokens: 128 }, ..layout.groups[0].clone() });
        layout
    }

    #[test]
    fn a_model_and_its_drafter_share_the_groups_that_are_possible() {
        let group = GroupConfig { optional: true, ..GroupConfig::window(128, 0, 16, 1) };
        let found = windows(&layout(), &[group; 2]).expect("four");
        assert_eq!(found[1..], [group; 2]);
        let error = windows(&layout(), &[group; 3]).expect_err("five").to_string();
        assert!(error.contains("2 kinds of layers, what drafts 3: at most 4"), "{error}");
    }

    #[test]
    fn a_window_group_has_blocks_of_its_own_size() {
        let mut layout = layout();
        layout.groups[1].block_tokens = 32;
        let bytes = 2 * 4 * 64 * 2 * 2 * 32;
        assert_eq!(windows(&layout, &[]).expect("valid"), [GroupConfig::window(128, 0, 32, bytes)]);
    }

    #[test]
    fn whatever_changes_bits_of_the_cache_changes_its_digest() {
        let digest = |change: fn(&mut KvLayout), numerics: &str, quantize| {
            let mut layout = layout();
            change(&mut layout);
            layout_digest(&layout, numerics, quantize)
        };
        let layouts: [fn(&mut KvLayout); 7] = [
            |_| (),
            |layout| layout.groups[1].block_tokens = 32,
            |layout| layout.groups[1].kind = GroupKind::Window { tokens: 64 },
            |layout| layout.groups[0].formats[1] = KvFormat::Int8,
            |layout| layout.groups[0].kv_heads = 8,
            |layout| layout.groups[1].head_dim = 128,
            |layout| layout.groups.truncate(1),
        ];
        let mut seen: Vec<_> = layouts.iter().map(|change| digest(*change, "cpu kernels 1", None)).collect();
        for numerics in ["cpu kernels 2", "cuda kernels 1 on sm_90", "cuda kernels 1 on sm_100"] {
            seen.push(digest(|_| (), numerics, None));
        }
        seen.push(digest(|_| (), "cpu kernels 1", Some(Quantize::Q4)));
        seen.push(digest(|_| (), "cpu kernels 1", Some(Quantize::Q8)));
        for (index, digest) in seen.iter().enumerate() {
            assert!(!seen[..index].contains(digest), "change {index}");
        }
        assert_eq!(digest(|_| (), "cpu kernels 1", None), seen[0]);
    }

    #[test]
    fn instruction_sets_threads_and_the_size_of_the_pool_are_not_in_the_digest() {
        let digest = |isa, threads, blocks| {
            let options = CpuOptions { threads: Some(threads), isa: Some(isa) };
            let mut backend = CpuBackend::new(options).expect("a backend");
            let model = LoadOptions {
                max_rows: 32 * threads,
                max_logit_rows: 8,
                max_model_len: None,
                kv_formats: DType::F16.into(),
                block_tokens: 16,
                keeps_all: false,
                taps: None,
                progress: None,
            };
            let checkpoint = Checkpoint::open(folio_model::testing::fixture("llama3")).expect("opens");
            let model = Model::load(&checkpoint, &mut backend, model).expect("loads");
            backend.allocate_cache(&model.kv_layout, &[blocks]).expect("a cache");
            let version = format!("cpu kernels {}", folio_cpu::NUMERICS);
            assert_eq!(backend.numerics(), version, "{}", backend.name());
            layout_digest(&model.kv_layout, &backend.numerics(), None)
        };
        let expected = digest(Isa::Scalar, 1, 16);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            assert_eq!(digest(isa, 2, 64), expected, "{}", isa.name());
        }
    }

    #[test]
    fn quantized_weights_keep_their_keys_and_values_in_f16() {
        assert_eq!(kv_dtype(&gguf("mixed")).expect("dtype"), DType::F16);
        assert_eq!(kv_dtype(&gguf("smollm2")).expect("dtype"), DType::BF16);
    }
}
