//! The one decoder: the [`Program`] that weights become, and the cache it needs.
//!
//! Owns: the order of operations, and which layer keeps what in which cache group. Must never: read a weight, or ask which family it is
//! building; what differs is in [`Config`].

mod feeds;
mod mixers;

use crate::backend::{DType, GroupKind, KvFormat, KvGroup, KvLayout};
use crate::config::{Config, EmbeddingScale, Feed, HeadSizes, Latent, Mixer};
use crate::family::{Choice, Norms, Shared};
use crate::kv_format::{KeptLayer, KvFormats};
use crate::program::{Buf, Head, MatrixId, Op, Program, VectorId};
use crate::quant::Encoding;
use crate::weights::Weights;
use feeds::{add_input, experts_beside, feed_forward, layer_inputs, shared_expert};
use mixers::{Place, mix};

/// Of what this crate decides of the bits of K and V: rotary frequencies, decoded weights, the order of operations. Raised whenever
/// the same checkpoint would give others.
pub const NUMERICS: u32 = 1;

/// What a decoder gives a drafter of each row, its features.
#[derive(Clone, Debug, PartialEq)]
pub enum Taps {
    /// The sum of one product for each layer that is tapped, `width` values: rows of every matrix.
    Products { width: usize, of: Vec<Tap> },
    /// `matrix . norm(x)`, `width` values, of the residual streams before these layers, side by side. The norm has weight and epsilon.
    Product { width: usize, before: Vec<usize>, norm: (VectorId, f32), matrix: MatrixId },
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

/// What decides, with a configuration, which cache group each layer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheUse {
    /// Most tokens of a sequence. A window that holds that many is none.
    pub max_model_len: usize,
    /// Layers with a window keep what lies behind it, in the group of those that attend to everything.
    pub keeps_all: bool,
}

impl From<usize> for CacheUse {
    fn from(max_model_len: usize) -> Self {
        Self { max_model_len, keeps_all: false }
    }
}

/// Which cache group each layer stores what it keeps in, if it keeps anything, or reads what another keeps; and the kinds of the groups:
/// layers that attend to everything, whose heads and latents are all alike, then a group for each size of window and of state.
fn cache_groups(config: &Config, cache: CacheUse) -> (Vec<GroupKind>, Vec<Option<usize>>) {
    // Those with heads of another size need a group of their own.
    let one = cache.keeps_all && config.full_heads.is_none();
    let latent = latent(config).map(|latent| GroupKind::Latent { rank: latent.rank as u32 });
    let mut kinds = vec![latent.unwrap_or(GroupKind::Full)];
    let groups = (0..config.layers).map(|layer| {
        let window = window(config, layer, cache.max_model_len).filter(|_| !one);
        let kind = match (config.mixers[layer], window) {
            (Mixer::Delta(net), _) => GroupKind::State { values: net.state_values() },
            (Mixer::Mamba(mamba), _) => GroupKind::State { values: mamba.state_values() },
            (Mixer::Conv(conv), _) => GroupKind::State { values: conv.state_values() },
            (Mixer::Attention, Some(tokens)) => GroupKind::Window { tokens },
            (Mixer::Attention, None) | (Mixer::Latent(_), _) => return Some(0),
            (Mixer::Nothing, _) => return None,
        };
        Some(kinds.iter().position(|known| *known == kind).unwrap_or_else(|| {
            kinds.push(kind);
            kinds.len() - 1
        }))
    });
    let groups = groups.collect();
    (kinds, groups)
}

/// What layers with latent attention have in common. Where there are such, no layer attends to everything otherwise.
fn latent(config: &Config) -> Option<Latent> {
    config.mixers.iter().find_map(|mixer| match mixer {
        Mixer::Latent(latent) => Some(*latent),
        Mixer::Attention | Mixer::Delta(_) | Mixer::Conv(_) | Mixer::Mamba(_) | Mixer::Nothing => None,
    })
}

/// Whether a layer keeps something in a cache group, and does not only read what another keeps there.
fn keeps(config: &Config, groups: &[Option<usize>], layer: usize, group: usize) -> bool {
    groups[layer] == Some(group) && config.kv_source(layer) == layer
}

