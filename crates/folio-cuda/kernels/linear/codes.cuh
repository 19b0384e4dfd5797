// Weights that are small numbers with a scale, and sometimes a minimum, for every 16, 32 or 128 columns. Codes become bf16, exactly.

__device__ __forceinline__ u32 spread(u32 word, u32 half) {
    u32 two = word >> 16 * half;
    return (two & 0xff) | (two & 0xff00) << 8;
}

// One byte each, i8.
template <u32 G> struct Eight {
    static constexpr u32 LOADS = 2, GROUP = G, PARTS = 1, TABLE = 1;
    static __device__ void prepare(u32*) {}
    // 128 + the low seven bits, less 128, or 256 where the sign is set.
    static __device__ __forceinline__ u32 pair(u32 bytes) {
        return fma_bf16x2((bytes & 0x007f007f) | 0x43004300, 0x3f803f80, (bytes & 0x00800080) | 0xc300c300);
    }
    static __device__ __forceinline__ void fragment(const u32x4& four, u32 t, u32, const u32*, u32 (*a)[4]) {
        u32 low = t % 2 ? four.z : four.x, high = t % 2 ? four.w : four.y;
        a[0][0] = pair(spread(low, 0)), a[0][1] = pair(spread(high, 0));
        a[0][2] = pair(spread(low, 1)), a[0][3] = pair(spread(high, 1));
    }
    static __device__ __forceinline__ float value(const u32* words, const Place& place, u32) {
        return (float)(i8)(words[place.ktile % 2 * 2 + place.half] >> 8 * place.j);
    }
};

// One byte each, e4m3 without NaN.
struct Fp8 {
    static constexpr u32 LOADS = 2, GROUP = 2, PARTS = 1, TABLE = 1;
    static __device__ void prepare(u32*) {}
    // Its bits in the places of a bf16 have an exponent smaller by 120.
    static __device__ __forceinline__ u32 pair(u32 bytes) {
        return fma_bf16x2((bytes & 0x00800080) << 8 | (bytes & 0x007f007f) << 4, 0x7b807b80, 0x80008000);
    }
    static __device__ __forceinline__ void fragment(const u32x4& four, u32 t, u32, const u32*, u32 (*a)[4]) {
        u32 low = t % 2 ? four.z : four.x, high = t % 2 ? four.w : four.y;
        a[0][0] = pair(spread(low, 0)), a[0][1] = pair(spread(high, 0));
        a[0][2] = pair(spread(low, 1)), a[0][3] = pair(spread(high, 1));
    }
    static __device__ __forceinline__ float value(const u32* words, const Place& place, u32) {
        return e4m3_to_f32((u8)(words[place.ktile % 2 * 2 + place.half] >> 8 * place.j));
    }
};

// Nibbles: operand register i of an instruction's word is bits 4i.. of both halves.
__device__ __forceinline__ u32 word_of(const u32x4& four, u32 t) {
    return t == 0 ? four.x : t == 1 ? four.y : t == 2 ? four.z : four.w;
}
__device__ __forceinline__ u32 nibble(const u32* words, const Place& place) {
    return words[place.ktile % 4] >> (16 * (place.j % 2) + 4 * (place.half + place.j / 2 * 2)) & 15;
}

// The number less `offset`.
template <u32 G> struct Four {
    static constexpr u32 LOADS = 1, GROUP = G, PARTS = 1, TABLE = 1;
    static __device__ void prepare(u32*) {}
    static __device__ __forceinline__ void fragment(const u32x4& four, u32 t, u32 offset, const u32*, u32 (*a)[4]) {
        u32 word = word_of(four, t), less = 0xc300c300 + offset * 0x00010001;
#pragma unroll
        for (u32 i = 0; i < 4; i++) a[0][i] = fma_bf16x2((word >> 4 * i & 0x000f000f) | 0x43004300, 0x3f803f80, less);
    }
    static __device__ __forceinline__ float value(const u32* words, const Place& place, u32 offset) {
        return (float)nibble(words, place) - (float)offset;
    }
};

// E2M1, doubled: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives.
struct Mx4 {
    static constexpr u32 LOADS = 1, GROUP = 2, PARTS = 1, TABLE = 1;
    static __device__ void prepare(u32*) {}
    // Its bits in the places of a bf16 have an exponent smaller by 126.
    static __device__ __forceinline__ u32 pair(u32 two) {
        return fma_bf16x2((two & 0x00080008) << 12 | (two & 0x00070007) << 6, 0x7f007f00, 0x80008000);
    }
    static __device__ __forceinline__ void fragment(const u32x4& four, u32 t, u32, const u32*, u32 (*a)[4]) {
        u32 word = word_of(four, t);
#pragma unroll
        for (u32 i = 0; i < 4; i++) a[0][i] = pair(word >> 4 * i & 0x000f000f);
    }
    static __device__ __forceinline__ float value(const u32* words, const Place& place, u32) {
        return bf16_to_f32((u16)pair(nibble(words, place)));
    }
};

__constant__ i8 IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Indices into a table of sixteen values; shared memory has it for two at once.
struct Iq4 {
    static constexpr u32 LOADS = 1, GROUP = 2, PARTS = 1, TABLE = 256;
    static __device__ void prepare(u32* table) {
        for (u32 i = threadIdx.x; i < 256; i += blockDim.x)
            table[i] = pack_bf16((float)IQ4_VALUES[i % 16], (float)IQ4_VALUES[i / 16]);
        __syncthreads();
    }
    static __device__ __forceinline__ void fragment(const u32x4& four, u32 t, u32, const u32* table, u32 (*a)[4]) {
        u32 word = word_of(four, t);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 two = word >> 4 * i & 0x000f000f;
            a[0][i] = table[(two | two >> 12) & 255];
        }
    }
    static __device__ __forceinline__ float value(const u32* words, const Place& place, u32) {
        return (float)IQ4_VALUES[nibble(words, place)];
    }
};
