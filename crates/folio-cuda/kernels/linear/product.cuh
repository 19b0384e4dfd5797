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
// instruction (2: the value is a sum); `fragment`, the operand of instruction t of a chunk; `value`, one weight as a number.

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

template <class Kind> __device__ __forceinline__ void load_chunk(u32x4* words, const Weights& w, u32 tile, u32 chunk, u32 lane) {
    constexpr u32 COVERS = TILES / Kind::LOADS;
    u32 loads = (w.ktiles + COVERS - 1) / COVERS;
    const u32x4* from = w.codes + (u64)tile * loads * 32 + lane;
#pragma unroll
    for (u32 i = 0; i < Kind::LOADS; i++) {
        u32 load = chunk * Kind::LOADS + i;
        if (load < loads) words[i] = from[load * 32];
    }
}

// Adds one chunk to the accumulators of NT columns of 8. `b(n, t)` is the other operand.
template <class Kind, u32 NT, class B>
__device__ __forceinline__ void add_chunk(float (*acc)[4], const u32x4* words, const Weights& w, const u32* table, u32 tile,
                                          u32 chunk, u32 lane, const B& b) {
    if constexpr (Kind::GROUP == 0) {
#pragma unroll
        for (u32 t = 0; t < TILES; t++) {
            if (chunk * TILES + t >= w.ktiles) break;
            u32 a[Kind::PARTS][4];
            Kind::fragment(words, t, w.offset, table, a);
#pragma unroll
            for (u32 n = 0; n < NT; n++) {
                u32x2 x = b(n, t);
                u32 operand[2] = {x.x, x.y};
#pragma unroll
                for (u32 part = 0; part < Kind::PARTS; part++) mma_bf16(acc[n], a[part], operand);
            }
        }
    } else {
        const u32 ones[4] = {ONES, ONES, ONES, ONES};
#pragma unroll
        for (u32 t = 0; t < TILES; t += Kind::GROUP) {
            u32 ktile = chunk * TILES + t;
            if (ktile >= w.ktiles) break;
            u32 a[Kind::GROUP][1][4];
#pragma unroll
            for (u32 j = 0; j < Kind::GROUP; j++) Kind::fragment(words, t + j, w.offset, table, a[j]);
            u64 at = ((u64)tile * w.groups() + (ktile >> w.group_shift)) * 16 + lane / 4;
            float low = w.scales[at], high = w.scales[at + 8];
            float low_min = 0.0f, high_min = 0.0f;
            if (w.mins) low_min = w.mins[at], high_min = w.mins[at + 8];
#pragma unroll
            for (u32 n = 0; n < NT; n++) {
                float partial[4] = {0.0f, 0.0f, 0.0f, 0.0f}, sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (u32 j = 0; j < Kind::GROUP; j++) {
                    u32x2 x = b(n, t + j);
                    u32 operand[2] = {x.x, x.y};
                    mma_bf16(partial, a[j][0], operand);
                    if (w.mins) mma_bf16(sums, ones, operand);
                }
                acc[n][0] = fmaf(low, partial[0], acc[n][0]);
                acc[n][1] = fmaf(low, partial[1], acc[n][1]);
                acc[n][2] = fmaf(high, partial[2], acc[n][2]);
                acc[n][3] = fmaf(high, partial[3], acc[n][3]);
                if (w.mins) {
                    acc[n][0] = fmaf(low_min, sums[0], acc[n][0]);
                    acc[n][1] = fmaf(low_min, sums[1], acc[n][1]);
                    acc[n][2] = fmaf(high_min, sums[2], acc[n][2]);
                    acc[n][3] = fmaf(high_min, sums[3], acc[n][3]);
                }
            }
        }
    }
}

// Four neighbouring columns of a row, where `order` says which they are.
__device__ __forceinline__ u32x2 gathered(const u16* row, const u32* order, u32 column) {
    const u32* from = order + column;
    return {row[from[0]] | (u32)row[from[1]] << 16, row[from[2]] | (u32)row[from[3]] << 16};
}

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

// 16 weight rows and 8 * NT rows of the batch, a slice to each of 4 warps.
template <class Kind, u32 NT>
__device__ __forceinline__ void narrow(const Weights& w, const Part& part, const u16* x, u32 x_stride, const u32* order,
                                       const Rows& from, const Rows& to, const Output& out) {
    __shared__ u32 table[Kind::TABLE];
    __shared__ float sums[SLICES][16][8 * NT + 1];
    Kind::prepare(table);
    u32 lane = threadIdx.x % 32, slice = threadIdx.x / 32, tile = part.first / 16 + blockIdx.x;
    if (tile * 16 >= part.first + part.count) return;
    const u16* rows[NT];
#pragma unroll
    for (u32 n = 0; n < NT; n++) rows[n] = x + (u64)from.at(n * 8 + lane / 4) * x_stride;
    float acc[NT][4] = {};
    u32 chunks = w.chunks(), end = chunks * (slice + 1) / SLICES;
    // Loads of several chunks are under way at once.
    constexpr u32 DEPTH = 8 / Kind::LOADS;
    for (u32 chunk = chunks * slice / SLICES; chunk < end; chunk += DEPTH) {
        u32x4 words[DEPTH][Kind::LOADS];
#pragma unroll
        for (u32 i = 0; i < DEPTH; i++)
            if (chunk + i < end) load_chunk<Kind>(words[i], w, tile, chunk + i, lane);
#pragma unroll
        for (u32 i = 0; i < DEPTH; i++) {
            if (chunk + i >= end) break;
            add_chunk<Kind, NT>(acc, words[i], w, table, tile, chunk + i, lane, [&](u32 n, u32 t) {
                u32 column = ((chunk + i) * TILES + t) * 16 + lane % 4 * 4;
                return order ? gathered(rows[n], order, column) : *(const u32x2*)(rows[n] + column);
            });
        }
    }
#pragma unroll
    for (u32 n = 0; n < NT; n++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) sums[slice][lane / 4 + i / 2 * 8][n * 8 + lane % 4 * 2 + i % 2] = acc[n][i];
    __syncthreads();
    for (u32 i = threadIdx.x; i < 16 * 8 * NT; i += 128) {
        u32 row = i % 16, n = i / 16;
        u32 column = tile * 16 + row - part.first;      // wraps where it is before the part
        if (n < to.count && column < part.count)
            out.put(to.at(n), column, ((sums[0][row][n] + sums[1][row][n]) + sums[2][row][n]) + sums[3][row][n]);
    }
}

