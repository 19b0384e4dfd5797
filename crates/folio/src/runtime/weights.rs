//! A checkpoint's weights in a backend: packed now, or mapped as they were packed before.
//!
//! Owns: the choice between the two, and loading the text parts of a model beside them. Must never: start an engine.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, anyhow, bail};
use folio_cpu::machine::Machine;
use folio_cpu::{CpuBackend, Quantized};
use folio_cuda::machine::Effort;
use folio_model::backend::{Backend, DType};
use folio_model::config::Mixer;
use folio_model::draft_head::DraftHead;
use folio_model::hub::Held;
use folio_model::kv_format::{KvFormats, KvSkip};
use folio_model::quant::Encoding;
use folio_model::{Checkpoint, LoadOptions, LoadedModel, Model, PackedAbout, Progress};
use folio_text::{ChatTemplate, Tokenizer};

use super::draft::OpenHead;
use super::{load_template, load_tokenizer, logit_rows, scheduler_config};
use crate::cli::{EngineArgs, KvDtype, Quantize, Sizes};
use crate::device::{Device, DeviceChoice, GemmBackend};
use crate::load_format::LoadFormat;
use crate::models::Source;
use crate::packed_cache::{Packed, PackedCache, PackedPlace, Unsaved};
use crate::progress::Bar;
use crate::quantizing::Quantizing;

/// What decides how weights are loaded.
#[derive(Clone, Debug)]
pub struct WeightArgs {
    pub device: DeviceChoice,
    /// Without CUDA graphs.
    pub eager: bool,
    /// Who multiplies on a GPU.
    pub gemm: GemmBackend,
    pub format: LoadFormat,
    pub threads: Option<u32>,
    pub quantize: Option<Quantize>,
    pub kv_dtype: KvDtype,
    /// Layers that stay in the type of the weights.
    pub kv_skip: Vec<KvSkip>,
    pub max_model_len: Option<u32>,
    /// [`LoadOptions::keeps_all`]
    pub keeps_all: bool,
    pub block_tokens: u32,
    /// Most rows of a step, and of those the most with logits.
    pub max_rows: usize,
    pub max_logit_rows: usize,
}

impl WeightArgs {
    /// For a backend that only packs.
    pub fn for_packing(to: Quantize) -> Self {
        Self {
            device: DeviceChoice::Cpu,
            eager: false,
            gemm: GemmBackend::Own,
            format: LoadFormat::Auto,
            threads: None,
            quantize: Some(to),
            kv_dtype: KvDtype::Auto,
            kv_skip: Vec::new(),
            max_model_len: None,
            keeps_all: false,
            block_tokens: 16,
            max_rows: 1,
            max_logit_rows: 1,
        }
    }

    fn device(&self) -> Result<Device> {
        open_device(self.device, self.threads, self.eager, self.gemm)
    }

    /// `weights` is the KV cache's type unless another is asked for.
    pub(super) fn options<'a>(&self, weights: DType, taps: Option<&'a dyn DraftHead>) -> LoadOptions<'a> {
        let most = self.kv_dtype.format().unwrap_or(weights.into());
        let kv_formats = KvFormats { most, skipped: weights.into(), skip: self.kv_skip.clone() };
        LoadOptions {
            max_rows: self.max_rows,
            max_logit_rows: self.max_logit_rows,
            max_model_len: self.max_model_len.map(|n| n as usize),
            keeps_all: self.keeps_all,
            kv_formats,
            block_tokens: self.block_tokens as usize,
            taps,
            progress: None,
        }
    }
}

impl WeightArgs {
    pub(super) fn new(args: &EngineArgs, sizes: &Sizes) -> Self {
        Self {
            device: args.device,
            eager: args.enforce_eager,
            gemm: args.gemm_backend,
            format: args.load_format,
            threads: args.threads,
            quantize: args.quantize,
            kv_dtype: args.kv_cache_dtype,
            kv_skip: args.kv_cache_dtype_skip_layers.clone(),
            max_model_len: args.max_model_len,
            keeps_all: false,
            block_tokens: args.block_size,
            max_rows: sizes.max_num_batched_tokens as usize,
            max_logit_rows: logit_rows(sizes),
        }
    }
}

