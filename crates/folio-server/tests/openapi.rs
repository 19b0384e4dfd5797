//! The served document says what the server does: field by field, asked of the server.

mod common;

use std::collections::BTreeSet;
use std::sync::Arc;

use common::targets::ROUTES;
use common::{Client, FakeEngine, app, modelled, tool_template};
use folio_engine::SchedulerConfig;
use folio_server::{App, Engine, Parsers, ServerConfig};
use folio_text::{ReasoningFormat, ToolFormat};
use serde_json::{Value, json};

fn client() -> Client {
    client_of(FakeEngine::saying("ok"))
}

fn client_of(engine: Arc<dyn Engine>) -> Client {
    let parsers = Parsers { tools: ToolFormat::named("hermes"), reasoning: ReasoningFormat::named("think") };
    let mut app = App { template: Some(Arc::new(tool_template())), parsers, ..app(engine) };
    app.model.context_length = 2048;
    Client::with(ServerConfig { api_keys: vec!["k".into()], ..Default::default() }, app)
}

fn names(object: &Value) -> Vec<String> {
    object.as_object().into_iter().flatten().map(|(name, _)| name.clone()).collect()
}

#[tokio::test]
async fn every_field_is_honoured_or_refused_as_the_document_says() {
    let document = client().get("/openapi.json").await;
    assert_eq!(document.status, 200, "without a key");
    let document = document.json();
    let client = client().key("k");
    // What is kept in a cache needs an engine that has one.
    let config = SchedulerConfig { max_model_len: 256, max_num_batched_tokens: 64, ..Default::default() };
    let caching = client_of(Arc::new(modelled(config, 64, 1 << 20))).key("k");
    let schemas = &document["components"]["schemas"];
    // Every name that any request knows, tried with every request.
    let lists = schemas.as_object().unwrap().values();
    let all: BTreeSet<String> = lists
        .flat_map(|body| names(&body["properties"]).into_iter().chain(names(&body["x-refused"])))
        .collect();
    assert!(all.len() > 100 && all.contains("temperature") && all.contains("guided_json"));
    let mut asked = 0;
    for (path, methods) in document["paths"].as_object().unwrap() {
        let Some(content) = methods["post"]["requestBody"].as_object() else { continue };
        let media = &content["content"]["application/json"];
        // A form, and what is asked of something that must be there first.
        if media.is_null() || path.contains('{') {
            continue;
        }
        let schema = media["schema"]["$ref"].as_str().unwrap().rsplit('/').next().unwrap();
        let schema = &schemas[schema];
        for name in &all {
            let mut body = media["example"].clone();
            // Where any object may be there, no other value may.
            let any = ["chat_template_kwargs", "format"].contains(&name.as_str());
            let free = any || !schema["properties"][name]["x-hint"].is_null();
            body[name] = if free { json!(true) } else { json!({"zzz": [1]}) };
            let asked_of = if path.starts_with("/v1/cache") { &caching } else { &client };
            let reply = asked_of.post(path, &body).await;
            let (mut code, mut param) = (Value::Null, Value::Null);
            if reply.status != 200 {
                let error = reply.error();
                let details = error.get("details").unwrap_or(&error);
                code = details.get("error_code").or(details.get("code")).cloned().unwrap_or_default();
                param = details["param"].clone();
                assert_eq!(reply.status, 400, "{path} {name}: {}", reply.text);
            }
            let about_it = param == **name;
            let within = param.as_str().and_then(|param| param.strip_prefix(name.as_str()));
            let read = within.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']));
            let found = match code.as_str() {
                Some("unrecognized_parameter") if about_it => "unknown",
                Some("unsupported_parameter") if about_it => "refused",
                // Whoever reads it has to find that no field can have this value, and to name it. An answer, or an error about something
                // else, is what comes where nobody does.
                _ if read => "honoured",
                _ => "ignored",
            };
            let honoured = !schema["properties"][name].is_null();
            let refused = !schema["x-refused"][name].is_null();
            let told = match (honoured, refused) {
                (true, false) => "honoured",
                (false, true) => "refused",
                (false, false) => "unknown",
                (true, true) => "both",
            };
            assert_eq!(told, found, "{path}: {name}: {}", reply.text);
            asked += 1;
        }
        for required in schema["required"].as_array().unwrap() {
            let mut body = media["example"].clone();
            body.as_object_mut().unwrap().remove(required.as_str().unwrap());
            assert_eq!(client.post(path, &body).await.status, 400, "{path} without {required}");
        }
    }
    assert!(asked > 1000, "{asked}");
}

#[tokio::test]
async fn what_needs_no_key_is_said_to_need_none() {
    let client = client();
    let document = client.get("/openapi.json").await.json();
    for (path, methods) in document["paths"].as_object().unwrap() {
        if methods["get"].is_null() {
            continue;
        }
        let open = methods["get"]["security"] == json!([]);
        let parts = path.split('/').map(|part| if part.starts_with('{') { "none" } else { part });
        let asked = parts.collect::<Vec<_>>().join("/");
        assert_eq!(client.get(&asked).await.status != 401, open, "{path}");
    }
}

/// So whatever floods, limits and fuzzing are tried with every route is tried with a new one, too.
#[tokio::test]
async fn every_route_that_takes_json_is_attacked() {
    let document = client().get("/openapi.json").await.json();
    let posts =
        document["paths"].as_object().unwrap().iter().filter(|(_, methods)| !methods["post"].is_null());
    let fits = |path: &str, route: &str| {
        let (path, route): (Vec<_>, Vec<_>) = (path.split('/').collect(), route.split('/').collect());
        path.len() == route.len()
            && path.iter().zip(route).all(|(part, other)| *part == other || part.starts_with('{'))
    };
    let mut attacked = 0;
    // A form, and a sign of life.
    for (path, _) in posts.filter(|(path, _)| !["/v1/files", "/ping"].contains(&path.as_str())) {
        assert!(ROUTES.iter().any(|route| fits(path, route)), "{path} is not among targets::ROUTES");
        attacked += 1;
    }
    assert_eq!(attacked, ROUTES.len());
}
