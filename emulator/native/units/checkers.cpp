// The checkers.
#include "../checkers.cpp"
#include "../checkers_lds.cpp"
#include "../checkers_scalar.cpp"
#include "../global_races.cpp"
#include "../polls.cpp"
#include "../usage.cpp"
