//! S3, or what speaks like it, as the server: `HEAD`, ranged `GET`, `PUT` of objects that are written once (`If-None-Match: *`).
//!
//! Objects are many blocks, for each request costs tens of milliseconds and money: what may be asked in a day is bounded. A name is a hash,
//! so objects are spread over all of the prefix. Nothing is ever deleted: a lifecycle rule of the bucket does that.

use std::fmt;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rusty_s3::{Bucket, Credentials, S3Action, UrlStyle};
use ureq::http::{Response, StatusCode};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

use super::{AddressError, Fault, Name, ObjectLimits, Objects};
use crate::types::Secret;
use crate::wear::Wear;

const LIMITS: ObjectLimits = ObjectLimits {
    value_bytes: 16 << 20,
    // Of an object in one request.
    value_bytes_max: 1 << 30,
    asked_at_once: 8,
    find: Duration::from_millis(500),
    carry: Duration::from_secs(10),
};
/// Behind that a signed request is worth nothing.
const SIGNED_FOR: Duration = Duration::from_secs(300);
/// What AWS asks for S3 Standard in its cheapest regions, in billionths of a dollar: for a request that reads, for one that writes, and for a
/// MiB that is kept for a month. What is kept is paid for when it is written, as if a rule had it expire after a month.
const READ_PRICE: u64 = 400;
const WRITE_PRICE: u64 = 5000;
const MIB_MONTH_PRICE: u64 = 22_461;
/// Of an answer that says no, so much is read, so that its connection is of use again.
const REFUSAL_BYTES: u64 = 16 << 10;

/// Where the bucket is, and how to get in.
#[derive(Clone)]
pub struct S3Config {
    /// `s3://BUCKET[/PREFIX][?endpoint=URL][&region=REGION][&style=path]`.
    pub url: Secret,
    /// Key, secret, session token.
    pub credentials: Option<(Secret, Secret, Option<Secret>)>,
    /// Where the URL names none: AWS.
    pub endpoint: Option<String>,
    pub region: Option<String>,
    /// PEM of the certificates that the server's is signed with; `None`: the public ones.
    pub authorities: Option<Vec<u8>>,
    /// The most requests in any 24 hours.
    pub requests_per_day: Option<u64>,
    /// A thirtieth of it is the most that is spent in any 24 hours, by the prices above.
    pub dollars_per_month: Option<f64>,
}

/// See the module documentation.
pub struct S3 {
    agent: Agent,
    bucket: Bucket,
    credentials: Option<Credentials>,
    prefix: String,
    requests: Mutex<Wear>,
    /// Billionths of a dollar.
    spent: Mutex<Wear>,
}

impl fmt::Debug for S3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3")
            .field("bucket", &self.bucket.name())
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}

/// What a URL says.
struct Address {
    bucket: String,
    prefix: String,
    endpoint: Option<String>,
    region: Option<String>,
    path_style: bool,
}

fn address(url: &str) -> Result<Address, AddressError> {
    let wrong = |what: String| AddressError::Url(what);
    let rest = url.strip_prefix("s3://").ok_or_else(|| wrong("it is like s3://BUCKET/PREFIX".into()))?;
    let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (bucket, prefix) = path.split_once('/').unwrap_or((path, ""));
    let is_name = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    if !(3..=63).contains(&bucket.len()) || !bucket.bytes().all(is_name) {
        return Err(wrong(format!("{bucket:?} is no bucket's name (3 to 63 of a-z, 0-9, '-', '.')")));
    }
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._/".contains(&byte);
    if prefix.len() > 200 || !prefix.bytes().all(is_plain) {
        return Err(wrong("a prefix has up to 200 of letters, digits, '-', '.', '_', '/'".into()));
    }
    let mut prefix = prefix.trim_matches('/').to_owned();
    if !prefix.is_empty() {
        prefix.push('/');
    }
    let mut address =
        Address { bucket: bucket.to_owned(), prefix, endpoint: None, region: None, path_style: false };
    for option in query.split('&').filter(|option| !option.is_empty()) {
        match option.split_once('=') {
            Some(("endpoint", url)) => address.endpoint = Some(url.to_owned()),
            Some(("region", name)) => address.region = Some(name.to_owned()),
            Some(("style", "path")) => address.path_style = true,
            _ => {
                return Err(wrong(format!(
                    "of ?{option} nothing is known, only endpoint, region, style=path"
                )));
            }
        }
    }
    Ok(address)
}

