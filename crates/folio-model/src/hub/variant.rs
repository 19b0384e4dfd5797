//! Which GGUF model of a repository is meant: told by the names of its files, which say how their weights are quantized.
//!
//! Owns: what makes a file a model, which files are its parts, and the choice, as llama.cpp makes it for `-hf org/model:QUANT`.
//! Must never: look inside a file. Names come from a stranger; those that could lead elsewhere are gone before (`listing`).

use std::collections::HashSet;
use std::path::Path;

use crate::checkpoint::gguf::{is_gguf, split_name};

/// What is taken where nobody says which: llama.cpp's default, then what is nearest to it in size and can be served.
const PREFERRED: [&str; 17] = [
    "Q4_K_M", "Q4_K_S", "Q4_K_L", "Q4_K_XL", "Q4_0", "Q4_1", "MXFP4", "IQ4_XS", "IQ4_NL", "Q5_K_M", "Q5_K_S",
    "Q5_0", "Q6_K", "Q8_0", "BF16", "F16", "F32",
];
/// In the names of files that belong to a model and are none: projectors of images, statistics for quantizing.
const NO_MODELS: [&str; 2] = ["mmproj", "imatrix"];
/// Variants that an error names.
const NAMED_MAX: usize = 40;

/// A model: one GGUF file, or those it was split into, of which all are there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufModel {
    /// In order, as paths in the repository.
    pub parts: Vec<String>,
}

/// Why no model was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoChoice {
    /// There is none at all.
    Empty,
    /// None of that name; what there is instead.
    Unknown { found: String },
    /// The first file of a split model, and the first of its parts that is missing.
    Incomplete { file: String, missing: String },
}

impl GgufModel {
    /// By its first file; the parts must be among `files`.
    fn of(first: &str, files: &HashSet<&str>) -> Result<Self, NoChoice> {
        let Some(split) = split_name(Path::new(first)) else {
            return Ok(Self { parts: vec![first.to_owned()] });
        };
        let mut parts = Vec::new();
        for path in split.paths() {
            let path = path.to_string_lossy().into_owned();
            if !files.contains(path.as_str()) {
                return Err(NoChoice::Incomplete { file: first.to_owned(), missing: path });
            }
            parts.push(path);
        }
        Ok(Self { parts })
    }

    /// How its weights are quantized, as its file's or folder's name says; else the file's name.
    pub fn label(&self) -> &str {
        label(&self.parts[0])
    }
}

/// The model that `variant` means among these files: a quantization in any case, or a file's name. The shortest name of those that
/// fit, since what is beside it has more to say.
pub fn choose(files: &[&str], variant: Option<&str>) -> Result<GgufModel, NoChoice> {
    let all: HashSet<&str> = files.iter().copied().collect();
    let mut firsts = firsts(files);
    firsts.sort_by_key(|file| (file.len(), *file));
    let Some(shortest) = firsts.first() else { return Err(NoChoice::Empty) };
    let found = |wanted: &str| firsts.iter().find(|file| fits(file, wanted));
    let first = match variant {
        Some(variant) => found(variant).ok_or_else(|| NoChoice::Unknown { found: labels(&firsts) })?,
        None => PREFERRED.into_iter().find_map(found).unwrap_or(shortest),
    };
    GgufModel::of(first, &all)
}

/// Every model that is there with all its parts.
pub fn all(files: &[&str]) -> Vec<GgufModel> {
    let all: HashSet<&str> = files.iter().copied().collect();
    firsts(files).into_iter().filter_map(|first| GgufModel::of(first, &all).ok()).collect()
}

/// The files that are models, or the first of several that are one.
fn firsts<'a>(files: &[&'a str]) -> Vec<&'a str> {
    let is_model = |path: &str| {
        let file = path.rsplit('/').next().unwrap_or(path).to_ascii_lowercase();
        is_gguf(Path::new(path)) && !NO_MODELS.iter().any(|word| file.contains(word))
    };
    // A later part, and what is only called like one, is found by nobody.
    let is_first = |path: &str| {
        split_name(Path::new(path)).is_none_or(|split| split.path(1) == Path::new(path) && split.count > 0)
    };
    files.iter().copied().filter(|path| is_model(path) && is_first(path)).collect()
}

