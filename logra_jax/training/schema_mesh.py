"""Config section of the device mesh that a run computes on."""

from dataclasses import dataclass

from logra_jax.training.checks import at_least


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices in a box; their number is the product. One device needs no mesh.

    Several virtual devices of a CPU need more threads than cores, or their collectives
    wait for each other: set ``NPROC=32`` in the environment.
    """

    data: int = 1
    """Parts of the batch whose devices all hold the same weights."""
    fsdp: int = 1
    """Parts of the batch, and of the weights: layers gather their kernels in turn."""
    tensor: int = 1
    """Parts of heads, features and vocabulary, computed on apart."""

    def __post_init__(self) -> None:
        """Check values."""
        for name in ("data", "fsdp", "tensor"):
            at_least(f"mesh.{name}", getattr(self, name), 1, "1 does not cut")

    @property
    def devices(self) -> int:
        """In all."""
        return self.data * self.fsdp * self.tensor

    @property
    def row_parts(self) -> int:
        """Parts that a batch is cut into."""
        return self.data * self.fsdp
