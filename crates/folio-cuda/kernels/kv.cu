// From rows [q heads | k heads | v heads] to the paged cache, and to the queries that attention reads.
//
// A pool's layout is in `kv.rs`, the arithmetic of each format in folio-model's `kv_format.rs`: the same bytes, bit for bit, from
// the same f32 values. One warp works on one head of one row. A nibble of int4: byte i of a token holds dims 2i (low) and 2i + 1.

// Cosines, then sines, of a row's position: [row][2 * half]. In f64, rounded once.
extern "C" __global__ void __launch_bounds__(128)
rope_table(const u32* meta, const float* inv_freq, u32 half, float scale, float* table) {
    u32 row = blockIdx.x;
    if (row >= meta[0]) return;
    double position = (double)meta[meta[9] + row];
    table += (u64)row * 2 * half;
    for (u32 i = threadIdx.x; i < half; i += blockDim.x) {
        double angle = position * (double)inv_freq[i];
        table[i] = (float)(cos(angle) * (double)scale);
        table[half + i] = (float)(sin(angle) * (double)scale);
    }
}

// New entries of block tables, put where they are kept. A block for each edit: where it goes (low, high word), where it lies among the
// words of the step, entries.
extern "C" __global__ void __launch_bounds__(128) set_tables(const u32* meta) {
    const u32* edit = meta + meta[16] + 4 * blockIdx.x;
    u32* table = (u32*)((u64)edit[1] << 32 | edit[0]);
    for (u32 i = threadIdx.x; i < edit[3]; i += blockDim.x) table[i] = meta[edit[2] + i];
}

__device__ __forceinline__ void normalize(float* x, const float* weight, u32 dim, float eps, u32 lane) {
    float square = 0.0f;
    for (u32 i = lane; i < dim; i += 32) square = fmaf(x[i], x[i], square);
    float inverse = 1.0f / sqrtf(warp_sum(square) / (float)dim + eps);
    for (u32 i = lane; i < dim; i += 32) x[i] = x[i] * inverse * weight[i];
    warp_sync();
}

__device__ __forceinline__ void rotate(float* x, const float* table, u32 half, u32 lane) {
    for (u32 i = lane; i < half; i += 32) {
        float cosine = table[i], sine = table[half + i], a = x[i], b = x[i + half];
        x[i] = a * cosine - b * sine;
        x[i + half] = b * cosine + a * sine;
    }
    warp_sync();
}

// The next bf16 that is not smaller.
__device__ __forceinline__ u16 round_up(float x) { return (u16)((__float_as_uint(x) + 0xffff) >> 16); }

__device__ __forceinline__ u32 nearest_level(float x) {
    float size = fabsf(x);
    u32 steps = (size > 12.0f) + (size > 24.5f) + (size > 37.5f) + (size > 51.0f) + (size > 66.5f) + (size > 85.5f) + (size > 111.5f);
    return __float_as_uint(x) >> 31 ? 7 - steps : 8 + steps;
}

// A sum in 16 lanes whose halves are then added; both halves of the warp have the same 16.
__device__ __forceinline__ float sum_of_lanes(float value) {
    for (int mask = 8; mask > 0; mask >>= 1) value += shuffle_xor(value, mask);
    return value;
}

// The scale of a rotated, finite vector, and 1 / the scale that the codes were made with.
__device__ __forceinline__ u16 int4_scale(const float* x, u32 dim, u32 lane, float* inverse) {
    float power = 0.0f;
    for (u32 i = lane % 16; i < dim; i += 16) power += x[i] * x[i];
    float scale = sqrtf(sum_of_lanes(power) / (float)dim) * (2.7326f / 127.0f);
    for (int round = 0; round < 2; round++) {
        *inverse = 1.0f / scale;
        float products = 0.0f, squares = 0.0f;
        for (u32 i = lane % 16; i < dim; i += 16) {
            float level = level_of(nearest_level(x[i] * *inverse));
            products += x[i] * level;
            squares += level * level;  // integers below 2^24: exact in every order
        }
        scale = sum_of_lanes(products) / sum_of_lanes(squares);
    }
    return f32_to_bf16(scale);
}