pub(super) fn open_device(
    choice: DeviceChoice,
    threads: Option<u32>,
    eager: bool,
    gemm: GemmBackend,
) -> Result<Device> {
    let mut device = Device::open(choice, threads, gemm)?;
    match &mut device {
        Device::Cuda(_) if threads.is_some() => {
            bail!("--threads is for processors, and a GPU computes: leave it out, or give --device cpu")
        }
        Device::Cuda(backend) if eager => backend.without_graphs(),
        Device::Cuda(_) => {}
        Device::Cpu(_) if eager => {
            bail!("--enforce-eager is for a GPU, and processors compute: leave it out")
        }
        Device::Cpu(_) if gemm == GemmBackend::Cublaslt => {
            bail!("--gemm-backend cublaslt is for a GPU, and processors compute: leave it out")
        }
        Device::Cpu(_) => {}
    }
    Ok(device)
}

/// Weights in a backend that has no cache yet.
pub struct Weights {
    pub backend: Device,
    pub model: LoadedModel,
    /// What the weights are: "bf16", "bf16 to Q8_0".
    pub format: String,
    /// What they were quantized to, now or when they were packed.
    pub(super) quantized: Option<Quantize>,
    /// How many matrices were, just now.
    pub(super) here: Quantized,
    /// The file they are mapped from.
    pub(super) mapped: Option<PathBuf>,
    /// Packed just now, and to be kept.
    pub unsaved: Option<Unsaved>,
}

impl Weights {
    /// Loads with a progress bar on standard error. No packed form is kept.
    pub fn load(checkpoint: &Checkpoint, args: &WeightArgs) -> Result<Self> {
        let device = args.device()?;
        match find(checkpoint, args, None)? {
            Some(packed) => Self::map(checkpoint, args, device, packed, None),
            None => Self::pack(checkpoint, args, device, None, None, None),
        }
    }

    fn pack(
        checkpoint: &Checkpoint,
        args: &WeightArgs,
        mut backend: Device,
        place: Option<PackedPlace>,
        cache: Option<&PackedCache>,
        taps: Option<&dyn DraftHead>,
    ) -> Result<Self> {
        // Said before its weights are read, not after.
        let config = checkpoint.config();
        let only_here = config.mixers.iter().find_map(|mixer| match mixer {
            Mixer::Attention | Mixer::Nothing => None,
            Mixer::Latent(_) => Some("latent attention is"),
            Mixer::Delta(_) => Some("layers that keep a state (gated delta nets) are"),
            Mixer::Mamba(_) => Some("layers that keep a state (Mamba-2) are"),
            Mixer::Conv(_) => Some("layers that keep a state (short convolutions) are"),
        });
        let only_here = only_here.or(config.full_heads.map(|_| "layers with heads of different sizes are"));
        if let Some(what) = only_here.filter(|_| backend.is_gpu()) {
            bail!("{what} computed on processors only: give --device cpu")
        }
        let mut here = Quantized::default();
        let loaded = match backend.as_cpu() {
            Some(cpu) => {
                let key = place.as_ref().map_or("", PackedPlace::key);
                let (model, about) = pack(checkpoint, cpu, args, key, taps)?;
                // Once more, because the files may have changed while they were read.
                let now = cache.and_then(|cache| cache.place(checkpoint, args.quantize));
                here = cpu.quantized();
                // What is tapped is another checkpoint's.
                let weights = cpu.packed_weights().first(Model::weights_of(checkpoint.config()));
                (model, Unsaved::new(place, now, weights, &about))
            }
            None => {
                let inner = &mut *backend;
                let model = match args.quantize {
                    None => load(checkpoint, inner, args, taps)?.0,
                    Some(to) => {
                        let to = to.packed();
                        let mut quantizing = Quantizing { inner, to, quantized: Quantized::default() };
                        let model = load(checkpoint, &mut quantizing, args, taps)?.0;
                        here = quantizing.quantized;
                        model
                    }
                };
                (model, None)
            }
        };
        let (model, unsaved) = loaded;
        let format = format(&model, args.quantize);
        Ok(Self { backend, model, format, quantized: args.quantize, here, mapped: None, unsaved })
    }

    /// Weights that were packed before.
    fn map(
        checkpoint: &Checkpoint,
        args: &WeightArgs,
        mut backend: Device,
        packed: Packed,
        taps: Option<&dyn DraftHead>,
    ) -> Result<Self> {
        let Packed { file, about, path } = packed;
        let Some(cpu) = backend.as_cpu() else {
            bail!(
                "{} holds weights packed for processors: serve its original, or give --device cpu",
                path.display()
            );
        };
        let counts = file.counts();
        cpu.load_packed(file)?;
        let options = args.options(about.kv_dtype, taps);
        let model = Model::load_packed(checkpoint, cpu, &about, counts, options)?;
        tracing::debug!(file = %path.display(), "packed weights mapped");
        let quantized = about.quantized.as_deref().and_then(Quantize::named);
        let format = format(&model, quantized);
        let here = Quantized::default();
        Ok(Self { backend, model, format, quantized, here, mapped: Some(path), unsaved: None })
    }

