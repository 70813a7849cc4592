"""A trainer without a task: random updates, quantised, merged and encoded as real ones.

For measuring what comes after an update is made; only their directions mean nothing.
"""

import dataclasses
import math
import time
from pathlib import Path

import jax
from flax import nnx

from logra_jax.algorithm.factor import quantise
from logra_jax.algorithm.merge import merge
from logra_jax.algorithm.sketch import Probe, sketch
from logra_jax.models.hf import load_decoder, save_decoder
from logra_jax.rollout.sync import Weights
from logra_jax.training.policy import basis_of, model_directory
from logra_jax.training.schema import Config
from logra_jax.training.updates import Updates

_ROW_RMS = 1e-5  # of a proposal, as in the quickstart


class RandomTrainer:
    """A config's model, and updates of its sketch's rank and bits that move it.

    Args:
        config: its model, sketch and seed are used.
        scratch: directory for the last update and for :meth:`export`.

    Attributes:
        setup: what is trained, and how, in words and numbers.
        updates: made so far.
        version: of the weights.

    Raises:
        ValueError: the model cannot be loaded, a bad rank or match.
    """

    def __init__(self, config: Config, scratch: Path):
        self._dtype, self._scratch = config.model.dtype, scratch
        self._source = model_directory(config)
        options, basis = config.sketch, basis_of(config)
        model = load_decoder(self._source, dtype=self._dtype)
        shape = dataclasses.asdict(model.config)
        model = sketch(model, options.rank, options.match, basis)
        self._graph, probes, self._state = nnx.split(model, Probe, ...)
        self._probes, self.version = probes, 0
        self.updates = Updates(
            scratch,
            self._graph,
            probes,
            basis,
            options.rounding,
            0,
            self._state,
            keep=1,
        )
        self.setup = {
            "model": self._source.name,
            "shape": shape,
            "weights": sum(math.prod(t.shape) for t in self.updates.digests.values()),
            "dtype": self._dtype,
            "rank": options.rank,
            "bits": options.bits,
            "basis": options.basis,
            "rounding": options.rounding,
        }

        def step(state: nnx.State, key: jax.Array) -> tuple[nnx.State, nnx.State]:
            factors = quantise(_proposal(probes, key), basis, options.bits)
            merged = merge(state, factors, basis, rounding=options.rounding)
            return merged, factors

        self._step = jax.jit(step, donate_argnums=0)

    def step(self) -> tuple[bytes, float]:
        """Move on; the update on the wire, and the seconds that making it took.

        The seconds are those after the merge, which is part of a training step: the new
        weights' digest, the factors on the host, encoded, kept as a file.
        """
        key = jax.random.key(self.version)
        self._state, factors = jax.block_until_ready(self._step(self._state, key))
        self.version += 1
        began = time.perf_counter()
        blob = self.updates.write(self.version, factors, self._state)
        return blob, time.perf_counter() - began

    @property
    def weights(self) -> Weights:
        """What weight sync needs to know of them."""
        return Weights(self.version, self.updates.digests, self.export)

    def export(self) -> Path:
        """Write all weights as a Hugging Face directory."""
        model = nnx.merge(self._graph, self._probes, self._state)
        directory = self._scratch / f"full-{self.version}"
        return save_decoder(model, directory, source=self._source, dtype=self._dtype)


def _proposal(probes: nnx.State, key: jax.Array) -> nnx.State:
    leaves, tree = jax.tree.flatten(probes)
    keys = jax.random.split(key, len(leaves))
    noise = [
        _ROW_RMS * jax.random.normal(k, p.shape)
        for k, p in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, noise)
