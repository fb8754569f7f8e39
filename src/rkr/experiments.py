"""From a recipe to its runs: one folder for each method and order, one after the other or several at once."""

from __future__ import annotations

import os
import platform
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rkr.errors import RkrError, UsageError
from rkr.recipes import Recipe
from rkr.recipes.settings import Order

if TYPE_CHECKING:
    from rkr.engine import Experiment
    from rkr.engine.events import Watch


@dataclass(frozen=True)
class Plan:
    """What the user asked for: a recipe, changed or not, its methods and orders, and where results go.

    Attributes:
        recipe: The recipe as it stands in its file.
        given: How the user named it, for other processes.
        methods: Which methods run.
        orders: In which orders of tasks.
        out: Where run folders go.
        epochs, seed, limit: Changes to the recipe, None for none.
        data: Where data sets lie, None for the usual places.
    """

    recipe: Recipe
    given: str
    methods: tuple[str, ...]
    orders: tuple[Order, ...]
    out: Path
    epochs: int | None = None
    seed: int | None = None
    limit: int | None = None
    data: str | None = None

    @property
    def root(self) -> Path:
        """Folder of all runs of the recipe; changed ones have their own."""
        changes = [f"{self.epochs}-epochs"] if self.epochs is not None else []
        changes += [f"seed-{self.seed}"] if self.seed is not None else []
        changes += [f"limit-{self.limit}"] if self.limit is not None else []
        return self.out / "-".join([self.recipe.name, *changes])

    @property
    def jobs(self) -> list[tuple[str, Order]]:
        """The single runs, all methods of an order before the next order."""
        return [(method, order) for order in self.orders for method in self.methods]

    def folder(self, method: str, order: Order) -> Path:
        """Where a run goes."""
        return self.root / method / str(order)

    def experiment(self, method: str, order: Order, **settings: str) -> Experiment:
        """Load the data and build one run; `settings` are to be recorded with those of the recipe."""
        import torch

        import rkr
        from rkr.engine import Experiment
        from rkr.learners import METHODS
        from rkr.tasks import Augment

        recipe = self.recipe.changed(self.epochs, self.seed, self.limit)
        chosen, training = recipe.method(method), recipe.training
        stream = recipe.stream(order, self.data)
        augment = Augment(**training.augment.model_dump()) if any(training.augment.model_dump().values()) else None
        decided = self.recipe.resolved(method, order, self.epochs, self.seed, self.limit)
        about = {
            "recipe": self.root.name,
            "method": method,
            "order": str(order),
            "seed": training.seed,
            "stream": stream.describe(),
            "network": {"parameters": sum(p.numel() for p in recipe.build_network().parameters())},
            "versions": {"rkr": rkr.__version__, "torch": torch.__version__, "python": platform.python_version()},
            "machine": {"processor": processor(), "threads": torch.get_num_threads()},
            "commit": commit(),
        }
        return Experiment(
            label=f"{self.root.name} {method} {order}",
            stream=stream,
            make=recipe.build_network,
            head=recipe.network.head,
            method=METHODS[chosen.learner],
            options=chosen.options,
            schedule=training,
            augment=augment,
            seed=training.seed,
            channels_last=training.memory_format == "channels_last",
            settings={**decided, "stream_sha256": stream.describe()["sha256"], **settings},
            about=about,
        )


@dataclass(frozen=True)
class How:
    """How runs are computed. Of these only precision and the kind of device change results, so they are recorded."""

    workers: int = 1
    threads: int | None = None
    accelerator: str = "auto"
    precision: str | None = None
    save_minutes: float = 5.0
    tensorboard: bool = False


def choose_orders(recipe: Recipe, count: int | None, named: Sequence[str]) -> tuple[Order, ...]:
    """The first `count` orders of the recipe, or those named, or else the first one."""
    if named and count is not None:
        raise UsageError("give either --orders, how many, or --order, which")
    if named:
        orders = tuple(int(name) if name.lstrip("-").isdigit() else name for name in named)
        for order in orders:
            recipe.stream.check_order(order)
        return orders
    if count is None:
        return recipe.orders[:1]
    if not 1 <= count <= len(recipe.orders):
        have = "1 order" if len(recipe.orders) == 1 else f"{len(recipe.orders)} orders"
        raise UsageError(f"{recipe.name} has {have}: give no more, or name others with --order 0,1,...")
    return recipe.orders[:count]


def run_plan(plan: Plan, how: How, watch: Watch) -> bool:
    """Do all runs of a plan. False if they were interrupted, and can go on."""
    for method in plan.methods:
        plan.recipe.method(method)
    jobs = plan.jobs
    if how.precision not in (None, *PRECISIONS):
        raise UsageError(f"--precision must be one of {', '.join(PRECISIONS)}, not {how.precision!r}")
    if how.workers < 1:
        raise UsageError(f"--workers must be at least 1, not {how.workers}")
    if how.workers == 1 or len(jobs) == 1:
        return _one_by_one(plan, how, watch)
    return _at_once(plan, how, watch)


