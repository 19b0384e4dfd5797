//! What proposes drafts: a second model, or a head of this one.
//!
//! Owns: whether it can draft for the model and does, and its place in the cache. Must never: load anything into the model's backend but what a
//! head has it give out.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use folio_engine::{Drafter, DrafterModel, DraftingExecutor, Executor, ModelExecutor, Reads};
use folio_kv::{GroupConfig, Layout};
use folio_model::Checkpoint;
use folio_model::backend::{DType, KvGroup};
use folio_model::draft_head::DraftHead;
use folio_model::hub::Held;
use folio_model::{eagle, mtp};
use folio_text::Tokenizer;

use super::agreement::{Agreement, AgreementLimits, PoolShape, Questions};
use super::weights::{WeightArgs, open_device};
use super::{Loaded, logit_rows, pair};
use crate::bench::limits::Costs;
use crate::cli::{EngineArgs, Sizes, Speculate};
use crate::demo;
use crate::device::Device;
use crate::models::Source;

/// What of a request's temperature drafts are drawn at: of the shares that were compared, that with which most are right, for a head and for a
/// small model (docs/speculation.md).
const DRAFT_TEMPERATURE: f32 = 0.5;

/// What a draft reads of what proposes it, a model or a head.
#[derive(Clone, Debug)]
pub struct DraftCost {
    pub name: String,
    /// All but the embeddings, of which it reads a row, and what the model computes for a head.
    pub weight_bytes: u64,
    pub kv_bytes_per_token: u64,
}

/// In memory, without a cache.
pub(super) struct Draft {
    pub name: String,
    pub drafter: Drafter,
    pub device: Device,
    /// On its files.
    pub held: Vec<Held>,
    kv: folio_model::backend::KvLayout,
    /// Most positions of a sequence.
    positions: usize,
    reads: Reads,
    /// Values in a row of its logits, and the tokens that they are of where that is not all.
    vocab: usize,
    token_ids: Option<Arc<[u32]>>,
    weight_bytes: u64,
}

/// A head that is open, for the model of a checkpoint. No weight is read.
pub(super) struct OpenHead {
    pub head: Box<dyn DraftHead>,
    pub drafter: Drafter,
    /// On files of its own.
    pub held: Option<Held>,
}

impl OpenHead {
    /// The one that the options ask for: `--draft-model`, where that is a head, or that of the model's own checkpoint, or of the built-in model.
    pub fn open(args: &EngineArgs, source: &Source, target: &Checkpoint) -> Result<Option<Self>> {
        match (&args.draft_model, args.speculate) {
            (Some(draft), _) => {
                Self::eagle(draft, args, target).with_context(|| format!("--draft-model {draft}"))
            }
            (None, Some(Speculate::Mtp)) => Self::mtp(target).context("--speculate mtp").map(Some),
            (None, Some(Speculate::Eagle3)) if *source == Source::BuiltIn => {
                let head =
                    eagle::Head::from_bytes(demo::HEAD, target).context("the built-in model's head")?;
                Self::reading(head, args, None).map(Some)
            }
            (None, _) => Ok(None),
        }
    }

    fn eagle(draft: &str, args: &EngineArgs, target: &Checkpoint) -> Result<Option<Self>> {
        let Some(folder) = Source::parse(Some(draft), &args.aliases)?.fetch()? else { return Ok(None) };
        match std::fs::read(folder.join("config.json")) {
            Ok(config) if eagle::is_head(&config) => {
                let head = eagle::Head::open(&folder, target)?;
                Self::reading(head, args, Some(Held::of(&folder))).map(Some)
            }
            // Whatever else is wrong with it is said where it is opened as a model.
            _ => Ok(None),
        }
    }

    fn reading(head: eagle::Head, args: &EngineArgs, held: Option<Held>) -> Result<Self> {
        let head = head.reading_behind(args.head_reads_behind).context("the model has no such layers")?;
        Ok(Self { head: Box::new(head), drafter: Drafter::Eagle3, held })
    }

    fn mtp(target: &Checkpoint) -> Result<Self> {
        let Some(head) = mtp::Head::open(target)? else {
            let place = target.location();
            bail!(
                "{place} has no MTP head: no tensor such as mtp.fc.weight or one named eh_proj behind its last layer"
            );
        };
        Ok(Self { head: Box::new(head), drafter: Drafter::Mtp, held: None })
    }
}

impl Draft {
    /// `--draft-model`, for a model with this tokenizer. Its weights are taken as they are.
    pub fn load(args: &EngineArgs, tokenizer: &Tokenizer) -> Result<Option<Self>> {
        let Some(draft) = &args.draft_model else { return Ok(None) };
        let own = EngineArgs {
            quantize: None,
            max_model_len: None,
            chat_template: None,
            draft_model: None,
            speculate: None,
            ..args.clone()
        };
        let loaded = Loaded::open_drafter(draft, &own).with_context(|| format!("--draft-model {draft}"))?;
        same_vocabulary(tokenizer, &loaded.tokenizer).with_context(|| format!("--draft-model {draft}"))?;
        let model = loaded.weights.model;
        let weights = Costs::of(&model, loaded.weights.backend.weight_bytes()).weights();
        Ok(Some(Self {
            name: loaded.source.name(),
            drafter: Drafter::Model,
            device: loaded.weights.backend,
            held: loaded.held,
            positions: model.max_model_len,
            reads: Reads::Tokens,
            vocab: model.vocab,
            token_ids: None,
            weight_bytes: weights as u64,
            kv: model.kv_layout,
        }))
    }

