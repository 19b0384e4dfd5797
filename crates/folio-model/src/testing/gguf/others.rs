//! Weights that lie otherwise in GGUF files than in safetensors: stacked, split, turned, or in another order of heads.

use super::widened;
use crate::backend::DType;
use crate::checkpoint::Checkpoint;
use crate::config::{DeltaNet, Mixer};
use crate::family::Shared;
use crate::weights::{Made, Pick, TensorSpec, WeightSpec};

/// Name, shape (rows first), type number and bytes.
pub type Stored = (String, Vec<usize>, u32, Vec<u8>);

/// A tensor of the checkpoint, or some of its rows.
struct Values {
    dtype: DType,
    bytes: Vec<u8>,
}

impl Values {
    fn read(checkpoint: &Checkpoint, spec: &TensorSpec) -> Self {
        let tensor = checkpoint.tensor(spec).unwrap_or_else(|error| panic!("{error}"));
        let values = tensor.read().unwrap_or_else(|error| panic!("{error}"));
        let dtype = tensor.encoding.plain().expect("fixtures are plain");
        Self { dtype, bytes: spec.rows.picked(&values.bytes, spec.stored_rows()) }
    }

    fn stored(self, name: String, shape: &[usize]) -> Stored {
        let kind = match self.dtype {
            DType::F32 => 0,
            DType::F16 => 1,
            DType::BF16 => 30,
        };
        (name, shape.to_vec(), kind, self.bytes)
    }

    /// As F32, each value changed.
    fn vector(self, name: String, change: impl Fn(f32) -> f32) -> Stored {
        let wide = widened(&self.bytes, self.dtype);
        let values = wide.as_chunks().0.iter().map(|bytes| change(f32::from_le_bytes(*bytes)));
        let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        (name, vec![bytes.len() / 4], 0, bytes)
    }

    /// The last `units` of as many equal units are those of value heads, as many for each: they are put one after another of each key
    /// head in turn.
    fn tiled(mut self, net: Option<&DeltaNet>, all: usize, units: usize) -> Self {
        let Some(net) = net else { return self };
        let (size, each) = (self.bytes.len() / all, net.value_heads / net.key_heads);
        let of_head = units / net.value_heads * size;
        let heads = self.bytes.split_off((all - units) * size);
        for at in 0..each {
            for key_head in 0..net.key_heads {
                let from = (key_head * each + at) * of_head;
                self.bytes.extend(&heads[from..from + of_head]);
            }
        }
        self
    }
}

