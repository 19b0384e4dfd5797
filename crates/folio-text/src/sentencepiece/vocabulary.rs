//! The pieces of a model and the tokens that are added to them, by id.
//!
//! Owns: which text an id has, and what of them is special, is text, or is looked for before anything else. Must never: let two ids have one
//! text, or a file add more than the limits allow.

use std::collections::{BTreeMap, HashMap, HashSet};

use folio_model::checkpoint::gguf::TokenKind;

use super::FILE;
use super::beside::{AddedSpec, Listed, bad};
use super::model::ModelProto;
use crate::added::{Added, AddedTokens};
use crate::error::TextError;
use crate::pieces::SPACE;

/// Ids without a text that may lie between the pieces and the last added token.
const GAP_MAX: usize = 1 << 16;
/// Of one added token, and of all together.
const TEXT_BYTES_MAX: usize = 512;
const TEXTS_BYTES_MAX: usize = 1 << 20;

/// What is looked for in a text before anything else.
struct Searched {
    text: String,
    special: bool,
    added: Added,
}

pub(super) struct Vocabulary {
    /// By id; empty where an id has none.
    pub tokens: Vec<String>,
    /// Of a token that is no piece, or no longer that piece, `Control`.
    kinds: Vec<TokenKind>,
    ids: HashMap<String, u32>,
    searched: BTreeMap<u32, Searched>,
}

impl Vocabulary {
    /// `special`: tokens that are special if they are tokens.
    pub(super) fn new(
        model: &ModelProto<'_>,
        listed: &[Listed],
        special: &[AddedSpec],
    ) -> Result<Self, TextError> {
        let mut vocabulary = Self::of_pieces(model);
        vocabulary.make_room(model, listed)?;
        for listed in listed {
            vocabulary.insert(model, listed)?;
        }
        for token in special {
            let Some(&id) = vocabulary.ids.get(&token.content) else { continue };
            let searched = vocabulary.searched.entry(id).or_insert_with(|| Searched::of(id, token));
            searched.special = true;
        }
        let texts = || vocabulary.searched.values().map(|searched| searched.text.len());
        let (longest, all) = (texts().max().unwrap_or(0), texts().sum::<usize>());
        if longest > TEXT_BYTES_MAX || all > TEXTS_BYTES_MAX {
            let reason = format!(
                "its added tokens have {all} bytes, the longest {longest}, more than {TEXTS_BYTES_MAX} or {TEXT_BYTES_MAX}"
            );
            return Err(TextError::BadTokenizer { file: FILE.to_owned(), reason });
        }
        Ok(vocabulary)
    }

    fn of_pieces(model: &ModelProto<'_>) -> Self {
        let mut searched = BTreeMap::new();
        for (id, piece) in (0u32..).zip(&model.pieces) {
            let is_special = match piece.kind {
                TokenKind::Control => true,
                TokenKind::UserDefined => false,
                _ => continue,
            };
            let mut entry = Searched::of(id, &AddedSpec::plain(piece.text, is_special));
            if !is_special {
                entry.text = entry.text.replace(SPACE, " ");
            }
            searched.insert(id, entry);
        }
        Self {
            tokens: model.pieces.iter().map(|piece| piece.text.to_owned()).collect(),
            kinds: model.pieces.iter().map(|piece| piece.kind).collect(),
            ids: model.ids.iter().map(|(text, id)| ((*text).to_owned(), *id)).collect(),
            searched,
        }
    }

