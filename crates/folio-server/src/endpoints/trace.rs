//! `GET /v1/trace?seconds=N`: what comes and is computed in the next seconds, as a file for Perfetto and `folio trace replay`.

use std::time::Duration;

use axum::extract::State;
use axum::http::Uri;
use folio_api::ApiError;

use crate::engine::Served;
use crate::http::Shared;
use crate::http::reply::{Reply, json_response};
use crate::load::Load;
use crate::observability::Observability;
use crate::observability::recording::{NotRecorded, SECONDS_MAX};
use crate::tenancy::Tenancy;
use crate::tenancy::keys::Scope;
use crate::tenancy::tenant::Tenant;
use crate::threads::NOBODY;

const SECONDS: u64 = 10;
/// About how much work the file is.
const FILE_BYTES: usize = 1 << 20;

/// On the serving port: where there are no keys, or with a key of the scope `admin`. It is everybody's traffic.
pub(crate) async fn own(
    State(tenancy): Shared<Tenancy>,
    observability: Shared<Observability>,
    served: Shared<Served>,
    load: Shared<Load>,
    tenant: Tenant,
    uri: Uri,
) -> Reply {
    if !tenancy.tenants.is_open() {
        tenant.check_scope(Scope::Admin)?;
    }
    all(observability, served, load, uri).await
}

/// On the second listener.
pub(crate) async fn all(
    State(observability): Shared<Observability>,
    State(served): Shared<Served>,
    State(load): Shared<Load>,
    uri: Uri,
) -> Reply {
    let seconds = asked(&uri)?;
    let recording = observability.recorder.record(Duration::from_secs(seconds)).await.map_err(refused)?;
    let file = load.off_thread(NOBODY, FILE_BYTES, move || Ok(recording.json(served.name())));
    Ok(json_response(file.await?))
}

fn refused(why: NotRecorded) -> ApiError {
    match why {
        NotRecorded::Busy => {
            let message = "Somebody records already; there is one recording at a time.";
            ApiError { code: Some("recording"), ..ApiError::new(409, "invalid_request_error", message) }
        }
        NotRecorded::Thread(error) => ApiError::new(
            503,
            "server_error",
            format!("Nothing is recorded, for its thread could not be started: {error}."),
        ),
    }
}

fn asked(uri: &Uri) -> Result<u64, ApiError> {
    let mut seconds = None;
    for (name, value) in form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes()) {
        let number = value.parse::<u64>().ok().filter(|number| (1..=SECONDS_MAX).contains(number));
        match number {
            Some(number) if name == "seconds" && seconds.is_none() => seconds = Some(number),
            _ => {
                let message =
                    format!("The only parameter is 'seconds', how long to record: 1 to {SECONDS_MAX}.");
                return Err(ApiError::invalid("seconds", message));
            }
        }
    }
    Ok(seconds.unwrap_or(SECONDS))
}
