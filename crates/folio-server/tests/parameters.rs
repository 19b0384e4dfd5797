//! Every parameter is honoured (it reaches the engine or shows in the response) or refused by a 400 that names it.

mod common;

use common::{Client, EOS, FakeEngine};
use folio_engine::FinishReason;
use serde_json::{Value, json};

#[tokio::test]
async fn sampling_parameters_reach_the_engine() {
    let engine = FakeEngine::saying("ok");
    let client = Client::new(engine.clone());
    let reply = client
        .chat(json!({
            "model": "org/alias", "temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.125, "n": 2, "seed": -3,
            "presence_penalty": 1.5, "frequency_penalty": -1.5, "repetition_penalty": 1.25, "max_tokens": 9,
            "min_tokens": 2, "logit_bias": {"12": 1.5, "3": -100}, "stop_token_ids": [65, 66], "logprobs": true,
            "top_logprobs": 3, "priority": -4, "prompt_logprobs": 2, "user": "u", "safety_identifier": "s",
            "prompt_cache_key": "k", "metadata": {"a": "b"}, "store": false, "service_tier": "auto",
            "response_format": {"type": "text"}, "modalities": ["text"], "tool_choice": "none", "tools": [],
        }))
        .await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    let request = engine.last();
    let p = &request.sampling;
    assert_eq!((p.temperature, p.top_p, p.top_k, p.min_p), (0.25, 0.5, 7, 0.125));
    assert_eq!((p.presence_penalty, p.frequency_penalty, p.repetition_penalty), (1.5, -1.5, 1.25));
    assert_eq!((p.max_tokens, p.min_tokens, p.seed), (9, 2, -3i64 as u64));
    assert_eq!(*p.logit_bias, [(3, -100.0), (12, 1.5)]);
    assert_eq!(*p.stop_token_ids, [65, 66]);
    assert_eq!(*p.eos_token_ids, [EOS]);
    assert_eq!(p.logprobs, Some(3));
    assert_eq!((request.n, request.priority, request.prompt_logprobs), (2, -4, Some(2)));
    assert_eq!(&request.prompt[..6], b"[user]".map(u32::from));
}

#[tokio::test]
async fn defaults_come_from_the_model_then_from_openai() {
    let engine = FakeEngine::saying("ok");
    let client = Client::new(engine.clone());
    assert_eq!(client.chat(json!({"temperature": null})).await.status, 200);
    let request = engine.last();
    let p = &request.sampling;
    // The test model's generation_config says 0.7 and 11.
    assert_eq!((p.temperature, p.top_k, p.top_p, p.min_p, p.repetition_penalty), (0.7, 11, 1.0, 0.0, 1.0));
    assert_eq!((request.n, request.priority, p.logprobs, p.min_tokens), (1, 0, None, 0));
    assert_eq!(p.max_tokens as usize, 256 - request.prompt.len(), "chat: what the context leaves");
    let first = p.seed;
    client.chat(json!({})).await;
    assert_ne!(engine.last().sampling.seed, first, "no seed: a fresh one each time");
    client.complete(json!({})).await;
    assert_eq!(engine.last().sampling.max_tokens, 16, "completions: OpenAI's default");
    client.chat(json!({"top_p": 0, "top_k": -1})).await;
    let p = engine.last().sampling;
    assert_eq!((p.top_k, p.top_p), (1, 1.0), "an empty nucleus is the best token");
    client.chat(json!({"max_completion_tokens": 5, "ignore_eos": true})).await;
    let p = engine.last().sampling;
    assert_eq!((p.max_tokens, p.eos_token_ids.len()), (5, 0));
}

