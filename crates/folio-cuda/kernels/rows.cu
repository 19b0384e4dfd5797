// Operations on rows of f32 that are no product: norms, scaling, activations.
//
// One block works on one row. Who adds what, and in which order, follows from the row's width and the number of threads, which
// itself follows from the width: the same for every row of every batch. Planes that do not exist are null. Where a bf16 plane is
// written, what lies behind the width becomes zero.

// Where a row is read from: the r-th row, or the r-th of a list in the metadata. `list_word` is the header's word that says where
// the list lies; 0, which is no such word, is no list.
__device__ __forceinline__ u32 source_row(const u32* meta, u32 list_word, u32 row) {
    return list_word == 0 ? row : meta[meta[list_word] + row];
}

// The sum of a value of every thread, to all of them. At most 32 warps.
__device__ __forceinline__ float block_sum(float value) {
    __shared__ float sums[32];
    for (int mask = 16; mask > 0; mask >>= 1) value += shuffle_xor(value, mask);
    u32 warps = blockDim.x / 32;
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = sums[0];
    for (u32 warp = 1; warp < warps; warp++) sum += sums[warp];
    return sum;
}

// What a thread holds of a row and of a vector beside it, all read at once: a load behind a store would wait for it.
constexpr u32 HELD = 8;
struct Held {
    float x[HELD], weight[HELD];
    __device__ __forceinline__ Held(const float* row, const float* weights, u32 width) {
#pragma unroll
        for (u32 k = 0; k < HELD; k++) {
            u32 i = threadIdx.x + k * blockDim.x;
            x[k] = i < width ? row[i] : 0.0f;
            weight[k] = i < width ? weights[i] : 0.0f;
        }
    }
};

// 1 / sqrt(mean(x^2) + eps)
__device__ __forceinline__ float inverse_rms(const Held& held, const float* x, u32 width, float eps) {
    float square = 0.0f;
#pragma unroll
    for (u32 k = 0; k < HELD; k++) square = fmaf(held.x[k], held.x[k], square);
    for (u32 i = threadIdx.x + HELD * blockDim.x; i < width; i += blockDim.x) square = fmaf(x[i], x[i], square);
    return 1.0f / sqrtf(block_sum(square) / (float)width + eps);
}

// `each(i, x, weight)` for the columns of this thread.
template <class Each> __device__ __forceinline__ void for_each(const Held& held, const float* x, const float* weight, u32 width, Each each) {
#pragma unroll
    for (u32 k = 0; k < HELD; k++) {
        u32 i = threadIdx.x + k * blockDim.x;
        if (i < width) each(i, held.x[k], held.weight[k]);
    }
    for (u32 i = threadIdx.x + HELD * blockDim.x; i < width; i += blockDim.x) each(i, x[i], weight[i]);
}

// Writes one value of a row to the planes that exist.
__device__ __forceinline__ void put(float* full, u16* half, u32 i, float value) {
    if (full) full[i] = value;
    if (half) half[i] = f32_to_bf16(value);
}

__device__ __forceinline__ void clear_behind(u16* half, u32 width, u32 stride) {
    if (half) {
        for (u32 i = width + threadIdx.x; i < stride; i += blockDim.x) half[i] = 0;
    }
}

// out = x * weight / sqrt(mean(x^2) + eps), of every row or of those of a list.
extern "C" __global__ void __launch_bounds__(1024)
rms_norm(const u32* meta, u32 count_word, u32 list_word, const float* x, u32 x_stride, const float* weight, u32 width, float eps,
         float* full, u32 full_stride, u16* half, u32 half_stride) {
    u32 row = blockIdx.x;
    if (row >= meta[count_word]) return;
    x += (u64)source_row(meta, list_word, row) * x_stride;
    if (full) full += (u64)row * full_stride;
    if (half) half += (u64)row * half_stride;
    Held held(x, weight, width);
    float inverse = inverse_rms(held, x, width, eps);
    for_each(held, x, weight, width, [&](u32 i, float x, float weight) { put(full, half, i, x * inverse * weight); });
    clear_behind(half, width, half_stride);
}

// out += x * weight / sqrt(mean(x^2) + eps). The bf16 plane, if it exists, becomes what the f32 plane is.
extern "C" __global__ void __launch_bounds__(1024)
add_rms_norm(const u32* meta, u32 count_word, const float* x, u32 x_stride, const float* weight, u32 width, float eps, float* full,
             u32 full_stride, u16* half, u32 half_stride) {
    u32 row = blockIdx.x;
    if (row >= meta[count_word]) return;
    x += (u64)row * x_stride;
    full += (u64)row * full_stride;
    if (half) half += (u64)row * half_stride;
    Held held(x, weight, width);
    float inverse = inverse_rms(held, x, width, eps);
    for_each(held, x, weight, width, [&](u32 i, float x, float weight) { put(full, half, i, full[i] + x * inverse * weight); });
    clear_behind(half, width, half_stride);
}

