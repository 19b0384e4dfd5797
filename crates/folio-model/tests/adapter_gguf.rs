//! llama.cpp's adapters: the same as the PEFT folders they were made from, bit for bit, and what is none is refused by a sentence.

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use common::Random;
use common::gguf::{on_disk, path_in};
use folio_model::adapter::{Adapter, AdapterLimits, AdapterTargets};
use folio_model::checkpoint::gguf::Names;
use folio_model::checkpoint::safetensors::read_header;
use folio_model::config::Mixer;
use folio_model::reference::ReferenceBackend;
use folio_model::testing::adapters::write_adapter;
use folio_model::testing::gguf::{Writer, as_gguf, gguf_of};
use folio_model::testing::{Runner, adapted, adapter, fixture};
use folio_model::{Checkpoint, ModelError};

const LIMITS: AdapterLimits = AdapterLimits { rank: 64, bytes: 1 << 21 };

/// Fixtures, their architectures, and whether rows of q and k are reordered.
const ARCHITECTURES: [(&str, &str, bool); 13] = [
    ("llama3", "llama", true),
    ("mistral", "llama", true),
    ("llama4_text", "llama4", true),
    ("granite4_h", "granitehybrid", true),
    ("qwen3", "qwen3", false),
    ("qwen3_moe", "qwen3moe", false),
    ("qwen3_next", "qwen3next", false),
    ("gemma3_text", "gemma3", false),
    ("gemma4_text", "gemma4", false),
    ("phi3", "phi3", false),
    ("deepseek_v3", "deepseek2", false),
    ("nemotron_h", "nemotron_h_moe", false),
    ("lfm2", "lfm2", false),
];

fn targets(checkpoint: &Checkpoint) -> AdapterTargets {
    Runner::load(checkpoint, ReferenceBackend::new(), None).model.targets
}

/// A PEFT folder as llama.cpp's converter writes it.
fn converted(folder: &Path, base: &Checkpoint, architecture: &str, interleaved: bool, alpha: f32) -> Writer {
    let config = base.config();
    let names = Names::of(config, interleaved);
    let stored: BTreeMap<String, String> =
        gguf_of(base).tensors.into_iter().map(|(name, ..)| (names.decoder_name(&name), name)).collect();
    let mut writer = Writer::new(architecture)
        .text("general.type", "adapter")
        .text("adapter.type", "lora")
        .f32("adapter.lora.alpha", alpha);
    let bytes = std::fs::read(folder.join("adapter_model.safetensors")).unwrap();
    for (name, tensor) in read_header(&bytes).unwrap() {
        let name = name.strip_prefix("base_model.model.").unwrap();
        let (module, role) = name.strip_suffix(".weight").unwrap().rsplit_once('.').unwrap();
        let dtype = tensor.dtype.unwrap();
        let mut values = bytes[tensor.range].to_vec();
        let heads = match module.rsplit_once('.').unwrap().1 {
            "q_proj" => config.heads,
            "k_proj" => config.kv_heads,
            _ => 0,
        };
        if interleaved && heads > 0 && role == "lora_B" {
            let row = values.len() / tensor.shape[0];
            let half = tensor.shape[0] / heads / 2;
            let rows = (0..heads)
                .flat_map(|head| (0..half).flat_map(move |at| [0, half].map(|of| head * 2 * half + of + at)));
            values = rows.flat_map(|at| values[at * row..(at + 1) * row].to_vec()).collect();
        }
        let kind = match dtype.size() {
            4 => 0,
            _ if dtype == folio_model::backend::DType::F16 => 1,
            _ => 30,
        };
        let of = &stored[&format!("{module}.weight")];
        writer = writer.tensor(&format!("{of}.{}", role.to_lowercase()), &tensor.shape, kind, &values);
    }
    writer
}

fn read(writer: Writer, targets: &AdapterTargets) -> Result<Adapter, ModelError> {
    let disk = on_disk(&writer.finish());
    Adapter::read(&path_in(&disk), targets, LIMITS)
}

