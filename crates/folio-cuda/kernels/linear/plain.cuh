// Weights that stand for themselves: bf16, f16, f32.

struct Bf16 {
    static constexpr u32 LOADS = 4, GROUP = 0, PARTS = 1, TABLE = 1;
    static __device__ void prepare(u32*) {}
    static __device__ __forceinline__ void fragment(const u32x4& word, u32, u32, const u32*, u32 (*a)[4]) {
        a[0][0] = word.x, a[0][1] = word.y, a[0][2] = word.z, a[0][3] = word.w;
    }
    static __device__ __forceinline__ float value(const u32* words, const Place& place, u32) {
        return bf16_to_f32((u16)(words[place.half + place.j / 2 * 2] >> 16 * (place.j % 2)));
    }
};

// An f16 is the sum of two bf16: the nearest, and what is left. The smaller goes first.
struct F16 {
    static constexpr u32 LOADS = 4, GROUP = 0, PARTS = 2, TABLE = 1;
    static __device__ void prepare(u32*) {}
    static __device__ __forceinline__ void fragment(const u32x4& word, u32, u32, const u32*, u32 (*a)[4]) {
        const u32 four[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float low = f16_to_f32((u16)four[i]), high = f16_to_f32((u16)(four[i] >> 16));
            u32 near = pack_bf16(low, high);
            a[0][i] = pack_bf16(low - bf16_to_f32((u16)near), high - bf16_to_f32((u16)(near >> 16)));
            a[1][i] = near;
        }
    }
    static __device__ __forceinline__ float value(const u32* words, const Place& place, u32) {
        return f16_to_f32((u16)(words[place.half + place.j / 2 * 2] >> 16 * (place.j % 2)));
    }
};

// f32 weights [column][row, padded to 32] and f32 rows: a lane is a weight row, a warp one of four slices of the columns, and each
// output one chain of fmaf over ascending columns of a slice. A block has 32 weight rows and 8 rows of the batch.
__device__ __forceinline__ void floats(const float* weights, u32 weight_rows, u32 columns, const Part& part, const float* x,
                                       u32 x_stride, const Rows& from, const Rows& to, const Output& out) {
    __shared__ float sums[SLICES][8][32];
    u32 lane = threadIdx.x % 32, slice = threadIdx.x / 32, padded = (weight_rows + 31) / 32 * 32;
    u32 first = part.first / 32 * 32 + blockIdx.x * 32, column = first + lane - part.first;
    if (first >= part.first + part.count) return;
    const float* w = weights + first + lane;
    const float* rows[8];
#pragma unroll
    for (u32 n = 0; n < 8; n++) rows[n] = x + (u64)from.at(n) * x_stride;
    float acc[8] = {};
    for (u32 k = columns * slice / SLICES, end = columns * (slice + 1) / SLICES; k < end; k++) {
        float weight = w[(u64)k * padded];
#pragma unroll
        for (u32 n = 0; n < 8; n++)
            if (n < from.count) acc[n] = fmaf(weight, rows[n][k], acc[n]);
    }
#pragma unroll
    for (u32 n = 0; n < 8; n++) sums[slice][n][lane] = acc[n];
    __syncthreads();
    if (column >= part.count) return;
    for (u32 n = slice; n < to.count; n += SLICES)
        out.put(to.at(n), column, ((sums[0][n][lane] + sums[1][n][lane]) + sums[2][n][lane]) + sums[3][n][lane]);
}
