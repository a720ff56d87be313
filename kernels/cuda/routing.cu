// Routers of a mixture of experts: which experts a token goes to, with which weights, and how evenly
// (crates/tensor/src/kernel/routing.rs).
//
//   ranked[t] = the experts by score + bias, ties to the lower;  kept: choices within capacity, first choices before second ones
//   w[t, j] = scale s[t, e_j] / (1e-20 + Σ_i s[t, e_i]), or scale s[t, e_j];  ds[t, e_j] = (dw[t, j] - Σ_i s_i dw_i / sum) scale / sum
//   balance = scale Σ_e counts[e] Σ_t s[t, e];  z = mean_t ln(Σ_e e^x)²;  entropy = mean_t -Σ_e p ln p, p the scores over their sum
//
// Shapes    scores, logits [tokens, experts], the tokens of a sample one after another; ranked [tokens, width];
//           choices, kept, weights [tokens, k]; counts [samples, experts], or [experts] for all samples; losses and
//           measures f64 [samples].
// Launches  selection with weights: one without capacity and draws, three with a capacity, five (with a fill) if
//           choices may be rerouted.
// Geometry  selection: one warp per token, which takes the largest free score `width` times; a lane has every 32nd
//           expert, so there are at most 2048 experts. Capacity: one warp per part of the tokens of a sample, which
//           counts the choices of each expert (warp.cuh), starting from the counts of earlier choices and parts. With
//           rerouting one thread per sample, because each choice depends on all before it: slow. The rest: one thread
//           per token, element or sum.
// Bytes     scores once, from the cache `width` times; with a capacity ranked twice and kept once, and with p parts per
//           sample k p numbers per expert, of which each part reads k² p / 2 from the L2 cache.
// Bits      as on the CPU (crates/cpu/src/kernels/routing.rs), where losses are summed in f64, with two exceptions: z
//           and its gradient need an exponential and a logarithm in f64, and the entropy a logarithm, which CUDA's and
//           the host's C library round differently in the last bit; the gradient is rounded to f32 afterwards.
#include "random.cuh"
#include "warp.cuh"

#define NOWHERE 0x7fffffff

// One bit for each of the lane's numbers (lane, lane + 32, ..) that is below n.
DEVICE u64 below(i64 n) {
    i64 lane = lane_of_warp(), count = n > lane ? (n - lane + WARP - 1) / WARP : 0;
    return count >= 64 ? ~0ull : (1ull << count) - 1;
}

DEVICE u64 bit_of(int at) { return at % WARP == lane_of_warp() ? 1ull << (at / WARP) : 0; }

struct Largest {
    int at;
    float value;
};

// The largest free value in the warp; ties go to the first. NaN wins only if it is the first of all free values, and is
// skipped otherwise.
template <class Value> DEVICE Largest largest(u64 free, Value value) {
    int first = NOWHERE, best = NOWHERE;
    float first_value = 0.0f, most = 0.0f;
    int at = lane_of_warp();
    for (u64 left = free; left != 0; left >>= 1, at += WARP) {
        if (!(left & 1)) continue;
        float x = value(at);
        if (first == NOWHERE) first = at, first_value = x;
        if (x == x && (best == NOWHERE || x > most)) best = at, most = x;
    }
    for (int width = WARP / 2; width > 0; width /= 2) {
        int other = __shfl_xor_sync(FULL_WARP, first, width);
        float other_value = __shfl_xor_sync(FULL_WARP, first_value, width);
        if (other < first) first = other, first_value = other_value;
        other = __shfl_xor_sync(FULL_WARP, best, width);
        other_value = __shfl_xor_sync(FULL_WARP, most, width);
        bool larger = other != NOWHERE && (best == NOWHERE || other_value > most || (other_value == most && other < best));
        if (larger) best = other, most = other_value;
    }
    return first_value == first_value ? Largest{best, most} : Largest{first, first_value};
}

