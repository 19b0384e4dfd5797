//! GGUF files are the same models: as the safetensors they were made from, and as ggml decodes their blocks.

mod common;

use std::path::{Path, PathBuf};

use common::gguf::{on_disk, path_in};
use folio_model::Checkpoint;
use folio_model::config::Mixer;
use folio_model::quant::{BlockFormat, Encoding, MXFP4_VALUES, nvfp4_scale};
use folio_model::reference::ReferenceBackend;
use folio_model::rope::{RopeScaling, Sections};
use folio_model::testing::gguf::{Writer, as_gguf, gguf_of};
use folio_model::testing::{FIXTURES, Runner, check_fixture, fixture, relative_difference};
use serde_json::{Value, json};

fn gguf(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gguf").join(name)
}

const PROMPT: [u32; 12] = [5, 90, 17, 33, 150, 8, 61, 61, 7, 120, 44, 3];

fn logits(checkpoint: &Checkpoint, max_model_len: Option<usize>) -> Vec<f32> {
    let mut runner = Runner::load(checkpoint, ReferenceBackend::new(), max_model_len);
    runner.forward(&PROMPT, &[0, 5, 11]).to_vec()
}

#[test]
fn a_file_made_by_ggmls_own_writer_is_the_safetensors_model_bit_for_bit() {
    let file = Checkpoint::open(gguf("smollm2/smollm2.gguf")).unwrap();
    let folder = Checkpoint::open(fixture("smollm2")).unwrap();
    assert_eq!(file.config(), folder.config());
    assert_eq!(logits(&file, None), logits(&folder, None));
    assert_eq!(file.gguf().unwrap().text("general.name").unwrap(), Some("smollm2"));
    assert!(folder.gguf().is_none());
}

/// All formats at once, against what transformers computes from what ggml decodes.
#[test]
fn blocks_compute_what_their_values_compute() {
    let folder = gguf("mixed");
    let parity = check_fixture(&folder, ReferenceBackend::new);
    assert!(parity.greedy_tokens > 0);
    let checkpoint = Checkpoint::open(folder.join("mixed.gguf")).unwrap();
    let specs = folio_model::weights::weight_specs(checkpoint.config());
    let tensors = specs.iter().flat_map(|weight| &weight.parts).map(|part| checkpoint.tensor(part).unwrap());
    let encodings: Vec<Encoding> = tensors.map(|tensor| tensor.encoding).collect();
    // i-quants are made with an importance matrix, which ggml's Python has not, and ternary values would leave nothing of a random model:
    // `quant/blocks.safetensors` has values of these.
    let elsewhere = |format: &BlockFormat| format.iq_values().is_some() || *format == BlockFormat::NVFP4;
    for format in BlockFormat::of_ggml().filter(|format| !elsewhere(format)) {
        assert!(encodings.contains(&Encoding::Block(format)), "{format:?} is not in the file");
    }
}

