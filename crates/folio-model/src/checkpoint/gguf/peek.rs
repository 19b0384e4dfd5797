//! What a GGUF file is, from its first bytes: before all of it is downloaded.

use super::header::{Cursor, Value};

/// `general.architecture`, if these first bytes of a file reach that far. Writers put it before everything that is long.
pub(crate) fn architecture_in(bytes: &[u8]) -> Option<&str> {
    let mut cursor = Cursor { bytes, at: 0 };
    super::header::version(&mut cursor).ok()?;
    cursor.u64("number of tensors").ok()?;
    let keys = cursor.u64("number of keys").ok()?;
    for _ in 0..keys {
        let key = cursor.name("a key", super::header::KEY_BYTES_MAX).ok()?;
        let value = cursor.value("a value").ok()?;
        if let (Value::Text(range), "general.architecture") = (value, key.as_str()) {
            return std::str::from_utf8(&bytes[range]).ok();
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::gguf::Writer;

    #[test]
    fn the_architecture_is_read_from_any_beginning_that_has_it() {
        let whole = Writer::new("mamba2").texts("tokenizer.ggml.tokens", &["a"; 100]).finish();
        assert_eq!(architecture_in(&whole), Some("mamba2"));
        let end = whole.windows(6).position(|bytes| bytes == b"mamba2").unwrap() + 6;
        for length in 0..whole.len() {
            assert_eq!(architecture_in(&whole[..length]), (length >= end).then_some("mamba2"), "{length}");
        }
        let hostile = [b"GGUF".as_slice(), &3u32.to_le_bytes(), &[0xff; 64]].concat();
        assert_eq!(architecture_in(&hostile), None);
    }
}
