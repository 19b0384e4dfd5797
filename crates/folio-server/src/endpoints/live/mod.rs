//! The page for people at `/`, and the figures that it shows as they come.
//!
//! Owns: three routes: the page, which is the same for everybody and tells nothing; and its figures, for operators. The page is one file that loads
//! nothing: its style and script are in it, and its policy names them by their digests, so nothing else runs there whatever a name or an
//! answer contains.

mod block_map;
mod prefix_tree;
pub(crate) mod sampling;
mod viewers;

use std::sync::{Arc, LazyLock};

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Response, header};
use axum::response::IntoResponse;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use sha2::{Digest, Sha256};

use crate::endpoints::pages::introduction;
use crate::engine::Served;
use crate::http::Shared;
use crate::http::reply::Reply;
use crate::load::Load;
use crate::tenancy::Tenancy;
use crate::tenancy::keys::Scope;
use crate::tenancy::tenant::Tenant;
use crate::threads::NOBODY;
use sampling::LivePage;

/// About how much work it is to tell a page what there is.
const HELLO_BYTES: usize = 64 << 10;

const SCRIPTS: [&str; 7] = [
    include_str!("assets/dom.js"),
    include_str!("assets/stream.js"),
    include_str!("assets/timeline.js"),
    include_str!("assets/figures.js"),
    include_str!("assets/memory.js"),
    include_str!("assets/chat.js"),
    include_str!("assets/main.js"),
];
const STYLE: &str = include_str!("assets/page.css");

/// The page, and its policy.
static PAGE: LazyLock<(Bytes, String)> = LazyLock::new(|| {
    let script = SCRIPTS.concat();
    let html = include_str!("assets/page.html")
        .replacen("<style></style>", &format!("<style>{STYLE}</style>"), 1)
        .replacen(
            "<script type=\"module\"></script>",
            &format!("<script type=\"module\">{script}</script>"),
            1,
        );
    let digest = |text: &str| BASE64_STANDARD.encode(Sha256::digest(text));
    let policy = format!(
        "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
        digest(&script),
        digest(STYLE),
    );
    (html.into(), policy)
});

/// `GET /`: the page for who wants one, or what this is and how to use it, for a terminal.
pub(crate) async fn index(State(served): Shared<Served>, headers: HeaderMap) -> Response<Body> {
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or("");
    let mut response = match accept.contains("text/html") {
        true => page().await,
        false => introduction(&served, &headers).into_response(),
    };
    response.headers_mut().insert(header::VARY, HeaderValue::from_static("accept"));
    response
}

/// `GET /` on the second listener.
pub(crate) async fn page() -> Response<Body> {
    let (html, policy) = &*PAGE;
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, html.clone()).into_response()
}

/// `GET /v1/why/live` on the serving port: of everybody, so for who may see all, as `/v1/why` does.
pub(crate) async fn own(
    State(tenancy): Shared<Tenancy>,
    page: Shared<LivePage>,
    load: Shared<Load>,
    tenant: Tenant,
) -> Reply {
    if !tenancy.tenants.is_open() {
        tenant.check_scope(Scope::Admin)?;
    }
    stream(page, load, true).await
}

/// The same on the second listener, where nobody can talk to the model.
pub(crate) async fn all(page: Shared<LivePage>, load: Shared<Load>) -> Reply {
    stream(page, load, false).await
}

async fn stream(State(page): Shared<LivePage>, State(load): Shared<Load>, chat: bool) -> Reply {
    let page: Arc<LivePage> = page;
    let frames = load.off_thread(NOBODY, HELLO_BYTES, move || page.enter(chat)).await?;
    let headers =
        [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8"), (header::CACHE_CONTROL, "no-cache")];
    let mut response = (headers, Body::from_stream(frames)).into_response();
    // Asks nginx and its like not to hold events back.
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_whole_and_loads_nothing() {
        let (html, policy) = &*PAGE;
        let html = std::str::from_utf8(html).unwrap();
        assert!(html.len() < 128 << 10, "{} bytes", html.len());
        assert!(html.contains(STYLE) && SCRIPTS.iter().all(|script| html.contains(script)));
        let script = SCRIPTS.concat();
        for end in ["</script", "</style", "<!--"] {
            assert!(!script.contains(end) && !STYLE.contains(end), "{end} would end it");
        }
        // Text from outside is only ever text.
        for way in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "http://",
            "https://",
        ] {
            let there = script.replace("http://www.w3.org/2000/svg", "").contains(way);
            assert!(!there && !STYLE.contains(way), "{way}");
        }
        for (start, ends) in [
            ("src=", 0),
            ("href=\"", html.matches("href=\"#").count() + html.matches("href=\"data:,").count()),
        ] {
            assert_eq!(html.split("<script").next().unwrap().matches(start).count(), ends, "{start}");
        }
        assert!(policy.starts_with("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
        assert!(!html.contains('\r'), "a browser would digest another text");
    }
}
