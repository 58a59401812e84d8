"""What a step must know of the model around it, beside the gradients in its buckets."""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from topreduce.torch.lane import read_later
from topreduce.torch.optimizers import FusedHint
from topreduce.torch.scaling import Scaler, ScalerWatch


@dataclass(frozen=True)
class Participation:
    """What this rank has to say of a step when it begins; see Reducer.participate."""

    presence: str = "present"
    divisor: str = "ranks"


class Surroundings:
    """Watches one model, which owns what owns this: so nothing here leads back to it."""

    def __init__(
        self,
        model: torch.nn.Module,
        module: torch.nn.Module,
        parameters: Iterable[torch.nn.Parameter],
        frozen: Mapping[str, torch.nn.Parameter],
        scaler: Scaler | None,
        advice: str,
        *,
        sparse: bool,
    ) -> None:
        """`module`: the model, or what it wraps. `parameters`: those to average; `frozen`: all
        others, and `advice`: what to do if they are thawed. `sparse`: means have many zeros.
        """
        self._known = False  # what is owed, since the last step
        self.forgotten = ""  # how the model came to a state whose debts are not known here
        self.in_vain: float | None = None  # the part of a step that the search cannot save
        self._model = weakref.ref(model)
        self._advice = advice
        self._frozen = dict(frozen)
        self._scaler = scaler
        averaged = list(parameters)
        self._scaler_watch = ScalerWatch(averaged, scaler)
        self._fused_hint = FusedHint(averaged if sparse else ())
        notice = _LoadNotice(weakref.ref(self))
        self._handle = module.register_load_state_dict_post_hook(notice)  # type: ignore[no-untyped-call]

    def loss_scale(self) -> Callable[[], float]:
        """Of the step that begins; the call waits for it, and may come from another thread."""
        if self._scaler is None:
            return lambda: 1.0
        scale = getattr(self._scaler, "_scale", None)  # torch's get_scale() stops a device
        if isinstance(scale, torch.Tensor) and not scale.is_cpu and scale.numel() == 1:
            return read_later(scale)
        known = float(self._scaler.get_scale())
        return lambda: known

    def participation(self, *, in_backward: bool) -> Participation:
        """Of the step that begins. Outside of backward() this rank has joined."""
        by_all = getattr(
            self._model(), "_divide_by_initial_world_size", True
        )  # an argument of join()
        return Participation(
            "present" if in_backward else "joined", "ranks" if by_all else "present"
        )

    def debts_are_known(self) -> None:
        """They were loaded. The model may be loaded before or after, up to the next step."""
        self._known = True

    def warn(self) -> None:
        """Of what would otherwise go wrong in silence; each once."""
        thawed = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        for name in thawed:
            del self._frozen[name]
        if thawed:
            warnings.warn(
                f"{', '.join(thawed)} was frozen when the model was wrapped or attached, and is "
                f"not now: it is never averaged, so the ranks drift apart; {self._advice}",
                RuntimeWarning,
                stacklevel=2,
            )
        if self.forgotten and not self._known:
            warnings.warn(
                f"{self.forgotten}, and what its ranks still owed was not loaded: the gradients "
                "that were not yet sent are lost. Give this handle the state_dict() that belongs "
                "to the model before its first step; for a fresh start ignore this",
                RuntimeWarning,
                stacklevel=2,
            )
        self.forgotten, self._known = "", False
        if self.in_vain is not None:
            warnings.warn(
                f"backward() waits for topreduce for {self.in_vain:.0%} of a step, even with the "
                "least density that it may take: the network is too slow for exchanges in every "
                "step, or steps are too short to hide any. sync.advise() says what they cost; on a "
                "fast network plain DDP, or a fixed density such as 0.01, is the better choice",
                RuntimeWarning,
                stacklevel=2,
            )
        self.in_vain = None

    def release(self) -> None:
        self._handle.remove()
        self._scaler_watch.ignore()
        self._fused_hint.ignore()


class _LoadNotice:
    """Called when the model's weights are loaded."""

    def __init__(self, surroundings: "weakref.ref[Surroundings]") -> None:
        self._surroundings = surroundings

    def __call__(self, module: torch.nn.Module, keys: object) -> None:
        surroundings = self._surroundings()
        if surroundings is not None:
            surroundings.forgotten = "the model was loaded after attach()"

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model is not attached; this does nothing, and needs nothing of ours.
        return getattr, (contextlib.nullcontext(), "__exit__")
