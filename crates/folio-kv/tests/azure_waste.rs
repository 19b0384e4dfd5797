//! Waste (allocated and never written slots / allocated slots) on the lengths of real conversations.

mod common;

use common::{ByRoot, cache, data, root};
use folio_kv::{BlockTable, KvCache};

const BLOCK_TOKENS: u32 = 16;
const LIMIT: f64 = 0.04;
/// Conversations at a time: the waste of the moment needs neighbours of all ages.
const CONCURRENT: usize = 64;

fn lengths() -> Option<Vec<(u32, u32)>> {
    let text = std::fs::read_to_string(data("trace-azure-llm-2023/AzureLLMInferenceTrace_conv.csv")?)
        .expect("readable");
    let parse = |line: &str| {
        let mut fields = line.trim().split(',').skip(1).map(|n| n.parse().expect("a number of tokens"));
        (fields.next().expect("ContextTokens"), fields.next().expect("GeneratedTokens"))
    };
    Some(text.lines().skip(1).filter(|line| !line.trim().is_empty()).map(parse).collect())
}

struct Sequence {
    table: BlockTable,
    tokens: Vec<u32>,
    prompt: u32,
}

/// One step: the prompt at once, then one token at a time. `false`: done.
fn advance(cache: &mut KvCache, sequence: &mut Sequence) -> bool {
    let known = sequence.tokens.len() as u32;
    let computed = sequence.table.computed();
    if computed == known {
        return false;
    }
    let target = if computed == 0 { sequence.prompt } else { computed + 1 };
    cache.grow(&mut sequence.table, target, &mut Vec::new()).expect("room");
    cache.committed(&mut sequence.table, &sequence.tokens, target);
    true
}

#[test]
fn waste_stays_under_four_percent() {
    let Some(lengths) = lengths() else { return };
    assert!(lengths.len() > 19_000);
    let root = root(0);
    let mut cache = cache(100_000, BLOCK_TOKENS);
    let mut running: Vec<Sequence> = Vec::new();
    let (mut waiting, mut unique) = (lengths.iter(), 0u32);
    let (mut slots, mut written) = (0u64, 0u64);
    loop {
        while running.len() < CONCURRENT
            && let Some(&(prompt, generated)) = waiting.next()
        {
            // Token ids that occur once: nothing is shared, which is the worst case for waste.
            let tokens: Vec<u32> = (unique..unique + prompt + generated).collect();
            unique += prompt + generated;
            running.push(Sequence {
                table: cache.empty_table(cache.hashes_at(&root, &[])),
                tokens,
                prompt: prompt.max(1),
            });
        }
        if running.is_empty() {
            break;
        }
        for sequence in running.iter_mut() {
            advance(&mut cache, sequence);
        }
        let stats = cache.stats();
        slots += stats.active_slots();
        written += stats.active_written_slots;
        for done in running.extract_if(.., |s| s.table.computed() as usize == s.tokens.len()) {
            cache.release(done.table, &done.tokens);
        }
    }
    cache.check(&[]).expect("invariants");
    let stats = cache.stats();
    let tokens: u64 = lengths.iter().map(|&(p, g)| u64::from(p + g)).sum();
    assert_eq!(stats.closed_written_slots, tokens, "every token was written exactly once");
    let blocks: u64 = lengths.iter().map(|&(p, g)| u64::from((p + g).div_ceil(BLOCK_TOKENS))).sum();
    assert_eq!(stats.allocations, blocks, "no block was taken before it was needed");
    let over_time = (slots - written) as f64 / slots as f64;
    println!(
        "waste on Azure conversations, block {BLOCK_TOKENS}: {:.3} % of the slots of all requests,",
        100.0 * stats.lifetime_waste()
    );
    println!(
        "{:.3} % of the slots held, averaged over {CONCURRENT} concurrent conversations' steps",
        100.0 * over_time
    );
    assert!(stats.lifetime_waste() < LIMIT);
    assert!(over_time < LIMIT);
}
