"""Config section of sampling, in this process or on servers."""

from dataclasses import dataclass, field
from typing import Literal

from logra_jax.training.checks import at_least, positive, require


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are sampled."""

    engine: Literal["local", "sglang"] = "local"
    """`local` samples in this process, from the trainer's own weights; `sglang` on the
    servers at `urls`, which receive every update."""
    temperature: float = 1.0
    """Sampling temperature, also of the log-probs that training uses."""
    top_p: float = 1.0
    """Smallest nucleus that holds this probability; 1 is off."""
    top_k: int = 0
    """Most likely tokens kept; 0 is off."""
    max_new_tokens: int = 24
    """Response length at which a response is cut, tokens."""
    min_new_tokens: int = 0
    """Response length before which none ends, tokens; its end is then not sampled, but
    the log-probs that training uses know nothing of that."""
    prompt_bucket: int = 8
    """All prompts are padded to the longest one's length, rounded up to a multiple of
    this, tokens."""
    urls: list[str] = field(default_factory=list)
    """Base URLs of the SGLang servers, such as `[http://127.0.0.1:30000]`."""
    router: str | None = None
    """URL of an SGLang router in front of them, that requests go through; updates go to
    `urls` all the same."""
    api_key_env: str = "SGLANG_API_KEY"
    """Environment variable that holds the servers' API key; unset is no key."""
    pause: Literal["retract", "in_place", "abort"] = "retract"
    """What an update does to requests that are running: start them again from their
    prompts, go on with them under the new weights, or end them."""
    staleness: int = 0
    """Updates that a batch's weights may be behind; 0 samples after each update, 1 and
    more sample the next batches while this one is trained on."""
    request_deadline: float = 600.0
    """Seconds after which a request is asked of another server."""
    batch_deadline: float = 3600.0
    """Seconds after which a batch of requests is given up."""
    concurrency: int = 256
    """Requests under way at once."""
    push_deadline: float = 600.0
    """Seconds for one update, or all weights, to reach one server."""
    patience: float = 600.0
    """Seconds to wait for a server to come back when none is left."""
    keep_updates: int = 64
    """Newest updates kept for servers that missed some; one that missed more is sent
    all weights."""
    load_weights: bool = False
    """At the start, load the trainer's weights into servers that hold others; otherwise
    such a server is an error, but for a run that is resumed."""
    share_dir: str | None = None
    """Directory that trainer and servers share, for sending all weights; null is the
    run directory."""

    def __post_init__(self) -> None:
        """Check values."""
        positive("rollout.temperature", self.temperature, "1.0 is usual")
        require(
            0 < self.top_p <= 1,
            "rollout.top_p",
            self.top_p,
            "lie in (0, 1]",
            "1.0 turns it off",
        )
        at_least("rollout.top_k", self.top_k, 0, "0 turns it off")
        at_least("rollout.max_new_tokens", self.max_new_tokens, 1)
        require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            "rollout.min_new_tokens",
            self.min_new_tokens,
            f"lie in [0, `rollout.max_new_tokens` ({self.max_new_tokens})]",
            "0 turns it off",
        )
        at_least("rollout.prompt_bucket", self.prompt_bucket, 1, "1 pads nothing")
        self._check_servers()

    def _check_servers(self) -> None:
        if self.engine == "local":
            rule, remedy = "when `rollout.engine` is local", "set rollout.engine=sglang"
            require(not self.urls, "rollout.urls", self.urls, f"be [] {rule}", remedy)
            name = "rollout.router"
            require(self.router is None, name, self.router, f"be null {rule}", remedy)
            name = "rollout.staleness"
            require(self.staleness == 0, name, self.staleness, f"be 0 {rule}", remedy)
        else:
            require(
                self.urls != [],
                "rollout.urls",
                self.urls,
                "name a server when `rollout.engine` is sglang",
                "`logra serve` starts one and prints its URL",
            )
            # Only here: most configs load without it.
            from logra_jax.rollout.servers import base_url

            bases = {base_url("rollout.urls", url) for url in self.urls}
            if self.router is not None:
                base_url("rollout.router", self.router)
            require(
                len(bases) == len(self.urls),
                "rollout.urls",
                self.urls,
                "name each server once",
            )
        require(
            self.api_key_env != "",
            "rollout.api_key_env",
            self.api_key_env,
            "name an environment variable",
            "SGLANG_API_KEY is usual, set or not",
        )
        at_least("rollout.staleness", self.staleness, 0, "0 waits for each update")
        positive("rollout.request_deadline", self.request_deadline, "600 s is usual")
        positive("rollout.batch_deadline", self.batch_deadline, "3600 s is usual")
        positive("rollout.push_deadline", self.push_deadline, "600 s is usual")
        positive("rollout.patience", self.patience, "600 s is usual")
        require(
            self.batch_deadline >= self.request_deadline,
            "rollout.batch_deadline",
            self.batch_deadline,
            f"be at least `rollout.request_deadline` ({self.request_deadline})",
        )
        at_least("rollout.concurrency", self.concurrency, 1, "256 is usual")
        at_least("rollout.keep_updates", self.keep_updates, 1, "64 is usual")
