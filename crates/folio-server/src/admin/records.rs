//! `GET /v1/usage/records`: usage by time, key and model, as JSON or CSV; of the asking tenant, or of all on the admin listener.
//!
//! Owns: the query and the two formats. Must never: count anything; the records are [`crate::observability::usage`]'s.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Response, Uri, header};
use serde_json::{Value, json};

use crate::http::Shared;
use crate::http::reply::{Reply, json_response};
use crate::observability::Observability;
use crate::observability::usage::{Count, RowKey};
use crate::tenancy::tenant::Tenant;
use folio_api::{ApiError, unix_s};

/// Rows of one answer.
const ROWS_MAX: usize = 100_000;
const DAY_S: u64 = 86_400;

#[derive(Debug, PartialEq)]
struct RecordsQuery {
    /// Unix seconds; whole minutes that begin in here.
    from: u64,
    to: u64,
    width_s: u64,
    by_key: bool,
    by_model: bool,
    csv: bool,
}

impl RecordsQuery {
    fn read(query: &str, csv: bool, now_s: u64) -> Result<Self, ApiError> {
        let mut wanted = Self {
            from: now_s.saturating_sub(DAY_S),
            to: now_s + 1,
            width_s: DAY_S,
            by_key: true,
            by_model: true,
            csv,
        };
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            let (name, value) = (&*name, &*value);
            let second = || {
                let problem = || {
                    ApiError::invalid(
                        name,
                        format!("'{name}' must be a Unix time in seconds, not '{value}'."),
                    )
                };
                value.parse::<u64>().map_err(|_| problem())
            };
            match name {
                "start_time" => wanted.from = second()?,
                "end_time" => wanted.to = second()?,
                "bucket_width" => {
                    wanted.width_s = match value {
                        "1m" => 60,
                        "1h" => 3600,
                        "1d" => DAY_S,
                        _ => return Err(ApiError::invalid(name, "'bucket_width' must be 1m, 1h or 1d.")),
                    }
                }
                "group_by" => {
                    (wanted.by_key, wanted.by_model) = (false, false);
                    for part in value.split(',') {
                        match part {
                            "key" => wanted.by_key = true,
                            "model" => wanted.by_model = true,
                            "tenant" | "" => {}
                            _ => return Err(ApiError::invalid(name, "'group_by' must list key and model.")),
                        }
                    }
                }
                "format" => {
                    wanted.csv = match value {
                        "csv" => true,
                        "json" => false,
                        _ => return Err(ApiError::invalid(name, "'format' must be json or csv.")),
                    }
                }
                _ => {
                    let known = "start_time, end_time, bucket_width, group_by and format";
                    return Err(ApiError::invalid(
                        name,
                        format!("There is no parameter '{name}'; there are {known}."),
                    ));
                }
            }
        }
        if wanted.to < wanted.from {
            return Err(ApiError::invalid("end_time", "'end_time' is before 'start_time'."));
        }
        Ok(wanted)
    }

    /// Adds a record to its bucket; too many are refused.
    fn add(
        &self,
        rows: &mut BTreeMap<RowKey, Count>,
        record: RowKey,
        count: Count,
        none: &Arc<str>,
    ) -> Result<(), ApiError> {
        let RowKey { minute, tenant, key, model } = record;
        let minute = minute / self.width_s * self.width_s;
        let key = if self.by_key { key } else { none.clone() };
        let model = if self.by_model { model } else { none.clone() };
        rows.entry(RowKey { minute, tenant, key, model }).or_default().add(count);
        if rows.len() > ROWS_MAX {
            let message = format!(
                "These are more than {ROWS_MAX} rows: choose a shorter time, a wider bucket_width or fewer groups."
            );
            return Err(ApiError::invalid("start_time", message));
        }
        Ok(())
    }
}

/// Of the asking tenant.
pub(crate) async fn own(
    State(observability): Shared<Observability>,
    tenant: Tenant,
    headers: HeaderMap,
    uri: Uri,
) -> Reply {
    answer(observability, Some(tenant.name), &headers, &uri).await
}

/// Of every tenant.
pub(crate) async fn all(State(observability): Shared<Observability>, headers: HeaderMap, uri: Uri) -> Reply {
    answer(observability, None, &headers, &uri).await
}

async fn answer(
    observability: Arc<Observability>,
    tenant: Option<Arc<str>>,
    headers: &HeaderMap,
    uri: &Uri,
) -> Reply {
    let accepts_csv = headers.get(header::ACCEPT).is_some_and(|accept| accept.as_bytes() == b"text/csv");
    let query = RecordsQuery::read(uri.query().unwrap_or_default(), accepts_csv, unix_s())?;
    // One at a time, on a thread that nobody's prompt waits for.
    let meters = observability.meters.clone();
    let _turn = observability.meters.reading.lock().await;
    let answer = tokio::task::spawn_blocking(move || {
        let (mut rows, none) = (BTreeMap::new(), "".into());
        let mut add = |record, count| query.add(&mut rows, record, count, &none);
        meters.records(tenant.as_deref(), query.from, query.to, &mut add)?;
        match query.csv {
            true => csv(&query, &rows).map_err(|error| ApiError::internal(error.to_string())),
            false => Ok(json_rows(&query, &rows)),
        }
    });
    Ok(answer.await.unwrap_or_else(|_| Err(ApiError::internal("reading the records failed")))?)
}

