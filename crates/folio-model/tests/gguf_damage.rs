//! Damaged and hostile GGUF files: refused by name or loaded, never a panic. The fuzz target in `fuzz/` searches deeper.

mod common;

use common::Random;
use common::gguf::{on_disk, path_in};
use folio_model::Checkpoint;
use folio_model::checkpoint::gguf::{Header, HeaderError, Metadata, Vocabulary, read_header};
use folio_model::reference::ReferenceBackend;
use folio_model::testing::Runner;
use folio_model::testing::gguf::{Writer, as_gguf, string};

const HOSTILE: &[u64] = &[0, 1, 255, 1 << 16, 1 << 31, 1 << 32, 1 << 61, 1 << 63, u64::MAX, u64::MAX - 7];

/// Mostly the header: flipped bits, cuts, and hostile numbers where lengths and counts are.
fn mutate(random: &mut Random, file: &[u8], header: usize) -> Vec<u8> {
    let mut mutated = file.to_vec();
    for _ in 0..=random.below(2) {
        let at = random.below(header.min(mutated.len()).max(1));
        match random.below(5) {
            0 if at < mutated.len() => mutated[at] ^= 1 << random.below(8),
            1 => mutated.truncate(random.below(file.len())),
            2 => {
                let end = (at + 8).min(mutated.len());
                mutated.splice(at.min(end)..end, HOSTILE[random.below(HOSTILE.len())].to_le_bytes());
            }
            3 => mutated.insert(at.min(mutated.len()), random.next() as u8),
            _ => {
                let end = (at + 4).min(mutated.len());
                let number = HOSTILE[random.below(HOSTILE.len())] as u32;
                mutated.splice(at.min(end)..end, number.to_le_bytes());
            }
        }
    }
    mutated
}

/// What leaves the reader lies inside the file and fits its shape.
fn check(file: &[u8], header: &Header) {
    for (name, tensor) in &header.tensors {
        assert!(tensor.range.start <= tensor.range.end && tensor.range.end <= file.len(), "{name}");
        if let Ok(encoding) = tensor.encoding {
            let columns = *tensor.shape.last().unwrap();
            let rows: usize = tensor.shape[..tensor.shape.len() - 1].iter().product();
            assert_eq!(encoding.bytes(columns).unwrap() * rows, tensor.range.len(), "{name}");
        }
    }
    let metadata = Metadata::new("file", file, header);
    for key in metadata.keys() {
        let _ = (metadata.text(key), metadata.integer(key), metadata.number(key), metadata.flag(key));
        let _ = (metadata.texts(key), metadata.numbers(key));
    }
    let _ = Vocabulary::read(metadata);
}

#[test]
fn mutated_headers_never_panic_and_never_reach_outside() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/gguf/smollm2/smollm2.gguf");
    let file = std::fs::read(path).unwrap();
    let data = read_header(&file).unwrap().tensors.values().map(|tensor| tensor.range.start).min().unwrap();
    // The data only needs to be there.
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let (mut accepted, mut refused) = (0, 0);
    for _ in 0..3000 {
        let mutated = mutate(&mut random, &file, data);
        match read_header(&mutated) {
            Ok(header) => {
                accepted += 1;
                check(&mutated, &header);
            }
            Err(HeaderError::Damaged(sentence) | HeaderError::Unsupported(sentence, _)) => {
                assert!(!sentence.is_empty());
                refused += 1;
            }
        }
    }
    assert!(refused > 1000 && accepted > 100, "too harsh or too tame: {accepted} and {refused}");
}

#[test]
fn damaged_files_load_or_refuse() {
    let file = as_gguf("llama3").finish();
    let mut random = Random(7);
    let mut loaded = 0;
    for _ in 0..150 {
        let mutated = mutate(&mut random, &file, 3000);
        let disk = on_disk(&mutated);
        let Ok(checkpoint) = Checkpoint::open(path_in(&disk)) else { continue };
        if common::load(&path_in(&disk), Some(32)).is_ok() {
            loaded += 1;
            Runner::load(&checkpoint, ReferenceBackend::new(), Some(32)).forward(&[1, 2, 3], &[2]);
        }
    }
    assert!((1..150).contains(&loaded), "{loaded}");
}

fn header_refusal(file: &[u8]) -> String {
    match read_header(file).unwrap_err() {
        HeaderError::Damaged(sentence) => sentence,
        HeaderError::Unsupported(what, supported) => format!("{what}: {supported}"),
    }
}

fn assert_names(sentence: &str, parts: &[&str]) {
    for part in parts {
        assert!(sentence.contains(part), "{part:?} is not in: {sentence}");
    }
}

