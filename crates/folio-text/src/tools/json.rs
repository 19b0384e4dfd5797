//! JSON one byte at a time: where a value ends, and whether it is one.
//!
//! Owns: the scanner's stack of open brackets. Must never: keep the text, or recurse (nesting is bounded). Invariant: a
//! value is accepted exactly when serde_json accepts it, except that raw control characters in strings pass (models write
//! them; [`Feed::Control`] says so, and the caller escapes them). Cost: constant per byte.

/// Deeper values are refused, as serde_json refuses them.
const DEPTH_MAX: usize = 128;

/// What a byte was to the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feed {
    /// Part of it; it goes on.
    Part,
    /// Its last byte.
    Last,
    /// Not part of it: the value (a number) ended before this byte.
    After,
    /// Part of a string, but a control character that JSON wants escaped.
    Control,
    /// The text is not JSON.
    Bad,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JsonState {
    Value,
    FirstItem,
    FirstKey,
    Key,
    Colon,
    AfterValue,
    Text { key: bool },
    Escape { key: bool },
    Hex { key: bool, left: u8 },
    Minus,
    Zero,
    Integer,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
    Word(&'static [u8]),
}

/// The scanner of one value.
#[derive(Clone, Debug)]
pub struct JsonScanner {
    /// Open brackets; true: an object.
    stack: Vec<bool>,
    state: JsonState,
}

impl Default for JsonScanner {
    fn default() -> Self {
        Self { stack: Vec::new(), state: JsonState::Value }
    }
}

impl JsonScanner {
    pub fn feed(&mut self, byte: u8) -> Feed {
        let blank = matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
        match self.state {
            JsonState::Text { key } => self.text(byte, key),
            JsonState::Escape { key } => match byte {
                b'u' => self.go(JsonState::Hex { key, left: 4 }),
                b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => self.go(JsonState::Text { key }),
                _ => Feed::Bad,
            },
            JsonState::Hex { key, left } if byte.is_ascii_hexdigit() => match left {
                1 => self.go(JsonState::Text { key }),
                _ => self.go(JsonState::Hex { key, left: left - 1 }),
            },
            JsonState::Word([next, rest @ ..]) if *next == byte => match rest {
                [] => self.value_ended(),
                _ => self.go(JsonState::Word(rest)),
            },
            JsonState::Hex { .. } | JsonState::Word(_) => Feed::Bad,
            JsonState::Value
            | JsonState::FirstItem
            | JsonState::FirstKey
            | JsonState::Key
            | JsonState::Colon
            | JsonState::AfterValue
                if blank =>
            {
                Feed::Part
            }
            JsonState::Value => self.value(byte),
            JsonState::FirstItem if byte == b']' => self.close(false),
            JsonState::FirstItem => self.value(byte),
            JsonState::FirstKey if byte == b'}' => self.close(true),
            JsonState::FirstKey | JsonState::Key if byte == b'"' => self.go(JsonState::Text { key: true }),
            JsonState::Colon if byte == b':' => self.go(JsonState::Value),
            JsonState::FirstKey | JsonState::Key | JsonState::Colon => Feed::Bad,
            JsonState::AfterValue => self.after_value(byte),
            number => self.number(number, byte),
        }
    }

    fn go(&mut self, state: JsonState) -> Feed {
        self.state = state;
        Feed::Part
    }

    fn value(&mut self, byte: u8) -> Feed {
        match byte {
            b'{' | b'[' if self.stack.len() == DEPTH_MAX => Feed::Bad,
            b'{' => {
                self.stack.push(true);
                self.go(JsonState::FirstKey)
            }
            b'[' => {
                self.stack.push(false);
                self.go(JsonState::FirstItem)
            }
            b'"' => self.go(JsonState::Text { key: false }),
            b'-' => self.go(JsonState::Minus),
            b'0' => self.go(JsonState::Zero),
            b'1'..=b'9' => self.go(JsonState::Integer),
            b't' => self.go(JsonState::Word(b"rue")),
            b'f' => self.go(JsonState::Word(b"alse")),
            b'n' => self.go(JsonState::Word(b"ull")),
            _ => Feed::Bad,
        }
    }

    fn text(&mut self, byte: u8, key: bool) -> Feed {
        match byte {
            b'"' if key => self.go(JsonState::Colon),
            b'"' => self.value_ended(),
            b'\\' => self.go(JsonState::Escape { key }),
            0..0x20 => Feed::Control,
            _ => Feed::Part,
        }
    }

    fn number(&mut self, state: JsonState, byte: u8) -> Feed {
        let digit = byte.is_ascii_digit();
        let exponent = matches!(byte, b'e' | b'E');
        match state {
            JsonState::Minus if byte == b'0' => self.go(JsonState::Zero),
            JsonState::Minus if digit => self.go(JsonState::Integer),
            JsonState::Integer if digit => Feed::Part,
            JsonState::Zero | JsonState::Integer if byte == b'.' => self.go(JsonState::Point),
            JsonState::Zero | JsonState::Integer | JsonState::Fraction if exponent => {
                self.go(JsonState::Exponent)
            }
            JsonState::Point | JsonState::Fraction if digit => self.go(JsonState::Fraction),
            JsonState::Exponent if matches!(byte, b'+' | b'-') => self.go(JsonState::ExponentSign),
            JsonState::Exponent | JsonState::ExponentSign | JsonState::ExponentDigits if digit => {
                self.go(JsonState::ExponentDigits)
            }
            JsonState::Zero | JsonState::Integer | JsonState::Fraction | JsonState::ExponentDigits => {
                if self.stack.is_empty() {
                    return Feed::After;
                }
                self.state = JsonState::AfterValue;
                self.feed(byte)
            }
            _ => Feed::Bad,
        }
    }

    fn after_value(&mut self, byte: u8) -> Feed {
        match (byte, self.stack.last()) {
            (b',', Some(true)) => self.go(JsonState::Key),
            (b',', Some(false)) => self.go(JsonState::Value),
            (b'}', Some(true)) => self.close(true),
            (b']', Some(false)) => self.close(false),
            _ => Feed::Bad,
        }
    }

    fn close(&mut self, object: bool) -> Feed {
        match self.stack.pop() {
            Some(open) if open == object => self.value_ended(),
            _ => Feed::Bad,
        }
    }

    fn value_ended(&mut self) -> Feed {
        self.state = JsonState::AfterValue;
        if self.stack.is_empty() { Feed::Last } else { Feed::Part }
    }
}

/// Appends `text` as the inside of a JSON string.
pub fn escape_into(text: &str, out: &mut String) {
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c < ' ' => out.push_str(&format!("\\u{:04x}", c as u32)),
            c => out.push(c),
        }
    }
}

