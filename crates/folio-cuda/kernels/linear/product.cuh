// Products of packed weights and bf16 rows, whatever the weights are.
//
// Owns: the order in which an output element is summed, the same for every number of rows. Columns are cut in chunks of 64, chunks in
// four slices by their number alone; a slice is one accumulator over ascending columns of mma.m16n8k16, and the sum is
// ((s0 + s1) + s2) + s3, then the bias, then what was there. With groups, the products of a group's codes are summed by the same
// instruction from zero and join the accumulator by `fmaf(scale, partial, acc)`, then `fmaf(min, sum of x, acc)`.
//
// Weights are the 16-row operand and rows of the batch the 8 columns, so one row and a thousand are the same instruction. The 16
// columns of an instruction are taken in an order that gives each lane neighbours: lane 4g + c has columns 4c..4c + 3 of a row of
// the batch in one load of 8 bytes, and of weight rows g and g + 8 in its part of a load of 16 bytes.
//
// A kind of weights says: LOADS, 16-byte loads of a lane per chunk; GROUP, instructions per scale (0: no scales); PARTS, operands per
// instruction (2: the value is a sum); `fragment`, the operand of instruction t of a chunk, given the load that has it; `value`, one weight
// as a number.

constexpr u32 TILES = 4;        // instructions of a chunk
constexpr u32 SLICES = 4;
constexpr u32 ONES = 0x3f803f80;

struct Weights {
    const u32x4* codes;     // [row tile][load][lane]
    const float* scales;    // [row tile][group][16]
    const float* mins;      // likewise, or null
    u32 rows, ktiles, offset, group_shift;
    __device__ u32 groups() const { return ((ktiles - 1) >> group_shift) + 1; }
    __device__ u32 chunks() const { return (ktiles + TILES - 1) / TILES; }
};

// Which rows of the batch are columns of a block's products, and where they are written.
struct Rows {
    const u32* list;        // null: consecutive
    u32 first, count;
    u32 share;              // of the list's entries, so many neighbouring numbers are one row
    // The row of instruction column `i`; those behind the count repeat the last and are not written.
    __device__ u32 at(u32 i) const {
        u32 index = first + (i < count ? i : count - 1);
        return list ? list[index] / share : index;
    }
};

// ---- a chunk of weights and of rows in shared memory

// A chunk of MT tiles of weights and of ROWS rows of the batch. A ring of such stages is filled while older ones are multiplied.
template <class Kind, u32 MT, u32 ROWS> struct Stage {
    static constexpr u32 GROUPS = Kind::GROUP == 0 ? 0 : TILES / (Kind::GROUP == 0 ? 1 : Kind::GROUP);
    static constexpr u32 SCALES = MT * Kind::LOADS * 512;       // behind the codes: [tile][load][lane] of 16 bytes
    static constexpr u32 MINS = SCALES + MT * GROUPS * 64;      // [tile][group][16], as scales
    static constexpr u32 BATCH = MINS + MT * GROUPS * 64;       // [row][64 columns], see `columns_at`
    static constexpr u32 BYTES = BATCH + ROWS * 128;

    // Where the 16 columns of instruction `t` lie of a row: rows that lanes read at once are in different banks.
    static __device__ __forceinline__ u32 columns_at(u32 row, u32 t) { return row * 128 + ((t ^ row) % 4) * 32; }
};

