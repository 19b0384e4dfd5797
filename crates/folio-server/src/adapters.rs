//! Adapters (LoRA) by name: which are served, and how they come and go.
//!
//! Owns: names, what was found under each, and lists of those that somebody may use. Must never: hold weights (the engine does, of as many
//! as there is room for), read them on the event loop, or let who asks for an answer name a file. An adapter that goes ends no request.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use folio_api::name_matches;
use folio_engine::{Adapter, AdapterId, AdapterSource, RequestAdapter};
use parking_lot::RwLock;

use crate::threads::{NOBODY, Pool, WorkLost};

/// Reads an adapter of the served model. Blocks.
pub type LoadAdapter = dyn Fn(&Path) -> Result<Adapter, String> + Send + Sync;

/// Gives weights that were just read to whoever keeps them where there is room ([`folio_engine::EngineHandle::keep_adapter`]).
pub type KeepAdapter = dyn Fn(AdapterId, Arc<Adapter>) + Send + Sync;

/// Characters of a name.
const NAME_MAX: usize = 128;
/// Names and patterns of one list.
const ALLOWED_MAX: usize = 1000;
/// Loads that wait for one.
const WAITING: usize = 16;

/// What of adapters is served. By default none, for ever.
pub struct Adapters {
    load: Option<Arc<LoadAdapter>>,
    keep: Box<KeepAdapter>,
    /// Folders below it may be loaded while serving. `None`: none may.
    folder: Option<PathBuf>,
    served: RwLock<ServedAdapters>,
    loading: Pool,
}

#[derive(Default)]
struct ServedAdapters {
    by_name: BTreeMap<String, ServedAdapter>,
    last: u32,
}

struct ServedAdapter {
    adapter: RequestAdapter,
    path: PathBuf,
    rank: usize,
}

/// An adapter's place, and what was there when it got its name.
struct AdapterFile {
    name: String,
    path: PathBuf,
    load: Arc<LoadAdapter>,
    digest: [u8; 32],
    bytes: u64,
}

impl AdapterSource for AdapterFile {
    fn digest(&self) -> &[u8; 32] {
        &self.digest
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Errors name nothing: those that wait may know the same weights by another name.
    fn read(&self) -> Result<Arc<Adapter>, String> {
        let Self { name, path, .. } = self;
        let path = path.display();
        let adapter = (self.load)(&self.path).map_err(|problem| {
            tracing::warn!(adapter = %name, %path, %problem, "the weights of an adapter cannot be read");
            "the weights of the adapter cannot be read any more".to_owned()
        })?;
        if *adapter.digest() != self.digest || adapter.bytes() as u64 != self.bytes {
            tracing::warn!(adapter = %name, %path, "an adapter is not what it was when it was loaded");
            return Err("the weights of the adapter are not those that it was loaded with".to_owned());
        }
        Ok(Arc::new(adapter))
    }
}

/// What can be wrong with loading or unloading, each with its sentence.
#[derive(Debug, PartialEq, Eq)]
pub enum AdapterProblem {
    /// The caller's fault.
    Invalid(String),
    NotFound(String),
    /// Too many load at once.
    Busy,
}

/// What is told of an adapter that is served.
pub struct AdapterCard {
    pub name: String,
    pub path: String,
    pub rank: usize,
}

/// Which adapters somebody may know of and use. By default all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AllowedAdapters {
    #[default]
    All,
    /// Names, and patterns of names (`team-*`).
    Only(Arc<[String]>),
}

impl AllowedAdapters {
    /// Those of an operator's list, which may be empty. A pattern that can be no adapter's is a mistake.
    pub fn only(list: Vec<String>) -> Result<Self, String> {
        if list.len() > ALLOWED_MAX {
            return Err(format!("has {} names, at most {ALLOWED_MAX}", list.len()));
        }
        let allowed = |c: char| is_of_names(c) || c == '*';
        let wrong = |name: &&String| name.is_empty() || name.len() > NAME_MAX || !name.chars().all(allowed);
        match list.iter().find(wrong) {
            Some(name) => Err(format!(
                "{name:?} is neither a name of an adapter nor a pattern like \"team-*\": 1 to {NAME_MAX} letters, digits, \
                 '.', '_', '-', ':', '/' and '*'"
            )),
            None => Ok(Self::Only(list.into())),
        }
    }

