"""The int4 cache of decode attention as a tuned family: its table and its tuner."""
