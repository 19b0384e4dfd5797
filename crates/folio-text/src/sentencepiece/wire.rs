//! WireFields of a protobuf message, as far as a tokenizer.model has them.
//!
//! Owns: the wire format (varints, fixed 32 and 64 bits, and runs of bytes; groups are refused). Must never: read past the message, or allocate:
//! a length is held against what is left before it is used, and a run of bytes is a place in the file.
//!
//! Cost: one pass; a nested message is passed over, and read when somebody asks for its fields.

/// The fields of a message that lies in a file, in order.
#[derive(Clone, Copy)]
pub(super) struct WireFields<'a> {
    file: &'a [u8],
    at: usize,
    end: usize,
}

/// A field of a message: its number, what it holds, and where in the file it begins.
#[derive(Clone, Copy)]
pub(super) struct WireField<'a> {
    pub number: u32,
    start: usize,
    value: WireValue<'a>,
}

#[derive(Clone, Copy)]
enum WireValue<'a> {
    Varint(u64),
    Fixed32([u8; 4]),
    Fixed64,
    Bytes(WireFields<'a>),
}

/// The largest number of a field.
const NUMBER_MAX: u64 = (1 << 29) - 1;

impl<'a> WireFields<'a> {
    pub(super) fn of(file: &'a [u8]) -> Self {
        Self { file, at: 0, end: file.len() }
    }

    /// The next field; an error is a sentence that says where it is.
    pub(super) fn next(&mut self) -> Result<Option<WireField<'a>>, String> {
        if self.at == self.end {
            return Ok(None);
        }
        let start = self.at;
        let tag = self.varint()?;
        let number = tag >> 3;
        if number == 0 || number > NUMBER_MAX {
            return Err(format!("at byte {start} is a field of number {number}, which there cannot be"));
        }
        let value = match tag & 7 {
            0 => WireValue::Varint(self.varint()?),
            1 => {
                self.take(8)?;
                WireValue::Fixed64
            }
            2 => {
                let length = self.varint()?;
                let from = self.at;
                self.take(length)?;
                WireValue::Bytes(WireFields { file: self.file, at: from, end: self.at })
            }
            5 => {
                let from = self.at;
                self.take(4)?;
                let bytes = &self.file[from..self.at];
                WireValue::Fixed32([bytes[0], bytes[1], bytes[2], bytes[3]])
            }
            wire => return Err(format!("at byte {start} is a field of wire type {wire}, which is not read")),
        };
        Ok(Some(WireField { number: number as u32, start, value }))
    }

    /// All bytes of it that are not read.
    pub(super) fn bytes(&self) -> &'a [u8] {
        &self.file[self.at..self.end]
    }

    /// Seven bits a byte, the lowest first.
    fn varint(&mut self) -> Result<u64, String> {
        let start = self.at;
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            if self.at == self.end {
                return Err(format!("it ends within the number at byte {start}"));
            }
            let byte = self.file[self.at];
            self.at += 1;
            // Of the tenth byte one bit is left.
            if shift == 63 && byte > 1 {
                break;
            }
            value |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(format!("the number at byte {start} has more than 64 bits"))
    }

    fn take(&mut self, length: u64) -> Result<(), String> {
        let left = self.end - self.at;
        if length > left as u64 {
            return Err(format!("at byte {} there should be {length} bytes, and {left} are left", self.at));
        }
        self.at += length as usize;
        Ok(())
    }
}

