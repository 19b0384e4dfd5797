//! `/v1/cache/prefixes`: compute a prefix before it is needed, keep it by name, pin it, list and drop it.
//!
//! Invariants: a tenant reaches its own prefixes (with an operator's sharing group: the group's) and nothing else; another's
//! id is answered like one that never existed, byte for byte. The engine is never waited for on its thread: a command is
//! posted and its reply comes through a channel.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::State;
use axum::http::Response;
use folio_engine::handle::Rejected;
use folio_engine::request::{EventSink, RetentionRange};
use folio_engine::{CacheCommand, CacheResponse, Event, FinishReason, Request, SamplingParams};
use folio_kv::{BlockHashes, KeepRefused, PrefixId, PrefixInfo, Retention, TenantId, TierId};
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};

use crate::arrival::{Id, JsonRequest};
use crate::engine::{self, Served};
use crate::generation::Generator;
use crate::generation::input::InputProcessor;
use crate::generation::prompt::render;
use crate::generation::retention::{refused, retention};
use crate::generation::run::refusal;
use crate::generation::tokenizing::{encode, encode_prompt};
use crate::http::Shared;
use crate::http::reply::{Reply, json_response};
use crate::http::stream::Abort;
use crate::load::Load;
use crate::tenancy::Tenancy;
use crate::tenancy::declared::DeclaredPrefix;
use crate::tenancy::gate::{AdmittedRequest, Need, Permit};
use crate::tenancy::tenant::Tenant;
use folio_api::cache::RetentionOptions;
use folio_api::fields::Fields;
use folio_api::hints::{Api, Hints};
use folio_api::openai::chat;
use folio_api::openapi::tables::PREFIX_REQUEST;
use folio_api::{ApiError, unix_s};

/// A prefix that is gone before it could be recorded is computed again so often.
const ATTEMPTS: u32 = 3;

/// A prefix to be made.
struct Wanted {
    tokens: Arc<[u32]>,
    keep: RetentionOptions,
    /// The field the prefix came from.
    field: &'static str,
}

/// What computing it took.
#[derive(Default)]
struct Computed {
    cached_tokens: u32,
    kept: Option<Result<PrefixInfo, KeepRefused>>,
}

/// `POST /v1/cache/prefixes`
pub async fn create(State(generator): Shared<Generator>, request: JsonRequest) -> Reply {
    let Generator { served, load, tenancy, .. } = &*generator;
    let _counted = load.in_flight.enter();
    let JsonRequest { tenant, body, mut held, entry, .. } = request;
    let inputs = generator.inputs.clone();
    let asker = tenant.clone();
    let wanted = load.off_thread(tenant.id, body.len(), move || read(&inputs, &asker, &body)).await?;
    held.grow(size_of_val(&*wanted.tokens)).inspect_err(|_| entry.give_back())?;
    let root = tenancy.root(&tenant, None);
    let mut first = None;
    for _ in 0..ATTEMPTS {
        let computed = compute(&generator, &tenant, &entry, &wanted).await?;
        let cached_tokens = *first.get_or_insert(computed.cached_tokens);
        let kept = match computed.kept {
            Some(kept) => kept,
            None => {
                let asked = vec![(root, wanted.tokens.clone())];
                let hashes = engine::hashes(served, tenant.id, asked).await.remove(0);
                let (tokens, retention) = (wanted.tokens.len() as u32, retention(&wanted.keep));
                match command(
                    served,
                    CacheCommand::Keep { hashes: Box::new(hashes), tokens, retention, pin: false },
                )
                .await?
                {
                    CacheResponse::Prefix(prefix) => Ok(prefix),
                    CacheResponse::Refused(refused) => Err(refused),
                    _ => return Err(unexpected().into()),
                }
            }
        };
        match kept {
            Ok(prefix) => {
                tenancy.prefix_texts.keep(tenant.cache, prefix.id, wanted.tokens.clone());
                let mut answer = describe(served, &prefix);
                answer["usage"] = usage(wanted.tokens.len(), cached_tokens);
                return Ok(json_response(answer.to_string()));
            }
            Err(KeepRefused::NotCached { .. }) => {}
            Err(reason) => return Err(refused(&reason, "pin", wanted.field).into()),
        }
    }
    let message = "The prefix was evicted before it could be kept; the cache is under pressure. Try again, or with \"pin\".";
    Err(ApiError { code: Some("cache_busy"), ..ApiError::busy(message, 2) }.into())
}

