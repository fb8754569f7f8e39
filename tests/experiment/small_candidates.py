"""A small method with candidates, and the processes that train them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import small_runs
import torch
from small_runs import Case
from torch import Tensor, nn

from rkr.experiment.events import EpochEnd, Event
from rkr.experiment.execution import Execution
from rkr.experiment.jobs import Helpers, Job, Site, candidate_name
from rkr.experiment.loop import CandidateKey
from rkr.experiment.processes import make_fabric
from rkr.experiment.run import Run
from rkr.experiment.workers import Workers
from rkr.importing import importable
from rkr.methods import METHODS, Method
from rkr.methods.learner import MakeNetwork, Outcome, Phase, ReadSamples, SeenTask
from rkr.methods.shared.one_network import OneNetwork


class Trials(OneNetwork):
    """A branch beside the network for each task, whose width is tried. Its shape depends on the winners.

    Args:
        make: Builds the network.
        head: Its classification layer.
        tries: Rounds of each task; tasks beyond have none.
        wild: Which candidates (round, place) diverge; "all" of them.
        equal: Whether all have the same score.
        share: As `holds_out`.
    """

    log: ClassVar[list[tuple[int, str, Any]]] = []  # learner, hook, argument
    made: ClassVar[int] = 0

    def __init__(
        self,
        make: MakeNetwork,
        head: str,
        *,
        tries: Sequence[int] = (2, 0, 2),
        wild: Any = (),
        equal: bool = False,
        share: float = 0.25,
    ) -> None:
        super().__init__(make, head)
        self.tries, self.wild, self.equal, self.holds_out = tries, wild, equal, share
        self.branches = nn.ModuleDict()
        self.register_buffer("policy", torch.zeros(3))
        Trials.made += 1
        self.name = Trials.made

    def note(self, hook: str, argument: Any = None) -> None:
        Trials.log.append((self.name, hook, argument))

    def begin(self, task: SeenTask) -> None:
        super().begin(task)
        self.note("begin", task.number)
        self.register_buffer(f"memory{task.number}", torch.zeros(4, dtype=torch.int64))
        self.register_buffer(f"width{task.number}", torch.zeros((), dtype=torch.int64))

    def rounds(self) -> int:
        return self.tries[self.task.number] if self.task.number < len(self.tries) else 0

    def propose(self, number: int) -> list[Any]:
        self.note("propose", number)
        widths = (torch.randint(2, 9, (3,)) + self.policy.abs().long()).tolist()  # of the policy and of chance
        wild = [self.wild == "all" or [number, place] in [list(pair) for pair in self.wild] for place in range(3)]
        self.policy += 0.25  # a state between propose and observe
        return [
            {"width": w, "scale": 1e30 if far else 0.5, "spot": (number, place)}
            for place, (w, far) in enumerate(zip(widths, wild, strict=True))
        ]

    def adopt(self, candidate: Any) -> None:
        self.note("adopt", candidate)
        assert isinstance(candidate["spot"], list)  # as JSON has it, at any time
        number = self.task.number
        self._make_room(number, candidate["width"])
        for p in self.branches[str(number)].parameters():
            nn.init.normal_(p, std=0.1)
        self.get_buffer(f"width{number}").fill_(candidate["width"])
        self.scale = candidate["scale"]

    def score(self, candidate: Any, accuracy: float) -> float:
        self.note("score", (candidate["spot"], accuracy))
        return 1.0 if self.equal else accuracy - 0.001 * candidate["width"]

    def observe(self, number: int, candidates: list[Any], scores: list[float]) -> None:
        self.note("observe", (number, [c["spot"] for c in candidates], scores))
        finite = torch.tensor(scores).nan_to_num(neginf=-1.0)
        self.policy += finite + torch.rand(3)

    def phases(self) -> Sequence[Phase]:
        return (Phase("branch", epochs=1, lr_factor=2.0), Phase())

    def prepare(self, phase: Phase, train: ReadSamples) -> None:
        self.note("prepare", phase.name)
        dies = Path(os.environ.get("TRIALS_DIE", "nobody"))
        if dies.exists() and dies.read_text() == str(self.get_buffer("width0").item()):
            os.kill(os.getpid(), signal.SIGKILL)
        if str(self.task.number) in self.branches and phase.name == "branch":
            nn.init.normal_(self.branches[str(self.task.number)][1].bias, std=0.1)

    def rehearse(self, images: Sequence[int]) -> dict[int, Tensor | None]:
        return {**{n: self.get_buffer(f"memory{n}") for n in range(self.task.number)}, self.task.number: None}

    def groups(self) -> list[dict[str, Any]]:
        number = str(self.task.number)
        branch = [{"params": list(self.branches[number].parameters())}] if number in self.branches else []
        return [*super().groups(), *branch]

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        self.note("loss", x)
        own = y >= self.task.start  # exemplars of earlier tasks are looked at, but not learned
        logits, y = self.answers(x, self.task.number)[own], y[own]
        return self.classified(logits, y) if len(y) else Outcome(logits.sum(), logits.new_zeros(()))

    def predict(self, x: Tensor, number: int) -> Tensor:
        self.note("predict", x)
        return self.answers(x, number)

    def answers(self, x: Tensor, number: int) -> Tensor:
        self.select(number)
        logits: Tensor = self.network(x)
        if str(number) in self.branches:
            scale = self.scale if self.training else 0.5
            logits = logits + scale * self.branches[str(number)](x.to(logits))
        return logits

    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        count = sum(int((y >= self.task.start).sum()) for _, y in train())
        self.note("end", count)
        self.get_buffer(f"memory{self.task.number}").copy_(torch.randperm(count)[:4])

    def notes(self) -> dict[str, Any]:
        return {"width": int(self.get_buffer(f"width{self.task.number}")), "policy": self.policy.tolist()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        for number in range(len(self.seen)):
            if f"branches.{number}.1.weight" in state_dict:
                self._make_room(number, len(state_dict[f"branches.{number}.1.weight"]))
        return super().load_state_dict(state_dict, strict, assign)

    def _make_room(self, number: int, width: int) -> None:
        if str(number) not in self.branches or self.branches[str(number)][1].out_features != width:
            classes, like = self.seen[number].classes, next(self.network.parameters())
            layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, classes))
            self.branches[str(number)] = layers.to(like)


TRIALS = Method(Trials, "for tests", "trials")


def make_case(**changes: Any) -> Case:
    """2 rounds of 3 candidates for tasks 0 and 2, and none for task 1."""
    settings = {"settings": {"method": "trials"}, "method": "trials"}
    return small_runs.make_case("rkr", **{**settings, **changes, "learner": TRIALS})


def execute(
    folder: Path | str,
    watch: Callable[[Event], None] = lambda event: None,
    save_minutes: float = small_runs.FOREVER,
    crew: Workers | None = None,
    **changes: Any,
) -> bool:
    """A run, with candidates in processes of their own if there is a crew."""
    how = (make_fabric("cpu"), watch, Execution(save_minutes=save_minutes))
    plain = {**changes, "dtype": getattr(torch, changes["dtype"])} if "dtype" in changes else changes
    case = make_case(**plain)
    if crew is None:
        return Run(*case, Path(folder), *how).execute()
    given = {"folder": str(folder), "save_minutes": save_minutes, "changes": changes}
    importable(Path(__file__).parent)

    def job(key: CandidateKey) -> Job:
        return Job(candidate_name(key), "small_candidates:train", {**given, "key": list(key)})

    return Run(*case, Path(folder), *how, helpers=Helpers(crew, job)).execute()


def register() -> None:
    """For recipes."""
    METHODS.add(TRIALS)


def train(site: Site, folder: str, save_minutes: float, changes: dict[str, Any], key: list[int]) -> None:
    """The job of a candidate. In $TRIALS_TOGETHER two wait for each other after an epoch, and then go on slowly."""
    torch.set_num_threads(1)
    together = os.environ.get("TRIALS_TOGETHER")

    def watch(event: Event) -> None:
        site.watch(event)
        if together and isinstance(event, EpochEnd):
            Path(together, "-".join(map(str, key))).touch()
            while len(os.listdir(together)) < 2:
                time.sleep(0.02)
            time.sleep(0.5)

    run = Run(*make_case(**changes), Path(folder), make_fabric("cpu"), watch, Execution(save_minutes=save_minutes))
    run.train_candidate(CandidateKey(*key))