// How THREADS threads fill stages: what each of them copies, as far as it is the same for every chunk.
template <class Kind, u32 MT, u32 ROWS, u32 THREADS> struct Feed {
    using S = Stage<Kind, MT, ROWS>;
    // A thread copies all loads of a tile, or one of them.
    static constexpr u32 OF_TILE = 32 * Kind::LOADS, BESIDE = THREADS < OF_TILE ? 1 : THREADS / OF_TILE, EACH = THREADS < OF_TILE ? Kind::LOADS : 1;
    static constexpr u32 TURNS = (MT + BESIDE - 1) / BESIDE, BATCHES = ROWS * 8 / THREADS, APART = THREADS / 8;
    static_assert(THREADS % OF_TILE == 0 || THREADS == 32, "whole tiles, or a warp");

    u32 thread, tile, tiles, codes[TURNS], batch[BATCHES];

    __device__ __forceinline__ Feed(const Weights& w, u32 tile, u32 tiles, u32 x_stride, const Rows& from, u32 thread)
        : thread(thread), tile(tile), tiles(tiles) {
#pragma unroll
        for (u32 turn = 0; turn < TURNS; turn++) {
            u32 m = tile_of(turn);
            codes[turn] = (tile + (m < tiles ? m : 0)) * loads(w) * 32 + thread % 32;
        }
#pragma unroll
        for (u32 k = 0; k < BATCHES; k++) batch[k] = from.at(thread / 8 + k * APART) * x_stride + thread % 8 * 8;
    }

    static __device__ __forceinline__ u32 loads(const Weights& w) { return (w.ktiles + TILES / Kind::LOADS - 1) / (TILES / Kind::LOADS); }
    __device__ __forceinline__ u32 tile_of(u32 turn) const { return turn * BESIDE + (BESIDE == 1 ? 0 : thread / OF_TILE); }

    // Begins to copy a chunk. Of tiles and rows that there are not, and behind the last column, come zeros, which change no sum.
    __device__ __forceinline__ void copy(char* to, const Weights& w, const u16* x, const u32* order, const Rows& from, u32 chunk) const {
        u32 columns = w.ktiles * 16, column = chunk * 64 + thread % 8 * 8;
#pragma unroll
        for (u32 turn = 0; turn < TURNS; turn++) {
            u32 m = tile_of(turn);
#pragma unroll
            for (u32 i = 0; i < EACH; i++) {
                u32 load = EACH == 1 ? thread / 32 % Kind::LOADS : i;
                if (MT % BESIDE == 0 || m < MT)
                    cp_async16(to + (m * Kind::LOADS + load) * 512 + thread % 32 * 16, w.codes + (codes[turn] + (chunk * Kind::LOADS + load) * 32),
                               m < tiles && chunk * Kind::LOADS + load < loads(w));
            }
        }
        if constexpr (Kind::GROUP != 0) {
#pragma unroll
            for (u32 i = thread; i < MT * S::GROUPS * 4; i += THREADS) {
                u32 m = i / (4 * S::GROUPS), ktile = chunk * TILES + i / 4 % S::GROUPS * Kind::GROUP;
                u32 at = ((tile + m) * w.groups() + (ktile >> w.group_shift)) * 16 + i % 4 * 4;
                bool there = m < tiles && ktile < w.ktiles;
                cp_async16(to + S::SCALES + 16 * i, w.scales + (there ? at : 0), there);
                if (w.mins) cp_async16(to + S::MINS + 16 * i, w.mins + (there ? at : 0), there);
            }
        }
        char* place = to + S::BATCH + S::columns_at(thread / 8, thread % 8 / 2) + thread % 2 * 16;
        if (order) {
#pragma unroll
            for (u32 k = 0; k < BATCHES; k++) {
                const u16* row = x + (batch[k] - thread % 8 * 8);
                bool there = thread / 8 + k * APART < from.count && column < columns;
#pragma unroll 1
                for (u32 j = 0; j < 8; j++) ((u16*)(place + k * APART * 128))[j] = there ? row[order[column + j]] : 0;
            }
        } else {
#pragma unroll
            for (u32 k = 0; k < BATCHES; k++)
                cp_async16(place + k * APART * 128, x + (batch[k] + chunk * 64), thread / 8 + k * APART < from.count && column < columns);
        }
    }
};

