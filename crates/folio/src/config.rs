//! `folio serve --config FILE`: everything that `folio serve` can be told, in one TOML file.
//!
//! Owns: how the file becomes the command line's. A key of the file is a flag of `folio serve` without its dashes and
//! becomes that flag's default, so there is one precedence (flag, environment, file, built-in default), one parser of every
//! value and one list of what there is. Tables are what flags cannot say: tenants, groups, prefixes, safety.
//! Must never: know a flag by name, except those that make no sense in a file.

use std::ffi::OsString;
use std::fmt;
use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args as _, CommandFactory, FromArgMatches};
use folio_server::{Declared, Secret};

use crate::cli::{Cli, Command, EngineArgs, ServeArgs};
use crate::models::Aliases;

/// Tables of the file that say who there is: what `--tenants FILE` says otherwise.
const TENANT_TABLES: [&str; 4] = ["tenants", "groups", "prefixes", "default_adapters"];
const SAFETY_TABLE: &str = "safety";
const ALIASES_TABLE: &str = "aliases";
const MODELS_TABLE: &str = "models";
/// Flags that a file cannot have.
const NOT_IN_A_FILE: [&str; 5] = ["config", "help", "version", "only_model", "behind_router"];
/// Flags of `serve` that a model of [[models]] may have, beside those of the engine.
const OF_A_MODEL: [&str; 13] = [
    "model",
    "served_model_name",
    "keep_alive",
    "lora",
    "max_loras",
    "max_lora_rank",
    "lora_memory",
    "tool_call_parser",
    "reasoning_parser",
    "pooling",
    "usage",
    "kv_events_config",
    "kv_events_endpoint",
];
/// Flags that name what one process has for itself: with [[models]], each model's own or nobody's.
const OF_ONE_PROCESS: [&str; 9] = [
    "model",
    "served_model_name",
    "lora",
    "lora_dir",
    "usage",
    "disk_kv",
    "kv_events_config",
    "kv_events_endpoint",
    "batch_dir",
];

/// What of a configuration file no flag can say, as JSON texts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tables {
    /// For [`Declared::parse`].
    pub tenants: Option<Secret>,
    pub safety: Option<String>,
}

/// The models of a file, each with the arguments that it would be served with by itself.
#[derive(Default)]
pub struct OnDemand {
    pub models: Vec<OnDemandModel>,
    /// The file's text.
    pub configuration: String,
    /// The command line without the program's name.
    pub line: Vec<OsString>,
}

/// Without the texts, in which there may be keys.
impl fmt::Debug for OnDemand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnDemand").field("models", &self.models).finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub struct OnDemandModel {
    pub name: String,
    pub args: Box<ServeArgs>,
}

/// The command line, with the file's values behind it where `--config` or FOLIO_CONFIG names one.
pub fn command_line(line: impl IntoIterator<Item = OsString>) -> Result<Command> {
    let mut line: Vec<OsString> = line.into_iter().collect();
    let matches = Cli::command().get_matches_from(&line);
    if matches.subcommand_name().is_none() {
        // Without a command, `serve` with its environment and defaults.
        line.push("serve".into());
    }
    let matches = Cli::command().get_matches_from(&line);
    let Some(serve) = matches.subcommand_matches("serve") else { return of_matches(&matches) };
    let file = match (serve.get_one::<String>("only_model"), serve.get_one::<PathBuf>("config")) {
        // The file as it was when the router began.
        (Some(_), _) => Some(ConfigFile::parse(&from_router(std::io::stdin().lock())?)?),
        (None, Some(path)) => Some(ConfigFile::read(path)?),
        (None, None) => None,
    };
    let Some(file) = file else { return of_matches(&matches) };
    let mut command = match serve.get_one::<String>("only_model") {
        Some(name) => Command::Serve(file.one(name, &line)?.into()),
        None => of_matches(&file.behind(Cli::command(), None).get_matches_from(&line))?,
    };
    if let Command::Serve(args) = &mut command {
        args.tables = file.tables.clone();
        args.engine.aliases = file.aliases.clone();
        if args.only_model.is_none() {
            args.on_demand = file.on_demand(&line)?;
        }
    }
    Ok(command)
}

fn of_matches(matches: &ArgMatches) -> Result<Command> {
    Cli::from_arg_matches(matches)?.command.context("there is no command")
}

/// Most bytes of a configuration.
const CONFIGURATION_BYTES: usize = 16 << 20;

