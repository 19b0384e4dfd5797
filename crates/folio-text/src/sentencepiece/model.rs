//! What a tokenizer.model says: sentencepiece's `ModelProto` (`sentencepiece_model.proto`).
//!
//! Owns: which fields are read, their defaults, and what of them can be done. Must never: accept a setting that changes ids and is not
//! followed: those are refused by name.
//!
//! Cost: one pass over the file; a piece takes its place in two tables.

use std::collections::HashMap;

use folio_model::checkpoint::gguf::TokenKind;

use super::wire::WireFields;
use crate::charsmap::Charsmap;
use crate::normalizer::Normalizer;

/// The largest vocabularies have some 260,000.
const PIECES_MAX: usize = 1 << 20;
/// Of one piece. Trainers make none of more than 16 characters, but what users define is as long as they like.
const PIECE_BYTES_MAX: usize = 512;

pub(super) const CONVERT: &str =
    "; convert the tokenizer with transformers' `AutoTokenizer.from_pretrained(...).save_pretrained(...)`";

/// Types of models.
const UNIGRAM: i32 = 1;
const BPE: i32 = 2;

pub(super) struct StoredPiece<'a> {
    pub text: &'a str,
    /// Not NaN.
    pub score: f32,
    pub kind: TokenKind,
}

/// Of `trainer_spec`.
struct Trainer {
    model_type: i32,
    whitespace_as_suffix: bool,
    byte_fallback: bool,
    bos: i32,
    eos: i32,
    pad: i32,
}

/// Of `normalizer_spec`.
struct NormalizerSpec<'a> {
    /// Empty: none.
    charsmap: &'a [u8],
    dummy_prefix: bool,
    removes_extra_spaces: bool,
    escapes_spaces: bool,
}

/// A checked model.
pub(super) struct ModelProto<'a> {
    /// By id; all different, and none is empty.
    pub pieces: Vec<StoredPiece<'a>>,
    pub ids: HashMap<&'a str, u32>,
    pub unk: u32,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub pad: Option<u32>,
    /// All 256 bytes are pieces.
    pub byte_fallback: bool,
    pub dummy_prefix: bool,
    pub normalizer: Normalizer,
    /// Of the type UNIGRAM; else BPE.
    pub unigram: bool,
}

impl<'a> ModelProto<'a> {
    /// An error is a sentence about the file.
    pub(super) fn read(file: &'a [u8]) -> Result<Self, String> {
        let mut pieces = Vec::new();
        let mut trainer: Option<Trainer> = None;
        let mut normalizer: Option<NormalizerSpec<'_>> = None;
        let mut fields = WireFields::of(file);
        while let Some(field) = fields.next()? {
            match field.number {
                1 if pieces.len() == PIECES_MAX => {
                    return Err(format!("it has more than {PIECES_MAX} pieces"));
                }
                1 => pieces.push(StoredPiece::read(field.message("pieces")?, pieces.len())?),
                2 => trainer.get_or_insert_default().read(field.message("trainer_spec")?)?,
                3 => normalizer.get_or_insert_default().read(field.message("normalizer_spec")?)?,
                _ => {}
            }
        }
        if pieces.is_empty() {
            return Err("it has no `pieces`".to_owned());
        }
        // All files have both; one that was cut off may not.
        let trainer = trainer.ok_or("it has no `trainer_spec`")?;
        let normalizer = normalizer.ok_or("it has no `normalizer_spec`")?;
        trainer.check()?;
        Self::of(pieces, &trainer, &normalizer)
    }

    fn of(
        pieces: Vec<StoredPiece<'a>>,
        trainer: &Trainer,
        spec: &NormalizerSpec<'_>,
    ) -> Result<Self, String> {
        let mut ids = HashMap::with_capacity(pieces.len());
        let mut unk = None;
        for (id, piece) in (0u32..).zip(&pieces) {
            if let Some(first) = ids.insert(piece.text, id) {
                return Err(format!("its pieces {first} and {id} are the same, {:?}", piece.text));
            }
            if piece.kind == TokenKind::Unknown
                && let Some(first) = unk.replace(id)
            {
                return Err(format!("its pieces {first} and {id} are both of the type UNKNOWN"));
            }
        }
        let Some(unk) = unk else { return Err("none of its pieces is of the type UNKNOWN".to_owned()) };
        check_bytes(&pieces, &ids, trainer.byte_fallback)?;
        let role = |name: &str, id: i32| -> Result<Option<u32>, String> {
            match usize::try_from(id) {
                // -1: none.
                Err(_) => Ok(None),
                // Of another type it is no such token.
                Ok(id) if id < pieces.len() => {
                    Ok((pieces[id].kind == TokenKind::Control).then_some(id as u32))
                }
                Ok(id) => Err(format!("`trainer_spec.{name}` is {id}, and it has {} pieces", pieces.len())),
            }
        };
        let (bos, eos, pad) =
            (role("bos_id", trainer.bos)?, role("eos_id", trainer.eos)?, role("pad_id", trainer.pad)?);
        let (byte_fallback, dummy_prefix) = (trainer.byte_fallback, spec.dummy_prefix);
        let (normalizer, unigram) = (spec.normalizer()?, trainer.model_type == UNIGRAM);
        Ok(Self { pieces, ids, unk, bos, eos, pad, byte_fallback, dummy_prefix, normalizer, unigram })
    }

