//! The one decoder: which tensors it needs, and the [`Program`] it becomes.
//!
//! Owns: tensor names and shapes, and the order of operations. Must never: read a weight, or ask which family it is
//! building; what differs is in [`Config`]. The same [`Weights`] tree exists twice: over tensor names (what to load) and
//! over backend ids (what was loaded), so that a matrix cannot be loaded and forgotten, or used and never loaded.

use crate::backend::{DType, GroupKind, KvGroup, KvLayout};
use crate::config::{Config, EmbeddingScale, Experts};
use crate::family::{ExpertTensors, Fusion, Norms};
use crate::kv_format::KvFormats;
use crate::program::{AttentionSpec, Buf, ExpertsSpec, Head, MatrixId, Op, Program, RopeId, VectorId};
use crate::quant::Encoding;

/// Of what this crate decides of the bits of K and V: rotary frequencies, decoded weights, the order of operations. Raised whenever
/// the same checkpoint would give others.
pub const NUMERICS: u32 = 1;

/// One tensor of the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    pub name: String,
    pub shape: Vec<usize>,
}

/// Tensors stacked along rows into one matrix or vector of the program.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightSpec {
    /// For errors and progress: "layers.3.qkv".
    pub label: String,
    pub parts: Vec<TensorSpec>,
    /// Added to every value of a vector: 1 where norms are stored as what is added to one.
    pub offset: f32,
    /// Multiplied with every value of a vector, after that.
    pub factor: f32,
}

/// All weights of a decoder; `M` stands for a matrix, `V` for a vector.
#[derive(Clone, Debug)]
pub struct Weights<M, V> {
    pub embed: M,
    pub layers: Vec<Layer<M, V>>,
    pub norm: V,
    /// Absent when tied to `embed`.
    pub head: Option<M>,
}

#[derive(Clone, Debug)]
pub struct Layer<M, V> {
    /// Of what attention reads.
    pub attention_norm: Option<V>,
    pub qkv: M,
    pub qkv_bias: Option<V>,
    pub q_norm: Option<V>,
    pub k_norm: Option<V>,
    pub sinks: Option<V>,
    pub o: M,
    pub o_bias: Option<V>,
    /// Of what attention adds to the residual stream.
    pub attention_post_norm: Option<V>,
    /// Of what the feed-forward part reads.
    pub mlp_norm: Option<V>,
    /// Of a mixture of experts; the other matrices and vectors of the feed-forward part are those of all experts then.
    pub router: Option<M>,
    pub router_bias: Option<V>,
    pub gate_up: M,
    pub gate_up_bias: Option<V>,
    pub down: M,
    pub down_bias: Option<V>,
    /// Of what the feed-forward part adds.
    pub mlp_post_norm: Option<V>,
}

/// What a decoder gives a drafter of each row, its features.
#[derive(Clone, Debug, PartialEq)]
pub enum Taps {
    /// The sum of one product for each layer that is tapped, `width` values: rows of every matrix.
    Products { width: usize, of: Vec<Tap> },
    /// The residual stream behind the last layer, as it is or through the last norm.
    Last { normed: bool },
}

/// `matrix . x`, or `matrix . norm(x)`, of the residual stream `x` before layer `before`; behind the last layer, where that is their
/// number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tap {
    pub before: usize,
    /// Weight and epsilon.
    pub norm: Option<(VectorId, f32)>,
    pub matrix: MatrixId,
}

/// What a checkpoint of this configuration must hold.
pub fn weight_specs(config: &Config) -> Weights<WeightSpec, WeightSpec> {
    let (hidden, vocab) = (config.hidden, config.vocab);
    Weights {
        embed: single("embed_tokens", "model.embed_tokens.weight".to_owned(), &[vocab, hidden]),
        layers: (0..config.layers).map(|layer| layer_specs(config, layer)).collect(),
        norm: WeightSpec {
            offset: config.norm_offset,
            // Nothing but the output matrix reads what the last norm gives.
            factor: (1.0 / config.logit_divisor) as f32,
            ..single("norm", "model.norm.weight".to_owned(), &[hidden])
        },
        head: (!config.tied).then(|| single("lm_head", "lm_head.weight".to_owned(), &[vocab, hidden])),
    }
}

fn single(label: &str, name: String, shape: &[usize]) -> WeightSpec {
    let parts = vec![TensorSpec { name, shape: shape.to_vec() }];
    WeightSpec { label: label.to_owned(), parts, offset: 0.0, factor: 1.0 }
}

/// The part of a layer that holds the experts of a mixture.
const EXPERTS: &str = "mlp.experts";

