//! Parity with transformers, for any backend: the fixtures made by `tools/make_fixtures.py`, and trained checkpoints.
//!
//! Used by the tests of every crate that has a [`Backend`]; not part of the serving program.

pub mod adapters;
pub mod blocks;
pub mod gguf;
pub mod heads;
pub mod hub;
pub mod recast;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use crate::adapter::{Adapter, AdapterLimits};
use crate::backend::{Backend, Batch, DType, Span};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::safetensors::read_header;
use crate::loader::{LoadOptions, LoadedModel, Model};

/// Every family with a fixture; a test fails when a fixture is missing from this list or from the disk.
pub const FIXTURES: &[&str] = &[
    "llama2",
    "llama3",
    "llama_bias",
    "mistral",
    "qwen2",
    "qwen2_yarn",
    "qwen3",
    "qwen3_window",
    "smollm2",
    "smollm3",
    "phi3",
    "phi4_mini",
    "gemma2",
    "gemma3_text",
    "gemma3",
    "gemma4_text",
    "gemma4",
    "gemma4_moe",
    "gpt_oss",
    "qwen3_moe",
    "qwen3_moe_shares",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5",
    "qwen3_5_moe_text",
    "qwen3_5_moe",
    "mixtral",
    "mistral3",
    "granite",
    "seed_oss",
    "exaone4",
    "exaone4_small",
    "ernie4_5",
    "deepseek_v3",
    "deepseek_v3_bias",
    "deepseek_v2_lite",
    "deepseek_v2",
    "kimi_k2",
    "glm4_moe_lite",
    "glm4_moe",
    "glm4_moe_air",
    "olmo2",
    "olmo3",
    "granitemoe",
    "granitemoeshared",
    "minimax_m2",
    "ernie4_5_moe",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "cohere2",
    "apertus",
    "lfm2",
    "lfm2_moe",
    "granite4_h",
    "granite4",
    "nemotron_h",
    "nemotron_h_latent",
    "nemotron_h_dense",
    "llama4_text",
    "llama4",
];

/// Those of them that keep states: not every device computes them.
pub const HYBRIDS: &[&str] = &[
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5",
    "qwen3_5_moe_text",
    "qwen3_5_moe",
    "lfm2",
    "lfm2_moe",
    "granite4_h",
    "nemotron_h",
    "nemotron_h_latent",
    "nemotron_h_dense",
];

/// Those with other parts that are computed on the CPU only, and what these are called.
pub const CPU_ONLY: &[(&str, &str)] = &[
    ("glm4_moe", "experts that are chosen by sigmoids"),
    ("glm4_moe_air", "experts that are chosen by sigmoids"),
    ("olmo2", "norms of all of q and of all of k"),
    ("olmo3", "norms of all of q and of all of k"),
    ("minimax_m2", "experts that are chosen by sigmoids"),
    ("ernie4_5_moe", "experts that are chosen by sigmoids, with a bias"),
    ("hunyuan_v1_dense", "norms of q and k behind the rotation"),
    ("hunyuan_v1_moe", "norms of q and k behind the rotation"),
    ("cohere2", "layer norms"),
    ("apertus", "xIELU activations"),
    ("llama4_text", "experts whose weight multiplies what they read"),
    ("llama4", "experts whose weight multiplies what they read"),
    ("gemma4_text", "layers with heads of different sizes"),
    ("gemma4", "layers with heads of different sizes"),
    ("gemma4_moe", "layers with heads of different sizes"),
];

/// Those with latent attention: likewise.
pub const LATENT: &[&str] =
    &["deepseek_v3", "deepseek_v3_bias", "deepseek_v2_lite", "deepseek_v2", "kimi_k2", "glm4_moe_lite"];

/// Quantized checkpoints (`tools/make_quantized_fixtures.py`), one for each way of quantizing; likewise complete.
pub const QUANTIZED: &[&str] = &[
    "awq",
    "awq_neighbours",
    "gptq_act_order",
    "gptq_v2",
    "gptq_8bit",
    "ct_w4a16",
    "ct_w4a16_order",
    "ct_w8a8",
    "ct_fp8",
    "ct_mxfp4",
    "ct_nvfp4",
    "modelopt_nvfp4",
    "fp8_block",
    "fp8_tensor",
    "fp8_experts",
    "fp8_latent",
    "fp8_delta",
    "gpt_oss_mxfp4",
];

