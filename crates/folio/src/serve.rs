//! `folio serve`: a runtime behind HTTP.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow, bail};
use folio_engine::EventFeed;
use folio_events::{EventSource, KvEventsConfig};
use folio_model::GenerationConfig;
use folio_model::adapter::{Adapter, AdapterLimits};
use folio_model::backend::{KvFormat, KvLayout};
use folio_server::why::{Targets, WhyConfig};
use folio_server::{
    Adapters, AdminConfig, App, BatchConfig, BatchLimits, Declared, HintPolicy, Keyring, Limits, ModelFacts,
    Parsers, Safety, SamplingDefaults, Secret, ServerConfig, ServerError, TlsFiles, WeightFacts, WrappingKey,
    is_pattern,
};
use folio_text::{ChatTemplate, ReasoningFormat, ToolFormat};

use crate::cli::{EngineArgs, Pooling, ServeArgs, UnknownFields};
use crate::on_demand::{self, Lifeline};
use crate::profile;
use crate::runtime::{Loaded, Runtime};

/// Open files that are no connections: weights, logs, the runtime's own.
const OTHER_FILES: u64 = 256;

pub fn run(args: &ServeArgs) -> Result<()> {
    if !args.on_demand.models.is_empty() {
        return on_demand::run(args);
    }
    // Before anything takes its time.
    let router =
        args.behind_router.as_deref().map(|socket| Ok::<_, anyhow::Error>((socket, Lifeline::hold()?)));
    let router = router.transpose()?;
    let mut config = settings(args)?;
    fit_open_files(&mut config.limits.connections, 1);
    let feed = config.kv_events.as_ref().map(|source| source.feed.clone());
    let loaded = Loaded::open(args.model.as_deref(), &args.engine)?;
    let engine = EngineArgs {
        max_adapters: args.max_loras,
        max_resident_adapters: args.max_cpu_loras,
        max_adapter_bytes: args.lora_memory,
        ..args.engine.clone()
    };
    let runtime = Runtime::serving(loaded, &engine, &config.tenants, feed)?;
    config.speculate = runtime.drafter;
    config.why.int8_times = int8_times(&runtime.model.kv_layout);
    config.why.roofline = profile::roofline(args.machine_profile.as_deref(), &runtime)?;
    runtime.report.print();
    let mut names = args.served_model_name.clone();
    // Patterns are names to ask by; what it is called is another.
    if names.iter().all(|name| is_pattern(name)) {
        names.insert(0, runtime.name.clone());
    }
    let guarded = config.safety.to_string();
    let (keys, named) = (config.api_keys.len(), config.tenants.tenants.len());
    let chat = runtime.template.is_some();
    let parsers = parsers(args, runtime.template.as_deref());
    let app = App {
        engine: Arc::new(runtime.engine.clone()),
        tokenizer: runtime.tokenizer.clone(),
        template: runtime.template.clone(),
        parsers,
        model: facts(&runtime, names.clone(), args.pooling),
        adapters: Arc::new(adapters(args, &runtime, &names)?),
        version: env!("CARGO_PKG_VERSION"),
    };
    if let Some((socket, lifeline)) = router {
        let left = lifeline.serve(config, app, socket)?;
        runtime.join(left);
        return Ok(());
    }
    let key_file = config.key_file.is_some();
    let metrics = if config.metrics_on_admin { "" } else { "metrics at /metrics, " };
    let left = folio_server::run(config, app, |addresses| {
        eprintln!(
            "  {:<9} {}",
            "tenants",
            match (keys, named) {
                (0, 0) if key_file => "those of the file of keys".to_owned(),
                (n, m) if key_file => format!("{}, and those of the file of keys", n + m),
                (0, 0) => "one, without a key (give --api-key to require keys)".to_owned(),
                (n, 0) => format!("{n}, one for each API key"),
                (0, n) => format!("{n}, of the tenants file"),
                (n, m) => format!("{}: {m} of the tenants file, one for each other API key", n + m),
            }
        );
        eprintln!(
            "  {:<9} {}; reasoning: {}",
            "tools",
            parsers.tools.map_or("no parser (--tool-call-parser)", |format| format.name),
            parsers.reasoning.map_or("not told apart", |format| format.name)
        );
        let scheme = if addresses.tls { "https" } else { "http" };
        eprintln!("  {:<9} {guarded}", "safety");
        if let Some(admin) = addresses.admin {
            eprintln!("  {:<9} {scheme}://{admin}", "operators");
        }
        if let Some((endpoint, replay)) = addresses.kv_events {
            let replay = replay.map_or("no replay".to_owned(), |replay| format!("replay tcp://{replay}"));
            eprintln!("  {:<9} tcp://{endpoint}, {replay}", "KV events");
        }
        let address = addresses.serving;
        let keyed = keys + named > 0 || key_file;
        // With keys it is for operators: on their listener, or with a key of the file that has the scope for it.
        let page = if keyed { addresses.admin.or(key_file.then_some(address)) } else { Some(address) };
        if let Some(page) = page {
            eprintln!("  {:<9} {scheme}://{page}/", "page");
        }
        eprintln!("\nlistening on {scheme}://{address}  ({metrics}Ctrl-C to stop)\n");
        eprintln!("{}", curl(scheme, address, &names[0], chat, keyed));
    })?;
    runtime.join(left);
    Ok(())
}

