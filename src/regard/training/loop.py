"""The training loop: `train`, for every model and task, on one device or many.

How: a step is a pure function of the weights, the optimizer state and the step number: batches,
dropout and learning rate follow from the seed and the step number alone. So a snapshot needs only
weights and optimizer state, and a resumed run gives the losses and weights of one that was never
stopped, on a CPU bit for bit. A thread prepares batches ahead. Losses are read from a GPU only
every few steps, since reading synchronises with it; each is still checked, and the first that is
not finite stops the run before anything is saved.

Left out: what a batch is (`tasks.py`), how devices share the work (`parallel`).
"""

from __future__ import annotations

import hashlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor

from regard.models import Transformer
from regard.training.checkpointing import checkpointed
from regard.training.config import TrainConfig
from regard.training.data.packing import NOTHING
from regard.training.loss import plain_loss, r_drop_loss, summed_loss
from regard.training.mfu import count_flops, peak_flops
from regard.training.optim import Average, make_optimizers, rate_share, set_rate
from regard.training.parallel import Mesh
from regard.training.runlog import EvalReport, StepReport
from regard.training.snapshot import Snapshot, load_best, load_latest, remove_old, save_snapshot
from regard.training.tasks import Task

READ_EVERY = 10  # steps between two reads of a GPU's losses
AHEAD = 2  # steps whose batches are prepared in advance
Judge = Callable[[Transformer], Mapping[str, float]]


class Diverged(ArithmeticError):
    """A loss, gradient or weight is not finite; the message names the step and last snapshot."""


class Listener(Protocol):
    """What receives the reports of a run, such as a `Monitor`."""

    def step(self, report: StepReport) -> None: ...
    def evaluated(self, report: EvalReport) -> None: ...
    def note(self, text: str) -> None: ...


@final
class Silence:
    def step(self, report: StepReport) -> None: ...
    def evaluated(self, report: EvalReport) -> None: ...
    def note(self, text: str) -> None: ...


@dataclass(frozen=True, eq=False)
class Result:
    """Why a run ended (done, patience, time, interrupted), its steps, and its best evaluation."""

    reason: str
    steps: int
    best: EvalReport | None


class StepBatches(NamedTuple):
    """The batches of one step, with its numbers of targets (`n_tokens`) and of tokens read.

    Both count all ranks. A masked batch reads many more tokens than it has targets; for sentence
    pairs both are the number of targets.
    """

    batches: list[dict[str, Tensor]]
    n_tokens: int
    n_read: int


@final
@dataclass(eq=False)
class Progress:
    """The state of a run besides weights and optimizer: its step and its evaluations."""

    step: int = 0
    best: EvalReport | None = None
    waited: int = 0
    owed: bool = False  # whether the run was stopped when an evaluation was due
    # Steps not reported yet: (step, loss, gradient norm, tokens read).
    pending: list[tuple[int, Tensor, Tensor, int]] = field(default_factory=list)


def train(
    model: Transformer,
    task: Task,
    config: TrainConfig,
    folder: Path,
    *,
    mesh: Mesh | None = None,
    resume: bool = False,
    listener: Listener | None = None,
    judge: Judge | None = None,
) -> Result:
    """Train the model in place, with snapshots in `folder`; `resume` continues the run found there.

    The model ends with the weights of its best evaluation, or with its last ones if there was none;
    on several ranks it stays sharded: load the snapshot for a whole one. judge: computes scores
    besides the loss, such as BLEU; the first of them, the higher the better, then decides which
    evaluation is the best.
    """
    opened = open_run(
        model, task, config, folder, mesh=mesh, resume=resume, listener=listener, judge=judge
    )
    return opened.train()


def open_run(
    model: Transformer,
    task: Task,
    config: TrainConfig,
    folder: Path,
    *,
    mesh: Mesh | None = None,
    resume: bool = False,
    listener: Listener | None = None,
    judge: Judge | None = None,
) -> Run:
    """Build a run, or restore it, without taking a step; the arguments are those of `train`."""
    run = Run(model, task, config, folder, mesh or Mesh.alone(), listener or Silence(), judge)
    latest = load_latest(folder)
    if latest is not None and not resume:
        what = f"{folder} holds the snapshots of a run, the last after {latest.step} steps"
        raise FileExistsError(f"{what}: resume it, or train into another folder")
    if latest is not None:
        run.restore(latest)
        if run.mesh.is_main:  # a kill may have left old snapshots that were to be removed
            remove_old(folder, latest.step, config.keep)
    return run