/// Largest difference to transformers' logits, relative to the largest logit of the row.
pub const LOGIT_TOLERANCE: f32 = 1e-4;

const BLOCK_TOKENS: usize = 16;
const MAX_ROWS: usize = 256;

/// Folder of a fixture.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Adapters (`tools/make_adapter_fixtures.py`); likewise complete.
pub const ADAPTERS: &[&str] =
    &["llama3", "llama3_ranks", "llama3_bias", "phi3", "qwen3_5_text", "deepseek_v2_lite"];

/// Folder of an adapter.
pub fn adapter(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/adapters").join(name)
}

/// Folder of the fixture that an adapter is of.
pub fn adapted(name: &str) -> PathBuf {
    let config =
        std::fs::read(adapter(name).join("adapter_config.json")).expect("an adapter has its configuration");
    let config: Value = serde_json::from_slice(&config).expect("it is JSON");
    fixture(config["base_model_name_or_path"].as_str().expect("the name of a fixture"))
}

/// Folder of a quantized fixture.
pub fn quantized(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/quantized").join(name)
}

/// Test data that is not in the repository: `FOLIO_TEST_DATA`, by default `../shared/data` next to the workspace.
/// `None`, after a warning, when it is not there.
pub fn test_data(relative: &str) -> Option<PathBuf> {
    let root = match std::env::var_os("FOLIO_TEST_DATA") {
        Some(root) => PathBuf::from(root),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data"),
    };
    let path = root.join(relative);
    if path.exists() {
        return Some(path);
    }
    // Past the test runner, which shows what a passing test prints to nobody.
    let why = "is absent; set FOLIO_TEST_DATA to the folder of test data";
    let _ = writeln!(std::io::stderr(), "SKIPPED: {} {why}", path.display());
    None
}

/// What a fixture showed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Parity {
    /// Largest relative logit difference.
    pub worst: f32,
    pub greedy_tokens: usize,
    /// Pooled prompts whose vectors were compared.
    pub vectors: usize,
}

/// Checks a fixture on a fresh backend per case. Panics, with the position, on the first difference.
pub fn check_fixture<B: Backend>(folder: &Path, new_backend: impl Fn() -> B) -> Parity {
    let checkpoint = Checkpoint::open(folder).unwrap_or_else(|error| panic!("{error}"));
    check_cases(folder, |length| Runner::load(&checkpoint, new_backend(), length))
}

/// The same of an adapter, on the fixture that it is of.
pub fn check_adapter<B: Backend>(name: &str, new_backend: impl Fn() -> B) -> Parity {
    check_cases(&adapter(name), |_| Runner::with_adapter(name, new_backend()))
}

