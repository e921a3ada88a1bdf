#pragma once
#include "hipforge/device/vendor.h"
#include HF_VENDOR_HEADER(slots.h)
