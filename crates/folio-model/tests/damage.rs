//! Damage at random: an error or a model, never a panic. The fuzz targets in `fuzz/` search deeper.

mod common;

use std::fs;

use common::{Random, copy_of, load, mutate};
use folio_model::Checkpoint;
use folio_model::checkpoint::safetensors::read_header;
use folio_model::config::Config;
use folio_model::reference::ReferenceBackend;
use folio_model::testing::{FIXTURES, Runner, fixture};

#[test]
fn mutated_headers_never_panic_and_never_reach_outside() {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let bytes = fs::read(fixture("smollm2").join("model.safetensors")).unwrap();
    let length = u64::from_le_bytes(*bytes.first_chunk::<8>().unwrap()) as usize;
    let (mut accepted, mut refused) = (0, 0);
    for round in 0..3000 {
        let header = mutate(&mut random, &bytes[8..8 + length]);
        let stated = if round % 10 == 0 { random.next() >> random.below(64) } else { header.len() as u64 };
        let mut file = stated.to_le_bytes().to_vec();
        file.extend(&header);
        file.extend(&bytes[8 + length..]);
        match read_header(&file) {
            Ok(entries) => {
                accepted += 1;
                for (name, entry) in entries {
                    assert!(entry.range.start <= entry.range.end && entry.range.end <= file.len(), "{name}");
                    if let Ok(dtype) = entry.dtype {
                        assert_eq!(
                            entry.shape.iter().product::<usize>() * dtype.size(),
                            entry.range.len(),
                            "{name}"
                        );
                    }
                }
            }
            Err(sentence) => {
                assert!(!sentence.is_empty());
                refused += 1;
            }
        }
    }
    assert!(
        refused > 2000 && accepted > 0,
        "the mutator is neither too harsh nor too tame: {accepted} and {refused}"
    );
}

#[test]
fn sums_that_overflow_are_refused() {
    // Eight contiguous tensors whose sizes add up to 2^64 - 64: a sum that wraps would land inside the file.
    let eighth = (1u64 << 61) - 8;
    let tensors: Vec<String> = (0..8)
        .map(|i| {
            format!(
                r#""t{i}":{{"dtype":"U8","shape":[{eighth}],"data_offsets":[{},{}]}}"#,
                i * eighth,
                (i + 1) * eighth
            )
        })
        .collect();
    let header = format!("{{{}}}", tensors.join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    let sentence = read_header(&file).unwrap_err();
    assert!(sentence.contains("tensor `t0`") && sentence.contains("cut short"), "{sentence}");
    for shape in ["[4294967296,4294967296]", "[18446744073709551615,2]", "[1,1,1,1,1,1,1,1,1]"] {
        let header = format!(r#"{{"t":{{"dtype":"F32","shape":{shape},"data_offsets":[0,0]}}}}"#);
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.bytes());
        assert!(read_header(&file).is_err(), "{shape}");
    }
}

#[test]
fn mutated_configurations_never_panic() {
    let mut random = Random(0x1234_5678_9abc_def1);
    let mut refused = 0;
    for name in FIXTURES {
        let bytes = fs::read(fixture(name).join("config.json")).unwrap();
        for _ in 0..400 {
            let mutated = mutate(&mut random, &bytes);
            match Config::parse("config.json", &mutated) {
                // What parses can be turned into a program's tables without trouble.
                Ok(config) => {
                    let table = config.rope.table(config.max_position);
                    assert_eq!(table.inv_freq.len() * 2, config.rope.rotary_dim);
                    assert_eq!(config.rotated.len(), config.layers);
                }
                Err(error) => {
                    assert!(error.to_string().contains("config.json"), "{error}");
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > 1000, "{refused}");
}

/// A whole damaged folder, loaded and run: any outcome but a panic.
#[test]
fn damaged_checkpoints_load_or_refuse() {
    let mut random = Random(42);
    let copy = copy_of("llama3");
    let config = fs::read(fixture("llama3").join("config.json")).unwrap();
    let weights = fs::read(fixture("llama3").join("model.safetensors")).unwrap();
    let mut loaded = 0;
    for _ in 0..60 {
        let (mutated_config, mutated_weights) = if random.below(2) == 0 {
            (mutate(&mut random, &config), weights.clone())
        } else {
            (config.clone(), mutate(&mut random, &weights))
        };
        fs::write(copy.path().join("config.json"), mutated_config).unwrap();
        fs::write(copy.path().join("model.safetensors"), mutated_weights).unwrap();
        if load(copy.path(), Some(32)).is_ok() {
            loaded += 1;
            let checkpoint = Checkpoint::open(copy.path()).unwrap();
            Runner::load(&checkpoint, ReferenceBackend::new(), Some(32)).forward(&[1, 2, 3], &[2]);
        }
    }
    assert!(loaded < 60);
}

#[test]
fn holes_and_overlaps_are_refused() {
    let read = |offsets: [[usize; 2]; 2]| {
        let entry = |[begin, end]: [usize; 2]| {
            format!(r#"{{"dtype":"F32","shape":[{}],"data_offsets":[{begin},{end}]}}"#, (end - begin) / 4)
        };
        let header = format!(r#"{{"a":{},"b":{}}}"#, entry(offsets[0]), entry(offsets[1]));
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.bytes());
        file.extend([0; 32]);
        read_header(&file)
    };
    assert_eq!(read([[0, 16], [16, 32]]).unwrap().len(), 2);
    let overlap = read([[0, 24], [16, 32]]).unwrap_err();
    assert!(overlap.contains("tensor `b` starts at byte 16 of the data, expected 24"), "{overlap}");
    let hole = read([[0, 8], [16, 32]]).unwrap_err();
    assert!(hole.contains("tensor `b` starts at byte 16 of the data, expected 8"), "{hole}");
    let late = read([[8, 16], [16, 32]]).unwrap_err();
    assert!(late.contains("tensor `a` starts at byte 8 of the data, expected 0"), "{late}");
}