// The smallest of these numbers of a warp; all lanes have it.
DEVICE int smallest(u64 numbers) {
    int first = NOWHERE, at = lane_of_warp();
    for (u64 left = numbers; left != 0 && first == NOWHERE; left >>= 1, at += WARP) {
        if (left & 1) first = at;
    }
    for (int width = WARP / 2; width > 0; width /= 2) {
        int other = __shfl_xor_sync(FULL_WARP, first, width);
        first = other < first ? other : first;
    }
    return first;
}

// The expert of a place; without choices a token has all experts.
DEVICE i64 chosen_at(const int* choices, i64 token, i64 place, i64 k) { return choices ? choices[token * k + place] : place; }

// The divisor of a token's weights.
DEVICE float divisor_of(const float* row, const int* choices, i64 token, i64 k, int normalise) {
    if (!normalise) return 1.0f;
    float sum = 1e-20f;
    for (i64 place = 0; place < k; place++) {
        i64 expert = chosen_at(choices, token, place, k);
        sum += expert < 0 ? 0.0f : row[expert];
    }
    return sum;
}

// Writes the weights of a token's places begin, begin + step, ..
DEVICE void weigh(const float* row, const int* choices, i64 token, i64 k, int normalise, float scale, float* out, i64 begin, i64 step) {
    float factor = scale / divisor_of(row, choices, token, k, normalise);
    for (i64 place = begin; place < k; place += step) {
        i64 expert = chosen_at(choices, token, place, k);
        out[token * k + place] = (expert < 0 ? 0.0f : row[expert]) * factor;
    }
}

// `bias` may be null. `group_scores` [tokens, groups] is scratch, used if groups limit the choice. With `kept`, all
// choices are used: both results have them in ascending order, with weights. Without `kept`, choices are in the token's
// order of preference.
KERNEL route_rank(const float* scores, const float* bias, i64 experts, i64 groups, i64 top_groups, i64 group_best, i64 width,
                  float* group_scores, int* ranked, int* kept, int normalise, float scale, float* weights, i64 tokens) {
    i64 token = global_thread() / WARP;
    if (token >= tokens) return;
    int lane = lane_of_warp();
    const float* row = scores + token * experts;
    auto value = [&](int expert) { return bias ? row[expert] + bias[expert] : row[expert]; };
    u64 free = below(experts);
    if (top_groups < groups) {
        i64 size = experts / groups;
        auto members = [&](i64 group) { return below((group + 1) * size) & ~below(group * size); };
        // A lane reads only the scores that it wrote, of every 32nd group.
        float* of_groups = group_scores + token * groups;
        for (i64 group = 0; group < groups; group++) {
            u64 left = members(group);
            float sum = 0.0f;
            for (i64 i = 0; i < smaller(group_best, size); i++) {
                Largest next = largest(left, value);
                left &= ~bit_of(next.at);
                sum += next.value;
            }
            if (lane == group % WARP) of_groups[group] = sum;
        }
        u64 open = below(groups);
        free = 0;
        for (i64 i = 0; i < top_groups; i++) {
            int group = largest(open, [&](int group) { return of_groups[group]; }).at;
            open &= ~bit_of(group);
            free |= members(group);
        }
    }
    u64 chosen = 0;
    for (i64 place = 0; place < width; place++) {
        int expert = largest(free, value).at;
        free &= ~bit_of(expert);
        chosen |= bit_of(expert);
        if (lane == 0 && !kept) ranked[token * width + place] = expert;
    }
    for (i64 place = 0; kept && place < width; place++) {
        int expert = smallest(chosen);
        chosen &= ~bit_of(expert);
        if (lane == 0) ranked[token * width + place] = kept[token * width + place] = expert;
    }
    if (!kept) return;
    __syncwarp();
    weigh(row, ranked, token, width, normalise, scale, weights, lane, WARP);
}

// Whether GShard uses the second choice of a token: with probability twice its share of the two scores.
DEVICE bool second_is_used(const float* scores, const int* ranked, u32 key0, u32 key1, u64 index) {
    float first = scores[ranked[0]], second = scores[ranked[1]];
    float share = second / (first + second);
    return !(uniform(philox(index / 4, key0, key1), index) >= share + share);
}

