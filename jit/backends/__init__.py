"""A folder per vendor for its compilers, binaries and runtime, and the interface that all of them implement."""
