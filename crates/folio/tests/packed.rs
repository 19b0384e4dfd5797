//! Packed weights on disk: kept between starts, refused when anything about them is wrong, and the same model as without.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn folio(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_folio"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("FOLIO_") && name != "FOLIO_ISA") {
        command.env_remove(name);
    }
    command.env("FOLIO_LOG", "folio=debug").args(arguments).stdin(Stdio::null());
    command.output().expect("folio runs")
}

/// A copy of the built-in model as a folder, and a cache.
struct Place {
    root: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let place = Self { root: tempfile::tempdir().expect("folder") };
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo");
        fs::create_dir(place.model()).expect("folder");
        for entry in fs::read_dir(demo).expect("assets") {
            let path = entry.expect("entry").path();
            fs::copy(&path, place.model().join(path.file_name().expect("name"))).expect("copied");
        }
        place
    }

    fn model(&self) -> PathBuf {
        self.root.path().join("model")
    }

    fn cache(&self) -> PathBuf {
        self.root.path().join("cache")
    }

    fn kept(&self) -> Vec<PathBuf> {
        let Ok(entries) = fs::read_dir(self.cache()) else { return Vec::new() };
        entries.map(|entry| entry.expect("entry").path()).collect()
    }

    /// The answer and what was said about packed weights.
    fn run(&self, model: &Path, more: &[&str]) -> (String, String) {
        let (model, cache) = (model.to_str().expect("text"), self.cache());
        let cache = cache.to_str().expect("text");
        let fixed = ["run", model, "Once upon a time", "--raw", "--max-tokens", "20", "--ignore-eos"];
        let defaults = [["--packed-cache", cache], ["--packed-cache-min", "0"], ["--temperature", "0"]];
        let defaults = defaults.iter().filter(|[flag, _]| !more.contains(flag)).flatten();
        let arguments: Vec<&str> = fixed.iter().chain(defaults).chain(more).copied().collect();
        let output = folio(&arguments);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{errors}");
        (String::from_utf8(output.stdout).expect("text"), errors)
    }
}

const KEPT: &str = "packed weights kept";
const MAPPED: &str = "packed weights mapped";
const REFUSED: &str = "packed weights are refused";

#[test]
fn a_second_start_maps_what_the_first_packed() {
    let place = Place::new();
    let (answer, said) = place.run(&place.model(), &[]);
    assert!(said.contains(KEPT) && !said.contains(MAPPED), "{said}");
    let kept = place.kept();
    assert!(matches!(&kept[..], [file] if file.extension().is_some_and(|e| e == "folio")), "{kept:?}");
    let (again, said) = place.run(&place.model(), &["--threads", "1"]);
    assert!(said.contains(MAPPED) && !said.contains(KEPT), "{said}");
    assert_eq!(again, answer);
    // Where it lies does not matter; what was asked for does.
    let moved = place.root.path().join("moved");
    fs::rename(place.model(), &moved).expect("renamed");
    assert!(place.run(&moved, &[]).1.contains(MAPPED));
    let (quantized, said) = place.run(&moved, &["--quantize", "q8"]);
    assert!(said.contains(KEPT) && !said.contains(MAPPED), "{said}");
    assert_eq!(place.run(&moved, &["--quantize", "q8"]).0, quantized);
    assert_eq!(place.kept().len(), 2);
    let (off, said) = place.run(&moved, &["--packed-cache", "off"]);
    assert!(off == answer && !said.contains("packed weights"), "{said}");
}

#[test]
fn a_changed_model_is_packed_again() {
    let place = Place::new();
    let (answer, _) = place.run(&place.model(), &[]);
    let weights =
        fs::File::options().append(true).open(place.model().join("model.safetensors")).expect("opens");
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
    weights.set_modified(later).expect("touched");
    let (again, said) = place.run(&place.model(), &[]);
    assert!(said.contains(KEPT) && !said.contains(MAPPED), "{said}");
    assert_eq!(again, answer);
    let config = place.model().join("config.json");
    let text = fs::read_to_string(&config).expect("config");
    fs::write(&config, text.replacen('{', "{ ", 1)).expect("written");
    assert!(place.run(&place.model(), &[]).1.contains(KEPT));
    assert_eq!(place.kept().len(), 3);
}

#[test]
fn a_damaged_file_is_reported_and_made_again() {
    let place = Place::new();
    let (answer, _) = place.run(&place.model(), &[]);
    let file = place.kept().pop().expect("kept");
    let whole = fs::read(&file).expect("file");
    let data = 2 << 20;
    let mut weight = whole.clone();
    weight[data + 100_000] ^= 1;
    let mut header = whole.clone();
    header[200] ^= 1;
    for (damaged, why) in [
        (&weight[..], "checksum"),
        (&header[..], "checksum"),
        (&whole[..data + 5000], "bytes"),
        (&[], "packed"),
    ] {
        fs::write(&file, damaged).expect("written");
        let (again, said) = place.run(&place.model(), &[]);
        assert!(said.contains(REFUSED) && said.contains(why) && said.contains(KEPT), "{said}");
        assert_eq!(again, answer);
        assert!(fs::read(&file).expect("made again") == whole);
        assert!(place.run(&place.model(), &[]).1.contains(MAPPED));
    }
}

