//! The tensors of a layer: what they are called, their shapes, and what is made of them.
//!
//! Owns: names and shapes. Must never: read a tensor.

use super::{
    Attention, Conv, Delta, FeedForward, Latent, Layer, LayerInput, Made, Mamba, MixerWeights, Pick,
    TensorSpec, WeightSpec,
};
use crate::config::{self, Config, DeltaNet, Feed, Mixer, ShortConv};
use crate::family::{Choice, DeltaTensors, ExpertTensors, Fusion, Gate, Norms, QkNorm, Shared};

/// The part of a layer that holds the experts of a mixture.
const EXPERTS: &str = "mlp.experts";

/// One layer, and what its tensors are called.
pub(super) struct LayerNames<'a> {
    pub(super) config: &'a Config,
    pub(super) index: usize,
}

impl LayerNames<'_> {
    pub(super) fn layer(&self) -> Layer<WeightSpec, WeightSpec> {
        let config = self.config;
        // With a norm behind each block, the one that others have before the second is behind the first.
        let norms = config.family.norms;
        let (pre, post) = (norms != Norms::After, matches!(norms, Norms::Around | Norms::After));
        let norm = |name: &str| self.norm(name, "", config.hidden);
        let mixer = match config.mixers[self.index] {
            Mixer::Attention => Some(MixerWeights::Attention(self.attention())),
            Mixer::Latent(sizes) => Some(MixerWeights::Latent(sizes, self.latent(&sizes))),
            Mixer::Delta(net) => Some(MixerWeights::Delta(net, self.delta(&net))),
            Mixer::Conv(sizes) => Some(MixerWeights::Conv(sizes, self.short_conv(&sizes))),
            Mixer::Mamba(sizes) => Some(MixerWeights::Mamba(sizes, self.mamba(&sizes))),
            Mixer::Nothing => None,
        };
        let feeds = config.feeds[self.index] != Feed::Nothing;
        let mlp_norm = match &mixer {
            None => "input_layernorm",
            Some(_) if post => "pre_feedforward_layernorm",
            Some(_) => "post_attention_layernorm",
        };
        Layer {
            norm: (pre && mixer.is_some()).then(|| norm("input_layernorm")),
            post_norm: (post && mixer.is_some()).then(|| norm("post_attention_layernorm")),
            mixer,
            mlp_norm: (pre && feeds && norms != Norms::Once).then(|| norm(mlp_norm)),
            feed_forward: feeds.then(|| self.feed_forward()),
            mlp_post_norm: (post && feeds).then(|| norm("post_feedforward_layernorm")),
            input: config.layer_input.map(|width| self.input(width)),
            scale: config.family.layer_scale.then(|| self.one("layer_scale", "layer_scalar", &[1])),
        }
    }

    fn input(&self, width: usize) -> LayerInput<WeightSpec, WeightSpec> {
        let hidden = self.config.hidden;
        LayerInput {
            gate: self.one("input_gate", "per_layer_input_gate.weight", &[width, hidden]),
            projection: self.one("input_proj", "per_layer_projection.weight", &[hidden, width]),
            norm: self.norm("post_per_layer_input_norm", "", hidden),
        }
    }

    /// Tensors stacked along rows.
    fn stack(&self, label: &str, parts: Vec<TensorSpec>) -> WeightSpec {
        WeightSpec { label: format!("layers.{}.{label}", self.index), parts, made: Made::AS_STORED }
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> TensorSpec {
        TensorSpec::whole(format!("model.layers.{}.{name}", self.index), shape)
    }

    fn one(&self, label: &str, name: &str, shape: &[usize]) -> WeightSpec {
        self.stack(label, vec![self.tensor(name, shape)])
    }

    fn norm(&self, name: &str, path: &str, width: usize) -> WeightSpec {
        self.norm_of(name, &format!("{path}{name}.weight"), width)
    }

    fn norm_of(&self, label: &str, name: &str, width: usize) -> WeightSpec {
        WeightSpec {
            made: Made::Linear { plus: self.config.norm_offset, times: 1.0 },
            ..self.one(label, name, &[width])
        }
    }

    /// Projections of `block` and their rows, one tensor each, or a single tensor that holds them all. Without columns they are biases.
    fn projections(
        &self,
        label: &str,
        block: &str,
        split: &[(&str, usize)],
        fused: &str,
        cols: Option<usize>,
    ) -> WeightSpec {
        let suffix = if cols.is_some() { "weight" } else { "bias" };
        let spec = |name: &str, rows: usize| {
            let shape: Vec<usize> = std::iter::once(rows).chain(cols).collect();
            self.tensor(&format!("{block}.{name}.{suffix}"), &shape)
        };
        let mixture = self.config.family.mixture.zip(self.config.experts);
        let parts = match (self.config.family.fusion, mixture) {
            (Fusion::Split, Some((mixture, experts)))
                if block == EXPERTS && mixture.stored == ExpertTensors::Each =>
            {
                let each = |(name, rows): &(&str, usize)| {
                    let (name, rows) = (name.to_string(), rows / experts.count);
                    (0..experts.count).map(move |expert| (format!("{expert}.{name}"), rows))
                };
                split.iter().flat_map(each).map(|(name, rows)| spec(&name, rows)).collect()
            }
            (Fusion::Split, Some((mixture, experts)))
                if block == EXPERTS && mixture.stored == ExpertTensors::Halves =>
            {
                let stored = if split.len() == 1 { split[0].0 } else { fused };
                let each: Vec<usize> = split.iter().map(|(_, rows)| rows / experts.count).collect();
                let period: usize = each.iter().sum();
                let shape: Vec<usize> = [experts.count, period].into_iter().chain(cols).collect();
                let part = |(at, &rows): (usize, &usize)| TensorSpec {
                    rows: Pick { period, first: each[..at].iter().sum(), rows },
                    ..self.tensor(&format!("{block}.{stored}"), &shape)
                };
                each.iter().enumerate().map(part).collect()
            }
            (Fusion::Split, _) => split.iter().map(|(name, rows)| spec(name, *rows)).collect(),
            (Fusion::Fused, _) => vec![spec(fused, split.iter().map(|(_, rows)| rows).sum())],
        };
        self.stack(label, parts)
    }

    fn attention(&self) -> Attention<WeightSpec, WeightSpec> {
        let config = self.config;
        let sizes = config.head_sizes(self.index);
        let (hidden, dim, q) = (config.hidden, sizes.head_dim, config.q_width(self.index));
        let (kv, own_kv) = (sizes.kv_width(), config.kv_source(self.index) == self.index);
        // Values that are made as keys are have those rows once more.
        let v = if config.keys_are_values(self.index) { "k_proj" } else { "v_proj" };
        let split = [("q_proj", q), ("k_proj", kv), (v, kv)];
        let split = &split[..if own_kv { 3 } else { 1 }];
        let qkv = |label, cols| self.projections(label, "self_attn", split, "qkv_proj", cols);
        let ones =
            |label: &str| WeightSpec { made: Made::Ones { count: dim }, ..self.stack(label, Vec::new()) };
        let qk_norm = |name: &str, all: usize| match config.qk_norm {
            QkNorm::Never | QkNorm::Stated(_) => None,
            QkNorm::Heads | QkNorm::Rotated => Some(self.norm(name, "self_attn.", dim)),
            QkNorm::Rows => Some(self.norm(name, "self_attn.", all)),
            QkNorm::Unweighted(_) if config.rotated[self.index] => Some(ones(name)),
            QkNorm::Unweighted(_) => None,
        };
        // Each head's queries, and behind them its gate.
        let gated = |rows| TensorSpec { rows, ..self.tensor("self_attn.q_proj.weight", &[2 * q, hidden]) };
        let half = |first| Pick { period: 2 * dim, first, rows: dim };
        let mut stacked = qkv("qkv", Some(hidden));
        if config.family.output_gate {
            stacked.parts[0] = gated(half(0));
        }
        Attention {
            qkv: stacked,
            qkv_bias: config.qkv_bias.then(|| qkv("qkv_bias", None)),
            gate: config.family.output_gate.then(|| self.stack("gate", vec![gated(half(dim))])),
            q_norm: qk_norm("q_norm", q),
            k_norm: qk_norm("k_norm", kv).filter(|_| own_kv),
            v_norm: (config.family.value_norm && own_kv).then(|| ones("v_norm")),
            sinks: config.family.sinks.then(|| self.one("sinks", "self_attn.sinks", &[config.heads])),
            o: self.one("o_proj", "self_attn.o_proj.weight", &[hidden, q]),
            o_bias: config.o_bias.then(|| self.one("o_bias", "self_attn.o_proj.bias", &[hidden])),
        }
    }

    fn latent(&self, sizes: &config::Latent) -> Latent<WeightSpec, WeightSpec> {
        let config = self.config;
        let &config::Latent { q_rank, rank, nope_dim, rope_dim, value_dim, .. } = sizes;
        let (hidden, heads) = (config.hidden, config.heads);
        let queries = heads * sizes.query_dim();
        let name = |of: &str| format!("self_attn.{of}");
        let one = |label: &str, of: &str, shape: &[usize]| self.one(label, &name(of), shape);
        let norm = |label: &str, of: &str, width| self.norm_of(label, &name(of), width);
        let bias = |label: &str, of: &str, width| config.qkv_bias.then(|| one(label, of, &[width]));
        // Of each head, rows that make its keys and then those that make its values.
        let period = nope_dim + value_dim;
        let of_heads = |label: &str, first, rows| {
            let tensor = self.tensor(&name("kv_b_proj.weight"), &[heads * period, rank]);
            self.stack(label, vec![TensorSpec { rows: Pick { period, first, rows }, ..tensor }])
        };
        Latent {
            q_down: q_rank.map(|rank| one("q_down", "q_a_proj.weight", &[rank, hidden])),
            q_down_bias: q_rank.and_then(|rank| bias("q_down_bias", "q_a_proj.bias", rank)),
            q_norm: q_rank.map(|rank| norm("q_norm", "q_a_layernorm.weight", rank)),
            q: match q_rank {
                Some(rank) => one("q", "q_b_proj.weight", &[queries, rank]),
                None => one("q", "q_proj.weight", &[queries, hidden]),
            },
            kv_down: one("kv_down", "kv_a_proj_with_mqa.weight", &[rank + rope_dim, hidden]),
            kv_down_bias: bias("kv_down_bias", "kv_a_proj_with_mqa.bias", rank + rope_dim),
            kv_norm: norm("kv_norm", "kv_a_layernorm.weight", rank),
            absorb: match sizes.apart {
                true => one("absorb", "k_b_proj.weight", &[heads * rank, nope_dim]),
                false => WeightSpec {
                    made: Made::Transposed { rows: nope_dim },
                    ..of_heads("absorb", 0, nope_dim)
                },
            },
            expand: match sizes.apart {
                true => one("expand", "v_b_proj.weight", &[heads * value_dim, rank]),
                false => of_heads("expand", nope_dim, value_dim),
            },
            o: one("o_proj", "o_proj.weight", &[hidden, heads * value_dim]),
            o_bias: config.o_bias.then(|| one("o_bias", "o_proj.bias", &[hidden])),
        }
    }

    fn delta(&self, net: &DeltaNet) -> Delta<WeightSpec, WeightSpec> {
        let hidden = self.config.hidden;
        let &DeltaNet { key_heads, value_heads, key_dim, value_dim, taps, .. } = net;
        let (keys, values, channels) = (key_heads * key_dim, value_heads * value_dim, net.channels());
        let name = |name: &str| format!("linear_attn.{name}");
        let part = |of: &str, shape: &[usize]| self.tensor(&name(of), shape);
        let picked = |of: &str, rows: usize, [period, first, count]: [usize; 3]| TensorSpec {
            rows: Pick { period, first, rows: count },
            ..part(of, &[rows, hidden])
        };
        let each = value_heads / key_heads;
        let of_gates = |first| picked("in_proj_ba.weight", 2 * value_heads, [2 * each, first, each]);
        let (qkv, gates, z) = match self.config.family.delta {
            Some(DeltaTensors::ByKeyHead) => {
                let (period, rows) = (2 * key_dim + 2 * each * value_dim, 2 * keys + 2 * values);
                let of_head = |first, count| picked("in_proj_qkvz.weight", rows, [period, first, count]);
                let v = 2 * key_dim;
                (
                    vec![of_head(0, key_dim), of_head(key_dim, key_dim), of_head(v, each * value_dim)],
                    vec![of_gates(0), of_gates(each)],
                    of_head(v + each * value_dim, each * value_dim),
                )
            }
            stored => (
                vec![part("in_proj_qkv.weight", &[channels, hidden])],
                match stored {
                    Some(DeltaTensors::GgmlByKeyHead) => vec![of_gates(0), of_gates(each)],
                    _ => ["b", "a"]
                        .map(|g| part(&format!("in_proj_{g}.weight"), &[value_heads, hidden]))
                        .to_vec(),
                },
                part("in_proj_z.weight", &[values, hidden]),
            ),
        };
        let is_decay =
            matches!(self.config.family.delta, Some(DeltaTensors::GgmlByKeyHead | DeltaTensors::GgmlEach));
        let decay = if is_decay { Made::AS_STORED } else { Made::MinusExp };
        let vector = |label: &str, of: &str, shape: &[usize]| self.one(label, &name(of), shape);
        Delta {
            qkv: self.stack("delta_qkv", qkv),
            taps: WeightSpec { made: Made::Taps, ..vector("taps", "conv1d.weight", &[channels, 1, taps]) },
            gates: self.stack("delta_gates", gates),
            decay: WeightSpec { made: decay, ..vector("decay", "A_log", &[value_heads]) },
            step_bias: vector("step_bias", "dt_bias", &[value_heads]),
            z: self.stack("delta_z", vec![z]),
            norm: vector("delta_norm", "norm.weight", &[value_dim]),
            o: vector("out_proj", "out_proj.weight", &[hidden, values]),
        }
    }

    fn mamba(&self, sizes: &config::Mamba) -> Mamba<WeightSpec, WeightSpec> {
        let hidden = self.config.hidden;
        let (width, channels, heads) = (sizes.width(), sizes.channels(), sizes.heads);
        let all = width + channels + heads;
        let as_is = self.config.family.mamba.is_some_and(|fields| fields.decay_as_is);
        let decay = if as_is { Made::AS_STORED } else { Made::MinusExp };
        let rows = |label: &str, first: usize, rows: usize| {
            let tensor = self.tensor("mamba.in_proj.weight", &[all, hidden]);
            self.stack(label, vec![TensorSpec { rows: Pick { period: all, first, rows }, ..tensor }])
        };
        let vector = |label: &str, of: &str, width: usize| self.one(label, &format!("mamba.{of}"), &[width]);
        Mamba {
            z: rows("mamba_z", 0, width),
            xbc: rows("mamba_xbc", width, channels),
            steps: rows("mamba_steps", width + channels, heads),
            taps: WeightSpec {
                made: Made::Taps,
                ..self.one("taps", "mamba.conv1d.weight", &[channels, 1, sizes.taps])
            },
            bias: sizes.bias.then(|| vector("taps_bias", "conv1d.bias", channels)),
            decay: WeightSpec { made: decay, ..vector("decay", "A_log", heads) },
            step_bias: vector("step_bias", "dt_bias", heads),
            skip: vector("skip", "D", heads),
            norm: vector("mamba_norm", "gated_norm.weight", width),
            o: self.one("out_proj", "mamba.out_proj.weight", &[hidden, width]),
        }
    }

    fn short_conv(&self, sizes: &ShortConv) -> Conv<WeightSpec, WeightSpec> {
        let &ShortConv { channels, taps } = sizes;
        let third = |label: &str, at: usize| {
            let rows = Pick { period: 3 * channels, first: at * channels, rows: channels };
            self.stack(
                label,
                vec![TensorSpec { rows, ..self.tensor("conv.in_proj.weight", &[3 * channels, channels]) }],
            )
        };
        Conv {
            before: third("conv_before", 0),
            behind: third("conv_behind", 1),
            x: third("conv_x", 2),
            taps: WeightSpec {
                made: Made::Taps,
                ..self.one("taps", "conv.conv.weight", &[channels, 1, taps])
            },
            o: self.one("out_proj", "conv.out_proj.weight", &[channels, channels]),
        }
    }

    fn feed_forward(&self) -> FeedForward<WeightSpec, WeightSpec> {
        let config = self.config;
        let experts = config.experts_of(self.index);
        let (hidden, count) = (config.hidden, experts.map_or(1, |experts| experts.count));
        let inner = if experts.is_some() { config.intermediate } else { config.dense_width(self.index) };
        let mixture = config.family.mixture.filter(|_| experts.is_some());
        let router_spec = |label: &str, suffix: &str, shape: &[usize]| {
            mixture.map(|mixture| self.one(label, &format!("{}.{suffix}", mixture.router), shape))
        };
        let choice = mixture.map(|mixture| mixture.choice);
        let bias_shape: &[usize] = match choice {
            Some(Choice::BiasedShares) if mixture.is_some_and(|m| m.stored == ExpertTensors::Each) => {
                &[1, count]
            }
            _ => &[count],
        };
        let by_bias = matches!(choice, Some(Choice::BiasedSigmoids { .. } | Choice::BiasedShares));
        let ungated = matches!(config.family.gate, Gate::XIelu | Gate::ReluSquared);
        // Of what experts read and write.
        let latent = experts.and_then(|experts| experts.latent);
        let wide = latent.unwrap_or(hidden);
        let split = [("gate_proj", count * inner), ("up_proj", count * inner)];
        let split = &split[usize::from(ungated)..];
        let mlp = if mixture.is_some() { EXPERTS } else { "mlp" };
        let gate_up = |label, cols| self.projections(label, mlp, split, "gate_up_proj", cols);
        let down =
            |label, cols| self.projections(label, mlp, &[("down_proj", count * wide)], "down_proj", cols);
        let shared = experts.and_then(|experts| experts.shared);
        let shared_form = mixture.map(|mixture| mixture.shared);
        let is_gated = matches!(shared_form, Some(Shared::Gated(_)));
        let in_halves = matches!(shared_form, Some(Shared::Halves(_)));
        let beside = matches!(shared_form, Some(Shared::Beside(_)));
        let name = match (is_gated, beside) {
            (true, _) => "mlp.shared_expert",
            (false, true) => "mlp",
            (false, false) => "mlp.shared_experts",
        };
        let norm = |name: &str| beside.then(|| self.norm(name, "", hidden));
        let of_shared = |part: &str, rows, cols| self.tensor(&format!("{name}{part}.weight"), &[rows, cols]);
        // What speaks for every token elsewhere speaks alone.
        let alone = mixture.is_none()
            && config
                .family
                .mixture
                .is_some_and(|mixture| mixture.optional && matches!(mixture.shared, Shared::Halves(_)));
        FeedForward {
            router: router_spec("router_weight", "weight", &[count, hidden]),
            router_bias: router_spec("router_bias", "bias", &[count]).filter(|_| config.mlp_bias),
            router_norm: beside.then(|| WeightSpec {
                made: Made::Linear { plus: 0.0, times: (hidden as f32).powf(-0.5) },
                ..self.one("router_norm", "router.scale", &[hidden])
            }),
            expert_scales: beside.then(|| self.one("expert_scale", "router.per_expert_scale", &[count])),
            experts_norm: norm("pre_feedforward_layernorm_2"),
            experts_post_norm: norm("post_feedforward_layernorm_2"),
            shared_post_norm: norm("post_feedforward_layernorm_1"),
            choice_bias: router_spec("choice_bias", "e_score_correction_bias", bias_shape)
                .filter(|_| by_bias),
            gate_up: match alone {
                true => self.one("gate_up", "mlp.shared_experts.gate_up_proj.weight", &[2 * inner, hidden]),
                false => gate_up("gate_up", Some(wide)),
            },
            gate_up_bias: config.mlp_bias.then(|| gate_up("gate_up_bias", None)),
            experts_in: latent
                .map(|latent| self.one("experts_in", "mlp.fc1_latent_proj.weight", &[latent, hidden])),
            experts_out: latent
                .map(|latent| self.one("experts_out", "mlp.fc2_latent_proj.weight", &[hidden, latent])),
            xielu: (config.family.gate == Gate::XIelu).then(|| {
                let part = |name: &str, shape: &[usize]| self.tensor(&format!("mlp.act_fn.{name}"), shape);
                let parts =
                    [part("alpha_p", &[1]), part("alpha_n", &[1]), part("beta", &[]), part("eps", &[])];
                self.stack("xielu", parts.to_vec())
            }),
            down: match alone {
                true => self.one("down_proj", "mlp.shared_experts.down_proj.weight", &[hidden, inner]),
                false => down("down_proj", Some(inner)),
            },
            down_bias: config.mlp_bias.then(|| down("down_bias", None)),
            shared_gate_up: shared.map(|inner| {
                let parts = match in_halves {
                    true => vec![of_shared(".gate_up_proj", 2 * inner, hidden)],
                    false => [".gate_proj", ".up_proj"][usize::from(ungated)..]
                        .iter()
                        .map(|name| of_shared(name, inner, hidden))
                        .collect(),
                };
                self.stack("shared_gate_up", parts)
            }),
            shared_down: shared
                .map(|inner| self.stack("shared_down", vec![of_shared(".down_proj", hidden, inner)])),
            shared_gate: shared
                .filter(|_| is_gated)
                .map(|_| self.stack("shared_gate", vec![of_shared("_gate", 1, hidden)])),
        }
    }
}