/// The number beside a matrix is part of its scales, and that of its inputs is read past.
#[test]
fn numbers_beside_nvfp4_multiply_its_scales() {
    // Query, key and value are of one matrix, whose rows are in llama.cpp's order.
    let with = |kind: u32, of_q: &[u8], of_k_and_v: &[u8]| {
        let mut writer = as_gguf("llama3");
        for (name, bytes) in [("attn_q", of_q), ("attn_k", of_k_and_v), ("attn_v", of_k_and_v)] {
            let mut tensors = writer.tensors.iter_mut();
            let tensor = tensors.find(|(stored, ..)| *stored == format!("blk.0.{name}.weight")).unwrap();
            assert_eq!(tensor.1[0], 64);
            (tensor.2, tensor.3) = (kind, bytes[..bytes.len() / 64 * tensor.1[1] as usize].to_vec());
        }
        writer
    };
    let load = |writer: Writer| {
        let disk = on_disk(&writer.finish());
        Checkpoint::open(path_in(&disk)).map(|checkpoint| logits(&checkpoint, None))
    };
    let byte = |i: u32| if i % 36 < 4 { 0x18 + (i % 11) as u8 } else { (37 * i + i / 36) as u8 };
    let blocks: Vec<u8> = (0..64 * 36).map(byte).collect();
    let values = |number: f32| {
        let mut values: Vec<f32> = Vec::new();
        for block in blocks.chunks_exact(36) {
            let (scales, codes) = block.split_at(4);
            for (scale, codes) in scales.iter().zip(codes.chunks_exact(8)) {
                let d = nvfp4_scale(*scale) * number;
                let value = |code: u8| d * f32::from(MXFP4_VALUES[usize::from(code)]);
                values.extend(codes.iter().map(|byte| value(byte & 15)));
                values.extend(codes.iter().map(|byte| value(byte >> 4)));
            }
        }
        values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>()
    };
    let beside = |name: &str, shape: &[usize], bytes: &[u8]| {
        with(40, &blocks, &blocks).tensor(&format!("blk.0.attn_q.{name}"), shape, 0, bytes)
    };
    let own = values(1.0);
    assert_eq!(load(with(40, &blocks, &blocks)).unwrap(), load(with(0, &own, &own)).unwrap());
    let file = beside("scale", &[1], &0.0371f32.to_le_bytes());
    let file = file.tensor("blk.0.attn_q.input_scale", &[1], 0, &0.5f32.to_le_bytes());
    assert_eq!(load(file).unwrap(), load(with(0, &values(0.0371), &own)).unwrap());

    for (shape, bytes, what) in
        [([1], f32::NAN.to_le_bytes().to_vec(), "NaN"), ([3], vec![0; 12], "3 numbers")]
    {
        let error = load(beside("scale", &shape, &bytes)).unwrap_err().to_string();
        assert!(error.contains("`blk.0.attn_q.scale`") && error.contains(what), "{error}");
    }
    // Of another format there is no such number.
    let disk = on_disk(&as_gguf("llama3").tensor("blk.0.attn_q.scale", &[1], 0, &[0; 4]).finish());
    let error = common::load(&path_in(&disk), None).unwrap_err().to_string();
    assert!(error.contains("`blk.0.attn_q.scale`"), "{error}");
}

/// The loaded model is named after the encoding of most of its bytes, and the digest depends on the encoding.
#[test]
fn encodings_are_told_apart() {
    let file = Checkpoint::open(gguf("mixed/mixed.gguf")).unwrap();
    let model = Runner::load(&file, ReferenceBackend::new(), None).model;
    assert!(matches!(model.weight_encoding, Encoding::Block(_)));
    assert_eq!(model.digest, file.digest(model.max_model_len).unwrap());
    let narrow = on_disk(&as_gguf("smollm2").finish());
    let narrow = Checkpoint::open(path_in(&narrow)).unwrap();
    let mut wide = as_gguf("smollm2");
    wide.widen();
    let wide = on_disk(&wide.finish());
    let wide = Checkpoint::open(path_in(&wide)).unwrap();
    assert_ne!(wide.digest(64).unwrap(), narrow.digest(64).unwrap());
    // Widened to F32 the values are the same, so the logits are.
    assert_eq!(logits(&wide, None), logits(&narrow, None));
}

/// A fixture with what no key of a GGUF file says as the architecture has it.
fn expressible(name: &str) -> tempfile::TempDir {
    let copy = common::copy_of(name);
    let path = copy.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    match name {
        "gemma2" | "gemma3_text" => config["query_pre_attn_scalar"] = 16.into(),
        "gpt_oss" => config["swiglu_limit"] = 7.into(),
        "llama4_text" => (config["attention_chunk_size"], config["floor_scale"]) = (8192.into(), 8192.into()),
        "llama4" => {
            let text = &mut config["text_config"];
            // Of a model with 128 experts a file means that q and k have no norms.
            (text["attention_chunk_size"], text["floor_scale"]) = (8192.into(), 8192.into());
            text["use_qk_norm"] = true.into();
        }
        _ => {}
    }
    std::fs::write(path, config.to_string()).unwrap();
    copy
}

