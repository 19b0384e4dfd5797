//! What there is: every route, and the fields of every JSON request.
//!
//! Ollama's are in `ollama`. Invariant: routes are those of `serve`, and fields those that the readers take; tests compare both (`openapi::tests` and
//! `tests/openapi.rs`), so this cannot be wrong for long.

use super::ollama;
use crate::refused;

/// Whose shape a request has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    Chat,
    Completions,
    Embeddings,
    Responses,
    Messages,
    Ollama,
}

impl Api {
    pub fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat completions",
            Self::Completions => "completions",
            Self::Embeddings => "embeddings",
            Self::Responses => "responses",
            Self::Messages => "messages",
            Self::Ollama => "Ollama's",
        }
    }
}

/// A field of a request: its name, and what it may be: a type with bounds (`number 0 2`), several joined by `|`, or a schema.
pub type Field = (&'static str, &'static str);

/// The fields of a JSON request.
pub struct Body {
    pub name: &'static str,
    pub required: &'static [&'static str],
    pub fields: &'static [&'static [Field]],
    /// Names that exist elsewhere, and why they are refused.
    pub refused: &'static [&'static [(&'static str, &'static str)]],
    /// Whose hints it may have.
    pub hints: Option<Api>,
    /// A request that is answered by any model.
    pub example: &'static str,
}

impl Body {
    /// Fields that are honoured.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.fields.iter().flat_map(|list| list.iter()).map(|(name, _)| *name)
    }

    /// Fields that are refused, and why.
    pub fn refusals(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        self.refused.iter().flat_map(|list| list.iter()).copied()
    }

    /// Both.
    pub fn known(&self) -> impl Iterator<Item = &'static str> {
        self.names().chain(self.refusals().map(|(name, _)| name))
    }
}