/// `name` is the field's in messages.
impl<'a> WireField<'a> {
    pub(super) fn message(self, name: &str) -> Result<WireFields<'a>, String> {
        match self.value {
            WireValue::Bytes(fields) => Ok(fields),
            _ => Err(self.unlike(name, "bytes")),
        }
    }

    pub(super) fn text(self, name: &str) -> Result<&'a str, String> {
        let bytes = self.message(name)?.bytes();
        std::str::from_utf8(bytes).map_err(|_| format!("`{name}` at byte {} is no UTF-8", self.start))
    }

    pub(super) fn float(self, name: &str) -> Result<f32, String> {
        match self.value {
            WireValue::Fixed32(bytes) => Ok(f32::from_le_bytes(bytes)),
            _ => Err(self.unlike(name, "a 32-bit number")),
        }
    }

    /// An `int32` or an enumeration: the lowest 32 bits count.
    pub(super) fn int(self, name: &str) -> Result<i32, String> {
        match self.value {
            WireValue::Varint(value) => Ok(value as i32),
            _ => Err(self.unlike(name, "a number")),
        }
    }

    pub(super) fn flag(self, name: &str) -> Result<bool, String> {
        match self.value {
            WireValue::Varint(value) => Ok(value != 0),
            _ => Err(self.unlike(name, "a flag")),
        }
    }

    fn unlike(self, name: &str, expected: &str) -> String {
        let found = match self.value {
            WireValue::Varint(_) => "a varint",
            WireValue::Fixed32(_) => "32 bits",
            WireValue::Fixed64 => "64 bits",
            WireValue::Bytes(_) => "bytes",
        };
        format!("`{name}` at byte {} is {found}, expected {expected}", self.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first field, or the refusal of it.
    fn first(bytes: &[u8]) -> Result<WireField<'_>, String> {
        WireFields::of(bytes).next().map(|field| field.expect("one"))
    }

    fn refusal(bytes: &[u8]) -> String {
        first(bytes).err().expect("refused")
    }

    #[test]
    fn fields_are_read_in_order_and_unknown_ones_are_passed_over() {
        let bytes =
            [0x08, 0x96, 0x01, 0x11, 1, 2, 3, 4, 5, 6, 7, 8, 0x1A, 2, b'h', b'i', 0x25, 0, 0, 0x80, 0x3F];
        let mut fields = WireFields::of(&bytes);
        let mut next = || fields.next().expect("sound");
        let number = next().expect("the first");
        assert_eq!((number.number, number.int("n")), (1, Ok(150)));
        assert_eq!(next().map(|field| field.number), Some(2));
        assert_eq!(next().map(|field| field.text("t")), Some(Ok("hi")));
        assert_eq!(next().map(|field| field.float("f")), Some(Ok(1.0)));
        assert!(next().is_none());
    }

    #[test]
    fn an_integer_of_minus_one_has_ten_bytes() {
        let bytes = [0x08, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x01];
        assert_eq!(first(&bytes).expect("sound").int("n"), Ok(-1));
    }

    #[test]
    fn lengths_are_held_against_what_is_left() {
        assert!(refusal(&[0x08]).contains("ends within the number at byte 1"));
        assert!(refusal(&[0x0A, 3, 1, 2]).contains("should be 3 bytes, and 2 are left"));
        assert!(
            refusal(&[0x0A, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x01])
                .contains("0 are left")
        );
        assert!(refusal(&[0x0D, 1, 2, 3]).contains("4 bytes"));
        assert!(refusal(&[0x09, 1]).contains("8 bytes"));
        assert!(
            refusal(&[0x08, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x02]).contains("64 bits")
        );
        assert!(refusal(&[0x80; 12]).contains("64 bits"));
        assert!(refusal(&[0x00, 0]).contains("number 0"));
        assert!(refusal(&[0x0B]).contains("wire type 3"));
        // A nested message ends where it says, whatever comes behind.
        let mut nested = first(&[0x0A, 1, 0x08, 0x01]).expect("sound").message("m").expect("bytes");
        assert!(nested.next().err().expect("refused").contains("ends within the number at byte 3"));
    }

    #[test]
    fn a_field_of_another_wire_type_is_named() {
        let number = first(&[0x08, 1]).expect("sound");
        assert_eq!(number.text("piece"), Err("`piece` at byte 0 is a varint, expected bytes".to_owned()));
        assert!(number.flag("on").expect("a flag"));
        assert!(
            first(&[0x0A, 1, 0xFF]).expect("sound").text("piece").expect_err("refused").contains("no UTF-8")
        );
    }
}
