//! The decoder as data: a list of operations over named row buffers, built once per checkpoint from the family table.
//!
//! Owns: what is computed, in which order, with which weights. Must never: know how an operation is executed, or that
//! requests exist. A backend receives the whole [`Program`] at load time, may fuse or pre-plan it, and runs it for every
//! step; an operation's result for one row depends on that row, its position, the cached bits and the weights only
//! (promise 1).
//!
//! A *row* is one token of one sequence in this step. Every buffer is `[rows, width]` in f32.

/// A weight matrix handed to the backend: `[out_features, in_features]`, packed in the backend's own layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MatrixId(pub u32);

/// A weight vector (norm weight or bias), kept in f32 by the backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VectorId(pub u32);

/// A row buffer: index into [`Program::buffers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Buf(pub u32);

/// A rotary table: index into [`Program::ropes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RopeId(pub u32);

/// What one forward pass computes.
#[derive(Clone, Debug, Default)]
pub struct Program {
    /// Width (f32 values per row) of each [`Buf`].
    pub buffers: Vec<usize>,
    pub ropes: Vec<Rope>,
    pub attention: Vec<AttentionSpec>,
    pub experts: Vec<ExpertsSpec>,
    pub convolutions: Vec<ConvolutionSpec>,
    pub delta: Vec<DeltaSpec>,
    pub state_spaces: Vec<StateSpaceSpec>,
    pub latent: Vec<LatentSpec>,
    /// Run for every row, in order.
    pub body: Vec<Op>,
    /// Run only for rows whose logits are wanted.
    pub head: Head,
    /// What a drafter reads of a row ([`Batch::feature_rows`](crate::backend::Batch::feature_rows)): the buffer keeps it to the end of the
    /// body.
    pub features: Option<Buf>,
}

/// `logits = scale * (W . rms_norm(x))`, computed for sampled rows only.
#[derive(Clone, Debug)]
pub struct Head {
    pub x: Buf,
    pub norm: VectorId,
    pub eps: f32,
    /// `[vocab, hidden]`; may be the embedding table (tied).
    pub matrix: MatrixId,
    pub vocab: usize,
    /// `cap * tanh(x / cap)` of every logit (Gemma 2).
    pub softcap: Option<f32>,
}

impl Default for Head {
    fn default() -> Self {
        Self { x: Buf(0), norm: VectorId(0), eps: 0.0, matrix: MatrixId(0), vocab: 0, softcap: None }
    }
}

/// Rotary embedding of the first `2 * inv_freq.len()` dimensions of a head, in Hugging Face's half-split order:
/// `(x[i], x[i + half])` is rotated by `position * inv_freq[i]`, with cos and sin multiplied by `scale`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Computed in f64 from the configuration and rounded once to f32.
    pub inv_freq: Vec<f32>,
    /// LongRoPE / YaRN attention factor; 1 elsewhere.
    pub scale: f32,
    /// Of each frequency, which of a row's positions on three axes it is multiplied by (M-RoPE: 0 is time, 1 height, 2 width); empty: for
    /// all the first. Rows have one position for all three, unless the batch says otherwise
    /// ([`Batch::positions`](crate::backend::Batch::positions)).
    pub axes: Vec<u8>,
}

/// What batches may give rows in place of the embeddings of their tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbeddingInput {
    /// Values of one embedding.
    pub width: usize,
    /// Rows may have positions on three axes ([`Rope::axes`]).
    pub three_axes: bool,
}

/// What differs between attention layers.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Cache group: index into [`KvLayout::groups`](crate::backend::KvLayout::groups).
    pub group: u32,
    /// Index of the KV layer inside its cache group.
    pub layer: u32,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Multiplies q.k, usually head_dim^-1/2.
    pub scale: f32,
    /// `cap * tanh(x / cap)` of every scaled q.k (Gemma 2).
    pub softcap: Option<f32>,
    /// A row at position `p` attends to positions `p - window + 1 ..= p` only.
    pub window: Option<u32>,
    /// And not to those before `p - p % window` (Llama 4).
    pub chunked: bool,
    /// What q is multiplied by, where it is not the same at all positions.
    pub temper: Option<Temper>,
    /// A logit per query head that takes part in the softmax and attends to nothing (gpt-oss).
    pub sinks: Option<VectorId>,
    /// Absent on NoPE layers.
    pub rope: Option<RopeId>,
    /// Its rows hold k and v, too, which it writes. Else they hold q alone, and it reads what another layer wrote in that place, of as
    /// many heads that are as wide.
    pub own_kv: bool,
    /// Per-head RMS norm of q and k (Qwen3), and of v (Gemma 4).
    pub q_norm: Option<VectorId>,
    pub k_norm: Option<VectorId>,
    pub v_norm: Option<VectorId>,
    /// That of q and k comes behind the rotation and not before it (Hunyuan).
    pub norm_last: bool,
    pub norm_eps: f32,
}

