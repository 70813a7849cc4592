"""A run's updates as files, the bytes that a rollout server would receive.

``RUN_DIR/updates/000001.safetensors`` and so on, in wire format v1
(:mod:`logra_jax.rollout.wire`): with the weights that the run began from they are the
run's model at every step.
"""

import os
from pathlib import Path

from flax import nnx

from logra_jax.algorithm.basis import Basis
from logra_jax.algorithm.digest import model_digest
from logra_jax.models.hf import named_factors, tensor_digests
from logra_jax.rollout.wire import Update, encode

UPDATES_DIRECTORY = "updates"


class UpdateFiles:
    """Writes each update of a run, whole or not at all.

    Args:
        run_dir: the run directory.
        graph: of the sketched model.
        probes: zeros.
        basis: of the run.
        rounding: of the run's merges.
        weights: before the first update that is written.
    """

    def __init__(
        self,
        run_dir: Path,
        graph: nnx.GraphDef,
        probes: nnx.State,
        basis: Basis,
        rounding: str,
        weights: nnx.State,
    ):
        self.directory = run_dir / UPDATES_DIRECTORY
        self.directory.mkdir(parents=True, exist_ok=True)
        self._graph, self._probes = graph, probes
        self._basis, self._rounding = basis, rounding
        self._digests = tensor_digests(nnx.merge(graph, probes, weights))

    def write(self, version: int, factors: nnx.State, weights: nnx.State) -> Path:
        """The update to ``version``, which made ``weights``; where it was written."""
        model = nnx.merge(self._graph, self._probes, weights)
        before, self._digests = self._digests, tensor_digests(model)
        named = dict(named_factors(model, factors))
        update = Update(
            base_version=version - 1,
            version=version,
            seed=self._basis.seed,
            step=version - 1,
            kind=self._basis.kind,
            refresh=self._basis.refresh,
            rounding=self._rounding,
            base_digest=model_digest(before),
            digest=model_digest(self._digests),
            digests={name: self._digests[name].word for name in named},
            factors=named,
        )
        path = self.directory / f"{version:06d}.safetensors"
        aside = path.with_name(f".{path.name}.tmp")
        aside.write_bytes(encode(update))
        os.replace(aside, path)
        return path