/// The path without `.gguf` and without the number of a part.
fn base(path: &str) -> &str {
    let stem = &path[..path.len() - ".gguf".len()];
    match split_name(Path::new(path)) {
        Some(_) => stem.rsplit_once("-00001-of-").map_or(stem, |(base, _)| base),
        None => stem,
    }
}

/// Whether `wanted` is the file's name, or a whole word of its path: `Q4_K` is none of `Q4_K_M`, nor `Q4_0` of `IQ4_0`.
fn fits(path: &str, wanted: &str) -> bool {
    let file = path.rsplit('/').next().unwrap_or(path);
    let stem = |name: &str| name.eq_ignore_ascii_case(wanted);
    if [path, file, &path[..path.len() - ".gguf".len()]].into_iter().any(stem) {
        return true;
    }
    // Where words are joined by '_', the parts of a quantization are none.
    let joined = if is_quantization(wanted) { '_' } else { '-' };
    let (base, wanted) = (base(path).to_ascii_lowercase(), wanted.to_ascii_lowercase());
    base.match_indices(&wanted).any(|(at, found)| {
        let before = base[..at].chars().next_back();
        let behind = base[at + found.len()..].chars().next();
        before.is_none_or(|c| ['-', '.', '/', joined].contains(&c))
            && behind.is_none_or(|c| ['-', '.', '/'].contains(&c))
    })
}

fn label(path: &str) -> &str {
    let base = base(path);
    let words = base.rsplit(['-', '.', '/']);
    let quantization = words.into_iter().find(|word| is_quantization(word));
    quantization.unwrap_or_else(|| base.rsplit('/').next().unwrap_or(base))
}

/// `Q4_K_M`, `IQ2_XXS`, `TQ1_0`, `BF16`, `MXFP4_MOE`.
fn is_quantization(word: &str) -> bool {
    let word = word.to_ascii_uppercase();
    let digit = |rest: &str| rest.starts_with(|c: char| c.is_ascii_digit());
    let blocks = ["Q", "IQ", "TQ"].iter().any(|kind| word.strip_prefix(kind).is_some_and(digit));
    blocks || ["F16", "F32", "FP16", "FP32", "BF16"].contains(&word.as_str()) || word.starts_with("MXFP4")
}

/// `Q4_K_M, Q8_0`: what can be asked for.
fn labels(firsts: &[&str]) -> String {
    let mut labels: Vec<&str> = firsts.iter().map(|file| label(file)).collect();
    labels.sort_unstable();
    labels.dedup();
    let more = labels.len().saturating_sub(NAMED_MAX);
    labels.truncate(NAMED_MAX);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    labels.join(", ") + &more
}

#[cfg(test)]
mod tests {
    use super::*;

    const BARTOWSKI: &[&str] = &[
        "m-IQ4_XS.gguf",
        "m-Q4_K_M.gguf",
        "m-Q4_K_S.gguf",
        "m-Q4_0.gguf",
        "m-Q4_0_4_4.gguf",
        "m-Q6_K_L.gguf",
        "m-f16.gguf",
        "mmproj-m-Q4_K_M.gguf",
        "m.imatrix.gguf",
        "README.md",
        "m-Q8_0/m-Q8_0-00001-of-00002.gguf",
        "m-Q8_0/m-Q8_0-00002-of-00002.gguf",
    ];

    fn chosen(files: &[&str], variant: Option<&str>) -> Vec<String> {
        choose(files, variant).unwrap_or_else(|error| panic!("{variant:?}: {error:?}")).parts
    }

