//! A tiktoken.model from a stranger: a refusal that names it, or a tokenizer whose ids are in its vocabulary.
#![no_main]

use folio_text::Tokenizer;
use libfuzzer_sys::fuzz_target;

const CONFIG: &[u8] = br#"{"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", null]}}"#;

fuzz_target!(|data: &[u8]| {
    match Tokenizer::from_tiktoken(data, Some(CONFIG)) {
        Ok(tokenizer) => {
            let ids = tokenizer.encode("Hello <s> wörld 123\n", true, 1000).expect("encodes");
            assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()));
            tokenizer.decode(&ids, false);
        }
        Err(error) => assert!(error.to_string().starts_with("tiktoken.model"), "{error}"),
    }
});
