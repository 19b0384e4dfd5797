// What kernels that write the cache and those that read it share: names of the formats, sums over a warp, the rotation of int4.

enum { F32 = 0, F16 = 1, BF16 = 2, INT8 = 3, FP8 = 4, INT4 = 5 };

__device__ __forceinline__ float warp_sum(float value) {
    for (int mask = 16; mask > 0; mask >>= 1) value += shuffle_xor(value, mask);
    return value;
}

__device__ __forceinline__ float warp_max(float value) {
    for (int mask = 16; mask > 0; mask >>= 1) value = fmaxf(value, shuffle_xor(value, mask));
    return value;
}

// The Walsh-Hadamard transform of blocks of the largest power of two that divides `dim`, in place, by one warp.
__device__ __forceinline__ void hadamard(float* x, u32 dim, u32 lane) {
    u32 size = dim & (0u - dim);
    for (u32 distance = 1; distance < size; distance *= 2) {
        for (u32 pair = lane; pair < dim / 2; pair += 32) {
            u32 i = pair / distance * 2 * distance + pair % distance;
            float a = x[i], b = x[i + distance];
            x[i] = a + b;
            x[i + distance] = a - b;
        }
        warp_sync();
    }
    float factor = 1.0f / sqrtf((float)size);
    for (u32 i = lane; i < dim; i += 32) x[i] *= factor;
    warp_sync();
}

// What a 4-bit code means: the levels from 8 on; those below are their mirror.
__device__ __forceinline__ float level_of(u32 code) {
    u32 i = code >= 8 ? code - 8 : 7 - code;
    float level = i == 0 ? 6.0f : i == 1 ? 18.0f : i == 2 ? 31.0f : i == 3 ? 44.0f : i == 4 ? 58.0f : i == 5 ? 75.0f : i == 6 ? 96.0f : 127.0f;
    return code >= 8 ? level : -level;
}