#[test]
fn every_family_is_the_same_model_in_either_format() {
    // What no file can say: xIELU's numbers as tensors, biases of what queries are compressed by.
    let read = FIXTURES.iter().filter(|name| !["apertus", "deepseek_v3_bias"].contains(name));
    for name in read {
        let copy = expressible(name);
        let folder = Checkpoint::open(copy.path()).unwrap();
        let disk = on_disk(&gguf_of(&folder).finish());
        let file = Checkpoint::open(path_in(&disk)).unwrap();
        for length in [Some(64), Some(128)] {
            let (found, expected) = (logits(&file, length), logits(&folder, length));
            // Factors are stored as f32; everything else is the same bits.
            // Sums over value heads of a delta net are in another order.
            let tiled = folder.config().mixers.iter().any(|mixer| matches!(mixer, Mixer::Delta(_)));
            match folder.config().rope.scaling {
                RopeScaling::None | RopeScaling::Linear { .. } if !tiled => {
                    assert_eq!(found, expected, "{name}");
                }
                _ => {
                    let difference = relative_difference(&found, &expected);
                    assert!(difference < 1e-5, "{name}: {difference}");
                }
            }
        }
        let (file, folder) = (file.config(), folder.config());
        assert_eq!(
            (file.tied, &file.windows, &file.rotated),
            (folder.tied, &folder.windows, &folder.rotated),
            "{name}"
        );
        assert_eq!(
            (file.qkv_bias, file.o_bias, file.mlp_bias),
            (folder.qkv_bias, folder.o_bias, folder.mlp_bias),
            "{name}"
        );
    }
}

/// What safetensors call `mrope_section`. Whether frequencies take turns follows from the architecture; a text has one position.
#[test]
fn sections_of_rotary_frequencies_are_those_of_safetensors() {
    let key = "glm4moe.rope.dimension_sections";
    let open = |writer: Writer| {
        let disk = on_disk(&writer.finish());
        let file = Checkpoint::open(path_in(&disk)).map_err(|error| error.to_string())?;
        Ok::<_, String>((file.config().rope.sections, logits(&file, None)))
    };
    let glm = |sections: &[i32]| open(as_gguf("glm4_moe_air").i32s(key, sections));
    let (none, expected) = open(as_gguf("glm4_moe_air")).unwrap();
    assert_eq!(none, None);
    let sections = Some(Sections { frequencies: [2, 1, 1], interleaved: false });
    for (stored, read) in [(&[2, 1, 1, 0][..], sections), (&[2, 1, 1], sections), (&[0; 4], None)] {
        assert_eq!(glm(stored), Ok((read, expected.clone())), "{stored:?}");
    }
    for (stored, named) in [
        (&[2, 1, 0, 0][..], "3 frequencies of 4"),
        (&[2, 1, 1, 1], "fourth axis"),
        (&[2, 1], "three numbers"),
        (&[-1, 4, 1, 0], "three numbers"),
    ] {
        let error = glm(stored).unwrap_err();
        assert!(error.contains(key) && error.contains(named), "{error}");
    }
    let copy = common::with_config("qwen3_5_text", |config| {
        config["rope_parameters"]["mrope_section"] = json!([1, 1, 0]);
        config["rope_parameters"]["mrope_interleaved"] = json!(true);
    });
    let folder = Checkpoint::open(copy.path()).unwrap();
    let (read, found) = open(gguf_of(&folder)).unwrap();
    assert_eq!(read, Some(Sections { frequencies: [1, 1, 0], interleaved: true }));
    assert_eq!((read, found), (folder.config().rope.sections, open(as_gguf("qwen3_5_text")).unwrap().1));
}

