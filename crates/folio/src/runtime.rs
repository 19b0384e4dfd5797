//! Options to a running engine: the one place where a checkpoint, a backend, a cache and a scheduler are put together.
//!
//! Owns: the order (resolve, open, pack, size the pool, start) and the report of what was decided and why. Used by serve,
//! chat, run and bench alike.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use folio_cpu::machine::Machine;
use folio_cpu::{CpuBackend, CpuOptions};
use folio_engine::engine::EngineParts;
use folio_engine::{EngineHandle, ModelExecutor, SchedulerConfig, SystemClock};
use folio_kv::{CacheConfig, KvCache, LearnedLifetimes};
use folio_model::backend::{Backend, DType};
use folio_model::quant::Encoding;
use folio_model::{Checkpoint, Config, LoadOptions, LoadedModel, Model, PackedAbout, Progress};
use folio_text::{ChatTemplate, TemplateSources, Tokenizer};
use sha2::{Digest, Sha256};

use crate::cli::{EngineArgs, KvDtype, Quantize};
use crate::demo;
use crate::memory::{self, PoolRequest};
use crate::packed_cache::{Packed, PackedCache, Place, Saving, Unsaved};
use crate::progress::Bar;
use crate::units;

/// Changes whenever the same inputs would give other KV bits, so that no cached byte outlives the arithmetic that made it.
const NUMERICS_VERSION: u32 = 1;

/// Where a model comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    BuiltIn,
    /// A folder: Hugging Face's files, or one GGUF model.
    Folder(PathBuf),
    Gguf(PathBuf),
    Hub(String),
}

impl Source {
    /// `None` and `demo` are the built-in model; an existing folder wins over a hub name.
    pub fn parse(model: Option<&str>) -> Result<Self> {
        let Some(model) = model else { return Ok(Source::BuiltIn) };
        let path = Path::new(model);
        if path.is_dir() {
            return Ok(Source::Folder(path.to_owned()));
        }
        let is_gguf = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
        if path.is_file() && is_gguf {
            return Ok(Source::Gguf(path.to_owned()));
        }
        if path.is_file() {
            bail!(
                "{model} is a file; give a .gguf file, or the folder that holds config.json, *.safetensors and tokenizer.json"
            );
        }
        if model == demo::NAME || model == "demo" {
            return Ok(Source::BuiltIn);
        }
        let looks_like_path =
            is_gguf || model.starts_with(['.', '/', '~']) || model.matches('/').count() != 1;
        if looks_like_path {
            bail!(
                "there is no folder {model} and no such .gguf file, and it is no hub name either (org/model or org/model@revision)"
            );
        }
        Ok(Source::Hub(model.to_owned()))
    }

    /// What clients call it by default.
    pub fn name(&self) -> String {
        match self {
            Source::BuiltIn => demo::NAME.to_owned(),
            Source::Folder(path) => {
                let path = path.canonicalize().unwrap_or_else(|_| path.clone());
                path.file_name()
                    .map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
            }
            Source::Gguf(path) => {
                let stem = path.file_stem().map_or_else(|| "model".into(), |stem| stem.to_string_lossy());
                // One name for all files of a split model: NAME-00001-of-00003.
                match stem.rsplit_once("-00001-of-") {
                    Some((name, _)) => name.to_owned(),
                    None => stem.into_owned(),
                }
            }
            Source::Hub(name) => name.split('@').next().unwrap_or(name).to_owned(),
        }
    }

    /// Opens the checkpoint, downloading it first if need be.
    pub fn open(&self) -> Result<Checkpoint> {
        match self {
            Source::BuiltIn => Checkpoint::from_bytes(demo::FILES).context("the built-in model"),
            Source::Folder(path) | Source::Gguf(path) => Ok(Checkpoint::open(path)?),
            Source::Hub(name) => Ok(Checkpoint::open(crate::pull::download(name)?)?),
        }
    }
}

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
    pub report: Report,
    /// Packed weights on their way to the disk.
    saving: Option<Saving>,
}

/// What was decided at start, for people.
#[derive(Clone, Debug)]
pub struct Report {
    /// (what, text), in order.
    pub lines: Vec<(&'static str, String)>,
    pub backend: String,
    pub threads: usize,
    pub weight_bytes: u64,
    pub kv_blocks: u32,
    pub kv_bytes: u64,
}

/// What decides how weights are loaded.
#[derive(Clone, Copy, Debug)]
pub struct WeightArgs {
    pub threads: Option<u32>,
    pub quantize: Option<Quantize>,
    pub kv_dtype: KvDtype,
    pub max_model_len: Option<u32>,
    pub block_tokens: u32,
    /// Most rows of a step, and of those the most with logits.
    pub max_rows: usize,
    pub max_logit_rows: usize,
}

impl WeightArgs {
    /// For a backend that only packs.
    pub fn for_packing(to: Quantize) -> Self {
        Self {
            threads: None,
            quantize: Some(to),
            kv_dtype: KvDtype::Auto,
            max_model_len: None,
            block_tokens: 16,
            max_rows: 1,
            max_logit_rows: 1,
        }
    }

