//! A small random decoder, loaded into any backend, and sequences run through it in any pieces.
#![allow(dead_code)]

use folio_cpu::{CpuBackend, CpuOptions, Isa, Quantize};
use folio_model::backend::{
    Backend, Batch, DType, GroupKind, HOLE, KvFormat, KvGroup, KvLayout, Span, TensorView,
};
use folio_model::program::{
    Activation, AttentionSpec, Buf, ExpertsSpec, Head, Op, Program, Rope, RopeId, Routing, Temper,
};
use folio_model::quant::{BlockFormat, Encoding};
use folio_model::testing::blocks;
use half::{bf16, f16};

/// What a random decoder looks like.
#[derive(Clone, Debug)]
pub struct Spec {
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub ffn: usize,
    pub vocab: usize,
    pub weights: DType,
    /// Matrices are stored as blocks instead.
    pub quantize: Option<Quantize>,
    /// Or as blocks of one of Folio's own formats.
    pub blocks: Option<BlockFormat>,
    /// Columns are stored in an order of their own.
    pub ordered: bool,
    pub kv: KvFormat,
    pub block_tokens: usize,
    /// Blocks of window groups have so many times the tokens.
    pub window_blocks: usize,
    pub bias: bool,
    pub qk_norm: bool,
    /// Window of each layer, over and over; each size has a cache group.
    pub windows: &'static [Option<u32>],
    pub softcap: Option<f32>,
    pub sinks: bool,
    /// How many there are, how many speak for a row, and how strongly.
    pub experts: Option<(usize, usize, Routing)>,
    /// Layer norms, norms of all of q and of all of k, those of heads behind the rotation, xIELU and a product of values.
    pub others: bool,
    /// Layers without a window have half as many heads of K and V, all heads twice as wide; the last layer reads the K and V of the last
    /// before it with a window as it has; v is normalized, and layers are given values of each token and multiply what they end with.
    pub mixed: bool,
    /// Rotary pairs; 0 is none.
    pub rotary: usize,
    pub max_rows: usize,
    pub max_position: usize,
    /// This token's embedding is NaN.
    pub nan_token: Option<usize>,
}

impl Spec {
    fn window(&self, layer: usize) -> Option<u32> {
        self.windows[layer % self.windows.len()]
    }

    /// Heads of K and V of a layer with this window, and values of all its heads.
    fn sizes(&self, window: Option<u32>) -> (usize, usize) {
        match self.mixed && window.is_none() {
            true => (self.kv_heads / 2, 2 * self.head_dim),
            false => (self.kv_heads, self.head_dim),
        }
    }

    /// The layer whose K and V a layer reads.
    fn source(&self, layer: usize) -> usize {
        let shares = self.mixed && layer + 1 == self.layers;
        let before = (0..layer).rev().find(|before| self.window(*before) == self.window(layer));
        before.filter(|_| shares).unwrap_or(layer)
    }

    /// Layers that keep K and V with this window, of the first `layers`.
    fn keeping(&self, window: Option<u32>, layers: usize) -> usize {
        (0..layers).filter(|layer| self.window(*layer) == window && self.source(*layer) == *layer).count()
    }

    /// Tokens of a block of a group.
    fn tokens_of(&self, window: Option<u32>) -> usize {
        self.block_tokens * if window.is_some() { self.window_blocks } else { 1 }
    }

    /// Windows of the cache groups; the first has none.
    pub fn groups(&self) -> Vec<Option<u32>> {
        let mut groups = vec![None];
        for window in (0..self.layers).map(|layer| self.window(layer)) {
            if !groups.contains(&window) {
                groups.push(window);
            }
        }
        groups
    }
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            layers: 2,
            hidden: 48,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            ffn: 72,
            vocab: 101,
            weights: DType::BF16,
            quantize: None,
            blocks: None,
            ordered: false,
            kv: KvFormat::BF16,
            block_tokens: 16,
            window_blocks: 1,
            bias: true,
            qk_norm: true,
            windows: &[None],
            softcap: None,
            sinks: false,
            experts: None,
            others: false,
            mixed: false,
            rotary: 8,
            max_rows: 700,
            max_position: 1024,
            nan_token: None,
        }
    }
}

