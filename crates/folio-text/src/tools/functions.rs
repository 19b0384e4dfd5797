//! What the request says about its functions: their names and the types of their parameters.
//!
//! Owns: nothing but what markup formats need to write JSON from untyped text. Must never: validate a schema. Cost:
//! built once per request, linear in the tools.

use std::collections::HashMap;

use serde_json::Value;

/// How the text of a parameter becomes JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterType {
    /// Text, as it is.
    Text,
    /// Anything but text: JSON where it is JSON, else text.
    Json,
    /// Nothing is known: JSON where it is JSON and no string, else text.
    Unknown,
}

/// The functions a model may call.
#[derive(Clone, Debug, Default)]
pub struct Functions {
    parameters: HashMap<String, HashMap<String, ParameterType>>,
}

impl Functions {
    /// From OpenAI's `tools`; what is no function is passed over.
    pub fn of_tools(tools: &[Value]) -> Self {
        let mut parameters = HashMap::new();
        for function in tools.iter().filter_map(|tool| tool.get("function")) {
            let Some(name) = function.get("name").and_then(Value::as_str) else { continue };
            let properties = function.pointer("/parameters/properties").and_then(Value::as_object);
            let types =
                properties.into_iter().flatten().map(|(key, schema)| (key.clone(), parameter(schema)));
            parameters.insert(name.to_owned(), types.collect());
        }
        Self { parameters }
    }

    pub fn has(&self, name: &str) -> bool {
        self.parameters.contains_key(name)
    }

    pub fn parameter(&self, function: &str, key: &str) -> ParameterType {
        let types = self.parameters.get(function);
        types.and_then(|types| types.get(key)).copied().unwrap_or(ParameterType::Unknown)
    }
}

/// Text where a schema allows nothing else, JSON where it allows no text.
fn parameter(schema: &Value) -> ParameterType {
    let (mut text, mut other) = (false, false);
    kinds(schema, &mut text, &mut other, 0);
    match (text, other) {
        (true, false) => ParameterType::Text,
        (false, true) => ParameterType::Json,
        _ => ParameterType::Unknown,
    }
}

fn kinds(schema: &Value, text: &mut bool, other: &mut bool, depth: usize) {
    let mut note = |kind: &Value| match kind.as_str() {
        Some("string" | "str") => *text = true,
        Some(_) => *other = true,
        None => {}
    };
    match schema.get("type") {
        Some(Value::Array(list)) => list.iter().for_each(note),
        Some(kind) => note(kind),
        None => {
            for value in
                schema.get("enum").and_then(Value::as_array).into_iter().flatten().chain(schema.get("const"))
            {
                if value.is_string() { *text = true } else { *other = true }
            }
            // Nested alternatives are few; a schema that nests them for ever is not followed.
            for key in ["anyOf", "oneOf", "allOf"].iter().filter(|_| depth < 8) {
                for part in schema.get(key).and_then(Value::as_array).into_iter().flatten() {
                    kinds(part, text, other, depth + 1);
                }
            }
        }
    }
}

/// The JSON of a parameter's text.
pub fn to_json(text: &str, kind: ParameterType) -> String {
    let trimmed = text.trim();
    let literal = match trimmed {
        "True" => "true",
        "False" => "false",
        "None" => "null",
        other => other,
    };
    let parsed = serde_json::from_str::<Value>(literal).ok();
    let is_json = match kind {
        ParameterType::Text => false,
        ParameterType::Json => parsed.is_some(),
        ParameterType::Unknown => parsed.is_some_and(|value| !value.is_string()),
    };
    if is_json {
        return literal.to_owned();
    }
    let python = if kind == ParameterType::Text { None } else { super::literal::python_value(trimmed) };
    python.unwrap_or_else(|| super::json::quoted(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn types_come_from_the_schema() {
        let properties = json!({
            "s": {"type": "string"}, "n": {"type": "integer"}, "e": {"enum": ["a", "b"]}, "o": {"type": ["string", "null"]},
            "a": {"anyOf": [{"type": "number"}, {"type": "null"}]}, "x": {"description": "anything"},
        });
        let tools = [
            json!({"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}),
        ];
        let functions = Functions::of_tools(&tools);
        assert!(functions.has("f") && !functions.has("g"));
        for (key, kind) in [
            ("s", ParameterType::Text),
            ("n", ParameterType::Json),
            ("e", ParameterType::Text),
            ("o", ParameterType::Unknown),
            ("a", ParameterType::Json),
            ("x", ParameterType::Unknown),
            ("missing", ParameterType::Unknown),
        ] {
            assert_eq!(functions.parameter("f", key), kind, "{key}");
        }
    }

    #[test]
    fn text_becomes_json_by_type() {
        for (text, kind, want) in [
            ("5", ParameterType::Text, "\"5\""),
            ("5", ParameterType::Json, "5"),
            ("True", ParameterType::Json, "true"),
            ("five", ParameterType::Json, "\"five\""),
            ("null", ParameterType::Unknown, "null"),
            ("\"x\"", ParameterType::Unknown, "\"\\\"x\\\"\""),
            (" [1, 2]", ParameterType::Json, "[1, 2]"),
            ("{'a': True}", ParameterType::Json, "{\"a\": true}"),
            ("{'a': True}", ParameterType::Text, "\"{'a': True}\""),
        ] {
            assert_eq!(to_json(text, kind), want, "{text}");
        }
    }
}
