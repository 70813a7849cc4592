"""`python -m logra_jax` is the `logra` command."""

import sys

from logra_jax.cli import main

# Spawned reward workers import this module again under another name: they must not
# start a second command.
if __name__ == "__main__":
    sys.exit(main())
