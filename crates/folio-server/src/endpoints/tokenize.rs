//! `/tokenize` and `/detokenize`, vLLM's: text to ids and back, and nothing is generated.
//!
//! Must never: hold an answer. Eight megabytes of text are as many ids, and of ids a gigabyte of text: answers are written from
//! the ids while they are read ([`pieces`]), and the ids count among what is held for their tenant.

use std::fmt::Write;

use axum::extract::State;
use folio_text::{DetokenizeOptions, Detokenizer};
use serde_json::Value;

use crate::arrival::JsonRequest;
use crate::engine::Served;
use crate::generation::input::InputProcessor;
use crate::generation::prompt::render;
use crate::generation::tokenizing::{encode, encode_prompt};
use crate::http::Shared;
use crate::http::pieces;
use crate::http::reply::Reply;
use crate::load::Load;
use crate::tenancy::tenant::Tenant;
use folio_api::ApiError;
use folio_api::fields::Fields;
use folio_api::hints::{Api, Hints};
use folio_api::openai::chat;
use folio_api::openapi::tables::TOKENIZE;

/// `POST /tokenize`: a prompt, or messages through the chat template.
pub async fn tokenize(
    State(inputs): Shared<InputProcessor>,
    State(load): Shared<Load>,
    request: JsonRequest,
) -> Reply {
    let JsonRequest { tenant, body, held, .. } = request;
    let (shared, asker) = (inputs.clone(), tenant.clone());
    let read = load.off_thread(tenant.id, body.len(), move || tokenized(&shared, &asker, &body));
    let (tokens, strings) = read.await?;
    let mut of_ids = load.unread.hold(&tenant.gate);
    of_ids.grow(size_of_val(tokens.as_slice()))?;
    drop(held);
    let mut next = NextPart::Opening;
    Ok(pieces::json(move |out| {
        // Held until the last of them was written.
        let _ = &of_ids;
        next = match next {
            NextPart::Opening => {
                let (count, context) = (tokens.len(), inputs.served.model.context_length);
                let _ = write!(out, r#"{{"count":{count},"max_model_len":{context},"tokens":["#);
                NextPart::Ids(0)
            }
            NextPart::Ids(at) if at < tokens.len() => {
                out.push_str(if at > 0 { "," } else { "" });
                out.push_str(itoa::Buffer::new().format(tokens[at]));
                NextPart::Ids(at + 1)
            }
            NextPart::Ids(_) if strings => {
                out.push_str(r#"],"token_strs":["#);
                NextPart::Strings(0)
            }
            NextPart::Strings(at) if at < tokens.len() => {
                let text = Value::from(inputs.served.tokenizer.token_text(tokens[at]));
                let _ = write!(out, "{}{text}", if at > 0 { "," } else { "" });
                NextPart::Strings(at + 1)
            }
            NextPart::Ids(_) | NextPart::Strings(_) => {
                out.push_str("]}");
                NextPart::Over
            }
            NextPart::Over => return false,
        };
        true
    }))
}

/// What is written next.
#[derive(Clone, Copy)]
enum NextPart {
    Opening,
    Ids(usize),
    Strings(usize),
    Over,
}

/// The ids, and whether their texts are wanted too.
fn tokenized(inputs: &InputProcessor, tenant: &Tenant, body: &[u8]) -> Result<(Vec<u32>, bool), ApiError> {
    let mut fields = Fields::of_body(body)?;
    let mut hints = Hints::new(&inputs.served.context.hints, Api::Chat);
    inputs.served.adapter(inputs.served.context.adapter(&mut fields)?.as_deref(), &tenant.adapters)?;
    let special = fields.take::<bool>("add_special_tokens")?;
    let strings = fields.take("return_token_strs")?.unwrap_or(false);
    let prompt = fields.take::<String>("prompt")?;
    // Counting is what this is for, so a text longer than the context is no error here.
    let tokens = match prompt {
        Some(prompt) => {
            hints.close(fields, &TOKENIZE)?;
            encode(inputs, Some(tenant.id), &prompt, special.unwrap_or(true), true, "prompt")?
        }
        None => {
            let mut conversation = chat::conversation(&mut fields, &inputs.served.context, &mut hints)?.0;
            hints.close(fields, &TOKENIZE)?;
            encode_prompt(
                inputs,
                Some(tenant.id),
                &render(inputs, &mut conversation)?,
                special.unwrap_or(false),
                true,
                "messages",
            )?
        }
    };
    Ok((tokens, strings))
}

/// `POST /detokenize`
pub async fn detokenize(
    State(served): Shared<Served>,
    State(load): Shared<Load>,
    request: JsonRequest,
) -> Reply {
    let JsonRequest { tenant, body, held, .. } = request;
    let (shared, asker) = (served.clone(), tenant.clone());
    let read = load.off_thread(tenant.id, body.len(), move || detokenized(&shared, &asker, &body));
    let tokens = read.await?;
    let mut of_ids = load.unread.hold(&tenant.gate);
    of_ids.grow(size_of_val(tokens.as_slice()))?;
    drop(held);
    let options = DetokenizeOptions { skip_special_tokens: false, continues: false };
    let (mut detokenizer, mut text) = (Detokenizer::new(options), String::new());
    let mut at = None;
    Ok(pieces::json(move |out| {
        // Held until the last of them was written.
        let _ = &of_ids;
        let tokenizer = &served.tokenizer;
        text.clear();
        at = match at {
            None => {
                out.push_str(r#"{"prompt":""#);
                Some(0)
            }
            Some(next) if next < tokens.len() => {
                detokenizer.push(tokenizer, tokens[next], &mut text);
                escaped(&text, out);
                Some(next + 1)
            }
            Some(next) if next == tokens.len() => {
                detokenizer.finish(tokenizer, &mut text);
                escaped(&text, out);
                out.push_str(r#""}"#);
                Some(next + 1)
            }
            Some(_) => return false,
        };
        true
    }))
}

/// Text as part of a JSON string.
fn escaped(text: &str, out: &mut String) {
    let quoted = Value::from(text).to_string();
    out.push_str(&quoted[1..quoted.len() - 1]);
}

fn detokenized(served: &Served, tenant: &Tenant, body: &[u8]) -> Result<Vec<u32>, ApiError> {
    let mut fields = Fields::of_body(body)?;
    served.adapter(served.context.adapter(&mut fields)?.as_deref(), &tenant.adapters)?;
    let tokens: Vec<u32> = fields.require("tokens")?;
    fields.finish(&[])?;
    served.context.model.check_token_ids(&tokens, "tokens")?;
    Ok(tokens)
}