    fn options(&self, kv_dtype: DType) -> LoadOptions<'static> {
        LoadOptions {
            max_rows: self.max_rows,
            max_logit_rows: self.max_logit_rows,
            max_model_len: self.max_model_len.map(|n| n as usize),
            kv_dtype,
            block_tokens: self.block_tokens as usize,
            progress: None,
        }
    }
}

impl From<&EngineArgs> for WeightArgs {
    fn from(args: &EngineArgs) -> Self {
        Self {
            threads: args.threads,
            quantize: args.quantize,
            kv_dtype: args.kv_cache_dtype,
            max_model_len: args.max_model_len,
            block_tokens: args.block_size,
            max_rows: args.max_num_batched_tokens as usize,
            max_logit_rows: logit_rows(args),
        }
    }
}

/// Weights in a backend that has no cache yet.
pub struct Weights {
    pub backend: CpuBackend,
    pub model: LoadedModel,
    /// What the weights are: "bf16", "bf16 to Q8_0".
    pub format: String,
    /// What they were quantized to, now or when they were packed.
    quantized: Option<Quantize>,
    /// The file they are mapped from.
    mapped: Option<PathBuf>,
    /// Packed just now, and to be kept.
    pub unsaved: Option<Unsaved>,
}

impl Weights {
    /// Loads with a progress bar on standard error. No packed form is kept.
    pub fn load(checkpoint: &Checkpoint, args: &WeightArgs) -> Result<Self> {
        match find(checkpoint, args, None)? {
            Some(packed) => Self::map(checkpoint, args, packed),
            None => Self::pack(checkpoint, args, None, None),
        }
    }

    fn pack(
        checkpoint: &Checkpoint,
        args: &WeightArgs,
        place: Option<Place>,
        cache: Option<&PackedCache>,
    ) -> Result<Self> {
        let mut backend = args.backend()?;
        let key = place.as_ref().map_or("", Place::key);
        let (model, about) = pack(checkpoint, &mut backend, args, key)?;
        // Once more, because the files may have changed while they were read.
        let now = cache.and_then(|cache| cache.place(checkpoint, args.quantize));
        let unsaved = Unsaved::new(place, now, backend.packed_weights(), &about);
        let format = format(&model, args.quantize);
        Ok(Self { backend, model, format, quantized: args.quantize, mapped: None, unsaved })
    }

    /// Weights that were packed before.
    fn map(checkpoint: &Checkpoint, args: &WeightArgs, packed: Packed) -> Result<Self> {
        let Packed { file, about, path } = packed;
        let mut backend = args.backend()?;
        let counts = file.counts();
        backend.load_packed(file)?;
        let kv_dtype = plain_dtype(args.kv_dtype).unwrap_or(about.kv_dtype);
        let model = Model::load_packed(checkpoint, &mut backend, &about, counts, args.options(kv_dtype))?;
        tracing::debug!(file = %path.display(), "packed weights mapped");
        let quantized = about.quantized.as_deref().and_then(Quantize::named);
        let format = format(&model, quantized);
        Ok(Self { backend, model, format, quantized, mapped: Some(path), unsaved: None })
    }

    /// The limits of this machine for these weights: read where they lie, which may be faster or slower than a fresh buffer.
    pub fn limits(&mut self, machine: Machine) -> Result<Machine> {
        let read = self.backend.weight_read_rate()?;
        let read_bytes_per_s = if read > 0.0 { read } else { machine.read_bytes_per_s };
        Ok(Machine { read_bytes_per_s, ..machine })
    }
}

/// A model in memory, before its engine is started.
pub struct Loaded {
    pub weights: Weights,
    source: Source,
    checkpoint: Checkpoint,
    tokenizer: Arc<Tokenizer>,
    template: Option<Arc<ChatTemplate>>,
}

