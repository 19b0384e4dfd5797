//! A second model, which proposes drafts.
//!
//! Owns: whether it can draft for the other, and its place in the cache. Must never: load anything into the other's backend.

use anyhow::{Context, Result, bail};
use folio_engine::{DrafterModel, DraftingExecutor, Executor, ModelExecutor};
use folio_kv::{GroupConfig, Layout};
use folio_model::backend::GroupKind;
use folio_model::hub::Held;
use folio_text::Tokenizer;

use super::{Loaded, logit_rows};
use crate::cli::{EngineArgs, Sizes};
use crate::device::Device;

/// In memory, without a cache.
pub(super) struct Draft {
    pub name: String,
    pub device: Device,
    /// On its files.
    pub held: Held,
    model: folio_model::LoadedModel,
}

impl Draft {
    /// `--draft-model`, for a model with this tokenizer. Its weights are taken as they are.
    pub fn load(args: &EngineArgs, tokenizer: &Tokenizer) -> Result<Option<Self>> {
        let Some(draft) = &args.draft_model else { return Ok(None) };
        let own = EngineArgs { quantize: None, max_model_len: None, chat_template: None, ..args.clone() };
        let loaded = Loaded::open(Some(draft), &own).with_context(|| format!("--draft-model {draft}"))?;
        same_vocabulary(tokenizer, &loaded.tokenizer).with_context(|| format!("--draft-model {draft}"))?;
        let groups = &loaded.weights.model.kv_layout.groups;
        if let Some(group) = groups.iter().find(|group| group.kind != GroupKind::Full) {
            bail!(
                "--draft-model {draft}: it has layers of {:?}; a draft model's layers see all positions",
                group.kind
            );
        }
        let name = loaded.source.name();
        Ok(Some(Self {
            name,
            device: loaded.weights.backend,
            held: loaded.held,
            model: loaded.weights.model,
        }))
    }

    /// Where its KV lies, without a pool.
    pub fn group(&self) -> GroupConfig {
        let group = &self.model.kv_layout.groups[0];
        GroupConfig {
            layout: Layout::Paged,
            blocks: 0,
            block_tokens: group.block_tokens as u32,
            bytes_per_block: group.bytes_per_block() as u64,
            optional: true,
        }
    }

    /// An executor of both, where the draft model's KV is `group`, a pool of `blocks`.
    pub fn executor(
        mut self,
        model: ModelExecutor,
        group: usize,
        blocks: u32,
        sizes: &Sizes,
    ) -> Result<Box<dyn Executor>> {
        self.device.allocate_cache(&self.model.kv_layout, &[blocks as usize])?;
        let rows = sizes.max_num_batched_tokens as usize;
        let (vocab, positions) = (self.model.vocab, self.model.max_model_len);
        let drafter = ModelExecutor::new(self.device.into_backend(), vocab, rows, logit_rows(sizes));
        let positions = u32::try_from(positions).unwrap_or(u32::MAX);
        let as_drafter = DrafterModel { group, positions };
        let model = model.with_groups(group);
        Ok(Box::new(DraftingExecutor::new(model, drafter, as_drafter, vocab as u32)))
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
