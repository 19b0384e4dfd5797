//! JSON in and out of template values, the way Python's `json.dumps` writes it.

use std::fmt::Write as _;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};
use serde_json::Value as Json;

use super::breaking::SEAMS;

/// Keeps the order of keys. Every text in it, keys too, goes through `text`.
pub(super) fn to_value(json: &Json, text: &dyn Fn(&str) -> Value) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(b) => Value::from(*b),
        Json::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(i), _) => Value::from(i),
            (None, Some(u)) => Value::from(u),
            (None, None) => Value::from(n.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(s) => text(s),
        Json::Array(items) => Value::from(items.iter().map(|item| to_value(item, text)).collect::<Vec<_>>()),
        Json::Object(map) => {
            Value::from_pairs(map.iter().map(|(key, value)| (text(key), to_value(value, text))))
        }
    }
}

/// The arguments of `json.dumps`.
#[derive(Clone, Debug, Default)]
pub(super) struct Style {
    pub(super) ensure_ascii: bool,
    pub(super) indent: Option<String>,
    /// (between items, after a key); Python's defaults depend on `indent`.
    pub(super) separators: Option<(String, String)>,
    pub(super) sort_keys: bool,
}

pub(super) fn dumps(value: &Value, style: &Style) -> Result<String, Error> {
    let default = if style.indent.is_some() { (",", ": ") } else { (", ", ": ") };
    let (item, key) = match &style.separators {
        Some((item, key)) => (item.as_str(), key.as_str()),
        None => default,
    };
    let mut writer = JsonWriter { style, item, key, out: String::new(), depth: 0 };
    writer.value(value)?;
    Ok(writer.out)
}

struct JsonWriter<'a> {
    style: &'a Style,
    item: &'a str,
    key: &'a str,
    out: String,
    depth: usize,
}

/// Deeper values are refused, as Python's recursion limit would.
const MAX_DEPTH: usize = 200;

impl JsonWriter<'_> {
    fn value(&mut self, value: &Value) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.nested("[", "]", items.len(), |writer, index| writer.value(&items[index]))?;
            }
            ValueKind::Map => self.map(value)?,
            other => {
                let what = if value.is_undefined() { "Undefined".to_owned() } else { other.to_string() };
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("Object of type {what} is not JSON serializable"),
                ));
            }
        }
        Ok(())
    }

    fn map(&mut self, value: &Value) -> Result<(), Error> {
        let mut entries = Vec::new();
        for key in value.try_iter()? {
            let item = value.get_item(&key)?;
            let name = match key.kind() {
                ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
                ValueKind::None => "null".into(),
                ValueKind::Bool => key.is_true().to_string(),
                _ => key.to_string(),
            };
            entries.push((name, item));
        }
        if self.style.sort_keys {
            entries.sort_by(|a, b| a.0.cmp(&b.0));
        }
        self.nested("{", "}", entries.len(), |writer, index| {
            let (name, item) = &entries[index];
            writer.string(name);
            writer.out.push_str(writer.key);
            writer.value(item)
        })
    }

    fn nested(
        &mut self,
        open: &str,
        close: &str,
        count: usize,
        mut each: impl FnMut(&mut Self, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push_str(open);
        if count > 0 {
            self.depth += 1;
            if self.depth > MAX_DEPTH {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    "the value is nested too deeply for JSON",
                ));
            }
            for index in 0..count {
                if index > 0 {
                    self.out.push_str(self.item);
                }
                self.newline();
                each(self, index)?;
            }
            self.depth -= 1;
            self.newline();
        }
        self.out.push_str(close);
        Ok(())
    }

    fn newline(&mut self) {
        if let Some(indent) = &self.style.indent {
            self.out.push('\n');
            self.out.push_str(&indent.repeat(self.depth));
        }
    }

    fn number(&mut self, value: &Value) {
        if value.is_integer() {
            let _ = write!(self.out, "{value}");
            return;
        }
        match f64::try_from(value.clone()) {
            Ok(number) => self.out.push_str(&python_float(number)),
            Err(_) => {
                let _ = write!(self.out, "{value}");
            }
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        let mut rest = text;
        while !rest.is_empty() {
            // What stands for itself, at once.
            let plain = |byte: &u8| matches!(byte, b' '..=b'~') && !matches!(byte, b'"' | b'\\');
            let (run, behind) = rest.split_at(rest.bytes().take_while(plain).count());
            self.out.push_str(run);
            let Some(c) = behind.chars().next() else { break };
            rest = &behind[c.len_utf8()..];
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                // Taken out again once everything is rendered.
                c if SEAMS.contains(&c) => self.out.push(c),
                c if c < ' ' || (self.style.ensure_ascii && !(' '..='~').contains(&c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// `repr(float)`: shortest digits, exponent from 1e16 and below 1e-4.
fn python_float(number: f64) -> String {
    if number.is_nan() {
        return "NaN".into();
    }
    if number.is_infinite() {
        return if number > 0.0 { "Infinity".into() } else { "-Infinity".into() };
    }
    let size = number.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{number:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(exponent) => ('-', exponent),
            None => ('+', exponent),
        };
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    if number.fract() == 0.0 { format!("{number:.1}") } else { format!("{number}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn to_value(json: &Json) -> Value {
        super::to_value(json, &|text| text.into())
    }
    use serde_json::json;

    #[test]
    fn floats_are_written_as_python_does() {
        for (number, text) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-2.5, "-2.5"),
            (1e16, "1e+16"),
            (123456789012345680.0, "1.2345678901234568e+17"),
            (1e15, "1000000000000000.0"),
            (0.00001, "1e-05"),
            (0.0001, "0.0001"),
            (1e-100, "1e-100"),
            (0.0, "0.0"),
            (-0.0, "-0.0"),
        ] {
            assert_eq!(python_float(number), text);
        }
    }

    #[test]
    fn json_survives_the_round_trip() {
        let json = json!({"z": [1, -1, 18446744073709551615u64, 1.5, "a\n\u{1}\u{7f}😀"], "a": {}, "m": [], "n": null});
        let text = dumps(&to_value(&json), &Style::default()).expect("serializable");
        assert_eq!(serde_json::from_str::<Json>(&text).expect("valid"), json);
        assert!(
            text.starts_with(
                "{\"z\": [1, -1, 18446744073709551615, 1.5, \"a\\n\\u0001\u{7f}😀\"], \"a\": {}"
            )
        );
        let ascii = dumps(&to_value(&json!("\u{7f}😀")), &Style { ensure_ascii: true, ..Style::default() });
        assert_eq!(ascii.expect("serializable"), "\"\\u007f\\ud83d\\ude00\"");
    }

    #[test]
    fn undefined_is_refused_as_in_python() {
        assert!(dumps(&Value::UNDEFINED, &Style::default()).is_err());
    }
}
