"""Writes the header and a source of module_generated: a generator in the form of aiter's."""

import os
import sys
from pathlib import Path

folder = Path(sys.argv[sys.argv.index("--working_path") + 1])
(folder / "made.h").write_text(f'#define ARCHS "{os.environ["AITER_GPU_ARCHS"]}"\n')
source = "#include <hip/hip_runtime.h>\n__global__ void made() {}\nint is_hip() { return __HIP__; }\n"
(folder / "device.cpp").write_text(source)