impl AttentionSpec {
    /// Heads of a row: those of q, and those of k and v where it has its own.
    pub const fn row_heads(&self) -> usize {
        if self.own_kv { self.heads + 2 * self.kv_heads } else { self.heads }
    }

    /// Values of a row.
    pub const fn row_width(&self) -> usize {
        self.row_heads() * self.head_dim
    }

    /// First position that a row at `position` attends to.
    pub fn first_position(&self, position: usize) -> usize {
        match self.window.map(|window| window as usize) {
            None => 0,
            Some(window) if self.chunked => position - position % window,
            Some(window) => (position + 1).saturating_sub(window),
        }
    }
}

/// `1 + scale * ln(1 + floor((position + 1) / every))` (Llama 4; Nakanishi, arXiv:2501.19399).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Temper {
    pub scale: f64,
    pub every: u32,
}

impl Temper {
    /// Computed in f64 and rounded once.
    pub fn at(self, position: usize) -> f32 {
        let steps = (position + 1) / self.every as usize;
        (1.0 + self.scale * (steps as f64).ln_1p()) as f32
    }
}

/// What differs between layers of latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): of a token, the cache keeps one vector
/// that all heads read, `[rank + rope_dim]`, as the key; its first `rank` values are the value, too.
///
/// The projections from that vector to the keys and values of each head are part of the query and of the output (the absorbed form), for
/// every row alike.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentSpec {
    /// Cache group: index into [`KvLayout::groups`](crate::backend::KvLayout::groups).
    pub group: u32,
    /// Index of the layer inside its cache group.
    pub layer: u32,
    pub heads: usize,
    /// Values of a latent.
    pub rank: usize,
    /// Values behind it that are rotated.
    pub rope_dim: usize,
    /// Values of a head's query before those that are rotated.
    pub nope_dim: usize,
    /// Multiplies products of queries and keys.
    pub scale: f32,
    /// Of `rope_dim` dimensions.
    pub rope: RopeId,
    /// Dimensions `2 * i` and `2 * i + 1` are rotated together, and not `i` and `i + rope_dim / 2`.
    pub neighbours: bool,
    /// Of the latent.
    pub norm: VectorId,
    pub norm_eps: f32,
}

impl LatentSpec {
    /// Values of a key, and of a head's absorbed query.
    pub const fn key_dim(&self) -> usize {
        self.rank + self.rope_dim
    }

    /// Values of a head's query as it is projected.
    pub const fn query_dim(&self) -> usize {
        self.nope_dim + self.rope_dim
    }
}

/// What becomes of a gate and the value it gates, or of a value alone, element by element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `gate / (1 + e^-gate) * up`
    Silu,
    /// `gelu(gate) * up`, GELU in its form with tanh.
    GeluTanh,
    /// `g / (1 + e^-(alpha * g)) * (u + 1)` of `g = min(gate, limit)` and `u` = up in `-limit..=limit` (gpt-oss).
    SwigluOai { alpha: f32, limit: f32 },
    /// `max(value, 0)^2`: there is no gate.
    ReluSquared,
}

impl Activation {
    /// Values that one is made of: a gate and what it gates, or one alone.
    pub const fn inputs(self) -> usize {
        match self {
            Activation::Silu | Activation::GeluTanh | Activation::SwigluOai { .. } => 2,
            Activation::ReluSquared => 1,
        }
    }
}

/// How strongly the chosen experts of a row speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// Softmax over the logits of the chosen; the same as softmax over all of them, divided by the sum of the chosen.
    AmongChosen,
    /// Softmax over all logits; what the others would get is lost.
    AmongAll,
    /// The sigmoid of each logit by itself.
    Sigmoid,
    /// The same, divided by the sum of those of the chosen.
    SigmoidAmongChosen,
    /// Softmax over all logits, divided by the sum of the chosen; experts are chosen by it, too, which a bias tells from
    /// [`Routing::AmongChosen`].
    SharesAmongChosen,
}

