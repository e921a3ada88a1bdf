"""Build, cache, load and bind HIP modules."""
