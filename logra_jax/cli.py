"""The `logra` command: train, serve, eval, export, fidelity, spectrum, bench.

This module imports nothing heavy: `--help` is instant, and spawned reward workers,
which import the main module again, start without JAX.
"""

import argparse
import os
import sys
from collections.abc import Sequence

import logra_jax

_TRAIN_EXAMPLES = """\
examples:
  logra train configs/quickstart.yaml
  logra train configs/quickstart.yaml train.steps=2 run_dir=runs/try
  logra train configs/quickstart.yaml sketch.rank=64 kl.budget=constant kl.start=5e-3
  logra train configs/quickstart.yaml resume=runs/quickstart-20260101-120000
"""
_SERVE_EXAMPLES = """\
examples:
  logra serve configs/quickstart.yaml serve.python=sgl/bin/python
  logra serve configs/quickstart.yaml serve.tp=2 'serve.args=[--log-level, debug]'
then, in another terminal:
  logra train configs/quickstart.yaml rollout.engine=sglang \\
      'rollout.urls=[http://127.0.0.1:30000]'
"""
_EVAL_EXAMPLES = """\
examples:
  logra eval configs/quickstart.yaml eval.samples=1024
  logra eval runs/quickstart-20260101-120000
"""
_EXPORT_EXAMPLES = """\
example:
  logra export runs/quickstart-20260101-120000 my-model
"""
_REPLAY_EXAMPLES = """\
examples:
  logra train configs/quickstart.yaml train.save_updates=true run_dir=runs/kept
  logra replay path/to/base-model runs/kept/updates my-model
"""
_BENCH_EXAMPLES = """\
examples:
  logra bench rollout configs/quickstart.yaml
  logra bench rollout configs/quickstart.yaml rollout.max_new_tokens=64 --json
  logra bench merge configs/quickstart.yaml
"""
_SYNC_EXAMPLES = """\
The weights of the servers at rollout.urls are changed, and left so. Where there are
none, a server is started as the section `serve` says, and stopped. All weights go
through files in rollout.share_dir (null: the temporary directory), which the servers
must see too; on one machine, files just written are read from memory.

examples:
  logra bench sync configs/quickstart.yaml serve.python=sgl/bin/python
  logra bench sync configs/quickstart.yaml --repeat 9 --json \\
      rollout.engine=sglang 'rollout.urls=[http://127.0.0.1:30000]'
"""
_OVERLAP_EXAMPLES = """\
The config is trained twice, for a few steps each: one batch ahead and synchronously.
The weights of the servers at rollout.urls are changed, and left so. Where there are
none, a server is started as the section `serve` says, and stopped. Run directories are
made in rollout.share_dir (null: the temporary directory), and removed.

examples:
  logra bench overlap configs/quickstart.yaml serve.python=sgl/bin/python
  logra bench overlap configs/quickstart.yaml --steps 12 --json \\
      rollout.pause=in_place rollout.engine=sglang \\
      'rollout.urls=[http://127.0.0.1:30000]'
"""
_FIDELITY_EXAMPLES = """\
examples:
  logra fidelity
  logra fidelity --rank 4 8 16 32 --seeds 1 --plot fidelity.png
"""
_SPECTRUM_EXAMPLES = """\
examples:
  logra spectrum configs/quickstart.yaml
  logra spectrum configs/quickstart.yaml sketch.rank=64 --energy 0.8 0.99 --json
"""
# Modules that an extra brings: the package each comes from, and the extra.
_EXTRAS = {
    "aiohttp": ("aiohttp", "train,sglang"),
    "gguf": ("gguf", "train"),
    "jinja2": ("jinja2", "train"),
    "matplotlib": ("matplotlib", "train"),
    "omegaconf": ("omegaconf", "train"),
    "reasoning_gym": ("reasoning-gym", "train"),
    "rich": ("rich", "train"),
    "safetensors": ("safetensors", "train"),
    "tensorboardX": ("tensorboardX", "train"),
    "tokenizers": ("tokenizers", "train"),
    "yaml": ("pyyaml", "train"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Bad input is one line on standard error and exit code 2; `--traceback` shows where
    it was found.

    Args:
        argv: the arguments after the program's name; None takes them from the shell.
    """
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, ModuleNotFoundError) as error:
        message = _explain(error)
        if args.traceback or message is None:
            raise
        print(f"logra: {message}", file=sys.stderr)
        return 2


def _explain(error: ValueError | ModuleNotFoundError) -> str | None:
    """The user's one line, or None for an error that is no fault of theirs."""
    if isinstance(error, ValueError):
        return " ".join(str(error).split())
    missing = _EXTRAS.get((error.name or "").partition(".")[0])
    if missing is None:
        return None
    package, extra = missing
    return f"{package} is not installed; run `pip install 'logra-jax[{extra}]'`."


def _train(args: argparse.Namespace) -> int:
    from logra_jax.training.config import load_config

    config = load_config(args.config, args.overrides)

    from logra_jax.training.loop import train

    return train(config)


def _serve(args: argparse.Namespace) -> int:
    from logra_jax.training.config import load_config

    config = load_config(args.config, args.overrides)

    from logra_jax.training.serve import serve_command

    return serve_command(config, args.config, args.overrides)


def _eval(args: argparse.Namespace) -> int:
    from logra_jax.training.evaluate import evaluate_command

    return evaluate_command(args.target, args.overrides)


def _export(args: argparse.Namespace) -> int:
    from logra_jax.training.export import export_command

    return export_command(args.run_dir, args.out_dir)


def _replay(args: argparse.Namespace) -> int:
    from logra_jax.rollout.follow import replay_command

    return replay_command(args.model_dir, args.updates, args.out_dir)


def _bench_rollout(args: argparse.Namespace) -> int:
    from logra_jax.training.config import load_config

    config = load_config(args.config, args.overrides)

    from logra_jax.study.bench import bench_rollout

    return bench_rollout(config, args.json)


def _bench_merge(args: argparse.Namespace) -> int:
    from logra_jax.training.config import load_config

    config = load_config(args.config, args.overrides)

    from logra_jax.study.bench_merge import bench_merge

    return bench_merge(config, args.tokens, args.json)


def _bench_sync(args: argparse.Namespace) -> int:
    from logra_jax.training.config import load_config

    config = load_config(args.config, args.overrides)

    from logra_jax.study.bench_sync import bench_sync

    return bench_sync(config, args.json, repetitions=args.repeat)


def _bench_overlap(args: argparse.Namespace) -> int:
    from logra_jax.training.config import load_config

    config = load_config(args.config, args.overrides)

    from logra_jax.study.bench_overlap import bench_overlap

    return bench_overlap(config, args.json, steps=args.steps)


def _fidelity(args: argparse.Namespace) -> int:
    from logra_jax.study.fidelity import RANKS, fidelity

    return fidelity(args.rank or RANKS, args.seeds, args.json, args.plot)


def _spectrum(args: argparse.Namespace) -> int:
    # Before JAX loads LAPACK: its threads and XLA's, on the same cores, make the
    # eigenvalues of small matrices 15 times slower.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    from logra_jax.training.config import load_config

    config = load_config(args.config, args.overrides)

    from logra_jax.study.spectrum import ENERGIES, spectrum

    return spectrum(config, args.energy or ENERGIES, args.responses, args.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="logra",
        description="RL post-training of full LLM weights at close to the memory of "
        "inference.",
        epilog="`logra COMMAND --help` has examples.",
    )
    version = f"logra {logra_jax.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    train = _command(commands, "train", "train a model", _TRAIN_EXAMPLES)
    train.set_defaults(run=_train)
    _add_config(train)

    serve = _command(
        commands, "serve", "serve a model with SGLang, for training", _SERVE_EXAMPLES
    )
    serve.set_defaults(run=_serve)
    _add_config(serve)

    evaluate = _command(
        commands,
        "eval",
        "measure held-out accuracy of a model or a run",
        _EVAL_EXAMPLES,
    )
    evaluate.set_defaults(run=_eval)
    evaluate.add_argument(
        "target", metavar="CONFIG|RUN_DIR", help="a config file, or a run directory"
    )
    _add_overrides(evaluate)

    export = _command(
        commands,
        "export",
        "write a run's model as a Hugging Face directory",
        _EXPORT_EXAMPLES,
    )
    export.set_defaults(run=_export)
    export.add_argument("run_dir", metavar="RUN_DIR", help="a run directory")
    export.add_argument("out_dir", metavar="OUT_DIR", help="the directory to write")

    fidelity = _command(
        commands,
        "fidelity",
        "measure how well sketches reconstruct, against theory and paper",
        _FIDELITY_EXAMPLES,
    )
    fidelity.set_defaults(run=_fidelity)
    fidelity.add_argument(
        "--rank",
        type=int,
        nargs="+",
        metavar="R",
        help="ranks (default: 4 16 64 256)",
    )
    fidelity.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="repetitions (default: 3)"
    )
    fidelity.add_argument("--plot", metavar="FILE.png", help="draw cosine against rank")
    fidelity.add_argument("--json", action="store_true", help="print one JSON object")

    spectrum = _command(
        commands,
        "spectrum",
        "find the rank that real gradients of a model and task need",
        _SPECTRUM_EXAMPLES,
    )
    spectrum.set_defaults(run=_spectrum)
    _add_config(spectrum)
    spectrum.add_argument(
        "--energy",
        type=float,
        nargs="+",
        metavar="SHARE",
        help="shares of a gradient's energy (default: 0.5 0.9 0.95 0.99)",
    )
    spectrum.add_argument(
        "--responses",
        type=int,
        default=32,
        metavar="N",
        help="responses whose gradient is measured (default: 32)",
    )
    spectrum.add_argument("--json", action="store_true", help="print one JSON object")

    replay = _command(
        commands,
        "replay",
        "apply a run's saved updates to the model it began from",
        _REPLAY_EXAMPLES,
    )
    replay.set_defaults(run=_replay)
    replay.add_argument("model_dir", metavar="MODEL_DIR", help="the model before")
    replay.add_argument("updates", metavar="UPDATES", help="a directory, or one file")
    replay.add_argument("out_dir", metavar="OUT_DIR", help="the directory to write")

    bench = commands.add_parser("bench", help="measure speed")
    benches = bench.add_subparsers(metavar="WHAT", required=True)
    rollout = _command(
        benches, "rollout", "sampling against transformers' generate", _BENCH_EXAMPLES
    )
    rollout.set_defaults(run=_bench_rollout)
    _add_config(rollout)
    rollout.add_argument("--json", action="store_true", help="print one JSON object")

    merge = _command(
        benches, "merge", "landing an update, as a share of its step", _BENCH_EXAMPLES
    )
    merge.set_defaults(run=_bench_merge)
    _add_config(merge)
    merge.add_argument(
        "--tokens", type=int, default=4096, help="in a step (default: 4096)"
    )
    merge.add_argument("--json", action="store_true", help="print one JSON object")

    sync = _command(
        benches,
        "sync",
        "sending updates to SGLang servers, against sending all weights",
        _SYNC_EXAMPLES,
    )
    sync.set_defaults(run=_bench_sync)
    _add_config(sync)
    sync.add_argument(
        "--repeat", type=int, default=5, metavar="N", help="of each kind (default: 5)"
    )
    sync.add_argument("--json", action="store_true", help="print one JSON object")

    overlap = _command(
        benches,
        "overlap",
        "training with the next batch sampled during an update, against without",
        _OVERLAP_EXAMPLES,
    )
    overlap.set_defaults(run=_bench_overlap)
    _add_config(overlap)
    overlap.add_argument(
        "--steps", type=int, default=6, metavar="N", help="each way (default: 6)"
    )
    overlap.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    description: str,
    examples: str,
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=description,
        description=f"{description[0].upper()}{description[1:]}.",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--traceback", action="store_true", help="show where bad input was found"
    )
    return command


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", metavar="CONFIG", help="a YAML file")
    _add_overrides(command)


def _add_overrides(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="override a field, dotted: train.steps=2",
    )