    /// The limits of what computes for these weights. Of processors: weights read where they lie, which may be faster or slower than a
    /// fresh buffer. Of a GPU: its own memory and matrix instructions, whatever `machine` is.
    pub fn limits(&mut self, machine: Machine) -> Result<Machine> {
        match &mut self.backend {
            Device::Cpu(cpu) => {
                let read = cpu.weight_read_rate()?;
                let read_bytes_per_s = if read > 0.0 { read } else { machine.read_bytes_per_s };
                Ok(Machine { read_bytes_per_s, ..machine })
            }
            Device::Cuda(cuda) => {
                let rates = cuda.rates(Effort::default())?;
                Ok(Machine {
                    threads: 0,
                    read_bytes_per_s: rates.read_bytes_per_s,
                    // Products are of bf16 with sums in f32, whatever the weights are stored in.
                    f32_flop_per_s: rates.matrix_flop_per_s,
                    int8_op_per_s: rates.matrix_flop_per_s,
                    ..machine
                })
            }
        }
    }
}

/// A model in memory, before its engine is started.
pub struct Loaded {
    pub weights: Weights,
    pub(super) source: Source,
    pub(super) checkpoint: Checkpoint,
    pub(super) held: Vec<Held>,
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) template: Option<Arc<ChatTemplate>>,
    /// What drafts, where that is a head for this model, which gives features out for it.
    pub(super) head: Option<OpenHead>,
}

impl Loaded {
    pub fn open(model: Option<&str>, args: &EngineArgs) -> Result<Self> {
        Self::open_as(model, args, false)
    }

    /// For drafts: its layers with windows keep what lies behind them.
    pub(super) fn open_drafter(model: &str, args: &EngineArgs) -> Result<Self> {
        Self::open_as(Some(model), args, true)
    }

    fn open_as(model: Option<&str>, args: &EngineArgs, drafts: bool) -> Result<Self> {
        // Contradictions first: loading may take minutes.
        let mut device = open_device(args.device, args.threads, args.enforce_eager, args.gemm_backend)?;
        let sizes = args.sizes(device.is_gpu());
        scheduler_config(args, &sizes, 1).validate()?;
        let source = Source::parse(model, &args.aliases)?;
        let (checkpoint, held) = match args.load_format {
            LoadFormat::Auto => source.open()?,
            LoadFormat::Dummy(_) => (source.open_without_weights()?, Held::default()),
        };
        let mut head = OpenHead::open(args, &source, &checkpoint)?;
        let of_head = head.as_mut().and_then(|head| head.held.take());
        let held: Vec<Held> = [held].into_iter().chain(of_head).collect();
        args.drafter(head.as_ref().map(|head| head.drafter))?;
        let taps = head.as_ref().map(|head| &*head.head);
        let load = WeightArgs { keeps_all: drafts, ..WeightArgs::new(args, &sizes) };
        let kept = device.as_cpu().is_some() && args.load_format == LoadFormat::Auto;
        let cache = PackedCache::new(&args.packed).filter(|_| kept);
        let place = cache.as_ref().and_then(|cache| cache.place(&checkpoint, load.quantize));
        let text = || -> Result<_> {
            let tokenizer = Arc::new(match args.load_format {
                // Any words do.
                LoadFormat::Dummy(_)
                    if checkpoint.read("tokenizer.json")?.is_none() && !has_tekken(&checkpoint) =>
                {
                    load_tokenizer(&Source::BuiltIn.open_here()?)?
                }
                _ => load_tokenizer(&checkpoint)?,
            });
            let template =
                load_template(&checkpoint, &tokenizer, args.chat_template.as_deref())?.map(Arc::new);
            if template.is_none() && has_tekken(&checkpoint) {
                tracing::warn!("{NO_TEMPLATE_OF_TEKKEN}");
            }
            Ok((tokenizer, template))
        };
        let (text, mapped) = match find(&checkpoint, &load, place.as_ref())? {
            // Mapping takes no longer than the vocabulary of a large model, so both at once.
            Some(packed) => {
                let (text, weights) = std::thread::scope(|scope| {
                    let text = scope.spawn(text);
                    let weights = Weights::map(&checkpoint, &load, device, packed, taps);
                    (text.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), weights)
                });
                (text?, Ok(mapped(weights, place.as_ref())?))
            }
            // Packing may take minutes, which a wrong tokenizer should not cost.
            None => (text()?, Err(device)),
        };
        let weights = match mapped {
            Ok(Some(weights)) => weights,
            Ok(None) => Weights::pack(&checkpoint, &load, load.device()?, place, cache.as_ref(), taps)?,
            Err(device) => Weights::pack(&checkpoint, &load, device, place, cache.as_ref(), taps)?,
        };
        let (tokenizer, template) = text;
        Ok(Self { weights, source, checkpoint, held, tokenizer, template, head })
    }
}

