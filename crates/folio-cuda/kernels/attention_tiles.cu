// Attention on tensor cores: tiles of queries over leaves of the cache in f16, bf16, int8, fp8 or int4. See attention.cuh.

// ---- shared memory; `attention.rs` has the same sums

__device__ __forceinline__ u32 odd(u32 x, u32 unit) { return up(x, unit) / unit % 2 ? up(x, unit) : up(x, unit) + unit; }

// Bytes of `dims` codes.
template <int FORMAT> __device__ __forceinline__ u32 code_bytes(u32 dims) {
    return FORMAT == F16 || FORMAT == BF16 ? 2 * dims : FORMAT == INT4 ? dims / 2 : dims;
}

// One leaf of K and V as the cache stores them, padded with zeros to whole 16 dims. Bytes of a position in units of 16: where positions
// fill the banks evenly, unit u of position p lies at u ^ (p & mask), so that lanes that read several positions find different banks.
struct Leaf {
    u64* at;         // of each position: its key, or 0 where nothing is read
    float* scales;   // [parity][K, V][position]; of floats: [parity], of positions `scrub` found to be no numbers NaN, else 0
    u8 *k, *v;
    u32 stride, mask;
    __device__ __forceinline__ u32 offset(u32 position, u32 byte) const { return position * stride + (byte ^ (position & mask) * 16); }
};

struct Layout {
    u32 dims, o_stride;
    u32* pairs;      // of two nibbles: their levels as bf16
    float* outs;     // [4][tile_rows][o_stride]: totals of each warp's rows (wide), or the leaves of a chunk (narrow)
    float* total;    // [tile_rows][o_stride] (narrow)
    float *m, *l;    // [5][16]: of the leaves, then of the total (narrow)
    char* leaves;
};

template <int FORMAT> __device__ __forceinline__ Layout layout_of(char* shared, u32 dim, u32 tile_rows) {
    Layout s;
    s.dims = up(dim, 16);
    s.o_stride = s.dims + 4;
    s.pairs = (u32*)shared;
    s.outs = (float*)(s.pairs + 256);
    s.total = s.outs + 4 * tile_rows * s.o_stride;
    s.m = s.total + tile_rows * s.o_stride;
    s.l = s.m + 80;
    s.leaves = (char*)(s.l + 80);
    return s;
}

template <int FORMAT> __device__ __forceinline__ Leaf leaf_of(const Layout& s, u32 slot) {
    Leaf leaf;
    u32 row = code_bytes<FORMAT>(s.dims);
    leaf.stride = row % 128 == 0 ? row : odd(row, 16);
    leaf.mask = row % 128 == 0 ? 7 : 0;
    char* start = s.leaves + slot * (1536 + 128 * leaf.stride);
    leaf.at = (u64*)start;
    leaf.scales = (float*)(start + 512);
    leaf.k = (u8*)(start + 1536);
    leaf.v = leaf.k + 64 * leaf.stride;
    return leaf;
}

// Threads that work on a leaf together: a block, or a warp.
struct Team {
    u32 thread, threads;
    __device__ __forceinline__ void sync() const {
        if (threads > 32) {
            __syncthreads();
        } else {
            warp_sync();
        }
    }
};

// Where the positions of a leaf are, as far as one thread looks for them; `place` tells its team.
template <int FORMAT> struct Found {
    u64 at[2];
    float scales[2][2];

    __device__ __forceinline__ void find(const Attention& a, const Tile& tile, u32 kv_head, u32 number, Team team) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 p = team.thread + i * team.threads, position = 64 * number + p;
            at[i] = 0;
            scales[i][0] = scales[i][1] = 0.0f;
            if (p >= 64 || position < tile.low || position > tile.high) continue;
            u64 layer = (u64)(a.layer + (u64)tile.table[position / a.block_tokens] * a.block_bytes);
            u32 bytes = code_bytes<FORMAT>(a.dim), place = kv_head * a.block_tokens + position % a.block_tokens;
            at[i] = layer + place * bytes;
            if (FORMAT >= INT8) {
                u32 plane = a.kv_heads * a.block_tokens;
                const u16* of = (const u16*)(layer + (u64)2 * plane * bytes);
                scales[i][0] = bf16_to_f32(of[place]);
                scales[i][1] = bf16_to_f32(of[plane + place]);
            }
        }
    }

    __device__ __forceinline__ void tell(const Leaf& leaf, u32 parity, Team team) const {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 p = team.thread + i * team.threads;
            if (p >= 64) continue;
            leaf.at[p] = at[i];
            if (FORMAT >= INT8) {
                leaf.scales[parity * 128 + p] = scales[i][0];
                leaf.scales[parity * 128 + 64 + p] = scales[i][1];
            }
        }
    }
};