impl Loaded {
    pub fn open(model: Option<&str>, args: &EngineArgs) -> Result<Self> {
        // Contradictions first: loading may take minutes.
        scheduler_config(args, 1).validate()?;
        let source = Source::parse(model)?;
        let checkpoint = source.open()?;
        let load = WeightArgs::from(args);
        let cache = PackedCache::new(&args.packed);
        let place = cache.as_ref().and_then(|cache| cache.place(&checkpoint, load.quantize));
        let text = || -> Result<_> {
            let tokenizer = Arc::new(load_tokenizer(&checkpoint)?);
            let template = load_template(&checkpoint, &tokenizer, args)?.map(Arc::new);
            Ok((tokenizer, template))
        };
        let (text, mapped) = match find(&checkpoint, &load, place.as_ref())? {
            // Mapping takes no longer than the vocabulary of a large model, so both at once.
            Some(packed) => {
                let (text, weights) = std::thread::scope(|scope| {
                    let text = scope.spawn(text);
                    let weights = Weights::map(&checkpoint, &load, packed);
                    (text.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), weights)
                });
                (text?, mapped(weights, place.as_ref())?)
            }
            // Packing may take minutes, which a wrong tokenizer should not cost.
            None => (text()?, None),
        };
        let weights = match mapped {
            Some(weights) => weights,
            None => Weights::pack(&checkpoint, &load, place, cache.as_ref())?,
        };
        let (tokenizer, template) = text;
        Ok(Self { weights, source, checkpoint, tokenizer, template })
    }
}

/// Weights packed before: in the folder itself, or at their place in the cache.
fn find(checkpoint: &Checkpoint, args: &WeightArgs, place: Option<&Place>) -> Result<Option<Packed>> {
    let Some(path) = checkpoint.packed() else { return Ok(place.and_then(Place::find)) };
    let packed = Packed::open(path)?;
    if let (Some(asked), Some(done)) = (args.quantize, &packed.about.quantized)
        && asked.name() != done
    {
        bail!(
            "{} was quantized to {done} already: --quantize {} is for its original",
            path.display(),
            asked.name()
        );
    }
    Ok(Some(packed))
}

/// A damaged file of the cache is no reason not to start: it goes, and the weights are packed again.
fn mapped(weights: Result<Weights>, place: Option<&Place>) -> Result<Option<Weights>> {
    match (weights, place) {
        (Ok(weights), _) => Ok(Some(weights)),
        (Err(error), Some(place)) if error.is::<folio_cpu::CpuError>() => {
            place.discard(&error.to_string());
            Ok(None)
        }
        (Err(error), _) => Err(error),
    }
}

fn format(model: &LoadedModel, quantized: Option<Quantize>) -> String {
    match quantized {
        Some(to) => format!("{} to {:?}", model.weight_encoding, to.packed().format()),
        None => model.weight_encoding.to_string(),
    }
}

impl Runtime {
    pub fn start(model: Option<&str>, args: &EngineArgs) -> Result<Self> {
        Self::with(Loaded::open(model, args)?, args)
    }

