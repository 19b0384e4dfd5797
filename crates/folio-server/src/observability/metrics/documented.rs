//! What `/metrics` exports: names, kinds, labels and help texts.

/// One metric, for the documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Documented {
    pub name: &'static str,
    /// `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    /// Labels besides `model_name`.
    pub labels: &'static str,
    pub help: &'static str,
}

impl Documented {
    pub(crate) const fn by(self, labels: &'static str) -> Self {
        Self { labels, ..self }
    }
}

pub(crate) const fn counter(name: &'static str, help: &'static str) -> Documented {
    Documented { name, kind: COUNTER, labels: "", help }
}

pub(crate) const fn gauge(name: &'static str, help: &'static str) -> Documented {
    Documented { name, kind: GAUGE, labels: "", help }
}

const fn histogram(name: &'static str, help: &'static str) -> Documented {
    Documented { name, kind: HISTOGRAM, labels: "", help }
}

pub(crate) const COUNTER: &str = "counter";
pub(crate) const GAUGE: &str = "gauge";
pub(crate) const HISTOGRAM: &str = "histogram";

/// Counted by the server.
pub(super) const SERVER: &[Documented] = &[
    counter("vllm:prompt_tokens_total", "Prompt tokens; the sum of usage.prompt_tokens"),
    counter("vllm:prompt_tokens_cached_total", "Prompt tokens found in the cache; the sum of cached_tokens"),
    counter("vllm:generation_tokens_total", "Generated tokens; the sum of usage.completion_tokens"),
    counter(
        "vllm:request_success_total",
        "Choices that ended, by stop, length, content_filter, abort or error",
    )
    .by("finished_reason"),
    counter("vllm:admission_rejections_total", "Requests the engine did not take").by("reason"),
    histogram("vllm:time_to_first_token_seconds", "From the request's arrival to a choice's first token"),
    histogram("vllm:inter_token_latency_seconds", "Between two tokens of a choice"),
    histogram(
        "vllm:request_time_per_output_token_seconds",
        "Mean time per token of a choice after its first",
    ),
    histogram("vllm:e2e_request_latency_seconds", "From the request's arrival to a choice's end"),
    histogram("vllm:request_queue_time_seconds", "From arrival at the engine to being scheduled"),
    histogram("vllm:request_prefill_time_seconds", "From being scheduled to the first token"),
    histogram("vllm:request_decode_time_seconds", "From the first token to the last"),
    histogram("vllm:request_inference_time_seconds", "From being scheduled to the last token"),
    histogram("vllm:request_num_preemptions", "Preemptions of a choice"),
    histogram("vllm:request_prompt_tokens", "Tokens of a prompt"),
    histogram("vllm:request_generation_tokens", "Tokens generated for a choice"),
    histogram("vllm:request_max_num_generation_tokens", "Most tokens of a prompt's choices"),
    histogram("vllm:request_params_n", "n as asked for"),
    histogram("vllm:request_params_max_tokens", "max_tokens as asked for, or what the context left"),
    counter("http_requests_total", "HTTP responses by route and status").by("method, handler, status"),
    counter(
        "folio:ignored_fields_total",
        "Fields of requests that nobody knows and --unknown-fields warn let pass",
    ),
    counter("folio:tools_left_out_total", "Tools that requests offered and that cannot be run here"),
    gauge("folio:connections", "Open HTTP connections"),
    gauge(
        "folio:in_flight_bytes",
        "Bytes held for requests: bodies, prompts, and answers that clients have not accepted yet",
    ),
    gauge(
        "folio:text_waiting",
        "Pieces of text work (parsing, rendering, tokenizing) that wait for a text thread",
    ),
    histogram(
        "folio:event_loop_lag_seconds",
        "How much later than wanted the event loop did something: all other work of its thread came first",
    ),
    gauge("folio:pages_open", "Live pages (GET /) that are open"),
    counter("folio:page_samples_total", "Samples made for live pages; none while no page is open"),
    counter(
        "folio:page_processor_seconds_total",
        "Processor time of those samples, at most a hundredth of one processor however many pages are open, and of what a page is told first",
    ),
    counter("folio:panics_total", "Requests whose handling panicked and that were answered 500"),
    counter("folio:traced_requests_total", "Requests that --otlp-traces-endpoint was to be told of, by exported, dropped (no room) or failed")
        .by("result"),
    counter("folio:batch_lines_total", "Lines of batches that were run, by completed or failed").by("result"),
    gauge("folio:batch_lines_running", "Lines of batches that run"),
    counter(
        "folio:safety_verdicts_total",
        "Prompts (input) and answers (output) that a rule, by its name, or the callout judged: deny, redact and, of the callout, \
         allow, annotate or failed",
    )
    .by("stage, by, action"),
    histogram(
        "folio:grammar_compile_seconds",
        "Time to compile a schema, regular expression or grammar, also of those refused",
    ),
    histogram(
        "folio:request_overhead_seconds",
        "What a generation took beyond its time in the engine: rendering, tokenizing, text, JSON, waiting for the server's thread",
    ),
    histogram("folio:grammar_mask_seconds", "Time to compute which tokens may come next, beside the step"),
    histogram(
        "folio:grammar_wait_seconds",
        "From when a token was to be chosen and its mask was not there until it was applied; only its own sequence waits for that",
    ),
];

