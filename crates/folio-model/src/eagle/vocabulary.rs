//! Which tokens a head can say: `d2t`, and `t2d`, which says the same of the model's tokens.
//!
//! Owns: their meaning. `d2t[i]` is what is added to a head's token `i` to be the model's.

use std::sync::Arc;

use crate::checkpoint::Checkpoint;
use crate::error::{ModelError, Result};

const TO_MODEL: &str = "d2t";
const IN_HEAD: &str = "t2d";
/// Tensors that are no weights.
pub(super) const TENSORS: [&str; 2] = [TO_MODEL, IN_HEAD];

/// Of each of the head's `draft_vocab` tokens, the model's, of `vocab`. `None`: they are the same.
pub(super) fn token_ids(
    checkpoint: &Checkpoint,
    draft_vocab: usize,
    vocab: usize,
) -> Result<Option<Arc<[u32]>>> {
    let Some(stored) = checkpoint.values(TO_MODEL) else {
        return match draft_vocab == vocab {
            true => Ok(None),
            false => Err(ModelError::MissingTensor {
                tensor: TO_MODEL.to_owned(),
                checkpoint: format!(
                    "{}, which has {draft_vocab} of the model's {vocab} tokens",
                    checkpoint.location()
                ),
            }),
        };
    };
    let wrong = |tensor: &str, problem: String| {
        Err(ModelError::Tensor { file: stored.file.to_owned(), tensor: tensor.to_owned(), problem })
    };
    let found = stored.shape;
    if found != [draft_vocab] {
        return wrong(
            TO_MODEL,
            format!("has shape {found:?}, expected [{draft_vocab}] from draft_vocab_size"),
        );
    }
    let offsets: Vec<i64> = match stored.dtype.as_str() {
        "I64" => stored.bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect(),
        "I32" => stored.bytes.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes).into()).collect(),
        other => return wrong(TO_MODEL, format!("has dtype {other}, expected I64 or I32")),
    };
    let mut said = vec![false; vocab];
    let mut ids = Vec::with_capacity(draft_vocab);
    for (own, offset) in (0i64..).zip(offsets) {
        let id = own.checked_add(offset).and_then(|id| usize::try_from(id).ok()).filter(|id| *id < vocab);
        let Some(id) = id else {
            return wrong(
                TO_MODEL,
                format!("makes token {own} token {own} + {offset} of the model's {vocab}"),
            );
        };
        if std::mem::replace(&mut said[id], true) {
            return wrong(TO_MODEL, format!("makes two tokens, {own} the second, token {id} of the model"));
        }
        ids.push(id as u32);
    }
    if let Some(mask) = checkpoint.values(IN_HEAD).filter(|mask| mask.dtype == "BOOL") {
        let of_mask = mask.bytes.iter().filter(|byte| **byte != 0).count();
        let same = mask.bytes.iter().map(|byte| *byte != 0).eq(said.iter().copied());
        if !same {
            let tokens = mask.bytes.len();
            return wrong(
                IN_HEAD,
                format!("has {of_mask} of {tokens} tokens, and not those {draft_vocab} that {TO_MODEL} has"),
            );
        }
    }
    let same = draft_vocab == vocab && (0..).zip(&ids).all(|(own, id)| own == *id);
    Ok((!same).then(|| ids.into()))
}
