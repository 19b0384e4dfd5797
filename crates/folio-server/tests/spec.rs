//! OpenAI's own specification (2.3.0): every parameter of every endpoint here is read, so that nothing a client sends is ignored.

mod common;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::path::PathBuf;

use common::{Client, FakeEngine, merged};
use serde_json::{Value, json};

fn specification() -> Option<Value> {
    let data = std::env::var_os("FOLIO_TEST_DATA").map(PathBuf::from);
    let data = data.unwrap_or_else(|| concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/data").into());
    let path = data.join("openai-openapi/openapi.json.gz");
    let Ok(file) = std::fs::File::open(&path) else {
        // Past the test runner, which shows what a passing test prints to nobody.
        let why = "is not there; FOLIO_TEST_DATA names the folder of test data";
        let _ = writeln!(std::io::stderr(), "SKIPPED: {} {why}", path.display());
        return None;
    };
    let mut text = String::new();
    flate2::read::GzDecoder::new(file).read_to_string(&mut text).unwrap();
    Some(serde_json::from_str(&text).unwrap())
}

/// Names of a schema's properties, through references and combinations.
fn properties(specification: &Value, schema: &Value, names: &mut BTreeSet<String>) {
    if let Some(reference) = schema["$ref"].as_str() {
        let target =
            specification.pointer(reference.trim_start_matches('#')).unwrap_or_else(|| panic!("{reference}"));
        return properties(specification, target, names);
    }
    names.extend(schema["properties"].as_object().into_iter().flatten().map(|(name, _)| name.clone()));
    for part in ["allOf", "anyOf", "oneOf"].iter().filter_map(|key| schema[*key].as_array()).flatten() {
        properties(specification, part, names);
    }
}

/// A route, the schema of its body, a body that is answered, and parameters whose `null` means nothing.
const ROUTES: [(&str, &str, &str); 4] = [
    (
        "/v1/chat/completions",
        "CreateChatCompletionRequest",
        r#"{"messages": [{"role": "user", "content": "hi"}]}"#,
    ),
    ("/v1/completions", "CreateCompletionRequest", r#"{"prompt": "hi"}"#),
    ("/v1/responses", "CreateResponse", r#"{"input": "hi"}"#),
    ("/v1/embeddings", "CreateEmbeddingRequest", r#"{"input": "hi"}"#),
];

#[tokio::test]
async fn every_parameter_of_openais_is_honoured_or_refused_by_name() {
    let Some(specification) = specification() else { return };
    let client = Client::new(FakeEngine::saying("ok"));
    let mut seen = 0;
    for (route, schema, body) in ROUTES {
        let body: Value = serde_json::from_str(body).unwrap();
        let mut names = BTreeSet::new();
        let reference = json!({"$ref": format!("#/components/schemas/{schema}")});
        properties(&specification, &reference, &mut names);
        assert!(names.len() >= 5, "{schema}: {names:?}");
        for name in &names {
            seen += 1;
            // No parameter takes this; whoever answers has not looked.
            let odd = json!({"no such thing": [null]});
            let mut odd_body = body.clone();
            odd_body[name] = odd;
            let reply = client.post(route, &odd_body).await;
            if reply.status == 200 {
                // What may be any object, honoured as such.
                assert!(["metadata", "logit_bias"].contains(&name.as_str()), "{route}: {name} is ignored");
                continue;
            }
            let error = reply.error();
            assert_eq!(reply.status, 400, "{route}: {name}: {error}");
            let text = format!("{} {}", error["param"], error["message"]);
            assert!(text.contains(name.as_str()), "{route}: the error does not name {name}: {error}");
        }
        let unknown = client.post(route, &merged(body, json!({"no_such_parameter": 1}))).await;
        assert_eq!(
            (unknown.status.as_u16(), unknown.error()["param"].as_str()),
            (400, Some("no_such_parameter")),
            "{route}"
        );
    }
    assert!(seen > 80, "{seen} parameters");
}

#[tokio::test]
async fn a_parameter_that_is_null_is_one_that_was_not_given() {
    let Some(specification) = specification() else { return };
    let client = Client::new(FakeEngine::saying("ok"));
    for (route, schema, body) in ROUTES.iter().take(3) {
        let body: Value = serde_json::from_str(body).unwrap();
        let mut names = BTreeSet::new();
        properties(&specification, &json!({"$ref": format!("#/components/schemas/{schema}")}), &mut names);
        for name in names.iter().filter(|name| body.get(name.as_str()).is_none()) {
            let reply = client.post(route, &merged(body.clone(), json!({name: null}))).await;
            assert_eq!(reply.status, 200, "{route}: {name}: {}", reply.text);
        }
    }
}