/// What a successful answer is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ReplyKind {
    /// An object with these members at least; with `true` also as events, where the request asks for a stream.
    Object(&'static [Field], bool),
    /// The same, as lines of JSON.
    Lines(&'static [Field]),
    List,
    /// Of this content type.
    Text(&'static str),
}

pub struct Route {
    pub method: &'static str,
    pub path: &'static str,
    pub about: &'static str,
    pub body: Option<&'static Body>,
    /// Parameters of the query.
    pub query: &'static [Field],
    pub reply: ReplyKind,
}

/// Open to whoever reaches the port: they tell nothing about anybody's requests.
pub const OPEN: &[&str] =
    &["/", "/health", "/livez", "/readyz", "/ping", "/metrics", "/openapi.json", "/version", "/api/version"];
const SAMPLING: &[Field] = &[
    ("temperature", "number 0 2"),
    ("top_p", "number 0 1"),
    ("top_k", "integer -1 4294967295"),
    ("stream", "boolean"),
];
const CACHE: &[Field] =
    &[("cache", "object"), ("prompt_cache_key", "string"), ("prompt_cache_retention", "string")];
const SPECULATION: &[Field] =
    &[("prediction", "object"), ("speculative.n_max", "integer 0 16"), ("speculative.type", "string")];
const GENERATION: &[Field] = &[
    ("model", "string"),
    ("n", "integer 1"),
    ("stop", "string | array"),
    ("seed", "integer"),
    ("min_p", "number 0 1"),
    ("presence_penalty", "number -2 2"),
    ("frequency_penalty", "number -2 2"),
    ("repetition_penalty", "number 0.01 10"),
    ("logit_bias", "object"),
    ("max_tokens", "integer 0 4294967295"),
    ("min_tokens", "integer 0 4294967295"),
    ("stop_token_ids", "array"),
    ("ignore_eos", "boolean"),
    ("include_stop_str_in_output", "boolean"),
    ("skip_special_tokens", "boolean"),
    ("spaces_between_special_tokens", "boolean"),
    ("allowed_token_ids", "array"),
    ("bad_words", "array"),
    ("thinking_token_budget", "integer 0 4294967295"),
    ("prompt_logprobs", "integer 0"),
    ("truncate_prompt_tokens", "integer -1"),
    ("add_special_tokens", "boolean"),
    ("priority", "integer"),
    ("request_id", "string"),
    ("return_token_ids", "boolean"),
    ("echo", "boolean"),
    ("stream_options", "object"),
    ("response_format", "object"),
    ("structured_outputs", "object"),
    ("user", "string"),
    ("safety_identifier", "string"),
    ("metadata", "object"),
    ("store", "boolean"),
    ("use_beam_search", "boolean"),
    ("service_tier", "string"),
    ("modalities", "array"),
];
const CONVERSATION: &[Field] = &[
    ("messages", "array"),
    ("tools", "array"),
    ("tool_choice", "string | object"),
    ("parallel_tool_calls", "boolean"),
    ("reasoning_effort", "string"),
    ("add_generation_prompt", "boolean"),
    ("continue_final_message", "boolean"),
    ("chat_template_kwargs", "object"),
];

pub const CHAT: Body = Body {
    name: "ChatRequest",
    required: &["messages"],
    fields: &[
        GENERATION,
        SPECULATION,
        SAMPLING,
        CACHE,
        CONVERSATION,
        &[
            ("logprobs", "boolean"),
            ("top_logprobs", "integer 0"),
            ("max_completion_tokens", "integer 1 4294967295"),
            ("include_reasoning", "boolean"),
            ("stop_everywhere", "boolean"),
        ],
    ],
    refused: &[refused::EVERYWHERE, refused::OTHER_SAMPLERS],
    hints: Some(Api::Chat),
    example: r#"{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}"#,
};
pub const COMPLETION: Body = Body {
    name: "CompletionRequest",
    required: &["prompt"],
    fields: &[
        GENERATION,
        SPECULATION,
        SAMPLING,
        CACHE,
        &[("prompt", "string | array"), ("logprobs", "integer 0"), ("best_of", "integer 1")],
    ],
    refused: &[refused::EVERYWHERE, refused::OTHER_SAMPLERS, refused::COMPLETIONS],
    hints: Some(Api::Completions),
    example: r#"{"prompt": "Hi", "max_tokens": 4}"#,
};
pub const EMBEDDING: Body = Body {
    name: "EmbeddingRequest",
    required: &["input"],
    fields: &[
        CACHE,
        &[
            ("model", "string"),
            ("input", "string | array"),
            ("encoding_format", "string"),
            ("dimensions", "integer 1"),
            ("user", "string"),
            ("truncate_prompt_tokens", "integer -1"),
            ("priority", "integer"),
            ("request_id", "string"),
            ("add_special_tokens", "boolean"),
        ],
    ],
    refused: &[refused::EMBEDDINGS, refused::EVERYWHERE],
    hints: Some(Api::Embeddings),
    example: r#"{"input": "Hi"}"#,
};
pub const RESPONSE: Body = Body {
    name: "ResponseRequest",
    required: &["input"],
    fields: &[
        SPECULATION,
        SAMPLING,
        CACHE,
        &[
            ("model", "string"),
            ("input", "string | array"),
            ("instructions", "string"),
            ("max_output_tokens", "integer 1 4294967295"),
            ("stop", "string | array"),
            ("text", "object"),
            ("reasoning", "object"),
            ("tools", "array"),
            ("tool_choice", "string | object"),
            ("parallel_tool_calls", "boolean"),
            ("store", "boolean"),
            ("background", "boolean"),
            ("previous_response_id", "string"),
            ("metadata", "object"),
            ("user", "string"),
            ("safety_identifier", "string"),
            ("service_tier", "string"),
            ("truncation", "string"),
            ("top_logprobs", "integer 0 0"),
            ("include", "array"),
            ("stream_options", "object"),
        ],
    ],
    refused: &[refused::RESPONSES],
    hints: Some(Api::Responses),
    example: r#"{"input": "Hi", "max_output_tokens": 4}"#,
};
const MESSAGES_PROMPT: &[Field] = &[
    ("model", "string"),
    ("messages", "array"),
    ("system", "string | array"),
    ("tools", "array"),
    ("tool_choice", "object"),
    ("thinking", "object"),
    ("output_config", "object"),
    ("cache_control", "object"),
    ("speed", "string"),
];
pub const MESSAGE: Body = Body {
    name: "MessageRequest",
    required: &["messages", "max_tokens"],
    fields: &[
        MESSAGES_PROMPT,
        SPECULATION,
        SAMPLING,
        &[
            ("max_tokens", "integer 0 4294967295"),
            ("stop_sequences", "array"),
            ("metadata", "object"),
            ("service_tier", "string"),
        ],
    ],
    refused: &[refused::MESSAGES],
    hints: Some(Api::Messages),
    example: r#"{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}"#,
};
pub const COUNT: Body = Body {
    name: "CountRequest",
    required: &["messages"],
    fields: &[MESSAGES_PROMPT],
    refused: &[refused::MESSAGES],
    hints: Some(Api::Messages),
    example: r#"{"messages": [{"role": "user", "content": "Hi"}]}"#,
};
pub const TOKENIZE: Body = Body {
    name: "TokenizeRequest",
    required: &[],
    fields: &[
        CONVERSATION,
        &[
            ("model", "string"),
            ("prompt", "string"),
            ("add_special_tokens", "boolean"),
            ("return_token_strs", "boolean"),
        ],
    ],
    refused: &[],
    hints: Some(Api::Chat),
    example: r#"{"messages": [{"role": "user", "content": "Hi"}]}"#,
};
pub const DETOKENIZE: Body = Body {
    name: "DetokenizeRequest",
    required: &["tokens"],
    fields: &[&[("model", "string"), ("tokens", "array")]],
    refused: &[],
    hints: None,
    example: r#"{"tokens": [1]}"#,
};

const KEEPING: &[Field] = &[("priority", "integer 0 100"), ("ttl", "integer 1 | string"), ("pin", "boolean")];

pub const PREFIX_REQUEST: Body = Body {
    name: "PrefixRequest",
    required: &[],
    fields: &[
        CONVERSATION,
        KEEPING,
        &[
            ("model", "string"),
            ("prompt", "string"),
            ("token_ids", "array"),
            ("add_special_tokens", "boolean"),
        ],
    ],
    refused: &[refused::PREFIXES],
    hints: Some(Api::Chat),
    example: r#"{"messages": [{"role": "user", "content": "Hi"}]}"#,
};
pub const PREFIX_CHANGE: Body = Body {
    name: "PrefixChange",
    required: &[],
    fields: &[KEEPING, &[("load", "boolean")]],
    refused: &[],
    hints: None,
    example: r#"{"pin": false}"#,
};
pub const BATCH_REQUEST: Body = Body {
    name: "BatchRequest",
    required: &["input_file_id", "endpoint", "completion_window"],
    fields: &[&[
        ("input_file_id", "string"),
        ("endpoint", "string"),
        ("completion_window", "string"),
        ("metadata", "object"),
        ("output_expires_after", "object"),
    ]],
    refused: &[refused::BATCHES],
    hints: None,
    example: r#"{"input_file_id": "file-0", "endpoint": "/v1/completions", "completion_window": "24h"}"#,
};
/// Every JSON request.
pub const BODIES: &[Body] = &[
    CHAT,
    COMPLETION,
    EMBEDDING,
    RESPONSE,
    MESSAGE,
    COUNT,
    TOKENIZE,
    DETOKENIZE,
    PREFIX_REQUEST,
    PREFIX_CHANGE,
    BATCH_REQUEST,
    ollama::CHAT,
    ollama::GENERATE,
    ollama::EMBED,
    ollama::EMBEDDINGS,
    ollama::SHOW,
    ollama::PULL,
];
/// The parts of an uploaded form; `file` is a file.
pub const UPLOAD: &[Field] = &[
    ("file", "string"),
    ("purpose", "string"),
    ("expires_after[anchor]", "string"),
    ("expires_after[seconds]", "integer"),
];

const CHOICES: &[Field] = &[
    ("id", "string"),
    ("object", "string"),
    ("created", "integer"),
    ("model", "string"),
    ("choices", "array"),
    ("usage", "object"),
];
const RESPONSE_OBJECT: &[Field] = &[
    ("id", "string"),
    ("object", "string"),
    ("created_at", "integer"),
    ("status", "string"),
    ("output", "array"),
    ("model", "string"),
];
const MESSAGE_OBJECT: &[Field] = &[
    ("id", "string"),
    ("type", "string"),
    ("role", "string"),
    ("content", "array"),
    ("stop_reason", "string"),
    ("usage", "object"),
];
const RENDERED: &[Field] = &[("request_id", "string"), ("model", "string"), ("token_ids", "array")];
const PREFIX: &[Field] = &[("id", "string"), ("object", "string"), ("tokens", "integer")];
const LISTED: ReplyKind = ReplyKind::Object(&[("data", "array")], false);
const DELETED: ReplyKind = ReplyKind::Object(&[("id", "string"), ("deleted", "boolean")], false);
const FILE: ReplyKind =
    ReplyKind::Object(&[("id", "string"), ("object", "string"), ("bytes", "integer")], false);
const BATCH: ReplyKind =
    ReplyKind::Object(&[("id", "string"), ("object", "string"), ("status", "string")], false);
const WHY: ReplyKind = ReplyKind::Object(&[("object", "string")], false);
const STATUS: ReplyKind = ReplyKind::Object(&[("status", "string")], false);

const fn get(path: &'static str, about: &'static str, reply: ReplyKind) -> Route {
    Route { method: "get", path, about, body: None, query: &[], reply }
}
const fn post(
    path: &'static str,
    about: &'static str,
    body: Option<&'static Body>,
    reply: ReplyKind,
) -> Route {
    Route { method: "post", path, about, body, query: &[], reply }
}
const fn delete(path: &'static str, about: &'static str) -> Route {
    Route { method: "delete", path, about, body: None, query: &[], reply: DELETED }
}

pub const ROUTES: &[Route] = &[
    post(
        "/v1/chat/completions",
        "An answer to a conversation",
        Some(&CHAT),
        ReplyKind::Object(CHOICES, true),
    ),
    post("/v1/completions", "A text that goes on", Some(&COMPLETION), ReplyKind::Object(CHOICES, true)),
    post(
        "/v1/embeddings",
        "A vector for each input",
        Some(&EMBEDDING),
        ReplyKind::Object(
            &[("object", "string"), ("data", "array"), ("model", "string"), ("usage", "object")],
            false,
        ),
    ),
    post("/v1/responses", "An answer, kept", Some(&RESPONSE), ReplyKind::Object(RESPONSE_OBJECT, true)),
    Route {
        query: &[("stream", "boolean"), ("starting_after", "integer 0")],
        ..get("/v1/responses/{id}", "A response that was kept", ReplyKind::Object(RESPONSE_OBJECT, true))
    },
    Route {
        query: &[("limit", "integer 1 100"), ("after", "string"), ("order", "string")],
        ..get("/v1/responses/{id}/input_items", "The items that a kept response was asked with", LISTED)
    },
    delete("/v1/responses/{id}", "Forgets a response"),
    post(
        "/v1/responses/{id}/cancel",
        "Ends a response in the background",
        None,
        ReplyKind::Object(RESPONSE_OBJECT, false),
    ),
    post("/v1/messages", "Anthropic's: an answer", Some(&MESSAGE), ReplyKind::Object(MESSAGE_OBJECT, true)),
    post(
        "/v1/messages/count_tokens",
        "Anthropic's: tokens of a prompt",
        Some(&COUNT),
        ReplyKind::Object(&[("input_tokens", "integer")], false),
    ),
    post(
        "/v1/chat/completions/render",
        "The request as token ids, not run",
        Some(&CHAT),
        ReplyKind::Object(RENDERED, false),
    ),
    post("/v1/completions/render", "The request as token ids, not run", Some(&COMPLETION), ReplyKind::List),
    post(
        "/tokenize",
        "A prompt, or messages, as token ids",
        Some(&TOKENIZE),
        ReplyKind::Object(&[("count", "integer"), ("tokens", "array"), ("max_model_len", "integer")], false),
    ),
    post(
        "/detokenize",
        "The text of token ids",
        Some(&DETOKENIZE),
        ReplyKind::Object(&[("prompt", "string")], false),
    ),
    get("/v1/models", "The served model", LISTED),
    get("/v1/models/{name}", "The served model, by a name", ReplyKind::Object(&[("id", "string")], false)),
    get("/v1/cache/prefixes", "Prefixes kept by name", LISTED),
    post(
        "/v1/cache/prefixes",
        "Computes and keeps a prefix",
        Some(&PREFIX_REQUEST),
        ReplyKind::Object(PREFIX, false),
    ),
    get("/v1/cache/prefixes/{id}", "A prefix that is kept", ReplyKind::Object(PREFIX, false)),
    post(
        "/v1/cache/prefixes/{id}",
        "Changes how a prefix is kept",
        Some(&PREFIX_CHANGE),
        ReplyKind::Object(PREFIX, false),
    ),
    delete("/v1/cache/prefixes/{id}", "Unpins and drops a prefix"),
    get("/v1/cache/keys", "Hits by prompt_cache_key", LISTED),
    get("/v1/files", "Files of batches", LISTED),
    post("/v1/files", "Uploads a file (multipart/form-data)", None, FILE),
    get("/v1/files/{id}", "A file", FILE),
    delete("/v1/files/{id}", "Deletes a file"),
    get("/v1/files/{id}/content", "The content of a file", ReplyKind::Text("application/octet-stream")),
    get("/v1/batches", "Batches", LISTED),
    post("/v1/batches", "Runs a file of requests", Some(&BATCH_REQUEST), BATCH),
    get("/v1/batches/{id}", "A batch", BATCH),
    post("/v1/batches/{id}/cancel", "Ends a batch", None, BATCH),
    get("/load", "Generations in flight", ReplyKind::Object(&[("server_load", "integer")], false)),
    get("/v1/loads", "Figures of the engine", ReplyKind::Object(&[("loads", "array")], false)),
    get("/v1/usage", "What the asking tenant used", ReplyKind::Object(&[("requests", "integer")], false)),
    Route {
        query: &[
            ("start_time", "integer 0"),
            ("end_time", "integer 0"),
            ("bucket_width", "string"),
            ("group_by", "string"),
            ("format", "string"),
        ],
        ..get("/v1/usage/records", "Usage by time, key and model", LISTED)
    },
    Route {
        query: &[("request", "string")],
        ..get(
            "/v1/why",
            "Why serving is as fast as it is and what it costs; or why one request took what it took",
            WHY,
        )
    },
    get(
        "/v1/why/live",
        "The figures of the page as they come, for operators; it goes on until its reader leaves",
        ReplyKind::Text("text/event-stream; charset=utf-8"),
    ),
    Route {
        query: &[("seconds", "integer")],
        ..get(
            "/v1/trace",
            "The traffic of the next seconds without its texts, for Perfetto and `folio trace replay`; for operators",
            ReplyKind::Object(&[("traceEvents", "array")], false),
        )
    },
    post("/api/chat", "Ollama's: an answer to a conversation", Some(&ollama::CHAT), ollama::ANSWER),
    post("/api/generate", "Ollama's: an answer to a text", Some(&ollama::GENERATE), ollama::ANSWER),
    post("/api/embed", "Ollama's: a vector for each input", Some(&ollama::EMBED), ollama::VECTORS),
    post("/api/embeddings", "Ollama's older: a vector", Some(&ollama::EMBEDDINGS), ollama::VECTOR),
    get("/api/tags", "Ollama's: the served model", ollama::MODELS),
    get("/api/ps", "Ollama's: the served model, as it is loaded", ollama::MODELS),
    post("/api/show", "Ollama's: what the served model is and can do", Some(&ollama::SHOW), ollama::SHOWN),
    post("/api/pull", "Ollama's: whether a model is here", Some(&ollama::PULL), ollama::PROGRESS),
    Route { reply: STATUS, ..delete("/api/delete", "Ollama's: refused, with what to do instead") },
    get("/api/version", "The version of Ollama's API", ReplyKind::Object(&[("version", "string")], false)),
    get("/health", "Whether work goes on", STATUS),
    get("/livez", "Whether the process answers", STATUS),
    get("/readyz", "Whether requests should be sent here", STATUS),
    get("/ping", "Whether work goes on", STATUS),
    post("/ping", "Whether work goes on", None, STATUS),
    get("/metrics", "Prometheus' page", ReplyKind::Text("text/plain; version=0.0.4; charset=utf-8")),
    get("/version", "The server's version", ReplyKind::Object(&[("version", "string")], false)),
    get("/", "The live page, or for a terminal what there is", ReplyKind::Text("text/plain; charset=utf-8")),
    get(
        "/openapi.json",
        "This document",
        ReplyKind::Object(&[("openapi", "string"), ("paths", "object")], false),
    ),
];