/// What llama.cpp takes from the architecture where no key says it.
#[test]
fn architectures_imply_what_no_key_says() {
    let config = |architecture: &str, layers: u32, more: &dyn Fn(Writer) -> Writer| {
        let key = |suffix: &str| format!("{architecture}.{suffix}");
        let writer = [
            ("embedding_length", 96),
            ("block_count", layers),
            ("attention.head_count", 4),
            ("attention.head_count_kv", 2),
            ("attention.key_length", 16),
            ("feed_forward_length", 64),
            ("context_length", 8192),
            ("vocab_size", 7),
        ]
        .iter()
        .fold(Writer::new(architecture), |writer, (suffix, value)| writer.u32(&key(suffix), *value))
        .f32(&key("attention.layer_norm_rms_epsilon"), 1e-6);
        let disk = on_disk(&more(writer).finish());
        Checkpoint::open(path_in(&disk)).map(|file| file.config().clone()).map_err(|error| error.to_string())
    };
    let scale = |config: &folio_model::Config| config.attention_scale.powi(-2).round();
    let gemma2 = config("gemma2", 4, &|w| w).unwrap();
    assert_eq!(gemma2.windows, [Some(4096), None, Some(4096), None]);
    assert_eq!((gemma2.attention_softcap, gemma2.logit_softcap), (Some(50.0), Some(30.0)));
    assert_eq!((scale(&gemma2), gemma2.norm_offset, gemma2.tied), (16.0, 0.0, true));
    assert_eq!(scale(&config("gemma2", 46, &|w| w).unwrap()), 24.0, "of 27B");
    let uncapped = config("gemma2", 4, &|w| w.f32("gemma2.attn_logit_softcapping", 0.0)).unwrap();
    assert_eq!(uncapped.attention_softcap, None);

    let gemma3 = config("gemma3", 7, &|w| w).unwrap();
    assert_eq!((&gemma3.windows[..], gemma3.logit_softcap), (&[None; 7][..], None));
    let gemma3 = config("gemma3", 7, &|w| w.u32("gemma3.attention.sliding_window", 512)).unwrap();
    let window = Some(512);
    assert_eq!(gemma3.windows, [window, window, window, window, window, None, window]);
    assert_eq!(gemma3.local_rope.map(|rope| rope.theta), Some(10_000.0));
    let local = config("gemma3", 7, &|w| w.f32("gemma3.rope.freq_base_swa", 20_000.0)).unwrap();
    assert_eq!(local.local_rope.map(|rope| rope.theta), Some(20_000.0));
    assert_eq!(scale(&config("gemma3", 62, &|w| w).unwrap()), 24.0, "of 27B");

    for (architecture, family, interleaved) in
        [("qwen2vl", "qwen2", false), ("qwen3vl", "qwen3", true), ("qwen3vlmoe", "qwen3_moe", true)]
    {
        let visual = |writer: Writer| {
            let key = |suffix: &str| format!("{architecture}.{suffix}");
            let writer = writer.i32s(&key("rope.dimension_sections"), &[4, 2, 2, 0]);
            match family {
                "qwen3_moe" => writer
                    .u32(&key("expert_count"), 8)
                    .u32(&key("expert_used_count"), 2)
                    .u32(&key("expert_feed_forward_length"), 32),
                _ => writer,
            }
        };
        let found = config(architecture, 2, &visual).unwrap();
        let sections = Sections { frequencies: [4, 2, 2], interleaved };
        assert_eq!((found.family.model_type, found.rope.sections), (family, Some(sections)));
    }

    let turned = |w: Writer| w.flag("granite.rope.scaling.finetuned", false);
    assert!(config("granite", 2, &turned).unwrap_err().contains("granite.rope.scaling.finetuned"));

    let oss = |writer: Writer| {
        writer
            .u32("gpt-oss.expert_count", 8)
            .u32("gpt-oss.expert_used_count", 4)
            .u32("gpt-oss.expert_feed_forward_length", 32)
            .text("gpt-oss.rope.scaling.type", "yarn")
            .f32("gpt-oss.rope.scaling.factor", 32.0)
            .u32("gpt-oss.rope.scaling.original_context_length", 4096)
    };
    let found = config("gpt-oss", 2, &oss).unwrap();
    let experts = found.experts.unwrap();
    assert_eq!((experts.count, experts.chosen, found.intermediate), (8, 4, 32));
    assert_eq!(found.windows, [Some(128), None]);
    let RopeScaling::Yarn(yarn) = &found.rope.scaling else { panic!("{:?}", found.rope) };
    assert!(!yarn.truncate && (yarn.attention_factor - (0.1 * 32f64.ln() + 1.0)).abs() < 1e-9);

    for (architecture, wrong, parts) in [
        ("gpt-oss", None, ["gpt-oss.expert_count", "missing"]),
        ("lfm2", None, ["lfm2.attention.head_count_kv", "is 2, expected"]),
        ("deepseek2", None, ["deepseek2.attention.key_length_mla", "missing"]),
        ("qwen35", None, ["qwen35.ssm.time_step_rank", "missing"]),
        ("granitehybrid", None, ["granitehybrid.attention.head_count_kv", "is 2, expected"]),
        ("cohere2", None, ["cohere2.attention.layer_norm_epsilon", "missing"]),
        (
            "glm4moe",
            Some(("nextn_predict_layers", 2)),
            ["glm4moe.nextn_predict_layers", "of block_count = 2"],
        ),
        ("gpt-oss", Some(("expert_shared_count", 1)), ["gpt-oss.expert_shared_count", "= 1"]),
        ("gpt-oss", Some(("expert_gating_func", 2)), ["gpt-oss.expert_gating_func", "= 2"]),
        ("gpt-oss", Some(("rope.freq_base_swa", 5)), ["gpt-oss.rope.freq_base_swa", "one rotation"]),
        ("gemma2", Some(("expert_count", 8)), ["gemma2.expert_count", "= 8"]),
        ("gemma2", Some(("attention.shared_kv_layers", 1)), ["gemma2.attention.shared_kv_layers", "= 1"]),
        ("gemma4", None, ["gemma4.attention.key_length_swa", "missing"]),
        ("gemma4", Some(("attention.key_length_swa", 8)), ["rope_freqs.weight", "missing"]),
        ("gemma4", Some(("attention.value_length_swa", 4)), ["gemma4.attention.value_length_swa", "of 8"]),
        ("gemma4", Some(("rope.dimension_count_swa", 4)), ["gemma4.rope.dimension_count_swa", "= 4"]),
        (
            "gemma4",
            Some(("attention.shared_kv_layers", 2)),
            ["gemma4.attention.shared_kv_layers", "is 2 of 2 layers"],
        ),
    ] {
        let sentence = config(architecture, 2, &|writer| match wrong {
            None => writer,
            Some((suffix, value)) if architecture == "gpt-oss" => {
                oss(writer).u32(&format!("gpt-oss.{suffix}"), value)
            }
            Some((suffix, value)) if architecture == "gemma4" && suffix != "attention.key_length_swa" => {
                writer.u32("gemma4.attention.key_length_swa", 8).u32(&format!("gemma4.{suffix}"), value)
            }
            Some((suffix, value)) => writer.u32(&format!("{architecture}.{suffix}"), value),
        });
        let sentence = sentence.unwrap_err();
        assert!(parts.iter().all(|part| sentence.contains(part)), "{sentence}");
    }
}

