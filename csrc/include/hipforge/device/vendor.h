// Which vendor's headers implement the names of hipforge/device/. The build names it (-DHF_VENDOR=nvidia); without, it is
// AMD. Kernels over these names are one source for every vendor and have no #if of their own.
//
//   hip.h         threadIdx, __syncthreads, <<< >>>: the language       vector.h      Vector<T, N>, bf16, f16, converted<V>
//   runtime.h     streams, devices, architectures (module.h reads it)   wave.h        kWaveSize, exchange and reductions
//   launch.h      hf::launch                                            math.h        reciprocal_root, limited, ...
//   early_start.h launches that may start before their predecessor has ended
//   fp8_codes.h   floats to and from 8-bit codes                        buffer.h      loads that are guarded by a size
//   fp4_codes.h   floats to e2m1 where the hardware converts
#pragma once

#if !defined(HF_VENDOR)
#define HF_VENDOR amd
#endif
#define HF_VENDOR_HEADER(name) <hipforge/HF_VENDOR/name>
// A header of the source's own family that each vendor has in a folder of its name.
#define HF_FAMILY_HEADER(name) <HF_VENDOR/name>