#[tokio::test]
async fn parameters_of_the_text_show_in_the_response() {
    let engine = FakeEngine::saying("one. two. three");
    let client = Client::new(engine.clone());
    let choice = |reply: common::Reply| reply.json()["choices"][0].clone();

    let c = choice(client.chat(json!({"stop": "two"})).await);
    assert_eq!(
        (c["message"]["content"].as_str(), c["finish_reason"].as_str()),
        (Some("one. "), Some("stop"))
    );
    assert_eq!(c["stop_reason"], "two");
    let c = choice(client.chat(json!({"stop": ["zzz", "two"], "include_stop_str_in_output": true})).await);
    assert_eq!(c["message"]["content"], "one. two");
    let c = choice(client.chat(json!({"stop": ".", "min_tokens": 4})).await);
    assert_eq!(c["message"]["content"], "one. two", "a stop string within min_tokens does not count");
    let c = choice(client.chat(json!({"stop_token_ids": [b't']})).await);
    assert_eq!((c["message"]["content"].as_str(), &c["stop_reason"]), (Some("one. "), &json!(b't')));
    let c = choice(client.chat(json!({"stop_token_ids": [b't'], "include_stop_str_in_output": true})).await);
    assert_eq!(c["message"]["content"], "one. t");
    let c = choice(client.chat(json!({"max_tokens": 3})).await);
    assert_eq!(
        (c["message"]["content"].as_str(), c["finish_reason"].as_str()),
        (Some("one"), Some("length"))
    );
    let c = choice(client.chat(json!({})).await);
    assert_eq!(
        (c["message"]["content"].as_str(), c["finish_reason"].as_str()),
        (Some("one. two. three"), Some("stop"))
    );
    assert!(c.get("stop_reason").is_none() && c["logprobs"].is_null());

    engine.plan(|plan| plan.end = Some(FinishReason::Length));
    let reply = client.chat(json!({"return_token_ids": true, "request_id": "mine-1"})).await.json();
    let text = "one. two. three".bytes().collect::<Vec<_>>();
    assert_eq!(reply["choices"][0]["token_ids"], json!(text));
    assert_eq!(reply["prompt_token_ids"].as_array().unwrap().len(), engine.last().prompt.len());
    assert_eq!(reply["id"], "chatcmpl-mine-1");
    assert_eq!(reply["model"], "test-model");
}

#[tokio::test]
async fn special_tokens_are_skipped_unless_asked_for() {
    let engine = FakeEngine::saying("x");
    let client = Client::new(engine.clone());
    let text = async |extra| client.complete(extra).await.json()["choices"][0]["text"].clone();
    assert_eq!(text(json!({"include_stop_str_in_output": true})).await, "x");
    assert_eq!(
        text(json!({"include_stop_str_in_output": true, "skip_special_tokens": false})).await,
        "x<|end|>"
    );
    assert_eq!(text(json!({"skip_special_tokens": false})).await, "x");
}

#[tokio::test]
async fn the_template_gets_its_arguments() {
    let engine = FakeEngine::saying("ok");
    let client = Client::new(engine.clone());
    let prompt = async |extra: Value| {
        let reply = client.chat(extra).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
        common::tokenizer().decode(&engine.last().prompt, false)
    };
    assert_eq!(prompt(json!({})).await, "[user]hi<|end|>[assistant]");
    assert_eq!(prompt(json!({"add_generation_prompt": false})).await, "[user]hi<|end|>");
    assert_eq!(
        prompt(json!({"chat_template_kwargs": {"mood": "merry"}})).await,
        "[user]hi<|end|>(merry)[assistant]"
    );
    let messages = json!([{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "q", "name": "n"}, {"role": "assistant", "content": "The answer ", "refusal": null}]);
    assert_eq!(
        prompt(json!({"messages": messages, "continue_final_message": true})).await,
        "[system]a\nb<|end|>[user]q<|end|>[assistant]The answer"
    );
    let reply =
        client.chat(json!({"messages": messages, "continue_final_message": true, "echo": true})).await;
    assert_eq!(reply.json()["choices"][0]["message"]["content"], "The answer ok");
    assert_eq!(prompt(json!({"truncate_prompt_tokens": 3})).await, "nt]");
}