/// Layers with heads of another size than those without a window keep theirs: they need a group of their own.
fn window(config: &Config, layer: usize, max_model_len: usize) -> Option<u32> {
    let window = config.windows[layer]?;
    let none = window >= max_model_len && config.full_heads.is_none();
    (!none).then_some(window.min(max_model_len) as u32)
}

/// Most tokens from one kept state to the next.
const STATE_EVERY_MAX: usize = 1024;

/// Geometry of the KV cache of this decoder. The error is a sentence, see [`KvFormats::of_layers`].
pub fn kv_layout(
    config: &Config,
    formats: &KvFormats,
    block_tokens: usize,
    cache: impl Into<CacheUse>,
) -> Result<KvLayout, String> {
    let cache = cache.into();
    let (kinds, group_of) = cache_groups(config, cache);
    let kept = |layer: usize| {
        let windowed = group_of[layer].is_some_and(|group| group > 0);
        let head_dim = latent(config).map_or(config.head_sizes(layer).head_dim, |latent| latent.key_dim());
        KeptLayer { head_dim, windowed, source: config.kv_source(layer) }
    };
    let formats = formats.of_layers(&(0..config.layers).map(kept).collect::<Vec<_>>())?;
    if let Some(format) = formats.iter().find(|format| latent(config).is_some() && format.is_scaled()) {
        return Err(format!("latents are kept in f32, f16 or bf16, not in {format}"));
    }
    let group = |(index, kind): (usize, GroupKind)| {
        let layers = (0..config.layers).filter(|layer| keeps(config, &group_of, *layer, index));
        let most = HeadSizes { kv_heads: config.kv_heads, head_dim: config.head_dim };
        let sizes = layers.clone().next().map_or(most, |layer| config.head_sizes(layer));
        let (kv_heads, head_dim) = match latent(config) {
            Some(latent) => (1, latent.key_dim()),
            None => (sizes.kv_heads, sizes.head_dim),
        };
        match kind {
            GroupKind::State { .. } => {
                let formats = layers.map(|_| KvFormat::F32).collect();
                KvGroup { kind, block_tokens, kv_heads: 0, head_dim: 0, formats }
            }
            _ => {
                let formats = layers.map(|layer| formats[layer]).collect();
                KvGroup { kind, block_tokens, kv_heads, head_dim, formats }
            }
        }
    };
    let mut layout = KvLayout { groups: kinds.into_iter().enumerate().map(group).collect() };
    let of_token = layout.bytes_per_token().max(1);
    for group in layout.groups.iter_mut().filter(|group| group.state_values().is_some()) {
        // K and V of the tokens from one state to the next take at least a quarter of its bytes.
        let (bytes, most) = (group.bytes_per_block(), STATE_EVERY_MAX.min(cache.max_model_len));
        let worth = |tokens: usize| 4 * tokens * of_token >= bytes || 2 * tokens > most;
        while !worth(group.block_tokens) {
            group.block_tokens *= 2;
        }
    }
    Ok(layout)
}

/// A number of the type that most weights have, as which a model keeps it. Quantized models keep it as f32.
fn rounded(value: f64, encoding: Encoding) -> f32 {
    match encoding.plain() {
        Some(DType::BF16) => half::bf16::from_f32(value as f32).to_f32(),
        Some(DType::F16) => half::f16::from_f32(value as f32).to_f32(),
        Some(DType::F32) | None => value as f32,
    }
}

