// Kernels that try the emulator: right ones, and ones that are wrong on purpose.

extern "C" __global__ void reverse(u32* out) {
    DYNAMIC_SHARED(shared);
    u32* words = (u32*)shared;
    words[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = words[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void reverse_unsafe(u32* out) {
    DYNAMIC_SHARED(shared);
    u32* words = (u32*)shared;
    words[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = words[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void half_barrier(u32* out) {
    if (threadIdx.x < 32) __syncthreads();
    out[threadIdx.x] = 1;
}

extern "C" __global__ void two_barriers(u32* out) {
    if (threadIdx.x % 2 == 0)
        __syncthreads();
    else
        __syncthreads();
    out[threadIdx.x] = 1;
}

extern "C" __global__ void half_shuffle(u32* out) {
    if (threadIdx.x % 32 < 16) out[threadIdx.x] = shuffle_xor(threadIdx.x, 1);
}

extern "C" __global__ void warps(u32* out) {
    float sum = (float)threadIdx.x;
    for (int step = 16; step > 0; step /= 2) sum += shuffle_xor(sum, step);
    u32* to = out + 4 * threadIdx.x;
    to[0] = __float_as_uint(sum);
    to[1] = shuffle(threadIdx.x, (threadIdx.x + 5) % 32);
    to[2] = ballot(threadIdx.x % 3 == 0);
    __shared__ u32 words[64];
    words[threadIdx.x] = threadIdx.x;
    warp_sync();
    to[3] = words[threadIdx.x ^ 1] * 2;
}

template <class Pack> __device__ void tile(const float* a, const float* b, float* d, u32* as, u32* bs, float* ds, Pack pack) {
    u32 g = threadIdx.x / 4, c = threadIdx.x % 4 * 2;
    for (u32 i = 0; i < 4; i++) {
        const float* at = a + (g + i % 2 * 8) * 16 + c + i / 2 * 8;
        as[i] = pack(at[0], at[1]);
        ds[i] = d[(g + i / 2 * 8) * 8 + c + i % 2];
    }
    for (u32 i = 0; i < 2; i++) bs[i] = pack(b[(c + 8 * i) * 8 + g], b[(c + 8 * i + 1) * 8 + g]);
}

__device__ void store(float* d, const float* ds) {
    u32 g = threadIdx.x / 4, c = threadIdx.x % 4 * 2;
    for (u32 i = 0; i < 4; i++) d[(g + i / 2 * 8) * 8 + c + i % 2] = ds[i];
}

extern "C" __global__ void product(const float* a, const float* b, float* d) {
    u32 as[4], bs[2];
    float ds[4];
    tile(a, b, d, as, bs, ds, [](float low, float high) { return pack_bf16(low, high); });
    mma_bf16(ds, as, bs);
    store(d, ds);
}

extern "C" __global__ void product_f16(const float* a, const float* b, float* d) {
    u32 as[4], bs[2];
    float ds[4];
    tile(a, b, d, as, bs, ds, [](float low, float high) { return pack_f16(low, high); });
    mma_f16(ds, as, bs);
    store(d, ds);
}

__device__ __forceinline__ void begin_both(char* shared, const u32* from) {
    cp_async16(shared + 16 * threadIdx.x, from + 4 * threadIdx.x);
    cp_async_commit();
    cp_async16(shared + 1024 + 16 * threadIdx.x, from + 256 + 4 * threadIdx.x);
    cp_async_commit();
}

extern "C" __global__ void staged(const u32* from, u32* to) {
    DYNAMIC_SHARED(shared);
    begin_both(shared, from);
    cp_async_wait<1>();
    __syncthreads();
    for (u32 i = threadIdx.x; i < 256; i += 64) to[i] = ((u32*)shared)[i];
    cp_async_wait<0>();
    __syncthreads();
    for (u32 i = threadIdx.x; i < 256; i += 64) to[256 + i] = ((u32*)shared)[256 + i];
}

extern "C" __global__ void staged_too_early(const u32* from, u32* to) {
    DYNAMIC_SHARED(shared);
    begin_both(shared, from);
    cp_async_wait<1>();
    __syncthreads();
    for (u32 i = threadIdx.x; i < 512; i += 64) to[i] = ((u32*)shared)[i];
}

extern "C" __global__ void unaligned_copy(const u32* from) {
    DYNAMIC_SHARED(shared);
    cp_async16(shared, from + 1);
}

extern "C" __global__ void fill(float* out, u32 count, float value) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = value;
}

extern "C" __global__ void past_the_end(float* out, u32 count) { out[count + threadIdx.x] = 1.0f; }

extern "C" __global__ void own_shared(u32* out) {
    DYNAMIC_SHARED(shared);
    __shared__ u32 words[64];
    words[threadIdx.x] = threadIdx.x + blockIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 sum = 0;
        for (u32 i = 0; i < 64; i++) sum += words[i];
        out[2 * blockIdx.x] = sum;
        out[2 * blockIdx.x + 1] = ((u32*)shared)[63];
        for (u32 i = 0; i < 64; i++) ((u32*)shared)[i] = 0;
    }
}

extern "C" __global__ void convert(const u32* from, u32* to, u32 count) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float value = __uint_as_float(from[i]);
    to[4 * i] = f32_to_bf16(value);
    to[4 * i + 1] = f32_to_f16(value);
    to[4 * i + 2] = __float_as_uint(f16_to_f32((u16)(from[i] >> 16)));
    to[4 * i + 3] = __float_as_uint(e4m3_to_f32((u8)(from[i] >> 16)));
}

extern "C" __global__ void counts(u32* out) { atomic_add(out, 1); }