/// Values that a layer is given of a token.
const GIVEN: usize = 7;

/// xorshift: the same numbers everywhere.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() >> 11) as usize % n
    }
    /// Uniform in -1..1.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

pub fn encode(dtype: DType, values: impl Iterator<Item = f32>) -> Vec<u8> {
    values
        .flat_map(|x| match dtype {
            DType::F32 => x.to_le_bytes().to_vec(),
            DType::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
            DType::BF16 => bf16::from_f32(x).to_le_bytes().to_vec(),
        })
        .collect()
}

struct Loader<'a, B: Backend> {
    backend: &'a mut B,
    random: Random,
    spec: &'a Spec,
}

impl<B: Backend> Loader<'_, B> {
    fn matrix(&mut self, rows: usize, cols: usize, nan_row: Option<usize>) -> folio_model::program::MatrixId {
        let scale = (3.0 / cols as f32).sqrt();
        let values = (0..rows * cols).map(|i| {
            let x = self.random.unit() * scale;
            if nan_row == Some(i / cols) { f32::NAN } else { x }
        });
        let mut values: Vec<f32> = values.collect();
        let order = self.spec.ordered.then(|| blocks::order(cols));
        if let Some(order) = &order {
            values = blocks::stored_in(order, &values);
        }
        let (encoding, bytes) = match (self.spec.quantize, self.spec.blocks) {
            (Some(to), _) => (Encoding::Block(to.format()), to.row(&values)),
            (None, Some(format)) => (Encoding::Block(format), blocks::encode(format, &values)),
            (None, None) => {
                (Encoding::Plain(self.spec.weights), encode(self.spec.weights, values.into_iter()))
            }
        };
        let view = TensorView { encoding, shape: &[rows, cols], bytes: &bytes, order: order.as_deref() };
        self.backend.load_matrix("random", &[view]).expect("a matrix")
    }
    fn vector(&mut self, len: usize, around: f32, spread: f32) -> folio_model::program::VectorId {
        let bytes = encode(DType::F32, (0..len).map(|_| around + spread * self.random.unit()));
        let view =
            TensorView { encoding: Encoding::Plain(DType::F32), shape: &[len], bytes: &bytes, order: None };
        self.backend.load_vector("random", &[view]).expect("a vector")
    }
}

