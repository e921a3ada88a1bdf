"""Long random trials of the whole package: killed and racing builders, fuzzed calls, damaged files and objects."""