impl Routing {
    /// Whether experts are chosen by sigmoids and not by logits, which softmax leaves in their order.
    pub const fn is_sigmoid(self) -> bool {
        matches!(self, Routing::Sigmoid | Routing::SigmoidAmongChosen)
    }
}

/// Experts in groups of equally many neighbours, of which some are kept for a row before experts are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    pub count: usize,
    /// Those of the largest score, of equal ones the first.
    pub kept: usize,
    /// The score of a group is the sum of its two largest, and not its largest.
    pub by_two: bool,
}

impl ExpertGroups {
    /// Most groups.
    pub const MOST: usize = 64;
}

/// A mixture of experts: for each row, some of many feed-forward parts.
///
/// The matrices of all experts lie in one, expert after expert.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsSpec {
    pub count: usize,
    /// How many speak for a row: those with the largest scores, of equal ones the first. Scores are logits, or the sigmoids of those.
    pub chosen: usize,
    pub routing: Routing,
    /// Added to the scores by which experts are chosen, and to no weight: one per expert.
    pub choice_bias: Option<VectorId>,
    pub groups: Option<ExpertGroups>,
    /// Added to the sum by which sigmoids are divided.
    pub sum_eps: f32,
    /// Weights are multiplied by it.
    pub scale: f32,
    /// And by that of their expert: one per expert.
    pub scales: Option<VectorId>,
    /// Width of an expert's gated values.
    pub inner: usize,
    pub activation: Activation,
    /// `[2 * count * inner, width of x]`: the gates of every expert, then in the same order what they gate. Without gates `[count * inner,
    /// width of x]`.
    pub gate_up: MatrixId,
    pub gate_up_bias: Option<VectorId>,
    /// `[count * width of out, inner]`
    pub down: MatrixId,
    pub down_bias: Option<VectorId>,
}

/// Where a recurrent operation keeps what it knows of the positions before: from value `offset` of the state of one layer on
/// ([`GroupKind::State`](crate::backend::GroupKind::State)). Before position 0 that is zeros, whatever is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatePlace {
    /// Cache group: index into [`KvLayout::groups`](crate::backend::KvLayout::groups).
    pub group: u32,
    /// Index of the layer inside its cache group.
    pub layer: u32,
    pub offset: usize,
}

/// A causal convolution over positions, each channel by itself.
///
/// Its state is the last `taps - 1` inputs, `[taps - 1, channels]`: that of position `p` in row `p % (taps - 1)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConvolutionSpec {
    pub state: StatePlace,
    pub channels: usize,
    /// Positions that an output sees, its own included.
    pub taps: usize,
    /// What comes out goes through SiLU.
    pub silu: bool,
    /// `[taps, channels]`, that of the oldest position first.
    pub weight: VectorId,
    /// Added to each channel's sum.
    pub bias: Option<VectorId>,
}

impl ConvolutionSpec {
    /// Values of its state.
    pub const fn state_values(channels: usize, taps: usize) -> usize {
        (taps - 1) * channels
    }
}

/// Columns of a state matrix that lie together.
pub const STATE_COLUMNS: usize = 16;

/// A gated delta net: per value head a matrix S of `[key_dim, value_dim]` that decays, forgets what it says of a key and learns
/// the value of that key (Yang et al., arXiv:2412.06464).
///
/// Its state is S of every value head, in f32: `[value_dim / 16, key_dim, 16]`, the last columns filled up with zeros.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeltaSpec {
    pub state: StatePlace,
    pub key_heads: usize,
    /// A multiple of `key_heads`: value head `j` reads q and k of head `j * key_heads / value_heads`, or of `j % key_heads`.
    pub value_heads: usize,
    /// The latter.
    pub tiled: bool,
    pub key_dim: usize,
    pub value_dim: usize,
    /// Per value head, how S decays: what `softplus(a + step_bias)` is multiplied by, below zero.
    pub decay: VectorId,
    pub step_bias: VectorId,
}

impl DeltaSpec {
    /// Added to the sum of squares by which q and k are normalized.
    pub const EPS: f32 = 1e-6;

    /// Whose q and k a value head reads.
    pub const fn key_head(&self, value_head: usize) -> usize {
        match self.tiled {
            true => value_head % self.key_heads,
            false => value_head * self.key_heads / self.value_heads,
        }
    }