fn read(inputs: &InputProcessor, tenant: &Tenant, body: &[u8]) -> Result<Wanted, ApiError> {
    let mut fields = Fields::of_body(body)?;
    if let Some(name) = inputs.served.context.adapter(&mut fields)? {
        inputs.served.adapter(Some(&name), &tenant.adapters)?;
        return Err(ApiError::invalid("model", "Prefixes of adapters are not kept by name."));
    }
    let keep = RetentionOptions::read(&mut fields)?;
    let mut hints = Hints::new(&inputs.served.context.hints, Api::Chat);
    let (tokens, field) = tokens(inputs, Some(tenant.id), &mut fields, &mut hints)?;
    hints.close(fields, &PREFIX_REQUEST)?;
    Ok(Wanted { tokens: tokens.into(), keep, field })
}

/// Takes `prompt`, `token_ids` or `messages` and what belongs to them: the tokens, and the field they came from.
fn tokens(
    inputs: &InputProcessor,
    tenant: Option<TenantId>,
    fields: &mut Fields<'_>,
    hints: &mut Hints<'_>,
) -> Result<(Vec<u32>, &'static str), ApiError> {
    let facts = &inputs.served.model;
    let special = fields.take::<bool>("add_special_tokens")?;
    let text = fields.take::<String>("prompt")?;
    let ids = fields.take::<Vec<u32>>("token_ids")?;
    let (tokens, field) = match (text, ids) {
        (Some(_), Some(_)) => {
            return Err(ApiError::invalid("token_ids", "Give 'prompt' or 'token_ids', not both."));
        }
        (Some(text), None) => {
            (encode(inputs, tenant, &text, special.unwrap_or(true), false, "prompt")?, "prompt")
        }
        (None, Some(ids)) => {
            inputs.served.context.model.check_token_ids(&ids, "token_ids")?;
            (ids, "token_ids")
        }
        (None, None) => {
            let opened = fields.take::<bool>("add_generation_prompt")?;
            let mut conversation = chat::conversation(fields, &inputs.served.context, hints)?.0;
            // A prefix ends where the next message begins, unless it is said otherwise.
            conversation.add_generation_prompt = opened.unwrap_or(false);
            let prompt = render(inputs, &mut conversation)?;
            (encode_prompt(inputs, tenant, &prompt, special.unwrap_or(false), false, "messages")?, "messages")
        }
    };
    if tokens.is_empty() {
        return Err(ApiError::invalid(field, format!("'{field}' has no tokens.")));
    }
    if tokens.len() > facts.context_length as usize {
        let error = ApiError::context_length(facts.context_length, tokens.len(), 0);
        return Err(ApiError { param: Some(field.to_owned()), ..error });
    }
    Ok((tokens, field))
}

/// As the body of `POST /v1/cache/prefixes`, with a name.
pub(crate) fn declared(inputs: &InputProcessor, prefix: &DeclaredPrefix) -> Result<Vec<u32>, ApiError> {
    let mut fields = Fields::of_body(prefix.body.as_bytes())?;
    fields.take::<String>("name")?;
    let mut hints = Hints::new(&inputs.served.context.hints, Api::Chat);
    let (tokens, _) = tokens(inputs, None, &mut fields, &mut hints)?;
    fields.finish(&[("cache", "the operator's prefixes are pinned")])?;
    Ok(tokens)
}

/// Runs the prompt through the engine without generating anything. Dropping it cancels.
async fn compute(
    generator: &Generator,
    tenant: &Tenant,
    entry: &Arc<AdmittedRequest>,
    wanted: &Wanted,
) -> Result<Computed, ApiError> {
    let ticket = entry.reserve(need(wanted.tokens.len()), Instant::now())?;
    let Retention { priority, ttl_us } = retention(&wanted.keep);
    let tokens = 0..wanted.tokens.len() as u32;
    let range = RetentionRange { tokens, priority, ttl_us, pin: wanted.keep.pin.unwrap_or(false) };
    run(generator, tenant, ticket, request(generator, tenant, &wanted.tokens, range)).await
}

fn need(prompt_tokens: usize) -> Need {
    Need { prompts: 1, prompt_tokens: prompt_tokens as u64, output_tokens: 0 }
}

/// One that generates nothing.
fn request(generator: &Generator, tenant: &Tenant, tokens: &Arc<[u32]>, range: RetentionRange) -> Request {
    let Generator { served, tenancy, load, .. } = generator;
    let (id, root) = (served.engine.next_request_id(), tenancy.root(tenant, None));
    Request {
        class: tenant.class,
        deadline: served.deadline(load.limits.request_timeout),
        retention: vec![range],
        ..Request::new(id, tenant.id, root, tokens.clone(), SamplingParams::greedy(0))
    }
}

