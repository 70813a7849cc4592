"""A training step's factors as an update that others can repeat."""

from collections.abc import Mapping
from pathlib import Path

from flax import nnx

from logra_jax.algorithm.basis import Basis
from logra_jax.algorithm.digest import TensorDigest, model_digest
from logra_jax.models.hf import named_factors, tensor_digests
from logra_jax.rollout.history import History
from logra_jax.rollout.wire import Update
from logra_jax.training.distributed import is_leader

UPDATES_DIRECTORY = "updates"  # of a run directory


class Updates:
    """Makes the update of each step, with the digests of the weights around it.

    Of several processes all make it, and the leader keeps it.

    Args:
        run_dir: the run directory; updates are kept in it.
        graph: of the sketched model.
        probes: zeros.
        basis: of the run.
        rounding: of the run's merges.
        version: of ``weights``.
        weights: before the first update that is made.
        keep: number of newest updates kept; None keeps all.

    Attributes:
        history: the updates that are kept; in the leader alone.
        digests: of every weight after the last update, by Hugging Face name.
    """

    history: History
    digests: Mapping[str, TensorDigest]

    def __init__(
        self,
        run_dir: Path,
        graph: nnx.GraphDef,
        probes: nnx.State,
        basis: Basis,
        rounding: str,
        version: int,
        weights: nnx.State,
        *,
        keep: int | None = None,
    ):
        directory = run_dir / UPDATES_DIRECTORY
        if is_leader():
            self.history = History(directory, keep=keep, version=version)
        self._graph, self._probes = graph, probes
        self._basis, self._rounding = basis, rounding
        self.digests = tensor_digests(nnx.merge(graph, probes, weights))

    def write(self, version: int, factors: nnx.State, weights: nnx.State) -> bytes:
        """Keep the update to ``version``, which made ``weights``.

        Returns:
            Its bytes; none where another process keeps it.
        """
        update = self._make(version, factors, weights)
        return self.history.write(update) if is_leader() else b""

    def _make(self, version: int, factors: nnx.State, weights: nnx.State) -> Update:
        model = nnx.merge(self._graph, self._probes, weights)
        before, self.digests = self.digests, tensor_digests(model)
        named = dict(named_factors(model, factors))
        return Update(
            base_version=version - 1,
            version=version,
            seed=self._basis.seed,
            step=version - 1,
            kind=self._basis.kind,
            refresh=self._basis.refresh,
            rounding=self._rounding,
            base_digest=model_digest(before),
            digest=model_digest(self.digests),
            digests={name: self.digests[name].word for name in named},
            factors=named,
        )
