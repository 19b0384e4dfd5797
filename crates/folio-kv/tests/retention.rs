//! Priorities, times to live and pins: who is evicted first, what is never evicted, and who may say so.

mod common;

use common::{ByRoot, cache, root, serve};
use folio_kv::{
    EvictionPolicy, KeepRefused, KvCache, LearnedLifetimes, LruLeafFirst, OPERATOR_PRIORITY, PinLimits,
    PrefixId, Retention, RetentionRange, Root, TenantId,
};

const BLOCK: u32 = 4;

fn text(which: u32, blocks: u32) -> Vec<u32> {
    (0..blocks * BLOCK).map(|i| which * 1000 + i).collect()
}

fn range(tokens: std::ops::Range<u32>, priority: u8, ttl_us: Option<u64>) -> RetentionRange {
    RetentionRange { tokens, priority, ttl_us, pin: false }
}

/// Computes a sequence as a request with `ranges` does, and gives it back.
fn serve_with(cache: &mut KvCache, root: &Root, tokens: &[u32], ranges: &[RetentionRange]) {
    let (mut table, _) = cache.attach_at(root, tokens, tokens.len() as u32);
    cache.grow(&mut table, tokens.len() as u32, &mut Vec::new()).expect("the pool is large enough");
    cache.committed(&mut table, tokens, tokens.len() as u32);
    cache.retain(&table, 0, ranges);
    cache.release(table, tokens);
    cache.check(&[]).expect("invariants");
}

fn cached(cache: &KvCache, which: u32, blocks: u32) -> u32 {
    cache.lookup_at(&root(1), &text(which, blocks)).full_blocks
}

/// Takes `blocks` blocks for content of another tenant.
fn press(cache: &mut KvCache, blocks: u32) {
    press_with(cache, 90, blocks);
}

fn press_with(cache: &mut KvCache, which: u32, blocks: u32) {
    serve(cache, &root(9), &text(which, blocks));
    cache.check(&[]).expect("invariants");
}

#[test]
fn the_weak_go_first_and_the_strong_last() {
    let mut cache = cache(12, BLOCK);
    serve_with(&mut cache, &root(1), &text(1, 3), &[range(0..12, 90, None)]);
    serve_with(&mut cache, &root(1), &text(2, 3), &[range(0..12, 60, None)]);
    serve_with(&mut cache, &root(1), &text(3, 3), &[]);
    serve_with(&mut cache, &root(1), &text(4, 3), &[range(0..12, 10, None)]);
    let all = |cache: &KvCache| [1, 2, 3, 4].map(|which| cached(cache, which, 3));
    press(&mut cache, 2);
    assert_eq!(all(&cache), [3, 3, 3, 1], "less than the default priority, though used last; leaf first");
    cache.clear(Some(TenantId(9)));
    press(&mut cache, 6);
    assert_eq!(all(&cache), [3, 3, 0, 0], "then the default");
    cache.clear(Some(TenantId(9)));
    press(&mut cache, 8);
    assert_eq!(all(&cache), [3, 1, 0, 0], "the higher priority is the last to go");
    cache.clear(Some(TenantId(9)));
    press(&mut cache, 12);
    assert_eq!(all(&cache), [0; 4], "a priority is no promise");
}

#[test]
fn what_has_expired_goes_before_everything_else_and_a_use_begins_the_time_anew() {
    let mut cache = cache(9, BLOCK);
    serve_with(&mut cache, &root(1), &text(1, 3), &[range(0..12, 100, Some(1000))]);
    serve_with(&mut cache, &root(1), &text(2, 3), &[range(0..12, 50, Some(1000))]);
    serve_with(&mut cache, &root(1), &text(3, 3), &[range(0..12, 0, None)]);
    cache.advance(900);
    serve_with(&mut cache, &root(1), &text(1, 3), &[]);
    cache.advance(1000);
    cache.check(&[]).unwrap();
    press(&mut cache, 2);
    assert_eq!(
        [1, 2, 3].map(|which| cached(&cache, which, 3)),
        [3, 1, 3],
        "only the second has expired: the first was used at 900"
    );
    cache.advance(1900);
    cache.clear(Some(TenantId(9)));
    press(&mut cache, 6);
    assert_eq!(
        [1, 2, 3].map(|which| cached(&cache, which, 3)),
        [0, 0, 3],
        "the lowest priority is above none"
    );
}

