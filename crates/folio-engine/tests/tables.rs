//! What a backend is told of block tables, and what it has of them afterwards.

use std::sync::{Arc, Mutex};

use folio_engine::plan::{HOLE, SamplePlan, SequenceId, SequencePlan, StepPlan, TableChange, Want};
use folio_engine::{Executor, Micros, ModelExecutor, Scheduler, SchedulerConfig};
use folio_kv::{CacheConfig, GroupConfig, KvCache, LruLeafFirst};
use folio_model::backend::{Backend, BackendError, Batch, KvLayout, TensorView};
use folio_model::check::PoolSize;
use folio_model::program::{MatrixId, Program, VectorId};
use folio_model::tables::BlockTables;
use folio_sim::scenario::request;

const BLOCK: usize = 4;

/// What was seen of the batches so far.
#[derive(Default)]
struct Seen {
    /// Block tables, as a backend has them.
    tables: BlockTables,
    /// New entries of the last batch.
    entries: usize,
    /// The next step fails.
    fails: bool,
}

/// Keeps block tables, and computes nothing.
struct Keeper {
    seen: Arc<Mutex<Seen>>,
    pools: Vec<PoolSize>,
    logits: Vec<f32>,
}

impl Backend for Keeper {
    fn name(&self) -> String {
        "keeper".to_owned()
    }

    fn numerics(&self) -> String {
        self.name()
    }

