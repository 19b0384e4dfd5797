//! The weights of a decoder: which tensors it needs, of which shapes.
//!
//! Owns: tensor names and shapes, and the order in which weights are loaded. Must never: read one. The same [`Weights`] tree exists
//! twice: over tensor names (what to load) and over backend ids (what was loaded), so that a matrix cannot be loaded and forgotten,
//! or used and never loaded.

use crate::config::{self, Config, DeltaNet, Feed, Mixer, ShortConv};
use crate::family::{Choice, DeltaTensors, ExpertTensors, Fusion, Gate, Norms, QkNorm, Shared};
use crate::program::{MatrixId, VectorId};

/// One tensor of the checkpoint, or some of its rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    pub name: String,
    /// As it is stored.
    pub shape: Vec<usize>,
    pub rows: Pick,
}

impl TensorSpec {
    /// All rows.
    pub fn whole(name: String, shape: &[usize]) -> Self {
        Self { name, shape: shape.to_vec(), rows: Pick::ALL }
    }

    /// Rows as they are stored: the last of several dimensions is the columns. Of a vector, its values.
    pub fn stored_rows(&self) -> usize {
        let columns = if self.shape.len() > 1 { 1 } else { 0 };
        self.shape[..self.shape.len() - columns].iter().product()
    }

    /// What is left when rows are picked: `[rows]` or `[rows, columns]`.
    pub fn picked_shape(&self) -> Vec<usize> {
        let columns = self.shape.last().filter(|_| self.shape.len() > 1);
        std::iter::once(self.rows.of(self.stored_rows())).chain(columns.copied()).collect()
    }
}

/// Of every `period` rows of a tensor, `rows` from `first` on: what a tensor holds of several projections, head by head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pick {
    pub period: usize,
    pub first: usize,
    pub rows: usize,
}

impl Pick {
    pub const ALL: Pick = Pick { period: 1, first: 0, rows: 1 };

    /// How many of `whole` rows, or bytes of whole rows, these are.
    pub fn of(self, whole: usize) -> usize {
        whole / self.period * self.rows
    }

    /// These of the rows that `bytes` are, of which there are `rows`: whole periods.
    pub fn picked(self, bytes: &[u8], rows: usize) -> Vec<u8> {
        let row = bytes.len() / rows.max(1);
        let periods = bytes.chunks_exact((row * self.period).max(1));
        periods
            .flat_map(|period| &period[self.first * row..(self.first + self.rows) * row])
            .copied()
            .collect()
    }
}

/// Tensors stacked along rows into one matrix or vector of the program.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightSpec {
    /// For errors and progress: "layers.3.qkv".
    pub label: String,
    pub parts: Vec<TensorSpec>,
    pub made: Made,
}

impl WeightSpec {
    /// Rows and columns of the matrix that it becomes.
    pub fn matrix_shape(&self) -> [usize; 2] {
        let rows: usize = self.parts.iter().map(|part| part.picked_shape()[0]).sum();
        let cols = self.parts.first().and_then(|part| part.shape.last()).copied().unwrap_or(0);
        match self.made {
            Made::Transposed { rows: each } => [rows / each * cols, each],
            _ => [rows, cols],
        }
    }
}

/// What is made of what is stored: of a vector value by value, of a matrix as it is or transposed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Made {
    /// Plus so much: 1 where norms are stored as what is added to one. Then times so much.
    Linear { plus: f32, times: f32 },
    /// `-e^x`
    MinusExp,
    /// The tensor is `[channels, 1, taps]`, the vector `[taps, channels]`.
    Taps,
    /// A matrix of which so many rows at a time, `[rows, columns]`, become `[columns, rows]`, in a type that holds each value as it is
    /// decoded.
    Transposed { rows: usize },
    /// So many ones, of no tensor.
    Ones { count: usize },
}

impl Made {
    pub const AS_STORED: Made = Made::Linear { plus: 0.0, times: 1.0 };
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
    /// Of what the mixer reads.
    pub norm: Option<V>,
    /// Absent in a layer that is a feed-forward part alone.
    pub mixer: Option<MixerWeights<M, V>>,
    /// Of what the mixer adds to the residual stream.
    pub post_norm: Option<V>,
    /// Of what the feed-forward part reads.
    pub mlp_norm: Option<V>,
    /// Absent in a layer that is a mixer alone.
    pub feed_forward: Option<FeedForward<M, V>>,
    /// Of what the feed-forward part adds.
    pub mlp_post_norm: Option<V>,
}

/// What mixes positions.
#[derive(Clone, Debug)]
pub enum MixerWeights<M, V> {
    Attention(Attention<M, V>),
    Latent(config::Latent, Latent<M, V>),
    Delta(DeltaNet, Delta<M, V>),
    Conv(ShortConv, Conv<M, V>),
    Mamba(config::Mamba, Mamba<M, V>),
}

/// Turns specifications into loaded weights.
pub trait Load<E> {
    fn matrix(&mut self, spec: &WeightSpec) -> Result<MatrixId, E>;
    fn vector(&mut self, spec: &WeightSpec) -> Result<VectorId, E>;
}

