"""Stand-ins for packages that exist as CUDA builds only, so that SGLang can be imported where there is no GPU.

Installed into SGLang's own environment with a `.pth` file that imports it. Only SGLang's own imports see the stand-ins,
and only where no real package is found: others, transformers for one, must see that the package is not there. A name
taken from a stand-in may be a decorator, a base class or a constant at import time; called with anything else it
raises.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

PACKAGES = ("sgl_kernel", "torchvision")
_PLAIN = (str, int, float, bool, type(None))


class _Name(type):
    """The class of every name in a stand-in: itself a class, so that it can be a base or stand after `isinstance`."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _name(f"{cls.__qualname__}.{name}")

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if "is_stand_in" not in vars(cls):
            return super().__call__(*args, **options)
        if len(args) == 1 and not options and callable(args[0]):
            return args[0]  # @decorator
        if all(isinstance(arg, _PLAIN) for arg in args):
            return lambda decorated=None: decorated  # @decorator(...)
        raise RuntimeError(f"{cls.__qualname__}: this package has no CPU build, only a stand-in for imports")


def _name(qualified: str) -> _Name:
    made = _Name(qualified.rpartition(".")[2], (), {"is_stand_in": True})
    made.__qualname__ = qualified
    return made


class _Module(ModuleType):
    __path__: list[str] = []
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _name(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        del path, target
        if name.partition(".")[0] in PACKAGES and _imported_by_sglang():
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name == "torchvision":
            _let_transformers_look_first()
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def _imported_by_sglang() -> bool:
    """Whether the nearest frame outside the import system is a file of SGLang's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "importlib" not in name and name != __file__:
            return "/sglang/" in name
        frame = frame.f_back
    return False


def _let_transformers_look_first() -> None:
    """Have transformers find, and remember, that there is no torchvision: afterwards a stand-in is in `sys.modules`."""
    from transformers.utils import import_utils

    for name in vars(import_utils).copy():
        if name.startswith("is_torchvision"):
            try:
                getattr(import_utils, name)()
            except Exception:  # what it thinks of a missing package does not matter here
                continue


sys.meta_path.append(_Finder())