impl S3 {
    /// Looks at the address; asks nobody.
    pub fn new(config: &S3Config) -> Result<Self, AddressError> {
        let address = address(&config.url.0)?;
        let region = address.region.or(config.region.clone()).unwrap_or_else(|| "us-east-1".into());
        let given = address.endpoint.or(config.endpoint.clone());
        // Servers of one's own mostly know no other way.
        let style = match address.path_style || given.is_some() {
            true => UrlStyle::Path,
            false => UrlStyle::VirtualHost,
        };
        let endpoint = given.unwrap_or_else(|| format!("https://s3.{region}.amazonaws.com"));
        let parsed = endpoint
            .parse()
            .map_err(|_| AddressError::Url(format!("the endpoint {endpoint:?} is no URL")))?;
        let bucket = Bucket::new(parsed, style, address.bucket, region)
            .map_err(|error| AddressError::Url(format!("the endpoint {endpoint:?}: {error}")))?;
        let credentials = config.credentials.as_ref().map(|(key, secret, token)| match token {
            Some(token) => Credentials::new_with_token(&*key.0, &*secret.0, &*token.0),
            None => Credentials::new(&*key.0, &*secret.0),
        });
        let mut agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .timeout_global(Some(LIMITS.carry))
            .max_idle_connections_per_host(64)
            .max_idle_connections(64)
            .user_agent("folio");
        if let Some(pem) = &config.authorities {
            let wrong = |what: &dyn fmt::Display| AddressError::Authorities(what.to_string());
            let mut certificates = Vec::new();
            for item in parse_pem(pem) {
                if let PemItem::Certificate(certificate) = item.map_err(|error| wrong(&error))? {
                    certificates.push(certificate);
                }
            }
            if certificates.is_empty() {
                return Err(wrong(&"there is none in the file"));
            }
            let roots = RootCerts::new_with_certs(&certificates);
            agent = agent.tls_config(TlsConfig::builder().root_certs(roots).build());
        }
        let agent = agent.build().into();
        let requests = Mutex::new(Wear::new(config.requests_per_day));
        let spent = config.dollars_per_month.map(|dollars| (dollars * 1e9 / 30.0) as u64);
        let spent = Mutex::new(Wear::new(spent));
        Ok(Self { agent, bucket, credentials, prefix: address.prefix, requests, spent })
    }

    fn key(&self, name: &Name) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Counts a request and what it costs, and says where it goes.
    fn signed<'a>(&self, action: impl S3Action<'a>, price: u64) -> Result<String, Fault> {
        let take = |of: &Mutex<Wear>, n| of.lock().unwrap_or_else(PoisonError::into_inner).take(n);
        if !take(&self.requests, 1) {
            return Err(Fault::Refused("the requests that may be made in a day are used up".into()));
        }
        if !take(&self.spent, price) {
            return Err(Fault::Refused("what may be spent in a day is spent".into()));
        }
        Ok(action.sign(SIGNED_FOR).to_string())
    }

    fn fault(&self, error: &ureq::Error) -> Fault {
        match error {
            ureq::Error::Timeout(_) => Fault::Late,
            error => Fault::Broken(format!("{}: {error}", self.server())),
        }
    }

    /// An answer that is none of those that were wanted.
    fn refusal(&self, mut answer: Response<Body>) -> Fault {
        let status = answer.status();
        // What it says may be of any length and kind: the number tells enough.
        let _ = answer.body_mut().with_config().limit(REFUSAL_BYTES).read_to_vec();
        let text = format!("{} answers {status}", self.server());
        match status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => Fault::Broken(text),
            status if status.is_client_error() || status.is_redirection() => Fault::Refused(text),
            _ => Fault::Broken(text),
        }
    }

    fn head(&self, name: &Name, limit: Duration) -> Result<bool, Fault> {
        let key = self.key(name);
        let url = self.signed(self.bucket.head_object(self.credentials.as_ref(), &key), READ_PRICE)?;
        let request = self.agent.head(url).config().timeout_global(Some(limit)).build();
        let answer = request.call().map_err(|error| self.fault(&error))?;
        match answer.status() {
            StatusCode::OK => Ok(true),
            StatusCode::NOT_FOUND => Ok(false),
            _ => Err(self.refusal(answer)),
        }
    }
}