/// The adapters that are served from the start, and how others may come.
fn adapters(args: &ServeArgs, runtime: &Runtime, names: &[String]) -> Result<Adapters> {
    if args.lora.is_empty() && args.lora_dir.is_none() {
        return Ok(Adapters::default());
    }
    if !runtime.serves_adapters {
        bail!(
            "--lora: adapters are computed on the processors only (--device cpu), not on {}",
            runtime.report.backend
        );
    }
    if let Some(folder) = args.lora_dir.as_ref().filter(|folder| !folder.is_dir()) {
        bail!("--lora-dir {} is not a folder", folder.display());
    }
    let (targets, engine) = (runtime.model.targets.clone(), runtime.engine.clone());
    let limits = AdapterLimits { rank: args.max_lora_rank as usize, bytes: args.lora_memory };
    let load = move |path: &Path| Adapter::read(path, &targets, limits).map_err(|error| error.to_string());
    let keep = move |id, weights| engine.keep_adapter(id, weights);
    let adapters = Adapters::new(Box::new(load), Box::new(keep), args.lora_dir.clone());
    for spec in &args.lora {
        let Some((name, path)) = spec.split_once('=') else {
            bail!("--lora {spec}: expected NAME=PATH");
        };
        if names.iter().any(|taken| taken == name) {
            bail!("--lora {spec}: '{name}' is a name of the model itself");
        }
        let loaded = adapters.load_at_start(name, Path::new(path));
        loaded.map_err(|problem| anyhow!("--lora {spec}: {problem}"))?;
    }
    Ok(adapters)
}

/// How many times as many tokens the same memory would hold as int8, where that is more.
fn int8_times(layout: &KvLayout) -> Option<f64> {
    let bytes = |layout: &KvLayout| layout.bytes_per_token() as f64;
    let mut smaller = layout.clone();
    for format in smaller.groups.iter_mut().flat_map(|group| &mut group.formats) {
        *format = KvFormat::Int8;
    }
    Some(bytes(layout) / bytes(&smaller)).filter(|times| *times > 1.0)
}

/// Has no more connections than there can be, where each takes so many open files.
pub(crate) fn fit_open_files(connections: &mut usize, each: u64) {
    if let Some(files) = raise_open_files() {
        *connections = (*connections).min((files.saturating_sub(OTHER_FILES) / each).max(16) as usize);
    }
}

/// Lets this process open as many files as it may at all; returns how many, if there is a limit.
fn raise_open_files() -> Option<u64> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        Ok(()) => maximum,
        Err(error) => {
            tracing::debug!(%error, "the limit of open files stays as it is");
            current
        }
    }
}