/// Read from the engine's snapshot.
pub(super) const ENGINE: &[Documented] = &[
    gauge("vllm:num_requests_running", "Sequences that are computed"),
    gauge("vllm:num_requests_waiting", "Sequences and requests that wait to be computed"),
    gauge("vllm:num_requests_waiting_by_reason", "Those, by what they wait for").by("reason"),
    gauge("vllm:lora_requests_info", "Adapters that requests use now and that they wait for, by name; the value is the time").by("max_lora, running_lora_adapters, waiting_lora_adapters"),
    gauge("folio:adapters_resident", "Adapters whose weights are in memory (--max-cpu-loras), those that are being read included"),
    gauge("folio:adapter_bytes", "Bytes of those weights (--lora-memory)"),
    counter("folio:adapter_loads_total", "Weights of adapters that were read because a request was to run with them: loaded, or failed, and then requests that waited ended with an error").by("outcome"),
    counter("folio:adapter_evictions_total", "Adapters whose weights made room in memory for those of others"),
    counter("folio:waits_total", "Times a sequence began to wait for something, by what that was").by("reason"),
    counter("folio:waits_expired_total", "Waits that ended at their deadline: of grammar and adapter with an error, of others without what they were for").by("reason"),
    gauge("vllm:kv_cache_usage_perc", "Share of the cache's blocks held by sequences, 0 to 1, of the fullest group"),
    gauge("vllm:cache_config_info", "The cache's geometry; always 1").by("num_gpu_blocks, block_size, bytes_per_block"),
    counter("vllm:num_preemptions_total", "Sequences that lost their blocks"),
    counter("folio:preemptions_total", "Those, by what was done for their return beside the prefix cache: tier (given to --host-kv-memory to keep) or recompute").by("mode"),
    counter(
        "folio:grammar_forced_tokens_total",
        "Tokens that a grammar left alone and that were verified ahead of time",
    ),
    counter("folio:grammar_accepted_forced_tokens_total", "Those of them that were what was chosen"),
    counter("vllm:spec_decode_num_drafts_total", "Sequences with drafts to verify, in all steps").by("drafter"),
    counter("vllm:spec_decode_num_draft_tokens_total", "Drafts that were verified").by("drafter"),
    counter("vllm:spec_decode_num_accepted_tokens_total", "Those of them that were what was chosen").by("drafter"),
    counter("vllm:spec_decode_num_accepted_tokens_per_pos_total", "The same by place in a draft, from 0").by("drafter, position"),
    counter("vllm:prefix_cache_queries_total", "Tokens looked up in the prefix cache"),
    counter("vllm:prefix_cache_hits_total", "Tokens found there"),
    histogram("vllm:iteration_tokens_total", "Tokens computed per step; count and sum only"),
    gauge("folio:kv_cache_blocks", "Blocks that are free, cached (reusable content) or active").by("state; group where there are several"),
    gauge("folio:kv_cache_waste_ratio", "Share of the active blocks' slots that holds nothing yet"),
    counter("folio:kv_cache_evictions_total", "Cached blocks dropped to make room").by("group where there are several"),
    counter("folio:kv_cache_window_miss_tokens_total", "Prompt tokens in the cache that were computed again, because their sliding window was not"),
    gauge("folio:kv_cache_byte_seconds", "Bytes of cache times seconds since the start, active (held by sequences) or cached; only grows").by("state"),
    counter("folio:recomputed_tokens_total", "Tokens computed again because of preemptions"),
    counter("vllm:external_prefix_cache_queries_total", "Prompt tokens that were not in the prefix cache on the device"),
    counter("vllm:external_prefix_cache_hits_total", "Of those, tokens that were loaded from a tier instead of computed"),
    counter("folio:tier_loads_total", "Loads that a tier ended: loaded, or failed and computed instead").by("tier, outcome"),
    counter("folio:tier_offers_total", "Parts of prompts that a tier had and the device lacked, by whether they were ordered from it (load) or computed because that takes less time (compute)").by("tier, decision"),
    gauge("folio:tier_load_latency_seconds", "What a load from a tier takes beside its bytes, as measured").by("tier"),
    gauge("folio:tier_load_bytes_per_second", "Bandwidth of loads from a tier, as measured").by("tier"),
    gauge("folio:prefill_tokens_per_second", "Rate at which the first 1,024 tokens of a prompt are computed, as measured: loads are weighed against it"),
    counter("folio:unstored_blocks_total", "Blocks that tiers lack and were not given: what is like them was wanted again less than once in twenty times (unwanted), or they were gone from the cache before their turn, or what comes before them was not kept (missed)").by("reason"),
    counter("folio:prefetches_total", "Loads from tiers that began while their request waited in the queue: completed before it was admitted, under way then (admitted), or aborted: it ended, somebody lacked blocks, it was late or did not arrive").by("outcome"),
    counter("folio:prefetched_tokens_total", "Of vllm:external_prefix_cache_hits_total, tokens that arrived before their request was admitted"),
    gauge("folio:tier_up", "1 while a tier stores what it is given, 0 when it was turned off by an error, or while its server does not answer").by("tier"),
    gauge("folio:tier_bytes", "Bytes that a tier takes (used), and may take (limit); of the one in memory, those of its memory that are set aside by now (ready); of servers they are not known").by("tier, state"),
    gauge("folio:tier_blocks", "Blocks that can be found in a tier; of a server, values that are known to be there").by("tier"),
    counter("folio:tier_blocks_total", "Blocks stored, loaded, evicted to make room, and dropped: no room, too late").by("tier, event"),
    counter("folio:tier_bytes_total", "Bytes written to a tier (out), of them the blocks themselves (payload: out divided by it is the write amplification), and read from it (in)").by("tier, direction"),
    counter("folio:tier_misses_total", "Blocks that a tier should have had and that were not what they must be, or did not come; what was wrong is forgotten").by("tier, reason"),
    counter("folio:tier_requests_total", "Requests to a tier's server: answered, refused, late, or broken (no connection, no answer that can be one)").by("tier, outcome"),
    counter("folio:kv_events_published_total", "Blocks told to be stored and removed in KV events, and times that everything was told to be cleared").by("event"),
    counter("folio:kv_events_messages_total", "Messages of KV events"),
    counter("folio:kv_events_dropped_total", "Messages of KV events that subscribers were too late for, summed over all there were"),
    counter("folio:kv_events_lost_total", "Times that the publisher of KV events was too late for the engine and told everything anew"),
    counter("folio:kv_events_replays_total", "Replays of KV events that were asked for"),
    counter("folio:kv_events_refused_total", "Connections for KV events that were closed for what they said, or not let in"),
    gauge("folio:kv_events_subscribers", "Subscribers of KV events that are connected"),
    gauge("folio:kv_events_blocks", "Blocks that KV events told to be stored and not yet removed").by("medium"),
    gauge("folio:queued_prompt_tokens", "Prompt tokens of requests not yet scheduled"),
    gauge("folio:last_step_seconds", "Duration of the last step"),
    gauge("folio:time_seconds", "What time passed with since the start: steps of prompts (prefill), of decodes, of both (mixed), waiting for something that steps do not bring, idle; only grows, and adds up to the time").by("kind"),
    counter("folio:executor_failures_total", "Steps that could not be computed; their requests ended with an error"),
    counter("folio:steps_ahead_total", "Steps begun while the one before ran (on a GPU)"),
];

/// Every metric this server exports, for generated documentation.
pub fn documented() -> impl Iterator<Item = Documented> {
    SERVER.iter().chain(ENGINE).copied()
}