    /// The head, for the model of this checkpoint and name, whose sequences have at most so many tokens.
    pub fn of_head(
        open: &OpenHead,
        args: &EngineArgs,
        sizes: &Sizes,
        (target, model): (&Checkpoint, String),
        max_model_len: usize,
    ) -> Result<Self> {
        let OpenHead { head, drafter, .. } = open;
        let name = match &args.draft_model {
            Some(draft) => Source::parse(Some(draft), &args.aliases)?.name(),
            None if *drafter == Drafter::Mtp => format!("the MTP head of {model}"),
            None => format!("the EAGLE-3 head of {model}"),
        };
        let mut device = open_device(args.device, args.threads, args.enforce_eager, args.gemm_backend)?;
        let dtype = head.weight_encoding(target)?.plain().unwrap_or(DType::BF16);
        let load =
            WeightArgs { max_model_len: u32::try_from(max_model_len).ok(), ..WeightArgs::new(args, sizes) };
        let loaded = head.load(target, &mut *device, &load.options(dtype, None));
        let loaded = loaded.with_context(|| name.clone())?;
        Ok(Self {
            name,
            drafter: *drafter,
            device,
            held: Vec::new(),
            kv: loaded.kv_layout,
            positions: max_model_len,
            reads: Reads::Features { width: head.width() },
            vocab: loaded.vocab,
            token_ids: loaded.token_ids,
            weight_bytes: head.bytes_of_a_row(target)?,
        })
    }

    pub fn cost(&self) -> DraftCost {
        DraftCost {
            name: self.name.clone(),
            weight_bytes: self.weight_bytes,
            kv_bytes_per_token: self.kv.bytes_per_token() as u64,
        }
    }

    /// Where its KV and its states lie, without pools. Layers with windows keep what lies behind them: a drafter may lag behind what is
    /// released.
    pub fn groups(&self) -> Vec<GroupConfig> {
        let group = |kv: &KvGroup| GroupConfig {
            layout: if kv.state_values().is_some() { Layout::State } else { Layout::Paged },
            blocks: 0,
            block_tokens: kv.block_tokens as u32,
            bytes_per_block: kv.bytes_per_block() as u64,
            optional: true,
        };
        self.kv.groups.iter().map(group).collect()
    }

    /// An executor of both, and how often they say the same to these questions, where that can be found out. `pools` are those of the model's cache groups and
    /// behind them the drafter's, of which none is in use yet. The model has `vocab` tokens.
    pub fn executor(
        mut self,
        model: ModelExecutor,
        pools: &[PoolShape],
        sizes: &Sizes,
        vocab: usize,
        questions: &Questions,
    ) -> Result<(Box<dyn Executor>, Option<Agreement>)> {
        let groups = self.kv.groups.len();
        let group = pools.len() - groups;
        let blocks: Vec<usize> = pools[group..].iter().map(|pool| pool.blocks as usize).collect();
        self.device.allocate_cache(&self.kv, &blocks)?;
        let as_drafter = DrafterModel {
            group,
            groups,
            block_tokens: self.kv.block_tokens() as u32,
            positions: u32::try_from(self.positions).unwrap_or(u32::MAX),
            reads: self.reads,
        };
        let rows = sizes.max_num_batched_tokens as usize;
        let drafter = ModelExecutor::new(self.device.into_backend(), self.vocab, rows, logit_rows(sizes));
        let mut drafter = match self.token_ids {
            Some(ids) => drafter.with_token_ids(ids, vocab),
            None => drafter,
        };
        let mut model = model.with_groups(group);
        // A draft model may know fewer tokens than the model has rows for; a head embeds all.
        let known = (if self.reads == Reads::Tokens { self.vocab } else { vocab }) as u32;
        let room = AgreementLimits { pools, rows: sizes.max_num_batched_tokens, vocab: known };
        let found = pair::find_out(&mut model, &mut drafter, as_drafter, room, questions);
        let executor =
            DraftingExecutor::new(model, drafter, as_drafter, known).at_temperature(DRAFT_TEMPERATURE);
        Ok((Box::new(executor), found))
    }
}

/// A draft is a token id: both must mean the same by each.
fn same_vocabulary(model: &Tokenizer, draft: &Tokenizer) -> Result<()> {
    let (tokens, own) = (model.vocab_size(), draft.vocab_size());
    if tokens != own {
        bail!(
            "its vocabulary has {own} tokens, the model's {tokens}: a draft model needs the same vocabulary"
        );
    }
    let other = |id: &u32| model.token_bytes(*id) != draft.token_bytes(*id);
    match (0..tokens as u32).filter(other).count() {
        0 => Ok(()),
        others => bail!(
            "{others} of its {tokens} tokens are not the model's: a draft model needs the same vocabulary"
        ),
    }
}
