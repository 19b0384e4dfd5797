//! `folio bench claims --policy`: one load under the policies that the claims about batching and paging compare.
//!
//! Each is the same scheduler and cache with the same traffic: what differs is who may join those that run, or what is reserved.

use anyhow::Result;
use folio_engine::AdmissionPolicy;
use serde::Serialize;

use super::play::{Arrivals, Asked, Player};
use super::{CONTEXT, Claims};
use crate::bench::stats::{Summary, median};
use crate::cli::BatchPolicy;

/// Requests, and how many of the longest the KV cache has room for.
const REQUESTS: u32 = 32;
pub(super) const ROOM: u32 = 4;
/// Tokens of each prompt of [`unequal`], and of what comes before all requests ([`behind_opener`]).
const PROMPT: u32 = 64;
const OPENER: u32 = 256;

/// The load under one policy.
#[derive(Debug, Serialize)]
pub(super) struct PolicyFigure {
    pub policy: &'static str,
    pub how: &'static str,
    /// Median of the repetitions.
    pub tokens_per_s: f64,
    /// Of all requests but the opener, milliseconds from when it is sent.
    pub ttft_ms: Summary,
}

/// Requests whose answers nobody knows the length of.
pub(super) fn unequal(player: &mut Player, requests: u32) -> Vec<Asked> {
    (0..requests)
        .map(|_| {
            let tokens = player.length(96.0, 512);
            Asked { max_tokens: CONTEXT - PROMPT, ..Asked::new(player.prompt(PROMPT), tokens) }
        })
        .collect()
}

/// The load behind a request for one token, during which all of it arrives: so a first batch is not whoever was sent first alone.
pub(super) fn behind_opener(player: &mut Player, load: Vec<Asked>) -> Vec<Asked> {
    std::iter::once(Asked::new(player.prompt(OPENER), 1)).chain(load).collect()
}

pub(super) fn measure(claims: &Claims, policy: BatchPolicy) -> Result<PolicyFigure> {
    let pool = claims.kv_bytes(ROOM * CONTEXT + 64);
    let (name, how) = match policy {
        BatchPolicy::Continuous => ("continuous", "blocks as they are needed"),
        BatchPolicy::Static => ("static", "as many as have room, and the next when the last has its answer"),
        BatchPolicy::Contiguous => ("contiguous", "room for the longest answer is reserved"),
    };
    let mut player = claims.player(|args| {
        args.kv_cache_memory = Some(pool);
        args.max_num_seqs = Some(REQUESTS);
        // A batch's prompts fit into the step that admits it.
        args.max_num_batched_tokens = Some(REQUESTS * PROMPT);
        args.guarantee_completion = policy == BatchPolicy::Contiguous;
        if policy == BatchPolicy::Static {
            args.admission = AdmissionPolicy::Static;
        }
    })?;
    let load = unequal(&mut player, REQUESTS);
    let load = behind_opener(&mut player, load);
    let tokens: u32 = load.iter().map(|asked| asked.tokens).sum();
    let (mut rates, mut ttft) = (Vec::new(), Vec::new());
    for _ in 0..claims.args.repeat {
        let scope = player.scope();
        let asked = load.iter().map(|asked| Asked { scope, ..asked.clone() }).collect();
        let (told, seconds) = player.play(asked, Arrivals::Together)?;
        rates.push(f64::from(tokens) / seconds);
        ttft.extend(told[1..].iter().map(|told| told.ttft_s * 1e3));
    }
    Ok(PolicyFigure { policy: name, how, tokens_per_s: median(rates), ttft_ms: Summary::of(ttft) })
}
