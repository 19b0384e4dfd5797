//! Text threads share the processors with the event loop and the engine: a large request gives way to them while it is read and tokenized.
//! Counted is how often, by all threads of the process, so this is its only test.

mod common;

use common::{Client, FakeEngine, app};
use folio_server::ServerConfig;
use folio_text::work::{GIVES_WAY_EVERY, given_way};
use serde_json::json;

#[tokio::test]
async fn large_requests_give_way_while_they_are_read_and_tokenized() {
    let mut app = app(FakeEngine::saying("ok"));
    app.model.context_length = 1 << 22;
    let client = Client::with(ServerConfig::default(), app);
    let gave = async |path: &str, body: String, status: u16| {
        let before = given_way();
        let response = client.send(client.request("POST", path, body)).await;
        assert_eq!(response.status().as_u16(), status);
        given_way() - before
    };
    assert_eq!(
        gave("/tokenize", json!({"prompt": "ab ".repeat(1000)}).to_string(), 200).await,
        0,
        "it is short"
    );
    // Values of 32 bytes are moved, twice.
    let values = json!({"prompt": vec![[1; 8]; 28_000], "max_tokens": 1}).to_string();
    let times = gave("/v1/completions", values, 400).await;
    let moved = 28_000 * 9 * 32 / GIVES_WAY_EVERY;
    assert!(times >= moved, "{times} times; {moved} for the values alone");
    let text = json!({"prompt": "ab ".repeat(300_000)}).to_string();
    let times = gave("/tokenize", text, 200).await;
    assert!(times >= 1, "{times} times");
}
