"""GPU ops: envelope, tuned lookup, dispatch; one file per op family."""
