//! Calls written as literals: Python's (`f(a=1, b=['x'])`) and Gemma's (`f{a:1,b:[<|"|>x<|"|>]}`), to name and JSON.
//!
//! Owns: finding where such a call ends, byte by byte, and translating it once it is complete. Must never: evaluate
//! anything. Invariant: what is not a call of literals with named arguments is `None`, and stays text. Cost: linear in the
//! call; nesting is bounded.

use super::json::quoted;
use crate::work;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LiteralDialect {
    /// `f(a=1, b='x', c=True)`
    Python,
    /// `f{a:1,b:<escape>x<escape>}`, with these marks around strings.
    Marked { quotes: &'static [&'static str] },
}

const DEPTH_MAX: usize = 64;

/// Looks for the end of a call that is still being written.
#[derive(Clone, Debug, Default)]
pub struct CallEnd {
    /// Bytes looked at.
    pos: usize,
    depth: usize,
    quote: Option<&'static str>,
}

/// What [`CallEnd::find`] knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    At(usize),
    More,
    /// It is no call.
    Never,
}

impl CallEnd {
    /// Give the same call's text again with more at its end; what was looked at is not looked at again.
    pub fn find(&mut self, text: &str, dialect: LiteralDialect) -> End {
        let from = self.pos;
        let end = self.look(text, dialect);
        work::add(self.pos - from);
        end
    }

    fn look(&mut self, text: &str, dialect: LiteralDialect) -> End {
        let bytes = text.as_bytes();
        while let Some(&byte) = bytes.get(self.pos) {
            let rest = &text.as_bytes()[self.pos..];
            if let Some(quote) = self.quote {
                match byte {
                    b'\\' if dialect == LiteralDialect::Python => match rest.len() {
                        1 => return End::More,
                        _ => self.pos += 2,
                    },
                    _ if rest.starts_with(quote.as_bytes()) => {
                        self.quote = None;
                        self.pos += quote.len();
                    }
                    _ if quote.as_bytes().starts_with(rest) => return End::More,
                    _ => self.pos += 1,
                }
                continue;
            }
            let quotes = dialect.quotes();
            // A quote may still become a longer one.
            if quotes.iter().any(|quote| quote.len() > rest.len() && quote.as_bytes().starts_with(rest)) {
                return End::More;
            }
            if let Some(quote) = quotes.iter().find(|quote| rest.starts_with(quote.as_bytes())) {
                if self.depth == 0 {
                    return End::Never;
                }
                self.quote = Some(quote);
                self.pos += quote.len();
                continue;
            }
            match byte {
                b'(' | b'[' | b'{' if self.depth == 0 && byte != dialect.open() => return End::Never,
                b'(' | b'[' | b'{' => self.depth += 1,
                b')' | b']' | b'}' if self.depth == 0 => return End::Never,
                b')' | b']' | b'}' => self.depth -= 1,
                _ if self.depth == 0 && !is_name_byte(byte) => return End::Never,
                _ => {}
            }
            self.pos += 1;
            if self.depth == 0 && matches!(byte, b')' | b'}') {
                return End::At(self.pos);
            }
            if self.depth > DEPTH_MAX || (self.depth == 0 && self.pos > super::format::NAME_MAX) {
                return End::Never;
            }
        }
        End::More
    }
}

impl LiteralDialect {
    fn open(self) -> u8 {
        match self {
            Self::Python => b'(',
            Self::Marked { .. } => b'{',
        }
    }

    fn quotes(self) -> &'static [&'static str] {
        match self {
            Self::Python => &["'''", "\"\"\"", "'", "\""],
            Self::Marked { quotes } => quotes,
        }
    }
}

/// Bytes of a function's name in text formats.
pub fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.' | b':' | b'/')
}

/// Name and arguments of a complete call.
pub fn translate(call: &str, dialect: LiteralDialect) -> Option<(String, String)> {
    let open = call.find(dialect.open() as char)?;
    let (name, arguments) = call.split_at(open);
    if name.is_empty() || !name.bytes().all(is_name_byte) {
        return None;
    }
    let mut reader = LiteralReader { text: &arguments[1..], dialect };
    let mut out = String::new();
    let close = if dialect == LiteralDialect::Python { ')' } else { '}' };
    reader.members(close, &mut out, 0)?;
    reader.text.trim().is_empty().then(|| (name.to_owned(), out))
}

/// A Python list or dict as JSON: models write those where they were asked for JSON.
pub fn python_value(text: &str) -> Option<String> {
    let text = text.trim();
    if !text.starts_with(['[', '{']) {
        return None;
    }
    let (mut reader, mut out) = (LiteralReader { text, dialect: LiteralDialect::Python }, String::new());
    reader.value(&mut out, 0)?;
    reader.text.is_empty().then_some(out)
}

struct LiteralReader<'a> {
    text: &'a str,
    dialect: LiteralDialect,
}

