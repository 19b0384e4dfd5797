//! The best tokens of a row without sorting it.
//!
//! A token's key orders by logit and then by lowest id, and no two keys are equal; so the set of the best k is unique
//! and does not depend on the order of the search.

/// Ascending in (logit, lowest id first).
pub(super) fn key(logit: f32, token: u32) -> u64 {
    // Negative zero equals zero.
    let bits = (logit + 0.0).to_bits();
    let ordered = if bits >> 31 == 1 { !bits } else { bits | 0x8000_0000 };
    u64::from(ordered) << 32 | u64::from(!token)
}

pub(super) fn token(key: u64) -> u32 {
    !(key as u32)
}

/// Replaces `best` by the keys of the `k` best tokens with logit >= `floor`, in no particular order. O(vocab): one
/// vectorized look at every logit, the rest only for those above the current k-th.
pub(super) fn best_k(row: &[f32], k: usize, floor: f32, best: &mut Vec<u64>) {
    const CHUNK: usize = 64;
    best.clear();
    if k == 0 {
        return;
    }
    let room = k.saturating_mul(2).max(256).min(row.len().max(1));
    let mut threshold = floor;
    for (index, chunk) in row.chunks(CHUNK).enumerate() {
        let top = chunk.iter().fold(f32::NEG_INFINITY, |a, b| if *b > a { *b } else { a });
        if top < threshold {
            continue;
        }
        for (offset, logit) in chunk.iter().enumerate() {
            if *logit >= threshold {
                best.push(key(*logit, (index * CHUNK + offset) as u32));
            }
        }
        if best.len() > room.max(k) {
            shrink(best, k);
            threshold =
                threshold.max(best.iter().map(|key| row[token(*key) as usize]).fold(f32::INFINITY, f32::min));
        }
    }
    shrink(best, k);
}

fn shrink(best: &mut Vec<u64>, k: usize) {
    if best.len() > k {
        best.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
        best.truncate(k);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_order_by_logit_then_lowest_id() {
        let logits = [f32::NEG_INFINITY, -3.5, -0.0, 0.0, 1e-30, 2.0, f32::MAX];
        for pair in logits.windows(2) {
            if pair[0] < pair[1] {
                assert!(key(pair[0], 0) < key(pair[1], 9), "{pair:?}");
            }
        }
        assert!(key(1.0, 3) > key(1.0, 4));
        assert!(key(-0.0, 3) > key(0.0, 4));
        assert_eq!(token(key(-7.25, 123_456)), 123_456);
    }

    #[test]
    fn best_k_equals_a_full_sort() {
        let mut state = 1u64;
        for round in 0..200 {
            let length = 1 + (round * 37) % 3000;
            let row: Vec<f32> = (0..length)
                .map(|_| {
                    state =
                        state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    // Coarse values: many ties.
                    ((state >> 40) % 97) as f32 / 8.0 - 6.0
                })
                .collect();
            for k in [1, 2, 40, 300, length, length + 5] {
                let floor = if round % 3 == 0 { 0.0 } else { f32::NEG_INFINITY };
                let mut want: Vec<u64> = (0..length).map(|i| key(row[i], i as u32)).collect();
                want.retain(|key| row[token(*key) as usize] >= floor);
                want.sort_unstable_by(|a, b| b.cmp(a));
                want.truncate(k);
                let mut got = Vec::new();
                best_k(&row, k, floor, &mut got);
                got.sort_unstable_by(|a, b| b.cmp(a));
                assert_eq!(got, want, "round {round}, k {k}");
            }
        }
    }
}
