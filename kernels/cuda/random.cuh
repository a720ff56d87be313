// The random bits of crates/tensor/src/random.rs: Philox4x32-10 (Salmon et al., SC 2011) of the block index / 4, word
// index % 4.
#pragma once
#include "meshwork.cuh"

struct Words {
    u32 word[4];
};

DEVICE Words philox(u64 block, u32 k0, u32 k1) {
    u32 w0 = static_cast<u32>(block), w1 = static_cast<u32>(block >> 32), w2 = 0, w3 = 0;
    for (int round = 0; round < 10; round++) {
        u32 first_high = __umulhi(0xd2511f53u, w0), first = 0xd2511f53u * w0;
        u32 second_high = __umulhi(0xcd9e8d57u, w2), second = 0xcd9e8d57u * w2;
        w0 = second_high ^ w1 ^ k0, w1 = second;
        w2 = first_high ^ w3 ^ k1, w3 = first;
        k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
    }
    return {{w0, w1, w2, w3}};
}

// Uniform in [0, 1), a multiple of 2^-24.
DEVICE float uniform(u32 word) { return static_cast<float>(static_cast<int>(word >> 8)) * (1.0f / 16777216.0f); }

DEVICE float uniform(const Words& words, u64 index) {
    u32 at = static_cast<u32>(index & 3u);
    return uniform(at == 0 ? words.word[0] : at == 1 ? words.word[1] : at == 2 ? words.word[2] : words.word[3]);
}

// The factor of dropout for the global element `index`: 0, or `kept` = 1 / (1 - p).
DEVICE float dropout_factor(const Words& words, u64 index, float p, float kept) {
    return uniform(words, index) < p ? 0.0f : kept;
}
