// Part of the stand-in for hipCUB.
#pragma once
#include "hipcub.hpp"