fn json_rows(query: &RecordsQuery, rows: &BTreeMap<RowKey, Count>) -> Response<Body> {
    let or_null = |text: &str| if text.is_empty() { Value::Null } else { text.into() };
    let data = rows.iter().map(|(row, count)| {
        json!({
            "start_time": row.minute,
            "end_time": row.minute + query.width_s,
            "tenant": &*row.tenant,
            "key": or_null(&row.key),
            "model": or_null(&row.model),
            "requests": count.requests,
            "prompt_tokens": count.prompt_tokens,
            "cached_tokens": count.cached_tokens,
            "completion_tokens": count.completion_tokens,
            "total_tokens": count.prompt_tokens + count.completion_tokens,
        })
    });
    let data: Vec<Value> = data.collect();
    json_response(json!({"object": "list", "data": data}).to_string())
}

const COLUMNS: &str =
    "start_time,end_time,tenant,key,model,requests,prompt_tokens,cached_tokens,completion_tokens";

/// RFC 4180, with a header line.
fn csv(query: &RecordsQuery, rows: &BTreeMap<RowKey, Count>) -> Result<Response<Body>, csv::Error> {
    let mut text = csv::WriterBuilder::new().terminator(csv::Terminator::CRLF).from_writer(Vec::new());
    text.write_record(COLUMNS.split(','))?;
    for (row, count) in rows {
        let who = (row.minute, row.minute + query.width_s, &*row.tenant, &*row.key, &*row.model);
        let tokens = (count.prompt_tokens, count.cached_tokens, count.completion_tokens);
        text.serialize((who, count.requests, tokens))?;
    }
    let text = text.into_inner().map_err(|error| error.into_error())?;
    let mut response = Response::new(Body::from(text));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/csv; charset=utf-8"));
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(minute: u64, key: &str) -> (RowKey, Count) {
        let key = RowKey { minute, tenant: "t".into(), key: key.into(), model: "m".into() };
        (key, Count { requests: 1, prompt_tokens: 10, cached_tokens: 2, completion_tokens: 3 })
    }

    #[test]
    fn a_query_is_read_or_its_mistake_named() {
        let day = RecordsQuery::read("", false, 1_000_000).unwrap();
        assert_eq!((day.from, day.to, day.width_s), (913_600, 1_000_001, DAY_S));
        let all = RecordsQuery::read(
            "start_time=60&end_time=600&bucket_width=1m&group_by=key&format=csv",
            false,
            0,
        )
        .unwrap();
        let wanted =
            RecordsQuery { from: 60, to: 600, width_s: 60, by_key: true, by_model: false, csv: true };
        assert_eq!(all, wanted);
        for (query, param) in [
            ("start_time=x", "start_time"),
            ("bucket_width=2h", "bucket_width"),
            ("group_by=user", "group_by"),
            ("format=xml", "format"),
            ("limit=3", "limit"),
            ("start_time=9&end_time=8", "end_time"),
        ] {
            assert_eq!(
                RecordsQuery::read(query, false, 10).unwrap_err().param.as_deref(),
                Some(param),
                "{query}"
            );
        }
    }

    #[test]
    fn buckets_add_up() {
        let records: BTreeMap<_, _> = [row(0, "a"), row(60, "a"), row(60, "b"), row(3600, "a")].into();
        let rows = |query: &str| {
            let query = RecordsQuery::read(query, false, 10).unwrap();
            let mut rows = BTreeMap::new();
            for (record, count) in records.clone() {
                query.add(&mut rows, record, count, &"".into()).unwrap();
            }
            rows
        };
        assert_eq!(rows("bucket_width=1m").len(), 4);
        assert_eq!(rows("bucket_width=1h").len(), 3);
        let one = rows("bucket_width=1d&group_by=");
        assert_eq!(one.values().map(|count| count.prompt_tokens).collect::<Vec<_>>(), [40]);
    }

    #[tokio::test]
    async fn cells_are_quoted_where_they_must_be() {
        let query = RecordsQuery::read("bucket_width=1m", true, 10).unwrap();
        let text = async |rows: BTreeMap<_, _>| {
            let body = csv(&query, &rows).unwrap().into_body();
            String::from_utf8(axum::body::to_bytes(body, 1 << 10).await.unwrap().to_vec()).unwrap()
        };
        let head = format!("{COLUMNS}\r\n");
        assert_eq!(text(BTreeMap::new()).await, head);
        let rows = text([row(0, "a,b\"c"), row(60, "")].into()).await;
        assert_eq!(rows, format!("{head}0,60,t,\"a,b\"\"c\",m,1,10,2,3\r\n60,120,t,,m,1,10,2,3\r\n"));
    }
}
