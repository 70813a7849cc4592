"""How a server process of `logra serve` begins: `python -m` this, and SGLang's flags.

It does what `python -m sglang.launch_server` does, and two things before:

- It ties the server to the process that started it: when that ends, in whatever way,
  the kernel kills the server and its workers (Linux).
- Where `SGLANG_PLATFORM=logra_cpu` chooses plain torch (`sglang_cpu`), `triton` and
  `torchvision`, which SGLang imports and then never calls, may be missing: stand-ins
  take their place. Workers import this module again, and so have them too.

At import it needs the standard library only, neither SGLang nor JAX.
"""

import ctypes
import importlib.abc
import importlib.machinery
import os
import signal
import sys
import types
from collections.abc import Sequence
from typing import Any

PARENT = "LOGRA_SERVE_PARENT"
"""Environment variable: the process id to which the server is tied; none if unset."""

API_KEY = "LOGRA_SERVE_API_KEY"
"""Environment variable: the API key that the server asks for; none if unset. Not a
flag, which everyone on the machine can read."""

CPU_PLATFORM = "logra_cpu"
"""Value of `SGLANG_PLATFORM`, and name of the entry point, that chooses plain torch."""

CPU_ENVIRONMENT = {
    "SGLANG_PLATFORM": CPU_PLATFORM,
    "CUDA_VISIBLE_DEVICES": "",  # SGLang asks torch which devices there are
    "TORCHDYNAMO_DISABLE": "1",  # there is no compiler
    # Threads that wait by spinning are up to ten times slower beside a busy trainer.
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""What a server's environment holds when it serves on plain torch."""

STOOD_IN = ("torchvision", "triton")
"""Packages that may then be missing."""

_PR_SET_PDEATHSIG = 1  # Linux, prctl(2)


def cpu_chosen() -> bool:
    """Whether this process was asked to serve on plain torch."""
    return os.environ.get("SGLANG_PLATFORM") == CPU_PLATFORM


def tie_to_parent() -> None:
    """Have the kernel kill this process when the one that started it is gone.

    The first process is tied to the launcher, each worker to its own parent. (SGLang
    ties workers once they have imported everything; in the seconds before, they would
    stay behind.)
    """
    parent = os.environ.get(PARENT)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it was gone before we asked
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ[PARENT] = str(os.getpid())  # for those that we start


def stand_in() -> None:
    """Let imports of `STOOD_IN` succeed from now on; installed ones come first."""
    if not any(type(finder).__name__ == _Finder.__name__ for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


class _StandInClass(type):
    """Class of the classes in a stood-in module: an attribute is its own name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _StandInObject(metaclass=_StandInClass):
    """An instance of such a class, made of anything."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass


class _StandIn(types.ModuleType):
    """A module in which every name exists: a class if capitalised, else a module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].isupper():
            value: Any = _StandInClass(
                name, (_StandInObject,), {"__module__": self.__name__}
            )
        else:
            value = _StandIn(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **options: Any) -> Any:
        """As a decorator, bare or with arguments: the function as it is."""
        if len(args) == 1 and not options and isinstance(args[0], types.FunctionType):
            return args[0]
        return lambda function: function


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for each package that may be missing, and its modules."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in STOOD_IN:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module: Any = _StandIn(spec.name)
        module.__path__ = []
        module.__file__ = "<stand-in>"
        module.__version__ = "3.0.0"
        if spec.name == "triton":  # these two are called, on the host
            module.cdiv = lambda a, b: -(a // -b)
            module.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n else 1
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def main(flags: Sequence[str]) -> None:
    """Serve until told to stop."""
    from sglang.launch_server import run_server  # pyright: ignore
    from sglang.srt.plugins import load_plugins  # pyright: ignore
    from sglang.srt.server_args import prepare_server_args  # pyright: ignore
    from sglang.srt.utils import kill_process_tree  # pyright: ignore

    key = os.environ.pop(API_KEY, None)
    load_plugins()
    try:
        run_server(prepare_server_args([*flags, *(["--api-key", key] if key else [])]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ in ("__main__", "__mp_main__"):  # the first process, and a worker
    tie_to_parent()
if cpu_chosen():
    stand_in()
if __name__ == "__main__":
    main(sys.argv[1:])