    /// Whether the adapter of this name is one of them. O(list).
    pub fn has(&self, name: &str) -> bool {
        match self {
            Self::All => true,
            Self::Only(list) => list.iter().any(|pattern| name_matches(pattern, name)),
        }
    }
}

/// A character that names of adapters may have.
fn is_of_names(c: char) -> bool {
    c.is_ascii_alphanumeric() || "._-:/".contains(c)
}

impl Default for Adapters {
    fn default() -> Self {
        Self {
            load: None,
            keep: Box::new(|_, _| ()),
            folder: None,
            served: RwLock::default(),
            loading: Pool::new(1, WAITING),
        }
    }
}

impl Adapters {
    /// `folder`: what lies below it may be loaded while serving.
    pub fn new(load: Box<LoadAdapter>, keep: Box<KeepAdapter>, folder: Option<PathBuf>) -> Self {
        Self { load: Some(load.into()), keep, folder, ..Self::default() }
    }

    /// Whether there may ever be any.
    pub fn can_be(&self) -> bool {
        self.load.is_some()
    }

    /// Whether some may come and go while serving.
    pub fn can_change(&self) -> bool {
        self.folder.is_some()
    }

    pub fn get(&self, name: &str) -> Option<RequestAdapter> {
        self.served.read().by_name.get(name).map(|known| known.adapter.clone())
    }

    /// In order of their names.
    pub fn cards(&self) -> Vec<AdapterCard> {
        let card = |(name, known): (&String, &ServedAdapter)| AdapterCard {
            name: name.clone(),
            path: known.path.display().to_string(),
            rank: known.rank,
        };
        self.served.read().by_name.iter().map(card).collect()
    }

    /// Names of those that run, by the engine's word, and of those that somebody has asked for and that do not.
    pub fn in_use(&self, running: &[AdapterId]) -> (Vec<String>, Vec<String>) {
        let served = self.served.read();
        let (mut runs, mut waits) = (Vec::new(), Vec::new());
        for (name, known) in &served.by_name {
            if running.contains(&known.adapter.id) {
                runs.push(name.clone());
            // Whoever else holds its source asked for it.
            } else if Arc::strong_count(&known.adapter.source) > 1 {
                waits.push(name.clone());
            }
        }
        (runs, waits)
    }

    /// Loads an adapter that the operator names at the start. Blocks.
    pub fn load_at_start(&self, name: &str, path: &Path) -> Result<(), String> {
        self.check_name(name, false)?;
        let load = self.load.as_ref().ok_or("no adapters are served")?;
        self.serve(name, path.to_owned(), load(path)?, false)
    }

    /// Loads one while serving. `replace`: the name may be in use, and stands for the new weights from then on. `is_taken`: by the model.
    pub async fn load(
        self: &Arc<Self>,
        name: &str,
        path: &str,
        replace: bool,
        is_taken: bool,
    ) -> Result<(), AdapterProblem> {
        let Some(folder) = &self.folder else {
            return Err(AdapterProblem::NotFound("this server loads no adapters while serving".to_owned()));
        };
        if is_taken {
            return Err(AdapterProblem::Invalid(format!("'{name}' is a name of the model itself.")));
        }
        self.check_name(name, replace).map_err(AdapterProblem::Invalid)?;
        let (this, path) = (self.clone(), folder.join(path));
        let (name, folder) = (name.to_owned(), folder.clone());
        let work = move || {
            let found = inside(&folder, &path)?;
            let load = this.load.as_ref().ok_or(AdapterProblem::Busy)?;
            let adapter = load(&found).map_err(AdapterProblem::Invalid)?;
            this.serve(&name, found, adapter, replace).map_err(AdapterProblem::Invalid)
        };
        match self.loading.run(NOBODY, 1, work).await {
            Ok(Ok(done)) => done,
            Ok(Err(WorkLost)) => Err(AdapterProblem::Invalid("The adapter could not be read.".to_owned())),
            Err(_) => Err(AdapterProblem::Busy),
        }
    }

