//! A model on a backend that says of every row what it computed.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use folio_cpu::{CpuBackend, CpuOptions, Isa, Quantize};
use folio_cuda::CudaBackend;
use folio_emulator::Order;
use folio_engine::plan::{
    ExecutorError, PLACEHOLDER, SamplePlan, Sampled, SequenceId, StepOutput, StepPlan, Want,
};
use folio_engine::{EmbeddingRange, Executor, Sampler};
use folio_kv::{GroupConfig, Layout};
use folio_model::adapter::AdapterTargets;
use folio_model::backend::{Backend, Batch, GroupKind, KvFormat, KvGroup, KvLayout, Span};
use folio_model::draft_head::DraftHead;
use folio_model::kv_format::{KvFormats, KvSkip};
use folio_model::testing::recast::{Cast, Recast};
use folio_model::{Checkpoint, LoadOptions, LoadedModel, Model};

use super::{BLOCK_TOKENS, MAX_LEN, MAX_ROWS};

/// What computes.
#[derive(Clone, Copy, Debug)]
pub enum On {
    Cpu,
    /// A GPU, where there is one; else its kernels on the host, threads in this order.
    Device(Order),
    /// The same, where a library multiplies what it may.
    Library(Order),
}

/// Which arithmetic to run.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub on: On,
    pub threads: usize,
    pub isa: Option<Isa>,
    pub kv: KvFormat,
    /// The first layer keeps f16.
    pub mixed: bool,
    /// Converts the checkpoint's weights while loading.
    pub weights: Cast,
    /// Quantizes them while loading, where the columns are whole blocks.
    pub quantize: Option<Quantize>,
    /// Blocks of window groups have so many times the tokens.
    pub window_blocks: u32,
}

impl Setup {
    pub const PLAIN: Setup = Setup {
        on: On::Cpu,
        threads: 2,
        isa: None,
        kv: KvFormat::F16,
        mixed: false,
        weights: Cast::Keep,
        quantize: None,
        window_blocks: 1,
    };
}

/// (position, token, hash of the logits row at that position)
pub(super) type Row = (u32, u32, u64);

/// Whether this machine has the instruction set.
pub fn runs(isa: Isa) -> bool {
    CpuBackend::new(CpuOptions { threads: Some(1), isa: Some(isa) }).is_ok()
}

/// The backend, and what it computed since the last [`Recorder::take`].
pub struct Recorder {
    pub(super) backend: Box<dyn Backend>,
    /// Whether the hidden state of every row is wanted in every step, or only where a request wants one: steps that want none may be
    /// run from a graph.
    all_hidden: bool,
    /// The cache groups beside full attention.
    pub(super) windows: Vec<GroupConfig>,
    quantized: usize,
    pub(super) vocab: usize,
    pub(super) targets: AdapterTargets,
    batch: Batch,
    output: StepOutput,
    sampler: Sampler,
    rows: HashMap<SequenceId, BTreeMap<u32, Row>>,
}

impl Recorder {
    pub fn load(fixture: &str, setup: Setup, blocks: u32) -> Self {
        Self::load_tapped(&longer(fixture), fixture, setup, blocks, None)
    }

