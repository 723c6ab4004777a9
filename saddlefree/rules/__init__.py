"""Rules: how far to go on a model, and what to learn from it."""