// What one step of a warp multiplies: MT tiles of weights by NT columns of 8, along the columns of a scale, or of one instruction.
template <class Kind, u32 MT, u32 NT> struct Operands {
    static constexpr u32 DEEP = Kind::GROUP == 0 ? 1 : Kind::GROUP, STEPS = TILES / DEEP;
    u32 a[MT][DEEP][Kind::PARTS][4], b[NT][DEEP][2];
    float scales[Kind::GROUP == 0 ? 1 : MT][2], mins[Kind::GROUP == 0 ? 1 : MT][2];

    // Those of step `step` of a stage; `first` is the first of its tiles, `row` its first row.
    template <class S>
    __device__ __forceinline__ void load(const char* stage, const Weights& w, const u32* table, u32 first, u32 row, u32 step, u32 lane) {
        constexpr u32 COVERS = TILES / Kind::LOADS;
        const u32x4* codes = (const u32x4*)stage + first * Kind::LOADS * 32 + lane;
#pragma unroll
        for (u32 j = 0; j < DEEP; j++) {
            u32 t = step * DEEP + j;
#pragma unroll
            for (u32 m = 0; m < MT; m++) Kind::fragment(codes[(m * Kind::LOADS + t / COVERS) * 32], t, w.offset, table, a[m][j]);
#pragma unroll
            for (u32 n = 0; n < NT; n++) {
                u32x2 x = *(const u32x2*)(stage + S::BATCH + S::columns_at(row + n * 8 + lane / 4, t) + lane % 4 * 8);
                b[n][j][0] = x.x, b[n][j][1] = x.y;
            }
        }
        if constexpr (Kind::GROUP != 0) {
#pragma unroll
            for (u32 i = 0; i < 2 * MT; i++) {
                u32 at = ((first + i / 2) * S::GROUPS + step) * 16 + lane / 4 + i % 2 * 8;
                scales[i / 2][i % 2] = ((const float*)(stage + S::SCALES))[at];
                mins[i / 2][i % 2] = w.mins ? ((const float*)(stage + S::MINS))[at] : 0.0f;
            }
        }
    }

    __device__ __forceinline__ void multiply(float (*acc)[NT][4], bool with_mins) const {
        if constexpr (Kind::GROUP == 0) {
#pragma unroll
            for (u32 n = 0; n < NT; n++)
#pragma unroll
                for (u32 m = 0; m < MT; m++)
#pragma unroll
                    for (u32 part = 0; part < Kind::PARTS; part++) mma_bf16(acc[m][n], a[m][0][part], b[n][0]);
        } else {
            const u32 ones[4] = {ONES, ONES, ONES, ONES};
#pragma unroll
            for (u32 n = 0; n < NT; n++) {
                float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                if (with_mins) {
#pragma unroll
                    for (u32 j = 0; j < DEEP; j++) mma_bf16(sums, ones, b[n][j]);
                }
#pragma unroll
                for (u32 m = 0; m < MT; m++) {
                    float partial[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                    for (u32 j = 0; j < DEEP; j++) mma_bf16(partial, a[m][j][0], b[n][j]);
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        acc[m][n][i] = fmaf(scales[m][i / 2], partial[i], acc[m][n][i]);
                        if (with_mins) acc[m][n][i] = fmaf(mins[m][i / 2], sums[i], acc[m][n][i]);
                    }
                }
            }
        }
    }
};

