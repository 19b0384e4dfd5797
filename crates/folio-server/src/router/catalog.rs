//! Which model a name means.
//!
//! Owns: names, names of adapters, and patterns. A name that is written out wins over a pattern, and of patterns the first that fits.

use std::collections::HashMap;

use folio_api::{ApiError, is_pattern, name_matches};

use crate::adapters::AllowedAdapters;
use crate::error::ServerError;

use super::config::ModelProcess;

const LATEST: &str = ":latest";

/// See the module documentation. Models go by their place in the configuration.
pub(super) struct Catalog {
    pub models: Vec<ModelProcess>,
    by_name: HashMap<String, usize>,
    patterns: Vec<(String, usize)>,
}

impl Catalog {
    /// Refuses a name that two models have, and a model without one.
    pub fn new(models: &[ModelProcess]) -> Result<Self, ServerError> {
        let mut catalog = Self { models: models.to_vec(), by_name: HashMap::new(), patterns: Vec::new() };
        for (index, model) in models.iter().enumerate() {
            if model.names.first().is_none_or(|name| name.is_empty() || is_pattern(name)) {
                return Err(ServerError::Config("a model's first name is a name, and no pattern".into()));
            }
            for name in model.names.iter().chain(&model.adapters) {
                if is_pattern(name) {
                    catalog.patterns.push((name.clone(), index));
                } else if let Some(other) = catalog.by_name.insert(name.clone(), index) {
                    let (first, second) = (&models[other].names[0], &model.names[0]);
                    let problem = format!("'{name}' is a name of the model '{first}' and of '{second}'");
                    return Err(ServerError::Config(problem));
                }
            }
        }
        Ok(catalog)
    }

    /// The model of this name; `ollama`: whose names may end with a tag that says nothing. The name of an adapter that is not among `allowed`
    /// is found like one that nobody gave.
    pub fn find(&self, asked: &str, ollama: bool, allowed: &AllowedAdapters) -> Result<usize, ApiError> {
        let plain = asked.strip_suffix(LATEST).filter(|_| ollama);
        let named = |name: &str| {
            let model = self.by_name.get(name).copied();
            model.filter(|model| allowed.has(name) || !self.is_adapter(*model, name))
        };
        let fits = |name: &str| {
            self.patterns.iter().find(|(pattern, _)| name_matches(pattern, name)).map(|(_, model)| *model)
        };
        let found = named(asked).or_else(|| named(plain?)).or_else(|| fits(asked)).or_else(|| fits(plain?));
        found.ok_or_else(|| {
            let served: Vec<&str> = self.models.iter().map(|model| &*model.names[0]).collect();
            ApiError::model_not_found(asked, &served.join("', '"))
        })
    }

    /// Whether this is the name of one of the model's adapters.
    pub fn is_adapter(&self, model: usize, name: &str) -> bool {
        self.models[model].adapters.iter().any(|adapter| adapter == name)
    }

    /// What answers call it.
    pub fn name(&self, model: usize) -> &str {
        &self.models[model].names[0]
    }

    /// Every name that is no pattern, with its model, and whether it is an adapter's.
    pub fn listed(&self) -> impl Iterator<Item = (&str, usize, bool)> {
        self.models.iter().enumerate().flat_map(|(index, model)| {
            let names = model.names.iter().filter(|name| !is_pattern(name));
            let names = names.map(move |name| (name.as_str(), index, false));
            names.chain(model.adapters.iter().map(move |name| (name.as_str(), index, true)))
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn model(names: &[&str], adapters: &[&str]) -> ModelProcess {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        ModelProcess {
            names: owned(names),
            adapters: owned(adapters),
            need_bytes: 2,
            weight_bytes: 1,
            on_gpu: false,
            family: "llama".into(),
            parameters: 1,
            format: "bf16".into(),
            context_length: 100,
            digest: String::new(),
            keep_alive: None,
            arguments: Vec::new(),
        }
    }

    #[test]
    fn names_win_over_patterns_and_the_first_pattern_over_the_next() {
        let models = [model(&["a", "gpt-*", "org/a"], &["pirate"]), model(&["b", "gpt-4o", "*"], &[])];
        let catalog = Catalog::new(&models).unwrap();
        for (asked, ollama, found) in [
            ("a", false, 0),
            ("org/a", false, 0),
            ("pirate", false, 0),
            ("gpt-5", false, 0),
            ("gpt-4o", false, 1),
            ("a:latest", false, 1),
            ("a:latest", true, 0),
            ("else", false, 1),
        ] {
            assert_eq!(catalog.find(asked, ollama, &AllowedAdapters::All).ok(), Some(found), "{asked}");
        }
        let listed: Vec<_> = catalog.listed().collect();
        assert_eq!(
            listed,
            [
                ("a", 0, false),
                ("org/a", 0, false),
                ("pirate", 0, true),
                ("b", 1, false),
                ("gpt-4o", 1, false)
            ]
        );
        let none = Catalog::new(&models[..1]).unwrap().find("c", true, &AllowedAdapters::All).unwrap_err();
        assert!(
            none.status == 404 && none.message.contains("'c'") && none.message.contains("'a'"),
            "{none:?}"
        );
    }

    #[test]
    fn the_name_of_an_adapter_that_is_not_allowed_is_nobodys() {
        let models = [model(&["a"], &["pirate", "team-x"])];
        let catalog = Catalog::new(&models).unwrap();
        let allowed = AllowedAdapters::only(vec!["team-*".into()]).unwrap();
        for (asked, found) in [("a", Some(0)), ("team-x", Some(0)), ("pirate", None), ("pirate:latest", None)]
        {
            assert_eq!(catalog.find(asked, true, &allowed).ok(), found, "{asked}");
        }
        let answer = |asked: &str| format!("{:?}", catalog.find(asked, false, &allowed).unwrap_err());
        assert_eq!(answer("pirate").replace("pirate", "nobody"), answer("nobody"));
        let any = Catalog::new(&[model(&["a"], &["pirate"]), model(&["b", "*"], &[])]).unwrap();
        assert_eq!(any.find("pirate", false, &allowed).ok(), Some(1), "as any other name");
    }

    #[test]
    fn no_two_models_have_one_name() {
        let refused = |models: &[ModelProcess]| Catalog::new(models).err().unwrap().to_string();
        let twice = refused(&[model(&["a"], &["x"]), model(&["b", "x"], &[])]);
        assert!(twice.contains("'x' is a name of the model 'a' and of 'b'"), "{twice}");
        assert!(refused(&[model(&["a*"], &[])]).contains("no pattern"));
    }
}