/// What a weight becomes, if that is not what it is under another name.
pub fn stored(checkpoint: &Checkpoint, weight: &WeightSpec) -> Option<Vec<Stored>> {
    let config = checkpoint.config();
    let (layer, label) = weight.label.strip_prefix("layers.")?.split_once('.')?;
    let name = |part: &str| format!("blk.{layer}.{part}");
    let read = |part: &TensorSpec| Values::read(checkpoint, part);
    let whole = |part: &TensorSpec| read(&TensorSpec { rows: Pick::ALL, ..part.clone() });
    let first = weight.parts.first()?;
    let (net, mamba) = match config.mixers[layer.parse::<usize>().ok()?] {
        Mixer::Delta(net) => (Some(net), None),
        Mixer::Mamba(mamba) => (None, Some(mamba)),
        Mixer::Attention | Mixer::Latent(_) | Mixer::Conv(_) | Mixer::Nothing => (None, None),
    };
    let tiles = net.as_ref().filter(|_| config.family.model_type != "qwen3_next");
    let cols = *first.shape.last()?;
    let experts = config.experts.map_or(1, |experts| experts.count);
    let inner = config.intermediate;
    let beside = config.family.mixture.is_some_and(|mixture| matches!(mixture.shared, Shared::Beside(_)));
    Some(match label {
        "layer_scale" => vec![whole(first).vector(name("layer_output_scale.weight"), |value| value)],
        "expert_scale" => vec![whole(first).vector(name("ffn_down_exps.scale"), |value| value)],
        // As the newest files have it.
        "gate_up" if beside && first.shape.len() == 3 => {
            vec![whole(first).stored(name("ffn_gate_up_exps.weight"), &first.shape)]
        }
        "gate_up" if first.name.ends_with("experts.gate_up_proj") && first.rows.rows < first.rows.period => {
            let names = ["ffn_gate_exps.weight", "ffn_up_exps.weight"];
            let parts = weight.parts.iter().zip(names);
            parts.map(|(part, of)| read(part).stored(name(of), &[experts, inner, cols])).collect()
        }
        "down_proj" if first.shape.len() == 3 => {
            vec![whole(first).stored(name("ffn_down_exps.weight"), &first.shape)]
        }
        // The feed-forward part of a layer without a mixture: what speaks for every token elsewhere.
        "gate_up" | "shared_gate_up" if first.name.ends_with(".shared_experts.gate_up_proj.weight") => {
            let half = first.shape[0] / 2;
            let suffix = if label == "gate_up" { "" } else { "_shexp" };
            let of = |part: &str, first_row| {
                let rows = Pick { period: 2 * half, first: first_row, rows: half };
                let values = read(&TensorSpec { rows, ..first.clone() });
                values.stored(name(&format!("ffn_{part}{suffix}.weight")), &[half, cols])
            };
            vec![of("gate", 0), of("up", half)]
        }
        "down_proj" if first.name.ends_with(".shared_experts.down_proj.weight") => {
            vec![whole(first).stored(name("ffn_down.weight"), &first.shape)]
        }
        "shared_gate" => vec![whole(first).vector(name("ffn_gate_inp_shexp.weight"), |value| value)],
        "choice_bias" => vec![whole(first).vector(name("exp_probs_b.bias"), |value| value)],
        "qkv" if config.family.output_gate => {
            let names = ["attn_q.weight", "attn_k.weight", "attn_v.weight"];
            let parts = weight.parts.iter().zip(names);
            parts.map(|(part, of)| whole(part).stored(name(of), &part.shape)).collect()
        }
        "gate" | "conv_behind" | "conv_x" => Vec::new(),
        "conv_before" => vec![whole(first).stored(name("shortconv.in_proj.weight"), &first.shape)],
        "absorb" => {
            let Made::Transposed { rows } = weight.made else { panic!("keys are turned") };
            let values = read(first);
            let (heads, size) = (config.heads, values.dtype.size());
            let mut turned = Vec::with_capacity(values.bytes.len());
            for head in values.bytes.chunks(rows * cols * size) {
                for col in 0..cols {
                    for row in 0..rows {
                        turned.extend(&head[(row * cols + col) * size..][..size]);
                    }
                }
            }
            vec![Values { bytes: turned, ..values }.stored(name("attn_k_b.weight"), &[heads, cols, rows])]
        }
        "expand" => {
            let rows = first.rows.rows;
            vec![read(first).stored(name("attn_v_b.weight"), &[config.heads, rows, cols])]
        }
        "mamba_z" | "mamba_steps" => Vec::new(),
        "mamba_xbc" => vec![whole(first).stored(name("ssm_in.weight"), &first.shape)],
        "taps_bias" => vec![whole(first).vector(name("ssm_conv1d.bias"), |value| value)],
        "decay" if mamba.is_some() => {
            let (name, _, kind, bytes) =
                whole(first).vector(name("ssm_a"), |value| -f64::from(value).exp() as f32);
            vec![(name, vec![first.shape[0], 1], kind, bytes)]
        }
        "skip" => {
            let (name, _, kind, bytes) = whole(first).vector(name("ssm_d"), |value| value);
            vec![(name, vec![first.shape[0], 1], kind, bytes)]
        }
        "step_bias" if mamba.is_some() => vec![whole(first).vector(name("ssm_dt.bias"), |value| value)],
        "mamba_norm" => {
            let (groups, (name, _, kind, bytes)) =
                (mamba?.groups, whole(first).vector(name("ssm_norm.weight"), |value| value));
            vec![(name, vec![groups, first.shape[0] / groups], kind, bytes)]
        }
        "out_proj" if mamba.is_some() => {
            vec![whole(first).stored(name("ssm_out.weight"), &first.shape)]
        }
        "taps" => {
            let (of, channels) = match net.is_some() || mamba.is_some() {
                true => ("ssm_conv1d.weight", first.shape[0]),
                false => ("shortconv.conv.weight", first.shape[0]),
            };
            let values = net.map_or(0, |net| net.value_heads * net.value_dim);
            vec![whole(first).tiled(tiles, channels, values).stored(name(of), &[channels, cols])]
        }
        "delta_qkv" => {
            let parts: Vec<Values> = weight.parts.iter().map(read).collect();
            let dtype = parts[0].dtype;
            let all = Values { dtype, bytes: parts.into_iter().flat_map(|part| part.bytes).collect() };
            let net = net?;
            let (channels, values) = (net.channels(), net.value_heads * net.value_dim);
            vec![all.tiled(tiles, channels, values).stored(name("attn_qkv.weight"), &[channels, cols])]
        }
        "delta_z" => {
            let values = net?.value_heads * net?.value_dim;
            vec![read(first).tiled(tiles, values, values).stored(name("attn_gate.weight"), &[values, cols])]
        }
        "delta_gates" if tiles.is_none() => vec![whole(first).stored(name("ssm_ba.weight"), &first.shape)],
        "delta_gates" => {
            let heads = net?.value_heads;
            let parts = weight.parts.iter().zip(["ssm_beta.weight", "ssm_alpha.weight"]);
            parts
                .map(|(part, of)| read(part).tiled(tiles, heads, heads).stored(name(of), &[heads, cols]))
                .collect()
        }
        "decay" => {
            let decay = |value: f32| -f64::from(value).exp() as f32;
            let heads = net?.value_heads;
            vec![whole(first).tiled(tiles, heads, heads).vector(name("ssm_a"), decay)]
        }
        "step_bias" => {
            let heads = net?.value_heads;
            vec![whole(first).tiled(tiles, heads, heads).vector(name("ssm_dt.bias"), |value| value)]
        }
        "delta_norm" => vec![whole(first).vector(name("ssm_norm.weight"), |value| value)],
        "out_proj" if net.is_some() => {
            let values = whole(first);
            let row = cols * values.dtype.size();
            let rows =
                values.bytes.chunks(row).map(|row| Values { dtype: values.dtype, bytes: row.to_vec() });
            let bytes = rows.flat_map(|row| row.tiled(tiles, cols, cols).bytes).collect();
            vec![Values { dtype: values.dtype, bytes }.stored(name("ssm_out.weight"), &first.shape)]
        }
        _ => return None,
    })
}
