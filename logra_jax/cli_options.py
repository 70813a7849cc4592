"""What several commands of `logra` have in common."""

import argparse


def add_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    description: str,
    epilog: str,
) -> argparse.ArgumentParser:
    """A command, with examples at the end of its help."""
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


def add_config(command: argparse.ArgumentParser) -> None:
    """A config file, and overrides of its fields."""
    command.add_argument("config", metavar="CONFIG", help="a YAML file")
    add_overrides(command)


def add_overrides(command: argparse.ArgumentParser) -> None:
    """Overrides, any number of them."""
    command.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="override a field, dotted: train.steps=2",
    )