/// `text` as a JSON string.
pub fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    escape_into(text, &mut out);
    out.push('"');
    out
}

/// JSON whose strings may have raw control characters, with those escaped. Between values they are left alone.
pub fn without_controls(text: &str) -> String {
    let mut scanner = JsonScanner::default();
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        let fed = scanner.feed(c.encode_utf8(&mut [0; 4]).as_bytes()[0]);
        match fed {
            Feed::Control => escape_into(c.encode_utf8(&mut [0; 4]), &mut out),
            _ => out.push(c),
        }
    }
    out
}

/// The text of a JSON string, quotes included, in which raw control characters are taken as they are.
pub fn unquoted(text: &str) -> Option<String> {
    serde_json::from_str(&without_controls(text)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The length of the value `text` begins with.
    fn scan(text: &str) -> Option<usize> {
        let mut scanner = JsonScanner::default();
        for (at, byte) in text.bytes().enumerate() {
            match scanner.feed(byte) {
                Feed::Part => {}
                Feed::Last => return Some(at + 1),
                Feed::After => return Some(at),
                Feed::Control | Feed::Bad => return None,
            }
        }
        None
    }

    #[test]
    fn values_end_where_they_end() {
        for (text, length) in [
            (r#"{"a": [1, -2.5e+3, {"b": "}\"\u00e9"}], "c": null}, 5"#, Some(50)),
            ("[]]", Some(2)),
            (" {} ", Some(3)),
            ("true,", Some(4)),
            ("12,", Some(2)),
            ("0.5e1}", Some(5)),
            (r#""x" "#, Some(3)),
        ] {
            assert_eq!(scan(text), length, "{text}");
        }
        for bad in
            ["{,}", "[1,]", "{\"a\":}", "[01]", "1.,", "-,", "nul,", "{'a': 1}", "\"\\x\"", "\"a\nb\"", "[1}"]
        {
            assert_eq!(scan(bad), None, "{bad}");
        }
        assert_eq!(scan(&"[".repeat(200)), None);
    }

    proptest! {
        /// The scanner accepts what serde_json accepts.
        #[test]
        fn it_agrees_with_serde_json(text in r#"[\[\]{}",:0-9eE.\-+ \\truefalsn]{0,12}"#) {
            let whole = scan(&format!("{text},")).is_some_and(|length| {
                text.get(length..).is_some_and(|rest| rest.trim().is_empty())
            });
            prop_assert_eq!(whole, serde_json::from_str::<serde::de::IgnoredAny>(&text).is_ok());
        }
    }

    #[test]
    fn strings_there_and_back() {
        let text = "a\"b\\c\n\u{1}é";
        assert_eq!(unquoted(&quoted(text)).as_deref(), Some(text));
        assert_eq!(unquoted("\"a\nb\"").as_deref(), Some("a\nb"));
        assert_eq!(unquoted("\"a"), None);
    }
}