/// What a router writes first: a length on a line, and as many bytes.
fn from_router(mut input: impl BufRead) -> Result<String> {
    let mut length = String::new();
    input.by_ref().take(32).read_line(&mut length)?;
    let length: usize = length.trim().parse().context("no router speaks on the standard input")?;
    ensure!(
        length <= CONFIGURATION_BYTES,
        "the configuration has {length} bytes, more than {CONFIGURATION_BYTES}"
    );
    let mut text = vec![0; length];
    input.read_exact(&mut text)?;
    Ok(String::from_utf8(text)?)
}

/// A file's content, each value checked. Cannot be printed: keys may be among it.
struct ConfigFile {
    values: Values,
    tables: Tables,
    aliases: Aliases,
    models: Vec<ModelTable>,
    text: String,
}

/// Ids of arguments of `serve`, and what they are given.
type Values = Vec<(String, Vec<String>)>;

/// One of [[models]].
struct ModelTable {
    name: String,
    values: Values,
}

impl ModelTable {
    fn parse(table: &toml::Table, serve: &clap::Command) -> Result<Self> {
        let name = table.get("name").and_then(toml::Value::as_str).unwrap_or_default().to_owned();
        let plain = |c: char| !c.is_control() && !matches!(c, '*' | ',');
        ensure!(
            !name.is_empty() && name.chars().all(plain),
            "each of [[models]] has a name, without '*' and ','"
        );
        let engine = EngineArgs::augment_args(clap::Command::new("engine"));
        let mut values = Values::new();
        for (key, value) in table.iter().filter(|(key, _)| *key != "name") {
            let of_model = || -> Result<(String, Vec<String>)> {
                let given = given(value)?;
                let id = argument(serve, key, &given)?;
                let known = OF_A_MODEL.contains(&&*id)
                    || engine.get_arguments().any(|argument| argument.get_id().as_str() == id);
                ensure!(known, "is no setting of a model but of the whole server");
                Ok((id, given))
            };
            let (id, given) = of_model().with_context(|| format!("the model '{name}': {key}"))?;
            ensure!(
                values.iter().all(|(known, _)| *known != id),
                "the model '{name}': {key}: is given twice, with '-' and with '_'"
            );
            values.push((id, given));
        }
        let names = values.iter_mut().find(|(id, _)| id == "served_model_name");
        match names {
            Some((_, names)) => names.insert(0, name.clone()),
            None => values.push(("served_model_name".into(), vec![name.clone()])),
        }
        Ok(Self { name, values })
    }
}

impl ConfigFile {
    fn read(path: &Path) -> Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("{} cannot be used", path.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        let table: toml::Table = text.parse()?;
        let command = Cli::command();
        let serve = command.find_subcommand("serve").context("there is no `serve`")?;
        let mut file = Self {
            values: Values::new(),
            tables: Tables::default(),
            aliases: Aliases::default(),
            models: Vec::new(),
            text: text.to_owned(),
        };
        let mut tenants = serde_json::Map::new();
        for (key, value) in table {
            if TENANT_TABLES.contains(&key.as_str()) && value.is_array() {
                tenants.insert(key, serde_json::to_value(value)?);
                continue;
            }
            if key == SAFETY_TABLE && value.is_table() {
                file.tables.safety = Some(serde_json::to_string(&value)?);
                continue;
            }
            if let (ALIASES_TABLE, toml::Value::Table(table)) = (key.as_str(), &value) {
                file.aliases = Aliases::parse(table).context(ALIASES_TABLE)?;
                continue;
            }
            if let (MODELS_TABLE, toml::Value::Array(models)) = (key.as_str(), &value) {
                for model in models {
                    let table = model.as_table().context("models: each is a table: [[models]]")?;
                    file.models.push(ModelTable::parse(table, serve)?);
                }
                continue;
            }
            let values = given(&value).with_context(|| key.clone())?;
            let id = argument(serve, &key, &values).with_context(|| key.clone())?;
            if file.values.iter().any(|(known, _)| *known == id) {
                bail!("{key}: is given twice, with '-' and with '_'");
            }
            file.values.push((id, values));
        }
        if !tenants.is_empty() {
            file.tables.tenants = Some(serde_json::to_string(&tenants)?.into());
        }
        if file.tables.tenants.is_some() && file.values.iter().any(|(id, _)| id == "tenants") {
            bail!("tenants: name a file with 'tenants = \"FILE\"', or write [[tenants]] here; not both");
        }
        Ok(file)
    }