#[tokio::test]
async fn prompts_of_every_shape() {
    let engine = FakeEngine::saying("{c}");
    let client = Client::new(engine.clone());
    for (prompt, want) in [
        (json!("ab"), vec![b"ab".to_vec()]),
        (json!(["ab", "c"]), vec![b"ab".to_vec(), b"c".to_vec()]),
        (json!([97, 98]), vec![b"ab".to_vec()]),
        (json!([[97, 98], [99]]), vec![b"ab".to_vec(), b"c".to_vec()]),
    ] {
        engine.requests.lock().unwrap().clear();
        let reply =
            client.complete(json!({"prompt": prompt, "n": 2, "best_of": 2, "echo": true})).await.json();
        let prompts: Vec<Vec<u8>> = engine
            .requests
            .lock()
            .unwrap()
            .iter()
            .map(|request| request.prompt.iter().map(|id| *id as u8).collect())
            .collect();
        assert_eq!(prompts, want);
        let choices = reply["choices"].as_array().unwrap();
        assert_eq!(choices.len(), 2 * want.len());
        for (index, choice) in choices.iter().enumerate() {
            let prompt = String::from_utf8(want[index / 2].clone()).unwrap();
            assert_eq!(choice["index"], index);
            assert_eq!(choice["text"], format!("{prompt}{}", index % 2), "echo, then the choice's own text");
        }
        let tokens = want.iter().map(Vec::len).sum::<usize>();
        assert_eq!(
            reply["usage"]["prompt_tokens"], tokens,
            "a prompt counts once however many choices it has"
        );
    }
}

