//! Which modules a setting of compressed-tensors is for: names, `re:` patterns, and the class "Linear".

use regex::{Regex, RegexBuilder};

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
        let Some(pattern) = text.strip_prefix("re:") else { return Ok(Self::Name(text.to_owned())) };
        // Python's `re.match`: from the start of the name, not necessarily to its end.
        let compiled = RegexBuilder::new(&format!("^(?:{pattern})")).size_limit(PATTERN_BYTES_MAX).build();
        let shown: String = pattern.chars().take(60).collect();
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
        assert!(Closeness::Name > Closeness::Pattern && Closeness::Pattern > Closeness::Class);
    }

    #[test]
    fn patterns_that_cannot_be_used_are_named() {
        for pattern in ["re:(?!x)y", "re:(", "re:(a{1000}){1000}"] {
            assert!(Target::parse(pattern).unwrap_err().contains(&pattern[3..]), "{pattern}");
        }
    }
}