#[test]
fn an_expired_block_that_is_used_again_is_as_good_as_new() {
    let mut cache = cache(6, BLOCK);
    serve_with(&mut cache, &root(1), &text(1, 3), &[range(0..12, 80, Some(10))]);
    serve_with(&mut cache, &root(1), &text(2, 3), &[]);
    cache.advance(10);
    serve_with(&mut cache, &root(1), &text(1, 3), &[]);
    press(&mut cache, 3);
    assert_eq!((cached(&cache, 1, 3), cached(&cache, 2, 3)), (3, 0), "now it is merely the younger one");
}

#[test]
fn one_tenant_s_requests_keep_the_strongest_of_what_they_said() {
    let mut cache = cache(8, BLOCK);
    serve_with(&mut cache, &root(1), &text(1, 4), &[]);
    serve_with(&mut cache, &root(1), &text(2, 4), &[]);
    serve_with(&mut cache, &root(1), &text(1, 4), &[range(0..16, 0, None)]);
    press(&mut cache, 2);
    assert_eq!(
        (cached(&cache, 1, 4), cached(&cache, 2, 4)),
        (4, 2),
        "a request that cares little weakens nothing"
    );
    serve_with(&mut cache, &root(1), &text(2, 2), &[range(0..8, 70, None)]);
    cache.clear(Some(TenantId(9)));
    press(&mut cache, 6);
    assert_eq!((cached(&cache, 1, 4), cached(&cache, 2, 4)), (0, 2), "one that cares more strengthens");
}

#[test]
fn a_range_protects_what_it_covers_and_what_comes_before() {
    let mut cache = cache(8, BLOCK);
    serve_with(&mut cache, &root(1), &text(1, 6), &[range(9..10, 90, None)]);
    press(&mut cache, 8);
    assert_eq!(cached(&cache, 1, 6), 0);
    cache.clear(None);
    serve_with(&mut cache, &root(1), &text(1, 6), &[range(9..10, 90, None)]);
    serve(&mut cache, &root(1), &text(2, 2));
    press(&mut cache, 5);
    assert_eq!((cached(&cache, 1, 6), cached(&cache, 2, 2)), (3, 0), "blocks 0 to 2 of 6");
}

#[test]
fn the_tail_of_a_disposable_prompt_is_not_in_its_way() {
    let mut cache = cache(8, BLOCK);
    let mut prompt = text(1, 3);
    prompt.extend([7, 7]);
    serve_with(&mut cache, &root(1), &prompt, &[range(0..14, 0, None)]);
    serve(&mut cache, &root(1), &text(2, 4));
    press(&mut cache, 4);
    assert_eq!((cached(&cache, 1, 3), cached(&cache, 2, 4)), (0, 4));
}

/// Tokens that tenant 2, who says nothing, finds beside a flood of tenant 1's, who says `loud` about the requests of each kind.
fn found_beside(policy: Box<dyn EvictionPolicy>, loud: impl Fn(u32) -> Option<u8>) -> u64 {
    let mut cache = KvCache::new(common::config(48, BLOCK), policy);
    let mut word = 7u32;
    for round in 0..3000u32 {
        word = word.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let (kind, draw) = (round % 4, word >> 16);
        if kind == 0 {
            serve(&mut cache, &root(2), &text(draw % 9, 3));
            continue;
        }
        // Some of it again and again, most of it once.
        let which = if kind == 1 { 100 + draw % 5 } else { 200 + round };
        let said = loud(kind).map(|priority| range(0..u32::MAX, priority, None));
        let (mut table, _) = cache.attach_at(&root(1), &text(which, 3), 3 * BLOCK);
        cache.grow(&mut table, 3 * BLOCK, &mut Vec::new()).expect("room");
        cache.committed(&mut table, &text(which, 3), 3 * BLOCK);
        cache.retain(&table, 0, said.as_slice());
        cache.release(table, &text(which, 3));
    }
    cache.check(&[]).expect("invariants");
    cache.tenant_stats(TenantId(2)).queries.hit_tokens
}

#[test]
fn a_flood_of_the_highest_priority_takes_nothing_from_another_tenant() {
    let policies: [fn() -> Box<dyn EvictionPolicy>; 2] =
        [|| Box::new(LruLeafFirst::new()), || Box::new(LearnedLifetimes::new(0.1))];
    for policy in policies {
        let silent = found_beside(policy(), |_| None);
        assert!(silent > 500, "the other finds something at all: {silent}");
        assert_eq!(found_beside(policy(), |_| Some(100)), silent, "everything is raised");
        let raised = found_beside(policy(), |kind| (kind == 1).then_some(100));
        assert!(raised * 100 >= silent * 97, "what is wanted again is raised: {raised}, not {silent}");
        let offered = found_beside(policy(), |kind| (kind > 1).then_some(0));
        assert!(offered >= silent, "what is wanted once is offered: {offered}, not {silent}");
    }
}

