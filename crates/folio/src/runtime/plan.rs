//! What a model is going to need, known from its headers before a weight is read.
//!
//! Owns: the estimate by which several models share a machine's memory. Sizes come from where serving takes them: weights as a
//! processor packs them, the KV cache from `memory::pool`. Buffers of a step, the vocabulary and the program itself are not in it.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use folio_model::Checkpoint;
use folio_model::decoder::kv_layout;
use folio_model::hub::Held;
use folio_model::kv_format::KvFormats;
use folio_model::quant::{BlockFormat, Encoding};
use folio_model::weights::weight_specs;

use super::{kv_dtype, windows};
use crate::cli::{EngineArgs, Quantize, Speculate};
use crate::demo;
use crate::device::DeviceChoice;
use crate::load_format::LoadFormat;
use crate::memory::{self, FreeMemory, PoolRequest};
use crate::models::Source;

/// See the module documentation.
#[derive(Clone, Debug)]
pub struct MemoryPlan {
    pub family: String,
    pub parameters: u64,
    /// What most of the weights are stored as, or become.
    pub format: String,
    /// Tokens of one sequence.
    pub context_length: u32,
    /// Identity of the files, in hexadecimal; empty where there are none.
    pub digest: String,
    pub weight_bytes: u64,
    pub kv_bytes: u64,
    /// KV in memory beside the cache.
    pub host_bytes: u64,
}

impl MemoryPlan {
    /// Of the model with these options, which may have `share` bytes to divide between weights and KV where no size of the KV cache is asked
    /// for. Downloads what is not here.
    pub fn new(model: Option<&str>, args: &EngineArgs, share: u64) -> Result<Self> {
        let gpu = computes_on_a_gpu(args);
        let sizes = args.sizes(gpu);
        let source = Source::parse(model, &args.aliases)?;
        let (checkpoint, _held) = open(&source, args)?;
        let config = checkpoint.config();
        let (mut weight_bytes, format, parameters) = weights(&checkpoint, args)?;
        if let Some(draft) = &args.draft_model {
            weight_bytes += draft_bytes(draft, args).with_context(|| format!("--draft-model {draft}"))?;
        } else if args.speculate == Some(Speculate::Eagle3) && source == Source::BuiltIn {
            weight_bytes += demo::HEAD.iter().map(|(_, file)| file.len() as u64).sum::<u64>();
        }
        let context = args.max_model_len.map_or(config.max_position, |asked| asked as usize);
        let context = context.min(config.max_position);
        let context_length = u32::try_from(context).context("the model's context length")?;
        let own = match (args.load_format, checkpoint.packed()) {
            // As `show` has it: packed weights say it in their own file.
            (LoadFormat::Dummy(_), _) | (_, Some(_)) => folio_model::kv_format::KvFormat::F16,
            (LoadFormat::Auto, None) => kv_dtype(&checkpoint)?.into(),
        };
        let most = args.kv_cache_dtype.format().unwrap_or(own);
        let formats = KvFormats { most, skipped: own, skip: args.kv_cache_dtype_skip_layers.clone() };
        let layout = kv_layout(config, &formats, args.block_size as usize, context)
            .map_err(|problem| anyhow!(problem))?;
        let left = FreeMemory::new(
            share.saturating_sub(weight_bytes),
            "left to the model beside its weights".into(),
        );
        let pool = memory::pool(&PoolRequest {
            asked_bytes: args.kv_cache_memory,
            share: sizes.kv_cache_share,
            // What is asked for is held against the memory that is free when the model is loaded.
            free: Some(left).filter(|_| args.kv_cache_memory.is_none()),
            bytes_per_block: layout.groups[0].bytes_per_block() as u64,
            windows: windows(&layout, &[])?,
            block_tokens: args.block_size,
            max_model_len: context_length,
            max_num_seqs: sizes.max_num_seqs,
            max_num_batched_tokens: sizes.max_num_batched_tokens,
        })?;
        Ok(Self {
            family: config.family.model_type.to_owned(),
            parameters,
            format,
            context_length,
            digest: checkpoint.files_digest().map(hex).unwrap_or_default(),
            weight_bytes,
            kv_bytes: args.kv_cache_memory.unwrap_or(pool.bytes),
            // Of a GPU's memory it takes nothing.
            host_bytes: args.host_kv_memory.filter(|_| !gpu).unwrap_or(0),
        })
    }
}

/// Whether a GPU is going to compute, as far as can be said without opening it.
pub fn computes_on_a_gpu(args: &EngineArgs) -> bool {
    match args.device {
        DeviceChoice::Cpu => false,
        DeviceChoice::Cuda(_) => true,
        DeviceChoice::Auto => DeviceChoice::has_gpu(),
    }
}

fn open(source: &Source, args: &EngineArgs) -> Result<(Checkpoint, Held)> {
    match args.load_format {
        LoadFormat::Auto => source.open(),
        LoadFormat::Dummy(_) => Ok((source.open_without_weights()?, Held::default())),
    }
}

