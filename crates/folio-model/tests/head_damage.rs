//! Damaged heads: a head or a sentence that says what is wrong, never a panic, and no memory for what a file only claims. The fuzz target
//! `head_config` searches deeper.
//!
//! Alone in its file, because every allocation of this process is looked at.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Random, mutate, options};
use folio_model::config::Config;
use folio_model::draft_head::DraftHead;
use folio_model::reference::ReferenceBackend;
use folio_model::testing::fixture;
use folio_model::testing::heads::{HEADS, PUBLISHED_WITH_MTP, WITH_MTP, head, target, with_mtp};
use folio_model::{Checkpoint, ModelError, eagle, mtp};

/// Bytes of the largest allocation.
static LARGEST: AtomicUsize = AtomicUsize::new(0);

struct Watching;

// SAFETY: every call goes to the system's allocator unchanged; watching touches an atomic only.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.fetch_max(size, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(at, layout, size) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

/// No file of a fixture has more than a quarter of a megabyte.
const ALLOCATION_MAX: usize = 16 << 20;

/// What became of damaged files.
#[derive(Debug, Default)]
struct Seen {
    refused: usize,
    taken: usize,
}

impl Seen {
    /// A refusal is a sentence with the place of what is wrong; a head that was taken can be loaded, or is refused then.
    fn judge(
        &mut self,
        folder: &Path,
        found: Result<Option<&dyn DraftHead>, &ModelError>,
        of: Option<&Checkpoint>,
    ) {
        let sentence = |error: &ModelError| {
            let text = error.to_string();
            let place = folder.display().to_string();
            let named =
                text.contains(&place) || text.contains("config.json") || text.contains(".safetensors");
            assert!(named && text.len() > place.len() / 2 && !text.contains("panicked"), "{text:?}");
        };
        match (found, of) {
            (Ok(Some(head)), Some(target)) => {
                let loaded = head.load(target, &mut ReferenceBackend::new(), &options(Some(64)));
                loaded.err().iter().for_each(sentence);
                self.taken += 1;
            }
            (Ok(_), _) => self.taken += 1,
            (Err(error), _) => {
                sentence(error);
                self.refused += 1;
            }
        }
        let largest = LARGEST.load(Ordering::Relaxed);
        assert!(largest < ALLOCATION_MAX, "{largest} bytes at once");
    }
}

/// The header of a safetensors file, mutated, with the length it has.
fn with_other_header(random: &mut Random, file: &[u8]) -> Vec<u8> {
    let length = u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
    let header = mutate(random, &file[8..8 + length]);
    [&(header.len() as u64).to_le_bytes()[..], &header, &file[8 + length..]].concat()
}

#[test]
fn damaged_heads_are_refused_in_a_sentence_and_take_no_memory() {
    let mut random = Random(0x0dd0_9e37_79b9_7f4a);
    let mut seen = Seen::default();
    for name in HEADS {
        let model = Checkpoint::open(fixture(&target(name))).expect("a fixture");
        let folder = common::copy(&head(name));
        for file in ["config.json", "model.safetensors"] {
            let path = folder.path().join(file);
            let whole = fs::read(&path).unwrap();
            for _ in 0..400 {
                let damaged = match file {
                    "config.json" => mutate(&mut random, &whole),
                    _ => with_other_header(&mut random, &whole),
                };
                fs::write(&path, damaged).unwrap();
                let found = eagle::Head::open(folder.path(), &model);
                let found = found.as_ref().map(|head| Some(head as &dyn DraftHead));
                seen.judge(folder.path(), found, Some(&model));
            }
            fs::write(&path, whole).unwrap();
        }
    }
    assert!(seen.refused > 800 && seen.taken > 100, "{seen:?}");
}

#[test]
fn damaged_mtp_heads_too() {
    let mut random = Random(0x7f4a_9e37_79b9_0dd0);
    let mut seen = Seen::default();
    for name in WITH_MTP.iter().chain(PUBLISHED_WITH_MTP) {
        let folder = common::copy(&with_mtp(name));
        for file in ["config.json", "model.safetensors"] {
            let path = folder.path().join(file);
            let whole = fs::read(&path).unwrap();
            for _ in 0..200 {
                let damaged = match file {
                    "config.json" => mutate(&mut random, &whole),
                    _ => with_other_header(&mut random, &whole),
                };
                fs::write(&path, damaged).unwrap();
                match Checkpoint::open(folder.path()) {
                    Err(error) => seen.judge(folder.path(), Err(&error), None),
                    Ok(model) => {
                        let found = mtp::Head::open(&model);
                        let found =
                            found.as_ref().map(|head| head.as_ref().map(|head| head as &dyn DraftHead));
                        seen.judge(folder.path(), found, Some(&model));
                    }
                }
            }
            fs::write(&path, whole).unwrap();
        }
    }
    assert!(seen.refused > 400 && seen.taken > 50, "{seen:?}");
}

/// The seeds of the fuzz target, mutated: EAGLE-3 heads, and models with an MTP head.
#[test]
fn damaged_configurations_of_heads_say_what_is_wrong() {
    let mut random = Random(0x0bad_cafe_0bad_cafe);
    let model = Checkpoint::open(fixture("llama3")).expect("a fixture");
    let (mut refused, mut taken, mut stated) = (0, 0, 0);
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/head_config");
    for seed in fs::read_dir(seeds).expect("seeds").flatten() {
        let whole = fs::read(seed.path()).unwrap();
        for _ in 0..2000 {
            let text = mutate(&mut random, &whole);
            match eagle::layers_read("config.json", &text, model.config()) {
                Ok(layers) => {
                    assert!(!layers.is_empty() && layers.iter().all(|layer| *layer <= model.config().layers));
                    taken += 1;
                }
                Err(error) => {
                    assert!(error.to_string().starts_with("config.json"), "{error}");
                    refused += 1;
                }
            }
            match mtp::layers_stated("config.json", &text) {
                Ok(None) => {}
                Ok(Some((_, layers))) => stated += usize::from(layers > 0),
                Err(error) => assert!(error.to_string().starts_with("config.json"), "{error}"),
            }
            for tensor in Config::parse("config.json", &text).iter().flat_map(mtp::tensors_read) {
                let elements = tensor.shape.iter().try_fold(1usize, |all, size| all.checked_mul(*size));
                assert!(elements.is_some(), "{tensor:?}");
            }
        }
    }
    assert!(refused > 1000 && taken > 300 && stated > 1000, "{refused} {taken} {stated}");
    let largest = LARGEST.load(Ordering::Relaxed);
    assert!(largest < ALLOCATION_MAX, "{largest} bytes at once");
}