    /// The command line's definition with this file's values as the defaults of `serve`, before them those of one of its models.
    fn behind(&self, command: clap::Command, model: Option<&ModelTable>) -> clap::Command {
        let own = model.into_iter().flat_map(|model| &model.values);
        command.mut_subcommand("serve", |serve| {
            self.values.iter().chain(own).fold(serve, |serve, (id, values)| {
                serve.mut_arg(id, |argument| argument.default_values(values.clone()))
            })
        })
    }

    /// The arguments that a model is served with.
    fn one(&self, name: &str, line: &[OsString]) -> Result<ServeArgs> {
        let model = self.models.iter().find(|model| model.name == name);
        let model = model.with_context(|| format!("there is no model '{name}' in [[models]]"))?;
        let matches = self.behind(Cli::command(), Some(model)).try_get_matches_from(line)?;
        let serve = matches.subcommand_matches("serve").context("there is no `serve`")?;
        let mut args = ServeArgs::from_arg_matches(serve)?;
        args.tables = self.tables.clone();
        args.engine.aliases = self.aliases.clone();
        Ok(args)
    }

    /// The file's models, where it has any: nothing else may be given that names what one process has for itself.
    fn on_demand(&self, line: &[OsString]) -> Result<OnDemand> {
        if self.models.is_empty() {
            return Ok(OnDemand::default());
        }
        let matches = self.behind(Cli::command(), None).try_get_matches_from(line)?;
        let serve = matches.subcommand_matches("serve").context("there is no `serve`")?;
        for id in OF_ONE_PROCESS {
            let from = serve.value_source(id);
            let given = matches!(from, Some(ValueSource::CommandLine | ValueSource::EnvVariable));
            if given || self.values.iter().any(|(known, _)| known == id) {
                let place = if OF_A_MODEL.contains(&id) || id == "disk_kv" {
                    "give it to each of [[models]] that is to have it"
                } else {
                    "it has no use with [[models]]"
                };
                bail!("{}: each model has a process of its own: {place}", id.replace('_', "-"));
            }
        }
        let one = |model: &ModelTable| {
            let args = self.one(&model.name, line).with_context(|| format!("the model '{}'", model.name))?;
            Ok(OnDemandModel { name: model.name.clone(), args: args.into() })
        };
        Ok(OnDemand {
            models: self.models.iter().map(one).collect::<Result<_>>()?,
            configuration: self.text.clone(),
            line: line.iter().skip(1).cloned().collect(),
        })
    }
}

/// A value as it would stand on a command line; a list is several.
fn given(value: &toml::Value) -> Result<Vec<String>> {
    let one = |value: &toml::Value| match value {
        toml::Value::String(text) => Ok(text.clone()),
        toml::Value::Integer(number) => Ok(number.to_string()),
        toml::Value::Float(number) => Ok(number.to_string()),
        toml::Value::Boolean(flag) => Ok(flag.to_string()),
        toml::Value::Datetime(_) => bail!("is a date, which no setting takes"),
        toml::Value::Array(_) => bail!("is a list in a list"),
        toml::Value::Table(_) => {
            bail!(
                "there is no such table; there are [[models]], [[tenants]], [[groups]], [[prefixes]], [safety] and [aliases]"
            )
        }
    };
    match value {
        toml::Value::Array(values) => values.iter().map(one).collect(),
        value => Ok(vec![one(value)?]),
    }
}

/// The argument of `serve` that a key means, if it takes these values.
fn argument(serve: &clap::Command, key: &str, values: &[String]) -> Result<String> {
    let long = key.replace('_', "-");
    let found = serve.get_arguments().find(|argument| name(argument) == long);
    if let Some(argument) = found.filter(|argument| NOT_IN_A_FILE.contains(&argument.get_id().as_str())) {
        bail!("'{}' cannot be set in a file", name(argument));
    }
    let switch = found.is_some_and(|argument| matches!(argument.get_action(), ArgAction::SetTrue));
    let list = found.is_some_and(|argument| matches!(argument.get_action(), ArgAction::Append));
    if switch {
        let fine = matches!(values, [one] if one == "true" || one == "false");
        return if fine { Ok(id(found)) } else { bail!("is a switch: true or false") };
    }
    if !list && values.len() != 1 {
        bail!("takes one value, not a list");
    }
    // A trial: it knows every value's rules, and what an unknown name was probably meant to be.
    let positional = found.is_some_and(Arg::is_positional);
    let trial =
        values.iter().map(|value| if positional { value.clone() } else { format!("--{long}={value}") });
    let line = ["folio".to_owned(), "serve".to_owned()].into_iter().chain(trial);
    if let Err(error) = Cli::command().try_get_matches_from(line) {
        let text = error.to_string();
        let advice = |line: &str| line.starts_with("Usage") || line.starts_with("For more");
        let lines = text.lines().filter(|line| !line.trim().is_empty() && !advice(line));
        let text = lines.map(|line| line.trim().trim_start_matches("error: ")).collect::<Vec<_>>().join("; ");
        bail!("{text}");
    }
    Ok(id(found))
}

