"""Questions, rewards, advantages and losses."""
