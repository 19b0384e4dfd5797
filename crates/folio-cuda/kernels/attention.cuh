// Causal attention over the paged cache, on tensor cores (f16, bf16, int8, fp8, int4) or without (f32).
//
// The arithmetic of a row (a query head of a token) is fixed by its absolute position, whoever computes it beside whom:
//
//   leaf   64 positions from a multiple of 64: scores by mma over ascending dims, their largest m, p = e^(s - m), l = sum of p, and
//          p.V by mma over ascending positions, from zero
//   chunk  its four leaves, folded in ascending order
//   row    its chunks, folded in ascending order; then its sink; then divided by l
//
// `fold` of (m, l, o) and a part (m', l', o') is (M = max, l * e^(m - M) + l' * e^(m' - M), likewise o). Parts that a row does not
// attend to at all are left out; in others, positions that it does not attend to have p = 0, exactly. So it does not matter to bits
// whether a block folds as it goes, or one warp each makes the four leaves of a chunk, or one block each the chunks of a row.
//
// A block works on a tile (up to 16 tokens of a sequence) of one kv head: rows (token, head of the group), in runs of 16. With more
// than 16 rows it is *wide*: each of four warps has 16 rows, and all go through the leaves together. Else it is *narrow*: each
// warp has leaves of its own. Positions outside of what the tile attends to are never read.
//
// K's scale meets the score, V's scale p before it is rounded. What is no number reaches the rows that attend to it, and no others.

struct Attention {
    const u32* meta;
    u32 table_start;   // of the cache group, in the words of a slot
    const u8* layer;
    u32 block_bytes, block_tokens, heads, kv_heads, dim;
    const void* q;
    float scale, softcap;   // softcap 0: none
    u32 window;             // 0: none
    const float* sinks;
    u32 split, slots, tile_rows;
    float* partials;
    float* full;
    u32 full_stride;
    u16* half;
    u32 half_stride;
};

__device__ __forceinline__ u32 up(u32 x, u32 to) { return (x + to - 1) / to * to; }

struct Tile {
    const u32* table;
    u32 first_row, position, tokens, size, rows;   // size: heads of a group
    u32 low, high;                                 // positions that some row attends to
    u32 first_chunk, last_chunk;
    bool split;
};

__device__ __forceinline__ u32 first_attended(const Attention& a, u32 position) {
    return a.window == 0 || position + 1 < a.window ? 0 : position + 1 - a.window;
}

// The block table of a span's sequence.
__device__ __forceinline__ const u32* table_of(const Attention& a, const u32* span) {
    return (const u32*)((u64)span[4] << 32 | span[3]) + a.table_start;
}

__device__ __forceinline__ Tile tile_of(const Attention& a, u32 index) {
    Tile tile;
    const u32* words = a.meta + a.meta[15] + 4 * index;
    const u32* span = a.meta + a.meta[11] + 8 * words[0];
    tile.table = table_of(a, span);
    tile.first_row = span[0] + words[1];
    tile.position = span[2] + words[1];
    tile.tokens = words[2];
    tile.size = a.heads / a.kv_heads;
    tile.rows = tile.tokens * tile.size;
    tile.low = first_attended(a, tile.position);
    tile.high = tile.position + tile.tokens - 1;
    tile.first_chunk = tile.low / 256;
    tile.last_chunk = tile.high / 256;
    u32 chunks = tile.last_chunk - tile.first_chunk + 1;
    tile.split = tile.rows <= 16 && chunks > 1 && chunks <= a.split;
    return tile;
}

// Whether positions `start .. start + count` hold one that a row at `position` attends to.
__device__ __forceinline__ bool attends(const Attention& a, u32 position, u32 start, u32 count) {
    return start <= position && start + count > first_attended(a, position);
}

// How much of what was and of what is added remains; `m` becomes the larger.
__device__ __forceinline__ void weigh(float& m, float part, float& kept, float& added) {
    float top = fmaxf(m, part);
    kept = exp_of(m - top);
    added = exp_of(part - top);
    m = top;
}

// A part's -0 is 0, so that folding it into nothing changes nothing.
__device__ __forceinline__ float fold(float value, float kept, float part, float added) {
    return fmaf(value, kept, (part + 0.0f) * added);
}

// The end of a row: `o` is its folded sum in shared memory, worked on by one warp.
__device__ __forceinline__ void finish(const Attention& a, bool rotated, float* o, float m, float l, u32 row, u32 head, u32 lane) {
    float factor = 1.0f;
    if (a.sinks) {
        float sink = a.sinks[head], added;
        weigh(m, sink, factor, added);
        l = fmaf(l, factor, added);
    }
    factor = factor / l;
    for (u32 d = lane; d < a.dim; d += 32) o[d] *= factor;
    warp_sync();
    if (rotated) hadamard(o, a.dim, lane);
    for (u32 d = lane; d < a.dim; d += 32) {
        if (a.full) a.full[(u64)row * a.full_stride + head * a.dim + d] = o[d];
        if (a.half) a.half[(u64)row * a.half_stride + head * a.dim + d] = f32_to_bf16(o[d]);
    }
    if (a.half && head + 1 == a.heads) {
        for (u32 d = a.heads * a.dim + lane; d < a.half_stride; d += 32) a.half[(u64)row * a.half_stride + d] = 0;
    }
}

#define PARAMETERS                                                                                                              \
    const u32 *meta, u32 table_start, const u8 *layer, u32 block_bytes, u32 block_tokens, u32 heads, u32 kv_heads, u32 dim,     \
        const void *q, float scale, float softcap, u32 window, const float *sinks, u32 split, u32 slots, u32 tile_rows,         \
        float *partials, float *full, u32 full_stride, u16 *half, u32 half_stride
#define ARGUMENTS                                                                                                               \
    {meta,  table_start, layer, block_bytes, block_tokens, heads,    kv_heads, dim,         q,    scale,      softcap,          \
     window, sinks,       split, slots,       tile_rows,    partials, full,     full_stride, half, half_stride}