impl Objects for S3 {
    fn name(&self) -> &'static str {
        "s3"
    }

    fn server(&self) -> String {
        let base = self.bucket.base_url();
        format!("{}{}", base.host_str().unwrap_or_default(), base.path())
    }

    fn limits(&self) -> ObjectLimits {
        LIMITS
    }

    fn exist(&self, names: &[Name], limit: Duration) -> Result<Vec<bool>, Fault> {
        std::thread::scope(|scope| {
            let ask = |name| {
                let head = move || self.head(name, limit);
                std::thread::Builder::new().name("folio-s3-find".into()).spawn_scoped(scope, head)
            };
            let asked: Vec<_> = names.iter().map(ask).collect();
            let gone = |what: &str| Fault::Broken(what.into());
            asked
                .into_iter()
                .map(|thread| {
                    let thread = thread.map_err(|error| gone(&format!("no thread: {error}")))?;
                    thread.join().map_err(|_| gone("a question panicked"))?
                })
                .collect()
        })
    }

    fn get(&self, name: &Name, range: Range<usize>, limit: Duration) -> Result<Option<Vec<u8>>, Fault> {
        let key = self.key(name);
        let url = self.signed(self.bucket.get_object(self.credentials.as_ref(), &key), READ_PRICE)?;
        let request = self.agent.get(url).config().timeout_global(Some(limit)).build();
        let request = request.header("range", format!("bytes={}-{}", range.start, range.end - 1));
        let mut answer = request.call().map_err(|error| self.fault(&error))?;
        match answer.status() {
            StatusCode::PARTIAL_CONTENT => {
                // A byte more: at its limit a body counts as larger.
                let body = answer.body_mut().with_config().limit(range.len() as u64 + 1);
                body.read_to_vec().map(Some).map_err(|error| self.fault(&error))
            }
            StatusCode::NOT_FOUND => Ok(None),
            // It ends before that.
            StatusCode::RANGE_NOT_SATISFIABLE => Ok(Some(Vec::new())),
            _ => Err(self.refusal(answer)),
        }
    }

    fn put(&self, name: &Name, value: &[u8], replace: bool, limit: Duration) -> Result<(), Fault> {
        let key = self.key(name);
        let price = WRITE_PRICE + value.len() as u64 * MIB_MONTH_PRICE / (1 << 20);
        let url = self.signed(self.bucket.put_object(self.credentials.as_ref(), &key), price)?;
        let mut request = self.agent.put(url).config().timeout_global(Some(limit)).build();
        if !replace {
            request = request.header("if-none-match", "*");
        }
        let answer = request.send(value).map_err(|error| self.fault(&error))?;
        match answer.status() {
            StatusCode::OK | StatusCode::CREATED | StatusCode::NO_CONTENT => Ok(()),
            // It is there, or somebody else is just writing it.
            StatusCode::PRECONDITION_FAILED | StatusCode::CONFLICT if !replace => Ok(()),
            _ => Err(self.refusal(answer)),
        }
    }

    fn ping(&self, limit: Duration) -> Result<(), Fault> {
        let url = self.signed(self.bucket.head_bucket(self.credentials.as_ref()), READ_PRICE)?;
        let request = self.agent.head(url).config().timeout_global(Some(limit)).build();
        let answer = request.call().map_err(|error| self.fault(&error))?;
        match answer.status() {
            StatusCode::OK | StatusCode::NO_CONTENT => Ok(()),
            StatusCode::NOT_FOUND => {
                Err(Fault::Refused(format!("{} has no bucket {:?}", self.server(), self.bucket.name())))
            }
            _ => Err(self.refusal(answer)),
        }
    }
}