    /// Width of q, k and v side by side.
    pub const fn qkv_width(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// Values of the state of one head.
    pub const fn head_values(key_dim: usize, value_dim: usize) -> usize {
        value_dim.next_multiple_of(STATE_COLUMNS) * key_dim
    }

    /// Values of the state of all heads.
    pub const fn state_values(&self) -> usize {
        self.value_heads * Self::head_values(self.key_dim, self.value_dim)
    }
}

/// A state space of Mamba-2 (Dao and Gu, arXiv:2405.21060): per head a matrix S of `[state_dim, head_dim]` that decays and learns what a
/// position says.
///
/// Its state is S of every head, in f32: `[head_dim / 16, state_dim, 16]`, the last columns filled up with zeros.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateSpaceSpec {
    pub state: StatePlace,
    /// A multiple of `groups`: head `j` reads B and C of group `j * groups / heads`.
    pub heads: usize,
    pub head_dim: usize,
    pub groups: usize,
    pub state_dim: usize,
    /// Per head, what its step is multiplied by, below zero.
    pub decay: VectorId,
    pub step_bias: VectorId,
    /// Per head, how strongly a position speaks for itself.
    pub skip: VectorId,
}

impl StateSpaceSpec {
    /// Width of x, B and C side by side.
    pub const fn width(&self) -> usize {
        self.heads * self.head_dim + 2 * self.groups * self.state_dim
    }