/// Loads the decoder and a cache of `blocks` blocks.
pub fn load<B: Backend>(backend: &mut B, spec: &Spec, blocks: usize) {
    let logits_width = spec.experts.map_or(0, |(count, ..)| count);
    let mut buffers = vec![spec.hidden, spec.hidden, spec.ffn, logits_width, spec.ffn];
    let [x, normed, inner, logits, second] = [0, 1, 2, 3, 4].map(Buf);
    let mut buffer = |width: usize| {
        buffers.push(width);
        Buf(buffers.len() as u32 - 1)
    };
    let mut load = Loader { backend, random: Random(0x5eed), spec };
    let embedding = load.matrix(spec.vocab, spec.hidden, spec.nan_token);
    let mut body = vec![Op::Embed { table: embedding, out: x }];
    let given = spec.mixed.then(|| [buffer(GIVEN * spec.layers), buffer(GIVEN * spec.layers), buffer(GIVEN)]);
    if let Some([out, projected, _]) = given {
        let all = GIVEN * spec.layers;
        let (table, weight) = (load.matrix(spec.vocab, all, None), load.matrix(all, spec.hidden, None));
        let norm = load.vector(all, 1.0, 0.2);
        body.extend([
            Op::Embed { table, out },
            Op::Linear { x, weight, bias: None, out: projected, add: false },
            Op::NormPart { x: projected, first: 0, weight: norm, eps: 1e-5, parts: spec.layers },
            Op::Add { x: projected, out },
        ]);
    }
    let (mut attention, mut experts) = (Vec::new(), Vec::new());
    for layer in 0..spec.layers {
        let (window, source) = (spec.window(layer), spec.source(layer));
        let (kv_heads, head_dim) = spec.sizes(window);
        let wide = spec.heads * head_dim;
        let qkv = wide + if source == layer { 2 * kv_heads * head_dim } else { 0 };
        let (qkv_buf, attended) = (buffer(qkv), buffer(wide));
        let norm = load.vector(spec.hidden, 1.0, 0.2);
        let norms = spec.qk_norm.then(|| [0; 2].map(|_| load.vector(head_dim, 1.0, 0.2)));
        let sinks = spec.sinks.then(|| load.vector(spec.heads, 0.5, 1.0));
        attention.push(AttentionSpec {
            group: spec.groups().iter().position(|known| *known == window).expect("a group") as u32,
            layer: spec.keeping(window, source) as u32,
            heads: spec.heads,
            kv_heads,
            head_dim,
            scale: 1.7 * (head_dim as f32).powf(-0.5),
            softcap: spec.softcap,
            window,
            chunked: spec.others && window.is_some(),
            temper: spec.others.then_some(Temper { scale: 0.1, every: 7 }),
            sinks,
            rope: (spec.rotary > 0).then_some(RopeId(0)),
            own_kv: source == layer,
            q_norm: norms.map(|n| n[0]),
            k_norm: norms.map(|n| n[1]),
            v_norm: spec.mixed.then(|| load.vector(head_dim, 1.0, 0.2)),
            norm_last: spec.others,
            norm_eps: 1e-6,
        });
        let bias = |load: &mut Loader<'_, B>, n| spec.bias.then(|| load.vector(n, 0.0, 0.3));
        let weight = load.matrix(qkv, spec.hidden, None);
        let qkv_bias = bias(&mut load, qkv);
        let read = |body: &mut Vec<Op>, weight| {
            body.extend(spec.others.then_some(Op::Center { x, out: normed }));
            let x = if spec.others { normed } else { x };
            body.push(Op::RmsNorm { x, weight, eps: 1e-5, out: normed });
        };
        read(&mut body, norm);
        body.push(Op::Linear { x: normed, weight, bias: qkv_bias, out: qkv_buf, add: false });
        if spec.others {
            for (first, width) in [(0, wide), (wide, kv_heads * head_dim)] {
                let weight = load.vector(width, 1.0, 0.2);
                body.push(Op::NormPart { x: qkv_buf, first, weight, eps: 1e-5, parts: 2 });
            }
        }
        body.push(Op::WriteKv { qkv: qkv_buf, spec: layer });
        body.push(Op::Attention { qkv: qkv_buf, spec: layer, out: attended });
        let weight = load.matrix(spec.hidden, wide, None);
        let o_bias = bias(&mut load, spec.hidden);
        body.push(Op::Linear { x: attended, weight, bias: o_bias, out: x, add: true });
        let norm = load.vector(spec.hidden, 1.0, 0.2);
        read(&mut body, norm);
        if let Some((count, chosen, routing)) = spec.experts {
            let weight = load.matrix(count, spec.hidden, None);
            let router_bias = bias(&mut load, count);
            body.push(Op::Linear { x: normed, weight, bias: router_bias, out: logits, add: false });
            body.push(Op::Experts { x: normed, logits, spec: experts.len(), out: x, add: true });
            experts.push(ExpertsSpec {
                count,
                chosen,
                routing,
                choice_bias: None,
                groups: None,
                sum_eps: 0.0,
                scale: 1.0,
                scales: (count > 4).then(|| load.vector(count, 1.0, 0.4)),
                inner: spec.ffn,
                activation: Activation::SwigluOai { alpha: 1.702, limit: 1.0 },
                gate_up: load.matrix(2 * count * spec.ffn, spec.hidden, None),
                gate_up_bias: bias(&mut load, 2 * count * spec.ffn),
                down: load.matrix(count * spec.hidden, spec.ffn, None),
                down_bias: bias(&mut load, count * spec.hidden),
            });
            continue;
        }
        if spec.others {
            for out in [inner, second] {
                let weight = load.matrix(spec.ffn, spec.hidden, None);
                body.push(Op::Linear { x: normed, weight, bias: None, out, add: false });
            }
            let weight = load.vector(4, 0.1, 0.4);
            body.extend([
                Op::XIelu { x: inner, weight },
                Op::Multiply { x: inner, by: second },
                Op::TopGate { x: inner, logits: second, out: inner },
            ]);
            let weight = load.matrix(spec.hidden, spec.ffn, None);
            body.push(Op::Linear { x: inner, weight, bias: None, out: x, add: true });
            continue;
        }
        let weight = load.matrix(2 * spec.ffn, spec.hidden, None);
        let gate_bias = bias(&mut load, 2 * spec.ffn);
        let activation = Activation::Silu;
        body.push(Op::GatedLinear { x: normed, weight, bias: gate_bias, activation, out: inner });
        let weight = load.matrix(spec.hidden, spec.ffn, None);
        body.push(Op::Linear { x: inner, weight, bias: None, out: x, add: true });
        if let Some([by, _, gate]) = given {
            let [weight, projection] =
                [load.matrix(GIVEN, spec.hidden, None), load.matrix(spec.hidden, GIVEN, None)];
            let (norm, times) = (load.vector(spec.hidden, 1.0, 0.2), Some(load.vector(1, 1.0, 0.3)));
            body.extend([
                Op::Linear { x, weight, bias: None, out: gate, add: false },
                Op::Gate { x: gate, by, first: GIVEN * layer, activation: Activation::GeluTanh },
                Op::Linear { x: gate, weight: projection, bias: None, out: normed, add: false },
                Op::AddRmsNorm { x: normed, weight: norm, eps: 1e-5, out: x, times },
            ]);
        }
    }
    let norm = load.vector(spec.hidden, 1.0, 0.2);
    let head = Head { x, norm, eps: 1e-5, matrix: embedding, vocab: spec.vocab, softcap: None };
    let inv_freq = (0..spec.rotary).map(|i| 1e4f32.powf(-(i as f32) / spec.rotary as f32)).collect();
    let ropes =
        if spec.rotary > 0 { vec![Rope { inv_freq, scale: 1.0, axes: Vec::new() }] } else { Vec::new() };
    let program = Program { buffers, ropes, attention, experts, body, head, ..Program::default() };
    backend.load_program(program, spec.max_rows, spec.max_rows, spec.max_position).expect("a program");
    let group = |window: &Option<u32>| KvGroup {
        kind: window.map_or(GroupKind::Full, |tokens| GroupKind::Window { tokens }),
        block_tokens: spec.tokens_of(*window),
        kv_heads: spec.sizes(*window).0,
        head_dim: spec.sizes(*window).1,
        formats: vec![spec.kv; spec.keeping(*window, spec.layers)],
    };
    let groups: Vec<KvGroup> = spec.groups().iter().map(group).collect();
    let blocks = vec![blocks; groups.len()];
    backend.allocate_cache(&KvLayout { groups }, &blocks).expect("a cache");
}

