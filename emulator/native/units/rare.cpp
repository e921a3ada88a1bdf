// Instructions that no kernel executes often.
#include "../exec_atomics.cpp"
#include "../exec_lds_atomics.cpp"
#include "../exec_buffer_format.cpp"
#include "../exec_one.cpp"