fn layer_specs(config: &Config, layer: usize) -> Layer<WeightSpec, WeightSpec> {
    let prefix = format!("model.layers.{layer}");
    let (hidden, inner) = (config.hidden, config.intermediate);
    let (q, kv) = (config.q_width(), config.kv_width());
    let count = config.experts.map_or(1, |experts| experts.count);
    let each = config.family.mixture.is_some_and(|mixture| mixture.stored == ExpertTensors::Each);
    // Either the named projections, one tensor each, or a single tensor that holds them all.
    let stacked = |label: &str, block: &str, split: &[(&str, usize)], fused: &str, cols: Option<usize>| {
        let suffix = if cols.is_some() { "weight" } else { "bias" };
        let spec = |name: &str, rows: usize| TensorSpec {
            name: format!("{prefix}.{block}.{name}.{suffix}"),
            shape: std::iter::once(rows).chain(cols).collect(),
        };
        let parts = match config.family.fusion {
            Fusion::Split if block == EXPERTS && each => {
                let experts = |(name, rows): &(&str, usize)| {
                    let (name, rows) = (name.to_string(), rows / count);
                    (0..count).map(move |expert| (format!("{expert}.{name}"), rows))
                };
                split.iter().flat_map(experts).map(|(name, rows)| spec(&name, rows)).collect()
            }
            Fusion::Split => split.iter().map(|(name, rows)| spec(name, *rows)).collect(),
            Fusion::Fused => vec![spec(fused, split.iter().map(|(_, rows)| rows).sum())],
        };
        WeightSpec { label: format!("layers.{layer}.{label}"), parts, offset: 0.0, factor: 1.0 }
    };
    let one = |label: &str, name: &str, shape: &[usize]| {
        single(&format!("layers.{layer}.{label}"), format!("{prefix}.{name}"), shape)
    };
    let router = config.family.mixture.map(|mixture| mixture.router);
    let router_spec = |suffix: &str, shape: &[usize]| {
        router.map(|router| one(&format!("router_{suffix}"), &format!("{router}.{suffix}"), shape))
    };
    let qkv_parts = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)];
    let mlp_parts = [("gate_proj", count * inner), ("up_proj", count * inner)];
    let qkv = |label, cols| stacked(label, "self_attn", &qkv_parts, "qkv_proj", cols);
    let mlp = if router.is_some() { EXPERTS } else { "mlp" };
    let gate_up = |label, cols| stacked(label, mlp, &mlp_parts, "gate_up_proj", cols);
    let down = |label, cols| stacked(label, mlp, &[("down_proj", count * hidden)], "down_proj", cols);
    let norm = |name: &str, path: &str, width: usize| WeightSpec {
        offset: config.norm_offset,
        ..one(name, &format!("{path}{name}.weight"), &[width])
    };
    let head_norm = |name: &str| config.family.qk_norm.then(|| norm(name, "self_attn.", config.head_dim));
    // With a norm behind each block, the one that others have before the second is behind the first.
    let (pre, post) = (config.family.norms != Norms::After, config.family.norms != Norms::Before);
    let mlp_norm = if post { "pre_feedforward_layernorm" } else { "post_attention_layernorm" };
    Layer {
        attention_norm: pre.then(|| norm("input_layernorm", "", hidden)),
        qkv: qkv("qkv", Some(hidden)),
        qkv_bias: config.qkv_bias.then(|| qkv("qkv_bias", None)),
        q_norm: head_norm("q_norm"),
        k_norm: head_norm("k_norm"),
        sinks: config.family.sinks.then(|| one("sinks", "self_attn.sinks", &[config.heads])),
        o: one("o_proj", "self_attn.o_proj.weight", &[hidden, q]),
        o_bias: config.o_bias.then(|| one("o_bias", "self_attn.o_proj.bias", &[hidden])),
        attention_post_norm: post.then(|| norm("post_attention_layernorm", "", hidden)),
        mlp_norm: pre.then(|| norm(mlp_norm, "", hidden)),
        router: router_spec("weight", &[count, hidden]),
        router_bias: router_spec("bias", &[count]).filter(|_| config.mlp_bias),
        gate_up: gate_up("gate_up", Some(hidden)),
        gate_up_bias: config.mlp_bias.then(|| gate_up("gate_up_bias", None)),
        down: down("down_proj", Some(inner)),
        down_bias: config.mlp_bias.then(|| down("down_bias", None)),
        mlp_post_norm: post.then(|| norm("post_feedforward_layernorm", "", hidden)),
    }
}