#[test]
fn a_raised_priority_is_paid_for_by_its_own_tenant() {
    let mut cache = cache(10, BLOCK);
    serve_with(&mut cache, &root(1), &text(1, 3), &[range(0..12, 100, None)]);
    serve(&mut cache, &root(2), &text(1, 3));
    serve(&mut cache, &root(1), &text(2, 4));
    // The oldest is the raised one of tenant 1, who has four of less.
    press(&mut cache, 4);
    let other = cache.lookup_at(&root(2), &text(1, 3)).full_blocks;
    assert_eq!((cached(&cache, 1, 3), other, cached(&cache, 2, 4)), (3, 3, 0));
    press_with(&mut cache, 91, 3);
    let other = cache.lookup_at(&root(2), &text(1, 3)).full_blocks;
    assert_eq!((cached(&cache, 1, 3), other), (0, 3), "with nothing of less, it goes when its time has come");
}

#[test]
fn what_an_operator_declares_goes_last_whoever_asks() {
    let mut cache = cache(10, BLOCK);
    serve_with(&mut cache, &root(3), &text(1, 3), &[range(0..12, OPERATOR_PRIORITY, None)]);
    serve_with(&mut cache, &root(1), &text(2, 7), &[range(0..28, 100, None)]);
    press(&mut cache, 7);
    assert_eq!(
        cache.lookup_at(&root(3), &text(1, 3)).full_blocks,
        3,
        "before it everything of everybody else"
    );
    press_with(&mut cache, 91, 10);
    assert_eq!(cache.lookup_at(&root(3), &text(1, 3)).full_blocks, 0, "it is no pin");
}

fn keep(
    cache: &mut KvCache,
    tenant: u32,
    tokens: &[u32],
    ttl_us: Option<u64>,
) -> Result<PrefixId, KeepRefused> {
    let retention = Retention { priority: 50, ttl_us };
    let kept = cache.keep_at(&root(tenant), tokens, retention, true, u32::MAX);
    cache.check(&[]).expect("invariants");
    kept.map(|prefix| prefix.id)
}

#[test]
fn a_pinned_prefix_stays_and_is_not_counted_as_available() {
    let mut cache = cache(12, BLOCK);
    serve(&mut cache, &root(1), &text(1, 5));
    keep(&mut cache, 1, &text(1, 3), None).unwrap();
    assert_eq!((cache.available()[0], cache.stats().pinned_blocks), (9, 3));
    let found = cache.lookup_at(&root(1), &text(1, 5));
    assert_eq!((found.full_blocks, found.idle_blocks[0]), (5, 2), "attaching pinned blocks takes nothing");
    press(&mut cache, 9);
    assert_eq!(cached(&cache, 1, 5), 3);
    let (mut table, _) = cache.attach_at(&root(9), &[1], 1);
    assert_eq!((cache.needed(&table, 40)[0], cache.available()[0]), (10, 9));
    let refused = cache.grow(&mut table, 40, &mut Vec::new());
    assert!(refused.is_err(), "a refusal, not a scan for what is not there");
    cache.release(table, &[1]);
    cache.clear(None);
    assert_eq!(cached(&cache, 1, 5), 3, "clearing spares it, too");
}

#[test]
fn what_windows_need_cannot_be_pinned() {
    let window = common::sized_window(6, 6, BLOCK);
    let policy = Box::new(LruLeafFirst::new());
    let mut cache = KvCache::with_groups(common::config(20, BLOCK), &[window], policy);
    serve(&mut cache, &root(1), &text(1, 4));
    assert_eq!(keep(&mut cache, 1, &text(1, 3), None), Err(KeepRefused::Windows));
    let kept = |cache: &mut KvCache| {
        let kept = cache.keep_at(&root(1), &text(1, 4), Retention::default(), false, 0).unwrap();
        (kept.tokens, kept.cached_tokens)
    };
    assert_eq!(kept(&mut cache), (16, 16));
}