/// The engine's refusal of a request that was let in.
fn refused_by(generator: &Generator, ticket: Permit, rejected: Rejected) -> ApiError {
    ticket.refused();
    generator.observability.metrics.rejected(&rejected);
    refusal(rejected)
}

async fn run(
    generator: &Generator,
    tenant: &Tenant,
    mut ticket: Permit,
    request: Request,
) -> Result<Computed, ApiError> {
    let Generator { served, observability, .. } = generator;
    let prompt_tokens = request.prompt.len() as u64;
    let (sender, mut events) = mpsc::unbounded_channel();
    let sink: Box<dyn EventSink> = Box::new(move |event: Event| sender.send(event).is_ok());
    let flag = match engine::submit(served, request, sink).await {
        Ok(flag) => flag,
        Err(rejected) => return Err(refused_by(generator, ticket, rejected)),
    };
    let meter = observability.meters.of(tenant);
    meter.request();
    let abort = Abort::new(vec![flag]);
    let guard = abort.guard();
    let mut computed = Computed::default();
    loop {
        match events.recv().await {
            Some(Event::Prompt { cached_tokens, us, cached_us, kept, .. }) => {
                ticket.started();
                observability.metrics.prompt(prompt_tokens, u64::from(cached_tokens));
                meter.prompt(prompt_tokens, u64::from(cached_tokens));
                observability.why.prefix(tenant, prompt_tokens, cached_tokens.into(), (us, cached_us));
                computed = Computed { cached_tokens, kept: kept.map(|kept| *kept) };
            }
            Some(Event::Token { .. } | Event::Pooled { .. }) => {}
            Some(Event::Finished { reason, error, .. }) => {
                abort.finished();
                drop(guard);
                if reason == FinishReason::Length || reason == FinishReason::Stop {
                    ticket.settle(prompt_tokens);
                }
                return match reason {
                    FinishReason::Stop | FinishReason::Length => Ok(computed),
                    FinishReason::Deadline => Err(ApiError::deadline()),
                    FinishReason::Cancelled | FinishReason::Error => {
                        Err(ApiError::internal(error.as_deref().unwrap_or("the prefix was not computed")))
                    }
                };
            }
            None => return Err(ApiError::internal("the engine stopped before the prefix was computed")),
        }
    }
}

/// `GET /v1/cache/prefixes`
pub async fn list(State(served): Shared<Served>, tenant: Tenant) -> Reply {
    let tenant = tenant.cache;
    match command(&served, CacheCommand::List { tenant }).await? {
        CacheResponse::Prefixes(list) => {
            let data: Vec<Value> = list.iter().map(|prefix| describe(&served, prefix)).collect();
            Ok(json_response(json!({"object": "list", "data": data}).to_string()))
        }
        _ => Err(unexpected().into()),
    }
}

/// `GET /v1/cache/prefixes/{id}`
pub async fn show(State(served): Shared<Served>, tenant: Tenant, Id(id): Id) -> Reply {
    let (tenant, id) = (tenant.cache, parse(&id)?);
    let prefix = prefix(command(&served, CacheCommand::Show { tenant, id }).await?)?;
    Ok(json_response(describe(&served, &prefix).to_string()))
}

/// `POST /v1/cache/prefixes/{id}`: pin, unpin, another priority or time to live; what is not given stays. With `load` what tiers have of
/// it is brought to the device before.
pub async fn change(State(generator): Shared<Generator>, Id(id): Id, request: JsonRequest) -> Reply {
    let Generator { served, load, .. } = &*generator;
    let _counted = load.in_flight.enter();
    let JsonRequest { tenant: asking, body, held: _held, entry, .. } = request;
    let (tenant, id, bytes) = (asking.cache, parse(&id)?, body.len());
    let read = move || {
        let mut fields = Fields::of_body(&body)?;
        let keep = RetentionOptions::read(&mut fields)?;
        let load = fields.take::<bool>("load")?.unwrap_or(false);
        fields.finish(&[])?;
        Ok((keep, load))
    };
    let (keep, loads) = load.off_thread(asking.id, bytes, read).await?;
    let CacheResponse::Prefix(now) = command(served, CacheCommand::Show { tenant, id }).await? else {
        return Err(missing().into());
    };
    let loaded = if loads { Some(load_prefix(&generator, &asking, &entry, &now).await?) } else { None };
    let wanted = match loads && keep == RetentionOptions::default() {
        // Whatever came: only of what is whole more can be said.
        true => CacheCommand::Show { tenant, id },
        false => CacheCommand::Change {
            tenant,
            id,
            retention: Retention {
                priority: keep.priority.unwrap_or(now.retention.priority),
                ttl_us: keep.ttl_us.or(now.retention.ttl_us),
            },
            pin: keep.pin.unwrap_or(now.pinned),
        },
    };
    let prefix = prefix(command(served, wanted).await?)?;
    let mut answer = describe(served, &prefix);
    if let Some(Loaded { found, usage }) = loaded {
        answer["found"] = found;
        answer["usage"] = usage;
    }
    Ok(json_response(answer.to_string()))
}

