// Stands in for hipRAND's device functions of the Philox 4x32-10 generator, where neither ROCm nor --include has hipRAND.
// Philox is that of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). The subsequence is the upper half
// of the counter and the offset counts single numbers, so that the numbers are those of hipRAND and cuRAND.
#pragma once
#include <hip/hip_runtime.h>

struct hiprandStatePhilox4_32_10_t {
  unsigned int counter[4];
  unsigned int key[2];
  unsigned int used;        // of the four numbers of this counter
  unsigned int numbers[4];  // of this counter
};

namespace hiprand_detail {

__device__ inline void philox(hiprandStatePhilox4_32_10_t* state) {
  unsigned int a = state->counter[0], b = state->counter[1], c = state->counter[2], d = state->counter[3];
  unsigned int key = state->key[0], other_key = state->key[1];
  for (int round = 0; round < 10; ++round) {
    const unsigned long long first = 0xD2511F53ull * a, second = 0xCD9E8D57ull * c;
    a = static_cast<unsigned int>(second >> 32) ^ b ^ key;
    b = static_cast<unsigned int>(second);
    c = static_cast<unsigned int>(first >> 32) ^ d ^ other_key;
    d = static_cast<unsigned int>(first);
    key += 0x9E3779B9u;
    other_key += 0xBB67AE85u;
  }
  state->numbers[0] = a;
  state->numbers[1] = b;
  state->numbers[2] = c;
  state->numbers[3] = d;
}

// The lower half counts groups of four; an offset of 64 bits does not overflow it.
__device__ inline void count_up(hiprandStatePhilox4_32_10_t* state, unsigned long long steps) {
  const unsigned long long sum = (state->counter[0] | static_cast<unsigned long long>(state->counter[1]) << 32) + steps;
  state->counter[0] = static_cast<unsigned int>(sum);
  state->counter[1] = static_cast<unsigned int>(sum >> 32);
}

}  // namespace hiprand_detail

__device__ inline void hiprand_init(
    unsigned long long seed, unsigned long long subsequence, unsigned long long offset,
    hiprandStatePhilox4_32_10_t* state) {
  *state = {};
  state->key[0] = static_cast<unsigned int>(seed);
  state->key[1] = static_cast<unsigned int>(seed >> 32);
  state->counter[2] = static_cast<unsigned int>(subsequence);
  state->counter[3] = static_cast<unsigned int>(subsequence >> 32);
  state->used = static_cast<unsigned int>(offset % 4);
  hiprand_detail::count_up(state, offset / 4);
  hiprand_detail::philox(state);
}

// Returns the next number, of 32 random bits.
__device__ inline unsigned int hiprand(hiprandStatePhilox4_32_10_t* state) {
  if (state->used == 4) {
    state->used = 0;
    hiprand_detail::count_up(state, 1);
    hiprand_detail::philox(state);
  }
  return state->numbers[state->used++];
}

__device__ inline uint4 hiprand4(hiprandStatePhilox4_32_10_t* state) {
  const unsigned int x = hiprand(state), y = hiprand(state), z = hiprand(state), w = hiprand(state);
  return make_uint4(x, y, z, w);
}

// Returns the next number as a float in (0, 1].
__device__ inline float hiprand_uniform(hiprandStatePhilox4_32_10_t* state) {
  return 0x1p-32f + static_cast<float>(hiprand(state)) * 0x1p-32f;
}

__device__ inline float4 hiprand_uniform4(hiprandStatePhilox4_32_10_t* state) {
  const float x = hiprand_uniform(state), y = hiprand_uniform(state), z = hiprand_uniform(state);
  return make_float4(x, y, z, hiprand_uniform(state));
}