    fn load_matrix(&mut self, _: &str, _: &[TensorView<'_>]) -> Result<MatrixId, BackendError> {
        Ok(MatrixId(0))
    }

    fn load_vector(&mut self, _: &str, _: &[TensorView<'_>]) -> Result<VectorId, BackendError> {
        Ok(VectorId(0))
    }

    fn load_program(&mut self, _: Program, _: usize, _: usize, _: usize) -> Result<(), BackendError> {
        Ok(())
    }

    fn allocate_cache(&mut self, _: &KvLayout, _: &[usize]) -> Result<(), BackendError> {
        Ok(())
    }

    fn forward(&mut self, batch: &Batch) -> Result<&[f32], BackendError> {
        let mut seen = self.seen.lock().unwrap();
        seen.entries = batch.blocks.len();
        if std::mem::take(&mut seen.fails) {
            return Err(BackendError::Device("it fails".to_owned()));
        }
        seen.tables.apply(batch, &self.pools).map_err(BackendError::Batch)?;
        self.logits.resize(2 * batch.logit_rows.len(), 0.0);
        Ok(&self.logits)
    }

    fn hidden(&self, _: u32) -> &[f32] {
        &[]
    }

    fn weight_bytes(&self) -> u64 {
        0
    }
}

/// With two cache groups of so many blocks.
fn executor(blocks: usize, rows: usize) -> (ModelExecutor, Arc<Mutex<Seen>>) {
    let pools = vec![PoolSize { blocks, block_tokens: BLOCK, is_state: false }; 2];
    let tables = BlockTables::new(&pools, 1000);
    let seen = Arc::new(Mutex::new(Seen { tables, ..Seen::default() }));
    let keeper = Keeper { seen: seen.clone(), pools, logits: Vec::new() };
    (ModelExecutor::new(Box::new(keeper), 2, rows, rows), seen)
}

/// Whether the backend has the tables of a plan.
fn has(seen: &Seen, plan: &StepPlan) -> bool {
    plan.sequences.iter().all(|sequence| {
        let tables = sequence.block_tables.iter().enumerate();
        { tables }.all(|(group, table)| seen.tables.table(sequence.table_slot, group) == table)
    })
}

/// One sequence in slot 1, one row behind `table` full blocks.
fn plan(step: u64, id: u64, since: u64, tables: [&[u32]; 2], changes: [TableChange; 2]) -> StepPlan {
    let sequence = SequencePlan {
        id: SequenceId(id),
        first_position: (tables[0].len() * BLOCK) as u32 - 1,
        tokens: [1].into_iter().collect(),
        block_tables: tables.map(<[u32]>::to_vec).to_vec(),
        table_slot: 1,
        since,
        changes: changes.to_vec(),
        ..SequencePlan::empty(SequenceId(id))
    };
    StepPlan { step, sequences: vec![Box::new(sequence)], ..StepPlan::default() }
}

#[test]
fn a_step_sends_what_changed_and_everything_where_that_is_not_enough() {
    let (mut executor, seen) = executor(100, 8);
    let mut step = |plan: &StepPlan| {
        let computed = executor.execute(plan).is_ok();
        let seen = seen.lock().unwrap();
        assert_eq!(has(&seen, plan), computed, "step {}", plan.step);
        seen.entries
    };
    let all = TableChange::default();
    let from = |from| TableChange { from, ..TableChange::default() };
    let hole = |from, first_hole| TableChange { from, first_hole, holes: 1 };
    assert_eq!(step(&plan(1, 7, 0, [&[4, 5, 6], &[1, 2, 3]], [all; 2])), 6);
    assert_eq!(step(&plan(2, 7, 1, [&[4, 5, 6], &[1, 2, 3]], [from(3); 2])), 0, "nothing changed");
    assert_eq!(step(&plan(3, 7, 2, [&[4, 5, 6, 8], &[HOLE.0, 2, 3, 9]], [from(3), hole(3, 0)])), 3);
    assert_eq!(
        step(&plan(4, 7, 3, [&[4, 5, 6, 9], &[HOLE.0, 2, 3, 9]], [from(3), from(4)])),
        1,
        "another block"
    );
    // Step 5 was planned with it and never begun.
    assert_eq!(step(&plan(6, 7, 5, [&[4, 5, 7, 9, 1], &[HOLE.0, 2, 3, 9, 1]], [from(4); 2])), 10);
    // Another sequence has the slot now, and then the first one again.
    assert_eq!(step(&plan(7, 8, 0, [&[20], &[21]], [all; 2])), 2);
    assert_eq!(step(&plan(8, 7, 6, [&[4, 5], &[6, 7]], [from(2); 2])), 4);
}

#[test]
fn a_backend_that_failed_is_told_everything_again() {
    let (mut executor, seen) = executor(100, 8);
    let kept = TableChange { from: 3, ..TableChange::default() };
    let next = |step, since| plan(step, 7, since, [&[4, 5, 6], &[1, 2, 3]], [kept; 2]);
    executor.execute(&next(1, 0)).expect("computed");
    seen.lock().unwrap().fails = true;
    executor.execute(&next(2, 1)).expect_err("it fails");
    executor.execute(&next(3, 2)).expect("computed");
    assert_eq!(seen.lock().unwrap().entries, 6);
    executor.execute(&next(4, 3)).expect("computed");
    assert_eq!(seen.lock().unwrap().entries, 0);
}

/// More rows of logits than fit a pass: the tables are sent with the first of them.
#[test]
fn the_passes_of_a_step_share_what_was_sent() {
    let (mut executor, seen) = executor(100, 1);
    let mut whole = plan(1, 7, 0, [&[4, 5, 6], &[1, 2, 3]], [TableChange::default(); 2]);
    let sequence = &mut whole.sequences[0];
    (sequence.first_position, sequence.tokens) = (8, [1, 1, 1].into_iter().collect());
    sequence.samples = (0..3).map(|row| SamplePlan { row, want: Want::Score { next: 0, top: 0 } }).collect();
    executor.execute(&whole).expect("computed");
    assert!(has(&seen.lock().unwrap(), &whole));
    assert_eq!(seen.lock().unwrap().entries, 0, "the last pass");
}

/// However long the context is, a decode costs what is new.
#[test]
fn plans_say_what_is_new_in_block_tables() {
    let config = SchedulerConfig {
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        max_model_len: 1000,
        watermark_permille: 0,
        ..SchedulerConfig::default()
    };
    let cache = CacheConfig { blocks: 1000, block_tokens: BLOCK as u32, bytes_per_block: 1 };
    let window = GroupConfig::window(30, 1000, BLOCK as u32, 1);
    let mut cache = KvCache::with_groups(cache, &[window], Box::new(LruLeafFirst::default()));
    let mut scheduler = Scheduler::new(config).expect("valid limits");
    let (mut executor, seen) = executor(1000, 64);
    // All of one length, so that their blocks become full together.
    let requests = (1..=3).map(|id| request(id, &vec![id as u32; 400], 80).hashed(BLOCK as u32));
    scheduler.admit(requests, [], Micros(0));
    let (mut decodes, mut sent, mut decoded) = (0, 0, false);
    for step in 1..200 {
        let plan = scheduler.plan(&mut cache, Micros(step)).clone();
        if plan.sequences.is_empty() {
            break;
        }
        let decoding =
            plan.sequences.len() == 3 && plan.sequences.iter().all(|entry| entry.tokens.len() == 1);
        let output = executor.execute(&plan).expect("computed").clone();
        let seen = seen.lock().unwrap();
        assert!(has(&seen, &plan), "step {step}");
        // The first of them has the holes that the prompt's last chunk left.
        if std::mem::replace(&mut decoded, decoding) && decoding {
            (decodes, sent) = (decodes + 1, sent + seen.entries);
            assert!(seen.entries <= 3 * 3, "step {step}: a new block each in both groups, and a hole");
        }
        scheduler.commit(&mut cache, Ok(&output), Micros(step)).clear();
        scheduler.check(&cache).expect("sound");
    }
    assert!(decodes > 60, "{decodes}");
    assert!((decodes / 2..=3 * decodes).contains(&sent), "{sent} entries in {decodes} steps");
}
