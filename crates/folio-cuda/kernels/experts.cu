// Which experts speak for a row, whose rows an expert has, and what they add up to.
//
// Owns: everything of a mixture but its products. A pair is (row of the batch, slot), numbered row by row, slots by falling logit.
// Must never: let one row's result depend on another's: lists only say where work is done.

// Grid: rows, a warp each. `picks` and `weights` are [rows, chosen]. The first block also says how many pairs there are.
extern "C" __global__ void __launch_bounds__(32)
route(const u32* meta, u32 count_word, const float* logits, u32 logits_stride, u32 experts, u32 chosen, u32 among_all, u32* header,
      u32* picks, float* weights) {
    u32 rows = meta[count_word], row = blockIdx.x, lane = threadIdx.x;
    if (row == 0 && lane == 0) header[0] = rows * chosen;
    if (row >= rows) return;
    logits += (u64)row * logits_stride;
    u32 taken = 0;      // of the experts lane, lane + 32, .. of which there are at most 1,024
    float largest = 0.0f, sum = 0.0f;
    for (u32 slot = 0; slot < chosen; slot++) {
        // The largest that is left, and of equal ones the first. What is NaN comes last.
        u32 best = experts;
        float best_logit = 0.0f;
        for (u32 i = 0, expert = lane; expert < experts; i++, expert += 32) {
            if (taken >> i & 1) continue;
            float logit = logits[expert];
            if (best == experts || logit > best_logit || best_logit != best_logit) best = expert, best_logit = logit;
        }
        for (int step = 16; step > 0; step /= 2) {
            u32 other = shuffle_xor(best, step);
            float other_logit = shuffle_xor(best_logit, step);
            bool nan = best_logit != best_logit, other_nan = other_logit != other_logit;
            bool better = best == experts || (nan && !other_nan) || other_logit > best_logit;
            bool equal = other_logit == best_logit || (nan && other_nan);
            if (other < experts && (better || (equal && other < best))) best = other, best_logit = other_logit;
        }
        if (best % 32 == lane) taken |= 1u << best / 32;
        if (slot == 0) largest = best_logit;
        float weight = expf(best_logit - largest);
        sum += weight;
        if (lane == 0) {
            picks[row * chosen + slot] = best;
            weights[row * chosen + slot] = weight;
        }
    }
    if (among_all) {
        sum = 0.0f;
        for (u32 expert = lane; expert < experts; expert += 32) sum += expf(logits[expert] - largest);
        for (int step = 16; step > 0; step /= 2) sum += shuffle_xor(sum, step);
    }
    warp_sync();
    for (u32 slot = lane; slot < chosen; slot += 32) weights[row * chosen + slot] /= sum;
}

// Sum over the threads of a block of 256, of counts.
__device__ u32 block_sum(u32 value, u32* shared) {
    for (int step = 16; step > 0; step /= 2) value += shuffle_xor(value, step);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    u32 sum = 0;
    for (u32 i = 0; i < 8; i++) sum += shared[i];
    __syncthreads();
    return sum;
}

// How many pairs each expert has. Grid: experts.
extern "C" __global__ void __launch_bounds__(256) expert_counts(const u32* header, const u32* picks, u32* counts) {
    __shared__ u32 shared[8];
    u32 pairs = header[0], count = 0;
    for (u32 pair = threadIdx.x; pair < pairs; pair += 256) count += picks[pair] == blockIdx.x;
    count = block_sum(count, shared);
    if (threadIdx.x == 0) counts[blockIdx.x] = count;
}

// `list`: the pairs, expert by expert; `tiles`: {expert, first entry, entries, 0} of at most `tile_rows` each; header[1]: tiles. Grid:
// experts.
extern "C" __global__ void __launch_bounds__(256)
expert_lists(u32* header, const u32* picks, const u32* counts, u32 tile_rows, u32* list, u32* tiles) {
    __shared__ u32 shared[8];
    u32 expert = blockIdx.x, pairs = header[0], before = 0, tiles_before = 0;
    for (u32 other = threadIdx.x; other < expert; other += 256) {
        before += counts[other];
        tiles_before += (counts[other] + tile_rows - 1) / tile_rows;
    }
    before = block_sum(before, shared);
    tiles_before = block_sum(tiles_before, shared);
    u32 count = counts[expert], tiles_here = (count + tile_rows - 1) / tile_rows;
    if (expert + 1 == gridDim.x && threadIdx.x == 0) header[1] = tiles_before + tiles_here;
    for (u32 i = threadIdx.x; i < tiles_here; i += 256) {
        u32* tile = tiles + 4 * (tiles_before + i);
        tile[0] = expert;
        tile[1] = before + i * tile_rows;
        tile[2] = count - i * tile_rows < tile_rows ? count - i * tile_rows : tile_rows;
        tile[3] = 0;
    }
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (u32 start = 0; start < pairs; start += 256) {
        u32 pair = start + threadIdx.x;
        bool here = pair < pairs && picks[pair] == expert;
        u32 votes = ballot(here), places = 0, all = 0;
        for (u32 i = 0; i < 32; i++) places += i < lane ? votes >> i & 1 : 0;
        for (u32 i = 0; i < 32; i++) all += votes >> i & 1;
        if (lane == 0) shared[warp] = all;
        __syncthreads();
        u32 lower = 0, sum = 0;
        for (u32 i = 0; i < 8; i++) {
            if (i < warp) lower += shared[i];
            sum += shared[i];
        }
        if (here) list[before + lower + places] = pair;
        before += sum;
        __syncthreads();
    }
}

// out[row] = sum over slots, in their order, of weight * values[pair]; or that added to what is there. Grid: rows, 256 columns.
extern "C" __global__ void __launch_bounds__(256)
combine_experts(const u32* meta, u32 count_word, const float* values, u32 values_stride, const float* weights, u32 chosen, u32 width,
                float* out, u32 out_stride, u32 add) {
    u32 row = blockIdx.x, column = blockIdx.y * 256 + threadIdx.x;
    if (row >= meta[count_word] || column >= width) return;
    float sum = 0.0f;
    for (u32 slot = 0; slot < chosen; slot++) {
        u32 pair = row * chosen + slot;
        sum = fmaf(weights[pair], values[(u64)pair * values_stride + column], sum);
    }
    float* to = out + (u64)row * out_stride + column;
    *to = add ? *to + sum : sum;
}
