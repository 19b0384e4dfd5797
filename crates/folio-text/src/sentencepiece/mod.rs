//! A tokenizer from a tokenizer.model, sentencepiece's own file, and what lies beside it.
//!
//! Owns: what `tokenizer_config.json`, `special_tokens_map.json` and `added_tokens.json` say of its tokens. The ids are sentencepiece's, and added
//! tokens are those of transformers: every piece of the types CONTROL and USER_DEFINED, what `added_tokens_decoder` lists (only without it,
//! added_tokens.json), and what has a role. Must never: guess. A setting that makes other ids and is not
//! followed is refused by name.
//!
//! A space is put before a text, and behind added tokens, too, unless tokenizer_config.json has `legacy` false. A piece that users defined and that has the
//! sign for a space in it is found where the text has spaces. What is between added tokens is normalized as a text of its own.
//!
//! Memory: bounded by the file, which is no larger than [`MODEL_BYTES_MAX`], and by limits on what added tokens take.

mod beside;
mod model;
mod vocabulary;
mod wire;

use std::collections::BTreeMap;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::Value;

pub use beside::BesideModel;

use crate::error::TextError;
use crate::gguf::sentencepiece_decoder;
use crate::pieces::{Pieces, PiecesParts, SpacePrefix};
use crate::tokenizer::{
    Encoder, Object, SpecialToken, SpecialTokens, Tokenizer, TokenizerParts, parse_object, token_content,
};
use crate::unigram::Unigram;
use beside::AddedSpec;
use model::{CONVERT, ModelProto};
use vocabulary::Vocabulary;

pub(crate) const FILE: &str = "tokenizer.model";
const CONFIG: &str = "tokenizer_config.json";

/// Gemma's, the largest that people have, takes 5 MB.
const MODEL_BYTES_MAX: u64 = 64 << 20;

/// Those that read tokenizer.model as is done here, each also with `Fast` behind its name.
const CLASSES: [&str; 3] = ["LlamaTokenizer", "GemmaTokenizer", "CodeLlamaTokenizer"];

/// The file's bytes, if there is one.
pub(crate) fn read(folder: &Path) -> Result<Option<Vec<u8>>, TextError> {
    use std::io::Read as _;
    let path = folder.join(FILE);
    let file = match std::fs::File::open(&path) {
        Ok(file) => file,
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(TextError::Io { path, source }),
    };
    let mut bytes = Vec::new();
    match file.take(MODEL_BYTES_MAX + 1).read_to_end(&mut bytes) {
        Ok(_) => Ok(Some(bytes)),
        Err(source) => Err(TextError::Io { path, source }),
    }
}

/// Builds the tokenizer of a file's bytes.
pub(crate) fn tokenizer(file: &[u8], beside: BesideModel<'_>) -> Result<Tokenizer, TextError> {
    let bad = |reason: String| TextError::BadTokenizer { file: FILE.to_owned(), reason };
    if file.len() as u64 > MODEL_BYTES_MAX {
        return Err(bad(format!("it has more than {MODEL_BYTES_MAX} bytes")));
    }
    if is_tiktoken(file) {
        return Err(bad(format!(
            "it is tiktoken's, a list of tokens and ranks, which does not say how texts are cut into words{CONVERT}"
        )));
    }
    let model = ModelProto::read(file).map_err(bad)?;
    let config = parse_object(CONFIG, beside.tokenizer_config)?;
    let map = parse_object("special_tokens_map.json", beside.special_tokens_map)?;
    check_class(&config)?;
    let (named, special) = roles(&model, &config, &map)?;
    let vocabulary = Vocabulary::new(&model, &beside.listed(&config, &special)?, &special)?;

    let flag = |name: &str| config.get(name).and_then(Value::as_bool);
    let prefix = match (flag("add_prefix_space").unwrap_or(model.dummy_prefix), flag("legacy")) {
        (false, _) => SpacePrefix::Never,
        (true, Some(false)) => SpacePrefix::First,
        (true, _) => SpacePrefix::Always,
    };
    let token = |name: &str| {
        let text: &String = named.get(name)?;
        Some(SpecialToken { id: vocabulary.id(text)?, text: text.clone() })
    };
    let special = SpecialTokens {
        bos: token("bos"),
        eos: token("eos"),
        pad: token("pad"),
        unk: token("unk"),
        added: vocabulary.added_texts(),
        named: named.clone(),
    };
    let id = |token: &Option<SpecialToken>| token.as_ref().map(|token| token.id);
    let forced_bos = id(&special.bos).filter(|_| flag("add_bos_token").unwrap_or(true));
    let forced_eos = id(&special.eos).filter(|_| flag("add_eos_token").unwrap_or(false));
    let is_special = vocabulary.is_special();
    let unigram =
        model.unigram.then(|| Unigram::new(vocabulary.written(), &vocabulary.tokens, model.least_score()));
    let pieces = Pieces::new(PiecesParts {
        scores: vocabulary.scores(&model),
        unigram,
        is_text: vocabulary.is_text(),
        unused: vocabulary.unused(),
        unk: Some(model.unk),
        byte_fallback: model.byte_fallback,
        fuses_unk: true,
        added: vocabulary.added().map_err(bad)?,
        normalizer: model.normalizer,
        tokens: vocabulary.tokens,
        prefix,
    });
    let tokens = pieces.tokens().map(|token| (!token.is_empty()).then(|| token.to_owned())).collect();
    let decoder = sentencepiece_decoder(pieces.has_space_prefix());
    Ok(Tokenizer::from_parts(TokenizerParts {
        encoder: Encoder::Pieces(Box::new(pieces)),
        decoder: &decoder,
        tokens,
        is_special,
        special,
        forced_bos,
        forced_eos,
    }))
}

