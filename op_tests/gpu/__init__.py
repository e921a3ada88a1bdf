"""The tests that need a GPU, and the record of the last run on one."""
