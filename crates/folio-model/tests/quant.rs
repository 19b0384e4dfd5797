//! Every block format of ggml decodes to what ggml decodes it to, bit for bit (`tools/make_gguf_fixtures.py`).

use folio_model::checkpoint::safetensors::read_header;
use folio_model::quant::{BlockFormat, Encoding};

#[test]
fn blocks_decode_to_ggmls_own_values() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/quant/blocks.safetensors");
    let file = std::fs::read(path).unwrap();
    let header = read_header(&file).unwrap();
    for format in BlockFormat::of_ggml() {
        let blocks = &file[header[&format!("{format:?}.bytes")].range.clone()];
        let values: &[[u8; 4]] = file[header[&format!("{format:?}.values")].range.clone()].as_chunks().0;
        assert_eq!(blocks.len() / format.bytes() * format.values(), values.len(), "{format:?}");
        assert_eq!(Encoding::Block(format).bytes(values.len()), Some(blocks.len()));
        let mut found = vec![0.0; values.len()];
        format.decode(blocks, &mut found);
        for (i, (found, expected)) in found.iter().zip(values).enumerate() {
            let expected = f32::from_le_bytes(*expected);
            assert_eq!(
                found.to_bits(),
                expected.to_bits(),
                "{format:?} value {i}: {found} is not {expected}"
            );
        }
    }
    assert_eq!(header.len(), 2 * BlockFormat::of_ggml().count());
}

#[test]
fn rows_that_are_not_whole_blocks_have_no_size() {
    for format in BlockFormat::ALL {
        assert_eq!(Encoding::Block(format).bytes(format.values() + 1), None);
        assert_eq!(Encoding::Block(format).bytes(0), Some(0));
    }
    // Bytes that do not fit a usize: 34 for every 32.
    assert_eq!(Encoding::Block(BlockFormat::Q8_0).bytes(usize::MAX / 32 * 32), None);
}