/// The decoder as data. `encoding` is that of most weights. Without taps there are no operations but the decoder's.
pub fn program(
    config: &Config,
    weights: &Weights<MatrixId, VectorId>,
    cache: impl Into<CacheUse>,
    encoding: Encoding,
    taps: Option<&Taps>,
) -> Program {
    let cache = cache.into();
    let max_model_len = cache.max_model_len;
    let mut program = Program::default();
    let mut buffer = |width: usize| {
        program.buffers.push(width);
        Buf(program.buffers.len() as u32 - 1)
    };
    let x = buffer(config.hidden);
    let buffers = Buffers::new(config, x, &mut buffer);
    let tapped = taps.and_then(|taps| {
        let (own, width) = match taps {
            Taps::Products { width, .. } => (config.hidden, *width),
            Taps::Product { width, before, .. } => (before.len() * config.hidden, *width),
            Taps::Last { .. } => return None,
        };
        Some((taps, [own, width, own].map(&mut buffer)))
    });
    let last = taps.and_then(|taps| match taps {
        Taps::Last { normed } => Some(normed.then(|| buffer(config.hidden))),
        Taps::Products { .. } | Taps::Product { .. } => None,
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
    let (scale, merge) = (scale.map(|by| Op::Scale { x, by }), Some(Op::Merge { out: x }));
    // Either the table is scaled (Gemma), and what is given in its place is as it is, or whatever the layers begin with.
    program.body.extend(
        match config.embedding_scale {
            Some(EmbeddingScale::RootOfWidth) => [scale, merge],
            _ => [merge, scale],
        }
        .into_iter()
        .flatten(),
    );
    if let (Some(inputs), Some(width)) = (&weights.inputs, config.layer_input) {
        let by = rounded((width as f64).sqrt(), encoding) * std::f32::consts::FRAC_1_SQRT_2;
        layer_inputs(config, inputs, &mut program, &buffers, x, by);
    }
    let (_, groups) = cache_groups(config, cache);
    for (index, layer) in weights.layers.iter().enumerate() {
        tap(&mut program, index, x, added, tapped);
        if let (Some(mixer), Some(group)) = (&layer.mixer, groups[index]) {
            let before = 0..config.kv_source(index);
            let before = before.filter(|layer| keeps(config, &groups, *layer, group)).count();
            let place = Place { group: group as u32, layer: before as u32 };
            read(config, x, layer.norm, eps, buffers.normed, &mut program);
            let (mixed, weight, bias) =
                mix(config, index, mixer, &mut program, &buffers, place, max_model_len);
            add_block(
                &mut program,
                buffers.branch.zip(layer.post_norm),
                eps,
                None,
                |out, add| Op::Linear { x: mixed, weight, bias, out: out.unwrap_or(x), add },
                x,
            );
        }
        let Some(part) = &layer.feed_forward else { continue };
        if config.family.norms != Norms::Once {
            read(config, x, layer.mlp_norm, eps, buffers.normed, &mut program);
        }
        // What the layer ends with multiplies all of it.
        let (times, times_last) =
            if layer.input.is_some() { (None, layer.scale) } else { (layer.scale, None) };
        if let (Some(branch), Some(weight), Some(_)) =
            (buffers.branch, layer.mlp_post_norm, part.experts_norm)
        {
            experts_beside(config, index, part, &mut program, &buffers, [x, branch], eps);
            program.body.push(Op::AddRmsNorm { x: branch, weight, eps, out: x, times });
        } else {
            let last = feed_forward(config, config.experts_of(index), part, index, &mut program, &buffers);
            add_block(
                &mut program,
                buffers.branch.zip(layer.mlp_post_norm),
                eps,
                times,
                |out, add| last(out.unwrap_or(x), add),
                x,
            );
            shared_expert(config, part, &mut program, &buffers, x);
        }
        if let (Some(input), Some(branch)) = (&layer.input, buffers.branch) {
            add_input(config, index, input, &mut program, &buffers, [x, branch]);
            program.body.push(Op::AddRmsNorm {
                x: branch,
                weight: input.norm,
                eps,
                out: x,
                times: times_last,
            });
        }
    }
    tap(&mut program, weights.layers.len(), x, added, tapped);
    // What the last norm reads.
    let end = if config.family.centered { buffers.normed } else { x };
    program.body.extend(config.family.centered.then_some(Op::Center { x, out: end }));
    if let Some(normed) = last {
        let norm = |out| Op::RmsNorm { x: end, weight: weights.norm, eps, out };
        program.body.extend(normed.map(norm));
        program.features = Some(normed.unwrap_or(x));
    }
    program.head = Head {
        x: end,
        norm: weights.norm,
        eps,
        matrix: weights.head.unwrap_or(weights.embed),
        vocab: config.vocab,
        softcap: config.logit_softcap,
    };
    program
}

/// What a part of a layer reads of the residual stream `x`.
fn read(config: &Config, x: Buf, norm: Option<VectorId>, eps: f32, out: Buf, program: &mut Program) {
    match norm {
        Some(weight) if config.family.centered => {
            program.body.extend([Op::Center { x, out }, Op::RmsNorm { x: out, weight, eps, out }]);
        }
        Some(weight) => program.body.push(Op::RmsNorm { x, weight, eps, out }),
        // A device may need it in another form than that in which it is added to.
        None => program.body.push(Op::Copy { x, out }),
    }
}

/// What is tapped of the residual stream, which is `added` times `x`, before layer `index`. The buffers are of what is multiplied, of the
/// features, and of what is gathered for a norm.
fn tap(program: &mut Program, index: usize, x: Buf, added: f64, tapped: Option<(&Taps, [Buf; 3])>) {
    let Some((taps, [own, features, beside])) = tapped else { return };
    let taps = match taps {
        Taps::Products { of, .. } => of.as_slice(),
        Taps::Product { before, norm: (weight, eps), matrix, .. } => {
            let hidden = program.buffers[x.0 as usize];
            for (at, _) in before.iter().enumerate().filter(|(_, before)| **before == index) {
                program.body.push(Op::Place { x, out: beside, first: at * hidden });
            }
            if before.iter().max() == Some(&index) {
                let eps = (f64::from(*eps) / (added * added)) as f32;
                program.body.push(Op::RmsNorm { x: beside, weight: *weight, eps, out: own });
                program.body.push(Op::Linear {
                    x: own,
                    weight: *matrix,
                    bias: None,
                    out: features,
                    add: false,
                });
                program.features = Some(features);
            }
            return;
        }
        Taps::Last { .. } => return,
    };
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

/// Buffers of one use: one for each width that some layer needs.
struct OfWidths(Vec<(usize, Buf)>);

impl OfWidths {
    fn new(widths: impl Iterator<Item = usize>, buffer: &mut impl FnMut(usize) -> Buf) -> Self {
        let mut buffers: Vec<(usize, Buf)> = Vec::new();
        for width in widths {
            if buffers.iter().all(|(known, _)| *known != width) {
                buffers.push((width, buffer(width)));
            }
        }
        Self(buffers)
    }

    fn get(&self, width: usize) -> Buf {
        let found = self.0.iter().find(|(known, _)| *known == width);
        found.expect("made for the widths of all layers").1
    }
}

/// Row buffers beside the residual stream.
struct Buffers {
    normed: Buf,
    qkv: OfWidths,
    attended: OfWidths,
    /// Of an output gate.
    gate: Buf,
    latent: LatentBuffers,
    delta: DeltaBuffers,
    conv: ConvBuffers,
    mamba: MambaBuffers,
    /// Of one feed-forward part.
    inner: OfWidths,
    /// Of the router.
    logits: Buf,
    /// What experts read, and what they add up to, where that is not what others read and as wide as the residual stream.
    experts: [Buf; 2],
    shared: SharedBuffers,
    inputs: InputBuffers,
    /// Of the output of a block that has a norm behind it.
    branch: Option<Buf>,
}

struct LatentBuffers {
    /// Queries compressed, and through their norm.
    q_down: [Buf; 2],
    q: Buf,
    latent: Buf,
    queries: Buf,
    /// Sums of latents, and of values.
    mixed: Buf,
    attended: Buf,
}

struct DeltaBuffers {
    qkv: Buf,
    gates: Buf,
    z: Buf,
    out: Buf,
}

struct ConvBuffers {
    before: Buf,
    behind: Buf,
    x: Buf,
}

struct MambaBuffers {
    xbc: Buf,
    steps: Buf,
    z: Buf,
    out: Buf,
}

struct SharedBuffers {
    inner: Buf,
    gate: Buf,
}

struct InputBuffers {
    /// What all layers are given, side by side, and what is added to it.
    given: Buf,
    projected: Buf,
    /// Of one layer.
    gate: Buf,
}

impl Buffers {
    /// Those that no layer uses stand for `none`.
    fn new(config: &Config, none: Buf, buffer: &mut impl FnMut(usize) -> Buf) -> Self {
        let (mut net, mut conv, mut mamba) = (None, None, None);
        for mixer in &config.mixers {
            match mixer {
                Mixer::Delta(sizes) => net = Some(*sizes),
                Mixer::Conv(sizes) => conv = Some(sizes.channels),
                Mixer::Mamba(sizes) => mamba = Some(*sizes),
                Mixer::Attention | Mixer::Latent(_) | Mixer::Nothing => {}
            }
        }
        let latent = latent(config);
        let attends = |layer: &usize| config.mixers[*layer] == Mixer::Attention;
        let feeds = |layer: &usize| config.feeds[*layer] == Feed::Dense;
        let qkv = (0..config.layers).filter(attends).map(|layer| config.qkv_width(layer));
        let attended = (0..config.layers).filter(attends).map(|layer| config.q_width(layer));
        let inner = (0..config.layers).filter(feeds).map(|layer| config.dense_width(layer));
        let [qkv, attended] = [OfWidths::new(qkv, buffer), OfWidths::new(attended, buffer)];
        let inner = OfWidths::new(inner, buffer);
        let given = config.layer_input;
        let beside = config.family.mixture.is_some_and(|mixture| matches!(mixture.shared, Shared::Beside(_)));
        let shared = config.experts.and_then(|experts| experts.shared);
        let top = config.family.mixture.is_some_and(|mixture| mixture.choice == Choice::Top);
        let narrow = config.experts.and_then(|experts| experts.latent);
        let wide = |when: bool| config.experts.filter(|_| when).map(|_| config.hidden);
        let (read, sum) = (narrow.or(wide(top)), narrow.or(wide(beside)));
        let normed = buffer(config.hidden);
        let behind = matches!(config.family.norms, Norms::Around | Norms::After);
        let branch = behind.then(|| buffer(config.hidden));
        let mut some = |width: Option<usize>| width.map_or(none, &mut *buffer);
        let of_latent = |width: fn(Latent) -> usize| latent.map(|latent| config.heads * width(latent));
        let q_rank = latent.and_then(|latent| latent.q_rank);
        Self {
            normed,
            qkv,
            attended,
            inner,
            logits: some(config.experts.map(|experts| experts.count)),
            latent: LatentBuffers {
                q_down: [some(q_rank), some(q_rank)],
                q: some(of_latent(|latent| latent.query_dim())),
                latent: some(latent.map(|latent| latent.key_dim())),
                queries: some(of_latent(|latent| latent.key_dim())),
                mixed: some(of_latent(|latent| latent.rank)),
                attended: some(of_latent(|latent| latent.value_dim)),
            },
            gate: some(config.family.output_gate.then(|| config.q_width(0))),
            delta: DeltaBuffers {
                qkv: some(net.map(|net| net.channels())),
                gates: some(net.map(|net| 2 * net.value_heads)),
                z: some(net.map(|net| net.value_heads * net.value_dim)),
                out: some(net.map(|net| net.value_heads * net.value_dim)),
            },
            mamba: MambaBuffers {
                xbc: some(mamba.map(|mamba| mamba.channels())),
                steps: some(mamba.map(|mamba| mamba.heads)),
                z: some(mamba.map(|mamba| mamba.width())),
                out: some(mamba.map(|mamba| mamba.width())),
            },
            conv: ConvBuffers { before: some(conv), behind: some(conv), x: some(conv) },
            experts: [some(read), some(sum)],
            inputs: InputBuffers {
                given: some(given.map(|width| width * config.layers)),
                projected: some(given.map(|width| width * config.layers)),
                gate: some(given),
            },
            shared: SharedBuffers { inner: some(shared), gate: some(shared.map(|_| 1)) },
            branch,
        }
    }
}

/// Adds what `linear` computes to the residual stream `x`: through a norm, where there is one and a buffer for it, and then times so much.
fn add_block(
    program: &mut Program,
    norm: Option<(Buf, VectorId)>,
    eps: f32,
    times: Option<VectorId>,
    linear: impl Fn(Option<Buf>, bool) -> Op,
    x: Buf,
) {
    match norm {
        None => program.body.push(linear(None, true)),
        Some((branch, weight)) => {
            program.body.push(linear(Some(branch), false));
            program.body.push(Op::AddRmsNorm { x: branch, weight, eps, out: x, times });
        }
    }
}
