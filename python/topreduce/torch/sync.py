"""The handle that attach() returns."""

import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import is_tensor
from torch.nn import Module

from topreduce import CommError, Reducer
from topreduce.advice import Advice, Site, advise
from topreduce.torch import checkpoint, report, restoring, state_files
from topreduce.torch.averager import Averager
from topreduce.torch.fsdp import Cut, cuts_of, local_part
from topreduce.torch.kinds import Attached
from topreduce.torch.meeting import Ranks, refuse
from topreduce.torch.process_group import GroupCommunicator
from topreduce.torch.rebuilding import Rebuilt, owners_of, rebuild
from topreduce.torch.steps import Steps
from topreduce.torch.summing_device import SummingDevice
from topreduce.torch.two_levels import Member

T = TypeVar("T")


class Sync:
    """Averages the gradients of one model; made by `attach`.

    An error of the network comes out of `backward()`, on every rank that can still be reached, with
    the gradients set to zero and what is owed as it was. From then on every backward pass raises it
    again: `rebuild()` goes on with the ranks that are left, and others; `detach()` with dense
    averaging; a new `attach` with a new connection.
    """

    def __init__(
        self,
        reducer: Averager,
        comm: GroupCommunicator,
        steps: Steps,
        attached: Attached,
        terms: str = "",
        device: SummingDevice | None = None,
    ) -> None:
        """`terms`: what ranks must have alike beside the reducer, in words. `device`: the one that
        the reducer uses.
        """
        self._device = device
        self._reducer = reducer
        self._comm = comm
        self._steps = steps
        self._release, self._hold, self._book, self._module, self._regroup = attached
        self._attached = True
        self._terms = terms
        self._loads = 0  # how often `load` has changed the run

    def stats(self) -> dict[str, Any]:
        """What the last step cost this rank, and what it moved; {} before the first.

        - `step`: its number, from 0.
        - `method`: its name.
        - `level`: what it sent, in a word: its density, or for all entries their format.
        - `reason`: why that, in words.
        - `density`: the share of entries that each rank was to send, from 0 to 1.
        - `entries`: of the model.
        - `budget`: entries that each rank was to send.
        - `selected`: entries that this rank sent.
        - `delivered`: entries of the mean that are not left out, the same on all ranks.
        - `bytes_sent`, `bytes_received`: by this rank; with `local_group` by its machine.
        - `messages`: that this rank sent.
        - `rounds`: how often messages went out and were waited for, in all exchanges and the vote.
        - `bytes_inside`: sent to ranks of its machine (`local_group`) or replica (`replicas`).
        - `messages_inside`: sent to ranks of its replica.
        - `kept_energy`: 1 - left / all. All is the energy (the sum of squares) of owed + gradient,
          left that of what the step did not settle.
        - `owed_norm`: the norm of what this rank owes after the step.
        - `seconds_computed`: seconds from the first forward pass to the last gradient.
        - `seconds_waited`: seconds that `backward()` waited for us.
        - `seconds_exchanging`: seconds in which exchanges were under way.
        - `seconds_exposed`: those of them after the last gradient.
        - `hidden`: the share, from 0 to 1, of `seconds_exchanging` that were before it.
        - `seconds`: by stage, a dictionary: look, choose, pack, network, unpack and commit; with
          `local_group` also inside.
        - `finite`: False if a rank had an infinity or NaN, so that nothing was applied.
        """
        return dict(self._steps.history[-1]) if self._steps.history else {}

    def history(self) -> list[dict[str, Any]]:
        """`stats()` of the last 1000 steps, oldest first."""
        return [dict(step) for step in self._steps.history]

    def scalars(self) -> dict[str, float]:
        """The numbers of `stats()` by flat names, such as "topreduce/seconds/look".

        What wandb.log(), mlflow.log_metrics() and Lightning's log_dict() take.
        """
        return report.scalars(self.stats())

    def log(self, writer: report.Writer, step: int | None = None) -> None:
        """Writes `scalars()` to a TensorBoard SummaryWriter.

        `step`: where the points stand; None for the number of the step.
        """
        stats = self.stats()
        if stats:
            report.write(report.scalars(stats), writer, stats["step"] if step is None else step)

    def choices(self) -> list[str]:
        """What all steps so far sent: densities, or formats for steps that sent everything.

        "0.0313*12" stands for twelve steps. `attach(..., density=sync.choices())` repeats them, so
        that the same run gives the same bits; it may also be a file that holds these words.
        """
        return self._reducer.choices.split()

    def advise(self) -> Advice:
        """What other methods would cost here, from what the last steps took: `topreduce advise`.

        The rate is that of the steps whose exchanges ran fastest, so it may be higher than this.
        ValueError before the third step.
        """
        steps = [each for each in list(self._steps.history)[2:] if each["seconds_exchanging"] > 0]
        if not steps:
            raise ValueError("advise() needs steps to look at: call it after the third")
        rates = [8 * each["bytes_sent"] / each["seconds_exchanging"] for each in steps]
        site = Site(
            entries=self._reducer.layout.size,
            ranks=self._comm.ledgers,
            computed=statistics.median(each["seconds_computed"] for each in steps),
            rate=max(rates) or None,
        )
        return advise(site, overhead=float(self._reducer.spec["overhead"]))

    def configure(
        self,
        method: str | None = None,
        *,
        density: float | str | Sequence[float | str] | os.PathLike[str] | None = None,
        overhead: float | None = None,
        min_density: float | None = None,
        max_density: float | None = None,
        budget_bytes: float | None = None,
        granularity: str | None = None,
        bucket_cap_mb: float | None = None,
        values: str | None = None,
        feedback: str | None = None,
        select: str | None = None,
        keep_dense: str | Sequence[str] | None = None,
        warmup_steps: int | None = None,
        ramp_steps: int | None = None,
        seed: int | None = None,
        **settings: object,
    ) -> None:
        """Changes settings from the next step on, e.g. density=0.001; what is owed stays.

        The arguments are those of `attach`; settings left as None do not change. Collective: every
        rank must make the same changes before the same step. If they differ, or one is not
        possible, all ranks raise ValueError and nothing changes.
        """
        given = {
            "method": method,
            "density": density,
            "overhead": overhead,
            "min_density": min_density,
            "max_density": max_density,
            "budget_bytes": budget_bytes,
            "granularity": granularity,
            "bucket_cap_mb": bucket_cap_mb,
            "values": values,
            "feedback": feedback,
            "select": select,
            "keep_dense": keep_dense,
            "warmup_steps": warmup_steps,
            "ramp_steps": ramp_steps,
            "seed": seed,
            **settings,
        }
        changes = {name: as_setting(each) for name, each in given.items() if each is not None}
        words = ", ".join(f"{name}={value}" for name, value in sorted(changes.items()))
        self._together(
            "configure", f"configure({words})", lambda: self._reducer.configure(**changes)
        )

    def bypass(self) -> None:
        """From the next step on plain dense averages; what is owed waits. Collective."""
        self._together("bypass", "bypass()", self._reducer.bypass)

    def compress(self) -> None:
        """Ends `bypass`: from the next step on gradients are compressed again. Collective."""
        self._together("compress", "compress()", self._reducer.compress)

    @property
    def step(self) -> int:
        """The number of the next step."""
        return self._reducer.step

    def leave(self, why: str) -> None:
        """Ends this rank's part in the group: steps of others that wait for it raise CommError,
        with `why`, and so do its own, until `rebuild`. For a rank that has heard that the group
        will change, before it makes the new one. After an error this does nothing.
        """
        self._steps.wait_until_idle()
        if self._steps.broken is None:
            self._steps.fail(CommError(why))

    def rebuild(self, group: dist.ProcessGroup | Ranks, *, optimizer: Any) -> Rebuilt:
        """Goes on with the ranks of `group`: fewer, more, or the same, in any order.

        To be called on all of them, after backward() has raised CommError or between steps. All go
        on from the last step that any of them has committed: a rank that failed in its vote commits
        it too, and gets parameters and optimizer state of one that has. A rank whose handle has
        made other steps, or none, joins: it gets those, and the buffers, and owes nothing. What the
        others owe is scaled so that its mean over the ranks stays. What lost ranks owed is lost.
        Ranks whose parameters differ from most others' get theirs.

        `optimizer`: the model's, or a list of all that has a state_dict() which follows the
        parameters, such as a scheduler and a GradScaler. If it raises CommError, since another rank
        is lost, call it again with the ranks that are left.
        """
        try:
            module, regroup = self._rebuildable(group)
            owners = owners_of(optimizer)
        except Exception as error:
            refuse([group], error)
            raise
        self._steps.wait_until_idle()
        self._comm.close(f"rebuild() before step {self.step}; call it on all ranks")
        comm = None
        try:
            comm = GroupCommunicator(group, self._comm.timeout)
            comm.concur(self._terms)
            assert isinstance(self._reducer, Reducer)
            comm.find_device_backend(group, None if self._device is None else self._device.device)
            if self._device is not None:
                self._device.adder = comm.adder()
                self._reducer.use(self._device)
            rebuilt = rebuild(self._reducer, comm, self._steps.verifier.look, module, owners)
        except BaseException as error:
            if comm is not None:
                comm.close(f"{type(error).__name__}: {error}")
            if isinstance(error, Exception):
                self._steps.broken = error.with_traceback(None)
            raise
        self._comm = comm
        self._steps.reconnect(comm)
        regroup(group)
        self._steps.surroundings.debts_are_known()
        self._loads = 0  # as on ranks that joined
        return rebuilt

    def _rebuildable(
        self, group: object
    ) -> tuple[Module, Callable[[dist.ProcessGroup | Ranks], None]]:
        module = self._module()
        if not self._attached:
            raise ValueError("rebuild(): this handle is detached; use the one of the last attach")
        if self._regroup is None or module is None:
            raise ValueError(
                "rebuild() is for DistributedDataParallel and plain modules, without local_group "
                "and without shards: start such a run anew, and load() what was saved"
            )
        if isinstance(group, Ranks) and not getattr(self._regroup, "takes_ranks", True):
            raise ValueError("rebuild(): DistributedDataParallel needs a process group, not Ranks")
        return module, self._regroup

    def hold(self) -> AbstractContextManager[None]:
        """A context for backward passes whose gradients are added up here, and not yet averaged.

        They are averaged together with those of the next backward pass outside of it: gradient
        accumulation. Put the forward passes into it too. DDP's no_sync() is the same.
        """
        return self._hold()

    def state_dict(self) -> dict[str, Any]:
        """Everything this rank's next step depends on: tensors, numbers and words by name.

        Every rank must save its own. Keys hold the rank, so one checkpoint can hold all of them.
        """
        self._steps.wait_until_idle()
        return self._book.pack(self._reducer, self._comm)

    def save(self, folder: str | Path) -> None:
        """Writes this rank's state to a file of its own in `folder`, which may be shared.

        To be called on all ranks between the same steps; nobody waits for another. The file appears
        whole or not at all. The files of the save before this one are kept, older ones deleted.
        """
        self._steps.wait_until_idle()
        if not isinstance(self._reducer, Member):  # its delegate saves what is owed
            state = self._book.pack(self._reducer, self._comm)
            cuts = {key: cut[:2] for key, cut in cuts_of(state).items()}
            local = {k: local_part(each) if is_tensor(each) else each for k, each in state.items()}
            place = self._book.place(self._comm)
            run = f"{self._comm.run}.{self._loads}"
            state_files.save(Path(folder), place, self._reducer.step, local, cuts, run)

    def load(self, folder: str | Path, step: int | None = None) -> int:
        """Goes on where the ranks called `save`: from the last step of which all files are there,
        or `step`. Returns that step.

        Every rank reads its own file, or, if another number of ranks has saved, those of which it
        takes over a part: the mean of what is owed stays. Collective; if a rank finds no file, or a
        damaged one, or if files were not saved together, all raise ValueError, with which, and
        nothing has changed.
        """
        folder, place = Path(folder), self._book.place(self._comm)
        self._expect_usable("load()")
        self._steps.wait_until_idle()
        self._comm.enter("load")
        try:
            found = self._all(lambda: restoring.loadable(folder, place))
            words = self._comm.ask_everyone(json.dumps(found))
            chosen = restoring.choose(words, folder, step)
            owes = not isinstance(self._reducer, Member)
            state, runs = self._all(
                lambda: restoring.read(folder, place, chosen, tensors=owes, cuts=self._cuts)
            )
            restoring.expect_one_run(self._comm.ask_everyone(json.dumps(runs)), chosen)
            self._all(lambda: self._book.unpack(state, self._reducer, self._comm))
        except ValueError:
            raise
        except Exception as error:
            raise self._steps.fail(error) from None
        self._steps.surroundings.debts_are_known()
        self._loads += 1
        return chosen

    def _cuts(self) -> dict[str, Cut]:
        """What this rank holds of tensors that are sharded."""
        prefix = f"rank{self._comm.ledger}/"
        state = self._book.pack(self._reducer, self._comm)
        return {key.removeprefix(prefix): cut for key, cut in cuts_of(state).items()}

    def _all(self, action: Callable[[], T]) -> T:
        """Its result, if it succeeds on all ranks; else ValueError on all of them."""
        result, refusal = None, ""
        try:
            result = action()
        except (ValueError, OSError) as error:
            refusal = str(error)
        words = self._comm.ask_everyone(refusal)
        if refusal and len(set(words)) == 1:
            raise ValueError(refusal)
        failures = [f"rank {rank}: {word}" for rank, word in enumerate(words) if word]
        if failures:
            raise ValueError("; ".join(failures))
        return cast(T, result)

    def empty_state(self, ranks: int) -> dict[str, Any]:
        """A state that holds those of `ranks` ranks, for torch.distributed.checkpoint to load into.

        For a run that was saved with another number of ranks, or replicas of a sharded model: give
        it to topreduce.torch.reshard once it is loaded.
        """
        if ranks < 1:
            raise ValueError(f"ranks must be at least 1, not {ranks}")
        return checkpoint.empty(self.state_dict(), self._comm.ledger, ranks)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict()` was taken; ValueError, with what differs, if it cannot.

        Every rank must load before the next step, which raises on all of them if one has not.
        """
        self._steps.wait_until_idle()
        self._book.unpack(state, self._reducer, self._comm)
        self._steps.surroundings.debts_are_known()

    def detach(self) -> None:
        """From now on means are dense; what is owed stays readable here, and is not applied.

        DDP averages by itself again. Where nobody else would, gradients are averaged after the
        backward pass by the process group that was given, as long as the model lives. To be
        called on all ranks between the same steps. Another `attach` may follow.
        """
        if self._attached:
            self._steps.wait_until_idle()
            self._attached = False
            owes = self._reducer.step > 0 and self._reducer.state()["entries"]
            self._release("the model was attached before" if owes else "")
            self._steps.surroundings.release()
            self._steps.stop()
            self._comm.close(
                f"detach() before step {self._reducer.step}; call it on all ranks, between the "
                "same steps"
            )

    def __repr__(self) -> str:
        reducer, comm = self._reducer, self._comm
        return (
            f"<topreduce.torch.Sync: {self._condition()}, {comm.title}, "
            f"{reducer.layout.size} entries, step {reducer.step}; "
            f"{report.cost(self.stats(), comm.ledgers)}>"
        )

    def _condition(self) -> str:
        if not self._attached:
            return "detached"
        if self._steps.broken is not None:
            return f"broken ({self._steps.broken})"
        reducer = self._reducer
        if reducer.bypassed:
            return f"{reducer.spec['method']}, bypassed"
        mode = f"density {reducer.density:.3g}"
        if reducer.density == 1:
            mode = f"everything in {reducer.level}"
        if reducer.reason != "as set":
            mode += f" ({reducer.reason})"
        return f"{reducer.spec['method']}, {mode}"

    def _expect_usable(self, action: str) -> None:
        if not self._attached:
            raise ValueError(f"{action}: this handle is detached; use the one of the last attach")
        if self._steps.broken is not None:
            raise self._steps.broken.with_traceback(None)

    def _together(self, call: str, action: str, change: Callable[[], None]) -> None:
        """Changes the reducer if all ranks want this before the same step; else all raise."""
        self._expect_usable(action)
        self._steps.wait_until_idle()
        self._comm.enter(call, self._reducer.step)
        try:
            self._comm.concur(f"{action} before step {self._reducer.step}")
            change()  # raises ValueError on all ranks or on none: they agree on all it looks at
            self._reducer.agree(self._comm)
        except (ValueError, TypeError):  # of what was asked for: alike on all ranks
            raise
        except Exception as error:
            raise self._steps.fail(error) from None


def as_setting(value: object) -> object:
    """Lists of words, such as patterns for keep_dense, and files of them, as the core wants."""
    if isinstance(value, os.PathLike):
        return " ".join(Path(value).read_text().split())
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
