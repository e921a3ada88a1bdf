#pragma once
#include "hipforge/device/launch.h"
#include HF_VENDOR_HEADER(early_start.h)
