"""The `logra` command: train, serve, eval, export, report, plan, compare, bench, …

This module imports nothing heavy: `--help` is instant, and spawned reward workers,
which import the main module again, start without JAX.
"""

import argparse
import errno
import os
import sys
from collections.abc import Sequence

import logra_jax
from logra_jax import cli_examples as examples
from logra_jax.cli_bench import add_bench, add_plan
from logra_jax.cli_options import add_command, add_config, add_overrides

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
# What a file system may say, and what helps.
_FULL = "free some space and run the same command again, what is done is kept"
_CLOSED = "choose a place that can be written to"
_FILE_SYSTEM = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EACCES: _CLOSED,
    errno.EROFS: _CLOSED,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Bad input is one line on standard error and exit code 2, and so is a full disk or a
    place that is closed to us; `--traceback` shows where it was found.

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
    except (ValueError, ModuleNotFoundError, OSError) as error:
        message = _explain(error)
        if args.traceback or message is None:
            raise
        print(f"logra: {message}", file=sys.stderr)
        return 2


def _explain(error: ValueError | ModuleNotFoundError | OSError) -> str | None:
    """The user's one line, or None for an error that they can do nothing about."""
    if isinstance(error, ValueError):
        return " ".join(str(error).split())
    if isinstance(error, OSError):
        remedy = _FILE_SYSTEM.get(error.errno or 0)
        where = "" if error.filename is None else f" for {str(error.filename)!r}"
        return remedy and f"The system says: {error.strerror}{where}; {remedy}."
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


def _fidelity(args: argparse.Namespace) -> int:
    from logra_jax.study.fidelity import RANKS, fidelity

    return fidelity(args.rank or RANKS, args.seeds, args.json, args.plot)


def _compare(args: argparse.Namespace) -> int:
    from logra_jax.study.compare import compare_command

    return compare_command(
        args.study,
        args.overrides,
        out=args.out,
        retry_failed=args.retry_failed,
        keep_models=args.keep_models,
    )


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

    train = add_command(commands, "train", "train a model", examples.TRAIN)
    train.set_defaults(run=_train)
    add_config(train)

    serve = add_command(
        commands, "serve", "serve a model with SGLang, for training", examples.SERVE
    )
    serve.set_defaults(run=_serve)
    add_config(serve)

    evaluate = add_command(
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
    add_overrides(evaluate)
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

    export = add_command(
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

    report = add_command(
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
        help="default: report.html in RUN_DIR, or in the current directory if several",
    )

    compare = add_command(
        commands,
        "compare",
        "run a study: methods, ranks, budgets, over seeds",
        examples.COMPARE,
    )
    compare.set_defaults(run=_compare)
    compare.add_argument("study", metavar="STUDY", help="a YAML file; configs/studies")
    add_overrides(compare)
    compare.add_argument(
        "--out", metavar="DIR", help="the study's directory (default: studies/NAME)"
    )
    compare.add_argument(
        "--retry-failed", action="store_true", help="do failed cells again"
    )
    compare.add_argument(
        "--keep-models",
        action="store_true",
        help="keep every run's checkpoints and exported model",
    )

    fidelity = add_command(
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

    spectrum = add_command(
        commands,
        "spectrum",
        "find the rank that real gradients of a model and task need",
        examples.SPECTRUM,
    )
    spectrum.set_defaults(run=_spectrum)
    add_config(spectrum)
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

    replay = add_command(
        commands,
        "replay",
        "apply a run's saved updates to the model it began from",
        examples.REPLAY,
    )
    replay.set_defaults(run=_replay)
    replay.add_argument("model_dir", metavar="MODEL_DIR", help="the model before")
    replay.add_argument("updates", metavar="UPDATES", help="a directory, or one file")
    replay.add_argument("out_dir", metavar="OUT_DIR", help="the directory to write")

    add_plan(commands, "plan", "say what a run holds on each device", examples.PLAN)

    add_bench(commands)
    return parser
