// The arguments of a GEMM in tiles, and the sizes that follow from a tile; for kernel.h and for the host code that launches it.
#pragma once

#include "hipforge/amd/hip.h"
#include "hipforge/device/mx.h"
#include "hipforge/device/mx_shuffled.h"
#include "hipforge/amd/mx_tiles/formats.h"
#include "hipforge/amd/vector.h"
#include "hipforge/amd/wave.h"

namespace hf::tiles {

constexpr int kTile = 32;
constexpr int kStepBytes = 128;  // of a row in one stage
constexpr int kChunk = 16;       // bytes that one lane moves
constexpr int kRowChunks = kStepBytes / kChunk;
constexpr int kLoadRows = dev::kWaveSize / kRowChunks;  // rows that one load instruction fills
constexpr int kMaxStages = 4;
constexpr int kScaleRowWords = 16;  // of the scales that are in LDS together
constexpr int kScaleRowBytes = kScaleRowWords * sizeof(uint32_t);
constexpr int kWordBlocks = sizeof(uint32_t);  // MX blocks whose scales are one word
constexpr int kScaleLoadRows = dev::kWaveSize / kScaleRowWords;
constexpr int kScaleKeys = 8;  // words of a row are swizzled by its number / kScaleLoadRows % kScaleKeys
constexpr uint32_t kWindow = 4;  // steps that neighbouring work-groups take in different orders

static_assert(kLoadRows == 8 && kScaleLoadRows == 4 && kScaleRowBytes == 64);
static_assert(kShuffledScaleRows == kTile && kShuffledScaleBytes == dev::kWaveSize * sizeof(uint32_t));

/// What a launch computes, on device pointers; the kernel's only argument.
struct Problem {
  dev::bf16* out;         // or f16
  uint8_t* partials;      // float32 [tiles, splits, C::kBlockM C::kBlockN]; null where there is one split
  uint64_t* words;        // meeting_words(splits) for each tile
  uint64_t number;        // of the launch
  const dev::bf16* bias;  // as out; null for none
  const uint8_t *xq, *xs, *wq, *ws;
  uint32_t m, n, k;
  uint32_t row_tiles, column_tiles, log2_splits;
  uint32_t aligned_scales;  // rows of both scale tensors start at a multiple of 4 bytes; shuffled ones always do
  uint32_t shuffled;        // W and its scales
  uint32_t aligned_output;  // 16 bytes of an output row can be stored at once
  // Without MX scales: whether out is f16, and the strides of the scales of X and W, 0 where one scale serves all rows.
  uint32_t half_output, x_scale_step, w_scale_step;
};

template <class Format_, int kRowWaves_, int kColumnWaves_, int kRowTiles_, int kColumnTiles_>
struct Config {
  using Format = Format_;
  static constexpr int kStep = kStepBytes * Format::kPerByte;  // k of one stage
  static constexpr int kStepWords = kStep / kMxBlock / kWordBlocks;  // of a row's scales
  static constexpr int kScaleSteps = kScaleRowWords / kStepWords;  // steps whose scales are in LDS together
  static constexpr int kRowWaves = kRowWaves_, kColumnWaves = kColumnWaves_;
  static constexpr int kRowTiles = kRowTiles_, kColumnTiles = kColumnTiles_;
  static constexpr int kWaves = kRowWaves * kColumnWaves, kThreads = kWaves * dev::kWaveSize;
  static constexpr int kBlockM = kRowWaves * kRowTiles * kTile, kBlockN = kColumnWaves * kColumnTiles * kTile;
  static constexpr int kRows = kBlockM + kBlockN;
  static constexpr uint32_t kPartBytes = kBlockM * kBlockN * sizeof(float);
  static constexpr int kStageBytes = kRows * kStepBytes, kScaleBytes = Format::kScaled ? kRows * kScaleRowBytes : 0;
  static constexpr int kXLoads = kBlockM / kLoadRows / kWaves, kWLoads = kBlockN / kLoadRows / kWaves;
  static constexpr int kLoads = kXLoads + kWLoads;  // of one wave and step
  static constexpr int kMaxLds = 160 * 1024;
  static constexpr int stages(int n) { return n == 2 || n * kStageBytes + 2 * kScaleBytes <= kMaxLds ? n : stages(n - 1); }
  static constexpr int kStages = stages(kMaxStages);
  static constexpr int kScaleBuffers = kStages * kStageBytes + 2 * kScaleBytes <= kMaxLds ? 2 : 1;
  // With two stages only, the rows of W are handed back as soon as they are read, so that loads never run dry.
  static constexpr bool kEarlyRows = kStages == 2;
  static constexpr int kLdsBytes = kStages * kStageBytes + kScaleBuffers * kScaleBytes;
  static constexpr int kXScaleLoads = kBlockM / kScaleLoadRows / kWaves, kWScaleLoads = kBlockN / kScaleLoadRows / kWaves;
  static constexpr int kScaleLoads = kXScaleLoads + kWScaleLoads;  // of one wave and kScaleSteps steps

  static_assert(kWaves % 2 == 0 && kXLoads * kLoadRows * kWaves == kBlockM && kWLoads * kLoadRows * kWaves == kBlockN,
                "waves share the rows evenly, and the swizzle of a wave's rows is the same in all its loads");
  static_assert(kXScaleLoads * kScaleLoadRows * kWaves == kBlockM && kWScaleLoads * kScaleLoadRows * kWaves == kBlockN);
  static_assert(kLdsBytes <= kMaxLds);
  static_assert(kStepWords == Format::kPerByte && kScaleSteps % kWindow == 0);
  static_assert(!Format::kTakesShuffled || kStep == kShuffledScaleColumns * kMxBlock, "a step is one tile of shuffled scales");
};

#ifndef HF_TILE
#error "build a variant: -DHF_TILE=256256, 192256, 192128, 128192, 128128, 128064, 64128, 64064 or 32064"
#endif

// The tile of a module's variant, rows of X * 1000 + rows of W: four waves side by side where it is 256 wide, else two.
constexpr int kTileRows = HF_TILE / 1000, kTileColumns = HF_TILE % 1000;
constexpr int kTileRowWaves = kTileRows == kTile ? 1 : 2, kTileColumnWaves = kTileColumns == 256 ? 4 : 2;
template <class Format>
using Variant = Config<Format, kTileRowWaves, kTileColumnWaves, kTileRows / kTile / kTileRowWaves,
                       kTileColumns / kTile / kTileColumnWaves>;
static_assert(Variant<E4m3>::kBlockM * 1000 + Variant<E4m3>::kBlockN == HF_TILE);

}  // namespace hf::tiles