pub fn cpu(spec: &Spec, blocks: usize, threads: usize, isa: Isa) -> CpuBackend {
    let mut backend =
        CpuBackend::new(CpuOptions { threads: Some(threads), isa: Some(isa) }).expect("a backend");
    load(&mut backend, spec, blocks);
    backend
}

/// Tokens of one sequence and the blocks it owns.
#[derive(Clone, Debug)]
pub struct Sequence {
    pub tokens: Vec<u32>,
    pub blocks: Vec<u32>,
    pub computed: usize,
    /// As [`Spec::groups`].
    pub groups: Vec<Option<u32>>,
    /// Of each of them.
    pub block_tokens: Vec<usize>,
}

impl Sequence {
    pub fn new(spec: &Spec, seed: u64, len: usize, first_block: u32) -> Self {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let tokens = (0..len).map(|_| random.below(spec.vocab - 1) as u32).collect();
        let count = len.div_ceil(spec.block_tokens) as u32;
        // Scattered and backwards: nothing may depend on neighbouring blocks.
        let blocks = (0..count).rev().map(|i| first_block + i).collect();
        let groups = spec.groups();
        let block_tokens = groups.iter().map(|window| spec.tokens_of(*window)).collect();
        Self { tokens, blocks, computed: 0, groups, block_tokens }
    }