fn id(argument: Option<&Arg>) -> String {
    argument.map(|argument| argument.get_id().to_string()).unwrap_or_default()
}

/// As in a file.
fn name(argument: &Arg) -> &str {
    argument.get_long().unwrap_or(argument.get_id().as_str())
}

/// `folio config check FILE`: everything that can be wrong with a configuration before a model is loaded, and what it comes to.
pub fn check(path: &Path) -> Result<()> {
    let file = ConfigFile::read(path)?;
    let line = ["folio".into(), "serve".into(), "--config".into(), path.as_os_str().to_owned()];
    let matches = file.behind(Cli::command(), None).try_get_matches_from(&line)?;
    let serve = matches.subcommand_matches("serve").context("there is no `serve`")?;
    let mut args = ServeArgs::from_arg_matches(serve)?;
    args.tables = file.tables.clone();
    let on_demand = file.on_demand(&line)?;
    let settings =
        crate::serve::settings(&args).with_context(|| format!("{} cannot be used", path.display()))?;
    print!("{}", effective(&file, serve));
    folio_server::check(&settings).with_context(|| format!("{} cannot be used", path.display()))?;
    println!("{}", summary(&settings.tenants));
    for model in &on_demand.models {
        println!("  model {}: {}", model.name, model.args.model.as_deref().unwrap_or("the built-in one"));
    }
    println!("{} is fine", path.display());
    Ok(())
}

/// Every setting that is not a built-in default, with its value and where it comes from.
fn effective(file: &ConfigFile, serve: &ArgMatches) -> String {
    let command = Cli::command();
    let arguments = command.find_subcommand("serve").into_iter().flat_map(clap::Command::get_arguments);
    let mut out = String::new();
    for argument in arguments {
        let id = argument.get_id().as_str();
        let from = match serve.value_source(id) {
            Some(ValueSource::EnvVariable) => "environment",
            Some(ValueSource::DefaultValue) if file.values.iter().any(|(known, _)| known == id) => "file",
            _ => continue,
        };
        let values = serve.get_raw(id).into_iter().flatten().map(|value| value.to_string_lossy());
        let values = match argument.is_hide_env_values_set() {
            true => format!("({} hidden)", values.count()),
            false => values.collect::<Vec<_>>().join(", "),
        };
        out += &format!("  {:<32} {values}  [{from}]\n", name(argument));
    }
    out
}