@final
@dataclass(eq=False)
class Run:
    model: Transformer
    task: Task
    config: TrainConfig
    folder: Path
    mesh: Mesh
    listener: Listener
    judge: Judge | None

    def __post_init__(self) -> None:
        model, task, config, mesh = self.model, self.task, self.config, self.mesh
        if mesh.size > 1 and (config.average is not None or self.judge is not None):
            todo = "train without them on several, and score the model that comes of it"
            raise ValueError(f"average and scores beside the loss are for one device; {todo}")
        if model.head is None:
            raise ValueError("a model without a head scores no tokens; train one that has one")
        if config.r_drop is not None and not draws_dropout(model):
            raise ValueError("r_drop compares draws of dropout; give the model some, or no r_drop")
        readings = 1 if config.r_drop is None else 2
        self.flops, self.peak = readings * count_flops(model), peak_flops(mesh.device)
        mesh.prepare(model)
        self.optimizers = make_optimizers(model, config, mesh)
        self.average = None if config.average is None else Average(model, config.average)
        self.vectors: Callable[..., Tensor] = task.vectors
        if config.compiled:
            self.vectors = torch.compile(task.vectors, dynamic=None if task.one_size else True)
        self.progress = Progress()
        self._read_at = time.perf_counter()

    def train(self) -> Result:
        self.model.train()
        recomputing = checkpointed(self.model) if self.config.recompute else nullcontext()
        with self.interruptible() as asked_to_stop, self.fetching() as fetch, recomputing:
            reason = self.go_on(fetch, asked_to_stop)
        if reason != "interrupted":
            self.take_best()
        return Result(reason, self.progress.step, self.progress.best)

    # ---- A step

    def go_on(self, fetch: Callable[[int], StepBatches], asked_to_stop: Callable[[], bool]) -> str:
        config, progress = self.config, self.progress
        read_every = 1 if self.mesh.device.type == "cpu" else READ_EVERY
        self._read_at = time.perf_counter()
        limit = self._read_at + 60.0 * (math.inf if config.minutes is None else config.minutes)
        if progress.owed and self.evaluate():
            self.save(True)
        while progress.step < config.steps and not self.is_tired():
            self.step(fetch(progress.step))
            progress.step += 1
            late = self.mesh.any(time.perf_counter() > limit)
            stop = self.mesh.any(asked_to_stop())
            last = progress.step == config.steps or late
            due_eval = progress.step % config.eval_every == 0 or last
            due_save = progress.step % config.save_every == 0 or last or stop
            if due_eval or due_save or progress.step % read_every == 0:
                self.read_losses()
            progress.owed = due_eval and stop
            best = self.evaluate() if due_eval and not stop else False
            if due_save or best or self.is_tired():
                self.save(best)
            if stop or late:
                why = "; all is saved" if stop else ": the time is over"
                self.listener.note(f"stopped after {progress.step} steps{why}")
                return "interrupted" if stop else "time"
        if progress.step == config.steps or not self.is_tired():
            return "done"
        why = f"{progress.waited} evaluations in a row were no better than the best"
        self.listener.note(f"stopped after {progress.step} steps: {why}")
        return "patience"

    def is_tired(self) -> bool:
        return self.progress.waited >= (self.config.patience or math.inf)

    def step(self, ready: StepBatches) -> None:
        config, step = self.config, self.progress.step
        set_rate(self.optimizers, config.lr * rate_share(config, step))
        torch.manual_seed(mix(config.seed, step, self.mesh.part))
        total = torch.zeros((), device=self.mesh.device)
        for batch in ready.batches:
            loss = self.loss(self.on_device(batch)) / ready.n_tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        norm = self.mesh.clip(self.model, config.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.follow(self.model, step)
        self.progress.pending.append((step + 1, self.mesh.total(total), norm, ready.n_read))

    def on_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        device = self.mesh.device
        return {name: x.to(device, non_blocking=True) for name, x in self.mesh.cut(batch).items()}

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Compute the loss summed over the batch's tokens."""
        model, config, targets = self.model, self.config, batch[self.task.targets]
        is_half = config.precision == "bfloat16"
        r_drop = config.r_drop if model.training else None
        if r_drop is not None:
            batch = {name: torch.cat((x, x)) for name, x in batch.items()}
        with torch.autocast(self.mesh.device.type, torch.bfloat16, enabled=is_half):
            auxiliary = self.task.auxiliary_loss(model, batch) if model.training else None
            if auxiliary is not None and self.mesh.size > 1:
                raise ValueError("an auxiliary loss is for one device; train without it on several")
            with auxiliary or nullcontext():
                x_btc = self.vectors(model, batch)
            smoothing = config.smoothing if model.training else 0.0
            assert model.head is not None
            if r_drop is not None:
                loss = r_drop_loss(model.head(x_btc), targets, smoothing, r_drop)
            elif self.mesh.size > 1:
                # Weights that are sharded over ranks are whole only inside torch's own layers.
                loss = plain_loss(model.head(x_btc), targets, smoothing)
            else:
                loss = summed_loss(model.head, x_btc, targets, smoothing)
        if auxiliary is not None:
            loss = loss + auxiliary.loss() * (targets != NOTHING).sum()
        return loss

    def read_losses(self) -> None:
        pending, self.progress.pending = self.progress.pending, []
        if not pending:
            return
        figures = [torch.stack((loss, norm.to(loss))) for _, loss, norm, _ in pending]
        numbers = torch.stack(figures).tolist()
        began, self._read_at = self._read_at, time.perf_counter()
        seconds = (self._read_at - began) / len(pending)
        device = self.mesh.device
        memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        for (step, _, _, n_tokens), (loss, norm) in zip(pending, numbers, strict=True):
            flops = self.flops * n_tokens / seconds / self.mesh.size
            mfu = None if self.peak is None else flops / self.peak
            cost: dict[str, Any] = {"tokens": n_tokens, "seconds": seconds, "memory": memory}
            lr = self.config.lr * rate_share(self.config, step - 1)
            report = StepReport(step=step, loss=loss, lr=lr, grad_norm=norm, mfu=mfu, **cost)
            self.listener.step(report)
            if not math.isfinite(loss) or not math.isfinite(norm):
                said = f"the loss is {loss} and the norm of the gradient {norm}"
                raise self.divergence(step, said)

    def divergence(self, step: int, said: str) -> Diverged:
        left = load_latest(self.folder)
        kept = "no snapshot was saved before it"
        if left is not None:
            kept = f"the snapshot after {left.step} steps is whole: {left.path}"
        advice = "A lower lr, a longer warmup or a smaller clip help most often"
        return Diverged(f"step {step}: {said}, so training stopped; {kept}. {advice}")

    # ---- Evaluation

    def evaluate(self) -> bool:
        """Report the held-out loss and scores; return whether they are the best so far."""
        began, progress = time.perf_counter(), self.progress
        progress.owed = False
        total, n_tokens = 0.0, 0
        with self.as_given():
            for batch in self.task.held_out():
                n_tokens += int((batch[self.task.targets] != NOTHING).sum())
                with torch.no_grad():
                    total += float(self.mesh.total(self.loss(self.on_device(batch))))
            if n_tokens == 0:
                return False
            scores = {} if self.judge is None else dict(self.judge(self.model))
        loss = total / n_tokens
        perplexity = math.exp(min(loss, 700.0))
        figures: dict[str, Any] = {"loss": loss, "perplexity": perplexity, "scores": scores}
        report = EvalReport(step=progress.step, **figures, unigram=self.task.unigram)
        self.listener.evaluated(report)
        if not math.isfinite(loss):
            raise self.divergence(progress.step, f"the held-out loss is {loss}")
        better = progress.best is None or figure_of(report) > figure_of(progress.best)
        progress.waited = 0 if better else progress.waited + 1
        progress.best = report if better else progress.best
        # Evaluation does not count as time of the steps.
        self._read_at += time.perf_counter() - began
        return better

    @contextmanager
    def as_given(self) -> Iterator[None]:
        """Put the model into eval mode, with the averaged weights if there are any."""
        shown = nullcontext() if self.average is None else self.average.shown(self.model)
        self.model.eval()
        try:
            with shown:
                yield
        finally:
            self.model.train()

    # ---- Snapshots

    def save(self, best: bool) -> None:
        tensors = self.mesh.state(self.model, self.optimizers)
        if tensors is None:
            return
        if self.average is not None:
            tensors |= {f"average/{name}": x for name, x in self.average.weights.items()}
        progress = self.progress
        # A step's loss is that of the weights before its update; check the updated ones, too.
        if not all(bool(x.isfinite().all()) for x in tensors.values()):
            raise self.divergence(progress.step, "not all weights are finite")
        facts = {
            "config": asdict(self.config),
            "data": self.task.fingerprint,
            "best": None if progress.best is None else asdict(progress.best),
            "waited": progress.waited,
            "owed": progress.owed,
        }
        save_snapshot(self.folder, progress.step, tensors, facts, keep=self.config.keep, best=best)

    def restore(self, snapshot: Snapshot) -> None:
        facts = snapshot.facts
        if facts["data"] != self.task.fingerprint:
            what = f"{snapshot.path} was trained on other data, or with another tokenizer, than now"
            raise ValueError(f"{what}; resume with the same files, or train into another folder")
        was, now_is = facts["config"].get("average"), self.config.average
        if (was is None) != (now_is is None):
            has = "no averaged weights yet" if was is None else "averaged weights"
            todo = "leave it as it was, or train into another folder"
            raise ValueError(f"average was {was}, is {now_is}: the run has {has}; {todo}")
        free = {"steps", "save_every", "keep", "eval_every", "patience", "minutes"}
        old, now = facts["config"], asdict(self.config)
        changed = [n for n in now if n not in free and old.get(n, now[n]) != now[n]]
        if changed:
            said = ", ".join(f"{name} was {old[name]}, is {now[name]}" for name in changed)
            self.listener.note(f"this run goes on with other settings: {said}")
        for said in snapshot.passed_over:
            self.listener.note(said)
        self.mesh.restore(self.model, self.optimizers, snapshot.tensors)
        if self.average is not None:
            for name, tensor in self.average.weights.items():
                tensor.copy_(snapshot.tensors[f"average/{name}"])
        best = None if facts["best"] is None else EvalReport(**facts["best"])
        owed = facts.get("owed", False)
        self.progress = Progress(snapshot.step, best, facts["waited"], owed)
        self.listener.note(f"going on after {snapshot.step} steps")
        if best is not None and best.step == snapshot.step:
            # A kill may have come after the snapshot was saved and before `best.json` named it.
            named = load_best(self.folder)
            if named is None or named.step != snapshot.step:
                self.save(True)

    def take_best(self) -> None:
        """Load the weights of the best evaluation into the model; keep the last ones if none."""
        self.mesh.any(False)  # a barrier: the main rank may still be saving the best snapshot
        best = load_best(self.folder)
        if best is not None:
            weights = {n: x for n, x in best.tensors.items() if n.startswith("model/")}
            self.mesh.restore(self.model, (), weights)
        if self.average is not None:
            averaged = self.average.weights
            if best is not None:
                averaged = {name: best.tensors[f"average/{name}"] for name in averaged}
            self.average.put(self.model, averaged)
        self.model.eval()

    # ---- What is around the loop

    @contextmanager
    def fetching(self) -> Iterator[Callable[[int], StepBatches]]:
        """Give a function from a step to its batches, which a thread prepares in advance."""
        futures: dict[int, Future[StepBatches]] = {}
        maker = ThreadPoolExecutor(1)

        def fetch(step: int) -> StepBatches:
            for ahead in range(step, min(step + AHEAD, self.config.steps)):
                if ahead not in futures:
                    futures[ahead] = maker.submit(self.make_ready, ahead)
            return futures.pop(step).result()

        try:
            yield fetch
        finally:
            maker.shutdown(cancel_futures=True)

    def make_ready(self, step: int) -> StepBatches:
        first = step * self.config.accumulate
        batches = [self.task.batch(first + i) for i in range(self.config.accumulate)]
        n_tokens = sum(int((batch[self.task.targets] != NOTHING).sum()) for batch in batches)
        if self.mesh.device.type == "cuda":
            batches = [{n: x.pin_memory() for n, x in batch.items()} for batch in batches]
        n_read = sum(batch["ids"].numel() for batch in batches if "ids" in batch)
        return StepBatches(batches, max(n_tokens, 1), n_read or n_tokens)

    @contextmanager
    def interruptible(self) -> Iterator[Callable[[], bool]]:
        """Let SIGINT or SIGTERM stop the run after the current step; a second one stops at once."""
        asked = False
        if threading.current_thread() is not threading.main_thread():
            yield lambda: False
            return

        def ask(number: int, frame: Any) -> None:
            nonlocal asked
            if asked:
                raise KeyboardInterrupt
            asked = True
            self.listener.note("stopping after this step; once more stops at once")

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield lambda: asked
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def draws_dropout(model: Transformer) -> bool:
    config = model.config
    blocks = [
        (x.dropout, x.attention_dropout, x.ffn_dropout) for x in config.encoder + config.decoder
    ]
    return any(map(any, [(config.embed.dropout,), *blocks]))


def figure_of(report: EvalReport) -> float:
    """The number that ranks evaluations, the higher the better: the first score, or -loss."""
    return next(iter(report.scores.values()), -report.loss)


def mix(*numbers: int) -> int:
    """Hash the numbers into a seed, which changes if any of them does."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
