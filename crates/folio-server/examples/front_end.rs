//! The real server around the real engine with a modelled executor, which computes next to nothing: for measuring what requests cost
//! beside the model (`tools/bench/front_end.py`).
//!
//!     cargo run --release -p folio-server --example front_end -- 8000 crates/folio/assets/demo 1 1000
//!
//! The folder has the tokenizer and the template. The last two are the threads of the event loop and what a step takes, in
//! microseconds.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use folio_engine::plan::ExecutorError;
use folio_engine::{
    EngineParts, Executor, ModelExecutor, Pooling, SchedulerConfig, StepOutput, StepPlan, SystemClock,
};
use folio_kv::{CacheConfig, KvCache, default_policy};
use folio_server::{App, ModelFacts, SamplingDefaults, ServerConfig, WeightFacts};
use folio_sim::SimBackend;
use folio_text::{ChatTemplate, Tokenizer};

/// The allocator of `folio`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const BLOCKS: u32 = 4096;
const BLOCK_TOKENS: u32 = 16;
const ROWS: usize = 512;
const CONTEXT: u32 = 2048;

/// A device that takes its time.
struct Paced {
    inner: ModelExecutor,
    step: Duration,
}

impl Executor for Paced {
    fn begin(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.inner.begin(plan)
    }

    fn finish(&mut self) -> Result<&StepOutput, ExecutorError> {
        if !self.step.is_zero() {
            std::thread::sleep(self.step);
        }
        self.inner.finish()
    }

    fn depth(&self) -> usize {
        self.inner.depth()
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: front_end PORT FOLDER HTTP_THREADS STEP_US";
    let port: u16 = arguments.next().and_then(|port| port.parse().ok()).expect(usage);
    let folder = PathBuf::from(arguments.next().expect(usage));
    let http_threads: usize = arguments.next().and_then(|threads| threads.parse().ok()).expect(usage);
    let step = arguments.next().and_then(|us| us.parse().ok()).map(Duration::from_micros).expect(usage);
    let tokenizer = Tokenizer::from_folder(&folder).expect("a tokenizer");
    let template = ChatTemplate::from_folder(&folder, tokenizer.special_tokens()).expect("a template");
    let vocab = tokenizer.vocab_size();
    let config = SchedulerConfig {
        max_num_seqs: 64,
        max_num_batched_tokens: ROWS as u32,
        max_prefill_tokens_while_decoding: ROWS as u32,
        max_model_len: CONTEXT,
        ..Default::default()
    };
    let backend = SimBackend::new(vocab, BLOCKS as usize, BLOCK_TOKENS as usize, ROWS, 64);
    let inner = ModelExecutor::new(Box::new(backend), vocab, ROWS, 64);
    let geometry = CacheConfig { blocks: BLOCKS, block_tokens: BLOCK_TOKENS, bytes_per_block: 1 };
    let engine = folio_engine::start(EngineParts {
        config,
        cache: KvCache::new(geometry, default_policy(0.01)),
        executor: Box::new(Paced { inner, step }),
        clock: Arc::new(SystemClock::new()),
        vocab: vocab as u32,
        tiers: Vec::new(),
        events: None,
    })
    .expect("an engine");
    let app = App {
        engine: Arc::new(engine),
        tokenizer: Arc::new(tokenizer),
        template: template.map(Arc::new),
        parsers: Default::default(),
        model: ModelFacts {
            names: vec!["modelled".into()],
            created_s: 0,
            context_length: CONTEXT,
            vocab_size: vocab as u32,
            eos_token_ids: Arc::new([]),
            hidden: 3,
            pooling: Ok(Pooling::Last),
            only_embeds: false,
            defaults: SamplingDefaults::default(),
            model_digest: [1; 32],
            layout_digest: [2; 32],
            weights: WeightFacts::default(),
        },
        adapters: Default::default(),
        version: "0",
    };
    let listen = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port);
    let config = ServerConfig { listen, http_threads, ..Default::default() };
    folio_server::run(config, app, |addresses| eprintln!("listening on http://{}", addresses.serving))
        .expect("it serves");
}
