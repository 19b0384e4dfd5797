//! Sizes, counts and durations as people write and read them.

use std::time::Duration;

const UNITS: [(&str, u64); 5] =
    [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

/// `1.5GiB`, `512MiB`, `2G`, `800MB`, `4096`: binary for KiB.. and bare letters, decimal for KB, MB, GB, TB.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number: f64 =
        number.parse().map_err(|_| format!("`{text}` is not a size; write 4GiB, 512MiB or bytes"))?;
    let factor: f64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kib" => 1024.0,
        "m" | "mib" => 1024f64.powi(2),
        "g" | "gib" => 1024f64.powi(3),
        "t" | "tib" => 1024f64.powi(4),
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        other => return Err(format!("unknown unit `{other}` in `{text}`; use KiB, MiB, GiB or TiB")),
    };
    let bytes = number * factor;
    if bytes < u64::MAX as f64 { Ok(bytes as u64) } else { Err(format!("`{text}` is too large")) }
}

/// `90d`, `12h`, `30m`, `45s`.
pub fn parse_time(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is not a time; write 90d, 12h, 30m or 45s");
    let unit = match text.trim().chars().last() {
        Some('d') => 86_400,
        Some('h') => 3600,
        Some('m') => 60,
        Some('s') => 1,
        _ => return Err(wrong()),
    };
    let text = text.trim();
    let number: u64 = text[..text.len() - 1].parse().map_err(|_| wrong())?;
    let seconds = number.checked_mul(unit).filter(|seconds| (1..=100 * 366 * 86_400).contains(seconds));
    seconds.map(Duration::from_secs).ok_or_else(|| format!("`{text}` is not between 1s and 100 years"))
}

/// `3.2 MiB`.
pub fn bytes(count: u64) -> String {
    let (name, size) = UNITS.into_iter().find(|(_, size)| count >= *size).unwrap_or(("B", 1));
    if size == 1 {
        return format!("{count} B");
    }
    let value = count as f64 / size as f64;
    let decimals = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.decimals$} {name}")
}

/// `16,384`.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// `1.24 B`, `134 M`, `260 K` parameters.
pub fn parameters(number: u64) -> String {
    let number = number as f64;
    match number {
        n if n >= 1e9 => format!("{:.2} B", n / 1e9),
        n if n >= 1e7 => format!("{:.0} M", n / 1e6),
        n if n >= 1e6 => format!("{:.1} M", n / 1e6),
        n => format!("{:.0} K", n / 1e3),
    }
}

/// `12.3 ms`, `4.56 s`.
pub fn duration(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    match seconds {
        s if s < 1e-3 => format!("{:.0} us", s * 1e6),
        s if s < 1.0 => format!("{:.1} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

/// `3 days ago`, `just now`.
pub fn ago(time: Duration) -> String {
    let seconds = time.as_secs();
    let units = [("day", 86_400), ("hour", 3600), ("minute", 60)];
    match units.into_iter().find(|(_, size)| seconds >= *size) {
        None => "just now".to_owned(),
        Some((unit, size)) => {
            let number = seconds / size;
            format!("{number} {unit}{} ago", if number == 1 { "" } else { "s" })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_unit() {
        let seconds = |text: &str| parse_time(text).map(|time| time.as_secs());
        assert_eq!([seconds("90d"), seconds("12h"), seconds("45s")], [Ok(7_776_000), Ok(43_200), Ok(45)]);
        for wrong in ["", "90", "d", "0s", "-1d", "1y", "99999999d", "1é"] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_are_read() {
        for (text, bytes) in
            [("4096", 4096), ("1.5GiB", 3 << 29), ("2G", 2 << 30), ("800MB", 800_000_000), (" 3 kib ", 3072)]
        {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "GiB", "4 parsecs", "-1", "1e30TiB", "1.2.3"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_written() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.50 KiB");
        assert_eq!(bytes(3 << 29), "1.50 GiB");
        assert_eq!(bytes(200 << 20), "200 MiB");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(count(123), "123");
        assert_eq!(
            [ago(Duration::from_secs(59)), ago(Duration::from_secs(3600))],
            ["just now", "1 hour ago"]
        );
        assert_eq!(ago(Duration::from_secs(200_000)), "2 days ago");
        assert_eq!(parameters(1_600_000), "1.6 M");
        assert_eq!(parameters(1_235_814_400), "1.24 B");
    }
}