// Stores a head vector: codes at `codes`, the scale of a format that has one at `scale`.
template <int FORMAT> __device__ __forceinline__ void store(float* x, u32 dim, u8* codes, u16* scale, u32 lane) {
    if (FORMAT == F32) {
        for (u32 i = lane; i < dim; i += 32) ((float*)codes)[i] = x[i];
        return;
    }
    if (FORMAT == F16 || FORMAT == BF16) {
        for (u32 i = lane; i < dim; i += 32) ((u16*)codes)[i] = FORMAT == F16 ? f32_to_f16(x[i]) : f32_to_bf16(x[i]);
        return;
    }
    if (FORMAT == INT4) hadamard(x, dim, lane);
    float largest = 0.0f;
    bool finite = true;
    for (u32 i = lane; i < dim; i += 32) {
        largest = fmaxf(largest, fabsf(x[i]));
        finite = finite && (__float_as_uint(x[i]) & 0x7f800000u) != 0x7f800000u;
    }
    largest = warp_max(largest);
    finite = ballot(finite) == 0xffffffffu;
    bool nothing = !finite || largest < 8.881784e-16f;
    u16 stored = finite ? 0 : 0x7fc0;
    float inverse = 0.0f;
    if (!nothing) {
        if (FORMAT == INT4) {
            stored = int4_scale(x, dim, lane, &inverse);
        } else {
            stored = round_up(largest / (FORMAT == INT8 ? 127.0f : 448.0f));
            inverse = 1.0f / bf16_to_f32(stored);
        }
    }
    if (lane == 0) *scale = stored;
    if (FORMAT == INT8 || FORMAT == FP8) {
        for (u32 i = lane; i < dim; i += 32) {
            float y = x[i] * inverse;
            codes[i] = nothing ? 0 : FORMAT == INT8 ? (u8)(i8)(int)rintf(y) : (u8)to_e4m3(y);
        }
    } else {
        for (u32 i = lane; i < dim / 2; i += 32) {
            u32 low = nearest_level(x[2 * i] * inverse), high = nearest_level(x[2 * i + 1] * inverse);
            codes[i] = nothing ? 0x88 : (u8)(low | high << 4);
        }
    }
}

// A query as attention reads it: f32, f16 or bf16 by the cache's format, rotated where keys are; zero behind `dim`.
template <int FORMAT> __device__ __forceinline__ void put_query(float* x, u32 dim, void* out, u32 stride, u32 lane) {
    if (FORMAT == INT4) hadamard(x, dim, lane);
    for (u32 i = lane; i < stride; i += 32) {
        float value = i < dim ? x[i] : 0.0f;
        if (FORMAT == F32) {
            ((float*)out)[i] = value;
        } else {
            ((u16*)out)[i] = FORMAT == F16 ? f32_to_f16(value) : f32_to_bf16(value);
        }
    }
}

struct WriteKv {
    const u32* meta;
    u32 group;
    const float* qkv;
    u32 qkv_stride, heads, kv_heads, dim;
    const float *q_norm, *k_norm;
    float eps;
    const float* table;
    u32 half;
    u8* layer;
    u32 block_bytes, block_tokens;
    void* q;
    u32 q_stride;
};

template <int FORMAT> __device__ __forceinline__ void write_kv(const WriteKv& a) {
    __shared__ float heads[4][512];
    u32 row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, item = blockIdx.y * 4 + warp, rows = a.meta[0];
    if (row >= rows || item >= a.heads + 2 * a.kv_heads) return;
    float* x = heads[warp];
    const float* from = a.qkv + (u64)row * a.qkv_stride + item * a.dim;
    for (u32 i = lane; i < a.dim; i += 32) x[i] = from[i];
    warp_sync();
    bool query = item < a.heads, value = item >= a.heads + a.kv_heads;
    const float* norm = query ? a.q_norm : a.k_norm;
    if (!value && norm) normalize(x, norm, a.dim, a.eps, lane);
    if (!value && a.table) rotate(x, a.table + (u64)row * 2 * a.half, a.half, lane);
    if (query) {
        u64 at = ((u64)row * a.heads + item) * a.q_stride * (FORMAT == F32 ? 4 : 2);
        put_query<FORMAT>(x, a.dim, (u8*)a.q + at, a.q_stride, lane);
        return;
    }
    u32 slot = a.meta[a.meta[12] + a.group * rows + row], token = slot % a.block_tokens;
    u32 code_bytes = FORMAT == F32 ? 4 * a.dim : FORMAT == F16 || FORMAT == BF16 ? 2 * a.dim : FORMAT == INT4 ? a.dim / 2 : a.dim;
    u32 head = item - a.heads - (value ? a.kv_heads : 0), place = head * a.block_tokens + token, plane = a.kv_heads * a.block_tokens;
    u8* block = a.layer + (u64)(slot / a.block_tokens) * a.block_bytes;
    u16* scales = (u16*)(block + (u64)2 * plane * code_bytes);
    u32 index = place + (value ? plane : 0);
    store<FORMAT>(x, a.dim, block + (u64)index * code_bytes, scales + index, lane);
}

#define WRITE_KV(name, FORMAT)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(128)                                                                            \
    name(const u32* meta, u32 group, const float* qkv, u32 qkv_stride, u32 heads, u32 kv_heads, u32 dim, const float* q_norm,    \
         const float* k_norm, float eps, const float* table, u32 half, u8* layer, u32 block_bytes, u32 block_tokens, void* q,    \
         u32 q_stride) {                                                                                                         \
        WriteKv a = {meta, group, qkv, qkv_stride, heads, kv_heads, dim, q_norm, k_norm, eps, table, half, layer, block_bytes,   \
                     block_tokens, q, q_stride};                                                                                 \
        write_kv<FORMAT>(a);                                                                                                     \
    }

WRITE_KV(write_kv_f32, F32)
WRITE_KV(write_kv_f16, F16)
WRITE_KV(write_kv_bf16, BF16)
WRITE_KV(write_kv_int8, INT8)
WRITE_KV(write_kv_fp8, FP8)
WRITE_KV(write_kv_int4, INT4)
