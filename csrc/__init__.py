"""HIP sources of the modules and the C++ sources of the emulator, shipped as package data."""
