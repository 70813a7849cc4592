"""How often JAX compiles, and how long it takes: a long run must not go on doing so."""

from jax import monitoring

# Also of a program that is read from the compilation cache; tracing is not in it.
_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileWatch:
    """Counts the programs that this process compiles while the block runs.

        with CompileWatch() as compiles:
            step(state, batch)
        compiles.count  # 0, if the step has run with such shapes before

    Attributes:
        count: programs compiled or read from the compilation cache.
        seconds: what that took.
    """

    def __init__(self):
        self.count = 0
        self.seconds = 0.0

    def __enter__(self) -> "CompileWatch":
        monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(self, *_) -> None:
        monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _EVENT:
            self.count += 1
            self.seconds += duration_secs
