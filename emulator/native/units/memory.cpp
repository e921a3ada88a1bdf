// Loads, stores and LDS.
#include "../access.cpp"
#include "../memory.cpp"
#include "../exec_global.cpp"
#include "../exec_buffer.cpp"
#include "../exec_lds.cpp"