/// Everything but the model, checked.
pub(crate) fn settings(args: &ServeArgs) -> Result<ServerConfig> {
    let api_keys = api_keys(&args.api_key, args.api_key_file.as_deref())?;
    let tenants = declared(args.tenants.as_deref(), args.tables.tenants.as_deref())?;
    let keyless = api_keys.is_empty() && tenants.tenants.is_empty() && args.keys.is_none();
    if keyless && !args.host.is_loopback() && !args.allow_unauthenticated {
        bail!(
            "--host {} is an address that other machines reach, and no key is asked for: give --api-key, --keys or a \
             tenants file, or say --allow-unauthenticated",
            args.host
        );
    }
    let admin = args.admin_listen.map(|listen| AdminConfig {
        listen,
        keys: args.admin_key.iter().map(|key| key.to_string()).collect(),
    });
    match &admin {
        None if !args.admin_key.is_empty() => {
            bail!("--admin-key opens the second listener: give --admin-listen, too")
        }
        None if args.metrics_on_admin => {
            bail!("--metrics-on-admin needs the second listener: give --admin-listen, too")
        }
        Some(admin) if !admin.listen.ip().is_loopback() && admin.keys.is_empty() && args.keys.is_none() => {
            bail!(
                "--admin-listen {} is an address that other machines reach: give --admin-key, or --keys with a key of the \
             scope admin",
                admin.listen
            )
        }
        _ => {}
    }
    let tls = match (&args.tls_cert, &args.tls_key) {
        (None, None) => None,
        (Some(certificate), Some(key)) => {
            Some(TlsFiles { certificate: certificate.clone(), key: key.clone() })
        }
        _ => bail!("--tls-cert and --tls-key belong together: give both"),
    };
    let disk_kv = args.engine.disk_kv.disk_kv.as_ref();
    let keyring = args.keyring.clone().or_else(|| Some(disk_kv?.join("keyring")));
    let sharing = [
        ("--remote-kv", args.engine.remote_kv.remote_kv.is_some()),
        ("--disk-kv-shared", args.engine.disk_kv.disk_kv_shared.is_some()),
    ];
    if let Some((option, _)) = sharing.iter().find(|(_, is_given)| *is_given && keyring.is_none()) {
        bail!(
            "{option} needs --keyring FILE: servers that share KV share the secrets that it is sealed with"
        );
    }
    Ok(ServerConfig {
        keyring: open_keyring(keyring.as_deref(), args.keyring_key.as_deref())?,
        key_file: args.keys.clone(),
        usage_file: args.usage.clone(),
        audit_file: args.audit_log.clone(),
        admin,
        metrics_on_admin: args.metrics_on_admin,
        tls,
        listen: SocketAddr::new(args.host, args.port),
        api_keys,
        tenants,
        safety: safety(args.safety.as_deref(), args.tables.safety.as_deref())?,
        hints: HintPolicy::new(args.accept_hint.clone(), args.unknown_fields == UnknownFields::Warn)?,
        tenant_metrics: args.tenant_metrics,
        traces_endpoint: args.otlp_traces_endpoint.clone(),
        why: WhyConfig {
            price_per_hour: args.price_per_hour,
            targets: Targets {
                chat: Duration::from_millis(args.ttft_chat),
                completion: Duration::from_millis(args.ttft_completion),
            },
            ..WhyConfig::default()
        },
        kv_events: kv_events(args)?,
        // Known when what drafts is open.
        speculate: None,
        batch: BatchConfig {
            dir: args.batch_dir.clone(),
            storage_bytes: args.batch_storage,
            limits: BatchLimits {
                file_bytes: usize::try_from(args.max_batch_file).context("--max-batch-file")?,
                in_flight: args.batch_concurrency as usize,
                ..BatchLimits::default()
            },
        },
        limits: Limits {
            body_bytes: usize::try_from(args.max_body).context("--max-body")?,
            request_timeout: args.request_timeout.map(Duration::from_secs),
            write_timeout: Duration::from_secs(args.write_timeout),
            unread_bytes: usize::try_from(args.max_unread).context("--max-unread")?,
            in_flight_bytes: usize::try_from(args.max_in_flight).context("--max-in-flight")?,
            text_threads: args.text_threads.into(),
            ..Limits::default()
        },
        http_threads: args.http_threads.into(),
        drain_timeout: Duration::from_secs(args.drain_timeout),
    })
}

/// What is told of the cache, and the way out of the engine.
fn open_keyring(keyring: Option<&Path>, key: Option<&Path>) -> Result<Keyring> {
    let key = key.map(WrappingKey::read).transpose()?;
    match keyring {
        Some(path) => Ok(Keyring::open(path, key.as_ref())?),
        None if key.is_some() => {
            bail!("--keyring-key wraps a keyring, and there is none: give --keyring FILE")
        }
        None => Ok(Keyring::default()),
    }
}

fn kv_events(args: &ServeArgs) -> Result<Option<EventSource>> {
    let (json, endpoint) = (args.kv_events_config.as_deref(), args.kv_events_endpoint.as_deref());
    let flag = if json.is_some() { "--kv-events-config" } else { "--kv-events-endpoint" };
    let config = KvEventsConfig::parse(json, endpoint).context(flag)?;
    Ok(config.map(|config| {
        let feed = Arc::new(EventFeed::new(config.max_queue_size, args.engine.block_size));
        EventSource { config, feed }
    }))
}

/// Tenants, from the file of `--tenants` or, without one, the configuration file's tables.
fn declared(file: Option<&Path>, tables: Option<&str>) -> Result<Declared> {
    of_file_or_table(file, tables, |text| Declared::parse(text, &environment))
}

/// What is not let in or out, from the file of `--safety` or, without one, the configuration file's table.
fn safety(file: Option<&Path>, table: Option<&str>) -> Result<Safety> {
    of_file_or_table(file, table, |text| Safety::parse(text, &environment))
}

fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn of_file_or_table<T: Default>(
    file: Option<&Path>,
    table: Option<&str>,
    parse: impl Fn(&str) -> Result<T, ServerError>,
) -> Result<T> {
    match (file, table) {
        (None, None) => Ok(T::default()),
        (None, Some(table)) => Ok(parse(table)?),
        (Some(path), _) => {
            let text =
                std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            parse(&text).with_context(|| path.display().to_string())
        }
    }
}

/// How the model's answers are read: as asked, else as its chat template says.
fn parsers(args: &ServeArgs, template: Option<&ChatTemplate>) -> Parsers {
    let found = template.map(Parsers::of_template).unwrap_or_default();
    Parsers {
        tools: match args.tool_call_parser.as_str() {
            "auto" => found.tools,
            name => ToolFormat::named(name),
        },
        reasoning: match args.reasoning_parser.as_str() {
            "auto" => found.reasoning,
            name => ReasoningFormat::named(name),
        },
    }
}

fn facts(runtime: &Runtime, names: Vec<String>, pooling: Option<Pooling>) -> ModelFacts {
    ModelFacts {
        names,
        created_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
        context_length: runtime.max_model_len(),
        vocab_size: runtime.model.vocab as u32,
        eos_token_ids: runtime.model.eos_token_ids.clone().into(),
        hidden: runtime.model.config.hidden as u32,
        pooling: pooling.map_or_else(|| runtime.model.pooling.clone(), |pooling| Ok(pooling.into())),
        only_embeds: runtime.model.only_embeds,
        defaults: defaults(&runtime.model.generation),
        model_digest: runtime.model.digest,
        layout_digest: runtime.layout_digest,
        weights: WeightFacts {
            family: runtime.model.config.family.model_type.to_owned(),
            parameters: runtime.model.parameters,
            format: runtime.format.clone(),
            bytes: runtime.report.weight_bytes,
            on_gpu: runtime.report.on_gpu,
        },
    }
}

/// The authors' sampling as the server's defaults; authors who do not sample mean greedy.
fn defaults(generation: &GenerationConfig) -> SamplingDefaults {
    let greedy = generation.do_sample == Some(false);
    SamplingDefaults {
        temperature: if greedy { Some(0.0) } else { generation.temperature },
        top_k: generation.top_k,
        top_p: generation.top_p,
        min_p: generation.min_p,
        repetition_penalty: generation.repetition_penalty,
        max_tokens: generation.max_new_tokens,
    }
}

