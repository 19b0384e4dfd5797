//! The weights of a decoder: which tensors it needs, of which shapes.
//!
//! Owns: tensor names and shapes, and the order in which weights are loaded. Must never: read one. The same [`Weights`] tree exists
//! twice: over tensor names (what to load) and over backend ids (what was loaded), so that a matrix cannot be loaded and forgotten,
//! or used and never loaded.

mod layers;

use crate::config::{self, Config, DeltaNet, ShortConv};
use crate::program::{MatrixId, VectorId};
use layers::LayerNames;

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
    /// Its parts, but of equal neighbours one: what is read twice is one tensor.
    pub fn distinct(&self) -> impl Iterator<Item = &TensorSpec> {
        let before = std::iter::once(None).chain(self.parts.iter().map(Some));
        self.parts.iter().zip(before).filter(|(part, before)| Some(*part) != *before).map(|(part, _)| part)
    }

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
    /// What makes the values that each layer is given of a token.
    pub inputs: Option<Inputs<M, V>>,
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
    pub input: Option<LayerInput<M, V>>,
    /// One value, which the residual stream behind the layer is multiplied by.
    pub scale: Option<V>,
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
    /// Of the values that all layers are given of a token, side by side.
    Inputs {
        /// A row for each token.
        embed: M = matrix,
        /// What is made of the token's embedding is added, through a norm of the values of each layer.
        projection: M = matrix,
        norm: V = vector,
    }
}

weights! {
    /// What a layer does with the values that it is given.
    LayerInput {
        /// Of the residual stream, as many values.
        gate: M = matrix,
        /// Of what comes of both, what is added to the residual stream, through a norm.
        projection: M = matrix,
        norm: V = vector,
    }
}

weights! {
    /// Multi-head attention.
    Attention {
        /// q, k and v, one below the other; q alone where k and v are another layer's.
        qkv: M = matrix,
        qkv_bias: Option<V> = some_vector,
        /// Of what each query head attends to.
        gate: Option<M> = some_matrix,
        q_norm: Option<V> = some_vector,
        k_norm: Option<V> = some_vector,
        v_norm: Option<V> = some_vector,
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
        /// Of what the router reads, where that is not what experts read.
        router_norm: Option<V> = some_vector,
        /// What experts' weights are multiplied by, each by its own.
        expert_scales: Option<V> = some_vector,
        /// Of what experts read, and of what they add up to, where there are norms of their own.
        experts_norm: Option<V> = some_vector,
        experts_post_norm: Option<V> = some_vector,
        /// Of what the part that speaks for every token says, where there is one.
        shared_post_norm: Option<V> = some_vector,
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
        self.inputs.iter().for_each(|inputs| inputs.list(&mut list));
        self.layers.iter().for_each(|layer| layer.list(&mut list));
        list.push(&self.norm);
        list.extend(&self.head);
        list.into_iter()
    }

    /// The same tree over what `matrix` and `vector` make of each, called in the order of [`Weights::iter`].
    pub fn try_map<E>(&self, load: &mut impl Load<E>) -> Result<Weights<MatrixId, VectorId>, E> {
        let embed = load.matrix(&self.embed)?;
        let inputs = self.inputs.as_ref().map(|inputs| inputs.try_map(load)).transpose()?;
        let mut layers = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            layers.push(layer.try_map(load)?);
        }
        let norm = load.vector(&self.norm)?;
        let head = self.head.as_ref().map(|head| load.matrix(head)).transpose()?;
        Ok(Weights { embed, inputs, layers, norm, head })
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
        self.input.iter().for_each(|input| input.list(list));
        list.extend(&self.scale);
    }

    fn try_map<E>(&self, load: &mut impl Load<E>) -> Result<Layer<MatrixId, VectorId>, E> {
        Ok(Layer {
            norm: self.norm.as_ref().map(|spec| load.vector(spec)).transpose()?,
            mixer: self.mixer.as_ref().map(|mixer| mixer.try_map(load)).transpose()?,
            post_norm: self.post_norm.as_ref().map(|spec| load.vector(spec)).transpose()?,
            mlp_norm: self.mlp_norm.as_ref().map(|spec| load.vector(spec)).transpose()?,
            feed_forward: self.feed_forward.as_ref().map(|part| part.try_map(load)).transpose()?,
            mlp_post_norm: self.mlp_post_norm.as_ref().map(|spec| load.vector(spec)).transpose()?,
            input: self.input.as_ref().map(|input| input.try_map(load)).transpose()?,
            scale: self.scale.as_ref().map(|spec| load.vector(spec)).transpose()?,
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
    let one = |label: &str, name: &str, shape: &[usize]| {
        let parts = vec![TensorSpec::whole(name.to_owned(), shape)];
        WeightSpec { label: label.to_owned(), parts, made: Made::AS_STORED }
    };
    let table = |label: &str, name: &str| one(label, name, &[vocab, hidden]);
    let inputs = |width: usize| {
        let all = config.layers * width;
        let norm = TensorSpec::whole("model.per_layer_projection_norm.weight".to_owned(), &[width]);
        Inputs {
            embed: one("inputs", "model.embed_tokens_per_layer.weight", &[vocab, all]),
            projection: one("inputs_proj", "model.per_layer_model_projection.weight", &[all, hidden]),
            norm: WeightSpec {
                label: "inputs_norm".to_owned(),
                // The same for the values of every layer; what both sources add up to is divided by the root of two.
                parts: vec![norm; config.layers],
                made: Made::Linear { plus: 0.0, times: std::f32::consts::FRAC_1_SQRT_2 },
            },
        }
    };
    Weights {
        embed: table("embed_tokens", "model.embed_tokens.weight"),
        inputs: config.layer_input.map(inputs),
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
