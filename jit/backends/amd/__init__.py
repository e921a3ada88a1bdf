"""AMD: clang for HIP, the ROCm tree, code objects and their resources, libamdhip64."""