    /// Of the pieces that were trained; the largest number where there are none.
    pub(super) fn least_score(&self) -> f32 {
        let trained = self.pieces.iter().filter(|piece| piece.kind == TokenKind::Normal);
        trained.map(|piece| piece.score).fold(f32::MAX, f32::min)
    }
}

/// Either all bytes are pieces, or none is.
fn check_bytes(pieces: &[StoredPiece<'_>], ids: &HashMap<&str, u32>, fallback: bool) -> Result<(), String> {
    let count = pieces.iter().filter(|piece| piece.kind == TokenKind::Byte).count();
    if !fallback && count > 0 {
        return Err(format!(
            "it has {count} pieces of the type BYTE, and `trainer_spec.byte_fallback` is false"
        ));
    }
    if !fallback {
        return Ok(());
    }
    for byte in 0..=255u8 {
        let text = format!("<0x{byte:02X}>");
        let id = ids.get(text.as_str());
        if id.is_none_or(|id| pieces[*id as usize].kind != TokenKind::Byte) {
            return Err(format!(
                "`trainer_spec.byte_fallback` is true, and {text} is no piece of the type BYTE"
            ));
        }
    }
    match count {
        256 => Ok(()),
        _ => Err(format!("it has {count} pieces of the type BYTE, expected 256")),
    }
}

impl<'a> StoredPiece<'a> {
    fn read(mut fields: WireFields<'a>, id: usize) -> Result<Self, String> {
        let (mut text, mut score, mut kind) = ("", 0.0f32, 1);
        let of = |sentence: String| format!("in its piece {id} {sentence}");
        while let Some(field) = fields.next().map_err(of)? {
            match field.number {
                1 => text = field.text("piece").map_err(of)?,
                2 => score = field.float("score").map_err(of)?,
                3 => kind = field.int("type").map_err(of)?,
                _ => {}
            }
        }
        if text.is_empty() || text.len() > PIECE_BYTES_MAX {
            return Err(format!("its piece {id} has {} bytes, expected 1 to {PIECE_BYTES_MAX}", text.len()));
        }
        if score.is_nan() {
            return Err(format!("the `score` of its piece {id}, {text:?}, is not a number"));
        }
        let kind = match kind {
            1 => TokenKind::Normal,
            2 => TokenKind::Unknown,
            3 => TokenKind::Control,
            4 => TokenKind::UserDefined,
            5 => TokenKind::Unused,
            6 => TokenKind::Byte,
            kind => {
                return Err(format!("the `type` of its piece {id}, {text:?}, is {kind}, expected 1 to 6"));
            }
        };
        Ok(Self { text, score, kind })
    }
}

impl Default for Trainer {
    /// What files may leave out.
    fn default() -> Self {
        Self {
            model_type: UNIGRAM,
            whitespace_as_suffix: false,
            byte_fallback: false,
            bos: 1,
            eos: 2,
            pad: -1,
        }
    }
}

impl Trainer {
    fn read(&mut self, mut fields: WireFields<'_>) -> Result<(), String> {
        while let Some(field) = fields.next()? {
            match field.number {
                3 => self.model_type = field.int("trainer_spec.model_type")?,
                24 => self.whitespace_as_suffix = field.flag("trainer_spec.treat_whitespace_as_suffix")?,
                35 => self.byte_fallback = field.flag("trainer_spec.byte_fallback")?,
                41 => self.bos = field.int("trainer_spec.bos_id")?,
                42 => self.eos = field.int("trainer_spec.eos_id")?,
                43 => self.pad = field.int("trainer_spec.pad_id")?,
                _ => {}
            }
        }
        Ok(())
    }

    fn check(&self) -> Result<(), String> {
        let other = match self.model_type {
            UNIGRAM | BPE => None,
            3 => Some("WORD"),
            4 => Some("CHAR"),
            other => return Err(format!("`trainer_spec.model_type` is {other}, which there is not")),
        };
        if let Some(name) = other {
            return Err(format!(
                "`trainer_spec.model_type` is {name}, and of a tokenizer.model only BPE and UNIGRAM are read{CONVERT}"
            ));
        }
        if self.whitespace_as_suffix {
            return Err(format!(
                "`trainer_spec.treat_whitespace_as_suffix` is true, which is not supported{CONVERT}"
            ));
        }
        Ok(())
    }
}

impl Default for NormalizerSpec<'_> {
    fn default() -> Self {
        Self { charsmap: &[], dummy_prefix: true, removes_extra_spaces: true, escapes_spaces: true }
    }
}

impl<'a> NormalizerSpec<'a> {
    fn read(&mut self, mut fields: WireFields<'a>) -> Result<(), String> {
        while let Some(field) = fields.next()? {
            match field.number {
                2 => self.charsmap = field.message("normalizer_spec.precompiled_charsmap")?.bytes(),
                3 => self.dummy_prefix = field.flag("normalizer_spec.add_dummy_prefix")?,
                4 => self.removes_extra_spaces = field.flag("normalizer_spec.remove_extra_whitespaces")?,
                5 => self.escapes_spaces = field.flag("normalizer_spec.escape_whitespaces")?,
                _ => {}
            }
        }
        Ok(())
    }

    fn normalizer(&self) -> Result<Normalizer, String> {
        let charsmap = match self.charsmap {
            [] => None,
            map => {
                let map = Charsmap::read(map);
                Some(map.map_err(|what| format!("its `normalizer_spec.precompiled_charsmap` {what}"))?)
            }
        };
        let Self { removes_extra_spaces, escapes_spaces, .. } = *self;
        Ok(Normalizer { charsmap, removes_extra_spaces, escapes_spaces })
    }
}
