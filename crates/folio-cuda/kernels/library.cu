// What stands around products of a library: trying its algorithms, the rows it reads and what becomes of the rows it writes.
//
// Matrices here are row-major. Weights are `[n, k]` in bf16 or e4m3, rows of the batch `[rows, k]` in the same type.

__device__ __forceinline__ u32 noise(u32 x, u32 salt) {
    x += salt * 0x9e3779b9u;
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ x >> 16;
}

// ---- trying an algorithm

// Row r of `[rows, columns]` is row `r % period` of what is drawn with `salt`. Whole numbers are -2 to 2, whose products any order sums
// exactly; others are spread over enough binades that hardly two orders give the same bits.
extern "C" __global__ void __launch_bounds__(256) try_fill_bf16(u16* out, u32 rows, u32 columns, u32 period, u32 salt, u32 whole) {
    u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
    if (at >= (u64)rows * columns) return;
    u32 bits = noise((u32)(at / columns % period) * columns + (u32)(at % columns), salt);
    out[at] = whole ? f32_to_bf16((float)((int)(bits % 5) - 2)) : (u16)((bits & 0x83ff) + 0x3c00);
}
extern "C" __global__ void __launch_bounds__(256) try_fill_fp8(u8* out, u32 rows, u32 columns, u32 period, u32 salt, u32 whole) {
    u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
    if (at >= (u64)rows * columns) return;
    u32 bits = noise((u32)(at / columns % period) * columns + (u32)(at % columns), salt);
    u32 any = (bits & 0x7f) == 0x7f ? bits ^ 1 : bits;
    out[at] = (u8)(whole ? to_e4m3((float)((int)(bits % 5) - 2)) : any);
}

struct Bf16s {
    const u16* at;
    __device__ __forceinline__ float operator[](u64 i) const { return bf16_to_f32(at[i]); }
};
struct Fp8s {
    const u8* at;
    __device__ __forceinline__ float operator[](u64 i) const { return e4m3_to_f32(at[i]); }
};

// Counts elements of a product of whole numbers that are not what they are. A warp has one. Grid: rows, n / 8.
template <class Values>
__device__ __forceinline__ void count_wrong(Values x, Values w, const float* out, u32 out_stride, u32 n, u32 k, u32* count) {
    u32 row = blockIdx.x, column = blockIdx.y * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (column >= n) return;
    float sum = 0.0f;
    for (u32 i = lane; i < k; i += 32) sum = fmaf(x[(u64)row * k + i], w[(u64)column * k + i], sum);
    sum = warp_sum(sum);
    // A NaN is not equal either.
    if (lane == 0 && !(out[(u64)row * out_stride + column] == sum)) atomic_add(count, 1u);
}
extern "C" __global__ void __launch_bounds__(256)
try_exact_bf16(const u16* x, const u16* w, const float* out, u32 out_stride, u32 n, u32 k, u32* count) {
    count_wrong(Bf16s{x}, Bf16s{w}, out, out_stride, n, k, count);
}
extern "C" __global__ void __launch_bounds__(256)
try_exact_fp8(const u8* x, const u8* w, const float* out, u32 out_stride, u32 n, u32 k, u32* count) {
    count_wrong(Fp8s{x}, Fp8s{w}, out, out_stride, n, k, count);
}

// Counts elements of rows `first..` that have not the bits of row `% period` of `base`. Grid: rows, n / 256.
extern "C" __global__ void __launch_bounds__(256)
try_same(const u32* out, const u32* base, u32 stride, u32 n, u32 first, u32 period, u32* count) {
    u32 column = blockIdx.y * 256 + threadIdx.x;
    if (column >= n) return;
    u32 found = out[(u64)blockIdx.x * stride + column], want = base[(u64)((first + blockIdx.x) % period) * stride + column];
    if (found != want) atomic_add(count, 1u);
}

// ---- weights

// From the order in which our own kernels load them. One thread writes one weight; grid: weights / 256.
extern "C" __global__ void __launch_bounds__(256) rows_of_sixteen(const u16* packed, u32 rows, u32 columns, u32 loads, u16* out) {
    u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
    if (at >= (u64)rows * columns) return;
    u32 row = (u32)(at / columns), column = (u32)(at % columns), j = column % 4;
    u64 load = ((u64)(row / 16) * loads + column / 16) * 32 + row % 8 * 4 + column % 16 / 4;
    out[at] = packed[load * 8 + (row % 16 / 8 + j / 2 * 2) * 2 + j % 2];
}
extern "C" __global__ void __launch_bounds__(256) rows_of_eight(const u8* packed, u32 rows, u32 columns, u32 loads, u8* out) {
    u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
    if (at >= (u64)rows * columns) return;
    u32 row = (u32)(at / columns), column = (u32)(at % columns);
    u64 load = ((u64)(row / 16) * loads + column / 32) * 32 + row % 8 * 4 + column % 16 / 4;
    out[at] = packed[load * 16 + 4 * (column / 16 % 2 * 2 + row % 16 / 8) + column % 4];
}

// ---- rows of the batch

// Row r becomes e4m3 codes and a scale: its largest magnitude / 448, or 1 where all are zero. One block has one row and depends on
// nothing else. What is not a number, or infinite, makes codes that are not numbers.
extern "C" __global__ void __launch_bounds__(256)
quantize_rows(const u32* meta, u32 count_word, const u16* x, u32 x_stride, u32 k, u8* codes, float* scales) {
    __shared__ float most[8];
    u32 row = blockIdx.x;
    if (row >= meta[count_word]) return;
    x += (u64)row * x_stride;
    codes += (u64)row * k;
    float size = 0.0f;
    for (u32 i = threadIdx.x; i < k; i += 256) size = fmaxf(size, fabsf(bf16_to_f32(x[i])));
    size = warp_max(size);
    if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = size;
    __syncthreads();
    size = most[0];
    for (u32 warp = 1; warp < 8; warp++) size = fmaxf(size, most[warp]);
    float scale = size == 0.0f ? 1.0f : size / 448.0f;
    for (u32 i = threadIdx.x; i < k; i += 256) {
        float value = bf16_to_f32(x[i]) / scale;
        codes[i] = value != value ? 0x7f : (u8)to_e4m3(value);
    }
    if (threadIdx.x == 0) scales[row] = scale;
}

// out = sum * row's scale * column's scale + bias, or out += that. Scales and bias that do not exist are null; `sums` may be `out`.
// Grid: rows, n / 256.
extern "C" __global__ void __launch_bounds__(256)
finish_rows(const u32* meta, u32 count_word, const float* sums, u32 sums_stride, u32 n, const float* row_scales,
            const float* column_scales, const float* bias, float* out, u32 out_stride, u32 add) {
    u32 row = blockIdx.x, column = blockIdx.y * 256 + threadIdx.x;
    if (row >= meta[count_word] || column >= n) return;
    float value = sums[(u64)row * sums_stride + column];
    if (row_scales) value = value * row_scales[row] * column_scales[column];
    if (bias) value = value + bias[column];
    float* to = out + (u64)row * out_stride + column;
    *to = add ? *to + value : value;
}