// Brings the choices of a token into ascending order of experts, by insertion sort, because there are few.
DEVICE void sort_choices(int* routed, int* kept, i64 k, i64 token) {
    i64 begin = token * k;
    for (i64 end = begin + 1; end < begin + k; end++) {
        int expert = routed[end], used = kept[end];
        i64 place = end;
        for (; place > begin && routed[place - 1] > expert; place--) {
            routed[place] = routed[place - 1];
            kept[place] = kept[place - 1];
        }
        routed[place] = expert;
        kept[place] = used;
    }
}

// The choices with this rank of a warp's part of the tokens of a sample: the expert of token i, or -1 if it is not
// drawn. `draws`: whether second choices are drawn, by the token's index from `first_token` on.
struct Drawn {
    const float* scores;
    const int* ranked;
    i64 experts, k, choice;
    bool drawn;
    u32 key0, key1;
    i64 first_token;

    DEVICE int operator()(i64 token) const {
        const int* own = ranked + token * k;
        bool used = !drawn || second_is_used(scores + token * experts, own, key0, key1, static_cast<u64>(first_token + token));
        return used ? own[choice] : -1;
    }
};

// Counts the choices of each expert by the rank of the choice, in parts of `part` of the `each` tokens of a sample; the
// last part may be smaller: counts [samples, k, parts, experts].
KERNEL route_parts(const float* scores, const int* ranked, i64 experts, i64 k, int draws, u32 key0, u32 key1, i64 first_token, i64 part, i64 parts,
                   int* counts, i64 samples, i64 each) {
    i64 at = global_thread() / WARP;
    if (at >= samples * k * parts) return;
    i64 choice = at / parts % k, sample = at / parts / k, begin = sample * each + at % parts * part;
    int* own = counts + at * experts;
    for (i64 expert = lane_of_warp(); expert < experts; expert += WARP) own[expert] = 0;
    __syncwarp();
    Drawn drawn = {scores, ranked, experts, k, choice, draws && choice == 1, key0, key1, first_token};
    count_numbers(own, begin, smaller(begin + part, (sample + 1) * each), experts, drawn, [](i64, i64) {});
}

// Drops choices beyond the capacity, and leaves the choices of a token in ascending order of experts, with their
// weights. Each warp has a part and counts into `taken` [samples, parts, experts]; for each rank of choices it starts
// from the counts of the choices before.
KERNEL route_limit(const float* scores, int* ranked, i64 experts, i64 k, i64 capacity, int draws, u32 key0, u32 key1, i64 first_token, i64 part,
                   i64 parts, const int* counts, int* taken, int* kept, int normalise, float scale, float* weights, i64 samples, i64 each) {
    i64 at = global_thread() / WARP;
    if (at >= samples * parts) return;
    i64 sample = at / parts, begin = sample * each + at % parts * part, end = smaller(begin + part, (sample + 1) * each);
    const int* of_sample = counts + sample * k * parts * experts;
    int lane = lane_of_warp(), *own = taken + at * experts;
    for (i64 choice = 0; choice < k; choice++) {
        i64 before = choice * parts + at % parts;
        for (i64 expert = lane; expert < experts; expert += WARP) {
            int sum = 0;
            for (i64 row = 0; row < before; row++) sum += of_sample[row * experts + expert];
            own[expert] = sum;
        }
        __syncwarp();
        Drawn drawn = {scores, ranked, experts, k, choice, draws && choice == 1, key0, key1, first_token};
        count_numbers(own, begin, end, experts, drawn, [=](i64 token, i64 count) {
            kept[token * k + choice] = count >= 0 && count < capacity ? ranked[token * k + choice] : -1;
        });
    }
    for (i64 token = begin + lane; token < end; token += WARP) {
        sort_choices(ranked, kept, k, token);
        weigh(scores + token * experts, ranked, token, k, normalise, scale, weights, 0, 1);
    }
}

