"""Config, loop, state and everything a training run writes or shows."""
