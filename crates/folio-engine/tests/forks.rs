//! Choices of one request and branches of one conversation share every full block and copy at most one each.

use std::collections::BTreeSet;

use folio_engine::SchedulerConfig;
use folio_engine::request::Request;
use folio_kv::{BlockCopy, BlockId, TenantId};
use folio_sim::Machine;
use folio_sim::scenario::{request, root, text};

const BLOCK: u32 = 16;

fn machine(windows: &[(u32, u32)]) -> Machine {
    let config = SchedulerConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 256,
        max_prefill_tokens_while_decoding: 128,
        max_model_len: 1024,
        watermark_permille: 0,
        ..SchedulerConfig::default()
    };
    Machine::with_windows(config, 200, BLOCK, windows)
}

/// Group 0 of every table there is.
fn tables(machine: &Machine) -> Vec<Vec<BlockId>> {
    machine.scheduler.tables().map(|(_, _, table)| table.blocks().to_vec()).collect()
}

/// Steps until `count` tables exist and each has more than `blocks` blocks.
fn step_until(machine: &mut Machine, count: usize, blocks: usize) -> Vec<Vec<BlockId>> {
    for _ in 0..100 {
        machine.step();
        let tables = tables(machine);
        if tables.len() == count && tables.iter().all(|table| table.len() > blocks) {
            return tables;
        }
    }
    panic!("{count} tables were never there at once:\n{:?}", machine.scheduler);
}

fn distinct(tables: &[Vec<BlockId>]) -> usize {
    tables.iter().flatten().collect::<BTreeSet<_>>().len()
}

/// All copies of all plans since `from`, by group.
fn copies(machine: &Machine, from: usize, group: u32) -> Vec<BlockCopy> {
    let copies = machine.plans()[from..].iter().flat_map(|plan| &plan.copies);
    copies.filter(|copy| copy.group == group).copied().collect()
}

fn choices(prompt: u32) -> Request {
    let mut many = request(1, &text(1, prompt), 20);
    many.n = 4;
    many.sampling.temperature = 1.0;
    many.sampling.seed = 5;
    many
}

/// What the first blocks of all of `tables` are, if they are the same.
fn common(tables: &[Vec<BlockId>]) -> usize {
    let first = &tables[0];
    (0..first.len()).take_while(|at| tables.iter().all(|table| table.get(*at) == first.get(*at))).count()
}

#[test]
fn choices_share_every_full_block_and_copy_the_tail_once_each() {
    for windows in [&[][..], &[(60, 40)], &[(60, 24), (80, 100)]] {
        let mut machine = machine(windows);
        let many = choices(100);
        machine.submit(many.clone());
        let forked = step_until(&mut machine, 4, 6);
        assert_eq!(common(&forked), 7, "six full blocks, and four tokens in the next");
        machine.step();
        let tables = tables(&machine);
        assert_eq!(common(&tables), 6);
        let own: BTreeSet<BlockId> = tables.iter().map(|table| table[6]).collect();
        machine.run();
        machine.assert_as_alone(&many);
        // Three got a copy of the four tokens in the seventh block, the last goes on in it.
        for group in 0..=windows.len() as u32 {
            let copies = copies(&machine, 0, group);
            assert_eq!(copies.len(), 3, "group {group} of {windows:?}: {copies:?}");
            assert!(copies.iter().all(|copy| copy.tokens == 4 && copy.from == copies[0].from));
        }
        assert_eq!(own.len(), 4, "after the first step each has a block of its own to write in");
        assert_eq!(machine.cache.stats().active_blocks, 0);
    }
}

#[test]
fn blocks_of_choices_are_counted_once() {
    let mut machine = machine(&[]);
    machine.submit(choices(100));
    let forked = step_until(&mut machine, 4, 6);
    assert_eq!((distinct(&forked), machine.cache.stats().active_blocks), (7, 7));
    machine.step();
    assert_eq!((distinct(&tables(&machine)), machine.cache.stats().active_blocks), (6 + 4, 6 + 4));
    let tables = step_until(&mut machine, 4, 7);
    assert_eq!(distinct(&tables), 6 + 4 * 2);
    assert_eq!(machine.cache.stats().active_blocks, 6 + 4 * 2);
}

#[test]
fn a_prompt_that_ends_with_a_block_is_not_copied_at_all() {
    let mut machine = machine(&[]);
    let many = choices(96);
    machine.submit(many.clone());
    let tables = step_until(&mut machine, 4, 6);
    assert_eq!((common(&tables), distinct(&tables)), (6, 6 + 4));
    machine.run();
    machine.assert_as_alone(&many);
    assert_eq!(copies(&machine, 0, 0), []);
}

/// A conversation of 120 tokens, 119 of them computed: seven full blocks and seven tokens.
fn conversation(machine: &mut Machine) -> Vec<u32> {
    machine.submit(request(1, &text(1, 100), 20));
    machine.run();
    [text(1, 100), machine.tokens(1, 0)].concat()
}

fn branch(id: u64, history: &[u32], at: usize) -> Request {
    request(id, &[&history[..at], &text(id as u32 + 5, 30)].concat(), 4)
}

#[test]
fn branches_of_a_conversation_share_every_full_block_and_copy_at_most_one() {
    for windows in [&[][..], &[(60, 40)]] {
        let mut machine = machine(windows);
        let history = conversation(&mut machine);
        let from = machine.plans().len();
        // Two branch off in the middle of the seventh block, one goes on at the end.
        let branches = [branch(2, &history, 110), branch(3, &history, 110), branch(4, &history, 120)];
        branches.iter().for_each(|branch| machine.submit(branch.clone()));
        let tables = step_until(&mut machine, 3, 8);
        assert_eq!(common(&tables), 6);
        // 140, 140 and 150 tokens in nine, nine and ten blocks, of which six are shared.
        assert_eq!(machine.cache.stats().active_blocks as usize, distinct(&tables));
        let own: usize = tables.iter().map(|table| table.len() - 6).sum();
        assert_eq!(distinct(&tables), 6 + own);
        machine.run();
        branches.iter().for_each(|branch| machine.assert_as_alone(branch));
        let found = [2, 3, 4].map(|id| machine.cached_tokens(id));
        assert_eq!(found, [Some(110), Some(110), Some(119)]);
        for group in 0..=windows.len() as u32 {
            let tokens: Vec<u32> = copies(&machine, from, group).iter().map(|copy| copy.tokens).collect();
            assert_eq!(tokens, [14, 14, 7], "group {group}: one copy each");
        }
        assert_eq!(machine.computed(), 100 + 19 + 30 + 30 + 31 + 3 * 3, "nothing twice");
    }
}

/// The control: whoever may not share computes and holds everything itself.
#[test]
fn branches_of_another_tenant_share_among_themselves_only() {
    let mut machine = machine(&[]);
    let history = conversation(&mut machine);
    let (from, before) = (machine.plans().len(), machine.computed());
    let tenant = TenantId(9);
    let branches = [2, 3].map(|id| Request { tenant, root: root(tenant), ..branch(id, &history, 110) });
    branches.iter().for_each(|branch| machine.submit(branch.clone()));
    machine.run();
    branches.iter().for_each(|branch| machine.assert_as_alone(branch));
    assert_eq!(machine.cached_tokens(2), Some(0));
    // The second waited for the six blocks they have in common, and got what else there was by copy.
    assert!(machine.cached_tokens(3) >= Some(96), "{:?}", machine.cached_tokens(3));
    assert!(machine.computed() - before >= 140 + 30);
    assert!(copies(&machine, from, 0).len() <= 1);
}
