"""Training and measuring on one machine: the demo and what it is made of."""

from importlib.util import find_spec

_missing = [name for name in ("rich", "torch") if find_spec(name) is None]
if _missing:
    raise ImportError(f"topreduce.lab needs {' and '.join(_missing)}: pip install 'topreduce[lab]'")