impl LiteralReader<'_> {
    fn blank(&mut self) {
        self.text = self.text.trim_start();
    }

    fn eat(&mut self, text: &str) -> bool {
        self.blank();
        let rest = self.text.strip_prefix(text);
        self.text = rest.unwrap_or(self.text);
        rest.is_some()
    }

    /// The arguments of a call, or the members of one of Gemma's objects.
    fn members(&mut self, close: char, out: &mut String, depth: usize) -> Option<()> {
        let close = close.encode_utf8(&mut [0; 4]).to_owned();
        let between = if self.dialect == LiteralDialect::Python { "=" } else { ":" };
        out.push('{');
        let mut first = true;
        while !self.eat(&close) {
            if !std::mem::replace(&mut first, false) {
                if !self.eat(",") {
                    return None;
                }
                if self.eat(&close) {
                    break;
                }
                out.push_str(", ");
            }
            self.blank();
            let key = match self.string() {
                Some(key) if self.dialect != LiteralDialect::Python => key,
                Some(_) => return None,
                None => self.word()?.to_owned(),
            };
            out.push_str(&quoted(&key));
            if !self.eat(between) {
                return None;
            }
            out.push_str(": ");
            self.value(out, depth + 1)?;
        }
        out.push('}');
        Some(())
    }

    fn word(&mut self) -> Option<&str> {
        let end = self
            .text
            .find(|c: char| !(c.is_alphanumeric() || matches!(c, '_' | '-')))
            .unwrap_or(self.text.len());
        let (word, rest) = self.text.split_at(end);
        self.text = rest;
        (!word.is_empty()).then_some(word)
    }

    fn value(&mut self, out: &mut String, depth: usize) -> Option<()> {
        if depth > DEPTH_MAX {
            return None;
        }
        self.blank();
        if let Some(text) = self.string() {
            out.push_str(&quoted(&text));
            return Some(());
        }
        if self.eat("[") {
            return self.list("]", out, depth);
        }
        if self.dialect == LiteralDialect::Python && self.eat("(") {
            return self.list(")", out, depth);
        }
        if self.eat("{") {
            return match self.dialect {
                LiteralDialect::Python => self.dict(out, depth),
                LiteralDialect::Marked { .. } => self.members('}', out, depth),
            };
        }
        self.scalar(out)
    }

    fn list(&mut self, close: &str, out: &mut String, depth: usize) -> Option<()> {
        out.push('[');
        let mut first = true;
        while !self.eat(close) {
            if !std::mem::replace(&mut first, false) {
                if !self.eat(",") {
                    return None;
                }
                if self.eat(close) {
                    break;
                }
                out.push_str(", ");
            }
            self.value(out, depth + 1)?;
        }
        out.push(']');
        Some(())
    }

    /// The members of a Python dict, after its opening bracket.
    fn dict(&mut self, out: &mut String, depth: usize) -> Option<()> {
        out.push('{');
        let mut first = true;
        while !self.eat("}") {
            if !std::mem::replace(&mut first, false) {
                if !self.eat(",") {
                    return None;
                }
                if self.eat("}") {
                    break;
                }
                out.push_str(", ");
            }
            self.blank();
            let key = match self.string() {
                Some(key) => key,
                None => {
                    // JSON's keys are strings.
                    let mut key = String::new();
                    self.scalar(&mut key)?;
                    key
                }
            };
            out.push_str(&quoted(&key));
            if !self.eat(":") {
                return None;
            }
            out.push_str(": ");
            self.value(out, depth + 1)?;
        }
        out.push('}');
        Some(())
    }

    fn scalar(&mut self, out: &mut String) -> Option<()> {
        let marked = self.dialect != LiteralDialect::Python;
        let ends =
            |c: char| matches!(c, ',' | ')' | ']' | '}') || (!marked && (c.is_whitespace() || c == ':'));
        let end = self.text.find(ends);
        work::add(end.unwrap_or(self.text.len()));
        let end = end?;
        let (word, rest) = self.text.split_at(end);
        self.text = rest;
        let word = word.trim();
        match word {
            "True" | "true" => out.push_str("true"),
            "False" | "false" => out.push_str("false"),
            "None" | "null" => out.push_str("null"),
            "" => return None,
            _ => match number(word) {
                Some(number) => out.push_str(&number),
                // Gemma leaves the marks out now and then.
                None if marked => out.push_str(&quoted(word)),
                None => return None,
            },
        }
        Some(())
    }

    /// A string literal that begins here, or nothing (and nothing is taken).
    fn string(&mut self) -> Option<String> {
        let quote = self.dialect.quotes().iter().find(|quote| self.text.starts_with(**quote))?;
        let inside = &self.text[quote.len()..];
        if self.dialect != LiteralDialect::Python {
            let found = inside.split_once(quote);
            work::add(found.map_or(inside.len(), |(text, _)| text.len()));
            let (text, rest) = found?;
            self.text = rest;
            return Some(text.to_owned());
        }
        let mut out = String::new();
        let mut chars = inside.char_indices();
        while let Some((at, c)) = chars.next() {
            if inside[at..].starts_with(quote) {
                self.text = &inside[at + quote.len()..];
                return Some(out);
            }
            match c {
                '\\' => escape(&mut chars, &mut out)?,
                c => out.push(c),
            }
        }
        None
    }
}

