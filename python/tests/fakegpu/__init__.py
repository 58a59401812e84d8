"""A device for tests, "fakegpu": asynchronous, and with memory that the host cannot touch.

`load()` compiles it, once for these sources and this torch, and makes it torch's accelerator. It
must come before the first backward pass of a process. machine.h says what it does.
"""

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NAME = "fakegpu"
BACKEND = "fakeccl"  # of process groups
_HERE = Path(__file__).parent
_BUILT = _HERE.parents[2] / "build" / NAME
_OPTIONS = ["-std=c++20", "-O1", "-g0", "-fPIC", "-Wall"]


@functools.cache
def load() -> Any:
    """The extension. Devices, streams and events are torch's own."""
    extension = _import(build())
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend(BACKEND, _create_backend, devices=[NAME])
    return extension


def counters() -> dict[str, int]:
    """launches, stops, bytes_to_host, bytes_to_device; "stop: ..." for each kind of stop."""
    counted: dict[str, int] = load().counters()
    return counted


def take_races() -> list[str]:
    """What was not ordered by an event since the last call, in words."""
    torch.accelerator.synchronize()
    races: list[str] = load().take_races()
    return races


def _create_backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return load().on_device(dist.ProcessGroupGloo(store, rank, size, timeout))


def _module() -> types.ModuleType:
    module = types.ModuleType(f"torch.{NAME}")
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": torch.accelerator.synchronize,
        "current_stream": torch.accelerator.current_stream,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
        "stream": lambda stream: stream,
        "Stream": torch.Stream,
        "Event": torch.Event,
    }
    for name, answer in answers.items():
        setattr(module, name, answer)
    return module


# ---- compiling ---------------------------------------------------------------------------------


def build() -> Path:
    """The compiled extension."""
    sources = sorted(_HERE.glob("*.cpp"))
    words = [torch.__version__, *_OPTIONS]
    contents = [each.read_bytes() for each in (*sources, *sorted(_HERE.glob("*.h")))]
    digest = hashlib.sha256(b"\0".join([*(word.encode() for word in words), *contents]))
    target = _BUILT / f"_fakegpu.{digest.hexdigest()[:16]}.so"
    _BUILT.mkdir(parents=True, exist_ok=True)
    with (_BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            for old in _BUILT.glob("*.so"):
                old.unlink()
            _compile(sources, target)
    return target


def _compile(sources: list[Path], target: Path) -> None:
    torch_home = Path(torch.__file__).parent
    compiler = [*(["ccache"] if shutil.which("ccache") else []), os.environ.get("CXX", "c++")]
    include = torch_home / "include"
    places = [include, include / "torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    # As one file: nearly all of the time goes into torch's headers. Its name stays, for ccache.
    together = _BUILT / "fakegpu.cpp"
    together.write_text("".join(f'#include "{source.name}"\n' for source in sources))
    with tempfile.TemporaryDirectory(dir=_BUILT) as folder:
        compiled, made = str(Path(folder) / "fakegpu.o"), str(Path(folder) / "made.so")
        found = [f"-I{_HERE}", *(f"-isystem{each}" for each in places)]
        _run([*compiler, *_OPTIONS, *found, "-c", str(together), "-o", compiled])
        library = torch_home / "lib"
        names = [f"-l{name}" for name in ("c10", "torch_cpu", "torch", "torch_python")]
        linking = [f"-L{library}", *names, f"-Wl,-rpath,{library}"]
        _run([compiler[-1], "-shared", "-o", made, compiled, *linking])
        os.replace(made, target)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def _import(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("_fakegpu", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
