//! How long a model stays after its last request, as Ollama's `keep_alive` says it.

use std::time::Duration;

use serde_json::Value;

const UNITS: [(&str, f64); 7] =
    [("ns", 1e-9), ("us", 1e-6), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];
/// A hundred years, which is as good as ever.
const SECONDS_MAX: f64 = 3.2e9;

/// "5m", "1h30m", "300" (seconds), "0" (at once); what is negative is `None`, as long as nobody else needs the memory.
pub fn parse_keep_alive(text: &str) -> Result<Option<Duration>, String> {
    let wrong = || format!("'{text}' is no time such as 5m, 1h30m, 300 (seconds), 0 (at once) or -1 (stays)");
    let (negative, rest) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let seconds = match rest.parse::<f64>() {
        Ok(seconds) if seconds >= 0.0 => seconds,
        _ => with_units(rest).ok_or_else(wrong)?,
    };
    if !seconds.is_finite() {
        return Err(wrong());
    }
    Ok((!negative).then(|| Duration::from_secs_f64(seconds.min(SECONDS_MAX))))
}

/// What a request's field says, where it says it in a form that there is.
pub(super) fn of_field(value: &Value) -> Option<Option<Duration>> {
    match value {
        Value::String(text) => parse_keep_alive(text).ok(),
        Value::Number(number) => parse_keep_alive(&number.to_string()).ok(),
        _ => None,
    }
}

/// Numbers with a unit each.
fn with_units(mut rest: &str) -> Option<f64> {
    let (mut sum, mut any) = (0.0, false);
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !(c.is_ascii_digit() || c == '.'))?;
        let number: f64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let end = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
        let (_, seconds) = UNITS.iter().find(|(unit, _)| *unit == &rest[..end])?;
        sum += number * seconds;
        rest = &rest[end..];
        any = true;
    }
    any.then_some(sum)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn times_are_read_as_ollama_reads_them() {
        let s = |seconds: f64| Ok(Some(Duration::from_secs_f64(seconds)));
        for (text, time) in [
            ("5m", s(300.0)),
            ("1h30m", s(5400.0)),
            ("1.5s", s(1.5)),
            ("300", s(300.0)),
            ("0", s(0.0)),
            ("0s", s(0.0)),
            ("250ms", s(0.25)),
            ("-1", Ok(None)),
            ("-5m", Ok(None)),
            ("1e30", s(SECONDS_MAX)),
        ] {
            assert_eq!(parse_keep_alive(text), time, "{text}");
        }
        for wrong in ["", "-", "m", "5", "5 m", "5x", "--1", "1h30", "inf", "nan", "NaN", "1..5s"] {
            assert_eq!(parse_keep_alive(wrong).is_err(), wrong != "5", "{wrong}");
        }
        assert_eq!(of_field(&json!("10m")), Some(Some(Duration::from_secs(600))));
        assert_eq!(of_field(&json!(0)), Some(Some(Duration::ZERO)));
        assert_eq!(of_field(&json!(-1)), Some(None));
        assert_eq!(of_field(&json!({})), None);
    }
}
