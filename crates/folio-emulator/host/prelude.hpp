// What kernels are written in, on the host: the same names as folio-cuda's `prelude.cuh`, and the words of CUDA that it leaves to
// the compiler.
//
// Owns: the meaning of each name where there is no device. Where a device leaves something undefined, this makes it visible: memory
// that an asynchronous copy has not reached is NaN until the thread waits for it.

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(16) u32x4 { u32 x, y, z, w; };
struct alignas(8) u32x2 { u32 x, y; };

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __shared__ static thread_local
#define __constant__ static const
#define __launch_bounds__(...)
#define DYNAMIC_SHARED(name) char* name = emu::machine.dynamic

namespace emu {
struct ThreadIdx { unsigned x; };
struct BlockDim { unsigned x; };
}  // namespace emu
#define threadIdx (emu::ThreadIdx{emu::machine.self->x})
#define blockDim (emu::BlockDim{emu::machine.launch->threads})
#define blockIdx (emu::machine.block)
#define gridDim (emu::machine.grid)
#define __syncthreads() emu::wait(emu::State::Barrier, __LINE__)

static inline u32 __float_as_uint(float x) { u32 bits; memcpy(&bits, &x, 4); return bits; }
static inline float __uint_as_float(u32 bits) { float x; memcpy(&x, &bits, 4); return x; }

// ---- warps

static inline u32 shuffle_xor(u32 value, int mask, int line = __builtin_LINE()) { return emu::warp(emu::Op::ShuffleXor, value, mask, line); }
static inline float shuffle_xor(float value, int mask, int line = __builtin_LINE()) {
    return __uint_as_float(emu::warp(emu::Op::ShuffleXor, __float_as_uint(value), mask, line));
}
static inline u32 shuffle(u32 value, int lane, int line = __builtin_LINE()) { return emu::warp(emu::Op::Shuffle, value, lane, line); }
static inline float shuffle(float value, int lane, int line = __builtin_LINE()) {
    return __uint_as_float(emu::warp(emu::Op::Shuffle, __float_as_uint(value), lane, line));
}
static inline u32 ballot(bool value, int line = __builtin_LINE()) { return emu::warp(emu::Op::Ballot, value, 0, line); }
static inline void warp_sync(int line = __builtin_LINE()) { emu::warp(emu::Op::Sync, 0, 0, line); }

static inline void mma_bf16(float* d, const u32* a, const u32* b, int line = __builtin_LINE()) {
    emu::Fiber* self = emu::machine.self;
    self->d = d, self->a = a, self->b = b;
    emu::warp(emu::Op::MmaBf16, 0, 0, line);
}
static inline void mma_f16(float* d, const u32* a, const u32* b, int line = __builtin_LINE()) {
    emu::Fiber* self = emu::machine.self;
    self->d = d, self->a = a, self->b = b;
    emu::warp(emu::Op::MmaF16, 0, 0, line);
}

// ---- numbers

static inline float bf16_to_f32(u16 x) { return __uint_as_float(u32(x) << 16); }
static inline u16 f32_to_bf16(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return u16(bits >> 16 | 0x40);
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static inline u32 pack_bf16(float low, float high) { return f32_to_bf16(low) | u32(f32_to_bf16(high)) << 16; }
static inline float f16_to_f32(u16 x) { return float(emu::f16(x)); }
static inline u16 f32_to_f16(float x) {
    u32 bits = __float_as_uint(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return u16(sign | 0x7e00);
    if (size >= 0x477ff000) return u16(sign | 0x7c00);      // 65,520 and more round to infinity
    if (size < 0x38800000) {                                // subnormal: 2^-24 is its unit
        float units = __uint_as_float(size) * 0x1p24f;
        return u16(sign | u32(rintf(units)));
    }
    return u16(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
}
static inline u32 pack_f16(float low, float high) { return f32_to_f16(low) | u32(f32_to_f16(high)) << 16; }
static inline float e4m3_to_f32(u8 x) {
    if ((x & 0x7f) == 0x7f) return NAN;
    return f16_to_f32(u16((x & 0x80) << 8 | (x & 0x7f) << 7)) * 256.0f;
}

static inline float exp_of(float x) { return exp2f(x * 1.44269504f); }

static inline u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    // Products of bf16 are exact in f64.
    auto one = [&](int shift) { return float(emu::bf16(a >> shift & 0xffff) * emu::bf16(b >> shift & 0xffff) + emu::bf16(c >> shift & 0xffff)); };
    return pack_bf16(one(0), one(16));
}

// ---- memory

alignas(16) static const u8 emu_zeros[16] = {};
static inline void cp_async16(void* shared, const void* global, bool there, int line = __builtin_LINE()) {
    emu::Fiber* self = emu::machine.self;
    if (!there) global = emu_zeros;
    if (((uintptr_t)shared | (uintptr_t)global) % 16) emu::fail("an asynchronous copy between addresses that are not multiples of 16", line);
    if (self->copies_len == emu::MOST_COPIES) emu::fail("more asynchronous copies than the emulator keeps", line);
    self->copies[self->copies_len++] = {shared, global, self->group};
    memset(shared, 0xff, 16);
}
static inline void cp_async16(void* shared, const void* global, int line = __builtin_LINE()) { cp_async16(shared, global, true, line); }
static inline void cp_async_commit() { emu::machine.self->group++; }
template <int N> static inline void cp_async_wait() {
    emu::Fiber* self = emu::machine.self;
    unsigned kept = 0;
    for (unsigned i = 0; i < self->copies_len; i++) {
        emu::Copy copy = self->copies[i];
        if (copy.group + N < self->group) memcpy(copy.to, copy.from, 16);
        else self->copies[kept++] = copy;
    }
    self->copies_len = kept;
}
static inline const u8* row_of(const void* row, unsigned lane, int line) {
    u64 low = emu::warp(emu::Op::Shuffle, u32((u64)row), lane, line), high = emu::warp(emu::Op::Shuffle, u32((u64)row >> 32), lane, line);
    return (const u8*)(high << 32 | low);
}
static inline void load_matrices(u32* out, const void* row, int line = __builtin_LINE()) {
    unsigned lane = threadIdx.x % 32;
    if ((uintptr_t)row % 16) emu::fail("a row of a matrix at an address that is no multiple of 16", line);
    for (unsigned i = 0; i < 4; i++) memcpy(&out[i], row_of(row, 8 * i + lane / 4, line) + lane % 4 * 4, 4);
    warp_sync(line);
}
static inline void load_matrices_transposed(u32* out, const void* row, int line = __builtin_LINE()) {
    unsigned lane = threadIdx.x % 32;
    if ((uintptr_t)row % 16) emu::fail("a row of a matrix at an address that is no multiple of 16", line);
    for (unsigned i = 0; i < 4; i++) {
        u16 low, high;
        memcpy(&low, row_of(row, 8 * i + lane % 4 * 2, line) + lane / 4 * 2, 2);
        memcpy(&high, row_of(row, 8 * i + lane % 4 * 2 + 1, line) + lane / 4 * 2, 2);
        out[i] = low | u32(high) << 16;
    }
    warp_sync(line);
}
static inline u32 atomic_add(u32* at, u32 value) { u32 old = *at; *at += value; return old; }
static inline u64 atomic_add(u64* at, u64 value) { u64 old = *at; *at += value; return old; }
