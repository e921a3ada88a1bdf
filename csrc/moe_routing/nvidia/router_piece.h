// How the kernels of a router's product divide a row: steps of 256 h, of which each lane has 8.
#pragma once

#include "hipforge/nvidia/vector.h"
#include "hipforge/nvidia/wave.h"

namespace hf::router {

constexpr int kPiece = 8;  // h of a lane in a step
constexpr int kStep = kPiece * dev::kWaveSize;

// kPiece elements as they are in memory.
template <class T>
struct Piece {
  static constexpr int kLoads = kPiece * sizeof(T) / 16, kEach = kPiece / kLoads;
  dev::Vector<T, kEach> loads[kLoads];

  __device__ float operator[](int i) const { return static_cast<float>(loads[i / kEach][i % kEach]); }
};

template <class T>
__device__ inline Piece<T> load_piece(const void* row, uint32_t h) {
  return *reinterpret_cast<const Piece<T>*>(static_cast<const T*>(row) + h);
}

}  // namespace hf::router
