"""What every op uses: checks, formats, decisions, tuned tables and registration; knows no op family."""