const NO_TEMPLATE_OF_TEKKEN: &str = "tekken.json holds no chat template, so only completions are served; give one with --chat-template. \
    mistral-common writes it: `convert_tokenizer_to_chat_template(\"tekken.json\")` of `mistral_common.integrations.chat_templates.chat_templates`";

/// Whether Mistral's tokenizer file is there.
fn has_tekken(checkpoint: &Checkpoint) -> bool {
    checkpoint.folder().is_some_and(|folder| folder.join("tekken.json").is_file())
}

/// Weights packed before: in the folder itself, or at their place in the cache.
fn find(checkpoint: &Checkpoint, args: &WeightArgs, place: Option<&PackedPlace>) -> Result<Option<Packed>> {
    let Some(path) = checkpoint.packed() else { return Ok(place.and_then(PackedPlace::find)) };
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
fn mapped(weights: Result<Weights>, place: Option<&PackedPlace>) -> Result<Option<Weights>> {
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

/// Packs the weights, with a progress bar; and what to say about them in a file that is made from `made_from`.
pub fn pack(
    checkpoint: &Checkpoint,
    backend: &mut CpuBackend,
    args: &WeightArgs,
    made_from: &str,
    taps: Option<&dyn DraftHead>,
) -> Result<(LoadedModel, PackedAbout)> {
    if let Some(to) = args.quantize {
        backend.quantize_weights(to.packed());
    }
    let (model, kv_dtype) = load(checkpoint, backend, args, taps)?;
    let about = PackedAbout {
        made_from: made_from.to_owned(),
        quantized: args.quantize.map(|to| to.name().to_owned()),
        parameters: model.parameters,
        weight_encoding: model.weight_encoding,
        kv_dtype,
        tensors: model.tensor_digests.clone(),
    };
    Ok((model, about))
}

/// Loads the weights, with a progress bar; and the type of the KV cache where no other is asked for.
fn load(
    checkpoint: &Checkpoint,
    backend: &mut dyn Backend,
    args: &WeightArgs,
    taps: Option<&dyn DraftHead>,
) -> Result<(LoadedModel, DType)> {
    let bar = Bar::bytes("packing weights");
    let mut progress = |p: Progress<'_>| bar.set(p.done_bytes, p.total_bytes, p.weight);
    if let LoadFormat::Dummy(encoding) = args.format {
        let kv_dtype = encoding.plain().unwrap_or(DType::F16);
        let model = Model::load_dummy(checkpoint, backend, encoding, args.options(kv_dtype, taps))?;
        return Ok((model, kv_dtype));
    }
    let kv_dtype = kv_dtype(checkpoint)?;
    let options = args.options(kv_dtype, taps);
    let model = Model::load(checkpoint, backend, LoadOptions { progress: Some(&mut progress), ..options })?;
    bar.finish();
    Ok((model, kv_dtype))
}

/// The KV cache's type where nothing else is asked for: that of the first weight, f16 where weights are quantized.
pub(crate) fn kv_dtype(checkpoint: &Checkpoint) -> Result<DType> {
    let specs = folio_model::weights::weight_specs(checkpoint.config());
    let mut first = None;
    for part in specs.iter().flat_map(|spec| &spec.parts) {
        match checkpoint.tensor(part)?.encoding {
            Encoding::Plain(dtype) => first = first.or(Some(dtype)),
            // Quantized weights, whatever the rest of them is.
            Encoding::Block(_) => return Ok(DType::F16),
        }
    }
    first.ok_or_else(|| anyhow!("the checkpoint has no weights"))
}