// Begins to copy K or V of a leaf whose positions were told; `plane`: bytes from a key to its value, or 0.
template <int FORMAT>
__device__ __forceinline__ void fetch(const Attention& a, const Leaf& leaf, u8* into, u32 plane, u32 dims, Team team) {
    u32 bytes = code_bytes<FORMAT>(a.dim), shift = 0;
    bool whole = bytes % 16 == 0;
    u32 unit = whole ? 16 : 2, units = code_bytes<FORMAT>(dims) / unit;
    if (whole && code_bytes<FORMAT>(dims) % 16) units++;
    while ((1u << shift) < units) shift++;
    u32 mask = (1u << shift) - 1, all = 64u << shift;
    if (whole) {
#pragma unroll 4
        for (u32 i = team.thread; i < all; i += team.threads) {
            u32 p = i >> shift, byte = (i & mask) * 16, to = leaf.offset(p, byte);
            if (byte >= units * 16) continue;
            u64 from = leaf.at[p];
            bool there = from != 0 && byte < bytes;
            cp_async16(into + to, (const u8*)from + byte + plane, there);
        }
    } else {
        for (u32 i = team.thread; i < all; i += team.threads) {
            u32 p = i >> shift, byte = (i & mask) * 2, to = leaf.offset(p, byte);
            if (byte >= units * 2) continue;
            bool there = leaf.at[p] != 0 && byte < bytes;
            *(u16*)(into + to) = there ? *(const u16*)((const u8*)leaf.at[p] + byte + plane) : 0;
        }
    }
    cp_async_commit();
}

// Whether a leaf has positions that some rows of the tile attend to and others do not.
__device__ __forceinline__ bool is_shared(const Attention& a, const Tile& tile, u32 number) {
    u32 start = 64 * number, end = start + 64;
    return (end > tile.position + 1 && start <= tile.high && tile.tokens > 1) || (end > tile.low && start < first_attended(a, tile.high));
}

// Products with V add what rows do not attend to, times zero. Of a float format that may be infinite, which times zero is no number:
// such values become zero, and those rows that do attend get their NaN with the score.
__device__ __forceinline__ void scrub(const Leaf& leaf, u32 dims, u32 infinite, u32 parity, Team team) {
    for (u32 p = team.thread; p < 64; p += team.threads) {
        u32* row = (u32*)(leaf.v + p * leaf.stride);
        bool found = false;
        for (u32 i = 0; i < dims / 2; i++) found = found || (row[i] & infinite) == infinite || (row[i] >> 16 & infinite) == infinite;
        for (u32 i = 0; found && i < dims / 2; i++) row[i] = 0;
        leaf.scales[parity * 128 + p] = found ? __uint_as_float(0x7fc00000u) : 0.0f;
    }
}

// ---- numbers that the tensor cores take

template <int FORMAT> __device__ __forceinline__ void mma(float* d, const u32* a, const u32* b) {
    if (FORMAT == F16) {
        mma_f16(d, a, b);
    } else {
        mma_bf16(d, a, b);
    }
}

template <int FORMAT> __device__ __forceinline__ u32 pack(float low, float high) {
    return FORMAT == F16 ? pack_f16(low, high) : pack_bf16(low, high);
}

__device__ __forceinline__ u32 upper_halves(float low, float high) {
    return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xffff0000u);
}

// Two codes of a byte each as bf16, exactly; the lower in the lower half.
template <int FORMAT> __device__ __forceinline__ u32 two_bytes(u32 codes) {
    u32 low = codes & 0xff, high = codes >> 8 & 0xff;
    if (FORMAT == INT8) {
        // 2^23 + 128 + x
        float a = __uint_as_float(0x4b000000u | (low ^ 0x80)) - 8388736.0f;
        float b = __uint_as_float(0x4b000000u | (high ^ 0x80)) - 8388736.0f;
        return upper_halves(a, b);
    }
    // e4m3's bits in the places of a float's are the number times 2^-120. What the cache stores is never NaN.
    float a = __uint_as_float((low & 0x7f) << 20) * 1.329228e36f, b = __uint_as_float((high & 0x7f) << 20) * 1.329228e36f;
    return upper_halves(a, b) | (low & 0x80) << 8 | (high & 0x80) << 24;
}

