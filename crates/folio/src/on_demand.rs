//! `folio serve` of several models: what each needs, and a router in front of them.
//!
//! Owns: the division of memory among models before any is loaded, and what a model's process does otherwise than a server by itself. Must
//! never: hold a model; each is this program again, with its part of the file.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use folio_server::{App, ModelProcess, RouterConfig, ServerConfig};
use tokio::sync::mpsc;

use crate::cli::ServeArgs;
use crate::config::OnDemandModel;
use crate::runtime::{MemoryPlan, computes_on_a_gpu, weight_files};
use crate::{memory, serve, units};

/// Of the memory that is free at the start, what models may take where nothing is said: the rest is for the buffers of steps.
const SHARE: f64 = 0.9;

/// Serves the models of the file, each when it is asked for.
pub fn run(args: &ServeArgs) -> Result<()> {
    let mut config = serve::settings(args)?;
    // A request takes a connection from its client and one to its model's process.
    serve::fit_open_files(&mut config.limits.connections, 2);
    let on_demand = &args.on_demand;
    let memory = budget(args)?;
    let models = planned(&on_demand.models, memory, &on_demand.line)?;
    eprintln!("folio {}", env!("CARGO_PKG_VERSION"));
    for model in &models {
        let stays = match model.keep_alive {
            Some(time) => format!("stays {} s", time.as_secs()),
            None => "stays".to_owned(),
        };
        eprintln!(
            "  {:<9} {}: {} ({} of weights), context {} tokens, {stays}",
            "model",
            model.names.join(", "),
            units::bytes(model.need_bytes),
            units::bytes(model.weight_bytes),
            units::count(model.context_length.into()),
        );
    }
    eprintln!("  {:<9} {} for all models that are loaded at once", "memory", units::bytes(memory));
    let router = RouterConfig {
        models,
        program: std::env::current_exe().context("where this program is")?,
        configuration: on_demand.configuration.as_str().into(),
        memory_bytes: memory,
        start_timeout: Duration::from_secs(args.model_start_timeout),
        wait_timeout: Duration::from_secs(args.model_wait_timeout),
        waiting: args.model_wait_requests as usize,
        version: env!("CARGO_PKG_VERSION"),
    };
    folio_server::run_router(config, router, |addresses| {
        let scheme = if addresses.tls { "https" } else { "http" };
        if let Some(admin) = addresses.admin {
            eprintln!("  {:<9} {scheme}://{admin}", "operators");
        }
        eprintln!("\nlistening on {scheme}://{}  (Ctrl-C to stop)\n", addresses.serving);
    })?;
    Ok(())
}

/// Bytes that the models may need together.
fn budget(args: &ServeArgs) -> Result<u64> {
    if let Some(asked) = args.models_memory {
        return Ok(asked);
    }
    if args.on_demand.models.iter().any(|model| computes_on_a_gpu(&model.args.engine)) {
        bail!("--models-memory: a GPU computes, so say how much of its memory the models may take together");
    }
    let free = memory::free().context("free memory cannot be read on this machine: give --models-memory")?;
    Ok((free.bytes as f64 * SHARE) as u64)
}

/// What each needs. Where no size of the KV cache is asked for, a model has its even part of the memory to divide.
fn planned(models: &[OnDemandModel], memory: u64, line: &[OsString]) -> Result<Vec<ModelProcess>> {
    let share = memory / models.len().max(1) as u64;
    let one = |OnDemandModel { name, args }: &OnDemandModel| {
        let plan = MemoryPlan::new(args.model.as_deref(), &args.engine, share)
            .with_context(|| format!("the model '{name}'"))?;
        let adapters = args.lora.iter().map(|spec| match spec.split_once('=') {
            Some((name, path)) => Ok((name.to_owned(), weight_files(Path::new(path))?)),
            None => bail!("the model '{name}': lora: {spec}: expected NAME=PATH"),
        });
        let adapters =
            adapters.collect::<Result<Vec<_>>>().with_context(|| format!("the model '{name}': lora"))?;
        let adapter_bytes = adapters.iter().map(|(_, bytes)| bytes).sum::<u64>().min(args.lora_memory);
        let need_bytes = plan.weight_bytes + plan.kv_bytes + plan.host_bytes + adapter_bytes;
        if need_bytes > memory {
            bail!(
                "the model '{name}' needs {} ({} of weights, {} of KV cache), more than the {} of all models: give a larger \
                 --models-memory, or a smaller kv-cache-memory or max-model-len for it",
                units::bytes(need_bytes),
                units::bytes(plan.weight_bytes),
                units::bytes(plan.kv_bytes),
                units::bytes(memory)
            );
        }
        let mut arguments = line.to_vec();
        if args.engine.kv_cache_memory.is_none() {
            arguments.extend(["--kv-cache-memory".into(), plan.kv_bytes.to_string().into()]);
        }
        arguments.extend(["--only-model".into(), name.into()]);
        Ok(ModelProcess {
            names: args.served_model_name.clone(),
            adapters: adapters.into_iter().map(|(name, _)| name).collect(),
            need_bytes,
            weight_bytes: plan.weight_bytes,
            on_gpu: computes_on_a_gpu(&args.engine),
            family: plan.family,
            parameters: plan.parameters,
            format: plan.format,
            context_length: plan.context_length,
            digest: plan.digest,
            keep_alive: args.keep_alive.0,
            arguments,
        })
    };
    models.iter().map(one).collect()
}

