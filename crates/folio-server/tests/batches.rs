//! `/v1/files` and `/v1/batches`: lines run by the code of their routes, behind everybody else, for whoever made the batch.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{Request, StatusCode};
use common::{Client, FakeEngine, Reply, app, modelled, reply};
use folio_engine::{FinishReason, Rejected, SchedulerConfig};
use folio_server::{BatchConfig, BatchLimits, Engine, Server, ServerConfig};
use serde_json::{Value, json};

fn config(dir: Option<&Path>) -> ServerConfig {
    let limits = BatchLimits { in_flight: 3, lines: 50, file_bytes: 64 << 10, ..BatchLimits::default() };
    ServerConfig {
        api_keys: vec!["alpha".into(), "beta".into()],
        batch: BatchConfig { dir: dir.map(Path::to_owned), limits, ..Default::default() },
        ..Default::default()
    }
}

fn real() -> Arc<dyn Engine> {
    let config = SchedulerConfig { max_model_len: 256, max_num_batched_tokens: 64, ..Default::default() };
    Arc::new(modelled(config, 256, 1))
}

fn clients(engine: Arc<dyn Engine>, dir: Option<&Path>) -> (Client, Client) {
    let server = Server::new(config(dir), app(engine)).unwrap();
    server.resume_batches();
    let client = Client::of(server);
    (client.key("alpha"), client.key("beta"))
}

async fn upload_form(client: &Client, fields: &[(&str, &str)], file: Option<&str>) -> Reply {
    let mut body = String::new();
    for (name, value) in fields {
        body += &format!("--b\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n");
    }
    if let Some(text) = file {
        body += &format!(
            "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"in.jsonl\"\r\n\r\n{text}\r\n"
        );
    }
    let mut request: Request<_> = client.request("POST", "/v1/files", body + "--b--\r\n");
    request.headers_mut().insert("content-type", "multipart/form-data; boundary=b".parse().unwrap());
    reply(client.send(request).await).await
}

async fn upload(client: &Client, text: &str) -> String {
    let file = upload_form(client, &[("purpose", "batch")], Some(text)).await;
    assert_eq!(file.status, StatusCode::OK, "{}", file.text);
    assert_eq!(file.json()["bytes"], text.len());
    file.json()["id"].as_str().unwrap().to_owned()
}

fn line(id: impl std::fmt::Display, url: &str, body: Value) -> String {
    json!({"custom_id": id.to_string(), "method": "POST", "url": url, "body": body}).to_string() + "\n"
}

async fn begin(client: &Client, file: &str, endpoint: &str) -> Value {
    let wanted = json!({"input_file_id": file, "endpoint": endpoint, "completion_window": "24h"});
    let batch = client.post("/v1/batches", &wanted).await;
    assert_eq!(batch.status, StatusCode::OK, "{}", batch.text);
    batch.json()
}

async fn get(client: &Client, path: &str) -> Value {
    let found = client.get(path).await;
    assert_eq!(found.status, StatusCode::OK, "{path}: {}", found.text);
    found.json()
}

