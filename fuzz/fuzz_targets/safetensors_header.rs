//! A safetensors file from a stranger: an error, or entries that lie inside it and fit their shapes.
#![no_main]

use folio_model::checkpoint::safetensors::read_header;
use libfuzzer_sys::fuzz_target;

fn check(file: &[u8]) {
    let Ok(entries) = read_header(file) else { return };
    let mut covered = 0;
    for entry in entries.values() {
        let bytes = file.get(entry.range.clone()).expect("inside the file");
        if let Ok(dtype) = entry.dtype {
            assert_eq!(entry.shape.iter().product::<usize>() * dtype.size(), bytes.len());
        }
        covered += bytes.len();
    }
    assert!(covered <= file.len() - 8, "tensors overlap");
}

fuzz_target!(|data: &[u8]| {
    check(data);
    // The same bytes as a header whose length is right, so that the fuzzer need not guess it.
    let mut file = (data.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(data);
    file.extend_from_slice(&[0; 64]);
    check(&file);
});
