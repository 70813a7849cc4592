"""Config section of a run that is made of several processes."""

from dataclasses import dataclass

from logra_jax.training.checks import at_least


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How the processes of a `logra train` find each other; other commands run in one.

    The same command starts each, with the number of its own where no cluster manager
    gives it. `mesh` spans the devices of all; `run_dir` lies where all can reach it.
    """

    enabled: bool = False
    """Whether there are several; SLURM, Kubernetes and Open MPI tell JAX the rest."""
    coordinator: str | None = None
    """Address of the first process, `HOST:PORT`; null asks the cluster manager."""
    processes: int | None = None
    """Number of processes; null asks the cluster manager."""
    process: int | None = None
    """Which of them this is, from 0; null asks the cluster manager."""

    def __post_init__(self) -> None:
        """Check values."""
        given = (self.coordinator, self.processes, self.process)
        if any(value is not None for value in given):
            self._check_given()

    def _check_given(self) -> None:
        if not self.enabled:
            raise ValueError(
                "`distributed.enabled` must be true where the processes are described, "
                "got false; set it or leave the section out."
            )
        for name in ("coordinator", "processes", "process"):
            if getattr(self, name) is None:
                raise ValueError(
                    f"`distributed.{name}` must be given where `coordinator`, "
                    "`processes` or `process` is, got null; give all three or none."
                )
        assert self.coordinator is not None
        assert self.processes is not None
        assert self.process is not None
        host, _, port = self.coordinator.rpartition(":")
        if not (host and port.isdigit()):
            raise ValueError(
                "`distributed.coordinator` must be `HOST:PORT`, got "
                f"{self.coordinator!r}; any free port of the first process's host does."
            )
        at_least("distributed.processes", self.processes, 1)
        at_least("distributed.process", self.process, 0)
        if self.process >= self.processes:
            raise ValueError(
                "`distributed.process` must be less than `distributed.processes` "
                f"({self.processes}), got {self.process}; count from 0."
            )