    /// Starts the engine; `args` are those the model was loaded with.
    pub fn with(loaded: Loaded, args: &EngineArgs) -> Result<Self> {
        let Loaded { weights, source, checkpoint, tokenizer, template } = loaded;
        let Weights { mut backend, model, format, quantized, mapped, unsaved } = weights;
        let threads = backend.threads();
        let max_model_len = u32::try_from(model.max_model_len).context("the model's context length")?;
        let config = scheduler_config(args, max_model_len);
        // What is mapped counts as cache that could be dropped, but it will be read at every step.
        let free = memory::free().map(|free| free.without(backend.mapped_bytes()));
        let pool = memory::pool(&PoolRequest {
            asked_bytes: args.kv_cache_memory,
            share: args.kv_cache_share,
            free: free.clone(),
            bytes_per_block: model.kv_layout.bytes_per_block() as u64,
            block_tokens: args.block_size,
            max_model_len,
            max_num_seqs: args.max_num_seqs,
        })?;
        let mut report = Report {
            lines: Vec::new(),
            backend: backend.name(),
            threads,
            weight_bytes: backend.weight_bytes(),
            kv_blocks: pool.blocks,
            kv_bytes: pool.bytes,
        };
        report.describe(&source, &checkpoint, &model, &pool, free.as_ref(), template.as_deref());
        report.describe_packed(mapped.as_deref(), unsaved.as_ref());
        report.describe_quantized(quantized, mapped.is_some(), backend.quantized());
        backend.allocate_cache(model.kv_layout, pool.blocks as usize)?;

        let cache = KvCache::new(
            CacheConfig {
                blocks: pool.blocks,
                block_tokens: args.block_size,
                bytes_per_block: model.kv_layout.bytes_per_block() as u64,
            },
            Box::new(LearnedLifetimes::new(depth_cost(&model.config, args.block_size))),
        );
        let executor = ModelExecutor::new(
            Box::new(backend),
            model.vocab,
            args.max_num_batched_tokens as usize,
            logit_rows(args),
        );
        let engine = folio_engine::start(EngineParts {
            config,
            cache,
            executor: Box::new(executor),
            clock: Arc::new(SystemClock::new()),
            vocab: u32::try_from(model.vocab).context("the model's vocabulary")?,
        })?;
        let layout_digest = layout_digest(&model, quantized);
        let saving = unsaved.map(Unsaved::save_behind);
        let name = source.name();
        Ok(Self { engine, tokenizer, template, name, format, layout_digest, report, model, saving })
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

/// What attention over one earlier block adds to the cost of computing a block, as a share of that: the multiply-adds of
/// attention per key against those of the weights.
fn depth_cost(config: &Config, block_tokens: u32) -> f64 {
    let (hidden, heads) = (config.hidden as f64, config.q_width() as f64);
    let weights = hidden * (config.qkv_width() as f64 + heads + 3.0 * config.intermediate as f64);
    f64::from(block_tokens) * 2.0 * heads / weights
}

impl WeightArgs {
    fn backend(&self) -> Result<CpuBackend> {
        Ok(CpuBackend::new(CpuOptions { threads: self.threads.map(|n| n as usize), isa: None })?)
    }
}

/// Packs the weights, with a progress bar; and what to say about them in a file that is made from `made_from`.
pub fn pack(
    checkpoint: &Checkpoint,
    backend: &mut CpuBackend,
    args: &WeightArgs,
    made_from: &str,
) -> Result<(LoadedModel, PackedAbout)> {
    if let Some(to) = args.quantize {
        backend.quantize_weights(to.packed());
    }
    let bar = Bar::bytes("packing weights");
    let mut progress = |p: Progress<'_>| bar.set(p.done_bytes, p.total_bytes, p.weight);
    let options = args.options(kv_dtype(args.kv_dtype, checkpoint)?);
    let model = Model::load(checkpoint, backend, LoadOptions { progress: Some(&mut progress), ..options })?;
    bar.finish();
    let about = PackedAbout {
        made_from: made_from.to_owned(),
        quantized: args.quantize.map(|to| to.name().to_owned()),
        parameters: model.parameters,
        weight_encoding: model.weight_encoding,
        kv_dtype: kv_dtype(KvDtype::Auto, checkpoint)?,
        tensors: model.tensor_digests.clone(),
    };
    Ok((model, about))
}

impl Report {
    fn describe(
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
        self.lines.push((
            "weights",
            format!(
                "{} as {} on {}, {} threads",
                units::bytes(self.weight_bytes),
                model.weight_encoding,
                self.backend,
                self.threads
            ),
        ));
        let context = units::count(model.max_model_len as u64);
        self.lines.push((
            "context",
            match &model.length_limited_by {
                Some(reason) => format!("{context} tokens, limited by {reason}"),
                None => format!("{context} tokens"),
            },
        ));
        let layout = model.kv_layout;
        let tokens = u64::from(pool.blocks) * layout.block_tokens as u64;
        self.lines.push((
            "KV cache",
            format!(
                "{} = {} tokens in {} blocks of {}, {:?}, {} per token: {}",
                units::bytes(pool.bytes),
                units::count(tokens),
                units::count(pool.blocks.into()),
                layout.block_tokens,
                layout.dtype,
                units::bytes(layout.bytes_per_token() as u64),
                pool.why
            ),
        ));
        if let Some(free) = free {
            let left = units::bytes(free.bytes.saturating_sub(pool.bytes));
            self.lines.push((
                "memory",
                format!("{} {}; {left} will be left", units::bytes(free.bytes), free.source),
            ));
        }
        self.lines.push((
            "template",
            match template {
                Some(template) => template.origin().to_owned(),
                None => "none: chat is refused, plain completions work".to_owned(),
            },
        ));
    }

    /// Where the packed weights come from, or go to.
    fn describe_packed(&mut self, mapped: Option<&Path>, unsaved: Option<&Unsaved>) {
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
    fn describe_quantized(&mut self, asked: Option<Quantize>, before: bool, quantized: folio_cpu::Quantized) {
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

/// Rows of logits in one forward pass: every sequence samples one, but a large vocabulary times thousands of sequences
/// would take gigabytes. The executor splits what does not fit.
fn logit_rows(args: &EngineArgs) -> usize {
    args.max_num_seqs.min(256) as usize
}

fn scheduler_config(args: &EngineArgs, max_model_len: u32) -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: args.max_num_seqs,
        max_num_batched_tokens: args.max_num_batched_tokens,
        max_prefill_tokens_while_decoding: args.max_prefill_while_decoding,
        max_model_len,
        max_queued_requests: args.max_queued_requests,
        max_queued_tokens: args.max_queued_tokens,
        guarantee_completion: args.guarantee_completion,
        ..SchedulerConfig::default()
    }
}

/// What was asked for, unless that is left to the weights.
fn plain_dtype(asked: KvDtype) -> Option<DType> {
    match asked {
        KvDtype::F32 => Some(DType::F32),
        KvDtype::F16 => Some(DType::F16),
        KvDtype::Bf16 => Some(DType::BF16),
        KvDtype::Auto => None,
    }
}

fn kv_dtype(asked: KvDtype, checkpoint: &Checkpoint) -> Result<DType> {
    Ok(match plain_dtype(asked) {
        Some(dtype) => dtype,
        None => {
            let specs = folio_model::decoder::weight_specs(checkpoint.config());
            let mut first = None;
            for part in specs.iter().flat_map(|spec| &spec.parts) {
                match checkpoint.tensor(part)?.encoding {
                    Encoding::Plain(dtype) => first = first.or(Some(dtype)),
                    // Quantized weights, whatever the rest of them is.
                    Encoding::Block(_) => return Ok(DType::F16),
                }
            }
            first.ok_or_else(|| anyhow!("the checkpoint has no weights"))?
        }
    })
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

fn load_template(
    checkpoint: &Checkpoint,
    tokenizer: &Tokenizer,
    args: &EngineArgs,
) -> Result<Option<ChatTemplate>> {
    let mut sources = match (checkpoint.gguf(), checkpoint.folder()) {
        (Some(metadata), _) => TemplateSources::from_gguf(metadata)?,
        (None, Some(folder)) => TemplateSources::from_folder(folder)?,
        (None, None) => TemplateSources::from_config(checkpoint.read("tokenizer_config.json")?.as_deref())?,
    };
    let file = match &args.chat_template {
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

/// Identity of KV bytes besides the model's: geometry, element type and the arithmetic that makes them.
fn layout_digest(model: &LoadedModel, quantize: Option<Quantize>) -> [u8; 32] {
    let layout = model.kv_layout;
    let mut text = format!(
        "folio kv layout: numerics {NUMERICS_VERSION}, {} layers, {} heads, {} dims, {:?}, {} tokens",
        layout.layers, layout.kv_heads, layout.head_dim, layout.dtype, layout.block_tokens
    );
    if let Some(to) = quantize {
        text += &format!(", weights quantized to {to:?} while loading");
    }
    Sha256::digest(text.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        engine: EngineArgs,
    }

    #[test]
    fn models_are_told_apart() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().to_str().expect("text");
        assert_eq!(Source::parse(None).expect("parses"), Source::BuiltIn);
        assert_eq!(Source::parse(Some("demo")).expect("parses"), Source::BuiltIn);
        assert_eq!(Source::parse(Some(path)).expect("parses"), Source::Folder(folder.path().to_owned()));
        let hub = Source::parse(Some("org/model@main")).expect("parses");
        assert_eq!((hub.name(), hub), ("org/model".into(), Source::Hub("org/model@main".into())));
        for wrong in ["./nothing-here", "model", "/no/such/folder", "a/b/c", "org/model.gguf"] {
            assert!(Source::parse(Some(wrong)).is_err(), "{wrong}");
        }
        let file = folder.path().join("model.safetensors");
        std::fs::write(&file, b"x").expect("file");
        assert!(Source::parse(file.to_str()).expect_err("refused").to_string().contains("folder"));
        for (file, name) in [("m.Q4_0.gguf", "m.Q4_0"), ("big-00001-of-00003.gguf", "big")] {
            let file = folder.path().join(file);
            std::fs::write(&file, b"x").expect("file");
            let source = Source::parse(file.to_str()).expect("parses");
            assert_eq!((source.name().as_str(), source), (name, Source::Gguf(file)));
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
        let template =
            load_template(&checkpoint, &tokenizer, &Flags::parse_from(["folio"]).engine).expect("loads");
        let origin = template.expect("there is one").origin().to_owned();
        assert!(origin.contains("tokenizer.chat_template") && origin.contains("smollm2.gguf"), "{origin}");
    }

    #[test]
    fn quantized_weights_keep_their_keys_and_values_in_f16() {
        assert_eq!(kv_dtype(KvDtype::Auto, &gguf("mixed")).expect("dtype"), DType::F16);
        assert_eq!(kv_dtype(KvDtype::Auto, &gguf("smollm2")).expect("dtype"), DType::BF16);
        assert_eq!(kv_dtype(KvDtype::F32, &gguf("mixed")).expect("dtype"), DType::F32);
    }
}
