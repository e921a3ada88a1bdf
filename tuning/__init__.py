"""Search, timing, evidence and CSV writing; one file per op family."""
