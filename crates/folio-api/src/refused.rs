//! Names that exist in other servers' APIs and are refused here, each with the reason that a client reads.

/// Parameters of OpenAI's, vLLM's and SGLang's APIs that this server refuses, with the reason a client reads.
pub const EVERYWHERE: &[(&str, &str)] = &[
    ("audio", "the model generates text only"),
    ("cache_salt", "cached prefixes are already separate for every API key"),
    ("chat_template", "templates come from the model; pass chat_template_kwargs to the model's own"),
    ("documents", "put documents into the messages"),
    ("ebnf", "use structured_outputs with grammar"),
    ("extra_key", "cached prefixes are already separate for every API key"),
    ("function_call", "use tools and tool_choice"),
    ("functions", "use tools and tool_choice"),
    ("guided_choice", "use structured_outputs"),
    ("guided_grammar", "use structured_outputs"),
    ("guided_json", "use structured_outputs"),
    ("guided_regex", "use structured_outputs"),
    ("json_schema", "use response_format or structured_outputs"),
    ("kv_transfer_params", "this server runs on one machine"),
    ("length_penalty", "it belongs to beam search, which is not available"),
    ("logit_processors", "code in requests is never run"),
    ("logits_processors", "code in requests is never run"),
    ("logprob_token_ids", "use logprobs with top_logprobs"),
    ("lora_path", "an adapter is asked for by its name, as 'model'"),
    ("media_io_kwargs", "the model takes text only"),
    ("mm_processor_kwargs", "the model takes text only"),
    ("moderation", "this server does not moderate"),
    ("prompt_cache_options", "prefixes are cached automatically; use cache"),
    ("prompt_embeds", "send text or token ids"),
    ("regex", "use structured_outputs"),
    ("return_prompt_text", "use return_token_ids, or echo with completions"),
    ("return_tokens_as_token_ids", "use return_token_ids"),
    ("session_id", "prefixes are found by content; no session is needed"),
    ("truncation_side", "truncate_prompt_tokens keeps the end of the prompt"),
    ("vllm_xargs", "no extra arguments are known"),
    ("web_search_options", "this server has no access to the web"),
];

/// Parameters that choose tokens elsewhere. An operator's flags never let them pass.
pub const OTHER_SAMPLERS: &[(&str, &str)] = &[
    ("adaptive_p", SAMPLER),
    ("do_sample", "use temperature; 0 always takes the most likely token"),
    ("dry_allowed_length", SAMPLER),
    ("dry_base", SAMPLER),
    ("dry_multiplier", SAMPLER),
    ("dry_sequence_breakers", SAMPLER),
    ("dynatemp_exponent", SAMPLER),
    ("dynatemp_range", SAMPLER),
    ("early_stopping", "it belongs to beam search, which is not available"),
    ("epsilon_cutoff", SAMPLER),
    ("eta_cutoff", SAMPLER),
    ("grammar", "use structured_outputs with grammar"),
    ("guidance_scale", SAMPLER),
    ("max_new_tokens", "use max_tokens"),
    ("min_new_tokens", "use min_tokens"),
    ("mirostat", SAMPLER),
    ("mirostat_eta", SAMPLER),
    ("mirostat_tau", SAMPLER),
    ("n_predict", "use max_tokens"),
    ("no_repeat_ngram_size", SAMPLER),
    ("num_beams", "beam search is not available"),
    ("penalty_alpha", SAMPLER),
    ("repeat_penalty", "use repetition_penalty"),
    ("samplers", SAMPLER),
    ("sampling_params", "give its fields beside the prompt"),
    ("smoothing_factor", SAMPLER),
    ("tfs_z", SAMPLER),
    ("top_a", SAMPLER),
    ("top_n_sigma", SAMPLER),
    ("typical_p", SAMPLER),
    ("xtc_probability", SAMPLER),
    ("xtc_threshold", SAMPLER),
];
pub(crate) const SAMPLER: &str = "this sampler is not available; use temperature, top_p, top_k or min_p";

const CHAT_ONLY: &str = "it belongs to chat completions";

/// Of completions, beside [`EVERYWHERE`].
pub const COMPLETIONS: &[(&str, &str)] = &[
    ("include_reasoning", CHAT_ONLY),
    ("parallel_tool_calls", CHAT_ONLY),
    ("reasoning_effort", CHAT_ONLY),
    ("suffix", "the model only continues text"),
    ("tool_choice", CHAT_ONLY),
    ("tools", CHAT_ONLY),
];

/// Of embeddings, beside [`EVERYWHERE`].
pub const EMBEDDINGS: &[(&str, &str)] = &[
    ("embed_dtype", "values are 32-bit floats"),
    ("endianness", "values are little-endian"),
    ("messages", "send texts or token ids as input"),
    ("normalize", "vectors are always normalized"),
    ("use_activation", "vectors are always normalized"),
];

/// Of Anthropic's API.
pub const MESSAGES: &[(&str, &str)] = &[
    ("container", "this server runs no code"),
    ("inference_geo", "this server is where it is"),
    ("mcp_servers", "this server connects to nothing; use tools"),
    ("user_profile_id", "use metadata.user_id"),
    ("workspace_id", "tenants are known by their API key"),
];

/// Of responses.
pub const RESPONSES: &[(&str, &str)] = &[
    ("context_management", "the conversation is used as it is sent"),
    ("conversation", "use previous_response_id, or send the items"),
    ("moderation", "this server does not moderate"),
    ("prompt", "prompt templates are not kept here; send the items"),
    ("prompt_cache_options", "prefixes are cached automatically; use cache"),
];

/// Of Ollama's API.
pub const OLLAMA: &[(&str, &str)] =
    &[("_debug_render_only", "POST /v1/chat/completions/render shows a prompt")];
/// Of its `/api/generate`.
pub const OLLAMA_GENERATE: &[(&str, &str)] = &[
    ("context", "ids of earlier turns are neither given nor taken; send the turns as messages to /api/chat"),
    ("height", "the model generates text only"),
    ("images", "the model takes text only"),
    ("steps", "the model generates text only"),
    ("suffix", "the model only continues text"),
    ("template", "templates come from the model; use raw for a prompt that is complete"),
    ("width", "the model generates text only"),
];
/// Of its `/api/show`.
pub const OLLAMA_SHOW: &[(&str, &str)] = &[
    ("options", "the model is shown as it is served"),
    ("system", "the model is shown as it is served"),
    ("template", "the model is shown as it is served"),
];

/// Of prefixes.
pub const PREFIXES: &[(&str, &str)] =
    &[("stream", "there is no output to stream"), ("max_tokens", "nothing is generated")];
/// Of batches.
pub const BATCHES: &[(&str, &str)] = &[("model", "each line says its model")];