impl Weights<WeightSpec, WeightSpec> {
    /// Every matrix and vector, in the order in which it is loaded.
    pub fn iter(&self) -> impl Iterator<Item = &WeightSpec> {
        let layers = self.layers.iter().flat_map(|layer| {
            let Layer {
                attention_norm,
                qkv,
                qkv_bias,
                q_norm,
                k_norm,
                sinks,
                o,
                o_bias,
                attention_post_norm,
                mlp_norm,
                router,
                router_bias,
                gate_up,
                gate_up_bias,
                down,
                down_bias,
                mlp_post_norm,
            } = layer;
            [
                attention_norm.as_ref(),
                Some(qkv),
                qkv_bias.as_ref(),
                q_norm.as_ref(),
                k_norm.as_ref(),
                sinks.as_ref(),
                Some(o),
                o_bias.as_ref(),
                attention_post_norm.as_ref(),
                mlp_norm.as_ref(),
                router.as_ref(),
                router_bias.as_ref(),
                Some(gate_up),
                gate_up_bias.as_ref(),
                Some(down),
                down_bias.as_ref(),
                mlp_post_norm.as_ref(),
            ]
            .into_iter()
            .flatten()
        });
        std::iter::once(&self.embed).chain(layers).chain([&self.norm]).chain(&self.head)
    }

    /// The same tree over what `matrix` and `vector` make of each, called in the order of [`Weights::iter`].
    pub fn try_map<E>(&self, load: &mut impl Load<E>) -> Result<Weights<MatrixId, VectorId>, E> {
        let embed = load.matrix(&self.embed)?;
        let mut layers = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            layers.push(layer.try_map(load)?);
        }
        let norm = load.vector(&self.norm)?;
        let head = self.head.as_ref().map(|head| load.matrix(head)).transpose()?;
        Ok(Weights { embed, layers, norm, head })
    }
}

/// Turns specifications into loaded weights.
pub trait Load<E> {
    fn matrix(&mut self, spec: &WeightSpec) -> Result<MatrixId, E>;
    fn vector(&mut self, spec: &WeightSpec) -> Result<VectorId, E>;
}

impl Layer<WeightSpec, WeightSpec> {
    fn try_map<E>(&self, load: &mut impl Load<E>) -> Result<Layer<MatrixId, VectorId>, E> {
        Ok(Layer {
            attention_norm: self.attention_norm.as_ref().map(|spec| load.vector(spec)).transpose()?,
            qkv: load.matrix(&self.qkv)?,
            qkv_bias: self.qkv_bias.as_ref().map(|spec| load.vector(spec)).transpose()?,
            q_norm: self.q_norm.as_ref().map(|spec| load.vector(spec)).transpose()?,
            k_norm: self.k_norm.as_ref().map(|spec| load.vector(spec)).transpose()?,
            sinks: self.sinks.as_ref().map(|spec| load.vector(spec)).transpose()?,
            o: load.matrix(&self.o)?,
            o_bias: self.o_bias.as_ref().map(|spec| load.vector(spec)).transpose()?,
            attention_post_norm: self
                .attention_post_norm
                .as_ref()
                .map(|spec| load.vector(spec))
                .transpose()?,
            mlp_norm: self.mlp_norm.as_ref().map(|spec| load.vector(spec)).transpose()?,
            router: self.router.as_ref().map(|spec| load.matrix(spec)).transpose()?,
            router_bias: self.router_bias.as_ref().map(|spec| load.vector(spec)).transpose()?,
            gate_up: load.matrix(&self.gate_up)?,
            gate_up_bias: self.gate_up_bias.as_ref().map(|spec| load.vector(spec)).transpose()?,
            down: load.matrix(&self.down)?,
            down_bias: self.down_bias.as_ref().map(|spec| load.vector(spec)).transpose()?,
            mlp_post_norm: self.mlp_post_norm.as_ref().map(|spec| load.vector(spec)).transpose()?,
        })
    }
}

/// Which cache group each layer stores its K and V in, and the kinds of the groups, for sequences of at most
/// `max_model_len` tokens: layers without a window, then a group for each size of window. A window that holds the longest
/// sequence is none.
fn cache_groups(config: &Config, max_model_len: usize) -> (Vec<GroupKind>, Vec<usize>) {
    let mut kinds = vec![GroupKind::Full];
    let groups = (0..config.layers).map(|layer| {
        let Some(tokens) = window(config, layer, max_model_len) else { return 0 };
        let kind = GroupKind::Window { tokens };
        kinds.iter().position(|known| *known == kind).unwrap_or_else(|| {
            kinds.push(kind);
            kinds.len() - 1
        })
    });
    let groups = groups.collect();
    (kinds, groups)
}