    /// Values of the state of all heads.
    pub const fn state_values(&self) -> usize {
        self.heads * DeltaSpec::head_values(self.state_dim, self.head_dim)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// `out[r] = table[token[r]]`
    Embed { table: MatrixId, out: Buf },
    /// `out[r] = embeddings[r]` of rows that the batch gives an embedding ([`Batch::embeddings`](crate::backend::Batch::embeddings)); others
    /// stay what they are.
    Merge { out: Buf },
    /// `out = x * weight / sqrt(mean(x^2) + eps)`
    RmsNorm { x: Buf, weight: VectorId, eps: f32, out: Buf },
    /// `out = W.x + bias`, or `out += W.x + bias` when `add` (the residual stream).
    Linear { x: Buf, weight: MatrixId, bias: Option<VectorId>, out: Buf, add: bool },
    /// `qkv` holds `[q heads | k heads | v heads]`, or q heads alone ([`AttentionSpec::own_kv`]): normalize all and rotate q and k in place,
    /// then write k and v of every row to the paged cache. `spec` indexes [`Program::attention`].
    WriteKv { qkv: Buf, spec: usize },
    /// Causal attention of the q part of `qkv` over the paged cache, read back from the cache for every position in the window.
    /// `out` is `[rows, heads * head_dim]`.
    Attention { qkv: Buf, spec: usize, out: Buf },
    /// `x *= by`
    Scale { x: Buf, by: f32 },
    /// `out = x`
    Copy { x: Buf, out: Buf },
    /// The values of `out` from `first` on become those of `x`; its others stay what they are.
    Place { x: Buf, out: Buf, first: usize },
    /// `out[r] = features[r]`: what the batch gives each row beside its token ([`Batch::features`](crate::backend::Batch::features)).
    Input { out: Buf },
    /// `out += x * weight / sqrt(mean(x^2) + eps)` (the residual stream of a block with a norm behind it). Then `out *= times`, which is one
    /// value.
    AddRmsNorm { x: Buf, weight: VectorId, eps: f32, out: Buf, times: Option<VectorId> },
    /// `[gate | up] = W.x + bias`, `out = activation(gate, up)`; `W` has twice as many rows as `out` is wide, or as many, where the
    /// activation has no gate ([`Activation::inputs`]).
    GatedLinear { x: Buf, weight: MatrixId, bias: Option<VectorId>, activation: Activation, out: Buf },
    /// `out = sum of weight * (D.activation(gate, up) + bias)` over the chosen experts of each row, largest score first, with
    /// `[gate | up] = G.x + bias`; or `out += ` that sum when `add`. `logits` are the router's, one per expert, and used up. `spec`
    /// indexes [`Program::experts`].
    Experts { x: Buf, logits: Buf, spec: usize, out: Buf, add: bool },
    /// `x = silu(sum over taps of weight * x at the positions before and its own)`, or that sum. `spec` indexes [`Program::convolutions`].
    Convolve { x: Buf, spec: usize },
    /// One position of a gated delta net ([`DeltaSpec`]): `qkv` holds `[q heads | k heads | v heads]`, `gates` `[b | a]`, one each per
    /// value head; both are used up. With q and k of length one, q divided by the root of `key_dim`:
    ///
    /// `S = e^(decay * softplus(a + step_bias)) * S; S += k (sigmoid(b) * (v - S^T k))^T; out = S^T q`
    ///
    /// `out` is `[rows, value_heads * value_dim]`. `spec` indexes [`Program::delta`].
    DeltaRule { qkv: Buf, gates: Buf, spec: usize, out: Buf },
    /// `x = x * weight / sqrt(mean(x^2) + eps) * silu(gate)`, of each head of as many values as `weight` has.
    GatedRmsNorm { x: Buf, gate: Buf, weight: VectorId, eps: f32 },
    /// `x *= sigmoid(gate)`: each value of the gate is that of equally many neighbours in `x`.
    SigmoidGate { x: Buf, gate: Buf },
    /// One position of a state space ([`StateSpaceSpec`]): `xbc` holds `[x of heads | B of groups | C of groups]`, `steps` one value per
    /// head. With `t = softplus(step + step_bias)`:
    ///
    /// `S = e^(decay * t) * S + B (t * x)^T; out = S^T C + skip * x`
    ///
    /// `out` is `[rows, heads * head_dim]`. `spec` indexes [`Program::state_spaces`].
    StateSpace { xbc: Buf, steps: Buf, spec: usize, out: Buf },
    /// `x *= silu(gate)`, value by value.
    SiluGate { x: Buf, gate: Buf },
    /// `out = x * sigmoid(l)` of the largest of the logits, of rows that one expert speaks for (Llama 4).
    TopGate { x: Buf, logits: Buf, out: Buf },
    /// `x *= by`, value by value.
    Multiply { x: Buf, by: Buf },
    /// `out += x`
    Add { x: Buf, out: Buf },
    /// `x = activation(x, by)`, of as many values of `by` from `first` on as `x` has.
    Gate { x: Buf, by: Buf, first: usize, activation: Activation },
    /// `out = x - mean(x)`; `out` may be `x`.
    Center { x: Buf, out: Buf },
    /// Of the values of `x` from `first` on, as many as the weight has, in `parts` equal parts of each: `v = v * weight / sqrt(mean(v^2) +
    /// eps)`.
    NormPart { x: Buf, first: usize, weight: VectorId, eps: f32, parts: usize },
    /// xIELU (arXiv:2411.13010): `x = ap * x^2 + beta * x` of values above 0, `an * (e^min(x, eps) - 1 - x) + beta * x` of others, with
    /// `ap = softplus(alpha_p)` and `an = beta + softplus(alpha_n)`. `weight` holds `[alpha_p, alpha_n, beta, eps]`.
    XIelu { x: Buf, weight: VectorId },
    /// A product for each of `heads` heads: the first values of its part of `out` become `W . x`, of the first values of its part of `x`
    /// and its rows of the matrix, `[heads * rows, columns]`. Other values of `out` stay what they are.
    HeadLinear { x: Buf, weight: MatrixId, heads: usize, out: Buf },
    /// `latent` holds `[rank + rope_dim]`, `q` of each head `[nope_dim + rope_dim]`: normalize the former's first part, rotate the last
    /// part of it and of every head, write the latent of every row to the paged cache, and what was rotated of each head to the last part
    /// of its absorbed query, of which `queries` hold `[rank + rope_dim]` each. `latent` and `q` are used up. `spec` indexes
    /// [`Program::latent`].
    WriteLatent { q: Buf, latent: Buf, spec: usize, queries: Buf },
    /// Causal attention of absorbed queries over the paged cache, read back from the cache for every position.
    /// `out` is `[rows, heads * rank]`.
    LatentAttention { queries: Buf, spec: usize, out: Buf },
}

impl Program {
    /// Values that a batch gives each row beside its token: the width of what [`Op::Input`] fills. 0: it takes none.
    pub fn input_width(&self) -> usize {
        let input = self.body.iter().find_map(|op| match op {
            Op::Input { out } => self.buffers.get(out.0 as usize).copied(),
            _ => None,
        });
        input.unwrap_or(0)
    }

    /// What batches may give rows in place of embeddings: where it has an [`Op::Merge`].
    pub fn embedding_input(&self) -> Option<EmbeddingInput> {
        let width = self.body.iter().find_map(|op| match op {
            Op::Merge { out } => self.buffers.get(out.0 as usize).copied(),
            _ => None,
        })?;
        Some(EmbeddingInput { width, three_axes: self.ropes.iter().any(|rope| !rope.axes.is_empty()) })
    }

