"""Every way in which a recipe can be wrong, and what is said: the key, what may stand there, what was meant."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rkr.cli.listing import in_words
from rkr.errors import UsageError
from rkr.experiment.recipes import load_recipe
from rkr.registry import Network, networks

Write = Callable[..., Path]
ORDERS = 'orders = [0, "A", "fixed"]'
STREAM = 'kind = "split"\nsource = "cifar100"\ntasks = 10'
METHODS = '[methods.rkr]\n\n[methods.mine]\nlearner = "rkr"\nrank = 4\n'
TRAINING_KEYS = (
    "epochs, batch, optimizer, lr, momentum, weight_decay, milestones, gamma, betas, eps, amsgrad, sampling, "
    "augment, seed, memory_format"
)
SOURCES = "cifar10, cifar100, digits, folder, imagenet, mnist"


def message(path: Path) -> str:
    """What is said about a file, without the folder that it lies in."""
    with pytest.raises(UsageError) as caught:
        load_recipe(path)
    text = str(caught.value)
    assert "\n" not in text
    assert "pydantic" not in text
    return text.replace(f"{path.parent}/", "")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        # keys
        (
            "epochs = 100",
            "epoch = 100",
            f"training.epoch: no such key; did you mean 'epochs'? The keys here are {TRAINING_KEYS}",
        ),
        ("gamma = 0.5", "cosine = true", f"training.cosine: no such key; the keys here are {TRAINING_KEYS}"),
        (
            'title = "Mine"',
            'titel = "Mine"',
            "titel: no such key; did you mean 'title'? "
            "The keys here are title, about, orders, stream, network, training, classifier, resources, methods, paper",
        ),
        (
            "flip = true",
            "flop = true",
            "training.augment.flop: no such key; did you mean 'flip'? The keys here are pad, flip, rotate",
        ),
        (
            "value = 69.58",
            "valeu = 69.58",
            "paper.valeu (entry 1): no such key; did you mean 'value'? "
            "The keys here are method, metric, value, values, spread, over, order, where",
        ),
        ('title = "Mine"', 'name = "x"\ntitle = "Mine"', "name: a recipe is called like its file; leave this key out"),
        ('title = "Mine"', "", "title: is missing"),
        ("lr = 0.01", "", "training.lr: is missing"),
        ('where = "table 1"', "", "paper.where (entry 1): is missing"),
        ("lr = 0.01\nmomentum = 0.9", "momentum = 2", "training.lr: is missing (1 more error)"),
        # types and bounds
        ("epochs = 100", "epochs = '100'", 'training.epochs: must be a whole number, not "100"'),
        ("epochs = 100", "epochs = 1.5", "training.epochs: must be a whole number, not 1.5"),
        ("epochs = 100", "epochs = true", "training.epochs: must be a whole number, not true"),
        ("epochs = 100", "epochs = 0", "training.epochs: must be at least 1, not 0"),
        ("lr = 0.01", "lr = nan", "training.lr: must be a finite number, not NaN"),
        ("lr = 0.01", "lr = '1e-2'", 'training.lr: must be a number, not "1e-2"'),
        ("lr = 0.01", "lr = -1", "training.lr: must be greater than 0, not -1"),
        ("momentum = 0.9", "momentum = 1.0", "training.momentum: must be less than 1, not 1.0"),
        ("flip = true", "flip = 1", "training.augment.flip: must be true or false, not 1"),
        ("flip = true", "rotate = 181", "training.augment.rotate: must be at most 180, not 181"),
        ("augment = { pad = 4, flip = true }", "augment = 4", "training.augment: must be a table, not 4"),
        ('title = "Mine"', "title = 3", "title: must be text in quotes, not 3"),
        ("[20, 40, 60, 80]", "20", "training.milestones: must be a list in brackets, not 20"),
        ("[20, 40, 60, 80]", "[20, 40.5]", "training.milestones (entry 2): must be a whole number, not 40.5"),
        ("tasks = 10", "tasks = 10\nvalidation = 1", "stream.validation: must be less than 1, not 1"),
        ("tasks = 10", "tasks = 10\nlimit = 0", "stream.limit: must be at least 1, not 0"),
        # training
        (
            "lr = 0.01",
            "lr = 0.01\noptimizer = 'smd'",
            "training.optimizer: must not be \"smd\"; did you mean 'sgd'? Choose one of sgd, adam",
        ),
        (
            "lr = 0.01",
            "lr = 0.01\noptimizer = 'adam'",
            "training.momentum: adam has no momentum; leave it out, or choose optimizer 'sgd'",
        ),
        (
            "epochs = 100",
            "epochs = 80",
            "training.milestones: 80 is not within the 80 epochs of training; choose from 1 to 79",
        ),
        ("[20, 40, 60, 80]", "[40, 20]", "training.milestones: must ascend, unlike [40, 20]"),
        (
            "gamma = 0.5",
            "memory_format = 'nchw'",
            'training.memory_format: must not be "nchw"; choose one of contiguous, channels_last',
        ),
        # stream and orders
        (
            'kind = "split"',
            'kind = "splitt"',
            "stream.kind: must not be \"splitt\"; did you mean 'split'? "
            "Choose one of split, split-cifar, mnist-then, zero-shot",
        ),
        (
            'source = "cifar100"',
            'source = "cifar-100"',
            f"stream.source: no dataset is called 'cifar-100'; did you mean 'cifar100'? Choose one of {SOURCES}",
        ),
        (
            "tasks = 10",
            "tasks = 7",
            "stream.tasks: the 100 classes of cifar100 cannot be divided into 7 equal parts; "
            "choose one of 1, 2, 4, 5, 10, 20, 25, 50, 100 tasks in all",
        ),
        (
            STREAM,
            'kind = "mnist-then"\nsource = "cifar100"\ntasks = 10',
            "stream.tasks: after MNIST, the 100 classes of cifar100 cannot be divided into 9 equal parts; "
            "choose one of 2, 3, 5, 6, 11, 21, 26, 51, 101 tasks in all",
        ),
        (
            STREAM,
            'kind = "split-cifar"\nsource = "cifar100"\ntasks = 12',
            "stream.tasks: after CIFAR-10, the 100 classes of cifar100 cannot be divided into 11 groups of 10; "
            "choose one of 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 tasks in all",
        ),
        (
            STREAM,
            'kind = "split-cifar"\nsource = "digits"\ntasks = 6',
            "stream.source: must be cifar100 with kind 'split-cifar'",
        ),
        (
            STREAM,
            'kind = "split-cifar"\nsource = "cifar100"\ntasks = 6',
            "orders: the published order 'A' is for cifar100 in 10 tasks, not for cifar100 in 5 (split-cifar); "
            "give a seed (0, 1, ...) or 'fixed'",
        ),
        (
            "tasks = 10",
            "tasks = 20",
            "orders: the published order 'A' is for cifar100 in 10 tasks, not for cifar100 in 20 (split); "
            "give a seed (0, 1, ...) or 'fixed'",
        ),
        (
            'source = "cifar100"',
            'source = "imagenet"',
            "orders: the published order 'A' is for cifar100 in 10 tasks, not for imagenet in 10 (split); "
            "give a seed (0, 1, ...) or 'fixed'",
        ),
        (ORDERS, "orders = []", "orders: must not be empty"),
        (ORDERS, "orders = 5", "orders: must be a list in brackets, not 5"),
        (ORDERS, "orders = ['F']", "orders: no order 'F'; give a seed (0, 1, ...), A, B, C, D, E or 'fixed'"),
        (ORDERS, "orders = [-1]", "orders: a seed must be at least 0, not -1"),
        (ORDERS, "orders = [1.5]", "orders: an order is a seed, a letter or 'fixed', not 1.5"),
        (ORDERS, "orders = [true]", "orders: an order is a seed, a letter or 'fixed', not true"),
        (ORDERS, "orders = [1, 2, 1]", "orders: 1 comes more than once"),
        # options of sources
        (
            "tasks = 10",
            "tasks = 10\noptions = { size = 32 }",
            "stream.options.size: cifar100 has no such option; it has none",
        ),
        (
            STREAM,
            'source = "folder"\ntasks = 10\noptions = { siez = 32 }',
            "stream.options.siez: folder has no such option; did you mean 'size'? "
            "Choose one of path, size, resident, test, seed, name",
        ),
        (
            STREAM,
            'source = "folder"\ntasks = 10\noptions = { size = "big" }',
            'stream.options.size: must be a whole number, not "big"',
        ),
        # networks
        (
            'name = "lenet"',
            'name = "lenett"',
            "network.name: no network is called 'lenett'; did you mean 'lenet'? "
            "Choose one of cada-vae, digits-net, lenet, resnet18, resnet32",
        ),
        (
            'name = "lenet"',
            'name = "resnet18"\nstm = "cifar"',
            "network.stm: resnet18 has no such option; did you mean 'stem'? Choose one of name, head, classes, stem, "
            "width",
        ),
        (
            'name = "lenet"',
            'name = "resnet18"\nstem = "big"',
            'network.stem: must not be "big"; choose one of cifar, imagenet',
        ),
        ("classes = 100", "classes = '100'", 'network.classes: must be a whole number, not "100"'),
        ("classes = 100", "classes = 0", "network: classes must be at least 1, but is 0."),
        (
            "classes = 100",
            "head = 'fc3'",
            "network.head: lenet has no linear layer 'fc3'; did you mean 'fc'? Choose one of fc1, fc2, fc",
        ),
        # methods
        ('learner = "rkr"', "learner = 3", "methods.mine.learner: must be text in quotes, not 3"),
        ("rank = 4", "rank = 0", "methods.mine.rank: must be at least 1, not 0"),
        (
            "rank = 4",
            "bn = 'shared'",
            'methods.mine.bn: must not be "shared"; choose one of auto, per_task, stats, affine, frozen',
        ),
        ('learner = "rkr"', 'learner = "finetune"', "methods.mine.rank: finetune has no such option; choose one of bn"),
        (METHODS, "[methods]\n", "methods: must not be empty"),
        (METHODS, "[methods]\nrkr = 4\n", "methods.rkr: must be a table, not 4"),
        # resources
        (
            METHODS,
            METHODS + "[resources]\ngpu = 1\n",
            "resources.gpu: no such key; did you mean 'gpus'? The keys here are threads, gpus, memory",
        ),
        (METHODS, METHODS + "[resources]\nthreads = 0\n", "resources.threads: must be at least 1, not 0"),
        (
            METHODS,
            METHODS + "[resources]\ngpus = 1.5\n",
            "resources.gpus: must be from 0 to 1, or a whole number, not 1.5",
        ),
        (
            METHODS,
            METHODS + "[resources]\ngpus = -1\n",
            "resources.gpus: must be from 0 to 1, or a whole number, not -1",
        ),
        (METHODS, METHODS + "[resources]\nmemory = 4\n", "resources.memory: must be text in quotes, not 4"),
        (
            METHODS,
            METHODS + "[resources]\nmemory = '4 bytes'\n",
            'resources.memory: must be a size such as 4GB, not "4 bytes"',
        ),
        # the paper's numbers
        (
            "value = 69.58",
            "metric = 'accuracy'\nvalue = 69.58",
            "paper.metric (entry 1): must not be \"accuracy\"; did you mean 'average accuracy'? Choose one of "
            "average accuracy, top-5 running mean, capacity, parameters per task, multiply-adds, U, S, H",
        ),
        (
            "value = 69.58",
            "values = [1.0]",
            "paper.value (entry 1): 'average accuracy' needs 'value', and not 'values'",
        ),
        (
            "value = 69.58",
            "metric = 'top-5 running mean'\nvalues = [1.0, 2.0]",
            "paper.values: 2 values of rkr for 10 tasks",
        ),
    ],
)
def test_message(write: Write, old: str, new: str, said: str) -> None:
    assert message(write((old, new))) == f"my.toml: {said}"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ('source = "mnist"\ntasks = 5', "lenet is for images of 3x32x32, but those of mnist are 1x28x28"),
        (
            'source = "folder"\ntasks = 5\noptions = { size = 48 }',
            "lenet is for images of 3x32x32, but those of folder are 3x48x48",
        ),
    ],
)
def test_a_network_that_does_not_fit_the_images(write: Write, source: str, said: str) -> None:
    assert message(write((ORDERS, "orders = [0]"), (STREAM, source))) == f"my.toml: network: {said}"


def test_a_network_that_must_be_told_its_size(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(classes: int, width: int = 3) -> object:
        raise AssertionError("is not built")

    monkeypatch.setitem(networks._others, "mine", Network(mine, "of a user's own", "mine"))
    with pytest.raises(UsageError, match=r"network\.classes: is missing: mine has no default for it"):
        load_recipe(str(write(('name = "lenet"\nclasses = 100', 'name = "mine"'))))
    assert in_words("mine").endswith("  classes = null\n  width = 3")


def test_files_are_not_rotated(write: Write) -> None:
    changes = [(ORDERS, "orders = [0]"), ("flip = true", "rotate = 10")]
    folder = 'source = "folder"\ntasks = 5\noptions = { size = 32 }'
    said = "training.augment.rotate: folder is read from files, which are not rotated"
    assert message(write(*changes, (STREAM, folder))) == f"my.toml: {said}"
    resident = folder.replace("32", "32, resident = true")
    assert load_recipe(write(*changes, (STREAM, resident))).training.augment.rotate == 10


@pytest.mark.parametrize(
    ("old", "new", "start"),
    [
        ('learner = "rkr"', 'learner = "rrk"', "methods.mine.learner: no method is called 'rrk'; did you mean 'rkr'?"),
        ("[methods.rkr]", "[methods.rkr-lit]", "methods.rkr-lit.learner: no method is called 'rkr-lit'; did you mean"),
        ("[methods.mine]", "[methods.'../mine']", "methods.../mine: a method's name has letters, digits"),
        ("rank = 4", "rnak = 4", "methods.mine.rnak: rkr has no such option; did you mean 'rank'? Choose one of init,"),
    ],
)
def test_methods_and_their_options_are_known(write: Write, old: str, new: str, start: str) -> None:
    assert message(write((old, new))).startswith(f"my.toml: {start}")


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("lr = 0.01", "lr =", 15),
        ("lr = 0.01", "lr = 0.01\nlr = 0.02", 16),
        ("[network]", "[network", 9),
        ('where = "table 1"\n', 'where = """table 1', 30),
    ],
)
def test_syntax_errors_name_the_line(write: Write, old: str, new: str, line: int) -> None:
    text = message(write((old, new)))
    assert text.startswith(f"my.toml: line {line}: ")
    assert "(at " not in text


def test_no_such_recipe(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^no recipe 'cifar100-lnet'; did you mean 'cifar100-lenet'\? Choose one of "):
        load_recipe("cifar100-lnet")
    with pytest.raises(UsageError, match=r"there\.toml: cannot be read: No such file"):
        load_recipe(tmp_path / "there.toml")
    with pytest.raises(UsageError, match="cannot be read"):
        load_recipe(tmp_path)
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b'title = "\xe9"')
    with pytest.raises(UsageError, match="is not a text file in UTF-8"):
        load_recipe(latin)
