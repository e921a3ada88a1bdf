// Floating-point vector instructions, conversions and compares.
#include "../exec_valu_float.cpp"
#include "../exec_valu_half.cpp"
#include "../exec_convert.cpp"
#include "../exec_compare.cpp"
