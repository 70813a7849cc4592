"""Config sections of what watches a run: held-out evaluation, monitor, alarms."""

from dataclasses import dataclass

from logra_jax.training.checks import at_least, require


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Held-out evaluation: every question greedily, and samples at T=1."""

    samples: int = 256
    """Responses at T=1, spread over the held-out questions."""
    batch: int = 64
    """Responses sampled at once."""

    def __post_init__(self) -> None:
        """Check values."""
        at_least("eval.samples", self.samples, 1)
        at_least("eval.batch", self.batch, 1)


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """A look at real gradients now and then, and when a metric raises an alarm."""

    every: int = 0
    """Updates between measurements of how well the sketches keep gradients; 0 is never;
    each costs about one dense gradient of `responses`."""
    responses: int = 8
    """Responses of the batch whose gradient is measured, spread evenly over it."""
    min_cos_c: float = 0.25
    """Alarm below this gain of a layer kind's step at equal KL, of the dense step's."""
    min_snr: float = 0.5
    """Alarm below this signal-to-noise ratio in any layer."""
    kl_ratio_low: float = 0.3
    """Alarm below this ratio of the realised KL to the predicted one."""
    kl_ratio_high: float = 3.0
    """Alarm above this ratio of the realised KL to the predicted one."""
    landed_low: float = 0.5
    """Alarm below this part of an update landing on the weights, in its direction."""
    landed_high: float = 1.5
    """Alarm above this part."""
    max_truncated: float = 0.95
    """Alarm above this share of responses cut at the length limit."""
    max_failed: float = 0.1
    """Alarm above this share of responses whose scoring raised, or timed out."""

    def __post_init__(self) -> None:
        """Check values."""
        at_least("monitor.every", self.every, 0, "0 turns it off")
        at_least("monitor.responses", self.responses, 1, "8 is usual")
        for name in ("min_cos_c", "min_snr", "max_truncated", "max_failed"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"monitor.{name}", value, "lie in [0, 1]")
        for name in ("kl_ratio", "landed"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            require(
                0 <= low < high,
                f"monitor.{name}_low",
                low,
                f"be at least 0 and below `monitor.{name}_high` ({high})",
                "0 never raises an alarm",
            )