/// The line to try, on one line so that it can be copied.
fn curl(scheme: &str, address: SocketAddr, model: &str, chat: bool, key: bool) -> String {
    let host = match address.ip() {
        ip if ip.is_unspecified() => format!("127.0.0.1:{}", address.port()),
        _ => address.to_string(),
    };
    let header = if key { " -H 'authorization: Bearer YOUR_KEY'" } else { "" };
    let (path, body) = if chat {
        (
            "chat/completions",
            format!(
                r#"{{"model":"{model}","messages":[{{"role":"user","content":"Tell me a story about a fox."}}]}}"#
            ),
        )
    } else {
        ("completions", format!(r#"{{"model":"{model}","prompt":"Once upon a time","max_tokens":64}}"#))
    };
    format!("  curl {scheme}://{host}/v1/{path}{header} -H 'content-type: application/json' -d '{body}'\n")
}

/// Keys of the command line, then of the file; a key given twice is refused, an empty one too.
fn api_keys(given: &[Secret], file: Option<&Path>) -> Result<Vec<String>> {
    let mut keys: Vec<String> = given.iter().map(|key| key.to_string()).collect();
    if let Some(path) = file {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        keys.extend(lines.map(str::to_owned));
        if keys.is_empty() {
            bail!("{} has no key; without keys, leave --api-key-file out", path.display());
        }
    }
    for (index, key) in keys.iter().enumerate() {
        if key.trim().is_empty() {
            bail!("an API key is empty");
        }
        if keys[..index].contains(key) {
            bail!("API key number {} is given twice", index + 1);
        }
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn int8_holds_more_where_kv_is_larger_and_nothing_is_said_where_it_is_not() {
        let layout = |format| KvLayout::full(2, 4, 64, format, 16);
        let times = int8_times(&layout(KvFormat::BF16)).expect("bf16 is larger");
        assert!((times - 128.0 / 66.0).abs() < 1e-9, "{times}");
        assert_eq!(int8_times(&layout(KvFormat::Int8)), None);
        assert_eq!(int8_times(&layout(KvFormat::Int4)), None);
    }

    #[test]
    fn keys_come_from_flags_and_file() {
        let folder = tempfile::tempdir().expect("folder");
        let file = folder.path().join("keys");
        std::fs::write(&file, "# ours\nalpha\n\n  beta  \n").expect("file");
        assert_eq!(api_keys(&["x".into()], Some(&file)).expect("keys"), ["x", "alpha", "beta"]);
        assert!(api_keys(&["alpha".into()], Some(&file)).is_err());
        assert!(api_keys(&["".into()], None).is_err());
        std::fs::write(&file, "# none\n").expect("file");
        assert!(api_keys(&[], Some(&file)).is_err());
        assert!(api_keys(&[], None).expect("none").is_empty());
    }

    #[test]
    fn parsers_are_as_asked_or_as_the_template_says() {
        use clap::Parser as _;
        let mut sources = folio_text::TemplateSources::default();
        sources.add("default", "{{ '<tool_call>' }}{{ '<think>' }}", "test");
        let template =
            ChatTemplate::compile(sources, &folio_text::SpecialTokens::default()).expect("compiles");
        let names = |flags: &[&str]| {
            let line = ["folio", "serve"].iter().chain(flags);
            let crate::cli::Command::Serve(args) =
                crate::cli::Cli::try_parse_from(line).expect("flags").command.expect("command")
            else {
                panic!("another command");
            };
            let parsers = parsers(&args, template.as_ref());
            (parsers.tools.map(|f| f.name), parsers.reasoning.map(|f| f.name))
        };
        assert_eq!(names(&[]), (Some("hermes"), Some("think")));
        assert_eq!(
            names(&["--tool-call-parser", "qwen3_xml", "--reasoning-parser", "deepseek_r1"]),
            (Some("qwen3_coder"), Some("deepseek_r1"))
        );
        assert_eq!(names(&["--tool-call-parser", "none", "--reasoning-parser", "none"]), (None, None));
        for format in folio_text::TOOL_FORMATS {
            assert_eq!(names(&["--tool-call-parser", format.name]).0, Some(format.name));
        }
    }

    #[test]
    fn a_tenants_file_is_read_and_its_mistakes_name_it() {
        assert_eq!(declared(None, None).expect("none"), Declared::default());
        let folder = tempfile::tempdir().expect("folder");
        let file = folder.path().join("tenants.json");
        std::fs::write(&file, r#"{"tenants": [{"name": "a", "keys": ["k"], "weight": 4}]}"#).expect("file");
        assert_eq!(declared(Some(&file), None).expect("valid").weights()[0].1, 4);
        std::fs::write(&file, r#"{"tenants": [{"name": "a", "keys": ["k"], "wait": 4}]}"#).expect("file");
        let error = format!("{:#}", declared(Some(&file), None).expect_err("refused"));
        assert!(error.contains("tenants.json") && error.contains("wait"), "{error}");
        assert!(declared(Some(&folder.path().join("none")), None).is_err());
    }

    #[test]
    fn a_safety_file_is_read_and_its_mistakes_name_it() {
        assert_eq!(safety(None, None).expect("none").to_string(), "no rules, no callout (--safety)");
        let folder = tempfile::tempdir().expect("folder");
        let file = folder.path().join("safety.json");
        let text = r#"{"rules": [{"name": "a", "strings": ["x"], "action": "deny"}]}"#;
        std::fs::write(&file, text).expect("file");
        assert_eq!(safety(Some(&file), Some("no JSON")).expect("valid").to_string(), "1 rule, no callout");
        assert!(safety(None, Some(text)).is_ok());
        std::fs::write(&file, text.replace("strings", "string")).expect("file");
        let error = format!("{:#}", safety(Some(&file), None).expect_err("refused"));
        assert!(error.contains("safety.json") && error.contains("unknown field `string`"), "{error}");
    }

    #[test]
    fn the_curl_line_can_be_run() {
        let address = SocketAddr::from(([0, 0, 0, 0], 9000));
        let line = curl("http", address, "m", true, true);
        assert!(line.contains("http://127.0.0.1:9000/v1/chat/completions"));
        assert!(line.contains("Bearer"));
        let body = line.split("-d '").nth(1).and_then(|rest| rest.split('\'').next()).expect("body");
        assert!(serde_json::from_str::<serde_json::Value>(body).is_ok(), "{body}");
    }

    #[test]
    fn authors_who_do_not_sample_are_greedy() {
        let generation =
            GenerationConfig { do_sample: Some(false), temperature: Some(0.7), ..Default::default() };
        assert_eq!(defaults(&generation).temperature, Some(0.0));
    }
}