#[test]
fn a_folder_with_one_file_is_that_model() {
    let disk = on_disk(&as_gguf("qwen2").finish());
    let opened = Checkpoint::open(disk.path()).unwrap();
    assert_eq!(opened.location(), path_in(&disk).display().to_string());
    assert!(opened.folder().is_none() && opened.read("tokenizer.json").unwrap().is_none());
    std::fs::copy(path_in(&disk), disk.path().join("other.GGUF")).unwrap();
    let sentence = Checkpoint::open(disk.path()).err().unwrap().to_string();
    assert!(sentence.contains("model.gguf, other.GGUF"), "{sentence}");
    // Safetensors win over files that lie beside them.
    let copy = common::copy_of("qwen2");
    std::fs::copy(path_in(&disk), copy.path().join("model.gguf")).unwrap();
    assert!(Checkpoint::open(copy.path()).unwrap().gguf().is_none());
}

#[test]
fn ends_of_a_generation_come_from_the_vocabulary() {
    let file = Checkpoint::open(gguf("smollm2/smollm2.gguf")).unwrap();
    // `</s>` and `<|im_end|>` are control tokens; the file names only the latter.
    assert_eq!(file.generation().eos_token_ids, [2, 4]);
    assert_eq!(file.generation().bos_token_id, Some(1));
    let mixed = Checkpoint::open(gguf("mixed")).unwrap();
    assert_eq!(mixed.generation().eos_token_ids, [270, 272]);
    assert_eq!(mixed.generation().bos_token_id, None);
    let disk = on_disk(
        &as_gguf("qwen3").f32("general.sampling.temp", 0.6).u32("general.sampling.top_k", 20).finish(),
    );
    let sampling = Checkpoint::open(path_in(&disk)).unwrap().generation().clone();
    assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p), (Some(0.6), Some(20), None));
}

