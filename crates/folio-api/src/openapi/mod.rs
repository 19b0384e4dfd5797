//! `GET /openapi.json`: this server's routes, what their requests may hold, and what they answer.
//!
//! Owns: the document, made of [`tables`], and the tables of `docs/api.md`. A field in it is honoured; one under `x-refused`
//! exists elsewhere and is a 400 here, with that reason; any other is a 400 too (`additionalProperties: false`).

pub mod ollama;
pub mod tables;

use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use crate::hints::HINTS;
use tables::{Body, Field, OPEN, ROUTES, ReplyKind, Route, UPLOAD};

/// Statuses of refusals, by who can meet them.
const REFUSALS: &[(u16, &str)] = &[
    (400, "The request is wrong; `param` says where"),
    (401, "No key, or not one that is known"),
    (403, "The key has not the scope for it"),
    (404, "There is no such thing"),
    (405, "The route has other methods"),
    (408, "The body did not arrive in time"),
    (409, "It contradicts what is there"),
    (413, "The body, or the prompt, is too large"),
    (415, "The body is not of a type this route reads"),
    (429, "A queue or a limit is full; see Retry-After"),
    (500, "The server failed"),
    (503, "The server is ending, or cannot go on; see Retry-After"),
    (504, "The request took longer than it may"),
    (529, "To Anthropic's clients: the server cannot take it now"),
];

/// The document.
pub fn document() -> Value {
    let mut paths = Map::new();
    let mut schemas = errors();
    for route in ROUTES {
        let entry = paths.entry(route.path.to_owned()).or_insert_with(|| json!({}));
        entry[route.method] = operation(route);
        if let Some(body) = route.body {
            schemas.insert(body.name.to_owned(), request(body));
        }
    }
    let key = json!([{"bearer": []}, {"apiKey": []}]);
    json!({
        "openapi": "3.1.0",
        "info": {"title": "Folio", "version": env!("CARGO_PKG_VERSION"), "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": key,
    })
}

fn operation(route: &Route) -> Value {
    let mut parameters = Vec::new();
    for name in route.path.split('{').skip(1).filter_map(|rest| rest.split('}').next()) {
        parameters.push(json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}}));
    }
    for (name, kind) in route.query {
        parameters.push(json!({"name": name, "in": "query", "schema": schema(kind, false)}));
    }
    let mut responses = Map::new();
    responses.insert("200".into(), json!({"description": route.about, "content": content(route.reply)}));
    let name = match route.path {
        path if path.starts_with("/v1/messages") => "AnthropicError",
        path if path.starts_with("/api/") => "OllamaError",
        _ => "Error",
    };
    for (status, about) in REFUSALS {
        let told = json!({"schema": {"$ref": format!("#/components/schemas/{name}")}});
        let refusal = json!({"description": about, "content": {"application/json": told}});
        responses.insert(status.to_string(), refusal);
    }
    let mut operation = json!({
        "summary": route.about,
        "operationId": format!("{}{}", route.method, route.path.replace(['/', '{', '}', '.'], "_")),
        "parameters": parameters,
        "responses": responses,
    });
    if let Some(body) = route.body {
        let example: Value = serde_json::from_str(body.example).unwrap_or_default();
        let media =
            json!({"schema": {"$ref": format!("#/components/schemas/{}", body.name)}, "example": example});
        operation["requestBody"] = json!({"required": true, "content": {"application/json": media}});
    }
    if (route.method, route.path) == ("post", "/v1/files") {
        let mut form = json!({"type": "object", "properties": properties(&[UPLOAD], false), "required": ["file", "purpose"]});
        form["properties"]["file"]["contentMediaType"] = "application/octet-stream".into();
        form["properties"]["purpose"]["const"] = "batch".into();
        operation["requestBody"] =
            json!({"required": true, "content": {"multipart/form-data": {"schema": form}}});
    }
    if OPEN.contains(&route.path) {
        operation["security"] = json!([]);
    }
    operation
}

fn content(reply: ReplyKind) -> Value {
    match reply {
        ReplyKind::List => json!({"application/json": {"schema": {"type": "array"}}}),
        ReplyKind::Text(kind) => {
            let kind = kind.split(';').next().unwrap_or(kind);
            json!({kind: {"schema": {"type": "string"}}})
        }
        ReplyKind::Object(members, streamed) => {
            let mut content = json!({"application/json": {"schema": object(members)}});
            if streamed {
                // What the events hold is told in docs/api.md.
                content["text/event-stream"] = json!({});
            }
            content
        }
        ReplyKind::Lines(members) => {
            json!({"application/json": {"schema": object(members)}, "application/x-ndjson": {}})
        }
    }
}