// A choice beyond the capacity goes to the best expert with room that its token did not choose. `ranked` has `width`
// experts a token, and `taken` [samples, experts] is zero at first.
KERNEL route_reroute(const float* scores, const int* ranked, i64 experts, i64 k, i64 width, i64 capacity, int draws, u32 key0, u32 key1,
                     i64 first_token, int* taken, int* kept, i64 samples, i64 each) {
    i64 sample = global_thread();
    if (sample >= samples) return;
    int* full = taken + sample * experts;
    for (i64 choice = 0; choice < k; choice++) {
        for (i64 token = sample * each; token < (sample + 1) * each; token++) {
            const int* order = ranked + token * width;
            int* mine = kept + token * k;
            mine[choice] = -1;
            bool drawn = draws && choice == 1;
            if (drawn && !second_is_used(scores + token * experts, order, key0, key1, static_cast<u64>(first_token + token))) continue;
            for (i64 i = k - 1; i < width; i++) {
                int expert = i < k ? order[choice] : order[i];
                bool there = false;
                for (i64 j = 0; i >= k && j < choice; j++) there = there || mine[j] == expert;
                if (there || full[expert] >= capacity) continue;
                mine[choice] = expert;
                full[expert] += 1;
                break;
            }
        }
    }
}

// The first k of a token's `width` experts: chosen, in ascending order; and routed, with rerouted experts in place of
// the chosen ones.
KERNEL route_first(const int* ranked, const int* kept, i64 width, i64 k, int* chosen, int* routed, i64 tokens) {
    i64 token = global_thread();
    if (token >= tokens) return;
    for (i64 i = 0; i < k; i++) {
        int expert = ranked[token * width + i], used = kept[token * k + i];
        routed[token * k + i] = used >= 0 ? used : expert;
        i64 place = token * k + i;
        for (; place > token * k && chosen[place - 1] > expert; place--) chosen[place] = chosen[place - 1];
        chosen[place] = expert;
    }
}

// Brings the choices of a token into ascending order of experts, with their weights.
KERNEL route_sort(const float* scores, i64 experts, int* routed, int* kept, i64 k, int normalise, float scale, float* weights, i64 tokens) {
    i64 token = global_thread();
    if (token >= tokens) return;
    sort_choices(routed, kept, k, token);
    weigh(scores + token * experts, routed, token, k, normalise, scale, weights, 0, 1);
}

// Expert choice: an expert takes a token if fewer than `capacity` tokens of the sample precede it, with larger scores,
// or equal scores and a smaller index.
KERNEL route_tokens(const float* scores, i64 experts, i64 capacity, int* kept, i64 count, i64 each) {
    i64 at = global_thread();
    if (at >= count) return;
    i64 expert = at % experts, token = at / experts, first = token / each * each, before = 0;
    float score = scores[at];
    for (i64 other = first; other < first + each; other++) {
        float its = scores[other * experts + expert];
        before += its > score || (its == score && other < token) ? 1 : 0;
    }
    kept[at] = before < capacity ? static_cast<int>(expert) : -1;
}

KERNEL route_pick(const float* scores, const int* choices, i64 experts, i64 k, int normalise, float scale, float* out, i64 tokens) {
    i64 token = global_thread();
    if (token < tokens) weigh(scores + token * experts, choices, token, k, normalise, scale, out, 0, 1);
}

KERNEL route_pick_backward(const float* scores, const int* choices, const float* dout, i64 experts, i64 k, int normalise, float scale,
                           float* dscores, i64 tokens) {
    i64 token = global_thread();
    if (token >= tokens) return;
    const float* row = scores + token * experts;
    float divisor = divisor_of(row, choices, token, k, normalise), mean = 0.0f;
    if (normalise) {
        for (i64 place = 0; place < k; place++) {
            i64 expert = chosen_at(choices, token, place, k);
            mean += (expert < 0 ? 0.0f : row[expert]) * dout[token * k + place];
        }
        mean = mean / divisor;
    }
    float factor = scale / divisor;
    for (i64 expert = 0; expert < experts; expert++) dscores[token * experts + expert] = 0.0f;
    for (i64 place = 0; place < k; place++) {
        i64 expert = chosen_at(choices, token, place, k);
        if (expert >= 0) dscores[token * experts + expert] = (dout[token * k + place] - mean) * factor;
    }
}

