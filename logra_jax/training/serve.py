"""`logra serve`: an SGLang server for a config's model, until it is told to stop."""

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from logra_jax.models.hf_config import read_config
from logra_jax.rollout.serve import (
    Launched,
    LaunchError,
    ServeOptions,
    launch,
)
from logra_jax.training.policy import check_served, model_directory
from logra_jax.training.schema import Config

GRACE = 10.0
"""Seconds that a server gets to finish what it is answering."""


def serve_command(config: Config, source: str, overrides: Sequence[str] = ()) -> int:
    """Serve the model of a config until Ctrl-C, SIGTERM or the server's own end.

    Args:
        config: a run's config; its model, and its section `serve`.
        source: the config file, for the command that is shown.
        overrides: those that went into `config`, likewise.

    Returns:
        0 where it was told to stop, 1 where the server did not start, and the server's
        own status where it ended by itself.

    Raises:
        ValueError: a model, interpreter, address or number of ranks that cannot be.
    """
    options = serve_options(config)
    # From here on SIGTERM, like Ctrl-C, unwinds the stack: the server is stopped.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with _launch(options) as server:
            _announce(server, options, train_command(server.url, source, overrides))
            try:
                status = server.process.wait()
            except KeyboardInterrupt:
                server.stop(GRACE)
                return 0
            server.stop()  # its workers, so that the log is whole
            tail = f"the last lines of {server.log}:\n{server.log_tail()}"
    except LaunchError as error:
        print(f"logra: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # while it started, or a second one
        return 0
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"logra: The server ended with status {status}; {tail}", file=sys.stderr)
    return status if status >= 0 else 128 - status


def train_command(url: str, source: str, overrides: Sequence[str] = ()) -> str:
    """The command, for a shell, that trains a config with the server at `url`."""
    ours = [text for text in overrides if not text.startswith("serve.")]
    engine = ["rollout.engine=sglang", f"rollout.urls=[{url}]"]
    return shlex.join(["logra", "train", source, *ours, *engine])


def _launch(options: ServeOptions) -> Launched:
    from logra_jax.training.display import Display

    with (
        Display(total_steps=0) as display,
        display.phase(f"starting SGLang with {options.model_dir}"),
    ):
        return launch(options)


def _announce(server: Launched, options: ServeOptions, command: str) -> None:
    print(f"SGLang on {server.device} at {server.url}: {options.model_dir}")
    print(f"its log: {server.log}")
    print(f"train with it, from another terminal:\n\n    {command}\n")
    print("Ctrl-C stops it.", flush=True)


def serve_options(config: Config) -> ServeOptions:
    """The server of a config.

    Raises:
        ValueError: no such model, one that cannot be trained, or too many ranks for it.
    """
    serve = config.serve
    directory = model_directory(config)
    shapes = read_config(directory)
    check_served(config, shapes)
    heads = {"attention heads": shapes.num_heads}
    if shapes.delta is not None:
        heads["key heads of Gated DeltaNet layers"] = shapes.delta.key_heads
    for kind, number in heads.items():
        if number % serve.tp:
            raise ValueError(
                f"`serve.tp` must divide the model's {kind} ({number}), got {serve.tp}."
            )
    return ServeOptions(
        model_dir=directory,
        dtype=config.model.dtype,
        python=serve.python or sys.executable,
        host=serve.host,
        port=serve.port,
        tp=serve.tp,
        device=serve.device,
        has_delta=shapes.delta is not None,
        memory=serve.memory,
        max_tokens=serve.max_tokens,
        max_running=serve.max_running,
        threads=serve.threads,
        text=serve.text,
        start_timeout=serve.start_timeout,
        api_key=os.environ.get(config.rollout.api_key_env) or None,
        log=None if serve.log is None else Path(serve.log),
        args=tuple(serve.args),
    )
