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

pub(crate) const fn doc(
    name: &'static str,
    kind: &'static str,
    labels: &'static str,
    help: &'static str,
) -> Documented {
    Documented { name, kind, labels, help }
}

pub(crate) const COUNTER: &str = "counter";
pub(crate) const GAUGE: &str = "gauge";
pub(crate) const HISTOGRAM: &str = "histogram";

/// Counted by the server.
pub(super) const SERVER: &[Documented] = &[
    doc("vllm:prompt_tokens_total", COUNTER, "", "Prompt tokens; the sum of usage.prompt_tokens"),
    doc(
        "vllm:prompt_tokens_cached_total",
        COUNTER,
        "",
        "Prompt tokens found in the cache; the sum of cached_tokens",
    ),
    doc("vllm:generation_tokens_total", COUNTER, "", "Generated tokens; the sum of usage.completion_tokens"),
    doc(
        "vllm:request_success_total",
        COUNTER,
        "finished_reason",
        "Choices that ended, by stop, length, content_filter, abort or error",
    ),
    doc("vllm:admission_rejections_total", COUNTER, "reason", "Requests the engine did not take"),
    doc(
        "vllm:time_to_first_token_seconds",
        HISTOGRAM,
        "",
        "From the request's arrival to a choice's first token",
    ),
    doc("vllm:inter_token_latency_seconds", HISTOGRAM, "", "Between two tokens of a choice"),
    doc(
        "vllm:request_time_per_output_token_seconds",
        HISTOGRAM,
        "",
        "Mean time per token of a choice after its first",
    ),
    doc("vllm:e2e_request_latency_seconds", HISTOGRAM, "", "From the request's arrival to a choice's end"),
    doc("vllm:request_queue_time_seconds", HISTOGRAM, "", "From arrival at the engine to being scheduled"),
    doc("vllm:request_prefill_time_seconds", HISTOGRAM, "", "From being scheduled to the first token"),
    doc("vllm:request_decode_time_seconds", HISTOGRAM, "", "From the first token to the last"),
    doc("vllm:request_inference_time_seconds", HISTOGRAM, "", "From being scheduled to the last token"),
    doc("vllm:request_num_preemptions", HISTOGRAM, "", "Preemptions of a choice"),
    doc("vllm:request_prompt_tokens", HISTOGRAM, "", "Tokens of a prompt"),
    doc("vllm:request_generation_tokens", HISTOGRAM, "", "Tokens generated for a choice"),
    doc("vllm:request_max_num_generation_tokens", HISTOGRAM, "", "Most tokens of a prompt's choices"),
    doc("vllm:request_params_n", HISTOGRAM, "", "n as asked for"),
    doc("vllm:request_params_max_tokens", HISTOGRAM, "", "max_tokens as asked for, or what the context left"),
    doc("http_requests_total", COUNTER, "method, handler, status", "HTTP responses by route and status"),
    doc(
        "folio:ignored_fields_total",
        COUNTER,
        "",
        "Fields of requests that nobody knows and --unknown-fields warn let pass",
    ),
    doc("folio:tools_left_out_total", COUNTER, "", "Tools that requests offered and that cannot be run here"),
    doc("folio:connections", GAUGE, "", "Open HTTP connections"),
    doc(
        "folio:in_flight_bytes",
        GAUGE,
        "",
        "Bytes held for requests: bodies, prompts, and answers that clients have not accepted yet",
    ),
    doc(
        "folio:text_waiting",
        GAUGE,
        "",
        "Pieces of text work (parsing, rendering, tokenizing) that wait for a text thread",
    ),
    doc(
        "folio:event_loop_lag_seconds",
        HISTOGRAM,
        "",
        "How much later than wanted the event loop did something: all other work of its thread came first",
    ),
    doc("folio:panics_total", COUNTER, "", "Requests whose handling panicked and that were answered 500"),
    doc(
        "folio:batch_lines_total",
        COUNTER,
        "result",
        "Lines of batches that were run, by completed or failed",
    ),
    doc("folio:batch_lines_running", GAUGE, "", "Lines of batches that run"),
    doc(
        "folio:safety_verdicts_total",
        COUNTER,
        "stage, by, action",
        "Prompts (input) and answers (output) that a rule, by its name, or the callout judged: deny, redact and, of the callout, \
         allow, annotate or failed",
    ),
    doc(
        "folio:grammar_compile_seconds",
        HISTOGRAM,
        "",
        "Time to compile a schema, regular expression or grammar, also of those refused",
    ),
    doc(
        "folio:request_overhead_seconds",
        HISTOGRAM,
        "",
        "What a generation took beyond its time in the engine: rendering, tokenizing, text, JSON, waiting for the server's thread",
    ),
    doc(
        "folio:grammar_mask_seconds",
        HISTOGRAM,
        "",
        "Time to compute which tokens may come next, beside the step",
    ),
    doc(
        "folio:grammar_wait_seconds",
        HISTOGRAM,
        "",
        "From when a token was to be chosen and its mask was not there until it was applied; only its own sequence waits for that",
    ),
];

