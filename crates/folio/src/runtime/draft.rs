//! What proposes drafts: a second model, or a head of this one.
//!
//! Owns: whether it can draft for the model, and its place in the cache. Must never: load anything into the model's backend but what a head
//! has it give out.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use folio_engine::{DrafterModel, DraftingExecutor, Executor, ModelExecutor, Reads};
use folio_kv::{GroupConfig, Layout};
use folio_model::Checkpoint;
use folio_model::backend::{DType, GroupKind, KvGroup};
use folio_model::eagle::{self, Head};
use folio_model::hub::Held;
use folio_text::Tokenizer;

use super::weights::{WeightArgs, open_device};
use super::{Loaded, logit_rows};
use crate::cli::{EngineArgs, Sizes};
use crate::device::Device;
use crate::models::{Aliases, Source};

/// In memory, without a cache.
pub(super) struct Draft {
    pub name: String,
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
}

/// `--draft-model`, where that is a head, for the model of this checkpoint, and what holds its files. No weight is read.
pub(super) fn head(draft: &str, aliases: &Aliases, target: &Checkpoint) -> Result<Option<(Head, Held)>> {
    let open = || -> Result<Option<(Head, Held)>> {
        let Some(folder) = Source::parse(Some(draft), aliases)?.fetch()? else { return Ok(None) };
        match std::fs::read(folder.join("config.json")) {
            Ok(config) if eagle::is_head(&config) => {
                Ok(Some((Head::open(&folder, target)?, Held::of(&folder))))
            }
            // Whatever else is wrong with it is said where it is opened as a model.
            _ => Ok(None),
        }
    };
    open().with_context(|| format!("--draft-model {draft}"))
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
        let loaded = Loaded::open(Some(draft), &own).with_context(|| format!("--draft-model {draft}"))?;
        same_vocabulary(tokenizer, &loaded.tokenizer).with_context(|| format!("--draft-model {draft}"))?;
        let model = loaded.weights.model;
        if let Some(group) = model.kv_layout.groups.iter().find(|group| group.kind != GroupKind::Full) {
            bail!(
                "--draft-model {draft}: it has layers of {:?}; a draft model's layers see all positions",
                group.kind
            );
        }
        Ok(Some(Self {
            name: loaded.source.name(),
            device: loaded.weights.backend,
            held: loaded.held,
            positions: model.max_model_len,
            reads: Reads::Tokens,
            vocab: model.vocab,
            token_ids: None,
            kv: model.kv_layout,
        }))
    }

    /// The head, for the model of this checkpoint, whose sequences have at most so many tokens.
    pub fn of_head(
        head: &Head,
        args: &EngineArgs,
        sizes: &Sizes,
        target: &Checkpoint,
        max_model_len: usize,
    ) -> Result<Self> {
        let draft = args.draft_model.as_deref().unwrap_or_default();
        let mut device = open_device(args.device, args.threads, args.enforce_eager, args.gemm_backend)?;
        let dtype = head.weight_encoding()?.plain().unwrap_or(DType::BF16);
        let load =
            WeightArgs { max_model_len: u32::try_from(max_model_len).ok(), ..WeightArgs::new(args, sizes) };
        let loaded = head.load(target, &mut *device, &load.options(dtype, None));
        let loaded = loaded.with_context(|| format!("--draft-model {draft}"))?;
        Ok(Self {
            name: Source::parse(Some(draft), &args.aliases)?.name(),
            device,
            held: Vec::new(),
            kv: loaded.kv_layout,
            positions: max_model_len,
            reads: Reads::Features { width: head.width() },
            vocab: loaded.vocab,
            token_ids: loaded.token_ids,
        })
    }

    fn kv_group(&self) -> &KvGroup {
        &self.kv.groups[0]
    }

    /// Where its KV lies, without a pool.
    pub fn group(&self) -> GroupConfig {
        GroupConfig {
            layout: Layout::Paged,
            blocks: 0,
            block_tokens: self.kv_group().block_tokens as u32,
            bytes_per_block: self.kv_group().bytes_per_block() as u64,
            optional: true,
        }
    }

    /// An executor of both, where the drafter's KV is `group`, a pool of `blocks`. The model has `vocab` tokens.
    pub fn executor(
        mut self,
        model: ModelExecutor,
        group: usize,
        blocks: u32,
        sizes: &Sizes,
        vocab: usize,
    ) -> Result<Box<dyn Executor>> {
        self.device.allocate_cache(&self.kv, &[blocks as usize])?;
        let as_drafter = DrafterModel {
            group,
            block_tokens: self.kv_group().block_tokens as u32,
            positions: u32::try_from(self.positions).unwrap_or(u32::MAX),
            reads: self.reads,
        };
        let rows = sizes.max_num_batched_tokens as usize;
        let drafter = ModelExecutor::new(self.device.into_backend(), self.vocab, rows, logit_rows(sizes));
        let drafter = match self.token_ids {
            Some(ids) => drafter.with_token_ids(ids, vocab),
            None => drafter,
        };
        let model = model.with_groups(group);
        // A draft model may know fewer tokens than the model has rows for; a head embeds all.
        let known = if self.reads == Reads::Tokens { self.vocab } else { vocab };
        Ok(Box::new(DraftingExecutor::new(model, drafter, as_drafter, known as u32)))
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