    /// What its operations keep of positions, and how many values each.
    pub fn states(&self) -> impl Iterator<Item = (StatePlace, usize)> {
        let convolutions = self.convolutions.iter();
        let convolutions =
            convolutions.map(|spec| (spec.state, ConvolutionSpec::state_values(spec.channels, spec.taps)));
        let spaces = self.state_spaces.iter().map(|spec| (spec.state, spec.state_values()));
        convolutions.chain(self.delta.iter().map(|spec| (spec.state, spec.state_values()))).chain(spaces)
    }

    /// Rows of the smallest embedding table: what tokens must be below.
    pub fn vocabulary(&self, rows: impl Fn(MatrixId) -> usize) -> usize {
        let tables = self.body.iter().filter_map(|op| match op {
            Op::Embed { table, .. } => Some(rows(*table)),
            _ => None,
        });
        tables.min().unwrap_or(usize::MAX)
    }
}

impl Op {
    /// Buffers whose values it needs; among them the one it writes, unless it replaces all of that.
    pub fn reads(&self) -> [Option<Buf>; 3] {
        match *self {
            Op::Embed { .. } | Op::Input { .. } => [None; 3],
            Op::Merge { out } => [Some(out), None, None],
            Op::RmsNorm { x, .. } | Op::GatedLinear { x, .. } | Op::Scale { x, .. } | Op::Copy { x, .. } => {
                [Some(x), None, None]
            }
            Op::Linear { x, out, add, .. } => [Some(x), add.then_some(out), None],
            Op::WriteKv { qkv, .. } | Op::Attention { qkv, .. } => [Some(qkv), None, None],
            Op::AddRmsNorm { x, out, .. } | Op::Add { x, out } | Op::Place { x, out, .. } => {
                [Some(x), Some(out), None]
            }
            Op::Experts { x, logits, out, add, .. } => [Some(x), Some(logits), add.then_some(out)],
            Op::Convolve { x, .. } => [Some(x), None, None],
            Op::DeltaRule { qkv, gates, .. } => [Some(qkv), Some(gates), None],
            Op::StateSpace { xbc, steps, .. } => [Some(xbc), Some(steps), None],
            Op::SiluGate { x, gate } => [Some(x), Some(gate), None],
            Op::GatedRmsNorm { x, gate, .. } | Op::SigmoidGate { x, gate } => [Some(x), Some(gate), None],
            Op::Multiply { x, by } | Op::Gate { x, by, .. } => [Some(x), Some(by), None],
            Op::TopGate { x, logits, .. } => [Some(x), Some(logits), None],
            Op::Center { x, .. } | Op::NormPart { x, .. } | Op::XIelu { x, .. } => [Some(x), None, None],
            Op::HeadLinear { x, .. } => [Some(x), None, None],
            Op::WriteLatent { q, latent, queries, .. } => [Some(q), Some(latent), Some(queries)],
            Op::LatentAttention { queries, .. } => [Some(queries), None, None],
        }
    }

    /// The buffer it writes.
    pub fn writes(&self) -> Buf {
        match *self {
            Op::Embed { out, .. }
            | Op::Input { out }
            | Op::Merge { out }
            | Op::Copy { out, .. }
            | Op::Place { out, .. }
            | Op::RmsNorm { out, .. }
            | Op::Linear { out, .. }
            | Op::GatedLinear { out, .. }
            | Op::AddRmsNorm { out, .. }
            | Op::Add { out, .. }
            | Op::Experts { out, .. }
            | Op::Center { out, .. }
            | Op::TopGate { out, .. }
            | Op::StateSpace { out, .. }
            | Op::DeltaRule { out, .. }
            | Op::HeadLinear { out, .. }
            | Op::LatentAttention { out, .. }
            | Op::Attention { out, .. } => out,
            Op::WriteKv { qkv, .. } => qkv,
            Op::WriteLatent { queries, .. } => queries,
            Op::Scale { x, .. }
            | Op::Convolve { x, .. }
            | Op::GatedRmsNorm { x, .. }
            | Op::SigmoidGate { x, .. }
            | Op::Multiply { x, .. }
            | Op::Gate { x, .. }
            | Op::SiluGate { x, .. }
            | Op::NormPart { x, .. }
            | Op::XIelu { x, .. } => x,
        }
    }
}