/// What a load ahead came to.
struct Loaded {
    /// Tokens by where they were: `device`, and the names of tiers.
    found: Value,
    usage: Value,
}

/// Brings what tiers have of a prefix behind what the device has to the device: as the prompt of a request that ends there and generates
/// nothing, so it is admitted, charged and loaded like any other, and what does not come is computed.
async fn load_prefix(
    generator: &Generator,
    tenant: &Tenant,
    entry: &Arc<AdmittedRequest>,
    prefix: &PrefixInfo,
) -> Result<Loaded, ApiError> {
    let Generator { served, tenancy, load, .. } = generator;
    let text = tenancy.prefix_texts.get(tenant.cache, prefix.id).ok_or_else(no_text)?;
    let mut held = load.unread.hold(&tenant.gate);
    held.grow(size_of_val(&*text)).inspect_err(|_| entry.give_back())?;
    // The row behind what is loaded is computed.
    let text = beginning(load, tenant, text, prefix.tokens as usize + 1).await?;
    let ticket = entry.reserve(need(text.len()), Instant::now())?;
    let Retention { priority, ttl_us } = prefix.retention;
    let asked = |tokens: &Arc<[u32]>| {
        let range = RetentionRange { tokens: 0..tokens.len() as u32, priority, ttl_us, pin: false };
        request(generator, tenant, tokens, range)
    };
    let whole = asked(&text);
    // Nothing is hashed of what is refused.
    if let Err(rejected) = served.engine.check(&whole) {
        return Err(refused_by(generator, ticket, rejected));
    }
    let prompts = vec![(whole.root, text.clone())];
    let hashes = engine::hashes(served, tenant.id, prompts).await.remove(0);
    let names: Vec<&'static str> = served.engine.tier_stats().iter().map(|tier| tier.name).collect();
    let found = in_tiers(&hashes, prefix, names.len());
    let in_tiers: u32 = found.iter().sum();
    let named = names.iter().zip(&found).map(|(name, tokens)| ((*name).to_owned(), json!(tokens)));
    let device = ("device".to_owned(), json!(prefix.cached_tokens));
    let found = Value::Object(std::iter::once(device).chain(named).collect());
    if in_tiers == 0 {
        ticket.settle(0);
        return Ok(Loaded { found, usage: usage(0, 0) });
    }
    let end = (prefix.cached_tokens + in_tiers) as usize + 1;
    let text = beginning(load, tenant, text, end).await?;
    let computed = run(generator, tenant, ticket, asked(&text)).await?;
    Ok(Loaded { found, usage: usage(text.len(), computed.cached_tokens) })
}

/// The first tokens of a text, copied off the event loop where it has more.
async fn beginning(
    load: &Load,
    tenant: &Tenant,
    text: Arc<[u32]>,
    tokens: usize,
) -> Result<Arc<[u32]>, ApiError> {
    if text.len() <= tokens {
        return Ok(text);
    }
    load.off_thread(tenant.id, tokens * size_of::<u32>(), move || Ok(text[..tokens].into())).await
}

/// Tokens of a prefix that each tier has behind what the device has, or what nearer ones have.
fn in_tiers(hashes: &BlockHashes, prefix: &PrefixInfo, tiers: usize) -> Vec<u32> {
    let size = hashes.block_tokens();
    let (mut at, blocks) = (prefix.cached_tokens / size, prefix.tokens / size);
    let mut found = vec![0; tiers];
    let next = |at| {
        let has = |tier: usize| Some((tier, hashes.stored_from(TierId(tier as u8), at)?));
        (0..tiers).find_map(has)
    };
    while let Some((tier, end)) = next(at).filter(|_| at < blocks) {
        let end = end.min(blocks);
        found[tier] += (end - at) * size;
        at = end;
    }
    found
}

