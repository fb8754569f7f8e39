"""RCL, Reinforced Continual Learning (Xu & Zhu, NeurIPS 2018): a policy chooses how many units each task adds.

Every task adds units to the layers and trains only these. A recurrent policy proposes their numbers. Each proposal is
trained, and its reward is the accuracy on held-out samples minus a penalty on its size. The policy learns from the
rewards by REINFORCE, and the best proposal is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rkr.core import Adapter
from rkr.errors import UsageError
from rkr.methods.growth.growth import Growth
from rkr.methods.learner import MakeNetwork, SeenTask
from rkr.methods.shared.growing import Growing
from rkr.registry import register

BETAS = (0.9, 0.999)  # of Adam
EPS = 1e-8
INIT = 0.08  # bound of the policy's first weights


class Controller(nn.Module):
    """The policy and its baseline (section 3).

    An LSTM of two layers makes one step for every layer of the network. It starts from a fixed random vector, the
    state; each step's probabilities are the next step's input. So the choices for the layers are independent, and the
    policy is a table of probabilities. The baseline is linear in the state. Both are trained by Adam, implemented here
    because its moments are part of the learner's state.

    Args:
        layers: Number of choices of an action.
        actions: Number of alternatives of each choice.
        hidden: Width of the LSTM.
        policy_lr: Learning rate of the policy.
        value_lr: Learning rate of the baseline.
    """

    state: Tensor
    mean: Tensor
    square: Tensor
    steps: Tensor

    def __init__(
        self, layers: int, actions: int, hidden: int = 100, policy_lr: float = 1e-3, value_lr: float = 5e-3
    ) -> None:
        super().__init__()
        self.layers = layers
        self.lstm = nn.LSTM(actions, hidden, num_layers=2)
        self.choice = nn.Linear(hidden, actions)
        for p in self.parameters():
            nn.init.uniform_(p, -INIT, INIT)  # near 0: at first all actions are about as likely
        self.value = nn.Linear(actions, 1)
        self._rates = [value_lr if name.startswith("value.") else policy_lr for name, _ in self.named_parameters()]
        self.register_buffer("state", torch.randn(actions))
        size = sum(p.numel() for p in self.parameters())
        self.register_buffer("mean", torch.zeros(size))  # of gradients, all in a row
        self.register_buffer("square", torch.zeros(size))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self) -> Tensor:
        """Logarithms of the probabilities of each choice, (L, A)."""
        x, memory, found = self.state[None], None, []
        for _ in range(self.layers):
            h, memory = self.lstm(x, memory)  # (1, H): a sequence of one
            found.append(self.choice(h).log_softmax(1))
            x = found[-1].exp()
        return torch.cat(found)

    def sample(self, draws: Tensor) -> list[list[int]]:
        """Sample actions (M, L) by inverse transform from uniform numbers in 0 to 1."""
        with torch.no_grad():
            upto = self().double().exp().cumsum(1)  # (L, A)
        picked = (draws.to(upto)[..., None] >= upto[:, :-1]).sum(-1)
        found: list[list[int]] = picked.tolist()
        return found

    def losses(self, actions: Sequence[Sequence[int]], rewards: Tensor) -> tuple[Tensor, Tensor]:
        """The losses of policy and baseline for actions and their rewards.

        The first is REINFORCE's, whose gradient is the mean of -(R - b) ∇log π(a); the second is the squared error of
        b.
        """
        logs = self()[torch.arange(self.layers), torch.tensor(actions)].sum(1)  # (M,)
        baseline = self.value(self.state)
        return -((rewards - baseline.detach()) * logs).mean(), (rewards - baseline).square().mean()

    @torch.enable_grad()
    def learn(self, actions: Sequence[Sequence[int]], rewards: Sequence[float]) -> None:
        """One step of Adam for policy and baseline."""
        parameters = list(self.parameters())
        policy, value = self.losses(actions, self.state.new_tensor(rewards))
        gradients = torch.autograd.grad(policy + value, parameters)
        flat = torch.cat([g.flatten() for g in gradients])
        self.steps += 1
        self.mean.lerp_(flat, 1 - BETAS[0])
        self.square.lerp_(flat.square(), 1 - BETAS[1])
        mean, square = (m / (1 - b ** int(self.steps)) for m, b in zip((self.mean, self.square), BETAS, strict=True))
        moves = (mean / (square.sqrt() + EPS)).split([p.numel() for p in parameters])
        with torch.no_grad():
            for p, move, lr in zip(parameters, moves, self._rates, strict=True):
                p.sub_(lr * move.view_as(p))


@register.method(
    "rcl",
    "RCL: a policy searches how much wider a task makes each layer",
    citation="Xu & Zhu, NeurIPS 2018",
    search={"trials": 50},
)
class ReinforcedLearning(Growing):
    """Add the units that a policy proposes, keep the best proposal, and train only what is new.

    The first task trains the plain network. Later tasks train the weights of new units, weights with new units as
    inputs, their own batch normalisation and head. Weights between earlier units, and their biases, are frozen. Each
    task has a new policy. All proposals of a round come from the same policy, which is updated after the round. Sizes
    are chosen for each set of channels that must have one width (`growth/widths.py`): each layer of a LeNet, but a
    residual stream as a whole. The published size (181 % on LeNet) comes from small additions, so by default a step of
    an action is a share of the width: actions drawn evenly give about that size.

    Args:
        make: Builds the network.
        head: Its classification layer.
        trials: Number of proposals per task. The paper has 50, so it trains each task 50 times.
        parallel: Number of proposals per round, which can be trained at the same time; 1 in the paper.
        actions: Number of alternatives for each size: 0 to `actions` - 1 steps.
        unit: Size of a step as a share of the layer's width; totals are rounded. "absolute": one unit, as in the paper.
        penalty: Subtracted from a proposal's accuracy for each new unit.
        hidden: Width of the policy's LSTM.
        policy_lr: Learning rate of the policy.
        value_lr: Learning rate of its baseline.
    """

    checked = "The authors' code (xujinfan/Reinforced-Continual-Learning), which has fully connected networks only."
    differs = (
        "10 trials in 5 rounds of 2 by default (there: 50, one by one).",
        "A tenth of a task's training samples is held out to judge trials (the validation part where a recipe has "
        "one), and the winner is not trained again on all.",
    )

    isolating = True
    learns_its_size = "this is before it"

    def __init__(
        self,
        make: MakeNetwork,
        head: str,
        *,
        trials: int = 10,
        parallel: int = 2,
        actions: int = 30,
        unit: float | str = 0.0026,
        penalty: float = 1e-4,
        hidden: int = 100,
        policy_lr: float = 1e-3,
        value_lr: float = 5e-3,
    ) -> None:
        least = {"trials": (trials, 1), "parallel": (parallel, 1), "hidden": (hidden, 1), "actions": (actions, 2)}
        for name, (count, lowest) in least.items():
            if count < lowest:
                raise UsageError(f"{name} must be at least {lowest}, not {count}")
        share = isinstance(unit, int | float) and not isinstance(unit, bool) and 0 < unit <= 1
        if unit != "absolute" and not share:
            raise UsageError(f'unit must be a share of the width, above 0 and at most 1, or "absolute", not {unit!r}')
        for name, number in (("penalty", penalty), ("policy_lr", policy_lr), ("value_lr", value_lr)):
            if number < 0:
                raise UsageError(f"{name} must not be negative, but is {number}")
        growth = Growth(make(), head, "RCL")
        if not growth.spaces.growing:
            raise UsageError(f"RCL needs layers besides the head {head!r} that can become wider, and there are none")
        super().__init__(make, head, growth)
        self.trials, self.parallel, self.actions = trials, parallel, actions
        self.unit, self.penalty = unit, penalty
        self._controls = hidden, policy_lr, value_lr
        self.controller: Controller | None = None
        self.draws: Tensor | None
        self.register_buffer("draws", None)

    def begin(self, task: SeenTask) -> None:
        super().begin(task)
        if task.number:
            layers = len(self.growth.spaces.growing)
            self.controller = Controller(layers, self.actions, *self._controls)
            self.draws = torch.rand(self.trials, layers)  # kept, so that proposals depend on the state alone

    # -- candidates: actions, a list of one for each space --------------------------------------------------

    def rounds(self) -> int:
        return -(-self.trials // self.parallel) if self.task.number else 0

    def propose(self, number: int) -> list[Any]:
        assert self.controller is not None
        assert self.draws is not None
        return self.controller.sample(self.draws[number * self.parallel :][: self.parallel])

    def units(self, candidate: Sequence[int]) -> dict[str, int]:
        """How many units actions add to each space."""
        found = {}
        for action, space in zip(candidate, self.growth.spaces.growing, strict=True):
            found[space.name] = action if isinstance(self.unit, str) else round(action * self.unit * space.width)
        return found

    def adopt(self, candidate: Any) -> None:
        self.growth.grow(self.model, self.units(candidate))
        self.model.set_task(self.task.name)

    def score(self, candidate: Any, accuracy: float) -> float:
        """The reward: accuracy, less α for every unit that it costs."""
        return accuracy - self.penalty * sum(self.units(candidate).values())

    def observe(self, number: int, candidates: list[Any], scores: list[float]) -> None:
        assert self.controller is not None
        worst = [self.score(candidate, 0.0) for candidate in candidates]  # a diverged candidate scores no less
        self.controller.learn(candidates, [max(pair) for pair in zip(scores, worst, strict=True)])

    # -- training ---------------------------------------------------------------------------------------------

    def held(self, site: Adapter) -> Tensor | None:
        if not self.task.number:
            return None
        rows, columns = self.born(site)
        return (rows < self.task.number) & (columns < self.task.number)

    def held_bias(self, site: Adapter) -> Tensor | None:
        return self.born(site)[0][:, 0] < self.task.number if self.task.number else None

    def notes(self) -> dict[str, Any]:
        spaces, number = self.growth.spaces.growing, self.task.number
        if not number:
            return {}
        return {"units": {space.name: int((self.growth.times(space)[0] == number).sum()) for space in spaces}}
