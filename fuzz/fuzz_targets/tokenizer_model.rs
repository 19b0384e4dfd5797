//! A tokenizer.model from a stranger: a refusal that names it, or a tokenizer whose ids are in its vocabulary.
#![no_main]

use folio_text::{BesideModel, Tokenizer};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    match Tokenizer::from_sentencepiece(data, BesideModel::default()) {
        Ok(tokenizer) => {
            let ids = tokenizer.encode("Hello <s> wörld 123\n", true, 1000).expect("encodes");
            assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()));
            tokenizer.decode(&ids, false);
        }
        Err(error) => assert!(error.to_string().starts_with("tokenizer.model")),
    }
});