template <int FORMAT> constexpr bool IS_FLOAT = FORMAT == F16 || FORMAT == BF16;

// The operand of 16 dims, from `16 * step` on, of keys 16n.. and 16n + 8..: two registers each. Floats are in the order of the instruction;
// of codes, each lane has four neighbouring dims, as its queries are.
template <int FORMAT> __device__ __forceinline__ void keys(const u32* pairs, const Leaf& leaf, u32 step, u32 n, u32 lane, u32* b) {
    if constexpr (IS_FLOAT<FORMAT>) {
        load_matrices(b, leaf.k + leaf.offset(16 * n + lane % 8 + lane / 16 * 8, 32 * step + lane / 8 % 2 * 16));
    } else {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 p = 16 * n + 8 * i + lane / 4, quarter = lane % 4;
            if (FORMAT == INT4) {
                u32 both = *(const u16*)(leaf.k + leaf.offset(p, 8 * step + 2 * quarter));
                b[2 * i] = pairs[both & 0xff];
                b[2 * i + 1] = pairs[both >> 8];
            } else {
                u32 both = *(const u32*)(leaf.k + leaf.offset(p, 16 * step + 4 * quarter));
                b[2 * i] = two_bytes<FORMAT>(both);
                b[2 * i + 1] = two_bytes<FORMAT>(both >> 16);
            }
        }
    }
}

// Two dims of a value.
template <int FORMAT> __device__ __forceinline__ u32 value_dims(const u32* pairs, const Leaf& leaf, u32 position, u32 dim) {
    if (FORMAT == INT4) return pairs[leaf.v[leaf.offset(position, dim / 2)]];
    return two_bytes<FORMAT>(*(const u16*)(leaf.v + leaf.offset(position, dim)));
}

// The operands of values of 16 positions, from `16 * step` on, for 16 dims, from 16j on: two registers for each of two products, whose dims
// `dim_of` says.
template <int FORMAT> __device__ __forceinline__ void values(const u32* pairs, const Leaf& leaf, u32 step, u32 j, u32 lane, u32* b) {
    if constexpr (IS_FLOAT<FORMAT>) {
        load_matrices_transposed(b, leaf.v + leaf.offset(16 * step + lane % 16, 32 * j + lane / 16 * 16));
    } else {
        u32 dim = 16 * j + 2 * (lane / 4);
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 p = 16 * step + 2 * (lane % 4) + 8 * i;
            u32 low = value_dims<FORMAT>(pairs, leaf, p, dim), high = value_dims<FORMAT>(pairs, leaf, p + 1, dim);
            b[i] = (low & 0xffff) | high << 16;
            b[2 + i] = low >> 16 | (high & 0xffff0000u);
        }
    }
}

// Which dim, of 16, is the sum `c` of product `h` in lane 4g + t: codes come in pairs, of which each product has one.
template <int FORMAT> __device__ __forceinline__ u32 dim_of(u32 h, u32 c, u32 t) {
    return IS_FLOAT<FORMAT> ? 8 * h + 2 * t + c % 2 : 4 * t + c % 2 * 2 + h;
}

// ---- a warp's 16 rows. Lane 4 * g + t has rows g and g + 8.

template <int GROUPS> struct Rows {
    const u8* q[2];         // of the two rows: this lane's first dims
    u32 queries[GROUPS <= 8 ? GROUPS : 1][4];   // their operands, where registers suffice
    u32 position[2];
    bool valid[2];
    float m[2], l[2];
    float o[GROUPS][2][4];  // of 16 dims: [product][of row g two, of row g + 8 two], see `dim_of`
};

template <int FORMAT, int GROUPS> __device__ __forceinline__ void read_query(const Rows<GROUPS>& rows, u32 step, u32* a) {
    if constexpr (IS_FLOAT<FORMAT>) {
        a[0] = *(const u32*)(rows.q[0] + 32 * step), a[1] = *(const u32*)(rows.q[1] + 32 * step);
        a[2] = *(const u32*)(rows.q[0] + 32 * step + 16), a[3] = *(const u32*)(rows.q[1] + 32 * step + 16);
    } else {
        u32x2 upper = *(const u32x2*)(rows.q[0] + 32 * step), lower = *(const u32x2*)(rows.q[1] + 32 * step);
        a[0] = upper.x, a[1] = lower.x, a[2] = upper.y, a[3] = lower.y;
    }
}