/// What PEFT computes with these is checked elsewhere.
#[test]
fn both_forms_of_an_adapter_are_the_same() {
    for (name, architecture, interleaved, alpha) in [
        ("llama3", "llama", true, 6.0),
        ("phi3", "phi3", false, 8.0),
        ("deepseek_v2_lite", "deepseek2", false, 8.0),
    ] {
        let base = Checkpoint::open(adapted(name)).unwrap();
        let peft = Adapter::read(&adapter(name), &targets(&base), LIMITS).unwrap();
        let writer = converted(&adapter(name), &base, architecture, interleaved, alpha);
        let disk = on_disk(&writer.clone().finish());
        assert!(Adapter::read(&path_in(&disk), &targets(&base), LIMITS).unwrap() == peft, "{name}");
        assert!(Adapter::read(disk.path(), &targets(&base), LIMITS).unwrap() == peft, "{name}: its folder");
        // On the model's own GGUF file, too.
        let file = on_disk(&gguf_of(&base).finish());
        let file = Checkpoint::open(path_in(&file)).unwrap();
        let both = [
            read(writer, &targets(&file)).unwrap(),
            Adapter::read(&adapter(name), &targets(&file), LIMITS).unwrap(),
        ];
        assert!(both[0] == both[1], "{name}");
        assert_eq!(both[0].digest(), peft.digest(), "{name}");
        let prompt: Vec<u32> = (3..20).collect();
        let logits = |checkpoint: &Checkpoint, adapter: Adapter| {
            let mut runner = Runner::load(checkpoint, ReferenceBackend::new(), None);
            runner.adapter = Some(adapter.into());
            runner.forward(&prompt, &[16]).to_vec()
        };
        let [of_file, _] = both;
        assert_eq!(logits(&file, of_file), logits(&base, peft), "{name}");
    }
}

/// Names and the order of rows of each kind of layer, of everything that may be adapted.
#[test]
fn every_kind_of_layer() {
    for (name, architecture, interleaved) in ARCHITECTURES {
        let base = Checkpoint::open(fixture(name)).unwrap();
        // Tensors as a file has them: some are fused elsewhere.
        let disk = on_disk(&gguf_of(&base).finish());
        let targets = targets(&Checkpoint::open(path_in(&disk)).unwrap());
        let folder = tempfile::tempdir().unwrap();
        write_adapter(folder.path(), &targets, 2);
        let peft = Adapter::read(folder.path(), &targets, LIMITS).unwrap();
        assert!(peft.products().count() > 3, "{name}");
        let found = read(converted(folder.path(), &base, architecture, interleaved, 4.0), &targets);
        assert!(found.unwrap_or_else(|error| panic!("{name}: {error}")) == peft, "{name}");
    }
}

/// Heads of delta nets lie in another order in some files: neither form is read for a model in the other.
#[test]
fn delta_nets_in_another_order_are_refused() {
    let base = Checkpoint::open(fixture("qwen3_5_text")).unwrap();
    assert!(matches!(base.config().mixers[0], Mixer::Delta(_)));
    let file = on_disk(&gguf_of(&base).finish());
    let file = Checkpoint::open(path_in(&file)).unwrap();
    let refused = |found: Result<Adapter, ModelError>| {
        let error = found.expect_err("refused").to_string();
        assert!(
            error.contains("another order") && error.contains("linear_attn") | error.contains("blk."),
            "{error}"
        );
    };
    let peft = adapter("qwen3_5_text");
    Adapter::read(&peft, &targets(&base), LIMITS).unwrap();
    refused(Adapter::read(&peft, &targets(&file), LIMITS));
    let folder = tempfile::tempdir().unwrap();
    write_adapter(folder.path(), &targets(&file), 2);
    refused(read(converted(folder.path(), &base, "qwen35", false, 4.0), &targets(&base)));
    read(converted(folder.path(), &base, "qwen35", false, 4.0), &targets(&file)).unwrap();
}

