// Weights that stand for themselves: bf16, f16, f32.

struct Bf16 {
    static constexpr u32 LOADS = 4, GROUP = 0, PARTS = 1, TABLE = 1;
    static __device__ void prepare(u32*) {}
    static __device__ __forceinline__ void fragment(const u32x4* words, u32 t, u32, const u32*, u32 (*a)[4]) {
        a[0][0] = words[t].x, a[0][1] = words[t].y, a[0][2] = words[t].z, a[0][3] = words[t].w;
    }
    static __device__ __forceinline__ float value(const u32* words, const Place& place, u32) {
        return bf16_to_f32((u16)(words[place.half + place.j / 2 * 2] >> 16 * (place.j % 2)));
    }
};

// An f16 is the sum of two bf16: the nearest, and what is left. The smaller goes first.
struct F16 {
    static constexpr u32 LOADS = 4, GROUP = 0, PARTS = 2, TABLE = 1;
    static __device__ void prepare(u32*) {}
    static __device__ __forceinline__ void fragment(const u32x4* words, u32 t, u32, const u32*, u32 (*a)[4]) {
        const u32 four[4] = {words[t].x, words[t].y, words[t].z, words[t].w};
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

LINEAR_KERNELS(bf16, Bf16)
LINEAR_KERNELS(f16, F16)

// f32 weights [column][row, padded to 32] and f32 rows: a lane is a weight row, a warp one of four slices of the columns, and each
// output one chain of fmaf over ascending columns of a slice. Grid: 32 weight rows, 8 rows of the batch.
extern "C" __global__ void __launch_bounds__(128) f32_8(const u32* meta, u32 count_word, const float* x, u32 x_stride,
                                                        const float* weights, u32 weight_rows, u32 columns, const float* bias,
                                                        float* out, u32 out_stride, u32 add) {
    __shared__ float sums[SLICES][8][32];
    u32 rows = meta[count_word], first = blockIdx.y * 8;
    if (first >= rows) return;
    u32 count = rows - first < 8 ? rows - first : 8;
    u32 lane = threadIdx.x % 32, slice = threadIdx.x / 32, padded = (weight_rows + 31) / 32 * 32;
    const float* w = weights + blockIdx.x * 32 + lane;
    float acc[8] = {};
    for (u32 k = columns * slice / SLICES, end = columns * (slice + 1) / SLICES; k < end; k++) {
        float weight = w[(u64)k * padded];
#pragma unroll
        for (u32 n = 0; n < 8; n++)
            if (n < count) acc[n] = fmaf(weight, x[(u64)(first + n) * x_stride + k], acc[n]);
    }
#pragma unroll
    for (u32 n = 0; n < 8; n++) sums[slice][n][lane] = acc[n];
    __syncthreads();
    Output to = {bias, out, out_stride, add};
    for (u32 n = slice; n < count; n += SLICES) {
        u32 row = blockIdx.x * 32 + lane;
        if (row < weight_rows) to.put(first + n, row, ((sums[0][n][lane] + sums[1][n][lane]) + sums[2][n][lane]) + sums[3][n][lane]);
    }
}

extern "C" __global__ void __launch_bounds__(256) f32_embed(const u32* meta, u32 first_row, const float* weights, u32 weight_rows,
                                                            u32 width, float* out, u32 out_stride, u16* out_bf16,
                                                            u32 out_bf16_stride) {
    if (blockIdx.x >= meta[0]) return;
    u32 row = meta[meta[8] + blockIdx.x] - first_row, padded = (weight_rows + 31) / 32 * 32;
    if (row >= weight_rows) return;
    for (u32 column = threadIdx.x; column < width || column < out_bf16_stride; column += blockDim.x) {
        float value = column < width ? weights[(u64)column * padded + row] : 0.0f;
        if (out && column < width) out[(u64)blockIdx.x * out_stride + column] = value;
        if (out_bf16 && column < out_bf16_stride) out_bf16[(u64)blockIdx.x * out_bf16_stride + column] = f32_to_bf16(value);
    }
}
