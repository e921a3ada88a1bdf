// Part of the stand-in for hipRAND: its host interface is left out.
#pragma once
#include <hip/hip_runtime.h>