template <int GROUPS> __device__ __forceinline__ void clear(Rows<GROUPS>& rows) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        rows.m[r] = __uint_as_float(0xff800000u);
        rows.l[r] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
#pragma unroll
        for (int c = 0; c < 8; c++) rows.o[j][c / 4][c % 4] = 0.0f;
    }
}

// q.K of 64 positions: s[n][..] of positions 8n + 2t and + 1, of row g and of row g + 8.
template <int FORMAT, int GROUPS>
__device__ __forceinline__ void scores(const Layout& s, const Leaf& leaf, const Rows<GROUPS>& rows, u32 lane, float (*out)[4]) {
#pragma unroll
    for (int n = 0; n < 8; n++) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.0f;
#pragma unroll
    for (u32 step = 0; step < GROUPS; step++) {
        if (16 * step >= s.dims) break;
        u32 a[4];
        if constexpr (GROUPS <= 8) {
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = rows.queries[step][i];
        } else {
            read_query<FORMAT>(rows, step, a);
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            u32 b[4];
            keys<FORMAT>(s.pairs, leaf, step, n, lane, b);
            mma<FORMAT>(out[2 * n], a, b);
            mma<FORMAT>(out[2 * n + 1], a, b + 2);
        }
    }
}

// From scores to p, as the registers of the product with V; also each row's largest and sum.
// MASKED: some position of the leaf is not attended to by some row.
template <int FORMAT, bool MASKED, int GROUPS>
__device__ __forceinline__ void soften(const Attention& a, const Rows<GROUPS>& rows, const float* scales, bool scrubbed, u32 number, u32 lane, float (*s)[4], u32 (*p)[4],
                                       float* m, float* l) {
    u32 t = lane % 4;
#pragma unroll
    for (int n = 0; n < 8; n++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            u32 place = 8 * n + 2 * t + c % 2;
            if (FORMAT >= INT8) s[n][c] *= scales[place];
            s[n][c] *= a.scale;
            if (MASKED && FORMAT < INT8 && scrubbed && a.softcap <= 0.0f) s[n][c] += scales[place];
        }
    }
    if (a.softcap > 0.0f) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                s[n][c] = a.softcap * tanhf(s[n][c] / a.softcap);
                if (MASKED && FORMAT < INT8 && scrubbed) s[n][c] += scales[8 * n + 2 * t + c % 2];
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        u32 last = rows.position[r], first = first_attended(a, last);
        m[r] = __uint_as_float(0xff800000u);
#pragma unroll
        for (int c = 0; c < 16; c++) {
            u32 position = 64 * number + c / 2 * 8 + 2 * t + c % 2;
            if (!MASKED || (position >= first && position <= last)) m[r] = fmaxf(m[r], s[c / 2][2 * r + c % 2]);
        }
        m[r] = fmaxf(m[r], shuffle_xor(m[r], 1));
        m[r] = fmaxf(m[r], shuffle_xor(m[r], 2));
        l[r] = 0.0f;
#pragma unroll
        for (int c = 0; c < 16; c++) {
            u32 place = c / 2 * 8 + 2 * t + c % 2, position = 64 * number + place;
            float& x = s[c / 2][2 * r + c % 2];
            if (!MASKED || (position >= first && position <= last)) {
                x = exp_of(x - m[r]);
                l[r] += x;
                if (FORMAT >= INT8) x *= scales[64 + place];
            } else {
                x = 0.0f;
            }
        }
        l[r] += shuffle_xor(l[r], 1);
        l[r] += shuffle_xor(l[r], 2);
    }
#pragma unroll
    for (int step = 0; step < 4; step++) {
        float *low = s[2 * step], *high = s[2 * step + 1];
        p[step][0] = pack<FORMAT>(low[0], low[1]);
        p[step][1] = pack<FORMAT>(low[2], low[3]);
        p[step][2] = pack<FORMAT>(high[0], high[1]);
        p[step][3] = pack<FORMAT>(high[2], high[3]);
    }
}