fn llama3() -> (AdapterTargets, Writer) {
    let base = Checkpoint::open(fixture("llama3")).unwrap();
    (targets(&base), converted(&adapter("llama3"), &base, "llama", true, 6.0))
}

#[test]
fn scales_are_alpha_by_rank_and_without_alpha_one() {
    let (targets, writer) = llama3();
    let scale = |alpha: Option<f32>| {
        let mut other = Writer::new("llama").text("general.type", "adapter").text("adapter.type", "lora");
        if let Some(alpha) = alpha {
            other = other.f32("adapter.lora.alpha", alpha);
        }
        other.tensors.clone_from(&writer.tensors);
        let adapter = read(other, &targets).unwrap();
        adapter.products().next().unwrap().1.scales()[0]
    };
    assert_eq!([scale(Some(6.0)), scale(Some(0.0)), scale(None)], [1.5, 1.0, 1.0]);
}

/// A converter's `--outtype q8_0`: what its blocks decode to.
#[test]
fn blocks_are_their_values() {
    let (targets, mut writer) = llama3();
    let mut decoded = writer.clone();
    for (blocks, values) in writer.tensors.iter_mut().zip(&mut decoded.tensors) {
        values.2 = 0;
        let halves = values.3.as_chunks::<2>().0;
        let mut plain: Vec<f32> =
            halves.iter().map(|half| half::bf16::from_le_bytes(*half).to_f32()).collect();
        if blocks.1[0].is_multiple_of(32) {
            (blocks.2, blocks.3) = (8, Vec::new());
            for block in plain.chunks_exact_mut(32) {
                blocks.3.extend(half::f16::from_f32(1.0 / 64.0).to_le_bytes());
                for value in block {
                    let code = (*value * 64.0).round() as i8;
                    *value = f32::from(code) / 64.0;
                    blocks.3.push(code as u8);
                }
            }
        }
        values.3 = plain.iter().flat_map(|value| value.to_le_bytes()).collect();
    }
    let blocks = writer.tensors.iter().filter(|tensor| tensor.2 == 8).count();
    assert!(blocks > 10 && blocks < writer.tensors.len());
    // B has too few columns for blocks, and stays as it is.
    assert!(read(writer, &targets).unwrap() == read(decoded, &targets).unwrap());
}

