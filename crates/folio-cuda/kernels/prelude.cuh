// What kernels are written in, besides plain CUDA C++: names for the instructions that have no plain name. Header-less, so that
// any NVRTC 12 or 13 compiles it. The host's form of the same names is in folio-emulator.
//
// Whole warps only: every lane takes part in shuffles, votes and matrix products. Compiled with `--fmad=false`: a sum of a product is
// fused where it says fmaf and nowhere else.

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(16) u32x4 { u32 x, y, z, w; };
struct alignas(8) u32x2 { u32 x, y; };

// `char* name`: the launch's dynamic shared memory, aligned to 16 bytes.
#define DYNAMIC_SHARED(name) extern __shared__ u32x4 name##_quads[]; char* name = (char*)name##_quads

// ---- warps

__device__ __forceinline__ u32 shuffle_xor(u32 value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
__device__ __forceinline__ float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
__device__ __forceinline__ u32 shuffle(u32 value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
__device__ __forceinline__ float shuffle(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
__device__ __forceinline__ u32 ballot(bool value) { return __ballot_sync(0xffffffffu, value); }
__device__ __forceinline__ void warp_sync() { __syncwarp(); }

// `d += a * b`, 16x16 by 16x8. Of lane `4 * g + c`: a = {(g, 2c), (g + 8, 2c), (g, 2c + 8), (g + 8, 2c + 8)} as (row, k), each a
// pair along k, the lower in the lower half; b = {2c, 2c + 8} of column g, pairs along k; d = {(g, 2c), (g, 2c + 1), (g + 8, 2c),
// (g + 8, 2c + 1)} as (row, column).
__device__ __forceinline__ void mma_bf16(float* d, const u32* a, const u32* b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_f16(float* d, const u32* a, const u32* b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- numbers

__device__ __forceinline__ float bf16_to_f32(u16 x) { return __uint_as_float((u32)x << 16); }
// To the nearest, ties to even; NaN stays NaN, with its upper bits.
__device__ __forceinline__ u16 f32_to_bf16(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)(bits >> 16 | 0x40);
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
// Two at once, the first in the lower half. Which NaN a NaN becomes is not said.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}
__device__ __forceinline__ float f16_to_f32(u16 x) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x));
    return out;
}
// To the nearest, ties to even; too large is infinite. Which NaN a NaN becomes is not said.
__device__ __forceinline__ u16 f32_to_f16(float x) {
    u16 out;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(x));
    return out;
}
__device__ __forceinline__ u32 pack_f16(float low, float high) {
    u32 out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}
// The f16 with the code's bits in their places has an exponent smaller by 8.
__device__ __forceinline__ float e4m3_to_f32(u8 x) {
    if ((x & 0x7f) == 0x7f) return __uint_as_float(0x7fc00000u);
    return f16_to_f32((u16)((x & 0x80) << 8 | (x & 0x7f) << 7)) * 256.0f;
}

// e^x, within 2^-21 of it, times 1 + |x| / 2^23. e^0 is 1; what is too small to be normal is 0.
__device__ __forceinline__ float exp_of(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x * 1.44269504f));
    return out;
}

// `a * b + c` of two bf16 each, every one rounded once.
__device__ __forceinline__ u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 out;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}

// ---- memory

__device__ __forceinline__ u32 shared_address(const void* at) {
    u32 address;
    asm("{ .reg .u64 wide; cvta.to.shared.u64 wide, %1; cvt.u32.u64 %0, wide; }" : "=r"(address) : "l"(at));
    return address;
}
// 16 bytes, both addresses multiples of 16. There when a wait says so.
__device__ __forceinline__ void cp_async16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
// Likewise, or 16 bytes of zero where there is nothing to read.
__device__ __forceinline__ void cp_async16(void* shared, const void* global, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the last N committed groups of this thread are there.
template <int N> __device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
// Four 8x8 matrices of 16-bit numbers out of shared memory: lane 8i + r names row r of the i-th, 16 bytes. Lane 4g + c gets of each its row g,
// columns 2c and 2c + 1; transposed, its column g, rows 2c and 2c + 1.
__device__ __forceinline__ void load_matrices(u32* out, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(u32* out, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(shared_address(row)) : "memory");
}
// What was there before. For counts: an order of floats must never come from it.
__device__ __forceinline__ u32 atomic_add(u32* at, u32 value) { return atomicAdd(at, value); }
__device__ __forceinline__ u64 atomic_add(u64* at, u64 value) { return atomicAdd(at, value); }