#[test]
fn a_model_may_be_split_into_files() {
    let whole = as_gguf("qwen2");
    let disk = tempfile::tempdir().unwrap();
    let path = |number: usize| disk.path().join(format!("m-{number:05}-of-00003.gguf"));
    for (number, part) in whole.clone().split(3).into_iter().enumerate() {
        std::fs::write(path(number + 1), part.finish()).unwrap();
    }
    let one = on_disk(&whole.finish());
    let one = Checkpoint::open(path_in(&one)).unwrap();
    for opened in [Checkpoint::open(path(1)).unwrap(), Checkpoint::open(disk.path()).unwrap()] {
        assert_eq!(logits(&opened, None), logits(&one, None));
        assert_eq!(opened.digest(64).unwrap(), one.digest(64).unwrap());
    }
    let refusal = |path: &Path| Checkpoint::open(path).err().unwrap().to_string();
    let sentence = refusal(&path(2));
    assert!(sentence.contains("split.no") && sentence.contains("m-00001-of-00003.gguf"), "{sentence}");
    std::fs::copy(path(2), path(3)).unwrap();
    let sentence = refusal(&path(1));
    assert!(sentence.contains("m-00003-of-00003.gguf") && sentence.contains("split.no"), "{sentence}");
    std::fs::remove_file(path(3)).unwrap();
    assert!(refusal(&path(1)).contains("cannot read"), "{}", refusal(&path(1)));
    std::fs::rename(path(1), disk.path().join("x.gguf")).unwrap();
    assert!(refusal(&disk.path().join("x.gguf")).contains("split.count"));
}

/// Parts carry no name of their model: what gives them away is what they hold.
#[test]
fn parts_of_another_model_are_refused_and_counts_are_bounded() {
    let disk = tempfile::tempdir().unwrap();
    let path = |number: usize, count: usize| disk.path().join(format!("m-{number:05}-of-{count:05}.gguf"));
    let write = |model: &str| {
        for (number, part) in as_gguf(model).split(2).into_iter().enumerate() {
            std::fs::write(path(number + 1, 2), part.finish()).unwrap();
        }
    };
    let refusal = |path: &Path| Checkpoint::open(path).err().unwrap().to_string();
    write("llama3");
    let other = std::fs::read(path(2, 2)).unwrap();
    write("qwen2");
    std::fs::write(path(2, 2), other).unwrap();
    let sentence = refusal(&path(1, 2));
    assert!(sentence.contains("split.tensors.count") && sentence.contains("hold"), "{sentence}");
    // Twice the same tensors.
    let twice = |number: u16| {
        let whole = as_gguf("qwen2").raw("split.no", 2, &number.to_le_bytes());
        whole.raw("split.count", 2, &2u16.to_le_bytes()).finish()
    };
    std::fs::write(path(1, 2), twice(0)).unwrap();
    std::fs::write(path(2, 2), twice(1)).unwrap();
    let sentence = refusal(&path(1, 2));
    assert!(sentence.contains("also in another of its files"), "{sentence}");
    for (count, named) in [(0xffff_u16, "more than the limit of 10000"), (9_999, "m-00002-of-09999.gguf")] {
        let first = as_gguf("qwen2").raw("split.no", 2, &0u16.to_le_bytes());
        let first = first.raw("split.count", 2, &count.to_le_bytes()).finish();
        std::fs::write(path(1, count.into()), first).unwrap();
        let sentence = refusal(&path(1, count.into()));
        assert!(sentence.contains(named), "{sentence}");
    }
}
