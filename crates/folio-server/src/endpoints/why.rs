//! `GET /v1/why`: why serving is as fast as it is; `?request=ID`: why one request took what it took.

use axum::extract::State;
use axum::http::Uri;
use folio_api::ApiError;
use folio_kv::TenantId;

use crate::http::Shared;
use crate::http::reply::{Reply, json_response};
use crate::observability::Observability;
use crate::tenancy::Tenancy;
use crate::tenancy::keys::Scope;
use crate::tenancy::tenant::Tenant;

/// On the serving port: a tenant's own figures. All of them where there are no keys, or with a key of the scope `admin`.
pub(crate) async fn own(
    State(observability): Shared<Observability>,
    State(tenancy): Shared<Tenancy>,
    tenant: Tenant,
    uri: Uri,
) -> Reply {
    match tenancy.tenants.is_open() || tenant.scopes.has(Scope::Admin) {
        true => all(State(observability), State(tenancy), uri).await,
        false => match asked(&uri)? {
            Some(id) => explain(&observability, Some(tenant.id), &id),
            None => Ok(json_response(observability.why.tenant(&tenant).to_string())),
        },
    }
}

/// On the second listener.
pub(crate) async fn all(
    State(observability): Shared<Observability>,
    State(tenancy): Shared<Tenancy>,
    uri: Uri,
) -> Reply {
    match asked(&uri)? {
        Some(id) => explain(&observability, None, &id),
        None => Ok(json_response(observability.why.machine(&tenancy.tenants.caches()).to_string())),
    }
}

fn explain(observability: &Observability, tenant: Option<TenantId>, id: &str) -> Reply {
    let found = observability.why.request(tenant, id).ok_or_else(|| {
        let message = "No request of this id is known here: it is of another key, or not among the last ones. The id is that of the header x-request-id.";
        ApiError { code: Some("request_not_found"), ..ApiError::new(404, "invalid_request_error", message) }
    });
    Ok(json_response(found?.to_string()))
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