/// Read from the engine's snapshot.
pub(super) const ENGINE: &[Documented] = &[
    doc("vllm:num_requests_running", GAUGE, "", "Sequences that are computed"),
    doc("vllm:num_requests_waiting", GAUGE, "", "Sequences and requests that wait to be computed"),
    doc("vllm:num_requests_waiting_by_reason", GAUGE, "reason", "Those, by what they wait for"),
    doc(
        "folio:waits_total",
        COUNTER,
        "reason",
        "Times a sequence began to wait for something, by what that was",
    ),
    doc(
        "folio:waits_expired_total",
        COUNTER,
        "reason",
        "Waits that ended at their deadline: of grammar and adapter with an error, of others without what they were for",
    ),
    doc(
        "vllm:kv_cache_usage_perc",
        GAUGE,
        "",
        "Share of the cache's blocks held by sequences, 0 to 1, of the fullest group",
    ),
    doc(
        "vllm:cache_config_info",
        GAUGE,
        "num_gpu_blocks, block_size, bytes_per_block",
        "The cache's geometry; always 1",
    ),
    doc("vllm:num_preemptions_total", COUNTER, "", "Sequences that lost their blocks"),
    doc(
        "folio:preemptions_total",
        COUNTER,
        "mode",
        "Those, by what brings them back beside the prefix cache: swap (a copy in host memory) or recompute",
    ),
    doc(
        "folio:grammar_forced_tokens_total",
        COUNTER,
        "",
        "Tokens that a grammar left alone and that were verified ahead of time",
    ),
    doc("folio:grammar_accepted_forced_tokens_total", COUNTER, "", "Those of them that were what was chosen"),
    doc("vllm:spec_decode_num_drafts_total", COUNTER, "", "Sequences with drafts to verify, in all steps"),
    doc("vllm:spec_decode_num_draft_tokens_total", COUNTER, "", "Drafts that were verified"),
    doc("vllm:spec_decode_num_accepted_tokens_total", COUNTER, "", "Those of them that were what was chosen"),
    doc(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        COUNTER,
        "position",
        "The same by place in a draft, from 0",
    ),
    doc("vllm:prefix_cache_queries_total", COUNTER, "", "Tokens looked up in the prefix cache"),
    doc("vllm:prefix_cache_hits_total", COUNTER, "", "Tokens found there"),
    doc("vllm:iteration_tokens_total", HISTOGRAM, "", "Tokens computed per step; count and sum only"),
    doc(
        "folio:kv_cache_blocks",
        GAUGE,
        "state; group where there are several",
        "Blocks that are free, cached (reusable content) or active",
    ),
    doc("folio:kv_cache_waste_ratio", GAUGE, "", "Share of the active blocks' slots that holds nothing yet"),
    doc(
        "folio:kv_cache_evictions_total",
        COUNTER,
        "group where there are several",
        "Cached blocks dropped to make room",
    ),
    doc(
        "folio:kv_cache_window_miss_tokens_total",
        COUNTER,
        "",
        "Prompt tokens in the cache that were computed again, because their sliding window was not",
    ),
    doc(
        "folio:kv_cache_byte_seconds",
        GAUGE,
        "state",
        "Bytes of cache times seconds since the start, active (held by sequences) or cached; only grows",
    ),
    doc("folio:recomputed_tokens_total", COUNTER, "", "Tokens computed again because of preemptions"),
    doc(
        "folio:swapped_bytes_total",
        COUNTER,
        "direction",
        "Bytes of cache copied to host memory (out) and back (in)",
    ),
    doc(
        "folio:swap_space_bytes",
        GAUGE,
        "state",
        "Host memory for copies of preempted sequences, free or used",
    ),
    doc(
        "vllm:external_prefix_cache_queries_total",
        COUNTER,
        "",
        "Prompt tokens that were not in the prefix cache on the device",
    ),
    doc(
        "vllm:external_prefix_cache_hits_total",
        COUNTER,
        "",
        "Of those, tokens that were loaded from a tier instead of computed",
    ),
    doc(
        "folio:tier_loads_total",
        COUNTER,
        "outcome",
        "Loads that a tier ended: loaded, or failed and computed instead",
    ),
    doc(
        "folio:tier_up",
        GAUGE,
        "tier",
        "1 while a tier stores what it is given, 0 when it was turned off by an error",
    ),
    doc("folio:tier_bytes", GAUGE, "tier, state", "Bytes that a tier takes (used), and may take (limit)"),
    doc("folio:tier_blocks", GAUGE, "tier", "Blocks that can be found in a tier"),
    doc(
        "folio:tier_blocks_total",
        COUNTER,
        "tier, event",
        "Blocks stored, loaded, evicted to make room, and dropped: too much to do, no room, too late",
    ),
    doc(
        "folio:tier_bytes_total",
        COUNTER,
        "tier, direction",
        "Bytes written to a tier (out) and read from it (in)",
    ),
    doc(
        "folio:tier_misses_total",
        COUNTER,
        "tier, reason",
        "Blocks that a tier should have had and that were not what they must be; each is forgotten",
    ),
    doc(
        "folio:kv_events_published_total",
        COUNTER,
        "event",
        "Blocks told to be stored and removed in KV events, and times that everything was told to be cleared",
    ),
    doc("folio:kv_events_messages_total", COUNTER, "", "Messages of KV events"),
    doc(
        "folio:kv_events_dropped_total",
        COUNTER,
        "",
        "Messages of KV events that subscribers were too late for, summed over all there were",
    ),
    doc(
        "folio:kv_events_lost_total",
        COUNTER,
        "",
        "Times that the publisher of KV events was too late for the engine and told everything anew",
    ),
    doc("folio:kv_events_replays_total", COUNTER, "", "Replays of KV events that were asked for"),
    doc(
        "folio:kv_events_refused_total",
        COUNTER,
        "",
        "Connections for KV events that were closed for what they said, or not let in",
    ),
    doc("folio:kv_events_subscribers", GAUGE, "", "Subscribers of KV events that are connected"),
    doc(
        "folio:kv_events_blocks",
        GAUGE,
        "medium",
        "Blocks that KV events told to be stored and not yet removed",
    ),
    doc("folio:queued_prompt_tokens", GAUGE, "", "Prompt tokens of requests not yet scheduled"),
    doc("folio:last_step_seconds", GAUGE, "", "Duration of the last step"),
    doc(
        "folio:executor_failures_total",
        COUNTER,
        "",
        "Steps that could not be computed; their requests ended with an error",
    ),
    doc("folio:steps_ahead_total", COUNTER, "", "Steps begun while the one before ran (on a GPU)"),
];

/// Every metric this server exports, for generated documentation.
pub fn documented() -> impl Iterator<Item = Documented> {
    SERVER.iter().chain(ENGINE).copied()
}