/// Bytes of the weights in memory, what most of them are, and how many there are.
fn weights(checkpoint: &Checkpoint, args: &EngineArgs) -> Result<(u64, String, u64)> {
    let specs = weight_specs(checkpoint.config());
    let parts = || specs.iter().flat_map(|weight| &weight.parts);
    let parameters = parts().map(|part| part.picked_shape().iter().product::<usize>() as u64).sum();
    if let Some(path) = checkpoint.packed() {
        let bytes = std::fs::metadata(path).with_context(|| path.display().to_string())?.len();
        return Ok((bytes, "packed".to_owned(), parameters));
    }
    let (mut bytes, mut most) = (0, (0, String::new()));
    for part in parts() {
        let shape = part.picked_shape();
        let values = shape.iter().product::<usize>() as u64;
        let stored = match args.load_format {
            LoadFormat::Dummy(encoding) => encoding,
            LoadFormat::Auto => checkpoint.tensor(part)?.encoding,
        };
        let becomes = becomes(stored, &shape, args.quantize);
        let size = (values as f64 * folio_cpu::packed_bytes_per_value(becomes)) as u64;
        bytes += size;
        if size > most.0 {
            most = (size, becomes.to_string());
        }
    }
    Ok((bytes, most.1, parameters))
}

/// What a tensor is in memory.
fn becomes(stored: Encoding, shape: &[usize], quantize: Option<Quantize>) -> Encoding {
    let columns = shape.last().copied().unwrap_or(0);
    match (quantize, stored) {
        (Some(to), Encoding::Plain(_)) if shape.len() > 1 && columns.is_multiple_of(32) => {
            Encoding::Block(match to {
                Quantize::Q8 => BlockFormat::Q8_0,
                Quantize::Q4 => BlockFormat::Q4_0,
            })
        }
        _ => stored,
    }
}

/// Bytes of what drafts: a model, or a head in a folder.
fn draft_bytes(draft: &str, args: &EngineArgs) -> Result<u64> {
    let source = Source::parse(Some(draft), &args.aliases)?;
    let own = EngineArgs { quantize: None, load_format: LoadFormat::Auto, ..args.clone() };
    let opened = open(&source, &own).and_then(|(checkpoint, _held)| weights(&checkpoint, &own));
    match (opened, source.fetch()?) {
        (Ok((bytes, ..)), _) => Ok(bytes),
        // A head is no checkpoint by itself.
        (Err(_), Some(folder)) if folder.is_dir() => weight_files(&folder),
        (Err(error), _) => Err(error),
    }
}

/// Bytes of the weight files in a folder.
pub fn weight_files(folder: &Path) -> Result<u64> {
    if folder.is_file() {
        return Ok(std::fs::metadata(folder)?.len());
    }
    let files = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let mut bytes = 0;
    for file in files {
        let path = file?.path();
        if path
            .extension()
            .is_some_and(|extension| ["safetensors", "bin", "gguf"].iter().any(|of| extension == *of))
        {
            bytes += std::fs::metadata(&path)?.len();
        }
    }
    Ok(bytes)
}

fn hex(digest: [u8; 32]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::runtime::Runtime;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        engine: EngineArgs,
    }

    fn args(flags: &[&str]) -> EngineArgs {
        let line = ["folio", "--device", "cpu"].iter().chain(flags);
        Flags::try_parse_from(line).expect("flags").engine
    }

    #[test]
    fn what_is_planned_is_what_a_model_then_takes() {
        for flags in [
            &["--kv-cache-memory", "8MiB", "--max-model-len", "512"][..],
            &["--kv-cache-memory", "8MiB", "--max-model-len", "512", "--quantize", "q8"],
            &["--kv-cache-memory", "8MiB", "--max-model-len", "512", "--quantize", "q4"],
        ] {
            let args = args(flags);
            let plan = MemoryPlan::new(None, &args, 0).expect("a plan");
            let runtime = Runtime::start(None, &args).expect("starts");
            let (planned, taken) = (plan.weight_bytes as f64, runtime.report.weight_bytes as f64);
            assert!((planned / taken - 1.0).abs() < 0.05, "{flags:?}: {planned} planned, {taken} taken");
            assert!(plan.kv_bytes >= runtime.report.kv_bytes && plan.kv_bytes == 8 << 20);
            assert_eq!(plan.context_length, 512);
            assert_eq!(plan.parameters, runtime.model.parameters);
            runtime.engine.stop();
        }
    }

    #[test]
    fn a_share_is_divided_as_free_memory_is_and_too_little_names_both_numbers() {
        let args = args(&["--max-model-len", "512"]);
        let weights = MemoryPlan::new(None, &args, 1 << 30).expect("a plan").weight_bytes;
        let small = weights + (32 << 20);
        let plan = MemoryPlan::new(None, &args, small).expect("a plan");
        assert!(plan.kv_bytes <= 16 << 20 && plan.kv_bytes > 15 << 20, "{plan:?}");
        let error = MemoryPlan::new(None, &args, weights + 1000).expect_err("too little").to_string();
        assert!(error.contains("left to the model beside its weights") && error.contains("512"), "{error}");
    }
}