// A warp's walk over chunks: while a step is multiplied, the operands of the next come out of shared memory, if registers suffice, and later
// chunks into it.
// THREADS threads fill the ring together.
template <class Kind, u32 MT, u32 NT, u32 STAGES, class F, u32 THREADS> struct Walk {
    using S = typename F::S;
    using O = Operands<Kind, MT, NT>;
    static constexpr u32 HELD = Kind::GROUP == 0 || MT * NT * Kind::GROUP <= 16 ? 2 : 1;
    const Weights& w;
    const F& feed;
    const u16* x;
    const u32 *order, *table;
    const Rows& from;
    char* ring;
    u32 end, first, row, lane, slot;
    bool active;
    O operands[HELD];

    __device__ __forceinline__ void copy(u32 chunk, u32 slot) const {
        if (chunk < end) feed.copy(ring + slot * S::BYTES, w, x, order, from, chunk);
        cp_async_commit();
    }
    // Until the next chunk is there, and nobody needs the one before it any more.
    __device__ __forceinline__ void arrive() const {
        cp_async_wait<STAGES - 2>();
        if constexpr (THREADS > 32) __syncthreads();
        else warp_sync();
    }
    __device__ __forceinline__ void load(u32 slot, u32 step) {
        if (active) operands[step % HELD].template load<S>(ring + slot * S::BYTES, w, table, first, row, step, lane);
    }
    __device__ __forceinline__ void begin(u32 chunk) {
        slot = 0;
#pragma unroll
        for (u32 ahead = 0; ahead + 1 < STAGES; ahead++) copy(chunk + ahead, ahead);
        arrive();
        if (HELD == 2) load(0, 0);
    }
    __device__ __forceinline__ void add(u32 chunk, float (*acc)[NT][4]) {
        copy(chunk + STAGES - 1, slot == 0 ? STAGES - 1 : slot - 1);
        u32 next = slot + 1 == STAGES ? 0 : slot + 1;
#pragma unroll
        for (u32 step = 0; step < O::STEPS; step++) {
            bool last = step + 1 == O::STEPS;
            if (HELD == 1) {
                load(slot, step);
            } else if (!last) {
                load(slot, step + 1);
            } else if (chunk + 1 < end) {
                arrive();
                load(next, 0);
            }
            if (active) operands[step % HELD].multiply(acc, w.mins != nullptr);
        }
        if (HELD == 1) arrive();
        slot = next;
    }
};

struct Output {
    const float* bias;      // or null
    float* at;
    u32 stride, add;
    __device__ __forceinline__ void put(u32 row, u32 column, float sum) const {
        if (bias) sum += bias[column];
        float* to = at + (u64)row * stride + column;
        *to = add ? *to + sum : sum;
    }
};

// Weight rows first..first + count of the matrix, of which a tile may hold others; they are written from column 0 on.
struct Part { u32 first, count; };

// 16 * MT weight rows and 8 * NT rows of the batch, a slice to each of 4 warps, each with a ring of its own.
template <class Kind, u32 MT, u32 NT, u32 STAGES>
__device__ __forceinline__ void narrow(const Weights& w, const Part& part, const u16* x, u32 x_stride, const u32* order,
                                       const Rows& from, const Rows& to, const Output& out, u32 block) {
    using F = Feed<Kind, MT, 8 * NT, 32>;
    constexpr u32 PITCH = 16 * MT + 4;
    DYNAMIC_SHARED(shared);
    __shared__ u32 table[Kind::TABLE];
    Kind::prepare(table);
    u32 lane = threadIdx.x % 32, slice = threadIdx.x / 32, tile = part.first / 16 + block * MT, end_tile = (part.first + part.count + 15) / 16;
    if (tile >= end_tile) return;
    u32 tiles = end_tile - tile < MT ? end_tile - tile : MT;
    float acc[MT][NT][4] = {};
    u32 chunks = w.chunks(), chunk = chunks * slice / SLICES, end = chunks * (slice + 1) / SLICES;
    F feed(w, tile, tiles, x_stride, from, lane);
    Walk<Kind, MT, NT, STAGES, F, 32> walk = {w, feed, x, order, table, from, shared + slice * STAGES * F::S::BYTES, end, 0, 0, lane, 0, true, {}};
    if (chunk < end) walk.begin(chunk);
#pragma unroll 1
    for (; chunk < end; chunk++) walk.add(chunk, acc);
    cp_async_wait<0>();
    __syncthreads();
    float* sums = (float*)shared;       // [slice][row of the batch][weight row]
#pragma unroll
    for (u32 m = 0; m < MT; m++)
#pragma unroll
        for (u32 n = 0; n < NT; n++)
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                sums[(slice * 8 * NT + n * 8 + lane % 4 * 2 + i % 2) * PITCH + m * 16 + lane / 4 + i / 2 * 8] = acc[m][n][i];
    __syncthreads();
    for (u32 i = threadIdx.x; i < 16 * MT * 8 * NT; i += 128) {
        u32 row = i % (16 * MT), n = i / (16 * MT), next = 8 * NT * PITCH;
        u32 column = tile * 16 + row - part.first;      // wraps where it is before the part
        const float* at = sums + n * PITCH + row;
        if (n < to.count && column < part.count) out.put(to.at(n), column, ((at[0] + at[next]) + at[2 * next]) + at[3 * next]);
    }
}