/// Weights that belong together, and what each is loaded as, in the order in which they are.
macro_rules! weights {
    ($(#[$about:meta])* $name:ident { $($(#[$doc:meta])* $field:ident: $type:ty = $kind:ident,)* }) => {
        $(#[$about])*
        #[derive(Clone, Debug)]
        pub struct $name<M, V> {
            $($(#[$doc])* pub $field: $type,)*
        }

        impl $name<WeightSpec, WeightSpec> {
            fn list<'a>(&'a self, list: &mut Vec<&'a WeightSpec>) {
                $(list.extend(weights!(@each $kind self.$field));)*
            }

            fn try_map<E>(&self, load: &mut impl Load<E>) -> Result<$name<MatrixId, VectorId>, E> {
                Ok($name { $($field: weights!(@load $kind self.$field, load),)* })
            }
        }
    };
    (@each matrix $at:expr) => { [&$at] };
    (@each vector $at:expr) => { [&$at] };
    (@each $some:ident $at:expr) => { $at.as_ref() };
    (@load matrix $at:expr, $load:ident) => { $load.matrix(&$at)? };
    (@load vector $at:expr, $load:ident) => { $load.vector(&$at)? };
    (@load some_matrix $at:expr, $load:ident) => { $at.as_ref().map(|spec| $load.matrix(spec)).transpose()? };
    (@load some_vector $at:expr, $load:ident) => { $at.as_ref().map(|spec| $load.vector(spec)).transpose()? };
}

weights! {
    /// Multi-head attention.
    Attention {
        /// q, k and v, one below the other.
        qkv: M = matrix,
        qkv_bias: Option<V> = some_vector,
        /// Of what each query head attends to.
        gate: Option<M> = some_matrix,
        q_norm: Option<V> = some_vector,
        k_norm: Option<V> = some_vector,
        sinks: Option<V> = some_vector,
        o: M = matrix,
        o_bias: Option<V> = some_vector,
    }
}

weights! {
    /// Latent attention.
    Latent {
        /// What queries are compressed by, where they are.
        q_down: Option<M> = some_matrix,
        q_down_bias: Option<V> = some_vector,
        q_norm: Option<V> = some_vector,
        q: M = matrix,
        /// The latent, and behind it what is rotated.
        kv_down: M = matrix,
        kv_down_bias: Option<V> = some_vector,
        kv_norm: V = vector,
        /// Of each head what makes its keys of a latent, transposed: `[rank, nope_dim]`.
        absorb: M = matrix,
        /// Of each head what makes its values of a latent: `[value_dim, rank]`.
        expand: M = matrix,
        o: M = matrix,
        o_bias: Option<V> = some_vector,
    }
}

weights! {
    /// A gated delta net.
    Delta {
        /// q, k and v, one below the other: the channels of the convolution.
        qkv: M = matrix,
        taps: V = vector,
        /// What a value head learns (b), and how much it forgets (a), of a position.
        gates: M = matrix,
        decay: V = vector,
        step_bias: V = vector,
        /// Gate of the output.
        z: M = matrix,
        norm: V = vector,
        o: M = matrix,
    }
}

weights! {
    /// A Mamba-2 mixer.
    Mamba {
        /// x, B and C, one below the other: the channels of the convolution.
        xbc: M = matrix,
        taps: V = vector,
        bias: Option<V> = some_vector,
        steps: M = matrix,
        decay: V = vector,
        step_bias: V = vector,
        skip: V = vector,
        /// Gate of the output.
        z: M = matrix,
        norm: V = vector,
        o: M = matrix,
    }
}

weights! {
    /// A short convolution.
    Conv {
        /// What it reads is multiplied by, what comes out is, and what it reads.
        before: M = matrix,
        behind: M = matrix,
        x: M = matrix,
        taps: V = vector,
        o: M = matrix,
    }
}

weights! {
    /// The feed-forward part. Of a mixture of experts, matrices and vectors behind the router are those of all.
    FeedForward {
        router: Option<M> = some_matrix,
        router_bias: Option<V> = some_vector,
        /// Added to what experts are chosen by.
        choice_bias: Option<V> = some_vector,
        /// What experts read is made by, where it is not what all others read.
        experts_in: Option<M> = some_matrix,
        /// Without a gate: what the activation reads.
        gate_up: M = matrix,
        gate_up_bias: Option<V> = some_vector,
        /// Of xIELU.
        xielu: Option<V> = some_vector,
        down: M = matrix,
        down_bias: Option<V> = some_vector,
        /// What experts add up to is made as wide by as what they were made of.
        experts_out: Option<M> = some_matrix,
        /// The expert that speaks for every token, and how strongly, where that is not the same for all.
        shared_gate_up: Option<M> = some_matrix,
        shared_down: Option<M> = some_matrix,
        shared_gate: Option<M> = some_matrix,
    }
}

impl Weights<WeightSpec, WeightSpec> {
    /// Every matrix and vector, in the order in which it is loaded.
    pub fn iter(&self) -> impl Iterator<Item = &WeightSpec> {
        let mut list = vec![&self.embed];
        self.layers.iter().for_each(|layer| layer.list(&mut list));
        list.push(&self.norm);
        list.extend(&self.head);
        list.into_iter()
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

impl Layer<WeightSpec, WeightSpec> {
    fn list<'a>(&'a self, list: &mut Vec<&'a WeightSpec>) {
        list.extend(&self.norm);
        match &self.mixer {
            Some(MixerWeights::Attention(attention)) => attention.list(list),
            Some(MixerWeights::Latent(_, latent)) => latent.list(list),
            Some(MixerWeights::Delta(_, delta)) => delta.list(list),
            Some(MixerWeights::Conv(_, conv)) => conv.list(list),
            Some(MixerWeights::Mamba(_, mamba)) => mamba.list(list),
            None => {}
        }
        list.extend(&self.post_norm);
        list.extend(&self.mlp_norm);
        if let Some(feed_forward) = &self.feed_forward {
            feed_forward.list(list);
        }
        list.extend(&self.mlp_post_norm);
    }

    fn try_map<E>(&self, load: &mut impl Load<E>) -> Result<Layer<MatrixId, VectorId>, E> {
        Ok(Layer {
            norm: self.norm.as_ref().map(|spec| load.vector(spec)).transpose()?,
            mixer: self.mixer.as_ref().map(|mixer| mixer.try_map(load)).transpose()?,
            post_norm: self.post_norm.as_ref().map(|spec| load.vector(spec)).transpose()?,
            mlp_norm: self.mlp_norm.as_ref().map(|spec| load.vector(spec)).transpose()?,
            feed_forward: self.feed_forward.as_ref().map(|part| part.try_map(load)).transpose()?,
            mlp_post_norm: self.mlp_post_norm.as_ref().map(|spec| load.vector(spec)).transpose()?,
        })
    }
}

impl MixerWeights<WeightSpec, WeightSpec> {
    fn try_map<E>(&self, load: &mut impl Load<E>) -> Result<MixerWeights<MatrixId, VectorId>, E> {
        Ok(match self {
            MixerWeights::Attention(attention) => MixerWeights::Attention(attention.try_map(load)?),
            MixerWeights::Latent(sizes, latent) => MixerWeights::Latent(*sizes, latent.try_map(load)?),
            MixerWeights::Delta(net, delta) => MixerWeights::Delta(*net, delta.try_map(load)?),
            MixerWeights::Conv(sizes, conv) => MixerWeights::Conv(*sizes, conv.try_map(load)?),
            MixerWeights::Mamba(sizes, mamba) => MixerWeights::Mamba(*sizes, mamba.try_map(load)?),
        })
    }
}

/// What a checkpoint of this configuration must hold.
pub fn weight_specs(config: &Config) -> Weights<WeightSpec, WeightSpec> {
    let (hidden, vocab) = (config.hidden, config.vocab);
    let table = |label: &str, name: &str| {
        let parts = vec![TensorSpec::whole(name.to_owned(), &[vocab, hidden])];
        WeightSpec { label: label.to_owned(), parts, made: Made::AS_STORED }
    };
    Weights {
        embed: table("embed_tokens", "model.embed_tokens.weight"),
        layers: (0..config.layers).map(|index| LayerNames { config, index }.layer()).collect(),
        norm: WeightSpec {
            label: "norm".to_owned(),
            parts: vec![TensorSpec::whole("model.norm.weight".to_owned(), &[hidden])],
            // Nothing but the output matrix reads what the last norm gives.
            made: Made::Linear { plus: config.norm_offset, times: (1.0 / config.logit_divisor) as f32 },
        },
        head: (!config.tied).then(|| table("lm_head", "lm_head.weight")),
    }
}

/// The part of a layer that holds the experts of a mixture.
const EXPERTS: &str = "mlp.experts";

/// One layer, and what its tensors are called.
struct LayerNames<'a> {
    config: &'a Config,
    index: usize,
}

impl LayerNames<'_> {
    fn layer(&self) -> Layer<WeightSpec, WeightSpec> {
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
        let (hidden, dim, q, kv) = (config.hidden, config.head_dim, config.q_width(), config.kv_width());
        let split = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)];
        let qkv = |label, cols| self.projections(label, "self_attn", &split, "qkv_proj", cols);
        let qk_norm = |name: &str, all: usize| match config.qk_norm {
            QkNorm::Never | QkNorm::Stated(_) => None,
            QkNorm::Heads | QkNorm::Rotated => Some(self.norm(name, "self_attn.", dim)),
            QkNorm::Rows => Some(self.norm(name, "self_attn.", all)),
            QkNorm::Unweighted(_) if config.rotated[self.index] => {
                Some(WeightSpec { made: Made::Ones { count: dim }, ..self.stack(name, Vec::new()) })
            }
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
            k_norm: qk_norm("k_norm", kv),
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
        let inner = if experts.is_some() { config.intermediate } else { config.dense_width() };
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
        let name = if is_gated { "mlp.shared_expert" } else { "mlp.shared_experts" };
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