// x *= by. The bf16 plane, if it exists, becomes what the f32 plane is.
extern "C" __global__ void __launch_bounds__(1024)
scale_rows(const u32* meta, u32 count_word, u32 width, float by, float* full, u32 full_stride, u16* half, u32 half_stride) {
    u32 row = blockIdx.x;
    if (row >= meta[count_word]) return;
    full += (u64)row * full_stride;
    if (half) half += (u64)row * half_stride;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) put(full, half, i, full[i] * by);
    clear_behind(half, width, half_stride);
}

// out = x
extern "C" __global__ void __launch_bounds__(1024)
copy_rows(const u32* meta, u32 count_word, const float* x, u32 x_stride, u32 width, float* full, u32 full_stride, u16* half,
          u32 half_stride) {
    u32 row = blockIdx.x;
    if (row >= meta[count_word]) return;
    x += (u64)row * x_stride;
    if (full) full += (u64)row * full_stride;
    if (half) half += (u64)row * half_stride;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) put(full, half, i, x[i]);
    clear_behind(half, width, half_stride);
}

// out = the rows of f32 that lie in the metadata, one behind the other, where the header's word says.
extern "C" __global__ void __launch_bounds__(1024)
input_rows(const u32* meta, u32 count_word, u32 at_word, u32 width, float* full, u32 full_stride, u16* half, u32 half_stride) {
    u32 row = blockIdx.x;
    if (row >= meta[count_word]) return;
    const float* x = (const float*)(meta + meta[at_word]) + (u64)row * width;
    if (full) full += (u64)row * full_stride;
    if (half) half += (u64)row * half_stride;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) put(full, half, i, x[i]);
    clear_behind(half, width, half_stride);
}

// x = cap * tanh(x / cap)
extern "C" __global__ void __launch_bounds__(1024)
softcap_rows(const u32* meta, u32 count_word, u32 width, float cap, float* x, u32 x_stride) {
    u32 row = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= meta[count_word] || i >= width) return;
    x += (u64)row * x_stride;
    x[i] = cap * tanhf(x[i] / cap);
}

// GELU is `gate / (1 + e^-2u)` of `u = sqrt(2 / pi) * (gate + 0.044715 * gate^3)`: no sum that cancels. A NaN stays one.
__device__ __forceinline__ float activated(u32 kind, float alpha, float limit, float gate, float up) {
    float power = gate;
    if (kind == 1) {
        power = gate * fmaf(gate * gate, 0.071354814f, 1.595769f);
    } else if (kind == 2) {
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
        power = alpha * gate;
        up = up + 1.0f;
    }
    return gate / (1.0f + expf(-power)) * up;
}

// Columns of a row that a block of `gate_rows` works on, for each of its threads.
constexpr u32 GATED = 4;

// out = activation(gate, up) of rows [gate | up]. Kinds: 0 SiLU, 1 GELU with tanh, 2 gpt-oss. Grid: rows, parts of a row.
extern "C" __global__ void __launch_bounds__(1024)
gate_rows(const u32* meta, u32 count_word, const float* x, u32 x_stride, u32 width, u32 kind, float alpha, float limit, float* full,
          u32 full_stride, u16* half, u32 half_stride) {
    u32 row = blockIdx.x;
    if (row >= meta[count_word]) return;
    x += (u64)row * x_stride;
    if (full) full += (u64)row * full_stride;
    if (half) half += (u64)row * half_stride;
    u32 first = blockIdx.y * GATED * blockDim.x + threadIdx.x;
    float gate[GATED], up[GATED];
#pragma unroll
    for (u32 k = 0; k < GATED; k++) {
        u32 i = first + k * blockDim.x;
        gate[k] = i < width ? x[i] : 0.0f;
        up[k] = i < width ? x[width + i] : 0.0f;
    }
#pragma unroll
    for (u32 k = 0; k < GATED; k++) {
        u32 i = first + k * blockDim.x;
        if (i < width) put(full, half, i, activated(kind, alpha, limit, gate[k], up[k]));
    }
    if (blockIdx.y == 0) clear_behind(half, width, half_stride);
}
