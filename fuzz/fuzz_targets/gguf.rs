//! A GGUF file from a stranger: a refusal, or tensors that lie inside it and fit their shapes, metadata that can be read
//! whole, and a configuration, vocabulary and tokenizer or a sentence about each.
#![no_main]

use folio_model::checkpoint::gguf::{Metadata, Vocabulary, describe, read_header};
use folio_text::Tokenizer;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(header) = read_header(data) else { return };
    let mut taken: Vec<_> = Vec::new();
    for tensor in header.tensors.values() {
        let bytes = data.get(tensor.range.clone()).expect("inside the file");
        if let Ok(encoding) = tensor.encoding {
            let (columns, rows) = tensor.shape.split_last().expect("a rank");
            let row = encoding.bytes(*columns).expect("whole blocks");
            assert_eq!(rows.iter().product::<usize>() * row, bytes.len());
            taken.push(tensor.range.clone());
        }
    }
    taken.sort_by_key(|range| (range.start, range.end));
    assert!(taken.windows(2).all(|pair| pair[0].end <= pair[1].start), "tensors overlap");
    let metadata = Metadata::new("fuzz.gguf", data, &header);
    for key in metadata.keys() {
        let _ = (metadata.text(key), metadata.integer(key), metadata.number(key), metadata.flag(key));
        let _ = (metadata.texts(key), metadata.numbers(key));
    }
    let find = |name: &str| header.tensors.get(name).map(|info| (info, &data[info.range.clone()]));
    match describe(metadata, &find) {
        Ok(described) => {
            let table = described.config.rope.table(described.config.max_position);
            assert_eq!(2 * table.inv_freq.len(), described.config.rope.rotary_dim);
        }
        Err(error) => assert!(error.to_string().contains("fuzz.gguf")),
    }
    if let Ok(Some(vocabulary)) = Vocabulary::read(metadata) {
        assert_eq!(vocabulary.tokens.len(), vocabulary.kinds.len());
        if let Ok(tokenizer) = Tokenizer::from_gguf(metadata) {
            let ids = tokenizer.encode("Hello <s> wörld 123\n", true, 1000).expect("encodes");
            assert!(ids.iter().all(|id| (*id as usize) < vocabulary.tokens.len()));
            tokenizer.decode(&ids, false);
        }
    }
});