fn summary(declared: &Declared) -> String {
    let count = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let parts = [
        count(declared.tenants.len(), "tenant"),
        count(declared.groups.len(), "group"),
        count(declared.prefixes.len(), "shared prefix").replace("prefixs", "prefixes"),
    ];
    format!("  {}", parts.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn serve(file: &str, flags: &[&str]) -> ServeArgs {
        let file = ConfigFile::parse(file).expect("a good file");
        let line = ["folio", "serve"].iter().chain(flags);
        let matches = file.behind(Cli::command(), None).try_get_matches_from(line).expect("a good line");
        match Cli::from_arg_matches(&matches).expect("parses").command {
            Some(Command::Serve(args)) => *args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_flag_wins_over_the_file_and_the_file_over_the_default() {
        let file = "model = \"demo\"\nport = 9000\nserved-model-name = [\"a\", \"b\"]\nkv_cache_memory = \"1GiB\"\n\
                    tenant-metrics = true\nkv-cache-share = 0.25\nguarantee-completion = false\n";
        let args = serve(file, &[]);
        assert_eq!((args.port, args.model.as_deref()), (9000, Some("demo")));
        assert_eq!(args.served_model_name, ["a", "b"]);
        assert_eq!((args.engine.kv_cache_memory, args.engine.kv_cache_share), (Some(1 << 30), Some(0.25)));
        assert!(args.tenant_metrics && !args.engine.guarantee_completion);
        assert_eq!(args.drain_timeout, 120, "what the file leaves out has its default");
        let args = serve(file, &["other", "--port", "9001", "--served-model-name", "c"]);
        assert_eq!((args.port, args.model.as_deref()), (9001, Some("other")));
        assert_eq!(args.served_model_name, ["c"]);
    }

    #[test]
    fn every_mistake_is_named_with_its_key() {
        for (file, named) in [
            ("port = 70000", &["port", "70000"][..]),
            ("prot = 1", &["prot", "--port"]),
            ("port = [1, 2]", &["port", "list"]),
            ("port = {a = 1}", &["port", "table"]),
            ("tenant-metrics = \"yes\"", &["tenant-metrics", "true or false"]),
            ("max-body = \"lots\"", &["max-body", "lots"]),
            ("kv-cache-dtype = \"int3\"", &["kv-cache-dtype", "int3", "int4"]),
            ("config = \"other.toml\"", &["config", "file"]),
            ("help = true", &["help"]),
            ("max-body = \"1MiB\"\nmax_body = \"2MiB\"", &["max", "twice"]),
            ("tenants = \"t.json\"\n[[groups]]\nname = \"g\"", &["tenants", "not both"]),
            ("port = ", &["line 1"]),
            ("[limits]\nx = 1", &["limits", "[[tenants]]"]),
            ("[aliases]\n\"a/b\" = \"c/d\"", &["aliases", "a/b"]),
            ("[aliases]\na = 3", &["aliases", "a: names no model"]),
            ("models = 3", &["models"]),
            ("models = [3]", &["models", "[[models]]"]),
            ("[[models]]\nmodel = \"demo\"", &["[[models]]", "name"]),
            ("[[models]]\nname = \"a*\"", &["name", "'*'"]),
            ("[[models]]\nname = \"a\"\nport = 1", &["'a'", "port", "whole server"]),
            ("[[models]]\nname = \"a\"\nlora-dir = \"x\"", &["'a'", "lora-dir", "whole server"]),
            ("[[models]]\nname = \"a\"\nthreads = 0", &["'a'", "threads", "0"]),
            ("[[models]]\nname = \"a\"\nkeep-alive = \"soon\"", &["'a'", "keep-alive", "soon"]),
            ("[[models]]\nname = \"a\"\nmax-loras = 1\nmax_loras = 2", &["'a'", "twice"]),
        ] {
            let error = format!("{:#}", ConfigFile::parse(file).map(|_| ()).expect_err(file));
            for part in named {
                assert!(error.contains(part), "{part} is not in: {error}");
            }
        }
    }

    #[test]
    fn a_models_own_settings_win_over_the_files_and_flags_over_both() {
        let text = "threads = 3\nmax-model-len = 64\nport = 1\n[[models]]\nname = \"a\"\nmodel = \"demo\"\nthreads = 2\n\
                    served-model-name = [\"b\", \"c-*\"]\n[[models]]\nname = \"d\"\n";
        let file = ConfigFile::parse(text).expect("a good file");
        let of = |flags: &[&str]| {
            let line: Vec<OsString> = ["folio", "serve"].iter().chain(flags).map(Into::into).collect();
            file.on_demand(&line)
        };
        let OnDemand { models, configuration, line } = of(&["--port", "2"]).expect("models");
        assert_eq!((configuration.as_str(), line), (text, vec!["serve".into(), "--port".into(), "2".into()]));
        let [a, d] = &models[..] else { panic!("{models:?}") };
        assert_eq!((a.name.as_str(), a.args.model.as_deref()), ("a", Some("demo")));
        assert_eq!(a.args.served_model_name, ["a", "b", "c-*"]);
        assert_eq!((a.args.engine.threads, a.args.engine.max_model_len), (Some(2), Some(64)));
        assert_eq!(d.args.served_model_name, ["d"]);
        assert_eq!((d.args.engine.threads, d.args.port), (Some(3), 2));
        let threads = of(&["--threads", "4"]).expect("models");
        assert!(threads.models.iter().all(|model| model.args.engine.threads == Some(4)));
        for flags in [&["demo"][..], &["--served-model-name", "x"], &["--usage", "u"], &["--batch-dir", "b"]]
        {
            let error = of(flags).expect_err("one process's").to_string();
            assert!(error.contains("[[models]]") && error.contains("a process of its own"), "{error}");
        }
    }

    #[test]
    fn keys_of_a_file_and_of_a_line_are_in_nothing_that_is_printed() {
        let file =
            ConfigFile::parse("api-key = \"fk-hidden\"\n[[models]]\nname = \"a\"\n").expect("a good file");
        let line = ["folio", "serve", "--api-key", "fk-hidden-too"].map(OsString::from);
        let on_demand = file.on_demand(&line).expect("models");
        assert!(on_demand.configuration.contains("hidden") && on_demand.models[0].args.api_key.len() == 1);
        let printed = format!("{on_demand:?}");
        assert!(printed.contains("***") && !printed.contains("hidden"), "{printed}");
    }

    #[test]
    fn a_router_writes_a_length_and_as_much() {
        let read = |text: &str| from_router(text.as_bytes());
        assert_eq!(read("5\nport!more").expect("read"), "port!");
        for wrong in ["", "x\n", "9\nshort", "99999999999\n"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_flag_of_serve_can_stand_in_a_file() {
        let command = Cli::command();
        let serve = command.find_subcommand("serve").expect("serve");
        for argument in serve.get_arguments().filter(|a| !NOT_IN_A_FILE.contains(&a.get_id().as_str())) {
            let action = argument.get_action();
            let known = matches!(action, ArgAction::Set | ArgAction::SetTrue | ArgAction::Append);
            assert!(known, "{}: {action:?}", argument.get_id());
        }
    }

    #[test]
    fn tables_are_kept_as_the_json_that_their_files_would_hold() {
        let file = ConfigFile::parse(
            "port = 1\ndefault_adapters = [\"public\"]\n[[tenants]]\nname = \"acme\"\nkeys = [\"k\"]\nweight = 3\nceiling = \"50%\"\n\
             adapters = [\"sql\"]\n[[prefixes]]\nname = \"p\"\nprompt = \"x\"\n[safety]\nrules = []\n",
        )
        .expect("good");
        let tenants = file.tables.tenants.expect("tenants");
        let declared = Declared::parse(&tenants, &|_| None).expect("declared");
        let adapters = declared.tenants[0].adapters.as_ref().expect("a list");
        assert!(adapters.has("sql") && !adapters.has("other"));
        assert!(declared.default_adapters.has("public") && !declared.default_adapters.has("sql"));
        assert_eq!((declared.tenants[0].weight, declared.prefixes[0].name.as_str()), (3, "p"));
        assert_eq!(file.tables.safety.as_deref(), Some("{\"rules\":[]}"));
    }

    #[test]
    fn a_damaged_file_is_read_or_refused() {
        let page = include_str!("../../../docs/configuration.md");
        let example = page.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).expect("one");
        let (mut read, mut refused) = (0, 0);
        for at in (0..example.len()).step_by(7).filter(|at| example.is_char_boundary(*at)) {
            let (before, behind) = example.split_at(at);
            for odd in ["", "\"", "\n[[tenants]]\n", "\u{0}"] {
                match ConfigFile::parse(&[before, odd, if odd.is_empty() { "" } else { behind }].concat()) {
                    Ok(file) => {
                        read += 1;
                        let declared =
                            file.tables.tenants.map(|tenants| Declared::parse(&tenants, &|_| None));
                        if let Some(Err(error)) = declared {
                            assert!(error.to_string().contains("the tenants file: "), "{error}");
                        }
                    }
                    Err(error) => {
                        refused += 1;
                        assert!(!format!("{error:#}").is_empty());
                    }
                }
            }
        }
        assert!(read > 1 && refused > 50, "{read} are read and {refused} refused");
    }

    #[test]
    fn the_examples_in_the_documents_can_be_read() {
        let environment = |_: &str| Some("key".to_owned());
        for page in [include_str!("../../../README.md"), include_str!("../../../docs/configuration.md")] {
            let examples = page.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next());
            let mut read = 0;
            for example in examples {
                let file = ConfigFile::parse(example).unwrap_or_else(|error| panic!("{error:#}\n{example}"));
                if let Some(tenants) = &file.tables.tenants {
                    Declared::parse(tenants, &environment).expect("tenants");
                }
                read += 1;
            }
            assert!(read > 0, "there is no example");
        }
    }
}