/// The batch once `until` is true of it.
async fn wait(client: &Client, batch: &Value, until: impl Fn(&Value) -> bool) -> Value {
    let path = format!("/v1/batches/{}", batch["id"].as_str().unwrap());
    for _ in 0..2000 {
        let now = get(client, &path).await;
        if until(&now) {
            return now;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("still {}", get(client, &path).await);
}

fn is_over(batch: &Value) -> bool {
    ["completed", "failed", "cancelled", "expired"].iter().any(|status| batch["status"] == **status)
}

async fn results(client: &Client, id: &Value) -> Vec<Value> {
    let Some(id) = id.as_str() else { return Vec::new() };
    let text = client.get(&format!("/v1/files/{id}/content")).await.text;
    assert!(text.ends_with('\n'));
    let mut lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    lines.sort_by_key(|line| line["custom_id"].to_string());
    lines
}

#[tokio::test]
async fn every_line_gets_what_its_route_gives() {
    let (client, _) = clients(real(), None);
    let greedy = |extra: Value| common::merged(json!({"max_tokens": 5, "temperature": 0}), extra);
    for (url, bodies) in [
        ("/v1/completions", [greedy(json!({"prompt": "one"})), greedy(json!({"prompt": "two"}))]),
        ("/v1/embeddings", [json!({"input": "one"}), json!({"input": ["two", "three"]})]),
        (
            "/v1/chat/completions",
            ["one", "two"].map(|text| greedy(json!({"messages": [{"role": "user", "content": text}]}))),
        ),
        (
            "/v1/responses",
            ["one", "two"].map(|text| json!({"input": text, "max_output_tokens": 5, "temperature": 0})),
        ),
    ] {
        let mut text: String =
            bodies.iter().enumerate().map(|(id, body)| line(id, url, body.clone())).collect();
        text += &line("wrong", url, json!({"nonsense": 1}));
        let batch = begin(&client, &upload(&client, &text).await, url).await;
        assert_eq!(batch["status"], "validating");
        let batch = wait(&client, &batch, is_over).await;
        assert_eq!(batch["status"], "completed", "{batch}");
        assert_eq!(batch["request_counts"], json!({"total": 3, "completed": 2, "failed": 1}));
        let done = results(&client, &batch["output_file_id"]).await;
        let mut tokens = 0;
        for (id, (line, body)) in done.iter().zip(&bodies).enumerate() {
            assert_eq!((&line["custom_id"], &line["error"]), (&json!(id.to_string()), &Value::Null));
            assert_eq!(line["response"]["status_code"], 200);
            let direct = client.post(url, body).await.json();
            let found = &line["response"]["body"];
            for part in ["choices", "data"] {
                assert_eq!(found[part], direct[part], "{url}");
            }
            if url == "/v1/responses" {
                assert_eq!(found["output"][0]["content"], direct["output"][0]["content"]);
                // Not among those that a client goes on from.
                let id = found["id"].as_str().unwrap();
                assert_eq!(client.get(&format!("/v1/responses/{id}")).await.status, StatusCode::NOT_FOUND);
            }
            tokens += found["usage"]["total_tokens"].as_u64().unwrap();
        }
        assert_eq!(batch["usage"]["total_tokens"], tokens, "{url}");
        let failed = results(&client, &batch["error_file_id"]).await;
        assert_eq!((failed.len(), &failed[0]["custom_id"]), (1, &json!("wrong")));
        assert_eq!(failed[0]["response"]["status_code"], 400);
        assert!(failed[0]["response"]["body"]["error"]["message"].is_string());
    }
}

#[tokio::test]
async fn lines_wait_behind_everybody_and_only_some_run_at_once() {
    let engine = FakeEngine::saying("x");
    engine.plan(|plan| plan.manual = true);
    let (client, _) = clients(engine.clone(), None);
    let body = |priority: i32| json!({"prompt": "hi", "priority": priority});
    let text: String = (0..9).map(|id| line(id, "/v1/completions", body(id * 100_000))).collect();
    let batch = begin(&client, &upload(&client, &text).await, "/v1/completions").await;
    for _ in 0..9 {
        wait_for(|| engine.live() > 0).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(engine.live() <= 3, "{} at once", engine.live());
        while engine.live() > 0 {
            engine.step();
        }
        if engine.requests.lock().unwrap().len() == 9 {
            break;
        }
    }
    let batch = wait(&client, &batch, is_over).await;
    assert_eq!(batch["request_counts"]["completed"], 9);
    assert_eq!(client.metric("folio:batch_lines_total", &["completed"]).await, 9.0);
    assert_eq!(client.metric("folio:batch_lines_running", &[]).await, 0.0);
    let requests = engine.requests.lock().unwrap();
    assert!(
        requests.iter().all(|request| request.priority > 1_000_000),
        "behind whatever clients usually say"
    );
    assert!(requests.iter().any(|request| request.priority == (1 << 20)));
}

async fn wait_for(mut what: impl FnMut() -> bool) {
    for _ in 0..2000 {
        if what() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("it never came");
}

#[tokio::test]
async fn a_cancelled_batch_keeps_what_was_answered() {
    let engine = FakeEngine::saying("x");
    engine.plan(|plan| plan.manual = true);
    let (client, other) = clients(engine.clone(), None);
    let text: String = (0..8).map(|id| line(id, "/v1/completions", json!({"prompt": "hi"}))).collect();
    let file = upload(&client, &text).await;
    let batch = begin(&client, &file, "/v1/completions").await;
    wait_for(|| engine.live() == 3).await;
    while engine.live() > 0 && engine.requests.lock().unwrap().len() == 3 {
        engine.step();
    }
    wait(&client, &batch, |batch| batch["request_counts"]["completed"] == 3).await;
    wait_for(|| engine.live() == 3).await;
    let id = batch["id"].as_str().unwrap().to_owned();
    assert_eq!(client.request_delete(&format!("/v1/files/{file}")).await.status, StatusCode::CONFLICT);
    let path = format!("/v1/batches/{id}/cancel");
    assert_eq!(other.post(&path, &json!({})).await.status, StatusCode::NOT_FOUND);
    assert_eq!(client.post(&path, &json!({})).await.json()["status"], "cancelling");
    wait_for(|| engine.cancelled()).await;
    engine.step();
    let batch = wait(&client, &batch, is_over).await;
    assert_eq!((&batch["status"], &batch["request_counts"]["completed"]), (&json!("cancelled"), &json!(3)));
    assert!(batch["cancelled_at"].is_u64() && batch["cancelling_at"].is_u64());
    assert_eq!(results(&client, &batch["output_file_id"]).await.len(), 3);
    let missed = results(&client, &batch["error_file_id"]).await;
    assert_eq!(missed.len(), 5);
    assert!(missed.iter().all(|line| line["error"]["code"] == "batch_cancelled"));
    assert_eq!(client.post(&path, &json!({})).await.status, StatusCode::OK, "again changes nothing");
    assert_eq!(client.request_delete(&format!("/v1/files/{file}")).await.json()["deleted"], true);
}

#[tokio::test]
async fn a_damaged_file_fails_with_its_lines() {
    let (client, _) = clients(real(), None);
    let good = line("a", "/v1/embeddings", json!({"input": "x"}));
    let text = format!("{good}{{nope\n{good}");
    let batch = begin(&client, &upload(&client, &text).await, "/v1/embeddings").await;
    let batch = wait(&client, &batch, is_over).await;
    assert_eq!(batch["status"], "failed");
    let errors = batch["errors"]["data"].as_array().unwrap();
    let told: Vec<_> = errors.iter().map(|error| (error["line"].as_u64().unwrap(), &error["code"])).collect();
    assert_eq!(told, [(2, &json!("invalid_json_line")), (3, &json!("duplicate_custom_id"))]);
    assert!(batch["failed_at"].is_u64() && batch["output_file_id"].is_null());
    let cancel =
        client.post(&format!("/v1/batches/{}/cancel", batch["id"].as_str().unwrap()), &json!({})).await;
    assert_eq!(cancel.error()["code"], "batch_not_cancellable");
    let many: String = (0..51).map(|id| line(id, "/v1/embeddings", json!({"input": "x"}))).collect();
    let batch = begin(&client, &upload(&client, &many).await, "/v1/embeddings").await;
    assert_eq!(wait(&client, &batch, is_over).await["errors"]["data"][0]["code"], "too_many_lines");
}

#[tokio::test]
async fn another_tenants_files_and_batches_do_not_exist() {
    let (alpha, beta) = clients(real(), None);
    let file = upload(&alpha, &line("a", "/v1/embeddings", json!({"input": "x"}))).await;
    let batch = begin(&alpha, &file, "/v1/embeddings").await;
    let batch = wait(&alpha, &batch, is_over).await;
    let (id, output) = (batch["id"].as_str().unwrap(), batch["output_file_id"].as_str().unwrap());
    for path in [
        format!("/v1/files/{file}"),
        format!("/v1/files/{file}/content"),
        format!("/v1/files/{output}/content"),
        format!("/v1/batches/{id}"),
    ] {
        let (theirs, none) = (beta.get(&path).await, beta.get(&path.replace(['0', '7'], "1")).await);
        assert_eq!((theirs.status, none.status), (StatusCode::NOT_FOUND, StatusCode::NOT_FOUND), "{path}");
        assert_eq!(theirs.error()["code"], none.error()["code"]);
        assert_eq!(alpha.get(&path).await.status, StatusCode::OK);
    }
    assert_eq!(beta.request_delete(&format!("/v1/files/{file}")).await.status, StatusCode::NOT_FOUND);
    let stolen = json!({"input_file_id": file, "endpoint": "/v1/embeddings", "completion_window": "24h"});
    assert_eq!(beta.post("/v1/batches", &stolen).await.error()["code"], "file_not_found");
    for list in ["/v1/files", "/v1/batches"] {
        assert_eq!(get(&beta, list).await["data"], json!([]));
    }
    assert_eq!(get(&alpha, "/v1/files").await["data"].as_array().unwrap().len(), 2);
    assert_eq!(get(&alpha, "/v1/files?purpose=batch_output").await["data"][0]["id"], output);
    assert_eq!(get(&alpha, "/v1/batches").await["data"][0]["id"], id);
}

#[tokio::test]
async fn lists_have_pages() {
    let (client, _) = clients(real(), None);
    let mut ids = Vec::new();
    for _ in 0..5 {
        ids.push(upload(&client, "x\n").await);
    }
    let page = get(&client, "/v1/files?limit=2&order=asc").await;
    assert_eq!(
        (&page["first_id"], &page["last_id"], &page["has_more"]),
        (&json!(ids[0]), &json!(ids[1]), &json!(true))
    );
    let rest = get(&client, &format!("/v1/files?limit=9&order=asc&after={}", ids[1])).await;
    assert_eq!((rest["data"].as_array().unwrap().len(), &rest["has_more"]), (3, &json!(false)));
    assert_eq!(get(&client, "/v1/files").await["data"][0]["id"], json!(ids[4]), "newest first");
    for (path, param) in [
        ("/v1/files?limit=0", "limit"),
        ("/v1/files?order=up", "order"),
        ("/v1/files?after=x", "after"),
        ("/v1/batches?limit=101", "limit"),
        ("/v1/batches?status=x", "status"),
    ] {
        assert_eq!(client.get(path).await.error()["param"], param, "{path}");
    }
}

#[tokio::test]
async fn what_is_wrong_is_refused_by_name() {
    let (client, _) = clients(real(), None);
    let batch = [("purpose", "batch")];
    for (fields, file, param) in [
        (&batch[..], None, "file"),
        (&[], Some("x"), "purpose"),
        (&[("purpose", "fine-tune")], Some("x"), "purpose"),
        (&batch[..], Some(""), "file"),
        (&[("purpose", "batch"), ("more", "1")], Some("x"), "more"),
        (&[("purpose", "batch"), ("expires_after[anchor]", "created_at")], Some("x"), "expires_after"),
        (
            &[("purpose", "batch"), ("expires_after[anchor]", "created_at"), ("expires_after[seconds]", "5")],
            Some("x"),
            "expires_after[seconds]",
        ),
    ] {
        let refused = upload_form(&client, fields, file).await;
        assert_eq!((refused.status.as_u16(), &refused.error()["param"]), (400, &json!(param)), "{fields:?}");
    }
    let large = upload_form(&client, &batch, Some(&"x".repeat(64 << 10 | 1))).await;
    assert_eq!(large.status, StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(client.post("/v1/files", &json!({})).await.status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
    let file = upload(&client, "x").await;
    let good = json!({"input_file_id": file, "endpoint": "/v1/embeddings", "completion_window": "24h"});
    for (change, param) in [
        (json!({"endpoint": "/v1/images/edits"}), "endpoint"),
        (json!({"completion_window": "1h"}), "completion_window"),
        (json!({"input_file_id": "file-none"}), "input_file_id"),
        (json!({"metadata": {"a": 1}}), "metadata"),
        (
            json!({"output_expires_after": {"anchor": "created_at", "seconds": 1}}),
            "output_expires_after.seconds",
        ),
        (json!({"more": 1}), "more"),
    ] {
        let refused = client.post("/v1/batches", &common::merged(good.clone(), change)).await;
        assert_eq!((refused.status.as_u16(), &refused.error()["param"]), (400, &json!(param)));
    }
}

/// A server that ends like a killed one, with three of a batch's eight lines answered and three running.
async fn killed(folder: &Path) -> (String, Value) {
    let text: String = (0..8).map(|id| line(id, "/v1/completions", json!({"prompt": "hi"}))).collect();
    let engine = FakeEngine::saying("x");
    engine.plan(|plan| plan.manual = true);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let path = folder.to_owned();
    let begun = runtime.spawn(async move {
        let (client, _) = clients(engine.clone(), Some(&path));
        let file = upload(&client, &text).await;
        let batch = begin(&client, &file, "/v1/completions").await;
        wait_for(|| engine.live() == 3).await;
        while engine.live() > 0 && engine.requests.lock().unwrap().len() == 3 {
            engine.step();
        }
        let batch = wait(&client, &batch, |batch| batch["request_counts"]["completed"] == 3).await;
        (file, batch)
    });
    let begun = begun.await.unwrap();
    runtime.shutdown_background();
    // Until its tasks, and with them its lock, are gone.
    for _ in 0..500 {
        let lock = std::fs::File::open(folder.join("lock")).unwrap();
        if lock.try_lock().is_ok() {
            return begun;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("it did not end");
}

#[tokio::test]
async fn a_batch_whose_window_ended_keeps_what_was_answered() {
    let folder = tempfile::tempdir().unwrap();
    let (_, batch) = killed(folder.path()).await;
    let path = folder.path().join("batches").join(format!("{}.json", batch["id"].as_str().unwrap()));
    let mut record: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    record["expires_at"] = json!(batch["created_at"]);
    std::fs::write(&path, record.to_string()).unwrap();
    let engine = FakeEngine::saying("x");
    engine.plan(|plan| plan.manual = true);
    let (client, _) = clients(engine, Some(folder.path()));
    let batch = wait(&client, &batch, is_over).await;
    assert_eq!((&batch["status"], batch["expired_at"].is_u64()), (&json!("expired"), true));
    assert_eq!(batch["request_counts"], json!({"total": 8, "completed": 3, "failed": 0}));
    assert_eq!(results(&client, &batch["output_file_id"]).await.len(), 3);
    let missed = results(&client, &batch["error_file_id"]).await;
    assert_eq!(missed.len(), 5);
    assert!(missed.iter().all(|line| line["error"]["code"] == "batch_expired"));
}

#[tokio::test]
async fn a_batch_goes_on_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let (file, batch) = killed(folder.path()).await;
    #[cfg(unix)]
    for part in ["files", "batches"] {
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::metadata(folder.path().join(part)).unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "{part} is nobody else's to read");
    }
    // A line that was cut short, and what belongs to nothing.
    let results_of = |folder: &Path| -> Vec<_> {
        let data = std::fs::read_dir(folder.join("files")).unwrap().map(|entry| entry.unwrap().path());
        data.filter(|path| {
            path.extension().is_some_and(|e| e == "data") && !path.with_extension("json").exists()
        })
        .collect()
    };
    let partial = results_of(folder.path());
    assert_eq!(partial.len(), 2);
    for path in &partial {
        let mut bytes = std::fs::read(path).unwrap();
        bytes.extend(b"{\"custom_id\": \"7\", \"resp");
        std::fs::write(path, bytes).unwrap();
    }
    std::fs::write(folder.path().join("files/file-orphan.data"), "x").unwrap();
    std::fs::write(folder.path().join("files/file-orphan.new"), "x").unwrap();

    let engine = FakeEngine::saying("x");
    let (client, other) = clients(engine.clone(), Some(folder.path()));
    let batch = wait(&client, &batch, is_over).await;
    assert_eq!(batch["status"], "completed");
    assert_eq!(batch["request_counts"], json!({"total": 8, "completed": 8, "failed": 0}));
    assert_eq!(engine.requests.lock().unwrap().len(), 5, "what has a result is not run again");
    let done = results(&client, &batch["output_file_id"]).await;
    let ids: Vec<_> = done.iter().map(|line| line["custom_id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["0", "1", "2", "3", "4", "5", "6", "7"]);
    assert_eq!(other.get(&format!("/v1/files/{file}")).await.status, StatusCode::NOT_FOUND);
    assert!(!folder.path().join("files/file-orphan.data").exists());
    assert_eq!(results_of(folder.path()), Vec::<std::path::PathBuf>::new());

    // The folder is one server's at a time.
    let second = Server::new(config(Some(folder.path())), app(FakeEngine::saying("x")));
    assert!(second.err().unwrap().to_string().contains("another server"));
}

#[tokio::test]
async fn what_is_told_to_come_again_does() {
    let engine = FakeEngine::saying("x");
    engine.plan(|plan| {
        plan.reject = Some(Rejected::QueueFull { queued_requests: 1, queued_tokens: 1, retry_after_s: 1 });
        plan.accept = 1;
    });
    let (client, _) = clients(engine.clone(), None);
    let text: String = (0..3).map(|id| line(id, "/v1/completions", json!({"prompt": "hi"}))).collect();
    let batch = begin(&client, &upload(&client, &text).await, "/v1/completions").await;
    let batch = wait(&client, &batch, is_over).await;
    assert_eq!(batch["request_counts"], json!({"total": 3, "completed": 3, "failed": 0}));
}

/// Routers read from `/load` how much a server has to do.
#[tokio::test]
async fn a_line_is_one_generation_in_flight() {
    let engine = FakeEngine::saying("x");
    engine.plan(|plan| plan.manual = true);
    let (client, _) = clients(engine.clone(), None);
    for (url, body) in
        [("/v1/completions", json!({"prompt": "hi"})), ("/v1/embeddings", json!({"input": "hi"}))]
    {
        let text = line("a", url, body);
        let batch = begin(&client, &upload(&client, &text).await, url).await;
        wait_for(|| engine.live() == 1).await;
        assert_eq!(get(&client, "/load").await["server_load"], 1, "{url}");
        assert_eq!(client.metric("folio:batch_lines_running", &[]).await, 1.0);
        client.post(&format!("/v1/batches/{}/cancel", batch["id"].as_str().unwrap()), &json!({})).await;
        wait_for(|| engine.cancelled()).await;
        engine.step();
        wait(&client, &batch, is_over).await;
        wait_for(|| engine.live() == 0).await;
    }
    assert_eq!(get(&client, "/load").await["server_load"], 0);
}

#[tokio::test]
async fn a_folder_that_is_damaged_is_refused_by_the_files_name() {
    let folder = tempfile::tempdir().unwrap();
    drop(Server::new(config(Some(folder.path())), app(real())).unwrap());
    std::fs::write(folder.path().join("batches/batch_1.json"), "{").unwrap();
    let refused = Server::new(config(Some(folder.path())), app(real())).err().unwrap().to_string();
    assert!(refused.contains("batch_1.json"), "{refused}");
}

/// Two tenants, of whom one may send two requests in a minute; one line runs at a time.
fn one_at_a_time() -> ServerConfig {
    let tenants = json!({"tenants": [{"name": "slow", "keys": ["s"], "limits": {"requests_per_minute": 2}},
        {"name": "fast", "keys": ["f"]}]});
    let tenants = folio_server::Declared::parse(&tenants.to_string(), &|_| None).unwrap();
    let limits = BatchLimits { in_flight: 1, ..BatchLimits::default() };
    ServerConfig { tenants, batch: BatchConfig { limits, ..Default::default() }, ..Default::default() }
}

#[tokio::test]
async fn a_line_that_is_told_to_come_again_gives_its_turn_back() {
    let client = Client::with(one_at_a_time(), app(FakeEngine::saying("x")));
    let (slow, fast) = (client.key("s"), client.key("f"));
    let text: String = (0..3).map(|id| line(id, "/v1/completions", json!({"prompt": "hi"}))).collect();
    // Its two requests of this minute.
    let waits = begin(&slow, &upload(&slow, &text).await, "/v1/completions").await;
    wait(&slow, &waits, |batch| batch["status"] == "in_progress").await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    let batch = begin(&fast, &upload(&fast, &text).await, "/v1/completions").await;
    let batch = wait(&fast, &batch, is_over).await;
    assert_eq!(batch["request_counts"], json!({"total": 3, "completed": 3, "failed": 0}));
    let page = client.get("/metrics").await.text;
    assert!(
        page.contains("folio:batch_lines_running{model_name=\"test-model\"} 0"),
        "nobody has a turn and sleeps"
    );
}

#[tokio::test]
async fn a_batch_has_the_rights_of_its_key_and_ends_with_it() {
    use folio_server::keys::{self, NewKey, Scope};
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys.redb");
    let make = |scopes: &[Scope]| {
        let new =
            NewKey { tenant: "acme".into(), name: String::new(), scopes: scopes.into(), expires_s: None };
        keys::create(&path, new, folio_server::unix_s()).unwrap()
    };
    let (record, key) = make(&Scope::DEFAULT);
    let (_, narrow) = make(&[Scope::Batch]);
    let engine = FakeEngine::saying("x");
    engine.plan(|plan| plan.manual = true);
    let config = ServerConfig { key_file: Some(path.clone()), ..one_at_a_time() };
    let client = Client::with(config, app(engine.clone()));
    let (acme, narrow) = (client.key(&key), client.key(&narrow));
    let text: String = (0..3).map(|id| line(id, "/v1/completions", json!({"prompt": "hi"}))).collect();
    let file = upload(&narrow, &text).await;
    let wanted = json!({"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"});
    let refused = narrow.post("/v1/batches", &wanted).await;
    assert_eq!(
        (refused.status, refused.error()["code"].as_str()),
        (StatusCode::FORBIDDEN, Some("insufficient_scope"))
    );
    let batch = begin(&acme, &file, "/v1/completions").await;
    wait_for(|| engine.live() == 1).await;
    keys::revoke(&path, &record.id, folio_server::unix_s()).unwrap();
    engine.plan(|plan| plan.manual = false);
    while engine.live() > 0 {
        engine.step();
    }
    let batch = wait(&narrow, &batch, is_over).await;
    assert_eq!(
        (&batch["status"], &batch["errors"]["data"][0]["code"]),
        (&json!("failed"), &json!("invalid_api_key"))
    );
    assert_eq!(results(&narrow, &batch["output_file_id"]).await.len(), 1, "what was answered is kept");
}

/// The sample was written before records had a version.
#[tokio::test]
async fn a_folder_of_an_older_version_opens_and_its_batches_go_on() {
    let (sample, folder) = (Path::new("tests/data/batch-folder-0"), tempfile::tempdir().unwrap());
    for part in ["files", "batches"] {
        std::fs::create_dir(folder.path().join(part)).unwrap();
        for entry in std::fs::read_dir(sample.join(part)).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), folder.path().join(part).join(entry.file_name())).unwrap();
        }
    }
    let mut config = config(Some(folder.path()));
    config.api_keys.clear();
    let server = Server::new(config.clone(), app(FakeEngine::saying("now"))).unwrap();
    server.resume_batches();
    let client = Client::of(server);
    assert_eq!(get(&client, "/v1/batches/batch_done").await["status"], "failed");
    let batch = wait(&client, &json!({"id": "batch_open"}), is_over).await;
    assert_eq!((&batch["status"], &batch["metadata"]["a"]), (&json!("completed"), &json!("b")), "{batch}");
    let lines = results(&client, &batch["output_file_id"]).await;
    assert_eq!(lines[0]["response"]["body"]["choices"][0]["text"], "as before");
    assert_eq!(lines[1]["response"]["body"]["choices"][0]["text"], "now");
    let path = folder.path().join("batches/batch_open.json");
    let read = || serde_json::from_slice::<Value>(&std::fs::read(&path).unwrap()).unwrap();
    // It is seen to be over before that is written down.
    while read()["status"] != "completed" {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let written = read();
    assert_eq!(written["version"], 1);
    drop(client);
    std::fs::write(&path, common::merged(written, json!({"version": 2})).to_string()).unwrap();
    // The batch's task may have the folder for a moment longer.
    let mut refused = String::new();
    for _ in 0..200 {
        refused = Server::new(config.clone(), app(FakeEngine::saying(""))).err().unwrap().to_string();
        if !refused.contains("another server") {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(refused.contains("batch_open.json") && refused.contains("newer version"), "{refused}");
}

/// Each of them once held a thread of those that read prompts.
#[tokio::test]
async fn readers_of_files_that_do_not_read_hold_no_thread() {
    const READERS: usize = 600;
    let limits = BatchLimits { file_bytes: 4 << 20, ..BatchLimits::default() };
    let batch = BatchConfig { limits, ..Default::default() };
    let keys = vec!["alpha".into(), "beta".into()];
    let client = Client::with(
        ServerConfig { api_keys: keys, batch, ..Default::default() },
        app(FakeEngine::saying("ok")),
    );
    let (alpha, beta) = (client.key("alpha"), client.key("beta"));
    let text = line(1, "/v1/completions", json!({"prompt": "x".repeat(3 << 20)}));
    let path = format!("/v1/files/{}/content", upload(&alpha, &text).await);
    let mut readers = Vec::new();
    for _ in 0..READERS {
        let response = alpha.send(alpha.request("GET", &path, "")).await;
        assert_eq!(response.status(), StatusCode::OK);
        readers.push(response);
    }
    // Not so short that it is read on the event loop.
    let asked = json!({"prompt": "hi ".repeat(600), "truncate_prompt_tokens": 4, "max_tokens": 1});
    let answered = tokio::time::timeout(Duration::from_secs(60), beta.post("/v1/completions", &asked)).await;
    assert_eq!(answered.expect("prompts are read").status, StatusCode::OK);
    let held = beta.metric("folio:in_flight_bytes", &[]).await as usize;
    assert_eq!(held, READERS * (64 << 10), "what each may take in memory is counted");
    // Whoever reads gets all of it, in pieces.
    let whole = reply(readers.pop().unwrap()).await;
    assert!(whole.text == text, "{} of {}", whole.text.len(), text.len());
    drop(readers);
    for _ in 0..1000 {
        if beta.metric("folio:in_flight_bytes", &[]).await == 0.0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("what was held is not given back");
}

/// The same of a list of vectors of which a part is there already.
#[tokio::test]
async fn a_part_of_a_line_that_is_told_to_come_again_gives_the_turn_back() {
    let engine = FakeEngine::saying("");
    engine.plan(|plan| {
        plan.end = Some(FinishReason::Stop);
        plan.reject = Some(Rejected::QueueFull { queued_requests: 1, queued_tokens: 1, retry_after_s: 30 });
        plan.accept = 256;
    });
    let limits = BatchLimits { in_flight: 1, ..BatchLimits::default() };
    let batch = BatchConfig { limits, ..Default::default() };
    let client = Client::with(ServerConfig { batch, ..Default::default() }, app(engine.clone()));
    let long = line("long", "/v1/embeddings", json!({"input": vec![vec![7u32]; 300]}));
    let long = begin(&client, &upload(&client, &long).await, "/v1/embeddings").await;
    wait_for(|| engine.requests.lock().unwrap().len() >= 256).await;
    let short = line("short", "/v1/embeddings", json!({"input": "hi"}));
    let short = begin(&client, &upload(&client, &short).await, "/v1/embeddings").await;
    let short = wait(&client, &short, is_over).await;
    assert_eq!(short["request_counts"]["completed"], 1, "{short}");
    let long = get(&client, &format!("/v1/batches/{}", long["id"].as_str().unwrap())).await;
    assert!(!is_over(&long), "it waits for half a minute: {long}");
}

#[tokio::test]
async fn lists_are_read_a_page_at_a_time() {
    let engine = FakeEngine::saying("x");
    let (client, other) = clients(engine, None);
    let file = upload(&client, &line(1, "/v1/completions", json!({"prompt": "hi"}))).await;
    let mut made = Vec::new();
    for _ in 0..5 {
        let batch = begin(&client, &file, "/v1/completions").await;
        made.insert(0, batch["id"].clone());
        wait(&client, &batch, is_over).await;
    }
    let ids = |page: &Value| {
        page["data"].as_array().unwrap().iter().map(|batch| batch["id"].clone()).collect::<Vec<_>>()
    };
    let first = get(&client, "/v1/batches?limit=2").await;
    assert_eq!((ids(&first), &first["has_more"]), (made[..2].to_vec(), &json!(true)));
    assert_eq!((&first["first_id"], &first["last_id"]), (&made[0], &made[1]));
    let second = get(&client, &format!("/v1/batches?limit=2&after={}", made[1].as_str().unwrap())).await;
    assert_eq!((ids(&second), &second["has_more"]), (made[2..4].to_vec(), &json!(true)));
    let last = get(&client, &format!("/v1/batches?limit=2&after={}", made[3].as_str().unwrap())).await;
    assert_eq!((ids(&last), &last["has_more"]), (made[4..].to_vec(), &json!(false)));
    assert_eq!(ids(&get(&client, "/v1/batches").await), made);
    let path = format!("/v1/batches?after={}", made[1].as_str().unwrap());
    assert_eq!(other.get(&path).await.status, StatusCode::BAD_REQUEST, "another's id is none");
    let none = get(&other, "/v1/batches").await;
    assert_eq!((ids(&none), &none["first_id"], &none["has_more"]), (Vec::new(), &Value::Null, &json!(false)));
}

/// A tenant has so many files, and half of the room at most.
#[tokio::test]
async fn files_of_one_tenant_leave_room_to_others() {
    let config = ServerConfig {
        batch: BatchConfig { storage_bytes: Some(20_000), ..Default::default() },
        api_keys: vec!["alpha".into(), "beta".into()],
        ..Default::default()
    };
    let client = Client::with(config, app(FakeEngine::saying("x")));
    let (client, other) = (client.key("alpha"), client.key("beta"));
    let upload_of = async |client: &Client, bytes: usize| {
        upload_form(client, &[("purpose", "batch")], Some(&"x".repeat(bytes))).await
    };
    let refused = |reply: &Reply, says: &str| {
        assert_eq!((reply.status.as_u16(), &reply.error()["code"]), (413, &json!("storage_full")));
        assert!(reply.error()["message"].as_str().unwrap().contains(says), "{}", reply.text);
    };
    let first = upload_of(&client, 6000).await.json();
    refused(&upload_of(&client, 4001).await, "room");
    assert_eq!(upload_of(&client, 4000).await.status, StatusCode::OK, "half of it");
    refused(&upload_of(&client, 1).await, "room");
    assert_eq!(upload_of(&other, 10_000).await.status, StatusCode::OK, "the other half");
    refused(&upload_of(&other, 1).await, "room");
    let path = format!("/v1/files/{}", first["id"].as_str().unwrap());
    assert_eq!(client.request_delete(&path).await.status, StatusCode::OK);
    // One is left of those before.
    for _ in 0..999 {
        assert_eq!(upload_of(&client, 1).await.status, StatusCode::OK);
    }
    refused(&upload_of(&client, 1).await, "1000 files");
    refused(&upload_of(&other, 1).await, "room");
}

/// It takes none of its tenant's room, and no name in the folder.
#[tokio::test]
async fn a_file_that_cannot_be_written_is_refused_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let limits = BatchLimits { files: 2, ..config(None).batch.limits };
    let batch = BatchConfig { dir: Some(folder.path().to_owned()), limits, ..Default::default() };
    let client = Client::with(ServerConfig { batch, ..Default::default() }, app(FakeEngine::saying("x")));
    let (files, elsewhere) = (folder.path().join("files"), folder.path().join("elsewhere"));
    let put = async || upload_form(&client, &[("purpose", "batch")], Some(&"x".repeat(1000))).await;
    std::fs::rename(&files, &elsewhere).unwrap();
    for _ in 0..5 {
        let refused = put().await;
        assert_eq!((refused.status.as_u16(), &refused.error()["code"]), (500, &json!("storage")));
    }
    assert_eq!(get(&client, "/v1/files").await["data"], json!([]));
    std::fs::rename(&elsewhere, &files).unwrap();
    assert_eq!(std::fs::read_dir(&files).unwrap().count(), 0);
    for status in [200, 200, 413] {
        assert_eq!(put().await.status.as_u16(), status, "the limit is two files");
    }
}

/// Results have the same room as files: a batch for which there is none ends, and what was answered is there.
#[tokio::test]
async fn a_batch_whose_results_do_not_fit_ends() {
    let engine = FakeEngine::saying("x");
    let file: String =
        (0..8).map(|id| line(id, "/v1/completions", json!({"prompt": "hi", "max_tokens": 1}))).collect();
    // Its file, and some of its results.
    let room = Some(2 * (file.len() as u64 + 2500));
    let batch = BatchConfig { storage_bytes: room, ..Default::default() };
    let client = Client::with(ServerConfig { batch, ..Default::default() }, app(engine));
    let ended = begin(&client, &upload(&client, &file).await, "/v1/completions").await;
    let ended = wait(&client, &ended, is_over).await;
    assert_eq!(
        (&ended["status"], &ended["errors"]["data"][0]["code"]),
        (&json!("failed"), &json!("storage_full"))
    );
    let done = results(&client, &ended["output_file_id"]).await.len() as u64;
    assert!((1..8).contains(&done) && ended["request_counts"]["completed"] == done, "{ended}");
}

/// What a batch answers is not among the responses that a client goes on from, unless its line says so.
#[tokio::test]
async fn a_response_of_a_batch_is_stored_where_its_line_says_so() {
    let (client, _) = clients(FakeEngine::saying("x"), None);
    let asked = |store: Value| common::merged(json!({"input": "hi", "max_output_tokens": 1}), store);
    let lines = [json!({}), json!({"store": false}), json!({"store": true})];
    let text: String =
        lines.into_iter().enumerate().map(|(id, store)| line(id, "/v1/responses", asked(store))).collect();
    let ended = begin(&client, &upload(&client, &text).await, "/v1/responses").await;
    let ended = wait(&client, &ended, is_over).await;
    let done = results(&client, &ended["output_file_id"]).await;
    assert_eq!(done.len(), 3, "{ended}");
    for (line, stored) in done.iter().zip([false, false, true]) {
        let body = &line["response"]["body"];
        let found = client.get(&format!("/v1/responses/{}", body["id"].as_str().unwrap())).await.status;
        assert_eq!((&body["store"], found == StatusCode::OK), (&json!(stored), stored), "{line}");
    }
}

/// With a key of somebody who may not use it, the name of an adapter is one that does not exist.
#[tokio::test]
async fn a_line_that_names_an_adapter_of_others_is_one_of_no_model() {
    let tenants = json!({"tenants": [{"name": "acme", "keys": ["a"], "adapters": ["sql"]},
        {"name": "other", "keys": ["o"], "adapters": []}]});
    let tenants = folio_server::Declared::parse(&tenants.to_string(), &|_| None).unwrap();
    let config = ServerConfig { tenants, ..config(None) };
    let engine = FakeEngine::saying("x");
    let server = Server::new(config, common::app_with_adapters(engine.clone(), &["sql"])).unwrap();
    server.resume_batches();
    let client = Client::of(server);
    for (url, body) in [
        ("/v1/completions", json!({"prompt": "hi"})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "hi"}]})),
        ("/v1/responses", json!({"input": "hi"})),
        ("/v1/embeddings", json!({"input": "hi"})),
    ] {
        let named = |name: &str| line(name, url, common::merged(body.clone(), json!({"model": name})));
        let text = named("sql") + &named("nil");
        let (acme, other) = (client.key("a"), client.key("o"));
        let batch = begin(&acme, &upload(&acme, &text).await, url).await;
        let batch = wait(&acme, &batch, is_over).await;
        assert_eq!(batch["request_counts"], json!({"total": 2, "completed": 1, "failed": 1}), "{url}");
        assert!(engine.requests.lock().unwrap().iter().any(|request| request.adapter.is_some()));
        let batch = begin(&other, &upload(&other, &text).await, url).await;
        let batch = wait(&other, &batch, is_over).await;
        assert_eq!(batch["request_counts"], json!({"total": 2, "completed": 0, "failed": 2}), "{url}");
        let failed = results(&other, &batch["error_file_id"]).await;
        let answers: Vec<_> = failed.iter().map(|line| &line["response"]["body"]).collect();
        assert_eq!(failed[1]["response"]["status_code"], 404);
        assert_eq!(answers[0].to_string(), answers[1].to_string().replace("sql", "nil"), "{url}");
    }
}