    /// With features for a head, if there is one.
    pub(super) fn load_tapped(
        checkpoint: &Checkpoint,
        fixture: &str,
        setup: Setup,
        blocks: u32,
        taps: Option<&dyn DraftHead>,
    ) -> Self {
        let options = options(setup, taps);
        let (mut backend, mut model, quantized) = match setup.on {
            On::Cpu => {
                let options_of_cpu = CpuOptions { threads: Some(setup.threads), isa: setup.isa };
                let mut backend = CpuBackend::new(options_of_cpu).expect("a backend");
                if let Some(to) = setup.quantize {
                    backend.quantize_weights(to);
                }
                let (backend, model, recast) = load(checkpoint, backend, setup.weights, options);
                let quantized = backend.quantized().matrices + recast;
                (Box::new(backend) as Box<dyn Backend>, model, quantized)
            }
            On::Device(order) | On::Library(order) => {
                let library = matches!(setup.on, On::Library(_));
                let driver = match library {
                    true => folio_emulator::device_with_library(order),
                    false => folio_emulator::device(order),
                };
                let backend = CudaBackend::new(driver).expect("a backend");
                let (backend, model, recast) = load(checkpoint, backend, setup.weights, options);
                // On a GPU the library may be too old for a type of weights.
                let given = backend.given_to_a_library() > 0;
                assert!(given == library || backend.device().name != "emulator", "{fixture}");
                (Box::new(backend) as Box<dyn Backend>, model, recast)
            }
        };
        for group in model.kv_layout.groups.iter_mut().skip(1) {
            // States are kept as often as may be, so that there is much to go on from.
            let tokens =
                if group.state_values().is_some() { BLOCK_TOKENS as usize } else { group.block_tokens };
            group.block_tokens = tokens * setup.window_blocks as usize;
        }
        backend
            .allocate_cache(&model.kv_layout, &vec![blocks as usize; model.kv_layout.groups.len()])
            .expect("a cache");
        let vocab = model.vocab;
        Self {
            backend,
            all_hidden: matches!(setup.on, On::Cpu),
            windows: windows(&model.kv_layout),
            quantized,
            vocab,
            targets: model.targets,
            batch: Batch::default(),
            output: StepOutput::default(),
            sampler: Sampler::default(),
            rows: HashMap::new(),
        }
    }

    /// Matrices that became blocks while loading.
    pub fn quantized(&self) -> usize {
        self.quantized
    }

    pub fn vocab(&self) -> u32 {
        self.vocab as u32
    }

    /// Of a prefix of so many tokens, what can be gone on from behind a text that was computed on: all, or up to the last kept state.
    pub fn kept(&self, tokens: u32) -> u32 {
        let states = self.windows.iter().filter(|group| group.layout == Layout::State);
        states.fold(tokens, |tokens, group| tokens - tokens % group.block_tokens)
    }

    /// Whether some layers look back only so far, or keep states.
    pub fn has_windows(&self) -> bool {
        !self.windows.is_empty()
    }

    pub(super) fn take(&mut self) -> Vec<Vec<Row>> {
        self.rows.drain().map(|(_, rows)| rows.into_values().collect()).collect()
    }
}

impl Executor for Recorder {
    fn begin(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.begin_with_drafts(plan, &[])
    }

