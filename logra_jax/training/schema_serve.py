"""Config section of `logra serve`: where the SGLang server runs, and with how much."""

from dataclasses import dataclass, field
from typing import Literal

from logra_jax.training.checks import at_least, positive, require


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The SGLang server that `logra serve` starts; training itself reads none of it."""

    python: str | None = None
    """Interpreter of the environment that has SGLang; null is the one that runs this
    command."""
    host: str = "127.0.0.1"
    """Address to listen at; the default is reached from this machine only."""
    port: int = 30000
    """Port to listen at; 0 takes a free one."""
    tp: int = 1
    """Tensor-parallel ranks."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto` is a GPU where torch finds one, else plain torch on the CPU."""
    memory: float | None = None
    """Share of the GPU's memory for weights and KV cache; null lets SGLang choose."""
    max_tokens: int | None = None
    """Size of the KV cache, tokens; null fits it to the memory on a GPU, and is 32768
    on a CPU."""
    max_running: int | None = None
    """Requests answered at once; null lets SGLang choose."""
    threads: int | None = None
    """Threads of each rank, on a CPU; null is 1, the fastest for most models there."""
    text: bool = False
    """Load the tokenizer too, for text in and out; training needs token ids only."""
    start_timeout: float = 600.0
    """Seconds in which the server must answer."""
    log: str | None = None
    """File for the server's output; null makes one in the temporary directory."""
    args: list[str] = field(default_factory=list)
    """Further flags of SGLang, such as [--context-length, "4096"]."""

    def __post_init__(self) -> None:
        """Check values."""
        require(
            self.host != "",
            "serve.host",
            self.host,
            "be an address",
            "127.0.0.1 is this machine alone, 0.0.0.0 every network",
        )
        require(0 <= self.port < 2**16, "serve.port", self.port, "lie in [0, 65535]")
        at_least("serve.tp", self.tp, 1)
        if self.memory is not None:
            require(
                0 < self.memory < 1,
                "serve.memory",
                self.memory,
                "lie strictly between 0 and 1",
                "null lets SGLang choose",
            )
        for name in ("max_tokens", "max_running", "threads"):
            value = getattr(self, name)
            if value is not None:
                at_least(f"serve.{name}", value, 1, "use null for the default")
        positive("serve.start_timeout", self.start_timeout, "600 seconds is usual")