    /// Takes the texts away from pieces that are to have others, and makes ids behind the last piece.
    fn make_room(&mut self, model: &ModelProto<'_>, listed: &[Listed]) -> Result<(), TextError> {
        let pieces = model.pieces.len();
        let mut seen = HashSet::new();
        for Listed { id, file, token } in listed {
            let at = *id as usize;
            if !seen.insert(*id) {
                return Err(bad(
                    file,
                    format!("the id {id} is there twice, the second time as {:?}", token.content),
                ));
            }
            if at >= pieces + GAP_MAX {
                let reason =
                    format!("token {:?} has the id {id}, and {FILE} has {pieces} pieces", token.content);
                return Err(bad(file, reason));
            }
            let Some(piece) = model.pieces.get(at) else {
                if at >= self.tokens.len() {
                    self.tokens.resize(at + 1, String::new());
                    self.kinds.resize(at + 1, TokenKind::Control);
                }
                continue;
            };
            if piece.text == token.content {
                continue;
            }
            if matches!(piece.kind, TokenKind::Normal | TokenKind::Byte) {
                let reason =
                    format!("token {:?} has the id {id}, which in {FILE} is {:?}", token.content, piece.text);
                return Err(bad(file, reason));
            }
            self.ids.remove(piece.text);
            self.searched.remove(id);
            self.kinds[at] = TokenKind::Control;
        }
        Ok(())
    }

    fn insert(&mut self, model: &ModelProto<'_>, listed: &Listed) -> Result<(), TextError> {
        let Listed { id, file, token } = listed;
        let (id, text) = (*id, &token.content);
        if text.is_empty() {
            return Err(bad(file, format!("the token of id {id} has no text")));
        }
        if let Some(other) = self.ids.insert(text.clone(), id)
            && other != id
        {
            return Err(bad(file, format!("token {text:?} has the id {id}, and also the id {other}")));
        }
        self.tokens[id as usize].clone_from(text);
        let mut entry = Searched::of(id, token);
        let piece = model.pieces.get(id as usize);
        if piece.is_some_and(|piece| piece.text == text && piece.kind == TokenKind::UserDefined) {
            entry.text = entry.text.replace(SPACE, " ");
        }
        // A piece that is structure stays so, whatever the list says.
        entry.special |= piece.is_some_and(|piece| piece.text == text && piece.kind == TokenKind::Control);
        self.searched.insert(id, entry);
        Ok(())
    }

    pub(super) fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    /// What an added token is found by, and whether it is special.
    pub(super) fn added_texts(&self) -> Vec<(String, bool)> {
        self.searched.values().map(|searched| (searched.text.clone(), searched.special)).collect()
    }

    pub(super) fn added(&self) -> Result<AddedTokens, String> {
        AddedTokens::new(self.searched.values().map(|searched| (searched.text.clone(), searched.added)))
    }

    pub(super) fn is_special(&self) -> Vec<bool> {
        let special = |id: u32| self.searched.get(&id).is_some_and(|searched| searched.special);
        (0..self.tokens.len() as u32).map(special).collect()
    }

    /// What is special is never made of other text, so that nobody can write it where it would not be recognized.
    pub(super) fn is_text(&self) -> Vec<bool> {
        let kinds = self.kinds.iter().zip(self.is_special());
        kinds
            .map(|(kind, special)| {
                !special && matches!(kind, TokenKind::Normal | TokenKind::UserDefined | TokenKind::Unused)
            })
            .collect()
    }

    /// What a unigram model writes texts in. Pieces that users defined are not among them: they are looked for before.
    pub(super) fn written(&self) -> Vec<u32> {
        let kinds = self.kinds.iter().zip(self.is_special());
        let written = |(kind, special): (&TokenKind, bool)| !special && *kind == TokenKind::Normal;
        (0..).zip(kinds).filter(|(_, kind)| written(*kind)).map(|(id, _)| id).collect()
    }

    pub(super) fn unused(&self) -> HashSet<u32> {
        (0..).zip(&self.kinds).filter(|(_, kind)| **kind == TokenKind::Unused).map(|(id, _)| id).collect()
    }

    /// Of added tokens, which are never merged, 0.
    pub(super) fn scores(&self, model: &ModelProto<'_>) -> Vec<f32> {
        let mut scores: Vec<f32> = model.pieces.iter().map(|piece| piece.score).collect();
        scores.resize(self.tokens.len(), 0.0);
        scores
    }
}

impl Searched {
    fn of(id: u32, token: &AddedSpec) -> Self {
        let added = Added {
            id,
            single_word: token.single_word,
            strips_left: token.lstrip,
            strips_right: token.rstrip,
        };
        Self { text: token.content.clone(), special: token.special, added }
    }
}