#[test]
fn headers_are_refused_by_what_is_wrong_with_them() {
    let base = || Writer::new("llama");
    let cases: &[(Vec<u8>, &[&str])] = &[
        (Vec::new(), &["0 bytes long", "too short"]),
        (b"GGUF\x03".to_vec(), &["version", "needs 4 bytes"]),
        (b"GGML\x03\0\0\0".to_vec(), &["GGUF"]),
        (b"lmgg....".to_vec(), &["before GGUF"]),
        (Writer { version: 1, ..base() }.finish(), &["version 1", "2 and 3"]),
        (Writer { version: 4, ..base() }.finish(), &["version 4"]),
        (Writer { version: 0x0300_0000, ..base() }.finish(), &["big-endian", "version 3"]),
        (Writer { key_count: 1 << 40, ..base() }.finish(), &["1099511627776 keys", "65536"]),
        (base().text("a", "x").text("a", "y").finish(), &["key `a` appears twice"]),
        (base().raw("k", 13, &[]).finish(), &["key `k`", "type number 13"]),
        (base().raw("k", 7, &[2]).finish(), &["key `k`", "boolean of value 2"]),
        (base().raw("k", 8, &u64::MAX.to_le_bytes()).finish(), &["key `k`", "limit"]),
        (base().raw("k", 8, &1000u64.to_le_bytes()).finish(), &["key `k`", "1000 bytes"]),
        (base().u32("general.alignment", 12).finish(), &["general.alignment", "power of two"]),
        (base().u32("general.alignment", 0).finish(), &["general.alignment", "power of two"]),
        (base().tensor("t", &[], 0, &[]).finish(), &["tensor `t`", "0 dimensions"]),
        (base().tensor("t", &[1, 1, 1, 1, 1], 0, &[0; 4]).finish(), &["tensor `t`", "5 dimensions"]),
        (base().tensor("t", &[2, 33], 8, &[0; 80]).finish(), &["tensor `t`", "33", "Q8_0"]),
        (base().tensor("t", &[1 << 40, 1 << 40], 0, &[]).finish(), &["tensor `t`", "impossible shape"]),
        (base().tensor("t", &[1, usize::MAX], 0, &[]).finish(), &["tensor `t`"]),
        (base().tensor("t", &[9, 9], 0, &[0; 4]).finish(), &["tensor `t`", "past the end"]),
        (
            base().tensor("t", &[16], 0, &[0; 32]).tensor("u", &[8], 0, &[0; 32]).finish(),
            &["tensor `u`", "byte 32", "ends at 64"],
        ),
        (
            base().tensor("t", &[8], 0, &[0; 32]).tensor("t", &[8], 0, &[0; 32]).finish(),
            &["`t` appears twice"],
        ),
    ];
    for (file, parts) in cases {
        assert_names(&header_refusal(file), parts);
    }
}

#[test]
fn arrays_are_bounded() {
    let array = |element: u32, length: u64, rest: &[u8]| {
        [&element.to_le_bytes()[..], &length.to_le_bytes(), rest].concat()
    };
    let file = |value: Vec<u8>| Writer::new("llama").raw("k", 9, &value).finish();
    assert_names(&header_refusal(&file(array(4, 1 << 62, &[]))), &["key `k`", "limit"]);
    assert_names(&header_refusal(&file(array(10, 1 << 20, &[]))), &["key `k`", "8388608 bytes"]);
    assert_names(&header_refusal(&file(array(8, 9, &string(b"only one")))), &["key `k`"]);
    let mut nested = array(4, 1, &7u32.to_le_bytes());
    for depth in 2..=5 {
        nested = array(9, 1, &nested);
        let file = file(nested.clone());
        match depth {
            ..=4 => assert!(read_header(&file).unwrap().values.contains_key("k")),
            _ => assert_names(&header_refusal(&file), &["key `k`", "deeper than 4"]),
        }
    }
    let metadata_file = file(array(5, 2, &[255, 255, 255, 255, 5, 0, 0, 0]));
    let header = read_header(&metadata_file).unwrap();
    let metadata = Metadata::new("m.gguf", &metadata_file, &header);
    assert_eq!(metadata.numbers("k").unwrap(), Some(vec![-1.0, 5.0]));
    assert_names(
        &metadata.texts("k").unwrap_err().to_string(),
        &["m.gguf", "`k`", "an array of an integer", "strings"],
    );
    assert_names(&metadata.text("k").unwrap_err().to_string(), &["`k`", "expected a string"]);
    assert_names(
        &metadata.integer("general.architecture").unwrap_err().to_string(),
        &["is a string", "integer"],
    );
}

fn refusal(file: &[u8]) -> String {
    let disk = on_disk(file);
    common::load(&path_in(&disk), None).unwrap_err().to_string()
}