#[test]
fn pins_are_bounded_for_each_tenant_and_for_all() {
    let mut cache = cache(20, BLOCK);
    cache.set_pin_limits(PinLimits { pool: 6, tenant: 4 });
    for (tenant, which) in [(1, 1), (1, 2), (2, 3)] {
        serve(&mut cache, &root(tenant), &text(which, 5));
    }
    assert!(matches!(
        keep(&mut cache, 1, &text(1, 5), None),
        Err(KeepRefused::PinLimit { tokens: 20, pinned_tokens: 0, limit_tokens: 16 })
    ));
    keep(&mut cache, 1, &text(1, 3), None).unwrap();
    keep(&mut cache, 1, &text(1, 4), None).expect("three of the four are pinned already");
    assert!(matches!(keep(&mut cache, 1, &text(2, 1), None), Err(KeepRefused::PinLimit { .. })));
    keep(&mut cache, 2, &text(3, 2), None).unwrap();
    let full = keep(&mut cache, 2, &text(3, 3), None);
    assert!(
        matches!(full, Err(KeepRefused::PinsFull { tokens: 4 })),
        "not its own limit, and nothing about what the other pinned: {full:?}"
    );
    assert_eq!(cache.tenant_stats(TenantId(1)).pinned_blocks, 4);
}

#[test]
fn only_what_is_cached_in_whole_blocks_can_be_kept() {
    let mut cache = cache(20, BLOCK);
    serve(&mut cache, &root(1), &text(1, 2));
    assert_eq!(
        keep(&mut cache, 1, &text(1, 3), None),
        Err(KeepRefused::NotCached { tokens: 12, cached_tokens: 8 })
    );
    assert_eq!(
        keep(&mut cache, 1, &[1, 2, 3], None),
        Err(KeepRefused::TooShort { tokens: 3, block_tokens: 4 })
    );
    let busy = cache.keep_at(&root(1), &text(1, 2), Retention::default(), true, 1);
    assert_eq!(busy, Err(KeepRefused::Busy), "two idle blocks, and one to spare");
}

#[test]
fn a_pin_ends_with_its_time_unless_the_prefix_is_used() {
    let mut cache = cache(20, BLOCK);
    serve(&mut cache, &root(1), &text(1, 4));
    let id = keep(&mut cache, 1, &text(1, 2), Some(100)).unwrap();
    cache.advance(90);
    serve_with(&mut cache, &root(1), &text(1, 2), &[]);
    cache.advance(189);
    assert!(cache.prefix(TenantId(1), id).unwrap().pinned);
    cache.advance(190);
    let info = cache.prefix(TenantId(1), id).unwrap();
    assert!(!info.pinned && info.cached_tokens == 8, "{info:?}");
    cache.check(&[]).unwrap();
    assert_eq!((cache.available()[0], cache.stats().pinned_blocks), (20, 0));
}

#[test]
fn a_record_is_its_tenant_s_alone() {
    let mut cache = cache(20, BLOCK);
    serve(&mut cache, &root(1), &text(1, 2));
    serve(&mut cache, &root(2), &text(1, 2));
    let id = keep(&mut cache, 1, &text(1, 2), None).unwrap();
    let other = keep(&mut cache, 2, &text(1, 2), None).unwrap();
    assert_ne!(id, other, "the same text of another tenant has another name");
    assert_eq!(cache.prefix(TenantId(2), id), None);
    assert_eq!(cache.change_prefix(TenantId(2), id, Retention::default(), false, 9), None);
    assert_eq!(cache.drop_prefix(TenantId(2), id), None);
    assert!(cache.prefix(TenantId(1), id).unwrap().pinned);
    assert_eq!(cache.prefixes(TenantId(1)).len(), 1);
}

#[test]
fn dropping_takes_what_continues_the_prefix_and_spares_what_others_keep() {
    let mut cache = cache(40, BLOCK);
    let (mut short, mut long) = (text(1, 4), text(1, 4));
    short.extend(text(5, 1));
    long.extend(text(6, 2));
    serve(&mut cache, &root(1), &short);
    serve(&mut cache, &root(1), &long);
    let base = keep(&mut cache, 1, &text(1, 2), None).unwrap();
    let id = keep(&mut cache, 1, &text(1, 4), None).unwrap();
    let pinned = keep(&mut cache, 1, &long, None).unwrap();
    assert_eq!(cache.drop_prefix(TenantId(1), id), Some(4), "the rest of it is part of a pinned prefix");
    cache.check(&[]).unwrap();
    assert_eq!(cache.drop_prefix(TenantId(1), pinned), Some(16), "down to what the base keeps");
    cache.check(&[]).unwrap();
    assert_eq!(cached(&cache, 1, 4), 2);
    let (table, _) = cache.attach_at(&root(1), &text(1, 2), 8);
    assert_eq!(cache.drop_prefix(TenantId(1), base), Some(0), "somebody is using it");
    cache.check(&[&table]).unwrap();
    cache.release(table, &text(1, 2));
    assert_eq!(cache.stats().pinned_blocks, 0);
}

