"""Pure-torch references: the exact semantics of every op, on any device, without a build."""
