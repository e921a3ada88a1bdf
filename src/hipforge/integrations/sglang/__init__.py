"""hipforge in SGLang."""
