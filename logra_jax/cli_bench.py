"""`logra plan` and `logra bench`: will it fit, and how fast is it?

Nothing heavy is imported before a command runs; see `cli`.
"""

import argparse
from typing import Any

from logra_jax import cli_examples as examples
from logra_jax.cli_options import add_command, add_config, add_overrides


def add_bench(commands: Any) -> None:
    """The parsers of `bench` and of what it measures."""
    bench = commands.add_parser("bench", help="measure speed")
    benches = bench.add_subparsers(metavar="WHAT", required=True)
    rollout = add_command(
        benches, "rollout", "sampling against transformers' generate", examples.BENCH
    )
    rollout.set_defaults(run=_bench_rollout)
    add_config(rollout)
    rollout.add_argument("--json", action="store_true", help="print one JSON object")

    merge = add_command(
        benches, "merge", "landing an update, as a share of its step", examples.BENCH
    )
    merge.set_defaults(run=_bench_merge)
    add_config(merge)
    merge.add_argument(
        "--tokens", type=int, default=4096, help="in a step (default: 4096)"
    )
    merge.add_argument("--json", action="store_true", help="print one JSON object")

    step = add_command(
        benches, "step", "an update against AdamW, LoRA and GaLore", examples.STEP
    )
    step.set_defaults(run=_bench_step)
    add_config(step)
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

    add_plan(
        benches,
        "plan",
        "memory of an update of each kind, and how long it takes to compile",
        examples.PLAN.replace("logra plan configs", "logra bench plan configs"),
    )

    sync = add_command(
        benches,
        "sync",
        "sending updates to SGLang servers, against sending all weights",
        examples.SYNC,
    )
    sync.set_defaults(run=_bench_sync)
    add_config(sync)
    sync.add_argument(
        "--repeat", type=int, default=5, metavar="N", help="of each kind (default: 5)"
    )
    sync.add_argument("--json", action="store_true", help="print one JSON object")

    overlap = add_command(
        benches,
        "overlap",
        "training with the next batch sampled during an update, against without",
        examples.OVERLAP,
    )
    overlap.set_defaults(run=_bench_overlap)
    add_config(overlap)
    overlap.add_argument(
        "--steps", type=int, default=6, metavar="N", help="each way (default: 6)"
    )
    overlap.add_argument("--json", action="store_true", help="print one JSON object")

    load = add_command(
        benches, "load", "loading a model against reading its files", examples.LOAD
    )
    load.set_defaults(run=_bench_load)
    load.add_argument(
        "target",
        metavar="CONFIG|DIR",
        nargs="?",
        help="a config file, or a Hugging Face directory (default: a synthetic one)",
    )
    add_overrides(load)
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


def add_plan(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    description: str,
    epilog: str,
) -> None:
    """The parser of `plan`, or of `bench plan`."""
    plan = add_command(commands, name, description, epilog)
    plan.set_defaults(run=_plan)
    add_config(plan)
    plan.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="weights and batch over so many (default: the config's mesh)",
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
    plan.add_argument(
        "--gpu",
        metavar="NAME",
        help="compile for this NVIDIA GPU, which need not be here (extra `gpu-plan`; "
        "default: for CPUs)",
    )
    plan.add_argument("--json", action="store_true", help="print one JSON object")


def _plan(args: argparse.Namespace) -> int:
    from logra_jax.training.config import load_config

    config = load_config(args.config, args.overrides)
    from logra_jax.study.plan import plan_command

    return plan_command(
        config,
        devices=args.devices,
        tokens=args.tokens,
        card=args.card,
        gpu=args.gpu,
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
