//! A model on a machine with some traffic: what fits, and the world that the simulator runs.
//!
//! Owns: putting together what `folio serve` would ([`crate::runtime`]): layout, pools and limits are those of its own functions.

use anyhow::{Result, anyhow, bail};
use folio_engine::SchedulerConfig;
use folio_kv::{CacheConfig, GroupConfig, Layout};
use folio_model::backend::KvLayout;
use folio_model::kv_format::KvFormat;
use folio_sim::replay::{DraftConfig, ReplayConfig, TierConfig};
use folio_sim::retention::Policy;

use super::curve::{Limits, Measured, StepCurve};
use super::load::World;
use super::machine::Machine;
use super::model::{PlannedModel, WeightFormat};
use crate::bench::limits::Costs;
use crate::cli::Sizes;
use crate::memory::{self, FreeMemory, Pool, PoolError, PoolRequest};
use crate::profile::MeasuredModel;
use crate::{runtime, units};

/// What can be chosen.
#[derive(Clone, Debug)]
pub struct Choice {
    pub machine: Machine,
    pub weights: WeightFormat,
    pub kv: KvFormat,
    pub block_tokens: u32,
    pub max_model_len: Option<u32>,
    /// Where nothing is said, what a server on such a machine takes.
    pub max_num_seqs: Option<u32>,
    pub max_num_batched_tokens: Option<u32>,
    pub max_prefill_while_decoding: Option<u32>,
    pub kv_cache_memory: Option<u64>,
    pub kv_cache_share: Option<f64>,
    pub host_kv: Option<u64>,
    pub drafts: Option<DraftConfig>,
    pub policy: Policy,
}

impl Choice {
    pub fn sizes(&self) -> Sizes {
        let Sizes { max_num_seqs, max_num_batched_tokens, max_prefill_while_decoding, kv_cache_share } =
            Sizes::of(self.machine.accelerator);
        let max_num_seqs = self.max_num_seqs.unwrap_or(max_num_seqs);
        Sizes {
            max_num_seqs,
            // Every decode fits into every step.
            max_num_batched_tokens: self
                .max_num_batched_tokens
                .unwrap_or(max_num_batched_tokens.max(max_num_seqs)),
            max_prefill_while_decoding: self.max_prefill_while_decoding.unwrap_or(max_prefill_while_decoding),
            kv_cache_share: self.kv_cache_share.unwrap_or(kv_cache_share),
        }
    }
}

/// What comes of it.
#[derive(Clone, Debug)]
pub struct Setup {
    pub choice: Choice,
    pub layout: KvLayout,
    pub pool: Pool,
    pub weight_bytes: u64,
    pub max_model_len: u32,
    pub depth_cost: f64,
    /// One where the steps were measured, else the slow end and the fast end.
    pub curves: Vec<StepCurve>,
    /// Largest relative error of a measured curve at its own samples.
    pub curve_worst: Option<f64>,
    pub notes: Vec<String>,
}

impl Setup {
    /// `longest`: tokens of the longest sequence that comes.
    pub fn new(model: &PlannedModel, choice: Choice, longest: u32) -> Result<Self> {
        let own = u32::try_from(model.config.max_position).unwrap_or(u32::MAX);
        let most = choice.max_model_len.unwrap_or(own);
        if most > own {
            bail!("--max-model-len {most} is more than the model's {own} positions");
        }
        if longest > most {
            bail!("the longest sequence of the traffic has {longest} tokens, the model's context {most}");
        }
        let mut notes = Vec::new();
        let weight_bytes = model.weight_bytes(choice.weights);
        let mut max_model_len = most;
        let (layout, pool) = match Self::pool(model, &choice, weight_bytes, most) {
            // As its server would have to be started.
            Err(PoolFault::Pool(error @ PoolError::TooSmall { .. })) if choice.max_model_len.is_none() => {
                max_model_len = longest.next_multiple_of(1024).min(most);
                notes.push(format!("{error}; planned with --max-model-len {max_model_len}"));
                Self::pool(model, &choice, weight_bytes, max_model_len)
            }
            made => made,
        }
        .map_err(|fault| fault.explain(&choice, weight_bytes))?;
        let costs = Costs::new(&model.config, &layout, model.parameters, weight_bytes);
        let rates = choice.machine.rates(costs.quantized());
        let limits = |share| Limits { costs: costs.clone(), rates, share };
        let steps = choice.machine.steps_of(&measured_as(model, &choice, &layout, weight_bytes));
        let measured = steps.and_then(|steps| Measured::of(&steps.samples));
        notes.extend(steps.and_then(MeasuredModel::disturbed));
        let curve_worst = measured.as_ref().map(|curve| curve.worst);
        let curves = match measured {
            Some(curve) => vec![StepCurve::Measured(curve)],
            None => choice.machine.shares().map(|share| StepCurve::Limits(limits(share))).into(),
        };
        let depth_cost = runtime::depth_cost(&model.config, choice.block_tokens);
        Ok(Self { choice, layout, pool, weight_bytes, max_model_len, depth_cost, curves, curve_worst, notes })
    }

    fn pool(
        model: &PlannedModel,
        choice: &Choice,
        weight_bytes: u64,
        max_model_len: u32,
    ) -> Result<(KvLayout, Pool), PoolFault> {
        let layout =
            model.layout(choice.kv, choice.block_tokens, max_model_len).map_err(PoolFault::Format)?;
        let memory = choice.machine.memory_bytes.value as u64;
        let Some(left) = memory.checked_sub(weight_bytes).filter(|left| *left > 0) else {
            return Err(PoolFault::Weights);
        };
        let source =
            format!("of {} left beside {} of weights", units::bytes(memory), units::bytes(weight_bytes));
        let free = FreeMemory::new(left, source);
        let sizes = choice.sizes();
        let request = PoolRequest {
            asked_bytes: choice.kv_cache_memory,
            share: sizes.kv_cache_share,
            free: Some(free),
            bytes_per_block: layout.groups[0].bytes_per_block() as u64,
            windows: runtime::windows(&layout, &[]).map_err(|error| PoolFault::Format(error.to_string()))?,
            block_tokens: choice.block_tokens,
            max_model_len,
            max_num_seqs: sizes.max_num_seqs,
            max_num_batched_tokens: sizes.max_num_batched_tokens,
        };
        let pool = memory::pool(&request).map_err(PoolFault::Pool)?;
        Ok((layout, pool))
    }