KERNEL balance_sums(const float* scores, double* sums, i64 samples, i64 each, i64 experts) {
    i64 at = global_thread();
    if (at >= samples * experts) return;
    const float* column = scores + at / experts * each * experts + at % experts;
    double sum = 0.0;
    for (i64 token = 0; token < each; token++) sum += static_cast<double>(column[token * experts]);
    sums[at] = sum;
}

// `pitch`: from a sample's counts to the next one's, 0 if all have the same.
KERNEL balance_forward(const double* sums, const int* counts, i64 pitch, double scale, double* out, i64 samples, i64 experts) {
    i64 sample = global_thread();
    if (sample >= samples) return;
    double sum = -0.0;
    for (i64 e = 0; e < experts; e++) sum += sums[sample * experts + e] * static_cast<double>(counts[sample * pitch + e]);
    out[sample] = scale * sum;
}

KERNEL balance_backward(const double* dout, const int* counts, i64 pitch, double scale, float* dscores, i64 count, i64 each, i64 experts) {
    i64 at = global_thread();
    if (at >= count) return;
    i64 sample = at / experts / each;
    dscores[at] = static_cast<float>(scale * dout[sample] * static_cast<double>(counts[sample * pitch + at % experts]));
}

DEVICE double log_sum_exp(const float* row, i64 experts) {
    double max = -static_cast<double>(__uint_as_float(0x7f800000u)), sum = 0.0;
    for (i64 e = 0; e < experts; e++) max = fmax(max, static_cast<double>(row[e]));
    for (i64 e = 0; e < experts; e++) sum += exp(static_cast<double>(row[e]) - max);
    return max + log(sum);
}

KERNEL z_terms(const float* logits, double* terms, i64 tokens, i64 experts) {
    i64 token = global_thread();
    if (token >= tokens) return;
    double z = log_sum_exp(logits + token * experts, experts);
    terms[token] = z * z;
}

KERNEL z_backward(const float* logits, const double* dout, float* dlogits, i64 tokens, i64 each, i64 experts) {
    i64 token = global_thread();
    if (token >= tokens) return;
    const float* row = logits + token * experts;
    double factor = 2.0 * dout[token / each] / static_cast<double>(each), z = log_sum_exp(row, experts);
    for (i64 e = 0; e < experts; e++) {
        dlogits[token * experts + e] = static_cast<float>(factor * z * exp(static_cast<double>(row[e]) - z));
    }
}

KERNEL entropy_terms(const float* scores, double* terms, i64 tokens, i64 experts) {
    i64 token = global_thread();
    if (token >= tokens) return;
    const float* row = scores + token * experts;
    double sum = -0.0, total = -0.0;
    for (i64 e = 0; e < experts; e++) sum += static_cast<double>(row[e]);
    for (i64 e = 0; e < experts; e++) {
        double p = static_cast<double>(row[e]) / sum;
        if (p > 0.0) total += p * log(p);
    }
    terms[token] = -total;
}

// The mean of `each` terms of a sample, in order.
KERNEL sample_means(const double* terms, double* out, i64 samples, i64 each) {
    i64 sample = global_thread();
    if (sample >= samples) return;
    double sum = -0.0;
    for (i64 i = 0; i < each; i++) sum += terms[sample * each + i];
    out[sample] = sum / static_cast<double>(each);
}

// The fraction of a sample's `each` choices that are dropped.
KERNEL route_unused(const int* kept, double* out, i64 samples, i64 each) {
    i64 sample = global_thread() / WARP;
    if (sample >= samples) return;
    i64 count = 0;
    for (i64 i = lane_of_warp(); i < each; i += WARP) count += kept[sample * each + i] < 0 ? 1 : 0;
    count = sum_of_warp(count);
    if (lane_of_warp() == 0) out[sample] = static_cast<double>(count) / static_cast<double>(each);
}
