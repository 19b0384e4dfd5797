//! What a step costs between a plan and a device: `cargo run --release -p folio-engine --example executor_cost`.
//!
//! Sequences decode at contexts of several lengths, all of one prefix; the device checks a batch as the real ones do and answers at once.
//! Prints the time from a plan to its answers, and the block table entries that went to the device.

use std::cell::Cell;
use std::time::Instant;

use folio_engine::{Executor, Micros, ModelExecutor, Scheduler, SchedulerConfig};
use folio_kv::{CacheConfig, KvCache, LruLeafFirst};
use folio_model::backend::{Backend, BackendError, Batch, KvLayout, TensorView};
use folio_model::check::{BatchCheck, PoolSize, Written};
use folio_model::program::{MatrixId, Program, VectorId};
use folio_model::sampling::{Outcome, SampleRow};
use folio_model::tables::BlockTables;
use folio_sim::scenario::request;

/// The allocator of `folio`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

thread_local! {
    /// Block table entries of all batches so far.
    static ENTRIES: Cell<usize> = const { Cell::new(0) };
}

/// Checks, and computes nothing.
struct Checks {
    pools: Vec<PoolSize>,
    tables: BlockTables,
    written: Written,
    rows: usize,
}

impl Backend for Checks {
    fn name(&self) -> String {
        "checks".to_owned()
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

    fn forward(&mut self, _: &Batch) -> Result<&[f32], BackendError> {
        Err(BackendError::Device("it samples".to_owned()))
    }

    fn samples(&self) -> Option<u32> {
        Some(0)
    }

    fn begin_and_sample(
        &mut self,
        batch: &Batch,
        rows: &mut dyn ExactSizeIterator<Item = SampleRow<'_>>,
    ) -> Result<(), BackendError> {
        ENTRIES.set(ENTRIES.get() + batch.blocks.len());
        self.rows = rows.len();
        BatchCheck {
            max_rows: ROWS,
            max_logit_rows: ROWS,
            max_position: 1 << 14,
            vocabulary: 32_000,
            input_width: 0,
            embeddings: None,
            serves_adapters: false,
            has_features: false,
            chosen: 0,
            pools: &self.pools,
            tables: &mut self.tables,
            written: &mut self.written,
        }
        .all(batch)
    }

    fn finish_sampled(&mut self, outcomes: &mut Vec<Outcome>) -> Result<(), BackendError> {
        outcomes.extend((0..self.rows).map(|_| Outcome::Token { id: 3, logprobs: None }));
        Ok(())
    }

    fn hidden(&self, _: u32) -> &[f32] {
        &[]
    }

    fn weight_bytes(&self) -> u64 {
        0
    }
}

const ROWS: usize = 16_384;
const STEPS: usize = 200;
/// The first of them have those that were admitted last.
const WARM_UP: usize = 10;

fn main() {
    for (sequences, context) in [(256, 2048), (256, 8192), (4096, 2048), (4096, 8192)] {
        measure(sequences, context);
    }
}

fn measure(sequences: u32, context: u32) {
    let config = SchedulerConfig {
        max_num_seqs: sequences,
        max_num_batched_tokens: ROWS as u32,
        max_prefill_tokens_while_decoding: ROWS as u32,
        max_model_len: 1 << 14,
        max_queued_tokens: 1 << 40,
        ..SchedulerConfig::default()
    };
    let blocks = sequences * 40 + context;
    let mut cache = KvCache::new(
        CacheConfig { blocks, block_tokens: 16, bytes_per_block: 1 },
        Box::new(LruLeafFirst::new()),
    );
    let pools = vec![PoolSize { blocks: blocks as usize, block_tokens: 16, is_state: false }];
    let written = Written::new(&[blocks as usize]);
    let checks = Checks { tables: BlockTables::new(&pools, 1 << 14), pools, written, rows: 0 };
    let mut executor = ModelExecutor::new(Box::new(checks), 32_000, ROWS, ROWS);
    let mut scheduler = Scheduler::new(config).expect("valid limits");
    // Not whole blocks: who computes the same last block waits for whoever does already.
    let prompt: Vec<u32> = (0..context - 3).map(|i| i.wrapping_mul(2_654_435_761) % 32_000).collect();
    let requests = (0..u64::from(sequences)).map(|id| request(id, &prompt, 400).hashed(16));
    scheduler.admit(requests, [], Micros(0));
    let (mut times, mut before) = (Vec::new(), 0);
    for step in 0.. {
        let now = Micros(step * 1000);
        let plan = scheduler.plan(&mut cache, now);
        let all = plan.sequences.len() == sequences as usize
            && plan.sequences.iter().all(|sequence| sequence.tokens.len() == 1);
        before = if times.len() <= WARM_UP { ENTRIES.get() } else { before };
        let start = Instant::now();
        let output = executor.execute(plan).expect("it answers");
        let taken = start.elapsed().as_secs_f64() * 1e6;
        if all {
            times.push(taken);
        }
        scheduler.commit(&mut cache, Ok(output), now).clear();
        if times.len() == WARM_UP + STEPS {
            break;
        }
    }
    let times = &mut times[WARM_UP..];
    times.sort_unstable_by(f64::total_cmp);
    println!(
        "{sequences} sequences at {context} tokens: {:.0} us a step (median of {STEPS}), {:.0} block table entries",
        times[STEPS / 2],
        (ENTRIES.get() - before) as f64 / STEPS as f64
    );
}