fn usage(prompt_tokens: usize, cached_tokens: u32) -> Value {
    let details = json!({"cached_tokens": cached_tokens});
    json!({"prompt_tokens": prompt_tokens, "prompt_tokens_details": details})
}

/// `DELETE /v1/cache/prefixes/{id}`
pub async fn delete(
    State(served): Shared<Served>,
    State(tenancy): Shared<Tenancy>,
    tenant: Tenant,
    Id(name): Id,
) -> Reply {
    let (tenant, id) = (tenant.cache, parse(&name)?);
    tenancy.prefix_texts.forget_one(tenant, id);
    match command(&served, CacheCommand::Drop { tenant, id }).await? {
        CacheResponse::Dropped { tokens } => {
            let answer =
                json!({"id": name, "object": "cache.prefix", "deleted": true, "dropped_tokens": tokens});
            Ok(json_response(answer.to_string()))
        }
        CacheResponse::Missing => Err(missing().into()),
        _ => Err(unexpected().into()),
    }
}

/// `GET /v1/cache/keys`
pub async fn keys(State(tenancy): Shared<Tenancy>, tenant: Tenant) -> Response<Body> {
    json_response(tenancy.cache_keys.list(tenant.id).to_string())
}

pub(crate) async fn command(served: &Served, command: CacheCommand) -> Result<CacheResponse, ApiError> {
    let (sender, answer) = oneshot::channel();
    let reply = Box::new(move |answer| {
        // A client that left needs no answer.
        let _ = sender.send(answer);
    });
    served.engine.command(command, reply).map_err(refusal)?;
    answer.await.map_err(|_| ApiError::unavailable("the engine has ended", 30))
}

fn prefix(answer: CacheResponse) -> Result<PrefixInfo, ApiError> {
    match answer {
        CacheResponse::Prefix(prefix) => Ok(prefix),
        CacheResponse::Refused(reason) => Err(refused(&reason, "pin", "id")),
        CacheResponse::Missing => Err(missing()),
        _ => Err(unexpected()),
    }
}

fn describe(served: &Served, prefix: &PrefixInfo) -> Value {
    let now = served.engine.now().0;
    let seconds = |us: u64| us / 1_000_000;
    json!({
        "id": name(prefix.id), "object": "cache.prefix",
        "created": unix_s().saturating_sub(seconds(now.saturating_sub(prefix.created_us))),
        "tokens": prefix.tokens, "cached_tokens": prefix.cached_tokens, "pinned": prefix.pinned,
        "priority": prefix.retention.priority, "ttl": prefix.retention.ttl_us.map(seconds),
        "expires_in": prefix.expires_us.map(|at| seconds(at.saturating_sub(now))),
    })
}

fn name(id: PrefixId) -> String {
    format!("pfx_{:032x}", u128::from_be_bytes(id.0))
}

/// An id that cannot be one is as missing as any other.
fn parse(name: &str) -> Result<PrefixId, ApiError> {
    let digits =
        name.strip_prefix("pfx_").filter(|d| d.len() == 32 && d.bytes().all(|b| b.is_ascii_hexdigit()));
    let number = digits.and_then(|digits| u128::from_str_radix(digits, 16).ok());
    number.map(|number| PrefixId(number.to_be_bytes())).ok_or_else(missing)
}

fn missing() -> ApiError {
    ApiError {
        code: Some("prefix_not_found"),
        param: Some("id".into()),
        ..ApiError::new(404, "invalid_request_error", "There is no such prefix.")
    }
}

fn no_text() -> ApiError {
    let message = "The text of this prefix is not known here (any more): it was pinned by a request, or others were used since. Send it to POST /v1/cache/prefixes, which loads what tiers have of it, too.";
    ApiError {
        code: Some("no_text"),
        param: Some("load".into()),
        ..ApiError::new(409, "invalid_request_error", message)
    }
}

fn unexpected() -> ApiError {
    ApiError::internal("the engine gave an answer to another question")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        let id = PrefixId(std::array::from_fn(|i| 0x0f + i as u8));
        assert_eq!(parse(&name(id)).unwrap(), id);
        for bad in
            ["", "pfx_", "pfx_0", "pfx_+f101112131415161718191a1b1c1d1e", "0f101112131415161718191a1b1c1d1e"]
        {
            assert_eq!(parse(bad).unwrap_err(), missing(), "{bad}");
        }
    }
}