    /// The same with a curve that is scaled from another's, where that was measured and this was not.
    pub fn scaled_from(mut self, base: &Self, model: &PlannedModel) -> Self {
        let ([StepCurve::Measured(measured)], [StepCurve::Limits(to), ..]) =
            (&base.curves[..], &self.curves[..])
        else {
            return self;
        };
        let costs = Costs::new(&model.config, &base.layout, model.parameters, base.weight_bytes);
        let from = Limits { rates: base.choice.machine.rates(costs.quantized()), costs, share: 1.0 };
        let (measured, to) = (measured.clone(), Limits { share: 1.0, ..to.clone() });
        self.curves = vec![StepCurve::Scaled { measured, from, to }];
        self
    }

    /// Cache groups, the first one too, with their pools.
    pub fn groups(&self) -> Vec<GroupConfig> {
        let first = GroupConfig {
            layout: Layout::Paged,
            blocks: self.pool.blocks,
            block_tokens: self.choice.block_tokens,
            bytes_per_block: self.layout.groups[0].bytes_per_block() as u64,
            optional: false,
        };
        [&[first][..], &self.pool.windows].concat()
    }

    /// Sequences of so many tokens that fit at once; one block of each pool is left for a copy.
    pub fn fitting(&self, tokens: u32) -> u32 {
        let of_group = |group: &GroupConfig| group.blocks.saturating_sub(1) / blocks_of(group, tokens);
        self.groups().iter().map(of_group).min().unwrap_or(0)
    }

    /// What the KV of one sequence of so many tokens takes.
    pub fn sequence_bytes(&self, tokens: u32) -> u64 {
        let of_group = |group: &GroupConfig| u64::from(blocks_of(group, tokens)) * group.bytes_per_block;
        self.groups().iter().map(of_group).sum()
    }

    /// Tokens whose KV fits, all sequences together.
    pub fn tokens(&self) -> u64 {
        u64::from(self.pool.blocks) * u64::from(self.choice.block_tokens)
    }

    /// The world with one of the curves.
    pub fn world(&self, curve: StepCurve) -> World {
        let Choice { machine, block_tokens, host_kv, drafts, policy, .. } = &self.choice;
        let sizes = self.choice.sizes();
        let scheduler = SchedulerConfig {
            max_num_seqs: sizes.max_num_seqs,
            max_num_batched_tokens: sizes.max_num_batched_tokens,
            max_prefill_tokens_while_decoding: sizes.max_prefill_while_decoding,
            max_model_len: self.max_model_len,
            max_transfer_bytes: self.pool.bytes / 2,
            max_prefetch_bytes: self.pool.bytes / 8,
            max_store_bytes: memory::store_bytes(self.pool.bytes),
            ..SchedulerConfig::default()
        };
        let cache = CacheConfig {
            blocks: self.pool.blocks,
            block_tokens: *block_tokens,
            bytes_per_block: self.layout.groups[0].bytes_per_block() as u64,
        };
        let bytes_per_s = machine.host_bytes_per_s.value;
        ReplayConfig {
            groups: self.pool.windows.clone(),
            policy: *policy,
            depth_cost: self.depth_cost,
            drafts: *drafts,
            tier: host_kv.map(|bytes| TierConfig { bytes, bytes_per_s }),
            ..ReplayConfig::new(scheduler, cache, curve, self.max_model_len)
        }
    }
}

/// Blocks that one sequence of so many tokens holds.
fn blocks_of(group: &GroupConfig, tokens: u32) -> u32 {
    let whole = match group.layout {
        Layout::State => u32::MAX,
        Layout::Paged | Layout::Window { .. } => tokens.div_ceil(group.block_tokens),
    };
    whole.min(group.blocks_max(1, 1)).max(1)
}

/// What a profile calls the model in this form.
fn measured_as(model: &PlannedModel, choice: &Choice, layout: &KvLayout, weight_bytes: u64) -> MeasuredModel {
    MeasuredModel {
        name: model.name.clone(),
        parameters: model.parameters,
        layers: model.config.layers,
        hidden: model.config.hidden,
        weight_bytes,
        kv_bytes_per_token: layout.bytes_per_token() as u64,
        threads: choice.machine.models.first().map_or(0, |measured| measured.threads),
        samples: Vec::new(),
        others: None,
    }
}

enum PoolFault {
    Format(String),
    /// They do not fit.
    Weights,
    Pool(PoolError),
}

impl PoolFault {
    fn explain(self, choice: &Choice, weight_bytes: u64) -> anyhow::Error {
        match self {
            Self::Format(reason) => anyhow!("{reason}"),
            Self::Pool(error) => anyhow!(error),
            Self::Weights => {
                let memory = choice.machine.memory_bytes.value;
                // A tenth of each for KV and the rest.
                let devices = (weight_bytes as f64 / (0.9 * memory)).ceil();
                anyhow!(
                    "{} of weights do not fit {} of memory of {}: at least {devices} times as much is needed (--devices, or other --weights)",
                    units::bytes(weight_bytes),
                    units::bytes(memory as u64),
                    choice.machine.title
                )
            }
        }
    }
}
