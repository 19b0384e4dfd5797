//! Every route, of both listeners.

use axum::Router;
use axum::extract::State;
use axum::middleware::from_fn_with_state;
use axum::routing::{delete, get, post};

use crate::admin;
use crate::admin::{kv_events, records};
use crate::app;
use crate::arrival::{JsonRequest, around};
use crate::endpoints::anthropic;
use crate::endpoints::batches as files;
use crate::endpoints::live;
use crate::endpoints::ollama;
use crate::endpoints::openai::chat;
use crate::endpoints::openai::completions;
use crate::endpoints::openai::embeddings;
use crate::endpoints::pages;
use crate::endpoints::prefixes;
use crate::endpoints::responses;
use crate::endpoints::routing;
use crate::endpoints::tokenize;
use crate::endpoints::trace;
use crate::endpoints::usage;
use crate::endpoints::why;
use crate::generation::Generator;
use crate::generation::screening::handle;
use crate::http::Shared;

/// What clients reach.
pub(crate) fn serving(state: &app::State, metrics_on_admin: bool) -> Router {
    let chat =
        |State(generator): Shared<Generator>, request: JsonRequest| handle(generator, request, chat::prepare);
    let completions = |State(generator): Shared<Generator>, request: JsonRequest| {
        handle(generator, request, completions::prepare)
    };
    let messages = |State(generator): Shared<Generator>, request: JsonRequest| {
        handle(generator, request, anthropic::prepare)
    };
    let ollama_chat =
        |State(generator): Shared<Generator>, request: JsonRequest| handle(generator, request, ollama::chat);
    let ollama_generate = |State(generator): Shared<Generator>, request: JsonRequest| {
        handle(generator, request, ollama::generate)
    };
    let mut router = Router::new();
    if !metrics_on_admin {
        router = router.route("/metrics", get(pages::metrics));
    }
    router
        .route("/", get(live::index))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completions))
        .route("/v1/embeddings", post(embeddings::create))
        .route("/v1/responses", post(responses::create))
        .route("/v1/responses/{id}", get(responses::show).delete(responses::delete))
        .route("/v1/responses/{id}/cancel", post(responses::cancel))
        .route("/v1/responses/{id}/input_items", get(responses::input_items))
        .route("/v1/chat/completions/render", post(routing::render_chat))
        .route("/v1/completions/render", post(routing::render_completions))
        .route("/load", get(routing::load))
        .route("/v1/loads", get(routing::loads))
        .route("/v1/messages", post(messages))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/v1/cache/prefixes", get(prefixes::list).post(prefixes::create))
        .route("/v1/cache/prefixes/{id}", get(prefixes::show).post(prefixes::change).delete(prefixes::delete))
        .route("/v1/cache/keys", get(prefixes::keys))
        .route("/v1/files", get(files::list_files).post(files::upload))
        .route("/v1/files/{id}", get(files::show_file).delete(files::delete_file))
        .route("/v1/files/{id}/content", get(files::content))
        .route("/v1/batches", get(files::list_batches).post(files::create))
        .route("/v1/batches/{id}", get(files::show_batch))
        .route("/v1/batches/{id}/cancel", post(files::cancel))
        .route("/v1/models", get(pages::models))
        .route("/v1/models/{*name}", get(pages::model))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/api/chat", post(ollama_chat))
        .route("/api/generate", post(ollama_generate))
        .route("/api/embed", post(ollama::embed))
        .route("/api/embeddings", post(ollama::embed_one))
        .route("/api/tags", get(ollama::tags))
        .route("/api/ps", get(ollama::ps))
        .route("/api/show", post(ollama::show))
        .route("/api/pull", post(ollama::pull))
        .route("/api/delete", delete(ollama::delete))
        .route("/api/version", get(ollama::version))
        .route("/health", get(pages::health))
        .route("/livez", get(pages::live))
        .route("/readyz", get(pages::health))
        .route("/ping", get(pages::health).post(pages::health))
        .route("/version", get(pages::version))
        .route("/openapi.json", get(pages::openapi))
        .route("/v1/usage", get(usage::usage))
        .route("/v1/usage/records", get(records::own))
        .route("/v1/why", get(why::own))
        .route("/v1/why/live", get(live::own))
        .route("/v1/trace", get(trace::own))
        .fallback(pages::not_found)
        .method_not_allowed_fallback(pages::method_not_allowed)
        .layer(from_fn_with_state(state.clone(), around))
        .with_state(state.clone())
}

/// What operators reach.
pub(crate) fn admin(state: &app::State) -> Router {
    Router::new()
        .route("/", get(live::page))
        .route("/health", get(pages::health))
        .route("/livez", get(pages::live))
        .route("/readyz", get(pages::health))
        .route("/ping", get(pages::health))
        .route("/metrics", get(pages::all_metrics))
        .route("/reset_prefix_cache", post(admin::reset_prefix_cache))
        .route("/v1/load_lora_adapter", post(admin::adapters::load))
        .route("/v1/unload_lora_adapter", post(admin::adapters::unload))
        .route("/v1/usage/records", get(records::all))
        .route("/v1/why", get(why::all))
        .route("/v1/why/live", get(live::all))
        .route("/v1/trace", get(trace::all))
        .route("/kv_events", get(kv_events::show))
        .route("/kv_events/blocks", get(kv_events::blocks))
        .route("/kv_events/republish", post(kv_events::republish))
        .fallback(pages::not_found)
        .method_not_allowed_fallback(pages::method_not_allowed)
        .layer(from_fn_with_state(state.clone(), admin::around))
        .with_state(state.clone())
}

#[cfg(test)]
mod tests {
    use folio_api::openapi::tables::ROUTES;

    /// The serving routes, read from the source.
    #[test]
    fn every_route_is_described_and_no_other() {
        let source = include_str!("routes.rs");
        let source = source.split("pub(crate) fn admin").next().unwrap_or_default();
        let mut served = Vec::new();
        for route in source.split(".route(").skip(1) {
            let path = route.split('"').nth(1).unwrap_or_default().replace("{*name}", "{name}");
            let handlers = route.split(".route(").next().unwrap_or_default();
            let handlers = handlers.split(".fallback(").next().unwrap_or_default();
            for method in ["get", "post", "delete"] {
                let called = format!("{method}(");
                if handlers.split(&called).count() > 1 {
                    served.push((method.to_owned(), path.clone()));
                }
            }
        }
        let mut described: Vec<_> =
            ROUTES.iter().map(|route| (route.method.to_owned(), route.path.to_owned())).collect();
        served.sort();
        described.sort();
        assert_eq!(described, served);
    }
}
