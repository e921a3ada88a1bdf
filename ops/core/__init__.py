"""What every op is made of: checks, formats, decisions, tuned tables and registration; knows no op family."""
