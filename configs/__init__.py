"""Tuned tables: one CSV per op family."""