// p.V of a leaf, folded into the rows.
template <int FORMAT, int GROUPS>
__device__ __forceinline__ void add_values(const Attention& a, const Layout& s, const Leaf& leaf, u32 number, u32 lane, Rows<GROUPS>& rows, u32 (*p)[4],
                                           const float* m, const float* l) {
    float kept[2], added[2];
    bool live[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        live[r] = rows.valid[r] && attends(a, rows.position[r], 64 * number, 64);
        if (live[r]) {
            weigh(rows.m[r], m[r], kept[r], added[r]);
            rows.l[r] = fold(rows.l[r], kept[r], l[r], added[r]);
        }
    }
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        if (16 * j >= s.dims) continue;
        float sums[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
        for (int step = 0; step < 4; step++) {
            u32 b[4];
            values<FORMAT>(s.pairs, leaf, step, j, lane, b);
            mma<FORMAT>(sums[0], p[step], b);
            mma<FORMAT>(sums[1], p[step], b + 2);
        }
#pragma unroll
        for (int c = 0; c < 8; c++) {
            int r = c % 4 / 2;
            float& o = rows.o[j][c / 4][c % 4];
            if (live[r]) o = fold(o, kept[r], sums[c / 4][c % 4], added[r]);
        }
    }
}

// Rows as they are, to shared memory: `[row][dim]`, as many as a tile has at most.
template <int FORMAT, int GROUPS> __device__ __forceinline__ void put(const Layout& s, const Rows<GROUPS>& rows, float* to, u32 tile_rows, u32 lane) {
    u32 g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        if (16 * j >= s.dims) continue;
#pragma unroll
        for (int c = 0; c < 8; c++) {
            u32 row = g + c % 4 / 2 * 8;
            if (row < tile_rows) to[row * s.o_stride + 16 * j + dim_of<FORMAT>(c / 4, c, t)] = rows.o[j][c / 4][c % 4];
        }
    }
}

// A chunk's rows folded into their totals in shared memory.
template <int FORMAT, int GROUPS>
__device__ __forceinline__ void add_chunk(const Attention& a, const Layout& s, const Rows<GROUPS>& rows, u32 chunk, float* totals, float* m, float* l, u32 lane) {
    u32 g = lane / 4, t = lane % 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (!rows.valid[r] || !attends(a, rows.position[r], 256 * chunk, 256)) continue;
        float kept, added;
        weigh(m[r], rows.m[r], kept, added);
        l[r] = fold(l[r], kept, rows.l[r], added);
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
            if (16 * j >= s.dims) continue;
#pragma unroll
            for (int c = 0; c < 4; c++) {
                float& o = totals[(g + 8 * r) * s.o_stride + 16 * j + dim_of<FORMAT>(c / 2, c, t)];
                o = fold(o, kept, rows.o[j][c / 2][2 * r + c % 2], added);
            }
        }
    }
}

// The leaves of one chunk of a narrow tile, folded row by row: into the total, or to where the merge finds them.
__device__ __forceinline__ void join_leaves(const Attention& a, const Tile& tile, const Layout& s, u32 kv_head, u32 chunk, u32 warp, u32 lane) {
    for (u32 row = warp; row < tile.rows; row += 4) {
        u32 position = tile.position + row / tile.size;
        if (!attends(a, position, 256 * chunk, 256)) continue;
        float m = __uint_as_float(0xff800000u), l = 0.0f, kept[4], added[4];
        bool live[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            live[i] = attends(a, position, 256 * chunk + 64 * i, 64);
            if (live[i]) {
                weigh(m, s.m[16 * i + row], kept[i], added[i]);
                l = fold(l, kept[i], s.l[16 * i + row], added[i]);
            }
        }
        float total_kept = 0.0f, total_added = 0.0f, *out = s.total + row * s.o_stride, *place = 0;
        if (tile.split) {
            u64 index = (((u64)blockIdx.x * a.kv_heads + kv_head) * a.split + chunk - tile.first_chunk) * a.tile_rows + row;
            place = a.partials + index * (s.dims + 2);
            if (lane == 0) {
                place[s.dims] = m;
                place[s.dims + 1] = l;
            }
        } else {
            float total_m = s.m[64 + row], total_l = s.l[64 + row];
            weigh(total_m, m, total_kept, total_added);
            total_l = fold(total_l, total_kept, l, total_added);
            warp_sync();
            if (lane == 0) {
                s.m[64 + row] = total_m;
                s.l[64 + row] = total_l;
            }
        }
        for (u32 d = lane; d < s.dims; d += 32) {
            float o = 0.0f;
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                if (live[i]) o = fold(o, kept[i], s.outs[(a.tile_rows * i + row) * s.o_stride + d], added[i]);
            }
            if (place) {
                place[d] = o;
            } else {
                out[d] = fold(out[d], total_kept, o, total_added);
            }
        }
    }
}