/// Lines of a token in base64 and its rank.
fn is_tiktoken(file: &[u8]) -> bool {
    // The longest tokens have some hundred bytes.
    let head = &file[..file.len().min(4096)];
    let line = head.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let Ok(line) = std::str::from_utf8(line) else { return false };
    let Some((token, rank)) = line.trim_end().split_once(' ') else { return false };
    rank.parse::<u32>().is_ok() && BASE64.decode(token).is_ok_and(|bytes| !bytes.is_empty())
}

/// Other classes may number tokens otherwise, or put more around a text.
fn check_class(config: &Object) -> Result<(), TextError> {
    let Some(class) = config.get("tokenizer_class").and_then(Value::as_str) else { return Ok(()) };
    if CLASSES.contains(&class.strip_suffix("Fast").unwrap_or(class)) {
        return Ok(());
    }
    let class: String = class.chars().take(60).collect();
    let reason = format!(
        "its `tokenizer_class` is {class:?}, and a {FILE} is read as {} do{CONVERT}",
        CLASSES.join(", ")
    );
    Err(TextError::BadTokenizer { file: CONFIG.to_owned(), reason })
}

/// By their names without `_token`, the texts of tokens with a role, and all tokens that are special because they have one.
type Roles = (BTreeMap<String, String>, Vec<AddedSpec>);

/// What neither file names is as the model says; what one of them has as `null` there is not.
fn roles(model: &ModelProto<'_>, config: &Object, map: &Object) -> Result<Roles, TextError> {
    let (mut named, mut special) = (BTreeMap::new(), Vec::new());
    let of_model = [("bos", model.bos), ("eos", model.eos), ("unk", Some(model.unk)), ("pad", model.pad)];
    for (name, id) in of_model {
        let key = format!("{name}_token");
        let Some(id) = id.filter(|_| !config.contains_key(&key) && !map.contains_key(&key)) else { continue };
        let text = model.pieces[id as usize].text;
        named.insert(name.to_owned(), text.to_owned());
        special.push(AddedSpec::plain(text, true));
    }
    for (file, object) in [("special_tokens_map.json", map), (CONFIG, config)] {
        for (key, value) in object {
            let Some(name) = key.strip_suffix("_token") else { continue };
            let Some(text) = token_content(value) else { continue };
            named.insert(name.to_owned(), text.to_owned());
            special.push(AddedSpec::read(file, key, value, true)?);
        }
        let more = object.get("additional_special_tokens").and_then(Value::as_array);
        for value in more.into_iter().flatten() {
            special.push(AddedSpec::read(file, "additional_special_tokens", value, true)?);
        }
    }
    Ok((named, special))
}
