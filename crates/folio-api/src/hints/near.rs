//! Whether a name is a known one, misspelled.

/// Bytes of a name that can be one: longer than any known field.
const NAME_BYTES: usize = 48;

/// Another spelling (case, dashes), or a typing mistake or two. Cost: the product of the lengths, each bounded.
pub fn is_near(known: &str, name: &str) -> bool {
    if name.len() > NAME_BYTES || known.len() > NAME_BYTES {
        return false;
    }
    let plain = |text: &str| -> Vec<u8> {
        text.bytes().filter(|byte| !b"_-".contains(byte)).map(|byte| byte.to_ascii_lowercase()).collect()
    };
    let (known, name) = (plain(known), plain(name));
    let allowed = match known.len().min(name.len()) {
        0..4 => 0,
        4..8 => 1,
        _ => 2,
    };
    known.len().abs_diff(name.len()) <= allowed && distance(&known, &name) <= allowed
}

/// Letters to insert, remove, replace, or swap with their neighbour.
fn distance(a: &[u8], b: &[u8]) -> usize {
    let mut rows = [(0..=b.len()).collect::<Vec<usize>>(), Vec::new(), Vec::new()];
    for (i, x) in a.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, y) in b.iter().enumerate() {
            let replaced = rows[0][j] + usize::from(x != y);
            let mut best = replaced.min(rows[0][j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && *x == b[j - 1] && a[i - 1] == *y {
                best = best.min(rows[1][j - 1] + 1);
            }
            row.push(best);
        }
        rows = [row, std::mem::take(&mut rows[0]), Vec::new()];
    }
    rows[0].last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistakes_are_near_and_other_words_are_not() {
        for (known, name) in [
            ("max_tokens", "max_token"),
            ("max_tokens", "maxTokens"),
            ("temperature", "temprature"),
            ("temperature", "tepmerature"),
            ("top_p", "top_b"),
            ("stop", "stpo"),
            ("seed", "sead"),
            ("n", "N"),
            ("stream", "straem"),
        ] {
            assert!(is_near(known, name), "{known} {name}");
        }
        for (known, name) in [
            ("max_tokens", "client_metadata"),
            ("user", "verbosity"),
            ("n", "m"),
            ("store", "thread"),
            ("stop", "betas"),
        ] {
            assert!(!is_near(known, name), "{known} {name}");
        }
        assert!(!is_near("stop", &"s".repeat(10_000)));
        assert_eq!(distance(b"abcd", b"abdc"), 1);
        assert_eq!(distance(b"", b"ab"), 2);
    }
}