fn window(config: &Config, layer: usize, max_model_len: usize) -> Option<u32> {
    config.windows[layer].filter(|window| *window < max_model_len).map(|window| window as u32)
}

/// Geometry of the KV cache of this decoder, for sequences of at most `max_model_len` tokens. The error is a sentence, see
/// [`KvFormats::of_layers`].
pub fn kv_layout(
    config: &Config,
    formats: &KvFormats,
    block_tokens: usize,
    max_model_len: usize,
) -> Result<KvLayout, String> {
    let (kinds, group_of) = cache_groups(config, max_model_len);
    let windowed: Vec<bool> = group_of.iter().map(|group| *group > 0).collect();
    let formats = formats.of_layers(config.head_dim, &windowed)?;
    let group = |(index, kind): (usize, GroupKind)| KvGroup {
        kind,
        block_tokens,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        formats: (0..config.layers).filter(|layer| group_of[*layer] == index).map(|l| formats[l]).collect(),
    };
    Ok(KvLayout { groups: kinds.into_iter().enumerate().map(group).collect() })
}

/// A number of the type that most weights have, as which a model keeps it. Quantized models keep it as f32.
fn rounded(value: f64, encoding: Encoding) -> f32 {
    match encoding.plain() {
        Some(DType::BF16) => half::bf16::from_f32(value as f32).to_f32(),
        Some(DType::F16) => half::f16::from_f32(value as f32).to_f32(),
        Some(DType::F32) | None => value as f32,
    }
}

/// The decoder as data, for sequences of at most `max_model_len` tokens. `encoding` is that of most weights. Without taps there are no
/// operations but the decoder's.
pub fn program(
    config: &Config,
    weights: &Weights<MatrixId, VectorId>,
    max_model_len: usize,
    encoding: Encoding,
    taps: Option<&Taps>,
) -> Program {
    let mut program = Program::default();
    let mut buffer = |width: usize| {
        program.buffers.push(width);
        Buf(program.buffers.len() as u32 - 1)
    };
    let x = buffer(config.hidden);
    let normed = buffer(config.hidden);
    let qkv = buffer(config.qkv_width());
    let attended = buffer(config.q_width());
    // Of one feed-forward part, or of the router's logits.
    let inner = buffer(config.experts.map_or(config.intermediate, |experts| experts.count));
    // Of the output of a block that has a norm behind it.
    let branch = (config.family.norms != Norms::Before).then(|| buffer(config.hidden));
    let tapped = match taps {
        Some(Taps::Products { width, of }) => Some((of.as_slice(), [buffer(config.hidden), buffer(*width)])),
        Some(Taps::Last { .. }) | None => None,
    };
    let last = taps.and_then(|taps| match taps {
        Taps::Last { normed } => Some(normed.then(|| buffer(config.hidden))),
        Taps::Products { .. } => None,
    });
    program.ropes.push(config.rope.table(max_model_len));
    program.ropes.extend(config.local_rope.as_ref().map(|rope| rope.table(max_model_len)));

    // With `x` divided by what is multiplied with all that is added to it, that is added as it is; and a norm gives the same of either, with
    // the epsilon that belongs to it.
    let added = config.residual_scale;
    let eps = (f64::from(config.eps) / (added * added)) as f32;
    program.body.push(Op::Embed { table: weights.embed, out: x });
    let scale = match config.embedding_scale {
        Some(EmbeddingScale::RootOfWidth) => Some(rounded((config.hidden as f64).sqrt(), encoding)),
        Some(EmbeddingScale::Number(by)) => Some((by / added) as f32),
        None => (added != 1.0).then_some((1.0 / added) as f32),
    };
    program.body.extend(scale.map(|by| Op::Scale { x, by }));
    let (_, groups) = cache_groups(config, max_model_len);
    for (index, layer) in weights.layers.iter().enumerate() {
        tap(&mut program, index, x, added, tapped);
        let group = groups[index];
        program.attention.push(AttentionSpec {
            group: group as u32,
            layer: groups[..index].iter().filter(|before| **before == group).count() as u32,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            scale: config.attention_scale as f32,
            softcap: config.attention_softcap,
            window: window(config, index, max_model_len),
            sinks: layer.sinks,
            rope: config.rotated[index].then_some(match &config.local_rope {
                Some(_) if config.windows[index].is_some() => RopeId(1),
                _ => RopeId(0),
            }),
            q_norm: layer.q_norm,
            k_norm: layer.k_norm,
            norm_eps: config.eps,
        });
        program.body.extend([
            read(x, layer.attention_norm, eps, normed),
            Op::Linear { x: normed, weight: layer.qkv, bias: layer.qkv_bias, out: qkv, add: false },
            Op::WriteKv { qkv, spec: index },
            Op::Attention { qkv, spec: index, out: attended },
        ]);
        add_block(
            &mut program,
            branch.zip(layer.attention_post_norm),
            eps,
            |out, add| Op::Linear {
                x: attended,
                weight: layer.o,
                bias: layer.o_bias,
                out: out.unwrap_or(x),
                add,
            },
            x,
        );
        program.body.push(read(x, layer.mlp_norm, eps, normed));
        let last = feed_forward(config, layer, &mut program, [normed, inner]);
        add_block(
            &mut program,
            branch.zip(layer.mlp_post_norm),
            eps,
            |out, add| last(out.unwrap_or(x), add),
            x,
        );
    }
    tap(&mut program, weights.layers.len(), x, added, tapped);
    if let Some(normed) = last {
        let norm = |out| Op::RmsNorm { x, weight: weights.norm, eps, out };
        program.body.extend(normed.map(norm));
        program.features = Some(normed.unwrap_or(x));
    }
    program.head = Head {
        x,
        norm: weights.norm,
        eps,
        matrix: weights.head.unwrap_or(weights.embed),
        vocab: config.vocab,
        softcap: config.logit_softcap,
    };
    program
}