fn object(members: &[Field]) -> Value {
    let names: Vec<&str> = members.iter().map(|(name, _)| *name).collect();
    json!({"type": "object", "required": names, "properties": properties(&[members], false)})
}

fn request(body: &Body) -> Value {
    let refused = body.refused.iter().flat_map(|list| list.iter());
    let refused: Map<String, Value> =
        refused.map(|(name, why)| (name.to_string(), Value::from(*why))).collect();
    let mut properties = properties(body.fields, true);
    for hint in
        HINTS.iter().filter(|hint| body.hints == Some(hint.api) && !hint.path.contains('.') && !hint.honoured)
    {
        properties[hint.path] = json!({"x-hint": hint.why});
    }
    for name in body.required {
        properties[*name] = schema(kind_of(body, name), false);
    }
    json!({
        "type": "object", "properties": properties, "required": body.required, "additionalProperties": false,
        "x-refused": refused,
    })
}

fn kind_of(body: &Body, name: &str) -> &'static str {
    let fields = body.fields.iter().flat_map(|list| list.iter());
    fields.filter(|(field, _)| *field == name).map(|(_, kind)| *kind).next().unwrap_or("object")
}

fn properties(lists: &[&[Field]], nullable: bool) -> Value {
    let fields = lists.iter().flat_map(|list| list.iter());
    Value::Object(fields.map(|(name, kind)| (name.to_string(), schema(kind, nullable))).collect())
}

/// `nullable`: `null` counts as left out.
fn schema(kind: &str, nullable: bool) -> Value {
    let mut types: Vec<&str> = Vec::new();
    let mut schema = Map::new();
    for part in kind.split('|') {
        let mut words = part.split_whitespace();
        types.extend(words.next());
        for (bound, word) in ["minimum", "maximum"].into_iter().zip(words) {
            schema.insert(bound.into(), serde_json::from_str(word).unwrap_or_default());
        }
    }
    if nullable {
        types.push("null");
    }
    schema.insert("type".into(), if types.len() == 1 { types[0].into() } else { types.into() });
    Value::Object(schema)
}

/// Each API's refusals.
fn errors() -> Map<String, Value> {
    let text = json!({"type": "string"});
    let maybe = json!({"type": ["string", "null"]});
    let detail = json!({
        "type": "object", "required": ["message", "type", "param", "code"],
        "properties": {"message": text, "type": text, "param": maybe, "code": maybe},
    });
    let error = json!({"type": "object", "required": ["error"], "properties": {"error": detail}});
    let detail = json!({
        "type": "object", "required": ["type", "message"], "properties": {"type": text, "message": text},
    });
    let anthropic = json!({
        "type": "object", "required": ["type", "error"],
        "properties": {"type": {"const": "error"}, "error": detail, "request_id": maybe},
    });
    let ollama = json!({
        "type": "object", "required": ["error"],
        "properties": {"error": text, "param": maybe, "code": maybe},
    });
    let named = [("Error", error), ("AnthropicError", anthropic), ("OllamaError", ollama)];
    named.into_iter().map(|(name, schema)| (name.to_owned(), schema)).collect()
}

/// The part of `docs/api.md` that the tables make.
pub fn reference() -> String {
    let mut out = String::from("| route | |\n|---|---|\n");
    for route in ROUTES {
        let _ = writeln!(out, "| `{} {}` | {} |", route.method.to_uppercase(), route.path, route.about);
    }
    let mut told: Vec<&str> = Vec::new();
    for route in ROUTES {
        let Some(body) = route.body.filter(|body| !told.contains(&body.name)) else { continue };
        told.push(body.name);
        let routes = ROUTES.iter().filter(|other| other.body.is_some_and(|other| other.name == body.name));
        let routes: Vec<String> = routes.map(|route| format!("`POST {}`", route.path)).collect();
        let _ = writeln!(out, "\n### {}\n\n| honoured | |\n|---|---|", routes.join(", "));
        let mut fields: Vec<&Field> = body.fields.iter().flat_map(|list| list.iter()).collect();
        fields.sort();
        for (name, kind) in fields {
            let needed = if body.required.contains(name) { ", required" } else { "" };
            let _ = writeln!(out, "| `{name}` | {}{needed} |", kind.replace('|', "or"));
        }
        let mut refused: Vec<_> = body.refused.iter().flat_map(|list| list.iter()).collect();
        refused.sort();
        if !refused.is_empty() {
            out += "\n| refused | because |\n|---|---|\n";
        }
        for (name, why) in refused {
            let _ = writeln!(out, "| `{name}` | {why} |");
        }
    }
    out
}