#[test]
fn records_are_bounded_and_those_of_nothing_make_room() {
    let mut cache = cache(600, BLOCK);
    for which in 0..folio_kv::PREFIXES_MAX as u32 {
        serve(&mut cache, &root(1), &text(which, 1));
        let kept = cache.keep_at(&root(1), &text(which, 1), Retention::default(), false, 0);
        kept.expect("below the limit");
    }
    serve(&mut cache, &root(1), &text(700, 1));
    let one_more = |cache: &mut KvCache| {
        cache.keep_at(&root(1), &text(700, 1), Retention::default(), false, 0).map(|prefix| prefix.tokens)
    };
    assert_eq!(one_more(&mut cache), Err(KeepRefused::TooMany));
    press(&mut cache, 599);
    serve(&mut cache, &root(1), &text(700, 1));
    assert_eq!(one_more(&mut cache), Ok(4));
}

#[test]
fn what_was_said_of_leased_blocks_is_told_with_them() {
    let (mut cache, tokens) = (cache(12, BLOCK), text(1, 6));
    let (mut table, _) = cache.attach_at(&root(1), &tokens, tokens.len() as u32);
    cache.grow(&mut table, tokens.len() as u32, &mut Vec::new()).expect("the pool is large enough");
    cache.committed(&mut table, &tokens, tokens.len() as u32);
    cache.retain(&table, 0, &[range(8..12, 90, Some(1000))]);
    let (lease, contents) = cache.lease_table(&table, (1, 24), u64::MAX);
    let (lineage, said) = (cache.lineage(&contents), Retention { priority: 90, ttl_us: Some(1000) });
    assert_eq!(
        lineage.retentions,
        [Some(said); 2],
        "what it follows is kept as long; nothing is told of those behind"
    );
    let told: Vec<_> = (0..contents.len()).map(|at| lineage.retention(at)).collect();
    let unsaid = Some(Retention::default());
    assert_eq!(told, [Some(said), Some(said), unsaid, unsaid, unsaid]);
    assert_eq!(lineage.of(&contents, 1), (Some(contents[0].hash), &tokens[8..12]));
    cache.release(table, &tokens);
    assert!(cache.end_lease(lease));
    cache.check(&[]).expect("invariants");
}

/// How many of a request's blocks a tier is to be given.
fn worth(cache: &mut KvCache, tokens: &[u32], ranges: &[RetentionRange]) -> u32 {
    let (mut table, _) = cache.attach_at(&root(1), tokens, tokens.len() as u32);
    cache.grow(&mut table, tokens.len() as u32, &mut Vec::new()).expect("the pool is large enough");
    cache.committed(&mut table, tokens, tokens.len() as u32);
    cache.retain(&table, 0, ranges);
    let worth = cache.worth_storing(&table, 0, tokens.len() as u32 / BLOCK);
    cache.release(table, tokens);
    worth
}

#[test]
fn what_never_comes_back_is_not_worth_storing_unless_it_was_said_to_be_kept() {
    let mut cache = KvCache::new(common::config(100, BLOCK), Box::new(LearnedLifetimes::new(0.0)));
    assert_eq!(worth(&mut cache, &text(0, 20), &[]), 20, "nothing is known");
    // Texts that nobody asks for again, and between them one conversation of three turns after the other.
    for at in 1..2000 {
        let (chat, turn) = (100_000 + at / 30, at / 10 % 3);
        let request = if at % 10 == 0 { text(chat, 4 + 2 * turn) } else { text(at, 20) };
        worth(&mut cache, &request, &[]);
    }
    assert_eq!(worth(&mut cache, &text(9000, 20), &[]), 0, "a single shot");
    assert_eq!(worth(&mut cache, &text(9001, 20), &[range(0..40, 60, None)]), 10, "what was said to be kept");
    assert_eq!(worth(&mut cache, &text(9000, 20), &[]), 20, "it came back");
    worth(&mut cache, &text(200_000, 4), &[]);
    assert_eq!(worth(&mut cache, &text(200_000, 6), &[]), 6, "a conversation, its end included");
}