/// What follows a backslash in a Python string.
fn escape(chars: &mut std::str::CharIndices<'_>, out: &mut String) -> Option<()> {
    let (_, c) = chars.next()?;
    let mut hex = |digits: usize| {
        let mut code = 0;
        for _ in 0..digits {
            code = code * 16 + chars.next()?.1.to_digit(16)?;
        }
        Some(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER))
    };
    match c {
        'n' => out.push('\n'),
        't' => out.push('\t'),
        'r' => out.push('\r'),
        'b' => out.push('\u{8}'),
        'f' => out.push('\u{c}'),
        '0' => out.push('\0'),
        '\n' => {}
        '\\' | '\'' | '"' => out.push(c),
        'x' => out.push(hex(2)?),
        'u' => out.push(hex(4)?),
        'U' => out.push(hex(8)?),
        // Python keeps the backslash of an escape it does not know.
        other => out.extend(['\\', other]),
    }
    Some(())
}

/// A Python number as JSON.
fn number(word: &str) -> Option<String> {
    let plain = word.strip_prefix('+').unwrap_or(word).replace('_', "");
    if serde_json::from_str::<serde_json::Number>(&plain).is_ok() {
        return Some(plain);
    }
    if !plain.bytes().all(|byte| byte.is_ascii_digit() || b".-+eE".contains(&byte)) {
        return None;
    }
    serde_json::Number::from_f64(plain.parse().ok()?).map(|number| number.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEMMA: LiteralDialect = LiteralDialect::Marked { quotes: &["<|\"|>", "<escape>", "\""] };

    fn whole(text: &str, dialect: LiteralDialect) -> Option<(String, String)> {
        match CallEnd::default().find(text, dialect) {
            End::At(end) => translate(&text[..end], dialect),
            _ => None,
        }
    }

    #[test]
    fn python_calls() {
        for (call, name, arguments) in [
            ("f()", "f", "{}"),
            (
                "a.b(x=1, y='it\\'s', z=[True, None, -1.5, (1,)],)",
                "a.b",
                r#"{"x": 1, "y": "it's", "z": [true, null, -1.5, [1]]}"#,
            ),
            ("f(d={'k': {\"n\": .5, 1: 2}})", "f", r#"{"d": {"k": {"n": 0.5, "1": 2}}}"#),
            ("f(s=\"a)b\\n\", t='''it's''')", "f", r#"{"s": "a)b\n", "t": "it's"}"#),
            ("f(e='', u='\\u00e9\\q')", "f", r#"{"e": "", "u": "é\\q"}"#),
        ] {
            assert_eq!(whole(call, LiteralDialect::Python), Some((name.into(), arguments.into())), "{call}");
        }
        for bad in [
            "f(1)",
            "f(x=g())",
            "f(x=y)",
            "f(x=1 y=2)",
            "f[x]",
            "'f'(x=1)",
            "f(x=",
            "f(**k)",
            "f(x=1+2)",
            "()",
        ] {
            assert_eq!(whole(bad, LiteralDialect::Python), None, "{bad}");
        }
    }

    #[test]
    fn python_values() {
        assert_eq!(python_value(" {'a': [1, None]} ").as_deref(), Some(r#"{"a": [1, null]}"#));
        for none in ["5", "", "['a'", "[a]", "['a'] b"] {
            assert_eq!(python_value(none), None, "{none}");
        }
    }

    #[test]
    fn marked_calls() {
        for (call, arguments) in [
            ("f{}", "{}"),
            ("f{city:<|\"|>Paris, }<|\"|>,n:3}", r#"{"city": "Paris, }", "n": 3}"#),
            (
                "f{a:[<escape>x<escape>,true],o:{k:1.5,\"q\":null}}",
                r#"{"a": ["x", true], "o": {"k": 1.5, "q": null}}"#,
            ),
            ("f{unit:celsius}", r#"{"unit": "celsius"}"#),
        ] {
            assert_eq!(whole(call, GEMMA), Some(("f".into(), arguments.into())), "{call}");
        }
        for bad in ["f{a}", "f{a:<escape>x}", "f(a:1)", "f{a:}"] {
            assert_eq!(whole(bad, GEMMA), None, "{bad}");
        }
    }

    #[test]
    fn the_end_is_found_at_every_split() {
        for (text, dialect) in
            [("f(x='a)\\'', y='''b''')!", LiteralDialect::Python), ("f{x:<|\"|>}<|\"|>,y:{z:1}}!", GEMMA)]
        {
            let mut end = CallEnd::default();
            for cut in 0..text.len() - 1 {
                assert_eq!(end.find(&text[..cut], dialect), End::More, "{}", &text[..cut]);
            }
            assert_eq!(end.find(text, dialect), End::At(text.len() - 1));
        }
    }

    #[test]
    fn deep_nesting_is_refused() {
        let deep = format!("f(x={}1{})", "[".repeat(100), "]".repeat(100));
        assert_eq!(whole(&deep, LiteralDialect::Python), None);
    }
}