// Leaves `number`, `number + step` and so on up to `last`, by a team; `done` is called behind each. With two slots, a leaf is on its way
// while the one before it is worked on; with one, its keys are while values are added, and its values while scores are made.
template <int FORMAT, int GROUPS, class Done>
__device__ __forceinline__ void walk(const Attention& a, const Tile& tile, const Layout& s, u32 slot, u32 slots, u32 kv_head, u32 number, u32 last, u32 step,
                                     Team team, bool active, u32 lane, Rows<GROUPS>& rows, Done done) {
    if (number > last) return;
    u32 plane = a.kv_heads * a.block_tokens * code_bytes<FORMAT>(a.dim);
    Found<FORMAT> found;
    for (u32 ahead = 0; ahead < slots && number + ahead * step <= last; ahead++) {
        found.find(a, tile, kv_head, number + ahead * step, team);
        found.tell(leaf_of<FORMAT>(s, slot + ahead), 0, team);
    }
    team.sync();
    auto fetch_keys = [&](const Leaf& leaf) { fetch<FORMAT>(a, leaf, leaf.k, 0, s.dims, team); };
    auto fetch_values = [&](const Leaf& leaf) { fetch<FORMAT>(a, leaf, leaf.v, plane, s.dims, team); };
    fetch_keys(leaf_of<FORMAT>(s, slot));
    fetch_values(leaf_of<FORMAT>(s, slot));
    for (u32 turn = 0;; turn++) {
        Leaf leaf = leaf_of<FORMAT>(s, slot + turn % slots);
        u32 parity = turn / slots % 2;
        bool more = number + step <= last, masked = 64 * number + 64 > tile.position + 1 || 64 * number < first_attended(a, tile.high);
        bool scrubbed = FORMAT < INT8 && is_shared(a, tile, number);
        float sums[8][4], m[2], l[2];
        u32 p[4][4];
        found.find(a, tile, kv_head, number + slots * step, team);
        if (slots == 2) {
            cp_async_wait<0>();
            team.sync();
            Leaf next = leaf_of<FORMAT>(s, slot + (turn + 1) % 2);
            if (more) fetch_keys(next);
            if (more) fetch_values(next);
        } else {
            cp_async_wait<1>();
            team.sync();
        }
        if (active) scores<FORMAT>(s, leaf, rows, lane, sums);
        if (slots == 1) {
            found.tell(leaf, parity ^ 1, team);
            team.sync();
            if (more) fetch_keys(leaf);
            else cp_async_commit();
            cp_async_wait<1>();
            team.sync();
        }
        if (scrubbed) {
            scrub(leaf, s.dims, FORMAT == F16 ? 0x7c00 : 0x7f80, parity, team);
            team.sync();
        }
        if (active) {
            const float* scales = leaf.scales + 128 * parity;
            if (masked) {
                soften<FORMAT, true>(a, rows, scales, scrubbed, number, lane, sums, p, m, l);
            } else {
                soften<FORMAT, false>(a, rows, scales, false, number, lane, sums, p, m, l);
            }
            add_values<FORMAT>(a, s, leaf, number, lane, rows, p, m, l);
        }
        done(number);
        if (!more) break;
        if (slots == 2) {
            found.tell(leaf, parity ^ 1, team);
        } else {
            team.sync();
            fetch_values(leaf);
        }
        number += step;
    }
    cp_async_wait<0>();
    team.sync();
}

