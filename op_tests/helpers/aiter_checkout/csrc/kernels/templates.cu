#include "ck_tile/core.hpp"
