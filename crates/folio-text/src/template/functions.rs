//! What transformers adds to Jinja: `raise_exception`, `strftime_now`, its own `tojson`, Python's methods on values, and
//! the `generation` block.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value};
use minijinja::{AutoEscape, Environment, Error, ErrorKind};

use super::guards::printed;
use super::meter::meter;
use super::{guards, json, strftime, wrapped};

/// The template called `raise_exception` with this message.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct RaisedException(String);

/// The message of `raise_exception`, if that is why rendering failed.
pub(super) fn refusal(error: &Error) -> Option<String> {
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        if let Some(RaisedException(message)) = cause.downcast_ref::<RaisedException>() {
            return Some(message.clone());
        }
        source = cause.source();
    }
    None
}

/// Without templates: those are compiled by `machine`.
pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::empty();
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_formatter(|out, state, value| {
        // Escaping makes six characters of one.
        let escaped = !matches!(state.auto_escape(), AutoEscape::None) && !value.is_safe();
        let meter = meter(state);
        let bytes = printed(meter, value)?;
        let bytes = bytes.saturating_mul(if escaped { 6 } else { 1 });
        meter.make(bytes)?;
        meter.write(bytes);
        minijinja::escape_formatter(out, state, value)
    });
    guards::add_to(&mut environment);
    wrapped::add_to(&mut environment);
    environment.add_function("raise_exception", raise_exception);
    environment
}

/// As transformers has it.
pub(super) fn syntax() -> SyntaxConfig {
    let mut syntax = SyntaxConfig::builder();
    syntax.trim_blocks(true).lstrip_blocks(true);
    syntax.build().unwrap_or_default()
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(RaisedException(message)))
}

/// As in Python: an undefined variable iterates as nothing, `None` does not iterate at all.
pub(super) fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// `json.dumps(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let style = json::Style {
        ensure_ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        indent: indent(kwargs.get::<Option<Value>>("indent")?)?,
        separators: separators(kwargs.get::<Option<Value>>("separators")?)?,
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    kwargs.assert_all_used()?;
    json::dumps(value, &style).map(Value::from)
}

/// A number of spaces, or the string to indent with.
fn indent(value: Option<Value>) -> Result<Option<String>, Error> {
    let Some(value) = value.filter(|v| !v.is_none() && !v.is_undefined()) else { return Ok(None) };
    if let Some(text) = value.as_str() {
        return Ok(Some(text.to_owned()));
    }
    let spaces = usize::try_from(value)?;
    Ok(Some(" ".repeat(spaces.min(64))))
}

fn separators(value: Option<Value>) -> Result<Option<(String, String)>, Error> {
    let Some(value) = value.filter(|v| !v.is_none() && !v.is_undefined()) else { return Ok(None) };
    let bad = || Error::new(ErrorKind::InvalidOperation, "tojson: separators must be a pair of strings");
    let items: Vec<Value> = value.try_iter()?.collect();
    match items.as_slice() {
        [item, key] => {
            let text = |v: &Value| v.as_str().map(str::to_owned).ok_or_else(bad);
            Ok(Some((text(item)?, text(key)?)))
        }
        _ => Err(bad()),
    }
}

/// The function `strftime_now(format)` at a given time.
pub(super) fn strftime_now(now_unix_s: i64) -> Value {
    Value::from_function(move |format: String| -> Result<String, Error> {
        strftime::strftime(&format, now_unix_s).map_err(|directive| {
            Error::new(ErrorKind::InvalidOperation, format!("strftime_now: no directive {directive}"))
        })
    })
}

/// Removes `{% generation %}` and `{% endgeneration %}`, which mark what the model says and print nothing. As with any
/// block tag under `trim_blocks` and `lstrip_blocks`, the blanks before one on its line and the newline after it go too.
pub(super) fn strip_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let Some(length) = rest[open..].find("%}").map(|at| at + 2) else { break };
        let tag = &rest[open..open + length];
        let body = &tag[2..tag.len() - 2];
        let (strip_before, body) = match body.strip_prefix('-') {
            Some(body) => (true, body),
            None => (false, body),
        };
        let (strip_after, body) = match body.strip_suffix('-') {
            Some(body) => (true, body),
            None => (false, body),
        };
        out.push_str(&rest[..open]);
        rest = &rest[open + length..];
        if !matches!(body.trim(), "generation" | "endgeneration") {
            out.push_str(tag);
            continue;
        }
        if strip_before {
            out.truncate(out.trim_end().len());
        } else {
            let blank = out.len() - out.trim_end_matches([' ', '\t']).len();
            let line_start = out.len() - blank;
            if line_start == 0 || out[..line_start].ends_with('\n') {
                out.truncate(line_start);
            }
        }
        rest = if strip_after { rest.trim_start() } else { rest.strip_prefix('\n').unwrap_or(rest) };
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::super::machine::Machine;
    use super::*;

    fn render(source: &str) -> Result<String, Error> {
        let machine = Machine::compile("test", strip_generation_tags(source), syntax())?;
        Ok(machine.render(&environment(), Value::from_pairs([("x", Value::from("<é>"))]))?.text)
    }

    #[test]
    fn tojson_is_pythons() {
        assert_eq!(render("{{ [1, x, none, true, 1.0]|tojson }}").unwrap(), r#"[1, "<é>", null, true, 1.0]"#);
        assert_eq!(render("{{ x|tojson(ensure_ascii=True) }}").unwrap(), r#""<\u00e9>""#);
        assert_eq!(
            render("{{ {'b': 1, 'a': []}|tojson(separators=(',', ':'), sort_keys=true) }}").unwrap(),
            r#"{"a":[],"b":1}"#
        );
        assert_eq!(render("{{ {'b': [1]}|tojson(indent=2) }}").unwrap(), "{\n  \"b\": [\n    1\n  ]\n}");
        assert!(render("{{ x|tojson(colour='red') }}").is_err());
    }

    #[test]
    fn raise_exception_is_a_refusal() {
        let error = render("{{ raise_exception('no such role') }}").unwrap_err();
        assert_eq!(refusal(&error).as_deref(), Some("no such role"));
        let error = render("{{ x.nothing.at_all }}").unwrap_err();
        assert_eq!(refusal(&error), None);
    }

    #[test]
    fn none_is_not_iterable() {
        assert_eq!(
            render("{{ none is iterable }} {{ nope is iterable }} {{ [] is iterable }}").unwrap(),
            "False True True"
        );
    }

    #[test]
    fn generation_tags_vanish() {
        assert_eq!(render("a {% generation %}b{% endgeneration %} c").unwrap(), "a b c");
        assert_eq!(render("a\n  {%- generation -%}\n  b\n{% endgeneration %}\nc").unwrap(), "ab\nc");
        assert_eq!(render("a\n  {% generation %}\nb\n").unwrap(), "a\nb");
        assert_eq!(render("{% if x %}y{% endif %}").unwrap(), "y");
    }
}
