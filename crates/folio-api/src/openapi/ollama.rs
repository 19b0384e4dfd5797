//! The requests and answers of Ollama's API.

use super::tables::{Api, Body, Field, ReplyKind};
use crate::refused;

const ASKING: &[Field] = &[
    ("model", "string"),
    ("options", "object"),
    ("format", "string | object"),
    ("think", "boolean | string"),
    ("stream", "boolean"),
    ("logprobs", "boolean"),
    ("top_logprobs", "integer 0"),
    ("truncate", "boolean"),
    ("shift", "boolean"),
];
const NAMED: &[Field] = &[("model", "string"), ("name", "string")];

pub const CHAT: Body = Body {
    name: "OllamaChatRequest",
    required: &[],
    fields: &[
        ASKING,
        &[
            ("messages", "array"),
            ("tools", "array"),
            ("tool_choice", "string | object"),
            ("parallel_tool_calls", "boolean"),
        ],
    ],
    refused: &[refused::OLLAMA],
    hints: Some(Api::Ollama),
    example: r#"{"messages": [{"role": "user", "content": "Hi"}], "options": {"num_predict": 4}, "stream": false}"#,
};
pub const GENERATE: Body = Body {
    name: "OllamaGenerateRequest",
    required: &[],
    fields: &[ASKING, &[("prompt", "string"), ("system", "string"), ("raw", "boolean")]],
    refused: &[refused::OLLAMA, refused::OLLAMA_GENERATE],
    hints: Some(Api::Ollama),
    example: r#"{"prompt": "Hi", "options": {"num_predict": 4}, "stream": false}"#,
};
pub const EMBED: Body = Body {
    name: "OllamaEmbedRequest",
    required: &["input"],
    fields: &[&[
        ("model", "string"),
        ("input", "string | array"),
        ("truncate", "boolean"),
        ("dimensions", "integer 1"),
        ("options", "object"),
    ]],
    refused: &[],
    hints: Some(Api::Ollama),
    example: r#"{"input": "Hi"}"#,
};
pub const EMBEDDINGS: Body = Body {
    name: "OllamaEmbeddingsRequest",
    required: &["prompt"],
    fields: &[&[("model", "string"), ("prompt", "string"), ("options", "object")]],
    refused: &[],
    hints: Some(Api::Ollama),
    example: r#"{"prompt": "Hi"}"#,
};
pub const SHOW: Body = Body {
    name: "OllamaShowRequest",
    required: &[],
    fields: &[NAMED, &[("verbose", "boolean")]],
    refused: &[refused::OLLAMA_SHOW],
    hints: None,
    example: "{}",
};
pub const PULL: Body = Body {
    name: "OllamaPullRequest",
    required: &[],
    fields: &[NAMED, &[("insecure", "boolean"), ("stream", "boolean")]],
    refused: &[],
    hints: None,
    example: "{}",
};

pub const ANSWER: ReplyKind =
    ReplyKind::Lines(&[("model", "string"), ("created_at", "string"), ("done", "boolean")]);
pub const VECTORS: ReplyKind = ReplyKind::Object(&[("model", "string"), ("embeddings", "array")], false);
pub const VECTOR: ReplyKind = ReplyKind::Object(&[("embedding", "array")], false);
pub const MODELS: ReplyKind = ReplyKind::Object(&[("models", "array")], false);
pub const SHOWN: ReplyKind = ReplyKind::Object(&[("details", "object"), ("model_info", "object")], false);
pub const PROGRESS: ReplyKind = ReplyKind::Lines(&[("status", "string")]);