/// What a folder expects, of runners for sequences of so many tokens.
fn check_cases<B: Backend>(folder: &Path, runner: impl Fn(Option<usize>) -> Runner<B>) -> Parity {
    let text = std::fs::read(folder.join("expected.json")).expect("a fixture has expected.json");
    let expected: Value = serde_json::from_slice(&text).expect("expected.json is JSON");
    let tensors =
        std::fs::read(folder.join("expected.safetensors")).expect("a fixture has expected.safetensors");
    let header = read_header(&tensors).expect("expected.safetensors is sound");

    let mut parity = Parity::default();
    for (number, case) in expected["cases"].as_array().expect("cases").iter().enumerate() {
        let floats = |name: String| -> Option<Vec<f32>> {
            let bytes = tensors[header.get(&name)?.range.clone()].as_chunks().0;
            Some(bytes.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
        };
        let logits = floats(format!("logits.{number}")).expect("logits of every case");
        let vectors = floats(format!("hidden.{number}"));
        let case = Case {
            what: format!("{} case {number}", folder.display()),
            prompt: numbers(&case["prompt"]),
            greedy: numbers(&case["greedy"]),
            positions: numbers(&case["positions"]).into_iter().map(|position| position as usize).collect(),
            max_model_len: case["max_model_len"].as_u64().map(|length| length as usize),
            logits,
        };
        let runner = || runner(case.max_model_len);
        parity.worst = parity.worst.max(case.check_logits(&mut runner()));
        if let Some(vectors) = vectors {
            parity.vectors += case.check_vectors(&mut runner(), &vectors);
        }
        parity.greedy_tokens += case.check_greedy(&mut runner());
    }
    parity
}

fn numbers(value: &Value) -> Vec<u32> {
    value.as_array().expect("a list").iter().map(|number| number.as_u64().expect("a number") as u32).collect()
}

struct Case {
    what: String,
    prompt: Vec<u32>,
    greedy: Vec<u32>,
    positions: Vec<usize>,
    max_model_len: Option<usize>,
    /// `[positions, vocab]`
    logits: Vec<f32>,
}

impl Case {
    /// Prompt and continuation computed in one go, the logits of the chosen positions compared.
    fn check_logits<B: Backend>(&self, runner: &mut Runner<B>) -> f32 {
        let tokens: Vec<u32> =
            self.prompt.iter().chain(&self.greedy[..self.greedy.len() - 1]).copied().collect();
        let vocab = runner.model.vocab;
        let rows: Vec<u32> = self.positions.iter().map(|position| *position as u32).collect();
        let found = runner.forward(&tokens, &rows).to_vec();
        assert_eq!(found.len(), self.logits.len(), "{}", self.what);
        let mut worst = 0.0f32;
        for (row, (found, expected)) in found.chunks(vocab).zip(self.logits.chunks(vocab)).enumerate() {
            let difference = relative_difference(found, expected);
            let position = self.positions[row];
            assert!(
                difference <= LOGIT_TOLERANCE,
                "{}: logits of position {position} differ by {difference:e}",
                self.what
            );
            worst = worst.max(difference);
        }
        worst
    }

    /// The prompt's last hidden state and the mean of all, normalized: `expected` is `[2, hidden]`. Half of the prompt is computed
    /// with logits beside the hidden states, half without.
    fn check_vectors<B: Backend>(&self, runner: &mut Runner<B>, expected: &[f32]) -> usize {
        let mut rows: Vec<Vec<f32>> = Vec::new();
        let (first, second) = self.prompt.split_at(self.prompt.len() / 2);
        for (part, logits) in [(first, vec![0, first.len() as u32 - 1]), (second, vec![])] {
            let wanted: Vec<u32> = (0..part.len() as u32).collect();
            runner.compute(part, &logits, &wanted);
            rows.extend(wanted.iter().map(|row| runner.backend.hidden(*row).to_vec()));
        }
        let width = expected.len() / 2;
        let mean: Vec<f32> = (0..width).map(|i| rows.iter().map(|row| row[i]).sum::<f32>()).collect();
        for (found, expected) in [&rows[rows.len() - 1], &mean].into_iter().zip(expected.chunks(width)) {
            let length = found.iter().map(|value| value * value).sum::<f32>().sqrt();
            let found: Vec<f32> = found.iter().map(|value| value / length).collect();
            let difference = relative_difference(&found, expected);
            assert!(difference <= LOGIT_TOLERANCE, "{}: vectors differ by {difference:e}", self.what);
        }
        2
    }

    fn check_greedy<B: Backend>(&self, runner: &mut Runner<B>) -> usize {
        let found = runner.greedy(&self.prompt, self.greedy.len());
        assert_eq!(found, self.greedy, "{}: greedy tokens differ", self.what);
        found.len()
    }
}

/// stories260K: small, trained, its goldens made by a float64 forward pass that agrees with llama2.c. Returns the number
/// of tokens checked.
pub fn check_stories<B: Backend>(folder: &Path, new_backend: impl Fn() -> B) -> usize {
    let checkpoint = Checkpoint::open(folder.join("hf")).unwrap_or_else(|error| panic!("{error}"));
    let text = std::fs::read(folder.join("goldens.json")).expect("goldens.json");
    let goldens: Value = serde_json::from_slice(&text).expect("goldens.json is JSON");
    let mut checked = 0;
    for case in goldens["cases"].as_array().expect("cases") {
        let mut runner = Runner::load(&checkpoint, new_backend(), None);
        let mut next = numbers(&case["prompt_ids"]);
        let steps = case["steps"].as_array().expect("steps");
        for (step, (expected, token)) in steps.iter().zip(numbers(&case["output_ids"])).enumerate() {
            let last = next.len() as u32 - 1;
            let logits = runner.forward(&next, &[last]);
            let golden = expected["logits"]
                .as_array()
                .expect("logits")
                .iter()
                .map(|value| value.as_f64().expect("a number"));
            for (id, golden) in numbers(&expected["top5"]).into_iter().zip(golden) {
                let found = logits[id as usize];
                let close =
                    (f64::from(found) - golden).abs() <= f64::from(LOGIT_TOLERANCE) * golden.abs().max(1.0);
                assert!(close, "step {step}: logit of {id} is {found}, expected {golden}");
            }
            assert_eq!(argmax(logits), token, "step {step}");
            next = vec![token];
            checked += 1;
        }
    }
    checked
}

/// Largest difference of two rows of logits, relative to the largest expected logit. Not-a-number counts as infinite.
pub fn relative_difference(found: &[f32], expected: &[f32]) -> f32 {
    let scale = expected.iter().fold(0.0f32, |max, value| max.max(value.abs()));
    let difference = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    let worst = difference.fold(0.0f32, |max, value| if value <= max { max } else { value });
    if worst.is_nan() { f32::INFINITY } else { worst / scale }
}

/// One sequence on one backend, its blocks deliberately out of order.
pub struct Runner<B> {
    pub backend: B,
    pub model: LoadedModel,
    pub adapter: Option<Arc<Adapter>>,
    blocks: Vec<u32>,
    position: usize,
}

impl<B: Backend> Runner<B> {
    /// Loads with an f32 cache.
    pub fn load(checkpoint: &Checkpoint, mut backend: B, max_model_len: Option<usize>) -> Self {
        let options = LoadOptions {
            max_rows: MAX_ROWS,
            max_logit_rows: MAX_ROWS,
            max_model_len,
            kv_formats: DType::F32.into(),
            block_tokens: BLOCK_TOKENS,
            keeps_all: false,
            taps: None,
            progress: None,
        };
        let model = Model::load(checkpoint, &mut backend, options).unwrap_or_else(|error| panic!("{error}"));
        let count = model.max_model_len.div_ceil(BLOCK_TOKENS);
        let groups = model.kv_layout.groups.len();
        backend
            .allocate_cache(&model.kv_layout, &vec![count; groups])
            .unwrap_or_else(|error| panic!("{error}"));
        let blocks = (0..count as u32).rev().collect();
        Self { backend, model, adapter: None, blocks, position: 0 }
    }

    /// On the fixture that an adapter is of, with it.
    pub fn with_adapter(name: &str, backend: B) -> Self {
        let checkpoint = Checkpoint::open(adapted(name)).unwrap_or_else(|error| panic!("{error}"));
        let runner = Self::load(&checkpoint, backend, None);
        let limits = AdapterLimits { rank: 64, bytes: 1 << 20 };
        let adapter = Adapter::read(&adapter(name), &runner.model.targets, limits);
        Self { adapter: Some(Arc::new(adapter.unwrap_or_else(|error| panic!("{error}")))), ..runner }
    }

    /// Appends `tokens` to the sequence and returns the logits of `rows` of them.
    pub fn forward(&mut self, tokens: &[u32], rows: &[u32]) -> &[f32] {
        self.compute(tokens, rows, &[])
    }

    /// The same with hidden states of `hidden` rows, which the backend gives out then.
    pub fn compute(&mut self, tokens: &[u32], rows: &[u32], hidden: &[u32]) -> &[f32] {
        let span = Span {
            first_row: 0,
            rows: tokens.len() as u32,
            first_position: self.position as u32,
            slot: 0,
            tentative_from: u32::MAX,
        };
        let mut batch = Batch {
            tokens: tokens.to_vec(),
            spans: vec![span],
            adapters: self.adapter.iter().cloned().map(Some).collect(),
            logit_rows: rows.to_vec(),
            hidden_rows: hidden.to_vec(),
            ..Batch::default()
        };
        for (group, of) in (0..).zip(&self.model.kv_layout.groups) {
            let entries = self.model.max_model_len.div_ceil(of.block_tokens);
            batch.edit_table(0, group, 0, self.blocks.iter().copied().take(entries));
        }
        self.position += tokens.len();
        self.backend.forward(&batch).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Greedy continuation, token by token.
    pub fn greedy(&mut self, prompt: &[u32], steps: usize) -> Vec<u32> {
        let mut generated = Vec::with_capacity(steps);
        let mut next = prompt.to_vec();
        while generated.len() < steps {
            let last = next.len() as u32 - 1;
            let token = argmax(self.forward(&next, &[last]));
            generated.push(token);
            next = vec![token];
        }
        generated
    }
}

/// Ties go to the lowest id.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, value) in logits.iter().enumerate() {
        if *value > logits[best] {
            best = id;
        }
    }
    best as u32
}