// Floats of a thread: in registers, or in memory.
template <bool IN_MEMORY> struct Kept { typedef float Float; };
template <> struct Kept<true> { typedef volatile float Float; };

// 8 warps of 16 * MT weight rows by 8 * NT rows of the batch each, ACROSS of them beside each other along the batch; slices one after the
// other.
template <class Kind, u32 MT, u32 NT, u32 ACROSS>
__device__ __forceinline__ void wide(const Weights& w, const Part& part, const u16* x, u32 x_stride, const u32* order,
                                     const Rows& from, const Rows& to, const Output& out, u32 block) {
    constexpr u32 ALONG = 8 / ACROSS, STAGES = 3;
    using F = Feed<Kind, MT * ALONG, 8 * NT * ACROSS, 256>;
    DYNAMIC_SHARED(shared);
    __shared__ u32 table[Kind::TABLE];
    Kind::prepare(table);
    u32 lane = threadIdx.x % 32, first = threadIdx.x / 32 / ACROSS * MT, row = threadIdx.x / 32 % ACROSS * 8 * NT;
    u32 tile = part.first / 16 + block * MT * ALONG, end_tile = (part.first + part.count + 15) / 16;
    if (tile >= end_tile) return;
    u32 tiles = end_tile - tile < MT * ALONG ? end_tile - tile : MT * ALONG;
    bool active = first < tiles && row < from.count;
    u32 chunks = w.chunks(), chunk = 0;
    F feed(w, tile, tiles, x_stride, from, threadIdx.x);
    Walk<Kind, MT, NT, STAGES, F, 256> walk = {w, feed, x, order, table, from, shared, chunks, first, row, lane, 0, active, {}};
    walk.begin(0);
    // Totals of a large tile are out of registers' way: they are touched at the ends of slices.
    float acc[MT][NT][4];
    typename Kept<(MT * NT > 16)>::Float total[MT][NT][4];
#pragma unroll 1
    for (u32 slice = 0; slice < SLICES; slice++) {
#pragma unroll
        for (u32 i = 0; i < MT * NT * 4; i++) acc[i / 4 / NT][i / 4 % NT][i % 4] = 0.0f;
#pragma unroll 1
        for (u32 end = chunks * (slice + 1) / SLICES; chunk < end; chunk++) walk.add(chunk, acc);
#pragma unroll
        for (u32 i = 0; i < MT * NT * 4; i++) {
            auto& sum = total[i / 4 / NT][i / 4 % NT][i % 4];
            float part = acc[i / 4 / NT][i / 4 % NT][i % 4];
            sum = slice == 0 ? part : sum + part;
        }
    }
    cp_async_wait<0>();
    if (!active) return;
#pragma unroll
    for (u32 m = 0; m < MT; m++)
#pragma unroll
        for (u32 n = 0; n < NT; n++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                u32 at = row + n * 8 + lane % 4 * 2 + i % 2, column = (tile + first + m) * 16 + lane / 4 + i / 2 * 8 - part.first;
                if (at < to.count && column < part.count) out.put(to.at(at), column, total[m][n][i]);
            }
}

// ---- kernels

#define WEIGHTS_PARAMETERS const u32x4 *codes, const float *scales, const float *mins, u32 weight_rows, u32 ktiles, u32 offset, u32 group_shift
#define WEIGHTS_OF {codes, scales, mins, weight_rows, ktiles, offset, group_shift}
#define PRODUCT_PARAMETERS                                                                                                     \
    const u32 *meta, u32 count_word, const u16 *x, u32 x_stride, const u32 *order, WEIGHTS_PARAMETERS, const float *bias,      \
        float *out, u32 out_stride, u32 add

