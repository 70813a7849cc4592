"""A plan as a person reads it."""

from typing import Any

from rich.console import Console
from rich.table import Table

_TITLES = {"logra": "LoGRA", "adamw": "dense AdamW", "lora": "LoRA"}
_ROWS = (
    ("weights", "weights"),
    ("sketches", "sketches, or gradients"),
    ("optimizer", "optimizer state"),
    ("reference", "reference weights"),
    ("activations", "activations, temporaries"),
    ("other", "batch, outputs"),
    ("peak", "an update's peak"),
    ("kv_cache", "KV cache"),
    ("rollout", "while sampling"),
)
_TOTALS = ("peak", "rollout")


def print_plan(result: dict[str, Any]) -> None:
    """Print ``make_plan``'s result with ``fits`` and ``cards``."""
    console = Console()
    work, kinds = result["workload"], result["kinds"]
    devices = f"{result['devices']} device" + "s" * (result["devices"] != 1)
    cut = ", ".join(f"{name} {n}" for name, n in result["mesh"].items() if n > 1)
    versions = ", ".join(f"{name} {v}" for name, v in result["versions"].items())
    console.print(
        f"{result['model']}, {result['dtype']} weights, rank {result['rank']}, remat "
        f"{result['remat']}, on {devices}{f' ({cut})' if cut else ''}: microbatches of "
        f"{work['rows']} x ({work['prompt']} + {work['new']}) = "
        f"{work['tokens_per_device']} tokens a device, {work['batch']} responses an "
        f"update\ncompiled for {result['compiled_for']}; {versions}"
    )
    table = Table(title="GiB on each device", title_justify="left")
    table.add_column("")
    for kind in kinds:
        table.add_column(_TITLES[kind], justify="right")
    for name, label in _ROWS:
        cells = [f"{k['gib'][name]:.2f}" if k["gib"] else "-" for k in kinds.values()]
        style = "bold" if name in _TOTALS else None
        table.add_row(label, *cells, style=style, end_section=name in _TOTALS)
    fits, cards = result["fits"], result["cards"]
    if len(cards) == 1:
        ((card, size),) = cards.items()
        answers = ["[green]yes" if fits[kind][card] else "[red]no" for kind in kinds]
        table.add_row(f"fits {card} ({size:.4g})", *answers)
    else:
        smallest = [next((c for c, ok in fits[k].items() if ok), "none") for k in kinds]
        table.add_row("smallest card", *smallest)
    console.print(table)
    for kind, part in kinds.items():
        if part["error"]:
            console.print(f"{_TITLES[kind]} does not compile; {part['error']}")
    seconds = ", ".join(
        f"{_TITLES[kind]} {part['lower_seconds'] + part['compile_seconds']:.0f} s"
        for kind, part in kinds.items()
    )
    console.print(
        "A run fits that leaves 8 % of a card free. The local engine samples when an "
        "update's temporaries are gone."
    )
    if result["compiled_for"] == "cpu":
        console.print(
            "A GPU's compiler has temporaries of its own: `--gpu NAME` asks it."
        )
    console.print(f"Compiled in: {seconds}.")
