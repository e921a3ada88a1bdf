// Matrix instructions and their numerics.
#include "../matrix.cpp"
#include "../exec_matrix.cpp"