/// What a part of a layer reads of the residual stream `x`.
fn read(x: Buf, norm: Option<VectorId>, eps: f32, out: Buf) -> Op {
    match norm {
        Some(weight) => Op::RmsNorm { x, weight, eps, out },
        // A device may need it in another form than that in which it is added to.
        None => Op::Copy { x, out },
    }
}

/// What is tapped of the residual stream, which is `added` times `x`, before layer `index`. The buffers are of the width of `x`, and the
/// features.
fn tap(program: &mut Program, index: usize, x: Buf, added: f64, tapped: Option<(&[Tap], [Buf; 2])>) {
    let Some((taps, [own, features])) = tapped else { return };
    for tap in taps.iter().filter(|tap| tap.before == index) {
        let add = program.features.replace(features).is_some();
        match tap.norm {
            Some((weight, eps)) => {
                let eps = (f64::from(eps) / (added * added)) as f32;
                program.body.push(Op::RmsNorm { x, weight, eps, out: own });
            }
            None => {
                // A device may need it in another form than that in which it is added to.
                program.body.push(Op::Copy { x, out: own });
                program.body.extend((added != 1.0).then_some(Op::Scale { x: own, by: added as f32 }));
            }
        }
        program.body.push(Op::Linear { x: own, weight: tap.matrix, bias: None, out: features, add });
    }
}

/// All of the feed-forward part of a layer but its last operation, which is given back as a function of where it writes.
fn feed_forward(
    config: &Config,
    layer: &Layer<MatrixId, VectorId>,
    program: &mut Program,
    [x, inner]: [Buf; 2],
) -> impl Fn(Buf, bool) -> Op + use<> {
    let &Layer { router, router_bias, gate_up, gate_up_bias, down, down_bias, .. } = layer;
    let activation = config.activation;
    let spec = program.experts.len();
    let mixture = router.zip(config.experts);
    match mixture {
        None => {
            program.body.push(Op::GatedLinear {
                x,
                weight: gate_up,
                bias: gate_up_bias,
                activation,
                out: inner,
            });
        }
        Some((router, Experts { count, chosen, routing })) => {
            program.body.push(Op::Linear { x, weight: router, bias: router_bias, out: inner, add: false });
            let inner = config.intermediate;
            let matrices = ExpertsSpec {
                count,
                chosen,
                routing,
                inner,
                activation,
                gate_up,
                gate_up_bias,
                down,
                down_bias,
            };
            program.experts.push(matrices);
        }
    }
    move |out, add| match mixture {
        None => Op::Linear { x: inner, weight: down, bias: down_bias, out, add },
        Some(_) => Op::Experts { x, logits: inner, spec, out, add },
    }
}

/// Adds what `linear` computes to the residual stream `x`: through a norm, where there is one and a buffer for it.
fn add_block(
    program: &mut Program,
    norm: Option<(Buf, VectorId)>,
    eps: f32,
    linear: impl Fn(Option<Buf>, bool) -> Op,
    x: Buf,
) {
    match norm {
        None => program.body.push(linear(None, true)),
        Some((branch, weight)) => {
            program.body.push(linear(Some(branch), false));
            program.body.push(Op::AddRmsNorm { x: branch, weight, eps, out: x });
        }
    }
}