/// What a model's process hears of its router: that it is to end, or is alone.
pub struct Lifeline {
    serving: Arc<AtomicBool>,
    ends: mpsc::Receiver<()>,
}

impl Lifeline {
    /// Before it serves, the end of its standard input is its own.
    pub fn hold() -> Result<Self> {
        let serving = Arc::new(AtomicBool::new(false));
        let (sender, ends) = mpsc::channel(1);
        let is_serving = serving.clone();
        let listen = move || {
            let mut byte = [0];
            while matches!(std::io::stdin().read(&mut byte), Ok(1..)) {}
            if !is_serving.load(Ordering::SeqCst) {
                std::process::exit(0);
            }
            let _ = sender.blocking_send(());
        };
        std::thread::Builder::new().name("folio-lifeline".into()).spawn(listen)?;
        Ok(Self { serving, ends })
    }

    /// Serves at this socket until the router says otherwise. Returns what is left of the time for draining.
    pub fn serve(self, config: ServerConfig, app: App, socket: &Path) -> Result<Duration> {
        self.serving.store(true, Ordering::SeqCst);
        let left = folio_server::run_behind(config, app, socket, self.ends, || {
            let mut output = std::io::stdout();
            // A router that does not hear it has gone.
            let _ = output.write_all(b"\n").and_then(|()| output.flush());
        })?;
        Ok(left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Command;
    use crate::config;

    fn models(file: &str) -> (tempfile::TempDir, Box<ServeArgs>) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("folio.toml");
        std::fs::write(&path, file).expect("written");
        let line = ["folio", "serve", "--device", "cpu", "--config", path.to_str().expect("text")];
        match config::command_line(line.map(Into::into)).expect("a good file") {
            Command::Serve(args) => (folder, args),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_model_without_a_size_of_its_kv_cache_is_told_the_one_that_was_planned() {
        let file = "max-model-len = 512\n[[models]]\nname = \"a\"\nkv-cache-memory = \"8MiB\"\n\
                    [[models]]\nname = \"b\"\nserved-model-name = [\"bee\", \"b-*\"]\nkeep-alive = \"-1\"\n";
        let (_folder, args) = models(file);
        let plans = planned(&args.on_demand.models, 200 << 20, &args.on_demand.line).expect("they fit");
        let told = |plan: &ModelProcess| {
            plan.arguments.iter().position(|argument| argument == "--kv-cache-memory").map(|at| {
                plan.arguments[at + 1].to_str().and_then(|bytes| bytes.parse::<u64>().ok()).expect("bytes")
            })
        };
        assert_eq!((told(&plans[0]), plans[0].need_bytes - plans[0].weight_bytes), (None, 8 << 20));
        assert_eq!(told(&plans[1]), Some(plans[1].need_bytes - plans[1].weight_bytes));
        assert!(plans[1].need_bytes <= 100 << 20, "an even part");
        assert_eq!(plans[1].names, ["b", "bee", "b-*"]);
        assert_eq!((plans[0].keep_alive, plans[1].keep_alive), (Some(Duration::from_secs(300)), None));
        assert!(plans[1].arguments.ends_with(&["--only-model".into(), "b".into()]));
    }

    #[test]
    fn what_never_fits_is_refused_with_both_numbers() {
        let (_folder, args) =
            models("max-model-len = 512\n[[models]]\nname = \"a\"\nkv-cache-memory = \"64MiB\"\n");
        let error = planned(&args.on_demand.models, 32 << 20, &[]).expect_err("too large").to_string();
        assert!(
            error.contains("'a' needs") && error.contains("64.0 MiB") && error.contains("32.0 MiB"),
            "{error}"
        );
    }
}
