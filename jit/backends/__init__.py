"""What belongs to one vendor's compilers, binaries and runtime: a folder per vendor, and what all of them answer."""