    /// The name stands for nothing from now on; who uses it ends undisturbed.
    pub fn unload(&self, name: &str) -> Result<(), AdapterProblem> {
        if !self.can_change() {
            return Err(AdapterProblem::NotFound("this server unloads no adapters while serving".to_owned()));
        }
        let gone = self.served.write().by_name.remove(name);
        gone.map(drop)
            .ok_or_else(|| AdapterProblem::NotFound(format!("The lora adapter '{name}' cannot be found.")))
    }

    fn check_name(&self, name: &str, replace: bool) -> Result<(), String> {
        if name.is_empty() || name.len() > NAME_MAX || !name.chars().all(is_of_names) {
            return Err(format!(
                "A name of an adapter is 1 to {NAME_MAX} letters, digits, '.', '_', '-', ':' and '/'."
            ));
        }
        if !replace && self.served.read().by_name.contains_key(name) {
            return Err(format!("The lora adapter '{name}' has already been loaded."));
        }
        Ok(())
    }

    fn serve(&self, name: &str, path: PathBuf, adapter: Adapter, replace: bool) -> Result<(), String> {
        let load = self.load.clone().ok_or("no adapters are served")?;
        let mut served = self.served.write();
        if !replace && served.by_name.contains_key(name) {
            return Err(format!("The lora adapter '{name}' has already been loaded."));
        }
        // What it computes may be another name's: so is its KV.
        let same = served.by_name.values().find(|known| known.adapter.source.digest() == adapter.digest());
        let id = match same.map(|known| known.adapter.id) {
            Some(id) => id,
            None => {
                served.last += 1;
                AdapterId(NonZeroU32::new(served.last).ok_or("adapters have no numbers left")?)
            }
        };
        let source = Arc::new(AdapterFile {
            name: name.to_owned(),
            path: path.clone(),
            load,
            digest: *adapter.digest(),
            bytes: adapter.bytes() as u64,
        });
        let known = ServedAdapter { adapter: RequestAdapter { id, source }, path, rank: adapter.rank() };
        served.by_name.insert(name.to_owned(), known);
        drop(served);
        (self.keep)(id, Arc::new(adapter));
        Ok(())
    }
}

/// The folder that a path names, which is below `folder` whatever links are on the way.
fn inside(folder: &Path, path: &Path) -> Result<PathBuf, AdapterProblem> {
    let missing = || AdapterProblem::NotFound(format!("No adapter found for {}", path.display()));
    let (folder, found) =
        (folder.canonicalize().map_err(|_| missing())?, path.canonicalize().map_err(|_| missing())?);
    match found.starts_with(&folder) && found != folder {
        true => Ok(found),
        // Whether something is there is told to nobody.
        false => Err(missing()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_names_and_patterns_allows_those_and_no_other() {
        let only =
            |list: &[&str]| AllowedAdapters::only(list.iter().map(|name| (*name).to_owned()).collect());
        let some = only(&["sql", "team-*"]).unwrap();
        for (name, has) in
            [("sql", true), ("team-a", true), ("team-", true), ("sql2", false), ("team", false)]
        {
            assert_eq!(some.has(name), has, "{name}");
        }
        assert!(AllowedAdapters::default().has("sql") && !only(&[]).unwrap().has("sql"));
        for wrong in ["", "a b", "a,b", "\u{e9}", &"x".repeat(NAME_MAX + 1)] {
            let problem = only(&["sql", wrong]).unwrap_err();
            assert!(problem.contains("pattern") && problem.contains(&format!("{wrong:?}")), "{problem}");
        }
        assert!(only(&["x"; ALLOWED_MAX]).is_ok() && only(&["x"; ALLOWED_MAX + 1]).is_err());
    }
}
