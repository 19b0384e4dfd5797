//! `GET /v1/why`: why serving is as fast as it is; `?request=ID`: why one request took what it took.

use axum::extract::State;
use axum::http::Uri;
use folio_api::ApiError;
use folio_kv::TenantId;

use crate::http::Shared;
use crate::http::reply::{Reply, json_response};
use crate::load::Load;
use crate::observability::Observability;
use crate::tenancy::Tenancy;
use crate::tenancy::keys::Scope;
use crate::tenancy::tenant::Tenant;
use crate::threads::NOBODY;

/// About how much work the report of everybody is.
const REPORT_BYTES: usize = 32 << 10;

/// On the serving port: a tenant's own figures. All of them where there are no keys, or with a key of the scope `admin`.
pub(crate) async fn own(
    State(observability): Shared<Observability>,
    State(tenancy): Shared<Tenancy>,
    load: Shared<Load>,
    tenant: Tenant,
    uri: Uri,
) -> Reply {
    match tenancy.tenants.is_open() || tenant.scopes.has(Scope::Admin) {
        true => all(State(observability), State(tenancy), load, uri).await,
        false => match asked(&uri)? {
            Some(id) => Ok(json_response(explain(&observability, Some(tenant.id), &id)?)),
            None => Ok(json_response(observability.why.tenant(&tenant).to_string())),
        },
    }
}

/// On the second listener.
pub(crate) async fn all(
    State(observability): Shared<Observability>,
    State(tenancy): Shared<Tenancy>,
    State(load): Shared<Load>,
    uri: Uri,
) -> Reply {
    let id = asked(&uri)?;
    let report = load.off_thread(NOBODY, REPORT_BYTES, move || match id {
        Some(id) => explain(&observability, None, &id),
        None => Ok(observability.why.machine(&tenancy.tenants.caches()).to_string()),
    });
    Ok(json_response(report.await?))
}

fn explain(observability: &Observability, tenant: Option<TenantId>, id: &str) -> Result<String, ApiError> {
    let found = observability.why.request(tenant, id).ok_or_else(|| {
        let message = "No request of this id is known here: it is of another key, or not among the last ones. The id is that of the header x-request-id.";
        ApiError { code: Some("request_not_found"), ..ApiError::new(404, "invalid_request_error", message) }
    });
    Ok(found?.to_string())
}

/// The request that is asked about.
fn asked(uri: &Uri) -> Result<Option<String>, ApiError> {
    let mut id = None;
    for (name, value) in form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes()) {
        if name != "request" || id.is_some() || value.is_empty() {
            return Err(ApiError::invalid(
                "request",
                "The only parameter is 'request', the id of one request.",
            ));
        }
        id = Some(value.into_owned());
    }
    Ok(id)
}
