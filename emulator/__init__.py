"""Execute gfx950 and gfx942 code objects on the CPU."""