#[test]
fn a_cache_that_cannot_be_written_costs_nothing_but_the_next_start() {
    let place = Place::new();
    fs::write(place.cache(), "a file").expect("written");
    let (answer, said) = place.run(&place.model(), &[]);
    assert!(said.contains("packed weights are not kept"), "{said}");
    assert_eq!(place.run(&place.model(), &["--packed-cache", "off"]).0, answer);
    fs::remove_file(place.cache()).expect("removed");
    let (_, said) = place.run(&place.model(), &["--packed-cache-size", "1MiB"]);
    assert!(said.contains("--packed-cache-size") && place.kept().is_empty(), "{said}");
    let (_, said) = place.run(&place.model(), &["--packed-cache-min", "64MiB"]);
    assert!(!said.contains("packed weights") && place.kept().is_empty(), "{said}");
}

#[test]
fn the_packed_form_of_a_gguf_file_is_kept_too() {
    let place = Place::new();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../folio-model/tests/gguf/smollm2/smollm2.gguf");
    let (answer, said) = place.run(&file, &[]);
    assert!(said.contains(KEPT), "{said}");
    let (again, said) = place.run(&file, &[]);
    assert!(said.contains(MAPPED), "{said}");
    assert_eq!(again, answer);
}

fn refusal(arguments: &[&str]) -> String {
    let output = folio(arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    String::from_utf8(output.stderr).expect("text")
}

#[test]
fn a_quantized_folder_is_served_without_the_original() {
    let place = Place::new();
    let (model, output) = (place.model(), place.root.path().join("small"));
    let (from, to) = (model.to_str().expect("text"), output.to_str().expect("text"));
    let wrote = folio(&["quantize", from, "--to", "q4", "--output", to]);
    let said = String::from_utf8_lossy(&wrote.stderr);
    assert!(wrote.status.success() && said.contains("Q4_0"), "{said}");
    assert_eq!(String::from_utf8_lossy(&wrote.stdout).trim(), to);
    let (direct, _) = place.run(&model, &["--quantize", "q4"]);
    fs::remove_dir_all(&model).expect("removed");
    let (small, said) = place.run(&output, &[]);
    assert!(said.contains(MAPPED) && small == direct, "{said}");
    assert_eq!(place.run(&output, &["--quantize", "q4"]).0, direct);

    let run = |more: &[&str]| refusal(&[&["run", to, "a", "--raw"], more].concat());
    assert!(run(&["--quantize", "q8"]).contains("quantized to q4 already"));
    assert!(refusal(&["quantize", to, "--to", "q4", "--output", from]).contains("packed already"));
    assert!(refusal(&["quantize", "demo", "--to", "q8", "--output", to]).contains("--force"));
    let file = output.join("model.folio");
    let mut bytes = fs::read(&file).expect("file");
    bytes[3 << 20] ^= 1;
    fs::write(&file, &bytes).expect("written");
    let said = run(&[]);
    assert!(said.contains("model.folio is damaged") && said.contains("checksum") && file.exists(), "{said}");
    let wrote = folio(&["quantize", "demo", "--to", "q8", "--output", to, "--force"]);
    assert!(wrote.status.success(), "{}", String::from_utf8_lossy(&wrote.stderr));
    let config = output.join("config.json");
    let text = fs::read_to_string(&config).expect("config");
    let number = "\"num_hidden_layers\": ";
    assert!(text.contains(number), "{text}");
    fs::write(&config, text.replace(number, "\"num_hidden_layers\": 1")).expect("written");
    assert!(run(&[]).contains("make them again"), "{}", run(&[]));
}

#[test]
fn what_cannot_be_quantized_is_refused_by_name() {
    let place = Place::new();
    let gguf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../folio-model/tests/gguf/smollm2/smollm2.gguf");
    let output = place.root.path().join("out");
    let to = |model: &Path, output: &Path| {
        refusal(&[
            "quantize",
            model.to_str().expect("text"),
            "--to",
            "q8",
            "--output",
            output.to_str().expect("text"),
        ])
    };
    let said = to(&gguf, &output);
    assert!(said.contains("smollm2.gguf is a GGUF file") && said.contains("--quantize q8"), "{said}");
    assert!(to(Path::new("./nothing"), &output).contains("./nothing"));
    let said = to(&place.model(), &place.model());
    assert!(said.contains("not empty"), "{said}");
    assert!(!output.exists());
}