    #[test]
    fn a_quantization_means_its_file_in_any_case_and_none_beside_it() {
        for (variant, file) in [
            (None, "m-Q4_K_M.gguf"),
            (Some("q4_k_m"), "m-Q4_K_M.gguf"),
            (Some("Q4_0"), "m-Q4_0.gguf"),
            (Some("IQ4_XS"), "m-IQ4_XS.gguf"),
            (Some("F16"), "m-f16.gguf"),
            (Some("m-Q4_K_S.gguf"), "m-Q4_K_S.gguf"),
            (Some("m-q4_k_s"), "m-Q4_K_S.gguf"),
        ] {
            assert_eq!(chosen(BARTOWSKI, variant), [file], "{variant:?}");
        }
        let parts = ["m-Q8_0/m-Q8_0-00001-of-00002.gguf", "m-Q8_0/m-Q8_0-00002-of-00002.gguf"];
        assert_eq!(chosen(BARTOWSKI, Some("Q8_0")), parts);
        for variant in ["Q4_K", "Q4", "Q6_K", "XS", "4_0", "imatrix", "mmproj-m-Q4_K_M.gguf", "Q2_K"] {
            let found = "IQ4_XS, Q4_0, Q4_0_4_4, Q4_K_M, Q4_K_S, Q6_K_L, Q8_0, f16".to_owned();
            assert_eq!(choose(BARTOWSKI, Some(variant)), Err(NoChoice::Unknown { found }), "{variant}");
        }
    }

    #[test]
    fn without_the_default_the_nearest_is_taken() {
        assert_eq!(chosen(&["m-F16.gguf", "m-Q8_0.gguf", "m-IQ1_S.gguf"], None), ["m-Q8_0.gguf"]);
        assert_eq!(chosen(&["m-UD-Q4_K_XL.gguf", "m-Q8_0.gguf"], None), ["m-UD-Q4_K_XL.gguf"]);
        assert_eq!(chosen(&["zz.gguf", "b.gguf", "a.gguf"], None), ["a.gguf"]);
        assert_eq!(choose(&["mmproj-F16.gguf", "x.safetensors"], None), Err(NoChoice::Empty));
        assert_eq!(choose(&[], Some("Q4_K_M")), Err(NoChoice::Empty));
    }

    #[test]
    fn the_plain_one_of_several_is_meant() {
        let files = ["m-imat-Q4_K_M.gguf", "m-Q4_K_M.gguf", "draft/m-small-Q4_K_M.gguf"];
        assert_eq!(chosen(&files, None), ["m-Q4_K_M.gguf"]);
        assert_eq!(chosen(&files, Some("draft/m-small-Q4_K_M")), ["draft/m-small-Q4_K_M.gguf"]);
    }

    #[test]
    fn parts_that_are_missing_or_only_called_so_make_no_model() {
        let files = ["m-Q4_0-00001-of-00003.gguf", "m-Q4_0-00003-of-00003.gguf"];
        let missing = "m-Q4_0-00002-of-00003.gguf".to_owned();
        let incomplete = NoChoice::Incomplete { file: files[0].to_owned(), missing };
        assert_eq!(choose(&files, None), Err(incomplete));
        assert_eq!(all(&files), []);
        // A count beyond any limit ends at the first part that is missing; names that no splitter writes are no parts.
        assert!(matches!(
            choose(&["m-00001-of-18446744073709551615.gguf"], None),
            Err(NoChoice::Incomplete { .. } | NoChoice::Empty)
        ));
        for odd in
            ["m-1-of-1.gguf", "m-00001-of-00000.gguf", "m-00002-of-00002.gguf", "m-00000-of-00001.gguf"]
        {
            assert_eq!(choose(&[odd], None), Err(NoChoice::Empty), "{odd}");
        }
        assert_eq!(chosen(&["m-00001-of-00001.gguf"], None), ["m-00001-of-00001.gguf"]);
    }

    #[test]
    fn labels_are_what_can_be_asked_for() {
        for (file, expected) in [
            ("Qwen3-0.6B-Q8_0.gguf", "Q8_0"),
            ("m.Q4_K_M.gguf", "Q4_K_M"),
            ("BF16/m-BF16-00001-of-00009.gguf", "BF16"),
            ("Q2_K/model.gguf", "Q2_K"),
            ("gpt-oss-20b-mxfp4.gguf", "mxfp4"),
            ("tinyllama.gguf", "tinyllama"),
        ] {
            assert_eq!(label(file), expected);
            assert!(fits(file, label(file)), "{file}");
        }
    }
}
