// What of attention needs no tensor cores: the merge of split tiles, and caches in f32. See attention.cuh.

// Rows of tiles that were split: their chunks folded, one warp a row.
template <bool ROTATED> __device__ __forceinline__ void merge(const Attention& a) {
    __shared__ float sums[4][256];
    if (blockIdx.x >= a.meta[5]) return;
    Tile tile = tile_of(a, blockIdx.x);
    if (!tile.split) return;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, kv_head = blockIdx.y, dims = up(a.dim, 16);
    for (u32 row = warp; row < tile.rows; row += 4) {
        u32 position = tile.position + row / tile.size;
        float m = __uint_as_float(0xff800000u), l = 0.0f, o[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
        for (u32 chunk = tile.first_chunk; chunk <= tile.last_chunk; chunk++) {
            if (!attends(a, position, 256 * chunk, 256)) continue;
            u64 index = (((u64)blockIdx.x * a.kv_heads + kv_head) * a.split + chunk - tile.first_chunk) * a.tile_rows + row;
            const float* part = a.partials + index * (dims + 2);
            float kept, added;
            weigh(m, part[dims], kept, added);
            l = fold(l, kept, part[dims + 1], added);
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                if (lane + 32 * i < a.dim) o[i] = fold(o[i], kept, part[lane + 32 * i], added);
            }
        }
        warp_sync();
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            if (lane + 32 * i < a.dim) sums[warp][lane + 32 * i] = o[i];
        }
        warp_sync();
        finish(a, ROTATED, sums[warp], m, l, tile.first_row + row / tile.size, kv_head * tile.size + row % tile.size, lane);
    }
}

extern "C" __global__ void __launch_bounds__(128) attention_merge(PARAMETERS) {
    Attention a = ARGUMENTS;
    merge<false>(a);
}

extern "C" __global__ void __launch_bounds__(128) attention_merge_rotated(PARAMETERS) {
    Attention a = ARGUMENTS;
    merge<true>(a);
}

// A cache in f32: one warp for each row, 32 positions at a time from multiples of 32, all in f32.
extern "C" __global__ void __launch_bounds__(128) attention_f32(PARAMETERS) {
    Attention a = ARGUMENTS;
    __shared__ float sums[4][256];
    u32 row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = 4 * blockIdx.y + warp;
    if (row >= a.meta[0] || head >= a.heads) return;
    const u32* span = a.meta + a.meta[11] + 8 * a.meta[a.meta[10] + row];
    const u32* table = table_of(a, span);
    u32 last = span[2] + row - span[0], first = first_attended(a, last), kv_head = head / (a.heads / a.kv_heads);
    const float* query = (const float*)a.q + ((u64)row * a.heads + head) * up(a.dim, 16);
    float m = __uint_as_float(0xff800000u), l = 0.0f, o[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    for (u32 start = first / 32 * 32; start <= last; start += 32) {
        u32 position = start + lane, from = first > start ? first - start : 0, to = last - start < 31 ? last - start : 31;
        const float *key = 0, *value = 0;
        float s = __uint_as_float(0xff800000u);
        if (position >= first && position <= last) {
            const float* block = (const float*)(a.layer + (u64)table[position / a.block_tokens] * a.block_bytes);
            key = block + (u64)(kv_head * a.block_tokens + position % a.block_tokens) * a.dim;
            value = key + (u64)a.kv_heads * a.block_tokens * a.dim;
            s = 0.0f;
            for (u32 d = 0; d < a.dim; d++) s = fmaf(query[d], key[d], s);
            s *= a.scale;
            if (a.softcap > 0.0f) s = a.softcap * tanhf(s / a.softcap);
        }
        float kept, added, p, part[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
        float top = warp_max(s);
        p = key ? exp_of(s - top) : 0.0f;
        weigh(m, top, kept, added);
        l = fold(l, kept, warp_sum(p), added);
        u32 low = (u32)(u64)value, high = (u32)((u64)value >> 32);
        for (u32 j = from; j <= to; j++) {
            float weight = shuffle(p, j);
            const float* values = (const float*)((u64)shuffle(high, j) << 32 | shuffle(low, j));
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                if (lane + 32 * i < a.dim) part[i] = fmaf(weight, values[lane + 32 * i], part[i]);
            }
        }
#pragma unroll
        for (u32 i = 0; i < 8; i++) o[i] = fold(o[i], kept, part[i], added);
    }
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        if (lane + 32 * i < a.dim) sums[warp][lane + 32 * i] = o[i];
    }
    warp_sync();
    finish(a, false, sums[warp], m, l, row, head, lane);
}
