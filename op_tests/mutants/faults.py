"""Faults to plant, one at a time: each is a line of the package, what takes its place, and the tests that must notice.

``run.py`` plants them. A fault that no test notices is a hole in the tests, and a removal from the tests must leave none.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A text of a file, what takes its place, and who notices.

    Attributes:
        name: area and mistake.
        file: below the repository's root; the package's folders are real there.
        text: occurs in it once.
        becomes: what takes its place.
        tests: files below op_tests (patterns are allowed), perhaps ``-k`` and a part of names; at least one test fails.
        arch: the architecture that these tests emulate.
    """

    name: str
    file: str
    text: str
    becomes: str
    tests: str
    arch: str = "gfx950"


def _in(folder: str, tests: str, *faults: tuple[str, ...]) -> list[Fault]:
    """Faults in files below ``folder`` that ``tests`` notice: (name, file, text, becomes[, tests[, arch]])."""
    return [Fault(f[0], folder + f[1], f[2], f[3], *((tests,) if len(f) < 5 else f[4:])) for f in faults]


FAULTS = [
    # Dense MX-FP8 GEMM.
    *_in(
        "csrc/mxfp8_gemm/", "ops/test_mxfp8_gemm_kernels.py",
        ("dense/last_step_dropped", "amd/wave_split_kernel.h",
         "return (k + kStep - 1) / kStep * part >> log2_parts;", "return k / kStep * part >> log2_parts;"),
        ("dense/bias_of_one_column", "amd/wave_split_kernel.h",
         "values[i] += static_cast<float>(p.bias[column + i]);", "values[i] += static_cast<float>(p.bias[column]);"),
        ("dense/nan_scale_of_x_ignored", "amd/wave_split_kernel.h", "if (max(highest_w[r], highest_x[t]) == kE8m0Nan)",
         "if (highest_w[r] == kE8m0Nan)", "ops/test_mxfp8_gemm_kernels.py", "gfx942"),
        ("dense/gemv_nan_scale_of_x_ignored", "amd/gemv_kernel.h",
         "const bool nan = max(highest_x[v / kCols], highest_w[v % kCols]) == kE8m0Nan;",
         "const bool nan = highest_w[v % kCols] == kE8m0Nan;"),
        ("dense/gemv_reads_past_k", "amd/gemv_kernel.h", "return at < k ? at : dev::kOutOfRange;", "return at;"),
        ("dense/mfma_partial_step_dropped", "amd/mfma_kernel.h", "if (whole_end < end) multiply_partial(whole_end);", ""),
        ("dense/reduction_adds_one_bias", "amd/reduce_splits.h", "bias[(first + i) % n]", "bias[first % n]"),
        ("dense/own_part_lost", "amd/group_split_kernel.h", "sum += split == s ? own[i] : loaded[i][s];",
         "sum += loaded[i][s];"),
    ),
    *_in(
        "csrc/include/hipforge/", "ops/test_mxfp8_gemm_kernels.py",
        ("dense/first_group_adds", "amd/last_group.h", "        last = 0;\n", "        last = 1;\n"),
        ("dense/last_wave_of_16_lost", "amd/wave_parts.h", "for (uint32_t i = 1; i < parts; ++i) total",
         "for (uint32_t i = 1; i + 1 < parts; ++i) total"),
    ),
    *_in(
        "csrc/mxfp8_gemm/", "ops/test_mxfp8_gemm_kernels.py -k guarded",
        ("guards/scales_of_w_unchecked", "guards.h", 'check_operand(ws, "Ws", kE8m0, {n, k / kMxBlock}, kPerBlock);',
         ""),
        ("guards/x_may_be_unaligned", "guards.h", 'check_aligned(payload, name);', ""),
        ("guards/bias_of_any_length", "guards.h", 'out.dtype(), {n}, " = [N]");',
         'out.dtype(), {(*bias).numel()}, " = [N]");'),
    ),
    # Grouped MX-FP8 GEMM.
    *_in(
        "csrc/mxfp8_grouped_gemm/amd/", "ops/test_mxfp8_grouped_gemm_split.py",
        ("grouped/slot_weights_forgotten", "split_kernel.h",
         "if (p.slot_weights != nullptr) values *= p.slot_weights[slot];", ""),
        ("grouped/bias_of_one_column", "split_kernel.h", "if (column + i < n) values[i] += bias[i];",
         "if (column + i < n) values[i] += bias[0];"),
        ("grouped/row_of_the_slot", "split_kernel.h",
         "row[t] = pass.a_div == 1 ? slot[t] : slot[t] / pass.a_div;", "row[t] = slot[t];"),
        ("grouped/gate_and_up_not_parted", "gate_up_kernel.h",
         "gate = __builtin_shufflevector(low, high, 0, 2, 4, 6);", "gate = __builtin_shufflevector(low, high, 0, 1, 2, 3);",
         "ops/test_mxfp8_grouped_gemm_gate_up.py"),
        ("grouped/gate_up_bias_of_expert_0", "gate_up_kernel.h", "p.biases + uint64_t{expert} * n + w_column",
         "p.biases + w_column", "ops/test_mxfp8_grouped_gemm_gate_up.py"),
    ),
    # MXFP4 GEMM.
    *_in(
        "csrc/mxfp4_gemm/amd/", "ops/test_mxfp4_gemm.py",
        ("mxfp4/shuffled_scale_of_the_other_step", "mxfp4_kernel.h", "kShuffledScaleBytes + step % 2 * 2",
         "kShuffledScaleBytes + step % 2"),
        ("mxfp4/partial_step_dropped", "mxfp4_kernel.h", "if (whole_end < end) {", "if (false) {"),
    ),
    # Skinny FP8 GEMM.
    *_in(
        "csrc/fp8_skinny_gemm/", "ops/test_fp8_skinny_gemm_*.py",
        ("skinny/reads_past_k", "amd/queue_kernel.h", "buffer, chunk + load * kLoadK < left ?", "buffer, true ?"),
        ("skinny/second_row_of_the_even_lane", "amd/sink.h", "odd ? first : second), kSwapPairs",
         "odd ? second : first), kSwapPairs"),
        ("skinny/accumulates_over_nothing", "amd/sink.h",
         "accumulate ? static_cast<float>(out[i]) + sum : sum", "sum", "ops/test_fp8_skinny_gemm*.py"),
        ("skinny/last_slice_lost", "amd/sink.h",
         "for (uint32_t s = 1; s < slices; ++s) sum += *reinterpret_cast<const Four*>(partials + s * count + first);",
         "for (uint32_t s = 1; s + 1 < slices; ++s) sum += *reinterpret_cast<const Four*>(partials + s * count + first);"),
    ),
    # Decode attention.
    *_in(
        "csrc/decode_attention/", "ops/test_decode_attention_kinds.py",
        ("attention/halves_of_v_swapped", "amd/half_kernel.h",
         "__builtin_amdgcn_perm(keys[2 * i + 1], keys[2 * i], kLowHalves)",
         "__builtin_amdgcn_perm(keys[2 * i], keys[2 * i + 1], kLowHalves)"),
        ("attention/infinity_of_a_hidden_key", "amd/half_kernel.h",
         "high = (pair >> 16 & kExponent) == kExponent;", "high = false;",
         "ops/test_decode_attention_half.py ops/test_decode_attention_hidden_keys.py"),
        ("attention/int4_scale_of_the_first_part", "amd/int4_kernel.h", "const ScaleShift of(own[2 * c / kWords]);",
         "const ScaleShift of(own[0]);"),
        ("attention/int4_special_ignored", "amd/int4_kernel.h", "own[r] = special ? 0 : own[r];", "",
         "ops/test_decode_attention_hidden_keys.py ops/test_decode_attention_ragged.py"),
        ("attention/block_scale_of_half_a_block", "amd/output.h",
         "if constexpr (kPieces == 1) amax = larger_of_neighbours(amax);", "", "ops/test_decode_attention_output.py"),
        ("attention/merged_codes_without_scale", "amd/output.h", "encode(scaled, byte == kE8m0Nan, words);",
         "encode(scaled, false, words);", "ops/test_decode_attention_output.py"),
        ("attention/overlapping_keys_taken", "guards.h", "HF_CHECK(slot >= row, name,", "HF_CHECK(true, name,",
         "ops/test_decode_attention_*.py"),
        ("attention/narrow_columns_from_the_start", "amd/decode_kernel.h", "Dealt::kNarrowFrom + Dealt::kNarrow * column;",
         "Dealt::kNarrow * column;", "ops/test_decode_attention_kinds.py"),
        ("attention/window_off_by_one", "problem.h", "length > p.window ? length - p.window : 0",
         "length > p.window + 1 ? length - p.window - 1 : 0",
         "ops/test_decode_attention_sinks_window.py ops/test_decode_attention_configurations.py"),
        ("attention/sink_of_another_head", "amd/merge_kernel.h", "problem.sinks, head);", "problem.sinks, 0);",
         "ops/test_decode_attention_sinks_window.py"),
    ),
    # Norms, activations, quantisers, RoPE.
    *_in(
        "csrc/rmsnorm_fp8/", "ops/test_rmsnorm_fp8.py ops/test_rms_norm.py",
        ("norm/every_other_pair", "rmsnorm_fp8.cu", "at < count; at += 2 * threads) {", "at < count; at += 4 * threads) {"),
        ("norm/sums_not_waited_for", "rmsnorm_fp8.cu", "  __syncthreads();\n  float total", "  float total"),
        ("norm/residual_not_stored", "rmsnorm_fp8.cu", "kept[at + half * threads] = r.chunk[half];", ";"),
        ("norm/epsilon_forgotten", "rmsnorm_fp8.cu", "reciprocal_root(mean + arguments.epsilon)", "reciprocal_root(mean)"),
    ),
    *_in(
        "csrc/", "ops/test_fused_mxfp8.py",
        ("quantise/largest_scale_has_no_inverse", "include/hipforge/device/mx_encode.h", "byte >= 2 * kE8m0Bias ? kSubnormal",
         "byte > 2 * kE8m0Bias ? kSubnormal", "ops/test_fused_mxfp8.py ops/test_mx_quantize.py ops/test_extreme_scales.py"),
        ("quantise/nan_saturated", "include/hipforge/device/fp8_encode.h", "return value == value ? clamped : value;",
         "return clamped;", "ops/test_fp8_quant.py"),
        ("quantise/last_odd_chunk_lost", "include/hipforge/device/fp8_encode.h", "} else if (first < count) {",
         "} else if (false) {", "ops/test_swiglu_fp8.py ops/test_rmsnorm_fp8.py"),
        ("quantise/tail_of_next_buffer", "include/hipforge/device/fp8_encode.h",
         "for (int64_t i = vectors * kPerStore + thread; i < count; i += threads) out[i] = 0;", "",
         "ops/test_swiglu_fp8.py ops/test_rmsnorm_fp8.py"),
        ("quantise/zeros_without_floor", "fp8_quant/fp8_quant.cu", "if (largest < kAmaxFloor) largest = kAmaxFloor;", "",
         "ops/test_fp8_quant.py"),
        ("quantise/transposed_byte_of_another_line", "fp8_quant/fp8_quant.cu", "(word >> (8 * (line % 4)) & 0xFFu)",
         "(word >> (8 * (line % 2)) & 0xFFu)", "ops/test_fp8_quant.py"),
        ("quantise/ceil_mode_one_off", "include/hipforge/device/mx_encode.h", "case ScaleMode::ceil: return {kFractionMask,",
         "case ScaleMode::ceil: return {kFractionMask + 1,", "ops/test_mx_quantize.py"),
        ("swiglu/beta_before_the_clamp", "include/hipforge/device/swiglu.h",
         "saturated(up, parameters.limit) + parameters.beta", "saturated(up + parameters.beta, parameters.limit)",
         "ops/test_swiglu_parameters.py"),
        ("swiglu/gate_clamped_below", "include/hipforge/device/swiglu.h", "gate = limited_above(gate, parameters.limit);",
         "gate = saturated(gate, parameters.limit);", "ops/test_swiglu_parameters.py"),
        ("rope/norm_offset_forgotten", "rope_and_cache/norm.h", "(w + a.weight_offset)", "w", "ops/test_rope_and_cache.py"),
        ("rope/int4_code_not_rounded", "rope_and_cache/store.h", "__builtin_floorf(steps[i] + 0.5f)",
         "__builtin_floorf(steps[i])", "ops/test_rope_and_cache.py"),
    ),
    # Routing.
    *_in(
        "csrc/moe_routing/", "ops/test_topk_gating.py",
        ("routing/zeros_of_two_signs", "topk_gating.cu", "value == 0.f ? 0.f : value", "value"),
        ("routing/group_by_its_best_alone", "topk_gating.cu", "key_of(value_of(best) + value_of(second));", "best;"),
        ("routing/slots_before_not_counted", "moe_align.cu",
         "if (slot < begin) hf::dev::atomic_count(&counts.before[expert]);", "", "ops/test_moe_align.py"),
        ("routing/experts_elsewhere_summed", "moe_combine.cu", "counts = own >= 0 && (a.local < 0 || own < a.local);",
         "counts = true;", "ops/test_moe_combine.py"),
        ("routing/bias_of_the_first_experts", "amd/router_kernel.h", "sum += a.bias[first_expert + column];",
         "sum += a.bias[column];", "ops/test_router_gemm.py"),
    ),
    # What ops decide in Python.
    *_in(
        "ops/core/", "ops/test_tuned_tables.py ops/test_dispatch.py",
        ("tables/row_of_any_device_first", "tuned.py", "return cell.get(cu_num) or cell.get(ANY_CU)",
         "return cell.get(ANY_CU) or cell.get(cu_num)"),
        ("tables/model_may_choose_the_fallback", "tuned.py",
         'if source.startswith("model:") and values.get("use_hip") == 0:', "if False:"),
        ("tables/row_of_the_value_skipped", "tuned.py", "tuned[bisect.bisect_left(tuned, value) :]",
         "tuned[bisect.bisect_right(tuned, value) :]", "ops/test_tuned_tables.py -k reaches"),
        ("tables/fallback_row_ignored", "family.py", 'if row.values.get("use_hip") == 0:', "if False:"),
        ("checks/out_of_another_dtype", "checks.py", "    require_operand(name, out, (dtype,), shape,",
         "    require_operand(name, out, (out.dtype,), shape,", "ops/test_router_gemm.py"),
        ("checks/expanded_out_taken", "checks.py", "if size > 1 and stride == 0:", "if False:",
         "ops/test_rope_and_cache.py ops/test_given_outputs.py jit/test_argument_errors.py"),
    ),
    # The build cache and the call.
    *_in(
        "jit/", "jit/test_jit_key.py",
        ("binding/written_arguments_of_one_view", "call/binding.c", "same_view(written, other) && !self->writable[j]",
         "same_view(written, other)", "jit/test_abi_hidden_facts.py"),
        ("binding/expanded_argument_written", "call/binding.c", "if (meets_itself(&args[i].value.tensor)) {", "if (0) {",
         "jit/test_abi_hidden_facts.py"),
        ("jit/variant_not_in_the_key", "spec.py", '"variant": json.dumps(dict(variant)),', '"variant": "",'),
        ("jit/environment_not_in_the_key", "spec.py", '    "CPATH",\n', ""),
        ("jit/target_not_in_the_key", "spec.py", '        "target": target,\n', ""),
        ("jit/ctime_ignored", "digest.py", "            and known[3] == stat.st_ctime_ns\n", "",
         "jit/test_jit_cache.py jit/test_jit_stability.py jit/test_jit_inputs.py jit/test_jit_key.py"),
        ("jit/fresh_files_remembered", "digest.py", "_RACE_NS = 2_000_000_000", "_RACE_NS = 0",
         "jit/test_jit_cache.py jit/test_jit_stability.py jit/test_jit_inputs.py jit/test_jit_key.py"),
        ("jit/blanks_in_depfiles", "cache/depfile.py", 'name += run[: len(run) // 2] + " " if len(run) % 2 else run',
         'name += run[: len(run) // 2] if len(run) % 2 else run', "jit/test_jit_inputs.py jit/test_jit_build.py"),
        ("jit/changed_header_ignored", "cache/store.py", "if digests.of(spec.roots.show(hidden)) != digest:", "if False:",
         "jit/test_jit_cache.py jit/test_jit_key.py jit/test_jit_inputs.py"),
        ("jit/damaged_library_loaded", "cache/store.py",
         "if digests.of(str(entry.library)) != entry.manifest.library_sha256:", "if False:",
         "jit/test_jit_cache.py jit/test_jit_faults.py"),
        ("jit/group_may_write", "cache/trust.py", "    if found.st_mode & _OTHERS_WRITE:\n", "    if found.st_mode & stat.S_IWOTH:\n",
         "jit/test_jit_trust.py"),
        ("jit/failure_outlives_its_cause", "cache/failures.py", "if digests.all_match(pairs):", "if True:",
         "jit/test_jit_build.py jit/test_jit_faults.py jit/test_jit_inputs.py"),
        ("jit/earlier_header_not_looked_for", "cache/depfile.py", "for place in (*folders, *search[:number])))",
         "for place in folders))", "jit/test_jit_inputs.py jit/test_jit_build.py jit/test_jit_key.py jit/test_jit_cache.py"),
        ("jit/argument_given_twice", "call/signature.py", "            if key in values:\n", "            if False:\n",
         "jit/test_abi.py jit/test_compile_ops.py"),
        ("jit/unknown_limits_taken", "registry.py", 'raise self.fail(key, f"unknown limit', 'str(f"unknown limit',
         "jit/test_jit_registry.py jit/test_jit_wrong_json.py"),
    ),
    # The emulator.
    *_in(
        "emulator/", "emulator/test_emulator_exec_integer.py",
        ("emulator/packed_shift_by_16", "native/exec_packed.cpp", "PAIR2(v_pk_lshlrev_b16, U2, u16, u32{y} << (x & 15));",
         "PAIR2(v_pk_lshlrev_b16, U2, u16, u32{y} << (x & 31));"),
        ("emulator/missing_wait_unseen", "native/checkers_lds.cpp",
         "if (rec.dma ? s.vm_done >= rec.write_seq : rec.write_wave == c.wave || s.lgkm_done >= rec.write_seq) return;",
         "return;", "emulator/test_emulator_checkers.py"),
        ("emulator/readers_before_a_barrier", "native/checkers_lds.cpp",
         "if (c.options.check_strict || !in_order)", "if (c.options.check_strict)",
         "emulator/test_emulator_races.py emulator/test_emulator_checker_rules.py"),
        ("emulator/signed_zeros_alike", "native/half_rules.h", "Half(maximum ? a.bits & b.bits : a.bits | b.bits)", "a",
         "emulator/test_emulator_exec_packed.py emulator/test_emulator_exec_float.py emulator/test_emulator_exec_exhaustive.py"),
    ),
    # Layers and tuners.
    *_in(
        "", "nn/test_nn.py",
        ("nn/page_not_turned", "src/hipforge/nn/cache.py", "held[position // self.page_size] * self.page_size",
         "held[0] * self.page_size", "nn/test_nn.py nn/test_generate.py"),
        ("nn/bias_forgotten", "src/hipforge/nn/linear.py",
         "y = mxfp8_linear(q, scale, self.weight, self.weight_scale, self.bias, out)",
         "y = mxfp8_linear(q, scale, self.weight, self.weight_scale, None, out)"),
        ("tuning/nan_taken_for_right", "tuning/search.py", "if not error <= max_error:", "if error > max_error:",
         "ops/test_tuning.py"),
        ("tuning/other_rows_lost", "tuning/table_writer.py", "merged = {**read_existing(schema, path), **new}",
         "merged = {**new}", "ops/test_tuning.py ops/test_tuned_tables.py"),
    ),
]  # fmt: skip