constexpr u32 WIDE_TILES = 8, WIDE_ROWS = 64, PITCH = 80;

// 128 weight rows, 16 to a warp, and 64 rows of the batch, whose columns come chunk by chunk through shared memory; slices one after
// the other.
template <class Kind>
__device__ __forceinline__ void wide(const Weights& w, const Part& part, const u16* x, u32 x_stride, const u32* order,
                                     const Rows& from, const Rows& to, const Output& out) {
    constexpr u32 NT = WIDE_ROWS / 8;
    __shared__ u32 table[Kind::TABLE];
    __shared__ u32x4 staged[2][WIDE_ROWS * PITCH / 8];
    Kind::prepare(table);
    u32 lane = threadIdx.x % 32, tile = part.first / 16 + blockIdx.x * WIDE_TILES + threadIdx.x / 32;
    bool active = tile * 16 < part.first + part.count;
    u32 chunks = w.chunks(), columns = w.ktiles * 16;
    auto stage = [&](u32 chunk) {
        u16* to = (u16*)staged[chunk % 2];
        for (u32 i = threadIdx.x; i < WIDE_ROWS * 8; i += 32 * WIDE_TILES) {
            u32 row = i / 8, column = chunk * 64 + i % 8 * 8;
            if (column >= columns) continue;
            const u16* source = x + (u64)from.at(row) * x_stride;
            u16* place = to + row * PITCH + i % 8 * 8;
            if (order)
                for (u32 j = 0; j < 8; j++) place[j] = source[order[column + j]];
            else
                cp_async16(place, source + column);
        }
        cp_async_commit();
    };
    float acc[NT][4] = {}, total[NT][4];
    u32 slice = 0;
    stage(0);
    for (u32 chunk = 0; chunk < chunks; chunk++) {
        u32x4 words[Kind::LOADS];
        if (active) load_chunk<Kind>(words, w, tile, chunk, lane);
        if (chunk + 1 < chunks) stage(chunk + 1);
        else cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        const u16* here = (const u16*)staged[chunk % 2] + lane / 4 * PITCH + lane % 4 * 4;
        if (active)
            add_chunk<Kind, NT>(acc, words, w, table, tile, chunk, lane,
                                [&](u32 n, u32 t) { return *(const u32x2*)(here + n * 8 * PITCH + t * 16); });
        // A slice may be empty; the last is not.
        while (slice < SLICES && chunks * (slice + 1) / SLICES <= chunk + 1) {
#pragma unroll
            for (u32 n = 0; n < NT; n++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    total[n][i] = slice == 0 ? acc[n][i] : total[n][i] + acc[n][i];
                    acc[n][i] = 0.0f;
                }
            slice++;
        }
        __syncthreads();
    }
    if (!active) return;
#pragma unroll
    for (u32 n = 0; n < NT; n++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 at = n * 8 + lane % 4 * 2 + i % 2, column = tile * 16 + lane / 4 + i / 2 * 8 - part.first;
            if (at < to.count && column < part.count) out.put(to.at(at), column, total[n][i]);
        }
}

// ---- kernels

#define WEIGHTS_PARAMETERS const u32x4 *codes, const float *scales, const float *mins, u32 weight_rows, u32 ktiles, u32 offset, u32 group_shift
#define WEIGHTS_OF {codes, scales, mins, weight_rows, ktiles, offset, group_shift}
#define PRODUCT_PARAMETERS                                                                                                     \
    const u32 *meta, u32 count_word, const u16 *x, u32 x_stride, const u32 *order, WEIGHTS_PARAMETERS, const float *bias,      \
        float *out, u32 out_stride, u32 add

// Grid: row tiles (or 8 of them), blocks of rows. Rows of the batch from `meta[count_word]`.
#define PRODUCT_KERNEL(name, threads, rows_of_a_block, compute)                                                                \
    extern "C" __global__ void __launch_bounds__(threads) name(PRODUCT_PARAMETERS) {                                          \
        u32 rows = meta[count_word], first = blockIdx.y * rows_of_a_block;                                                     \
        if (first >= rows) return;                                                                                             \
        u32 count = rows - first < rows_of_a_block ? rows - first : rows_of_a_block;                                           \
        Weights w = WEIGHTS_OF;                                                                                                \
        Rows batch = {nullptr, first, count, 1};                                                                                \
        compute(w, {0, weight_rows}, x, x_stride, order, batch, batch, {bias, out, out_stride, add});                          \
    }

#define LINEAR_KERNELS(prefix, Kind)                                                                                           \
    PRODUCT_KERNEL(prefix##_8, 128, 8, (narrow<Kind, 1>))                                                                      \
    PRODUCT_KERNEL(prefix##_32, 128, 32, (narrow<Kind, 4>))                                                                    \
    PRODUCT_KERNEL(prefix##_wide, 256, WIDE_ROWS, (wide<Kind>))                                                                \
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
