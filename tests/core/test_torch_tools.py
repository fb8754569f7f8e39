"""The model under other tools of torch: distributed training and torch.func."""

import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rkr


class Net(nn.Module):
    """No BatchNorm: its statistics of half a batch are not those of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 24, 3, padding=1)
        self.fc1 = nn.Linear(24, 16)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.fc1(F.relu(self.conv(x)).mean((2, 3)))))


def train_two_tasks(rank: int, world: int) -> dict[str, Tensor]:
    """Two tasks of five steps, each process on its share of every batch."""
    torch.manual_seed(0)
    model = rkr.rectify(Net(), rank=2, head="fc").double()
    for name in ("a", "b"):
        model.add_task(name, classes=3)
        trained = DistributedDataParallel(model) if world > 1 else model
        optimizer = torch.optim.SGD(model.task_parameters(groups=True), lr=0.1, momentum=0.9)
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(8, 3, 6, 6, dtype=torch.float64, generator=generator)
            y = torch.randint(3, (8,), generator=generator)
            optimizer.zero_grad()
            F.cross_entropy(trained(x[rank::world]), y[rank::world]).backward()
            optimizer.step()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def work(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.save(train_two_tasks(rank, 2), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.set_forkserver_preload(["torch.distributed", "rkr"])  # imported once for both
    mp.start_processes(work, (port, str(tmp_path)), nprocs=2, start_method="forkserver")
    alone = train_two_tasks(0, 1)
    for rank in range(2):
        together = torch.load(tmp_path / f"{rank}.pt")
        assert together.keys() == alone.keys()
        for key, value in alone.items():
            torch.testing.assert_close(together[key], value, rtol=1e-10, atol=1e-12)


def test_gradients_of_each_sample() -> None:
    """vmap of grad over the base's parameters equals one backward pass per sample."""
    torch.manual_seed(0)
    network = Net()
    model = rkr.rectify(network, rank=2, head="fc").double()
    model.add_task("a", classes=3)
    with torch.no_grad():
        for name, p in model.named_task_parameters().items():
            if name.endswith((".rm", ".f")):
                p.normal_()
    x, y = torch.randn(4, 3, 6, 6, dtype=torch.float64), torch.randint(3, (4,))
    parameters = {k: p.detach() for k, p in network.named_parameters() if not k.startswith("fc.")}

    def loss(parameters: dict[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
        output = torch.func.functional_call(network, parameters, (sample.unsqueeze(0),))
        return F.cross_entropy(output, label.unsqueeze(0))

    for mode in (True, False):
        model.train(mode)
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
        for i in range(4):
            model.zero_grad()
            F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
            for key in parameters:
                expected = dict(network.named_parameters())[key].grad
                assert expected is not None
                torch.testing.assert_close(each[key][i], expected, rtol=1e-10, atol=1e-12)
