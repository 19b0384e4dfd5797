//! What a piece of advice costs whoever follows it, in figures and in words.

use serde_json::{Value, json};

/// KL from f16 that KV as int8 was measured to have, in nats a token (`docs/kv-formats.md`).
const INT8_KL: [(&str, f64); 2] = [("built-in model", 1.38e-4), ("stories260k", 3.45e-3)];

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ChangeCost {
    /// So many bytes more where the cache is.
    CacheMemory(f64),
    /// So many bytes of the machine's memory, beside the cache.
    HostMemory(f64),
    /// What is kept is less exact.
    Precision,
    /// So many bytes of the cache, for one alone.
    PartOfCache(f64),
    /// Steps take longer, in the mean: of so many seconds so many.
    SlowerSteps { now_s: f64, then_s: f64 },
    /// So many times as many blocks for the same content.
    MoreBlocks(u32),
    /// Nothing of the machine's.
    Nothing,
}

fn mebibytes(bytes: f64) -> String {
    let size = bytes / f64::from(1 << 20);
    if size < 10.0 { format!("{size:.2} MiB") } else { format!("{size:.0} MiB") }
}

impl ChangeCost {
    pub fn json(self) -> Value {
        match self {
            Self::CacheMemory(bytes) => json!({
                "text": format!("{} more memory where the cache is", mebibytes(bytes)),
                "memory_bytes": bytes,
            }),
            Self::HostMemory(bytes) => json!({
                "text": format!("{} of the machine's memory beside the cache", mebibytes(bytes)),
                "host_memory_bytes": bytes,
            }),
            Self::Precision => {
                let measured = INT8_KL.map(|(model, kl)| format!("{kl:.2e} with {model}")).join(", ");
                json!({
                    "text": format!(
                        "precision: a KL from f16 of {measured} was measured, in nats a token; `folio bench kv` measures that of this model"
                    ),
                    "kl": INT8_KL.map(|(_, kl)| kl),
                })
            }
            Self::PartOfCache(bytes) => json!({
                "text": format!("{} of the cache, which nobody else has then", mebibytes(bytes)),
                "cache_bytes": bytes,
            }),
            Self::SlowerSteps { now_s, then_s } => json!({
                "text": format!(
                    "each of those who run waits up to {:.1} ms for a token, now {:.1} ms",
                    1e3 * then_s,
                    1e3 * now_s
                ),
                "step_s_now": now_s,
                "step_s_then": then_s,
            }),
            Self::MoreBlocks(times) => json!({
                "text": format!(
                    "{times} times as many blocks to hash, find and read; `folio bench claims` measures what their size takes"
                ),
                "blocks_times": times,
            }),
            Self::Nothing => json!({"text": "nothing"}),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_int8_costs_is_what_was_measured() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/kv-formats.md");
        let page = std::fs::read_to_string(page).expect("the page");
        for (model, kl) in INT8_KL {
            let (_, of) = page.split_once(&format!("**{model}**")).expect("its table");
            let row = of.lines().find(|line| line.starts_with("| int8 |")).expect("its row");
            let told = row.split('|').nth(5).and_then(|cell| cell.trim().parse::<f64>().ok());
            assert_eq!(told, Some(kl), "{row}");
        }
    }

    #[test]
    fn costs_have_words_and_a_figure() {
        let told = ChangeCost::CacheMemory(f64::from(384 << 20)).json();
        assert_eq!(told["text"], "384 MiB more memory where the cache is");
        assert_eq!(told["memory_bytes"], f64::from(384 << 20));
        let told = ChangeCost::Precision.json();
        assert_eq!(told["kl"], json!([1.38e-4, 3.45e-3]));
        let text = told["text"].as_str().expect("words");
        assert!(text.contains("1.38e-4 with built-in model, 3.45e-3 with stories260k"), "{text}");
        let told = ChangeCost::PartOfCache(f64::from(3 << 20)).json();
        assert_eq!(told["text"], "3.00 MiB of the cache, which nobody else has then");
        let told = ChangeCost::SlowerSteps { now_s: 0.02, then_s: 0.0255 }.json();
        assert_eq!(told["text"], "each of those who run waits up to 25.5 ms for a token, now 20.0 ms");
        assert_eq!(ChangeCost::MoreBlocks(4).json()["blocks_times"], 4);
        assert_eq!(ChangeCost::Nothing.json(), json!({"text": "nothing"}));
    }
}
