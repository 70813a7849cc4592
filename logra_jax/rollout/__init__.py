"""Rollout: prompts in, completions with log-probabilities out."""
