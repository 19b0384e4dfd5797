// Codes of e4m3.

// The nearest e4m3 code, ties to even, at most 448.
__device__ __forceinline__ u32 to_e4m3(float x) {
    u32 sign = __float_as_uint(x) >> 24 & 0x80, bits = __float_as_uint(fabsf(x)), code;
    if (fabsf(x) < 0.015625f) {
        code = (u32)rintf(fabsf(x) * 512.0f);
    } else {
        code = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120u << 3);
    }
    return sign | (code < 0x7e ? code : 0x7e);
}
