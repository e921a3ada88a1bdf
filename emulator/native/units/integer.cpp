// Integer, packed, cross-lane and scalar instructions.
#include "../exec_valu_int.cpp"
#include "../exec_packed.cpp"
#include "../exec_lane.cpp"
#include "../exec_salu.cpp"
#include "../exec_smem.cpp"
#include "../exec_control.cpp"