// Grid: blocks of rows, which find the same weights in the cache, then blocks of weights. Rows of the batch from `meta[count_word]`.
#define PRODUCT_KERNEL(name, threads, rows_of_a_block, compute)                                                                \
    extern "C" __global__ void __launch_bounds__(threads) name(PRODUCT_PARAMETERS) {                                          \
        u32 rows = meta[count_word], first = blockIdx.x * rows_of_a_block;                                                     \
        if (first >= rows) return;                                                                                             \
        u32 count = rows - first < rows_of_a_block ? rows - first : rows_of_a_block;                                           \
        Weights w = WEIGHTS_OF;                                                                                                \
        Rows batch = {nullptr, first, count, 1};                                                                                \
        compute(w, {0, weight_rows}, x, x_stride, order, batch, batch, {bias, out, out_stride, add}, blockIdx.y);              \
    }

// Named by the most rows of the batch that a block takes. `linear/launch.rs` has the same numbers.
#define LINEAR_KERNELS(prefix, Kind)                                                                                           \
    PRODUCT_KERNEL(prefix##_8, 128, 8, (narrow<Kind, 1, 1, 4>))                                                                \
    PRODUCT_KERNEL(prefix##_32, 128, 32, (narrow<Kind, 2, 4, 3>))                                                              \
    PRODUCT_KERNEL(prefix##_64, 128, 64, (narrow<Kind, 4, 8, 3>))                                                              \
    PRODUCT_KERNEL(prefix##_128, 256, 128, (wide<Kind, 4, 4, 4>))                                                              \
    PRODUCT_KERNEL(prefix##_256, 256, 256, (wide<Kind, 4, 8, 4>))                                                              \
    EMBED_KERNEL(prefix##_embed, Kind)

// ---- rows of an embedding table

// Where weight (row, column) lies: lane and load, and within the lane's words that of instruction `ktile` at (half row, pair).
struct Place {
    u32 tile, ktile, lane, half, j;
    __device__ Place(u32 row, u32 column)
        : tile(row / 16), ktile(column / 16), lane(row % 8 * 4 + column % 16 / 4), half(row % 16 / 8), j(column % 4) {}
};

// Grid: rows of the batch. Tokens that are rows of another segment of the table are left alone.
#define EMBED_KERNEL(name, Kind)                                                                                               \
    extern "C" __global__ void __launch_bounds__(256) name(const u32* meta, u32 first_row, const u32* order,                   \
                                                           WEIGHTS_PARAMETERS, u32 width, float* out, u32 out_stride,         \
                                                           u16* out_bf16, u32 out_bf16_stride) {                               \
        if (blockIdx.x >= meta[0]) return;                                                                                     \
        u32 row = meta[meta[8] + blockIdx.x] - first_row;                                                                      \
        if (row >= weight_rows) return;                                                                                        \
        Weights w = WEIGHTS_OF;                                                                                                \
        embed_row<Kind>(w, row, width, order, out ? out + (u64)blockIdx.x * out_stride : nullptr,                              \
                        out_bf16 ? out_bf16 + (u64)blockIdx.x * out_bf16_stride : nullptr, out_bf16_stride);                   \
    }

template <class Kind>
__device__ __forceinline__ void embed_row(const Weights& w, u32 row, u32 width, const u32* order, float* out, u16* out_bf16,
                                          u32 padded) {
    for (u32 column = threadIdx.x; column < padded || column < width; column += blockDim.x) {
        if (column >= width) {
            if (out_bf16) out_bf16[column] = 0;
            continue;
        }
        Place place(row, column);
        constexpr u32 COVERS = TILES / Kind::LOADS;
        u32 loads = (w.ktiles + COVERS - 1) / COVERS;
        const u32x4* words = w.codes + ((u64)place.tile * loads + place.ktile / COVERS) * 32 + place.lane;
        float value = Kind::value((const u32*)words, place, w.offset);
        if constexpr (Kind::GROUP != 0) {
            u64 at = ((u64)place.tile * w.groups() + (place.ktile >> w.group_shift)) * 16 + row % 16;
            value = w.scales[at] * value;
            if (w.mins) value = value + w.mins[at];
        }
        u32 to = order ? order[column] : column;
        if (out) out[to] = value;
        if (out_bf16) out_bf16[to] = f32_to_bf16(value);
    }
}
