"""Writes the header of module_generated: a generator in the form of aiter's."""

import os
import sys
from pathlib import Path

folder = Path(sys.argv[sys.argv.index("--working_path") + 1])
(folder / "made.h").write_text(f'#define ARCHS "{os.environ["AITER_GPU_ARCHS"]}"\n')
