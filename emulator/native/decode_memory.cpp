// SMEM, DS, FLAT and its segments, MUBUF.
#include "decoder.h"

namespace hfemu {

bool Decoder::smem() {
  if (!select(Encoding::SMEM, Format::SMEM, bits(w0_, 25, 18))) return false;
  const unsigned data = bits(w0_, 12, 6);
  inst_.sc0 = bit(w0_, 16);
  if (!row_->has(isa::atomic) || inst_.sc0) inst_.dst = sgpr(data, row_->dst);
  inst_.vdata = sgpr(data, row_->src[1]);
  if (row_->has(isa::imm_hex)) inst_.simm = static_cast<int32_t>(data);
  if (row_->src[0].dwords == 0) return true;
  Operand base = sgpr(bits(w0_, 5, 0) * 2, row_->src[0]);
  (row_->has(isa::buffer) ? inst_.srsrc : inst_.saddr) = base;
  // imm: the offset field counts; soffset_en: so does the register; neither: offset[6:0] names a register.
  const bool imm = bit(w0_, 17), soffset = bit(w0_, 14);
  if (imm) inst_.offset = sign_extend(bits(w1_, 20, 0), 21);
  if (soffset) return source(bits(w1_, 31, 25), isa::b32, inst_.soffset);
  if (!imm) return source(bits(w1_, 6, 0), isa::b32, inst_.soffset);
  return true;
}

bool Decoder::ds() {
  if (!select(Encoding::DS, Format::DS, bits(w0_, 24, 17))) return false;
  const bool acc = bit(w0_, 25);
  inst_.gds = bit(w0_, 16);
  if (row_->has(isa::two_offsets)) {
    inst_.offset = bits(w0_, 7, 0);
    inst_.offset1 = static_cast<int32_t>(bits(w0_, 15, 8));
  } else {
    inst_.offset = bits(w0_, 15, 0);
  }
  inst_.vaddr = vgpr(bits(w1_, 7, 0), row_->src[0], acc && row_->has(isa::gws));
  inst_.vdata = vgpr(bits(w1_, 15, 8), row_->src[1], acc);
  inst_.vdata2 = vgpr(bits(w1_, 23, 16), row_->src[2], acc);
  inst_.dst = vgpr(bits(w1_, 31, 24), row_->dst, acc);
  return true;
}

bool Decoder::flat() {
  constexpr Encoding kSegments[] = {Encoding::FLAT, Encoding::SCRATCH, Encoding::GLOBAL};
  constexpr Format kFormats[] = {Format::FLAT, Format::SCRATCH, Format::GLOBAL};
  const unsigned segment = bits(w0_, 15, 14);
  if (segment > 2 || !select(kSegments[segment], kFormats[segment], bits(w0_, 24, 18))) return false;
  const bool acc = bit(w1_, 23);
  inst_.sc0 = bit(w0_, 16);
  inst_.nt = bit(w0_, 17);
  inst_.sc1 = bit(w0_, 25);
  inst_.lds = row_->has(isa::to_lds);
  inst_.offset = segment == 0 ? static_cast<int64_t>(bits(w0_, 11, 0)) : sign_extend(bits(w0_, 12, 0), 13);
  const unsigned saddr = bits(w1_, 22, 16);
  const bool has_saddr = segment != 0 && saddr != 127;
  if (has_saddr && !source(saddr, segment == 1 ? isa::b32 : isa::b64, inst_.saddr)) return false;
  const bool scratch_vaddr = bit(w0_, 13);  // sve
  if (segment != 1 || scratch_vaddr) {
    inst_.vaddr = vgpr(bits(w1_, 7, 0), segment == 1 || has_saddr ? isa::b32 : isa::b64);
  }
  inst_.vdata = vgpr(bits(w1_, 15, 8), row_->src[1], acc);
  if (!row_->has(isa::atomic) || inst_.sc0) inst_.dst = vgpr(bits(w1_, 31, 24), row_->dst, acc);
  return true;
}

bool Decoder::mubuf() {
  if (!select(Encoding::MUBUF, Format::MUBUF, bits(w0_, 24, 18))) return false;
  inst_.sc0 = bit(w0_, 14);
  inst_.sc1 = bit(w0_, 15);
  inst_.nt = bit(w0_, 17);
  if (row_->has(isa::imm_none)) return true;  // buffer_inv, buffer_wbl2
  const bool acc = bit(w1_, 23);
  const unsigned data = bits(w1_, 15, 8);
  inst_.offset = bits(w0_, 11, 0);
  inst_.offen = bit(w0_, 12);
  inst_.idxen = bit(w0_, 13);
  inst_.lds = bit(w0_, 16);
  if (inst_.lds && row_->src[1].dwords != 0) return false;  // only loads write LDS
  const Type addr = inst_.offen && inst_.idxen ? isa::b64 : inst_.offen || inst_.idxen ? isa::b32 : isa::none;
  inst_.vaddr = vgpr(bits(w1_, 7, 0), addr);
  inst_.srsrc = sgpr(bits(w1_, 20, 16) * 4, isa::b128);
  inst_.vdata = vgpr(data, row_->src[1], acc);
  if (!inst_.lds && (!row_->has(isa::atomic) || inst_.sc0)) inst_.dst = vgpr(data, row_->dst, acc);
  const unsigned soffset = bits(w1_, 31, 24);
  return soffset != kLiteral && source(soffset, isa::b32, inst_.soffset);
}

}  // namespace hfemu