#[test]
fn models_that_are_not_served_are_named() {
    let cases: &[(Writer, &[&str])] = &[
        (
            Writer::new("mamba"),
            &[
                "model.gguf",
                "`mamba`",
                "llama, llama4, qwen2, qwen3, qwen3moe, qwen2vl, qwen3vl, qwen3vlmoe, smollm3, glm4moe, deepseek2, qwen3next, qwen35, qwen35moe, olmo2, minimax-m2, granite, granitemoe, granitehybrid, nemotron_h, nemotron_h_moe, cohere2, hunyuan-dense, hunyuan-moe, lfm2, lfm2moe, ernie4_5, ernie4_5-moe, seed_oss, exaone4, phi3, gemma2, gemma3, gemma4, gpt-oss",
            ],
        ),
        (Writer { version: 3, ..Writer::default() }, &["general.architecture", "is missing"]),
        (Writer::new("llama"), &["`llama.embedding_length` is missing"]),
        (as_gguf("llama3").u32("llama.expert_count", 8), &["`llama.expert_used_count` is missing"]),
        (as_gguf("qwen2").u32("qwen2.expert_count", 8), &["`qwen2.expert_count` = 8"]),
        (as_gguf("qwen2").f32("qwen2.final_logit_softcapping", 30.0), &["final_logit_softcapping", "30"]),
        (as_gguf("qwen2").flag("qwen2.attention.causal", false), &["attention.causal"]),
        (as_gguf("qwen2").text("qwen2.rope.scaling.type", "dynamic"), &["`dynamic`"]),
        (
            as_gguf("qwen2").tensor("blk.0.attn_sinks.weight", &[1], 0, &[0; 4]),
            &["`blk.0.attn_sinks.weight`"],
        ),
        (as_gguf("qwen2").tensor("output.bias", &[1], 0, &[0; 4]), &["`output.bias`", "qwen2 decoder"]),
        (
            as_gguf("qwen2").tensor("model.norm.weight", &[48], 0, &[0; 192]),
            &["`model.norm.weight`", "`output_norm.weight`", "same part"],
        ),
    ];
    for (writer, parts) in cases {
        assert_names(&refusal(&writer.clone().finish()), parts);
    }
}

#[test]
fn tensors_are_named_as_the_file_names_them() {
    let sums = as_gguf("qwen3").retype("blk.1.ffn_down.weight", 15);
    assert_names(&refusal(&sums.finish()), &["model.gguf", "`blk.1.ffn_down.weight`", "Q8_K", "Q4_0"]);
    let norm = as_gguf("qwen3").reshape("blk.0.attn_norm.weight", &[24]);
    assert_names(&refusal(&norm.finish()), &["`blk.0.attn_norm.weight`", "[24]", "[48]", "its metadata"]);
    let blocks = as_gguf("qwen3").retype("output_norm.weight", 2).reshape("output_norm.weight", &[32]);
    assert_names(&refusal(&blocks.finish()), &["`output_norm.weight`", "blocks", "only matrices"]);
}

#[test]
fn factors_and_ids_are_checked() {
    let short = Writer::new("llama").tensor("rope_freqs.weight", &[3], 0, &[0; 12]);
    assert_names(&refusal(&with_metadata(short)), &["`rope_freqs.weight`", "above 0"]);
    let ones: Vec<u8> = [1f32; 3].iter().flat_map(|one| one.to_le_bytes()).collect();
    let short = Writer::new("llama").tensor("rope_freqs.weight", &[3], 0, &ones);
    assert_names(&refusal(&with_metadata(short)), &["`rope_freqs.weight`", "3 factors, expected 4"]);
    let tokens = |writer: Writer| {
        writer.text("tokenizer.ggml.model", "gpt2").texts("tokenizer.ggml.tokens", &["a", "b"])
    };
    let wrong = tokens(Writer::new("llama")).u32("tokenizer.ggml.eos_token_id", 2);
    assert_names(
        &refusal(&with_metadata(wrong)),
        &["tokenizer.ggml.eos_token_id", "is 2", "vocabulary of 2"],
    );
    let uneven = Writer::new("llama").u32("llama.attention.head_count_kv", 3);
    assert_names(&refusal(&with_metadata(uneven)), &["`llama.attention.head_count_kv`", "does not divide"]);
}

/// The keys of a small llama with two heads of eight dimensions.
fn with_metadata(writer: Writer) -> Vec<u8> {
    let writer = [
        ("embedding_length", 16),
        ("block_count", 1),
        ("attention.head_count", 2),
        ("feed_forward_length", 16),
        ("context_length", 64),
        ("vocab_size", 2),
    ]
    .iter()
    .fold(writer, |writer, (key, value)| writer.u32(&format!("llama.{key}"), *value));
    writer.f32("llama.attention.layer_norm_rms_epsilon", 1e-5).finish()
}