#[test]
fn what_is_no_adapter_of_the_model_is_refused_by_name() {
    let (targets, writer) = llama3();
    let refusal = |writer: Writer| read(writer, &targets).expect_err("refused").to_string();
    let keys = |pairs: &[(&str, &str)]| {
        let start = Writer { version: 3, ..Writer::default() };
        let mut other = pairs.iter().fold(start, |writer, (key, value)| writer.text(key, value));
        other.tensors.clone_from(&writer.tensors);
        other
    };
    let (of, kind) = (("general.architecture", "llama"), ("general.type", "adapter"));
    for (file, words) in [
        (as_gguf("llama3"), "`general.type` is missing"),
        (keys(&[of, ("general.type", "model")]), "is \"model\", expected \"adapter\""),
        (keys(&[of, kind]), "`adapter.type` is missing"),
        (keys(&[of, kind, ("adapter.type", "dora")]), "is \"dora\", expected \"lora\""),
        (keys(&[kind, ("adapter.type", "lora")]), "general.architecture"),
        (
            keys(&[("general.architecture", "qwen3"), kind, ("adapter.type", "lora")]),
            "is \"qwen3\", which the model",
        ),
        (
            writer.clone().i32s("adapter.alora.invocation_tokens", &[5]),
            "`adapter.alora.invocation_tokens` is set",
        ),
        (keys(&[of, kind, ("adapter.type", "lora"), ("adapter.lora.alpha", "6")]), "`adapter.lora.alpha` is"),
    ] {
        let error = refusal(file);
        assert!(error.contains(words), "{words:?} is not in: {error}");
    }
    let renamed = |from: &str, to: &str| {
        let mut other = writer.clone();
        let found = other.tensors.iter_mut().find(|tensor| tensor.0 == from).expect("there is one");
        found.0 = to.to_owned();
        refusal(other)
    };
    const A: &str = "blk.0.attn_q.weight.lora_a";
    for (to, words) in [
        ("blk.0.attn_q.weight.lora_c", "no part of a LoRA adapter"),
        ("blk.0.attn_norm.weight", "no part of a LoRA adapter"),
        ("blk.0.attn_norm.weight.lora_a", "another model"),
        ("blk.7.attn_q.weight.lora_a", "`blk.0.attn_q.weight.lora_a` is missing"),
        ("blk.0.attn_q_norm.weight.lora_a", "another model"),
        ("blk.0.attn_q.bias.lora_a", "no matrix"),
        ("token_embd.weight.lora_a", "no plain product"),
        // The table speaks, too.
        ("output.weight.lora_a", "another model"),
    ] {
        let error = renamed(A, to);
        assert!(error.contains(words), "{to}: {error}");
    }
    assert!(renamed("blk.0.attn_q.weight.lora_b", "blk.1.attn_q.weight.lora_a").contains("lora_a"));
    for (name, shape, words) in
        [(A, [64, 4], "expected [rank, 64]"), ("blk.0.attn_q.weight.lora_b", [4, 64], "expected [64, 4]")]
    {
        let error = refusal(writer.clone().reshape(name, &shape));
        assert!(error.contains(name) && error.contains(words), "{error}");
    }
    let mut infinite = writer.clone();
    let first = infinite.tensors.iter_mut().find(|tensor| tensor.0 == A).unwrap();
    first.3[2..4].copy_from_slice(&[0x80, 0x7f]);
    assert!(refusal(infinite).contains("holds inf at 1"));
    let mut empty = writer.clone();
    empty.tensors.clear();
    assert!(refusal(empty).contains("no tensors"));
    let disk = on_disk(&writer.clone().finish());
    for (limits, words) in [
        (AdapterLimits { rank: 3, ..LIMITS }, "rank 4, more than the 3"),
        (AdapterLimits { bytes: 5000, ..LIMITS }, "more than the 5000"),
    ] {
        let error = Adapter::read(&path_in(&disk), &targets, limits).expect_err("refused").to_string();
        assert!(error.contains(words), "{error}");
    }
    let error =
        Adapter::read(Path::new("/nowhere/a.gguf"), &targets, LIMITS).expect_err("refused").to_string();
    assert!(error.contains("no such file"), "{error}");
}

/// Damage anywhere: an adapter, or a refusal.
#[test]
fn damage_anywhere_is_no_crash() {
    let (targets, writer) = llama3();
    let whole = writer.finish();
    let header = whole.windows(6).rposition(|bytes| bytes == b"lora_b").unwrap() + 64;
    let disk = on_disk(&whole);
    let mut random = Random(7);
    let (mut read, mut refused) = (0, 0);
    for _ in 0..3000 {
        let mut damaged = whole.clone();
        for _ in 0..=random.below(2) {
            let anywhere = random.below(4) == 0;
            let at = random.below(if anywhere { damaged.len() } else { header.min(damaged.len()) });
            match random.below(4) {
                0 => damaged[at] ^= 1 << random.below(8),
                1 => damaged.truncate(at.max(1)),
                2 => damaged.insert(at, random.next() as u8),
                _ => {
                    let end = (at + 8).min(damaged.len());
                    let number = [0u64, 1, 1 << 31, 1 << 61, u64::MAX][random.below(5)];
                    damaged.splice(at..end, number.to_le_bytes());
                }
            }
        }
        std::fs::write(path_in(&disk), &damaged).unwrap();
        match Adapter::read(&path_in(&disk), &targets, LIMITS) {
            Ok(_) => read += 1,
            Err(_) => refused += 1,
        }
    }
    assert!(read > 100 && refused > 1000, "{read} {refused}");
}
