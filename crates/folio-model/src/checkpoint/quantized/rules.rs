//! Which modules a setting is for. Of compressed-tensors: names, `re:` patterns, and the class "Linear"; of others: names and
//! patterns ([`Settings`]).

use std::collections::BTreeMap;

use regex::{Regex, RegexBuilder};

use super::piece::Pieces;

/// Bound on what a pattern of a config.json may compile to.
const PATTERN_BYTES_MAX: usize = 1 << 20;
const CLASS: &str = "Linear";

/// One entry of `targets` or `ignore`.
#[derive(Clone, Debug)]
pub enum Target {
    /// A module's name, or a class.
    Name(String),
    Pattern(Regex),
}

/// How closely a target names a module; compressed-tensors lets the closest win (`utils/match.py`, `match_targets`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Closeness {
    Class,
    Pattern,
    Name,
}

impl Target {
    /// `Err` says why a pattern cannot be used.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text.strip_prefix("re:") {
            Some(pattern) => Self::at_start(pattern),
            None => Ok(Self::Name(text.to_owned())),
        }
    }

    /// Python's `re.match`: from the start of the name, not necessarily to its end. `Err` as of [`Target::parse`].
    pub fn at_start(pattern: &str) -> Result<Self, String> {
        Self::compile(pattern, &format!("^(?:{pattern})"))
    }

    /// Python's `re.search`: anywhere in the name. `Err` as of [`Target::parse`].
    pub fn anywhere(pattern: &str) -> Result<Self, String> {
        Self::compile(pattern, pattern)
    }

    fn compile(shown: &str, pattern: &str) -> Result<Self, String> {
        let compiled = RegexBuilder::new(pattern).size_limit(PATTERN_BYTES_MAX).build();
        let shown: String = shown.chars().take(60).collect();
        compiled.map(Self::Pattern).map_err(|_| format!("the pattern `{shown}`"))
    }

    pub fn matches(&self, module: &str) -> Option<Closeness> {
        match self {
            Self::Name(name) if name == module => Some(Closeness::Name),
            Self::Name(name) if name == CLASS => Some(Closeness::Class),
            Self::Name(_) => None,
            Self::Pattern(pattern) => pattern.is_match(module).then_some(Closeness::Pattern),
        }
    }
}

impl PartialEq for Target {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Name(a), Self::Name(b)) => a == b,
            (Self::Pattern(a), Self::Pattern(b)) => a.as_str() == b.as_str(),
            _ => false,
        }
    }
}

/// A setting for all modules, and others for those that a rule names. `None`: they are not quantized.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings<T> {
    pub all: T,
    pub names: BTreeMap<String, Option<T>>,
    /// The first that matches is meant, unless a name is.
    pub patterns: Vec<(Target, Option<T>)>,
}

impl<T: Copy> Settings<T> {
    /// The same for all.
    pub fn of_all(all: T) -> Self {
        Self { all, names: BTreeMap::new(), patterns: Vec::new() }
    }

    /// The setting of the module with these codes. Rules call it what the file calls it.
    pub fn of(&self, codes: &str, pieces: &Pieces<'_>) -> crate::error::Result<T> {
        let stored = pieces.stored_name(codes);
        let module = stored.strip_suffix(".qweight").unwrap_or(stored);
        let by_pattern = || {
            let mut patterns = self.patterns.iter();
            patterns.find(|(target, _)| target.matches(module).is_some()).map(|(_, setting)| setting)
        };
        match self.names.get(module).or_else(by_pattern) {
            None => Ok(self.all),
            Some(Some(setting)) => Ok(*setting),
            Some(None) => {
                let problem = "is quantized, but the quantization_config says that its module is not";
                Err(pieces.problem(codes, problem))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_match_as_in_compressed_tensors() {
        let matches = |target: &str, module: &str| Target::parse(target).unwrap().matches(module);
        let module = "model.layers.0.mlp.gate_proj";
        assert_eq!(matches("Linear", module), Some(Closeness::Class));
        assert_eq!(matches("Embedding", module), None);
        assert_eq!(matches(module, module), Some(Closeness::Name));
        assert_eq!(matches("gate_proj", module), None);
        assert_eq!(matches("re:.*gate_proj", module), Some(Closeness::Pattern));
        // From the start, but not to the end.
        assert_eq!(matches(r"re:model\.layers\.\d", module), Some(Closeness::Pattern));
        assert_eq!(matches("re:layers", module), None);
        assert_eq!(matches("re:.*mlp.gate$", module), None);
        assert_eq!(matches("re:a|model", module), Some(Closeness::Pattern));
        assert!(Target::anywhere("layers.0").unwrap().matches(module).is_some());
        assert!(Target::at_start("layers.0").unwrap().matches(module).is_none());
        assert!(Closeness::Name > Closeness::Pattern && Closeness::Pattern > Closeness::Class);
    }

    #[test]
    fn patterns_that_cannot_be_used_are_named() {
        for pattern in ["re:(?!x)y", "re:(", "re:(a{1000}){1000}"] {
            assert!(Target::parse(pattern).unwrap_err().contains(&pattern[3..]), "{pattern}");
        }
    }
}
