"""The `logra` command: train, serve, eval, export, report, plan, bench, studies.

This module imports nothing heavy: `--help` is instant, and spawned reward workers,
which import the main module again, start without JAX.
"""

import argparse
import os
import sys
from collections.abc import Sequence

import logra_jax
from logra_jax import cli_examples as examples

# Modules that an extra brings: the package each comes from, and the extra.
_EXTRAS = {
    "aiohttp": ("aiohttp", "train,sglang"),
    "gguf": ("gguf", "train"),
    "huggingface_hub": ("huggingface-hub", "train"),
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
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # Overrides on both sides of an option: argparse takes those on one side only.
    is_override = all("=" in text and not text.startswith("-") for text in rest)
    if rest and not (is_override and hasattr(args, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides += rest
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
    from logra_jax.training.eval_command import evaluate_command

    return evaluate_command(
        args.target,
        args.overrides,
        config=args.config,
        best=args.best,
        as_json=args.json,
        samples=args.samples,
    )


def _export(args: argparse.Namespace) -> int:
    from logra_jax.training.export import export_command

    return export_command(args.run_dir, args.out_dir, best=args.best)


def _replay(args: argparse.Namespace) -> int:
    from logra_jax.rollout.follow import replay_command

    return replay_command(args.model_dir, args.updates, args.out_dir)


def _report(args: argparse.Namespace) -> int:
    from logra_jax.study.report import report

    return report(args.run_dirs, args.out)


def _plan(args: argparse.Namespace) -> int:
    from logra_jax.training.config import load_config

    config = load_config(args.config, args.overrides)

    from logra_jax.study.plan import plan_command

    return plan_command(
        config,
        devices=args.devices,
        tokens=args.tokens,
        card=args.card,
        as_json=args.json,
    )


def _bench_step(args: argparse.Namespace) -> int:
    from logra_jax.training.config import load_config

    config = load_config(args.config, args.overrides)

    from logra_jax.study.bench_step import bench_step

    return bench_step(
        config,
        tokens=args.tokens,
        repeat=args.repeat,
        as_json=args.json,
        beside=args.beside,
    )


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


def _bench_load(args: argparse.Namespace) -> int:
    from logra_jax.study.bench_load import bench_load

    return bench_load(
        args.target,
        args.overrides,
        args.json,
        dtype=args.dtype,
        repetitions=args.repeat,
    )


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

    train = _command(commands, "train", "train a model", examples.TRAIN)
    train.set_defaults(run=_train)
    _add_config(train)

    serve = _command(
        commands, "serve", "serve a model with SGLang, for training", examples.SERVE
    )
    serve.set_defaults(run=_serve)
    _add_config(serve)

    evaluate = _command(
        commands,
        "eval",
        "measure the accuracy of a model or a run",
        examples.EVAL,
    )
    evaluate.set_defaults(run=_eval)
    evaluate.add_argument(
        "target",
        metavar="CONFIG|RUN_DIR|MODEL",
        help="a config file, a run directory (its newest checkpoint), or a model: a "
        "Hugging Face directory, or whatever model.path takes",
    )
    _add_overrides(evaluate)
    evaluate.add_argument(
        "--config", metavar="CONFIG", help="what MODEL is asked, and how"
    )
    evaluate.add_argument(
        "--best", action="store_true", help="the run's best checkpoint, by eval.best"
    )
    evaluate.add_argument("--json", action="store_true", help="print one JSON object")
    evaluate.add_argument(
        "--samples", metavar="FILE.jsonl", help="write every response here"
    )

    export = _command(
        commands,
        "export",
        "write a run's model as a Hugging Face directory",
        examples.EXPORT,
    )
    export.set_defaults(run=_export)
    export.add_argument("run_dir", metavar="RUN_DIR", help="a run directory")
    export.add_argument("out_dir", metavar="OUT_DIR", help="the directory to write")
    export.add_argument(
        "--best", action="store_true", help="the best checkpoint, by eval.best"
    )

    report = _command(
        commands,
        "report",
        "write one HTML page on one or several runs",
        examples.REPORT,
    )
    report.set_defaults(run=_report)
    report.add_argument(
        "run_dirs", metavar="RUN_DIR", nargs="+", help="a run, which may be going on"
    )
    report.add_argument(
        "--out",
        metavar="FILE.html",
        help="default: report.html in RUN_DIR, of several runs in the working directory",
    )

    fidelity = _command(
        commands,
        "fidelity",
        "measure how well sketches reconstruct, against theory and paper",
        examples.FIDELITY,
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
        examples.SPECTRUM,
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
        examples.REPLAY,
    )
    replay.set_defaults(run=_replay)
    replay.add_argument("model_dir", metavar="MODEL_DIR", help="the model before")
    replay.add_argument("updates", metavar="UPDATES", help="a directory, or one file")
    replay.add_argument("out_dir", metavar="OUT_DIR", help="the directory to write")

    _add_plan(commands, "plan", "say what a run holds on each device", examples.PLAN)

    bench = commands.add_parser("bench", help="measure speed")
    benches = bench.add_subparsers(metavar="WHAT", required=True)
    rollout = _command(
        benches, "rollout", "sampling against transformers' generate", examples.BENCH
    )
    rollout.set_defaults(run=_bench_rollout)
    _add_config(rollout)
    rollout.add_argument("--json", action="store_true", help="print one JSON object")

    merge = _command(
        benches, "merge", "landing an update, as a share of its step", examples.BENCH
    )
    merge.set_defaults(run=_bench_merge)
    _add_config(merge)
    merge.add_argument(
        "--tokens", type=int, default=4096, help="in a step (default: 4096)"
    )
    merge.add_argument("--json", action="store_true", help="print one JSON object")

    step = _command(
        benches, "step", "an update against AdamW, LoRA and GaLore", examples.STEP
    )
    step.set_defaults(run=_bench_step)
    _add_config(step)
    step.add_argument(
        "--tokens", type=int, default=2048, help="in an update (default: 2048)"
    )
    step.add_argument(
        "--repeat", type=int, default=5, metavar="N", help="of each kind (default: 5)"
    )
    step.add_argument(
        "--beside",
        metavar="MODEL",
        help="a preset or model.path whose update by logra is timed too",
    )
    step.add_argument("--json", action="store_true", help="print one JSON object")

    _add_plan(
        benches,
        "plan",
        "memory of an update of each kind, and how long it takes to compile",
        examples.PLAN.replace("logra plan configs", "logra bench plan configs"),
    )

    sync = _command(
        benches,
        "sync",
        "sending updates to SGLang servers, against sending all weights",
        examples.SYNC,
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
        examples.OVERLAP,
    )
    overlap.set_defaults(run=_bench_overlap)
    _add_config(overlap)
    overlap.add_argument(
        "--steps", type=int, default=6, metavar="N", help="each way (default: 6)"
    )
    overlap.add_argument("--json", action="store_true", help="print one JSON object")

    load = _command(
        benches, "load", "loading a model against reading its files", examples.LOAD
    )
    load.set_defaults(run=_bench_load)
    load.add_argument(
        "target",
        metavar="CONFIG|DIR",
        nargs="?",
        help="a config file, or a Hugging Face directory (default: a synthetic one)",
    )
    _add_overrides(load)
    load.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="that weights are cast to (default: bfloat16)",
    )
    load.add_argument(
        "--repeat", type=int, default=5, metavar="N", help="of each (default: 5)"
    )
    load.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    description: str,
    epilog: str,
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=description,
        description=f"{description[0].upper()}{description[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--traceback", action="store_true", help="show where bad input was found"
    )
    return command


def _add_plan(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    description: str,
    epilog: str,
) -> None:
    plan = _command(commands, name, description, epilog)
    plan.set_defaults(run=_plan)
    _add_config(plan)
    plan.add_argument(
        "--devices", type=int, metavar="N", help="default: those of the config's mesh"
    )
    plan.add_argument(
        "--tokens",
        type=int,
        default=4096,
        metavar="N",
        help="of a microbatch on each device (default: 4096)",
    )
    plan.add_argument(
        "--card", metavar="NAME|GiB", help="that it should fit (default: all known)"
    )
    plan.add_argument("--json", action="store_true", help="print one JSON object")


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
