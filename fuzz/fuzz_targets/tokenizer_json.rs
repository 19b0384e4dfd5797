//! A tokenizer.json from a stranger, or a tokenizer_config.json beside one: a refusal that names the file, or a tokenizer whose ids are in its
//! vocabulary.
#![no_main]

use folio_text::{TextError, Tokenizer};
use libfuzzer_sys::fuzz_target;

const SOUND: &[u8] = include_bytes!("../seeds/tokenizer_json/bytes.json");

fuzz_target!(|data: &[u8]| {
    judge(Tokenizer::from_bytes(data, None));
    judge(Tokenizer::from_bytes(SOUND, Some(data)));
});

fn judge(read: Result<Tokenizer, TextError>) {
    match read {
        Ok(tokenizer) => {
            // A vocabulary may lack what it would need for a text.
            let Ok(ids) = tokenizer.encode("Hello <s> wörld 123\n", true, 1000) else { return };
            assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()));
            tokenizer.decode(&ids, false);
        }
        Err(error) => assert!(error.to_string().starts_with("tokenizer"), "{error}"),
    }
}
