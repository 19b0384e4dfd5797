//! The model inside the binary, and a head that drafts for it: trained by `tools/demo_model`, so that the first minute needs no download.

pub const NAME: &str = "folio-demo";

/// `(file name, bytes)`, the same names as in a model folder.
pub static FILES: &[(&str, &[u8])] = &[
    ("config.json", include_bytes!("../assets/demo/config.json")),
    ("generation_config.json", include_bytes!("../assets/demo/generation_config.json")),
    ("model.safetensors", include_bytes!("../assets/demo/model.safetensors")),
    ("tokenizer.json", include_bytes!("../assets/demo/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../assets/demo/tokenizer_config.json")),
];

/// The same of its EAGLE-3 head.
pub static HEAD: &[(&str, &[u8])] = &[
    ("config.json", include_bytes!("../assets/demo-eagle3/config.json")),
    ("model.safetensors", include_bytes!("../assets/demo-eagle3/model.safetensors")),
];

#[cfg(test)]
mod tests {
    use folio_model::checkpoint::Checkpoint;
    use folio_server::Parsers;
    use folio_text::{AnswerFormats, ChatInput, ChatTemplate, Prompt, Tokenizer};
    use serde_json::{Value, json};

    use crate::runtime::{load_template, load_tokenizer};

    fn parts() -> (Tokenizer, ChatTemplate) {
        let checkpoint = Checkpoint::from_bytes(super::FILES).expect("the built-in model");
        let tokenizer = load_tokenizer(&checkpoint).expect("its tokenizer");
        let template = load_template(&checkpoint, &tokenizer, None).expect("compiles").expect("a template");
        (tokenizer, template)
    }

    fn prompt(template: &ChatTemplate, messages: &Value, tools: Option<&[Value]>) -> Prompt {
        let input = ChatInput {
            messages: messages.as_array().expect("messages"),
            tools,
            documents: None,
            add_generation_prompt: true,
            kwargs: &serde_json::Map::new(),
            now_unix_s: 0,
            formats: AnswerFormats::default(),
        };
        template.render(&input).expect("renders")
    }

    /// The ids are of before the template knew tools. Bytes that gave their rows to markers are not those of `ý`, `þ` and `ÿ` in UTF-8.
    #[test]
    fn a_conversation_without_tools_keeps_its_ids() {
        let (tokenizer, template) = parts();
        let messages = json!([
            {"role": "system", "content": " Be brief. "},
            {"role": "user", "content": "My name is Ýrsa. What is 12 + 7?"},
            {"role": "assistant", "content": "12 + 7 = 19"},
            {"role": "user", "content": "Say <tool_call>: ýþÿ"},
        ]);
        let before = [
            0, 2, 38, 73, 281, 290, 73, 74, 18, 1, 3, 717, 332, 269, 225, 132, 256, 86, 868, 18, 627, 269,
            225, 21, 22, 563, 225, 27, 35, 1, 4, 21, 22, 563, 225, 27, 435, 225, 21, 29, 1, 3, 55, 288, 225,
            32, 88, 328, 80, 67, 71, 357, 34, 30, 225, 132, 126, 132, 127, 132, 128, 1, 4,
        ];
        let prompt = prompt(&template, &messages, None);
        assert_eq!(tokenizer.encode_prompt(&prompt, false, 1 << 20).expect("encodes"), before);
        assert_eq!(tokenizer.vocab_size(), 1024);
    }

    #[test]
    fn tools_are_shown_as_their_calls_and_results_are_messages() {
        let (tokenizer, template) = parts();
        let parameters = json!({"type": "object", "required": ["city"], "properties": {
            "city": {"type": "string"},
            "unit": {"enum": ["c", "f"]},
            "days": {"type": "array", "items": {"type": ["integer", "null"]}},
            "at": {"type": "object", "properties": {"hour": {"type": "integer"}}},
            "free": {},
            "items": true,
            "wrong": {"type": 7, "enum": 7, "properties": 7},
            "rest": {"type": "object", "properties": {"a": {"type": "array"}}, "required": 7},
        }});
        let weather = json!({"type": "function", "function": {"name": "get_weather",
            "description": "The weather in a city. It is told\nonce a day.", "parameters": parameters}});
        let now = json!({"type": "function", "function": {"name": "now"}});
        let call = json!({"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Ulm"}}});
        let messages = json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather in Ulm?"},
            {"role": "assistant", "content": null, "tool_calls": [call, call]},
            {"role": "tool", "content": "sunny"},
            {"role": "tool", "content": "rainy"},
        ]);
        let prompt = prompt(&template, &messages, Some(&[weather, now]));
        let written =
            "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Ulm\"}}\n</tool_call>";
        let expected = format!(
            "<|begin|><|system|>Be brief.\n\nTools:\nThe weather in a city {{\"name\": \"get_weather\", \"arguments\": \
             {{\"city\": string, \"unit\": \"c\"|\"f\"?, \"days\": [integer|null]?, \"at\": {{\"hour\": integer?}}?, \
             \"free\": any?, \"items\": any?, \"wrong\": any?, \"rest\": {{\"a\": [any]?}}?}}}}\n{{\"name\": \"now\", \"arguments\": {{}}}}<|end|>\
             <|user|>Weather in Ulm?<|end|><|assistant|>{written}\n{written}<|end|>\
             <|tool|>sunny<|end|><|tool|>rainy<|end|><|assistant|>"
        );
        assert_eq!(prompt.text(), expected);
        for marker in ["<tool_call>", "</tool_call>", "<|tool|>"] {
            assert!(tokenizer.token_id(marker).is_some(), "{marker} is one token");
        }
        let known = template.tools();
        assert!(known.takes_tools && known.takes_calls && known.object_arguments && known.null_content);
        assert_eq!(Parsers::of_template(&template).tools.map(|format| format.name), Some("hermes"));
    }
}