template <int FORMAT, int GROUPS> __device__ __forceinline__ void attend(const Attention& a) {
    DYNAMIC_SHARED(shared);
    if (blockIdx.x >= a.meta[5]) return;
    Tile tile = tile_of(a, blockIdx.x);
    u32 kv_head = blockIdx.y % a.kv_heads, run = blockIdx.y / a.kv_heads;
    u32 first_chunk = tile.first_chunk, last_chunk = tile.last_chunk;
    if (64 * run >= tile.rows || blockIdx.z > (tile.split ? last_chunk - first_chunk : 0)) return;
    if (tile.split) first_chunk = last_chunk = tile.first_chunk + blockIdx.z;

    Layout s = layout_of<FORMAT>(shared, a.dim, a.tile_rows);
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    bool narrow = tile.rows <= 16;
    u32 first_row = narrow ? 0 : 64 * run + 16 * warp;
    bool active = first_row < tile.rows;

    if (FORMAT == INT4) {
        for (u32 i = threadIdx.x; i < 256; i += 128) s.pairs[i] = upper_halves(level_of(i & 15), level_of(i >> 4));
    }
    for (u32 i = threadIdx.x; i < 5 * a.tile_rows * s.o_stride; i += 128) s.outs[i] = 0.0f;  // and the total behind
    if (threadIdx.x < 16) {
        s.m[64 + threadIdx.x] = __uint_as_float(0xff800000u);
        s.l[64 + threadIdx.x] = 0.0f;
    }
    __syncthreads();

    Rows<GROUPS> rows;
    clear(rows);
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        u32 row = first_row + lane / 4 + 8 * r;
        rows.valid[r] = row < tile.rows;
        if (!rows.valid[r]) row = 0;  // computed and dropped
        u32 token = row / tile.size, head = kv_head * tile.size + row % tile.size;
        rows.position[r] = tile.position + token;
        rows.q[r] = (const u8*)a.q + (((u64)(tile.first_row + token) * a.heads + head) * s.dims + lane % 4 * (IS_FLOAT<FORMAT> ? 2 : 4)) * 2;
    }
    if constexpr (GROUPS <= 8) {
#pragma unroll
        for (u32 step = 0; step < GROUPS; step++) {
            if (16 * step < s.dims) read_query<FORMAT>(rows, step, rows.queries[step]);
        }
    }
    u32 first_leaf = tile.low / 64, last_leaf = tile.high / 64;

    if (!narrow) {
        float* totals = s.outs + 16 * warp * s.o_stride;
        float m[2] = {rows.m[0], rows.m[1]}, l[2] = {0.0f, 0.0f};
        auto done = [&](u32 number) {
            if (number % 4 != 3 && number != last_leaf) return;
            add_chunk<FORMAT>(a, s, rows, number / 4, totals, m, l, lane);
            clear(rows);
        };
        walk<FORMAT>(a, tile, s, 0, a.slots < 2 ? 1 : 2, kv_head, first_leaf, last_leaf, 1, Team{threadIdx.x, 128}, active, lane, rows, done);
        if (!active) return;
        for (u32 row = 0; row < 16; row++) {
            float row_m = shuffle(m[row / 8], row % 8 * 4), row_l = shuffle(l[row / 8], row % 8 * 4);
            u32 r = first_row + row;
            if (r >= tile.rows) break;
            finish(a, FORMAT == INT4, totals + row * s.o_stride, row_m, row_l, tile.first_row + r / tile.size, kv_head * tile.size + r % tile.size, lane);
        }
        return;
    }

    for (u32 chunk = first_chunk; chunk <= last_chunk; chunk++) {
        if (warp < a.slots) {
            u32 number = 4 * chunk + warp, last = 4 * chunk + 3 < last_leaf ? 4 * chunk + 3 : last_leaf;
            while (number < first_leaf) number += a.slots;
            auto done = [&](u32 number) {
                put<FORMAT>(s, rows, s.outs + number % 4 * a.tile_rows * s.o_stride, a.tile_rows, lane);
#pragma unroll
                for (u32 r = 0; r < 2; r++) {
                    if (lane % 4 == 0) s.m[number % 4 * 16 + lane / 4 + 8 * r] = rows.m[r];
                    if (lane % 4 == 0) s.l[number % 4 * 16 + lane / 4 + 8 * r] = rows.l[r];
                }
                clear(rows);
            };
            walk<FORMAT>(a, tile, s, warp, 1, kv_head, number, last, a.slots, Team{lane, 32}, true, lane, rows, done);
        }
        __syncthreads();
        join_leaves(a, tile, s, kv_head, chunk, warp, lane);
        __syncthreads();
    }
    if (tile.split) return;
    for (u32 row = warp; row < tile.rows; row += 4) {
        finish(a, FORMAT == INT4, s.total + row * s.o_stride, s.m[64 + row], s.l[64 + row], tile.first_row + row / tile.size,
               kv_head * tile.size + row % tile.size, lane);
    }
}

#define ATTENTION(name, FORMAT, GROUPS)                                              \
    extern "C" __global__ void __launch_bounds__(128) name(PARAMETERS) {             \
        Attention a = ARGUMENTS;                                                     \
        attend<FORMAT, GROUPS>(a);                                                   \
    }