def _one_by_one(plan: Plan, how: How, watch: Watch) -> bool:
    import torch

    from rkr.display import Quiet, TensorBoard, both
    from rkr.engine import Run
    from rkr.engine.processes import make_fabric

    if how.threads is not None:
        torch.set_num_threads(how.threads)
    fabric = make_fabric(how.accelerator, how.precision)
    for method, order in plan.jobs:
        computed = {"precision": how.precision or PRECISIONS[0], "device": fabric.device.type}
        experiment = plan.experiment(method, order, **computed)
        with TensorBoard() if how.tensorboard and fabric.is_global_zero else Quiet() as curves:
            run = Run(experiment, plan.folder(method, order), fabric, both(watch, curves), how.save_minutes)
            done = run.execute()
        if not done or (run.stop_wanted and (method, order) != plan.jobs[-1]):
            return False
    return True


def _at_once(plan: Plan, how: How, watch: Watch) -> bool:
    """Each run in a process of its own, `workers` at a time; what they tell is told here."""
    from rkr.display import relay

    waiting: queue.SimpleQueue[tuple[str, Order]] = queue.SimpleQueue()
    for job in plan.jobs:
        waiting.put(job)
    workers = min(how.workers, len(plan.jobs))
    threads = how.threads or max(1, (os.cpu_count() or 1) // workers)
    running: set[subprocess.Popen[str]] = set()
    errors: list[str] = []
    stopped = threading.Event()

    def work() -> None:
        while not stopped.is_set() and not errors:
            try:
                method, order = waiting.get_nowait()
            except queue.Empty:
                return
            command = _command(plan, how, method, order, threads)
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )
            running.add(process)
            if stopped.is_set():  # while it was being started, so nobody has told it
                process.send_signal(signal.SIGTERM)
            said: list[str] = []
            assert process.stdout is not None
            assert process.stderr is not None
            listener = threading.Thread(target=said.extend, args=(process.stderr,), daemon=True)
            listener.start()
            relay(process.stdout, watch)
            code = process.wait()
            listener.join()
            process.stdout.close()
            process.stderr.close()
            running.discard(process)
            if code in (STOPPED, -signal.SIGINT, -signal.SIGTERM):  # the latter two: before it had anything to save
                stopped.set()
            elif code:
                last = next((line for line in reversed(said) if line.strip()), f"ended with code {code}")
                errors.append(f"{method} {order}: {last.strip().removeprefix('rkr: ')}")

    asked: list[int] = []

    def stop(number: int, frame: object) -> None:
        """Only take note: an exception would let `Thread.join` believe that the thread has ended (bpo-45274)."""
        if asked:
            raise KeyboardInterrupt  # a second time: at once
        asked.append(number)
        stopped.set()

    in_main = threading.current_thread() is threading.main_thread()
    before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)} if in_main else {}
    crew = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
    told = False
    try:
        for member in crew:
            member.start()
        while any(member.is_alive() for member in crew):
            for member in crew:
                member.join(0.1)
            if asked and not told:  # a terminal has told the others too; let them save their states
                told = True
                for process in list(running):
                    process.send_signal(signal.SIGTERM)
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
    if errors:
        raise RkrError("; ".join(errors))
    return not stopped.is_set()


PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
STOPPED = 130  # exit code of a run that was interrupted and can go on


def _command(plan: Plan, how: How, method: str, order: Order, threads: int) -> list[str]:
    options: dict[str, Any] = {
        "--method": method,
        "--order": order,
        "--out": plan.out,
        "--epochs": plan.epochs,
        "--seed": plan.seed,
        "--limit": plan.limit,
        "--data": plan.data,
        "--threads": threads,
        "--accelerator": how.accelerator,
        "--precision": how.precision,
        "--save-minutes": how.save_minutes,
    }
    command = [sys.executable, "-m", "rkr", "run", plan.given, "--json", "--no-figures"]
    command += [word for name, value in options.items() if value is not None for word in (name, str(value))]
    return command + (["--tensorboard"] if how.tensorboard else [])


def processor() -> str:
    """What computes, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {os.cpu_count()} cores"
    except OSError:
        pass
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def commit() -> str | None:
    """The commit of this package's source, if it runs from a checkout; with "+" if something was changed since."""
    here = Path(__file__).parent
    try:  # a package installed somewhere inside another repository is not of that repository's commit
        subprocess.run(["git", "ls-files", "--error-unmatch", __file__], cwd=here, capture_output=True, check=True)
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude", "*"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