#[tokio::test]
async fn log_probabilities() {
    let engine = FakeEngine::saying("é");
    engine.plan(|plan| plan.end = Some(FinishReason::Length));
    let client = Client::new(engine.clone());
    let reply = client.chat(json!({"logprobs": true, "top_logprobs": 2, "prompt_logprobs": 1})).await.json();
    let content = reply["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 2, "one entry for each token, though it is one character");
    assert_eq!(content[0]["bytes"], json!([0xc3]));
    assert_eq!(content[0]["token"], "\\xc3");
    assert_eq!(content[1]["bytes"], json!([0xa9]));
    assert_eq!(content[0]["logprob"], -0.5);
    assert_eq!(content[0]["top_logprobs"].as_array().unwrap().len(), 2);
    assert_eq!(reply["usage"]["completion_tokens"], 2);
    let prompt = reply["prompt_logprobs"].as_array().unwrap();
    assert_eq!(prompt.len(), engine.last().prompt.len());
    assert!(prompt[0].is_null());
    assert_eq!(prompt[1]["117"], json!({"logprob": -0.5, "rank": 1, "decoded_token": "u"}));

    engine.plan(|plan| plan.say = b"yz".to_vec());
    let reply = client.complete(json!({"logprobs": 1, "echo": true})).await.json();
    let lp = &reply["choices"][0]["logprobs"];
    assert_eq!(lp["tokens"], json!(["h", "i", "y", "z"]));
    assert_eq!(lp["text_offset"], json!([0, 1, 2, 3]));
    assert_eq!(lp["token_logprobs"], json!([null, -0.5, -0.5, -0.5]));
    assert_eq!(lp["top_logprobs"][3], json!({"z": -0.5}));
    let special = json!({"prompt": "<|a|>é!", "logprobs": 0, "echo": true, "max_tokens": 1});
    let reply = client.complete(special.clone()).await.json();
    let lp = &reply["choices"][0]["logprobs"];
    assert_eq!(lp["tokens"], json!(["<|a|>", "bytes:\\xc3", "bytes:\\xa9", "!", "y"]));
    let text = reply["choices"][0]["text"].as_str().unwrap();
    assert_eq!(
        (text, &lp["text_offset"]),
        ("<|a|>é!y", &json!([0, 5, 5, 6, 7])),
        "offsets are into the text"
    );
    let reply = client.complete(json!({"logprobs": 0, "echo": true, "max_tokens": 0})).await.json();
    assert_eq!(reply["choices"][0]["text"], "hi", "no token was asked for");
    assert_eq!(reply["choices"][0]["logprobs"]["tokens"], json!(["h", "i"]));
    assert_eq!(reply["usage"]["completion_tokens"], 0);
}

/// A 400 with this `param`.
async fn refused(reply: common::Reply, param: &str) {
    let error = reply.error();
    assert_eq!((reply.status.as_u16(), error["param"].as_str()), (400, Some(param)), "{}", reply.text);
    let message = error["message"].as_str().unwrap();
    assert!(message.contains(param.split(['[', '.']).next().unwrap()), "{message}");
}

#[tokio::test]
async fn what_is_not_supported_is_refused_by_name() {
    let client = Client::new(FakeEngine::saying("ok"));
    use folio_server::refused::{EVERYWHERE, OTHER_SAMPLERS};
    for (name, _) in EVERYWHERE.iter().chain(OTHER_SAMPLERS) {
        for value in [json!(1), json!("x"), json!({"a": 1}), json!([1]), json!(true)] {
            refused(client.chat(json!({*name: value})).await, name).await;
            refused(client.complete(json!({*name: value})).await, name).await;
        }
        assert_eq!(client.chat(json!({*name: null})).await.status, 200, "null {name} asks for nothing");
    }
    for (name, value) in [
        ("store", json!(true)),
        ("use_beam_search", json!(true)),
        ("service_tier", json!("flex")),
        ("prompt_cache_retention", json!("48h")),
        ("prompt_cache_key", json!("")),
        ("tool_choice", json!("required")),
        ("tool_choice", json!({"type": "function"})),
        ("parallel_tool_calls", json!(true)),
        ("include_reasoning", json!(false)),
        ("reasoning_effort", json!("highest")),
        ("modalities", json!(["text", "audio"])),
        ("spaces_between_special_tokens", json!(false)),
        ("no_such_thing", json!(null)),
        ("no_such_thing", json!(0)),
    ] {
        refused(client.chat(json!({name: value})).await, name).await;
    }
    refused(client.complete(json!({"suffix": "x"})).await, "suffix").await;
    refused(client.complete(json!({"best_of": 3})).await, "best_of").await;
    for name in ["tools", "tool_choice", "parallel_tool_calls", "include_reasoning", "reasoning_effort"] {
        refused(client.complete(json!({name: true})).await, name).await;
    }
    refused(client.complete(json!({"messages": []})).await, "messages").await;
    refused(client.chat(json!({"prompt": "x"})).await, "prompt").await;
    refused(client.chat(json!({"stream_options": {"include_usage": true}})).await, "stream_options").await;
    let reply = client.chat(json!({"stream": true, "stream_options": {"include_obfuscation": true}})).await;
    refused(reply, "stream_options.include_obfuscation").await;
    refused(client.chat(json!({"stream": true, "prompt_logprobs": 1})).await, "prompt_logprobs").await;
}

#[tokio::test]
async fn values_out_of_bounds_are_refused_by_name() {
    let client = Client::new(FakeEngine::saying("ok"));
    let long = "x".repeat(2000);
    for (name, values) in [
        ("temperature", vec![json!(-0.1), json!(2.1), json!("hot"), json!(1e40)]),
        ("top_p", vec![json!(-0.1), json!(1.1)]),
        ("min_p", vec![json!(-0.1), json!(1.1)]),
        ("top_k", vec![json!(-2), json!(1.5)]),
        ("presence_penalty", vec![json!(2.5), json!(-2.5)]),
        ("frequency_penalty", vec![json!(2.5), json!(-2.5)]),
        ("repetition_penalty", vec![json!(0), json!(-1)]),
        ("n", vec![json!(0), json!(9), json!(-1)]),
        ("max_tokens", vec![json!(0), json!(-1), json!("9")]),
        ("max_completion_tokens", vec![json!(0)]),
        ("min_tokens", vec![json!(-1), json!(257)]),
        ("seed", vec![json!(1.5), json!("1")]),
        (
            "stop",
            vec![json!(""), json!(["a", ""]), json!([1]), json!({"a": 1}), json!(long), json!(vec!["a"; 17])],
        ),
        ("stop_token_ids", vec![json!([259]), json!(["a"]), json!(vec![1; 300])]),
        ("logit_bias", vec![json!({"259": 1}), json!({"a": 1}), json!({"1": 101}), json!({"1": 1, "01": 1})]),
        ("top_logprobs", vec![json!(21), json!(-1), json!(1)]),
        ("prompt_logprobs", vec![json!(21)]),
        ("truncate_prompt_tokens", vec![json!(0), json!(-2)]),
        ("request_id", vec![json!("a b"), json!(""), json!(long)]),
        ("stream", vec![json!("yes")]),
        ("user", vec![json!(1)]),
        ("metadata", vec![json!({"a": 1})]),
        ("chat_template_kwargs", vec![json!({"messages": []}), json!(1)]),
        ("continue_final_message", vec![json!(true)]),
        ("messages", vec![json!([]), json!("hi"), json!(null)]),
    ] {
        for value in values {
            refused(client.chat(json!({name: value})).await, name).await;
        }
    }
    refused(client.chat(json!({"max_tokens": 3, "max_completion_tokens": 4})).await, "max_tokens").await;
    for prompt in [
        json!([]),
        json!(""),
        json!([""]),
        json!([[]]),
        json!([1, "a"]),
        json!(["a", 1]),
        json!([259]),
        json!([-1]),
        json!(1),
    ] {
        refused(client.complete(json!({"prompt": prompt})).await, "prompt").await;
    }
}

#[tokio::test]
async fn messages_that_are_not_text_are_refused_by_path() {
    let client = Client::new(FakeEngine::saying("ok"));
    let image = json!({"type": "image_url", "image_url": {"url": "data:..."}});
    for (message, param) in [
        (
            json!({"role": "user", "content": [{"type": "text", "text": "a"}, image]}),
            "messages[1].content[1].image_url",
        ),
        (json!({"role": "alien", "content": "x"}), "messages[1].role"),
        (json!({"role": "function", "content": "x", "name": "f"}), "messages[1].role"),
        (json!({"role": "tool", "content": "x"}), "messages[1].tool_call_id"),
        (json!({"role": "user"}), "messages[1].content"),
        (json!({"role": "user", "content": null}), "messages[1].content"),
        (json!({"content": "x"}), "messages[1].role"),
        (json!({"role": "user", "content": 7}), "messages[1].content"),
        (json!({"role": "user", "content": []}), "messages[1].content"),
        (
            json!({"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}),
            "messages[1].content[0].x",
        ),
        (json!({"role": "assistant", "content": "x", "tool_calls": [{}]}), "messages[1].tool_calls[0].id"),
        (json!({"role": "user", "content": "x", "colour": "red"}), "messages[1].colour"),
        (json!("x"), "messages[1]"),
    ] {
        let reply = client.chat(json!({"messages": [{"role": "user", "content": "a"}, message]})).await;
        let says_so = reply.text.contains("images and sounds are not served");
        assert_eq!(says_so, param.ends_with("image_url"), "{}", reply.text);
        refused(reply, param).await;
    }
    let sdk = json!({"role": "assistant", "content": "x", "refusal": null, "annotations": [], "audio": null,
        "function_call": null, "tool_calls": null});
    assert_eq!(client.chat(json!({"messages": [sdk]})).await.status, 200, "what SDKs send back");
}