    fn begin_with_drafts(&mut self, plan: &StepPlan, drafts: &[u32]) -> Result<(), ExecutorError> {
        let (batch, groups) = (&mut self.batch, 1 + self.windows.len());
        batch.clear();
        let mut plan = plan.clone();
        let tokens = plan.sequences.iter_mut().flat_map(|sequence| &mut sequence.tokens);
        for token in tokens.filter(|token| **token & PLACEHOLDER != 0) {
            *token = drafts[(*token & !PLACEHOLDER) as usize];
        }
        for copy in plan.copies.iter().filter(|copy| (copy.group as usize) < groups) {
            let (group, from, to, tokens) = (copy.group, copy.from.0, copy.to.0, copy.tokens);
            batch.copies.push(folio_model::backend::BlockCopy { group, from, to, tokens });
        }
        for (slot, sequence) in (0..).zip(&plan.sequences) {
            batch.spans.push(Span {
                first_row: batch.tokens.len() as u32,
                rows: sequence.tokens.len() as u32,
                first_position: sequence.first_position,
                slot,
                tentative_from: sequence.tentative_from().unwrap_or(u32::MAX),
            });
            batch.adapters.push(sequence.adapter.as_ref().map(|adapter| adapter.weights.clone()));
            sequence.give(0..sequence.tokens.len(), batch.tokens.len(), batch);
            batch.tokens.extend(&sequence.tokens);
            let end = batch.tokens.len() as u32;
            batch.feature_rows.extend(end - sequence.features..end);
            for (group, table) in (0..).zip(sequence.block_tables.iter().take(groups)) {
                batch.edit_table(slot, group, 0, table.iter().copied());
            }
        }
        if batch.adapters.iter().all(Option::is_none) {
            batch.adapters.clear();
        }
        batch.logit_rows.extend(0..batch.tokens.len() as u32);
        // Of every row too, so that each is judged beside all others.
        let wanted = |sample: &SamplePlan| matches!(sample.want, Want::Hidden | Want::HiddenSum { .. });
        if self.all_hidden || plan.sequences.iter().flat_map(|s| &s.samples).any(wanted) {
            batch.hidden_rows.extend(0..batch.tokens.len() as u32);
        }
        self.output.step = plan.step;
        self.output.samples.clear();
        self.output.drafts = drafts.to_vec();
        self.output.features.clear();
        if batch.tokens.is_empty() {
            return Ok(());
        }
        let logits = self.backend.forward(batch).expect("forward").to_vec();
        let features = batch.feature_rows.iter().flat_map(|row| self.backend.features(*row));
        self.output.features.extend(features);
        let row_of = |row: usize| &logits[row * self.vocab..][..self.vocab];
        for (span, sequence) in batch.spans.iter().zip(&plan.sequences) {
            let seen = self.rows.entry(sequence.id).or_default();
            let first = self.output.samples.len();
            for sample in &sequence.samples {
                let (first, row) = (span.first_row, span.first_row + sample.row);
                let hidden = |row| self.backend.hidden(row);
                self.output.samples.push(match &sample.want {
                    Want::Token(spec) => {
                        self.sampler.sample_behind(sequence.drafts_before(sample), row_of(row as usize), spec)
                    }
                    Want::Hidden => Sampled::Hidden(hidden(row).to_vec()),
                    Want::HiddenSum { first: from, before } => {
                        let mut sum = before.as_deref().map_or(vec![0.0; hidden(row).len()], <[f64]>::to_vec);
                        for row in first + from..=row {
                            sum.iter_mut()
                                .zip(hidden(row))
                                .for_each(|(sum, value)| *sum += f64::from(*value));
                        }
                        Sampled::HiddenSum(sum)
                    }
                    Want::Score { .. } => panic!("these requests want no scores"),
                });
            }
            // Rows of drafts count as far as each is what the row before it chooses, and no end.
            let known = sequence.tokens.len() - sequence.drafts as usize;
            let sampled = &self.output.samples[first..];
            let chosen = |at: usize| matches!(sampled[at], Sampled::Token { id, .. } if id == sequence.tokens[known + at]);
            let ends = |at: usize| match &sequence.samples[at].want {
                Want::Token(spec) => {
                    let ends = [&spec.params.stop_token_ids, &spec.params.eos_token_ids];
                    ends.iter().any(|ends| ends.contains(&sequence.tokens[known + at]))
                }
                _ => false,
            };
            let right = (0..sequence.drafts as usize).take_while(|at| chosen(*at) && !ends(*at));
            let confirmed = known + right.count();
            for (i, token) in sequence.tokens[..confirmed].iter().enumerate() {
                let position = sequence.first_position + i as u32;
                // With another adapter it is another row, and so is one of another image.
                let adapter = sequence.adapter.as_ref().map_or(0, |adapter| adapter.id.0.get());
                let of_image = |range: &&EmbeddingRange| (range.start..range.end()).contains(&position);
                let image = sequence.embeddings.iter().flat_map(|ranges| ranges.iter()).find(of_image);
                let image = image.map_or(0, |range| u32::from(range.content[0]));
                let token = adapter << 24 | image << 16 | *token;
                let row = (position, token, hash(row_of(span.first_row as usize + i)));
                // A position computed again (after preemption) must give what it gave before.
                assert_eq!(*seen.entry(position).or_insert(row), row, "recomputed differently");
            }
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<&StepOutput, ExecutorError> {
        Ok(&self.output)
    }
}
/// What backends are prepared for.
pub(super) fn options(setup: Setup, taps: Option<&dyn DraftHead>) -> LoadOptions<'_> {
    LoadOptions {
        max_rows: MAX_ROWS,
        max_logit_rows: MAX_ROWS,
        max_model_len: Some(MAX_LEN as usize),
        keeps_all: false,
        kv_formats: KvFormats {
            most: setup.kv,
            skipped: KvFormat::F16,
            skip: if setup.mixed { vec![KvSkip::Layer(0)] } else { vec![] },
        },
        block_tokens: BLOCK_TOKENS as usize,
        taps,
        progress: None,
    }
}

/// Loads a checkpoint whose weights are cast; and how many of its matrices became blocks.
fn load<B: Backend>(
    checkpoint: &Checkpoint,
    backend: B,
    cast: Cast,
    options: LoadOptions<'_>,
) -> (B, LoadedModel, usize) {
    let mut recast = Recast { backend, recast: 0, cast };
    let model = Model::load(checkpoint, &mut recast, options).expect("a fixture loads");
    (recast.backend, model, recast.recast)
}

/// All groups but the first, without pools.
pub fn windows(layout: &KvLayout) -> Vec<GroupConfig> {
    let window = |group: &KvGroup| match group.kind {
        GroupKind::Window { tokens } => GroupConfig::window(tokens, 0, group.block_tokens as u32, 1),
        GroupKind::State { .. } => {
            GroupConfig { layout: Layout::State, ..GroupConfig::window(0, 0, group.block_tokens as u32, 1) }
        }
        kind => panic!("a second group without a window: {kind:?}"),
    };
    layout.groups.iter().skip(1).map(window).collect()
}

/// FNV-1a over the bits.
fn hash(logits: &[f32]) -> u64 {
    logits.iter().fold(0xcbf2_9ce4_8422_2325, |hash, value| {
        (hash ^ u64::from(value.to_bits())).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// The fixture with room for [`MAX_LEN`] positions: parity needs few, attention chunks need more. Its windows stay as they are.
pub(super) fn longer(fixture: &str) -> Checkpoint {
    let quantized = folio_model::testing::QUANTIZED.contains(&fixture);
    longer_of(&match quantized {
        true => folio_model::testing::quantized(fixture),
        false => folio_model::testing::fixture(fixture),
    })
}

pub(super) fn longer_of(folder: &Path) -> Checkpoint {
    changed(folder, |_| ())
}

/// The same with another configuration of its decoder.
pub(super) fn changed(folder: &Path, change: impl FnOnce(&mut serde_json::Value)) -> Checkpoint {
    let what = folder.display();
    let read = |name: &str| {
        std::fs::read(folder.join(name)).unwrap_or_else(|error| panic!("{what}/{name}: {error}"))
    };
    let mut config: serde_json::Value =
        serde_json::from_slice(&read("config.json")).expect("a fixture's config.json");
    let decoder = match config.get("text_config") {
        Some(_) => &mut config["text_config"],
        None => &mut config,
    };
    decoder["max_position_embeddings"] = MAX_LEN.into();
    change(decoder);
    let config = serde_json::to_vec(&config).expect("it was JSON");
    let mut files = vec![("config.json".to_owned(), config)];
    for entry in std::fs::read_dir(folder).expect("a fixture's folder").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("model") {
            files.push((name.clone(), read(&name)));
        }
    }
    // Leaked: a checkpoint in memory is part of the program, and a test program is short-lived.
    let files: Vec<(&'static str, &'static [u8])> =
        files.into_iter().map(|(name, bytes)| (&*name.leak(), &*Vec::leak(bytes))).collect();
    Checkpoint::from_bytes(Vec::leak(files)).unwrap_or_else(|error| panic!("{what}: {error}"))
}