    /// The table of a cache group before the next token is computed: what lies behind the window was released back.
    fn table(&self, group: usize) -> Vec<u32> {
        let mut table = self.blocks.clone();
        if let Some(window) = self.groups[group] {
            // Other blocks than those of the first group.
            table.rotate_left(group);
            table.truncate(self.tokens.len().div_ceil(self.block_tokens[group]));
            let behind = (self.computed + 1).saturating_sub(window as usize) / self.block_tokens[group];
            table[..behind].fill(HOLE);
        }
        table
    }
}

/// Computes `rows` further tokens of each sequence in one step, with logits for every row. Returns them per sequence.
pub fn step<B: Backend>(
    backend: &mut B,
    parts: &mut [(&mut Sequence, usize)],
    vocab: usize,
) -> Vec<Vec<f32>> {
    let mut batch = Batch::default();
    for (slot, (sequence, rows)) in (0..).zip(parts.iter_mut()) {
        let first = sequence.computed;
        batch.spans.push(Span {
            first_row: batch.tokens.len() as u32,
            rows: *rows as u32,
            first_position: first as u32,
            slot,
            tentative_from: u32::MAX,
        });
        batch.tokens.extend(&sequence.tokens[first..first + *rows]);
        for group in 0..sequence.groups.len() {
            batch.edit_table(slot, group as u32, 0, sequence.table(group));
        }
        sequence.computed += *rows;
    }
    batch.logit_rows.extend(0..batch.tokens.len() as u32);
    let logits = backend.forward(&batch).expect("a step");
    assert_eq!(logits.len(), batch.tokens.len() * vocab);
    let row = |span: &Span| span.first_row as usize * vocab..(span.first_row + span.rows) as usize * vocab;
    batch.spans.iter().map(|span| logits[row(span)].to_vec()).collect()
}

/// Logits of every position of a sequence, computed `chunk` tokens at a time.
pub fn run_chunks<B: Backend>(backend: &mut B, sequence: &Sequence, chunk: usize, vocab: usize) -> Vec<f32> {
    let mut sequence = Sequence { computed: 0, ..sequence.clone() };
    let mut logits = Vec::new();
    while sequence.computed < sequence.tokens.len() {
        let rows = chunk.min(sequence.tokens.len() - sequence.computed);
        logits.extend(step(backend, &mut [(&mut sequence, rows)], vocab).remove(0));
    }
    logits
}

/// Fails with the first row and column whose bits differ.
pub fn assert_same_bits(what: &str, a: &[f32], b: &[f32], width: usize) {
    assert_eq!(a.len(), b.len(), "{what}");
    if let Some(i) = (0..a.len()).find(|&i| a[i].to_bits() != b[i].to_bits()) {
        panic!("{what}: row {} column {}: {} is not {}", i / width, i % width, a[i], b[i]);
    }
}

pub fn isas() -> Vec<Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect()
}
