"""Measuring: the speed of the rollout engine against `transformers`."""
