//! A tekken.json from a stranger: a refusal that names it, or a tokenizer whose ids are in its vocabulary.
#![no_main]

use folio_text::Tokenizer;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    match Tokenizer::from_tekken(data, None) {
        Ok(tokenizer) => {
            // Its pattern may give up on a text.
            let Ok(ids) = tokenizer.encode("Hello <s> wörld 123\n", true, 1000) else { return };
            assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()));
            tokenizer.decode(&ids, false);
        }
        Err(error) => assert!(error.to_string().starts_with("tekken.json"), "{error}"),
    }
});
